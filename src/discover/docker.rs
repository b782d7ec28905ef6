//! Containers as the Docker API tells them; Podman speaks the same API on its own socket.
//!
//! Three calls are used: list, inspect and events, all reading. Paths carry no API version, so the daemon answers with
//! its own. The event stream is asked for from a second before the list was taken: what happens in between is seen
//! twice, and entering a container twice changes nothing.
//!
//! The daemon may be absent, die and come back. Names stay while it is away, and the list is taken anew when it is back.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bollard::Docker;
use bollard::errors::Error;
use bollard::models::{ContainerInspectResponse, ContainerSummary, EventMessage};
use bollard::query_parameters::{EventsOptions, ListContainersOptions};
use futures_util::StreamExt;

use super::{ContainerId, Link, Record, Source};
use crate::clock::Moment;
use crate::config::{Endpoint, Filter};
use crate::series::bounded;

/// Time for one whole answer of the daemon. The event stream itself may be idle for ever.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Pause before the next try to connect: the first, doubling up to the last.
const RETRY: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(4));
/// A connection that lived so long was a good one.
const GOOD_AFTER: Duration = Duration::from_secs(10);
/// Inspect calls under way at once after a list.
const INSPECTS: usize = 8;
/// Ended containers that wait for the cycle to look at them; more are forgotten, oldest first.
const MOST_ENDED: usize = 4_096;

/// Follows one runtime for ever, writing what it tells into `source`.
pub async fn follow(endpoint: Endpoint, filter: Filter, source: Arc<Source>) {
    let mut pause = RETRY.0;
    let mut flaps = false;
    loop {
        if !endpoint.socket.exists() {
            let mut state = source.lock();
            // a socket that was there and is gone is a daemon that is down
            let link = if matches!(state.link, Link::Up | Link::Down) { Link::Down } else { Link::NoSocket };
            if state.link != link {
                state.link = link;
                state.generation += 1;
            }
        } else {
            let lived = follow_once(&endpoint, &filter, &source, flaps).await;
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

/// One connection, until it breaks. How long it lived after the list was complete; `None` if there was no list.
///
/// `flaps`: the connection before broke at once, as behind a proxy that refuses the events. That is told once, and a
/// connection is told only when it has proved to be good.
async fn follow_once(
    endpoint: &Endpoint,
    filter: &Filter,
    source: &Arc<Source>,
    flaps: bool,
) -> Option<Duration> {
    let watcher = Watcher { endpoint, filter, source };
    match watcher.connect_and_list().await {
        Ok((docker, since)) => {
            let began = Moment::now();
            let mut watch = std::pin::pin!(watcher.watch(&docker, since));
            if flaps && let Ok(error) = tokio::time::timeout(GOOD_AFTER, &mut watch).await {
                tracing::debug!(runtime = endpoint.runtime, %error, "connection lost again");
                watcher.down();
                return Some(Moment::now().since(began));
            }
            tracing::info!(runtime = endpoint.runtime, socket = %endpoint.socket.display(), "connected");
            let error = watch.await;
            tracing::warn!(runtime = endpoint.runtime, %error, "connection lost; names are kept, trying again");
            watcher.down();
            Some(Moment::now().since(began))
        }
        Err(error) => {
            let first = source.lock().link != Link::Down;
            if first {
                let reason = explain(&error, &endpoint.socket);
                tracing::warn!(runtime = endpoint.runtime, %error, "cannot list containers: {reason}; trying again");
            }
            watcher.down();
            None
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

struct Watcher<'a> {
    endpoint: &'a Endpoint,
    filter: &'a Filter,
    source: &'a Arc<Source>,
}

impl Watcher<'_> {
    fn down(&self) {
        let mut state = self.source.lock();
        state.link = Link::Down;
        state.generation += 1;
    }

    async fn connect_and_list(&self) -> Result<(Docker, u64), Error> {
        let socket = self.endpoint.socket.to_string_lossy();
        let docker =
            Docker::connect_with_unix(&socket, ANSWER_WITHIN.as_secs(), bollard::API_DEFAULT_VERSION)?;
        let since = Moment::now().unix_whole_seconds().saturating_sub(1);
        let list = whole(docker.list_containers(None::<ListContainersOptions>)).await?;
        let listed = list.into_iter().filter_map(|listed| Some((listed.id.clone()?, listed)));
        let mut answers = futures_util::stream::iter(listed)
            .map(|(id, listed)| async { (ContainerId::new(&id), listed, self.inspect(&docker, id).await) })
            .buffer_unordered(INSPECTS);
        let mut running = HashSet::new();
        while let Some((id, listed, answer)) = answers.next().await {
            match answer {
                // at once: a container that the daemon cannot tell about must not hold up the others' names
                Ok(Some(record)) => self.enter(record),
                Ok(None) => continue,
                // it runs, as the list said: what was known of it stays, else what the list says of it must do
                Err(_) => {
                    let known = self.source.lock().running.contains_key(&id);
                    if let Some(record) = self.record_of_list(listed).filter(|_| !known) {
                        self.enter(record);
                    }
                }
            }
            running.insert(id);
        }
        drop(answers);
        let mut state = self.source.lock();
        // ended while we were away: the registry notices by comparing its inventories
        state.running.retain(|id, _| running.contains(id));
        state.link = Link::Up;
        state.generation += 1;
        drop(state);
        Ok((docker, since))
    }

    /// The record of a running container; `None` if it is gone or does not run.
    async fn inspect(&self, docker: &Docker, id: String) -> Result<Option<Record>, Error> {
        match whole(docker.inspect_container(&id, None)).await {
            Ok(answer) => Ok(self.record(answer)),
            Err(Error::DockerResponseServerError { status_code: 404, .. }) => Ok(None),
            Err(error) => {
                tracing::warn!(runtime = self.endpoint.runtime, id, %error, "cannot inspect a container");
                Err(error)
            }
        }
    }

    fn record(&self, answer: ContainerInspectResponse) -> Option<Record> {
        let state = answer.state?;
        if state.running != Some(true) {
            return None;
        }
        let config = answer.config.unwrap_or_default();
        let labels = config.labels.unwrap_or_default();
        let label = |key: &str| bounded(labels.get(key).map_or("", String::as_str));
        Some(Record {
            id: ContainerId::new(&answer.id?),
            runtime: self.endpoint.runtime,
            name: bounded(answer.name?.trim_start_matches('/')).to_string(),
            image: bounded(config.image.as_deref().unwrap_or_default()),
            compose_project: label("com.docker.compose.project"),
            compose_service: label("com.docker.compose.service"),
            settings: self.filter.settings_of(config.env.iter().flatten().map(String::as_str)),
            started: state.started_at.as_deref().and_then(unix_seconds),
            labels_match: self.filter.labels_match(&labels),
        })
    }

    /// What the list alone tells of a running container: no run settings, and no time of its start.
    fn record_of_list(&self, listed: ContainerSummary) -> Option<Record> {
        let labels = listed.labels.unwrap_or_default();
        let label = |key: &str| bounded(labels.get(key).map_or("", String::as_str));
        let names = listed.names.unwrap_or_default();
        // the names that other containers have for it (links) are there too, as /OTHER/NAME
        let name = names.iter().map(|name| name.trim_start_matches('/')).find(|name| !name.contains('/'))?;
        Some(Record {
            id: ContainerId::new(&listed.id?),
            runtime: self.endpoint.runtime,
            name: bounded(name).to_string(),
            image: bounded(listed.image.as_deref().unwrap_or_default()),
            compose_project: label("com.docker.compose.project"),
            compose_service: label("com.docker.compose.service"),
            settings: vec![],
            started: None,
            labels_match: self.filter.labels_match(&labels),
        })
    }

    /// Applies events until the stream breaks; returns why it did.
    async fn watch(&self, docker: &Docker, since: u64) -> String {
        let only = |values: &[&str]| values.iter().map(|value| value.to_string()).collect::<Vec<_>>();
        let filters = HashMap::from([
            ("type".to_owned(), only(&["container"])),
            ("event".to_owned(), only(&["start", "die", "died", "destroy", "remove", "rename"])),
        ]);
        let options = EventsOptions { since: Some(since.to_string()), until: None, filters: Some(filters) };
        let mut events = std::pin::pin!(docker.events(Some(options)));
        loop {
            match events.next().await {
                Some(Ok(event)) => {
                    if let Err(error) = self.apply(docker, event).await {
                        return error.to_string();
                    }
                }
                Some(Err(error)) => return error.to_string(),
                None => return "the daemon closed the event stream".to_owned(),
            }
        }
    }

    async fn apply(&self, docker: &Docker, event: EventMessage) -> Result<(), Error> {
        let at = event.time_nano.map(|nanos| nanos as f64 / 1e9);
        let actor = event.actor.unwrap_or_default();
        let (Some(id), Some(action)) = (actor.id, event.action) else { return Ok(()) };
        match action.as_str() {
            "start" | "rename" => match self.inspect(docker, id.clone()).await? {
                Some(record) => self.enter(record),
                // already over, and with --rm nothing is left to inspect: the event itself has the essentials
                None if action == "start" => self.short_lived(&id, at, actor.attributes.unwrap_or_default()),
                None => {}
            },
            "die" | "died" | "destroy" | "remove" => self.end(&id, at),
            _ => {}
        }
        Ok(())
    }

    fn enter(&self, record: Record) {
        let mut state = self.source.lock();
        if state.running.get(&record.id) != Some(&record) {
            let before = state.running.insert(record.id.clone(), record.clone());
            state.generation += 1;
            // a start that only the list told of has no time, and is the same run
            let another = |before: &Record| before.started.is_some() && before.started != record.started;
            if let Some(before) = before.filter(another) {
                push_ended(&mut state.ended, before);
            }
        }
    }

    /// A container ended at `at`. An end that is older than the start we know belongs to an earlier run.
    fn end(&self, id: &str, at: Option<f64>) {
        let mut state = self.source.lock();
        let id = ContainerId::new(id);
        let stale =
            |record: &Record| matches!((record.started, at), (Some(started), Some(at)) if at < started);
        if state.running.get(&id).is_some_and(|record| !stale(record))
            && let Some(record) = state.running.remove(&id)
        {
            push_ended(&mut state.ended, record);
            state.generation += 1;
        }
    }

    fn short_lived(&self, id: &str, at: Option<f64>, attributes: HashMap<String, String>) {
        let value = |key: &str| bounded(attributes.get(key).map_or("", String::as_str));
        let record = Record {
            id: ContainerId::new(id),
            runtime: self.endpoint.runtime,
            name: value("name").to_string(),
            image: value("image"),
            compose_project: value("com.docker.compose.project"),
            compose_service: value("com.docker.compose.service"),
            settings: vec![],
            started: at,
            labels_match: self.filter.labels_match(&attributes),
        };
        let mut state = self.source.lock();
        if !record.name.is_empty() {
            push_ended(&mut state.ended, record);
            state.generation += 1;
        }
    }
}

fn push_ended(ended: &mut Vec<Record>, record: Record) {
    if ended.len() >= MOST_ENDED {
        ended.remove(0);
    }
    ended.push(record);
}

/// Unix time of an API time stamp; Docker writes UTC, Podman local time with its offset.
fn unix_seconds(text: &str) -> Option<f64> {
    let time: jiff::Timestamp = text.parse().ok()?;
    let seconds = time.as_nanosecond() as f64 / 1e9;
    (seconds > 0.0).then_some(seconds) // a container that never ran has the year 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn time_stamps_of_docker_and_podman_are_read() {
        assert_eq!(unix_seconds("2026-11-21T03:25:01.5Z"), Some(1_795_231_501.5));
        assert_eq!(unix_seconds("2026-11-21T05:25:01.5+02:00"), Some(1_795_231_501.5));
        assert_eq!(unix_seconds("0001-01-01T00:00:00Z"), None);
        assert_eq!(unix_seconds(""), None);
    }

    fn watcher_on(source: &Arc<Source>, test: impl FnOnce(Watcher<'_>)) {
        let endpoint = Endpoint { runtime: "docker", socket: PathBuf::new() };
        test(Watcher { endpoint: &endpoint, filter: &Filter::default(), source });
    }

    fn counts(source: &Source) -> (usize, usize) {
        let state = source.lock();
        (state.running.len(), state.ended.len())
    }

    fn started_at(started: f64) -> Record {
        Record {
            id: ContainerId::new("a"),
            runtime: "docker",
            name: "train".into(),
            image: "i".into(),
            compose_project: "".into(),
            compose_service: "".into(),
            settings: vec![],
            started: Some(started),
            labels_match: true,
        }
    }

    #[test]
    fn the_end_of_an_earlier_run_seen_late_does_not_end_the_new_one() {
        let source = Source::new("docker");
        watcher_on(&source, |watcher| {
            watcher.enter(started_at(10.0));
            watcher.end("a", Some(9.0));
            assert_eq!(source.lock().running.len(), 1);
            watcher.end("a", Some(11.0));
            assert_eq!(counts(&source), (0, 1));
        });
    }

    #[test]
    fn what_the_list_alone_tells_gives_a_name_and_a_later_inspect_is_the_same_run() {
        let source = Source::new("docker");
        watcher_on(&source, |watcher| {
            let listed = ContainerSummary {
                id: Some("a".into()),
                names: Some(vec!["/other/alias".into(), format!("/{}", "n".repeat(300))]),
                image: Some("i".into()),
                ..Default::default()
            };
            let record = watcher.record_of_list(listed).unwrap();
            assert_eq!((record.name.len(), &*record.image, record.started), (256, "i", None));
            watcher.enter(record);
            watcher.enter(started_at(10.0));
            assert_eq!(counts(&source), (1, 0));
        });
    }

    #[test]
    fn a_container_seen_twice_is_one_and_a_restart_ends_the_run_before() {
        let source = Source::new("docker");
        watcher_on(&source, |watcher| {
            watcher.enter(started_at(10.0));
            let generation = source.lock().generation;
            watcher.enter(started_at(10.0));
            assert_eq!(source.lock().generation, generation);
            watcher.enter(started_at(20.0));
            assert_eq!(counts(&source), (1, 1));
        });
    }
}
