//! Faults of a driver, its library or a GPU: memledger continues without it.

use std::collections::HashMap;
use std::process::Command;

use fake_nvml::{FakeNvml, Memory, MigDevice, Process, State, Step};
use serde_json::json;

use super::{
    Driver, GIB, HOST, MEMORY_INFO, OF_CONTAINER, OF_PROCESS, RESTARTS, UNATTRIBUTED, UNKILLABLE, USED,
    assert_balanced, assert_plausible, assert_stops_in_time, await_value, balances, gpus, process_in, start,
    start_with,
};
use crate::support::cgroups::TestCgroup;
use crate::support::metrics::Labels;
use crate::support::{Memledger, Metrics, eventually, skip};

pub fn success(metrics: &Metrics) -> Option<f64> {
    metrics.get("memledger_collector_success", &[("collector", "gpu")])
}

pub fn await_success(memledger: &Memledger, wanted: Option<f64>) -> Metrics {
    memledger.eventually(&format!("success {wanted:?} of the gpu collector"), |metrics| {
        assert_balanced(metrics);
        match success(metrics) {
            found if found == wanted => Ok(metrics.clone()),
            found => Err(format!("{found:?}; {}", memledger.log())),
        }
    })
}

/// Fails if there is a family of a device, or of a container's or process's share of one, except counters of containers
/// and of the NVML process.
pub fn assert_no_gpu(metrics: &Metrics) {
    let found = metrics.series.iter().find(|(family, labels, _)| {
        let is_gpus = labels.contains_key("gpu") || family.contains("_gpu_");
        let lasts = ["memledger_container_gpu_xid_errors_total", RESTARTS, UNKILLABLE];
        family == "memledger_gpus_visible" || (is_gpus && !lasts.contains(&family.as_str()))
    });
    assert_eq!(found, None);
}

#[test]
fn lost_gpu_is_missing_alone_and_returns() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut state = gpus(&[2 * GIB, 3 * GIB]);
    for gpu in &mut state.gpus {
        gpu.processes = vec![Process::compute(python.pid(), Some(GIB))];
    }
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[&container]);
    await_value(&memledger, "memledger_gpus_visible", &[], 2);
    for lost in [0, 1] {
        state.gpus[lost].lost = true;
        driver.set(&state);
        let metrics = await_value(&memledger, "memledger_gpus_visible", &[], 1);
        let (lost_label, other) = (lost.to_string(), (1 - lost).to_string());
        assert_eq!(metrics.value("memledger_gpus_expected", &[]), 2.0);
        assert_eq!(metrics.value(OF_CONTAINER, &[("gpu", &other)]), GIB as f64);
        let of_lost = metrics.series.iter().find(|(family, labels, _)| {
            labels.get("gpu") == Some(&lost_label) && !family.ends_with("gpu_xid_errors_total")
        });
        assert_eq!(of_lost, None, "only memledger's own counters remain");
        let faults = [("collector", "gpu"), ("reason", "io")];
        assert!(metrics.value("memledger_collector_read_errors_total", &faults) >= 1.0);
        state.gpus[lost].lost = false;
        driver.set(&state);
        let metrics = await_value(&memledger, "memledger_gpus_visible", &[], 2);
        assert_eq!(metrics.value(OF_CONTAINER, &[("gpu", &lost_label)]), GIB as f64);
    }
}

#[test]
fn gpu_lost_before_the_start_is_expected() {
    let mut state = gpus(&[GIB, GIB]);
    state.gpus[1].lost = true;
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[]);
    let metrics = await_value(&memledger, "memledger_gpus_visible", &[], 1);
    assert_eq!(metrics.value("memledger_gpus_expected", &[]), 2.0, "the driver reports two");
}

#[test]
fn gpu_lost_over_a_reboot_is_expected() {
    let ledger = tempfile::tempdir().unwrap();
    let state = format!("--state.path={}", ledger.path().display());
    let flags = ["--gpu.interval=50ms", state.as_str()];
    let row = || {
        let file = ledger.path().join("ledger.sqlite3");
        let store = rusqlite::Connection::open_with_flags(file, rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY);
        let query = "SELECT value FROM state WHERE kind = 'gpu_count'";
        store.and_then(|store| store.query_row(query, [], |row| row.get::<_, String>(0)))
    };
    let driver = Driver::new(&gpus(&[GIB, GIB]));
    let memledger = driver.memledger_with(&[], &flags);
    await_value(&memledger, "memledger_gpus_expected", &[], 2);
    eventually("the number in the ledger", || row().map_err(|error| error.to_string()));
    drop(memledger);
    // the driver finds one less, and says nothing of the other
    let driver = Driver::new(&gpus(&[GIB]));
    let memledger = driver.memledger_with(&[], &flags);
    let metrics = await_value(&memledger, "memledger_gpus_visible", &[], 1);
    assert_eq!(metrics.value("memledger_gpus_expected", &[]), 2.0);
    drop(memledger);
    let memledger = driver.memledger_with(&[], &[&flags[..], &["--gpu.expected=1"]].concat());
    let metrics = await_value(&memledger, "memledger_gpus_visible", &[], 1);
    assert_eq!(metrics.value("memledger_gpus_expected", &[]), 1.0, "by the setting");
}

#[test]
fn missing_configured_library_is_a_failure_until_it_appears() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let dir = tempfile::tempdir().unwrap();
    let library = dir.path().join("libnvidia-ml.so.1");
    let memledger = start_with(library.to_str().unwrap(), &[&container], &["--gpu.interval=50ms"]);
    let metrics = await_success(&memledger, Some(0.0));
    assert_no_gpu(&metrics);
    assert!(metrics.value("memledger_container_memory_usage_bytes", &[]) > 0.0);
    assert!(memledger.log().contains("no GPU driver"), "{}", memledger.log());
    let mut state = gpus(&[GIB]);
    state.gpus[0].processes = vec![Process::compute(python.pid(), Some(GIB))];
    let _fake = FakeNvml::install(dir.path(), &state).unwrap();
    await_value(&memledger, OF_CONTAINER, &[], GIB);
    await_success(&memledger, Some(1.0));
}

#[test]
fn missing_driver_is_a_failure_only_with_a_device_node() {
    let found = Command::new("ldconfig").arg("-p").output();
    if found.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("libnvidia-ml.so")) {
        return skip("this machine has NVML of its own");
    }
    let dev = tempfile::tempdir().unwrap();
    let devfs = format!("--path.devfs={}", dev.path().display());
    let memledger = start(&[], &[&devfs]);
    eventually("the search for a library", || {
        let log = memledger.log();
        if log.contains("no GPU driver") { Ok(()) } else { Err(log) }
    });
    let metrics = memledger.fresh_metrics();
    assert_no_gpu(&metrics);
    assert_eq!(success(&metrics), None);
    std::fs::write(dev.path().join("nvidiactl"), "").unwrap();
    assert_no_gpu(&await_success(&memledger, Some(0.0)));
}

#[test]
fn retries_a_driver_that_does_not_initialise() {
    let mut state = gpus(&[GIB]);
    state.init_error = Some(9); // the library exists, the kernel module is not loaded
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[]);
    assert_no_gpu(&await_success(&memledger, Some(0.0)));
    state.init_error = None;
    driver.set(&state);
    await_value(&memledger, USED, &[], GIB);
}

#[test]
fn unloaded_driver_is_reopened() {
    let state = gpus(&[GIB]);
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[]);
    await_value(&memledger, USED, &[], GIB);
    let mut unloaded = state.clone();
    unloaded.init_error = Some(9);
    unloaded.errors.insert("nvmlDeviceGetCount_v2".into(), 1); // uninitialised
    driver.set(&unloaded);
    let metrics = await_success(&memledger, Some(0.0));
    assert_eq!(metrics.all(USED, &[]), Vec::<&_>::new());
    driver.set(&state);
    await_value(&memledger, USED, &[], GIB);
}

#[test]
fn hung_driver_removes_only_the_gpu_families() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut state = gpus(&[GIB]);
    state.gpus[0].processes = vec![Process::compute(python.pid(), Some(GIB))];
    let driver = Driver::new(&state);
    let memledger = driver.memledger_with(&[&container], &["--gpu.interval=50ms", "--gpu.deadline=500ms"]);
    await_value(&memledger, OF_CONTAINER, &[], GIB);
    state.hang.insert(MEMORY_INFO.into());
    driver.set(&state);
    await_success(&memledger, Some(0.0));
    let metrics = memledger.fresh_metrics();
    assert_eq!(success(&metrics), Some(0.0));
    assert_eq!(metrics.all(USED, &[]).len() + metrics.all(OF_CONTAINER, &[]).len(), 0);
    assert_eq!(metrics.value("memledger_gpus_expected", &[]), 1.0);
    assert_eq!(metrics.get("memledger_gpus_visible", &[]), None);
    assert!(metrics.value("memledger_host_memory_total_bytes", &[]) > 0.0);
    assert!(metrics.value("memledger_container_memory_usage_bytes", &[]) > 0.0);
    assert_stops_in_time(memledger);
}

#[test]
fn driver_that_hangs_at_initialisation_delays_nothing() {
    let mut state = gpus(&[GIB]);
    state.hang.insert("nvmlInit_v2".into());
    state.hang_at_exit = true;
    let driver = Driver::new(&state);
    let memledger = driver.memledger_with(&[], &["--gpu.deadline=500ms"]);
    let metrics = await_success(&memledger, Some(0.0));
    assert_no_gpu(&metrics);
    assert_stops_in_time(memledger);
}

#[test]
fn exports_no_sentinel_and_no_impossible_value() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut good = gpus(&[4 * GIB, 2 * GIB]);
    for gpu in &mut good.gpus {
        gpu.processes = vec![Process::compute(python.pid(), Some(2 * GIB))];
    }
    let driver = Driver::new(&good);
    let memledger = driver.memledger(&[&container]);
    await_value(&memledger, USED, &[("gpu", "0")], 4 * GIB);
    type Corruption = fn(&mut fake_nvml::Gpu);
    let corruptions: [(&str, Corruption); 7] = [
        ("used is a sentinel", |gpu| gpu.memory.used = u64::MAX),
        ("used is more than total", |gpu| gpu.memory.used = gpu.memory.total + 1),
        ("free is a sentinel", |gpu| gpu.memory.free = Some(u64::MAX)),
        ("total is a sentinel", |gpu| gpu.memory.total = u64::MAX),
        ("all is a sentinel", |gpu| {
            (gpu.memory.total, gpu.memory.used, gpu.memory.reserved) = (u64::MAX, u64::MAX, u64::MAX);
            gpu.memory.free = Some(u64::MAX);
        }),
        ("memory is unsupported, and a process has garbage", |gpu| {
            gpu.memory.supported = false;
            gpu.processes[0].used = Some(u64::MAX - 1);
            gpu.processes.push(Process::compute(1, Some(u64::MAX - 1)));
        }),
        ("total is zero", |gpu| (gpu.memory.total, gpu.memory.reserved) = (0, 0)),
    ];
    for (number, (what, corrupt)) in corruptions.into_iter().enumerate() {
        let mut state = good.clone();
        corrupt(&mut state.gpus[0]);
        // the other GPU shows which state was read
        let used = (3 + number as u64) * GIB;
        state.gpus[1].memory.used = used;
        driver.set(&state);
        memledger.eventually(what, |metrics| {
            assert_plausible(metrics, 80 * GIB);
            match metrics.try_value(USED, &[("gpu", "1")])? {
                value if value != used as f64 => Err(format!("GPU 1 uses {value}; {}", memledger.log())),
                _ => Ok(()),
            }
        });
        let metrics = memledger.fresh_metrics();
        assert_plausible(&metrics, 80 * GIB);
        for family in [USED, UNATTRIBUTED, "memledger_gpu_memory_total_bytes"] {
            assert_eq!(metrics.get(family, &[("gpu", "0")]), None, "{what}");
        }
        assert_eq!(metrics.value(OF_CONTAINER, &[("gpu", "1")]), (2 * GIB) as f64, "{what}");
    }
}

#[test]
fn malformed_record_is_unattributed_and_hides_no_other() {
    let container = TestCgroup::container();
    let (python, other) = (process_in(&container), process_in(&container));
    let own = std::process::id();
    let odd: [(&str, &[Process], Option<u64>); 4] = [
        ("pid 0", &[Process::compute(0, Some(GIB))], Some(0)),
        ("an impossible pid", &[Process::compute(u32::MAX, Some(GIB))], Some(0)),
        ("more than the GPU has", &[Process::compute(own, Some(81 * GIB))], None),
        // one of them is wrong; the container's 1 GiB alone cannot be
        (
            "a sum above the total",
            &[Process::compute(own, Some(60 * GIB)), Process::compute(other.pid(), Some(50 * GIB))],
            None,
        ),
    ];
    for on_r535 in [false, true] {
        for (what, records, host) in &odd {
            let mut state = if on_r535 { State::with_gpus_on_r535(1) } else { State::with_gpus(1) };
            state.gpus[0].memory.used = 4 * GIB;
            state.gpus[0].processes = records.to_vec();
            state.gpus[0].processes.push(Process::compute(python.pid(), Some(GIB)));
            let driver = Driver::new(&state);
            let memledger = driver.memledger(&[&container]);
            let pid = python.pid().to_string();
            let metrics = await_value(&memledger, OF_PROCESS, &[("pid", &pid)], GIB);
            assert_plausible(&metrics, 80 * GIB);
            assert_eq!(metrics.all(OF_PROCESS, &[]).len(), 1, "{what}");
            assert_eq!(metrics.get(HOST, &[]), host.map(|bytes| bytes as f64), "{what}");
            let is_complete = records.len() == 1;
            let of_container = metrics.get(OF_CONTAINER, &[]);
            assert_eq!(of_container, is_complete.then_some(GIB as f64), "a part is unknown: absent; {what}");
            let rest = if is_complete { 3 * GIB } else { 4 * GIB };
            assert_eq!(metrics.value(UNATTRIBUTED, &[]), rest as f64, "{what}");
            let faults = [("collector", "gpu"), ("reason", "malformed")];
            assert!(metrics.value("memledger_collector_read_errors_total", &faults) >= 1.0, "{what}");
        }
    }
}

#[test]
fn reads_records_of_a_size_unlike_the_header() {
    let container = TestCgroup::container();
    let pythons = [process_in(&container), process_in(&container), process_in(&container)];
    let mut state = State::with_gpus_on_r535(1);
    state.gpus[0].memory.used = 7 * GIB;
    state.gpus[0].processes =
        pythons.iter().map(|python| Process::compute(python.pid(), Some(2 * GIB))).collect();
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[&container]);
    let metrics = await_value(&memledger, OF_CONTAINER, &[], 6 * GIB);
    assert_plausible(&metrics, 80 * GIB);
    assert_eq!(metrics.value(UNATTRIBUTED, &[]), GIB as f64);
    assert_eq!(metrics.all(OF_PROCESS, &[]).len(), 3);
}

#[test]
fn without_process_lists_all_memory_is_unattributed() {
    let mut state = gpus(&[4 * GIB]);
    for list in ["Compute", "Graphics", "MPSCompute"] {
        for version in ["", "_v2", "_v3"] {
            state.function_not_found.insert(format!("nvmlDeviceGet{list}RunningProcesses{version}"));
        }
    }
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[]);
    let metrics = await_value(&memledger, UNATTRIBUTED, &[], 4 * GIB);
    assert_eq!(metrics.get(HOST, &[]), None, "unknown is not zero");
}

#[test]
fn unreadable_process_list_makes_sums_absent() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut state = gpus(&[4 * GIB, 2 * GIB]);
    for gpu in &mut state.gpus {
        gpu.processes = vec![
            Process::compute(python.pid(), Some(GIB)),
            Process { kind: "G".into(), ..Process::compute(std::process::id(), Some(GIB)) },
        ];
    }
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[&container]);
    await_value(&memledger, HOST, &[("gpu", "0")], GIB);
    for (list, code, reason) in [("Compute", 999, "io"), ("Graphics", 4, "permission")] {
        let mut failing = state.clone();
        failing.gpus[0].errors.insert(format!("nvmlDeviceGet{list}RunningProcesses_v3"), code);
        driver.set(&failing);
        let metrics = await_value(&memledger, UNATTRIBUTED, &[("gpu", "0")], 4 * GIB);
        assert_eq!(metrics.get(HOST, &[("gpu", "0")]), None, "{list}: unknown is not zero");
        assert_eq!(metrics.get(OF_CONTAINER, &[("gpu", "0")]), None, "{list}");
        assert_eq!(metrics.value(OF_CONTAINER, &[("gpu", "1")]), GIB as f64, "{list}");
        let faults = [("collector", "gpu"), ("reason", reason)];
        assert!(metrics.value("memledger_collector_read_errors_total", &faults) >= 1.0, "{list}");
        driver.set(&state);
        await_value(&memledger, OF_CONTAINER, &[("gpu", "0")], GIB);
    }
}

#[test]
fn gpu_that_waits_for_a_reset_is_lost() {
    let mut state = gpus(&[GIB, GIB]);
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[]);
    await_value(&memledger, "memledger_gpus_visible", &[], 2);
    let memory = ["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo"];
    state.gpus[1].errors.extend(memory.map(|symbol| (symbol.to_owned(), 16))); // reset required
    driver.set(&state);
    let metrics = await_value(&memledger, "memledger_gpus_visible", &[], 1);
    assert_eq!(metrics.value("memledger_gpus_expected", &[]), 2.0);
    assert_eq!(metrics.get(USED, &[("gpu", "1")]), None);
}

/// Error codes of newer drivers, as *deprecated*.
#[test]
fn call_that_the_driver_has_dropped_is_not_supported() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut state = gpus(&[4 * GIB]);
    state.gpus[0].processes = vec![Process::compute(python.pid(), Some(GIB))];
    let drop = |state: &mut State, list: &str| {
        let versions =
            ["", "_v2", "_v3"].map(|version| format!("nvmlDeviceGet{list}RunningProcesses{version}"));
        state.gpus[0].errors.extend(versions.map(|symbol| (symbol, 26)));
    };
    for list in ["Graphics", "MPSCompute"] {
        drop(&mut state, list);
    }
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[&container]);
    let metrics = await_value(&memledger, OF_CONTAINER, &[], GIB);
    let errors = [("collector", "gpu"), ("reason", "io")];
    assert_eq!(metrics.value("memledger_collector_read_errors_total", &errors), 0.0);
    drop(&mut state, "Compute");
    driver.set(&state);
    let metrics = await_value(&memledger, UNATTRIBUTED, &[], 4 * GIB);
    assert_eq!(metrics.get(OF_CONTAINER, &[]), None, "unknown is not zero");
}

/// A random number generator without a dependency; its seed is printed when a state fails.
struct Random(u64);

impl Random {
    fn below(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }

    /// Returns bytes as a driver may report them: plausible, too many, or one of the sentinels.
    fn bytes(&mut self) -> u64 {
        match self.below(12) {
            0 => u64::MAX,
            1 => u64::from(u32::MAX),
            2 => 9_200_000_000_000_000_000,
            3 => 81 * GIB,
            _ => self.below(20) * GIB / 2,
        }
    }
}

/// Symbols that may fail with a code for one GPU.
const FAILING_SYMBOLS: [&str; 12] = [
    MEMORY_INFO,
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetProcessUtilization",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetSupportedEventTypes",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
];

fn processes(random: &mut Random, pids: &[u32]) -> Vec<Process> {
    let kinds = ["C", "G", "M", "CG", "CGM"];
    let process = |random: &mut Random| Process {
        kind: kinds[random.below(5) as usize].into(),
        ..Process::compute(
            pids[random.below(pids.len() as u64) as usize],
            Some(random.bytes()).filter(|bytes| *bytes != u64::MAX),
        )
    };
    (0..random.below(6)).map(|_| process(random)).collect()
}

/// Makes one GPU report random values, contradict itself from reading to reading, fail, have MIG instances, or be lost.
fn randomize(random: &mut Random, pids: &[u32], index: u32, state: &mut State) {
    let gpu = &mut state.gpus[index as usize];
    gpu.processes = processes(random, pids);
    gpu.memory.used = random.bytes();
    (gpu.power_mw, gpu.temperature_c) = (Some(random.bytes() as u32), Some(random.bytes() as u32));
    gpu.energy_mj = Some(random.bytes());
    if random.below(8) == 0 {
        gpu.processes.push(Process::compute([0, 1 << 22, u32::MAX][random.below(3) as usize], Some(GIB)));
    }
    for _ in 0..random.below(3) {
        let code = [3, 4, 6, 13, 999][random.below(5) as usize];
        gpu.errors.insert(FAILING_SYMBOLS[random.below(FAILING_SYMBOLS.len() as u64) as usize].into(), code);
    }
    if random.below(3) == 0 {
        let instance = |gi: u32, used| MigDevice {
            uuid: format!("MIG-00000000-0000-4000-8000-0000000{index}000{gi}"),
            gi,
            ci: 0,
            memory: Memory { total: 20 * GIB, used, ..Memory::default() },
            ..MigDevice::default()
        };
        let instances = (1..=random.below(4) as u32).map(|gi| instance(gi, random.bytes())).collect();
        gpu.mig = Some(instances);
        for process in &mut gpu.processes {
            (process.gi, process.ci) = (Some(1 + random.below(3) as u32), Some(0));
        }
    }
    let steps = (0..3).map(|_| Step::new(index as usize, json!({"memory": {"used": random.bytes()}})));
    state.script.entry(MEMORY_INFO.into()).or_default().extend(steps);
}

#[test]
fn memory_balances_for_random_driver_states() {
    let (a, b) = (TestCgroup::container(), TestCgroup::container());
    let pythons = [process_in(&a), process_in(&a), process_in(&b)];
    let mut pids: Vec<u32> = pythons.iter().map(|python| python.pid()).collect();
    pids.extend([std::process::id(), super::UNUSED_PID]);
    let mut good = gpus(&[GIB, GIB, GIB]);
    // always in MIG mode: a mode that changes is noticed some readings later, maybe after the next state
    good.gpus[1].mig = Some(Vec::new());
    let driver = Driver::new(&good);
    let memledger = driver.memledger_with(&[&a, &b], &["--gpu.interval=50ms", "--gpu.sample-interval=20ms"]);
    await_value(&memledger, USED, &[("gpu", "2")], GIB);
    // races of each device, two states ago and one state ago
    let mut races: [HashMap<Labels, f64>; 2] = Default::default();
    let (mut raced, mut split, mut silent) = (0, 0, 0);
    for seed in 0..40 {
        let mut state = good.clone();
        let mut random = Random(seed);
        for index in [0, 1] {
            // a plausible state first, so that the GPU's total is known: no process uses more than that
            let is_back = seed % 5 == 1;
            if is_back {
                state.gpus[index as usize].processes = processes(&mut random, &pids);
            } else {
                randomize(&mut random, &pids, index, &mut state);
            }
            state.gpus[index as usize].lost = seed % 5 == 0 && random.below(2) == 0;
        }
        // the last GPU shows which state was read
        let used = (2 + seed) * GIB / 2;
        state.gpus[2].memory.used = used;
        driver.set(&state);
        let metrics = memledger.eventually(&format!("the state of seed {seed}"), |metrics| {
            assert_plausible(metrics, 80 * GIB);
            for balance in balances(metrics).into_iter().filter(|balance| !balance.is_balanced()) {
                let before = races[0].get(balance.labels).copied().unwrap_or(0.0);
                let found_balance = (balance.labels, balance.used, balance.attributed, balance.unattributed);
                assert!(
                    balance.unattributed == 0.0 && balance.attributed > balance.used,
                    "seed {seed}: {found_balance:?}"
                );
                assert!(balance.races > before, "seed {seed}: no race was counted of {found_balance:?}");
                raced += 1;
            }
            match metrics.try_value(USED, &[("gpu", "2")])? {
                found if found == used as f64 => Ok(metrics.clone()),
                found => Err(format!("GPU 2 uses {found}")),
            }
        });
        split += usize::from(!metrics.all(USED, &[("gpu_instance_id", "1")]).is_empty());
        silent += usize::from(metrics.value("memledger_gpus_visible", &[]) < 3.0);
        let counted =
            balances(&metrics).into_iter().map(|balance| (balance.labels.clone(), balance.races)).collect();
        races = [std::mem::take(&mut races[1]), counted];
    }
    assert!(
        raced > 0 && split > 0 && silent > 0,
        "{raced} {split} {silent}: the random states do not cover all cases"
    );
}
