//! GPUs that the kubelet allocated to each container, from its pod-resources socket (`v1`). The socket is optional, and all
//! calls are read-only.
//!
//! Only resources of the device plugins of NVIDIA, with its MIG strategies, and AMD are read. AMD's device ids are addresses on the
//! PCI bus, or names of partitions such as `amdgpu_xcp_1`, which match no device. NVIDIA's device ids are the driver's own uuids (or
//! its index, if the plugin is configured so). A time-sliced device has `::NUMBER` after its id. GKE's own plugin names device
//! files ([`DeviceFile`]), with `/vgpuNUMBER` after a shared one. A name of another form matches no device and is logged
//! ([`first_unknown_device`]). Not here: dynamic resource allocation, whose device names only its driver understands.
//!
//! The kubelet reports the name of a pod and not its uid. So a pod that is re-created under its name keeps the allocation of its
//! predecessor until the next response. While the kubelet does not respond, allocations of such pods are dropped.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use prost::Message;

use super::client::{CriClient, CriError};
use crate::clock::Timestamp;
use crate::discover::{ContainerId, ContainerRecord, Identity, RuntimeData, RuntimeState};
use crate::host::Health;
use crate::text::bounded;

/// Interval of lists.
const LIST_INTERVAL: Duration = Duration::from_secs(5);
/// Prefixes of the resources.
const RESOURCE_PREFIXES: [&str; 2] = ["nvidia.com/", "amd.com/gpu"];
/// Prefixes of those whose device ids may be indices. KubeVirt's resources are named after the model, such as
/// `nvidia.com/GA102GL_A10`, and their ids are IOMMU groups.
const INDEXED_PREFIXES: [&str; 2] = ["nvidia.com/gpu", "nvidia.com/mig-"];

/// GPUs allocated to each container, by identity.
pub type Allocations = HashMap<Identity, Arc<[Arc<str>]>>;

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

/// Lists the allocations once.
///
/// # Errors
/// The kubelet does not respond, or access is denied.
pub async fn list_once(socket: &Path) -> Result<Allocations, CriError> {
    let client = CriClient::connect(socket).await?;
    list(&client).await
}

async fn list(client: &CriClient) -> Result<Allocations, CriError> {
    let response: ListResponse = client.call("/v1.PodResourcesLister/List", ListRequest {}).await?;
    Ok(parse_allocations(response))
}

fn parse_allocations(response: ListResponse) -> Allocations {
    let mut allocations = Allocations::new();
    for pod in response.pods {
        for container in &pod.containers {
            let is_gpu = |name: &str| RESOURCE_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
            let gpus = container.devices.iter().filter(|devices| is_gpu(&devices.resource_name));
            let ids = gpus.flat_map(|devices| {
                let is_indexed =
                    INDEXED_PREFIXES.iter().any(|prefix| devices.resource_name.starts_with(prefix));
                devices.device_ids.iter().filter(move |id| is_indexed || number(device(id)).is_none())
            });
            let mut ids: Vec<_> = ids.map(|id| bounded(device(id))).collect();
            ids.sort();
            ids.dedup();
            if !ids.is_empty() {
                let identity = Identity {
                    k8s_namespace: bounded(&pod.namespace),
                    k8s_pod: bounded(&pod.name),
                    name: bounded(&container.name),
                };
                allocations.insert(identity, ids.into());
            }
        }
    }
    allocations
}

/// Strips the suffix of a shared device from its id.
fn device(id: &str) -> &str {
    let shared = id.split_once("::").or_else(|| {
        let (device, share) = id.rsplit_once("/vgpu")?;
        number(share).map(|_| (device, share))
    });
    shared.map_or(id, |(device, _)| device)
}

/// A device name of GKE's plugin: the number of the device file, and for a MIG instance also the id of the GPU instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceFile<'a> {
    /// `0` of `nvidia0`.
    pub minor: &'a str,
    /// `7` of `nvidia0/gi7`.
    pub gpu_instance: Option<&'a str>,
}

impl<'a> DeviceFile<'a> {
    /// Parses the name; `None` if it has another form.
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

/// Returns the text if it consists of digits only.
fn number(text: &str) -> Option<&str> {
    (!text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())).then_some(text)
}

/// Returns true for an address such as `0000:03:00.0`.
fn is_pci_address(id: &str) -> bool {
    let digits = id
        .split([':', '.'])
        .map(|part| part.bytes().all(|byte| byte.is_ascii_hexdigit()).then_some(part.len()));
    id.len() == "0000:03:00.0".len() && digits.eq([4, 2, 2, 1].map(Some))
}

/// Returns the first name of an unknown form.
pub fn first_unknown_device(allocations: &Allocations) -> Option<&str> {
    let is_known = |id: &str| {
        let is_own = id.starts_with("GPU-") || id.starts_with("MIG-");
        is_own || number(id).is_some() || DeviceFile::read(id).is_some() || is_pci_address(id)
    };
    allocations.values().flat_map(|ids| ids.iter()).map(|id| &**id).find(|id| !is_known(id))
}

/// State at the kubelet's last response.
#[derive(Debug)]
struct LastResponse {
    /// Unix time of the request.
    at: f64,
    /// Containers that existed then, with an unknown start time.
    without_start: HashSet<ContainerId>,
}

impl LastResponse {
    fn new(running: &HashMap<ContainerId, ContainerRecord>, at: f64) -> Self {
        let without_start = running.values().filter(|record| record.started.is_none());
        Self { at, without_start: without_start.map(|record| record.id.clone()).collect() }
    }

    /// Returns whether the response may be about an earlier container with the same name.
    fn may_be_older_than(&self, record: &ContainerRecord) -> bool {
        match record.started {
            Some(started) => started > self.at && !self.without_start.contains(&record.id),
            None => !self.without_start.contains(&record.id),
        }
    }
}

/// Drops the allocations of containers that started after the kubelet's last response: they belong to an earlier container
/// with the same name. Returns whether there was any.
fn drop_stale<'a>(
    allocations: &mut Allocations,
    running: impl IntoIterator<Item = &'a ContainerRecord>,
    last_response: &LastResponse,
) -> bool {
    let before = allocations.len();
    for record in running {
        if last_response.may_be_older_than(record) {
            allocations.remove(&record.spec.identity());
        }
    }
    allocations.len() < before
}

/// Polls the kubelet for ever. While it does not respond, allocations are kept, except those of containers that started since.
pub async fn follow(socket: PathBuf, source: Arc<RuntimeState>) {
    let mut client = None;
    let (mut health, mut has_logged_device) = (Health::default(), false);
    let mut last_response = None;
    loop {
        let request_state = LastResponse::new(&source.lock().running, Timestamp::now().unix_seconds());
        if socket.exists() || last_response.is_some() {
            match list_reconnecting(&mut client, &socket).await {
                Ok(allocations) => {
                    health.recovered();
                    last_response = Some(request_state);
                    if let Some(id) = first_unknown_device(&allocations)
                        .filter(|_| !std::mem::replace(&mut has_logged_device, true))
                    {
                        tracing::warn!(%id, "unknown device name from the device plugin: its GPU allocations are missing (logged once)");
                    }
                    let mut state = source.lock();
                    if state.allocations != allocations {
                        state.allocations = allocations;
                        state.generation += 1;
                    }
                }
                Err(error) => {
                    client = None;
                    if let Some(last_response) = &last_response {
                        let RuntimeData { allocations, running, generation, .. } = &mut *source.lock();
                        *generation += u64::from(drop_stale(allocations, running.values(), last_response));
                    }
                    if health.failed(Timestamp::now()) {
                        tracing::warn!(socket = %socket.display(), %error, "listing GPU allocations of the kubelet failed, retrying");
                    }
                }
            }
        }
        tokio::time::sleep(LIST_INTERVAL).await;
    }
}

async fn list_reconnecting(client: &mut Option<CriClient>, socket: &Path) -> Result<Allocations, CriError> {
    if client.is_none() {
        *client = Some(CriClient::connect(socket).await?);
    }
    match client {
        Some(client) => list(client).await,
        None => Ok(Allocations::new()),
    }
}

/// For [`super::invariants`]: allocations are bounded, unique and not empty.
#[cfg(any(test, fuzzing))]
pub(super) fn check_invariants(bytes: &[u8]) {
    let allocations = ListResponse::decode(bytes).map(parse_allocations).unwrap_or_default();
    for (identity, ids) in &allocations {
        assert!(!ids.is_empty() && ids.is_sorted_by(|a, b| a < b), "{ids:?}");
        assert!(ids.iter().all(|id| id.chars().count() <= 256 && !id.contains("::")), "{ids:?}");
        assert!(identity.name.chars().count() <= 256);
    }
    let _ = first_unknown_device(&allocations);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::{ContainerSpec, Pod, RuntimeKind};

    fn given_to(pod: &str, ids: &[&str]) -> Allocations {
        let identity = Identity { k8s_namespace: "ml".into(), k8s_pod: pod.into(), name: "main".into() };
        Allocations::from([(identity, ids.iter().map(|id| Arc::from(*id)).collect())])
    }

    #[test]
    fn recognizes_device_names_of_the_plugins_only() {
        assert_eq!(
            first_unknown_device(&given_to(
                "a",
                &["0", "GPU-b", "MIG-c", "nvidia0", "nvidia12/gi7", "0000:c3:00.0"]
            )),
            None
        );
        for id in [
            "nvidia",
            "nvidia0/",
            "nvidia0/gi",
            "nvidia0/ci1",
            "nvidiactl",
            "card0",
            "0000:03:00",
            "0000.03:00.00",
            "amdgpu_xcp_1",
            "",
        ] {
            assert_eq!(first_unknown_device(&given_to("a", &["GPU-b", id])), Some(id), "{id}");
        }
    }

    #[test]
    fn strips_suffix_of_shared_device() {
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
    fn re_created_pod_loses_allocation_of_its_predecessor() {
        let pod = Pod { namespace: "ml".into(), name: "train-0".into(), uid: "u".into(), ..Pod::default() };
        let labels = HashMap::new();
        let labelled = ContainerSpec::labelled(["main", ""], &labels, &crate::config::Filter::default());
        let record = ContainerRecord::new(
            "a",
            RuntimeKind::Cri,
            ContainerSpec { pod: Some(Arc::new(pod)), ..labelled },
        );
        let mut record = ContainerRecord { started: Some(50.0), ..record };
        let mut allocations = given_to("train-0", &["GPU-b"]);
        allocations.extend(given_to("train-1", &["GPU-c"]));
        let last_response = |running: &[&ContainerRecord]| {
            let running = running.iter().map(|record| (record.id.clone(), (*record).clone()));
            LastResponse::new(&running.collect(), 100.0)
        };
        let without = last_response(&[]);
        assert!(!drop_stale(&mut allocations, [&record], &without), "it ran at the last response");
        record.started = Some(150.0);
        assert!(drop_stale(&mut allocations, [&record], &without));
        assert_eq!(allocations, given_to("train-1", &["GPU-c"]));
        // its start time is unknown
        record.started = None;
        allocations = given_to("train-0", &["GPU-b"]);
        assert!(
            !drop_stale(&mut allocations, [&record], &last_response(&[&record])),
            "it existed at the last response"
        );
        assert!(drop_stale(&mut allocations, [&record], &without));
    }

    #[test]
    fn reads_only_gpus_and_shared_ones_once() {
        let devices = |resource: &str, ids: &[&str]| ContainerDevices {
            resource_name: resource.into(),
            device_ids: ids.iter().map(|id| id.to_string()).collect(),
        };
        let container = |name: &str, devices| ContainerResources { name: name.into(), devices };
        let allocations = parse_allocations(ListResponse {
            pods: vec![PodResources {
                name: "train-0".into(),
                namespace: "ml".into(),
                containers: vec![
                    container(
                        "main",
                        vec![
                            devices("nvidia.com/gpu.shared", &["GPU-b::1", "GPU-b::0"]),
                            devices("nvidia.com/mig-1g.5gb", &["MIG-a"]),
                            devices("nvidia.com/GA102GL_A10", &["13"]), // an IOMMU group of KubeVirt
                            devices("rdma/hca", &["mlx5_0"]),
                            devices("amd.com/gpu", &["0000:03:00.0"]),
                        ],
                    ),
                    container("log", vec![]),
                ],
            }],
        });
        let identity =
            Identity { k8s_namespace: "ml".into(), k8s_pod: "train-0".into(), name: "main".into() };
        let wanted: Arc<[Arc<str>]> = Arc::from(["0000:03:00.0".into(), "GPU-b".into(), "MIG-a".into()]);
        assert_eq!(allocations, Allocations::from([(identity, wanted)]));
    }
}
