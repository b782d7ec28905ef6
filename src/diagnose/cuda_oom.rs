//! CUDA out-of-memory errors of a run: which of them ended it, and what their numbers prove.

use serde::Serialize;

use super::RunSummary;
use super::cause::{Cause, Confidence};
use crate::events::{CudaOom, CudaOomSource, Exit, GpuHolder, OwnGpuProcess};
use crate::lifecycle::timing::{CUDA_OOM_WINDOW, MAX_UNCAUGHT_AGE};
use crate::runs::setting_names::KnownSetting;
use crate::runs::{allocator, setting_number};

/// Others that hold less of the GPU than this share are not named: each program on it needs some memory.
const MIN_OTHERS: f64 = 0.05;
/// Words in the name of an operation of which no gradients are needed.
const VALIDATION: [&str; 6] = ["val", "valid", "validate", "validation", "eval", "evaluation"];

/// An error of GPU memory that ended a run, or that it survived.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CudaOomIncident {
    /// Its event.
    pub error: Box<CudaOom>,
    /// Seconds from it to the end; 0 without an end.
    pub seconds: f64,
    /// What its numbers prove.
    #[serde(flatten)]
    pub reason: Option<CudaOomReason>,
}

/// What the numbers of an error prove beyond that the program needed more than there was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum CudaOomReason {
    /// The GPU had enough, but the process may take only a part of it.
    OwnShare,
    /// Free pieces in PyTorch's own cache would have sufficed together with what was free.
    Fragmented {
        /// The pieces.
        bytes: u64,
    },
    /// What other processes of the container held would have sufficed together with what was free.
    OwnProcesses {
        /// What they held.
        bytes: u64,
    },
    /// What others held would have sufficed together with what was free.
    OtherHolders {
        /// What they held.
        bytes: u64,
    },
    /// What others took in the minutes before would have sufficed together with what was free.
    OtherGrowth {
        /// What they took.
        bytes: u64,
    },
    /// Nothing: that much was free.
    EnoughFree,
}

/// A fact of errors of GPU memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "finding", rename_all = "snake_case")]
pub enum CudaOomFinding {
    /// The run had some, beside another cause.
    CudaOoms {
        /// How many.
        count: u64,
        /// There may have been more.
        is_least: bool,
        /// The last one.
        last: Box<CudaOom>,
    },
}

/// What to try against an error of GPU memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "remedy", rename_all = "snake_case")]
pub enum CudaOomRemedy {
    /// Look at PyTorch's history of allocations.
    OpenSnapshot {
        /// Where it is in the container.
        path: String,
    },
    /// Raise the share of the GPU that the process may take.
    RaiseGpuShare,
    /// Let PyTorch join free pieces of its cache.
    ExpandableSegments {
        /// The variable of the environment.
        variable: &'static str,
    },
    /// Give each rank its own GPU, and end other processes of the container.
    GpuForEachRank {
        /// These processes.
        processes: Vec<OwnGpuProcess>,
    },
    /// Give it a GPU of its own, or end what else is on it.
    OwnGpu {
        /// What else is on it.
        holders: Vec<GpuHolder>,
    },
    /// vLLM: less KV cache.
    VllmCache,
    /// vLLM: another share of the GPU.
    VllmUtilization,
    /// vLLM: smaller weights, or more GPUs.
    VllmWeights,
    /// SGLang: other shares of the GPU.
    SglangFraction,
    /// llama.cpp, ollama: fewer layers, or a smaller context.
    GgmlContext,
    /// llama.cpp, ollama: smaller or fewer models.
    GgmlModels,
    /// JAX: take less of the GPU at the start.
    JaxPreallocation,
    /// JAX: a smaller batch, less that is kept.
    JaxBatch,
    /// TensorFlow: take less of the GPU at the start.
    TensorflowGrowth,
    /// TensorFlow: a smaller batch, smaller numbers.
    TensorflowBatch,
    /// ONNX Runtime: a smaller arena.
    OnnxruntimeArena,
    /// TensorRT: a smaller workspace.
    TensorrtWorkspace,
    /// NCCL: find what fills the GPU.
    NcclOthers,
    /// NCCL: each rank on its own GPU.
    NcclRanks,
    /// RAPIDS, XGBoost: managed memory.
    ManagedMemory,
    /// Look for a leak: what it held grew until the error.
    FindLeak {
        /// What PyTorch held at first.
        from_bytes: u64,
        /// What it held at last.
        to_bytes: u64,
        /// Seconds between the two.
        seconds: f64,
    },
    /// Of a service: less at once.
    ServeLess,
    /// Halve the batch size, and accumulate gradients over more steps.
    HalveBatch {
        /// The setting of the batch size.
        batch_setting: String,
        /// Half of its value.
        batch_size: u64,
        /// The setting of the steps over which gradients are accumulated.
        steps_setting: String,
        /// Twice its value.
        steps: u64,
        /// The effective batch size, which stays.
        effective_batch_size: u64,
        /// There are several ranks, and these are the numbers of one.
        of_each_rank: bool,
    },
    /// Use a smaller batch and accumulate gradients, if it is a training.
    SmallerBatchOfTraining,
    /// Use a smaller batch, and accumulate gradients.
    SmallerBatch,
    /// No gradients in a validation.
    ValidateWithoutGradients,
    /// Recompute activations, smaller numbers, shorter sequences.
    NeedLess,
    /// See which batch sizes fit.
    FittingBatchSizes {
        /// Name of the container.
        container: String,
    },
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
pub(super) fn leading<'a>(run: &RunSummary<'a>) -> Option<&'a CudaOom> {
    let ended_it = |oom: &&&CudaOom| {
        oom.uncaught == Some(true) && run.exit.is_some_and(|exit| exit.at - oom.at <= MAX_UNCAUGHT_AGE)
    };
    run.cuda_ooms.iter().rev().find(ended_it).or(run.cuda_ooms.last()).copied()
}

/// Returns the cause of an exit after such an error, and what happened; `None` if its event is not in the ledger (any more).
pub(super) fn of_exit(exit: &Exit, run: &RunSummary<'_>) -> Option<(Cause, Confidence, CudaOomIncident)> {
    let oom = leading(run)?;
    let incident = CudaOomIncident::of(oom, exit.at - oom.at);
    let is_certain = oom.uncaught == Some(true) && incident.seconds < CUDA_OOM_WINDOW;
    let confidence = if is_certain { Confidence::Certain } else { Confidence::Likely };
    let cause = match incident.reason {
        Some(CudaOomReason::OwnShare) => Cause::CudaOomOwnShare,
        Some(CudaOomReason::Fragmented { .. }) => Cause::CudaOomFragmented,
        Some(CudaOomReason::OwnProcesses { .. }) => Cause::CudaOomOwnProcesses,
        Some(CudaOomReason::OtherHolders { .. } | CudaOomReason::OtherGrowth { .. }) => {
            Cause::CudaOomOtherHolder
        }
        Some(CudaOomReason::EnoughFree) | None => Cause::CudaOom,
    };
    Some((cause, confidence, incident))
}

/// Returns the cause of a run that goes on after such errors, and what happened.
pub(super) fn survived(run: &RunSummary<'_>) -> Option<(Cause, Confidence, CudaOomIncident)> {
    let oom = leading(run)?;
    // a program can write anything into its log
    let is_reported = oom.source != CudaOomSource::Log;
    let confidence = if is_reported { Confidence::Certain } else { Confidence::Likely };
    Some((Cause::CudaOomSurvived, confidence, CudaOomIncident::of(oom, 0.0)))
}

/// Returns the errors beside another cause.
pub(super) fn also(run: &RunSummary<'_>) -> Option<CudaOomFinding> {
    let last = Box::new((*run.cuda_ooms.last()?).clone());
    let count =
        run.cuda_ooms.iter().fold(0_u64, |sum, oom| sum.saturating_add(oom.skipped).saturating_add(1));
    // what came after the last event is in none
    let is_least = run.cuda_ooms.iter().any(|oom| oom.skipped > 0);
    Some(CudaOomFinding::CudaOoms { count, is_least, last })
}

impl CudaOomIncident {
    /// Returns what is known of this error, so many seconds before the end.
    fn of(oom: &CudaOom, seconds: f64) -> Self {
        Self { error: Box::new(oom.clone()), seconds, reason: reason(oom) }
    }
}

fn reason(oom: &CudaOom) -> Option<CudaOomReason> {
    let (tried, free) = oom.tried_bytes.zip(oom.free_bytes)?;
    let total = oom.total_bytes.unwrap_or(u64::MAX);
    // what the process may still take
    let remaining = total.saturating_sub(oom.reserved_bytes.unwrap_or(0));
    if free >= tried {
        // neither pieces nor others can be the reason
        let is_own_share = remaining < tried;
        return Some(if is_own_share { CudaOomReason::OwnShare } else { CudaOomReason::EnoughFree });
    }
    let free = free.min(remaining);
    let others = others_of(oom, |holder| holder.bytes.unwrap_or(0));
    let growth = others_of(oom, GpuHolder::growth);
    let is_significant = |bytes: u64| bytes as f64 >= MIN_OTHERS * total as f64;
    if is_significant(growth) && free.saturating_add(growth) >= tried {
        return Some(CudaOomReason::OtherGrowth { bytes: growth });
    }
    // a text has only what is not allocated; whole blocks of it PyTorch has given back before it fails
    let unallocated = oom.reserved_bytes.zip(oom.allocated_bytes);
    let unallocated = unallocated.map(|(reserved, allocated)| reserved.saturating_sub(allocated));
    let pieces = oom.inactive_split_bytes.or(unallocated).unwrap_or(0);
    if pieces > 0 && free.saturating_add(pieces) >= tried {
        return Some(CudaOomReason::Fragmented { bytes: pieces });
    }
    let own = oom.own_processes.iter().fold(0, |sum: u64, process| sum.saturating_add(process.bytes));
    let suffices = |bytes: u64| is_significant(bytes) && free.saturating_add(bytes) >= tried;
    if own >= others && suffices(own) {
        return Some(CudaOomReason::OwnProcesses { bytes: own });
    }
    suffices(others).then_some(CudaOomReason::OtherHolders { bytes: others })
}

/// Returns the sum of a figure over the other holders.
fn others_of(oom: &CudaOom, figure: impl Fn(&GpuHolder) -> u64) -> u64 {
    others(oom).map(figure).fold(0, u64::saturating_add)
}

/// Returns who else held memory of that GPU.
fn others(oom: &CudaOom) -> impl Iterator<Item = &GpuHolder> {
    oom.holders.iter().filter(|holder| !holder.own && holder.bytes != Some(0))
}

/// Returns what to try with the settings of this run.
pub(super) fn advice(run: &RunSummary<'_>) -> Vec<CudaOomRemedy> {
    let Some(oom) = leading(run) else { return vec![] };
    let mut advice = Vec::new();
    if !oom.snapshot.is_empty() {
        advice.push(CudaOomRemedy::OpenSnapshot { path: oom.snapshot.to_string() });
    }
    // those at the exit are the latest, and a run that goes on has only those of its error
    let at_exit = run.before(None).map(|before| before.settings.as_slice());
    let settings = at_exit.filter(|settings| !settings.is_empty()).unwrap_or(&oom.settings);
    let setting =
        |wanted: &str| settings.iter().find(|(name, _)| **name == *wanted).map(|(_, value)| &**value);
    let of_reason = advice_of_reason(oom, setting);
    let of_framework = advice_of_framework(&oom.framework);
    if !of_framework.is_empty() {
        // its users set other things than a batch size
        let is_of_others = |remedy: &CudaOomRemedy| {
            matches!(remedy, CudaOomRemedy::GpuForEachRank { .. } | CudaOomRemedy::OwnGpu { .. })
        };
        advice.extend(of_reason.filter(is_of_others));
        advice.extend(of_framework);
        return advice;
    }
    advice.extend(of_reason);
    let pairs = || settings.iter().map(|(name, value)| (name, value));
    let number = |known: KnownSetting| setting_number(known.find(pairs())?.1);
    advice.extend(oom.growth.map(|growth| CudaOomRemedy::FindLeak {
        from_bytes: growth.from_bytes,
        to_bytes: growth.to_bytes,
        seconds: growth.seconds,
    }));
    let is_training = KnownSetting::ALL.iter().any(|known| known.find(pairs()).is_some());
    if !is_training && oom.growth.is_none() {
        // a service has none of these settings, and a training may not tell them
        advice.push(CudaOomRemedy::ServeLess);
    }
    match number(KnownSetting::Batch).filter(|batch| *batch > 1 && batch.is_multiple_of(2)) {
        _ if oom.growth.is_some() => {}
        Some(batch) => {
            let steps = number(KnownSetting::Accumulation).unwrap_or(1).max(1);
            advice.push(CudaOomRemedy::HalveBatch {
                batch_setting: KnownSetting::Batch.word(pairs()),
                batch_size: batch / 2,
                steps_setting: KnownSetting::Accumulation.word(pairs()),
                steps: steps * 2,
                effective_batch_size: batch * steps,
                of_each_rank: number(KnownSetting::Devices).unwrap_or(1) > 1,
            });
        }
        None if !is_training => advice.push(CudaOomRemedy::SmallerBatchOfTraining),
        None => advice.push(CudaOomRemedy::SmallerBatch),
    }
    if is_validation(&oom.component) || is_validation(&oom.operation) {
        advice.push(CudaOomRemedy::ValidateWithoutGradients);
    }
    advice.push(CudaOomRemedy::NeedLess);
    let container = run.subject.identity.name.to_string();
    advice.push(CudaOomRemedy::FittingBatchSizes { container });
    advice
}

/// Returns what to try with a framework whose programs have settings of their own; nothing for trainings.
fn advice_of_framework(framework: &str) -> Vec<CudaOomRemedy> {
    match framework {
        "vllm" => {
            vec![CudaOomRemedy::VllmCache, CudaOomRemedy::VllmUtilization, CudaOomRemedy::VllmWeights]
        }
        "sglang" => vec![CudaOomRemedy::SglangFraction],
        "ggml" => vec![CudaOomRemedy::GgmlContext, CudaOomRemedy::GgmlModels],
        "jax" => vec![CudaOomRemedy::JaxPreallocation, CudaOomRemedy::JaxBatch],
        "tensorflow" => vec![CudaOomRemedy::TensorflowGrowth, CudaOomRemedy::TensorflowBatch],
        "onnxruntime" => vec![CudaOomRemedy::OnnxruntimeArena],
        "tensorrt" => vec![CudaOomRemedy::TensorrtWorkspace],
        "nccl" => vec![CudaOomRemedy::NcclOthers, CudaOomRemedy::NcclRanks],
        "rapids" | "xgboost" => vec![CudaOomRemedy::ManagedMemory],
        _ => vec![],
    }
}

/// Returns what to try against what the numbers prove.
fn advice_of_reason<'a>(oom: &CudaOom, setting: impl Fn(&str) -> Option<&'a str>) -> Option<CudaOomRemedy> {
    match reason(oom)? {
        CudaOomReason::OwnShare => Some(CudaOomRemedy::RaiseGpuShare),
        CudaOomReason::Fragmented { .. } => (!allocator::has_expandable_segments(&setting))
            .then(|| CudaOomRemedy::ExpandableSegments { variable: allocator::variable(&setting) }),
        CudaOomReason::OwnProcesses { .. } => {
            Some(CudaOomRemedy::GpuForEachRank { processes: oom.own_processes.clone() })
        }
        CudaOomReason::OtherHolders { .. } | CudaOomReason::OtherGrowth { .. } => {
            Some(CudaOomRemedy::OwnGpu { holders: others(oom).cloned().collect() })
        }
        CudaOomReason::EnoughFree => None,
    }
}

fn is_validation(operation: &str) -> bool {
    let words = operation.split(|letter: char| !letter.is_ascii_alphanumeric());
    words.into_iter().any(|word| VALIDATION.contains(&word.to_ascii_lowercase().as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{ContainerRef, HeldGrowth};

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
            (5, 2, 12, 10, 6, 0, Some(CudaOomReason::Fragmented { bytes: 6 * GIB })),
            // all of the cache is in whole blocks that torch has given back already
            (5, 2, 12, 10, 0, 0, None),
            (5, 2, 24, 10, 0, 12, Some(CudaOomReason::OtherHolders { bytes: 12 * GIB })),
            (5, 4, 80, 75, 0, 1, None),
            // half of a GPU of 24 GiB
            (1, 11, 12, 12, 0, 0, Some(CudaOomReason::OwnShare)),
            (1, 11, 12, 12, 3, 0, Some(CudaOomReason::OwnShare)),
            // enough was free without the pieces, and beside the others
            (1, 4, 12, 7, 1, 0, Some(CudaOomReason::EnoughFree)),
            (1, 4, 12, 2, 0, 6, Some(CudaOomReason::EnoughFree)),
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
        let ranks = CudaOom { own_processes: own_processes.clone(), ..oom(2, 1, 80, 9, 0, 0) };
        assert_eq!(reason(&ranks), Some(CudaOomReason::OwnProcesses { bytes: 70 * GIB }));
        let for_each = CudaOomRemedy::GpuForEachRank { processes: own_processes };
        assert_eq!(advice_of_reason(&ranks, |_| None), Some(for_each));
        // the text of an error has no split blocks
        let text = |allocated: u64| CudaOom {
            inactive_split_bytes: None,
            allocated_bytes: Some(allocated * GIB),
            ..oom(5, 2, 12, 10, 0, 0)
        };
        assert_eq!(reason(&text(6)), Some(CudaOomReason::Fragmented { bytes: 4 * GIB }));
        assert_eq!(reason(&text(8)), None);
        // a neighbour that grew, although the cache has pieces too
        let mut grown = oom(5, 2, 24, 10, 6, 12);
        grown.holders[1].earlier_bytes = Some(8 * GIB);
        assert_eq!(reason(&grown), Some(CudaOomReason::OtherGrowth { bytes: 4 * GIB }));
        grown.holders[1].earlier_bytes = Some(12 * GIB);
        assert_eq!(reason(&grown), Some(CudaOomReason::Fragmented { bytes: 6 * GIB }));
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
            let subject = Default::default();
            let run = RunSummary {
                exit: Some(&exit),
                cuda_ooms: ooms.iter().collect(),
                ..RunSummary::of_kills(&subject, vec![])
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
        let path = oom.snapshot.to_string();
        assert_eq!(advice_of(&oom)[0], CudaOomRemedy::OpenSnapshot { path });
    }

    fn advice_of(oom: &CudaOom) -> Vec<CudaOomRemedy> {
        advice(&RunSummary { cuda_ooms: vec![oom], ..RunSummary::of_kills(&ContainerRef::default(), vec![]) })
    }

    #[test]
    fn program_without_settings_of_a_training_gets_advice_for_a_service() {
        use CudaOomRemedy::{FittingBatchSizes, NeedLess, ServeLess, SmallerBatch, SmallerBatchOfTraining};
        let fitting = FittingBatchSizes { container: String::new() };
        let service = advice_of(&oom(6, 1, 48, 40, 0, 0));
        assert_eq!(service, [ServeLess, SmallerBatchOfTraining, NeedLess, fitting.clone()]);
        let settings = vec![("num_workers".into(), "4".into())];
        let training = advice_of(&CudaOom { settings, ..oom(6, 1, 48, 40, 0, 0) });
        assert_eq!(training, [SmallerBatch, NeedLess, fitting]);
    }

    #[test]
    fn leak_before_the_error_is_named_and_the_batch_is_not_halved() {
        let growth = Some(HeldGrowth { from_bytes: 3 * GIB, to_bytes: 10 * GIB, seconds: 22.0 });
        let settings = vec![("batch_size".into(), "64".into())];
        let remedies = advice_of(&CudaOom { growth, settings, ..oom(1, 0, 12, 11, 0, 0) });
        let leak = CudaOomRemedy::FindLeak { from_bytes: 3 * GIB, to_bytes: 10 * GIB, seconds: 22.0 };
        let fitting = CudaOomRemedy::FittingBatchSizes { container: String::new() };
        assert_eq!(remedies, [leak, CudaOomRemedy::NeedLess, fitting]);
    }

    #[test]
    fn validation_is_a_word() {
        assert!(is_validation("val") && is_validation("run_eval.loop") && is_validation("Validation"));
        assert!(!is_validation("value_head") && !is_validation("retrieval") && !is_validation("interval"));
    }
}
