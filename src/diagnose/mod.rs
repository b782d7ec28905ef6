//! `memledger why`: diagnoses from the ledger's events why a container exited, or why one of its processes was killed.
//!
//! The newest run with an event is considered. Within it, an OOM kill is the cause if the exit says that it ended the
//! container, or may have; otherwise the exit itself is. A diagnosis claims no more than the events prove: probable causes have
//! [`Confidence::Likely`], and unrecorded ones stay unknown. Figures in advice are read from the events or computed from
//! them; without figures, advice has none.
//!
//! The caller provides the events. A diagnosis is data, without a sentence: `export::words` says it in English, and nothing decides by a
//! text that it made itself.

mod incident;
mod advice;
mod cause;
mod container_log;
mod cuda_oom;
mod existing;
mod finding;
mod limit;
pub mod live;
mod log_file;
mod monitor;
mod notice;
mod place;
mod program;
mod refusal;
mod remedy;
mod report;
mod run_events;
mod usage;
mod verdict;
#[cfg(test)]
mod worlds;

use std::sync::Arc;

use serde::Serialize;

use crate::discover::same_start;
use crate::events::{
    ContainerRef, CudaOom, CudaOomSource, Evidence, Exit, ExitReason, Identity, Kill, KillOwner, LedgerEvent,
    OomReport, PriorUsage, UsageSample, Victim,
};
use crate::ledger::store::Query;
use crate::lifecycle::timing::{CAUSE_WINDOW, EXIT_WINDOW};
use crate::parse::kernel_log::NoKill;
use crate::runs::RunRecord;
pub use advice::add_settings;
pub use cause::{Cause, Confidence, is_cuda_oom};
pub use container_log::{LogFinding, LogRemedy, add_cuda_error, add_logged_error, remove_log_advice};
pub use cuda_oom::{CudaOomFinding, CudaOomIncident, CudaOomReason, CudaOomRemedy};
pub use existing::{
    add_container, add_usage, never_started, not_started, runtime_unreachable, without_events,
    without_process,
};
pub use finding::{Finding, PasteRemedy, Recommendation, Remedy, RunFinding, StartRemedy};
pub use incident::{
    Exhausted, ExitIncident, ExitWhy, Headline, Incident, KillIncident, KillOutcome, KilledProcess, LaterEnd,
    LimitOwner, OutsideKill, OutsideOwner, ShmUse, StopRequests,
};
pub use limit::LimitSetter;
pub use log_file::{LoggedKill, LoggedKills};
pub use monitor::{MonitorFinding, MonitorRemedy};
pub use notice::{NoticeRemedy, explain_notice};
pub use place::CgroupPlace;
pub use program::{KnownProgram, PlanningProgram, ProgramFinding, ProgramRemedy};
pub use refusal::{RefusalRemedy, explain_refusal};
pub use remedy::{
    LimitRemedy, LimitSetting, OutputPlace, OutputPurpose, WorkerFit, WorkerSetting, WorkerShare, Workers,
};
pub use report::{FullMemory, LargestProcess, ReportFinding, UNKILLABLE, UsageShare};
use run_events::run_of;
pub use usage::{LargestHolder, UsageFinding};

/// Maximum number of names that are listed.
const MAX_LISTED_NAMES: usize = 10;

/// Why a container ended, or why a process of it was killed. As JSON it is without what needs words beside it: `export::words` has the whole
/// document.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Diagnosis {
    /// The container; `None` for a kill outside containers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subject: Option<ContainerRef>,
    /// The headline, where the cause does not say all.
    #[serde(skip)]
    pub headline: Option<Headline>,
    /// The cause.
    pub cause: Cause,
    /// How certain that is.
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
    /// What happened.
    pub incident: Incident,
    /// Facts beside the cause.
    #[serde(skip)]
    pub findings: Vec<Finding>,
    /// Evidence in the order in which it arrived.
    #[serde(skip)]
    pub evidence: Vec<Evidence>,
    /// The error of GPU memory that it is about: its numbers are evidence.
    #[serde(skip)]
    pub gpu: Option<Box<CudaOom>>,
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
    #[serde(skip)]
    pub advice: Vec<Recommendation>,
}

impl Diagnosis {
    /// Returns a diagnosis with nothing beside the cause.
    fn new(cause: Cause, confidence: Confidence, incident: Incident, now: f64) -> Self {
        Self {
            subject: None,
            headline: None,
            cause,
            confidence,
            exit_reason: None,
            at: None,
            log_time: None,
            requested_at: now,
            incident,
            findings: vec![],
            evidence: vec![],
            gpu: None,
            pid: None,
            report: None,
            held: None,
            advice: vec![],
        }
    }
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
    /// That kernel log lacks the line that names the cgroup of the victim.
    lacks_context_line: bool,
    /// The OOM ended without a kill.
    no_kill: Option<NoKill>,
}

impl<'a> RunSummary<'a> {
    /// Returns a run of which only kills are known.
    fn of_kills(subject: &'a ContainerRef, kills: Vec<&'a Kill>) -> Self {
        Self {
            subject,
            kills,
            exit: None,
            cuda_ooms: vec![],
            unattributed_kills: vec![],
            follows_at_once: false,
            log_time: None,
            lacks_context_line: false,
            no_kill: None,
        }
    }

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

/// Returns the diagnosis of a kill in a kernel log from elsewhere, where nothing else is known. `missing`: what the log lacks, for a kill
/// without a whole report. `has_context`: some line of it names the cgroup of a victim.
pub fn explain_logged(
    logged: &LoggedKill,
    (missing, has_context): (Option<&PasteRemedy>, bool),
    now: f64,
) -> Diagnosis {
    let kill = &logged.kill;
    let none = ContainerRef::default();
    let subject = match &kill.owner {
        KillOwner::Container(subject) => subject,
        _ => &none,
    };
    let run = RunSummary {
        log_time: Some(&*logged.log_time),
        lacks_context_line: !has_context && logged.is_whole_message,
        no_kill: logged.no_kill,
        ..RunSummary::of_kills(subject, std::iter::once(kill).chain(&logged.killed_with).collect())
    };
    let mut diagnosis = match (logged.no_kill, &kill.owner) {
        (Some(no_kill), _) => verdict::without_kill(&run, kill, no_kill, now),
        (None, KillOwner::Container(_)) => verdict::of_run(&run, now),
        (None, _) => verdict::outside_containers(&run, kill, now),
    };
    if kill.report.as_ref().is_none_or(|report| report.incomplete || report.process_count.is_none()) {
        diagnosis.advice.splice(0..0, missing.cloned().map(Recommendation::from));
    }
    diagnosis
}

/// Returns the signal that an exit code means: 128 plus its number.
fn signal_of(exit_code: Option<i64>) -> Option<i64> {
    exit_code.and_then(|code| code.checked_sub(128)).filter(|signal| (1..=64).contains(signal))
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

/// Returns the diagnosis of the newest run in `events`, which are oldest first and may include kills outside containers.
///
/// Returns `None` if no event has a container. If several containers have the same name, the newest is considered.
pub fn explain(events: &[LedgerEvent], now: f64) -> Option<Diagnosis> {
    // a program may survive an error of CUDA: an earlier end or kill is what people ask for
    let is_end =
        |event: &&LedgerEvent| event.subject().is_some() && !matches!(event, LedgerEvent::CudaOom(_));
    let newest_of_all = || events.iter().rev().find(|event| event.subject().is_some());
    let newest = events.iter().rev().find(is_end).or_else(newest_of_all)?;
    let subject = newest.subject()?;
    let mut diagnosis = verdict::of_run(&run_of(events, newest, subject), now);
    let is_later_run = |its: &ContainerRef| match (its.started, subject.started) {
        (Some(its), Some(ours)) => !same_start(its, ours),
        _ => matches!(newest, LedgerEvent::Exit(_)),
    };
    let is_newer = |event: &&LedgerEvent| {
        let is_its = event.subject().is_some_and(|its| same_container(its, subject) && is_later_run(its));
        matches!(event, LedgerEvent::CudaOom(_)) && is_its && event.at() > newest.at() + EXIT_WINDOW
    };
    if let Some(error) = events.iter().rev().find(is_newer) {
        diagnosis.findings.push(RunFinding::CudaOomSince { at: error.at() }.into());
    }
    let others = others_of_that_name(events, &subject.identity);
    if others > 0 {
        diagnosis.findings.push(RunFinding::OthersOfThatName { count: others }.into());
    }
    Some(diagnosis)
}

/// Returns the diagnosis of the newest OOM kill or abnormal exit on the host, or `None` if there was none.
pub fn explain_last(events: &[LedgerEvent], now: f64) -> Option<Diagnosis> {
    let newest = events.iter().rev().find(|event| event.is_notable())?;
    match (newest, newest.subject()) {
        (_, Some(subject)) => Some(verdict::of_run(&run_of(events, newest, subject), now)),
        (LedgerEvent::OomKill(kill), None) => {
            let none = ContainerRef::default();
            let run = RunSummary::of_kills(&none, vec![kill]);
            Some(verdict::outside_containers(&run, kill, now))
        }
        (LedgerEvent::Exit(_) | LedgerEvent::GpuError(_) | LedgerEvent::CudaOom(_), None) => None,
    }
}

/// Returns the diagnosis of the container with this name, id or prefix of an id, or, without one, on the newest kill or
/// abnormal exit on the host. `None`: no event is recorded.
///
/// # Errors
/// Errors of `events`.
pub fn query_diagnosis<E>(
    container: Option<&str>,
    now: f64,
    events: impl Fn(&Query) -> Result<Vec<LedgerEvent>, E>,
) -> Result<Option<Diagnosis>, E> {
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
    if let Some(diagnosis) = &mut found {
        let others = others_of_pod(diagnosis, container, &events, now);
        diagnosis
            .findings
            .extend(name_change(diagnosis, container).map(Finding::from).into_iter().chain(others));
    }
    Ok(found)
}

/// Returns each other container of a wanted pod, the newest first.
fn others_of_pod(diagnosis: &Diagnosis, wanted: &str, events: &[LedgerEvent], now: f64) -> Vec<Finding> {
    let Some(subject) = diagnosis.subject.as_ref().filter(|subject| subject.identity.is_of_pod(wanted))
    else {
        return vec![];
    };
    let mut seen = vec![&subject.identity];
    let mut found = Vec::new();
    for identity in events.iter().rev().filter_map(LedgerEvent::subject).map(|subject| &subject.identity) {
        if seen.contains(&identity) {
            continue;
        }
        seen.push(identity);
        let is_its =
            |event: &&LedgerEvent| event.subject().is_some_and(|subject| subject.identity == *identity);
        let own: Vec<_> = events.iter().filter(is_its).cloned().collect();
        if let Some(Diagnosis { cause, headline, .. }) = explain(&own, now) {
            found.push(RunFinding::OtherOfPod { path: identity.short_path(), cause, headline }.into());
        }
    }
    found
}

/// Returns whether the diagnosis is about a container that had the wanted name before it was renamed.
pub fn has_other_name(diagnosis: &Diagnosis, wanted: &str) -> bool {
    let subject = diagnosis.subject.as_ref();
    subject.is_some_and(|subject| {
        &*subject.identity.name != wanted && subject.former_names.iter().any(|name| **name == *wanted)
    })
}

/// Returns the other name of the container of a diagnosis, if it has one.
fn name_change(diagnosis: &Diagnosis, wanted: &str) -> Option<RunFinding> {
    let subject = diagnosis.subject.as_ref()?;
    let before = subject.former_names.last()?.to_string();
    let name = subject.identity.name.to_string();
    Some(match has_other_name(diagnosis, wanted) {
        true => RunFinding::RenamedSince { wanted: wanted.to_owned(), name },
        false => RunFinding::Renamed { name, before },
    })
}

/// Returns the diagnosis of one exit, whatever the container did later; `None` if it was no abnormal end and lost no process, or if the exit
/// is no longer in the ledger.
///
/// # Errors
/// Errors of `events`.
pub fn exit_diagnosis<E>(
    exit_id: u64,
    run: &RunRecord,
    now: f64,
    events: impl Fn(&Query) -> Result<Vec<LedgerEvent>, E>,
) -> Result<Option<Diagnosis>, E> {
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

/// What is known where a container has no events.
#[derive(Debug)]
pub enum NothingKnown {
    /// Nothing was asked for, and nothing is known.
    Anything,
    /// The container that was asked for is not known.
    Container {
        /// What was asked for.
        wanted: String,
        /// Known containers, similar names first.
        known: Vec<String>,
        /// There are more.
        is_cut: bool,
    },
}

/// Returns what is known in place of a container without events: the known containers, similar names first. `existing`: names of
/// containers that exist.
///
/// # Errors
/// Errors of `events`.
pub fn not_found<E>(
    container: Option<&str>,
    existing: impl Iterator<Item = String>,
    events: impl Fn(&Query) -> Result<Vec<LedgerEvent>, E>,
) -> Result<NothingKnown, E> {
    let Some(container) = container else { return Ok(NothingKnown::Anything) };
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
    let is_cut = known.len() > MAX_LISTED_NAMES;
    known.truncate(MAX_LISTED_NAMES);
    Ok(NothingKnown::Container { wanted: container.to_owned(), known, is_cut })
}

/// Returns true if one name contains the other or both have the same beginning, ignoring case.
fn similar(a: &str, b: &str) -> bool {
    let (a, b) = (a.to_lowercase(), b.to_lowercase());
    let alike = std::iter::zip(a.chars(), b.chars()).take_while(|(a, b)| a == b).count();
    a.contains(&b) || b.contains(&a) || alike >= 3
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_code_outside_signal_range_is_not_a_signal() {
        assert_eq!(signal_of(Some(137)), Some(9));
        assert_eq!([Some(i64::MIN), Some(i64::MAX), Some(128), None].map(signal_of), [None; 4]);
    }
}
