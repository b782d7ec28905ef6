//! What a record is worth for advice: whether its peaks are a measurement, and which settings it has.

use super::ram_budget::TrainingSettings;
use super::ram_capacity::RamCapacity;
use crate::events::ExitReason;
use crate::runs::hit_limit::{HitLimit, LimitPosition};
use crate::runs::{GpuPeak, RunRecord, setting_number};
pub use crate::series::human_bytes as human;

/// Share of what there is that a run may plan to use: samples miss the moments between them (decision 31).
pub const PLANNED_SHARE: f64 = 0.95;
/// Names of settings.
pub const BATCH: &str = "batch_size";
pub const ACCUMULATION: &str = "accum";
pub const WORKERS: &str = "num_workers";
pub const DEVICES: &str = "num_devices";
pub const PRECISION: &str = "precision";
/// Role of the workers, and of the first process of each rank.
pub const WORKER_ROLE: &str = "dataloader_worker";
pub const TRAINER_ROLE: &str = "trainer";
/// Seconds, and share of the duration, of a run that need not be sampled.
const MAX_UNOBSERVED: f64 = 5.0;
const UNOBSERVED_SHARE: f64 = 0.2;

/// Exit statuses of a program that was asked to end, by SIGHUP, SIGINT, SIGQUIT or SIGTERM: a pod's runtime does not report who did.
const STOP_STATUSES: [i64; 4] = [129, 130, 131, 143];

/// Returns true if a run had CUDA out-of-memory errors, also if it survived them, as far as PyTorch or its log reported them: its
/// settings need more than its peak.
pub fn has_failed(run: &RunRecord) -> bool {
    let has = |ooms: Option<u64>| ooms.is_some_and(|ooms| ooms > 0);
    has(run.torch_ooms) || has(run.cuda_ooms_in_log) || run.exit_reason == Some(ExitReason::CudaOom)
}

/// Returns true if a run had such errors and no later one of these runs completed with a larger batch: then others had held the GPU.
pub fn has_lasting_failure<'a>(failed: &RunRecord, mut runs: impl Iterator<Item = &'a RunRecord>) -> bool {
    let is_more = |run: &RunRecord| {
        let is_completed = run.exit_reason == Some(ExitReason::Completed) && !has_failed(run);
        is_completed
            && failed.ended.is_some()
            && run.ended > failed.ended
            && number(run, BATCH) > number(failed, BATCH)
    };
    has_failed(failed) && !runs.any(is_more)
}

/// Returns true if a process of the run was killed because memory was exhausted.
pub fn was_killed(run: &RunRecord) -> bool {
    run.oom_kills > 0 || matches!(run.exit_reason, Some(ExitReason::OomContainer | ExitReason::OomHost))
}

/// Returns true if a process of a run was killed because memory was exhausted, although the run had at least so many bytes: of a limit
/// of its own, or of what others left of the host. A limit above the container says nothing about these settings: others may have used
/// it up.
pub fn was_killed_within(run: &RunRecord, bytes: f64) -> bool {
    let is_as_much = |limit: Option<u64>| limit.is_some_and(|limit| limit as f64 >= bytes);
    if run.exit_reason == Some(ExitReason::OomHost) {
        return RamCapacity::of_host(run).is_some_and(|capacity| capacity.bytes >= bytes);
    }
    if run.oom_kills == 0 && run.exit_reason != Some(ExitReason::OomContainer) {
        return false;
    }
    match run.oom_limit {
        Some(HitLimit { position: LimitPosition::Above, .. }) => false,
        Some(HitLimit { position: LimitPosition::Own | LimitPosition::Inside, bytes: Some(limit) }) => {
            is_as_much(Some(limit))
        }
        _ => is_as_much(run.limit_bytes),
    }
}

/// The smallest batches of runs that did not complete for a reason that a larger batch shares.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FailedBatches {
    /// Of runs with CUDA out-of-memory errors, where no later run with a larger batch completed: others may have held the GPU.
    pub out_of_memory: Option<u64>,
    /// Of runs that ended with an error or a signal of which the cause is not known, where no run with as large a batch completed: it may
    /// have been such an error.
    pub unexplained: Option<u64>,
}

impl FailedBatches {
    /// Returns those of these runs, which differ only in what a budget varies.
    pub fn of<'a>(runs: impl Iterator<Item = &'a RunRecord> + Clone) -> Self {
        let batch = |run: &RunRecord| number(run, BATCH);
        let is_completed =
            |run: &&RunRecord| run.exit_reason == Some(ExitReason::Completed) && !has_failed(run);
        let completed = runs.clone().filter(is_completed).filter_map(batch).max();
        let is_unexplained = |run: &&RunRecord| {
            matches!(run.exit_reason, Some(ExitReason::Error | ExitReason::Signal))
                && !run.exit_code.is_some_and(|code| STOP_STATUSES.contains(&code))
                && !has_failed(run)
                && run.oom_kills == 0
        };
        let unexplained = runs.clone().filter(is_unexplained).filter_map(batch);
        Self {
            out_of_memory: runs
                .clone()
                .filter(|run| has_lasting_failure(run, runs.clone()))
                .filter_map(batch)
                .min(),
            unexplained: unexplained.filter(|batch| Some(*batch) > completed).min(),
        }
    }

    /// Returns the smallest of both.
    pub fn smallest(&self) -> Option<u64> {
        self.out_of_memory.into_iter().chain(self.unexplained).min()
    }
}

/// Returns true if both runs used GPUs of the same memory, as far as is known.
pub fn has_same_gpu(one: &RunRecord, other: &RunRecord) -> bool {
    let totals = [one, other].map(|run| run.gpus.values().filter_map(|gpu| gpu.total_bytes).max());
    totals.contains(&None) || totals[0] == totals[1]
}

/// Returns true if the peaks of a run are what its settings need, of RAM and of GPU memory.
pub fn is_measurement(run: &RunRecord) -> bool {
    is_ram_measurement(run) && !has_failed(run)
}

/// Returns true if the peak of a run's RAM is what its settings need: it completed, nothing was killed for its memory, and it was sampled
/// for most of its time.
pub fn is_ram_measurement(run: &RunRecord) -> bool {
    run.exit_reason == Some(ExitReason::Completed)
        && run.oom_kills == 0
        && run.duration_seconds.is_some_and(|lasted| {
            // the begin of a short run, but not all of it
            let most = MAX_UNOBSERVED.max(UNOBSERVED_SHARE * lasted).min(lasted / 2.0);
            lasted - run.observed_seconds.unwrap_or(0.0) <= most
        })
}

/// Returns true if two runs have the same settings but for the batch size and the workers, and as many GPUs if both have used them.
pub fn has_same_rest(one: &RunRecord, other: &RunRecord) -> bool {
    let varies = |name: &str| [BATCH, ACCUMULATION, WORKERS].contains(&name);
    has_same_but(one, other, varies)
}

/// Returns true if two runs have the same known settings but for the batch size, and as many GPUs if both have used them.
pub fn differ_only_in_batch(one: &RunRecord, other: &RunRecord) -> bool {
    has_same_but(one, other, |name| [BATCH, ACCUMULATION].contains(&name))
}

fn has_same_but(one: &RunRecord, other: &RunRecord, varies: impl Fn(&str) -> bool) -> bool {
    let rest = |run: &RunRecord| {
        let mut settings = run.settings.clone();
        settings.retain(|name, _| !varies(name));
        settings
    };
    // one that ended before it used a GPU has none
    let gpus = [one.gpus.len(), other.gpus.len()];
    rest(one) == rest(other) && (gpus.contains(&0) || gpus[0] == gpus[1])
}

/// Returns the settings that a budget of RAM depends on. Ranks and workers that are no setting are counted: GPUs, and processes.
pub fn settings(run: &RunRecord) -> TrainingSettings {
    settings_with(run, 1)
}

/// Returns the same, where the run may have ended before it used its GPUs: then it has as many `ranks` as others.
pub fn settings_with(run: &RunRecord, ranks: u64) -> TrainingSettings {
    let used = Some(run.gpus.len() as u64).filter(|gpus| *gpus > 0).unwrap_or(ranks);
    let ranks = number(run, DEVICES).filter(|ranks| *ranks > 0).unwrap_or(used);
    let workers = number(run, WORKERS).unwrap_or_else(|| {
        let workers = run.roles.get(WORKER_ROLE).map_or(0, |role| role.processes);
        u64::from(workers) / ranks
    });
    let batch = number(run, BATCH).unwrap_or(1).max(1);
    TrainingSettings { ranks, workers, batch, accumulation: number(run, ACCUMULATION).unwrap_or(1).max(1) }
}

/// Returns a setting that is a number of reasonable size.
pub fn number(run: &RunRecord, name: &str) -> Option<u64> {
    setting_number(run.settings.get(name)?)
}

/// Returns the most memory that a run held on one GPU: by the driver, else what PyTorch had reserved.
pub fn gpu_need(run: &RunRecord) -> Option<u64> {
    run.gpus.values().filter_map(gpu_peak).max()
}

fn gpu_peak(gpu: &GpuPeak) -> Option<u64> {
    gpu.peak_bytes.or(gpu.torch_reserved_peak_bytes)
}

/// Returns peak and memory of the GPU that was the fullest.
pub fn fullest_gpu(run: &RunRecord) -> Option<(f64, f64)> {
    let gpus = run.gpus.values().filter_map(|gpu| Some((gpu_peak(gpu)? as f64, gpu.total_bytes? as f64)));
    gpus.max_by(|one, other| (one.0 / one.1).total_cmp(&(other.0 / other.1)))
}
