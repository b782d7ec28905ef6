//! GPU processes to containers, and the books of each GPU.
//!
//! used = processes of containers + processes of the host + unattributed, in every cycle, for each GPU and each MIG
//! instance. What an instance's processes hold is a part of the GPU's used memory too, but is written once, for the
//! instance.

use std::collections::HashMap;
use std::sync::Arc;

use super::Attributed as Member;
use super::roles::Told;
use crate::catalog::*;
use crate::clock::Moment;
use crate::collect::gpu::{Device, GpuProcess, Owner, Pids, Sample, Sampled};
use crate::collect::process::{Process, Processes};
use crate::collect::{Context, Readings};
use crate::discover::ContainerId;
use crate::parse::container_id;
use crate::series::{Label, NONE, Series};

/// Whose a GPU process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whose {
    Container(u32),
    Host,
    /// No such process can be seen: not guessed.
    Unknown,
}

struct Index<'a> {
    by_pid: HashMap<u32, (u64, u32)>,
    by_id: HashMap<&'a str, u32>,
}

impl<'a> Index<'a> {
    fn of(context: &Context<'a>, readings: &Readings) -> Self {
        let by_pid =
            readings.processes.iter().map(|(number, p)| (p.pid, (p.facts.start_ticks, number))).collect();
        let containers = context.inventory.containers.iter().enumerate();
        Self { by_pid, by_id: containers.map(|(number, c)| (c.id.as_str(), number as u32)).collect() }
    }

    fn whose(&self, process: &GpuProcess) -> Whose {
        let Some(owner) = &process.owner else { return Whose::Unknown };
        self.container(process.pid, owner).map_or(Whose::Host, Whose::Container)
    }

    /// First by the list of the container's own processes, then by the cgroup of the process: the lists are older or
    /// younger than the driver's answer.
    fn container(&self, pid: u32, owner: &Owner) -> Option<u32> {
        match self.by_pid.get(&pid) {
            Some((start_ticks, number)) if *start_ticks == owner.start_ticks => Some(*number),
            _ => {
                let ids = container_id::in_path(&owner.cgroup);
                ids.filter_map(|found| self.by_id.get(found.id)).last().copied()
            }
        }
    }
}

/// Processes, by pid and start time, that hold a GPU context, with their memory over all GPUs as far as it is told.
pub type Holders = HashMap<(u32, u64), Option<u64>>;

/// The key of a process in [`Holders`].
pub fn key(process: &Process) -> (u32, u64) {
    (process.pid, process.facts.start_ticks)
}

/// Who holds a GPU context.
pub fn holders(readings: &Readings) -> Holders {
    let mut holders = Holders::new();
    for process in readings.gpu_devices().filter_map(|(_, device)| device.processes.as_ref()).flatten() {
        if let Some(owner) = &process.owner {
            // a sum of which the driver does not tell a part is absent
            let add = |sum: &mut Option<u64>| *sum = sum.zip(process.used).map(|(sum, used)| sum + used);
            holders.entry((process.pid, owner.start_ticks)).and_modify(add).or_insert(process.used);
        }
    }
    holders
}

/// Which GPUs tell of their processes, and what they tell.
pub fn told(readings: &Readings) -> Told {
    let mut told = Told::default();
    for (_, device) in readings.gpu_devices() {
        let Some(processes) = &device.processes else { continue };
        let key = device.identity.key();
        told.by.insert(Arc::clone(key));
        for process in processes {
            if let Some(owner) = &process.owner {
                told.holds.entry((process.pid, owner.start_ticks)).or_default().push(Arc::clone(key));
            }
        }
    }
    told
}

/// What follows from the GPU readings, for the ledger.
#[derive(Debug, Default)]
pub struct Attributed {
    /// Keys of devices whose books did not close in this reading.
    pub raced: Vec<Arc<str>>,
    /// Processes on the devices of the newest readings, those that hold most first.
    pub processes: Vec<OnGpu>,
    /// What was held since the cycle before.
    pub held: Vec<Held>,
}

/// One process on one device.
#[derive(Clone, Debug)]
pub struct OnGpu {
    /// Number of its container, or [`NONE`].
    pub container: u32,
    /// Number of the device.
    pub gpu: u32,
    /// Key of the device.
    pub device: Arc<str>,
    /// Pid and start time.
    pub who: (u32, u64),
    /// The labels of its rows; `None` while its role is not known: its start was not seen yet, or its end was.
    pub labels: Option<[Label; 3]>,
    /// Memory, if it is told.
    pub used: Option<u64>,
    /// The driver's own maximum.
    pub driver_peak: Option<u64>,
    /// Share of the time in which one of its kernels ran.
    pub busy: Option<f64>,
}

/// What was held on one device at one moment.
#[derive(Clone, Debug)]
pub struct Held {
    /// When; if not `is_dated`, at some time before that.
    pub at: Moment,
    /// False for a maximum of which nobody knows when it was.
    pub is_dated: bool,
    /// Key of the device.
    pub device: Arc<str>,
    /// Used memory of the device.
    pub used: Option<u64>,
    /// What each process of a container held, also of one that has ended since, with the process's start in clock ticks
    /// since boot. No container of which a part is not told.
    pub containers: HashMap<ContainerId, Vec<(u64, u64)>>,
    /// What processes held, by pid and start time.
    pub processes: Vec<((u32, u64), u64)>,
    /// Whose process each pid was.
    pub owners: Vec<(u32, ContainerId)>,
}

/// Writes everything that needs a GPU process to be somebody's.
pub fn write(
    context: &Context<'_>,
    readings: &Readings,
    members: &[Member],
    series: &mut Series,
) -> Attributed {
    let mut all = Attributed::default();
    if readings.gpus.is_empty() {
        return all;
    }
    let index = Index::of(context, readings);
    all.held = readings.gpu_samples.iter().flat_map(|sample| held(sample, context, &index)).collect();
    let mut first = 0;
    for reading in &readings.gpus {
        // where no pid can be looked up, nothing is known of the host's processes either
        let host = (reading.pids == Pids::Proven).then_some(0);
        write_books(first, &reading.devices, host, &index, series, &mut all);
        first += reading.devices.len() as u32;
    }
    name_roles(&readings.processes, members, &mut all.processes);
    write_processes(series, &mut all.processes);
    all
}

fn held(sample: &Sample, context: &Context<'_>, index: &Index<'_>) -> Vec<Held> {
    let container = |pid: u32, owner: &Owner| match index.container(pid, owner) {
        Some(number) => Some(context.inventory.containers[number as usize].id.clone()),
        // it may have ended since, or not be known yet
        None => container_id::in_path(&owner.cgroup).next().map(|found| ContainerId::new(found.id)),
    };
    let of_device = |sampled: &Sampled| {
        let mut containers = HashMap::new();
        let (mut processes, mut owners) = (Vec::with_capacity(sampled.holders.len()), Vec::new());
        for (pid, owner, used) in &sampled.holders {
            processes.push(((*pid, owner.start_ticks), *used));
            if let Some(id) = container(*pid, owner) {
                containers.entry(id.clone()).or_insert_with(Vec::new).push((owner.start_ticks, *used));
                owners.push((*pid, id));
            }
        }
        for (pid, owner) in &sampled.silent {
            if let Some(id) = container(*pid, owner) {
                containers.remove(&id);
                owners.push((*pid, id));
            }
        }
        let device = Arc::clone(sampled.identity.key());
        let (at, is_dated) = (sample.at, sample.is_dated);
        Held { at, is_dated, device, used: sampled.used, containers, processes, owners }
    };
    sample.devices.iter().map(of_device).collect()
}

/// The books of all devices of one reading.
fn write_books(
    first: u32,
    devices: &[Device],
    host: Option<u64>,
    index: &Index<'_>,
    series: &mut Series,
    all: &mut Attributed,
) {
    let numbered = || (first..).zip(devices);
    let attributed: Vec<u64> =
        numbered().map(|(gpu, device)| write_holders(gpu, device, host, index, series, all)).collect();
    for (gpu, device) in numbered() {
        if device.raced {
            all.raced.push(Arc::clone(device.identity.key()));
        }
        if let Some(used) = device.memory.used {
            let within = std::iter::zip(devices, &attributed).filter(|(other, _)| device.contains(other));
            let attributed: u64 = within.map(|(_, bytes)| bytes).sum();
            series.gpu(GPU_MEMORY_UNATTRIBUTED, gpu, [], used.saturating_sub(attributed) as f64);
        }
    }
}

/// What a container holds on one device.
struct Share {
    processes: u64,
    bytes: Option<u64>,
    busy: Option<f64>,
}

/// Writes who holds memory of one device. Returns how much of it was attributed.
fn write_holders(
    gpu: u32,
    device: &Device,
    mut host: Option<u64>,
    index: &Index<'_>,
    series: &mut Series,
    all: &mut Attributed,
) -> u64 {
    let mut shares: HashMap<u32, Share> = HashMap::new();
    for process in device.processes.iter().flatten() {
        let container = match index.whose(process) {
            Whose::Unknown => continue,
            Whose::Host => {
                host = host.zip(process.used).map(|(sum, bytes)| sum + bytes);
                NONE
            }
            Whose::Container(number) => {
                let share = Share { processes: 0, bytes: Some(0), busy: Some(0.0) };
                let share = shares.entry(number).or_insert(share);
                share.processes += 1;
                // a sum of which a part is not told is absent
                share.bytes = share.bytes.zip(process.used).map(|(sum, bytes)| sum + bytes);
                share.busy = share.busy.zip(process.busy).map(|(sum, busy)| sum + busy);
                number
            }
        };
        all.processes.push(on_gpu(container, gpu, device, process));
    }
    let mut attributed = 0;
    for (container, share) in shares {
        series.container_gpu(CONTAINER_GPU_PROCESSES, container, gpu, [], share.processes as f64);
        if let Some(busy) = share.busy {
            series.container_gpu(CONTAINER_GPU_UTILIZATION, container, gpu, [], busy);
        }
        if let Some(bytes) = share.bytes {
            series.container_gpu(CONTAINER_GPU_MEMORY, container, gpu, [], bytes as f64);
            attributed += bytes;
        }
    }
    if let Some(host) = host.filter(|_| device.processes.is_some()) {
        series.gpu(GPU_HOST_PROCESSES, gpu, [], host as f64);
        attributed += host;
    }
    attributed
}

fn on_gpu(container: u32, gpu: u32, device: &Device, process: &GpuProcess) -> OnGpu {
    let (start_ticks, comm) = process
        .owner
        .as_ref()
        .map_or((0, Label::Fixed("")), |owner| (owner.start_ticks, (&owner.comm).into()));
    OnGpu {
        container,
        gpu,
        device: Arc::clone(device.identity.key()),
        who: (process.pid, start_ticks),
        labels: Some([Label::Number(u64::from(process.pid)), comm, "".into()]),
        used: process.used,
        driver_peak: process.driver_peak,
        busy: process.busy,
    }
}

/// Enters the roles of containers' processes. The driver's list and the container's are of two moments: a process that is not
/// in the container's has begun or ended between them, and gets no row under a role that it never had.
fn name_roles(listed: &Processes, members: &[Member], processes: &mut [OnGpu]) {
    let roles: HashMap<u32, &Member> = members.iter().map(|process| (process.pid, process)).collect();
    for process in processes.iter_mut().filter(|process| process.container != NONE) {
        match roles.get(&process.who.0) {
            Some(member) => {
                if let Some(labels) = &mut process.labels {
                    labels[2] = member.role.label().into();
                }
            }
            None if listed.complete(process.container as usize) => process.labels = None,
            None => {}
        }
    }
}

/// Writes one row per process, the largest first: the families have a cap.
fn write_processes(series: &mut Series, processes: &mut [OnGpu]) {
    processes.sort_by_key(|process| std::cmp::Reverse(process.used));
    for process in processes {
        let (container, gpu, Some(labels)) = (process.container, process.gpu, &process.labels) else {
            continue;
        };
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
    use crate::clock::Moment;
    use crate::collect::gpu::{Identity, Instance, Memory, Reading};
    use proptest::prelude::*;

    const A: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    const B: &str = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";

    #[test]
    fn a_process_on_two_gpus_of_which_one_does_not_tell_has_no_sum() {
        let gpus = |second| {
            let on = |used| device(100, Some(vec![process(7, used, 0)]));
            vec![on(Some(10)), on(second)]
        };
        for (second, sum) in [(Some(5), Some(15)), (None, None)] {
            let reading = Reading {
                source: "gpu",
                at: Moment::now(),
                took: std::time::Duration::ZERO,
                driver_version: None,
                cuda_version: None,
                counted: 2,
                devices: gpus(second),
                silent: vec![],
                pids: Pids::Proven,
                faults: vec![],
            };
            let readings = Readings { gpus: vec![Arc::new(reading)], ..Readings::default() };
            assert_eq!(holders(&readings), Holders::from([((7, 7), sum)]));
        }
    }

    /// A process in one of two containers, outside them, or seen by nobody.
    fn process(pid: u32, used: Option<u64>, place: u8) -> GpuProcess {
        let cgroup = match place {
            0 => format!("/docker/{A}"),
            1 => format!("/kubepods/pod/{B}/below"),
            2 => "/system.slice/display.service".to_owned(),
            _ => return GpuProcess::new(pid, used),
        };
        let owner = Owner { start_ticks: u64::from(pid), comm: "python".into(), cgroup: cgroup.into() };
        GpuProcess { owner: Some(owner), ..GpuProcess::new(pid, used) }
    }

    fn device(used: u64, processes: Option<Vec<GpuProcess>>) -> Device {
        let identity = Identity { index: "0".into(), uuid: "GPU-0".into(), ..Identity::default() };
        let memory = Memory { total: Some(used + 10), used: Some(used), free: Some(10), reserved: Some(0) };
        Device { memory, processes, ..Device::new(Arc::new(identity)) }
    }

    fn written(device: &Device) -> Vec<(Id, u64)> {
        // the lists of processes know pid 1 alone, as one of the container B
        let index = Index { by_pid: HashMap::from([(1, (1, 1))]), by_id: HashMap::from([(A, 0), (B, 1)]) };
        let mut series = Series::default();
        let devices = std::slice::from_ref(device);
        write_books(0, devices, Some(0), &index, &mut series, &mut Attributed::default());
        series.rows().iter().map(|row| (row.family, row.value as u64)).collect()
    }

    proptest! {
        #[test]
        fn the_books_balance_for_any_reading(
            used in 0_u64..1 << 40,
            processes in proptest::option::of(proptest::collection::vec(
                (proptest::option::weighted(0.9, 0_u64..1 << 38), 0_u8..4), 0..8)),
        ) {
            let processes = processes.map(|all| {
                (1..).zip(all).map(|(pid, (used, place))| process(pid, used, place)).collect::<Vec<_>>()
            });
            let known: u64 = processes.iter().flatten().filter_map(|process| process.used).sum();
            let device = device(used, processes);
            let rows = written(&device);
            let sum = |family| rows.iter().filter(|(of, _)| *of == family).map(|(_, value)| value).sum::<u64>();
            let unattributed = sum(Id::GPU_MEMORY_UNATTRIBUTED);
            let attributed = sum(Id::CONTAINER_GPU_MEMORY) + sum(Id::GPU_HOST_PROCESSES);
            prop_assert!(attributed <= known, "nothing is guessed");
            prop_assert_eq!(unattributed, used.saturating_sub(attributed));
            if known <= used {
                prop_assert_eq!(attributed + unattributed, used);
                prop_assert!(rows.iter().all(|(_, value)| *value <= used.max(8)), "8 is a number of processes");
            }
        }
    }

    /// An instance of the one GPU, as NVML's readings have it.
    fn part(
        gpu_instance: u8,
        compute_instance: usize,
        used: Option<u64>,
        processes: Option<Vec<GpuProcess>>,
    ) -> Device {
        let instance = Instance {
            gpu_instance_id: gpu_instance.to_string().into(),
            compute_instance_id: compute_instance.to_string().into(),
            uuid: format!("MIG-{compute_instance}").into(),
        };
        let identity = Identity { uuid: "GPU-0".into(), instance: Some(instance), ..Identity::default() };
        let memory = Memory { used, ..Memory::default() };
        Device { memory, processes, instance_of: Some(0), ..Device::new(Arc::new(identity)) }
    }

    type Answer = (u8, Option<u64>, Option<Vec<(Option<u64>, u8)>>);

    /// What NVML may answer of an instance: nothing, little, or more than there is.
    fn answer() -> impl Strategy<Value = Answer> {
        let process = (proptest::option::weighted(0.9, 0_u64..1 << 36), 0_u8..4);
        (
            0_u8..3,
            proptest::option::weighted(0.9, 0_u64..1 << 40),
            proptest::option::weighted(0.9, prop::collection::vec(process, 0..4)),
        )
    }

    proptest! {
        #[test]
        fn the_books_of_a_gpu_and_of_each_of_its_instances_balance_for_any_reading(
            used in proptest::option::weighted(0.9, 0_u64..1 << 41),
            answers in prop::collection::vec(answer(), 0..5),
        ) {
            let mut pids = 1..;
            let parts = answers.into_iter().enumerate().map(|(number, (gpu_instance, used, processes))| {
                let named = |(bytes, place)| process(pids.next().unwrap_or(0), bytes, place);
                part(gpu_instance, number, used, processes.map(|all| all.into_iter().map(named).collect()))
            });
            let mut devices: Vec<_> = parts.collect();
            let mut whole = device(0, None);
            whole.memory = Memory { used, ..Memory::default() };
            devices.insert(0, whole);
            let index = Index { by_pid: HashMap::new(), by_id: HashMap::from([(A, 0), (B, 1)]) };
            let mut series = Series::default();
            write_books(0, &devices, Some(0), &index, &mut series, &mut Attributed::default());
            for (gpu, device) in (0_u32..).zip(&devices) {
                let within = |row: &&crate::series::Row| device.contains(&devices[row.gpu as usize]);
                let attributed = |row: &&crate::series::Row| {
                    [Id::CONTAINER_GPU_MEMORY, Id::GPU_HOST_PROCESSES].contains(&row.family)
                };
                let attributed: u64 =
                    series.rows().iter().filter(attributed).filter(within).map(|row| row.value as u64).sum();
                let mut rest = series.rows().iter();
                let rest = rest.find(|row| row.family == Id::GPU_MEMORY_UNATTRIBUTED && row.gpu == gpu);
                let wanted = device.memory.used.map(|used| used.saturating_sub(attributed));
                prop_assert_eq!(rest.map(|row| row.value as u64), wanted);
                prop_assert!(rest.is_none_or(|row| row.value >= 0.0));
            }
        }
    }

    #[test]
    fn the_list_of_the_containers_processes_outweighs_the_cgroup_unless_the_pid_is_anothers_by_now() {
        let mut process = process(1, Some(5), 0);
        let index = Index { by_pid: HashMap::from([(1, (1, 1))]), by_id: HashMap::from([(A, 0), (B, 1)]) };
        assert_eq!(index.whose(&process), Whose::Container(1));
        process.owner.as_mut().unwrap().start_ticks = 99;
        assert_eq!(index.whose(&process), Whose::Container(0));
        process.owner = None;
        assert_eq!(index.whose(&process), Whose::Unknown);
    }
}
