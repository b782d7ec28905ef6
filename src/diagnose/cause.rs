//! The causes, and how certain one is.

use serde::Serialize;

/// The cause as an identifier. A closed set: scripts may rely on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Own limit: an OOM kill ended the container.
    OomLimitMain,
    /// Own limit: a child was killed, such as a DataLoader worker, and the container kept running.
    OomLimitWorker,
    /// Own limit: a child was killed, and soon after the container ended with an error.
    OomLimitWorkerThenExit,
    /// Own limit: a process was killed, and whether that ended the container is not known.
    OomLimit,
    /// Own limit, and most of the used memory was shared memory.
    OomLimitShm,
    /// The limit of a cgroup above the container: of a pod or a slice.
    OomParentLimit,
    /// The host ran out of memory.
    OomHost,
    /// The NUMA nodes that the program may use ran out of memory.
    OomNodes,
    /// An operator or a program requested the kill by sysrq.
    OomSysrq,
    /// An OOM kill known only from counters: the kernel's record is missing.
    OomUnnamed,
    /// Only the runtime's OOMKilled flag is left of an OOM kill.
    OomFlagOnly,
    /// An OOM kill of a process outside containers, because the host ran out of memory.
    OomHostProcess,
    /// The limit of a cgroup outside the containers of runtimes: of a service, a job, a session, or a container of LXC.
    OomCgroupLimit,
    /// A limit or the host's memory was reached, and no process could be killed.
    OomNoVictim,
    /// The kernel panicked instead of killing a process (`vm.panic_on_oom`).
    OomPanic,
    /// An OOM kill without a known owner.
    OomUnattributed,
    /// The container's `/dev/shm` was full or nearly full at its exit.
    ShmFull,
    /// SIGKILL without a stop request and without an OOM kill.
    KilledOutside,
    /// A stop request (`docker stop`).
    Stopped,
    /// A kill request (`docker kill`, `docker rm -f`).
    KilledByRequest,
    /// A signal that indicates a crash: SIGSEGV, SIGABRT, SIGBUS and similar.
    CrashedSignal,
    /// Another signal, without a stop request.
    EndedBySignal,
    /// Exit code other than 0.
    ErrorExit,
    /// The program ran out of GPU memory.
    CudaOom,
    /// The same, though enough was free, in pieces.
    CudaOomFragmented,
    /// The same, and without the other holders of the GPU there would have been enough.
    CudaOomOtherHolder,
    /// The same, and without other processes of the container there would have been enough.
    CudaOomOwnProcesses,
    /// The same, and the GPU had enough: the process may take only a part of it.
    CudaOomOwnShare,
    /// The program ran out of GPU memory, and the container runs on.
    CudaOomSurvived,
    /// A monitor killed it before the kernel would: systemd-oomd, Ray.
    KilledByMonitor,
    /// An allocation of host memory failed, and nothing was killed.
    AllocationFailed,
    /// A limit of the program's own was reached: a heap, a `memory_limit`.
    OwnLimit,
    /// A thread or a process was refused.
    ThreadsRefused,
    /// The container is at its limit, and its processes wait for memory.
    AtLimit,
    /// Its start failed.
    NeverStarted,
    /// The host was restarted.
    HostRestart,
    /// Exit code 0.
    Completed,
    /// It exited, and the reason is not recorded.
    Unknown,
    /// No event is recorded.
    Nothing,
}

impl Cause {
    /// All causes.
    pub const ALL: [Cause; 39] = [
        Cause::OomLimitMain,
        Cause::OomLimitWorker,
        Cause::OomLimitWorkerThenExit,
        Cause::OomLimit,
        Cause::OomLimitShm,
        Cause::OomParentLimit,
        Cause::OomHost,
        Cause::OomNodes,
        Cause::OomSysrq,
        Cause::OomUnnamed,
        Cause::OomFlagOnly,
        Cause::OomHostProcess,
        Cause::OomCgroupLimit,
        Cause::OomNoVictim,
        Cause::OomPanic,
        Cause::OomUnattributed,
        Cause::ShmFull,
        Cause::KilledOutside,
        Cause::Stopped,
        Cause::KilledByRequest,
        Cause::CrashedSignal,
        Cause::EndedBySignal,
        Cause::ErrorExit,
        Cause::CudaOom,
        Cause::CudaOomFragmented,
        Cause::CudaOomOtherHolder,
        Cause::CudaOomOwnProcesses,
        Cause::CudaOomOwnShare,
        Cause::CudaOomSurvived,
        Cause::KilledByMonitor,
        Cause::AllocationFailed,
        Cause::OwnLimit,
        Cause::ThreadsRefused,
        Cause::AtLimit,
        Cause::NeverStarted,
        Cause::HostRestart,
        Cause::Completed,
        Cause::Unknown,
        Cause::Nothing,
    ];
}

/// How certain the cause is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Confidence {
    /// Reported by the kernel or the runtime.
    Certain,
    /// Consistent with all evidence, but some evidence is missing.
    Likely,
    /// Not decidable; the text says what is missing.
    Unsure,
}

/// Returns true if the cause is an error of GPU memory.
pub fn is_cuda_oom(cause: Cause) -> bool {
    use Cause::{
        CudaOom, CudaOomFragmented, CudaOomOtherHolder, CudaOomOwnProcesses, CudaOomOwnShare, CudaOomSurvived,
    };
    matches!(
        cause,
        CudaOom
            | CudaOomFragmented
            | CudaOomOtherHolder
            | CudaOomOwnProcesses
            | CudaOomOwnShare
            | CudaOomSurvived
    )
}
