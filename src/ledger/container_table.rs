//! Containers that the ledger knows, running or ended, with the current run of each.
//!
//! It has two sources: runtime events, which arrive at once and in order, and the cycle's inventory, which also
//! contains containers without a runtime. Both report each run, which has a number from its first report on. A run of another boot of
//! the host ended with that boot, whatever exit code the runtime makes up for it.
//!
//! A container is kept for a while after its end, so that a late kill can still be labelled.

use std::collections::{HashMap, HashSet, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::container_state::{ContainerState, RunTransition};
use super::exchange::CycleReport;
use super::interval::Interval;
use super::run::LedgerRun;
use crate::clock::{ClockStep, Timestamp};
use crate::config::Filter;
use crate::discover::{Container, ContainerId, EventKind, Identity, PathClaim, RuntimeEvent, RuntimeKind};
use crate::events::{MemoryHolder, OUTSIDE_CONTAINERS, PriorUsage};
use crate::lifecycle::timing::{
    EXIT_EVENT_TIMEOUT, NAME_TIMEOUT, NO_RUNTIME_TIMEOUT, RECONNECT_TIMEOUT, RUN_DECIDED_AFTER,
    START_TOLERANCE,
};
use crate::lifecycle::{ListedContainer, RunNumber, RunNumbers, StartReport};
use crate::runs::usage::ContainerUsage;

/// Interval between writes of the figures of running containers: a crash of memledger loses at most that.
const FIGURES_INTERVAL: Duration = Duration::from_secs(60);
/// Number of cycles whose memory of the host is kept: a kill may get its owner that long after it.
const MAX_HOST_MEMORY: usize = 64;
/// Maximum number of holders of the host's memory in an event.
const MAX_HOLDERS: usize = 5;
/// The engine that reports requests to stop. Pods have none in CRI, and Podman has none at its API.
const REPORTS_REQUESTS: RuntimeKind = RuntimeKind::Docker;
/// For how many seconds the sandbox of a pod is known whose removal nothing reported.
const SANDBOX_KEPT: f64 = 30.0 * 86_400.0;
/// Maximum number of ended containers that are kept.
const MAX_ENDED: usize = 5_000;

/// All known containers.
#[derive(Debug, Default)]
pub struct ContainerTable {
    filter: Filter,
    states: HashMap<ContainerId, ContainerState>,
    /// Runtime events of exits are ignored, so do not wait for them.
    without_runtimes: bool,
    /// Each runtime, and whether it is connected.
    connections: Vec<(RuntimeKind, bool)>,
    /// Unix time since which each runtime has been connected.
    connected_since: HashMap<RuntimeKind, f64>,
    /// Total and available memory of the host in the newest cycles, with their Unix times, oldest first.
    host_memory: VecDeque<(f64, (u64, u64))>,
    /// When the last cycle began.
    last_cycle: Option<Timestamp>,
    /// When the figures of running containers were last stored.
    figures_stored: Option<Timestamp>,
    numbers: RunNumbers,
    /// The highest number that was stored.
    stored_run: RunNumber,
    changed: Vec<ContainerId>,
    /// Containers that got another name than the one before, or the first.
    renamed: Vec<Renaming>,
    /// Containers with more ended runs than late kills need.
    with_surplus_runs: HashSet<ContainerId>,
}

/// Returns whether two names of a container differ only in what makes names unique: `@` and the runtime, or its id in place of the name.
fn is_same_but_for_runtime(one: &Identity, other: &Identity, container: &Container) -> bool {
    let plain = |identity: &Identity| match identity.name.strip_suffix(container.runtime.as_str()) {
        Some(name) => name.strip_suffix('@').unwrap_or(&identity.name).to_owned(),
        None => identity.name.to_string(),
    };
    let is_id = |identity: &Identity| *identity.name == *container.id.as_str();
    plain(one) == plain(other) || is_id(one) || is_id(other)
}

/// A container that got another name.
#[derive(Debug)]
pub struct Renaming {
    /// Its id.
    pub id: ContainerId,
    /// Its name before; of a container that is not known any more, what is left of it in the store may have another one.
    pub before: Option<Identity>,
    /// The previous name was the short id.
    pub is_first: bool,
}

impl ContainerTable {
    /// Creates the table from the stored containers. `last_number`: no run in the store has a higher one.
    pub fn new(
        filter: Filter,
        without_runtimes: bool,
        stored: impl Iterator<Item = (ContainerId, ContainerState)>,
        last_number: RunNumber,
    ) -> Self {
        let states: HashMap<_, _> = stored.collect();
        let stored =
            states.values().flat_map(|state: &ContainerState| state.runs.all()).map(|run| run.number);
        let numbers = RunNumbers::after(stored.fold(last_number, RunNumber::max));
        let with_surplus = states.iter().filter(|(_, state)| state.runs.has_surplus());
        let with_surplus_runs = with_surplus.map(|(id, _): (&ContainerId, _)| id.clone()).collect();
        Self { filter, without_runtimes, states, numbers, with_surplus_runs, ..Self::default() }
    }

    /// Returns one container.
    pub fn get(&self, id: &ContainerId) -> Option<&ContainerState> {
        self.states.get(id)
    }

    /// Returns one container for a change that is to be stored. To a container without any runtime event the filters
    /// apply as in the inventory: to its short id, without labels.
    pub fn modify(&mut self, id: &ContainerId) -> &mut ContainerState {
        self.modify_with_numbers(id).0
    }

    /// Returns the same, and what gives numbers to its runs.
    fn modify_with_numbers(&mut self, id: &ContainerId) -> (&mut ContainerState, &mut RunNumbers) {
        self.changed.push(id.clone());
        let filter = &self.filter;
        let state = self.states.entry(id.clone()).or_insert_with(|| ContainerState {
            identity: Identity { name: id.short().into(), ..Identity::default() },
            hidden: !filter.labels.is_empty() || !filter.shows(&[id.short()]),
            ..ContainerState::default()
        });
        (state, &mut self.numbers)
    }

    /// Returns what is known of a container and a path with its id.
    pub fn claim(&self, id: &ContainerId, path: &str) -> PathClaim {
        self.get(id).map_or(PathClaim::Possible { user: None }, |state| state.claim(path))
    }

    /// Iterates over all containers.
    pub fn iter(&self) -> impl Iterator<Item = (&ContainerId, &ContainerState)> {
        self.states.iter()
    }

    /// Corrects the times, if the clock was set.
    pub fn correct_times(&mut self, step: &ClockStep) {
        self.states.values_mut().for_each(|state| state.correct_times(step));
        self.host_memory.iter_mut().for_each(|(at, _)| step.correct(at));
        self.connected_since.values_mut().for_each(|since| step.correct(since));
        self.mark_all_changed();
    }

    /// Takes the starts that were not counted yet of the containers that changed and have a name, or that no runtime has named in time.
    pub fn take_named_starts(&mut self, now: Timestamp) -> Vec<(Identity, u32)> {
        let mut found = Vec::new();
        for id in &self.changed {
            let Some(state) = self.states.get_mut(id).filter(|state| state.uncounted_starts > 0) else {
                continue;
            };
            let since = *state.uncounted_since.get_or_insert(now);
            if state.named || now.since(since) >= NAME_TIMEOUT {
                state.uncounted_since = None;
                found.push((state.identity.clone(), std::mem::take(&mut state.uncounted_starts)));
            }
        }
        found
    }

    /// Counts one start of each container that runs, and none of the others: counting begins.
    pub fn restart_counting(&mut self) {
        for (id, state) in &mut self.states {
            (state.uncounted_starts, state.uncounted_since) = (u32::from(state.is_running()), None);
            self.changed.push(id.clone());
        }
    }

    /// Makes all containers count as changed.
    pub fn mark_all_changed(&mut self) {
        self.stored_run = 0;
        self.changed.extend(self.states.keys().cloned());
    }

    /// Makes all running containers count as changed.
    pub fn mark_running_changed(&mut self) {
        let running = self.states.iter().filter(|(_, state)| state.is_running());
        self.changed.extend(running.map(|(id, _)| id.clone()));
    }

    /// Returns the highest number of a run, if there are new ones since the last call.
    pub fn take_last_run(&mut self) -> Option<RunNumber> {
        let last = self.numbers.last();
        (std::mem::replace(&mut self.stored_run, last) != last).then_some(last)
    }

    /// Takes the containers that got another name since the last call.
    pub fn take_renamed(&mut self) -> Vec<Renaming> {
        std::mem::take(&mut self.renamed)
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
        if !self.states.contains_key(id)
            && runtime_event.named.is_none()
            && !matches!(runtime_event.what, EventKind::Running { .. })
        {
            return vec![]; // it ended long ago
        }
        let named = runtime_event.named.as_ref().map(|named| {
            let identity = named.identity();
            let is_included = named.labels_match && identity.is_included(&self.filter);
            (named, is_included, self.identity_of_run(runtime_event, identity))
        });
        let is_known = self.states.contains_key(id);
        let state = self.modify(id);
        if state.runtime.is_missing() {
            state.runtime = runtime_event.runtime;
            state.first_event_at = runtime_event.at;
        }
        // older versions of Podman report an end without labels
        let is_end_of_known = state.named && matches!(runtime_event.what, EventKind::Ended { .. });
        let mut renaming = None;
        if let Some((named, shown, identity)) = named {
            // after a restart of memledger its runtime repeats it
            let is_new = state.renamed_at.is_none_or(|at| runtime_event.at > at);
            let is_renamed = is_new && matches!(runtime_event.what, EventKind::Renamed);
            if is_renamed {
                state.renamed_at = Some(runtime_event.at);
            }
            // keep the inventory's name: it is unique over all runtimes
            if !state.named || is_renamed {
                let (is_first, at) = (!state.named, runtime_event.at);
                let before = state.rename(identity, at);
                state.named = true;
                renaming = match is_known {
                    true => before.map(|before| (Some(before), is_first)),
                    false => is_renamed.then_some((None, false)),
                };
            }
            // a name that only a ledger still knows has none
            state.user = state.user.or(named.user);
            state.image = Arc::clone(&named.image);
            state.hidden = if is_end_of_known { state.hidden } else { !shown };
        }
        self.renamed.extend(renaming.map(|(before, is_first)| Renaming { id: id.clone(), before, is_first }));
        let transitions = self.apply_kind(runtime_event);
        self.entry(id).complete_run(runtime_event);
        transitions
    }

    /// Returns the identity of a run that no cycle may see: a name that a container has, or had, stays the container's.
    fn identity_of_run(&self, runtime_event: &RuntimeEvent, identity: Identity) -> Identity {
        let is_new = self.states.get(&runtime_event.id).is_none_or(|state| !state.named);
        let is_of_container =
            |state: &ContainerState| state.named && !state.runtime.is_run() && state.identity == identity;
        match runtime_event.runtime.is_run() && is_new && self.states.values().any(is_of_container) {
            true => Identity::named(&format!("{}@{}", identity.name, RuntimeKind::Run)),
            false => identity,
        }
    }

    fn apply_kind(&mut self, runtime_event: &RuntimeEvent) -> Vec<RunTransition> {
        let id = &runtime_event.id;
        let (state, numbers) = self.modify_with_numbers(id);
        match &runtime_event.what {
            // an end that nobody reported waited for the name
            EventKind::Exists | EventKind::Renamed => state.end_transitions(id),
            EventKind::Sandbox => {
                state.become_sandbox(runtime_event.at);
                vec![]
            }
            EventKind::SandboxRemoved => {
                state.removed_at = Some(runtime_event.at);
                vec![]
            }
            EventKind::Started => {
                self.begin_run(id, StartReport { at: Some(runtime_event.at), is_event: true }, None)
            }
            EventKind::Running { pid } => {
                self.begin_run(id, StartReport { at: Some(runtime_event.at), is_event: false }, *pid)
            }
            EventKind::Ended { exit_code, oom_flag } => {
                state.apply_exit(numbers, runtime_event, *exit_code, *oom_flag)
            }
            EventKind::Oom => {
                let last = match state.runs.at_mut(runtime_event.at) {
                    Some(run) => &mut run.evidence.oom_event_at,
                    None => &mut state.oom_event_at,
                };
                *last = Some(last.unwrap_or(f64::MIN).max(runtime_event.at));
                vec![]
            }
            EventKind::SignalRequested { signal } => {
                state.apply_stop_request(runtime_event.at, *signal);
                vec![]
            }
        }
    }

    fn begin_run(&mut self, id: &ContainerId, report: StartReport, pid: Option<u32>) -> Vec<RunTransition> {
        let (state, numbers) = self.modify_with_numbers(id);
        let transitions = state.begin_run(id, numbers, report, pid);
        self.track_surplus(id);
        transitions
    }

    fn track_surplus(&mut self, id: &ContainerId) {
        if self.states.get(id).is_some_and(|state| state.runs.has_surplus()) {
            self.with_surplus_runs.insert(id.clone());
        }
    }

    /// Drops ended runs that no kill and no exit needs any more.
    pub fn drop_decided_runs(
        &mut self,
        now: Timestamp,
        is_undecided: impl Fn(&ContainerId, &LedgerRun) -> bool,
    ) {
        for id in std::mem::take(&mut self.with_surplus_runs) {
            let Some(state) = self.states.get_mut(&id) else { continue };
            if state.runs.drop_decided(now, RUN_DECIDED_AFTER, |run| is_undecided(&id, run)) {
                self.changed.push(id.clone());
            }
            self.track_surplus(&id);
        }
    }

    /// Sets the Unix time since which a runtime has been connected; `None` if it is not.
    pub fn set_connected_since(&mut self, runtime: RuntimeKind, since: Option<f64>) {
        match since {
            Some(since) => self.connected_since.insert(runtime, since),
            None => self.connected_since.remove(&runtime),
        };
    }

    /// Applies the data of a cycle.
    pub fn apply_cycle(&mut self, now: Timestamp, report: &CycleReport) -> Vec<RunTransition> {
        let (last_cycle, mut transitions) = (self.last_cycle.replace(report.at), Vec::new());
        if !self.without_runtimes {
            self.connections.clone_from(&report.inventory.runtimes);
        }
        self.host_memory.extend(report.host_memory.map(|memory| (report.at.unix_seconds(), memory)));
        self.host_memory.drain(..self.host_memory.len().saturating_sub(MAX_HOST_MEMORY));
        for (container, usage) in std::iter::zip(&report.inventory.containers, &report.containers) {
            if self.get(&container.id).is_some_and(|state| state.is_sandbox) {
                continue; // its runtime is away, and memledger was started again since
            }
            self.apply_listed(report.at, container);
            transitions.extend(self.list_run(now, report.at, container));
            self.record_sample(now, report.at, last_cycle, container, usage);
        }
        if self.figures_stored.is_none_or(|stored| now.since(stored) >= FIGURES_INTERVAL) {
            self.figures_stored = Some(now);
            let listed = report.inventory.containers.iter().map(|container| &container.id);
            self.changed.extend(listed.filter(|id| self.states.contains_key(*id)).cloned());
        }
        transitions.extend(self.end_vanished(now, report));
        transitions
    }

    /// Takes the name, the cgroup and the settings of a container from the inventory.
    fn apply_listed(&mut self, at: Timestamp, container: &Container) {
        let name = container.identity.clone();
        let cgroup = container.cgroup.as_ref().map(|cgroup| &cgroup.path);
        let named = *name.name != *container.id.short();
        let new = self.states.get(&container.id).is_none_or(|state| {
            let renamed = state.identity != name && (named || !state.named);
            let moved = cgroup.is_some() && state.cgroup.as_ref() != cgroup;
            renamed || moved || state.hidden || state.runs.current().is_none()
        });
        let state = if new { self.modify(&container.id) } else { self.entry(&container.id) };
        let mut renaming = None;
        if new && (named || !state.named) {
            let is_first = !state.named;
            if is_same_but_for_runtime(&state.identity, &name, container) {
                state.identity = name; // another container took or freed the name; this one was not renamed
            } else {
                renaming = state.rename(name, at.unix_seconds()).map(|before| (before, is_first));
            }
            state.named = named;
            state.image = Arc::clone(&container.spec.image);
            state.runtime = container.runtime;
        }
        if new {
            state.hidden = false;
            state.cgroup = cgroup.cloned().or(state.cgroup.take());
        }
        if state.settings != container.spec.settings {
            state.settings.clone_from(&container.spec.settings);
        }
        self.renamed.extend(renaming.map(|(before, is_first)| Renaming {
            id: container.id.clone(),
            before: Some(before),
            is_first,
        }));
    }

    /// Applies that a cycle lists a container.
    fn list_run(&mut self, now: Timestamp, at: Timestamp, container: &Container) -> Vec<RunTransition> {
        let id = &container.id;
        let Some(state) = self.states.get_mut(id) else { return vec![] };
        let listing =
            ListedContainer { at, started: container.started, cgroup_inode: container.cgroup_inode() };
        let (is_changed, transitions) = state.list_run(id, &mut self.numbers, now, &listing);
        if is_changed {
            self.changed.push(id.clone());
            self.track_surplus(id);
        }
        transitions
    }

    /// Records what a container used in the cycle at `at`, if that was after the begin of its run.
    fn record_sample(
        &mut self,
        now: Timestamp,
        at: Timestamp,
        last_cycle: Option<Timestamp>,
        container: &Container,
        usage: &Arc<ContainerUsage>,
    ) {
        let host_memory = self.host_memory.back().map(|(_, memory)| *memory);
        let state = self.entry(&container.id);
        let is_of_run = state.runs.has_seen_current(at.unix_seconds(), container.started);
        let Some(run) = state.runs.current_mut() else { return };
        if run.begin().is_some_and(|started| started > at.unix_seconds() + START_TOLERANCE) {
            return;
        }
        run.record_usage(now, at, usage);
        let has_lost_cgroup =
            container.cgroup.is_none() && usage.sample.is_none() && usage.processes.is_empty();
        if has_lost_cgroup {
            run.record_nothing(at);
        }
        if run.ended().is_some() || !is_of_run {
            return;
        }
        run.evidence.figures.record_host(host_memory, usage);
        if run.evidence.figures.record(at, last_cycle, container, usage) {
            self.changed.push(container.id.clone());
        }
    }

    fn entry(&mut self, id: &ContainerId) -> &mut ContainerState {
        self.states.entry(id.clone()).or_default()
    }

    /// Ends runs that are not listed any more and whose exit was not reported.
    fn end_vanished(&mut self, now: Timestamp, report: &CycleReport) -> Vec<RunTransition> {
        let listed: HashSet<_> = report.inventory.containers.iter().map(|container| &container.id).collect();
        let mut transitions = Vec::new();
        for (id, state) in &mut self.states {
            if !state.is_running() || state.hidden || listed.contains(id) {
                continue;
            }
            let timeout = match self.connections.iter().find(|(runtime, _)| *runtime == state.runtime) {
                Some((_, true)) => EXIT_EVENT_TIMEOUT,
                Some((_, false)) => RECONNECT_TIMEOUT,
                // its runtime is not known yet
                None if !state.named && self.connections.iter().any(|(_, is_up)| *is_up) => {
                    EXIT_EVENT_TIMEOUT
                }
                None => NO_RUNTIME_TIMEOUT,
            };
            let was_seen = state.runs.current().is_some_and(|run| !run.evidence.usage.is_empty());
            if state.runs.miss(report.at, now, was_seen, timeout) {
                transitions.extend(state.end_transitions(id));
                self.changed.push(id.clone());
            }
        }
        transitions
    }

    /// Marks the runs that had not ended before the host was restarted at this Unix time. If it `is_known` that there is none of this
    /// boot among them, those that seem to have begun later are marked too: the clock may have been wrong.
    pub fn apply_host_restart(&mut self, at: f64, is_known: bool) {
        let is_of_old_boot = |run: &&mut LedgerRun| {
            run.ended().is_none() && (is_known || run.begin().is_none_or(|begin| begin < at))
        };
        for (id, state) in &mut self.states {
            if let Some(run) = state.runs.current_mut().filter(is_of_old_boot) {
                run.phase.restart_host(at);
                self.changed.push(id.clone());
            }
        }
    }

    /// Returns who held the memory of the host in the last cycle before this Unix time: the largest containers, and what was in use
    /// outside all of them; `None` if that is not known.
    pub fn host_usage(&self, at: f64) -> Option<PriorUsage> {
        let (_, (total, available)) = *self.host_memory.iter().rev().find(|(taken, _)| *taken <= at)?;
        let holder = |state: &ContainerState| {
            let run = state.runs.current().filter(|run| run.ended().is_none_or(|ended| ended >= at - 1.0))?;
            let unreclaimable_bytes = run.samples_until(at).pop()?.unreclaimable_bytes?;
            let holder = MemoryHolder { name: Arc::clone(&state.identity.name), unreclaimable_bytes };
            Some((state.cgroup.clone().unwrap_or_default(), holder))
        };
        let mut by_path: Vec<_> = self.states.values().filter_map(holder).collect();
        by_path.sort_by(|(one, _), (other, _)| one.cmp(other));
        let mut outer: Option<PathBuf> = None;
        // what a container inside another one holds is held by that one
        by_path.retain(|(path, _)| {
            let is_inside = outer.as_ref().is_some_and(|outer| path != outer && path.starts_with(outer));
            if !is_inside && !path.as_os_str().is_empty() {
                outer = Some(path.clone());
            }
            !is_inside
        });
        let mut holders: Vec<_> = by_path.into_iter().map(|(_, holder)| holder).collect();
        let inside: u64 = holders.iter().map(|holder| holder.unreclaimable_bytes).sum();
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.unreclaimable_bytes));
        holders.truncate(MAX_HOLDERS);
        let outside = total.saturating_sub(available).saturating_sub(inside);
        holders.push(MemoryHolder { name: OUTSIDE_CONTAINERS.into(), unreclaimable_bytes: outside });
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.unreclaimable_bytes));
        Some(PriorUsage {
            holders,
            host_total_bytes: Some(total),
            host_available_bytes: Some(available),
            ..PriorUsage::default()
        })
    }

    /// Returns whether no other container of its pod ran at this Unix time. `cgroup`: that of the pod.
    pub fn is_alone_in_pod(&self, id: &ContainerId, cgroup: &str, at: f64) -> bool {
        let Some(pod) = self.get(id).map(|state| &state.identity).filter(|it| !it.k8s_pod.is_empty()) else {
            return false;
        };
        let is_neighbour = |(other, state): (&ContainerId, &ContainerState)| {
            // one that has no name yet is known by its cgroup
            let is_below =
                state.cgroup.as_ref().is_some_and(|own| own.starts_with(cgroup.trim_start_matches('/')));
            let is_of_pod = is_below
                || state.identity.k8s_pod == pod.k8s_pod && state.identity.k8s_namespace == pod.k8s_namespace;
            let ran = |run: &LedgerRun| {
                run.begin().is_none_or(|begin| begin <= at) && run.ended().is_none_or(|ended| ended >= at)
            };
            is_of_pod && other != id && state.runs.all().any(ran)
        };
        !self.states.iter().any(is_neighbour)
    }

    /// Returns whether every request to stop is known that this runtime got until a container of it ended: it reports them, and has been
    /// connected since before.
    pub fn reports_requests(&self, runtime: RuntimeKind, ended: f64) -> bool {
        // the record of a run has all that `memledger run` received
        runtime.is_run()
            || runtime == REPORTS_REQUESTS
                && self.connected_since.get(&runtime).is_some_and(|since| *since <= ended)
    }

    /// Returns the container that alone had a process with this pid at that time: the first process of a run, by the
    /// runtime, or one of the newest cycles with that name.
    pub fn find_by_pid(&self, pid: u32, comm: &str, happened: &Interval) -> Option<ContainerId> {
        let had = |run: &LedgerRun| run.had_first_pid(pid, happened) || run.had_process(pid, comm, happened);
        let mut found = self.states.iter().filter(|(_, state)| state.runs.all().any(had));
        let id = found.next()?.0.clone();
        found.next().is_none().then_some(id)
    }

    /// Returns the run of `memledger run` whose command had this pid at that time.
    pub fn find_run_by_pid(&self, pid: u32, happened: &Interval) -> Option<ContainerId> {
        let is_its = |state: &ContainerState| {
            state.runtime.is_run() && state.runs.all().any(|run| run.had_first_pid(pid, happened))
        };
        self.states.iter().find(|(_, state)| is_its(state)).map(|(id, _)| id.clone())
    }

    /// Removes containers that ended before this Unix time, and those above the limit. Returns their ids.
    pub fn remove_ended(&mut self, before: f64, keep: impl Fn(&ContainerId) -> bool) -> Vec<ContainerId> {
        let ended = |state: &ContainerState| match state.runs.current() {
            Some(run) => run.ended(),
            // one that was removed while memledger did not run stays for longer
            None if state.is_sandbox => Some(state.removed_at.unwrap_or(state.first_event_at + SANDBOX_KEPT))
                .filter(|at| *at < before),
            None => Some(state.first_event_at),
        };
        let mut gone: Vec<(f64, ContainerId)> = self
            .states
            .iter()
            .filter_map(|(id, state)| Some((ended(state)?, id.clone())))
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
            self.states.remove(id);
        }
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::ContainerSpec;

    #[test]
    fn run_does_not_take_the_name_of_a_container() {
        let mut table = ContainerTable::default();
        let mut start = |id: char, runtime: RuntimeKind| {
            let id = ContainerId::new(&id.to_string().repeat(64));
            let details =
                ContainerSpec { name: "train".into(), labels_match: true, ..ContainerSpec::default() };
            let (socket, named, what) = (Arc::default(), Some(Arc::new(details)), EventKind::Started);
            table.apply_event(&RuntimeEvent { runtime, socket, id: id.clone(), at: 1.0, named, what });
            table.get(&id).unwrap().identity.name.to_string()
        };
        assert_eq!(start('a', RuntimeKind::Run), "train");
        assert_eq!(start('b', RuntimeKind::Docker), "train");
        assert_eq!(start('c', RuntimeKind::Run), "train@run");
    }
}
