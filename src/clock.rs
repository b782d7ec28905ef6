//! The only module that reads the clocks.
//!
//! Everything else takes a [`Timestamp`] as an argument, so that pure code stays pure and tests can choose the time.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

/// A shorter suspend is none: the machine was only busy between two readings.
const MIN_SUSPEND: Duration = Duration::from_millis(500);

/// A smaller step of the wall clock moves no times: they are compared with more tolerance.
pub const MIN_CLOCK_STEP: f64 = 60.0;
/// There was no memledger before 2026: an older Unix time is that of a wrong clock, and says nothing of an age.
pub const EARLIEST_TIME: f64 = 1_767_225_600.0;
/// A wall clock that was not set for so long after the boot is taken as right.
const CLOCK_RIGHT_AFTER: Duration = Duration::from_secs(86_400);
/// The time of the boot is known to this many seconds.
const BOOT_TOLERANCE: f64 = 1.0;
/// So long after the boot a host without a clock of its own has set it from the network.
const CLOCK_SET_WITHIN: Duration = Duration::from_secs(600);

/// One reading of the clocks.
///
/// The monotonic part measures durations; the wall clock is for people and Prometheus.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp {
    /// Time since the boot without suspend (CLOCK_MONOTONIC), which is also the kernel log's clock.
    monotonic: Duration,
    /// Time that the machine has been suspended since the boot (CLOCK_BOOTTIME without CLOCK_MONOTONIC).
    suspended: Duration,
    /// Time since the Unix epoch; zero if the host's clock is set before 1970.
    wall: Duration,
}

impl Timestamp {
    /// Reads the clocks.
    #[allow(clippy::disallowed_methods)] // the only place
    pub fn now() -> Self {
        let read = |clock| Duration::try_from(clock_gettime(clock)).unwrap_or(Duration::ZERO);
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let monotonic = read(ClockId::Monotonic);
        let suspended = read(ClockId::Boottime).saturating_sub(monotonic);
        // the clocks are read one after the other
        let suspended = if suspended < MIN_SUSPEND { Duration::ZERO } else { suspended };
        Self { monotonic, suspended, wall }
    }

    /// Returns the monotonic time from `earlier` to `self`; zero if `earlier` is later.
    pub fn since(&self, earlier: Timestamp) -> Duration {
        self.monotonic.saturating_sub(earlier.monotonic)
    }

    /// Returns this timestamp moved forward on both clocks.
    pub fn plus(&self, by: Duration) -> Self {
        Self { monotonic: self.monotonic + by, wall: self.wall + by, ..*self }
    }

    /// Returns this timestamp moved back on both clocks, at most to their begins.
    pub fn minus(&self, by: Duration) -> Self {
        Self { monotonic: self.monotonic.saturating_sub(by), wall: self.wall.saturating_sub(by), ..*self }
    }

    /// Returns this timestamp moved to a Unix time since which the machine was not suspended. The monotonic clock does not go below 0:
    /// times before the boot are all at its begin.
    pub fn moved_to(&self, unix_seconds: f64) -> Self {
        let wall = Duration::try_from_secs_f64(unix_seconds).unwrap_or(Duration::ZERO);
        let monotonic = (self.monotonic + wall).saturating_sub(self.wall);
        Self { monotonic, wall, ..*self }
    }

    /// Returns the seconds by which the wall clock was set since `earlier`.
    pub fn wall_moved_since(&self, earlier: Timestamp) -> f64 {
        let offset = |at: Timestamp| at.wall.as_secs_f64() - (at.monotonic + at.suspended).as_secs_f64();
        offset(*self) - offset(earlier)
    }

    /// Returns true if the wall clock is taken as right: it was not set since `earlier`, and the machine was booted at least a day ago.
    /// Until then a host without a network may have the time of an inaccurate hardware clock.
    pub fn is_likely_right(&self, earlier: Timestamp) -> bool {
        self.unix_seconds() > EARLIEST_TIME
            && self.since_boot() > CLOCK_RIGHT_AFTER
            && self.wall_moved_since(earlier).abs() < MIN_CLOCK_STEP
    }

    /// Returns the Unix time at which the machine was booted.
    pub fn booted_at(&self) -> f64 {
        self.wall.saturating_sub(self.since_boot()).as_secs_f64()
    }

    /// Returns the time since the boot with that of suspends: the clock of the starts of processes.
    pub fn since_boot(&self) -> Duration {
        self.monotonic + self.suspended
    }

    /// Returns how long the machine has been suspended since the boot.
    pub fn suspended(&self) -> Duration {
        self.suspended
    }

    /// Returns this timestamp as it is read after the wall clock was set by so many milliseconds.
    pub fn with_wall_moved(&self, millis: i64) -> Self {
        let by = Duration::from_millis(millis.unsigned_abs());
        Self { wall: if millis < 0 { self.wall - by } else { self.wall + by }, ..*self }
    }

    /// Returns this timestamp as it is read after the machine was suspended for so long, also before.
    #[cfg(test)]
    pub fn with_suspended(&self, suspended: Duration) -> Self {
        Self { wall: self.wall + suspended, suspended: self.suspended + suspended, ..*self }
    }

    /// Returns the present of a host that was booted so many hours ago. What is tolerated of the kernel log's clock grows with that time,
    /// so tests of it would depend on the machine.
    #[cfg(test)]
    pub fn hours_after_boot(hours: u64) -> Self {
        Self { monotonic: Duration::from_secs(hours * 3600), ..Self::now() }
    }

    /// Returns the seconds since the Unix epoch.
    pub fn unix_seconds(&self) -> f64 {
        self.wall.as_secs_f64()
    }

    /// Returns the nanoseconds since the Unix epoch, the unit of OTLP.
    pub fn unix_nanos(&self) -> u64 {
        u64::try_from(self.wall.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Converts a kernel log timestamp, in microseconds since the boot without suspend, to Unix time, at most `self`. It must not be
    /// older than the last suspend: the kernel's clock stops meanwhile.
    ///
    /// The two clocks of the kernel drift apart by some milliseconds a day: the younger the timestamp, the better the result.
    pub fn unix_seconds_of_kernel(&self, usec: u64) -> f64 {
        let age = self.monotonic.saturating_sub(Duration::from_micros(usec));
        self.wall.saturating_sub(age).as_secs_f64()
    }

    /// Returns the kernel log's clock at this time, in microseconds.
    pub fn kernel_usec(&self) -> u64 {
        self.monotonic.as_micros() as u64
    }

    /// Returns the whole seconds since the Unix epoch, the unit of the runtimes' APIs.
    pub fn unix_whole_seconds(&self) -> u64 {
        self.wall.as_secs()
    }
}

/// The wall clock was set, and what it gave before was wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClockStep {
    by: f64,
    /// The first and the last Unix time that were wrong, by the clock as it was.
    wrong: (f64, f64),
}

impl ClockStep {
    /// Returns what a step of the clock between these two readings says of times that this process recorded. Soon after the boot the
    /// clock was wrong since then. Later, a step back only shows that times after it were; a step forward shows nothing: a virtual
    /// machine that was paused had the right time.
    pub fn between(before: Timestamp, now: Timestamp) -> Option<Self> {
        let by = now.wall_moved_since(before);
        if by.abs() < MIN_CLOCK_STEP {
            return None;
        }
        let is_early = now.since_boot() < CLOCK_SET_WITHIN;
        let since = if is_early { before.booted_at() - BOOT_TOLERANCE } else { now.unix_seconds() };
        (is_early || by < 0.0).then_some(Self { by, wrong: (since, now.unix_seconds() - by) })
    }

    /// Returns the seconds by which times were wrong.
    pub fn seconds(&self) -> f64 {
        self.by
    }

    /// Returns the first and the last Unix time that were wrong.
    pub fn wrong(&self) -> (f64, f64) {
        self.wrong
    }

    /// Corrects a Unix time.
    pub fn correct(&self, at: &mut f64) {
        if (self.wrong.0..=self.wrong.1).contains(at) {
            *at += self.by;
        }
    }
}

/// When values that are expensive to read are due: in the first reading, then in every `EVERY`th, and at least once in `EVERY` seconds. With
/// the default interval of a second both are the same.
#[derive(Debug, Default)]
pub struct Cadence<const EVERY: u32> {
    last: Option<Timestamp>,
    readings_since: u32,
    /// See [`Cadence::in_phase`].
    phase: u32,
}

impl<const EVERY: u32> Cadence<EVERY> {
    /// Returns a cadence that after the first reading is due `phase` readings earlier, modulo `EVERY`: many with different phases are not all due in
    /// the same reading.
    pub fn in_phase(phase: u32) -> Self {
        Self { phase: phase % EVERY, ..Self::default() }
    }

    /// Counts a reading. Returns whether the values are due in it.
    pub fn is_due(&mut self, now: Timestamp) -> bool {
        self.readings_since += 1;
        let interval = Duration::from_secs(EVERY.into());
        let is_due = self.readings_since >= EVERY || self.last.is_none_or(|last| now.since(last) >= interval);
        if is_due {
            (self.last, self.readings_since) = (Some(now), std::mem::take(&mut self.phase));
        }
        is_due
    }
}

/// Times of one report that was read, or stored and read again, differ by less than this, in seconds: the precision of a stored time.
const SAME_REPORT: f64 = 1e-5;

/// Returns whether two reported starts are of the same run, of one container and from one source.
pub fn is_same_start(one: Option<f64>, other: Option<f64>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => is_same_report(one, other),
        (None, None) => true,
        _ => false,
    }
}

/// Returns whether two times are from the same report: a source repeats its reports after a reconnection.
pub fn is_same_report(one: f64, other: f64) -> bool {
    (one - other).abs() < SAME_REPORT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cadence_is_due_by_readings_and_by_time() {
        let mut cadence = Cadence::<3>::default();
        let began = Timestamp::now();
        let mut is_due = |millis| cadence.is_due(began.plus(Duration::from_millis(millis)));
        assert_eq!([0, 10, 20, 30, 40, 50].map(&mut is_due), [true, false, false, true, false, false]);
        assert_eq!([3_030, 3_040, 6_030].map(&mut is_due), [true, false, true]);
    }

    #[test]
    fn since_is_zero_for_a_later_timestamp() {
        let now = Timestamp::now();
        let later = now.plus(Duration::from_secs(3));
        assert_eq!(later.since(now), Duration::from_secs(3));
        assert_eq!(now.since(later), Duration::ZERO);
        assert!((later.unix_seconds() - now.unix_seconds() - 3.0).abs() < 1e-6);
    }

    #[test]
    fn moved_timestamp_keeps_the_distance_of_both_clocks() {
        let now = Timestamp {
            monotonic: Duration::from_secs(100),
            suspended: Duration::ZERO,
            wall: Duration::from_secs(1_000_000),
        };
        let earlier = now.moved_to(999_990.5);
        assert_eq!(now.since(earlier), Duration::from_millis(9_500));
        assert_eq!(earlier.unix_seconds_of_kernel(90_000_000), 999_990.0);
        let before_boot = now.moved_to(5.0);
        assert_eq!((before_boot.unix_seconds(), before_boot.kernel_usec()), (5.0, 0));
        assert_eq!(now.moved_to(f64::NAN).unix_seconds(), 0.0);
    }

    #[test]
    fn converts_kernel_timestamps_to_unix_time_never_in_the_future() {
        let now = Timestamp {
            monotonic: Duration::from_secs(100),
            suspended: Duration::ZERO,
            wall: Duration::from_secs(1_000_000),
        };
        assert_eq!(now.unix_seconds_of_kernel(97_500_000), 999_997.5);
        assert_eq!(
            now.unix_seconds_of_kernel(100_000_001),
            1_000_000.0,
            "the clocks of two CPUs differ a little"
        );
        assert_eq!(now.unix_seconds_of_kernel(u64::MAX), 1_000_000.0);
        let before_1970 = Timestamp { wall: Duration::ZERO, ..now };
        assert_eq!(before_1970.unix_seconds_of_kernel(0), 0.0);
    }

    #[test]
    fn suspend_belongs_to_the_time_since_the_boot_and_is_no_change_of_the_wall_clock() {
        let night = Duration::from_secs(8 * 3600);
        let evening = Timestamp {
            monotonic: Duration::from_secs(1_000),
            suspended: Duration::ZERO,
            wall: Duration::from_secs(1_000_000),
        };
        let morning = evening.with_suspended(night).plus(Duration::from_secs(1));
        assert_eq!((evening.booted_at(), morning.booted_at()), (999_000.0, 999_000.0));
        assert_eq!(morning.since(evening), Duration::from_secs(1));
        assert_eq!(morning.wall_moved_since(evening), 0.0);
        let second = Duration::from_secs(1);
        assert_eq!(
            morning.moved_to(morning.unix_seconds() - 1.0),
            morning.minus(second),
            "after the suspend"
        );
    }

    #[test]
    fn monotonic_clock_is_the_uptime() {
        let uptime = std::fs::read_to_string("/proc/uptime").expect("procfs");
        let uptime: f64 = uptime.split(' ').next().expect("a number").parse().expect("seconds");
        assert!(
            (Timestamp::now().monotonic.as_secs_f64() - uptime).abs() < 5.0,
            "no sleep, no time namespace"
        );
    }

    #[test]
    fn step_of_the_clock_corrects_what_it_proves_wrong() {
        let hour = 3_600_000;
        let (early, late) = (
            Timestamp { monotonic: Duration::from_secs(90), ..Timestamp::now() },
            Timestamp::hours_after_boot(30),
        );
        let corrected = |before: Timestamp, millis: i64, at: f64| {
            let mut at = at;
            if let Some(step) = ClockStep::between(before, before.with_wall_moved(millis)) {
                step.correct(&mut at);
            }
            at
        };
        let (recent, old) = (early.unix_seconds() - 5.0, late.unix_seconds() - 7_200.0);
        for millis in [hour, -hour] {
            let seconds = millis as f64 / 1e3;
            assert_eq!(corrected(early, millis, recent), recent + seconds, "wrong since the boot");
            let yesterday = early.booted_at() - 86_400.0;
            assert_eq!(corrected(early, millis, yesterday), yesterday, "of an earlier boot");
        }
        let future = late.unix_seconds() - 5.0;
        assert_eq!(corrected(late, -hour, future), future - 3_600.0);
        assert_eq!(corrected(late, -hour, old), old);
        assert_eq!(corrected(late, hour, future), future, "the machine may have been paused");
        assert_eq!(corrected(early, 30_000, recent), recent, "small steps are tolerated");
    }
}
