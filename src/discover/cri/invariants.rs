//! Properties that hold for any response of a runtime over CRI and of the kubelet over pod-resources. The property tests below
//! and the fuzzer (`fuzz/`) call the same function.

use prost::Message;

use super::convert::{Sandbox, complete, record};
use super::messages::{ContainerStatusResponse, ListContainersResponse, ListPodSandboxResponse};
use super::pod_resources;
use crate::config::{CriSettings, Filter};
use crate::discover::ContainerRecord;

/// Checks any message that the bytes can be decoded as.
pub fn response(bytes: &[u8]) {
    let settings = CriSettings {
        sockets: vec![],
        is_explicit: false,
        labels: vec![("app".to_owned(), "label_app".into())],
        annotations: vec![],
        pod_logs: "".into(),
        pod_resources: None,
    };
    let filter = Filter { settings: vec!["BATCH_SIZE".into()], ..Filter::default() };
    let pods = ListPodSandboxResponse::decode(bytes).map(|list| list.items).unwrap_or_default();
    let pods: Vec<_> = pods.into_iter().filter_map(|pod| Sandbox::read(pod, &settings)).collect();
    for pod in &pods {
        assert_eq!(&*pod.spec(&filter).name, "POD");
    }
    for container in ListContainersResponse::decode(bytes).map(|list| list.containers).unwrap_or_default() {
        let Some(mut record) = record(&container, pods.first(), &filter) else { continue };
        check_record(&record);
        if let Ok(status) = ContainerStatusResponse::decode(bytes) {
            let started = complete(&mut record, &status, &filter);
            assert!(started.pid != Some(0), "0 is no pid");
            check_record(&record);
        }
    }
    pod_resources::check_invariants(bytes);
}

fn check_record(record: &ContainerRecord) {
    let mut texts = vec![&*record.spec.name, &record.spec.image];
    if let Some(pod) = &record.spec.pod {
        texts.extend([&*pod.namespace, &pod.name, &pod.uid, &pod.source]);
        texts.extend(pod.labels.iter().map(|(_, value)| &**value));
    }
    assert!(texts.iter().all(|text| text.chars().count() <= 256), "{record:?}");
    assert!(record.started.is_none_or(|at| at > 0.0));
    assert!(record.spec.settings.iter().all(|(name, _)| &**name == "batch_size"), "{record:?}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::cri::messages::{
        Container, ContainerMetadata, ContainerStatus, PodSandbox, PodSandboxMetadata,
    };
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn text() -> impl Strategy<Value = String> {
        prop_oneof![4 => ".{0,8}", 1 => Just("x".repeat(300)), 1 => Just(r#"{"pid": 7, "runtimeSpec": {"process": {"env": ["BATCH_SIZE=3"]}}}"#.to_owned())]
    }

    fn map() -> impl Strategy<Value = HashMap<String, String>> {
        proptest::collection::hash_map(
            prop_oneof![Just("app".to_owned()), Just("info".to_owned()), text()],
            text(),
            0..4,
        )
    }

    proptest! {
        #[test]
        fn invariants_hold_for_any_bytes(bytes: Vec<u8>) {
            response(&bytes);
        }

        #[test]
        fn invariants_hold_for_any_response_and_its_prefixes(name in text(), id in text(), labels in map(), annotations in map(),
            info in map(), attempt: u32, at: i64, end: proptest::sample::Index) {
            let metadata = PodSandboxMetadata { name: name.clone(), uid: id.clone(), namespace: name.clone() };
            let pod = PodSandbox { id: id.clone(), created_at: 0, metadata: Some(metadata), labels: labels.clone(), annotations };
            let container = Container { id, metadata: Some(ContainerMetadata { name, attempt }), labels, created_at: at, ..Container::default() };
            let status = ContainerStatus { started_at: at, finished_at: at, ..ContainerStatus::default() };
            for bytes in [
                ListPodSandboxResponse { items: vec![pod] }.encode_to_vec(),
                ListContainersResponse { containers: vec![container.clone()] }.encode_to_vec(),
                ContainerStatusResponse { status: Some(status.clone()), info: info.clone() }.encode_to_vec(),
            ] {
                response(&bytes);
                response(&bytes[..end.index(bytes.len() + 1)]);
            }
            let filter = Filter { settings: vec!["BATCH_SIZE".into()], ..Filter::default() };
            if let Some(mut found) = record(&container, None, &filter) {
                complete(&mut found, &ContainerStatusResponse { status: Some(status), info }, &filter);
                check_record(&found);
            }
        }
    }
}
