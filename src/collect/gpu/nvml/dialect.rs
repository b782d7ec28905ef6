//! Which version of a symbol this driver has, found out once and kept for the session.

use nvml_wrapper::Device as NvmlDevice;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::MemoryInfo;

use super::raw::{self, Buffer, List, Record};

/// The versions that are asked, the newest first tried. 0: the driver has none.
#[derive(Debug)]
pub struct Dialect {
    lists: [u8; List::ALL.len()],
    memory: u8,
    /// For all calls that fill a list.
    pub buffer: Buffer,
}

impl Default for Dialect {
    fn default() -> Self {
        Self { lists: [3; List::ALL.len()], memory: 2, buffer: Buffer::default() }
    }
}

/// Memory as the driver tells it; the first version does not tell what is reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Told {
    pub total: u64,
    pub used: u64,
    pub free: u64,
    pub reserved: Option<u64>,
}

impl From<MemoryInfo> for Told {
    fn from(info: MemoryInfo) -> Self {
        Self { total: info.total, used: info.used, free: info.free, reserved: Some(info.reserved) }
    }
}

/// True if the library, or the driver below it, does not have the symbol.
pub fn is_missing(error: &NvmlError) -> bool {
    matches!(error, NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound)
}

impl Dialect {
    /// A list of processes by the newest symbol that the driver has.
    ///
    /// # Errors
    /// `FunctionNotFound` if it has none.
    pub fn processes(&mut self, device: &NvmlDevice<'_>, list: List) -> Result<Vec<Record>, NvmlError> {
        let version = &mut self.lists[list as usize];
        while *version > 0 {
            match raw::processes(device, list, *version, &mut self.buffer) {
                Err(error) if is_missing(&error) => *version -= 1,
                other => return other,
            }
        }
        Err(NvmlError::FunctionNotFound)
    }

    /// The memory of a device by the newest symbol that the driver has.
    ///
    /// # Errors
    /// What NVML answers.
    pub fn memory(&mut self, device: &NvmlDevice<'_>) -> Result<Told, NvmlError> {
        if self.memory == 2 {
            match device.memory_info() {
                Err(error) if is_missing(&error) => self.memory = 1,
                other => return other.map(Told::from),
            }
        }
        let [total, free, used] = raw::memory_v1(device)?;
        Ok(Told { total, used, free, reserved: None })
    }
}
