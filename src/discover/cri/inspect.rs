//! What CRI's answers say, as records and names.

use std::collections::HashMap;
use std::sync::Arc;

use serde::Deserialize;

use super::messages::{Container, ContainerStatusResponse, PodSandbox};
use super::{RUNTIME, unix_seconds};
use crate::config::{CriSettings, Filter};
use crate::discover::{ContainerId, Named, Pod, Record};
use crate::series::bounded;

/// Says where the kubelet has a pod from.
const SOURCE: &str = "kubernetes.io/config.source";
/// The name under which the ledger knows the pause process of a pod, as cAdvisor calls it.
const SANDBOX: &str = "POD";

/// A pod, as its sandbox tells it.
#[derive(Clone, Debug)]
pub struct Sandbox {
    /// Without an attempt, which is a container's.
    pub pod: Pod,
    /// All its labels, for `--container.label`.
    labels: HashMap<String, String>,
}

/// What the runtime was told to start, and what came of it.
#[derive(Debug, Default, PartialEq)]
pub struct Started {
    /// Host pid of the first process.
    pub pid: Option<u32>,
    /// Its environment; only what is allowed leaves it.
    environment: Vec<String>,
    memory_min_bytes: Option<u64>,
}

impl Sandbox {
    /// Reads one; `None` without the name of its pod.
    pub fn read(sandbox: PodSandbox, settings: &CriSettings) -> Option<Self> {
        let metadata = sandbox.metadata?;
        let mut labels = allowed(&settings.labels, &sandbox.labels);
        labels.extend(allowed(&settings.annotations, &sandbox.annotations));
        labels.sort();
        labels.dedup_by(|later, first| later.0 == first.0);
        let pod = Pod {
            namespace: bounded(&metadata.namespace),
            name: bounded(&metadata.name),
            uid: bounded(&metadata.uid),
            attempt: 0,
            source: sandbox.annotations.get(SOURCE).map_or("".into(), |source| bounded(source)),
            labels,
            memory_min_bytes: None,
        };
        Some(Self { pod, labels: sandbox.labels })
    }

    /// Who its pause process is, for the ledger.
    pub fn named(&self, filter: &Filter) -> Named {
        Named {
            name: SANDBOX.into(),
            pod: Some(Arc::new(self.pod.clone())),
            image: "".into(),
            labels_match: filter.labels_match(&self.labels),
        }
    }
}

fn allowed(wanted: &[(String, Arc<str>)], all: &HashMap<String, String>) -> Vec<(Arc<str>, Arc<str>)> {
    let found = wanted.iter().filter_map(|(key, label)| Some((Arc::clone(label), bounded(all.get(key)?))));
    found.filter(|(_, value)| !value.is_empty()).collect()
}

/// Who a container is, by the list; `None` without a name. It has no start.
pub fn record(container: &Container, sandbox: Option<&Sandbox>, filter: &Filter) -> Option<Record> {
    let metadata = container.metadata.as_ref()?;
    let label = |key: &str| bounded(container.labels.get(key).map_or("", String::as_str));
    let pod = match sandbox {
        Some(sandbox) => sandbox.pod.clone(),
        // its sandbox is being removed: the kubelet's own labels say it too
        None => Pod {
            namespace: label("io.kubernetes.pod.namespace"),
            name: label("io.kubernetes.pod.name"),
            uid: label("io.kubernetes.pod.uid"),
            attempt: 0,
            source: "".into(),
            labels: vec![],
            memory_min_bytes: None,
        },
    };
    let mut labels = container.labels.clone();
    labels.extend(sandbox.iter().flat_map(|sandbox| sandbox.labels.clone()));
    Some(Record {
        id: ContainerId::new(&container.id),
        runtime: RUNTIME,
        name: bounded(&metadata.name).to_string(),
        pod: Some(Arc::new(Pod { attempt: metadata.attempt, ..pod })),
        image: image(container.image.as_ref().map(|image| (&*image.user_specified_image, &*image.image))),
        compose_project: "".into(),
        compose_service: "".into(),
        settings: vec![],
        gpus: Arc::default(),
        started: None,
        labels_match: filter.labels_match(&labels),
    })
}

fn image(image: Option<(&str, &str)>) -> Arc<str> {
    image.map_or("".into(), |(asked, found)| bounded(if asked.is_empty() { found } else { asked }))
}

/// Adds to a record what the answer to a question about it says.
pub fn complete(record: &mut Record, answer: &ContainerStatusResponse, filter: &Filter) -> Started {
    let started = started(answer);
    if let Some(status) = &answer.status {
        record.started = unix_seconds(status.started_at);
        // the list may have the image's id where this has its name
        let told = status.image.as_ref().map(|image| (&*image.user_specified_image, &*image.image));
        if told.is_some_and(|(asked, found)| !asked.is_empty() || !found.is_empty()) {
            record.image = image(told);
        }
    }
    record.settings = filter.settings_of(started.environment.iter().map(String::as_str));
    if let (Some(bytes), Some(pod)) = (started.memory_min_bytes, &record.pod) {
        record.pod = Some(Arc::new(Pod { memory_min_bytes: Some(bytes), ..Pod::clone(pod) }));
    }
    started
}

/// What containerd and CRI-O tell beyond CRI, each in a form of its own that has these parts in common.
fn started(answer: &ContainerStatusResponse) -> Started {
    #[derive(Default, Deserialize)]
    #[serde(default, rename_all = "camelCase")]
    struct Info {
        pid: u32,
        runtime_spec: Spec,
    }
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Spec {
        process: Process,
        linux: Linux,
    }
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Process {
        env: Vec<String>,
    }
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Linux {
        resources: Resources,
    }
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Resources {
        unified: HashMap<String, String>,
    }
    let info = answer.info.get("info").and_then(|text| serde_json::from_str::<Info>(text).ok());
    let Some(info) = info else { return Started::default() };
    Started {
        pid: Some(info.pid).filter(|pid| *pid > 0),
        environment: info.runtime_spec.process.env,
        memory_min_bytes: info
            .runtime_spec
            .linux
            .resources
            .unified
            .get("memory.min")
            .and_then(|bytes| bytes.parse().ok()),
    }
}
