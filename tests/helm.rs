//! The Helm chart and the plain manifests, by the real `helm`, the API's own schemas and promtool; and the rendered pod's
//! container, run by a real engine with just the rights that the chart gives it.
//!
//! The checks of files are Python in `tests/helm`. No cluster is asked: none can be had here.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use fake_nvml::{FakeNvml, Process, State};

use crate::deploy::Image;
use crate::prometheus::provided;
use crate::support::docker::{Container, Engine, unique};
use crate::support::oom::Scene;
use crate::support::{Metrics, eventually};

/// Runs a script of `tests/helm`, which must be content; returns what it said.
fn script(name: &str, arguments: &[&str]) -> Option<String> {
    let python = provided("MEMLEDGER_TEST_PYTHON")?;
    provided("MEMLEDGER_TEST_HELM")?;
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/helm").join(name);
    let output = Command::new(python).arg("-B").arg(path).args(arguments).output().expect("Python starts");
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{name}: {said}");
    Some(said)
}

#[test]
fn every_case_of_the_chart_is_valid_and_asks_for_no_more_than_it_needs() {
    script("judge.py", &[]);
}

#[test]
fn wrong_values_are_refused_with_a_message_that_says_which() {
    script("refusals.py", &[]);
}

#[test]
fn the_charts_rules_and_dashboards_are_the_files_and_its_targets_are_named_by_node() {
    if provided("MEMLEDGER_TEST_PROMTOOL").is_some() {
        script("monitoring.py", &[]);
    }
}

#[test]
fn a_fault_in_the_chart_is_found() {
    if provided("MEMLEDGER_TEST_PROMTOOL").is_some() {
        script("faults.py", &[]);
    }
}

/// What one memledger tells of the container that all of them watch.
fn told(pod: &Pod, watched: &Container) -> BTreeSet<&'static str> {
    let metrics = Metrics::parse(&pod.get("/metrics").unwrap_or_default());
    let name = &[("container_name", watched.name.as_str())][..];
    let short = &[("container_name", watched.short_id())][..];
    let any = |family| !metrics.all(family, name).is_empty() || !metrics.all(family, short).is_empty();
    let families = [
        ("memory", "memledger_container_memory_usage_bytes"),
        ("processes", "memledger_container_processes"),
        ("shm", "memledger_container_shm_used_bytes"),
        ("pss", "memledger_container_process_pss_bytes"),
        ("gpu", "memledger_container_gpu_memory_used_bytes"),
    ];
    let mut told: BTreeSet<_> =
        families.into_iter().filter(|(_, family)| any(family)).map(|(what, _)| what).collect();
    if !metrics.all("memledger_container_memory_usage_bytes", name).is_empty() {
        told.insert("name");
    }
    let events = pod.memledger(&["events", "--json", "--since=10m"]).unwrap_or_default();
    let is_the_kill = |line: &str| line.contains(watched.short_id()) && line.contains("\"process\":");
    if events.lines().any(is_the_kill) {
        told.insert("kill");
    }
    told
}

/// memledger as the chart runs it with some values.
struct Pod {
    engine: Engine,
    container: Container,
}

impl Pod {
    fn start(image: &Image, state: &Path, driver: &str, values: &[&str]) -> Option<Self> {
        let state = state.display().to_string();
        let pss = "settings={\"pss.interval\":\"1s\"}";
        let said = script("container.py", &[&[state.as_str(), pss], values].concat())?;
        let (flags, arguments) = said.trim_end().split_once("\n--\n").expect("flags, and arguments");
        let flags: Vec<_> = flags.lines().chain([driver]).collect();
        let arguments: Vec<_> = arguments.lines().collect();
        let engine = Engine { image: image.name.clone(), ..image.engine.clone() };
        let container = engine.run(&unique("pod"), &flags, &arguments);
        Some(Self { engine, container })
    }

    fn memledger(&self, words: &[&str]) -> Result<String, String> {
        self.engine.try_docker(&[&["exec", self.container.id.as_str(), "/memledger"], words].concat())
    }

    /// Asks as a kubelet or a Prometheus does, but from within: there is no network between.
    fn get(&self, path: &str) -> Result<String, String> {
        let pid = self.container.pid().to_string();
        let program = "import sys, urllib.request\n\
                       print(urllib.request.urlopen('http://127.0.0.1:10853' + sys.argv[1]).read().decode())";
        let output = Command::new("nsenter")
            .args(["--net", "--target", &pid, "/usr/bin/python3", "-c", program, path])
            .output()
            .map_err(|error| error.to_string())?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        }
    }
}

/// Values, and what is lost by them; then a line of `memledger doctor` that says so.
const LOST: &[(&[&str], &[&str], &str)] = &[
    (&[], &[], "syslog(2) in place of /dev/kmsg"),
    (&["kmsg.enabled=true"], &[], "/dev/kmsg can be read"),
    (&["hostPID=false"], &["processes", "shm", "pss", "gpu"], "MISSING  pid namespace"),
    (&["capabilities.sysPtrace=false"], &["shm", "pss"], "MISSING  CAP_SYS_PTRACE"),
    (&["capabilities.syslog=false"], &["kill"], "not read (--oom.kernel-log=off)"),
    (&["docker.enabled=false"], &["name"], "no socket at /var/run/docker.sock"),
    (&["host.cgroup=false"], &["memory", "name", "processes", "shm", "pss"], "The main job cannot run here"),
    // with hostPID the container's own /proc is the node's: it adds nothing
    (&["host.proc=true"], &[], "readable at /host/proc"),
    (&["state.hostPath=\"\""], &[], "state path"),
];

#[test]
fn the_default_rights_suffice_and_without_each_just_what_is_said_is_lost() {
    let Some(scene) = Scene::new("chart") else { return };
    let image = Image::build(&scene.engine);
    let watched = scene.run("it", &[], &["wait=/control/kill", "seq=1:eat", "wait=/control/end"]);
    let folder = tempfile::Builder::new().prefix("mlt-chart-").tempdir().unwrap();
    let mut state = State::with_gpus(1);
    state.gpus[0].memory.used = 8 << 30;
    state.gpus[0].processes = vec![Process::compute(watched.pid(), Some(6 << 30))];
    let driver = folder.path().join("driver");
    std::fs::create_dir(&driver).unwrap();
    FakeNvml::install(&driver, &state).expect("the fake library is installed");
    let driver = format!("--volume={}:/usr/lib64:ro", driver.display());
    let mut pods = Vec::new();
    for (index, (values, ..)) in LOST.iter().enumerate() {
        let docker = if values.iter().any(|value| value.starts_with("docker.")) { &[][..] } else { DOCKER };
        let state = folder.path().join(format!("state-{index}"));
        let Some(pod) = Pod::start(&image, &state, &driver, &[docker, values].concat()) else { return };
        pods.push(pod);
    }
    let all: BTreeSet<_> = ["memory", "name", "processes", "shm", "pss", "gpu", "kill"].into();
    let kept = |lost: &[&str]| all.iter().copied().filter(|what| !lost.contains(what)).collect();
    for (pod, (values, lost, _)) in pods.iter().zip(LOST) {
        let mut wanted: BTreeSet<_> = kept(lost);
        wanted.remove("kill");
        eventually(&format!("{values:?}"), || match told(pod, &watched) {
            found if found.is_superset(&wanted) => Ok(()),
            found => Err(format!("{found:?}")),
        });
    }
    scene.release("kill");
    scene.really_killed(1);
    for (pod, (values, lost, line)) in pods.iter().zip(LOST) {
        let wanted: BTreeSet<_> = kept(lost);
        eventually(&format!("{values:?}, after the kill"), || match told(pod, &watched) {
            found if found == wanted => Ok(()),
            found => Err(format!("{found:?}, wanted is {wanted:?}")),
        });
        let report = pod.memledger(&["doctor"]).unwrap_or_else(|error| error);
        assert!(report.contains(line), "{values:?}: {report}");
        for probe in ["/-/healthy", "/-/ready"] {
            pod.get(probe).unwrap_or_else(|error| panic!("{values:?}: {probe}: {error}"));
        }
    }
}

const DOCKER: &[&str] = &["docker.enabled=true"];
