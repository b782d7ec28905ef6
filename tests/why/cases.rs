//! The table of events, and the verdicts that they permit.

use std::sync::Arc;

use memledger::ledger::events::Kill;
use memledger::ledger::events::{
    CudaOom, Exit, ExitReason, LedgerEvent, OomReport, PriorUsage, UsageSample, Victim,
};
use memledger::ledger::host_history::FIRST_ID;
use memledger::ledger::why::{Cause, Confidence};

use super::events::*;

/// One row of the table.
pub struct Case {
    pub name: &'static str,
    pub events: Vec<LedgerEvent>,
    pub cause: Cause,
    pub confidence: Confidence,
    /// Texts of the sentence and of the advice.
    pub says: &'static [&'static str],
    /// Texts that would claim too much.
    pub not: &'static [&'static str],
    /// Figures that are computed from the events, each verified by hand.
    pub computed: &'static [&'static str],
}

/// Returns the whole table.
pub fn all() -> Vec<Case> {
    let parts: [fn() -> Vec<Case>; 12] = [
        at_its_own_limit,
        at_its_limit_with_less_known,
        with_what_filled_the_limit,
        with_processes_of_the_report,
        at_the_limit_of_another_cgroup,
        in_pods_and_nested_and_on_the_host,
        with_records_lost_or_none,
        beside_unattributed_kill,
        on_request_and_by_signals,
        by_bus_errors_and_errors,
        of_gpu_memory,
        normal_or_unknown,
    ];
    parts.iter().flat_map(|part| part()).collect()
}

fn at_its_own_limit() -> Vec<Case> {
    vec![
        Case {
            name: "first process at its limit",
            events: vec![killed(trainer(Victim::Main)), ended(exit(ExitReason::OomContainer, 137, 0.3))],
            cause: Cause::OomLimitMain,
            confidence: Confidence::Certain,
            says: &[
                "python3",
                "limit of 44.0 GiB",
                "ended the container with exit code 137",
                "Smaller trainers",
                "40.0 GiB",
                "20.0 GiB each",
                "BATCH_SIZE is 32",
                "raise the memory limit (--memory, mem_limit; now 44.0 GiB)",
                "Page cache (20.0 GiB) is not the cause",
            ],
            not: &["Fewer NUM_WORKERS", "grew from"],
            computed: &["20.0", "2"],
        },
        Case {
            name: "worker at the limit, the container keeps running",
            events: vec![killed(kill(Victim::Child))],
            cause: Cause::OomLimitWorker,
            confidence: Confidence::Certain,
            // 44 - 4.4 - 9.5 = 30.1 GiB available, 34 / 8 = 4.25 GiB each: 7 workers, that is 3 for each of 2 loaders
            says: &[
                "DataLoader worker",
                "the container kept running",
                "Fewer NUM_WORKERS (now 4)",
                "8 DataLoader workers held 34.0 GiB",
                "4.2 GiB each",
                "7 fit: NUM_WORKERS=3",
                "2 loaders",
            ],
            not: &["ended the container", "age cache"],
            computed: &["4.2", "7", "3", "2", "8", "4"],
        },
        Case {
            name: "worker at the limit, then an error",
            events: vec![killed(kill(Victim::Child)), ended(exit(ExitReason::Error, 1, 72.0))],
            cause: Cause::OomLimitWorkerThenExit,
            confidence: Confidence::Certain,
            says: &["kept running and ended 1 min 12 s later with exit code 1", "NUM_WORKERS"],
            not: &["that ended the container"],
            computed: &["4.2", "7", "3", "2", "1", "12"],
        },
    ]
}

fn at_its_limit_with_less_known() -> Vec<Case> {
    vec![
        Case {
            name: "worker at the limit without shares",
            events: vec![killed(Kill {
                before: Some(Arc::new(PriorUsage {
                    roles: vec![role("dataloader_worker", 8, None)],
                    ..before(42 * GIB, 43 * GIB, Some(44 * GIB))
                })),
                ..kill(Victim::Child)
            })],
            cause: Cause::OomLimitWorker,
            confidence: Confidence::Certain,
            says: &["the memory of each is not known", "CAP_SYS_PTRACE"],
            not: &[" each (", " fit", "70.0 GiB"],
            computed: &[],
        },
        Case {
            name: "worker at the limit, nothing recorded before",
            events: vec![killed(Kill { before: None, limit_bytes: None, ..kill(Victim::Child) })],
            cause: Cause::OomLimitWorker,
            confidence: Confidence::Certain,
            says: &["reached its memory limit;", "Raise the memory limit (--memory, mem_limit). "],
            not: &["NUM_WORKERS", "page cache", "grew", "now"],
            computed: &[],
        },
        Case {
            name: "shared memory at the limit",
            events: vec![killed(shared())],
            cause: Cause::OomLimitShm,
            confidence: Confidence::Certain,
            says: &[
                "30.0 GiB of the 43.0 GiB",
                "29.0 GiB of 32.0 GiB",
                "--shm-size does not help",
                "NUM_WORKERS (now 4)",
            ],
            not: &["A larger --shm-size (Compose"],
            computed: &[],
        },
    ]
}

/// A kill with the kernel's report.
fn reported(
    name: &'static str,
    kill: Kill,
    cause: Cause,
    says: &'static [&'static str],
    not: &'static [&'static str],
) -> Case {
    let computed = &["4.2", "7", "3", "2", "4", "8"];
    Case { name, events: vec![killed(kill)], cause, confidence: Confidence::Certain, says, not, computed }
}

fn with_what_filled_the_limit() -> Vec<Case> {
    let with = |change: fn(&mut OomReport)| with_report(Kill { before: None, ..kill(Victim::Child) }, change);
    vec![
        reported(
            "anonymous memory filled the limit",
            with(|_| {}),
            Cause::OomLimitWorker,
            &["Anonymous memory of programs filled the limit: 42.0 GiB of 44.0 GiB", "now 44.0 GiB"],
            &["grew", "age cache", "Swap", "swap", "contiguous"],
        ),
        reported(
            "page cache filled the limit",
            with(|report| {
                (report.anon_bytes, report.file_bytes, report.dirty_bytes) =
                    (Some(GIB), Some(42 * GIB), Some(40 * GIB))
            }),
            Cause::OomLimitWorker,
            &["Page cache filled the limit: 42.0 GiB of 44.0 GiB", "40.0 GiB of it waited to be written"],
            &["Page cache (", "Anonymous memory of programs"],
        ),
        reported(
            "shared memory filled the limit, and no sample shows where",
            with(|report| (report.anon_bytes, report.shmem_bytes) = (Some(GIB), Some(42 * GIB))),
            Cause::OomLimitShm,
            &["Shared memory filled the limit: 42.0 GiB", "tmpfs, in a memfd or in other shared memory"],
            &["/dev/shm"],
        ),
        reported(
            "shared memory filled the limit, in /dev/shm",
            with_report(shared(), |report| {
                (report.anon_bytes, report.shmem_bytes) = (Some(GIB), Some(42 * GIB));
            }),
            Cause::OomLimitShm,
            &[
                "Shared memory filled the limit: 42.0 GiB",
                "At the last sample 29.0 GiB of it were in /dev/shm",
            ],
            &["memfd", "30.0 GiB of the 43.0 GiB"],
        ),
        reported(
            "memory of the kernel filled the limit",
            with(|report| (report.anon_bytes, report.kernel_bytes) = (Some(GIB), Some(42 * GIB))),
            Cause::OomLimitWorker,
            &["Memory of the kernel filled the limit: 42.0 GiB of 44.0 GiB", "sockets"],
            &["Anonymous memory of programs"],
        ),
        reported(
            "swap was exhausted",
            with(|report| (report.swap_bytes, report.swap_limit_bytes) = (Some(2 * GIB), Some(2 * GIB))),
            Cause::OomLimitWorker,
            &["Swap was exhausted: 2.0 GiB of 2.0 GiB used"],
            &["may use no swap"],
        ),
        reported(
            "no swap, and a part of the report is missing",
            with(|report| (report.swap_limit_bytes, report.incomplete) = (Some(0), true)),
            Cause::OomLimitWorker,
            &["may use no swap", "Part of the kernel's report is missing"],
            &["Swap was exhausted"],
        ),
    ]
}

fn with_processes_of_the_report() -> Vec<Case> {
    let with = |change: fn(&mut OomReport)| with_report(Kill { before: None, ..kill(Victim::Child) }, change);
    let of_host = |change: fn(&mut OomReport)| {
        let kill = Kill { oom_score_adj: Some(0), ..of_host() };
        with_report(kill, |report| {
            (report.host, report.free_bytes) = (true, Some(300 * MIB));
            change(report);
        })
    };
    vec![
        reported(
            "one process held most",
            with(|report| report.processes = vec![row(22_212, "python3", 40), row(2, "sh", 1)]),
            Cause::OomLimitWorker,
            &["One process held most of it: python3 (pid 22212), the victim, with 40.0 GiB resident"],
            &["alike", "not the largest"],
        ),
        reported(
            "many are alike",
            with(|report| {
                report.processes = (0..8).map(|at| row(22_212 - at, "pt_data_worker", 6)).collect()
            }),
            Cause::OomLimitWorker,
            &["8 DataLoader workers were alike, with 6.0 GiB resident each", "fewer NUM_WORKERS"],
            &["48", "One process"],
        ),
        reported(
            "the victim was not the largest",
            with(|report| {
                report.processes = vec![row(1, "python3", 20), row(22_212, "pt_data_worker", 5)];
                report.processes[0].oom_score_adj = Some(-900);
            }),
            Cause::OomLimitWorker,
            &[
                "The victim was not the largest: python3 (pid 1) held 20.0 GiB, the victim 5.0 GiB",
                "is -900, the victim's is 0",
            ],
            &["One process"],
        ),
        reported(
            "free memory in pieces",
            of_host(|report| report.order = Some(3)),
            Cause::OomHost,
            &["for 8 contiguous pages (order 3)", "300.0 MiB that were free"],
            &["Largest holders of the machine"],
        ),
        reported(
            "requested by sysrq",
            of_host(|report| report.order = Some(-1)),
            Cause::OomSysrq,
            &["that was requested by sysrq", "memory need not have run out"],
            &["ran out of memory;", "contiguous", "Set a memory limit"],
        ),
        reported(
            "not known whether it ended the container",
            with_report(Kill { victim: None, before: None, ..kill(Victim::Child) }, |_| {}),
            Cause::OomLimit,
            &["no end of the container is recorded"],
            &["kept running", "that ended the container"],
        ),
    ]
}

fn at_the_limit_of_another_cgroup() -> Vec<Case> {
    vec![
        Case {
            name: "the limit of a slice",
            events: vec![
                killed(Kill {
                    limit_cgroup: "/training.slice".into(),
                    limit_bytes: Some(100 * GIB),
                    ..kill(Victim::Main)
                }),
                ended(exit(ExitReason::OomContainer, 137, 0.2)),
            ],
            cause: Cause::OomParentLimit,
            confidence: Confidence::Certain,
            says: &[
                "the cgroup /training.slice above it reached its memory limit of 100.0 GiB",
                "Raise the limit of /training.slice (now 100.0 GiB)",
                "MemoryMax",
            ],
            not: &["the container reached"],
            computed: &["8"],
        },
        Case {
            name: "a limit that is not named, and the container has none",
            events: vec![killed(Kill {
                limit_cgroup: "".into(),
                limit_bytes: None,
                before: Some(Arc::new(PriorUsage {
                    samples: vec![UsageSample {
                        at: AT - 4.0,
                        effective_limit_bytes: Some(9 * GIB),
                        ..UsageSample::default()
                    }],
                    ..PriorUsage::default()
                })),
                ..kill(Victim::Child)
            })],
            cause: Cause::OomParentLimit,
            confidence: Confidence::Likely,
            says: &["a cgroup above the container reached its memory limit;"],
            not: &["because the container reached", "0 B"],
            computed: &[],
        },
    ]
}

fn in_pods_and_nested_and_on_the_host() -> Vec<Case> {
    vec![
        Case {
            name: "the limit of a pod",
            events: vec![killed(in_a_pod())],
            cause: Cause::OomParentLimit,
            confidence: Confidence::Certain,
            says: &[
                "the cgroup /kubepods.slice/kubepods-pod1.slice above it",
                "resources.limits.memory",
                "QoS class",
                "936/1000 of the memory larger",
            ],
            not: &["docker run"],
            computed: &["8"],
        },
        Case {
            name: "a limit inside the container",
            events: vec![killed(Kill {
                limit_cgroup: format!("/docker/{ID}/job").into(),
                oom_score_adj: Some(-500),
                ..kill(Victim::Child)
            })],
            cause: Cause::OomLimitWorker,
            confidence: Confidence::Certain,
            says: &[
                "the cgroup /job inside it reached its memory limit",
                "which was set inside the container",
                "500/1000 of the memory smaller",
            ],
            not: &["because the container reached"],
            computed: &["4.2", "7", "3", "2", "500"],
        },
        Case {
            name: "the machine ran out",
            events: vec![killed(of_host())],
            cause: Cause::OomHost,
            confidence: Confidence::Certain,
            says: &[
                "the whole machine ran out of memory",
                "Largest holders of the machine's 62.0 GiB at the last sample: notebook 38.0 GiB, piper1-gpl-train-1 (this one) 20.0 GiB",
                "Set a memory limit on notebook",
                "oom_score_adj 800",
                "800/1000",
            ],
            not: &["its memory limit of", "the container reached"],
            computed: &[],
        },
    ]
}

fn with_records_lost_or_none() -> Vec<Case> {
    vec![
        Case {
            name: "a gap",
            events: vec![killed(Kill {
                kernel_usec: None,
                pid: None,
                process: "".into(),
                role: "".into(),
                anon_bytes: None,
                victim: None,
                ..kill(Victim::Child)
            })],
            cause: Cause::OomUnnamed,
            confidence: Confidence::Likely,
            says: &[
                "the kernel's record was lost",
                "so its name and size are not known",
                "no end of the container is recorded",
                "log_buf_len",
            ],
            not: &["pt_data_worker", "kept running"],
            computed: &["1"],
        },
        Case {
            name: "the event of the kill was removed",
            events: vec![ended(Exit { oom_kills: 1, ..exit(ExitReason::OomContainer, 137, 0.0) })],
            cause: Cause::OomLimitMain,
            confidence: Confidence::Likely,
            says: &["the kill's own record is not in the ledger", "counted 1 OOM kill"],
            not: &[],
            computed: &["0", "3", "12"],
        },
        Case {
            name: "137 without an OOM",
            events: vec![ended(exit(ExitReason::Killed, 137, 0.0))],
            cause: Cause::KilledOutside,
            confidence: Confidence::Certain,
            says: &["NOT an OOM", "docker stop", "kubelet", "systemd-oomd", "earlyoom", "person"],
            not: &["memory limit of"],
            computed: &["3", "12"],
        },
        Case {
            name: "137 without an OOM, and the runtime's flag says otherwise",
            events: vec![ended(Exit { runtime_oom_flag: Some(true), ..exit(ExitReason::Killed, 137, 0.0) })],
            cause: Cause::KilledOutside,
            confidence: Confidence::Likely,
            says: &["NOT an OOM"],
            not: &[],
            computed: &["3", "12"],
        },
        Case {
            name: "137 while the kernel log could not be read",
            events: vec![ended(Exit { kernel_log_read: false, ..exit(ExitReason::Killed, 137, 0.0) })],
            cause: Cause::KilledOutside,
            confidence: Confidence::Likely,
            says: &["could not be read"],
            not: &["NOT an OOM"],
            computed: &["3", "12"],
        },
    ]
}

fn beside_unattributed_kill() -> Vec<Case> {
    vec![
        Case {
            name: "137 beside an unattributed kill",
            events: vec![killed(unattributed()), ended(exit(ExitReason::Killed, 137, 0.0))],
            cause: Cause::Unknown,
            confidence: Confidence::Unsure,
            says: &["of an unknown container", "it may have been"],
            not: &["NOT an OOM"],
            computed: &["3", "12", "5"],
        },
        Case {
            name: "an error beside an unattributed kill",
            events: vec![killed(unattributed()), ended(exit(ExitReason::Error, 1, 0.0))],
            cause: Cause::ErrorExit,
            confidence: Confidence::Unsure,
            says: &["of an unknown container", "if it was a child of this one"],
            not: &["No OOM kill"],
            computed: &["3", "12", "5"],
        },
    ]
}

/// An exit without a kill.
fn case(
    name: &'static str,
    exit: Exit,
    cause: Cause,
    confidence: Confidence,
    says: &'static [&'static str],
) -> Case {
    let events = vec![ended(exit)];
    Case { name, events, cause, confidence, says, not: &["OOM killer killed"], computed: &["3", "12"] }
}

fn on_request_and_by_signals() -> Vec<Case> {
    let asked_twice = |exit| Exit { stop_signals: vec![Some(15), Some(9)], ..exit };
    vec![
        case(
            "docker stop",
            stop_request(exit(ExitReason::Stopped, 143, 0.0), 15),
            Cause::Stopped,
            Confidence::Certain,
            &["SIGTERM", "exit code 143", "stop request"],
        ),
        case(
            "docker stop that reached its timeout",
            asked_twice(exit(ExitReason::Stopped, 137, 0.0)),
            Cause::Stopped,
            Confidence::Certain,
            &["did not exit on SIGTERM", "killed it after the stop timeout"],
        ),
        case(
            "docker kill",
            stop_request(exit(ExitReason::Stopped, 137, 0.0), 9),
            Cause::KilledByRequest,
            Confidence::Certain,
            &["kill request to the runtime"],
        ),
        case(
            "a segmentation fault",
            exit(ExitReason::Signal, 139, 0.0),
            Cause::CrashedSignal,
            Confidence::Certain,
            &["SIGSEGV", "not a lack of memory", "docker logs --tail 50 4f1c2a9b7d3e"],
        ),
        case(
            "an abort",
            exit(ExitReason::Signal, 134, 0.0),
            Cause::CrashedSignal,
            Confidence::Certain,
            &["SIGABRT", "bad_alloc"],
        ),
    ]
}

fn by_bus_errors_and_errors() -> Vec<Case> {
    vec![
        case(
            "a bus error",
            exit(ExitReason::Signal, 135, 0.0),
            Cause::CrashedSignal,
            Confidence::Certain,
            &["SIGBUS", "--shm-size (now 64.0 MiB, 20.0 MiB of it in use"],
        ),
        case(
            "a bus error with a full /dev/shm",
            with_shm(exit(ExitReason::Signal, 135, 0.0), 63 * MIB),
            Cause::ShmFull,
            Confidence::Likely,
            &[
                "SIGBUS",
                "63.0 MiB of the 64.0 MiB",
                "larger --shm-size",
                "ipc=host",
                "fewer NUM_WORKERS (now 4)",
            ],
        ),
        case(
            "an error with a full /dev/shm",
            with_shm(exit(ExitReason::Error, 1, 0.0), 63 * MIB),
            Cause::ShmFull,
            Confidence::Likely,
            &["63.0 MiB of the 64.0 MiB", "which would prove it", "Bus error"],
        ),
        case(
            "a hangup from outside",
            exit(ExitReason::Signal, 129, 0.0),
            Cause::EndedBySignal,
            Confidence::Certain,
            &["SIGHUP", "without a stop request"],
        ),
    ]
}

fn of_gpu_memory() -> Vec<Case> {
    let case = |name, events, cause, confidence, says| Case {
        name,
        events,
        cause,
        confidence,
        says,
        not: &["container's log"],
        computed: &[],
    };
    let ended_by = |oom: CudaOom| vec![LedgerEvent::CudaOom(oom), ended(exit(ExitReason::CudaOom, 1, 2.0))];
    vec![
        case(
            "more than there was",
            ended_by(cuda_oom()),
            Cause::CudaOom,
            Confidence::Certain,
            &[
                "2 s after a CUDA out-of-memory error",
                "tried to allocate 20.0 GiB on GPU 0 in model/forward, where 2.0 GiB of 12.0 GiB were free",
                "BATCH_SIZE=16 ACCUM=2 keeps the effective batch of 32",
                "memledger advise",
            ],
        ),
        case(
            "in pieces",
            ended_by(CudaOom { tried_bytes: Some(5 * GIB), ..cuda_oom() }),
            Cause::CudaOomFragmented,
            Confidence::Certain,
            &["6.0 GiB in free pieces", "expandable_segments:True"],
        ),
        case(
            "another holder",
            ended_by(CudaOom {
                tried_bytes: Some(9 * GIB),
                inactive_split_bytes: Some(0),
                holders: vec![gpu_holder("jupyter", false, 8), gpu_holder("piper1-gpl-train-1", true, 2)],
                ..cuda_oom()
            }),
            Cause::CudaOomOtherHolder,
            Confidence::Certain,
            &["Others held 8.0 GiB of that GPU", "end what else is on it: jupyter 8.0 GiB"],
        ),
        case(
            "its own share",
            ended_by(CudaOom { tried_bytes: Some(3 * GIB), free_bytes: Some(11 * GIB), ..cuda_oom() }),
            Cause::CudaOomOwnShare,
            Confidence::Certain,
            &["may take only a part of it", "Raise the share"],
        ),
        case(
            "a caught one just before an error",
            ended_by(CudaOom { uncaught: Some(false), ..cuda_oom() }),
            Cause::CudaOom,
            Confidence::Likely,
            &["2 s after"],
        ),
        case(
            "a survived one",
            vec![LedgerEvent::CudaOom(CudaOom { uncaught: Some(false), ..cuda_oom() })],
            Cause::CudaOomSurvived,
            Confidence::Certain,
            &["ran out of GPU memory", "No end of the container is recorded"],
        ),
        case(
            "a worker that was killed long before it",
            vec![
                killed(kill(Victim::Child)),
                LedgerEvent::CudaOom(CudaOom { at: AT + 60.0, ..cuda_oom() }),
                ended(exit(ExitReason::CudaOom, 1, 61.0)),
            ],
            Cause::CudaOom,
            Confidence::Certain,
            &["1 s after a CUDA out-of-memory error"],
        ),
        case(
            "one that the ledger has no more",
            vec![ended(exit(ExitReason::CudaOom, 1, 0.0))],
            Cause::CudaOom,
            Confidence::Likely,
            &["not in the ledger (any more)"],
        ),
    ]
}

fn normal_or_unknown() -> Vec<Case> {
    vec![
        case(
            "an error",
            exit(ExitReason::Error, 1, 0.0),
            Cause::ErrorExit,
            Confidence::Certain,
            &["exit code 1", "its own error", "CUDA"],
        ),
        case(
            "the host was restarted",
            exit(ExitReason::HostRestart, 255, 0.0),
            Cause::HostRestart,
            Confidence::Certain,
            &["the host was restarted or lost power"],
        ),
        case(
            "completed",
            exit(ExitReason::Completed, 0, 0.0),
            Cause::Completed,
            Confidence::Certain,
            &["exit code 0 after 3 h 12 min", "without an error"],
        ),
        case(
            "no runtime",
            Exit { exit_code: None, reason: Some(ExitReason::Unknown), ..exit(ExitReason::Unknown, 0, 0.0) },
            Cause::Unknown,
            Confidence::Unsure,
            &["for a reason that is not recorded"],
        ),
        case(
            "only the runtime's flag is left",
            Exit {
                id: FIRST_ID,
                reason: Some(ExitReason::Unknown),
                runtime_oom_flag: Some(true),
                ..exit(ExitReason::Unknown, 137, 0.0)
            },
            Cause::OomFlagOnly,
            Confidence::Likely,
            &[
                "OOMKilled is set, and nothing else is left",
                "the limit are not known",
                "docker logs --tail 50",
            ],
        ),
        case(
            "SIGKILL before the oldest record",
            Exit {
                id: FIRST_ID,
                reason: Some(ExitReason::Unknown),
                runtime_oom_flag: Some(false),
                ..exit(ExitReason::Unknown, 137, 0.0)
            },
            Cause::Unknown,
            Confidence::Unsure,
            &["No record of an OOM kill at that time could be read", "may have been one or not"],
        ),
        case(
            "SIGKILL that no ledger has recorded",
            Exit { id: FIRST_ID, ..exit(ExitReason::Killed, 137, 0.0) },
            Cause::KilledOutside,
            Confidence::Likely,
            &["NOT an OOM kill", "no stop request is known any more"],
        ),
        case(
            "evidence may still arrive",
            Exit { reason: None, ..exit(ExitReason::Unknown, 137, 0.0) },
            Cause::Unknown,
            Confidence::Unsure,
            &["may still arrive"],
        ),
    ]
}
