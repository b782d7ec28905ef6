//! Processes on the GPU.
//!
//! On a GPU in MIG mode the handle of the GPU lists the processes of all instances, that of a MIG device its
//! own.

use std::ffi::{c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlProcessDetail_v1_t, nvmlProcessDetailList_v1_t, nvmlProcessInfo_v1_t,
    nvmlProcessInfo_v2_t, nvmlProcessUtilizationSample_t,
};

use super::{
    Call, INVALID_ARGUMENT, NO_INSTANCE, NOT_AVAILABLE, NOT_FOUND, NOT_SUPPORTED, NvmlResult, Out, Target,
    check_version, entry_points, now_us,
};
use crate::gpu::Process;

/// Kind letters in the order of the modes of the process detail list.
const KINDS: [char; 3] = ['C', 'G', 'M'];
const COMPUTE: char = KINDS[0];
const GRAPHICS: char = KINDS[1];
const MPS: char = KINDS[2];

type Count = Out<c_uint>;
type V1 = Out<nvmlProcessInfo_v1_t>;
type V2 = Out<nvmlProcessInfo_v2_t>;

entry_points! {
    fn nvmlDeviceGetComputeRunningProcesses(call, device: nvmlDevice_t, count: Count, list: V1) {
        put_v1(call, device, count, list, COMPUTE)
    }

    fn nvmlDeviceGetComputeRunningProcesses_v2(call, device: nvmlDevice_t, count: Count, list: V2) {
        put_v2(call, device, count, list, COMPUTE)
    }

    fn nvmlDeviceGetComputeRunningProcesses_v3(call, device: nvmlDevice_t, count: Count, list: V2) {
        put_v3(call, device, count, list, COMPUTE)
    }

    fn nvmlDeviceGetGraphicsRunningProcesses(call, device: nvmlDevice_t, count: Count, list: V1) {
        put_v1(call, device, count, list, GRAPHICS)
    }

    fn nvmlDeviceGetGraphicsRunningProcesses_v2(call, device: nvmlDevice_t, count: Count, list: V2) {
        put_v2(call, device, count, list, GRAPHICS)
    }

    fn nvmlDeviceGetGraphicsRunningProcesses_v3(call, device: nvmlDevice_t, count: Count, list: V2) {
        put_v3(call, device, count, list, GRAPHICS)
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses(call, device: nvmlDevice_t, count: Count, list: V1) {
        put_v1(call, device, count, list, MPS)
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses_v2(call, device: nvmlDevice_t, count: Count, list: V2) {
        put_v2(call, device, count, list, MPS)
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(call, device: nvmlDevice_t, count: Count, list: V2) {
        put_v3(call, device, count, list, MPS)
    }

    fn nvmlDeviceGetRunningProcessDetailList(
        call, device: nvmlDevice_t, list: Out<nvmlProcessDetailList_v1_t>,
    ) {
        let target = call.target(device)?;
        let mut header = list.get()?;
        check_version::<nvmlProcessDetailList_v1_t>(header.version, 1)?;
        let kind = *KINDS.get(header.mode as usize).ok_or(INVALID_ARGUMENT)?;
        let records: Vec<_> = records(&target, kind).collect();
        let room = header.numProcArrayEntries as usize;
        let array = Out(header.procArray);
        header.numProcArrayEntries = records.len() as c_uint;
        list.put(header)?;
        if records.is_empty() {
            return Ok(());
        }
        if room < records.len() || array.is_null() {
            return Err(call.too_small(device));
        }
        array.slice(records.len())?.copy_from_slice(&records);
        Ok(())
    }

    /// Returns samples younger than `last_seen`; without any, an error instead of an empty list.
    fn nvmlDeviceGetProcessUtilization(
        call, device: nvmlDevice_t, list: Out<nvmlProcessUtilizationSample_t>, count: Count,
        last_seen: c_ulonglong,
    ) {
        let gpu = call.gpu(device)?;
        if gpu.mig.is_some() {
            return Err(NOT_SUPPORTED);
        }
        let samples = gpu.utilization_samples.iter().map(|sample| nvmlProcessUtilizationSample_t {
            pid: sample.pid,
            timeStamp: sample.time_us.unwrap_or_else(now_us),
            smUtil: sample.sm,
            memUtil: sample.memory,
            encUtil: sample.encoder,
            decUtil: sample.decoder,
        });
        let young: Vec<_> = samples.filter(|sample| sample.timeStamp > last_seen).collect();
        if young.is_empty() { Err(NOT_FOUND) } else { call.put_list(device, count, list, &young) }
    }
}

fn put_v1(call: &Call, device: nvmlDevice_t, count: Count, list: V1, kind: char) -> NvmlResult {
    let target = call.target(device)?;
    let records: Vec<_> = records(&target, kind)
        .map(|record| nvmlProcessInfo_v1_t { pid: record.pid, usedGpuMemory: record.usedGpuMemory })
        .collect();
    call.put_list(device, count, list, &records)
}

fn put_v2(call: &Call, device: nvmlDevice_t, count: Count, list: V2, kind: char) -> NvmlResult {
    let target = call.target(device)?;
    let records: Vec<_> = records(&target, kind)
        .map(|record| nvmlProcessInfo_v2_t {
            pid: record.pid,
            usedGpuMemory: record.usedGpuMemory,
            gpuInstanceId: record.gpuInstanceId,
            computeInstanceId: record.computeInstanceId,
        })
        .collect();
    call.put_list(device, count, list, &records)
}

/// Writes the layout of the second version, or the 32 bytes of some R535 drivers for this symbol.
///
/// Such a driver writes beyond an array that the caller sized for records of 24 bytes. This library returns
/// *insufficient size* instead, so that a test sees a wrong number and not corrupted memory.
fn put_v3(call: &Call, device: nvmlDevice_t, count: Count, list: V2, kind: char) -> NvmlResult {
    if call.loaded.state.process_record_bytes != 32 {
        return put_v2(call, device, count, list, kind);
    }
    let target = call.target(device)?;
    let records: Vec<_> = records(&target, kind).collect();
    let room_bytes = count.get()? as usize * size_of::<nvmlProcessInfo_v2_t>();
    count.put(records.len() as c_uint)?;
    if records.is_empty() {
        return Ok(());
    }
    if room_bytes < size_of_val(records.as_slice()) || list.is_null() {
        return Err(call.too_small(device));
    }
    // nvmlProcessDetail_v1_t has the fields of those records in their order.
    list.cast::<nvmlProcessDetail_v1_t>().slice(records.len())?.copy_from_slice(&records);
    Ok(())
}

fn records(target: &Target, kind: char) -> impl Iterator<Item = nvmlProcessDetail_v1_t> {
    let in_target = |process: &&Process| match &target.mig {
        None => true,
        Some(mig) => process.gi == Some(mig.gi) && process.ci == Some(mig.ci),
    };
    target.gpu.processes.iter().filter(move |process| process.kind.contains(kind)).filter(in_target).map(
        |process| nvmlProcessDetail_v1_t {
            pid: process.pid,
            usedGpuMemory: process.used.unwrap_or(NOT_AVAILABLE),
            gpuInstanceId: process.gi.unwrap_or(NO_INSTANCE),
            computeInstanceId: process.ci.unwrap_or(NO_INSTANCE),
            usedGpuCcProtectedMemory: 0,
        },
    )
}
