//! What an error in a container's log adds to a verdict. A log proves what its program wants: nothing here is certain.

use super::text::{bytes, time};
use super::verdict::{OWN_ERROR, SIGKILL_STATUS};
use super::{Cause, Confidence, Verdict, is_cuda_oom};
use crate::container_logs::tail::LoggedError;
use crate::events::{CudaOom, Evidence, ExitReason, LedgerEvent};
use crate::ledger::totals::CudaOomSource;
use crate::parse::log_error::LogError;

/// A runtime reports starts and ends later than a program writes, by so many seconds at most.
const TOLERANCE: f64 = 5.0;
/// An error so many seconds before an end is no cause of it.
const MAX_AGE: f64 = 600.0;
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
    // an error of GPU memory sends no SIGKILL, and a kill that may have ended the run is the nearer cause
    let is_open = matches!(exit.reason, Some(ExitReason::Error | ExitReason::Unknown | ExitReason::Signal))
        && exit.exit_code != Some(SIGKILL_STATUS)
        && exit.may_be.is_empty();
    // of this run, and not of one before
    let is_of_run = exit.subject.started.is_none_or(|started| found.at >= started - TOLERANCE)
        && (-TOLERANCE..=MAX_AGE).contains(&(exit.at - found.at));
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
        gpu: "".into(), // the program's number of the device is not the host's
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
        own_processes: vec![],
        holders_at: None,
        snapshot: "".into(),
        settings: vec![],
    };
    let at = events.iter().rposition(|event| matches!(event, LedgerEvent::Exit(_))).unwrap_or(events.len());
    events.insert(at, LedgerEvent::CudaOom(event));
}

/// Adds what the end of the log has to a verdict: the line as evidence, and where the cause was open, the cause.
pub fn add_logged_error(verdict: &mut Verdict, found: Option<&LoggedError>) {
    verdict.advice.retain(|line| line != &super::advice::look_into_log(verdict.subject.as_ref()));
    let Some(found) = found else {
        let read = bytes(crate::container_logs::tail::TAIL_BYTES as u64);
        verdict.also.push(format!("The last {read} of its log have no out-of-memory error that is known."));
        return;
    };
    let started = verdict.subject.as_ref().and_then(|subject| subject.started);
    let is_near = verdict.at.is_some_and(|at| (-TOLERANCE..=MAX_AGE).contains(&(at - found.at)));
    if !is_near || started.is_some_and(|started| found.at < started - TOLERANCE) {
        verdict.also.push(format!(
            "The last out-of-memory error in its log is of {}, not of this end.",
            time(found.at)
        ));
        return;
    }
    let line: String = found.line.chars().take(MAX_LINE_CHARS).collect();
    verdict.evidence.push(Evidence::new("log", line));
    let (is_open, cause, text, advice): (bool, _, _, &str) = match found.error {
        LogError::Cuda(_) if is_cuda_oom(verdict.cause) => return, // in its events
        LogError::Cuda(_) => {
            verdict.also.push(format!("Its log has an error of GPU memory at {}.", time(found.at)));
            return;
        }
        LogError::Shm => (
            matches!(verdict.cause, Cause::ErrorExit | Cause::CrashedSignal | Cause::ShmFull),
            Cause::ShmFull,
            "Its log has an error that is typical of a full /dev/shm: a write to a full one raises SIGBUS.",
            "A larger --shm-size (Compose shm_size; Kubernetes: an emptyDir of medium Memory on /dev/shm), or fewer NUM_WORKERS, or \
             torch.multiprocessing.set_sharing_strategy('file_system').",
        ),
        LogError::HostAllocation => (
            matches!(verdict.cause, Cause::ErrorExit | Cause::CrashedSignal),
            Cause::AllocationFailed,
            "Its log has an allocation of host memory that failed: no kill of this run is recorded.",
            "What refuses memory in place of a kill: ulimit -v or -l, vm.overcommit_memory=2 on the host, or a request that is larger than RAM \
             and swap together (a batch or an array of a wrong shape).",
        ),
        LogError::RayMonitor => (
            matches!(verdict.cause, Cause::ErrorExit),
            Cause::KilledByMonitor,
            "Its log has a worker that Ray's memory monitor killed: it acts before the kernel does, at RAY_memory_usage_threshold (0.95) of \
             the memory.",
            "Fewer tasks at once (num_cpus or memory= of a task), more memory, or another threshold: RAY_memory_usage_threshold; \
             RAY_memory_monitor_refresh_ms=0 switches the monitor off, and the kernel kills then.",
        ),
    };
    // a kill of an unknown container may have been the cause
    if is_open && verdict.confidence != Confidence::Unsure {
        (verdict.cause, verdict.confidence) = (cause, Confidence::Likely);
        verdict.what = verdict.what.replacen(OWN_ERROR, ".", 1);
        verdict.also.insert(0, text.to_owned());
        verdict.advice = vec![advice.to_owned()];
    } else {
        verdict.also.push(text.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::Exit;
    use crate::parse::cuda_oom::CudaOomText;

    #[test]
    fn an_error_of_gpu_memory_explains_only_an_end_that_nothing_else_may_explain() {
        let reason_of = |exit_code, may_be: &[u64]| {
            let reason = Some(ExitReason::Unknown);
            let exit = Exit { at: 1_000.0, reason, exit_code, may_be: may_be.to_vec(), ..Exit::default() };
            let mut events = vec![LedgerEvent::Exit(exit)];
            let error = LogError::Cuda(CudaOomText { framework: "torch", ..CudaOomText::default() });
            add_cuda_error(&mut events, &LoggedError { at: 990.0, error, line: String::new() }, "");
            let Some(LedgerEvent::Exit(exit)) = events.pop() else { panic!("no exit") };
            (exit.reason, events.len())
        };
        for exit_code in [None, Some(1), Some(134)] {
            assert_eq!(reason_of(exit_code, &[]), (Some(ExitReason::CudaOom), 1), "{exit_code:?}");
        }
        assert_eq!(reason_of(Some(137), &[]), (Some(ExitReason::Unknown), 0));
        assert_eq!(reason_of(Some(1), &[7]), (Some(ExitReason::Unknown), 0));
    }
}
