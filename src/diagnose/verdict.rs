//! Determines the cause of one run's end, or of one kill, and what happened.

use super::cause::{Cause, Confidence, is_cuda_oom};
use super::finding::{Finding, RunFinding};
use super::incident::{
    Exhausted, ExitIncident, ExitWhy, Headline, Incident, KillIncident, KillOutcome, KilledProcess, LaterEnd,
    LimitOwner, OutsideKill, OutsideOwner, ShmUse, StopRequests,
};
use super::limit::{inside, limit_bytes, limit_of};
use super::place::CgroupPlace;
use super::{
    Diagnosis, RunSummary, advice, container_log, cuda_oom, ended_it, last_sample, program, report, signal_of,
};
use crate::discover::RuntimeKind;
use crate::events::{Evidence, Exit, ExitReason, Kill, KillOwner, Method, OomScope, Role, Victim};
use crate::ledger::run::{SIGKILL_STATUS, is_crash_status};
use crate::lifecycle::timing::{GROUP_WINDOW, RECORD_DELAY};
use crate::parse::container_id;
use crate::parse::kernel_log::NoKill;
use crate::runs::hit_limit::LimitPosition;

/// From this used share on, a `/dev/shm` counts as full: another batch does not fit.
const SHM_FULL_ABOVE: f64 = 0.9;
/// SIGBUS, raised by a write to a full `/dev/shm`.
const SIGBUS: i64 = 7;
const SIGSEGV: i64 = 11;
/// Processes that are listed by their names.
const MAX_NAMED: usize = 5;
pub(super) const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;

/// Returns true if at least half of the unreclaimable memory was shared memory.
fn mostly_shared<'a>(kill: &'a Kill, run: &RunSummary<'a>) -> bool {
    if let Some(is_shared) = kill.report.as_deref().and_then(report::is_mostly_shared) {
        return is_shared;
    }
    last_sample(run.before(Some(kill)))
        .and_then(|last| Some(last.shmem_bytes? * 2 >= last.unreclaimable_bytes?))
        .unwrap_or(false)
}

/// Returns the use of a `/dev/shm` that was full at the last sample.
pub(super) fn full_shm(run: &RunSummary<'_>) -> Option<ShmUse> {
    let last = last_sample(run.before(None))?;
    let (used_bytes, size_bytes) = (last.shm_used_bytes?, last.shm_size_bytes?);
    let is_full = size_bytes > 0 && used_bytes as f64 >= SHM_FULL_ABOVE * size_bytes as f64;
    is_full.then_some(ShmUse { used_bytes, size_bytes })
}

/// Returns the diagnosis of one run of a container.
pub(super) fn of_run(run: &RunSummary<'_>, now: f64) -> Diagnosis {
    let lead = leading(run);
    let (cause, confidence, incident) = match (lead, run.exit) {
        (Some(kill), _) => kill_cause(kill, run),
        (None, Some(exit)) => {
            let (cause, confidence, why) = exit_cause(exit, run);
            (cause, confidence, Incident::Exit(exit_incident(exit, why)))
        }
        (None, None) => match cuda_oom::survived(run) {
            Some((cause, confidence, incident)) => (cause, confidence, Incident::CudaOomSurvived(incident)),
            None => (Cause::Unknown, Confidence::Unsure, Incident::Unrecorded),
        },
    };
    let last_cuda_oom = run.cuda_ooms.last().map(|oom| oom.at);
    let mut evidence: Vec<Evidence> = lead.map(|kill| kill.evidence.clone()).unwrap_or_default();
    evidence.extend(run.exit.into_iter().flat_map(|exit| exit.evidence.iter().cloned()));
    let without_cgroup = run.exit.filter(|exit| exit.subject.is_run() && exit.runtime_oom_flag.is_none());
    let may_be_by_kill = lead.is_none() && matches!(cause, Cause::ErrorExit | Cause::KilledOutside);
    let mut diagnosis = Diagnosis {
        subject: Some(run.subject.clone()),
        headline: lead
            .filter(|kill| !ended_it(kill, run.exit))
            .and_then(|kill| after_kill(cause, kill, run))
            .or_else(|| Some(Headline::AtLimitOf(pod_of_limit(cause, lead?, run)?))),
        exit_reason: run.exit.and_then(|exit| exit.reason),
        at: lead
            .map(|kill| kill.at)
            .or(run.exit.map(|exit| exit.at))
            .or(last_cuda_oom)
            .filter(|_| run.log_time.is_none()),
        log_time: run.log_time.filter(|time| !time.is_empty()).map(str::to_owned),
        findings: own_end(run, lead)
            .map(Finding::from)
            .into_iter()
            .chain(beside(run, lead, cause))
            .chain(cuda_oom::also(run).filter(|_| !is_cuda_oom(cause)).map(Finding::from))
            .chain(without_cgroup.filter(|_| may_be_by_kill).map(|_| RunFinding::WithoutCgroup.into()))
            .collect(),
        evidence,
        gpu: cuda_oom::leading(run).filter(|_| is_cuda_oom(cause)).map(|oom| Box::new(oom.clone())),
        pid: lead.and_then(|kill| kill.pid),
        report: lead.and_then(|kill| kill.report.clone()),
        held: run.before(lead).cloned(),
        advice: advice::of(cause, run, lead),
        ..Diagnosis::new(cause, confidence, incident, now)
    };
    if let Some(error) = run.exit.filter(|_| lead.is_none()).and_then(|exit| exit.log_error) {
        diagnosis.evidence.push(Evidence::new("log", error.error.kind().to_owned()));
        container_log::explain_by(&mut diagnosis, error);
    }
    diagnosis
}

/// Returns the diagnosis of a kill outside containers.
pub(super) fn outside_containers<'a>(run: &RunSummary<'a>, kill: &'a Kill, now: f64) -> Diagnosis {
    let is_known = kill.owner == KillOwner::Host;
    let (cause, confidence) = match kill.scope {
        _ if !is_known && run.log_time.is_none() => (Cause::OomUnattributed, Confidence::Unsure),
        _ if is_requested(kill) => (Cause::OomSysrq, Confidence::Certain),
        OomScope::Host if nodes_of(kill).is_some() => (Cause::OomNodes, Confidence::Certain),
        OomScope::Host if is_known => (Cause::OomHostProcess, Confidence::Certain),
        OomScope::Host => (Cause::OomHost, Confidence::Certain),
        OomScope::Container if is_known => (Cause::OomCgroupLimit, Confidence::Certain),
        OomScope::Container => (Cause::OomUnattributed, Confidence::Unsure),
    };
    let limit = CgroupPlace::of_limit(&kill.limit_cgroup);
    let owner = outside_owner(kill, run, &limit);
    let exhausted =
        of_kill(kill).unwrap_or_else(|| reached(LimitOwner::Place { place: limit }, kill.limit_bytes, kill));
    let incident = Incident::OutsideKill(Box::new(OutsideKill { kill: kill.clone(), exhausted, owner }));
    Diagnosis {
        at: Some(kill.at).filter(|_| run.log_time.is_none()),
        log_time: run.log_time.filter(|time| !time.is_empty()).map(str::to_owned),
        findings: beside(run, Some(kill), cause),
        evidence: kill.evidence.clone(),
        pid: kill.pid,
        report: kill.report.clone(),
        held: kill.before.clone(),
        advice: advice::of(cause, run, Some(kill)),
        ..Diagnosis::new(cause, confidence, incident, now)
    }
}

/// Returns whose process was killed outside the known containers, as far as that is known.
fn outside_owner(kill: &Kill, run: &RunSummary<'_>, limit: &CgroupPlace) -> OutsideOwner {
    let place = CgroupPlace::of(&kill.cgroup);
    let is_in_limit = kill.scope == OomScope::Container && *limit == place;
    match &kill.owner {
        KillOwner::Host => match container_id::outermost(&kill.cgroup) {
            Some((_, named)) => OutsideOwner::UnprovenContainer {
                container_id: named.id.to_owned(),
                ran_in: (!is_in_limit).then_some(place),
            },
            None => {
                let is_somewhere = !kill.cgroup.is_empty() && &*kill.cgroup != "/" && !is_in_limit;
                OutsideOwner::NoContainer { ran_in: is_somewhere.then_some(place) }
            }
        },
        KillOwner::Pending => OutsideOwner::Pending,
        // since 5.1 one line has both, and since 5.0 the line above names the cgroup
        _ if run.lacks_context_line => OutsideOwner::LineMissing,
        _ if run.log_time.is_some() => OutsideOwner::NotInLog,
        _ => OutsideOwner::Unknown,
    }
}

/// Returns the kill that the diagnosis is about, if any.
///
/// A run that lost a process is first that, however it ended later, but for an end that is proven to be another one's doing: by a CUDA
/// out-of-memory error, by a restart of the host, or by a kill whose own record is lost.
fn leading<'a>(run: &RunSummary<'a>) -> Option<&'a Kill> {
    let newest = || run.kills.last().map(|kill| chosen(kill, run));
    let Some(exit) = run.exit else { return newest() };
    let ended = run.kills.iter().rev().find(|kill| ended_it(kill, run.exit)).copied();
    let may_be = || run.kills.iter().rev().find(|kill| exit.may_be.contains(&kill.id)).copied();
    ended.or_else(may_be).or_else(|| newest().filter(|_| !has_own_cause(exit, run)))
}

/// Returns whether it is proven what ended a run, where no kill that is known did.
fn has_own_cause(exit: &Exit, run: &RunSummary<'_>) -> bool {
    use ExitReason::{CudaOom, HostRestart, OomContainer, OomHost};
    matches!(exit.reason, Some(CudaOom | HostRestart | OomContainer | OomHost)) || run.has_logged_cuda_oom()
}

/// Returns the end of a run that went on after the kill that leads, where that has a reason of its own.
fn own_end(run: &RunSummary<'_>, lead: Option<&Kill>) -> Option<RunFinding> {
    let exit = run.exit.filter(|exit| exit.reason != Some(ExitReason::Completed))?;
    let kill = lead.filter(|kill| !ended_it(kill, run.exit))?;
    if exit.may_be.contains(&kill.id) && run.unattributed_kills.is_empty() {
        let is_open = exit.reason.is_some() && is_ambiguous(exit) && !exit.requests_known;
        return is_open.then(|| RunFinding::MayBeEndedFromOutside { requests: stop_requests(exit) });
    }
    if exit.reason.is_none() && !is_decided(kill) {
        return None;
    }
    // people stop what hangs, and then ask
    let may_have_hung = was_requested(exit);
    Some(RunFinding::EndedLater { exit: exit_incident(exit, exit_cause(exit, run).2), may_have_hung })
}

/// Returns the kill of the process that the kernel chose, if this one was killed with it.
fn chosen<'a>(kill: &'a Kill, run: &RunSummary<'a>) -> &'a Kill {
    run.kills.iter().copied().find(|first| is_killed_with(kill, first)).unwrap_or(kill)
}

/// Returns whether a kill was of the same cgroup and moment as another one.
fn is_killed_with(kill: &Kill, first: &Kill) -> bool {
    !kill.group.is_empty() && kill.group == first.group && (kill.at - first.at).abs() < GROUP_WINDOW
}

/// Returns the diagnosis of an OOM that ended without a kill.
pub(super) fn without_kill<'a>(run: &RunSummary<'a>, kill: &'a Kill, no_kill: NoKill, now: f64) -> Diagnosis {
    let exhausted = match kill.scope {
        OomScope::Container if kill.limit_cgroup.is_empty() => Exhausted::Unknown,
        OomScope::Host => of_host(kill),
        OomScope::Container if limit_of(kill, run) == LimitPosition::Own => {
            reached(LimitOwner::Container, kill.limit_bytes, kill)
        }
        OomScope::Container => {
            let place = CgroupPlace::of_limit_of(&kill.limit_cgroup, run.subject);
            reached(LimitOwner::Place { place }, kill.limit_bytes, kill)
        }
    };
    let cause = match no_kill {
        NoKill::Panic | NoKill::PanicNoVictim => Cause::OomPanic,
        NoKill::NoVictim | NoKill::AlreadyExiting => Cause::OomNoVictim,
    };
    let requested_by = kill.report.as_ref().map(|report| report.requested_by.to_string());
    let requested_by = requested_by.filter(|by| !by.is_empty());
    let incident = Incident::NoKill { exhausted, requested_by, no_kill };
    Diagnosis {
        subject: matches!(kill.owner, KillOwner::Container(_)).then(|| run.subject.clone()),
        log_time: run.log_time.filter(|time| !time.is_empty()).map(str::to_owned),
        evidence: kill.evidence.clone(),
        report: kill.report.clone(),
        advice: advice::of(cause, run, Some(kill)),
        ..Diagnosis::new(cause, Confidence::Certain, incident, now)
    }
}

fn kill_cause<'a>(kill: &'a Kill, run: &RunSummary<'a>) -> (Cause, Confidence, Incident) {
    let main = ended_it(kill, run.exit);
    let failed = run.exit.is_some_and(|exit| exit.may_be.contains(&kill.id));
    let limit = limit_of(kill, run);
    let cause = match (kill.kernel_usec, kill.scope) {
        (None, _) => Cause::OomUnnamed,
        _ if is_requested(kill) => Cause::OomSysrq,
        _ if nodes_of(kill).is_some() => Cause::OomNodes,
        (_, OomScope::Host) => Cause::OomHost,
        _ if limit == LimitPosition::Above => Cause::OomParentLimit,
        _ if mostly_shared(kill, run) => Cause::OomLimitShm,
        _ if main => Cause::OomLimitMain,
        _ if !is_decided(kill) => Cause::OomLimit,
        _ if failed => Cause::OomLimitWorkerThenExit,
        _ => Cause::OomLimitWorker,
    };
    let is_complete = is_decided(kill) && (limit != LimitPosition::Unnamed || kill.scope == OomScope::Host);
    let confidence = match cause {
        Cause::OomUnnamed => Confidence::Likely,
        _ if is_one_of_a_set(kill) => Confidence::Likely,
        // its status may be its own, or evidence may still arrive
        _ if failed && run.exit.is_some_and(|exit| exit.reason.is_none() || is_ambiguous(exit)) => {
            Confidence::Likely
        }
        // the record is written a little later than the kill, which may be of the run before
        _ if !main && is_just_after_start(kill, run) => Confidence::Likely,
        // a kill whose record was lost may have ended it in its place
        _ if main && run.exit.is_some_and(|exit| !exit.may_be.is_empty()) => Confidence::Likely,
        // no runtime reports its start or exit code: that the kill ended it follows from the times alone
        _ if main
            && run.exit.is_some_and(|exit| exit.exit_code.is_none() && exit.subject.started.is_none()) =>
        {
            Confidence::Likely
        }
        Cause::OomParentLimit if kill.limit_cgroup.is_empty() => Confidence::Likely,
        _ if is_complete => Confidence::Certain,
        // the cause is certain; what it did to the container is not claimed
        Cause::OomLimit | Cause::OomLimitShm | Cause::OomParentLimit if limit != LimitPosition::Unnamed => {
            Confidence::Certain
        }
        Cause::OomHost | Cause::OomNodes if run.log_time.is_some() => Confidence::Certain,
        _ => Confidence::Likely,
    };
    let incident = KillIncident {
        kill: kill.clone(),
        exhausted: of_kill(kill)
            .unwrap_or_else(|| reached(limit_owner(kill, run, limit), limit_bytes(kill, run), kill)),
        is_one_of_a_set: is_one_of_a_set(kill),
        outcome: outcome(kill, run, main),
    };
    (cause, confidence, Incident::Kill(Box::new(incident)))
}

fn is_just_after_start(kill: &Kill, run: &RunSummary<'_>) -> bool {
    let started = run.exit.and_then(|exit| exit.subject.started).or(run.subject.started);
    run.follows_at_once && started.is_some_and(|started| kill.at - started < RECORD_DELAY)
}

/// Returns true if the kill was requested by sysrq.
fn is_requested(kill: &Kill) -> bool {
    kill.report.as_ref().is_some_and(|report| report.order == Some(-1))
}

/// Returns the NUMA nodes to which the request for memory was restricted, if any.
fn nodes_of(kill: &Kill) -> Option<&str> {
    let report = kill.report.as_ref().filter(|_| kill.scope == OomScope::Host)?;
    Some(&*report.nodes).filter(|nodes| !nodes.is_empty())
}

/// Returns what memory of the host ran out.
fn of_host(kill: &Kill) -> Exhausted {
    match (nodes_of(kill), report::free_but_unusable(kill)) {
        (Some(nodes), _) => Exhausted::Nodes { nodes: nodes.to_owned() },
        (None, Some(free_bytes)) => Exhausted::Unusable { free_bytes },
        (None, None) => Exhausted::Host,
    }
}

/// Returns why memory ran out, if that was no limit.
fn of_kill(kill: &Kill) -> Option<Exhausted> {
    match kill.scope {
        _ if is_requested(kill) => Some(Exhausted::Requested),
        OomScope::Host => Some(of_host(kill)),
        OomScope::Container => None,
    }
}

fn reached(of: LimitOwner, limit_bytes: Option<u64>, kill: &Kill) -> Exhausted {
    let with_swap = kill.report.as_ref().is_some_and(|report| report.with_swap);
    Exhausted::Limit { of, limit_bytes, with_swap }
}

/// Returns whose limit a kill in a container hit.
fn limit_owner(kill: &Kill, run: &RunSummary<'_>, position: LimitPosition) -> LimitOwner {
    match position {
        LimitPosition::Own => LimitOwner::Container,
        LimitPosition::Inside => LimitOwner::Inside { cgroup: inside(kill, run.subject).to_owned() },
        LimitPosition::Above if kill.limit_cgroup.is_empty() => LimitOwner::Above,
        LimitPosition::Above => match CgroupPlace::of_limit_of(&kill.limit_cgroup, run.subject) {
            place
            @ (CgroupPlace::AllPods { .. } | CgroupPlace::Pod { .. } | CgroupPlace::NamedPod { .. }) => {
                LimitOwner::Place { place }
            }
            place => LimitOwner::PlaceAbove { place },
        },
        LimitPosition::Unnamed => LimitOwner::LikelyContainer,
    }
}

/// Returns true if several containers lost processes at that time, and which was whose is not known.
fn is_one_of_a_set(kill: &Kill) -> bool {
    kill.method == Some(Method::Set)
}

/// Returns whether it is known what the kill did to its container.
fn is_decided(kill: &Kill) -> bool {
    !matches!(kill.victim, None | Some(Victim::Unknown))
}

/// Returns what became of the container after the kill.
fn outcome(kill: &Kill, run: &RunSummary<'_>, main: bool) -> KillOutcome {
    let Some(exit) = run.exit else {
        return match kill.victim {
            _ if main => KillOutcome::Ended { exit_code: None },
            Some(Victim::Main | Victim::Child) => KillOutcome::KeptRunning,
            _ if run.log_time.is_some() => KillOutcome::NotInLog,
            None => KillOutcome::NoEndSoFar,
            Some(_) => KillOutcome::NoEnd,
        };
    };
    let (seconds, exit_code) = (exit.at - kill.at, exit.exit_code);
    let is_childs_code = exit_code == Some(SIGKILL_STATUS)
        && exit.may_be.contains(&kill.id)
        && run.unattributed_kills.is_empty();
    match is_decided(kill) {
        _ if main => KillOutcome::Ended { exit_code },
        _ if was_requested(exit) => KillOutcome::StoppedLater { seconds, exit_code },
        true => KillOutcome::EndedLater { seconds, exit_code, is_childs_code },
        false => KillOutcome::Undecided { seconds, exit_code },
    }
}

/// Returns the headline of a run that lost a process by this kill, and ended later.
fn after_kill<'a>(cause: Cause, kill: &'a Kill, run: &RunSummary<'a>) -> Option<Headline> {
    let exit = run.exit?;
    let is_asked_first = exit.stop_signals.contains(&Some(SIGTERM));
    let end = match exit.reason {
        Some(ExitReason::Stopped) if exit.requested_signal() == Some(SIGKILL) && !is_asked_first => {
            LaterEnd::KillRequest
        }
        Some(ExitReason::Stopped) => LaterEnd::StopRequest,
        _ => LaterEnd::ExitCode(exit.exit_code),
    };
    let is_own = limit_of(kill, run) == LimitPosition::Own;
    Some(Headline::AfterKill {
        own_limit_bytes: limit_bytes(kill, run).filter(|_| is_own),
        pod: pod_of_limit(cause, kill, run),
        is_child: kill.victim == Some(Victim::Child),
        end,
        seconds: exit.at - kill.at,
    })
}

/// Returns the pod with several containers whose limit a kill hit, where it is known by its name.
fn pod_of_limit(cause: Cause, kill: &Kill, run: &RunSummary<'_>) -> Option<CgroupPlace> {
    let place = CgroupPlace::of_limit_of(&kill.limit_cgroup, run.subject);
    Some(place)
        .filter(|place| cause == Cause::OomParentLimit && matches!(place, CgroupPlace::NamedPod { .. }))
}

/// Returns whether an exit status is one that a program returns for a child, or that a signal has.
fn is_ambiguous(exit: &Exit) -> bool {
    signal_of(exit.exit_code).is_some()
}

fn was_requested(exit: &Exit) -> bool {
    exit.reason == Some(ExitReason::Stopped)
}

fn exit_incident(exit: &Exit, why: ExitWhy) -> ExitIncident {
    let Exit { at, exit_code, duration_seconds, .. } = *exit;
    ExitIncident { at, exit_code, duration_seconds, why }
}

fn exit_cause(exit: &Exit, run: &RunSummary<'_>) -> (Cause, Confidence, ExitWhy) {
    use Confidence::{Certain, Likely, Unsure};
    let by_cuda_oom = || match cuda_oom::of_exit(exit, run) {
        Some((cause, confidence, incident)) => (cause, confidence, ExitWhy::CudaOom(incident)),
        None => (Cause::CudaOom, Likely, ExitWhy::LostCudaOom),
    };
    match exit.reason {
        _ if run.has_logged_cuda_oom() => by_cuda_oom(),
        Some(ExitReason::OomContainer) => (Cause::OomLimitMain, Likely, ExitWhy::LostKillAtLimit),
        Some(ExitReason::OomHost) => (Cause::OomHost, Likely, ExitWhy::LostKillOfHost),
        Some(ExitReason::Completed) => {
            (Cause::Completed, Certain, ExitWhy::Completed { by_itself: exit.requests_known })
        }
        Some(ExitReason::Stopped) => stopped(exit),
        Some(ExitReason::Killed) => killed(exit, run),
        Some(ExitReason::Signal) => by_signal(exit, run),
        Some(ExitReason::Error) => by_error(exit, run),
        Some(ExitReason::Refused | ExitReason::OwnLimit | ExitReason::Threads | ExitReason::Shm) => {
            (Cause::ErrorExit, Likely, ExitWhy::ByLog)
        }
        Some(ExitReason::CudaOom) => by_cuda_oom(),
        Some(ExitReason::HostRestart) => (Cause::HostRestart, Certain, ExitWhy::HostRestart),
        Some(ExitReason::Unknown) if !run.unattributed_kills.is_empty() => killed(exit, run),
        // the flag of a runtime, or the counter of a run's cgroup, is all that is left of a kill
        Some(ExitReason::Unknown) if exit.runtime_oom_flag == Some(true) => {
            let is_counted = exit.subject.is_run();
            let confidence = if is_counted { Certain } else { Likely };
            (Cause::OomFlagOnly, confidence, ExitWhy::OnlyFlag { is_counted })
        }
        Some(ExitReason::Unknown) if !exit.kernel_log_read && exit.exit_code == Some(SIGKILL_STATUS) => {
            (Cause::Unknown, Unsure, ExitWhy::SigkillLogUnread)
        }
        Some(ExitReason::Unknown) => {
            let in_pod = !exit.subject.identity.k8s_pod.is_empty();
            (Cause::Unknown, Unsure, ExitWhy::Unrecorded { in_pod })
        }
        None => (Cause::Unknown, Unsure, ExitWhy::Pending),
    }
}

fn stopped(exit: &Exit) -> (Cause, Confidence, ExitWhy) {
    match exit.requested_signal() {
        // the first step of `docker stop`
        Some(SIGKILL) if exit.stop_signals.contains(&Some(SIGTERM)) => {
            (Cause::Stopped, Confidence::Certain, ExitWhy::StopTimeout)
        }
        Some(SIGKILL) => (Cause::KilledByRequest, Confidence::Certain, ExitWhy::KillRequest),
        Some(signal) => {
            let was_killed = exit.exit_code == Some(SIGKILL_STATUS);
            (Cause::Stopped, Confidence::Certain, ExitWhy::StopRequest { signal, was_killed })
        }
        None => (Cause::Stopped, Confidence::Likely, ExitWhy::StopRequestUnknown),
    }
}

fn killed(exit: &Exit, run: &RunSummary<'_>) -> (Cause, Confidence, ExitWhy) {
    if let Some(kill) = run.unattributed_kills.first() {
        let why = ExitWhy::PossibleKill { kill: Box::new((*kill).clone()) };
        return (Cause::Unknown, Confidence::Unsure, why);
    }
    if !exit.kernel_log_read {
        let why = ExitWhy::KilledLogUnread { requests: stop_requests(exit) };
        return (Cause::KilledOutside, Confidence::Likely, why);
    }
    let is_flagged = exit.runtime_oom_flag == Some(true);
    let confidence =
        if is_flagged || !exit.requests_known { Confidence::Likely } else { Confidence::Certain };
    let why = ExitWhy::Killed {
        last_kill_seconds: run.kills.last().map(|kill| exit.at - kill.at),
        requests: stop_requests(exit),
    };
    (Cause::KilledOutside, confidence, why)
}

fn by_signal(exit: &Exit, run: &RunSummary<'_>) -> (Cause, Confidence, ExitWhy) {
    let Some(signal) = signal_of(exit.exit_code) else {
        return (Cause::EndedBySignal, Confidence::Likely, ExitWhy::UnknownSignal);
    };
    if let (SIGBUS, Some(shm)) = (signal, full_shm(run)) {
        return (Cause::ShmFull, Confidence::Likely, ExitWhy::ShmBus(shm));
    }
    let (cause, why) = match signal {
        SIGSEGV if !exit.subject.is_run() => (Cause::CrashedSignal, ExitWhy::CrashOrAbort { signal }),
        _ if exit.exit_code.is_some_and(is_crash_status) => {
            (Cause::CrashedSignal, ExitWhy::Crashed { signal })
        }
        _ => (Cause::EndedBySignal, ExitWhy::Signal { signal, requests: stop_requests(exit) }),
    };
    (cause, Confidence::Certain, why)
}

/// Returns what is known of requests to stop that explain an exit: none does.
fn stop_requests(exit: &Exit) -> StopRequests {
    match exit.subject.runtime {
        _ if !exit.stop_signals.is_empty() => StopRequests::NoneExplains,
        _ if exit.requests_known => StopRequests::None,
        RuntimeKind::Cri => StopRequests::UnknownOfPod,
        RuntimeKind::Podman => StopRequests::UnknownOfPodman,
        _ => StopRequests::Unknown,
    }
}

fn by_error(exit: &Exit, run: &RunSummary<'_>) -> (Cause, Confidence, ExitWhy) {
    use Confidence::{Certain, Likely, Unsure};
    if let Some(shm) = full_shm(run) {
        return (Cause::ShmFull, Likely, ExitWhy::ShmError(shm));
    }
    if let Some(kill) = run.unattributed_kills.first() {
        return (Cause::ErrorExit, Unsure, ExitWhy::PossibleKillOfChild { kill: Box::new((*kill).clone()) });
    }
    let counted = exit.runtime_oom_flag.filter(|_| exit.subject.is_run());
    if counted == Some(true) && run.kills.is_empty() {
        return (Cause::OomFlagOnly, Likely, ExitWhy::CountedKill);
    }
    if counted.is_none() && exit.before_counting && !exit.kernel_log_read {
        return (Cause::ErrorExit, Unsure, ExitWhy::ErrorLogUnread);
    }
    if run.kills.is_empty() && exit.oom_kills > 0 && !exit.may_be.is_empty() {
        return (Cause::OomFlagOnly, Likely, ExitWhy::LostKillBefore);
    }
    (Cause::ErrorExit, Certain, ExitWhy::OwnError { without_kill: run.kills.is_empty() })
}

/// Returns the other kills of the run: how many there were, of which the newest may be all that was read.
fn beside(run: &RunSummary<'_>, lead: Option<&Kill>, cause: Cause) -> Vec<Finding> {
    let others: Vec<&Kill> =
        run.kills.iter().copied().filter(|kill| lead.is_none_or(|lead| lead.id != kill.id)).collect();
    let counted = run.kills.iter().filter_map(|kill| kill.number).chain(run.exit.map(|exit| exit.oom_kills));
    let count = counted.max().unwrap_or(0).max(run.kills.len() as u64) - u64::from(lead.is_some());
    let with: Vec<_> =
        others.iter().filter(|kill| lead.is_some_and(|lead| is_killed_with(kill, lead))).collect();
    let mut found = Vec::new();
    if !with.is_empty() && with.len() as u64 == count {
        let processes = with.iter().take(MAX_NAMED).map(|kill| killed_process(kill)).collect();
        found.push(RunFinding::KilledWithIt { count, processes, is_cut: with.len() > MAX_NAMED }.into());
    } else if let (Some(first), Some(last)) = (others.first(), others.last()) {
        let is_all = count == others.len() as u64;
        let is_of_workers = |role: &Role| {
            is_all && Role::WORKERS.contains(role) && others.iter().all(|kill| kill.role == Some(*role))
        };
        let is_single = is_all && count == 1 && lead.is_none();
        found.push(
            RunFinding::OtherKills {
                count,
                is_more: lead.is_some(),
                role: first.role.filter(is_of_workers),
                first_at: is_all.then_some(first.at),
                last_at: last.at,
                kill: is_single.then(|| Box::new((*last).clone())),
            }
            .into(),
        );
    } else if count > 0 {
        found.push(RunFinding::CountedKills { count }.into());
    }
    found.extend(unread_kill(run, lead).filter(|_| cause != Cause::OomFlagOnly).map(Finding::from)); // said already there
    found.extend(lead.and_then(|kill| program::believed(kill, run)).map(Finding::from));
    found
}

fn killed_process(kill: &Kill) -> KilledProcess {
    KilledProcess { process: kill.process.to_string(), pid: kill.pid, role: kill.role }
}

/// Returns that a process may have been killed of which nothing but a flag, or a count, is left.
fn unread_kill(run: &RunSummary<'_>, lead: Option<&Kill>) -> Option<RunFinding> {
    let exit = run.exit.filter(|exit| lead.is_none() && exit.exit_code != Some(SIGKILL_STATUS))?;
    let is_flag_alone = exit.before_counting && !exit.kernel_log_read && exit.runtime_oom_flag == Some(true);
    is_flag_alone.then(|| RunFinding::UnreadKill { is_counted: exit.subject.is_run() })
}
