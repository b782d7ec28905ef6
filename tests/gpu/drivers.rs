//! Old and new drivers, devices that report little, and pids that are not of this host.

use fake_nvml::{Process, State};

use super::{
    Driver, GIB, HOST, MIB, OF_CONTAINER, OF_PROCESS, UNATTRIBUTED, UNUSED_PID, USED, assert_balanced,
    await_value, gpus, process_in,
};
use crate::support::cgroups::TestCgroup;
use crate::support::{Memledger, Metrics, eventually, run};

const LISTS: [&str; 3] = ["Compute", "Graphics", "MPSCompute"];

fn attribution(metrics: &Metrics) -> Option<f64> {
    metrics.get("memledger_collector_success", &[("collector", "gpu_attribution")])
}

fn await_attribution(memledger: &Memledger, wanted: f64) -> Metrics {
    memledger.eventually("the trust of pids", |metrics| match attribution(metrics) {
        Some(found) if found == wanted => Ok(metrics.clone()),
        found => Err(format!("{found:?}")),
    })
}

fn doctor(driver: &Driver) -> String {
    let library = format!("--gpu.nvml-library={}", driver.fake.path().display());
    run(&["doctor", "--docker.socket=", "--podman.socket=", &library]).1
}

#[test]
fn reads_drivers_by_older_symbols() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let newest = LISTS.map(|list| format!("nvmlDeviceGet{list}RunningProcesses_v3"));
    for as_missing in [true, false] {
        let mut state = gpus(&[5 * GIB]);
        state.gpus[0].processes = vec![
            Process { kind: "CG".into(), ..Process::compute(python.pid(), Some(3 * GIB)) },
            Process::compute(std::process::id(), None),
        ];
        // a library without the symbol, and a library that is newer than the driver below it
        if as_missing {
            state.missing_symbols.extend(newest.clone());
        } else {
            state.function_not_found.extend(newest.clone());
        }
        let driver = Driver::new(&state);
        let memledger = driver.memledger(&[&container]);
        let metrics = await_value(&memledger, OF_CONTAINER, &[], 3 * GIB);
        assert_eq!(metrics.value(UNATTRIBUTED, &[]), (2 * GIB) as f64, "{as_missing}");
        assert_eq!(metrics.get(HOST, &[]), None, "N/A is absent: {as_missing}");
    }
}

#[test]
fn first_memory_info_counts_reserved_memory_as_used() {
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
fn unified_memory_has_processes_but_no_totals() {
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
    let unexpected = metrics
        .series
        .iter()
        .find(|(family, _, _)| family.starts_with("memledger_gpu_memory_") && family.ends_with("_bytes"));
    assert_eq!(unexpected, None);
    assert_eq!(metrics.value("memledger_gpus_visible", &[]), 1.0);
}

/// Returns every symbol that a reading calls for a device, except those for its handle and its UUID.
pub fn called_symbols() -> Vec<String> {
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
fn reads_identity_again_until_it_is_complete() {
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
        assert!(metrics.value("memledger_collector_read_errors_total", &faults) >= 1.0, "{reason}");
    }
    driver.set(&good);
    let gpu = &good.gpus[0];
    let labels = [("gpu", "0"), ("model", gpu.name.as_str()), ("pci_bus_id", gpu.bus_id.as_str())];
    await_value(&memledger, "memledger_gpu_info", &labels, 1);
    await_value(&memledger, "memledger_gpus_visible", &[], 2);
}

#[test]
fn failed_field_drops_no_device() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut good = gpus(&[4 * GIB, 2 * GIB]);
    for gpu in &mut good.gpus {
        gpu.processes = vec![Process::compute(python.pid(), Some(GIB))];
    }
    let driver = Driver::new(&good);
    let memledger = driver.memledger(&[&container]);
    await_value(&memledger, USED, &[("gpu", "1")], 2 * GIB);
    for (number, symbol) in called_symbols().into_iter().enumerate() {
        for code in [4, 999, 3] {
            let mut state = good.clone();
            state.gpus[0].errors.insert(symbol.clone(), code);
            // the other GPU shows which state was read
            let used = (10 + number as u64 * 3 + u64::from(code % 3)) * 16 * MIB + 2 * GIB;
            state.gpus[1].memory.used = used;
            driver.set(&state);
            let metrics = await_value(&memledger, USED, &[("gpu", "1")], used);
            assert_eq!(metrics.value("memledger_gpus_visible", &[]), 2.0, "{symbol} returns {code}");
            assert_eq!(metrics.value(OF_CONTAINER, &[("gpu", "1")]), GIB as f64, "{symbol} returns {code}");
            assert!(metrics.get("memledger_gpu_info", &[("gpu", "0")]).is_some(), "{symbol} returns {code}");
        }
    }
    let reasons = |reason| [("collector", "gpu"), ("reason", reason)];
    let metrics = memledger.metrics();
    assert!(metrics.value("memledger_collector_read_errors_total", &reasons("permission")) >= 1.0);
    assert!(metrics.value("memledger_collector_read_errors_total", &reasons("io")) >= 1.0);
}

#[test]
fn reads_a_list_that_grows_by_hundreds() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut state = gpus(&[8 * GIB]);
    state.gpus[0].processes = vec![Process::compute(python.pid(), Some(GIB))];
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[&container]);
    await_value(&memledger, OF_CONTAINER, &[], GIB);
    state.gpus[0].processes.extend((0..700).map(|n| Process::compute(UNUSED_PID - n, Some(MIB))));
    state.gpus[0].memory.used = 9 * GIB;
    driver.set(&state);
    await_value(&memledger, UNATTRIBUTED, &[], 8 * GIB);
}

#[test]
fn trusts_pids_once_visible_and_ignores_pids_of_ended_processes() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut state = gpus(&[4 * GIB]);
    let ended = |number| Process::compute(UNUSED_PID - number, Some(MIB));
    state.gpus[0].processes = vec![ended(0), ended(1), ended(2)];
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[&container]);
    let metrics = await_attribution(&memledger, 0.0);
    assert_eq!(metrics.get(HOST, &[]), None, "the host's processes are unknown");
    assert_eq!(metrics.value(UNATTRIBUTED, &[]), (4 * GIB) as f64);
    assert!(memledger.log().contains("are not visible"), "{}", memledger.log());
    let output = doctor(&driver);
    assert!(output.contains("GPU processes") && output.contains("hostPID: true"), "{output}");
    // one of four is visible: it may be another process with the same pid
    state.gpus[0].processes.push(Process::compute(python.pid(), Some(GIB)));
    driver.set(&state);
    let metrics = memledger.fresh_metrics();
    assert_eq!((attribution(&metrics), metrics.get(OF_CONTAINER, &[])), (Some(0.0), None));
    state.gpus[0].processes.truncate(1);
    state.gpus[0].processes.push(Process::compute(python.pid(), Some(GIB)));
    driver.set(&state);
    await_value(&memledger, OF_CONTAINER, &[], GIB);
    assert_eq!(attribution(&memledger.metrics()), Some(1.0));
    assert!(doctor(&driver).contains("2 with pids of this host"), "{}", doctor(&driver));
    state.gpus[0].processes = (0..9).map(ended).collect();
    driver.set(&state);
    let metrics = await_value(&memledger, HOST, &[], 0);
    assert_eq!(attribution(&metrics), Some(1.0), "trust lasts");
}

/// Starts a process in this container with this pid, which another process had before.
fn process_with_pid(pid: u32, container: &TestCgroup) -> Result<crate::support::python::Python, String> {
    std::fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string())
        .map_err(|error| error.to_string())?;
    let python = process_in(container);
    if python.pid() == pid { Ok(python) } else { Err(format!("the kernel gave {}", python.pid())) }
}

#[test]
fn memory_of_an_ended_process_is_not_attributed_to_a_reused_pid() {
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
            assert_eq!(of_b, Vec::<&_>::new(), "it has no GPU memory: {interval}");
        }
        // the driver has noticed the end; then the other process has its own context
        let mut without = state.clone();
        without.gpus[0].processes.remove(0);
        without.gpus[0].memory.used = 3 * GIB;
        driver.set(&without);
        await_value(&memledger, USED, &[], 3 * GIB);
        driver.set(&state);
        await_value(&memledger, OF_CONTAINER, &[("container_name", b.name())], 2 * GIB);
        drop(second);
    }
}

#[test]
fn kernel_thread_among_the_pids_makes_all_untrusted() {
    let stat = std::fs::read_to_string("/proc/2/stat").unwrap_or_default();
    if !stat.starts_with("2 (kthreadd)") {
        return crate::support::skip("no kernel threads are visible on this machine");
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
    assert!(memledger.log().contains("kernel thread"), "{}", memledger.log());
}

#[test]
fn doctor_reports_missing_gpus() {
    let mut state = gpus(&[GIB, GIB]);
    let driver = Driver::new(&state);
    let output = doctor(&driver);
    assert!(output.contains("driver 580.95.05, 2 GPUs"), "{output}");
    state.gpus[1].lost = true;
    driver.set(&state);
    let output = doctor(&driver);
    assert!(output.contains("MISSING  NVML") && output.contains("1 of 2 respond"), "{output}");
}

#[test]
fn the_expected_number_of_gpus_can_be_set() {
    let driver = Driver::new(&gpus(&[GIB]));
    let memledger = driver.memledger_with(&[], &["--gpu.interval=50ms", "--gpu.expected=8"]);
    let metrics = await_value(&memledger, "memledger_gpus_visible", &[], 1);
    assert_eq!(metrics.value("memledger_gpus_expected", &[]), 8.0);
}
