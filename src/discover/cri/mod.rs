//! Pods and their containers as the kubelet's container runtime tells them, over CRI (`runtime.v1` on containerd's or
//! CRI-O's Unix socket). No API server is asked, so nothing is granted to memledger in the cluster, and a thousand nodes cost
//! the control plane nothing.
//!
//! The list is taken every second, and what it says is compared with what it said before ([`watch`]); a container is asked
//! about for itself when it is new and when it has ended. Where the runtime has events for everybody they ring the bell, and
//! the list is taken only every ten seconds beside them. Events alone would not do: they are not told again to
//! whoever was away, and a list is.
//!
//! A container of a pod never runs twice: a restart is another container, with another id and one more attempt, under the
//! same identity. Nobody tells who asked for an end: CRI has no word for it. So an end by SIGTERM is `signal` in the ledger, and
//! never `stopped`.
//!
//! Which of the default sockets is the kubelet's shows by its pods: Docker's own containerd listens on the same path, and
//! may have no pods, or no CRI at all. That is no runtime that is away. A socket that somebody named is.

mod asking;
mod client;
mod inspect;
#[cfg(any(test, fuzzing))]
pub mod laws;
pub mod messages;
pub mod pod_resources;
mod watch;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub use client::{Client, CriError};
use watch::Watch;

use super::{ContainerId, Link, Source};
use crate::clock::Moment;
use crate::config::{CriSettings, Filter};

/// Its name among the runtimes.
pub const RUNTIME: &str = "cri";
/// Pause between two lists, without events and with them.
const LIST_EVERY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));
/// Events that come so soon after one another are answered by one list.
const EVENTS_TOGETHER: Duration = Duration::from_millis(100);
/// Pause before the next try to connect; and before the next look at a default socket that is no such runtime's.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));

/// What is remembered over connections; at the start, what the ledger remembered over its own.
#[derive(Debug)]
pub struct Memory {
    /// Unix time: of what the first list has, a container that started after it and has ended was not told of.
    since: f64,
    /// There was a list. What is not on it and on a later one is new, whatever its clock says.
    has_list: bool,
    /// Containers that were told of, and how much.
    told: std::collections::HashMap<ContainerId, watch::Told>,
}

impl Memory {
    /// `since`: Unix time of the last start that the ledger has. `open`: containers that ran then.
    pub fn new(since: Option<f64>, open: HashSet<ContainerId>) -> Self {
        let since = since.unwrap_or_else(|| Moment::now().unix_seconds());
        Self { since, has_list: false, told: open.into_iter().map(|id| (id, watch::Told::Runs)).collect() }
    }
}

/// Follows the kubelet's runtime for ever, writing what it tells into `source`.
pub async fn follow(settings: CriSettings, filter: Filter, source: Arc<Source>, mut memory: Memory) {
    let mut said = String::new();
    loop {
        let mut pause = RETRY.0;
        match find(&settings).await {
            Found::Runtime(socket, client) => {
                said.clear();
                let error = Watch::new(&settings, &filter, &source, &mut memory).run(&client, &socket).await;
                if source.lock().link == Link::Up {
                    tracing::warn!(runtime = RUNTIME, %error, "connection lost; names are kept, trying again");
                    source.set_link(Link::Down);
                }
            }
            Found::Nothing { link, why } => {
                let was_there = matches!(source.lock().link, Link::Up | Link::Down);
                // one that answers and has no pods any more is not away: the kubelet may have another now
                let link = if was_there && link != Link::Idle { Link::Down } else { link };
                if link == Link::NoSocket && !why.is_empty() {
                    pause = RETRY.1;
                }
                if !why.is_empty() && said != why {
                    match link {
                        Link::Down => {
                            tracing::warn!(runtime = RUNTIME, "cannot ask for pods: {why}; trying again")
                        }
                        _ => tracing::debug!(runtime = RUNTIME, "no pods: {why}"),
                    }
                    said = why;
                }
                source.set_link(link);
            }
        }
        tokio::time::sleep(pause).await;
    }
}

/// What the look at all sockets found.
pub enum Found {
    /// The kubelet's runtime.
    Runtime(PathBuf, Client),
    /// None.
    Nothing {
        /// Whether there may be one soon, or should be one.
        link: Link,
        /// What was found instead.
        why: String,
    },
}

/// Looks for the kubelet's runtime at the sockets of the settings.
pub async fn find(settings: &CriSettings) -> Found {
    let (mut link, mut why) = (Link::NoSocket, String::new());
    for socket in settings.sockets.iter().filter(|socket| socket.exists()) {
        let reason = match connect(socket).await {
            Ok((client, pods)) if pods > 0 || settings.is_asked_for => {
                return Found::Runtime(socket.clone(), client);
            }
            Ok(_) => {
                link = Link::Idle;
                format!("{} has none", socket.display())
            }
            Err(error) => {
                if settings.is_asked_for {
                    link = Link::Down;
                }
                format!("{}: {error}: {}", socket.display(), error.advice(socket))
            }
        };
        why = if why.is_empty() { reason } else { format!("{why}; {reason}") };
    }
    if settings.is_asked_for && why.is_empty() && !settings.sockets.is_empty() {
        let places: Vec<_> = settings.sockets.iter().map(|socket| socket.display().to_string()).collect();
        (link, why) = (Link::Down, format!("no socket at {}", places.join(", ")));
    }
    Found::Nothing { link, why }
}

/// A connection to a runtime for pods, and how many it has.
///
/// # Errors
/// Nobody answers there, or not as such a runtime.
pub async fn connect(socket: &Path) -> Result<(Client, usize), CriError> {
    let client = Client::connect(socket).await?;
    let pods = client.sandboxes().await?.len();
    Ok((client, pods))
}

/// Unix time of a point in time of CRI; `None` for one that did not come yet.
fn unix_seconds(nanos: i64) -> Option<f64> {
    (nanos > 0).then_some(nanos as f64 / 1e9)
}
