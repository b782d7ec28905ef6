//! Which GPUs the kubelet gave to which container, from its pod-resources socket (`v1`), which only reads and is optional.
//!
//! Resources of NVIDIA's device plugin and of its MIG strategies are looked at, whose device ids are the driver's own
//! uuids (or its index, if the plugin is set so). A device that is shared in time has `::NUMBER` after its id. GKE's own plugin
//! names device files ([`DeviceFile`]), with `/vgpuNUMBER` after one that is shared. A name of another form means no device,
//! and is said to ([`unknown`]). Not here: dynamic resource allocation, whose device names only its driver understands.
//!
//! The kubelet names a pod and not its uid, so a pod that is made anew under its name has what the one before it was given
//! until the kubelet is asked again. While it does not answer, what it said of such a pod is forgotten.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use prost::Message;

use super::client::{Client, CriError};
use crate::clock::Moment;
use crate::discover::{ContainerId, Identity, Record, Source, SourceState};
use crate::series::bounded;

/// Pause between two looks.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// The resources that are GPUs of NVIDIA's.
const RESOURCES: &str = "nvidia.com/";

/// What the kubelet gave to each container, by its name.
pub type Given = HashMap<Identity, Arc<[Arc<str>]>>;

#[derive(Clone, PartialEq, Message)]
struct ListRequest {}

#[derive(Clone, PartialEq, Message)]
struct ListResponse {
    #[prost(message, repeated, tag = "1")]
    pods: Vec<PodResources>,
}

#[derive(Clone, PartialEq, Message)]
struct PodResources {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    namespace: String,
    #[prost(message, repeated, tag = "3")]
    containers: Vec<ContainerResources>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerResources {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, repeated, tag = "2")]
    devices: Vec<ContainerDevices>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerDevices {
    #[prost(string, tag = "1")]
    resource_name: String,
    #[prost(string, repeated, tag = "2")]
    device_ids: Vec<String>,
}

/// Asks once.
///
/// # Errors
/// The kubelet does not answer, or memledger may not ask it.
pub async fn look(socket: &Path) -> Result<Given, CriError> {
    let client = Client::connect(socket).await?;
    ask(&client).await
}

async fn ask(client: &Client) -> Result<Given, CriError> {
    let answer: ListResponse = client.ask("/v1.PodResourcesLister/List", ListRequest {}).await?;
    Ok(read(answer))
}

fn read(answer: ListResponse) -> Given {
    let mut given = Given::new();
    for pod in answer.pods {
        for container in &pod.containers {
            let gpus =
                container.devices.iter().filter(|devices| devices.resource_name.starts_with(RESOURCES));
            let ids = gpus.flat_map(|devices| &devices.device_ids);
            let mut ids: Vec<_> = ids.map(|id| bounded(device(id))).collect();
            ids.sort();
            ids.dedup();
            if !ids.is_empty() {
                let identity = Identity {
                    k8s_namespace: bounded(&pod.namespace),
                    k8s_pod: bounded(&pod.name),
                    name: bounded(&container.name),
                };
                given.insert(identity, ids.into());
            }
        }
    }
    given
}

/// The device that is shared under this id; else the id.
fn device(id: &str) -> &str {
    let shared = id.split_once("::").or_else(|| {
        let (device, share) = id.rsplit_once("/vgpu")?;
        number(share).map(|_| (device, share))
    });
    shared.map_or(id, |(device, _)| device)
}

/// A device as GKE's plugin names it: by the number of its device file, and a MIG instance by that of its GPU and the id of
/// the GPU instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceFile<'a> {
    /// `0` of `nvidia0`.
    pub minor: &'a str,
    /// `7` of `nvidia0/gi7`.
    pub gpu_instance: Option<&'a str>,
}

impl<'a> DeviceFile<'a> {
    /// Reads one; `None` if it is a name of another form.
    pub fn read(id: &'a str) -> Option<Self> {
        let id = id.strip_prefix("nvidia")?;
        let (minor, instance) = id.split_once('/').map_or((id, None), |(minor, rest)| (minor, Some(rest)));
        let gpu_instance = match instance {
            Some(instance) => Some(number(instance.strip_prefix("gi")?)?),
            None => None,
        };
        Some(Self { minor: number(minor)?, gpu_instance })
    }
}

/// The text, if it is digits and nothing else.
fn number(text: &str) -> Option<&str> {
    (!text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())).then_some(text)
}

/// A name that no device can have, if there is one.
pub fn unknown(given: &Given) -> Option<&str> {
    let is_known = |id: &str| {
        let is_own = id.starts_with("GPU-") || id.starts_with("MIG-");
        is_own || number(id).is_some() || DeviceFile::read(id).is_some()
    };
    given.values().flat_map(|ids| ids.iter()).map(|id| &**id).find(|id| !is_known(id))
}

/// What is known of the kubelet's last answer.
#[derive(Debug)]
struct Answered {
    /// Unix time when it was asked.
    at: f64,
    /// Containers that were there then and of whose start nobody had told.
    silent: HashSet<ContainerId>,
}

impl Answered {
    fn new(running: &HashMap<ContainerId, Record>, at: f64) -> Self {
        let silent = running.values().filter(|record| record.started.is_none());
        Self { at, silent: silent.map(|record| record.id.clone()).collect() }
    }

    /// It may have been about another container of this one's name.
    fn is_before(&self, record: &Record) -> bool {
        match record.started {
            Some(started) => started > self.at && !self.silent.contains(&record.id),
            None => !self.silent.contains(&record.id),
        }
    }
}

/// Forgets what was given to containers whose run began after the kubelet last answered: it spoke of another of that name.
/// Returns whether there was any.
fn forget<'a>(given: &mut Given, running: impl IntoIterator<Item = &'a Record>, answered: &Answered) -> bool {
    let before = given.len();
    for record in running {
        if answered.is_before(record) {
            given.remove(&Identity::lasting(&record.name, record.pod.as_deref()));
        }
    }
    given.len() < before
}

/// Follows the kubelet for ever. While it is away, what it gave is given, but to no container that began meanwhile.
pub async fn follow(socket: PathBuf, source: Arc<Source>) {
    let mut client = None;
    let (mut said, mut said_unknown) = (false, false);
    let mut answered = None;
    loop {
        let asking = Answered::new(&source.lock().running, Moment::now().unix_seconds());
        if socket.exists() || answered.is_some() {
            match asked(&mut client, &socket).await {
                Ok(given) => {
                    said = false;
                    answered = Some(asking);
                    if let Some(id) = unknown(&given).filter(|_| !std::mem::replace(&mut said_unknown, true))
                    {
                        tracing::warn!(%id, "the device plugin names GPUs as no driver does, so who was given one is not known (said once)");
                    }
                    let mut state = source.lock();
                    if state.given != given {
                        state.given = given;
                        state.generation += 1;
                    }
                }
                Err(error) => {
                    client = None;
                    if let Some(answered) = &answered {
                        let SourceState { given, running, generation, .. } = &mut *source.lock();
                        *generation += u64::from(forget(given, running.values(), answered));
                    }
                    if !std::mem::replace(&mut said, true) {
                        tracing::warn!(socket = %socket.display(), %error, "the kubelet does not tell which GPUs it gave to whom; trying again");
                    }
                }
            }
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

async fn asked(client: &mut Option<Client>, socket: &Path) -> Result<Given, CriError> {
    if client.is_none() {
        *client = Some(Client::connect(socket).await?);
    }
    match client {
        Some(client) => ask(client).await,
        None => Ok(Given::new()),
    }
}

/// For [`super::laws`]: what is given is bounded, told once, and never nothing.
#[cfg(any(test, fuzzing))]
pub(super) fn law(bytes: &[u8]) {
    let given = ListResponse::decode(bytes).map(read).unwrap_or_default();
    for (identity, ids) in &given {
        assert!(!ids.is_empty() && ids.is_sorted_by(|a, b| a < b), "{ids:?}");
        assert!(ids.iter().all(|id| id.chars().count() <= 256 && !id.contains("::")), "{ids:?}");
        assert!(identity.name.chars().count() <= 256);
    }
    let _ = unknown(&given);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::Pod;

    fn given_to(pod: &str, ids: &[&str]) -> Given {
        let identity = Identity { k8s_namespace: "ml".into(), k8s_pod: pod.into(), name: "main".into() };
        Given::from([(identity, ids.iter().map(|id| Arc::from(*id)).collect())])
    }

    #[test]
    fn names_of_both_plugins_are_known_and_any_other_is_said_to_be_none() {
        assert_eq!(unknown(&given_to("a", &["0", "GPU-b", "MIG-c", "nvidia0", "nvidia12/gi7"])), None);
        for id in ["nvidia", "nvidia0/", "nvidia0/gi", "nvidia0/ci1", "nvidiactl", "card0", ""] {
            assert_eq!(unknown(&given_to("a", &["GPU-b", id])), Some(id), "{id}");
        }
    }

    #[test]
    fn a_share_of_a_device_is_that_device() {
        for (id, wanted) in [
            ("GPU-b::1", "GPU-b"),
            ("nvidia0/vgpu1", "nvidia0"),
            ("nvidia0/gi7/vgpu12", "nvidia0/gi7"),
            ("nvidia0/gi7", "nvidia0/gi7"),
            ("nvidia0/vgpu", "nvidia0/vgpu"),
        ] {
            assert_eq!(device(id), wanted, "{id}");
        }
    }

    #[test]
    fn a_pod_that_is_made_anew_while_the_kubelet_is_silent_has_nothing_of_the_one_before_it() {
        let pod = Pod {
            namespace: "ml".into(),
            name: "train-0".into(),
            uid: "u".into(),
            attempt: 0,
            source: "".into(),
            labels: vec![],
            memory_min_bytes: None,
        };
        let mut record = Record {
            id: ContainerId::new("a"),
            runtime: "cri",
            name: "main".into(),
            pod: Some(Arc::new(pod)),
            image: "".into(),
            compose_project: "".into(),
            compose_service: "".into(),
            settings: vec![],
            gpus: [].into(),
            started: Some(50.0),
            labels_match: true,
        };
        let mut given = given_to("train-0", &["GPU-b"]);
        given.extend(given_to("train-1", &["GPU-c"]));
        let answered = |running: &[&Record]| {
            let running = running.iter().map(|record| (record.id.clone(), (*record).clone()));
            Answered::new(&running.collect(), 100.0)
        };
        let without = answered(&[]);
        assert!(!forget(&mut given, [&record], &without), "it ran when the kubelet answered");
        record.started = Some(150.0);
        assert!(forget(&mut given, [&record], &without));
        assert_eq!(given, given_to("train-1", &["GPU-c"]));
        // nobody tells of its start
        record.started = None;
        given = given_to("train-0", &["GPU-b"]);
        assert!(
            !forget(&mut given, [&record], &answered(&[&record])),
            "it was there when the kubelet answered"
        );
        assert!(forget(&mut given, [&record], &without));
    }

    #[test]
    fn only_nvidias_devices_count_and_one_that_is_shared_in_time_is_one() {
        let devices = |resource: &str, ids: &[&str]| ContainerDevices {
            resource_name: resource.into(),
            device_ids: ids.iter().map(|id| id.to_string()).collect(),
        };
        let container = |name: &str, devices| ContainerResources { name: name.into(), devices };
        let given = read(ListResponse {
            pods: vec![PodResources {
                name: "train-0".into(),
                namespace: "ml".into(),
                containers: vec![
                    container(
                        "main",
                        vec![
                            devices("nvidia.com/gpu.shared", &["GPU-b::1", "GPU-b::0"]),
                            devices("nvidia.com/mig-1g.5gb", &["MIG-a"]),
                            devices("rdma/hca", &["mlx5_0"]),
                        ],
                    ),
                    container("log", vec![]),
                ],
            }],
        });
        let identity =
            Identity { k8s_namespace: "ml".into(), k8s_pod: "train-0".into(), name: "main".into() };
        let wanted: Arc<[Arc<str>]> = Arc::from(["GPU-b".into(), "MIG-a".into()]);
        assert_eq!(given, Given::from([(identity, wanted)]));
    }
}
