//! The cycle's side of the ledger: passes on what a cycle saw, and writes the ledger's figures as series.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use super::exchange::{
    ContainerFigures, CycleReport, GpuProcessUse, GpuUse, GpuUser, LedgerFigures, SharedState, SourceName,
};
use crate::events::{CudaOomSource, ExitReason, GpuError, OTHER_PROCESSES, UsageSample};
use crate::runs::sample::samples;
use crate::runs::usage::{ContainerUsage, ProcessUsage};

use crate::attribute::{Attribution, Role};
use crate::catalog::*;
use crate::clock::Timestamp;
use crate::collect::cycle::CycleCounts;
use crate::collect::{Context, CycleData};
use crate::discover::{Container, Identity};
use crate::gpu::GpuDevice;
use crate::gpu_state::peaks::GpuPeaks;
use crate::gpu_state::xid_dedup::XidDedup;
use crate::gpu_state::xids::{ReportedXid, XidCounts};
use crate::runs::peaks::RunPeaksTable;
use crate::series::Series;

/// What the ledger adds to a cycle.
#[derive(Debug, Default)]
pub struct LedgerSample {
    /// Ended containers that are still shown; they are numbered after the running ones.
    pub ended: Vec<Arc<Container>>,
    /// OOM kills on this host.
    pub host_oom_kills: Option<u64>,
    /// Counts of running containers, by number.
    pub counts: Vec<Option<CycleCounts>>,
}

/// The cycle's half of the ledger.
#[derive(Debug)]
pub struct Ledger {
    containers: RunPeaksTable,
    shared_state: Arc<SharedState>,
    gpus: GpuPeaks,
    xids: XidCounts,
    gpu_errors: XidDedup,
}

impl Ledger {
    /// Returns an empty ledger. Ended containers are shown for `keep_ended`; `gpus_expected` is the configured number
    /// of NVIDIA GPUs, if there is one.
    pub fn new(keep_ended: Duration, gpus_expected: Option<usize>, shared_state: Arc<SharedState>) -> Self {
        let (containers, gpus) = (RunPeaksTable::new(keep_ended), GpuPeaks::new(gpus_expected));
        Self { containers, shared_state, gpus, xids: XidCounts::default(), gpu_errors: XidDedup::default() }
    }

    /// Returns the state that is shared with the ledger service.
    pub fn shared_state(&self) -> &Arc<SharedState> {
        &self.shared_state
    }

    /// Returns true once the ledger service has published figures.
    pub fn has_figures(&self) -> bool {
        self.shared_state.has_figures()
    }

    /// Records one cycle and writes the ledger's series.
    pub fn record_cycle(
        &mut self,
        context: &Context<'_>,
        ended: &[Arc<Container>],
        cycle_data: &CycleData,
        attribution: &Attribution,
        series: &mut Series,
    ) -> LedgerSample {
        if let Some(stored) = self.shared_state.take_stored() {
            self.containers.restore(stored.peaks);
            self.gpus.expected.restore(&stored.gpu_counts);
        }
        self.gpus.record(context.now, cycle_data, &attribution.gpus, series);
        self.shared_state.set_gpu_counts(self.gpus.expected.take_changes());
        let xids = self.xids.record(context, cycle_data, &attribution.gpus, &self.shared_state.take_xids());
        self.containers.record(context, ended, cycle_data, &attribution.gpus);
        for xid in &xids {
            if let Some(name) = xid.container.as_ref().and_then(|id| self.containers.identity(id)) {
                self.xids.count(context.now, xid, name);
            }
        }
        self.publish_gpu_errors(context, cycle_data, xids);
        self.publish_cycle(context, cycle_data, attribution);
        let ended = self.containers.write(context, series);
        let mut sample = LedgerSample { ended, ..LedgerSample::default() };
        if let Some(figures) = self.shared_state.figures(context.now) {
            write_host(&figures, series);
            sample.host_oom_kills = figures.oom_kills();
            sample.counts = write_containers(&figures, context, &mut sample.ended, series);
            if figures.sources.contains(&(SourceName::Kmsg, true)) {
                self.xids.init_at_zero(context, cycle_data, &attribution.gpus);
            }
        }
        let containers = context.inventory.containers.iter().chain(&sample.ended);
        self.xids.write(context.now, containers, series);
        sample
    }

    /// Passes GPU errors to the ledger service, which makes events of them.
    fn publish_gpu_errors(&mut self, context: &Context<'_>, cycle_data: &CycleData, xids: Vec<ReportedXid>) {
        let figures = self.shared_state.figures(context.now);
        let is_log_read = figures.is_some_and(|figures| figures.sources.contains(&(SourceName::Kmsg, true)));
        let logged = xids.into_iter().map(|xid| {
            let subject = xid.container.as_ref().and_then(|id| self.containers.subject(id));
            let (gpu, gpu_uuid) = xid.gpu;
            let source = "kmsg".into();
            GpuError { id: 0, at: xid.at, gpu, gpu_uuid, xid: xid.xid, pid: xid.pid, subject, source }
        });
        let errors = self.gpu_errors.record(context.now, cycle_data, logged.collect(), is_log_read);
        if !errors.is_empty() {
            self.shared_state.add_gpu_errors(errors);
        }
    }

    /// Publishes the data of this cycle to the ledger service.
    fn publish_cycle(&self, context: &Context<'_>, cycle_data: &CycleData, attribution: &Attribution) {
        let running = &context.inventory.containers;
        let mut containers = vec![ContainerUsage::default(); running.len()];
        for (number, usage) in containers.iter_mut().enumerate() {
            usage.sample = sample(context.now, cycle_data, number);
            (usage.peak_usage_bytes, usage.peak_unreclaimable_bytes) =
                self.containers.peaks(&running[number].id);
            usage.gpu_peaks = self.containers.gpu_peaks(&running[number].id);
            usage.run_id = self.containers.run_id(&running[number].id);
            usage.pss_missing = Some(cycle_data.pss.missing(&running[number].id));
        }
        for (usage, sample) in std::iter::zip(&mut containers, samples(context, cycle_data, attribution)) {
            usage.run = sample;
        }
        let all = (0..running.len()).flat_map(|number| cycle_data.processes.of(number));
        for (process, attributed) in std::iter::zip(all, &attribution.processes) {
            let usage = &mut containers[attributed.container as usize];
            if attributed.role == Role::Trainer {
                usage.run.add_arguments(
                    (process.meta.start_ticks, attributed.pid),
                    process.meta.settings.as_ref(),
                );
            }
            usage.processes.push(ProcessUsage {
                pid: attributed.pid,
                ppid: process.meta.ppid,
                comm: Arc::clone(&attributed.comm),
                role: attributed.role,
                python: process.meta.command.python,
                memory: attributed.memory,
                pss_bytes: attributed.pss_bytes,
                program: process.meta.command.program,
            });
        }
        for (number, usage) in containers.iter_mut().enumerate() {
            usage.has_all_processes = cycle_data.processes.complete(number);
        }
        self.shared_state.publish_cycle(CycleReport {
            at: context.now,
            inventory: Arc::clone(context.inventory),
            containers: containers.into_iter().map(Arc::new).collect(),
            host_memory: cycle_data.host.and_then(|host| Some((host.total, host.available?))),
            gpus: gpu_uses(context, cycle_data, attribution),
        });
    }
}

/// Returns who holds memory of each GPU.
fn gpu_uses(context: &Context<'_>, cycle_data: &CycleData, attribution: &Attribution) -> Vec<GpuUse> {
    let use_of = |(number, (_, device)): (u32, (_, &GpuDevice))| {
        let on_it = || attribution.gpus.processes.iter().filter(move |process| process.gpu == number);
        let mut sums: BTreeMap<u32, Option<u64>> = BTreeMap::new();
        for process in on_it() {
            // a sum is absent if a part of it is
            let add = |sum: &mut Option<u64>| *sum = sum.zip(process.used).map(|(sum, used)| sum + used);
            sums.entry(process.container).and_modify(add).or_insert(process.used);
        }
        let container_of = |number: u32| context.inventory.containers.get(number as usize);
        let user = |(container, bytes): (u32, Option<u64>)| match container_of(container) {
            Some(container) => GpuUser {
                container: Some(container.id.clone()),
                name: container.identity.path().into(),
                bytes,
            },
            None => GpuUser { container: None, name: OTHER_PROCESSES.into(), bytes },
        };
        let mut holders: Vec<_> = sums.into_iter().map(user).collect();
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
        GpuUse {
            index: Arc::clone(&device.identity.index),
            uuid: Arc::clone(device.identity.key()),
            processes: on_it()
                .map(|process| GpuProcessUse {
                    id: process.id,
                    container: container_of(process.container).map(|container| container.id.clone()),
                    bytes: process.used,
                })
                .collect(),
            holders,
        }
    };
    (0..).zip(cycle_data.gpu_devices()).map(use_of).collect()
}

fn sample(now: Timestamp, cycle_data: &CycleData, number: usize) -> Option<UsageSample> {
    let memory = cycle_data.memory.get(number)?.as_ref()?;
    let (shm_used_bytes, shm_size_bytes) = cycle_data.shm.get(number).copied().flatten().unzip();
    let shm_used_bytes = shm_used_bytes.flatten();
    Some(UsageSample {
        at: now.unix_seconds(),
        usage_bytes: memory.usage,
        unreclaimable_bytes: memory.unreclaimable,
        anon_bytes: memory.anon,
        shmem_bytes: memory.shmem,
        file_bytes: memory.file,
        limit_bytes: memory.limit,
        effective_limit_bytes: memory.effective_limit,
        shm_used_bytes,
        shm_size_bytes,
    })
}

fn write_host(figures: &LedgerFigures, series: &mut Series) {
    if figures.has_counts {
        series.global(HOST_OOM_KILLS, [], figures.host_kills as f64);
        let by_scope = [("host", figures.host_process_kills), ("limit", figures.host_process_kills_at_limit)];
        for (scope, kills) in by_scope {
            series.global(HOST_PROCESS_OOM_KILLS, [scope.into()], kills as f64);
        }
        series.global(OOM_UNATTRIBUTED, [], figures.unattributed as f64);
        series.global(OOM_KILLS_WITHOUT_RECORD, [], figures.gaps as f64);
        series.global(OOM_DUPLICATE_LINES, [], figures.duplicate_lines as f64);
    }
    for (source, up) in &figures.sources {
        series.global(OOM_SOURCE_UP, [source.label().into()], f64::from(u8::from(*up)));
    }
    if let Some(up) = figures.store_up {
        series.global(STORE_UP, [], f64::from(u8::from(up)));
        series.global(STORE_UNREADABLE_ROWS, [], figures.unreadable_rows as f64);
    }
}

/// Writes the ledger's figures without a cycle. Returns the containers that they are about, of which only names are known.
pub fn write_figures(figures: &LedgerFigures, series: &mut Series) -> Vec<Arc<Container>> {
    write_host(figures, series);
    let reads_logs = figures.reads_logs;
    let containers = figures.containers.iter().enumerate();
    let containers = containers.map(|(number, figures)| {
        write_container(figures, number as u32, reads_logs, series);
        Arc::new(Container::known_by_name(figures.identity.clone()))
    });
    containers.collect()
}

/// Writes the counters of all container names: of running containers, of ended ones in `shown`, and of those that only
/// the ledger remembers, which are appended to `shown`. A container that the ledger service does not know yet gets no
/// counters in this cycle: its name may have earlier counts, so 0 would be wrong. Returns those of running containers.
fn write_containers(
    figures: &LedgerFigures,
    context: &Context<'_>,
    shown: &mut Vec<Arc<Container>>,
    series: &mut Series,
) -> Vec<Option<CycleCounts>> {
    let by_name: HashMap<&Identity, &ContainerFigures> =
        figures.containers.iter().map(|figures| (&figures.identity, figures)).collect();
    let (running, reads_logs) = (&context.inventory.containers, figures.reads_logs);
    let (mut written, mut counts) = (HashSet::new(), Vec::with_capacity(running.len()));
    for (number, container) in running.iter().chain(shown.iter()).enumerate() {
        let name = container.identity.clone();
        let figures = by_name.get(&name);
        if let Some(figures) = figures {
            write_container(figures, number as u32, reads_logs, series);
        }
        if number < running.len() {
            counts.push(figures.map(|figures| figures.counts()));
        }
        written.insert(name);
    }
    for figures in figures.containers.iter().filter(|figures| !written.contains(&figures.identity)) {
        let number = running.len() + shown.len();
        write_container(figures, number as u32, reads_logs, series);
        shown.push(Arc::new(Container::known_by_name(figures.identity.clone())));
    }
    counts
}

fn write_container(figures: &ContainerFigures, number: u32, reads_logs: bool, series: &mut Series) {
    if let Some(since) = figures.since {
        series.set_counted_since(number, since);
    }
    for (victim, scopes) in std::iter::zip(["main", "child"], figures.kills) {
        for (scope, kills) in std::iter::zip(["container", "host"], scopes) {
            series.container(CONTAINER_OOM_KILLS, number, [victim.into(), scope.into()], kills as f64);
        }
    }
    for (reason, exits) in std::iter::zip(ExitReason::ALL, figures.exits) {
        if reason.is_of_log() && !reads_logs && exits == 0 {
            continue;
        }
        series.container(CONTAINER_EXITS, number, [reason.label().into()], exits as f64);
    }
    series.container(CONTAINER_RESTARTS, number, [], figures.restarts as f64);
    for (source, ooms) in std::iter::zip(CudaOomSource::ALL, figures.cuda_ooms) {
        if let Some(ooms) = ooms {
            series.container(CONTAINER_CUDA_OOMS, number, [source.label().into()], ooms as f64);
        }
    }
    if let Some(at) = figures.last_cuda_oom {
        series.container(CONTAINER_LAST_CUDA_OOM, number, [], at);
    }
    if let Some(at) = figures.last_kill {
        series.container(CONTAINER_LAST_OOM_KILL, number, [], at);
    }
    if let Some(code) = figures.last_exit_code {
        series.container(CONTAINER_LAST_EXIT_CODE, number, [], code as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sample_has_the_shared_memory_of_its_container() {
        let memory = vec![Some(crate::collect::container_memory::ContainerMemory::default()); 2];
        let cycle_data = CycleData { memory, shm: vec![None, Some((Some(60), 64))], ..CycleData::default() };
        let shm = |number| {
            let sample = sample(Timestamp::now(), &cycle_data, number).unwrap();
            (sample.shm_used_bytes, sample.shm_size_bytes)
        };
        assert_eq!([shm(0), shm(1)], [(None, None), (Some(60), Some(64))]);
    }
}
