//! Containers without events, and what their runtime says of them now.

use super::cause::{Cause, Confidence};
use super::finding::{Finding, Recommendation, RunFinding, StartRemedy};
use super::incident::{Headline, Incident};
use super::live::CurrentUsage;
use super::remedy::LimitRemedy;
use super::{ContainerRef, Diagnosis};
use crate::discover::history::ExistingContainer;
use crate::parse::start_error::start_error;

/// Returns the diagnosis of a container without events whose start failed. `error`: what its runtime says.
pub fn never_started(subject: ContainerRef, error: &str, now: f64) -> Diagnosis {
    let incident = Incident::StartFailed { error: error.to_owned() };
    Diagnosis {
        subject: Some(subject),
        advice: start_error(error)
            .map(|error| StartRemedy::FixStartError { error }.into())
            .into_iter()
            .collect(),
        ..Diagnosis::new(Cause::NeverStarted, Confidence::Certain, incident, now)
    }
}

/// Returns the diagnosis of a container that was created and not started.
pub fn not_started(subject: ContainerRef, now: f64) -> Diagnosis {
    let subject = Some(subject);
    Diagnosis {
        subject,
        ..Diagnosis::new(Cause::NeverStarted, Confidence::Certain, Incident::NotStarted, now)
    }
}

/// Returns the diagnosis of a container without events whose runtime says that it runs, and whose first process does not exist.
pub fn without_process(container: &ExistingContainer, subject: ContainerRef, now: f64) -> Diagnosis {
    let incident = Incident::LostProcess { pid: container.first_process };
    Diagnosis {
        subject: Some(subject),
        headline: Some(Headline::NoProcess { is_running: true }),
        advice: vec![StartRemedy::StopLostContainer.into()],
        ..Diagnosis::new(Cause::Unknown, Confidence::Unsure, incident, now)
    }
}

/// Returns the diagnosis of a container without events of which a ledger knows a run in progress, and whose runtime cannot be queried.
/// `usage`: what its cgroup shows.
pub fn runtime_unreachable(subject: ContainerRef, usage: Option<&CurrentUsage>, now: f64) -> Diagnosis {
    let has_processes = usage.and_then(|usage| usage.has_processes);
    if has_processes == Some(true) {
        let mut diagnosis = without_events(subject, true, usage, now);
        diagnosis.findings.insert(0, RunFinding::RuntimeUnreachable.into());
        return diagnosis;
    }
    let is_empty = has_processes == Some(false);
    let cause = if is_empty { Cause::Unknown } else { Cause::Nothing };
    Diagnosis {
        subject: Some(subject),
        headline: is_empty.then_some(Headline::NoProcess { is_running: false }),
        ..Diagnosis::new(cause, Confidence::Unsure, Incident::RuntimeUnreachable { is_empty }, now)
    }
}

/// Returns the diagnosis of a container without events. `is_running`: it runs now, and uses so much of its memory.
pub fn without_events(
    subject: ContainerRef,
    is_running: bool,
    usage: Option<&CurrentUsage>,
    now: f64,
) -> Diagnosis {
    let is_stalled = usage.is_some_and(CurrentUsage::is_stalled);
    let (cause, confidence) = match is_stalled {
        true if usage.is_some_and(CurrentUsage::is_measured_to_wait) => (Cause::AtLimit, Confidence::Certain),
        // a program that streams its data beside little page cache looks the same
        true => (Cause::AtLimit, Confidence::Likely),
        false => (Cause::Nothing, Confidence::Unsure),
    };
    Diagnosis {
        subject: Some(subject),
        findings: usage.map(|usage| uses(usage).into()).into_iter().collect(),
        advice: usage.and_then(remedy_at_limit).map(Recommendation::from).into_iter().collect(),
        ..Diagnosis::new(cause, confidence, Incident::NoEvents { is_running }, now)
    }
}

fn uses(usage: &CurrentUsage) -> RunFinding {
    RunFinding::Uses {
        bytes: usage.usage_bytes,
        limit_bytes: usage.limit_bytes,
        is_under_oom: usage.is_under_oom,
        stalled_percent: usage.stalled_percent,
        reread_bytes_per_second: usage.reread_bytes_per_second,
    }
}

fn remedy_at_limit(usage: &CurrentUsage) -> Option<LimitRemedy> {
    usage.is_stalled().then_some(match usage.is_under_oom {
        true => LimitRemedy::SwitchOomKillerOn,
        false => LimitRemedy::RaiseOrUseLessAtLimit,
    })
}

/// Adds to a diagnosis of the past that the container, or a newer one of its name that was named last, is at its limit now.
pub fn add_usage(diagnosis: &mut Diagnosis, usage: &CurrentUsage) {
    diagnosis.findings.extend(usage.is_stalled().then(|| uses(usage).into()));
    // it is what helps now
    diagnosis.advice.splice(0..0, remedy_at_limit(usage).map(Recommendation::from));
}

/// Adds to a diagnosis what the runtime says about the container now.
pub fn add_container(diagnosis: &mut Diagnosis, container: &ExistingContainer) {
    let since = container.started.filter(|started| diagnosis.at.is_some_and(|at| at < *started));
    let running = since.filter(|_| container.is_running && !container.has_lost_process);
    let is_failed = !container.is_running && diagnosis.cause != Cause::NeverStarted;
    let failed = container.start_error.clone().filter(|_| is_failed);
    let found = [
        running.map(|since| RunFinding::RunsAgain { since }),
        container.restarts.filter(|count| *count > 0).map(|count| RunFinding::Restarts { count }),
        failed.map(|error| RunFinding::LastStartFailed { error }),
        container.has_lost_process.then_some(RunFinding::LostProcess { runtime: container.runtime }),
    ];
    diagnosis.findings.extend(found.into_iter().flatten().map(Finding::from));
}
