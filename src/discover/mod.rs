//! Discovers the running containers, their names and labels, and their cgroups.
//!
//! Two kinds of sources are merged by container id: the runtimes' APIs, and the records of `memledger run`, have names, labels and
//! settings ([`cri`], [`docker`], [`run`]);
//! the cgroup tree shows what runs, even without a runtime ([`cgroup_tree`]). [`registry`] merges them.

mod cgroup_choice;
mod cgroup_owners;
pub mod cgroup_tree;
pub mod cri;
pub mod device_allocations;
pub mod docker;
pub mod history;
mod path_owner;
mod reconcile;
pub mod registry;
pub mod run;
mod runtime_state;
mod spec;
mod status_queries;

use std::collections::HashSet;
use std::convert::Infallible;
use std::fmt::{Display, Formatter};
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::config::Filter;
use crate::host::process::{ProcessFacts, ProcessId};
use crate::parse::kubernetes::{Qos, qos};

pub use crate::parse::container_id::RuntimeKind;
pub use cgroup_owners::CgroupOwners;
pub use cgroup_tree::{Hierarchy, Version};
use device_allocations::AllocatedContainer;
pub use path_owner::{CgroupMaker, PathClaim, PathOwner, owner_of_paths};
pub use registry::{InventoryUpdate, Registry};
pub use runtime_state::{ConnectionState, RuntimeData, RuntimeState};
pub use spec::ContainerSpec;

/// The supported runtimes, in order of precedence.
pub const RUNTIMES: [RuntimeKind; 4] =
    [RuntimeKind::Cri, RuntimeKind::Docker, RuntimeKind::Podman, RuntimeKind::Run];

/// Full id of a container: 64 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContainerId(Arc<str>);

impl ContainerId {
    /// Wraps an id.
    pub fn new(id: &str) -> Self {
        Self(id.into())
    }

    /// Returns the full id.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the id as a shared label value.
    pub fn shared(&self) -> &Arc<str> {
        &self.0
    }

    /// Returns the first 12 characters, as `docker ps` prints them.
    pub fn short(&self) -> &str {
        self.0.get(..12).unwrap_or(&self.0)
    }
}

impl Display for ContainerId {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl FromStr for ContainerId {
    type Err = Infallible;

    fn from_str(id: &str) -> Result<Self, Infallible> {
        Ok(Self::new(id))
    }
}

/// The identity of a container across restarts and re-creation: the labels of all its series. Events have it in this form.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Identity {
    /// Kubernetes namespace; empty elsewhere.
    #[serde(rename = "k8s_namespace_name", default, skip_serializing_if = "str::is_empty")]
    pub k8s_namespace: Arc<str>,
    /// Kubernetes pod; empty elsewhere.
    #[serde(rename = "k8s_pod_name", default, skip_serializing_if = "str::is_empty")]
    pub k8s_pod: Arc<str>,
    /// The container's name; its short id if no runtime reported one.
    #[serde(rename = "container_name")]
    pub name: Arc<str>,
}

/// `NAMESPACE/POD/NAME`: namespace and pod cannot contain a slash.
impl Display for Identity {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}/{}/{}", self.k8s_namespace, self.k8s_pod, self.name)
    }
}

impl FromStr for Identity {
    type Err = NoIdentity;

    fn from_str(text: &str) -> Result<Self, NoIdentity> {
        let mut parts = text.splitn(3, '/');
        let mut part = || parts.next().map(Arc::from).ok_or(NoIdentity);
        Ok(Self { k8s_namespace: part()?, k8s_pod: part()?, name: part()? })
    }
}

/// A text that is not `NAMESPACE/POD/NAME`.
#[derive(Debug)]
pub struct NoIdentity;

impl Identity {
    /// Creates an identity outside Kubernetes.
    pub fn named(name: &str) -> Self {
        Self { k8s_namespace: "".into(), k8s_pod: "".into(), name: name.into() }
    }

    /// Creates the identity of a container by its pod, if any, and its name without the temporary prefix of Compose.
    pub fn canonical(name: &str, pod: Option<&Pod>) -> Self {
        match pod {
            Some(pod) => Self {
                k8s_namespace: Arc::clone(&pod.namespace),
                k8s_pod: Arc::clone(&pod.name),
                name: name.into(),
            },
            None => Self::named(registry::strip_compose_prefix(name)),
        }
    }

    /// Returns the same identity with another name.
    fn renamed(&self, name: &str) -> Self {
        Self { name: name.into(), ..self.clone() }
    }

    /// Returns its name, in a pod after namespace and pod, with slashes between.
    pub fn path(&self) -> String {
        let parts = [&self.k8s_namespace, &self.k8s_pod, &self.name];
        parts.map(|part| &**part).into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("/")
    }

    /// Returns its name, in a pod after the pod.
    pub fn short_path(&self) -> String {
        if self.k8s_pod.is_empty() {
            self.name.to_string()
        } else {
            format!("{}/{}", self.k8s_pod, self.name)
        }
    }

    /// Returns whether `wanted` is its pod: `POD` or `NAMESPACE/POD`.
    pub fn is_of_pod(&self, wanted: &str) -> bool {
        let (namespace, pod) =
            wanted.rsplit_once('/').map_or((None, wanted), |(namespace, pod)| (Some(namespace), pod));
        !pod.is_empty()
            && *pod == *self.k8s_pod
            && namespace.is_none_or(|namespace| *namespace == *self.k8s_namespace)
    }

    /// Returns whether `wanted` selects it: `NAME`, and in a pod `POD/NAME` and `NAMESPACE/POD/NAME`. Where it selects none,
    /// [`Identity::is_of_pod`] counts.
    pub fn matches_name(&self, wanted: &str) -> bool {
        let mut parts = wanted.rsplitn(3, '/');
        parts.next() == Some(&*self.name)
            && parts.next().is_none_or(|pod| *pod == *self.k8s_pod)
            && parts.next().is_none_or(|namespace| *namespace == *self.k8s_namespace)
    }

    /// Returns whether the filter includes it: by its name, or in a pod also by `NAMESPACE/POD/NAME`.
    pub fn is_included(&self, filter: &Filter) -> bool {
        if self.k8s_pod.is_empty() {
            return filter.shows(&[&self.name]);
        }
        filter.shows(&[&self.name, &format!("{}/{}/{}", self.k8s_namespace, self.k8s_pod, self.name)])
    }
}

/// The pod that a container is in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pod {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
    /// Its uid: a pod that is re-created under the same name has another one.
    pub uid: Arc<str>,
    /// Number of earlier containers of this name in the pod.
    pub attempt: u32,
    /// The Job that it belongs to; empty without.
    pub job: Arc<str>,
    /// The source of the pod: `api`, or `file` or `http` for a static pod; empty if unknown.
    pub source: Arc<str>,
    /// Its allow-listed labels and annotations: label name and value.
    pub labels: Vec<(Arc<str>, Arc<str>)>,
    /// `memory.min` set by the kubelet, which is the container's memory request (feature MemoryQoS, cgroup v2).
    pub memory_min_bytes: Option<u64>,
}

/// Compares the start times of two runs of a container, which may differ by rounding in the runtime, and by the source.
pub fn same_start(a: f64, b: f64) -> bool {
    (a - b).abs() < 0.5
}

/// A running container as reported by a runtime.
#[derive(Clone, Debug, PartialEq)]
pub struct ContainerRecord {
    /// Full id.
    pub id: ContainerId,
    /// Its runtime.
    pub runtime: RuntimeKind,
    /// What it is.
    pub spec: Arc<ContainerSpec>,
    /// GPUs allocated to it, if the runtime reports them: index, uuid, or `all`.
    pub gpus: Arc<[Arc<str>]>,
    /// Unix time of the last start.
    pub started: Option<f64>,
    /// Host pid of its first process, if the runtime reports it: its cgroup is the container's.
    pub pid: Option<u32>,
}

impl ContainerRecord {
    /// Creates the record of a container without a start time.
    pub fn new(id: &str, runtime: RuntimeKind, spec: ContainerSpec) -> Self {
        let spec = Arc::new(spec);
        Self { id: ContainerId::new(id), runtime, spec, gpus: Arc::default(), started: None, pid: None }
    }

    /// Returns an event of it.
    pub fn event(&self, at: f64, what: EventKind) -> RuntimeEvent {
        RuntimeEvent {
            runtime: self.runtime,
            socket: Arc::default(),
            id: self.id.clone(),
            at,
            named: Some(Arc::clone(&self.spec)),
            what,
        }
    }
}

/// One container of the inventory.
#[derive(Clone, Debug, PartialEq)]
pub struct Container {
    /// Full id.
    pub id: ContainerId,
    /// The labels of all its series.
    pub identity: Identity,
    /// The runtime that runs it.
    pub runtime: RuntimeKind,
    /// What it is.
    pub spec: Arc<ContainerSpec>,
    /// GPUs allocated to it by its runtime: index, uuid, uuid of a MIG instance, or `all`.
    pub gpus: Arc<[Arc<str>]>,
    /// Unix time of the last start, if a runtime reports it.
    pub started: Option<f64>,
    /// Its cgroup; `None` before the runtime has created it.
    pub cgroup: Option<Arc<Cgroup>>,
    /// Its cgroup is below that of another container of the inventory, so its memory is part of that one's.
    pub nested: bool,
    /// Number of its run among those that were listed: another one after a restart. 0 of a run that never was.
    pub listed_run: u64,
}

impl Container {
    /// Creates a container of which only the identity is known.
    pub fn known_by_name(identity: Identity) -> Self {
        Self {
            id: ContainerId::new(""),
            identity,
            runtime: RuntimeKind::Missing,
            spec: Arc::default(),
            gpus: Arc::default(),
            started: None,
            cgroup: None,
            nested: false,
            listed_run: 0,
        }
    }

    /// Returns the inode of its cgroup.
    pub fn cgroup_inode(&self) -> Option<u64> {
        self.cgroup.as_ref().and_then(|cgroup| cgroup.inode)
    }

    /// Returns what makes its runs comparable with others.
    pub fn group(&self) -> Arc<str> {
        self.spec.group(&self.identity).unwrap_or_else(|| Arc::clone(&self.identity.name))
    }

    /// Returns the QoS class of its pod, by the path of its cgroup; `None` outside Kubernetes.
    pub fn qos(&self) -> Option<Qos> {
        self.spec.pod.as_ref().and(self.cgroup.as_ref()).and_then(|cgroup| qos(cgroup.path.to_str()?))
    }
}

#[cfg(test)]
impl Container {
    /// Returns a container of which only the id and the cgroup are known.
    pub fn in_cgroup(id: &str, path: &str) -> Arc<Self> {
        let cgroup = Cgroup { path: path.into(), inode: None, below: vec![], is_truncated: false };
        Arc::new(Self {
            id: ContainerId::new(id),
            runtime: RuntimeKind::Unknown,
            cgroup: Some(Arc::new(cgroup)),
            ..Self::known_by_name(Identity::named(id))
        })
    }
}

/// Paths of a container's cgroup, relative to the root of the hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup {
    /// The container's own cgroup.
    pub path: PathBuf,
    /// Its inode: a cgroup that was removed and created again has another one.
    pub inode: Option<u64>,
    /// The cgroups below it, whose processes belong to the container too.
    pub below: Vec<PathBuf>,
    /// There are more cgroups below it than the limit.
    pub is_truncated: bool,
}

/// Maximum number of ancestors of a process that are compared with the commands of runs.
const MAX_ANCESTORS: usize = 32;

/// All running containers at one time.
#[derive(Debug, Default)]
pub struct Inventory {
    /// The containers. No two have the same identity.
    pub containers: Vec<Arc<Container>>,
    /// Runtimes that have, or had, a socket: name and whether memledger is connected.
    pub runtimes: Vec<(RuntimeKind, bool)>,
    /// Devices that the kubelet has allocated to containers of pods, also to those that do not run.
    pub device_allocations: Vec<AllocatedContainer>,
    /// The commands of runs without a cgroup.
    pub commands: Vec<(ProcessId, ContainerId)>,
    /// Who can have made which cgroup; `None` without cgroups.
    pub owners: Option<CgroupOwners>,
}

impl Inventory {
    /// Returns the ids of the containers.
    pub fn ids(&self) -> HashSet<&ContainerId> {
        self.containers.iter().map(|container| &container.id).collect()
    }

    /// Returns the run without a cgroup that has this process, by its ancestors. `parent`: reads a process.
    pub fn run_of_process(
        &self,
        process: &ProcessFacts,
        mut parent: impl FnMut(u32) -> Option<ProcessFacts>,
    ) -> Option<&ContainerId> {
        let (mut id, mut ppid) = (process.id, process.ppid);
        for _ in 0..MAX_ANCESTORS {
            if let Some((_, run)) = self.commands.iter().find(|(command, _)| *command == id) {
                return Some(run);
            }
            let above = parent(ppid).filter(|_| !self.commands.is_empty() && ppid > 1)?;
            (id, ppid) = (above.id, above.ppid);
        }
        None
    }

    /// Returns the container of a process by its path in `/proc/PID/cgroup`; `None` if it is in none. The container may not be
    /// in the inventory.
    ///
    /// The path begins at the root of memledger's cgroup namespace, so it is compared from its end. It contains every
    /// container around the process, so a cgroup that is only named after a container is not taken for it.
    pub fn owner_of_path(&self, path: &str) -> Option<ContainerId> {
        let is_absolute = !path.split('/').any(|part| part == "..");
        let claim = |id: &ContainerId, path: &str| {
            let container = self.containers.iter().find(|container| container.id == *id);
            match container.and_then(|container| Some(&container.cgroup.as_ref()?.path)) {
                Some(own) if contains_path(own, path) => PathClaim::Own,
                // a runtime may have moved it since; where the owners of cgroups are unknown, it has not
                Some(_) if self.owners.is_none() || !is_absolute => PathClaim::Elsewhere,
                Some(_) | None => PathClaim::Possible { user: None },
            }
        };
        let maker = |path: &str| match &self.owners {
            Some(owners) => owners.maker(path),
            None => CgroupMaker::by_names(path),
        };
        match owner_of_paths([path], claim, maker) {
            PathOwner::Container(id) => Some(id),
            PathOwner::Host | PathOwner::Unproven | PathOwner::Unknown => None,
        }
    }
}

/// Returns whether a path of `/proc/PID/cgroup`, which begins at the root of memledger's cgroup namespace, is a cgroup or below it.
fn contains_path(cgroup: &Path, path: &str) -> bool {
    let names = Path::new(path).components().filter(|part| matches!(part, Component::Normal(_)));
    let path: PathBuf = names.collect();
    path.ancestors().any(|above| above.file_name().is_some() && cgroup.ends_with(above))
}

/// An event of a container, for the ledger.
///
/// After a reconnect the order is: events from before it; the containers that were found ([`EventKind::Exists`],
/// [`EventKind::Running`], and [`EventKind::Ended`] with a flag, which may be older than the events before them); new events.
#[derive(Clone, Debug, PartialEq)]
pub struct RuntimeEvent {
    /// The runtime that reported it.
    pub runtime: RuntimeKind,
    /// The socket of the runtime; empty if it has only one.
    pub socket: Arc<str>,
    /// Full id.
    pub id: ContainerId,
    /// Unix time, by the runtime's clock if it reports one.
    pub at: f64,
    /// The container's name, image and settings, if the runtime reported them with the event.
    pub named: Option<Arc<ContainerSpec>>,
    /// The kind of the event.
    pub what: EventKind,
}

/// The kind of a container event.
#[derive(Clone, Debug, PartialEq)]
pub enum EventKind {
    /// It exists, running or not; nothing happened.
    Exists,
    /// A run began at the time of the event.
    Started,
    /// It has been running since the time of the event. Reported for containers found running, and with the pid after a start.
    Running {
        /// Host pid of its first process.
        pid: Option<u32>,
    },
    /// The run ended at the time of the event.
    Ended {
        /// Its exit code, if the runtime knows it.
        exit_code: Option<i64>,
        /// The runtime's OOMKilled flag, if it was queried.
        oom_flag: Option<bool>,
    },
    /// It exists, and is the sandbox of a pod: no container, though its cgroup looks like that of one while its runtime is away.
    Sandbox,
    /// It was the sandbox of a pod, and its runtime does not list it any more.
    SandboxRemoved,
    /// The runtime reports an OOM. Not a count.
    Oom,
    /// A user requested this signal through the runtime. Docker reports the end of a `docker stop` without a signal: after the exit, and
    /// from version 28 on before it. Podman (observed: 4.3) omits the signal, and does not report a stop.
    SignalRequested {
        /// The signal, if the event contains it.
        signal: Option<i32>,
    },
    /// It was renamed; `named` has the new name.
    Renamed,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_belongs_to_the_container_whose_own_cgroup_is_on_its_path() {
        let [a, b, c, d] = ["a", "b", "c", "d"].map(|letter| letter.repeat(64));
        let inner = format!("pods/docker-{a}.scope/kubelet/cri-containerd-{c}.scope");
        let known =
            [(&a, format!("pods/docker-{a}.scope")), (&b, format!("docker/{b}")), (&c, inner.clone())];
        let containers = known.iter().map(|(id, path)| Container::in_cgroup(id, path)).collect();
        let inventory = Inventory { containers, ..Inventory::default() };
        for (path, owner) in [
            (format!("/docker/{b}"), Some(&b)),
            (format!("/docker/{b}/x/{a}"), Some(&b)),
            (format!("/pods/docker-{a}.scope/docker/{b}"), Some(&a)),
            (format!("/{inner}/x"), Some(&c)),
            // in a cgroup namespace of memledger's own
            (format!("/../../docker/{b}/docker/{c}"), Some(&b)),
            (format!("/../docker-{a}.scope/kubelet/cri-containerd-{c}.scope"), Some(&c)),
            (format!("/../docker-{a}.scope/docker/{b}"), Some(&a)),
            ("/../system.slice/ssh.service".to_owned(), None),
            ("/".to_owned(), None),
            // anyone can have made these
            (format!("/slurm/uid_7/job_1/step_0/task_0/{b}"), None),
            (format!("/slurm/uid_7/job_1/step_0/task_0/docker/{b}"), None),
            (format!("/../user.slice/user-7.slice/user@7.service/docker-{b}.scope"), None),
            (format!("/lab/docker/{b}"), None),
            (format!("/slurm/uid_7/job_1/docker-{d}.scope"), None),
            (format!("/system.slice/docker-{d}.scope"), Some(&d)),
        ] {
            assert_eq!(
                inventory.owner_of_path(&path).as_ref().map(ContainerId::as_str),
                owner.map(String::as_str),
                "{path}"
            );
        }
    }
}
