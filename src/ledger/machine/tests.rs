//! The machine against a true world ([`world`]): whatever the sources say late, twice or not at all, and whenever
//! memledger is killed, the counts are right where one source saw all, and never too high.

mod pods;
mod stories;
mod story;
mod world;

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestError, TestRng, TestRunner};

use super::*;
use crate::ledger::entries::{Exit, Name, Reason, Victim};
use world::World;

/// So many worlds: some seconds.
const CASES: u32 = 60;

/// A store that keeps what it is given.
#[derive(Debug, Default)]
struct Kept {
    events: BTreeMap<u64, Event>,
    contents: Contents,
}

impl Kept {
    fn commit(&mut self, changes: Changes) {
        self.contents.totals.extend(changes.totals);
        for (key, value) in changes.notes {
            match value {
                Some(value) => self.contents.notes.insert(key, value),
                None => self.contents.notes.remove(&key),
            };
        }
        self.events.extend(changes.events);
        self.contents.unsettled = self.events.values().filter(|event| !event.settled()).cloned().collect();
        self.contents.last_id = self.events.keys().next_back().copied().unwrap_or(0);
    }

    fn totals(&self) -> Totals {
        Totals::new(&self.contents)
    }

    fn total(&self, total: Total) -> u64 {
        self.totals().get(total)
    }

    fn kills(&self) -> impl Iterator<Item = &Kill> {
        self.events.values().filter_map(|event| match event {
            Event::OomKill(kill) => Some(kill),
            Event::Exit(_) | Event::GpuError(_) => None,
        })
    }

    fn exits(&self, container: usize) -> Vec<&Exit> {
        self.exits_of(&World::id(container))
    }

    fn exits_of(&self, id: &ContainerId) -> Vec<&Exit> {
        let exits = self.events.values().filter_map(|event| match event {
            Event::Exit(exit) => Some(exit),
            Event::OomKill(_) | Event::GpuError(_) => None,
        });
        let mut exits: Vec<_> = exits.filter(|exit| *exit.subject.container_id == *id.as_str()).collect();
        exits.sort_by(|one, other| one.at.total_cmp(&other.at));
        exits
    }
}

/// memledger in that world: a step as the ledger's thread makes it.
struct Player<'a> {
    world: &'a World,
    begin: Moment,
    machine: Machine,
    kept: Kept,
    read_to: u64,
    told_to: u64,
    first_sweep: Option<u64>,
    swept: Option<u64>,
}

impl<'a> Player<'a> {
    fn new(world: &'a World) -> Self {
        let begin = Moment::now();
        let machine = Self::start(&Kept::default(), begin);
        Self {
            world,
            begin,
            machine,
            kept: Kept::default(),
            read_to: begin.kernel_usec(),
            told_to: 0,
            first_sweep: None,
            swept: None,
        }
    }

    fn start(kept: &Kept, now: Moment) -> Machine {
        let setup = Setup {
            boot_id: "boot".into(),
            keep_ended: Duration::from_secs(3600),
            host_pids: true,
            ..Setup::default()
        };
        Machine::new(setup, &kept.contents, now, now.kernel_usec())
    }

    fn restart(&mut self, at: u64) {
        let now = self.begin.plus(Duration::from_millis(at));
        self.machine = Self::start(&self.kept, now);
        self.read_to = self.machine.position().map_or(self.begin.kernel_usec(), |position| position.usec);
        let since = self.machine.since().get("docker").copied();
        // the runtime is asked from a second before the last event
        let since = since.map_or(0.0, |since| (since - self.begin.unix_seconds()) * 1_000.0 - 1_000.0);
        self.told_to = since.max(0.0) as u64;
        (self.first_sweep, self.swept) = (None, None);
    }

    fn step(&mut self, at: u64, is_lost: bool) {
        let (world, now) = (self.world, self.begin.plus(Duration::from_millis(at)));
        let told = at.saturating_sub(world.sources.runtime_lag).max(self.told_to);
        self.machine.tell(now, &world.facts(self.begin, self.told_to, told));
        self.told_to = told;
        let entries = world.log(self.begin, self.read_to, at);
        if let Some(last) = entries.iter().flatten().next_back() {
            self.read_to = last.0.position.usec;
        }
        let position = Position { sequence: Some(self.read_to), usec: self.read_to };
        self.machine.log(now, entries.as_deref(), position);
        let counter = world.vmstat(at);
        if self.machine.wants_sweep() || self.swept.is_none_or(|swept| at >= swept + 1_000) {
            let first = *self.first_sweep.get_or_insert(at);
            self.swept = Some(at);
            self.machine.sweep(now, &world.readings(at, first), false);
        }
        self.machine.counted(now, counter);
        let (changes, _) = self.machine.settle(now);
        if !is_lost {
            self.kept.commit(changes);
        }
    }
}

fn figures(totals: &Totals, name: &str) -> ContainerFigures {
    totals.figures(&Name { container_name: name.into(), ..Name::default() })
}

/// All counts, none of which may fall.
fn counts(kept: &Kept, world: &World) -> Vec<u64> {
    let totals = kept.totals();
    let mut counts: Vec<u64> =
        [Total::Host, Total::HostProcess, Total::Unattributed, Total::Gaps, Total::Duplicates]
            .map(|total| totals.get(total))
            .to_vec();
    for container in 0..world.runs.len() {
        let figures = figures(&totals, &World::name(container));
        counts.extend(figures.kills.as_flattened());
        counts.extend(figures.exits);
        counts.push(figures.restarts);
    }
    counts
}

/// Lives through a world, and returns what is in the store at its end.
fn live(world: &World) -> Result<Kept, TestCaseError> {
    let mut player = Player::new(world);
    player.step(0, false);
    let (mut at, mut before) = (0, counts(&player.kept, world));
    let quiet = std::iter::repeat_n(&(500, false, false), 120);
    for (pause, restarts, is_lost) in world.steps.iter().chain(quiet) {
        at += pause;
        player.step(at, *restarts && *is_lost);
        if *restarts {
            player.restart(at);
        }
        let after = counts(&player.kept, world);
        prop_assert!(before.iter().zip(&after).all(|(one, other)| one <= other), "a count fell at {at}");
        prop_assert!(after[0] <= world.killed(at), "{} of {} at {at}", after[0], world.killed(at));
        before = after;
    }
    Ok(player.kept)
}

/// Kills of containers, under their names or, where nobody told one, their short ids.
fn of_containers(kept: &Kept, world: &World) -> u64 {
    let totals = kept.totals();
    let names = (0..world.runs.len()).flat_map(|n| [World::name(n), World::id(n).short().to_owned()]);
    names.map(|name| figures(&totals, &name).kills.as_flattened().iter().sum::<u64>()).sum()
}

/// What must hold in every world.
fn the_sums_are_right(kept: &Kept, world: &World) -> Result<(), TestCaseError> {
    let truth = world.killed(u64::MAX);
    let host = kept.total(Total::Host);
    let log_is_complete = world.sources.log && !world.kills.iter().any(|kill| kill.trace.lost);
    if world.sources.vmstat || log_is_complete {
        prop_assert_eq!(host, truth, "one source saw all");
    }
    let all = of_containers(kept, world) + kept.total(Total::HostProcess) + kept.total(Total::Unattributed);
    prop_assert_eq!(host, all, "every kill is somebody's or nobody's");
    prop_assert_eq!(kept.kills().count() as u64, host, "an event for each");
    let records = kept.kills().filter(|kill| kill.kernel_usec.is_some()).count() as u64;
    prop_assert_eq!(records + kept.total(Total::Gaps), host);
    prop_assert!(kept.events.values().all(Event::settled), "nothing stays open");
    prop_assert!(!kept.contents.notes.keys().any(|key| key.starts_with(OPEN_KEY)), "nothing is left behind");
    let seconds = world.kills.iter().filter(|kill| kill.twice).count() as u64;
    prop_assert_eq!(kept.total(Total::Duplicates), seconds);
    Ok(())
}

/// What must hold where every source says all.
fn everything_is_told_rightly(kept: &Kept, world: &World) -> Result<(), TestCaseError> {
    for container in 0..world.runs.len() {
        let own = |main: bool, scope| {
            let is = |kill: &&world::TrueKill| {
                kill.owner.is_some_and(|(owner, _)| owner == container)
                    && kill.main == main
                    && kill.scope == scope
            };
            world.kills.iter().filter(is).count() as u64
        };
        let figures = figures(&kept.totals(), &World::name(container));
        for (victim, main) in [(Victim::Main, true), (Victim::Child, false)] {
            for scope in [Scope::Container, Scope::Host] {
                let told = figures.kills[victim as usize][scope as usize];
                prop_assert_eq!(told, own(main, scope), "{} {:?} {:?}", container, victim, scope);
            }
        }
        let told: Vec<Reason> =
            kept.exits(container).iter().map(|exit| exit.reason.unwrap_or(Reason::Unknown)).collect();
        prop_assert_eq!(told, world.reasons(container), "ends of {}", container);
        prop_assert_eq!(figures.restarts, world.runs[container].len() as u64 - 1);
    }
    prop_assert_eq!(kept.total(Total::Unattributed), 0);
    Ok(())
}

fn check(complete: bool, cases: u32, holds: impl Fn(&Kept, &World) -> Result<(), TestCaseError>) {
    let config = ProptestConfig {
        cases,
        failure_persistence: None,
        max_shrink_iters: 300,
        ..ProptestConfig::default()
    };
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let outcome = runner.run(&world::world(complete), |world| holds(&live(&world)?, &world));
    match outcome {
        Err(TestError::Fail(reason, world)) => panic!("{reason}\n{world:?}"),
        Err(error) => panic!("{error}"),
        Ok(()) => {}
    }
}

#[test]
fn counts_are_true_where_one_source_saw_all_and_never_too_high() {
    check(false, CASES, the_sums_are_right);
}

#[test]
fn where_every_source_says_all_every_kill_and_every_end_is_told_rightly() {
    check(true, CASES, |kept, world| {
        the_sums_are_right(kept, world)?;
        everything_is_told_rightly(kept, world)
    });
}
