//! How often the driver is asked: each field once per reading, what does not change once.

use std::collections::BTreeMap;

use fake_nvml::{Process, State};

use super::{Driver, GIB, USED, await_value, gpus};
use crate::support::eventually;

const GPUS: u64 = 8;
/// Asked once per device and session.
const FIXED: [&str; 10] = [
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetNumGpuCores",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetSupportedEventTypes",
    "nvmlDeviceRegisterEvents",
    "nvmlDeviceGetAccountingMode", // once a minute
];
/// Asked once per device and reading.
const EACH_TIME: [&str; 11] = [
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    "nvmlDeviceGetProcessUtilization",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
];
/// Asked once per device in every tenth reading: the symbol, and how many fields it answers.
const SELDOM: [(&str, u64); 4] = [
    ("nvmlDeviceGetTotalEccErrors", 2),
    ("nvmlDeviceGetRemappedRows", 1),
    ("nvmlDeviceGetPcieReplayCounter", 1),
    ("nvmlDeviceGetFieldValues", 1),
];
/// Asked once a minute: these GPUs do not have it.
const UNSUPPORTED: [(&str, u64); 2] =
    [("nvmlDeviceGetRetiredPages", 2), ("nvmlDeviceGetRetiredPagesPendingStatus", 1)];
/// Asked for all devices together.
const COMMON: [(&str, u64); 5] = [
    ("nvmlInit_v2", 1),
    ("nvmlSystemGetDriverVersion", 2), // once by nvml-wrapper, which numbers fields by it
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

/// The calls of a memledger with these flags after its first reading, or once `enough` says so.
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
fn one_reading_asks_each_field_of_each_device_once() {
    let flags = ["--gpu.interval=1h", "--gpu.deadline=1h", "--gpu.sample-interval=0s"];
    let mut calls = calls(&flags, |_| true);
    let once = FIXED.iter().chain(&EACH_TIME).map(|symbol| (*symbol, GPUS));
    let seldom = SELDOM.iter().chain(&UNSUPPORTED).map(|(symbol, fields)| (*symbol, fields * GPUS));
    for (symbol, wanted) in once.chain(seldom).chain(COMMON) {
        assert_eq!(calls.remove(symbol), Some(wanted), "{symbol}");
    }
    assert_eq!(calls, BTreeMap::new(), "nothing else is asked");
}

#[test]
fn later_readings_ask_only_what_changes() {
    const READINGS: u64 = 25;
    let memory =
        |calls: &BTreeMap<String, u64>| calls.get("nvmlDeviceGetMemoryInfo_v2").copied().unwrap_or(0);
    let flags = ["--gpu.interval=50ms", "--gpu.sample-interval=0s"];
    let calls = calls(&flags, |calls| memory(calls) >= READINGS * GPUS);
    let readings = memory(&calls).div_ceil(GPUS);
    for symbol in FIXED {
        assert_eq!(calls[symbol], GPUS, "{symbol}");
    }
    for symbol in EACH_TIME {
        let found = calls[symbol].div_ceil(GPUS);
        assert!((readings - 1..=readings).contains(&found), "{symbol}: {found} in {readings} readings");
    }
    for (symbol, fields) in SELDOM {
        assert!(calls[symbol] <= fields * GPUS * readings.div_ceil(10), "{symbol}: {}", calls[symbol]);
    }
    for (symbol, fields) in UNSUPPORTED {
        assert_eq!(calls[symbol], fields * GPUS, "{symbol}");
    }
}

#[test]
fn a_quick_look_asks_for_memory_and_the_lists_that_have_an_entry() {
    const LOOKS: u64 = 20;
    let memory =
        |calls: &BTreeMap<String, u64>| calls.get("nvmlDeviceGetMemoryInfo_v2").copied().unwrap_or(0);
    let flags = ["--gpu.interval=1h", "--gpu.deadline=1h", "--gpu.sample-interval=20ms"];
    let calls = calls(&flags, |calls| memory(calls) >= LOOKS * GPUS);
    let looks = memory(&calls).div_ceil(GPUS);
    let compute = calls["nvmlDeviceGetComputeRunningProcesses_v3"].div_ceil(GPUS);
    assert!((looks - 1..=looks).contains(&compute), "{compute} lists in {looks} looks");
    for symbol in EACH_TIME.iter().filter(|symbol| !symbol.contains("Memory") && !symbol.contains("Compute"))
    {
        assert_eq!(calls[*symbol], GPUS, "{symbol}: in the one reading only");
    }
    let waits = calls["nvmlEventSetWait_v2"];
    assert!((looks - 2..=looks).contains(&waits), "{waits} waits in {looks} looks");
    assert_eq!(calls["nvmlDeviceGetCount_v2"], 1);
}
