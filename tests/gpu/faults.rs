//! What a driver, its library or a GPU does wrong, and that memledger goes on without it.

use std::collections::HashMap;
use std::process::Command;
use std::time::Duration;

use fake_nvml::{FakeNvml, Memory, MigDevice, Process, State, Step};
use serde_json::json;

use super::{
    Driver, GIB, HOST, MEMORY_INFO, OF_CONTAINER, OF_PROCESS, UNATTRIBUTED, USED, assert_balanced,
    assert_plausible, await_value, books, gpus, process_in, start, start_with,
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

/// No family of a device, nor of a container's or process's share of one; what was counted of a container stays.
pub fn assert_no_gpu(metrics: &Metrics) {
    let found = metrics.series.iter().find(|(family, labels, _)| {
        let is_gpus = labels.contains_key("gpu") || family.contains("_gpu_");
        family == "memledger_gpus_visible"
            || (is_gpus && family != "memledger_container_gpu_xid_errors_total")
    });
    assert_eq!(found, None);
}

#[test]
fn a_lost_gpu_leaves_the_others_and_comes_back() {
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
        assert_eq!(of_lost, None, "nothing but what memledger counts of it");
        let faults = [("collector", "gpu"), ("reason", "io")];
        assert!(metrics.value("memledger_read_faults_total", &faults) >= 1.0);
        state.gpus[lost].lost = false;
        driver.set(&state);
        let metrics = await_value(&memledger, "memledger_gpus_visible", &[], 2);
        assert_eq!(metrics.value(OF_CONTAINER, &[("gpu", &lost_label)]), GIB as f64);
    }
}

#[test]
fn a_gpu_that_is_lost_before_memledger_starts_is_expected_all_the_same() {
    let mut state = gpus(&[GIB, GIB]);
    state.gpus[1].lost = true;
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[]);
    let metrics = await_value(&memledger, "memledger_gpus_visible", &[], 1);
    assert_eq!(metrics.value("memledger_gpus_expected", &[]), 2.0, "the driver counts two");
}

#[test]
fn a_library_that_was_asked_for_and_is_missing_is_a_failure_until_it_appears() {
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
fn a_host_without_gpus_raises_no_alarm_but_one_with_a_device_node_does() {
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
fn a_driver_that_does_not_initialise_is_tried_again_until_it_does() {
    let mut state = gpus(&[GIB]);
    state.init_error = Some(9); // the library is there, the kernel module is not loaded
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[]);
    assert_no_gpu(&await_success(&memledger, Some(0.0)));
    state.init_error = None;
    driver.set(&state);
    await_value(&memledger, USED, &[], GIB);
}

#[test]
fn a_driver_that_is_unloaded_under_memledger_vanishes_and_comes_back() {
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
fn a_driver_that_hangs_for_ever_takes_nothing_along_but_the_gpu_families() {
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
    memledger.signal("TERM");
    let (code, took) = memledger.wait();
    assert_eq!(code, Some(0));
    assert!(took < Duration::from_secs(1), "{took:?}");
}

#[test]
fn a_driver_that_hangs_while_it_initialises_delays_nothing() {
    let mut state = gpus(&[GIB]);
    state.hang.insert("nvmlInit_v2".into());
    state.hang_at_exit = true;
    let driver = Driver::new(&state);
    let memledger = driver.memledger_with(&[], &["--gpu.deadline=500ms"]);
    let metrics = await_success(&memledger, Some(0.0));
    assert_no_gpu(&metrics);
    memledger.signal("TERM");
    let (code, took) = memledger.wait();
    assert_eq!(code, Some(0));
    assert!(took < Duration::from_secs(1), "{took:?}");
}

#[test]
fn no_sentinel_and_no_impossible_figure_ever_leaves() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut good = gpus(&[4 * GIB, 2 * GIB]);
    for gpu in &mut good.gpus {
        gpu.processes = vec![Process::compute(python.pid(), Some(2 * GIB))];
    }
    let driver = Driver::new(&good);
    let memledger = driver.memledger(&[&container]);
    await_value(&memledger, USED, &[("gpu", "0")], 4 * GIB);
    type Spoil = fn(&mut fake_nvml::Gpu);
    let spoils: [(&str, Spoil); 7] = [
        ("used is a sentinel", |gpu| gpu.memory.used = u64::MAX),
        ("used is more than there is", |gpu| gpu.memory.used = gpu.memory.total + 1),
        ("free is a sentinel", |gpu| gpu.memory.free = Some(u64::MAX)),
        ("total is a sentinel", |gpu| gpu.memory.total = u64::MAX),
        ("all is a sentinel", |gpu| {
            (gpu.memory.total, gpu.memory.used, gpu.memory.reserved) = (u64::MAX, u64::MAX, u64::MAX);
            gpu.memory.free = Some(u64::MAX);
        }),
        ("memory is not told, and a process has garbage", |gpu| {
            gpu.memory.supported = false;
            gpu.processes[0].used = Some(u64::MAX - 1);
            gpu.processes.push(Process::compute(1, Some(u64::MAX - 1)));
        }),
        ("nothing is there", |gpu| (gpu.memory.total, gpu.memory.reserved) = (0, 0)),
    ];
    for (number, (what, spoil)) in spoils.into_iter().enumerate() {
        let mut state = good.clone();
        spoil(&mut state.gpus[0]);
        // the other GPU tells which state is being read
        let used = (3 + number as u64) * GIB;
        state.gpus[1].memory.used = used;
        driver.set(&state);
        memledger.eventually(what, |metrics| {
            assert_plausible(metrics, 80 * GIB);
            match metrics.ask(USED, &[("gpu", "1")])? {
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
fn a_process_that_holds_more_than_the_gpu_has_is_garbage_and_all_is_unattributed() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut state = gpus(&[4 * GIB]);
    state.gpus[0].processes =
        vec![Process::compute(python.pid(), Some(GIB)), Process::compute(1, Some(81 * GIB))];
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[&container]);
    let metrics = await_value(&memledger, UNATTRIBUTED, &[], 4 * GIB);
    assert_plausible(&metrics, 80 * GIB);
    assert_eq!(metrics.all(OF_CONTAINER, &[]).len() + metrics.all(OF_PROCESS, &[]).len(), 0);
    let faults = [("collector", "gpu"), ("reason", "malformed")];
    assert!(metrics.value("memledger_read_faults_total", &faults) >= 1.0);
}

#[test]
fn records_of_another_size_than_the_header_says_are_read_as_what_they_are() {
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
fn a_driver_without_process_lists_leaves_all_unattributed() {
    let mut state = gpus(&[4 * GIB]);
    for list in ["Compute", "Graphics", "MPSCompute"] {
        for version in ["", "_v2", "_v3"] {
            state.function_not_found.insert(format!("nvmlDeviceGet{list}RunningProcesses{version}"));
        }
    }
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[]);
    let metrics = await_value(&memledger, UNATTRIBUTED, &[], 4 * GIB);
    assert_eq!(metrics.get(HOST, &[]), None, "not known is not zero");
}

#[test]
fn a_list_of_processes_that_cannot_be_read_makes_no_sum_and_no_zero() {
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
        assert_eq!(metrics.get(HOST, &[("gpu", "0")]), None, "{list}: not known is not zero");
        assert_eq!(metrics.get(OF_CONTAINER, &[("gpu", "0")]), None, "{list}");
        assert_eq!(metrics.value(OF_CONTAINER, &[("gpu", "1")]), GIB as f64, "{list}");
        let faults = [("collector", "gpu"), ("reason", reason)];
        assert!(metrics.value("memledger_read_faults_total", &faults) >= 1.0, "{list}");
        driver.set(&state);
        await_value(&memledger, OF_CONTAINER, &[("gpu", "0")], GIB);
    }
}

/// Random numbers without a dependency, from a seed that is printed when a state fails.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }

    /// Bytes as a driver may answer them: plausible, too many, or one of the sentinels.
    fn bytes(&mut self) -> u64 {
        match self.roll(12) {
            0 => u64::MAX,
            1 => u64::from(u32::MAX),
            2 => 9_200_000_000_000_000_000,
            3 => 81 * GIB,
            _ => self.roll(20) * GIB / 2,
        }
    }
}

/// Questions that one GPU may answer with a code.
const ASKED: [&str; 12] = [
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

fn processes(dice: &mut Dice, pids: &[u32]) -> Vec<Process> {
    let kinds = ["C", "G", "M", "CG", "CGM"];
    let process = |dice: &mut Dice| Process {
        kind: kinds[dice.roll(5) as usize].into(),
        ..Process::compute(
            pids[dice.roll(pids.len() as u64) as usize],
            Some(dice.bytes()).filter(|bytes| *bytes != u64::MAX),
        )
    };
    (0..dice.roll(6)).map(|_| process(dice)).collect()
}

/// One GPU that answers anything, contradicts itself from reading to reading, fails, is split, or is lost.
fn scramble(dice: &mut Dice, pids: &[u32], index: u32, state: &mut State) {
    let gpu = &mut state.gpus[index as usize];
    gpu.processes = processes(dice, pids);
    gpu.memory.used = dice.bytes();
    (gpu.power_mw, gpu.temperature_c) = (Some(dice.bytes() as u32), Some(dice.bytes() as u32));
    gpu.energy_mj = Some(dice.bytes());
    if dice.roll(8) == 0 {
        gpu.processes.push(Process::compute([0, 1 << 22, u32::MAX][dice.roll(3) as usize], Some(GIB)));
    }
    for _ in 0..dice.roll(3) {
        let code = [3, 4, 6, 13, 999][dice.roll(5) as usize];
        gpu.errors.insert(ASKED[dice.roll(ASKED.len() as u64) as usize].into(), code);
    }
    if dice.roll(3) == 0 {
        let instance = |gi: u32, used| MigDevice {
            uuid: format!("MIG-00000000-0000-4000-8000-0000000{index}000{gi}"),
            gi,
            ci: 0,
            memory: Memory { total: 20 * GIB, used, ..Memory::default() },
            ..MigDevice::default()
        };
        let instances = (1..=dice.roll(4) as u32).map(|gi| instance(gi, dice.bytes())).collect();
        gpu.mig = Some(instances);
        for process in &mut gpu.processes {
            (process.gi, process.ci) = (Some(1 + dice.roll(3) as u32), Some(0));
        }
    }
    let steps = (0..3).map(|_| Step::new(index as usize, json!({"memory": {"used": dice.bytes()}})));
    state.script.entry(MEMORY_INFO.into()).or_default().extend(steps);
}

#[test]
fn whatever_the_library_answers_the_books_balance_and_no_sentinel_leaves() {
    let (a, b) = (TestCgroup::container(), TestCgroup::container());
    let pythons = [process_in(&a), process_in(&a), process_in(&b)];
    let mut pids: Vec<u32> = pythons.iter().map(|python| python.pid()).collect();
    pids.extend([std::process::id(), super::NOBODY]);
    let good = gpus(&[GIB, GIB, GIB]);
    let driver = Driver::new(&good);
    let memledger = driver.memledger_with(&[&a, &b], &["--gpu.interval=50ms", "--gpu.sample-interval=20ms"]);
    await_value(&memledger, USED, &[("gpu", "2")], GIB);
    // races of each device before the state before this one, and before this one
    let mut races: [HashMap<Labels, f64>; 2] = Default::default();
    let (mut raced, mut split, mut silent) = (0, 0, 0);
    for seed in 0..40 {
        let mut state = good.clone();
        let mut dice = Dice(seed);
        for index in [0, 1] {
            // it tells its memory before it answers anything: no process holds more than that
            let is_back = seed % 5 == 1;
            if is_back {
                state.gpus[index as usize].processes = processes(&mut dice, &pids);
            } else {
                scramble(&mut dice, &pids, index, &mut state);
            }
            state.gpus[index as usize].lost = seed % 5 == 0 && dice.roll(2) == 0;
        }
        // the last GPU tells which state is being read
        let used = (2 + seed) * GIB / 2;
        state.gpus[2].memory.used = used;
        driver.set(&state);
        let metrics = memledger.eventually(&format!("the answers of seed {seed}"), |metrics| {
            assert_plausible(metrics, 80 * GIB);
            for book in books(metrics).into_iter().filter(|book| !book.is_balanced()) {
                let before = races[0].get(book.labels).copied().unwrap_or(0.0);
                let told = (book.labels, book.used, book.attributed, book.unattributed);
                assert!(book.unattributed == 0.0 && book.attributed > book.used, "seed {seed}: {told:?}");
                assert!(book.races > before, "seed {seed}: no race was counted of {told:?}");
                raced += 1;
            }
            match metrics.ask(USED, &[("gpu", "2")])? {
                found if found == used as f64 => Ok(metrics.clone()),
                found => Err(format!("GPU 2 uses {found}")),
            }
        });
        split += usize::from(!metrics.all(USED, &[("gpu_instance_id", "1")]).is_empty());
        silent += usize::from(metrics.value("memledger_gpus_visible", &[]) < 3.0);
        let counted = books(&metrics).into_iter().map(|book| (book.labels.clone(), book.races)).collect();
        races = [std::mem::take(&mut races[1]), counted];
    }
    assert!(raced > 0 && split > 0 && silent > 0, "{raced} {split} {silent}: the dice are no test");
}
