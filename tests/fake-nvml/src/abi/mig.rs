//! MIG mode and its devices.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlDeviceAttributes_t};

use super::{INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, Out, entry_points, handle};

/// Instances of the smallest profile on the GPUs that have MIG.
const MOST_DEVICES: c_uint = 7;

entry_points! {
    fn nvmlDeviceGetMigMode(call, device: nvmlDevice_t, current: Out<c_uint>, pending: Out<c_uint>) {
        let mode = c_uint::from(call.gpu(device)?.mig.is_some());
        current.put(mode)?;
        pending.put(mode)
    }

    fn nvmlDeviceGetMaxMigDeviceCount(call, device: nvmlDevice_t, count: Out<c_uint>) {
        call.gpu(device)?;
        count.put(MOST_DEVICES)
    }

    fn nvmlDeviceGetMigDeviceHandleByIndex(
        call, device: nvmlDevice_t, index: c_uint, mig: Out<nvmlDevice_t>,
    ) {
        let target = call.target(device)?;
        let devices = target.gpu.mig.as_ref().ok_or(NOT_SUPPORTED)?;
        let number = index as usize;
        if number < devices.len() { mig.put(handle(target.index, Some(number))) } else { Err(NOT_FOUND) }
    }

    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(call, mig: nvmlDevice_t, device: Out<nvmlDevice_t>) {
        let target = call.target(mig)?;
        target.mig.ok_or(INVALID_ARGUMENT)?;
        device.put(handle(target.index, None))
    }

    fn nvmlDeviceIsMigDeviceHandle(call, device: nvmlDevice_t, is_mig: Out<c_uint>) {
        is_mig.put(c_uint::from(call.target(device)?.mig.is_some()))
    }

    fn nvmlDeviceGetGpuInstanceId(call, device: nvmlDevice_t, id: Out<c_uint>) {
        id.put(call.target(device)?.mig.ok_or(NOT_SUPPORTED)?.gi)
    }

    fn nvmlDeviceGetComputeInstanceId(call, device: nvmlDevice_t, id: Out<c_uint>) {
        id.put(call.target(device)?.mig.ok_or(NOT_SUPPORTED)?.ci)
    }

    fn nvmlDeviceGetAttributes_v2(call, device: nvmlDevice_t, attributes: Out<nvmlDeviceAttributes_t>) {
        let mig = call.target(device)?.mig.ok_or(NOT_SUPPORTED)?;
        attributes.put(nvmlDeviceAttributes_t {
            multiprocessorCount: mig.slices * 16,
            sharedCopyEngineCount: mig.slices,
            sharedDecoderCount: mig.slices,
            sharedEncoderCount: 0,
            sharedJpegCount: mig.slices,
            sharedOfaCount: 0,
            gpuInstanceSliceCount: mig.slices,
            computeInstanceSliceCount: mig.slices,
            memorySizeMB: mig.memory.total >> 20,
        })
    }
}
