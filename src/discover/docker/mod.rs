//! Containers from the Docker API. Podman serves the same API on its own socket.
//!
//! memledger uses three read-only calls here: list, inspect and events; `container_logs` has a fourth. Paths have no API version, so the daemon responds with its
//! own. The results go to two consumers: the registry needs the containers that run now, and the ledger needs every event, in
//! order and once ([`RuntimeEvent`]).
//!
//! A connection begins with the events since the last one received before, if there was one, and the list, stopped containers
//! included, for their names. Then follows one event stream that starts at that last event and overlaps the list by at least a
//! second: duplicate events are dropped ([`events::EventDedup`]). Containers are listed again soon after an event that changes them, at
//! most once a second ([`reconcile`]), and all once a minute, because a daemon or a proxy may lose events.
//!
//! The daemon may be absent, stop and come back. Names are kept while it is unavailable, and containers are listed again after
//! each reconnect.

mod connection;
mod events;
mod convert;
mod history;
mod lenient;
#[cfg(any(test, fuzzing))]
pub mod invariants;
mod transport;
mod reconcile;
mod sockets;

use std::collections::{HashMap, HashSet};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bollard::Docker;
use bollard::errors::Error;
use bollard::models::{ContainerInspectResponse, ContainerSummary};
use bollard::query_parameters::ListContainersOptions;
use tracing::Instrument;

use super::reconcile::RuntimeFollower;
use super::{ConnectionState, ContainerId, EventKind, RuntimeEvent, RuntimeKind, RuntimeState};
use crate::clock::Timestamp;
use crate::config::{Filter, RuntimeEndpoint};
use crate::host::Backoff;
use connection::DockerConnection;
pub use history::history;
use reconcile::DockerReconciler;
pub use sockets::{follow_all, matches};
pub use transport::client;
use transport::{Allowance, is_too_large};

/// Timeout of one whole response. The event stream itself may be idle for ever.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest delay before a socket that does not exist is looked for again.
const MAX_FILE_DELAY: Duration = Duration::from_secs(1);
/// Delay before the next connection attempt: the first, doubling up to the last.
const RETRY_DELAY: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(4));
/// A connection that lasted this long was stable.
const STABLE_AFTER: Duration = Duration::from_secs(10);
/// Maximum number of ids in a request, each of 64 characters; of more changed containers, all that run are listed.
const MAX_LISTED_IDS: usize = 100;
/// Interval of lists of all containers.
const LIST_INTERVAL: Duration = Duration::from_secs(60);
/// Events are requested from this many seconds before the list at most.
const MAX_EVENT_AGE_SECONDS: f64 = 86_400.0;

/// State of a socket across connections; initialized from the ledger's state.
#[derive(Clone, Debug)]
pub struct DockerResumeState {
    /// Unix time of the last event.
    since: Option<f64>,
    /// Containers whose run has begun, without an end so far.
    open: HashSet<ContainerId>,
    seen: events::EventDedup,
    /// Containers that run, by this socket.
    own: HashSet<ContainerId>,
    /// Unix times of ends that a list showed, whose events may still follow.
    healed: HashMap<ContainerId, f64>,
    /// Other sockets of the same runtime are followed too, and the containers of the ledger may be theirs.
    has_siblings: bool,
    /// The socket was found by a pattern: it is not waited for once it is gone.
    ends_with_socket: bool,
    list_interval: Duration,
}

impl Default for DockerResumeState {
    fn default() -> Self {
        Self::new(None, HashSet::new())
    }
}

impl DockerResumeState {
    /// Creates the state. `since`: Unix time of the last event in the ledger. `open`: containers that ran then.
    pub fn new(since: Option<f64>, open: HashSet<ContainerId>) -> Self {
        Self {
            since,
            open,
            seen: events::EventDedup::default(),
            own: HashSet::new(),
            healed: HashMap::new(),
            has_siblings: false,
            ends_with_socket: false,
            list_interval: LIST_INTERVAL,
        }
    }

    /// Sets the interval of lists, which is a minute unless set.
    pub fn with_list_interval(self, list_interval: Duration) -> Self {
        Self { list_interval, ..self }
    }

    fn track(&mut self, runtime_event: &RuntimeEvent) {
        match runtime_event.what {
            EventKind::Started | EventKind::Running { .. } => {
                self.open.insert(runtime_event.id.clone());
            }
            EventKind::Ended { .. } => {
                self.open.remove(&runtime_event.id);
                self.own.remove(&runtime_event.id);
            }
            EventKind::Exists
            | EventKind::Sandbox
            | EventKind::SandboxRemoved
            | EventKind::Oom
            | EventKind::SignalRequested { .. }
            | EventKind::Renamed => {}
        }
    }

    /// Returns whether there was an event before.
    fn has_events(&self) -> bool {
        self.since.is_some()
    }

    /// Returns the start time for the events: at the latest the whole second before the list, by the clock as it is now, because it
    /// may have been set back since, and events have its time.
    fn events_since(&self, listed_at: Timestamp) -> u64 {
        let moved = Timestamp::now().wall_moved_since(listed_at);
        let before_list = ((listed_at.unix_seconds() + moved.min(0.0)).floor() - 1.0).max(0.0);
        self.since
            .map_or(before_list, |since| since.clamp(before_list - MAX_EVENT_AGE_SECONDS, before_list))
            .max(0.0) as u64
    }
}

/// Follows one socket, and writes its containers and events to `source`. Returns only for a socket that was found by a pattern,
/// when it is gone: the state with which to resume when it is back.
pub async fn follow(
    endpoint: RuntimeEndpoint,
    filter: Filter,
    source: Arc<RuntimeState>,
    mut resume: DockerResumeState,
) -> DockerResumeState {
    let mut backoff = Backoff::new(RETRY_DELAY.0, RETRY_DELAY.1);
    let mut flaps = false;
    loop {
        let watcher = Watcher::new(&endpoint, &filter, &source);
        if !endpoint.socket.exists() && resume.ends_with_socket {
            source.remove_socket(&endpoint.socket, &resume.own);
            return resume;
        }
        if !endpoint.socket.exists() {
            // a socket that existed and is gone means that the daemon is down
            let connection = source.connection_of(&endpoint.socket);
            let was_there = matches!(connection, ConnectionState::Up | ConnectionState::Down);
            watcher.set_connection(if was_there { ConnectionState::Down } else { ConnectionState::NoSocket });
        } else {
            let lasted = watcher.follow_once(&mut resume, flaps).await;
            flaps = lasted.is_some_and(|lasted| lasted < STABLE_AFTER) || (flaps && lasted.is_none());
            if lasted.is_some_and(|lasted| lasted >= STABLE_AFTER) {
                backoff.reset();
            }
        }
        let delay = backoff.delay();
        // checking for a file is cheap: connect soon after it appears
        let max_delay = if endpoint.socket.exists() { delay } else { MAX_FILE_DELAY };
        tokio::time::sleep(delay.min(max_delay)).await;
    }
}

fn runtime_call(runtime: RuntimeKind, call: &str) -> tracing::Span {
    tracing::info_span!("runtime call", %runtime, call)
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

/// Inspects a container; see [`lenient`].
async fn inspect(docker: &Docker, socket: &Path, id: &str) -> Result<ContainerInspectResponse, Error> {
    match docker.inspect_container(id, None).await {
        Err(error) if is_unparsable(&error) => lenient::inspect(socket, id).await,
        other => other,
    }
}

/// Returns whether a response could not be parsed.
fn is_unparsable(error: &Error) -> bool {
    matches!(error, Error::JsonDataError { .. } | Error::JsonSerdeError { .. })
}

struct Watcher<'a> {
    endpoint: &'a RuntimeEndpoint,
    filter: &'a Filter,
    source: &'a Arc<RuntimeState>,
    /// The user whose engine it is: the owner of its socket.
    user: u32,
}

impl<'a> Watcher<'a> {
    fn new(endpoint: &'a RuntimeEndpoint, filter: &'a Filter, source: &'a Arc<RuntimeState>) -> Self {
        let user = std::fs::metadata(&endpoint.socket).map_or(0, |socket| socket.uid());
        Self { endpoint, filter, source, user }
    }

    /// Follows one connection until it breaks. Returns how long it lasted after the list; `None` if there was no list.
    ///
    /// `flaps`: the previous connection broke at once, as behind a proxy that rejects the events. That is logged once, and then
    /// the next connection is logged only after [`STABLE_AFTER`].
    async fn follow_once(&self, resume: &mut DockerResumeState, flaps: bool) -> Option<Duration> {
        let (runtime, socket) = (self.endpoint.runtime, &self.endpoint.socket);
        let ends_with_socket = resume.ends_with_socket;
        let connected = async {
            let (docker, allowance) = client(socket)?;
            let reconciler = DockerReconciler::new(self, resume);
            RuntimeFollower::start(DockerConnection::new(reconciler, docker, allowance)).await
        };
        let reconciler = match connected.await {
            Ok(reconciler) => reconciler,
            Err(error) => {
                self.record_failure(&error, ends_with_socket);
                return None;
            }
        };
        let began = Timestamp::now();
        let mut connection = std::pin::pin!(reconciler.run());
        if flaps && let Ok(error) = tokio::time::timeout(STABLE_AFTER, &mut connection).await {
            tracing::debug!(%runtime, %error, "connection lost again");
        } else {
            tracing::info!(%runtime, socket = %socket.display(), "connected");
            let error = connection.await;
            tracing::warn!(%runtime, %error, "connection lost, retrying; container names are kept");
        }
        self.set_connection(ConnectionState::Down);
        Some(Timestamp::now().since(began))
    }

    /// Records that there was no list. A socket that a pattern found is a runtime only once it has responded.
    fn record_failure(&self, error: &Error, is_guess: bool) {
        if is_too_large(error) {
            self.source.record_oversized("the list of containers");
        }
        let (runtime, socket) = (self.endpoint.runtime, &self.endpoint.socket);
        let before = self.source.connection_of(socket);
        let reason = explain(error, socket);
        if is_guess && before == ConnectionState::Starting {
            tracing::debug!(%runtime, %error, "listing containers failed, retrying: {reason}");
            return;
        }
        if before != ConnectionState::Down {
            tracing::warn!(%runtime, %error, "listing containers failed, retrying: {reason}");
        }
        self.set_connection(ConnectionState::Down);
    }

    /// Lists these containers, of which those that do not run may be missing.
    async fn list_some(
        &self,
        docker: &Docker,
        ids: &HashSet<ContainerId>,
    ) -> Result<Vec<ContainerSummary>, Error> {
        if ids.is_empty() {
            return Ok(vec![]);
        }
        let ids: Vec<_> = ids.iter().map(|id| id.as_str().to_owned()).collect();
        let filters = (ids.len() <= MAX_LISTED_IDS).then(|| HashMap::from([("id".to_owned(), ids)]));
        let some = ListContainersOptions { filters, ..Default::default() };
        let call = runtime_call(self.endpoint.runtime, "list");
        match with_timeout(docker.list_containers(Some(some))).instrument(call).await {
            // of all that run: these are among them
            Err(error) if is_unparsable(&error) => {
                with_timeout(lenient::list(&self.endpoint.socket, "")).await
            }
            other => other,
        }
    }

    /// Lists all containers. If the response is too large, lists only the running ones, and calls `on_oversized`.
    async fn list_all(
        &self,
        docker: &Docker,
        on_oversized: impl FnOnce() + Send,
    ) -> Result<Vec<ContainerSummary>, Error> {
        let all = ListContainersOptions { all: true, ..Default::default() };
        let call = runtime_call(self.endpoint.runtime, "list");
        match with_timeout(docker.list_containers(Some(all))).instrument(call).await {
            Err(error) if is_unparsable(&error) => {
                with_timeout(lenient::list(&self.endpoint.socket, "all=true")).await
            }
            Err(error) if is_too_large(&error) => {
                on_oversized();
                tracing::debug!(runtime = %self.endpoint.runtime, %error, "listing stopped containers failed");
                with_timeout(docker.list_containers(None::<ListContainersOptions>)).await
            }
            other => other,
        }
    }

    fn set_connection(&self, connection: ConnectionState) {
        self.source.set_connection_of(&self.endpoint.socket, connection);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::{ContainerRecord, ContainerSpec};
    use std::path::PathBuf;

    pub(super) fn watcher_on(source: &Arc<RuntimeState>, test: impl FnOnce(Watcher<'_>)) {
        let endpoint = RuntimeEndpoint { runtime: RuntimeKind::Docker, socket: PathBuf::new() };
        test(Watcher::new(&endpoint, &Filter::default(), source));
    }

    pub(super) fn counts(source: &RuntimeState) -> (usize, usize) {
        let state = source.lock();
        (state.running.len(), state.ended.len())
    }

    /// Docker calls a container running while its restart policy waits, for up to a minute.
    #[test]
    fn container_that_waits_for_its_restart_does_not_run() {
        let inspect = r#"{"Id": "a", "Name": "/train", "State": {"Status": "restarting", "Running": true, "Restarting": true,
            "Pid": 0, "ExitCode": 7, "StartedAt": "2026-11-26T10:00:00Z", "FinishedAt": "2026-11-26T10:00:01Z"}}"#;
        let source = RuntimeState::new(RuntimeKind::Docker, Arc::default());
        watcher_on(&source, |watcher| {
            let inspected = watcher.parse_inspect(serde_json::from_str(inspect).unwrap()).unwrap();
            assert!(!inspected.is_running && inspected.finished.is_some(), "{inspected:?}");
            assert_eq!(inspected.exit_code, Some(7));
        });
        let listed = r#"[{"Id": "a", "Names": ["/train"], "State": "restarting"},
            {"Id": "b", "Names": ["/other"], "State": "paused"}]"#;
        let listed: Vec<bollard::models::ContainerSummary> = serde_json::from_str(listed).unwrap();
        assert_eq!(listed.iter().map(convert::may_run).collect::<Vec<_>>(), [false, true]);
    }

    pub(super) fn started_at(started: f64) -> ContainerRecord {
        let spec = ContainerSpec::labelled(["train", "i"], &HashMap::new(), &Filter::default());
        ContainerRecord { started: Some(started), ..ContainerRecord::new("a", RuntimeKind::Docker, spec) }
    }

    #[test]
    fn late_end_of_earlier_run_does_not_end_new_run() {
        let source = RuntimeState::new(RuntimeKind::Docker, Arc::default());
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
        let source = RuntimeState::new(RuntimeKind::Docker, Arc::default());
        watcher_on(&source, |watcher| {
            let listed = ContainerSummary {
                id: Some("a".into()),
                names: Some(vec!["/other/alias".into(), format!("/{}", "n".repeat(300))]),
                image: Some("i".into()),
                ..Default::default()
            };
            let record = watcher.record_from_list(&listed).unwrap();
            assert_eq!((record.spec.name.len(), &*record.spec.image, record.started), (256, "i", None));
            watcher.source.add_running(record);
            watcher.source.add_running(started_at(10.0));
            assert_eq!(counts(&source), (1, 0));
        });
    }

    #[test]
    fn adding_twice_changes_nothing_and_restart_ends_run() {
        let source = RuntimeState::new(RuntimeKind::Docker, Arc::default());
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
        let now = Timestamp::now();
        let second = now.unix_whole_seconds() - 1;
        let from = |since| DockerResumeState::new(since, HashSet::new()).events_since(now);
        assert_eq!(from(None), second);
        assert_eq!(from(Some(second as f64 - 1000.3)), second - 1001);
        assert_eq!(from(Some(second as f64 + 0.9)), second, "the list is overlapped in any case");
        assert_eq!(from(Some(second as f64 + 1e6)), second, "the clock was set back");
        assert_eq!(from(Some(1.0)), second - 86_400);
    }
}
