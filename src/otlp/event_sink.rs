//! Exports the ledger's events as log records, each at least once: the sink of a follower of the ledger.
//!
//! A new endpoint starts with the oldest event in the ledger. While an endpoint is down, events wait in the ledger and not in
//! memory, within `--state.retention` and `--state.max-size`.
//!
//! An event whose content is rejected counts as lost only after a later one was accepted: until then the endpoint may be at
//! fault and reject everything. So a rejected batch is halved until the rejected event is alone, which is skipped in search of
//! one that is accepted.

use std::time::Duration;

use axum::body::Bytes;

use super::OtlpContext;
use super::event_records::EventRecords;
use super::response::RejectKind;
use super::retry::{DeliveryOutcome, RetryingExporter};
use crate::clock::Timestamp;
use crate::events::LedgerEvent;
use crate::ledger::follow::{ReadBatch, Sink, WriteOutcome, read_events};
use crate::ledger::store::{SettledEvents, StoreReader};
use crate::stats::otlp_stats::LossReason;

/// How long a request is retried before the events are read again.
const DELIVERY_TIMEOUT: Duration = Duration::from_secs(60);
/// After this many events in a row were rejected one by one, the endpoint is at fault rather than the events.
const MAX_SUSPECTS: usize = 3;
/// It doubles, up to this number, while the endpoint rejects everything: there may be more such events in a row.
const MAX_SUSPECTS_LIMIT: usize = 200;
/// Back-off after an endpoint rejected everything.
const REJECTED_BACKOFF: Duration = Duration::from_secs(300);

/// The endpoint of log records.
#[derive(Debug)]
pub struct EventSink<'a> {
    context: &'a OtlpContext,
    exporter: RetryingExporter,
    /// How many rejected events in a row are skipped in search of an accepted one.
    max_suspects: usize,
    is_ledger_unreadable: bool,
}

/// The search for the next events that the endpoint accepts.
#[derive(Debug)]
struct PoisonBisect {
    /// Events per request.
    max_events: usize,
    /// The first events, which were rejected one by one.
    suspects: usize,
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

impl<'a> EventSink<'a> {
    /// Creates a sink that has rejected nothing.
    pub fn new(context: &'a OtlpContext, exporter: RetryingExporter) -> Self {
        Self { context, exporter, max_suspects: MAX_SUSPECTS, is_ledger_unreadable: false }
    }

    /// Sends the next of these events, at most as many as the search allows.
    async fn send(&mut self, events: &[LedgerEvent], search: &PoisonBisect) -> (Batch, DeliveryOutcome) {
        let now = Timestamp::now();
        let records = EventRecords::new(events, search.max_events, &self.context.resource, now);
        let last = events.get(records.events.saturating_sub(1)).map_or(0, LedgerEvent::id);
        let batch = Batch { events: records.events, records: records.records as u64, last };
        let outcome = match batch.records {
            0 if search.suspects > 0 => DeliveryOutcome::Rejected(RejectKind::Size), // nothing that could be accepted
            0 => DeliveryOutcome::Accepted(0),
            _ => self.exporter.deliver(&Bytes::from(records.body), now.plus(DELIVERY_TIMEOUT)).await,
        };
        (batch, outcome)
    }

    /// Counts the unreadable events up to `last` as lost.
    fn count_unreadable(&self, unreadable: &[u64], last: u64) {
        let lost = unreadable.iter().filter(|id| **id <= last).inspect(|id| {
            tracing::error!(event = id, "event is damaged in the ledger; skipped in OTLP export")
        });
        self.exporter.count(0, lost.count() as u64, LossReason::Unreadable);
    }
}

impl Sink for EventSink<'_> {
    type Batch = SettledEvents;

    fn reader(&self) -> impl FnOnce(&StoreReader, u64) -> ReadBatch<SettledEvents> + Send + 'static {
        read_events
    }

    async fn write(&mut self, settled: SettledEvents) -> WriteOutcome {
        if self.exporter.is_disabled() {
            return WriteOutcome::Retry(Duration::MAX);
        }
        let mut search = PoisonBisect { max_events: usize::MAX, suspects: 0 };
        loop {
            let events = &settled.events[search.suspects..];
            if events.is_empty() && search.suspects == 0 {
                self.count_unreadable(&settled.unreadable, u64::MAX);
                return WriteOutcome::All;
            }
            if events.is_empty() {
                self.exporter.back_off(REJECTED_BACKOFF);
                break;
            }
            let (batch, outcome) = self.send(events, &search).await;
            match search.apply(&batch, outcome, self) {
                NextStep::Acknowledge => {
                    self.exporter.count(0, batch.events as u64 - batch.records, LossReason::TooLarge);
                    self.count_unreadable(&settled.unreadable, batch.last);
                    return WriteOutcome::UpTo(batch.last);
                }
                NextStep::SendOthers => {}
                NextStep::BackOff => break,
            }
        }
        self.exporter.close();
        WriteOutcome::Retry(self.exporter.remaining_backoff())
    }

    fn up_to_date(&mut self) {
        self.exporter.close();
        if std::mem::take(&mut self.is_ledger_unreadable) {
            self.exporter.mark_healthy(); // with nothing to export, no request would report it
        }
    }

    fn ledger_unreadable(&mut self) {
        self.is_ledger_unreadable = true;
        self.exporter.mark_down();
    }
}

impl PoisonBisect {
    fn apply(&mut self, batch: &Batch, outcome: DeliveryOutcome, sink: &mut EventSink<'_>) -> NextStep {
        let exporter = &mut sink.exporter;
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
                sink.max_suspects = MAX_SUSPECTS;
                NextStep::Acknowledge
            }
            // one of them may be the rejected one
            DeliveryOutcome::Rejected(RejectKind::Content | RejectKind::Size) if batch.events > 1 => {
                self.max_events = batch.events.div_ceil(2);
                NextStep::SendOthers
            }
            DeliveryOutcome::Rejected(RejectKind::Content | RejectKind::Size)
                if self.suspects + 1 < sink.max_suspects =>
            {
                *self = Self { max_events: 1, suspects: self.suspects + 1 };
                NextStep::SendOthers
            }
            DeliveryOutcome::Rejected(RejectKind::Unsupported) => {
                exporter.back_off_unsupported();
                NextStep::BackOff
            }
            DeliveryOutcome::Rejected(kind) => {
                if kind != RejectKind::Other {
                    sink.max_suspects = (sink.max_suspects * 2).min(MAX_SUSPECTS_LIMIT);
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
