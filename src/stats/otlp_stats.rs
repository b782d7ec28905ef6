//! Metrics of the OTLP export, counted by the exporter's thread and written by the sampler.
//!
//! A lock is held for an addition at most. Not here: why items were lost, which is in the log.

use std::sync::{Mutex, PoisonError};

use crate::catalog::{OTLP_LOST, OTLP_SENT, OTLP_UP};
use crate::series::Series;

/// An exported signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtlpSignal {
    /// Data points.
    Metrics,
    /// Log records, one per event of the ledger.
    Logs,
    /// Spans of memledger's own work.
    Traces,
}

/// Why items were lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossReason {
    /// The endpoint did not accept them before newer ones were due.
    Unreachable,
    /// The endpoint rejected them.
    Refused,
    /// The item alone is larger than a request may be.
    TooLarge,
    /// The item is damaged in the ledger.
    Unreadable,
    /// The queue of spans was full.
    QueueFull,
}

impl OtlpSignal {
    /// All, in the order of the documentation.
    pub const ALL: [OtlpSignal; 3] = [OtlpSignal::Metrics, OtlpSignal::Logs, OtlpSignal::Traces];

    /// Returns the label value.
    pub fn label(self) -> &'static str {
        match self {
            OtlpSignal::Metrics => "metrics",
            OtlpSignal::Logs => "logs",
            OtlpSignal::Traces => "traces",
        }
    }
}

const REASONS: [&str; 5] = ["unreachable", "refused", "too_large", "unreadable", "queue_full"];

#[derive(Clone, Copy, Debug, Default)]
struct SignalStats {
    is_enabled: bool,
    up: Option<bool>,
    sent: u64,
    lost: [u64; REASONS.len()],
}

/// Counters of all signals.
#[derive(Debug, Default)]
pub struct OtlpStats([Mutex<SignalStats>; OtlpSignal::ALL.len()]);

impl OtlpStats {
    fn change(&self, signal: OtlpSignal, change: impl FnOnce(&mut SignalStats)) {
        change(&mut self.0[signal as usize].lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Enables a signal, which has an endpoint: its counters start at 0.
    pub fn enable(&self, signal: OtlpSignal) {
        self.change(signal, |stats| stats.is_enabled = true);
    }

    /// Counts items that the endpoint accepted.
    pub fn count_sent(&self, signal: OtlpSignal, count: u64) {
        self.change(signal, |stats| stats.sent += count);
    }

    /// Counts lost items.
    pub fn count_lost(&self, signal: OtlpSignal, reason: LossReason, count: u64) {
        self.change(signal, |stats| stats.lost[reason as usize] += count);
    }

    /// Sets whether the newest export succeeded.
    pub fn set_up(&self, signal: OtlpSignal, up: bool) {
        self.change(signal, |stats| stats.up = Some(up));
    }

    /// Writes the metrics.
    pub fn write(&self, series: &mut Series) {
        for signal in OtlpSignal::ALL {
            let stats = *self.0[signal as usize].lock().unwrap_or_else(PoisonError::into_inner);
            if !stats.is_enabled {
                continue;
            }
            if let Some(up) = stats.up {
                series.global(OTLP_UP, [signal.label().into()], f64::from(u8::from(up)));
            }
            series.global(OTLP_SENT, [signal.label().into()], stats.sent as f64);
            let has_queue = signal == OtlpSignal::Traces; // events wait in the ledger, and new points replace old ones
            let reasons = if has_queue { REASONS.len() } else { LossReason::QueueFull as usize };
            for (reason, lost) in std::iter::zip(REASONS, stats.lost).take(reasons) {
                series.global(OTLP_LOST, [signal.label().into(), reason.into()], lost as f64);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_series_only_for_enabled_signals() {
        let otlp_stats = OtlpStats::default();
        let mut series = Series::default();
        otlp_stats.write(&mut series);
        assert!(series.is_empty());
        otlp_stats.enable(OtlpSignal::Logs);
        otlp_stats.write(&mut series);
        assert_eq!(series.rows().iter().map(|row| row.value).collect::<Vec<_>>(), [0.0; 5]);
        otlp_stats.set_up(OtlpSignal::Logs, false);
        otlp_stats.set_up(OtlpSignal::Logs, true);
        otlp_stats.count_lost(OtlpSignal::Logs, LossReason::TooLarge, 3);
        let mut series = Series::default();
        otlp_stats.write(&mut series);
        assert_eq!(
            series.rows().iter().map(|row| row.value).collect::<Vec<_>>(),
            [1.0, 0.0, 0.0, 0.0, 3.0, 0.0]
        );
        otlp_stats.enable(OtlpSignal::Traces);
        otlp_stats.count_lost(OtlpSignal::Traces, LossReason::QueueFull, 7);
        let mut series = Series::default();
        otlp_stats.write(&mut series);
        assert_eq!(series.rows().last().map(|row| row.value), Some(7.0));
    }
}
