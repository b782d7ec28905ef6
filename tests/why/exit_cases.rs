//! The part of the table with exits that no kill explains: signals, errors, and errors of GPU memory.

use memledger::diagnose::{Cause, Confidence};
use memledger::discover::RuntimeKind;
use memledger::events::{ContainerRef, CudaOom, Exit, ExitReason, LedgerEvent, OwnGpuProcess, Victim};

use super::cases::Case;
use super::events::*;

/// An exit without a kill.
fn case(
    name: &'static str,
    exit: Exit,
    cause: Cause,
    confidence: Confidence,
    expected: &'static [&'static str],
) -> Case {
    let events = vec![ended(exit)];
    Case { name, events, cause, confidence, expected, not: &["OOM killer killed"], computed: &["3", "12"] }
}

pub fn on_request_and_by_signals() -> Vec<Case> {
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
            &["by SIGSEGV or by abort()", "Node.js at its heap limit", "docker logs --tail 50 4f1c2a9b7d3e"],
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

/// Returns an exit in a runtime that reports no requests to stop.
fn without_requests(runtime: RuntimeKind, exit: Exit) -> Exit {
    let subject = ContainerRef { runtime, ..exit.subject };
    Exit { requests_known: false, subject, ..exit }
}

pub fn by_bus_errors_and_errors() -> Vec<Case> {
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
            &["63.0 MiB of the 64.0 MiB", "would prove it", "Bus error"],
        ),
        case(
            "a hangup from outside",
            exit(ExitReason::Signal, 129, 0.0),
            Cause::EndedBySignal,
            Confidence::Certain,
            &["SIGHUP", "there was no stop request to the runtime"],
        ),
    ]
}

pub fn of_gpu_memory() -> Vec<Case> {
    let case = |name, events, cause, confidence, expected| Case {
        name,
        events,
        cause,
        confidence,
        expected,
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
                "tried to allocate 20.00 GiB on GPU 0 in model/forward, where 2.00 GiB of 12.00 GiB were free",
                "BATCH_SIZE=16 ACCUM=2 keeps the effective batch of 32",
                "memledger advise",
            ],
        ),
        case(
            "in pieces",
            ended_by(CudaOom { tried_bytes: Some(5 * GIB), ..cuda_oom() }),
            Cause::CudaOomFragmented,
            Confidence::Certain,
            &["6.00 GiB in free pieces", "expandable_segments:True"],
        ),
        case(
            "another holder",
            ended_by(CudaOom {
                tried_bytes: Some(9 * GIB),
                inactive_split_bytes: Some(0),
                holders: vec![gpu_holder("jupyter", false, 8), gpu_holder("piper1-gpl-train-1", true, 2)],
                holders_at: None,
                ..cuda_oom()
            }),
            Cause::CudaOomOtherHolder,
            Confidence::Certain,
            &["Others held 8.0 GiB of that GPU", "end what else is on it: jupyter 8.0 GiB"],
        ),
        case(
            "other ranks on the same GPU",
            ended_by(CudaOom {
                tried_bytes: Some(9 * GIB),
                inactive_split_bytes: Some(0),
                own_processes: vec![OwnGpuProcess { pid: 4_712, bytes: 8 * GIB }],
                ..cuda_oom()
            }),
            Cause::CudaOomOwnProcesses,
            Confidence::Certain,
            &["Other processes of this container held 8.0 GiB", "its own GPU", "pid 4712 8.0 GiB"],
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

pub fn normal_or_unknown() -> Vec<Case> {
    vec![
        case(
            "an error",
            exit(ExitReason::Error, 1, 0.0),
            Cause::ErrorExit,
            Confidence::Certain,
            &["exit code 1", "its own error", "CUDA"],
        ),
        case(
            "an error without a ledger, where the kernel log could not be read",
            Exit { before_counting: true, kernel_log_read: false, ..exit(ExitReason::Error, 1, 0.0) },
            Cause::ErrorExit,
            Confidence::Unsure,
            &["The kernel log could not be read for that time", "if a child of it was OOM-killed"],
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
                kernel_log_read: false,
                reason: Some(ExitReason::Unknown),
                runtime_oom_flag: Some(true),
                ..exit(ExitReason::Unknown, 137, 0.0)
            },
            Cause::OomFlagOnly,
            Confidence::Likely,
            &[
                "OOMKilled is set. No record of the kill could be read",
                "the limit are not known",
                "docker logs --tail 50",
            ],
        ),
        case(
            "SIGKILL before the oldest record",
            Exit {
                kernel_log_read: false,
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
            Exit { requests_known: false, ..exit(ExitReason::Killed, 137, 0.0) },
            Cause::KilledOutside,
            Confidence::Likely,
            &["NOT an OOM kill", "whether it was told to stop is not known"],
        ),
        case(
            "SIGKILL in a pod",
            without_requests(RuntimeKind::Cri, exit(ExitReason::Killed, 137, 0.0)),
            Cause::KilledOutside,
            Confidence::Likely,
            &["NOT an OOM kill", "pods report no stop requests, as of a deletion"],
        ),
        case(
            "SIGTERM in a pod",
            without_requests(RuntimeKind::Cri, exit(ExitReason::Signal, 143, 0.0)),
            Cause::EndedBySignal,
            Confidence::Certain,
            &["by SIGTERM; whether it was told to stop is not known", "a deletion or an eviction of its pod"],
        ),
        case(
            "SIGTERM with Podman",
            without_requests(RuntimeKind::Podman, exit(ExitReason::Signal, 143, 0.0)),
            Cause::EndedBySignal,
            Confidence::Certain,
            &["Podman reports no stop requests"],
        ),
        case(
            "a request long before kill -9",
            Exit { stop_signals: vec![Some(15)], ..exit(ExitReason::Killed, 137, 0.0) },
            Cause::KilledOutside,
            Confidence::Certain,
            &["no stop request shortly before explains it"],
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
