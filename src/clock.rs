//! The only place that asks the time.
//!
//! Everything else takes a [`Moment`] as an argument, so that pure code stays pure and a test can choose the time.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

/// By so many seconds the kernel log's stamps may be off without being put right.
const CLOCKS_PART: f64 = 2.0;

/// One reading of both clocks.
///
/// The monotonic part measures how long something took; the wall part is what people and Prometheus read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment {
    /// Since the boot, without the time that the machine slept (CLOCK_MONOTONIC): the kernel log's clock.
    monotonic: Duration,
    /// Since the Unix epoch. Zero when the machine's clock stands before 1970.
    wall: Duration,
}

impl Moment {
    /// Reads both clocks.
    #[allow(clippy::disallowed_methods)] // this is the place
    pub fn now() -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let monotonic = Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or(Duration::ZERO);
        Self { monotonic, wall }
    }

    /// Monotonic time between `earlier` and this moment; zero if `earlier` is later.
    pub fn since(&self, earlier: Moment) -> Duration {
        self.monotonic.saturating_sub(earlier.monotonic)
    }

    /// This moment moved forward, on both clocks.
    pub fn plus(&self, by: Duration) -> Self {
        Self { monotonic: self.monotonic + by, wall: self.wall + by }
    }

    /// Seconds since the Unix epoch.
    pub fn unix_seconds(&self) -> f64 {
        self.wall.as_secs_f64()
    }

    /// Nanoseconds since the Unix epoch, as OTLP has them.
    pub fn unix_nanos(&self) -> u64 {
        u64::try_from(self.wall.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Unix time of a stamp of the kernel log: microseconds of its clock since the boot. Never later than this moment.
    ///
    /// The two clocks of the kernel part by some milliseconds a day, so the younger the stamp, the better the answer.
    pub fn unix_seconds_of_kernel(&self, usec: u64) -> f64 {
        let age = self.monotonic.saturating_sub(Duration::from_micros(usec));
        self.wall.saturating_sub(age).as_secs_f64()
    }

    /// Unix time of a record of the kernel log. The log's clock is not kept in step with the others and may be a minute off
    /// after a month; but a record that was not there at the read before (Unix time) is younger than that.
    pub fn unix_seconds_of_record(&self, usec: u64, read: Option<f64>) -> f64 {
        let told = self.unix_seconds_of_kernel(usec);
        let read = read.filter(|read| read - told > CLOCKS_PART);
        read.unwrap_or(told).min(self.unix_seconds())
    }

    /// The kernel log's clock at this moment, in microseconds.
    pub fn kernel_usec(&self) -> u64 {
        self.monotonic.as_micros() as u64
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

    #[test]
    fn a_stamp_of_the_kernel_becomes_unix_time_and_is_never_in_the_future() {
        let now = Moment { monotonic: Duration::from_secs(100), wall: Duration::from_secs(1_000_000) };
        assert_eq!(now.unix_seconds_of_kernel(97_500_000), 999_997.5);
        assert_eq!(
            now.unix_seconds_of_kernel(100_000_001),
            1_000_000.0,
            "the clocks of two CPUs differ a little"
        );
        assert_eq!(now.unix_seconds_of_kernel(u64::MAX), 1_000_000.0);
        let before_1970 = Moment { wall: Duration::ZERO, ..now };
        assert_eq!(before_1970.unix_seconds_of_kernel(0), 0.0);
    }

    #[test]
    fn the_monotonic_clock_is_the_uptime() {
        let uptime = std::fs::read_to_string("/proc/uptime").expect("procfs");
        let uptime: f64 = uptime.split(' ').next().expect("a number").parse().expect("seconds");
        assert!((Moment::now().monotonic.as_secs_f64() - uptime).abs() < 5.0, "no sleep, no time namespace");
    }
}
