//! A simulated world for the property tests: containers with runs, processes that are killed, and what each available
//! source reports about that. Times are milliseconds since the start of the world.

mod cgroups;
mod sources;

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;

use crate::clock::Timestamp;
use crate::discover::{ContainerId, RuntimeKind};
use crate::events::{ExitReason, OomScope};

/// How a run ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    StillRunning,
    Completed,
    Error,
    Crash,
    Stopped,
    DockerKill,
    KilledFromOutside,
    Oom(OomScope),
}

impl Ending {
    /// Exit code and reason. Without requests to stop, only the signal is known.
    fn truth(self, runtime: Runtime) -> Option<(i64, ExitReason)> {
        Some(match self {
            Ending::Stopped if !runtime.has_requests() => (143, ExitReason::Signal),
            Ending::DockerKill if !runtime.has_requests() => (137, ExitReason::Killed),
            Ending::StillRunning => return None,
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
    /// The victim is the child of a shell, and is gone so long after the kill; 0: it is the first process itself.
    pub teardown: u64,
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
    /// The begin of the next block may be missing, so that what follows may be no member of its group.
    pub is_rate_limited: bool,
}

/// What `memory.oom.group` makes of a kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    None,
    /// The victim that the kernel chose, with which the others of its cgroup are killed.
    Chosen,
    Member,
}

/// Returns whether a status with this reason may be that of a killed child.
fn is_open(reason: ExitReason) -> bool {
    matches!(reason, ExitReason::Killed | ExitReason::Signal)
}

/// Milliseconds for which an end with an error may follow from a kill in its run.
const CAUSE_WINDOW: u64 = 300_000;
/// A victim that ends a run is gone so soon that its exit is explained without a cycle that saw it meanwhile.
const MAX_TEARDOWN_OVER_RESTART: u64 = 4_800;

/// A request to stop is so long before the exit.
pub const STOP_REQUEST: u64 = 30;

/// A container that restarts fast has at least so many runs.
const LOOP_RUNS: usize = 6;

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

/// The runtime of all containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runtime {
    /// Docker with one socket.
    Docker,
    /// Docker with two sockets, each of which has every other container.
    TwoSockets,
    /// Pods: nothing reports requests to stop, and some versions no reason of an exit.
    Pods { with_reasons: bool },
}

impl Runtime {
    /// Returns the runtime.
    pub fn runtime(self) -> RuntimeKind {
        match self {
            Runtime::Docker | Runtime::TwoSockets => RuntimeKind::Docker,
            Runtime::Pods { .. } => RuntimeKind::Cri,
        }
    }

    /// Returns its sockets.
    pub fn sockets(self) -> &'static [&'static str] {
        match self {
            Runtime::Docker => &["/docker.sock"],
            Runtime::TwoSockets => &["/one.sock", "/two.sock"],
            Runtime::Pods { .. } => &[""],
        }
    }

    /// Returns the socket that reports a container.
    pub fn socket_of(self, container: usize) -> &'static str {
        self.sockets()[container % self.sockets().len()]
    }

    pub fn has_requests(self) -> bool {
        !matches!(self, Runtime::Pods { .. })
    }
}

/// Which sources can be read, and their delay.
#[derive(Clone, Copy, Debug)]
pub struct Sources {
    pub log: bool,
    pub cgroups: bool,
    /// The runtime reports events.
    pub runtime: bool,
    pub kind: Runtime,
    pub runtime_lag: u64,
    /// Drift of the log's clock, in percent of the largest one that is tolerated.
    pub drift: i64,
    /// Records are read when they are logged, as by the thread that waits for the device, instead of once per step.
    pub reads_at_once: bool,
    /// A cgroup's counter includes those below it.
    pub hierarchical: bool,
    /// Cycles list the containers with their processes.
    pub cycles: bool,
}

#[derive(Clone, Debug)]
pub struct World {
    pub runs: Vec<Vec<TrueRun>>,
    pub kills: Vec<TrueKill>,
    pub sources: Sources,
    /// The container in which all others are.
    pub outer: Option<usize>,
    /// When ten OOMs found a victim that was exiting already: ten contexts without a kill.
    pub skipped: Vec<u64>,
    /// When the wall clock is set, and by how many milliseconds.
    pub clock_step: Option<(u64, i64)>,
    /// When the machine is suspended, and for how many hours.
    pub suspend: Option<(u64, u64)>,
    /// The container that no runtime names.
    pub nameless: Option<usize>,
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
    let teardown = prop_oneof![3 => Just(0_u64), 1 => 200_u64..3_000, 1 => 3_000_u64..12_000];
    (any::<bool>(), prop::bool::weighted(0.2), 0_u64..200, teardown, identity).prop_map(
        move |(hint, lost, log_lag, teardown, (reuses_pid, name))| Trace {
            context: true,
            hint,
            lost: lost && !complete,
            log_lag,
            teardown,
            reuses_pid,
            name,
        },
    )
}

fn ending() -> impl Strategy<Value = Ending> {
    prop_oneof![
        1 => Just(Ending::StillRunning),
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

/// A run of a container that is restarted at once.
fn run_of_loop(complete: bool) -> impl Strategy<Value = RunPlan> {
    let ending = prop_oneof![
        2 => Just(Ending::Oom(OomScope::Container)),
        1 => Just(Ending::Error),
        1 => Just(Ending::DockerKill),
    ];
    (100_u64..400, 60_u64..500, ending, trace(complete))
        .prop_map(|(pause, rest, ending, trace)| (pause, vec![], rest, ending, trace, None))
}

/// Returns a world; if it is `complete`, every source is available and complete.
pub fn world(complete: bool) -> impl Strategy<Value = World> {
    let clock = (prop_oneof![Just(0), -90_i64..90], prop::bool::weighted(0.7), any::<[bool; 2]>());
    let kind = prop_oneof![
        2 => Just(Runtime::Docker),
        1 => Just(Runtime::TwoSockets),
        1 => any::<bool>().prop_map(|with_reasons| Runtime::Pods { with_reasons }),
    ];
    let sources = (any::<[bool; 2]>(), (prop::bool::weighted(0.7), kind), 0_u64..1_500, clock).prop_map(
        move |(
            [log, cgroups],
            (runtime, kind),
            runtime_lag,
            (drift, reads_at_once, [hierarchical, cycles]),
        )| {
            Sources {
                // read once per step, records tell little of the clock, and the run of some kills is a guess
                drift: if complete && !reads_at_once { 0 } else { drift },
                reads_at_once,
                hierarchical,
                cycles: cycles && (runtime || complete), // they list what the runtime reported
                log: log || complete,
                cgroups: cgroups || complete,
                runtime: runtime || complete,
                kind,
                runtime_lag: if complete { runtime_lag.min(400) } else { runtime_lag },
            }
        },
    );
    let few = vec(run(complete), 1..4);
    let runs = prop_oneof![4 => few, 1 => vec(run_of_loop(complete), LOOP_RUNS..20)];
    let containers = vec(runs, 2..5);
    let hosts = vec((1_u64..15_000, trace(complete)), 0..4); // the first read is at 0
    let pause = prop_oneof![40 => 1_u64..900, 1 => 5_000_u64..12_000];
    let step = (pause, prop::bool::weighted(0.08), any::<bool>());
    let skipped = vec(0_u64..15_000, 0..4);
    let at_once = prop::option::weighted(0.3, (1_000_u64..8_000, any::<bool>()));
    let clock_step = prop::option::weighted(0.2, (1_000_u64..15_000, -1_800_000_i64..1_800_000));
    let clock_step = (clock_step, prop::option::weighted(0.2, (1_000_u64..15_000, 1_u64..12)));
    let uptime_hours = prop_oneof![Just(4_u64), Just(30), Just(1_000)];
    let is_nested = prop::bool::weighted(0.3);
    let nameless = prop::option::weighted(0.2, 0_usize..2);
    let settings =
        (skipped, at_once, clock_step, uptime_hours, (prop::bool::weighted(0.1), is_nested, nameless));
    let plans = (containers, hosts, sources, settings, vec(step, 60..100));
    plans.prop_map(move |(mut containers, hosts, mut sources, settings, mut steps)| {
        let (mut skipped, at_once, clocks, uptime_hours, (is_on_disk, is_nested, nameless)) = settings;
        let (clock_step, suspend) = clocks;
        let clock_step = clock_step.filter(|_| !complete);
        let nameless = nameless.filter(|_| !complete && !is_nested); // inside another one its kills are those of that one
        // from a restart to the next step
        let was_away = steps.windows(2).any(|pair| pair[0].1 && pair[1].0 >= 5_000);
        if complete && (was_away || containers.iter().any(|plans| plans.len() >= LOOP_RUNS)) {
            sources.drift = 0; // of a kill while memledger was away, the run of 200 ms, or the end soon after it, would be a guess
        }
        if let Some((rest, is_rate_limited)) = at_once {
            kill_two_groups_at_once(&mut containers, rest);
            skipped.extend(is_rate_limited.then_some(rest)); // shortly before
        }
        let outer = (is_nested && sources.cycles).then_some(containers.len());
        if outer.is_some() {
            nest(&mut containers, &mut steps);
        }
        let mut world = World {
            runs: vec![],
            kills: vec![],
            sources,
            outer,
            skipped,
            clock_step,
            suspend,
            nameless,
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
        world.log_before_exits();
        world.repeat_chosen_victims();
        world.separate_skipped();
        world.apply_rate_limit(complete);
        world.separate_suspend();
        world.reuse_pids();
        // that a victim was still there long after its kill is seen by cycles, and none run while memledger is away
        if world.kills.iter().any(|kill| kill.trace.teardown > MAX_TEARDOWN_OVER_RESTART) {
            world.steps.iter_mut().for_each(|(_, restarts, _)| *restarts = false);
        }
        world
    })
}

/// Adds a container around the others, whose first kills are later than the cycle that lists them: before that, their cgroups are
/// parts of the outer container's.
fn nest(containers: &mut Vec<Vec<RunPlan>>, steps: &mut [(u64, bool, bool)]) {
    for (_, children, rest, ..) in containers.iter_mut().filter_map(|plans| plans.first_mut()) {
        *children.first_mut().map_or(rest, |(after, _)| after) += 4_000;
    }
    let (_, _, _, _, trace, _) = containers[0][0].clone();
    containers.push(vec![(1, vec![], 60, Ending::StillRunning, trace, None)]);
    steps.iter_mut().for_each(|(pause, ..)| *pause = (*pause).min(900));
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
            let window = kill.logged.saturating_sub(5_200)..=kill.logged;
            kill.is_rate_limited = headers.iter().filter(|at| window.contains(at)).count() >= 10;
        }
    }

    /// Moves the suspend out of the time between a kill or a request to stop, its record and its exit: these are milliseconds.
    fn separate_suspend(&mut self) {
        let Some((when, _)) = &mut self.suspend else { return };
        let of_kill = |kill: &TrueKill| {
            let run = kill.owner.filter(|_| kill.main).map(|(container, run)| &self.runs[container][run]);
            let exit = run.and_then(|run| run.end);
            (kill.at, kill.logged.max(kill.repeated.unwrap_or(0)).max(exit.unwrap_or(0)))
        };
        let of_stop = |run: &TrueRun| run.end.map(|end| (end - STOP_REQUEST, end + 1));
        let stops = self.runs.iter().flatten().filter_map(of_stop);
        let mut busy: Vec<(u64, u64)> = self.kills.iter().map(of_kill).chain(stops).collect();
        busy.sort_unstable();
        for (from, to) in busy {
            if (from..=to).contains(when) {
                *when = to + 1;
            }
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
            // that a container without a runtime has ended is known only seconds later
            let named =
                self.runs.iter().enumerate().filter(|(container, _)| self.nameless != Some(*container));
            if let Some(run) = named.flat_map(|(_, runs)| runs).find(is_free) {
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
            let is_from_outside = ending == Ending::KilledFromOutside
                || ending == Ending::DockerKill && !self.sources.kind.has_requests();
            at += if is_from_outside { rest + 6_000 } else { rest };
            let pid = (1_000 + container * 100 + number) as u32;
            if let Ending::Oom(scope) = ending {
                let teardown = self.teardown(&trace, group.is_some());
                let trace = Trace { teardown, ..trace };
                self.add_last_kills(at, (container, number), scope, trace, group);
                at += teardown + 60;
            }
            let end = (ending != Ending::StillRunning).then_some(at);
            runs.push(TrueRun { start, end, pid, ending });
            if end.is_none() {
                break;
            }
        }
        self.runs.push(runs);
    }

    /// Returns how long the victim that ends a run takes to be gone. Only cycles show that it is still there.
    fn teardown(&self, trace: &Trace, is_group: bool) -> u64 {
        // read once per step, a record says little of its time: a kill of the next run may have ended this one
        let most = if self.sources.cycles && self.sources.reads_at_once { u64::MAX } else { 2_500 };
        // a suspend between the kill and the exit is in the times of both
        if is_group || trace.teardown > most || self.suspend.is_some() { 0 } else { trace.teardown }
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
        let trace = if main { trace } else { Trace { teardown: 0, ..trace } };
        let is_first = main && trace.teardown == 0;
        let main_pid =
            owner.filter(|_| is_first).map(|(container, run)| (1_000 + container * 100 + run) as u32);
        let pid = main_pid.unwrap_or(5_000 + self.kills.len() as u32);
        let (logged, repeated, is_rate_limited) = (at, None, false);
        let kill = TrueKill { at, pid, owner, main, scope, trace, group, logged, repeated, is_rate_limited };
        self.kills.push(kill);
    }

    /// Returns what the clocks show then.
    pub fn clocks(&self, begin: Timestamp, at: u64) -> Timestamp {
        let step = self.clock_step.filter(|(when, _)| at >= *when).map_or(0, |(_, by)| by);
        let hours = self.suspend.filter(|(when, _)| at >= *when).map_or(0, |(_, hours)| hours);
        let suspended = Duration::from_secs(hours * 3600);
        begin.plus(Duration::from_millis(at)).with_suspended(suspended).with_wall_moved(step)
    }

    /// Returns the number of kills that may be counted twice or for another container: one, of the moment in which the clock is set.
    pub fn counted_wrongly(&self) -> u64 {
        u64::from(self.clock_step.is_some())
    }

    /// Returns when the last run ends that does.
    pub fn last_exit(&self) -> u64 {
        self.runs.iter().flatten().filter_map(|run| run.end).max().unwrap_or(0)
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
    pub fn vmstat(&self, at: u64) -> u64 {
        let is_repeated = |kill: &&TrueKill| kill.repeated.is_some_and(|repeated| repeated <= at);
        let repeated = self.kills.iter().filter(is_repeated).count() as u64;
        40 + self.killed(at) + repeated
    }

    pub fn id(container: usize) -> ContainerId {
        ContainerId::new(&format!("{container:x}").repeat(64))
    }

    pub fn name(container: usize) -> String {
        format!("job{container}")
    }

    /// Returns the reasons of a container's exits.
    pub fn reasons(&self, container: usize) -> Vec<ExitReason> {
        let ended =
            |(number, run): (usize, &TrueRun)| self.reasons_of(container, number, run).map(|(_, it)| it);
        self.runs[container].iter().enumerate().filter_map(ended).collect()
    }

    /// Returns true if these are the reasons. How long before an end a kill was is not known if the host was suspended between them, and
    /// of which run it was if the next one had begun when it was logged.
    pub fn has_reasons(&self, container: usize, reported: &[ExitReason]) -> bool {
        let ended = |(number, run): (usize, &TrueRun)| {
            let (of_status, reason) = self.reasons_of(container, number, run)?;
            let may_be_other = self.kills.iter().any(|kill| {
                let is_near = |its: usize| its == number || its + 1 == number;
                self.may_be_of_next_run(kill)
                    && kill.owner.is_some_and(|(of, its)| of == container && is_near(its))
            });
            let or_by_status = (self.suspend.is_some() || may_be_other).then_some(of_status);
            let or_after_kill = (may_be_other && is_open(of_status)).then_some(ExitReason::Error);
            Some([Some(reason), or_by_status, or_after_kill])
        };
        let truths: Vec<_> = self.runs[container].iter().enumerate().filter_map(ended).collect();
        let is_true =
            |(truths, reported): (&[Option<ExitReason>; 3], &ExitReason)| truths.contains(&Some(*reported));
        truths.len() == reported.len() && std::iter::zip(&truths, reported).all(is_true)
    }

    /// Returns whether a child was logged after the end of its run and so near to the start of the next one that it may be of that, whose start
    /// may be reported late: nothing but its time says of which it was.
    fn may_be_of_next_run(&self, kill: &TrueKill) -> bool {
        let Some((container, number)) = kill.owner else { return false };
        let end = self.runs[container][number].end;
        let next = self.runs[container].get(number + 1);
        let is_in_known_group = kill.group != Group::None && !kill.is_rate_limited;
        let is_near = next.is_some_and(|next| next.start < kill.logged + 5_000);
        !kill.main && !is_in_known_group && is_near && end.is_some_and(|end| end < kill.logged)
    }

    /// Returns the reason of an end by its status alone, and that with the kills before it.
    fn reasons_of(&self, container: usize, number: usize, run: &TrueRun) -> Option<(ExitReason, ExitReason)> {
        let (_, reason) = run.ending.truth(self.sources.kind)?;
        let has_lost = |kill: &TrueKill| {
            let age = run.end.map(|end| end.saturating_sub(kill.at));
            kill.owner == Some((container, number)) && age.is_some_and(|age| age <= CAUSE_WINDOW)
        };
        let is_after_kill = is_open(reason) && self.kills.iter().any(has_lost);
        Some((reason, if is_after_kill { ExitReason::Error } else { reason }))
    }
}
