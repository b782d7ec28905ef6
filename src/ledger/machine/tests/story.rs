//! What a single story is told with. Times are seconds since it began.

use std::sync::Arc;
use std::time::Duration;

use super::{Kept, figures};
use crate::clock::Moment;
use crate::collect::kernel_log::{Entry, Position};
use crate::collect::oom_cgroups::Reading;
use crate::config::Filter;
use crate::discover::{Container, ContainerId, Fact, Identity, Inventory, Named, What};
use crate::ledger::desk::{Handed, Held};
use crate::ledger::entries::{Exit, Kill, Reason, Victim, Whose};
use crate::ledger::machine::{Hint, Machine, Setup};
use crate::parse::kernel_log::{Context, Killed, Line};

pub const KILLED: Option<i64> = Some(137);

pub struct Story {
    pub begin: Moment,
    pub machine: Machine,
    pub kept: Kept,
    filter: Filter,
    lines: u64,
}

pub fn id(letter: char) -> ContainerId {
    ContainerId::new(&letter.to_string().repeat(64))
}

pub fn path(letter: char) -> String {
    format!("/docker/{}", id(letter).as_str())
}

fn machine(kept: &Kept, filter: &Filter, now: Moment) -> Machine {
    let setup = Setup {
        boot_id: "boot".into(),
        keep_ended: Duration::from_secs(60),
        filter: filter.clone(),
        host_pids: true,
        ..Setup::default()
    };
    Machine::new(setup, &kept.contents, now, now.kernel_usec())
}

impl Story {
    pub fn new() -> Self {
        Self::filtered(Filter::default())
    }

    pub fn filtered(filter: Filter) -> Self {
        let begin = Moment::now();
        let kept = Kept::default();
        let mut story = Self { begin, machine: machine(&kept, &filter, begin), kept, filter, lines: 0 };
        story.settle(0.0);
        story
    }

    pub fn at(&self, seconds: f64) -> Moment {
        self.begin.plus(Duration::from_secs_f64(seconds))
    }

    pub fn settle(&mut self, seconds: f64) {
        let (changes, _) = self.machine.settle(self.at(seconds));
        self.kept.commit(changes);
    }

    pub fn restart(&mut self, seconds: f64) {
        self.machine = machine(&self.kept, &self.filter, self.at(seconds));
    }

    /// What a runtime tells of the container a, b, ...: when it happened, and what.
    pub fn tell(&mut self, letter: char, happened: f64, what: What) {
        self.tell_late(letter, happened, happened, what);
    }

    pub fn tell_late(&mut self, letter: char, happened: f64, told: f64, what: What) {
        let named =
            Named { name: letter.to_string().into(), pod: None, image: "".into(), labels_match: true };
        self.tell_named(letter, happened, told, Some(named), what);
    }

    pub fn tell_named(&mut self, letter: char, happened: f64, told: f64, named: Option<Named>, what: What) {
        let at = self.begin.unix_seconds() + happened;
        let fact = Fact { runtime: "docker", id: id(letter), at, named, what };
        self.machine.tell(self.at(told), &[fact]);
    }

    pub fn end(&mut self, letter: char, at: f64, exit_code: Option<i64>) {
        self.tell(letter, at, What::Ended { exit_code, oom_flag: None });
    }

    pub fn log(&mut self, at: f64, lines: Vec<(Line, Hint)>) {
        let usec = self.at(at).kernel_usec();
        let mut entries = Vec::new();
        for (line, hint) in lines {
            self.lines += 1;
            let position = Position { sequence: Some(self.lines), usec: usec + self.lines };
            entries.push((Entry { position, line, text: Arc::from("a line") }, hint));
        }
        let position = entries.last().map_or(Position::default(), |(entry, _)| entry.position);
        self.machine.log(self.at(at), Some(&entries), position);
    }

    /// A kill with what the kernel and /proc say.
    pub fn kill(&mut self, at: f64, pid: u32, context: Option<&str>, hint: Hint) {
        let mut lines = Vec::new();
        if let Some(path) = context {
            let task_cgroups = path.split(" or ").map(str::to_owned).collect();
            lines.push((Line::Context(Context { task_cgroups, ..Context::default() }), Hint::default()));
        }
        lines.push((Line::Killed(killed(pid)), hint));
        self.log(at, lines);
    }

    /// A kill of which nothing is known but the name of its process.
    pub fn kill_called(&mut self, at: f64, pid: u32, process: &str) {
        let killed = Killed { process: process.into(), ..killed(pid) };
        self.log(at, vec![(Line::Killed(killed), Hint::default())]);
    }

    pub fn kill_in(&mut self, letter: char, at: f64, pid: u32) {
        self.kill(at, pid, Some(&path(letter)), Hint::default());
    }

    pub fn counters(&mut self, at: f64, counters: &[(char, u64)]) {
        let reading = |(letter, kills): &(char, u64)| Reading {
            id: Some(id(*letter)),
            path: format!("docker/{letter}"),
            inode: u64::from(*letter as u32),
            kills: *kills,
            fresh: true,
        };
        let readings: Vec<_> = counters.iter().map(reading).collect();
        self.machine.sweep(self.at(at), &readings, false);
    }

    pub fn see(&mut self, at: f64, running: &[(char, Option<f64>)], runtimes: &[(&'static str, bool)]) {
        self.see_as(at, running, runtimes, |letter| letter.to_string());
    }

    /// The same under other names; the short id is none.
    pub fn see_as(
        &mut self,
        at: f64,
        running: &[(char, Option<f64>)],
        runtimes: &[(&'static str, bool)],
        name: impl Fn(char) -> String,
    ) {
        let runtime = runtimes.first().map_or("", |(runtime, _)| runtime);
        let container = |(letter, started): &(char, Option<f64>)| {
            Arc::new(Container {
                id: id(*letter),
                identity: Identity::named(&name(*letter)),
                runtime,
                pod: None,
                image: "".into(),
                compose_project: "".into(),
                compose_service: "".into(),
                settings: vec![],
                gpus: Arc::default(),
                started: started.map(|started| self.begin.unix_seconds() + started),
                cgroup: None,
                nested: false,
            })
        };
        let containers: Vec<_> = running.iter().map(container).collect();
        let inventory = Arc::new(Inventory { containers, runtimes: runtimes.to_vec() });
        let containers = vec![Held::default(); running.len()];
        let handed = Handed { at: self.at(at), inventory, containers, host_memory: None };
        self.machine.see(self.at(at), &handed);
    }

    pub fn last_kill(&self) -> &Kill {
        self.kept.kills().last().expect("a kill")
    }

    pub fn owner(&self) -> Option<String> {
        match &self.last_kill().whose {
            Whose::Container(subject) => Some(subject.name.container_name.to_string()),
            _ => None,
        }
    }

    pub fn exits(&self, letter: char) -> Vec<&Exit> {
        self.kept.exits_of(&id(letter))
    }

    pub fn reasons(&self, letter: char) -> Vec<Option<Reason>> {
        self.exits(letter).iter().map(|exit| exit.reason).collect()
    }

    /// Kills of a container: of the main process, and of children.
    /// Containers that have figures in /metrics.
    pub fn shown(&self, seconds: f64) -> Vec<String> {
        let figures = self.machine.figures(self.at(seconds)).containers;
        figures.iter().map(|container| container.name.container_name.to_string()).collect()
    }

    pub fn counted(&self, name: &str) -> (u64, u64) {
        let kills = figures(&self.kept.totals(), name).kills;
        let of = |victim: Victim| kills[victim as usize].iter().sum::<u64>();
        (of(Victim::Main), of(Victim::Child))
    }
}

pub fn killed(pid: u32) -> Killed {
    Killed { pid, process: "python".into(), ..Killed::default() }
}

pub fn runs(pid: u32) -> What {
    What::Running { pid: Some(pid) }
}

pub fn asked(signal: i32) -> What {
    What::Asked { signal: Some(signal) }
}
