//! Utilization, temperature, power and clocks.

use std::ffi::{c_int, c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlTemperature_v1_t, nvmlUtilization_t, nvmlViolationTime_t,
};

use super::{Call, INVALID_ARGUMENT, NOT_SUPPORTED, NvmlResult, Out, check_version, entry_points, now_us};
use crate::gpu::{Clocks, Utilization};

/// Period over which a driver averages the utilization of the engines.
const SAMPLING_PERIOD_US: c_uint = 167_000;
/// All reasons in the header.
const THROTTLE_REASONS: c_ulonglong = 0x1ff;
/// Degrees above which an H100 slows down, and then shuts down.
const SLOWDOWN_C: c_uint = 87;
const SHUTDOWN_C: c_uint = 92;

entry_points! {
    fn nvmlDeviceGetUtilizationRates(call, device: nvmlDevice_t, rates: Out<nvmlUtilization_t>) {
        let load = utilization(call, device)?;
        rates.put(nvmlUtilization_t { gpu: load.gpu, memory: load.memory })
    }

    fn nvmlDeviceGetEncoderUtilization(
        call, device: nvmlDevice_t, percent: Out<c_uint>, period_us: Out<c_uint>,
    ) {
        percent.put(utilization(call, device)?.encoder.ok_or(NOT_SUPPORTED)?)?;
        period_us.put(SAMPLING_PERIOD_US)
    }

    fn nvmlDeviceGetDecoderUtilization(
        call, device: nvmlDevice_t, percent: Out<c_uint>, period_us: Out<c_uint>,
    ) {
        percent.put(utilization(call, device)?.decoder.ok_or(NOT_SUPPORTED)?)?;
        period_us.put(SAMPLING_PERIOD_US)
    }

    fn nvmlDeviceGetTemperature(call, device: nvmlDevice_t, sensor: c_uint, degrees: Out<c_uint>) {
        degrees.put(temperature(call, device, sensor)?)
    }

    fn nvmlDeviceGetTemperatureV(call, device: nvmlDevice_t, reading: Out<nvmlTemperature_v1_t>) {
        let mut value = reading.get()?;
        check_version::<nvmlTemperature_v1_t>(value.version, 1)?;
        value.temperature = temperature(call, device, value.sensorType)? as c_int;
        reading.put(value)
    }

    fn nvmlDeviceGetTemperatureThreshold(
        call, device: nvmlDevice_t, threshold: c_uint, degrees: Out<c_uint>,
    ) {
        call.gpu(device)?;
        match threshold {
            0 => degrees.put(SHUTDOWN_C),
            1 | 3 => degrees.put(SLOWDOWN_C),
            _ => Err(NOT_SUPPORTED),
        }
    }

    fn nvmlDeviceGetPowerUsage(call, device: nvmlDevice_t, milliwatts: Out<c_uint>) {
        milliwatts.put(call.gpu(device)?.power_mw.ok_or(NOT_SUPPORTED)?)
    }

    fn nvmlDeviceGetPowerManagementLimit(call, device: nvmlDevice_t, milliwatts: Out<c_uint>) {
        milliwatts.put(call.gpu(device)?.power_limit_mw.ok_or(NOT_SUPPORTED)?)
    }

    fn nvmlDeviceGetPowerManagementDefaultLimit(call, device: nvmlDevice_t, milliwatts: Out<c_uint>) {
        milliwatts.put(call.gpu(device)?.power_limit_mw.ok_or(NOT_SUPPORTED)?)
    }

    fn nvmlDeviceGetEnforcedPowerLimit(call, device: nvmlDevice_t, milliwatts: Out<c_uint>) {
        milliwatts.put(call.gpu(device)?.power_limit_mw.ok_or(NOT_SUPPORTED)?)
    }

    fn nvmlDeviceGetTotalEnergyConsumption(call, device: nvmlDevice_t, millijoules: Out<c_ulonglong>) {
        millijoules.put(call.gpu(device)?.energy_mj.ok_or(NOT_SUPPORTED)?)
    }

    fn nvmlDeviceGetNumFans(call, device: nvmlDevice_t, count: Out<c_uint>) {
        count.put(c_uint::from(call.gpu(device)?.fan_percent.is_some()))
    }

    fn nvmlDeviceGetFanSpeed(call, device: nvmlDevice_t, percent: Out<c_uint>) {
        percent.put(call.gpu(device)?.fan_percent.ok_or(NOT_SUPPORTED)?)
    }

    fn nvmlDeviceGetFanSpeed_v2(call, device: nvmlDevice_t, fan: c_uint, percent: Out<c_uint>) {
        let speed = call.gpu(device)?.fan_percent.ok_or(NOT_SUPPORTED)?;
        if fan == 0 { percent.put(speed) } else { Err(INVALID_ARGUMENT) }
    }

    fn nvmlDeviceGetClockInfo(call, device: nvmlDevice_t, which: c_uint, mhz: Out<c_uint>) {
        mhz.put(clock(call, device, which, |clocks| {
            [clocks.graphics_mhz, clocks.sm_mhz, clocks.memory_mhz, clocks.video_mhz]
        })?)
    }

    fn nvmlDeviceGetMaxClockInfo(call, device: nvmlDevice_t, which: c_uint, mhz: Out<c_uint>) {
        mhz.put(clock(call, device, which, |clocks| {
            [clocks.max_graphics_mhz, clocks.max_sm_mhz, clocks.max_memory_mhz, clocks.max_video_mhz]
        })?)
    }

    fn nvmlDeviceGetCurrentClocksThrottleReasons(call, device: nvmlDevice_t, mask: Out<c_ulonglong>) {
        mask.put(call.gpu(device)?.throttle_reasons.ok_or(NOT_SUPPORTED)?)
    }

    /// The newer name of the same.
    fn nvmlDeviceGetCurrentClocksEventReasons(call, device: nvmlDevice_t, mask: Out<c_ulonglong>) {
        mask.put(call.gpu(device)?.throttle_reasons.ok_or(NOT_SUPPORTED)?)
    }

    fn nvmlDeviceGetSupportedClocksThrottleReasons(call, device: nvmlDevice_t, mask: Out<c_ulonglong>) {
        call.gpu(device)?;
        mask.put(THROTTLE_REASONS)
    }

    fn nvmlDeviceGetSupportedClocksEventReasons(call, device: nvmlDevice_t, mask: Out<c_ulonglong>) {
        call.gpu(device)?;
        mask.put(THROTTLE_REASONS)
    }

    fn nvmlDeviceGetViolationStatus(
        call, device: nvmlDevice_t, policy: c_uint, time: Out<nvmlViolationTime_t>,
    ) {
        let gpu = call.gpu(device)?;
        let violation_ns = *gpu.violation_ns.get(&policy).ok_or(NOT_SUPPORTED)?;
        time.put(nvmlViolationTime_t { referenceTime: now_us(), violationTime: violation_ns })
    }
}

/// NVML's documents exclude GPUs in MIG mode from all utilization.
fn utilization(call: &Call, device: nvmlDevice_t) -> NvmlResult<Utilization> {
    let gpu = call.gpu(device)?;
    if gpu.mig.is_some() {
        return Err(NOT_SUPPORTED);
    }
    gpu.utilization.clone().ok_or(NOT_SUPPORTED)
}

/// There is one sensor, on the die.
fn temperature(call: &Call, device: nvmlDevice_t, sensor: c_uint) -> NvmlResult<u32> {
    let gpu = call.gpu(device)?;
    if sensor == 0 { gpu.temperature_c.ok_or(NOT_SUPPORTED) } else { Err(INVALID_ARGUMENT) }
}

fn clock(call: &Call, device: nvmlDevice_t, which: c_uint, all: fn(&Clocks) -> [u32; 4]) -> NvmlResult<u32> {
    let gpu = call.gpu(device)?;
    let clocks = gpu.clocks.as_ref().ok_or(NOT_SUPPORTED)?;
    all(clocks).get(which as usize).copied().ok_or(INVALID_ARGUMENT)
}
