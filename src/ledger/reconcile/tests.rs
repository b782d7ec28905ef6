//! Property tests of the reconciler in simulated worlds ([`world`]), which `diagnose::worlds` plays: whatever the sources delay, repeat or omit, and
//! whenever memledger is killed or the clock is set, the counts are right if one source was complete, and never too
//! high.
//!
//! Faults that were found by argument, each with the tests that failed before it was mended:
//!
//! | | fault | tests, here if no module is named |
//! | --- | --- | --- |
//! | L1 | a group kill names the next container | `groups::group_kill_does_not_name_the_next_container`, `groups::each_group_line_names_its_own_victims`, `groups::two_group_kills_at_once_are_matched_by_their_counters`, `groups::group_line_after_lost_records_does_not_name_the_next_container` |
//! | L2 | an exit whose record was overwritten is "not an OOM kill" | `late::exit_that_a_lost_record_may_explain_is_unknown`, `late::lost_record_is_attributed_to_the_exit_that_the_runtime_calls_an_oom` |
//! | L3 | counters fall to 0 if the store cannot be written at the start | `oom::durable::read_only_directory_keeps_counts_over_restarts`, `oom::durable::full_disk_at_start_keeps_counts_and_is_written_when_there_is_space` |
//! | L4 | after a power loss each container has an error of its own | `runs::run_of_an_earlier_boot_ends_by_the_restart_of_the_host`, `runs::exit_before_the_reboot_keeps_its_own_reason` |
//! | L5 | a kill that is named late gets the next run's start and samples | `runs::kill_read_after_the_next_start_keeps_its_own_run_and_samples` |
//! | L6 | a drifted log clock chooses the wrong run | `runs::drifted_stamp_in_restart_loop_finds_the_run_by_the_time_of_reading` |
//! | L7 | series of a container known only by its kill vanish | `runs::container_known_only_by_its_kill_is_shown_for_the_configured_time` |
//! | L8 | an old record is compared with a living process | `ledger::victim_probe::tests::process_that_began_after_the_record_is_not_its_victim` |
//! | L9 | one run has two exits | `runs::cgroup_that_outlives_its_container_does_not_reopen_the_run`, `runs::assumed_exit_of_a_container_that_is_listed_again_is_not_counted_twice` |
//! | L10 | one unreadable row costs all counts | `ledger::store::tests::damage::unreadable_rows_cost_only_themselves` |
//! | L11 | an id goes to two events, or a dropped event counts again | `ledger::store::tests::damage::ids_are_not_reused_after_replacement`, `ledger::store::tests::damage::dropped_event_is_not_pending_after_restart` |
//! | L12 | a late record fills the gap of another container | `late::late_record_fills_the_oldest_gap_of_its_owner` |
//! | L13 | the limit is forgotten between two reads of the log | `ledger::victim_probe::tests::limit_is_that_of_the_cgroup_in_the_context_line` |
//! | L14 | an ignored stop request explains a crash minutes later | `runs::ignored_stop_request_does_not_explain_a_crash_minutes_later` |

mod cuda_ooms;
mod exits;
mod groups;
mod reports;
mod late;
mod rim;
mod runs;
mod sandboxes;
mod stories;
mod story;
pub(crate) mod world;

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestError, TestRng, TestRunner};

use super::*;
use crate::events::{ContainerRef, Exit, ExitReason, Identity, OomScope, Victim};
use crate::ledger::catch_up::replay::{CounterReadings, Replay};
use crate::ledger::catch_up::unknown_of;
use crate::ledger::exchange::ContainerFigures;
use crate::ledger::interval::{LogClock, Written};
use crate::ledger::sources::kernel_log::LogEntry;
use crate::ledger::store::{StateRows, Store};
use crate::parse::kernel_log::Line;
use crate::runs::RunRecord;
use world::World;

/// Another test may be starting a program, which holds the lock of a closed store until it has begun.
const CLOSED_WITHIN: Duration = Duration::from_secs(5);

/// Returns the number of worlds: `MEMLEDGER_TEST_CASES`, 250. They take about half a minute.
pub(crate) fn cases() -> u32 {
    std::env::var("MEMLEDGER_TEST_CASES").map_or(250, |cases| cases.parse().expect("a number"))
}

/// Returns the seed of the worlds: `MEMLEDGER_TEST_SEED`, 7. The worlds are the same in each run, so CI is not flaky.
fn seed() -> u8 {
    std::env::var("MEMLEDGER_TEST_SEED").map_or(7, |seed| seed.parse().expect("a number up to 255"))
}

/// A store in memory.
#[derive(Debug, Default)]
pub(crate) struct MemoryStore {
    pub(crate) events: BTreeMap<u64, LedgerEvent>,
    runs: BTreeMap<u64, RunRecord>,
    /// Rows of state by kind and key.
    rows: BTreeMap<(&'static str, String), String>,
    contents: LedgerState,
}

impl MemoryStore {
    fn commit(&mut self, changes: WriteBatch) {
        for ((kind, key), value) in changes.state {
            match value {
                Some(value) => self.rows.insert((kind.label(), key), value),
                None => self.rows.remove(&(kind.label(), key)),
            };
        }
        let mut rows = StateRows::default();
        for ((kind, key), value) in &self.rows {
            rows.add((*kind).to_owned(), key.clone(), value.clone());
        }
        self.contents = LedgerState::of_rows(rows);
        for (id, identity) in changes.renames {
            let is_its = |it: &ContainerRef| *it.container_id == *id.as_str();
            let events = self.events.values_mut();
            events.filter(|event| event.subject().is_some_and(is_its)).for_each(|it| it.rename(&identity));
            self.runs.values_mut().filter(|run| is_its(&run.subject)).for_each(|run| run.rename(&identity));
        }
        for (id, event) in changes.events {
            match event {
                Some(event) => self.events.insert(id, event),
                None => {
                    self.runs.remove(&id);
                    self.events.remove(&id)
                }
            };
        }
        self.runs.extend(changes.runs);
        self.contents.unsettled = self.events.values().filter(|event| !event.settled()).cloned().collect();
        let unattributed =
            self.events.values().filter_map(|event| Some((event.id(), event.unattributed_at()?)));
        self.contents.unattributed = unattributed.collect();
        self.contents.last_id = self.events.keys().next_back().copied().unwrap_or(0);
    }

    fn totals(&self) -> Totals {
        Totals::new(&self.contents)
    }

    fn total(&self, total: Total) -> u64 {
        self.totals().get(total)
    }

    pub(crate) fn kills(&self) -> impl Iterator<Item = &Kill> {
        self.events.values().filter_map(|event| match event {
            LedgerEvent::OomKill(kill) => Some(kill),
            LedgerEvent::Exit(_) | LedgerEvent::GpuError(_) | LedgerEvent::CudaOom(_) => None,
        })
    }

    pub(crate) fn exits(&self, container: usize) -> Vec<&Exit> {
        self.exits_of(&World::id(container))
    }

    fn exits_of(&self, id: &ContainerId) -> Vec<&Exit> {
        let exits = self.events.values().filter_map(|event| match event {
            LedgerEvent::Exit(exit) => Some(exit),
            LedgerEvent::OomKill(_) | LedgerEvent::GpuError(_) | LedgerEvent::CudaOom(_) => None,
        });
        let mut exits: Vec<_> = exits.filter(|exit| *exit.subject.container_id == *id.as_str()).collect();
        exits.sort_by(|one, other| one.at.total_cmp(&other.at));
        exits
    }
}

/// memledger in that world, with the steps of the ledger's thread.
struct Simulation<'a> {
    world: &'a World,
    begin: Timestamp,
    reconciler: Reconciler,
    store: MemoryStore,
    read_to: u64,
    /// Of each socket.
    events_to: Vec<u64>,
    clock: LogClock,
    block: KillAssembler,
    /// memledger was started since the last step: it reads what was logged meanwhile at once.
    was_away: bool,
    first_sweep: Option<u64>,
    last_sweep: Option<u64>,
    cycled: Option<u64>,
    last_step: Timestamp,
    /// The first event of this process.
    first_id: u64,
    disk: Option<(tempfile::TempDir, Option<Store>)>,
    /// What the runtime knows of the past, which is applied after so many steps.
    late: Vec<RuntimeEvent>,
    steps_to_past: u64,
}

impl<'a> Simulation<'a> {
    fn new(world: &'a World) -> Self {
        let begin = Timestamp::hours_after_boot(world.uptime_hours);
        let reconciler = Self::start(&MemoryStore::default(), world, begin);
        Self {
            world,
            begin,
            reconciler,
            store: MemoryStore::default(),
            read_to: world.stamp(begin, 0),
            events_to: vec![0; world.sources.kind.sockets().len()],
            clock: LogClock::default(),
            block: KillAssembler::default(),
            was_away: false,
            first_sweep: None,
            last_sweep: None,
            cycled: None,
            last_step: begin,
            first_id: 1,
            late: vec![],
            steps_to_past: 0,
            disk: world.is_on_disk.then(|| {
                let folder = tempfile::tempdir().expect("a folder");
                let opened = Store::open(folder.path(), Duration::ZERO).expect("a store");
                (folder, Some(opened.store))
            }),
        }
    }

    fn setup() -> ReconcilerConfig {
        ReconcilerConfig {
            boot_id: "boot".into(),
            keep_ended: Duration::from_secs(48 * 3600),
            host_pids: true,
            ..ReconcilerConfig::default()
        }
    }

    fn start(store: &MemoryStore, world: &World, now: Timestamp) -> Reconciler {
        // the service takes the stamp of the log's newest record
        Reconciler::new(Self::setup(), &store.contents, now, world.stamp(now, 0))
    }

    fn restart(&mut self, at: u64) {
        let (world, begin) = (self.world, self.begin);
        let now = world.clocks(begin, at);
        if let Some((folder, store)) = &mut self.disk {
            *store = None; // closed
            let opened = Store::open(folder.path(), CLOSED_WITHIN).expect("the store");
            (self.store.contents, *store) = (opened.state, Some(opened.store));
        }
        self.resume(at);
        (self.last_step, self.first_id) = (now, self.store.contents.last_id + 1);
        let past = self.past(at);
        self.late = unknown_of(&self.store.contents, past);
        self.steps_to_past = at % 3;
        (self.first_sweep, self.last_sweep, self.cycled) = (None, None, None);
    }

    /// Sets from where the sources are read by who continues the stored ledger.
    fn resume(&mut self, at: u64) {
        let (world, begin) = (self.world, self.begin);
        self.reconciler = Self::start(&self.store, world, world.clocks(begin, at));
        for (socket, events_to) in std::iter::zip(world.sources.kind.sockets(), &mut self.events_to) {
            let since = self.reconciler.runtime_cursor(world.sources.kind.runtime(), socket);
            // the runtime's events are requested from one second before the last event
            let is_requested = |when: &u64| {
                since.is_none_or(|since| world.clocks(begin, *when).unix_seconds() >= since - 1.0)
            };
            *events_to = (0..at).find(is_requested).unwrap_or(at);
        }
        let stored = self.reconciler.log_position();
        self.read_to = stored.as_ref().map_or(world.stamp(begin, 0), |(position, ..)| position.usec);
        (_, self.clock, self.block) = stored.unwrap_or_default();
        self.was_away = true;
    }

    /// Returns what the runtime knows then.
    fn past(&self, at: u64) -> Vec<RuntimeEvent> {
        let (world, begin) = (self.world, self.begin);
        let reported = at.saturating_sub(world.sources.runtime_lag);
        let mut events = world.past_of_runtime(begin, reported);
        for (socket, events_to) in std::iter::zip(world.sources.kind.sockets(), &self.events_to) {
            events.extend(world.runtime_events(begin, socket, *events_to, reported));
        }
        events
    }

    /// Returns what the host knows then of the time since the ledger was last written.
    fn replay(&mut self, at: u64, is_last: bool) -> Replay {
        let (world, begin, read_after) = (self.world, self.begin, self.read_to);
        let events = self.past(at);
        let position = LogPosition { sequence: None, usec: world.stamp(begin, at) + 999 };
        let lines = world.log(begin, read_after, at);
        if lines.is_some() {
            if world.has_lost_records(begin, read_after, at) {
                self.block.records_lost(position.usec);
            }
            self.read_to = position.usec;
        }
        let lines = lines.map(|lines| self.observe(at, read_after, lines));
        let readings = world.readings(at, at, |_| true);
        let is_listed = |container: &usize| {
            world.is_alive(*container, at) && events.iter().any(|event| event.id == World::id(*container))
        };
        let listed = (0..world.runs.len()).filter(is_listed);
        let cgroups = listed.map(|container| (World::id(container), world.cgroup(container).into()));
        Replay {
            cgroups: cgroups.collect(),
            config: Self::setup(),
            events,
            log_end: lines.is_some().then(|| (position, self.clock, self.block.clone())),
            log_since: Some(begin.unix_seconds()).filter(|_| lines.is_some()),
            lines: lines.unwrap_or_default(),
            counted: Some(world.vmstat(at)),
            counters: CounterReadings { readings, are_hierarchical: world.sources.hierarchical },
            is_last,
            ..Replay::default()
        }
    }

    fn commit(&mut self, changes: WriteBatch) {
        if let Some((_, Some(store))) = &mut self.disk {
            store.commit(&changes).expect("the store is written");
        }
        self.store.commit(changes);
    }

    fn step(&mut self, at: u64, is_lost: bool) {
        let (world, now) = (self.world, self.world.clocks(self.begin, at));
        // the cycles have a thread of their own: while the ledger pauses, they wait for it
        let first = self.cycled.map_or(at, |cycled| cycled + 1_000);
        let cycles = (first..=at).step_by(1_000).filter(|_| world.sources.cycles);
        let reports: Vec<_> = cycles.map(|at| world.cycle(self.begin, at)).collect();
        if !reports.is_empty() {
            self.cycled = Some(first + 1_000 * (reports.len() as u64 - 1));
        }
        let mut events = Vec::new();
        for (socket, events_to) in std::iter::zip(world.sources.kind.sockets(), &mut self.events_to) {
            let reported = at.saturating_sub(world.sources.runtime_lag).max(*events_to);
            events.push(world.runtime_events(self.begin, socket, *events_to, reported));
            *events_to = reported;
        }
        self.apply_clock(now);
        // it is read beside the first steps
        if self.steps_to_past > 0 {
            self.steps_to_past -= 1;
        } else {
            self.reconciler.apply_runtime_events(now, &std::mem::take(&mut self.late));
        }
        self.reconciler.apply_cycles_and_events(now, &reports, &events);
        let read_after = self.read_to;
        let lines = world.log(self.begin, read_after, at);
        // all that was logged in this millisecond
        let position = LogPosition { sequence: None, usec: world.stamp(self.begin, at) + 999 };
        if lines.is_some() {
            if world.has_lost_records(self.begin, read_after, at) {
                self.block.records_lost(position.usec);
            }
            self.read_to = position.usec;
        }
        let observed = lines.map(|lines| self.observe(at, read_after, lines));
        self.reconciler.apply_log(now, observed.as_deref(), position);
        if observed.is_some() {
            self.reconciler.set_log_state(self.clock, self.block.clone());
        }
        let counter = world.vmstat(at);
        if self.reconciler.needs_cgroup_sweep() || self.last_sweep.is_none_or(|last| at >= last + 1_000) {
            let first = *self.first_sweep.get_or_insert(at);
            self.last_sweep = Some(at);
            let is_known = |container: usize| {
                let cgroup = world.cgroup(container);
                let claim = self.reconciler.claim_at(&World::id(container), Path::new(&cgroup));
                matches!(claim, PathClaim::Own | PathClaim::Possible { user: Some(_) })
            };
            let readings = world.readings(at, first, is_known);
            self.reconciler.apply_cgroup_counters(now, now, &readings, world.sources.hierarchical);
        }
        self.reconciler.apply_vmstat(now, counter);
        let (changes, _) = self.reconciler.settle(now);
        if !is_lost {
            self.commit(changes);
        }
    }
}

impl Simulation<'_> {
    /// Moves times as the writer does when the clock was set.
    fn apply_clock(&mut self, now: Timestamp) {
        let before = std::mem::replace(&mut self.last_step, now);
        let Some(step) = ClockStep::between(before, now) else { return };
        self.reconciler.correct_times(&step);
        self.store.events.range_mut(self.first_id..).for_each(|(_, event)| event.correct_times(&step));
        if let Some((_, Some(store))) = &mut self.disk {
            let mut changes = WriteBatch::default();
            changes.correct_times(self.first_id, step);
            store.commit(&changes).expect("the store is written");
        }
    }

    /// Returns these lines, with when they were written as far as that is known.
    fn observe(&mut self, at: u64, after: u64, lines: Vec<(LogEntry, ProcInfo)>) -> Vec<ObservedRecord> {
        let (world, begin, now) = (self.world, self.begin, self.world.clocks(self.begin, at));
        let reads_at_once = world.sources.reads_at_once && !std::mem::take(&mut self.was_away);
        let mut records: Vec<(u64, Option<(LogEntry, ProcInfo)>)> =
            world.other_stamps(begin, after, at).into_iter().map(|usec| (usec, None)).collect();
        records.extend(lines.into_iter().map(|line| (line.0.position.usec, Some(line))));
        records.sort_by_key(|(usec, _)| *usec);
        let mut observed = Vec::new();
        let logged = |usec: u64| if reads_at_once { world.logged(begin, usec) } else { 0 };
        for batch in records.chunk_by(|one, next| logged(one.0) == logged(next.0)) {
            let first = world.clocks(begin, world.logged(begin, batch[0].0));
            let read_at = if reads_at_once { first.plus(Duration::from_micros(999)) } else { now };
            for (usec, _) in batch.iter().filter(|(_, line)| line.is_none()) {
                self.clock.written(*usec, read_at);
            }
            let (entries, infos): (Vec<_>, Vec<_>) =
                batch.iter().filter_map(|(_, line)| line.clone()).unzip();
            let infos: Vec<ProcInfo> = infos;
            let is_line = |entry: &LogEntry| entry.line != Line::Resumed;
            let infos: Vec<_> = std::iter::zip(&entries, infos)
                .filter(|(entry, _)| is_line(entry))
                .map(|(_, info)| info)
                .collect();
            for ((entry, written), proc_info) in std::iter::zip(self.clock.place(entries, read_at), infos) {
                let written = written.moved(now.wall_moved_since(read_at));
                observed.extend(self::observed(&mut self.block, entry, written, proc_info));
            }
            if reads_at_once {
                self.clock.caught_up(read_at);
            }
        }
        self.clock.caught_up(now);
        observed
    }
}

/// Returns what a line of the log shows of a kill, if anything.
fn observed(
    block: &mut KillAssembler,
    entry: LogEntry,
    written: Written,
    proc_info: ProcInfo,
) -> Option<ObservedRecord> {
    let LogEntry { position, line, text, report } = entry;
    let record = block.push(position.usec, &line, report.as_ref())?;
    Some(ObservedRecord { position, text, record, written, proc_info })
}

fn figures(totals: &Totals, name: &str) -> ContainerFigures {
    totals.figures(&Identity { name: name.into(), ..Identity::default() })
}

/// Returns all counters, none of which may decrease.
fn counts(store: &MemoryStore, world: &World) -> Vec<u64> {
    let totals = store.totals();
    let mut counts: Vec<u64> = Total::ALL.map(|total| totals.get(total)).to_vec();
    for container in 0..world.runs.len() {
        let figures = figures(&totals, &World::name(container));
        counts.extend(figures.kills.as_flattened());
        counts.extend(figures.exits);
        counts.push(figures.restarts);
    }
    counts
}

/// Plays a world and returns the store at its end.
fn play(world: &World) -> Result<MemoryStore, TestCaseError> {
    let mut simulation = Simulation::new(world);
    simulation.step(0, false);
    let (mut at, mut before) = (0, counts(&simulation.store, world));
    let mut shown = BTreeMap::new();
    let played: u64 = world.steps.iter().map(|(pause, ..)| pause).sum();
    let left = world.last_exit().saturating_sub(played);
    let quiet = std::iter::repeat_n(&(500, false, false), 120 + left as usize / 500);
    for (pause, restarts, is_lost) in world.steps.iter().chain(quiet) {
        at += pause;
        simulation.step(at, *restarts && *is_lost);
        if *restarts {
            simulation.restart(at);
        }
        let after = counts(&simulation.store, world);
        prop_assert!(
            before.iter().zip(&after).all(|(one, other)| one <= other),
            "a counter decreased at {at}"
        );
        prop_assert!(
            after[0] <= world.killed(at) + world.counted_wrongly(),
            "{} of {} at {at}",
            after[0],
            world.killed(at)
        );
        before = after;
        if !(*restarts && *is_lost) {
            figures_are_true(&mut simulation, at, &mut shown)?;
        }
    }
    Ok(simulation.store)
}

/// Plays a world until memledger ends for the first time, and from then on without it. Returns what is shown at the end of the world by who
/// reads the host and the stored ledger, and what a memledger that is started then has recorded.
pub(crate) fn play_without_serve(world: &World) -> (MemoryStore, MemoryStore) {
    let mut simulation = Simulation::new(world);
    simulation.step(0, false);
    let (mut at, mut has_ended) = (0, false);
    for (pause, restarts, _) in &world.steps {
        at += pause;
        if !has_ended {
            simulation.step(at, false);
            has_ended = *restarts;
        }
    }
    at = at.max(world.last_exit()) + 60_000;
    simulation.resume(at);
    let replay = simulation.replay(at, true);
    let mut shown = simulation.store.events.clone();
    for (id, event) in
        replay.run(&simulation.store.contents, world.clocks(simulation.begin, at)).changes.events
    {
        match event {
            Some(event) => drop(shown.insert(id, event)),
            None => drop(shown.remove(&id)),
        }
    }
    simulation.restart(at);
    for _ in 0..120 {
        at += 500;
        simulation.step(at, false);
    }
    (MemoryStore { events: shown, ..MemoryStore::default() }, simulation.store)
}

/// Calls a function with each of these worlds.
pub(crate) fn for_each_world(
    complete: bool,
    cases: u32,
    holds: impl Fn(&World) -> Result<(), TestCaseError>,
) {
    let config = ProptestConfig {
        cases,
        failure_persistence: None,
        max_shrink_iters: 300,
        ..ProptestConfig::default()
    };
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[seed(); 32]);
    let mut runner = TestRunner::new_with_rng(config, rng);
    match runner.run(&world::world(complete), |world| holds(&world)) {
        Err(TestError::Fail(reason, world)) => panic!("{reason}\n{world:?}"),
        Err(error) => panic!("{error}"),
        Ok(()) => {}
    }
}

/// Checks what /metrics would show: no figure above the truth, none that falls, and no container that vanishes.
fn figures_are_true(
    simulation: &mut Simulation<'_>,
    at: u64,
    shown: &mut BTreeMap<Arc<str>, u64>,
) -> Result<(), TestCaseError> {
    let world = simulation.world;
    let figures = simulation.reconciler.figures(world.clocks(simulation.begin, at));
    prop_assert!(figures.host_kills <= world.killed(at) + world.counted_wrongly());
    let now: BTreeMap<Arc<str>, u64> = figures
        .containers
        .iter()
        .map(|figures| (Arc::clone(&figures.identity.name), figures.kills.as_flattened().iter().sum()))
        .collect();
    for container in 0..world.runs.len() {
        let (name, id) = (World::name(container), World::id(container));
        let kills = |name: &str| now.get(name).copied().unwrap_or(0);
        let (found, truth) = (kills(&name) + kills(id.short()), world.killed_in(container, at));
        let kills: Vec<_> = simulation.store.kills().collect();
        prop_assert!(
            found <= truth + world.counted_wrongly(),
            "{} has {} of {} at {}: {:?}",
            name,
            found,
            truth,
            at,
            kills
        );
    }
    for (name, kills) in &*shown {
        prop_assert!(now.get(name).is_some_and(|now| now >= kills), "{} had {} at {}", name, kills, at);
    }
    *shown = now;
    Ok(())
}

/// Returns the kills of containers, under their names or, if no runtime reported one, their short ids.
fn container_kills(store: &MemoryStore, world: &World) -> u64 {
    let totals = store.totals();
    let names = (0..world.runs.len()).flat_map(|n| [World::name(n), World::id(n).short().to_owned()]);
    names.map(|name| figures(&totals, &name).kills.as_flattened().iter().sum::<u64>()).sum()
}

/// Checks what holds in every world.
pub(crate) fn totals_are_consistent(store: &MemoryStore, world: &World) -> Result<(), TestCaseError> {
    let truth = world.killed(u64::MAX);
    let host = store.total(Total::Host);
    prop_assert!(host.abs_diff(truth) <= world.counted_wrongly(), "the kernel's counter is complete");
    let ownerless = [Total::HostProcess, Total::HostProcessAtLimit, Total::Unattributed];
    let all = container_kills(store, world) + ownerless.map(|total| store.total(total)).iter().sum::<u64>();
    prop_assert_eq!(host, all, "every kill has an owner or is unattributed");
    prop_assert_eq!(store.kills().count() as u64, host, "one event per kill");
    let records = store.kills().filter(|kill| kill.kernel_usec.is_some()).count() as u64;
    prop_assert_eq!(records + store.total(Total::WithoutRecord), host);
    prop_assert!(store.events.values().all(LedgerEvent::settled), "no event stays pending");
    let exits = || {
        store
            .events
            .values()
            .filter_map(|event| if let LedgerEvent::Exit(exit) = event { Some(exit) } else { None })
    };
    for exit in exits() {
        let of_pod = matches!(world.sources.kind, world::Runtime::Pods { .. });
        prop_assert!(!(exit.requests_known && of_pod), "pods report no requests: {:?}", exit);
        let is_oom = matches!(exit.reason, Some(ExitReason::OomContainer | ExitReason::OomHost));
        prop_assert_eq!(exit.ended_by.is_some(), is_oom, "the kill that ended it is known: {:?}", exit);
        let kills = exit.ended_by.iter().chain(&exit.may_be);
        for id in kills {
            prop_assert!(matches!(store.events.get(id), Some(LedgerEvent::OomKill(_))), "{} is no kill", id);
        }
        let recorded = store.runs.get(&exit.id).map(|run| run.exit_reason);
        prop_assert_eq!(recorded, Some(exit.reason), "the run has the reason of its event: {:?}", exit);
        let of_name = exits().filter(|other| other.subject.identity == exit.subject.identity);
        let same = of_name.filter(|other| other.reason == exit.reason).count() as u64;
        let counted = store.totals().figures(&exit.subject.identity).exits;
        let place = ExitReason::ALL.iter().position(|reason| Some(*reason) == exit.reason);
        prop_assert_eq!(
            place.map(|place| counted[place]),
            Some(same),
            "metrics have the reasons of the events"
        );
    }
    prop_assert!(store.contents.pending_kills.is_empty(), "no pending note remains");
    let seconds = world.kills.iter().filter(|kill| kill.repeated.is_some()).count() as u64;
    prop_assert_eq!(store.total(Total::Duplicates), seconds);
    Ok(())
}

/// Checks what holds if every source is complete.
pub(crate) fn attribution_is_exact(store: &MemoryStore, world: &World) -> Result<(), TestCaseError> {
    for container in 0..world.runs.len() {
        let own = |main: bool, scope| {
            let is = |kill: &&world::TrueKill| {
                kill.owner.is_some_and(|(owner, _)| owner == container)
                    && kill.main == main
                    && kill.scope == scope
            };
            world.kills.iter().filter(is).count() as u64
        };
        let figures = figures(&store.totals(), &World::name(container));
        for (victim, main) in [(Victim::Main, true), (Victim::Child, false)] {
            for scope in [OomScope::Container, OomScope::Host] {
                let reported = figures.kills[victim as usize][scope as usize];
                let victims: Vec<_> = store.kills().map(|kill| (kill.pid, kill.victim)).collect();
                let text = format!("{container} {victim:?} {scope:?} of {victims:?}");
                prop_assert_eq!(reported, own(main, scope), "{}", text);
            }
        }
        let reported: Vec<ExitReason> =
            store.exits(container).iter().map(|exit| exit.reason.unwrap_or(ExitReason::Unknown)).collect();
        prop_assert!(
            world.has_reasons(container, &reported),
            "exits of {}: {:?} instead of {:?}",
            container,
            reported,
            world.reasons(container)
        );
        prop_assert_eq!(figures.restarts, world.runs[container].len() as u64 - 1);
    }
    prop_assert_eq!(store.total(Total::Unattributed), 0);
    Ok(())
}

pub(crate) fn check(
    complete: bool,
    cases: u32,
    holds: impl Fn(&MemoryStore, &World) -> Result<(), TestCaseError>,
) {
    for_each_world(complete, cases, |world| holds(&play(world)?, world));
}
