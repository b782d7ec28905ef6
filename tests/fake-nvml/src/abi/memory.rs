//! Memory of GPUs and of MIG devices.

use nvml_wrapper_sys::bindings::{
    nvmlBAR1Memory_t, nvmlConfComputeMemSizeInfo_t, nvmlDevice_t, nvmlMemory_t, nvmlMemory_v2_t,
};

use super::{NOT_SUPPORTED, Out, check_version, entry_points};

entry_points! {
    /// The first version has no reserved memory: it is part of used.
    fn nvmlDeviceGetMemoryInfo(call, device: nvmlDevice_t, info: Out<nvmlMemory_t>) {
        let target = call.target(device)?;
        let memory = target.memory()?;
        info.put(nvmlMemory_t {
            total: memory.total,
            free: memory.free_bytes(),
            used: memory.used.saturating_add(memory.reserved),
        })
    }

    fn nvmlDeviceGetMemoryInfo_v2(call, device: nvmlDevice_t, info: Out<nvmlMemory_v2_t>) {
        let target = call.target(device)?;
        let version = info.get()?.version;
        check_version::<nvmlMemory_v2_t>(version, 2)?;
        let memory = target.memory()?;
        info.put(nvmlMemory_v2_t {
            version,
            total: memory.total,
            reserved: memory.reserved,
            free: memory.free_bytes(),
            used: memory.used,
        })
    }

    fn nvmlDeviceGetBAR1MemoryInfo(call, device: nvmlDevice_t, info: Out<nvmlBAR1Memory_t>) {
        let target = call.target(device)?;
        let bar1 = target.gpu.bar1.as_ref().ok_or(NOT_SUPPORTED)?;
        info.put(nvmlBAR1Memory_t {
            bar1Total: bar1.total,
            bar1Free: bar1.total.saturating_sub(bar1.used),
            bar1Used: bar1.used,
        })
    }

    /// No GPU here uses confidential computing: all memory is unprotected. Programs recognise a driver with process
    /// records of 32 bytes by this symbol together with the absence of the process detail list.
    fn nvmlDeviceGetConfComputeMemSizeInfo(
        call, device: nvmlDevice_t, info: Out<nvmlConfComputeMemSizeInfo_t>,
    ) {
        let total = call.target(device)?.memory()?.total;
        info.put(nvmlConfComputeMemSizeInfo_t { protectedMemSizeKib: 0, unprotectedMemSizeKib: total >> 10 })
    }
}
