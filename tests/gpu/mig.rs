//! GPUs with MIG instances.

use fake_nvml::{Gpu, Memory, MigDevice, Process, State, UtilizationSample};

use super::{Driver, GIB, HOST, MIB, OF_CONTAINER, OF_PROCESS, UNATTRIBUTED, USED, await_value, process_in};
use crate::support::Metrics;
use crate::support::cgroups::TestCgroup;

pub fn instance(gi: u32, ci: u32, used: u64) -> MigDevice {
    MigDevice {
        uuid: format!("MIG-00000000-0000-4000-8000-00000000{gi:02}{ci:02}"),
        name: Some("NVIDIA H100 80GB HBM3 MIG 1g.10gb".into()),
        gi,
        ci,
        memory: Memory { total: 10 * GIB, reserved: 16 * MIB, used, ..Memory::default() },
        ..MigDevice::default()
    }
}

fn process(pid: u32, gi: u32, ci: u32, used: u64) -> Process {
    Process { gi: Some(gi), ci: Some(ci), ..Process::compute(pid, Some(used)) }
}

/// Returns a GPU with these instances and processes that uses the memory of its GPU instances.
pub fn mig_gpu(index: u32, instances: Vec<MigDevice>, processes: Vec<Process>) -> Gpu {
    let mut gpu = Gpu::numbered(index);
    let mut seen = std::collections::BTreeMap::new();
    for instance in &instances {
        seen.insert(instance.gi, instance.memory.used);
    }
    gpu.memory.used = seen.values().sum::<u64>() + 100 * MIB;
    gpu.mig = Some(instances);
    gpu.processes = processes;
    gpu
}

fn ids<'a>(gpu: &'a str, gi: &'a str, ci: &'a str) -> [(&'a str, &'a str); 3] {
    [("gpu", gpu), ("gpu_instance_id", gi), ("compute_instance_id", ci)]
}

/// Returns the value of a series of a whole GPU.
fn of_gpu(metrics: &Metrics, family: &str, gpu: &str) -> Option<f64> {
    let mut found = metrics.all(family, &[("gpu", gpu)]).into_iter();
    found.find(|row| !row.1.contains_key("gpu_instance_id")).map(|row| row.2)
}

#[test]
fn instance_memory_balances_and_counts_for_its_gpu() {
    let (a, b) = (TestCgroup::container(), TestCgroup::container());
    let (first, second) = (process_in(&a), process_in(&b));
    let mut state = State::with_gpus(2);
    state.gpus[0].memory.used = 3 * GIB;
    state.gpus[0].processes = vec![Process::compute(first.pid(), Some(2 * GIB))];
    state.gpus[1] = mig_gpu(
        1,
        vec![instance(1, 0, 4 * GIB), instance(2, 0, 6 * GIB)],
        vec![
            process(first.pid(), 1, 0, 3 * GIB),
            process(second.pid(), 2, 0, GIB),
            process(first.pid(), 2, 0, 2 * GIB),
            process(std::process::id(), 2, 0, GIB),
        ],
    );
    state.gpus[1].utilization_samples =
        vec![UtilizationSample { pid: first.pid(), sm: 50, ..UtilizationSample::default() }];
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[&a, &b]);
    let of_a = |gpu, gi| [&ids(gpu, gi, "0")[..], &[("container_name", a.name())]].concat();
    let metrics = await_value(&memledger, OF_CONTAINER, &of_a("1", "1"), 3 * GIB);
    let gib = |family, labels: &[(&str, &str)]| metrics.get(family, labels).map(|bytes| bytes / GIB as f64);
    assert_eq!(gib(OF_CONTAINER, &of_a("1", "2")), Some(2.0));
    assert_eq!(gib(OF_CONTAINER, &[("gpu_instance_id", "2"), ("container_name", b.name())]), Some(1.0));
    assert_eq!(gib(HOST, &ids("1", "2", "0")), Some(1.0));
    assert_eq!(gib(UNATTRIBUTED, &ids("1", "1", "0")), Some(1.0));
    assert_eq!(gib(UNATTRIBUTED, &ids("1", "2", "0")), Some(2.0));
    assert_eq!(of_gpu(&metrics, UNATTRIBUTED, "1"), Some((3 * GIB + 100 * MIB) as f64));
    assert_eq!(of_gpu(&metrics, HOST, "1"), None, "host processes are those of the instances");
    assert_eq!(metrics.sum(OF_CONTAINER, &[]), (8 * GIB) as f64, "nothing is counted twice");
    assert_eq!(
        metrics.all(OF_PROCESS, &[("gpu", "1")]).len(),
        4,
        "one process on two instances has two rows"
    );
    assert_eq!(metrics.value("memledger_gpus_visible", &[]), 2.0, "instances are no GPUs");
    assert_eq!(metrics.value("memledger_gpus_expected", &[]), 2.0);
    let info = &metrics.all("memledger_gpu_info", &ids("1", "2", "0"))[0].1;
    assert_eq!(info["mig_uuid"], "MIG-00000000-0000-4000-8000-000000000200");
    assert_eq!(info["gpu_uuid"], state.gpus[1].uuid, "the UUID of the GPU, to join both");
    assert_eq!(info["model"], "NVIDIA H100 80GB HBM3 MIG 1g.10gb");
    let busy = metrics.all("memledger_container_gpu_utilization_ratio", &[("gpu", "1")]);
    assert_eq!(busy, Vec::<&_>::new(), "none under MIG");
    assert_eq!(of_gpu(&metrics, "memledger_gpu_utilization_ratio", "1"), None, "none under MIG");
    assert!(of_gpu(&metrics, "memledger_gpu_power_watts", "1").is_some());
    assert!(memledger.api().to_string().contains("MIG-00000000-0000-4000-8000-000000000200"));
}

#[test]
fn compute_instances_of_one_gpu_instance_share_its_memory() {
    let (a, b) = (TestCgroup::container(), TestCgroup::container());
    let (first, second) = (process_in(&a), process_in(&b));
    let mut state = State::with_gpus(1);
    state.gpus[0] = mig_gpu(
        0,
        vec![instance(3, 0, 7 * GIB), instance(3, 1, 7 * GIB)],
        vec![process(first.pid(), 3, 0, 4 * GIB), process(second.pid(), 3, 1, 2 * GIB)],
    );
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[&a, &b]);
    let metrics = await_value(&memledger, OF_CONTAINER, &ids("0", "3", "0"), 4 * GIB);
    assert_eq!(metrics.value(OF_CONTAINER, &ids("0", "3", "1")), (2 * GIB) as f64);
    for ci in ["0", "1"] {
        assert_eq!(
            metrics.value(UNATTRIBUTED, &ids("0", "3", ci)),
            GIB as f64,
            "both report the same memory"
        );
    }
    assert_eq!(metrics.sum("memledger_gpu_memory_accounting_conflicts_total", &[]), 0.0);
}

#[test]
fn follows_changes_of_instances_and_mig_mode() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut state = State::with_gpus(1);
    let processes_of = |gi| vec![process(python.pid(), gi, 0, GIB)];
    state.gpus[0] = mig_gpu(0, vec![instance(1, 0, 2 * GIB), instance(2, 0, 0)], processes_of(1));
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[&container]);
    await_value(&memledger, OF_CONTAINER, &ids("0", "1", "0"), GIB);
    state.gpus[0] = mig_gpu(0, vec![instance(5, 0, 3 * GIB)], processes_of(5)); // it has the handle of instance 1
    driver.set(&state);
    let metrics = await_value(&memledger, OF_CONTAINER, &ids("0", "5", "0"), GIB);
    assert_eq!(metrics.all(USED, &[("gpu_instance_id", "1")]), Vec::<&_>::new());
    assert_eq!(metrics.all(USED, &[]).len(), 2, "the GPU and its one instance");
    state.gpus[0] = Gpu::numbered(0);
    state.gpus[0].memory.used = 2 * GIB;
    state.gpus[0].processes = vec![Process::compute(python.pid(), Some(2 * GIB))];
    driver.set(&state);
    let metrics = await_value(&memledger, OF_CONTAINER, &[("gpu", "0")], 2 * GIB);
    assert_eq!(metrics.all(USED, &[]).len(), 1);
    // MIG mode is enabled while memledger runs
    state.gpus[0] = mig_gpu(0, vec![instance(1, 0, GIB)], processes_of(1));
    driver.set(&state);
    await_value(&memledger, OF_CONTAINER, &ids("0", "1", "0"), GIB);
}

#[test]
fn keeps_the_last_mode_when_it_cannot_be_read() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut state = State::with_gpus(2);
    state.gpus[0] = mig_gpu(0, vec![instance(1, 0, 2 * GIB)], vec![process(python.pid(), 1, 0, GIB)]);
    let mut failing = state.clone();
    failing.gpus[0].errors.insert("nvmlDeviceGetMigMode".into(), 999);
    let driver = Driver::new(&failing);
    let memledger = driver.memledger(&[&container]);
    await_value(&memledger, "memledger_gpus_visible", &[], 2);
    driver.set(&state);
    await_value(&memledger, OF_CONTAINER, &ids("0", "1", "0"), GIB);
    for (used, symbol) in [(3, "nvmlDeviceGetMigMode"), (4, "nvmlDeviceGetMaxMigDeviceCount")] {
        let mut failing = state.clone();
        failing.gpus[0].errors.insert(symbol.into(), 999);
        failing.gpus[1].memory.used = used * GIB; // shows which state was read
        driver.set(&failing);
        let metrics = await_value(&memledger, USED, &[("gpu", "1")], used * GIB);
        assert_eq!(metrics.value(OF_CONTAINER, &ids("0", "1", "0")), GIB as f64, "{symbol}");
    }
}

#[test]
fn failed_instance_does_not_affect_others() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut state = State::with_gpus(1);
    let mut failed = instance(2, 0, 0);
    failed.memory.supported = false;
    state.gpus[0] = mig_gpu(0, vec![instance(1, 0, 2 * GIB), failed], vec![process(python.pid(), 1, 0, GIB)]);
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[&container]);
    let metrics = await_value(&memledger, OF_CONTAINER, &ids("0", "1", "0"), GIB);
    assert_eq!(metrics.get(USED, &ids("0", "2", "0")), None);
    assert!(metrics.get("memledger_gpu_info", &ids("0", "2", "0")).is_some());
}
