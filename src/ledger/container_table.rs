//! Containers that the ledger knows, running or ended, with the current run of each.
//!
//! It has two sources: runtime events, which arrive at once and in order, and the cycle's inventory, which also
//! contains containers without a runtime. Both report each run; equal start times identify it. A run of another boot of
//! the host ended with that boot, whatever exit code the runtime makes up for it.
//!
//! A container is kept for a while after its end, so that a late kill can still be labelled.

use std::collections::{HashMap, HashSet, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::events::{ContainerLabels, ContainerRef, MemoryHolder, PriorUsage};
use super::exchange::{ContainerUsage, CycleReport};
use super::interval::{CLOCK_TOLERANCE, Interval};
use super::run::{MAX_START_EVENT_DELAY, Run, START_TOLERANCE};
use super::run_record::RunFigures;
use super::usage_history::by_role;
use crate::clock::Timestamp;
use crate::config::Filter;
use crate::discover::{Container, ContainerId, EventKind, Identity, Inventory, RuntimeEvent};

/// A container that is listed this many seconds after its assumed exit has not exited.
const REOPEN_AFTER: f64 = 10.0;
/// How long to wait for the runtime's exit event of a container that has no processes any more.
const EXIT_EVENT_TIMEOUT: Duration = Duration::from_secs(15);
/// The same while the runtime is disconnected: it may reconnect and report the exit.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(600);
/// The same for containers without a runtime.
const NO_RUNTIME_TIMEOUT: Duration = Duration::from_secs(3);
/// The runtime reports the end of a stop within this many seconds after the exit.
const STOP_REPORT_DELAY: f64 = 2.0;
/// Maximum number of stop requests that are kept per run.
const MAX_STOP_REQUESTS: usize = 8;
/// Maximum number of ended runs that are kept per container, for late kills.
const MAX_ENDED_RUNS: usize = 4;
/// Interval between writes of the figures of running containers: a crash of memledger loses at most that.
const FIGURES_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum number of ended containers that are kept.
const MAX_ENDED: usize = 5_000;

/// One container.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ContainerState {
    /// Labels of its series.
    pub name: ContainerLabels,
    /// The name is from a runtime; otherwise it is the short id.
    #[serde(default)]
    pub named: bool,
    /// Image; empty if no runtime reported it.
    pub image: Arc<str>,
    /// Runtime; empty if unknown.
    pub runtime: Arc<str>,
    /// Unix time of the runtime's last OOM event that is of no run: its start may not be reported yet.
    #[serde(default)]
    pub oom_told: Option<f64>,
    /// Cgroup path, relative to the root of the hierarchy, from the inventory.
    #[serde(default)]
    pub cgroup: Option<PathBuf>,
    /// Excluded by the filters.
    #[serde(default)]
    pub hidden: bool,
    /// Current or last run; `None` if it was never seen running.
    pub run: Option<Run>,
    /// Unix time of the first event, or of the last kill if it was never seen running.
    #[serde(default)]
    pub told: f64,
    #[serde(skip)]
    missing_since: Option<Timestamp>,
    /// Runs before the current one, oldest first.
    #[serde(default, skip_serializing_if = "VecDeque::is_empty")]
    ended_runs: VecDeque<Run>,
    #[serde(skip)]
    settings: Vec<(Arc<str>, Arc<str>)>,
}

/// A start or an end of a run.
#[derive(Clone, Debug)]
pub enum RunTransition {
    /// A run began.
    Began(ContainerId),
    /// A run ended.
    Ended(Box<End>),
}

/// The data of a run that ended.
#[derive(Clone, Debug)]
pub struct End {
    /// Id of the container.
    pub id: ContainerId,
    /// The container.
    pub subject: ContainerRef,
    /// The run, with its exit.
    pub run: Run,
    /// Usage before the exit.
    pub before: Option<PriorUsage>,
    /// Highest usage during the run.
    pub peak_usage_bytes: Option<u64>,
    /// Highest sample of unreclaimable memory.
    pub peak_unreclaimable_bytes: Option<u64>,
}

/// How well a run fits a kill; the first field decides.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
struct RunRank {
    by_pid: bool,
    is_unexplained: bool,
    /// Seconds from the likely time to the run, negated.
    nearness: f64,
    overlap: f64,
}

impl ContainerState {
    /// Returns true if it is running, as far as known.
    pub fn is_running(&self) -> bool {
        self.run.as_ref().is_some_and(|run| run.ended.is_none())
    }

    /// Returns the container as the subject of an event of this run.
    pub fn subject(&self, id: &ContainerId, run: Option<&Run>) -> ContainerRef {
        ContainerRef {
            name: self.name.clone(),
            container_id: Arc::clone(id.shared()),
            image: Arc::clone(&self.image),
            runtime: Arc::clone(&self.runtime),
            started: run.and_then(|run| run.started),
        }
    }

    /// Returns the run in which a process was killed, and whether it is certain; `None` if no known run can have been it.
    /// A first process with its pid decides; for a kill without a pid, an exit by SIGKILL that nothing explains; then
    /// the most likely time `at`; then the longest overlap, which is not certain: a later run may not be reported yet.
    pub fn run_of_kill(&self, happened: &Interval, at: f64, pid: Option<u32>) -> Option<(&Run, bool)> {
        let mut begin = f64::NEG_INFINITY;
        let mut best: Option<(RunRank, bool, &Run)> = None;
        for run in self.all_runs() {
            let start = run.begin().map_or(f64::NEG_INFINITY, |started| started - MAX_START_EVENT_DELAY);
            let window = Interval::new(begin.max(start), run.ended.unwrap_or(f64::INFINITY));
            begin = run.ended.map_or(begin, |ended| ended + CLOCK_TOLERANCE);
            if !window.overlaps(happened) {
                continue;
            }
            let rank = RunRank {
                by_pid: pid.is_some() && run.pid == pid,
                is_unexplained: pid.is_none() && run.is_sigkill_unexplained(),
                nearness: -(run.started.unwrap_or(window.earliest) - at).max(at - window.latest).max(0.0),
                overlap: window.overlap(happened),
            };
            let is_likely = (window.earliest..=window.latest + CLOCK_TOLERANCE).contains(&at);
            if best.is_none_or(|(other, ..)| rank > other) {
                best = Some((rank, rank.by_pid || rank.is_unexplained || is_likely, run));
            }
        }
        best.map(|(_, is_certain, run)| (run, is_certain))
    }

    /// Returns when the run before the current one ended, or the last time at which it is known not to have ended.
    fn previous_end(&self) -> Option<f64> {
        self.ended_runs.back()?.latest_known()
    }

    /// Returns the run with this number.
    pub fn run(&self, number: u32) -> Option<&Run> {
        self.all_runs().find(|run| run.number == number)
    }

    /// Returns the run with this number for a change.
    pub fn run_mut(&mut self, number: u32) -> Option<&mut Run> {
        self.ended_runs.iter_mut().chain(&mut self.run).find(|run| run.number == number)
    }

    /// Returns the run at this Unix time for a change.
    pub fn run_at_mut(&mut self, at: f64) -> Option<&mut Run> {
        let runs = self.ended_runs.iter_mut().chain(&mut self.run);
        runs.into_iter().find(|run| {
            run.begin().is_none_or(|started| started <= at + CLOCK_TOLERANCE)
                && run.ended.is_none_or(|ended| ended + CLOCK_TOLERANCE >= at)
        })
    }

    /// Returns true if the kernel's path is the container's own cgroup or below it.
    pub fn contains_path(&self, path: &str) -> bool {
        let path = Path::new(path.trim_start_matches('/'));
        self.cgroup.as_ref().is_some_and(|cgroup| path.starts_with(cgroup))
    }

    /// Returns the known runs, oldest first.
    pub fn all_runs(&self) -> impl Iterator<Item = &Run> {
        self.ended_runs.iter().chain(&self.run)
    }

    /// Returns the run that ended at this Unix time.
    pub fn run_ended_at(&self, at: f64) -> Option<&Run> {
        self.all_runs().find(|run| run.ended == Some(at))
    }

    /// Forgets the figures of a run whose record is complete.
    pub fn forget_figures(&mut self, ended: f64) {
        // one that is listed again goes on
        let last = self.run.iter_mut().filter(|run| !run.is_exit_assumed);
        let runs = self.ended_runs.iter_mut().chain(last).filter(|run| run.ended == Some(ended));
        runs.for_each(|run| run.figures = RunFigures::default());
    }

    /// Returns the exit of the current run as a transition, once.
    fn end_transition(&mut self, id: &ContainerId) -> Option<RunTransition> {
        let run = self.run.as_mut()?;
        if std::mem::replace(&mut run.is_exit_recorded, true) {
            return None;
        }
        let run = run.clone();
        let usage = run.last_usage();
        Some(RunTransition::Ended(Box::new(End {
            id: id.clone(),
            subject: self.subject(id, Some(&run)),
            before: self.prior_usage(&run),
            peak_usage_bytes: usage.and_then(|usage| usage.peak_usage_bytes),
            peak_unreclaimable_bytes: usage.and_then(|usage| usage.peak_unreclaimable_bytes),
            run,
        })))
    }

    /// Returns the settings of labels and environment.
    pub fn settings(&self) -> &[(Arc<str>, Arc<str>)] {
        &self.settings
    }

    /// Returns the usage up to now or to the end of the run.
    pub fn prior_usage(&self, run: &Run) -> Option<PriorUsage> {
        let samples = run.history.samples()?;
        let roles = run.last_usage().map_or(vec![], |usage| by_role(&usage.processes));
        let settings = run.figures.settings_over(&self.settings);
        Some(PriorUsage { samples, roles, settings, ..PriorUsage::default() })
    }
}

/// All known containers.
#[derive(Debug, Default)]
pub struct ContainerTable {
    filter: Filter,
    known: HashMap<ContainerId, ContainerState>,
    /// Runtime events of exits are ignored, so do not wait for them.
    without_runtimes: bool,
    /// Each runtime, and whether it is connected.
    connections: Vec<(&'static str, bool)>,
    host_memory: Option<(u64, u64)>,
    /// When the last cycle began.
    last_cycle: Option<Timestamp>,
    /// When the figures of running containers were last stored.
    figures_stored: Option<Timestamp>,
    changed: Vec<ContainerId>,
}

impl ContainerTable {
    /// Creates the table from the stored containers.
    pub fn new(
        filter: Filter,
        without_runtimes: bool,
        stored: impl Iterator<Item = (ContainerId, ContainerState)>,
    ) -> Self {
        Self { filter, without_runtimes, known: stored.collect(), ..Self::default() }
    }

    /// Returns one container.
    pub fn get(&self, id: &ContainerId) -> Option<&ContainerState> {
        self.known.get(id)
    }

    /// Returns one container for a change that is to be stored. To a container without any runtime event the filters
    /// apply as in the inventory: to its short id, without labels.
    pub fn modify(&mut self, id: &ContainerId) -> &mut ContainerState {
        self.changed.push(id.clone());
        let filter = &self.filter;
        self.known.entry(id.clone()).or_insert_with(|| ContainerState {
            name: ContainerLabels { container_name: id.short().into(), ..ContainerLabels::default() },
            hidden: !filter.labels.is_empty() || !filter.shows(&[id.short()]),
            ..ContainerState::default()
        })
    }

    /// Iterates over all containers.
    pub fn iter(&self) -> impl Iterator<Item = (&ContainerId, &ContainerState)> {
        self.known.iter()
    }

    /// Makes all containers count as changed.
    pub fn mark_all_changed(&mut self) {
        self.changed.extend(self.known.keys().cloned());
    }

    /// Makes all running containers count as changed.
    pub fn mark_running_changed(&mut self) {
        let running = self.known.iter().filter(|(_, known)| known.is_running());
        self.changed.extend(running.map(|(id, _)| id.clone()));
    }

    /// Takes the ids of the containers that changed since the last call.
    pub fn take_changed(&mut self) -> Vec<ContainerId> {
        let mut changed = std::mem::take(&mut self.changed);
        changed.sort();
        changed.dedup();
        changed
    }

    /// Applies a runtime event.
    pub fn apply_event(&mut self, runtime_event: &RuntimeEvent) -> Vec<RunTransition> {
        let id = &runtime_event.id;
        if !self.known.contains_key(id)
            && runtime_event.named.is_none()
            && !matches!(runtime_event.what, EventKind::Running { .. })
        {
            return vec![]; // it ended long ago
        }
        let named = runtime_event.named.as_ref().map(|named| {
            let identity = Identity::canonical(&named.name, named.pod.as_deref());
            (named, named.labels_match && identity.is_included(&self.filter), identity)
        });
        let known = self.modify(id);
        if known.runtime.is_empty() {
            known.runtime = runtime_event.runtime.into();
            known.told = runtime_event.at;
        }
        if let Some((named, shown, identity)) = named {
            // keep the inventory's name: it is unique over all runtimes
            if !known.named || matches!(runtime_event.what, EventKind::Renamed) {
                known.name = ContainerLabels::from(&identity);
                known.named = true;
            }
            known.image = Arc::clone(&named.image);
            known.hidden = !shown;
        }
        match &runtime_event.what {
            EventKind::Exists | EventKind::Renamed => vec![],
            EventKind::Started => self.begin_run(id, Some(runtime_event.at), None, true),
            EventKind::Running { pid } => self.begin_run(id, Some(runtime_event.at), *pid, false),
            EventKind::Ended { exit_code, oom_flag } => {
                apply_exit(known, runtime_event, *exit_code, *oom_flag).into_iter().collect()
            }
            EventKind::Oom => {
                match known.run_at_mut(runtime_event.at) {
                    Some(run) => run.oom_told = true,
                    None => known.oom_told = Some(runtime_event.at),
                }
                vec![]
            }
            EventKind::SignalRequested { signal } => {
                apply_stop_request(known, runtime_event.at, *signal);
                vec![]
            }
        }
    }

    /// Starts a run that began at `started`, unless it is known already.
    fn begin_run(
        &mut self,
        id: &ContainerId,
        started: Option<f64>,
        pid: Option<u32>,
        is_event: bool,
    ) -> Vec<RunTransition> {
        let known = self.modify(id);
        let mut transitions = Vec::new();
        let previous_end = known.previous_end();
        if let Some(run) = known.run.as_mut() {
            let is_of_this_boot = run.host_restart.is_none() || run.ended.is_some();
            let same = is_of_this_boot
                && match (run.started, started, run.ended) {
                    // a late report after the exit; a start after that exit is another run, however soon it came
                    (_, Some(other), Some(ended)) => other <= ended,
                    (Some(_), Some(other), None) => {
                        run.began_at(other, previous_end) || is_event && run.can_have_start_event(other)
                    }
                    (_, _, ended) => ended.is_none(),
                };
            if same {
                run.pid = run.pid.or(pid);
                run.started = run.started.or(started);
                if run.ended.is_none() {
                    run.add_start(started, previous_end);
                    run.start_event = run.start_event.or(started.filter(|_| is_event));
                }
                return transitions;
            }
            if run.started.zip(started).is_some_and(|(known, reported)| reported < known) {
                return transitions; // a late report of an earlier run
            }
            if run.ended.is_none() {
                // its exit was not reported, and the next run has begun
                (run.ended, run.is_exit_assumed) = (run.host_restart.or(started), true);
                transitions.extend(known.end_transition(id));
            }
        }
        let mut number = 0;
        if let Some(run) = known.run.take() {
            number = run.number + 1;
            known.ended_runs.push_back(run);
            if known.ended_runs.len() > MAX_ENDED_RUNS {
                known.ended_runs.pop_front();
            }
        }
        let is_of_run =
            |reported: &mut f64| started.is_some_and(|started| *reported >= started - CLOCK_TOLERANCE);
        let oom_told = known.oom_told.take_if(is_of_run).is_some();
        let start_event = started.filter(|_| is_event);
        known.run = Some(Run { number, started, start_event, pid, oom_told, ..Run::default() });
        known.missing_since = None;
        transitions.push(RunTransition::Began(id.clone()));
        transitions
    }

    /// Applies the data of a cycle.
    pub fn apply_cycle(&mut self, now: Timestamp, report: &CycleReport) -> Vec<RunTransition> {
        let (last_cycle, mut transitions) = (self.last_cycle.replace(report.at), Vec::new());
        if !self.without_runtimes {
            self.connections.clone_from(&report.inventory.runtimes);
        }
        self.host_memory = report.host_memory;
        for (container, held) in std::iter::zip(&report.inventory.containers, &report.containers) {
            self.apply_listed(container);
            if !self.reopen_listed(now, container) && self.is_another_run(container) {
                transitions.extend(self.begin_run(&container.id, container.started, None, false));
            }
            self.record_sample(report.at, last_cycle, container, held);
        }
        if self.figures_stored.is_none_or(|stored| now.since(stored) >= FIGURES_INTERVAL) {
            self.figures_stored = Some(now);
            self.changed.extend(report.inventory.containers.iter().map(|container| container.id.clone()));
        }
        transitions.extend(self.end_vanished(now, &report.inventory));
        transitions
    }

    /// Takes the name, the cgroup and the settings of a container from the inventory.
    fn apply_listed(&mut self, container: &Container) {
        let name = ContainerLabels::from(&container.identity);
        let cgroup = container.cgroup.as_ref().map(|cgroup| &cgroup.path);
        let named = *name.container_name != *container.id.short();
        let new = self.known.get(&container.id).is_none_or(|known| {
            let renamed = known.name != name && (named || !known.named);
            let moved = cgroup.is_some() && known.cgroup.as_ref() != cgroup;
            renamed || moved || known.hidden || known.run.is_none()
        });
        let known = if new { self.modify(&container.id) } else { self.entry(&container.id) };
        if new && (named || !known.named) {
            known.named = named;
            known.name = name;
            known.image = Arc::clone(&container.image);
            known.runtime = container.runtime.into();
        }
        if new {
            known.hidden = false;
            known.cgroup = cgroup.cloned().or(known.cgroup.take());
        }
        known.missing_since = None;
        known.settings.clone_from(&container.settings);
    }

    /// Continues a run that was taken for ended and is still listed. Returns whether there was one.
    fn reopen_listed(&mut self, now: Timestamp, container: &Container) -> bool {
        let Some(run) = &mut self.entry(&container.id).run else { return false };
        // the inventory may be slightly older than the exit
        let is_listed_after = |ended: f64| run.is_exit_assumed && now.unix_seconds() - ended > REOPEN_AFTER;
        if !run.ended.is_some_and(is_listed_after) {
            return false;
        }
        (run.ended, run.is_exit_assumed) = (None, false);
        true
    }

    /// Returns whether the inventory lists another run than the known one.
    fn is_another_run(&self, container: &Container) -> bool {
        let Some(run) = self.known.get(&container.id).and_then(|known| known.run.as_ref()) else {
            return true;
        };
        let is_later = |(one, other): (f64, f64)| other >= one + START_TOLERANCE;
        run.started.zip(container.started).is_some_and(is_later)
            || run.ended.is_none() && run.host_restart.is_some()
    }

    /// Records what a container held in the cycle at `at`, if that was after the begin of its run.
    fn record_sample(
        &mut self,
        at: Timestamp,
        last_cycle: Option<Timestamp>,
        container: &Container,
        held: &ContainerUsage,
    ) {
        let known = self.entry(&container.id);
        let previous_end = known.previous_end();
        let Some(run) = &mut known.run else { return };
        if run.begin().is_some_and(|started| started > at.unix_seconds() + START_TOLERANCE) {
            return;
        }
        run.record_usage(at, held);
        // a cycle that began before the run saw the one before it
        let is_of_run = |started: f64| {
            let same = |listed: f64| run.began_at(listed, previous_end);
            started <= at.unix_seconds() && container.started.is_none_or(same)
        };
        if run.ended.is_none()
            && run.begin().is_none_or(is_of_run)
            && run.figures.record(at, last_cycle, container, held)
        {
            self.changed.push(container.id.clone());
        }
    }

    fn entry(&mut self, id: &ContainerId) -> &mut ContainerState {
        self.known.entry(id.clone()).or_default()
    }

    /// Ends runs that are not listed any more and whose exit was not reported.
    fn end_vanished(&mut self, now: Timestamp, inventory: &Inventory) -> Vec<RunTransition> {
        let listed: HashSet<_> = inventory.containers.iter().map(|c| &c.id).collect();
        let mut transitions = Vec::new();
        for (id, known) in &mut self.known {
            if !known.is_running() || known.hidden || listed.contains(id) {
                continue;
            }
            let since = *known.missing_since.get_or_insert(now);
            let timeout = match self.connections.iter().find(|(runtime, _)| **runtime == *known.runtime) {
                Some((_, true)) => EXIT_EVENT_TIMEOUT,
                Some((_, false)) => RECONNECT_TIMEOUT,
                // its runtime is not known yet
                None if !known.named && self.connections.iter().any(|(_, is_up)| *is_up) => {
                    EXIT_EVENT_TIMEOUT
                }
                None => NO_RUNTIME_TIMEOUT,
            };
            if now.since(since) >= timeout
                && let Some(run) = known.run.as_mut()
            {
                let missing = now.unix_seconds() - now.since(since).as_secs_f64();
                (run.ended, run.is_exit_assumed) = (Some(run.host_restart.unwrap_or(missing)), true);
                transitions.extend(known.end_transition(id));
                self.changed.push(id.clone());
            }
        }
        transitions
    }

    /// Marks the runs that had not ended before the host was restarted at this Unix time.
    pub fn apply_host_restart(&mut self, at: f64) {
        for (id, known) in &mut self.known {
            if let Some(run) = known.run.as_mut().filter(|run| run.ended.is_none()) {
                run.host_restart = Some(at);
                self.changed.push(id.clone());
            }
        }
    }

    /// Returns the five largest holders of unreclaimable host memory at that time, and the memory of the host.
    pub fn memory_holders(&self, at: f64) -> (Vec<MemoryHolder>, Option<(u64, u64)>) {
        let holder = |known: &ContainerState| {
            let run = known.run.as_ref().filter(|run| run.ended.is_none_or(|ended| ended >= at - 1.0))?;
            let unreclaimable_bytes = run.history.newest()?.unreclaimable_bytes?;
            Some(MemoryHolder { name: Arc::clone(&known.name.container_name), unreclaimable_bytes })
        };
        let mut holders: Vec<_> = self.known.values().filter_map(holder).collect();
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.unreclaimable_bytes));
        holders.truncate(5);
        (holders, self.host_memory)
    }

    /// Returns the container that alone had a process with this pid at that time: the first process of a run, by the
    /// runtime, or one of the newest cycles with that name.
    pub fn find_by_pid(&self, pid: u32, comm: &str, happened: &Interval) -> Option<ContainerId> {
        let had = |run: &Run| run.had_first_pid(pid, happened) || run.had_process(pid, comm, happened);
        let mut found = self.known.iter().filter(|(_, known)| known.all_runs().any(had));
        let id = found.next()?.0.clone();
        found.next().is_none().then_some(id)
    }

    /// Removes containers that ended before this Unix time, and those above the limit. Returns their ids.
    pub fn remove_ended(&mut self, before: f64, keep: impl Fn(&ContainerId) -> bool) -> Vec<ContainerId> {
        let ended = |known: &ContainerState| match &known.run {
            Some(run) => run.ended,
            None => Some(known.told),
        };
        let mut gone: Vec<(f64, ContainerId)> = self
            .known
            .iter()
            .filter_map(|(id, known)| Some((ended(known)?, id.clone())))
            .filter(|(_, id)| !keep(id))
            .collect();
        gone.sort_by(|one, other| one.0.total_cmp(&other.0));
        let over = gone.len().saturating_sub(MAX_ENDED);
        let gone: Vec<_> = gone
            .into_iter()
            .enumerate()
            .filter(|(n, (at, _))| *n < over || *at < before)
            .map(|(_, (_, id))| id)
            .collect();
        for id in &gone {
            self.known.remove(id);
        }
        gone
    }
}

/// Applies a request to stop the container, or to send it a signal.
fn apply_stop_request(known: &mut ContainerState, at: f64, signal: Option<i32>) {
    let just_ended = |run: &&mut Run| {
        let ended = run.ended.is_some_and(|ended| (0.0..STOP_REPORT_DELAY).contains(&(at - ended)));
        signal.is_none() && ended
    };
    if let Some(run) = known.run.as_mut().filter(just_ended) {
        run.is_stop_confirmed = true;
    }
    // repeated after a restart, it may belong to an earlier run
    let is_new_request = |run: &&mut Run| {
        run.ended.is_none()
            && run.begin().is_none_or(|started| started <= at + CLOCK_TOLERANCE)
            && !run.asked.contains(&(at, signal))
    };
    if let Some(run) = known.run.as_mut().filter(is_new_request) {
        run.asked.push((at, signal));
        if run.asked.len() > MAX_STOP_REQUESTS {
            run.asked.remove(0);
        }
    }
}

/// Applies the exit of a run. Returns `None` if the exit is known already or belongs to an earlier run.
fn apply_exit(
    known: &mut ContainerState,
    runtime_event: &RuntimeEvent,
    exit_code: Option<i64>,
    oom_flag: Option<bool>,
) -> Option<RunTransition> {
    // its start may be forgotten
    let run = known.run.get_or_insert_default();
    if run.begin().is_some_and(|started| runtime_event.at < started) {
        let same = |run: &&mut Run| {
            run.ended.is_some_and(|ended| (ended - runtime_event.at).abs() < START_TOLERANCE)
        };
        if let Some(earlier) = known.ended_runs.iter_mut().rev().find(same) {
            earlier.exit_code = earlier.exit_code.or(exit_code);
            earlier.oom_flag = earlier.oom_flag.or(oom_flag);
            return None;
        }
    }
    if run.begin().is_some_and(|started| runtime_event.at + START_TOLERANCE < started) {
        return None;
    }
    if run.ended.is_some() {
        // reported already, or assumed: add what was missing
        run.exit_code = run.exit_code.or(exit_code);
        run.oom_flag = run.oom_flag.or(oom_flag);
        run.is_exit_assumed = false;
        return None;
    }
    // an exit before the restart has a reason of its own
    run.host_restart = run.host_restart.filter(|restart| runtime_event.at >= *restart);
    run.ended = Some(run.host_restart.unwrap_or(runtime_event.at));
    run.exit_code = exit_code;
    run.oom_flag = oom_flag;
    run.is_exit_recorded = false; // the container may have been taken for removed before, with an exit of unknown reason
    known.end_transition(&runtime_event.id)
}
