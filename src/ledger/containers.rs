//! Per container: who it is, its runs and its peaks, also for a while after its end.

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::entries::Subject;
use super::gpus::Peak;
use crate::attribute::gpu::{Attributed, Held, OnGpu};
use crate::catalog::*;
use crate::clock::Moment;
use crate::collect::{Context, Readings, cgroup::Memory};
use crate::discover::{Container, ContainerId, Identity};
use crate::parse::kubernetes::Qos;
use crate::series::{Label, Series};

/// Ended containers that are kept at most; the oldest give way.
const MOST_ENDED: usize = 500;

/// The first process of a run is a little older than the runtime's start of it, and boot time is in whole seconds.
const START_SLACK: f64 = 2.0;

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

/// Which of the runs that have one id: the one that goes on, or the last one that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Run {
    Present,
    Ended,
}

/// Clock ticks since boot to Unix time.
#[derive(Debug, Default)]
struct BootClock {
    boot_time: OnceCell<Option<u64>>,
}

impl BootClock {
    fn start(&self, context: &Context<'_>, ticks: u64) -> Option<f64> {
        let boot_time = (*self.boot_time.get_or_init(|| context.roots.boot_time().ok()))?;
        Some(boot_time as f64 + ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
    }
}

/// The books of all containers.
#[derive(Debug)]
pub struct Books {
    keep: Duration,
    running: HashMap<ContainerId, Book>,
    ended: VecDeque<Ended>,
    clock: BootClock,
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

    /// Whether this run had begun when a process with this start (Unix time) did; true where one of the two is not known.
    fn had_begun(&self, process_start: Option<f64>) -> bool {
        let begun = self.started.zip(process_start).map(|(run, process)| run <= process + START_SLACK);
        begun.unwrap_or(true)
    }

    /// Enters what the container held on a device at one moment, or at some time.
    fn enter_gpu(&mut self, held: &Held, bytes: u64) {
        self.gpus.entry(Arc::clone(&held.device)).or_default().enter_held(held, bytes);
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
        if let Some(pod) = &container.pod {
            let labels = [
                Label::from(&pod.uid),
                Label::Number(pod.attempt.into()),
                container.qos().map_or("", Qos::label).into(),
                (&pod.source).into(),
            ];
            series.container_with(CONTAINER_POD_INFO, number, labels, pod.labels.iter().cloned(), 1.0);
        }
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
        Self {
            keep,
            running: HashMap::new(),
            ended: VecDeque::new(),
            clock: BootClock::default(),
            gpus: HashMap::new(),
        }
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
            let book = book.unwrap_or_else(|| Book::new(container));
            self.ended.push_front(Ended { book, at: context.now }); // newest first
        }
        if self.running.len() > context.inventory.containers.len() {
            let inventory: HashSet<_> =
                context.inventory.containers.iter().map(|container| &container.id).collect();
            self.running.retain(|id, _| inventory.contains(id));
        }
        for (number, container) in context.inventory.containers.iter().enumerate() {
            let book = self.running.entry(container.id.clone()).or_insert_with(|| Book::new(container));
            book.enter(container, readings.memory.get(number).and_then(Option::as_ref));
            book.gpus.values_mut().for_each(|peak| peak.forget_old(context.now));
            if book.started.is_none() {
                let oldest =
                    readings.processes.of(number).iter().map(|process| process.facts.start_ticks).min();
                book.set_start(oldest.and_then(|oldest| self.clock.start(context, oldest)));
            }
        }
        self.enter_gpus(context, gpus);
        self.ended.retain(|ended| context.now.since(ended.at) < self.keep);
        self.ended.truncate(MOST_ENDED);
    }

    /// Enters what containers hold and held on GPUs. The driver's maximum of a process may come after its container's end,
    /// and a container that is started again keeps its id.
    fn enter_gpus(&mut self, context: &Context<'_>, gpus: &Attributed) {
        for held in &gpus.held {
            for (id, holders) in &held.containers {
                let mut sums = HashMap::new();
                for (start, bytes) in holders {
                    if let Some(run) = self.run_of(context, id, *start) {
                        *sums.entry(run).or_insert(0) += bytes;
                    }
                }
                for (run, bytes) in sums {
                    if let Some(book) = self.book(run, id) {
                        book.enter_gpu(held, bytes);
                    }
                }
            }
        }
        for process in &gpus.processes {
            let Some(container) = context.inventory.containers.get(process.container as usize) else {
                continue;
            };
            let run = self.run_of(context, &container.id, process.who.1);
            if let Some(book) = run.and_then(|run| self.book(run, &container.id)) {
                book.raise_to_drivers_peak(process);
            }
        }
    }

    /// Which run of a container a process with this start, in clock ticks since boot, was a part of.
    fn run_of(&self, context: &Context<'_>, id: &ContainerId, start_ticks: u64) -> Option<Run> {
        let start = self.clock.start(context, start_ticks);
        let ended = self.ended.iter().find(|ended| ended.book.container.id == *id);
        match (self.running.get(id), ended) {
            (Some(book), _) if book.had_begun(start) => Some(Run::Present),
            (_, Some(ended)) => {
                let had_ended = start.is_some_and(|start| start > ended.at.unix_seconds());
                (!had_ended && ended.book.had_begun(start)).then_some(Run::Ended)
            }
            // the start of its oldest process is not always its own
            (Some(book), None) => book.container.started.is_none().then_some(Run::Present),
            (None, None) => None,
        }
    }

    fn book(&mut self, run: Run, id: &ContainerId) -> Option<&mut Book> {
        match run {
            Run::Present => self.running.get_mut(id),
            Run::Ended => {
                let ended = self.ended.iter_mut().map(|ended| &mut ended.book);
                ended.into_iter().find(|book| book.container.id == *id)
            }
        }
    }

    /// Who a container is or was, by its id.
    pub fn identity(&self, id: &ContainerId) -> Option<&Identity> {
        let running = self.running.get(id);
        let book = running
            .or_else(|| self.ended.iter().map(|ended| &ended.book).find(|book| book.container.id == *id))?;
        Some(&book.container.identity)
    }

    /// As [`Books::identity`], as it stands in an event.
    pub fn subject(&self, id: &ContainerId) -> Option<Subject> {
        let running = self.running.get(id);
        let book = running
            .or_else(|| self.ended.iter().map(|ended| &ended.book).find(|book| book.container.id == *id))?;
        let container = &book.container;
        Some(Subject {
            name: (&container.identity).into(),
            container_id: container.id.as_str().into(),
            image: Arc::clone(&container.image),
            runtime: container.runtime.into(),
            started: container.started,
        })
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
            pod: None,
            image: "".into(),
            compose_project: "".into(),
            compose_service: "".into(),
            settings: vec![],
            gpus: Arc::default(),
            started: Some(started),
            cgroup: None,
            nested: false,
        })
    }

    /// What one process that began at this Unix time holds or held.
    fn held(at: Moment, is_dated: bool, start: f64, bytes: u64) -> Attributed {
        let boot = Roots::default().boot_time().expect("btime") as f64;
        let ticks = ((start - boot) * rustix::param::clock_ticks_per_second() as f64) as u64;
        let containers = HashMap::from([(ContainerId::new(&"a".repeat(64)), vec![(ticks, bytes)])]);
        let (processes, owners) = (vec![], vec![]);
        let device = "GPU-0".into();
        let held = Held { at, is_dated, device, used: None, containers, processes, owners };
        Attributed { held: vec![held], ..Attributed::default() }
    }

    #[test]
    fn what_a_process_of_the_last_run_held_is_not_the_next_ones_though_it_has_the_same_id() {
        let mut books = Books::new(Duration::from_secs(60));
        let (roots, now) = (Roots::default(), Moment::now());
        let start = Roots::default().boot_time().expect("btime") as f64;
        let (first, second) =
            (container('a', "train", start + 100.0), container('a', "train", start + 200.0));
        let mut enter =
            |after: u64, running: &Arc<Container>, ended: &[Arc<Container>], gpus: &Attributed| {
                let inventory =
                    Arc::new(Inventory { containers: vec![Arc::clone(running)], runtimes: vec![] });
                let now = now.plus(Duration::from_secs(after));
                let context = Context { now, roots: &roots, hierarchy: None, inventory: &inventory };
                books.enter(&context, ended, &Readings::default(), gpus);
                let peak = |book: &Book| book.gpus.get("GPU-0").and_then(Peak::highest);
                (peak(&books.running[&running.id]), books.ended.front().and_then(|ended| peak(&ended.book)))
            };
        let (old, new) = (start + 110.0, start + 205.0);
        assert_eq!(enter(0, &first, &[], &held(now, true, old, 5)), (Some(5), None));
        let ended = std::slice::from_ref(&first);
        assert_eq!(enter(1, &second, ended, &held(now, true, old, 7)), (None, Some(7)), "within one cycle");
        assert_eq!(enter(2, &second, &[], &held(now, true, new, 2)), (Some(2), Some(7)));
        let late = held(now, false, old, 9);
        assert_eq!(enter(3, &second, &[], &late), (Some(2), Some(9)), "the driver's maximum comes late");
        let of_nobody = held(now, true, start + 50.0, 11);
        assert_eq!(enter(4, &second, &[], &of_nobody), (Some(2), Some(9)), "older than both");
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
