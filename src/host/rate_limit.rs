//! A token bucket.

use std::time::Duration;

use crate::clock::Timestamp;

/// Allows `burst` events at once and a number per time in the long run.
#[derive(Clone, Copy, Debug)]
pub struct RateLimit {
    /// Time in which one more is allowed.
    each: Duration,
    burst: u32,
    /// Time at which the bucket is full again.
    full_at: Timestamp,
}

impl RateLimit {
    /// Returns a full bucket.
    pub fn new(now: Timestamp, per_second: u32, burst: u32) -> Self {
        Self::every(Duration::from_secs(1), now, per_second, burst)
    }

    /// Returns a full bucket that allows `count` events in each `period`.
    pub fn every(period: Duration, now: Timestamp, count: u32, burst: u32) -> Self {
        Self { each: period / count, burst, full_at: now }
    }

    /// Takes one token; returns false if there is none.
    pub fn take(&mut self, now: Timestamp) -> bool {
        let is_free = self.wait(now).is_zero();
        if is_free {
            self.full_at = self.full_at.max(now).plus(self.each);
        }
        is_free
    }

    /// Returns the time until there is a token.
    pub fn wait(&self, now: Timestamp) -> Duration {
        (self.full_at.since(now) + self.each).saturating_sub(self.each * self.burst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allows_a_burst_and_then_the_rate() {
        let now = Timestamp::now();
        let mut limit = RateLimit::new(now, 20, 100);
        assert_eq!((0..150).filter(|_| limit.take(now)).count(), 100);
        assert_eq!(limit.wait(now), Duration::from_millis(50));
        let later = now.plus(Duration::from_secs(1));
        assert_eq!((0..150).filter(|_| limit.take(later)).count(), 20);
        let much_later = now.plus(Duration::from_secs(60));
        assert_eq!((0..150).filter(|_| limit.take(much_later)).count(), 100);
    }
}
