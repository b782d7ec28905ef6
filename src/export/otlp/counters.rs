//! When each counter began, and how far it was at the last push.
//!
//! A sum in OTLP says since when it counts. That is known for nearly every counter here: since the ledger's first start,
//! since the machine's boot, since the container's start or since memledger's. What a device counts over its life has no
//! start that anybody knows. Where a counter falls all the same (a driver that was loaded anew), it began after the last
//! push.
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
    /// The device was made: it goes on over boots, and nobody knows since when.
    Device,
}

impl Since {
    /// Whether a counter that is born after the first push is to be told whole, as the growth since the push before. What
    /// boots and devices count is only seen late then, such as when a GPU answers again.
    fn is_told_whole(self) -> bool {
        !matches!(self, Since::Boot | Since::Device)
    }
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
        Id::GPU_ECC_ERRORS => Since::Device,
        Id::HOST_PRESSURE | Id::GPU_ENERGY | Id::GPU_PCIE_REPLAYS | Id::GPU_NVLINK_ERRORS => Since::Boot,
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
    /// It stands in a request; else it is only remembered, to tell the growth from there on.
    is_told: bool,
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

    /// Start and value of a point, and what to hand back. `origin` is when the counter began, 0 if nobody knows. What counts
    /// since memledger's start is all ours to tell.
    ///
    /// No start: a delta that says nothing yet, because nobody knows how much of it an earlier memledger has told.
    pub fn point(
        &self,
        key: u64,
        value: f64,
        at: u64,
        origin: u64,
        since: Since,
    ) -> (Option<(u64, f64)>, Pending) {
        let last = self.last.get(&key);
        let start = match last {
            // a container that was started again may hold as much already as the one before
            Some(last) if origin > last.at => origin,
            Some(last) if value >= last.value => last.start,
            Some(last) => last.at,
            None => origin,
        };
        let taken = Taken { start, at, value };
        let point = match (last, self.newest) {
            _ if !self.delta => Some((start, value)),
            (Some(last), _) if origin > last.at => Some((origin, value)),
            (Some(last), _) if value >= last.value => Some((last.at, value - last.value)),
            (Some(last), _) => Some((last.at, value)),
            (None, _) if since == Since::Memledger => Some((origin, value)),
            (None, Some(newest)) if since.is_told_whole() => Some((newest, value)),
            (None, _) => None,
        };
        (point, Pending { key, taken, is_told: point.is_some() })
    }

    /// These were taken by the endpoint.
    pub fn taken(&mut self, pending: &[Pending]) {
        for pending in pending {
            self.last.insert(pending.key, pending.taken);
        }
    }

    /// These were refused. Those of them that had nothing to tell yet begin all the same: else the next push would take
    /// all that they ever counted for growth.
    pub fn refused(&mut self, pending: &[Pending]) {
        for pending in pending.iter().filter(|pending| !pending.is_told) {
            self.last.insert(pending.key, pending.taken);
        }
    }

    /// A push of this time is over. `is_whole`: all of the snapshot was gone through, taken or refused.
    pub fn pushed(&mut self, at: u64, is_whole: bool) {
        if is_whole {
            self.newest = Some(at);
        }
        if self.last.len() > MOST {
            let mut times: Vec<_> = self.last.values().map(|taken| taken.at).collect();
            let surplus = times.len() - MOST;
            let (_, oldest, _) = times.select_nth_unstable(surplus);
            let oldest = *oldest;
            self.last.retain(|_, taken| taken.at >= oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_keeps_its_start_until_it_falls() {
        let mut counters = Counters::new(false);
        let (point, pending) = counters.point(1, 5.0, 100, 10, Since::Ledger);
        assert_eq!(point, Some((10, 5.0)));
        counters.taken(&[pending]);
        let (point, pending) = counters.point(1, 7.0, 200, 10, Since::Ledger);
        assert_eq!(point, Some((10, 7.0)));
        counters.taken(&[pending]);
        assert_eq!(
            counters.point(1, 2.0, 300, 10, Since::Ledger).0,
            Some((200, 2.0)),
            "it began anew after the last push"
        );
    }

    #[test]
    fn a_delta_that_nobody_took_is_a_part_of_the_next_one() {
        let mut counters = Counters::new(true);
        let (point, pending) = counters.point(1, 5.0, 100, 10, Since::Ledger);
        assert_eq!(point, None, "an earlier memledger may have told of these five");
        counters.taken(&[pending]);
        counters.pushed(100, true);
        assert_eq!(counters.point(1, 7.0, 200, 10, Since::Ledger).0, Some((100, 2.0)));
        let (point, pending) = counters.point(1, 8.0, 300, 10, Since::Ledger);
        assert_eq!(point, Some((100, 3.0)));
        counters.taken(&[pending]);
        assert_eq!(counters.point(1, 8.0, 400, 10, Since::Ledger).0, Some((300, 0.0)));
        assert_eq!(counters.point(1, 1.0, 400, 10, Since::Ledger).0, Some((300, 1.0)), "it began anew");
    }

    #[test]
    fn a_counter_that_is_born_later_is_told_whole() {
        let mut counters = Counters::new(true);
        counters.pushed(100, true);
        assert_eq!(counters.point(2, 1.0, 200, 10, Since::Ledger).0, Some((100, 1.0)));
        let first = Counters::new(true);
        assert_eq!(
            first.point(2, 4.0, 200, 10, Since::Memledger).0,
            Some((10, 4.0)),
            "it counts since memledger's start"
        );
    }

    #[test]
    fn what_began_after_the_last_push_is_new_though_it_has_not_fallen() {
        for delta in [false, true] {
            let mut counters = Counters::new(delta);
            let (_, pending) = counters.point(1, 5.0, 100, 10, Since::Container);
            counters.taken(&[pending]);
            let (point, pending) = counters.point(1, 7.0, 200, 150, Since::Container);
            assert_eq!(point, Some((150, 7.0)), "started again, and busier than before");
            counters.taken(&[pending]);
            let point = counters.point(1, 8.0, 300, 150, Since::Container).0;
            assert_eq!(point, Some(if delta { (200, 1.0) } else { (150, 8.0) }));
        }
    }

    #[test]
    fn what_a_device_counts_over_its_life_has_no_start_and_is_never_growth_as_a_whole() {
        assert_eq!(since(Id::GPU_ECC_ERRORS), Since::Device);
        let counters = Counters::new(false);
        assert_eq!(counters.point(1, 5.0, 100, 0, Since::Device).0, Some((0, 5.0)), "0 is: not known");
        let mut counters = Counters::new(true);
        counters.pushed(50, true);
        let (point, pending) = counters.point(1, 5.0, 100, 0, Since::Device);
        assert_eq!(point, None);
        counters.taken(&[pending]);
        assert_eq!(counters.point(1, 6.0, 200, 0, Since::Device).0, Some((100, 1.0)));
    }

    #[test]
    fn an_endpoint_that_always_refuses_a_part_swallows_no_birth_and_no_counter_is_told_from_before_our_time()
    {
        let mut counters = Counters::new(true);
        let (point, old) = counters.point(1, 500.0, 100, 10, Since::Ledger);
        assert_eq!(point, None);
        counters.refused(&[old]);
        counters.pushed(100, true);
        assert_eq!(counters.point(1, 501.0, 200, 10, Since::Ledger).0, Some((100, 1.0)), "not 501");
        let (point, born) = counters.point(2, 1.0, 200, 10, Since::Ledger);
        assert_eq!(point, Some((100, 1.0)));
        counters.refused(&[born]);
        assert_eq!(counters.point(2, 2.0, 300, 10, Since::Ledger).0, Some((100, 2.0)), "still to be told");
    }

    #[test]
    fn counters_that_are_away_are_forgotten_though_no_push_was_ever_taken_as_a_whole() {
        let mut counters = Counters::new(false);
        for push in 0..4 {
            let keys = push * MOST as u64 / 2..(push + 1) * MOST as u64 / 2;
            let pending: Vec<_> =
                keys.map(|key| counters.point(key, 1.0, 100 + push, 10, Since::Ledger).1).collect();
            counters.taken(&pending);
            counters.pushed(100 + push, false);
            assert!(counters.last.len() <= MOST, "{}", counters.last.len());
        }
        assert!(counters.last.values().all(|taken| taken.at >= 102), "the ones that were away longest");
    }
}
