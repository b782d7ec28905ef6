//! Decides why a container exited. Pure.
//!
//! Exit code 137 does not prove an OOM, and the runtime's OOMKilled flag is wrong in both directions; only a kill in
//! the ledger makes an exit an OOM. So an exit by SIGKILL waits for a moment for the kernel's record.

use std::sync::Arc;
use std::time::Duration;

use super::Reconciler;
use super::owner::ATTRIBUTION_TIMEOUT;
use super::victim::EXIT_WINDOW;
use crate::clock::Timestamp;
use crate::discover::ContainerId;
use crate::ledger::container_state::End;
use crate::ledger::events::{Evidence, Exit, ExitReason, Kill, KillOwner, LedgerEvent, OomScope, Victim};
use crate::ledger::hit_limit::HitLimit;
use crate::ledger::interval::{CLOCK_TOLERANCE, Interval, LOG_DELAY};
use crate::ledger::run::{Run, SIGKILL_STATUS, STOP_REQUEST_WINDOW};
use crate::ledger::run_record::{RunFigures, RunRecord};

/// How long to wait for an OOM kill. The kernel's record precedes the runtime's event; without the log, the counters
/// need a moment.
const EVIDENCE_TIMEOUT: Duration = Duration::from_secs(3);
/// An exit at most this many seconds after a stop request that the program may handle is its answer: docker stop waits
/// as long.
const STOP_TIMEOUT: f64 = 10.0;
/// A launcher ends within this many seconds after one of its processes ended by a CUDA out-of-memory error: it stops the others
/// first.
const UNCAUGHT_OOM_WINDOW: f64 = 120.0;
/// A program that catches such an error and gives up ends within this many seconds.
const CUDA_OOM_WINDOW: f64 = 5.0;
/// The same for an error in the log, which does not say whether it was caught. A launcher needs some seconds to notice.
const LOG_OOM_WINDOW: f64 = 15.0;
/// Signals that request an exit.
const STOP_SIGNALS: [i32; 3] = [2, 3, 15];

/// An exit whose reason is not known yet.
#[derive(Clone, Debug)]
pub struct PendingExit {
    /// The event so far.
    pub exit: Exit,
    /// Its container.
    pub id: ContainerId,
    /// What its run needed; `None` if memledger was restarted since, then the stored run has it.
    figures: Option<RunFigures>,
    noticed: Timestamp,
    stored: bool,
}

impl PendingExit {
    /// Creates a new pending exit.
    pub fn new(number: u64, end: End, now: Timestamp) -> Self {
        let End { id, subject, mut run, before, peak_usage_bytes, peak_unreclaimable_bytes } = end;
        let figures = Some(std::mem::take(&mut run.figures));
        let at = run.ended.unwrap_or_else(|| now.unix_seconds());
        let exit = Exit {
            id: number,
            at,
            reason: None,
            exit_code: run.exit_code,
            runtime_oom_flag: run.oom_flag,
            stop_signals: run.stop_signals_before(at).collect(),
            kernel_log_read: false,
            duration_seconds: run.begin().map(|started| (at - started).max(0.0)),
            oom_kills: run.kills,
            peak_usage_bytes,
            peak_unreclaimable_bytes,
            evidence: runtime_evidence(&run, at),
            before: before.map(Arc::new),
            subject,
        };
        Self { exit, id, figures, noticed: now, stored: false }
    }

    /// Restores a pending exit that was stored before a restart.
    pub fn stored(exit: Exit, now: Timestamp) -> Self {
        let id = ContainerId::new(&exit.subject.container_id);
        Self { id, exit, figures: None, noticed: now, stored: true }
    }
}

fn runtime_evidence(run: &Run, at: f64) -> Vec<Evidence> {
    let mut lines = Vec::new();
    let mut add = |text: String| lines.push(Evidence::new("runtime", text));
    for signal in run.stop_signals_before(at) {
        match signal {
            Some(signal) => add(format!("stop request with signal {signal} (docker stop or kill)")),
            None => add("stop request, signal unknown".to_owned()),
        }
    }
    if run.oom_event_at.is_some() {
        add("oom event, which is also sent without a kill".to_owned());
    }
    match run.exit_code {
        Some(code) => add(format!("exit code {code}")),
        None => add("exit code unknown".to_owned()),
    }
    if let Some(flag) = run.oom_flag {
        add(format!("OOMKilled {flag}, which is often wrong"));
    }
    lines
}

impl Reconciler {
    /// Decides the reasons that can be decided.
    pub(super) fn decide_exits(&mut self, now: Timestamp) {
        for mut pending in std::mem::take(&mut self.pending_exits) {
            self.update_exit(&mut pending.exit, &pending.id);
            let Some(reason) = self.decide_reason(&pending, now) else {
                if !pending.stored {
                    pending.stored = true;
                    self.changes.events.insert(pending.exit.id, LedgerEvent::Exit(pending.exit.clone()));
                    self.write_run(&pending);
                }
                self.pending_exits.push(pending);
                continue;
            };
            pending.exit.reason = Some(reason);
            pending.exit.kernel_log_read = self.log_up;
            self.write_run(&pending);
            if self.containers.get(&pending.id).is_some() {
                self.containers.modify(&pending.id).forget_figures(pending.exit.at);
            }
            let exit = pending.exit;
            self.totals.count_exit(&exit.subject.name, reason, exit.exit_code, exit.at);
            self.changes.events.insert(exit.id, LedgerEvent::Exit(exit));
        }
    }

    /// Writes the record of the run that ended so.
    fn write_run(&mut self, pending: &PendingExit) {
        if self.containers.get(&pending.id).is_some_and(|known| known.hidden) {
            return;
        }
        let run = self.containers.get(&pending.id).and_then(|known| known.run_ended_at(pending.exit.at));
        let in_run = run.map(|run| &run.figures);
        let figures = pending.figures.clone().map(|figures| figures.with_cuda_ooms_of(in_run));
        if let Some(figures) = figures.as_ref().or(in_run) {
            let oom_limit = run.and_then(|run| run.oom_limit);
            let record = RunRecord { oom_limit, ..RunRecord::of_exit(figures, &pending.exit) };
            self.changes.runs.insert(pending.exit.id, record);
        }
    }

    /// Adds what became known about the run since its exit.
    fn update_exit(&self, exit: &mut Exit, id: &ContainerId) {
        let Some(run) = self.containers.get(id).and_then(|known| known.run_ended_at(exit.at)) else { return };
        exit.oom_kills = exit.oom_kills.max(run.kills);
        if exit.exit_code.is_none() && run.exit_code.is_some() {
            exit.exit_code = run.exit_code;
            exit.stop_signals = run.stop_signals_before(exit.at).collect();
            exit.evidence = runtime_evidence(run, exit.at);
        }
    }

    fn decide_reason(&mut self, pending: &PendingExit, now: Timestamp) -> Option<ExitReason> {
        let exit = &pending.exit;
        if let Some(scope) = self.main_kill_scope(pending) {
            return Some(oom_reason(scope));
        }
        let run = self.containers.get(&pending.id).and_then(|known| known.run_ended_at(exit.at));
        if run.is_some_and(|run| run.host_restart.is_some()) {
            return Some(ExitReason::HostRestart);
        }
        let request = run.map_or(StopRequest::None, |run| stop_request(run, exit.at, exit.exit_code));
        let is_early = now.since(pending.noticed) < EVIDENCE_TIMEOUT;
        if exit.exit_code.is_some_and(|code| code != SIGKILL_STATUS) {
            return match (request, exit.exit_code) {
                (StopRequest::Explains, _) => Some(ExitReason::Stopped),
                (StopRequest::MayExplain, _) if is_early => None, // docker reports the end of its stop after the exit
                (_, Some(0)) => Some(ExitReason::Completed),
                (_, Some(129..=192)) => Some(ExitReason::Signal),
                _ if run.is_some_and(|run| ended_by_cuda_oom(run, pending)) => Some(ExitReason::CudaOom),
                _ if is_early && self.may_report_errors(&pending.id) => None,
                _ => Some(ExitReason::Error),
            };
        }
        // SIGKILL or unknown: a kill without an owner yet may be the reason
        let is_stopped = request == StopRequest::Explains;
        let window = Interval::new(exit.at - EXIT_WINDOW, exit.at);
        let is_undecided = self.pending.iter().any(|kill| {
            let may_be_its = kill.container.is_none() || kill.container.as_ref() == Some(&pending.id);
            let is_of_run =
                kill.container.is_some() && kill.run.is_some() && kill.run == run.map(|run| run.number);
            may_be_its && kill.kill.owner != KillOwner::Host && (is_of_run || kill.happened.overlaps(&window))
        });
        let is_record_missing =
            self.accounting.has_missing_records() && now.since(pending.noticed) < ATTRIBUTION_TIMEOUT;
        if is_undecided || is_early && !is_stopped || is_record_missing {
            return None;
        }
        if exit.exit_code.is_some()
            && !is_stopped
            && let Some(scope) = run.and_then(|run| self.scope_of_possible_end(run, exit.at))
        {
            return Some(oom_reason(scope));
        }
        let may_be_oom = || self.unattributed.iter().any(|(_, happened)| happened.overlaps(&window));
        Some(match exit.exit_code {
            _ if is_stopped => ExitReason::Stopped,
            // no runtime knows the exit code
            None if run.is_some_and(|run| is_before(run.uncaught_cuda_oom, exit.at, CUDA_OOM_WINDOW))
                && !may_be_oom() =>
            {
                ExitReason::CudaOom
            }
            Some(_) if !may_be_oom() => ExitReason::Killed,
            _ => ExitReason::Unknown,
        })
    }

    /// Returns whether the log or the last messages of a container that has ended are not read yet.
    fn may_report_errors(&self, id: &ContainerId) -> bool {
        self.logs_being_read.contains(id) || self.connected.contains(id)
    }

    /// Returns the scope of the kill that ended the run, if its exit was reported so late that the kill was settled as a
    /// child's.
    fn scope_of_possible_end(&self, run: &Run, ended: f64) -> Option<OomScope> {
        let (at, scope) = run.possible_end?;
        (-CLOCK_TOLERANCE..EXIT_WINDOW).contains(&(self.latest_exit(run, ended, at) - at)).then_some(scope)
    }

    /// Returns the scope of the kill that ended this run, if there is one.
    fn main_kill_scope(&self, pending: &PendingExit) -> Option<OomScope> {
        let known = self.containers.get(&pending.id)?;
        known.run_ended_at(pending.exit.at)?.ended_by
    }
}

/// Whether the stop requests of a run explain its exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StopRequest {
    None,
    /// A program may take its time to answer; or it ignored the request.
    MayExplain,
    Explains,
}

/// A request explains an exit by its own signal, one soon after it, and one that the runtime confirms by a further
/// request without a signal, which Docker reports at the end of a stop.
fn stop_request(run: &Run, ended: f64, code: Option<i64>) -> StopRequest {
    let requests = run
        .stop_requests
        .iter()
        .filter(|(at, _)| (0.0..STOP_REQUEST_WINDOW).contains(&(ended - at).max(0.0)));
    let mut outcome = StopRequest::None;
    for (at, signal) in requests {
        let explains = match signal {
            Some(signal) if code == Some(128 + i64::from(*signal)) => true,
            Some(9) => code.is_none_or(|code| code == SIGKILL_STATUS),
            Some(signal) if STOP_SIGNALS.contains(signal) => ended - at <= STOP_TIMEOUT,
            Some(_) => continue,
            // the signal may have been any; Podman reports a stop at its end
            None => code.is_none_or(|code| code == SIGKILL_STATUS) || ended - at <= STOP_TIMEOUT,
        };
        if explains || run.is_stop_confirmed {
            return StopRequest::Explains;
        }
        outcome = StopRequest::MayExplain;
    }
    outcome
}

/// Returns true if a run that ended with an error did so because of a CUDA out-of-memory error.
fn ended_by_cuda_oom(run: &Run, pending: &PendingExit) -> bool {
    let is_before = |oom, most| is_before(oom, pending.exit.at, most);
    let figures = pending.figures.as_ref().unwrap_or(&run.figures);
    // the log has the errors that processes report too, and does not say which were caught
    let in_log = run.cuda_oom_in_log.filter(|_| !figures.has_reports() && !run.figures.has_reports());
    is_before(run.uncaught_cuda_oom, UNCAUGHT_OOM_WINDOW)
        || is_before(run.cuda_oom, CUDA_OOM_WINDOW)
        || is_before(in_log, LOG_OOM_WINDOW)
}

/// Returns true if an error was less than `most` seconds before the end of a run.
fn is_before(oom: Option<f64>, ended: f64, most: f64) -> bool {
    oom.is_some_and(|at| (-CLOCK_TOLERANCE..most).contains(&(ended - at)))
}

impl LedgerEvent {
    /// Returns when an unattributed kill happened; `None` for other events.
    pub fn unattributed_at(&self) -> Option<Interval> {
        match self {
            LedgerEvent::OomKill(kill) if kill.owner == KillOwner::Unattributed => {
                Some(Interval::new(kill.earliest.unwrap_or(kill.at - LOG_DELAY), kill.at))
            }
            _ => None,
        }
    }
}

fn oom_reason(scope: OomScope) -> ExitReason {
    match scope {
        OomScope::Container => ExitReason::OomContainer,
        OomScope::Host => ExitReason::OomHost,
    }
}

impl Run {
    /// Records a kill, which may have ended this run.
    pub fn record_kill(&mut self, victim: Victim, kill: &Kill, container_id: &str) {
        let scope = kill.scope;
        let newest = || self.usage.back().and_then(|(_, usage)| usage.sample);
        let last = self.samples_until(kill.at).pop().or_else(newest);
        let limits = last.map(|last| (last.limit_bytes, last.effective_limit_bytes)).unwrap_or_default();
        let hit = HitLimit::of(kill, container_id, limits);
        self.oom_limit = if self.ended_by.is_some() { self.oom_limit } else { hit };
        self.kills += 1;
        if victim == Victim::Main {
            self.ended_by = Some(scope);
        }
    }
}
