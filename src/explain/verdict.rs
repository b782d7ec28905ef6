//! Determines the cause and the sentence that describes it.

use super::limit::{inside, limit_bytes, limit_of};
use super::place::CgroupPlace;
use super::text::{name, role_noun, role_one, signal, signal_of, time};
use super::{
    Cause, Confidence, RunSummary, Verdict, advice, container_log, cuda_oom, ended_it, headline, last_sample,
    program, report, run_words,
};
use crate::discover::RuntimeKind;
use crate::events::{Evidence, Exit, ExitReason, Kill, KillOwner, Method, OomScope, Role, Victim};
use crate::ledger::run::{SIGKILL_STATUS, is_crash_status};
use crate::lifecycle::timing::{GROUP_WINDOW, RECORD_DELAY};
use crate::parse::container_id;
use crate::parse::kernel_log::NoKill;
use crate::runs::hit_limit::LimitPosition;
use crate::text::{bytes, lasted};

/// From this used share on, a `/dev/shm` counts as full: another batch does not fit.
const SHM_FULL_ABOVE: f64 = 0.9;
/// SIGBUS, raised by a write to a full `/dev/shm`.
const SIGBUS: i64 = 7;
/// What is said of a run whose cgroup counted nothing.
const WITHOUT_CGROUP: &str = "It had no cgroup, or that was gone before its counters were read: an OOM kill of one of its children is listed as one of the host (`memledger events`).";
/// Names of processes that are listed.
const MAX_NAMED: usize = 5;
pub(super) const SIGKILL: i32 = 9;
pub(super) const SIGTERM: i32 = 15;
/// A time in a log from elsewhere that is at least this many seconds is a Unix time, and none since the host's start.
const MIN_UNIX_SECONDS: f64 = 1e9;

/// Returns true if at least half of the unreclaimable memory was shared memory.
fn mostly_shared<'a>(kill: &'a Kill, run: &RunSummary<'a>) -> bool {
    if let Some(is_shared) = kill.report.as_deref().and_then(report::is_mostly_shared) {
        return is_shared;
    }
    last_sample(run.before(Some(kill)))
        .and_then(|last| Some(last.shmem_bytes? * 2 >= last.unreclaimable_bytes?))
        .unwrap_or(false)
}

/// Returns used bytes and size of a `/dev/shm` that was full at the last sample.
pub(super) fn full_shm(run: &RunSummary<'_>) -> Option<(u64, u64)> {
    let last = last_sample(run.before(None))?;
    let (used, size) = (last.shm_used_bytes?, last.shm_size_bytes?);
    (size > 0 && used as f64 >= SHM_FULL_ABOVE * size as f64).then_some((used, size))
}

/// Returns the verdict on one run of a container.
pub(super) fn verdict(run: &RunSummary<'_>, now: f64) -> Verdict {
    let lead = leading(run);
    let (cause, confidence, what) = match (lead, run.exit) {
        (Some(kill), _) => kill_cause(kill, run),
        (None, Some(exit)) => exit_cause(exit, run),
        (None, None) => cuda_oom::survived(run).unwrap_or_else(|| {
            (Cause::Unknown, Confidence::Unsure, "Nothing is recorded of this run.".to_owned())
        }),
    };
    let without_cgroup = run.exit.filter(|exit| exit.subject.is_run() && exit.runtime_oom_flag.is_none());
    let may_be_by_kill = lead.is_none() && matches!(cause, Cause::ErrorExit | Cause::KilledOutside);
    let without_cgroup = without_cgroup.filter(|_| may_be_by_kill).map(|_| WITHOUT_CGROUP.to_owned());
    let last_cuda_oom = run.cuda_ooms.last().map(|oom| oom.at);
    let mut evidence: Vec<Evidence> = lead.map(|kill| kill.evidence.clone()).unwrap_or_default();
    if is_cuda_oom(cause) {
        evidence.extend(cuda_oom::evidence(run));
    }
    evidence.extend(run.exit.into_iter().flat_map(|exit| exit.evidence.iter().cloned()));
    evidence.extend(flag_line(run, cause));
    let mut verdict = Verdict {
        subject: Some(run.subject.clone()),
        headline: lead
            .filter(|kill| !ended_it(kill, run.exit))
            .and_then(|kill| headline::after_kill(cause, kill, run))
            .or_else(|| headline::of_pod(cause, lead?, run)),
        cause,
        confidence,
        exit_reason: run.exit.and_then(|exit| exit.reason),
        ended: run.exit.map(ended).filter(|_| lead.is_none()),
        exit_code: run.exit.and_then(|exit| exit.exit_code),
        at: lead
            .map(|kill| kill.at)
            .or(run.exit.map(|exit| exit.at))
            .or(last_cuda_oom)
            .filter(|_| run.log_time.is_none()),
        log_time: run.log_time.filter(|time| !time.is_empty()).map(str::to_owned),
        requested_at: now,
        what,
        also: own_end(run, lead)
            .into_iter()
            .chain(also(run, lead, cause))
            .chain(cuda_oom::also(run).filter(|_| !is_cuda_oom(cause)))
            .chain(without_cgroup)
            .collect(),
        evidence,
        pid: lead.and_then(|kill| kill.pid),
        report: lead.and_then(|kill| kill.report.clone()),
        held: run.before(lead).cloned(),
        advice: advice::of(cause, run, lead),
    };
    if let Some(error) = run.exit.filter(|_| lead.is_none()).and_then(|exit| exit.log_error) {
        verdict.evidence.push(Evidence::new("log", error.error.kind().to_owned()));
        container_log::explain_by(&mut verdict, error);
    }
    run_words::adapt(verdict)
}

/// Returns true if the verdict is about a CUDA out-of-memory error.
pub fn is_cuda_oom(cause: Cause) -> bool {
    matches!(
        cause,
        Cause::CudaOom
            | Cause::CudaOomFragmented
            | Cause::CudaOomOtherHolder
            | Cause::CudaOomOwnProcesses
            | Cause::CudaOomOwnShare
            | Cause::CudaOomSurvived
    )
}

/// Returns the verdict on a kill outside containers.
pub(super) fn outside_containers<'a>(run: &RunSummary<'a>, kill: &'a Kill, now: f64) -> Verdict {
    let is_known = kill.owner == KillOwner::Host;
    let limit = CgroupPlace::of_limit(&kill.limit_cgroup);
    let (cause, confidence) = match kill.scope {
        _ if !is_known && run.log_time.is_none() => (Cause::OomUnattributed, Confidence::Unsure),
        _ if is_requested(kill) => (Cause::OomSysrq, Confidence::Certain),
        OomScope::Host if nodes_of(kill).is_some() => (Cause::OomNodes, Confidence::Certain),
        OomScope::Host if is_known => (Cause::OomHostProcess, Confidence::Certain),
        OomScope::Host => (Cause::OomHost, Confidence::Certain),
        OomScope::Container if is_known => (Cause::OomCgroupLimit, Confidence::Certain),
        OomScope::Container => (Cause::OomUnattributed, Confidence::Unsure),
    };
    let owner = owner_sentence(kill, run, &limit);
    let why = match kill.scope {
        _ if is_requested(kill) => "that was requested by sysrq".to_owned(),
        OomScope::Host => host_ran_out(kill, "the machine"),
        OomScope::Container => reached(&limit, kill.limit_bytes, kill),
    };
    let what = match kill.kernel_usec {
        Some(_) => format!(
            "{} the kernel's OOM killer killed {}{}, because {why}. {owner}",
            when(kill, run),
            process(kill),
            on_request_of(kill)
        ),
        None => format!(
            "By {} the kernel had killed one process more than its log shows: the record was lost. {owner}",
            time(kill.at)
        ),
    };
    Verdict {
        subject: None,
        headline: None,
        cause,
        confidence,
        exit_reason: None,
        ended: None,
        exit_code: None,
        at: Some(kill.at).filter(|_| run.log_time.is_none()),
        log_time: run.log_time.filter(|time| !time.is_empty()).map(str::to_owned),
        requested_at: now,
        what,
        also: also(run, Some(kill), cause),
        evidence: kill.evidence.clone(),
        pid: kill.pid,
        report: kill.report.clone(),
        held: kill.before.clone(),
        advice: advice::of(cause, run, Some(kill)),
    }
}

/// Says whose process was killed outside the known containers, as far as that is known.
fn owner_sentence(kill: &Kill, run: &RunSummary<'_>, limit: &CgroupPlace) -> String {
    let is_in_limit = kill.scope == OomScope::Container && *limit == CgroupPlace::of(&kill.cgroup);
    if let (KillOwner::Host, Some((_, named))) = (&kill.owner, container_id::outermost(&kill.cgroup)) {
        let place = CgroupPlace::of(&kill.cgroup).noun();
        let ran = if is_in_limit { String::new() } else { format!("It ran in {place}. ") };
        return format!(
            "{ran}Its cgroup has the id of the container {} in its name, which does not prove that it is the container's: no runtime says so, and not only root may make cgroups there.",
            &named.id[..12]
        );
    }
    match kill.owner {
        KillOwner::Host if kill.cgroup.is_empty() || &*kill.cgroup == "/" || is_in_limit => {
            "It belongs to no container of Docker, Podman or Kubernetes.".to_owned()
        }
        KillOwner::Host => {
            format!(
                "It ran in {}, in no container of Docker, Podman or Kubernetes.",
                CgroupPlace::of(&kill.cgroup).noun()
            )
        }
        KillOwner::Pending => "Evidence of its owner may still arrive: retry in a few seconds.".to_owned(),
        // since 5.1 one line has both, and since 5.0 the line above names the cgroup
        _ if run.log_time.is_some() && run.lacks_context && is_whole_message(kill) => {
            "Its container is not in the log: the line `oom-kill:` above `Killed process` names it."
                .to_owned()
        }
        _ if run.log_time.is_some() => "The log does not name its container.".to_owned(),
        _ => "No evidence shows its container or that it had none.".to_owned(),
    }
}

fn is_whole_message(kill: &Kill) -> bool {
    kill.evidence.iter().any(|line| line.text.contains("ut of memory: Killed process"))
}

/// Returns `At TIME`, with the time as a log from elsewhere has it.
fn when(kill: &Kill, run: &RunSummary<'_>) -> String {
    match run.log_time {
        None => format!("At {}", time(kill.at)),
        Some("") => "At an unknown time".to_owned(),
        Some(stamp) => match stamp.parse::<f64>() {
            Ok(seconds) if seconds >= MIN_UNIX_SECONDS => format!("At {}", time(seconds)),
            Ok(_) if !stamp.starts_with('+') => format!("{stamp} s after the host's start"),
            _ => format!("At {}", name(stamp)),
        },
    }
}

/// Returns the kill that the verdict is about, if any.
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

/// Describes the end of a run that went on after the kill that leads, where that has a reason of its own.
fn own_end(run: &RunSummary<'_>, lead: Option<&Kill>) -> Option<String> {
    let exit = run.exit.filter(|exit| exit.reason != Some(ExitReason::Completed))?;
    let kill = lead.filter(|kill| !ended_it(kill, run.exit))?;
    if exit.may_be.contains(&kill.id) && run.unattributed_kills.is_empty() {
        let is_open = exit.reason.is_some() && is_ambiguous(exit) && !exit.requests_known;
        return is_open.then(|| format!("It may also have been ended from outside: {}.", no_request(exit)));
    }
    if exit.reason.is_none() && !is_decided(kill) {
        return None;
    }
    let what = exit_cause(exit, run).2;
    // people stop what hangs, and then ask
    let hung = if was_requested(exit) {
        " It may have hung until then: a program that is not told of the death of a child waits for it, as multiprocessing.Pool does."
    } else {
        ""
    };
    Some(format!("{what}{hung}"))
}

/// Returns the kill of the process that the kernel chose, if this one was killed with it.
fn chosen<'a>(kill: &'a Kill, run: &RunSummary<'a>) -> &'a Kill {
    run.kills.iter().copied().find(|first| is_killed_with(kill, first)).unwrap_or(kill)
}

/// Returns whether a kill was of the same cgroup and moment as another one.
fn is_killed_with(kill: &Kill, first: &Kill) -> bool {
    !kill.group.is_empty() && kill.group == first.group && (kill.at - first.at).abs() < GROUP_WINDOW
}

/// Returns the verdict on an OOM that ended without a kill.
pub(super) fn without_kill<'a>(run: &RunSummary<'a>, kill: &'a Kill, no_kill: NoKill, now: f64) -> Verdict {
    let place = CgroupPlace::of_limit_of(&kill.limit_cgroup, run.subject);
    let is_own = limit_of(kill, run) == LimitPosition::Own;
    let who = match kill.scope {
        OomScope::Container if kill.limit_cgroup.is_empty() => "memory ran out".to_owned(),
        OomScope::Host => host_ran_out(kill, "the machine"),
        OomScope::Container if is_own => reached_by("the container", kill.limit_bytes, kill),
        OomScope::Container => reached(&place, kill.limit_bytes, kill),
    };
    let by = kill.report.as_ref().filter(|report| !report.requested_by.is_empty());
    let by = by
        .map_or_else(String::new, |report| format!(" when {} asked for memory", name(&report.requested_by)));
    let (cause, end) = match no_kill {
        NoKill::Panic => (Cause::OomPanic, "and the kernel panicked instead of killing a process."),
        NoKill::PanicNoVictim => {
            (Cause::OomPanic, "and the kernel panicked, because no process could be killed.")
        }
        _ => (
            Cause::OomNoVictim,
            "and no process there may be killed: each is exempt (oom_score_adj -1000) or dying already. Whoever asks for memory there \
             hangs until some is freed.",
        ),
    };
    Verdict {
        subject: matches!(kill.owner, KillOwner::Container(_)).then(|| run.subject.clone()),
        headline: None,
        cause,
        confidence: Confidence::Certain,
        exit_reason: None,
        ended: None,
        exit_code: None,
        at: None,
        log_time: run.log_time.filter(|time| !time.is_empty()).map(str::to_owned),
        requested_at: now,
        what: format!("{} {who}{by}, {end}", when(kill, run)),
        also: vec![],
        evidence: kill.evidence.clone(),
        pid: None,
        report: kill.report.clone(),
        held: None,
        advice: advice::of(cause, run, Some(kill)),
    }
}

fn kill_cause<'a>(kill: &'a Kill, run: &RunSummary<'a>) -> (Cause, Confidence, String) {
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
    (cause, confidence, sentence(kill, run, main, limit))
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

fn host_ran_out(kill: &Kill, machine: &str) -> String {
    match nodes_of(kill) {
        Some(nodes) => format!(
            "the memory of the NUMA nodes to which a cpuset or a memory policy restricts it ({}) ran out",
            name(nodes)
        ),
        None => match report::free_but_unusable(kill) {
            Some(free) => {
                format!("{machine} could not serve a request for memory, although {} were free", bytes(free))
            }
            None => format!("{machine} ran out of memory"),
        },
    }
}

/// Returns true if several containers lost processes at that time, and which was whose is not known.
fn is_one_of_a_set(kill: &Kill) -> bool {
    kill.method == Some(Method::Set)
}

fn sentence<'a>(kill: &'a Kill, run: &RunSummary<'a>, main: bool, limit: LimitPosition) -> String {
    let after = after(kill, run, main);
    if kill.kernel_usec.is_none() {
        let source = if kill.method == Some(Method::Runtime) {
            "the runtime reported it"
        } else {
            "its counters show it"
        };
        return format!(
            "By {} the kernel's OOM killer had killed a process of this container: {source}, but the \
             kernel's record was lost, so its name and size are not known; {after}",
            time(kill.at)
        );
    }
    let bytes = limit_bytes(kill, run);
    let why = match (kill.scope, limit) {
        _ if is_requested(kill) => "that was requested by sysrq".to_owned(),
        (OomScope::Host, _) => host_ran_out(kill, "the whole machine"),
        (_, LimitPosition::Own) => reached_by("the container", bytes, kill),
        (_, LimitPosition::Inside) => {
            reached_by(&format!("the cgroup {} inside it", inside(kill, run.subject)), bytes, kill)
        }
        (_, LimitPosition::Above) if kill.limit_cgroup.is_empty() => {
            reached_by("a cgroup above the container", bytes, kill)
        }
        (_, LimitPosition::Above) => match CgroupPlace::of_limit_of(&kill.limit_cgroup, run.subject) {
            place
            @ (CgroupPlace::AllPods { .. } | CgroupPlace::Pod { .. } | CgroupPlace::NamedPod { .. }) => {
                reached(&place, bytes, kill)
            }
            place => reached_by(&format!("{} above it", place.noun()), bytes, kill),
        },
        (_, LimitPosition::Unnamed) => reached_by("a cgroup (most likely the container's own)", bytes, kill),
    };
    let or_another = if is_one_of_a_set(kill) {
        " (or another process at that time: other containers lost some too, and only their number is known)"
    } else {
        ""
    };
    format!(
        "{} the kernel's OOM killer killed {}{or_another}{}, because {why}; {after}",
        when(kill, run),
        process(kill),
        on_request_of(kill)
    )
}

/// Names the process that asked for the memory, if it is not the victim.
fn on_request_of(kill: &Kill) -> String {
    let by = kill.report.as_ref().filter(|_| !is_requested(kill)).map_or("", |report| &*report.requested_by);
    // the kernel cuts names after 15 bytes
    let is_victim = by.is_empty() || kill.process.is_empty() || *by == *kill.process;
    if is_victim { String::new() } else { format!(" when {} asked for memory", name(by)) }
}

fn reached(place: &CgroupPlace, limit: Option<u64>, kill: &Kill) -> String {
    match place {
        CgroupPlace::AllPods { .. } | CgroupPlace::NamedPod { .. } => {
            let size = limit.map_or_else(String::new, |limit| format!(", {},", bytes(limit)));
            format!("{}{size} was reached", place.noun())
        }
        CgroupPlace::User { .. } => reached_by(&place.noun(), limit, kill).replace(" its ", " their "),
        _ => reached_by(&place.noun(), limit, kill),
    }
}

/// Returns `X reached its memory limit of Y`, without the figure if it is unknown.
fn reached_by(who: &str, limit: Option<u64>, kill: &Kill) -> String {
    let limit = limit.map_or_else(String::new, |limit| format!(" of {}", bytes(limit)));
    let with_swap = kill.report.as_ref().is_some_and(|report| report.with_swap);
    let kind = if with_swap { "limit of memory and swap together" } else { "memory limit" };
    format!("{who} reached its {kind}{limit}")
}

/// Describes the victim: name, pid, role and size, as far as known.
fn process(kill: &Kill) -> String {
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

fn short_process(kill: &Kill) -> String {
    kill.pid.map_or_else(|| name(&kill.process), |pid| format!("{} ({pid})", name(&kill.process)))
}

/// Describes a kill in one line.
pub(super) fn kill_line(kill: &Kill) -> String {
    let container = match &kill.owner {
        KillOwner::Container(subject) => format!("container {}", name(&subject.identity.name)),
        _ => "container unknown".to_owned(),
    };
    format!("{}: {}, {container}{}", time(kill.at), process(kill), limit_words(kill))
}

fn process_and_limit(kill: &Kill) -> String {
    format!("{}{}", process(kill), limit_words(kill))
}

fn limit_words(kill: &Kill) -> String {
    kill.limit_bytes.map_or_else(String::new, |limit| format!(", limit {}", bytes(limit)))
}

/// Returns whether it is known what the kill did to its container.
fn is_decided(kill: &Kill) -> bool {
    !matches!(kill.victim, None | Some(Victim::Unknown))
}

/// Describes the container after the kill.
fn after(kill: &Kill, run: &RunSummary<'_>, main: bool) -> String {
    let Some(exit) = run.exit else {
        return match (main, kill.victim) {
            (true, _) => "that ended the container.".to_owned(),
            (false, Some(Victim::Main | Victim::Child)) => "the container kept running.".to_owned(),
            (false, _) if run.log_time.is_some() => {
                "whether that ended the container is not in the log.".to_owned()
            }
            (false, None) => "no end of the container is recorded so far.".to_owned(),
            (false, _) => "no end of the container is recorded.".to_owned(),
        };
    };
    if main {
        return format!("that ended the container{}.", with_code(exit));
    }
    let later = match exit.at - kill.at {
        seconds if seconds < 1.0 => "right after".to_owned(),
        seconds => format!("{} later", lasted(seconds)),
    };
    let code = with_code(exit);
    if was_requested(exit) {
        return format!("the container kept running until it was stopped {later}{code}.");
    }
    let status = match exit.exit_code {
        Some(SIGKILL_STATUS) if exit.may_be.contains(&kill.id) && run.unattributed_kills.is_empty() => {
            ", most likely the status of that child"
        }
        _ => "",
    };
    if is_decided(kill) {
        format!("the container kept running and ended {later}{code}{status}.")
    } else {
        format!("the container ended {later}{code}; whether by that kill is not decided yet.")
    }
}

/// Returns whether an exit status is one that a program returns for a child, or that a signal has.
fn is_ambiguous(exit: &Exit) -> bool {
    signal_of(exit.exit_code).is_some()
}

fn with_code(exit: &Exit) -> String {
    exit.exit_code.map_or_else(String::new, |code| format!(" with exit code {code}"))
}

/// Says when and how a container ended.
fn ended(exit: &Exit) -> String {
    let after = exit.duration_seconds.map_or_else(String::new, |it| format!(" after {}", lasted(it)));
    format!("At {} the container ended{}{after}", time(exit.at), with_code(exit))
}

fn was_requested(exit: &Exit) -> bool {
    exit.reason == Some(ExitReason::Stopped)
}

fn exit_cause(exit: &Exit, run: &RunSummary<'_>) -> (Cause, Confidence, String) {
    let at = ended(exit);
    match exit.reason {
        _ if run.has_logged_cuda_oom() => cuda_oom::verdict(exit, run, &at),
        Some(ExitReason::OomContainer) => lost_kill(Cause::OomLimitMain, &at, "a memory limit was reached"),
        Some(ExitReason::OomHost) => lost_kill(Cause::OomHost, &at, "the machine ran out of memory"),
        Some(ExitReason::Completed) => {
            let how = if exit.requests_known {
                "finished by itself, without an error"
            } else {
                "finished without an error"
            };
            (Cause::Completed, Confidence::Certain, format!("{at}: it {how}."))
        }
        Some(ExitReason::Stopped) => stopped(exit, &at),
        Some(ExitReason::Killed) => killed(run, &at),
        Some(ExitReason::Signal) => by_signal(exit, run, &at),
        Some(ExitReason::Error) => by_error(run, &at),
        Some(ExitReason::Refused | ExitReason::OwnLimit | ExitReason::Threads | ExitReason::Shm) => {
            (Cause::ErrorExit, Confidence::Likely, format!("{at}."))
        }
        Some(ExitReason::CudaOom) => cuda_oom::verdict(exit, run, &at),
        Some(ExitReason::HostRestart) => {
            let what = format!(
                "By {} the container had ended, because the host was restarted or lost power: its run began before that.",
                time(exit.at)
            );
            (Cause::HostRestart, Confidence::Certain, what)
        }
        Some(ExitReason::Unknown) if !run.unattributed_kills.is_empty() => killed(run, &at),
        Some(ExitReason::Unknown) if exit.runtime_oom_flag == Some(true) => without_record(exit, &at),
        Some(ExitReason::Unknown) if !exit.kernel_log_read && exit.exit_code == Some(SIGKILL_STATUS) => (
            Cause::Unknown,
            Confidence::Unsure,
            format!(
                "{at}, the status after SIGKILL. No record of an OOM kill at that time could be read, so it may have been one or \
                 not."
            ),
        ),
        Some(ExitReason::Unknown) => {
            let why = match exit.subject.identity.k8s_pod.is_empty() {
                true => "no runtime was connected, or memledger did not run",
                // the kubelet does so within a second when the pod is deleted or evicted
                false => {
                    "the runtime had removed it before it was read, or was not connected, or memledger did not run"
                }
            };
            (Cause::Unknown, Confidence::Unsure, format!("{at} for a reason that is not recorded: {why}."))
        }
        None => (
            Cause::Unknown,
            Confidence::Unsure,
            format!("{at}; evidence of the reason may still arrive: retry in a few seconds."),
        ),
    }
}

/// Returns the cause where the flag of a runtime, or the counter of a run's cgroup, is all that is left of a kill.
fn without_record(exit: &Exit, at: &str) -> (Cause, Confidence, String) {
    let (known, confidence) = match exit.subject.is_run() {
        true => ("Its cgroup counted an OOM kill", Confidence::Certain),
        false => ("The runtime's flag OOMKilled is set", Confidence::Likely),
    };
    let what = format!(
        "{at}. {known}. No record of the kill could be read, so the process, its size and the limit are not known."
    );
    (Cause::OomFlagOnly, confidence, what)
}

fn lost_kill(cause: Cause, at: &str, why: &str) -> (Cause, Confidence, String) {
    let what =
        format!("{at} by an OOM kill, because {why}; the kill's own record is not in the ledger (any more).");
    (cause, Confidence::Likely, what)
}

fn stopped(exit: &Exit, at: &str) -> (Cause, Confidence, String) {
    match exit.requested_signal() {
        // the first step of `docker stop`
        Some(SIGKILL) if exit.stop_signals.contains(&Some(SIGTERM)) => {
            let what = format!(
                "{at} on a stop request: it did not exit on SIGTERM, and the runtime killed it after the stop timeout."
            );
            (Cause::Stopped, Confidence::Certain, what)
        }
        Some(SIGKILL) => {
            let what = format!(
                "{at} on a kill request to the runtime (SIGKILL): docker kill, docker rm -f, or docker stop after its \
                 timeout."
            );
            (Cause::KilledByRequest, Confidence::Certain, what)
        }
        Some(number) => {
            let name = signal(number.into());
            let killed = match exit.exit_code {
                Some(137) => ", and was killed because it did not exit",
                _ => "",
            };
            let what = format!("{at} on a stop request to the runtime ({name}){killed}.");
            (Cause::Stopped, Confidence::Certain, what)
        }
        None => {
            let what = format!("{at} on a stop request to the runtime; the signal is not known.");
            (Cause::Stopped, Confidence::Likely, what)
        }
    }
}

fn killed(run: &RunSummary<'_>, at: &str) -> (Cause, Confidence, String) {
    if let Some(kill) = run.unattributed_kills.first() {
        let what = format!(
            "{at}, the status after SIGKILL. At that time the kernel's OOM killer killed {} of an unknown container: it may \
             have been this one.",
            process(kill)
        );
        return (Cause::Unknown, Confidence::Unsure, what);
    }
    if run.exit.is_some_and(|exit| !exit.kernel_log_read) {
        let what = format!(
            "{at}, the status after SIGKILL, and {}. The kernel log could not be read \
             then, so an OOM kill is unlikely but possible: no counter that could be read showed one.",
            run.exit.map_or("", no_request)
        );
        return (Cause::KilledOutside, Confidence::Likely, what);
    }
    let flagged = run.exit.is_some_and(|exit| exit.runtime_oom_flag == Some(true));
    let requests_known = run.exit.is_some_and(|exit| exit.requests_known);
    let confidence = if flagged || !requests_known { Confidence::Likely } else { Confidence::Certain };
    let none = match run.kills.last().zip(run.exit) {
        None => "It was NOT an OOM kill: the kernel recorded none for it".to_owned(),
        Some((kill, exit)) => {
            format!("No OOM kill explains it: the last of this run was {} before", lasted(exit.at - kill.at))
        }
    };
    let what = format!("{at}, the status after SIGKILL. {none}. And {}.", run.exit.map_or("", no_request));
    (Cause::KilledOutside, confidence, what)
}

fn by_signal(exit: &Exit, run: &RunSummary<'_>, at: &str) -> (Cause, Confidence, String) {
    let Some(number) = signal_of(exit.exit_code) else {
        let what = format!("{at}, by a signal whose name is not recorded.");
        return (Cause::EndedBySignal, Confidence::Likely, what);
    };
    let name = signal(number);
    if number == SIGBUS
        && let Some((used, size)) = full_shm(run)
    {
        let what = format!(
            "{at}, by SIGBUS, while {} of the {} of its /dev/shm were in use: a write to a full /dev/shm raises SIGBUS.",
            bytes(used),
            bytes(size)
        );
        return (Cause::ShmFull, Confidence::Likely, what);
    }
    match number {
        11 if !exit.subject.is_run() => {
            let what = format!("{at}, by {name} or by abort(): it crashed.");
            (Cause::CrashedSignal, Confidence::Certain, what)
        }
        _ if exit.exit_code.is_some_and(is_crash_status) => {
            (Cause::CrashedSignal, Confidence::Certain, format!("{at}, by {name}: it crashed."))
        }
        _ => {
            let what = format!("{at}, by {name}; {}.", no_request(exit));
            (Cause::EndedBySignal, Confidence::Certain, what)
        }
    }
}

/// Says that no stop request explains an exit, or why that is not known.
fn no_request(exit: &Exit) -> &'static str {
    match (exit.subject.runtime, exit.stop_signals.is_empty()) {
        (_, false) => "no stop request shortly before explains it",
        _ if exit.requests_known => "there was no stop request to the runtime",
        (RuntimeKind::Cri, _) => {
            "whether it was told to stop is not known: pods report no stop requests, as of a deletion"
        }
        (RuntimeKind::Podman, _) => {
            "whether it was told to stop is not known: Podman reports no stop requests"
        }
        _ => "whether it was told to stop is not known",
    }
}

fn by_error(run: &RunSummary<'_>, at: &str) -> (Cause, Confidence, String) {
    if let Some((used, size)) = full_shm(run) {
        let what = format!(
            "{at}, while {} of the {} of its /dev/shm were in use: a full one kills DataLoader workers (SIGBUS), \
             and the trainer then ends with an error. Its log would prove it.",
            bytes(used),
            bytes(size)
        );
        return (Cause::ShmFull, Confidence::Likely, what);
    }
    if let Some(kill) = run.unattributed_kills.first() {
        let what = format!(
            "{at}. At that time the kernel's OOM killer killed {} of an unknown container: if it was a child of this one, that \
             is the cause; else it was its own error.",
            process(kill)
        );
        return (Cause::ErrorExit, Confidence::Unsure, what);
    }
    let counted = run.exit.filter(|exit| exit.subject.is_run()).and_then(|exit| exit.runtime_oom_flag);
    if counted == Some(true) && run.kills.is_empty() {
        let what = format!(
            "{at}, and its cgroup counted an OOM kill: most likely one of its workers was killed, and the program then ended. No record of \
             the kill could be read, so the process, its size and the limit are not known."
        );
        return (Cause::OomFlagOnly, Confidence::Likely, what);
    }
    if counted.is_none() && run.exit.is_some_and(|exit| exit.before_counting && !exit.kernel_log_read) {
        let what = format!(
            "{at}. The kernel log could not be read for that time: if a child of it was OOM-killed, that is the cause; else it was its \
             own error."
        );
        return (Cause::ErrorExit, Confidence::Unsure, what);
    }
    if run.kills.is_empty() && run.exit.is_some_and(|exit| exit.oom_kills > 0 && !exit.may_be.is_empty()) {
        let what = format!(
            "{at}. A process of it was OOM-killed before, which may be the cause; the kill's own record is not in the ledger (any more)."
        );
        return (Cause::OomFlagOnly, Confidence::Likely, what);
    }
    let none = if run.kills.is_empty() { " No OOM kill of this run is recorded." } else { "" };
    let what = format!("{at}: its own error.{none}");
    (Cause::ErrorExit, Confidence::Certain, what)
}

/// Returns a note on the runtime's OOMKilled flag if it contradicts the verdict.
fn flag_line(run: &RunSummary<'_>, cause: Cause) -> Option<Evidence> {
    let exit = run.exit?;
    let flag = exit.runtime_oom_flag?;
    if exit.subject.is_run() || exit.evidence.iter().any(|line| line.text.contains("OOMKilled")) {
        return None; // mentioned already
    }
    let oom = !run.kills.is_empty() || matches!(cause, Cause::OomLimitMain | Cause::OomHost);
    (flag != oom).then(|| {
        let text = format!(
            "OOMKilled={flag}, ignored: runtimes lose OOM events, and also set the flag without a kill"
        );
        Evidence::new("runtime", text)
    })
}

/// Describes the other kills of the run in one line: how many there were, of which the newest may be all that was read.
fn also(run: &RunSummary<'_>, lead: Option<&Kill>, cause: Cause) -> Vec<String> {
    let others: Vec<_> = run.kills.iter().filter(|kill| lead.is_none_or(|lead| lead.id != kill.id)).collect();
    let counted = run.kills.iter().filter_map(|kill| kill.number).chain(run.exit.map(|exit| exit.oom_kills));
    let all = counted.max().unwrap_or(0).max(run.kills.len() as u64) - u64::from(lead.is_some());
    let mut lines = Vec::new();
    let with: Vec<_> =
        others.iter().filter(|kill| lead.is_some_and(|lead| is_killed_with(kill, lead))).collect();
    if !with.is_empty() && with.len() as u64 == all {
        let mut names: Vec<String> = with.iter().take(MAX_NAMED).map(|kill| short_process(kill)).collect();
        names.extend((with.len() > MAX_NAMED).then(|| "...".to_owned()));
        let (noun, was) = if all == 1 { ("process", "was") } else { ("processes", "were") };
        lines.push(format!(
            "{all} more {noun} {was} killed with it, because its cgroup is killed as a whole (memory.oom.group): {}.",
            names.join(", ")
        ));
    } else if let (Some(first), Some(last)) = (others.first(), others.last()) {
        let is_all = all == others.len() as u64;
        let more = if lead.is_some() { " more" } else { "" };
        let is_of_workers = |role: &Role| {
            is_all && Role::WORKERS.contains(role) && others.iter().all(|kill| kill.role == Some(*role))
        };
        let was = if all == 1 { "was" } else { "were" };
        let noun = match first.role.filter(is_of_workers) {
            Some(role) => role_noun(role, all),
            None if all == 1 => "process",
            None => "processes",
        };
        let when = match (is_all, all) {
            (true, 1) if lead.is_none() => format!("at {}: {}.", time(last.at), process_and_limit(last)),
            (true, 1) => format!("at {}.", time(last.at)),
            (true, _) => format!("first at {}, last at {}.", time(first.at), time(last.at)),
            (false, _) => {
                format!("the last at {}; `memledger events` has those that are kept.", time(last.at))
            }
        };
        lines.push(format!("{all}{more} {noun} of this run {was} OOM-killed, {when}"));
    } else if all > 0 {
        let kills = if all == 1 { "kill" } else { "kills" };
        lines.push(format!(
            "The ledger counted {all} OOM {kills} in this run that it does not list any more."
        ));
    }
    lines.extend(unread_kill(run, lead).filter(|_| cause != Cause::OomFlagOnly)); // said already there
    lines.extend(lead.and_then(|kill| program::believed(kill, run)));
    lines
}

/// Says that a process may have been killed of which nothing but a flag, or a count, is left.
fn unread_kill(run: &RunSummary<'_>, lead: Option<&Kill>) -> Option<String> {
    let exit = run.exit.filter(|exit| lead.is_none() && exit.exit_code != Some(SIGKILL_STATUS))?;
    let is_flag_alone = exit.before_counting && !exit.kernel_log_read && exit.runtime_oom_flag == Some(true);
    let line = match exit.subject.is_run() {
        true => {
            "Its cgroup counted an OOM kill: a process of it was killed; no record of that could be read."
        }
        false => {
            "The runtime's flag OOMKilled is set: a process of it may have been OOM-killed; no record of that could be read."
        }
    };
    is_flag_alone.then(|| line.to_owned())
}
