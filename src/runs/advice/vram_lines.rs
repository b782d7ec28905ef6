//! Advice about GPU memory: how full the fullest GPU was, and which batch sizes fit into it.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::lines::AdviceLine;
use super::measurement::{
    FailedBatches, batch_words, differing_beside_batch, fullest_gpu, gpu_need, has_failed,
    has_lasting_failure, has_same_gpu, has_same_rest, human, is_measurement, number, settings,
    survived_errors, waiting_gpu, was_killed_within,
};
use super::ram_capacity::RamCapacity;
use super::vram_fit::{BatchSizes, MIN_SIZES, MeasuredSizes, VramFit};
use crate::runs::leak::{TorchLeak, leak_before_failure};
use crate::runs::setting_names::KnownSetting;
use crate::runs::{GpuPeak, RunRecord};

/// A GPU that is fuller than this has nothing to spare.
const FULL_PERCENT: f64 = 95.0;
/// Maximum number of settings that are named because runs differ in them.
const MAX_DIFFERING: usize = 3;

fn line(is_ok: bool, text: String, runs: Vec<Arc<str>>) -> AdviceLine {
    AdviceLine { topic: "vram", is_ok, text, runs }
}

/// Returns the advice for the next run after `newest`, and the batch sizes if enough was measured. If that one ended before it used a
/// GPU, the newest that did counts. No batch above `largest_for_ram` is proposed.
pub fn vram_lines(
    newest: &RunRecord,
    runs: &[RunRecord],
    largest_for_ram: Option<u64>,
) -> (Vec<AdviceLine>, Option<BatchSizes>) {
    let has_used = |run: &&RunRecord| run.ended.is_some() && fullest_gpu(run).is_some();
    let used = if has_used(&newest) { Some(newest) } else { runs.iter().rfind(has_used) };
    let used = used.and_then(|run| Some((run, fullest_gpu(run)?)));
    let mut lines: Vec<_> = failed_line(newest).into_iter().chain(survived_line(newest)).collect();
    let share = used.map_or(0.0, |(_, (peak, total))| 100.0 * peak / total);
    if let Some((used, (peak, total))) = used {
        let of = if used.run == newest.run { "" } else { " in the newest run that used it" };
        // it needed more
        let what = if has_failed(used) { "highest sample" } else { "peak" };
        let text = format!("{what} {} of {} ({share:.0} %){of}", human(peak), human(total));
        lines.push(line(share <= FULL_PERCENT, text, vec![Arc::clone(&used.run)]));
    }
    let Some(batch) = number(newest, KnownSetting::Batch) else { return (lines, None) };
    let measured = used.map(|(_, (_, total))| measured_sizes(newest, runs, total));
    let (sizes, mut more, from) = match measured {
        Some((measured, from)) => {
            let (sizes, more) =
                size_lines(newest, runs, &MeasuredSizes { largest_for_ram, ..measured }, &from);
            (sizes, more, from)
        }
        None => (None, vec![], vec![]),
    };
    lines.append(&mut more);
    let leak = leak_before_failure(newest).filter(|_| has_failed(newest));
    lines.extend(leak.map(|leak| leak_line(newest, leak)));
    // without a maximum half of a batch that did not fit; of a leak each batch is too large after a while
    let half = (leak.is_none() && (has_failed(newest) || share > FULL_PERCENT))
        .then_some(batch / 2)
        .filter(|half| *half > 0);
    let (maximum, from) = match sizes.and_then(|sizes| sizes.maximum) {
        Some(maximum) => (Some(maximum), from),
        None => (half, vec![Arc::clone(&newest.run)]),
    };
    if let Some(maximum) = maximum.filter(|maximum| *maximum < batch) {
        let effective = batch * settings(newest).accumulation;
        lines.push(line(false, smaller_batch_text(newest, effective, maximum), from));
    }
    (lines, sizes)
}

/// Returns which batch sizes fit, or why that is not known.
fn size_lines(
    newest: &RunRecord,
    runs: &[RunRecord],
    measured: &MeasuredSizes,
    from: &[Arc<str>],
) -> (Option<BatchSizes>, Vec<AdviceLine>) {
    let Some(fit) = measured.fit() else {
        let others = runs.iter().filter(|run| is_measurement(run) && has_same_gpu(run, newest));
        let differing = differing_beside_batch(newest, others);
        let text = unknown_text(measured, &differing);
        return (None, text.map(|text| line(true, text, from.to_vec())).into_iter().collect());
    };
    let (sizes, batch) = (fit.batch_sizes(), number(newest, KnownSetting::Batch));
    let fits = sizes.maximum.is_some_and(|maximum| batch <= Some(maximum));
    let mut text = fit_text(&fit, sizes, measured.largest_for_ram);
    if waiting_gpu(newest).is_some() && sizes.recommended > batch {
        text.push_str("; the GPU waits for data, so a larger batch is not faster");
    }
    (Some(sizes), vec![line(fits, text, from.to_vec())])
}

/// Returns that a run ended by a CUDA out-of-memory error.
fn failed_line(run: &RunRecord) -> Option<AdviceLine> {
    let text = "it ended by a CUDA out-of-memory error: see `memledger why`".to_owned();
    has_failed(run).then(|| line(false, text, vec![Arc::clone(&run.run)]))
}

/// Returns that a run held more and more until it failed.
fn leak_line(run: &RunRecord, leak: TorchLeak) -> AdviceLine {
    let text = format!(
        "{}. A smaller batch only delays that: look for losses, outputs or lists of tensors that are kept from step to step (`loss.item()`, \
         `.detach()`)",
        leak.text()
    );
    line(false, text, vec![Arc::clone(&run.run)])
}

/// Returns that a run had such errors and went on.
fn survived_line(run: &RunRecord) -> Option<AdviceLine> {
    let text = match survived_errors(run) {
        0 => return None,
        1 => "it survived a CUDA out-of-memory error".to_owned(),
        errors => format!("it survived {errors} CUDA out-of-memory errors"),
    };
    let text = format!("{text}, as those of cuDNN that tries algorithms: `memledger events` has them");
    Some(line(true, text, vec![Arc::clone(&run.run)]))
}

/// Returns the most memory of a GPU that a run held outside of PyTorch, in bytes; `None` if the driver or PyTorch reported none. What PyTorch
/// caches does not count: it frees that before an allocation fails.
fn outside_torch(run: &RunRecord) -> Option<u64> {
    let of = |gpu: &GpuPeak| Some(gpu.peak_bytes?.saturating_sub(gpu.torch_reserved_peak_bytes?));
    run.gpus.values().filter_map(of).max()
}

/// Returns what batch sizes needed on a GPU with `total` bytes, with the settings of `newest` otherwise, and the runs that it comes from.
fn measured_sizes(newest: &RunRecord, runs: &[RunRecord], total: f64) -> (MeasuredSizes, Vec<Arc<str>>) {
    // a run that failed at once may have used no GPU while it was sampled
    let is_alike = |run: &&RunRecord| {
        has_same_rest(run, newest) && fullest_gpu(run).is_none_or(|(_, other)| other == total)
    };
    let (alike, unused): (Vec<&RunRecord>, Vec<_>) =
        runs.iter().filter(is_alike).partition(|run| fullest_gpu(run).is_some());
    // PyTorch's own peak if all runs have it: the driver's includes its cache
    let has_torch = alike.iter().all(|run| run.torch_allocated_peak_bytes().is_some());
    let peak_of = |run: &RunRecord| if has_torch { run.torch_allocated_peak_bytes() } else { gpu_need(run) };
    let completed = || alike.iter().filter(|run| is_measurement(run));
    let outside = completed().filter_map(|run| outside_torch(run)).max().unwrap_or(0) as f64;
    let peaks = completed()
        .filter_map(|run| Some((number(run, KnownSetting::Batch)?, peak_of(run)? as f64)))
        .collect();
    // a batch for which the container has too little RAM does not fit either
    let ram = RamCapacity::of(newest).map_or(f64::INFINITY, |capacity| capacity.bytes);
    // workers hold no memory of the GPU, but some of the RAM
    let has_more_workers = |run: &RunRecord| settings(run).workers > settings(newest).workers;
    let is_failure = |run: &&&RunRecord| {
        has_lasting_failure(run, alike.iter().copied())
            || was_killed_within(run, ram) && !has_more_workers(run)
    };
    let failures = || alike.iter().chain(&unused).filter(is_failure);
    let failed = failures().filter_map(|run| number(run, KnownSetting::Batch)).collect();
    let from = completed().chain(failures()).map(|run| Arc::clone(&run.run)).collect();
    let unexplained = FailedBatches::of(alike.iter().chain(&unused).copied()).unexplained;
    (
        MeasuredSizes {
            peaks,
            failed,
            unexplained,
            outside: if has_torch { outside } else { 0.0 },
            total,
            largest_for_ram: None,
        },
        from,
    )
}

/// Returns why there is no fit, and which sizes to run for one; `None` if no size would help. `differing` are settings in which other runs
/// differ.
fn unknown_text(measured: &MeasuredSizes, differing: &BTreeSet<String>) -> Option<String> {
    if measured.sizes().len() >= MIN_SIZES {
        let text = "the largest batch is not known: GPU memory did not grow with the batch in the runs that completed";
        return Some(text.to_owned());
    }
    let next: Vec<_> = measured.next_sizes().iter().map(u64::to_string).collect();
    let others: Vec<_> = differing.iter().take(MAX_DIFFERING).map(String::as_str).collect();
    let others = match others.as_slice() {
        [] => String::new(),
        names => format!("; runs with another {} do not count", names.join(", ")),
    };
    (!next.is_empty()).then(|| {
        format!(
            "the largest batch is not known yet: {} sizes were measured, run also {}{others}",
            measured.sizes().len(),
            next.join(", ")
        )
    })
}

fn fit_text(fit: &VramFit, sizes: BatchSizes, largest_for_ram: Option<u64>) -> String {
    let size = |size: Option<u64>| size.map_or("none".to_owned(), |size| size.to_string());
    let mut needs = format!("{} and {} for each sample", human(fit.base.max(0.0)), human(fit.per_sample));
    if fit.outside > 0.0 {
        needs.push_str(&format!(", beside {} that are not PyTorch's", human(fit.outside)));
    }
    let Some(maximum) = sizes.maximum else {
        return match largest_for_ram {
            Some(0) => "no batch size fits into the RAM".to_owned(),
            _ => format!("no batch size fits: a run needs {needs}"),
        };
    };
    format!(
        "batch size: at most {maximum} ({}), recommended {}, safe {}; a run needs {needs}",
        fit.bound_above(maximum),
        size(sizes.recommended),
        size(sizes.safe),
    )
}

/// Returns the settings that have the effective batch with at most `maximum` samples at a time, or nearly so.
/// Both are of one rank.
fn smaller_batch_text(newest: &RunRecord, effective: u64, maximum: u64) -> String {
    let of = if settings(newest).ranks > 1 { " in each rank" } else { "" };
    let is_whole_part = |size: &u64| effective.is_multiple_of(*size);
    // a batch of less than half would only cost speed
    if let Some(size) = (maximum / 2 + 1..=maximum).rev().find(is_whole_part) {
        let words = batch_words(newest, size, effective / size);
        return format!("{words} keeps the effective batch of {effective}{of}");
    }
    let steps = effective.div_ceil(maximum);
    let words = batch_words(newest, maximum, steps);
    format!("{words}: an effective batch of {} instead of {effective}{of}", maximum * steps)
}
