//! GPUs of DRM drivers (amdgpu, i915, xe, nouveau and others): the memory of each device and process, and whose work it is.
//!
//! The kernel tells it in `/proc/PID/fdinfo`, in words that all these drivers have in common, and amdgpu tells its memory
//! in sysfs. No library of a vendor is needed. The families are those of NVML's source (`collect::gpu`); a GPU that has
//! NVIDIA's driver is NVML's alone.
//!
//! * [`devices`] which GPUs there are
//! * [`search`] which processes hold one
//! * [`holder`] what the driver tells of the descriptors of one process
//! * [`books`] what each of them holds, with nothing counted twice
//! * [`engines`] how busy they keep it
//!
//! A host without such a GPU pays a look at `/sys/class/drm` every ten seconds; no process is looked at, and there is no
//! thread.
//!
//! Not here: which container a process belongs to and what adds up (`attribute`).

mod books;
mod devices;
mod engines;
mod holder;
mod search;
mod worker;

pub use worker::Reader;

use std::sync::Arc;
use std::time::Duration;

use super::{Collector, Context, Outcome, Output, gpu};
use crate::catalog::COLLECTOR_SUCCESS;
use crate::clock::Moment;
use crate::config::GpuSettings;
use crate::host::{ReadError, Roots};

/// The collector's name.
pub const NAME: &str = "drm";
/// Pause between two looks for a GPU on a host that had none.
const LOOK: Duration = Duration::from_secs(10);

/// What can be read on this host, for `doctor`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Name and driver of each GPU.
    pub gpus: Vec<String>,
    /// Processes whose open files could be looked at within the first reading.
    pub readable: usize,
    /// Processes whose open files could not, for want of permission.
    pub denied: usize,
}

/// Looks for GPUs of DRM drivers, and if there are any, once at the processes.
///
/// # Errors
/// Devices or processes cannot be listed.
pub fn probe(roots: &Roots) -> Result<Probe, ReadError> {
    let cards = devices::list(roots, &mut Vec::new())?;
    let gpus: Vec<_> =
        cards.iter().map(|card| format!("{} ({})", card.identity.index, card.driver)).collect();
    if gpus.is_empty() {
        return Ok(Probe { gpus, readable: 0, denied: 0 });
    }
    let found = search::Search::default().round(roots, false)?;
    Ok(Probe { gpus, readable: found.readable, denied: found.denied })
}

/// The collector.
#[derive(Debug)]
pub struct Drm {
    settings: GpuSettings,
    worker: Option<worker::Worker>,
    looked: Option<Moment>,
    seen: bool,
    /// When the reading that was shown last was complete.
    last: Option<Moment>,
    took: Duration,
}

impl Drm {
    /// A collector. Its thread starts when there is a GPU.
    pub fn new(settings: &GpuSettings) -> Self {
        let settings = settings.clone();
        Self { settings, worker: None, looked: None, seen: false, last: None, took: Duration::ZERO }
    }

    /// Starts the thread if there is a GPU for it.
    fn look(&mut self, context: &Context<'_>, output: &mut Output<'_>) {
        if self.worker.is_some() || self.looked.is_some_and(|looked| context.now.since(looked) < LOOK) {
            return;
        }
        self.looked = Some(context.now);
        let mut faults = Vec::new();
        let cards = output.faults.value(devices::list(context.roots, &mut faults));
        faults.into_iter().for_each(|reason| output.faults.count(reason));
        if cards.is_some_and(|cards| !cards.is_empty()) {
            let v1 = context.hierarchy.is_some_and(|h| h.version == crate::discover::Version::V1);
            self.worker = Some(worker::Worker::start(&self.settings, context.roots.clone(), v1, context.now));
        }
    }
}

impl Collector for Drm {
    fn name(&self) -> &'static str {
        NAME
    }

    fn collect(&mut self, context: &Context<'_>, output: &mut Output<'_>) -> Outcome {
        self.look(context, output);
        let Some(worker) = &mut self.worker else { return Outcome::Absent };
        worker.keep_alive(context.now);
        for reason in worker.take_faults() {
            output.faults.count(reason);
        }
        let longest = self.settings.interval + self.settings.deadline;
        match worker.latest().filter(|reading| context.now.since(reading.at) <= longest) {
            Some(reading) => {
                self.seen = true;
                self.took = reading.took;
                let proven = f64::from(u8::from(reading.pids == gpu::Pids::Proven));
                output.series.global(COLLECTOR_SUCCESS, ["drm_attribution".into()], proven);
                // several cycles may see one reading
                if self.last.replace(reading.at) != Some(reading.at) {
                    let devices = reading.devices.iter().map(gpu::Sampled::of).collect();
                    output.readings.gpu_samples.push(gpu::Sample { at: reading.at, is_dated: true, devices });
                }
                let first = output.readings.add_gpus(Arc::clone(&reading));
                gpu::write(&reading, first, output.series);
                Outcome::Read
            }
            None if !self.seen && is_starting(worker, context.now, self.settings.deadline) => Outcome::Absent,
            None => Outcome::Failed,
        }
    }

    fn background(&self) -> Option<Duration> {
        Some(self.took)
    }
}

/// The first answer may take a while, there are many processes to look at; but not for ever.
fn is_starting(worker: &worker::Worker, now: Moment, deadline: Duration) -> bool {
    !worker.has_answered() && now.since(worker.started()) < deadline
}
