//! Pushes the newest snapshot once per interval, in as many requests as it takes.
//!
//! What is not taken until the next push is due gives way to newer values and is counted: a dead endpoint costs one
//! request of memory, however long it is dead. Counters lose nothing by that, cumulative or as deltas.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;

use super::Shared;
use super::delivery::{Delivery, Outcome};
use crate::clock::Moment;
use crate::collect::pushed::Lost;
use crate::export::otlp::{Counters, Points};
use crate::serve::Newest;

/// The first snapshot is looked for so often.
const LOOK: Duration = Duration::from_millis(200);

/// Pushes until the end is asked for, and once more then.
pub async fn run(shared: &Shared, mut delivery: Delivery, interval: Duration, mut counters: Counters) {
    let mut last = None;
    loop {
        let began = Moment::now();
        let due = began.plus(interval);
        let stopping = delivery.is_stopping();
        let newest = shared.published.newest(began, shared.stale_after).ok();
        // sampling slower than pushing, or hanging: the same points again would say nothing
        let newer = newest.filter(|newest| last != Some(newest.snapshot().finished));
        if let Some(newest) = &newer {
            last = Some(newest.snapshot().finished);
            push(shared, &mut delivery, newest, due, &mut counters).await;
        }
        if stopping {
            return;
        }
        let rest = if last.is_none() { LOOK } else { due.since(Moment::now()) };
        drop(newer); // the snapshot is not kept while there is nothing to do
        delivery.rest(rest).await;
    }
}

/// Pushes one snapshot.
async fn push(
    shared: &Shared,
    delivery: &mut Delivery,
    newest: &Arc<Newest>,
    due: Moment,
    counters: &mut Counters,
) {
    let snapshot = newest.snapshot();
    let mut points = Points::new(snapshot, &shared.resource, shared.origins);
    let (mut all, mut is_whole) = (true, true);
    while let Some(request) = points.next(counters) {
        delivery.count(0, request.too_large as u64, Lost::TooLarge);
        let count = request.points as u64;
        if count == 0 {
            counters.taken(&request.counters);
            continue;
        }
        match delivery.deliver(&Bytes::from(request.body), due).await {
            Outcome::Taken(rejected) => {
                let rejected = rejected.min(count);
                delivery.count(count - rejected, rejected, Lost::Refused);
                counters.taken(&request.counters);
                all &= rejected == 0;
            }
            Outcome::Refused(of) => {
                delivery.count(0, count, Lost::Refused);
                counters.refused(&request.counters);
                all = false;
                if of == super::answer::Refusal::Other {
                    delivery.count(0, points.rest() as u64, Lost::Refused);
                    is_whole = points.rest() == 0;
                    break;
                }
            }
            Outcome::GaveUp => {
                delivery.gave_up();
                delivery.count(0, count + points.rest() as u64, Lost::Unreachable);
                (all, is_whole) = (false, false);
                break;
            }
        }
    }
    delivery.close();
    counters.pushed(snapshot.finished.unix_nanos(), is_whole);
    if all {
        delivery.works();
    }
}
