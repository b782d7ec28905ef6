//! GPUs: devices, their memory, and the memory of each process on them.
//!
//! The driver may hang for ever when a GPU falls off the bus. So a thread of its own asks it ([`worker`]), at its own
//! pace; the cycle takes the newest answer if it is fresh, and otherwise goes on without the GPU families. Nobody waits
//! for that thread, not even at exit.
//!
//! Not here: which container a process belongs to and what adds up (`attribute`).

mod nvml;
pub mod owners;
pub mod reading;
mod worker;

use std::sync::Arc;
use std::time::Duration;

use super::{Collector, Context, Outcome, Output};
use crate::catalog::*;
use crate::config::GpuSettings;
use crate::host::Roots;
use crate::series::{Label, Series};

pub use nvml::{describe, probe};
pub use reading::{Device, GpuProcess, Identity, Instance, Memory, Owner, Pids, Reading};

/// The collector.
#[derive(Debug)]
pub struct Gpu {
    settings: GpuSettings,
    worker: Option<worker::Worker>,
    seen: bool,
    took: Duration,
}

impl Gpu {
    /// A collector; the driver is not touched before the first cycle.
    pub fn new(settings: &GpuSettings) -> Self {
        Self { settings: settings.clone(), worker: None, seen: false, took: Duration::ZERO }
    }

    /// Whether a missing driver is a failure: it was asked for, was there before, or its device node exists.
    fn expected(&self, roots: &Roots) -> bool {
        self.settings.library.is_some()
            || self.seen
            || roots.has_device("nvidiactl")
            || roots.has_device("nvidia0")
    }
}

impl Collector for Gpu {
    fn name(&self) -> &'static str {
        "gpu"
    }

    fn collect(&mut self, context: &Context<'_>, output: &mut Output<'_>) -> Outcome {
        let v1 = context.hierarchy.is_some_and(|h| h.version == crate::discover::Version::V1);
        let worker = self
            .worker
            .get_or_insert_with(|| worker::Worker::start(self.settings.clone(), context.roots.clone(), v1));
        for reason in worker.take_faults() {
            output.faults.count(reason);
        }
        match worker.latest() {
            Some(reading)
                if context.now.since(reading.at) <= self.settings.interval + self.settings.deadline =>
            {
                self.seen = true;
                self.took = reading.took;
                let first = output.readings.add_gpus(Arc::clone(&reading));
                write(&reading, first, output.series);
                Outcome::Read
            }
            // the first answer may take a while: the driver initialises its devices
            _ if !worker.has_answered()
                && worker
                    .waits_since()
                    .is_some_and(|since| context.now.since(since) < self.settings.deadline) =>
            {
                Outcome::Absent
            }
            _ if self.expected(context.roots) => Outcome::Failed,
            _ => Outcome::Absent,
        }
    }

    fn background(&self) -> Option<Duration> {
        Some(self.took)
    }
}

/// What each device tells of itself alone. `first` is the number of the first of them.
pub fn write(reading: &Reading, first: u32, series: &mut Series) {
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
    }
}
