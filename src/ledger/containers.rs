//! Per container: who it is, its runs and its peaks, also for a while after its end.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::gpus::Peak;
use crate::attribute::gpu::{Attributed, OnGpu};
use crate::catalog::*;
use crate::clock::Moment;
use crate::collect::{Context, Readings, cgroup::Memory};
use crate::discover::{Container, ContainerId};
use crate::series::{Label, Series};

/// Ended containers that are kept at most; the oldest give way.
const MOST_ENDED: usize = 500;

/// What is kept of one run.
#[derive(Clone, Debug)]
struct Book {
    container: Arc<Container>,
    started: Option<f64>,
    /// Names one run: two runs under one container name differ in it, also over a restart of memledger.
    run: Arc<str>,
    peak_unreclaimable: Option<u64>,
    peak_usage: Option<u64>,
    /// GPU memory, by the key of the device.
    gpus: HashMap<Arc<str>, Peak>,
}

/// A container that ended, and when that was noticed.
#[derive(Clone, Debug)]
pub struct Ended {
    book: Book,
    at: Moment,
}

/// The books of all containers.
#[derive(Debug)]
pub struct Books {
    keep: Duration,
    running: HashMap<ContainerId, Book>,
    ended: VecDeque<Ended>,
    boot_time: Option<u64>,
    /// Numbers of this cycle's devices, by their keys.
    gpus: HashMap<Arc<str>, u32>,
}

impl Book {
    fn new(container: &Arc<Container>) -> Self {
        Self {
            container: Arc::clone(container),
            started: container.started,
            run: run(container, container.started),
            peak_unreclaimable: None,
            peak_usage: None,
            gpus: HashMap::new(),
        }
    }

    /// Enters what the container held on GPUs since the cycle before.
    fn enter_gpus(&mut self, attributed: &Attributed) {
        let id = &self.container.id;
        for held in &attributed.held {
            if let Some(bytes) = held.containers.get(id) {
                self.gpus.entry(Arc::clone(&held.device)).or_default().enter(held.at, *bytes);
            }
        }
    }

    /// Where the driver keeps the maximum of a process, its container held at least as much.
    fn raise_to_drivers_peak(&mut self, process: &OnGpu) {
        if let Some(bytes) = process.driver_peak {
            self.gpus.entry(Arc::clone(&process.device)).or_default().raise(bytes);
        }
    }

    /// Writes the peaks on those devices that are there; `now` is `None` once the container has ended.
    fn write_gpus(
        &self,
        number: u32,
        now: Option<Moment>,
        numbers: &HashMap<Arc<str>, u32>,
        series: &mut Series,
    ) {
        for (device, peak) in &self.gpus {
            let Some(gpu) = numbers.get(device) else { continue };
            if let Some(bytes) = peak.highest() {
                series.container_gpu(CONTAINER_GPU_MEMORY_PEAK, number, *gpu, [], bytes as f64);
            }
            if let Some(bytes) = now.and_then(|now| peak.recent(now)) {
                series.container_gpu(CONTAINER_GPU_MEMORY_RECENT_PEAK, number, *gpu, [], bytes as f64);
            }
        }
    }

    fn enter(&mut self, container: &Arc<Container>, memory: Option<&Memory>) {
        self.container = Arc::clone(container);
        self.set_start(container.started.or(self.started));
        let Some(memory) = memory else { return };
        self.peak_unreclaimable = self.peak_unreclaimable.max(memory.unreclaimable);
        // a kernel that keeps the peak saw it; one that does not leaves us with our samples
        self.peak_usage = self.peak_usage.max(memory.peak.or(Some(memory.usage)));
    }

    fn set_start(&mut self, started: Option<f64>) {
        if self.started != started {
            self.started = started;
            self.run = run(&self.container, started);
        }
    }

    fn write(&self, number: u32, cgroup_version: &'static str, series: &mut Series) {
        let container = &self.container;
        let labels = [
            Label::from(container.id.shared()),
            (&container.image).into(),
            container.runtime.into(),
            (&container.compose_project).into(),
            (&container.compose_service).into(),
            cgroup_version.into(),
        ];
        series.container(CONTAINER_INFO, number, labels, 1.0);
        let settings = container.settings.iter().cloned();
        series.container_with(CONTAINER_RUN_INFO, number, [Label::from(&self.run)], settings, 1.0);
        if let Some(started) = self.started {
            series.container(CONTAINER_START_TIME, number, [], started);
        }
        if let Some(peak) = self.peak_unreclaimable {
            series.container(CONTAINER_MEMORY_UNRECLAIMABLE_PEAK, number, [], peak as f64);
        }
        if let Some(peak) = self.peak_usage {
            series.container(CONTAINER_MEMORY_PEAK, number, [], peak as f64);
        }
    }
}

fn run(container: &Container, started: Option<f64>) -> Arc<str> {
    let id = container.id.short();
    match started.and_then(|started| jiff::Timestamp::from_second(started as i64).ok()) {
        Some(start) => format!("{id}-{}", start.strftime("%Y%m%dT%H%M%SZ")).into(),
        None => id.into(),
    }
}

impl Books {
    /// Empty books that keep ended containers so long.
    pub fn new(keep: Duration) -> Self {
        Self { keep, running: HashMap::new(), ended: VecDeque::new(), boot_time: None, gpus: HashMap::new() }
    }

    /// Enters one cycle.
    pub fn enter(
        &mut self,
        context: &Context<'_>,
        ended: &[Arc<Container>],
        readings: &Readings,
        gpus: &Attributed,
    ) {
        let devices = (0..).zip(readings.gpu_devices());
        self.gpus =
            devices.map(|(number, (_, device))| (Arc::clone(device.identity.key()), number)).collect();
        for container in ended {
            let same = |book: &Book| container.started.is_none() || book.started == container.started;
            let book = match self.running.get(&container.id) {
                Some(book) if same(book) => self.running.remove(&container.id),
                _ => None,
            };
            self.ended.retain(|older| older.book.container.identity != container.identity); // can never be shown again
            let mut book = book.unwrap_or_else(|| Book::new(container));
            book.enter_gpus(gpus);
            self.ended.push_front(Ended { book, at: context.now }); // newest first
        }
        self.ended.retain(|ended| context.now.since(ended.at) < self.keep);
        self.ended.truncate(MOST_ENDED);
        if self.running.len() > context.inventory.containers.len() {
            let inventory: HashSet<_> =
                context.inventory.containers.iter().map(|container| &container.id).collect();
            self.running.retain(|id, _| inventory.contains(id));
        }
        for (number, container) in context.inventory.containers.iter().enumerate() {
            let book = self.running.entry(container.id.clone()).or_insert_with(|| Book::new(container));
            book.enter(container, readings.memory.get(number).and_then(Option::as_ref));
            book.enter_gpus(gpus);
            book.gpus.values_mut().for_each(|peak| peak.forget_old(context.now));
            if book.started.is_none() {
                let boot_time = *self.boot_time.get_or_insert_with(|| context.roots.boot_time().unwrap_or(0));
                let oldest =
                    readings.processes.of(number).iter().map(|process| process.facts.start_ticks).min();
                let ticks = rustix::param::clock_ticks_per_second() as f64;
                let start =
                    oldest.filter(|_| boot_time > 0).map(|oldest| boot_time as f64 + oldest as f64 / ticks);
                book.set_start(start);
            }
        }
        for process in &gpus.processes {
            let container = context.inventory.containers.get(process.container as usize);
            if let Some(book) = container.and_then(|container| self.running.get_mut(&container.id)) {
                book.raise_to_drivers_peak(process);
            }
        }
    }

    /// Highest usage and highest unreclaimable memory of a running container.
    pub fn peaks(&self, id: &ContainerId) -> (Option<u64>, Option<u64>) {
        self.running.get(id).map_or((None, None), |book| (book.peak_usage, book.peak_unreclaimable))
    }

    /// Writes what is kept of running containers, and of ended ones whose name no other bears.
    pub fn write(&self, context: &Context<'_>, series: &mut Series) -> Vec<Arc<Container>> {
        let version = context.hierarchy.map_or("", |hierarchy| hierarchy.version.label());
        let mut names = HashSet::new();
        for (number, container) in context.inventory.containers.iter().enumerate() {
            names.insert(&container.identity);
            if let Some(book) = self.running.get(&container.id) {
                book.write(number as u32, version, series);
                book.write_gpus(number as u32, Some(context.now), &self.gpus, series);
            }
        }
        let mut shown = Vec::new();
        for ended in &self.ended {
            if names.insert(&ended.book.container.identity) {
                let number = context.inventory.containers.len() + shown.len();
                ended.book.write(number as u32, version, series);
                ended.book.write_gpus(number as u32, None, &self.gpus, series);
                shown.push(Arc::clone(&ended.book.container));
            }
        }
        shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::{Identity, Inventory};
    use crate::host::Roots;

    fn container(id: char, name: &str, started: f64) -> Arc<Container> {
        Arc::new(Container {
            id: ContainerId::new(&id.to_string().repeat(64)),
            identity: Identity::named(name),
            runtime: "docker",
            image: "".into(),
            compose_project: "".into(),
            compose_service: "".into(),
            settings: vec![],
            started: Some(started),
            cgroup: None,
            nested: false,
        })
    }

    struct Day {
        books: Books,
        now: Moment,
    }

    impl Day {
        fn cycle(
            &mut self,
            running: &[Arc<Container>],
            ended: &[Arc<Container>],
            unreclaimable: u64,
        ) -> Series {
            self.now = self.now.plus(Duration::from_secs(1));
            let inventory = Arc::new(Inventory { containers: running.to_vec(), runtimes: vec![] });
            let roots = Roots::default();
            let context = Context { now: self.now, roots: &roots, hierarchy: None, inventory: &inventory };
            let memory =
                Memory { unreclaimable: Some(unreclaimable), usage: unreclaimable, ..Memory::default() };
            let readings = Readings { memory: vec![Some(memory); running.len()], ..Readings::default() };
            let mut series = Series::default();
            self.books.enter(&context, ended, &readings, &Attributed::default());
            self.books.write(&context, &mut series);
            series
        }
    }

    fn values(series: &Series, family: Id) -> Vec<(u32, f64)> {
        series
            .rows()
            .iter()
            .filter(|row| row.family == family)
            .map(|row| (row.container, row.value))
            .collect()
    }

    #[test]
    fn peaks_outlive_the_container_and_a_new_run_starts_its_own() {
        let mut day = Day { books: Books::new(Duration::from_secs(60)), now: Moment::now() };
        let (first, second) = (container('a', "train", 1.0), container('a', "train", 2.0));
        day.cycle(std::slice::from_ref(&first), &[], 700);
        let series = day.cycle(std::slice::from_ref(&first), &[], 300);
        assert_eq!(values(&series, Id::CONTAINER_MEMORY_UNRECLAIMABLE_PEAK), [(0, 700.0)]);
        let series = day.cycle(&[], std::slice::from_ref(&first), 0);
        assert_eq!(values(&series, Id::CONTAINER_MEMORY_UNRECLAIMABLE_PEAK), [(0, 700.0)]);
        let series = day.cycle(std::slice::from_ref(&second), &[], 100);
        assert_eq!(values(&series, Id::CONTAINER_MEMORY_UNRECLAIMABLE_PEAK), [(0, 100.0)]);
        assert_eq!(values(&series, Id::CONTAINER_INFO).len(), 1, "the ended one gave way");
    }

    #[test]
    fn ended_containers_are_forgotten_in_time_and_never_more_than_the_cap_are_kept() {
        let mut day = Day { books: Books::new(Duration::from_secs(60)), now: Moment::now() };
        let many: Vec<_> =
            (0..600).map(|n| container('b', &format!("job-{n}"), f64::from(n) + 1.0)).collect();
        let series = day.cycle(&[], &many, 0);
        assert_eq!(values(&series, Id::CONTAINER_INFO).len(), MOST_ENDED);
        day.now = day.now.plus(Duration::from_secs(60));
        assert!(values(&day.cycle(&[], &[], 0), Id::CONTAINER_INFO).is_empty());
    }
}
