//! How much of the logs is read: per second of each, and of all together.
//!
//! A reader that has read its share waits, so the runtime keeps the rest.

use std::sync::Mutex;
use std::time::Duration;

use super::lock;
use crate::clock::Timestamp;

/// Bytes per second of one log.
const OF_ONE: usize = crate::host::bounds::CONTAINER_LOG.max_bytes;
/// Bytes per second of all logs.
const OF_ALL: usize = crate::host::bounds::CONTAINER_LOGS.max_bytes;
/// A reader that is so far behind what is written for so long skips the rest.
const MAX_LAG: Duration = Duration::from_secs(10);
const SECOND: Duration = Duration::from_secs(1);

/// Bytes that may still be read in a second.
#[derive(Debug)]
struct Allowed {
    left: usize,
    since: Timestamp,
}

impl Allowed {
    fn new(bytes: usize) -> Self {
        Self { left: bytes, since: Timestamp::now() }
    }

    /// Takes bytes. Returns how long to wait if there are not as many left.
    fn take(&mut self, bytes: usize, limit: usize, now: Timestamp) -> Duration {
        if now.since(self.since) >= SECOND {
            *self = Self { left: limit, since: now };
        }
        self.left = self.left.saturating_sub(bytes);
        if self.left > 0 { Duration::ZERO } else { SECOND.saturating_sub(now.since(self.since)) }
    }
}

/// The limit of all logs.
#[derive(Debug)]
pub struct SharedBudget(Mutex<Allowed>);

impl Default for SharedBudget {
    fn default() -> Self {
        Self(Mutex::new(Allowed::new(OF_ALL)))
    }
}

/// The limit of one log.
#[derive(Debug)]
pub struct LogBudget<'a> {
    own: Allowed,
    /// Since when the reader is behind.
    behind: Option<Timestamp>,
    shared: &'a SharedBudget,
}

impl<'a> LogBudget<'a> {
    pub fn new(shared: &'a SharedBudget) -> Self {
        Self { own: Allowed::new(OF_ONE), behind: None, shared }
    }

    /// Takes bytes that were written at a Unix time, and waits until more may be read. Returns false if the reader is too far behind.
    pub async fn take(&mut self, bytes: usize, at: f64) -> bool {
        let now = Timestamp::now();
        let wait = self.own.take(bytes, OF_ONE, now).max(lock(&self.shared.0).take(bytes, OF_ALL, now));
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
        self.keeps_up(at, Timestamp::now())
    }

    /// Returns false if the reader has been too far behind for too long, whether it waited or had no CPU time.
    fn keeps_up(&mut self, at: f64, now: Timestamp) -> bool {
        if now.unix_seconds() - at < MAX_LAG.as_secs_f64() {
            self.behind = None;
            return true;
        }
        now.since(*self.behind.get_or_insert(now)) < MAX_LAG
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_has_a_limit_and_the_next_one_has_it_again() {
        let mut allowed = Allowed::new(OF_ONE);
        let now = allowed.since;
        assert_eq!(allowed.take(OF_ONE - 1, OF_ONE, now), Duration::ZERO);
        assert_eq!(allowed.take(1, OF_ONE, now.plus(SECOND / 4)), SECOND * 3 / 4);
        assert_eq!(allowed.take(1, OF_ONE, now.plus(SECOND)), Duration::ZERO);
    }

    #[test]
    fn old_lines_are_read_unless_there_is_no_end_of_them() {
        let shared = SharedBudget::default();
        let mut budget = LogBudget::new(&shared);
        let now = Timestamp::now();
        let written = |age: f64| now.unix_seconds() - age;
        assert!(budget.keeps_up(written(3600.0), now), "of a run before");
        let later = now.plus(MAX_LAG);
        assert!(!budget.keeps_up(written(0.0), later));
        assert!(budget.keeps_up(written(-5.0), later), "it has read on");
        assert!(budget.keeps_up(written(0.0), later), "it is behind only from here on");
    }
}
