//! The advice of `memledger advise`: what the runs of a group needed, which settings would fit, and what to measure next.

use std::sync::Arc;

use serde::Serialize;

use super::measurement::{
    FailedBatches, PLANNED_SHARE, batch_words, differ_only_in, fullest_gpu, gpu_need, has_failed,
    has_same_gpu, has_same_rest, has_same_settings, human, is_measurement, number, settings, waiting_gpu,
    was_killed_within, worker_share,
};
use super::ram_budget::{RamBudgetParts, TrainingSettings};
use super::ram_capacity::RamCapacity;
use super::ram_lines::{RamPlan, killed_settings, ram_lines};
use super::vram_lines::vram_lines;
use crate::events::ExitReason;
use crate::runs::setting_names::KnownSetting;
use crate::runs::{RunRecord, allocator};

/// One line of advice.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AdviceLine {
    /// What it is about: `ram`, `vram`, `batch`, `workers`, `precision`, `allocator`, `minimum`, `gpu`.
    pub topic: &'static str,
    /// False if something must be changed before the next run.
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
    /// The parts of the RAM that these settings need, if they are measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ram_budget: Option<RamBudgetParts>,
    /// The lines, most important first.
    pub lines: Vec<AdviceLine>,
}

/// Returns advice from the runs of one group, oldest first, for the next run after the newest that ended; `None` if none did.
pub fn advise(runs: &[RunRecord]) -> Option<Advice> {
    let newest = runs.iter().rfind(|run| run.ended.is_some())?;
    let plan = RamPlan::new(newest, runs);
    let (mut vram, sizes) = vram_lines(newest, runs, plan.as_ref().and_then(RamPlan::largest_batch));
    let mut lines = ram_lines(newest, runs, plan.as_ref(), sizes.and_then(|sizes| sizes.maximum));
    // a batch that fits into the RAM and the GPU is proposed once
    let proposal = format!("{}=", KnownSetting::Accumulation.word(&newest.settings));
    let proposes_batch = |line: &AdviceLine| line.text.contains(&proposal);
    if lines.iter().any(proposes_batch) {
        vram.retain(|line| line.is_ok || !proposes_batch(line));
    }
    lines.extend(vram);
    lines.extend(unexplained_line(newest, runs));
    lines.extend(worker_line(newest, runs));
    lines.extend(precision_lines(newest, runs));
    lines.extend(allocator_line(newest));
    lines.extend(minimum_line(newest, runs));
    Some(Advice {
        group: Arc::clone(&newest.group),
        run: Arc::clone(&newest.run),
        batch_size: number(newest, KnownSetting::Batch),
        maximum_batch_size: sizes.and_then(|sizes| sizes.maximum),
        recommended_batch_size: sizes.and_then(|sizes| sizes.recommended),
        safe_batch_size: sizes.and_then(|sizes| sizes.safe),
        ram_budget: plan.and_then(|plan| plan.parts()),
        lines,
    })
}

/// Returns a line if runs with some batch ended for a reason that is not known, and none with as large a one completed.
fn unexplained_line(newest: &RunRecord, runs: &[RunRecord]) -> Option<AdviceLine> {
    let alike = runs.iter().filter(|run| has_same_rest(run, newest) && has_same_gpu(run, newest));
    let failed = FailedBatches::of(alike.clone());
    let batch = failed.unexplained.filter(|batch| failed.out_of_memory.is_none_or(|known| *batch < known))?;
    let from: Vec<&RunRecord> = alike.filter(|run| number(run, KnownSetting::Batch) == Some(batch)).collect();
    let word = KnownSetting::Batch.word(&newest.settings);
    let mut bad = from.iter().filter_map(|run| run.exit_reason).filter(|it| *it != ExitReason::Completed);
    let text = match bad.all(ExitReason::is_of_log) {
        true => format!(
            "{word}={batch} failed for what its log shows, as memledger why says: nothing as large is proposed"
        ),
        false => format!(
            "it is not known why {word}={batch} failed: nothing as large is proposed. If it ran out of GPU memory, memledger sees that with \
             --container.logs, or if the program reports to it"
        ),
    };
    let runs = from.into_iter().map(|run| Arc::clone(&run.run)).collect();
    Some(AdviceLine { topic: "batch", is_ok: true, text, runs })
}

/// Returns the checklist before the next run: the advice, and who holds the GPUs of the newest run at the Unix time `now`. `running`
/// are the runs in progress on this host.
pub fn check(runs: &[RunRecord], running: &[RunRecord], now: f64) -> Option<Advice> {
    let mut advice = advise(runs)?;
    let newest = runs.iter().find(|run| run.run == advice.run)?;
    let has_line = |topic: &str| advice.lines.iter().any(|line| line.topic == topic);
    let items = [
        ("batch", batch_item(newest)),
        ("workers", workers_item(newest)),
        ("allocator", allocator_item(newest)),
    ];
    let items = items.into_iter().filter(|(topic, _)| !has_line(topic));
    let line = |(topic, text)| AdviceLine { topic, is_ok: true, text, runs: vec![Arc::clone(&newest.run)] };
    let items: Vec<_> = items.map(line).collect();
    advice.lines.extend(items);
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
                let name = &run.subject.identity.name;
                format!("{name} with {}, {age:.0} s ago", human(*bytes as f64))
            })
            .collect();
        let total = gpu.total_bytes.map_or_else(String::new, |total| format!(" of {}", human(total as f64)));
        let text = match words.as_slice() {
            // whether anything holds it is known only while memledger sees containers
            [] if fresh.is_empty() => continue,
            [] => {
                let oldest = fresh.iter().filter_map(|run| run.last_sampled).fold(now, f64::min);
                format!("GPU {uuid}{total}: no container that runs held memory {:.0} s ago", now - oldest)
            }
            words => format!(
                "GPU {uuid}{total} is held by {}: end that first, or take another GPU",
                words.join("; ")
            ),
        };
        let from = holders.iter().map(|(run, _)| Arc::clone(&run.run)).collect();
        advice.lines.push(AdviceLine { topic: "gpu", is_ok: words.is_empty(), text, runs: from });
    }
    Some(advice)
}

/// Returns the batch size and the accumulation of the newest run, and what they come to.
fn batch_item(newest: &RunRecord) -> String {
    let Some(batch) = number(newest, KnownSetting::Batch) else {
        return "the batch size is not known: set BATCH_SIZE, a label memledger.run.batch_size, or settings of memledger_client.start"
            .to_owned();
    };
    let TrainingSettings { ranks, accumulation, .. } = settings(newest);
    let effective = settings(newest).effective_batch();
    let words = batch_words(newest, batch, accumulation);
    format!("{words}, {ranks} ranks: an effective batch of {effective}").replace(", 1 ranks", ", 1 rank")
}

fn workers_item(newest: &RunRecord) -> String {
    let TrainingSettings { ranks, workers, .. } = settings(newest);
    let word = KnownSetting::Workers.word(&newest.settings);
    match workers {
        0 => "no workers: each rank loads its own data".to_owned(),
        _ => format!("{word}={workers} for each rank, {} in all", workers * ranks),
    }
}

fn allocator_item(newest: &RunRecord) -> String {
    let setting = |name: &str| newest.settings.get(name).map(|value| &**value);
    let variable = allocator::variable(setting);
    match setting(&variable.to_lowercase()) {
        Some(value) => format!("{variable}={value}"),
        None => format!("{variable} is not set, and nothing measured asks for it"),
    }
}

/// Returns a line if the GPU waited while the workers were busy. One more worker needs about the share of those there are.
fn worker_line(newest: &RunRecord, runs: &[RunRecord]) -> Option<AdviceLine> {
    if !is_measurement(newest) {
        return None;
    }
    let busy = waiting_gpu(newest)?;
    let wanted = settings(newest);
    let (workers, cores) = (wanted.workers * wanted.ranks, newest.cpu_mean_cores?);
    let waits = format!(
        "the GPU was busy {:.0} % of the time, and {workers} workers and their trainer used {cores:.1} cores",
        100.0 * busy
    );
    let line =
        |text| Some(AdviceLine { topic: "workers", is_ok: true, text, runs: vec![Arc::clone(&newest.run)] });
    let Some(share) = worker_share(newest) else {
        return line(format!(
            "{waits}: more workers may help; what one needs is not known, as no share (PSS) of a worker was read"
        ));
    };
    let needs = (newest.unreclaimable_peak_bytes? + share * wanted.ranks) as f64;
    let more = TrainingSettings { workers: wanted.workers + 1, ..wanted };
    // without a limit and the memory of the host it is not known what there is
    let fits = RamCapacity::of(newest).is_some_and(|capacity| {
        let was_killed =
            |killed: &TrainingSettings| killed.workers <= more.workers && killed.batch <= more.batch;
        needs <= capacity.planned()
            && !killed_settings(newest, capacity.bytes, runs, wanted.ranks).iter().any(was_killed)
    });
    let text = if fits {
        let word = KnownSetting::Workers.word(&newest.settings);
        format!("{waits}: try {word}={}, which needs about {}", more.workers, human(needs))
    } else {
        format!("{waits}: more workers may help, but one more may need {}", human(needs))
    };
    line(text)
}

/// Returns what the newest run needed beside runs with another precision that differ in it alone.
fn precision_lines(newest: &RunRecord, runs: &[RunRecord]) -> Vec<AdviceLine> {
    // "true" says nothing without its name
    let of = |run: &RunRecord| {
        let (name, value) = KnownSetting::Precision.find(&run.settings)?;
        let is_switch =
            ["true", "false", "1", "0", "yes", "no", "on", "off"].contains(&&*value.to_lowercase());
        Some(if is_switch { format!("{name}={value}") } else { value.to_owned() })
    };
    let measured = |run: &&RunRecord| is_measurement(run);
    let Some(precision) = of(newest).filter(|_| measured(&newest)) else { return vec![] };
    let mut lines = Vec::new();
    let mut seen = vec![precision.clone()];
    let alike = runs
        .iter()
        .rev()
        .filter(|run| differ_only_in(KnownSetting::Precision, run, newest) && has_same_gpu(run, newest));
    for run in alike.filter(measured) {
        let Some(other) = of(run).filter(|other| !seen.contains(other)) else { continue };
        seen.push(other.clone());
        let changes = precision_changes(newest, run);
        if changes.is_empty() {
            continue;
        }
        let text = format!("{precision} instead of {other}: {}", changes.join(", "));
        let runs = vec![Arc::clone(&newest.run), Arc::clone(&run.run)];
        lines.push(AdviceLine { topic: "precision", is_ok: true, text, runs });
    }
    lines
}

/// Returns how the memory and the speed of a run differ from those of another one.
fn precision_changes(run: &RunRecord, other: &RunRecord) -> Vec<String> {
    let change = |what: &str, of: &dyn Fn(&RunRecord) -> Option<f64>, text: &dyn Fn(f64) -> String| {
        let (bytes, before) = of(run).zip(of(other)).filter(|(_, before)| *before > 0.0)?;
        let percent = 100.0 * (bytes / before - 1.0);
        Some(format!("{what} {} and not {} ({percent:+.0} %)", text(bytes), text(before)))
    };
    let ram = |run: &RunRecord| run.unreclaimable_peak_bytes.map(|bytes| bytes as f64);
    let size = |bytes: f64| human(bytes);
    let speed = |steps: f64| format!("{steps:.2}");
    [
        change("GPU memory", &|run| gpu_need(run).map(|bytes| bytes as f64), &size),
        change("RAM", &ram, &size),
        change("steps per second", &|run| run.steps_per_second, &speed),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Returns a line if PyTorch's cache took a GPU that was nearly full.
fn allocator_line(newest: &RunRecord) -> Option<AdviceLine> {
    let setting = |name: &str| newest.settings.get(name).map(|value| &**value);
    let is_set = allocator::has_expandable_segments(setting);
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
            "PyTorch's cache held {} beside the tensors: set {}",
            human(most),
            allocator::with_expandable_segments(setting)
        ),
        runs: vec![Arc::clone(&newest.run)],
    })
}

/// Returns the most memory that completed runs with these settings needed; `None` if one had too little of it with more than that.
fn minimum_line(newest: &RunRecord, runs: &[RunRecord]) -> Option<AdviceLine> {
    // without any, the settings are unknown and not equal
    let is_same = |run: &&RunRecord| {
        run.run == newest.run || !run.settings.is_empty() && has_same_settings(run, newest)
    };
    let alike: Vec<&RunRecord> = runs.iter().filter(is_same).collect();
    let measured: Vec<_> = alike.iter().filter(|run| is_measurement(run)).collect();
    // an evaluation with the settings of a training needs less
    let has_trained = |run: &RunRecord| run.steps_per_second.is_some_and(|steps| steps > 0.0);
    let do_train = measured.iter().any(|run| has_trained(run));
    let measured: Vec<_> = measured.into_iter().filter(|run| !do_train || has_trained(run)).collect();
    let ram = measured.iter().filter_map(|run| run.unreclaimable_peak_bytes).max();
    let ram = ram.map(|bytes| bytes as f64 / PLANNED_SHARE);
    let gpus =
        measured.iter().filter_map(|run| Some((gpu_need(run)? as f64 / PLANNED_SHARE, run.gpus.len())));
    let vram = gpus.max_by(|one, other| one.0.total_cmp(&other.0));
    // one on a smaller GPU proves nothing about this much
    let too_small = |run: &RunRecord| {
        let total = run.gpus.values().filter_map(|gpu| gpu.total_bytes).max();
        total.zip(vram).is_some_and(|(total, (bytes, _))| (total as f64) < bytes)
    };
    let has_contradiction =
        |run: &&RunRecord| has_failed(run) && !too_small(run) || was_killed_within(run, ram.unwrap_or(0.0));
    if alike.iter().any(has_contradiction) {
        return None;
    }
    let ram = ram.map(|bytes| format!("{} of RAM", human(bytes)));
    let vram = vram.map(|(bytes, count)| match count {
        1 => format!("a GPU of {}", human(bytes)),
        count => format!("{count} GPUs of {} each", human(bytes)),
    });
    let words: Vec<_> = [ram, vram].into_iter().flatten().collect();
    let elsewhere = measured.iter().filter(|run| !has_same_gpu(run, newest));
    let elsewhere = elsewhere.filter_map(|run| fullest_gpu(run)).map(|(_, total)| total).fold(0.0, f64::max);
    let elsewhere = match elsewhere {
        0.0 => String::new(),
        total => format!(", measured on a GPU of {} too", human(total)),
    };
    (!words.is_empty()).then(|| AdviceLine {
        topic: "minimum",
        is_ok: true,
        text: format!(
            "these settings fit into {}: the highest measured peak and a twentieth to spare{elsewhere}",
            words.join(" and ")
        ),
        runs: measured.iter().map(|run| Arc::clone(&run.run)).collect(),
    })
}

#[cfg(test)]
mod tests;
