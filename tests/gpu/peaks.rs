//! Peaks that scrapes and full readings would miss.

use fake_nvml::{Process, State};

use super::{Driver, GIB, OF_CONTAINER, USED, await_value, gpus, process_in};
use crate::support::Memledger;
use crate::support::cgroups::TestCgroup;

const OF_DEVICE: &str = "memledger_gpu_memory_peak_bytes";
const PEAK: &str = "memledger_container_gpu_memory_peak_bytes";
const RECENT: &str = "memledger_container_gpu_memory_recent_peak_bytes";
const OF_ONE: &str = "memledger_process_gpu_memory_peak_bytes";

/// One full reading, then only memory samples.
const SAMPLES_ONLY: [&str; 3] = ["--gpu.interval=1h", "--gpu.deadline=1h", "--gpu.sample-interval=20ms"];

fn state_with(used: u64, processes: &[(u32, u64)]) -> State {
    let mut state = gpus(&[used]);
    state.gpus[0].processes =
        processes.iter().map(|(pid, used)| Process::compute(*pid, Some(*used))).collect();
    state
}

fn await_peak(memledger: &Memledger, family: &str, labels: &[(&str, &str)], wanted: u64) {
    memledger.eventually(&format!("{family} {labels:?} = {wanted}"), |metrics| {
        match metrics.try_value(family, labels)? {
            found if found == wanted as f64 => Ok(()),
            found => Err(format!("it is {found}")),
        }
    });
}

#[test]
fn records_a_spike_between_two_readings() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let calm = state_with(3 * GIB, &[(python.pid(), GIB)]);
    let driver = Driver::new(&calm);
    let memledger = driver.memledger_with(&[&container], &SAMPLES_ONLY);
    await_value(&memledger, OF_CONTAINER, &[], GIB);
    await_peak(&memledger, PEAK, &[], GIB);
    driver.set(&state_with(9 * GIB, &[(python.pid(), 7 * GIB)]));
    await_peak(&memledger, PEAK, &[], 7 * GIB);
    driver.set(&calm);
    let metrics = memledger.fresh_metrics();
    assert_eq!(metrics.value(OF_CONTAINER, &[]), GIB as f64, "no full reading has it");
    assert_eq!(metrics.value(USED, &[]), (3 * GIB) as f64);
    let pid = python.pid().to_string();
    for (family, peak) in [
        (PEAK, 7),
        (RECENT, 7),
        (OF_ONE, 7),
        ("memledger_process_gpu_memory_recent_peak_bytes", 7),
        (OF_DEVICE, 9),
        ("memledger_gpu_memory_recent_peak_bytes", 9),
    ] {
        assert_eq!(metrics.value(family, &[("gpu", "0")]), (peak * GIB) as f64, "{family}");
    }
    assert_eq!(metrics.all(OF_ONE, &[("pid", &pid), ("process", "python3"), ("role", "trainer")]).len(), 1);
}

#[test]
fn container_peak_is_not_the_sum_of_process_peaks() {
    let container = TestCgroup::container();
    let (first, second) = (process_in(&container), process_in(&container));
    let both = |a: u64, b: u64| state_with(8 * GIB, &[(first.pid(), a * GIB), (second.pid(), b * GIB)]);
    let driver = Driver::new(&both(5, 1));
    let memledger = driver.memledger_with(&[&container], &SAMPLES_ONLY);
    let of = |pid: u32| pid.to_string();
    await_peak(&memledger, OF_ONE, &[("pid", &of(first.pid()))], 5 * GIB);
    driver.set(&both(1, 5));
    await_peak(&memledger, OF_ONE, &[("pid", &of(second.pid()))], 5 * GIB);
    assert_eq!(memledger.metrics().value(PEAK, &[]), (6 * GIB) as f64);
}

#[test]
fn counts_a_process_that_runs_only_between_two_readings() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let calm = state_with(GIB, &[(python.pid(), GIB)]);
    let driver = Driver::new(&calm);
    let memledger = driver.memledger_with(&[&container], &SAMPLES_ONLY);
    await_peak(&memledger, PEAK, &[], GIB);
    let late = process_in(&container);
    driver.set(&state_with(5 * GIB, &[(python.pid(), GIB), (late.pid(), 4 * GIB)]));
    await_peak(&memledger, PEAK, &[], 5 * GIB);
    drop(late);
    driver.set(&calm);
    assert_eq!(memledger.fresh_metrics().value(PEAK, &[]), (5 * GIB) as f64);
}

#[test]
fn peak_remains_after_process_and_container_end() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let driver = Driver::new(&state_with(5 * GIB, &[(python.pid(), 4 * GIB)]));
    let memledger = driver.memledger(&[&container]);
    await_peak(&memledger, PEAK, &[], 4 * GIB);
    driver.set(&gpus(&[0]));
    await_value(&memledger, USED, &[], 0);
    let of = [("container_name", container.name())];
    assert_eq!(memledger.metrics().value(PEAK, &of), (4 * GIB) as f64);
    drop(python);
    let name = container.name().to_owned();
    drop(container);
    memledger.eventually("the end of the container", |metrics| {
        match metrics.all("memledger_container_memory_usage_bytes", &[]).len() {
            0 => Ok(()),
            _ => Err("it still exists".to_owned()),
        }
    });
    let metrics = memledger.fresh_metrics();
    assert_eq!(metrics.value(PEAK, &[("container_name", &name)]), (4 * GIB) as f64);
    assert_eq!(metrics.get(RECENT, &[]), None, "an ended container has no recent peak");
}

#[test]
fn without_memory_samples_full_readings_set_peaks() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let driver = Driver::new(&state_with(3 * GIB, &[(python.pid(), 2 * GIB)]));
    let memledger =
        driver.memledger_with(&[&container], &["--gpu.interval=50ms", "--gpu.sample-interval=0s"]);
    await_peak(&memledger, PEAK, &[], 2 * GIB);
    driver.set(&state_with(5 * GIB, &[(python.pid(), 4 * GIB)]));
    await_peak(&memledger, PEAK, &[], 4 * GIB);
    assert_eq!(memledger.metrics().value(OF_DEVICE, &[]), (5 * GIB) as f64);
}
