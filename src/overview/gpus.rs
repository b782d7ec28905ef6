//! The GPUs of an overview: their use, who holds them, and who has them allocated.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{ContainerUse, Rows};
use crate::catalog::FamilyId;
use crate::gpu;
use crate::series::{NONE, Row};

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
pub(super) fn gpus(rows: &Rows<'_>, containers: &[ContainerUse]) -> Vec<GpuOverview> {
    let of = |family| rows.by_gpu(family);
    let (total, used) = (of(FamilyId::GPU_MEMORY_TOTAL), of(FamilyId::GPU_MEMORY_USED));
    let (reserved, host) = (of(FamilyId::GPU_MEMORY_RESERVED), of(FamilyId::GPU_HOST_PROCESSES));
    let (unattributed, busy) = (of(FamilyId::GPU_MEMORY_UNATTRIBUTED), of(FamilyId::GPU_UTILIZATION));
    let mut found: Vec<GpuOverview> = rows
        .0
        .gpus
        .iter()
        .enumerate()
        .map(|(number, identity)| GpuOverview {
            gpu: rows.gpu_name(number as u32),
            uuid: identity.key().to_string(),
            model: Arc::clone(&identity.model),
            memory_total_bytes: total[number],
            memory_used_bytes: used[number],
            memory_reserved_bytes: reserved[number],
            host_processes_bytes: host[number],
            unattributed_bytes: unattributed[number],
            utilization_ratio: busy[number],
            holders: vec![],
            allocated_to: vec![],
        })
        .collect();
    for row in rows.0.family(FamilyId::CONTAINER_GPU_MEMORY) {
        let Some(holder) = containers.get(row.container as usize).filter(|_| row.container != NONE) else {
            continue;
        };
        add_holder(&mut found[row.gpu as usize].holders, &holder.name, row.value);
        // a GPU that is split has what its instances hold
        if let Some(parent) = split_gpu(rows, row.gpu) {
            add_holder(&mut found[parent].holders, &holder.name, row.value);
        }
    }
    for row in rows.0.family(FamilyId::CONTAINER_GPU_ALLOCATED) {
        let container = rows.0.containers[row.container as usize].identity.path();
        let allocation = GpuAllocation { container, running: (row.container as usize) < rows.0.running };
        // a GPU that is split has what its instances have
        for gpu in [Some(row.gpu as usize), split_gpu(rows, row.gpu)].into_iter().flatten() {
            if !found[gpu].allocated_to.contains(&allocation) {
                found[gpu].allocated_to.push(allocation.clone());
            }
        }
    }
    for gpu in &mut found {
        gpu.holders.sort_by(|one, other| other.1.total_cmp(&one.1));
        gpu.allocated_to.sort_by(|one, other| one.container.cmp(&other.container));
    }
    found
}

/// Returns the number of the GPU that a MIG instance is of; `None` for a whole GPU.
fn split_gpu(rows: &Rows<'_>, number: u32) -> Option<usize> {
    let identity = &rows.0.gpus[number as usize];
    let is_parent = |other: &gpu::GpuIdentity| other.instance.is_none() && other.uuid == identity.uuid;
    identity.instance.as_ref()?;
    rows.0.gpus.iter().position(|other| is_parent(other))
}

/// Returns the devices that the kubelet allocated under other names.
pub(super) fn other_devices(rows: &Rows<'_>) -> Vec<OtherDevice> {
    let text = |row: &Row, number| rows.label(row, number).unwrap_or_default().to_owned();
    let container = |row: &Row| rows.0.containers[row.container as usize].identity.path();
    let of_plugins = rows.0.family(FamilyId::CONTAINER_GPU_UNMATCHED).iter().map(|row| OtherDevice {
        container: container(row),
        source: text(row, 0),
        device: text(row, 1),
    });
    let claimed = rows.0.family(FamilyId::CONTAINER_DEVICE_CLAIMED).iter().map(|row| OtherDevice {
        container: container(row),
        source: text(row, 0),
        device: format!("{}/{}", text(row, 1), text(row, 2)),
    });
    of_plugins.chain(claimed).collect()
}

fn add_holder(holders: &mut Vec<(String, f64)>, name: &str, bytes: f64) {
    match holders.iter_mut().find(|(holder, _)| holder == name) {
        Some((_, sum)) => *sum += bytes,
        None => holders.push((name.to_owned(), bytes)),
    }
}
