//! The simulated worlds of the ledger, played to their end: what it counted, and what `why` says of each end, against the truth.

use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::{Cause, Confidence, Diagnosis, explain};
use crate::events::{Exit, ExitReason, Kill, KillOwner, LedgerEvent, OomScope};
use crate::ledger::reconcile::tests::world::{Ending, TrueKill, TrueRun, World};
use crate::ledger::reconcile::tests::{
    MemoryStore, attribution_is_exact, cases, check, for_each_world, play_without_serve,
    totals_are_consistent,
};

/// Of the verdicts on ends in worlds with complete sources, at least so many percent are certain. The others are of kills beyond ten in 5 s,
/// whose limit the kernel does not name, and of pods, where no request to stop is known.
const MIN_CERTAIN_PERCENT: u64 = 45;

/// Verdicts, and how many of them were certain.
#[derive(Default)]
struct VerdictCounts {
    all: AtomicU64,
    certain: AtomicU64,
}

/// Returns what `why` said of this end when it was the newest event of its container.
fn verdict_on(store: &MemoryStore, exit: &Exit) -> Option<Diagnosis> {
    let id = &exit.subject.container_id;
    let is_before = |event: &&LedgerEvent| match event.subject() {
        Some(subject) => subject.container_id == *id && event.at() <= exit.at,
        None => exit.may_be.contains(&event.id()),
    };
    let mut events: Vec<LedgerEvent> = store.events.values().filter(is_before).cloned().collect();
    events.sort_by(|one, other| one.at().total_cmp(&other.at()));
    explain(&events, exit.at + 1.0)
}

/// Returns whether a cause is true of a run. Only those that a verdict may call certain are judged.
fn is_true(cause: Cause, container: usize, number: usize, run: &TrueRun, world: &World) -> bool {
    let has_kill = |main: bool, scope: OomScope| {
        let is_its = |kill: &TrueKill| {
            kill.owner == Some((container, number)) && kill.scope == scope && (kill.main || !main)
        };
        world.kills.iter().any(is_its)
    };
    match cause {
        Cause::OomLimitMain => run.ending == Ending::Oom(OomScope::Container),
        Cause::OomLimitWorker | Cause::OomLimitWorkerThenExit | Cause::OomLimit | Cause::OomLimitShm => {
            has_kill(false, OomScope::Container)
        }
        // the limit is that of the outer container
        Cause::OomParentLimit => has_kill(false, OomScope::Container),
        Cause::OomHost => has_kill(false, OomScope::Host),
        Cause::Completed => run.ending == Ending::Completed,
        Cause::Stopped => matches!(run.ending, Ending::Stopped | Ending::DockerKill),
        Cause::KilledByRequest => run.ending == Ending::DockerKill,
        Cause::KilledOutside => run.ending == Ending::KilledFromOutside,
        Cause::CrashedSignal => run.ending == Ending::Crash,
        Cause::EndedBySignal => matches!(run.ending, Ending::Crash | Ending::Stopped),
        Cause::ErrorExit => run.ending == Ending::Error,
        _ => false,
    }
}

/// Returns whether a cause says the same as the reason of an exit. A kill in the run may lead, whatever the reason, also one that became
/// known after the end was decided.
fn is_of_reason(cause: Cause, exit: &Exit, store: &MemoryStore) -> bool {
    use Cause as C;
    use ExitReason as R;
    let is_of_run = |kill: &Kill| match &kill.owner {
        KillOwner::Container(subject) => subject.run_id() == exit.subject.run_id(),
        _ => false,
    };
    let has_lost_process = exit.oom_kills > 0 || !exit.may_be.is_empty() || store.kills().any(is_of_run);
    match (cause, exit.reason) {
        (C::OomLimitMain, Some(R::OomContainer)) | (C::OomHost, Some(R::OomHost)) => true,
        (C::OomLimitMain, _) => false,
        (
            C::OomLimit
            | C::OomLimitWorker
            | C::OomLimitWorkerThenExit
            | C::OomLimitShm
            | C::OomParentLimit
            | C::OomHost
            | C::OomUnnamed,
            _,
        ) => has_lost_process,
        (C::Completed, reason) => reason == Some(R::Completed),
        (C::Stopped | C::KilledByRequest, reason) => reason == Some(R::Stopped),
        (C::KilledOutside, reason) => reason == Some(R::Killed),
        (C::CrashedSignal | C::EndedBySignal, reason) => reason == Some(R::Signal),
        (C::ErrorExit, reason) => reason == Some(R::Error),
        (C::Unknown, reason) => reason == Some(R::Unknown),
        // the record of the kill is not among the events
        (C::OomFlagOnly, reason) => matches!(reason, Some(R::Unknown | R::Error)),
        _ => false,
    }
}

/// Checks that no verdict on an exit differs from what its event says.
fn verdicts_have_the_reasons_of_events(store: &MemoryStore, world: &World) -> Result<(), TestCaseError> {
    if world.clock_step.is_some() || world.suspend.is_some() {
        return Ok(()); // times do not show which event was the newest
    }
    for exit in (0..world.runs.len()).flat_map(|container| store.exits(container)) {
        let verdict = verdict_on(store, exit).ok_or_else(|| TestCaseError::fail("no verdict"))?;
        prop_assert_eq!(verdict.exit_reason, exit.reason);
        prop_assert!(is_of_reason(verdict.cause, exit, store), "{:?} of {:?}", verdict.cause, exit);
    }
    Ok(())
}

/// Checks that no certain verdict is false.
fn certain_verdicts_are_true(
    store: &MemoryStore,
    world: &World,
    counts: &VerdictCounts,
) -> Result<(), TestCaseError> {
    if world.clock_step.is_some() || world.suspend.is_some() {
        return Ok(()); // times do not show which end is of which run
    }
    for (container, runs) in world.runs.iter().enumerate() {
        let ended: Vec<(usize, &TrueRun)> =
            runs.iter().enumerate().filter(|(_, run)| run.end.is_some()).collect();
        let exits = store.exits(container);
        if exits.len() != ended.len() {
            continue; // without the runtime, which exit is of which run is not known
        }
        for (exit, (number, run)) in std::iter::zip(exits, ended) {
            let Some(verdict) = verdict_on(store, exit) else {
                return Err(TestCaseError::fail(format!("no verdict on {exit:?}")));
            };
            counts.all.fetch_add(1, Ordering::Relaxed);
            if verdict.confidence == Confidence::Certain {
                counts.certain.fetch_add(1, Ordering::Relaxed);
                prop_assert!(
                    is_true(verdict.cause, container, number, run, world),
                    "{:?} is false of {:?} (run {} of {}): {:?}\n{:?}\n{:?}\n{:?}",
                    verdict.cause,
                    run.ending,
                    number,
                    container,
                    verdict.incident,
                    exit,
                    world.sources,
                    store.kills().collect::<Vec<_>>()
                );
            }
        }
    }
    Ok(())
}

#[test]
fn counts_are_right_with_one_complete_source_and_never_too_high() {
    let counts = VerdictCounts::default();
    check(false, cases(), |store, world| {
        totals_are_consistent(store, world)?;
        verdicts_have_the_reasons_of_events(store, world)?;
        certain_verdicts_are_true(store, world, &counts)
    });
}

#[test]
fn kills_and_exits_are_exact_with_complete_sources() {
    let counts = VerdictCounts::default();
    check(true, cases(), |store, world| {
        totals_are_consistent(store, world)?;
        attribution_is_exact(store, world)?;
        verdicts_have_the_reasons_of_events(store, world)?;
        certain_verdicts_are_true(store, world, &counts)
    });
    let (all, certain) = (counts.all.into_inner(), counts.certain.into_inner());
    assert!(certain * 100 >= MIN_CERTAIN_PERCENT * all, "{certain} of {all} verdicts are certain");
}

/// Checks that who reads the host says of each end what a `serve` that is started then records. In a world whose sources are not complete one of
/// them may not know the reason, because it counts a kill without a record in another moment.
fn answers_without_serve_are_those_of_serve(world: &World, is_complete: bool) -> Result<(), TestCaseError> {
    if world.clock_step.is_some() || world.suspend.is_some() {
        return Ok(()); // times do not show which end is of which run
    }
    let (shown, store) = play_without_serve(world);
    // metrics and records of runs have the reasons of the events, as each OTLP record has that of its event
    totals_are_consistent(&store, world)?;
    verdicts_have_the_reasons_of_events(&store, world)?;
    verdicts_have_the_reasons_of_events(&shown, world)?;
    // the end of a container that no runtime names is seen by cycles alone
    for container in (0..world.runs.len()).filter(|container| world.nameless != Some(*container)) {
        let (shown, recorded) = (shown.exits(container), store.exits(container));
        prop_assert_eq!(shown.len(), recorded.len(), "{}", World::name(container));
        for (shown, recorded) in std::iter::zip(shown, recorded) {
            let is_unknown = [shown, recorded].iter().any(|exit| exit.reason == Some(ExitReason::Unknown));
            let is_same = shown.exit_code == recorded.exit_code && shown.reason == recorded.reason;
            prop_assert!(is_same || !is_complete && is_unknown, "{:?} {:?}", shown, recorded);
        }
    }
    Ok(())
}

#[test]
fn reason_of_an_end_is_the_same_with_and_without_serve() {
    for complete in [true, false] {
        for_each_world(complete, cases(), |world| answers_without_serve_are_those_of_serve(world, complete));
    }
}
