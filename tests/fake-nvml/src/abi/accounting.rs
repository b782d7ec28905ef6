//! The driver's records of processes, also of ended ones.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings::{nvmlAccountingStats_t, nvmlDevice_t};

use super::{NO_INSTANCE, NOT_AVAILABLE, NOT_FOUND, NOT_SUPPORTED, Out, entry_points};

/// The capacity of the driver's ring buffer in processes.
const BUFFER_SIZE: c_uint = 4000;

entry_points! {
    fn nvmlDeviceGetAccountingMode(call, device: nvmlDevice_t, mode: Out<c_uint>) {
        mode.put(c_uint::from(call.gpu(device)?.accounting.is_some()))
    }

    fn nvmlDeviceGetAccountingBufferSize(call, device: nvmlDevice_t, size: Out<c_uint>) {
        call.gpu(device)?;
        size.put(BUFFER_SIZE)
    }

    fn nvmlDeviceGetAccountingPids(call, device: nvmlDevice_t, count: Out<c_uint>, pids: Out<c_uint>) {
        let gpu = call.gpu(device)?;
        let known: Vec<c_uint> = gpu.accounting.as_ref().ok_or(NOT_SUPPORTED)?.keys().copied().collect();
        call.put_list(device, count, pids, &known)
    }

    fn nvmlDeviceGetAccountingStats(
        call, device: nvmlDevice_t, pid: c_uint, stats: Out<nvmlAccountingStats_t>,
    ) {
        let gpu = call.gpu(device)?;
        let process = gpu.accounting.as_ref().ok_or(NOT_SUPPORTED)?.get(&pid).ok_or(NOT_FOUND)?;
        stats.put(nvmlAccountingStats_t {
            // Of 32 bits, but the same value as an instance id that does not apply.
            gpuUtilization: process.gpu_percent.unwrap_or(NO_INSTANCE),
            memoryUtilization: process.memory_percent.unwrap_or(NO_INSTANCE),
            maxMemoryUsage: process.max_memory.unwrap_or(NOT_AVAILABLE),
            time: process.time_ms,
            startTime: process.start_us,
            isRunning: c_uint::from(process.running),
            reserved: [0; 5],
        })
    }
}
