//! The loop that follows a container runtime over one connection, the same for every runtime.
//!
//! The list decides which containers exist and run. It is read when the connection begins, at an interval, and as soon as an event
//! or a late response calls for it, so a lost event costs at most one interval. What the list lacks is queried for each container
//! ([`StatusQueue`]); a query that fails is repeated by a later list.
//!
//! A new runtime implements [`Runtime`].

use std::collections::HashMap;
use std::fmt::Display;
use std::time::Duration;

use tokio::time::Instant;

use super::RuntimeKind;
use super::status_queries::{StatusQueue, StatusResult};
use crate::clock::Timestamp;
use crate::host::bounds::RUNTIME_EVENT_RATE;

/// Shortest time between two lists.
const MIN_LIST_INTERVAL: Duration = Duration::from_secs(1);

/// Status responses by container id.
pub type Responses<R> = HashMap<String, StatusResult<<R as Runtime>::Status, <R as Runtime>::Error>>;

/// A runtime over one connection.
pub trait Runtime {
    /// An entry of the list.
    type Item: Send;
    /// The status of one container.
    type Status: Send + 'static;
    /// A failed call.
    type Error: Display + Send + 'static;

    /// Returns which runtime it is.
    fn kind(&self) -> RuntimeKind;
    /// Lists all containers.
    fn list(&mut self) -> impl Future<Output = Result<Vec<Self::Item>, Self::Error>> + Send;
    /// Returns the ids of listed containers whose status is needed, and whether a verbose one.
    fn wanted(&self, list: &[Self::Item]) -> Vec<(String, bool)>;
    /// Queries a container; `None` if it is gone. Fails after the timeout.
    fn query(
        &self,
        id: &str,
        verbose: bool,
        timeout: Duration,
    ) -> impl Future<Output = StatusResult<Self::Status, Self::Error>> + Send + 'static;
    /// Applies a list and the responses that arrived in time.
    fn apply_list(&mut self, list: Vec<Self::Item>, responses: Responses<Self>, now: Timestamp)
    where
        Self: Sized;
    /// Waits for the next event and applies it. May be dropped at any await point.
    fn next_event(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
    /// Returns the time within which events since the last list call for another one; `None` if they do not.
    fn needs_list(&self) -> Option<Duration>;
    /// Returns the longest time between two lists.
    fn list_interval(&self) -> Duration;
}

/// The events of a runtime are counted in turns of this length.
const EVENT_TURN: Duration = Duration::from_millis(50);
const MAX_EVENTS_IN_TURN: usize = RUNTIME_EVENT_RATE.max / (1_000 / EVENT_TURN.as_millis() as usize);

/// Limits the rate of events, so that a runtime that sends without a pause does not occupy a processor.
#[derive(Default)]
struct EventRate {
    turn_began: Option<Instant>,
    events: usize,
}

impl EventRate {
    /// Counts an event. At the limit, waits for the end of the turn.
    async fn count_and_wait(&mut self) {
        let turn_began = *self.turn_began.get_or_insert_with(Instant::now);
        self.events += 1;
        if self.events >= MAX_EVENTS_IN_TURN {
            tokio::time::sleep_until(turn_began + EVENT_TURN).await;
            *self = Self::default();
        }
    }
}

/// A connection with a first list.
pub struct RuntimeFollower<R: Runtime> {
    runtime: R,
    queue: StatusQueue<R::Status, R::Error>,
    /// Responses for the next list, which came too late for the last one.
    late: Responses<R>,
    listed_at: Instant,
    event_rate: EventRate,
}

impl<R: Runtime> RuntimeFollower<R> {
    /// Lists the containers for the first time.
    ///
    /// # Errors
    /// The list failed.
    pub async fn start(runtime: R) -> Result<Self, R::Error> {
        let queue = StatusQueue::new(runtime.kind());
        let (late, listed_at) = (HashMap::new(), Instant::now());
        let mut reconciler = Self { runtime, queue, late, listed_at, event_rate: EventRate::default() };
        reconciler.list().await?;
        Ok(reconciler)
    }

    /// Follows the runtime until a call fails; returns the error.
    pub async fn run(mut self) -> R::Error {
        loop {
            let mut next_list = Instant::now() + self.time_to_list();
            while Instant::now() < next_list {
                // the next event may be there already, for ever
                tokio::select! {
                    biased; // events first, so that the list is newer
                    event = self.runtime.next_event() => {
                        if let Err(error) = event {
                            return error;
                        }
                        self.event_rate.count_and_wait().await;
                    }
                    response = self.queue.next_response(), if self.queue.has_pending() => {
                        if let Some((id, response @ Ok(_))) = response {
                            self.late.insert(id, response);
                            next_list = next_list.min(self.soonest_list(MIN_LIST_INTERVAL));
                        }
                        next_list = next_list.min(Instant::now() + self.time_to_list()); // it may have failed
                    }
                    () = tokio::time::sleep_until(next_list) => break,
                }
                if let Some(within) = self.runtime.needs_list() {
                    next_list = next_list.min(self.soonest_list(within));
                }
            }
            if let Err(error) = self.list().await {
                return error;
            }
        }
    }

    /// Returns the time of a list that is called for within this time.
    fn soonest_list(&self, within: Duration) -> Instant {
        (Instant::now() + within).max(self.listed_at + MIN_LIST_INTERVAL)
    }

    /// Returns the time to the next list: the interval, or less if a query is to be retried.
    fn time_to_list(&self) -> Duration {
        let interval = self.runtime.list_interval();
        let retry = self.queue.time_to_retry(Timestamp::now()).unwrap_or(interval);
        interval.min(retry.max(MIN_LIST_INTERVAL))
    }

    async fn list(&mut self) -> Result<(), R::Error> {
        self.listed_at = Instant::now();
        let list = self.runtime.list().await?;
        let mut wanted = self.runtime.wanted(&list);
        wanted.retain(|(id, _)| !self.late.contains_key(id));
        for (id, verbose) in &wanted {
            let runtime = &self.runtime;
            self.queue.submit(id, *verbose, Timestamp::now(), |timeout| runtime.query(id, *verbose, timeout));
        }
        self.queue.retain(&wanted.into_iter().map(|(id, _)| id).collect());
        let mut responses = std::mem::take(&mut self.late);
        responses.extend(self.queue.first_responses().await);
        self.runtime.apply_list(list, responses, Timestamp::now());
        Ok(())
    }
}
