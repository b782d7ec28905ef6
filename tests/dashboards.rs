//! What we ship for Prometheus, Alertmanager and Grafana: checked by their own tools, against the catalog, and by asking a
//! real Prometheus every query of every dashboard.
//!
//! The checks of files are Python in `tests/dashboards`: they read JSON, YAML, Markdown and PromQL. No Grafana is asked:
//! none can be had here.

mod alertmanager;

use std::path::Path;
use std::process::Command;

use fake_nvml::{
    Event, FakeNvml, Gpu, Memory, MigDevice, Process, RetiredPages, State, Utilization, UtilizationSample,
};

use self::alertmanager::Alertmanager;
use crate::prometheus::{Prometheus, provided};
use crate::support::cgroups::TestCgroup;
use crate::support::docker::{Container, Engine, signal, unique};
use crate::support::python::Python;
use crate::support::{Memledger, Metrics, eventually};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

fn in_repository(path: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path).display().to_string()
}

/// All files of a folder with this ending.
fn files(folder: &str, ending: &str) -> Vec<String> {
    let entries = std::fs::read_dir(in_repository(folder)).expect(folder);
    let mut found: Vec<_> = entries.map(|entry| entry.expect(folder).path().display().to_string()).collect();
    found.retain(|path| path.ends_with(ending));
    found.sort();
    assert!(!found.is_empty(), "no {ending} in {folder}");
    found
}

/// Runs a tool that must be content; returns what it said.
fn content(tool: &str, arguments: &[impl AsRef<std::ffi::OsStr>]) -> String {
    let output =
        Command::new(tool).args(arguments).output().unwrap_or_else(|error| panic!("{tool}: {error}"));
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{tool}: {said}");
    said
}

/// Runs a script of `tests/dashboards`, which must be content.
fn script(name: &str, arguments: &[&str]) -> Option<String> {
    let python = provided("MEMLEDGER_TEST_PYTHON")?;
    let path = in_repository(&format!("tests/dashboards/{name}"));
    Some(content(&python, &[&["-B", path.as_str()][..], arguments].concat()))
}

#[test]
fn promtool_accepts_the_rules_and_the_configuration() {
    let Some(promtool) = provided("MEMLEDGER_TEST_PROMTOOL") else { return };
    let rules = files("deploy/prometheus/rules", ".yml");
    content(&promtool, &[vec!["check".to_owned(), "rules".to_owned()], rules].concat());
    content(&promtool, &["check", "config", &in_repository("deploy/prometheus/prometheus.yml")]);
}

#[test]
fn alerts_fire_when_they_should_and_are_silent_otherwise() {
    let Some(promtool) = provided("MEMLEDGER_TEST_PROMTOOL") else { return };
    let tests = files("deploy/prometheus/tests", ".yml");
    content(&promtool, &[vec!["test".to_owned(), "rules".to_owned()], tests].concat());
}

#[test]
fn amtool_accepts_the_configuration_and_routes_by_severity() {
    let Some(amtool) = provided("MEMLEDGER_TEST_AMTOOL") else { return };
    let config = in_repository("deploy/prometheus/alertmanager.yml");
    content(&amtool, &["check-config", &config]);
    let file = format!("--config.file={config}");
    for (labels, receiver) in [
        (["severity=critical", "alertname=MemledgerGpuLost"], "critical"),
        (["severity=warning", "alertname=MemledgerStoreDown"], "default"),
        (["severity=info", "alertname=MemledgerGpuMemoryHigh"], "info"),
        (["severity=none", "alertname=MemledgerWatchdog"], "heartbeat"),
    ] {
        let expected = format!("--verify.receivers={receiver}");
        content(&amtool, &["config", "routes", "test", &file, &expected, labels[0], labels[1]]);
    }
}

#[test]
fn dashboards_rules_and_runbooks_name_only_what_exists_and_show_all_that_does() {
    script("check.py", &[]);
}

#[test]
fn a_typo_in_any_of_them_is_found() {
    script("mutations.py", &[]);
}

/// A training as it looks from outside: a trainer that grows, two DataLoader workers that do too, a file in /dev/shm. It ends
/// with exit code 3 on SIGUSR1.
const TRAINING: &str = "
import ctypes, os, signal, time
signal.signal(signal.SIGUSR1, lambda *_: os._exit(3))
name = lambda text: ctypes.CDLL(None).prctl(15, text, 0, 0, 0)
parent = os.getpid()
for worker in range(2):
    if os.fork() == 0:
        name(b'pt_data_worker')
        held = bytearray(os.urandom(1 << 20)) * 8
        while os.getppid() == parent:
            held += bytes(b'x' * 20000)
            time.sleep(0.1)
        os._exit(0)
open('/dev/shm/batch', 'wb').write(b'x' * (5 << 20))
held = bytearray(os.urandom(1 << 20)) * 30
print('ready')
while True:
    held += bytes(b'x' * 50000)
    time.sleep(0.1)
";

fn train(engine: &Engine, name: &str, batch_size: u32, workers: u32) -> Container {
    let settings = [format!("BATCH_SIZE={batch_size}"), format!("NUM_WORKERS={workers}")];
    let flags = ["--memory=256m", "-e", &settings[0], "-e", &settings[1], "-e", "PRECISION=bf16"];
    let rest = ["-e", "ACCUM=4", "-e", "NUM_DEVICES=1", "-e", "PYTHONDONTWRITEBYTECODE=1"];
    engine.run_python(name, &[&flags[..], &rest].concat(), TRAINING)
}

/// A whole GPU that the trainer uses, and one that is split, with an instance of which it uses too.
fn gpus(trainer: u32, seconds: u64) -> State {
    let mut state = State::with_gpus(2);
    let gpu = &mut state.gpus[0];
    gpu.memory.used = 30 * GIB;
    gpu.processes =
        vec![Process::compute(trainer, Some(20 * GIB)), Process::compute(std::process::id(), Some(2 * GIB))];
    gpu.utilization = Some(Utilization { gpu: 80, memory: 40, ..Utilization::default() });
    gpu.utilization_samples =
        vec![UtilizationSample { pid: trainer, sm: 70, ..UtilizationSample::default() }];
    gpu.energy_mj = Some(seconds * 300_000);
    gpu.throttle_reasons = Some(4);
    gpu.retired_pages = Some(RetiredPages { single_bit: vec![1], ..RetiredPages::default() });
    gpu.fields.extend([(38, 1.into()), (45, 0.into()), (52, 0.into())]);
    let used = 4 * GIB;
    let memory = Memory { total: 10 * GIB, reserved: 16 * MIB, used, ..Memory::default() };
    let instance = MigDevice { uuid: "MIG-a".into(), gi: 1, ci: 0, memory, ..MigDevice::default() };
    let process = Process { gi: Some(1), ci: Some(0), ..Process::compute(trainer, Some(3 * GIB)) };
    state.gpus[1] = Gpu { mig: Some(vec![instance]), processes: vec![process], ..Gpu::numbered(1) };
    state.gpus[1].memory.used = used + 100 * MIB;
    state
}

/// A Prometheus that scrapes both every second, and Alertmanager as a program that is no memledger, with the shipped rules;
/// it tells Alertmanager.
fn watching(
    binary: &str,
    gpu_host: &Memledger,
    plain_host: &Memledger,
    alertmanager: &Alertmanager,
) -> Prometheus {
    let target = |memledger: &Memledger, name| {
        format!("  - {{targets: ['{}'], labels: {{instance: {name}}}}}\n", memledger.address)
    };
    let config = format!(
        "global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}\n\
         rule_files: ['{}']\nalerting: {{alertmanagers: [{{static_configs: [{{targets: ['{}']}}]}}]}}\n\
         scrape_configs:\n- job_name: other\n  static_configs: [{{targets: ['{}']}}]\n\
         - job_name: memledger\n  static_configs:\n{}{}",
        in_repository("deploy/prometheus/rules/*.yml"),
        alertmanager.address,
        alertmanager.address,
        target(gpu_host, "gpu-host"),
        target(plain_host, "plain-host")
    );
    Prometheus::configured(binary, &config)
}

fn await_one(prometheus: &Prometheus, query: &str, wanted: f64) {
    eventually(query, || match prometheus.one(query)? {
        value if value == wanted => Ok(()),
        value => Err(format!("it is {value}")),
    });
}

fn end_with_an_error(training: &Container) {
    signal("USR1", training.pid());
    eventually("its end", || match training.inspect("{{.State.ExitCode}} {{.State.Running}}").as_str() {
        "3 false" => Ok(()),
        other => Err(other.to_owned()),
    });
}

/// A query without data and two series of one legend are found, or the check of the panels looks at nothing.
fn assert_panels_are_looked_at(url: &str) {
    let Some(python) = provided("MEMLEDGER_TEST_PYTHON") else { return };
    for (file, old, new, complaint) in [
        ("why.json", "memledger_container_restarts_total{", "memledger_container_restart_total{", "no data"),
        ("container.json", " {{component}}\"", "\"", "two series are called"),
        (
            "overview.json",
            "label_values(memledger_build_info, job)",
            "label_values(memledger, job)",
            "has no values",
        ),
        (
            "overview.json",
            r#"process_open_fds{job=~\"$job\", instance=~\"$instance\"} and on"#,
            r#"process_open_fds{job=~\"$job\", instance=~\"$instance\"} or on"#,
            "is no memledger",
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("dashboards")).unwrap();
        let text = std::fs::read_to_string(in_repository(&format!("dashboards/{file}"))).unwrap();
        assert!(text.contains(old), "{file} has no {old} any more: choose another mutation");
        std::fs::write(folder.path().join("dashboards").join(file), text.replace(old, new)).unwrap();
        let root = folder.path().display().to_string();
        let check = in_repository("tests/dashboards/panels.py");
        let output = Command::new(&python).args(["-B", &check, url, "--root", &root]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(!output.status.success() && said.contains(complaint), "{old} became {new}: {said}");
    }
}

#[test]
fn every_panel_has_data_in_a_real_prometheus_and_two_runs_of_one_name_are_two_rows() {
    let Some(binary) = provided("MEMLEDGER_TEST_PROMETHEUS") else { return };
    let Some(manager) = provided("MEMLEDGER_TEST_ALERTMANAGER") else { return };
    let Some(engine) = Engine::shared() else { return };
    let name = unique("train");
    let first = train(&engine, &name, 8, 2);
    let folder = tempfile::tempdir().unwrap();
    let driver =
        FakeNvml::install(folder.path(), &gpus(first.pid(), 1)).expect("the fake library is installed");
    let library = format!("--gpu.nvml-library={}", driver.path().display());
    let state = format!("--state.path={}", folder.path().join("state").display());
    let include = format!("--container.include=^{name}$");
    let often = ["--gpu.interval=50ms", "--pss.interval=1s", "--podman.socket="];
    let gpu_host = Memledger::start(&[&often[..], &[&engine.flag(), &library, &state, &include]].concat());
    let cgroup = TestCgroup::container();
    let mut other = Python::start(&cgroup, "held = bytearray(20 << 20)\nprint('ready'); input()");
    other.line();
    let no_runtime = ["--docker.socket=", "--podman.socket=", "--no-collector.gpu", &cgroup.include()];
    let plain_host = Memledger::start(&no_runtime);
    let alertmanager = Alertmanager::start(&manager, &in_repository("deploy/prometheus/alertmanager.yml"));
    let prometheus = watching(&binary, &gpu_host, &plain_host, &alertmanager);

    let of_run = |batch: u32| {
        format!("count(container_run:memledger_memory_unreclaimable_bytes:join{{batch_size=\"{batch}\"}})")
    };
    await_one(&prometheus, &of_run(8), 1.0);
    await_one(&prometheus, "count(container_run:memledger_gpu_utilization:avg)", 1.0);
    end_with_an_error(&first);
    await_one(&prometheus, "sum(memledger_container_exits_total{reason=\"error\"})", 1.0);
    drop(first);

    let second = train(&engine, &name, 16, 2);
    let mut state = gpus(second.pid(), 2);
    state.events = vec![Event::xid(1, 0, 31)];
    driver.set(&state).unwrap();
    await_one(&prometheus, &of_run(16), 1.0);
    let rows = "count(max by (run, batch_size) (max_over_time(\
                container_run:memledger_memory_unreclaimable_peak_bytes:join{batch_size!=\"\"}[10m])))";
    await_one(&prometheus, rows, 2.0);

    let url = prometheus.url();
    if let Some(said) = script("panels.py", &[&url, "--range", "120", "--wait", "60"]) {
        eprintln!("{said}");
    }
    assert_panels_are_looked_at(&url);
    for (alert, receiver) in [("MemledgerGpuXid", "default"), ("MemledgerWatchdog", "heartbeat")] {
        eventually(alert, || match &alertmanager.receivers(alert)?[..] {
            [one] if one == receiver => Ok(()),
            other => Err(format!("it went to {other:?}")),
        });
    }
    let own = Metrics::parse(&prometheus.get("/metrics").unwrap());
    let failures = own.sum("prometheus_rule_evaluation_failures_total", &[]);
    assert_eq!(failures, 0.0, "{}", prometheus.log());
    // tests beside this one may make OOM kills; a training that starts and grows wakes nobody
    let awake = "ALERTS{alertstate=\"firing\", severity=~\"critical|warning\", alertname!~\".*OOM.*\"}";
    let alerts = prometheus.get("/api/v1/alerts").unwrap();
    assert_eq!(prometheus.query(awake).unwrap().len(), 1, "the Xid, and nothing else: {alerts}");
}
