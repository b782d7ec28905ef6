//! Which events of a container are of one run.

use super::{RunSummary, cuda_oom, same_container};
use crate::discover::same_start;
use crate::events::{ContainerRef, Exit, Kill, KillOwner, LedgerEvent};
use crate::lifecycle::timing::{EXIT_WINDOW, MIN_PAUSE};

/// Returns the run of an event of `subject`.
pub(super) fn run_of<'a>(
    events: &'a [LedgerEvent],
    event: &'a LedgerEvent,
    subject: &'a ContainerRef,
) -> RunSummary<'a> {
    let of_container = ContainerEvents { events, subject };
    let run = of_container.run_of(event);
    let belongs = |kill: &&Kill| match (&kill.owner, run.exit) {
        // the ledger knows no run of it, and has said of each end which kills may be its reason
        (KillOwner::Container(its), Some(exit)) if has_decided(exit, its) => {
            exit.ended_by == Some(kill.id) || exit.may_be.contains(&kill.id)
        }
        (KillOwner::Container(its), _) => run.has(its, kill.at),
        _ => run.has_time(kill.at),
    };
    let cuda_ooms = events.iter().filter_map(|event| match event {
        LedgerEvent::CudaOom(oom) if same_container(&oom.subject, subject) => Some(oom),
        _ => None,
    });
    let may_have_ended = |event: &&LedgerEvent| {
        event.subject().is_none() && run.exit.is_some_and(|exit| exit.may_be.contains(&event.id()))
    };
    let unattributed_kills = events.iter().filter(may_have_ended).filter_map(|event| match event {
        LedgerEvent::OomKill(kill) => Some(kill),
        _ => None,
    });
    RunSummary {
        exit: run.exit,
        cuda_ooms: cuda_oom::best_source(cuda_ooms.filter(|oom| run.has(&oom.subject, oom.at)).collect()),
        unattributed_kills: unattributed_kills.collect(),
        follows_at_once: run.started.is_some_and(|started| started - run.end_before < MIN_PAUSE),
        ..RunSummary::of_kills(subject, kills_of(events, subject).filter(belongs).collect())
    }
}

/// The events among which are those of a container.
#[derive(Clone, Copy)]
struct ContainerEvents<'a> {
    events: &'a [LedgerEvent],
    subject: &'a ContainerRef,
}

/// One run among the events of a container: its number decides, and without one its times.
struct RunEvents<'a> {
    all: ContainerEvents<'a>,
    /// The container, in an event of the run.
    subject: &'a ContainerRef,
    exit: Option<&'a Exit>,
    started: Option<f64>,
    /// When the run before it ended.
    end_before: f64,
    /// When what belongs to it happened at the latest.
    until: f64,
}

impl<'a> ContainerEvents<'a> {
    fn exits(&self) -> impl Iterator<Item = &'a Exit> {
        self.events.iter().filter_map(|event| match event {
            LedgerEvent::Exit(exit) if same_container(&exit.subject, self.subject) => Some(exit),
            _ => None,
        })
    }

    /// Returns whether two starts are of one run. In a loop of restarts several begin within the tolerance: the nearest one is meant.
    fn is_run(&self, run: f64, wanted: f64) -> bool {
        let is_nearer = |other: f64| (other - wanted).abs() < (run - wanted).abs();
        let mut others = self.exits().filter_map(|exit| exit.subject.started);
        same_start(run, wanted) && !others.any(is_nearer)
    }

    /// Returns the end of the run in which a kill was.
    fn exit_after(&self, kill: &Kill) -> Option<&'a Exit> {
        let is_its = |exit: &&Exit| {
            is_numbered_alike(&exit.subject, self.subject).unwrap_or_else(|| {
                match (exit.subject.started, self.subject.started) {
                    (Some(its), Some(ours)) => self.is_run(its, ours),
                    _ => exit.at >= kill.at - EXIT_WINDOW,
                }
            })
        };
        self.exits().find(is_its)
    }

    /// Returns the run of an event.
    fn run_of(self, event: &'a LedgerEvent) -> RunEvents<'a> {
        let exit = match event {
            LedgerEvent::Exit(exit) => Some(exit),
            LedgerEvent::OomKill(kill) => self.exit_after(kill),
            LedgerEvent::CudaOom(_) => None, // the newest event is one only where no end is known
            LedgerEvent::GpuError(_) => None,
        };
        // without a start time: everything since the previous exit
        let ends_before = self.exits().filter(|other| exit.is_none_or(|exit| other.at < exit.at));
        RunEvents {
            all: self,
            subject: exit.map_or(self.subject, |exit| &exit.subject),
            exit,
            started: exit.and_then(|exit| exit.subject.started).or(self.subject.started),
            end_before: ends_before.map(|other| other.at).fold(f64::NEG_INFINITY, f64::max),
            until: exit.map_or(f64::INFINITY, |exit| exit.at + EXIT_WINDOW),
        }
    }
}

impl RunEvents<'_> {
    /// Returns whether an event of the container, which happened at this time, is of this run.
    fn has(&self, its: &ContainerRef, at: f64) -> bool {
        is_numbered_alike(its, self.subject).unwrap_or_else(|| match (its.started, self.started) {
            (Some(its), Some(ours)) => self.all.is_run(ours, its),
            _ => self.has_time(at),
        })
    }

    fn has_time(&self, at: f64) -> bool {
        at > self.end_before && at <= self.until
    }
}

fn kills_of<'a>(events: &'a [LedgerEvent], subject: &'a ContainerRef) -> impl Iterator<Item = &'a Kill> {
    events.iter().filter_map(|event| match event {
        LedgerEvent::OomKill(kill) => {
            let its = event.subject().is_some_and(|its| same_container(its, subject));
            its.then_some(kill)
        }
        LedgerEvent::Exit(_) | LedgerEvent::GpuError(_) | LedgerEvent::CudaOom(_) => None,
    })
}

/// Returns whether the ledger knows the run of an end, and that of a kill of its container not.
fn has_decided(exit: &Exit, its: &ContainerRef) -> bool {
    exit.subject.run_number.is_some() && its.run_number.is_none()
}

/// Returns whether two events of a container are of one run, if both have its number.
fn is_numbered_alike(one: &ContainerRef, other: &ContainerRef) -> Option<bool> {
    Some(one.run_number? == other.run_number?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{ExitReason, OomScope, Victim};

    fn subject(run_number: Option<u64>, started: f64) -> ContainerRef {
        ContainerRef {
            container_id: "c".repeat(64).into(),
            run_number,
            started: Some(started),
            ..ContainerRef::default()
        }
    }

    fn kill(id: u64, at: f64, owner: ContainerRef) -> LedgerEvent {
        LedgerEvent::OomKill(Kill {
            id,
            at,
            owner: KillOwner::Container(owner),
            victim: Some(Victim::Child),
            scope: OomScope::Container,
            ..Kill::unknown()
        })
    }

    fn exit(id: u64, at: f64, subject: ContainerRef) -> LedgerEvent {
        let reason = Some(ExitReason::Error);
        LedgerEvent::Exit(Exit { id, at, subject, reason, exit_code: Some(1), ..Exit::default() })
    }

    /// Returns the ids of the kills in the run of the last event.
    fn kills(events: &[LedgerEvent]) -> Vec<u64> {
        let last = events.last().expect("an event");
        let run = run_of(events, last, last.subject().expect("a container"));
        run.kills.iter().map(|kill| kill.id).collect()
    }

    #[test]
    fn numbers_tell_two_runs_of_one_moment_apart() {
        let (first, second) = (subject(Some(1), 10.0), subject(Some(2), 10.2));
        let kill_of = |number| kill(1, 10.3, subject(number, 10.1));
        let runs = |number| [kill_of(number), exit(2, 10.15, first.clone()), exit(3, 10.5, second.clone())];
        assert_eq!((kills(&runs(Some(2))), kills(&runs(Some(1)))), (vec![1], vec![]));
    }

    #[test]
    fn kill_of_no_known_run_is_of_an_end_that_names_it() {
        let unknown = ContainerRef { started: None, ..subject(None, 0.0) };
        let events = |may_be: Vec<u64>, id: u64| {
            let mut end = exit(9, 10.5, subject(Some(2), 10.2));
            if let LedgerEvent::Exit(exit) = &mut end {
                exit.may_be = may_be;
            }
            [kill(id, 10.3, unknown.clone()), end]
        };
        assert_eq!(kills(&events(vec![], 1)), [0; 0]);
        assert_eq!(kills(&events(vec![1], 1)), [1]);
    }
}
