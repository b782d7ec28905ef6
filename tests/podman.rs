//! A real Podman service with its own socket and storage.

use crate::support::podman::Podman;
use crate::support::{Memledger, run};

#[test]
fn finds_containers_through_podman_socket() {
    let Some(podman) = Podman::start() else { return };
    let name = format!("pod-train-{}", std::process::id());
    let id = podman.run(&name, &["--memory", "128m", "-e", "BATCH_SIZE=8"], "300");
    let socket = format!("--podman.socket={}", podman.socket());
    let include = format!("--container.include=^pod-.*-{}$", std::process::id());
    let memledger = Memledger::start(&["--docker.socket=", &socket, &include]);
    let labels = [("container_name", name.as_str())];
    memledger.eventually("the container", |metrics| {
        metrics.try_value("memledger_container_memory_usage_bytes", &labels)?;
        metrics.try_value("memledger_container_run_info", &[labels[0], ("batch_size", "8")])?;
        metrics.try_value("memledger_container_processes", &[labels[0], ("role", "other")])
    });
    let metrics = memledger.metrics();
    assert_eq!(metrics.value("memledger_runtime_up", &[("runtime", "podman")]), 1.0);
    let info = [labels[0], ("runtime", "podman"), ("container_id", id.as_str())];
    assert_eq!(metrics.value("memledger_container_info", &info), 1.0);
    assert_eq!(metrics.value("memledger_container_memory_limit_bytes", &labels), f64::from(128 << 20));
    let running = metrics.value("memledger_containers", &[("runtime", "podman")]);
    assert_eq!(running, 1.0, "the monitor process is not a container");
    // another one, through events; it ends when it was seen
    let short = format!("pod-short-{}", std::process::id());
    podman.run(&short, &["--rm"], "300");
    memledger.eventually("the short-lived container", |m| {
        m.try_value("memledger_container_info", &[("container_name", &short)])
    });
    podman.ok(&["kill", &short]);
    memledger.eventually("its end", |metrics| {
        match metrics.get("memledger_containers", &[("runtime", "podman")]) {
            Some(1.0) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });
    // names are kept while Podman is down
    let mut podman = podman;
    podman.kill_service();
    memledger.eventually("the lost connection", |metrics| {
        match metrics.get("memledger_runtime_up", &[("runtime", "podman")]) {
            Some(0.0) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });
    assert!(memledger.fresh_metrics().get("memledger_container_memory_usage_bytes", &labels).is_some());
    let (code, doctor, _) = run(&["doctor", "--docker.socket=", &socket]);
    assert_eq!(code, Some(0));
    assert!(doctor.contains("MISSING  podman"), "the socket has no listener: {doctor}");
}
