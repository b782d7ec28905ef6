//! Whether something that is tried again and again works.

use std::time::Duration;

use crate::clock::Timestamp;

/// Selects what is logged of the failures of one thing: the first since it worked, not those after it, and then the recovery.
#[derive(Clone, Debug, Default)]
pub struct Health {
    /// The newest failure since it worked.
    failed_at: Option<Timestamp>,
    /// A failure since it worked was logged.
    is_logged: bool,
    logged_at: Option<Timestamp>,
    /// Least time between two failures that are logged.
    min_interval: Duration,
    /// The reason that was logged, if reasons are distinguished.
    reason: String,
}

impl Health {
    /// Creates one that logs at most one failure in this time, however often it recovers: for what may alternate for hours.
    pub fn with_interval(min_interval: Duration) -> Self {
        Self { min_interval, ..Self::default() }
    }

    /// Records a failure. Returns whether it is to be logged.
    pub fn failed(&mut self, now: Timestamp) -> bool {
        self.failed_at = Some(now);
        let is_recent = self.logged_at.is_some_and(|at| now.since(at) < self.min_interval);
        let is_due = !self.is_logged && !is_recent;
        if is_due {
            (self.is_logged, self.logged_at) = (true, Some(now));
        }
        is_due
    }

    /// Records a failure for a reason. Returns whether it is to be logged: also if the reason is another one than before.
    pub fn failed_because(&mut self, now: Timestamp, reason: &str) -> bool {
        if self.reason != reason {
            reason.clone_into(&mut self.reason);
            self.is_logged = false;
        }
        self.failed(now)
    }

    /// Records that it works. Returns whether that is a recovery from a failure that was logged.
    pub fn recovered(&mut self) -> bool {
        self.failed_at = None;
        self.reason.clear();
        std::mem::take(&mut self.is_logged)
    }

    /// Returns whether it has failed since it worked.
    pub fn is_failing(&self) -> bool {
        self.failed_at.is_some()
    }

    /// Returns whether it has failed less than this long ago, and not worked since: too early for the next attempt.
    pub fn has_failed_within(&self, now: Timestamp, span: Duration) -> bool {
        self.failed_at.is_some_and(|at| now.since(at) < span)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_failure_and_recovery_are_logged() {
        let (mut health, now) = (Health::default(), Timestamp::now());
        assert!(!health.recovered() && !health.is_failing(), "it never failed");
        assert_eq!([(); 3].map(|()| health.failed(now)), [true, false, false]);
        assert!(health.is_failing() && health.recovered());
        assert!(!health.is_failing() && !health.recovered());
        assert!(health.failed(now), "again");
    }

    #[test]
    fn another_reason_is_logged_where_reasons_are_distinguished() {
        let (mut health, now) = (Health::default(), Timestamp::now());
        assert_eq!(["a", "a", "b"].map(|reason| health.failed_because(now, reason)), [true, false, true]);
        assert!(health.recovered() && health.failed_because(now, "b"));
    }

    #[test]
    fn what_alternates_is_logged_once_in_the_interval() {
        let second = Duration::from_secs(1);
        let (mut health, mut now) = (Health::with_interval(10 * second), Timestamp::now());
        let mut logged = (0, 0);
        for _ in 0..25 {
            logged.0 += u32::from(health.failed(now));
            logged.1 += u32::from(health.recovered());
            now = now.plus(second);
        }
        assert_eq!(logged, (3, 3), "at 0, 10 and 20 s, each with its recovery");
        health.failed(now);
        assert!(health.failed(now.plus(10 * second)), "it still fails, and that was not logged yet");
        assert!(!health.failed(now.plus(100 * second)), "once");
    }

    #[test]
    fn next_attempt_is_too_early_for_a_while_after_a_failure() {
        let second = Duration::from_secs(1);
        let (mut health, now) = (Health::default(), Timestamp::now());
        assert!(!health.has_failed_within(now, second));
        health.failed(now);
        assert!(health.has_failed_within(now, second) && !health.has_failed_within(now.plus(second), second));
        health.recovered();
        assert!(!health.has_failed_within(now, second));
    }
}
