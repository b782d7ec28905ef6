//! Decides whether a kill ended its container, and settles it. Pure.

use std::time::Duration;

use super::Reconciler;
use super::owner::{ATTRIBUTION_TIMEOUT, PendingKill, RUNTIME_EVENT_TIMEOUT};
use crate::clock::Timestamp;
use crate::ledger::events::{Evidence, KillOwner, Victim};
use crate::ledger::interval::{CLOCK_TOLERANCE, Interval};
use crate::ledger::run::{Run, SIGKILL_STATUS};
use crate::ledger::totals::Total;

/// A container whose first process exits with SIGKILL's status within this many seconds after a child's kill was ended
/// by it.
pub const EXIT_WINDOW: f64 = 5.0;
/// How long to wait for such an exit.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long to wait for it if no process is left in the container.
const LATE_EXIT_TIMEOUT: Duration = Duration::from_secs(15);
/// How long to wait for the runtime's exit event once the kill is known to have ended the container.
const MAIN_EXIT_TIMEOUT: Duration = Duration::from_millis(500);

impl Reconciler {
    /// Settles the kills that can be decided, and those that timed out as unattributed.
    pub(super) fn settle_kills(&mut self, now: Timestamp) {
        let mut at = 0;
        while at < self.pending.len() {
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
                self.totals.add(Total::HostProcess, 1);
                true
            }
            KillOwner::Container(subject) => {
                let Some(victim) = self.decide_victim(pending, age) else { return false };
                let (scope, when) = (pending.kill.scope, pending.kill.at);
                self.totals.count_kill(&subject.name, victim, scope, when);
                if let (Some(id), Some(number)) = (&pending.container, pending.run)
                    && let Some(run) = self.containers.modify(id).run_mut(number)
                {
                    run.record_kill(victim, &pending.kill, id.as_str());
                    if victim == Victim::Child && !is_child_of_other_process(run, pending) {
                        run.possible_end = Some((when, scope));
                    }
                }
                self.pending[at].kill.victim = Some(victim);
                true
            }
            _ if age >= ATTRIBUTION_TIMEOUT && pending.container.is_none() => {
                self.totals.add(Total::Unattributed, 1);
                let text = self.rival_owners(&pending.happened);
                let kill = &mut self.pending[at].kill;
                kill.evidence.extend(text.map(|text| Evidence::new("cgroup", text)));
                kill.owner = KillOwner::Unattributed;
                true
            }
            _ => false,
        }
    }

    /// Returns whether the kill ended its container; `None` if that is not known yet.
    fn decide_victim(&self, pending: &PendingKill, age: Duration) -> Option<Victim> {
        // after a restart, a container that was never seen running is not known
        let known = pending.container.as_ref().and_then(|id| self.containers.get(id));
        let run = known.zip(pending.run).and_then(|(known, number)| known.run(number));
        if run.is_none() && age < LATE_EXIT_TIMEOUT {
            return None;
        }
        let by_runtime = || Some(run?.pid? == pending.kill.pid?).filter(|_| self.config.host_pids);
        let first = by_runtime();
        if first == Some(true) {
            // its exit is reported within milliseconds: until then this may be the run before
            let is_clear = run.is_none_or(|run| run.ended.is_some()) || age >= MAIN_EXIT_TIMEOUT;
            return is_clear.then_some(Victim::Main);
        }
        if let Some((run, ended)) = run.and_then(|run| Some((run, run.ended?))) {
            if pending.kill.at > ended + CLOCK_TOLERANCE && age < RUNTIME_EVENT_TIMEOUT {
                return None; // the next run may have begun, but its start is not reported yet
            }
            return self.decide_victim_of_ended_run(pending, run, ended, first, age);
        }
        let is_empty = run.is_some_and(|run| self.emptied_after(run, pending.kill.at).is_some());
        let timeout = if is_empty { LATE_EXIT_TIMEOUT } else { EXIT_TIMEOUT };
        let decided = age >= timeout || run.is_some_and(|run| is_child_of_other_process(run, pending));
        decided.then_some(Victim::Child)
    }

    /// Returns when a run had ended at the latest, if a kill at this time ended it. A runtime reports an exit, and the time of it, once
    /// it has handled it, which takes a busy one seconds; a cycle may have seen before that that no process was left.
    pub(super) fn latest_exit(&self, run: &Run, ended: f64, kill: f64) -> f64 {
        self.emptied_after(run, kill).map_or(ended, |emptied| ended.min(emptied))
    }

    /// Another pid namespace hides the processes from the cycles.
    fn emptied_after(&self, run: &Run, kill: f64) -> Option<f64> {
        run.emptied_after(kill).filter(|_| self.config.host_pids)
    }

    /// The same for a run that has ended. `is_first`: the victim was its first process, if that is known.
    fn decide_victim_of_ended_run(
        &self,
        pending: &PendingKill,
        run: &Run,
        ended: f64,
        is_first: Option<bool>,
        age: Duration,
    ) -> Option<Victim> {
        let is_later = |other: &&PendingKill| {
            // the run of the other one may not be certain yet
            other.container == pending.container
                && (other.run.is_none() || other.run == pending.run)
                && is_after(other, pending)
                && other.happened.earliest <= ended + CLOCK_TOLERANCE
        };
        let later: Vec<&PendingKill> = self.pending.iter().filter(is_later).collect();
        let is_explained = run.ended_by.is_some();
        // one that was logged after the exit is likely of the next run, whose start may not be reported yet
        let may_move = |other: &&PendingKill| {
            let its_age = age.saturating_sub(other.noticed.since(pending.noticed));
            other.kill.at > ended + CLOCK_TOLERANCE && its_age < RUNTIME_EVENT_TIMEOUT
        };
        if !is_explained && later.iter().any(may_move) {
            return None;
        }
        let exit = self.latest_exit(run, ended, pending.kill.at);
        let window = Interval::new(exit - EXIT_WINDOW, ended);
        let may_be_its = |kill: &PendingKill| kill.is_ownerless() && kill.happened.overlaps(&window);
        let is_counter_ahead = self.accounting.has_missing_records() && age < ATTRIBUTION_TIMEOUT;
        if !is_explained && (is_counter_ahead || self.pending.iter().any(may_be_its)) {
            return None; // one of them may have killed the main process
        }
        // a kill request: the runtime reports none for a container that is dead already
        let kills = |(at, signal): &(f64, Option<i32>)| {
            *signal == Some(9) && (-CLOCK_TOLERANCE..EXIT_WINDOW).contains(&(exit - at))
        };
        let by_it = exit - pending.kill.at < EXIT_WINDOW
            && later.is_empty()
            && !is_explained
            && !run.stop_requests.iter().any(kills);
        Some(match run.exit_code {
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
fn is_child_of_other_process(run: &Run, pending: &PendingKill) -> bool {
    let seen = |pid: u32| run.process(pid);
    let Some(first) = run.pid.and_then(seen) else { return false };
    if pending.kill.pid == Some(first.pid) {
        return false;
    }
    let parent = || seen(seen(pending.kill.pid?)?.ppid);
    first.python || parent().is_some_and(|parent| parent.pid != first.pid && parent.python)
}
