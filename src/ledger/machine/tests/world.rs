//! A small true world for the property test: containers with runs, processes that are killed, and what each source would
//! say of that, if it is there at all. Times are milliseconds since the world began.

use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;

use crate::clock::Moment;
use crate::collect::kernel_log::{Entry, Position};
use crate::collect::oom_cgroups::Reading;
use crate::discover::{ContainerId, Fact, Named, What};
use crate::ledger::entries::{Reason, Scope};
use crate::ledger::machine::Hint;
use crate::parse::kernel_log::{Context, Killed, Line};

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
    Oom(Scope),
}

impl Ending {
    /// Exit code and reason.
    fn truth(self) -> Option<(i64, Reason)> {
        Some(match self {
            Ending::Lives => return None,
            Ending::Completed => (0, Reason::Completed),
            Ending::Error => (1, Reason::Error),
            Ending::Crash => (139, Reason::Signal),
            Ending::Stopped => (143, Reason::Stopped),
            Ending::DockerKill => (137, Reason::Stopped),
            Ending::KilledFromOutside => (137, Reason::Killed),
            Ending::Oom(Scope::Container) => (137, Reason::OomContainer),
            Ending::Oom(Scope::Host) => (137, Reason::OomHost),
        })
    }
}

/// What is left of one kill for the sources.
#[derive(Clone, Copy, Debug)]
pub struct Trace {
    pub context: bool,
    pub hint: bool,
    pub lost: bool,
    pub log_lag: u64,
}

/// One true kill.
#[derive(Clone, Debug)]
pub struct TrueKill {
    pub at: u64,
    pub pid: u32,
    /// Container and run; `None`: a process of the host.
    pub owner: Option<(usize, usize)>,
    pub main: bool,
    pub scope: Scope,
    pub trace: Trace,
    /// The kernel names it twice: `memory.oom.group`.
    pub twice: bool,
}

/// One true run.
#[derive(Clone, Debug)]
pub struct TrueRun {
    pub start: u64,
    pub end: Option<u64>,
    pub pid: u32,
    pub ending: Ending,
}

/// Which sources can be read, and how they lag.
#[derive(Clone, Copy, Debug)]
pub struct Sources {
    pub log: bool,
    pub vmstat: bool,
    pub cgroups: bool,
    pub runtime: bool,
    pub runtime_lag: u64,
}

#[derive(Clone, Debug)]
pub struct World {
    pub runs: Vec<Vec<TrueRun>>,
    pub kills: Vec<TrueKill>,
    pub sources: Sources,
    /// Pauses between steps in milliseconds, whether memledger is started anew after it, and whether that step's changes
    /// were lost with it.
    pub steps: Vec<(u64, bool, bool)>,
}

type RunPlan = (u64, Vec<(u64, Trace)>, u64, Ending, Trace, bool);

fn trace(complete: bool) -> impl Strategy<Value = Trace> {
    (any::<bool>(), any::<bool>(), prop::bool::weighted(0.2), 0_u64..200).prop_map(
        move |(context, hint, lost, log_lag)| Trace {
            context: context || (complete && !hint),
            hint,
            lost: lost && !complete,
            log_lag,
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
        3 => Just(Ending::Oom(Scope::Container)),
        1 => Just(Ending::Oom(Scope::Host)),
    ]
}

fn run(complete: bool) -> impl Strategy<Value = RunPlan> {
    let children = vec((prop_oneof![0_u64..20, 50_u64..3_000], trace(complete)), 0..3);
    let twice = prop::bool::weighted(0.2);
    (100_u64..4_000, children, prop_oneof![60_u64..500, 500_u64..8_000], ending(), trace(complete), twice)
}

/// A world; where it is `complete`, every source is there and says all.
pub fn world(complete: bool) -> impl Strategy<Value = World> {
    let sources = (any::<[bool; 3]>(), prop::bool::weighted(0.7), 0_u64..1_500).prop_map(
        move |([log, vmstat, cgroups], runtime, runtime_lag)| Sources {
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
    (containers, hosts, sources, vec(step, 60..100)).prop_map(|(containers, hosts, sources, steps)| {
        let mut world = World { runs: vec![], kills: vec![], sources, steps };
        for plans in containers {
            world.add_container(plans);
        }
        for (at, trace) in hosts {
            world.add_kill(at, None, false, Scope::Host, trace, false);
        }
        world.kills.sort_by_key(|kill| kill.at);
        for number in 1..world.kills.len() {
            let before = world.kills[number - 1].at;
            world.kills[number].at = world.kills[number].at.max(before + 1); // one at a time: the kernel holds a lock
        }
        world
    })
}

impl World {
    fn add_container(&mut self, plans: Vec<RunPlan>) {
        let (container, mut at) = (self.runs.len(), 0);
        let mut runs = Vec::new();
        for (number, (pause, children, rest, ending, trace, twice)) in plans.into_iter().enumerate() {
            at += pause;
            let start = at;
            at += 50;
            for (after, trace) in &children {
                at += after;
                self.add_kill(at, Some((container, number)), false, Scope::Container, *trace, false);
            }
            // within five seconds SIGKILL's status is taken for the child's: told so in the documents
            at += if ending == Ending::KilledFromOutside { rest + 6_000 } else { rest };
            let pid = (1_000 + container * 100 + number) as u32;
            if let Ending::Oom(scope) = ending {
                self.add_kill(at, Some((container, number)), true, scope, trace, twice);
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

    fn add_kill(
        &mut self,
        at: u64,
        owner: Option<(usize, usize)>,
        main: bool,
        scope: Scope,
        trace: Trace,
        twice: bool,
    ) {
        let main_pid = owner.filter(|_| main).map(|(container, run)| (1_000 + container * 100 + run) as u32);
        let pid = main_pid.unwrap_or(5_000 + self.kills.len() as u32);
        // a lost second line cannot be told from a kill by anybody
        let twice = twice && !trace.lost && self.sources.log;
        self.kills.push(TrueKill { at, pid, owner, main, scope, trace, twice });
    }

    /// Kills until then.
    pub fn killed(&self, at: u64) -> u64 {
        self.kills.iter().filter(|kill| kill.at <= at).count() as u64
    }

    /// The counter of /proc/vmstat, which counts the second line too.
    pub fn vmstat(&self, at: u64) -> Option<u64> {
        let seconds = self.kills.iter().filter(|kill| kill.at <= at && kill.twice).count() as u64;
        self.sources.vmstat.then(|| 40 + self.killed(at) + seconds)
    }

    pub fn id(container: usize) -> ContainerId {
        ContainerId::new(&format!("{container:x}").repeat(64))
    }

    pub fn name(container: usize) -> String {
        format!("job{container}")
    }

    /// The kernel log until then, behind a position. `None`: it cannot be read.
    pub fn log(&self, begin: Moment, after: u64, at: u64) -> Option<Vec<(Entry, Hint)>> {
        if !self.sources.log {
            return None;
        }
        let mut entries = Vec::new();
        let mut blocked = false; // the log is in order: nothing comes before what came earlier
        for kill in self.kills.iter().filter(|kill| !kill.trace.lost && kill.at <= at) {
            blocked |= kill.at + kill.trace.log_lag > at;
            if !blocked {
                entries.extend(self.lines(begin, kill));
            }
        }
        entries.retain(|(entry, _)| entry.position.usec > after);
        Some(entries)
    }

    fn lines(&self, begin: Moment, kill: &TrueKill) -> Vec<(Entry, Hint)> {
        let path = match kill.owner {
            Some((container, _)) => format!("/docker/{}", Self::id(container).as_str()),
            None => "/system.slice/cron.service".to_owned(),
        };
        let usec = begin.kernel_usec() + kill.at * 1_000;
        let entry = |number: u64, line: Line| Entry {
            position: Position { sequence: Some(usec + number), usec: usec + number },
            line,
            text: Arc::from("a line"),
        };
        let mut lines = Vec::new();
        if kill.trace.context {
            let context = Context {
                global: kill.scope == Scope::Host,
                task_cgroups: vec![path.clone()],
                oom_cgroup: (kill.scope == Scope::Container).then(|| path.clone()),
                pid: Some(kill.pid),
            };
            lines.push((entry(1, Line::Context(context)), Hint::default()));
        }
        let killed = || {
            Line::Killed(Killed {
                pid: kill.pid,
                process: "python".into(),
                global: Some(kill.scope == Scope::Host),
                ..Killed::default()
            })
        };
        let hint = Hint { cgroup: kill.trace.hint.then(|| path.clone()), ..Hint::default() };
        lines.push((entry(2, killed()), hint));
        if kill.twice {
            lines.push((entry(3, Line::Group { path }), Hint::default()));
            lines.push((entry(4, killed()), Hint::default()));
        }
        lines
    }

    /// The counters of the cgroups that are there then.
    pub fn readings(&self, at: u64, first_sweep: u64) -> Vec<Reading> {
        let mut readings = Vec::new();
        for (container, runs) in self.runs.iter().enumerate().filter(|_| self.sources.cgroups) {
            for (number, run) in runs.iter().enumerate() {
                if run.start <= at && run.end.is_none_or(|end| at < end) {
                    let own = |kill: &&TrueKill| kill.owner == Some((container, number)) && kill.at <= at;
                    let kills = self.kills.iter().filter(own).map(|kill| 1 + u64::from(kill.twice)).sum();
                    readings.push(Reading {
                        id: Some(Self::id(container)),
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

    /// What the runtime tells between these times, in order.
    pub fn facts(&self, begin: Moment, after: u64, at: u64) -> Vec<Fact> {
        let mut facts: Vec<(u64, Fact)> = Vec::new();
        for (container, runs) in self.runs.iter().enumerate().filter(|_| self.sources.runtime) {
            let mut tell = |when: u64, what| facts.push((when, Self::fact(begin, container, when, what)));
            for (number, run) in runs.iter().enumerate() {
                tell(run.start, What::Started);
                if run.end.is_none_or(|end| end > run.start + 200) {
                    tell(run.start + 100, What::Running { pid: Some(run.pid) });
                }
                for kill in self.kills.iter().filter(|kill| kill.owner == Some((container, number))) {
                    tell(kill.at, What::Oom);
                }
                let Some((end, (code, _))) = run.end.zip(run.ending.truth()) else { continue };
                match run.ending {
                    Ending::Stopped => tell(end - 30, What::Asked { signal: Some(15) }),
                    Ending::DockerKill => tell(end - 30, What::Asked { signal: Some(9) }),
                    _ => {}
                }
                tell(end, What::Ended { exit_code: Some(code), oom_flag: Some(false) });
                if run.ending == Ending::Stopped {
                    tell(end + 1, What::Asked { signal: None });
                }
            }
        }
        facts.sort_by_key(|(when, _)| *when);
        let told = facts.into_iter().filter(|(when, _)| (after..at).contains(when));
        told.map(|(_, fact)| fact).collect()
    }

    /// One fact; that a container runs is told with the time of its start.
    pub fn fact(begin: Moment, container: usize, when: u64, what: What) -> Fact {
        let when = if matches!(what, What::Running { .. }) { when - 100 } else { when };
        Fact {
            runtime: "docker",
            id: Self::id(container),
            at: begin.unix_seconds() + when as f64 / 1_000.0,
            named: Some(Named {
                name: Self::name(container).into(),
                pod: None,
                image: "image".into(),
                labels_match: true,
            }),
            what,
        }
    }

    /// Reasons of the ends of a container.
    pub fn reasons(&self, container: usize) -> Vec<Reason> {
        self.runs[container].iter().filter_map(|run| run.ending.truth().map(|(_, reason)| reason)).collect()
    }
}
