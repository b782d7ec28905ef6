//! Status queries for single containers: back-off, concurrency limits and timeouts.
//!
//! A runtime responds within milliseconds. But one container whose shim hangs can block its own status for ever, and must not
//! delay the names of all others: a list waits at most [`LIST_TIMEOUT`] for the responses to its first queries, and later
//! responses go to a later list. A query without a response is retried with an exponential back-off, under a separate
//! concurrency limit.

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::Semaphore;

use super::client::CriError;
use super::messages::ContainerStatusResponse;
use super::{LIST_INTERVAL, RUNTIME};
use crate::clock::Timestamp;

/// Longest time that a list waits for status responses. Together with the list interval it is below the time for which a new
/// container is held back until it has a name (`registry::NAME_GRACE`).
const LIST_TIMEOUT: Duration = Duration::from_secs(1);
/// Concurrency limits: of first queries, and of retries.
const MAX_QUERIES: (usize, usize) = (16, 4);
/// Timeouts: of a first query, because others wait for its permit; and of a retry. On a node with memory or disk pressure
/// every response takes some seconds.
const QUERY_TIMEOUT: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(10));
/// Limit of the back-off, which begins with the list interval and doubles.
const MAX_BACKOFF: Duration = Duration::from_secs(30);

/// The status of one container; `None` if it is gone.
pub type StatusResult = Result<Option<ContainerStatusResponse>, CriError>;

/// A pending query.
type PendingQuery = Pin<Box<dyn Future<Output = (String, bool, StatusResult)> + Send>>;

/// Back-off of a query without a response.
#[derive(Debug)]
struct Backoff {
    /// The kind of the query; one of the other kind is sent at once.
    verbose: bool,
    attempts: u32,
    until: Timestamp,
}

/// The status queries of one connection.
#[derive(Debug)]
pub struct StatusQueue {
    queries: FuturesUnordered<PendingQuery>,
    /// Ids of pending queries, and whether the current list waits for them.
    pending: HashMap<String, bool>,
    backoffs: HashMap<String, Backoff>,
    responses: HashMap<String, StatusResult>,
    permits: (Arc<Semaphore>, Arc<Semaphore>),
}

impl Default for StatusQueue {
    fn default() -> Self {
        Self {
            queries: FuturesUnordered::new(),
            pending: HashMap::new(),
            backoffs: HashMap::new(),
            responses: HashMap::new(),
            permits: (Arc::new(Semaphore::new(MAX_QUERIES.0)), Arc::new(Semaphore::new(MAX_QUERIES.1))),
        }
    }
}

impl StatusQueue {
    /// Queries a container unless it is pending or backing off. `verbose`: with its OCI configuration. `query` is called with its
    /// timeout, after which it must fail.
    pub fn submit<Q>(&mut self, id: &str, verbose: bool, now: Timestamp, query: impl FnOnce(Duration) -> Q)
    where
        Q: Future<Output = Result<ContainerStatusResponse, CriError>> + Send + 'static,
    {
        let backoff = self.backoffs.get(id).filter(|backoff| backoff.verbose == verbose);
        let is_backing_off = backoff.is_some_and(|backoff| backoff.until > now);
        if is_backing_off || self.pending.contains_key(id) || self.responses.contains_key(id) {
            return;
        }
        let is_first = backoff.is_none();
        let (permits, timeout) =
            if is_first { (&self.permits.0, QUERY_TIMEOUT.0) } else { (&self.permits.1, QUERY_TIMEOUT.1) };
        let (permits, query) = (Arc::clone(permits), query(timeout));
        let id = id.to_owned();
        self.pending.insert(id.clone(), is_first);
        self.queries.push(Box::pin(async move {
            let _permit = permits.acquire().await;
            let response = match query.await {
                Ok(response) => Ok(Some(response)),
                Err(error) if error.is_gone() => Ok(None),
                Err(error) => Err(error),
            };
            (id, verbose, response)
        }));
    }

    /// Waits for first queries, up to [`LIST_TIMEOUT`].
    pub async fn wait_for_first_queries(&mut self) {
        let mut timeout = std::pin::pin!(tokio::time::sleep(LIST_TIMEOUT));
        while self.pending.values().any(|is_waited_for| *is_waited_for) {
            tokio::select! {
                () = self.next_response() => {}
                () = &mut timeout => {
                    self.pending.values_mut().for_each(|is_waited_for| *is_waited_for = false);
                }
            }
        }
    }

    /// Waits for one more response; returns at once if no query is pending.
    pub async fn next_response(&mut self) {
        let Some((id, verbose, response)) = self.queries.next().await else { return };
        self.pending.remove(&id);
        match &response {
            Ok(_) => {
                self.backoffs.remove(&id);
            }
            Err(error) => {
                tracing::debug!(runtime = RUNTIME, id, %error, "container status query failed, retrying");
                let before = self.backoffs.get(&id).filter(|backoff| backoff.verbose == verbose);
                let attempts = before.map_or(0, |backoff| backoff.attempts.saturating_add(1));
                let pause = LIST_INTERVAL.0.saturating_mul(1 << attempts.min(16)).min(MAX_BACKOFF);
                self.backoffs
                    .insert(id.clone(), Backoff { verbose, attempts, until: Timestamp::now().plus(pause) });
            }
        }
        self.responses.insert(id, response);
    }

    /// Takes the responses so far, and drops the back-off of containers that are not `wanted`.
    pub fn take_responses(&mut self, wanted: &HashSet<String>) -> HashMap<String, StatusResult> {
        self.backoffs.retain(|id, _| wanted.contains(id));
        std::mem::take(&mut self.responses)
    }

    /// Returns whether a query is pending.
    pub fn has_pending(&self) -> bool {
        !self.queries.is_empty()
    }

    /// Returns the time to the next retry; `None` if no container is backing off.
    pub fn time_to_retry(&self, now: Timestamp) -> Option<Duration> {
        let waiting = self.backoffs.iter().filter(|(id, _)| !self.pending.contains_key(*id));
        waiting.map(|(_, backoff)| backoff.until.since(now)).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn responses(taken: &HashMap<String, StatusResult>) -> Vec<(&str, bool)> {
        let mut responses: Vec<_> = taken.iter().map(|(id, response)| (&**id, response.is_ok())).collect();
        responses.sort_unstable();
        responses
    }

    async fn responded() -> Result<ContainerStatusResponse, CriError> {
        Ok(ContainerStatusResponse::default())
    }

    /// A query that times out.
    async fn timed_out() -> Result<ContainerStatusResponse, CriError> {
        Err(CriError::Timeout("ContainerStatus", Duration::ZERO))
    }

    fn wanted(ids: &[&str]) -> HashSet<String> {
        ids.iter().map(|id| id.to_string()).collect()
    }

    #[tokio::test]
    async fn list_does_not_wait_for_hanging_query() {
        let (mut queue, now) = (StatusQueue::default(), Timestamp::now());
        queue.submit("a", true, now, |_| responded());
        queue.submit("b", true, now, |_| std::future::pending());
        queue.wait_for_first_queries().await;
        assert_eq!(responses(&queue.take_responses(&wanted(&["a", "b"]))), [("a", true)]);
        assert!(queue.has_pending(), "it may still respond");
        queue.submit("b", true, now, |_| responded());
        queue.wait_for_first_queries().await;
        assert!(queue.take_responses(&wanted(&["b"])).is_empty(), "neither queried nor waited for twice");
    }

    #[tokio::test]
    async fn retries_with_back_off_and_sends_other_query_at_once() {
        let (mut queue, mut now) = (StatusQueue::default(), Timestamp::now());
        let mut pauses = vec![];
        for _ in 0..8 {
            queue.submit("b", true, now, |_| timed_out());
            queue.next_response().await;
            assert_eq!(responses(&queue.take_responses(&wanted(&["b"]))), [("b", false)]);
            let until = queue.backoffs["b"].until;
            pauses.push(until.since(Timestamp::now()).as_secs_f64().round());
            queue.submit("b", true, Timestamp::now(), |_| responded());
            assert!(!queue.has_pending() && queue.time_to_retry(now).is_some(), "it is backing off");
            now = until;
        }
        assert_eq!(pauses, [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]);
        queue.submit("b", false, Timestamp::now(), |_| responded());
        queue.wait_for_first_queries().await;
        assert_eq!(responses(&queue.take_responses(&wanted(&["b"]))), [("b", true)], "another kind of query");
        assert!(queue.time_to_retry(now).is_none());
        queue.submit("c", true, Timestamp::now(), |_| timed_out());
        queue.next_response().await;
        queue.take_responses(&wanted(&[]));
        assert!(queue.time_to_retry(now).is_none(), "it no longer exists");
    }

    #[tokio::test]
    async fn retries_do_not_use_permits_of_first_queries() {
        let (mut queue, now) = (StatusQueue::default(), Timestamp::now());
        let hanging: Vec<_> = (0..MAX_QUERIES.0).map(|number| format!("s{number}")).collect();
        for id in &hanging {
            queue.submit(id, true, now, |_| timed_out());
        }
        queue.wait_for_first_queries().await;
        assert_eq!(queue.take_responses(&hanging.iter().cloned().collect()).len(), MAX_QUERIES.0);
        let later = now.plus(Duration::from_secs(60));
        for id in &hanging {
            queue.submit(id, true, later, |_| std::future::pending());
        }
        queue.submit("a", true, later, |_| responded());
        queue.wait_for_first_queries().await;
        assert_eq!(responses(&queue.take_responses(&wanted(&["a"]))), [("a", true)]);
    }

    #[tokio::test]
    async fn retries_have_a_longer_timeout() {
        let (mut queue, now) = (StatusQueue::default(), Timestamp::now());
        let mut timeouts = vec![];
        for _ in 0..3 {
            let until = queue.backoffs.get("b").map_or(now, |backoff| backoff.until);
            queue.submit("b", true, until, |timeout| {
                timeouts.push(timeout.as_secs());
                timed_out()
            });
            queue.next_response().await;
            queue.take_responses(&wanted(&["b"]));
        }
        queue.submit("b", false, now, |timeout| {
            timeouts.push(timeout.as_secs());
            timed_out()
        });
        assert_eq!(timeouts, [2, 10, 10, 2], "another kind of query");
    }

    #[tokio::test]
    async fn time_to_retry_excludes_pending_queries() {
        let (mut queue, now) = (StatusQueue::default(), Timestamp::now());
        assert_eq!(queue.time_to_retry(now), None);
        for _ in 0..6 {
            let until = queue.backoffs.get("b").map_or(now, |backoff| backoff.until);
            queue.submit("b", true, until, |_| timed_out());
            queue.next_response().await;
            queue.take_responses(&wanted(&["b"]));
        }
        assert!(
            queue.time_to_retry(Timestamp::now()).is_some_and(|rest| rest > LIST_INTERVAL.1),
            "{:?}",
            queue.time_to_retry(now)
        );
        let until = queue.backoffs["b"].until;
        queue.submit("b", true, until, |_| std::future::pending());
        assert_eq!((queue.time_to_retry(until), queue.has_pending()), (None, true));
    }
}
