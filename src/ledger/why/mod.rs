//! Why a container ended, or lost a part of itself: one verdict from the events of the ledger.
//!
//! The newest run that has an event decides. Within it an OOM kill leads if it ended the container, or happened within
//! [`LINKED`] seconds before the end; else the end itself does. A verdict says no more than the events prove: what is
//! only likely carries [`Confidence::Likely`], and what nobody recorded stays unknown. Figures in advice are read from
//! the events or computed from them, and where a figure is missing the advice has none.
//!
//! Not here: where events come from (`store`) and what the screen looks like (`export::why`).

mod advice;
mod decide;
mod words;

use std::sync::Arc;

use serde::Serialize;

use super::entries::{Before, Event, Evidence, Exit, Kill, Name, Sample, Subject, Victim, Whose};
use super::store::Query;
pub use words::{lasted, printable, roles, short_ids, time};

/// A kill so many seconds before the end of its container is told as what led to it.
const LINKED: f64 = 300.0;
/// A kill whose record does not say so ended the container if that ended within so many seconds.
const ENDED_BY: f64 = 5.0;

/// Events that are read at most: more than a screen can tell of.
const MOST: usize = 1000;
/// Names that are listed at most.
const MOST_KNOWN: usize = 10;

/// What it was, in one word. A closed set: scripts may rely on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The container's own limit: an OOM kill ended it.
    OomLimitMain,
    /// The container's own limit: a child was killed, such as a DataLoader worker, and the container lived on.
    OomLimitWorker,
    /// The container's own limit: a child was killed, and soon after the container ended with an error.
    OomLimitWorkerThenExit,
    /// The container's own limit, and most of what it held was shared memory.
    OomLimitShm,
    /// The limit of a cgroup above the container: a pod's or a slice's.
    OomParentLimit,
    /// The machine ran out of memory.
    OomHost,
    /// An OOM kill that is known from counters only: the kernel's record was lost.
    OomUnnamed,
    /// An OOM kill of a process outside containers.
    OomHostProcess,
    /// An OOM kill that no evidence ties to anybody.
    OomUnattributed,
    /// The container's `/dev/shm` was full, or nearly so, when it ended.
    ShmFull,
    /// SIGKILL that nobody asked the runtime for, and no OOM kill.
    KilledOutside,
    /// Somebody stopped it (`docker stop`).
    Stopped,
    /// Somebody had it killed (`docker kill`, `docker rm -f`).
    KilledByRequest,
    /// A signal that a process brings upon itself: SIGSEGV, SIGABRT, SIGBUS and the like.
    CrashedSignal,
    /// Another signal that nobody asked the runtime for.
    EndedBySignal,
    /// It ended with an exit code other than 0.
    ErrorExit,
    /// Exit code 0.
    Completed,
    /// It ended, and nothing recorded tells why.
    Unknown,
    /// Nothing happened to it.
    Nothing,
}

impl Cause {
    /// All of them.
    pub const ALL: [Cause; 19] = [
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
        Cause::Completed,
        Cause::Unknown,
        Cause::Nothing,
    ];

    /// A headline for people.
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
            Cause::OomUnattributed => "OUT OF MEMORY: a process was killed, and nothing tells whose",
            Cause::ShmFull => "SHARED MEMORY FULL",
            Cause::KilledOutside => "KILLED (SIGKILL), not an OOM kill",
            Cause::Stopped => "STOPPED on request",
            Cause::KilledByRequest => "KILLED on request",
            Cause::CrashedSignal => "CRASHED",
            Cause::EndedBySignal => "ENDED BY A SIGNAL",
            Cause::ErrorExit => "ENDED WITH AN ERROR",
            Cause::Completed => "COMPLETED",
            Cause::Unknown => "UNKNOWN",
            Cause::Nothing => "NOTHING HAPPENED",
        }
    }
}

/// How far the evidence reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Confidence {
    /// The kernel or the runtime said so.
    Certain,
    /// It fits what is known, and something is missing.
    Likely,
    /// A guess would be one; the text says what is missing.
    Unsure,
}

/// The answer to *why*.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// The container; `None` for a kill that is no container's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subject: Option<Subject>,
    /// What it was.
    pub cause: Cause,
    /// How far the evidence reaches.
    pub confidence: Confidence,
    /// Unix time of what the verdict is about; `None` if nothing happened.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at: Option<f64>,
    /// Unix time of the question.
    pub asked_at: f64,
    /// One sentence: what ended it or killed a part of it, and when.
    pub what: String,
    /// What else happened in the same run, in one line each.
    pub also: Vec<String>,
    /// What the sources said, in the order in which they did.
    pub evidence: Vec<Evidence>,
    /// What it held before: samples oldest first, and processes by role.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held: Option<Arc<Before>>,
    /// What to try, the most promising first.
    pub advice: Vec<String>,
}

/// One run of a container, as far as the events tell.
#[derive(Debug)]
struct Run<'a> {
    subject: &'a Subject,
    /// Oldest first.
    kills: Vec<&'a Kill>,
    exit: Option<&'a Exit>,
    /// Kills of the last seconds of the run that no evidence ties to anybody.
    loose: Vec<&'a Kill>,
}

impl<'a> Run<'a> {
    /// What it held before the kill that leads, else before its end.
    ///
    /// Of several kills in a short time only the first has it stored, so that one's serves the others.
    fn before(&self, lead: Option<&'a Kill>) -> Option<&'a Arc<Before>> {
        let at_kill = lead.and_then(|lead| {
            let near = self.kills.iter().rev().filter(|kill| (0.0..=LINKED).contains(&(lead.at - kill.at)));
            lead.before.as_ref().or_else(|| near.into_iter().find_map(|kill| kill.before.as_ref()))
        });
        at_kill.or_else(|| self.exit.and_then(|exit| exit.before.as_ref()))
    }
}

/// True if the kill ended the container, as far as its record or the time tells.
fn ended_it(kill: &Kill, exit: Option<&Exit>) -> bool {
    match kill.victim {
        Some(victim) => victim == Victim::Main,
        None => exit.is_some_and(|exit| exit.exit_code != Some(0) && (exit.at - kill.at).abs() <= ENDED_BY),
    }
}

/// The last sample of what was held before.
fn last_sample(before: Option<&Arc<Before>>) -> Option<&Sample> {
    before.and_then(|before| before.samples.last())
}

/// The verdict on the newest run among `events`, which are oldest first and may hold kills that are no container's.
///
/// `None` if no event has a container. Events of several containers of the same name: the newest one decides.
pub fn explain(events: &[Event], now: f64) -> Option<Verdict> {
    let newest = events.iter().rev().find(|event| event.subject().is_some())?;
    let subject = newest.subject()?;
    let mut verdict = decide::verdict(&run_of(events, newest, subject), now);
    let others = others_of_that_name(events, &subject.name);
    if others > 0 {
        verdict.also.push(format!(
            "{others} other {} of that name; this is the newest. Ask by id for another.",
            if others == 1 { "container is" } else { "containers are" }
        ));
    }
    Some(verdict)
}

/// The verdict on the newest OOM kill or abnormal end of anybody, or `None` if there was none.
pub fn explain_last(events: &[Event], now: f64) -> Option<Verdict> {
    let newest = events.iter().rev().find(|event| is_notable(event))?;
    match (newest, newest.subject()) {
        (_, Some(subject)) => Some(decide::verdict(&run_of(events, newest, subject), now)),
        (Event::OomKill(kill), None) => Some(decide::outside(kill, now)),
        (Event::Exit(_) | Event::GpuError(_), None) => None,
    }
}

/// Asks a store why: the verdict on the container of this name, id or beginning of an id, or, without one, on the newest
/// kill or abnormal end of anybody. `None`: nothing is recorded of it.
///
/// # Errors
/// Whatever `events` answers.
pub fn ask<E>(
    container: Option<&str>,
    now: f64,
    events: impl Fn(&Query) -> Result<Vec<Event>, E>,
) -> Result<Option<Verdict>, E> {
    let Some(container) = container else {
        let some = explain_last(&events(&Query { most: MOST, ..Query::default() })?, now);
        // a host where containers come and go all day and end well
        return if some.is_some() { Ok(some) } else { Ok(explain_last(&events(&Query::default())?, now)) };
    };
    let query = Query { container: Some(container.to_owned()), most: MOST, ..Query::default() };
    let mut found = events(&query)?;
    // an error of a GPU ends no container by itself; `memledger events` tells of it
    found.retain(|event| !matches!(event, Event::GpuError(_)));
    if let Some(newest) = found.last().map(Event::at) {
        // kills of the same seconds that could not be tied to anybody
        let near = Query { since: Some(newest - ENDED_BY), most: MOST, ..Query::default() };
        found.extend(events(&near)?.into_iter().filter(|event| event.subject().is_none()));
    }
    Ok(explain(&found, now))
}

/// What to say when nothing is recorded of a container: which ones are known, those with a similar name first.
///
/// # Errors
/// Whatever `events` answers.
pub fn not_found<E>(
    container: Option<&str>,
    events: impl Fn(&Query) -> Result<Vec<Event>, E>,
) -> Result<String, E> {
    let Some(container) = container else {
        return Ok("no OOM kill and no abnormal end of a container is recorded".to_owned());
    };
    let recorded = events(&Query { most: MOST, ..Query::default() })?;
    let mut known: Vec<&str> = Vec::new();
    for subject in recorded.iter().rev().filter_map(Event::subject) {
        let name = &*subject.name.container_name;
        if !known.contains(&name) {
            known.push(name);
        }
    }
    known.sort_by_key(|name| !similar(name, container)); // stable: the newest first among equals
    let list: Vec<String> = known.iter().take(MOST_KNOWN).map(|known| words::name(known)).collect();
    let list = match (list.is_empty(), known.len() > MOST_KNOWN) {
        (true, _) => "no container is known yet".to_owned(),
        (false, more) => format!("known are: {}{}", list.join(", "), if more { ", ..." } else { "" }),
    };
    Ok(format!("nothing is recorded about {}; {list}", words::name(container)))
}

/// True if one name is part of the other, or they begin alike, whatever the case.
fn similar(a: &str, b: &str) -> bool {
    let (a, b) = (a.to_lowercase(), b.to_lowercase());
    let alike = std::iter::zip(a.chars(), b.chars()).take_while(|(a, b)| a == b).count();
    a.contains(&b) || b.contains(&a) || alike >= 3
}

/// The verdict on a container to which nothing happened.
pub fn nothing(subject: Subject, now: f64) -> Verdict {
    let since = subject.started.map_or_else(String::new, |at| format!(" since its start at {}", time(at)));
    let what = format!(
        "{} runs, and neither an OOM kill nor an end of it is recorded{since}.",
        words::name(&subject.name.container_name)
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

fn is_notable(event: &Event) -> bool {
    use super::entries::Reason;
    match event {
        Event::OomKill(_) => true,
        Event::Exit(exit) => match exit.reason {
            Some(Reason::Completed | Reason::Stopped) => false,
            Some(_) => true,
            None => exit.exit_code != Some(0) && exit.asked_signals.is_empty(),
        },
        Event::GpuError(_) => false,
    }
}

/// The run that an event of `subject` belongs to.
fn run_of<'a>(events: &'a [Event], event: &'a Event, subject: &'a Subject) -> Run<'a> {
    let exits = || {
        events.iter().filter_map(|other| match other {
            Event::Exit(exit) if same_container(&exit.subject, subject) => Some(exit),
            _ => None,
        })
    };
    let exit = match event {
        Event::Exit(exit) => Some(exit),
        Event::OomKill(kill) => exits().find(|exit| match (exit.subject.started, subject.started) {
            (Some(its), Some(ours)) => same_start(its, ours),
            _ => exit.at >= kill.at - ENDED_BY,
        }),
        Event::GpuError(_) => None,
    };
    // where a start time is not known: all since the end of the run before
    let ends_before = exits().filter(|other| exit.is_none_or(|exit| other.id < exit.id));
    let end_before = ends_before.map(|other| other.at).fold(f64::NEG_INFINITY, f64::max);
    let until = exit.map_or(f64::INFINITY, |exit| exit.at + ENDED_BY);
    let started = exit.and_then(|exit| exit.subject.started).or(subject.started);
    let belongs = |kill: &&Kill| match (&kill.whose, started) {
        (Whose::Container(Subject { started: Some(its), .. }), Some(ours)) => same_start(*its, ours),
        _ => kill.at > end_before && kill.at <= until,
    };
    let loose = events.iter().filter_map(|event| match event {
        Event::OomKill(kill) if matches!(kill.whose, Whose::Open | Whose::Unattributed) => Some(kill),
        _ => None,
    });
    let loose = loose.filter(|kill| exit.is_some_and(|exit| (exit.at - kill.at).abs() <= ENDED_BY));
    Run { subject, kills: kills_of(events, subject).filter(belongs).collect(), exit, loose: loose.collect() }
}

fn kills_of<'a>(events: &'a [Event], subject: &'a Subject) -> impl Iterator<Item = &'a Kill> {
    events.iter().filter_map(|event| match event {
        Event::OomKill(kill) => {
            let its = event.subject().is_some_and(|its| same_container(its, subject));
            its.then_some(kill)
        }
        Event::Exit(_) | Event::GpuError(_) => None,
    })
}

/// The id tells; where it is not known, the name does.
fn same_container(a: &Subject, b: &Subject) -> bool {
    if a.container_id.is_empty() || b.container_id.is_empty() {
        a.name == b.name
    } else {
        a.container_id == b.container_id
    }
}

/// Two records of one start may differ by the rounding of a runtime.
fn same_start(a: f64, b: f64) -> bool {
    (a - b).abs() < 0.5
}

/// Containers that share the name and are somebody else: other pods of one deployment.
fn others_of_that_name(events: &[Event], name: &Name) -> usize {
    let names: std::collections::BTreeSet<&Name> = events
        .iter()
        .filter_map(Event::subject)
        .map(|subject| &subject.name)
        .filter(|other| *other != name && other.container_name == name.container_name)
        .collect();
    names.len()
}
