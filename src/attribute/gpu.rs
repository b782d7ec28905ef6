//! GPU processes to containers, and the books of each GPU.
//!
//! used = processes of containers + processes of the host + unattributed, in every cycle.

use std::collections::HashMap;
use std::sync::Arc;

use super::Attributed;
use crate::catalog::*;
use crate::collect::gpu::{Device, GpuProcess, Pids};
use crate::collect::process::Process;
use crate::collect::{Context, Readings};
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

    /// First by the list of the container's own processes, then by the cgroup of the process: the lists are older or
    /// younger than the driver's answer.
    fn whose(&self, process: &GpuProcess) -> Whose {
        let Some(owner) = &process.owner else { return Whose::Unknown };
        match self.by_pid.get(&process.pid) {
            Some((start_ticks, number)) if *start_ticks == owner.start_ticks => {
                return Whose::Container(*number);
            }
            _ => {}
        }
        let ids = container_id::in_path(&owner.cgroup);
        ids.filter_map(|found| self.by_id.get(found.id))
            .last()
            .map_or(Whose::Host, |number| Whose::Container(*number))
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

/// Writes everything that needs a GPU process to be somebody's. Returns the GPUs whose books did not close.
pub fn write(
    context: &Context<'_>,
    readings: &Readings,
    processes: &[Attributed],
    series: &mut Series,
) -> Vec<Arc<str>> {
    if readings.gpus.is_empty() {
        return vec![];
    }
    let index = Index::of(context, readings);
    let roles: HashMap<u32, &Attributed> = processes.iter().map(|process| (process.pid, process)).collect();
    let mut single = Vec::new();
    let mut raced = Vec::new();
    for (gpu, (reading, device)) in (0..).zip(readings.gpu_devices()) {
        // where no pid can be looked up, nothing is known of the host's processes either
        let host = (reading.pids == Pids::Proven).then_some(0);
        write_device(gpu, device, host, &index, series, &mut single);
        if device.raced {
            raced.push(Arc::clone(device.identity.key()));
        }
    }
    single.sort_by_key(|(bytes, ..)| std::cmp::Reverse(*bytes)); // the family has a cap: the largest stay
    for (bytes, gpu, container, process) in single {
        let comm = process.owner.as_ref().map_or_else(|| "".into(), |owner| Arc::clone(&owner.comm));
        let role = roles.get(&process.pid).filter(|_| container != NONE).map_or("", |p| p.role.label());
        let labels = [Label::Number(u64::from(process.pid)), Label::Text(comm), role.into()];
        series.container_gpu(PROCESS_GPU_MEMORY, container, gpu, labels, bytes as f64);
    }
    raced
}

/// One process's bytes, GPU, container, and itself.
type Single<'a> = (u64, u32, u32, &'a GpuProcess);

fn write_device<'a>(
    gpu: u32,
    device: &'a Device,
    mut host: Option<u64>,
    index: &Index<'_>,
    series: &mut Series,
    single: &mut Vec<Single<'a>>,
) {
    let mut held: HashMap<u32, (u64, u64, bool)> = HashMap::new(); // container: processes, bytes, all bytes known
    let mut attributed = 0;
    for process in device.processes.iter().flatten() {
        let whose = index.whose(process);
        let bytes = process.used.filter(|_| whose != Whose::Unknown);
        let container = match whose {
            Whose::Unknown => continue,
            Whose::Host => {
                host = host.zip(bytes).map(|(sum, bytes)| sum + bytes);
                NONE
            }
            Whose::Container(number) => {
                let entry = held.entry(number).or_insert((0, 0, true));
                entry.0 += 1;
                entry.1 += bytes.into_iter().sum::<u64>();
                entry.2 &= bytes.is_some();
                number
            }
        };
        if let Some(bytes) = bytes {
            single.push((bytes, gpu, container, process));
        }
    }
    for (container, (count, bytes, known)) in held {
        series.container_gpu(CONTAINER_GPU_PROCESSES, container, gpu, [], count as f64);
        // a sum of which a part is not told is absent, and then none of it is attributed
        if known {
            series.container_gpu(CONTAINER_GPU_MEMORY, container, gpu, [], bytes as f64);
            attributed += bytes;
        }
    }
    if let Some(host) = host.filter(|_| device.processes.is_some()) {
        series.gpu(GPU_HOST_PROCESSES, gpu, [], host as f64);
        attributed += host;
    }
    if let Some(used) = device.memory.used {
        series.gpu(GPU_MEMORY_UNATTRIBUTED, gpu, [], used.saturating_sub(attributed) as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Moment;
    use crate::collect::gpu::{Identity, Memory, Owner, Reading};
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
            _ => return GpuProcess { pid, used, owner: None },
        };
        let owner = Owner { start_ticks: u64::from(pid), comm: "python".into(), cgroup: cgroup.into() };
        GpuProcess { pid, used, owner: Some(owner) }
    }

    fn device(used: u64, processes: Option<Vec<GpuProcess>>) -> Device {
        let identity = Identity { index: "0".into(), uuid: "GPU-0".into(), ..Identity::default() };
        let memory = Memory { total: Some(used + 10), used: Some(used), free: Some(10), reserved: Some(0) };
        Device { memory, processes, ..Device::new(Arc::new(identity)) }
    }

    fn written(device: &Device) -> Vec<(Id, u64)> {
        // the lists of processes know pid 1 alone, as one of the container B
        let index = Index { by_pid: HashMap::from([(1, (1, 1))]), by_id: HashMap::from([(A, 0), (B, 1)]) };
        let (mut series, mut single) = (Series::default(), Vec::new());
        write_device(0, device, Some(0), &index, &mut series, &mut single);
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
