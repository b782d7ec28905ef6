//! GPUs allocated to containers, independent of use: shows GPUs that are allocated and idle, and GPUs that are used
//! without allocation.
//!
//! Docker identifies a GPU of NVIDIA by uuid or index, and a MIG instance by uuid; the kubelet by the name of the device plugin,
//! on GKE names of device files. A GPU of AMD is identified by its address on the PCI bus. A device of a resource claim is a GPU where one
//! of its names contains the uuid.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::write_owner;
use crate::catalog::*;
use crate::collect::CycleData;
use crate::collect::cycle::{AllocatedDevice, Cycle};
use crate::discover::cri::pod_resources::{DeviceFile, has_hex_parts, is_uuid, number};
use crate::discover::device_allocations::{
    AllocatedContainer, ClaimedDevice, DeviceAllocation, PluginDevice,
};
use crate::discover::{Container, Identity, Inventory};
use crate::gpu::{GpuDevice, GpuIdentity};
use crate::series::{Label, Series};

/// Docker's name for all GPUs.
const ALL: &str = "all";
/// Maximum number of resources of which a name that is no GPU's is logged.
const MAX_LOGGED: usize = 8;

/// Writes what is allocated, cycle by cycle.
#[derive(Debug, Default)]
pub struct AllocatedGpus {
    logged: HashSet<Arc<str>>,
}

impl AllocatedGpus {
    /// Writes a row for each GPU allocated to a container, and one for each device that is no known GPU, and adds both to `cycle`.
    /// `containers` are those of the snapshot; containers of pods that are not among them, because they do not run, are added.
    pub fn write(
        &mut self,
        inventory: &Inventory,
        cycle_data: &CycleData,
        containers: &mut Vec<Arc<Container>>,
        cycle: &mut Cycle,
        series: &mut Series,
    ) {
        let gpus = &mut cycle.gpu_allocations;
        let of_runtime = (0..).zip(&inventory.containers).filter(|(_, container)| !container.gpus.is_empty());
        for (number, container) in of_runtime {
            write_matching(cycle_data, number, gpus, series, |device, is_split| {
                container.gpus.iter().any(|name| is_requested(name, device, is_split))
            });
        }
        let known = || cycle_data.gpu_devices().map(|(_, device)| &*device.identity);
        for (number, container) in numbered(&inventory.device_allocations, containers, series) {
            let allocation = &container.allocation;
            write_matching(cycle_data, number, gpus, series, |device, _| {
                is_allocated(allocation, &device.identity)
            });
            for device in &allocation.claimed_devices {
                let labels = [&device.driver, &device.pool, &device.device];
                let labels = labels.map(|label| Label::Text(Arc::clone(label)));
                series.container(CONTAINER_DEVICE_CLAIMED, number, labels, 1.0);
                cycle.other_devices.push(AllocatedDevice {
                    container: number,
                    source: Arc::clone(&device.driver),
                    pool: Some(Arc::clone(&device.pool)),
                    device: Arc::clone(&device.device),
                });
            }
            for device in unmatched(allocation, known) {
                let labels = [&device.resource, &device.id].map(|label| Label::Text(Arc::clone(label)));
                series.container(CONTAINER_GPU_UNMATCHED, number, labels, 1.0);
                cycle.other_devices.push(AllocatedDevice {
                    container: number,
                    source: Arc::clone(&device.resource),
                    pool: None,
                    device: Arc::clone(&device.id),
                });
                if self.logged.len() < MAX_LOGGED && self.logged.insert(Arc::clone(&device.resource)) {
                    tracing::warn!(
                        resource = %device.resource,
                        device = %device.id,
                        container = %container.identity,
                        "the kubelet allocated a device whose name is none of the GPUs that the driver reports (logged once for each resource)"
                    );
                }
            }
        }
    }
}

/// Returns the number of each container in the snapshot. Those that are not in it are added, with their owners.
fn numbered<'a>(
    allocated: &'a [AllocatedContainer],
    containers: &mut Vec<Arc<Container>>,
    series: &mut Series,
) -> Vec<(u32, &'a AllocatedContainer)> {
    if allocated.is_empty() {
        return vec![];
    }
    let known: HashMap<&Identity, u32> =
        containers.iter().map(|container| &container.identity).zip(0..).collect();
    let numbers: Vec<_> = allocated.iter().map(|of| known.get(&of.identity).copied()).collect();
    std::iter::zip(numbers, allocated)
        .map(|(known, container)| {
            let number = known.unwrap_or_else(|| {
                let number = containers.len() as u32;
                containers.push(Arc::new(Container::known_by_name(container.identity.clone())));
                write_owner(&container.owners, number, series);
                number
            });
            (number, container)
        })
        .collect()
}

/// Writes a row for each device that matches. The test is also given whether the GPU has MIG instances.
fn write_matching(
    cycle_data: &CycleData,
    container: u32,
    allocations: &mut Vec<(u32, u32)>,
    series: &mut Series,
    matches: impl Fn(&GpuDevice, bool) -> bool,
) {
    for (gpu, (reading, device)) in (0..).zip(cycle_data.gpu_devices()) {
        let is_instance = |other: &GpuDevice| other.instance_of.is_some() && device.contains(other);
        if matches(device, reading.devices.iter().any(is_instance)) {
            series.container_gpu(CONTAINER_GPU_ALLOCATED, container, gpu, [], 1.0);
            allocations.push((container, gpu));
        }
    }
}

/// Returns whether a device request of a container for `name` has this device. `is_split`: the GPU has MIG instances, which stand for it
/// in `all`.
fn is_requested(name: &str, device: &GpuDevice, is_split: bool) -> bool {
    let identity = &device.identity;
    match (identity.vendor, &identity.instance) {
        ("nvidia", Some(instance)) => name == ALL || name == &*instance.uuid,
        ("nvidia", None) => name == &*identity.uuid || name == &*identity.index || (name == ALL && !is_split),
        _ => false, // Docker has no device requests for others
    }
}

fn is_allocated(allocation: &DeviceAllocation, identity: &GpuIdentity) -> bool {
    allocation.plugin_devices.iter().any(|device| is_of_plugin(device, identity))
        || allocation.claimed_devices.iter().any(|device| is_claimed(device, identity))
}

/// Returns the vendor of a plugin's resource.
fn vendor(device: &PluginDevice) -> &'static str {
    if device.resource.starts_with("amd.com/") { "amd" } else { "nvidia" }
}

/// Returns whether the device ids of a resource may be indices. Numbers of other resources, such as `nvidia.com/GA102GL_A10` of KubeVirt, are IOMMU
/// groups, and those of MIG instances no numbers of GPUs.
fn is_indexed(device: &PluginDevice) -> bool {
    device.resource.starts_with("nvidia.com/gpu") && PluginDevice::is_of_gpus(&device.resource)
}

fn is_of_plugin(device: &PluginDevice, identity: &GpuIdentity) -> bool {
    let name = &*device.id;
    if vendor(device) != identity.vendor {
        return false;
    }
    if identity.vendor == "amd" {
        return name == &*identity.pci_bus_id;
    }
    if let Some(file) = DeviceFile::read(name) {
        let instance = identity.instance.as_ref().map(|instance| &*instance.gpu_instance_id);
        return file.minor == &*identity.minor && file.gpu_instance == instance;
    }
    name == &**identity.key()
        || (is_indexed(device)
            && identity.instance.is_none()
            && number(name).is_some()
            && name == &*identity.index)
}

/// Returns whether a device of a resource claim is this GPU, by one of its names.
pub fn is_claimed(device: &ClaimedDevice, identity: &GpuIdentity) -> bool {
    let uuid = identity.key();
    identity.vendor == "nvidia"
        && (contains_uuid(&device.device, uuid)
            || device.cdi_names.iter().any(|name| contains_uuid(name, uuid)))
}

/// Returns whether a name contains a uuid, as `k8s.gpu.nvidia.com/claim=CLAIM-gpu-UUID`. Names in a pool have no capital letters. A number after
/// the uuid would make it another name.
fn contains_uuid(name: &str, uuid: &str) -> bool {
    let (name, uuid) = (name.as_bytes(), uuid.as_bytes());
    if uuid.is_empty() || name.len() < uuid.len() {
        return false;
    }
    (0..=name.len() - uuid.len()).any(|at| {
        let (before, rest) = name.split_at(at);
        let (part, after) = rest.split_at(uuid.len());
        part.eq_ignore_ascii_case(uuid)
            && !before.last().is_some_and(u8::is_ascii_alphanumeric)
            && !after.first().is_some_and(|byte| byte.is_ascii_alphanumeric() || *byte == b'-')
    })
}

/// Returns the devices of plugins that are none of the known GPUs: where GPUs of their vendor are known, or by the form of their name.
pub fn unmatched<'a, 'b, I: Iterator<Item = &'b GpuIdentity>>(
    allocation: &'a DeviceAllocation,
    known: impl Fn() -> I,
) -> impl Iterator<Item = &'a PluginDevice> {
    allocation.plugin_devices.iter().filter(move |device| {
        !known().any(|identity| is_of_plugin(device, identity))
            && (!has_known_form(device) || known().any(|identity| identity.vendor == vendor(device)))
    })
}

/// Returns whether a name has a form that is a GPU's on another host.
fn has_known_form(device: &PluginDevice) -> bool {
    let name = &*device.id;
    if vendor(device) == "amd" {
        return is_pci_address(name);
    }
    let is_uuid = ["GPU-", "MIG-"].iter().any(|prefix| name.strip_prefix(prefix).is_some_and(is_uuid));
    is_uuid || DeviceFile::read(name).is_some() || (is_indexed(device) && number(name).is_some())
}

/// Returns true for an address such as `0000:03:00.0`.
fn is_pci_address(name: &str) -> bool {
    has_hex_parts(name, &[':', '.'], [4, 2, 2, 1])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::MigInstance;

    fn identity(vendor: &'static str, index: &str, mig: Option<(&str, &str)>) -> GpuIdentity {
        let instance = mig.map(|(gpu_instance, uuid)| MigInstance {
            gpu_instance_id: gpu_instance.into(),
            uuid: uuid.into(),
            ..MigInstance::default()
        });
        let uuid = format!("GPU-{index}").into();
        let pci_bus_id = "0000:03:00.0".into();
        GpuIdentity {
            vendor,
            index: index.into(),
            uuid,
            instance,
            pci_bus_id,
            minor: "3".into(),
            ..GpuIdentity::default()
        }
    }

    fn plugin_device(resource: &str, id: &str) -> PluginDevice {
        PluginDevice { resource: resource.into(), id: id.into() }
    }

    #[test]
    fn docker_names_gpu_by_index_or_uuid_and_instance_by_uuid_only() {
        let device = |vendor, mig| GpuDevice::new(Arc::new(identity(vendor, "1", mig)));
        let (whole, instance) = (device("nvidia", None), device("nvidia", Some(("7", "MIG-a"))));
        for (name, is_whole, is_instance) in [
            ("1", true, false),
            ("GPU-1", true, false),
            ("MIG-a", false, true),
            ("all", true, true),
            ("0", false, false),
            ("1:0", false, false),
        ] {
            assert_eq!(is_requested(name, &whole, false), is_whole, "{name}");
            assert_eq!(is_requested(name, &instance, false), is_instance, "{name}");
        }
        assert!(!is_requested("all", &whole, true), "the name matches its instances instead");
        assert!(!is_requested("all", &device("amd", None), false));
    }

    #[test]
    fn plugins_name_gpu_by_uuid_index_device_file_or_address() {
        let (gpu, instance) = (identity("nvidia", "1", None), identity("nvidia", "1", Some(("7", "MIG-a"))));
        for (resource, id, is_gpu, is_instance) in [
            ("nvidia.com/gpu", "GPU-1", true, false),
            ("nvidia.com/a100", "GPU-1", true, false),
            ("nvidia.com/gpu", "1", true, false),
            ("nvidia.com/gpu.shared", "1", true, false),
            ("nvidia.com/mig-1g.5gb", "1", false, false),
            ("nvidia.com/a100", "1", false, false), // may be an IOMMU group
            ("nvidia.com/gpu", "GPU-1-0", false, false), // HAMi's, whose scheduler may choose another GPU
            ("nvidia.com/gpu", "GPU-", false, false),
            ("nvidia.com/gpu", "", false, false),
            ("nvidia.com/mig-1g.5gb", "MIG-a", false, true),
            // GKE's
            ("nvidia.com/gpu", "nvidia3", true, false),
            ("nvidia.com/gpu", "nvidia3/gi7", false, true),
            ("nvidia.com/gpu", "nvidia3/gi1", false, false),
            ("nvidia.com/gpu", "nvidia1", false, false),
            ("amd.com/gpu", "0000:03:00.0", false, false),
        ] {
            let device = plugin_device(resource, id);
            assert_eq!(is_of_plugin(&device, &gpu), is_gpu, "{device:?}");
            assert_eq!(is_of_plugin(&device, &instance), is_instance, "{device:?}");
        }
        let amd = identity("amd", "card0", None);
        assert!(is_of_plugin(&plugin_device("amd.com/gpu", "0000:03:00.0"), &amd));
        assert!(!is_of_plugin(&plugin_device("amd.com/gpu", "0000:04:00.0"), &amd));
        assert!(!is_of_plugin(&plugin_device("nvidia.com/gpu", "0000:03:00.0"), &amd));
    }

    #[test]
    fn claimed_device_is_a_gpu_where_a_name_has_its_uuid() {
        let gpu = identity("nvidia", "1a2b", None);
        let claimed = |device: &str, cdi: &str| ClaimedDevice {
            driver: "gpu.nvidia.com".into(),
            pool: "node1".into(),
            device: device.into(),
            cdi_names: vec![cdi.into()],
        };
        for (device, cdi, is_gpu) in [
            ("gpu-1a2b", "", true),
            ("gpu-0", "k8s.gpu.nvidia.com/claim=c-GPU-1a2b", true),
            ("gpu-0", "nvidia.com/gpu=GPU-1a2b", true),
            ("gpu-0", "k8s.gpu.nvidia.com/claim=c-gpu-0", false),
            ("gpu-1a2b-1", "", false),
            ("gpu-1a2bc", "", false),
            ("xgpu-1a2b", "", false),
        ] {
            assert_eq!(is_claimed(&claimed(device, cdi), &gpu), is_gpu, "{device} {cdi}");
        }
    }

    #[test]
    fn name_is_unmatched_where_gpus_of_its_vendor_are_known_or_by_its_form() {
        let whole = "GPU-00000001-aaaa-4bbb-8ccc-dddddddddddd";
        let shared = format!("{whole}-0");
        let gpu = identity("nvidia", "1", None);
        for (resource, id, is_known_elsewhere) in [
            ("nvidia.com/gpu", whole, true),
            ("nvidia.com/gpu", &shared, false),
            ("nvidia.com/gpu", "2", true),
            ("nvidia.com/gpu", "nvidia0/gi7", true),
            ("nvidia.com/a100", "1", false),
            ("amd.com/gpu", "0000:03:00.0", true),
            ("amd.com/gpu", "amdgpu_xcp_1", false),
        ] {
            let plugin_devices = vec![plugin_device(resource, id)];
            let allocation = DeviceAllocation { plugin_devices, ..DeviceAllocation::default() };
            let without_driver = unmatched(&allocation, std::iter::empty).count();
            assert_eq!(without_driver == 0, is_known_elsewhere, "{resource} {id}");
            let beside_another = unmatched(&allocation, || [&gpu].into_iter()).count();
            let is_silent = resource == "amd.com/gpu" && is_known_elsewhere;
            assert_eq!(beside_another == 0, is_silent, "{resource} {id}");
        }
        let plugin_devices = vec![plugin_device("nvidia.com/gpu", "GPU-1")];
        let allocation = DeviceAllocation { plugin_devices, ..DeviceAllocation::default() };
        assert_eq!(unmatched(&allocation, || [&gpu].into_iter()).count(), 0);
    }

    #[test]
    fn container_that_does_not_run_is_added_once_with_its_owner() {
        let allocated = ["log", "trainer"].map(|name| AllocatedContainer {
            identity: Identity { k8s_pod: "half".into(), ..Identity::named(name) },
            allocation: Arc::default(),
            owners: vec![("team".into(), "blue".into())],
        });
        let mut containers = vec![Arc::new(Container::known_by_name(allocated[0].identity.clone()))];
        let mut series = Series::default();
        let numbers: Vec<_> = numbered(&allocated, &mut containers, &mut series)
            .into_iter()
            .map(|(number, _)| number)
            .collect();
        assert_eq!((numbers, containers.len()), (vec![0, 1], 2));
        assert_eq!(containers[1].identity, allocated[1].identity);
        let rows: Vec<_> = series.rows().iter().map(|row| (row.family, row.container)).collect();
        assert_eq!(rows, [(FamilyId::CONTAINER_OWNER_INFO, 1)], "the one that runs has it anyway");
    }

    #[test]
    fn devices_of_a_container_have_a_row_each() {
        let gpus = ["0", "1"].map(|index| GpuDevice::new(Arc::new(identity("nvidia", index, None))));
        let reading = crate::gpu::GpuReading::of_devices(crate::clock::Timestamp::now(), gpus.into());
        let cycle_data = CycleData { gpus: vec![Arc::new(reading)], ..CycleData::default() };
        let claimed = ClaimedDevice {
            driver: "nic.test".into(),
            pool: "node1".into(),
            device: "eth1".into(),
            cdi_names: vec![],
        };
        let ids = ["GPU-1", "1", "GPU-0-1"]; // two names of one GPU
        let allocation = DeviceAllocation {
            plugin_devices: ids.map(|id| plugin_device("nvidia.com/gpu", id)).into(),
            claimed_devices: vec![claimed],
        };
        let allocated = AllocatedContainer {
            identity: Identity { k8s_pod: "half".into(), ..Identity::named("trainer") },
            allocation: Arc::new(allocation),
            owners: vec![],
        };
        let docker =
            Container { gpus: [ALL.into()].into(), ..Container::known_by_name(Identity::named("a")) };
        let inventory = Inventory {
            containers: vec![Arc::new(docker)],
            device_allocations: vec![allocated],
            ..Inventory::default()
        };
        let (mut containers, mut series) = (inventory.containers.clone(), Series::default());
        let mut cycle = Cycle::default();
        AllocatedGpus::default().write(&inventory, &cycle_data, &mut containers, &mut cycle, &mut series);
        assert_eq!(cycle.gpu_allocations, [(0, 0), (0, 1), (1, 1)]);
        let others =
            cycle.other_devices.iter().map(|other| (other.container, &*other.source, &*other.device));
        assert_eq!(others.collect::<Vec<_>>(), [(1, "nic.test", "eth1"), (1, "nvidia.com/gpu", "GPU-0-1")]);
        let rows: Vec<_> = series.rows().iter().map(|row| (row.family, row.container, row.gpu)).collect();
        let wanted = [
            (FamilyId::CONTAINER_GPU_ALLOCATED, 0, 0),
            (FamilyId::CONTAINER_GPU_ALLOCATED, 0, 1),
            (FamilyId::CONTAINER_GPU_ALLOCATED, 1, 1),
            (FamilyId::CONTAINER_DEVICE_CLAIMED, 1, crate::series::NONE),
            (FamilyId::CONTAINER_GPU_UNMATCHED, 1, crate::series::NONE),
        ];
        assert_eq!(rows, wanted);
    }
}
