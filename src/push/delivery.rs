//! Delivers requests of one signal: tries again with growing pauses, leaves the endpoint alone as long as it asks, and says
//! once that something is wrong and once that it is well again.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use tokio::sync::watch;

use super::answer::{Answer, Refusal};
use super::client::Client;
use crate::clock::Moment;
use crate::collect::pushed::{Lost, Signal, Tally};
use crate::config::otlp::Target;

/// The first pause after a failure; each one is twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A failure is said again after this, not earlier, if it was well in between.
const SAY_AGAIN: Duration = Duration::from_secs(600);
/// Attempts that fail one after the other until it counts as a failure and no hiccup.
const HICCUPS: u32 = 2;

/// When the end was asked for: until when the last push may take.
pub type Stop = watch::Receiver<Option<Moment>>;

/// How a delivery ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The endpoint took it; of its items all but so many.
    Taken(u64),
    /// The endpoint will not have it.
    Refused(Refusal),
    /// Nobody took it in time.
    GaveUp,
}

/// The way to one endpoint.
#[derive(Debug)]
pub struct Delivery {
    signal: Signal,
    target: Arc<Target>,
    tally: Arc<Tally>,
    stop: Stop,
    client: Option<Client>,
    pause: Duration,
    failures: u32,
    not_before: Option<Moment>,
    /// Why the newest attempt failed.
    reason: String,
    said: Option<Moment>,
    /// The failure was said, and not yet that it is over.
    is_said: bool,
}

impl Delivery {
    /// Nothing is sent yet.
    pub fn new(signal: Signal, target: Arc<Target>, tally: Arc<Tally>, stop: Stop) -> Self {
        tally.begin(signal);
        Self {
            signal,
            target,
            tally,
            stop,
            client: None,
            pause: FIRST_PAUSE,
            failures: 0,
            not_before: None,
            reason: String::new(),
            said: None,
            is_said: false,
        }
    }

    /// True once the end was asked for.
    pub fn is_stopping(&self) -> bool {
        self.stop.borrow().is_some()
    }

    /// Waits so long, or until the end is asked for.
    pub async fn rest(&mut self, span: Duration) {
        let _ = tokio::time::timeout(span, self.stop.wait_for(Option::is_some)).await;
    }

    /// How long the endpoint is to be left alone still.
    pub fn must_rest(&self) -> Duration {
        self.not_before.map_or(Duration::ZERO, |until| until.since(Moment::now()))
    }

    /// Sends a request; where that fails, again and again until `until`, or until the end that was asked for. As long as
    /// nothing fails, an endpoint may be slower than the pushes are apart.
    pub async fn deliver(&mut self, body: &Bytes, until: Moment) -> Outcome {
        loop {
            let stopping = *self.stop.borrow();
            let until = stopping.unwrap_or(until);
            let now = Moment::now();
            let rest = self.must_rest();
            let limited = stopping.is_some() || self.failures > 0;
            if limited && now.plus(rest) >= until {
                return Outcome::GaveUp;
            }
            if !rest.is_zero() {
                match stopping {
                    Some(_) => tokio::time::sleep(rest).await,
                    None => self.rest(rest).await,
                }
                continue; // the end may have been asked for
            }
            let patience = match stopping {
                Some(until) => self.target.timeout.min(until.since(now)),
                None => self.target.timeout,
            };
            let answer = match tokio::time::timeout(patience, self.attempt(body.clone())).await {
                Ok(answer) => answer,
                Err(_) => Answer::Later { after: None, reason: format!("no answer within {patience:?}") },
            };
            match answer {
                Answer::Taken { rejected, message } => {
                    (self.pause, self.failures) = (FIRST_PAUSE, 0);
                    if rejected > 0 {
                        self.fails(&format!("{rejected} items were rejected: {message}"));
                    }
                    return Outcome::Taken(rejected);
                }
                Answer::Refused { of, reason } => {
                    self.fails(&reason);
                    return Outcome::Refused(of);
                }
                Answer::Later { after, reason } => self.later(after, &reason),
            }
        }
    }

    async fn attempt(&mut self, body: Bytes) -> Answer {
        if let Some(client) = &mut self.client {
            match client.send(body.clone()).await {
                Ok(answer) => return answer,
                // an endpoint may close after each answer, which is no failure: once more, over a new connection
                Err(_) => self.client = None,
            }
        }
        match Client::open(&self.target, self.signal).await {
            Ok(client) => match self.client.insert(client).send(body).await {
                Ok(answer) => answer,
                Err(reason) => Answer::Later { after: None, reason },
            },
            Err(reason) => Answer::Later { after: None, reason },
        }
    }

    /// Leaves the endpoint alone for a while.
    fn later(&mut self, after: Option<Duration>, reason: &str) {
        self.client = None;
        self.failures += 1;
        let pause = pause(after, jittered(self.pause));
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        self.not_before = Some(Moment::now().plus(pause));
        tracing::debug!(signal = self.signal.label(), endpoint = %self.target.endpoint, reason, ?pause, "OTLP: tried in vain");
        reason.clone_into(&mut self.reason);
        if self.failures > HICCUPS {
            self.gave_up();
        }
    }

    /// The newest failure is no hiccup.
    pub fn gave_up(&mut self) {
        let reason = std::mem::take(&mut self.reason);
        self.fails(&reason);
        self.reason = reason;
    }

    /// There is nothing to send, because the ledger cannot be read.
    pub fn unreadable(&mut self, error: &dyn std::error::Error) {
        self.fails(&format!("the ledger cannot be read: {}", super::chain(error)));
    }

    /// Keeps away from an endpoint that refuses whatever it is sent.
    pub fn keep_away(&mut self, span: Duration) {
        self.not_before = Some(Moment::now().plus(span));
    }

    /// The connection is not needed for now.
    pub fn close(&mut self) {
        self.client = None;
    }

    /// Something was not taken.
    pub fn fails(&mut self, reason: &str) {
        self.tally.up(self.signal, false);
        let now = Moment::now();
        if self.is_said || self.said.is_some_and(|said| now.since(said) < SAY_AGAIN) {
            return;
        }
        (self.is_said, self.said) = (true, Some(now));
        tracing::warn!(
            signal = self.signal.label(),
            endpoint = %self.target.endpoint,
            reason,
            "OTLP is not taken; memledger goes on trying, counts in memledger_otlp_lost_total, and says so once"
        );
    }

    /// A whole push was taken.
    pub fn works(&mut self) {
        self.tally.up(self.signal, true);
        if std::mem::take(&mut self.is_said) {
            tracing::info!(signal = self.signal.label(), endpoint = %self.target.endpoint, "OTLP is taken again");
        }
    }

    /// Counts items.
    pub fn count(&self, sent: u64, lost: u64, why: Lost) {
        if sent > 0 {
            self.tally.sent(self.signal, sent);
        }
        if lost > 0 {
            self.tally.lost(self.signal, why, lost);
        }
    }
}

/// How long an endpoint is left alone: as long as it asks, and never shorter than a pause of our own. A `Retry-After: 0`, or
/// one that has passed, else meant one attempt after the other without a break.
fn pause(asked: Option<Duration>, own: Duration) -> Duration {
    asked.map_or(own, |asked| asked.max(own))
}

/// Three quarters of a pause to five quarters, so that many hosts do not come back at once.
fn jittered(pause: Duration) -> Duration {
    let random = RandomState::new().build_hasher().finish() % 1000;
    pause * 3 / 4 + pause.mul_f64(random as f64 / 2000.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::otlp::Endpoint;

    fn delivery(port: u16) -> (Delivery, watch::Sender<Option<Moment>>) {
        let endpoint = Endpoint { tls: false, host: "127.0.0.1".into(), port, path: "/v1/logs".into() };
        let target = Target {
            endpoint,
            grpc: false,
            headers: vec![],
            gzip: false,
            timeout: Duration::from_secs(1),
            certificate: None,
            client: None,
        };
        let (sender, stop) = watch::channel(None);
        (Delivery::new(Signal::Metrics, Arc::new(target), Arc::default(), stop), sender)
    }

    #[test]
    fn an_endpoint_that_asks_for_no_time_is_left_alone_all_the_same_and_longer_each_time() {
        let (mut delivery, _stop) = delivery(1);
        let mut least = FIRST_PAUSE.mul_f64(0.7);
        for after in [Some(Duration::ZERO), Some(Duration::from_millis(1)), None] {
            delivery.later(after, "busy");
            assert!(delivery.must_rest() > least, "{after:?}: {:?}", delivery.must_rest());
            least *= 2;
        }
        delivery.later(Some(Duration::from_secs(600)), "busy");
        assert!(delivery.must_rest() > Duration::from_secs(590), "it asks for more than we would wait");
    }

    /// Answers one request per connection, and closes it without a word.
    fn that_closes(listener: std::net::TcpListener, answers: usize) {
        use std::io::{Read, Write};
        for connection in listener.incoming().take(answers) {
            let mut connection = connection.unwrap();
            let mut seen = vec![];
            while !seen.ends_with(b"\r\n\r\nbody") {
                let mut some = [0; 1024];
                let count = connection.read(&mut some).unwrap();
                seen.extend_from_slice(&some[..count]);
            }
            connection.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").unwrap();
        }
    }

    #[test]
    fn an_endpoint_that_closes_after_each_answer_takes_all_without_a_pause() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let (mut delivery, _stop) = delivery(listener.local_addr().unwrap().port());
        let endpoint = std::thread::spawn(move || that_closes(listener, 3));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            for _ in 0..3 {
                let until = Moment::now().plus(Duration::from_secs(10));
                assert_eq!(delivery.deliver(&Bytes::from_static(b"body"), until).await, Outcome::Taken(0));
                assert_eq!((delivery.not_before, &*delivery.reason), (None, ""), "no attempt failed");
            }
        });
        endpoint.join().unwrap();
    }
}
