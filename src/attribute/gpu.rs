//! Attributes GPU processes to containers, and the used memory of each GPU.
//!
//! used = processes of containers + processes of the host + unattributed, in every cycle, for each GPU and each MIG
//! instance. Memory of an instance's processes is part of the used memory of its GPU, but is written only once, for the
//! instance.

use std::collections::HashMap;
use std::sync::Arc;

use super::roles::{GpuEvidence, Role};
use crate::catalog::*;
use crate::clock::Timestamp;
use crate::collect::cycle::{GpuRest, GpuUseByContainer};
use crate::collect::{Context, CycleData};
use crate::discover::{ContainerId, Inventory};
use crate::gpu::{DeviceSample, GpuDevice, GpuProcess, GpuSample, PidTrust};
use crate::host::process::{ProcessFacts, ProcessId};
use crate::series::{Label, NONE, Series};

/// Location of a GPU process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProcessLocation {
    Container(u32),
    Host,
    /// The process is not visible, and its location is not guessed.
    Unknown,
}

struct ContainerIndex<'a> {
    processes: HashMap<ProcessId, u32>,
    inventory: &'a Inventory,
}

impl<'a> ContainerIndex<'a> {
    fn of(context: &Context<'a>, cycle_data: &CycleData) -> Self {
        let processes = cycle_data.processes.iter().map(|(number, process)| (process.id(), number)).collect();
        Self { processes, inventory: context.inventory }
    }

    fn locate(&self, process: &GpuProcess) -> ProcessLocation {
        let Some(owner) = &process.owner else { return ProcessLocation::Unknown };
        self.container(owner).map_or(ProcessLocation::Host, ProcessLocation::Container)
    }

    /// Uses the process lists of the containers first, then the cgroup of the process: the lists may be older or newer
    /// than the driver's report.
    fn container(&self, owner: &ProcessFacts) -> Option<u32> {
        self.processes.get(&owner.id).copied().or_else(|| {
            let id = self.inventory.owner_of_path(&owner.cgroup)?;
            let at = self.inventory.containers.iter().position(|container| container.id == id)?;
            Some(at as u32)
        })
    }
}

/// Processes with a GPU context, with their memory over all GPUs if the driver reports all of it.
pub type GpuContexts = HashMap<ProcessId, Option<u64>>;

/// Returns the processes with a GPU context.
pub fn contexts(cycle_data: &CycleData) -> GpuContexts {
    let mut contexts = GpuContexts::new();
    for process in cycle_data.gpu_devices().filter_map(|(_, device)| device.processes.as_ref()).flatten() {
        if let Some(owner) = &process.owner {
            // a sum is absent if the driver does not report a part of it
            let add = |sum: &mut Option<u64>| *sum = sum.zip(process.used).map(|(sum, used)| sum + used);
            contexts.entry(owner.id).and_modify(add).or_insert(process.used);
        }
    }
    contexts
}

/// Returns which GPUs report their processes, and the reported processes.
pub fn evidence(cycle_data: &CycleData) -> GpuEvidence {
    let mut evidence = GpuEvidence::default();
    for (_, device) in cycle_data.gpu_devices() {
        let Some(processes) = &device.processes else { continue };
        let key = device.identity.key();
        evidence.reporting.insert(Arc::clone(key));
        for process in processes {
            if let Some(owner) = &process.owner {
                evidence.holders.entry(owner.id).or_default().push(Arc::clone(key));
            }
        }
    }
    evidence
}

/// Result of GPU attribution.
#[derive(Debug, Default)]
pub struct GpuAttribution {
    /// Keys of devices whose processes held more than the used memory in this reading, by a race.
    pub raced: Vec<Arc<str>>,
    /// Processes on the devices of the newest readings, largest memory first.
    pub processes: Vec<DeviceProcess>,
    /// Use of the devices by containers.
    pub containers: Vec<GpuUseByContainer>,
    /// Used memory of the devices beside that of containers, in the order of their numbers.
    pub rests: Vec<GpuRest>,
    /// Usage samples since the previous cycle.
    pub held: Vec<DeviceUsage>,
}

/// One process on one device.
#[derive(Clone, Debug)]
pub struct DeviceProcess {
    /// Number of its container, or [`NONE`].
    pub container: u32,
    /// Number of the device.
    pub gpu: u32,
    /// Key of the device.
    pub device: Arc<str>,
    /// The process; its start is 0 if it is not visible.
    pub id: ProcessId,
    /// The labels of its rows.
    pub labels: [Label; 3],
    /// Memory, if reported.
    pub used: Option<u64>,
    /// Share of time in which at least one of its kernels ran.
    pub busy: Option<f64>,
}

/// Memory usage of one device at one time.
#[derive(Clone, Debug)]
pub struct DeviceUsage {
    /// Time of the sample.
    pub at: Timestamp,
    /// Key of the device.
    pub device: Arc<str>,
    /// Used memory of the device.
    pub used: Option<u64>,
    /// Memory of each process of a container, also of processes that ended since, with the process's start in clock
    /// ticks since boot. Containers with an unreported part are omitted.
    pub containers: HashMap<ContainerId, Vec<(u64, u64)>>,
    /// Memory of processes.
    pub processes: Vec<(ProcessId, u64)>,
    /// Container of each pid.
    pub owners: Vec<(u32, ContainerId)>,
}

/// Writes all series that need GPU processes attributed.
pub fn write(context: &Context<'_>, cycle_data: &CycleData, series: &mut Series) -> GpuAttribution {
    let mut result = GpuAttribution::default();
    if cycle_data.gpus.is_empty() {
        return result;
    }
    let index = ContainerIndex::of(context, cycle_data);
    result.held =
        cycle_data.gpu_samples.iter().flat_map(|sample| device_usage(sample, context, &index)).collect();
    let mut first = 0;
    for reading in &cycle_data.gpus {
        // where pids cannot be resolved, the host's processes are unknown too
        let host = (reading.pids == PidTrust::Trusted).then_some(0);
        write_device_memory(first, &reading.devices, host, &index, series, &mut result);
        first += reading.devices.len() as u32;
    }
    write_processes(series, &mut result.processes);
    result
}

fn device_usage(sample: &GpuSample, context: &Context<'_>, index: &ContainerIndex<'_>) -> Vec<DeviceUsage> {
    let container = |owner: &ProcessFacts| match index.container(owner) {
        Some(number) => Some(context.inventory.containers[number as usize].id.clone()),
        // the container may have ended, or may not be in the inventory yet
        None => context.inventory.owner_of_path(&owner.cgroup),
    };
    let of_device = |sampled: &DeviceSample| {
        let mut containers = HashMap::new();
        let (mut processes, mut owners) = (Vec::with_capacity(sampled.holders.len()), Vec::new());
        for (owner, used) in &sampled.holders {
            processes.push((owner.id, *used));
            if let Some(id) = container(owner) {
                containers.entry(id.clone()).or_insert_with(Vec::new).push((owner.id.start_ticks, *used));
                owners.push((owner.id.pid, id));
            }
        }
        for owner in &sampled.silent {
            if let Some(id) = container(owner) {
                containers.remove(&id);
                owners.push((owner.id.pid, id));
            }
        }
        let device = Arc::clone(sampled.identity.key());
        DeviceUsage { at: sample.at, device, used: sampled.used, containers, processes, owners }
    };
    sample.devices.iter().map(of_device).collect()
}

/// Writes the used memory of all devices of one reading, by owner.
fn write_device_memory(
    first: u32,
    devices: &[GpuDevice],
    host: Option<u64>,
    index: &ContainerIndex<'_>,
    series: &mut Series,
    result: &mut GpuAttribution,
) {
    let numbered = || (first..).zip(devices);
    let attributed: Vec<(u64, Option<u64>)> =
        numbered().map(|(gpu, device)| write_holders(gpu, device, host, index, series, result)).collect();
    for ((gpu, device), (_, host)) in std::iter::zip(numbered(), &attributed) {
        if device.raced {
            result.raced.push(Arc::clone(device.identity.key()));
        }
        let unattributed = device.memory.used.map(|used| {
            let within = std::iter::zip(devices, &attributed).filter(|(other, _)| device.contains(other));
            used.saturating_sub(within.map(|(_, (bytes, _))| bytes).sum())
        });
        if let Some(bytes) = unattributed {
            series.gpu(GPU_MEMORY_UNATTRIBUTED, gpu, [], bytes as f64);
        }
        result.rests.push(GpuRest { host: *host, unattributed });
    }
}

/// Use of one device by a container.
struct ContainerShare {
    processes: u64,
    bytes: Option<u64>,
    busy: Option<f64>,
}

/// Writes the memory of one device by owner. Returns the attributed bytes, and of these those of processes outside containers.
fn write_holders(
    gpu: u32,
    device: &GpuDevice,
    mut host: Option<u64>,
    index: &ContainerIndex<'_>,
    series: &mut Series,
    result: &mut GpuAttribution,
) -> (u64, Option<u64>) {
    let mut shares: HashMap<u32, ContainerShare> = HashMap::new();
    for process in device.processes.iter().flatten() {
        let container = match index.locate(process) {
            ProcessLocation::Unknown => continue,
            ProcessLocation::Host => {
                host = host.zip(process.used).map(|(sum, bytes)| sum + bytes);
                NONE
            }
            ProcessLocation::Container(number) => {
                let share = ContainerShare { processes: 0, bytes: Some(0), busy: Some(0.0) };
                let share = shares.entry(number).or_insert(share);
                share.processes += 1;
                // a sum is absent if a part of it is not reported
                share.bytes = share.bytes.zip(process.used).map(|(sum, bytes)| sum + bytes);
                share.busy = share.busy.zip(process.busy).map(|(sum, busy)| sum + busy);
                number
            }
        };
        result.processes.push(device_process(container, gpu, device, process));
    }
    let mut attributed = 0;
    for (container, share) in shares {
        series.container_gpu(CONTAINER_GPU_PROCESSES, container, gpu, [], share.processes as f64);
        // the processes' means are of different windows
        let busy = share.busy.map(|busy| busy.min(1.0));
        if let Some(busy) = busy {
            series.container_gpu(CONTAINER_GPU_UTILIZATION, container, gpu, [], busy);
        }
        result.containers.push(GpuUseByContainer { container, gpu, used: share.bytes, busy });
        if let Some(bytes) = share.bytes {
            series.container_gpu(CONTAINER_GPU_MEMORY, container, gpu, [], bytes as f64);
            attributed += bytes;
        }
    }
    let host = host.filter(|_| device.processes.is_some());
    if let Some(host) = host {
        series.gpu(GPU_HOST_PROCESSES, gpu, [], host as f64);
        attributed += host;
    }
    (attributed, host)
}

fn device_process(container: u32, gpu: u32, device: &GpuDevice, process: &GpuProcess) -> DeviceProcess {
    let unknown = || (ProcessId::new(process.pid, 0), Label::Fixed(""));
    let (id, comm) = process.owner.as_ref().map_or_else(unknown, |owner| (owner.id, (&owner.comm).into()));
    // A process of a container with a GPU context is a trainer (`roles::classify`). The container's process list is not
    // used, since it was read at another time: the process may have ended since the driver's report, or started after
    // the list was read.
    let role = if container == NONE { "" } else { Role::Trainer.label() };
    DeviceProcess {
        container,
        gpu,
        device: Arc::clone(device.identity.key()),
        id,
        labels: [Label::Number(u64::from(process.pid)), comm, role.into()],
        used: process.used,
        busy: process.busy,
    }
}

/// Writes one row per process, the largest first: the families have a row limit.
fn write_processes(series: &mut Series, processes: &mut [DeviceProcess]) {
    processes.sort_by_key(|process| std::cmp::Reverse(process.used));
    for process in processes {
        let (container, gpu, labels) = (process.container, process.gpu, &process.labels);
        if let Some(used) = process.used {
            series.container_gpu(PROCESS_GPU_MEMORY, container, gpu, labels.clone(), used as f64);
        }
        if let Some(busy) = process.busy {
            series.container_gpu(PROCESS_GPU_UTILIZATION, container, gpu, labels.clone(), busy);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Timestamp;
    use crate::discover::Container;
    use crate::gpu::{DeviceMemory, GpuIdentity, GpuReading, MigInstance};
    use proptest::prelude::*;

    const A: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    const B: &str = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";

    #[test]
    fn no_sum_if_one_of_two_gpus_does_not_report_memory() {
        let gpus = |second| {
            let on = |used| device(100, Some(vec![process(7, used, 0)]));
            vec![on(Some(10)), on(second)]
        };
        for (second, sum) in [(Some(5), Some(15)), (None, None)] {
            let reading = GpuReading::of_devices(Timestamp::now(), gpus(second));
            let cycle_data = CycleData { gpus: vec![Arc::new(reading)], ..CycleData::default() };
            assert_eq!(contexts(&cycle_data), GpuContexts::from([(ProcessId::new(7, 7), sum)]));
        }
    }

    /// Returns a process in one of two containers, outside them, or without a visible owner.
    fn process(pid: u32, used: Option<u64>, location: u8) -> GpuProcess {
        let cgroup = match location {
            0 => format!("/docker/{A}"),
            1 => format!("/kubepods/pod/{B}/below"),
            2 => "/system.slice/display.service".to_owned(),
            _ => return GpuProcess::new(pid, used),
        };
        let owner = ProcessFacts {
            id: ProcessId::new(pid, u64::from(pid)),
            ppid: 1,
            comm: "python".into(),
            cgroup: cgroup.into(),
        };
        GpuProcess { owner: Some(owner), ..GpuProcess::new(pid, used) }
    }

    fn device(used: u64, processes: Option<Vec<GpuProcess>>) -> GpuDevice {
        let identity = GpuIdentity { index: "0".into(), uuid: "GPU-0".into(), ..GpuIdentity::default() };
        let memory =
            DeviceMemory { total: Some(used + 10), used: Some(used), free: Some(10), reserved: Some(0) };
        GpuDevice { memory, processes, ..GpuDevice::new(Arc::new(identity)) }
    }

    fn inventory() -> Inventory {
        let of = |id: &str, above: &str| Container::in_cgroup(id, &format!("{above}/{id}"));
        Inventory { containers: vec![of(A, "docker"), of(B, "kubepods/pod")], ..Inventory::default() }
    }

    fn written(device: &GpuDevice) -> Vec<(FamilyId, u64)> {
        // the process lists contain only pid 1, in container B
        let inventory = inventory();
        let index =
            ContainerIndex { processes: HashMap::from([(ProcessId::new(1, 1), 1)]), inventory: &inventory };
        let mut series = Series::default();
        let devices = std::slice::from_ref(device);
        let mut result = GpuAttribution::default();
        write_device_memory(0, devices, Some(0), &index, &mut series, &mut result);
        let rows: Vec<_> = series.rows().iter().map(|row| (row.family, row.value as u64)).collect();
        let row = |family| rows.iter().find(|(of, _)| *of == family).map(|(_, value)| *value);
        let rest = GpuRest {
            host: row(FamilyId::GPU_HOST_PROCESSES),
            unattributed: row(FamilyId::GPU_MEMORY_UNATTRIBUTED),
        };
        assert_eq!(result.rests, [rest], "the rows have what is returned");
        rows
    }

    proptest! {
        #[test]
        fn memory_of_gpu_adds_up_for_any_reading(
            used in 0_u64..1 << 40,
            processes in proptest::option::of(proptest::collection::vec(
                (proptest::option::weighted(0.9, 0_u64..1 << 38), 0_u8..4), 0..8)),
        ) {
            let processes = processes.map(|all| {
                (1..).zip(all).map(|(pid, (used, location))| process(pid, used, location)).collect::<Vec<_>>()
            });
            let known: u64 = processes.iter().flatten().filter_map(|process| process.used).sum();
            let device = device(used, processes);
            let rows = written(&device);
            let sum = |family| rows.iter().filter(|(of, _)| *of == family).map(|(_, value)| value).sum::<u64>();
            let unattributed = sum(FamilyId::GPU_MEMORY_UNATTRIBUTED);
            let attributed = sum(FamilyId::CONTAINER_GPU_MEMORY) + sum(FamilyId::GPU_HOST_PROCESSES);
            prop_assert!(attributed <= known, "more was attributed than reported");
            prop_assert_eq!(unattributed, used.saturating_sub(attributed));
            if known <= used {
                prop_assert_eq!(attributed + unattributed, used);
                prop_assert!(rows.iter().all(|(_, value)| *value <= used.max(8)), "a row exceeds the used memory; process counts are up to 8");
            }
        }
    }

    /// Returns a MIG instance of the GPU, as in NVML's readings.
    fn mig_device(
        gpu_instance: u8,
        compute_instance: usize,
        used: Option<u64>,
        processes: Option<Vec<GpuProcess>>,
    ) -> GpuDevice {
        let instance = MigInstance {
            gpu_instance_id: gpu_instance.to_string().into(),
            compute_instance_id: compute_instance.to_string().into(),
            uuid: format!("MIG-{compute_instance}").into(),
        };
        let identity =
            GpuIdentity { uuid: "GPU-0".into(), instance: Some(instance), ..GpuIdentity::default() };
        let memory = DeviceMemory { used, ..DeviceMemory::default() };
        GpuDevice { memory, processes, instance_of: Some(0), ..GpuDevice::new(Arc::new(identity)) }
    }

    type InstanceReport = (u8, Option<u64>, Option<Vec<(Option<u64>, u8)>>);

    /// Generates NVML reports of an instance: nothing, little, or more than exists.
    fn instance_report() -> impl Strategy<Value = InstanceReport> {
        let process = (proptest::option::weighted(0.9, 0_u64..1 << 36), 0_u8..4);
        (
            0_u8..3,
            proptest::option::weighted(0.9, 0_u64..1 << 40),
            proptest::option::weighted(0.9, prop::collection::vec(process, 0..4)),
        )
    }

    proptest! {
        #[test]
        fn memory_of_gpu_and_its_instances_adds_up_for_any_reading(
            used in proptest::option::weighted(0.9, 0_u64..1 << 41),
            reports in prop::collection::vec(instance_report(), 0..5),
        ) {
            let mut pids = 1..;
            let instances = reports.into_iter().enumerate().map(|(number, (gpu_instance, used, processes))| {
                let named = |(bytes, location)| process(pids.next().unwrap_or(0), bytes, location);
                mig_device(gpu_instance, number, used, processes.map(|all| all.into_iter().map(named).collect()))
            });
            let mut devices: Vec<_> = instances.collect();
            let mut whole = device(0, None);
            whole.memory = DeviceMemory { used, ..DeviceMemory::default() };
            devices.insert(0, whole);
            let inventory = inventory();
            let index = ContainerIndex { processes: HashMap::new(), inventory: &inventory };
            let mut series = Series::default();
            let mut result = GpuAttribution::default();
            write_device_memory(0, &devices, Some(0), &index, &mut series, &mut result);
            prop_assert_eq!(result.rests.len(), devices.len());
            for (gpu, device) in (0_u32..).zip(&devices) {
                let within = |row: &&crate::series::Row| device.contains(&devices[row.gpu as usize]);
                let attributed = |row: &&crate::series::Row| {
                    [FamilyId::CONTAINER_GPU_MEMORY, FamilyId::GPU_HOST_PROCESSES].contains(&row.family)
                };
                let attributed: u64 =
                    series.rows().iter().filter(attributed).filter(within).map(|row| row.value as u64).sum();
                let mut rest = series.rows().iter();
                let rest = rest.find(|row| row.family == FamilyId::GPU_MEMORY_UNATTRIBUTED && row.gpu == gpu);
                let wanted = device.memory.used.map(|used| used.saturating_sub(attributed));
                prop_assert_eq!(rest.map(|row| row.value as u64), wanted);
                prop_assert_eq!(result.rests[gpu as usize].unattributed, wanted);
                prop_assert!(rest.is_none_or(|row| row.value >= 0.0));
            }
        }
    }

    #[test]
    fn process_list_outweighs_cgroup_unless_pid_was_reused() {
        let mut process = process(1, Some(5), 0);
        let inventory = inventory();
        let index =
            ContainerIndex { processes: HashMap::from([(ProcessId::new(1, 1), 1)]), inventory: &inventory };
        assert_eq!(index.locate(&process), ProcessLocation::Container(1));
        process.owner.as_mut().unwrap().id.start_ticks = 99;
        assert_eq!(index.locate(&process), ProcessLocation::Container(0));
        // a cgroup that container A named after B
        process.owner.as_mut().unwrap().cgroup = format!("/docker/{A}/docker/{B}").into();
        assert_eq!(index.locate(&process), ProcessLocation::Container(0));
        process.owner = None;
        assert_eq!(index.locate(&process), ProcessLocation::Unknown);
    }
}
