//! What an error in a container's log adds to a diagnosis. A log proves what its program wants: nothing here is certain.

use serde::Serialize;

use super::cause::{Cause, Confidence};
use super::finding::{Recommendation, Remedy};
use super::incident::{ExitWhy, Headline, Incident};
use super::{Diagnosis, is_cuda_oom};
use crate::container_logs::tail::{LoggedError, TAIL_BYTES};
use crate::events::{CudaOom, CudaOomSource, Evidence, ExitReason, LedgerEvent};
use crate::ledger::run::{SIGINT_STATUS, SIGKILL_STATUS};
use crate::lifecycle::timing::{LOG_TOLERANCE, MAX_LOGGED_AGE};
use crate::parse::log_error::{HostError, HostErrorText, LogError};

/// Seconds from an error that ends a program to its end.
const MAX_CAUSE_AGE: f64 = 60.0;
/// Characters of a line that are kept.
const MAX_LINE_CHARS: usize = 300;

/// Id of an error that is read from a log on request: it is in no ledger.
pub(super) const UNRECORDED: u64 = 0;

/// A fact of the container's log.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "finding", rename_all = "snake_case")]
pub enum LogFinding {
    /// The end of the log has no out-of-memory error that is known.
    NoLoggedError {
        /// So much of it was read.
        read_bytes: u64,
    },
    /// The last out-of-memory error of the log is not of this end.
    ErrorOfOtherEnd {
        /// Unix time of the error.
        at: f64,
        /// Its line.
        line: String,
    },
    /// The last out-of-memory error of the log is of before the start.
    ErrorBeforeStart {
        /// Unix time of the error.
        at: f64,
        /// Its line.
        line: String,
    },
    /// The log has an error of GPU memory.
    LoggedCudaError {
        /// Unix time of the error.
        at: f64,
        /// No end is known, and it is the last error.
        is_last: bool,
    },
    /// The log has another out-of-memory error.
    LoggedError {
        /// The error.
        error: HostErrorText,
        /// Unix time of the error, where no end is known, and it is the last one.
        #[serde(skip_serializing_if = "Option::is_none")]
        last_at: Option<f64>,
    },
    /// The log does not exist any more: a newer container has the name.
    ReplacedContainer,
    /// The log could not be read.
    UnreadableLog {
        /// Why.
        reason: String,
    },
}

/// What to do about an error in the container's log.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "remedy", rename_all = "snake_case")]
pub enum LogRemedy {
    /// Let memledger read the log.
    ReadLog {
        /// The container, as `memledger why` finds it.
        container: String,
    },
    /// What the error needs.
    FixLoggedError {
        /// The error.
        error: HostError,
    },
}

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
pub fn remove_log_advice(diagnosis: &mut Diagnosis) {
    let is_it = |advice: &Recommendation| {
        matches!(advice, Recommendation::Remedy(Remedy::Log(LogRemedy::ReadLog { .. })))
    };
    diagnosis.advice.retain(|advice| !is_it(advice));
}

/// Adds what the end of the log has to a diagnosis: the line as evidence, and where the cause was open, the cause.
pub fn add_logged_error(diagnosis: &mut Diagnosis, found: Option<&LoggedError>) {
    remove_log_advice(diagnosis);
    let Some(found) = found else {
        return diagnosis.findings.push(LogFinding::NoLoggedError { read_bytes: TAIL_BYTES as u64 }.into());
    };
    let started = diagnosis.subject.as_ref().and_then(|subject| subject.started);
    let is_before_start = started.is_some_and(|started| found.at < started - LOG_TOLERANCE);
    let (at, line) = (found.at, found.line.chars().take(MAX_LINE_CHARS).collect::<String>());
    let is_near = diagnosis.at.is_none_or(|ended| (-LOG_TOLERANCE..=MAX_LOGGED_AGE).contains(&(ended - at)));
    if !is_near || is_before_start {
        let finding = match diagnosis.at {
            Some(_) => LogFinding::ErrorOfOtherEnd { at, line },
            None => LogFinding::ErrorBeforeStart { at, line },
        };
        return diagnosis.findings.push(finding.into());
    }
    diagnosis.evidence.push(Evidence::new("log", line));
    match (found.error, diagnosis.at) {
        // one that ended it is in its events
        (LogError::Cuda(_), Some(_)) if is_cuda_oom(diagnosis.cause) => {}
        (LogError::Cuda(_), ended) => {
            diagnosis.findings.push(LogFinding::LoggedCudaError { at, is_last: ended.is_none() }.into());
        }
        (LogError::Host(error), Some(ended)) => add_host_error(diagnosis, error, ended - at),
        // it runs, or nothing is known of its end
        (LogError::Host(error), None) => {
            diagnosis.findings.push(LogFinding::LoggedError { error, last_at: Some(at) }.into());
            diagnosis.advice.push(LogRemedy::FixLoggedError { error: error.error }.into());
        }
    }
}

/// Adds an error so many seconds before the end.
fn add_host_error(diagnosis: &mut Diagnosis, error: HostErrorText, age: f64) {
    let (cause, open_causes) = causes(error.error);
    // a program that survived it, or gave up later, has another reason: only workers are replaced for a while
    let is_recent = matches!(error.error, HostError::Monitor(_)) || age <= MAX_CAUSE_AGE;
    // numpy ends with KeyboardInterrupt where OpenBLAS gets no thread
    let is_interrupt =
        matches!(&diagnosis.incident, Incident::Exit(exit) if exit.exit_code == Some(SIGINT_STATUS));
    let is_other_signal = diagnosis.cause == Cause::EndedBySignal && !is_interrupt;
    let is_open = open_causes.contains(&diagnosis.cause) && is_recent && !is_other_signal;
    // a kill of an unknown container may have been the cause
    if is_open && diagnosis.confidence != Confidence::Unsure {
        explain_by(diagnosis, error);
    } else if diagnosis.cause != cause {
        diagnosis.findings.push(LogFinding::LoggedError { error, last_at: None }.into());
    }
}

/// Makes an error in the log the cause of an end.
pub(super) fn explain_by(diagnosis: &mut Diagnosis, error: HostErrorText) {
    (diagnosis.cause, diagnosis.confidence) = (causes(error.error).0, Confidence::Likely);
    // of these the title of the cause does not say all
    let has_headline = matches!(error.error, HostError::OwnLimit(_) | HostError::Monitor(_));
    diagnosis.headline = has_headline.then_some(Headline::LoggedError(error.error));
    if let Incident::Exit(exit) = &mut diagnosis.incident {
        exit.why = ExitWhy::ByLog;
    }
    diagnosis.findings.insert(0, LogFinding::LoggedError { error, last_at: None }.into());
    diagnosis.advice = vec![LogRemedy::FixLoggedError { error: error.error }.into()];
}

/// Ends that the text of a program explains: abort() of a first process looks like a crash.
const OPEN: &[Cause] = &[Cause::ErrorExit, Cause::CrashedSignal];

/// Returns the cause that an error makes, and the causes that leave open what it was.
fn causes(error: HostError) -> (Cause, &'static [Cause]) {
    match error {
        HostError::Shm => (Cause::ShmFull, &[Cause::ErrorExit, Cause::CrashedSignal, Cause::ShmFull]),
        HostError::Refused(_) => (Cause::AllocationFailed, OPEN),
        HostError::OwnLimit(_) => (Cause::OwnLimit, OPEN),
        HostError::Threads => {
            (Cause::ThreadsRefused, &[Cause::ErrorExit, Cause::CrashedSignal, Cause::EndedBySignal])
        }
        HostError::Monitor(_) => (Cause::KilledByMonitor, OPEN),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnose::finding::Finding;
    use crate::events::Exit;
    use crate::parse::cuda_oom::CudaOomText;

    #[test]
    fn log_of_a_running_container_says_what_it_had() {
        let subject = crate::events::ContainerRef { started: Some(100.0), ..Default::default() };
        let added = |found: Option<(f64, LogError)>| {
            let mut diagnosis = crate::diagnose::without_events(subject.clone(), true, None, 900.0);
            let found = found.map(|(at, error)| LoggedError { at, error, line: "the line".to_owned() });
            add_logged_error(&mut diagnosis, found.as_ref());
            assert_eq!(diagnosis.cause, Cause::Nothing);
            (diagnosis.findings, diagnosis.evidence, diagnosis.advice)
        };
        let (line, error) = (Evidence::new("log", "the line"), HostError::Shm);
        let (findings, evidence, advice) = added(Some((500.0, LogError::Host(error.into()))));
        let logged = LogFinding::LoggedError { error: error.into(), last_at: Some(500.0) };
        let remedy = LogRemedy::FixLoggedError { error };
        assert_eq!((findings, evidence), (vec![Finding::Log(logged)], vec![line.clone()]));
        assert_eq!(advice, [Recommendation::Remedy(Remedy::Log(remedy))]);
        let cuda = LogError::Cuda(CudaOomText { framework: "torch", ..CudaOomText::default() });
        let (findings, evidence, _) = added(Some((500.0, cuda)));
        let logged = LogFinding::LoggedCudaError { at: 500.0, is_last: true };
        assert_eq!((findings, evidence), (vec![Finding::Log(logged)], vec![line]));
        let (findings, evidence, _) = added(Some((50.0, LogError::Host(error.into()))));
        let logged = LogFinding::ErrorBeforeStart { at: 50.0, line: "the line".to_owned() };
        assert_eq!((findings, evidence), (vec![Finding::Log(logged)], vec![]));
        let none = LogFinding::NoLoggedError { read_bytes: 1 << 20 };
        assert_eq!(added(None).0, [Finding::Log(none)]);
    }

    #[test]
    fn an_error_of_gpu_memory_explains_only_an_end_that_nothing_else_may_explain() {
        let cause_of = |exit_code, may_be: &[u64]| {
            let reason = Some(ExitReason::Unknown);
            let exit = Exit { at: 1_000.0, reason, exit_code, may_be: may_be.to_vec(), ..Exit::default() };
            let mut events = vec![LedgerEvent::Exit(exit)];
            let error = LogError::Cuda(CudaOomText { framework: "torch", ..CudaOomText::default() });
            add_cuda_error(&mut events, &LoggedError { at: 990.0, error, line: String::new() }, "");
            let diagnosis = crate::diagnose::explain(&events, 2_000.0).unwrap();
            assert_eq!(diagnosis.exit_reason, reason, "the ledger decided that");
            (diagnosis.cause, events.len())
        };
        for exit_code in [None, Some(1), Some(134)] {
            assert_eq!(cause_of(exit_code, &[]), (Cause::CudaOom, 2), "{exit_code:?}");
        }
        assert_eq!(cause_of(Some(137), &[]), (Cause::Unknown, 1));
        assert_eq!(cause_of(Some(1), &[7]), (Cause::Unknown, 1));
    }
}
