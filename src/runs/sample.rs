//! What one cycle adds to the records of runs: the values that its metrics have, from where those come from.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::attribute::Attribution;
use crate::clock::Timestamp;
use crate::collect::{Context, CycleData};
use crate::host::process::ProcessId;
use crate::parse::process::ArgumentSettings;
use crate::reporter::reports::{ContainerReports, OperationMemory, ReportingProcess};

/// Maximum number of operations of a container.
pub const MAX_OPERATIONS: usize = 64;

/// A process that reports settings, in the order in which those of several processes count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ReportingRank {
    /// Its rank on this host.
    pub rank: u8,
    /// Its start in clock ticks since boot.
    pub start_ticks: u64,
    /// Its pid.
    pub pid: u32,
}

/// The values of one container in one cycle, beside its memory and processes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunSample {
    /// The host has a source of GPU figures, also if it fails.
    pub host_has_gpu: Option<bool>,
    /// CPU seconds since the container began.
    pub cpu_seconds: Option<f64>,
    /// Training steps of the rank with the most, as its programs report them.
    pub steps: Option<f64>,
    /// Samples of all ranks.
    pub samples: Option<f64>,
    /// How many ranks these are of.
    pub ranks_with_samples: usize,
    /// When a program last ended a search for a batch size: GPU memory and errors of before are not those of the settings.
    pub peaks_forgotten: Option<Timestamp>,
    /// CUDA out-of-memory errors that PyTorch counted.
    pub torch_ooms: Option<f64>,
    /// Numbers among the arguments of its first trainer, and the start and pid of that.
    pub arguments: Option<((u64, u32), ArgumentSettings)>,
    /// Settings that one process reports.
    pub settings: BTreeMap<Arc<str>, Arc<str>>,
    /// That process.
    pub settings_of: Option<ReportingRank>,
    /// By UUID.
    pub gpus: BTreeMap<Arc<str>, RunGpuSample>,
    /// By component and operation.
    pub operations: BTreeMap<(Arc<str>, Arc<str>), OperationSample>,
}

impl RunSample {
    /// Adds the numbers among the arguments of a trainer, with its start and pid: those of the first one count.
    pub fn add_arguments(&mut self, age: (u64, u32), settings: Option<&ArgumentSettings>) {
        if let Some(settings) = settings
            && self.arguments.as_ref().is_none_or(|(first, _)| age < *first)
        {
            self.arguments = Some((age, Arc::clone(settings)));
        }
    }

    /// Adds what the programs of the container report.
    fn add_reports(&mut self, reports: &ContainerReports) {
        self.peaks_forgotten = reports.peaks_forgotten;
        self.steps = reports.progress.values().map(|progress| progress.steps).max().map(|steps| steps as f64);
        for samples in reports.progress.values().filter_map(|progress| progress.samples) {
            add(&mut self.samples, Some(samples));
            self.ranks_with_samples += 1;
        }
        let operations = reports.operations().filter(|(_, memory)| *memory != OperationMemory::default());
        let operations = operations.map(|(names, memory)| (names.clone(), OperationSample::from(&memory)));
        self.operations = operations.take(MAX_OPERATIONS).collect();
    }

    /// Adds the settings that a process reports: those of the first rank count.
    fn add_settings(&mut self, id: ProcessId, process: &ReportingProcess) {
        let reporting = ReportingRank { rank: process.rank, start_ticks: id.start_ticks, pid: id.pid };
        if !process.settings.is_empty() && self.settings_of.is_none_or(|other| reporting < other) {
            (self.settings, self.settings_of) = (process.settings.clone(), Some(reporting));
        }
    }
}

/// The values of one container on one GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RunGpuSample {
    /// Memory of the GPU.
    pub total_bytes: Option<f64>,
    /// Memory of the container's processes.
    pub used_bytes: Option<f64>,
    /// Share of time in which a kernel ran: of the container if the driver says so, else of the GPU.
    pub utilization: Option<f64>,
    /// Of PyTorch, all ranks together.
    pub torch_allocated_bytes: Option<f64>,
    /// Of PyTorch, all ranks together.
    pub torch_reserved_bytes: Option<f64>,
    /// PyTorch's own peak, of the rank with the most.
    pub torch_allocated_peak_bytes: Option<f64>,
    /// PyTorch's own peak, of the rank with the most.
    pub torch_reserved_peak_bytes: Option<f64>,
}

/// The memory of an operation that a program tracks: of the rank with the most.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OperationSample {
    /// PyTorch's allocated bytes.
    pub torch_allocated_bytes: Option<f64>,
    /// PyTorch's peak of allocated bytes.
    pub torch_allocated_peak_bytes: Option<f64>,
    /// PyTorch's reserved bytes.
    pub torch_reserved_bytes: Option<f64>,
    /// Resident memory.
    pub rss_bytes: Option<f64>,
}

impl From<&OperationMemory> for OperationSample {
    fn from(memory: &OperationMemory) -> Self {
        let float = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64);
        Self {
            torch_allocated_bytes: float(memory.allocated),
            torch_allocated_peak_bytes: float(memory.allocated_peak),
            torch_reserved_bytes: float(memory.reserved),
            rss_bytes: float(memory.rss),
        }
    }
}

/// Returns the samples of the running containers of a cycle, by number.
pub fn samples(context: &Context<'_>, cycle_data: &CycleData, attribution: &Attribution) -> Vec<RunSample> {
    let containers = &context.inventory.containers;
    let host_has_gpu = Some(cycle_data.has_gpu_source);
    let mut samples = vec![RunSample { host_has_gpu, ..RunSample::default() }; containers.len()];
    for (sample, cpu) in std::iter::zip(&mut samples, &cycle_data.cpu) {
        sample.cpu_seconds = cpu.and_then(|times| times.total());
    }
    add_gpus(&mut samples, cycle_data, attribution);
    if let Some(reports) = &cycle_data.reports {
        for (sample, container) in std::iter::zip(&mut samples, containers) {
            if let Some(of) = reports.containers.get(&container.id) {
                sample.add_reports(of);
            }
        }
        let numbers: HashMap<_, _> =
            containers.iter().map(|container| &container.id).zip(0_usize..).collect();
        for (id, process) in &reports.processes {
            if let Some(number) = numbers.get(&process.container) {
                samples[*number].add_settings(*id, process);
            }
        }
    }
    samples
}

/// Adds what containers use of GPUs, by the driver and by reports of programs.
fn add_gpus(samples: &mut [RunSample], cycle_data: &CycleData, attribution: &Attribution) {
    let devices: Vec<_> = cycle_data.gpu_devices().map(|(_, device)| device).collect();
    let key = |gpu: u32| Arc::clone(devices[gpu as usize].identity.key());
    for known in &attribution.gpus.containers {
        if known.used.is_some() || known.busy.is_some() {
            let sample = samples[known.container as usize].gpus.entry(key(known.gpu)).or_default();
            (sample.used_bytes, sample.utilization) = (known.used.map(|bytes| bytes as f64), known.busy);
        }
    }
    for ((container, gpu, _), memory) in &attribution.inside.torch {
        let is_reported =
            [memory.alloc, memory.res, memory.alloc_peak, memory.res_peak].iter().any(Option::is_some);
        if is_reported {
            let sample = samples[*container as usize].gpus.entry(key(*gpu)).or_default();
            add(&mut sample.torch_allocated_bytes, memory.alloc);
            add(&mut sample.torch_reserved_bytes, memory.res);
            raise(&mut sample.torch_allocated_peak_bytes, memory.alloc_peak);
            raise(&mut sample.torch_reserved_peak_bytes, memory.res_peak);
        }
    }
    for ((container, _), ooms) in &attribution.inside.ooms {
        add(&mut samples[*container as usize].torch_ooms, Some(*ooms));
    }
    for sample in samples {
        for (key, gpu) in &mut sample.gpus {
            let Some(device) = devices.iter().find(|device| device.identity.key() == key) else { continue };
            gpu.total_bytes = device.memory.total.map(|bytes| bytes as f64);
            gpu.utilization = gpu.utilization.or(device.health.utilization);
        }
    }
}

/// Adds to a sum, which is that of the values that are known.
fn add(sum: &mut Option<f64>, value: Option<u64>) {
    *sum = value.map(|value| sum.unwrap_or(0.0) + value as f64).or(*sum);
}

fn raise(most: &mut Option<f64>, value: Option<u64>) {
    let value = value.map(|value| value as f64);
    *most = most.map_or(value, |most| Some(value.map_or(most, |value| value.max(most))));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attribute::gpu::GpuAttribution;
    use crate::attribute::inside::InsideFigures;
    use crate::collect::container_cpu::CpuTimes;
    use crate::collect::cycle::GpuUseByContainer;
    use crate::discover::{Container, Inventory};
    use crate::gpu::{GpuDevice, GpuReading};
    use crate::host::HostPaths;
    use crate::reporter::message::TorchMemory;
    use crate::reporter::reports::{Reports, TrainingProgress};

    /// A training of two ranks on two GPUs, and a neighbour on one of them.
    #[test]
    fn figures_become_the_values_of_their_container() {
        let now = Timestamp::now();
        let mut devices = [GpuDevice::with_ids("0", "GPU-a"), GpuDevice::with_ids("1", "GPU-b")];
        for device in &mut devices {
            device.memory.total = Some(12);
            device.health.utilization = Some(0.25);
        }
        let mut reports = Reports::default();
        let containers = vec![Container::in_cgroup("a", "a"), Container::in_cgroup("b", "b")];
        let of = reports.containers.entry(containers[0].id.clone()).or_default();
        of.progress = [(0, 100), (1, 101)]
            .map(|(rank, steps)| (rank, TrainingProgress { steps, samples: Some(3200) }))
            .into();
        let memory = OperationMemory { allocated: Some(1), rss: Some(9), ..OperationMemory::default() };
        of.operations = [(("model".into(), "forward".into()), [(0, memory)].into())].into();
        let cycle_data = CycleData {
            gpus: vec![Arc::new(GpuReading::of_devices(now, devices.into()))],
            cpu: vec![Some(CpuTimes { user: Some(10.0), system: Some(2.0), throttled: Some(5.0) }), None],
            reports: Some(reports),
            has_gpu_source: true,
            ..CycleData::default()
        };
        let used = |container, gpu, used, busy| GpuUseByContainer { container, gpu, used: Some(used), busy };
        let torch = |alloc, res, alloc_peak, res_peak| TorchMemory {
            alloc: Some(alloc),
            res: Some(res),
            alloc_peak: Some(alloc_peak),
            res_peak: Some(res_peak),
            ..TorchMemory::default()
        };
        let attribution = Attribution {
            gpus: GpuAttribution {
                // the driver says the share of one container on the first GPU alone
                containers: vec![used(0, 0, 5, Some(0.75)), used(0, 1, 6, None), used(1, 0, 2, None)],
                ..GpuAttribution::default()
            },
            inside: InsideFigures {
                torch: vec![((0, 0, 0), torch(1, 3, 5, 6)), ((0, 0, 1), torch(2, 4, 4, 7))],
                ooms: vec![((0, 0), 1), ((0, 1), 2)],
                holders: vec![],
            },
            ..Attribution::default()
        };
        let inventory = Arc::new(Inventory { containers, ..Inventory::default() });
        let host_paths = &HostPaths::default();
        let context = Context { now, host_paths, hierarchy: None, inventory: &inventory };

        let [training, neighbour] = &samples(&context, &cycle_data, &attribution)[..] else {
            panic!("two containers")
        };
        assert_eq!((training.cpu_seconds, training.torch_ooms), (Some(12.0), Some(3.0)));
        assert_eq!(training.host_has_gpu, Some(true));
        assert_eq!(
            (training.steps, training.samples, training.ranks_with_samples),
            (Some(101.0), Some(6400.0), 2),
            "each rank has its own samples"
        );
        assert_eq!(
            training.gpus["GPU-a"],
            RunGpuSample {
                total_bytes: Some(12.0),
                used_bytes: Some(5.0),
                utilization: Some(0.75),
                torch_allocated_bytes: Some(3.0),
                torch_reserved_bytes: Some(7.0),
                torch_allocated_peak_bytes: Some(5.0),
                torch_reserved_peak_bytes: Some(7.0),
            }
        );
        let other = RunGpuSample {
            total_bytes: Some(12.0),
            used_bytes: Some(6.0),
            utilization: Some(0.25),
            ..RunGpuSample::default()
        };
        assert_eq!(training.gpus["GPU-b"], other, "the share of the whole GPU, and no value of PyTorch");
        let values = OperationSample {
            torch_allocated_bytes: Some(1.0),
            rss_bytes: Some(9.0),
            ..OperationSample::default()
        };
        assert_eq!(training.operations, [(("model".into(), "forward".into()), values)].into());
        assert_eq!(neighbour.gpus.len(), 1);
        assert_eq!(neighbour.gpus["GPU-a"].used_bytes, Some(2.0));
        assert_eq!((neighbour.steps, neighbour.operations.len(), neighbour.cpu_seconds), (None, 0, None));
    }
}
