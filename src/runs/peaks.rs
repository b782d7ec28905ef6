//! Labels, run id and peaks of each container, also for a while after its exit.

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::run_id;
use crate::attribute::gpu::{DeviceUsage, GpuAttribution};
use crate::attribute::write_owner;
use crate::catalog::*;
use crate::clock::Timestamp;
use crate::collect::{Context, CycleData, container_memory::ContainerMemory};
use crate::discover::{Container, ContainerId, Identity};
use crate::events::ContainerRef;
use crate::gpu_state::peaks::Peak;
use crate::parse::kubernetes::Qos;
use crate::series::{Label, Series};
use crate::text::bounded;

/// Maximum number of ended containers; beyond that the oldest are dropped.
const MAX_ENDED: usize = 500;

/// A run's first process can be this many seconds older than the runtime's start time; boot time is in whole seconds.
const START_SLACK: f64 = 2.0;

/// Data of one run.
#[derive(Clone, Debug)]
struct RunPeaks {
    container: Arc<Container>,
    started: Option<f64>,
    /// Start of the oldest process that a cycle saw in this run, in clock ticks since boot.
    oldest_ticks: Option<u64>,
    /// Id of the run: differs between two runs of a container name, also over restarts of memledger.
    run: Arc<str>,
    group: Arc<str>,
    /// All settings as text.
    settings: Arc<str>,
    peak_unreclaimable: Option<u64>,
    peak_usage: Option<u64>,
    /// GPU memory by device key.
    gpus: HashMap<Arc<str>, Peak>,
}

/// The peaks of a run from before memledger was restarted.
#[derive(Clone, Debug, Default)]
pub struct StoredPeaks {
    /// Id of the run.
    pub run: Arc<str>,
    /// Highest usage, page cache included.
    pub usage_bytes: Option<u64>,
    /// Highest sample of unreclaimable memory.
    pub unreclaimable_bytes: Option<u64>,
    /// Highest GPU memory by UUID.
    pub gpus: Vec<(Arc<str>, u64)>,
}

/// A container that ended, and when that was noticed.
#[derive(Clone, Debug)]
pub struct EndedContainer {
    peaks: RunPeaks,
    at: Timestamp,
}

/// Selects one of the runs with the same container id: the current or the last ended one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum RunSelector {
    Present,
    Ended,
}

/// Converts clock ticks since boot to Unix time.
#[derive(Debug, Default)]
struct BootClock {
    boot_time: OnceCell<Option<u64>>,
}

impl BootClock {
    fn start(&self, context: &Context<'_>, ticks: u64) -> Option<f64> {
        let boot_time = (*self.boot_time.get_or_init(|| context.host_paths.boot_time().ok()))?;
        Some(boot_time as f64 + ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
    }
}

/// Run data of all containers.
#[derive(Debug)]
pub struct RunPeaksTable {
    keep: Duration,
    running: HashMap<ContainerId, RunPeaks>,
    ended: VecDeque<EndedContainer>,
    clock: BootClock,
    /// Peaks from before memledger was restarted, of containers that no cycle has seen since.
    stored: HashMap<ContainerId, StoredPeaks>,
    /// Numbers of this cycle's devices by their keys.
    gpus: HashMap<Arc<str>, u32>,
}

impl RunPeaks {
    fn new(container: &Arc<Container>) -> Self {
        Self {
            container: Arc::clone(container),
            started: container.started,
            oldest_ticks: None,
            run: run_id(&container.id, container.started),
            group: container.group(),
            settings: settings_text(container),
            peak_unreclaimable: None,
            peak_usage: None,
            gpus: HashMap::new(),
        }
    }

    /// Returns true if this run had begun when a process with this start (clock ticks since boot, and Unix time) did, or if
    /// one of the times is unknown. A busy runtime reports the start of a container seconds after that of its first process,
    /// and the host's clock may be set: what a cycle saw in the container decides first.
    fn had_begun(&self, start_ticks: u64, process_start: Option<f64>) -> bool {
        if self.oldest_ticks.is_some_and(|oldest| oldest <= start_ticks) {
            return true;
        }
        let begun = self.started.zip(process_start).map(|(run, process)| run <= process + START_SLACK);
        begun.unwrap_or(true)
    }

    /// Records the container's usage of a device, either at a known time or at some earlier time.
    fn record_gpu(&mut self, held: &DeviceUsage, bytes: u64) {
        self.gpus.entry(Arc::clone(&held.device)).or_default().record(held.at, bytes);
    }

    /// Raises the peaks to those of the same run that were stored.
    fn raise_to_stored(&mut self, stored: StoredPeaks) {
        if stored.run != self.run {
            return;
        }
        self.peak_usage = self.peak_usage.max(stored.usage_bytes);
        self.peak_unreclaimable = self.peak_unreclaimable.max(stored.unreclaimable_bytes);
        for (device, bytes) in stored.gpus {
            self.gpus.entry(device).or_default().raise(bytes);
        }
    }

    /// Writes the peaks on the devices that are present; `now` is `None` for an ended container.
    fn write_gpus(
        &self,
        number: u32,
        now: Option<Timestamp>,
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

    fn record(&mut self, container: &Arc<Container>, memory: Option<&ContainerMemory>) {
        if !Arc::ptr_eq(&self.container, container) {
            self.group = container.group();
            self.settings = settings_text(container);
            self.container = Arc::clone(container);
        }
        self.set_start(container.started.or(self.started));
        let Some(memory) = memory else { return };
        self.peak_unreclaimable = self.peak_unreclaimable.max(memory.unreclaimable);
        // prefer the kernel's own peak; kernels without one leave only the samples
        self.peak_usage = self.peak_usage.max(memory.peak.or(Some(memory.usage)));
    }

    fn set_start(&mut self, started: Option<f64>) {
        if self.started != started {
            self.started = started;
            self.run = run_id(&self.container.id, started);
        }
    }

    fn write(&self, number: u32, cgroup_version: &'static str, series: &mut Series) {
        let container = &self.container;
        let labels = [
            Label::from(container.id.shared()),
            (&container.spec.image).into(),
            container.runtime.as_str().into(),
            (&container.spec.compose_project).into(),
            (&container.spec.compose_service).into(),
            cgroup_version.into(),
        ];
        series.container(CONTAINER_INFO, number, labels, 1.0);
        if let Some(pod) = &container.spec.pod {
            let labels = [
                Label::from(&pod.uid),
                Label::Number(pod.attempt.into()),
                container.qos().map_or("", Qos::label).into(),
                (&pod.source).into(),
            ];
            series.container_with(CONTAINER_POD_INFO, number, labels, pod.labels.iter().cloned(), 1.0);
        }
        write_owner(&container.spec.owners, number, series);
        let labels = [Label::from(&self.run), (&self.group).into(), (&self.settings).into()];
        series.container_with(
            CONTAINER_RUN_INFO,
            number,
            labels,
            container.spec.own_settings().cloned(),
            1.0,
        );
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

/// Returns the settings of a container as one label.
fn settings_text(container: &Container) -> Arc<str> {
    let settings: Vec<_> =
        container.spec.own_settings().map(|(name, value)| format!("{name}={value}")).collect();
    bounded(&settings.join(" "))
}

impl RunPeaksTable {
    /// Creates an empty table that keeps ended containers for `keep`.
    pub fn new(keep: Duration) -> Self {
        Self {
            keep,
            running: HashMap::new(),
            ended: VecDeque::new(),
            clock: BootClock::default(),
            stored: HashMap::new(),
            gpus: HashMap::new(),
        }
    }

    /// Takes the peaks of runs from before memledger was restarted.
    pub fn restore(&mut self, stored: HashMap<ContainerId, StoredPeaks>) {
        self.stored = stored;
    }

    /// Records one cycle.
    pub fn record(
        &mut self,
        context: &Context<'_>,
        ended: &[Arc<Container>],
        cycle_data: &CycleData,
        gpus: &GpuAttribution,
    ) {
        let devices = (0..).zip(cycle_data.gpu_devices());
        self.gpus =
            devices.map(|(number, (_, device))| (Arc::clone(device.identity.key()), number)).collect();
        for container in ended {
            let peaks = match self.running.get(&container.id) {
                Some(peaks) if peaks.container.listed_run == container.listed_run => {
                    self.running.remove(&container.id)
                }
                _ => None,
            };
            self.ended.retain(|older| older.peaks.container.identity != container.identity); // replaced by this one
            let peaks = peaks.unwrap_or_else(|| RunPeaks::new(container));
            self.ended.push_front(EndedContainer { peaks, at: context.now }); // newest first
        }
        if self.running.len() > context.inventory.containers.len() {
            let inventory: HashSet<_> =
                context.inventory.containers.iter().map(|container| &container.id).collect();
            self.running.retain(|id, _| inventory.contains(id));
        }
        for (number, container) in context.inventory.containers.iter().enumerate() {
            let processes = cycle_data.processes.of(number);
            let peaks = self.running.entry(container.id.clone()).or_insert_with(|| {
                // its runtime was away
                let is_its = |ended: &EndedContainer| {
                    let its = &ended.peaks.container;
                    its.id == container.id && its.listed_run == container.listed_run
                };
                let again = self.ended.iter().position(is_its).and_then(|at| self.ended.remove(at));
                again.map_or_else(|| RunPeaks::new(container), |ended| ended.peaks)
            });
            peaks.record(container, cycle_data.memory.get(number).and_then(Option::as_ref));
            peaks.gpus.values_mut().for_each(|peak| peak.forget_old(context.now));
            let oldest = processes.iter().map(|process| process.meta.start_ticks).min();
            peaks.oldest_ticks = [peaks.oldest_ticks, oldest].into_iter().flatten().min();
            if peaks.started.is_none() {
                peaks.set_start(oldest.and_then(|oldest| self.clock.start(context, oldest)));
            }
            if let Some(stored) = self.stored.remove(&container.id) {
                peaks.raise_to_stored(stored);
            }
        }
        self.record_gpus(context, gpus);
        self.ended.retain(|ended| context.now.since(ended.at) < self.keep);
        self.ended.truncate(MAX_ENDED);
    }

    /// Records GPU memory. The driver's maximum of a process can arrive after its container's exit, and a restarted
    /// container keeps its id.
    fn record_gpus(&mut self, context: &Context<'_>, gpus: &GpuAttribution) {
        for held in &gpus.held {
            for (id, holders) in &held.containers {
                let mut sums = HashMap::new();
                for (start, bytes) in holders {
                    if let Some(run) = self.select_run(context, id, *start) {
                        *sums.entry(run).or_insert(0) += bytes;
                    }
                }
                for (run, bytes) in sums {
                    if let Some(peaks) = self.peaks_mut(run, id) {
                        peaks.record_gpu(held, bytes);
                    }
                }
            }
        }
    }

    /// Returns the run of a container to which a process with this start, in clock ticks since boot, belonged.
    fn select_run(&self, context: &Context<'_>, id: &ContainerId, start_ticks: u64) -> Option<RunSelector> {
        let start = self.clock.start(context, start_ticks);
        let ended = self.ended.iter().find(|ended| ended.peaks.container.id == *id);
        match (self.running.get(id), ended) {
            (Some(peaks), _) if peaks.had_begun(start_ticks, start) => Some(RunSelector::Present),
            (_, Some(ended)) => {
                let had_ended = start.is_some_and(|start| start > ended.at.unix_seconds());
                (!had_ended && ended.peaks.had_begun(start_ticks, start)).then_some(RunSelector::Ended)
            }
            // without a runtime, the run's start is that of its oldest process, which may have ended
            (Some(peaks), None) => peaks.container.started.is_none().then_some(RunSelector::Present),
            (None, None) => None,
        }
    }

    fn peaks_mut(&mut self, run: RunSelector, id: &ContainerId) -> Option<&mut RunPeaks> {
        match run {
            RunSelector::Present => self.running.get_mut(id),
            RunSelector::Ended => {
                let ended = self.ended.iter_mut().map(|ended| &mut ended.peaks);
                ended.into_iter().find(|peaks| peaks.container.id == *id)
            }
        }
    }

    /// Returns the identity of a running or ended container.
    pub fn identity(&self, id: &ContainerId) -> Option<&Identity> {
        let running = self.running.get(id);
        let peaks = running.or_else(|| {
            self.ended.iter().map(|ended| &ended.peaks).find(|peaks| peaks.container.id == *id)
        })?;
        Some(&peaks.container.identity)
    }

    /// Returns a running or ended container as the subject of an event.
    pub fn subject(&self, id: &ContainerId) -> Option<ContainerRef> {
        let running = self.running.get(id);
        let peaks = running.or_else(|| {
            self.ended.iter().map(|ended| &ended.peaks).find(|peaks| peaks.container.id == *id)
        })?;
        Some(ContainerRef::of(&peaks.container))
    }

    /// Returns the highest usage and the highest unreclaimable memory of a running container.
    pub fn peaks(&self, id: &ContainerId) -> (Option<u64>, Option<u64>) {
        self.running.get(id).map_or((None, None), |peaks| (peaks.peak_usage, peaks.peak_unreclaimable))
    }

    /// Returns the id of the run of a running container; empty if it is unknown.
    pub fn run_id(&self, id: &ContainerId) -> Arc<str> {
        self.running.get(id).map_or_else(Arc::default, |peaks| Arc::clone(&peaks.run))
    }

    /// Returns the highest GPU memory of a running container by UUID.
    pub fn gpu_peaks(&self, id: &ContainerId) -> Vec<(Arc<str>, u64)> {
        let gpus = self.running.get(id).into_iter().flat_map(|peaks| &peaks.gpus);
        gpus.filter_map(|(uuid, peak)| Some((Arc::clone(uuid), peak.highest()?))).collect()
    }

    /// Writes the series of running containers, and of ended ones whose name is not in use.
    pub fn write(&self, context: &Context<'_>, series: &mut Series) -> Vec<Arc<Container>> {
        let version = context.hierarchy.map_or("", |hierarchy| hierarchy.version.label());
        let mut names = HashSet::new();
        for (number, container) in context.inventory.containers.iter().enumerate() {
            names.insert(&container.identity);
            if let Some(peaks) = self.running.get(&container.id) {
                peaks.write(number as u32, version, series);
                peaks.write_gpus(number as u32, Some(context.now), &self.gpus, series);
            }
        }
        let mut shown = Vec::new();
        for ended in &self.ended {
            if names.insert(&ended.peaks.container.identity) {
                let number = context.inventory.containers.len() + shown.len();
                ended.peaks.write(number as u32, version, series);
                ended.peaks.write_gpus(number as u32, None, &self.gpus, series);
                shown.push(Arc::clone(&ended.peaks.container));
            }
        }
        shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::process::Processes;
    use crate::discover::RuntimeKind;
    use crate::discover::{Identity, Inventory};
    use crate::host::HostPaths;

    fn container(id: char, name: &str, started: f64) -> Arc<Container> {
        Arc::new(Container {
            id: ContainerId::new(&id.to_string().repeat(64)),
            runtime: RuntimeKind::Docker,
            started: Some(started),
            listed_run: started as u64,
            ..Container::known_by_name(Identity::named(name))
        })
    }

    /// Returns the usage of one process that started at this Unix time.
    fn held(at: Timestamp, start: f64, bytes: u64) -> GpuAttribution {
        let boot = HostPaths::default().boot_time().expect("btime") as f64;
        let ticks = ((start - boot) * rustix::param::clock_ticks_per_second() as f64) as u64;
        let containers = HashMap::from([(ContainerId::new(&"a".repeat(64)), vec![(ticks, bytes)])]);
        let (processes, owners) = (vec![], vec![]);
        let device = "GPU-0".into();
        let held = DeviceUsage { at, device, used: None, containers, processes, owners };
        GpuAttribution { held: vec![held], ..GpuAttribution::default() }
    }

    #[test]
    fn gpu_usage_of_previous_run_is_not_added_to_next_run_with_same_id() {
        let mut table = RunPeaksTable::new(Duration::from_secs(60));
        let (host_paths, now) = (HostPaths::default(), Timestamp::now());
        let start = HostPaths::default().boot_time().expect("btime") as f64;
        let (first, second) =
            (container('a', "train", start + 100.0), container('a', "train", start + 200.0));
        let mut enter =
            |after: u64, running: &Arc<Container>, ended: &[Arc<Container>], gpus: &GpuAttribution| {
                let inventory =
                    Arc::new(Inventory { containers: vec![Arc::clone(running)], ..Inventory::default() });
                let now = now.plus(Duration::from_secs(after));
                let context =
                    Context { now, host_paths: &host_paths, hierarchy: None, inventory: &inventory };
                table.record(&context, ended, &CycleData::default(), gpus);
                let peak = |peaks: &RunPeaks| peaks.gpus.get("GPU-0").and_then(Peak::highest);
                (peak(&table.running[&running.id]), table.ended.front().and_then(|ended| peak(&ended.peaks)))
            };
        let (old, new) = (start + 110.0, start + 205.0);
        assert_eq!(enter(0, &first, &[], &held(now, old, 5)), (Some(5), None));
        let ended = std::slice::from_ref(&first);
        assert_eq!(enter(1, &second, ended, &held(now, old, 7)), (None, Some(7)), "within one cycle");
        assert_eq!(enter(2, &second, &[], &held(now, new, 2)), (Some(2), Some(7)));
        let of_nobody = held(now, start + 50.0, 11);
        assert_eq!(enter(3, &second, &[], &of_nobody), (Some(2), Some(7)), "older than both");
    }

    #[test]
    fn gpu_usage_of_a_process_that_started_seconds_before_its_container_counts() {
        let mut table = RunPeaksTable::new(Duration::from_secs(60));
        let (host_paths, now) = (HostPaths::default(), Timestamp::now());
        let boot = host_paths.boot_time().expect("btime") as f64;
        let slow = container('a', "train", boot + 105.0);
        let inventory = Arc::new(Inventory { containers: vec![slow], ..Inventory::default() });
        let context = Context { now, host_paths: &host_paths, hierarchy: None, inventory: &inventory };
        let first = Processes::of_one_container(&[100 * rustix::param::clock_ticks_per_second()]);
        let mut peak = |processes: Processes, start: f64| {
            let cycle_data = CycleData { processes, ..CycleData::default() };
            table.record(&context, &[], &cycle_data, &held(now, start, 5));
            let run = &table.running[&ContainerId::new(&"a".repeat(64))];
            run.gpus.get("GPU-0").and_then(Peak::highest)
        };
        assert_eq!(
            peak(Processes::default(), boot + 100.0),
            None,
            "no cycle saw it: perhaps of an earlier run"
        );
        assert_eq!(peak(first, boot + 90.0), None, "older than all that are seen");
        assert_eq!(peak(Processes::default(), boot + 100.0), Some(5), "also after its end");
    }

    struct Day {
        table: RunPeaksTable,
        now: Timestamp,
    }

    impl Day {
        fn cycle(
            &mut self,
            running: &[Arc<Container>],
            ended: &[Arc<Container>],
            unreclaimable: u64,
        ) -> Series {
            self.now = self.now.plus(Duration::from_secs(1));
            let inventory = Arc::new(Inventory { containers: running.to_vec(), ..Inventory::default() });
            let host_paths = HostPaths::default();
            let context =
                Context { now: self.now, host_paths: &host_paths, hierarchy: None, inventory: &inventory };
            let memory = ContainerMemory {
                unreclaimable: Some(unreclaimable),
                usage: unreclaimable,
                ..ContainerMemory::default()
            };
            let cycle_data = CycleData { memory: vec![Some(memory); running.len()], ..CycleData::default() };
            let mut series = Series::default();
            self.table.record(&context, ended, &cycle_data, &GpuAttribution::default());
            self.table.write(&context, &mut series);
            series
        }
    }

    fn values(series: &Series, family: FamilyId) -> Vec<(u32, f64)> {
        series
            .rows()
            .iter()
            .filter(|row| row.family == family)
            .map(|row| (row.container, row.value))
            .collect()
    }

    #[test]
    fn peaks_outlive_the_container_and_new_run_starts_its_own() {
        let mut day = Day { table: RunPeaksTable::new(Duration::from_secs(60)), now: Timestamp::now() };
        let (first, second) = (container('a', "train", 1.0), container('a', "train", 2.0));
        day.cycle(std::slice::from_ref(&first), &[], 700);
        let series = day.cycle(std::slice::from_ref(&first), &[], 300);
        assert_eq!(values(&series, FamilyId::CONTAINER_MEMORY_UNRECLAIMABLE_PEAK), [(0, 700.0)]);
        let series = day.cycle(&[], std::slice::from_ref(&first), 0);
        assert_eq!(values(&series, FamilyId::CONTAINER_MEMORY_UNRECLAIMABLE_PEAK), [(0, 700.0)]);
        let series = day.cycle(std::slice::from_ref(&second), &[], 100);
        assert_eq!(values(&series, FamilyId::CONTAINER_MEMORY_UNRECLAIMABLE_PEAK), [(0, 100.0)]);
        assert_eq!(values(&series, FamilyId::CONTAINER_INFO).len(), 1, "the ended one is replaced");
    }

    #[test]
    fn run_that_is_listed_again_keeps_its_peaks() {
        let mut day = Day { table: RunPeaksTable::new(Duration::from_secs(60)), now: Timestamp::now() };
        let (first, second) = (container('a', "train", 1.0), container('a', "train", 2.0));
        for (running, ended, peak) in
            [(&first, None, 700.0), (&first, Some(&first), 700.0), (&second, None, 100.0)]
        {
            if let Some(ended) = ended {
                day.cycle(&[], std::slice::from_ref(ended), 0); // its runtime is away
            }
            let unreclaimable = if ended.is_none() { peak as u64 } else { 300 };
            let left = (running.listed_run == 2).then(|| Arc::clone(&first));
            let series = day.cycle(std::slice::from_ref(running), left.as_slice(), unreclaimable);
            let found = values(&series, FamilyId::CONTAINER_MEMORY_UNRECLAIMABLE_PEAK);
            assert_eq!(found, [(0, peak)], "run {}", running.listed_run);
        }
    }

    #[test]
    fn peaks_of_a_run_continue_after_a_restart_of_memledger() {
        let run = container('a', "train", 1.0);
        let stored = |of: f64| StoredPeaks {
            run: run_id(&run.id, Some(of)),
            usage_bytes: Some(900),
            unreclaimable_bytes: Some(700),
            gpus: vec![],
        };
        for (of, peak) in [(1.0, 700.0), (99.0, 300.0)] {
            let mut day = Day { table: RunPeaksTable::new(Duration::from_secs(60)), now: Timestamp::now() };
            day.table.restore([(run.id.clone(), stored(of))].into());
            let series = day.cycle(std::slice::from_ref(&run), &[], 300);
            let found = values(&series, FamilyId::CONTAINER_MEMORY_UNRECLAIMABLE_PEAK);
            assert_eq!(found, [(0, peak)], "a run that began at {of}");
        }
    }

    #[test]
    fn drops_ended_containers_after_a_time_and_above_the_limit() {
        let mut day = Day { table: RunPeaksTable::new(Duration::from_secs(60)), now: Timestamp::now() };
        let many: Vec<_> =
            (0..600).map(|n| container('b', &format!("job-{n}"), f64::from(n) + 1.0)).collect();
        let series = day.cycle(&[], &many, 0);
        assert_eq!(values(&series, FamilyId::CONTAINER_INFO).len(), MAX_ENDED);
        day.now = day.now.plus(Duration::from_secs(60));
        assert!(values(&day.cycle(&[], &[], 0), FamilyId::CONTAINER_INFO).is_empty());
    }
}
