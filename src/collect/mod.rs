//! One file per source; here, the trait they share and the list of all of them.
//!
//! A collector reads its source once per cycle, writes the samples that need nothing else, and leaves the readings that
//! `attribute` and `ledger` go on with. It fails alone: its samples of that cycle are taken back, the failure is a
//! series, and the others go on.

pub mod cgroup;
pub mod drm;
pub mod gpu;
pub mod host;
pub mod kernel_log;
pub mod oom_cgroups;
pub mod oom_counter;
pub mod own;
pub mod process;
pub mod pss;
pub mod pushed;
pub mod room;
pub mod shm;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::Moment;
use crate::config::Config;
use crate::discover::{Hierarchy, Inventory};
use crate::host::{FAULT_REASONS, ReadError, Roots};
use crate::series::Series;

/// What a collector may look at.
#[derive(Debug)]
pub struct Context<'a> {
    /// When the cycle began.
    pub now: Moment,
    /// Where the host's files are.
    pub roots: &'a Roots,
    /// The memory controller's hierarchy; `None` on a host without one.
    pub hierarchy: Option<&'a Hierarchy>,
    /// The running containers; a container's number is its index here.
    pub inventory: &'a Arc<Inventory>,
}

/// What collectors leave for the steps after them.
#[derive(Debug, Default)]
pub struct Readings {
    /// Memory of each container, by its number. `None`: gone, or not there yet.
    pub memory: Vec<Option<cgroup::Memory>>,
    /// The memory of every container that is there was read: their sum is no guess.
    pub memory_complete: bool,
    /// Memory of the host.
    pub host: Option<room::HostMemory>,
    /// Processes of all containers.
    pub processes: process::Processes,
    /// Newest proportional shares.
    pub pss: Arc<pss::Shares>,
    /// Newest answers of all GPU sources, numbered as [`Readings::add_gpus`] says.
    pub gpus: Vec<Arc<gpu::Reading>>,
    /// What was held on GPUs since the cycle before, oldest first within a source.
    pub gpu_samples: Vec<gpu::Sample>,
}

impl Readings {
    /// Forgets the cycle before, so that a collector that fails leaves nothing old behind.
    pub fn begin(&mut self) {
        self.memory.clear();
        self.memory_complete = false;
        self.host = None;
        self.processes.clear();
        self.gpus.clear();
        self.gpu_samples.clear();
    }

    /// Adds the answer of a GPU source. Returns the number of its first device in the rows of this cycle; the others
    /// follow it.
    pub fn add_gpus(&mut self, reading: Arc<gpu::Reading>) -> u32 {
        let first = self.gpus.iter().map(|reading| reading.devices.len()).sum::<usize>();
        self.gpus.push(reading);
        first as u32
    }

    /// GPUs of all sources that answered once and do not now. Their numbers follow those of all devices.
    pub fn silent_gpus(&self) -> impl Iterator<Item = (u32, &gpu::Device)> {
        let devices = self.gpus.iter().map(|reading| reading.devices.len()).sum::<usize>() as u32;
        (devices..).zip(self.gpus.iter().flat_map(|reading| &reading.silent))
    }

    /// Each device of all GPU sources with the reading that it is in, in the order of their numbers.
    pub fn gpu_devices(&self) -> impl Iterator<Item = (&Arc<gpu::Reading>, &gpu::Device)> {
        self.gpus.iter().flat_map(|reading| reading.devices.iter().map(move |device| (reading, device)))
    }
}

/// Where a collector writes.
#[derive(Debug)]
pub struct Output<'a> {
    /// Samples.
    pub series: &'a mut Series,
    /// Readings for the next steps.
    pub readings: &'a mut Readings,
    /// Failed readings.
    pub faults: &'a mut Faults,
}

/// How a read of a source ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It worked.
    Read,
    /// This host does not have the source.
    Absent,
    /// The source is there, or should be, and could not be read.
    Failed,
}

/// One source of readings.
pub trait Collector: Send {
    /// Its name in `--collector.NAME` and in the label `collector`.
    fn name(&self) -> &'static str;
    /// Reads the source once.
    fn collect(&mut self, context: &Context<'_>, output: &mut Output<'_>) -> Outcome;
    /// How long the last read took, if a thread of the collector's own does the reading.
    fn background(&self) -> Option<Duration> {
        None
    }
}

/// All collectors that are switched on, in the order in which they build on each other. `control` is the GPU
/// collector's.
pub fn all(config: &Config, control: &Arc<gpu::Control>) -> Vec<Box<dyn Collector>> {
    let every: [Box<dyn Collector>; 8] = [
        Box::new(own::Own::default()),
        Box::new(cgroup::Cgroups::default()),
        Box::new(host::Host::default()),
        Box::new(process::ProcessTable::default()),
        Box::new(shm::SharedMemory::default()),
        Box::new(pss::Pss::new(config.pss_interval)),
        Box::new(gpu::Gpu::new(&config.gpu, Arc::clone(control))),
        Box::new(drm::Drm::new(&config.gpu)),
    ];
    every.into_iter().filter(|collector| config.collectors.contains(collector.name())).collect()
}

/// Counts of failed readings since memledger's start, by collector and reason.
#[derive(Debug, Default)]
pub struct Faults {
    collector: &'static str,
    counts: BTreeMap<(&'static str, &'static str), u64>,
}

impl Faults {
    /// Following faults are this collector's. Its reasons are born at 0 here.
    pub fn enter(&mut self, collector: &'static str) {
        self.collector = collector;
        for reason in FAULT_REASONS {
            self.born(reason);
        }
    }

    /// A reason of the current collector that can occur is 0 before it does.
    pub fn born(&mut self, reason: &'static str) {
        self.counts.entry((self.collector, reason)).or_insert(0);
    }

    /// Counts an error if it is a fault; *gone* and *absent* are none.
    pub fn note(&mut self, error: &ReadError) {
        if let Some(reason) = error.fault_reason() {
            self.count(reason);
            tracing::debug!(
                collector = self.collector,
                error = error as &dyn std::error::Error,
                "reading failed"
            );
        }
    }

    /// Counts a fault by its reason.
    pub fn count(&mut self, reason: &'static str) {
        *self.counts.entry((self.collector, reason)).or_insert(0) += 1;
    }

    /// The value of a reading; a fault is counted, and no value is `None`.
    pub fn value<T>(&mut self, reading: Result<T, ReadError>) -> Option<T> {
        reading.map_err(|error| self.note(&error)).ok()
    }

    /// Collector, reason and count.
    pub fn counts(&self) -> impl Iterator<Item = (&'static str, &'static str, u64)> {
        self.counts.iter().map(|((collector, reason), count)| (*collector, *reason, *count))
    }
}
