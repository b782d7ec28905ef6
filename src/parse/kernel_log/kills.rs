//! The machine that folds the lines of one OOM into kills: which line is a kill, which a second record of one, whose cgroup and
//! report belong to it. Used by all who read logs: the ledger, the probe of victims, and `why` without a ledger.
//!
//! The lines of one OOM form a block: `invoked oom-killer` and the context line, which the kernel logs for ten OOMs in
//! 5 s; the victim; with `memory.oom.group` the group line and its further victims. Because the begin of the next block
//! may be missing, a context line applies to its own victim by pid, and a group line to the victim before it; a later
//! victim belongs to the group only if the begin of another block would have been logged.
//!
//! With `memory.oom.group` the kernel logs and counts the victim that it chose a second time, among the processes of its
//! cgroup: the first repetition of its pid is a second record. Each other process of a group is logged once, so any
//! other repeated pid is a new process: pids are reused within minutes.

use std::collections::VecDeque;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{Killed, Line, OomContext, OomReport, ReportProcess};

/// Kills of one `memory.oom.group` follow each other within this many microseconds.
const GROUP_WINDOW_USEC: u64 = 2_000_000;
/// The kernel logs the begin of at most this many OOMs, within this many microseconds (5 s, and a margin).
const MAX_BLOCK_HEADERS: usize = 10;
const BLOCK_HEADER_WINDOW_USEC: u64 = 5_100_000;

/// What a line of the log shows of a kill.
#[derive(Clone, Debug, PartialEq)]
pub enum KillRecord {
    /// A kill.
    Kill {
        /// The victim.
        killed: Killed,
        /// The rate-limited line before it, with the victim's cgroup.
        context: Option<OomContext>,
        /// The cgroup that was killed as a group, if any.
        group: Option<String>,
        /// The kernel's report on this kill, if there is evidence that it is of this one.
        report: Option<Arc<OomReport>>,
    },
    /// The victim of the last kill was killed as part of this group.
    Group {
        /// The victim.
        pid: u32,
        /// The cgroup.
        path: String,
    },
    /// A second record of a kill.
    Second {
        /// The victim.
        pid: u32,
    },
}

/// The lines of one OOM so far. What the next process of memledger needs of it is stored.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KillAssembler {
    /// The cgroup that is killed as a group.
    group: Option<String>,
    /// The newest victim.
    newest: Option<u32>,
    /// The victim before the group line, until its second record is read.
    repeats: Option<u32>,
    last_usec: u64,
    /// Stamps of the last blocks whose begin was logged.
    headers: VecDeque<u64>,
    /// The begin of this block was logged.
    has_header: bool,
    /// Records were lost: up to this stamp the begin of a block may be missing.
    lost_until: u64,
    /// The rate-limited line that belongs to the next kill.
    #[serde(skip)]
    context: Option<OomContext>,
    /// The context of the victim before the group line, which the further victims of the group share.
    #[serde(skip)]
    group_context: Option<OomContext>,
    /// The process that was chosen, and whether the host ran out of memory, as the line before the next kill has it before 5.1.
    #[serde(skip)]
    chosen: Option<(u32, bool)>,
    /// The report of the current block: all victims of a group have it.
    #[serde(skip)]
    report: Option<Arc<OomReport>>,
}

impl KillAssembler {
    /// Adds a line. `report`: of a kill, the report that the kernel printed before it, which can be of another kill.
    pub fn push(&mut self, usec: u64, line: &Line, report: Option<&Arc<OomReport>>) -> Option<KillRecord> {
        match line {
            Line::Invoked => {
                self.begin();
                self.add_header(usec);
            }
            Line::Context(context) => {
                // it follows `invoked`, unless that was lost
                if !self.has_header || self.newest.is_some() {
                    self.begin();
                }
                self.add_header(usec);
                self.context = Some(context.clone());
            }
            Line::Group { path } => {
                // without a victim before it: that was exiting already, and the rest of the group follows
                (self.group, self.repeats, self.last_usec) = (Some(path.clone()), self.newest, usec);
                return Some(KillRecord::Group { pid: self.newest?, path: path.clone() });
            }
            Line::Chosen { pid, global } => self.chosen = Some((*pid, *global)),
            Line::NoKill(_) => (self.context, self.newest, self.has_header) = (None, None, false),
            Line::Killed(killed) => return Some(self.kill(killed, usec, report)),
            Line::Xid(_) | Line::Resumed => {} // no kill
        }
        None
    }

    /// Returns the line that names the victim of the OOM whose kill was not read yet.
    pub fn context(&self) -> Option<&OomContext> {
        self.context.as_ref()
    }

    /// Notes that records up to this stamp were lost: begins of blocks may be among them, wherever they were, and the victim
    /// of a group line that follows.
    pub fn records_lost(&mut self, up_to_usec: u64) {
        self.lost_until = up_to_usec + BLOCK_HEADER_WINDOW_USEC;
        (self.newest, self.has_header) = (None, false);
    }

    fn begin(&mut self) {
        let headers = std::mem::take(&mut self.headers);
        let report = self.report.take();
        *self = Self { headers, lost_until: self.lost_until, report, ..Self::default() };
    }

    fn add_header(&mut self, usec: u64) {
        // the begin of a block is read again if memledger was restarted within it
        if !std::mem::replace(&mut self.has_header, true) && self.headers.back() != Some(&usec) {
            self.headers.push_back(usec);
            self.headers.drain(..self.headers.len().saturating_sub(MAX_BLOCK_HEADERS));
        }
    }

    /// Returns true if the begin of a block at this stamp may be missing.
    fn may_be_rate_limited(&self, usec: u64) -> bool {
        let recent = |header: &&u64| usec.saturating_sub(**header) < BLOCK_HEADER_WINDOW_USEC;
        usec < self.lost_until || self.headers.iter().filter(recent).count() >= MAX_BLOCK_HEADERS
    }

    fn kill(&mut self, killed: &Killed, usec: u64, report: Option<&Arc<OomReport>>) -> KillRecord {
        let in_group = self.group.is_some() && usec.saturating_sub(self.last_usec) < GROUP_WINDOW_USEC;
        if !in_group {
            // its own block, whose begin may be missing
            (self.group, self.repeats, self.group_context) = (None, None, None);
        }
        let chosen = self.chosen.take();
        let killed = &Killed { global: killed.global.or(chosen.map(|(_, global)| global)), ..killed.clone() };
        // a child of the chosen process was killed, or a thread of it
        let is_chosen = |pid: Option<u32>| pid.is_some() && pid == chosen.map(|(pid, _)| pid);
        (self.newest, self.last_usec) = (Some(killed.pid), usec);
        if self.repeats.take_if(|pid| *pid == killed.pid).is_some() {
            return KillRecord::Second { pid: killed.pid };
        }
        let is_certain = !self.may_be_rate_limited(usec);
        // another pid than the context's is another thread of its victim, or the victim of another block
        let is_thread = || report.is_some_and(|report| is_thread_of_context(report, killed.pid));
        let is_own = |context: &OomContext| {
            is_certain
                || context.pid.is_none_or(|pid| pid == killed.pid)
                || is_chosen(context.pid)
                || is_thread()
        };
        let context = self.context.take().filter(is_own);
        let is_listed = || self.report.as_ref().is_some_and(|report| report.process(killed.pid).is_some());
        let group = self.group.clone().filter(|_| in_group && (is_certain || is_listed()));
        if group.is_none() {
            let is_reported = |report: &&Arc<OomReport>| {
                is_report_of(report, killed.pid, context.is_some())
                    || is_chosen(report.context_pid)
                    || is_figure_of_host(report, killed)
            };
            self.report = report.filter(is_reported).map(|report| with_victim(report, killed.pid));
            self.group_context.clone_from(&context);
        }
        let shared = self.group_context.as_ref().filter(|_| context.is_none());
        let shared = shared.zip(group.as_ref()).map(|(first, path)| OomContext {
            task_cgroups: vec![path.clone()],
            pid: None,
            ..first.clone()
        });
        let context = context.or(shared);
        KillRecord::Kill { killed: killed.clone(), context, group, report: self.report.clone() }
    }
}

/// Returns whether the victim, which the table does not list, is certainly a thread of the process in the context line.
fn is_thread_of_context(report: &OomReport, pid: u32) -> bool {
    report.has_size_of_victim && report.process(pid).is_none()
}

/// Returns the report of this kill with the victim's row marked, which can have another pid.
fn with_victim(report: &Arc<OomReport>, pid: u32) -> Arc<OomReport> {
    let mut report = Arc::clone(report);
    let row = report.process(pid).or_else(|| report.process(report.context_pid?));
    if let Some(victim) = row.map(|row| row.pid) {
        Arc::make_mut(&mut report).victim_pid = Some(victim);
    }
    report
}

/// Returns whether there is evidence that a report is of the kill that follows it: the block's context line names the victim,
/// by its pid or by the pid of its thread group; or the line belongs to this kill (`has_context`) and names a thread of the victim
/// that the table does not list; or, in a block without such a line, the table lists the victim.
fn is_report_of(report: &OomReport, pid: u32, has_context: bool) -> bool {
    let row = report.process(pid);
    match report.context_pid {
        Some(named) => {
            let group = |row: &ReportProcess| row.tgid.unwrap_or(row.pid);
            let is_same = row.is_some_and(|row| report.process(named).map(group) == Some(group(row)));
            named == pid || is_same || (has_context && row.is_none())
        }
        None => has_context || row.is_some(),
    }
}

/// Returns whether a report without a table and without a victim has the figures of the host that ran out of memory: they are
/// right, whichever process was killed then.
fn is_figure_of_host(report: &OomReport, killed: &Killed) -> bool {
    report.host
        && killed.global == Some(true)
        && report.context_pid.is_none()
        && report.process_count.is_none()
}

#[cfg(test)]
mod tests;
