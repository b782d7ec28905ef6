//! Drivers old and new, devices that tell little, and pids that are not this host's.

use fake_nvml::{Process, State};

use super::{
    Driver, GIB, HOST, MIB, NOBODY, OF_CONTAINER, OF_PROCESS, UNATTRIBUTED, USED, assert_balanced,
    await_value, gpus, process_in,
};
use crate::support::cgroups::TestCgroup;
use crate::support::{Memledger, Metrics, eventually, run};

const LISTS: [&str; 3] = ["Compute", "Graphics", "MPSCompute"];

fn attribution(metrics: &Metrics) -> Option<f64> {
    metrics.get("memledger_collector_success", &[("collector", "gpu_attribution")])
}

fn await_attribution(memledger: &Memledger, wanted: f64) -> Metrics {
    memledger.eventually("the proof of pids", |metrics| match attribution(metrics) {
        Some(found) if found == wanted => Ok(metrics.clone()),
        found => Err(format!("{found:?}")),
    })
}

fn doctor(driver: &Driver) -> String {
    let library = format!("--gpu.nvml-library={}", driver.fake.path().display());
    run(&["doctor", "--docker.socket=", "--podman.socket=", &library]).1
}

#[test]
fn drivers_without_the_newest_symbols_are_read_by_the_older_ones() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let missing = |suffixes: &[&str]| {
        let names = LISTS.iter().flat_map(|list| {
            suffixes.iter().map(move |suffix| format!("nvmlDeviceGet{list}RunningProcesses{suffix}"))
        });
        names.collect::<Vec<_>>()
    };
    for (suffixes, as_missing) in [(&["_v3"][..], true), (&["_v3", "_v2"], true), (&["_v3", "_v2"], false)] {
        let mut state = gpus(&[5 * GIB]);
        state.gpus[0].processes = vec![
            Process { kind: "CG".into(), ..Process::compute(python.pid(), Some(3 * GIB)) },
            Process::compute(std::process::id(), None),
        ];
        // a library without the symbol, and a library that is newer than the driver below it
        if as_missing {
            state.missing_symbols.extend(missing(suffixes));
        } else {
            state.function_not_found.extend(missing(suffixes));
        }
        let driver = Driver::new(&state);
        let memledger = driver.memledger(&[&container]);
        let metrics = await_value(&memledger, OF_CONTAINER, &[], 3 * GIB);
        assert_eq!(metrics.value(UNATTRIBUTED, &[]), (2 * GIB) as f64, "{suffixes:?}");
        assert_eq!(metrics.get(HOST, &[]), None, "N/A is absent: {suffixes:?}");
    }
}

#[test]
fn the_first_memory_info_tells_no_reserved_memory_which_is_then_used_and_unattributed() {
    for as_missing in [true, false] {
        let mut state = gpus(&[5 * GIB]);
        state.gpus[0].memory.reserved = 512 * MIB;
        let symbols = if as_missing { &mut state.missing_symbols } else { &mut state.function_not_found };
        symbols.insert("nvmlDeviceGetMemoryInfo_v2".into());
        let driver = Driver::new(&state);
        let metrics = await_value(&driver.memledger(&[]), USED, &[], 5 * GIB + 512 * MIB);
        assert_balanced(&metrics);
        assert_eq!(metrics.get("memledger_gpu_memory_reserved_bytes", &[]), None);
        assert_eq!(metrics.value(UNATTRIBUTED, &[]), (5 * GIB + 512 * MIB) as f64);
    }
}

#[test]
fn unified_memory_has_processes_and_no_made_up_totals() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut state = gpus(&[0]);
    state.gpus[0].memory.supported = false;
    state.gpus[0].processes = vec![Process::compute(python.pid(), Some(20 * GIB))];
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[&container]);
    let metrics = await_value(&memledger, OF_CONTAINER, &[], 20 * GIB);
    assert_eq!(metrics.value(OF_PROCESS, &[]), (20 * GIB) as f64);
    assert_eq!(metrics.value("memledger_container_gpu_memory_peak_bytes", &[]), (20 * GIB) as f64);
    let made_up = metrics.series.iter().find(|(family, _, _)| {
        family.starts_with("memledger_gpu_memory_") && !family.contains("utilization")
    });
    assert_eq!(made_up, None);
    assert_eq!(metrics.value("memledger_gpus_visible", &[]), 1.0);
}

/// Every symbol that a reading asks a device, except the one for its handle and its UUID.
fn asked() -> Vec<String> {
    let mut state = gpus(&[GIB]);
    state.gpus[0].processes = vec![Process::compute(std::process::id(), Some(GIB))];
    state.count_calls = true;
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[]);
    await_value(&memledger, USED, &[], GIB);
    let calls = driver.fake.calls().unwrap();
    let names = calls.keys().filter(|name| name.starts_with("nvmlDeviceGet"));
    let all: Vec<_> =
        names.filter(|name| !name.contains("Count") && !name.contains("Handle")).cloned().collect();
    assert!(all.len() > 20, "{all:?}");
    all.into_iter().filter(|name| name != "nvmlDeviceGetUUID").collect()
}

#[test]
fn who_a_gpu_is_is_asked_again_until_it_is_told() {
    let good = gpus(&[GIB, GIB]);
    let mut state = good.clone();
    for symbol in ["nvmlDeviceGetName", "nvmlDeviceGetPciInfo_v3"] {
        state.gpus[0].errors.insert(symbol.into(), 999);
    }
    state.gpus[1].errors.insert("nvmlDeviceGetUUID".into(), 4); // a container may not have all devices
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[]);
    let metrics = await_value(&memledger, "memledger_gpus_visible", &[], 1);
    let info = metrics.all("memledger_gpu_info", &[("gpu", "0")]);
    assert!(!info[0].1.contains_key("model") && !info[0].1.contains_key("pci_bus_id"), "{info:?}");
    for reason in ["permission", "io"] {
        let faults = [("collector", "gpu"), ("reason", reason)];
        assert!(metrics.value("memledger_read_faults_total", &faults) >= 1.0, "{reason}");
    }
    driver.set(&good);
    let gpu = &good.gpus[0];
    let labels = [("gpu", "0"), ("model", gpu.name.as_str()), ("pci_bus_id", gpu.bus_id.as_str())];
    await_value(&memledger, "memledger_gpu_info", &labels, 1);
    await_value(&memledger, "memledger_gpus_visible", &[], 2);
}

#[test]
fn a_field_that_fails_drops_neither_its_device_nor_another() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut good = gpus(&[4 * GIB, 2 * GIB]);
    for gpu in &mut good.gpus {
        gpu.processes = vec![Process::compute(python.pid(), Some(GIB))];
    }
    let driver = Driver::new(&good);
    let memledger = driver.memledger(&[&container]);
    await_value(&memledger, USED, &[("gpu", "1")], 2 * GIB);
    for (number, symbol) in asked().into_iter().enumerate() {
        for code in [4, 999, 3] {
            let mut state = good.clone();
            state.gpus[0].errors.insert(symbol.clone(), code);
            // the other GPU tells which state is being read
            let used = (10 + number as u64 * 3 + u64::from(code % 3)) * 16 * MIB + 2 * GIB;
            state.gpus[1].memory.used = used;
            driver.set(&state);
            let metrics = await_value(&memledger, USED, &[("gpu", "1")], used);
            assert_eq!(metrics.value("memledger_gpus_visible", &[]), 2.0, "{symbol} answers {code}");
            assert_eq!(metrics.value(OF_CONTAINER, &[("gpu", "1")]), GIB as f64, "{symbol} answers {code}");
            assert!(metrics.get("memledger_gpu_info", &[("gpu", "0")]).is_some(), "{symbol} answers {code}");
        }
    }
    let reasons = |reason| [("collector", "gpu"), ("reason", reason)];
    let metrics = memledger.metrics();
    assert!(metrics.value("memledger_read_faults_total", &reasons("permission")) >= 1.0);
    assert!(metrics.value("memledger_read_faults_total", &reasons("io")) >= 1.0);
}

#[test]
fn a_list_that_grows_by_hundreds_between_two_readings_is_read_whole() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut state = gpus(&[8 * GIB]);
    state.gpus[0].processes = vec![Process::compute(python.pid(), Some(GIB))];
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[&container]);
    await_value(&memledger, OF_CONTAINER, &[], GIB);
    state.gpus[0].processes.extend((0..700).map(|n| Process::compute(NOBODY - n, Some(MIB))));
    state.gpus[0].memory.used = 9 * GIB;
    driver.set(&state);
    await_value(&memledger, UNATTRIBUTED, &[], 8 * GIB);
}

#[test]
fn pids_are_believed_once_seen_and_dead_ones_withhold_nothing_later() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut state = gpus(&[4 * GIB]);
    let dead = |number| Process::compute(NOBODY - number, Some(MIB));
    state.gpus[0].processes = vec![dead(0), dead(1), dead(2)];
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[&container]);
    let metrics = await_attribution(&memledger, 0.0);
    assert_eq!(metrics.get(HOST, &[]), None, "nothing is known of the host's processes");
    assert_eq!(metrics.value(UNATTRIBUTED, &[]), (4 * GIB) as f64);
    assert!(memledger.log().contains("cannot be seen here"), "{}", memledger.log());
    let told = doctor(&driver);
    assert!(told.contains("GPU processes") && told.contains("hostPID: true"), "{told}");
    // one of four can be seen: it may be a stranger with the same number
    state.gpus[0].processes.push(Process::compute(python.pid(), Some(GIB)));
    driver.set(&state);
    let metrics = memledger.fresh_metrics();
    assert_eq!((attribution(&metrics), metrics.get(OF_CONTAINER, &[])), (Some(0.0), None));
    state.gpus[0].processes.truncate(1);
    state.gpus[0].processes.push(Process::compute(python.pid(), Some(GIB)));
    driver.set(&state);
    await_value(&memledger, OF_CONTAINER, &[], GIB);
    assert_eq!(attribution(&memledger.metrics()), Some(1.0));
    assert!(doctor(&driver).contains("2 named, with this host's pids"), "{}", doctor(&driver));
    state.gpus[0].processes = (0..9).map(dead).collect();
    driver.set(&state);
    let metrics = await_value(&memledger, HOST, &[], 0);
    assert_eq!(attribution(&metrics), Some(1.0), "it was proven");
}

/// A process in this container with this pid, which was another's.
fn process_with_pid(pid: u32, container: &TestCgroup) -> Result<crate::support::python::Python, String> {
    std::fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string())
        .map_err(|error| error.to_string())?;
    let python = process_in(container);
    if python.pid() == pid { Ok(python) } else { Err(format!("the kernel gave {}", python.pid())) }
}

#[test]
fn what_a_dead_process_still_holds_does_not_go_to_the_one_that_has_its_pid_now() {
    if let Err(error) = std::fs::OpenOptions::new().write(true).open("/proc/sys/kernel/ns_last_pid") {
        return crate::support::skip(&format!("pids cannot be chosen here: {error}"));
    }
    let (a, b) = (TestCgroup::container(), TestCgroup::container());
    let pid = process_in(&a).pid();
    let mut state = gpus(&[5 * GIB]);
    state.gpus[0].processes =
        vec![Process::compute(pid, Some(2 * GIB)), Process::compute(std::process::id(), Some(GIB))];
    for interval in ["--gpu.interval=50ms", "--gpu.interval=1s"] {
        let first = eventually("a process with the pid", || process_with_pid(pid, &a));
        let driver = Driver::new(&state);
        let memledger = driver.memledger_with(&[&a, &b], &[interval, "--gpu.sample-interval=20ms"]);
        await_value(&memledger, OF_CONTAINER, &[("container_name", a.name())], 2 * GIB);
        drop(first);
        let second = eventually("another process with the pid", || process_with_pid(pid, &b));
        await_value(&memledger, UNATTRIBUTED, &[], 4 * GIB);
        for _ in 0..5 {
            let metrics = memledger.fresh_metrics();
            let of_b =
                metrics.all("memledger_container_gpu_memory_peak_bytes", &[("container_name", b.name())]);
            assert_eq!(of_b, Vec::<&_>::new(), "it has nothing on the GPU: {interval}");
        }
        // now it has a context of its own
        let mut grown = state.clone();
        grown.gpus[0].processes[0].used = Some(3 * GIB);
        driver.set(&grown);
        await_value(&memledger, OF_CONTAINER, &[("container_name", b.name())], 3 * GIB);
        drop(second);
    }
}

#[test]
fn a_thread_of_the_kernel_among_the_named_processes_disproves_all_of_them() {
    let stat = std::fs::read_to_string("/proc/2/stat").unwrap_or_default();
    if !stat.starts_with("2 (kthreadd)") {
        return crate::support::skip("this machine shows no threads of the kernel");
    }
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut state: State = gpus(&[4 * GIB]);
    state.gpus[0].processes = vec![Process::compute(2, Some(GIB)), Process::compute(python.pid(), Some(GIB))];
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[&container]);
    let metrics = await_attribution(&memledger, 0.0);
    assert_eq!(metrics.get(OF_CONTAINER, &[]), None);
    assert_eq!(metrics.value(UNATTRIBUTED, &[]), (4 * GIB) as f64);
    assert!(memledger.log().contains("thread of the kernel"), "{}", memledger.log());
}

#[test]
fn doctor_tells_how_many_gpus_answer_and_how_accounting_mode_is_switched_on() {
    let mut state = gpus(&[GIB, GIB]);
    state.gpus[0].accounting = Some(std::collections::BTreeMap::new());
    let driver = Driver::new(&state);
    let told = doctor(&driver);
    assert!(told.contains("driver 580.95.05, 2 GPUs") && told.contains("off on 1 GPUs"), "{told}");
    assert!(told.contains("nvidia-smi -am 1"), "{told}");
    state.gpus[1].lost = true;
    driver.set(&state);
    let told = doctor(&driver);
    assert!(told.contains("MISSING  NVML") && told.contains("1 of 2 answer"), "{told}");
}

#[test]
fn the_expected_number_of_gpus_can_be_set() {
    let driver = Driver::new(&gpus(&[GIB]));
    let memledger = driver.memledger_with(&[], &["--gpu.interval=50ms", "--gpu.expected=8"]);
    let metrics = await_value(&memledger, "memledger_gpus_visible", &[], 1);
    assert_eq!(metrics.value("memledger_gpus_expected", &[]), 8.0);
}
