//! One cycle: discover, collect, attribute, enter into the ledger, finish a snapshot. And the thread that runs it.
//!
//! The cycle is one synchronous function, because kernel files block. Sampling does not depend on scraping.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::attribute::{Ranks, attribute};
use crate::catalog::*;
use crate::clock::Moment;
use crate::collect::front::Front;
use crate::collect::gpu::Control;
use crate::collect::pushed::Tally;
use crate::collect::{self, Collector, Context, Faults, Outcome, Output, Readings};
use crate::config::Config;
use crate::discover::{Hierarchy, Link, Registry, Source};
use crate::host::Roots;
use crate::ledger::Ledger;
use crate::ledger::desk::Desk;
use crate::series::{Label, Series};
use crate::snapshot::{Dropped, Snapshot, finish};

/// How long the first cycle waits for the runtimes to list their containers, and for the ledger's first figures.
const FIRST_LIST: Duration = Duration::from_secs(1);

/// Everything that lives from cycle to cycle.
pub struct Sampler {
    roots: Roots,
    hierarchy: Option<Hierarchy>,
    registry: Registry,
    sources: Vec<Arc<Source>>,
    collectors: Vec<Box<dyn Collector>>,
    readings: Readings,
    faults: Faults,
    ranks: Ranks,
    ledger: Ledger,
    dropped: Dropped,
    room: (usize, usize),
    skipped: u64,
    control: Arc<Control>,
    front: Arc<Front>,
    pushed: Option<Arc<Tally>>,
}

impl Sampler {
    /// A sampler over these runtimes, which meets the ledger's thread at this desk, whose GPU collector is reached by this
    /// control, and which shows the HTTP side's account.
    pub fn new(
        config: &Config,
        sources: Vec<Arc<Source>>,
        desk: Arc<Desk>,
        control: &Arc<Control>,
        front: Arc<Front>,
    ) -> Self {
        let hierarchy = match Hierarchy::detect(&config.roots) {
            Ok(hierarchy) => Some(hierarchy),
            Err(error) => {
                tracing::error!(%error, "no memory of containers can be read");
                None
            }
        };
        Self {
            roots: config.roots.clone(),
            registry: Registry::new(config.filter.clone(), sources.clone(), hierarchy.as_ref()),
            hierarchy,
            sources,
            collectors: collect::all(config, control),
            readings: Readings::default(),
            faults: Faults::default(),
            ranks: Ranks::default(),
            ledger: Ledger::new(config.keep_ended, config.gpu.expected, desk),
            dropped: Dropped::new(),
            room: (0, 0),
            skipped: 0,
            control: Arc::clone(control),
            front,
            pushed: None,
        }
    }

    /// Shows from now on how the push over OTLP fares.
    pub fn tell_of(&mut self, pushed: Arc<Tally>) {
        self.pushed = Some(pushed);
    }

    /// True once every runtime has listed its containers or has shown that it is not there, and the ledger has figures.
    fn others_have_begun(&self) -> bool {
        self.ledger.has_figures() && self.sources.iter().all(|source| source.lock().link != Link::Starting)
    }

    /// Runs one cycle.
    pub fn cycle(&mut self, now: Moment) -> Snapshot {
        let mut series = Series::with_room_of(self.room.0 + 64, self.room.1 + 64);
        self.faults.enter("discover");
        let (refresh, walked) = self.registry.refresh(now);
        if let Err(error) = walked {
            self.faults.note(&error);
        }
        let inventory = refresh.inventory;
        let context =
            Context { now, roots: &self.roots, hierarchy: self.hierarchy.as_ref(), inventory: &inventory };
        self.readings.begin();
        for collector in &mut self.collectors {
            self.faults.enter(collector.name());
            let mut output =
                Output { series: &mut series, readings: &mut self.readings, faults: &mut self.faults };
            run(collector.as_mut(), &context, &mut output);
        }
        let attribution = attribute(&context, &self.readings, &mut self.ranks, &mut series);
        let ended = self.ledger.enter(&context, &refresh.ended, &self.readings, &attribution, &mut series);
        let mut containers = inventory.containers.clone();
        let running = containers.len();
        containers.extend(ended);
        let devices = self.readings.gpu_devices().map(|(_, device)| device);
        let gpus = devices.chain(self.readings.silent_gpus().map(|(_, device)| device));
        let gpus = gpus.map(|device| Arc::clone(&device.identity)).collect();
        write_runtimes(&inventory, &mut series);
        self.write_self(now, &mut series);
        finish(&mut series, &mut self.dropped);
        self.room = series.len();
        Snapshot {
            finished: Moment::now(),
            series,
            containers,
            running,
            gpus,
            processes: attribution.processes,
        }
    }

    fn write_self(&self, began: Moment, series: &mut Series) {
        for (collector, reason, count) in self.faults.counts() {
            series.global(READ_FAULTS, [collector.into(), reason.into()], count as f64);
        }
        for (family, count) in &self.dropped {
            series.global(SERIES_DROPPED, [family.def().name.into()], *count as f64);
        }
        let labels = [
            env!("CARGO_PKG_VERSION").into(),
            env!("MEMLEDGER_REVISION").into(),
            env!("MEMLEDGER_RUSTC").into(),
        ];
        series.global(BUILD_INFO, labels, 1.0);
        series.global(CYCLES_SKIPPED, [], self.skipped as f64);
        self.front.write(series);
        if let Some(pushed) = &self.pushed {
            pushed.write(series);
        }
        if let Some(rest) = self.control.remaining(began) {
            series.global(GPU_RELEASED, [], rest.as_secs_f64());
        }
        let now = Moment::now();
        series.global(CYCLE_DURATION, [], now.since(began).as_secs_f64());
        series.global(SNAPSHOT_TIMESTAMP, [], now.unix_seconds());
    }
}

/// Runs one collector. Its failure, and be it a panic, takes back its samples and no one else's.
fn run(collector: &mut dyn Collector, context: &Context<'_>, output: &mut Output<'_>) {
    let began = Moment::now();
    let mark = output.series.mark();
    let outcome =
        catch_unwind(AssertUnwindSafe(|| collector.collect(context, output))).unwrap_or(Outcome::Failed);
    let name: Label = collector.name().into();
    if outcome != Outcome::Read {
        output.series.back_to(mark);
    }
    if outcome != Outcome::Absent {
        let success = f64::from(u8::from(outcome == Outcome::Read));
        output.series.global(COLLECTOR_SUCCESS, [name.clone()], success);
        let took = collector.background().unwrap_or_else(|| Moment::now().since(began));
        output.series.global(COLLECTOR_DURATION, [name], took.as_secs_f64());
    }
}

fn write_runtimes(inventory: &crate::discover::Inventory, series: &mut Series) {
    let mut counts = std::collections::BTreeMap::new();
    for (runtime, up) in &inventory.runtimes {
        series.global(SOURCE_UP, [(*runtime).into()], f64::from(u8::from(*up)));
        counts.insert(*runtime, 0);
    }
    for container in &inventory.containers {
        *counts.entry(container.runtime).or_insert(0) += 1;
    }
    for (runtime, count) in counts {
        series.global(CONTAINERS_SEEN, [runtime.into()], f64::from(count));
    }
}

/// Runs cycles at every interval until `stop`, handing each snapshot to `publish`.
///
/// A cycle that takes longer than the interval leaves out the times that it missed, and counts them.
pub fn run_until(
    mut sampler: Sampler,
    interval: Duration,
    stop: &AtomicBool,
    mut publish: impl FnMut(Snapshot),
) {
    let began = Moment::now();
    while !sampler.others_have_begun()
        && Moment::now().since(began) < FIRST_LIST
        && !stop.load(Ordering::Relaxed)
    {
        std::thread::park_timeout(Duration::from_millis(10));
    }
    let mut due = Moment::now();
    while !stop.load(Ordering::Relaxed) {
        publish(sampler.cycle(Moment::now()));
        due = due.plus(interval);
        let late = Moment::now().since(due);
        let missed = (late.as_nanos() / interval.as_nanos()) as u32;
        sampler.skipped += u64::from(missed);
        due = due.plus(interval * missed);
        loop {
            let rest = due.since(Moment::now());
            if rest.is_zero() || stop.load(Ordering::Relaxed) {
                break;
            }
            std::thread::park_timeout(rest);
        }
    }
}
