//! A connection to a Docker or Podman daemon: its requests, and the stream of its events.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bollard::Docker;
use bollard::errors::Error;
use bollard::models::{ContainerInspectResponse, ContainerSummary, EventMessage};
use bollard::query_parameters::EventsOptions;
use futures_util::{Stream, StreamExt};
use tokio::time::Instant;
use tracing::Instrument;

use super::events::{DockerEvent, EVENT_TYPES};
use super::reconcile::DockerReconciler;
use super::{Allowance, is_unparsable, runtime_call};
use crate::clock::Timestamp;
use crate::discover::ContainerId;
use crate::discover::reconcile::{FollowRequest, Responses, Runtime};
use crate::discover::status_queries::StatusResult;
use crate::host::bounds::CONTAINER_ID;

/// Idle time after which the stream has delivered all events from before the list.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(1);

type DockerEventStream = Pin<Box<dyn Stream<Item = Result<EventMessage, Error>> + Send>>;

/// A connection to a Docker or Podman daemon.
pub struct DockerConnection<'a> {
    reconciler: DockerReconciler<'a>,
    docker: Docker,
    allowance: Arc<Allowance>,
    /// `None` before the first list.
    events: Option<DockerEventStream>,
    settle_at: Instant,
}

impl<'a> DockerConnection<'a> {
    pub fn new(reconciler: DockerReconciler<'a>, docker: Docker, allowance: Arc<Allowance>) -> Self {
        Self { reconciler, docker, allowance, events: None, settle_at: Instant::now() }
    }

    fn subscribe(&self) -> DockerEventStream {
        let only = |values: &[&str]| values.iter().map(|value| value.to_string()).collect::<Vec<_>>();
        let filters = HashMap::from([
            ("type".to_owned(), only(&["container"])),
            ("event".to_owned(), only(&EVENT_TYPES)),
        ]);
        let reconciler = &self.reconciler;
        let since = Some(reconciler.resume.events_since(reconciler.present_from()).to_string());
        Box::pin(self.docker.events(Some(EventsOptions { since, until: None, filters: Some(filters) })))
    }

    fn apply_message(&mut self, message: Option<Result<EventMessage, Error>>) -> Result<(), Error> {
        match message {
            Some(Ok(message)) => {
                self.allowance.renew();
                if let Some(event) = DockerEvent::read(message, Timestamp::now()) {
                    self.reconciler.apply(event);
                }
                self.settle_at = Instant::now() + SETTLE_TIMEOUT;
                Ok(())
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

impl Runtime for DockerConnection<'_> {
    type Item = ContainerSummary;
    type Status = ContainerInspectResponse;
    type Error = Error;

    fn name(&self) -> &'static str {
        self.reconciler.watcher.endpoint.runtime
    }

    async fn list(&mut self) -> Result<Vec<ContainerSummary>, Error> {
        self.reconciler.listed.at = Timestamp::now();
        let watcher = self.reconciler.watcher;
        let record = || watcher.source.record_oversized("the list of containers, of stopped ones too");
        let mut list = watcher.list(&self.docker, record).await?;
        list.retain(|listed| listed.id.as_ref().is_none_or(|id| id.len() <= CONTAINER_ID.max_bytes));
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
        let query = async move {
            let response = docker.inspect_container(&id, None);
            match tokio::time::timeout(timeout, response).await.unwrap_or(Err(Error::RequestTimeoutError)) {
                Ok(response) => Ok(Some(response)),
                Err(Error::DockerResponseServerError { status_code: 404, .. }) => Ok(None),
                Err(error) => Err(error),
            }
        };
        query.instrument(runtime_call(self.name(), "inspect"))
    }

    fn apply_list(&mut self, list: Vec<ContainerSummary>, responses: Responses<Self>, _: Timestamp) {
        self.reconciler.apply_list(&list, responses);
        self.settle_at = Instant::now() + SETTLE_TIMEOUT;
    }

    async fn next_event(&mut self) -> Result<(), Error> {
        if self.events.is_none() {
            self.events = Some(self.subscribe());
        }
        let Some(events) = &mut self.events else { return Ok(()) };
        tokio::select! {
            biased;
            message = events.next() => self.apply_message(message),
            () = tokio::time::sleep_until(self.settle_at), if !self.reconciler.settled => {
                self.reconciler.settle();
                Ok(())
            }
        }
    }

    fn apply_response(&mut self, id: String, response: StatusResult<ContainerInspectResponse, Error>) {
        self.reconciler.apply_inspect(&ContainerId::new(&id), response);
    }

    fn take_requests(&mut self) -> Vec<FollowRequest> {
        std::mem::take(&mut self.reconciler.requests)
    }

    fn list_interval(&self) -> Duration {
        self.reconciler.resume.list_interval
    }
}
