//! Exponential back-off between attempts.

use std::time::Duration;

/// The delays between failed attempts: each twice as long as the one before, up to a maximum.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    first: Duration,
    max: Duration,
    next: Duration,
}

impl Backoff {
    /// Creates a back-off of which no delay was used.
    pub const fn new(first: Duration, max: Duration) -> Self {
        Self { first, max, next: first }
    }

    /// Returns the delay before the next attempt, and doubles the one after.
    pub fn delay(&mut self) -> Duration {
        let delay = self.next;
        self.next = (delay * 2).min(self.max);
        delay
    }

    /// Begins with the first delay again: an attempt succeeded.
    pub fn reset(&mut self) {
        self.next = self.first;
    }

    /// Begins with the first delay again if what was attempted worked for at least twice the next delay.
    pub fn reset_if_stable(&mut self, worked: Duration) {
        if worked >= self.next * 2 {
            self.reset();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_maximum_until_an_attempt_succeeds() {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(30));
        let seconds = [(); 7].map(|()| backoff.delay().as_secs());
        assert_eq!(seconds, [1, 2, 4, 8, 16, 30, 30]);
        backoff.reset();
        assert_eq!(backoff.delay().as_secs(), 1);
        let next_seconds = [3, 4].map(|worked| {
            backoff.reset_if_stable(Duration::from_secs(worked));
            backoff.next.as_secs()
        });
        assert_eq!(next_seconds, [2, 1]);
    }
}
