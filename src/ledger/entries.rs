//! What the ledger is made of: kills, exits, and the containers they happened to.
//!
//! These are also the rows of the store and of `/api/v1/events`: a field that is not known is left out, never 0.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::discover::Identity;

/// Who a container is, as the ledger remembers it after its end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Name {
    /// Kubernetes namespace; empty elsewhere.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub k8s_namespace_name: Arc<str>,
    /// Kubernetes pod; empty elsewhere.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub k8s_pod_name: Arc<str>,
    /// The container's name, or its short id where no runtime told one.
    pub container_name: Arc<str>,
}

impl From<&Identity> for Name {
    fn from(identity: &Identity) -> Self {
        Self {
            k8s_namespace_name: Arc::clone(&identity.k8s_namespace),
            k8s_pod_name: Arc::clone(&identity.k8s_pod),
            container_name: Arc::clone(&identity.name),
        }
    }
}

/// A container at the time of an event.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Subject {
    /// The labels that all its series carry.
    #[serde(flatten)]
    pub name: Name,
    /// Full id.
    pub container_id: Arc<str>,
    /// Image; empty if no runtime told.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub image: Arc<str>,
    /// `docker`, `podman`, ...; empty if not known.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub runtime: Arc<str>,
    /// Unix time of the start of the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started: Option<f64>,
}

/// Whose process it was.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "whose")]
pub enum Whose {
    /// Evidence may still come.
    Open,
    /// A container's.
    Container(Subject),
    /// A process outside containers.
    Host,
    /// No evidence ties it to anybody.
    Unattributed,
}

/// Whether the kill ended the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Victim {
    /// Its first process, or a child whose death made the first process end with that status.
    Main,
    /// Another process: the container lived on. A DataLoader worker is the usual one.
    Child,
}

/// What ran out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// The limit of a cgroup: the container's own or one above it.
    Container,
    /// The machine's memory.
    Host,
}

/// One line of evidence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evidence {
    /// `kmsg`, `vmstat`, `cgroup`, `runtime`: who said it.
    pub source: Arc<str>,
    /// What was said, for people.
    pub text: String,
}

impl Evidence {
    /// A line of evidence.
    pub fn new(source: &str, text: impl Into<String>) -> Self {
        Self { source: source.into(), text: text.into() }
    }
}

/// One process that the kernel's OOM killer killed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Kill {
    /// Number of the event; grows.
    pub id: u64,
    /// Unix time.
    pub at: f64,
    /// The boot it belongs to.
    pub boot_id: Arc<str>,
    /// Microseconds of the kernel's clock in its record; with the boot and the pid the identity of a kill. `None`: the
    /// record was lost, and the kill is known from a counter only (a *gap*).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel_usec: Option<u64>,
    /// Host pid.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Name of the process, made printable; empty if not known.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub process: Arc<str>,
    /// What it was for: `trainer`, `dataloader_worker`, `other`; empty if not known.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub role: Arc<str>,
    /// Whose process it was.
    #[serde(flatten)]
    pub whose: Whose,
    /// `None` while open, and for processes that are no container's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub victim: Option<Victim>,
    /// What ran out.
    pub scope: Scope,
    /// Anonymous memory of the victim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub anon_bytes: Option<u64>,
    /// Its mapped file pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_bytes: Option<u64>,
    /// Its shared memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shmem_bytes: Option<u64>,
    /// Its `oom_score_adj`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oom_score_adj: Option<i32>,
    /// The cgroup whose limit was hit, as the kernel names it; empty if not known or if the machine ran out.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub limit_cgroup: Arc<str>,
    /// That limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// How it was attributed: `kmsg`, `proc`, `processes`, `cgroup`, `runtime`; empty if it was not.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub method: Arc<str>,
    /// The number of kills is its container's, but several containers lost processes in these seconds, and which process
    /// was whose is not known: name, pid and sizes may be those of another one's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub exchangeable: bool,
    /// What the sources said, in the order in which they did.
    pub evidence: Vec<Evidence>,
    /// What the container held before; for a host kill also who else held memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before: Option<Arc<Before>>,
}

/// Why a container ended. The labels of `memledger_container_exits_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// Exit code 0.
    Completed,
    /// An OOM kill because of a cgroup's limit.
    OomContainer,
    /// An OOM kill because the machine ran out.
    OomHost,
    /// Somebody asked: docker stop, docker kill.
    Stopped,
    /// SIGKILL from outside, and no OOM.
    Killed,
    /// Another signal.
    Signal,
    /// Exit code other than 0.
    Error,
    /// Nobody tells.
    Unknown,
}

impl Reason {
    /// All of them, in the order of the documents.
    pub const ALL: [Reason; 8] = [
        Reason::Completed,
        Reason::OomContainer,
        Reason::OomHost,
        Reason::Stopped,
        Reason::Killed,
        Reason::Signal,
        Reason::Error,
        Reason::Unknown,
    ];

    /// As a label value.
    pub fn label(self) -> &'static str {
        match self {
            Reason::Completed => "completed",
            Reason::OomContainer => "oom_container",
            Reason::OomHost => "oom_host",
            Reason::Stopped => "stopped",
            Reason::Killed => "killed",
            Reason::Signal => "signal",
            Reason::Error => "error",
            Reason::Unknown => "unknown",
        }
    }
}

/// One end of a container.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Exit {
    /// Number of the event; grows.
    pub id: u64,
    /// Unix time.
    pub at: f64,
    /// Whose end.
    #[serde(flatten)]
    pub subject: Subject,
    /// Why; `None` while evidence may still come.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<Reason>,
    /// Exit code, as the runtime tells it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i64>,
    /// The runtime's OOMKilled flag. Evidence of little worth: wrong in both directions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runtime_oom_flag: Option<bool>,
    /// Requests to the runtime to end it, within ten minutes before the end, oldest first: the signal of each, or `None`
    /// where the runtime names none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub asked_signals: Vec<Option<i32>>,
    /// The kernel log could be read when the reason was decided: an OOM kill would have been seen.
    #[serde(default)]
    pub kernel_log_read: bool,
    /// Seconds from its start to its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duration_seconds: Option<f64>,
    /// OOM kills of processes of this run.
    pub oom_kills: u64,
    /// Highest usage of the run, page cache included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_usage_bytes: Option<u64>,
    /// Highest sample of what the kernel cannot drop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_unreclaimable_bytes: Option<u64>,
    /// What the sources said, in the order in which they did.
    pub evidence: Vec<Evidence>,
    /// What the container held before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before: Option<Arc<Before>>,
}

impl Exit {
    /// The signal of the last request to end it.
    pub fn asked_signal(&self) -> Option<i32> {
        self.asked_signals.last().copied().flatten()
    }
}

/// One error that the driver of a GPU reported.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuError {
    /// Number of the event; grows.
    pub id: u64,
    /// Unix time.
    pub at: f64,
    /// Index of the GPU.
    pub gpu: Arc<str>,
    /// Its UUID.
    pub gpu_uuid: Arc<str>,
    /// NVIDIA's number of the error.
    pub xid: u64,
    /// Host pid of the process that was at work, where the driver says it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The container that this process was in.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub subject: Option<Subject>,
    /// `kmsg` or `nvml`: who told of it.
    pub source: Arc<str>,
}

/// Any event, as it stands in the store and in `/api/v1/events`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum Event {
    /// A process was killed for memory.
    OomKill(Kill),
    /// A container ended.
    Exit(Exit),
    /// The driver of a GPU reported an error.
    GpuError(GpuError),
}

impl Event {
    /// Its number.
    pub fn id(&self) -> u64 {
        match self {
            Event::OomKill(kill) => kill.id,
            Event::Exit(exit) => exit.id,
            Event::GpuError(error) => error.id,
        }
    }

    /// Unix time.
    pub fn at(&self) -> f64 {
        match self {
            Event::OomKill(kill) => kill.at,
            Event::Exit(exit) => exit.at,
            Event::GpuError(error) => error.at,
        }
    }

    /// The container it happened to, if any.
    pub fn subject(&self) -> Option<&Subject> {
        match self {
            Event::OomKill(Kill { whose: Whose::Container(subject), .. }) => Some(subject),
            Event::OomKill(_) => None,
            Event::Exit(exit) => Some(&exit.subject),
            Event::GpuError(error) => error.subject.as_ref(),
        }
    }

    /// True once nothing of it will change any more.
    pub fn settled(&self) -> bool {
        match self {
            Event::OomKill(kill) => match kill.whose {
                Whose::Open => false,
                Whose::Container(_) => kill.victim.is_some(),
                Whose::Host | Whose::Unattributed => true,
            },
            Event::Exit(exit) => exit.reason.is_some(),
            Event::GpuError(_) => true,
        }
    }
}

/// What was held before an event: the ledger's own short history.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Before {
    /// Samples of the container, oldest first, about ten seconds apart over five minutes, the last one the newest.
    pub samples: Vec<Sample>,
    /// Processes of the container by role at the last sample: role, how many, their memory. Shares (PSS) where
    /// measured, else resident memory.
    pub roles: Vec<RoleHeld>,
    /// Allow-listed settings of the container's environment, such as `num_workers`.
    pub settings: Vec<(Arc<str>, Arc<str>)>,
    /// For a host kill: who held memory that the kernel cannot drop, most first, at most five.
    pub holders: Vec<Holder>,
    /// For a host kill: MemTotal and MemAvailable at the last sample.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_total_bytes: Option<u64>,
    /// See `host_total_bytes`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_available_bytes: Option<u64>,
}

/// One sample of a container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Unix time.
    pub at: f64,
    /// All that is charged.
    pub usage_bytes: u64,
    /// What the kernel cannot drop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unreclaimable_bytes: Option<u64>,
    /// Anonymous memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub anon_bytes: Option<u64>,
    /// Shared memory and tmpfs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shmem_bytes: Option<u64>,
    /// Page cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_bytes: Option<u64>,
    /// Own limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// Lowest limit on the path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effective_limit_bytes: Option<u64>,
    /// Used bytes and size of its /dev/shm.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shm_used_bytes: Option<u64>,
    /// See `shm_used_bytes`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shm_size_bytes: Option<u64>,
}

/// Processes of one role.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoleHeld {
    /// `trainer`, `dataloader_worker`, `other`.
    pub role: Arc<str>,
    /// How many.
    pub processes: u32,
    /// Their resident memory, shared pages counted again.
    pub rss_bytes: u64,
    /// Their proportional share, if measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pss_bytes: Option<u64>,
}

/// Somebody who held memory of the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Holder {
    /// A container's name, or `processes outside containers`.
    pub name: Arc<str>,
    /// What the kernel could not drop.
    pub unreclaimable_bytes: u64,
}
