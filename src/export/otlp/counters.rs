//! When each counter began, and how far it was at the last push.
//!
//! A sum in OTLP says since when it counts. That is known for every counter here: since the ledger's first start, since
//! the machine's boot, since the container's start or since memledger's. Where a counter falls all the same (a driver that
//! was loaded anew), it began after the last push.
//!
//! What was pushed counts only once it was taken: a delta that nobody took is a part of the next one.

use std::collections::HashMap;

use crate::catalog::Id;

/// Counters that are remembered; the ones that were away longest are forgotten first.
const MOST: usize = 100_000;

/// Since when something counts, in Unix nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Origins {
    /// memledger's start.
    pub memledger: u64,
    /// The machine's boot.
    pub boot: u64,
    /// The ledger's first start.
    pub ledger: u64,
}

/// What a counter counts since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Since {
    /// memledger's start.
    Memledger,
    /// The machine's boot; what a driver counts has begun after it.
    Boot,
    /// The start of its container.
    Container,
    /// The ledger's first start: it goes on over restarts.
    Ledger,
}

/// What the counters of a family count since.
pub fn since(family: Id) -> Since {
    match family {
        Id::HOST_OOM_KILLS
        | Id::HOST_PROCESS_OOM_KILLS
        | Id::OOM_UNATTRIBUTED
        | Id::OOM_GAPS
        | Id::OOM_DUPLICATE_LINES
        | Id::CONTAINER_OOM_KILLS
        | Id::CONTAINER_EXITS
        | Id::CONTAINER_RESTARTS => Since::Ledger,
        Id::HOST_PRESSURE
        | Id::GPU_ENERGY
        | Id::GPU_ECC_ERRORS
        | Id::GPU_PCIE_REPLAYS
        | Id::GPU_NVLINK_ERRORS => Since::Boot,
        Id::CONTAINER_PRESSURE => Since::Container,
        _ => Since::Memledger,
    }
}

/// A counter as it was taken last.
#[derive(Clone, Copy, Debug)]
struct Taken {
    start: u64,
    at: u64,
    value: f64,
}

/// What a counter becomes in a push. To be handed back once it was taken.
#[derive(Clone, Copy, Debug)]
pub struct Pending {
    key: u64,
    taken: Taken,
}

/// All counters as they were taken last.
#[derive(Debug, Default)]
pub struct Counters {
    delta: bool,
    last: HashMap<u64, Taken>,
    /// When the newest push that was taken was made.
    newest: Option<u64>,
}

impl Counters {
    /// Cumulative, or the growth since the last push.
    pub fn new(delta: bool) -> Self {
        Self { delta, ..Self::default() }
    }

    /// True for the growth since the last push.
    pub fn is_delta(&self) -> bool {
        self.delta
    }

    /// Start and value of a point, and what to hand back. `origin` is when the counter began; `is_new`, whether it counts
    /// since memledger's start, so that all of it is ours to tell.
    ///
    /// No start: a delta that says nothing yet, because nobody knows how much of it an earlier memledger has told.
    pub fn point(
        &self,
        key: u64,
        value: f64,
        at: u64,
        origin: u64,
        is_new: bool,
    ) -> (Option<(u64, f64)>, Pending) {
        let last = self.last.get(&key);
        let start = match last {
            Some(last) if value >= last.value => last.start,
            Some(last) => last.at,
            None => origin,
        };
        let pending = Pending { key, taken: Taken { start, at, value } };
        if !self.delta {
            return (Some((start, value)), pending);
        }
        let point = match (last, self.newest) {
            (Some(last), _) if value >= last.value => Some((last.at, value - last.value)),
            (Some(last), _) => Some((last.at, value)),
            (None, _) if is_new => Some((origin, value)),
            (None, Some(newest)) => Some((newest, value)),
            (None, None) => None,
        };
        (point, pending)
    }

    /// These were taken by the endpoint.
    pub fn taken(&mut self, pending: &[Pending]) {
        for pending in pending {
            self.last.insert(pending.key, pending.taken);
        }
    }

    /// A push of this time was taken as a whole.
    pub fn pushed(&mut self, at: u64) {
        self.newest = Some(at);
        if self.last.len() > MOST {
            let mut times: Vec<_> = self.last.values().map(|taken| taken.at).collect();
            let (_, median, _) = times.select_nth_unstable(MOST / 2);
            let median = *median;
            self.last.retain(|_, taken| taken.at >= median);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_keeps_its_start_until_it_falls() {
        let mut counters = Counters::new(false);
        let (point, pending) = counters.point(1, 5.0, 100, 10, false);
        assert_eq!(point, Some((10, 5.0)));
        counters.taken(&[pending]);
        let (point, pending) = counters.point(1, 7.0, 200, 10, false);
        assert_eq!(point, Some((10, 7.0)));
        counters.taken(&[pending]);
        assert_eq!(
            counters.point(1, 2.0, 300, 10, false).0,
            Some((200, 2.0)),
            "it began anew after the last push"
        );
    }

    #[test]
    fn a_delta_that_nobody_took_is_a_part_of_the_next_one() {
        let mut counters = Counters::new(true);
        let (point, pending) = counters.point(1, 5.0, 100, 10, false);
        assert_eq!(point, None, "an earlier memledger may have told of these five");
        counters.taken(&[pending]);
        counters.pushed(100);
        assert_eq!(counters.point(1, 7.0, 200, 10, false).0, Some((100, 2.0)));
        let (point, pending) = counters.point(1, 8.0, 300, 10, false);
        assert_eq!(point, Some((100, 3.0)));
        counters.taken(&[pending]);
        assert_eq!(counters.point(1, 8.0, 400, 10, false).0, Some((300, 0.0)));
        assert_eq!(counters.point(1, 1.0, 400, 10, false).0, Some((300, 1.0)), "it began anew");
    }

    #[test]
    fn a_counter_that_is_born_later_is_told_whole() {
        let mut counters = Counters::new(true);
        counters.pushed(100);
        assert_eq!(counters.point(2, 1.0, 200, 10, false).0, Some((100, 1.0)));
        let first = Counters::new(true);
        assert_eq!(
            first.point(2, 4.0, 200, 10, true).0,
            Some((10, 4.0)),
            "it counts since memledger's start"
        );
    }
}
