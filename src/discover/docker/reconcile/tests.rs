//! Events that are reported for a sequence of lists, events and inspects.

use std::collections::HashMap;
use std::sync::Arc;

use bollard::models::ContainerSummaryStateEnum::EXITED;

use super::*;
use crate::discover::docker::events;
use crate::discover::docker::tests::{counts, watcher_on};
use crate::discover::{RuntimeKind, RuntimeState};

/// A connection with a first list, where these containers ran before.
fn reconciler_on(open: &[&str], test: impl FnOnce(&mut DockerReconciler<'_>, &RuntimeState)) {
    let source = RuntimeState::new(RuntimeKind::Docker, Arc::default());
    watcher_on(&source, |watcher| {
        let open: HashSet<_> = open.iter().map(|id| ContainerId::new(id)).collect();
        let mut resume = DockerResumeState::new(None, open);
        let mut reconciler = DockerReconciler::new(&watcher, &mut resume);
        test(&mut reconciler, &source);
    });
}

fn id(id: &str) -> ContainerId {
    ContainerId::new(id)
}

/// An event of container `a`, this many seconds after the first call in this test: the same call returns the same event.
fn event(action: &str, after: i64) -> DockerEvent {
    thread_local! {
        static NOW: i64 = Timestamp::now().unix_whole_seconds() as i64;
    }
    let nanos = (NOW.with(|now| *now) + after) * 1_000_000_000;
    events::tests::event("a", action, nanos, &[("name", "train"), ("image", "i"), ("exitCode", "7")])
}

fn reported(source: &RuntimeState) -> Vec<EventKind> {
    source.drain_events().into_iter().map(|runtime_event| runtime_event.what).collect()
}

fn listed(id: &str, status: &str) -> ContainerSummary {
    ContainerSummary {
        id: Some(id.into()),
        names: Some(vec!["/train".to_owned()]),
        status: Some(status.into()),
        ..Default::default()
    }
}

/// An inspect of a container with this state.
fn inspect(id: &str, state: &str) -> StatusResult<ContainerInspectResponse, Error> {
    let text =
        format!(r#"{{"Id": "{id}", "Name": "/train", "Config": {{"Image": "i"}}, "State": {{{state}}}}}"#);
    Ok(Some(serde_json::from_str(&text).unwrap()))
}

const RUNS: &str = r#""Running": true, "Pid": 42, "StartedAt": "1970-01-01T00:00:10Z""#;
const STOPPED: &str =
    r#""Running": false, "ExitCode": 7, "OOMKilled": true, "FinishedAt": "1970-01-01T00:00:20Z""#;
const UNKNOWN: EventKind = EventKind::Ended { exit_code: None, oom_flag: None };
const ENDED: EventKind = EventKind::Ended { exit_code: Some(7), oom_flag: None };
const OOM_KILLED: EventKind = EventKind::Ended { exit_code: Some(7), oom_flag: Some(true) };
const RUNNING: EventKind = EventKind::Running { pid: Some(42) };

impl DockerReconciler<'_> {
    /// Applies a list with the responses for what it wants; those not given are an error.
    fn list(&mut self, kind: ListKind, list: &[ContainerSummary], responses: &[(&str, &str)]) -> Vec<String> {
        self.kind = kind;
        self.changed.clear();
        let mut wanted: Vec<_> = self.wanted(list).into_iter().map(|(id, _)| id).collect();
        let of = |id: &String| match responses.iter().find(|(of, _)| of == id) {
            Some((_, "")) => Ok(None),
            Some((_, state)) => inspect(id, state),
            None => Err(Error::RequestTimeoutError),
        };
        let responses: HashMap<_, _> = wanted.iter().map(|id| (id.clone(), of(id))).collect();
        self.apply_list(list, responses, &HashSet::new());
        wanted.sort_unstable();
        wanted
    }
}

#[test]
fn start_calls_for_a_list_which_has_its_pid_and_exact_start() {
    reconciler_on(&[], |reconciler, source| {
        assert_eq!(reconciler.apply(event("start", 5)), None);
        let started = source.drain_events();
        assert_eq!(started[0].what, EventKind::Started);
        assert_eq!(&*started[0].named.as_ref().unwrap().name, "train");
        assert_eq!(reconciler.changed, HashSet::from([id("a")]));
        let list = [listed("a", "Up 1 second")];
        assert_eq!(reconciler.list(ListKind::Changed, &list, &[("a", RUNS)]), ["a"]);
        let running = source.drain_events().remove(0);
        assert_eq!((running.at, running.what), (10.0, RUNNING));
        assert_eq!(reconciler.list(ListKind::Changed, &list, &[]), [""; 0], "only what is new is inspected");
        assert_eq!(counts(source), (1, 0));
    });
}

#[test]
fn end_removes_the_container_and_another_run_is_new() {
    reconciler_on(&[], |reconciler, source| {
        let list = [listed("a", "Up 1 second")];
        reconciler.list(ListKind::First, &list, &[("a", RUNS)]);
        assert_eq!(reconciler.apply(event("die", 6)), Some(id("a")));
        assert_eq!(counts(source), (0, 1));
        assert!(reconciler.changed.is_empty());
        reconciler.apply(event("start", 7));
        let again = RUNS.replace("00:10", "00:30");
        assert_eq!(reconciler.list(ListKind::Changed, &list, &[("a", &again)]), ["a"]);
        assert_eq!(counts(source), (1, 1));
        let all = [EventKind::Exists, RUNNING, ENDED, EventKind::Started, RUNNING];
        assert_eq!(reported(source), all);
    });
}

#[test]
fn container_that_ends_between_two_lists_is_known_to_the_ledger_and_the_next_cycle() {
    reconciler_on(&[], |reconciler, source| {
        reconciler.apply(event("start", 5));
        reconciler.apply(event("die", 6));
        reconciler.list(ListKind::Changed, &[], &[]);
        assert_eq!(reported(source), [EventKind::Started, ENDED]);
        assert_eq!(counts(source), (0, 1));
        reconciler.kind = ListKind::Changed;
        let responses = HashMap::from([("a".to_owned(), inspect("a", RUNS))]);
        reconciler.apply_list(&[listed("a", "Up 1 second")], responses, &HashSet::from([id("a")]));
        assert_eq!(counts(source), (0, 1), "a list from before its end");
    });
}

#[test]
fn list_is_used_while_inspect_fails() {
    reconciler_on(&[], |reconciler, source| {
        let list = [listed("a", "Up 5 minutes")];
        assert_eq!(reconciler.list(ListKind::Changed, &list, &[]), ["a"]);
        assert_eq!(source.lock().running[&id("a")].started, None);
        assert_eq!(reconciler.list(ListKind::Changed, &list, &[("a", RUNS)]), ["a"], "again");
        assert_eq!(counts(source), (1, 0), "the same run");
        reconciler.apply(event("die", 6));
        assert_eq!(counts(source), (0, 1));
    });
}

#[test]
fn list_heals_a_lost_rename() {
    reconciler_on(&[], |reconciler, _| {
        let list = [listed("a", "Up 3 hours")];
        reconciler.list(ListKind::First, &list, &[("a", RUNS)]);
        let names = Some(vec!["/other".to_owned()]);
        let renamed = [ContainerSummary { names, ..listed("a", "Up 3 hours") }];
        for kind in [ListKind::Changed, ListKind::Full] {
            assert_eq!(reconciler.list(kind, &renamed, &[]), ["a"]);
        }
    });
}

#[test]
fn full_list_heals_lost_start_restart_and_end() {
    reconciler_on(&[], |reconciler, source| {
        let full = ListKind::Full;
        let a = [listed("a", "Up 3 hours")];
        assert_eq!(reconciler.list(ListKind::First, &a, &[("a", RUNS)]), ["a"]);
        assert_eq!(reconciler.list(full, &a, &[]), [""; 0]);
        assert_eq!(
            reconciler.list(full, &[listed("a", "Up 9 seconds")], &[]),
            ["a"],
            "it may be another run"
        );
        let both = [listed("a", "Up 3 hours"), listed("b", "Up 2 minutes")];
        assert_eq!(reconciler.list(full, &both, &[]), ["b"]);
        assert_eq!(counts(source), (2, 0), "shown by the list alone");
        reported(source);
        assert_eq!(reconciler.changed, HashSet::from([id("b")]), "to be inspected again");
        assert_eq!(reconciler.list(ListKind::Changed, &both[1..], &[]), ["b"]);
        assert_eq!((reported(source), counts(source)), (vec![], (2, 0)), "it has only what changed");
        assert_eq!(reconciler.list(full, &both[1..], &[("a", ""), ("b", RUNS)]), ["a", "b"]);
        assert_eq!(reported(source), [RUNNING, UNKNOWN]);
        assert_eq!(counts(source), (1, 0));
    });
}

#[test]
fn lost_container_ends_by_event_or_inspect() {
    reconciler_on(&["a", "b", "c"], |reconciler, source| {
        reconciler.apply(event("die", -100));
        assert_eq!(reported(source), [ENDED]);
        reconciler.list(ListKind::First, &[], &[("b", STOPPED), ("c", "")]);
        let mut ends = source.drain_events();
        ends.sort_by_key(|end| end.id.as_str().to_owned());
        assert_eq!((ends[0].at, &ends[0].what), (20.0, &OOM_KILLED));
        assert_eq!(&*ends[0].named.as_ref().unwrap().name, "train");
        assert_eq!(ends[1].what, UNKNOWN);
        assert!(reconciler.resume.open.is_empty());
        reconciler.list(ListKind::Full, &[], &[]);
        assert_eq!(reported(source), [], "reported once");
    });
}

#[test]
fn oversized_container_ends_by_the_list() {
    reconciler_on(&["a", "b"], |reconciler, source| {
        reconciler.oversized.extend([id("a"), id("b")]);
        let stopped = ContainerSummary { state: Some(EXITED), ..listed("a", "Exited (0) 3 hours ago") };
        let list = [stopped, listed("b", "Up 3 hours")];
        assert_eq!(
            reconciler.list(ListKind::Full, &list, &[]),
            [""; 0],
            "an inspect would be too large again"
        );
        let ends = source.drain_events();
        assert_eq!(ends.len(), 1);
        assert_eq!((ends[0].id.as_str(), &*ends[0].named.as_ref().unwrap().name), ("a", "train"));
        assert_eq!(ends[0].what, UNKNOWN);
        reconciler.list(ListKind::Full, &list, &[]);
        assert_eq!(reported(source), [], "reported once");
        assert_eq!(reconciler.resume.open, HashSet::from([id("b")]));
    });
}

#[test]
fn end_that_a_list_showed_is_not_reported_again_by_its_event() {
    reconciler_on(&["a"], |reconciler, source| {
        let stopped = [ContainerSummary { state: Some(EXITED), ..listed("a", "Exited (7)") }];
        let finished = jiff::Timestamp::now().to_string();
        let state = STOPPED.replace("1970-01-01T00:00:20Z", &finished);
        reconciler.list(ListKind::Full, &stopped, &[("a", &state)]);
        reconciler.apply(event("die", 2)); // later than the list, which showed it all the same
        assert_eq!(reported(source), [OOM_KILLED]);
        reconciler.apply(event("die", 60));
        assert_eq!(reported(source), [ENDED], "of another run");
    });
}

#[test]
fn container_of_another_engine_does_not_end() {
    for (has_siblings, ends) in [(true, 0), (false, 1)] {
        reconciler_on(&["a"], |reconciler, source| {
            reconciler.resume.has_siblings = has_siblings;
            reconciler.list(ListKind::First, &[], &[("a", "")]);
            assert_eq!(reported(source).len(), ends);
            assert!(reconciler.resume.open.is_empty());
        });
    }
}

#[test]
fn old_events_are_reported_once_and_change_no_newer_run() {
    reconciler_on(&["a"], |reconciler, source| {
        reconciler.list(ListKind::First, &[listed("a", "Up 1 second")], &[("a", RUNS)]);
        reported(source);
        for _ in 0..2 {
            let old = events::tests::event("a", "die", 5_000_000_000, &[("exitCode", "7")]);
            reconciler.apply(old);
        }
        assert_eq!(reported(source), [ENDED]);
        assert_eq!(counts(source), (1, 0), "it started after that");
    });
}

#[test]
fn end_without_an_event_while_memledger_was_away_is_reported_once_with_its_time_and_code() {
    let source = RuntimeState::new(RuntimeKind::Docker, Arc::default());
    watcher_on(&source, |watcher| {
        let exited = |id: &str, status: &str| ContainerSummary { state: Some(EXITED), ..listed(id, status) };
        let list = [
            exited("a", "Exited (7) 2 seconds ago"),
            exited("b", "Exited (7) 3 months ago"),
            exited("c", "Exited (7) 3 seconds ago"),
            exited("d", "Exited (7) 3 seconds ago"),
        ];
        let began = r#""StartedAt": "1970-01-01T00:00:10Z", "#;
        let ran = format!("{began}{STOPPED}");
        for (since, expected) in [(Some(15.0), 2), (Some(25.0), 0), (None, 0)] {
            let mut resume = DockerResumeState::new(since, HashSet::new());
            let mut reconciler = DockerReconciler::new(&watcher, &mut resume);
            reconciler.listed_at = Timestamp::now().moved_to(30.0);
            reconciler.reported_ends.insert(id("d"));
            let wanted = reconciler.list(ListKind::First, &list, &[("a", &ran), ("c", &ran)]);
            assert_eq!(wanted.len(), usize::from(since.is_some()) * 2, "{since:?}: {wanted:?}");
            let events = source.drain_events();
            let ends: Vec<_> = events.iter().filter(|event| event.what == OOM_KILLED).collect();
            assert_eq!(ends.len(), expected, "{since:?}");
            assert!(ends.iter().all(|event| event.at == 20.0 && event.named.is_some()));
            assert_eq!(reconciler.list(ListKind::Full, &list, &[]), [""; 0], "once");
            assert!(source.drain_events().iter().all(|event| event.what != OOM_KILLED));
        }
    });
}

#[test]
fn run_that_a_policy_replaced_while_memledger_was_away_ended_at_its_own_time() {
    let source = RuntimeState::new(RuntimeKind::Docker, Arc::default());
    watcher_on(&source, |watcher| {
        let again = r#""Running": true, "Pid": 42, "StartedAt": "1970-01-01T00:00:21Z", "FinishedAt": "1970-01-01T00:00:20Z""#;
        for is_reported in [false, true] {
            let mut resume = DockerResumeState::new(Some(15.0), HashSet::from([id("a")]));
            let mut reconciler = DockerReconciler::new(&watcher, &mut resume);
            reconciler.reported_ends.extend(is_reported.then(|| id("a")));
            reconciler.list(ListKind::First, &[listed("a", "Up 9 seconds")], &[("a", again)]);
            let events: Vec<_> =
                source.drain_events().into_iter().map(|event| (event.at, event.what)).collect();
            let ended = (20.0, UNKNOWN);
            assert_eq!(events.contains(&ended), !is_reported);
            assert_eq!(events.last(), Some(&(21.0, RUNNING)));
        }
    });
}
