//! Exports the ledger's events as log records, each at least once.
//!
//! The ledger stores the number of the last event that each endpoint has acknowledged, so restarts of memledger or of the
//! endpoint lose none. A new endpoint starts with the oldest event in the ledger. While an endpoint is down, events wait in
//! the ledger and not in memory, within `--state.retention` and `--state.max-size`.

use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::body::Bytes;

use super::event_records::EventRecords;
use super::response::RejectKind;
use super::retry::{DeliveryOutcome, RetryingExporter};
use super::{LEDGER_PERMIT, OtlpContext};
use crate::clock::Timestamp;
use crate::connect::run_blocking;
use crate::events::LedgerEvent;
use crate::ledger::store::{EventReader, StoreError};
use crate::stats::otlp_stats::LossReason;

/// How often a change counter is checked for new events.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Events per read of the ledger.
const MAX_BATCH_EVENTS: usize = 200;
/// After this many events in a row were rejected one by one, the endpoint is at fault rather than the events.
const MAX_SUSPECTS: usize = 3;
/// Back-off after an endpoint rejected everything.
const REJECTED_BACKOFF: Duration = Duration::from_secs(300);
/// Retry interval while the ledger is unreadable.
const UNREADABLE_RETRY_INTERVAL: Duration = Duration::from_secs(30);

/// Position of the export.
#[derive(Debug)]
struct Progress {
    /// The last event that is acknowledged or given up.
    acknowledged: u64,
    /// How many rejected events in a row are skipped in search of an accepted one.
    max_suspects: usize,
}

/// Exports events until the stop request, and once more then.
pub async fn run(context: &OtlpContext, mut exporter: RetryingExporter, event_reader: &EventReader) {
    let mut progress =
        Progress { acknowledged: context.acknowledged.load(Ordering::Relaxed), max_suspects: MAX_SUSPECTS };
    let mut exported = None;
    let mut is_unreadable = false;
    loop {
        let is_stopping = exporter.is_stopping();
        let written = context.shared_state.written();
        let stored = context.shared_state.cursor(&context.cursor_name); // none while the ledger is not open
        progress.acknowledged = progress.acknowledged.max(stored.unwrap_or(0));
        let mut delay = POLL_INTERVAL;
        if stored.is_some()
            && !exporter.is_disabled()
            && exported != Some(written)
            && (exporter.remaining_backoff().is_zero() || is_stopping)
        {
            match export_pending(context, &mut exporter, event_reader, &mut progress).await {
                Ok(is_complete) => {
                    if is_complete {
                        exported = Some(written);
                    }
                    if std::mem::take(&mut is_unreadable) && is_complete {
                        exporter.mark_healthy(); // with nothing to export, no request would report it
                    }
                }
                Err(error) => {
                    (delay, is_unreadable) = (UNREADABLE_RETRY_INTERVAL, true);
                    exporter.report_unreadable_ledger(&error);
                }
            }
            exporter.close();
        }
        if is_stopping {
            return;
        }
        exporter.sleep(delay).await;
    }
}

/// The search for the next events that the endpoint accepts.
#[derive(Debug)]
struct PoisonBisect {
    /// Events per request.
    max_events: usize,
    /// Events that were rejected since the last accepted one.
    suspects: usize,
    /// Number of the last suspect. Not an index: the oldest events may be removed meanwhile.
    last_suspect: u64,
}

/// Consecutive events of the ledger, in one request.
#[derive(Debug)]
struct Batch {
    events: usize,
    /// How many of them are in the request; the others are too large for any.
    records: u64,
    /// Number of the last event.
    last: u64,
}

/// What to do after a request.
#[derive(Debug, PartialEq)]
enum NextStep {
    /// Acknowledge the batch.
    Acknowledge,
    /// Send other events.
    SendOthers,
    /// Back off.
    BackOff,
}

/// Exports all events that are not acknowledged yet. Returns whether none is left.
///
/// An event whose content is rejected counts as lost only after a later one was accepted: until then the endpoint may be at
/// fault and reject everything.
async fn export_pending(
    context: &OtlpContext,
    exporter: &mut RetryingExporter,
    event_reader: &EventReader,
    progress: &mut Progress,
) -> Result<bool, StoreError> {
    let mut search = PoisonBisect { max_events: MAX_BATCH_EVENTS, suspects: 0, last_suspect: 0 };
    loop {
        let (reader, last) = (event_reader.clone(), progress.acknowledged);
        let settled = run_blocking(&LEDGER_PERMIT, move || {
            reader.read(|store| store.settled_after(last, MAX_BATCH_EVENTS))
        })
        .await?;
        let events =
            &settled.events[settled.events.partition_point(|event| event.id() <= search.last_suspect)..];
        if events.is_empty() {
            if search.suspects > 0 {
                exporter.back_off(REJECTED_BACKOFF);
                return Ok(false);
            }
            let Some(last) = settled.unreadable.last() else { return Ok(true) };
            acknowledge(context, exporter, progress, *last, &settled.unreadable);
            continue;
        }
        let now = Timestamp::now();
        let records = EventRecords::new(events, search.max_events, &context.resource, now);
        let last =
            events.get(records.events.saturating_sub(1)).map_or(progress.acknowledged, LedgerEvent::id);
        let batch = Batch { events: records.events, records: records.records as u64, last };
        let outcome = match batch.records {
            0 if search.suspects > 0 => DeliveryOutcome::Rejected(RejectKind::Size), // nothing that could be accepted
            0 => DeliveryOutcome::Accepted(0),
            _ => exporter.deliver(&Bytes::from(records.body), now.plus(POLL_INTERVAL * 60)).await,
        };
        match search.apply(&batch, outcome, exporter, progress) {
            NextStep::Acknowledge => {
                exporter.count(0, batch.events as u64 - batch.records, LossReason::TooLarge);
                acknowledge(context, exporter, progress, batch.last, &settled.unreadable);
            }
            NextStep::SendOthers => {}
            NextStep::BackOff => return Ok(false),
        }
    }
}

impl PoisonBisect {
    fn apply(
        &mut self,
        batch: &Batch,
        outcome: DeliveryOutcome,
        exporter: &mut RetryingExporter,
        progress: &mut Progress,
    ) -> NextStep {
        match outcome {
            DeliveryOutcome::Accepted(rejected) => {
                let rejected = rejected.min(batch.records);
                exporter.count(
                    batch.records - rejected,
                    rejected + self.suspects as u64,
                    LossReason::Refused,
                );
                if rejected == 0 && batch.records > 0 {
                    exporter.mark_healthy();
                }
                progress.max_suspects = MAX_SUSPECTS;
                (self.max_events, self.suspects) = (MAX_BATCH_EVENTS, 0);
                NextStep::Acknowledge
            }
            // one of them may be the rejected one
            DeliveryOutcome::Rejected(RejectKind::Content | RejectKind::Size) if batch.events > 1 => {
                self.max_events = batch.events.div_ceil(2);
                NextStep::SendOthers
            }
            DeliveryOutcome::Rejected(RejectKind::Content | RejectKind::Size)
                if self.suspects + 1 < progress.max_suspects =>
            {
                *self = Self { max_events: 1, suspects: self.suspects + 1, last_suspect: batch.last };
                NextStep::SendOthers
            }
            DeliveryOutcome::Rejected(RejectKind::Unsupported) => {
                exporter.back_off_unsupported();
                NextStep::BackOff
            }
            DeliveryOutcome::Rejected(kind) => {
                if kind != RejectKind::Other {
                    // there may be more such events in a row
                    progress.max_suspects = (progress.max_suspects * 2).min(MAX_BATCH_EVENTS);
                }
                exporter.back_off(REJECTED_BACKOFF);
                NextStep::BackOff
            }
            DeliveryOutcome::TimedOut => {
                exporter.report_failure();
                NextStep::BackOff
            }
        }
    }
}

/// Acknowledges all events up to `last`. Unreadable ones among them are lost.
fn acknowledge(
    context: &OtlpContext,
    exporter: &RetryingExporter,
    progress: &mut Progress,
    last: u64,
    unreadable: &[u64],
) {
    let damaged = unreadable.iter().filter(|id| **id <= last);
    let lost = damaged
        .inspect(|id| tracing::error!(event = id, "event is damaged in the ledger; skipped in OTLP export"));
    exporter.count(0, lost.count() as u64, LossReason::Unreadable);
    progress.acknowledged = last;
    context.acknowledged.store(last, Ordering::Relaxed);
    context.shared_state.acknowledge(&context.cursor_name, last);
}
