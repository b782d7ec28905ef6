//! A connection to a Docker or Podman daemon: its requests, and the stream of its events.

use std::collections::{HashMap, HashSet};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bollard::Docker;
use bollard::errors::Error;
use bollard::models::{ContainerInspectResponse, ContainerSummary, EventMessage};
use bollard::query_parameters::{EventsOptions, ListContainersOptions};
use futures_util::{FutureExt, Stream, StreamExt};
use tracing::Instrument;

use super::events::{DockerEvent, EVENT_TYPES};
use super::reconcile::{DockerReconciler, ListKind};
use super::{Allowance, inspect, is_too_large, is_unparsable, runtime_call, with_timeout};
use crate::clock::Timestamp;
use crate::discover::reconcile::{Responses, Runtime};
use crate::discover::status_queries::StatusResult;
use crate::discover::{ContainerId, RuntimeKind};
use crate::host::bounds::CONTAINER_ID;

/// Time for the events since the last connection. The stream repeats what did not arrive.
const MISSED_EVENTS_TIMEOUT: Duration = Duration::from_secs(2);
/// Events within this time call for one list.
const EVENT_DEBOUNCE: Duration = Duration::from_millis(50);
/// Maximum number of events that are applied together with a list.
const MAX_READY_EVENTS: usize = 1_000;

type DockerEventStream = Pin<Box<dyn Stream<Item = Result<EventMessage, Error>> + Send>>;

/// A connection to a Docker or Podman daemon.
pub struct DockerConnection<'a> {
    reconciler: DockerReconciler<'a>,
    docker: Docker,
    allowance: Arc<Allowance>,
    /// `None` before the first list.
    events: Option<DockerEventStream>,
    /// The stream failed while a list was applied.
    error: Option<Error>,
    /// When the newest full list was requested.
    full_list_at: Timestamp,
}

impl<'a> DockerConnection<'a> {
    pub fn new(reconciler: DockerReconciler<'a>, docker: Docker, allowance: Arc<Allowance>) -> Self {
        let full_list_at = Timestamp::now();
        Self { reconciler, docker, allowance, events: None, error: None, full_list_at }
    }

    /// Subscribes to the events from the last known one on, and from the second before the list. `until`: only to this Unix time.
    fn subscribe(&self, until: Option<String>) -> DockerEventStream {
        let since = self.reconciler.resume.events_since(self.reconciler.listed_at);
        Box::pin(self.docker.events(Some(events_options(since, until))))
    }

    /// Waits until the daemon responds. One that was killed accepts connections at once and responds only once it has ended the containers
    /// of the process before, up to 10 s later: the events of that must come before the list.
    ///
    /// # Errors
    /// It does not respond in time.
    async fn await_response(&mut self) -> Result<(), Error> {
        let any = ListContainersOptions { limit: Some(1), ..Default::default() };
        match with_timeout(self.docker.list_containers(Some(any))).await {
            Err(error) if !is_unparsable(&error) && !is_too_large(&error) => Err(error),
            _ => Ok(()),
        }
    }

    /// Applies the events since the last connection, so that the ledger receives them before what the list shows.
    async fn apply_missed_events(&mut self) {
        let mut events = self.subscribe(Some(now_as_text()));
        let all = async {
            while let Some(Ok(message)) = events.next().await {
                self.allowance.renew();
                self.apply_event(message);
            }
        };
        let _ = tokio::time::timeout(MISSED_EVENTS_TIMEOUT, all).await;
    }

    /// Applies the events that have arrived; returns the containers that have ended.
    fn apply_ready_events(&mut self) -> HashSet<ContainerId> {
        let mut ended = HashSet::new();
        for _ in 0..MAX_READY_EVENTS {
            let Some(message) = self.events.as_mut().and_then(|events| events.next().now_or_never()) else {
                break;
            };
            match self.apply_message(message) {
                Ok(container) => ended.extend(container),
                Err(error) => {
                    (self.events, self.error) = (None, Some(error));
                    break;
                }
            }
        }
        ended
    }

    fn apply_event(&mut self, message: EventMessage) -> Option<ContainerId> {
        self.reconciler.apply(DockerEvent::read(message, Timestamp::now())?)
    }

    /// Applies an event; returns the container if it has ended.
    fn apply_message(
        &mut self,
        message: Option<Result<EventMessage, Error>>,
    ) -> Result<Option<ContainerId>, Error> {
        match message {
            Some(Ok(message)) => {
                self.allowance.renew();
                Ok(self.apply_event(message))
            }
            Some(Err(error)) => {
                let is_too_large = self.allowance.is_exceeded();
                if is_too_large {
                    self.reconciler.watcher.source.record_oversized("an event");
                }
                if is_unparsable(&error) || is_too_large {
                    self.reconciler.resume.since = None; // otherwise every connection would begin with the same event
                }
                Err(error)
            }
            None => Err(std::io::Error::other("the daemon closed the event stream").into()),
        }
    }
}

/// Returns the options for the events of containers from this Unix time on.
pub fn events_options(since: u64, until: Option<String>) -> EventsOptions {
    let only = |values: &[&str]| values.iter().map(|value| value.to_string()).collect::<Vec<_>>();
    let filters =
        HashMap::from([("type".to_owned(), only(&["container"])), ("event".to_owned(), only(&EVENT_TYPES))]);
    EventsOptions { since: Some(since.to_string()), until, filters: Some(filters) }
}

/// Returns the Unix time as Docker's API reads it: the events until a time that has passed end with the last one.
pub fn now_as_text() -> String {
    let nanos = Timestamp::now().unix_nanos();
    format!("{}.{:09}", nanos / 1_000_000_000, nanos % 1_000_000_000)
}

impl Runtime for DockerConnection<'_> {
    type Item = ContainerSummary;
    type Status = ContainerInspectResponse;
    type Error = Error;

    fn kind(&self) -> RuntimeKind {
        self.reconciler.watcher.endpoint.runtime
    }

    async fn list(&mut self) -> Result<Vec<ContainerSummary>, Error> {
        let (now, is_first) =
            (Timestamp::now(), self.reconciler.kind == ListKind::First && self.events.is_none());
        if is_first && self.reconciler.resume.has_events() {
            self.await_response().await?;
            self.apply_missed_events().await;
        }
        let is_full = now.since(self.full_list_at) >= self.list_interval();
        self.reconciler.kind = match is_full {
            _ if is_first => ListKind::First,
            true => ListKind::Full,
            false => ListKind::Changed,
        };
        if self.reconciler.kind != ListKind::Changed {
            self.full_list_at = now;
        }
        self.reconciler.listed_at = Timestamp::now();
        let changed = std::mem::take(&mut self.reconciler.changed);
        let watcher = self.reconciler.watcher;
        let record = || watcher.source.record_oversized("the list of containers, of stopped ones too");
        let mut list = match self.reconciler.kind {
            ListKind::Changed => watcher.list_some(&self.docker, &changed).await?,
            ListKind::First | ListKind::Full => watcher.list_all(&self.docker, record).await?,
        };
        list.retain(|listed| listed.id.as_ref().is_none_or(|id| id.len() <= CONTAINER_ID.max_bytes));
        if is_first {
            self.events = Some(self.subscribe(None));
        }
        Ok(list)
    }

    fn wanted(&self, list: &[ContainerSummary]) -> Vec<(String, bool)> {
        self.reconciler.wanted(list)
    }

    fn query(
        &self,
        id: &str,
        _: bool,
        timeout: Duration,
    ) -> impl Future<Output = StatusResult<ContainerInspectResponse, Error>> + Send + 'static {
        let (docker, id) = (self.docker.clone(), id.to_owned());
        let socket = self.reconciler.watcher.endpoint.socket.clone();
        let query = async move {
            let response = inspect(&docker, &socket, &id);
            match tokio::time::timeout(timeout, response).await.unwrap_or(Err(Error::RequestTimeoutError)) {
                Ok(response) => Ok(Some(response)),
                Err(Error::DockerResponseServerError { status_code: 404, .. }) => Ok(None),
                Err(error) => Err(error),
            }
        };
        query.instrument(runtime_call(self.kind(), "inspect"))
    }

    fn apply_list(&mut self, list: Vec<ContainerSummary>, responses: Responses<Self>, _: Timestamp) {
        let ended = self.apply_ready_events();
        self.reconciler.apply_list(&list, responses, &ended);
    }

    async fn next_event(&mut self) -> Result<(), Error> {
        match (self.error.take(), &mut self.events) {
            (Some(error), _) => Err(error),
            (None, Some(events)) => {
                let message = events.next().await;
                self.apply_message(message).map(drop)
            }
            (None, None) => std::future::pending().await,
        }
    }

    fn needs_list(&self) -> Option<Duration> {
        (!self.reconciler.changed.is_empty()).then_some(EVENT_DEBOUNCE)
    }

    fn list_interval(&self) -> Duration {
        self.reconciler.resume.list_interval
    }
}
