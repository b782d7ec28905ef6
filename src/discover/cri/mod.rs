//! Pods and their containers from the kubelet's container runtime, over CRI (`runtime.v1` on the Unix socket of containerd or
//! CRI-O). memledger does not use the API server: it needs no permissions in the cluster, and a thousand nodes put no load on
//! the control plane.
//!
//! Containers are listed every second and compared with the list before ([`reconcile`]). The status of a container is queried
//! when it is new and when it has ended. Where the runtime sends its events to every client, an event triggers a list, and
//! otherwise containers are listed every ten seconds; of containerd 1 these are its own events of ends, beside a list every second.
//! Events alone are not sufficient: those sent while memledger is not connected are lost, whereas a list is complete.
//!
//! A container of a pod never runs twice: a restart is another container under the same identity, with another id and the next
//! attempt number. CRI does not report stop requests, so the ledger records an exit by SIGTERM as `signal` and never as
//! `stopped`.
//!
//! In a pod the socket is mounted as a file, and a runtime that is restarted makes another one. Only a new start of memledger's container
//! mounts that, so memledger ends for one: once a new container shows that the runtime is back. While the runtime stays stopped,
//! the kubelet could not start memledger again.
//!
//! A default socket is the kubelet's runtime if it has pods: Docker's own containerd listens on the same path, and may have no
//! pods, or no CRI at all. Such a socket does not count as an unavailable runtime. A socket that was configured does.

mod client;
mod convert;
mod history;
#[cfg(any(test, fuzzing))]
pub mod invariants;
pub mod messages;
pub mod pod_resources;
mod reconcile;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub use client::{CriClient, CriError};
pub use history::history;
use reconcile::{CriConnection, CriReconciler};

use super::reconcile::RuntimeFollower;
use super::{ConnectionState, ContainerId, RuntimeKind, RuntimeState};
use crate::clock::Timestamp;
use crate::config::{CriSettings, Filter};
use crate::host::{Health, in_pod};

/// Interval of lists, without events and with them.
const LIST_INTERVAL: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));
/// Events within this time trigger one list.
const EVENT_DEBOUNCE: Duration = Duration::from_millis(100);
/// Delay before the next connection attempt; and before a default socket that is not a CRI runtime is tried again.
const RETRY_DELAY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));

/// A container that was started so many seconds after the connection was lost was started by a runtime that is back.
const BACK_AFTER: f64 = 1.0;

/// State across connections; initialized from the ledger's state.
#[derive(Debug)]
pub struct CriResumeState {
    /// Unix time. A container of the first list that started later and has ended is reported.
    since: f64,
    /// There was a list. A container that first appears on a later one is new, whatever its time stamps.
    has_list: bool,
    /// Reported containers.
    reported: std::collections::HashMap<ContainerId, reconcile::ReportedState>,
}

impl CriResumeState {
    /// Creates the state. `since`: Unix time of the last start in the ledger. `open`: containers that ran then.
    pub fn new(since: Option<f64>, open: HashSet<ContainerId>) -> Self {
        let since = since.unwrap_or_else(|| Timestamp::now().unix_seconds());
        Self {
            since,
            has_list: false,
            reported: open.into_iter().map(|id| (id, reconcile::ReportedState::Running)).collect(),
        }
    }
}

/// Follows the kubelet's runtime, and writes its containers and events to `source`. Returns when the mounted socket is stale.
pub async fn follow(
    settings: CriSettings,
    filter: Filter,
    source: Arc<RuntimeState>,
    mut resume: CriResumeState,
) {
    let mut outage = Outage::default();
    loop {
        let mut pause = RETRY_DELAY.0;
        match find(&settings).await {
            SocketSearch::Runtime(socket, client) => {
                let reconciler = CriReconciler::new(&settings, &filter, &source, &mut resume);
                let error = follow_once(reconciler, &client, &socket).await;
                outage.record_failure(&source, error.to_string());
            }
            SocketSearch::Nothing { connection, why, is_refused } => {
                let is_of_another = !why.is_empty();
                let connection = outage.record_nothing(&source, connection, why);
                if is_of_another && connection == ConnectionState::NoSocket {
                    pause = RETRY_DELAY.1;
                }
                let is_lost = is_refused && connection == ConnectionState::Down && in_pod();
                if is_lost && outage.is_over(&source) {
                    tracing::warn!(
                        runtime = %RuntimeKind::Cri,
                        "the container runtime was restarted, and the socket that is mounted here is the one before: ending, for the kubelet \
                         to start this container again with the new one"
                    );
                    source.stale_socket.notify_one();
                    return;
                }
            }
        }
        tokio::time::sleep(pause).await;
    }
}

/// The time without a connection.
#[derive(Debug, Default)]
struct Outage {
    health: Health,
    /// When the last connection was lost.
    lost_at: Option<Timestamp>,
}

impl Outage {
    /// Records that a connection was lost, or that the first list failed.
    fn record_failure(&mut self, source: &RuntimeState, error: String) {
        if source.lock().connection == ConnectionState::Up {
            tracing::warn!(
                runtime = %RuntimeKind::Cri,
                error,
                "connection lost, retrying; container names are kept"
            );
            self.health.recovered();
            self.lost_at = Some(Timestamp::now());
        } else if self.health.failed_because(Timestamp::now(), &error) {
            tracing::warn!(runtime = %RuntimeKind::Cri, error, "listing containers failed, retrying");
        }
        source.set_connection(ConnectionState::Down);
    }

    /// Records that no socket is that of the kubelet's runtime. Returns the state of the connection.
    fn record_nothing(
        &mut self,
        source: &RuntimeState,
        found: ConnectionState,
        why: String,
    ) -> ConnectionState {
        let was_there = matches!(source.lock().connection, ConnectionState::Up | ConnectionState::Down);
        // a runtime that responds and has no pods left is not down: the kubelet may use another now
        let is_down = was_there && found != ConnectionState::Idle;
        let connection = if is_down { ConnectionState::Down } else { found };
        if !why.is_empty() && self.health.failed_because(Timestamp::now(), &why) {
            match connection {
                ConnectionState::Down => {
                    tracing::warn!(
                        runtime = %RuntimeKind::Cri,
                        "listing pods failed, retrying: {why}"
                    )
                }
                _ => tracing::debug!(runtime = %RuntimeKind::Cri, "no pods: {why}"),
            }
        }
        source.set_connection(connection);
        connection
    }

    /// Returns whether a container that was started since shows that the runtime is back.
    fn is_over(&self, source: &RuntimeState) -> bool {
        let started = source.lock().newest_unnamed_start;
        let is_after =
            |(started, lost): (f64, Timestamp)| started >= lost.since_boot().as_secs_f64() + BACK_AFTER;
        started.zip(self.lost_at).is_some_and(is_after)
    }
}

/// Follows one connection until a call fails; returns the error.
async fn follow_once(reconciler: CriReconciler<'_>, client: &CriClient, socket: &Path) -> CriError {
    let reconciler = async { RuntimeFollower::start(CriConnection::new(reconciler, client).await?).await };
    match reconciler.await {
        Ok(reconciler) => {
            tracing::info!(runtime = %RuntimeKind::Cri, socket = %socket.display(), "connected");
            reconciler.run().await
        }
        Err(error) => error,
    }
}

/// Result of the search for the kubelet's runtime.
pub enum SocketSearch {
    /// The kubelet's runtime.
    Runtime(PathBuf, CriClient),
    /// There is none.
    Nothing {
        /// Whether one may appear, or is expected.
        connection: ConnectionState,
        /// The reason, for each socket.
        why: String,
        /// A socket is there on which no process listens.
        is_refused: bool,
    },
}

/// Searches the configured sockets for the kubelet's runtime.
pub async fn find(settings: &CriSettings) -> SocketSearch {
    let (mut connection, mut why, mut is_refused) = (ConnectionState::NoSocket, String::new(), false);
    for socket in settings.sockets.iter().filter(|socket| socket.exists()) {
        let reason = match connect(socket).await {
            Ok((client, pods)) if pods > 0 || settings.is_explicit => {
                return SocketSearch::Runtime(socket.clone(), client);
            }
            Ok(_) => {
                connection = ConnectionState::Idle;
                format!("{} has none", socket.display())
            }
            Err(error) => {
                is_refused |= error.is_refused();
                if settings.is_explicit {
                    connection = ConnectionState::Down;
                }
                format!("{}: {error}: {}", socket.display(), error.advice(socket))
            }
        };
        why = if why.is_empty() { reason } else { format!("{why}; {reason}") };
    }
    if settings.is_explicit && why.is_empty() && !settings.sockets.is_empty() {
        let paths: Vec<_> = settings.sockets.iter().map(|socket| socket.display().to_string()).collect();
        (connection, why) = (ConnectionState::Down, format!("no socket at {}", paths.join(", ")));
    }
    SocketSearch::Nothing { connection, why, is_refused }
}

/// Connects to a CRI runtime and counts its pods.
///
/// # Errors
/// The connection failed, or the server is not a CRI runtime.
pub async fn connect(socket: &Path) -> Result<(CriClient, usize), CriError> {
    let client = CriClient::connect(socket).await?;
    let pods = client.sandboxes().await?.len();
    Ok((client, pods))
}

/// Converts a time stamp of CRI to Unix time; `None` if it is not set.
fn unix_seconds(nanos: i64) -> Option<f64> {
    (nanos > 0).then_some(nanos as f64 / 1e9)
}
