//! Status queries for single containers: back-off, concurrency limits and timeouts.
//!
//! A runtime responds within milliseconds. But one container whose shim hangs can block its own status for ever, and must not
//! delay the names of all others: a list waits at most [`LIST_TIMEOUT`] for the responses to its first queries. A query
//! without a response is retried by a later list, with an exponential back-off, under a separate concurrency limit.

use std::collections::{HashMap, HashSet};
use std::fmt::Display;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::Semaphore;

use super::RuntimeKind;
use crate::clock::Timestamp;
use crate::host::Backoff;

/// Longest time that a list waits for status responses. Together with a list interval of one second it is below the time for
/// which a new container is held back until it has a name (`registry::NAME_GRACE`).
const LIST_TIMEOUT: Duration = Duration::from_secs(1);
/// Concurrency limits: of first queries, and of retries.
const MAX_QUERIES: (usize, usize) = (16, 4);
/// Timeouts: of a first query, because others wait for its permit; and of a retry. On a node with memory or disk pressure
/// every response takes some seconds.
const QUERY_TIMEOUT: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(10));
/// The back-off: the first one, which doubles, and its limit.
const RETRY_DELAY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// The status of one container; `None` if it is gone.
pub type StatusResult<S, E> = Result<Option<S>, E>;

/// A response, and whether its query was verbose.
type Finished<S, E> = (String, bool, StatusResult<S, E>);

/// A query in flight.
type StatusQuery<S, E> = Pin<Box<dyn Future<Output = Finished<S, E>> + Send>>;

/// Back-off of a query without a response.
#[derive(Debug)]
struct QueryRetry {
    /// The kind of the query; one of the other kind is sent at once.
    verbose: bool,
    backoff: Backoff,
    until: Timestamp,
}

/// The status queries of one connection.
pub struct StatusQueue<S, E> {
    runtime: RuntimeKind,
    queries: FuturesUnordered<StatusQuery<S, E>>,
    /// The pending queries, and whether the current list waits for them.
    pending: HashMap<String, bool>,
    retries: HashMap<String, QueryRetry>,
    permits: (Arc<Semaphore>, Arc<Semaphore>),
}

impl<S, E> StatusQueue<S, E>
where
    S: Send + 'static,
    E: Display + Send + 'static,
{
    /// Creates an empty queue.
    pub fn new(runtime: RuntimeKind) -> Self {
        Self {
            runtime,
            queries: FuturesUnordered::new(),
            pending: HashMap::new(),
            retries: HashMap::new(),
            permits: (Arc::new(Semaphore::new(MAX_QUERIES.0)), Arc::new(Semaphore::new(MAX_QUERIES.1))),
        }
    }

    /// Queries a container unless it is pending or backing off. `verbose`: with its OCI configuration. `query` is called with its
    /// timeout, after which it must fail.
    pub fn submit<Q>(&mut self, id: &str, verbose: bool, now: Timestamp, query: impl FnOnce(Duration) -> Q)
    where
        Q: Future<Output = StatusResult<S, E>> + Send + 'static,
    {
        let retry = self.retries.get(id).filter(|retry| retry.verbose == verbose);
        if retry.is_some_and(|retry| retry.until > now) || self.pending.contains_key(id) {
            return;
        }
        let is_first = retry.is_none();
        let (permits, timeout) =
            if is_first { (&self.permits.0, QUERY_TIMEOUT.0) } else { (&self.permits.1, QUERY_TIMEOUT.1) };
        let (permits, query) = (Arc::clone(permits), query(timeout));
        let id = id.to_owned();
        self.pending.insert(id.clone(), is_first);
        self.queries.push(Box::pin(async move {
            let _permit = permits.acquire().await;
            (id, verbose, query.await)
        }));
    }

    /// Returns the responses to first queries that arrive within [`LIST_TIMEOUT`].
    pub async fn first_responses(&mut self) -> HashMap<String, StatusResult<S, E>> {
        let mut responses = HashMap::new();
        let mut timeout = std::pin::pin!(tokio::time::sleep(LIST_TIMEOUT));
        while self.pending.values().any(|is_waited_for| *is_waited_for) {
            tokio::select! {
                response = self.next_response() => responses.extend(response),
                () = &mut timeout => {
                    self.pending.values_mut().for_each(|is_waited_for| *is_waited_for = false);
                }
            }
        }
        responses
    }

    /// Waits for one more response; `None` if no query is pending.
    pub async fn next_response(&mut self) -> Option<(String, StatusResult<S, E>)> {
        let (id, verbose, response) = self.queries.next().await?;
        self.pending.remove(&id);
        match &response {
            Ok(_) => drop(self.retries.remove(&id)),
            Err(error) => {
                tracing::debug!(runtime = %self.runtime, id, %error, "container status query failed, retrying");
                let before = self.retries.get(&id).filter(|retry| retry.verbose == verbose);
                let mut backoff =
                    before.map_or(Backoff::new(RETRY_DELAY.0, RETRY_DELAY.1), |retry| retry.backoff);
                let until = Timestamp::now().plus(backoff.delay());
                self.retries.insert(id.clone(), QueryRetry { verbose, backoff, until });
            }
        }
        Some((id, response))
    }

    /// Drops the back-off of containers that are not `wanted`.
    pub fn retain(&mut self, wanted: &HashSet<String>) {
        self.retries.retain(|id, _| wanted.contains(id));
    }

    /// Returns whether a query is pending.
    pub fn has_pending(&self) -> bool {
        !self.queries.is_empty()
    }

    /// Returns the time to the next retry; `None` if no container is backing off.
    pub fn time_to_retry(&self, now: Timestamp) -> Option<Duration> {
        let waiting = self.retries.iter().filter(|(id, _)| !self.pending.contains_key(*id));
        waiting.map(|(_, retry)| retry.until.since(now)).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Queue = StatusQueue<(), &'static str>;

    fn queue() -> Queue {
        StatusQueue::new(RuntimeKind::Cri)
    }

    fn answered(taken: HashMap<String, StatusResult<(), &'static str>>) -> Vec<(String, bool)> {
        let mut responses: Vec<_> = taken.into_iter().map(|(id, response)| (id, response.is_ok())).collect();
        responses.sort_unstable();
        responses
    }

    fn responses(all: &[(&str, bool)]) -> Vec<(String, bool)> {
        all.iter().map(|(id, is_ok)| (id.to_string(), *is_ok)).collect()
    }

    async fn responded() -> StatusResult<(), &'static str> {
        Ok(Some(()))
    }

    /// A query that times out.
    async fn timed_out() -> StatusResult<(), &'static str> {
        Err("timed out")
    }

    #[tokio::test]
    async fn list_does_not_wait_for_hanging_query() {
        let (mut queue, now) = (queue(), Timestamp::now());
        queue.submit("a", true, now, |_| responded());
        queue.submit("b", true, now, |_| std::future::pending());
        assert_eq!(answered(queue.first_responses().await), responses(&[("a", true)]));
        assert!(queue.has_pending(), "it may still respond");
        queue.submit("b", true, now, |_| responded());
        assert!(queue.first_responses().await.is_empty(), "neither queried nor waited for twice");
    }

    #[tokio::test]
    async fn retries_with_back_off_and_sends_other_query_at_once() {
        let (mut queue, mut now) = (queue(), Timestamp::now());
        for pause in [1, 2, 4, 8, 16, 30, 30, 30].map(Duration::from_secs) {
            let before = Timestamp::now();
            queue.submit("b", true, now, |_| timed_out());
            assert_eq!(queue.next_response().await, Some(("b".to_owned(), Err("timed out"))));
            let until = queue.retries["b"].until;
            assert!(until.since(before) >= pause && until.since(Timestamp::now()) <= pause, "{pause:?}");
            queue.submit("b", true, before, |_| responded());
            assert!(!queue.has_pending() && queue.time_to_retry(now).is_some(), "it is backing off");
            now = until;
        }
        queue.submit("b", false, Timestamp::now(), |_| responded());
        assert_eq!(
            answered(queue.first_responses().await),
            responses(&[("b", true)]),
            "another kind of query"
        );
        assert!(queue.time_to_retry(now).is_none());
        queue.submit("c", true, Timestamp::now(), |_| timed_out());
        queue.next_response().await;
        queue.retain(&HashSet::new());
        assert!(queue.time_to_retry(now).is_none(), "it no longer exists");
    }

    #[tokio::test]
    async fn retries_do_not_use_permits_of_first_queries() {
        let (mut queue, now) = (queue(), Timestamp::now());
        let hanging: Vec<_> = (0..MAX_QUERIES.0).map(|number| format!("s{number}")).collect();
        for id in &hanging {
            queue.submit(id, true, now, |_| timed_out());
        }
        assert_eq!(queue.first_responses().await.len(), MAX_QUERIES.0);
        let later = now.plus(Duration::from_secs(60));
        for id in &hanging {
            queue.submit(id, true, later, |_| std::future::pending());
        }
        queue.submit("a", true, later, |_| responded());
        assert_eq!(answered(queue.first_responses().await), responses(&[("a", true)]));
    }

    #[tokio::test]
    async fn retries_have_a_longer_timeout() {
        let (mut queue, now) = (queue(), Timestamp::now());
        let mut timeouts = vec![];
        for _ in 0..3 {
            let until = queue.retries.get("b").map_or(now, |retry| retry.until);
            queue.submit("b", true, until, |timeout| {
                timeouts.push(timeout.as_secs());
                timed_out()
            });
            queue.next_response().await;
        }
        queue.submit("b", false, now, |timeout| {
            timeouts.push(timeout.as_secs());
            timed_out()
        });
        assert_eq!(timeouts, [2, 10, 10, 2], "another kind of query");
    }

    #[tokio::test]
    async fn time_to_retry_excludes_pending_queries() {
        let (mut queue, now) = (queue(), Timestamp::now());
        assert_eq!(queue.time_to_retry(now), None);
        for _ in 0..6 {
            let until = queue.retries.get("b").map_or(now, |retry| retry.until);
            queue.submit("b", true, until, |_| timed_out());
            queue.next_response().await;
        }
        let rest = queue.time_to_retry(Timestamp::now());
        assert!(rest.is_some_and(|rest| rest > Duration::from_secs(10)), "{rest:?}");
        let until = queue.retries["b"].until;
        queue.submit("b", true, until, |_| std::future::pending());
        assert_eq!((queue.time_to_retry(until), queue.has_pending()), (None, true));
    }
}
