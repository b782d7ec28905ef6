//! Builds single scenarios. Times are seconds since their start.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::{MemoryStore, figures};
use crate::clock::{ClockStep, Timestamp};
use crate::config::Filter;
use crate::discover::{
    Cgroup, Container, ContainerId, ContainerSpec, EventKind, Identity, Inventory, RuntimeEvent, RuntimeKind,
};
use crate::events::{Exit, ExitReason, Kill, KillOwner, Victim};
use crate::ledger::exchange::{CycleReport, GpuUse};
use crate::ledger::interval::LogClock;
use crate::ledger::reconcile::{ProcInfo, Reconciler, ReconcilerConfig};
use crate::ledger::sources::cgroup_oom_events::CounterReading;
use crate::ledger::sources::kernel_log::{LogEntry, LogPosition};
use crate::parse::kernel_log::kills::KillAssembler;
use crate::parse::kernel_log::{Killed, Line, OomContext};
use crate::runs::RunRecord;
use crate::runs::usage::ContainerUsage;

pub const KILLED: Option<i64> = Some(137);
/// Docker is connected.
pub const DOCKER_UP: [(RuntimeKind, bool); 1] = [(RuntimeKind::Docker, true)];

pub struct Story {
    pub begin: Timestamp,
    pub reconciler: Reconciler,
    pub store: MemoryStore,
    /// Usage of all containers in the next cycles.
    pub usage: ContainerUsage,
    /// Inode of their cgroups in the next cycles; without one they have no cgroup.
    pub cgroup_inode: Option<u64>,
    /// Total and available memory of the host in the next cycles.
    pub host_memory: Option<(u64, u64)>,
    /// GPUs in the next cycles.
    pub gpus: Vec<GpuUse>,
    /// Seconds by which the kernel log's clock is ahead.
    pub drift: f64,
    filter: Filter,
    boot: (String, f64),
    /// The connected runtimes, with when they were connected.
    connected: BTreeMap<RuntimeKind, f64>,
    clock: LogClock,
    /// The lines of the current block.
    pub block: KillAssembler,
    lines: u64,
}

pub fn id(letter: char) -> ContainerId {
    ContainerId::new(&letter.to_string().repeat(64))
}

pub fn path(letter: char) -> String {
    format!("/docker/{}", id(letter).as_str())
}

fn reconciler(store: &MemoryStore, filter: &Filter, boot: &(String, f64), now: Timestamp) -> Reconciler {
    let setup = ReconcilerConfig {
        boot_id: boot.0.as_str().into(),
        booted_at: boot.1,
        keep_ended: Duration::from_secs(60),
        filter: filter.clone(),
        host_pids: true,
        ..ReconcilerConfig::default()
    };
    Reconciler::new(setup, &store.contents, now, now.kernel_usec())
}

impl Story {
    pub fn new() -> Self {
        Self::filtered(Filter::default())
    }

    pub fn filtered(filter: Filter) -> Self {
        let begin = Timestamp::hours_after_boot(4);
        let store = MemoryStore::default();
        let boot = ("boot".to_owned(), 0.0);
        let reconciler = reconciler(&store, &filter, &boot, begin);
        let (usage, drift) = (ContainerUsage::default(), 0.0);
        let mut clock = LogClock::default();
        clock.caught_up(begin);
        let mut story = Self {
            begin,
            reconciler,
            store,
            usage,
            cgroup_inode: None,
            host_memory: None,
            gpus: vec![],
            drift,
            filter,
            boot,
            connected: BTreeMap::new(),
            clock,
            block: KillAssembler::default(),
            lines: 0,
        };
        story.settle(0.0);
        story
    }

    pub fn at(&self, seconds: f64) -> Timestamp {
        self.begin.plus(Duration::from_secs_f64(seconds))
    }

    /// Sets the wall clock; times from then on are by the new one.
    pub fn set_clock(&mut self, seconds: f64, by_millis: i64) {
        let before = self.at(seconds);
        self.begin = self.begin.with_wall_moved(by_millis);
        if let Some(step) = ClockStep::between(before, self.at(seconds)) {
            self.reconciler.correct_times(&step);
            self.store.events.values_mut().for_each(|event| event.correct_times(&step));
        }
    }

    pub fn settle(&mut self, seconds: f64) {
        let (changes, _) = self.reconciler.settle(self.at(seconds));
        self.store.commit(changes);
    }

    pub fn restart(&mut self, seconds: f64) {
        self.reconciler = reconciler(&self.store, &self.filter, &self.boot, self.at(seconds));
    }

    /// Starts memledger in a boot that began at this time.
    pub fn reboot(&mut self, seconds: f64) {
        self.boot = (format!("boot at {seconds}"), self.at(seconds).unix_seconds());
        self.restart(seconds);
    }

    /// Applies an event of the container a, b, ...
    pub fn event(&mut self, letter: char, happened: f64, what: EventKind) {
        self.late_event(letter, happened, happened, what);
    }

    pub fn late_event(&mut self, letter: char, happened: f64, reported: f64, what: EventKind) {
        let runtime_event = self.runtime_event(letter, happened, what);
        self.reconciler.apply_runtime_events(self.at(reported), &[runtime_event]);
    }

    pub fn named_event(
        &mut self,
        letter: char,
        happened: f64,
        reported: f64,
        named: Option<ContainerSpec>,
        what: EventKind,
    ) {
        let named = named.map(Arc::new);
        let runtime_event = RuntimeEvent { named, ..self.runtime_event(letter, happened, what) };
        self.reconciler.apply_runtime_events(self.at(reported), &[runtime_event]);
    }

    /// Returns an event of the container a, b, ... by its name.
    pub fn runtime_event(&self, letter: char, happened: f64, what: EventKind) -> RuntimeEvent {
        let named = ContainerSpec {
            name: letter.to_string().into(),
            pod: None,
            image: "".into(),
            labels_match: true,
            ..ContainerSpec::default()
        };
        let at = self.begin.unix_seconds() + happened;
        RuntimeEvent {
            runtime: RuntimeKind::Docker,
            socket: Arc::default(),
            id: id(letter),
            at,
            named: Some(Arc::new(named)),
            what,
        }
    }

    pub fn end(&mut self, letter: char, at: f64, exit_code: Option<i64>) {
        self.event(letter, at, EventKind::Ended { exit_code, oom_flag: None });
    }

    pub fn log(&mut self, at: f64, lines: Vec<(Line, ProcInfo)>) {
        self.log_read(at, at, lines);
    }

    /// Applies lines that were logged at one time and read at another.
    pub fn log_read(&mut self, logged: f64, at: f64, lines: Vec<(Line, ProcInfo)>) {
        self.log_read_together(at, vec![(logged, lines)]);
    }

    /// Applies lines that were logged at several times and read at once.
    pub fn log_read_together(&mut self, at: f64, all: Vec<(f64, Vec<(Line, ProcInfo)>)>) {
        let (mut entries, mut infos) = (Vec::new(), Vec::new());
        for (logged, lines) in all {
            let usec = self.at(logged).kernel_usec().saturating_add_signed((self.drift * 1e6) as i64);
            for (line, proc_info) in lines {
                self.lines += 1;
                let position = LogPosition { sequence: Some(self.lines), usec: usec + self.lines };
                entries.push(LogEntry { position, line, text: Arc::from("a line"), report: None });
                infos.push(proc_info);
            }
        }
        let last = entries.last().map_or(LogPosition::default(), |entry| entry.position);
        let mut observed = Vec::new();
        for ((entry, written), proc_info) in std::iter::zip(self.clock.place(entries, self.at(at)), infos) {
            observed.extend(super::observed(&mut self.block, entry, written, proc_info));
        }
        self.clock.caught_up(self.at(at));
        self.reconciler.apply_log(self.at(at), Some(&observed), last);
    }

    /// Applies a kill with the data of the kernel log and of /proc.
    pub fn kill(&mut self, at: f64, pid: u32, context: Option<&str>, hint: ProcInfo) {
        let mut lines = Vec::new();
        if let Some(path) = context {
            let task_cgroups = path.split(" or ").map(str::to_owned).collect();
            lines.push((
                Line::Context(OomContext { task_cgroups, ..OomContext::default() }),
                ProcInfo::default(),
            ));
        }
        lines.push((Line::Killed(killed(pid)), hint));
        self.log(at, lines);
    }

    pub fn kill_in(&mut self, letter: char, at: f64, pid: u32) {
        self.kill(at, pid, Some(&path(letter)), ProcInfo::default());
    }

    pub fn counters(&mut self, at: f64, counters: &[(char, u64)]) {
        let reading = |(letter, kills): &(char, u64)| CounterReading {
            id: id(*letter),
            path: format!("docker/{letter}").into(),
            inode: u64::from(*letter as u32),
            kills: *kills,
            fresh: true,
        };
        let readings: Vec<_> = counters.iter().map(reading).collect();
        self.reconciler.apply_cgroup_counters(self.at(at), self.at(at), &readings, false);
    }

    pub fn cycle(&mut self, at: f64, running: &[(char, Option<f64>)], runtimes: &[(RuntimeKind, bool)]) {
        self.cycle_as(at, running, runtimes, |letter| letter.to_string());
    }

    /// Like `cycle`, but with other names; the short id counts as no name.
    pub fn cycle_as(
        &mut self,
        at: f64,
        running: &[(char, Option<f64>)],
        runtimes: &[(RuntimeKind, bool)],
        name: impl Fn(char) -> String,
    ) {
        for (runtime, is_up) in runtimes {
            if *is_up {
                self.connected.entry(*runtime).or_insert(self.begin.unix_seconds() + at);
            } else {
                self.connected.remove(runtime);
            }
            let live = is_up.then_some(Path::new("")).into_iter();
            self.reconciler.set_connection(*runtime, self.connected.get(runtime).copied(), live);
        }
        let handed = self.report(at, running, runtimes, name);
        self.reconciler.apply_cycle(self.at(at), &handed);
    }

    /// Returns what a cycle reports.
    pub fn report(
        &self,
        at: f64,
        running: &[(char, Option<f64>)],
        runtimes: &[(RuntimeKind, bool)],
        name: impl Fn(char) -> String,
    ) -> CycleReport {
        let runtime = runtimes.first().map_or(RuntimeKind::Docker, |(runtime, _)| *runtime);
        let container = |(letter, started): &(char, Option<f64>)| {
            let cgroup = |inode| {
                Arc::new(Cgroup { path: path(*letter).into(), inode, below: vec![], is_truncated: false })
            };
            Arc::new(Container {
                id: id(*letter),
                runtime,
                cgroup: self.cgroup_inode.map(|inode| cgroup(Some(inode))),
                started: started.map(|started| self.begin.unix_seconds() + started),
                ..Container::known_by_name(Identity::named(&name(*letter)))
            })
        };
        let containers: Vec<_> = running.iter().map(container).collect();
        let inventory =
            Arc::new(Inventory { containers, runtimes: runtimes.to_vec(), ..Inventory::default() });
        let usage = Arc::new(self.usage.clone());
        let containers = running.iter().map(|_| Arc::clone(&usage)).collect();
        CycleReport {
            at: self.at(at),
            inventory,
            containers,
            host_memory: self.host_memory,
            gpus: self.gpus.clone(),
        }
    }

    pub fn last_kill(&self) -> &Kill {
        self.store.kills().last().expect("a kill")
    }

    pub fn owner(&self) -> Option<String> {
        match &self.last_kill().owner {
            KillOwner::Container(subject) => Some(subject.identity.name.to_string()),
            _ => None,
        }
    }

    pub fn exits(&self, letter: char) -> Vec<&Exit> {
        self.store.exits_of(&id(letter))
    }

    /// Returns the record of the last run that ended.
    pub fn run_record(&self) -> &RunRecord {
        self.store.runs.values().next_back().expect("a record")
    }

    /// Returns the stored record of the run in progress, as it is after a crash of memledger.
    pub fn stored_record(&self, letter: char) -> RunRecord {
        let known = &self.store.contents.containers[&id(letter)];
        known.record_of_running(&id(letter)).expect("a run in progress")
    }

    pub fn reasons(&self, letter: char) -> Vec<Option<ExitReason>> {
        self.exits(letter).iter().map(|exit| exit.reason).collect()
    }

    /// Returns the containers that have figures in /metrics.
    pub fn shown(&self, seconds: f64) -> Vec<String> {
        let figures = self.reconciler.figures(self.at(seconds)).containers;
        figures.iter().map(|container| container.identity.name.to_string()).collect()
    }

    pub fn counted(&self, name: &str) -> (u64, u64) {
        let kills = figures(&self.store.totals(), name).kills;
        let of = |victim: Victim| kills[victim as usize].iter().sum::<u64>();
        (of(Victim::Main), of(Victim::Child))
    }
}

pub fn killed(pid: u32) -> Killed {
    Killed { pid, process: "python".into(), ..Killed::default() }
}

pub fn running(pid: u32) -> EventKind {
    EventKind::Running { pid: Some(pid) }
}

pub fn stop_request(signal: i32) -> EventKind {
    EventKind::SignalRequested { signal: Some(signal) }
}
