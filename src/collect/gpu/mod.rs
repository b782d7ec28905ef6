//! GPUs: devices, their memory, and the memory of each process on them.
//!
//! The driver's library may hang for ever when a GPU falls off the bus, or crash. So only a process of its own loads it
//! ([`driver_process`]), which a thread supervises ([`supervisor`]) at its own interval. Each cycle uses the newest reading if
//! that is recent enough, and otherwise exports no GPU families. Nothing waits for that thread.
//!
//! Not here: attribution of processes to containers, and sums (`attribute`).

mod assembler;
pub mod device_metrics;
pub mod driver_process;
mod driver_state;
mod nvml;
pub mod pid_resolver;
mod probe;
pub mod protocol;
pub mod reader_output;
mod supervisor;
pub mod types;

use std::sync::Arc;
use std::time::Duration;

use super::{CollectOutcome, Collector, Context, Output};
use crate::catalog::*;
use crate::config::GpuSettings;
use crate::host::HostPaths;
use crate::series::{Label, Series};

pub use device_metrics::{DeviceHealth, XidCount};
pub use driver_state::DriverState;
pub use probe::{NvmlProbe, probe};
pub use reader_output::{ReaderOutput, ReadingExport, SharedOutput};
pub use types::{
    DeviceMemory, DeviceSample, GpuDevice, GpuIdentity, GpuProcess, GpuReading, GpuSample, MigInstance,
    PidTrust,
};

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

/// Writes the series of each device by itself. `first` is the number of the first device.
pub fn write(reading: &GpuReading, first: u32, series: &mut Series) {
    let text = |value: &Option<Arc<str>>| value.as_ref().map_or(Label::Fixed(""), Label::from);
    for (number, device) in (first..).zip(&reading.devices) {
        let identity = &device.identity;
        let labels = [
            Label::from(&identity.model),
            identity.vendor.into(),
            text(&reading.driver_version),
            text(&reading.cuda_version),
            (&identity.compute_capability).into(),
            (&identity.cuda_cores).into(),
            (&identity.pci_bus_id).into(),
            identity.instance.as_ref().map_or(Label::Fixed(""), |instance| (&instance.uuid).into()),
        ];
        series.gpu(GPU_INFO, number, labels, 1.0);
        let memory = device.memory;
        let parts = [
            (GPU_MEMORY_TOTAL, memory.total),
            (GPU_MEMORY_USED, memory.used),
            (GPU_MEMORY_FREE, memory.free),
            (GPU_MEMORY_RESERVED, memory.reserved),
        ];
        for (family, bytes) in parts {
            if let Some(bytes) = bytes {
                series.gpu(family, number, [], bytes as f64);
            }
        }
        device.health.write(number, series);
    }
}
