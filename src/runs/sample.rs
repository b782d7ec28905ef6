//! What one cycle adds to the records of runs, taken from the series of that cycle: a record has the values that the metrics
//! had.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::catalog::FamilyId;
use crate::clock::Timestamp;
use crate::collect::CycleData;
use crate::parse::process::ArgumentSettings;
use crate::series::{Label, Row, Series};

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

/// Returns the samples of the first `containers` containers of a cycle.
pub fn samples(containers: usize, cycle_data: &CycleData, series: &Series) -> Vec<RunSample> {
    let gpus: Vec<Arc<str>> =
        cycle_data.gpu_devices().map(|(_, device)| Arc::clone(device.identity.key())).collect();
    let mut of_gpu = vec![RunGpuSample::default(); gpus.len()];
    let mut samples = vec![RunSample::default(); containers];
    for row in series.rows() {
        if let Some(gpu) = of_gpu.get_mut(row.gpu as usize)
            && row.container == crate::series::NONE
        {
            add_gpu(gpu, row);
        } else if let Some(sample) = samples.get_mut(row.container as usize) {
            match gpus.get(row.gpu as usize) {
                Some(uuid) => add_container_gpu(sample, uuid, row),
                None => add_container(sample, row, series.labels(row)),
            }
        }
    }
    for sample in &mut samples {
        for (uuid, gpu) in &mut sample.gpus {
            let Some(whole) = gpus.iter().position(|key| key == uuid).map(|at| of_gpu[at]) else { continue };
            gpu.total_bytes = whole.total_bytes;
            gpu.utilization = gpu.utilization.or(whole.utilization);
        }
    }
    samples
}

fn add_gpu(gpu: &mut RunGpuSample, row: &Row) {
    match row.family {
        FamilyId::GPU_MEMORY_TOTAL => gpu.total_bytes = Some(row.value),
        FamilyId::GPU_UTILIZATION => gpu.utilization = Some(row.value),
        _ => {}
    }
}

fn add_container_gpu(sample: &mut RunSample, uuid: &Arc<str>, row: &Row) {
    if row.family == FamilyId::CONTAINER_TORCH_OOMS {
        add(&mut sample.torch_ooms, row.value);
    }
    let families = [
        FamilyId::CONTAINER_GPU_MEMORY,
        FamilyId::CONTAINER_GPU_UTILIZATION,
        FamilyId::CONTAINER_TORCH_ALLOCATED,
        FamilyId::CONTAINER_TORCH_RESERVED,
        FamilyId::CONTAINER_TORCH_ALLOCATED_PEAK,
        FamilyId::CONTAINER_TORCH_RESERVED_PEAK,
    ];
    if !families.contains(&row.family) {
        return;
    }
    let gpu = sample.gpus.entry(Arc::clone(uuid)).or_default();
    match row.family {
        FamilyId::CONTAINER_GPU_MEMORY => gpu.used_bytes = Some(row.value),
        FamilyId::CONTAINER_GPU_UTILIZATION => gpu.utilization = Some(row.value),
        FamilyId::CONTAINER_TORCH_ALLOCATED => add(&mut gpu.torch_allocated_bytes, row.value),
        FamilyId::CONTAINER_TORCH_RESERVED => add(&mut gpu.torch_reserved_bytes, row.value),
        FamilyId::CONTAINER_TORCH_ALLOCATED_PEAK => raise(&mut gpu.torch_allocated_peak_bytes, row.value),
        FamilyId::CONTAINER_TORCH_RESERVED_PEAK => raise(&mut gpu.torch_reserved_peak_bytes, row.value),
        _ => {}
    }
}

fn add_container(sample: &mut RunSample, row: &Row, labels: &[Label]) {
    match row.family {
        FamilyId::CONTAINER_CPU => add(&mut sample.cpu_seconds, row.value),
        FamilyId::CONTAINER_STEPS => raise(&mut sample.steps, row.value),
        FamilyId::CONTAINER_SAMPLES => {
            add(&mut sample.samples, row.value);
            sample.ranks_with_samples += 1;
        }
        FamilyId::CONTAINER_OPERATION_ALLOCATED
        | FamilyId::CONTAINER_OPERATION_ALLOCATED_PEAK
        | FamilyId::CONTAINER_OPERATION_RESERVED
        | FamilyId::CONTAINER_OPERATION_RSS => {
            let [Label::Text(component), Label::Text(operation)] = labels else { return };
            let key = (Arc::clone(component), Arc::clone(operation));
            if sample.operations.len() >= MAX_OPERATIONS && !sample.operations.contains_key(&key) {
                return;
            }
            let values = sample.operations.entry(key).or_default();
            match row.family {
                FamilyId::CONTAINER_OPERATION_ALLOCATED => values.torch_allocated_bytes = Some(row.value),
                FamilyId::CONTAINER_OPERATION_ALLOCATED_PEAK => {
                    values.torch_allocated_peak_bytes = Some(row.value);
                }
                FamilyId::CONTAINER_OPERATION_RESERVED => values.torch_reserved_bytes = Some(row.value),
                _ => values.rss_bytes = Some(row.value),
            }
        }
        _ => {}
    }
}

fn add(sum: &mut Option<f64>, value: f64) {
    *sum = Some(sum.unwrap_or(0.0) + value);
}

fn raise(most: &mut Option<f64>, value: f64) {
    *most = Some(most.map_or(value, |most| most.max(value)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::{self, Family};
    use crate::clock::Timestamp;
    use crate::gpu::{GpuDevice, GpuReading};

    fn two_gpus() -> CycleData {
        let devices = vec![GpuDevice::with_ids("0", "GPU-a"), GpuDevice::with_ids("1", "GPU-b")];
        let reading = GpuReading::of_devices(Timestamp::now(), devices);
        CycleData { gpus: vec![Arc::new(reading)], ..CycleData::default() }
    }

    /// A training of two ranks on two GPUs, and a neighbour on one of them.
    #[test]
    fn series_become_the_values_of_their_container() {
        let mut series = Series::default();
        let rank = |rank: u64| [Label::Number(rank)];
        for gpu in [0, 1] {
            series.gpu(catalog::GPU_MEMORY_TOTAL, gpu, [], 12.0);
            series.gpu(catalog::GPU_UTILIZATION, gpu, [], 0.25);
            series.container_gpu(catalog::CONTAINER_GPU_MEMORY, 0, gpu, [], 5.0 + f64::from(gpu));
        }
        // the driver says the share of one container on the first GPU alone
        series.container_gpu(catalog::CONTAINER_GPU_UTILIZATION, 0, 0, [], 0.75);
        series.container_gpu(catalog::CONTAINER_GPU_MEMORY, 1, 0, [], 2.0);
        let two_ranks: [(Family<catalog::ContainerGpu, 1>, [f64; 2]); 4] = [
            (catalog::CONTAINER_TORCH_ALLOCATED, [1.0, 2.0]),
            (catalog::CONTAINER_TORCH_RESERVED, [3.0, 4.0]),
            (catalog::CONTAINER_TORCH_ALLOCATED_PEAK, [5.0, 4.5]),
            (catalog::CONTAINER_TORCH_RESERVED_PEAK, [6.0, 7.0]),
        ];
        for (family, values) in two_ranks {
            for (number, value) in (0..).zip(values) {
                series.container_gpu(family, 0, 0, rank(number), value);
            }
        }
        series.container_gpu(catalog::CONTAINER_TORCH_OOMS, 0, 0, [], 1.0);
        series.container_gpu(catalog::CONTAINER_TORCH_OOMS, 0, 1, [], 2.0);
        for (number, steps) in [(0, 100.0), (1, 101.0)] {
            series.container(catalog::CONTAINER_STEPS, 0, rank(number), steps);
            series.container(catalog::CONTAINER_SAMPLES, 0, rank(number), 3200.0);
        }
        series.container(catalog::CONTAINER_CPU, 0, ["user".into()], 10.0);
        series.container(catalog::CONTAINER_CPU, 0, ["system".into()], 2.0);
        let labels = || [Label::Text("model".into()), Label::Text("forward".into())];
        series.container(catalog::CONTAINER_OPERATION_ALLOCATED, 0, labels(), 1.0);
        series.container(catalog::CONTAINER_OPERATION_RSS, 0, labels(), 9.0);

        let [training, neighbour] = &samples(2, &two_gpus(), &series)[..] else { panic!("two containers") };
        assert_eq!((training.cpu_seconds, training.torch_ooms), (Some(12.0), Some(3.0)));
        assert_eq!(
            (training.steps, training.samples),
            (Some(101.0), Some(6400.0)),
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
        assert_eq!((neighbour.steps, neighbour.operations.len()), (None, 0));
    }
}
