//! Runs the ledger's state machine over the past, as if memledger had been running. Pure.
//!
//! Each line of the kernel log and each event of a runtime is applied at its own time, in order, and the steps between them
//! settle what waits for more evidence. The clocks of the kernel log and of the runtimes differ, as they do for a ledger.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;

use super::event_id;
use crate::clock::Timestamp;
use crate::discover::{ContainerId, EventKind, RuntimeEvent};
use crate::events::{ContainerRef, Exit, ExitReason, Kill, KillOwner, LedgerEvent, OomScope, Victim};
use crate::ledger::interval::{Interval, Written};
use crate::ledger::reconcile::{ObservedRecord, Reconciler, ReconcilerConfig};
use crate::ledger::run::SIGKILL_STATUS;
use crate::ledger::sources::kernel_log::LogPosition;
use crate::ledger::store::LedgerState;
use crate::lifecycle::timing::{
    DRIFT_TOLERANCE, EXIT_DELAY, EXIT_WINDOW, MAX_DRIFT, SAME_EXIT, SETTLED_AFTER, STOP_REQUEST_WINDOW,
};
use crate::parse::kernel_log::kills::KillRecord;

/// Seconds between two steps while something is pending.
const STEP: f64 = 0.25;
/// Maximum number of drifts that are tried.
const MAX_CANDIDATES: usize = 1_000;

/// What the past is judged by, besides the evidence.
#[derive(Debug, Default)]
pub struct Replay {
    /// Id of this boot.
    pub boot_id: Arc<str>,
    /// The kernel log's pids are those of the runtimes.
    pub host_pids: bool,
    /// Limits of the containers that still exist, by id.
    pub limits: HashMap<String, u64>,
    /// Cgroups of the containers that run, from the root of the tree.
    pub cgroups: HashMap<ContainerId, PathBuf>,
    /// Unix times of the last ends of the containers that still exist, as their runtime records them, by id.
    pub ends: HashMap<String, f64>,
    /// Unix time from which on the kernel log has every kill; `None` if it was not read.
    pub log_since: Option<f64>,
}

/// The kernel log's clock, by exits that its kills explain: it may be a minute off after a month.
#[derive(Clone, Copy, Debug, Default)]
struct LogDrift {
    /// Seconds that it loses in each second since the boot; `None` if nothing shows it.
    rate: Option<f64>,
}

impl LogDrift {
    /// Compares kills that name their container with its exits by SIGKILL that the log's clock allows.
    fn measure(booted_at: f64, events: &[RuntimeEvent], records: &[ObservedRecord]) -> Self {
        let exits: Vec<(&str, f64)> = events.iter().filter_map(unrequested_sigkill(events)).collect();
        let mut pairs: Vec<DriftPair<'_>> = Vec::new();
        for line in records {
            let KillRecord::Kill { context: Some(context), .. } = &line.record else { continue };
            let uptime = line.position.usec as f64 / 1e6;
            let possible = exits.iter().filter(|(id, exited)| {
                (line.written.within.earliest..=line.written.within.latest + EXIT_DELAY).contains(exited)
                    && context.task_cgroups.iter().any(|path| path.contains(id))
            });
            pairs.extend(possible.map(|(id, exited)| DriftPair {
                id,
                uptime,
                exited: *exited,
                shift: exited - booted_at - uptime,
            }));
        }
        let explained = |rate: f64| -> Vec<&DriftPair<'_>> {
            let fits = |pair: &&DriftPair<'_>| (pair.shift - rate * pair.uptime).abs() <= EXIT_DELAY;
            let mut fitting: Vec<_> = pairs.iter().filter(fits).collect();
            fitting.sort_by(|one, other| {
                (one.id, one.exited).partial_cmp(&(other.id, other.exited)).unwrap_or(Ordering::Equal)
            });
            fitting.dedup_by(|one, other| (one.id, one.exited) == (other.id, other.exited));
            fitting
        };
        // a good clock needs no correction, and of several the newest kill counts: it is the one that ended the container
        let measured = pairs.iter().rev().map(|pair| pair.shift / pair.uptime);
        let possible = measured.filter(|rate| rate.abs() <= MAX_DRIFT).take(MAX_CANDIDATES);
        let mut best: (f64, Vec<&DriftPair<'_>>) = (0.0, vec![]);
        for rate in std::iter::once(0.0).chain(possible) {
            let fitting = explained(rate);
            if fitting.len() > best.1.len() {
                best = (rate, fitting);
            }
        }
        let (rate, fitting) = best;
        let sum = |of: fn(&DriftPair<'_>) -> f64| fitting.iter().map(|pair| of(pair)).sum::<f64>();
        let shift = sum(|pair| pair.shift);
        let is_exact = rate == 0.0 && shift >= 0.0;
        let rate = if is_exact { 0.0 } else { shift / sum(|pair| pair.uptime) };
        Self { rate: (!fitting.is_empty()).then_some(rate) }
    }

    /// Returns the seconds by which a record of this time, in seconds since the boot, is too early.
    fn shift(&self, uptime: f64) -> f64 {
        // a kill precedes the exit by which the drift is measured
        self.rate.filter(|rate| *rate != 0.0).map_or(0.0, |rate| rate * uptime - EXIT_DELAY / 4.0)
    }

    /// Returns the line with its corrected time.
    fn correct(&self, booted_at: f64, now: Timestamp, line: ObservedRecord) -> ObservedRecord {
        let uptime = line.position.usec as f64 / 1e6;
        let shift = self.shift(uptime);
        if shift == 0.0 {
            return line;
        }
        let at = (booted_at + uptime + shift).min(now.unix_seconds());
        let within = Interval::new(at - DRIFT_TOLERANCE, at + DRIFT_TOLERANCE);
        ObservedRecord { written: Written { at, within }, ..line }
    }
}

/// A kill and an exit that it may have caused.
#[derive(Debug)]
struct DriftPair<'a> {
    id: &'a str,
    /// The kernel's stamp, in seconds.
    uptime: f64,
    /// Unix time of the exit.
    exited: f64,
    /// Seconds from the kill to the exit, by their own clocks.
    shift: f64,
}

/// Returns the function that gives container and time of an exit by SIGKILL that nobody requested.
fn unrequested_sigkill<'a>(
    events: &[RuntimeEvent],
) -> impl FnMut(&'a RuntimeEvent) -> Option<(&'a str, f64)> {
    let requests: Vec<(ContainerId, f64)> = events
        .iter()
        .filter(|event| matches!(event.what, EventKind::SignalRequested { .. }))
        .map(|event| (event.id.clone(), event.at))
        .collect();
    move |event| {
        let EventKind::Ended { exit_code: Some(SIGKILL_STATUS), .. } = event.what else { return None };
        let is_requested = |(id, at): &(ContainerId, f64)| {
            *id == event.id && (0.0..STOP_REQUEST_WINDOW).contains(&(event.at - at))
        };
        (!requests.iter().any(is_requested)).then_some((event.id.as_str(), event.at))
    }
}

/// Evidence with its time.
enum Item {
    Runtime(RuntimeEvent),
    Line(Box<ObservedRecord>),
}

/// The state machine while it is replayed.
struct ReplayState<'a> {
    reconciler: Reconciler,
    cgroups: &'a HashMap<ContainerId, PathBuf>,
    /// Time of the last step.
    at: f64,
    now: Timestamp,
    found: BTreeMap<u64, LedgerEvent>,
}

impl ReplayState<'_> {
    fn settle(&mut self) {
        let (changes, _) = self.reconciler.settle(self.now.moved_to(self.at));
        let events = changes.events.into_iter();
        self.found.extend(events.filter_map(|(id, event)| Some((id, event?))));
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

    fn apply(&mut self, item: Item) {
        let now = self.now.moved_to(self.at);
        match item {
            Item::Runtime(event) => {
                let (id, cgroup) = (event.id.clone(), self.cgroups.get(&event.id));
                self.reconciler.apply_runtime_events(now, &[event]);
                if let Some(cgroup) = cgroup {
                    self.reconciler.set_cgroup(&id, cgroup);
                }
            }
            Item::Line(line) => {
                let position = line.position;
                self.reconciler.apply_log(now, Some(&[*line]), position);
            }
        }
        self.settle();
    }
}

impl Replay {
    /// Returns the events that the evidence shows. One whose evidence may still arrive is open, as in a ledger.
    pub fn run(
        &self,
        now: Timestamp,
        events: Vec<RuntimeEvent>,
        lines: Vec<ObservedRecord>,
    ) -> Vec<LedgerEvent> {
        let booted_at = now.booted_at();
        let drift = LogDrift::measure(booted_at, &events, &lines);
        let lines: Vec<_> = lines.into_iter().map(|line| drift.correct(booted_at, now, line)).collect();
        let items = in_order(now, drift, events, lines);
        let began = items.first().map_or(now.unix_seconds(), |(at, _)| *at) - 1.0;
        let config = ReconcilerConfig {
            boot_id: Arc::clone(&self.boot_id),
            booted_at,
            keep_ended: std::time::Duration::MAX,
            host_pids: self.host_pids,
            kills_known_since: Some(self.kills_known_since(booted_at, drift)),
            ..ReconcilerConfig::default()
        };
        let start = now.moved_to(began);
        let reconciler = Reconciler::new(config, &LedgerState::default(), start, 0);
        let mut run =
            ReplayState { reconciler, cgroups: &self.cgroups, at: began, now, found: BTreeMap::new() };
        run.reconciler.apply_log(start, Some(&[]), LogPosition::default());
        let mut is_before_boot = began < booted_at;
        for (at, item) in items {
            if is_before_boot && at >= booted_at {
                run.reconciler.apply_host_restart();
                is_before_boot = false;
            }
            // no time passes before the boot: the monotonic clock begins there
            run.advance(at.max(booted_at));
            run.apply(item);
        }
        run.advance(now.unix_seconds().min(run.at + SETTLED_AFTER));
        run.reconciler.label_pending(now);
        run.settle();
        let mut ids = HashMap::new();
        let completed = run.found.into_iter().map(|(id, event)| {
            let event = self.complete(event);
            ids.insert(id, event.id());
            event
        });
        let mut completed: Vec<_> = completed.collect();
        completed.iter_mut().for_each(|event| name_kills_by(event, &ids));
        completed.retain(|event| !is_end_without_cause(event));
        completed
    }

    /// Returns the Unix time from which on every kill that can explain an exit is known.
    fn kills_known_since(&self, booted_at: f64, drift: LogDrift) -> f64 {
        let Some(since) = self.log_since else { return f64::INFINITY };
        let uptime = (since - booted_at).max(0.0);
        let is_measured = drift.rate.is_some();
        since + drift.shift(uptime) + if is_measured { 0.0 } else { uptime * MAX_DRIFT } + EXIT_WINDOW
    }

    /// Gives an event its id, and what a ledger would have read from the cgroup.
    fn complete(&self, event: LedgerEvent) -> LedgerEvent {
        match event {
            LedgerEvent::OomKill(kill) => LedgerEvent::OomKill(self.complete_kill(kill)),
            LedgerEvent::Exit(exit) => LedgerEvent::Exit(self.complete_exit(exit)),
            other @ (LedgerEvent::GpuError(_) | LedgerEvent::CudaOom(_)) => other,
        }
    }

    fn complete_kill(&self, mut kill: Kill) -> Kill {
        // without a run nothing shows that the container went on: no runtime knows it, or its start is forgotten
        if let (KillOwner::Container(ContainerRef { started: None, .. }), Some(Victim::Child)) =
            (&kill.owner, kill.victim)
        {
            kill.victim = Some(Victim::Unknown);
        }
        let usec = kill.kernel_usec.unwrap_or_default().to_string();
        kill.id = event_id(&[&kill.boot_id, &usec, &kill.pid.unwrap_or_default().to_string()]);
        let reported = kill.report.as_ref().filter(|report| !report.host);
        kill.limit_bytes = kill.limit_bytes.or_else(|| reported.and_then(|report| report.limit_bytes));
        if let (KillOwner::Container(subject), OomScope::Container, None) =
            (&kill.owner, kill.scope, kill.limit_bytes)
            && kill.limit_cgroup.trim_end_matches(".scope").ends_with(&*subject.container_id)
        {
            kill.limit_bytes = self.limits.get(&*subject.container_id).copied();
        }
        kill
    }

    /// Gives an exit its id.
    fn complete_exit(&self, mut exit: Exit) -> Exit {
        // the time of a restart is computed anew in each read
        let restarted = exit.subject.started.filter(|_| exit.reason == Some(ExitReason::HostRestart));
        // while the engine has the event of an end, its time is that of the event
        let recorded = self.ends.get(&*exit.subject.container_id).copied();
        let recorded = recorded.filter(|ended| (ended - exit.at).abs() < SAME_EXIT);
        let millis = ((restarted.or(recorded).unwrap_or(exit.at) * 1e3) as u64).to_string();
        exit.id = event_id(&[&exit.subject.container_id, &millis]);
        exit
    }
}

/// Replaces the ids of the kills that ended an exit, or may have.
fn name_kills_by(event: &mut LedgerEvent, ids: &HashMap<u64, u64>) {
    if let LedgerEvent::Exit(exit) = event {
        exit.ended_by = exit.ended_by.and_then(|id| ids.get(&id).copied());
        exit.may_be = exit.may_be.iter().filter_map(|id| ids.get(id).copied()).collect();
    }
}

/// Returns whether this is an exit of which only the time is known, and which explains no kill: the run before that of a
/// container that runs.
fn is_end_without_cause(event: &LedgerEvent) -> bool {
    matches!(event, LedgerEvent::Exit(Exit { exit_code: None, oom_kills: 0, subject, .. }) if subject.started.is_none())
}

/// Returns the evidence in the order of time: names first, and lines of the log in their own order.
fn in_order(
    now: Timestamp,
    drift: LogDrift,
    events: Vec<RuntimeEvent>,
    lines: Vec<ObservedRecord>,
) -> Vec<(f64, Item)> {
    let (named, events): (Vec<_>, Vec<_>) = events.into_iter().partition(|event| {
        matches!(event.what, EventKind::Exists | EventKind::Sandbox | EventKind::SandboxRemoved)
    });
    let mut items: Vec<(f64, Item)> =
        events.into_iter().map(|event| (event.at, Item::Runtime(event))).collect();
    let mut last = 0.0_f64;
    for line in lines {
        let uptime = line.position.usec as f64 / 1e6;
        let at = match drift.shift(uptime) {
            0.0 => line.written.at,
            shift => (now.booted_at() + uptime + shift).min(now.unix_seconds()),
        };
        last = last.max(at); // two CPUs may differ
        items.push((last, Item::Line(Box::new(line))));
    }
    items.sort_by(|one, other| one.0.total_cmp(&other.0));
    let first = items.first().map_or(now.unix_seconds(), |(at, _)| *at);
    let named = named.into_iter().map(|event| RuntimeEvent { at: first, ..event });
    let mut ordered: Vec<_> = named.map(|event| (first, Item::Runtime(event))).collect();
    ordered.extend(items);
    ordered
}
