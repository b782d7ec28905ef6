//! What the ledger knows of a run besides its begin and end, which `lifecycle` decides. Pure.

use std::collections::VecDeque;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::interval::Interval;
use crate::clock::{ClockStep, Timestamp};
use crate::events::{OomScope, UsageSample};
use crate::lifecycle;
use crate::lifecycle::timing::{LISTED_AFTER_KILL, START_TOLERANCE, STOP_REQUEST_WINDOW, USAGE_KEPT};
use crate::parse::log_error::HostErrorText;
use crate::runs::RunFigures;
use crate::runs::hit_limit::HitLimit;
use crate::runs::usage::{ContainerUsage, ProcessUsage};
use crate::runs::usage_history::History;

/// With a short sampling interval at most this many are kept from step to step.
const MAX_USAGES: usize = 8;
/// Exit status of a process that was ended by SIGKILL.
pub const SIGKILL_STATUS: i64 = 137;
/// The same of SIGINT.
pub const SIGINT_STATUS: i64 = 130;

/// Returns whether this is the exit status of a process that crashed: by SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV or SIGSYS.
pub fn is_crash_status(status: i64) -> bool {
    matches!(status - 128, 4..=8 | 11 | 31)
}

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

/// One run of a container.
pub type LedgerRun = lifecycle::Run<RunEvidence>;

/// What the ledger knows of a run besides its begin and end.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RunEvidence {
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
    /// Unix time of the last other error in its log, and what it was.
    pub log_error: Option<(f64, HostErrorText)>,
    /// What the record of this run will have; empty once the record is complete.
    pub(super) figures: RunFigures,
    /// Unix time of the last kill that was stored with the prior usage.
    #[serde(skip)]
    pub before_stored: Option<f64>,
    #[serde(skip)]
    history: History,
    /// Processes and memory of the newest cycles, newest last, with their Unix times: of all in the ledger's newest step, and of
    /// [`USAGE_KEPT`] before it.
    #[serde(skip)]
    pub(super) usage: VecDeque<(f64, Arc<ContainerUsage>)>,
    /// When the newest of them were applied.
    #[serde(skip)]
    usage_applied: Option<Timestamp>,
}

impl RunEvidence {
    /// Corrects the times, if the clock was set.
    pub fn correct_times(&mut self, step: &ClockStep) {
        let times = [
            self.oom_event_at.as_mut(),
            self.last_kill.as_mut().map(|(_, at)| at),
            self.possible_end.as_mut().map(|end| &mut end.at),
            self.cuda_oom.as_mut(),
            self.cuda_oom_in_log.as_mut(),
            self.uncaught_cuda_oom.as_mut(),
            self.log_error.as_mut().map(|(at, _)| at),
            self.before_stored.as_mut(),
        ];
        let requests = self.stop_requests.iter_mut().map(|(at, _)| at);
        let seen = self.usage.iter_mut().map(|(at, _)| at);
        times.into_iter().flatten().chain(requests).chain(seen).for_each(|at| step.correct(at));
        self.history.correct_times(step);
    }

    fn record_usage(&mut self, now: Timestamp, at: Timestamp, usage: &Arc<ContainerUsage>) {
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
}

impl LedgerRun {
    /// Returns true if it exited by SIGKILL, and neither a stop request nor a known kill explains that.
    pub fn is_sigkill_unexplained(&self) -> bool {
        let is_requested = |ended: f64| self.stop_signals_before(ended).next().is_some();
        self.exit_code() == Some(SIGKILL_STATUS)
            && self.evidence.ended_by.is_none()
            && self.ended().is_some_and(|ended| !is_requested(ended))
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
        for (at, usage) in self.evidence.usage.iter().rev() {
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
        let mut seen =
            self.evidence.usage.iter().rev().filter(|(_, usage)| usage.processes.iter().any(is_it));
        seen.next().map(|(at, _)| *at)
    }

    /// Returns the process with this pid from the newest cycles.
    pub fn process(&self, pid: u32) -> Option<&ProcessUsage> {
        let usages = self.evidence.usage.iter().rev();
        usages.flat_map(|(_, usage)| &usage.processes).find(|process| process.pid == pid)
    }

    /// Returns processes and memory from the newest cycle that saw any until this Unix time.
    pub fn usage_until(&self, until: f64) -> Option<&ContainerUsage> {
        self.evidence.usage.iter().rev().find(|(at, _)| *at <= until).map(|(_, usage)| &**usage)
    }

    /// Returns the samples until this Unix time, oldest first: one for every ten seconds, and the last.
    pub fn samples_until(&self, until: f64) -> Vec<UsageSample> {
        let newest = self.usage_until(until).and_then(|usage| usage.sample);
        let mut samples: Vec<_> =
            self.evidence.history.samples().filter(|sample| sample.at <= until).collect();
        samples.extend(newest.filter(|newest| samples.last() != Some(newest)));
        samples
    }

    /// Records the sample and the processes of a cycle that is applied `now`.
    pub fn record_usage(&mut self, now: Timestamp, at: Timestamp, usage: &Arc<ContainerUsage>) {
        if usage.has_all_processes || !usage.processes.is_empty() {
            self.record_processes(at, !usage.processes.is_empty());
        }
        self.evidence.record_usage(now, at, usage);
    }

    /// Returns the signals of stop requests shortly before this exit, oldest first.
    pub fn stop_signals_before(&self, at: f64) -> impl Iterator<Item = Option<i32>> {
        self.evidence
            .stop_requests
            .iter()
            .filter(move |(requested, _)| at - requested < STOP_REQUEST_WINDOW)
            .map(|(_, signal)| *signal)
    }
}
