//! Converts CRI responses into container records and pods.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::messages::{Container, ContainerStatusResponse, PodSandbox};
use super::unix_seconds;
use crate::config::{CriSettings, Filter, merged};
use crate::discover::device_allocations::SandboxedPod;
use crate::discover::{ContainerRecord, ContainerSpec, Pod, RuntimeKind};
use crate::text::bounded;

/// Label with the Job that created a pod.
const JOB_NAME: &str = "batch.kubernetes.io/job-name";
/// Annotation with the source of a pod.
const SOURCE_ANNOTATION: &str = "kubernetes.io/config.source";
/// The file of a cgroup whose value a pod's specification can set.
const MEMORY_MIN: &str = "memory.min";
/// Maximum length of a setting's name and value, of which less is shown.
const MAX_SETTING_CHARS: usize = 2_048;
/// Name of a pod's pause process in the ledger, the same as cAdvisor's.
const SANDBOX_NAME: &str = "POD";

/// A pod, from its sandbox.
#[derive(Clone, Debug)]
pub struct Sandbox {
    /// Without an attempt number: only containers have one.
    pub pod: Pod,
    /// Nanoseconds since 1970.
    created_at: i64,
    /// All its labels, for `--container.label`.
    labels: HashMap<String, String>,
}

/// Start details of a container.
#[derive(Debug, Default, PartialEq)]
pub struct Started {
    /// Host pid of the first process.
    pub pid: Option<u32>,
    /// Its environment; only allow-listed variables are used.
    environment: Vec<String>,
    memory_min_bytes: Option<u64>,
}

impl Sandbox {
    /// Reads a sandbox; `None` without the name of its pod.
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
            job: sandbox.labels.get(JOB_NAME).map_or("".into(), |job| bounded(job)),
            source: sandbox.annotations.get(SOURCE_ANNOTATION).map_or("".into(), |source| bounded(source)),
            labels,
            ..Pod::default()
        };
        Some(Self { pod, created_at: sandbox.created_at, labels: sandbox.labels })
    }

    /// Returns what its pause process is, for the ledger.
    pub fn spec(&self, filter: &Filter) -> ContainerSpec {
        ContainerSpec {
            name: SANDBOX_NAME.into(),
            pod: Some(Arc::new(self.pod.clone())),
            labels_match: filter.labels_match(&self.labels),
            ..ContainerSpec::default()
        }
    }

    /// Returns the pod that it is of.
    pub fn sandboxed_pod(&self, filter: &Filter) -> SandboxedPod {
        SandboxedPod {
            pod: Arc::new(self.pod.clone()),
            labels_match: filter.labels_match(&self.labels),
            owners: filter.owners(&self.labels),
            created_at: self.created_at,
        }
    }
}

fn allowed(wanted: &[(String, Arc<str>)], all: &HashMap<String, String>) -> Vec<(Arc<str>, Arc<str>)> {
    let found = wanted.iter().filter_map(|(key, label)| Some((Arc::clone(label), bounded(all.get(key)?))));
    found.filter(|(_, value)| !value.is_empty()).collect()
}

/// Creates the record of a listed container, without a start time; `None` without a name.
pub fn record(container: &Container, sandbox: Option<&Sandbox>, filter: &Filter) -> Option<ContainerRecord> {
    let metadata = container.metadata.as_ref()?;
    let label = |key: &str| bounded(container.labels.get(key).map_or("", String::as_str));
    let pod = match sandbox {
        Some(sandbox) => sandbox.pod.clone(),
        // its sandbox is being removed: the kubelet's own labels have the same data
        None => Pod {
            namespace: label("io.kubernetes.pod.namespace"),
            name: label("io.kubernetes.pod.name"),
            uid: label("io.kubernetes.pod.uid"),
            job: label(JOB_NAME),
            ..Pod::default()
        },
    };
    let mut labels = container.labels.clone();
    labels.extend(sandbox.iter().flat_map(|sandbox| sandbox.labels.clone()));
    let spec = ContainerSpec {
        pod: Some(Arc::new(Pod { attempt: metadata.attempt, ..pod })),
        compose_project: Arc::default(),
        compose_service: Arc::default(),
        image: image(container.image.as_ref().map(|image| (&*image.user_specified_image, &*image.image))),
        user: Some(0),
        ..ContainerSpec::labelled([&metadata.name, ""], &labels, filter)
    };
    Some(ContainerRecord::new(&container.id, RuntimeKind::Cri, spec))
}

fn image(image: Option<(&str, &str)>) -> Arc<str> {
    image.map_or("".into(), |(requested, resolved)| {
        bounded(if requested.is_empty() { resolved } else { requested })
    })
}

/// Adds the data of a status response to a record.
pub fn complete(
    record: &mut ContainerRecord,
    response: &ContainerStatusResponse,
    filter: &Filter,
) -> Started {
    let started = parse_info(response);
    let spec = Arc::make_mut(&mut record.spec);
    if let Some(status) = &response.status {
        record.started = unix_seconds(status.started_at);
        // the list may have the image's id where the status has its name
        let image_names = status.image.as_ref().map(|image| (&*image.user_specified_image, &*image.image));
        if image_names.is_some_and(|(requested, resolved)| !requested.is_empty() || !resolved.is_empty()) {
            spec.image = image(image_names);
        }
    }
    record.pid = started.pid;
    let of_labels = std::mem::take(&mut spec.settings);
    let of_environment = filter.settings_of(started.environment.iter().map(String::as_str));
    spec.settings = merged(of_labels, of_environment);
    if let (Some(bytes), Some(pod)) = (started.memory_min_bytes, &spec.pod) {
        spec.pod = Some(Arc::new(Pod { memory_min_bytes: Some(bytes), ..Pod::clone(pod) }));
    }
    started
}

/// `info`, the extension of containerd and CRI-O: these fields are common to both forms.
#[derive(Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
struct StatusInfo {
    pid: u32,
    runtime_spec: RuntimeSpec,
}

#[derive(Default, Deserialize, Serialize)]
#[serde(default)]
struct RuntimeSpec {
    process: SpecProcess,
    linux: SpecLinux,
}

#[derive(Default, Deserialize, Serialize)]
#[serde(default)]
struct SpecProcess {
    env: Vec<String>,
}

#[derive(Default, Deserialize, Serialize)]
#[serde(default)]
struct SpecLinux {
    resources: SpecResources,
}

#[derive(Default, Deserialize, Serialize)]
#[serde(default)]
struct SpecResources {
    unified: HashMap<String, String>,
}

const INFO_KEY: &str = "info";

fn info_of(response: &ContainerStatusResponse) -> Option<StatusInfo> {
    serde_json::from_str(response.info.get(INFO_KEY)?).ok()
}

fn parse_info(response: &ContainerStatusResponse) -> Started {
    let Some(info) = info_of(response) else { return Started::default() };
    let unified = info.runtime_spec.linux.resources.unified;
    Started {
        pid: Some(info.pid).filter(|pid| *pid > 0),
        environment: info.runtime_spec.process.env,
        memory_min_bytes: unified.get(MEMORY_MIN).and_then(|bytes| bytes.parse().ok()),
    }
}

/// Reduces a response to what [`complete`] reads. The author of a pod chooses its environment, of which a response has MiBs, and those
/// of all containers are kept until the last one has arrived.
pub fn reduce(response: &mut ContainerStatusResponse, filter: &Filter) {
    let mut info = info_of(response);
    response.info.clear();
    let Some(info) = &mut info else { return };
    let env = &mut info.runtime_spec.process.env;
    let mut names = HashSet::new();
    env.retain(|line| {
        let name = line.split_once('=').map(|(name, _)| name.to_owned());
        !filter.settings_of([line.as_str()]).is_empty() && names.insert(name)
    });
    env.iter_mut().for_each(|line| *line = line.chars().take(MAX_SETTING_CHARS).collect());
    info.runtime_spec.linux.resources.unified.retain(|key, _| key == MEMORY_MIN);
    response.info.extend(serde_json::to_string(info).ok().map(|text| (INFO_KEY.to_owned(), text)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reduced_response_has_what_is_read_of_it_and_no_more() {
        let info = |extra: &str| {
            let env = format!(
                r#"["BATCH_SIZE=32","PATH=/bin","LONG={}","ACCUM={}"]"#,
                "x".repeat(1 << 20),
                "2".repeat(9_000)
            );
            format!(
                r#"{{"pid":7,"config":{{"envs":{env}}},"runtimeSpec":{{"process":{{"env":{env}}},
                "linux":{{"resources":{{"unified":{{"memory.min":"4096"{extra}}}}}}}}}}}"#
            )
        };
        let filter = Filter { settings: vec!["BATCH_SIZE".into(), "ACCUM".into()], ..Filter::default() };
        let mut response = ContainerStatusResponse::default();
        response.info.insert(INFO_KEY.to_owned(), info(r#","memory.low":"1""#));
        response.info.insert("sandbox".to_owned(), "x".repeat(1 << 20));
        let settings = |response: &ContainerStatusResponse| {
            let started = parse_info(response);
            let environment = started.environment.iter().map(String::as_str);
            (started.pid, started.memory_min_bytes, filter.settings_of(environment))
        };
        let whole = settings(&response);
        assert_eq!((whole.0, whole.1, whole.2.len()), (Some(7), Some(4096), 2));
        reduce(&mut response, &filter);
        assert_eq!(settings(&response), whole);
        let bytes: usize = response.info.values().map(String::len).sum();
        assert!(bytes < 4_096, "{bytes}");
        response.info.insert(INFO_KEY.to_owned(), "no JSON".to_owned());
        reduce(&mut response, &filter);
        assert!(response.info.is_empty());
    }
}
