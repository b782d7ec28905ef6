//! Utilization, power, temperature and errors of GPUs.

use std::collections::BTreeMap;

use fake_nvml::{
    Clocks, Ecc, Event, Field, FieldKind, Process, RemappedRows, RetiredPages, TypedField, Utilization,
    UtilizationSample,
};
use memledger::gpu::device_metrics::KNOWN_XIDS;

use super::faults::await_success;
use super::{Driver, GIB, OF_CONTAINER, USED, await_value, gpus, process_in};
use crate::support::cgroups::TestCgroup;

const XIDS: &str = "memledger_gpu_xid_errors_total";
const FIRST: [(&str, &str); 1] = [("gpu", "0")];

#[test]
fn exports_gpu_metrics_in_base_units() {
    let mut state = gpus(&[GIB, GIB]);
    let gpu = &mut state.gpus[0];
    gpu.utilization = Some(Utilization { gpu: 87, memory: 41, ..Utilization::default() });
    gpu.power_mw = Some(512_345);
    gpu.energy_mj = Some(7_250_500);
    gpu.temperature_c = Some(71);
    gpu.ecc = Some(Ecc {
        corrected: 5_000_000_000,
        uncorrected: 2,
        volatile_corrected: 4,
        volatile_uncorrected: 1,
    });
    gpu.remapped_rows =
        Some(RemappedRows { correctable: 3, uncorrectable: 1, pending: true, failure: false });
    gpu.pcie.replays = Some(12);
    gpu.power_limit_mw = Some(650_000);
    gpu.clocks = Some(Clocks { sm_mhz: 1_755, memory_mhz: 2_619, ..Clocks::default() });
    // 162 is of one link only; a 64-bit counter continues beyond 2^32
    gpu.fields =
        BTreeMap::from([(38, 7.into()), (45, 0.into()), (52, 9_000_000_000_u64.into()), (162, 4.into())]);
    gpu.fields.insert(82, 88.into());
    gpu.fields.insert(138, 9_000_000_000_u64.into()); // KiB over all links
    let narrow = FieldKind::U32; // it would overflow between two readings
    gpu.fields.insert(139, Field::Typed(TypedField { value: 5.into(), kind: narrow }));
    state.gpus[1].remapped_rows = None;
    state.gpus[1].retired_pages =
        Some(RetiredPages { single_bit: vec![1, 2], double_bit: vec![3], pending: true });
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[]);
    let metrics = await_value(&memledger, USED, &FIRST, GIB);
    let value = |name: &str, own: &[(&str, &str)]| {
        metrics.get(&format!("memledger_gpu_{name}"), &[&FIRST[..], own].concat())
    };
    assert_eq!(value("utilization_ratio", &[]), Some(0.87));
    assert_eq!(value("memory_utilization_ratio", &[]), Some(0.41));
    assert_eq!(value("power_watts", &[]), Some(512.345));
    assert_eq!(value("energy_joules_total", &[]), Some(7250.5));
    assert_eq!(value("temperature_celsius", &[]), Some(71.0));
    assert_eq!(value("memory_temperature_celsius", &[]), Some(88.0));
    assert_eq!(value("power_limit_watts", &[]), Some(650.0));
    assert_eq!(value("clock_hertz", &[("clock", "sm")]), Some(1.755e9));
    assert_eq!(value("clock_hertz", &[("clock", "memory")]), Some(2.619e9));
    assert_eq!(value("volatile_ecc_errors_total", &[("kind", "corrected")]), Some(4.0));
    assert_eq!(value("volatile_ecc_errors_total", &[("kind", "uncorrected")]), Some(1.0));
    assert_eq!(value("nvlink_bytes_total", &[("direction", "transmitted")]), Some(9e9 * 1024.0));
    assert_eq!(value("nvlink_bytes_total", &[("direction", "received")]), None);
    assert_eq!(value("ecc_errors_total", &[("kind", "corrected")]), Some(5e9));
    assert_eq!(value("ecc_errors_total", &[("kind", "uncorrected")]), Some(2.0));
    for (kind, count) in [("correctable", 3.0), ("uncorrectable", 1.0)] {
        assert_eq!(value("remapped_rows", &[("kind", kind)]), Some(count), "{kind}");
    }
    assert_eq!(value("remapped_rows_pending", &[]), Some(1.0));
    assert_eq!(value("remapped_rows_failure", &[]), Some(0.0));
    assert_eq!(value("pcie_replays_total", &[]), Some(12.0));
    let links = [("crc_flit", Some(7.0)), ("crc_data", Some(0.0)), ("replay", Some(9e9))];
    for (kind, count) in links.into_iter().chain([("recovery", None), ("ecc_data", None)]) {
        assert_eq!(value("nvlink_errors_total", &[("kind", kind)]), count, "{kind}");
    }
    let second = [("gpu", "1")];
    assert_eq!(metrics.all("memledger_gpu_nvlink_errors_total", &second), Vec::<&_>::new(), "no links");
    for family in ["", "_pending", "_failure"] {
        let family = format!("memledger_gpu_remapped_rows{family}");
        assert_eq!(metrics.all(&family, &second), Vec::<&_>::new(), "{family}");
    }
    for (kind, count) in [("single_bit", 2.0), ("double_bit", 1.0)] {
        let labels = [("gpu", "1"), ("kind", kind)];
        assert_eq!(metrics.value("memledger_gpu_retired_pages", &labels), count, "{kind}");
    }
    assert_eq!(metrics.value("memledger_gpu_retired_pages_pending", &second), 1.0);
}

#[test]
fn unsupported_fields_are_absent_without_errors() {
    let mut state = gpus(&[GIB]);
    let gpu = &mut state.gpus[0];
    (gpu.utilization, gpu.power_mw, gpu.temperature_c, gpu.energy_mj) = (None, None, None, None);
    (gpu.throttle_reasons, gpu.ecc, gpu.remapped_rows, gpu.pcie.replays) = (None, None, None, None);
    (gpu.clocks, gpu.power_limit_mw) = (None, None);
    let driver = Driver::new(&state);
    let metrics = await_value(&driver.memledger(&[]), USED, &FIRST, GIB);
    let own = [
        "_ratio",
        "_watts",
        "_celsius",
        "_joules_total",
        "_rows",
        "_pages",
        "throttle",
        "ecc",
        "replays",
        "_hertz",
    ];
    let found = metrics.series.iter().find(|(family, _, _)| {
        family.starts_with("memledger_gpu_") && own.iter().any(|part| family.contains(part))
    });
    assert_eq!(found, None);
    let faults = metrics.sum("memledger_collector_read_errors_total", &[("collector", "gpu")]);
    assert_eq!(faults, 0.0, "an unsupported field is no error");
}

#[test]
fn exports_no_sentinels_of_sensors() {
    let mut state = gpus(&[GIB]);
    let gpu = &mut state.gpus[0];
    gpu.utilization = Some(Utilization { gpu: u32::MAX, memory: 101, ..Utilization::default() });
    (gpu.power_mw, gpu.temperature_c, gpu.energy_mj) = (Some(u32::MAX), Some(u32::MAX), Some(u64::MAX));
    gpu.ecc = Some(Ecc {
        corrected: u64::MAX,
        uncorrected: 9_200_000_000_000_000_000,
        volatile_corrected: u64::MAX,
        volatile_uncorrected: u64::MAX,
    });
    gpu.pcie.replays = Some(u32::MAX);
    gpu.fields = BTreeMap::from([(38, u64::MAX.into()), (45, u64::from(u32::MAX).into())]);
    gpu.fields.insert(82, u64::from(u32::MAX).into());
    gpu.power_limit_mw = Some(u32::MAX);
    gpu.clocks = Some(Clocks { sm_mhz: u32::MAX, memory_mhz: u32::MAX, ..Clocks::default() });
    let driver = Driver::new(&state);
    let metrics = await_value(&driver.memledger(&[]), USED, &FIRST, GIB);
    super::assert_plausible(&metrics, 80 * GIB);
    for part in [
        "utilization_ratio",
        "power",
        "temperature",
        "memory_temperature",
        "energy",
        "ecc",
        "volatile",
        "pcie",
        "nvlink",
        "clock",
    ] {
        let found =
            metrics.series.iter().find(|(family, _, _)| family.starts_with(&format!("memledger_gpu_{part}")));
        assert_eq!(found, None);
    }
}

#[test]
fn counts_throttle_time_while_a_reason_is_active() {
    let mut state = gpus(&[GIB]);
    state.gpus[0].throttle_reasons = Some(0x4 | 0x1); // power cap; idle is not throttling
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[]);
    let seconds = |metrics: &crate::support::Metrics, reason| {
        metrics.try_value("memledger_gpu_throttle_seconds_total", &[("reason", reason)])
    };
    let grown = memledger.eventually("time under the power cap", |metrics| {
        let time = seconds(metrics, "sw_power_cap")?;
        if time > 0.2 { Ok(time) } else { Err(format!("{time} s")) }
    });
    state.gpus[0].throttle_reasons = Some(0x40);
    driver.set(&state);
    memledger.eventually("time under the thermal limit", |metrics| {
        let time = seconds(metrics, "hw_thermal")?;
        if time > 0.1 { Ok(()) } else { Err(format!("{time} s")) }
    });
    let metrics = memledger.metrics();
    assert!(seconds(&metrics, "sw_power_cap").unwrap() >= grown, "it does not decrease");
    let stopped_at = seconds(&metrics, "sw_power_cap").unwrap();
    assert_eq!(seconds(&memledger.fresh_metrics(), "sw_power_cap").unwrap(), stopped_at, "it does not grow");
    assert_eq!(seconds(&metrics, "sync_boost").unwrap(), 0.0);
}

#[test]
fn counts_xids_from_zero_with_their_time() {
    let mut state = gpus(&[GIB, GIB]);
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[]);
    let count = |gpu: &str, xid: &str| memledger.metrics().get(XIDS, &[("gpu", gpu), ("xid", xid)]);
    await_value(&memledger, XIDS, &[("gpu", "1"), ("xid", "79")], 0);
    for (xid, _, _) in KNOWN_XIDS {
        assert_eq!(count("0", &xid.to_string()), Some(0.0), "{xid}");
    }
    assert_eq!(memledger.metrics().all(XIDS, &[("gpu", "0")]).len(), KNOWN_XIDS.len());
    assert_eq!(memledger.metrics().all("memledger_gpu_last_xid_timestamp_seconds", &[]).len(), 0);
    state.events =
        vec![Event::xid(1, 0, 31), Event::xid(2, 1, 79), Event::xid(3, 0, 31), Event::xid(4, 0, 61)];
    driver.set(&state);
    await_value(&memledger, XIDS, &[("gpu", "0"), ("xid", "61")], 1);
    await_value(&memledger, XIDS, &[("gpu", "0"), ("xid", "31")], 2);
    await_value(&memledger, XIDS, &[("gpu", "1"), ("xid", "79")], 1);
    let metrics = memledger.fresh_metrics();
    let now = metrics.value("memledger_snapshot_timestamp_seconds", &[]);
    let last = metrics.value("memledger_gpu_last_xid_timestamp_seconds", &[("gpu", "1"), ("xid", "79")]);
    assert!(now - last < 60.0 && last <= now, "{last} before {now}");
    assert_eq!(metrics.sum(XIDS, &[]), 4.0);
    // a lost GPU invalidates the set; Xids of the other GPU are still counted, and counters do not decrease
    state.gpus[1].lost = true;
    driver.set(&state);
    await_value(&memledger, "memledger_gpus_visible", &[], 1);
    state.events.push(Event::xid(5, 0, 13));
    driver.set(&state);
    await_value(&memledger, XIDS, &[("gpu", "0"), ("xid", "13")], 1);
    state.gpus[1].lost = false;
    driver.set(&state);
    await_value(&memledger, XIDS, &[("gpu", "1"), ("xid", "79")], 1);
}

#[test]
fn time_of_a_hung_call_is_no_throttle_time() {
    let mut state = gpus(&[GIB]);
    state.gpus[0].throttle_reasons = Some(0x4);
    let driver = Driver::new(&state);
    let flags = ["--gpu.interval=50ms", "--gpu.deadline=300ms", "--gpu.sample-interval=0s"];
    let memledger = driver.memledger_with(&[], &flags);
    let seconds = |metrics: &crate::support::Metrics| {
        metrics.try_value("memledger_gpu_throttle_seconds_total", &[("reason", "sw_power_cap")])
    };
    let before = memledger.eventually("time under the power cap", |metrics| match seconds(metrics)? {
        0.0 => Err("none".to_owned()),
        time => Ok(time),
    });
    state.slow_ms.insert("nvmlDeviceGetPowerUsage".into(), 6_000);
    driver.set(&state);
    await_success(&memledger, Some(0.0));
    state.slow_ms.clear();
    driver.set(&state);
    let metrics = await_success(&memledger, Some(1.0));
    let counted = seconds(&metrics).unwrap() - before;
    assert!(counted < 5.0, "{counted} s");
}

#[test]
fn counts_the_xid_of_a_lost_gpu() {
    let mut state = gpus(&[GIB, GIB]);
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[]);
    let of_lost = [("gpu", "1"), ("gpu_uuid", state.gpus[1].uuid.as_str()), ("xid", "79")];
    await_value(&memledger, XIDS, &of_lost, 0);
    let mut lost = state.clone();
    lost.gpus[1].lost = true;
    lost.events = vec![Event::xid(1, 1, 79)];
    driver.set(&lost);
    await_value(&memledger, XIDS, &of_lost, 1);
    let metrics = await_value(&memledger, "memledger_gpus_visible", &[], 1);
    assert_eq!(metrics.get(USED, &[("gpu", "1")]), None, "a lost GPU has no memory");
    assert_eq!(metrics.value(XIDS, &of_lost), 1.0);
    assert!(metrics.get("memledger_gpu_last_xid_timestamp_seconds", &of_lost).is_some());
    state.events.clone_from(&lost.events);
    driver.set(&state);
    await_value(&memledger, USED, &[("gpu", "1")], GIB);
    await_value(&memledger, XIDS, &of_lost, 1);
}

#[test]
fn xids_of_an_unregistered_gpu_are_absent() {
    for symbol in ["nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents"] {
        let mut state = gpus(&[GIB, GIB, GIB]);
        state.gpus[1].errors.insert(symbol.into(), 999);
        let driver = Driver::new(&state);
        let memledger = driver.memledger(&[]);
        await_value(&memledger, XIDS, &[("gpu", "2"), ("xid", "79")], 0);
        let metrics = await_value(&memledger, XIDS, &[("gpu", "0"), ("xid", "79")], 0);
        assert_eq!(metrics.all(XIDS, &[("gpu", "1")]), Vec::<&_>::new(), "{symbol}");
        if symbol == "nvmlDeviceGetSupportedEventTypes" {
            state.gpus[1].errors.clear();
            driver.set(&state);
            await_value(&memledger, XIDS, &[("gpu", "1"), ("xid", "79")], 0);
        }
    }
}

#[test]
fn registers_other_gpus_again_at_once_after_a_lost_one() {
    let mut state = gpus(&[GIB, GIB]);
    state.count_calls = true;
    let driver = Driver::new(&state);
    let flags = ["--gpu.interval=1h", "--gpu.deadline=1h", "--gpu.sample-interval=20ms"];
    let memledger = driver.memledger_with(&[], &flags);
    await_value(&memledger, XIDS, &[("gpu", "1"), ("xid", "79")], 0);
    state.gpus[1].lost = true;
    driver.set(&state);
    crate::support::eventually("another set, long before the next full reading", || {
        let calls = driver.fake.calls().unwrap();
        let of = |symbol: &str| calls.get(symbol).copied().unwrap_or(0);
        match (of("nvmlEventSetCreate"), of("nvmlDeviceRegisterEvents")) {
            (2, 3) => Ok(()),
            found => Err(format!("sets and registrations: {found:?}")),
        }
    });
}

#[test]
fn container_utilization_is_the_sum_of_its_processes() {
    let (a, b) = (TestCgroup::container(), TestCgroup::container());
    let (first, second, third) = (process_in(&a), process_in(&a), process_in(&b));
    let mut state = gpus(&[8 * GIB, 0]);
    let all = [&first, &second, &third];
    state.gpus[0].processes = all.iter().map(|python| Process::compute(python.pid(), Some(GIB))).collect();
    let sample = |pid, sm| UtilizationSample { pid, sm, ..UtilizationSample::default() };
    state.gpus[0].utilization_samples =
        vec![sample(first.pid(), 50), sample(first.pid(), 30), sample(second.pid(), 25), sample(1, 7)];
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[&a, &b]);
    let metrics = await_value(&memledger, OF_CONTAINER, &[("container_name", a.name())], 2 * GIB);
    let busy = |container: &TestCgroup| {
        metrics.value("memledger_container_gpu_utilization_ratio", &[("container_name", container.name())])
    };
    assert!((busy(&a) - 0.65).abs() < 1e-9, "the mean of the first process's samples, plus the second's");
    assert_eq!(busy(&b), 0.0, "the driver omits idle processes");
    let pid = first.pid().to_string();
    let of_first = metrics.value("memledger_process_gpu_utilization_ratio", &[("pid", &pid)]);
    assert!((of_first - 0.4).abs() < 1e-9);
    // a process with only garbage samples was active, by an unknown share
    state.gpus[0].utilization_samples[2].sm = 1_001;
    driver.set(&state);
    let of_second = [("pid", &*second.pid().to_string())];
    let metrics = memledger.eventually("no share of a process with garbage", |metrics| {
        match metrics.get("memledger_process_gpu_utilization_ratio", &of_second) {
            None => Ok(metrics.clone()),
            Some(share) => Err(format!("{share}")),
        }
    });
    assert_eq!(
        metrics.get("memledger_container_gpu_utilization_ratio", &[("container_name", a.name())]),
        None,
        "the sum is absent too"
    );
    let faults = [("collector", "gpu"), ("reason", "malformed")];
    assert!(metrics.value("memledger_collector_read_errors_total", &faults) >= 1.0);
    // no samples at all: all processes were idle
    state.gpus[0].utilization_samples.clear();
    driver.set(&state);
    await_value(&memledger, "memledger_container_gpu_utilization_ratio", &[("container_name", a.name())], 0);
}

/// The driver samples less often than it is read: a sample stays valid for a second, and one above 100 % is 100 %.
#[test]
fn active_process_without_a_new_sample_is_not_idle() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut state = gpus(&[GIB]);
    state.gpus[0].processes = vec![Process::compute(python.pid(), Some(GIB))];
    // in the driver's future, so that it stays younger than a second for the whole test
    #[allow(clippy::disallowed_methods)]
    let soon = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_micros() as u64;
    let sample = UtilizationSample {
        pid: python.pid(),
        sm: 120,
        time_us: Some(soon + 30_000_000),
        ..UtilizationSample::default()
    };
    state.gpus[0].utilization_samples = vec![sample];
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[&container]);
    const RATIO: &str = "memledger_container_gpu_utilization_ratio";
    await_value(&memledger, RATIO, &[], 1);
    for _ in 0..10 {
        assert_eq!(memledger.fresh_metrics().get(RATIO, &[]), Some(1.0));
    }
    let malformed = [("collector", "gpu"), ("reason", "malformed")];
    assert_eq!(memledger.metrics().value("memledger_collector_read_errors_total", &malformed), 0.0);
    state.gpus[0].utilization_samples.clear();
    driver.set(&state);
    await_value(&memledger, RATIO, &[], 0);
}
