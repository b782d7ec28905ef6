//! What an error in a container's log adds to a verdict. A log proves what its program wants: nothing here is certain.

use super::text::bytes;
use super::verdict::OWN_ERROR;
use super::{Cause, Confidence, Verdict};
use crate::container_logs::tail::LoggedError;
use crate::events::{CudaOom, Evidence, ExitReason, LedgerEvent};
use crate::ledger::totals::CudaOomSource;
use crate::parse::log_error::LogError;

/// A runtime reports starts and ends later than a program writes, by so many seconds at most.
const TOLERANCE: f64 = 5.0;
/// Characters of a line that are kept.
const MAX_LINE_CHARS: usize = 300;

/// Adds an error of GPU memory to the events of a container, whose newest end it explains if nothing else does.
pub fn add_cuda_error(events: &mut Vec<LedgerEvent>, found: &LoggedError, container_id: &str) {
    let LogError::Cuda(text) = found.error else { return };
    let newest = events.iter_mut().rev().find_map(|event| match event {
        LedgerEvent::Exit(exit) if *exit.subject.container_id == *container_id => Some(exit),
        _ => None,
    });
    let Some(exit) = newest else { return };
    let is_open = matches!(exit.reason, Some(ExitReason::Error | ExitReason::Unknown | ExitReason::Signal));
    // of this run, and not of one before
    let is_of_run = exit.subject.started.is_none_or(|started| found.at >= started - TOLERANCE)
        && found.at <= exit.at + TOLERANCE;
    if !is_open || !is_of_run {
        return;
    }
    exit.reason = Some(ExitReason::CudaOom);
    let event = CudaOom {
        id: 0,
        at: found.at.min(exit.at),
        subject: exit.subject.clone(),
        pid: None,
        rank: None,
        gpu: text.device.map_or_else(String::new, |device| device.to_string()).into(),
        gpu_uuid: "".into(),
        framework: text.framework.into(),
        source: CudaOomSource::Log.label().into(),
        tried_bytes: text.tried,
        total_bytes: text.total,
        free_bytes: text.free,
        allocated_bytes: text.allocated,
        reserved_bytes: text.reserved,
        inactive_split_bytes: None,
        component: "".into(),
        operation: "".into(),
        uncaught: None,
        skipped: 0,
        holders: vec![],
        holders_at: None,
        settings: vec![],
    };
    let at = events.iter().rposition(|event| matches!(event, LedgerEvent::Exit(_))).unwrap_or(events.len());
    events.insert(at, LedgerEvent::CudaOom(event));
}

/// Adds what the end of the log has to a verdict: the line as evidence, and where the cause was open, the cause.
pub fn add_logged_error(verdict: &mut Verdict, found: Option<&LoggedError>) {
    verdict.advice.retain(|line| !line.contains(" --logs"));
    let Some(found) = found else {
        let read = bytes(crate::container_logs::tail::TAIL_BYTES as u64);
        verdict.also.push(format!("The last {read} of its log have no out-of-memory error that is known."));
        return;
    };
    let line: String = found.line.chars().take(MAX_LINE_CHARS).collect();
    verdict.evidence.push(Evidence::new("log", line));
    let (is_open, cause, text, advice): (bool, _, _, &str) = match found.error {
        LogError::Cuda(_) => return, // in its events
        LogError::Shm => (
            matches!(
                verdict.cause,
                Cause::ErrorExit | Cause::CrashedSignal | Cause::Unknown | Cause::ShmFull
            ),
            Cause::ShmFull,
            "Its log says that shared memory was used up: a write to a full /dev/shm raises SIGBUS.",
            "A larger --shm-size (Compose shm_size; Kubernetes: an emptyDir of medium Memory on /dev/shm), or fewer NUM_WORKERS, or \
             torch.multiprocessing.set_sharing_strategy('file_system').",
        ),
        LogError::HostAllocation => (
            matches!(verdict.cause, Cause::ErrorExit | Cause::CrashedSignal | Cause::Unknown),
            Cause::AllocationFailed,
            "Its log says that an allocation of host memory was refused: nothing was killed.",
            "What refuses memory in place of a kill: ulimit -v, vm.overcommit_memory=2 on the host, or a request that is larger than RAM \
             and swap together (a batch or an array of a wrong shape).",
        ),
        LogError::RayMonitor => (
            matches!(verdict.cause, Cause::ErrorExit | Cause::KilledOutside | Cause::Unknown),
            Cause::KilledByMonitor,
            "Its log says that Ray's memory monitor killed a worker: it acts before the kernel does, at RAY_memory_usage_threshold (0.95) of \
             the memory.",
            "Fewer tasks at once (num_cpus or memory= of a task), more memory, or another threshold: RAY_memory_usage_threshold; \
             RAY_memory_monitor_refresh_ms=0 switches the monitor off, and the kernel kills then.",
        ),
    };
    if is_open {
        (verdict.cause, verdict.confidence) = (cause, Confidence::Likely);
        verdict.what = verdict.what.replacen(OWN_ERROR, ".", 1);
        verdict.also.insert(0, text.to_owned());
        verdict.advice = vec![advice.to_owned()];
    } else {
        verdict.also.push(text.to_owned());
    }
}

/// Returns the first line of a runtime's error, of limited length.
pub(super) fn start_error_text(error: &str) -> String {
    let line = error.split('\n').find(|line| !line.trim().is_empty()).unwrap_or_default();
    name_of_length(line, MAX_LINE_CHARS)
}

fn name_of_length(text: &str, max: usize) -> String {
    let shown = super::printable(text);
    match shown.char_indices().nth(max) {
        Some((end, _)) => format!("{}...", &shown[..end]),
        None => shown,
    }
}

/// Returns what to do about a start that failed.
pub(super) fn start_advice(error: &str) -> Vec<String> {
    const KNOWN: [(&[&str], &str); 7] = [
        (
            &["could not select device driver", "unknown or invalid runtime name: nvidia"],
            "The engine has no NVIDIA runtime: install the NVIDIA Container Toolkit, then nvidia-ctk runtime configure --runtime=docker and \
             restart the engine.",
        ),
        (
            &["driver/library version mismatch"],
            "The driver was updated and its kernel module was not: reboot, or unload and load the nvidia modules.",
        ),
        (
            &["nvidia-container-cli", "nvidia-container-runtime", "libnvidia-ml"],
            "NVIDIA's container runtime could not use the driver: does nvidia-smi work on the host? `memledger doctor` checks it too.",
        ),
        (
            &["executable file not found", "no such file or directory"],
            "The command, its interpreter (the first line of a script), or a mounted file does not exist: check entrypoint, command and volumes.",
        ),
        (
            &["permission denied"],
            "The command is not executable, or may not be read: chmod +x, or another user.",
        ),
        (
            &["port is already allocated", "address already in use"],
            "Another program has that port: ss -ltnp shows it.",
        ),
        (&["no space left on device"], "A disk of the engine is full: df -h, docker system df."),
    ];
    let lower = error.to_lowercase();
    let known = KNOWN.iter().find(|(texts, _)| texts.iter().any(|text| lower.contains(&text.to_lowercase())));
    known.map(|(_, advice)| (*advice).to_owned()).into_iter().collect()
}
