//! The GPUs of an overview: their use, who holds them, and who has them allocated.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{ContainerUse, float, gpu_name};
use crate::collect::cycle::AllocatedDevice;
use crate::gpu::GpuIdentity;
use crate::snapshot::Snapshot;

/// A GPU, or a MIG instance.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuOverview {
    /// Index; of a MIG instance `GPU/INSTANCE` or `GPU/INSTANCE/COMPUTE-INSTANCE`.
    pub gpu: String,
    /// UUID.
    pub uuid: String,
    /// Model.
    pub model: Arc<str>,
    /// All of its memory, with what the driver keeps.
    pub memory_total_bytes: Option<f64>,
    /// Used memory, as the driver counts it.
    pub memory_used_bytes: Option<f64>,
    /// Kept by the driver.
    pub memory_reserved_bytes: Option<f64>,
    /// Of processes outside containers.
    pub host_processes_bytes: Option<f64>,
    /// In use, and attributed to no process: see docs/gpu.md.
    pub unattributed_bytes: Option<f64>,
    /// Share of time in which it computed.
    pub utilization_ratio: Option<f64>,
    /// Containers that hold its memory, the largest first: name and bytes.
    pub holders: Vec<(String, f64)>,
    /// Containers that have it allocated, by name.
    pub allocated_to: Vec<GpuAllocation>,
}

/// A container that has a GPU allocated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuAllocation {
    /// `NAME`, in a pod `NAMESPACE/POD/NAME`.
    pub container: String,
    /// It runs. A container of a pod has its GPU also while it does not.
    pub running: bool,
}

/// A device that the kubelet allocated to a container: of a device plugin under a name that is no GPU's here, or of a resource claim.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OtherDevice {
    /// `NAMESPACE/POD/NAME`.
    pub container: String,
    /// The resource of a device plugin, or the driver of a resource claim.
    pub source: String,
    /// Its name there; of a resource claim `POOL/NAME`.
    pub device: String,
}

impl GpuOverview {
    /// Returns the memory in use as a share of all.
    pub fn used_ratio(&self) -> Option<f64> {
        Some(self.memory_used_bytes? / self.memory_total_bytes.filter(|total| *total > 0.0)?)
    }

    /// Returns who holds its memory: containers, the largest first, then processes outside containers, and what is of nobody known.
    pub fn all_holders(&self) -> impl Iterator<Item = (&str, f64)> {
        let others =
            [("host processes", self.host_processes_bytes), ("unattributed", self.unattributed_bytes)];
        let others =
            others.into_iter().filter_map(|(name, bytes)| Some((name, bytes.filter(|bytes| *bytes >= 1.0)?)));
        self.holders.iter().map(|(name, bytes)| (name.as_str(), *bytes)).chain(others)
    }
}

/// Returns the GPUs and their MIG instances.
pub(super) fn gpus(snapshot: &Snapshot, containers: &[ContainerUse]) -> Vec<GpuOverview> {
    let cycle = &snapshot.cycle;
    let mut found: Vec<GpuOverview> = std::iter::zip(&snapshot.gpus, &cycle.gpus)
        .map(|(identity, figures)| GpuOverview {
            gpu: gpu_name(identity),
            uuid: identity.key().to_string(),
            model: Arc::clone(&identity.model),
            memory_total_bytes: figures.total.map(float),
            memory_used_bytes: figures.used.map(float),
            memory_reserved_bytes: figures.reserved.map(float),
            host_processes_bytes: figures.rest.host.map(float),
            unattributed_bytes: figures.rest.unattributed.map(float),
            utilization_ratio: figures.utilization,
            holders: vec![],
            allocated_to: vec![],
        })
        .collect();
    for used in &cycle.gpu_uses {
        let (holder, Some(bytes)) = (&containers[used.container as usize], used.used) else { continue };
        for gpu in with_parent(snapshot, used.gpu) {
            add_holder(&mut found[gpu].holders, &holder.name, float(bytes));
        }
    }
    for (container, gpu) in &cycle.gpu_allocations {
        let allocation = GpuAllocation {
            container: snapshot.containers[*container as usize].identity.path(),
            running: (*container as usize) < snapshot.running,
        };
        for gpu in with_parent(snapshot, *gpu) {
            if !found[gpu].allocated_to.contains(&allocation) {
                found[gpu].allocated_to.push(allocation.clone());
            }
        }
    }
    for gpu in &mut found {
        gpu.holders.sort_by(|one, other| other.1.total_cmp(&one.1).then_with(|| one.0.cmp(&other.0)));
        gpu.allocated_to.sort_by(|one, other| one.container.cmp(&other.container));
    }
    found
}

/// Returns a GPU, and for a MIG instance also the GPU that it is of: that has what its instances have.
fn with_parent(snapshot: &Snapshot, number: u32) -> impl Iterator<Item = usize> {
    let identity = &snapshot.gpus[number as usize];
    let is_parent = |other: &GpuIdentity| other.instance.is_none() && other.uuid == identity.uuid;
    let parent =
        identity.instance.as_ref().and_then(|_| snapshot.gpus.iter().position(|other| is_parent(other)));
    [Some(number as usize), parent].into_iter().flatten()
}

/// Returns the devices that the kubelet allocated under other names, those of device plugins first.
pub(super) fn other_devices(snapshot: &Snapshot) -> Vec<OtherDevice> {
    let mut devices: Vec<&AllocatedDevice> = snapshot.cycle.other_devices.iter().collect();
    devices.sort_by_key(|device| (device.pool.is_some(), device.container));
    let of = |device: &AllocatedDevice| OtherDevice {
        container: snapshot.containers[device.container as usize].identity.path(),
        source: device.source.to_string(),
        device: match &device.pool {
            Some(pool) => format!("{pool}/{}", device.device),
            None => device.device.to_string(),
        },
    };
    devices.into_iter().map(of).collect()
}

fn add_holder(holders: &mut Vec<(String, f64)>, name: &str, bytes: f64) {
    match holders.iter_mut().find(|(holder, _)| holder == name) {
        Some((_, sum)) => *sum += bytes,
        None => holders.push((name.to_owned(), bytes)),
    }
}
