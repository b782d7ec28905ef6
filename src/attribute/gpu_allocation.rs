//! GPUs allocated to containers, independent of use: shows GPUs that are allocated and idle, and GPUs that are used
//! without allocation.
//!
//! The kubelet and Docker identify a GPU of NVIDIA by uuid or index, and a MIG instance by uuid; on GKE the kubelet uses names of
//! device files. A GPU of AMD is identified by its address on the PCI bus. A name that matches no device of this cycle has no series.

use crate::catalog::*;
use crate::collect::{Context, CycleData};
use crate::discover::cri::pod_resources::DeviceFile;
use crate::gpu::GpuDevice;
use crate::series::Series;

/// Docker's name for all GPUs.
const ALL: &str = "all";

/// Writes one row for each GPU allocated to a container.
pub fn write(context: &Context<'_>, cycle_data: &CycleData, series: &mut Series) {
    let allocated =
        (0..).zip(&context.inventory.containers).filter(|(_, container)| !container.gpus.is_empty());
    for (number, container) in allocated {
        for (gpu, (reading, device)) in (0..).zip(cycle_data.gpu_devices()) {
            let is_instance = |other: &GpuDevice| other.instance_of.is_some() && device.contains(other);
            let is_split = reading.devices.iter().any(is_instance);
            if container.gpus.iter().any(|name| matches_device(name, device, is_split)) {
                series.container_gpu(CONTAINER_GPU_ALLOCATED, number, gpu, [], 1.0);
            }
        }
    }
}

/// Returns true if the name matches the device. `is_split`: the GPU has MIG instances, which stand for it in `all`.
fn matches_device(name: &str, device: &GpuDevice, is_split: bool) -> bool {
    let identity = &device.identity;
    match identity.vendor {
        "nvidia" => {}
        "amd" => return name == &*identity.pci_bus_id,
        _ => return false, // no device plugin names them
    }
    if let Some(file) = DeviceFile::read(name) {
        let instance = identity.instance.as_ref().map(|instance| &*instance.gpu_instance_id);
        return file.minor == &*identity.minor && file.gpu_instance == instance;
    }
    match &identity.instance {
        Some(instance) => name == ALL || name == &*instance.uuid,
        None => name == &*identity.uuid || name == &*identity.index || (name == ALL && !is_split),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::{GpuIdentity, MigInstance};
    use std::sync::Arc;

    #[test]
    fn matches_gpu_by_index_or_uuid_and_instance_by_uuid_only() {
        let device = |index: &str, mig: Option<&str>, vendor| {
            let instance = mig.map(|uuid| MigInstance { uuid: uuid.into(), ..MigInstance::default() });
            let (index, uuid) = (index.into(), format!("GPU-{index}").into());
            GpuDevice::new(Arc::new(GpuIdentity { vendor, index, uuid, instance, ..GpuIdentity::default() }))
        };
        let (whole, instance) = (device("1", None, "nvidia"), device("1", Some("MIG-a"), "nvidia"));
        for (name, is_whole, is_instance) in [
            ("1", true, false),
            ("GPU-1", true, false),
            ("MIG-a", false, true),
            ("all", true, true),
            ("0", false, false),
            ("1:0", false, false),
        ] {
            assert_eq!(matches_device(name, &whole, false), is_whole, "{name}");
            assert_eq!(matches_device(name, &instance, false), is_instance, "{name}");
        }
        assert!(!matches_device("all", &whole, true), "the name matches its instances instead");
        assert!(!matches_device("nvidia1", &whole, false), "no driver reported its minor number");
        assert!(!matches_device("all", &device("card0", None, "amd"), false));
        let at = |vendor| {
            let pci_bus_id = "0000:03:00.0".into();
            GpuDevice::new(Arc::new(GpuIdentity { vendor, pci_bus_id, ..GpuIdentity::default() }))
        };
        assert!(matches_device("0000:03:00.0", &at("amd"), false));
        assert!(!matches_device("0000:04:00.0", &at("amd"), false));
        assert!(!matches_device("0000:03:00.0", &at("intel"), false));
    }

    #[test]
    fn gke_names_match_the_device_file_not_the_index() {
        let device = |instance: Option<&str>| {
            let instance =
                instance.map(|id| MigInstance { gpu_instance_id: id.into(), ..MigInstance::default() });
            let (index, minor) = ("0".into(), "3".into());
            GpuDevice::new(Arc::new(GpuIdentity {
                vendor: "nvidia",
                index,
                minor,
                instance,
                ..GpuIdentity::default()
            }))
        };
        let (whole, instance) = (device(None), device(Some("7")));
        for (name, is_whole, is_instance) in [
            ("nvidia3", true, false),
            ("nvidia3/gi7", false, true),
            ("nvidia3/gi1", false, false),
            ("nvidia0", false, false),
            ("nvidia0/gi7", false, false),
        ] {
            assert_eq!(matches_device(name, &whole, false), is_whole, "{name}");
            assert_eq!(matches_device(name, &instance, false), is_instance, "{name}");
        }
    }
}
