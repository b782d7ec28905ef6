//! One container that the ledger knows: its names, and what is known of its runs. Pure.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::interval::Interval;
use super::run::{LedgerRun, RunEvidence};
use crate::clock::{ClockStep, Timestamp, is_same_report};
use crate::discover::{ContainerId, PathClaim, RuntimeEvent, RuntimeKind};
use crate::events::{ContainerRef, Identity, PriorUsage};
use crate::lifecycle::timing::{CLOCK_TOLERANCE, MAX_START_EVENT_DELAY, START_TOLERANCE, STOP_REPORT_DELAY};
use crate::lifecycle::{
    ContainerRuns, ListedContainer, ListingOutcome, ReportedEnd, RunId, RunNumber, RunNumbers, StartReport,
};
use crate::parse::kubernetes;
use crate::runs::peaks::StoredPeaks;
use crate::runs::usage_history::roles;
use crate::runs::{RunFigures, RunRecord};

/// Maximum number of stop requests that are kept per run.
const MAX_STOP_REQUESTS: usize = 8;
/// Maximum number of former names that are kept per container.
const MAX_FORMER_NAMES: usize = 8;

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
    /// Its runs; none if it was never seen running.
    pub runs: ContainerRuns<RunEvidence>,
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
    pub run: LedgerRun,
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
        self.runs.running().is_some()
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
        (self.is_sandbox, self.runs, self.uncounted_starts) = (true, ContainerRuns::default(), 0);
        (self.first_event_at, self.removed_at) = (at, None);
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
        self.oom_event_at.iter_mut().for_each(|at| step.correct(at));
        self.runs.correct_times(step);
        self.runs.all_mut().for_each(|run| run.evidence.correct_times(step));
    }

    /// Adds the details of an event to the run in progress, for a run that no cycle sees.
    pub fn complete_run(&mut self, runtime_event: &RuntimeEvent) {
        if self.is_running()
            && !self.hidden
            && let Some((run, details)) = self.runs.current_mut().zip(runtime_event.named.as_ref())
        {
            run.evidence.figures.complete(&runtime_event.id, details);
        }
    }

    /// Returns the container as the subject of an event of this run.
    pub fn subject(&self, id: &ContainerId, run: Option<&LedgerRun>) -> ContainerRef {
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
        self.runs.running().map(|run| run.evidence.figures.stored_peaks())
    }

    /// Returns the record of the run in progress; `None` if it does not run, or if no cycle has seen it.
    pub fn record_of_running(&self, id: &ContainerId) -> Option<RunRecord> {
        let run = self.runs.running()?;
        let RunEvidence { figures, kills, oom_limit, .. } = &run.evidence;
        RunRecord::of_running(self.subject(id, Some(run)), figures, *kills, *oom_limit)
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
    ) -> Option<(&LedgerRun, bool)> {
        let mut begin = self.runs.dropped_until().map_or(f64::NEG_INFINITY, |ended| ended + CLOCK_TOLERANCE);
        let mut best: Option<(RunRank, bool, &LedgerRun)> = None;
        // after the end of a run and before the event of the next start, which Podman sends once it has stored that: a program may have
        // been killed by then, longer before the event than after the end
        let is_between_runs = !self.runs.all().any(|run| run.is_reported_at(at));
        for run in self.runs.all() {
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

    /// Returns what is known of it and a path from the root of the tree: whether that is its own cgroup or below it.
    pub fn claim(&self, path: &str) -> PathClaim {
        let path = Path::new(path.trim_start_matches('/'));
        match self.cgroup.as_ref().is_some_and(|cgroup| path.starts_with(cgroup)) {
            true => PathClaim::Own,
            false => PathClaim::Possible { user: self.user },
        }
    }

    /// Forgets the figures of a run whose record is complete.
    pub fn forget_figures(&mut self, number: RunNumber) {
        // one whose end was assumed may be listed again
        let is_open = |run: &LedgerRun| run.ended().is_none() || run.phase.is_end_assumed();
        let open = self.runs.current().filter(|run| is_open(run)).map(|run| run.number);
        if let Some(run) = self.runs.get_mut(number).filter(|run| open != Some(run.number)) {
            run.evidence.figures = RunFigures::default();
        }
    }

    /// Returns the exits of its runs as transitions, each once: when one has ended and is known to be a container's.
    pub(super) fn end_transitions(&mut self, id: &ContainerId) -> Vec<RunTransition> {
        std::iter::from_fn(|| self.end_transition(id)).collect()
    }

    fn end_transition(&mut self, id: &ContainerId) -> Option<RunTransition> {
        // the sandbox of a pod has a cgroup like that of a container: until a runtime has named it or reported its end, or one of its
        // processes was killed
        let is_in_pod = |path: &PathBuf| kubernetes::qos(&path.to_string_lossy()).is_some();
        let may_be_sandbox = !self.named && self.cgroup.as_ref().is_some_and(is_in_pod);
        let is_container =
            |run: &LedgerRun| !may_be_sandbox || !run.phase.is_end_unreported() || run.evidence.kills > 0;
        let run = self.runs.take_ended(is_container)?.clone();
        let ended = run.ended().unwrap_or(f64::INFINITY);
        Some(RunTransition::Ended(Box::new(End {
            id: id.clone(),
            subject: self.subject(id, Some(&run)),
            before: self.prior_usage(&run, ended),
            run,
        })))
    }

    /// Returns the settings of labels and environment.
    pub fn settings(&self) -> &[(Arc<str>, Arc<str>)] {
        &self.settings
    }

    /// Returns the usage up to this Unix time; `None` if there is no sample.
    pub fn prior_usage(&self, run: &LedgerRun, until: f64) -> Option<PriorUsage> {
        let samples = run.samples_until(until);
        if samples.is_empty() {
            return None;
        }
        let roles = run.usage_until(until).map_or(vec![], roles);
        let settings = run.evidence.figures.settings_over(&self.settings);
        Some(PriorUsage { samples, roles, settings, ..PriorUsage::default() })
    }

    /// Begins a run by a report of its start, unless it is known already.
    pub(super) fn begin_run(
        &mut self,
        id: &ContainerId,
        numbers: &mut RunNumbers,
        report: StartReport,
        pid: Option<u32>,
    ) -> Vec<RunTransition> {
        match self.runs.begin(numbers, report, pid) {
            true => self.start_run(id, report.at),
            false => vec![],
        }
    }

    /// Applies that a cycle lists it. Returns whether that must be stored.
    pub(super) fn list_run(
        &mut self,
        id: &ContainerId,
        numbers: &mut RunNumbers,
        now: Timestamp,
        listing: &ListedContainer,
    ) -> (bool, Vec<RunTransition>) {
        let outcome = self.runs.list(numbers, now.unix_seconds(), listing);
        let transitions = match outcome {
            ListingOutcome::Same | ListingOutcome::Updated => vec![],
            ListingOutcome::Began => self.start_run(id, listing.started),
            ListingOutcome::Reopened => {
                let reopened = |run: &LedgerRun| RunId { container: id.clone(), number: run.number };
                self.runs.current().map(reopened).map(RunTransition::Reopened).into_iter().collect()
            }
        };
        (outcome != ListingOutcome::Same, transitions)
    }

    /// Completes a run that began, at this Unix time if that is known.
    fn start_run(&mut self, id: &ContainerId, started: Option<f64>) -> Vec<RunTransition> {
        let is_of_run = |at: &mut f64| started.is_some_and(|started| *at >= started - CLOCK_TOLERANCE);
        let oom_event_at = self.oom_event_at.take_if(is_of_run);
        self.runs.current_mut().into_iter().for_each(|run| run.evidence.oom_event_at = oom_event_at);
        let mut transitions = self.end_transitions(id);
        transitions.push(RunTransition::Began(id.clone()));
        transitions
    }

    /// Applies a request to stop the container, or to send it a signal, which may be reported after the end. Without a signal it is the
    /// end of a stop: Docker reports that just after the exit, from version 28 on just before it.
    pub(super) fn apply_stop_request(&mut self, at: f64, signal: Option<i32>) {
        // repeated after a restart, it may belong to an earlier run
        let Some(run) = self.runs.all_mut().rev().find(|run| run.may_have_begun(at)) else { return };
        let (after_end, evidence) = (run.ended().map(|ended| at - ended), &mut run.evidence);
        let has_signal = evidence.stop_requests.iter().any(|(_, signal)| signal.is_some());
        let is_confirmation = match after_end {
            Some(after) => (0.0..STOP_REPORT_DELAY).contains(&after),
            None => has_signal,
        };
        if signal.is_none() && is_confirmation {
            evidence.is_stop_confirmed = true;
        } else if after_end.is_none_or(|after| after < 0.0)
            && !evidence.stop_requests.iter().any(|(known, its)| is_same_report(*known, at) && *its == signal)
        {
            evidence.stop_requests.push((at, signal));
            if evidence.stop_requests.len() > MAX_STOP_REQUESTS {
                evidence.stop_requests.remove(0);
            }
        }
    }

    /// Applies the exit of a run. Returns nothing if the exit is known already or belongs to an earlier run.
    pub(super) fn apply_exit(
        &mut self,
        numbers: &mut RunNumbers,
        runtime_event: &RuntimeEvent,
        exit_code: Option<i64>,
        oom_flag: Option<bool>,
    ) -> Vec<RunTransition> {
        let report = ReportedEnd { at: runtime_event.at, reported_at: None, exit_code, oom_flag };
        let may_be_late = matches!(runtime_event.runtime, RuntimeKind::Docker | RuntimeKind::Podman);
        if !self.runs.end(numbers, report, may_be_late) {
            return vec![];
        }
        if let Some((run, details)) = self.runs.current_mut().zip(runtime_event.named.as_ref())
            && !self.hidden
        {
            run.evidence.figures.complete(&runtime_event.id, details);
        }
        self.end_transitions(&runtime_event.id)
    }
}
