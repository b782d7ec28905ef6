//! GPUs of DRM drivers (amdgpu, i915, xe, nouveau and others): the memory of each device and process, and utilization.
//!
//! The kernel reports both in `/proc/PID/fdinfo`, in a format that all these drivers share; amdgpu also reports device
//! memory in sysfs. No vendor library is needed. The metric families are those of the NVML source (`collect::gpu`); a GPU
//! with NVIDIA's driver is read by NVML only.
//!
//! * [`devices`] lists the GPUs
//! * [`fd_scanner`] finds the processes that have a GPU open
//! * [`drm_process`] reads the GPU descriptors of one process
//! * [`client_memory`] computes the memory of each process, with nothing counted twice
//! * [`engines`] computes the utilization by each process
//!
//! On a host without such a GPU the only cost is to list `/sys/class/drm` every ten seconds: no process is read, and there
//! is no thread.
//!
//! Not here: attribution of processes to containers, and sums (`attribute`).
mod client_memory;
mod devices;
mod engines;
mod drm_process;
mod fd_scanner;
mod worker;

pub use worker::DrmReader;

use std::sync::Arc;
use std::time::Duration;

use super::{CollectOutcome, Collector, Context, Output, gpu};
use crate::catalog::COLLECTOR_SUCCESS;
use crate::clock::Timestamp;
use crate::config::GpuSettings;
use crate::host::{HostPaths, ReadError};

/// The collector's name.
pub const NAME: &str = "drm";
/// How often to look for a GPU on a host that had none.
const DISCOVERY_INTERVAL: Duration = Duration::from_secs(10);

/// The result of a probe of this host, for `doctor`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrmProbe {
    /// Name and driver of each GPU.
    pub gpus: Vec<String>,
    /// Processes whose descriptors could be read within the first reading.
    pub readable: usize,
    /// Processes whose descriptors could not be read for lack of permission.
    pub denied: usize,
}

/// Lists the GPUs of DRM drivers, and if there are any, scans the processes once.
///
/// # Errors
/// Devices or processes cannot be listed.
pub fn probe(host_paths: &HostPaths) -> Result<DrmProbe, ReadError> {
    let cards = devices::list(host_paths, &mut Vec::new())?;
    let gpus: Vec<_> =
        cards.iter().map(|card| format!("{} ({})", card.identity.index, card.driver)).collect();
    if gpus.is_empty() {
        return Ok(DrmProbe { gpus, readable: 0, denied: 0 });
    }
    let found = fd_scanner::FdScanner::default().scan(host_paths, false)?;
    Ok(DrmProbe { gpus, readable: found.readable, denied: found.denied })
}

/// The collector of GPUs with DRM drivers.
#[derive(Debug)]
pub struct Drm {
    settings: GpuSettings,
    worker: Option<worker::DrmWorker>,
    last_discovery: Option<Timestamp>,
    has_succeeded: bool,
    /// The time of the reading that was exported last.
    last_reading: Option<Timestamp>,
    read_duration: Duration,
}

impl Drm {
    /// Returns a collector. Its thread starts once there is a GPU.
    pub fn new(settings: &GpuSettings) -> Self {
        let settings = settings.clone();
        Self {
            settings,
            worker: None,
            last_discovery: None,
            has_succeeded: false,
            last_reading: None,
            read_duration: Duration::ZERO,
        }
    }

    /// Starts the thread if there is a GPU and no thread yet.
    fn start_if_gpu_present(&mut self, context: &Context<'_>, output: &mut Output<'_>) {
        if self.worker.is_some()
            || self.last_discovery.is_some_and(|last| context.now.since(last) < DISCOVERY_INTERVAL)
        {
            return;
        }
        self.last_discovery = Some(context.now);
        let mut read_errors = Vec::new();
        let cards = output.read_errors.value(devices::list(context.host_paths, &mut read_errors));
        read_errors.into_iter().for_each(|reason| output.read_errors.count(reason));
        if cards.is_some_and(|cards| !cards.is_empty()) {
            let v1 = context.hierarchy.is_some_and(|h| h.version == crate::discover::Version::V1);
            self.worker =
                Some(worker::DrmWorker::start(&self.settings, context.host_paths.clone(), v1, context.now));
        }
    }
}

impl Collector for Drm {
    fn name(&self) -> &'static str {
        NAME
    }

    fn collect(&mut self, context: &Context<'_>, output: &mut Output<'_>) -> CollectOutcome {
        self.start_if_gpu_present(context, output);
        let Some(worker) = &mut self.worker else { return CollectOutcome::NotPresent };
        worker.restart_if_ended(context.now);
        for reason in worker.take_read_errors() {
            output.read_errors.count(reason);
        }
        let max_age = self.settings.interval + self.settings.deadline;
        match worker.latest().filter(|reading| context.now.since(reading.at) <= max_age) {
            Some(reading) => {
                self.has_succeeded = true;
                self.read_duration = reading.took;
                let is_trusted = f64::from(u8::from(reading.pids == gpu::PidTrust::Trusted));
                output.series.global(COLLECTOR_SUCCESS, ["drm_attribution".into()], is_trusted);
                // several cycles may use the same reading
                if self.last_reading.replace(reading.at) != Some(reading.at) {
                    let devices = reading.devices.iter().map(gpu::DeviceSample::of).collect();
                    output.cycle_data.gpu_samples.push(gpu::GpuSample {
                        at: reading.at,
                        is_dated: true,
                        devices,
                    });
                }
                let first = output.cycle_data.add_gpus(Arc::clone(&reading));
                gpu::write(&reading, first, output.series);
                CollectOutcome::Ok
            }
            None if !self.has_succeeded && is_starting(worker, context.now, self.settings.deadline) => {
                CollectOutcome::NotPresent
            }
            None => CollectOutcome::Failed,
        }
    }

    fn background(&self) -> Option<Duration> {
        Some(self.read_duration)
    }
}

/// Returns whether the first reading is still within its deadline: it may take a while with many processes.
fn is_starting(worker: &worker::DrmWorker, now: Timestamp, deadline: Duration) -> bool {
    !worker.has_answered() && now.since(worker.started()) < deadline
}
