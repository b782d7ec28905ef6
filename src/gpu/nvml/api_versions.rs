//! The version of each versioned symbol that this driver has, detected once per session.

use nvml_wrapper::Device as NvmlDevice;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::MemoryInfo;

use super::ffi::{self, Buffer, ProcessListKind, Records};

/// The version to call of each symbol. The newest is tried first; a list of version 1: the driver has none that is read.
#[derive(Debug)]
pub struct ApiVersions {
    lists: [u8; ProcessListKind::ALL.len()],
    memory: u8,
    /// The buffer for all calls that fill a list.
    pub buffer: Buffer,
}

impl Default for ApiVersions {
    fn default() -> Self {
        Self { lists: [3; ProcessListKind::ALL.len()], memory: 2, buffer: Buffer::default() }
    }
}

/// Memory as the driver reports it; the first version does not report reserved memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemoryInfo {
    pub total: u64,
    pub used: u64,
    pub free: u64,
    pub reserved: Option<u64>,
}

impl From<MemoryInfo> for DeviceMemoryInfo {
    fn from(info: MemoryInfo) -> Self {
        Self { total: info.total, used: info.used, free: info.free, reserved: Some(info.reserved) }
    }
}

/// Returns true if the library, or the driver below it, does not have the symbol.
pub fn is_missing(error: &NvmlError) -> bool {
    matches!(error, NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound)
}

impl ApiVersions {
    /// Reads a list of processes by the newest symbol that the driver has.
    ///
    /// # Errors
    /// `FunctionNotFound` if it has none.
    pub fn processes(
        &mut self,
        device: &NvmlDevice<'_>,
        list: ProcessListKind,
    ) -> Result<Records, NvmlError> {
        let version = &mut self.lists[list as usize];
        while *version >= 2 {
            match ffi::processes(device, list, *version, &mut self.buffer) {
                Err(error) if is_missing(&error) => *version -= 1,
                other => return other,
            }
        }
        Err(NvmlError::FunctionNotFound)
    }

    /// Reads the memory of a device by the newest symbol that the driver has.
    ///
    /// # Errors
    /// Any error of NVML.
    pub fn memory(&mut self, device: &NvmlDevice<'_>) -> Result<DeviceMemoryInfo, NvmlError> {
        if self.memory == 2 {
            match device.memory_info() {
                Err(error) if is_missing(&error) => self.memory = 1,
                other => return other.map(DeviceMemoryInfo::from),
            }
        }
        let [total, free, used] = ffi::memory_v1(device)?;
        Ok(DeviceMemoryInfo { total, used, free, reserved: None })
    }
}
