//! A process on GPUs of DRM drivers, as it was read.

use std::collections::BTreeMap;

use crate::collect::gpu::ProcessOwner;
use crate::host::{Dir, ReadError, process_cgroup};
use crate::parse::drm::DrmClient;
use crate::parse::process::Stat;

/// A process: its pid, and the clock ticks from boot to its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DrmProcessKey {
    /// Clock ticks from boot to its start. First, so that the older process comes first.
    pub start_ticks: u64,
    /// Its pid.
    pub pid: u32,
}

/// What was read of a process.
#[derive(Debug)]
pub struct DrmProcess {
    /// The process.
    pub owner: ProcessOwner,
    /// Its descriptors of graphics devices: the name of the node as the process sees it, and the driver's statistics; the default
    /// if they were not read. None has memory unless the process is complete.
    pub descriptors: Vec<(String, DrmClient)>,
    /// Whether all its descriptors are known and were read.
    pub is_complete: bool,
    /// The memory that it allocated for computing on GPUs of AMD, by render node; `None` if it does not compute.
    pub computing: Option<Vec<(String, u64)>>,
}

impl DrmProcess {
    /// Returns whether the engines' statistics have all its work: they do not have what is computed.
    pub fn has_all_work(&self) -> bool {
        self.is_complete && self.computing.is_none()
    }
}

/// The processes of a reading, the oldest first.
pub type DrmProcesses = BTreeMap<DrmProcessKey, DrmProcess>;

/// Reads start, printable name and cgroup of a process.
pub fn read_owner(dir: &Dir, cgroup_v1: bool, buffer: &mut Vec<u8>) -> Result<ProcessOwner, ReadError> {
    let stat = Stat::parse(dir.file("stat")?.read_once(buffer)?);
    let stat = stat.ok_or_else(|| ReadError::malformed("stat"))?;
    let cgroup = process_cgroup::read(dir, cgroup_v1, buffer)?.into();
    let comm = crate::parse::printable(&stat.comm).into();
    Ok(ProcessOwner { start_ticks: stat.start_ticks, comm, cgroup })
}
