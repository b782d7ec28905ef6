//! What processes have reported, by process and by container.
//!
//! A process is known by pid and start time, and its container by its cgroup, both from the kernel. The figures of a
//! process vanish with its connection; those of a container stay until the container ends.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::message::{Hello, MAX_DEVICES, MAX_SETTINGS, Sample, Step, TorchMemory, TrackedOperation};
use super::stats::ReportRejection;
use crate::clock::Timestamp;
use crate::discover::ContainerId;
use crate::host::bounds::{REPORTED_OPERATIONS, REPORTER_CONNECTIONS_OF_CONTAINER};
use crate::host::process::ProcessId;

/// Maximum that one sample adds to a count of all processes, which one client must not dominate.
const MAX_GROWTH: u64 = 10_000;

/// UUID of a device without prefix; `None` if the process does not know it.
pub type DeviceUuid = Option<Arc<str>>;

/// The figures of one connected process.
#[derive(Clone, Debug)]
pub struct ReportingProcess {
    /// Its container.
    pub container: ContainerId,
    /// Local rank.
    pub rank: u8,
    /// When `devices` was received; `None` before the first sample.
    pub sampled: Option<Timestamp>,
    /// Memory on each device.
    pub devices: Vec<ReportedDevice>,
    /// Settings of the training.
    pub settings: BTreeMap<Arc<str>, Arc<str>>,
    uuids: Vec<(u32, DeviceUuid)>,
}

impl ReportingProcess {
    /// Returns the UUID of a device of the process.
    pub fn uuid(&self, device: u32) -> DeviceUuid {
        self.uuids.iter().find(|(i, _)| *i == device).and_then(|(_, uuid)| uuid.clone())
    }
}

/// Memory of one process on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportedDevice {
    /// The device.
    pub uuid: DeviceUuid,
    /// Newest memory.
    pub memory: TorchMemory,
}

/// The figures of one container over all its processes.
#[derive(Clone, Debug, Default)]
pub struct ContainerReports {
    /// Steps and samples of each local rank.
    pub progress: BTreeMap<u8, TrainingProgress>,
    /// Out-of-memory errors and retries on each device.
    pub failures: BTreeMap<DeviceUuid, AllocationFailures>,
    /// Number of the run by which cycles list the container.
    listed_run: Option<u64>,
    /// When one of its programs last ended a search for a batch size.
    pub peaks_forgotten: Option<Timestamp>,
    /// Highest steps of the processes of each local rank that are no longer in `counted`.
    ended_steps: BTreeMap<u8, u64>,
    /// Memory of each component and operation, by local rank.
    pub operations: BTreeMap<(Arc<str>, Arc<str>), BTreeMap<u8, OperationMemory>>,
    /// Last totals of processes that counted; the newest are at the end.
    counted: Vec<(ProcessId, ProcessTotals)>,
}

impl ContainerReports {
    /// Returns the memory of each component and operation: each figure is that of the rank with the most.
    pub fn operations(&self) -> impl Iterator<Item = (&(Arc<str>, Arc<str>), OperationMemory)> {
        self.operations.iter().map(|(names, ranks)| {
            let most = |of: fn(&OperationMemory) -> Option<u64>| ranks.values().filter_map(of).max();
            let memory = OperationMemory {
                allocated: most(|memory| memory.allocated),
                allocated_peak: most(|memory| memory.allocated_peak),
                reserved: most(|memory| memory.reserved),
                rss: most(|memory| memory.rss),
            };
            (names, memory)
        })
    }
}

/// Counts of one local rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrainingProgress {
    /// Training steps.
    pub steps: u64,
    /// Training samples; `None` if the program does not count them.
    pub samples: Option<u64>,
}

/// Counts of torch's allocator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocationFailures {
    /// Out-of-memory errors.
    pub ooms: u64,
    /// Allocations that succeeded only after the cache was emptied.
    pub retries: u64,
}

/// Memory of an operation of a program, over all devices of a process. A sum is absent if a part of it is not reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperationMemory {
    /// In tensors.
    pub allocated: Option<u64>,
    /// Highest in tensors.
    pub allocated_peak: Option<u64>,
    /// Held by torch's allocator.
    pub reserved: Option<u64>,
    /// Resident memory of the process.
    pub rss: Option<u64>,
}

#[derive(Clone, Debug, Default)]
struct ProcessTotals {
    progress: TrainingProgress,
    /// The rank for which `steps_before` holds.
    rank: Option<u8>,
    /// Steps of earlier processes of its rank, which its own follow.
    steps_before: u64,
    failures: BTreeMap<u32, AllocationFailures>,
    lost: u64,
    overlapping: u64,
}

/// What a sample adds to the counts of all processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleGrowth {
    /// Messages that the process lost since the sample before.
    pub lost: u64,
    /// Operations without a peak.
    pub overlapping: u64,
}

impl ProcessTotals {
    /// Returns the steps of its rank up to its own last one.
    fn steps(&self) -> u64 {
        self.steps_before.saturating_add(self.progress.steps)
    }
}

/// All reports.
#[derive(Clone, Debug, Default)]
pub struct Reports {
    /// Connected processes that have sent their first message.
    pub processes: HashMap<ProcessId, ReportingProcess>,
    /// Containers with at least one report.
    pub containers: HashMap<ContainerId, ContainerReports>,
}

impl Reports {
    /// Records the first message of a process, or a later one with further devices.
    pub fn hello(&mut self, key: ProcessId, container: &ContainerId, hello: Hello) {
        let entry = self.containers.entry(container.clone()).or_default();
        // counters begin at 0 before they count
        for (_, uuid) in &hello.devices {
            entry.failures_on(uuid);
        }
        entry.begin_progress(key, hello.local_rank, |other| self.processes.contains_key(other));
        let process = self.processes.entry(key).or_insert_with(|| ReportingProcess {
            settings: BTreeMap::new(),
            container: container.clone(),
            rank: 0,
            sampled: None,
            devices: vec![],
            uuids: vec![],
        });
        (process.rank, process.uuids) = (hello.local_rank, hello.devices);
    }

    /// Records a sample, and returns what it adds to the counts of all processes, each at most `MAX_GROWTH`.
    pub fn sample(&mut self, key: ProcessId, at: Timestamp, sample: Sample) -> SampleGrowth {
        let Some(process) = self.processes.get_mut(&key) else { return SampleGrowth::default() };
        process.sampled = Some(at);
        process.devices.clear();
        let entry = self.containers.entry(process.container.clone()).or_default();
        let totals = entry.totals(key);
        let grown =
            |before: &mut u64, now: u64| now.saturating_sub(std::mem::replace(before, now)).min(MAX_GROWTH);
        let growth = SampleGrowth {
            lost: grown(&mut totals.lost, sample.lost),
            overlapping: grown(&mut totals.overlapping, sample.overlapping),
        };
        for memory in sample.devices {
            let uuid = process.uuid(memory.i);
            entry.count_failures(key, &memory, &uuid);
            process.devices.push(ReportedDevice { uuid, memory });
        }
        growth
    }

    /// Records that what a process reported of the GPUs so far is not of the training.
    pub fn forget_peaks(&mut self, key: ProcessId, at: Timestamp) {
        let Some(process) = self.processes.get(&key) else { return };
        self.containers.entry(process.container.clone()).or_default().peaks_forgotten = Some(at);
    }

    /// Records the memory of an operation that a program tracks.
    ///
    /// # Errors
    /// The container has the maximum number of pairs of component and operation.
    pub fn operation(&mut self, key: ProcessId, tracked: TrackedOperation) -> Result<(), ReportRejection> {
        let Some(process) = self.processes.get(&key) else { return Ok(()) };
        let operations = &mut self.containers.entry(process.container.clone()).or_default().operations;
        let pair = (tracked.component, tracked.operation);
        if operations.len() >= REPORTED_OPERATIONS.max && !operations.contains_key(&pair) {
            return Err(ReportRejection::Operations);
        }
        let sum = |of: fn(&TorchMemory) -> Option<u64>| {
            if tracked.devices.is_empty() { None } else { tracked.devices.iter().map(of).sum() }
        };
        let memory = OperationMemory {
            allocated: sum(|device| device.alloc),
            allocated_peak: sum(|device| device.alloc_peak),
            reserved: sum(|device| device.res),
            rss: tracked.rss,
        };
        operations.entry(pair).or_default().insert(process.rank, memory);
        Ok(())
    }

    /// Records the progress of a training. Processes without a launcher all have local rank 0 and count the same steps, so the one with
    /// the most counts; their samples are different ones.
    pub fn step(&mut self, key: ProcessId, step: Step) {
        let Some(process) = self.processes.get(&key) else { return };
        let entry = self.containers.entry(process.container.clone()).or_default();
        let totals = entry.totals(key);
        if step.steps < totals.progress.steps {
            // the process executed another program, which counts from 0
            (totals.steps_before, totals.progress) = (totals.steps(), TrainingProgress::default());
        }
        let before = totals.progress.samples.unwrap_or(0); // none counted before
        let samples = step.samples.map(|all| all.saturating_sub(before));
        totals.progress = TrainingProgress { steps: step.steps, samples: step.samples };
        let steps = totals.steps();
        let progress = entry.progress.entry(process.rank).or_default();
        progress.steps = progress.steps.max(steps);
        if let Some(samples) = samples {
            progress.samples = Some(progress.samples.unwrap_or(0).saturating_add(samples));
        }
    }

    /// Forgets the figures of a container's earlier run: a cycle lists the run with this number.
    pub fn forget_earlier_run(&mut self, container: &ContainerId, listed_run: u64) {
        let Some(reports) = self.containers.get_mut(container) else { return };
        if reports.listed_run.is_some_and(|before| before != listed_run) {
            *reports = ContainerReports::default();
        }
        reports.listed_run = Some(listed_run);
    }

    /// Records settings of the training, the last of each name.
    pub fn settings(&mut self, key: ProcessId, settings: BTreeMap<Arc<str>, Arc<str>>) {
        let Some(process) = self.processes.get_mut(&key) else { return };
        for (name, value) in settings {
            if process.settings.len() < MAX_SETTINGS || process.settings.contains_key(&name) {
                process.settings.insert(name, value);
            }
        }
    }

    /// Removes the figures of a process whose connection ended.
    pub fn disconnect(&mut self, key: ProcessId) {
        self.processes.remove(&key);
    }

    /// Removes containers that ended.
    pub fn retain(&mut self, is_running: impl Fn(&ContainerId) -> bool) {
        let processes = &self.processes;
        self.containers
            .retain(|id, _| is_running(id) || processes.values().any(|process| process.container == *id));
    }
}

impl ContainerReports {
    fn totals(&mut self, key: ProcessId) -> &mut ProcessTotals {
        let known = self.counted.iter().position(|(known, _)| *known == key);
        // to the end: the oldest report is dropped first. More are kept than are connected, so that a process that connects
        // again is not counted twice
        let entry = known.map_or_else(|| (key, ProcessTotals::default()), |at| self.counted.remove(at));
        if self.counted.len() >= 2 * REPORTER_CONNECTIONS_OF_CONTAINER.max {
            let (_, oldest) = self.counted.remove(0);
            if let Some(rank) = oldest.rank {
                let ended = self.ended_steps.entry(rank).or_default();
                *ended = oldest.steps().max(*ended);
            }
        }
        self.counted.push(entry);
        let last = self.counted.len() - 1;
        &mut self.counted[last].1
    }

    /// Lets the steps of a process follow those of the processes of its rank that have ended, once: also if it connects again.
    fn begin_progress(&mut self, key: ProcessId, rank: u8, is_connected: impl Fn(&ProcessId) -> bool) {
        let has_ended = |other: &&(ProcessId, ProcessTotals)| {
            other.1.rank == Some(rank) && other.0 != key && !is_connected(&other.0)
        };
        let ended = self.counted.iter().filter(has_ended).map(|(_, totals)| totals.steps()).max();
        let ended = ended.max(self.ended_steps.get(&rank).copied()).unwrap_or(0);
        let totals = self.totals(key);
        if totals.rank.replace(rank) != Some(rank) {
            totals.steps_before = ended;
        }
    }

    fn count_failures(&mut self, key: ProcessId, memory: &TorchMemory, uuid: &DeviceUuid) {
        let before = self.totals(key).failures.entry(memory.i).or_default();
        let grown = |new: Option<u64>, before: &mut u64| {
            let Some(new) = new else { return 0 }; // not reported: nothing is known to have grown
            new.saturating_sub(std::mem::replace(before, new))
        };
        let (ooms, retries) =
            (grown(memory.ooms, &mut before.ooms), grown(memory.retries, &mut before.retries));
        if let Some(failures) = self.failures_on(uuid) {
            failures.ooms = failures.ooms.saturating_add(ooms);
            failures.retries = failures.retries.saturating_add(retries);
        }
    }

    /// Returns the counts on a device; `None` for further devices than a host can have.
    fn failures_on(&mut self, uuid: &DeviceUuid) -> Option<&mut AllocationFailures> {
        if self.failures.len() >= MAX_DEVICES && !self.failures.contains_key(uuid) {
            return None;
        }
        Some(self.failures.entry(uuid.clone()).or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: ProcessId = ProcessId::new(7, 70);

    fn reports(rank: u8) -> Reports {
        let mut reports = Reports::default();
        reports.hello(KEY, &ContainerId::new("a"), hello(rank));
        reports
    }

    fn hello(local_rank: u8) -> Hello {
        Hello { local_rank, devices: vec![(0, Some("u".into()))] }
    }

    fn memory(alloc_peak: u64, ooms: u64) -> TorchMemory {
        TorchMemory {
            i: 0,
            alloc: Some(1),
            alloc_peak: Some(alloc_peak),
            ooms: Some(ooms),
            ..Default::default()
        }
    }

    fn sample(lost: u64, device: TorchMemory) -> Sample {
        Sample { lost, overlapping: 2 * lost, devices: vec![device] }
    }

    #[test]
    fn steps_and_samples_go_on_after_a_process_executes_another_program() {
        let mut reports = reports(0);
        for steps in [1_000, 1, 900] {
            reports.step(KEY, Step { steps, samples: Some(steps * 4) });
        }
        let progress = &reports.containers[&ContainerId::new("a")].progress[&0];
        assert_eq!((progress.steps, progress.samples), (1_900, Some(7_600)));
    }

    #[test]
    fn figures_are_of_the_run_that_is_listed() {
        let (mut reports, id) = (reports(0), ContainerId::new("a"));
        reports.step(KEY, Step { steps: 5, samples: None });
        for (listed_run, steps) in [(1, Some(5)), (1, Some(5)), (2, None), (2, None)] {
            reports.forget_earlier_run(&id, listed_run);
            let progress = reports.containers[&id].progress.get(&0);
            assert_eq!(progress.map(|progress| progress.steps), steps, "run {listed_run}");
        }
    }

    #[test]
    fn steps_of_a_process_that_outlives_many_others_are_counted_once() {
        let mut reports = reports(0);
        let step = |steps| Step { steps, samples: None };
        for round in 1..=300_u32 {
            reports.step(KEY, step(u64::from(round)));
            let other = ProcessId::new(1_000 + round, 1);
            reports.hello(other, &ContainerId::new("a"), hello(1));
            reports.step(other, step(1));
            reports.disconnect(other);
        }
        assert_eq!(reports.containers[&ContainerId::new("a")].progress[&0].steps, 300);
    }

    /// As of `torch.multiprocessing.spawn`, or after a restart of memledger.
    #[test]
    fn processes_of_one_rank_at_a_time_count_the_steps_of_the_one_with_the_most() {
        let (mut reports, id) = (reports(0), ContainerId::new("a"));
        let others: Vec<ProcessId> = (1..4).map(|pid| ProcessId::new(100 + pid, 1)).collect();
        for (steps, key) in (10..).zip(std::iter::once(KEY).chain(others.iter().copied())) {
            reports.hello(key, &id, hello(0));
            reports.step(key, Step { steps, samples: Some(steps * 4) });
        }
        let progress = |reports: &Reports| reports.containers[&id].progress[&0];
        assert_eq!(progress(&reports), TrainingProgress { steps: 13, samples: Some(184) });
        reports.step(KEY, Step { steps: 50, samples: Some(200) });
        assert_eq!(progress(&reports).steps, 50);
        // one that connects again goes on, and one that comes then is beside it
        reports.disconnect(KEY);
        reports.hello(KEY, &id, hello(0));
        reports.hello(ProcessId::new(150, 1), &id, hello(0));
        reports.step(ProcessId::new(150, 1), Step { steps: 50, samples: None });
        reports.step(KEY, Step { steps: 50, samples: Some(200) });
        assert_eq!(progress(&reports).steps, 50);
        reports.disconnect(ProcessId::new(150, 1));
        // the next trainings of the same container, one process after the other
        for key in others {
            reports.disconnect(key);
        }
        reports.disconnect(KEY);
        for (pid, wanted) in [(200, 55), (201, 60)] {
            reports.hello(ProcessId::new(pid, 1), &id, hello(0));
            reports.step(ProcessId::new(pid, 1), Step { steps: 5, samples: None });
            assert_eq!(progress(&reports).steps, wanted);
            reports.disconnect(ProcessId::new(pid, 1));
        }
    }

    #[test]
    fn counts_of_a_process_that_connects_again_are_counted_once() {
        let (mut reports, id, now) = (reports(0), ContainerId::new("a"), Timestamp::now());
        reports.step(KEY, Step { steps: 10, samples: None });
        let growth = SampleGrowth { lost: 3, overlapping: 6 };
        assert_eq!(reports.sample(KEY, now, sample(3, memory(1, 2))), growth);
        reports.disconnect(KEY);
        reports.hello(KEY, &id, hello(0));
        reports.step(KEY, Step { steps: 12, samples: Some(64) });
        assert_eq!(reports.sample(KEY, now, sample(3, memory(1, 2))), SampleGrowth::default());
        reports.disconnect(KEY);
        let other = ProcessId::new(8, 80); // another process of the same rank after it
        reports.hello(other, &id, hello(0));
        reports.step(other, Step { steps: 5, samples: Some(1) });
        reports.sample(other, now, sample(0, memory(1, 1)));
        let of = &reports.containers[&id];
        assert_eq!(of.progress[&0], TrainingProgress { steps: 17, samples: Some(65) });
        assert_eq!(of.failures[&Some("u".into())].ooms, 3);
    }

    #[test]
    fn highest_numbers_of_many_processes_overflow_nothing_and_losses_are_capped() {
        let (mut reports, id, now) = (reports(0), ContainerId::new("a"), Timestamp::now());
        for pid in 1..=1 << 14 {
            reports.hello(ProcessId::new(pid, 1), &id, hello(0));
            assert_eq!(
                reports.sample(ProcessId::new(pid, 1), now, sample(1 << 50, memory(1, 1 << 50))).lost,
                MAX_GROWTH
            );
            reports.disconnect(ProcessId::new(pid, 1));
        }
        assert_eq!(reports.containers[&id].failures[&Some("u".into())].ooms, u64::MAX);
    }

    #[test]
    fn further_hello_keeps_the_sample_and_devices_are_bounded() {
        let (mut reports, id, now) = (reports(0), ContainerId::new("a"), Timestamp::now());
        reports.sample(KEY, now, sample(0, memory(1, 0)));
        for number in 0..3 * MAX_DEVICES {
            let devices = vec![(0, Some(number.to_string().into()))];
            reports.hello(KEY, &id, Hello { local_rank: 1, devices });
        }
        let process = &reports.processes[&KEY];
        assert_eq!((process.rank, process.sampled, process.devices.len()), (1, Some(now), 1));
        assert_eq!(reports.containers[&id].failures.len(), MAX_DEVICES);
    }

    #[test]
    fn further_pairs_over_the_maximum_are_rejected_and_known_ones_updated() {
        let mut reports = reports(3);
        let tracked = |number: usize, rss| TrackedOperation {
            component: "model".into(),
            operation: number.to_string().into(),
            rss: Some(rss),
            devices: vec![],
        };
        for number in 0..REPORTED_OPERATIONS.max {
            assert_eq!(reports.operation(KEY, tracked(number, 1)), Ok(()));
        }
        assert_eq!(reports.operation(KEY, tracked(1_000, 1)), Err(ReportRejection::Operations));
        assert_eq!(reports.operation(KEY, tracked(5, 2)), Ok(()));
        let operations = &reports.containers[&ContainerId::new("a")].operations;
        let changed = &operations[&("model".into(), "5".into())][&3];
        assert_eq!(
            (operations.len(), changed.rss, changed.allocated),
            (REPORTED_OPERATIONS.max, Some(2), None)
        );
    }
}
