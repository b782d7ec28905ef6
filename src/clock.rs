//! The only place that asks the time.
//!
//! Everything else takes a [`Moment`] as an argument, so that pure code stays pure and a test can choose the time.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// One reading of both clocks.
///
/// The monotonic part measures how long something took; the wall part is what people and Prometheus read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment {
    monotonic: Instant,
    /// Since the Unix epoch. Zero when the machine's clock stands before 1970.
    wall: Duration,
}

impl Moment {
    /// Reads both clocks.
    #[allow(clippy::disallowed_methods)] // this is the place
    pub fn now() -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        Self { monotonic: Instant::now(), wall }
    }

    /// Monotonic time between `earlier` and this moment; zero if `earlier` is later.
    pub fn since(&self, earlier: Moment) -> Duration {
        self.monotonic.saturating_duration_since(earlier.monotonic)
    }

    /// This moment moved forward, on both clocks.
    pub fn plus(&self, by: Duration) -> Self {
        Self { monotonic: self.monotonic + by, wall: self.wall + by }
    }

    /// Seconds since the Unix epoch.
    pub fn unix_seconds(&self) -> f64 {
        self.wall.as_secs_f64()
    }

    /// Whole seconds since the Unix epoch, as the runtimes' APIs take them.
    pub fn unix_whole_seconds(&self) -> u64 {
        self.wall.as_secs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_between_moments_never_runs_backwards() {
        let now = Moment::now();
        let later = now.plus(Duration::from_secs(3));
        assert_eq!(later.since(now), Duration::from_secs(3));
        assert_eq!(now.since(later), Duration::ZERO);
        assert!((later.unix_seconds() - now.unix_seconds() - 3.0).abs() < 1e-6);
    }
}
