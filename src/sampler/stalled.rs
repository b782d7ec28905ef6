//! The metrics of while no cycle finishes: those that need no cycle. A cycle hangs, most likely in a kernel read that does not return;
//! or cycles panic; or the ledger is not open yet, so that there is none.
//!
//! The ledger's thread goes on counting OOM kills, the threads of the GPU drivers go on reading devices, and memledger knows itself.
//! Everything else is absent rather than old. `memledger_source_timestamp_seconds` has the time of each of them, and
//! `memledger_snapshot_timestamp_seconds` keeps the time of the last cycle, so that an alert sees it; before the first one, that of
//! the start.

use std::sync::Arc;
use std::time::Duration;

use crate::catalog::*;
use crate::clock::Timestamp;
use crate::collect::self_metrics::SelfMetrics;
use crate::config::Config;
use crate::gpu::{self, DriverState, SharedOutput};
use crate::host::panics;
use crate::ledger::exchange::SharedState;
use crate::ledger::write_figures;
use crate::series::Series;
use crate::snapshot::{Dropped, Snapshot, finish};
use crate::stats::http_stats::HttpStats;
use crate::stats::otlp_stats::OtlpStats;

/// The sources that need no cycle.
#[derive(Debug)]
pub struct IndependentSources {
    started: Timestamp,
    /// `None` until the ledger is open.
    shared_state: Option<Arc<SharedState>>,
    pub(super) driver_state: Arc<DriverState>,
    pub(super) amdgpu_output: Arc<SharedOutput>,
    /// Maximum age of a reading of a GPU driver.
    max_gpu_age: Duration,
    pub(super) http_stats: Arc<HttpStats>,
    otlp_stats: Option<Arc<OtlpStats>>,
    /// `None` if it is disabled.
    own: Option<SelfMetrics>,
}

impl IndependentSources {
    /// Returns the sources until the ledger is open.
    pub fn new(config: &Config, driver_state: Arc<DriverState>, http_stats: Arc<HttpStats>) -> Self {
        Self {
            started: Timestamp::now(),
            shared_state: None,
            driver_state,
            amdgpu_output: Arc::default(),
            max_gpu_age: config.gpu.interval + config.gpu.deadline,
            http_stats,
            otlp_stats: None,
            own: config.collectors.contains("own").then(SelfMetrics::default),
        }
    }

    /// Returns the requests to release the driver.
    pub fn driver_state(&self) -> Arc<DriverState> {
        Arc::clone(&self.driver_state)
    }

    /// Adds what needs the ledger.
    pub fn add(&mut self, shared_state: Arc<SharedState>, otlp_stats: Option<Arc<OtlpStats>>) {
        (self.shared_state, self.otlp_stats) = (Some(shared_state), otlp_stats);
    }

    /// Returns a snapshot of these sources. `last` is that of the last cycle; `None` if there was none.
    pub fn snapshot(&mut self, last: Option<&Snapshot>, now: Timestamp) -> Snapshot {
        let mut series = Series::default();
        let mut containers = vec![];
        if let Some(shared_state) = &self.shared_state {
            let figures = shared_state.figures(now);
            containers = figures.map(|figures| write_figures(&figures, &mut series)).unwrap_or_default();
            shared_state.followers.report_stats.write(&mut series);
            if let Some(published) = shared_state.published() {
                series.global(SOURCE_TIMESTAMP, ["ledger".into()], published.unix_seconds());
            }
        }
        let mut gpus = vec![];
        let outputs = [&self.driver_state.output, &*self.amdgpu_output];
        for reading in outputs.map(|output| output.lock().latest.clone()).into_iter().flatten() {
            let is_fresh = now.since(reading.at) <= self.max_gpu_age;
            if is_fresh {
                gpu::write(&reading, gpus.len() as u32, &mut series);
                gpus.extend(reading.devices.iter().map(|device| Arc::clone(&device.identity)));
            }
            series.global(COLLECTOR_SUCCESS, [reading.source.into()], f64::from(u8::from(is_fresh)));
            series.global(SOURCE_TIMESTAMP, [reading.source.into()], reading.at.unix_seconds());
        }
        self.driver_state.write(now, &mut series);
        if let Some(own) = &mut self.own {
            own.record(now, &mut series);
        }
        self.http_stats.write(&mut series);
        if let Some(otlp_stats) = &self.otlp_stats {
            otlp_stats.write(&mut series);
        }
        super::write_build_info(&mut series);
        series.global(PANICS, [], panics::count() as f64);
        let last_cycle = last.map_or(self.started.unix_seconds(), |last| last.last_cycle);
        series.global(SNAPSHOT_TIMESTAMP, [], last_cycle);
        finish(&mut series, &mut Dropped::new());
        Snapshot { containers, gpus, last_cycle, ..Snapshot::of_series(now, series) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::{DeviceMemory, GpuDevice, GpuIdentity, GpuReading};

    fn reading(source: &'static str, at: Timestamp, total: u64) -> Arc<GpuReading> {
        let memory = DeviceMemory { total: Some(total), ..DeviceMemory::default() };
        let identity = Arc::new(GpuIdentity { uuid: source.into(), ..GpuIdentity::default() });
        let devices = vec![GpuDevice { memory, ..GpuDevice::new(identity) }];
        Arc::new(GpuReading { source, ..GpuReading::of_devices(at, devices) })
    }

    #[test]
    fn has_fresh_gpus_of_amd_and_their_time() {
        let command = crate::config::arguments(clap::Command::new("memledger").no_binary_name(true));
        let config = Config::load(&command.get_matches_from([""; 0])).unwrap();
        let mut sources = IndependentSources::new(&config, Arc::default(), Arc::default());
        let now = Timestamp::now();
        let values = |snapshot: &Snapshot, family: crate::catalog::FamilyId| {
            snapshot.family(family).iter().map(|row| row.value).collect::<Vec<_>>()
        };
        let before = sources.snapshot(None, now);
        assert!(
            values(&before, GPU_MEMORY_TOTAL.id).is_empty()
                && values(&before, COLLECTOR_SUCCESS.id).is_empty()
        );
        sources.amdgpu_output.lock().latest = Some(reading("amdgpu", now, 1024));
        let fresh = sources.snapshot(None, now);
        assert_eq!(values(&fresh, GPU_MEMORY_TOTAL.id), [1024.0]);
        assert_eq!((values(&fresh, COLLECTOR_SUCCESS.id), fresh.gpus.len()), (vec![1.0], 1));
        assert_eq!(values(&fresh, SOURCE_TIMESTAMP.id), [now.unix_seconds()]);
        let old = sources.snapshot(None, now.plus(sources.max_gpu_age + Duration::from_secs(1)));
        assert_eq!(
            (values(&old, GPU_MEMORY_TOTAL.id), values(&old, COLLECTOR_SUCCESS.id)),
            (vec![], vec![0.0])
        );
        assert_eq!(values(&old, SOURCE_TIMESTAMP.id), [now.unix_seconds()], "its age is visible");
    }
}
