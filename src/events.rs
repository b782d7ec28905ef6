//! The event types: OOM kills, container exits and GPU errors.
//!
//! They are stored and returned by `/api/v1/events` in this form. A field that is not known is omitted, never 0.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::clock::ClockStep;
pub use crate::collect::pss::PssMissing;
use crate::discover::history::ExistingContainer;
use crate::discover::{Container, ContainerId};
pub use crate::discover::{Identity, RuntimeKind};
use crate::lifecycle::{RunId, RunNumber};
pub use crate::parse::kernel_log::{OomReport, ReportProcess, RoleRange};
use crate::parse::log_error::{HostError, HostErrorText};
pub use crate::parse::process::Role;

/// The holder of what is in use outside containers: by processes and by the kernel.
pub const OUTSIDE_CONTAINERS: &str = "outside containers";

/// The holder of GPU memory of processes outside the containers that are shown.
pub const OTHER_PROCESSES: &str = "other processes";

/// A container at the time of an event.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ContainerRef {
    /// Labels of its series.
    #[serde(flatten)]
    pub identity: Identity,
    /// Full id.
    pub container_id: Arc<str>,
    /// Image; empty if no runtime reported it.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub image: Arc<str>,
    /// Its runtime; left out if none has been found.
    #[serde(default, skip_serializing_if = "RuntimeKind::is_missing")]
    pub runtime: RuntimeKind,
    /// Number of the run in this ledger: with the id of the container it names the run. `None` if no run is known, and in events from
    /// another ledger.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_number: Option<RunNumber>,
    /// Unix time at which the run started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started: Option<f64>,
    /// Names that it had before this one, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub former_names: Vec<Arc<str>>,
}

impl ContainerRef {
    /// Refers to a container as it is listed.
    pub fn of(container: &Container) -> Self {
        Self {
            identity: container.identity.clone(),
            container_id: Arc::clone(container.id.shared()),
            image: Arc::clone(&container.spec.image),
            runtime: container.runtime,
            started: container.started,
            ..Self::default()
        }
    }

    /// Refers to a container as its runtime describes it.
    pub fn of_existing(container: &ExistingContainer) -> Self {
        Self {
            identity: container.named.identity(),
            container_id: Arc::clone(container.id.shared()),
            image: Arc::clone(&container.named.image),
            runtime: container.runtime,
            started: container.started,
            ..Self::default()
        }
    }

    /// Gives it another name. A short id was no name.
    pub fn rename(&mut self, identity: &Identity) {
        if self.identity == *identity {
            return;
        }
        let before = std::mem::replace(&mut self.identity, identity.clone()).name;
        let is_name = self.container_id.get(..12) != Some(&*before) && before != identity.name;
        self.former_names.retain(|name| *name != before && *name != identity.name);
        self.former_names.extend(is_name.then_some(before));
    }

    /// Returns which run it is.
    pub fn run_id(&self) -> Option<RunId> {
        let container = ContainerId::new(&self.container_id);
        self.run_number.map(|number| RunId { container, number })
    }

    /// Returns whether it is a run of `memledger run`.
    pub fn is_run(&self) -> bool {
        self.runtime.is_run()
    }
}

/// The owner of a killed process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "owner")]
pub enum KillOwner {
    /// Not known yet: evidence may still arrive.
    #[serde(rename = "pending")]
    Pending,
    /// A process of a container.
    Container(ContainerRef),
    /// A process outside containers.
    Host,
    /// Not attributed: no evidence identifies the owner.
    Unattributed,
}

impl Kill {
    /// Gives its container another name, also among the holders of memory and the processes of its report.
    pub fn rename(&mut self, identity: &Identity) {
        let KillOwner::Container(subject) = &mut self.owner else { return };
        let before = Arc::clone(&subject.identity.name);
        subject.rename(identity);
        if let Some(usage) = &mut self.before
            && usage.holders.iter().any(|holder| holder.name == before)
        {
            let holders = Arc::make_mut(usage).holders.iter_mut().filter(|holder| holder.name == before);
            holders.for_each(|holder| holder.name = Arc::clone(&identity.name));
        }
        if let Some(report) = &mut self.report
            && report.processes.iter().any(|row| *row.container == *before)
        {
            let rows = Arc::make_mut(report).processes.iter_mut().filter(|row| *row.container == *before);
            rows.for_each(|row| row.container = identity.name.to_string());
        }
    }
}

/// Whether the kill ended the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Victim {
    /// It killed the first process, or a child whose status the first process then returned.
    Main,
    /// It killed another process, for example a DataLoader worker, and the container continued.
    Child,
    /// Nothing is left that shows it: only of kills from before a ledger, or without one.
    Unknown,
}

/// Which memory was exhausted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OomScope {
    /// The limit of a cgroup: of the container or of one above it.
    Container,
    /// The memory of the host.
    Host,
}

/// How the owner of a killed process was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// By a cgroup in the kernel's record.
    Kmsg,
    /// By its cgroup, which was read from /proc.
    Proc,
    /// By its pid, which a runtime reported or a cycle saw.
    Processes,
    /// By the counter of the container's cgroup.
    Cgroup,
    /// By what the runtime reported.
    Runtime,
    /// Several containers lost processes, as many as counted, and which was whose is not known.
    Set,
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// One line of evidence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evidence {
    /// `kmsg`, `vmstat`, `cgroup` or `runtime`.
    pub source: Arc<str>,
    /// Text for people.
    pub text: String,
}

impl Evidence {
    /// Creates a line of evidence.
    pub fn new(source: &str, text: impl Into<String>) -> Self {
        Self { source: source.into(), text: text.into() }
    }
}

/// One process that the kernel's OOM killer ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Kill {
    /// Id of the event; increases.
    pub id: u64,
    /// Unix time of the kill.
    pub at: f64,
    /// For a kill without a record: it happened between this Unix time and `at`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub earliest: Option<f64>,
    /// Id of the boot.
    pub boot_id: Arc<str>,
    /// Microseconds of the kernel's clock in the record; together with boot and pid it identifies the kill. `None`: the
    /// record is missing, and the kill is known only from a counter (a *gap*).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel_usec: Option<u64>,
    /// Host pid.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Name of the process, sanitized for display; empty if unknown.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub process: Arc<str>,
    /// Its role; `None` if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
    /// Host pid of the process that a worker was forked by, or started by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_pid: Option<u32>,
    /// The program of a worker, such as `gunicorn` or `ray`; empty if it is not a known one.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub program: Arc<str>,
    /// The owner of the process.
    #[serde(flatten)]
    pub owner: KillOwner,
    /// `None` while pending, and for processes outside containers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub victim: Option<Victim>,
    /// Its number among the OOM kills of its run, from 1 on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub number: Option<u64>,
    /// Which memory was exhausted.
    pub scope: OomScope,
    /// Anonymous memory of the victim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub anon_bytes: Option<u64>,
    /// Mapped file pages of the victim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_bytes: Option<u64>,
    /// Shared memory of the victim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shmem_bytes: Option<u64>,
    /// `oom_score_adj` of the victim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oom_score_adj: Option<i32>,
    /// The victim's cgroup, as the kernel names it; empty if unknown.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub cgroup: Arc<str>,
    /// The cgroup that was killed as a whole with this process (`memory.oom.group`); empty if it was not.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub group: Arc<str>,
    /// The cgroup whose limit was hit, as the kernel names it; empty if unknown or if the host ran out of memory.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub limit_cgroup: Arc<str>,
    /// Limit of that cgroup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// The limit is that of the container's pod, and no other container of the pod was running: its limit is the container's, though
    /// the kubelet sets both and the kernel names the pod's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub alone_in_pod: bool,
    /// It happened before the first start of memledger: no counter has it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub before_counting: bool,
    /// How it was attributed; `None` if it was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<Method>,
    /// What the kernel logged about memory and processes at the kill; `None` if it logged none, or it cannot be shown to be
    /// of this kill. Victims of one group kill share it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report: Option<Arc<OomReport>>,
    /// Evidence in the order in which it arrived.
    pub evidence: Vec<Evidence>,
    /// Usage of the container before the kill; for a host-wide OOM, of any process, also the largest memory holders.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before: Option<Arc<PriorUsage>>,
}

/// Why a container ended: the label values of `memledger_container_exits_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitReason {
    /// Exit code 0.
    Completed,
    /// An OOM kill at a cgroup's limit.
    OomContainer,
    /// An OOM kill because the host ran out of memory.
    OomHost,
    /// A stop request to the runtime: docker stop, docker kill.
    Stopped,
    /// SIGKILL without an OOM kill and without a stop request.
    Killed,
    /// Another signal.
    Signal,
    /// Exit code other than 0.
    Error,
    /// The run began in another boot of the host, and ended with it.
    HostRestart,
    /// What would be an error, just after a CUDA out-of-memory error.
    CudaOom,
    /// What would be an error or a crash, just after an error in its log: memory of the host was refused.
    Refused,
    /// The same: a limit of the program's own was reached.
    OwnLimit,
    /// The same: a thread or a process was refused.
    Threads,
    /// The same: `/dev/shm` was full.
    Shm,
    /// No source reported the reason.
    Unknown,
}

impl ExitReason {
    /// All reasons, in the order of the documentation.
    pub const ALL: [ExitReason; 14] = [
        ExitReason::Completed,
        ExitReason::OomContainer,
        ExitReason::OomHost,
        ExitReason::Stopped,
        ExitReason::Killed,
        ExitReason::Signal,
        ExitReason::Error,
        ExitReason::HostRestart,
        ExitReason::CudaOom,
        ExitReason::Refused,
        ExitReason::OwnLimit,
        ExitReason::Threads,
        ExitReason::Shm,
        ExitReason::Unknown,
    ];

    /// Returns the reason of an exit that an error in a log explains; `None` where that is the kill of a child.
    pub fn of_error(error: HostError) -> Option<Self> {
        match error {
            HostError::Refused(_) => Some(Self::Refused),
            HostError::OwnLimit(_) => Some(Self::OwnLimit),
            HostError::Threads => Some(Self::Threads),
            HostError::Shm => Some(Self::Shm),
            HostError::Monitor(_) => None,
        }
    }

    /// Returns whether only the log of the container can show it.
    pub fn is_of_log(self) -> bool {
        matches!(self, Self::Refused | Self::OwnLimit | Self::Threads | Self::Shm)
    }

    /// Returns the label value.
    pub fn label(self) -> &'static str {
        match self {
            ExitReason::Completed => "completed",
            ExitReason::OomContainer => "oom_container",
            ExitReason::OomHost => "oom_host",
            ExitReason::Stopped => "stopped",
            ExitReason::Killed => "killed",
            ExitReason::Signal => "signal",
            ExitReason::Error => "error",
            ExitReason::HostRestart => "host_restart",
            ExitReason::CudaOom => "cuda_oom",
            ExitReason::Refused => "refused",
            ExitReason::OwnLimit => "own_limit",
            ExitReason::Threads => "threads",
            ExitReason::Shm => "shm",
            ExitReason::Unknown => "unknown",
        }
    }
}

/// One exit of a container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Exit {
    /// Id of the event; increases.
    pub id: u64,
    /// Unix time of the exit.
    pub at: f64,
    /// The container.
    #[serde(flatten)]
    pub subject: ContainerRef,
    /// Reason; `None` while evidence may still arrive.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<ExitReason>,
    /// Exit code, as reported by the runtime.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i64>,
    /// The runtime's OOMKilled flag. Weak evidence: wrong in both directions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runtime_oom_flag: Option<bool>,
    /// Stop requests to the runtime within ten minutes before the exit, oldest first: the signal of each, or `None` if
    /// the runtime does not report it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stop_signals: Vec<Option<i32>>,
    /// The kernel log was readable when the reason was decided: an OOM kill would have been recorded.
    #[serde(default)]
    pub kernel_log_read: bool,
    /// Seconds from the start to the exit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duration_seconds: Option<f64>,
    /// OOM kills of processes during this run.
    pub oom_kills: u64,
    /// Id of the OOM kill that ended it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_by: Option<u64>,
    /// Ids of OOM kills that may have ended it: of its own processes shortly before it ended with an error, and of processes whose owner
    /// is not known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub may_be: Vec<u64>,
    /// The last error in its log before its end, which explains it; only where its log is read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_error: Option<HostErrorText>,
    /// The runtime reports requests to stop, and memledger was connected to it at the end: without one there was none.
    #[serde(default)]
    pub requests_known: bool,
    /// It ended before the first start of memledger: no counter has it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub before_counting: bool,
    /// Highest usage during the run, page cache included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_usage_bytes: Option<u64>,
    /// Highest sample of unreclaimable memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_unreclaimable_bytes: Option<u64>,
    /// Evidence in the order in which it arrived.
    pub evidence: Vec<Evidence>,
    /// Usage of the container before the exit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before: Option<Arc<PriorUsage>>,
}

impl Exit {
    /// Returns the signal of the last stop request that has one: some versions of Docker report the end of a stop as a request without.
    pub fn requested_signal(&self) -> Option<i32> {
        self.stop_signals.iter().rev().copied().flatten().next()
    }
}

/// One error that a GPU driver reported.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuError {
    /// Id of the event; increases.
    pub id: u64,
    /// Unix time of the error.
    pub at: f64,
    /// Index of the GPU.
    pub gpu: Arc<str>,
    /// Its UUID.
    pub gpu_uuid: Arc<str>,
    /// NVIDIA's error number (Xid).
    pub xid: u64,
    /// Host pid of the process that used the GPU, if the driver reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The container of this process.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub subject: Option<ContainerRef>,
    /// `kmsg` or `nvml`.
    pub source: Arc<str>,
}

/// What PyTorch held between two steps of a training, and how much that grew until an error.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeldGrowth {
    /// Bytes at first.
    pub from_bytes: u64,
    /// Bytes at last.
    pub to_bytes: u64,
    /// Seconds between the two.
    pub seconds: f64,
}

/// Where a CUDA out-of-memory error is known from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CudaOomSource {
    /// The process reports it.
    #[default]
    Reporter,
    /// It is in the container's log, which has only the numbers that the framework prints.
    Log,
}

impl CudaOomSource {
    /// All, in the order of counts.
    pub const ALL: [Self; 2] = [Self::Reporter, Self::Log];

    /// Returns the label value.
    pub fn label(self) -> &'static str {
        match self {
            Self::Reporter => "reporter",
            Self::Log => "log",
        }
    }
}

/// A CUDA out-of-memory error: the GPU, or what the process may take of it, was full. The program may survive it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CudaOom {
    /// How what its run held between two steps grew until then, if it did all the time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub growth: Option<HeldGrowth>,
    /// Id of the event; increases.
    pub id: u64,
    /// Unix time at which it happened.
    pub at: f64,
    /// The container.
    #[serde(flatten)]
    pub subject: ContainerRef,
    /// Host pid of the process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Its rank on this host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u8>,
    /// Index of the GPU; empty if it is not known which one.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub gpu: Arc<str>,
    /// Its UUID.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub gpu_uuid: Arc<str>,
    /// The framework that printed the text, such as `torch`, `vllm`, `jax`; empty if it is not known.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub framework: Arc<str>,
    /// Where it is known from.
    pub source: CudaOomSource,
    /// What was to be allocated. PyTorch rounds it up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tried_bytes: Option<u64>,
    /// Memory of the GPU, or what the process may take of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// Free memory of the GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<u64>,
    /// In tensors of the process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocated_bytes: Option<u64>,
    /// Held by PyTorch's allocator in the process: tensors and its cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved_bytes: Option<u64>,
    /// Free parts of split blocks in the cache, which cannot be given back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inactive_split_bytes: Option<u64>,
    /// Part of the program, as it reports it; empty if it does not.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub component: Arc<str>,
    /// What the component did.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub operation: Arc<str>,
    /// Whether the process ended by it: it did not catch it, as far as it reported. `None` while that may still be reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uncaught: Option<bool>,
    /// Errors of the container since the event before this one that are not events themselves: there were too many.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub skipped: u64,
    /// Who held memory of this GPU at the last reading of the driver before the error: the five largest, largest first; empty
    /// without a reading.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub holders: Vec<GpuHolder>,
    /// Other processes of the container that held memory of this GPU at that reading: the five largest, largest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub own_processes: Vec<OwnGpuProcess>,
    /// Unix time of that reading.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holders_at: Option<f64>,
    /// Where the program wrote PyTorch's history of allocations, in the container; empty if it records none.
    #[serde(default, skip_serializing_if = "str::is_empty")]
    pub snapshot: Arc<str>,
    /// Settings of the run, such as `batch_size`, as far as they were known then.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub settings: Vec<(Arc<str>, Arc<str>)>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A holder of GPU memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuHolder {
    /// Name of the container, in a pod after namespace and pod; `other processes` for those outside the containers that are shown.
    pub name: Arc<str>,
    /// It is the container of the event.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub own: bool,
    /// Memory of its processes; `None` if the driver does not report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// The same one to six minutes before the error; `None` where there is no reading of that time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub earlier_bytes: Option<u64>,
}

/// A process that held memory of a GPU when an allocation failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnGpuProcess {
    /// Host pid.
    pub pid: u32,
    /// Its memory.
    pub bytes: u64,
}

impl GpuHolder {
    /// Returns by how much its memory grew in the minutes before the error.
    pub fn growth(&self) -> u64 {
        self.bytes.zip(self.earlier_bytes).map_or(0, |(bytes, earlier)| bytes.saturating_sub(earlier))
    }
}

/// An event, as it is stored and returned by `/api/v1/events`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum LedgerEvent {
    /// The OOM killer ended a process.
    OomKill(Kill),
    /// A container ended.
    Exit(Exit),
    /// A GPU driver reported an error.
    GpuError(GpuError),
    /// A program ran out of GPU memory.
    CudaOom(CudaOom),
}

impl LedgerEvent {
    /// Returns the id.
    pub fn id(&self) -> u64 {
        match self {
            LedgerEvent::OomKill(kill) => kill.id,
            LedgerEvent::Exit(exit) => exit.id,
            LedgerEvent::GpuError(error) => error.id,
            LedgerEvent::CudaOom(oom) => oom.id,
        }
    }

    /// Returns the Unix time.
    pub fn at(&self) -> f64 {
        match self {
            LedgerEvent::OomKill(kill) => kill.at,
            LedgerEvent::Exit(exit) => exit.at,
            LedgerEvent::GpuError(error) => error.at,
            LedgerEvent::CudaOom(oom) => oom.at,
        }
    }

    /// Returns whether it happened before the first start of memledger: no counter has it.
    pub fn is_before_counting(&self) -> bool {
        match self {
            LedgerEvent::OomKill(kill) => kill.before_counting,
            LedgerEvent::Exit(exit) => exit.before_counting,
            LedgerEvent::GpuError(_) | LedgerEvent::CudaOom(_) => false,
        }
    }

    /// Corrects its times, if the clock by which they were recorded was wrong.
    pub fn correct_times(&mut self, step: &ClockStep) {
        match self {
            LedgerEvent::OomKill(kill) => kill.correct_times(step),
            LedgerEvent::Exit(exit) => exit.correct_times(step),
            LedgerEvent::GpuError(error) => step.correct(&mut error.at),
            LedgerEvent::CudaOom(oom) => step.correct(&mut oom.at),
        }
    }

    /// Returns the container of the event, if it has one.
    pub fn subject(&self) -> Option<&ContainerRef> {
        match self {
            LedgerEvent::OomKill(Kill { owner: KillOwner::Container(subject), .. }) => Some(subject),
            LedgerEvent::OomKill(_) => None,
            LedgerEvent::Exit(exit) => Some(&exit.subject),
            LedgerEvent::GpuError(error) => error.subject.as_ref(),
            LedgerEvent::CudaOom(oom) => Some(&oom.subject),
        }
    }

    /// Gives its container another name.
    pub fn rename(&mut self, identity: &Identity) {
        match self {
            LedgerEvent::OomKill(kill) => kill.rename(identity),
            LedgerEvent::Exit(exit) => exit.subject.rename(identity),
            LedgerEvent::GpuError(error) => {
                error.subject.iter_mut().for_each(|subject| subject.rename(identity));
            }
            LedgerEvent::CudaOom(oom) => oom.subject.rename(identity),
        }
    }

    /// Returns whether `memledger why` without a name may be about it: a kill, or an exit that nobody wanted.
    pub fn is_notable(&self) -> bool {
        match self {
            LedgerEvent::OomKill(_) => true,
            LedgerEvent::Exit(exit) => match exit.reason {
                Some(ExitReason::Completed | ExitReason::Stopped) => false,
                Some(_) => true,
                None => exit.exit_code != Some(0) && exit.stop_signals.is_empty(),
            },
            // a program may survive it: its exit says whether it did
            LedgerEvent::GpuError(_) | LedgerEvent::CudaOom(_) => false,
        }
    }

    /// Returns about how many bytes it takes in memory.
    pub fn size_estimate(&self) -> usize {
        let before = |before: &Option<Arc<PriorUsage>>| {
            before.as_ref().map_or(0, |it| it.samples.len() * size_of::<UsageSample>())
        };
        let text = |evidence: &[Evidence]| {
            evidence.iter().map(|line| line.text.len() + size_of::<Evidence>()).sum::<usize>()
        };
        size_of::<Self>()
            + match self {
                LedgerEvent::OomKill(kill) => {
                    let rows = kill.report.as_ref().map_or(0, |report| report.processes.len());
                    before(&kill.before) + text(&kill.evidence) + rows * 200
                }
                LedgerEvent::Exit(exit) => before(&exit.before) + text(&exit.evidence),
                LedgerEvent::GpuError(_) | LedgerEvent::CudaOom(_) => 0,
            }
    }

    /// Returns true once the event is final.
    pub fn settled(&self) -> bool {
        match self {
            LedgerEvent::OomKill(kill) => match kill.owner {
                KillOwner::Pending => false,
                KillOwner::Container(_) => kill.victim.is_some(),
                KillOwner::Host | KillOwner::Unattributed => true,
            },
            LedgerEvent::Exit(exit) => exit.reason.is_some(),
            LedgerEvent::GpuError(_) => true,
            // the log never says whether it was caught
            LedgerEvent::CudaOom(oom) => oom.uncaught.is_some() || oom.pid.is_none(),
        }
    }
}

impl Kill {
    /// See [`LedgerEvent::correct_times`].
    pub fn correct_times(&mut self, step: &ClockStep) {
        step.correct(&mut self.at);
        self.earliest.iter_mut().for_each(|earliest| step.correct(earliest));
        correct_samples(&mut self.before, step);
    }
}

impl Exit {
    /// See [`LedgerEvent::correct_times`].
    pub fn correct_times(&mut self, step: &ClockStep) {
        step.correct(&mut self.at);
        correct_samples(&mut self.before, step);
    }
}

fn correct_samples(before: &mut Option<Arc<PriorUsage>>, step: &ClockStep) {
    if let Some(before) = before {
        Arc::make_mut(before).samples.iter_mut().for_each(|sample| step.correct(&mut sample.at));
    }
}

/// Usage before an event, from the ledger's own short history.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PriorUsage {
    /// Samples of the container, oldest first, about 10 s apart over 5 min; the last one is the newest.
    pub samples: Vec<UsageSample>,
    /// Processes of the container by role at the last sample, with their number and memory: PSS if measured, else
    /// resident memory.
    pub roles: Vec<RoleUsage>,
    /// Allow-listed settings from the container's environment, such as `num_workers`.
    pub settings: Vec<(Arc<str>, Arc<str>)>,
    /// For a host-wide OOM: the five containers with the most unreclaimable memory, and all that was in use outside containers, largest
    /// first.
    pub holders: Vec<MemoryHolder>,
    /// For a host-wide OOM: MemTotal and MemAvailable in the last cycle before the kill.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_total_bytes: Option<u64>,
    /// See `host_total_bytes`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_available_bytes: Option<u64>,
}

/// One memory sample of a container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct UsageSample {
    /// Unix time.
    pub at: f64,
    /// All charged memory.
    pub usage_bytes: u64,
    /// Memory that the kernel cannot reclaim.
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
    /// The container's own limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// Lowest limit on the path to the root cgroup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effective_limit_bytes: Option<u64>,
    /// Used bytes of its /dev/shm, and its size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shm_used_bytes: Option<u64>,
    /// See `shm_used_bytes`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shm_size_bytes: Option<u64>,
}

/// The processes of one role.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoleUsage {
    /// The role.
    pub role: Role,
    /// Number of processes.
    pub processes: u32,
    /// Sum of their resident memory; counts shared pages more than once.
    pub rss_bytes: u64,
    /// Sum of their PSS, if measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pss_bytes: Option<u64>,
    /// Why it was not measured; `None` if it was, or if that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pss_missing: Option<PssMissing>,
}

/// A holder of host memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemoryHolder {
    /// Name of the container, or `outside containers`.
    pub name: Arc<str>,
    /// Memory that the kernel could not reclaim.
    pub unreclaimable_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_the_store_and_the_api_stay() {
        use Method::{Cgroup, Kmsg, Proc, Processes, Runtime, Set};
        let methods = [Kmsg, Proc, Processes, Cgroup, Runtime, Set].map(|method| method.to_string());
        assert_eq!(methods, ["kmsg", "proc", "processes", "cgroup", "runtime", "set"]);
        for source in CudaOomSource::ALL {
            assert_eq!(serde_json::to_value(source).unwrap(), source.label());
        }
    }
}
