//! GPUs of NVIDIA: exports the newest reading if it is recent enough, and otherwise no GPU families.

use std::sync::Arc;
use std::time::Duration;

use super::gpu_readings::ReadingExport;
use super::{CollectOutcome, Collector, Context, Output};
use crate::config::GpuSettings;
use crate::gpu::{DriverState, supervisor};
use crate::host::HostPaths;

/// The collector of GPUs with NVIDIA's driver.
#[derive(Debug)]
pub struct GpuCollector {
    settings: GpuSettings,
    driver_state: Arc<DriverState>,
    /// Whether the thread that supervises the NVML process was started.
    is_started: bool,
    export: ReadingExport,
}

impl GpuCollector {
    /// Returns a collector. It does not touch the driver before the first cycle.
    pub fn new(settings: &GpuSettings, driver_state: Arc<DriverState>) -> Self {
        let advice =
            "start memledger with --pid=host (Docker), pid: host (Compose) or hostPID: true (Kubernetes)";
        let export = ReadingExport::new(settings, "gpu_attribution", advice);
        Self { settings: settings.clone(), driver_state, is_started: false, export }
    }

    /// Returns whether a missing driver is a failure: its library is configured, it was there before, or its device node
    /// exists.
    fn is_expected(&self, host_paths: &HostPaths) -> bool {
        self.settings.library.is_some()
            || self.export.has_succeeded
            || host_paths.has_device("nvidiactl")
            || host_paths.has_device("nvidia0")
    }
}

impl Collector for GpuCollector {
    fn name(&self) -> &'static str {
        "gpu"
    }

    fn collect(&mut self, context: &Context<'_>, output: &mut Output<'_>) -> CollectOutcome {
        let v1 = context.hierarchy.is_some_and(|h| h.version == crate::discover::Version::V1);
        if !std::mem::replace(&mut self.is_started, true) {
            let driver_state = Arc::clone(&self.driver_state);
            supervisor::start(self.settings.clone(), context.host_paths.clone(), v1, driver_state);
        }
        let taken = self.driver_state.output.lock().take();
        if self.is_expected(context.host_paths) {
            self.driver_state.expect_driver();
        }
        let is_starting =
            taken.is_starting(context.now, self.settings.deadline * supervisor::FIRST_READING_FACTOR);
        let is_released = self.driver_state.remaining(context.now).is_some();
        match self.export.export(taken, context, output) {
            true => CollectOutcome::Ok,
            _ if is_released && self.driver_state.is_closed() => CollectOutcome::NotPresent,
            // the first reading may take a while: the driver initialises its devices
            _ if is_starting => CollectOutcome::NotPresent,
            _ if self.is_expected(context.host_paths) => CollectOutcome::Failed,
            _ => CollectOutcome::NotPresent,
        }
    }

    fn background(&self) -> Option<Duration> {
        Some(self.export.read_duration)
    }
}
