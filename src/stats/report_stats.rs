//! Metrics of the reports of runs, counted by the followers that write them and by the ledger, and written by the sampler.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::catalog::{REPORT_UP, REPORTS_LOST, REPORTS_WAITING, REPORTS_WRITTEN};
use crate::clock::Timestamp;
use crate::series::Series;

/// An attempt that takes longer has failed, although it has not ended.
const MAX_ATTEMPT: Duration = Duration::from_secs(120);

/// Where reports are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportTarget {
    /// `--report.dir`.
    Directory,
    /// `--report.s3-url`.
    S3,
}

impl ReportTarget {
    /// All, in the order of the documentation.
    pub const ALL: [ReportTarget; 2] = [ReportTarget::Directory, ReportTarget::S3];

    /// Returns the label value.
    pub fn label(self) -> &'static str {
        match self {
            ReportTarget::Directory => "directory",
            ReportTarget::S3 => "s3",
        }
    }
}

#[derive(Clone, Debug, Default)]
struct TargetStats {
    /// Name of the cursor of the follower; `None` if the target is not set.
    cursor: Option<String>,
    up: Option<bool>,
    /// Start of the attempt in progress.
    attempt: Option<Timestamp>,
    written: u64,
    lost: u64,
    pending: Option<u64>,
}

/// Counters of all targets.
#[derive(Debug, Default)]
pub struct ReportStats([Mutex<TargetStats>; ReportTarget::ALL.len()]);

impl ReportStats {
    fn change(&self, target: ReportTarget, change: impl FnOnce(&mut TargetStats)) {
        change(&mut self.0[target as usize].lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Enables a target, whose follower has this cursor: its counters start at 0.
    pub fn enable(&self, target: ReportTarget, cursor: &str) {
        self.change(target, |stats| stats.cursor = Some(cursor.to_owned()));
    }

    /// Returns the enabled targets with the names of their cursors.
    pub fn cursors(&self) -> Vec<(ReportTarget, String)> {
        let of = |target: ReportTarget| {
            let stats = self.0[target as usize].lock().unwrap_or_else(PoisonError::into_inner);
            Some((target, stats.cursor.clone()?))
        };
        ReportTarget::ALL.into_iter().filter_map(of).collect()
    }

    /// Notes that an attempt to write a report begins.
    pub fn begin(&self, target: ReportTarget) {
        self.change(target, |stats| stats.attempt = Some(Timestamp::now()));
    }

    /// Counts a report that is complete at the target.
    pub fn count_written(&self, target: ReportTarget) {
        self.change(target, |stats| {
            (stats.written, stats.up, stats.attempt) = (stats.written + 1, Some(true), None);
        });
    }

    /// Notes that the target does not take reports.
    pub fn mark_failing(&self, target: ReportTarget) {
        self.change(target, |stats| (stats.up, stats.attempt) = (Some(false), None));
    }

    /// Notes that no report is left to write. Whether a target that has failed would take one is unknown then.
    pub fn mark_idle(&self, target: ReportTarget) {
        self.change(target, |stats| stats.up = stats.up.filter(|up| *up));
    }

    /// Counts runs whose records were removed or unreadable before their reports were written.
    pub fn count_lost(&self, target: ReportTarget, count: u64) {
        self.change(target, |stats| stats.lost += count);
    }

    /// Sets how many reports are still to be written.
    pub fn set_pending(&self, target: ReportTarget, count: u64) {
        self.change(target, |stats| stats.pending = Some(count));
    }

    /// Writes the metrics.
    pub fn write(&self, series: &mut Series) {
        for target in ReportTarget::ALL {
            let stats = self.0[target as usize].lock().unwrap_or_else(PoisonError::into_inner).clone();
            if stats.cursor.is_none() {
                continue;
            }
            let mut write = |family, value: f64| series.global(family, [target.label().into()], value);
            let is_stuck = stats.attempt.is_some_and(|began| Timestamp::now().since(began) > MAX_ATTEMPT);
            if let Some(up) = if is_stuck { Some(false) } else { stats.up } {
                write(REPORT_UP, f64::from(u8::from(up)));
            }
            if let Some(pending) = stats.pending {
                write(REPORTS_WAITING, pending as f64);
            }
            write(REPORTS_WRITTEN, stats.written as f64);
            write(REPORTS_LOST, stats.lost as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_series_only_for_enabled_targets() {
        let report_stats = ReportStats::default();
        let values = || {
            let mut series = Series::default();
            report_stats.write(&mut series);
            series.rows().iter().map(|row| row.value).collect::<Vec<_>>()
        };
        assert!(values().is_empty() && report_stats.cursors().is_empty());
        report_stats.enable(ReportTarget::S3, "report s3://bucket");
        assert_eq!(report_stats.cursors(), [(ReportTarget::S3, "report s3://bucket".to_owned())]);
        assert_eq!(values(), [0.0, 0.0], "up and pending are unknown");
        report_stats.mark_failing(ReportTarget::S3);
        report_stats.set_pending(ReportTarget::S3, 3);
        report_stats.count_lost(ReportTarget::S3, 2);
        assert_eq!(values(), [0.0, 3.0, 0.0, 2.0]);
        report_stats.count_written(ReportTarget::S3);
        assert_eq!(values(), [1.0, 3.0, 1.0, 2.0]);
        report_stats.begin(ReportTarget::S3);
        report_stats.mark_failing(ReportTarget::S3);
        report_stats.mark_idle(ReportTarget::S3);
        assert_eq!(values(), [3.0, 1.0, 2.0], "nobody knows");
    }
}
