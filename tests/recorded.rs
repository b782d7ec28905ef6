//! Runs the real binary on whole recorded hosts and compares `/metrics` with a golden text, values included.
//!
//! `tests/hosts/README.md` lists which hosts were recorded and which were arranged. A recording has no `/proc/PID/root`, so
//! `/dev/shm` of containers is absent here; tests/truth.rs tests it.

mod amdgpu;
pub(crate) mod kubernetes;

use fake_nvml::{FakeNvml, Process, State};

use crate::support::recorded::Host;
use crate::support::{Metrics, golden};

/// Families with values that differ in every run: the process itself, its version, and times.
const VARYING: [&str; 6] = [
    "process_",
    "memledger_build_info",
    "memledger_collector_duration_seconds",
    "memledger_cycle_duration_seconds",
    "memledger_cycles_skipped_total",
    "memledger_snapshot_timestamp_seconds",
];

impl Host {
    /// Returns the text of `/metrics` once everything measured outside the cycle is there.
    fn text(&self, flags: &[String]) -> String {
        let memledger = self.start(flags);
        let nvml = flags.iter().any(|flag| flag.starts_with("--gpu.nvml-library"));
        let sources = [("gpu", nvml), ("amdgpu", self.path("sys").exists())];
        let sources: Vec<_> = sources.into_iter().filter(|(_, there)| *there).map(|(name, _)| name).collect();
        let ledger_sources = 2 + usize::from(flags.iter().any(|flag| flag.starts_with("--cri.endpoint")));
        let complete = |metrics: &Metrics| {
            let shares = metrics.all("memledger_container_process_pss_bytes", &[]).len();
            let read = |source: &&str| metrics.get("memledger_collector_success", &[("collector", source)]);
            let gpus = sources.iter().filter(|source| read(source) == Some(1.0)).count();
            let ledger = metrics.all("memledger_oom_source_up", &[]).len();
            let counted = metrics.all("memledger_container_restarts_total", &[]).len() == self.containers;
            match (shares == 4 * self.containers && counted, gpus == sources.len(), ledger == ledger_sources)
            {
                (true, true, true) => Ok(()),
                _ => Err(format!(
                    "{shares} PSS series, {gpus} of the GPU sources {sources:?}, {ledger} sources of the ledger; {}",
                    memledger.log()
                )),
            }
        };
        memledger.eventually("a complete snapshot", complete);
        let (status, text) = memledger.get("/metrics");
        assert_eq!(status, 200);
        complete(&Metrics::parse(&text)).expect("still complete");
        text
    }

    /// Compares with the golden text and returns the text.
    fn compare(&self, name: &str, flags: &[String]) -> String {
        let text = self.text(flags);
        let metrics = Metrics::parse(&text);
        assert_eq!(metrics.all("memledger_container_info", &[]).len(), self.containers);
        golden(&format!("tests/golden/{name}.prom"), &without_varying(&text));
        text
    }
}

/// Replaces the values that vary, and the labels of the version.
fn without_varying(text: &str) -> String {
    let keep = |line: &str| {
        let varies = VARYING.iter().any(|prefix| line.starts_with(prefix));
        let (series, _) = line.rsplit_once(' ').expect("a value");
        let series = if line.starts_with("memledger_build_info") { "memledger_build_info{}" } else { series };
        if varies { format!("{series} VARIES\n") } else { format!("{line}\n") }
    };
    text.lines().map(|line| if line.starts_with('#') { format!("{line}\n") } else { keep(line) }).collect()
}

/// Flags of a host without GPUs, whatever the machine of the test has.
fn no_gpu() -> Vec<String> {
    vec!["--no-collector.gpu".to_owned()]
}

#[test]
fn docker_on_cgroup_v1() {
    Host::unpack("v1-docker", 1).compare("v1-docker", &no_gpu());
}

#[test]
fn hybrid_host_uses_the_v1_memory_controller() {
    Host::unpack("hybrid-docker", 2).compare("hybrid-docker", &no_gpu());
}

/// Returns the recorded host `v2-docker` with two GPUs, and the flag of their library.
fn gpu_host() -> (Host, Vec<String>) {
    let host = Host::unpack("v2-docker", 2);
    let (trainer, notebook, outside, missing) = (904, 949, 975, 4_000_000);
    let mut state = State::with_gpus(2);
    for gpu in &mut state.gpus {
        gpu.memory.total = 12 << 30;
        gpu.memory.reserved = 300 << 20;
    }
    state.gpus[0].memory.used = 9 << 30;
    state.gpus[0].processes = vec![
        Process::compute(trainer, Some(6 << 30)),
        Process { kind: "CG".into(), ..Process::compute(notebook, Some(1 << 30)) },
        Process { kind: "G".into(), ..Process::compute(outside, Some(512 << 20)) },
    ];
    state.gpus[1].memory.used = 8 << 30;
    state.gpus[1].processes =
        vec![Process::compute(trainer, Some(5 << 30)), Process::compute(missing, Some(2 << 30))];
    let fake = FakeNvml::install(host.root.path(), &state).unwrap();
    let flags = vec![format!("--gpu.nvml-library={}", fake.path().display())];
    (host, flags)
}

#[test]
fn docker_with_systemd_on_cgroup_v2_and_two_gpus() {
    let (host, flags) = gpu_host();
    host.compare("v2-docker", &flags);
}

/// Asserts that all GPU memory is unattributed and no process has any.
fn assert_unattributed(metrics: &Metrics) {
    for (_, labels, used) in metrics.all("memledger_gpu_memory_used_bytes", &[]) {
        let gpu = [("gpu", labels["gpu"].as_str())];
        assert_eq!(metrics.value("memledger_gpu_memory_unattributed_bytes", &gpu), *used);
    }
    for family in ["memledger_container_gpu_memory_used_bytes", "memledger_process_gpu_memory_used_bytes"] {
        assert_eq!(metrics.all(family, &[]), Vec::<&_>::new());
    }
}

#[test]
fn trusts_no_nvml_pids_outside_the_initial_pid_namespace() {
    let (host, flags) = gpu_host();
    let link = host.path("proc/self/ns/pid");
    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink("pid:[4026532999]", &link).unwrap();
    let memledger = host.start(&flags);
    memledger.eventually("a GPU", |metrics| metrics.try_value("memledger_gpus_visible", &[]));
    let metrics = memledger.fresh_metrics();
    assert_unattributed(&metrics);
    let of_host = metrics.all("memledger_gpu_host_processes_memory_bytes", &[]);
    assert_eq!(of_host, Vec::<&_>::new(), "unknown is not zero");
    assert!(memledger.log().contains("pid namespace"), "{}", memledger.log());
    assert!(
        metrics.value("memledger_container_memory_usage_bytes", &[("container_name", "ce5d6d4195c3")]) > 0.0
    );
}

#[test]
fn ignores_processes_started_after_the_nvml_reading() {
    let (host, flags) = gpu_host();
    std::fs::write(host.path("proc/uptime"), "200.00 100.00\n").unwrap(); // the oldest started at 234 s
    let memledger = host.start(&flags);
    memledger.eventually("a GPU", |metrics| metrics.try_value("memledger_gpus_visible", &[]));
    assert_unattributed(&memledger.fresh_metrics());
}

#[test]
fn escapes_arbitrary_bytes_in_process_names() {
    let (host, flags) = gpu_host();
    let stat = host.path("proc/904/stat");
    let text = std::fs::read_to_string(&stat).unwrap();
    let (before, after) = text.split_once("python3").unwrap();
    std::fs::write(&stat, [before.as_bytes(), b"a\xff\"b\\) R\n#", after.as_bytes()].concat()).unwrap();
    let metrics = Metrics::parse(&host.text(&flags));
    let row = [("pid", "904"), ("gpu", "0"), ("role", "trainer")];
    let rows = metrics.all("memledger_process_gpu_memory_used_bytes", &row);
    assert_eq!(rows.len(), 1);
    let name = &rows[0].1["process"];
    assert!(name.starts_with('a') && name.contains("\"b\\) R") && !name.contains('\0'), "{name:?}");
}

#[test]
fn docker_with_cgroupfs_on_cgroup_v2_and_psi() {
    Host::unpack("v2-cgroupfs-psi", 2).compare("v2-cgroupfs-psi", &no_gpu());
}

#[test]
fn limits_of_pods_bound_kubernetes_containers() {
    Host::unpack("v2-kubernetes", 4).compare("v2-kubernetes", &no_gpu());
}

#[test]
fn podman_container_is_its_scope_without_the_monitor() {
    let host = Host::unpack("v2-podman", 1);
    assert_eq!(host.processes, 4, "three of the container and its monitor");
    host.compare("v2-podman", &no_gpu());
}

#[test]
fn kernel_before_5_18_sums_kernel_memory_and_samples_the_peak() {
    Host::unpack("v2-before-5.18", 1).compare("v2-before-5.18", &no_gpu());
}
