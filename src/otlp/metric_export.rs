//! Exports the newest snapshot once per interval, in as many requests as needed; while a cycle hangs, the partial one.
//!
//! Points that were not accepted when the next export is due are dropped and counted; newer values follow. A dead endpoint thus
//! costs the memory of one batch. Counters lose nothing by that.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;

use super::OtlpContext;
use super::metric_batches::MetricBatches;
use super::response::RejectKind;
use super::retry::{DeliveryOutcome, RetryingExporter};
use super::temporality::{CounterStates, Origins};
use crate::clock::Timestamp;
use crate::http::RenderedSnapshot;
use crate::stats::otlp_stats::LossReason;

/// How often the first snapshot is checked for.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Exports until the stop request, and once more then.
pub async fn run(
    context: &OtlpContext,
    mut exporter: RetryingExporter,
    interval: Duration,
    mut counters: CounterStates,
) {
    let mut last = None;
    loop {
        let started = Timestamp::now();
        let due = started.plus(interval);
        let is_stopping = exporter.is_stopping();
        let newest = context.snapshot_cache.newest_or_partial(started, context.stale_after).ok();
        // the same snapshot again would add nothing: sampling is slower than the exports
        let newer = newest.filter(|newest| last != Some(newest.snapshot().finished));
        if let Some(newest) = &newer {
            last = Some(newest.snapshot().finished);
            export(context, &mut exporter, newest, due, &mut counters).await;
        }
        if is_stopping {
            return;
        }
        let delay = if last.is_none() { POLL_INTERVAL } else { due.since(Timestamp::now()) };
        drop(newer); // frees the snapshot while waiting
        exporter.sleep(delay).await;
    }
}

/// Exports one snapshot.
async fn export(
    context: &OtlpContext,
    exporter: &mut RetryingExporter,
    newest: &Arc<RenderedSnapshot>,
    due: Timestamp,
    counters: &mut CounterStates,
) {
    let snapshot = newest.snapshot();
    // that of a ledger that could not be read at the start is known later
    let figures = context.shared_state.figures(Timestamp::now());
    let ledger = figures.map_or(0, |figures| (figures.counted_since * 1e9) as u64);
    let origins = Origins { ledger, ..context.origins };
    let mut batches = MetricBatches::new(snapshot, &context.resource, origins);
    let mut is_accepted = true;
    while let Some(batch) = batches.next(counters) {
        exporter.count(0, batch.too_large as u64, LossReason::TooLarge);
        let count = batch.points as u64;
        if count == 0 {
            continue; // the only point of it is too large
        }
        match exporter.deliver(&Bytes::from(batch.body), due).await {
            DeliveryOutcome::Accepted(rejected) => {
                let rejected = rejected.min(count);
                exporter.count(count - rejected, rejected, LossReason::Refused);
                counters.commit(&batch.counters);
                is_accepted &= rejected == 0;
            }
            DeliveryOutcome::Rejected(kind) => {
                exporter.count(0, count, LossReason::Refused);
                is_accepted = false;
                if matches!(kind, RejectKind::Other | RejectKind::Unsupported) {
                    exporter.count(0, batches.remaining() as u64, LossReason::Refused);
                    break;
                }
            }
            DeliveryOutcome::TimedOut => {
                exporter.report_failure();
                exporter.count(0, count + batches.remaining() as u64, LossReason::Unreachable);
                is_accepted = false;
                break;
            }
        }
    }
    exporter.close();
    counters.trim();
    if is_accepted {
        exporter.mark_healthy();
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::watch;

    use super::*;
    use crate::config::otlp::{OtlpEndpoint, OtlpTarget};
    use crate::http::SnapshotCache;
    use crate::series::Series;
    use crate::snapshot::Snapshot;
    use crate::stats::otlp_stats::{OtlpSignal, OtlpStats};

    #[test]
    fn exports_the_partial_snapshot_while_a_cycle_hangs() {
        let snapshot_cache = Arc::new(SnapshotCache::default());
        let now = Timestamp::now();
        while Timestamp::now().since(now).is_zero() {}
        snapshot_cache.refresh_partial(Duration::ZERO, |_| {
            let mut series = Series::default();
            series.global(crate::catalog::HOST_OOM_KILLS, [], 3.0);
            Snapshot::of_series(now, series)
        });
        let otlp_stats = Arc::new(OtlpStats::default());
        let context = OtlpContext {
            snapshot_cache,
            stale_after: Duration::from_secs(30),
            shared_state: Arc::default(),
            event_reader: None,
            cursor_name: String::new(),
            resource: super::super::Resource::default(),
            origins: Origins::default(),
            otlp_stats: Arc::clone(&otlp_stats),
            spans: None,
        };
        let endpoint = OtlpEndpoint { tls: false, host: "127.0.0.1".into(), port: 1, path: "/".into() };
        let target = OtlpTarget {
            endpoint,
            grpc: false,
            headers: vec![],
            gzip: false,
            timeout: Duration::from_secs(1),
            certificate: None,
            client: None,
        };
        // the time for the last export is over, so its points count as lost without an attempt
        let (_sender, stop) = watch::channel(Some(now));
        let exporter =
            RetryingExporter::new(OtlpSignal::Metrics, Arc::new(target), Arc::clone(&otlp_stats), stop);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(run(&context, exporter, Duration::from_secs(60), CounterStates::default()));
        let mut series = Series::default();
        otlp_stats.write(&mut series);
        let lost = series.rows().iter().filter(|row| row.family == crate::catalog::OTLP_LOST.id);
        assert_eq!(lost.map(|row| row.value).sum::<f64>(), 1.0);
    }
}
