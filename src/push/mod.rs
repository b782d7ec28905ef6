//! OTLP: metrics and events to an endpoint, if one is given.
//!
//! One thread with an executor of its own: neither a cycle nor a scrape ever waits for an endpoint, and where there is none,
//! there is no thread. Metrics and events go their own ways in it, so that neither waits for the other.
//!
//! Not here: what is in the messages (`export::otlp`).

mod answer;
mod client;
mod connect;
mod delivery;
pub mod host;
#[cfg(any(test, fuzzing))]
pub mod laws;
mod logs;
mod metrics;

use std::error::Error;
use std::fmt::Write;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use axum::body::Bytes;
use futures_util::FutureExt;
use opentelemetry_proto::tonic::resource::v1::Resource;
use tokio::sync::watch;

use answer::Answer;
use client::Client;
use delivery::{Delivery, Stop};

use crate::clock::Moment;
pub use crate::collect::pushed::{Signal, Tally};
use crate::config::OtlpSettings;
use crate::config::otlp::Target;
use crate::export::otlp::{Counters, Origins};
use crate::ledger::desk::Desk;
use crate::ledger::store::Archive;
use crate::serve::Published;

/// After a panic, which is a bug, the push begins anew after this.
const AFTER_PANIC: Duration = Duration::from_secs(30);

/// What the push needs of the others.
#[derive(Debug)]
pub struct Shared {
    /// Where the snapshots are.
    pub published: Arc<Published>,
    /// Age from which on a snapshot is not pushed any more.
    pub stale_after: Duration,
    /// Where acknowledged events are told.
    pub desk: Arc<Desk>,
    /// The ledger, if there is one.
    pub archive: Option<Archive>,
    /// As what the endpoint of log records is known to the ledger; see [`follower`].
    pub follower: String,
    /// The last event that this endpoint has acknowledged. Here, so that a panic does not begin with old events.
    pub acknowledged: AtomicU64,
    /// Who pushes.
    pub resource: Resource,
    /// Since when counters count.
    pub origins: Origins,
    /// Where it is told how the push fares.
    pub tally: Arc<Tally>,
}

/// As what the endpoint of log records is known to the ledger: the place, and a checksum (FNV-1a) of the path, which may
/// be a secret and is not written down.
pub fn follower(settings: &OtlpSettings) -> String {
    let Some(target) = &settings.logs else { return String::new() };
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    let sum = target.endpoint.path.as_bytes().iter().fold(0xcbf2_9ce4_8422_2325, step);
    format!("{} {sum:016x}", target.endpoint)
}

/// The running push.
#[derive(Debug)]
pub struct Push {
    stop: watch::Sender<Option<Moment>>,
    thread: std::thread::JoinHandle<()>,
    patience: Duration,
}

impl Push {
    /// Starts the thread.
    ///
    /// # Errors
    /// No thread can be had.
    pub fn start(settings: OtlpSettings, shared: Shared) -> std::io::Result<Self> {
        let (stop, stopped) = watch::channel(None);
        let patience = settings.shutdown_timeout;
        let thread = std::thread::Builder::new().name("otlp".into()).spawn(move || {
            while let Err(error) = run(&settings, &shared, &stopped) {
                tracing::error!(%error, "OTLP: no executor; trying again");
                if stopped.borrow().is_some() {
                    return;
                }
                std::thread::park_timeout(AFTER_PANIC);
            }
        })?;
        Ok(Self { stop, thread, patience })
    }

    /// Pushes what is there once more, for at most as long as the settings say.
    pub fn stop(self) {
        let began = Moment::now();
        let _ = self.stop.send(Some(began.plus(self.patience)));
        self.thread.thread().unpark();
        while !self.thread.is_finished() && Moment::now().since(began) < self.patience {
            std::thread::park_timeout(Duration::from_millis(5));
        }
        if !self.thread.is_finished() {
            tracing::warn!(patience = ?self.patience, "OTLP: not everything was taken before the end");
        }
    }
}

fn run(settings: &OtlpSettings, shared: &Shared, stop: &Stop) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let delivery = |signal, target: &Target| {
        Delivery::new(signal, Arc::new(target.clone()), Arc::clone(&shared.tally), stop.clone())
    };
    let metrics = guarded(Signal::Metrics, stop, AFTER_PANIC, async || {
        if let Some(target) = &settings.metrics {
            let counters = Counters::new(settings.delta);
            metrics::run(shared, delivery(Signal::Metrics, target), settings.interval, counters).await;
        }
    });
    let logs = guarded(Signal::Logs, stop, AFTER_PANIC, async || {
        if let (Some(target), Some(archive)) = (&settings.logs, &shared.archive) {
            logs::run(shared, delivery(Signal::Logs, target), archive).await;
        }
    });
    runtime.block_on(futures_util::future::join(metrics, logs));
    runtime.shutdown_background(); // a look-up of a name may hang
    Ok(())
}

/// Runs one signal to its end. If it panics, which is a bug, it begins anew after that pause, and the other goes on.
async fn guarded(signal: Signal, stop: &Stop, pause: Duration, run: impl AsyncFn()) {
    let mut stop = stop.clone();
    while AssertUnwindSafe(run()).catch_unwind().await.is_err() {
        tracing::error!(
            signal = signal.label(),
            "the push over OTLP panicked, which is a bug; it begins anew"
        );
        if tokio::time::timeout(pause, stop.wait_for(Option::is_some)).await.is_ok() {
            return;
        }
    }
}

/// Asks an endpoint to take a request with nothing in it.
///
/// # Errors
/// Why it does not, for people.
pub async fn probe(target: &Target, signal: Signal, patience: Duration) -> Result<(), String> {
    let target = Arc::new(target.clone());
    let ask = async { Client::open(&target, signal).await?.send(Bytes::new()).await };
    match tokio::time::timeout(patience, ask).await {
        Ok(Ok(Answer::Taken { .. })) => Ok(()),
        Ok(Ok(Answer::Refused { reason, .. } | Answer::Later { reason, .. })) | Ok(Err(reason)) => {
            Err(reason)
        }
        Err(_) => Err(format!("no answer within {patience:?}")),
    }
}

/// An error with its causes, each once.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            let _ = write!(text, ": {more}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::config::{Config, arguments};

    #[test]
    fn a_panic_in_one_signal_begins_that_one_anew_and_leaves_the_other_alone() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (_sender, stop) = watch::channel(None);
        let (first, second) = (Cell::new(0), Cell::new(0));
        runtime.block_on(async {
            let panics = guarded(Signal::Metrics, &stop, Duration::from_millis(1), async || {
                first.set(first.get() + 1);
                assert!(first.get() > 2, "a bug");
            });
            let works = guarded(Signal::Logs, &stop, Duration::from_millis(1), async || {
                second.set(second.get() + 1);
                tokio::task::yield_now().await;
            });
            futures_util::future::join(panics, works).await;
        });
        assert_eq!((first.get(), second.get()), (3, 1));
    }

    #[test]
    fn endpoints_that_differ_in_their_path_alone_are_two_followers_and_neither_shows_it() {
        let of = |path: &str| {
            let flags = [format!("--otlp.endpoint=https://c/{path}")];
            let command = arguments(clap::Command::new("memledger").no_binary_name(true));
            follower(&Config::load(&command.get_matches_from(flags)).unwrap().otlp.unwrap())
        };
        assert_eq!(of("s3cr3t"), of("s3cr3t"));
        assert_ne!(of("s3cr3t"), of("other"));
        assert!(of("s3cr3t").starts_with("https://c:443 ") && !of("s3cr3t").contains("s3cr3t"));
    }
}
