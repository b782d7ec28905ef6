//! Start time of each counter, and its value at the last export. Sums are cumulative.
//!
//! An OTLP sum has a start time. It is known for nearly every counter here: the ledger's first start or the first event of that container's
//! name in it, the machine's boot, the container's start or memledger's. Counters over the life of a device have no known start. A counter
//! that decreases all the same (a driver was reloaded) was reset after the last export.
//!
//! Deltas are not offered: for a counter that outlives a restart of memledger, and for a container that is seen late, the right
//! first delta is unknown here. The OpenTelemetry Collector converts sums (`cumulative_to_delta`).
//!
//! Points become part of the state only after the endpoint has accepted them.

use std::collections::HashMap;

/// Most counters that are remembered; the ones that were absent longest are removed first.
const MAX_COUNTERS: usize = 100_000;

/// Start times, in Unix nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Origins {
    /// memledger's start.
    pub memledger: u64,
    /// The machine's boot.
    pub boot: u64,
    /// The ledger's first start; 0 if it is not known yet.
    pub ledger: u64,
}

/// The last accepted point of a counter.
#[derive(Clone, Copy, Debug)]
struct LastPoint {
    origin: u64,
    start: u64,
    at: u64,
    value: f64,
}

/// A point of an export. To be passed to [`CounterStates::commit`] once the endpoint has accepted it.
#[derive(Clone, Copy, Debug)]
pub struct PendingPoint {
    key: u64,
    point: LastPoint,
}

/// The last accepted point of each counter.
#[derive(Debug, Default)]
pub struct CounterStates(HashMap<u64, LastPoint>);

impl CounterStates {
    /// Returns the start of a point, and its pending state. `origin` is the start time of the counter, 0 if unknown; it is in the future
    /// after the clock was set back.
    pub fn start(&self, key: u64, value: f64, at: u64, origin: u64) -> (u64, PendingPoint) {
        let start = match self.0.get(&key) {
            // the counter of a restarted container may be as high as the one before
            Some(last) if origin != last.origin && origin > last.at && origin <= at => origin,
            Some(last) if value >= last.value => last.start.min(at),
            Some(last) => last.at,
            None => origin.min(at),
        };
        (start, PendingPoint { key, point: LastPoint { origin, start, at, value } })
    }

    /// Records points that the endpoint accepted.
    pub fn commit(&mut self, pending: &[PendingPoint]) {
        self.0.extend(pending.iter().map(|pending| (pending.key, pending.point)));
    }

    /// Removes the counters that were absent longest, if there are too many; of those of one export any.
    pub fn trim(&mut self) {
        if self.0.len() > MAX_COUNTERS {
            let mut ages: Vec<_> = self.0.iter().map(|(key, point)| (point.at, *key)).collect();
            let surplus = ages.len() - MAX_COUNTERS;
            let (_, oldest, _) = ages.select_nth_unstable(surplus);
            let oldest = *oldest;
            self.0.retain(|key, point| (point.at, *key) >= oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::{CounterOrigin, FamilyId};

    #[test]
    fn sum_keeps_its_start_until_it_decreases() {
        let mut counters = CounterStates::default();
        for (value, at, start) in [(5.0, 100, 10), (7.0, 200, 10), (2.0, 300, 200)] {
            let (found, pending) = counters.start(1, value, at, 10);
            assert_eq!(found, start, "reset after the last export");
            counters.commit(&[pending]);
        }
    }

    #[test]
    fn restart_is_detected_without_a_decrease() {
        let mut counters = CounterStates::default();
        counters.commit(&[counters.start(1, 5.0, 100, 10).1]);
        let (start, pending) = counters.start(1, 7.0, 200, 150);
        assert_eq!(start, 150, "restarted, with a higher value");
        counters.commit(&[pending]);
        assert_eq!(counters.start(1, 8.0, 300, 150).0, 150);
    }

    #[test]
    fn counter_that_began_in_the_future_is_no_reset_in_each_export() {
        let mut counters = CounterStates::default();
        for (value, at) in [(5.0, 100), (5.0, 200), (7.0, 300), (7.0, 2_000)] {
            let (start, pending) = counters.start(1, value, at, 1_000);
            assert_eq!(start, 100, "at {at}");
            counters.commit(&[pending]);
        }
    }

    #[test]
    fn device_counters_have_no_start() {
        assert_eq!(FamilyId::GPU_ECC_ERRORS.desc().origin, CounterOrigin::Device);
        assert_eq!(CounterStates::default().start(1, 5.0, 100, 0).0, 0, "0 means unknown");
    }

    #[test]
    fn number_is_limited_within_one_export_too() {
        let mut counters = CounterStates::default();
        let keys = 0..MAX_COUNTERS as u64 + 10;
        let pending: Vec<_> = keys.map(|key| counters.start(key, 1.0, 100, 10).1).collect();
        counters.commit(&pending);
        counters.trim();
        assert_eq!(counters.0.len(), MAX_COUNTERS);
    }

    #[test]
    fn absent_counters_are_removed() {
        let mut counters = CounterStates::default();
        for export in 0..4 {
            let keys = export * MAX_COUNTERS as u64 / 2..(export + 1) * MAX_COUNTERS as u64 / 2;
            let pending: Vec<_> = keys.map(|key| counters.start(key, 1.0, 100 + export, 10).1).collect();
            counters.commit(&pending);
            counters.trim();
            assert!(counters.0.len() <= MAX_COUNTERS, "{}", counters.0.len());
        }
        assert!(counters.0.values().all(|point| point.at >= 102), "the ones that were absent longest");
    }
}
