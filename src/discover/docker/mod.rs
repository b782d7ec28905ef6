//! Containers from the Docker API. Podman serves the same API on its own socket.
//!
//! memledger uses three read-only calls: list, inspect and events. Paths have no API version, so the daemon responds with its
//! own. The results go to two consumers: the registry needs the containers that run now, and the ledger needs every event, in
//! order and once ([`RuntimeEvent`]).
//!
//! A connection begins with the list, stopped containers included, for their names. Then follows one event stream that starts at
//! the last event received before, so that it includes events from while memledger was not connected ([`reconcile`]). The stream
//! overlaps the list by at least a second: adding a container twice changes nothing, and duplicate events are dropped
//! ([`events::EventDedup`]).
//!
//! The daemon may be absent, stop and come back. Names are kept while it is unavailable, and containers are listed again after
//! each reconnect.

mod events;
mod convert;
#[cfg(any(test, fuzzing))]
pub mod invariants;
mod transport;
mod reconcile;

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bollard::Docker;
use bollard::errors::Error;
use bollard::models::ContainerSummary;
use bollard::query_parameters::ListContainersOptions;
use futures_util::StreamExt;

use super::{ConnectionState, ContainerId, EventKind, RuntimeEvent, RuntimeState};
use crate::clock::Timestamp;
use crate::config::{Filter, RuntimeEndpoint};
use convert::{InspectResult, exists, may_run, running};
use reconcile::{DockerReconciler, Listed};
pub use transport::client;
use transport::{Allowance, is_too_large};

/// Timeout of one whole response. The event stream itself may be idle for ever.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay before the next connection attempt: the first, doubling up to the last.
const RETRY_DELAY: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(4));
/// A connection that lasted this long was stable.
const STABLE_AFTER: Duration = Duration::from_secs(10);
/// Limit of concurrent inspect calls.
const MAX_INSPECTS: usize = 8;
/// Events are requested from this many seconds before the list at most.
const MAX_EVENT_AGE_SECONDS: f64 = 86_400.0;

/// State of a runtime across connections; initialized from the ledger's state.
#[derive(Debug, Default)]
pub struct DockerResumeState {
    /// Unix time of the last event.
    since: Option<f64>,
    /// Containers whose run has begun, without an end so far.
    open: HashSet<ContainerId>,
    seen: events::EventDedup,
}

impl DockerResumeState {
    /// Creates the state. `since`: Unix time of the last event in the ledger. `open`: containers that ran then.
    pub fn new(since: Option<f64>, open: HashSet<ContainerId>) -> Self {
        Self { since, open, seen: events::EventDedup::default() }
    }

    fn track(&mut self, runtime_event: &RuntimeEvent) {
        match runtime_event.what {
            EventKind::Started | EventKind::Running { .. } => {
                self.open.insert(runtime_event.id.clone());
            }
            EventKind::Ended { .. } => drop(self.open.remove(&runtime_event.id)),
            EventKind::Exists | EventKind::Oom | EventKind::SignalRequested { .. } | EventKind::Renamed => {}
        }
    }

    /// Returns the start time for the event stream, given the whole second before the list, which is the latest.
    fn events_since(&self, before_list: u64) -> u64 {
        let before_list = before_list as f64;
        self.since
            .map_or(before_list, |since| since.clamp(before_list - MAX_EVENT_AGE_SECONDS, before_list))
            .max(0.0) as u64
    }
}

/// Follows one runtime for ever, and writes its containers and events to `source`.
pub async fn follow(
    endpoint: RuntimeEndpoint,
    filter: Filter,
    source: Arc<RuntimeState>,
    mut resume: DockerResumeState,
) {
    let mut pause = RETRY_DELAY.0;
    let mut flaps = false;
    let watcher = Watcher { endpoint: &endpoint, filter: &filter, source: &source };
    loop {
        if !endpoint.socket.exists() {
            // a socket that existed and is gone means that the daemon is down
            let was_there = matches!(source.lock().connection, ConnectionState::Up | ConnectionState::Down);
            source.set_connection(if was_there { ConnectionState::Down } else { ConnectionState::NoSocket });
        } else {
            let lasted = watcher.follow_once(&mut resume, flaps).await;
            flaps = lasted.is_some_and(|lasted| lasted < STABLE_AFTER) || (flaps && lasted.is_none());
            if lasted.is_some_and(|lasted| lasted >= STABLE_AFTER) {
                pause = RETRY_DELAY.0;
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RETRY_DELAY.1);
        if !endpoint.socket.exists() {
            pause = pause.min(Duration::from_secs(1)); // checking for a file is cheap: connect soon after it appears
        }
    }
}

/// Returns what an operator can do about an error.
pub fn explain(error: &Error, socket: &Path) -> String {
    let text = format!("{error:?}");
    if text.contains("PermissionDenied") || text.contains("SocketNotAccessible") {
        format!("no permission for {}: run as root or in the socket's group", socket.display())
    } else if text.contains("ConnectionRefused") || text.contains("NotFound") {
        format!("no process listens on {}: start the daemon, or correct the path", socket.display())
    } else if is_too_large(error) {
        "the response exceeds memledger's size limit".to_owned()
    } else {
        "unexpected response or timeout: see the log of the daemon".to_owned()
    }
}

/// Applies the timeout to a whole response: bollard's own covers the head, and a daemon may stall in the body.
async fn with_timeout<T>(response: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    tokio::time::timeout(RESPONSE_TIMEOUT, response).await.unwrap_or(Err(Error::RequestTimeoutError))
}

/// Returns whether a response could not be parsed.
fn is_unparsable(error: &Error) -> bool {
    matches!(error, Error::JsonDataError { .. } | Error::JsonSerdeError { .. })
}

struct Watcher<'a> {
    endpoint: &'a RuntimeEndpoint,
    filter: &'a Filter,
    source: &'a Arc<RuntimeState>,
}

impl Watcher<'_> {
    /// Follows one connection until it breaks. Returns how long it lasted after the list; `None` if there was no list.
    ///
    /// `flaps`: the previous connection broke at once, as behind a proxy that rejects the events. That is logged once, and then
    /// the next connection is logged only after [`STABLE_AFTER`].
    async fn follow_once(&self, resume: &mut DockerResumeState, flaps: bool) -> Option<Duration> {
        let (runtime, socket) = (self.endpoint.runtime, &self.endpoint.socket);
        let (docker, allowance, listed) = match self.connect_and_list(resume).await {
            Ok(connected) => connected,
            Err(error) => {
                if is_too_large(&error) {
                    self.source.record_oversized("the list of containers");
                }
                if self.source.lock().connection != ConnectionState::Down {
                    let reason = explain(&error, socket);
                    tracing::warn!(runtime, %error, "listing containers failed, retrying: {reason}");
                }
                self.source.set_connection(ConnectionState::Down);
                return None;
            }
        };
        let began = Timestamp::now();
        let mut reconciler =
            std::pin::pin!(DockerReconciler::new(self, resume, listed).run(&docker, &allowance));
        if flaps && let Ok(error) = tokio::time::timeout(STABLE_AFTER, &mut reconciler).await {
            tracing::debug!(runtime, %error, "connection lost again");
        } else {
            tracing::info!(runtime, socket = %socket.display(), "connected");
            let error = reconciler.await;
            tracing::warn!(runtime, %error, "connection lost, retrying; container names are kept");
        }
        self.source.set_connection(ConnectionState::Down);
        Some(Timestamp::now().since(began))
    }

    async fn connect_and_list(
        &self,
        resume: &mut DockerResumeState,
    ) -> Result<(Docker, Arc<Allowance>, Listed), Error> {
        let (docker, allowance) = client(&self.endpoint.socket)?;
        let at = Timestamp::now();
        let list = self.list(&docker).await?;
        let records = list.iter().filter_map(|listed| self.record_from_list(listed));
        let mut state: Vec<_> = records.map(|record| exists(&record, at.unix_seconds())).collect();
        let listed = list.into_iter().filter(may_run).filter_map(|listed| Some((listed.id.clone()?, listed)));
        let client = &docker;
        let mut responses = futures_util::stream::iter(listed)
            .map(|(id, listed)| async move {
                let response = self.inspect(client, &id).await;
                (ContainerId::new(&id), listed, response)
            })
            .buffer_unordered(MAX_INSPECTS);
        let mut present = HashSet::new();
        while let Some((id, listed, response)) = responses.next().await {
            match response {
                // added at once: a container whose inspect hangs must not delay the names of others
                Ok(InspectResult::Running(record, pid)) => {
                    state.extend(running(&record, pid));
                    self.source.add_running(record);
                }
                Ok(InspectResult::Stopped { .. } | InspectResult::Gone) => continue,
                // it runs, by the list: keep a known record, otherwise use the list's data
                Err(_) => {
                    let known = self.source.lock().running.contains_key(&id);
                    if let Some(record) = self.record_from_list(&listed).filter(|_| !known) {
                        self.source.add_running(record);
                    }
                    resume.open.insert(id.clone());
                }
            }
            present.insert(id);
        }
        drop(responses);
        let lost = resume.open.difference(&present).cloned().collect();
        let mut shared = self.source.lock();
        // ended while disconnected: the registry finds them by comparing its inventories
        shared.running.retain(|id, _| present.contains(id));
        shared.connection = ConnectionState::Up;
        shared.generation += 1;
        drop(shared);
        Ok((docker, allowance, Listed { at, state, lost }))
    }

    /// Lists all containers. If a stopped one cannot be parsed, or the response is too large, lists only the running ones.
    async fn list(&self, docker: &Docker) -> Result<Vec<ContainerSummary>, Error> {
        let all = ListContainersOptions { all: true, ..Default::default() };
        match with_timeout(docker.list_containers(Some(all))).await {
            Err(error) if is_unparsable(&error) || is_too_large(&error) => {
                if is_too_large(&error) {
                    self.source.record_oversized("the list of containers, of stopped ones too");
                }
                tracing::debug!(runtime = self.endpoint.runtime, %error, "listing stopped containers failed");
                with_timeout(docker.list_containers(None::<ListContainersOptions>)).await
            }
            other => other,
        }
    }

    /// Inspects a container.
    async fn inspect(&self, docker: &Docker, id: &str) -> Result<InspectResult, Error> {
        match with_timeout(docker.inspect_container(id, None)).await {
            Ok(response) => Ok(self.parse_inspect(response)),
            Err(Error::DockerResponseServerError { status_code: 404, .. }) => Ok(InspectResult::Gone),
            Err(error) if is_too_large(&error) => {
                self.source.record_oversized(id);
                Err(error)
            }
            Err(error) => {
                tracing::warn!(runtime = self.endpoint.runtime, id, %error, "inspecting a container failed");
                Err(error)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::ContainerRecord;
    use std::path::PathBuf;

    pub(super) fn watcher_on(source: &Arc<RuntimeState>, test: impl FnOnce(Watcher<'_>)) {
        let endpoint = RuntimeEndpoint { runtime: "docker", socket: PathBuf::new() };
        test(Watcher { endpoint: &endpoint, filter: &Filter::default(), source });
    }

    pub(super) fn counts(source: &RuntimeState) -> (usize, usize) {
        let state = source.lock();
        (state.running.len(), state.ended.len())
    }

    pub(super) fn started_at(started: f64) -> ContainerRecord {
        ContainerRecord {
            id: ContainerId::new("a"),
            runtime: "docker",
            name: "train".into(),
            pod: None,
            image: "i".into(),
            compose_project: "".into(),
            compose_service: "".into(),
            settings: vec![],
            gpus: Arc::default(),
            started: Some(started),
            labels_match: true,
        }
    }

    #[test]
    fn late_end_of_earlier_run_does_not_end_new_run() {
        let source = RuntimeState::new("docker", Arc::default());
        watcher_on(&source, |watcher| {
            watcher.source.add_running(started_at(10.0));
            watcher.source.end_run(&ContainerId::new("a"), 9.0, None);
            assert_eq!(source.lock().running.len(), 1);
            watcher.source.end_run(&ContainerId::new("a"), 11.0, None);
            assert_eq!(counts(&source), (0, 1));
        });
    }

    #[test]
    fn record_of_list_and_later_inspect_are_one_run() {
        let source = RuntimeState::new("docker", Arc::default());
        watcher_on(&source, |watcher| {
            let listed = ContainerSummary {
                id: Some("a".into()),
                names: Some(vec!["/other/alias".into(), format!("/{}", "n".repeat(300))]),
                image: Some("i".into()),
                ..Default::default()
            };
            let record = watcher.record_from_list(&listed).unwrap();
            assert_eq!((record.name.len(), &*record.image, record.started), (256, "i", None));
            watcher.source.add_running(record);
            watcher.source.add_running(started_at(10.0));
            assert_eq!(counts(&source), (1, 0));
        });
    }

    #[test]
    fn adding_twice_changes_nothing_and_restart_ends_run() {
        let source = RuntimeState::new("docker", Arc::default());
        watcher_on(&source, |watcher| {
            watcher.source.add_running(started_at(10.0));
            let generation = source.lock().generation;
            watcher.source.add_running(started_at(10.0));
            assert_eq!(source.lock().generation, generation);
            watcher.source.add_running(started_at(20.0));
            assert_eq!(counts(&source), (1, 1));
        });
    }

    #[test]
    fn requests_events_since_the_last_within_bounds() {
        let from = |since| DockerResumeState::new(since, HashSet::new()).events_since(1_000_000);
        assert_eq!(from(None), 1_000_000);
        assert_eq!(from(Some(999_000.7)), 999_000);
        assert_eq!(from(Some(1_000_000.9)), 1_000_000, "the list is overlapped in any case");
        assert_eq!(from(Some(2e9)), 1_000_000, "the clock was set back");
        assert_eq!(from(Some(1.0)), 1_000_000 - 86_400);
    }
}
