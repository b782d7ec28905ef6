//! Attribution: process to role, and GPU process to container. Memory that cannot be attributed stays *unattributed*.
//!
//! Everything here is a function of the cycle's data. Nothing is read, and the only state is which processes held GPU
//! memory when the driver last reported it.

pub mod auto_cleanup;
pub mod gpu_allocation;
pub mod gpu;
pub mod inside;
pub mod roles;

use std::sync::Arc;
use std::time::Duration;

pub use roles::{GpuHolders, Role};

use crate::catalog::*;
use crate::clock::Timestamp;
use crate::collect::cycle::CycleRole;
use crate::collect::process::Process;
use crate::collect::{Context, CycleData};
use crate::config::OwnerLabels;
use crate::series::{Label, Series};

/// A process of a container with everything known about it.
#[derive(Clone, Debug)]
pub struct ContainerProcess {
    /// Number of its container.
    pub container: u32,
    /// Its pid on the host.
    pub pid: u32,
    /// Its name, made printable.
    pub comm: Arc<str>,
    /// Its role.
    pub role: Role,
    /// Resident memory.
    pub memory: crate::collect::process::ResidentMemory,
    /// Proportional share in bytes, if measured.
    pub pss_bytes: Option<u64>,
    /// GPU memory in bytes over all GPUs, if it holds any and the driver reports the amount.
    pub gpu_bytes: Option<u64>,
}

/// Result of attribution, for the ledger and the snapshot.
#[derive(Debug, Default)]
pub struct Attribution {
    /// All processes of containers.
    pub processes: Vec<ContainerProcess>,
    /// Attribution of the GPU readings.
    pub gpus: gpu::GpuAttribution,
    /// What programs report of their GPUs.
    pub inside: inside::InsideFigures,
    /// Sums by role.
    pub roles: Vec<CycleRole>,
}

/// Attributes the data of one cycle and writes the resulting samples.
pub fn attribute(
    context: &Context<'_>,
    cycle_data: &CycleData,
    gpu_holders: &mut GpuHolders,
    series: &mut Series,
) -> Attribution {
    let contexts = gpu::contexts(cycle_data);
    let containers = 0..context.inventory.containers.len();
    let is_complete = containers.clone().all(|number| cycle_data.processes.complete(number));
    let running = containers.clone().flat_map(|number| cycle_data.processes.of(number)).map(Process::id);
    gpu_holders.update(is_complete.then(|| running.collect()).as_ref(), gpu::evidence(cycle_data));
    let mut processes = Vec::with_capacity(cycle_data.processes.len());
    let mut roles = Vec::with_capacity(Role::ALL.len() * containers.len());
    for number in containers {
        let from = processes.len();
        push_processes(context, cycle_data, (&contexts, gpu_holders), number, &mut processes);
        let are_roles_known =
            cycle_data.processes.of(number).iter().all(|process| is_role_known(context.now, process));
        if cycle_data.processes.complete(number) && are_roles_known {
            write_role_sums(context, cycle_data, number, &processes[from..], series, &mut roles);
        }
    }
    let gpus = gpu::write(context, cycle_data, series);
    Attribution { processes, gpus, roles, ..Attribution::default() }
}

/// Returns false for a process whose command line should have been read long ago: it hangs, and so its role is unknown.
/// A young process without one is *other* for a moment, as it may still be before its `exec`.
fn is_role_known(now: Timestamp, process: &Process) -> bool {
    const MAX_PENDING: Duration = Duration::from_secs(2);
    let started_usec = process.meta.start_ticks * 1_000_000 / rustix::param::clock_ticks_per_second();
    let age = now.since_boot().saturating_sub(Duration::from_micros(started_usec));
    process.meta.command_hash.is_some() || age < MAX_PENDING
}

fn push_processes(
    context: &Context<'_>,
    cycle_data: &CycleData,
    (contexts, gpu_holders): (&gpu::GpuContexts, &GpuHolders),
    number: usize,
    out: &mut Vec<ContainerProcess>,
) {
    let members = cycle_data.processes.of(number);
    let id = &context.inventory.containers[number].id;
    let roles = roles::classify(members, |process| gpu_holders.contains(&process.id()));
    out.extend(std::iter::zip(members, roles).map(|(process, role)| ContainerProcess {
        container: number as u32,
        pid: process.pid,
        comm: Arc::clone(&process.meta.comm),
        role,
        memory: process.memory,
        pss_bytes: cycle_data.pss.of(id, process.pid, process.meta.start_ticks),
        gpu_bytes: contexts.get(&process.id()).copied().flatten(),
    }));
}

/// Writes the sums by role. A role without processes is 0, since all processes and their roles are known.
fn write_role_sums(
    context: &Context<'_>,
    cycle_data: &CycleData,
    number: usize,
    members: &[ContainerProcess],
    series: &mut Series,
    roles: &mut Vec<CycleRole>,
) {
    let has_pss = cycle_data.pss.has(&context.inventory.containers[number].id);
    for role in Role::ALL {
        let label: Label = role.label().into();
        let of_role = || members.iter().filter(|process| process.role == role);
        let rss: u64 = of_role().map(|process| process.memory.rss_bytes).sum();
        // a process that started after the last measurement would be missing in the sum
        let pss = has_pss.then(|| of_role().map(|process| process.pss_bytes).sum::<Option<u64>>()).flatten();
        let (container, processes) = (number as u32, of_role().count() as u64);
        series.container(CONTAINER_PROCESSES, container, [label.clone()], processes as f64);
        series.container(CONTAINER_PROCESS_RSS, container, [label.clone()], rss as f64);
        if let Some(pss) = pss {
            series.container(CONTAINER_PROCESS_PSS, container, [label], pss as f64);
        }
        roles.push(CycleRole { container, role: role.label(), processes, rss, pss });
    }
}

/// Writes the owner of a container, if it has one.
pub fn write_owner(owners: &OwnerLabels, number: u32, series: &mut Series) {
    if let Some((_, owner)) = owners.first() {
        let labels = owners.iter().cloned();
        series.container_with(CONTAINER_OWNER_INFO, number, [Label::from(owner)], labels, 1.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::process::ProcessMeta;
    use crate::parse::process::Command;

    #[test]
    fn role_is_unknown_while_an_old_process_has_no_command_line() {
        let now = Timestamp::now();
        let ticks = rustix::param::clock_ticks_per_second();
        let now_ticks = now.kernel_usec() * ticks / 1_000_000;
        let process = |age_seconds: u64, command_hash| {
            let meta = ProcessMeta {
                settings: None,
                comm: "python".into(),
                ppid: 1,
                start_ticks: now_ticks.saturating_sub(age_seconds * ticks),
                command: Command::of(b""),
                command_hash,
                zombie: false,
            };
            Process {
                pid: 7,
                memory: crate::collect::process::ResidentMemory::default(),
                meta: Arc::new(meta),
            }
        };
        assert!(is_role_known(now, &process(60, Some(1))));
        assert!(is_role_known(now, &process(1, None)), "it may be before its exec");
        assert!(!is_role_known(now, &process(60, None)), "its read hangs");
    }
}
