//! GPUs and other devices that the kubelet has allocated to each container, from its pod-resources socket (`v1`). The socket is
//! optional, and all calls are read-only.
//!
//! Of device plugins only GPUs of NVIDIA, with its MIG strategies, and of AMD are read ([`is_gpu`]). AMD's device ids are addresses on the
//! PCI bus, or names of partitions such as `amdgpu_xcp_1`, which match no device. NVIDIA's plugin uses the driver's own uuids,
//! for a shared device with `::NUMBER` after it. GKE's own plugin names device files ([`DeviceFile`]), with `/vgpuNUMBER` after a shared one.
//! Devices of resource claims (dynamic resource allocation) have the names that their driver gives them. Which name is which GPU is decided
//! where the GPUs are known ([`crate::attribute::gpu_allocation`]).
//!
//! Regular init containers are not in the list: their devices are listed for a container of the same pod.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use prost::Message;

use super::client::{CriClient, CriError};
use crate::clock::Timestamp;
use crate::discover::device_allocations::{
    ClaimedDevice, DeviceAllocation, ListedDevices, PluginDevice, RequestState,
};
use crate::discover::{ConnectionState, Identity, RuntimeData, RuntimeState};
use crate::host::Health;
use crate::text::bounded;

/// Interval of lists.
const LIST_INTERVAL: Duration = Duration::from_secs(5);
/// How often it is checked, before the first list, whether the runtime has listed its pods.
const RUNTIME_POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Prefix of resources of other names: renamed GPUs, those of KubeVirt, and network adapters.
const NVIDIA_PREFIX: &str = "nvidia.com/";

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
    #[prost(message, repeated, tag = "5")]
    dynamic_resources: Vec<DynamicResource>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerDevices {
    #[prost(string, tag = "1")]
    resource_name: String,
    #[prost(string, repeated, tag = "2")]
    device_ids: Vec<String>,
}

/// A resource claim.
#[derive(Clone, PartialEq, Message)]
struct DynamicResource {
    #[prost(message, repeated, tag = "4")]
    claim_resources: Vec<ClaimResource>,
}

/// A device of a claim.
#[derive(Clone, PartialEq, Message)]
struct ClaimResource {
    #[prost(message, repeated, tag = "1")]
    cdi_devices: Vec<CdiDevice>,
    #[prost(string, tag = "2")]
    driver_name: String,
    #[prost(string, tag = "3")]
    pool_name: String,
    #[prost(string, tag = "4")]
    device_name: String,
}

#[derive(Clone, PartialEq, Message)]
struct CdiDevice {
    #[prost(string, tag = "1")]
    name: String,
}

/// Lists the allocated devices once.
///
/// # Errors
/// The kubelet does not respond, or access is denied.
pub async fn list_once(socket: &Path) -> Result<ListedDevices, CriError> {
    let client = CriClient::connect(socket).await?;
    list(&client).await
}

async fn list(client: &CriClient) -> Result<ListedDevices, CriError> {
    let response: ListResponse = client.call("/v1.PodResourcesLister/List", ListRequest {}).await?;
    Ok(parse_response(response))
}

fn parse_response(response: ListResponse) -> ListedDevices {
    let mut listed = ListedDevices::default();
    for pod in response.pods {
        let (k8s_namespace, k8s_pod) = (bounded(&pod.namespace), bounded(&pod.name));
        for container in &pod.containers {
            let allocation = parse_container(container);
            if allocation != DeviceAllocation::default() {
                let name = bounded(&container.name);
                let (k8s_namespace, k8s_pod) = (Arc::clone(&k8s_namespace), Arc::clone(&k8s_pod));
                let identity = Identity { k8s_namespace, k8s_pod, name };
                listed.containers.insert(identity, Arc::new(allocation));
            }
        }
        listed.pods.insert((k8s_namespace, k8s_pod));
    }
    listed
}

/// Returns whether a device of a plugin is a GPU: network adapters of `nvidia.com/...` have addresses on the PCI bus or names of interfaces. vGPUs
/// have uuids without a prefix.
fn is_gpu(resource: &str, id: &str) -> bool {
    let has_gpu_name = || {
        let is_prefixed = id.starts_with("GPU-") || id.starts_with("MIG-");
        is_prefixed || number(id).is_some() || is_uuid(id) || DeviceFile::read(id).is_some()
    };
    PluginDevice::is_of_gpus(resource) || (resource.starts_with(NVIDIA_PREFIX) && has_gpu_name())
}

/// Returns true for a uuid without a prefix.
pub(crate) fn is_uuid(text: &str) -> bool {
    has_hex_parts(text, &['-'], [8, 4, 4, 4, 12])
}

/// Returns whether a text has hexadecimal numbers of these lengths.
pub(crate) fn has_hex_parts<const N: usize>(text: &str, separators: &[char], lengths: [usize; N]) -> bool {
    let digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_hexdigit()).then_some(part.len());
    text.split(separators).map(digits).eq(lengths.map(Some))
}

fn parse_container(container: &ContainerResources) -> DeviceAllocation {
    let mut plugin_devices = Vec::new();
    for ContainerDevices { resource_name, device_ids } in &container.devices {
        let resource = bounded(resource_name);
        let gpus = device_ids.iter().map(|id| device(id)).filter(|id| is_gpu(resource_name, id));
        plugin_devices
            .extend(gpus.map(|id| PluginDevice { resource: Arc::clone(&resource), id: bounded(id) }));
    }
    let of_claims = container.dynamic_resources.iter().flat_map(|claim| &claim.claim_resources);
    let mut claimed_devices: Vec<_> = of_claims
        .map(|of| ClaimedDevice {
            driver: bounded(&of.driver_name),
            pool: bounded(&of.pool_name),
            device: bounded(&of.device_name),
            cdi_names: of.cdi_devices.iter().map(|cdi| bounded(&cdi.name)).collect(),
        })
        .collect();
    plugin_devices.sort();
    plugin_devices.dedup();
    claimed_devices.sort();
    // two requests of a claim, and two claims, can share a device
    claimed_devices.dedup_by(|one, other| {
        (&one.driver, &one.pool, &one.device) == (&other.driver, &other.pool, &other.device)
    });
    DeviceAllocation { plugin_devices, claimed_devices }
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
pub(crate) fn number(text: &str) -> Option<&str> {
    (!text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())).then_some(text)
}

/// Polls the kubelet for ever, once the runtime has listed its pods: without it neither names nor uids of containers are known. While the kubelet
/// does not respond, what it listed last is kept.
pub async fn follow(socket: PathBuf, source: Arc<RuntimeState>) {
    let mut client = None;
    let mut health = Health::default();
    let mut has_responded = false;
    loop {
        let (was_connected, connection) = {
            let state = source.lock();
            (state.was_connected(), state.connection)
        };
        match connection {
            _ if was_connected => break,
            ConnectionState::Starting => tokio::time::sleep(RUNTIME_POLL_INTERVAL).await,
            _ => tokio::time::sleep(LIST_INTERVAL).await, // no runtime of pods here, so far
        }
    }
    loop {
        if socket.exists() || has_responded {
            let before = source.lock().request_state();
            match list_reconnecting(&mut client, &socket).await {
                Ok(listed) => {
                    health.recovered();
                    has_responded = true;
                    source.lock().apply_devices(listed, &before);
                }
                Err(error) => {
                    client = None;
                    let mut state = source.lock();
                    let now = state.request_state();
                    let RuntimeData { device_allocations, generation, .. } = &mut *state;
                    *generation += u64::from(device_allocations.apply_failure(&now));
                    drop(state);
                    if health.failed(Timestamp::now()) {
                        tracing::warn!(socket = %socket.display(), %error, "listing GPU allocations of the kubelet failed, retrying");
                    }
                }
            }
        }
        tokio::time::sleep(LIST_INTERVAL).await;
    }
}

impl RuntimeData {
    fn request_state(&self) -> RequestState {
        RequestState::new(self.sandboxes.values(), self.running.values())
    }

    fn apply_devices(&mut self, listed: ListedDevices, before: &RequestState) {
        let Self { device_allocations, running, generation, .. } = self;
        let has_changed = device_allocations.apply(listed, before, |id| running.contains_key(id));
        *generation += u64::from(has_changed);
    }
}

async fn list_reconnecting(client: &mut Option<CriClient>, socket: &Path) -> Result<ListedDevices, CriError> {
    if client.is_none() {
        *client = Some(CriClient::connect(socket).await?);
    }
    match client {
        Some(client) => list(client).await,
        None => Ok(ListedDevices::default()),
    }
}

/// For [`super::invariants`]: what is listed is bounded, unique and not empty.
#[cfg(any(test, fuzzing))]
pub(super) fn check_invariants(bytes: &[u8]) {
    let listed = ListResponse::decode(bytes).map(parse_response).unwrap_or_default();
    for (identity, allocation) in &listed.containers {
        let DeviceAllocation { plugin_devices, claimed_devices } = &**allocation;
        assert!(!plugin_devices.is_empty() || !claimed_devices.is_empty());
        assert!(plugin_devices.is_sorted_by(|a, b| a < b), "{plugin_devices:?}");
        assert!(claimed_devices.is_sorted_by(|a, b| a < b), "{claimed_devices:?}");
        let is_bounded = |text: &str| text.chars().count() <= 256;
        assert!(plugin_devices.iter().all(|of| is_bounded(&of.id) && !of.id.contains("::")));
        assert!(claimed_devices.iter().all(|of| is_bounded(&of.device)));
        assert!(is_bounded(&identity.name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn reads_gpus_of_plugins_shared_ones_once_and_all_devices_of_claims() {
        let devices = |resource: &str, ids: &[&str]| ContainerDevices {
            resource_name: resource.into(),
            device_ids: ids.iter().map(|id| id.to_string()).collect(),
        };
        let claimed = |device: &str| ClaimResource {
            cdi_devices: vec![CdiDevice { name: format!("k8s.gpu.nvidia.com/device={device}") }],
            driver_name: "gpu.nvidia.com".into(),
            pool_name: "node1".into(),
            device_name: device.into(),
        };
        let container = |name: &str, devices, claimed| ContainerResources {
            name: name.into(),
            devices,
            dynamic_resources: vec![DynamicResource { claim_resources: claimed }],
        };
        let listed = parse_response(ListResponse {
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
                            devices("nvidia.com/hostdev", &["0000:03:00.1"]),
                            devices("nvidia.com/mlnxnics", &["ens1f0"]),
                            devices("nvidia.com/gpudirect", &["0000:03:00.2"]),
                            devices("nvidia.com/GRID_T4-1Q", &["00000001-aaaa-4bbb-8ccc-dddddddddddd"]),
                            devices("nvidia.com/a100", &["5", "GPU-c"]),
                            devices("amd.com/gpu", &["0000:03:00.0"]),
                        ],
                        vec![claimed("gpu-5"), claimed("gpu-5")],
                    ),
                    container("log", vec![], vec![]),
                ],
            }],
        });
        assert!(listed.pods.contains(&("ml".into(), "train-0".into())));
        let [(identity, allocation)] = &listed.containers.iter().collect::<Vec<_>>()[..] else {
            panic!("{listed:?}")
        };
        assert_eq!(identity.to_string(), "ml/train-0/main");
        let found = allocation.plugin_devices.iter().map(|of| (&*of.resource, &*of.id));
        let wanted = [
            ("amd.com/gpu", "0000:03:00.0"),
            ("nvidia.com/GRID_T4-1Q", "00000001-aaaa-4bbb-8ccc-dddddddddddd"),
            ("nvidia.com/a100", "5"),
            ("nvidia.com/a100", "GPU-c"),
            ("nvidia.com/gpu.shared", "GPU-b"),
            ("nvidia.com/mig-1g.5gb", "MIG-a"),
        ];
        assert!(found.eq(wanted), "{allocation:?}");
        let found = allocation.claimed_devices.iter().map(|of| [&*of.driver, &*of.pool, &*of.device]);
        assert!(found.eq([["gpu.nvidia.com", "node1", "gpu-5"]]), "{allocation:?}");
    }
}
