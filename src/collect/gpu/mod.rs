//! GPUs: devices, their memory, and the memory of each process on them.
//!
//! The driver may hang for ever when a GPU falls off the bus. So a thread of its own asks it ([`worker`]), at its own
//! pace; the cycle takes the newest answer if it is fresh, and otherwise goes on without the GPU families. Nobody waits
//! for that thread, not even at exit.
//!
//! Not here: which container a process belongs to and what adds up (`attribute`).

mod nvml;
mod worker;

use std::sync::Arc;
use std::time::Duration;

use super::{Collector, Context, Outcome, Output};
use crate::catalog::*;
use crate::clock::Moment;
use crate::config::GpuSettings;
use crate::host::Roots;
use crate::series::{Label, Series};

pub use nvml::{describe, probe};

/// One answer of the driver.
#[derive(Clone, Debug)]
pub struct Reading {
    /// When it was complete.
    pub at: Moment,
    /// How long the driver took.
    pub took: Duration,
    /// Version of the driver.
    pub driver_version: Option<Arc<str>>,
    /// CUDA version that the driver supports.
    pub cuda_version: Option<Arc<str>>,
    /// How many devices the driver counts, also those that do not answer.
    pub counted: usize,
    /// The devices that answered.
    pub devices: Vec<Device>,
    /// Pids of the driver are pids of the host as seen here. If not, no process can be named.
    pub pids_are_the_hosts: bool,
    /// Devices that are there and did not answer, and fields that failed: one entry a fault.
    pub faults: Vec<&'static str>,
}

/// One GPU.
#[derive(Clone, Debug)]
pub struct Device {
    /// What does not change.
    pub identity: Arc<Identity>,
    /// Its memory; `None` if the device does not tell.
    pub memory: Option<Memory>,
    /// Its processes, each pid once; `None` if the device does not tell.
    pub processes: Option<Vec<GpuProcess>>,
    /// The processes held more than `used`, also when read again twice.
    pub raced: bool,
}

/// What does not change about a GPU while the driver is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// NVML index.
    pub index: Arc<str>,
    /// NVML UUID.
    pub uuid: Arc<str>,
    /// Model name.
    pub model: Arc<str>,
    /// Address on the PCI bus.
    pub pci_bus_id: Arc<str>,
    /// Compute capability, such as `9.0`.
    pub compute_capability: Arc<str>,
    /// Number of CUDA cores.
    pub cuda_cores: Arc<str>,
}

/// Memory of a GPU in bytes: total = used + free + reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// All of it.
    pub total: u64,
    /// Used, without what is reserved.
    pub used: u64,
    /// Free.
    pub free: u64,
    /// Kept by driver and firmware.
    pub reserved: u64,
}

/// One process on a GPU.
#[derive(Clone, Debug)]
pub struct GpuProcess {
    /// Its pid, as the driver names it.
    pub pid: u32,
    /// GPU memory in bytes; `None` where the driver does not tell (N/A).
    pub used: Option<u64>,
    /// Who it is; `None` if no such process can be seen, or it is younger than the reading.
    pub owner: Option<Owner>,
}

/// A process on a GPU, as the host knows it.
#[derive(Clone, Debug)]
pub struct Owner {
    /// Clock ticks from boot to its start.
    pub start_ticks: u64,
    /// Its name, made printable.
    pub comm: Arc<str>,
    /// Its cgroup in the hierarchy of the memory controller.
    pub cgroup: Arc<str>,
}

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
        output.readings.gpu = None;
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
                write(&reading, output.series);
                output.readings.gpu = Some(reading);
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

/// What a device tells of itself alone.
fn write(reading: &Reading, series: &mut Series) {
    let text = |value: &Option<Arc<str>>| value.as_ref().map_or(Label::Fixed(""), Label::from);
    for (number, device) in reading.devices.iter().enumerate() {
        let identity = &device.identity;
        let labels = [
            Label::from(&identity.model),
            "nvidia".into(),
            text(&reading.driver_version),
            text(&reading.cuda_version),
            (&identity.compute_capability).into(),
            (&identity.cuda_cores).into(),
            (&identity.pci_bus_id).into(),
        ];
        let number = number as u32;
        series.gpu(GPU_INFO, number, labels, 1.0);
        if let Some(memory) = device.memory {
            series.gpu(GPU_MEMORY_TOTAL, number, [], memory.total as f64);
            series.gpu(GPU_MEMORY_USED, number, [], memory.used as f64);
            series.gpu(GPU_MEMORY_FREE, number, [], memory.free as f64);
            series.gpu(GPU_MEMORY_RESERVED, number, [], memory.reserved as f64);
        }
    }
}
