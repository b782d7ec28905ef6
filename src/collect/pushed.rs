//! How the push over OTLP fares: the pushing thread counts, the cycle shows it.
//!
//! Numbers behind a lock that is held for an addition. Not here: why something was not taken, which the log says.

use std::sync::{Mutex, PoisonError};

use crate::catalog::{OTLP_LOST, OTLP_SENT, OTLP_UP};
use crate::series::Series;

/// What is pushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Data points.
    Metrics,
    /// Log records, one per event of the ledger.
    Logs,
}

/// Why something was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// Nobody took it until newer ones took its place.
    Unreachable,
    /// The endpoint would not have it.
    Refused,
    /// It alone is larger than a request may be.
    TooLarge,
    /// It is damaged in the ledger.
    Unreadable,
}

impl Signal {
    /// Both, in the order of the documents.
    pub const ALL: [Signal; 2] = [Signal::Metrics, Signal::Logs];

    /// As a label value.
    pub fn label(self) -> &'static str {
        match self {
            Signal::Metrics => "metrics",
            Signal::Logs => "logs",
        }
    }
}

const REASONS: [&str; 4] = ["unreachable", "refused", "too_large", "unreadable"];

#[derive(Clone, Copy, Debug, Default)]
struct OfSignal {
    is_on: bool,
    up: Option<bool>,
    sent: u64,
    lost: [u64; REASONS.len()],
}

/// The counts of both signals.
#[derive(Debug, Default)]
pub struct Tally([Mutex<OfSignal>; 2]);

impl Tally {
    fn change(&self, signal: Signal, change: impl FnOnce(&mut OfSignal)) {
        change(&mut self.0[signal as usize].lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// There is an endpoint for this signal: its counters begin at 0.
    pub fn begin(&self, signal: Signal) {
        self.change(signal, |counts| counts.is_on = true);
    }

    /// The endpoint took so many.
    pub fn sent(&self, signal: Signal, count: u64) {
        self.change(signal, |counts| counts.sent += count);
    }

    /// So many were given up.
    pub fn lost(&self, signal: Signal, why: Lost, count: u64) {
        self.change(signal, |counts| counts.lost[why as usize] += count);
    }

    /// Whether the newest push was taken. Returns what it was before; `None` before the first.
    pub fn up(&self, signal: Signal, up: bool) -> Option<bool> {
        let mut before = None;
        self.change(signal, |counts| before = counts.up.replace(up));
        before
    }

    /// Writes the families of the push.
    pub fn write(&self, series: &mut Series) {
        for signal in Signal::ALL {
            let counts = *self.0[signal as usize].lock().unwrap_or_else(PoisonError::into_inner);
            if !counts.is_on {
                continue;
            }
            if let Some(up) = counts.up {
                series.global(OTLP_UP, [signal.label().into()], f64::from(u8::from(up)));
            }
            series.global(OTLP_SENT, [signal.label().into()], counts.sent as f64);
            for (reason, lost) in std::iter::zip(REASONS, counts.lost) {
                series.global(OTLP_LOST, [signal.label().into(), reason.into()], lost as f64);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_without_an_endpoint_has_no_series_and_one_with_an_endpoint_begins_at_0() {
        let tally = Tally::default();
        let mut series = Series::default();
        tally.write(&mut series);
        assert!(series.is_empty());
        tally.begin(Signal::Logs);
        tally.write(&mut series);
        assert_eq!(series.rows().iter().map(|row| row.value).collect::<Vec<_>>(), [0.0; 5]);
        assert_eq!((tally.up(Signal::Logs, false), tally.up(Signal::Logs, true)), (None, Some(false)));
        tally.lost(Signal::Logs, Lost::TooLarge, 3);
        let mut series = Series::default();
        tally.write(&mut series);
        assert_eq!(
            series.rows().iter().map(|row| row.value).collect::<Vec<_>>(),
            [1.0, 0.0, 0.0, 0.0, 3.0, 0.0]
        );
    }
}
