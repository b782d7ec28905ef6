//! Symbols that return one number, which is enough for all tests.
//!
//! `numbers` of a GPU overrides the defaults here.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings::nvmlDevice_t;

use super::{Call, NOT_SUPPORTED, NvmlResult, Out, entry_points};

macro_rules! numbers {
    ($($name:ident = $default:literal;)*) => {
        entry_points! {
            $(
                fn $name(call, device: nvmlDevice_t, number: Out<c_uint>) {
                    number.put(read(call, device, $default)?)
                }
            )*
        }
    };
}

numbers! {
    nvmlDeviceGetArchitecture = 9;
    nvmlDeviceGetBoardId = 0x1000;
    nvmlDeviceGetBrand = 14;
    nvmlDeviceGetComputeMode = 0;
    nvmlDeviceGetCurrPcieLinkGeneration = 5;
    nvmlDeviceGetCurrPcieLinkWidth = 16;
    nvmlDeviceGetDisplayActive = 0;
    nvmlDeviceGetDisplayMode = 0;
    nvmlDeviceGetGpuMaxPcieLinkGeneration = 5;
    nvmlDeviceGetIrqNum = 100;
    nvmlDeviceGetMaxPcieLinkGeneration = 5;
    nvmlDeviceGetMaxPcieLinkWidth = 16;
    nvmlDeviceGetMemoryBusWidth = 5120;
    nvmlDeviceGetMultiGpuBoard = 0;
    nvmlDeviceGetPerformanceState = 0;
    nvmlDeviceGetPersistenceMode = 1;
    nvmlDeviceGetPowerManagementMode = 1;
    nvmlDeviceGetPowerState = 0;
}

fn read(call: &Call, device: nvmlDevice_t, default: u32) -> NvmlResult<u32> {
    let gpu = call.gpu(device)?;
    gpu.numbers.get(call.symbol).copied().unwrap_or(Some(default)).ok_or(NOT_SUPPORTED)
}
