//! One run of a container, from its start to its exit. Pure.

use std::collections::VecDeque;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::interval::Interval;
use crate::clock::{ClockStep, Timestamp};
use crate::discover::Container;
use crate::events::{OomScope, UsageSample};
use crate::lifecycle::timing::{
    CLOCK_TOLERANCE, LISTED_AFTER_KILL, MAX_END_EVENT_DELAY, START_TOLERANCE, STOP_REQUEST_WINDOW, USAGE_KEPT,
};
use crate::lifecycle::{RunNumber, RunPhase, RunStart};
use crate::runs::RunFigures;
use crate::runs::hit_limit::HitLimit;
use crate::runs::usage::{ContainerUsage, ProcessUsage};
use crate::runs::usage_history::History;

/// With a short sampling interval at most this many are kept from step to step.
const MAX_USAGES: usize = 8;
/// Exit status of a process that was ended by SIGKILL.
pub const SIGKILL_STATUS: i64 = 137;

/// A kill of a child that may have ended its run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PossibleEnd {
    /// Id of the kill.
    pub id: u64,
    /// Unix time at which the victim was gone, as far as cycles saw that.
    pub at: f64,
    /// Which memory was exhausted.
    pub scope: OomScope,
}

/// One run of a container, from start to exit.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Run {
    /// Its number: with the container it identifies the run.
    pub number: RunNumber,
    /// When it began.
    pub start: RunStart,
    /// How far it is.
    pub phase: RunPhase,
    /// Host pid of the first process.
    pub pid: Option<u32>,
    /// Inode of its cgroup, once a cycle has listed it.
    pub cgroup_inode: Option<u64>,
    /// Unix time of the runtime's last OOM event during this run. One is also sent without a kill.
    pub oom_event_at: Option<f64>,
    /// Stop requests: Unix time and signal; the last ones, oldest first.
    pub stop_requests: Vec<(f64, Option<i32>)>,
    /// OOM kills of its processes.
    pub kills: u64,
    /// Id of the kill that ended it, and which memory was exhausted.
    pub ended_by: Option<(u64, OomScope)>,
    /// Id and Unix time of its last kill.
    pub last_kill: Option<(u64, f64)>,
    /// The limit that the kill of the first process hit, else that of the last other kill.
    pub oom_limit: Option<HitLimit>,
    /// The last kill of a child that may have ended the run: no exit was reported in time.
    pub possible_end: Option<PossibleEnd>,
    /// The runtime reported the end of a stop: Docker does so just after the exit, from version 28 on just before it.
    pub is_stop_confirmed: bool,
    /// Unix time of its last CUDA out-of-memory error.
    pub cuda_oom: Option<f64>,
    /// Unix time of the last one in its log.
    pub cuda_oom_in_log: Option<f64>,
    /// Unix time of the last one that a process did not catch.
    pub uncaught_cuda_oom: Option<f64>,
    /// An end of it is an event that was decided, and it was listed again: without a report it has no second one.
    #[serde(default)]
    pub(super) has_exit: bool,
    /// What the record of this run will have; empty once the record is complete.
    pub(super) figures: RunFigures,
    /// When the next run was noticed.
    #[serde(skip)]
    pub(super) replaced_at: Option<Timestamp>,
    /// Unix time of the last kill that was stored with the prior usage.
    #[serde(skip)]
    pub before_stored: Option<f64>,
    #[serde(skip)]
    pub(super) history: History,
    /// Processes and memory of the newest cycles, newest last, with their Unix times: of all in the ledger's newest step, and of
    /// [`USAGE_KEPT`] before it.
    #[serde(skip)]
    pub(super) usage: VecDeque<(f64, Arc<ContainerUsage>)>,
    /// When the newest of them were applied.
    #[serde(skip)]
    pub(super) usage_applied: Option<Timestamp>,
    /// Unix time of the first cycle that saw no process of it, if none has seen one since.
    #[serde(skip)]
    pub(super) empty_since: Option<f64>,
    /// A cycle saw a process of it.
    #[serde(skip)]
    pub(super) had_processes: bool,
}

impl Run {
    /// Returns when it began, as far as known.
    pub fn begin(&self) -> Option<f64> {
        self.start.begin()
    }

    /// Takes its cgroup from the inventory.
    pub fn record_cgroup(&mut self, container: &Container) {
        if self.ended().is_none() {
            self.cgroup_inode = container.cgroup_inode().or(self.cgroup_inode);
        }
    }

    /// Returns whether the inventory lists the container in another cgroup than this run had, and no runtime says when that one began.
    pub fn is_of_another_cgroup(&self, container: &Container) -> bool {
        let inodes = self.cgroup_inode.zip(container.cgroup_inode());
        container.started.is_none() && inodes.is_some_and(|(own, listed)| own != listed)
    }

    /// Returns the Unix time of its end.
    pub fn ended(&self) -> Option<f64> {
        self.phase.ended()
    }

    /// Returns the exit code.
    pub fn exit_code(&self) -> Option<i64> {
        self.phase.end()?.exit_code
    }

    /// Returns the runtime's OOMKilled flag.
    pub fn oom_flag(&self) -> Option<bool> {
        self.phase.end()?.oom_flag
    }

    /// Corrects the times, if the clock was set.
    pub fn correct_times(&mut self, step: &ClockStep) {
        self.start.correct_times(step);
        self.phase.correct_times(step);
        let times = [
            self.oom_event_at.as_mut(),
            self.last_kill.as_mut().map(|(_, at)| at),
            self.possible_end.as_mut().map(|end| &mut end.at),
            self.cuda_oom.as_mut(),
            self.cuda_oom_in_log.as_mut(),
            self.uncaught_cuda_oom.as_mut(),
            self.before_stored.as_mut(),
            self.empty_since.as_mut(),
        ];
        let requests = self.stop_requests.iter_mut().map(|(at, _)| at);
        let seen = self.usage.iter_mut().map(|(at, _)| at);
        times.into_iter().flatten().chain(requests).chain(seen).for_each(|at| step.correct(at));
        self.history.correct_times(step);
    }

    /// Returns after which Unix time the next run can have begun.
    pub fn latest_known(&self) -> Option<f64> {
        if !self.phase.is_end_assumed() {
            return self.ended();
        }
        // a sample just before an assumed end may be of the next run
        self.start.first.map(|started| started + START_TOLERANCE).or(self.figures.last_sampled())
    }

    /// Returns true if it exited by SIGKILL, and neither a stop request nor a known kill explains that.
    pub fn is_sigkill_unexplained(&self) -> bool {
        let is_requested = |ended: f64| self.stop_signals_before(ended).next().is_some();
        self.exit_code() == Some(SIGKILL_STATUS)
            && self.ended_by.is_none()
            && self.ended().is_some_and(|ended| !is_requested(ended))
    }

    /// Returns true if this Unix time is between its reported start and end.
    pub fn is_reported_at(&self, at: f64) -> bool {
        self.start.first.is_none_or(|started| started <= at + CLOCK_TOLERANCE)
            && self.phase.latest_end().is_none_or(|ended| at <= ended + CLOCK_TOLERANCE)
    }

    /// Returns true if this was its first process, by the runtime, and it can have been killed at that time.
    pub fn had_first_pid(&self, pid: u32, happened: &Interval) -> bool {
        let start = self.start.first.map_or(f64::NEG_INFINITY, |started| started - START_TOLERANCE);
        // a replayed record of this pid may be of another process, before or after this run
        let end = self.phase.latest_end().map_or(f64::INFINITY, |ended| ended + START_TOLERANCE);
        self.pid == Some(pid) && Interval::new(start, end).overlaps(happened)
    }

    /// Returns true if a cycle saw this process, and it can have been killed at that time: not long before it was seen,
    /// nor after a cycle that did not see it any more.
    pub fn had_process(&self, pid: u32, comm: &str, happened: &Interval) -> bool {
        let mut gone = self.phase.latest_end().map_or(f64::INFINITY, |ended| ended + START_TOLERANCE);
        for (at, usage) in self.usage.iter().rev() {
            if usage.processes.iter().any(|process| process.pid == pid && *process.comm == *comm) {
                return Interval::new(at - LISTED_AFTER_KILL, gone.max(*at)).overlaps(happened);
            }
            gone = *at;
        }
        false
    }

    /// Returns the Unix time of the newest cycle that saw this process.
    pub fn last_seen(&self, pid: u32, comm: &str) -> Option<f64> {
        let is_it = |process: &ProcessUsage| process.pid == pid && *process.comm == *comm;
        let mut seen = self.usage.iter().rev().filter(|(_, usage)| usage.processes.iter().any(is_it));
        seen.next().map(|(at, _)| *at)
    }

    /// Returns the process with this pid from the newest cycles.
    pub fn process(&self, pid: u32) -> Option<&ProcessUsage> {
        let usages = self.usage.iter().rev();
        usages.flat_map(|(_, usage)| &usage.processes).find(|process| process.pid == pid)
    }

    /// Returns processes and memory from the newest cycle that saw any until this Unix time.
    pub fn usage_until(&self, until: f64) -> Option<&ContainerUsage> {
        self.usage.iter().rev().find(|(at, _)| *at <= until).map(|(_, usage)| &**usage)
    }

    /// Returns the samples until this Unix time, oldest first: one for every ten seconds, and the last.
    pub fn samples_until(&self, until: f64) -> Vec<UsageSample> {
        let newest = self.usage_until(until).and_then(|usage| usage.sample);
        let mut samples: Vec<_> = self.history.samples().filter(|sample| sample.at <= until).collect();
        samples.extend(newest.filter(|newest| samples.last() != Some(newest)));
        samples
    }

    /// Returns since when there is no process of it after a kill at this time, as far as cycles saw that: one that began just before the
    /// kill may have looked after it.
    pub fn emptied_after(&self, kill: f64) -> Option<f64> {
        self.empty_since.map(|since| since.max(kill))
    }

    /// Returns when it ended, if its end is reported late: an engine that did not respond for a while reports one when it resumes, long
    /// after the last cycle that saw a process of it.
    pub fn late_end(&self, reported: f64) -> Option<f64> {
        let is_late = |since: &f64| self.had_processes && reported - since > MAX_END_EVENT_DELAY;
        self.empty_since.filter(is_late)
    }

    /// Records whether a cycle saw processes of it.
    pub fn record_processes(&mut self, at: Timestamp, has_any: bool) {
        self.empty_since = (!has_any).then(|| self.empty_since.unwrap_or(at.unix_seconds()));
    }

    /// Records the sample and the processes of a cycle that is applied `now`.
    pub fn record_usage(&mut self, now: Timestamp, at: Timestamp, usage: &Arc<ContainerUsage>) {
        self.had_processes |= !usage.processes.is_empty();
        if usage.has_all_processes || !usage.processes.is_empty() {
            self.record_processes(at, !usage.processes.is_empty());
        }
        if let Some(sample) = usage.sample {
            self.history.record(at, sample);
        }
        if usage.sample.is_some() || !usage.processes.is_empty() {
            // a victim is missing in the first cycle after its kill, whose record is read after all cycles of a step
            if self.usage_applied.replace(now) != Some(now) {
                let is_before = |(taken, _): &(f64, _)| *taken <= at.unix_seconds() - USAGE_KEPT;
                let newest_before = self.usage.iter().rposition(is_before).unwrap_or(0);
                self.usage.drain(..newest_before.max(self.usage.len().saturating_sub(MAX_USAGES)));
            }
            self.usage.push_back((at.unix_seconds(), Arc::clone(usage)));
        }
    }

    /// Returns the signals of stop requests shortly before this exit, oldest first.
    pub fn stop_signals_before(&self, at: f64) -> impl Iterator<Item = Option<i32>> {
        self.stop_requests
            .iter()
            .filter(move |(requested, _)| at - requested < STOP_REQUEST_WINDOW)
            .map(|(_, signal)| *signal)
    }
}
