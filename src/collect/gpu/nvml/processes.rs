//! Compute, graphics and MPS processes of a device.

use std::collections::HashMap;

use nvml_wrapper::Device as NvmlDevice;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;

use super::library::field;
use super::memory::MOST_MEMORY;
use crate::collect::gpu::reading::{GpuProcess, Memory};

/// Linux has no pids from here on (PID_MAX_LIMIT).
const PID_LIMIT: u32 = 1 << 22;

/// Each pid once: a process in several lists holds its memory once. `None` if the device tells no list at all.
///
/// # Errors
/// As [`field`].
pub fn read(
    device: &NvmlDevice<'_>,
    memory: Memory,
    faults: &mut Vec<&'static str>,
) -> Result<Option<Vec<GpuProcess>>, NvmlError> {
    let compute = field(device.running_compute_processes(), faults)?;
    let graphics = field(device.running_graphics_processes(), faults)?;
    let mps = field(device.mps_running_compute_processes(), faults)?;
    if compute.is_none() && graphics.is_none() && mps.is_none() {
        return Ok(None);
    }
    let most = memory.total.unwrap_or(MOST_MEMORY);
    let mut by_pid: HashMap<u32, Option<u64>> = HashMap::new();
    for info in compute.into_iter().chain(graphics).chain(mps).flatten() {
        let used = match info.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        };
        if info.pid >= PID_LIMIT || used.is_some_and(|used| used > most) {
            faults.push("malformed"); // records of another size than the library's header says: all is garbage
            return Ok(None);
        }
        let entry = by_pid.entry(info.pid).or_insert(used);
        *entry = used.max(*entry);
    }
    let mut all: Vec<_> =
        by_pid.into_iter().map(|(pid, used)| GpuProcess { pid, used, owner: None }).collect();
    all.sort_by_key(|process| process.pid);
    Ok(Some(all))
}
