//! Advice about RAM: how near the newest run came to what there is, and which settings would fit.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::lines::AdviceLine;
use super::measurement::{
    FailedBatches, PLANNED_SHARE, batch_words, differ_only_in_batch, has_same_gpu, has_same_rest, human,
    is_ram_measurement, number, settings, settings_with, was_killed, was_killed_within, worker_share,
};
use super::ram_budget::{RamBudgetParts, RamModel, TrainingSettings};
use super::ram_capacity::RamCapacity;
use crate::events::{ExitReason, Role};
use crate::runs::hit_limit::LimitPosition;
use crate::runs::setting_names::KnownSetting;
use crate::runs::{RolePeak, RunRecord};

/// No batch beyond this many times the largest that completed is proposed.
const MAX_EXTRAPOLATION: u64 = 2;

fn line(is_ok: bool, text: String, runs: Vec<Arc<str>>) -> AdviceLine {
    AdviceLine { topic: "ram", is_ok, text, runs }
}

/// The RAM that the settings of a run need, against what there is.
pub struct RamPlan {
    capacity: RamCapacity,
    budget: Option<RamBudget>,
}

/// What settings need, and the runs that it was measured from.
struct RamBudget {
    model: RamModel,
    from: Vec<Arc<str>>,
    /// The settings of the newest of them.
    used: TrainingSettings,
    /// Those of the run that advice is for.
    wanted: TrainingSettings,
    /// The largest batch of these runs, where it is known.
    largest_batch: Option<u64>,
    /// Highest use of `/dev/shm`.
    shm: f64,
}

impl RamPlan {
    /// Returns the plan for the next run after `newest`; `None` if nothing is known of what there is.
    pub fn new(newest: &RunRecord, runs: &[RunRecord]) -> Option<Self> {
        // a run that ended before it was sampled leaves the figures of the host to an earlier one
        let capacity = RamCapacity::of(newest).or_else(|| runs.iter().rev().find_map(RamCapacity::of))?;
        Some(Self { capacity, budget: ram_budget(newest, runs).filter(RamBudget::is_measured) })
    }

    /// Returns the largest batch with which the other settings fit; `None` if what a sample takes is not measured.
    pub fn largest_batch(&self) -> Option<u64> {
        let RamBudget { model, wanted, .. } = self.budget.as_ref()?;
        let rest = self.capacity.planned() - model.needs(&TrainingSettings { batch: 0, ..*wanted });
        (model.per_sample > 0.0).then(|| (rest / (model.per_sample * wanted.ranks as f64)).max(0.0) as u64)
    }

    /// Returns the parts of what the settings of the newest run need.
    pub fn parts(&self) -> Option<RamBudgetParts> {
        let RamBudget { model, wanted, shm, .. } = self.budget.as_ref()?;
        Some(RamBudgetParts::new(model, wanted, *shm, self.capacity.others(), self.capacity.total()))
    }
}

impl RamBudget {
    /// A part that differs and is not measured has no number.
    fn is_measured(&self) -> bool {
        let (wanted, used, model) = (&self.wanted, &self.used, &self.model);
        (wanted.workers == used.workers || model.per_worker > 0.0)
            && (wanted.batch == used.batch || model.per_sample > 0.0)
    }
}

/// Returns the advice for the next run after `newest`. No batch above `largest_for_gpu` is proposed.
pub fn ram_lines(
    newest: &RunRecord,
    runs: &[RunRecord],
    plan: Option<&RamPlan>,
    largest_for_gpu: Option<u64>,
) -> Vec<AdviceLine> {
    let mut lines: Vec<_> = result_line(newest).into_iter().collect();
    if let Some(plan) = plan {
        let from = || plan.budget.as_ref().map_or_else(Vec::new, |budget| budget.from.clone());
        lines.extend(plan.parts().map(|parts| line(true, parts.text(), from())));
    }
    let is_foreign = newest
        .oom_limit
        .is_some_and(|hit| matches!(hit.position, LimitPosition::Above | LimitPosition::Inside));
    if !is_foreign
        && lines.iter().any(|line| !line.is_ok)
        && let Some(plan) = plan
    {
        lines.extend(proposal_lines(newest, plan, runs, largest_for_gpu));
    }
    lines
}

/// Returns how near the run came to what there was, or how it was killed; `None` if nothing is known.
fn result_line(newest: &RunRecord) -> Option<AdviceLine> {
    let peak = newest.unreclaimable_peak_bytes.map(|bytes| bytes as f64);
    let (is_ok, text) = match (killed_text(newest), peak) {
        (Some(text), Some(peak)) => (false, format!("{text}; highest sample {}", human(peak))),
        (Some(text), None) => (false, format!("{text}; no cycle sampled it")),
        (None, None) => return None,
        (None, Some(peak)) => peak_text(newest, peak),
    };
    Some(line(is_ok, text, vec![Arc::clone(&newest.run)]))
}

/// Returns which memory was exhausted when a process of the run was killed; `None` if none was.
fn killed_text(newest: &RunRecord) -> Option<String> {
    if !was_killed(newest) {
        return None;
    }
    if newest.exit_reason == Some(ExitReason::OomHost) {
        let room = RamCapacity::of_host(newest).map(|room| format!(": it had {}", room.text()));
        return Some(format!("it was killed because the host ran out of memory{}", room.unwrap_or_default()));
    }
    let is_whole = newest.exit_reason == Some(ExitReason::OomContainer);
    let who = if is_whole { "killed" } else { "a process was killed" };
    let hit = newest.oom_limit.and_then(|hit| hit.bytes);
    let of = hit.map_or_else(String::new, |bytes| format!(" of {}", human(bytes as f64)));
    Some(match (newest.oom_limit.map(|hit| hit.position), hit.or(newest.limit_bytes)) {
        (Some(LimitPosition::Above), _) => {
            format!(
                "{who} at a limit{of} above the container, which others may have used up: see `memledger why`"
            )
        }
        (Some(LimitPosition::Inside), _) => format!("{who} at a limit{of} inside the container"),
        (_, Some(limit)) if is_whole => format!("killed at its limit of {}", human(limit as f64)),
        (Some(LimitPosition::Own), Some(limit)) => {
            format!("a process was killed at the container's limit of {}", human(limit as f64))
        }
        (_, Some(limit)) => {
            format!("a process was killed for its memory; the limit is {}", human(limit as f64))
        }
        (_, None) => "its processes were killed for their memory".to_owned(),
    })
}

/// Returns how much of what there was the run held, and whether that is well.
fn peak_text(newest: &RunRecord, peak: f64) -> (bool, String) {
    let Some(capacity) = RamCapacity::of(newest) else {
        return (true, format!("peak {}; it has no limit", human(peak)));
    };
    let share =
        format!("peak {} of {} ({:.0} %)", human(peak), capacity.text(), 100.0 * peak / capacity.bytes);
    let text = match newest.exit_reason {
        _ if peak > capacity.planned() => {
            let bound = if capacity.host_total.is_some() { "the memory of the host" } else { "its limit" };
            return (false, format!("it came close to {bound}: {share}"));
        }
        _ if is_ram_measurement(newest) => format!("{share}: {} to spare", human(capacity.bytes - peak)),
        None => format!("{share}; why it ended is not decided yet"),
        Some(ExitReason::Completed) => {
            format!("{share} while it was sampled, which was not all the time")
        }
        Some(_) => format!("{share} until it ended: it may need more to complete"),
    };
    (true, text)
}

/// Returns the settings that were killed with at least so many bytes: they are no proposal, whatever is measured.
pub fn killed_settings(
    newest: &RunRecord,
    bytes: f64,
    runs: &[RunRecord],
    ranks: u64,
) -> Vec<TrainingSettings> {
    let is_killed_here = |run: &&RunRecord| was_killed_within(run, bytes) && has_same_rest(run, newest);
    runs.iter().filter(is_killed_here).map(|run| settings_with(run, ranks)).collect()
}

/// Returns settings that are no proposal: those that were killed, and batches that failed, that are beyond what was measured, or that do
/// not fit into the GPU.
fn excluded_settings(
    newest: &RunRecord,
    capacity: &RamCapacity,
    budget: &RamBudget,
    runs: &[RunRecord],
    largest_for_gpu: Option<u64>,
) -> Vec<TrainingSettings> {
    let mut excluded = killed_settings(newest, capacity.bytes, runs, budget.used.ranks);
    let alike = runs.iter().filter(|run| has_same_rest(run, newest) && has_same_gpu(run, newest));
    let beyond = budget.largest_batch.map(|largest| largest.saturating_mul(MAX_EXTRAPOLATION));
    let first_excluded = [
        beyond.map(|batch| batch.saturating_add(1)),
        largest_for_gpu.map(|batch| batch.saturating_add(1)),
        FailedBatches::of(alike).smallest(),
    ];
    let from_batch = |batch| TrainingSettings { workers: 0, batch, ..budget.wanted };
    excluded.extend(first_excluded.into_iter().flatten().map(from_batch));
    excluded
}

/// Returns which settings would fit, as far as that is measured.
fn proposal_lines(
    newest: &RunRecord,
    plan: &RamPlan,
    runs: &[RunRecord],
    largest_for_gpu: Option<u64>,
) -> Vec<AdviceLine> {
    let Some(budget) = &plan.budget else {
        if let Some(line) = completed_line(newest, plan, runs, largest_for_gpu) {
            return vec![line];
        }
        let until = if was_killed(newest) { ", until they complete" } else { "" };
        let text = format!(
            "it is not known which settings fit: run this group with a smaller batch size, and with another number of workers{until}"
        );
        return vec![line(false, text, vec![])];
    };
    let RamBudget { model, from, wanted, .. } = budget;
    let capacity = &plan.capacity;
    if model.needs(wanted) <= capacity.planned() {
        let what = if was_killed(newest) { "was killed" } else { "came close to its limit" };
        let more = if capacity.host_total.is_some() { "Free memory of the host" } else { "Raise the limit" };
        let text = format!(
            "by the runs that completed, these settings need about {}: it is not known why this one {what}. {more}, or see \
             `memledger why`",
            human(model.needs(wanted))
        );
        return vec![line(false, text, from.clone())];
    }
    let excluded = excluded_settings(newest, capacity, budget, runs, largest_for_gpu);
    let fitting = model.fitting(wanted, capacity.planned(), &excluded);
    if fitting.is_empty() {
        return vec![line(false, none_fits_text(budget, capacity), from.clone())];
    }
    let proposal = |fits: &TrainingSettings| {
        let mut changes = Vec::new();
        if fits.workers != wanted.workers {
            changes.push(format!("{}={}", KnownSetting::Workers.word(&newest.settings), fits.workers));
        }
        if fits.batch != wanted.batch {
            changes.push(batch_words(newest, fits.batch, fits.accumulation));
        }
        let needs = human(model.needs(fits));
        line(false, format!("{} needs about {needs} of {}", changes.join(" "), capacity.text()), from.clone())
    };
    fitting.iter().map(proposal).collect()
}

/// Returns the settings with the largest effective use of one step that completed in what there is; `None` if none did. They keep the
/// effective batch of the newest run, where it is a multiple.
fn completed_line(
    newest: &RunRecord,
    plan: &RamPlan,
    runs: &[RunRecord],
    largest_for_gpu: Option<u64>,
) -> Option<AdviceLine> {
    let batch = number(newest, KnownSetting::Batch)?;
    let has_fit = |run: &&RunRecord| {
        let peak = run.unreclaimable_peak_bytes.map(|bytes| bytes as f64);
        let is_smaller = number(run, KnownSetting::Batch)
            .is_some_and(|other| other <= batch && largest_for_gpu.is_none_or(|largest| other <= largest));
        is_smaller && peak.is_some_and(|peak| peak <= plan.capacity.planned())
    };
    let alike = runs.iter().filter(|run| has_same_rest(run, newest) && is_ram_measurement(run));
    let run =
        alike.filter(has_fit).max_by_key(|run| (number(run, KnownSetting::Batch), settings(run).workers))?;
    let (wanted, used) = (settings_with(newest, settings(run).ranks), settings(run));
    let mut words = Vec::new();
    if used.workers != wanted.workers {
        words.push(format!("{}={}", KnownSetting::Workers.word(&newest.settings), used.workers));
    }
    let samples = wanted.batch * wanted.accumulation;
    if used.batch != wanted.batch {
        words.push(batch_words(newest, used.batch, samples.div_ceil(used.batch)));
    }
    if words.is_empty() {
        return None;
    }
    let peak = human(run.unreclaimable_peak_bytes? as f64);
    let text = format!(
        "it is not known which settings fit best; {} completed with a peak of {peak} of {}. Run two batch sizes with one number of workers to \
         know more",
        words.join(" "),
        plan.capacity.text()
    );
    Some(line(false, text, vec![Arc::clone(&run.run)]))
}

fn none_fits_text(budget: &RamBudget, capacity: &RamCapacity) -> String {
    let RamBudget { model, wanted, .. } = budget;
    let measured = match (model.per_worker > 0.0, model.per_sample > 0.0) {
        (true, true) => "no smaller batch or number of workers fits",
        (true, false) => {
            "no smaller number of workers fits; what a sample takes is not measured: run another batch size"
        }
        _ => "no smaller batch fits; what a worker takes is not measured",
    };
    let needs = model.needs(wanted) / PLANNED_SHARE;
    match capacity.host_total {
        None => format!("{measured}. These settings need a limit of about {}", human(needs)),
        Some(_) => {
            let host = human(needs + capacity.others());
            format!("{measured}. These settings need a host of about {host}, if others hold as much")
        }
    }
}

/// Returns what settings need, measured with the completed runs whose known settings differ from those of `newest` in the batch alone; if
/// there is none, in the batch and the workers.
///
/// * A sample takes the slope of the peaks of these runs.
/// * A worker takes its proportional share (PSS) in the newest of these runs, but no more than what that run held beside the
///   anonymous memory of its largest process: the workers may share it.
/// * A rank takes the proportional share of its first process without the samples, but no more than is left of the peak.
/// * The rest of that run's peak is fixed: `/dev/shm`, the kernel's own memory, and other processes.
///
/// `None` if neither a sample nor a worker is measured.
fn ram_budget(newest: &RunRecord, runs: &[RunRecord]) -> Option<RamBudget> {
    let mut alike: Vec<&RunRecord> =
        runs.iter().filter(|run| has_same_rest(run, newest) && is_ram_measurement(run)).collect();
    alike.retain(|run| run.unreclaimable_peak_bytes.is_some());
    let with_equal_workers = alike.iter().rev().find(|run| differ_only_in_batch(run, newest));
    let reference = *with_equal_workers.or_else(|| best_measured(&alike))?;
    let peak = reference.unreclaimable_peak_bytes? as f64;
    let used = settings(reference);
    // where it is no setting, the number of workers is what was seen
    alike.retain(|run| settings(run).workers == used.workers);
    let points: Vec<(f64, f64)> = alike
        .iter()
        .filter_map(|run| {
            Some((number(run, KnownSetting::Batch)? as f64, run.unreclaimable_peak_bytes? as f64))
        })
        .collect();
    let largest_batch = alike.iter().filter_map(|run| number(run, KnownSetting::Batch)).max();
    let sample = slope(&points).filter(|slope| *slope > 0.0).map(|slope| slope / used.ranks as f64);
    let worker = worker_bytes(reference, peak, &used);
    if sample.is_none() && worker.is_none() {
        return None;
    }
    let mut model = RamModel {
        per_worker: worker.unwrap_or(0.0),
        per_sample: sample.unwrap_or(0.0),
        ..RamModel::default()
    };
    // parts that are more than the whole do not add up: nothing is known then
    let rest = Some(peak - model.needs(&used)).filter(|rest| *rest >= 0.0)?;
    let trainer = reference.roles.get(&Role::Trainer);
    // a share has pages of files, which are not in the peak
    let own = |role: &RolePeak| {
        let share = role.process_pss_bytes.unwrap_or(role.process_rss_bytes);
        role.process_anon_bytes.map_or(share, |anon| anon.min(share))
    };
    let trainer = trainer.map(|role| own(role) as f64);
    let of_rank = trainer.unwrap_or(0.0) - model.per_sample * used.batch as f64;
    model.per_rank = of_rank.clamp(0.0, rest / used.ranks as f64);
    model.fixed = (rest - model.per_rank * used.ranks as f64).max(0.0);
    let from = if sample.is_some() { alike } else { vec![reference] };
    let from = from.iter().map(|run| Arc::clone(&run.run)).collect();
    let shm = reference.shm_peak_bytes.map_or(0.0, |bytes| bytes as f64).min(model.fixed);
    Some(RamBudget { model, from, used, wanted: settings_with(newest, used.ranks), largest_batch, shm })
}

/// Returns the newest of those runs with one number of workers that have the most batch sizes: two show what a sample takes.
fn best_measured<'a, 'b>(alike: &'b [&'a RunRecord]) -> Option<&'b &'a RunRecord> {
    let sizes = |of: &RunRecord| {
        let workers = settings(of).workers;
        let equal = alike.iter().filter(|run| settings(run).workers == workers);
        let sizes: BTreeSet<u64> = equal.filter_map(|run| number(run, KnownSetting::Batch)).collect();
        sizes.len().min(2)
    };
    // of equal ones the last, which is the newest
    alike.iter().max_by_key(|run| sizes(run))
}

/// Returns what a worker of a run takes, if that is measured.
fn worker_bytes(run: &RunRecord, peak: f64, used: &TrainingSettings) -> Option<f64> {
    let workers = (used.workers * used.ranks) as f64;
    let share = worker_share(run);
    // pages of files are in the resident memory, and not in the peak; a worker may be the largest process of all
    let others = run.roles.iter().filter(|(role, _)| !Role::WORKERS.contains(role));
    let anonymous = others.map(|(_, role)| role.process_anon_bytes.unwrap_or(role.process_rss_bytes));
    let largest = anonymous.max().unwrap_or(0) as f64;
    let worker = share.filter(|_| workers > 0.0).map(|share| (share as f64).min((peak - largest) / workers));
    worker.filter(|bytes| *bytes > 0.0)
}

/// Returns the slope of the line through points with at least two different places.
fn slope(points: &[(f64, f64)]) -> Option<f64> {
    let count = points.len() as f64;
    let (mean_x, mean_y) = (
        points.iter().map(|(x, _)| x).sum::<f64>() / count,
        points.iter().map(|(_, y)| y).sum::<f64>() / count,
    );
    let spread: f64 = points.iter().map(|(x, _)| (x - mean_x).powi(2)).sum();
    (spread > 0.0).then(|| points.iter().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum::<f64>() / spread)
}

#[cfg(test)]
mod tests;
