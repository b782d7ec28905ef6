//! What a record is worth for advice: whether its peaks are a measurement, and which settings it has.

use std::collections::BTreeSet;

use super::ram_budget::TrainingSettings;
use super::ram_capacity::RamCapacity;
use crate::events::{ExitReason, Role};
use crate::runs::hit_limit::{HitLimit, LimitPosition};
use crate::runs::setting_names::{self, KnownSetting};
use crate::runs::{GpuPeak, RolePeak, RunRecord, setting_number};
pub use crate::text::human_bytes as human;

/// Share of what there is that a run may plan to use: samples miss the moments between them (decision 31).
pub const PLANNED_SHARE: f64 = 0.95;
/// A GPU that is busy less than this waits for data.
const BUSY_GPU: f64 = 0.8;
/// A worker that uses more of a core than this is busy.
const BUSY_WORKER: f64 = 0.7;
/// A GPU with a larger share of its memory in use has nothing left for an allocation that fails.
const FULL_SHARE: f64 = 0.9;
/// Seconds, and share of the duration, of a run that need not be sampled.
const MAX_UNOBSERVED: f64 = 5.0;
const UNOBSERVED_SHARE: f64 = 0.2;

/// Exit statuses of a program that was asked to end, by SIGHUP, SIGINT, SIGQUIT or SIGTERM: a pod's runtime does not report who did.
const STOP_STATUSES: [i64; 4] = [129, 130, 131, 143];

/// Returns true if a run ended by a CUDA out-of-memory error: its settings need more than its peak.
pub fn has_failed(run: &RunRecord) -> bool {
    run.exit_reason == Some(ExitReason::CudaOom)
}

/// Returns how many CUDA out-of-memory errors a run survived. They say nothing about its settings: cuDNN tries algorithms until one
/// fits, and trainers search a batch size by such errors.
pub fn survived_errors(run: &RunRecord) -> u64 {
    let errors = run.torch_ooms.max(run.cuda_ooms_in_log).unwrap_or(0);
    errors.saturating_sub(u64::from(has_failed(run)))
}

/// Returns true if a run had errors on a GPU that was full: it would have taken more, so its peak is no measurement.
fn was_at_the_limit(run: &RunRecord) -> bool {
    survived_errors(run) > 0 && fullest_gpu(run).is_none_or(|(peak, total)| peak >= FULL_SHARE * total)
}

/// Returns true if a run ended by such an error and none of these runs completed with a larger batch, or later with the same: then others
/// had held the GPU.
pub fn has_lasting_failure<'a>(failed: &RunRecord, mut runs: impl Iterator<Item = &'a RunRecord>) -> bool {
    let batch = |run: &RunRecord| number(run, KnownSetting::Batch);
    let is_proof = |run: &RunRecord| {
        let is_larger = batch(run) > batch(failed);
        let is_later = batch(run) == batch(failed) && failed.ended.is_some() && run.ended > failed.ended;
        run.exit_reason == Some(ExitReason::Completed) && batch(failed).is_some() && (is_larger || is_later)
    };
    has_failed(failed) && !runs.any(is_proof)
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
    /// Of runs that ended by a CUDA out-of-memory error, where no run with a larger batch completed: others may have held the GPU.
    pub out_of_memory: Option<u64>,
    /// Of runs that ended with an error or a signal of which the cause is not known, or is that something of the host was refused, where no
    /// run with as large a batch completed: a larger one may end the same way. Not of programs that report: they report errors of GPU memory.
    pub unexplained: Option<u64>,
}

impl FailedBatches {
    /// Returns those of these runs, which differ only in what a budget varies.
    pub fn of<'a>(runs: impl Iterator<Item = &'a RunRecord> + Clone) -> Self {
        let batch = |run: &RunRecord| number(run, KnownSetting::Batch);
        let is_completed = |run: &&RunRecord| run.exit_reason == Some(ExitReason::Completed);
        let completed = runs.clone().filter(is_completed).filter_map(batch).max();
        let is_unexplained = |run: &&RunRecord| {
            let is_error = |reason| matches!(reason, ExitReason::Error | ExitReason::Signal);
            run.exit_reason.is_some_and(|reason| is_error(reason) || reason.is_of_log())
                && !run.exit_code.is_some_and(|code| STOP_STATUSES.contains(&code))
                && run.torch_ooms.is_none()
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
    is_ram_measurement(run) && !was_at_the_limit(run)
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

/// Settings of which the batch has two.
const OF_BATCH: [KnownSetting; 2] = [KnownSetting::Batch, KnownSetting::Accumulation];

/// Returns true if two runs have the same settings but for the batch size and the workers, as far as memory depends on them, and as many
/// GPUs if both have used them.
pub fn has_same_rest(one: &RunRecord, other: &RunRecord) -> bool {
    let [batch, accumulation] = OF_BATCH;
    has_same_but(one, other, &[batch, accumulation, KnownSetting::Workers])
}

/// Returns true if two runs have the same known settings but for the batch size, as far as memory depends on them, and as many GPUs if both
/// have used them.
pub fn differ_only_in_batch(one: &RunRecord, other: &RunRecord) -> bool {
    has_same_but(one, other, &OF_BATCH)
}

/// Returns true if two runs have the same settings, as far as memory depends on them.
pub fn has_same_settings(one: &RunRecord, other: &RunRecord) -> bool {
    differing(one, other, &[]).is_empty()
}

/// Returns true if two runs differ in this setting alone, as far as memory depends on them.
pub fn differ_only_in(setting: KnownSetting, one: &RunRecord, other: &RunRecord) -> bool {
    differing(one, other, &[setting]).is_empty()
}

/// Returns the settings beside the batch and the workers in which runs differ that GPU memory depends on, each once, by name.
pub fn differing_beside_batch<'a>(
    newest: &RunRecord,
    runs: impl Iterator<Item = &'a RunRecord>,
) -> BTreeSet<String> {
    let [batch, accumulation] = OF_BATCH;
    runs.flat_map(|run| differing(run, newest, &[batch, accumulation, KnownSetting::Workers])).collect()
}

fn has_same_but(one: &RunRecord, other: &RunRecord, varies: &[KnownSetting]) -> bool {
    // one that ended before it used a GPU has none
    let gpus = [one.gpus.len(), other.gpus.len()];
    differing(one, other, varies).is_empty() && (gpus.contains(&0) || gpus[0] == gpus[1])
}

/// Returns the settings that two runs do not share, but for these, as far as memory depends on them.
fn differing(one: &RunRecord, other: &RunRecord, varies: &[KnownSetting]) -> BTreeSet<String> {
    let [one, other] = [one, other].map(|run| setting_names::of_memory(&run.settings));
    let names = one.keys().chain(other.keys()).filter(|name| one.get(*name) != other.get(*name));
    names
        .filter(|name| KnownSetting::of(name).is_none_or(|known| !varies.contains(&known)))
        .cloned()
        .collect()
}

/// Returns the settings that a budget of RAM depends on. Ranks and workers that are no setting are counted: GPUs, and processes.
pub fn settings(run: &RunRecord) -> TrainingSettings {
    settings_with(run, 1)
}

/// Returns the same, where the run may have ended before it used its GPUs: then it has as many `ranks` as others.
pub fn settings_with(run: &RunRecord, ranks: u64) -> TrainingSettings {
    let used = Some(run.gpus.len() as u64).filter(|gpus| *gpus > 0).unwrap_or(ranks);
    let ranks = number(run, KnownSetting::Devices).filter(|ranks| *ranks > 0).unwrap_or(used);
    let workers = number(run, KnownSetting::Workers).unwrap_or_else(|| {
        let workers: u64 = workers(run).map(|role| u64::from(role.processes)).sum();
        workers / ranks
    });
    let batch = number(run, KnownSetting::Batch).unwrap_or(1).max(1);
    let accumulation = number(run, KnownSetting::Accumulation).unwrap_or(1).max(1);
    TrainingSettings { ranks, workers, batch, accumulation }
}

/// Returns the peaks of the workers of each kind that ran.
fn workers(run: &RunRecord) -> impl Iterator<Item = &RolePeak> {
    Role::WORKERS.into_iter().filter_map(|role| run.roles.get(&role)).filter(|role| role.processes > 0)
}

/// Returns the largest measured share of a worker, of the kind of which most ran.
pub fn worker_share(run: &RunRecord) -> Option<u64> {
    workers(run).max_by_key(|role| role.processes)?.process_pss_bytes
}

/// Returns a setting that is a number of reasonable size.
pub fn number(run: &RunRecord, setting: KnownSetting) -> Option<u64> {
    setting_number(setting.find(&run.settings)?.1)
}

/// Returns what to set in the next run, in the words of this one: `BATCH_SIZE=16 ACCUM=4`.
pub fn batch_words(run: &RunRecord, batch: u64, accumulation: u64) -> String {
    let word = |setting: KnownSetting| setting.word(&run.settings);
    format!("{}={batch} {}={accumulation}", word(KnownSetting::Batch), word(KnownSetting::Accumulation))
}

/// Returns the share of time in which the GPUs of a run were busy, if they waited for data: its workers were busy all the time.
pub fn waiting_gpu(run: &RunRecord) -> Option<f64> {
    let shares: Vec<f64> = run.gpus.values().filter_map(|gpu| gpu.utilization_mean).collect();
    let busy = shares.iter().sum::<f64>() / shares.len().max(1) as f64;
    let TrainingSettings { ranks, workers, .. } = settings(run);
    let workers = workers * ranks;
    // each rank itself may keep one core busy
    let of_workers = run.cpu_mean_cores? - ranks as f64;
    let waits = !shares.is_empty() && busy < BUSY_GPU && workers > 0;
    (waits && of_workers >= BUSY_WORKER * workers as f64).then_some(busy)
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
