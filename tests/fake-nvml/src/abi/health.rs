//! Errors of memory and of the links.

use std::ffi::{c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlMemoryLocation_enum_NVML_MEMORY_LOCATION_COUNT as LOCATIONS,
    nvmlMemoryLocation_enum_NVML_MEMORY_LOCATION_DRAM as DRAM,
};

use super::{INVALID_ARGUMENT, NOT_SUPPORTED, NvmlResult, Out, entry_points};
use crate::gpu::{Gpu, NvLink, RetiredPages};

entry_points! {
    fn nvmlDeviceGetEccMode(call, device: nvmlDevice_t, current: Out<c_uint>, pending: Out<c_uint>) {
        call.gpu(device)?.ecc.as_ref().ok_or(NOT_SUPPORTED)?;
        current.put(1)?;
        pending.put(1)
    }

    fn nvmlDeviceGetTotalEccErrors(
        call, device: nvmlDevice_t, error: c_uint, counter: c_uint, count: Out<c_ulonglong>,
    ) {
        count.put(ecc_errors(&*call.gpu(device)?, error, counter)?)
    }

    /// All errors are in device memory; the other locations have none.
    fn nvmlDeviceGetMemoryErrorCounter(
        call, device: nvmlDevice_t, error: c_uint, counter: c_uint, location: c_uint, count: Out<c_ulonglong>,
    ) {
        let errors = ecc_errors(&*call.gpu(device)?, error, counter)?;
        match location {
            DRAM => count.put(errors),
            other if other < LOCATIONS => count.put(0),
            _ => Err(INVALID_ARGUMENT),
        }
    }

    fn nvmlDeviceGetRemappedRows(
        call, device: nvmlDevice_t, correctable: Out<c_uint>, uncorrectable: Out<c_uint>,
        pending: Out<c_uint>, failure: Out<c_uint>,
    ) {
        let gpu = call.gpu(device)?;
        let rows = gpu.remapped_rows.as_ref().ok_or(NOT_SUPPORTED)?;
        correctable.put(rows.correctable)?;
        uncorrectable.put(rows.uncorrectable)?;
        pending.put(c_uint::from(rows.pending))?;
        failure.put(c_uint::from(rows.failure))
    }

    fn nvmlDeviceGetRetiredPages(
        call, device: nvmlDevice_t, cause: c_uint, count: Out<c_uint>, addresses: Out<c_ulonglong>,
    ) {
        let gpu = call.gpu(device)?;
        call.put_list(device, count, addresses, pages_by_cause(&gpu, cause)?)
    }

    /// The times are not kept: all are 0, which is the driver's word for unknown.
    fn nvmlDeviceGetRetiredPages_v2(
        call, device: nvmlDevice_t, cause: c_uint, count: Out<c_uint>, addresses: Out<c_ulonglong>,
        times: Out<c_ulonglong>,
    ) {
        let gpu = call.gpu(device)?;
        let pages = pages_by_cause(&gpu, cause)?;
        call.put_list(device, count, addresses, pages)?;
        if !pages.is_empty() {
            times.slice(pages.len())?.fill(0);
        }
        Ok(())
    }

    fn nvmlDeviceGetRetiredPagesPendingStatus(call, device: nvmlDevice_t, pending: Out<c_uint>) {
        let gpu = call.gpu(device)?;
        pending.put(c_uint::from(retired_pages(&gpu)?.pending))
    }

    fn nvmlDeviceGetPcieReplayCounter(call, device: nvmlDevice_t, replays: Out<c_uint>) {
        replays.put(call.gpu(device)?.pcie.replays.ok_or(NOT_SUPPORTED)?)
    }

    fn nvmlDeviceGetPcieThroughput(call, device: nvmlDevice_t, direction: c_uint, kilobytes: Out<c_uint>) {
        let gpu = call.gpu(device)?;
        let rate = match direction {
            0 => gpu.pcie.tx_kb,
            1 => gpu.pcie.rx_kb,
            _ => return Err(INVALID_ARGUMENT),
        };
        kilobytes.put(rate.ok_or(NOT_SUPPORTED)?)
    }

    fn nvmlDeviceGetNvLinkState(call, device: nvmlDevice_t, link: c_uint, active: Out<c_uint>) {
        let gpu = call.gpu(device)?;
        active.put(c_uint::from(nvlink(&gpu, link)?.active))
    }

    fn nvmlDeviceGetNvLinkErrorCounter(
        call, device: nvmlDevice_t, link: c_uint, counter: c_uint, errors: Out<c_ulonglong>,
    ) {
        let gpu = call.gpu(device)?;
        errors.put(*nvlink(&gpu, link)?.errors.get(counter as usize).ok_or(INVALID_ARGUMENT)?)
    }
}

fn ecc_errors(gpu: &Gpu, error: c_uint, counter: c_uint) -> NvmlResult<u64> {
    let ecc = gpu.ecc.as_ref().ok_or(NOT_SUPPORTED)?;
    match (error, counter) {
        (0, 0) => Ok(ecc.volatile_corrected),
        (1, 0) => Ok(ecc.volatile_uncorrected),
        (0, 1) => Ok(ecc.corrected),
        (1, 1) => Ok(ecc.uncorrected),
        _ => Err(INVALID_ARGUMENT),
    }
}

fn retired_pages(gpu: &Gpu) -> NvmlResult<&RetiredPages> {
    gpu.retired_pages.as_ref().ok_or(NOT_SUPPORTED)
}

fn pages_by_cause(gpu: &Gpu, cause: c_uint) -> NvmlResult<&[u64]> {
    let pages = retired_pages(gpu)?;
    match cause {
        0 => Ok(&pages.single_bit),
        1 => Ok(&pages.double_bit),
        _ => Err(INVALID_ARGUMENT),
    }
}

fn nvlink(gpu: &Gpu, link: c_uint) -> NvmlResult<&NvLink> {
    if gpu.nvlinks.is_empty() {
        return Err(NOT_SUPPORTED);
    }
    gpu.nvlinks.get(link as usize).ok_or(INVALID_ARGUMENT)
}
