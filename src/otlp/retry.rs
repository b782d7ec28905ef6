//! Delivers the requests of one signal: retries with exponential back-off, honours delays that the endpoint requests, and logs
//! the first failure and the recovery.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;

use super::client::OtlpClient;
use super::response::{ExportResult, RejectKind, unsupported_advice};
use crate::clock::Timestamp;
use crate::config::otlp::OtlpTarget;
use crate::host::{Backoff, Health};
use crate::ledger::follow::Stop;
use crate::stats::otlp_stats::{LossReason, OtlpSignal, OtlpStats};

/// Back-off after the first failure; it doubles with each further one.
const INITIAL_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// Least time between two warnings.
const MIN_WARNING_INTERVAL: Duration = Duration::from_secs(600);
/// Consecutive failed attempts that are not yet reported.
const TOLERATED_FAILURES: u32 = 2;

/// Back-off after an endpoint responded that it is no receiver of this signal; it doubles each time.
const UNSUPPORTED_BACKOFF: Duration = Duration::from_secs(300);
/// After this many such responses in a row, which take 2.6 hours, the signal is not sent any more: a proxy that is being restarted
/// responds so for a while, and a receiver of metrics alone for ever.
const MAX_UNSUPPORTED: u32 = 6;

/// The outcome of a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeliveryOutcome {
    /// The endpoint accepted the request, except for this many items.
    Accepted(u64),
    /// The endpoint rejected the request.
    Rejected(RejectKind),
    /// No attempt succeeded in time.
    TimedOut,
}

/// Delivers requests to one endpoint.
#[derive(Debug)]
pub struct RetryingExporter {
    signal: OtlpSignal,
    target: Arc<OtlpTarget>,
    otlp_stats: Arc<OtlpStats>,
    stop: Stop,
    client: Option<OtlpClient>,
    backoff: Backoff,
    failures: u32,
    not_before: Option<Timestamp>,
    /// Responses in a row that the endpoint is no receiver of this signal.
    unsupported: u32,
    /// Reason of the newest failed attempt.
    reason: String,
    health: Health,
    /// The last warning of the endpoint about requests that it accepted, and when it was logged.
    warning: (String, Option<Timestamp>),
}

impl RetryingExporter {
    /// Creates an exporter that is not connected yet.
    pub fn new(signal: OtlpSignal, target: Arc<OtlpTarget>, otlp_stats: Arc<OtlpStats>, stop: Stop) -> Self {
        otlp_stats.enable(signal);
        Self {
            signal,
            target,
            otlp_stats,
            stop,
            client: None,
            backoff: Backoff::new(INITIAL_BACKOFF, MAX_BACKOFF),
            failures: 0,
            not_before: None,
            unsupported: 0,
            reason: String::new(),
            health: Health::with_interval(MIN_WARNING_INTERVAL),
            warning: (String::new(), None),
        }
    }

    /// Returns whether a stop was requested.
    pub fn is_stopping(&self) -> bool {
        self.stop.borrow().is_some()
    }

    /// Sleeps, or returns at once when a stop is requested.
    pub async fn sleep(&mut self, span: Duration) {
        let _ = tokio::time::timeout(span, self.stop.wait_for(Option::is_some)).await;
    }

    /// Returns how long the back-off still lasts.
    pub fn remaining_backoff(&self) -> Duration {
        self.not_before.map_or(Duration::ZERO, |until| until.since(Timestamp::now()))
    }

    /// Sends a request and retries until `until`, or until the deadline of a stop request. `until` does not limit the first
    /// attempt: an endpoint that succeeds may take longer than the export interval.
    pub async fn deliver(&mut self, body: &Bytes, until: Timestamp) -> DeliveryOutcome {
        loop {
            let stopping = *self.stop.borrow();
            let until = stopping.unwrap_or(until);
            let now = Timestamp::now();
            let backoff = self.remaining_backoff();
            let is_limited = stopping.is_some() || self.failures > 0;
            if is_limited && now.plus(backoff) >= until {
                return DeliveryOutcome::TimedOut;
            }
            if !backoff.is_zero() {
                match stopping {
                    Some(_) => tokio::time::sleep(backoff).await,
                    None => self.sleep(backoff).await,
                }
                continue; // a stop may have been requested
            }
            let timeout = match stopping {
                Some(until) => self.target.timeout.min(until.since(now)),
                None => self.target.timeout,
            };
            let result = match tokio::time::timeout(timeout, self.attempt(body.clone())).await {
                Ok(result) => result,
                Err(_) => ExportResult::Retry { after: None, reason: format!("timed out after {timeout:?}") },
            };
            match result {
                ExportResult::Accepted { rejected, message } => {
                    self.backoff.reset();
                    (self.failures, self.unsupported) = (0, 0);
                    if rejected > 0 {
                        self.mark_failing(&format!("{rejected} items were rejected: {message}"));
                    } else if !message.is_empty() {
                        self.show_warning(message);
                    }
                    return DeliveryOutcome::Accepted(rejected);
                }
                ExportResult::Rejected { kind, reason } => {
                    match kind {
                        RejectKind::Unsupported => {
                            self.mark_failing(&format!("{reason}: {}", unsupported_advice(self.signal)));
                        }
                        _ => {
                            self.unsupported = 0; // it is a receiver
                            self.mark_failing(&reason);
                        }
                    }
                    return DeliveryOutcome::Rejected(kind);
                }
                ExportResult::Retry { after, reason } => self.schedule_retry(after, &reason),
            }
        }
    }

    /// Logs what an endpoint has to say about a request that it accepted.
    fn show_warning(&mut self, message: String) {
        let now = Timestamp::now();
        let (last, at) = &self.warning;
        if *last == message || at.is_some_and(|at| now.since(at) < MIN_WARNING_INTERVAL) {
            return;
        }
        tracing::warn!(signal = self.signal.label(), endpoint = %self.target.endpoint, message, "the endpoint of the OTLP export warns");
        self.warning = (message, Some(now));
    }

    async fn attempt(&mut self, body: Bytes) -> ExportResult {
        if let Some(client) = &mut self.client {
            match client.send(body.clone()).await {
                Ok(result) => return result,
                // the endpoint may close connections after each response: retry at once, over a new one
                Err(_) => self.client = None,
            }
        }
        match OtlpClient::open(&self.target, self.signal).await {
            Ok(client) => match self.client.insert(client).send(body).await {
                Ok(result) => result,
                Err(reason) => ExportResult::Retry { after: None, reason },
            },
            Err(reason) => ExportResult::Retry { after: None, reason },
        }
    }

    /// Schedules a retry after the back-off.
    fn schedule_retry(&mut self, after: Option<Duration>, reason: &str) {
        self.client = None;
        self.failures += 1;
        let delay = retry_delay(after, with_jitter(self.backoff.delay()));
        self.not_before = Some(Timestamp::now().plus(delay));
        tracing::debug!(signal = self.signal.label(), endpoint = %self.target.endpoint, reason, ?delay, "OTLP attempt failed; retrying");
        reason.clone_into(&mut self.reason);
        if self.failures > TOLERATED_FAILURES {
            self.report_failure();
        }
    }

    /// Reports the newest failed attempt.
    pub fn report_failure(&mut self) {
        let reason = std::mem::take(&mut self.reason);
        self.mark_failing(&reason);
        self.reason = reason;
    }

    /// Notes that nothing can be exported, for a reason that is logged already.
    pub fn mark_down(&self) {
        self.otlp_stats.set_up(self.signal, false);
    }

    /// Sends nothing for this long.
    pub fn back_off(&mut self, span: Duration) {
        self.not_before = Some(Timestamp::now().plus(span));
    }

    /// Backs off after the endpoint responded that it is no receiver of this signal, at last for good.
    pub fn back_off_unsupported(&mut self) {
        self.unsupported += 1;
        self.back_off(UNSUPPORTED_BACKOFF * 2_u32.pow(self.unsupported.min(MAX_UNSUPPORTED) - 1));
        if self.unsupported == MAX_UNSUPPORTED {
            tracing::warn!(
                signal = self.signal.label(),
                endpoint = %self.target.endpoint,
                attempts = MAX_UNSUPPORTED,
                "OTLP export of this signal stopped until memledger is restarted: {}",
                unsupported_advice(self.signal)
            );
        }
    }

    /// Returns whether the next attempt after such a response is not due yet.
    pub fn is_waiting_for_support(&self) -> bool {
        self.unsupported > 0 && !self.remaining_backoff().is_zero()
    }

    /// Returns whether the endpoint is no receiver of this signal, so that nothing is sent any more.
    pub fn is_disabled(&self) -> bool {
        self.unsupported >= MAX_UNSUPPORTED
    }

    /// Closes the connection until the next export.
    pub fn close(&mut self) {
        self.client = None;
    }

    /// Records a failed export. Logs it once, until the next success; first, so that the metric never precedes the log.
    pub fn mark_failing(&mut self, reason: &str) {
        if self.health.failed(Timestamp::now()) {
            tracing::warn!(
                signal = self.signal.label(),
                endpoint = %self.target.endpoint,
                reason,
                "OTLP export failing. What is not sent later is counted in memledger_otlp_lost_total"
            );
        }
        self.otlp_stats.set_up(self.signal, false);
    }

    /// Records a complete export.
    pub fn mark_healthy(&mut self) {
        if self.health.recovered() {
            tracing::info!(signal = self.signal.label(), endpoint = %self.target.endpoint, "OTLP export recovered");
        }
        self.otlp_stats.set_up(self.signal, true);
    }

    /// Counts sent and lost items.
    pub fn count(&self, sent: u64, lost: u64, reason: LossReason) {
        if sent > 0 {
            self.otlp_stats.count_sent(self.signal, sent);
        }
        if lost > 0 {
            self.otlp_stats.count_lost(self.signal, reason, lost);
        }
    }
}

/// Returns the delay before a retry: as long as the endpoint requests, and at least our own back-off. A `Retry-After` of zero,
/// or in the past, would otherwise cause retries without a pause.
fn retry_delay(requested: Option<Duration>, backoff: Duration) -> Duration {
    requested.map_or(backoff, |requested| requested.max(backoff))
}

/// Returns 75 % to 125 % of a delay, so that many hosts do not retry at the same time.
fn with_jitter(delay: Duration) -> Duration {
    let random = RandomState::new().build_hasher().finish() % 1000;
    delay * 3 / 4 + delay.mul_f64(random as f64 / 2000.0)
}

#[cfg(test)]
mod tests {
    use tokio::sync::watch;

    use super::*;
    use crate::config::otlp::OtlpEndpoint;

    fn exporter(port: u16) -> (RetryingExporter, watch::Sender<Option<Timestamp>>) {
        let endpoint = OtlpEndpoint { tls: false, host: "127.0.0.1".into(), port, path: "/v1/logs".into() };
        let target = OtlpTarget {
            endpoint,
            grpc: false,
            headers: vec![],
            gzip: false,
            timeout: Duration::from_secs(60),
            certificate: None,
            client: None,
        };
        let (sender, stop) = watch::channel(None);
        (RetryingExporter::new(OtlpSignal::Metrics, Arc::new(target), Arc::default(), stop), sender)
    }

    #[test]
    fn backs_off_even_if_the_endpoint_requests_no_delay() {
        let (mut exporter, _stop) = exporter(1);
        let mut min_backoff = INITIAL_BACKOFF.mul_f64(0.7);
        for after in [Some(Duration::ZERO), Some(Duration::from_millis(1)), None] {
            let before = Timestamp::now();
            exporter.schedule_retry(after, "busy");
            let backoff = exporter.not_before.unwrap().since(before);
            assert!(backoff > min_backoff, "{after:?}: {backoff:?}");
            min_backoff *= 2;
        }
        exporter.schedule_retry(Some(Duration::from_secs(600)), "busy");
        assert!(
            exporter.remaining_backoff() > Duration::from_secs(590),
            "the endpoint's delay exceeds our own"
        );
    }

    /// Responds to one request per connection and closes it.
    fn serve_and_close(listener: std::net::TcpListener, answers: usize, response: &[u8]) {
        use std::io::{Read, Write};
        for connection in listener.incoming().take(answers) {
            let mut connection = connection.unwrap();
            let mut seen = vec![];
            while !seen.ends_with(b"\r\n\r\nbody") {
                let mut some = [0; 1024];
                let count = connection.read(&mut some).unwrap();
                seen.extend_from_slice(&some[..count]);
            }
            connection.write_all(response).unwrap();
        }
    }

    #[test]
    fn stops_for_good_at_a_receiver_without_the_signal() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let (mut exporter, _stop) = exporter(listener.local_addr().unwrap().port());
        let attempts = MAX_UNSUPPORTED as usize;
        let endpoint = std::thread::spawn(move || {
            serve_and_close(listener, attempts, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n");
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut waited = Duration::ZERO;
        for attempt in 1..=MAX_UNSUPPORTED {
            assert!(!exporter.is_disabled());
            let until = Timestamp::now().plus(Duration::from_secs(10));
            let outcome = runtime.block_on(exporter.deliver(&Bytes::from_static(b"body"), until));
            assert_eq!(outcome, DeliveryOutcome::Rejected(RejectKind::Unsupported));
            exporter.back_off_unsupported();
            let expected = UNSUPPORTED_BACKOFF * 2_u32.pow(attempt - 1);
            assert!(exporter.remaining_backoff() > expected.mul_f64(0.9), "{attempt}");
            if attempt < MAX_UNSUPPORTED {
                waited += exporter.remaining_backoff();
            }
            exporter.not_before = None;
        }
        assert!(exporter.is_disabled());
        assert!(waited > Duration::from_secs(2 * 3600), "a proxy has time to be restarted: {waited:?}");
        endpoint.join().unwrap();
    }

    #[test]
    fn reconnects_without_back_off_when_the_endpoint_closes_connections() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let (mut exporter, _stop) = exporter(listener.local_addr().unwrap().port());
        let endpoint = std::thread::spawn(move || {
            serve_and_close(listener, 3, b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            for _ in 0..3 {
                let until = Timestamp::now().plus(Duration::from_secs(10));
                assert_eq!(
                    exporter.deliver(&Bytes::from_static(b"body"), until).await,
                    DeliveryOutcome::Accepted(0)
                );
                assert_eq!((exporter.not_before, &*exporter.reason), (None, ""), "no attempt failed");
            }
        });
        endpoint.join().unwrap();
    }
}
