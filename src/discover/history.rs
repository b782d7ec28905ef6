//! What the container runtimes still know of the past: stopped containers, and the last events of Docker and Podman.
//!
//! For one answer, unlike the connections that follow a runtime ([`super::docker`], [`super::cri`]): all runtimes are queried at
//! the same time, and what they have not returned after [`TIMEOUT`] is missing. Nothing is kept open.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use tokio::time::{Instant, timeout_at};

use super::{ContainerId, ContainerSpec, RuntimeEvent, RuntimeKind, cri, docker, run};
use crate::clock::Timestamp;
use crate::config::{Config, RuntimeEndpoint};

/// Time for all responses of all runtimes.
pub const TIMEOUT: Duration = Duration::from_millis(1_300);
/// Concurrent queries for the details of a container, per runtime.
const MAX_QUERIES: usize = 8;

/// The past of the containers of one runtime.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RuntimeHistory {
    /// The runtime.
    pub runtime: RuntimeKind,
    /// Starts, exits and requests, in no order; some twice.
    pub events: Vec<RuntimeEvent>,
    /// The containers that exist, running or not.
    pub containers: Vec<ExistingContainer>,
    /// Containers of which only the name is known, because the runtime did not return the rest in time.
    pub unread: usize,
    /// Events are missing: those after one that was too large, or the oldest of very many.
    pub has_lost_events: bool,
    /// What failed, and what to do about it.
    pub error: Option<String>,
    /// That is that there is no socket.
    pub is_missing: bool,
}

/// A container that exists.
#[derive(Clone, Debug, PartialEq)]
pub struct ExistingContainer {
    /// Full id.
    pub id: ContainerId,
    /// Its runtime.
    pub runtime: RuntimeKind,
    /// Its name and image.
    pub named: Arc<ContainerSpec>,
    /// Its runtime says that it runs.
    pub is_running: bool,
    /// Pid of its first process, if it is an engine's, which says that it runs.
    pub first_process: Option<u32>,
    /// Its runtime says that it runs, and its first process does not exist.
    pub has_lost_process: bool,
    /// Unix time of its last start.
    pub started: Option<f64>,
    /// Unix time of its last end, as its runtime records it.
    pub ended: Option<f64>,
    /// Its memory limit in bytes; `None` if it has none, or if it is unknown.
    pub limit_bytes: Option<u64>,
    /// Why its last start failed, as its runtime records it.
    pub start_error: Option<String>,
    /// The file of its log on the host; `None` if its runtime does not report it.
    pub log_path: Option<PathBuf>,
    /// How often its restart policy has restarted it.
    pub restarts: Option<u64>,
}

impl ExistingContainer {
    /// Returns whether it is meant by this name, in a pod also `POD/NAME` or `NAMESPACE/POD/NAME`.
    pub fn has_name(&self, wanted: &str) -> bool {
        self.named.identity().matches_name(wanted)
    }
}

/// What is wanted from a runtime.
#[derive(Clone, Copy, Debug)]
pub struct HistoryQuery<'a> {
    /// Time of the query.
    pub now: Timestamp,
    /// Unix time from which on events are wanted.
    pub since: f64,
    /// A container whose details are wanted first: its name, or the beginning of its id.
    pub container: Option<&'a str>,
    /// Until when lists and events are waited for.
    pub(super) deadline: Instant,
    /// Until when the details of containers are.
    details_deadline: Instant,
}

impl HistoryQuery<'_> {
    /// Queries each of these until their deadline, in order and several at once. `read`: returns whether a response is usable. Returns the
    /// number of those without a usable one.
    pub(super) async fn each<T, R, F: Future<Output = R>>(
        &self,
        wanted: Vec<T>,
        query: impl Fn(T) -> F,
        mut read: impl FnMut(R) -> bool,
    ) -> usize {
        let mut unread = wanted.len();
        let mut responses = futures_util::stream::iter(wanted).map(query).buffer_unordered(MAX_QUERIES);
        while let Ok(Some(response)) = timeout_at(self.details_deadline, responses.next()).await {
            unread -= usize::from(read(response));
        }
        unread
    }

    /// Returns the order of a container among those whose details are queried: lower is earlier.
    pub(super) fn rank(&self, id: &str, has_name: impl FnOnce(&str) -> bool) -> u8 {
        let is_wanted = self
            .container
            .is_some_and(|wanted| !wanted.is_empty() && (id.starts_with(wanted) || has_name(wanted)));
        u8::from(!is_wanted)
    }
}

/// Returns false if there is no such file. In a folder that this process may not enter there may be one.
fn may_exist(path: &Path) -> bool {
    path.try_exists().unwrap_or(true)
}

/// Returns the engines without a socket, and whether a setting or `DOCKER_HOST` names it: a missing socket at a default path is of interest
/// only where there is no engine at all. `found`: those with a socket.
fn missing_sockets(config: &Config, found: &[RuntimeEndpoint]) -> Vec<(RuntimeHistory, bool)> {
    let is_missing = |endpoint: &&RuntimeEndpoint| {
        docker::matches(&endpoint.socket)
            .iter()
            .any(|socket| socket == &endpoint.socket && !may_exist(socket))
    };
    let describe = |endpoint: &RuntimeEndpoint, is_named: bool| {
        let (runtime, socket) = (endpoint.runtime, endpoint.socket.display());
        let fix = match is_named {
            true => format!("start its daemon, or set --{runtime}.socket to its socket"),
            false => format!(
                "start its daemon, or set --{runtime}.socket to the socket of another engine, as of rootless Docker"
            ),
        };
        let error = Some(format!("there is no socket at {socket}: {fix}"));
        (RuntimeHistory { runtime, error, is_missing: true, ..RuntimeHistory::default() }, is_named)
    };
    let (default, named): (Vec<_>, Vec<_>) =
        config.endpoints.iter().filter(is_missing).partition(|endpoint| endpoint.is_default());
    let named: Vec<_> = named.into_iter().map(|endpoint| describe(endpoint, true)).collect();
    if !named.is_empty() || !found.is_empty() {
        return named;
    }
    default.into_iter().take(1).map(|endpoint| describe(endpoint, false)).collect()
}

/// Reads what all configured runtimes know of the time since `since`, a Unix time. A runtime that has never been on this host is not in
/// the result.
///
/// `container`: the container whose details are read first, by its name or the beginning of its id. `for_details`: how long the details of all
/// containers may take; the rest takes at most [`TIMEOUT`].
///
/// # Errors
/// No thread or socket can be created.
pub fn read(
    config: &Config,
    now: Timestamp,
    since: f64,
    container: Option<&str>,
    for_details: Duration,
) -> std::io::Result<Vec<RuntimeHistory>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let began = Instant::now();
        let (deadline, details_deadline) = (began + TIMEOUT, began + for_details);
        let query = HistoryQuery { now, since, container, deadline, details_deadline };
        let sockets = |endpoint: &RuntimeEndpoint| {
            let runtime = endpoint.runtime;
            docker::matches(&endpoint.socket)
                .into_iter()
                .map(move |socket| RuntimeEndpoint { runtime, socket })
        };
        let endpoints: Vec<_> = config
            .endpoints
            .iter()
            .flat_map(sockets)
            .filter(|endpoint| may_exist(&endpoint.socket))
            .collect();
        let missing = missing_sockets(config, &endpoints);
        let engines = endpoints.iter().map(|endpoint| docker::history(endpoint, &config.filter, query));
        let (mut found, pods) = tokio::join!(
            futures_util::future::join_all(engines),
            cri::history(&config.cri, &config.filter, query)
        );
        found.extend(
            missing.into_iter().filter(|(_, is_named)| *is_named || pods.is_none()).map(|(it, _)| it),
        );
        found.extend(pods);
        let spools = run::spool::all(config.run.spool.as_deref());
        found.extend(run::history(spools.iter().map(|spool| &**spool), &config.host_paths, &config.filter));
        Ok(found)
    })
}
