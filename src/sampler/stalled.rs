//! The metrics of while a cycle hangs, most likely in a kernel read that does not return: those that need no cycle.
//!
//! The ledger's thread goes on counting OOM kills, the GPU driver's thread goes on reading devices, and memledger knows itself.
//! Everything else is absent rather than old. `memledger_snapshot_timestamp_seconds` keeps the time of the last cycle, so
//! that an alert sees it; while the first cycle hangs, that of the start.

use std::sync::Arc;
use std::time::Duration;

use crate::catalog::*;
use crate::clock::Timestamp;
use crate::collect::gpu::{self, DriverRelease};
use crate::collect::http_stats::HttpStats;
use crate::collect::otlp_stats::OtlpStats;
use crate::collect::self_metrics::SelfMetrics;
use crate::config::GpuSettings;
use crate::host::panics;
use crate::ledger::exchange::SharedState;
use crate::ledger::write_figures;
use crate::series::Series;
use crate::snapshot::{Dropped, Snapshot, finish};

/// The sources that go on while a cycle hangs.
#[derive(Debug)]
pub struct IndependentSources {
    pub(super) started: Timestamp,
    pub(super) shared_state: Arc<SharedState>,
    pub(super) driver_release: Arc<DriverRelease>,
    /// Maximum age of a reading of the GPU driver.
    pub(super) max_gpu_age: Duration,
    pub(super) http_stats: Arc<HttpStats>,
    pub(super) otlp_stats: Option<Arc<OtlpStats>>,
    pub(super) own: SelfMetrics,
}

impl IndependentSources {
    /// Returns the maximum age of a reading of the GPU driver.
    pub(super) fn max_gpu_age(settings: &GpuSettings) -> Duration {
        settings.interval + settings.deadline
    }

    /// Returns a snapshot of these sources. `last` is that of the last cycle; `None` while the first one hangs.
    pub fn snapshot(&mut self, last: Option<&Snapshot>, now: Timestamp) -> Snapshot {
        let mut series = Series::default();
        let figures = self.shared_state.figures(now);
        let containers = figures.map(|figures| write_figures(&figures, &mut series)).unwrap_or_default();
        let reading =
            self.driver_release.latest().filter(|reading| now.since(reading.at) <= self.max_gpu_age);
        let gpus = reading.map(|reading| {
            gpu::write(&reading, 0, &mut series);
            reading.devices.iter().map(|device| Arc::clone(&device.identity)).collect()
        });
        self.own.record(now, &mut series);
        self.http_stats.write(&mut series);
        if let Some(otlp_stats) = &self.otlp_stats {
            otlp_stats.write(&mut series);
        }
        super::write_build_info(&mut series);
        series.global(PANICS, [], panics::count() as f64);
        let last_stamp = last.and_then(|last| last.family(SNAPSHOT_TIMESTAMP.id).first());
        let stamp = last_stamp.map_or(self.started.unix_seconds(), |row| row.value);
        series.global(SNAPSHOT_TIMESTAMP, [], stamp);
        finish(&mut series, &mut Dropped::new());
        Snapshot {
            finished: now,
            series,
            containers,
            running: 0,
            gpus: gpus.unwrap_or_default(),
            processes: vec![],
        }
    }
}
