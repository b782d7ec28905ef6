//! What the thread of a source has read since the previous cycle.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::assembler::MAX_READ_ERRORS;
use super::types::{GpuReading, GpuSample};
use crate::clock::Timestamp;

/// Samples that are kept for the next cycle; beyond that the oldest are dropped.
const MAX_SAMPLES: usize = 2_000;

/// The output since the previous cycle.
#[derive(Clone, Debug)]
pub struct ReaderOutput {
    /// The newest reading, however old.
    pub latest: Option<Arc<GpuReading>>,
    /// The samples since the previous call, oldest first, including one for each full reading.
    pub samples: VecDeque<GpuSample>,
    /// Read errors since the previous call.
    pub read_errors: Vec<&'static str>,
    /// Whether the driver was read at least once, or failed.
    pub has_answered: bool,
    /// When the thread was started, or the driver became available again.
    pub started: Timestamp,
}

/// The output of a thread, shared with the cycle.
#[derive(Debug, Default)]
pub struct SharedOutput(Mutex<ReaderOutput>);

impl Default for ReaderOutput {
    fn default() -> Self {
        Self {
            latest: None,
            samples: VecDeque::new(),
            read_errors: vec![],
            has_answered: false,
            started: Timestamp::now(),
        }
    }
}

impl SharedOutput {
    /// Returns the output for a short time.
    pub fn lock(&self) -> MutexGuard<'_, ReaderOutput> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReaderOutput {
    /// Adds a sample and, if it is of a full reading, that with its read errors.
    pub fn publish(&mut self, reading: Option<Arc<GpuReading>>, sample: GpuSample) {
        self.has_answered = true;
        if self.samples.len() == MAX_SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back(sample);
        if let Some(reading) = reading {
            self.count_errors(reading.read_errors.iter().copied());
            self.latest = Some(reading);
        }
    }

    /// Adds read errors, up to a limit.
    pub fn count_errors(&mut self, reasons: impl IntoIterator<Item = &'static str>) {
        self.read_errors.extend(reasons);
        self.read_errors.truncate(MAX_READ_ERRORS);
    }

    /// Discards the newest reading and all samples. After a failure the driver counts as one that has answered.
    pub fn discard_readings(&mut self, has_failed: bool) {
        self.latest = None;
        self.samples.clear();
        self.has_answered |= has_failed;
    }

    /// Takes the output.
    pub fn take(&mut self) -> Self {
        let samples = std::mem::take(&mut self.samples);
        let read_errors = std::mem::take(&mut self.read_errors);
        Self { samples, read_errors, ..self.clone() }
    }

    /// Returns whether the first reading is still within its deadline.
    pub fn is_starting(&self, now: Timestamp, deadline: Duration) -> bool {
        !self.has_answered && now.since(self.started) < deadline
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_reading_has_until_the_deadline() {
        let mut output = ReaderOutput::default();
        let deadline = Duration::from_secs(5);
        let is_starting =
            |output: &ReaderOutput, after| output.is_starting(output.started.plus(after), deadline);
        assert!(is_starting(&output, deadline / 2) && !is_starting(&output, deadline));
        output.discard_readings(true);
        assert!(!is_starting(&output, deadline / 2), "a failure is an answer");
    }
}
