//! GPU memory, read through a real shared library with the symbols of NVML, with real processes in real cgroups.
//!
//! `tests/fake-nvml` is that library. It follows NVIDIA's documentation; undocumented faults of drivers are not modelled.

mod check;
mod cost;
mod drivers;
mod faults;
mod health;
mod driver_process;
mod driver_release;
mod mig;
mod peaks;
mod peers;

use std::process::{Command, Stdio};

use fake_nvml::{FakeNvml, Process, State, Step};
use serde_json::json;

use crate::support::cgroups::TestCgroup;
use crate::support::metrics::Labels;
use crate::support::processes::ProcessRef;
use crate::support::python::Python;
use crate::support::{Memledger, Metrics, eventually, eventually_true};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
/// The highest pid that Linux can have, which no process has.
const UNUSED_PID: u32 = (1 << 22) - 1;

const USED: &str = "memledger_gpu_memory_used_bytes";
const UNATTRIBUTED: &str = "memledger_gpu_memory_unattributed_bytes";
const HOST: &str = "memledger_gpu_host_processes_memory_bytes";
const RACES: &str = "memledger_gpu_memory_accounting_conflicts_total";
const OF_CONTAINER: &str = "memledger_container_gpu_memory_used_bytes";
const OF_PROCESS: &str = "memledger_process_gpu_memory_used_bytes";
const RESTARTS: &str = "memledger_gpu_driver_process_restarts_total";
const UNKILLABLE: &str = "memledger_gpu_unkillable_driver_processes";
const MEMORY_INFO: &str = "nvmlDeviceGetMemoryInfo_v2";

/// The fake library in a directory of its own.
struct Driver {
    fake: FakeNvml,
    _dir: tempfile::TempDir,
}

impl Driver {
    fn new(state: &State) -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self { fake: FakeNvml::install(dir.path(), state).expect("the fake library is installed"), _dir: dir }
    }

    fn set(&self, state: &State) {
        self.fake.set(state).unwrap();
    }

    /// Starts memledger with this library and these containers, with a reading every 50 ms.
    fn memledger(&self, containers: &[&TestCgroup]) -> Memledger {
        self.memledger_with(containers, &["--gpu.interval=50ms"])
    }

    fn memledger_with(&self, containers: &[&TestCgroup], flags: &[&str]) -> Memledger {
        start_with(&self.fake.path().display().to_string(), containers, flags)
    }
}

fn start_with(library: &str, containers: &[&TestCgroup], flags: &[&str]) -> Memledger {
    let library = format!("--gpu.nvml-library={library}");
    start(containers, &[&[library.as_str()], flags].concat())
}

fn start(containers: &[&TestCgroup], flags: &[&str]) -> Memledger {
    let names: Vec<_> = containers.iter().map(|container| container.name()).collect();
    let include = format!("--container.include=^({}|none)$", names.join("|"));
    let alone = ["--docker.socket=", "--podman.socket=", include.as_str()];
    Memledger::start(&[&alone[..], flags].concat())
}

/// Returns GPUs with this much used memory, in bytes.
fn gpus(used: &[u64]) -> State {
    let mut state = State::with_gpus(u32::try_from(used.len()).unwrap());
    for (gpu, used) in std::iter::zip(&mut state.gpus, used) {
        gpu.memory.used = *used;
    }
    state
}

/// Returns the NVML processes of memledger, which are its only children; also one that has ended and was not reaped.
fn nvml_processes(memledger: &Memledger) -> Vec<u32> {
    children(memledger.pid())
}

/// Returns the children of a process.
fn children(parent: u32) -> Vec<u32> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_child = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let fields = stat.rsplit_once(") ").map(|(_, rest)| rest.split(' '));
        fields.and_then(|mut fields| fields.nth(1)) == Some(&*parent.to_string())
    };
    pids.filter(is_child).collect()
}

/// Waits until memledger has one NVML process, and returns that: on a busy machine one that misses its deadline is being replaced.
fn nvml_process(memledger: &Memledger) -> u32 {
    eventually("one NVML process", || match nvml_processes(memledger)[..] {
        [pid] => Ok(pid),
        ref found => Err(format!("{found:?}")),
    })
}

/// Fails unless memledger and its NVML processes end after SIGTERM, before `docker stop` would send SIGKILL.
fn assert_stops_in_time(memledger: Memledger) {
    let children: Vec<_> = nvml_processes(&memledger).into_iter().filter_map(ProcessRef::of).collect();
    memledger.signal("TERM");
    let (code, took) = memledger.wait();
    assert_eq!(code, Some(0));
    assert!(took < std::time::Duration::from_secs(10), "{took:?}");
    for process in children {
        eventually_true(&format!("the end of the NVML process {process:?}"), || process.has_ended());
    }
}

fn process_in(cgroup: &TestCgroup) -> Python {
    let mut python = Python::start(cgroup, "print('ready'); input()");
    python.line();
    python
}

/// Returns a label of a series, empty if it is absent.
fn label<'a>(labels: &'a Labels, name: &str) -> &'a str {
    labels.get(name).map_or("", String::as_str)
}

/// The memory of one GPU or MIG instance, and how it is attributed.
struct MemoryBalance<'a> {
    labels: &'a Labels,
    used: f64,
    attributed: f64,
    unattributed: f64,
    races: f64,
}

impl MemoryBalance<'_> {
    fn is_balanced(&self) -> bool {
        self.used == self.attributed + self.unattributed
    }
}

/// Returns the balance of every GPU and MIG instance. Fails unless the parts of total add up.
fn balances(metrics: &Metrics) -> Vec<MemoryBalance<'_>> {
    const IDS: [&str; 3] = ["gpu", "gpu_instance_id", "compute_instance_id"];
    let balance = |(_, labels, used): &'_ (String, Labels, f64)| {
        let of_device = |family: &str| {
            let mut found = metrics.series.iter().filter(|(name, _, _)| name == family);
            found
                .find(|(_, other, _)| IDS.iter().all(|id| label(other, id) == label(labels, id)))
                .map(|row| row.2)
        };
        let part = |part: &str| of_device(&format!("memledger_gpu_memory_{part}_bytes"));
        let parts = used + part("free").unwrap() + part("reserved").unwrap_or(0.0);
        assert_eq!(part("total").unwrap(), parts, "{labels:?}");
        // memory of instances is memory of the GPU too, and compute instances of one GPU instance share its memory
        let instance = label(labels, "gpu_instance_id");
        let within = |other: &Labels| {
            label(other, "gpu") == label(labels, "gpu")
                && (instance.is_empty() || label(other, "gpu_instance_id") == instance)
        };
        let of = |family| metrics.all(family, &[]).into_iter().filter(|row| within(&row.1));
        let attributed: f64 = of(OF_CONTAINER).chain(of(HOST)).map(|row| row.2).sum();
        (*used, attributed, part("unattributed").unwrap(), of_device(RACES).unwrap_or(0.0))
    };
    let rows = metrics.series.iter().filter(|(name, _, _)| name == USED);
    let balances = rows.map(|row| {
        let (used, attributed, unattributed, races) = balance(row);
        MemoryBalance { labels: &row.1, used, attributed, unattributed, races }
    });
    balances.collect()
}

/// Fails unless total and used are the sums of their parts on every GPU and MIG instance.
fn assert_balanced(metrics: &Metrics) {
    for balance in balances(metrics) {
        assert!(
            balance.is_balanced(),
            "{:?}: {} used, {} attributed, {} not",
            balance.labels,
            balance.used,
            balance.attributed,
            balance.unattributed
        );
    }
}

/// Fails if a value of a GPU is above its memory, or if any value looks like a sentinel.
fn assert_plausible(metrics: &Metrics, total: u64) {
    for (family, labels, value) in &metrics.series {
        assert!(*value < 2f64.powi(62), "{family} {labels:?} is {value}");
        let of_gpu = labels.contains_key("gpu") && family.ends_with("_bytes");
        assert!(!of_gpu || (*value >= 0.0 && *value <= total as f64), "{family} {labels:?} is {value}");
        assert!(!family.ends_with("_ratio") || (0.0..=1.0).contains(value), "{family} {labels:?} is {value}");
    }
}

/// Waits for a value of a family; every scrape meanwhile must be balanced.
fn await_value(memledger: &Memledger, family: &str, labels: &[(&str, &str)], wanted: u64) -> Metrics {
    memledger.eventually(&format!("{family} {labels:?} = {wanted}"), |metrics| {
        assert_balanced(metrics);
        match metrics.try_value(family, labels)? {
            value if value == wanted as f64 => Ok(metrics.clone()),
            value => Err(format!("it is {value}; {}", memledger.log())),
        }
    })
}

#[test]
fn exports_identity_and_memory_of_a_gpu() {
    let mut state = gpus(&[3 * GIB, 0]);
    state.gpus[0].name = "NVIDIA GeForce RTX 3060".into();
    state.gpus[0].memory.total = 12 * GIB;
    state.gpus[0].memory.reserved = 350 * MIB;
    state.gpus[0].compute_capability = [8, 6];
    state.gpus[0].cores = Some(3584);
    state.gpus[1].cores = None;
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[]);
    let metrics = await_value(&memledger, USED, &[("gpu", "0")], 3 * GIB);
    let first = [("gpu", "0"), ("gpu_uuid", "GPU-00000000-0000-4000-8000-000000000000")];
    let memory = |part: &str| metrics.value(&format!("memledger_gpu_memory_{part}_bytes"), &first) as u64;
    assert_eq!(memory("total"), 12 * GIB);
    assert_eq!(memory("reserved"), 350 * MIB);
    assert_eq!(memory("free"), 9 * GIB - 350 * MIB);
    assert_eq!(memory("unattributed"), 3 * GIB, "no process is listed");
    let info = [
        ("model", "NVIDIA GeForce RTX 3060"),
        ("vendor", "nvidia"),
        ("driver_version", "580.95.05"),
        ("cuda_version", "13.0"),
        ("compute_capability", "8.6"),
        ("cuda_cores", "3584"),
        ("pci_bus_id", "00000000:10:00.0"),
    ];
    assert_eq!(metrics.value("memledger_gpu_info", &[&first[..], &info].concat()), 1.0);
    let second = metrics.all("memledger_gpu_info", &[("gpu", "1")]);
    assert_eq!(second.len(), 1);
    assert!(!second[0].1.contains_key("cuda_cores"), "unknown is absent: {second:?}");
    assert_eq!(metrics.value("memledger_gpus_visible", &[]), 2.0);
    assert_eq!(metrics.value("memledger_gpus_expected", &[]), 2.0);
    assert_eq!(metrics.value("memledger_collector_success", &[("collector", "gpu")]), 1.0);
}

#[test]
fn counts_each_process_for_its_container_on_each_gpu() {
    let (a, b) = (TestCgroup::container(), TestCgroup::container());
    let (first, second, third) = (process_in(&a), process_in(&a), process_in(&b));
    let mut state = gpus(&[20 * GIB, 6 * GIB]);
    state.gpus[0].processes = vec![
        Process::compute(first.pid(), Some(8 * GIB)),
        Process::compute(second.pid(), Some(GIB)),
        Process::compute(third.pid(), Some(5 * GIB)),
    ];
    state.gpus[1].processes = vec![Process::compute(first.pid(), Some(4 * GIB))];
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[&a, &b]);
    let metrics =
        await_value(&memledger, OF_CONTAINER, &[("gpu", "0"), ("container_name", a.name())], 9 * GIB);
    let of = |family: &str, gpu: &str, container: &TestCgroup| {
        metrics.get(family, &[("gpu", gpu), ("container_name", container.name())])
    };
    let bytes = |gib: u64| Some((gib * GIB) as f64);
    assert_eq!(of(OF_CONTAINER, "0", &b), bytes(5));
    assert_eq!(of(OF_CONTAINER, "1", &a), bytes(4));
    assert_eq!(of(OF_CONTAINER, "1", &b), None, "it does not use that GPU");
    assert_eq!(of("memledger_container_gpu_processes", "0", &a), Some(2.0));
    assert_eq!(of("memledger_container_gpu_processes", "1", &a), Some(1.0));
    assert_eq!(metrics.value(UNATTRIBUTED, &[("gpu", "0")]), (6 * GIB) as f64);
    assert_eq!(metrics.value(UNATTRIBUTED, &[("gpu", "1")]), (2 * GIB) as f64);
    assert_eq!(metrics.value(HOST, &[("gpu", "0")]), 0.0);
    let row = [
        ("gpu", "1"),
        ("container_name", a.name()),
        ("pid", &first.pid().to_string()),
        ("process", "python3"),
        ("role", "trainer"),
    ];
    assert_eq!(metrics.value(OF_PROCESS, &row), (4 * GIB) as f64);
    assert_eq!(metrics.all(OF_PROCESS, &[]).len(), 4);
    memledger.eventually("counts of both containers", |metrics| {
        match metrics.all("memledger_container_oom_kills_total", &[]).len() {
            8 => Ok(()),
            found => Err(format!("{found} of 8")),
        }
    });
    let api = memledger.api();
    assert_eq!(api["gpus"][0]["ecc_errors_total"], json!({"corrected": 0, "uncorrected": 0}));
    let kills = json!({"container": {"child": 0, "main": 0}, "host": {"child": 0, "main": 0}});
    assert_eq!(api["containers"][0]["oom_kills_total"], kills, "a family with two labels is complete");
    let found = api.to_string();
    assert!(found.contains(&(12 * GIB).to_string()), "12 GiB over both GPUs: {found}");
}

/// The driver and the processes of the container are read at different times.
#[test]
fn process_that_ended_since_the_reading_keeps_its_role() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let pid = python.pid().to_string();
    let mut state = gpus(&[3 * GIB]);
    state.gpus[0].processes = vec![Process::compute(python.pid(), Some(2 * GIB))];
    let driver = Driver::new(&state);
    let one_reading = ["--gpu.interval=1h", "--gpu.deadline=24h", "--gpu.sample-interval=0s"];
    let memledger = driver.memledger_with(&[&container], &one_reading);
    await_value(&memledger, OF_CONTAINER, &[("gpu", "0")], 2 * GIB);
    drop(python);
    let metrics = memledger.eventually("a container without processes", |metrics| {
        let trainers = metrics.get("memledger_container_processes", &[("role", "trainer")]);
        if trainers == Some(0.0) { Ok(metrics.clone()) } else { Err(format!("{trainers:?} trainers")) }
    });
    assert_eq!(metrics.value(OF_CONTAINER, &[("gpu", "0")]), (2 * GIB) as f64, "the reading has it");
    let row = [("pid", pid.as_str()), ("process", "python3"), ("role", "trainer")];
    for family in [OF_PROCESS, "memledger_process_gpu_memory_peak_bytes"] {
        assert_eq!(metrics.all(family, &row).len(), 1, "{:?}", metrics.all(family, &[]));
    }
}

#[test]
fn gpu_process_has_its_role_without_the_process_collector() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut state = gpus(&[3 * GIB]);
    state.gpus[0].processes = vec![Process::compute(python.pid(), Some(2 * GIB))];
    let driver = Driver::new(&state);
    let memledger = driver.memledger_with(&[&container], &["--no-collector.process"]);
    let metrics = await_value(&memledger, OF_CONTAINER, &[("gpu", "0")], 2 * GIB);
    let found = metrics.all(OF_PROCESS, &[]);
    assert!(found.len() == 1 && label(&found[0].1, "role") == "trainer", "{found:?}");
}

#[test]
fn counts_a_process_in_several_lists_once() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    for kind in ["CG", "G", "M", "CGM"] {
        let mut state = gpus(&[3 * GIB]);
        state.gpus[0].processes =
            vec![Process { kind: kind.into(), ..Process::compute(python.pid(), Some(2 * GIB)) }];
        let driver = Driver::new(&state);
        let memledger = driver.memledger(&[&container]);
        let metrics = await_value(&memledger, OF_CONTAINER, &[("gpu", "0")], 2 * GIB);
        assert_eq!(metrics.value("memledger_container_gpu_processes", &[("gpu", "0")]), 1.0, "{kind}");
        assert_eq!(metrics.value(RACES, &[("gpu", "0")]), 0.0, "{kind}");
    }
}

#[test]
fn separates_host_processes_and_invisible_processes() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut state = gpus(&[10 * GIB]);
    state.gpus[0].processes = vec![
        Process::compute(python.pid(), Some(4 * GIB)),
        Process::compute(std::process::id(), Some(2 * GIB)),
        Process::compute(UNUSED_PID, Some(3 * GIB)),
    ];
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[&container]);
    let metrics = await_value(&memledger, HOST, &[("gpu", "0")], 2 * GIB);
    assert_eq!(metrics.value(UNATTRIBUTED, &[("gpu", "0")]), (4 * GIB) as f64);
    assert_eq!(metrics.sum(OF_CONTAINER, &[]), (4 * GIB) as f64);
    let own = metrics.all(OF_PROCESS, &[("pid", &std::process::id().to_string())]);
    assert_eq!(own.len(), 1, "{own:?}");
    assert!(!own[0].1.contains_key("container_name") && !own[0].1.contains_key("role"), "{own:?}");
    assert_eq!(metrics.all(OF_PROCESS, &[("pid", &UNUSED_PID.to_string())]), Vec::<&_>::new());
}

#[test]
fn memory_of_an_ended_process_is_unattributed_until_the_driver_frees_it() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut state = gpus(&[5 * GIB]);
    state.gpus[0].processes = vec![Process::compute(python.pid(), Some(5 * GIB))];
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[&container]);
    await_value(&memledger, OF_CONTAINER, &[("gpu", "0")], 5 * GIB);
    drop(python);
    let metrics = await_value(&memledger, UNATTRIBUTED, &[("gpu", "0")], 5 * GIB);
    assert_eq!(metrics.all(OF_CONTAINER, &[]), Vec::<&_>::new());
    driver.set(&gpus(&[0]));
    await_value(&memledger, UNATTRIBUTED, &[("gpu", "0")], 0);
}

#[test]
fn unknown_memory_is_absent_and_unattributed() {
    let (reporting, silent) = (TestCgroup::container(), TestCgroup::container());
    let (known, unknown) = (process_in(&reporting), process_in(&silent));
    let sibling = process_in(&silent);
    let mut state = gpus(&[9 * GIB]);
    state.gpus[0].processes = vec![
        Process::compute(known.pid(), Some(2 * GIB)),
        Process::compute(unknown.pid(), None),
        Process::compute(sibling.pid(), Some(GIB)),
        Process::compute(std::process::id(), None),
    ];
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[&reporting, &silent]);
    let metrics = await_value(&memledger, OF_CONTAINER, &[("container_name", reporting.name())], 2 * GIB);
    let silent = [("gpu", "0"), ("container_name", silent.name())];
    assert_eq!(metrics.get(OF_CONTAINER, &silent), None, "a part of the sum is not known");
    assert_eq!(metrics.value("memledger_container_gpu_processes", &silent), 2.0);
    assert_eq!(metrics.get(OF_PROCESS, &[("pid", &unknown.pid().to_string())]), None);
    assert_eq!(metrics.get(HOST, &[("gpu", "0")]), None, "the memory of the host's process is unknown too");
    assert_eq!(metrics.value(UNATTRIBUTED, &[("gpu", "0")]), (7 * GIB) as f64);
}

/// Makes used and processes contradict each other in the first readings of memory; the driver is read only once.
fn race(first_readings: usize) -> (Metrics, std::collections::BTreeMap<String, u64>) {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut state = gpus(&[4 * GIB]);
    state.gpus[0].processes = vec![Process::compute(python.pid(), Some(3 * GIB))];
    state.count_calls = true;
    let mut steps = vec![Step::new(0, json!({"memory": {"used": GIB}})); first_readings];
    steps.push(Step::new(0, json!({})));
    state.script.insert(MEMORY_INFO.into(), steps);
    let driver = Driver::new(&state);
    let memledger = driver.memledger_with(
        &[&container],
        &["--gpu.interval=1h", "--gpu.deadline=1h", "--gpu.sample-interval=0s"],
    );
    memledger.eventually("the first reading", |metrics| metrics.try_value(USED, &[]));
    (memledger.fresh_metrics(), driver.fake.calls().unwrap())
}

#[test]
fn retries_contradictory_readings_until_they_balance() {
    for first_readings in [1, 2] {
        let (metrics, calls) = race(first_readings);
        assert_balanced(&metrics);
        assert_eq!(metrics.value(USED, &[]), (4 * GIB) as f64);
        assert_eq!(metrics.sum(OF_CONTAINER, &[]), (3 * GIB) as f64);
        assert_eq!(metrics.value(RACES, &[]), 0.0);
        assert_eq!(calls[MEMORY_INFO], first_readings as u64 + 1);
    }
}

#[test]
fn counts_one_race_per_contradictory_reading() {
    let (metrics, calls) = race(3);
    assert_eq!(metrics.value(USED, &[]), GIB as f64);
    assert_eq!(metrics.value(UNATTRIBUTED, &[]), 0.0);
    assert_eq!(metrics.sum(OF_CONTAINER, &[]), (3 * GIB) as f64);
    assert_eq!(metrics.value(RACES, &[]), 1.0, "one reading, however many cycles use it");
    assert_eq!(calls[MEMORY_INFO], 3);
}

#[test]
fn counts_races_while_they_last() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut state = gpus(&[GIB]);
    state.gpus[0].processes = vec![Process::compute(python.pid(), Some(3 * GIB))];
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[&container]);
    let raced = |metrics: &Metrics| match metrics.try_value(RACES, &[])? {
        races if races >= 3.0 => Ok(metrics.clone()),
        races => Err(format!("{races} races")),
    };
    let metrics = memledger.eventually("three races", raced);
    assert_eq!(metrics.value(UNATTRIBUTED, &[]), 0.0);
    state.gpus[0].memory.used = 3 * GIB;
    driver.set(&state);
    memledger.eventually("balanced memory", |metrics| match metrics.value(USED, &[]) {
        used if used == (3 * GIB) as f64 => Ok(()),
        used => Err(format!("used {used}")),
    });
    let races = memledger.fresh_metrics().value(RACES, &[]);
    let after = memledger.fresh_metrics();
    assert_balanced(&after);
    assert_eq!(after.value(RACES, &[]), races, "balanced memory is no race, and the count does not decrease");
}

#[test]
fn gpu_memory_distinguishes_ranks_from_spawned_workers() {
    const PROGRAM: &str = "
import multiprocessing, time
spawn = multiprocessing.get_context('spawn')
children = [spawn.Process(target=time.sleep, args=(600,), daemon=True) for _ in range(2)]
for child in children: child.start()
print(*[child.pid for child in children])
input()";
    let container = TestCgroup::container();
    let mut python = Python::start(&container, PROGRAM);
    let children: Vec<u32> = python.line().split(' ').map(|pid| pid.parse().unwrap()).collect();
    let driver = Driver::new(&gpus(&[8 * GIB]));
    let memledger = driver.memledger(&[&container]);
    let await_roles = |what: &str, trainers: f64, workers: f64| {
        memledger.eventually(what, |metrics| {
            let count = |role| metrics.try_value("memledger_container_processes", &[("role", role)]);
            let found = (count("trainer")?, count("dataloader_worker")?, count("other")?);
            // with the resource tracker of multiprocessing there are four processes
            let all = found.0 + found.1 + found.2;
            if found.0 == trainers && found.1 == workers && all == 4.0 {
                Ok(metrics.clone())
            } else {
                Err(format!("trainers, workers, others: {found:?}"))
            }
        })
    };
    await_roles("no GPU memory", 0.0, 0.0);
    let mut state = gpus(&[8 * GIB]);
    state.gpus[0].processes = vec![Process::compute(python.pid(), Some(6 * GIB))];
    driver.set(&state);
    let metrics = await_roles("one trainer and its workers", 1.0, 2.0);
    let role = |pid: u32| metrics.all(OF_PROCESS, &[("pid", &pid.to_string())])[0].1["role"].clone();
    assert_eq!(role(python.pid()), "trainer");
    state.gpus[0].processes = children.iter().map(|child| Process::compute(*child, Some(3 * GIB))).collect();
    driver.set(&state);
    await_roles("two ranks under a launcher", 2.0, 0.0);
}

#[test]
fn every_scrape_balances_while_processes_come_and_go() {
    let (a, b) = (TestCgroup::container(), TestCgroup::container());
    let (first, second) = (process_in(&a), process_in(&b));
    let driver = Driver::new(&gpus(&[GIB, GIB]));
    let memledger = driver.memledger(&[&a, &b]);
    for round in 1..=8_u64 {
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let mut state = gpus(&[round * 4 * GIB, round * GIB]);
        state.gpus[0].processes = vec![
            Process::compute(first.pid(), Some(round * GIB)),
            Process::compute(child.id(), Some(round * GIB / 2)),
            Process::compute(UNUSED_PID, Some(round * GIB)),
        ];
        let of_second = if round % 2 == 0 { first.pid() } else { second.pid() };
        state.gpus[1].processes = vec![Process::compute(of_second, Some(round * GIB))];
        driver.set(&state);
        await_value(&memledger, HOST, &[("gpu", "0")], round * GIB / 2);
        drop(child.stdin.take()); // cat ends
        child.wait().unwrap();
        let metrics = await_value(&memledger, HOST, &[("gpu", "0")], 0);
        assert_eq!(metrics.value(UNATTRIBUTED, &[("gpu", "0")]), (round * 3 * GIB) as f64);
        assert_eq!(metrics.value(UNATTRIBUTED, &[("gpu", "1")]), 0.0);
    }
}
