//! What it costs to know 250 pods.
//!
//! `make bench` starts a containerd of its own with as many real sandboxes and a real container in each, lets the release
//! binary follow it with its default settings, and measures processor time by thread: tokio's workers do nothing else here.
//! Debian's containerd has no events, so the list is taken every second: the dear case. It writes its part of
//! docs/performance.md. Needs root, and `tests/setup/setup.sh containerd env`.

mod document;
#[path = "../tests/support/mod.rs"]
mod support;

use std::time::Duration;

use support::cri::{ContainerSpec, Containerd, PodSpec};
use support::{Memledger, cpu_nanos, eventually};

const PODS: usize = 250;
const SECONDS: u64 = 30;
const SLEEP: &[&str] = &["/busybox/busybox", "sleep", "100000"];
const BUDGET_PERCENT: f64 = 1.0;

/// Per cent of one core over a time, of several things.
fn share<const N: usize>(look: impl Fn() -> [f64; N]) -> [f64; N] {
    let before = look();
    std::thread::sleep(Duration::from_secs(SECONDS)); // a bench measures time
    let after = look();
    std::array::from_fn(|at| (after[at] - before[at]) / (SECONDS as f64 * 1e9) * 100.0)
}

fn main() -> std::io::Result<()> {
    if document::is_test_listing() {
        return Ok(());
    }
    let Some(containerd) = Containerd::start() else {
        return Err(std::io::Error::other("no containerd to measure with"));
    };
    let containerd_pid = containerd.pid();
    for number in 0..PODS {
        let name = format!("pod-{number}");
        let labels = [("app.kubernetes.io/name", "bench"), ("pod-template-hash", "0123456789")];
        let pod = containerd.pod(&PodSpec {
            namespace: "bench",
            name: &name,
            qos: "burstable/",
            labels: &labels,
            ..PodSpec::default()
        });
        containerd.run(&pod, &ContainerSpec { name: "main", command: SLEEP, ..ContainerSpec::default() });
    }
    let [idle] = share(|| [cpu_nanos(containerd_pid, None)]);
    let flags = [&containerd.flag(), "--docker.socket=", "--podman.socket=", "--container.include=^bench/"];
    let memledger = Memledger::start(&[&flags[..], &["--sample.interval=1s"]].concat());
    eventually("all of them", || {
        let shown = memledger.metrics().all("memledger_container_pod_info", &[]).len();
        if shown == PODS { Ok(()) } else { Err(format!("{shown}")) }
    });
    let [follows, cycle, whole, asked] = share(|| {
        let pid = memledger.pid();
        let of = |name| cpu_nanos(pid, name);
        [of(Some("tokio-rt-worker")), of(Some("cycle")), of(None), cpu_nanos(containerd_pid, None)]
    });
    let resident = memledger.metrics().value("process_resident_memory_bytes", &[]) / f64::from(1 << 20);
    let build = if cfg!(debug_assertions) {
        "a build WITHOUT optimisation (`--profile dev`), which is several times as dear as the release binary,"
    } else {
        "the release binary"
    };
    let verdict = match () {
        () if cfg!(debug_assertions) => "not judged in this build",
        () if follows < BUDGET_PERCENT => "kept",
        () => "NOT KEPT",
    };
    document::write(&format!(
        "## Pods over CRI\n\n\
         {PODS} pods with one container each in a real containerd (Debian's 1.6, which has no events, so the list is taken every\n\
         second), {build} with its default settings, over {SECONDS} s. Per cent of one core:\n\n\
         | what | per cent |\n| --- | ---: |\n\
         | asking for pods (budget: {BUDGET_PERCENT:.0}, {verdict}) | {follows:.2} |\n\
         | the cycle, once a second | {cycle:.2} |\n\
         | all of memledger | {whole:.2} |\n\
         | containerd, idle | {idle:.2} |\n\
         | containerd, while memledger asks | {asked:.2} |\n\n\
         Resident memory of memledger: {resident:.1} MiB.\n"
    ))
}
