//! Events that are reported for a sequence of lists and status responses.

use super::*;
use crate::discover::RuntimeKind;
use crate::discover::cri::messages::{ContainerMetadata, ContainerStatus, PackedMessage, ProtobufTimestamp};
use crate::discover::reconcile::RuntimeFollower;
use std::sync::Arc;

const SECOND: i64 = 1_000_000_000;

fn container(id: &str, state: ContainerState) -> Container {
    let metadata = Some(ContainerMetadata { name: id.into(), attempt: 0 });
    Container { id: id.into(), metadata, state: state.into(), created_at: SECOND, ..Container::default() }
}

fn response_status(started: i64, finished: i64) -> ContainerStatus {
    let state = if finished > 0 || started == 0 { Exited } else { Running };
    ContainerStatus {
        state: state.into(),
        started_at: started * SECOND,
        finished_at: finished * SECOND,
        exit_code: 137,
        reason: if finished > 0 { "OOMKilled".into() } else { String::new() },
        ..ContainerStatus::default()
    }
}

fn response(started: i64, finished: i64) -> CriStatus {
    let status = Some(response_status(started, finished));
    Ok(Some(ContainerStatusResponse { status, info: HashMap::new() }))
}

/// Returns the events reported for these lists, with the status responses in them.
fn reported(
    resume: &mut CriResumeState,
    source: &RuntimeState,
    lists: &[&[Listed]],
) -> Vec<(f64, EventKind)> {
    reported_from(Timestamp::now(), Duration::ZERO, resume, source, lists)
}

/// As [`reported`], with a pause between two lists.
fn reported_from(
    begin: Timestamp,
    pause: Duration,
    resume: &mut CriResumeState,
    source: &RuntimeState,
    lists: &[&[Listed]],
) -> Vec<(f64, EventKind)> {
    let (settings, filter) = (CriSettings::default(), Filter::default());
    let mut reconciler = CriReconciler::new(&settings, &filter, source, resume);
    for (number, list) in (0..).zip(lists) {
        let containers: Vec<_> = list.iter().map(|(id, state, ..)| container(id, *state)).collect();
        let response_of = |(id, _, started, finished): &Listed| {
            let container = containers.iter().find(|container| container.id == *id)?;
            reconciler.needs_status(container)?;
            let unanswered = Err(CriError::Timeout("ContainerStatus", TIMEOUT));
            Some((id.to_string(), if *started < 0 { unanswered } else { response(*started, *finished) }))
        };
        let responses = list.iter().filter_map(response_of).collect();
        reconciler.apply(&containers, &responses, begin.plus(pause * number));
    }
    let runtime_events =
        source.drain_events().into_iter().filter(|runtime_event| runtime_event.what != EventKind::Exists);
    runtime_events.map(|runtime_event| (runtime_event.at, runtime_event.what)).collect()
}

fn resume(open: &[&str]) -> CriResumeState {
    CriResumeState::new(Some(100.0), open.iter().map(|id| ContainerId::new(id)).collect())
}

/// A container, with its start and end in Unix seconds.
type Listed = (&'static str, ContainerState, i64, i64);
use ContainerState::{Created, Exited, Running};
/// The status query times out.
const NO_RESPONSE: i64 = -1;
const TIMEOUT: Duration = Duration::from_secs(2);
const RUNS: EventKind = EventKind::Running { pid: None };
const ENDED: EventKind = EventKind::Ended { exit_code: Some(137), oom_flag: Some(true) };
const UNKNOWN: EventKind = EventKind::Ended { exit_code: None, oom_flag: None };

#[test]
fn reports_each_run_once_across_lists_and_connections() {
    let source = RuntimeState::new(RuntimeKind::Cri, Arc::default());
    let mut resume = resume(&[]);
    let runs = [("a", Running, 200, 0)];
    assert_eq!(reported(&mut resume, &source, &[&runs, &runs]), [(200.0, EventKind::Started), (200.0, RUNS)]);
    assert_eq!(source.lock().running.len(), 1);
    let ended = [("a", Exited, 200, 300)];
    assert_eq!(reported(&mut resume, &source, &[&runs, &ended, &ended]), [(300.0, ENDED)]);
    assert_eq!(reported(&mut resume, &source, &[&ended, &[]]), []);
    let state = source.lock();
    assert_eq!((state.running.len(), state.ended.len()), (0, 1));
}

#[test]
fn reports_run_between_lists_and_not_one_before_the_ledger() {
    let source = RuntimeState::new(RuntimeKind::Cri, Arc::default());
    let list = [("new", Exited, 150, 160), ("old", Exited, 50, 60), ("never", Exited, 0, 0)];
    let runtime_events = reported(&mut resume(&[]), &source, &[&list, &list]);
    assert_eq!(runtime_events, [(150.0, EventKind::Started), (150.0, RUNS), (160.0, ENDED)]);
    assert_eq!(source.lock().ended.len(), 1, "it started and ended");
}

#[test]
fn resumes_runs_that_the_ledger_has_open() {
    let source = RuntimeState::new(RuntimeKind::Cri, Arc::default());
    let list = [("ended", Exited, 50, 60), ("runs", Running, 50, 0)];
    let runtime_events = reported(&mut resume(&["ended", "runs", "gone"]), &source, &[&list]);
    assert_eq!(runtime_events[..2], [(50.0, RUNS), (60.0, ENDED)]);
    assert_eq!(runtime_events[2].1, UNKNOWN, "removed meanwhile");
    assert_eq!(runtime_events.len(), 3);
}

/// The shim sets the end time, and containerd the start time when it processes the start: on a busy node in this order.
#[test]
fn reports_end_after_start_when_time_stamps_are_reversed() {
    let source = RuntimeState::new(RuntimeKind::Cri, Arc::default());
    let runtime_events = reported(&mut resume(&[]), &source, &[&[], &[("a", Exited, 200, 199)]]);
    assert_eq!(runtime_events, [(200.0, EventKind::Started), (200.0, RUNS), (200.0, ENDED)]);
    let lists: [&[_]; 2] = [&[("b", Running, 200, 0)], &[("b", Exited, 200, 150)]];
    let runtime_events = reported(&mut resume(&[]), &source, &lists);
    assert_eq!(runtime_events, [(200.0, EventKind::Started), (200.0, RUNS), (200.0, ENDED)]);
    let state = source.lock();
    assert_eq!((state.running.len(), state.ended.len()), (0, 2));
}

#[test]
fn container_not_listed_as_running_does_not_run() {
    let unanswered = [("a", Running, NO_RESPONSE, 0)];
    let source = RuntimeState::new(RuntimeKind::Cri, Arc::default());
    let runtime_events = reported(&mut resume(&[]), &source, &[&unanswered, &unanswered, &[]]);
    assert_eq!(runtime_events[0], (1.0, RUNS), "since its creation at most");
    assert_eq!((&runtime_events[1].1, runtime_events.len()), (&UNKNOWN, 2), "removed");
    assert!(source.lock().running.is_empty());
    let runtime_events = reported(&mut resume(&[]), &source, &[&unanswered, &[("a", Exited, 50, 60)]]);
    assert_eq!(runtime_events, [(50.0, RUNS), (60.0, ENDED)]);
    assert!(source.lock().running.is_empty());
    let lists: [&[_]; 3] = [&unanswered, &[("a", Exited, NO_RESPONSE, 0)], &[("a", Exited, 50, 60)]];
    assert_eq!(reported(&mut resume(&[]), &source, &lists), [(50.0, RUNS), (60.0, ENDED)]);
    let state = source.lock();
    assert_eq!((state.running.len(), state.ended.len()), (0, 3));
}

#[test]
fn reports_short_run_that_began_before_another() {
    let source = RuntimeState::new(RuntimeKind::Cri, Arc::default());
    let runs = ("a", Running, 200, 0);
    let lists: [&[_]; 3] =
        [&[runs, ("b", Created, 0, 0)], &[runs, ("b", Exited, 199, 199), ("c", Exited, 198, 199)], &[runs]];
    let runtime_events = reported(&mut resume(&[]), &source, &lists);
    assert_eq!(runtime_events[..2], [(200.0, EventKind::Started), (200.0, RUNS)]);
    let [b, c] = [199.0, 198.0].map(|at| [(at, EventKind::Started), (at, RUNS), (199.0, ENDED)]);
    for run in [b, c] {
        assert!(
            run.iter().all(|runtime_event| runtime_events.contains(runtime_event)),
            "{run:?} in {runtime_events:?}"
        );
    }
    assert_eq!(runtime_events.len(), 8);
}

#[test]
fn reports_end_without_response_on_removal() {
    let source = RuntimeState::new(RuntimeKind::Cri, Arc::default());
    let lists: [&[_]; 5] = [&[], &[("a", Created, 0, 0)], &[("a", Exited, NO_RESPONSE, 0)], &[], &[]];
    let runtime_events = reported(&mut resume(&[]), &source, &lists);
    assert_eq!(runtime_events[..2], [(1.0, EventKind::Started), (1.0, RUNS)]);
    assert_eq!((&runtime_events[2].1, runtime_events.len()), (&UNKNOWN, 3));
    let state = source.lock();
    assert_eq!((state.running.len(), state.ended.len()), (0, 1), "it started and ended");
    drop(state);
    let before = [("old", Exited, NO_RESPONSE, 0), ("never", Created, 0, 0)];
    assert_eq!(reported(&mut resume(&[]), &source, &[&before, &[]]), [], "no evidence of a recent run");
}

#[test]
fn reports_end_without_response_after_timeout() {
    let source = RuntimeState::new(RuntimeKind::Cri, Arc::default());
    let (begin, pause) = (Timestamp::now(), Duration::from_secs(10));
    let unanswered = [("a", Exited, NO_RESPONSE, 0)];
    let mut resume = resume(&[]);
    let lists: [&[_]; 4] = [&[], &unanswered, &unanswered, &unanswered];
    assert_eq!(reported_from(begin, pause, &mut resume, &source, &lists), []);
    let later = begin.plus(pause * 4);
    let runtime_events =
        reported_from(later, pause, &mut resume, &source, &[&unanswered, &unanswered, &unanswered]);
    let ended = begin.plus(pause).unix_seconds();
    assert_eq!(runtime_events, [(1.0, EventKind::Started), (1.0, RUNS), (ended, UNKNOWN)]);
    assert_eq!(source.lock().ended.len(), 1);
    let responded = [("a", Exited, 150, 160)];
    let runtime_events = reported_from(later, pause, &mut resume, &source, &[&responded, &responded, &[]]);
    assert_eq!(runtime_events, [(160.0, ENDED)], "the later response completes it");
    assert_eq!(source.lock().ended.len(), 1, "once");
}

#[test]
fn removed_container_without_response_ends_when_listed() {
    let source = RuntimeState::new(RuntimeKind::Cri, Arc::default());
    let (begin, pause) = (Timestamp::now(), Duration::from_secs(10));
    let lists: [&[_]; 4] = [&[], &[("a", Running, NO_RESPONSE, 0)], &[("a", Exited, NO_RESPONSE, 0)], &[]];
    let runtime_events = reported_from(begin, pause, &mut resume(&[]), &source, &lists);
    assert_eq!(runtime_events[2], (begin.plus(pause * 2).unix_seconds(), UNKNOWN));
    assert!(source.lock().running.is_empty());
}

#[test]
fn response_older_than_the_end_is_not_used() {
    let source = RuntimeState::new(RuntimeKind::Cri, Arc::default());
    let lists: [&[_]; 3] = [&[], &[("a", Exited, 200, 0)], &[("a", Exited, 200, 300)]];
    let runtime_events = reported(&mut resume(&[]), &source, &lists);
    assert_eq!(runtime_events, [(200.0, EventKind::Started), (200.0, RUNS), (300.0, ENDED)]);
}

#[test]
fn running_container_without_response_is_completed_later() {
    let source = RuntimeState::new(RuntimeKind::Cri, Arc::default());
    let (unanswered, runs) = (("a", Running, NO_RESPONSE, 0), ("b", Running, 200, 0));
    let lists: [&[_]; 4] = [&[], &[unanswered, runs], &[unanswered, runs], &[("a", Running, 200, 0), runs]];
    let runtime_events = reported(&mut resume(&[]), &source, &lists);
    assert_eq!(
        runtime_events,
        [(200.0, EventKind::Started), (200.0, RUNS), (200.0, EventKind::Started), (200.0, RUNS)]
    );
    let state = source.lock();
    assert_eq!((state.running.len(), state.ended.len()), (2, 0));
    assert_eq!(state.running[&ContainerId::new("a")].started, Some(200.0));
}

#[test]
fn does_not_subscribe_where_events_reach_one_client() {
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
fn container_with_failed_query_has_a_name_and_is_retried() {
    let source = RuntimeState::new(RuntimeKind::Cri, Arc::default());
    let (settings, filter, mut resume) = (CriSettings::default(), Filter::default(), resume(&[]));
    let mut reconciler = CriReconciler::new(&settings, &filter, &source, &mut resume);
    let containers = [container("a", Running)];
    let responses = HashMap::from([("a".to_owned(), Err(CriError::Timeout("ContainerStatus", TIMEOUT)))]);
    reconciler.apply(&containers, &responses, Timestamp::now());
    assert_eq!(source.lock().running[&ContainerId::new("a")].started, None);
    assert_eq!(reconciler.needs_status(&containers[0]), Some(true));
}

/// A connection to a runtime where the status of each container takes this long.
struct SlowConnection<'a>(CriConnection<'a>, Duration);

impl Runtime for SlowConnection<'_> {
    type Item = Container;
    type Status = ContainerStatusResponse;
    type Error = CriError;

    fn kind(&self) -> RuntimeKind {
        self.0.kind()
    }

    async fn list(&mut self) -> Result<Vec<Container>, CriError> {
        Ok(vec![container("a", Running)])
    }

    fn wanted(&self, list: &[Container]) -> Vec<(String, bool)> {
        self.0.wanted(list)
    }

    fn query(&self, _: &str, _: bool, timeout: Duration) -> impl Future<Output = CriStatus> + Send + 'static {
        let takes = self.1;
        async move {
            tokio::time::sleep(takes.min(timeout)).await;
            if takes > timeout {
                Err(CriError::Timeout("ContainerStatus", timeout))
            } else {
                response(200, 0)
            }
        }
    }

    fn apply_list(&mut self, list: Vec<Container>, responses: Responses<Self>, now: Timestamp) {
        self.0.apply_list(list, responses, now);
    }

    async fn next_event(&mut self) -> Result<(), CriError> {
        self.0.next_event().await
    }

    fn needs_list(&self) -> Option<Duration> {
        self.0.needs_list()
    }

    fn list_interval(&self) -> Duration {
        self.0.list_interval()
    }
}

#[tokio::test]
async fn status_that_takes_longer_than_the_first_timeout_arrives() {
    let source = RuntimeState::new(RuntimeKind::Cri, Arc::default());
    let (settings, filter, mut resume) = (CriSettings::default(), Filter::default(), resume(&[]));
    let reconciler = CriReconciler::new(&settings, &filter, &source, &mut resume);
    let (client, events) = (CriClient::unconnected(), CriEventStream::Unavailable);
    let connection = CriConnection { reconciler, client, events, has_start_events: true, needs_list: false };
    let follower = RuntimeFollower::start(SlowConnection(connection, Duration::from_secs(3)));
    let started = || source.lock().running.values().any(|record| record.started == Some(200.0));
    let follow = async { follower.await.unwrap().run().await };
    let arrived = async {
        while !started() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let arrived = async { tokio::time::timeout(Duration::from_secs(30), arrived).await };
    tokio::select! {
        error = follow => panic!("{error}"),
        arrived = arrived => assert!(arrived.is_ok(), "no response was used"),
    }
}

/// The kubelet removes a container right after its end if its pod is deleted.
#[test]
fn end_of_a_removed_container_is_that_of_its_event() {
    let source = RuntimeState::new(RuntimeKind::Cri, Arc::default());
    let (settings, filter) = (CriSettings::default(), Filter::default());
    let mut resume = resume(&["a", "b"]);
    let mut reconciler = CriReconciler::new(&settings, &filter, &source, &mut resume);
    let lists = |reconciler: &mut CriReconciler<'_>, ids: &[&str]| {
        let containers: Vec<_> = ids.iter().map(|id| container(id, Running)).collect();
        let responses = ids.iter().map(|id| ((*id).to_owned(), response(200, 0))).collect();
        reconciler.lists += 1;
        reconciler.apply(&containers, &responses, Timestamp::now());
        let ended = |event: RuntimeEvent| match event.what {
            EventKind::Ended { exit_code, .. } => Some((event.id.as_str().to_owned(), exit_code, event.at)),
            _ => None,
        };
        source.drain_events().into_iter().filter_map(ended).collect::<Vec<_>>()
    };
    // of an exec, and of a pod's sandbox
    let exit = |id: &str, process: &str, code: u32| {
        let exit = TaskExit {
            container_id: id.to_owned(),
            id: process.to_owned(),
            exit_status: code,
            exited_at: Some(ProtobufTimestamp { seconds: 300, nanos: 500_000_000 }),
        };
        let event = Some(PackedMessage { value: exit.encode_to_vec() });
        CriEvent::of_containerd(&ContainerdEvent { event })
    };
    assert_eq!(lists(&mut reconciler, &["a", "b"]), []);
    assert_eq!(exit("b", "probe", 1), CriEvent::default(), "a probe in a container");
    for event in [exit("a", "a", 137), exit("sandbox", "sandbox", 0)] {
        assert!(event.needs_list);
        reconciler.observe(event);
    }
    assert_eq!(lists(&mut reconciler, &["a", "b"]), [], "a list that is older than the event");
    assert_eq!(lists(&mut reconciler, &["a", "b"]), [], "containerd has not removed it for a while");
    assert_eq!(lists(&mut reconciler, &["b"]), [("a".to_owned(), Some(137), 300.5)]);
    assert_eq!(lists(&mut reconciler, &["b"]), []);
    assert!(reconciler.observed.is_empty(), "no more than is needed: {:?}", reconciler.observed);
    let status = ContainerStatus { id: "b".into(), exit_code: 6, ..response_status(200, 400) };
    reconciler.observe(CriEvent::of_pod(&ContainerEventResponse { containers_statuses: vec![status] }));
    assert_eq!(lists(&mut reconciler, &[]), [("b".to_owned(), Some(6), 400.0)]);
}
