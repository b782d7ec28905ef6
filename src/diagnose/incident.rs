//! What happened, as data: the sentence that answers `why` follows from it alone.

use serde::{Serialize, Serializer};

use super::cuda_oom::CudaOomIncident;
use super::place::CgroupPlace;
use crate::events::{Kill, Role};
use crate::parse::kernel_log::NoKill;
use crate::parse::kernel_log::refusals::KernelRefusal;
use crate::parse::kill_notice::KillNotice;

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Incident {
    /// A process of the container was killed.
    Kill(Box<KillIncident>),
    /// A process outside the known containers was killed.
    OutsideKill(Box<OutsideKill>),
    /// Memory ran out, and no process was killed.
    NoKill {
        /// Why memory ran out.
        #[serde(flatten)]
        exhausted: Exhausted,
        /// The program that asked for memory.
        #[serde(skip_serializing_if = "Option::is_none")]
        requested_by: Option<String>,
        /// Why it ended without a kill.
        no_kill: NoKill,
    },
    /// The container ended.
    Exit(ExitIncident),
    /// It ran out of GPU memory, and no end is recorded.
    CudaOomSurvived(CudaOomIncident),
    /// What another program than the kernel says of a kill.
    Notice(Box<KillNotice>),
    /// What the kernel refused.
    Refusal(Box<KernelRefusal>),
    /// Nothing is recorded of the run.
    Unrecorded,
    /// Neither a kill nor an end is known.
    NoEvents {
        /// It runs now.
        is_running: bool,
    },
    /// It never ran: its start failed.
    StartFailed {
        /// What the runtime says.
        error: String,
    },
    /// It was created, and never started.
    NotStarted,
    /// Its runtime says that it runs, and its first process does not exist.
    LostProcess {
        /// Pid of that process.
        #[serde(skip_serializing_if = "Option::is_none")]
        pid: Option<u32>,
    },
    /// It was running when its runtime could be queried last.
    RuntimeUnreachable {
        /// Its cgroup has no process; else that cannot be read.
        is_empty: bool,
    },
}

/// A kill in a container.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KillIncident {
    /// The kill, as its event.
    #[serde(serialize_with = "without_report")]
    pub kill: Kill,
    /// Why memory ran out.
    #[serde(flatten)]
    pub exhausted: Exhausted,
    /// Another container's process may have been the one that was killed.
    pub is_one_of_a_set: bool,
    /// What became of the container.
    #[serde(flatten)]
    pub outcome: KillOutcome,
}

/// A kill outside the known containers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OutsideKill {
    /// The kill, as its event.
    #[serde(serialize_with = "without_report")]
    pub kill: Kill,
    /// Why memory ran out.
    #[serde(flatten)]
    pub exhausted: Exhausted,
    /// Whose process it was.
    #[serde(flatten)]
    pub owner: OutsideOwner,
}

/// Why memory ran out.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "exhausted", rename_all = "snake_case")]
pub enum Exhausted {
    /// It need not have: the kill was requested.
    Requested,
    /// The memory of some NUMA nodes.
    Nodes {
        /// Their numbers.
        nodes: String,
    },
    /// The host's, although some was free.
    Unusable {
        /// So many bytes.
        free_bytes: u64,
    },
    /// The host's.
    Host,
    /// A limit was reached.
    Limit {
        /// Whose limit.
        #[serde(flatten)]
        of: LimitOwner,
        /// The limit.
        #[serde(skip_serializing_if = "Option::is_none")]
        limit_bytes: Option<u64>,
        /// It is one of memory and swap together.
        with_swap: bool,
    },
    /// It is not known what.
    Unknown,
}

/// Whose limit was reached.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "limit_of", rename_all = "snake_case")]
pub enum LimitOwner {
    /// The container.
    Container,
    /// A cgroup inside it.
    Inside {
        /// Its path.
        cgroup: String,
    },
    /// A cgroup above it that is not known.
    Above,
    /// A cgroup above the container, which is called so.
    PlaceAbove {
        /// What it is.
        place: CgroupPlace,
    },
    /// A cgroup.
    Place {
        /// What it is.
        place: CgroupPlace,
    },
    /// A cgroup that is most likely the container's own.
    LikelyContainer,
}

/// What became of a container after a kill.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum KillOutcome {
    /// It was ended by that.
    Ended {
        /// Its exit code.
        #[serde(skip_serializing_if = "Option::is_none")]
        exit_code: Option<i64>,
    },
    /// It kept running.
    KeptRunning,
    /// A log from elsewhere does not show it.
    NotInLog,
    /// No end is recorded so far.
    NoEndSoFar,
    /// No end is recorded.
    NoEnd,
    /// It was stopped later.
    StoppedLater {
        /// Seconds from the kill to the end.
        seconds: f64,
        /// Its exit code.
        #[serde(skip_serializing_if = "Option::is_none")]
        exit_code: Option<i64>,
    },
    /// It ended later.
    EndedLater {
        /// Seconds from the kill to the end.
        seconds: f64,
        /// Its exit code.
        #[serde(skip_serializing_if = "Option::is_none")]
        exit_code: Option<i64>,
        /// The exit code is most likely the child's.
        is_childs_code: bool,
    },
    /// It ended later, and it is not decided whether by the kill.
    Undecided {
        /// Seconds from the kill to the end.
        seconds: f64,
        /// Its exit code.
        #[serde(skip_serializing_if = "Option::is_none")]
        exit_code: Option<i64>,
    },
}

/// Whose process was killed outside the known containers.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "owner", rename_all = "snake_case")]
pub enum OutsideOwner {
    /// Its cgroup has the id of a container in its name, which proves nothing.
    UnprovenContainer {
        /// The id.
        container_id: String,
        /// Where it ran, if that is not the cgroup whose limit was reached.
        #[serde(skip_serializing_if = "Option::is_none")]
        ran_in: Option<CgroupPlace>,
    },
    /// No container's.
    NoContainer {
        /// Where it ran, if that is not the cgroup whose limit was reached.
        #[serde(skip_serializing_if = "Option::is_none")]
        ran_in: Option<CgroupPlace>,
    },
    /// Evidence may still arrive.
    Pending,
    /// A log lacks the line that names it.
    LineMissing,
    /// A log does not name it.
    NotInLog,
    /// Nothing shows it.
    Unknown,
}

/// The end of a container.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExitIncident {
    /// Unix time.
    pub at: f64,
    /// Exit code.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i64>,
    /// Seconds from the start to the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duration_seconds: Option<f64>,
    /// Why it ended.
    #[serde(flatten)]
    pub why: ExitWhy,
}

/// Why a container ended.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "why", rename_all = "snake_case")]
pub enum ExitWhy {
    /// It ran out of GPU memory.
    CudaOom(CudaOomIncident),
    /// It ran out of GPU memory, and the event of that is gone.
    LostCudaOom,
    /// By an OOM kill at a limit whose record is gone.
    LostKillAtLimit,
    /// By an OOM kill of the host whose record is gone.
    LostKillOfHost,
    /// Without an error.
    Completed {
        /// It is known that nothing stopped it.
        by_itself: bool,
    },
    /// By a stop whose timeout passed.
    StopTimeout,
    /// By a kill request.
    KillRequest,
    /// By a stop request.
    StopRequest {
        /// The signal.
        signal: i32,
        /// It was killed, because it did not exit.
        was_killed: bool,
    },
    /// By a stop request whose signal is not known.
    StopRequestUnknown,
    /// By SIGKILL; a kill of an unknown container may have been this one's.
    PossibleKill {
        /// That kill.
        #[serde(serialize_with = "without_report")]
        kill: Box<Kill>,
    },
    /// By SIGKILL, while the kernel log could not be read.
    KilledLogUnread {
        /// What is known of stop requests.
        requests: StopRequests,
    },
    /// By SIGKILL, which was no OOM kill.
    Killed {
        /// Seconds from the last OOM kill of the run.
        #[serde(skip_serializing_if = "Option::is_none")]
        last_kill_seconds: Option<f64>,
        /// What is known of stop requests.
        requests: StopRequests,
    },
    /// By a signal that is not known.
    UnknownSignal,
    /// By SIGBUS, with a full `/dev/shm`.
    ShmBus(ShmUse),
    /// By SIGSEGV, or by abort() of a first process.
    CrashOrAbort {
        /// The signal.
        signal: i64,
    },
    /// By a signal that indicates a crash.
    Crashed {
        /// The signal.
        signal: i64,
    },
    /// By another signal.
    Signal {
        /// The signal.
        signal: i64,
        /// What is known of stop requests.
        requests: StopRequests,
    },
    /// With an error, and a full `/dev/shm`.
    ShmError(ShmUse),
    /// With an error; a kill of an unknown container may have been that of its child.
    PossibleKillOfChild {
        /// That kill.
        #[serde(serialize_with = "without_report")]
        kill: Box<Kill>,
    },
    /// With an error; its cgroup counted a kill of which there is no record.
    CountedKill,
    /// With an error; the kernel log could not be read.
    ErrorLogUnread,
    /// With an error; the record of a kill before is gone.
    LostKillBefore,
    /// With an error of its own.
    OwnError {
        /// No OOM kill of the run is recorded.
        without_kill: bool,
    },
    /// As an error in its log says.
    ByLog,
    /// With the host.
    HostRestart,
    /// By SIGKILL, and no record of an OOM kill could be read.
    SigkillLogUnread,
    /// An OOM kill of which only a flag or a count is left.
    OnlyFlag {
        /// Its cgroup counted it; else the runtime's flag is set.
        is_counted: bool,
    },
    /// For a reason that is not recorded.
    Unrecorded {
        /// It was in a pod.
        in_pod: bool,
    },
    /// For a reason that may still be found.
    Pending,
}

/// What is known of requests to stop a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StopRequests {
    /// There were some, and none explains the end.
    NoneExplains,
    /// There was none.
    None,
    /// Pods report none.
    UnknownOfPod,
    /// Podman reports none.
    UnknownOfPodman,
    /// The runtime was not connected.
    Unknown,
}

/// A kill in a document, without what stands beside it: the kernel's report, evidence and samples.
#[derive(Serialize)]
struct KillData<'a> {
    #[serde(flatten)]
    event: Option<EventData>,
    #[serde(skip_serializing_if = "str::is_empty")]
    process: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<Role>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parent_pid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    anon_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    file_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    shmem_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    oom_score_adj: Option<i32>,
    #[serde(skip_serializing_if = "str::is_empty")]
    cgroup: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    limit_cgroup: &'a str,
}

/// The event of a kill of this host: a saved log has none.
#[derive(Serialize)]
struct EventData {
    id: u64,
    at: f64,
}

/// Writes a kill as [`KillData`].
pub(super) fn without_report<S: Serializer>(kill: &Kill, serializer: S) -> Result<S::Ok, S::Error> {
    let is_of_host = !kill.boot_id.is_empty();
    let data = KillData {
        event: is_of_host.then_some(EventData { id: kill.id, at: kill.at }),
        process: &kill.process,
        pid: kill.pid,
        role: kill.role,
        parent_pid: kill.parent_pid,
        anon_bytes: kill.anon_bytes,
        file_bytes: kill.file_bytes,
        shmem_bytes: kill.shmem_bytes,
        oom_score_adj: kill.oom_score_adj,
        cgroup: &kill.cgroup,
        limit_cgroup: &kill.limit_cgroup,
    };
    data.serialize(serializer)
}

/// Use of a `/dev/shm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ShmUse {
    /// Used bytes.
    pub used_bytes: u64,
    /// Its size.
    pub size_bytes: u64,
}

/// The headline, where the cause does not say all.
#[derive(Clone, Debug, PartialEq)]
pub enum Headline {
    /// A process was killed, and the container ended later.
    AfterKill {
        /// The limit of the container, if it was that.
        own_limit_bytes: Option<u64>,
        /// The pod at whose limit it was.
        pod: Option<CgroupPlace>,
        /// The victim was a child.
        is_child: bool,
        /// How it ended.
        end: LaterEnd,
        /// Seconds from the kill to the end.
        seconds: f64,
    },
    /// A kill at the limit of a pod with several containers.
    AtLimitOf(CgroupPlace),
    /// It has no process left.
    NoProcess {
        /// Its runtime says that it runs; else that cannot be queried.
        is_running: bool,
    },
    /// Another program than the kernel killed it.
    KilledBy {
        /// The program.
        killer: String,
    },
    /// The kernel refused something.
    Refusal(crate::parse::kernel_log::refusals::RefusalKind),
    /// Its log has an error.
    LoggedError(crate::parse::log_error::HostError),
}

/// How a container ended after a kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaterEnd {
    /// By a kill request.
    KillRequest,
    /// By a stop request.
    StopRequest,
    /// With this exit code.
    ExitCode(Option<i64>),
}

/// A process in a finding.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KilledProcess {
    /// Its name.
    pub process: String,
    /// Its pid.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Its role.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
}
