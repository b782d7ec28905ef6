//! Which GPUs a container was given, beside those that it uses: what is given and idle, and what is used without it.
//!
//! The kubelet and Docker name a GPU by its uuid or index, a MIG instance by its uuid; on GKE the kubelet names device files.
//! A name that no device of this cycle bears has no series.

use crate::catalog::*;
use crate::collect::gpu::Device;
use crate::collect::{Context, Readings};
use crate::discover::cri::pod_resources::DeviceFile;
use crate::series::Series;

/// Docker's word for every GPU.
const ALL: &str = "all";

/// Writes one row for each GPU that a container was given.
pub fn write(context: &Context<'_>, readings: &Readings, series: &mut Series) {
    let given = (0..).zip(&context.inventory.containers).filter(|(_, container)| !container.gpus.is_empty());
    for (number, container) in given {
        for (gpu, (reading, device)) in (0..).zip(readings.gpu_devices()) {
            let is_of_it = |other: &Device| other.instance_of.is_some() && device.contains(other);
            let is_split = reading.devices.iter().any(is_of_it);
            if container.gpus.iter().any(|name| is_meant(name, device, is_split)) {
                series.container_gpu(CONTAINER_GPU_ALLOCATED, number, gpu, [], 1.0);
            }
        }
    }
}

/// `is_split`: there are MIG instances of it, which are given in its place where all GPUs are.
fn is_meant(name: &str, device: &Device, is_split: bool) -> bool {
    let identity = &device.identity;
    if identity.vendor != "nvidia" {
        return false; // only NVIDIA's devices are given by these names
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
    use crate::collect::gpu::{Identity, Instance};
    use std::sync::Arc;

    #[test]
    fn a_gpu_is_meant_by_its_index_or_uuid_and_an_instance_by_its_own_alone() {
        let device = |index: &str, mig: Option<&str>, vendor| {
            let instance = mig.map(|uuid| Instance { uuid: uuid.into(), ..Instance::default() });
            let (index, uuid) = (index.into(), format!("GPU-{index}").into());
            Device::new(Arc::new(Identity { vendor, index, uuid, instance, ..Identity::default() }))
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
            assert_eq!(is_meant(name, &whole, false), is_whole, "{name}");
            assert_eq!(is_meant(name, &instance, false), is_instance, "{name}");
        }
        assert!(!is_meant("all", &whole, true), "its instances are");
        assert!(!is_meant("nvidia1", &whole, false), "no driver told its minor number");
        assert!(!is_meant("all", &device("card0", None, "amd"), false));
    }

    #[test]
    fn gkes_names_mean_the_device_file_and_not_the_index() {
        let device = |instance: Option<&str>| {
            let instance = instance.map(|id| Instance { gpu_instance_id: id.into(), ..Instance::default() });
            let (index, minor) = ("0".into(), "3".into());
            Device::new(Arc::new(Identity {
                vendor: "nvidia",
                index,
                minor,
                instance,
                ..Identity::default()
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
            assert_eq!(is_meant(name, &whole, false), is_whole, "{name}");
            assert_eq!(is_meant(name, &instance, false), is_instance, "{name}");
        }
    }
}
