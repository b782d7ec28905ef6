//! Decides kills and exits together: whether a kill ended its container, and why a container exited. Pure.
//!
//! A kill ended its run if its victim was the first process, or if the first process exited with the status of SIGKILL soon after the
//! victim was gone. Exit code 137 does not prove an OOM, and the runtime's OOMKilled flag is wrong in both directions; only a kill in
//! the ledger makes an exit an OOM. So an exit by SIGKILL waits for a moment for the kernel's record. The exit stores which kill ended
//! it, or which ones may have.

use std::sync::Arc;

use super::Reconciler;
use super::owner::PendingKill;
use crate::clock::Timestamp;
use crate::discover::{ContainerId, RuntimeKind};
use crate::events::{
    ContainerRef, Evidence, Exit, ExitReason, Kill, KillOwner, LedgerEvent, OomScope, Victim,
};
use crate::ledger::container_state::End;
use crate::ledger::interval::Interval;
use crate::ledger::run::{LedgerRun, PossibleEnd, SIGINT_STATUS, SIGKILL_STATUS, is_crash_status};
use crate::ledger::totals::Total;
use crate::lifecycle::RunId;
use crate::lifecycle::timing::{
    ATTRIBUTION_TIMEOUT, CAUSE_WINDOW, CLOCK_TOLERANCE, CUDA_OOM_WINDOW, EVIDENCE_TIMEOUT,
    EXIT_EVENT_TIMEOUT, EXIT_TIMEOUT, EXIT_WINDOW, LAST_REPORTS_TIMEOUT, LATE_LINE, LOG_DELAY,
    LOG_OOM_WINDOW, LOG_TIMEOUT, MAIN_EXIT_TIMEOUT, MAX_TEARDOWN, REQUEST_REPLY_TIMEOUT,
    RUNTIME_EVENT_TIMEOUT, STOP_REQUEST_WINDOW, STOP_TIMEOUT, UNCAUGHT_OOM_WINDOW,
};
use crate::parse::log_error::{HostError, HostErrorText};
use crate::runs::hit_limit::HitLimit;
use crate::runs::{RunFigures, RunRecord};

/// Maximum number of kills that may have ended a run, the newest.
const MAX_MAY_BE: usize = 16;
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
        let End { id, subject, mut run, before } = end;
        let at = run.ended().unwrap_or_else(|| now.unix_seconds());
        let exit = Exit {
            id: number,
            at,
            reason: None,
            exit_code: run.exit_code(),
            runtime_oom_flag: run.oom_flag(),
            stop_signals: run.stop_signals_before(at).collect(),
            kernel_log_read: false,
            duration_seconds: run.begin().map(|started| (at - started).max(0.0)),
            oom_kills: run.evidence.kills,
            ended_by: None,
            may_be: vec![],
            log_error: None,
            requests_known: false,
            before_counting: false,
            peak_usage_bytes: run.evidence.figures.usage_peak_bytes(),
            peak_unreclaimable_bytes: run.evidence.figures.unreclaimable_peak_bytes(),
            evidence: runtime_evidence(&subject, &run, at),
            before: before.map(Arc::new),
            subject,
        };
        let figures = Some(std::mem::take(&mut run.evidence.figures));
        Self { exit, id, figures, noticed: now, stored: false }
    }

    /// Restores a pending exit that was stored before a restart.
    pub fn stored(exit: Exit, now: Timestamp) -> Self {
        let id = ContainerId::new(&exit.subject.container_id);
        Self { id, exit, figures: None, noticed: now, stored: true }
    }
}

fn runtime_evidence(subject: &ContainerRef, run: &LedgerRun, at: f64) -> Vec<Evidence> {
    let mut lines = Vec::new();
    let mut add = |text: String| lines.push(Evidence::new("runtime", text));
    for signal in run.stop_signals_before(at) {
        match signal {
            Some(signal) if subject.is_run() => add(format!("memledger run received signal {signal}")),
            Some(signal) => add(format!("stop request with signal {signal} (docker stop or kill)")),
            None => add("stop request, signal unknown".to_owned()),
        }
    }
    if run.evidence.oom_event_at.is_some() {
        add("oom event, which is also sent without a kill".to_owned());
    }
    match run.exit_code() {
        Some(code) => add(format!("exit code {code}")),
        None if run.phase.is_end_reported_late() => {
            add("exit code unknown: 0, reported long after its last process was gone, is not trusted"
                .to_owned());
        }
        None => add("exit code unknown".to_owned()),
    }
    match run.oom_flag() {
        Some(true) if subject.is_run() => add("its cgroup counted an OOM kill".to_owned()),
        Some(false) if subject.is_run() => add("its cgroup counted no OOM kill".to_owned()),
        Some(flag) => add(format!("OOMKilled {flag}, which is often wrong")),
        None => {}
    }
    lines
}

impl Reconciler {
    /// Settles the kills that can be decided, and those that timed out as unattributed.
    pub(super) fn settle_kills(&mut self, now: Timestamp) {
        let mut at = 0;
        while at < self.pending.len() {
            self.correct_run(at); // a kill before it may explain the end of the run that this one seemed to explain
            if self.settle_kill(at, now)
                && let Some(pending) = self.pending.remove(at)
            {
                self.finish_kill(now, pending);
            } else {
                at += 1;
            }
        }
    }

    /// Settles one kill. Returns false if evidence may still arrive.
    fn settle_kill(&mut self, at: usize, now: Timestamp) -> bool {
        let pending = &self.pending[at];
        let age = now.since(pending.noticed);
        match &pending.kill.owner {
            KillOwner::Host => {
                let total = match pending.kill.scope {
                    OomScope::Host => Total::HostProcess,
                    OomScope::Container => Total::HostProcessAtLimit,
                };
                self.totals.add(total, i64::from(!pending.kill.before_counting));
                true
            }
            KillOwner::Container(subject) => {
                let Some(victim) = self.decide_victim(pending, now) else { return false };
                let (scope, when) = (pending.kill.scope, pending.kill.at);
                let name = pending.counted_as.as_ref().unwrap_or(&subject.identity);
                let is_counted = !pending.kill.before_counting;
                if is_counted {
                    self.totals.count_kill(name, victim, scope, when);
                }
                let known = pending.container.clone().filter(|id| self.containers.get(id).is_some());
                if let Some(id) = known.filter(|_| is_counted) {
                    self.containers.modify(&id).count_kill(pending.counted_as.as_ref(), when);
                }
                let pending = &self.pending[at];
                let (mut number_in_run, mut ended) = (None, vec![]);
                if let (Some(id), Some(number)) = (&pending.container, pending.run)
                    && let Some(run) = self.containers.modify(id).runs.get_mut(number)
                {
                    run.record_kill(victim, &pending.kill, id.as_str());
                    number_in_run = Some(run.evidence.kills);
                    if victim == Victim::Child && !is_child_of_other_process(run, pending) {
                        run.evidence.possible_end =
                            Some(PossibleEnd { id: pending.kill.id, at: pending.gone_at(), scope });
                    }
                    ended = self.containers.modify(id).end_transitions(id); // it waited for a sign that this is no sandbox
                }
                let kill = &mut self.pending[at].kill;
                (kill.victim, kill.number) = (Some(victim), number_in_run);
                ended.into_iter().for_each(|end| self.apply_transition(now, end));
                true
            }
            _ if age >= ATTRIBUTION_TIMEOUT && pending.container.is_none() => {
                self.totals.add(Total::Unattributed, i64::from(!pending.kill.before_counting));
                let text = self.other_candidates(&pending.happened);
                let kill = &mut self.pending[at].kill;
                kill.evidence.extend(text.map(|text| Evidence::new("cgroup", text)));
                kill.owner = KillOwner::Unattributed;
                true
            }
            _ => false,
        }
    }

    /// Returns whether the kill ended its container; `None` if that is not known yet.
    fn decide_victim(&self, pending: &PendingKill, now: Timestamp) -> Option<Victim> {
        let age = now.since(pending.noticed);
        // after a restart, a container that was never seen running is not known
        let state = pending.container.as_ref().and_then(|id| self.containers.get(id));
        let run = state.zip(pending.run).and_then(|(state, number)| state.runs.get(number));
        if run.is_none() && age < EXIT_EVENT_TIMEOUT {
            return None;
        }
        let by_runtime = || Some(run?.pid? == pending.kill.pid?).filter(|_| self.config.host_pids);
        let first = by_runtime();
        if first == Some(true) {
            // its exit is reported within milliseconds: until then this may be the run before
            let is_clear = run.is_none_or(|run| run.ended().is_some()) || age >= MAIN_EXIT_TIMEOUT;
            return is_clear.then_some(Victim::Main);
        }
        if let Some((run, ended)) = run.and_then(|run| Some((run, run.ended()?))) {
            if pending.kill.at > ended + CLOCK_TOLERANCE && age < RUNTIME_EVENT_TIMEOUT {
                return None; // the next run may have begun, but its start is not reported yet
            }
            return self.decide_victim_of_ended_run(pending, run, ended, first, now);
        }
        let is_empty = run.is_some_and(|run| self.emptied_after(run, pending.kill.at).is_some());
        let timeout = if is_empty { EXIT_EVENT_TIMEOUT } else { EXIT_TIMEOUT };
        // the container exits when the victim is gone, and not when it is killed
        let is_over = |since: Timestamp| age >= timeout && now.since(since) >= timeout;
        let is_gone = pending.gone_since().is_some_and(is_over) || age >= MAX_TEARDOWN;
        let decided = is_gone || run.is_some_and(|run| is_child_of_other_process(run, pending));
        decided.then_some(Victim::Child)
    }

    /// Returns when a run had ended at the latest, if a kill at this time ended it. A runtime reports an exit, and the time of it, once
    /// it has handled it, which takes a busy one seconds; a cycle may have seen before that that no process was left.
    fn latest_exit(&self, run: &LedgerRun, ended: f64, kill: f64) -> f64 {
        self.emptied_after(run, kill).map_or(ended, |emptied| ended.min(emptied))
    }

    /// Another pid namespace hides the processes from the cycles.
    fn emptied_after(&self, run: &LedgerRun, kill: f64) -> Option<f64> {
        run.emptied_after(kill).filter(|_| self.config.host_pids)
    }

    /// The same for a run that has ended. `is_first`: the victim was its first process, if that is known.
    fn decide_victim_of_ended_run(
        &self,
        pending: &PendingKill,
        run: &LedgerRun,
        ended: f64,
        is_first: Option<bool>,
        now: Timestamp,
    ) -> Option<Victim> {
        let is_later = |other: &&PendingKill| {
            // the run of the other one may not be certain yet
            other.container == pending.container
                && (other.run.is_none() || other.run == pending.run)
                && is_after(other, pending)
                && other.happened.earliest <= ended + CLOCK_TOLERANCE
        };
        let later: Vec<&PendingKill> = self.pending.iter().filter(is_later).collect();
        let is_explained = run.evidence.ended_by.is_some();
        // one that was logged after the exit is likely of the next run, whose start may not be reported yet
        let may_move = |other: &&PendingKill| {
            other.kill.at > ended + CLOCK_TOLERANCE && now.since(other.noticed) < RUNTIME_EVENT_TIMEOUT
        };
        if !is_explained && later.iter().any(may_move) {
            return None;
        }
        let exit = self.latest_exit(run, ended, pending.kill.at);
        let window = Interval::new(exit - EXIT_WINDOW, ended);
        let may_be_its = |kill: &PendingKill| kill.is_ownerless() && kill.happened.overlaps(&window);
        if !is_explained
            && (self.accounting.awaits_records(pending.noticed, now) || self.pending.iter().any(may_be_its))
        {
            return None; // one of them may have killed the main process
        }
        // a kill request: the runtime reports none for a container that is dead already
        let kills = |(at, signal): &(f64, Option<i32>)| {
            *signal == Some(9) && (-CLOCK_TOLERANCE..EXIT_WINDOW).contains(&(exit - at))
        };
        let by_it = exit - pending.gone_at() < EXIT_WINDOW
            && later.is_empty()
            && !is_explained
            && !run.evidence.stop_requests.iter().any(kills);
        Some(match run.exit_code() {
            Some(SIGKILL_STATUS) if by_it => Victim::Main,
            // the exit status is unknown: only a victim that is not known to be a child can have ended the container
            None if by_it && is_first.is_none() => Victim::Main,
            _ => Victim::Child,
        })
    }
}

/// Returns true if a kill was logged after another one, or noticed after it.
fn is_after(other: &PendingKill, pending: &PendingKill) -> bool {
    match (other.kill.kernel_usec, pending.kill.kernel_usec) {
        (Some(its), Some(own)) => (its, other.kill.id) > (own, pending.kill.id),
        _ => (other.kill.at, other.kill.id) > (pending.kill.at, pending.kill.id),
    }
}

/// Returns true if the container's first process will not exit with the status of this victim: the victim's parent is
/// another process, or the first process is a Python program, which does not pass on a child's status as a shell does.
fn is_child_of_other_process(run: &LedgerRun, pending: &PendingKill) -> bool {
    let seen = |pid: u32| run.process(pid);
    let Some(first) = run.pid.and_then(seen) else { return false };
    if pending.kill.pid == Some(first.pid) {
        return false;
    }
    let parent = || seen(seen(pending.kill.pid?)?.ppid);
    first.python || parent().is_some_and(|parent| parent.pid != first.pid && parent.python)
}

impl Reconciler {
    /// Decides the reasons that can be decided.
    pub(super) fn decide_exits(&mut self, now: Timestamp) {
        for mut pending in std::mem::take(&mut self.pending_exits) {
            self.update_exit(&mut pending.exit);
            let decision = if self.awaits_last_reports(&pending, now) {
                None
            } else {
                self.decide_reason(&pending, now)
            };
            let Some(Decision { mut reason, ended_by, may_be, log_error }) = decision else {
                let may_be = self.may_have_ended(&pending);
                if !pending.stored || may_be != pending.exit.may_be {
                    (pending.stored, pending.exit.may_be) = (true, may_be);
                    self.changes.put_event(LedgerEvent::Exit(pending.exit.clone()));
                    self.write_run(&pending);
                }
                self.pending_exits.push(pending);
                continue;
            };
            let kills_are_known = self.has_log_of(pending.exit.at);
            if self.log_up && !kills_are_known && reason == ExitReason::Killed {
                reason = ExitReason::Unknown;
            }
            (pending.exit.reason, pending.exit.ended_by, pending.exit.may_be) =
                (Some(reason), ended_by, may_be);
            pending.exit.log_error = log_error;
            pending.exit.kernel_log_read = kills_are_known;
            let runtime = pending.exit.subject.runtime;
            pending.exit.requests_known = self.containers.reports_requests(runtime, pending.exit.at);
            self.write_run(&pending);
            if self.containers.get(&pending.id).is_some() {
                let state = self.containers.modify(&pending.id);
                pending.exit.subject.run_number.into_iter().for_each(|number| state.forget_figures(number));
            }
            let exit = pending.exit;
            if !exit.before_counting {
                self.totals.count_exit(&exit.subject.identity, reason, exit.exit_code, exit.at);
            }
            self.changes.put_event(LedgerEvent::Exit(exit));
        }
    }

    /// Returns whether the kernel log was read of the time before an exit.
    fn has_log_of(&self, exit: f64) -> bool {
        self.log_up && self.kills_known_since.is_none_or(|since| exit >= since)
    }

    /// Writes the record of the run that ended so.
    fn write_run(&mut self, pending: &PendingExit) {
        // nothing of a run that ended before counting was measured
        if pending.exit.before_counting || self.containers.get(&pending.id).is_some_and(|state| state.hidden)
        {
            return;
        }
        let run = self.run_of_exit(&pending.exit);
        let in_run = run.map(|run| &run.evidence.figures);
        let figures = pending.figures.clone().map(|figures| figures.with_reports_of(in_run));
        if let Some(figures) = figures.as_ref().or(in_run) {
            let oom_limit = run.and_then(|run| run.evidence.oom_limit);
            let record = RunRecord { oom_limit, ..RunRecord::of_exit(figures, &pending.exit) };
            self.changes.runs.insert(pending.exit.id, record);
        }
    }

    /// Adds what became known about the run since its exit.
    fn update_exit(&self, exit: &mut Exit) {
        let Some(run) = self.run_of_exit(exit) else { return };
        exit.oom_kills = exit.oom_kills.max(run.evidence.kills);
        let stop_signals: Vec<_> = run.stop_signals_before(exit.at).collect();
        if exit.exit_code.is_none() && run.exit_code().is_some()
            || stop_signals.len() > exit.stop_signals.len()
        {
            exit.exit_code = exit.exit_code.or(run.exit_code());
            exit.stop_signals = stop_signals;
            exit.evidence = runtime_evidence(&exit.subject, run, exit.at);
        }
    }

    fn decide_reason(&self, pending: &PendingExit, now: Timestamp) -> Option<Decision> {
        let exit = &pending.exit;
        let run = self.run_of_exit(exit);
        if let Some((id, scope)) = run.and_then(|run| run.evidence.ended_by) {
            return Some(Decision { may_be: self.ownerless_near(pending), ..Decision::oom(id, scope) });
        }
        if run.is_some_and(|run| run.phase.is_of_another_boot()) {
            return Some(Decision::of(ExitReason::HostRestart));
        }
        let request = run.map_or(StopRequest::None, |run| stop_request(run, exit.at, exit.exit_code));
        // the record of a run is complete, and its cgroup its own: only a kill that it counted may still be read
        let counted = run.filter(|_| exit.subject.is_run()).and_then(LedgerRun::oom_flag);
        let is_complete = counted == Some(false) || counted == Some(true) && !self.has_log_of(exit.at);
        let is_early = now.since(pending.noticed) < EVIDENCE_TIMEOUT && !is_complete;
        let may_be_requested =
            exit.subject.runtime == RuntimeKind::Podman && now.since(pending.noticed) < REQUEST_REPLY_TIMEOUT;
        if may_be_requested && request != StopRequest::Explains {
            return None;
        }
        if exit.exit_code.is_some_and(|code| code != SIGKILL_STATUS) {
            let may_have_lost_more = self.may_have_lost_more(pending, run, now);
            let is_early_for_log = now.since(pending.noticed) < LOG_TIMEOUT && !is_complete;
            let waits_for_log = is_early_for_log && self.may_log_errors(&pending.id, run);
            let may_report = waits_for_log || is_early && self.connected.contains(&pending.id);
            return self.decide_error(pending, run, request, (is_early, may_have_lost_more, may_report));
        }
        // SIGKILL or unknown: a kill without an owner yet may be the reason
        let is_stopped = request == StopRequest::Explains;
        if is_early && !is_stopped || self.may_have_lost_more(pending, run, now) {
            return None;
        }
        if is_stopped {
            return Some(Decision::of(ExitReason::Stopped));
        }
        if exit.exit_code.is_some()
            && let Some(end) = run.and_then(|run| self.possible_end(run, exit.at))
        {
            return Some(Decision {
                may_be: self.ownerless_near(pending),
                ..Decision::oom(end.id, end.scope)
            });
        }
        let may_be = self.may_have_ended(pending);
        // a shell that cleans up first, or one with a trap, returns its child's status later
        // a Python program does not
        let is_python = run.and_then(|run| run.process(run.pid?)).is_some_and(|first| first.python);
        if exit.exit_code.is_some() && !is_python && self.has_lost_process(pending) {
            return Some(Decision { may_be, ..Decision::of(ExitReason::Error) });
        }
        let is_unattributed =
            may_be.iter().any(|id| self.unattributed.iter().any(|(_, other, _)| other == id));
        Some(match exit.exit_code {
            // no runtime knows the exit code
            None if run
                .is_some_and(|run| is_before(run.evidence.uncaught_cuda_oom, exit.at, CUDA_OOM_WINDOW))
                && !is_unattributed =>
            {
                Decision::of(ExitReason::CudaOom)
            }
            Some(_) if !is_unattributed && counted != Some(true) => Decision::of(ExitReason::Killed),
            _ => Decision { may_be, ..Decision::of(ExitReason::Unknown) },
        })
    }

    /// Returns whether a kill that is not decided yet, or whose record is missing, may be of this run.
    fn may_have_lost_more(&self, pending: &PendingExit, run: Option<&LedgerRun>, now: Timestamp) -> bool {
        let window = Interval::new(pending.exit.at - EXIT_WINDOW, pending.exit.at);
        let is_undecided = self.pending.iter().any(|kill| {
            let may_be_its = kill.container.is_none() || kill.container.as_ref() == Some(&pending.id);
            let is_of_run =
                kill.container.is_some() && kill.run.is_some() && kill.run == run.map(|run| run.number);
            may_be_its && kill.kill.owner != KillOwner::Host && (is_of_run || kill.happened.overlaps(&window))
        });
        is_undecided || self.accounting.awaits_records(pending.noticed, now)
    }

    /// The same for an exit with another status than that of SIGKILL. `may_have_lost_more`: a kill of this run may still become known;
    /// `may_report`: its log or its last messages.
    fn decide_error(
        &self,
        pending: &PendingExit,
        run: Option<&LedgerRun>,
        request: StopRequest,
        (is_early, may_have_lost_more, may_report): (bool, bool, bool),
    ) -> Option<Decision> {
        let is_open = is_early || may_have_lost_more;
        let status = pending.exit.exit_code;
        let is_crash = status.is_some_and(is_crash_status);
        let is_explained = request == StopRequest::Explains || status == Some(0);
        let logged = run.filter(|_| !is_explained).and_then(|run| logged_error(run, pending));
        if let Some(error) = logged.filter(|_| self.may_have_ended(pending).is_empty()) {
            // the log of a run that follows at once is being read too
            if is_open || may_report && self.logs_being_read.contains(&pending.id) {
                return None;
            }
            let other = if is_crash { ExitReason::Signal } else { ExitReason::Error };
            let reason = ExitReason::of_error(error.error).unwrap_or(other);
            return Some(Decision { log_error: Some(error), ..Decision::of(reason) });
        }
        let reason = match (request, pending.exit.exit_code) {
            // the exit has the number of kills
            (StopRequest::Explains, _) | (_, Some(0)) if may_have_lost_more => return None,
            (StopRequest::Explains, _) => ExitReason::Stopped,
            (StopRequest::MayExplain, _) if is_early => return None, // docker reports the end of its stop after the exit
            (_, Some(0)) => ExitReason::Completed,
            _ if may_report && (is_crash || status == Some(SIGINT_STATUS)) => return None,
            // a program may exit with such a status by itself, as papermill does after the kill of its kernel
            (_, Some(129..=192)) if !self.has_lost_process(pending) && is_open => return None,
            (_, Some(129..=192)) if !self.has_lost_process(pending) => ExitReason::Signal,
            _ if run.is_some_and(|run| ended_by_cuda_oom(run, pending)) => ExitReason::CudaOom,
            _ if may_report => return None,
            // the kill of a worker, which may be the cause, is noticed before
            _ => {
                let may_be = self.may_have_ended(pending);
                return Some(Decision { may_be, ..Decision::of(ExitReason::Error) });
            }
        };
        Some(Decision::of(reason))
    }

    /// Returns the ids of the kills that may have ended a run: of its own processes shortly before, and of processes whose owner is not
    /// known; in order.
    fn may_have_ended(&self, pending: &PendingExit) -> Vec<u64> {
        let run = self.run_of_exit(&pending.exit);
        let own = run.and_then(|run| run.evidence.last_kill).filter(|(_, at)| is_cause(*at, &pending.exit));
        let is_its = |kill: &&PendingKill| {
            let is_of_run = kill.run.is_none() || kill.run == run.map(|run| run.number);
            kill.container.as_ref() == Some(&pending.id) && is_of_run && is_cause(kill.kill.at, &pending.exit)
        };
        let its = self.pending.iter().filter(is_its).map(|kill| kill.kill.id);
        let own = own.map(|(id, _)| id).into_iter().chain(its);
        let mut ids: Vec<u64> = own.chain(self.ownerless_near(pending)).collect();
        ids.sort_unstable();
        ids.drain(..ids.len().saturating_sub(MAX_MAY_BE));
        ids
    }

    /// Returns whether a process of this run was killed so shortly before its end that this may follow from it. A kill that is not settled
    /// may still turn out to be of the next run, whose start is reported later.
    fn has_lost_process(&self, pending: &PendingExit) -> bool {
        let last_kill = self.run_of_exit(&pending.exit).and_then(|run| run.evidence.last_kill);
        last_kill.is_some_and(|(_, at)| is_cause(at, &pending.exit))
    }

    fn run_of_exit(&self, exit: &Exit) -> Option<&LedgerRun> {
        let RunId { container, number } = exit.subject.run_id()?;
        self.containers.get(&container)?.runs.get(number)
    }

    /// Returns the ids of the kills without a known owner that may have been in this container just before its exit, in order.
    fn ownerless_near(&self, pending: &PendingExit) -> Vec<u64> {
        let window = Interval::new(pending.exit.at - EXIT_WINDOW, pending.exit.at);
        let is_near = |kill: &&PendingKill| {
            // one in a cgroup that a user can have named is of no container, unless its runtime says so
            let is_open = kill.container.is_none() && kill.is_ownerless() && !kill.is_unproven;
            is_open && kill.happened.overlaps(&window)
        };
        let pending = self.pending.iter().filter(is_near).map(|kill| kill.kill.id);
        let unattributed = self.unattributed.iter().filter(|(.., happened)| happened.overlaps(&window));
        let mut ids: Vec<u64> = unattributed.map(|(_, id, _)| *id).chain(pending).collect();
        ids.sort_unstable();
        ids.drain(..ids.len().saturating_sub(MAX_MAY_BE));
        ids
    }

    /// Returns whether the last messages of a process of a run are still to be read: they belong to its record.
    fn awaits_last_reports(&self, pending: &PendingExit, now: Timestamp) -> bool {
        now.since(pending.noticed) < LAST_REPORTS_TIMEOUT && self.connected.contains(&pending.id)
    }

    /// Returns whether the log of a container that has ended is not read yet. That of a run that no cycle saw is read from the next
    /// cycle on.
    fn may_log_errors(&self, id: &ContainerId, run: Option<&LedgerRun>) -> bool {
        let is_unseen = run.is_some_and(|run| run.evidence.usage.is_empty());
        self.logs_being_read.contains(id) || self.reads_logs && is_unseen
    }

    /// Returns the kill that ended the run, if its exit was reported so late that the kill was settled as a child's.
    fn possible_end(&self, run: &LedgerRun, ended: f64) -> Option<PossibleEnd> {
        let end = run.evidence.possible_end?;
        let exit = self.latest_exit(run, ended, end.at);
        (-CLOCK_TOLERANCE..EXIT_WINDOW).contains(&(exit - end.at)).then_some(end)
    }
}

/// Returns whether an end with an error may follow from a kill at this time.
fn is_cause(kill: f64, exit: &Exit) -> bool {
    (-EXIT_WINDOW..=CAUSE_WINDOW).contains(&(exit.at - kill))
}

/// Why a run ended.
struct Decision {
    reason: ExitReason,
    /// Id of the kill that ended it.
    ended_by: Option<u64>,
    /// Ids of the kills that may have ended it.
    may_be: Vec<u64>,
    /// The error in its log that explains it.
    log_error: Option<HostErrorText>,
}

impl Decision {
    fn of(reason: ExitReason) -> Self {
        Self { reason, ended_by: None, may_be: vec![], log_error: None }
    }

    fn oom(id: u64, scope: OomScope) -> Self {
        let reason = match scope {
            OomScope::Container => ExitReason::OomContainer,
            OomScope::Host => ExitReason::OomHost,
        };
        Self { ended_by: Some(id), ..Self::of(reason) }
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
fn stop_request(run: &LedgerRun, ended: f64, code: Option<i64>) -> StopRequest {
    let requests = run
        .evidence
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
        if explains || run.evidence.is_stop_confirmed {
            return StopRequest::Explains;
        }
        outcome = StopRequest::MayExplain;
    }
    outcome
}

/// Returns true if a run that ended with an error did so because of a CUDA out-of-memory error.
fn ended_by_cuda_oom(run: &LedgerRun, pending: &PendingExit) -> bool {
    let is_before = |oom, most| is_before(oom, pending.exit.at, most);
    let figures = pending.figures.as_ref().unwrap_or(&run.evidence.figures);
    // the log has the errors that processes report too, and does not say which were caught
    let in_log = run
        .evidence
        .cuda_oom_in_log
        .filter(|_| !figures.has_reports() && !run.evidence.figures.has_reports());
    is_before(run.evidence.uncaught_cuda_oom, UNCAUGHT_OOM_WINDOW)
        || is_before(run.evidence.cuda_oom, CUDA_OOM_WINDOW)
        || is_before(in_log, LOG_OOM_WINDOW)
}

/// Returns the error in the log of a run that explains its end: the last one before it, of a program that ended with an error or crashed.
fn logged_error(run: &LedgerRun, pending: &PendingExit) -> Option<HostErrorText> {
    let (at, error) = run.evidence.log_error?;
    let is_its = match pending.exit.exit_code? {
        // numpy ends by an interrupt where it gets no thread
        SIGINT_STATUS => error.error == HostError::Threads,
        status @ 129..=192 => is_crash_status(status),
        _ => true,
    };
    let is_near = (-LATE_LINE..LOG_OOM_WINDOW).contains(&(pending.exit.at - at));
    (is_its && is_near && !ended_by_cuda_oom(run, pending)).then_some(error)
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

impl LedgerRun {
    /// Records a kill, which may have ended this run.
    pub fn record_kill(&mut self, victim: Victim, kill: &Kill, container_id: &str) {
        let scope = kill.scope;
        let newest = || self.evidence.usage.back().and_then(|(_, usage)| usage.sample);
        let last = self.samples_until(kill.at).pop().or_else(newest);
        let limits = last.map(|last| (last.limit_bytes, last.effective_limit_bytes)).unwrap_or_default();
        let hit = HitLimit::of(kill, container_id, limits);
        self.evidence.oom_limit =
            if self.evidence.ended_by.is_some() { self.evidence.oom_limit } else { hit };
        self.evidence.kills += 1;
        self.evidence.last_kill = Some((kill.id, kill.at));
        if victim == Victim::Main {
            self.evidence.ended_by = Some((kill.id, scope));
        }
    }
}
