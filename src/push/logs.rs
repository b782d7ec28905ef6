//! Pushes the ledger's events as log records, each at least once.
//!
//! The ledger remembers the number of the last event that each endpoint has taken, so that neither a restart of memledger
//! nor one of the endpoint loses any. A new endpoint begins with the oldest event that the ledger still has. While nobody
//! takes them, events wait in the ledger and not in memory; `--state.retention` and `--state.max-size` bound how long.

use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::body::Bytes;

use super::Shared;
use super::answer::Refusal;
use super::delivery::{Delivery, Outcome};
use crate::clock::Moment;
use crate::collect::pushed::Lost;
use crate::export::otlp::Logs;
use crate::ledger::entries::Event;
use crate::ledger::store::{Archive, StoreError};

/// Whether there are new events is looked for so often; that is a look at a number.
const LOOK: Duration = Duration::from_secs(1);
/// Events read from the ledger at once.
const BATCH: usize = 200;
/// So many events that are refused one by one, with none taken between, say more about the endpoint than about the events.
const SUSPECTS: usize = 3;
/// An endpoint that refuses whatever it is sent is asked again after this.
const REFUSED: Duration = Duration::from_secs(300);
/// A ledger that cannot be read is looked at again after this.
const UNREADABLE: Duration = Duration::from_secs(30);

/// Where a push has come to.
#[derive(Debug)]
struct Progress {
    /// The last event that the endpoint is done with.
    done: u64,
    /// How many refused events in a row are looked past for one that is taken.
    reach: usize,
}

/// Pushes until the end is asked for, and once more then.
pub async fn run(shared: &Shared, mut delivery: Delivery, archive: &Archive) {
    let mut progress = Progress { done: shared.acknowledged.load(Ordering::Relaxed), reach: SUSPECTS };
    let mut seen = None;
    let mut unreadable = false;
    loop {
        let stopping = delivery.is_stopping();
        let written = shared.desk.written();
        let mut rest = LOOK;
        if seen != Some(written) && (delivery.must_rest().is_zero() || stopping) {
            match flush(shared, &mut delivery, archive, &mut progress).await {
                Ok(all) => {
                    if all {
                        seen = Some(written);
                    }
                    if std::mem::take(&mut unreadable) && all {
                        delivery.works(); // nobody else would say so, as there is nothing to push
                    }
                }
                Err(error) => {
                    (rest, unreadable) = (UNREADABLE, true);
                    delivery.unreadable(&error);
                }
            }
            delivery.close();
        }
        if stopping {
            return;
        }
        delivery.rest(rest).await;
    }
}

/// The search for the next events that the endpoint takes.
#[derive(Debug)]
struct Search {
    /// Events that are sent at once.
    most: usize,
    /// Events that were refused since the last one that was taken.
    suspects: usize,
    /// Number of the last suspect: the oldest events may be removed meanwhile, so places say nothing.
    past: u64,
}

/// A number of events of the ledger, in one request.
#[derive(Debug)]
struct Batch {
    events: usize,
    /// How many of them are in the request; the others are too large for any.
    records: u64,
    /// Number of the last one.
    last: u64,
}

/// What comes after a request.
#[derive(Debug, PartialEq)]
enum Next {
    /// The endpoint is done with the batch.
    Done,
    /// Others are sent.
    Others,
    /// Not now.
    Rest,
}

/// Pushes what the endpoint has not taken yet. True if nothing is left.
///
/// An event that is refused for what is in it is lost only once another one was taken after it: until then the endpoint may
/// be at fault, and refuse whatever it is sent.
async fn flush(
    shared: &Shared,
    delivery: &mut Delivery,
    archive: &Archive,
    progress: &mut Progress,
) -> Result<bool, StoreError> {
    let mut search = Search { most: BATCH, suspects: 0, past: 0 };
    loop {
        let settled = archive.settled_after(progress.done, BATCH)?;
        let events = &settled.events[settled.events.partition_point(|event| event.id() <= search.past)..];
        if events.is_empty() {
            if search.suspects > 0 {
                delivery.keep_away(REFUSED);
                return Ok(false);
            }
            let Some(last) = settled.unreadable.last() else { return Ok(true) };
            acknowledge(shared, delivery, progress, *last, &settled.unreadable);
            continue;
        }
        let now = Moment::now();
        let made = Logs::new(events, search.most, &shared.resource, now);
        let last = events.get(made.events.saturating_sub(1)).map_or(progress.done, Event::id);
        let batch = Batch { events: made.events, records: made.records as u64, last };
        let outcome = match batch.records {
            0 if search.suspects > 0 => Outcome::Refused(Refusal::Size), // nothing that the endpoint could take is in it
            0 => Outcome::Taken(0),
            _ => delivery.deliver(&Bytes::from(made.body), now.plus(LOOK * 60)).await,
        };
        match search.judge(&batch, outcome, delivery, progress) {
            Next::Done => {
                delivery.count(0, batch.events as u64 - batch.records, Lost::TooLarge);
                acknowledge(shared, delivery, progress, batch.last, &settled.unreadable);
            }
            Next::Others => {}
            Next::Rest => return Ok(false),
        }
    }
}

impl Search {
    fn judge(
        &mut self,
        batch: &Batch,
        outcome: Outcome,
        delivery: &mut Delivery,
        progress: &mut Progress,
    ) -> Next {
        match outcome {
            Outcome::Taken(rejected) => {
                let rejected = rejected.min(batch.records);
                delivery.count(batch.records - rejected, rejected + self.suspects as u64, Lost::Refused);
                if rejected == 0 && batch.records > 0 {
                    delivery.works();
                }
                progress.reach = SUSPECTS;
                (self.most, self.suspects) = (BATCH, 0);
                Next::Done
            }
            // one of them may be what it does not take
            Outcome::Refused(Refusal::Content | Refusal::Size) if batch.events > 1 => {
                self.most = batch.events.div_ceil(2);
                Next::Others
            }
            Outcome::Refused(Refusal::Content | Refusal::Size) if self.suspects + 1 < progress.reach => {
                *self = Self { most: 1, suspects: self.suspects + 1, past: batch.last };
                Next::Others
            }
            Outcome::Refused(of) => {
                if of != Refusal::Other {
                    progress.reach = (progress.reach * 2).min(BATCH); // there may be many such events in a row
                }
                delivery.keep_away(REFUSED);
                Next::Rest
            }
            Outcome::GaveUp => {
                delivery.gave_up();
                Next::Rest
            }
        }
    }
}

/// The endpoint is done with all events up to this one. Those among them that cannot be read are lost.
fn acknowledge(shared: &Shared, delivery: &Delivery, progress: &mut Progress, last: u64, unreadable: &[u64]) {
    let passed = unreadable.iter().filter(|id| **id <= last);
    let lost =
        passed.inspect(|id| tracing::error!(event = id, "an event in the ledger is damaged and not pushed"));
    delivery.count(0, lost.count() as u64, Lost::Unreadable);
    progress.done = last;
    shared.acknowledged.store(last, Ordering::Relaxed);
    shared.desk.acknowledge(&shared.follower, last);
}
