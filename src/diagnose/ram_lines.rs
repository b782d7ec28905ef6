//! Advice about RAM: how near the newest run came to its limit, and which settings would fit.

use std::sync::Arc;

use super::advice::AdviceLine;
use super::measurement::{
    BATCH, PLANNED_SHARE, WORKER_ROLE, differ_only_in_batch, has_same_rest, human, is_ram_measurement,
    number, settings, settings_with, was_killed_within,
};
use super::ram_budget::{RamModel, TrainingSettings};
use crate::ledger::events::ExitReason;
use crate::ledger::run_record::RunRecord;

fn line(is_ok: bool, text: String, runs: Vec<Arc<str>>) -> AdviceLine {
    AdviceLine { topic: "ram", is_ok, text, runs }
}

/// Returns true if a process of the run was killed because memory was exhausted.
fn was_killed(run: &RunRecord) -> bool {
    run.oom_kills > 0 || run.exit_reason == Some(ExitReason::OomContainer)
}

/// Returns the advice for the next run after `newest`.
pub fn ram_lines(newest: &RunRecord, runs: &[RunRecord]) -> Vec<AdviceLine> {
    let limit = newest.limit_bytes.map(|bytes| bytes as f64);
    let mut lines: Vec<_> = result_line(newest, limit).into_iter().collect();
    if let Some(limit) = limit.filter(|_| newest.exit_reason != Some(ExitReason::OomHost))
        && lines.iter().any(|line| !line.is_ok)
    {
        lines.extend(proposal_lines(newest, limit, runs));
    }
    lines
}

/// Returns how near the run came to its limit, or how it was killed; `None` if nothing is known.
fn result_line(newest: &RunRecord, limit: Option<f64>) -> Option<AdviceLine> {
    let peak = newest.unreclaimable_peak_bytes.map(|bytes| bytes as f64);
    let sample =
        peak.map_or("no cycle sampled it".to_owned(), |peak| format!("highest sample {}", human(peak)));
    let at_limit = |limit: f64| format!("{}; {sample}", human(limit));
    let (is_ok, text) = match (newest.exit_reason, limit, peak) {
        (Some(ExitReason::OomHost), ..) => {
            (false, format!("it was killed because the host ran out of memory; {sample}"))
        }
        (_, None, _) if was_killed(newest) => {
            (false, format!("its processes were killed for their memory; {sample}"))
        }
        (Some(ExitReason::OomContainer), Some(limit), _) => {
            (false, format!("killed at its limit of {}", at_limit(limit)))
        }
        // at its own limit, or by the host
        (_, Some(limit), _) if was_killed(newest) => {
            (false, format!("a process was killed for its memory; the limit is {}", at_limit(limit)))
        }
        (_, _, None) => return None,
        (_, None, Some(peak)) => (true, format!("peak {}; it has no limit", human(peak))),
        (reason, Some(limit), Some(peak)) => {
            let share = format!("peak {} of {} ({:.0} %)", human(peak), human(limit), 100.0 * peak / limit);
            match reason {
                _ if peak > PLANNED_SHARE * limit => (false, format!("it came close to its limit: {share}")),
                _ if is_ram_measurement(newest) => {
                    (true, format!("{share}: {} to spare", human(limit - peak)))
                }
                None => (true, format!("{share}; why it ended is not decided yet")),
                Some(ExitReason::Completed) => {
                    (true, format!("{share} while it was sampled, which was not all the time"))
                }
                Some(_) => (true, format!("{share} until it ended: it may need more to complete")),
            }
        }
    };
    Some(line(is_ok, text, vec![Arc::clone(&newest.run)]))
}

/// Returns the settings that were killed with at least this limit: they are no proposal, whatever is measured.
pub fn killed_settings(
    newest: &RunRecord,
    limit: f64,
    runs: &[RunRecord],
    ranks: u64,
) -> Vec<TrainingSettings> {
    let is_killed_here = |run: &&RunRecord| was_killed_within(run, limit) && has_same_rest(run, newest);
    runs.iter().filter(is_killed_here).map(|run| settings_with(run, ranks)).collect()
}

/// Returns which settings would fit into the limit of the run, as far as that is measured.
fn proposal_lines(newest: &RunRecord, limit: f64, runs: &[RunRecord]) -> Vec<AdviceLine> {
    let budget = ram_model(newest, runs).map(|budget| (settings_with(newest, budget.used.ranks), budget));
    // a part that differs and is not measured has no number
    let is_measured = |(wanted, budget): &(TrainingSettings, RamBudget)| {
        let (used, model) = (&budget.used, &budget.model);
        (wanted.workers == used.workers || model.per_worker > 0.0)
            && (wanted.batch == used.batch || model.per_sample > 0.0)
    };
    let Some((wanted, RamBudget { model, from, used, largest_batch })) = budget.filter(is_measured) else {
        let text = "it is not known which settings fit: run this group with a smaller batch size, and with another number of \
                    workers, until they complete";
        return vec![line(false, text.to_owned(), vec![])];
    };
    let available = PLANNED_SHARE * limit;
    if model.needs(&wanted) <= available {
        let what = if was_killed(newest) { "was killed" } else { "came close to its limit" };
        let text = format!(
            "by the runs that completed, these settings need about {}: it is not known why this one {what}. Raise the limit, or see \
             `memledger why`",
            human(model.needs(&wanted))
        );
        return vec![line(false, text, from)];
    }
    let mut excluded = killed_settings(newest, limit, runs, used.ranks);
    excluded.extend(largest_batch.map(|largest| TrainingSettings {
        workers: 0,
        batch: largest.saturating_mul(MAX_EXTRAPOLATION).saturating_add(1),
        ..wanted
    }));
    let fitting = model.fitting(&wanted, available, &excluded);
    if fitting.is_empty() {
        let measured = match (model.per_worker > 0.0, model.per_sample > 0.0) {
            (true, true) => "no smaller batch or number of workers fits",
            (true, false) => {
                "no smaller number of workers fits; what a sample takes is not measured: run another batch size"
            }
            _ => "no smaller batch fits; what a worker takes is not measured",
        };
        let needs = human(model.needs(&wanted) / PLANNED_SHARE);
        return vec![line(false, format!("{measured}. These settings need a limit of about {needs}"), from)];
    }
    let proposal = |fits: &TrainingSettings| {
        let mut changes = Vec::new();
        if fits.workers != wanted.workers {
            changes.push(format!("NUM_WORKERS={}", fits.workers));
        }
        if fits.batch != wanted.batch {
            changes.push(format!("BATCH_SIZE={} ACCUM={}", fits.batch, fits.accumulation));
        }
        let needs = human(model.needs(fits));
        line(false, format!("{} needs about {needs} of {}", changes.join(" "), human(limit)), from.clone())
    };
    fitting.iter().map(proposal).collect()
}

/// What settings need, and the runs that it was measured from.
struct RamBudget {
    model: RamModel,
    from: Vec<Arc<str>>,
    /// The settings of the newest of them.
    used: TrainingSettings,
    /// The largest batch of these runs, where it is known.
    largest_batch: Option<u64>,
}

/// No batch beyond this many times the largest that completed is proposed.
const MAX_EXTRAPOLATION: u64 = 2;

/// Returns what settings need, measured with the completed runs whose known settings differ from those of `newest` in the batch alone; if
/// there is none, in the batch and the workers.
///
/// * A sample takes the slope of the peaks of these runs.
/// * A worker takes its proportional share (PSS) in the newest of these runs, but no more than what that run held beside its largest
///   process: the workers may share the memory of that one.
/// * The rest of that run's peak is fixed.
///
/// `None` if neither a sample nor a worker is measured.
fn ram_model(newest: &RunRecord, runs: &[RunRecord]) -> Option<RamBudget> {
    let mut alike: Vec<&RunRecord> =
        runs.iter().filter(|run| has_same_rest(run, newest) && is_ram_measurement(run)).collect();
    alike.retain(|run| run.unreclaimable_peak_bytes.is_some());
    let of_as_many = alike.iter().rev().find(|run| differ_only_in_batch(run, newest));
    let reference = *of_as_many.or(alike.last())?;
    let peak = reference.unreclaimable_peak_bytes? as f64;
    let used = settings(reference);
    // where it is no setting, the number of workers is what was seen
    alike.retain(|run| settings(run).workers == used.workers);
    let points: Vec<(f64, f64)> = alike
        .iter()
        .filter_map(|run| Some((number(run, BATCH)? as f64, run.unreclaimable_peak_bytes? as f64)))
        .collect();
    let largest_batch = alike.iter().filter_map(|run| number(run, BATCH)).max();
    let sample = slope(&points).filter(|slope| *slope > 0.0).map(|slope| slope / used.ranks as f64);
    let workers = (used.workers * used.ranks) as f64;
    let share = reference.roles.get(WORKER_ROLE).and_then(|role| role.process_pss_bytes);
    let largest = reference.roles.values().map(|role| role.process_rss_bytes).max().unwrap_or(0) as f64;
    let worker = share.filter(|_| workers > 0.0).map(|share| (share as f64).min((peak - largest) / workers));
    let worker = worker.filter(|bytes| *bytes > 0.0);
    if sample.is_none() && worker.is_none() {
        return None;
    }
    let variable = RamModel {
        per_worker: worker.unwrap_or(0.0),
        per_sample: sample.unwrap_or(0.0),
        ..RamModel::default()
    };
    let fixed = peak - variable.needs(&used);
    let from = if sample.is_some() { alike } else { vec![reference] };
    let from = from.iter().map(|run| Arc::clone(&run.run)).collect();
    // parts that are more than the whole do not add up: nothing is known then
    (fixed >= 0.0).then_some(RamBudget { model: RamModel { fixed, ..variable }, from, used, largest_batch })
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
