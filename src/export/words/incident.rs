//! The sentence that says what happened.

use super::place::noun as place_noun;
use super::terms::{name, path, role_one, signal, time};
use super::{Noun, cuda_oom, notice, refusal, start_error};
use crate::diagnose::{
    CgroupPlace, Diagnosis, Exhausted, ExitIncident, ExitWhy, Incident, KillIncident, KillOutcome,
    LimitOwner, OutsideKill, OutsideOwner, ShmUse, StopRequests,
};
use crate::events::{Kill, KillOwner, Method, Role};
use crate::parse::kernel_log::NoKill;
use crate::text::{bytes, lasted};

/// A time in a log from elsewhere that is at least this many seconds is a Unix time, and none since the host's start.
const MIN_UNIX_SECONDS: f64 = 1e9;
/// Characters of a container's id as engines print it.
const SHORT_ID: usize = 12;

/// Returns the sentence.
pub(super) fn what(diagnosis: &Diagnosis, noun: Noun) -> String {
    let subject = diagnosis.subject.as_ref();
    let called = subject.map_or_else(String::new, |subject| name(&subject.identity.name));
    let runtime = subject.map(|subject| subject.runtime).unwrap_or_default();
    match &diagnosis.incident {
        Incident::Kill(incident) => killed(incident, diagnosis, noun),
        Incident::OutsideKill(incident) => killed_outside(incident, diagnosis),
        Incident::NoKill { exhausted, requested_by, no_kill } => {
            let by = requested_by.as_ref();
            let by = by.map_or_else(String::new, |by| format!(" when {} asked for memory", name(by)));
            let end = match no_kill {
                NoKill::Panic => "and the kernel panicked instead of killing a process.",
                NoKill::PanicNoVictim => "and the kernel panicked, because no process could be killed.",
                NoKill::NoVictim | NoKill::AlreadyExiting => {
                    "and no process there may be killed: each is exempt (oom_score_adj -1000) or dying already. Whoever asks for memory \
                     there hangs until some is freed."
                }
            };
            format!("{} {}{by}, {end}", when(diagnosis), because(exhausted, "the machine", noun))
        }
        Incident::Exit(incident) => exit(incident, noun),
        Incident::CudaOomSurvived(incident) => cuda_oom::survived(incident, noun),
        Incident::Notice(incident) => notice::incident(incident),
        Incident::Refusal(incident) => refusal::incident(incident),
        Incident::Unrecorded => "Nothing is recorded of this run.".to_owned(),
        Incident::NoEvents { is_running } => {
            let since = subject.and_then(|subject| subject.started);
            let since = since.map_or_else(String::new, |at| format!(" since its start at {}", time(at)));
            let is = if *is_running { "is running" } else { "is not running" };
            format!("{called} {is}, and neither an OOM kill nor an exit is known{since}.")
        }
        Incident::StartFailed { error } => {
            format!("{called} has never run: {runtime} says: {}", start_error::summary(error))
        }
        Incident::NotStarted => {
            format!("{called} was created, and has not been started: {runtime} knows no start of it.")
        }
        Incident::LostProcess { pid } => {
            let pid = pid.map_or_else(String::new, |pid| format!(" (pid {pid})"));
            format!(
                "{runtime} says that {called} runs, but its first process{pid} does not exist on this host: it has ended without {runtime} \
                 noticing, as happens while containerd or a shim is restarted, or {runtime} runs elsewhere, as in a virtual machine."
            )
        }
        Incident::RuntimeUnreachable { is_empty } => {
            let known = match is_empty {
                true => "Its cgroup has no process: it has most likely ended.",
                false => "Whether it still runs is not known: its cgroup is gone, or cannot be read.",
            };
            format!(
                "{called} was running when {runtime} could be queried last, and no OOM kill of it is known. {known} Its exit code, and whether \
                 it was told to stop, is known to {runtime} alone."
            )
        }
    }
}

/// Returns `At TIME`, with the time as a log from elsewhere has it.
fn when(diagnosis: &Diagnosis) -> String {
    match (diagnosis.at, diagnosis.log_time.as_deref()) {
        (Some(at), _) => format!("At {}", time(at)),
        (None, None) => "At an unknown time".to_owned(),
        (None, Some(stamp)) => match stamp.parse::<f64>() {
            Ok(seconds) if seconds >= MIN_UNIX_SECONDS => format!("At {}", time(seconds)),
            Ok(_) if !stamp.starts_with('+') => format!("{stamp} s after the host's start"),
            _ => format!("At {}", name(stamp)),
        },
    }
}

fn killed(incident: &KillIncident, diagnosis: &Diagnosis, noun: Noun) -> String {
    let KillIncident { kill, exhausted, is_one_of_a_set, outcome } = incident;
    let after = after(*outcome, noun);
    if kill.kernel_usec.is_none() {
        let source = match kill.method {
            Some(Method::Runtime) => format!("{} reported it", noun.runtime()),
            _ => "its counters show it".to_owned(),
        };
        return format!(
            "By {} the kernel's OOM killer had killed a process of {}: {source}, but the kernel's record was lost, so its name and size are not \
             known; {after}",
            time(kill.at),
            noun.this()
        );
    }
    let or_another = match is_one_of_a_set {
        true => {
            " (or another process at that time: other containers lost some too, and only their number is known)"
        }
        false => "",
    };
    format!(
        "{} the kernel's OOM killer killed {}{or_another}{}, because {}; {after}",
        when(diagnosis),
        process(kill),
        on_request_of(kill, exhausted),
        because(exhausted, "the whole machine", noun)
    )
}

fn killed_outside(OutsideKill { kill, exhausted, owner }: &OutsideKill, diagnosis: &Diagnosis) -> String {
    let owner = match owner {
        OutsideOwner::UnprovenContainer { container_id: id, ran_in: place } => {
            let ran =
                place.as_ref().map_or_else(String::new, |place| format!("It ran in {}. ", place_noun(place)));
            format!(
                "{ran}Its cgroup has the id of the container {} in its name, which does not prove that it is the container's: no runtime says so, \
                 and not only root may make cgroups there.",
                id.get(..SHORT_ID).unwrap_or(id)
            )
        }
        OutsideOwner::NoContainer { ran_in: None } => {
            "It belongs to no container of Docker, Podman or Kubernetes.".to_owned()
        }
        OutsideOwner::NoContainer { ran_in: Some(place) } => {
            format!("It ran in {}, in no container of Docker, Podman or Kubernetes.", place_noun(place))
        }
        OutsideOwner::Pending => "Evidence of its owner may still arrive: retry in a few seconds.".to_owned(),
        OutsideOwner::LineMissing => {
            "Its container is not in the log: the line `oom-kill:` above `Killed process` names it."
                .to_owned()
        }
        OutsideOwner::NotInLog => "The log does not name its container.".to_owned(),
        OutsideOwner::Unknown => "No evidence shows its container or that it had none.".to_owned(),
    };
    match kill.kernel_usec {
        Some(_) => format!(
            "{} the kernel's OOM killer killed {}{}, because {}. {owner}",
            when(diagnosis),
            process(kill),
            on_request_of(kill, exhausted),
            because(exhausted, "the machine", Noun::Container)
        ),
        None => format!(
            "By {} the kernel had killed one process more than its log shows: the record was lost. {owner}",
            time(kill.at)
        ),
    }
}

/// Returns why memory ran out.
fn because(exhausted: &Exhausted, machine: &str, noun: Noun) -> String {
    match exhausted {
        Exhausted::Requested => "that was requested by sysrq".to_owned(),
        Exhausted::Nodes { nodes } => format!(
            "the memory of the NUMA nodes to which a cpuset or a memory policy restricts it ({}) ran out",
            name(nodes)
        ),
        Exhausted::Unusable { free_bytes } => format!(
            "{machine} could not serve a request for memory, although {} were free",
            bytes(*free_bytes)
        ),
        Exhausted::Host => format!("{machine} ran out of memory"),
        Exhausted::Limit { of, limit_bytes, with_swap } => reached(of, *limit_bytes, *with_swap, noun),
        Exhausted::Unknown => "memory ran out".to_owned(),
    }
}

/// Returns who reached which limit.
fn reached(of: &LimitOwner, limit: Option<u64>, with_swap: bool, noun: Noun) -> String {
    let (who, its) = match of {
        LimitOwner::Container => (noun.the().to_owned(), "its"),
        LimitOwner::Inside { cgroup } => (format!("the cgroup {} inside it", path(cgroup)), "its"),
        LimitOwner::Above => (format!("a cgroup above {}", noun.the()), "its"),
        LimitOwner::LikelyContainer => (format!("a cgroup (most likely {}'s own)", noun.the()), "its"),
        LimitOwner::PlaceAbove { place } => (format!("{} above it", place_noun(place)), "its"),
        LimitOwner::Place { place: place @ (CgroupPlace::AllPods { .. } | CgroupPlace::NamedPod { .. }) } => {
            let size = limit.map_or_else(String::new, |limit| format!(", {},", bytes(limit)));
            return format!("{}{size} was reached", place_noun(place));
        }
        LimitOwner::Place { place: place @ CgroupPlace::User { .. } } => (place_noun(place), "their"),
        LimitOwner::Place { place } => (place_noun(place), "its"),
    };
    let limit = limit.map_or_else(String::new, |limit| format!(" of {}", bytes(limit)));
    let kind = if with_swap { "limit of memory and swap together" } else { "memory limit" };
    format!("{who} reached {its} {kind}{limit}")
}

/// Names the process that asked for the memory, if it is not the victim.
fn on_request_of(kill: &Kill, exhausted: &Exhausted) -> String {
    let is_request = *exhausted != Exhausted::Requested;
    let by = kill.report.as_ref().filter(|_| is_request).map_or("", |report| &*report.requested_by);
    // the kernel cuts names after 15 bytes
    let is_victim = by.is_empty() || kill.process.is_empty() || *by == *kill.process;
    if is_victim { String::new() } else { format!(" when {} asked for memory", name(by)) }
}

/// Describes the victim: name, pid, role and size, as far as known.
pub(super) fn process(kill: &Kill) -> String {
    let called = if kill.process.is_empty() { "a process".to_owned() } else { name(&kill.process) };
    let mut details: Vec<String> = kill.pid.map(|pid| format!("pid {pid}")).into_iter().collect();
    if let Some(role) = kill.role.filter(|role| *role != Role::Other) {
        let parent = kill.parent_pid.map_or_else(String::new, |pid| format!(" (fork of pid {pid})"));
        details.push(format!("a {}{parent}", role_one(role)));
    }
    let shmem = kill.shmem_bytes.filter(|shmem| kill.anon_bytes.is_some_and(|anon| *shmem > anon));
    match shmem {
        Some(shmem) => details.push(format!("{} of shared memory", bytes(shmem))),
        None => details.extend(kill.anon_bytes.map(|anon| format!("{} of anonymous memory", bytes(anon)))),
    }
    if details.is_empty() { called } else { format!("{called} ({})", details.join(", ")) }
}

/// Describes a kill in one line: time, process, size, container, limit.
pub(super) fn kill_line(kill: &Kill) -> String {
    let container = match &kill.owner {
        KillOwner::Container(subject) => format!("container {}", name(&subject.identity.name)),
        _ => "container unknown".to_owned(),
    };
    format!("{}: {}, {container}{}", time(kill.at), process(kill), limit_of(kill))
}

/// Returns `, limit 2.0 GiB`; empty if it is unknown.
pub(super) fn limit_of(kill: &Kill) -> String {
    kill.limit_bytes.map_or_else(String::new, |limit| format!(", limit {}", bytes(limit)))
}

/// Describes the container after the kill.
fn after(outcome: KillOutcome, noun: Noun) -> String {
    let the = noun.the();
    let later = |seconds: f64| match seconds {
        seconds if seconds < 1.0 => "right after".to_owned(),
        seconds => format!("{} later", lasted(seconds)),
    };
    match outcome {
        KillOutcome::Ended { exit_code } => format!("that ended {the}{}.", with_code(exit_code)),
        KillOutcome::KeptRunning => format!("{the} kept running."),
        KillOutcome::NotInLog => format!("whether that ended {the} is not in the log."),
        KillOutcome::NoEndSoFar => format!("no end of {the} is recorded so far."),
        KillOutcome::NoEnd => format!("no end of {the} is recorded."),
        KillOutcome::StoppedLater { seconds, exit_code } => {
            format!("{the} kept running until it was stopped {}{}.", later(seconds), with_code(exit_code))
        }
        KillOutcome::EndedLater { seconds, exit_code, is_childs_code } => {
            let status = if is_childs_code { ", most likely the status of that child" } else { "" };
            format!("{the} kept running and ended {}{}{status}.", later(seconds), with_code(exit_code))
        }
        KillOutcome::Undecided { seconds, exit_code } => format!(
            "{the} ended {}{}; whether by that kill is not decided yet.",
            later(seconds),
            with_code(exit_code)
        ),
    }
}

fn with_code(exit_code: Option<i64>) -> String {
    exit_code.map_or_else(String::new, |code| format!(" with exit code {code}"))
}

/// Says when, how and why a container ended.
pub(super) fn exit(incident: &ExitIncident, noun: Noun) -> String {
    let ExitIncident { at, exit_code, duration_seconds, why } = incident;
    let (the, runtime, lived) = (noun.the(), noun.runtime(), duration_seconds.map(lasted));
    let lived = lived.map_or_else(String::new, |lived| format!(" after {lived}"));
    let ended = format!("At {} {the} ended{}{lived}", time(*at), with_code(*exit_code));
    match why {
        ExitWhy::CudaOom(incident) => cuda_oom::exit_clause(&ended, incident, noun),
        ExitWhy::LostCudaOom => {
            format!("{ended} after a CUDA out-of-memory error, whose event is not in the ledger (any more).")
        }
        ExitWhy::LostKillAtLimit => lost_kill(&ended, "a memory limit was reached"),
        ExitWhy::LostKillOfHost => lost_kill(&ended, "the machine ran out of memory"),
        ExitWhy::Completed { by_itself: true } => {
            format!("{ended}: it finished by itself, without an error.")
        }
        ExitWhy::Completed { by_itself: false } => format!("{ended}: it finished without an error."),
        ExitWhy::StopTimeout => format!(
            "{ended} on a stop request: it did not exit on SIGTERM, and {runtime} killed it after the stop timeout."
        ),
        ExitWhy::KillRequest => format!(
            "{ended} on a kill request to {runtime} (SIGKILL): docker kill, docker rm -f, or docker stop after its timeout."
        ),
        ExitWhy::StopRequest { signal: number, was_killed } => {
            let killed = if *was_killed { ", and was killed because it did not exit" } else { "" };
            format!("{ended} on a stop request to {runtime} ({}){killed}.", signal((*number).into()))
        }
        ExitWhy::StopRequestUnknown => {
            format!("{ended} on a stop request to {runtime}; the signal is not known.")
        }
        ExitWhy::PossibleKill { kill } => format!(
            "{ended}, the status after SIGKILL. At that time the kernel's OOM killer killed {} of an unknown container: it may have been this one.",
            process(kill)
        ),
        ExitWhy::KilledLogUnread { requests } => format!(
            "{ended}, the status after SIGKILL, and {}. The kernel log could not be read then, so an OOM kill is unlikely but possible: no counter \
             that could be read showed one.",
            stop_requests(*requests, noun)
        ),
        ExitWhy::Killed { last_kill_seconds, requests } => {
            let none = match last_kill_seconds {
                None => "It was NOT an OOM kill: the kernel recorded none for it".to_owned(),
                Some(seconds) => {
                    format!("No OOM kill explains it: the last of this run was {} before", lasted(*seconds))
                }
            };
            format!("{ended}, the status after SIGKILL. {none}. And {}.", stop_requests(*requests, noun))
        }
        ExitWhy::UnknownSignal => format!("{ended}, by a signal whose name is not recorded."),
        ExitWhy::ShmBus(shm) => format!(
            "{ended}, by SIGBUS, while {} were in use: a write to a full /dev/shm raises SIGBUS.",
            of_shm(shm)
        ),
        ExitWhy::CrashOrAbort { signal: number } => {
            format!("{ended}, by {} or by abort(): it crashed.", signal(*number))
        }
        ExitWhy::Crashed { signal: number } => format!("{ended}, by {}: it crashed.", signal(*number)),
        ExitWhy::Signal { signal: number, requests } => {
            format!("{ended}, by {}; {}.", signal(*number), stop_requests(*requests, noun))
        }
        ExitWhy::ShmError(shm) => format!(
            "{ended}, while {} were in use: a full one kills DataLoader workers (SIGBUS), and the trainer then ends with an error. Its log would \
             prove it.",
            of_shm(shm)
        ),
        ExitWhy::PossibleKillOfChild { kill } => format!(
            "{ended}. At that time the kernel's OOM killer killed {} of an unknown container: if it was a child of this one, that is the cause; \
             else it was its own error.",
            process(kill)
        ),
        ExitWhy::CountedKill => format!(
            "{ended}, and its cgroup counted an OOM kill: most likely one of its workers was killed, and the program then ended. No record of the \
             kill could be read, so the process, its size and the limit are not known."
        ),
        ExitWhy::ErrorLogUnread => format!(
            "{ended}. The kernel log could not be read for that time: if a child of it was OOM-killed, that is the cause; else it was its own error."
        ),
        ExitWhy::LostKillBefore => format!(
            "{ended}. A process of it was OOM-killed before, which may be the cause; the kill's own record is not in the ledger (any more)."
        ),
        ExitWhy::OwnError { without_kill } => {
            let none = if *without_kill { " No OOM kill of this run is recorded." } else { "" };
            format!("{ended}: its own error.{none}")
        }
        ExitWhy::ByLog => format!("{ended}."),
        ExitWhy::HostRestart => format!(
            "By {} {the} had ended, because the host was restarted or lost power: its run began before that.",
            time(*at)
        ),
        ExitWhy::SigkillLogUnread => format!(
            "{ended}, the status after SIGKILL. No record of an OOM kill at that time could be read, so it may have been one or not."
        ),
        ExitWhy::OnlyFlag { is_counted } => {
            let known = match is_counted {
                true => "Its cgroup counted an OOM kill",
                false => "The runtime's flag OOMKilled is set",
            };
            format!(
                "{ended}. {known}. No record of the kill could be read, so the process, its size and the limit are not known."
            )
        }
        ExitWhy::Unrecorded { in_pod: false } => {
            format!(
                "{ended} for a reason that is not recorded: no runtime was connected, or memledger did not run."
            )
        }
        // the kubelet does so within a second when the pod is deleted or evicted
        ExitWhy::Unrecorded { in_pod: true } => format!(
            "{ended} for a reason that is not recorded: {runtime} had removed it before it was read, or was not connected, or memledger did not run."
        ),
        ExitWhy::Pending => {
            format!("{ended}; evidence of the reason may still arrive: retry in a few seconds.")
        }
    }
}

fn lost_kill(ended: &str, why: &str) -> String {
    format!("{ended} by an OOM kill, because {why}; the kill's own record is not in the ledger (any more).")
}

fn of_shm(shm: &ShmUse) -> String {
    format!("{} of the {} of its /dev/shm", bytes(shm.used_bytes), bytes(shm.size_bytes))
}

/// Says that no stop request explains an exit, or why that is not known.
pub(super) fn stop_requests(requests: StopRequests, noun: Noun) -> String {
    match requests {
        StopRequests::NoneExplains => "no stop request shortly before explains it".to_owned(),
        StopRequests::None => format!("there was no stop request to {}", noun.runtime()),
        StopRequests::UnknownOfPod => {
            "whether it was told to stop is not known: pods report no stop requests, as of a deletion"
                .to_owned()
        }
        StopRequests::UnknownOfPodman => {
            "whether it was told to stop is not known: Podman reports no stop requests".to_owned()
        }
        StopRequests::Unknown => "whether it was told to stop is not known".to_owned(),
    }
}
