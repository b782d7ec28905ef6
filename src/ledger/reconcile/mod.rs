//! The state machine that reconciles all sources into OOM kills and container exits. Pure: no I/O, no clock.
//!
//! | file | question |
//! | --- | --- |
//! | `count.rs` | how many kills were there? |
//! | `gaps.rs` | which of them have no record, and which record is late? |
//! | `owner.rs` | to which container and run did the victim belong? |
//! | `victim_groups.rs` | which victims were killed together, and of which run they are |
//! | `match_counters.rs`, `cgroup_counters.rs` | the same, by evidence that has numbers but no pids |
//! | `reports.rs` | whose are the processes in the kernel's report? |
//! | `decide.rs` | did the kill end the container, and why did that exit? |
//! | `kill_record.rs`, `output.rs` | what does a record show, and what is stored and published? |
//! | `cuda_ooms.rs` | whose CUDA out-of-memory error was it, and who held the GPU? |
//!
//! A step applies the cycle and the runtime events in order of time, the kernel log, the cgroups' counters and the kernel's counter, in
//! this order; then [`Reconciler::settle`] draws the conclusions. A kill is pending until its owner is known and
//! whether it ended the container. The host's total includes it at once. Published counts never decrease, so a container's
//! count waits until its labels are known.

mod cgroup_counters;
mod count;
mod cuda_ooms;
mod decide;
mod gaps;
mod kill_record;
mod match_counters;
mod output;
mod owner;
mod reports;
mod process_reports;
mod victim_groups;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::clock::{ClockStep, Timestamp};
use crate::config::Filter;
use crate::discover::{CgroupMaker, ContainerId, EventKind, PathClaim, RuntimeEvent, RuntimeKind};
use crate::events::{CudaOomSource, GpuError, Kill, KillOwner, LedgerEvent};
use crate::ledger::container_state::RunTransition;
use crate::ledger::container_table::{ContainerTable, Renaming};
use crate::ledger::exchange::CycleReport;
use crate::ledger::interval::{Interval, LogClock, Written};
use crate::ledger::sources::cgroup_oom_events::CounterReading;
use crate::ledger::sources::kernel_log::LogPosition;
use crate::ledger::store::{LedgerState, StateKind, WriteBatch};
use crate::ledger::totals::{Total, Totals};
use crate::lifecycle::RunId;
use crate::lifecycle::timing::{
    COUNTER_TIMEOUT, KILL_TO_EXIT, LOG_DELAY, MAX_DISORDER, MAX_EVENT_DELAY, UNATTRIBUTED_KEPT,
};
use crate::parse::kernel_log::kills::{KillAssembler, KillRecord};
use crate::runs::peaks::StoredPeaks;
use crate::runs::usage::ProcessUsage;
use cgroup_counters::Counters;
pub use count::AccountingCheckpoint;
use count::OomAccounting;
use cuda_ooms::CudaOoms;
use decide::PendingExit;
pub use owner::PersistedKill;
use owner::{Hints, PendingKill};
use reports::ReportLabels;
pub use reports::complete as complete_report;
use victim_groups::VictimGroups;

/// Maximum number of such kills.
const MAX_UNATTRIBUTED: usize = 256;
/// Maximum number of settled victims that are kept.
const MAX_SETTLED_VICTIMS: usize = 64;

/// The cursor of sockets that have had no event: until when memledger ran, with [`MAX_EVENT_DELAY`](crate::lifecycle::timing::MAX_EVENT_DELAY).
pub const ANY_SOCKET: &str = "*";

/// Returns the name of the cursor of a socket of a runtime.
pub fn cursor_name(runtime: RuntimeKind, socket: &str) -> String {
    if socket.is_empty() { runtime.to_string() } else { format!("{runtime} {socket}") }
}

/// Configuration of the reconciler.
#[derive(Clone, Debug, Default)]
pub struct ReconcilerConfig {
    /// Id of this boot.
    pub boot_id: Arc<str>,
    /// Unix time at which this boot began.
    pub booted_at: f64,
    /// How long the figures of an ended container are shown.
    pub keep_ended: Duration,
    /// Selects the containers that are shown.
    pub filter: Filter,
    /// The kernel log's pids are valid in this pid namespace.
    pub host_pids: bool,
    /// Runtime events of starts and ends are ignored.
    pub without_runtimes: bool,
    /// Unix time from which on every kill that can explain an exit is known; `None`: from the first start of the ledger.
    pub kills_known_since: Option<f64>,
    /// The first start of the ledger, of one that begins with the past of its host: what happened before is shown, and not counted.
    pub counting_since: Option<CountingStart>,
}

/// The first start of a ledger.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CountingStart {
    /// Stamp of the newest record of the kernel log then, by the log's own clock.
    pub log_usec: u64,
    /// Unix time.
    pub at: f64,
}

/// What the kernel log shows of a kill, and what was observed when it was read.
#[derive(Clone, Debug, PartialEq)]
pub struct ObservedRecord {
    /// Position of the line.
    pub position: LogPosition,
    /// Its text.
    pub text: Arc<str>,
    /// What it shows.
    pub record: KillRecord,
    /// When it was written.
    pub written: Written,
    /// The victim, for a kill.
    pub proc_info: ProcInfo,
}

/// What /proc and the cgroup showed about a victim when its record was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcInfo {
    /// Its cgroup path.
    pub cgroup: Option<String>,
    /// Limit of the cgroup whose limit was hit. The cgroup also exists for only some milliseconds.
    pub limit_bytes: Option<u64>,
    /// Of a kill on the host: cgroup paths of the largest processes that still ran, by pid.
    pub report_cgroups: BTreeMap<u32, String>,
    /// Size of the host's swap.
    pub host_swap_bytes: Option<u64>,
    /// Who can have made the containers' cgroups in these paths and in those of the record.
    pub makers: BTreeMap<String, CgroupMaker>,
}

impl ProcInfo {
    /// Returns who can have made the container's cgroup in a path.
    pub fn maker(&self, path: &str) -> CgroupMaker {
        self.makers.get(path).copied().unwrap_or_else(|| CgroupMaker::by_names(path))
    }
}

/// The state machine.
#[derive(Debug)]
pub struct Reconciler {
    pub(super) config: ReconcilerConfig,
    pub(super) accounting: OomAccounting,
    pub(super) containers: ContainerTable,
    pub(super) counters: Counters,
    pub(super) totals: Totals,
    pub(super) pending: VecDeque<PendingKill>,
    pub(super) pending_exits: Vec<PendingExit>,
    pub(super) changes: WriteBatch,
    /// Kills that were noticed in this step.
    pub(super) notices: Vec<Kill>,
    reports: ReportLabels,
    pub(super) cuda_ooms: CudaOoms,
    /// Containers whose logs are being read: an exit may still get its reason from there.
    pub(super) logs_being_read: HashSet<ContainerId>,
    /// Logs of containers are read.
    pub(super) reads_logs: bool,
    /// Containers with a process that is connected to the reporter: its last messages may not be read yet.
    pub(super) connected: HashSet<ContainerId>,
    /// Settled gaps that a late record can still fill.
    settled_gaps: VecDeque<(Timestamp, PendingKill)>,
    /// The kills that stayed unattributed, and when they happened.
    pub(super) unattributed: VecDeque<(Timestamp, u64, Interval)>,
    /// The victims that were killed together.
    groups: VictimGroups,
    /// Settled victims: pid, container and time, newest last.
    settled_victims: VecDeque<(u32, Option<ContainerId>, Interval)>,
    /// Unix time of the last event of each socket of a runtime, by [`cursor_name`].
    last_event_times: BTreeMap<String, f64>,
    /// Connected sockets of each runtime, by [`cursor_name`].
    live_sockets: HashMap<RuntimeKind, Vec<String>>,
    stored_checkpoint: Option<AccountingCheckpoint>,
    next_id: u64,
    pub(super) log_up: bool,
    /// Unix time from which on every kill that can explain an exit is known: Docker also reports ends shortly before a ledger begins.
    kills_known_since: Option<f64>,
    last_forget: Option<Timestamp>,
    /// The past from before counting is applied.
    is_catching_up: bool,
}

impl Reconciler {
    /// Continues from the stored state. `now_usec` is the kernel's clock.
    pub fn new(config: ReconcilerConfig, contents: &LedgerState, now: Timestamp, now_usec: u64) -> Self {
        let account = contents.accounting.clone();
        let of_this_boot = account.as_ref().filter(|account| account.is_of(&config.boot_id));
        let same_boot = of_this_boot.is_some();
        let explained_at = of_this_boot.and_then(|account| account.cgroups_explained_at);
        let unattributed_since = now.unix_seconds() - UNATTRIBUTED_KEPT.as_secs_f64();
        let unattributed =
            contents.unattributed.iter().filter(|(_, happened)| happened.latest > unattributed_since);
        let (mut changes, mut counters) = (WriteBatch::default(), HashMap::new());
        for (inode, kills) in &contents.cgroup_kills {
            if same_boot {
                counters.insert(*inode, *kills);
            } else {
                changes.remove(StateKind::CgroupKills, inode);
            }
        }
        // if only the accounting was lost, it goes on after the last kill that is known: the log may have newer ones
        let started_at = contents.started_at.filter(|_| !contents.is_new() && account.is_none());
        let started_usec = |at: f64| ((at - now.unix_seconds_of_kernel(0)).max(0.0) * 1e6) as u64;
        let last_record = contents.last_records.get(&*config.boot_id).copied();
        let since_usec =
            last_record.or(started_at.map(started_usec)).map_or(now_usec, |usec| usec.min(now_usec));
        let containers = contents.containers.clone().into_iter();
        let mut reconciler = Self {
            containers: ContainerTable::new(
                config.filter.clone(),
                config.without_runtimes,
                containers,
                contents.last_run.max(contents.last_id), // nearly as high, if the row of the number is lost
            ),
            counters: Counters::new(counters, explained_at, contents.is_new()),
            accounting: OomAccounting::new(account, &config.boot_id, since_usec),
            totals: Totals::new(contents),
            pending: VecDeque::new(),
            pending_exits: vec![],
            changes,
            notices: vec![],
            reports: ReportLabels::default(),
            cuda_ooms: CudaOoms::default(),
            logs_being_read: HashSet::new(),
            reads_logs: false,
            connected: HashSet::new(),
            settled_gaps: VecDeque::new(),
            unattributed: unattributed.map(|(id, happened)| (now, *id, *happened)).collect(),
            groups: VictimGroups::default(),
            settled_victims: VecDeque::new(),
            last_event_times: BTreeMap::new(),
            live_sockets: HashMap::new(),
            stored_checkpoint: None,
            next_id: contents.last_id + 1,
            log_up: false,
            kills_known_since: config
                .kills_known_since
                .or(contents.is_new().then(|| now.unix_seconds() + KILL_TO_EXIT)),
            last_forget: None,
            is_catching_up: config.counting_since.is_some(),
            config,
        };
        // the clock may have been set back since; events from the future are impossible
        let stored =
            contents.runtime_cursors.iter().map(|(name, at)| (name.clone(), at.min(now.unix_seconds())));
        reconciler.last_event_times = stored.collect();
        reconciler.last_event_times.entry(ANY_SOCKET.to_owned()).or_insert(now.unix_seconds());
        if !same_boot {
            // without its accounting the ledger does not say of which boot it is
            let is_known = contents.accounting.is_some();
            reconciler.containers.apply_host_restart(reconciler.config.booted_at, is_known);
        }
        reconciler.reopen(contents, now);
        reconciler
    }

    /// Restores the kills and exits that were pending when memledger stopped.
    fn reopen(&mut self, contents: &LedgerState, now: Timestamp) {
        for event in &contents.unsettled {
            match event {
                LedgerEvent::OomKill(kill) => {
                    let persisted = contents.pending_kills.get(&kill.id).cloned().unwrap_or_default();
                    self.pending.push_back(PendingKill::stored(kill.clone(), persisted, now));
                }
                LedgerEvent::Exit(exit) => self.pending_exits.push(PendingExit::stored(exit.clone(), now)),
                LedgerEvent::CudaOom(oom) => self.reopen_cuda_oom(oom.clone()),
                LedgerEvent::GpuError(_) => {} // never pending
            }
        }
    }

    /// Returns the containers of a runtime that were running at the last update.
    pub fn running(&self, runtime: RuntimeKind) -> impl Iterator<Item = &ContainerId> {
        self.containers
            .iter()
            .filter(move |(_, state)| state.is_running() && state.runtime == runtime)
            .map(|(id, _)| id)
    }

    /// Returns the peaks of the runs in progress.
    pub fn stored_peaks(&self) -> HashMap<ContainerId, StoredPeaks> {
        self.containers.iter().filter_map(|(id, state)| Some((id.clone(), state.stored_peaks()?))).collect()
    }

    /// Returns the Unix time from which on events of a socket of a runtime may be missing: of its last event, or of the end of the
    /// process before.
    pub fn runtime_cursor(&self, runtime: RuntimeKind, socket: &str) -> Option<f64> {
        let last = self.last_event_times.get(&cursor_name(runtime, socket));
        last.or_else(|| self.last_event_times.get(ANY_SOCKET)).copied()
    }

    /// Returns the position up to which this boot's log was read, and its clock and block as known then; `None` if it never was read.
    pub fn log_position(&self) -> Option<(LogPosition, LogClock, KillAssembler)> {
        let account = self.accounting.checkpoint();
        let is_read = account.position != LogPosition::default();
        is_read.then(|| (account.position, account.log_clock, account.block.clone()))
    }

    /// Marks the runs that had not ended before this boot.
    pub fn apply_host_restart(&mut self) {
        self.containers.apply_host_restart(self.config.booted_at, true);
    }

    /// Sets the Unix time since which all sockets of a runtime have been connected, `None` if one is not, and those that are.
    pub fn set_connection<'a>(
        &mut self,
        runtime: RuntimeKind,
        since: Option<f64>,
        live: impl Iterator<Item = &'a Path>,
    ) {
        self.containers.set_connected_since(runtime, since);
        let live = live.map(|socket| cursor_name(runtime, &socket.to_string_lossy())).collect();
        self.live_sockets.insert(runtime, live);
    }

    /// Applies a cycle and the events of each runtime, in order of time: a cycle lists only the newest run of a container, so events
    /// before it must be applied first.
    pub fn apply_cycles_and_events<'a>(
        &mut self,
        now: Timestamp,
        reports: impl IntoIterator<Item = &'a CycleReport>,
        runtime_events: &[Vec<RuntimeEvent>],
    ) {
        let mut rest: Vec<&[RuntimeEvent]> = runtime_events.iter().map(Vec::as_slice).collect();
        for report in reports {
            let cycle_at = report.at.unix_seconds();
            for events in &mut rest {
                let is_later = |event: &RuntimeEvent| event.at > cycle_at;
                let (before, after) =
                    events.split_at(events.iter().position(is_later).unwrap_or(events.len()));
                self.apply_runtime_events(now, before);
                *events = after;
            }
            self.apply_cycle(now, report);
        }
        for events in rest {
            self.apply_runtime_events(now, events);
        }
    }

    /// Applies the data of a cycle.
    pub fn apply_cycle(&mut self, now: Timestamp, report: &CycleReport) {
        self.apply_gpus(report.at, &report.gpus);
        for transition in self.containers.apply_cycle(now, report) {
            self.apply_transition(now, transition);
        }
        self.apply_renamed();
        self.note_seen_victims(report);
        self.count_starts(now);
        for (container, usage) in std::iter::zip(&report.inventory.containers, &report.containers) {
            let are_counted = [usage.run.torch_ooms.is_some(), self.logs_being_read.contains(&container.id)];
            for (source, _) in std::iter::zip(CudaOomSource::ALL, are_counted).filter(|(_, counted)| *counted)
            {
                let name = container.identity.clone();
                self.totals.begin_cuda_ooms(&name, source, now.unix_seconds());
            }
        }
    }

    /// Notes which victims a cycle still saw: a large process takes seconds to release its memory.
    fn note_seen_victims(&mut self, report: &CycleReport) {
        for pending in self.pending.iter_mut().filter(|pending| report.at.unix_seconds() > pending.kill.at) {
            let (Some(id), Some(pid)) = (&pending.container, pending.kill.pid) else { continue };
            let listed = std::iter::zip(&report.inventory.containers, &report.containers);
            let usage = listed.into_iter().find(|(container, _)| container.id == *id).map(|(_, usage)| usage);
            let is_it = |process: &ProcessUsage| process.pid == pid && *process.comm == *pending.kill.process;
            let sees = self.config.host_pids && usage.is_some_and(|usage| usage.processes.iter().any(is_it));
            pending.note_cycle(report.at, sees);
        }
    }

    /// Applies runtime events. After a restart of memledger, runtimes repeat events that were applied before.
    pub fn apply_runtime_events(&mut self, now: Timestamp, runtime_events: &[RuntimeEvent]) {
        for runtime_event in runtime_events {
            let is_event = matches!(
                runtime_event.what,
                EventKind::Started | EventKind::Oom | EventKind::SignalRequested { .. }
            );
            let first = self.last_event_times.get(ANY_SOCKET).copied().unwrap_or_else(|| now.unix_seconds());
            let since = self
                .last_event_times
                .entry(cursor_name(runtime_event.runtime, &runtime_event.socket))
                .or_insert(first);
            if is_event {
                // after the clock was set back, new events must not look old
                *since = since.min(now.unix_seconds());
                if runtime_event.at < *since - MAX_DISORDER {
                    continue;
                }
                *since = since.max(runtime_event.at);
            }
            for transition in self.containers.apply_event(runtime_event) {
                self.apply_transition(now, transition);
            }
        }
        self.apply_renamed();
        self.count_starts(now);
    }

    /// Notes that no cycle will be applied.
    pub fn end_cycles(&mut self) {
        self.pending.iter_mut().for_each(PendingKill::note_end_of_cycles);
    }

    /// Ends the catch-up of a ledger: a container that runs has been started once. `keep_ended`: how long the figures of an ended one are
    /// shown. `log_end`: up to where the log was read, and its clock and block there; `None` if it cannot be read.
    pub fn finish_catch_up(
        &mut self,
        now: Timestamp,
        keep_ended: Duration,
        log_end: Option<(LogPosition, LogClock, KillAssembler)>,
    ) {
        self.config.keep_ended = keep_ended;
        if let Some((position, clock, block)) = log_end {
            self.accounting.read_to(position);
            self.accounting.set_log_state(clock, block);
        }
        self.stored_checkpoint = None; // how far the sources were read is written, though nothing else changed
        let Some(start) = self.config.counting_since else { return };
        self.accounting.ignore_up_to(start.log_usec);
        // from now on the log is followed
        let followed_since = now.unix_seconds() + KILL_TO_EXIT;
        self.kills_known_since = self.kills_known_since.map(|since| since.min(followed_since));
        // the runtimes have listed what was before
        let until = start.at.min(now.unix_seconds()) - MAX_EVENT_DELAY;
        self.last_event_times.values_mut().for_each(|at| *at = at.max(until));
        self.changes.remove(StateKind::FirstStart, "");
        self.is_catching_up = false;
        self.containers.restart_counting();
        self.count_starts(now);
    }

    /// Counts the starts of containers that have a name by now: a start under a short id would be missing under the name.
    fn count_starts(&mut self, now: Timestamp) {
        if self.is_catching_up {
            return;
        }
        for (identity, starts) in self.containers.take_named_starts(now) {
            (0..starts).for_each(|_| self.totals.count_start(&identity, now.unix_seconds()));
        }
    }

    /// Gives containers their new names in what is undecided, and in their events and runs in the store. Counts stay with the name
    /// that they happened under, but for a short id.
    fn apply_renamed(&mut self) {
        for Renaming { id, before, is_first } in self.containers.take_renamed() {
            let Some(state) = self.containers.get(&id) else { continue };
            let identity = state.identity.clone();
            let is_counted = before.is_some_and(|before| is_first && self.totals.move_to(&before, &identity));
            let gaps = self.settled_gaps.iter_mut().map(|(_, pending)| pending);
            let kills = self.pending.iter_mut().chain(gaps);
            for pending in kills.filter(|pending| pending.container.as_ref() == Some(&id)) {
                if let KillOwner::Container(subject) = &pending.kill.owner {
                    let before = subject.identity.clone();
                    pending.counted_as = pending.counted_as.take().or((!is_first).then_some(before));
                    pending.kill.rename(&identity);
                }
            }
            let exits = self.pending_exits.iter_mut().map(|pending| (&pending.id, &mut pending.exit.subject));
            exits.filter(|(of, _)| **of == id).for_each(|(_, subject)| subject.rename(&identity));
            let ooms = self.cuda_ooms.pending.iter_mut().map(|pending| &mut pending.event.subject);
            ooms.filter(|subject| *subject.container_id == *id.as_str())
                .for_each(|subject| subject.rename(&identity));
            if !is_first || is_counted {
                self.changes.rename(id, identity);
            }
        }
    }

    pub(super) fn apply_transition(&mut self, now: Timestamp, transition: RunTransition) {
        match transition {
            RunTransition::Began(id) => self.containers.modify(&id).uncounted_starts += 1,
            RunTransition::Ended(end) => {
                let mut pending = PendingExit::new(self.new_id(), *end, now);
                pending.exit.before_counting =
                    self.config.counting_since.is_some_and(|start| pending.exit.at <= start.at);
                self.pending_exits.push(pending);
            }
            RunTransition::Reopened(run) => self.withdraw_exit(&run),
        }
    }

    /// Removes an exit that is not decided yet. One that is decided is counted and published, and stays.
    fn withdraw_exit(&mut self, run: &RunId) {
        let is_its = |pending: &PendingExit| pending.exit.subject.run_id().as_ref() == Some(run);
        let Some(at) = self.pending_exits.iter().position(is_its) else { return };
        let id = self.pending_exits.remove(at).exit.id;
        self.changes.events.insert(id, None);
        self.changes.runs.remove(&id);
        if let Some(run) = self.containers.modify(&run.container).runs.get_mut(run.number) {
            run.withdraw_exit();
        }
    }

    /// Returns the id of the next event.
    pub fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id - 1
    }

    /// Applies records of the kernel log, in order. `None`: the log cannot be read now.
    pub fn apply_log(&mut self, now: Timestamp, records: Option<&[ObservedRecord]>, position: LogPosition) {
        self.log_up = records.is_some();
        for observed in records.unwrap_or_default() {
            if !self.accounting.count(observed.position, &observed.record) {
                continue;
            }
            match &observed.record {
                KillRecord::Kill { .. } => {
                    self.accounting.counted_record_of(&observed.written.within, now);
                    self.add_kill(now, observed);
                }
                KillRecord::Second { pid } => {
                    self.accounting.counted_record_of(&observed.written.within, now);
                    self.add_duplicate(*pid, self.is_before_counting(observed.position));
                }
                KillRecord::Group { pid, path } => {
                    let mut newest = self.pending.iter_mut().rev();
                    if let Some(pending) = newest.find(|pending| pending.kill.pid == Some(*pid)) {
                        pending.hints.group = Some(path.clone());
                        pending.group = Some(self.groups.begin(path, &pending.happened));
                        pending.hints.proc_info.makers.extend(observed.proc_info.makers.clone());
                        pending.kill.group = path.as_str().into();
                    } else {
                        self.groups.begin(path, &observed.written.within); // its first victim is settled already
                    }
                }
            }
        }
        if self.log_up {
            self.accounting.read_to(position);
        }
    }

    /// Notes what is known of the log's clock, and of its current block, at the position up to which the log was read.
    pub fn set_log_state(&mut self, clock: LogClock, block: KillAssembler) {
        self.accounting.set_log_state(clock, block);
    }

    /// Adds GPU errors, which are final at once.
    pub fn add_gpu_errors(&mut self, errors: Vec<GpuError>) {
        for mut error in errors {
            error.id = self.new_id();
            self.changes.put_event(LedgerEvent::GpuError(error));
        }
    }

    /// Corrects all times, if the clock was set. Must come before what this step applies.
    pub fn correct_times(&mut self, step: &ClockStep) {
        let gaps = self.settled_gaps.iter_mut().map(|(_, pending)| pending);
        self.pending.iter_mut().chain(gaps).for_each(|pending| pending.correct_times(step));
        self.pending_exits.iter_mut().for_each(|pending| pending.exit.correct_times(step));
        self.cuda_ooms.correct_times(step);
        self.unattributed.iter_mut().for_each(|(.., happened)| happened.correct(step));
        self.groups.correct_times(step);
        self.settled_victims.iter_mut().for_each(|(.., happened)| happened.correct(step));
        self.counters.correct_times(step);
        self.containers.correct_times(step);
        self.totals.correct_times(step);
        self.config.counting_since.iter_mut().for_each(|start| step.correct(&mut start.at));
    }

    /// Starts the accounting anew: the machine was restored to an earlier state without a reboot.
    pub fn restart_accounting(&mut self, now_usec: u64) {
        self.accounting.restart(now_usec);
    }

    fn add_kill(&mut self, now: Timestamp, observed: &ObservedRecord) {
        let KillRecord::Kill { killed, context, group, report } = &observed.record else { return };
        let hints =
            Hints { context: context.clone(), group: group.clone(), proc_info: observed.proc_info.clone() };
        let containers = self.config.host_pids.then_some(&self.containers);
        let report = report.as_ref().map(|report| self.reports.label(report, observed, containers));
        let (usec, written) = (observed.position.usec, observed.written);
        let mut kill = Kill {
            id: self.new_id(),
            at: written.at,
            boot_id: Arc::clone(&self.config.boot_id),
            before_counting: self.is_before_counting(observed.position),
            ..Kill::of_record(usec, &observed.text, killed, context.as_ref(), report)
        };
        kill.group = group.as_deref().unwrap_or_default().into();
        kill.before = self.host_usage(&kill);
        self.totals.add(Total::Host, i64::from(!kill.before_counting));
        let happened = Interval::new(written.within.earliest - LOG_DELAY, written.within.latest);
        let group = group.as_ref().and_then(|path| self.groups.join(path, &happened));
        self.pending.push_back(PendingKill { group, ..PendingKill::new(kill, happened, hints, now) });
    }

    /// Returns whether a record is older than the first start of the ledger.
    fn is_before_counting(&self, position: LogPosition) -> bool {
        self.config.counting_since.is_some_and(|start| position.usec <= start.log_usec)
    }

    fn add_duplicate(&mut self, pid: u32, is_before_counting: bool) {
        self.totals.add(Total::Duplicates, i64::from(!is_before_counting));
        if let Some(pending) = self.pending.iter_mut().rev().find(|pending| pending.kill.pid == Some(pid)) {
            pending.duplicates += 1;
            if let Some(id) = pending.container.clone() {
                let happened = pending.happened;
                self.explain_count(&id, 1, &happened);
            }
        } else if let Some((_, Some(id), happened)) =
            self.settled_victims.iter().rev().find(|(settled, ..)| *settled == pid).cloned()
        {
            self.explain_count(&id, 1, &happened);
        }
    }

    /// Notes that the cgroup of this container, and those around it, counted these kills.
    fn explain_count(&mut self, id: &ContainerId, kills: u64, happened: &Interval) {
        let cgroup = self.containers.get(id).and_then(|state| state.cgroup.as_deref()?.to_str());
        self.counters.attribute(id, cgroup, kills, happened);
    }

    /// Sets the cgroup of a container that no cycle has listed, if a runtime reported the container.
    pub fn set_cgroup(&mut self, id: &ContainerId, cgroup: &Path) {
        if self.containers.get(id).is_some_and(|state| state.cgroup.is_none()) {
            self.containers.modify(id).cgroup = Some(cgroup.to_path_buf());
        }
    }

    /// Returns what is known of a container and a cgroup with its id in its name.
    pub fn claim_at(&self, id: &ContainerId, path: &Path) -> PathClaim {
        let Some(state) = self.containers.get(id) else { return PathClaim::Possible { user: None } };
        match &state.cgroup {
            Some(cgroup) if cgroup == path => PathClaim::Own,
            Some(_) => PathClaim::Possible { user: None },
            None => PathClaim::Possible { user: state.user.filter(|_| state.is_running()) },
        }
    }

    /// Applies a read of the cgroups' counters, which began after `now` and ended at `read_at`. Must come before
    /// [`Reconciler::apply_vmstat`].
    pub fn apply_cgroup_counters(
        &mut self,
        now: Timestamp,
        read_at: Timestamp,
        readings: &[CounterReading],
        hierarchical: bool,
    ) {
        self.counters.update(now, read_at, readings, hierarchical);
    }

    /// Returns true if the cgroups' counters could attribute a pending kill.
    pub fn needs_cgroup_sweep(&self) -> bool {
        self.pending.iter().any(|pending| pending.container.is_none())
    }

    /// Returns true if the next step is due soon even if no event arrives.
    pub fn has_pending(&self) -> bool {
        !self.pending.is_empty()
            || !self.pending_exits.is_empty()
            || !self.cuda_ooms.pending.is_empty()
            || self.accounting.has_missing_records()
    }

    /// Draws the conclusions. Returns the changes to store and the kills that were noticed in this step.
    pub fn settle(&mut self, now: Timestamp) -> (WriteBatch, Vec<Kill>) {
        self.attribute(now);
        for at in 0..self.pending.len() {
            if !std::mem::replace(&mut self.pending[at].is_logged, true) {
                let kill = self.shown(&self.pending[at]);
                self.notices.push(kill.clone());
                self.changes.put_event(LedgerEvent::OomKill(kill));
            }
        }
        self.settle_kills(now);
        self.settle_cuda_ooms(now);
        self.decide_exits(now);
        self.drop_decided_runs(now);
        self.forget_settled_gaps(now);
        self.unattributed.retain(|(at, ..)| now.since(*at) < UNATTRIBUTED_KEPT);
        self.unattributed.drain(..self.unattributed.len().saturating_sub(MAX_UNATTRIBUTED));
        self.counters.write_off(now, COUNTER_TIMEOUT);
        self.write(now);
        (std::mem::take(&mut self.changes), std::mem::take(&mut self.notices))
    }

    /// Drops ended runs that no pending kill and no pending exit can be of.
    fn drop_decided_runs(&mut self, now: Timestamp) {
        let (kills, exits) = (&self.pending, &self.pending_exits);
        self.containers.drop_decided_runs(now, |id, run| {
            let is_kill_of = |kill: &PendingKill| {
                kill.container.as_ref() == Some(id) && kill.run.is_none_or(|number| number == run.number)
            };
            kills.iter().any(is_kill_of)
                || exits.iter().any(|exit| exit.id == *id && exit.exit.subject.run_number == Some(run.number))
        });
    }

    /// Finishes a kill: its id and attribution will not change again.
    pub(super) fn finish_kill(&mut self, now: Timestamp, pending: PendingKill) {
        let kill = pending.kill.clone();
        if let Some(pid) = kill.pid {
            self.settled_victims.push_back((pid, pending.container.clone(), pending.happened));
            if self.settled_victims.len() > MAX_SETTLED_VICTIMS {
                self.settled_victims.pop_front();
            }
        }
        if kill.owner == KillOwner::Unattributed {
            self.unattributed.push_back((now, kill.id, pending.happened));
        }
        if kill.kernel_usec.is_none() {
            self.totals.add(Total::WithoutRecord, 1);
            self.settled_gaps.push_back((now, pending));
        }
        self.changes.remove(StateKind::PendingKill, kill.id);
        self.changes.put_event(LedgerEvent::OomKill(kill));
    }
}

#[cfg(test)]
pub(crate) mod tests;
