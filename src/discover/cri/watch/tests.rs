//! What is told of lists and answers, played one after the other.

use super::*;
use crate::discover::cri::messages::{ContainerMetadata, ContainerStatus};
use std::sync::Arc;

const SECOND: i64 = 1_000_000_000;

fn container(id: &str, state: ContainerState) -> Container {
    let metadata = Some(ContainerMetadata { name: id.into(), attempt: 0 });
    Container { id: id.into(), metadata, state: state.into(), created_at: SECOND, ..Container::default() }
}

fn answer(started: i64, finished: i64) -> Answer {
    let state = if finished > 0 || started == 0 { Exited } else { Running };
    let status = ContainerStatus {
        state: state.into(),
        started_at: started * SECOND,
        finished_at: finished * SECOND,
        exit_code: 137,
        reason: if finished > 0 { "OOMKilled".into() } else { String::new() },
        ..ContainerStatus::default()
    };
    Ok(Some(ContainerStatusResponse { status: Some(status), info: HashMap::new() }))
}

/// What is told of these lists, one after the other, each with what would be answered.
fn told(memory: &mut Memory, source: &Source, lists: &[&[Listed]]) -> Vec<(f64, What)> {
    told_from(Moment::now(), Duration::ZERO, memory, source, lists)
}

/// The same with a pause between two lists.
fn told_from(
    begin: Moment,
    pause: Duration,
    memory: &mut Memory,
    source: &Source,
    lists: &[&[Listed]],
) -> Vec<(f64, What)> {
    let (settings, filter) = (CriSettings::default(), Filter::default());
    let mut watch = Watch::new(&settings, &filter, source, memory);
    for (number, list) in (0..).zip(lists) {
        let containers: Vec<_> = list.iter().map(|(id, state, ..)| container(id, *state)).collect();
        let asked = |(id, _, started, finished): &Listed| {
            let container = containers.iter().find(|container| container.id == *id)?;
            watch.question(container)?;
            let silent = Err(CriError::Silent("ContainerStatus", SILENT_FOR));
            Some((id.to_string(), if *started < 0 { silent } else { answer(*started, *finished) }))
        };
        let answers = list.iter().filter_map(asked).collect();
        watch.enter(&containers, &answers, begin.plus(pause * number));
    }
    let facts = source.take_facts().into_iter().filter(|fact| fact.what != What::Exists);
    facts.map(|fact| (fact.at, fact.what)).collect()
}

fn memory(open: &[&str]) -> Memory {
    Memory::new(Some(100.0), open.iter().map(|id| ContainerId::new(id)).collect())
}

/// A container, and when it began and ended, in Unix seconds.
type Listed = (&'static str, ContainerState, i64, i64);
use ContainerState::{Created, Exited, Running};
/// Where no answer comes.
const SILENT: i64 = -1;
const SILENT_FOR: Duration = Duration::from_secs(2);
const RUNS: What = What::Running { pid: None };
const ENDED: What = What::Ended { exit_code: Some(137), oom_flag: Some(true) };
const UNKNOWN: What = What::Ended { exit_code: None, oom_flag: None };

#[test]
fn a_run_is_told_once_over_lists_and_connections() {
    let source = Source::new(RUNTIME, Arc::default());
    let mut memory = memory(&[]);
    let runs = [("a", Running, 200, 0)];
    assert_eq!(told(&mut memory, &source, &[&runs, &runs]), [(200.0, What::Started), (200.0, RUNS)]);
    assert_eq!(source.lock().running.len(), 1);
    let ended = [("a", Exited, 200, 300)];
    assert_eq!(told(&mut memory, &source, &[&runs, &ended, &ended]), [(300.0, ENDED)]);
    assert_eq!(told(&mut memory, &source, &[&ended, &[]]), []);
    let state = source.lock();
    assert_eq!((state.running.len(), state.ended.len()), (0, 1));
}

#[test]
fn a_run_between_two_lists_is_told_whole_and_one_of_before_the_ledger_is_not() {
    let source = Source::new(RUNTIME, Arc::default());
    let list = [("new", Exited, 150, 160), ("old", Exited, 50, 60), ("never", Exited, 0, 0)];
    let facts = told(&mut memory(&[]), &source, &[&list, &list]);
    assert_eq!(facts, [(150.0, What::Started), (150.0, RUNS), (160.0, ENDED)]);
    assert_eq!(source.lock().ended.len(), 1, "it came and went");
}

#[test]
fn what_ran_when_the_ledger_last_knew_has_ended_or_runs_on() {
    let source = Source::new(RUNTIME, Arc::default());
    let list = [("ended", Exited, 50, 60), ("runs", Running, 50, 0)];
    let facts = told(&mut memory(&["ended", "runs", "gone"]), &source, &[&list]);
    assert_eq!(facts[..2], [(50.0, RUNS), (60.0, ENDED)]);
    assert_eq!(facts[2].1, UNKNOWN, "removed meanwhile");
    assert_eq!(facts.len(), 3);
}

/// The end is stamped by the shim and the start by containerd, once it has heard of it: on a busy node in this order.
#[test]
fn an_end_that_is_stamped_before_its_start_is_told_after_it() {
    let source = Source::new(RUNTIME, Arc::default());
    let facts = told(&mut memory(&[]), &source, &[&[], &[("a", Exited, 200, 199)]]);
    assert_eq!(facts, [(200.0, What::Started), (200.0, RUNS), (200.0, ENDED)]);
    let lists: [&[_]; 2] = [&[("b", Running, 200, 0)], &[("b", Exited, 200, 150)]];
    let facts = told(&mut memory(&[]), &source, &lists);
    assert_eq!(facts, [(200.0, What::Started), (200.0, RUNS), (200.0, ENDED)]);
    let state = source.lock();
    assert_eq!((state.running.len(), state.ended.len()), (0, 2));
}

#[test]
fn what_is_not_listed_as_running_runs_no_more_whatever_was_answered() {
    let silent = [("a", Running, SILENT, 0)];
    let source = Source::new(RUNTIME, Arc::default());
    let facts = told(&mut memory(&[]), &source, &[&silent, &silent, &[]]);
    assert_eq!(facts[0], (1.0, RUNS), "since it was made, at most");
    assert_eq!((&facts[1].1, facts.len()), (&UNKNOWN, 2), "removed");
    assert!(source.lock().running.is_empty());
    let facts = told(&mut memory(&[]), &source, &[&silent, &[("a", Exited, 50, 60)]]);
    assert_eq!(facts, [(50.0, RUNS), (60.0, ENDED)]);
    assert!(source.lock().running.is_empty());
    let lists: [&[_]; 3] = [&silent, &[("a", Exited, SILENT, 0)], &[("a", Exited, 50, 60)]];
    assert_eq!(told(&mut memory(&[]), &source, &lists), [(50.0, RUNS), (60.0, ENDED)]);
    let state = source.lock();
    assert_eq!((state.running.len(), state.ended.len()), (0, 3));
}

#[test]
fn a_short_run_is_told_although_another_one_began_later() {
    let source = Source::new(RUNTIME, Arc::default());
    let runs = ("a", Running, 200, 0);
    let lists: [&[_]; 3] =
        [&[runs, ("b", Created, 0, 0)], &[runs, ("b", Exited, 199, 199), ("c", Exited, 198, 199)], &[runs]];
    let facts = told(&mut memory(&[]), &source, &lists);
    assert_eq!(facts[..2], [(200.0, What::Started), (200.0, RUNS)]);
    let [b, c] = [199.0, 198.0].map(|at| [(at, What::Started), (at, RUNS), (199.0, ENDED)]);
    for run in [b, c] {
        assert!(run.iter().all(|fact| facts.contains(fact)), "{run:?} in {facts:?}");
    }
    assert_eq!(facts.len(), 8);
}

#[test]
fn an_end_that_nobody_answers_for_is_told_once_when_the_container_is_removed() {
    let source = Source::new(RUNTIME, Arc::default());
    let lists: [&[_]; 5] = [&[], &[("a", Created, 0, 0)], &[("a", Exited, SILENT, 0)], &[], &[]];
    let facts = told(&mut memory(&[]), &source, &lists);
    assert_eq!(facts[..2], [(1.0, What::Started), (1.0, RUNS)]);
    assert_eq!((&facts[2].1, facts.len()), (&UNKNOWN, 3));
    let state = source.lock();
    assert_eq!((state.running.len(), state.ended.len()), (0, 1), "it came and went");
    drop(state);
    let before = [("old", Exited, SILENT, 0), ("never", Created, 0, 0)];
    assert_eq!(told(&mut memory(&[]), &source, &[&before, &[]]), [], "nobody knows that it ran lately");
}

#[test]
fn an_end_that_nobody_answers_for_is_told_after_half_a_minute_with_the_time_at_which_it_was_listed() {
    let source = Source::new(RUNTIME, Arc::default());
    let (begin, pause) = (Moment::now(), Duration::from_secs(10));
    let silent = [("a", Exited, SILENT, 0)];
    let mut memory = memory(&[]);
    let lists: [&[_]; 4] = [&[], &silent, &silent, &silent];
    assert_eq!(told_from(begin, pause, &mut memory, &source, &lists), []);
    let later = begin.plus(pause * 4);
    let facts = told_from(later, pause, &mut memory, &source, &[&silent, &silent, &silent]);
    let ended = begin.plus(pause).unix_seconds();
    assert_eq!(facts, [(1.0, What::Started), (1.0, RUNS), (ended, UNKNOWN)]);
    assert_eq!(source.lock().ended.len(), 1);
    let answered = [("a", Exited, 150, 160)];
    let facts = told_from(later, pause, &mut memory, &source, &[&answered, &answered, &[]]);
    assert_eq!(facts, [(160.0, ENDED)], "what is answered later completes it");
    assert_eq!(source.lock().ended.len(), 1, "once");
}

#[test]
fn an_end_that_is_removed_before_anybody_answers_has_the_time_at_which_it_was_listed() {
    let source = Source::new(RUNTIME, Arc::default());
    let (begin, pause) = (Moment::now(), Duration::from_secs(10));
    let lists: [&[_]; 4] = [&[], &[("a", Running, SILENT, 0)], &[("a", Exited, SILENT, 0)], &[]];
    let facts = told_from(begin, pause, &mut memory(&[]), &source, &lists);
    assert_eq!(facts[2], (begin.plus(pause * 2).unix_seconds(), UNKNOWN));
    assert!(source.lock().running.is_empty());
}

#[test]
fn an_answer_from_before_the_end_does_not_tell_of_it() {
    let source = Source::new(RUNTIME, Arc::default());
    let lists: [&[_]; 3] = [&[], &[("a", Exited, 200, 0)], &[("a", Exited, 200, 300)]];
    let facts = told(&mut memory(&[]), &source, &lists);
    assert_eq!(facts, [(200.0, What::Started), (200.0, RUNS), (300.0, ENDED)]);
}

#[test]
fn who_does_not_answer_and_is_listed_as_running_runs_on_and_is_complete_when_it_answers() {
    let source = Source::new(RUNTIME, Arc::default());
    let (silent, runs) = (("a", Running, SILENT, 0), ("b", Running, 200, 0));
    let lists: [&[_]; 4] = [&[], &[silent, runs], &[silent, runs], &[("a", Running, 200, 0), runs]];
    let facts = told(&mut memory(&[]), &source, &lists);
    assert_eq!(facts, [(200.0, What::Started), (200.0, RUNS), (200.0, What::Started), (200.0, RUNS)]);
    let state = source.lock();
    assert_eq!((state.running.len(), state.ended.len()), (2, 0));
    assert_eq!(state.running[&ContainerId::new("a")].started, Some(200.0));
}

#[test]
fn no_events_are_taken_from_the_kubelet_where_each_goes_to_one_listener() {
    for (name, version, all) in [
        ("containerd", "1.6.20~ds1", false),
        ("containerd", "v1.7.27", false),
        ("containerd", "v2.0.4", true),
        ("containerd", "", false),
        ("cri-o", "1.31.2", true),
    ] {
        assert_eq!(events_reach_all(name, version), all, "{name} {version}");
    }
}

#[test]
fn a_container_that_cannot_be_asked_about_has_its_name_and_is_asked_again() {
    let source = Source::new(RUNTIME, Arc::default());
    let (settings, filter, mut memory) = (CriSettings::default(), Filter::default(), memory(&[]));
    let mut watch = Watch::new(&settings, &filter, &source, &mut memory);
    let containers = [container("a", Running)];
    let answers = HashMap::from([("a".to_owned(), Err(CriError::Silent("ContainerStatus", SILENT_FOR)))]);
    watch.enter(&containers, &answers, Moment::now());
    assert_eq!(source.lock().running[&ContainerId::new("a")].started, None);
    assert_eq!(watch.question(&containers[0]), Some(true));
}
