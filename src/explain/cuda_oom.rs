//! CUDA out-of-memory errors of a run: which of them ended it, and what their numbers prove.

use super::text::{name, time};
use super::{Cause, Confidence, RunSummary};
use crate::events::{CudaOom, CudaOomSource, Evidence, Exit, GpuHolder, OwnGpuProcess};
use crate::lifecycle::timing::{CUDA_OOM_WINDOW, MAX_UNCAUGHT_AGE};
use crate::runs::leak::growth_text;
use crate::runs::setting_names::KnownSetting;
use crate::runs::{allocator, setting_number};
use crate::text::{bytes, lasted, sanitize_for_terminal, torch_size};

/// Maximum number of holders in a line.
const MAX_HOLDERS: usize = 4;
/// Others that hold less of the GPU than this share are not named: each program on it needs some memory.
const MIN_OTHERS: f64 = 0.05;
/// Words in the name of an operation of which no gradients are needed.
const VALIDATION: [&str; 6] = ["val", "valid", "validate", "validation", "eval", "evaluation"];

/// What the numbers of an error prove beyond that the program needed more than there was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    /// The GPU had enough, but the process may take only a part of it.
    OwnShare,
    /// Free pieces in PyTorch's own cache would have sufficed together with what was free.
    Fragmented { pieces: u64 },
    /// What other processes of the container held would have sufficed together with what was free.
    OwnProcesses { others: u64 },
    /// What others held would have sufficed together with what was free.
    OtherHolders { others: u64 },
    /// What others took in the minutes before would have sufficed together with what was free.
    OtherGrowth { growth: u64 },
}

/// Returns the errors that processes reported, or those of the log if none did: the log has the same errors, with fewer numbers.
pub(super) fn best_source(mut ooms: Vec<&CudaOom>) -> Vec<&CudaOom> {
    if ooms.iter().any(|oom| oom.source != CudaOomSource::Log) {
        ooms.retain(|oom| oom.source != CudaOomSource::Log);
    }
    ooms
}

/// Returns the error that ended the run: the newest that was not caught just before its exit, else the newest. Of a run without exit,
/// the newest.
fn leading<'a>(run: &RunSummary<'a>) -> Option<&'a CudaOom> {
    let ended_it = |oom: &&&CudaOom| {
        oom.uncaught == Some(true) && run.exit.is_some_and(|exit| exit.at - oom.at <= MAX_UNCAUGHT_AGE)
    };
    run.cuda_ooms.iter().rev().find(ended_it).or(run.cuda_ooms.last()).copied()
}

/// Returns cause and sentence of an exit after such an error; `ended` is the begin of the sentence.
pub(super) fn verdict(exit: &Exit, run: &RunSummary<'_>, ended: &str) -> (Cause, Confidence, String) {
    let Some(oom) = leading(run) else {
        let what =
            format!("{ended} after a CUDA out-of-memory error, whose event is not in the ledger (any more).");
        return (Cause::CudaOom, Confidence::Likely, what);
    };
    let later = exit.at - oom.at;
    let before = if later < 1.0 { "right after".to_owned() } else { format!("{} after", lasted(later)) };
    let is_certain = oom.uncaught == Some(true) && later < CUDA_OOM_WINDOW;
    let (cause, why) = proven(oom);
    let confidence = if is_certain { Confidence::Certain } else { Confidence::Likely };
    (cause, confidence, format!("{ended}, {before} a CUDA out-of-memory error: {}.{why}", attempt(oom)))
}

/// Returns cause and sentence of a run that goes on after such errors.
pub(super) fn survived(run: &RunSummary<'_>) -> Option<(Cause, Confidence, String)> {
    let oom = leading(run)?;
    let (_, why) = proven(oom);
    // a program can write anything into its log
    let is_reported = oom.source != CudaOomSource::Log;
    let confidence = if is_reported { Confidence::Certain } else { Confidence::Likely };
    let what = format!(
        "At {} a program of this container ran out of GPU memory: {}.{why} No end of the container is recorded.",
        time(oom.at),
        attempt(oom)
    );
    Some((Cause::CudaOomSurvived, confidence, what))
}

/// Returns a line about errors beside another cause.
pub(super) fn also(run: &RunSummary<'_>) -> Option<String> {
    let last = run.cuda_ooms.last()?;
    let errors =
        run.cuda_ooms.iter().fold(0_u64, |sum, oom| sum.saturating_add(oom.skipped).saturating_add(1));
    let noun = if errors == 1 { "CUDA out-of-memory error" } else { "CUDA out-of-memory errors" };
    // what came after the last event is in none
    let least = if run.cuda_ooms.iter().any(|oom| oom.skipped > 0) { "at least " } else { "" };
    Some(format!("{least}{errors} {noun} of this run, the last at {}: {}.", time(last.at), attempt(last)))
}

/// Returns what was tried: `it tried to allocate 2.0 GiB on GPU 0 in model/forward, where 1.0 GiB of 12.0 GiB were free`.
fn attempt(oom: &CudaOom) -> String {
    if matches!(&*oom.framework, "vllm" | "sglang") {
        // refusals to start: nothing was allocated
        let needs = oom.tried_bytes.map_or_else(
            || "it found too little free GPU memory for its start".to_owned(),
            |needed| format!("it needs {} for its cache at the start", torch_size(needed)),
        );
        let free = oom
            .free_bytes
            .map_or_else(String::new, |free| format!(", where {} were free for it", torch_size(free)));
        return format!("{needs}{free}");
    }
    let tried = oom.tried_bytes.map_or_else(
        || "an allocation failed".to_owned(),
        |tried| format!("it tried to allocate {}", torch_size(tried)),
    );
    let on = if oom.gpu.is_empty() { "a GPU".to_owned() } else { format!("GPU {}", name(&oom.gpu)) };
    let operation = match &*oom.component {
        "" => String::new(),
        component => format!(" in {}/{}", name(component), name(&oom.operation)),
    };
    let free = oom.free_bytes.zip(oom.total_bytes);
    let free = free.map_or_else(String::new, |(free, total)| {
        format!(", where {} of {} were free", torch_size(free.min(total)), torch_size(total))
    });
    format!("{tried} on {on}{operation}{free}")
}

/// Returns the cause, and a sentence about what the numbers prove.
fn proven(oom: &CudaOom) -> (Cause, String) {
    match reason(oom) {
        Some(Reason::OwnShare) => (
            Cause::CudaOomOwnShare,
            " The GPU had enough; the process may take only a part of it (set_per_process_memory_fraction)."
                .to_owned(),
        ),
        Some(Reason::Fragmented { pieces }) => (
            Cause::CudaOomFragmented,
            format!(
                " PyTorch's cache had {} in free pieces: with what was free enough, but each too small.",
                torch_size(pieces)
            ),
        ),
        Some(Reason::OwnProcesses { others }) => (
            Cause::CudaOomOwnProcesses,
            format!(
                " Other processes of this container held {} of that GPU: without them this allocation would have fit.",
                bytes(others)
            ),
        ),
        Some(Reason::OtherHolders { others }) => (
            Cause::CudaOomOtherHolder,
            format!(
                " Others held {} of that GPU: without them this allocation would have fit.",
                bytes(others)
            ),
        ),
        Some(Reason::OtherGrowth { growth }) => (
            Cause::CudaOomOtherHolder,
            format!(
                " Others took {} of that GPU in the minutes before: without that this allocation would have fit.",
                bytes(growth)
            ),
        ),
        None if oom.free_bytes.zip(oom.tried_bytes).is_some_and(|(free, tried)| free >= tried) => (
            Cause::CudaOom,
            " That much was free, so these numbers do not say why: memory was freed meanwhile, or another limit applies."
                .to_owned(),
        ),
        None => (Cause::CudaOom, String::new()),
    }
}

fn reason(oom: &CudaOom) -> Option<Reason> {
    let (tried, free) = oom.tried_bytes.zip(oom.free_bytes)?;
    let total = oom.total_bytes.unwrap_or(u64::MAX);
    // what the process may still take
    let remaining = total.saturating_sub(oom.reserved_bytes.unwrap_or(0));
    if free >= tried && remaining < tried {
        return Some(Reason::OwnShare);
    }
    let free = free.min(remaining);
    if free >= tried {
        return None; // neither pieces nor others can be the reason
    }
    let others = others_of(oom, |holder| holder.bytes.unwrap_or(0));
    let growth = others_of(oom, GpuHolder::growth);
    let is_significant = |bytes: u64| bytes as f64 >= MIN_OTHERS * total as f64;
    if is_significant(growth) && free.saturating_add(growth) >= tried {
        return Some(Reason::OtherGrowth { growth });
    }
    // a text has only what is not allocated; whole blocks of it PyTorch has given back before it fails
    let unallocated = oom.reserved_bytes.zip(oom.allocated_bytes);
    let unallocated = unallocated.map(|(reserved, allocated)| reserved.saturating_sub(allocated));
    let pieces = oom.inactive_split_bytes.or(unallocated).unwrap_or(0);
    if pieces > 0 && free.saturating_add(pieces) >= tried {
        return Some(Reason::Fragmented { pieces });
    }
    let own = oom.own_processes.iter().fold(0, |sum: u64, process| sum.saturating_add(process.bytes));
    let suffices = |bytes: u64| is_significant(bytes) && free.saturating_add(bytes) >= tried;
    if own >= others && suffices(own) {
        return Some(Reason::OwnProcesses { others: own });
    }
    suffices(others).then_some(Reason::OtherHolders { others })
}

/// Returns the sum of a figure over the other holders.
fn others_of(oom: &CudaOom, figure: impl Fn(&GpuHolder) -> u64) -> u64 {
    others(oom).map(figure).fold(0, u64::saturating_add)
}

/// Returns who else held memory of that GPU.
fn others(oom: &CudaOom) -> impl Iterator<Item = &GpuHolder> {
    oom.holders.iter().filter(|holder| !holder.own && holder.bytes != Some(0))
}

fn holder_text(holder: &GpuHolder) -> String {
    let held = holder.bytes.map_or_else(|| "unknown".to_owned(), bytes);
    let growth = match holder.growth() {
        0 => String::new(),
        growth => format!(" (+{})", bytes(growth)),
    };
    format!("{} {held}{growth}", name(&holder.name))
}

/// Returns the numbers of the error, as its text has them, and who held the GPU.
pub(super) fn evidence(run: &RunSummary<'_>) -> Vec<Evidence> {
    let Some(oom) = leading(run) else { return vec![] };
    let framework = Some(&*oom.framework).filter(|it| !matches!(*it, "" | "torch" | "other"));
    let who = framework.map(str::to_owned).into_iter().chain(oom.pid.map(|pid| format!("pid {pid}")));
    let who: Vec<String> = who.collect();
    let pid = if who.is_empty() { String::new() } else { format!("{}: ", who.join(", ")) };
    // PyTorch's text has the difference
    let unallocated = oom.reserved_bytes.zip(oom.allocated_bytes);
    let unallocated = unallocated.map(|(reserved, allocated)| reserved.saturating_sub(allocated));
    let of_gpu = vec![("tried", oom.tried_bytes), ("free", oom.free_bytes), ("total", oom.total_bytes)];
    let of_torch = vec![
        ("allocated", oom.allocated_bytes),
        ("reserved", oom.reserved_bytes),
        ("unallocated", unallocated),
        ("inactive split", oom.inactive_split_bytes),
    ];
    let mut lines = Vec::new();
    for (begin, numbers) in [(&*pid, of_gpu), ("", of_torch)] {
        let known = numbers.into_iter().filter_map(|(what, bytes)| Some((what, bytes?)));
        let parts: Vec<_> = known.map(|(what, bytes)| format!("{what} {}", torch_size(bytes))).collect();
        if !parts.is_empty() {
            lines.push(Evidence::new(oom.source.label(), format!("{begin}{}", parts.join(", "))));
        }
    }
    let holders: Vec<_> = oom.holders.iter().take(MAX_HOLDERS).map(holder_text).collect();
    if !holders.is_empty() {
        // a program can take many GiB in a second
        let before = oom.holders_at.map(|read_at| (oom.at - read_at).max(0.0));
        let before = before.map_or_else(String::new, |seconds| format!(", {seconds:.1} s before"));
        lines
            .push(Evidence::new("driver", format!("GPU {}{before}: {}", name(&oom.gpu), holders.join(", "))));
    }
    lines
}

/// Adds what to try with the settings of this run.
pub(super) fn advice(run: &RunSummary<'_>, advice: &mut Vec<String>) {
    let Some(oom) = leading(run) else { return };
    if !oom.snapshot.is_empty() {
        advice.push(format!(
            "See which line of the program holds the memory: open {} of the container at pytorch.org/memory_viz.",
            sanitize_for_terminal(&oom.snapshot)
        ));
    }
    // those at the exit are the latest, and a run that goes on has only those of its error
    let at_exit = run.before(None).map(|before| before.settings.as_slice());
    let settings = at_exit.filter(|settings| !settings.is_empty()).unwrap_or(&oom.settings);
    let setting =
        |wanted: &str| settings.iter().find(|(name, _)| **name == *wanted).map(|(_, value)| &**value);
    let of_reason = advice_of_reason(oom, setting);
    if let Some(lines) = advice_of_framework(&oom.framework) {
        // its users set other things than a batch size
        advice.extend(of_reason.filter(|_| {
            use Reason::{OtherGrowth, OtherHolders, OwnProcesses};
            matches!(reason(oom), Some(OtherHolders { .. } | OtherGrowth { .. } | OwnProcesses { .. }))
        }));
        advice.extend(lines.iter().map(|line| (*line).to_owned()));
        return;
    }
    advice.extend(of_reason);
    let pairs = || settings.iter().map(|(name, value)| (name, value));
    let number = |known: KnownSetting| setting_number(known.find(pairs())?.1);
    if let Some(growth) = oom.growth {
        advice.push(format!(
            "It grew until the error, as a leak does: {}. A smaller batch only delays a leak: look for losses, outputs or lists of tensors that are kept from step to step \
             (loss.item(), .detach()).",
            growth_text(growth.from_bytes, growth.to_bytes, growth.seconds)
        ));
    }
    let is_training = KnownSetting::ALL.iter().any(|known| known.find(pairs()).is_some());
    if !is_training && oom.growth.is_none() {
        // a service has none of these settings, and a training may not tell them
        advice.push(
            "A service: fewer requests at once, shorter inputs, or a cleanup between requests (cleanup_gpu, `memledger cleanup`); models that \
             are loaded again must be freed before."
                .to_owned(),
        );
    }
    match number(KnownSetting::Batch).filter(|batch| *batch > 1 && batch.is_multiple_of(2)) {
        _ if oom.growth.is_some() => {}
        Some(batch) => {
            let steps = number(KnownSetting::Accumulation).unwrap_or(1).max(1);
            let ranks = number(KnownSetting::Devices).unwrap_or(1);
            let of = if ranks > 1 { " in each rank" } else { "" };
            advice.push(format!(
                "Halve the batch size: {}={} {}={} keeps the effective batch of {}{of}.",
                name(&KnownSetting::Batch.word(pairs())),
                batch / 2,
                name(&KnownSetting::Accumulation.word(pairs())),
                steps * 2,
                batch * steps
            ));
        }
        None if !is_training => advice
            .push("A training: a smaller batch size, with gradients accumulated over more steps.".to_owned()),
        None => advice.push("Use a smaller batch size, and accumulate gradients over more steps.".to_owned()),
    }
    if is_validation(&oom.component) || is_validation(&oom.operation) {
        advice.push(
            "It was in a validation: that needs no gradients (torch.no_grad()), and may have a batch size of its own."
                .to_owned(),
        );
    }
    advice.push(
        "Activation checkpointing, a smaller precision or shorter sequences need less memory, too."
            .to_owned(),
    );
    advice.push(format!(
        "Which batch sizes fit, if other runs were measured: memledger advise {}",
        name(&run.subject.identity.name)
    ));
}

/// Returns what to try with a framework whose programs have settings of their own; `None` for trainings.
fn advice_of_framework(framework: &str) -> Option<&'static [&'static str]> {
    Some(match framework {
        "vllm" => &[
            "A smaller --max-model-len or --max-num-seqs needs less KV cache; --kv-cache-dtype fp8 half of it.",
            "If the GPU is free but for vLLM, a larger --gpu-memory-utilization; if others are on it, a smaller one, so that their sum is below 1.",
            "Weights in fewer bits (AWQ, GPTQ, FP8), or more GPUs: --tensor-parallel-size.",
        ],
        "sglang" => &[
            "A larger --mem-fraction-static if the weights leave no room for the KV cache; a smaller --context-length or --max-running-requests.",
        ],
        "ggml" => &[
            "Fewer layers on the GPU (-ngl; num_gpu of ollama), a smaller context (-c; num_ctx), or -ctk q8_0 -ctv q8_0.",
            "A model in fewer bits (Q4_K_M), or OLLAMA_NUM_PARALLEL=1 and OLLAMA_MAX_LOADED_MODELS=1.",
        ],
        "jax" => &[
            "JAX takes 75 % of a GPU at its start: a second program there needs XLA_PYTHON_CLIENT_MEM_FRACTION or XLA_PYTHON_CLIENT_PREALLOCATE=false.",
            "A smaller batch, jax.checkpoint (remat), or donated arguments (donate_argnums).",
        ],
        "tensorflow" => &[
            "TensorFlow takes the whole GPU at its start: tf.config.experimental.set_memory_growth, or a limit, where others are on it.",
            "A smaller batch, mixed precision; TF_GPU_ALLOCATOR=cuda_malloc_async against fragments.",
        ],
        "onnxruntime" => &[
            "gpu_mem_limit and arena_extend_strategy=kSameAsRequested of the CUDA provider; a smaller batch or shorter inputs.",
        ],
        "tensorrt" => &[
            "A smaller workspace (--memPoolSize=workspace:...), a smaller largest profile shape, or another engine for smaller inputs.",
        ],
        "nccl" => &[
            "NCCL needs some hundred MiB on each GPU: something else fills that GPU. Which program holds what: nvidia-smi, the GPU panel of each host.",
            "Each rank on its own GPU (torch.cuda.set_device(local_rank) before the first use of CUDA).",
        ],
        "rapids" | "xgboost" => {
            &["A pool of managed memory (rmm.mr.ManagedMemoryResource), or the data in smaller parts."]
        }
        _ => return None,
    })
}

/// Returns what to try against what the numbers prove.
fn advice_of_reason<'a>(oom: &CudaOom, setting: impl Fn(&str) -> Option<&'a str>) -> Option<String> {
    match reason(oom)? {
        Reason::OwnShare => Some(
            "Raise the share of the GPU that it may take, if the rest is not promised to others.".to_owned(),
        ),
        Reason::Fragmented { .. } => (!allocator::has_expandable_segments(&setting)).then(|| {
            format!(
                "Add expandable_segments:True to {}: PyTorch then joins free pieces of its cache.",
                allocator::variable(&setting)
            )
        }),
        Reason::OwnProcesses { .. } => {
            let process = |process: &OwnGpuProcess| format!("pid {} {}", process.pid, bytes(process.bytes));
            let processes: Vec<_> = oom.own_processes.iter().map(process).collect();
            Some(format!(
                "Give each rank its own GPU (torch.cuda.set_device(local_rank) before the first use of CUDA), and end what is left over or \
                 runs beside it in this container: {}.",
                processes.join(", ")
            ))
        }
        Reason::OtherHolders { .. } | Reason::OtherGrowth { .. } => {
            let names: Vec<_> = others(oom).take(MAX_HOLDERS).map(holder_text).collect();
            Some(format!("Give it a GPU of its own, or end what else is on it: {}.", names.join(", ")))
        }
    }
}

fn is_validation(operation: &str) -> bool {
    let words = operation.split(|letter: char| !letter.is_ascii_alphanumeric());
    words.into_iter().any(|word| VALIDATION.contains(&word.to_ascii_lowercase().as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::HeldGrowth;

    const GIB: u64 = 1 << 30;

    fn oom(tried: u64, free: u64, total: u64, reserved: u64, split: u64, others: u64) -> CudaOom {
        let holder =
            |own, bytes| GpuHolder { name: "x".into(), own, bytes: Some(bytes * GIB), earlier_bytes: None };
        CudaOom {
            tried_bytes: Some(tried * GIB),
            free_bytes: Some(free * GIB),
            total_bytes: Some(total * GIB),
            reserved_bytes: Some(reserved * GIB),
            inactive_split_bytes: Some(split * GIB),
            holders: vec![holder(true, reserved), holder(false, others)],
            ..CudaOom::default()
        }
    }

    #[test]
    fn numbers_prove_no_more_than_they_do() {
        for (tried, free, total, reserved, split, others, wanted) in [
            (20, 2, 12, 10, 6, 0, None),
            (5, 2, 12, 10, 6, 0, Some(Reason::Fragmented { pieces: 6 * GIB })),
            // all of the cache is in whole blocks that torch has given back already
            (5, 2, 12, 10, 0, 0, None),
            (5, 2, 24, 10, 0, 12, Some(Reason::OtherHolders { others: 12 * GIB })),
            (5, 4, 80, 75, 0, 1, None),
            // half of a GPU of 24 GiB
            (1, 11, 12, 12, 0, 0, Some(Reason::OwnShare)),
            (1, 11, 12, 12, 3, 0, Some(Reason::OwnShare)),
            // enough was free without the pieces, and beside the others
            (1, 4, 12, 7, 1, 0, None),
            (1, 4, 12, 2, 0, 6, None),
        ] {
            assert_eq!(
                reason(&oom(tried, free, total, reserved, split, others)),
                wanted,
                "{tried} {free} {total}"
            );
        }
        assert_eq!(reason(&CudaOom { free_bytes: None, ..oom(5, 2, 12, 10, 6, 9) }), None);
        // eight ranks on one GPU
        let own_processes = vec![OwnGpuProcess { pid: 8, bytes: 70 * GIB }];
        let ranks = CudaOom { own_processes, ..oom(2, 1, 80, 9, 0, 0) };
        assert_eq!(reason(&ranks), Some(Reason::OwnProcesses { others: 70 * GIB }));
        let advice = advice_of_reason(&ranks, |_| None).unwrap();
        assert!(advice.contains("its own GPU") && advice.ends_with("pid 8 70.0 GiB."), "{advice}");
        // the text of an error has no split blocks
        let text = |allocated: u64| CudaOom {
            inactive_split_bytes: None,
            allocated_bytes: Some(allocated * GIB),
            ..oom(5, 2, 12, 10, 0, 0)
        };
        assert_eq!(reason(&text(6)), Some(Reason::Fragmented { pieces: 4 * GIB }));
        assert_eq!(reason(&text(8)), None);
        // a neighbour that grew, although the cache has pieces too
        let mut grown = oom(5, 2, 24, 10, 6, 12);
        grown.holders[1].earlier_bytes = Some(8 * GIB);
        assert_eq!(reason(&grown), Some(Reason::OtherGrowth { growth: 4 * GIB }));
        grown.holders[1].earlier_bytes = Some(12 * GIB);
        assert_eq!(reason(&grown), Some(Reason::Fragmented { pieces: 6 * GIB }));
    }

    #[test]
    fn error_that_ended_the_run_is_not_long_before_its_exit() {
        let of = |at: f64, pid: u32, tried: Option<u64>, uncaught: bool| CudaOom {
            at,
            pid: Some(pid),
            tried_bytes: tried,
            uncaught: Some(uncaught),
            ..CudaOom::default()
        };
        let exit = Exit { at: 1_000.0, ..Exit::default() };
        let leads = |ooms: &[CudaOom]| {
            let run = RunSummary {
                subject: &Default::default(),
                kills: vec![],
                exit: Some(&exit),
                cuda_ooms: ooms.iter().collect(),
                unattributed_kills: vec![],
                follows_at_once: false,
                log_time: None,
                lacks_context: false,
            };
            leading(&run).map(|oom| (oom.at, oom.tried_bytes))
        };
        let old = of(10.0, 1, Some(7), true);
        let caught = of(999.0, 2, Some(8), false);
        assert_eq!(
            leads(&[old, caught.clone()]),
            Some((999.0, Some(8))),
            "the old one ended another process"
        );
        assert_eq!(leads(&[of(950.0, 1, Some(7), true), caught]), Some((950.0, Some(7))));
    }

    #[test]
    fn errors_of_the_log_count_only_where_no_process_reports() {
        let of = |source| CudaOom { source, ..CudaOom::default() };
        let (log, reporter) = (of(CudaOomSource::Log), of(CudaOomSource::Reporter));
        assert_eq!(best_source(vec![&log, &reporter, &log]), [&reporter]);
        assert_eq!(best_source(vec![&log, &log]).len(), 2);
    }

    #[test]
    fn advice_names_the_history_of_allocations() {
        let oom = CudaOom { snapshot: "/tmp/memledger-cuda-oom-7.pickle".into(), ..oom(5, 2, 12, 10, 0, 0) };
        let lines = advice_of(&oom);
        assert!(lines[0].contains("open /tmp/memledger-cuda-oom-7.pickle of the container"), "{lines:?}");
    }

    fn advice_of(oom: &CudaOom) -> Vec<String> {
        let run = RunSummary {
            subject: &Default::default(),
            kills: vec![],
            exit: None,
            cuda_ooms: vec![oom],
            unattributed_kills: vec![],
            follows_at_once: false,
            log_time: None,
            lacks_context: false,
        };
        let mut lines = vec![];
        advice(&run, &mut lines);
        lines
    }

    #[test]
    fn program_without_settings_of_a_training_gets_advice_for_a_service() {
        let service = advice_of(&oom(6, 1, 48, 40, 0, 0)).join("\n");
        assert!(
            service.contains("A service: fewer requests at once") && service.contains("A training: "),
            "{service}"
        );
        let settings = vec![("num_workers".into(), "4".into())];
        let training = advice_of(&CudaOom { settings, ..oom(6, 1, 48, 40, 0, 0) }).join("\n");
        assert!(
            !training.contains("A service") && training.contains("Use a smaller batch size"),
            "{training}"
        );
    }

    #[test]
    fn leak_before_the_error_is_named_and_the_batch_is_not_halved() {
        let growth = Some(HeldGrowth { from_bytes: 3 * GIB, to_bytes: 10 * GIB, seconds: 22.0 });
        let settings = vec![("batch_size".into(), "64".into())];
        let lines = advice_of(&CudaOom { growth, settings, ..oom(1, 0, 12, 11, 0, 0) });
        let leak = "It grew until the error, as a leak does: what PyTorch holds between two steps grew from 3.0 GiB to 10.0 GiB in 22 s. A smaller batch only delays a leak";
        assert!(lines.iter().any(|line| line.starts_with(leak)), "{lines:?}");
        assert!(lines.iter().all(|line| !line.contains("Halve")), "{lines:?}");
    }

    #[test]
    fn validation_is_a_word() {
        assert!(is_validation("val") && is_validation("run_eval.loop") && is_validation("Validation"));
        assert!(!is_validation("value_head") && !is_validation("retrieval") && !is_validation("interval"));
    }
}
