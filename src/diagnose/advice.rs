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
/// TrainingSettings of the batch, and the unknown batch sizes of a program that has none.
const BATCH: &str = "batch_size";
const ACCUMULATION: &str = "accum";
const WORKERS: &str = "num_workers";
const DEVICES: &str = "num_devices";
const PRECISION: &str = "precision";
const ALLOCATOR: &str = "pytorch_cuda_alloc_conf";

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

/// Returns advice from the runs of one group, oldest first; `None` if there are none.
pub fn advise(runs: &[RunRecord]) -> Option<Advice> {
    let newest = runs.last()?;
    let (vram, sizes) = vram_lines(newest, runs);
    let mut lines = ram_lines(newest, runs);
    lines.extend(vram);
    lines.extend(worker_line(newest, runs));
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

/// Returns the checklist before the next run: the advice, and who else holds the GPUs of the newest run. `running` are the runs in
/// progress on this host.
pub fn check(runs: &[RunRecord], running: &[RunRecord]) -> Option<Advice> {
    let mut advice = advise(runs)?;
    let newest = runs.last()?;
    for (uuid, gpu) in &newest.gpus {
        let others = running.iter().filter(|run| run.subject.container_id != newest.subject.container_id);
        let holders: Vec<_> = others
            .filter_map(|run| Some((run, run.gpus.get(uuid)?.mean_bytes.filter(|bytes| *bytes > 0)?)))
            .collect();
        let words: Vec<_> = holders
            .iter()
            .map(|(run, bytes)| {
                format!("{} with {} on average", run.subject.name.container_name, human(*bytes as f64))
            })
            .collect();
        let total = gpu.total_bytes.map_or_else(String::new, |total| format!(" of {}", human(total as f64)));
        let text = match words.as_slice() {
            [] => format!("GPU {uuid}{total}: no other container holds memory"),
            words => format!("GPU {uuid}{total} is also held by {}", words.join(", ")),
        };
        let from = holders.iter().map(|(run, _)| Arc::clone(&run.run)).collect();
        advice.lines.push(AdviceLine { topic: "gpu", is_ok: words.is_empty(), text, runs: from });
    }
    Some(advice)
}

fn ram_lines(newest: &RunRecord, runs: &[RunRecord]) -> Vec<AdviceLine> {
    let Some(peak) = newest.unreclaimable_peak_bytes.map(|bytes| bytes as f64) else { return vec![] };
    let one = vec![Arc::clone(&newest.run)];
    let line = |is_ok, text, runs| AdviceLine { topic: "ram", is_ok, text, runs };
    let Some(limit) = newest.limit_bytes.map(|bytes| bytes as f64) else {
        return vec![line(true, format!("peak {}; it has no limit", human(peak)), one)];
    };
    let share = 100.0 * peak / limit;
    let is_killed = newest.exit_reason == Some(ExitReason::OomContainer);
    if !is_killed && peak <= PLANNED_SHARE * limit {
        let spare = human(limit - peak);
        return vec![line(
            true,
            format!("peak {} of {} ({share:.0} %): {spare} to spare", human(peak), human(limit)),
            one,
        )];
    }
    let text = if is_killed {
        format!("it was killed at its limit of {}; highest sample {}", human(limit), human(peak))
    } else {
        format!("it came close to its limit of {}: peak {} ({share:.0} %)", human(limit), human(peak))
    };
    let mut lines = vec![line(false, text, one)];
    let Some((model, settings, from)) = ram_model(newest, runs) else {
        let text = "which setting would help is not measured: run it with another batch size or number of workers, in the same group";
        lines.push(line(false, text.to_owned(), vec![]));
        return lines;
    };
    let fitting = model.fitting(&settings, PLANNED_SHARE * limit);
    for fits in &fitting {
        let mut changes = Vec::new();
        if fits.workers != settings.workers {
            changes.push(format!("NUM_WORKERS={}", fits.workers));
        }
        if fits.batch != settings.batch {
            changes.push(format!("BATCH_SIZE={} ACCUM={}", fits.batch, fits.accumulation));
        }
        let needs = human(model.needs(fits));
        lines.push(line(
            false,
            format!("{} needs about {needs} of {}", changes.join(" "), human(limit)),
            from.clone(),
        ));
    }
    if fitting.is_empty() {
        let needs = human(model.needs(&settings) / PLANNED_SHARE);
        lines.push(line(
            false,
            format!("no number of workers or batch size fits; a limit of {needs} would"),
            from,
        ));
    }
    lines
}

/// Returns what settings need, from the runs of a group, and the settings of the newest: the share of a worker as measured, and of a
/// sample if runs differ in the batch alone; the rest is that of the newest run that was not killed, because what a killed run would
/// have needed is unknown. `None` if no share is known.
fn ram_model(newest: &RunRecord, runs: &[RunRecord]) -> Option<(RamModel, TrainingSettings, Vec<Arc<str>>)> {
    let wanted = settings(newest);
    let mut from = vec![Arc::clone(&newest.run)];
    let shares = runs.iter().filter_map(|run| {
        let share = run.roles.get("dataloader_worker")?.process_pss_bytes?;
        Some((share, &run.run))
    });
    let worker = shares.max_by_key(|(share, _)| *share);
    from.extend(worker.map(|(_, run)| Arc::clone(run)));
    let alike: Vec<&RunRecord> =
        runs.iter().filter(|run| differ_only_in_batch(run, newest) && is_whole(run)).collect();
    let points: Vec<(f64, f64)> = alike
        .iter()
        .filter_map(|run| Some((number(run, BATCH)? as f64, run.unreclaimable_peak_bytes? as f64)))
        .collect();
    let sample = slope(&points).filter(|slope| *slope > 0.0).map(|slope| slope / wanted.ranks as f64);
    if sample.is_some() {
        from.extend(alike.iter().map(|run| Arc::clone(&run.run)));
    }
    if sample.is_none() && (worker.is_none() || wanted.workers == 0) {
        return None;
    }
    let per_worker = worker.map_or(0.0, |(share, _)| share as f64);
    let variable = RamModel { per_worker, per_sample: sample.unwrap_or(0.0), ..RamModel::default() };
    let reference = alike.last().copied().unwrap_or(newest);
    from.push(Arc::clone(&reference.run));
    from.sort();
    from.dedup();
    let fixed = (reference.unreclaimable_peak_bytes? as f64 - variable.needs(&settings(reference))).max(0.0);
    Some((RamModel { fixed, ..variable }, wanted, from))
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
    let Some(peak) = newest.gpu_peak_bytes() else { return (vec![], None) };
    let Some(total) = gpu_total(newest) else { return (vec![], None) };
    let one = vec![Arc::clone(&newest.run)];
    let line = |is_ok, text, runs| AdviceLine { topic: "vram", is_ok, text, runs };
    let share = 100.0 * peak as f64 / total;
    let words = format!("peak {} of {} ({share:.0} %)", human(peak as f64), human(total));
    let mut lines = vec![line(!has_failed(newest) && share <= 95.0, words, one)];
    let Some(batch) = number(newest, BATCH) else { return (lines, None) };
    let alike: Vec<&RunRecord> = runs
        .iter()
        .filter(|run| differ_only_in_batch(run, newest) && gpu_total(run) == Some(total))
        .collect();
    // PyTorch's own peak if all runs have it: the driver's includes its cache
    let has_torch = alike.iter().all(|run| run.torch_allocated_peak_bytes().is_some());
    let peak_of =
        |run: &RunRecord| if has_torch { run.torch_allocated_peak_bytes() } else { run.gpu_peak_bytes() };
    let measured = Measured {
        peaks: alike
            .iter()
            .filter(|run| is_whole(run) && !has_failed(run))
            .filter_map(|run| Some((number(run, BATCH)?, peak_of(run)? as f64)))
            .collect(),
        failed: alike.iter().filter(|run| has_failed(run)).filter_map(|run| number(run, BATCH)).collect(),
        total,
    };
    let from: Vec<_> = alike.iter().map(|run| Arc::clone(&run.run)).collect();
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
        fit_words(&fit, sizes),
        from.clone(),
    ));
    if let Some(maximum) = sizes.maximum.filter(|maximum| *maximum < batch) {
        let steps = number(newest, ACCUMULATION).unwrap_or(1);
        let accumulation = (batch * steps).div_ceil(maximum);
        let text = format!(
            "BATCH_SIZE={maximum} ACCUM={accumulation} keeps the effective batch of {}",
            batch * steps
        );
        lines.push(line(false, text, from));
    }
    (lines, Some(sizes))
}

fn fit_words(fit: &VramFit, sizes: BatchSizes) -> String {
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

fn worker_line(newest: &RunRecord, runs: &[RunRecord]) -> Option<AdviceLine> {
    let shares: Vec<f64> = newest.gpus.values().filter_map(|gpu| gpu.utilization_mean).collect();
    let busy = shares.iter().sum::<f64>() / shares.len().max(1) as f64;
    let settings = settings(newest);
    let workers = settings.workers * settings.ranks;
    let cores = newest.cpu_mean_cores? / workers.max(1) as f64;
    if shares.is_empty() || busy >= BUSY_GPU || workers == 0 || cores < BUSY_WORKER {
        return None;
    }
    let (model, _, from) = ram_model(newest, runs)?;
    let limit = newest.limit_bytes.map_or(f64::INFINITY, |limit| PLANNED_SHARE * limit as f64);
    let more = TrainingSettings { workers: settings.workers + 1, ..settings };
    let waits = format!(
        "the GPU was busy {:.0} % of the time and the workers {:.0} %",
        100.0 * busy,
        100.0 * cores.min(1.0)
    );
    let text = if model.needs(&more) <= limit {
        format!("{waits}: try NUM_WORKERS={}, which needs about {}", more.workers, human(model.needs(&more)))
    } else {
        format!("{waits}: more workers would help, but one more needs about {}", human(model.needs(&more)))
    };
    Some(AdviceLine { topic: "workers", is_ok: true, text, runs: from })
}

/// Returns what another precision saved, from runs that differ in it alone.
fn precision_lines(newest: &RunRecord, runs: &[RunRecord]) -> Vec<AdviceLine> {
    let without = |run: &RunRecord| {
        let mut settings = run.settings.clone();
        settings.remove(PRECISION);
        settings
    };
    let Some((precision, peak)) = newest.settings.get(PRECISION).zip(newest.gpu_peak_bytes()) else {
        return vec![];
    };
    let mut lines = Vec::new();
    let mut seen = vec![Arc::clone(precision)];
    for run in runs.iter().rev().filter(|run| without(run) == without(newest)) {
        let Some((other, bytes)) = run.settings.get(PRECISION).zip(run.gpu_peak_bytes()) else { continue };
        if seen.contains(other) {
            continue;
        }
        seen.push(Arc::clone(other));
        let change = 100.0 * (peak as f64 / bytes as f64 - 1.0);
        let text = format!(
            "{precision} needed {} of GPU memory where {other} needed {} ({change:+.0} %)",
            human(peak as f64),
            human(bytes as f64)
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

/// Returns the least memory that a run of this group got along with.
fn minimum_line(newest: &RunRecord, runs: &[RunRecord]) -> Option<AdviceLine> {
    let is_good = |run: &&RunRecord| run.exit_reason == Some(ExitReason::Completed) && run.samples > 0;
    let run = runs.iter().filter(is_good).rfind(|run| run.settings == newest.settings)?;
    let plan = |bytes: u64| human(bytes as f64 / PLANNED_SHARE);
    let ram = run.unreclaimable_peak_bytes.map(|bytes| format!("{} of RAM", plan(bytes)));
    let vram = run.gpu_peak_bytes().map(|bytes| format!("a GPU of {}", plan(bytes)));
    let words: Vec<_> = [ram, vram].into_iter().flatten().collect();
    (!words.is_empty()).then(|| AdviceLine {
        topic: "minimum",
        is_ok: true,
        text: format!(
            "these settings need at least {}: the measured peak and a tenth to spare",
            words.join(" and ")
        ),
        runs: vec![Arc::clone(&run.run)],
    })
}

/// Returns true if the peaks of a run are what its settings need: it ended, and was not killed for its memory.
fn is_whole(run: &RunRecord) -> bool {
    let is_killed = matches!(run.exit_reason, Some(ExitReason::OomContainer | ExitReason::OomHost));
    run.ended.is_some() && !is_killed
}

/// Returns true if a run died for want of GPU memory, as far as PyTorch reported it.
fn has_failed(run: &RunRecord) -> bool {
    run.torch_ooms.is_some_and(|ooms| ooms > 0) && run.exit_reason == Some(ExitReason::Error)
}

/// Returns true if two runs have the same settings but for the batch size.
fn differ_only_in_batch(one: &RunRecord, other: &RunRecord) -> bool {
    let rest = |run: &RunRecord| {
        let mut settings = run.settings.clone();
        settings.retain(|name, _| **name != *BATCH && **name != *ACCUMULATION);
        settings
    };
    rest(one) == rest(other)
}

fn settings(run: &RunRecord) -> TrainingSettings {
    let ranks = number(run, DEVICES).filter(|ranks| *ranks > 0).unwrap_or(run.gpus.len().max(1) as u64);
    let workers = number(run, WORKERS).unwrap_or_else(|| {
        let workers = run.roles.get("dataloader_worker").map_or(0, |role| role.processes);
        u64::from(workers) / ranks
    });
    let batch = number(run, BATCH).unwrap_or(1).max(1);
    TrainingSettings { ranks, workers, batch, accumulation: number(run, ACCUMULATION).unwrap_or(1).max(1) }
}

/// Returns a setting that is a number of reasonable size.
fn number(run: &RunRecord, name: &str) -> Option<u64> {
    run.settings.get(name)?.trim().parse().ok().filter(|number| *number < 1 << 32)
}

fn gpu_total(run: &RunRecord) -> Option<f64> {
    run.gpus.values().filter_map(|gpu| gpu.total_bytes).max().map(|bytes| bytes as f64)
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
            limit_bytes: Some(1000 * MIB),
            unreclaimable_peak_bytes: Some(ram * MIB),
            gpus: gpu.into_iter().map(|gpu| ("GPU-a".into(), gpu)).collect(),
            ..RunRecord::default()
        }
    }

    fn texts(advice: &Advice, topic: &str) -> Vec<String> {
        advice.lines.iter().filter(|line| line.topic == topic).map(|line| line.text.clone()).collect()
    }

    #[test]
    fn killed_run_gets_settings_that_fit_from_what_was_measured() {
        let mut small = run("a", &[("batch_size", "16"), ("num_workers", "4")], 600, None);
        let worker = RolePeak { processes: 4, process_pss_bytes: Some(50 * MIB), ..RolePeak::default() };
        small.roles.insert("dataloader_worker".into(), worker);
        let middle = run("b", &[("batch_size", "32"), ("num_workers", "4")], 760, None);
        let mut killed = run("c", &[("batch_size", "64"), ("num_workers", "4")], 990, None);
        killed.exit_reason = Some(ExitReason::OomContainer);
        let advice = advise(&[small, middle, killed]).unwrap();
        let lines = texts(&advice, "ram");
        assert_eq!(lines[0], "it was killed at its limit of 1000.0 MiB; highest sample 990.0 MiB");
        assert_eq!(lines[1..], ["BATCH_SIZE=32 ACCUM=2 needs about 760.0 MiB of 1000.0 MiB"]);
        assert_eq!(advice.lines[1].runs.iter().map(|run| &**run).collect::<Vec<_>>(), ["a", "b", "c"]);
    }

    #[test]
    fn nothing_measured_has_no_number() {
        let mut killed = run("a", &[("batch_size", "64")], 990, None);
        killed.exit_reason = Some(ExitReason::OomContainer);
        let lines = texts(&advise(&[killed]).unwrap(), "ram");
        assert!(lines[1].starts_with("which setting would help is not measured"), "{lines:?}");
        assert_eq!(advise(&[]), None);
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
        runs.remove(0);
        let lines = texts(&advise(&runs).unwrap(), "vram");
        assert_eq!(lines[1], "the largest batch is not known yet: 3 sizes were measured, run also 16");
    }

    #[test]
    fn idle_gpu_and_busy_workers_get_another_worker_if_memory_allows() {
        let mut newest = run("a", &[("num_workers", "2"), ("batch_size", "8")], 500, Some(4000));
        newest.gpus.values_mut().for_each(|gpu| gpu.utilization_mean = Some(0.4));
        newest.cpu_mean_cores = Some(1.9);
        let worker = RolePeak { processes: 2, process_pss_bytes: Some(100 * MIB), ..RolePeak::default() };
        newest.roles.insert("dataloader_worker".into(), worker);
        let lines = |newest: &RunRecord| texts(&advise(std::slice::from_ref(newest)).unwrap(), "workers");
        assert_eq!(
            lines(&newest),
            [
                "the GPU was busy 40 % of the time and the workers 95 %: try NUM_WORKERS=3, which needs about 600.0 MiB"
            ]
        );
        newest.unreclaimable_peak_bytes = Some(850 * MIB);
        assert!(lines(&newest)[0].contains("but one more needs about 950.0 MiB"), "{:?}", lines(&newest));
        newest.cpu_mean_cores = Some(0.2);
        assert_eq!(lines(&newest), <[&str; 0]>::default(), "the workers wait themselves");
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
    fn check_names_who_else_holds_the_gpu() {
        let newest = run("a", &[("batch_size", "8")], 500, Some(4000));
        let mut other = run("b", &[], 100, Some(3000));
        (other.subject.container_id, other.subject.name.container_name) = ("b".into(), "neighbour".into());
        other.gpus.values_mut().for_each(|gpu| gpu.mean_bytes = Some(1024 * MIB));
        let lines =
            |running: &[RunRecord]| texts(&check(std::slice::from_ref(&newest), running).unwrap(), "gpu");
        assert_eq!(
            lines(&[other]),
            ["GPU GPU-a of 11.2 GiB is also held by neighbour with 1.0 GiB on average"]
        );
        assert_eq!(lines(&[]), ["GPU GPU-a of 11.2 GiB: no other container holds memory"]);
    }
}
