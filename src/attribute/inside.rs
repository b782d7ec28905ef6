//! The view from inside: what processes report, together with the driver's readings.
//!
//! For each container and GPU: tensors + torch_cache + outside_torch + not_reporting = GPU memory of the container, exactly.
//! The driver's reading and the reports are of slightly different times. Where that shows (a term would be negative, or they
//! are more than [`MAX_SKEW`] apart) the whole partition is left out of the cycle and counted: never clamped, never guessed.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use super::gpu::DeviceProcess;
use crate::catalog::*;
use crate::clock::Timestamp;
use crate::collect::cycle::HolderPartition;
use crate::collect::{Context, CycleData};
use crate::host::process::ProcessId;
use crate::reporter::message::{TorchMemory, normalized_uuid};
use crate::reporter::reports::{ContainerReports, DeviceUuid, ReportingProcess, Reports};
use crate::series::{Label, NONE, Series};

/// Maximum time between a sample of a process and the driver's reading with which it is combined. Both are taken once a second,
/// so the newest of one is up to a second older than the newest of the other, and later than that on a busy host.
const MAX_SKEW: Duration = Duration::from_millis(1_500);
/// Maximum age of exported figures of a process, which may be stopped or busy.
pub(super) const MAX_AGE: Duration = Duration::from_secs(5);

/// Why a partition is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Withheld {
    Stale,
    Negative,
    UnknownGpu,
    Unreported,
}

/// Each reason with its label value.
const WITHHELD: [(Withheld, &str); 4] = [
    (Withheld::Stale, "stale"),
    (Withheld::Negative, "negative"),
    (Withheld::UnknownGpu, "unknown_gpu"),
    (Withheld::Unreported, "unreported"),
];

/// Counts that outlive a cycle.
#[derive(Debug, Default)]
pub struct InsideView {
    withheld: [u64; WITHHELD.len()],
}

/// What the programs of containers report of their GPUs, in one cycle.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct InsideFigures {
    /// Memory of torch by container, GPU and local rank.
    pub torch: Vec<((u32, u32, u8), TorchMemory)>,
    /// Out-of-memory errors of torch by container and GPU.
    pub ooms: Vec<((u32, u32), u64)>,
    /// GPU memory of a container on one GPU by holder.
    pub holders: Vec<((u32, u32), HolderPartition)>,
}

/// GPUs by UUID, and processes by GPU.
pub(super) struct GpuIndex<'a> {
    by_uuid: HashMap<Arc<str>, u32>,
    processes: &'a [DeviceProcess],
}

impl<'a> GpuIndex<'a> {
    /// Returns the index of a cycle.
    pub(super) fn new(cycle_data: &CycleData, processes: &'a [DeviceProcess]) -> Self {
        let devices = (0..).zip(cycle_data.gpu_devices());
        let by_uuid = devices.map(|(gpu, (_, device))| (normalized_uuid(device.identity.key()), gpu));
        Self { by_uuid: by_uuid.collect(), processes }
    }

    /// Returns the GPU of a device that a process reports. Without a UUID, or with one that the driver does not know (ROCm has
    /// others), it is known only if the process reports one device and the driver lists the process on one GPU.
    pub(super) fn of_device(
        &self,
        who: ProcessId,
        process: &ReportingProcess,
        uuid: &DeviceUuid,
    ) -> Option<u32> {
        self.by_uuid(uuid).or_else(|| match process.devices.len() {
            1 => only(self.processes.iter().filter(|on| on.id == who).map(|on| on.gpu)),
            _ => None,
        })
    }

    fn by_uuid(&self, uuid: &DeviceUuid) -> Option<u32> {
        self.by_uuid.get(uuid.as_ref()?).copied()
    }
}

/// Returns the value that all of these have in common.
fn only(mut values: impl Iterator<Item = u32>) -> Option<u32> {
    let first = values.next()?;
    values.all(|value| value == first).then_some(first)
}

impl InsideView {
    /// Writes the series of one cycle, and returns what of them is by GPU. `processes` are those of the driver's readings.
    pub fn write(
        &mut self,
        context: &Context<'_>,
        cycle_data: &CycleData,
        processes: &[DeviceProcess],
        series: &mut Series,
    ) -> InsideFigures {
        let mut figures = InsideFigures::default();
        let Some(reports) = &cycle_data.reports else { return figures };
        let gpus = GpuIndex::new(cycle_data, processes);
        series.global(REPORTER_CONNECTIONS, [], reports.processes.len() as f64);
        figures.holders = self.write_partitions(cycle_data, reports, &gpus, series);
        for (reason, label) in WITHHELD {
            series.global(REPORTER_HOLDERS_WITHHELD, [label.into()], self.withheld[reason as usize] as f64);
        }
        for (number, container) in context.inventory.containers.iter().enumerate() {
            if let Some(of) = reports.containers.get(&container.id) {
                let number = number as u32;
                let members =
                    reports.processes.iter().filter(|(_, process)| process.container == container.id);
                write_torch(context.now, number, members, &gpus, &mut figures, series);
                write_counts(number, of, &gpus, &mut figures, series);
                write_operations(number, of, series);
            }
        }
        figures
    }

    fn write_partitions(
        &mut self,
        cycle_data: &CycleData,
        reports: &Reports,
        gpus: &GpuIndex<'_>,
        series: &mut Series,
    ) -> Vec<((u32, u32), HolderPartition)> {
        let read_at: Vec<Timestamp> = cycle_data.gpu_devices().map(|(reading, _)| reading.at).collect();
        let mut partitions: BTreeMap<(u32, u32), Result<HolderPartition, Withheld>> = BTreeMap::new();
        for process in gpus.processes.iter().filter(|process| process.container != NONE) {
            let Some(at) = read_at.get(process.gpu as usize) else { continue };
            let partition =
                partitions.entry((process.container, process.gpu)).or_insert(Ok(HolderPartition::default()));
            let held = held_by(process, reports, gpus, *at);
            *partition = partition.and_then(|sum| held.map(|held| sum.plus(held)));
        }
        let mut known = Vec::with_capacity(partitions.len());
        for ((container, gpu), partition) in partitions {
            match partition {
                Ok(partition) => {
                    for (holder, bytes) in partition.parts() {
                        let labels = [holder.into()];
                        series.container_gpu(CONTAINER_GPU_HOLDER, container, gpu, labels, bytes as f64);
                    }
                    known.push(((container, gpu), partition));
                }
                Err(reason) => self.withheld[reason as usize] += 1,
            }
        }
        known
    }
}

/// Divides the memory of one process on one GPU, as read by the driver at a time.
fn held_by(
    process: &DeviceProcess,
    reports: &Reports,
    gpus: &GpuIndex<'_>,
    at: Timestamp,
) -> Result<HolderPartition, Withheld> {
    let used = process.used.ok_or(Withheld::Unreported)?;
    let reporting = reports.processes.get(&process.id);
    let Some((reporting, sampled)) = reporting.and_then(|found| Some((found, found.sampled?))) else {
        return Ok(HolderPartition { not_reporting: used, ..HolderPartition::default() });
    };
    if at.since(sampled).max(sampled.since(at)) > MAX_SKEW {
        return Err(Withheld::Stale);
    }
    // a device that is not reported holds no memory of torch
    let mut torch = (0_u64, 0_u64);
    for device in &reporting.devices {
        match gpus.of_device(process.id, reporting, &device.uuid) {
            None => return Err(Withheld::UnknownGpu),
            Some(gpu) if gpu == process.gpu => {
                let (Some(allocated), Some(reserved)) = (device.memory.alloc, device.memory.res) else {
                    return Err(Withheld::Unreported);
                };
                torch = (torch.0 + allocated, torch.1 + reserved);
            }
            Some(_) => {}
        }
    }
    let (tensors, reserved) = torch;
    let torch_cache = reserved.checked_sub(tensors).ok_or(Withheld::Negative)?;
    let outside_torch = used.checked_sub(reserved).ok_or(Withheld::Negative)?;
    Ok(HolderPartition { tensors, torch_cache, outside_torch, not_reporting: 0, is_any_reporting: true })
}

/// Writes the memory of torch by GPU and local rank.
fn write_torch<'a>(
    now: Timestamp,
    container: u32,
    members: impl Iterator<Item = (&'a ProcessId, &'a ReportingProcess)>,
    gpus: &GpuIndex<'_>,
    figures: &mut InsideFigures,
    series: &mut Series,
) {
    let mut sums: BTreeMap<(u32, u8), TorchMemory> = BTreeMap::new();
    for (who, process) in members {
        if process.sampled.is_none_or(|sampled| now.since(sampled) > MAX_AGE) {
            continue;
        }
        for device in &process.devices {
            if let Some(gpu) = gpus.of_device(*who, process, &device.uuid) {
                let add = |sum: &mut TorchMemory| *sum = sum_of(sum, &device.memory);
                sums.entry((gpu, process.rank)).and_modify(add).or_insert(device.memory);
            }
        }
    }
    for ((gpu, rank), memory) in sums {
        for (family, bytes) in [
            (CONTAINER_TORCH_ALLOCATED, memory.alloc),
            (CONTAINER_TORCH_RESERVED, memory.res),
            (CONTAINER_TORCH_INACTIVE_SPLIT, memory.split),
            (CONTAINER_TORCH_ALLOCATED_PEAK, memory.alloc_peak),
            (CONTAINER_TORCH_RESERVED_PEAK, memory.res_peak),
        ] {
            if let Some(bytes) = bytes {
                series.container_gpu(family, container, gpu, [Label::Number(rank.into())], bytes as f64);
            }
        }
        figures.torch.push(((container, gpu, rank), memory));
    }
}

/// Returns the memory of two processes together. A sum is absent if a part of it is; peaks of different times have no sum.
fn sum_of(first: &TorchMemory, second: &TorchMemory) -> TorchMemory {
    let sum =
        |of: fn(&TorchMemory) -> Option<u64>| of(first).zip(of(second)).map(|(first, second)| first + second);
    TorchMemory {
        alloc: sum(|memory| memory.alloc),
        res: sum(|memory| memory.res),
        split: sum(|memory| memory.split),
        ..TorchMemory::default()
    }
}

/// Writes the counters of a container.
fn write_counts(
    container: u32,
    reports: &ContainerReports,
    gpus: &GpuIndex<'_>,
    figures: &mut InsideFigures,
    series: &mut Series,
) {
    let mut failures: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
    for (uuid, counts) in &reports.failures {
        let of_container = gpus.processes.iter().filter(|on| on.container == container);
        let gpu = gpus.by_uuid(uuid).or_else(|| only(of_container.map(|on| on.gpu)));
        if let Some(gpu) = gpu {
            let sum = failures.entry(gpu).or_default();
            *sum = (sum.0.saturating_add(counts.ooms), sum.1.saturating_add(counts.retries));
        }
    }
    for (gpu, (ooms, retries)) in failures {
        series.container_gpu(CONTAINER_TORCH_OOMS, container, gpu, [], ooms as f64);
        series.container_gpu(CONTAINER_TORCH_RETRIES, container, gpu, [], retries as f64);
        figures.ooms.push(((container, gpu), ooms));
    }
    for (rank, progress) in &reports.progress {
        let rank = Label::Number((*rank).into());
        series.container(CONTAINER_STEPS, container, [rank.clone()], progress.steps as f64);
        if let Some(samples) = progress.samples {
            series.container(CONTAINER_SAMPLES, container, [rank], samples as f64);
        }
    }
}

/// Writes the memory of each component and operation.
fn write_operations(container: u32, reports: &ContainerReports, series: &mut Series) {
    for ((component, operation), memory) in reports.operations() {
        for (family, bytes) in [
            (CONTAINER_OPERATION_ALLOCATED, memory.allocated),
            (CONTAINER_OPERATION_ALLOCATED_PEAK, memory.allocated_peak),
            (CONTAINER_OPERATION_RESERVED, memory.reserved),
            (CONTAINER_OPERATION_RSS, memory.rss),
        ] {
            if let Some(bytes) = bytes {
                series.container(family, container, [component.into(), operation.into()], bytes as f64);
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::discover::ContainerId;
    use crate::gpu::{GpuDevice, GpuReading};
    use crate::reporter::message::{Hello, Sample};
    use proptest::prelude::*;

    /// Returns a process of container 0 on a GPU.
    pub fn on_gpu(pid: u32, gpu: u32, used: Option<u64>) -> DeviceProcess {
        DeviceProcess {
            container: 0,
            gpu,
            device: "GPU-A".into(),
            id: ProcessId::new(pid, u64::from(pid)),
            labels: [Label::Number(u64::from(pid)), "python".into(), "trainer".into()],
            used,
            busy: None,
        }
    }

    pub fn cycle_data(at: Timestamp, reports: Reports) -> CycleData {
        let devices = vec![GpuDevice::with_ids("0", "GPU-A"), GpuDevice::with_ids("1", "GPU-B")];
        let reading = GpuReading::of_devices(at, devices);
        CycleData { gpus: vec![Arc::new(reading)], reports: Some(reports), ..CycleData::default() }
    }

    fn report(
        reports: &mut Reports,
        pid: u32,
        at: Timestamp,
        uuid: Option<&str>,
        memory: (Option<u64>, Option<u64>),
    ) {
        let who = ProcessId::new(pid, u64::from(pid));
        let devices = vec![(0, uuid.map(normalized_uuid))];
        reports.hello(who, &ContainerId::new("a"), Hello { local_rank: 0, devices });
        let memory = TorchMemory { i: 0, alloc: memory.0, res: memory.1, ..TorchMemory::default() };
        reports.sample(who, at, Sample { lost: 0, overlapping: 0, devices: vec![memory] });
    }

    /// Returns the partitions by GPU and holder, and what was withheld.
    fn partitions(data: &CycleData, processes: &[DeviceProcess]) -> (Vec<(u32, String, u64)>, [u64; 4]) {
        let (mut view, mut series) = (InsideView::default(), Series::default());
        let gpus = GpuIndex::new(data, processes);
        let found = view.write_partitions(data, data.reports.as_ref().unwrap(), &gpus, &mut series);
        let label = |row| match &series.labels(row)[0] {
            Label::Fixed(text) => (*text).to_owned(),
            other => panic!("{other:?}"),
        };
        let rows = series.rows().iter().map(|row| (row.gpu, label(row), row.value as u64));
        let rows: Vec<_> = rows.collect();
        let parts = found.iter().flat_map(|((_, gpu), partition)| {
            partition.parts().map(|(holder, bytes)| (*gpu, holder.to_owned(), bytes))
        });
        assert_eq!(rows, parts.collect::<Vec<_>>(), "the rows have what is returned");
        (rows, view.withheld)
    }

    #[test]
    fn each_reason_withholds_the_whole_partition() {
        let now = Timestamp::now();
        let late = now.plus(MAX_SKEW + Duration::from_millis(1));
        for (used, uuid, memory, at, gpus, index) in [
            (Some(10), Some("GPU-A"), (Some(1), Some(2)), late, 1, 0),
            (Some(1), Some("GPU-A"), (Some(1), Some(2)), now, 1, 1),
            (Some(10), Some("GPU-A"), (Some(3), Some(2)), now, 1, 1),
            (Some(10), None, (Some(1), Some(2)), now, 2, 2),
            (Some(10), Some("GPU-Z"), (Some(1), Some(2)), now, 2, 2),
            (None, Some("GPU-A"), (Some(1), Some(2)), now, 1, 3),
            (Some(10), Some("GPU-A"), (None, None), now, 1, 3),
        ] {
            let mut reports = Reports::default();
            report(&mut reports, 7, at, uuid, memory);
            let processes: Vec<_> = (0..gpus).map(|gpu| on_gpu(7, gpu, used)).collect();
            let (rows, withheld) = partitions(&cycle_data(now, reports), &processes);
            assert_eq!((rows, withheld[index]), (vec![], u64::from(gpus)), "{used:?} {uuid:?} {memory:?}");
        }
    }

    #[test]
    fn process_without_known_uuid_is_on_the_only_gpu_where_the_driver_lists_it() {
        for uuid in [None, Some("another form of UUID")] {
            let (now, mut reports) = (Timestamp::now(), Reports::default());
            report(&mut reports, 7, now, uuid, (Some(1), Some(3)));
            let (rows, withheld) = partitions(&cycle_data(now, reports), &[on_gpu(7, 1, Some(10))]);
            let row = |holder: &str, bytes| (1, holder.to_owned(), bytes);
            let wanted =
                [row("tensors", 1), row("torch_cache", 2), row("outside_torch", 7), row("not_reporting", 0)];
            assert_eq!((rows, withheld), (wanted.to_vec(), [0; 4]));
        }
    }

    proptest! {
        #[test]
        fn partition_sums_to_used_memory_or_is_absent_and_counted(
            processes in prop::collection::vec((
                0_u32..2,
                proptest::option::weighted(0.9, 0_u64..1 << 36),
                proptest::option::of((0_u64..1 << 36, 0_u64..1 << 36, 0_u64..2_000)),
                proptest::bool::weighted(0.9),
            ), 1..8),
        ) {
            let (now, mut reports) = (Timestamp::now(), Reports::default());
            let mut listed = Vec::new();
            for (pid, (gpu, used, reported, has_uuid)) in (1_u32..).zip(&processes) {
                listed.push(on_gpu(pid, *gpu, *used));
                if let Some((allocated, cache, age_ms)) = reported {
                    let uuid = has_uuid.then_some(if *gpu == 0 { "GPU-A" } else { "GPU-B" });
                    let at = now.plus(Duration::from_millis(*age_ms));
                    report(&mut reports, pid, at, uuid, (Some(*allocated), Some(allocated + cache)));
                }
            }
            let (rows, withheld) = partitions(&cycle_data(now, reports), &listed);
            let mut absent = 0;
            for gpu in 0..2 {
                let members: Vec<_> = listed.iter().filter(|process| process.gpu == gpu).collect();
                if members.is_empty() {
                    continue;
                }
                let parts: Vec<u64> = rows.iter().filter(|row| row.0 == gpu).map(|row| row.2).collect();
                if parts.is_empty() {
                    absent += 1;
                    continue;
                }
                let used: Option<u64> = members.iter().map(|process| process.used).sum();
                prop_assert_eq!(Some(parts.iter().sum::<u64>()), used);
                prop_assert!(parts.len() == 1 || parts.len() == 4);
            }
            prop_assert_eq!(withheld.iter().sum::<u64>(), absent);
        }
    }
}
