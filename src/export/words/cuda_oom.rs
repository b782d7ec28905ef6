//! What is said of CUDA out-of-memory errors.

use super::Noun;
use super::terms::{name, time};
use crate::diagnose::{CudaOomFinding, CudaOomIncident, CudaOomReason, CudaOomRemedy};
use crate::events::{CudaOom, Evidence, GpuHolder};
use crate::runs::leak::growth_text;
use crate::text::{bytes, lasted, sanitize_for_terminal, torch_size};

/// Maximum number of holders in a line.
const MAX_HOLDERS: usize = 4;

/// Returns the sentence on an end by such an error; `ended` is its begin.
pub(super) fn exit_clause(ended: &str, incident: &CudaOomIncident, noun: Noun) -> String {
    let error = &incident.error;
    let before = match incident.seconds {
        seconds if seconds < 1.0 => "right after".to_owned(),
        seconds => format!("{} after", lasted(seconds)),
    };
    let proof = proof(incident.reason, noun);
    format!("{ended}, {before} a CUDA out-of-memory error: {}.{proof}", attempt(error))
}

/// Returns the sentences on a run that goes on after such an error.
pub(super) fn survived(incident: &CudaOomIncident, noun: Noun) -> String {
    let error = &incident.error;
    format!(
        "At {} a program of {} ran out of GPU memory: {}.{} No end of {} is recorded.",
        time(error.at),
        noun.this(),
        attempt(error),
        proof(incident.reason, noun),
        noun.the()
    )
}

/// Returns the line about errors beside another cause.
pub(super) fn finding(finding: &CudaOomFinding) -> String {
    match finding {
        CudaOomFinding::CudaOoms { count, is_least, last } => {
            let least = if *is_least { "at least " } else { "" };
            let errors = if *count == 1 { "error" } else { "errors" };
            format!(
                "{least}{count} CUDA out-of-memory {errors} of this run, the last at {}: {}.",
                time(last.at),
                attempt(last)
            )
        }
    }
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

/// Returns the sentence on what the numbers prove, after a blank; empty if that is nothing.
fn proof(reason: Option<CudaOomReason>, noun: Noun) -> String {
    let Some(reason) = reason else { return String::new() };
    match reason {
        CudaOomReason::OwnShare => {
            " The GPU had enough; the process may take only a part of it (set_per_process_memory_fraction)."
                .to_owned()
        }
        CudaOomReason::Fragmented { bytes } => format!(
            " PyTorch's cache had {} in free pieces: with what was free enough, but each too small.",
            torch_size(bytes)
        ),
        CudaOomReason::OwnProcesses { bytes: held } => format!(
            " Other processes of {} held {} of that GPU: without them this allocation would have fit.",
            noun.this(),
            bytes(held)
        ),
        CudaOomReason::OtherHolders { bytes: held } => {
            format!(" Others held {} of that GPU: without them this allocation would have fit.", bytes(held))
        }
        CudaOomReason::OtherGrowth { bytes: growth } => format!(
            " Others took {} of that GPU in the minutes before: without that this allocation would have fit.",
            bytes(growth)
        ),
        CudaOomReason::EnoughFree => {
            " That much was free, so these numbers do not say why: memory was freed meanwhile, or another limit applies."
                .to_owned()
        }
    }
}

/// Returns the first holders with what they held: `train 3.0 GiB (+1.0 GiB), other processes unknown`.
fn holders_text(holders: &[GpuHolder]) -> String {
    let text = |holder: &GpuHolder| {
        let held = holder.bytes.map_or_else(|| "unknown".to_owned(), bytes);
        let growth = match holder.growth() {
            0 => String::new(),
            growth => format!(" (+{})", bytes(growth)),
        };
        format!("{} {held}{growth}", name(&holder.name))
    };
    holders.iter().take(MAX_HOLDERS).map(text).collect::<Vec<_>>().join(", ")
}

/// Returns the numbers of the error, as its text has them, and who held the GPU.
pub(super) fn evidence(oom: &CudaOom) -> Vec<Evidence> {
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
    if !oom.holders.is_empty() {
        // a program can take many GiB in a second
        let before = oom.holders_at.map(|read_at| (oom.at - read_at).max(0.0));
        let before = before.map_or_else(String::new, |seconds| format!(", {seconds:.1} s before"));
        let holders = holders_text(&oom.holders);
        lines.push(Evidence::new("driver", format!("GPU {}{before}: {holders}", name(&oom.gpu))));
    }
    lines
}

/// Returns what to try.
pub(super) fn remedy(remedy: &CudaOomRemedy, noun: Noun) -> String {
    let text = match remedy {
        CudaOomRemedy::OpenSnapshot { path } => {
            return format!(
                "See which line of the program holds the memory: open {} of {} at pytorch.org/memory_viz.",
                sanitize_for_terminal(path),
                noun.the()
            );
        }
        CudaOomRemedy::RaiseGpuShare => {
            "Raise the share of the GPU that it may take, if the rest is not promised to others."
        }
        CudaOomRemedy::ExpandableSegments { variable } => {
            return format!(
                "Add expandable_segments:True to {variable}: PyTorch then joins free pieces of its cache."
            );
        }
        CudaOomRemedy::GpuForEachRank { processes } => {
            let processes: Vec<_> =
                processes.iter().map(|it| format!("pid {} {}", it.pid, bytes(it.bytes))).collect();
            return format!(
                "Give each rank its own GPU (torch.cuda.set_device(local_rank) before the first use of CUDA), and end what is left over or \
                 runs beside it in {}: {}.",
                noun.this(),
                processes.join(", ")
            );
        }
        CudaOomRemedy::OwnGpu { holders } => {
            let holders = holders_text(holders);
            return format!("Give it a GPU of its own, or end what else is on it: {holders}.");
        }
        CudaOomRemedy::VllmCache => {
            "A smaller --max-model-len or --max-num-seqs needs less KV cache; --kv-cache-dtype fp8 half of it."
        }
        CudaOomRemedy::VllmUtilization => {
            "If the GPU is free but for vLLM, a larger --gpu-memory-utilization; if others are on it, a smaller one, so that their sum is below 1."
        }
        CudaOomRemedy::VllmWeights => {
            "Weights in fewer bits (AWQ, GPTQ, FP8), or more GPUs: --tensor-parallel-size."
        }
        CudaOomRemedy::SglangFraction => {
            "A larger --mem-fraction-static if the weights leave no room for the KV cache; a smaller --context-length or --max-running-requests."
        }
        CudaOomRemedy::GgmlContext => {
            "Fewer layers on the GPU (-ngl; num_gpu of ollama), a smaller context (-c; num_ctx), or -ctk q8_0 -ctv q8_0."
        }
        CudaOomRemedy::GgmlModels => {
            "A model in fewer bits (Q4_K_M), or OLLAMA_NUM_PARALLEL=1 and OLLAMA_MAX_LOADED_MODELS=1."
        }
        CudaOomRemedy::JaxPreallocation => {
            "JAX takes 75 % of a GPU at its start: a second program there needs XLA_PYTHON_CLIENT_MEM_FRACTION or XLA_PYTHON_CLIENT_PREALLOCATE=false."
        }
        CudaOomRemedy::JaxBatch => {
            "A smaller batch, jax.checkpoint (remat), or donated arguments (donate_argnums)."
        }
        CudaOomRemedy::TensorflowGrowth => {
            "TensorFlow takes the whole GPU at its start: tf.config.experimental.set_memory_growth, or a limit, where others are on it."
        }
        CudaOomRemedy::TensorflowBatch => {
            "A smaller batch, mixed precision; TF_GPU_ALLOCATOR=cuda_malloc_async against fragments."
        }
        CudaOomRemedy::OnnxruntimeArena => {
            "gpu_mem_limit and arena_extend_strategy=kSameAsRequested of the CUDA provider; a smaller batch or shorter inputs."
        }
        CudaOomRemedy::TensorrtWorkspace => {
            "A smaller workspace (--memPoolSize=workspace:...), a smaller largest profile shape, or another engine for smaller inputs."
        }
        CudaOomRemedy::NcclOthers => {
            "NCCL needs some hundred MiB on each GPU: something else fills that GPU. Which program holds what: nvidia-smi, the GPU panel of each host."
        }
        CudaOomRemedy::NcclRanks => {
            "Each rank on its own GPU (torch.cuda.set_device(local_rank) before the first use of CUDA)."
        }
        CudaOomRemedy::ManagedMemory => {
            "A pool of managed memory (rmm.mr.ManagedMemoryResource), or the data in smaller parts."
        }
        CudaOomRemedy::FindLeak { from_bytes, to_bytes, seconds } => {
            return format!(
                "It grew until the error, as a leak does: {}. A smaller batch only delays a leak: look for losses, outputs or lists of tensors that are kept from step to step \
                 (loss.item(), .detach()).",
                growth_text(*from_bytes, *to_bytes, *seconds)
            );
        }
        CudaOomRemedy::ServeLess => {
            "A service: fewer requests at once, shorter inputs, or a cleanup between requests (cleanup_gpu, `memledger cleanup`); models that \
             are loaded again must be freed before."
        }
        CudaOomRemedy::HalveBatch {
            batch_setting,
            batch_size,
            steps_setting,
            steps,
            effective_batch_size,
            of_each_rank,
        } => {
            let of = if *of_each_rank { " in each rank" } else { "" };
            let (batch, accumulation) = (name(batch_setting), name(steps_setting));
            return format!(
                "Halve the batch size: {batch}={batch_size} {accumulation}={steps} keeps the effective batch of {effective_batch_size}{of}."
            );
        }
        CudaOomRemedy::SmallerBatchOfTraining => {
            "A training: a smaller batch size, with gradients accumulated over more steps."
        }
        CudaOomRemedy::SmallerBatch => "Use a smaller batch size, and accumulate gradients over more steps.",
        CudaOomRemedy::ValidateWithoutGradients => {
            "It was in a validation: that needs no gradients (torch.no_grad()), and may have a batch size of its own."
        }
        CudaOomRemedy::NeedLess => {
            "Activation checkpointing, a smaller precision or shorter sequences need less memory, too."
        }
        CudaOomRemedy::FittingBatchSizes { container } => {
            let container = name(container);
            return format!(
                "Which batch sizes fit, if other runs were measured: memledger advise {container}"
            );
        }
    };
    text.to_owned()
}
