//! What `memledger advise` says: what the runs of a group needed, which settings would fit, and what to measure next.

use std::sync::Arc;

use serde::Serialize;

use super::ram_budget::{RamModel, TrainingSettings};
use super::vram_fit::{BatchSizes, Measured, VramFit};
use crate::ledger::events::ExitReason;
use crate::ledger::run_record::RunRecord;
use crate::series::human_bytes;

/// Share of a limit that a run may plan to use: samples miss the moments between them.
const PLANNED_SHARE: f64 = 0.9;
/// A GPU that is busy less than this waits for data.
const BUSY_GPU: f64 = 0.8;
/// A worker that uses more of a core than this is busy.
const BUSY_WORKER: f64 = 0.7;
/// Names of settings.
const BATCH: &str = "batch_size";
const ACCUMULATION: &str = "accum";
const WORKERS: &str = "num_workers";
const DEVICES: &str = "num_devices";
const PRECISION: &str = "precision";
const ALLOCATOR: &str = "pytorch_cuda_alloc_conf";
/// Role of the workers.
const WORKER_ROLE: &str = "dataloader_worker";
/// A larger number in a setting is taken for none: a container may set anything.
const MAX_NUMBER: u64 = 65_536;
/// Seconds, and share of the duration, of a run that need not be sampled.
const MAX_UNOBSERVED: f64 = 5.0;
const UNOBSERVED_SHARE: f64 = 0.2;

/// One line of advice.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AdviceLine {
    /// What it is about: `ram`, `vram`, `workers`, `precision`, `allocator`, `minimum`, `gpu`.
    pub topic: &'static str,
    /// False if it is a fault to mend before the next run.
    pub is_ok: bool,
    /// The advice.
    pub text: String,
    /// The runs that it comes from.
    pub runs: Vec<Arc<str>>,
}

/// Advice for a group of runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// The group.
    pub group: Arc<str>,
    /// The run whose settings are taken for the next one: the newest.
    pub run: Arc<str>,
    /// Its settings as they are counted; absent where they are not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<u64>,
    /// Batch sizes for this GPU, if enough was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub maximum_batch_size: Option<u64>,
    /// See `maximum_batch_size`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recommended_batch_size: Option<u64>,
    /// See `maximum_batch_size`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub safe_batch_size: Option<u64>,
    /// The lines, most important first.
    pub lines: Vec<AdviceLine>,
}

/// Returns advice from the runs of one group, oldest first, for the next run after the newest that ended; `None` if none did.
pub fn advise(runs: &[RunRecord]) -> Option<Advice> {
    let newest = runs.iter().rfind(|run| run.ended.is_some())?;
    let (vram, sizes) = vram_lines(newest, runs);
    let mut lines = ram_lines(newest, runs);
    lines.extend(vram);
    lines.extend(worker_line(newest));
    lines.extend(precision_lines(newest, runs));
    lines.extend(allocator_line(newest));
    lines.extend(minimum_line(newest, runs));
    Some(Advice {
        group: Arc::clone(&newest.group),
        run: Arc::clone(&newest.run),
        batch_size: number(newest, BATCH),
        maximum_batch_size: sizes.and_then(|sizes| sizes.maximum),
        recommended_batch_size: sizes.and_then(|sizes| sizes.recommended),
        safe_batch_size: sizes.and_then(|sizes| sizes.safe),
        lines,
    })
}

/// Returns the checklist before the next run: the advice, and who holds the GPUs of the newest run at the Unix time `now`. `running`
/// are the runs in progress on this host.
pub fn check(runs: &[RunRecord], running: &[RunRecord], now: f64) -> Option<Advice> {
    let mut advice = advise(runs)?;
    let newest = runs.iter().find(|run| run.run == advice.run)?;
    let fresh: Vec<&RunRecord> = running.iter().filter(|run| run.is_fresh(now)).collect();
    for (uuid, gpu) in &newest.gpus {
        let holders: Vec<_> = fresh
            .iter()
            .filter_map(|run| Some((run, run.gpus.get(uuid)?.used_bytes.filter(|bytes| *bytes > 0)?)))
            .collect();
        let words: Vec<_> = holders
            .iter()
            .map(|(run, bytes)| {
                let age = now - run.last_sampled.unwrap_or(now);
                let name = &run.subject.name.container_name;
                format!("{name} with {}, {age:.0} s ago", human(*bytes as f64))
            })
            .collect();
        let total = gpu.total_bytes.map_or_else(String::new, |total| format!(" of {}", human(total as f64)));
        let text = match words.as_slice() {
            // whether anything holds it is known only while memledger sees containers
            [] if fresh.is_empty() => continue,
            [] => format!("GPU {uuid}{total}: no container that runs held memory"),
            words => format!("GPU {uuid}{total} is held by {}", words.join("; ")),
        };
        let from = holders.iter().map(|(run, _)| Arc::clone(&run.run)).collect();
        advice.lines.push(AdviceLine { topic: "gpu", is_ok: words.is_empty(), text, runs: from });
    }
    Some(advice)
}

fn ram_lines(newest: &RunRecord, runs: &[RunRecord]) -> Vec<AdviceLine> {
    let one = vec![Arc::clone(&newest.run)];
    let line = |is_ok, text, runs| AdviceLine { topic: "ram", is_ok, text, runs };
    let peak = newest.unreclaimable_peak_bytes.map(|bytes| bytes as f64);
    let sample =
        peak.map_or("no cycle sampled it".to_owned(), |peak| format!("highest sample {}", human(peak)));
    if newest.exit_reason == Some(ExitReason::OomHost) {
        return vec![line(false, format!("it was killed because the host ran out of memory; {sample}"), one)];
    }
    let is_killed = newest.oom_kills > 0 || newest.exit_reason == Some(ExitReason::OomContainer);
    let Some(limit) = newest.limit_bytes.map(|bytes| bytes as f64) else {
        let text = match (is_killed, peak) {
            (true, _) => format!("its processes were killed for their memory; {sample}"),
            (false, Some(peak)) => format!("peak {}; it has no limit", human(peak)),
            (false, None) => return vec![],
        };
        return vec![line(!is_killed, text, one)];
    };
    let mut lines = match (is_killed, peak) {
        (true, _) => {
            let at = match newest.exit_reason {
                Some(ExitReason::OomContainer) => "killed at its limit of",
                // its own limit, or the host
                _ => "a process was killed for its memory; the limit is",
            };
            vec![line(false, format!("{at} {}; {sample}", human(limit)), one)]
        }
        (false, None) => return vec![],
        (false, Some(peak)) => {
            let share = format!("peak {} of {} ({:.0} %)", human(peak), human(limit), 100.0 * peak / limit);
            if peak > PLANNED_SHARE * limit {
                vec![line(false, format!("it came close to its limit: {share}"), one)]
            } else {
                let text = match newest.exit_reason {
                    _ if is_ram_measurement(newest) => format!("{share}: {} to spare", human(limit - peak)),
                    None => format!("{share}; why it ended is not decided yet"),
                    Some(ExitReason::Completed) => {
                        format!("{share} while it was sampled, which was not all the time")
                    }
                    Some(_) => format!("{share} until it ended: it may need more to complete"),
                };
                return vec![line(true, text, one)];
            }
        }
    };
    let Some(model) = ram_model(newest, runs) else {
        let text = "which settings would fit is not measured: let a run with a smaller batch size complete, and another one with \
                    other workers, in this group";
        lines.push(line(false, text.to_owned(), vec![]));
        return lines;
    };
    let wanted = settings(newest);
    if model.budget.needs(&wanted) <= PLANNED_SHARE * limit {
        let what = if is_killed { "the kill" } else { "its peak" };
        let text =
            format!("the runs that completed do not explain {what}: raise the limit, or see `memledger why`");
        lines.push(line(false, text, model.from));
        return lines;
    }
    // what was killed at such a limit before is no proposal, whatever the model says
    let is_killed_here = |run: &&RunRecord| {
        run.oom_kills > 0
            && run.exit_reason != Some(ExitReason::OomHost)
            && run.limit_bytes.is_some_and(|bytes| bytes as f64 >= limit)
            && has_same_rest(run, newest)
    };
    let killed: Vec<TrainingSettings> = runs.iter().filter(is_killed_here).map(settings).collect();
    let fitting = model.budget.fitting(&wanted, PLANNED_SHARE * limit, &killed);
    for fits in &fitting {
        let mut changes = Vec::new();
        if fits.workers != wanted.workers {
            changes.push(format!("NUM_WORKERS={}", fits.workers));
        }
        if fits.batch != wanted.batch {
            changes.push(format!("BATCH_SIZE={} ACCUM={}", fits.batch, fits.accumulation));
        }
        let needs = human(model.budget.needs(fits));
        let text = format!("{} needs about {needs} of {}", changes.join(" "), human(limit));
        lines.push(line(false, text, model.from.clone()));
    }
    if fitting.is_empty() {
        let measured = match (model.budget.per_worker > 0.0, model.budget.per_sample > 0.0) {
            (true, true) => "no smaller batch or number of workers fits",
            (true, false) => {
                "no smaller number of workers fits; what a sample takes is not measured: run another batch size"
            }
            _ => "no smaller batch fits; what a worker takes is not measured",
        };
        let needs = human(model.budget.needs(&wanted) / PLANNED_SHARE);
        lines.push(line(
            false,
            format!("{measured}. These settings need a limit of about {needs}"),
            model.from,
        ));
    }
    lines
}

/// A budget, and the runs that it was measured from.
struct MeasuredBudget {
    budget: RamModel,
    from: Vec<Arc<str>>,
}

/// Returns what settings need, from the completed runs of a group whose known settings differ from those of `newest` in the batch alone. A sample: the slope of
/// their peaks. A worker: what its end would free at least, from the newest of them: its proportional share, but no more than what is
/// left beside the largest process, which may be what they share. The rest: that run, too. `None` if neither is measured.
fn ram_model(newest: &RunRecord, runs: &[RunRecord]) -> Option<MeasuredBudget> {
    let mut alike: Vec<&RunRecord> =
        runs.iter().filter(|run| differ_only_in_batch(run, newest) && is_ram_measurement(run)).collect();
    alike.retain(|run| run.unreclaimable_peak_bytes.is_some());
    let reference = *alike.last()?;
    let peak = reference.unreclaimable_peak_bytes? as f64;
    let used = settings(reference);
    // where it is no setting, the number of workers is what was seen
    alike.retain(|run| settings(run).workers == used.workers);
    let points: Vec<(f64, f64)> = alike
        .iter()
        .filter_map(|run| Some((number(run, BATCH)? as f64, run.unreclaimable_peak_bytes? as f64)))
        .collect();
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
    (fixed >= 0.0).then_some(MeasuredBudget { budget: RamModel { fixed, ..variable }, from })
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

fn vram_lines(newest: &RunRecord, runs: &[RunRecord]) -> (Vec<AdviceLine>, Option<BatchSizes>) {
    let Some((peak, total)) = fullest_gpu(newest) else { return (vec![], None) };
    let one = vec![Arc::clone(&newest.run)];
    let line = |is_ok, text, runs| AdviceLine { topic: "vram", is_ok, text, runs };
    let share = 100.0 * peak / total;
    let text = format!("peak {} of {} ({share:.0} %)", human(peak), human(total));
    let mut lines = vec![line(!has_failed(newest) && share <= 95.0, text, one)];
    let Some(batch) = number(newest, BATCH) else { return (lines, None) };
    let alike: Vec<&RunRecord> = runs
        .iter()
        .filter(|run| {
            differ_only_in_batch(run, newest) && fullest_gpu(run).is_some_and(|(_, other)| other == total)
        })
        .collect();
    // PyTorch's own peak if all runs have it: the driver's includes its cache
    let has_torch = alike.iter().all(|run| run.torch_allocated_peak_bytes().is_some());
    let peak_of =
        |run: &RunRecord| if has_torch { run.torch_allocated_peak_bytes() } else { run.gpu_peak_bytes() };
    let measured = Measured {
        peaks: alike
            .iter()
            .filter(|run| is_measurement(run))
            .filter_map(|run| Some((number(run, BATCH)?, peak_of(run)? as f64)))
            .collect(),
        failed: alike.iter().filter(|run| has_failed(run)).filter_map(|run| number(run, BATCH)).collect(),
        total,
    };
    let is_used = |run: &&&RunRecord| is_measurement(run) || has_failed(run);
    let from: Vec<_> = alike.iter().filter(is_used).map(|run| Arc::clone(&run.run)).collect();
    let Some(fit) = measured.fit() else {
        let next: Vec<_> = measured.next_sizes().iter().map(u64::to_string).collect();
        if !next.is_empty() {
            let text = format!(
                "the largest batch is not known yet: {} sizes were measured, run also {}",
                measured.sizes().len(),
                next.join(", ")
            );
            lines.push(line(true, text, from));
        }
        return (lines, None);
    };
    let sizes = fit.batch_sizes();
    lines.push(line(
        sizes.maximum.is_some_and(|maximum| batch <= maximum),
        fit_text(&fit, sizes),
        from.clone(),
    ));
    if let Some(maximum) = sizes.maximum.filter(|maximum| *maximum < batch) {
        let effective = batch * number(newest, ACCUMULATION).unwrap_or(1);
        let is_whole_part = |size: &u64| effective.is_multiple_of(*size);
        // a batch of less than half would only cost speed
        let text = match (maximum / 2 + 1..=maximum).rev().find(is_whole_part) {
            Some(size) => format!(
                "BATCH_SIZE={size} ACCUM={} keeps the effective batch of {effective}",
                effective / size
            ),
            None => {
                let steps = effective.div_ceil(maximum);
                format!(
                    "BATCH_SIZE={maximum} ACCUM={steps}: an effective batch of {} instead of {effective}",
                    maximum * steps
                )
            }
        };
        lines.push(line(false, text, from));
    }
    (lines, Some(sizes))
}

fn fit_text(fit: &VramFit, sizes: BatchSizes) -> String {
    let size = |size: Option<u64>| size.map_or("none".to_owned(), |size| size.to_string());
    format!(
        "batch size: at most {}, recommended {}, safe {}; {} and {} for each sample",
        size(sizes.maximum),
        size(sizes.recommended),
        size(sizes.safe),
        human(fit.base.max(0.0)),
        human(fit.per_sample)
    )
}

/// Returns a line if the GPU waited while the workers were busy. One more worker needs at most the share of those there are.
fn worker_line(newest: &RunRecord) -> Option<AdviceLine> {
    if !is_measurement(newest) {
        return None;
    }
    let shares: Vec<f64> = newest.gpus.values().filter_map(|gpu| gpu.utilization_mean).collect();
    let busy = shares.iter().sum::<f64>() / shares.len().max(1) as f64;
    let wanted = settings(newest);
    let (workers, cores) = (wanted.workers * wanted.ranks, newest.cpu_mean_cores?);
    // each rank itself may keep one core busy
    let of_workers = cores - wanted.ranks as f64;
    if shares.is_empty() || busy >= BUSY_GPU || workers == 0 || of_workers < BUSY_WORKER * workers as f64 {
        return None;
    }
    let share = newest.roles.get(WORKER_ROLE)?.process_pss_bytes?;
    let needs = (newest.unreclaimable_peak_bytes? + share * wanted.ranks) as f64;
    let limit = newest.limit_bytes.map_or(f64::INFINITY, |limit| PLANNED_SHARE * limit as f64);
    let waits = format!(
        "the GPU was busy {:.0} % of the time, and {workers} workers and their trainer used {cores:.1} cores",
        100.0 * busy
    );
    let text = if needs <= limit {
        format!("{waits}: try NUM_WORKERS={}, which needs at most {}", wanted.workers + 1, human(needs))
    } else {
        format!("{waits}: more workers may help, but one more may need {}", human(needs))
    };
    Some(AdviceLine { topic: "workers", is_ok: true, text, runs: vec![Arc::clone(&newest.run)] })
}

/// Returns what another precision saved, from runs that differ in it alone.
fn precision_lines(newest: &RunRecord, runs: &[RunRecord]) -> Vec<AdviceLine> {
    let without = |run: &RunRecord| {
        let mut settings = run.settings.clone();
        settings.remove(PRECISION);
        settings
    };
    let measured = |run: &RunRecord| fullest_gpu(run).filter(|(peak, _)| *peak > 0.0 && is_measurement(run));
    let Some((precision, (peak, total))) = newest.settings.get(PRECISION).zip(measured(newest)) else {
        return vec![];
    };
    let mut lines = Vec::new();
    let mut seen = vec![Arc::clone(precision)];
    for run in runs.iter().rev().filter(|run| without(run) == without(newest)) {
        let Some((other, (bytes, of))) = run.settings.get(PRECISION).zip(measured(run)) else { continue };
        if of != total || seen.contains(other) {
            continue;
        }
        seen.push(Arc::clone(other));
        let change = 100.0 * (peak / bytes - 1.0);
        let text = format!(
            "{precision} needed {} of GPU memory where {other} needed {} ({change:+.0} %)",
            human(peak),
            human(bytes)
        );
        let runs = vec![Arc::clone(&newest.run), Arc::clone(&run.run)];
        lines.push(AdviceLine { topic: "precision", is_ok: true, text, runs });
    }
    lines
}

/// Returns a line if PyTorch's cache took a GPU that was nearly full.
fn allocator_line(newest: &RunRecord) -> Option<AdviceLine> {
    let is_set =
        newest.settings.get(ALLOCATOR).is_some_and(|value| value.contains("expandable_segments:True"));
    let wasted = newest.gpus.values().filter_map(|gpu| {
        let (allocated, reserved) = (gpu.torch_allocated_peak_bytes?, gpu.torch_reserved_peak_bytes?);
        let (cache, total) = (reserved.saturating_sub(allocated) as f64, gpu.total_bytes? as f64);
        (cache > 0.2 * total && reserved as f64 > 0.8 * total).then_some(cache)
    });
    let most = wasted.fold(0.0, f64::max);
    (most > 0.0 && !is_set).then(|| AdviceLine {
        topic: "allocator",
        is_ok: false,
        text: format!(
            "PyTorch's cache took {} beside the tensors: try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            human(most)
        ),
        runs: vec![Arc::clone(&newest.run)],
    })
}

/// Returns the memory that the newest completed run with these settings needed; `None` if a later one failed for its memory.
fn minimum_line(newest: &RunRecord, runs: &[RunRecord]) -> Option<AdviceLine> {
    let mut alike = runs.iter().rev().filter(|run| run.settings == newest.settings);
    let run = alike.find(|run| is_measurement(run) || run.oom_kills > 0 || has_failed(run))?;
    if !is_measurement(run) {
        return None;
    }
    let plan = |bytes: f64| human(bytes / PLANNED_SHARE);
    let ram = run.unreclaimable_peak_bytes.map(|bytes| format!("{} of RAM", plan(bytes as f64)));
    let vram = fullest_gpu(run).map(|(peak, _)| format!("a GPU of {}", plan(peak)));
    let words: Vec<_> = [ram, vram].into_iter().flatten().collect();
    (!words.is_empty()).then(|| AdviceLine {
        topic: "minimum",
        is_ok: true,
        text: format!(
            "these settings fit into {}: the measured peak and a tenth to spare",
            words.join(" and ")
        ),
        runs: vec![Arc::clone(&run.run)],
    })
}

/// Returns true if a run had CUDA out-of-memory errors, also if it survived them, as far as PyTorch reported them: its settings need
/// more than its peak.
fn has_failed(run: &RunRecord) -> bool {
    run.torch_ooms.is_some_and(|ooms| ooms > 0)
}

/// Returns true if the peaks of a run are what its settings need, of RAM and of GPU memory.
fn is_measurement(run: &RunRecord) -> bool {
    is_ram_measurement(run) && !has_failed(run)
}

/// Returns true if the peak of a run's RAM is what its settings need: it completed, nothing was killed for its memory, and it was sampled
/// for most of its time.
fn is_ram_measurement(run: &RunRecord) -> bool {
    run.exit_reason == Some(ExitReason::Completed)
        && run.oom_kills == 0
        && run.duration_seconds.is_some_and(|lasted| {
            // the begin of a short run, but not all of it
            let most = MAX_UNOBSERVED.max(UNOBSERVED_SHARE * lasted).min(lasted / 2.0);
            lasted - run.observed_seconds.unwrap_or(0.0) <= most
        })
}

/// Returns true if two runs have the same settings but for the batch size and the workers, and as many GPUs.
fn has_same_rest(one: &RunRecord, other: &RunRecord) -> bool {
    let varies = |name: &str| [BATCH, ACCUMULATION, WORKERS].contains(&name);
    has_same_but(one, other, varies)
}

/// Returns true if two runs have the same known settings but for the batch size, and as many GPUs.
fn differ_only_in_batch(one: &RunRecord, other: &RunRecord) -> bool {
    has_same_but(one, other, |name| [BATCH, ACCUMULATION].contains(&name))
}

fn has_same_but(one: &RunRecord, other: &RunRecord, varies: impl Fn(&str) -> bool) -> bool {
    let rest = |run: &RunRecord| {
        let mut settings = run.settings.clone();
        settings.retain(|name, _| !varies(name));
        settings
    };
    rest(one) == rest(other) && one.gpus.len() == other.gpus.len()
}

fn settings(run: &RunRecord) -> TrainingSettings {
    let ranks = number(run, DEVICES).filter(|ranks| *ranks > 0).unwrap_or(run.gpus.len().max(1) as u64);
    let workers = number(run, WORKERS).unwrap_or_else(|| {
        let workers = run.roles.get(WORKER_ROLE).map_or(0, |role| role.processes);
        u64::from(workers) / ranks
    });
    let batch = number(run, BATCH).unwrap_or(1).max(1);
    TrainingSettings { ranks, workers, batch, accumulation: number(run, ACCUMULATION).unwrap_or(1).max(1) }
}

/// Returns a setting that is a number of reasonable size.
fn number(run: &RunRecord, name: &str) -> Option<u64> {
    run.settings.get(name)?.trim().parse().ok().filter(|number| *number <= MAX_NUMBER)
}

/// Returns peak and memory of the GPU that was the fullest.
fn fullest_gpu(run: &RunRecord) -> Option<(f64, f64)> {
    let gpus = run.gpus.values().filter_map(|gpu| Some((gpu.peak_bytes? as f64, gpu.total_bytes? as f64)));
    gpus.max_by(|one, other| (one.0 / one.1).total_cmp(&(other.0 / other.1)))
}

fn human(bytes: f64) -> String {
    human_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::run_record::{GpuPeak, RolePeak};

    const MIB: u64 = 1 << 20;

    fn run(id: &str, settings: &[(&str, &str)], ram: u64, vram: Option<u64>) -> RunRecord {
        let gpu = vram.map(|vram| GpuPeak {
            total_bytes: Some(12_000_000_000),
            peak_bytes: Some(vram * MIB),
            ..GpuPeak::default()
        });
        RunRecord {
            run: id.into(),
            group: "vision".into(),
            settings: settings.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect(),
            ended: Some(1.0),
            exit_reason: Some(ExitReason::Completed),
            samples: 10,
            duration_seconds: Some(100.0),
            observed_seconds: Some(99.0),
            limit_bytes: Some(1000 * MIB),
            unreclaimable_peak_bytes: Some(ram * MIB),
            gpus: gpu.into_iter().map(|gpu| ("GPU-a".into(), gpu)).collect(),
            ..RunRecord::default()
        }
    }

    fn texts(advice: &Advice, topic: &str) -> Vec<String> {
        advice.lines.iter().filter(|line| line.topic == topic).map(|line| line.text.clone()).collect()
    }

    fn worker(processes: u32, resident: u64, share: u64) -> (Arc<str>, RolePeak) {
        let peak = RolePeak {
            processes,
            process_rss_bytes: resident * MIB,
            process_pss_bytes: Some(share * MIB),
            ..RolePeak::default()
        };
        (WORKER_ROLE.into(), peak)
    }

    fn killed(mut run: RunRecord) -> RunRecord {
        (run.exit_reason, run.oom_kills) = (Some(ExitReason::OomContainer), 1);
        run
    }

    #[test]
    fn killed_run_gets_settings_that_fit_from_what_was_measured() {
        let with = |batch: &str, ram| run(batch, &[("batch_size", batch), ("num_workers", "4")], ram, None);
        let dead = killed(with("64", 990));
        let advice = advise(&[with("16", 600), with("32", 760), dead.clone()]).unwrap();
        let lines = texts(&advice, "ram");
        assert_eq!(lines[0], "killed at its limit of 1000.0 MiB; highest sample 990.0 MiB");
        assert_eq!(lines[1..], ["BATCH_SIZE=32 ACCUM=2 needs about 760.0 MiB of 1000.0 MiB"]);
        assert_eq!(advice.lines[1].runs.iter().map(|run| &**run).collect::<Vec<_>>(), ["16", "32"]);
        // what was killed before is no proposal
        let lines =
            texts(&advise(&[with("8", 520), with("16", 600), killed(with("32", 700)), dead]).unwrap(), "ram");
        assert_eq!(lines[1..], ["BATCH_SIZE=16 ACCUM=4 needs about 600.0 MiB of 1000.0 MiB"]);
    }

    #[test]
    fn worker_frees_no_more_than_what_is_not_shared() {
        let settings = [("batch_size", "8"), ("num_workers", "4")];
        let mut private = run("a", &settings, 880, None);
        private
            .roles
            .insert("trainer".into(), RolePeak { process_rss_bytes: 400 * MIB, ..RolePeak::default() });
        private.roles.extend([worker(4, 150, 130)]);
        let close = run("b", &settings, 950, None);
        let lines = |runs: &[RunRecord]| texts(&advise(runs).unwrap(), "ram");
        let all = lines(&[private.clone(), killed(close.clone())]);
        assert_eq!(
            all[1],
            "the runs that completed do not explain the kill: raise the limit, or see `memledger why`"
        );
        private.unreclaimable_peak_bytes = Some(960 * MIB);
        assert_eq!(lines(&[private.clone()])[1], "NUM_WORKERS=3 needs about 830.0 MiB of 1000.0 MiB");
        // all of it is the trainer's, and the workers share it
        private
            .roles
            .insert("trainer".into(), RolePeak { process_rss_bytes: 960 * MIB, ..RolePeak::default() });
        assert!(lines(&[private])[1].starts_with("which settings would fit is not measured"));
    }

    #[test]
    fn nothing_measured_has_no_number() {
        let lines = texts(&advise(&[killed(run("a", &[("batch_size", "64")], 990, None))]).unwrap(), "ram");
        assert!(lines[1].starts_with("which settings would fit is not measured"), "{lines:?}");
        let mut unseen = killed(run("a", &[], 0, None));
        unseen.unreclaimable_peak_bytes = None;
        assert_eq!(
            texts(&advise(&[unseen]).unwrap(), "ram")[0],
            "killed at its limit of 1000.0 MiB; no cycle sampled it"
        );
        let mut running = run("a", &[], 100, None);
        (running.ended, running.exit_reason) = (None, None);
        assert_eq!((advise(&[]), advise(&[running])), (None, None));
    }

    #[test]
    fn killed_child_and_host_are_no_good_runs() {
        let mut child = run("a", &[], 150, None);
        (child.exit_reason, child.oom_kills) = (Some(ExitReason::Error), 1);
        let mut host = run("b", &[], 150, None);
        (host.exit_reason, host.oom_kills) = (Some(ExitReason::OomHost), 1);
        for (run, text) in
            [(child, "a process was killed for its memory"), (host, "it was killed because the host ran out")]
        {
            let advice = advise(&[run]).unwrap();
            assert!(!advice.lines[0].is_ok && advice.lines[0].text.starts_with(text), "{advice:?}");
            assert!(texts(&advice, "minimum").is_empty());
        }
    }

    #[test]
    fn memory_to_spare_is_only_that_of_a_completed_run() {
        let sampled = "peak 300.0 MiB of 1000.0 MiB (30 %)";
        for (reason, text) in [
            (Some(ExitReason::Completed), format!("{sampled}: 700.0 MiB to spare")),
            (Some(ExitReason::Error), format!("{sampled} until it ended: it may need more to complete")),
            (None, format!("{sampled}; why it ended is not decided yet")),
        ] {
            let newest = RunRecord { exit_reason: reason, ..run("a", &[], 300, None) };
            let line = advise(&[newest]).unwrap().lines[0].clone();
            assert_eq!((line.is_ok, line.text), (true, text));
        }
        let mut newest = run("a", &[], 300, None);
        newest.observed_seconds = Some(70.0);
        let text = advise(&[newest]).unwrap().lines[0].text.clone();
        assert_eq!(text, format!("{sampled} while it was sampled, which was not all the time"));
    }

    #[test]
    fn settings_that_were_killed_after_they_completed_have_no_minimum() {
        let settings = [("batch_size", "8"), ("num_workers", "2")];
        let completed = run("a", &settings, 880, Some(4000));
        assert_eq!(texts(&advise(std::slice::from_ref(&completed)).unwrap(), "minimum").len(), 1);
        let mut newest = killed(run("b", &settings, 600, Some(4000)));
        newest.gpus.values_mut().for_each(|gpu| gpu.utilization_mean = Some(0.2));
        newest.cpu_mean_cores = Some(2.9);
        newest.roles.extend([worker(2, 120, 100)]);
        let mut failed = run("c", &settings, 600, Some(4000));
        failed.torch_ooms = Some(1);
        for newest in [newest, failed] {
            let advice = advise(&[completed.clone(), newest]).unwrap();
            assert!(
                texts(&advice, "minimum").is_empty() && texts(&advice, "workers").is_empty(),
                "{advice:?}"
            );
        }
    }

    #[test]
    fn kill_at_a_lower_limit_excludes_no_proposal() {
        let with = |batch: &str, ram| run(batch, &[("batch_size", batch)], ram, None);
        let mut earlier = killed(with("16", 200));
        earlier.limit_bytes = Some(256 * MIB);
        let mut runs = vec![earlier, with("16", 600), with("32", 760), killed(with("64", 990))];
        let proposed = "BATCH_SIZE=32 ACCUM=2 needs about 760.0 MiB of 1000.0 MiB";
        assert_eq!(texts(&advise(&runs).unwrap(), "ram")[1], proposed);
        let mut leak = with("32", 950);
        leak.exit_reason = Some(ExitReason::Stopped);
        runs.push(leak);
        let lines = texts(&advise(&runs).unwrap(), "ram");
        assert!(lines[1].starts_with("the runs that completed do not explain its peak"), "{lines:?}");
    }

    #[test]
    fn settings_of_any_size_take_no_time() {
        let huge = u32::MAX.to_string();
        for value in [huge.as_str(), "65536", "-1", "1e9", ""] {
            let settings = [(BATCH, value), (ACCUMULATION, value), (WORKERS, value), (DEVICES, value)];
            let mut runs = vec![run("a", &settings, 960, None)];
            runs[0].roles.extend([worker(4, 10, 10)]);
            assert!(advise(&runs).is_some());
        }
    }

    #[test]
    fn run_that_was_hardly_seen_or_failed_is_no_measurement() {
        let whole = run("a", &[], 500, None);
        assert!(is_measurement(&whole));
        let changes: [&dyn Fn(&mut RunRecord); 6] = [
            &|run| run.exit_reason = Some(ExitReason::Error),
            &|run| run.torch_ooms = Some(1),
            &|run| run.oom_kills = 1,
            &|run| run.observed_seconds = Some(10.0),
            &|run| (run.duration_seconds, run.observed_seconds) = (Some(4.0), Some(0.0)), // one sample
            &|run| (run.ended, run.exit_reason) = (None, None),
        ];
        for change in changes {
            let mut run = whole.clone();
            change(&mut run);
            assert!(!is_measurement(&run), "{run:?}");
        }
    }

    #[test]
    fn batch_that_died_is_replaced_by_a_smaller_one_and_accumulation() {
        let sizes = [(16, 1126), (32, 1434), (64, 2048), (128, 3277)];
        let mut runs: Vec<_> = sizes
            .iter()
            .map(|(batch, vram)| {
                run(&batch.to_string(), &[("batch_size", &batch.to_string())], 500, Some(*vram))
            })
            .collect();
        let mut died = run("256", &[("batch_size", "256")], 500, Some(11_000));
        (died.exit_reason, died.torch_ooms) = (Some(ExitReason::Error), Some(1));
        runs.push(died);
        let advice = advise(&runs).unwrap();
        assert_eq!((advice.maximum_batch_size, advice.batch_size), (Some(128), Some(256)));
        let lines = texts(&advice, "vram");
        assert_eq!(lines[2], "BATCH_SIZE=128 ACCUM=2 keeps the effective batch of 256");
        let mut with = |batch: &str| {
            runs.last_mut().unwrap().settings = [("batch_size".into(), batch.into())].into();
            texts(&advise(&runs).unwrap(), "vram")[2].clone()
        };
        assert_eq!(with("192"), "BATCH_SIZE=96 ACCUM=2 keeps the effective batch of 192");
        assert_eq!(with("211"), "BATCH_SIZE=128 ACCUM=2: an effective batch of 256 instead of 211");
        with("256");
        runs.remove(0);
        let lines = texts(&advise(&runs).unwrap(), "vram");
        assert_eq!(lines[1], "the largest batch is not known yet: 3 sizes were measured, run also 16");
    }

    #[test]
    fn idle_gpu_and_busy_workers_get_another_worker_if_memory_allows() {
        let mut newest = run("a", &[("num_workers", "2"), ("batch_size", "8")], 500, Some(4000));
        newest.gpus.values_mut().for_each(|gpu| gpu.utilization_mean = Some(0.4));
        newest.cpu_mean_cores = Some(2.9);
        newest.roles.extend([worker(2, 120, 100)]);
        let lines = |newest: &RunRecord| texts(&advise(std::slice::from_ref(newest)).unwrap(), "workers");
        let waits = "the GPU was busy 40 % of the time, and 2 workers and their trainer used 2.9 cores";
        assert_eq!(lines(&newest), [format!("{waits}: try NUM_WORKERS=3, which needs at most 600.0 MiB")]);
        newest.unreclaimable_peak_bytes = Some(850 * MIB);
        assert_eq!(
            lines(&newest),
            [format!("{waits}: more workers may help, but one more may need 950.0 MiB")]
        );
        newest.cpu_mean_cores = Some(1.2);
        assert_eq!(lines(&newest), <[String; 0]>::default(), "the workers wait themselves");
    }

    #[test]
    fn precision_and_minimum_come_from_runs_that_are_alike() {
        let whole = run("a", &[("batch_size", "8"), ("precision", "32")], 500, Some(8000));
        let other = run("b", &[("batch_size", "16"), ("precision", "bf16-mixed")], 500, Some(1));
        let half = run("c", &[("batch_size", "8"), ("precision", "16-mixed")], 450, Some(5000));
        let advice = advise(&[whole, other, half]).unwrap();
        assert_eq!(
            texts(&advice, "precision"),
            ["16-mixed needed 4.9 GiB of GPU memory where 32 needed 7.8 GiB (-38 %)"]
        );
        let minimum = texts(&advice, "minimum");
        assert!(minimum[0].contains("500.0 MiB of RAM and a GPU of 5.4 GiB"), "{minimum:?}");
    }

    #[test]
    fn check_names_who_holds_the_gpu_while_that_is_known() {
        let newest = run("a", &[("batch_size", "8")], 500, Some(4000));
        let mut other = run("b", &[], 100, Some(3000));
        (other.ended, other.last_sampled) = (None, Some(95.0));
        other.subject.name.container_name = "neighbour".into();
        other.gpus.values_mut().for_each(|gpu| gpu.used_bytes = Some(1024 * MIB));
        let lines = |running: &[RunRecord], now: f64| {
            texts(&check(std::slice::from_ref(&newest), running, now).unwrap(), "gpu")
        };
        let held = "GPU GPU-a of 11.2 GiB is held by neighbour with 1.0 GiB, 5 s ago";
        assert_eq!(lines(std::slice::from_ref(&other), 100.0), [held]);
        assert!(lines(std::slice::from_ref(&other), 1000.0).is_empty(), "memledger does not run");
        other.gpus.clear();
        assert_eq!(lines(&[other], 100.0), ["GPU GPU-a of 11.2 GiB: no container that runs held memory"]);
    }
}
