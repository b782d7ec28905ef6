//! Which containers are there, who they are, and where their cgroups lie.
//!
//! Two kinds of sources, merged by container id into one entry each: the runtimes' APIs know names, labels and settings
//! ([`cri`], [`docker`]); the cgroup tree knows what runs, also without any runtime ([`cgroups`]). [`registry`] merges them.

pub mod cgroups;
pub mod cri;
pub mod docker;
pub mod registry;

use std::collections::{HashMap, HashSet, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::config::Filter;
use crate::host::Bell;
use crate::parse::kubernetes::{Qos, qos};

pub use cgroups::{Hierarchy, Version};
pub use registry::{Refresh, Registry};

/// The runtimes whose API is spoken, in order of precedence.
pub const RUNTIMES: [&str; 3] = ["cri", "docker", "podman"];

/// Ended containers that wait for the cycle to look at them; more are forgotten, oldest first.
const MOST_ENDED: usize = 4_096;
/// Facts that wait for the ledger; more are dropped, oldest first, and counted.
const MOST_FACTS: usize = 65_536;

/// Full id of a container: 64 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContainerId(Arc<str>);

impl ContainerId {
    /// Wraps an id.
    pub fn new(id: &str) -> Self {
        Self(id.into())
    }

    /// The full id.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The id as a shared label value.
    pub fn shared(&self) -> &Arc<str> {
        &self.0
    }

    /// The first 12 characters, as people know it from `docker ps`.
    pub fn short(&self) -> &str {
        self.0.get(..12).unwrap_or(&self.0)
    }
}

/// Who a container is over restarts and re-creation: the labels that all its series carry.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity {
    /// Kubernetes namespace; empty elsewhere.
    pub k8s_namespace: Arc<str>,
    /// Kubernetes pod; empty elsewhere.
    pub k8s_pod: Arc<str>,
    /// The container's name.
    pub name: Arc<str>,
}

impl Identity {
    /// An identity outside Kubernetes.
    pub fn named(name: &str) -> Self {
        Self { k8s_namespace: "".into(), k8s_pod: "".into(), name: name.into() }
    }

    /// The same pod, if it is in one, under the name that stays: outside of pods Compose may have renamed it for a moment.
    pub fn lasting(name: &str, pod: Option<&Pod>) -> Self {
        match pod {
            Some(pod) => Self {
                k8s_namespace: Arc::clone(&pod.namespace),
                k8s_pod: Arc::clone(&pod.name),
                name: name.into(),
            },
            None => Self::named(registry::lasting_name(name)),
        }
    }

    /// As the same, under another name.
    fn renamed(&self, name: &str) -> Self {
        Self { name: name.into(), ..self.clone() }
    }

    /// True if somebody may mean it by this: `NAME`, and in a pod `POD/NAME` and `NAMESPACE/POD/NAME`.
    pub fn is_called(&self, wanted: &str) -> bool {
        let mut parts = wanted.rsplitn(3, '/');
        parts.next() == Some(&*self.name)
            && parts.next().is_none_or(|pod| *pod == *self.k8s_pod)
            && parts.next().is_none_or(|namespace| *namespace == *self.k8s_namespace)
    }

    /// True if the filter shows it: by its name, or in a pod by `NAMESPACE/POD/NAME` as well.
    pub fn is_shown(&self, filter: &Filter) -> bool {
        if self.k8s_pod.is_empty() {
            return filter.shows(&[&self.name]);
        }
        filter.shows(&[&self.name, &format!("{}/{}/{}", self.k8s_namespace, self.k8s_pod, self.name)])
    }
}

/// The pod that a container is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
    /// Its uid: a pod that is made anew under the same name has another one.
    pub uid: Arc<str>,
    /// How many containers of this name were in the pod before this one.
    pub attempt: u32,
    /// Where the kubelet has it from: `api`, or `file` or `http` for a static pod; empty if it did not say.
    pub source: Arc<str>,
    /// Its labels and annotations that are allowed to be shown: label name and value.
    pub labels: Vec<(Arc<str>, Arc<str>)>,
    /// `memory.min` that the kubelet asked for, which is the container's memory request (feature MemoryQoS, cgroup v2).
    pub memory_min_bytes: Option<u64>,
}

/// What a runtime tells of one container.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Full id.
    pub id: ContainerId,
    /// One of [`RUNTIMES`].
    pub runtime: &'static str,
    /// The name, without the leading slash of the API; in a pod, the one in the pod's specification.
    pub name: String,
    /// Its pod; `None` outside Kubernetes.
    pub pod: Option<Arc<Pod>>,
    /// The image as it was asked for.
    pub image: Arc<str>,
    /// Compose project; empty without.
    pub compose_project: Arc<str>,
    /// Compose service; empty without.
    pub compose_service: Arc<str>,
    /// Run settings from the allow-listed environment: label name and value.
    pub settings: Vec<(Arc<str>, Arc<str>)>,
    /// GPUs that it was given, as far as the runtime tells: index, uuid, or `all`.
    pub gpus: Arc<[Arc<str>]>,
    /// Unix time of the last start.
    pub started: Option<f64>,
    /// Whether the container's labels pass `--container.label`.
    pub labels_match: bool,
}

/// One container as the rest of memledger sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct Container {
    /// Full id.
    pub id: ContainerId,
    /// The labels that all its series carry.
    pub identity: Identity,
    /// Who runs it.
    pub runtime: &'static str,
    /// Its pod; `None` outside Kubernetes.
    pub pod: Option<Arc<Pod>>,
    /// The image; empty if no runtime told.
    pub image: Arc<str>,
    /// Compose project; empty without.
    pub compose_project: Arc<str>,
    /// Compose service; empty without.
    pub compose_service: Arc<str>,
    /// Run settings: label name and value.
    pub settings: Vec<(Arc<str>, Arc<str>)>,
    /// GPUs that it was given, by its runtime or by the kubelet: index, uuid, uuid of a MIG instance, or `all`.
    pub gpus: Arc<[Arc<str>]>,
    /// Unix time of the last start, if a runtime told.
    pub started: Option<f64>,
    /// Its cgroup; `None` before the runtime has made it.
    pub cgroup: Option<Arc<Cgroup>>,
    /// It lies in the cgroup of another container of the inventory, and so its memory is part of that one's.
    pub nested: bool,
}

impl Container {
    /// The QoS class of its pod, by the path of its cgroup; `None` outside Kubernetes.
    pub fn qos(&self) -> Option<Qos> {
        self.pod.as_ref().and(self.cgroup.as_ref()).and_then(|cgroup| qos(cgroup.path.to_str()?))
    }
}

/// Where a container's cgroup lies, relative to the root of the hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup {
    /// The container's own cgroup.
    pub path: PathBuf,
    /// Its inode: a cgroup that was removed and made again has another one.
    pub inode: Option<u64>,
    /// The cgroups below it, whose processes are its processes too.
    pub below: Vec<PathBuf>,
}

/// All running containers at one time.
#[derive(Debug, Default)]
pub struct Inventory {
    /// The containers. No two have the same identity.
    pub containers: Vec<Arc<Container>>,
    /// Runtimes that have, or had, a socket: name and whether memledger is connected.
    pub runtimes: Vec<(&'static str, bool)>,
}

/// What a runtime told of a container, for the ledger.
///
/// After a connection comes first what happened before it, then what was found ([`What::Exists`], [`What::Running`], and
/// [`What::Ended`] with a flag, which may be older than what was told before them), then what happens.
#[derive(Clone, Debug, PartialEq)]
pub struct Fact {
    /// Which runtime.
    pub runtime: &'static str,
    /// Full id.
    pub id: ContainerId,
    /// Unix time, by the runtime's clock where it tells it.
    pub at: f64,
    /// Who it is, if the runtime told that with it.
    pub named: Option<Named>,
    /// What happened.
    pub what: What,
}

/// What an event tells of who a container is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// The name, without the leading slash of the API.
    pub name: Arc<str>,
    /// Its pod; `None` outside Kubernetes.
    pub pod: Option<Arc<Pod>>,
    /// The image as it was asked for.
    pub image: Arc<str>,
    /// Whether the container's labels pass `--container.label`.
    pub labels_match: bool,
}

/// What happened to a container.
#[derive(Clone, Debug, PartialEq)]
pub enum What {
    /// It exists, running or not; nothing happened.
    Exists,
    /// A run began at this fact's time.
    Started,
    /// It runs, since this fact's time. Told of what was found running, and once more with the pid after a start.
    Running {
        /// Host pid of its first process.
        pid: Option<u32>,
    },
    /// The run ended at this fact's time.
    Ended {
        /// Its exit code, if the runtime knows it.
        exit_code: Option<i64>,
        /// The runtime's OOMKilled flag, where it was asked.
        oom_flag: Option<bool>,
    },
    /// The runtime says that an OOM happened. Not a count.
    Oom,
    /// Somebody asked the runtime to send this signal. Docker tells of a `docker stop` once more after the end, without a
    /// signal. Podman (seen: 4.3) names no signal, and does not tell of a stop.
    Asked {
        /// The signal, if the event names it.
        signal: Option<i32>,
    },
    /// It was given a new name, the one in `named`.
    Renamed,
}

/// Whether a runtime's API can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// Not tried yet.
    Starting,
    /// There is no socket, and there never was one.
    NoSocket,
    /// A socket that may be a runtime's, which nobody asked for by name and which has had no containers yet.
    Idle,
    /// Connected, and the list of containers is complete.
    Up,
    /// It was there, or its socket is there and does not answer.
    Down,
}

/// What one runtime's task knows, shared with the cycle.
#[derive(Debug)]
pub struct Source {
    /// One of [`RUNTIMES`].
    pub runtime: &'static str,
    /// Rung when there are new facts.
    pub bell: Arc<Bell>,
    state: Mutex<SourceState>,
}

/// The part of [`Source`] that changes.
#[derive(Debug)]
pub struct SourceState {
    /// Whether the API can be used.
    pub link: Link,
    /// Grows with every change.
    pub generation: u64,
    /// Containers that run, by id.
    pub running: HashMap<ContainerId, Record>,
    /// Sandboxes of pods, which have a cgroup and an id like a container and are none.
    pub sandboxes: HashSet<ContainerId>,
    /// GPUs that the kubelet gave to containers of pods.
    pub given: cri::pod_resources::Given,
    /// Containers that ended since the cycle last looked.
    pub ended: Vec<Record>,
    /// What happened since the ledger last looked, oldest first. See [`Source::tell`].
    pub facts: VecDeque<Fact>,
    /// Facts that were dropped because nobody took them.
    pub facts_lost: u64,
}

impl Source {
    /// A source that was not tried yet.
    pub fn new(runtime: &'static str, bell: Arc<Bell>) -> Arc<Self> {
        let state = SourceState {
            link: Link::Starting,
            generation: 0,
            running: HashMap::new(),
            sandboxes: HashSet::new(),
            given: Default::default(),
            ended: vec![],
            facts: VecDeque::new(),
            facts_lost: 0,
        };
        Arc::new(Self { runtime, bell, state: Mutex::new(state) })
    }

    /// The state, locked. A panic of another holder leaves plain data behind, so a poisoned lock is used on.
    pub fn lock(&self) -> MutexGuard<'_, SourceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says whether the API can be used.
    pub fn set_link(&self, link: Link) {
        let mut state = self.lock();
        if state.link != link {
            state.link = link;
            state.generation += 1;
        }
    }

    /// A container runs. Entering it twice changes nothing; another start ends the run before.
    pub fn enter(&self, record: Record) {
        let mut state = self.lock();
        if state.running.get(&record.id) != Some(&record) {
            let before = state.running.insert(record.id.clone(), record.clone());
            state.generation += 1;
            // a start that only the list told of has no time, and is the same run
            let another = |before: &Record| before.started.is_some() && before.started != record.started;
            if let Some(before) = before.filter(another) {
                push_ended(&mut state.ended, before);
            }
        }
    }

    /// A container ended at `at`. An end that is older than the start we know belongs to an earlier run.
    ///
    /// `unentered`: the run that began and was not entered yet; it came and went.
    pub fn end(&self, id: &ContainerId, at: f64, unentered: Option<Record>) {
        let mut state = self.lock();
        let stale = |record: &Record| record.started.is_some_and(|started| at < started);
        let entered = if state.running.get(id).is_some_and(|record| !stale(record)) {
            state.running.remove(id)
        } else {
            None
        };
        if let Some(record) = entered.or(unentered) {
            push_ended(&mut state.ended, record);
            state.generation += 1;
        }
    }

    /// Leaves facts for the ledger, and rings. When [`MOST_FACTS`] wait, the oldest ones go.
    pub fn tell(&self, facts: impl IntoIterator<Item = Fact>) {
        let mut state = self.lock();
        let (before, lost) = (state.facts.len(), state.facts_lost);
        for fact in facts {
            if state.facts.len() >= MOST_FACTS {
                state.facts.pop_front();
                state.facts_lost += 1;
            }
            state.facts.push_back(fact);
        }
        let (first_loss, news) =
            (lost == 0 && state.facts_lost > 0, state.facts.len() > before || state.facts_lost > lost);
        drop(state);
        if first_loss {
            tracing::warn!(
                runtime = self.runtime,
                most = MOST_FACTS,
                "the ledger does not keep up with the runtime's events; the oldest ones are dropped (said once)"
            );
        }
        if news {
            self.bell.ring();
        }
    }

    /// What was told since the last call, in order.
    pub fn take_facts(&self) -> Vec<Fact> {
        Vec::from(std::mem::take(&mut self.lock().facts))
    }
}

fn push_ended(ended: &mut Vec<Record>, record: Record) {
    if ended.len() >= MOST_ENDED {
        ended.remove(0);
    }
    ended.push(record);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_that_nobody_takes_are_dropped_oldest_first_and_counted() {
        let source = Source::new("docker", Arc::default());
        let fact = |number: usize| Fact {
            runtime: "docker",
            id: ContainerId::new("a"),
            at: number as f64,
            named: None,
            what: What::Exists,
        };
        source.tell((0..MOST_FACTS + 3).map(fact));
        assert_eq!(source.lock().facts_lost, 3);
        let facts = source.take_facts();
        assert_eq!((facts.len(), facts[0].at), (MOST_FACTS, 3.0));
        assert!(source.take_facts().is_empty());
    }
}
