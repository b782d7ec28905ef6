//! Containers as the Docker API tells them; Podman speaks the same API on its own socket.
//!
//! Three calls are used: list, inspect and events, all reading. Paths carry no API version, so the daemon answers with
//! its own. Two readers get what is told here: the registry, which wants to know what runs now, and the ledger, which
//! wants to know what happened, in order and once ([`Fact`]).
//!
//! One connection: the list first, of the stopped ones too, for their names; then one stream of events, asked for from
//! the last event of before, so that it begins with what happened while nobody listened ([`watch`]). It overlaps the list
//! by a second at least: entering a container twice changes nothing, and an event is told once ([`events::Seen`]).
//!
//! The daemon may be absent, die and come back. Names stay while it is away, and the list is taken anew when it is back.

mod events;
mod inspect;
#[cfg(any(test, fuzzing))]
pub mod laws;
mod watch;

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bollard::Docker;
use bollard::errors::Error;
use bollard::models::ContainerSummary;
use bollard::query_parameters::ListContainersOptions;
use futures_util::StreamExt;

use super::{ContainerId, Fact, Link, Source, What};
use crate::clock::Moment;
use crate::config::{Endpoint, Filter};
use inspect::{Found, exists, may_run, running};
use watch::{Listed, Watch};

/// Time for one whole answer of the daemon. The event stream itself may be idle for ever.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Pause before the next try to connect: the first, doubling up to the last.
const RETRY: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(4));
/// A connection that lived so long was a good one.
const GOOD_AFTER: Duration = Duration::from_secs(10);
/// Inspect calls under way at once.
const INSPECTS: usize = 8;
/// Events are not asked for from before this many seconds before the list.
const OLDEST_EVENT: f64 = 86_400.0;

/// What is remembered of a runtime over connections; at the start, what the ledger remembered over its own.
#[derive(Debug, Default)]
pub struct Memory {
    /// Unix time of the last event.
    since: Option<f64>,
    /// Containers of which a run has begun, and its end was not told.
    open: HashSet<ContainerId>,
    seen: events::Seen,
}

impl Memory {
    /// `since`: Unix time of the last event that the ledger has. `open`: containers that ran then.
    pub fn new(since: Option<f64>, open: HashSet<ContainerId>) -> Self {
        Self { since, open, seen: events::Seen::default() }
    }

    fn note(&mut self, fact: &Fact) {
        match fact.what {
            What::Started | What::Running { .. } => drop(self.open.insert(fact.id.clone())),
            What::Ended { .. } => drop(self.open.remove(&fact.id)),
            What::Exists | What::Oom | What::Asked { .. } | What::Renamed => {}
        }
    }

    /// From where to ask for events, given the whole second before the list. A time that lies after it is no use.
    fn ask_from(&self, before_list: u64) -> u64 {
        let before_list = before_list as f64;
        self.since.map_or(before_list, |since| since.clamp(before_list - OLDEST_EVENT, before_list)).max(0.0)
            as u64
    }
}

/// Follows one runtime for ever, writing what it tells into `source`.
pub async fn follow(endpoint: Endpoint, filter: Filter, source: Arc<Source>, mut memory: Memory) {
    let mut pause = RETRY.0;
    let mut flaps = false;
    let watcher = Watcher { endpoint: &endpoint, filter: &filter, source: &source };
    loop {
        if !endpoint.socket.exists() {
            // a socket that was there and is gone is a daemon that is down
            let was_there = matches!(source.lock().link, Link::Up | Link::Down);
            source.set_link(if was_there { Link::Down } else { Link::NoSocket });
        } else {
            let lived = watcher.follow_once(&mut memory, flaps).await;
            flaps = lived.is_some_and(|lived| lived < GOOD_AFTER) || (flaps && lived.is_none());
            if lived.is_some_and(|lived| lived >= GOOD_AFTER) {
                pause = RETRY.0;
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RETRY.1);
        if !endpoint.socket.exists() {
            pause = pause.min(Duration::from_secs(1)); // looking for a file is cheap: attach soon after it appears
        }
    }
}

/// What a person can do about an error.
pub fn explain(error: &Error, socket: &Path) -> String {
    let text = format!("{error:?}");
    if text.contains("PermissionDenied") || text.contains("SocketNotAccessible") {
        format!("no permission for {}: run as root or in the socket's group", socket.display())
    } else if text.contains("ConnectionRefused") || text.contains("NotFound") {
        format!("nobody listens on {}", socket.display())
    } else {
        "the daemon did not answer as expected".to_owned()
    }
}

/// An answer up to its end: bollard's own limit ends with the head, and a daemon may stall in the body.
async fn whole<T>(answer: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    tokio::time::timeout(ANSWER_WITHIN, answer).await.unwrap_or(Err(Error::RequestTimeoutError))
}

/// An answer that came and is none of the forms we know.
fn not_understood(error: &Error) -> bool {
    matches!(error, Error::JsonDataError { .. } | Error::JsonSerdeError { .. })
}

struct Watcher<'a> {
    endpoint: &'a Endpoint,
    filter: &'a Filter,
    source: &'a Arc<Source>,
}

impl Watcher<'_> {
    /// One connection, until it breaks. How long it lived after the list was complete; `None` if there was no list.
    ///
    /// `flaps`: the connection before broke at once, as behind a proxy that refuses the events. That is told once, and
    /// a connection is told only when it has proved to be good.
    async fn follow_once(&self, memory: &mut Memory, flaps: bool) -> Option<Duration> {
        let (runtime, socket) = (self.endpoint.runtime, &self.endpoint.socket);
        let (docker, listed) = match self.connect_and_list(memory).await {
            Ok(connected) => connected,
            Err(error) => {
                if self.source.lock().link != Link::Down {
                    let reason = explain(&error, socket);
                    tracing::warn!(runtime, %error, "cannot list containers: {reason}; trying again");
                }
                self.source.set_link(Link::Down);
                return None;
            }
        };
        let began = Moment::now();
        let mut watch = std::pin::pin!(Watch::new(self, memory, listed).run(&docker));
        if flaps && let Ok(error) = tokio::time::timeout(GOOD_AFTER, &mut watch).await {
            tracing::debug!(runtime, %error, "connection lost again");
        } else {
            tracing::info!(runtime, socket = %socket.display(), "connected");
            let error = watch.await;
            tracing::warn!(runtime, %error, "connection lost; names are kept, trying again");
        }
        self.source.set_link(Link::Down);
        Some(Moment::now().since(began))
    }

    async fn connect_and_list(&self, memory: &mut Memory) -> Result<(Docker, Listed), Error> {
        let socket = self.endpoint.socket.to_string_lossy();
        let docker =
            Docker::connect_with_unix(&socket, ANSWER_WITHIN.as_secs(), bollard::API_DEFAULT_VERSION)?;
        let at = Moment::now();
        let list = self.list(&docker).await?;
        let records = list.iter().filter_map(|listed| self.record_of_list(listed));
        let mut state: Vec<_> = records.map(|record| exists(&record, at.unix_seconds())).collect();
        let listed = list.into_iter().filter(may_run).filter_map(|listed| Some((listed.id.clone()?, listed)));
        let asking = &docker;
        let mut answers = futures_util::stream::iter(listed)
            .map(|(id, listed)| async move {
                let answer = self.inspect(asking, &id).await;
                (ContainerId::new(&id), listed, answer)
            })
            .buffer_unordered(INSPECTS);
        let mut present = HashSet::new();
        while let Some((id, listed, answer)) = answers.next().await {
            match answer {
                // at once: a container that the daemon cannot tell about must not hold up the others' names
                Ok(Found::Runs(record, pid)) => {
                    state.extend(running(&record, pid));
                    self.source.enter(record);
                }
                Ok(Found::Rests { .. } | Found::Gone) => continue,
                // it runs, as the list said: what was known of it stays, else what the list says of it must do
                Err(_) => {
                    let known = self.source.lock().running.contains_key(&id);
                    if let Some(record) = self.record_of_list(&listed).filter(|_| !known) {
                        self.source.enter(record);
                    }
                    memory.open.insert(id.clone());
                }
            }
            present.insert(id);
        }
        drop(answers);
        let lost = memory.open.difference(&present).cloned().collect();
        let mut shared = self.source.lock();
        // ended while we were away: the registry notices by comparing its inventories
        shared.running.retain(|id, _| present.contains(id));
        shared.link = Link::Up;
        shared.generation += 1;
        drop(shared);
        Ok((docker, Listed { at, state, lost }))
    }

    /// All containers. Where one of those that do not run cannot be understood, only those that do.
    async fn list(&self, docker: &Docker) -> Result<Vec<ContainerSummary>, Error> {
        let all = ListContainersOptions { all: true, ..Default::default() };
        match whole(docker.list_containers(Some(all))).await {
            Err(error) if not_understood(&error) => {
                tracing::debug!(runtime = self.endpoint.runtime, %error, "cannot list stopped containers");
                whole(docker.list_containers(None::<ListContainersOptions>)).await
            }
            other => other,
        }
    }

    /// What became of a container.
    async fn inspect(&self, docker: &Docker, id: &str) -> Result<Found, Error> {
        match whole(docker.inspect_container(id, None)).await {
            Ok(answer) => Ok(self.found(answer)),
            Err(Error::DockerResponseServerError { status_code: 404, .. }) => Ok(Found::Gone),
            Err(error) => {
                tracing::warn!(runtime = self.endpoint.runtime, id, %error, "cannot inspect a container");
                Err(error)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::Record;
    use std::path::PathBuf;

    pub(super) fn watcher_on(source: &Arc<Source>, test: impl FnOnce(Watcher<'_>)) {
        let endpoint = Endpoint { runtime: "docker", socket: PathBuf::new() };
        test(Watcher { endpoint: &endpoint, filter: &Filter::default(), source });
    }

    pub(super) fn counts(source: &Source) -> (usize, usize) {
        let state = source.lock();
        (state.running.len(), state.ended.len())
    }

    pub(super) fn started_at(started: f64) -> Record {
        Record {
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
    fn the_end_of_an_earlier_run_seen_late_does_not_end_the_new_one() {
        let source = Source::new("docker", Arc::default());
        watcher_on(&source, |watcher| {
            watcher.source.enter(started_at(10.0));
            watcher.source.end(&ContainerId::new("a"), 9.0, None);
            assert_eq!(source.lock().running.len(), 1);
            watcher.source.end(&ContainerId::new("a"), 11.0, None);
            assert_eq!(counts(&source), (0, 1));
        });
    }

    #[test]
    fn what_the_list_alone_tells_gives_a_name_and_a_later_inspect_is_the_same_run() {
        let source = Source::new("docker", Arc::default());
        watcher_on(&source, |watcher| {
            let listed = ContainerSummary {
                id: Some("a".into()),
                names: Some(vec!["/other/alias".into(), format!("/{}", "n".repeat(300))]),
                image: Some("i".into()),
                ..Default::default()
            };
            let record = watcher.record_of_list(&listed).unwrap();
            assert_eq!((record.name.len(), &*record.image, record.started), (256, "i", None));
            watcher.source.enter(record);
            watcher.source.enter(started_at(10.0));
            assert_eq!(counts(&source), (1, 0));
        });
    }

    #[test]
    fn a_container_seen_twice_is_one_and_a_restart_ends_the_run_before() {
        let source = Source::new("docker", Arc::default());
        watcher_on(&source, |watcher| {
            watcher.source.enter(started_at(10.0));
            let generation = source.lock().generation;
            watcher.source.enter(started_at(10.0));
            assert_eq!(source.lock().generation, generation);
            watcher.source.enter(started_at(20.0));
            assert_eq!(counts(&source), (1, 1));
        });
    }

    #[test]
    fn events_are_asked_for_from_the_last_one_on_but_not_from_any_time() {
        let from = |since| Memory::new(since, HashSet::new()).ask_from(1_000_000);
        assert_eq!(from(None), 1_000_000);
        assert_eq!(from(Some(999_000.7)), 999_000);
        assert_eq!(from(Some(1_000_000.9)), 1_000_000, "the list is overlapped in any case");
        assert_eq!(from(Some(2e9)), 1_000_000, "the clock was set back");
        assert_eq!(from(Some(1.0)), 1_000_000 - 86_400);
    }
}
