//! Advice about GPU memory: how full the fullest GPU was, and which batch sizes fit into it.

use std::sync::Arc;

use super::lines::AdviceLine;
use super::measurement::{
    ACCUMULATION, BATCH, FailedBatches, differ_only_in_batch, fullest_gpu, gpu_need, has_failed,
    has_lasting_failure, human, is_measurement, number, settings, was_killed_within,
};
use super::ram_capacity::RamCapacity;
use super::vram_fit::{BatchSizes, MIN_SIZES, MeasuredSizes, VramFit};
use crate::events::ExitReason;
use crate::runs::{GpuPeak, RunRecord};

/// A GPU that is fuller than this has nothing to spare.
const FULL_PERCENT: f64 = 95.0;

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
    let mut lines: Vec<_> = failed_line(newest).into_iter().collect();
    let Some((used, (peak, total))) = used.and_then(|run| Some((run, fullest_gpu(run)?))) else {
        return (lines, None);
    };
    let share = 100.0 * peak / total;
    let of = if used.run == newest.run { "" } else { " in the newest run that used it" };
    // it needed more
    let what = if has_failed(used) { "highest sample" } else { "peak" };
    let text = format!("{what} {} of {} ({share:.0} %){of}", human(peak), human(total));
    lines.push(line(share <= FULL_PERCENT, text, vec![Arc::clone(&used.run)]));
    let Some(batch) = number(newest, BATCH) else { return (lines, None) };
    let (measured, from) = measured_sizes(newest, runs, total);
    let measured = MeasuredSizes { largest_for_ram, ..measured };
    let Some(fit) = measured.fit() else {
        lines.extend(unknown_text(&measured).map(|text| line(true, text, from)));
        return (lines, None);
    };
    let sizes = fit.batch_sizes();
    let fits = sizes.maximum.is_some_and(|maximum| batch <= maximum);
    lines.push(line(fits, fit_text(&fit, sizes, largest_for_ram), from.clone()));
    if let Some(maximum) = sizes.maximum.filter(|maximum| *maximum < batch) {
        let effective = batch * number(newest, ACCUMULATION).unwrap_or(1).max(1);
        let ranks = settings(newest).ranks;
        lines.push(line(false, smaller_batch_text(effective, maximum, ranks), from));
    }
    (lines, Some(sizes))
}

/// Returns that a run had CUDA out-of-memory errors.
fn failed_line(run: &RunRecord) -> Option<AdviceLine> {
    if !has_failed(run) {
        return None;
    }
    let text = match (run.exit_reason, run.torch_ooms.max(run.cuda_ooms_in_log).unwrap_or(0)) {
        (Some(ExitReason::CudaOom), _) => "it ended by a CUDA out-of-memory error".to_owned(),
        (_, 1) => "it had a CUDA out-of-memory error".to_owned(),
        (_, errors) => format!("it had {errors} CUDA out-of-memory errors"),
    };
    Some(line(false, format!("{text}: see `memledger why`"), vec![Arc::clone(&run.run)]))
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
        differ_only_in_batch(run, newest) && fullest_gpu(run).is_none_or(|(_, other)| other == total)
    };
    let (alike, unused): (Vec<&RunRecord>, Vec<_>) =
        runs.iter().filter(is_alike).partition(|run| fullest_gpu(run).is_some());
    // PyTorch's own peak if all runs have it: the driver's includes its cache
    let has_torch = alike.iter().all(|run| run.torch_allocated_peak_bytes().is_some());
    let peak_of = |run: &RunRecord| if has_torch { run.torch_allocated_peak_bytes() } else { gpu_need(run) };
    let completed = || alike.iter().filter(|run| is_measurement(run));
    let outside = completed().filter_map(|run| outside_torch(run)).max().unwrap_or(0) as f64;
    let peaks = completed().filter_map(|run| Some((number(run, BATCH)?, peak_of(run)? as f64))).collect();
    // a batch for which the container has too little RAM does not fit either
    let ram = RamCapacity::of(newest).map_or(f64::INFINITY, |capacity| capacity.bytes);
    let is_failure =
        |run: &&&RunRecord| has_lasting_failure(run, alike.iter().copied()) || was_killed_within(run, ram);
    let failures = || alike.iter().chain(&unused).filter(is_failure);
    let failed = failures().filter_map(|run| number(run, BATCH)).collect();
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

/// Returns why there is no fit, and which sizes to run for one; `None` if no size would help.
fn unknown_text(measured: &MeasuredSizes) -> Option<String> {
    if measured.sizes().len() >= MIN_SIZES {
        let text = "the largest batch is not known: GPU memory did not grow with the batch in the runs that completed";
        return Some(text.to_owned());
    }
    let next: Vec<_> = measured.next_sizes().iter().map(u64::to_string).collect();
    (!next.is_empty()).then(|| {
        format!(
            "the largest batch is not known yet: {} sizes were measured, run also {}",
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
fn smaller_batch_text(effective: u64, maximum: u64, ranks: u64) -> String {
    let of = if ranks > 1 { " in each rank" } else { "" };
    let is_whole_part = |size: &u64| effective.is_multiple_of(*size);
    // a batch of less than half would only cost speed
    if let Some(size) = (maximum / 2 + 1..=maximum).rev().find(is_whole_part) {
        return format!(
            "BATCH_SIZE={size} ACCUM={} keeps the effective batch of {effective}{of}",
            effective / size
        );
    }
    let steps = effective.div_ceil(maximum);
    format!(
        "BATCH_SIZE={maximum} ACCUM={steps}: an effective batch of {} instead of {effective}{of}",
        maximum * steps
    )
}
