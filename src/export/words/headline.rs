//! The headline of a diagnosis.

use super::place::noun;
use super::{Noun, log_error, refusal};
use crate::diagnose::{Cause, Headline, LaterEnd};
use crate::discover::RuntimeKind;
use crate::text::{bytes, lasted};

/// Returns the headline.
pub(super) fn title(cause: Cause, headline: Option<&Headline>, noun: Noun, runtime: RuntimeKind) -> String {
    let own = headline.and_then(|headline| of_headline(cause, headline, noun, runtime));
    own.unwrap_or_else(|| of_cause(cause, noun).to_owned())
}

fn of_headline(cause: Cause, headline: &Headline, noun: Noun, runtime: RuntimeKind) -> Option<String> {
    Some(match headline {
        Headline::AfterKill { own_limit_bytes, pod, is_child, end, seconds } => {
            let limit = own_limit_bytes.map_or_else(String::new, |limit| format!(" of {}", bytes(limit)));
            let memory = match (cause, pod) {
                (Cause::OomLimitShm, _) => {
                    format!("OUT OF MEMORY at its own limit{limit}, mostly by shared memory")
                }
                (Cause::OomLimitWorker | Cause::OomLimitWorkerThenExit | Cause::OomLimit, _) => {
                    format!("OUT OF MEMORY at its own limit{limit}")
                }
                (_, Some(pod)) => at_limit_of(pod),
                (_, None) => of_cause(cause, noun).to_owned(),
            };
            let the = noun.the();
            let after = match is_child {
                true => format!("a child was killed; {the} went on and"),
                false => format!("a process was killed; {the}"),
            };
            format!("{memory}: {after} {}", ended(*end, *seconds))
        }
        Headline::AtLimitOf(pod) => at_limit_of(pod),
        Headline::NoProcess { is_running: true } => {
            format!("NO PROCESS LEFT, and {runtime} says that it runs")
        }
        Headline::NoProcess { is_running: false } => {
            format!("NO PROCESS LEFT, and {runtime} cannot be queried")
        }
        Headline::KilledBy { killer } => format!("KILLED by {killer}"),
        Headline::Refusal(kind) => refusal::headline(kind)?.to_owned(),
        Headline::LoggedError(error) => log_error::headline(*error)?.to_owned(),
    })
}

fn at_limit_of(pod: &crate::diagnose::CgroupPlace) -> String {
    format!("OUT OF MEMORY at {}", noun(pod))
}

/// Returns how the container ended, and how long after the kill.
fn ended(end: LaterEnd, seconds: f64) -> String {
    let later = match seconds {
        seconds if seconds < 1.0 => "right after".to_owned(),
        seconds => format!("{} later", lasted(seconds)),
    };
    match end {
        LaterEnd::KillRequest => format!("was killed on request, {later}"),
        LaterEnd::StopRequest => format!("was stopped on request, {later}"),
        LaterEnd::ExitCode(Some(code)) => format!("ended with {code}, {later}"),
        LaterEnd::ExitCode(None) => format!("ended, {later}"),
    }
}

/// Returns the headline of a cause.
fn of_cause(cause: Cause, noun: Noun) -> &'static str {
    match cause {
        Cause::OomLimitMain => match noun {
            Noun::Container => "OUT OF MEMORY at its own limit: the container was ended",
            Noun::Run => "OUT OF MEMORY at its own limit: the run was ended",
        },
        Cause::OomLimitWorker => "OUT OF MEMORY at its own limit: a child process was killed",
        Cause::OomLimitWorkerThenExit => "OUT OF MEMORY at its own limit: a child was killed, then it ended",
        Cause::OomLimit => "OUT OF MEMORY at its own limit: a process was killed",
        Cause::OomLimitShm => "OUT OF MEMORY at its own limit, mostly by shared memory",
        Cause::OomParentLimit => "OUT OF MEMORY at the limit of a cgroup above it",
        Cause::OomHost => "OUT OF MEMORY of the whole machine",
        Cause::OomNodes => "OUT OF MEMORY of the NUMA nodes that may be used",
        Cause::OomSysrq => "KILLED by the kernel's OOM killer on request (sysrq)",
        Cause::OomUnnamed => "OUT OF MEMORY, known from the kernel's counters only",
        Cause::OomFlagOnly => "OUT OF MEMORY, without a record of the kill",
        Cause::OomHostProcess => "OUT OF MEMORY: a process outside containers was killed",
        Cause::OomCgroupLimit => "OUT OF MEMORY at the limit of its cgroup",
        Cause::OomNoVictim => "OUT OF MEMORY, and no process may be killed",
        Cause::OomPanic => "OUT OF MEMORY: the kernel panicked",
        Cause::OomUnattributed => "OUT OF MEMORY: a process was killed, owner unknown",
        Cause::ShmFull => "SHARED MEMORY FULL",
        Cause::KilledOutside => "KILLED (SIGKILL), not an OOM kill",
        Cause::Stopped => "STOPPED on request",
        Cause::KilledByRequest => "KILLED on request",
        Cause::CrashedSignal => "CRASHED",
        Cause::EndedBySignal => "ENDED BY A SIGNAL",
        Cause::ErrorExit => "ENDED WITH AN ERROR",
        Cause::CudaOom => "OUT OF GPU MEMORY",
        Cause::CudaOomFragmented => "OUT OF GPU MEMORY: its cache is fragmented",
        Cause::CudaOomOtherHolder => "OUT OF GPU MEMORY: others use the same GPU",
        Cause::CudaOomOwnProcesses => match noun {
            Noun::Container => "OUT OF GPU MEMORY: other processes of the container use the same GPU",
            Noun::Run => "OUT OF GPU MEMORY: other processes of the run use the same GPU",
        },
        Cause::CudaOomOwnShare => "OUT OF GPU MEMORY: the share that it may take is used up",
        Cause::CudaOomSurvived => "OUT OF GPU MEMORY, and no end is recorded",
        Cause::KilledByMonitor => "KILLED by a memory monitor, not by the kernel",
        Cause::AllocationFailed => "MEMORY WAS REFUSED: an allocation failed, and nothing was killed",
        Cause::OwnLimit => "ITS OWN LIMIT was reached (heap, memory_limit, ...)",
        Cause::ThreadsRefused => "THREADS OR PROCESSES WERE REFUSED",
        Cause::AtLimit => "AT ITS MEMORY LIMIT: its processes wait for memory",
        Cause::NeverStarted => "NEVER STARTED",
        Cause::HostRestart => "ENDED BY A RESTART OF THE HOST",
        Cause::Completed => "COMPLETED",
        Cause::Unknown => "UNKNOWN",
        Cause::Nothing => "NO KILL OR EXIT KNOWN",
    }
}
