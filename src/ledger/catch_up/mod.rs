//! What happened while no ledger was written: before its first start, or since its last write.
//!
//! The host still knows a part of it: the kernel log, what the runtimes list and the events that they keep
//! ([`crate::discover::history`]), and the counters. The ledger's own state machine decides on it ([`replay`]), from the stored state or
//! from none. `serve` does that at its first start and writes the result; `why` and `events` do the same where no `serve` answers, and
//! write nothing. A `serve` that continues a ledger reads the kernel log on by itself; what the runtimes know beyond their events is
//! applied as soon as it is read ([`unknown_of`]), so that nothing waits for a slow engine.
//!
//! What happened before the first start is shown and never counted: counters begin at the first start. The kernel's buffer keeps the last
//! kills only, some 15 to 50.

mod drift;
mod past;
mod past_reader;
pub(super) mod replay;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::interval::LogClock;
use super::reconcile::{CountingStart, Reconciler, ReconcilerConfig};
use super::sources::cgroup_oom_events::CgroupCounters;
use super::store::{LedgerState, WriteBatch};
use super::victim_probe::VictimProbe;
use crate::clock::Timestamp;
use crate::config::Config;
use crate::discover::cgroup_tree::CgroupTree;
use crate::discover::history::{ExistingContainer, RuntimeHistory};
use crate::discover::{ContainerId, EventKind, Hierarchy, PathClaim, RuntimeEvent};
use crate::events::{ContainerRef, Evidence, Kill, KillOwner, LedgerEvent, Method, Victim};
use crate::lifecycle::timing::START_TOLERANCE;
pub use past::{HostPast, LogCoverage, LogPast, log_backends};
pub use past_reader::{MAX_DETAILS_TIME, PastReader, warn_of_unread};
pub use replay::unknown_of;
use replay::{CounterReadings, Replay};

/// A ledger that has caught up with its host.
#[derive(Debug)]
pub struct CaughtUp {
    /// The state machine.
    pub reconciler: Reconciler,
    /// What it decided.
    pub changes: WriteBatch,
    /// Kills that were noticed.
    pub noticed: Vec<Kill>,
}

/// When a ledger catches up, and what for.
#[derive(Clone, Copy, Debug)]
pub struct CatchUpTime {
    /// The time.
    pub now: Timestamp,
    /// Where the counting of a new ledger begins.
    pub start: CountingStart,
    /// Nothing more will be reported: no ledger goes on from here.
    pub is_last: bool,
}

/// Returns the configuration of the state machine of a ledger with this state.
pub fn reconciler_config(config: &Config, state: &LedgerState, now: Timestamp) -> ReconcilerConfig {
    // with another id all kills of this boot would count again: one that cannot be read is that of the process before
    let known = || state.accounting.as_ref().map(|accounting| accounting.boot_id.clone());
    let boot_id = config.host_paths.boot_id().ok().or_else(known).unwrap_or_default();
    ReconcilerConfig {
        boot_id: boot_id.into(),
        booted_at: now.booted_at(),
        keep_ended: config.keep_ended,
        filter: config.filter.clone(),
        host_pids: config.host_paths.in_initial_pid_namespace(),
        without_runtimes: !config.oom.runtime,
        kills_known_since: None,
        counting_since: None,
    }
}

/// Continues the ledger of a state with the past of its host.
pub fn catch_up(config: &Config, state: &LedgerState, past: &mut HostPast, time: CatchUpTime) -> CaughtUp {
    let CatchUpTime { now, start, is_last } = time;
    let is_new = state.is_new();
    let mut setup = reconciler_config(config, state, now);
    setup.counting_since = is_new.then_some(match state.first_start {
        // of another boot, whose log is gone
        Some(first) if first.at < now.booted_at() => CountingStart { log_usec: 0, ..first },
        first => first.unwrap_or(start),
    });
    let boot_id = Arc::clone(&setup.boot_id);
    let stored = state.accounting.as_ref().filter(|accounting| accounting.is_of(&boot_id));
    let resume = stored.map(|stored| (stored.position, stored.log_clock, stored.block.clone()));
    let hierarchy = Hierarchy::detect(&config.host_paths).ok();
    let probe = VictimProbe::new(&config.host_paths, hierarchy.as_ref());
    let coverage_since = past.log_since(now);
    let (lines, log_end) = past.log.take_lines(resume, now, &probe);
    let mut events: Vec<RuntimeEvent> = Vec::new();
    for history in &mut past.runtimes {
        events.append(&mut history.events);
    }
    let containers = || past.runtimes.iter().flat_map(|history| &history.containers);
    let limits = containers().filter_map(|it| Some((it.id.as_str().to_owned(), it.limit_bytes?)));
    let replay = Replay {
        config: setup,
        limits: limits.collect(),
        cgroups: running_cgroups(&probe, &events),
        log_since: coverage_since,
        events,
        lines,
        log_end,
        counted: past.counted,
        counters: match is_new {
            true => CounterReadings::default(),
            false => read_counters(hierarchy.as_ref(), now, &past.runtimes),
        },
        is_last,
    };
    let mut caught_up = replay.run(state, now);
    // one that happened meanwhile would be taken for one of these
    if is_new && past.has_lost_records() && past::counted_kills(config) == past.counted {
        let counters = read_counters(hierarchy.as_ref(), now, &past.runtimes);
        let since = coverage_since.unwrap_or(now.unix_seconds());
        let kills = counted_kills(&counters, &past.runtimes, &caught_up.changes, since);
        kills.into_iter().for_each(|kill| caught_up.add_past(Kill { boot_id: Arc::clone(&boot_id), ..kill }));
    }
    caught_up
}

impl CaughtUp {
    /// Adds a kill from before the first start, on which nothing more will be decided.
    fn add_past(&mut self, kill: Kill) {
        let id = self.reconciler.new_id();
        self.changes.put_event(LedgerEvent::OomKill(Kill { id, before_counting: true, ..kill }));
    }
}

/// Returns the cgroups of the containers that run, by their first processes.
fn running_cgroups(probe: &VictimProbe, events: &[RuntimeEvent]) -> HashMap<ContainerId, PathBuf> {
    let first_process = |event: &RuntimeEvent| match event.what {
        EventKind::Running { pid: Some(pid) } => Some((event.id.clone(), pid)),
        _ => None,
    };
    let cgroup = |(id, pid): (ContainerId, u32)| Some((id.clone(), probe.container_cgroup(&id, pid)?));
    events.iter().filter_map(first_process).filter_map(cgroup).collect()
}

fn read_counters(
    hierarchy: Option<&Hierarchy>,
    now: Timestamp,
    runtimes: &[RuntimeHistory],
) -> CounterReadings {
    let Some(hierarchy) = hierarchy else { return CounterReadings::default() };
    let claim = |id: &ContainerId, _: &Path| {
        let known = runtimes.iter().flat_map(|history| &history.containers).find(|known| known.id == *id);
        PathClaim::Possible { user: known.and_then(|container| container.named.user) }
    };
    let mut counters = CgroupCounters::new(CgroupTree::new(hierarchy));
    let (readings, _) = counters.sweep(now, claim);
    CounterReadings { readings, are_hierarchical: counters.hierarchical() }
}

/// Returns kills that only the counters of running containers show: their records were overwritten before this Unix time.
fn counted_kills(
    counters: &CounterReadings,
    runtimes: &[RuntimeHistory],
    found: &WriteBatch,
    since: f64,
) -> Vec<Kill> {
    let mut kills = Vec::new();
    // a younger container has lost no record
    let may_have_lost = |container: &&ExistingContainer| {
        container.is_running && container.started.is_none_or(|started| started < since)
    };
    for container in runtimes.iter().flat_map(|history| &history.containers).filter(may_have_lost) {
        let (listed, ownerless) = kills_of_run(container, found);
        let readings = counters.readings.iter().filter(|reading| reading.id == container.id);
        let counted: u64 = readings.map(|reading| reading.kills).sum();
        for _ in listed + ownerless..counted {
            let text = format!("its cgroup has counted {counted} OOM kills; {listed} of them have a record");
            kills.push(Kill {
                at: since,
                earliest: container.started,
                owner: KillOwner::Container(ContainerRef::of_existing(container)),
                victim: Some(Victim::Child),
                method: Some(Method::Cgroup),
                evidence: vec![Evidence::new("cgroup", text)],
                ..Kill::unknown()
            });
        }
    }
    kills
}

/// Returns the number of kills of the current run of a container, and of those of its time whose owner is not known.
fn kills_of_run(container: &ExistingContainer, found: &WriteBatch) -> (u64, u64) {
    let since = container.started.unwrap_or(f64::NEG_INFINITY) - START_TOLERANCE;
    let (mut listed, mut ownerless) = (0, 0);
    for event in found.events.values().flatten() {
        let LedgerEvent::OomKill(kill) = event else { continue };
        match &kill.owner {
            KillOwner::Container(ContainerRef { container_id, started, .. }) => {
                let is_its = **container_id == *container.id.as_str();
                listed += u64::from(is_its && started.is_none_or(|started| started > since));
            }
            KillOwner::Pending | KillOwner::Unattributed => ownerless += u64::from(kill.at > since),
            KillOwner::Host => {}
        }
    }
    (listed, ownerless)
}

/// What was known of the kernel log at the last write of a ledger: up to where it was read, and its clock and block there.
type LogResume =
    (super::sources::kernel_log::LogPosition, LogClock, crate::parse::kernel_log::kills::KillAssembler);
