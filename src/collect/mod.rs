//! Collectors, one file per source; this file holds their trait and the list of all of them.
//!
//! A collector reads its source once per cycle, writes the samples that need no other source, and leaves data for
//! `attribute` and `ledger`. Collectors fail independently: the samples of a failed collector are removed from the
//! cycle, the failure is exported as a series, and the others continue.

pub mod cgroup;
mod cgroup_limits;
pub mod container_cpu;
pub mod container_memory;
pub mod cycle;
pub mod limit_stall;
mod pod_memory;
mod amdgpu;
mod gpu_readings;
mod nvml;
pub mod host;
pub mod self_metrics;
pub mod process;
pub mod pss;
pub mod memory_headroom;
pub mod shm;
mod container_owner;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use crate::clock::Timestamp;
use crate::config::Config;
use crate::discover::{ContainerId, Hierarchy, Inventory};
use crate::gpu;
use crate::host::{HostPaths, READ_ERROR_REASONS, ReadError};
use crate::reporter::reports::Reports;
use crate::series::Series;

/// Input of a collector.
#[derive(Debug)]
pub struct Context<'a> {
    /// Start of the cycle.
    pub now: Timestamp,
    /// Paths of the host's files.
    pub host_paths: &'a HostPaths,
    /// The memory controller's hierarchy; `None` on a host without one.
    pub hierarchy: Option<&'a Hierarchy>,
    /// The running containers; a container's number is its index here.
    pub inventory: &'a Arc<Inventory>,
}

/// Data that collectors leave for the next steps.
#[derive(Debug, Default)]
pub struct CycleData {
    /// Memory of each container, by its number; `None` if its cgroup is gone or does not exist yet.
    pub memory: Vec<Option<container_memory::ContainerMemory>>,
    /// CPU times of each container, by its number; `None` as for [`CycleData::memory`].
    pub cpu: Vec<Option<container_cpu::CpuTimes>>,
    /// Used bytes, if they are known, and total ones of each container's `/dev/shm`, by its number, also of one that containers share; `None` if it has
    /// none of its own.
    pub shm: Vec<Option<(Option<u64>, u64)>>,
    /// True if the memory of every existing container was read, so that their sum is exact.
    pub memory_complete: bool,
    /// The number of open files of cgroups, and of those that could not be opened.
    pub cgroup_files: usize,
    /// Memory of the host.
    pub host: Option<cycle::HostMemory>,
    /// Memory of pods.
    pub pods: Vec<cycle::PodMemory>,
    /// Free swap of the host in the last cycle that read it: containers are read before.
    pub free_swap: u64,
    /// Processes of all containers.
    pub processes: process::Processes,
    /// Newest proportional shares.
    pub pss: Arc<pss::PssShares>,
    /// Newest readings of all GPU sources, numbered as in [`CycleData::add_gpus`].
    pub gpus: Vec<Arc<gpu::GpuReading>>,
    /// GPU memory samples since the previous cycle, oldest first within a source.
    pub gpu_samples: Vec<gpu::GpuSample>,
    /// Reports of processes from inside; `None` if none are received.
    pub reports: Option<Reports>,
    /// A collector of GPU figures found a GPU, or failed where there should be one.
    pub has_gpu_source: bool,
}

impl CycleData {
    /// Clears the data of the previous cycle, so that a failing collector leaves nothing stale.
    pub fn begin(&mut self) {
        self.memory.clear();
        self.cpu.clear();
        self.shm.clear();
        self.memory_complete = false;
        self.cgroup_files = 0;
        self.host = None;
        self.pods.clear();
        self.processes.clear();
        self.gpus.clear();
        self.gpu_samples.clear();
        self.reports = None;
        self.has_gpu_source = false;
    }

    /// Adds the reading of a GPU source. Returns the number of its first device in the rows of this cycle; its other
    /// devices have the next numbers.
    pub fn add_gpus(&mut self, reading: Arc<gpu::GpuReading>) -> u32 {
        let first = self.gpus.iter().map(|reading| reading.devices.len()).sum::<usize>();
        self.gpus.push(reading);
        first as u32
    }

    /// Returns GPUs that were reported before but not now, of all sources. Their numbers follow those of all devices.
    pub fn silent_gpus(&self) -> impl Iterator<Item = (u32, &gpu::GpuDevice)> {
        let devices = self.gpus.iter().map(|reading| reading.devices.len()).sum::<usize>() as u32;
        (devices..).zip(self.gpus.iter().flat_map(|reading| &reading.silent))
    }

    /// Returns each device of all GPU sources with its reading, in the order of the device numbers.
    pub fn gpu_devices(&self) -> impl Iterator<Item = (&Arc<gpu::GpuReading>, &gpu::GpuDevice)> {
        self.gpus.iter().flat_map(|reading| reading.devices.iter().map(move |device| (reading, device)))
    }
}

/// Output of a collector.
#[derive(Debug)]
pub struct Output<'a> {
    /// Samples.
    pub series: &'a mut Series,
    /// Data for the next steps.
    pub cycle_data: &'a mut CycleData,
    /// Failed reads.
    pub read_errors: &'a mut ReadErrors,
}

/// Outcome of reading a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CollectOutcome {
    /// The source was read.
    Ok,
    /// This host does not have the source.
    NotPresent,
    /// The source exists, or should exist, and could not be read.
    Failed,
}

/// A source of data.
pub trait Collector: Send {
    /// Returns its name in `--collector.NAME` and in the label `collector`.
    fn name(&self) -> &'static str;
    /// Reads the source once.
    fn collect(&mut self, context: &Context<'_>, output: &mut Output<'_>) -> CollectOutcome;
    /// Returns the duration of the last read if the collector reads on a thread of its own.
    fn background(&self) -> Option<Duration> {
        None
    }
}

/// Returns all enabled collectors, in the order in which they depend on each other. `driver_state` is passed to the
/// GPU collector.
pub fn all(
    config: &Config,
    driver_state: &Arc<gpu::DriverState>,
    amdgpu_output: &Arc<gpu::SharedOutput>,
) -> Vec<Box<dyn Collector>> {
    let host_shm = Arc::default();
    let every: Vec<Box<dyn Collector>> = vec![
        Box::new(self_metrics::SelfMetrics::default()),
        Box::new(cgroup::Cgroups::default()),
        Box::new(host::HostCollector::new(Arc::clone(&host_shm))),
        Box::new(process::ProcessTable::default()),
        Box::new(shm::SharedMemory::new(host_shm)),
        Box::new(pss::Pss::new(config.pss_interval)),
        Box::new(nvml::GpuCollector::new(&config.gpu, Arc::clone(driver_state))),
        Box::new(amdgpu::AmdGpu::new(&config.gpu, Arc::clone(amdgpu_output))),
    ];
    every.into_iter().filter(|collector| config.collectors.contains(collector.name())).collect()
}

/// Minimum time between two warnings about the same container for the same reason.
const WARNING_INTERVAL: Duration = Duration::from_secs(600);
/// Maximum number of warnings about containers in that time.
const MAX_WARNINGS: usize = 1_000;

/// Counts of failed reads since memledger started, by collector and reason. Names containers that cause them in the log.
#[derive(Debug, Default)]
pub struct ReadErrors {
    collector: &'static str,
    counts: BTreeMap<(&'static str, &'static str), u64>,
    /// When the log last named a container, by collector and reason.
    warned: HashMap<(&'static str, &'static str, ContainerId), Timestamp>,
}

impl ReadErrors {
    /// Sets the collector to which following errors are counted, and initialises its reasons at 0.
    pub fn enter(&mut self, collector: &'static str) {
        self.collector = collector;
        for reason in READ_ERROR_REASONS {
            self.init_at_zero(reason);
        }
    }

    /// Initialises a possible reason of the current collector at 0.
    pub fn init_at_zero(&mut self, reason: &'static str) {
        self.counts.entry((self.collector, reason)).or_insert(0);
    }

    /// Counts an error; *gone* and *absent* are not counted.
    pub fn record(&mut self, error: &ReadError) {
        if let Some(reason) = error.reason_label() {
            self.count(reason);
            tracing::debug!(
                collector = self.collector,
                error = error as &dyn std::error::Error,
                "read failed"
            );
        }
    }

    /// Counts an error of a container. One that a container can cause at will is logged with the container's id.
    pub fn record_of(&mut self, container: &ContainerId, error: &ReadError) {
        self.record(error);
        if let Some(reason @ ("timeout" | "too_large")) = error.reason_label() {
            self.warn(container, reason, error);
        }
    }

    /// Counts an error of a container by its reason, and logs it with the container's id.
    pub fn count_of(&mut self, container: &ContainerId, reason: &'static str, message: &'static str) {
        self.count(reason);
        self.warn(container, reason, &message);
    }

    /// Names a container in the log, once per reason and [`WARNING_INTERVAL`].
    pub fn warn(&mut self, container: &ContainerId, reason: &'static str, message: &dyn std::fmt::Display) {
        let now = Timestamp::now();
        let key = (self.collector, reason, container.clone());
        let is_recent = |warned: &Timestamp| now.since(*warned) < WARNING_INTERVAL;
        if self.warned.get(&key).is_some_and(is_recent) {
            return;
        }
        self.warned.retain(|_, warned| is_recent(warned));
        if self.warned.len() < MAX_WARNINGS {
            self.warned.insert(key, now);
            let (collector, container) = (self.collector, container.as_str());
            tracing::warn!(collector, container, reason, "reads of a container are limited: {message}");
        }
    }

    /// Counts an error by its reason.
    pub fn count(&mut self, reason: &'static str) {
        *self.counts.entry((self.collector, reason)).or_insert(0) += 1;
    }

    /// Returns the value of a read, or counts its error and returns `None`.
    pub fn value<T>(&mut self, reading: Result<T, ReadError>) -> Option<T> {
        reading.map_err(|error| self.record(&error)).ok()
    }

    /// Returns collector, reason and count of each counter.
    pub fn counts(&self) -> impl Iterator<Item = (&'static str, &'static str, u64)> {
        self.counts.iter().map(|((collector, reason), count)| (*collector, *reason, *count))
    }
}
