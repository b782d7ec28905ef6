//! The number of driver calls: one per field and reading, and one per session for fields that do not change.

use std::collections::BTreeMap;

use fake_nvml::{Process, State};

use super::{Driver, GIB, USED, await_value, gpus};
use crate::support::eventually;

const GPUS: u64 = 8;
/// Called once per device and session.
const FIXED: [&str; 9] = [
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetNumGpuCores",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetSupportedEventTypes",
    "nvmlDeviceRegisterEvents",
];
/// Called twice per device and reading: for the multiprocessors and for the memory.
const CLOCK: &str = "nvmlDeviceGetClockInfo";
/// Called once per device and reading.
const PER_READING: [&str; 8] = [
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
];
/// Called once per device in every 15th reading: the symbol, and the number of fields that use it.
const SLOW_FIELDS: [(&str, u64); 8] = [
    ("nvmlDeviceGetTotalEnergyConsumption", 1),
    ("nvmlDeviceGetTotalEccErrors", 4),
    ("nvmlDeviceGetEnforcedPowerLimit", 1),
    ("nvmlDeviceGetRemappedRows", 1),
    ("nvmlDeviceGetPcieReplayCounter", 1),
    ("nvmlDeviceGetFieldValues", 1),
    ("nvmlDeviceGetRetiredPages", 2),
    ("nvmlDeviceGetRetiredPagesPendingStatus", 1),
];
/// Called once per device in every fifth reading.
const EVERY_FIFTH: [&str; 2] = ["nvmlDeviceGetProcessUtilization", "nvmlDeviceGetMigMode"];
/// Called once for all devices.
const COMMON: [(&str, u64); 5] = [
    ("nvmlInit_v2", 1),
    ("nvmlSystemGetDriverVersion", 2), // once by nvml-wrapper, whose field numbers depend on it
    ("nvmlSystemGetCudaDriverVersion_v2", 1),
    ("nvmlDeviceGetCount_v2", 1),
    ("nvmlEventSetCreate", 1),
];

fn host() -> State {
    let mut state = gpus(&[GIB; GPUS as usize]);
    for gpu in &mut state.gpus {
        gpu.processes = vec![Process::compute(std::process::id(), Some(GIB))];
        gpu.fields.insert(38, 0.into());
    }
    state.count_calls = true;
    state
}

/// Returns the calls of memledger with these flags after its first reading, once `enough` returns true.
fn calls(flags: &[&str], enough: impl Fn(&BTreeMap<String, u64>) -> bool) -> BTreeMap<String, u64> {
    let driver = Driver::new(&host());
    let memledger = driver.memledger_with(&[], flags);
    await_value(&memledger, USED, &[("gpu", "7")], GIB);
    eventually("enough calls", || {
        let calls = driver.fake.calls().map_err(|error| error.to_string())?;
        if enough(&calls) { Ok(calls) } else { Err(format!("{calls:?}")) }
    })
}

#[test]
fn one_reading_calls_each_field_of_each_device_once() {
    let flags = ["--gpu.interval=1h", "--gpu.deadline=1h", "--gpu.sample-interval=0s"];
    let mut calls = calls(&flags, |_| true);
    let once = FIXED.iter().chain(&PER_READING).map(|symbol| (*symbol, GPUS));
    let slow = SLOW_FIELDS.iter().map(|(symbol, fields)| (*symbol, fields * GPUS));
    let fifth = EVERY_FIFTH.map(|symbol| (symbol, GPUS));
    for (symbol, wanted) in once.chain(slow).chain(COMMON).chain(fifth).chain([(CLOCK, 2 * GPUS)]) {
        assert_eq!(calls.remove(symbol), Some(wanted), "{symbol}");
    }
    assert_eq!(calls, BTreeMap::new(), "nothing else is called");
}

#[test]
fn later_readings_call_only_fields_that_change() {
    const READINGS: u64 = 25;
    let memory =
        |calls: &BTreeMap<String, u64>| calls.get("nvmlDeviceGetMemoryInfo_v2").copied().unwrap_or(0);
    let flags = ["--gpu.interval=50ms", "--gpu.deadline=1h", "--gpu.sample-interval=0s"];
    let calls = calls(&flags, |calls| memory(calls) >= READINGS * GPUS);
    let readings = memory(&calls).div_ceil(GPUS);
    for symbol in FIXED {
        assert_eq!(calls[symbol], GPUS, "{symbol}");
    }
    for symbol in PER_READING {
        // the counts are taken in the middle of a reading: a call before or after that of the memory may be one ahead or behind
        let found = calls[symbol].div_ceil(GPUS);
        assert!((readings - 1..=readings + 1).contains(&found), "{symbol}: {found} in {readings} readings");
    }
    for (symbol, fields) in SLOW_FIELDS {
        assert!(calls[symbol] <= fields * GPUS * readings.div_ceil(15), "{symbol}: {}", calls[symbol]);
    }
    for symbol in EVERY_FIFTH {
        assert!(calls[symbol] <= GPUS * readings.div_ceil(5), "{symbol}: {}", calls[symbol]);
    }
}

#[test]
fn memory_sample_calls_only_memory_and_lists_with_entries() {
    const SAMPLES: u64 = 20;
    let memory =
        |calls: &BTreeMap<String, u64>| calls.get("nvmlDeviceGetMemoryInfo_v2").copied().unwrap_or(0);
    let flags = ["--gpu.interval=1h", "--gpu.deadline=1h", "--gpu.sample-interval=20ms"];
    let calls = calls(&flags, |calls| memory(calls) >= SAMPLES * GPUS);
    let samples = memory(&calls).div_ceil(GPUS);
    let compute = calls["nvmlDeviceGetComputeRunningProcesses_v3"].div_ceil(GPUS);
    assert!((samples - 1..=samples).contains(&compute), "{compute} lists in {samples} samples");
    for symbol in
        PER_READING.iter().filter(|symbol| !symbol.contains("Memory") && !symbol.contains("Compute"))
    {
        assert_eq!(calls[*symbol], GPUS, "{symbol}: only in the full reading");
    }
    let waits = calls["nvmlEventSetWait_v2"];
    assert!((samples - 2..=samples).contains(&waits), "{waits} waits in {samples} samples");
    assert_eq!(calls["nvmlDeviceGetCount_v2"], 1);
}
