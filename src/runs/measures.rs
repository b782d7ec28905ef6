//! What is kept of many samples of one value: their mean, or the growth of a counter.

use serde::{Deserialize, Serialize};

/// Longest interval between two samples of which the time counts, in seconds; that of sampling is at most an hour.
const MAX_GAP: f64 = 7_200.0;

/// The mean of samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Mean {
    sum: f64,
    count: u64,
}

impl Mean {
    /// Records a sample.
    pub fn record(&mut self, value: Option<f64>) {
        if let Some(value) = value {
            self.sum += value;
            self.count += 1;
        }
    }

    /// Returns the mean.
    pub fn value(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }
}

/// The growth of a counter, which may begin again at 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Growth {
    last: Option<(f64, f64)>,
    #[serde(default)]
    parts: usize,
    /// Seconds since the last growth.
    #[serde(default)]
    idle: f64,
    total: f64,
    seconds: f64,
}

impl Growth {
    /// Records a sample.
    pub fn record(&mut self, at: f64, value: Option<f64>) {
        self.record_progress(at, value, 0);
        self.seconds += std::mem::take(&mut self.idle);
    }

    /// Records a sample of what a training did, as the sum of so many parts. The time after the last of it does not count: the container
    /// may do something else. Another number of parts is no growth: after a restart of memledger they return one by one.
    pub fn record_progress(&mut self, at: f64, value: Option<f64>, parts: usize) {
        let Some(value) = value else { return };
        if std::mem::replace(&mut self.parts, parts) != parts {
            (self.last, self.idle) = (None, 0.0);
        }
        let Some((before, last)) = self.last.replace((at, value)) else { return };
        // a wall clock that is set forward is no time that passed
        if value < last || at <= before || at - before > MAX_GAP {
            self.idle = 0.0;
            return;
        }
        self.idle += at - before;
        if value > last {
            self.total += value - last;
            self.seconds += std::mem::take(&mut self.idle);
        }
    }

    /// Returns the growth per second.
    pub fn rate(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.total / self.seconds)
    }
}
