//! The headline of a verdict on a kill that the container survived: what happened to it after that.

use super::limit::{limit_bytes, limit_of};
use super::place::CgroupPlace;
use super::verdict::{SIGKILL, SIGTERM};
use super::{Cause, RunSummary};
use crate::events::{Exit, ExitReason, Kill, Victim};
use crate::runs::hit_limit::LimitPosition;
use crate::text::{bytes, lasted};

/// Returns the headline of a run that lost a process by this kill, and ended later; `None` where the title of the cause says all.
pub(super) fn after_kill<'a>(cause: Cause, kill: &'a Kill, run: &RunSummary<'a>) -> Option<String> {
    let exit = run.exit?;
    let after = match kill.victim {
        Some(Victim::Child) => "a child was killed; the container went on and",
        _ => "a process was killed; the container",
    };
    Some(format!("{}: {after} {}", memory(cause, kill, run), end(exit, kill.at)))
}

/// Returns the headline of a kill at the limit of a pod with several containers, which is known by its name.
pub(super) fn of_pod(cause: Cause, kill: &Kill, run: &RunSummary<'_>) -> Option<String> {
    match CgroupPlace::of_limit_of(&kill.limit_cgroup, run.subject) {
        place @ CgroupPlace::NamedPod { .. } if cause == Cause::OomParentLimit => {
            Some(format!("OUT OF MEMORY at {}", place.noun()))
        }
        _ => None,
    }
}

/// Returns which memory was exhausted, with the limit where that is the container's own.
fn memory<'a>(cause: Cause, kill: &'a Kill, run: &RunSummary<'a>) -> String {
    let own = match limit_of(kill, run) {
        LimitPosition::Own => limit_bytes(kill, run),
        _ => None,
    };
    let own = own.map_or_else(String::new, |limit| format!(" of {}", bytes(limit)));
    match cause {
        Cause::OomLimitShm => format!("OUT OF MEMORY at its own limit{own}, mostly by shared memory"),
        Cause::OomLimitWorker | Cause::OomLimitWorkerThenExit | Cause::OomLimit => {
            format!("OUT OF MEMORY at its own limit{own}")
        }
        _ => of_pod(cause, kill, run).unwrap_or_else(|| cause.title().to_owned()),
    }
}

/// Returns how the container ended, and how long after the kill.
fn end(exit: &Exit, kill: f64) -> String {
    let later = match exit.at - kill {
        seconds if seconds < 1.0 => "right after".to_owned(),
        seconds => format!("{} later", lasted(seconds)),
    };
    let is_asked_first = exit.stop_signals.contains(&Some(SIGTERM));
    match (exit.reason, exit.exit_code) {
        (Some(ExitReason::Stopped), _) if exit.requested_signal() == Some(SIGKILL) && !is_asked_first => {
            format!("was killed on request, {later}")
        }
        (Some(ExitReason::Stopped), _) => format!("was stopped on request, {later}"),
        (_, Some(code)) => format!("ended with {code}, {later}"),
        (_, None) => format!("ended, {later}"),
    }
}
