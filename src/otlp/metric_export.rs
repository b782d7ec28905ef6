//! Exports the newest snapshot once per interval, in as many requests as needed.
//!
//! Points that were not accepted when the next export is due are dropped and counted; newer values follow. A dead endpoint thus
//! costs the memory of one batch. Counters lose nothing by that.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;

use super::OtlpContext;
use super::metric_batches::MetricBatches;
use super::retry::{DeliveryOutcome, RetryingExporter};
use super::temporality::CounterStates;
use crate::clock::Timestamp;
use crate::collect::otlp_stats::LossReason;
use crate::http::RenderedSnapshot;

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
        let newest = context.snapshot_cache.newest(started, context.stale_after).ok();
        // the same snapshot again would add nothing: sampling is slower than the exports, or hangs
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
    let mut batches = MetricBatches::new(snapshot, &context.resource, context.origins);
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
                if kind == super::response::RejectKind::Other {
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
