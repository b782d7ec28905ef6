//! Memory of a device.

use nvml_wrapper::Device as NvmlDevice;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::MemoryInfo;

use super::library::field;
use crate::collect::gpu::reading::Memory;

/// No GPU has a PiB of memory: what is above is a sentinel or garbage.
pub const MOST_MEMORY: u64 = 1 << 50;

/// Reads the memory of a device. A device that does not tell, or answers garbage, has none.
///
/// # Errors
/// As [`field`].
pub fn read(device: &NvmlDevice<'_>, faults: &mut Vec<&'static str>) -> Result<Memory, NvmlError> {
    let Some(info) = field(device.memory_info(), faults)? else { return Ok(Memory::default()) };
    Ok(plausible(&info).unwrap_or_else(|| {
        faults.push("malformed");
        Memory::default()
    }))
}

/// Memory whose parts fit into the whole; a sentinel or garbage does not.
fn plausible(info: &MemoryInfo) -> Option<Memory> {
    let parts = info.used.checked_add(info.free)?.checked_add(info.reserved)?;
    (info.total > 0 && info.total <= MOST_MEMORY && parts <= info.total).then_some(Memory {
        total: Some(info.total),
        used: Some(info.used),
        free: Some(info.free),
        reserved: Some(info.reserved),
    })
}
