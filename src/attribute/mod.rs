//! Whose is it: process -> role, GPU process -> container. What cannot be told stays *unattributed*.
//!
//! Everything here is a function of the cycle's readings; nothing is read, and nothing is remembered but who held GPU
//! memory when it was told last.

pub mod allocated;
pub mod gpu;
pub mod roles;

use std::sync::Arc;

pub use roles::{Ranks, Role};

use crate::catalog::*;
use crate::collect::{Context, Readings};
use crate::series::{Label, Series};

/// One process of a container with all that is known of it.
#[derive(Clone, Debug)]
pub struct Attributed {
    /// Number of its container.
    pub container: u32,
    /// Its pid on the host.
    pub pid: u32,
    /// Its name, made printable.
    pub comm: Arc<str>,
    /// What it is for.
    pub role: Role,
    /// Resident memory in bytes.
    pub rss_bytes: u64,
    /// Proportional share in bytes, if measured.
    pub pss_bytes: Option<u64>,
    /// GPU memory in bytes over all GPUs, if it holds any that the driver tells.
    pub gpu_bytes: Option<u64>,
}

/// What attribution leaves for the ledger and the snapshot.
#[derive(Debug, Default)]
pub struct Attribution {
    /// All processes of containers.
    pub processes: Vec<Attributed>,
    /// What follows from the GPU readings.
    pub gpus: gpu::Attributed,
}

/// Attributes one cycle's readings and writes the samples that follow.
pub fn attribute(
    context: &Context<'_>,
    readings: &Readings,
    ranks: &mut Ranks,
    series: &mut Series,
) -> Attribution {
    let holders = gpu::holders(readings);
    let numbers = 0..context.inventory.containers.len();
    let is_whole = numbers.clone().all(|number| readings.processes.complete(number));
    let living = numbers.clone().flat_map(|number| readings.processes.of(number)).map(gpu::key);
    ranks.enter(is_whole.then(|| living.collect()).as_ref(), gpu::told(readings));
    let mut processes = Vec::with_capacity(readings.processes.len());
    for number in numbers {
        let from = processes.len();
        roles_of(context, readings, (&holders, ranks), number, &mut processes);
        if readings.processes.complete(number) {
            by_role(context, readings, number, &processes[from..], series);
        }
    }
    let gpus = gpu::write(context, readings, &processes, series);
    allocated::write(context, readings, series);
    Attribution { processes, gpus }
}

fn roles_of(
    context: &Context<'_>,
    readings: &Readings,
    (holders, ranks): (&gpu::Holders, &Ranks),
    number: usize,
    out: &mut Vec<Attributed>,
) {
    let members = readings.processes.of(number);
    let id = &context.inventory.containers[number].id;
    let roles = roles::classify(members, |process| ranks.contains(&gpu::key(process)));
    out.extend(std::iter::zip(members, roles).map(|(process, role)| Attributed {
        container: number as u32,
        pid: process.pid,
        comm: Arc::clone(&process.facts.comm),
        role,
        rss_bytes: process.rss_bytes,
        pss_bytes: readings.pss.of(id, process.pid, process.facts.start_ticks),
        gpu_bytes: holders.get(&gpu::key(process)).copied().flatten(),
    }));
}

/// Sums by role. A role without processes is 0: it is known that there are none.
fn by_role(
    context: &Context<'_>,
    readings: &Readings,
    number: usize,
    members: &[Attributed],
    series: &mut Series,
) {
    let measured = readings.pss.has(&context.inventory.containers[number].id);
    for role in Role::ALL {
        let label: Label = role.label().into();
        let of_role = || members.iter().filter(|process| process.role == role);
        let rss: u64 = of_role().map(|process| process.rss_bytes).sum();
        series.container(CONTAINER_PROCESSES, number as u32, [label.clone()], of_role().count() as f64);
        series.container(CONTAINER_PROCESS_RSS, number as u32, [label.clone()], rss as f64);
        // a process that is younger than the last measurement would be missing in the sum
        if measured && of_role().all(|process| process.pss_bytes.is_some()) {
            let pss: u64 = of_role().filter_map(|process| process.pss_bytes).sum();
            series.container(CONTAINER_PROCESS_PSS, number as u32, [label], pss as f64);
        }
    }
}
