//! GPU processes to containers, and the books of each GPU.
//!
//! used = processes of containers + processes of the host + unattributed, in every cycle.

use std::collections::HashMap;
use std::sync::Arc;

use super::Attributed;
use crate::catalog::*;
use crate::collect::gpu::{Device, GpuProcess};
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

/// Pids of this host that hold a GPU context, with their memory over all GPUs as far as the driver tells.
pub fn holders(_context: &Context<'_>, readings: &Readings) -> HashMap<u32, Option<u64>> {
    let mut holders: HashMap<u32, Option<u64>> = HashMap::new();
    for process in
        readings.gpu.iter().flat_map(|gpu| &gpu.devices).filter_map(|d| d.processes.as_ref()).flatten()
    {
        if process.owner.is_some() {
            let sum = holders.entry(process.pid).or_default();
            *sum = process.used.map(|used| used + sum.unwrap_or(0)).or(*sum);
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
    let Some(reading) = &readings.gpu else { return vec![] };
    let index = Index::of(context, readings);
    let roles: HashMap<u32, &Attributed> = processes.iter().map(|process| (process.pid, process)).collect();
    let mut single = Vec::new();
    let mut raced = Vec::new();
    for (gpu, device) in reading.devices.iter().enumerate() {
        write_device(gpu as u32, device, &index, series, &mut single);
        if device.raced {
            raced.push(Arc::clone(&device.identity.uuid));
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
    index: &Index<'_>,
    series: &mut Series,
    single: &mut Vec<Single<'a>>,
) {
    let mut held: HashMap<u32, (u64, u64, bool)> = HashMap::new(); // container: processes, bytes, all bytes known
    let mut attributed = 0;
    let mut host = 0;
    for process in device.processes.iter().flatten() {
        let whose = index.whose(process);
        let bytes = process.used.filter(|_| whose != Whose::Unknown);
        attributed += bytes.into_iter().sum::<u64>();
        let container = match whose {
            Whose::Unknown => continue,
            Whose::Host => {
                host += bytes.into_iter().sum::<u64>();
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
        if known {
            series.container_gpu(CONTAINER_GPU_MEMORY, container, gpu, [], bytes as f64);
        }
    }
    if device.processes.is_some() {
        series.gpu(GPU_HOST_PROCESSES, gpu, [], host as f64);
    }
    if let Some(memory) = device.memory {
        series.gpu(GPU_MEMORY_UNATTRIBUTED, gpu, [], memory.used.saturating_sub(attributed) as f64);
    }
}
