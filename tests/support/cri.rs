//! A real containerd with its CRI plugin for one test, and pods in it, created as a kubelet does: there is no kubelet here.
//!
//! The messages are those that create pods and containers, with CRI's field numbers; memledger itself has none of them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use prost::Message;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

use super::docker::unique;
use super::{eventually, skip};

/// The images that `tests/setup/setup.sh containerd` builds: one whose first process sleeps, and the one of all tests.
const PAUSE: &str = "docker.io/library/memledger-pause:1";
const IMAGE: &str = "docker.io/library/memledger-test:1";

#[derive(Clone, PartialEq, Message)]
pub struct PodSandboxConfig {
    #[prost(message, optional, tag = "1")]
    pub metadata: Option<PodMetadata>,
    #[prost(string, tag = "3")]
    pub log_directory: String,
    #[prost(map = "string, string", tag = "6")]
    pub labels: HashMap<String, String>,
    #[prost(map = "string, string", tag = "7")]
    pub annotations: HashMap<String, String>,
    #[prost(message, optional, tag = "8")]
    pub linux: Option<LinuxPod>,
}

#[derive(Clone, PartialEq, Message)]
pub struct PodMetadata {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub uid: String,
    #[prost(string, tag = "3")]
    pub namespace: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct LinuxPod {
    #[prost(string, tag = "1")]
    pub cgroup_parent: String,
    #[prost(message, optional, tag = "2")]
    pub security: Option<PodSecurity>,
}

#[derive(Clone, PartialEq, Message)]
pub struct PodSecurity {
    #[prost(message, optional, tag = "1")]
    pub namespaces: Option<Namespaces>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Namespaces {
    /// 2: the node's.
    #[prost(int32, tag = "1")]
    pub network: i32,
    /// 1: the container's own.
    #[prost(int32, tag = "2")]
    pub pid: i32,
}

#[derive(Clone, PartialEq, Message)]
struct RunPodSandbox {
    #[prost(message, optional, tag = "1")]
    config: Option<PodSandboxConfig>,
}

/// A message whose first field is an id: some requests, and some responses.
#[derive(Clone, PartialEq, Message)]
struct Id {
    #[prost(string, tag = "1")]
    id: String,
}

#[derive(Clone, PartialEq, Message)]
struct StopContainer {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(int64, tag = "2")]
    timeout: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Empty {}

#[derive(Clone, PartialEq, Message)]
struct CreateContainer {
    #[prost(string, tag = "1")]
    pod_sandbox_id: String,
    #[prost(message, optional, tag = "2")]
    config: Option<ContainerConfig>,
    #[prost(message, optional, tag = "3")]
    sandbox_config: Option<PodSandboxConfig>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerConfig {
    #[prost(message, optional, tag = "1")]
    metadata: Option<ContainerMetadata>,
    #[prost(message, optional, tag = "2")]
    image: Option<Id>,
    #[prost(string, repeated, tag = "3")]
    command: Vec<String>,
    #[prost(message, repeated, tag = "6")]
    envs: Vec<Pair>,
    #[prost(message, repeated, tag = "7")]
    mounts: Vec<Mount>,
    #[prost(map = "string, string", tag = "9")]
    labels: HashMap<String, String>,
    #[prost(string, tag = "11")]
    log_path: String,
    #[prost(message, optional, tag = "15")]
    linux: Option<LinuxContainer>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerMetadata {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(uint32, tag = "2")]
    attempt: u32,
}

#[derive(Clone, PartialEq, Message)]
struct Pair {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(string, tag = "2")]
    value: String,
}

#[derive(Clone, PartialEq, Message)]
struct Mount {
    #[prost(string, tag = "1")]
    container_path: String,
    #[prost(string, tag = "2")]
    host_path: String,
    #[prost(bool, tag = "3")]
    readonly: bool,
}

#[derive(Clone, PartialEq, Message)]
struct LinuxContainer {
    #[prost(message, optional, tag = "1")]
    resources: Option<Resources>,
}

#[derive(Clone, PartialEq, Message)]
struct Resources {
    #[prost(int64, tag = "4")]
    memory_limit: i64,
    #[prost(int64, tag = "5")]
    oom_score_adj: i64,
}

/// A containerd for one test. It is stopped when dropped, after its pods are removed.
pub struct Containerd {
    folder: tempfile::TempDir,
    tokio: tokio::runtime::Runtime,
    child: Option<Child>,
    /// Parent of its pods' cgroups, relative to the root of a hierarchy.
    pub cgroup: String,
}

/// A pod to create.
#[derive(Clone, Default)]
pub struct PodSpec<'a> {
    pub namespace: &'a str,
    pub name: &'a str,
    /// `burstable/`, `besteffort/`, or nothing for guaranteed.
    pub qos: &'a str,
    pub labels: &'a [(&'a str, &'a str)],
    pub annotations: &'a [(&'a str, &'a str)],
}

/// A running pod.
pub struct Pod {
    pub uid: String,
    pub sandbox: String,
    /// Its cgroup, relative to the root of a hierarchy.
    pub cgroup: String,
    config: PodSandboxConfig,
}

/// A container to create.
#[derive(Clone, Default)]
pub struct ContainerSpec<'a> {
    pub name: &'a str,
    pub attempt: u32,
    pub command: &'a [&'a str],
    pub env: &'a [(&'a str, &'a str)],
    /// In bytes; 0 is none.
    pub limit: i64,
}

impl Containerd {
    /// Starts containerd; returns `None`, with the reason printed, if it is not available.
    pub fn start() -> Option<Self> {
        let Some(cache) = std::env::var_os("MEMLEDGER_TEST_CRI_IMAGES").map(PathBuf::from) else {
            skip("no images for containerd: run tests/setup/setup.sh containerd env");
            return None;
        };
        let folder = tempfile::Builder::new().prefix("mlt-cri-").tempdir().expect("a folder");
        let tokio = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let own = unique("kubepods").replace("-kubepods", "/kubepods");
        let cgroup = format!("{}/{own}", super::cgroups::parent());
        let mut this = Self { folder, tokio: tokio.expect("a runtime"), child: None, cgroup };
        std::fs::write(this.path("config.toml"), this.configuration()).expect("a file");
        this.launch();
        let socket = this.socket();
        let images = Command::new("ctr")
            .arg(format!("--address={}", socket.display()))
            .args(["-n", "k8s.io", "images", "import"])
            .arg(&cache)
            .output()
            .expect("ctr runs");
        assert!(images.status.success(), "{}", String::from_utf8_lossy(&images.stderr));
        Some(this)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn socket(&self) -> PathBuf {
        self.path("c.sock")
    }

    /// Returns its pid; panics if it does not run.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("it runs").id()
    }

    /// Returns memledger's flag for its socket.
    pub fn flag(&self) -> String {
        format!("--cri.endpoint={}", self.socket().display())
    }

    fn configuration(&self) -> String {
        let folder = self.folder.path().display();
        format!(
            r#"version = 2
root = "{folder}/root"
state = "{folder}/state"
[grpc]
  address = "{folder}/c.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{folder}/cni"
    conf_dir = "{folder}/cni"
[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/opt"
"#
        )
    }

    /// Starts or restarts it, and waits until it responds.
    pub fn launch(&mut self) {
        self.spawn();
        eventually("containerd responds", || self.check_response());
    }

    fn check_response(&self) -> Result<Empty, String> {
        self.try_call::<Empty, Empty>("Version", Empty {}).map_err(|error| {
            let log = std::fs::read_to_string(self.path("log")).unwrap_or_default();
            let end: Vec<_> = log.lines().rev().take(3).collect();
            format!("{error}; {end:?}")
        })
    }

    fn spawn(&mut self) {
        let log = std::fs::File::options().create(true).append(true).open(self.path("log")).expect("a log");
        let child = Command::new("containerd")
            .arg(format!("--config={}", self.path("config.toml").display()))
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a log"))
            .stderr(log)
            .spawn()
            .expect("containerd starts");
        self.child = Some(child);
    }

    /// Stops it as a service manager does, with SIGTERM; its containers continue.
    pub fn stop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        assert!(super::terminate(&mut child), "containerd does not end on SIGTERM");
    }

    fn try_call<Q: Message + 'static, A: Message + Default + 'static>(
        &self,
        method: &str,
        request: Q,
    ) -> Result<A, String> {
        call(&self.tokio, &self.socket(), method, request)
    }

    fn call<Q: Message + 'static, A: Message + Default + 'static>(&self, method: &str, request: Q) -> A {
        self.try_call(method, request).unwrap_or_else(|error| panic!("{method}: {error}"))
    }

    /// Creates a pod as a kubelet does, with its cgroup first.
    pub fn pod(&self, wanted: &PodSpec) -> Pod {
        let id = super::cgroups::new_id();
        let uid = format!("{}-{}-4000-8000-{}", &id[..8], &id[8..12], &id[52..]);
        let cgroup = format!("{}/{}pod{uid}", self.cgroup, wanted.qos);
        let pairs = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect::<HashMap<_, _>>()
        };
        let mut labels = pairs(wanted.labels);
        labels.extend(pairs(&[
            ("io.kubernetes.pod.name", wanted.name),
            ("io.kubernetes.pod.namespace", wanted.namespace),
            ("io.kubernetes.pod.uid", &uid),
        ]));
        let config = PodSandboxConfig {
            metadata: Some(PodMetadata {
                name: wanted.name.into(),
                uid: uid.clone(),
                namespace: wanted.namespace.into(),
            }),
            log_directory: format!("{}/{}_{}_{uid}", self.logs(), wanted.namespace, wanted.name),
            labels,
            annotations: pairs(wanted.annotations),
            linux: Some(LinuxPod {
                cgroup_parent: format!("/{cgroup}"),
                security: Some(PodSecurity { namespaces: Some(Namespaces { network: 2, pid: 1 }) }),
            }),
        };
        let memory = super::cgroups::root().join(&cgroup);
        std::fs::create_dir_all(&memory).expect("the pod's cgroup");
        let sandbox: Id = self.call("RunPodSandbox", RunPodSandbox { config: Some(config.clone()) });
        Pod { uid, sandbox: sandbox.id, cgroup, config }
    }

    /// Returns the directory of the logs of pods, as /var/log/pods.
    pub fn logs(&self) -> String {
        self.path("logs").display().to_string()
    }

    /// Renames the log of a container and makes the runtime begin another one, as a kubelet does with a large one.
    pub fn rotate_log(&self, pod: &Pod, spec: &ContainerSpec, id: &str) {
        let path = format!("{}/{}/{}.log", pod.config.log_directory, spec.name, spec.attempt);
        std::fs::rename(&path, format!("{path}.20260101-000000")).expect("a log");
        let _: Empty = self.call("ReopenContainerLog", Id { id: id.to_owned() });
    }

    /// Creates and starts a container in a pod. Returns its id.
    pub fn run(&self, pod: &Pod, spec: &ContainerSpec) -> String {
        let folder = format!("{}/{}", pod.config.log_directory, spec.name);
        std::fs::create_dir_all(folder).expect("the folder of its log");
        let mut labels = pod.config.labels.clone();
        labels.insert("io.kubernetes.container.name".into(), spec.name.into());
        let env = spec.env.iter().map(|(key, value)| Pair { key: key.to_string(), value: value.to_string() });
        let mount =
            |path: &str| Mount { container_path: path.into(), host_path: path.into(), readonly: true };
        let mut mounts = vec![];
        if let Some(hog) = std::env::var_os("MEMLEDGER_TEST_HOG") {
            let hog = hog.to_string_lossy().into_owned();
            mounts.push(Mount { container_path: "/hog".into(), ..mount(&hog) });
        }
        let config = ContainerConfig {
            metadata: Some(ContainerMetadata { name: spec.name.into(), attempt: spec.attempt }),
            image: Some(Id { id: IMAGE.into() }),
            command: spec.command.iter().map(|word| word.to_string()).collect(),
            envs: env.collect(),
            mounts,
            labels,
            log_path: format!("{}/{}.log", spec.name, spec.attempt),
            linux: Some(LinuxContainer {
                resources: Some(Resources { memory_limit: spec.limit, oom_score_adj: 900 }),
            }),
        };
        let request = CreateContainer {
            pod_sandbox_id: pod.sandbox.clone(),
            config: Some(config),
            sandbox_config: Some(pod.config.clone()),
        };
        let id: Id = self.call("CreateContainer", request);
        let _: Empty = self.call("StartContainer", id.clone());
        id.id
    }

    /// Stops a container, as a kubelet does with a grace period in seconds.
    pub fn stop_container(&self, id: &str, timeout: i64) {
        let _: Empty = self.call("StopContainer", StopContainer { id: id.to_owned(), timeout });
    }

    pub fn remove_container(&self, id: &str) {
        let _: Empty = self.call("RemoveContainer", Id { id: id.to_owned() });
    }

    /// Stops and removes a pod with its containers.
    pub fn remove(&self, sandbox: &str) {
        let _: Empty = self.call("StopPodSandbox", Id { id: sandbox.to_owned() });
        let _: Empty = self.call("RemovePodSandbox", Id { id: sandbox.to_owned() });
    }
}

fn call<Q: Message + 'static, A: Message + Default + 'static>(
    tokio: &tokio::runtime::Runtime,
    socket: &Path,
    method: &str,
    request: Q,
) -> Result<A, String> {
    let text = |error: &dyn std::error::Error| format!("{error} {:?}", error.source());
    tokio.block_on(async {
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).map_err(|e| text(&e))?;
        let channel: Channel = endpoint.connect().await.map_err(|error| text(&error))?;
        let mut grpc = Grpc::new(channel);
        grpc.ready().await.map_err(|error| text(&error))?;
        let path = PathAndQuery::try_from(format!("/runtime.v1.RuntimeService/{method}")).expect("a path");
        let response = grpc.unary(tonic::Request::new(request), path, ProstCodec::default()).await;
        response.map(tonic::Response::into_inner).map_err(|status| format!("{}", status))
    })
}

impl Drop for Containerd {
    fn drop(&mut self) {
        if self.child.is_none() {
            self.spawn(); // only containerd can remove its pods
            super::holds_in_time(|| self.check_response().is_ok());
        }
        let client = self.tokio.block_on(memledger::discover::cri::CriClient::connect(&self.socket()));
        let pods = client.ok().and_then(|client| self.tokio.block_on(client.sandboxes()).ok());
        for pod in pods.unwrap_or_default() {
            let id = Id { id: pod.id };
            let _ = self.try_call::<_, Empty>("StopPodSandbox", id.clone());
            let _ = self.try_call::<_, Empty>("RemovePodSandbox", id);
        }
        if let Some(child) = &mut self.child {
            super::terminate(child);
        }
        let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
        for point in mounts.lines().rev().filter_map(|line| line.split(' ').nth(1)) {
            if Path::new(point).starts_with(self.folder.path()) {
                let _ = Command::new("umount").arg(point).status();
            }
        }
        let top = self.cgroup.rsplit_once('/').map_or("", |(top, _)| top);
        super::cgroups::remove_tree_everywhere(top);
    }
}
