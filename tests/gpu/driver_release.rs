//! Driver calls that never return, and the release of the driver on request.

use fake_nvml::{FakeNvml, Process};

use super::faults::{assert_no_gpu, await_success, success};
use super::{
    Driver, GIB, MEMORY_INFO, OF_CONTAINER, USED, assert_stops_in_time, await_value, gpus, nvml_process,
    nvml_processes, process_in,
};
use crate::support::cgroups::TestCgroup;
use crate::support::{eventually_true, run};

/// Runs `memledger release-gpu` and returns its exit status and the response.
pub fn release(socket: &str) -> (Option<i32>, serde_json::Value) {
    let (code, output, errors) = run(&["release-gpu", &format!("--local.socket={socket}")]);
    (code, serde_json::from_str(&output).unwrap_or_else(|error| panic!("{error}: {output} {errors}")))
}

#[test]
fn opens_a_replaced_library_after_a_hang() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut state = gpus(&[3 * GIB]);
    state.gpus[0].processes = vec![Process::compute(python.pid(), Some(GIB))];
    let driver = Driver::new(&state);
    let memledger = driver.memledger_with(&[&container], &["--gpu.interval=50ms", "--gpu.deadline=300ms"]);
    await_value(&memledger, OF_CONTAINER, &[], GIB);
    for round in 1..=2_u64 {
        let mut hanging = state.clone();
        hanging.hang.insert(MEMORY_INFO.into());
        driver.set(&hanging);
        await_success(&memledger, Some(0.0));
        for _ in 0..5 {
            let metrics = memledger.fresh_metrics();
            assert_eq!(success(&metrics), Some(0.0));
            assert_eq!(metrics.get(USED, &[]), None, "no old value");
            assert!(
                metrics.value("memledger_container_memory_usage_bytes", &[]) > 0.0,
                "host metrics continue"
            );
        }
        let dir = driver.fake.path().parent().unwrap();
        state.gpus[0].memory.used = (3 + round) * GIB;
        FakeNvml::install(dir, &state).unwrap();
        await_value(&memledger, USED, &[], (3 + round) * GIB);
        let metrics = await_value(&memledger, OF_CONTAINER, &[], GIB);
        assert_eq!(success(&metrics), Some(1.0));
        nvml_process(&memledger); // the one that hung was killed
    }
    assert_stops_in_time(memledger);
}

#[test]
fn slow_driver_returns_by_itself() {
    let mut state = gpus(&[GIB]);
    let driver = Driver::new(&state);
    let memledger = driver.memledger_with(&[], &["--gpu.interval=50ms", "--gpu.deadline=300ms"]);
    await_value(&memledger, USED, &[], GIB);
    state.slow_ms.insert(MEMORY_INFO.into(), 5_000);
    driver.set(&state);
    await_success(&memledger, Some(0.0));
    state.slow_ms.clear();
    state.gpus[0].memory.used = 2 * GIB;
    driver.set(&state);
    await_value(&memledger, USED, &[], 2 * GIB);
    nvml_process(&memledger);
}

#[test]
fn releases_the_driver_on_request_and_reopens_it() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut state = gpus(&[3 * GIB]);
    state.gpus[0].processes = vec![Process::compute(python.pid(), Some(GIB))];
    state.count_calls = true;
    let driver = Driver::new(&state);
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("control.sock").display().to_string();
    let listen = format!("--local.socket={socket}");
    let memledger =
        driver.memledger_with(&[&container], &["--gpu.interval=50ms", "--gpu.release-for=10s", &listen]);
    await_value(&memledger, OF_CONTAINER, &[], GIB);
    let (code, body) = release(&socket);
    assert_eq!((code, body["closed"].as_bool()), (Some(0), Some(true)), "{body}");
    assert_eq!(body["released_for_seconds"].as_f64(), Some(10.0));
    assert_eq!(nvml_processes(&memledger), Vec::<u32>::new(), "ended and reaped");
    assert_eq!(driver.fake.calls().unwrap()["nvmlShutdown"], 1);
    let metrics = memledger.fresh_metrics();
    assert_no_gpu_now(&metrics);
    assert_eq!(success(&metrics), None, "a requested release is no failure");
    let trainers = metrics.value("memledger_container_processes", &[("role", "trainer")]);
    assert_eq!(trainers, 1.0, "the role of a process lasts, though only its GPU memory showed it");
    assert!(metrics.value("memledger_gpu_release_remaining_seconds", &[]) <= 10.0);
    memledger.eventually("the reopened driver", |metrics| {
        assert_ne!(success(metrics), Some(0.0), "reopening is no failure either");
        metrics.try_value(OF_CONTAINER, &[])
    });
    let metrics = memledger.fresh_metrics();
    assert_eq!(success(&metrics), Some(1.0));
    assert_eq!(metrics.get("memledger_gpu_release_remaining_seconds", &[]), None);
    assert_eq!(
        metrics.value("memledger_container_gpu_memory_peak_bytes", &[]),
        GIB as f64,
        "peaks are kept during the release"
    );
}

#[test]
fn reopening_the_driver_is_never_a_failure() {
    let driver = Driver::new(&gpus(&[GIB]));
    let flags = ["--gpu.interval=50ms", "--sample.interval=100ms", "--gpu.release-for=3s"];
    let memledger = driver.memledger_with(&[], &flags);
    await_value(&memledger, USED, &[], GIB);
    for _ in 0..3 {
        memledger.signal("USR1");
        for is_released in [true, false] {
            memledger.eventually("the driver is released and reopened", |metrics| {
                assert_ne!(success(metrics), Some(0.0));
                match metrics.get(USED, &[]).is_none() {
                    found if found == is_released => Ok(()),
                    found => Err(format!("released: {found}")),
                }
            });
        }
    }
}

/// Like [`assert_no_gpu`], except for the remaining time of the release.
fn assert_no_gpu_now(metrics: &crate::support::Metrics) {
    let mut others = metrics.clone();
    others.series.retain(|(family, _, _)| family != "memledger_gpu_release_remaining_seconds");
    assert_no_gpu(&others);
}

#[test]
fn releases_the_driver_on_a_signal_and_stops_meanwhile() {
    let driver = Driver::new(&gpus(&[GIB]));
    let memledger = driver.memledger(&[]);
    await_value(&memledger, USED, &[], GIB);
    memledger.signal("USR1");
    eventually_true("the NVML process has ended", || nvml_processes(&memledger).is_empty());
    let metrics = memledger.fresh_metrics();
    assert_no_gpu_now(&metrics);
    assert!(metrics.value("memledger_gpu_release_remaining_seconds", &[]) > 200.0, "five minutes by default");
    assert_stops_in_time(memledger);
}

#[test]
fn release_ends_a_hung_driver() {
    let mut state = gpus(&[GIB]);
    let driver = Driver::new(&state);
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("control.sock").display().to_string();
    let listen = format!("--local.socket={socket}");
    let memledger = driver.memledger_with(&[], &["--gpu.interval=50ms", "--gpu.deadline=300ms", &listen]);
    await_value(&memledger, USED, &[], GIB);
    state.hang.insert(MEMORY_INFO.into());
    driver.set(&state);
    await_success(&memledger, Some(0.0));
    nvml_process(&memledger); // which hangs
    let (code, body) = release(&socket);
    assert_eq!((code, body["closed"].as_bool()), (Some(0), Some(true)), "{body}");
    assert_eq!(nvml_processes(&memledger), Vec::<u32>::new());
}

/// The library's shutdown hangs, or its destructor, or both.
#[test]
fn release_ends_a_library_that_does_not_close() {
    for (hang, hang_at_exit) in [("nvmlShutdown", false), ("nvmlEventSetFree", false), ("nvmlShutdown", true)]
    {
        let mut state = gpus(&[GIB]);
        state.hang.insert(hang.into());
        state.hang_at_exit = hang_at_exit;
        let driver = Driver::new(&state);
        let memledger = driver.memledger_with(&[], &["--gpu.interval=50ms", "--gpu.release-for=1s"]);
        await_value(&memledger, USED, &[], GIB);
        let before = nvml_process(&memledger);
        memledger.signal("USR1");
        eventually_true("another process", || nvml_processes(&memledger).iter().any(|pid| *pid != before));
        await_value(&memledger, USED, &[], GIB);
        nvml_process(&memledger); // the one that hung was killed
    }
}
