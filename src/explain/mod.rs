//! `memledger why`: derives one verdict from the ledger's events on why a container exited, or why one of its processes
//! was killed.
//!
//! The newest run with an event is considered. Within it, an OOM kill is the cause if the exit says that it ended the
//! container, or may have; otherwise the exit itself is. A verdict claims no more than the events prove: probable causes have
//! [`Confidence::Likely`], and unrecorded ones stay unknown. Figures in advice are read from the events or computed from
//! them; without figures, advice has none.
//!
//! The caller provides the events; `export::verdict_text` renders the screen.

mod advice;
mod answer;
mod container_log;
mod cuda_oom;
mod headline;
mod limit;
pub mod live;
mod log_file;
mod notice;
mod place;
mod program;
mod refusal;
mod report;
mod run_events;
mod run_words;
mod start_error;
mod verdict;
mod text;
#[cfg(test)]
mod worlds;

use std::sync::Arc;

use serde::Serialize;

use crate::discover::history::ExistingContainer;
use crate::discover::same_start;
use crate::events::{
    ContainerRef, CudaOom, CudaOomSource, Evidence, Exit, ExitReason, Identity, Kill, KillOwner, LedgerEvent,
    OomReport, PriorUsage, UsageSample, Victim,
};
use crate::ledger::store::Query;
use crate::lifecycle::timing::{CAUSE_WINDOW, EXIT_WINDOW};
use crate::parse::kernel_log::entries::TextWords;
use crate::runs::RunRecord;
pub use answer::WhyDocument;
pub use container_log::{add_cuda_error, add_logged_error, remove_log_advice};
use live::CurrentUsage;
pub use log_file::{LoggedKill, LoggedKills};
pub use notice::explain_notice;
pub use refusal::explain_refusal;
use run_events::run_of;
pub use text::{roles, short_ids, time};
pub use verdict::is_cuda_oom;

/// Maximum number of names that are listed.
const MAX_LISTED_NAMES: usize = 10;

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

    /// Returns a headline.
    pub fn title(self) -> &'static str {
        match self {
            Cause::OomLimitMain => "OUT OF MEMORY at its own limit: the container was ended",
            Cause::OomLimitWorker => "OUT OF MEMORY at its own limit: a child process was killed",
            Cause::OomLimitWorkerThenExit => {
                "OUT OF MEMORY at its own limit: a child was killed, then it ended"
            }
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
            Cause::CudaOomOwnProcesses => {
                "OUT OF GPU MEMORY: other processes of the container use the same GPU"
            }
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
}

/// How certain the verdict is.
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

/// The verdict on a container or a kill.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// The container; `None` for a kill outside containers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subject: Option<ContainerRef>,
    /// The headline, where the title of the cause does not say all.
    #[serde(skip)]
    pub headline: Option<String>,
    /// The cause.
    pub cause: Cause,
    /// How certain the verdict is.
    pub confidence: Confidence,
    /// Why the run ended, as its event, its record and the metrics say; `None` while it runs, is not decided, or nothing is known of it.
    /// The cause says more: it leads with a kill of the run, and may come from sources that are read on request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_reason: Option<ExitReason>,
    /// Unix time of the event; `None` if there is none, or if it is not known: in a kernel log from elsewhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at: Option<f64>,
    /// Time of a kill in a kernel log from elsewhere, as the log has it: often seconds since boot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_time: Option<String>,
    /// Unix time of the query.
    pub requested_at: f64,
    /// One sentence: what ended the container or killed a process of it, and when.
    pub what: String,
    /// When and how it ended, where `what` adds a reason that a log may replace: no sentence yet.
    #[serde(skip)]
    pub ended: Option<String>,
    /// The exit code.
    #[serde(skip)]
    pub exit_code: Option<i64>,
    /// Other events of the same run, one line each.
    pub also: Vec<String>,
    /// Evidence in the order in which it arrived.
    pub evidence: Vec<Evidence>,
    /// Host pid of the victim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// What the kernel logged at the kill.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub report: Option<Arc<OomReport>>,
    /// Usage before the event: samples oldest first, and processes by role.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held: Option<Arc<PriorUsage>>,
    /// Advice, the most promising first.
    pub advice: Vec<String>,
}

/// The events of one run of a container.
#[derive(Debug)]
struct RunSummary<'a> {
    subject: &'a ContainerRef,
    /// Oldest first.
    kills: Vec<&'a Kill>,
    exit: Option<&'a Exit>,
    /// CUDA out-of-memory errors, oldest first.
    cuda_ooms: Vec<&'a CudaOom>,
    /// Kills near the end of the run that could not be attributed to any container.
    unattributed_kills: Vec<&'a Kill>,
    /// The run before ended just before this one began.
    follows_at_once: bool,
    /// The time of the kill as a kernel log from elsewhere has it; empty without one. `None`: the events are of this host.
    log_time: Option<&'a str>,
    /// That kernel log has no line that names the cgroup of a victim.
    lacks_context: bool,
}

impl<'a> RunSummary<'a> {
    /// Returns whether its log was read on request, and has the CUDA out-of-memory error that ended it.
    fn has_logged_cuda_oom(&self) -> bool {
        let is_logged =
            |oom: &&CudaOom| oom.id == container_log::UNRECORDED && oom.source == CudaOomSource::Log;
        self.cuda_ooms.iter().any(is_logged)
    }

    /// Returns the usage before the leading kill, else before the exit.
    ///
    /// Of several kills in a short time only the first is stored with its prior usage, which then serves all of them.
    fn before(&self, lead: Option<&'a Kill>) -> Option<&'a Arc<PriorUsage>> {
        let at_kill = lead.and_then(|lead| {
            let near =
                self.kills.iter().rev().filter(|kill| (0.0..=CAUSE_WINDOW).contains(&(lead.at - kill.at)));
            lead.before.as_ref().or_else(|| near.into_iter().find_map(|kill| kill.before.as_ref()))
        });
        at_kill.or_else(|| self.exit.and_then(|exit| exit.before.as_ref()))
    }
}

/// Returns the verdict on a kill in a kernel log from elsewhere, where nothing else is known. `missing`: what the log lacks, for a kill
/// without a whole report.
pub fn explain_logged(logged: &LoggedKill, (missing, words): (Option<&str>, TextWords), now: f64) -> Verdict {
    let (kill, log_time) = (&logged.kill, Some(&*logged.log_time));
    let none = ContainerRef::default();
    let subject = match &kill.owner {
        KillOwner::Container(subject) => subject,
        _ => &none,
    };
    let run = RunSummary {
        subject,
        kills: std::iter::once(kill).chain(&logged.killed_with).collect(),
        exit: None,
        cuda_ooms: vec![],
        unattributed_kills: vec![],
        follows_at_once: false,
        log_time,
        lacks_context: !words.has_context,
    };
    let mut verdict = match (logged.no_kill, &kill.owner) {
        (Some(no_kill), _) => verdict::without_kill(&run, kill, no_kill, now),
        (None, KillOwner::Container(_)) => verdict::verdict(&run, now),
        (None, _) => verdict::outside_containers(&run, kill, now),
    };
    if kill.report.as_ref().is_none_or(|report| report.incomplete || report.process_count.is_none()) {
        verdict.advice.splice(0..0, missing.map(str::to_owned));
    }
    verdict
}

/// Returns true if the kill ended the container. An exit names the kill: in a loop of restarts the one of the run before is near.
fn ended_it(kill: &Kill, exit: Option<&Exit>) -> bool {
    let is_main = kill.victim == Some(Victim::Main);
    match exit {
        Some(Exit { ended_by: Some(id), .. }) => *id == kill.id,
        Some(Exit { reason: None | Some(ExitReason::OomContainer | ExitReason::OomHost), .. }) | None => {
            is_main
        }
        Some(_) => false,
    }
}

/// Returns the last sample of the prior usage.
fn last_sample(before: Option<&Arc<PriorUsage>>) -> Option<&UsageSample> {
    before.and_then(|before| before.samples.last())
}

/// Returns the verdict on the newest run in `events`, which are oldest first and may include kills outside containers.
///
/// Returns `None` if no event has a container. If several containers have the same name, the newest is considered.
pub fn explain(events: &[LedgerEvent], now: f64) -> Option<Verdict> {
    // a program may survive an error of CUDA: an earlier end or kill is what people ask for
    let is_end =
        |event: &&LedgerEvent| event.subject().is_some() && !matches!(event, LedgerEvent::CudaOom(_));
    let newest_of_all = || events.iter().rev().find(|event| event.subject().is_some());
    let newest = events.iter().rev().find(is_end).or_else(newest_of_all)?;
    let subject = newest.subject()?;
    let mut verdict = verdict::verdict(&run_of(events, newest, subject), now);
    let is_later_run = |its: &ContainerRef| match (its.started, subject.started) {
        (Some(its), Some(ours)) => !same_start(its, ours),
        _ => matches!(newest, LedgerEvent::Exit(_)),
    };
    let is_newer = |event: &&LedgerEvent| {
        let is_its = event.subject().is_some_and(|its| same_container(its, subject) && is_later_run(its));
        matches!(event, LedgerEvent::CudaOom(_)) && is_its && event.at() > newest.at() + EXIT_WINDOW
    };
    if let Some(error) = events.iter().rev().find(is_newer) {
        verdict.also.push(format!(
            "It runs again, and had a CUDA out-of-memory error at {}: `memledger events` has it.",
            time(error.at())
        ));
    }
    let others = others_of_that_name(events, &subject.identity);
    if others > 0 {
        verdict.also.push(format!(
            "{others} other {} of that name; this is the newest. Use an id for another one.",
            if others == 1 { "container is" } else { "containers are" }
        ));
    }
    Some(verdict)
}

/// Returns the verdict on the newest OOM kill or abnormal exit on the host, or `None` if there was none.
pub fn explain_last(events: &[LedgerEvent], now: f64) -> Option<Verdict> {
    let newest = events.iter().rev().find(|event| event.is_notable())?;
    match (newest, newest.subject()) {
        (_, Some(subject)) => Some(verdict::verdict(&run_of(events, newest, subject), now)),
        (LedgerEvent::OomKill(kill), None) => {
            let run = RunSummary {
                subject: &ContainerRef::default(),
                kills: vec![kill],
                exit: None,
                cuda_ooms: vec![],
                unattributed_kills: vec![],
                follows_at_once: false,
                log_time: None,
                lacks_context: false,
            };
            Some(verdict::outside_containers(&run, kill, now))
        }
        (LedgerEvent::Exit(_) | LedgerEvent::GpuError(_) | LedgerEvent::CudaOom(_), None) => None,
    }
}

/// Returns the verdict on the container with this name, id or prefix of an id, or, without one, on the newest kill or
/// abnormal exit on the host. `None`: no event is recorded.
///
/// # Errors
/// Errors of `events`.
pub fn query_verdict<E>(
    container: Option<&str>,
    now: f64,
    events: impl Fn(&Query) -> Result<Vec<LedgerEvent>, E>,
) -> Result<Option<Verdict>, E> {
    let Some(container) = container else {
        let newest = events(&Query { only_notable: true, limit: 1, ..Query::default() })?.pop();
        let id =
            newest.as_ref().and_then(LedgerEvent::subject).map(|subject| subject.container_id.to_string());
        let mut found = match id {
            Some(id) => events_of(&id, &events)?,
            None => vec![],
        };
        found.extend(newest.filter(|newest| !found.iter().any(|event| event.id() == newest.id())));
        return Ok(explain_last(&found, now));
    };
    let events = events_of(container, &events)?;
    let mut found = explain(&events, now);
    if let Some(verdict) = &mut found {
        verdict.also.extend(name_change(verdict, container));
        let others = others_of_pod(verdict, container, &events, now);
        verdict.also.extend(others);
    }
    Ok(found)
}

/// Returns a line for each other container of a wanted pod, the newest first.
fn others_of_pod(verdict: &Verdict, wanted: &str, events: &[LedgerEvent], now: f64) -> Vec<String> {
    let Some(subject) = verdict.subject.as_ref().filter(|subject| subject.identity.is_of_pod(wanted)) else {
        return vec![];
    };
    let mut seen = vec![&subject.identity];
    let mut lines = Vec::new();
    for identity in events.iter().rev().filter_map(LedgerEvent::subject).map(|subject| &subject.identity) {
        if seen.contains(&identity) {
            continue;
        }
        seen.push(identity);
        let is_its =
            |event: &&LedgerEvent| event.subject().is_some_and(|subject| subject.identity == *identity);
        let own: Vec<_> = events.iter().filter(is_its).cloned().collect();
        if let Some(other) = explain(&own, now) {
            let path = text::name(&identity.short_path());
            lines.push(format!("Of the same pod, {path}: {} (memledger why {path}).", other.title()));
        }
    }
    lines
}

/// Returns whether the verdict is about a container that had the wanted name before it was renamed.
pub fn has_other_name(verdict: &Verdict, wanted: &str) -> bool {
    let subject = verdict.subject.as_ref();
    subject.is_some_and(|subject| {
        &*subject.identity.name != wanted && subject.former_names.iter().any(|name| **name == *wanted)
    })
}

/// Returns a sentence on the other names of the container of a verdict, if it has any.
fn name_change(verdict: &Verdict, wanted: &str) -> Option<String> {
    let subject = verdict.subject.as_ref()?;
    let before = subject.former_names.last()?;
    let name = text::name(&subject.identity.name);
    Some(match has_other_name(verdict, wanted) {
        true => format!("{} was renamed: it is {name} now.", text::name(wanted)),
        false => format!("{name} was renamed: it was {} before.", text::name(before)),
    })
}

/// Returns the verdict on one exit, whatever the container did later; `None` if it was no abnormal end and lost no process, or if the exit
/// is no longer in the ledger.
///
/// # Errors
/// Errors of `events`.
pub fn exit_verdict<E>(
    exit_id: u64,
    run: &RunRecord,
    now: f64,
    events: impl Fn(&Query) -> Result<Vec<LedgerEvent>, E>,
) -> Result<Option<Verdict>, E> {
    let at = run.ended.unwrap_or(f64::MAX);
    let until = Some(at + EXIT_WINDOW);
    let container = Some(run.subject.container_id.to_string());
    let mut found =
        with_possible_kills(&Query { container, until, ..Query::default() }, Some(exit_id), &events)?;
    let is_it = |event: &&LedgerEvent| event.id() == exit_id;
    let Some(event @ LedgerEvent::Exit(exit)) = found.iter().find(is_it) else { return Ok(None) };
    if !event.is_notable() && exit.oom_kills == 0 {
        return Ok(None);
    }
    let exit = exit.clone();
    let is_linked = |id: u64| exit.ended_by == Some(id) || exit.may_be.contains(&id);
    let is_of_run = |event: &LedgerEvent| {
        event.subject().and_then(ContainerRef::run_id).is_some_and(|of| Some(of) == exit.subject.run_id())
    };
    found.retain(|event| match event {
        LedgerEvent::Exit(other) => other.id == exit_id || other.at < exit.at,
        other => other.at() <= exit.at || is_linked(other.id()) || is_of_run(other),
    });
    Ok(explain(&found, now))
}

/// Returns the newest events of a container, and the kills without a container that may have ended it.
fn events_of<E>(
    container: &str,
    events: &impl Fn(&Query) -> Result<Vec<LedgerEvent>, E>,
) -> Result<Vec<LedgerEvent>, E> {
    with_possible_kills(&Query { container: Some(container.to_owned()), ..Query::default() }, None, events)
}

/// Returns the selected events, and the kills without a container that may have ended it: by the exit with this id, else by the newest.
fn with_possible_kills<E>(
    query: &Query,
    exit_id: Option<u64>,
    events: &impl Fn(&Query) -> Result<Vec<LedgerEvent>, E>,
) -> Result<Vec<LedgerEvent>, E> {
    let mut found = events(query)?;
    // a GPU error does not end a container by itself; `memledger events` shows it
    found.retain(|event| !matches!(event, LedgerEvent::GpuError(_)));
    let may_be = found.iter().rev().find_map(|event| match event {
        LedgerEvent::Exit(exit) if exit_id.is_none_or(|id| id == exit.id) => Some(exit.may_be.clone()),
        _ => None,
    });
    let ids: Vec<u64> = may_be.unwrap_or_default();
    let ids: Vec<u64> = ids.into_iter().filter(|id| !found.iter().any(|event| event.id() == *id)).collect();
    if !ids.is_empty() {
        found.extend(events(&Query { ids, ..Query::default() })?);
        found.sort_by(|one, other| one.at().total_cmp(&other.at()));
    }
    Ok(found)
}

/// Returns the message for a container without events: the known containers, similar names first. `existing`: names of
/// containers that exist.
///
/// # Errors
/// Errors of `events`.
pub fn not_found<E>(
    container: Option<&str>,
    existing: impl Iterator<Item = String>,
    events: impl Fn(&Query) -> Result<Vec<LedgerEvent>, E>,
) -> Result<String, E> {
    let Some(container) = container else {
        return Ok("No OOM kill and no abnormal end of a container is known.".to_owned());
    };
    let recorded = events(&Query::default())?;
    // a short id in place of a name helps nobody
    let is_named = |subject: &&ContainerRef| !subject.container_id.starts_with(&*subject.identity.name);
    let recorded = recorded.iter().rev().filter_map(LedgerEvent::subject).filter(is_named);
    let mut known: Vec<String> = Vec::new();
    let recorded = recorded.map(|subject| subject.identity.short_path());
    for name in recorded.chain(existing) {
        if !known.contains(&name) {
            known.push(name);
        }
    }
    known.sort_by_key(|name| !similar(name, container)); // stable sort: the newest first among equals
    let list: Vec<String> = known.iter().take(MAX_LISTED_NAMES).map(|known| text::name(known)).collect();
    let list = match (list.is_empty(), known.len() > MAX_LISTED_NAMES) {
        (true, _) => "no container is known".to_owned(),
        (false, more) => format!("known containers: {}{}", list.join(", "), if more { ", ..." } else { "" }),
    };
    Ok(format!("Nothing is known about {}; {list}", text::name(container)))
}

/// Returns true if one name contains the other or both have the same beginning, ignoring case.
fn similar(a: &str, b: &str) -> bool {
    let (a, b) = (a.to_lowercase(), b.to_lowercase());
    let alike = std::iter::zip(a.chars(), b.chars()).take_while(|(a, b)| a == b).count();
    a.contains(&b) || b.contains(&a) || alike >= 3
}

/// Returns the verdict on a container without events whose start failed. `error`: what its runtime says.
pub fn never_started(subject: ContainerRef, error: &str, now: f64) -> Verdict {
    let name = text::name(&subject.identity.name);
    let what = format!("{name} has never run: {} says: {}", subject.runtime, start_error::summary(error));
    Verdict {
        cause: Cause::NeverStarted,
        confidence: Confidence::Certain,
        what,
        advice: start_error::advice(error),
        ..verdict_without_events(subject, false, None, now)
    }
}

/// Returns the verdict on a container that was created and not started.
pub fn not_started(subject: ContainerRef, now: f64) -> Verdict {
    let name = text::name(&subject.identity.name);
    Verdict {
        cause: Cause::NeverStarted,
        confidence: Confidence::Certain,
        what: format!(
            "{name} was created, and has not been started: {} knows no start of it.",
            subject.runtime
        ),
        advice: vec![],
        ..verdict_without_events(subject, false, None, now)
    }
}

/// Returns the verdict on a container without events whose runtime says that it runs, and whose first process does not exist.
pub fn without_process(container: &ExistingContainer, subject: ContainerRef, now: f64) -> Verdict {
    let (name, runtime) = (text::name(&subject.identity.name), subject.runtime);
    let pid = container.first_process.map_or_else(String::new, |pid| format!(" (pid {pid})"));
    Verdict {
        cause: Cause::Unknown,
        headline: Some(format!("NO PROCESS LEFT, and {runtime} says that it runs")),
        what: format!(
            "{runtime} says that {name} runs, but its first process{pid} does not exist on this host: it has ended without {runtime} noticing, \
             as happens while containerd or a shim is restarted, or {runtime} runs elsewhere, as in a virtual machine."
        ),
        advice: vec![format!(
            "{runtime} stop {name} makes {runtime} notice the end; the exit code 0 that it reports then is not that of the program."
        )],
        ..verdict_without_events(subject, false, None, now)
    }
}

/// Returns the verdict on a container without events of which a ledger knows a run in progress, and whose runtime cannot be queried.
/// `usage`: what its cgroup shows.
pub fn runtime_unreachable(subject: ContainerRef, usage: Option<&CurrentUsage>, now: f64) -> Verdict {
    let (name, runtime) = (text::name(&subject.identity.name), subject.runtime);
    let has_processes = usage.and_then(|usage| usage.has_processes);
    let known = match has_processes {
        Some(true) => {
            let mut verdict = verdict_without_events(subject, true, usage, now);
            let source = format!(
                "{runtime} cannot be queried: this is what the ledger and its cgroup show of {name}."
            );
            verdict.also.insert(0, source);
            return verdict;
        }
        Some(false) => "Its cgroup has no process: it has most likely ended.",
        None => "Whether it still runs is not known: its cgroup is gone, or cannot be read.",
    };
    let is_empty = has_processes == Some(false);
    Verdict {
        cause: if is_empty { Cause::Unknown } else { Cause::Nothing },
        headline: is_empty.then(|| format!("NO PROCESS LEFT, and {runtime} cannot be queried")),
        what: format!(
            "{name} was running when {runtime} could be queried last, and no OOM kill of it is known. {known} Its exit code, and whether it was \
             told to stop, is known to {runtime} alone."
        ),
        ..verdict_without_events(subject, false, None, now)
    }
}

/// Returns the verdict on a container without events. `is_running`: it runs now, and uses so much of its memory.
pub fn verdict_without_events(
    subject: ContainerRef,
    is_running: bool,
    usage: Option<&CurrentUsage>,
    now: f64,
) -> Verdict {
    let name = text::name(&subject.identity.name);
    let since = subject.started.map_or_else(String::new, |at| format!(" since its start at {}", time(at)));
    let what = match is_running {
        true => format!("{name} is running, and neither an OOM kill nor an exit is known{since}."),
        false => format!("{name} is not running, and neither an OOM kill nor an exit is known{since}."),
    };
    let is_stalled = usage.is_some_and(CurrentUsage::is_stalled);
    let is_under_oom = usage.is_some_and(|usage| usage.is_under_oom);
    let usage = usage.map(|usage| {
        let limit = match usage.limit_bytes {
            Some(limit) => format!("of its limit of {}", crate::text::bytes(limit)),
            None => "and has no limit of its own".to_owned(),
        };
        let waiting = match usage.stalled_percent {
            _ if usage.is_under_oom => {
                " Its OOM killer is switched off (memory.oom_control, docker run --oom-kill-disable), and its processes wait until memory \
                 is freed."
                    .to_owned()
            }
            Some(percent) => {
                format!(" In the last 10 s all its processes waited for memory in {percent:.0} % of the time.")
            }
            None => String::new(),
        };
        format!("It uses {} {limit}, page cache included.{waiting}", crate::text::bytes(usage.usage_bytes))
    });
    let stalled_advice = || match is_under_oom {
        true => {
            "Raise the limit (docker update --memory), free memory in it, or start it without --oom-kill-disable: then a process of it is killed."
        }
        false => {
            "It is not killed, because the kernel still frees a little again and again: raise the limit, or let it use less."
        }
    };
    run_words::adapt(Verdict {
        subject: Some(subject),
        headline: None,
        cause: if is_stalled { Cause::AtLimit } else { Cause::Nothing },
        confidence: if is_stalled { Confidence::Certain } else { Confidence::Unsure },
        exit_reason: None,
        ended: None,
        exit_code: None,
        at: None,
        requested_at: now,
        what,
        also: usage.into_iter().collect(),
        evidence: vec![],
        log_time: None,
        pid: None,
        report: None,
        held: None,
        advice: if is_stalled { vec![stalled_advice().to_owned()] } else { vec![] },
    })
}

/// Adds to a verdict what the runtime says about the container now.
pub fn add_container(verdict: &mut Verdict, container: &ExistingContainer) {
    let restarted = verdict.at.zip(container.started).filter(|(at, started)| at < started);
    let times = container.restarts.filter(|restarts| *restarts > 0);
    let times = times.map(|restarts| match restarts {
        1 => "Its restart policy has restarted it once.".to_owned(),
        more => format!("Its restart policy has restarted it {more} times."),
    });
    let running = restarted.filter(|_| container.is_running);
    let running = running.map(|(_, started)| format!("It is running again since {}.", time(started)));
    let failed = container
        .start_error
        .as_deref()
        .filter(|_| !container.is_running && verdict.cause != Cause::NeverStarted);
    let failed = failed.map(|error| format!("Its last start failed: {}", start_error::summary(error)));
    let lost = container.has_lost_process.then(|| {
        format!("{} says that it runs, but its first process does not exist on this host.", container.runtime)
    });
    verdict
        .also
        .extend(running.filter(|_| lost.is_none()).into_iter().chain(times).chain(failed).chain(lost));
}

/// Describes a kill in one line: time, process, size, limit.
pub fn kill_line(kill: &Kill) -> String {
    verdict::kill_line(kill)
}

/// Compares the ids; if one is unknown, the names.
fn same_container(a: &ContainerRef, b: &ContainerRef) -> bool {
    if a.container_id.is_empty() || b.container_id.is_empty() {
        a.identity == b.identity
    } else {
        a.container_id == b.container_id
    }
}

/// Counts other containers with the same name, such as other pods of a deployment.
fn others_of_that_name(events: &[LedgerEvent], name: &Identity) -> usize {
    let names: std::collections::BTreeSet<&Identity> = events
        .iter()
        .filter_map(LedgerEvent::subject)
        .map(|subject| &subject.identity)
        .filter(|other| *other != name && other.name == name.name)
        .collect();
    names.len()
}
