//! A simulated world for the property tests: containers with runs, processes that are killed, and what each available
//! source reports about that. Times are milliseconds since the start of the world.

use std::sync::Arc;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;

use crate::clock::Timestamp;
use crate::collect::cgroup_oom_events::CounterReading;
use crate::collect::kernel_log::{LogEntry, LogPosition};
use crate::discover::{ContainerDetails, ContainerId, EventKind, RuntimeEvent};
use crate::ledger::events::{ExitReason, OomScope};
use crate::ledger::reconcile::ProcInfo;
use crate::parse::kernel_log::{Killed, Line, OomContext};

/// How a run ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    Lives,
    Completed,
    Error,
    Crash,
    Stopped,
    DockerKill,
    KilledFromOutside,
    Oom(OomScope),
}

impl Ending {
    /// Exit code and reason.
    fn truth(self) -> Option<(i64, ExitReason)> {
        Some(match self {
            Ending::Lives => return None,
            Ending::Completed => (0, ExitReason::Completed),
            Ending::Error => (1, ExitReason::Error),
            Ending::Crash => (139, ExitReason::Signal),
            Ending::Stopped => (143, ExitReason::Stopped),
            Ending::DockerKill => (137, ExitReason::Stopped),
            Ending::KilledFromOutside => (137, ExitReason::Killed),
            Ending::Oom(OomScope::Container) => (137, ExitReason::OomContainer),
            Ending::Oom(OomScope::Host) => (137, ExitReason::OomHost),
        })
    }
}

/// The evidence that a kill leaves.
#[derive(Clone, Copy, Debug)]
pub struct Trace {
    pub context: bool,
    pub hint: bool,
    pub lost: bool,
    pub log_lag: u64,
    /// The victim has the pid of a first process that ended before.
    pub reuses_pid: bool,
    /// Number of its process name.
    pub name: usize,
}

/// An actual kill.
#[derive(Clone, Debug)]
pub struct TrueKill {
    pub at: u64,
    pub pid: u32,
    /// Container and run; `None`: a process of the host.
    pub owner: Option<(usize, usize)>,
    pub main: bool,
    pub scope: OomScope,
    pub trace: Trace,
    pub group: Group,
    /// When it is logged.
    pub logged: u64,
    /// When it is logged and counted again: the chosen victim of a group.
    pub repeated: Option<u64>,
}

/// What `memory.oom.group` makes of a kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    None,
    /// The victim that the kernel chose, with which the others of its cgroup are killed.
    Chosen,
    Member,
}

/// An actual run.
#[derive(Clone, Debug)]
pub struct TrueRun {
    pub start: u64,
    pub end: Option<u64>,
    pub pid: u32,
    pub ending: Ending,
}

impl TrueRun {
    /// Returns true if it lasts long enough for the runtime to report the pid of its first process.
    fn reports_pid(&self) -> bool {
        self.end.is_none_or(|end| end > self.start + 200)
    }
}

/// Which sources can be read, and their delay.
#[derive(Clone, Copy, Debug)]
pub struct Sources {
    pub log: bool,
    pub vmstat: bool,
    pub cgroups: bool,
    pub runtime: bool,
    pub runtime_lag: u64,
    /// Drift of the log's clock, in percent of the largest one that is tolerated.
    pub drift: i64,
    /// Records are read when they are logged, as by the thread that waits for the device, instead of once per step.
    pub reads_at_once: bool,
    /// A cgroup's counter includes those below it.
    pub hierarchical: bool,
}

#[derive(Clone, Debug)]
pub struct World {
    pub runs: Vec<Vec<TrueRun>>,
    pub kills: Vec<TrueKill>,
    pub sources: Sources,
    /// When ten OOMs found a victim that was exiting already: ten contexts without a kill.
    pub skipped: Vec<u64>,
    /// When the wall clock is set, and by how many milliseconds.
    pub clock_step: Option<(u64, i64)>,
    /// Hours since the boot of the host.
    pub uptime_hours: u64,
    /// The ledger is kept in a real store.
    pub is_on_disk: bool,
    /// Pauses between steps in milliseconds, whether memledger restarts after the step, and whether the changes of the
    /// step were lost in the restart.
    pub steps: Vec<(u64, bool, bool)>,
}

/// Names of processes.
const NAMES: [&str; 3] = ["python", "pt_data_worker", "sh"];

type RunPlan = (u64, Vec<(u64, Trace)>, u64, Ending, Trace, Option<GroupPlan>);

/// The children that are killed with the first process, and whether that is the chosen victim.
type GroupPlan = (Vec<Trace>, bool);

fn trace(complete: bool) -> impl Strategy<Value = Trace> {
    let identity = (prop::bool::weighted(0.2), 0_usize..NAMES.len());
    (any::<bool>(), prop::bool::weighted(0.2), 0_u64..200, identity).prop_map(
        move |(hint, lost, log_lag, (reuses_pid, name))| Trace {
            context: true,
            hint,
            lost: lost && !complete,
            log_lag,
            reuses_pid,
            name,
        },
    )
}

fn ending() -> impl Strategy<Value = Ending> {
    prop_oneof![
        1 => Just(Ending::Lives),
        1 => Just(Ending::Completed),
        1 => Just(Ending::Error),
        1 => Just(Ending::Crash),
        1 => Just(Ending::Stopped),
        1 => Just(Ending::DockerKill),
        1 => Just(Ending::KilledFromOutside),
        3 => Just(Ending::Oom(OomScope::Container)),
        1 => Just(Ending::Oom(OomScope::Host)),
    ]
}

fn run(complete: bool) -> impl Strategy<Value = RunPlan> {
    let children = vec((prop_oneof![0_u64..20, 50_u64..3_000], trace(complete)), 0..3);
    let group = prop::option::weighted(0.3, (vec(trace(complete), 0..4), any::<bool>()));
    (100_u64..4_000, children, prop_oneof![60_u64..500, 500_u64..8_000], ending(), trace(complete), group)
}

/// Returns a world; if it is `complete`, every source is available and complete.
pub fn world(complete: bool) -> impl Strategy<Value = World> {
    let clock = (prop_oneof![Just(0), -90_i64..90], prop::bool::weighted(0.7), any::<bool>());
    let sources = (any::<[bool; 3]>(), prop::bool::weighted(0.7), 0_u64..1_500, clock).prop_map(
        move |([log, vmstat, cgroups], runtime, runtime_lag, (drift, reads_at_once, hierarchical))| Sources {
            // read once per step, records tell little of the clock, and the run of some kills is a guess
            drift: if complete && !reads_at_once { 0 } else { drift },
            reads_at_once,
            hierarchical,
            log: log || complete,
            vmstat: vmstat || complete,
            cgroups: cgroups || complete,
            runtime: runtime || complete,
            runtime_lag: if complete { runtime_lag.min(400) } else { runtime_lag },
        },
    );
    let containers = vec(vec(run(complete), 1..4), 2..5);
    let hosts = vec((0_u64..15_000, trace(complete)), 0..4);
    let step = (1_u64..900, prop::bool::weighted(0.08), any::<bool>());
    let skipped = vec(0_u64..15_000, 0..4);
    let at_once = prop::option::weighted(0.3, (1_000_u64..8_000, any::<bool>()));
    let clock_step = prop::option::weighted(0.2, (1_000_u64..15_000, -1_800_000_i64..1_800_000));
    let uptime_hours = prop_oneof![Just(4_u64), Just(30), Just(1_000)];
    let settings = (skipped, at_once, clock_step, uptime_hours, prop::bool::weighted(0.1));
    let plans = (containers, hosts, sources, settings, vec(step, 60..100));
    plans.prop_map(move |(mut containers, hosts, sources, settings, steps)| {
        let (mut skipped, at_once, clock_step, uptime_hours, is_on_disk) = settings;
        let clock_step = clock_step.filter(|_| !complete);
        if let Some((rest, is_rate_limited)) = at_once {
            kill_two_groups_at_once(&mut containers, rest);
            skipped.extend(is_rate_limited.then_some(rest)); // shortly before
        }
        let mut world = World {
            runs: vec![],
            kills: vec![],
            sources,
            skipped,
            clock_step,
            uptime_hours,
            is_on_disk,
            steps,
        };
        for plans in containers {
            world.add_container(plans);
        }
        for (at, trace) in hosts {
            world.add_kill(at, None, false, OomScope::Host, trace, Group::None);
        }
        world.kills.sort_by_key(|kill| kill.at);
        for number in 1..world.kills.len() {
            let before = world.kills[number - 1].at;
            world.kills[number].at = world.kills[number].at.max(before + 1); // one at a time: the kernel holds a lock
        }
        let mut logged = 0;
        for kill in &mut world.kills {
            logged = (logged + 1).max(kill.at + kill.trace.log_lag);
            kill.logged = logged;
        }
        if complete {
            world.log_before_exits();
        }
        world.repeat_chosen_victims();
        world.separate_skipped();
        world.apply_rate_limit(complete);
        world.reuse_pids();
        world
    })
}

/// Makes two containers lose all processes in the same millisecond.
fn kill_two_groups_at_once(containers: &mut [Vec<RunPlan>], after: u64) {
    for plans in &mut containers[..2] {
        let (pause, children, rest, ending, _, group) = &mut plans[0];
        (*pause, *rest, *ending) = (100, after, Ending::Oom(OomScope::Container));
        children.clear();
        group.get_or_insert((vec![], true));
    }
}

impl World {
    /// Removes the context of kills beyond ten in five seconds, and of the members of a group, which have none. In a
    /// complete world /proc shows the cgroup of those that no line names for certain.
    fn apply_rate_limit(&mut self, complete: bool) {
        let mut headers: Vec<u64> = self.skipped.iter().flat_map(|at| [*at; 10]).collect();
        for kill in &mut self.kills {
            let recent = |seconds: u64| {
                let window = kill.logged.saturating_sub(seconds)..=kill.logged;
                headers.iter().filter(|at| window.contains(at)).count()
            };
            kill.trace.context = kill.group != Group::Member && recent(5_000) < 10;
            kill.trace.hint |= complete && !kill.trace.context && recent(5_200) >= 10;
            headers.extend(kill.trace.context.then_some(kill.logged));
        }
    }

    /// Moves the blocks without a kill out of those of groups: the kernel holds a lock until a block ends.
    fn separate_skipped(&mut self) {
        for skipped in &mut self.skipped {
            for kill in self.kills.iter().rev() {
                let last = kill.repeated.unwrap_or(kill.logged);
                if kill.group != Group::None && (kill.logged.saturating_sub(1)..=last).contains(skipped) {
                    *skipped = kill.logged.saturating_sub(1);
                }
            }
        }
    }

    /// Logs the chosen victim of each group again after its last member. Without the log, or if a record is lost, a
    /// second one cannot be distinguished from a kill.
    fn repeat_chosen_victims(&mut self) {
        for chosen in 0..self.kills.len() {
            let rest = self.kills[chosen + 1..].iter().take_while(|kill| kill.group == Group::Member);
            let group: Vec<&TrueKill> = std::iter::once(&self.kills[chosen]).chain(rest).collect();
            let is_known = self.sources.log && group.iter().all(|kill| !kill.trace.lost);
            let last = group[group.len() - 1].logged;
            let is_chosen = self.kills[chosen].group == Group::Chosen;
            self.kills[chosen].repeated = (is_chosen && is_known).then_some(last);
        }
    }

    /// Logs the kill of a first process before its exit, unless its pid is reported: a record that is stamped after the
    /// exit, or even in the next run, differs from a kill in the next run only by that pid. The kernel logs a kill
    /// within microseconds, and an exit takes the runtime milliseconds.
    fn log_before_exits(&mut self) {
        let mut next = u64::MAX;
        for kill in self.kills.iter_mut().rev() {
            let run = kill.owner.filter(|_| kill.main).map(|(container, run)| &self.runs[container][run]);
            let exit = run.filter(|run| !run.reports_pid()).and_then(|run| run.end);
            kill.logged = kill.logged.min(next - 1).min(exit.unwrap_or(u64::MAX));
            next = kill.logged;
        }
    }

    /// Gives victims the pid of a first process that ended a while before, each once: the kernel assigns a pid again
    /// when all others were assigned, and processes that live at the same time have different ones.
    fn reuse_pids(&mut self) {
        let mut reused = Vec::new();
        for kill in self.kills.iter_mut().filter(|kill| kill.trace.reuses_pid && !kill.main) {
            let is_free = |run: &&TrueRun| {
                run.end.is_some_and(|end| end + 6_000 < kill.at) && !reused.contains(&run.pid)
            };
            if let Some(run) = self.runs.iter().flatten().find(is_free) {
                kill.pid = run.pid;
                reused.push(run.pid);
            }
        }
    }

    fn add_container(&mut self, plans: Vec<RunPlan>) {
        let (container, mut at) = (self.runs.len(), 0);
        let mut runs = Vec::new();
        for (number, (pause, children, rest, ending, trace, group)) in plans.into_iter().enumerate() {
            at += pause;
            let start = at;
            at += 50;
            for (after, trace) in &children {
                at += after;
                let owner = Some((container, number));
                self.add_kill(at, owner, false, OomScope::Container, *trace, Group::None);
            }
            // within five seconds SIGKILL's status would be taken for the child's, as documented
            at += if ending == Ending::KilledFromOutside { rest + 6_000 } else { rest };
            let pid = (1_000 + container * 100 + number) as u32;
            if let Ending::Oom(scope) = ending {
                self.add_last_kills(at, (container, number), scope, trace, group);
                at += 60;
            }
            let end = (ending != Ending::Lives).then_some(at);
            runs.push(TrueRun { start, end, pid, ending });
            if end.is_none() {
                break;
            }
        }
        self.runs.push(runs);
    }

    /// Kills the first process of a run, alone or with a group.
    fn add_last_kills(
        &mut self,
        at: u64,
        owner: (usize, usize),
        scope: OomScope,
        trace: Trace,
        group: Option<GroupPlan>,
    ) {
        let Some((others, is_first_chosen)) = group else {
            return self.add_kill(at, Some(owner), true, scope, trace, Group::None);
        };
        let mut members: Vec<(bool, Trace)> = others.into_iter().map(|trace| (false, trace)).collect();
        let first = if is_first_chosen { 0 } else { members.len() };
        members.insert(first, (true, trace));
        for (number, (is_main, trace)) in members.into_iter().enumerate() {
            let role = if number == 0 { Group::Chosen } else { Group::Member };
            self.add_kill(at, Some(owner), is_main, scope, trace, role);
        }
    }

    fn add_kill(
        &mut self,
        at: u64,
        owner: Option<(usize, usize)>,
        main: bool,
        scope: OomScope,
        trace: Trace,
        group: Group,
    ) {
        let main_pid = owner.filter(|_| main).map(|(container, run)| (1_000 + container * 100 + run) as u32);
        let pid = main_pid.unwrap_or(5_000 + self.kills.len() as u32);
        self.kills.push(TrueKill { at, pid, owner, main, scope, trace, group, logged: at, repeated: None });
    }

    /// Returns what the clocks show then.
    pub fn clocks(&self, begin: Timestamp, at: u64) -> Timestamp {
        let step = self.clock_step.filter(|(when, _)| at >= *when).map_or(0, |(_, by)| by);
        begin.plus(Duration::from_millis(at)).with_wall_moved(step)
    }

    /// Returns the number of kills that may be counted twice or for another container: one, of the moment in which the clock is set.
    pub fn counted_wrongly(&self) -> u64 {
        u64::from(self.clock_step.is_some())
    }

    /// Returns the number of kills until then.
    pub fn killed(&self, at: u64) -> u64 {
        self.kills.iter().filter(|kill| kill.at <= at).count() as u64
    }

    /// Returns the number of kills in this container until then.
    pub fn killed_in(&self, container: usize, at: u64) -> u64 {
        let is_own =
            |kill: &&TrueKill| kill.owner.is_some_and(|(owner, _)| owner == container) && kill.at <= at;
        self.kills.iter().filter(is_own).count() as u64
    }

    /// Returns the counter of /proc/vmstat, which includes second lines.
    pub fn vmstat(&self, at: u64) -> Option<u64> {
        let is_repeated = |kill: &&TrueKill| kill.repeated.is_some_and(|repeated| repeated <= at);
        let repeated = self.kills.iter().filter(is_repeated).count() as u64;
        self.sources.vmstat.then(|| 40 + self.killed(at) + repeated)
    }

    pub fn id(container: usize) -> ContainerId {
        ContainerId::new(&format!("{container:x}").repeat(64))
    }

    pub fn name(container: usize) -> String {
        format!("job{container}")
    }

    /// Returns true if a record that was logged until then, after a position, was overwritten.
    pub fn has_lost_records(&self, begin: Timestamp, after: u64, at: u64) -> bool {
        let lost = |kill: &&TrueKill| kill.trace.lost && kill.logged <= at;
        self.kills.iter().filter(lost).any(|kill| self.stamp(begin, kill.logged) > after)
    }

    /// Returns the kernel log until then, after a position. `None`: it cannot be read.
    pub fn log(&self, begin: Timestamp, after: u64, at: u64) -> Option<Vec<(LogEntry, ProcInfo)>> {
        if !self.sources.log {
            return None;
        }
        let mut entries = Vec::new();
        for kill in self.kills.iter().filter(|kill| !kill.trace.lost && kill.logged <= at) {
            entries.extend(self.lines(begin, kill, at));
        }
        for logged in self.skipped.iter().filter(|logged| **logged <= at) {
            let usec = self.stamp(begin, *logged) + 100;
            for number in 0..10 {
                let task_cgroups = vec![format!("/docker/{}", Self::id(0).as_str())];
                let context = OomContext { task_cgroups, pid: Some(9_999), ..OomContext::default() };
                for (place, line) in [Line::Invoked, Line::Context(context)].into_iter().enumerate() {
                    let usec = usec + 2 * number + place as u64;
                    let position = LogPosition { sequence: Some(usec), usec };
                    entries.push((
                        LogEntry { position, line, text: "a line".into(), report: None },
                        ProcInfo::default(),
                    ));
                }
            }
        }
        entries.sort_by_key(|(entry, _)| entry.position.usec);
        entries.retain(|(entry, _)| entry.position.usec > after);
        Some(entries)
    }

    /// Returns the stamps of records until then, after a position, that have nothing to do with OOM: those of the network
    /// devices of a container that starts.
    pub fn other_stamps(&self, begin: Timestamp, after: u64, at: u64) -> Vec<u64> {
        let starts = self.runs.iter().flatten().map(|run| run.start);
        let logged = starts.flat_map(|start| start..start + 3).filter(|logged| *logged <= at);
        logged.map(|logged| self.stamp(begin, logged)).filter(|usec| *usec > after).collect()
    }

    /// Returns the stamp of a record that is logged then.
    pub fn stamp(&self, begin: Timestamp, logged: u64) -> u64 {
        self.stamp_of_begin(begin) + logged * 1_000
    }

    /// Returns when a record with this stamp is logged.
    pub fn logged(&self, begin: Timestamp, usec: u64) -> u64 {
        usec.saturating_sub(self.stamp_of_begin(begin)) / 1_000
    }

    fn stamp_of_begin(&self, begin: Timestamp) -> u64 {
        let tolerated = begin.kernel_usec() as i64 / 10_000;
        begin.kernel_usec().saturating_add_signed(tolerated * self.sources.drift / 100)
    }

    fn lines(&self, begin: Timestamp, kill: &TrueKill, at: u64) -> Vec<(LogEntry, ProcInfo)> {
        let path = match kill.owner {
            Some((container, _)) => format!("/docker/{}", Self::id(container).as_str()),
            None => "/system.slice/cron.service".to_owned(),
        };
        let entry_at = |logged: u64, number: u64, line: Line| {
            let usec = self.stamp(begin, logged) + number;
            let position = LogPosition { sequence: Some(usec), usec };
            LogEntry { position, line, text: Arc::from("a line"), report: None }
        };
        let entry = |number: u64, line: Line| entry_at(kill.logged, number, line);
        let mut lines = Vec::new();
        if kill.trace.context {
            lines.push((entry(0, Line::Invoked), ProcInfo::default()));
            let context = OomContext {
                global: kill.scope == OomScope::Host,
                task_cgroups: vec![path.clone()],
                oom_cgroup: (kill.scope == OomScope::Container).then(|| path.clone()),
                pid: Some(kill.pid),
            };
            lines.push((entry(1, Line::Context(context)), ProcInfo::default()));
        }
        let killed = || {
            Line::Killed(Killed {
                pid: kill.pid,
                process: NAMES[kill.trace.name].into(),
                global: Some(kill.scope == OomScope::Host),
                ..Killed::default()
            })
        };
        let hint = ProcInfo { cgroup: kill.trace.hint.then(|| path.clone()), ..ProcInfo::default() };
        lines.push((entry(2, killed()), hint));
        if kill.group == Group::Chosen {
            lines.push((entry(3, Line::Group { path }), ProcInfo::default()));
        }
        if let Some(repeated) = kill.repeated.filter(|repeated| *repeated <= at) {
            lines.push((entry_at(repeated, 4, killed()), ProcInfo::default()));
        }
        lines
    }

    /// Returns the counters of the cgroups that exist then.
    pub fn readings(&self, at: u64, first_sweep: u64) -> Vec<CounterReading> {
        let mut readings = Vec::new();
        for (container, runs) in self.runs.iter().enumerate().filter(|_| self.sources.cgroups) {
            for (number, run) in runs.iter().enumerate() {
                if run.start <= at && run.end.is_none_or(|end| at < end) {
                    let own = |kill: &&TrueKill| kill.owner == Some((container, number)) && kill.at <= at;
                    let is_repeated = |kill: &TrueKill| kill.repeated.is_some_and(|repeated| repeated <= at);
                    let count = |kill| 1 + u64::from(is_repeated(kill));
                    let kills = self.kills.iter().filter(own).map(count).sum();
                    readings.push(CounterReading {
                        id: Self::id(container),
                        path: format!("docker/{container}"),
                        inode: (container * 100 + number) as u64,
                        kills,
                        fresh: run.start > first_sweep,
                    });
                }
            }
        }
        readings
    }

    /// Returns the runtime's events between these times, in order.
    pub fn runtime_events(&self, begin: Timestamp, after: u64, at: u64) -> Vec<RuntimeEvent> {
        let mut runtime_events: Vec<(u64, RuntimeEvent)> = Vec::new();
        for (container, runs) in self.runs.iter().enumerate().filter(|_| self.sources.runtime) {
            let mut add = |when: u64, what| {
                runtime_events.push((when, self.runtime_event(begin, container, when, what)))
            };
            for (number, run) in runs.iter().enumerate() {
                add(run.start, EventKind::Started);
                if run.reports_pid() {
                    add(run.start + 100, EventKind::Running { pid: Some(run.pid) });
                }
                for kill in self.kills.iter().filter(|kill| kill.owner == Some((container, number))) {
                    add(kill.at, EventKind::Oom);
                }
                let Some((end, (code, _))) = run.end.zip(run.ending.truth()) else { continue };
                match run.ending {
                    Ending::Stopped => add(end - 30, EventKind::SignalRequested { signal: Some(15) }),
                    Ending::DockerKill => add(end - 30, EventKind::SignalRequested { signal: Some(9) }),
                    _ => {}
                }
                add(end, EventKind::Ended { exit_code: Some(code), oom_flag: Some(false) });
                if run.ending == Ending::Stopped {
                    add(end + 1, EventKind::SignalRequested { signal: None });
                }
            }
        }
        runtime_events.sort_by_key(|(when, _)| *when);
        let reported = runtime_events.into_iter().filter(|(when, _)| (after..at).contains(when));
        reported.map(|(_, runtime_event)| runtime_event).collect()
    }

    /// Returns one event; `Running` has the time of the start.
    pub fn runtime_event(
        &self,
        begin: Timestamp,
        container: usize,
        when: u64,
        what: EventKind,
    ) -> RuntimeEvent {
        let when = if matches!(what, EventKind::Running { .. }) { when - 100 } else { when };
        RuntimeEvent {
            runtime: "docker",
            id: Self::id(container),
            at: self.clocks(begin, when).unix_seconds(),
            named: Some(ContainerDetails {
                name: Self::name(container).into(),
                pod: None,
                image: "image".into(),
                labels_match: true,
            }),
            what,
        }
    }

    /// Returns the reasons of a container's exits.
    pub fn reasons(&self, container: usize) -> Vec<ExitReason> {
        self.runs[container].iter().filter_map(|run| run.ending.truth().map(|(_, reason)| reason)).collect()
    }
}
