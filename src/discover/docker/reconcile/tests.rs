//! Events that are reported for a sequence of lists, events and inspects.

use super::*;
use crate::discover::RuntimeState;
use crate::discover::docker::events;
use crate::discover::docker::events::named;
use crate::discover::docker::tests::{counts, started_at, watcher_on};
use bollard::models::ContainerSummaryStateEnum::EXITED;
use std::sync::Arc;

/// A connection with a new list, where these containers ran before.
fn reconciler_on(lost: &[&str], test: impl FnOnce(&mut DockerReconciler<'_>, &RuntimeState)) {
    let source = RuntimeState::new("docker", Arc::default());
    watcher_on(&source, |watcher| {
        let open: HashSet<_> = lost.iter().map(|id| ContainerId::new(id)).collect();
        let mut resume = DockerResumeState::new(None, open.clone());
        let mut reconciler = DockerReconciler::new(&watcher, &mut resume);
        reconciler.listed.lost = open;
        reconciler.settled = false;
        test(&mut reconciler, &source);
    });
}

fn id() -> ContainerId {
    ContainerId::new("a")
}

/// Returns the requests since the last call: `+` for a query, `-` for an outdated one.
fn requests(reconciler: &mut DockerReconciler<'_>) -> String {
    let requests = std::mem::take(&mut reconciler.requests).into_iter();
    let text = requests.map(|request| match request {
        FollowRequest::Query(id) => format!("+{id}"),
        FollowRequest::Cancel(id) => format!("-{id}"),
        FollowRequest::List(_) => "list".to_owned(),
    });
    text.collect::<Vec<_>>().join(" ")
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

fn runs() -> Result<InspectResult, Error> {
    Ok(InspectResult::Running(started_at(10.0), Some(42)))
}

const UNKNOWN: EventKind = EventKind::Ended { exit_code: None, oom_flag: None };
const ENDED: EventKind = EventKind::Ended { exit_code: Some(7), oom_flag: None };

#[test]
fn reports_start_at_once_and_pid_after_inspect() {
    reconciler_on(&[], |reconciler, source| {
        reconciler.apply(event("start", 5));
        let started = source.drain_events();
        assert_eq!(started[0].what, EventKind::Started);
        assert_eq!(&*started[0].named.as_ref().unwrap().name, "train");
        assert_eq!(requests(reconciler), "-a +a");
        reconciler.apply_result(&id(), runs());
        assert_eq!(source.drain_events()[0].at, 10.0, "the exact start time");
        assert_eq!(counts(source), (1, 0));
    });
}

#[test]
fn start_after_the_clock_was_set_back_is_no_old_event() {
    reconciler_on(&[], |reconciler, source| {
        reconciler.settled = true;
        reconciler.listed.at = reconciler.listed.at.with_wall_moved(86_400_000);
        reconciler.apply(event("start", 5));
        assert_eq!(requests(reconciler), "-a +a");
        reconciler.apply_result(&id(), runs());
        assert_eq!(counts(source), (1, 0));
    });
}

#[test]
fn inspect_is_outdated_by_later_events() {
    reconciler_on(&[], |reconciler, source| {
        reconciler.apply(event("start", 5));
        reconciler.apply(event("die", 6));
        assert_eq!(requests(reconciler), "-a +a -a");
        assert_eq!(counts(source), (0, 1), "it started and ended");
        assert_eq!(reported(source), [EventKind::Started, ENDED]);
        reconciler.apply(event("start", 7));
        reconciler.apply(event("rename", 8));
        assert_eq!(requests(reconciler), "-a +a -a +a");
        reconciler.apply_result(&id(), runs());
        assert_eq!(counts(source), (1, 1));
    });
}

#[test]
fn run_that_ends_before_the_response_is_recorded() {
    reconciler_on(&[], |reconciler, source| {
        reconciler.apply(event("start", 5));
        reconciler.apply_result(&id(), Ok(InspectResult::Gone));
        reconciler.apply(event("die", 6));
        assert_eq!(counts(source), (0, 1));
    });
}

#[test]
fn event_is_used_while_inspect_fails() {
    reconciler_on(&[], |reconciler, source| {
        reconciler.apply(event("start", 5));
        reconciler.apply_result(&id(), Err(Error::RequestTimeoutError));
        assert_eq!(source.lock().running[&id()].started, None);
        assert!(reconciler.needs_inspect(&listed("a", "Up 5 minutes")), "by the next list");
        reconciler.apply_result(&id(), runs());
        assert!(!reconciler.needs_inspect(&listed("a", "Up 5 minutes")));
        assert_eq!(counts(source), (1, 0), "the same run");
        reconciler.apply(event("die", 6));
        assert_eq!(counts(source), (0, 1));
    });
}

fn listed(id: &str, status: &str) -> ContainerSummary {
    ContainerSummary {
        id: Some(id.into()),
        names: Some(vec!["/train".to_owned()]),
        status: Some(status.into()),
        ..Default::default()
    }
}

#[test]
fn list_heals_a_lost_rename() {
    reconciler_on(&[], |reconciler, _| {
        reconciler.apply_list(&[listed("a", "Up 3 hours")], HashMap::new());
        reconciler.apply_result(&id(), runs());
        assert!(!reconciler.needs_inspect(&listed("a", "Up 3 hours")));
        let names = Some(vec!["/other".to_owned()]);
        assert!(reconciler.needs_inspect(&ContainerSummary { names, ..listed("a", "Up 3 hours") }));
    });
}

#[test]
fn list_heals_lost_start_restart_and_end() {
    reconciler_on(&[], |reconciler, source| {
        reconciler.apply_list(&[listed("a", "Up 3 hours")], HashMap::new());
        reconciler.apply_result(&id(), runs());
        reconciler.settle();
        assert_eq!(source.drain_events().last().unwrap().what, EventKind::Running { pid: Some(42) });
        let wanted = |reconciler: &DockerReconciler<'_>, list: &[ContainerSummary]| {
            reconciler.wanted(list).into_iter().map(|(id, _)| id).collect::<Vec<_>>()
        };
        assert_eq!(wanted(reconciler, &[listed("a", "Up 3 hours")]), [""; 0]);
        assert_eq!(wanted(reconciler, &[listed("a", "Up 9 seconds")]), ["a"], "it may be another run");
        let both = [listed("a", "Up 3 hours"), listed("b", "Up 2 minutes")];
        assert_eq!(wanted(reconciler, &both), ["b"]);
        reconciler.apply_list(&both, HashMap::new());
        assert_eq!(counts(source), (2, 0), "shown by the list alone");
        assert_eq!(wanted(reconciler, &both[1..]), ["b", "a"]);
        let gone = HashMap::from([("a".to_owned(), Ok(None))]);
        reconciler.apply_list(&both[1..], gone);
        reconciler.settle();
        assert_eq!(
            source.drain_events().last().unwrap().what,
            EventKind::Ended { exit_code: None, oom_flag: None }
        );
        assert_eq!(source.lock().running.len(), 1);
    });
}

#[test]
fn oversized_container_ends_by_the_list() {
    reconciler_on(&["a", "b"], |reconciler, source| {
        reconciler.oversized.extend([id(), ContainerId::new("b")]);
        let stopped = ContainerSummary { state: Some(EXITED), ..listed("a", "Exited (0) 3 hours ago") };
        let list = [stopped, listed("b", "Up 3 hours")];
        assert_eq!(reconciler.wanted(&list), [], "an inspect would be too large again");
        reconciler.apply_list(&list, HashMap::new());
        reconciler.settle();
        let ends: Vec<_> = source.drain_events().into_iter().filter(|event| event.what == UNKNOWN).collect();
        assert_eq!(ends.len(), 1);
        assert_eq!((ends[0].id.as_str(), &*ends[0].named.as_ref().unwrap().name), ("a", "train"));
        reconciler.apply_list(&list, HashMap::new());
        reconciler.settle();
        assert_eq!(reported(source), [], "reported once");
        assert_eq!(reconciler.resume.open, HashSet::from([ContainerId::new("b")]));
    });
}

#[test]
fn end_that_a_list_showed_is_not_reported_again_by_its_event() {
    reconciler_on(&["a"], |reconciler, source| {
        let at = Timestamp::now().unix_seconds() + 4.5;
        let stopped = InspectResult::Stopped {
            named: named("train", "i", true),
            exit_code: Some(7),
            oom_flag: Some(false),
            finished: Some(at),
        };
        reconciler.apply_result(&id(), Ok(stopped));
        reconciler.apply(event("die", 5)); // later than the list, which showed it all the same
        let end = EventKind::Ended { exit_code: Some(7), oom_flag: Some(false) };
        assert_eq!(reported(source), [end]);
        reconciler.apply(event("die", 60));
        assert_eq!(reported(source), [ENDED], "of another run");
    });
}

#[test]
fn container_of_another_engine_does_not_end() {
    for (has_siblings, ends) in [(true, 0), (false, 1)] {
        reconciler_on(&["a"], |reconciler, source| {
            reconciler.resume.has_siblings = has_siblings;
            reconciler.apply_list(&[], HashMap::from([("a".to_owned(), Ok(None))]));
            reconciler.settle();
            assert_eq!(reported(source).len(), ends);
            assert!(reconciler.resume.open.is_empty());
        });
    }
}

#[test]
fn events_before_the_list_are_reported_once() {
    reconciler_on(&["a"], |reconciler, source| {
        reconciler
            .listed
            .state
            .extend(running(&ContainerRecord { id: ContainerId::new("b"), ..started_at(3.0) }, Some(1)));
        source.lock().running.insert(ContainerId::new("a"), started_at(10.0));
        for _ in 0..2 {
            reconciler.apply(event("die", -100));
            reconciler.apply(event("start", -90));
        }
        assert_eq!(reported(source), [ENDED, EventKind::Started]);
        assert_eq!(counts(source), (1, 0));
        reconciler.apply(event("oom", 5));
        let now = [EventKind::Running { pid: Some(1) }, EventKind::Oom];
        assert_eq!(reported(source), now, "results of the list come before newer events");
    });
}

#[test]
fn lost_container_ends_by_event_or_inspect() {
    let named = named("train", "i", true);
    let stopped = || InspectResult::Stopped {
        named: named.clone(),
        exit_code: Some(137),
        oom_flag: Some(true),
        finished: Some(20.0),
    };
    reconciler_on(&["a", "b", "c"], |reconciler, source| {
        reconciler.apply(event("die", -100));
        assert_eq!(reported(source), [ENDED]);
        reconciler.apply_result(&ContainerId::new("b"), Ok(stopped()));
        assert_eq!(reported(source), [], "an event may follow");
        reconciler.settle();
        let runtime_event = source.drain_events().remove(0);
        let ended = |exit_code, oom_flag| EventKind::Ended { exit_code, oom_flag };
        assert_eq!(
            (runtime_event.at, runtime_event.named, runtime_event.what),
            (20.0, Some(named.clone()), ended(Some(137), Some(true)))
        );
        reconciler.apply_result(&ContainerId::new("c"), Ok(InspectResult::Gone));
        assert_eq!(reported(source), [ended(None, None)]);
        assert!(reconciler.resume.open.is_empty());
    });
    reconciler_on(&["a"], |reconciler, source| {
        reconciler.settle();
        reconciler.apply(event("die", 5));
        reconciler.apply_result(&id(), Ok(stopped()));
        assert_eq!(reported(source), [ENDED], "reported once");
    });
}
