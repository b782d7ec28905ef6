//! The past of containers, as Docker and Podman still know it: all containers with the end of their last run, and the last
//! events (Docker keeps 256 of them until the daemon is restarted), which name containers that are gone.

use std::collections::VecDeque;
use std::sync::Arc;

use bollard::Docker;
use bollard::errors::Error;
use bollard::models::ContainerSummary;
use futures_util::StreamExt;
use tokio::time::timeout_at;

use super::connection::{events_options, now_as_text};
use super::convert::Inspected;
use super::events::DockerEvent;
use super::transport::{Allowance, client};
use super::{Watcher, explain};
use crate::clock::is_same_report;
use crate::config::{Filter, RuntimeEndpoint};
use crate::discover::history::{ExistingContainer, HistoryQuery, RuntimeHistory};
use crate::discover::{EventKind, RuntimeEvent, RuntimeState};
use crate::host::bounds::PAST_EVENTS;

/// Reads what an engine knows of the past.
pub async fn history(endpoint: &RuntimeEndpoint, filter: &Filter, query: HistoryQuery<'_>) -> RuntimeHistory {
    let mut history = RuntimeHistory { runtime: endpoint.runtime, ..RuntimeHistory::default() };
    let (docker, allowance) = match client(&endpoint.socket) {
        Ok(client) => client,
        Err(error) => {
            history.error = Some(explain(&error, &endpoint.socket));
            return history;
        }
    };
    let source = RuntimeState::new(endpoint.runtime, Default::default());
    let watcher = Watcher::new(endpoint, filter, &source);
    let ((events, has_dropped), runs) =
        tokio::join!(past_events(&docker, &allowance, &watcher, query), async {
            // the watcher of the endpoint, which runs at the same time, logs a list that is too large
            match timeout_at(query.deadline, watcher.list_all(&docker, || {})).await {
                Ok(Ok(listed)) => inspect_all(&docker, &watcher, listed, query, &mut history).await,
                Ok(Err(error)) => {
                    history.error = Some(explain(&error, &endpoint.socket));
                    vec![]
                }
                Err(_) => {
                    history.error = Some(explain(&Error::RequestTimeoutError, &endpoint.socket));
                    vec![]
                }
            }
        });
    for mut run in runs {
        move_to_events(&mut run, &events);
        run.retain(|recorded| !is_reported(recorded, &events));
        // before the events of the same time, which say less about an end
        history.events.extend(run);
    }
    history.events.extend(events);
    history.has_lost_events = has_dropped || allowance.is_exceeded();
    history
}

/// Reads the last events: as many as arrive in time, and of these the newest [`PAST_EVENTS`]. The second value: older ones were dropped.
async fn past_events(
    docker: &Docker,
    allowance: &Allowance,
    watcher: &Watcher<'_>,
    query: HistoryQuery<'_>,
) -> (Vec<RuntimeEvent>, bool) {
    let options = events_options(query.since.max(0.0) as u64, Some(now_as_text()));
    let mut messages = std::pin::pin!(docker.events(Some(options)));
    let (mut found, mut has_dropped) = (VecDeque::new(), false);
    while let Ok(Some(Ok(message))) = timeout_at(query.deadline, messages.next()).await {
        allowance.renew();
        let event = DockerEvent::read(message, query.now);
        let runtime = watcher.endpoint.runtime;
        let event = event.and_then(|event| event.runtime_event(runtime, watcher.filter, true));
        found.extend(event.map(|event| watcher.of_engine(event)));
        if found.len() > PAST_EVENTS.max {
            has_dropped = found.pop_front().is_some();
        }
    }
    (found.into(), has_dropped)
}

/// Inspects the listed containers: the wanted one first, then the newest. Returns the last run of each.
async fn inspect_all(
    docker: &Docker,
    watcher: &Watcher<'_>,
    mut listed: Vec<ContainerSummary>,
    query: HistoryQuery<'_>,
    history: &mut RuntimeHistory,
) -> Vec<Vec<RuntimeEvent>> {
    for record in listed.iter().filter_map(|listed| watcher.record_from_list(listed)) {
        history.events.push(record.event(query.since, EventKind::Exists));
    }
    let rank = |listed: &ContainerSummary| {
        let name =
            watcher.record_from_list(listed).map(|record| Arc::clone(&record.spec.name)).unwrap_or_default();
        query.rank(listed.id.as_deref().unwrap_or(""), |wanted| *name == *wanted)
    };
    listed.sort_by_cached_key(|listed| (rank(listed), std::cmp::Reverse(listed.created)));
    let ids: Vec<_> = listed.into_iter().filter_map(|listed| listed.id).collect();
    let mut runs = Vec::new();
    let socket = &watcher.endpoint.socket;
    let inspect = |id: String| async move { super::inspect(docker, socket, &id).await };
    let unread = query.each(ids, inspect, |response| match response {
        Ok(response) => {
            if let Some(found) = watcher.parse_inspect(response) {
                runs.push(last_run(&found));
                history.containers.push(existing(found));
            }
            true
        }
        Err(error) => matches!(error, Error::DockerResponseServerError { status_code: 404, .. }),
    });
    history.unread += unread.await;
    runs
}

fn existing(found: Inspected) -> ExistingContainer {
    ExistingContainer {
        named: found.record.spec,
        runtime: found.record.runtime,
        is_running: found.is_running,
        first_process: found.pid.filter(|_| found.is_running),
        has_lost_process: false,
        started: found.record.started,
        ended: found.finished,
        start_error: found.start_error,
        log_path: None,
        limit_bytes: found.limit_bytes,
        restarts: found.restarts,
        id: found.record.id,
    }
}

/// Returns the start and the end of a container's last run, and if it runs, the end of the run before. While it waits for a
/// restart, the last run is the one before.
fn last_run(found: &Inspected) -> Vec<RuntimeEvent> {
    let Some(started) = found.record.started else { return vec![] };
    let began = found.record.event(started, EventKind::Running { pid: found.pid });
    match found.finished {
        Some(at) if at >= started || !found.is_running => {
            // a start is recorded when the program runs, and it may have ended by then
            vec![began, found.record.event(at.max(started), found.ended())]
        }
        // of the run before, how it ended is not kept
        Some(at) => {
            vec![found.record.event(at, EventKind::Ended { exit_code: None, oom_flag: None }), began]
        }
        None => vec![began],
    }
}

/// Moves the start and the end of a container's last run to the times of its events, if there are any: the engine reports them
/// later than it records them, a start even after the end of a run of a millisecond.
fn move_to_events(last_run: &mut [RuntimeEvent], events: &[RuntimeEvent]) {
    let is_start = |what: &EventKind| matches!(what, EventKind::Started | EventKind::Running { .. });
    let is_end = |what: &EventKind| matches!(what, EventKind::Ended { .. });
    let mut end = f64::INFINITY;
    for recorded in last_run.iter_mut().rev() {
        let is_same = |event: &&RuntimeEvent| {
            event.id == recorded.id
                && (recorded.at..=end).contains(&event.at)
                && (is_start(&event.what), is_end(&event.what))
                    == (is_start(&recorded.what), is_end(&recorded.what))
        };
        // no run is later than the last one
        let reported = events.iter().filter(is_same).map(|event| event.at).reduce(f64::max);
        recorded.at = reported.unwrap_or(recorded.at);
        end = recorded.at;
    }
}

/// Returns whether this end without an exit code is among the events, which have one.
fn is_reported(recorded: &RuntimeEvent, events: &[RuntimeEvent]) -> bool {
    matches!(recorded.what, EventKind::Ended { exit_code: None, .. })
        && events.iter().any(|event| {
            event.id == recorded.id
                && is_same_report(event.at, recorded.at)
                && matches!(event.what, EventKind::Ended { .. })
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::{ContainerId, ContainerSpec, RuntimeKind};
    use bollard::models::{ContainerInspectResponse, ContainerState};

    fn run_of(state: ContainerState) -> Vec<(f64, EventKind)> {
        let source = RuntimeState::new(RuntimeKind::Docker, Default::default());
        let endpoint = RuntimeEndpoint { runtime: RuntimeKind::Docker, socket: "/d".into() };
        let filter = Filter::default();
        let watcher = Watcher::new(&endpoint, &filter, &source);
        let (id, name) = (Some("a".into()), Some("/train".into()));
        let response = ContainerInspectResponse { id, name, state: Some(state), ..Default::default() };
        last_run(&watcher.parse_inspect(response).unwrap())
            .into_iter()
            .map(|event| (event.at, event.what))
            .collect()
    }

    #[test]
    fn stopped_container_has_start_and_end_of_its_last_run() {
        let state = ContainerState {
            running: Some(false),
            oom_killed: Some(true),
            exit_code: Some(137),
            started_at: Some("1970-01-01T00:01:40Z".into()),
            finished_at: Some("1970-01-01T00:03:20Z".into()),
            ..ContainerState::default()
        };
        let ended = EventKind::Ended { exit_code: Some(137), oom_flag: Some(true) };
        assert_eq!(run_of(state), [(100.0, EventKind::Running { pid: None }), (200.0, ended)]);
    }

    #[test]
    fn program_can_end_before_its_start_is_recorded() {
        let state = ContainerState {
            running: Some(false),
            exit_code: Some(137),
            started_at: Some("1970-01-01T00:01:40.001Z".into()),
            finished_at: Some("1970-01-01T00:01:40Z".into()),
            ..ContainerState::default()
        };
        let ended = EventKind::Ended { exit_code: Some(137), oom_flag: None };
        assert_eq!(run_of(state), [(100.001, EventKind::Running { pid: None }), (100.001, ended)]);
    }

    #[test]
    fn running_container_has_the_end_of_the_run_before() {
        let state = ContainerState {
            running: Some(true),
            pid: Some(7),
            started_at: Some("1970-01-01T00:03:20Z".into()),
            finished_at: Some("1970-01-01T00:01:40Z".into()),
            ..ContainerState::default()
        };
        let before = EventKind::Ended { exit_code: None, oom_flag: None };
        assert_eq!(run_of(state), [(100.0, before), (200.0, EventKind::Running { pid: Some(7) })]);
        let never_ran =
            ContainerState { started_at: Some("0001-01-01T00:00:00Z".into()), ..Default::default() };
        assert_eq!(run_of(never_ran), []);
    }

    #[test]
    fn run_of_a_millisecond_is_the_run_of_its_events() {
        let record = |at, what| {
            let named = Some(Arc::new(ContainerSpec { name: "train".into(), ..ContainerSpec::default() }));
            RuntimeEvent {
                runtime: RuntimeKind::Docker,
                socket: std::sync::Arc::default(),
                id: ContainerId::new("a"),
                at,
                named,
                what,
            }
        };
        let ended = |oom_flag| EventKind::Ended { exit_code: Some(137), oom_flag };
        let events = [
            record(50.0, EventKind::Started),
            record(60.0, ended(None)),
            record(100.4, EventKind::Started),
            record(102.5, ended(None)),
        ];
        let mut last_run =
            [record(100.0, EventKind::Running { pid: None }), record(100.1, ended(Some(true)))];
        move_to_events(&mut last_run, &events);
        assert_eq!(last_run.map(|event| event.at), [100.4, 102.5]);
        let before = EventKind::Ended { exit_code: None, oom_flag: None };
        let mut running = [record(59.5, before), record(99.0, EventKind::Running { pid: Some(7) })];
        move_to_events(&mut running, &events);
        assert_eq!(running.each_ref().map(|event| event.at), [60.0, 100.4]);
        assert_eq!(running.map(|event| is_reported(&event, &events)), [true, false]);
        let mut older = [record(200.0, EventKind::Running { pid: None }), record(201.0, ended(None))];
        move_to_events(&mut older, &events);
        assert_eq!(older.map(|event| event.at), [200.0, 201.0], "the engine has lost its events");
    }
}
