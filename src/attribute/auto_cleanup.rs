//! Which processes get a request of `--reporter.auto-cleanup`: trainings with a large unused cache on a full GPU that they share.

use std::collections::BTreeSet;

use super::gpu::DeviceProcess;
use super::inside::{GpuIndex, MAX_AGE};
use crate::clock::Timestamp;
use crate::collect::CycleData;
use crate::discover::ContainerId;
use crate::reporter::message::TorchMemory;

/// Share of a GPU's memory that a process must be able to give back.
const MIN_UNUSED: f64 = 0.05;

/// Returns the containers with a process that could give back enough unused memory for others on its GPU. `percent`: how full the
/// GPU is at least, with all of its processes.
pub fn containers_to_clean(
    now: Timestamp,
    percent: f64,
    cycle_data: &CycleData,
    processes: &[DeviceProcess],
) -> BTreeSet<ContainerId> {
    let Some(reports) = &cycle_data.reports else { return BTreeSet::new() };
    let gpus = GpuIndex::new(cycle_data, processes);
    let mut containers = BTreeSet::new();
    for (number, (_, gpu)) in (0_u32..).zip(cycle_data.gpu_devices()) {
        let (Some(used), Some(total)) = (gpu.memory.used, gpu.memory.total) else { continue };
        // what the driver keeps for itself is not free either
        let used = gpu.memory.free.map_or(used, |free| total.saturating_sub(free));
        let on_gpu = || processes.iter().filter(|process| process.gpu == number);
        if (used as f64) < percent / 100.0 * total as f64 || on_gpu().count() < 2 {
            continue; // with one process, no other one gains by it
        }
        for process in on_gpu() {
            let Some(reporting) = reports.processes.get(&process.id) else { continue };
            if reporting.sampled.is_none_or(|sampled| now.since(sampled) > MAX_AGE) {
                continue;
            }
            let is_here = |uuid: &_| gpus.of_device(process.id, reporting, uuid) == Some(number);
            let here = reporting.devices.iter().filter(|device| is_here(&device.uuid));
            let unused: u64 = here.map(|device| returnable(&device.memory)).sum();
            if unused as f64 >= MIN_UNUSED * total as f64 {
                containers.insert(reporting.container.clone());
            }
        }
    }
    containers
}

/// Returns what `torch.cuda.empty_cache()` gives back of a device, in bytes: not the free parts of split blocks.
fn returnable(memory: &TorchMemory) -> u64 {
    let (Some(reserved), Some(allocated), Some(split)) = (memory.res, memory.alloc, memory.split) else {
        return 0;
    };
    reserved.saturating_sub(allocated).saturating_sub(split)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::attribute::inside::tests::{cycle_data, on_gpu};
    use crate::gpu::DeviceMemory;
    use crate::host::process::ProcessId;
    use crate::reporter::message::{Hello, Sample, normalized_uuid};
    use crate::reporter::reports::Reports;

    const TOTAL: u64 = 1_000;

    /// Returns whether a process with this memory, on a GPU with `used` of 1,000 and so many processes, gets a request.
    fn is_asked(used: u64, processes: u32, memory: (u64, u64, Option<u64>), age: Duration) -> bool {
        let (now, mut reports) = (Timestamp::now(), Reports::default());
        let devices = vec![(0, Some(normalized_uuid("GPU-A")))];
        reports.hello(ProcessId::new(1, 1), &ContainerId::new("a"), Hello { local_rank: 0, devices });
        let (alloc, res, split) = memory;
        let device = TorchMemory { alloc: Some(alloc), res: Some(res), split, ..TorchMemory::default() };
        reports.sample(
            ProcessId::new(1, 1),
            now.minus(age),
            Sample { lost: 0, overlapping: 0, devices: vec![device] },
        );
        let mut data = cycle_data(now, reports);
        let reading = std::sync::Arc::get_mut(&mut data.gpus[0]).unwrap();
        reading.devices[0].memory =
            DeviceMemory { used: Some(used), total: Some(TOTAL), ..DeviceMemory::default() };
        let listed: Vec<_> = (1..=processes).map(|pid| on_gpu(pid, 0, Some(100))).collect();
        !containers_to_clean(now, 85.0, &data, &listed).is_empty()
    }

    #[test]
    fn is_asked_only_where_it_helps() {
        let new = Duration::ZERO;
        assert!(is_asked(850, 2, (100, 160, Some(10)), new));
        assert!(!is_asked(849, 2, (100, 160, Some(10)), new), "the GPU is not full");
        assert!(!is_asked(850, 1, (100, 160, Some(10)), new), "it is alone");
        assert!(!is_asked(850, 2, (100, 160, Some(11)), new), "most of it cannot be given back");
        assert!(!is_asked(850, 2, (100, 160, None), new), "that is unknown");
        assert!(!is_asked(850, 2, (160, 100, Some(0)), new), "more tensors than memory, for a moment");
        assert!(
            !is_asked(850, 2, (100, 160, Some(0)), MAX_AGE + Duration::from_secs(1)),
            "its figures are old"
        );
    }
}
