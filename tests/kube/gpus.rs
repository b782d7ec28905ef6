//! GPUs that the kubelet allocates: by a device plugin and a driver of claims that only have names (`tests/kube/programs`), beside the kubelet's
//! own list. memledger's GPUs are those of the fake NVML, so it runs beside the one of the chart.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Stdio;

use fake_nvml::{FakeNvml, MigDevice, Process, State};
use serde_json::{Value, json};

use super::{assert_text, on_node};
use crate::prometheus::provided;
use crate::support::kube::{Namespace, Node};
use crate::support::metrics::Labels;
use crate::support::{Memledger, Metrics, OwnedChild, binary, eventually, holds_in_time};

const ALLOCATED: &str = "memledger_container_gpu_allocated";
const UNMATCHED: &str = "memledger_container_gpu_unmatched";
const CLAIMED: &str = "memledger_container_device_claimed";
/// The GPU in MIG mode.
const SPLIT: usize = 7;
const SLEEPS: &str = "[sleep, '3000']";
/// A pod that is created again gets another one of three GPUs in about two of three cases.
const MOST_MOVES: usize = 12;

/// Pod, container, and uuid of the GPU or MIG instance.
type Allocation = (String, String, String);

/// A memledger with eight GPUs in the node's file systems, and what gives devices to pods until this is dropped.
struct Gpus<'a> {
    node: &'a Node,
    fake: FakeNvml,
    state: State,
    socket: String,
    memledger: Memledger,
    plugins: Vec<OwnedChild>,
    folder: tempfile::TempDir,
}

fn uuid(gpu: usize) -> String {
    format!("GPU-0000000{gpu}-aaaa-4bbb-8ccc-dddddddddddd")
}

fn mig_uuid(instance: u32) -> String {
    format!("MIG-0000000{instance}-aaaa-4bbb-8ccc-dddddddddddd")
}

/// Returns the arguments that make a command see the node's file systems.
fn in_node(node: &Node) -> [String; 4] {
    let holder = std::fs::read_to_string(node.folder().join("pid/holder")).expect("the node's process");
    ["nsenter", "--mount", "--target", holder.trim()].map(str::to_owned)
}

impl<'a> Gpus<'a> {
    fn new(node: &'a Node) -> Self {
        let mut state = State::with_gpus(8);
        for (number, gpu) in state.gpus.iter_mut().enumerate() {
            gpu.uuid = uuid(number);
        }
        let instance = |gi| MigDevice { uuid: mig_uuid(gi), gi, ..MigDevice::default() };
        state.gpus[SPLIT].mig = Some(vec![instance(1), instance(2)]);
        let folder = tempfile::tempdir().expect("a folder");
        let fake = FakeNvml::install(folder.path(), &state).expect("the fake library");
        let socket = folder.path().join("socket").display().to_string();
        let mut flags = Self::flags(fake.path());
        flags.extend(["--gpu.interval=200ms".to_owned(), format!("--local.socket={socket}")]);
        let flags: Vec<_> = flags.iter().map(String::as_str).collect();
        let wrapper = in_node(node);
        let wrapper = wrapper.each_ref().map(String::as_str);
        let memledger = Memledger::start_through(&wrapper, &flags);
        Self { node, fake, state, socket, memledger, plugins: vec![], folder }
    }

    /// Returns what doctor needs, too.
    fn flags(library: &Path) -> Vec<String> {
        let runtimes =
            ["--cri.endpoint=/run/containerd/containerd.sock", "--docker.socket=", "--podman.socket="];
        let library = format!("--gpu.nvml-library={}", library.display());
        runtimes.map(str::to_owned).into_iter().chain([library]).collect()
    }

    /// Registers a resource, and waits until the node has its devices.
    fn serve(&mut self, resource: &str, ids: &[&str]) {
        let mut command = self.node.command(&[&["device-plugin", "serve", resource], ids].concat());
        self.plugins.push(OwnedChild(command.stdin(Stdio::null()).spawn().expect("node.sh starts")));
        eventually(&format!("devices of {resource}"), || {
            let node = self.node.get(&["node", "node1"])?;
            match node["status"]["allocatable"][resource].as_str() {
                Some(count) if count == ids.len().to_string() => Ok(()),
                _ => Err(node["status"]["allocatable"].to_string()),
            }
        });
    }

    /// Starts a driver of claims, and waits until the kubelet knows it: a pod that comes before is retried only after a minute.
    fn drive(&mut self, driver: &str, device: &str) {
        let output = self.folder.path().join(driver);
        let mut command = self.node.command(&["device-plugin", "claims", driver, device]);
        command.stdin(Stdio::null()).stdout(std::fs::File::create(&output).expect("a file"));
        self.plugins.push(OwnedChild(command.spawn().expect("node.sh starts")));
        eventually(driver, || match std::fs::read_to_string(&output).unwrap_or_default() {
            text if text.contains("registered") => Ok(()),
            text => Err(text),
        });
    }

    /// Returns what the kubelet lists.
    fn list(&self) -> Result<Vec<Value>, String> {
        let text = self.node.run(&["device-plugin", "list"]).text()?;
        serde_json::from_str(&text).map_err(|error| format!("{error}: {text}"))
    }

    /// Returns the GPUs in the kubelet's list, of the pods of a namespace.
    fn listed(&self, namespace: &Namespace) -> Result<BTreeSet<Allocation>, String> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let mut found = BTreeSet::new();
        for entry in self.list()? {
            let pod = text(&entry["pod"]);
            let Some(pod) = pod.strip_prefix(&format!("{}/", namespace.name)) else { continue };
            for device in entry["devices"].as_array().into_iter().flatten() {
                let id = text(device);
                let id = id.split_once(' ').map_or("", |(_, id)| id);
                let id = id.split("::").next().unwrap_or_default();
                found.insert((pod.to_owned(), text(&entry["container"]), id.to_owned()));
            }
        }
        Ok(found)
    }

    /// Returns the GPUs that memledger shows as allocated to the pods of a namespace.
    fn shown(&self, namespace: &Namespace) -> BTreeSet<Allocation> {
        let metrics = self.memledger.metrics();
        let series = metrics.all(ALLOCATED, &[("k8s_namespace_name", &namespace.name)]);
        let found = series.into_iter().map(|(_, labels, value)| {
            assert_eq!(*value, 1.0, "{labels:?}");
            let label = |name: &str| labels.get(name).cloned().unwrap_or_default();
            let device = match label("gpu_instance_id").parse() {
                Ok(instance) => mig_uuid(instance),
                Err(_) => label("gpu_uuid"),
            };
            (label("k8s_pod_name"), label("container_name"), device)
        });
        found.collect()
    }

    /// Waits until memledger shows what the kubelet lists, and that is `count` allocations.
    fn agree(&self, namespace: &Namespace, count: usize) -> BTreeSet<Allocation> {
        eventually("what the kubelet lists", || {
            let (listed, shown) = (self.listed(namespace)?, self.shown(namespace));
            if listed == shown && listed.len() == count {
                Ok(shown)
            } else {
                Err(format!("listed: {listed:?}; shown: {shown:?}"))
            }
        })
    }

    /// Makes the first process of a container hold memory of a GPU.
    fn hold(&mut self, gpu: usize, namespace: &Namespace, pod: &str, container: &str) {
        let pid = eventually("the process", || {
            let status = namespace.status(pod, container)?;
            let id = status["containerID"].as_str().unwrap_or_default().trim_start_matches("containerd://");
            let tasks = self.node.run(&["ctr", "-n", "k8s.io", "tasks", "ls"]).text()?;
            let of_container = tasks.lines().find(|line| !id.is_empty() && line.starts_with(id));
            let pid = of_container.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
            pid.ok_or_else(|| format!("{status} {tasks}"))
        });
        self.state.gpus[gpu].processes.push(Process::compute(pid, Some(1 << 30)));
        self.fake.set(&self.state).expect("the state of the GPUs");
    }

    /// Runs a command of memledger on the host.
    fn memledger(&self, words: &[&str]) -> String {
        let mut command = std::process::Command::new("nsenter");
        command.args(&in_node(self.node)[1..]).arg(binary()).args(words);
        let output = command.output().expect("memledger starts");
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        format!("{}{}", text(&output.stdout), text(&output.stderr))
    }

    fn ps(&self, words: &[&str]) -> String {
        let socket = format!("--local.socket={}", self.socket);
        self.memledger(&[&["ps", &socket], words].concat())
    }
}

/// Returns a container as YAML, with its limits.
fn container(name: &str, command: &str, limits: &str) -> String {
    format!(
        r#"{{name: {name}, image: "registry.example/box:1", command: {command}, resources: {{limits: {{{limits}}}}}}}"#
    )
}

/// Returns a pod as YAML. `more`: other fields of its specification.
fn pod(name: &str, more: &str, containers: &[String]) -> String {
    format!(
        "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  terminationGracePeriodSeconds: 1\n  \
         automountServiceAccountToken: false\n{more}  containers:\n  - {}\n",
        containers.join("\n  - ")
    )
}

/// Returns how often a container of a pod was started again.
fn restarts(namespace: &Namespace, pod: &str) -> Result<u64, String> {
    let status = namespace.status(pod, "main")?;
    status["restartCount"].as_u64().ok_or_else(|| status.to_string())
}

#[test]
fn gpu_is_allocated_as_the_kubelet_lists_it_also_while_nothing_runs() {
    on_node("gpus", |node, namespace| {
        let mut gpus = Gpus::new(node);
        let whole: Vec<_> = (0..5).map(uuid).collect();
        gpus.serve("nvidia.com/gpu", &whole.iter().map(String::as_str).collect::<Vec<_>>());
        let shared: Vec<_> = (0..4).map(|share| format!("{}::{share}", uuid(5))).collect();
        gpus.serve("nvidia.com/gpu.shared", &shared.iter().map(String::as_str).collect::<Vec<_>>());
        gpus.serve("nvidia.com/mig-1g.10gb", &[&mig_uuid(1), &mig_uuid(2)]);
        let (gpu, share, slice) =
            ("nvidia.com/gpu: 1", "nvidia.com/gpu.shared: 1", "nvidia.com/mig-1g.10gb: 1");
        let never = "  restartPolicy: Never\n";
        let prepares = format!("{never}  initContainers:\n  - {}\n", container("prepare", SLEEPS, gpu));
        let proxy = container("proxy", SLEEPS, slice).replace("{name", "{restartPolicy: Always, name");
        let missing = container("main", SLEEPS, gpu).replace("box:1\"", "none:1\", imagePullPolicy: Never");
        namespace.apply_text(
            &[
                pod("half", never, &[container("trainer", "['true']", gpu), container("log", SLEEPS, "")]),
                pod("crash", "", &[container("main", "['false']", share)]),
                pod("pull", "", &[missing]),
                pod("init", &prepares, &[container("main", SLEEPS, gpu)]),
                pod("two", "", &[container("main", SLEEPS, "nvidia.com/gpu: 2")]),
                pod("shares", "", &[container("main", SLEEPS, "nvidia.com/gpu.shared: 2")]),
                pod("done", never, &[container("main", "['true']", share)]),
                pod("slice", "", &[container("main", SLEEPS, slice)]),
                pod("side", &format!("  initContainers:\n  - {proxy}\n"), &[container("main", SLEEPS, "")]),
            ]
            .concat(),
        );
        for running in ["two", "shares", "slice", "side"] {
            namespace.runs(running);
        }
        eventually("the end of the trainer", || {
            let status = namespace.status("half", "trainer")?;
            if status["state"]["terminated"].is_object() { Ok(()) } else { Err(status.to_string()) }
        });
        eventually("the wait for the image", || {
            let status = namespace.status("pull", "main")?;
            if status["state"]["waiting"]["reason"] == "ErrImageNeverPull" {
                Ok(())
            } else {
                Err(status.to_string())
            }
        });
        let shown = gpus.agree(namespace, 9);
        let holders: Vec<_> = shown.iter().map(|(pod, container, _)| format!("{pod}/{container}")).collect();
        let wanted = [
            "crash/main",
            "half/trainer",
            "init/main",
            "pull/main",
            "shares/main",
            "side/proxy",
            "slice/main",
            "two/main",
            "two/main",
        ];
        assert_eq!(holders, wanted);

        // through the crash loop, without a gap
        let crash = shown.iter().find(|(pod, ..)| pod == "crash").cloned().expect("checked");
        let before = restarts(namespace, "crash").expect("it was started");
        eventually("another restart", || {
            assert!(gpus.shown(namespace).contains(&crash), "its GPU looks free");
            let now = restarts(namespace, "crash")?;
            if now > before { Ok(()) } else { Err(format!("{now}")) }
        });

        let text = gpus.ps(&[]);
        assert!(text.contains("ALLOCATED TO"), "{text}");
        for (pod, container) in [("half", "trainer"), ("pull", "main"), ("init", "main")] {
            let line = format!("*{}/{pod}/{container}", namespace.name);
            assert!(text.contains(&line), "no {line} in: {text}");
        }
        let two = format!("{}/two/main", namespace.name);
        assert!(text.contains(&two) && !text.contains(&format!("*{two}")), "{text}");
        let lines = gpus.ps(&["--json"]);
        let allocated = lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let allocated =
            allocated.flat_map(|line| line["allocated_to"].as_array().cloned().unwrap_or_default());
        let half = json!({"container": format!("{}/half/trainer", namespace.name), "running": false});
        assert!(allocated.into_iter().any(|of| of == half), "{lines}");
    });
}

#[test]
fn gpu_of_a_pod_goes_with_it_and_stays_without_its_plugin() {
    on_node("gpu-lives", |node, namespace| {
        let mut gpus = Gpus::new(node);
        gpus.serve("nvidia.com/lives", &[&uuid(0), &uuid(1)]);
        let limits = "nvidia.com/lives: 1";
        let stubborn = r#"[sh, -c, "trap '' TERM; while :; do sleep 1; done"]"#;
        let slow =
            pod("slow", "", &[container("main", stubborn, limits)]).replace("Seconds: 1\n", "Seconds: 8\n");
        namespace.apply_text(&slow);
        namespace.runs("slow");
        let shown = gpus.agree(namespace, 1);

        // its plugin ends, and another process of it comes
        gpus.plugins.clear();
        eventually("a node without these devices", || {
            let node = gpus.node.get(&["node", "node1"])?;
            let count = node["status"]["allocatable"]["nvidia.com/lives"].as_str().unwrap_or("0").to_owned();
            if count == "0" { Ok(()) } else { Err(count) }
        });
        assert_eq!(gpus.agree(namespace, 1), shown);
        gpus.serve("nvidia.com/lives", &[&uuid(0), &uuid(1)]);
        assert_eq!(gpus.agree(namespace, 1), shown);

        // it is deleted, and ignores it for its time of grace
        namespace.kubectl(&["delete", "pod", "slow", "--wait=false"]);
        eventually("the end of the grace", || {
            let listed_before = gpus.listed(namespace)?;
            let is_shown = gpus.shown(namespace) == shown;
            assert!(is_shown || gpus.listed(namespace)? != listed_before || listed_before.is_empty());
            if gpus.list()?.iter().any(|entry| entry["pod"] == format!("{}/slow", namespace.name)) {
                return Err("the kubelet lists it".to_owned());
            }
            Ok(())
        });
        gpus.agree(namespace, 0);
    });
}

#[test]
fn pod_created_again_shows_no_gpu_of_its_predecessor() {
    on_node("gpu-again", |node, namespace| {
        let mut gpus = Gpus::new(node);
        gpus.serve("nvidia.com/again", &[&uuid(0), &uuid(1), &uuid(2)]);
        let text = pod("train-0", "", &[container("main", SLEEPS, "nvidia.com/again: 1")]);
        namespace.apply_text(&text);
        namespace.runs("train-0");
        gpus.agree(namespace, 1);
        let mut moves = 0;
        for _ in 0..MOST_MOVES {
            let id = namespace.status("train-0", "main").expect("it runs")["containerID"].clone();
            let before = gpus.listed(namespace).expect("the list");
            namespace.kubectl(&["delete", "pod", "train-0"]);
            namespace.apply_text(&text);
            eventually("the new container", || {
                let status = namespace.status("train-0", "main")?;
                if status["containerID"] == id || !status["state"]["running"].is_object() {
                    return Err(status.to_string());
                }
                let new =
                    status["containerID"].as_str().unwrap_or_default().trim_start_matches("containerd://");
                let metrics = gpus.memledger.metrics();
                let known = metrics.all("memledger_container_info", &[("container_id", new)]);
                if known.is_empty() { Err("memledger has not listed it".to_owned()) } else { Ok(()) }
            });
            // the kubelet names no uid: what it lists once the new container runs is that one's
            let (shown, listed) = (gpus.shown(namespace), gpus.listed(namespace).expect("the list"));
            assert!(shown.is_subset(&listed), "shown: {shown:?}; listed: {listed:?}; before: {before:?}");
            gpus.agree(namespace, 1);
            moves += usize::from(listed != before);
            if moves == 2 {
                return;
            }
        }
        panic!("{moves} of {MOST_MOVES} pods got another GPU: nothing was tested");
    });
}

/// Starts a Prometheus with the rules, which scrapes this memledger.
fn start_prometheus(gpus: &Gpus, binary: &str) -> (OwnedChild, String) {
    let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
    let address = free.expect("a free port").to_string();
    let rules = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/prometheus/rules/*.yml");
    let text = format!(
        "global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}\nrule_files: ['{rules}']\nscrape_configs:\n\
         - {{job_name: memledger, static_configs: [{{targets: ['{}'], labels: {{instance: node1}}}}]}}\n",
        gpus.memledger.address
    );
    let file = |name: &str| gpus.folder.path().join(name);
    std::fs::write(file("prometheus.yml"), text).expect("a configuration");
    let mut command = std::process::Command::new(binary);
    command
        .arg(format!("--config.file={}", file("prometheus.yml").display()))
        .arg(format!("--storage.tsdb.path={}", file("data").display()))
        .arg(format!("--web.listen-address={address}"));
    let log = std::fs::File::create(file("log")).expect("a log");
    (OwnedChild(command.stdout(Stdio::null()).stderr(log).spawn().expect("prometheus starts")), address)
}

/// Returns the states of the GPUs for the containers of a namespace: pod, container and state.
fn states(address: &str, namespace: &Namespace) -> Result<Vec<(String, String, String)>, String> {
    let query = format!(
        "query=container_gpu:memledger_container_gpu_allocated:state{{k8s_namespace_name=\"{}\"}}",
        namespace.name
    );
    let url = format!("http://{address}/api/v1/query");
    let mut command = std::process::Command::new("curl");
    command.args(["--silent", "--show-error", "--fail", "--data-urlencode", &query, &url]);
    let output = command.output().map_err(|error| error.to_string())?;
    let response: Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| format!("{error}: {}", String::from_utf8_lossy(&output.stderr)))?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let found = response["data"]["result"].as_array().into_iter().flatten().map(|series| {
        let metric = &series["metric"];
        (text(&metric["k8s_pod_name"]), text(&metric["container_name"]), text(&series["value"][1]))
    });
    let mut found: Vec<_> = found.collect();
    found.sort();
    Ok(found)
}

const CLAIMS: &str = r#"
---
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: DRIVER}
spec: {selectors: [{cel: {expression: "device.driver == 'DRIVER'"}}]}
---
apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {name: DRIVER}
spec: {nodeName: node1, driver: DRIVER, pool: {name: node1, generation: 1, resourceSliceCount: 1}, devices: [{name: DEVICE}]}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: CLAIM}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: DRIVER}}]}}}
"#;

/// Creates a pod with a claim and waits until it runs. The kubelet may not be connected yet to a driver that it has registered, and retries such a
/// pod after more than a minute only: then another one is created.
fn starts(namespace: &Namespace, name: &str, text: &str) {
    namespace.apply_text(text);
    let is_running = || {
        let status = namespace.status(name, "main").ok();
        status.is_some_and(|status| status["state"]["running"].is_object())
    };
    if !holds_in_time(is_running) {
        namespace.kubectl(&["delete", "pod", name]);
        namespace.apply_text(text);
    }
    namespace.runs(name);
}

/// Objects of the cluster, not of a namespace. Deleted when dropped.
struct ClusterObjects<'a>(&'a Node, Vec<String>);

impl Drop for ClusterObjects<'_> {
    fn drop(&mut self) {
        for name in &self.1 {
            let _ = self.0.try_kubectl(&["delete", "deviceclass,resourceslice", name, "--wait=false"]);
        }
    }
}

#[test]
fn gpu_of_a_pod_is_no_other_ones_and_names_that_are_no_gpu_are_shown() {
    let Some(prometheus) = provided("MEMLEDGER_TEST_PROMETHEUS") else { return };
    on_node("gpu-names", |node, namespace| {
        let mut gpus = Gpus::new(node);
        let hami = format!("{}-1", uuid(1));
        gpus.serve("nvidia.com/names", &[&uuid(0)]);
        gpus.serve("nvidia.com/gpu.hami", &[&hami]);
        gpus.serve("nvidia.com/vfio", &["5"]);
        gpus.serve("nvidia.com/hostdev", &["0000:03:00.1"]);
        // one driver whose names say nothing, and one whose names have the uuid
        let mut cluster = ClusterObjects(node, vec![]);
        let by_uuid = uuid(4).to_lowercase();
        for (driver, device) in [("gpu.names.test", "gpu-5"), ("uuid.names.test", by_uuid.as_str())] {
            gpus.drive(driver, device);
            cluster.1.push(driver.to_owned());
            let claim = driver.split('.').next().expect("a name");
            let objects = CLAIMS.replace("DRIVER", driver).replace("DEVICE", device).replace("CLAIM", claim);
            namespace.apply_text(&objects);
        }
        let claims = |name: &str| {
            let of_pod = format!("  resourceClaims: [{{name: gpu, resourceClaimTemplateName: {name}}}]\n");
            let main = container("main", SLEEPS, "").replace("limits: {}", "claims: [{name: gpu}]");
            pod(name, &of_pod, &[main])
        };
        let limits = "nvidia.com/names: 1";
        let prepares = format!(
            "  restartPolicy: Never\n  initContainers:\n  - {}\n",
            container("prepare", SLEEPS, limits)
        );
        namespace.apply_text(
            &[
                pod("init", &prepares, &[container("main", SLEEPS, limits)]),
                pod("hami", "", &[container("main", SLEEPS, "nvidia.com/gpu.hami: 1")]),
                pod("vfio", "", &[container("main", SLEEPS, "nvidia.com/vfio: 1, nvidia.com/hostdev: 1")]),
                pod("thief", "", &[container("main", SLEEPS, "")]),
            ]
            .concat(),
        );
        for name in ["gpu", "uuid"] {
            starts(namespace, name, &claims(name));
        }
        for name in ["hami", "vfio", "thief"] {
            namespace.runs(name);
        }
        // each uses what it was given, and the last one what it was not
        gpus.hold(0, namespace, "init", "prepare");
        let holders = [(1, "hami"), (2, "vfio"), (4, "uuid"), (5, "gpu"), (3, "thief")];
        for (gpu, pod) in holders {
            gpus.hold(gpu, namespace, pod, "main");
        }
        gpus.memledger.eventually("the devices", |metrics: &Metrics| {
            let pairs = |family: &str, label: &str| {
                let series = metrics.all(family, &[("k8s_namespace_name", &namespace.name)]);
                let pair = |labels: &Labels| {
                    ["k8s_pod_name", label].map(|name| labels.get(name).cloned().unwrap_or_default())
                };
                series.into_iter().map(|(_, labels, _)| pair(labels)).collect::<BTreeSet<_>>()
            };
            let set = |pairs: &[[&str; 2]]| {
                pairs.iter().map(|pair| pair.map(str::to_owned)).collect::<BTreeSet<_>>()
            };
            let found = [pairs(ALLOCATED, "gpu_uuid"), pairs(UNMATCHED, "device"), pairs(CLAIMED, "device")];
            let wanted = [
                set(&[["init", &uuid(0)], ["uuid", &uuid(4)]]),
                set(&[["hami", &hami], ["vfio", "5"]]),
                set(&[["gpu", "gpu-5"], ["uuid", &by_uuid]]),
            ];
            if found == wanted { Ok(()) } else { Err(format!("{found:?}")) }
        });
        let (_prometheus, address) = start_prometheus(&gpus, &prometheus);
        let wanted = [("init", "main", "0"), ("thief", "main", "2"), ("uuid", "main", "0")];
        let wanted =
            wanted.map(|(pod, container, state)| (pod.to_owned(), container.to_owned(), state.to_owned()));
        eventually("the states", || match states(&address, namespace)? {
            found if found == wanted => Ok(()),
            found => Err(format!("{found:?}")),
        });

        let log = gpus.memledger.log();
        assert_eq!(
            log.matches("none of the GPUs that the driver reports").count(),
            2,
            "one for each resource: {log}"
        );
        let text = gpus.ps(&[]);
        for line in [
            format!("{}/hami/main: nvidia.com/gpu.hami {hami}", namespace.name),
            format!("{}/vfio/main: nvidia.com/vfio 5", namespace.name),
            format!("{}/gpu/main: gpu.names.test node1/gpu-5", namespace.name),
        ] {
            assert!(text.contains(&line), "no {line} in: {text}");
        }
        let flags = Gpus::flags(gpus.fake.path());
        let words: Vec<_> = std::iter::once("doctor").chain(flags.iter().map(String::as_str)).collect();
        let doctor = gpus.memledger(&words).split_whitespace().collect::<Vec<_>>().join(" ");
        let parts = [
            "ok pod resources",
            "2 of them under names that are none of the GPUs here",
            "have resource claims",
        ];
        assert_text("doctor", &doctor, &parts, &[]);
        // without its driver a pod does not end
        namespace.kubectl(&["delete", "pod", "--all"]);
    });
}

/// The API server does not respond, until this is dropped.
struct ApiServerStopped(String);

impl ApiServerStopped {
    fn new(node: &Node) -> Self {
        let pid = std::fs::read_to_string(node.folder().join("pid/kube-apiserver")).expect("its pid");
        let this = Self(pid.trim().to_owned());
        this.signal("STOP");
        this
    }

    fn signal(&self, name: &str) {
        let status = std::process::Command::new("kill").args([&format!("-{name}"), &self.0]).status();
        assert!(status.expect("kill runs").success());
    }
}

impl Drop for ApiServerStopped {
    fn drop(&mut self) {
        self.signal("CONT");
    }
}

/// The other tests of the node may run beside these, but not beside a kubelet that is restarted: see [`super::alone`].
pub(super) fn restart_of_the_kubelet_loses_no_allocation(node: &Node, namespace: &Namespace) {
    let mut gpus = Gpus::new(node);
    gpus.serve("nvidia.com/restart", &[&uuid(0), &uuid(1)]);
    let limits = "nvidia.com/restart: 1";
    namespace.apply_text(
        &[
            pod("train", "", &[container("main", SLEEPS, limits)]),
            pod("crash", "", &[container("main", "['false']", limits)]),
        ]
        .concat(),
    );
    namespace.runs("train");
    let shown = gpus.agree(namespace, 2);
    let keeps = |until: &str, done: &dyn Fn() -> Result<(), String>| {
        eventually(until, || {
            assert_eq!(gpus.shown(namespace), shown);
            done()
        });
    };
    let lists_pods = || match gpus.listed(namespace)? {
        listed if listed == shown => Ok(()),
        listed => Err(format!("{listed:?}")),
    };
    node.stop("kubelet");
    node.start("kubelet", &[]);
    keeps("the kubelet's list", &lists_pods);

    let stopped = ApiServerStopped::new(node);
    node.stop("kubelet");
    node.start("kubelet", &[]);
    // it responds, and knows nothing
    keeps("a list without pods", &|| match gpus.listed(namespace)? {
        listed if listed.is_empty() => Ok(()),
        listed => Err(format!("{listed:?}")),
    });
    let began = gpus.memledger.metrics().value("memledger_snapshot_timestamp_seconds", &[]);
    keeps("three more responses", &|| {
        let now = gpus.memledger.metrics().value("memledger_snapshot_timestamp_seconds", &[]);
        if now - began > 15.0 { Ok(()) } else { Err(format!("{} s", now - began)) }
    });
    drop(stopped);
    keeps("the kubelet's list again", &lists_pods);
}
