//! Pushes the ledger's events as log records, each at least once.
//!
//! The ledger remembers the number of the last event that each endpoint has taken, so that neither a restart of memledger
//! nor one of the endpoint loses any. A new endpoint begins with the oldest event that the ledger still has. While nobody
//! takes them, events wait in the ledger and not in memory; `--state.retention` and `--state.max-size` bound how long.

use std::time::Duration;

use axum::body::Bytes;

use super::Shared;
use super::answer::Refusal;
use super::delivery::{Delivery, Outcome};
use crate::clock::Moment;
use crate::collect::pushed::Lost;
use crate::export::otlp::Logs;
use crate::ledger::store::Archive;

/// Whether there are new events is looked for so often; that is a look at a number.
const LOOK: Duration = Duration::from_secs(1);
/// Events read from the ledger at once.
const BATCH: usize = 200;
/// An endpoint that refuses whatever it is sent is asked again after this.
const REFUSED: Duration = Duration::from_secs(300);
/// A ledger that cannot be read is looked at again after this.
const UNREADABLE: Duration = Duration::from_secs(30);

/// Pushes until the end is asked for, and once more then.
pub async fn run(shared: &Shared, mut delivery: Delivery, archive: &Archive, mut done: u64) {
    let mut seen = None;
    let mut unreadable = false;
    loop {
        let stopping = delivery.is_stopping();
        let written = shared.desk.written();
        let mut rest = LOOK;
        if seen != Some(written) && (delivery.must_rest().is_zero() || stopping) {
            match flush(shared, &mut delivery, archive, &mut done).await {
                Ok(true) => seen = Some(written),
                Ok(false) => {}
                Err(error) => {
                    rest = UNREADABLE;
                    if !std::mem::replace(&mut unreadable, true) {
                        let error: &dyn std::error::Error = &error;
                        tracing::warn!(error, "events cannot be read for OTLP; trying again");
                    }
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

/// Pushes what the endpoint has not taken yet. True if nothing is left.
async fn flush(
    shared: &Shared,
    delivery: &mut Delivery,
    archive: &Archive,
    done: &mut u64,
) -> Result<bool, crate::ledger::store::StoreError> {
    let mut most = BATCH;
    loop {
        let events = archive.settled_after(*done, BATCH)?;
        let Some(first) = events.first() else { return Ok(true) };
        let now = Moment::now();
        let made = Logs::new(&events, most, &shared.resource, now);
        let (count, too_large) = (made.records as u64, (made.events - made.records) as u64);
        let last = events.get(made.events.saturating_sub(1)).unwrap_or(first).id();
        let outcome = match count {
            0 => Outcome::Taken(0),
            _ => delivery.deliver(&Bytes::from(made.body), now.plus(LOOK * 60)).await,
        };
        match outcome {
            Outcome::Taken(rejected) => {
                let rejected = rejected.min(count);
                delivery.count(count - rejected, rejected, Lost::Refused);
                if rejected == 0 && count > 0 {
                    delivery.works();
                }
                most = BATCH;
            }
            // one of them may be what it does not take
            Outcome::Refused(Refusal::Content | Refusal::Size) if made.events > 1 => {
                most = made.events.div_ceil(2);
                continue;
            }
            Outcome::Refused(Refusal::Content) => delivery.count(0, count, Lost::Refused),
            Outcome::Refused(_) => {
                delivery.keep_away(REFUSED);
                return Ok(false);
            }
            Outcome::GaveUp => {
                delivery.gave_up();
                return Ok(false);
            }
        }
        delivery.count(0, too_large, Lost::TooLarge);
        *done = last;
        shared.desk.acknowledge(&shared.follower, last);
    }
}
