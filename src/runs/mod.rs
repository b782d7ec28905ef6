//! The record of a run: what it was started with, what it needed, how it ended. Pure.
//!
//! [`RunFigures`] grow with each cycle while the container runs, and are stored with it at least once a minute. With the exit they
//! become a [`RunRecord`], which is kept. A run in progress is a record without an end.

pub mod allocator;
mod gpu_figures;
mod run_settings;
mod measures;
pub mod advice;
pub mod hit_limit;
pub mod leak;
pub mod names;
pub mod operation_log;
pub mod peaks;
pub mod process_end;
pub mod sample;
pub mod setting_names;
pub mod usage;
pub mod usage_history;

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::clock::{Timestamp, is_same_report};
use crate::discover::{Container, ContainerId, ContainerSpec};
use crate::events::{ContainerRef, Exit, ExitReason, Identity, Role};
use crate::runs::hit_limit::HitLimit;
use measures::{Growth, Mean};
use operation_log::{OperationLog, OperationRecord};
use peaks::StoredPeaks;
use process_end::ProcessEnd;
use sample::{MAX_OPERATIONS, OperationSample, ReportingRank, RunGpuSample};
use usage::ContainerUsage;
use usage_history::by_role;

/// Maximum number of points of a timeline: then every other one is dropped, and they come half as often.
const MAX_POINTS: usize = 60;
/// Maximum number of settings: each process of a container may report others.
const MAX_SETTINGS: usize = 64;
/// A run in progress whose last stored sample is older than this, in seconds, may have ended while memledger was stopped.
const FRESH_FOR: f64 = 180.0;
/// A larger number in a setting is taken for none: a container may set anything.
const MAX_SETTING: u64 = 65_536;
/// First interval between points of a timeline, in seconds.
const POINT_INTERVAL: f64 = 10.0;

/// Returns a setting that is a number of reasonable size.
pub fn setting_number(value: &str) -> Option<u64> {
    value.trim().parse().ok().filter(|number| *number <= MAX_SETTING)
}

/// What is known of a run so far.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RunFigures {
    run: Arc<str>,
    group: Arc<str>,
    last_sampled: Option<f64>,
    /// Seconds between two cycles of one memledger that both sampled it.
    observed_seconds: f64,
    settings: BTreeMap<Arc<str>, Arc<str>>,
    /// Numbers among the arguments of the first trainer.
    #[serde(default)]
    arguments: BTreeMap<Arc<str>, Arc<str>>,
    /// Settings that a process reported, and which one.
    reported_settings: BTreeMap<Arc<str>, Arc<str>>,
    reported_by: Option<ReportingRank>,
    samples: u64,
    limit_bytes: Option<u64>,
    usage_peak_bytes: Option<u64>,
    unreclaimable_peak_bytes: Option<u64>,
    unreclaimable: Mean,
    shm_peak_bytes: Option<u64>,
    /// Memory of the host, and the most of it that was in use beside this run.
    host_total_bytes: Option<u64>,
    host_others_peak_bytes: Option<u64>,
    /// A source of GPU figures was there in a cycle, also one that failed; `None` in figures from before this was noticed.
    #[serde(default)]
    host_has_gpu: Option<bool>,
    cpu: Growth,
    steps: Growth,
    samples_of_training: Growth,
    torch_ooms: Option<u64>,
    /// Those of a search for a batch size, which do not count.
    #[serde(default)]
    forgotten_torch_ooms: u64,
    /// Errors that the program reported at once: those of the last second before the exit are not in `torch_ooms`.
    #[serde(default)]
    cuda_ooms: u64,
    /// Errors in the container's log.
    cuda_ooms_in_log: u64,
    roles: BTreeMap<Role, RolePeak>,
    gpus: BTreeMap<Arc<str>, GpuFigures>,
    operations: Vec<OperationPeak>,
    #[serde(default)]
    log: OperationLog,
    /// Ends of its processes, for figures that were taken before.
    #[serde(skip)]
    ends: Vec<ProcessEnd>,
    timeline: Vec<TimelinePoint>,
    point_interval: f64,
    /// Least of PyTorch's allocated bytes since the last point.
    #[serde(default)]
    torch_allocated_min_bytes: Option<u64>,
}

/// The GPU memory and use of a run on one GPU so far.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct GpuFigures {
    total_bytes: Option<u64>,
    peak_bytes: Option<u64>,
    /// The peak of the run when a search for a batch size had ended.
    forgotten_peak_bytes: Option<u64>,
    last_used: Option<u64>,
    used: Mean,
    utilization: Mean,
    torch_allocated_peak_bytes: Option<u64>,
    torch_reserved_peak_bytes: Option<u64>,
}

/// The largest memory of the processes of one role.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RolePeak {
    /// Highest number of processes at a time.
    pub processes: u32,
    /// Largest resident memory of one process. Resident memory of several processes has no sum: they share pages.
    pub process_rss_bytes: u64,
    /// Largest anonymous part of it; it is absent in records from before it was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process_anon_bytes: Option<u64>,
    /// Largest sum of proportional set sizes (PSS), if they were measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pss_bytes: Option<u64>,
    /// Largest mean of PSS for each process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process_pss_bytes: Option<u64>,
}

/// The largest memory of an operation that a program tracks, and when it was last seen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OperationPeak {
    /// Component of the program.
    pub component: Arc<str>,
    /// Operation of the component.
    pub operation: Arc<str>,
    /// Unix time at which its values last changed.
    pub at: f64,
    /// PyTorch's allocated bytes at the last report.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub torch_allocated_bytes: Option<u64>,
    /// PyTorch's peak of allocated bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub torch_allocated_peak_bytes: Option<u64>,
    /// PyTorch's largest reserved bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub torch_reserved_bytes: Option<u64>,
    /// Largest resident memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rss_bytes: Option<u64>,
}

/// One point of the timeline of a run. Points are evenly spaced and at most sixty, so they may miss a peak.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TimelinePoint {
    /// Unix time.
    pub at: f64,
    /// Memory that the kernel cannot reclaim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unreclaimable_bytes: Option<u64>,
    /// GPU memory, all GPUs together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_bytes: Option<u64>,
    /// PyTorch's reserved bytes, all GPUs together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub torch_reserved_bytes: Option<u64>,
    /// Least of PyTorch's allocated bytes since the point before, all GPUs together: what stays between two steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub torch_allocated_min_bytes: Option<u64>,
}

impl RunFigures {
    /// Returns the peaks so far, for the metrics of a restarted memledger.
    pub fn stored_peaks(&self) -> StoredPeaks {
        let gpus = self.gpus.iter().filter_map(|(uuid, gpu)| Some((Arc::clone(uuid), gpu.peak_bytes?)));
        StoredPeaks {
            run: Arc::clone(&self.run),
            usage_bytes: self.usage_peak_bytes,
            unreclaimable_bytes: self.unreclaimable_peak_bytes,
            gpus: gpus.collect(),
        }
    }

    /// Returns the highest usage, page cache included.
    pub fn usage_peak_bytes(&self) -> Option<u64> {
        self.usage_peak_bytes
    }

    /// Returns the highest sample of unreclaimable memory.
    pub fn unreclaimable_peak_bytes(&self) -> Option<u64> {
        self.unreclaimable_peak_bytes
    }

    /// Records one cycle; `last_cycle` is when the one before it began. Returns true if it must be stored before the
    /// next interval: it is the first sample, settings became known, or it holds memory of another GPU.
    pub fn record(
        &mut self,
        at: Timestamp,
        last_cycle: Option<Timestamp>,
        container: &Container,
        usage: &ContainerUsage,
    ) -> bool {
        // without its runtime a container has its id for a name, and no settings
        // and a run id without a start, until its processes are read
        let is_named = *container.identity.name != *container.id.short();
        if is_named || self.group.is_empty() {
            self.group = container.group();
        }
        if is_named || !self.run.contains('-') {
            self.run = Arc::clone(&usage.run_id);
        }
        let has_new_settings = self.record_settings(container, &usage.run);
        let Some(sample) = &usage.sample else { return has_new_settings };
        self.samples += 1;
        let is_of = |last: &Timestamp| {
            self.last_sampled.is_some_and(|sampled| is_same_report(sampled, last.unix_seconds()))
        };
        if let Some(last) = last_cycle.filter(is_of) {
            self.observed_seconds += at.since(last).as_secs_f64();
        }
        let at = at.unix_seconds();
        self.last_sampled = Some(at);
        self.limit_bytes = sample.effective_limit_bytes.or(sample.limit_bytes);
        self.usage_peak_bytes = self.usage_peak_bytes.max(usage.peak_usage_bytes);
        self.unreclaimable_peak_bytes = self.unreclaimable_peak_bytes.max(usage.peak_unreclaimable_bytes);
        self.unreclaimable.record(sample.unreclaimable_bytes.map(|bytes| bytes as f64));
        self.shm_peak_bytes = self.shm_peak_bytes.max(sample.shm_used_bytes);
        self.record_roles(usage);
        let run = &usage.run;
        self.host_has_gpu = self.host_has_gpu.max(run.host_has_gpu);
        self.cpu.record(at, run.cpu_seconds);
        self.steps.record_progress(at, run.steps, 0);
        self.samples_of_training.record_progress(at, run.samples, run.ranks_with_samples);
        let held = |figures: &Self| figures.gpus.values().filter(|gpu| gpu.peak_bytes > Some(0)).count();
        let gpus_before = held(self);
        self.record_gpus(last_cycle, usage);
        for ((component, operation), values) in &run.operations {
            self.record_operation(at, component, operation, values);
        }
        let sum = |of: fn(&RunGpuSample) -> Option<f64>| {
            run.gpus.values().filter_map(of).reduce(|one, other| one + other).map(|bytes| bytes as u64)
        };
        self.record_point(TimelinePoint {
            at,
            unreclaimable_bytes: sample.unreclaimable_bytes,
            gpu_bytes: sum(|gpu| gpu.used_bytes),
            torch_reserved_bytes: sum(|gpu| gpu.torch_reserved_bytes),
            torch_allocated_min_bytes: sum(|gpu| gpu.torch_allocated_bytes),
        });
        self.samples == 1 || has_new_settings || held(self) > gpus_before
    }

    /// Records the memory of the host, total and available, in a cycle that sampled this run: what the container does not hold of it,
    /// others do.
    pub fn record_host(&mut self, memory: Option<(u64, u64)>, usage: &ContainerUsage) {
        let Some((total, available)) = memory else { return };
        let Some(own) = usage.sample.and_then(|sample| sample.unreclaimable_bytes) else { return };
        self.host_total_bytes = Some(total);
        let others = total.saturating_sub(available).saturating_sub(own);
        self.host_others_peak_bytes = self.host_others_peak_bytes.max(Some(others));
    }

    /// Returns whether a process of the run reported from inside.
    pub fn has_reports(&self) -> bool {
        self.torch_ooms.is_some() || self.cuda_ooms > 0
    }

    /// Counts CUDA out-of-memory errors that the program reported at once.
    pub fn count_cuda_ooms(&mut self, errors: u64) {
        self.cuda_ooms = self.cuda_ooms.saturating_add(errors);
    }

    /// Takes what was reported in other figures of the same run only: it came after its exit was noticed.
    pub fn with_reports_of(mut self, other: Option<&Self>) -> Self {
        if let Some(other) = other {
            self.take_reports_of(other);
            self.cuda_ooms = self.cuda_ooms.max(other.cuda_ooms);
            self.cuda_ooms_in_log = self.cuda_ooms_in_log.max(other.cuda_ooms_in_log);
        }
        self
    }

    /// Takes the group and the settings of a runtime event, as far as no cycle has seen the run with its name.
    pub fn complete(&mut self, id: &ContainerId, spec: &ContainerSpec) {
        let is_set = spec.group_setting().is_some();
        if self.group.is_empty() || *self.group == *id.short() || (self.samples == 0 && is_set) {
            self.group = spec.group(&spec.identity()).unwrap_or_default();
        }
        for (name, value) in &spec.settings {
            self.settings.entry(Arc::clone(name)).or_insert_with(|| Arc::clone(value));
        }
    }

    /// Counts CUDA out-of-memory errors in the container's log.
    pub fn count_logged_cuda_ooms(&mut self, errors: u64) {
        self.cuda_ooms_in_log = self.cuda_ooms_in_log.saturating_add(errors);
    }

    fn record_roles(&mut self, usage: &ContainerUsage) {
        for role in by_role(&usage.processes) {
            let peak = self.roles.entry(role.role).or_default();
            peak.processes = peak.processes.max(role.processes);
            peak.pss_bytes = peak.pss_bytes.max(role.pss_bytes);
            let each = role.pss_bytes.map(|pss| pss / u64::from(role.processes.max(1)));
            peak.process_pss_bytes = peak.process_pss_bytes.max(each);
        }
        for process in &usage.processes {
            let Some(peak) = self.roles.get_mut(&process.role) else { continue };
            peak.process_rss_bytes = peak.process_rss_bytes.max(process.memory.rss_bytes);
            peak.process_anon_bytes = peak.process_anon_bytes.max(Some(process.memory.anon_bytes));
        }
    }

    fn record_operation(
        &mut self,
        at: f64,
        component: &Arc<str>,
        operation: &Arc<str>,
        values: &OperationSample,
    ) {
        let same =
            |known: &&mut OperationPeak| known.component == *component && known.operation == *operation;
        let bytes = |value: Option<f64>| value.map(|value| value as u64);
        let sampled = OperationPeak {
            component: Arc::clone(component),
            operation: Arc::clone(operation),
            at,
            torch_allocated_bytes: bytes(values.torch_allocated_bytes),
            torch_allocated_peak_bytes: bytes(values.torch_allocated_peak_bytes),
            torch_reserved_bytes: bytes(values.torch_reserved_bytes),
            rss_bytes: bytes(values.rss_bytes),
        };
        let has_room = self.operations.len() < MAX_OPERATIONS;
        match self.operations.iter_mut().find(same) {
            Some(known) => {
                // an operation is in each cycle; its values change with a report
                if known.torch_allocated_bytes != sampled.torch_allocated_bytes
                    || known.rss_bytes < sampled.rss_bytes
                {
                    known.at = at;
                }
                known.torch_allocated_bytes = sampled.torch_allocated_bytes;
                known.torch_allocated_peak_bytes =
                    known.torch_allocated_peak_bytes.max(sampled.torch_allocated_peak_bytes);
                known.torch_reserved_bytes = known.torch_reserved_bytes.max(sampled.torch_reserved_bytes);
                known.rss_bytes = known.rss_bytes.max(sampled.rss_bytes);
            }
            None if has_room => self.operations.push(sampled),
            None => {}
        }
    }

    fn record_point(&mut self, mut point: TimelinePoint) {
        let least = |one: Option<u64>, other: Option<u64>| [one, other].into_iter().flatten().min();
        self.torch_allocated_min_bytes =
            least(self.torch_allocated_min_bytes, point.torch_allocated_min_bytes);
        let interval = self.point_interval.max(POINT_INTERVAL);
        if self.timeline.last().is_some_and(|last| point.at - last.at < interval && point.at >= last.at) {
            return;
        }
        point.torch_allocated_min_bytes = self.torch_allocated_min_bytes.take();
        self.timeline.push(point);
        if self.timeline.len() > MAX_POINTS {
            let all = std::mem::take(&mut self.timeline);
            let before = std::iter::once(None).chain(all.iter().map(|point| point.torch_allocated_min_bytes));
            self.timeline = std::iter::zip(before, &all)
                .step_by(2)
                .map(|(before, point)| TimelinePoint {
                    torch_allocated_min_bytes: least(before, point.torch_allocated_min_bytes),
                    ..*point
                })
                .collect();
            self.point_interval = interval * 2.0;
        }
    }
}

impl GpuFigures {
    fn record(&mut self, sample: &RunGpuSample) {
        let bytes = |value: Option<f64>| value.map(|value| value as u64);
        self.total_bytes = bytes(sample.total_bytes).or(self.total_bytes);
        self.peak_bytes = self.peak_bytes.max(bytes(sample.used_bytes));
        self.last_used = bytes(sample.used_bytes);
        self.used.record(sample.used_bytes);
        self.utilization.record(sample.utilization);
        for value in [sample.torch_allocated_bytes, sample.torch_allocated_peak_bytes] {
            self.torch_allocated_peak_bytes = self.torch_allocated_peak_bytes.max(bytes(value));
        }
        for value in [sample.torch_reserved_bytes, sample.torch_reserved_peak_bytes] {
            self.torch_reserved_peak_bytes = self.torch_reserved_peak_bytes.max(bytes(value));
        }
    }
}

/// One run of a container: what it was started with, what it needed, how it ended. Bytes and seconds; a value that was not measured
/// is absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunRecord {
    /// Id of the run, as the label `run` of `memledger_container_run_info`.
    pub run: Arc<str>,
    /// Runs of one group are comparable.
    pub group: Arc<str>,
    /// The container.
    #[serde(flatten)]
    pub subject: ContainerRef,
    /// Settings by their names in lower case, such as `batch_size`.
    pub settings: BTreeMap<Arc<str>, Arc<str>>,
    /// Unix time of the exit; absent while it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<f64>,
    /// Seconds from start to exit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duration_seconds: Option<f64>,
    /// Why it exited; absent while it runs, and while evidence may still arrive.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_reason: Option<ExitReason>,
    /// Exit code, as reported by the runtime.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i64>,
    /// OOM kills of its processes.
    pub oom_kills: u64,
    /// Number of cycles that sampled its memory.
    pub samples: u64,
    /// Seconds between such cycles that followed one another: less than the duration if memledger did not run all the time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_seconds: Option<f64>,
    /// Unix time of the last of these cycles.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_sampled: Option<f64>,
    /// The limit that an OOM kill hit: of the kill that ended the run, else of the last one. Absent without one, and if the host ran
    /// out of memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oom_limit: Option<HitLimit>,
    /// Lowest limit on the path to the root cgroup, at the last sample.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// Memory of the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_total_bytes: Option<u64>,
    /// The most of it that was in use, or not available, beside this run at a sample.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_others_peak_bytes: Option<u64>,
    /// The host has a GPU, or had one while the run was sampled; absent where that is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_has_gpu: Option<bool>,
    /// Highest usage, page cache included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage_peak_bytes: Option<u64>,
    /// Highest sample of unreclaimable memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unreclaimable_peak_bytes: Option<u64>,
    /// Mean of the samples of unreclaimable memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unreclaimable_mean_bytes: Option<u64>,
    /// Highest sample of its `/dev/shm`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shm_peak_bytes: Option<u64>,
    /// Mean number of CPU cores in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_mean_cores: Option<f64>,
    /// Training steps per second, as the program reports them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps_per_second: Option<f64>,
    /// Training samples per second, as the program reports them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub samples_per_second: Option<f64>,
    /// CUDA out-of-memory errors that PyTorch counted; a program may survive them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub torch_ooms: Option<u64>,
    /// CUDA out-of-memory errors in the container's log, which may be the same ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cuda_ooms_in_log: Option<u64>,
    /// By role of the processes.
    pub roles: BTreeMap<Role, RolePeak>,
    /// By UUID of the GPU.
    pub gpus: BTreeMap<Arc<str>, GpuPeak>,
    /// Operations that the program tracks, as it reports them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub operations: Vec<OperationPeak>,
    /// Memory at the points that the program recorded, oldest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub log: Vec<OperationRecord>,
    /// Least of PyTorch's allocated bytes since the last point of the timeline, all GPUs together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub torch_held_bytes: Option<u64>,
    /// Its memory over time.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub timeline: Vec<TimelinePoint>,
}

/// The GPU memory and use of a run on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuPeak {
    /// Memory of the GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// Highest memory of the container's processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_bytes: Option<u64>,
    /// Memory at the last sample.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<u64>,
    /// Mean of the samples.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean_bytes: Option<u64>,
    /// Mean share of time in which a kernel ran, 0 to 1: of the container if the driver says so, else of the GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utilization_mean: Option<f64>,
    /// Highest allocated bytes of PyTorch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub torch_allocated_peak_bytes: Option<u64>,
    /// Highest reserved bytes of PyTorch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub torch_reserved_peak_bytes: Option<u64>,
}

/// Returns the id of a run: it differs between two runs of a container, also over restarts of memledger.
pub fn run_id(container: &ContainerId, started: Option<f64>) -> Arc<str> {
    let id = container.short();
    match started.and_then(|started| jiff::Timestamp::from_second(started as i64).ok()) {
        Some(start) => format!("{id}-{}", start.strftime("%Y%m%dT%H%M%SZ")).into(),
        None => id.into(),
    }
}

impl RunRecord {
    /// Gives its container another name. A group of a short id is none.
    pub fn rename(&mut self, identity: &Identity) {
        if self.subject.container_id.get(..12) == Some(&*self.group) {
            self.group = Arc::clone(&identity.name);
        }
        self.subject.rename(identity);
    }

    /// Returns the record of a run in progress; `None` if no cycle has seen it.
    pub fn of_running(
        subject: ContainerRef,
        figures: &RunFigures,
        oom_kills: u64,
        oom_limit: Option<HitLimit>,
    ) -> Option<Self> {
        let is_seen = figures.samples > 0;
        is_seen.then(|| Self { oom_kills, oom_limit, ..Self::of_figures(subject, figures) })
    }

    /// Returns the record of a run that ended.
    pub fn of_exit(figures: &RunFigures, exit: &Exit) -> Self {
        Self {
            ended: Some(exit.at),
            duration_seconds: exit.duration_seconds,
            exit_reason: exit.reason,
            exit_code: exit.exit_code,
            oom_kills: exit.oom_kills,
            ..Self::of_figures(exit.subject.clone(), figures)
        }
    }

    fn of_figures(subject: ContainerRef, figures: &RunFigures) -> Self {
        let arguments = figures.unknown_arguments(&figures.settings);
        let figures = figures.clone();
        let name = || Arc::clone(&subject.identity.name);
        Self {
            run: match &*figures.run {
                "" => run_id(&ContainerId::new(&subject.container_id), subject.started),
                _ => figures.run,
            },
            group: if figures.group.is_empty() { name() } else { figures.group },
            // the program knows best what it runs with, and its arguments may repeat a default
            settings: arguments
                .into_iter()
                .chain(figures.settings)
                .chain(figures.reported_settings)
                .collect(),
            samples: figures.samples,
            observed_seconds: (figures.samples > 0).then_some(figures.observed_seconds),
            last_sampled: figures.last_sampled,
            limit_bytes: figures.limit_bytes,
            host_total_bytes: figures.host_total_bytes,
            host_others_peak_bytes: figures.host_others_peak_bytes,
            host_has_gpu: figures.host_has_gpu,
            usage_peak_bytes: figures.usage_peak_bytes,
            unreclaimable_peak_bytes: figures.unreclaimable_peak_bytes,
            unreclaimable_mean_bytes: figures.unreclaimable.value().map(|mean| mean as u64),
            shm_peak_bytes: figures.shm_peak_bytes,
            cpu_mean_cores: figures.cpu.rate(),
            steps_per_second: figures.steps.rate(),
            samples_per_second: figures.samples_of_training.rate(),
            torch_ooms: figures.torch_ooms.max(Some(figures.cuda_ooms).filter(|count| *count > 0)),
            cuda_ooms_in_log: Some(figures.cuda_ooms_in_log).filter(|count| *count > 0),
            roles: figures.roles,
            gpus: figures.gpus.iter().map(|(uuid, gpu)| (Arc::clone(uuid), gpu.peak())).collect(),
            operations: figures.operations,
            log: figures.log.into_records(),
            torch_held_bytes: figures.torch_allocated_min_bytes,
            timeline: figures.timeline,
            subject,
            ..Self::default()
        }
    }

    /// Returns true if it was in progress shortly before this Unix time, as far as was stored.
    pub fn is_fresh(&self, now: f64) -> bool {
        self.ended.is_none() && self.last_sampled.is_some_and(|last| now - last <= FRESH_FOR)
    }

    /// Returns the largest peak of GPU memory on one GPU.
    pub fn gpu_peak_bytes(&self) -> Option<u64> {
        self.gpus.values().filter_map(|gpu| gpu.peak_bytes).max()
    }

    /// Returns the largest peak of PyTorch's allocated bytes on one GPU.
    pub fn torch_allocated_peak_bytes(&self) -> Option<u64> {
        self.gpus.values().filter_map(|gpu| gpu.torch_allocated_peak_bytes).max()
    }
}

impl GpuFigures {
    fn peak(&self) -> GpuPeak {
        GpuPeak {
            total_bytes: self.total_bytes,
            peak_bytes: self.peak_bytes,
            used_bytes: self.last_used,
            mean_bytes: self.used.value().map(|mean| mean as u64),
            utilization_mean: self.utilization.value(),
            torch_allocated_peak_bytes: self.torch_allocated_peak_bytes,
            torch_reserved_peak_bytes: self.torch_reserved_peak_bytes,
        }
    }
}

#[cfg(test)]
mod tests;
