//! One device: who it is, and its memory and processes, read together so that the books close.

use nvml_wrapper::Device as NvmlDevice;
use nvml_wrapper::error::NvmlError;

use super::{memory, processes};
use crate::collect::gpu::reading::{GpuProcess, Identity, Memory};
use crate::series::bounded;

/// Memory and processes are read again so often when they contradict each other.
const READ_AGAIN: usize = 2;

/// Asks what does not change about a device.
///
/// # Errors
/// It has no UUID, without which it cannot be told from its successor.
pub fn identify(device: &NvmlDevice<'_>, index: u32) -> Result<Identity, NvmlError> {
    let text = |value: Result<String, NvmlError>| bounded(&value.unwrap_or_default());
    Ok(Identity {
        vendor: "nvidia",
        index: index.to_string().into(),
        uuid: bounded(&device.uuid()?),
        instance: None,
        model: text(device.name()),
        pci_bus_id: text(device.pci_info().map(|pci| pci.bus_id)),
        compute_capability: text(
            device.cuda_compute_capability().map(|c| format!("{}.{}", c.major, c.minor)),
        ),
        cuda_cores: text(device.num_cores().map(|cores| cores.to_string())),
    })
}

/// Memory, processes, and whether the two contradict each other for good.
pub type Holdings = (Memory, Option<Vec<GpuProcess>>, bool);

/// Reads memory and processes, which are two answers of different moments, until they agree, thrice at most.
///
/// # Errors
/// The device is lost, or the library has to be opened anew.
pub fn holdings(device: &NvmlDevice<'_>, faults: &mut Vec<&'static str>) -> Result<Holdings, NvmlError> {
    let mut attempt = 0;
    loop {
        let memory = memory::read(device, faults)?;
        let processes = processes::read(device, memory, faults)?;
        let held: u64 = processes.iter().flatten().filter_map(|process| process.used).sum();
        let raced = memory.used.is_some_and(|used| held > used);
        if !raced || attempt == READ_AGAIN {
            return Ok((memory, processes, raced));
        }
        attempt += 1;
    }
}
