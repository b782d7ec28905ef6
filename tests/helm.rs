//! The Helm chart and the plain manifests, checked with the real `helm`, the API's own schemas and promtool; and the rendered pod's
//! container, run by a real engine with exactly the privileges that the chart grants it.
//!
//! The checks of files are Python in `tests/helm`. There is no cluster: none is available where the tests run.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use fake_nvml::{FakeNvml, Process, State};

use crate::deploy::Image;
use crate::prometheus::provided;
use crate::support::cgroups::root;
use crate::support::cri::{ContainerSpec, Containerd, PodSpec};
use crate::support::docker::{Container, Engine, unique};
use crate::support::processes::ProcessRef;
use crate::support::{Metrics, eventually, eventually_true};

/// Runs a script of `tests/helm`, which must succeed; returns its output.
fn script(name: &str, arguments: &[&str]) -> Option<String> {
    let python = provided("MEMLEDGER_TEST_PYTHON")?;
    provided("MEMLEDGER_TEST_HELM")?;
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/helm").join(name);
    let output = Command::new(python).arg("-B").arg(path).args(arguments).output().expect("Python starts");
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{name}: {text}");
    Some(text)
}

#[test]
fn every_case_of_the_chart_is_valid_and_has_least_privileges() {
    script("judge.py", &[]);
}

#[test]
fn invalid_values_are_rejected_with_their_names() {
    script("refusals.py", &[]);
}

#[test]
fn charts_rules_and_dashboards_equal_the_files_and_targets_have_the_node_name() {
    if provided("MEMLEDGER_TEST_PROMTOOL").is_some() {
        script("monitoring.py", &[]);
    }
}

#[test]
fn each_mutation_of_the_chart_is_detected() {
    if provided("MEMLEDGER_TEST_PROMTOOL").is_some() {
        script("faults.py", &[]);
    }
}

/// A container in a pod of a real containerd, monitored by all memledgers; a child of it is killed on request.
struct MonitoredContainer {
    namespace: String,
    id: String,
    pid: u32,
}

impl MonitoredContainer {
    fn start(containerd: &Containerd) -> Self {
        let namespace = unique("team");
        let pod = containerd.pod(&PodSpec {
            namespace: &namespace,
            name: "train-0",
            qos: "burstable/",
            ..PodSpec::default()
        });
        let command = ["/hog", "wait=/kill", "seq=1:eat", "hold"];
        let main =
            ContainerSpec { name: "main", command: &command, limit: 64 << 20, ..ContainerSpec::default() };
        let id = containerd.run(&pod, &main);
        let cgroup = root().join(&pod.cgroup).join(&id);
        let first = ProcessRef::first_of_container(&cgroup).expect("its first process");
        Self { namespace, id, pid: first.pid }
    }

    fn kill_child(&self) {
        std::fs::write(format!("/proc/{}/root/kill", self.pid), "").expect("a file in the container");
    }
}

/// memledger, run as the chart runs it with these values.
struct Pod {
    engine: Engine,
    container: Container,
}

impl Pod {
    fn start(image: &Image, flags: &[&str], values: &[&str]) -> Option<Self> {
        let output = script("container.py", &[&["settings={\"pss.interval\":\"1s\"}"], values].concat())?;
        let (chart_flags, arguments) = output.trim_end().split_once("\n--\n").expect("flags, and arguments");
        let flags: Vec<_> = chart_flags.lines().chain(flags.iter().copied()).collect();
        let arguments: Vec<_> = arguments.lines().collect();
        let engine = Engine { image: image.name.clone(), ..image.engine.clone() };
        let container = engine.run(&unique("pod"), &flags, &arguments);
        Some(Self { engine, container })
    }

    fn memledger(&self, words: &[&str]) -> Result<String, String> {
        self.engine.try_docker(&[&["exec", self.container.id.as_str(), "/memledger"], words].concat())
    }

    /// Sends a request as a kubelet or Prometheus does, but from inside the network namespace.
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

    fn metrics(&self) -> Metrics {
        Metrics::parse(&self.get("/metrics").unwrap_or_default())
    }

    /// Returns the kinds of data that it has about a container, under either of its names.
    fn reported(&self, monitored: &MonitoredContainer) -> BTreeSet<&'static str> {
        let metrics = self.metrics();
        let short = &monitored.id[..12];
        let named = [("k8s_namespace_name", monitored.namespace.as_str()), ("container_name", "main")];
        let any = |family: &str| {
            !metrics.all(family, &named).is_empty()
                || !metrics.all(family, &[("container_name", short)]).is_empty()
        };
        let families = [
            ("memory", "memledger_container_memory_usage_bytes"),
            ("processes", "memledger_container_processes"),
            ("shm", "memledger_container_shm_used_bytes"),
            ("pss", "memledger_container_process_pss_bytes"),
            ("gpu", "memledger_container_gpu_memory_used_bytes"),
        ];
        let mut reported = families.map(|(what, family)| any(family).then_some(what)).to_vec();
        reported.push((!metrics.all("memledger_container_info", &named).is_empty()).then_some("name"));
        let events = self.memledger(&["events", "--json", "--limit=0", "--since=10m"]).unwrap_or_default();
        let is_the_kill = |line: &str| line.contains(short) && line.contains("\"process\":");
        reported.push(events.lines().any(is_the_kill).then_some("kill"));
        reported.into_iter().flatten().collect()
    }
}

const ALL: &[&str] = &["memory", "name", "processes", "shm", "pss", "gpu", "kill"];

/// Values, the data that is lost with them, and a part of the output of `memledger doctor`.
const LOST: &[(&[&str], &[&str], &str)] = &[
    (&[], &[], "syslog(2) instead of /dev/kmsg"),
    (&["kmsg.enabled=true"], &[], "/dev/kmsg is readable"),
    (&["hostPID=false"], &["processes", "shm", "pss", "gpu"], "Helm chart: hostPID: true"),
    (&["capabilities.sysPtrace=false"], &["shm", "pss"], "Helm chart: capabilities.sysPtrace: true"),
    (&["capabilities.syslog=false"], &["kill"], "Helm chart: capabilities.syslog: true"),
    (&["runtime.enabled=false"], &["name"], "Helm chart: runtime.enabled: true"),
    (&["host.cgroup=false"], &["memory", "processes", "shm", "pss"], ", 0 containers"),
    // the container's own /proc already is the node's, and the ledger's location does not matter while it runs
    (
        &["host.proc=true", "docker.enabled=true", "state.hostPath=\"\""],
        &[],
        "host memory readable at /host/proc",
    ),
];

/// Starts a pod of the chart for each row; all monitor the same containers.
fn pods(containerd: &Containerd, monitored: &MonitoredContainer, folder: &Path) -> Option<Vec<Pod>> {
    let engine = Engine::shared()?;
    let image = Image::build(&engine);
    let mut gpus = State::with_gpus(1);
    gpus.gpus[0].memory.used = 8 << 30;
    gpus.gpus[0].processes = vec![Process::compute(monitored.pid, Some(6 << 30))];
    FakeNvml::install(folder, &gpus).expect("the fake library is installed");
    // the NVIDIA runtime mounts the driver's library there
    let driver = format!("--volume={}:/usr/lib64:ro", folder.display());
    let socket = format!("runtime.socket=\"{}\"", containerd.socket().display());
    let pod = |(index, (values, ..)): (usize, &(&[&str], _, _))| {
        let state = format!("state.hostPath=\"{}/state-{index}\"", folder.display());
        Pod::start(&image, &[&driver], &[&[socket.as_str(), &state], *values].concat())
    };
    LOST.iter().enumerate().map(pod).collect()
}

#[test]
fn each_missing_privilege_loses_exactly_the_documented_data() {
    let Some(containerd) = Containerd::start() else { return };
    let monitored = MonitoredContainer::start(&containerd);
    let folder = tempfile::Builder::new().prefix("mlt-chart-").tempdir().unwrap();
    let Some(pods) = pods(&containerd, &monitored, folder.path()) else { return };
    let kept =
        |lost: &[&str]| -> BTreeSet<_> { ALL.iter().copied().filter(|what| !lost.contains(what)).collect() };
    for (pod, (values, lost, _)) in pods.iter().zip(LOST) {
        let mut wanted = kept(lost);
        wanted.remove("kill");
        eventually(&format!("{values:?}"), || match pod.reported(&monitored) {
            found if found.is_superset(&wanted) => Ok(()),
            found => Err(format!("{found:?}")),
        });
    }
    monitored.kill_child();
    for (pod, (values, lost, line)) in pods.iter().zip(LOST) {
        let wanted = kept(lost);
        eventually(&format!("{values:?}, after the kill"), || match pod.reported(&monitored) {
            found if found == wanted => Ok(()),
            found => Err(format!("{found:?}, expected {wanted:?}")),
        });
        let report = pod.memledger(&["doctor"]).unwrap_or_else(|error| error);
        assert!(report.contains(line), "{values:?}: {report}");
        for probe in ["/-/healthy", "/-/ready"] {
            pod.get(probe).unwrap_or_else(|error| panic!("{values:?}: {probe}: {error}"));
        }
    }
}

#[test]
fn restarted_runtime_is_found_only_with_its_directory_mounted() {
    let Some(engine) = Engine::shared() else { return };
    let Some(mut containerd) = Containerd::start() else { return };
    let image = Image::build(&engine);
    let folder = tempfile::Builder::new().prefix("mlt-chart-").tempdir().unwrap();
    let socket = format!("runtime.socket=\"{}\"", containerd.socket().display());
    let start = |mount: &str| {
        let state = format!("state.hostPath=\"{}/{mount}\"", folder.path().display());
        Pod::start(&image, &[], &[&socket, &state, &format!("runtime.mount=\"{mount}\"")])
    };
    let (Some(socket), Some(directory)) = (start("Socket"), start("Directory")) else { return };
    let up = |pod: &Pod, value: f64| {
        pod.metrics().all("memledger_runtime_up", &[("runtime", "cri")]).iter().any(|(.., up)| *up == value)
    };
    eventually_true("both are connected", || up(&socket, 1.0) && up(&directory, 1.0));
    containerd.stop();
    eventually_true("both are disconnected", || up(&socket, 0.0) && up(&directory, 0.0));
    containerd.launch();
    eventually_true("the new socket is found in its directory", || up(&directory, 1.0));
    // waited for, because a scrape may fail on a busy machine
    eventually_true("the mounted socket is not the new one", || up(&socket, 0.0));
}
