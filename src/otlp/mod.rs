//! Exports metrics, events and traces of memledger's own work over OTLP, if an endpoint is configured.
//!
//! One thread with its own tokio runtime: neither a cycle nor a scrape ever waits for an endpoint, and without one there is no
//! thread. The signals are independent tasks, so none waits for another.
//!
//! The messages are those of `opentelemetry-proto`, filled from the catalog and not by the SDK's instruments, for the reasons in
//! docs/decisions/0019. The export of a large host is split into several requests, made one after the other: only one is in
//! memory at a time.

mod response;
mod client;
mod encoding;
#[cfg(any(test, fuzzing))]
pub mod event_invariants;
mod event_records;
mod retry;
pub mod resource_detection;
#[cfg(any(test, fuzzing))]
pub mod invariants;
mod event_sink;
mod metric_batches;
mod metric_export;
mod resource;
mod temporality;
pub mod traces;

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use futures_util::FutureExt;
use opentelemetry_proto::tonic::resource::v1::Resource;
use tokio::sync::{Semaphore, watch};

use client::OtlpClient;
use event_sink::EventSink;
pub use metric_batches::{MetricBatch, MetricBatches};
pub use resource::{ResourceInfo, resource};
use response::{ExportResult, RejectKind, unsupported_advice};
use retry::RetryingExporter;
pub use temporality::{CounterStates, Origins, PendingPoint};
use traces::SpanQueue;

use crate::clock::Timestamp;
use crate::config::OtlpSettings;
use crate::config::otlp::OtlpTarget;
pub use crate::stats::otlp_stats::{OtlpSignal, OtlpStats};

use crate::host::panics::run_essential;
use crate::http::SnapshotCache;
use crate::ledger::exchange::SharedState;
use crate::ledger::follow::{Follower, Stop};
use crate::ledger::store::EventReader;

/// Delay before a signal restarts after a panic, which is a bug.
const RESTART_DELAY: Duration = Duration::from_secs(30);

/// What the exporter needs from other modules.
#[derive(Debug)]
pub struct OtlpContext {
    /// Source of snapshots.
    pub snapshot_cache: Arc<SnapshotCache>,
    /// Age from which on a snapshot is no longer exported.
    pub stale_after: Duration,
    /// Receives acknowledged events.
    pub shared_state: Arc<SharedState>,
    /// Reads events of the ledger; `None` without a ledger.
    pub event_reader: Option<EventReader>,
    /// Name of the cursor of the endpoint of log records; see [`cursor_name`].
    pub cursor_name: String,
    /// The resource of all exports.
    pub resource: Resource,
    /// Start times of counters.
    pub origins: Origins,
    /// Counts exported and lost items.
    pub otlp_stats: Arc<OtlpStats>,
    /// Spans to export; `None` without traces.
    pub spans: Option<SpanQueue>,
}

/// Returns the name of the cursor of the endpoint of log records in the ledger: its address, and a checksum (FNV-1a) of the path, which may be
/// a secret and must not be stored.
pub fn cursor_name(settings: &OtlpSettings) -> String {
    let Some(target) = &settings.logs else { return String::new() };
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    let sum = target.endpoint.path.as_bytes().iter().fold(0xcbf2_9ce4_8422_2325, step);
    format!("otlp {} {sum:016x}", target.endpoint)
}

/// The running exporter.
#[derive(Debug)]
pub struct OtlpExporter {
    stop: watch::Sender<Option<Timestamp>>,
    thread: std::thread::JoinHandle<()>,
    timeout: Duration,
    otlp_stats: Arc<OtlpStats>,
}

impl OtlpExporter {
    /// Starts the exporter's thread.
    ///
    /// # Errors
    /// The thread cannot be created.
    pub fn start(settings: OtlpSettings, context: OtlpContext) -> std::io::Result<Self> {
        let (stop, stopped) = watch::channel(None);
        let (timeout, otlp_stats) = (settings.shutdown_timeout, Arc::clone(&context.otlp_stats));
        let body = move || {
            while let Err(error) = run(&settings, &context, &stopped) {
                tracing::error!(%error, "OTLP: starting the async runtime failed; retrying");
                if stopped.borrow().is_some() {
                    return;
                }
                std::thread::park_timeout(RESTART_DELAY);
            }
        };
        let thread = std::thread::Builder::new().name("otlp".into());
        let thread = thread.spawn(move || run_essential("otlp", body))?;
        Ok(Self { stop, thread, timeout, otlp_stats })
    }

    /// Returns what the exporter counts.
    pub fn stats(&self) -> Arc<OtlpStats> {
        Arc::clone(&self.otlp_stats)
    }

    /// Exports pending data once more, within the shutdown timeout.
    pub fn stop(self) {
        let started = Timestamp::now();
        let _ = self.stop.send(Some(started.plus(self.timeout)));
        self.thread.thread().unpark();
        while !self.thread.is_finished() && Timestamp::now().since(started) < self.timeout {
            std::thread::park_timeout(Duration::from_millis(5));
        }
        if !self.thread.is_finished() {
            tracing::warn!(timeout = ?self.timeout, "OTLP: shutdown timed out before everything was exported");
        }
    }
}

fn run(settings: &OtlpSettings, context: &OtlpContext, stop: &Stop) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let exporter = |signal, target: &OtlpTarget| {
        RetryingExporter::new(signal, Arc::new(target.clone()), Arc::clone(&context.otlp_stats), stop.clone())
    };
    let metrics = guarded(OtlpSignal::Metrics, stop, RESTART_DELAY, async || {
        if let Some(target) = &settings.metrics {
            let exporter = exporter(OtlpSignal::Metrics, target);
            metric_export::run(context, exporter, settings.interval, CounterStates::default()).await;
        }
    });
    let logs = guarded(OtlpSignal::Logs, stop, RESTART_DELAY, async || {
        if let (Some(target), Some(event_reader)) = (&settings.logs, &context.event_reader) {
            let sink = EventSink::new(context, exporter(OtlpSignal::Logs, target));
            let follower = Follower::new(&*context.cursor_name, sink);
            follower.run(event_reader, &context.shared_state.followers, stop.clone()).await;
        }
    });
    let traces = guarded(OtlpSignal::Traces, stop, RESTART_DELAY, async || {
        if let (Some(target), Some(spans)) = (&settings.traces, &context.spans) {
            traces::run(context, exporter(OtlpSignal::Traces, target), spans).await;
        }
    });
    runtime.block_on(futures_util::future::join3(metrics, logs, traces));
    runtime.shutdown_background(); // a DNS lookup may hang
    Ok(())
}

/// Runs one signal to its end. After a panic, which is a bug, it restarts with a delay; the other signals go on.
async fn guarded(signal: OtlpSignal, stop: &Stop, delay: Duration, run: impl AsyncFn()) {
    let mut stop = stop.clone();
    while AssertUnwindSafe(run()).catch_unwind().await.is_err() {
        tracing::error!(signal = signal.label(), "OTLP export panicked, which is a bug; restarting");
        if tokio::time::timeout(delay, stop.wait_for(Option::is_some)).await.is_ok() {
            return;
        }
    }
}

/// Permits for reading the files of each signal: a file system that hangs blocks one thread each.
static FILE_PERMITS: [Semaphore; OtlpSignal::ALL.len()] =
    [const { Semaphore::const_new(1) }; OtlpSignal::ALL.len()];

/// Why a probe failed.
#[derive(Debug)]
pub struct ProbeFailure {
    /// A message for people.
    pub reason: String,
    /// What to do, where the endpoint is no receiver of the signal.
    pub advice: Option<&'static str>,
}

/// Sends an empty request to an endpoint.
///
/// # Errors
/// The export failed.
pub async fn probe(target: &OtlpTarget, signal: OtlpSignal, timeout: Duration) -> Result<(), ProbeFailure> {
    let target = Arc::new(target.clone());
    let export = async { OtlpClient::open(&target, signal).await?.send(Bytes::new()).await };
    match tokio::time::timeout(timeout, export).await {
        Ok(Ok(ExportResult::Accepted { .. })) => Ok(()),
        Ok(Ok(ExportResult::Rejected { kind, reason })) => {
            let advice = (kind == RejectKind::Unsupported).then(|| unsupported_advice(signal));
            Err(ProbeFailure { reason, advice })
        }
        Ok(Ok(ExportResult::Retry { reason, .. }) | Err(reason)) => {
            Err(ProbeFailure { reason, advice: None })
        }
        Err(_) => Err(ProbeFailure { reason: format!("timed out after {timeout:?}"), advice: None }),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::config::{Config, arguments};

    #[test]
    fn panic_restarts_only_its_own_signal() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (_sender, stop) = watch::channel(None);
        let (first, second) = (Cell::new(0), Cell::new(0));
        runtime.block_on(async {
            let panics = guarded(OtlpSignal::Metrics, &stop, Duration::from_millis(1), async || {
                first.set(first.get() + 1);
                assert!(first.get() > 2, "a bug");
            });
            let succeeds = guarded(OtlpSignal::Logs, &stop, Duration::from_millis(1), async || {
                second.set(second.get() + 1);
                tokio::task::yield_now().await;
            });
            futures_util::future::join(panics, succeeds).await;
        });
        assert_eq!((first.get(), second.get()), (3, 1));
    }

    #[test]
    fn cursor_name_depends_on_the_path_and_does_not_reveal_it() {
        let of = |path: &str| {
            let flags = [format!("--otlp.endpoint=https://c/{path}")];
            let command = arguments(clap::Command::new("memledger").no_binary_name(true));
            cursor_name(&Config::load(&command.get_matches_from(flags)).unwrap().otlp.unwrap())
        };
        assert_eq!(of("s3cr3t"), of("s3cr3t"));
        assert_ne!(of("s3cr3t"), of("other"));
        assert!(of("s3cr3t").starts_with("otlp https://c:443 ") && !of("s3cr3t").contains("s3cr3t"));
    }
}
