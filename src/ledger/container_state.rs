//! One container that the ledger knows, and the starts and ends of its runs. Pure.
//!
//! Runtime events and the cycle's inventory both report each run; it has a number from its first report on.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::interval::Interval;
use super::run::Run;
use crate::clock::{ClockStep, Timestamp, is_same_report};
use crate::discover::{ContainerId, PathClaim, RuntimeEvent, RuntimeKind};
use crate::events::{ContainerRef, Identity, PriorUsage};
use crate::lifecycle::timing::{CLOCK_TOLERANCE, MAX_START_EVENT_DELAY, START_TOLERANCE, STOP_REPORT_DELAY};
use crate::lifecycle::{ReportedEnd, ReportedRun, RunId, RunNumber, RunStart, StartReport};
use crate::parse::kubernetes;
use crate::runs::peaks::StoredPeaks;
use crate::runs::usage_history::roles;
use crate::runs::{RunFigures, RunRecord};

/// Maximum number of stop requests that are kept per run.
const MAX_STOP_REQUESTS: usize = 8;
/// Maximum number of ended runs that are kept per container once nothing of them is undecided, for late kills.
pub const MAX_ENDED_RUNS: usize = 4;
/// Maximum number of former names that are kept per container.
const MAX_FORMER_NAMES: usize = 8;
/// Maximum number of ended runs before that: after a pause, the runtime's events of many runs are applied before the kernel
/// log of that time is read.
const MAX_UNDECIDED_RUNS: usize = 1_024;

/// One container.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ContainerState {
    /// Labels of its series.
    pub identity: Identity,
    /// The name is from a runtime; otherwise it is the short id.
    pub named: bool,
    /// Image; empty if no runtime reported it.
    pub image: Arc<str>,
    /// Its runtime.
    pub runtime: RuntimeKind,
    /// The user whose engine or run it is, once a runtime that knows it has reported it.
    #[serde(default)]
    pub user: Option<u32>,
    /// Unix time of the runtime's last OOM event that is of no run: its start may not be reported yet.
    pub oom_event_at: Option<f64>,
    /// Cgroup path, relative to the root of the hierarchy, from the inventory.
    pub cgroup: Option<PathBuf>,
    /// It is the sandbox of a pod, by its runtime, and no container: no cycle begins a run of it.
    #[serde(default)]
    pub is_sandbox: bool,
    /// Unix time since which its runtime does not list the sandbox any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub removed_at: Option<f64>,
    /// Excluded by the filters.
    pub hidden: bool,
    /// Current or last run; `None` if it was never seen running.
    pub run: Option<Run>,
    /// Unix time of the first event, or of the last kill if it was never seen running.
    pub first_event_at: f64,
    /// Names that it had before, newest last: what was counted under them is shown for a while.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub former: Vec<FormerName>,
    /// Unix time of the last event that renamed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renamed_at: Option<f64>,
    /// OOM kills that were counted under its name.
    #[serde(default)]
    pub kills: u64,
    /// Unix time of its last kill, under whatever name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_kill: Option<f64>,
    /// Runs before the current one, oldest first.
    #[serde(default, skip_serializing_if = "VecDeque::is_empty")]
    pub(super) ended_runs: VecDeque<Run>,
    /// Unix time of the end of the last run that was dropped: an older kill belongs to none of the known runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) dropped_until: Option<f64>,
    #[serde(skip)]
    pub(super) settings: Vec<(Arc<str>, Arc<str>)>,
    /// Starts that are not counted yet: it had no name.
    pub(super) uncounted_starts: u32,
    /// When the first of them was noticed.
    #[serde(skip)]
    pub(super) uncounted_since: Option<Timestamp>,
}

/// A name that a container had before.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FormerName {
    /// The name.
    pub identity: Identity,
    /// Unix time at which it got another one.
    pub until: f64,
    /// Its OOM kills that were counted under it.
    pub kills: u64,
}

/// A start or an end of a run.
#[derive(Clone, Debug)]
pub enum RunTransition {
    /// A run began.
    Began(ContainerId),
    /// A run ended.
    Ended(Box<End>),
    /// The end of a run was assumed, and it goes on.
    Reopened(RunId),
}

/// The data of a run that ended.
#[derive(Clone, Debug)]
pub struct End {
    /// Id of the container.
    pub id: ContainerId,
    /// The container.
    pub subject: ContainerRef,
    /// The run, with its exit.
    pub run: Run,
    /// Usage before the exit.
    pub before: Option<PriorUsage>,
}

/// How an end by SIGKILL fits a kill without a pid, or one between two runs.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
enum Sigkill {
    /// The run did not end so, or something else explains that.
    None,
    /// Another kill is taken for that of this run: its processes may have been killed together.
    Taken,
    Unexplained,
}

/// How well a run fits a kill; the first field decides.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
struct RunRank {
    by_pid: bool,
    sigkill: Sigkill,
    /// Seconds from the likely time to the run, negated.
    nearness: f64,
    overlap: f64,
}

impl ContainerState {
    /// Returns true if it is running, as far as known.
    pub fn is_running(&self) -> bool {
        self.run.as_ref().is_some_and(|run| run.ended().is_none())
    }

    /// Gives it another name at this Unix time. Returns the name before; `None` if it was the same.
    pub(super) fn rename(&mut self, identity: Identity, at: f64) -> Option<Identity> {
        if self.identity == identity {
            return None;
        }
        let before = std::mem::replace(&mut self.identity, identity);
        if self.named {
            let kills = std::mem::take(&mut self.kills);
            // it may have had the new name before
            let again = self.former.iter().position(|former| former.identity == self.identity);
            self.kills = again.map_or(0, |at| self.former.remove(at).kills);
            self.former.push(FormerName { identity: before.clone(), until: at, kills });
            if self.former.len() > MAX_FORMER_NAMES {
                self.former.remove(0);
            }
        }
        Some(before)
    }

    /// Returns its OOM kills that were counted under former names.
    pub fn former_kills(&self) -> u64 {
        self.former.iter().map(|former| former.kills).sum()
    }

    /// Makes it the sandbox of a pod, which cycles may have taken for a container.
    pub(super) fn become_sandbox(&mut self, at: f64) {
        (self.is_sandbox, self.run, self.uncounted_starts) = (true, None, 0);
        (self.first_event_at, self.removed_at) = (at, None);
        self.ended_runs.clear();
    }

    /// Counts an OOM kill under its name, or under a former one.
    pub(super) fn count_kill(&mut self, name: Option<&Identity>, at: f64) {
        let former = self.former.iter_mut().find(|former| Some(&former.identity) == name);
        *former.map_or(&mut self.kills, |former| &mut former.kills) += 1;
        self.last_kill = Some(self.last_kill.unwrap_or(f64::MIN).max(at));
    }

    /// Corrects the times, if the clock was set.
    pub fn correct_times(&mut self, step: &ClockStep) {
        step.correct(&mut self.first_event_at);
        let former = self.former.iter_mut().map(|former| &mut former.until);
        let others = self.last_kill.iter_mut().chain(&mut self.renamed_at).chain(&mut self.removed_at);
        former.chain(others).for_each(|at| step.correct(at));
        self.oom_event_at.iter_mut().chain(&mut self.dropped_until).for_each(|at| step.correct(at));
        self.ended_runs.iter_mut().chain(&mut self.run).for_each(|run| run.correct_times(step));
    }

    /// Adds the details of an event to the run in progress, for a run that no cycle sees.
    pub fn complete_run(&mut self, runtime_event: &RuntimeEvent) {
        if let (Some(run), Some(details)) = (&mut self.run, &runtime_event.named)
            && run.ended().is_none()
            && !self.hidden
        {
            run.figures.complete(&runtime_event.id, details);
        }
    }

    /// Returns the container as the subject of an event of this run.
    pub fn subject(&self, id: &ContainerId, run: Option<&Run>) -> ContainerRef {
        ContainerRef {
            identity: self.identity.clone(),
            container_id: Arc::clone(id.shared()),
            image: Arc::clone(&self.image),
            runtime: self.runtime,
            run_number: run.map(|run| run.number),
            started: run.and_then(|run| run.start.first),
            former_names: self.former.iter().map(|former| Arc::clone(&former.identity.name)).collect(),
        }
    }

    /// Returns the peaks of the run in progress; `None` if it does not run.
    pub fn stored_peaks(&self) -> Option<StoredPeaks> {
        self.run.as_ref().filter(|run| run.ended().is_none()).map(|run| run.figures.stored_peaks())
    }

    /// Returns the record of the run in progress; `None` if it does not run, or if no cycle has seen it.
    pub fn record_of_running(&self, id: &ContainerId) -> Option<RunRecord> {
        let run = self.run.as_ref().filter(|run| run.ended().is_none())?;
        RunRecord::of_running(self.subject(id, Some(run)), &run.figures, run.kills, run.oom_limit)
    }

    /// Returns the run in which a process was killed, and whether it is certain; `None` if no known run can have been it.
    /// A first process with its pid decides; for a kill without a pid, and for one between two runs, an exit by SIGKILL that nothing
    /// explains; then the most likely time `at`; then the longest overlap, which is not certain: a later run may not be reported yet.
    /// `is_explained`: another kill is taken for that of the run with this number.
    pub fn run_of_kill(
        &self,
        happened: &Interval,
        at: f64,
        pid: Option<u32>,
        is_explained: impl Fn(RunNumber) -> bool,
    ) -> Option<(&Run, bool)> {
        let mut begin = self.dropped_until.map_or(f64::NEG_INFINITY, |ended| ended + CLOCK_TOLERANCE);
        let mut best: Option<(RunRank, bool, &Run)> = None;
        // after the end of a run and before the event of the next start, which Podman sends once it has stored that: a program may have
        // been killed by then, longer before the event than after the end
        let is_between_runs = !self.all_runs().any(|run| run.is_reported_at(at));
        for run in self.all_runs() {
            let start = run.begin().map_or(f64::NEG_INFINITY, |started| started - MAX_START_EVENT_DELAY);
            // it began after the end of the one before, unless the clock was set back between them
            let is_set_back = run.begin().is_some_and(|began| began < begin - START_TOLERANCE);
            let earliest = if is_set_back { start } else { begin.max(start) };
            let window = Interval::new(earliest, run.phase.latest_end().unwrap_or(f64::INFINITY));
            begin = run.phase.latest_end().map_or(begin, |ended| ended + CLOCK_TOLERANCE);
            if !window.overlaps(happened) {
                continue;
            }
            let sigkill = match (pid.is_none() || is_between_runs) && run.is_sigkill_unexplained() {
                false => Sigkill::None,
                true if !is_explained(run.number) => Sigkill::Unexplained,
                true if pid.is_none() => Sigkill::Taken,
                true => Sigkill::None,
            };
            let rank = RunRank {
                by_pid: pid.is_some() && run.pid == pid,
                sigkill,
                nearness: -(run.start.first.unwrap_or(window.earliest) - at).max(at - window.latest).max(0.0),
                overlap: window.overlap(happened),
            };
            let is_likely = (window.earliest..=window.latest + CLOCK_TOLERANCE).contains(&at);
            if best.is_none_or(|(other, ..)| rank > other) {
                let is_proven = pid.is_none() && sigkill == Sigkill::Unexplained;
                best = Some((rank, rank.by_pid || is_proven || is_likely, run));
            }
        }
        best.map(|(_, is_certain, run)| (run, is_certain))
    }

    /// Returns when the run before the current one ended, or the last time at which it is known not to have ended.
    pub(super) fn previous_end(&self) -> Option<f64> {
        self.ended_runs.back()?.latest_known()
    }

    /// Returns the run with this number.
    pub fn run(&self, number: RunNumber) -> Option<&Run> {
        self.all_runs().find(|run| run.number == number)
    }

    /// Returns the run with this number for a change.
    pub fn run_mut(&mut self, number: RunNumber) -> Option<&mut Run> {
        self.ended_runs.iter_mut().chain(&mut self.run).find(|run| run.number == number)
    }

    /// Returns the run at this Unix time for a change.
    pub fn run_at_mut(&mut self, at: f64) -> Option<&mut Run> {
        let runs = self.ended_runs.iter_mut().chain(&mut self.run);
        runs.into_iter().find(|run| {
            run.begin().is_none_or(|started| started <= at + CLOCK_TOLERANCE)
                && run.ended().is_none_or(|ended| ended + CLOCK_TOLERANCE >= at)
        })
    }

    /// Returns what is known of it and a path from the root of the tree: whether that is its own cgroup or below it.
    pub fn claim(&self, path: &str) -> PathClaim {
        let path = Path::new(path.trim_start_matches('/'));
        match self.cgroup.as_ref().is_some_and(|cgroup| path.starts_with(cgroup)) {
            true => PathClaim::Own,
            false => PathClaim::Possible { user: self.user },
        }
    }

    /// Returns the known runs, oldest first.
    pub fn all_runs(&self) -> impl Iterator<Item = &Run> {
        self.ended_runs.iter().chain(&self.run)
    }

    /// Forgets the figures of a run whose record is complete.
    pub fn forget_figures(&mut self, number: RunNumber) {
        // one whose end was assumed may be listed again
        let last = self.run.iter_mut().filter(|run| run.ended().is_some() && !run.phase.is_end_assumed());
        let mut runs = self.ended_runs.iter_mut().chain(last);
        if let Some(run) = runs.find(|run| run.number == number) {
            run.figures = RunFigures::default();
        }
    }

    /// Returns the exits of its runs as transitions, each once: when one has ended and is known to be a container's.
    pub(super) fn end_transitions(&mut self, id: &ContainerId) -> Vec<RunTransition> {
        std::iter::from_fn(|| self.end_transition(id)).collect()
    }

    fn end_transition(&mut self, id: &ContainerId) -> Option<RunTransition> {
        if self.may_be_sandbox() {
            return None;
        }
        let mut runs = self.ended_runs.iter_mut().chain(&mut self.run);
        let is_new = |run: &mut Run| run.phase.record() && !(run.has_exit && run.phase.is_end_assumed());
        let run = runs.find_map(|run| is_new(run).then_some(&*run))?.clone();
        let ended = run.ended().unwrap_or(f64::INFINITY);
        Some(RunTransition::Ended(Box::new(End {
            id: id.clone(),
            subject: self.subject(id, Some(&run)),
            before: self.prior_usage(&run, ended),
            run,
        })))
    }

    /// Returns whether what ended may have been the sandbox of a pod, which has a cgroup like that of a container: no runtime has named it or
    /// reported its end, and none of its processes was killed.
    fn may_be_sandbox(&self) -> bool {
        let is_in_pod = |path: &PathBuf| kubernetes::qos(&path.to_string_lossy()).is_some();
        let is_unknown = |run: &Run| run.phase.is_end_unreported() && run.kills == 0;
        !self.named
            && self.cgroup.as_ref().is_some_and(is_in_pod)
            && self.run.as_ref().is_some_and(is_unknown)
    }

    /// Returns the settings of labels and environment.
    pub fn settings(&self) -> &[(Arc<str>, Arc<str>)] {
        &self.settings
    }

    /// Returns the usage up to this Unix time; `None` if there is no sample.
    pub fn prior_usage(&self, run: &Run, until: f64) -> Option<PriorUsage> {
        let samples = run.samples_until(until);
        if samples.is_empty() {
            return None;
        }
        let roles = run.usage_until(until).map_or(vec![], roles);
        let settings = run.figures.settings_over(&self.settings);
        Some(PriorUsage { samples, roles, settings, ..PriorUsage::default() })
    }

    /// Starts a run by a report of its start, unless it is known already. `number`: that of a new run.
    pub(super) fn begin_run(
        &mut self,
        id: &ContainerId,
        number: RunNumber,
        report: StartReport,
        pid: Option<u32>,
    ) -> Vec<RunTransition> {
        let mut transitions = Vec::new();
        let previous_end = self.previous_end();
        if let Some(run) = self.run.as_mut() {
            match run.start.compare(&run.phase, report, previous_end) {
                ReportedRun::Earlier => return transitions,
                ReportedRun::This => {
                    run.pid = run.pid.or(pid);
                    run.start.add(report, &run.phase, previous_end);
                    return transitions;
                }
                // its end was not reported, unless it is known; one of another boot has its time
                ReportedRun::Next => run.phase.assume_end(report.at.unwrap_or_default()),
            }
        }
        let may_be_sandbox = self.may_be_sandbox();
        self.ended_runs.extend(self.run.take());
        if !may_be_sandbox {
            transitions.extend(self.end_transitions(id));
        }
        if self.ended_runs.len() > MAX_UNDECIDED_RUNS {
            self.drop_oldest_run();
        }
        let is_of_run = |at: &mut f64| report.at.is_some_and(|started| *at >= started - CLOCK_TOLERANCE);
        let oom_event_at = self.oom_event_at.take_if(is_of_run);
        self.run = Some(Run { number, start: RunStart::new(report), pid, oom_event_at, ..Run::default() });
        transitions.push(RunTransition::Began(id.clone()));
        transitions
    }

    /// Returns true if more ended runs are kept than late kills need.
    pub(super) fn has_surplus_runs(&self) -> bool {
        self.ended_runs.len() > MAX_ENDED_RUNS
    }

    /// Drops the oldest ended runs beyond [`MAX_ENDED_RUNS`] that were replaced so long ago that the records of their kills must
    /// have been read, and of which nothing is undecided. Returns whether it dropped any.
    pub(super) fn drop_decided_runs(
        &mut self,
        now: Timestamp,
        after: Duration,
        is_undecided: impl Fn(&Run) -> bool,
    ) -> bool {
        let before = self.ended_runs.len();
        for run in &mut self.ended_runs {
            run.replaced_at.get_or_insert(now);
        }
        while self.has_surplus_runs() {
            let is_old = |run: &Run| run.replaced_at.is_some_and(|at| now.since(at) >= after);
            if !self.ended_runs.front().is_some_and(|run| is_old(run) && !is_undecided(run)) {
                break;
            }
            self.drop_oldest_run();
        }
        self.ended_runs.len() < before
    }

    fn drop_oldest_run(&mut self) {
        if let Some(run) = self.ended_runs.pop_front() {
            self.dropped_until = run.ended().or(self.dropped_until);
        }
    }

    /// Applies a request to stop the container, or to send it a signal, which may be reported after the end. Without a signal it is the
    /// end of a stop: Docker reports that just after the exit, from version 28 on just before it.
    pub(super) fn apply_stop_request(&mut self, at: f64, signal: Option<i32>) {
        // repeated after a restart, it may belong to an earlier run
        let may_be_its = |run: &&mut Run| run.begin().is_none_or(|started| started <= at + CLOCK_TOLERANCE);
        let Some(run) = self.run.iter_mut().chain(self.ended_runs.iter_mut().rev()).find(may_be_its) else {
            return;
        };
        let after_end = run.ended().map(|ended| at - ended);
        let has_signal = run.stop_requests.iter().any(|(_, signal)| signal.is_some());
        let is_confirmation = match after_end {
            Some(after) => (0.0..STOP_REPORT_DELAY).contains(&after),
            None => has_signal,
        };
        if signal.is_none() && is_confirmation {
            run.is_stop_confirmed = true;
        } else if after_end.is_none_or(|after| after < 0.0)
            && !run.stop_requests.iter().any(|(known, its)| is_same_report(*known, at) && *its == signal)
        {
            run.stop_requests.push((at, signal));
            if run.stop_requests.len() > MAX_STOP_REQUESTS {
                run.stop_requests.remove(0);
            }
        }
    }

    /// Applies the exit of a run. Returns nothing if the exit is known already or belongs to an earlier run. `number`: that of a run whose
    /// start is not known.
    pub(super) fn apply_exit(
        &mut self,
        number: RunNumber,
        runtime_event: &RuntimeEvent,
        exit_code: Option<i64>,
        oom_flag: Option<bool>,
    ) -> Vec<RunTransition> {
        let mut report = ReportedEnd { at: runtime_event.at, reported_at: None, exit_code, oom_flag };
        let run = self.run.get_or_insert_with(|| Run { number, ..Run::default() });
        if run.begin().is_some_and(|started| runtime_event.at < started) {
            let is_same = |run: &&mut Run| {
                run.ended().is_some_and(|ended| (ended - runtime_event.at).abs() < START_TOLERANCE)
            };
            if let Some(earlier) = self.ended_runs.iter_mut().rev().find(is_same) {
                earlier.phase.complete_end(&report);
                return vec![];
            }
        }
        if run.begin().is_some_and(|started| runtime_event.at + START_TOLERANCE < started) {
            return vec![];
        }
        if matches!(runtime_event.runtime, RuntimeKind::Docker | RuntimeKind::Podman)
            && let Some(likely) = run.late_end(runtime_event.at)
        {
            (report.at, report.reported_at) = (likely, Some(runtime_event.at));
        }
        if run.phase.end().is_none_or(|end| !end.is_recorded) && !self.hidden {
            runtime_event.named.iter().for_each(|details| run.figures.complete(&runtime_event.id, details));
        }
        match run.phase.report_end(&report) {
            true => self.end_transitions(&runtime_event.id),
            false => vec![],
        }
    }
}
