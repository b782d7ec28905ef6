//! Which containers are there, who they are, and where their cgroups lie.
//!
//! Two kinds of sources, merged by container id into one entry each: the runtimes' APIs know names, labels and settings
//! ([`docker`]); the cgroup tree knows what runs, also without any runtime ([`cgroups`]). [`registry`] merges them.

pub mod cgroups;
pub mod docker;
pub mod registry;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use cgroups::{Hierarchy, Version};
pub use registry::{Refresh, Registry};

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
}

/// What a runtime tells of one container.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Full id.
    pub id: ContainerId,
    /// `docker`, `podman`, ...
    pub runtime: &'static str,
    /// The name, without the leading slash of the API.
    pub name: String,
    /// The image as it was asked for.
    pub image: Arc<str>,
    /// Compose project; empty without.
    pub compose_project: Arc<str>,
    /// Compose service; empty without.
    pub compose_service: Arc<str>,
    /// Run settings from the allow-listed environment: label name and value.
    pub settings: Vec<(Arc<str>, Arc<str>)>,
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
    /// The image; empty if no runtime told.
    pub image: Arc<str>,
    /// Compose project; empty without.
    pub compose_project: Arc<str>,
    /// Compose service; empty without.
    pub compose_service: Arc<str>,
    /// Run settings: label name and value.
    pub settings: Vec<(Arc<str>, Arc<str>)>,
    /// Unix time of the last start, if a runtime told.
    pub started: Option<f64>,
    /// Its cgroup; `None` before the runtime has made it.
    pub cgroup: Option<Arc<Cgroup>>,
    /// It lies in the cgroup of another container of the inventory, and so its memory is part of that one's.
    pub nested: bool,
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

/// Whether a runtime's API can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// Not tried yet.
    Starting,
    /// There is no socket, and there never was one.
    NoSocket,
    /// Connected, and the list of containers is complete.
    Up,
    /// It was there, or its socket is there and does not answer.
    Down,
}

/// What one runtime's task knows, shared with the cycle.
#[derive(Debug)]
pub struct Source {
    /// `docker` or `podman`.
    pub runtime: &'static str,
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
    pub running: std::collections::HashMap<ContainerId, Record>,
    /// Containers that ended since the cycle last looked.
    pub ended: Vec<Record>,
}

impl Source {
    /// A source that was not tried yet.
    pub fn new(runtime: &'static str) -> Arc<Self> {
        let state =
            SourceState { link: Link::Starting, generation: 0, running: Default::default(), ended: vec![] };
        Arc::new(Self { runtime, state: Mutex::new(state) })
    }

    /// The state, locked. A panic of another holder leaves plain data behind, so a poisoned lock is used on.
    pub fn lock(&self) -> MutexGuard<'_, SourceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
