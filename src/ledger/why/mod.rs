//! `memledger why`: derives one verdict from the ledger's events on why a container exited, or why one of its processes
//! was killed.
//!
//! The newest run with an event is considered. Within it, an OOM kill is the cause if it ended the container or
//! happened within [`CAUSE_WINDOW`] seconds before the exit; otherwise the exit itself is. A verdict claims no more
//! than the events prove: probable causes have [`Confidence::Likely`], and unrecorded ones stay unknown. Figures in
//! advice are read from the events or computed from them; without figures, advice has none.
//!
//! The caller provides the events; `export::verdict_text` renders the screen.

mod advice;
mod verdict;
mod text;

use std::sync::Arc;

use serde::Serialize;

use super::events::{
    ContainerLabels, ContainerRef, Evidence, Exit, Kill, KillOwner, LedgerEvent, PriorUsage, UsageSample,
    Victim,
};
use super::store::Query;
pub use text::{lasted, printable, roles, short_ids, time};

/// A kill at most this many seconds before the exit of its container counts as its cause.
const CAUSE_WINDOW: f64 = 300.0;
/// A kill without a known victim ended the container if that exited within this many seconds.
const EXIT_WINDOW: f64 = 5.0;

/// Maximum number of events that are read.
const MAX_EVENTS: usize = 1000;
/// Maximum size of the events that are read, the newest, in bytes.
const MAX_BYTES: usize = 1 << 20;
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
    /// Own limit, and most of the used memory was shared memory.
    OomLimitShm,
    /// The limit of a cgroup above the container: of a pod or a slice.
    OomParentLimit,
    /// The host ran out of memory.
    OomHost,
    /// An OOM kill known only from counters: the kernel's record is missing.
    OomUnnamed,
    /// An OOM kill of a process outside containers.
    OomHostProcess,
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
    pub const ALL: [Cause; 20] = [
        Cause::OomLimitMain,
        Cause::OomLimitWorker,
        Cause::OomLimitWorkerThenExit,
        Cause::OomLimitShm,
        Cause::OomParentLimit,
        Cause::OomHost,
        Cause::OomUnnamed,
        Cause::OomHostProcess,
        Cause::OomUnattributed,
        Cause::ShmFull,
        Cause::KilledOutside,
        Cause::Stopped,
        Cause::KilledByRequest,
        Cause::CrashedSignal,
        Cause::EndedBySignal,
        Cause::ErrorExit,
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
            Cause::OomLimitShm => "OUT OF MEMORY at its own limit, mostly by shared memory",
            Cause::OomParentLimit => "OUT OF MEMORY at the limit of a cgroup above it",
            Cause::OomHost => "OUT OF MEMORY of the whole machine",
            Cause::OomUnnamed => "OUT OF MEMORY, known from the kernel's counters only",
            Cause::OomHostProcess => "OUT OF MEMORY: a process outside containers was killed",
            Cause::OomUnattributed => "OUT OF MEMORY: a process was killed, owner unknown",
            Cause::ShmFull => "SHARED MEMORY FULL",
            Cause::KilledOutside => "KILLED (SIGKILL), not an OOM kill",
            Cause::Stopped => "STOPPED on request",
            Cause::KilledByRequest => "KILLED on request",
            Cause::CrashedSignal => "CRASHED",
            Cause::EndedBySignal => "ENDED BY A SIGNAL",
            Cause::ErrorExit => "ENDED WITH AN ERROR",
            Cause::HostRestart => "ENDED BY A RESTART OF THE HOST",
            Cause::Completed => "COMPLETED",
            Cause::Unknown => "UNKNOWN",
            Cause::Nothing => "NOTHING HAPPENED",
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
    /// The cause.
    pub cause: Cause,
    /// How certain the verdict is.
    pub confidence: Confidence,
    /// Unix time of the event; `None` if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at: Option<f64>,
    /// Unix time of the query.
    pub asked_at: f64,
    /// One sentence: what ended the container or killed a process of it, and when.
    pub what: String,
    /// Other events of the same run, one line each.
    pub also: Vec<String>,
    /// Evidence in the order in which it arrived.
    pub evidence: Vec<Evidence>,
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
    /// Kills near the end of the run that could not be attributed to any container.
    unattributed_kills: Vec<&'a Kill>,
}

impl<'a> RunSummary<'a> {
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

/// Returns true if the kill ended the container, by its record or by its time.
fn ended_it(kill: &Kill, exit: Option<&Exit>) -> bool {
    match kill.victim {
        Some(victim) => victim == Victim::Main,
        None => {
            exit.is_some_and(|exit| exit.exit_code != Some(0) && (exit.at - kill.at).abs() <= EXIT_WINDOW)
        }
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
    let newest = events.iter().rev().find(|event| event.subject().is_some())?;
    let subject = newest.subject()?;
    let mut verdict = verdict::verdict(&run_of(events, newest, subject), now);
    let others = others_of_that_name(events, &subject.name);
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
    let newest = events.iter().rev().find(|event| is_notable(event))?;
    match (newest, newest.subject()) {
        (_, Some(subject)) => Some(verdict::verdict(&run_of(events, newest, subject), now)),
        (LedgerEvent::OomKill(kill), None) => Some(verdict::outside_containers(kill, now)),
        (LedgerEvent::Exit(_) | LedgerEvent::GpuError(_), None) => None,
    }
}

/// Returns the verdict on the container with this name, id or prefix of an id, or, without one, on the newest kill or
/// abnormal exit on the host. `None`: no event is recorded.
///
/// # Errors
/// Errors of `events`.
pub fn ask<E>(
    container: Option<&str>,
    now: f64,
    events: impl Fn(&Query) -> Result<Vec<LedgerEvent>, E>,
) -> Result<Option<Verdict>, E> {
    let Some(container) = container else {
        let some = explain_last(
            &events(&Query { limit: MAX_EVENTS, max_bytes: MAX_BYTES, ..Query::default() })?,
            now,
        );
        // a host with many containers that all exit normally
        return if some.is_some() { Ok(some) } else { Ok(explain_last(&events(&Query::default())?, now)) };
    };
    let query = Query {
        container: Some(container.to_owned()),
        limit: MAX_EVENTS,
        max_bytes: MAX_BYTES,
        ..Query::default()
    };
    let mut found = events(&query)?;
    // a GPU error does not end a container by itself; `memledger events` shows it
    found.retain(|event| !matches!(event, LedgerEvent::GpuError(_)));
    if let Some(newest) = found.last().map(LedgerEvent::at) {
        // unattributed kills near the newest event
        let near = Query {
            since: Some(newest - EXIT_WINDOW),
            limit: MAX_EVENTS,
            max_bytes: MAX_BYTES,
            ..Query::default()
        };
        found.extend(events(&near)?.into_iter().filter(|event| event.subject().is_none()));
    }
    Ok(explain(&found, now))
}

/// Returns the message for a container without events: the known containers, similar names first.
///
/// # Errors
/// Errors of `events`.
pub fn not_found<E>(
    container: Option<&str>,
    events: impl Fn(&Query) -> Result<Vec<LedgerEvent>, E>,
) -> Result<String, E> {
    let Some(container) = container else {
        return Ok("no OOM kill and no abnormal end of a container is recorded".to_owned());
    };
    let recorded = events(&Query { limit: MAX_EVENTS, max_bytes: MAX_BYTES, ..Query::default() })?;
    let mut known: Vec<&str> = Vec::new();
    for subject in recorded.iter().rev().filter_map(LedgerEvent::subject) {
        let name = &*subject.name.container_name;
        if !known.contains(&name) {
            known.push(name);
        }
    }
    known.sort_by_key(|name| !similar(name, container)); // stable sort: the newest first among equals
    let list: Vec<String> = known.iter().take(MAX_LISTED_NAMES).map(|known| text::name(known)).collect();
    let list = match (list.is_empty(), known.len() > MAX_LISTED_NAMES) {
        (true, _) => "no container is known yet".to_owned(),
        (false, more) => format!("known containers: {}{}", list.join(", "), if more { ", ..." } else { "" }),
    };
    Ok(format!("nothing is recorded about {}; {list}", text::name(container)))
}

/// Returns true if one name contains the other or both have the same beginning, ignoring case.
fn similar(a: &str, b: &str) -> bool {
    let (a, b) = (a.to_lowercase(), b.to_lowercase());
    let alike = std::iter::zip(a.chars(), b.chars()).take_while(|(a, b)| a == b).count();
    a.contains(&b) || b.contains(&a) || alike >= 3
}

/// Returns the verdict on a container without events.
pub fn nothing(subject: ContainerRef, now: f64) -> Verdict {
    let since = subject.started.map_or_else(String::new, |at| format!(" since its start at {}", time(at)));
    let what = format!(
        "{} is running, and neither an OOM kill nor an exit is recorded{since}.",
        text::name(&subject.name.container_name)
    );
    Verdict {
        subject: Some(subject),
        cause: Cause::Nothing,
        confidence: Confidence::Certain,
        at: None,
        asked_at: now,
        what,
        also: vec![],
        evidence: vec![],
        held: None,
        advice: vec![],
    }
}

fn is_notable(event: &LedgerEvent) -> bool {
    use super::events::ExitReason;
    match event {
        LedgerEvent::OomKill(_) => true,
        LedgerEvent::Exit(exit) => match exit.reason {
            Some(ExitReason::Completed | ExitReason::Stopped) => false,
            Some(_) => true,
            None => exit.exit_code != Some(0) && exit.stop_signals.is_empty(),
        },
        LedgerEvent::GpuError(_) => false,
    }
}

/// Returns the run of an event of `subject`.
fn run_of<'a>(
    events: &'a [LedgerEvent],
    event: &'a LedgerEvent,
    subject: &'a ContainerRef,
) -> RunSummary<'a> {
    let exits = || {
        events.iter().filter_map(|other| match other {
            LedgerEvent::Exit(exit) if same_container(&exit.subject, subject) => Some(exit),
            _ => None,
        })
    };
    let exit = match event {
        LedgerEvent::Exit(exit) => Some(exit),
        LedgerEvent::OomKill(kill) => exits().find(|exit| match (exit.subject.started, subject.started) {
            (Some(its), Some(ours)) => same_start(its, ours),
            _ => exit.at >= kill.at - EXIT_WINDOW,
        }),
        LedgerEvent::GpuError(_) => None,
    };
    // without a start time: everything since the previous exit
    let ends_before = exits().filter(|other| exit.is_none_or(|exit| other.id < exit.id));
    let end_before = ends_before.map(|other| other.at).fold(f64::NEG_INFINITY, f64::max);
    let until = exit.map_or(f64::INFINITY, |exit| exit.at + EXIT_WINDOW);
    let started = exit.and_then(|exit| exit.subject.started).or(subject.started);
    let belongs = |kill: &&Kill| match (&kill.owner, started) {
        (KillOwner::Container(ContainerRef { started: Some(its), .. }), Some(ours)) => same_start(*its, ours),
        _ => kill.at > end_before && kill.at <= until,
    };
    let unattributed_kills = events.iter().filter_map(|event| match event {
        LedgerEvent::OomKill(kill) if matches!(kill.owner, KillOwner::Open | KillOwner::Unattributed) => {
            Some(kill)
        }
        _ => None,
    });
    let unattributed_kills =
        unattributed_kills.filter(|kill| exit.is_some_and(|exit| may_be_at(kill, exit.at)));
    RunSummary {
        subject,
        kills: kills_of(events, subject).filter(belongs).collect(),
        exit,
        unattributed_kills: unattributed_kills.collect(),
    }
}

/// Returns true if the kill can have ended a container at this time. One without a record happened at an unknown time
/// before `at`.
fn may_be_at(kill: &Kill, ended: f64) -> bool {
    let earliest = kill.earliest.unwrap_or(kill.at);
    (earliest - EXIT_WINDOW..=kill.at + EXIT_WINDOW).contains(&ended)
}

fn kills_of<'a>(events: &'a [LedgerEvent], subject: &'a ContainerRef) -> impl Iterator<Item = &'a Kill> {
    events.iter().filter_map(|event| match event {
        LedgerEvent::OomKill(kill) => {
            let its = event.subject().is_some_and(|its| same_container(its, subject));
            its.then_some(kill)
        }
        LedgerEvent::Exit(_) | LedgerEvent::GpuError(_) => None,
    })
}

/// Compares the ids; if one is unknown, the names.
fn same_container(a: &ContainerRef, b: &ContainerRef) -> bool {
    if a.container_id.is_empty() || b.container_id.is_empty() {
        a.name == b.name
    } else {
        a.container_id == b.container_id
    }
}

/// Compares two start times, which may differ by rounding in the runtime.
fn same_start(a: f64, b: f64) -> bool {
    (a - b).abs() < 0.5
}

/// Counts other containers with the same name, such as other pods of a deployment.
fn others_of_that_name(events: &[LedgerEvent], name: &ContainerLabels) -> usize {
    let names: std::collections::BTreeSet<&ContainerLabels> = events
        .iter()
        .filter_map(LedgerEvent::subject)
        .map(|subject| &subject.name)
        .filter(|other| *other != name && other.container_name == name.container_name)
        .collect();
    names.len()
}
