//! What an error in a container's log adds to a verdict. A log proves what its program wants: nothing here is certain.

use super::text::time;
use super::{Cause, Confidence, Verdict, is_cuda_oom};
use crate::container_logs::tail::LoggedError;
use crate::events::{CudaOom, CudaOomSource, Evidence, ExitReason, LedgerEvent};
use crate::ledger::run::{SIGINT_STATUS, SIGKILL_STATUS};
use crate::lifecycle::timing::{LOG_TOLERANCE, MAX_LOGGED_AGE};
use crate::parse::log_error::{
    HostError, HostErrorText, LogError, MemoryMonitor, ProgramLimit, RefusedMemory,
};
use crate::text::bytes;

/// Seconds from an error that ends a program to its end.
const MAX_CAUSE_AGE: f64 = 60.0;
/// Characters of a line that are kept.
const MAX_LINE_CHARS: usize = 300;

/// Id of an error that is read from a log on request: it is in no ledger.
pub(super) const UNRECORDED: u64 = 0;

/// Adds an error of GPU memory to the events of a container, whose newest end it explains if nothing else does. The reason of that end
/// stays the one that the ledger decided; if that has read the log, the cause too.
pub fn add_cuda_error(events: &mut Vec<LedgerEvent>, found: &LoggedError, container_id: &str) {
    let LogError::Cuda(text) = found.error else { return };
    let newest = events.iter().rev().find_map(|event| match event {
        LedgerEvent::Exit(exit) if *exit.subject.container_id == *container_id => Some(exit),
        _ => None,
    });
    let Some(exit) = newest else { return };
    // an error of GPU memory sends no SIGKILL, and a kill that may have ended the run is the nearer cause
    let is_open = matches!(exit.reason, Some(ExitReason::Error | ExitReason::Unknown | ExitReason::Signal))
        && exit.exit_code != Some(SIGKILL_STATUS)
        && exit.may_be.is_empty();
    // of this run, and not of one before
    let is_of_run = |at: f64| exit.subject.started.is_none_or(|started| at >= started - LOG_TOLERANCE);
    let is_near = (-LOG_TOLERANCE..=MAX_LOGGED_AGE).contains(&(exit.at - found.at));
    let is_of_ledger = |event: &LedgerEvent| match event {
        LedgerEvent::CudaOom(oom) => {
            oom.source == CudaOomSource::Log
                && oom.subject.container_id == exit.subject.container_id
                && is_of_run(oom.at)
        }
        _ => false,
    };
    if !is_open || !is_of_run(found.at) || !is_near || events.iter().any(is_of_ledger) {
        return;
    }
    let event = CudaOom {
        growth: None,
        id: UNRECORDED,
        at: found.at.min(exit.at),
        subject: exit.subject.clone(),
        pid: None,
        rank: None,
        gpu: "".into(), // the program's number of the device is not the host's
        gpu_uuid: "".into(),
        framework: text.framework.into(),
        source: CudaOomSource::Log,
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

/// Removes the advice to read the log, which was just read.
pub fn remove_log_advice(verdict: &mut Verdict) {
    verdict.advice.retain(|line| line != &super::advice::look_into_log(verdict.subject.as_ref()));
}

/// Adds what the end of the log has to a verdict: the line as evidence, and where the cause was open, the cause.
pub fn add_logged_error(verdict: &mut Verdict, found: Option<&LoggedError>) {
    remove_log_advice(verdict);
    let Some(found) = found else {
        let read = bytes(crate::container_logs::tail::TAIL_BYTES as u64);
        verdict.also.push(format!("The last {read} of its log have no out-of-memory error that is known."));
        return;
    };
    let started = verdict.subject.as_ref().and_then(|subject| subject.started);
    let line: String = found.line.chars().take(MAX_LINE_CHARS).collect();
    if verdict.at.is_none() {
        return add_error_without_end(verdict, found, started, line);
    }
    let is_near = verdict.at.is_some_and(|at| (-LOG_TOLERANCE..=MAX_LOGGED_AGE).contains(&(at - found.at)));
    if !is_near || started.is_some_and(|started| found.at < started - LOG_TOLERANCE) {
        verdict.also.push(format!(
            "The last out-of-memory error in its log is of {}, not of this end: {line:?}",
            time(found.at)
        ));
        return;
    }
    verdict.evidence.push(Evidence::new("log", line));
    let LogError::Host(error) = found.error else {
        // one that ended it is in its events
        if !is_cuda_oom(verdict.cause) {
            verdict.also.push(format!("Its log has an error of GPU memory at {}.", time(found.at)));
        }
        return;
    };
    let ErrorExplanation { causes, cause, text, .. } = explained(error.error);
    // a program that survived it, or gave up later, has another reason: only workers are replaced for a while
    let is_monitor = matches!(error.error, HostError::Monitor(_));
    let is_recent = is_monitor || verdict.at.is_some_and(|at| at - found.at <= MAX_CAUSE_AGE);
    // numpy ends with KeyboardInterrupt where OpenBLAS gets no thread
    let is_other_signal = verdict.cause == Cause::EndedBySignal && verdict.exit_code != Some(SIGINT_STATUS);
    let is_open = causes.contains(&verdict.cause) && is_recent && !is_other_signal;
    // a kill of an unknown container may have been the cause
    if is_open && verdict.confidence != Confidence::Unsure {
        explain_by(verdict, error);
    } else if verdict.cause != cause {
        verdict.also.push(with_size(text, error));
    }
}

/// Makes an error in the log the cause of an end.
pub(super) fn explain_by(verdict: &mut Verdict, error: HostErrorText) {
    let ErrorExplanation { cause, headline, text, advice, .. } = explained(error.error);
    (verdict.cause, verdict.confidence) = (cause, Confidence::Likely);
    verdict.headline = headline.map(str::to_owned);
    if let Some(ended) = &verdict.ended {
        verdict.what = format!("{ended}.");
    }
    verdict.also.insert(0, with_size(text, error));
    verdict.advice = vec![advice.to_owned()];
}

/// Adds an error in the log of a container that runs, or of whose end nothing is known.
fn add_error_without_end(verdict: &mut Verdict, found: &LoggedError, started: Option<f64>, line: String) {
    let at = time(found.at);
    if started.is_some_and(|started| found.at < started - LOG_TOLERANCE) {
        verdict
            .also
            .push(format!("The last out-of-memory error in its log is of {at}, before its start: {line:?}"));
        return;
    }
    verdict.evidence.push(Evidence::new("log", line));
    match found.error {
        LogError::Cuda(_) => verdict
            .also
            .push(format!("Its log has an error of GPU memory at {at}, the last out-of-memory error in it.")),
        LogError::Host(error) => {
            let ErrorExplanation { text, advice, .. } = explained(error.error);
            let text = with_size(text, error);
            verdict.also.push(format!("{text} It is of {at}, the last out-of-memory error in the log."));
            verdict.advice.push(advice.to_owned());
        }
    }
}

/// Returns what is said of an error, with the memory that was asked for.
fn with_size(text: &str, error: HostErrorText) -> String {
    let asked = error.asked_bytes.map(|asked| format!(" It asked for {}.", bytes(asked)));
    format!("{text}{}", asked.unwrap_or_default())
}

/// What an error in a log says of an end.
struct ErrorExplanation {
    /// The causes that leave open what it was.
    causes: &'static [Cause],
    /// The cause that it then was.
    cause: Cause,
    /// The headline, where the title of the cause does not say all.
    headline: Option<&'static str>,
    text: &'static str,
    advice: &'static str,
}

/// Ends that the text of a program explains: abort() of a first process looks like a crash.
const OPEN: &[Cause] = &[Cause::ErrorExit, Cause::CrashedSignal];

/// Returns what an error says.
fn explained(error: HostError) -> ErrorExplanation {
    match error {
        HostError::Shm => ErrorExplanation {
            causes: &[Cause::ErrorExit, Cause::CrashedSignal, Cause::ShmFull],
            cause: Cause::ShmFull,
            headline: None,
            text: "Its log has an error that is typical of a full /dev/shm: a write to a full one raises SIGBUS.",
            advice: "A larger --shm-size (Compose shm_size; Kubernetes: an emptyDir of medium Memory on /dev/shm), or fewer NUM_WORKERS, or \
                     torch.multiprocessing.set_sharing_strategy('file_system').",
        },
        HostError::Refused(refused) => {
            let (text, advice) = refused_words(refused);
            ErrorExplanation { causes: OPEN, cause: Cause::AllocationFailed, headline: None, text, advice }
        }
        HostError::OwnLimit(limit) => {
            let (headline, text, advice) = own_limit_words(limit);
            ErrorExplanation { causes: OPEN, cause: Cause::OwnLimit, headline: Some(headline), text, advice }
        }
        HostError::Threads => ErrorExplanation {
            causes: &[Cause::ErrorExit, Cause::CrashedSignal, Cause::EndedBySignal],
            cause: Cause::ThreadsRefused,
            headline: None,
            text: "Its log has a thread or a process that was refused: not memory, but their number, or room for their stacks.",
            advice: "What refuses them: the pids limit (docker run --pids-limit, Compose pids_limit; Kubernetes: podPidsLimit of the kubelet), \
                     ulimit -u of the user, which counts all containers of that user, and ulimit -v. Fewer threads: OMP_NUM_THREADS, OPENBLAS_NUM_THREADS, \
                     NUM_WORKERS.",
        },
        HostError::Monitor(MemoryMonitor::Ray) => ErrorExplanation {
            causes: OPEN,
            cause: Cause::KilledByMonitor,
            headline: Some("KILLED by Ray: a worker, and the program then ended"),
            text: "Its log has a worker that Ray's memory monitor killed: it acts before the kernel does, at RAY_memory_usage_threshold (0.95) of \
                   the memory.",
            advice: "Fewer tasks at once (num_cpus or memory= of a task), more memory, or another threshold: RAY_memory_usage_threshold; \
                     RAY_memory_monitor_refresh_ms=0 switches the monitor off, and the kernel kills then.",
        },
        HostError::Monitor(MemoryMonitor::Dask) => ErrorExplanation {
            causes: OPEN,
            cause: Cause::KilledByMonitor,
            headline: Some("KILLED by dask's nanny: a worker, and the program then ended"),
            text: "Its log has a worker that dask's nanny killed: it acts at 95 % of the worker's memory_limit \
                   (distributed.worker.memory.terminate), whatever the container has left.",
            advice: "Smaller partitions or fewer threads in each worker, or a higher memory_limit of a worker (LocalCluster, dask worker --memory-limit): \
                     by default it is the memory of the host, or what dask sees of a limit, divided by the workers.",
        },
    }
}

/// Returns what is said of memory that was refused, and what to try.
fn refused_words(refused: RefusedMemory) -> (&'static str, &'static str) {
    match refused {
        RefusedMemory::Any => (
            "Its log has an allocation of host memory that failed: no kill of this run is recorded.",
            "What refuses memory in place of a kill: ulimit -v, -d or -l; vm.overcommit_memory=2 on the host; vm.max_map_count, the number of \
             mappings; or a request that is larger than RAM and swap together (a batch or an array of a wrong shape).",
        ),
        RefusedMemory::Pinned => (
            "Its log has an error of GPU memory where memory of the host is pinned: most often that was refused, and not the GPU's.",
            "Pinned memory counts against the container's limit and ulimit -l (docker run --ulimit memlock=-1): less of it (pin_memory=False, smaller \
             offload buffers), or a higher limit.",
        ),
        RefusedMemory::Shared => (
            "Its log has memory that was refused which the CPU and the GPU share: what programs hold, and page cache that is in use, is not there for \
             the GPU.",
            "A smaller model or batch, fewer other programs, or swap for them; a limit on the container does not bound the GPU's part.",
        ),
        RefusedMemory::BeforeStart => (
            "Its log says that the program compared what it needs with the memory that is free, and did not begin: nothing was killed.",
            "A smaller model, quantisation or context, fewer other programs on the host, or more memory or swap.",
        ),
    }
}

/// Returns the headline of a limit of a program's own, what is said of it, and what to try.
fn own_limit_words(limit: ProgramLimit) -> (&'static str, &'static str, &'static str) {
    match limit {
        ProgramLimit::Node => (
            "ITS OWN LIMIT was reached (the heap of Node.js)",
            "Its log says that the heap of Node.js was full: that limit is the program's, and the container may have had room.",
            "A larger heap: --max-old-space-size=MiB (NODE_OPTIONS; of a Worker: resourceLimits), below the container's limit; or less data in it.",
        ),
        ProgramLimit::Java => (
            "ITS OWN LIMIT was reached (the memory of the JVM)",
            "Its log says that the heap of Java, or another part of the JVM's memory, was full: that limit is the program's, and the container may have \
             had room.",
            "A larger one: -Xmx or -XX:MaxRAMPercentage (a quarter of the container's limit by default), -XX:MaxMetaspaceSize, \
             -XX:MaxDirectMemorySize; Spark: spark.driver.memory, spark.executor.memory. Below the container's limit, with room for the rest.",
        ),
        ProgramLimit::DuckDb => (
            "ITS OWN LIMIT was reached (memory_limit of DuckDB)",
            "Its log says that DuckDB reached its memory_limit: the container may have had room.",
            "SET memory_limit='...GB' (80 % of the memory that it sees by default), a temp_directory to spill to, or fewer threads.",
        ),
        ProgramLimit::ClickHouse => (
            "ITS OWN LIMIT was reached (max_memory_usage of ClickHouse)",
            "Its log says that ClickHouse reached a memory limit of its own: the container may have had room.",
            "max_memory_usage of a query, max_server_memory_usage of the server; or less at once (max_bytes_before_external_group_by spills).",
        ),
        ProgramLimit::Redis => (
            "THE LIMIT OF A REDIS was reached (maxmemory)",
            "Its log says that a Redis which it uses reached its maxmemory: that is often another container.",
            "A higher maxmemory of that Redis, or a maxmemory-policy that evicts.",
        ),
        ProgramLimit::DotNet => (
            "ITS OWN LIMIT was reached (the heap of .NET)",
            "Its log says that the heap of .NET was full: in a container that is three quarters of its limit by default.",
            "DOTNET_GCHeapHardLimitPercent or DOTNET_GCHeapHardLimit, a higher limit of the container, or less data in the heap.",
        ),
        ProgramLimit::R => (
            "ITS OWN LIMIT was reached (mem.maxVSize of R)",
            "Its log says that R reached its limit of vectors: the container may have had room.",
            "A higher mem.maxVSize() or R_MAX_VSIZE, or less data at once.",
        ),
        ProgramLimit::Php => (
            "ITS OWN LIMIT was reached (memory_limit of PHP)",
            "Its log says that PHP reached its memory_limit: the container may have had room.",
            "A higher memory_limit (php.ini, php -d memory_limit=...), or less data at once.",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::Exit;
    use crate::parse::cuda_oom::CudaOomText;

    #[test]
    fn log_of_a_running_container_says_what_it_had() {
        let subject = crate::events::ContainerRef { started: Some(100.0), ..Default::default() };
        let added = |found: Option<(f64, LogError)>| {
            let mut verdict = crate::explain::verdict_without_events(subject.clone(), true, None, 900.0);
            let found = found.map(|(at, error)| LoggedError { at, error, line: "the line".to_owned() });
            add_logged_error(&mut verdict, found.as_ref());
            let evidence = verdict.evidence.iter().map(|it| it.text.to_string()).collect::<String>();
            (verdict.cause, verdict.also.join(" "), evidence, verdict.advice.join(" "))
        };
        let (cause, also, evidence, advice) = added(Some((500.0, LogError::Host(HostError::Shm.into()))));
        assert_eq!((cause, evidence.as_str()), (Cause::Nothing, "the line"));
        assert!(
            also.contains("typical of a full /dev/shm") && also.contains("the last out-of-memory error"),
            "{also}"
        );
        assert!(advice.contains("--shm-size"), "{advice}");
        let cuda = LogError::Cuda(CudaOomText { framework: "torch", ..CudaOomText::default() });
        let (_, also, evidence, _) = added(Some((500.0, cuda)));
        assert!(
            also.starts_with("Its log has an error of GPU memory at ") && evidence == "the line",
            "{also}"
        );
        let (_, also, evidence, _) = added(Some((50.0, LogError::Host(HostError::Shm.into()))));
        assert!(also.ends_with("before its start: \"the line\"") && evidence.is_empty(), "{also}");
        assert_eq!(added(None).1, "The last 1.0 MiB of its log have no out-of-memory error that is known.");
    }

    #[test]
    fn an_error_of_gpu_memory_explains_only_an_end_that_nothing_else_may_explain() {
        let cause_of = |exit_code, may_be: &[u64]| {
            let reason = Some(ExitReason::Unknown);
            let exit = Exit { at: 1_000.0, reason, exit_code, may_be: may_be.to_vec(), ..Exit::default() };
            let mut events = vec![LedgerEvent::Exit(exit)];
            let error = LogError::Cuda(CudaOomText { framework: "torch", ..CudaOomText::default() });
            add_cuda_error(&mut events, &LoggedError { at: 990.0, error, line: String::new() }, "");
            let verdict = crate::explain::explain(&events, 2_000.0).expect("a verdict");
            assert_eq!(verdict.exit_reason, reason, "the ledger decided that");
            (verdict.cause, events.len())
        };
        for exit_code in [None, Some(1), Some(134)] {
            assert_eq!(cause_of(exit_code, &[]), (Cause::CudaOom, 2), "{exit_code:?}");
        }
        assert_eq!(cause_of(Some(137), &[]), (Cause::Unknown, 1));
        assert_eq!(cause_of(Some(1), &[7]), (Cause::Unknown, 1));
    }
}
