//! Scenarios of pods whose runtime is away: their sandboxes have cgroups like those of containers.

use std::path::Path;
use std::sync::Arc;

use super::story::{Story, id, running};
use crate::discover::{Container, ContainerSpec, EventKind, Identity, Inventory, RuntimeKind};
use crate::events::ExitReason;
use crate::ledger::exchange::CycleReport;
use crate::ledger::reconcile::ProcInfo;

/// Returns the cgroup of a container or a sandbox in a pod.
fn path(letter: char) -> String {
    format!("kubepods/burstable/pod1-2/{}", id(letter).as_str())
}

/// Applies a cycle that sees these in a pod, by their cgroups.
fn cycle(story: &mut Story, at: f64, seen: &[char], is_up: bool) {
    cycle_in(story, at, seen, is_up, path);
}

fn cycle_in(story: &mut Story, at: f64, seen: &[char], is_up: bool, path: impl Fn(char) -> String) {
    let container = |letter: &char| {
        let container = Container::clone(&Container::in_cgroup(id(*letter).as_str(), &path(*letter)));
        let identity = Identity::named(id(*letter).short());
        Arc::new(Container { identity, ..container })
    };
    let listed: Vec<_> = seen.iter().map(|letter| (*letter, None)).collect();
    let runtimes = vec![(RuntimeKind::Cri, is_up)];
    let containers = seen.iter().map(container).collect();
    let inventory = Arc::new(Inventory { containers, runtimes: runtimes.clone(), ..Inventory::default() });
    let report = story.report(at, &listed, &runtimes, |letter| letter.to_string());
    story.reconciler.set_connection(RuntimeKind::Cri, None, std::iter::empty::<&Path>());
    story.reconciler.apply_cycle(story.at(at), &CycleReport { inventory, ..report });
}

/// Lets cycles see what ends after two seconds, and settles until nothing more can be decided.
fn ends_unseen(story: &mut Story, path: impl Fn(char) -> String) {
    for (second, seen) in [(1.0, &['a'][..]), (2.0, &['a']), (3.0, &[]), (7.0, &[]), (12.0, &[]), (60.0, &[])]
    {
        cycle_in(story, second, seen, false, &path);
        story.settle(second);
    }
}

/// The runtime reports that it is the sandbox of a pod.
fn is_sandbox(story: &mut Story, at: f64) {
    let details = ContainerSpec { name: "POD".into(), labels_match: true, ..ContainerSpec::default() };
    story.named_event('a', at, at, Some(details), EventKind::Sandbox);
}

/// Returns the exits that are counted, under any name.
fn counted_exits(story: &Story) -> u64 {
    let (totals, id) = (story.store.totals(), id('a'));
    ["POD", "a", id.short()].iter().map(|name| super::figures(&totals, name).exits.iter().sum::<u64>()).sum()
}

#[test]
fn sandbox_that_cycles_took_for_a_container_is_none_once_its_runtime_is_back() {
    let mut story = Story::new();
    for second in [1.0, 2.0, 3.0] {
        cycle(&mut story, second, &['a'], false);
        story.settle(second);
    }
    assert_eq!(story.shown(3.0).len(), 1, "by its short id");
    is_sandbox(&mut story, 4.0);
    for second in [4.0, 5.0, 30.0, 60.0] {
        cycle(&mut story, second, &[], true);
        story.settle(second);
    }
    assert!(story.shown(60.0).is_empty(), "{:?}", story.shown(60.0));
    assert!(story.exits('a').is_empty());
}

#[test]
fn sandbox_is_known_until_it_was_removed() {
    let mut story = Story::new();
    is_sandbox(&mut story, 0.5);
    for at in [0.5, 10_000.0, 100_000.0] {
        story.settle(at);
    }
    assert!(story.reconciler.containers.get(&id('a')).is_some_and(|state| state.is_sandbox));
    story.named_event('a', 100_001.0, 100_001.0, None, EventKind::SandboxRemoved);
    for at in [100_001.0, 200_000.0] {
        story.settle(at);
    }
    assert!(story.reconciler.containers.get(&id('a')).is_none());
}

#[test]
fn sandbox_whose_removal_nothing_reported_is_forgotten_some_day() {
    let mut story = Story::new();
    is_sandbox(&mut story, 0.5);
    for at in [0.5, 3e6] {
        story.settle(at);
    }
    assert!(story.reconciler.containers.get(&id('a')).is_none());
}

#[test]
fn sandbox_that_ended_while_its_runtime_was_away_has_no_exit() {
    let mut story = Story::new();
    ends_unseen(&mut story, path);
    is_sandbox(&mut story, 70.0);
    for second in [70.0, 75.0, 90.0] {
        cycle(&mut story, second, &[], true);
        story.settle(second);
    }
    assert!(story.exits('a').is_empty());
    assert_eq!((counted_exits(&story), story.store.runs.len()), (0, 0));
}

#[test]
fn end_in_a_pod_that_nobody_reports_is_no_exit_and_elsewhere_it_is_one() {
    let mut story = Story::new();
    ends_unseen(&mut story, path);
    cycle(&mut story, 700.0, &[], true);
    story.settle(720.0);
    assert!(story.exits('a').is_empty(), "it may have been a sandbox");
    let mut story = Story::new();
    ends_unseen(&mut story, |letter| format!("lab/{}", id(letter).as_str()));
    assert_eq!(story.reasons('a'), [Some(ExitReason::Unknown)]);
}

#[test]
fn container_that_ended_while_its_runtime_was_away_has_the_exit_that_it_reports() {
    let ended = EventKind::Ended { exit_code: Some(3), oom_flag: None };
    // memledger may have been started again meanwhile
    for is_restarted in [false, true] {
        let mut story = Story::new();
        ends_unseen(&mut story, path);
        if is_restarted {
            story.restart(61.0);
        }
        for (happened, what) in
            [(0.4, EventKind::Exists), (0.5, EventKind::Started), (0.5, running(7)), (2.4, ended.clone())]
        {
            story.late_event('a', happened, 62.0, what);
        }
        for second in [62.0, 70.0, 90.0] {
            cycle(&mut story, second, &[], true);
            story.settle(second);
        }
        assert_eq!(story.reasons('a'), [Some(ExitReason::Error)], "{is_restarted}");
        assert_eq!(counted_exits(&story), 1);
        assert_eq!(super::figures(&story.store.totals(), "a").restarts, 0);
    }
}

#[test]
fn container_that_only_its_name_is_known_of_has_an_exit_of_unknown_reason() {
    let mut story = Story::new();
    ends_unseen(&mut story, path);
    story.late_event('a', 0.4, 62.0, EventKind::Exists);
    for second in [62.0, 70.0] {
        story.settle(second);
    }
    assert_eq!(story.reasons('a'), [Some(ExitReason::Unknown)]);
}

#[test]
fn container_that_was_killed_while_its_runtime_was_away_has_its_exit() {
    let mut story = Story::new();
    cycle(&mut story, 1.0, &['a'], false);
    story.kill(1.5, 71, Some(&format!("/{}", path('a'))), ProcInfo::default());
    for second in [2.0, 5.5, 9.0, 20.0, 60.0] {
        cycle(&mut story, second, &[], false);
        story.settle(second);
    }
    assert_eq!(story.reasons('a'), [Some(ExitReason::OomContainer)]);
}

#[test]
fn known_sandbox_is_none_after_a_restart_without_its_runtime() {
    let mut story = Story::new();
    is_sandbox(&mut story, 0.5);
    story.settle(0.5);
    story.restart(0.8);
    ends_unseen(&mut story, path);
    assert!(story.shown(60.0).is_empty(), "{:?}", story.shown(60.0));
    assert!(story.exits('a').is_empty());
}
