//! Lets the ledger's state machine decide on the past. Pure.
//!
//! What is older than [`SETTLED_AFTER`] is applied at once, as the ledger's thread does after a pause; what is younger at its own
//! time, with steps between that settle what waits for more evidence. So what may still change stays open. The clocks of the kernel log
//! and of the runtimes differ, as they do for a ledger that runs.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::time::Duration;

use super::CaughtUp;
use super::drift::LogDrift;
use crate::clock::Timestamp;
use crate::discover::{ContainerId, EventKind, RuntimeEvent};
use crate::events::{ContainerRef, Exit, Kill, KillOwner, LedgerEvent, OomScope, Victim};
use crate::ledger::interval::LogClock;
use crate::ledger::reconcile::{ANY_SOCKET, ObservedRecord, Reconciler, ReconcilerConfig, cursor_name};
use crate::ledger::sources::cgroup_oom_events::CounterReading;
use crate::ledger::sources::kernel_log::LogPosition;
use crate::ledger::store::{LedgerState, WriteBatch};
use crate::lifecycle::timing::{EXIT_WINDOW, MAX_DRIFT, MAX_EVENT_DELAY, RECORD_TIMEOUT, SETTLED_AFTER};
use crate::parse::kernel_log::kills::{KillAssembler, KillRecord};

/// Seconds: a line of the log whose time is less certain has no order among the events.
const MAX_UNCERTAINTY: f64 = 1.0;
/// Seconds between two steps while something is pending.
const STEP: f64 = 0.25;

/// The evidence of the past, and what it is judged by.
#[derive(Debug, Default)]
pub struct Replay {
    /// The configuration of the state machine.
    pub config: ReconcilerConfig,
    /// Limits of the containers that still exist, by id.
    pub limits: HashMap<String, u64>,
    /// Cgroups of the containers that run, from the root of the tree.
    pub cgroups: HashMap<ContainerId, PathBuf>,
    /// Unix time from which on the kernel log has every kill; `None` if it was not read.
    pub log_since: Option<f64>,
    /// What the runtimes reported, in no order.
    pub events: Vec<RuntimeEvent>,
    /// The lines of the kernel log, in order.
    pub lines: Vec<ObservedRecord>,
    /// Up to where the log was read, and its clock and block there; `None` if it was not read.
    pub log_end: Option<(LogPosition, LogClock, KillAssembler)>,
    /// The kernel's number of OOM kills since the boot.
    pub counted: Option<u64>,
    /// The counters of the cgroups.
    pub counters: CounterReadings,
    /// Nothing more will be reported: what waits for a name gets a short id.
    pub is_last: bool,
}

/// The readings of the cgroups' counters, and whether each includes the cgroups below it.
#[derive(Debug, Default)]
pub struct CounterReadings {
    /// The readings.
    pub readings: Vec<CounterReading>,
    /// Each includes the cgroups below it.
    pub are_hierarchical: bool,
}

/// The state machine while it is replayed.
struct ReplayState<'a> {
    reconciler: Reconciler,
    cgroups: &'a HashMap<ContainerId, PathBuf>,
    /// Time of the last step.
    at: f64,
    now: Timestamp,
    changes: WriteBatch,
    noticed: Vec<Kill>,
}

impl ReplayState<'_> {
    fn time(&self) -> Timestamp {
        self.now.moved_to(self.at)
    }

    fn settle(&mut self) {
        let (changes, noticed) = self.reconciler.settle(self.time());
        self.changes.merge(changes);
        self.noticed.extend(noticed);
    }

    /// Goes on to a time, with steps while something is pending and can still change.
    fn advance(&mut self, to: f64) {
        let settled_at = self.at + SETTLED_AFTER;
        while self.reconciler.has_pending() && self.at + STEP < to.min(settled_at) {
            self.at += STEP;
            self.settle();
        }
        self.at = self.at.max(to);
    }

    fn apply_events(&mut self, events: &[RuntimeEvent]) {
        let now = self.time();
        self.reconciler.apply_runtime_events(now, events);
        for (id, cgroup) in events.iter().filter_map(|event| Some((&event.id, self.cgroups.get(&event.id)?)))
        {
            self.reconciler.set_cgroup(id, cgroup);
        }
    }

    fn apply_lines(&mut self, lines: &[ObservedRecord]) {
        let Some(last) = lines.last() else { return };
        self.reconciler.apply_log(self.time(), Some(lines), last.position);
    }

    /// Applies evidence at once. `booted_at`: of a new ledger, the runs that had not ended before this boot did with it.
    fn apply(&mut self, evidence: &PastEvidence, booted_at: Option<f64>, is_log_read: bool) {
        let PastEvidence { events, lines } = evidence;
        let running = running(events);
        // one that runs has not ended with an earlier boot, whatever the clock showed at its start
        let is_before = |event: &&RuntimeEvent| {
            let is_in_boot = booted_at.is_none_or(|boot| event.at >= boot) || running.contains(&event.id);
            is_name(event) || !is_in_boot
        };
        let (before, in_boot): (Vec<_>, Vec<_>) = events.iter().cloned().partition(|event| is_before(&event));
        self.apply_events(&before);
        if booted_at.is_some() {
            self.reconciler.apply_host_restart();
        }
        self.apply_events(&in_boot);
        let position = lines.last().map(|line| line.position).unwrap_or_default();
        self.reconciler.apply_log(self.time(), is_log_read.then_some(lines), position);
    }

    /// Applies the kernel's counter, which was read now, while these lines are not applied yet: what has no record is lost. It happened
    /// at any time up to now.
    fn apply_counters(&mut self, counted: u64, later: usize, counters: &CounterReadings) {
        let (noticed, wall) = (self.time(), self.now.unix_seconds());
        let at = |since: Duration| {
            let at = noticed.plus(since);
            at.with_wall_moved(((wall - at.unix_seconds()) * 1e3) as i64)
        };
        self.reconciler.apply_cgroup_counters(
            noticed,
            noticed,
            &counters.readings,
            counters.are_hierarchical,
        );
        let counted = counted.saturating_sub(later as u64);
        self.reconciler.apply_vmstat(at(Duration::ZERO), counted);
        self.reconciler.apply_vmstat(at(RECORD_TIMEOUT), counted);
    }
}

impl Replay {
    /// Continues from the state of a ledger, or from none. What the evidence does not decide yet is open.
    pub fn run(mut self, state: &LedgerState, now: Timestamp) -> CaughtUp {
        let (booted_at, is_new) = (now.booted_at(), state.is_new());
        let mut events = std::mem::take(&mut self.events);
        if !is_new {
            events = unknown_of(state, events);
        }
        // a ledger has measured the log's clock
        let drift =
            if is_new { LogDrift::measure(booted_at, &events, &self.lines) } else { LogDrift::default() };
        let lines = std::mem::take(&mut self.lines);
        let lines: Vec<_> = lines.into_iter().map(|line| drift.correct(booted_at, now, line)).collect();
        sort(&mut events);
        let began = self.begin(state, now, &events, &lines);
        let kills_known_since = is_new.then(|| self.kills_known_since(booted_at, drift));
        let keep_ended = std::mem::replace(&mut self.config.keep_ended, Duration::MAX);
        let config = ReconcilerConfig { kills_known_since, ..std::mem::take(&mut self.config) };
        // of a new one, all that the runtimes report is new
        let mut state = Cow::Borrowed(state);
        if is_new {
            state.to_mut().runtime_cursors.insert(ANY_SOCKET.to_owned(), 0.0);
        }
        let mut run = ReplayState {
            reconciler: Reconciler::new(
                config,
                &state,
                now.moved_to(began),
                if is_new { 0 } else { u64::MAX },
            ),
            cgroups: &self.cgroups,
            at: began,
            now,
            changes: WriteBatch::default(),
            noticed: vec![],
        };
        if self.is_last {
            run.reconciler.end_cycles();
        }
        let (old, young) = PastEvidence { events, lines }.split_at(began);
        // a new ledger knows by `kills_known_since` that it has no log
        run.apply(&old, is_new.then_some(booted_at), is_new || self.log_end.is_some());
        if let Some(counted) = self.counted.filter(|_| !is_new) {
            let is_counted = |line: &&ObservedRecord| !matches!(line.record, KillRecord::Group { .. });
            let later = young.lines.iter().filter(is_counted).count();
            run.apply_counters(counted, later, &self.counters);
        }
        run.settle();
        for item in young.in_order() {
            run.advance(item.at());
            match item {
                Item::Event(event) => run.apply_events(std::slice::from_ref(event)),
                Item::Line(line) => run.apply_lines(std::slice::from_ref(line)),
            }
            run.settle();
        }
        run.advance(now.unix_seconds());
        if self.is_last {
            run.reconciler.label_pending(now);
        }
        run.reconciler.finish_catch_up(now, keep_ended, self.log_end.take());
        run.settle();
        let ReplayState { reconciler, mut changes, noticed, .. } = run;
        self.complete(&mut changes);
        CaughtUp { reconciler, changes, noticed }
    }

    /// Returns the time from which on each piece of evidence is applied at its own time.
    fn begin(
        &self,
        state: &LedgerState,
        now: Timestamp,
        events: &[RuntimeEvent],
        lines: &[ObservedRecord],
    ) -> f64 {
        let begin = now.unix_seconds() - SETTLED_AFTER;
        let first = match state.is_new() {
            true => {
                let times =
                    events.iter().map(|event| event.at).chain(lines.iter().map(|line| line.written.at));
                times.reduce(f64::min).map_or(now.unix_seconds(), |first| first - 1.0)
            }
            // the ledger has what was before
            false => state.runtime_cursors.get(ANY_SOCKET).map_or(f64::MIN, |until| until + MAX_EVENT_DELAY),
        };
        begin.max(first).min(now.unix_seconds()).max(now.booted_at())
    }

    /// Returns the Unix time from which on every kill that can explain an exit is known.
    fn kills_known_since(&self, booted_at: f64, drift: LogDrift) -> f64 {
        let Some(since) = self.log_since else { return f64::INFINITY };
        let uptime = (since - booted_at).max(0.0);
        since + drift.shift(uptime) + if drift.is_measured() { 0.0 } else { uptime * MAX_DRIFT } + EXIT_WINDOW
    }

    /// Adds to the events what a ledger would have read from the cgroup, and removes ends of which nothing is known.
    fn complete(&self, changes: &mut WriteBatch) {
        for event in changes.events.values_mut() {
            match event {
                Some(LedgerEvent::OomKill(kill)) => self.complete_kill(kill),
                Some(LedgerEvent::Exit(exit)) if is_end_without_cause(exit) => *event = None,
                _ => {}
            }
        }
        let is_recorded = |id: &u64| match changes.events.get(id) {
            Some(Some(LedgerEvent::Exit(exit))) => !exit.before_counting,
            Some(_) => false,
            None => true,
        };
        changes.runs.retain(|id, _| is_recorded(id));
    }

    fn complete_kill(&self, kill: &mut Kill) {
        // without a run nothing shows that the container went on: no runtime knows it, or its start is forgotten
        if let (KillOwner::Container(ContainerRef { started: None, .. }), Some(Victim::Child)) =
            (&kill.owner, kill.victim)
        {
            kill.victim = Some(Victim::Unknown);
        }
        let reported = kill.report.as_ref().filter(|report| !report.host);
        kill.limit_bytes = kill.limit_bytes.or_else(|| reported.and_then(|report| report.limit_bytes));
        if let (KillOwner::Container(subject), OomScope::Container, None) =
            (&kill.owner, kill.scope, kill.limit_bytes)
            && kill.limit_cgroup.trim_end_matches(".scope").ends_with(&*subject.container_id)
        {
            kill.limit_bytes = self.limits.get(&*subject.container_id).copied();
        }
    }
}

/// Returns whether this is an exit of which only the time is known, and which explains no kill: the run before that of a
/// container that runs.
fn is_end_without_cause(exit: &Exit) -> bool {
    exit.exit_code.is_none() && exit.oom_kills == 0 && exit.subject.started.is_none()
}

/// Returns whether an event only tells what a container is called.
fn is_name(event: &RuntimeEvent) -> bool {
    matches!(event.what, EventKind::Exists | EventKind::Sandbox | EventKind::SandboxRemoved)
}

/// What the sources reported.
#[derive(Debug, Default)]
struct PastEvidence {
    /// Names first, then in the order of time.
    events: Vec<RuntimeEvent>,
    /// In the order of the log.
    lines: Vec<ObservedRecord>,
}

impl PastEvidence {
    /// Returns what happened until this Unix time, and what after it.
    fn split_at(mut self, until: f64) -> (Self, Self) {
        let is_later = |event: &RuntimeEvent| !is_name(event) && event.at > until;
        let events = self.events.iter().position(is_later).unwrap_or(self.events.len());
        // one whose time is uncertain comes before the end that it may explain
        let is_certain = |line: &ObservedRecord| {
            line.written.within.latest - line.written.within.earliest <= MAX_UNCERTAINTY
        };
        let is_later = |line: &ObservedRecord| {
            line.written.within.earliest > until || is_certain(line) && line.written.at > until
        };
        let lines = self.lines.iter().position(is_later).unwrap_or(self.lines.len());
        let later = Self { events: self.events.split_off(events), lines: self.lines.split_off(lines) };
        (self, later)
    }

    /// Returns it in the order of time, and lines of the log in their own order: two CPUs may differ.
    fn in_order(&self) -> Vec<Item<'_>> {
        let mut items: Vec<(f64, Item<'_>)> =
            self.events.iter().map(|event| (event.at, Item::Event(event))).collect();
        let mut last = 0.0_f64;
        for line in &self.lines {
            last = last.max(line.written.at);
            items.push((last, Item::Line(line)));
        }
        items.sort_by(|one, other| one.0.total_cmp(&other.0));
        items.into_iter().map(|(_, item)| item).collect()
    }
}

/// PastEvidence with its time.
enum Item<'a> {
    Event(&'a RuntimeEvent),
    Line(&'a ObservedRecord),
}

impl Item<'_> {
    fn at(&self) -> f64 {
        match self {
            Self::Event(event) => event.at,
            Self::Line(line) => line.written.at,
        }
    }
}

/// Brings names to the front, and the rest into the order of time.
fn sort(events: &mut [RuntimeEvent]) {
    events.sort_by(|one, other| (!is_name(one)).cmp(&!is_name(other)).then(one.at.total_cmp(&other.at)));
}

/// Returns what the ledger of a state does not know yet of what the runtimes repeat, in order.
pub fn unknown_of(state: &LedgerState, events: Vec<RuntimeEvent>) -> Vec<RuntimeEvent> {
    let mut unknown = Known(state).unknown_of(events);
    sort(&mut unknown);
    unknown
}

/// Returns the containers that run, by the last that their runtimes listed of them.
fn running(events: &[RuntimeEvent]) -> HashSet<ContainerId> {
    let mut last: HashMap<&ContainerId, &RuntimeEvent> = HashMap::new();
    for event in events {
        if matches!(event.what, EventKind::Running { .. } | EventKind::Ended { .. }) {
            let known = last.entry(&event.id).or_insert(event);
            *known = if event.at >= known.at { event } else { *known };
        }
    }
    let runs = |(_, event): &(&ContainerId, &RuntimeEvent)| matches!(event.what, EventKind::Running { .. });
    last.into_iter().filter(runs).map(|(id, _)| id.clone()).collect()
}

/// What a ledger knows of its containers.
struct Known<'a>(&'a LedgerState);

impl Known<'_> {
    /// Returns whether it may not have this yet: it happened after the ledger had the last from its source.
    fn is_later(&self, event: &RuntimeEvent) -> bool {
        let cursors = &self.0.runtime_cursors;
        let until =
            cursors.get(&cursor_name(event.runtime, &event.socket)).or_else(|| cursors.get(ANY_SOCKET));
        until.is_none_or(|until| event.at > *until)
    }

    /// Returns what it does not know yet: runtimes repeat the past, and list the end of each container that exists.
    fn unknown_of(&self, events: Vec<RuntimeEvent>) -> Vec<RuntimeEvent> {
        let forgotten = self.forgotten(&events);
        let is_new = |event: &RuntimeEvent| {
            self.is_later(event) && !forgotten.contains(&event.id) || self.misses(event)
        };
        let is_end = |event: &RuntimeEvent| matches!(event.what, EventKind::Ended { .. });
        let ended = events.iter().filter(|event| is_end(event) && is_new(event));
        let ending: HashSet<ContainerId> = ended.map(|event| event.id.clone()).collect();
        let runs = running(&events);
        let is_wanted = |event: &RuntimeEvent| {
            let is_known = ending.contains(&event.id) || runs.contains(&event.id);
            match event.what {
                EventKind::Ended { .. } => is_new(event),
                EventKind::Running { .. } => is_known,
                _ => is_known || self.is_later(event) || self.0.containers.contains_key(&event.id),
            }
        };
        events.into_iter().filter(|event| is_wanted(event)).collect()
    }

    /// Returns the containers that it had and has forgotten: their last runs began before it had the last from their source, and it forgets
    /// only what ended. An engine may list another time of the end, as that of its own restart.
    fn forgotten(&self, events: &[RuntimeEvent]) -> HashSet<ContainerId> {
        let is_start = |event: &&RuntimeEvent| matches!(event.what, EventKind::Running { .. });
        let mut began: HashMap<&ContainerId, &RuntimeEvent> = HashMap::new();
        for start in events.iter().filter(is_start) {
            let last = began.entry(&start.id).or_insert(start);
            *last = if start.at > last.at { start } else { *last };
        }
        let is_forgotten = |(id, start): &(&ContainerId, &RuntimeEvent)| {
            !self.0.containers.contains_key(id) && !self.is_later(start)
        };
        began.into_iter().filter(is_forgotten).map(|(id, _)| id.clone()).collect()
    }

    /// Returns whether this is the end of a run that is in progress, as far as the ledger knows.
    fn misses(&self, event: &RuntimeEvent) -> bool {
        let run = self.0.containers.get(&event.id).and_then(|state| state.runs.running());
        run.is_some_and(|run| run.begin().is_none_or(|began| began <= event.at))
    }
}
