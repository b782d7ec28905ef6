//! How much RAM a run may use: its limit, or what others leave of the host.

use super::measurement::{PLANNED_SHARE, human};
use crate::runs::RunRecord;

/// The memory that there is for the container of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RamCapacity {
    /// Its bytes.
    pub bytes: f64,
    /// The memory of the host, if that is the lower bound: `bytes` are what others leave of it.
    pub host_total: Option<f64>,
}

impl RamCapacity {
    /// Returns the lower one of the limit and what others left of the host; `None` if neither is known.
    pub fn of(run: &RunRecord) -> Option<Self> {
        let limit = run.limit_bytes.map(|bytes| Self { bytes: bytes as f64, host_total: None });
        let host = Self::of_host(run);
        limit.into_iter().chain(host).min_by(|one, other| one.bytes.total_cmp(&other.bytes))
    }

    /// Returns what others left of the host when they held the most.
    pub fn of_host(run: &RunRecord) -> Option<Self> {
        let total = run.host_total_bytes?;
        let bytes = total.saturating_sub(run.host_others_peak_bytes?) as f64;
        Some(Self { bytes, host_total: Some(total as f64) })
    }

    /// Returns how much of it a run may plan to use.
    pub fn planned(&self) -> f64 {
        PLANNED_SHARE * self.bytes
    }

    /// Returns what others hold, if the host is the bound.
    pub fn others(&self) -> f64 {
        self.host_total.map_or(0.0, |total| total - self.bytes)
    }

    /// Returns all of it, with what others hold.
    pub fn total(&self) -> f64 {
        self.host_total.unwrap_or(self.bytes)
    }

    /// Returns it as text, after "of".
    pub fn text(&self) -> String {
        match self.host_total {
            None => human(self.bytes),
            Some(total) => {
                format!("the {} that others leave of the host's {}", human(self.bytes), human(total))
            }
        }
    }
}
