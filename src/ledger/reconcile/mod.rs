//! The state machine that reconciles all sources into OOM kills and container exits. Pure: no I/O, no clock.
//!
//! | file | question |
//! | --- | --- |
//! | `count.rs` | how many kills were there? |
//! | `gaps.rs` | which of them have no record, and which record is late? |
//! | `owner.rs` | to which container and run did the victim belong? |
//! | `match_counters.rs`, `cgroup_counters.rs` | the same, by evidence that has numbers but no pids |
//! | `reports.rs` | whose are the processes in the kernel's report? |
//! | `victim.rs` | did the kill end the container? |
//! | `exit_reason.rs` | why did the container exit? |
//! | `cuda_ooms.rs` | whose CUDA out-of-memory error was it, and who held the GPU? |
//!
//! A step applies the cycle, the runtime events, the kernel log, the cgroups' counters and the kernel's counter, in
//! this order; then [`Reconciler::settle`] draws the conclusions. A kill is pending until its owner is known and
//! whether it ended the container. The host's total includes it at once. Published counts never decrease, so a container's
//! count waits until its labels are known.

mod cgroup_counters;
mod count;
mod cuda_ooms;
mod exit_reason;
mod gaps;
mod logged;
mod match_counters;
mod owner;
mod reports;
mod victim;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use crate::clock::Timestamp;
use crate::collect::cgroup_oom_events::CounterReading;
use crate::collect::kernel_log::{LogEntry, LogPosition};
use crate::config::Filter;
use crate::discover::{ContainerId, EventKind, RuntimeEvent};
use crate::ledger::container_table::{ContainerTable, RunTransition};
use crate::ledger::events::{
    ContainerLabels, Evidence, GpuError, Kill, KillOwner, LedgerEvent, OomReport, OomScope,
};
use crate::ledger::exchange::{ContainerFigures, CycleReport, LedgerFigures};
use crate::ledger::interval::{Interval, LOG_DELAY, LogClock};
use crate::ledger::store::{LoadedState, WriteBatch};
use crate::ledger::totals::{CudaOomSource, Total, Totals};
use crate::parse::kernel_log::{Killed, OomContext};
use cgroup_counters::Counters;
pub use count::AccountingCheckpoint;
use count::{LogFinding, OomAccounting};
use cuda_ooms::CudaOoms;
use exit_reason::PendingExit;
pub use logged::{LoggedKill, LoggedKills};
pub use owner::PersistedKill;
use owner::{Hints, PendingKill};
use reports::ReportLabels;

/// Interval between removals of ended containers.
const FORGET_INTERVAL: Duration = Duration::from_secs(60);
/// Largest disorder of a runtime's events, in seconds.
const MAX_DISORDER: f64 = 1.0;

/// A cgroup's count that nothing explains is discarded after this.
const COUNTER_TIMEOUT: Duration = Duration::from_secs(13);
/// How long an unattributed kill may explain an exit that is reported later.
const UNATTRIBUTED_KEPT: Duration = Duration::from_secs(3600);
/// Maximum number of such kills.
const MAX_UNATTRIBUTED: usize = 256;
/// Interval between writes of how far the sources were read if there are no events.
const CHECKPOINT_INTERVAL: f64 = 600.0;
/// Maximum number of ended containers whose figures are shown, newest first.
const MAX_ENDED_SHOWN: usize = 500;

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
}

/// A line of the kernel log, and what was observed when it was read.
#[derive(Clone, Debug, PartialEq)]
pub struct ObservedLine {
    /// The line.
    pub entry: LogEntry,
    /// When it was written.
    pub written: Interval,
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
}

/// The state machine.
#[derive(Debug)]
pub struct Reconciler {
    pub(super) config: ReconcilerConfig,
    pub(super) accounting: OomAccounting,
    pub(super) containers: ContainerTable,
    pub(super) counters: Counters,
    pub(super) totals: Totals,
    pub(super) pending: Vec<PendingKill>,
    pub(super) pending_exits: Vec<PendingExit>,
    pub(super) changes: WriteBatch,
    /// Kills that were noticed in this step.
    pub(super) notices: Vec<Kill>,
    reports: ReportLabels,
    pub(super) cuda_ooms: CudaOoms,
    /// Containers whose logs are being read: an exit may still get its reason from there.
    pub(super) logs_being_read: HashSet<ContainerId>,
    /// Settled gaps that a late record can still fill.
    settled_gaps: VecDeque<(Timestamp, PendingKill)>,
    /// When the kills happened that stayed unattributed.
    pub(super) unattributed: VecDeque<(Timestamp, Interval)>,
    /// Settled victims: pid, container and time, newest last.
    settled_victims: VecDeque<(u32, Option<ContainerId>, Interval)>,
    last_event_times: BTreeMap<&'static str, f64>,
    stored_checkpoint: Option<AccountingCheckpoint>,
    next_id: u64,
    pub(super) log_up: bool,
    last_forget: Option<Timestamp>,
}

impl Reconciler {
    /// Continues from the stored state. `now_usec` is the kernel's clock.
    pub fn new(config: ReconcilerConfig, contents: &LoadedState, now: Timestamp, now_usec: u64) -> Self {
        let account = contents.accounting.clone();
        let of_this_boot = account.as_ref().filter(|account| account.boot_id == *config.boot_id);
        let same_boot = of_this_boot.is_some();
        let explained_at = of_this_boot.and_then(|account| account.cgroups_explained_at);
        let stored = contents.containers.clone().into_iter();
        let mut changes = WriteBatch::default();
        let mut counters = HashMap::new();
        for (inode, kills) in &contents.cgroup_kills {
            if same_boot {
                counters.insert(*inode, *kills);
            } else {
                changes.cgroup_kills.insert(*inode, None);
            }
        }
        let mut reconciler = Self {
            containers: ContainerTable::new(config.filter.clone(), config.without_runtimes, stored),
            counters: Counters::new(counters, explained_at, account.is_none()),
            accounting: OomAccounting::new(account, &config.boot_id, now_usec),
            totals: Totals::new(contents),
            pending: vec![],
            pending_exits: vec![],
            changes,
            notices: vec![],
            reports: ReportLabels::default(),
            cuda_ooms: CudaOoms::default(),
            logs_being_read: HashSet::new(),
            settled_gaps: VecDeque::new(),
            unattributed: VecDeque::new(),
            settled_victims: VecDeque::new(),
            last_event_times: BTreeMap::new(),
            stored_checkpoint: None,
            next_id: contents.last_id + 1,
            log_up: false,
            last_forget: None,
            config,
        };
        for runtime in crate::discover::RUNTIMES {
            // start counting now for a runtime that is new to the ledger, even if memledger exits before the first
            // event
            let stored = contents.runtime_cursors.get(runtime).copied();
            // the clock may have been set back since; events from the future are impossible
            let since = f64::min(stored.unwrap_or(f64::MAX), now.unix_seconds());
            reconciler.last_event_times.insert(runtime, since);
        }
        if !same_boot {
            reconciler.containers.apply_host_restart(reconciler.config.booted_at);
        }
        reconciler.reopen(contents, now);
        reconciler
    }

    /// Restores the kills and exits that were pending when memledger stopped.
    fn reopen(&mut self, contents: &LoadedState, now: Timestamp) {
        for event in &contents.unsettled {
            match event {
                LedgerEvent::OomKill(kill) => {
                    let noted = contents.pending_kills.get(&kill.id).cloned().unwrap_or_default();
                    self.pending.push(PendingKill::stored(kill.clone(), noted, now));
                }
                LedgerEvent::Exit(exit) => self.pending_exits.push(PendingExit::stored(exit.clone(), now)),
                LedgerEvent::CudaOom(oom) => self.reopen_cuda_oom(oom.clone()),
                LedgerEvent::GpuError(_) => {} // never pending
            }
        }
    }

    /// Returns the containers of a runtime that were running at the last update.
    pub fn running(&self, runtime: &str) -> impl Iterator<Item = &ContainerId> {
        self.containers
            .iter()
            .filter(move |(_, known)| known.is_running() && *known.runtime == *runtime)
            .map(|(id, _)| id)
    }

    /// Returns the Unix time of the last event of each runtime.
    pub fn last_event_times(&self) -> &BTreeMap<&'static str, f64> {
        &self.last_event_times
    }

    /// Returns the position up to which this boot's log was read, and its clock as known then; `None` if it never was read.
    pub fn log_position(&self) -> Option<(LogPosition, LogClock)> {
        let account = self.accounting.checkpoint();
        (account.position != LogPosition::default()).then_some((account.position, account.log_clock))
    }

    /// Marks the runs that had not ended before this boot.
    pub(in crate::ledger) fn apply_host_restart(&mut self) {
        self.containers.apply_host_restart(self.config.booted_at);
    }

    /// Applies the data of a cycle.
    pub fn apply_cycle(&mut self, now: Timestamp, report: &CycleReport) {
        self.apply_gpus(report.at, &report.gpus);
        for transition in self.containers.apply_cycle(now, report) {
            self.apply_transition(now, transition);
        }
        for (container, held) in std::iter::zip(&report.inventory.containers, &report.containers) {
            let are_counted = [held.run.torch_ooms.is_some(), self.logs_being_read.contains(&container.id)];
            for (source, _) in std::iter::zip(CudaOomSource::ALL, are_counted).filter(|(_, counted)| *counted)
            {
                let name = ContainerLabels::from(&container.identity);
                self.totals.begin_cuda_ooms(&name, source, now.unix_seconds());
            }
        }
    }

    /// Applies runtime events. After a restart of memledger, runtimes repeat events that were applied before.
    pub fn apply_runtime_events(&mut self, now: Timestamp, runtime_events: &[RuntimeEvent]) {
        for runtime_event in runtime_events {
            let is_event = matches!(
                runtime_event.what,
                EventKind::Started | EventKind::Oom | EventKind::SignalRequested { .. }
            );
            let since =
                self.last_event_times.entry(runtime_event.runtime).or_insert_with(|| now.unix_seconds());
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
    }

    fn apply_transition(&mut self, now: Timestamp, transition: RunTransition) {
        match transition {
            RunTransition::Began(id) => {
                let name = self.containers.get(&id).map(|known| known.name.clone()).unwrap_or_default();
                self.totals.count_start(&name, now.unix_seconds());
            }
            RunTransition::Ended(end) => {
                let id = self.new_id();
                self.pending_exits.push(PendingExit::new(id, *end, now));
            }
        }
    }

    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id - 1
    }

    /// Applies kernel log lines, in order. `None`: the log cannot be read now.
    pub fn apply_log(&mut self, now: Timestamp, lines: Option<&[ObservedLine]>, position: LogPosition) {
        self.log_up = lines.is_some();
        for line in lines.unwrap_or_default() {
            let found = self.accounting.read(&line.entry);
            if matches!(found, Some(LogFinding::Kill { .. } | LogFinding::Duplicate { .. })) {
                self.accounting.counted_record_of(&line.written, now);
            }
            match found {
                Some(LogFinding::Kill { killed, context, group, report }) => {
                    let hints = Hints::new(context, group, line.proc_info.clone());
                    let containers = self.config.host_pids.then_some(&self.containers);
                    let report = report.map(|report| self.reports.label(&report, line, containers));
                    self.add_kill(now, line, &killed, hints, report);
                }
                Some(LogFinding::Group { pid, path }) => {
                    let mut newest = self.pending.iter_mut().rev();
                    if let Some(pending) = newest.find(|pending| pending.kill.pid == Some(pid)) {
                        pending.hints.group = Some(path);
                    }
                }
                Some(LogFinding::Duplicate { pid }) => self.add_duplicate(pid),
                None => {}
            }
        }
        if self.log_up {
            self.accounting.read_to(position);
        }
    }

    /// Notes what is known of the log's clock at the position up to which the log was read.
    pub fn set_log_clock(&mut self, clock: LogClock) {
        self.accounting.set_log_clock(clock);
    }

    /// Notes that records of the log were overwritten before they were read, up to this position.
    pub fn records_lost(&mut self, up_to: LogPosition) {
        self.accounting.records_lost(up_to);
    }

    /// Adds GPU errors, which are final at once.
    pub fn add_gpu_errors(&mut self, errors: Vec<GpuError>) {
        for mut error in errors {
            error.id = self.new_id();
            self.changes.events.insert(error.id, LedgerEvent::GpuError(error));
        }
    }

    /// Adds kills from before the start of this ledger, which are final. They are events only: no total counts them, and no
    /// metric has their time.
    pub fn add_past_kills(&mut self, kills: Vec<Kill>) {
        for mut kill in kills {
            (kill.id, kill.before_start) = (self.new_id(), true);
            self.changes.events.insert(kill.id, LedgerEvent::OomKill(kill));
        }
    }

    /// Starts the accounting anew: the machine was restored to an earlier state without a reboot.
    pub fn restart_accounting(&mut self, now_usec: u64) {
        self.accounting.restart(now_usec);
    }

    fn add_kill(
        &mut self,
        now: Timestamp,
        line: &ObservedLine,
        killed: &Killed,
        hints: Hints,
        report: Option<Arc<OomReport>>,
    ) {
        let ObservedLine { entry, written, .. } = line;
        let kill = Kill {
            id: self.new_id(),
            at: written.nearest(now.unix_seconds_of_kernel(entry.position.usec)),
            boot_id: Arc::clone(&self.config.boot_id),
            ..Kill::of_record(entry, killed, hints.context.as_ref(), report)
        };
        self.totals.add(Total::Host, 1);
        let happened = Interval::new(written.earliest - LOG_DELAY, written.latest);
        self.pending.push(PendingKill::new(kill, happened, hints, now));
    }

    fn add_duplicate(&mut self, pid: u32) {
        self.totals.add(Total::Duplicates, 1);
        if let Some(pending) = self.pending.iter_mut().rev().find(|pending| pending.kill.pid == Some(pid)) {
            pending.duplicates += 1;
            if let Some(id) = &pending.container {
                self.counters.attribute(id, 1, &pending.happened);
            }
        } else if let Some((_, Some(id), happened)) =
            self.settled_victims.iter().rev().find(|(settled, ..)| *settled == pid)
        {
            self.counters.attribute(id, 1, happened);
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
        for pending in self.pending.iter_mut().filter(|pending| !pending.is_logged) {
            pending.is_logged = true;
            self.notices.push(pending.kill.clone());
            self.changes.events.insert(pending.kill.id, LedgerEvent::OomKill(pending.kill.clone()));
        }
        self.settle_kills(now);
        self.settle_cuda_ooms(now);
        self.decide_exits(now);
        self.forget_settled_gaps(now);
        self.unattributed.retain(|(at, _)| now.since(*at) < UNATTRIBUTED_KEPT);
        self.unattributed.drain(..self.unattributed.len().saturating_sub(MAX_UNATTRIBUTED));
        self.counters.write_off(now, COUNTER_TIMEOUT);
        self.write(now);
        (std::mem::take(&mut self.changes), std::mem::take(&mut self.notices))
    }

    /// Finishes a kill: its id and attribution will not change again.
    pub(super) fn finish_kill(&mut self, now: Timestamp, pending: PendingKill) {
        let kill = pending.kill.clone();
        if let Some(pid) = kill.pid {
            self.settled_victims.push_back((pid, pending.container.clone(), pending.happened));
            if self.settled_victims.len() > 64 {
                self.settled_victims.pop_front();
            }
        }
        if kill.owner == KillOwner::Unattributed {
            self.unattributed.push_back((now, pending.happened));
        }
        if kill.kernel_usec.is_none() {
            self.totals.add(Total::Gaps, 1);
            self.settled_gaps.push_back((now, pending));
        }
        self.changes.pending_kills.insert(kill.id, None);
        self.changes.events.insert(kill.id, LedgerEvent::OomKill(kill));
    }

    fn write(&mut self, now: Timestamp) {
        for pending in &mut self.pending {
            let persisted = pending.persisted();
            if pending.stored.as_ref() != Some(&persisted) {
                self.changes.pending_kills.insert(pending.kill.id, Some(persisted.clone()));
                pending.stored = Some(persisted);
            }
        }
        let containers = &self.containers;
        self.totals.write(&mut self.changes, |name| containers.iter().any(|(_, known)| known.name == *name));
        for id in self.containers.take_changed() {
            let known = self.containers.get(&id).filter(|known| known.run.is_some() || known.told > 0.0);
            self.changes.containers.insert(id, known.cloned());
        }
        for (inode, attributed) in self.counters.take_changed() {
            self.changes.cgroup_kills.insert(inode, attributed);
        }
        if self.last_forget.is_none_or(|last_forget| now.since(last_forget) >= FORGET_INTERVAL) {
            self.last_forget = Some(now);
            let before = now.unix_seconds() - self.config.keep_ended.as_secs_f64().max(3600.0);
            let kills = self.pending.iter().filter_map(|pending| pending.container.as_ref());
            let needed: HashSet<_> = kills.chain(self.pending_exits.iter().map(|exit| &exit.id)).collect();
            for id in self.containers.remove_ended(before, |id| needed.contains(id)) {
                self.changes.containers.insert(id, None);
            }
        }
        self.write_checkpoints();
    }

    /// Writes the running containers with the next step.
    pub fn mark_running_changed(&mut self) {
        self.containers.mark_running_changed();
    }

    /// Writes the whole state with the next step: the store lost it.
    pub fn mark_all_changed(&mut self) {
        self.containers.mark_all_changed();
        self.totals.mark_all_changed();
        self.counters.mark_all_changed();
        self.stored_checkpoint = None;
        self.pending.iter_mut().for_each(|pending| pending.stored = None);
        let kills = self.pending.iter().map(|pending| LedgerEvent::OomKill(pending.kill.clone()));
        let exits = self.pending_exits.iter().map(|pending| LedgerEvent::Exit(pending.exit.clone()));
        let ooms = self.cuda_ooms.pending.iter().map(|pending| LedgerEvent::CudaOom(pending.event.clone()));
        self.changes.events.extend(kills.chain(exits).chain(ooms).map(|event| (event.id(), event)));
    }

    /// Returns the highest id of an event.
    pub fn last_id(&self) -> u64 {
        self.next_id - 1
    }

    /// Stores how far the sources were read: together with events, else only occasionally, because reading old lines
    /// without kills again changes nothing.
    fn write_checkpoints(&mut self) {
        let mut account = self.accounting.checkpoint().clone();
        account.cgroups_explained_at = self.counters.explained_at();
        let counts = |account: &AccountingCheckpoint| {
            let written = account.balanced_at.map(|at| (at / CHECKPOINT_INTERVAL) as u64);
            (account.records, account.duplicates, account.gaps, account.opened_at, written)
        };
        let moved = self
            .stored_checkpoint
            .as_ref()
            .is_none_or(|stored| counts(stored) != counts(&account) || stored.boot_id != account.boot_id);
        if moved || !self.changes.is_empty() {
            self.changes.accounting = Some(account.clone());
            self.stored_checkpoint = Some(account);
            for (runtime, since) in &self.last_event_times {
                self.changes.runtime_cursors.insert((*runtime).to_owned(), *since);
            }
        }
    }

    /// Returns the current figures. The caller adds the state of the sources and of the store.
    pub fn figures(&self, now: Timestamp) -> LedgerFigures {
        let shown_since = now.unix_seconds() - self.config.keep_ended.as_secs_f64();
        let mut shown: Vec<(f64, &ContainerLabels)> = Vec::new();
        for (_, known) in self.containers.iter().filter(|(_, known)| !known.hidden) {
            let until = match &known.run {
                Some(run) => run.ended.unwrap_or(f64::INFINITY),
                // one of its processes was killed before it was seen running
                None => self.totals.figures(&known.name).last_kill.unwrap_or(0.0),
            };
            if until > shown_since {
                shown.push((until, &known.name));
            }
        }
        shown.sort_by(|one, other| other.0.total_cmp(&one.0));
        let running = shown.iter().take_while(|(until, _)| until.is_infinite()).count();
        shown.truncate(running + MAX_ENDED_SHOWN);
        let containers: BTreeMap<&ContainerLabels, ContainerFigures> =
            shown.into_iter().map(|(_, name)| (name, self.totals.figures(name))).collect();
        LedgerFigures {
            host_kills: self.totals.get(Total::Host),
            host_process_kills: self.totals.get(Total::HostProcess),
            unattributed: self.totals.get(Total::Unattributed),
            gaps: self.totals.get(Total::Gaps),
            duplicate_lines: self.totals.get(Total::Duplicates),
            containers: containers.into_values().collect(),
            ..LedgerFigures::default()
        }
    }
}

fn context_text(context: &OomContext) -> String {
    let victim = context.task_cgroups.join(" or ");
    match (&context.oom_cgroup, context.global) {
        (Some(limit), _) => format!("the limit of {limit} was hit; the victim was in {victim}"),
        (None, true) => format!("the machine ran out of memory; the victim was in {victim}"),
        (None, false) => format!("a limit was hit; the victim was in {victim}"),
    }
}

impl Kill {
    /// Returns what the kernel log shows of a kill.
    fn of_record(
        entry: &LogEntry,
        killed: &Killed,
        context: Option<&OomContext>,
        report: Option<Arc<OomReport>>,
    ) -> Self {
        // before 5.1 the record does not show whose memory was exhausted
        let by_report =
            || report.as_ref().filter(|report| report.usage_bytes.is_some()).map(|report| report.host);
        let global =
            killed.global.or(context.map(|context| context.global)).or_else(by_report).unwrap_or(false);
        let mut evidence = vec![Evidence::new("kmsg", entry.text.to_string())];
        if let Some(context) = context {
            evidence.insert(0, Evidence::new("kmsg", context_text(context)));
        }
        let limit_cgroup = context.and_then(|context| context.oom_cgroup.as_deref());
        Self {
            kernel_usec: Some(entry.position.usec),
            pid: Some(killed.pid),
            process: killed.process.as_str().into(),
            scope: if global { OomScope::Host } else { OomScope::Container },
            anon_bytes: killed.anon_bytes,
            file_bytes: killed.file_bytes,
            shmem_bytes: killed.shmem_bytes,
            oom_score_adj: killed.oom_score_adj,
            limit_cgroup: limit_cgroup.unwrap_or_default().into(),
            limit_bytes: report.as_ref().filter(|report| !report.host).and_then(|report| report.limit_bytes),
            report,
            evidence,
            ..Self::unknown()
        }
    }

    /// Returns a kill of which nothing is known.
    pub(super) fn unknown() -> Self {
        Self {
            id: 0,
            at: 0.0,
            earliest: None,
            boot_id: "".into(),
            kernel_usec: None,
            pid: None,
            process: "".into(),
            role: "".into(),
            owner: KillOwner::Open,
            victim: None,
            scope: OomScope::Container,
            anon_bytes: None,
            file_bytes: None,
            shmem_bytes: None,
            oom_score_adj: None,
            limit_cgroup: "".into(),
            limit_bytes: None,
            method: "".into(),
            report: None,
            before_start: false,
            evidence: vec![],
            before: None,
        }
    }
}

#[cfg(test)]
mod tests;
