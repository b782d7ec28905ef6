//! GPUs: devices, their memory, and the memory of each process on them.
//!
//! The driver may hang for ever when a GPU falls off the bus. So a thread of its own asks it ([`worker`]), at its own
//! pace; the cycle takes the newest answer if it is fresh, and otherwise goes on without the GPU families. Nobody waits
//! for that thread, not even at exit.
//!
//! Not here: which container a process belongs to and what adds up (`attribute`).

mod control;
pub mod health;
mod nvml;
pub mod owners;
mod probe;
pub mod reading;
mod worker;

use std::sync::Arc;
use std::time::Duration;

use super::{Collector, Context, Outcome, Output};
use crate::catalog::*;
use crate::config::GpuSettings;
use crate::host::Roots;
use crate::series::{Label, Series};

pub use control::Control;
pub use health::{Health, Xid};
pub use nvml::library::was_opened;
pub use probe::{Probe, probe};
pub use reading::{Device, GpuProcess, Identity, Instance, Memory, Owner, Pids, Reading, Sample, Sampled};

/// The collector.
#[derive(Debug)]
pub struct Gpu {
    settings: GpuSettings,
    control: Arc<Control>,
    worker: Option<worker::Worker>,
    seen: bool,
    took: Duration,
    told: Option<Pids>,
}

impl Gpu {
    /// A collector; the driver is not touched before the first cycle.
    pub fn new(settings: &GpuSettings, control: Arc<Control>) -> Self {
        let settings = settings.clone();
        Self { settings, control, worker: None, seen: false, took: Duration::ZERO, told: None }
    }

    /// Whether a missing driver is a failure: it was asked for, was there before, or its device node exists.
    fn expected(&self, roots: &Roots) -> bool {
        self.settings.library.is_some()
            || self.seen
            || roots.has_device("nvidiactl")
            || roots.has_device("nvidia0")
    }

    /// Says once why no process is named.
    fn tell(&mut self, pids: Pids) {
        if let (Pids::Withheld(reason), true) = (pids, self.told != Some(pids)) {
            tracing::warn!(
                reason,
                "GPU memory stays unattributed; start memledger with --pid=host (Docker), pid: host (Compose) or hostPID: true (Kubernetes)"
            );
        }
        self.told = Some(pids);
    }
}

impl Collector for Gpu {
    fn name(&self) -> &'static str {
        "gpu"
    }

    fn collect(&mut self, context: &Context<'_>, output: &mut Output<'_>) -> Outcome {
        let v1 = context.hierarchy.is_some_and(|h| h.version == crate::discover::Version::V1);
        let worker = self.worker.get_or_insert_with(|| {
            let control = Arc::clone(&self.control);
            worker::Worker::start(self.settings.clone(), context.roots.clone(), v1, control)
        });
        let look = worker.look(context.now);
        for reason in look.faults {
            output.faults.count(reason);
        }
        output.readings.gpu_samples.extend(look.samples);
        let released = self.control.remaining(context.now);
        match look.latest {
            Some(reading)
                if context.now.since(reading.at) <= self.settings.interval + self.settings.deadline =>
            {
                self.seen = true;
                self.took = reading.took;
                self.tell(reading.pids);
                let proven = f64::from(u8::from(reading.pids == Pids::Proven));
                output.series.global(COLLECTOR_SUCCESS, ["gpu_attribution".into()], proven);
                let first = output.readings.add_gpus(Arc::clone(&reading));
                write(&reading, first, output.series);
                Outcome::Read
            }
            _ if released.is_some() && self.control.is_closed() => Outcome::Absent,
            // the first answer may take a while: the driver initialises its devices
            _ if !look.answered && context.now.since(look.waits_since) < self.settings.deadline => {
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
        device.health.write(number, series);
    }
}
