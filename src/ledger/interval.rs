//! When something can have happened: a span of Unix time instead of a point. Pure.
//!
//! The kernel stamps its log by a clock of its own, which drifts from the others by up to some seconds a day. A reader
//! knows more: a record that was not in the log at the previous read, and is in it now, was written in between. The
//! [`LogClock`] combines both, and learns the drift from records that are read soon after they were written.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::clock::{ClockStep, Timestamp};
use crate::ledger::sources::kernel_log::LogEntry;
use crate::lifecycle::timing::{CLOCK_TOLERANCE, MAX_DRIFT};
use crate::parse::kernel_log::Line;

/// A span of Unix time, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// It did not happen before this.
    pub earliest: f64,
    /// It did not happen after this.
    pub latest: f64,
}

impl Interval {
    /// Creates an interval.
    pub fn new(earliest: f64, latest: f64) -> Self {
        Self { earliest: earliest.min(latest), latest }
    }

    /// Returns the interval of a single point.
    #[cfg(test)]
    pub fn at(at: f64) -> Self {
        Self { earliest: at, latest: at }
    }

    /// Returns the seconds that both have in common; negative if they are apart.
    pub fn overlap(&self, other: &Interval) -> f64 {
        self.latest.min(other.latest) - self.earliest.max(other.earliest)
    }

    /// Returns true if both can be the same moment.
    pub fn overlaps(&self, other: &Interval) -> bool {
        self.overlap(other) >= -CLOCK_TOLERANCE
    }

    /// Returns the interval by a wall clock that was set by so many seconds.
    pub fn moved(&self, by: f64) -> Self {
        Self { earliest: self.earliest + by, latest: self.latest + by }
    }

    /// Corrects both ends.
    pub fn correct(&mut self, step: &ClockStep) {
        step.correct(&mut self.earliest);
        step.correct(&mut self.latest);
        self.earliest = self.earliest.min(self.latest);
    }

    /// Returns the point of the interval that is nearest to `at`.
    pub fn nearest(&self, at: f64) -> f64 {
        at.min(self.latest).max(self.earliest)
    }
}

/// When a record of the kernel log was written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Written {
    /// The most likely Unix time: by its stamp.
    pub at: f64,
    /// It was written within this.
    pub within: Interval,
}

impl Written {
    /// It was written exactly then.
    #[cfg(test)]
    pub fn exactly(at: f64) -> Self {
        Self { at, within: Interval::at(at) }
    }

    /// Returns the same by a wall clock that was set by so many seconds.
    pub fn moved(&self, by: f64) -> Self {
        Self { at: self.at + by, within: self.within.moved(by) }
    }
}

/// The kernel log's clock, compared with the monotonic clock; all in microseconds of the latter. It is stored over restarts:
/// without it a record could only be placed by its stamp, which may be seconds off on a host that was booted a day ago.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LogClock {
    /// The least that stamps are behind, and when that was measured.
    at_least: Option<(f64, u64)>,
    /// The most that they are behind, and when that was measured.
    at_most: Option<(f64, u64)>,
    /// When the log was last known to be read to its end.
    caught_up: Option<u64>,
    /// Microseconds for which the machine had been suspended then.
    suspended: u64,
}

impl LogClock {
    /// Notes that the log was read to its end at this time.
    pub fn caught_up(&mut self, at: Timestamp) {
        self.caught_up = Some(at.kernel_usec());
        self.suspended = at.suspended().as_micros() as u64;
    }

    /// Returns entries that were read together, in their order, with when each was written. The clock of the log stops while the
    /// machine is suspended; the kernel logs the end of that ([`Line::Resumed`]), and only what it logged before is older.
    pub fn place(&mut self, entries: Vec<LogEntry>, read_at: Timestamp) -> Vec<(LogEntry, Written)> {
        let suspended =
            read_at.suspended().saturating_sub(Duration::from_micros(self.suspended)).as_secs_f64();
        let resumed = entries.iter().filter(|entry| entry.line == Line::Resumed).count();
        let (mut before, mut placed) = (0, Vec::with_capacity(entries.len() - resumed));
        for entry in entries {
            if entry.line == Line::Resumed {
                before += 1;
                continue;
            }
            let usec = entry.position.usec;
            let written = self.written(usec, read_at);
            let (least, most) = match before {
                _ if before == resumed => (0.0, 0.0),
                0 => (suspended, suspended),
                _ => (0.0, suspended), // between two of them
            };
            let within = Interval::new(written.earliest - most, written.latest - least);
            let at = within.nearest(read_at.unix_seconds_of_kernel(usec) - (least + most) / 2.0);
            placed.push((entry, Written { at, within }));
        }
        placed
    }

    /// Returns when a record with this stamp was written that was in the log at `read_at`, but not when the reader last reached its end.
    pub fn written(&mut self, usec: u64, read_at: Timestamp) -> Interval {
        let now = read_at.kernel_usec();
        let behind = |at: u64| at as f64 - usec as f64;
        let widening = |measured: u64| now.saturating_sub(measured) as f64 * MAX_DRIFT;
        let tolerance = CLOCK_TOLERANCE * 1e6 + usec as f64 * MAX_DRIFT;
        let mut low = self.at_least.map_or(f64::MIN, |(least, measured)| least - widening(measured));
        let mut high = self.at_most.map_or(f64::MAX, |(most, measured)| most + widening(measured));
        let (not_before, not_after) = (self.caught_up.map_or(f64::MIN, behind), behind(now));
        if not_before > high || not_after < low {
            (low, high) = (f64::MIN, f64::MAX); // the clock jumped
        }
        if self.caught_up.is_some() && not_before >= low {
            (self.at_least, low) = (Some((not_before, now)), not_before);
        }
        if not_after <= high {
            (self.at_most, high) = (Some((not_after, now)), not_after);
        }
        let age = not_after.max(0.0) * MAX_DRIFT; // the drift may have been another one then
        let (mut low, mut high) = ((low - age).max(not_before), (high + age).min(not_after));
        if (low..=high).contains(&-tolerance) {
            low = -tolerance;
        }
        if (low..=high).contains(&tolerance) {
            high = tolerance;
        }
        let unix = |difference: f64| read_at.unix_seconds() - (not_after - difference) / 1e6;
        Interval::new(unix(low.min(high)), unix(high))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::sources::kernel_log::LogPosition;
    use crate::parse::kernel_log::Killed;

    /// Returns a function that returns a timestamp this many seconds after now, which stays the same.
    fn clock() -> impl Fn(f64) -> Timestamp {
        let now = Timestamp::now();
        move |seconds| now.plus(Duration::from_secs_f64(seconds))
    }

    /// Returns the clock of a log that was read to its end once.
    fn read_after(at: Timestamp) -> LogClock {
        let mut clock = LogClock::default();
        clock.caught_up(at);
        clock
    }

    #[test]
    fn record_was_written_between_two_reads_whatever_its_stamp() {
        let at = clock();
        let (previous, read_at) = (at(10.0), at(10.5));
        for drift in [-3_000_000_i64, 0, 3_000_000] {
            let usec = at(10.2).kernel_usec().saturating_add_signed(drift);
            let written = read_after(previous).written(usec, read_at);
            assert!(written.earliest >= previous.unix_seconds() - 1e-3, "{drift}: {written:?}");
            assert!(written.latest <= read_at.unix_seconds() + 1e-3, "{drift}: {written:?}");
        }
    }

    #[test]
    fn drift_that_was_measured_narrows_later_records() {
        let at = clock();
        let mut clock = read_after(at(0.999));
        let stamp = |written: Timestamp| written.kernel_usec() - 1_500_000;
        clock.written(stamp(at(1.0)), at(1.001));
        clock.caught_up(at(2.0));
        let written = clock.written(stamp(at(60.0)), at(70.0));
        let (begin, end) =
            (at(60.0).unix_seconds() - written.earliest, written.latest - at(60.0).unix_seconds());
        assert!((0.0..0.05).contains(&begin) && (0.0..0.05).contains(&end), "{begin} {end}");
    }

    #[test]
    fn stored_clock_places_records_of_the_time_away() {
        let booted = Timestamp::hours_after_boot(1_000);
        let at = |seconds| booted.plus(Duration::from_secs_f64(seconds));
        let stamp = |written: Timestamp| written.kernel_usec() - 300_000_000; // a tolerated drift
        let mut clock = read_after(at(0.999));
        clock.written(stamp(at(1.0)), at(1.001));
        clock.caught_up(at(2.0));
        let stored = serde_json::to_string(&clock).expect("it is stored");
        let mut clock: LogClock = serde_json::from_str(&stored).expect("it is loaded");
        let written = clock.written(stamp(at(60.0)), at(100.0));
        let truth = at(60.0).unix_seconds();
        assert!(
            (written.earliest - truth).abs() < 0.1 && (written.latest - truth).abs() < 0.1,
            "{written:?}"
        );
        let without = read_after(at(2.0)).written(stamp(at(60.0)), at(100.0));
        assert!(without.latest - without.earliest > 90.0, "{without:?}");
    }

    #[test]
    fn old_record_is_placed_by_its_stamp() {
        let at = clock();
        let (usec, read_at) = (at(0.0).kernel_usec(), at(3_600.0));
        let written = LogClock::default().written(usec, read_at);
        let tolerance = CLOCK_TOLERANCE + usec as f64 * 1e-6 * MAX_DRIFT;
        assert!((written.latest - written.earliest) <= 2.0 * tolerance + 1e-3, "{written:?}");
        assert!(written.overlaps(&Interval::at(at(0.0).unix_seconds())));
    }

    #[test]
    fn what_was_logged_before_a_suspend_is_older_by_it() {
        let (at, night) = (clock(), Duration::from_secs(8 * 3600));
        let entry = |seconds: f64, line: Line| {
            let position = LogPosition { sequence: None, usec: at(seconds).kernel_usec() };
            LogEntry { position, line, text: "".into(), report: None }
        };
        let killed = || Line::Killed(Killed::default());
        let entries = vec![entry(1.0, killed()), entry(2.0, Line::Resumed), entry(3.0, killed())];
        let read_at = at(4.0).with_suspended(night);
        for mut clock in [LogClock::default(), read_after(at(0.0))] {
            let placed = clock.place(entries.clone(), read_at);
            let is_at = |number: usize, truth: f64| {
                let written = placed[number].1;
                (written.at - truth).abs() < 1e-3
                    && written.within.overlaps(&Interval::at(truth))
                    && written.within.latest - written.within.earliest < 60.0
            };
            assert!(placed.len() == 2 && is_at(0, at(1.0).unix_seconds()), "{placed:?}");
            assert!(is_at(1, at(3.0).with_suspended(night).unix_seconds()), "{placed:?}");
            clock.caught_up(read_at);
            let later = at(9.0).with_suspended(night);
            let placed = clock.place(vec![entry(8.0, killed())], later);
            let truth = at(8.0).with_suspended(night).unix_seconds();
            assert!((placed[0].1.at - truth).abs() < 0.1, "a suspend counts once: {placed:?}");
        }
    }
}
