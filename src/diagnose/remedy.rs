//! The remedies of limits, of the host, and of ends: which setting to change, its value, and a better one if the figures give it.

use serde::Serialize;

use super::limit::LimitSetter;
use super::place::CgroupPlace;
use crate::events::{PssMissing, Role};
use crate::parse::process::WorkerProgram;

/// A remedy.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "remedy", rename_all = "snake_case")]
pub enum LimitRemedy {
    /// Let it use more NUMA nodes.
    MoreNodes,
    /// Keep other programs from its NUMA nodes.
    FewerProgramsOnNodes,
    /// Raise the limit of a cgroup that is no container's.
    RaisePlace {
        /// The cgroup.
        place: CgroupPlace,
        /// The limit.
        #[serde(skip_serializing_if = "Option::is_none")]
        limit_bytes: Option<u64>,
    },
    /// Let some processes of the host be killed.
    LetProcessesBeKilled,
    /// Let a process of the container be killed.
    LetItsProcessBeKilled,
    /// Let the kernel kill a process in place of a panic.
    NoPanicOnOom,
    /// Read the container's log.
    ReadOutput {
        /// What for.
        purpose: OutputPurpose,
        /// Where it is.
        output: OutputPlace,
    },
    /// Search the kernel log around that time.
    SearchKernelLog,
    /// Raise the stop timeout, and handle SIGTERM.
    RaiseStopTimeout,
    /// Raise the memory limit, or use less.
    RaiseOrUseLess {
        /// Who sets it.
        setter: LimitSetter,
    },
    /// Raise the limit that was hit.
    Raise {
        /// The limit.
        #[serde(flatten)]
        limit: LimitSetting,
        /// It is an alternative to what comes before.
        #[serde(skip)]
        is_alternative: bool,
    },
    /// Raise the limit, where shared memory fills it.
    RaiseForSharedMemory {
        /// The limit.
        #[serde(flatten)]
        limit: LimitSetting,
    },
    /// Raise the limit of a cgroup inside the container.
    RaiseInside {
        /// The cgroup.
        cgroup: String,
        /// Its limit.
        #[serde(skip_serializing_if = "Option::is_none")]
        limit_bytes: Option<u64>,
        /// It is an alternative to what comes before.
        #[serde(skip)]
        is_alternative: bool,
    },
    /// Raise the limit of an unknown cgroup above, or start the container below another one.
    RaiseAbove {
        /// The limit.
        #[serde(skip_serializing_if = "Option::is_none")]
        limit_bytes: Option<u64>,
    },
    /// All containers of the pod share the limit.
    ComparePodContainers,
    /// All containers below that cgroup share its limit.
    LimitEachBelow,
    /// Start fewer workers.
    FewerWorkers {
        /// Which.
        #[serde(flatten)]
        workers: Workers,
        /// What they held.
        #[serde(flatten)]
        share: WorkerShare,
    },
    /// Start fewer DataLoader workers, by the kernel's table of processes.
    FewerWorkersOfTable {
        /// The number of workers that is set.
        num_workers: String,
        /// How many there were.
        processes: u32,
        /// Resident memory of the smallest.
        min_rss_bytes: u64,
        /// Resident memory of the largest.
        max_rss_bytes: u64,
    },
    /// Fewer workers save memory of the host.
    FewerWorkersOfHost {
        /// Which.
        #[serde(flatten)]
        workers: Workers,
        /// Their proportional share.
        pss_bytes: u64,
    },
    /// Make trainers smaller.
    SmallerTrainers {
        /// How many.
        processes: u32,
        /// Their proportional share.
        pss_bytes: u64,
        /// What the container held.
        held_bytes: u64,
        /// The number of devices that is set.
        #[serde(skip_serializing_if = "Option::is_none")]
        num_devices: Option<String>,
        /// The batch size that is set.
        #[serde(skip_serializing_if = "Option::is_none")]
        batch_size: Option<String>,
    },
    /// Use less shared memory.
    LessSharedMemory {
        /// Shared memory.
        shmem_bytes: u64,
        /// What the container held.
        held_bytes: u64,
    },
    /// Put less into `/dev/shm`, which counts against the limit.
    LessInDevShm {
        /// Used bytes.
        used_bytes: u64,
        /// Its size.
        size_bytes: u64,
        /// The number of workers that is set.
        #[serde(skip_serializing_if = "Option::is_none")]
        num_workers: Option<String>,
    },
    /// Enlarge `/dev/shm`.
    LargerDevShm {
        /// Used bytes.
        used_bytes: u64,
        /// Its size.
        size_bytes: u64,
    },
    /// Put less into `/dev/shm`, which is full.
    LessInFullDevShm {
        /// The number of workers that is set.
        #[serde(skip_serializing_if = "Option::is_none")]
        num_workers: Option<String>,
    },
    /// SIGBUS is most often a full `/dev/shm`: enlarge it.
    TryLargerDevShm {
        /// Used bytes.
        #[serde(skip_serializing_if = "Option::is_none")]
        used_bytes: Option<u64>,
        /// Its size.
        #[serde(skip_serializing_if = "Option::is_none")]
        size_bytes: Option<u64>,
    },
    /// Rank containers while it happens.
    RankContainers,
    /// Give the guests of virtual machines less.
    SmallerGuests,
    /// Give every container a limit.
    LimitEveryContainer,
    /// See which processes outside containers use most.
    RankHostProcesses,
    /// Limit the largest container.
    LimitLargest {
        /// Its name; `None` if it is the one that was asked for.
        #[serde(skip_serializing_if = "Option::is_none")]
        container: Option<String>,
        /// Nothing outside containers held more.
        is_largest_holder: bool,
    },
    /// Let memledger read the kernel log, and enlarge that.
    KeepKernelLog,
    /// Kubernetes' events have the reason.
    ReadPodEvents {
        /// The namespace.
        namespace: String,
        /// The pod.
        pod: String,
    },
    /// Other senders of SIGKILL.
    FindSender {
        /// It is a run of `memledger run`.
        #[serde(skip)]
        is_run: bool,
    },
    /// The journal has what monitors and the kubelet did at that time.
    ReadJournal {
        /// Unix time of the end.
        #[serde(skip_serializing_if = "Option::is_none")]
        at: Option<f64>,
        /// It is a run of `memledger run`.
        #[serde(skip)]
        is_run: bool,
    },
    /// SIGABRT is how a program ends itself.
    FindAbort,
    /// SIGSEGV of a first process, or its abort().
    FindFaultOrAbort,
    /// A fault in native code.
    FindFault,
    /// The runtime did not send the signal.
    FindSenderOfSignal,
    /// It is not known who sent the signal.
    FindWhoStoppedIt,
    /// Its OOM killer is switched off.
    SwitchOomKillerOn,
    /// It waits at its limit.
    RaiseOrUseLessAtLimit,
}

/// A limit, and how it is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LimitSetting {
    /// Who sets it.
    pub setter: LimitSetter,
    /// The limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// It is one of memory and swap together.
    pub with_swap: bool,
}

/// Workers of a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Workers {
    /// Their role.
    pub role: Role,
    /// Their program, of which a setting is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub program: Option<WorkerProgram>,
    /// How many.
    pub processes: u32,
    /// The number of workers that is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_workers: Option<String>,
}

/// What workers held.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "share", rename_all = "snake_case")]
pub enum WorkerShare {
    /// Their proportional share is not known.
    Unmeasured {
        /// Why.
        #[serde(skip_serializing_if = "Option::is_none")]
        missing: Option<PssMissing>,
    },
    /// All shares together are less than what the container held.
    Unexplained {
        /// Share of each.
        each_bytes: u64,
        /// All shares.
        all_bytes: u64,
        /// What the container held.
        #[serde(skip_serializing_if = "Option::is_none")]
        held_bytes: Option<u64>,
    },
    /// It was measured.
    Measured {
        /// Their share.
        pss_bytes: u64,
        /// What the container held.
        #[serde(skip_serializing_if = "Option::is_none")]
        held_bytes: Option<u64>,
        /// Share of each.
        each_bytes: u64,
        /// How many fit.
        #[serde(flatten)]
        fit: Option<WorkerFit>,
    },
}

/// How many workers fit below a limit, a tenth of it kept free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "fit", rename_all = "snake_case")]
pub enum WorkerFit {
    /// All, by the last sample.
    All,
    /// Less than one for each loader.
    TooFew {
        /// So many.
        fitting_processes: u32,
        /// What the others of the container held.
        others_bytes: u64,
    },
    /// So many.
    Some {
        /// So many.
        fitting_processes: u32,
        /// The number of workers to set, and of loaders that each have so many.
        #[serde(flatten)]
        setting: Option<WorkerSetting>,
    },
}

/// A number of workers to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct WorkerSetting {
    /// For each loader.
    pub fitting_num_workers: u32,
    /// How many loaders there are: one in each rank.
    pub loaders: u32,
}

/// What a log is read for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputPurpose {
    /// Its last lines.
    LastLines,
    /// Its last lines, if the container still exists.
    LastLinesIfExists,
    /// The error.
    Error,
    /// The proof of a full `/dev/shm`.
    FullDevShm,
}

/// Where the output of a container is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "output", rename_all = "snake_case")]
pub enum OutputPlace {
    /// Of a run of `memledger run`: where that wrote it.
    Terminal,
    /// Of a pod.
    Pod {
        /// The namespace.
        namespace: String,
        /// The pod.
        pod: String,
        /// The container.
        container: String,
    },
    /// Of a container of an engine.
    Container {
        /// The engine's command.
        command: &'static str,
        /// Its name or id; `None` if they need quoting in a shell.
        #[serde(skip_serializing_if = "Option::is_none")]
        container: Option<String>,
    },
}
