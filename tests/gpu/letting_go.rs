//! A call that never returns, and letting go of the driver on demand.

use std::time::Duration;

use fake_nvml::{FakeNvml, Process};

use super::faults::{assert_no_gpu, await_success, success};
use super::{Driver, GIB, MEMORY_INFO, OF_CONTAINER, USED, await_value, gpus, process_in};
use crate::support::cgroups::TestCgroup;
use crate::support::{Memledger, eventually};

/// Threads of memledger that talk to the driver.
fn threads(memledger: &Memledger) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", memledger.pid())).unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.trim() == "nvml").count()
}

/// Whether the library is mapped into memledger.
fn is_loaded(memledger: &Memledger, driver: &Driver) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", memledger.pid())).unwrap();
    maps.contains(driver.fake.path().to_str().unwrap())
}

fn post(memledger: &Memledger, headers: &[(&str, &str)]) -> (u16, String) {
    let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
    let mut request = agent.post(format!("http://{}/-/release-gpu", memledger.address));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let mut response = request.send_empty().unwrap();
    (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
}

#[test]
fn a_call_that_never_returns_is_left_behind_when_the_library_is_replaced() {
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
        // the state is healthy again, but the call is not back, and another thread would only hang beside it
        driver.set(&state);
        for _ in 0..5 {
            let metrics = memledger.fresh_metrics();
            assert_eq!(success(&metrics), Some(0.0));
            assert_eq!(metrics.get(USED, &[]), None, "no old value");
            assert!(metrics.value("memledger_container_memory_usage_bytes", &[]) > 0.0, "the host goes on");
        }
        assert_eq!(threads(&memledger), round as usize, "none was started in vain");
        let dir = driver.fake.path().parent().unwrap();
        state.gpus[0].memory.used = (3 + round) * GIB;
        FakeNvml::install(dir, &state).unwrap();
        await_value(&memledger, USED, &[], (3 + round) * GIB);
        let metrics = await_value(&memledger, OF_CONTAINER, &[], GIB);
        assert_eq!(success(&metrics), Some(1.0));
        assert_eq!(threads(&memledger), round as usize + 1, "the old call still hangs");
    }
    assert!(memledger.log().contains("its library was replaced"), "{}", memledger.log());
    memledger.signal("TERM");
    let (code, took) = memledger.wait();
    assert_eq!(code, Some(0));
    assert!(took < Duration::from_secs(1), "{took:?}");
}

#[test]
fn a_call_that_takes_longer_than_the_deadline_and_returns_is_no_reason_for_another_thread() {
    let mut state = gpus(&[GIB]);
    let driver = Driver::new(&state);
    let memledger = driver.memledger_with(&[], &["--gpu.interval=50ms", "--gpu.deadline=300ms"]);
    await_value(&memledger, USED, &[], GIB);
    state.slow_ms.insert(MEMORY_INFO.into(), 1_500);
    driver.set(&state);
    await_success(&memledger, Some(0.0));
    state.slow_ms.clear();
    state.gpus[0].memory.used = 2 * GIB;
    driver.set(&state);
    await_value(&memledger, USED, &[], 2 * GIB);
    assert_eq!(threads(&memledger), 1);
}

#[test]
fn the_driver_is_let_go_by_a_request_and_taken_back_after_a_while() {
    let container = TestCgroup::container();
    let python = process_in(&container);
    let mut state = gpus(&[3 * GIB]);
    state.gpus[0].processes = vec![Process::compute(python.pid(), Some(GIB))];
    state.count_calls = true;
    let driver = Driver::new(&state);
    let flags = ["--gpu.interval=50ms", "--web.enable-admin", "--gpu.release-for=5s"];
    let memledger = driver.memledger_with(&[&container], &flags);
    await_value(&memledger, OF_CONTAINER, &[], GIB);
    assert_eq!(post(&memledger, &[("Origin", "http://attacker.example")]).0, 403, "no web page may do it");
    let (status, body) = post(&memledger, &[]);
    let body: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, body["closed"].as_bool()), (200, Some(true)), "{body}");
    assert_eq!(body["released_for_seconds"].as_f64(), Some(5.0));
    assert!(!is_loaded(&memledger, &driver), "nothing of the library is left");
    assert_eq!(driver.fake.calls().unwrap()["nvmlShutdown"], 1);
    let metrics = memledger.fresh_metrics();
    assert_no_gpu_now(&metrics);
    assert_eq!(success(&metrics), None, "what was asked for is no failure");
    let trainers = metrics.value("memledger_container_processes", &[("role", "trainer")]);
    assert_eq!(trainers, 1.0, "it was known by its GPU memory alone, and still is one");
    assert!(metrics.value("memledger_gpu_release_remaining_seconds", &[]) <= 5.0);
    memledger.eventually("the return", |metrics| {
        assert_ne!(success(metrics), Some(0.0), "nor is the return");
        metrics.ask(OF_CONTAINER, &[])
    });
    let metrics = memledger.fresh_metrics();
    assert_eq!(success(&metrics), Some(1.0));
    assert_eq!(metrics.get("memledger_gpu_release_remaining_seconds", &[]), None);
    assert_eq!(
        metrics.value("memledger_container_gpu_memory_peak_bytes", &[]),
        GIB as f64,
        "peaks are kept meanwhile"
    );
}

#[test]
fn no_return_to_the_driver_is_ever_a_failure() {
    let driver = Driver::new(&gpus(&[GIB]));
    let flags = ["--gpu.interval=50ms", "--sample.interval=100ms", "--gpu.release-for=1s"];
    let memledger = driver.memledger_with(&[], &flags);
    await_value(&memledger, USED, &[], GIB);
    for _ in 0..4 {
        memledger.signal("USR1");
        for is_away in [true, false] {
            memledger.eventually("the driver is let go, and taken back", |metrics| {
                assert_ne!(success(metrics), Some(0.0));
                match metrics.get(USED, &[]).is_none() {
                    found if found == is_away => Ok(()),
                    found => Err(format!("away: {found}")),
                }
            });
        }
    }
}

/// As [`assert_no_gpu`], but the time until the return is told.
fn assert_no_gpu_now(metrics: &crate::support::Metrics) {
    let mut others = metrics.clone();
    others.series.retain(|(family, _, _)| family != "memledger_gpu_release_remaining_seconds");
    assert_no_gpu(&others);
}

#[test]
fn the_driver_is_let_go_by_a_signal_and_an_end_comes_through_meanwhile() {
    let driver = Driver::new(&gpus(&[GIB]));
    let memledger = driver.memledger(&[]);
    await_value(&memledger, USED, &[], GIB);
    memledger.signal("USR1");
    eventually("the library is closed", || {
        if is_loaded(&memledger, &driver) { Err("it is mapped".to_owned()) } else { Ok(()) }
    });
    let metrics = memledger.fresh_metrics();
    assert_no_gpu_now(&metrics);
    assert!(metrics.value("memledger_gpu_release_remaining_seconds", &[]) > 200.0, "five minutes by default");
    memledger.signal("TERM");
    let (code, took) = memledger.wait();
    assert_eq!(code, Some(0));
    assert!(took < Duration::from_secs(1), "{took:?}");
}

#[test]
fn without_the_admin_flag_nobody_lets_go_and_a_driver_that_hangs_is_told_as_not_closed() {
    let mut state = gpus(&[GIB]);
    let driver = Driver::new(&state);
    let memledger = driver.memledger(&[]);
    await_value(&memledger, USED, &[], GIB);
    assert_eq!(post(&memledger, &[]).0, 404, "there is no such route");
    let admin =
        driver.memledger_with(&[], &["--gpu.interval=50ms", "--gpu.deadline=300ms", "--web.enable-admin"]);
    await_value(&admin, USED, &[], GIB);
    state.hang.insert(MEMORY_INFO.into());
    driver.set(&state);
    await_success(&admin, Some(0.0));
    assert_eq!(admin.get("/-/release-gpu").0, 405, "asking is not doing");
    assert_eq!(post(&admin, &[("Host", "gpu7.example")]).0, 403, "not from the network without a password");
    assert_eq!(post(&admin, &[("X-Forwarded-For", "10.0.0.1")]).0, 403, "nor through a proxy");
    let (status, text) = post(&admin, &[]);
    let body: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status, body["closed"].as_bool()), (202, Some(false)), "{text}");
}
