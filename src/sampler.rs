//! Runs the cycles: discover, collect, attribute, update the ledger, finish a snapshot.
//!
//! A cycle is one synchronous function, because reads of kernel files block. Sampling is independent of scraping.

pub mod stalled;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::attribute::auto_cleanup::containers_to_clean;
use crate::attribute::gpu_allocation::AllocatedGpus;
use crate::attribute::inside::InsideView;
use crate::attribute::{Attribution, GpuHolders, attribute};
use crate::catalog::*;
use crate::clock::Timestamp;
use crate::collect::cycle::{Cycle, CycleContainer, CycleGpu, CycleHost};
use crate::collect::{self, CollectOutcome, Collector, Context, CycleData, Output, ReadErrors};
use crate::config::Config;
use crate::container_logs::ContainerLogs;
use crate::discover::cgroup_tree::CgroupTree;
use crate::discover::{ConnectionState, Hierarchy, Inventory, InventoryUpdate, Registry, RuntimeState};
use crate::gpu::DriverState;
use crate::host::{HostPaths, panics};
use crate::ledger::exchange::SharedState;
use crate::ledger::{Ledger, LedgerSample};
use crate::reporter::ReporterState;
use crate::series::{Label, Series};
use crate::snapshot::{Dropped, Snapshot, finish};
use crate::stats::http_stats::HttpStats;
use crate::stats::otlp_stats::OtlpStats;

use stalled::IndependentSources;

/// Maximum wait of the first cycle for the runtimes' lists of containers and the ledger's first totals.
const FIRST_LIST_TIMEOUT: Duration = Duration::from_secs(1);

/// Cycles that may panic in a row.
const MAX_FAILED_CYCLES: u32 = 10;
/// Names of the collectors of GPU figures.
const GPU_COLLECTORS: [&str; 2] = ["gpu", crate::gpu::amdgpu::NAME];

/// The state that is kept from cycle to cycle.
pub struct Sampler {
    host_paths: HostPaths,
    hierarchy: Option<Hierarchy>,
    registry: Registry,
    sources: Vec<Arc<RuntimeState>>,
    collectors: Vec<Box<dyn Collector>>,
    cycle_data: CycleData,
    read_errors: ReadErrors,
    gpu_holders: GpuHolders,
    allocated_gpus: AllocatedGpus,
    ledger: Ledger,
    dropped: Dropped,
    /// Numbers of rows and labels of the last cycle, for the capacity of the next.
    last_len: (usize, usize),
    skipped: u64,
    driver_state: Arc<DriverState>,
    http_stats: Arc<HttpStats>,
    otlp_stats: Option<Arc<OtlpStats>>,
    reporter: Option<Arc<ReporterState>>,
    /// From which percentage of a GPU's memory on trainings are asked to clean up.
    auto_cleanup: Option<f64>,
    logs: Option<Arc<ContainerLogs>>,
    inside: InsideView,
}

impl Sampler {
    /// Creates a sampler over these runtimes and the cgroup tree. It exchanges data with the ledger's thread through `shared_state`, and
    /// its GPU collectors and statistics are those of `independent`.
    pub fn new(
        config: &Config,
        sources: Vec<Arc<RuntimeState>>,
        cgroup_tree: Option<CgroupTree>,
        shared_state: Arc<SharedState>,
        independent: &IndependentSources,
    ) -> Self {
        Self {
            host_paths: config.host_paths.clone(),
            hierarchy: cgroup_tree.as_ref().map(|tree| tree.hierarchy().clone()),
            registry: Registry::new(config.filter.clone(), sources.clone(), cgroup_tree)
                .with_processes(&config.host_paths),
            sources,
            collectors: collect::all(config, &independent.driver_state, &independent.amdgpu_output),
            cycle_data: CycleData::default(),
            read_errors: ReadErrors::default(),
            gpu_holders: GpuHolders::default(),
            allocated_gpus: AllocatedGpus::default(),
            ledger: Ledger::new(config.keep_ended, config.gpu.expected, shared_state),
            dropped: Dropped::new(),
            last_len: (0, 0),
            skipped: 0,
            driver_state: Arc::clone(&independent.driver_state),
            http_stats: Arc::clone(&independent.http_stats),
            otlp_stats: None,
            reporter: None,
            auto_cleanup: None,
            logs: None,
            inside: InsideView::default(),
        }
    }

    /// Exports the statistics of the OTLP exporter from now on.
    pub fn show_otlp_stats(&mut self, otlp_stats: Arc<OtlpStats>) {
        self.otlp_stats = Some(otlp_stats);
    }

    /// Exports what processes report from inside from now on. Where a GPU is filled by at least `auto_cleanup` percent, they are
    /// asked to clean up.
    pub fn show_reporter(&mut self, reporter: Arc<ReporterState>, auto_cleanup: Option<f64>) {
        (self.reporter, self.auto_cleanup) = (Some(reporter), auto_cleanup);
    }

    /// Publishes the inventory to the readers of logs from now on.
    pub fn show_inventory_to(&mut self, logs: Arc<ContainerLogs>) {
        self.logs = Some(logs);
    }

    /// Returns true once every runtime has listed its containers or turned out to be missing, and the ledger has its totals.
    fn sources_ready(&self) -> bool {
        self.ledger.has_figures()
            && self.sources.iter().all(|source| source.lock().connection != ConnectionState::Starting)
    }

    /// Runs one cycle.
    pub fn cycle(&mut self, now: Timestamp) -> Snapshot {
        let _span = tracing::info_span!("cycle").entered();
        let mut series = Series::with_capacity(self.last_len.0 + 64, self.last_len.1 + 64);
        let InventoryUpdate { inventory, ended } = self.discover(now);
        let context = Context {
            now,
            host_paths: &self.host_paths,
            hierarchy: self.hierarchy.as_ref(),
            inventory: &inventory,
        };
        self.cycle_data.begin();
        for collector in &mut self.collectors {
            self.read_errors.enter(collector.name());
            let mut output = Output {
                series: &mut series,
                cycle_data: &mut self.cycle_data,
                read_errors: &mut self.read_errors,
            };
            run_collector(collector.as_mut(), &context, &mut output);
        }
        if let Some(reporter) = &self.reporter {
            self.cycle_data.reports = Some(reporter.take(&inventory));
            reporter.stats().write(&mut series);
        }
        let attributing = tracing::info_span!("attribute").entered();
        let mut attribution = attribute(&context, &self.cycle_data, &mut self.gpu_holders, &mut series);
        attribution.inside =
            self.inside.write(&context, &self.cycle_data, &attribution.gpus.processes, &mut series);
        self.clean_up(now, &attribution);
        drop(attributing);
        let mut ledger =
            self.ledger.record_cycle(&context, &ended, &self.cycle_data, &attribution, &mut series);
        let mut containers = inventory.containers.clone();
        let running = containers.len();
        containers.append(&mut ledger.ended);
        let mut cycle = cycle_of(&inventory, &mut self.cycle_data, &mut attribution, &ledger);
        self.allocated_gpus.write(&inventory, &self.cycle_data, &mut containers, &mut cycle, &mut series);
        let devices = self.cycle_data.gpu_devices().map(|(_, device)| device);
        let gpus = devices.chain(self.cycle_data.silent_gpus().map(|(_, device)| device));
        let gpus = gpus.map(|device| Arc::clone(&device.identity)).collect();
        write_runtimes(&inventory, &mut series);
        let last_cycle = self.write_self(now, &mut series);
        finish(&mut series, &mut self.dropped);
        self.last_len = series.len();
        Snapshot {
            finished: Timestamp::now(),
            series,
            containers,
            running,
            gpus,
            processes: attribution.processes,
            processes_complete: (0..running)
                .map(|number| self.cycle_data.processes.complete(number))
                .collect(),
            cycle,
            last_cycle,
        }
    }

    /// Refreshes the inventory of containers.
    fn discover(&mut self, now: Timestamp) -> InventoryUpdate {
        self.read_errors.enter("discover");
        let (update, walked) = tracing::info_span!("discover").in_scope(|| self.registry.refresh(now));
        if let Err(error) = walked {
            self.read_errors.record(&error);
        }
        self.read_errors.init_at_zero("too_large");
        for source in &self.sources {
            for _ in 0..std::mem::take(&mut source.lock().oversized_responses) {
                self.read_errors.count("too_large");
            }
        }
        if let Some(logs) = &self.logs {
            logs.update(&update.inventory, &update.ended);
        }
        update
    }

    /// Asks trainings to clean up where `--reporter.auto-cleanup` says so.
    fn clean_up(&self, now: Timestamp, attribution: &Attribution) {
        let (Some(reporter), Some(percent)) = (&self.reporter, self.auto_cleanup) else { return };
        let processes = &attribution.gpus.processes;
        for container in containers_to_clean(now, percent, &self.cycle_data, processes) {
            reporter.clean_up_automatically(container);
        }
    }

    /// Writes what memledger says of itself. Returns the Unix time of this cycle.
    fn write_self(&self, began: Timestamp, series: &mut Series) -> f64 {
        for (collector, reason, count) in self.read_errors.counts() {
            series.global(COLLECTOR_READ_ERRORS, [collector.into(), reason.into()], count as f64);
        }
        for (family, count) in &self.dropped {
            series.global(SERIES_DROPPED, [family.desc().name.into()], *count as f64);
        }
        write_build_info(series);
        series.global(CYCLES_SKIPPED, [], self.skipped as f64);
        series.global(PANICS, [], panics::count() as f64);
        self.http_stats.write(series);
        if let Some(otlp_stats) = &self.otlp_stats {
            otlp_stats.write(series);
        }
        self.ledger.shared_state().followers.report_stats.write(series);
        self.driver_state.write(began, series);
        let now = Timestamp::now();
        series.global(CYCLE_DURATION, [], now.since(began).as_secs_f64());
        series.global(SNAPSHOT_TIMESTAMP, [], now.unix_seconds());
        now.unix_seconds()
    }
}

/// Returns what the steps of a cycle found.
fn cycle_of(
    inventory: &Inventory,
    cycle_data: &mut CycleData,
    attribution: &mut Attribution,
    ledger: &LedgerSample,
) -> Cycle {
    let container = |number: usize| {
        let memory = cycle_data.memory.get(number).and_then(Option::as_ref);
        CycleContainer {
            unreclaimable: memory.and_then(|memory| memory.unreclaimable),
            effective_limit: memory.and_then(|memory| memory.effective_limit),
            headroom: memory.and_then(|memory| memory.headroom),
            limit_utilization: memory.and_then(|memory| memory.limit_utilization),
            is_at_limit: memory.is_some_and(|memory| memory.at_limit == Some(true)),
            cpu_seconds: cycle_data.cpu.get(number).and_then(|times| times.as_ref()?.total()),
            counts: ledger.counts.get(number).copied().flatten(),
        }
    };
    let rests = attribution.gpus.rests.iter().copied();
    let gpus = std::iter::zip(cycle_data.gpu_devices(), rests);
    let silent = cycle_data.silent_gpus().map(|_| CycleGpu::default());
    Cycle {
        host: CycleHost { memory: cycle_data.host, oom_kills: ledger.host_oom_kills },
        runtimes: inventory.runtimes.clone(),
        containers: (0..inventory.containers.len()).map(container).collect(),
        roles: std::mem::take(&mut attribution.roles),
        gpus: gpus.map(|((_, device), rest)| CycleGpu::of_device(device, rest)).chain(silent).collect(),
        gpu_uses: std::mem::take(&mut attribution.gpus.containers),
        gpu_holders: std::mem::take(&mut attribution.inside.holders),
        pods: std::mem::take(&mut cycle_data.pods),
        ..Cycle::default()
    }
}

fn write_build_info(series: &mut Series) {
    let labels =
        [env!("CARGO_PKG_VERSION").into(), env!("MEMLEDGER_REVISION").into(), env!("MEMLEDGER_RUSTC").into()];
    series.global(BUILD_INFO, labels, 1.0);
}

/// Runs one collector. A failure, even a panic, removes its samples and leaves those of the other collectors.
fn run_collector(collector: &mut dyn Collector, context: &Context<'_>, output: &mut Output<'_>) {
    let _span = tracing::info_span!("collect", collector = collector.name()).entered();
    let began = Timestamp::now();
    let mark = output.series.mark();
    let outcome = catch_unwind(AssertUnwindSafe(|| collector.collect(context, output)))
        .unwrap_or(CollectOutcome::Failed);
    let name: Label = collector.name().into();
    if outcome != CollectOutcome::Ok {
        output.series.rollback(mark);
    }
    if outcome != CollectOutcome::NotPresent {
        output.cycle_data.has_gpu_source |= GPU_COLLECTORS.contains(&collector.name());
        let success = f64::from(u8::from(outcome == CollectOutcome::Ok));
        output.series.global(COLLECTOR_SUCCESS, [name.clone()], success);
        let duration = collector.background().unwrap_or_else(|| Timestamp::now().since(began));
        output.series.global(COLLECTOR_DURATION, [name], duration.as_secs_f64());
    }
}

fn write_runtimes(inventory: &Inventory, series: &mut Series) {
    let mut counts = std::collections::BTreeMap::new();
    for (runtime, up) in &inventory.runtimes {
        series.global(RUNTIME_UP, [runtime.as_str().into()], f64::from(u8::from(*up)));
        counts.insert(*runtime, 0);
    }
    for container in &inventory.containers {
        *counts.entry(container.runtime).or_insert(0) += 1;
    }
    for (runtime, count) in counts {
        series.global(CONTAINERS_SEEN, [runtime.as_str().into()], f64::from(count));
    }
}

/// The result of a cycle.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one, and it is moved on at once")]
pub enum CycleOutcome {
    /// It finished.
    Finished(Snapshot),
    /// It panicked, and so did the one before.
    Failing,
}

/// Runs a cycle. A panic, which is a bug, costs this cycle only. The state that is kept from cycle to cycle may be damaged then, so
/// after [`MAX_FAILED_CYCLES`] in a row the panic goes on, which ends memledger. `failed`: the number of failed cycles in a row.
fn run_cycle(failed: &mut u32, cycle: impl FnOnce() -> Snapshot) -> Option<CycleOutcome> {
    match catch_unwind(AssertUnwindSafe(cycle)) {
        Ok(snapshot) => {
            *failed = 0;
            Some(CycleOutcome::Finished(snapshot))
        }
        Err(panic) => {
            *failed += 1;
            if *failed == MAX_FAILED_CYCLES {
                resume_unwind(panic);
            }
            (*failed > 1).then_some(CycleOutcome::Failing)
        }
    }
}

/// Runs one cycle per interval until `stop`, and passes each outcome to `publish`, except a first failure.
///
/// When a cycle takes longer than the interval, the cycles that were due meanwhile are skipped and counted.
pub fn run_until(
    mut sampler: Sampler,
    interval: Duration,
    stop: &AtomicBool,
    mut publish: impl FnMut(CycleOutcome),
) {
    let mut failed = 0;
    let began = Timestamp::now();
    while !sampler.sources_ready()
        && Timestamp::now().since(began) < FIRST_LIST_TIMEOUT
        && !stop.load(Ordering::Relaxed)
    {
        std::thread::park_timeout(Duration::from_millis(10));
    }
    let mut due = Timestamp::now();
    while !stop.load(Ordering::Relaxed) {
        if let Some(outcome) = run_cycle(&mut failed, || sampler.cycle(Timestamp::now())) {
            publish(outcome);
        }
        due = due.plus(interval);
        let late = Timestamp::now().since(due);
        let missed = (late.as_nanos() / interval.as_nanos()) as u32;
        sampler.skipped += u64::from(missed);
        due = due.plus(interval * missed);
        loop {
            let remaining = due.since(Timestamp::now());
            if remaining.is_zero() || stop.load(Ordering::Relaxed) {
                break;
            }
            std::thread::park_timeout(remaining);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::cycle::GpuRest;
    use crate::gpu::{GpuDevice, GpuReading};

    fn empty_snapshot() -> Snapshot {
        Snapshot::of_series(Timestamp::now(), Series::default())
    }

    #[test]
    fn gpus_of_all_sources_have_their_numbers_and_those_that_are_silent_no_figures() {
        let reading = |totals: &[u64], silent: usize| {
            let device = |total: &u64| {
                let mut device = GpuDevice::with_ids("0", "GPU-0");
                device.memory.total = Some(*total);
                device
            };
            let mut reading = GpuReading::of_devices(Timestamp::now(), totals.iter().map(device).collect());
            reading.silent = vec![GpuDevice::with_ids("9", "GPU-9"); silent];
            Arc::new(reading)
        };
        let mut cycle_data =
            CycleData { gpus: vec![reading(&[1, 2], 1), reading(&[3], 0)], ..CycleData::default() };
        let mut attribution = Attribution::default();
        let rest = |bytes| GpuRest { host: Some(bytes), unattributed: None };
        attribution.gpus.rests = [10, 20, 30].map(rest).into();
        let cycle =
            cycle_of(&Inventory::default(), &mut cycle_data, &mut attribution, &LedgerSample::default());
        let figures: Vec<_> = cycle.gpus.iter().map(|gpu| (gpu.total, gpu.rest.host)).collect();
        let known = |total, host| (Some(total), Some(host));
        assert_eq!(figures, [known(1, 10), known(2, 20), known(3, 30), (None, None)]);
    }

    #[test]
    fn panic_costs_one_cycle_and_many_in_a_row_end_the_thread() {
        let mut failed = 0;
        let fail = |failed: &mut u32| run_cycle(failed, || panic!("a bug"));
        assert!(fail(&mut failed).is_none(), "one alone leaves the snapshot before it");
        assert!(matches!(run_cycle(&mut failed, empty_snapshot), Some(CycleOutcome::Finished(_))));
        assert!(fail(&mut failed).is_none(), "counted in a row only");
        for _ in 2..MAX_FAILED_CYCLES {
            assert!(matches!(fail(&mut failed), Some(CycleOutcome::Failing)));
        }
        assert!(catch_unwind(AssertUnwindSafe(|| fail(&mut failed))).is_err());
    }
}
