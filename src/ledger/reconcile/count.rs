//! Counts OOM kills from the kernel log and the kernel's counter, each kill once. Pure.
//!
//! A `Killed process` record is a kill. The counter `oom_kill` of /proc/vmstat shows how many there must be: its growth
//! equals **records + duplicate lines + gaps**. If the log is drained and the counter has been ahead for one second, the
//! difference becomes gaps: kills that only the counter shows.
//!
//! With `memory.oom.group` the kernel logs and counts the victim that it chose a second time, among the processes of its
//! cgroup: the first repetition of its pid is a duplicate line. Each other process of a group is logged once, so any
//! other repeated pid is a new process: pids are reused within minutes.
//!
//! The lines of one OOM form a block: `invoked oom-killer` and the context line, which the kernel logs for ten OOMs in
//! 5 s; the victim; with `memory.oom.group` the group line and its further victims. Because the begin of the next block
//! may be missing, a context line applies to its own victim by pid, and a group line to the victim before it; a later
//! victim belongs to the group only if the begin of another block would have been logged.
//!
//! The owners of the victims are decided in [`owner`](super::owner).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::clock::Timestamp;
use crate::collect::kernel_log::{LogEntry, LogPosition};
use crate::ledger::interval::{Interval, LOG_DELAY, LogClock};
use crate::parse::kernel_log::{Killed, Line, OomContext, OomReport, ReportProcess};

/// How long a record may be missing before it counts as lost. The kernel increments the counter before it logs.
const RECORD_TIMEOUT: Duration = Duration::from_secs(1);
/// Kills of one `memory.oom.group` follow each other within this many microseconds.
const GROUP_WINDOW_USEC: u64 = 2_000_000;

/// The kernel logs the begin of at most this many OOMs, within this many microseconds (5 s, and a margin).
const MAX_BLOCK_HEADERS: usize = 10;
const BLOCK_HEADER_WINDOW_USEC: u64 = 5_100_000;
/// Number of recent records that are kept to ignore repeated ones.
const MAX_SEEN_RECORDS: usize = 1_024;

/// State of the accounting that is stored over restarts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AccountingCheckpoint {
    /// Id of the boot.
    pub boot_id: String,
    /// Position up to which the log was read.
    pub position: LogPosition,
    /// The log's clock, as it was known then.
    #[serde(default)]
    pub log_clock: LogClock,
    /// Records up to this stamp are older than the ledger and are ignored.
    pub since_usec: u64,
    /// Value of the counter when the accounting started; `None` until it was read for the first time.
    pub opened_at: Option<i64>,
    /// Kills with a record.
    pub records: u64,
    /// Second records of the same kill.
    pub duplicates: u64,
    /// Kills without a record.
    pub gaps: u64,
    /// Unix time at which the counter was last equal to the records: a kill without a record happened after that.
    #[serde(default)]
    pub balanced_at: Option<f64>,
    /// Unix time before which every kill that a cgroup counted is attributed or given up.
    #[serde(default)]
    pub cgroups_explained_at: Option<f64>,
    /// The current block: the next memledger process may read its last lines.
    #[serde(default)]
    block: Block,
}

impl AccountingCheckpoint {
    /// Returns whether it is of this boot. One without an id is: it could not be read then.
    pub fn is_of(&self, boot_id: &str) -> bool {
        self.boot_id == boot_id || self.boot_id.is_empty()
    }
}

/// The lines of one OOM so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Block {
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
    #[serde(default)]
    lost_until: u64,
}

impl Block {
    fn begin(&mut self) {
        let headers = std::mem::take(&mut self.headers);
        *self = Self { headers, lost_until: self.lost_until, ..Self::default() };
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
}

/// The meaning of a log line.
#[derive(Clone, Debug, PartialEq)]
pub enum LogFinding {
    /// A new kill.
    Kill {
        /// The victim.
        killed: Killed,
        /// The preceding rate-limited line, with the victim's cgroup.
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
    /// A second record of a known kill.
    Duplicate {
        /// The victim.
        pid: u32,
    },
}

/// Difference between the counter and the records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reconciliation {
    /// Kills whose record is lost: to be added as gaps.
    pub lost: u64,
    /// Records that arrived after their gap was added: this many of the new kills are not new.
    pub late: u64,
}

/// The state of the accounting.
#[derive(Debug, Default)]
pub struct OomAccounting {
    checkpoint: AccountingCheckpoint,
    /// The rate-limited line that belongs to the next record.
    context: Option<OomContext>,
    /// The report of the current block: all victims of a group have it.
    report: Option<Arc<OomReport>>,
    /// Positions and pids of recent records: syslog(2) can return a line twice.
    seen: VecDeque<(LogPosition, u32)>,
    /// Unix times between which the kills happened that the last comparison found to be lost.
    lost_between: (Option<f64>, f64),
    /// The counter is ahead of the records.
    missing: Option<MissingRecords>,
}

/// Records that did not arrive yet.
#[derive(Clone, Copy, Debug)]
struct MissingRecords {
    since: Timestamp,
    /// The kernel's counter at that time.
    counter: i64,
    /// Records that arrived since and are of later kills.
    later: i64,
}

impl OomAccounting {
    /// Continues from a checkpoint, or starts at `now_usec` of the kernel's clock.
    ///
    /// After a reboot the counter starts at 0, so kills before memledger's start are included. Only at the very first
    /// start is the counter's current value the baseline: older kills do not count.
    pub fn new(stored: Option<AccountingCheckpoint>, boot_id: &str, now_usec: u64) -> Self {
        let checkpoint = match stored {
            Some(checkpoint) if checkpoint.is_of(boot_id) => {
                AccountingCheckpoint { boot_id: boot_id.to_owned(), ..checkpoint }
            }
            Some(_) => AccountingCheckpoint {
                boot_id: boot_id.to_owned(),
                opened_at: Some(0),
                ..AccountingCheckpoint::default()
            },
            None => AccountingCheckpoint {
                boot_id: boot_id.to_owned(),
                since_usec: now_usec,
                ..AccountingCheckpoint::default()
            },
        };
        Self { checkpoint, ..Self::default() }
    }

    /// Returns the state to store.
    pub fn checkpoint(&self) -> &AccountingCheckpoint {
        &self.checkpoint
    }

    /// Returns true if the counter is ahead of the records: they may still arrive.
    pub fn has_missing_records(&self) -> bool {
        self.missing.is_some()
    }

    /// Returns the Unix times between which the kills happened that the last comparison found to be lost. The first is
    /// `None` if the counter was never equal to the records in this boot.
    pub fn lost_between(&self) -> (Option<f64>, f64) {
        self.lost_between
    }

    /// Notes when a record was written that [`OomAccounting::read`] counted. One that was written after the counter was read
    /// is not one of the kills that were missing then. `now` is when it was read.
    pub fn counted_record_of(&mut self, written: &Interval, now: Timestamp) {
        let Some(missing) = &mut self.missing else { return };
        // by the clock of the record, which may have been set since the counter was read
        let since = now.unix_seconds() - now.since(missing.since).as_secs_f64();
        if written.earliest > since + LOG_DELAY {
            missing.later += 1;
        }
    }

    /// Sets the position up to which the log was read.
    pub fn read_to(&mut self, position: LogPosition) {
        self.checkpoint.position = position;
    }

    /// Sets what is known of the log's clock at that position.
    pub fn set_log_clock(&mut self, clock: LogClock) {
        self.checkpoint.log_clock = clock;
    }

    /// Starts anew: the machine was restored to an earlier state without a reboot.
    pub fn restart(&mut self, now_usec: u64) {
        let boot_id = std::mem::take(&mut self.checkpoint.boot_id);
        *self = Self::new(None, &boot_id, now_usec);
    }

    /// Reads one log entry.
    pub fn read(&mut self, entry: &LogEntry) -> Option<LogFinding> {
        let usec = entry.position.usec;
        let block = &mut self.checkpoint.block;
        match &entry.line {
            Line::Invoked => {
                self.context = None;
                block.begin();
                block.add_header(usec);
            }
            Line::Context(context) => {
                // it follows `invoked`, unless that was lost
                if !block.has_header || block.newest.is_some() {
                    block.begin();
                }
                block.add_header(usec);
                self.context = Some(context.clone());
            }
            _ if usec <= self.checkpoint.since_usec => {} // older than the ledger
            Line::Group { path } => {
                // without a victim before it: that was exiting already, and the rest of the group follows
                (block.group, block.repeats, block.last_usec) = (Some(path.clone()), block.newest, usec);
                return Some(LogFinding::Group { pid: block.newest?, path: path.clone() });
            }
            Line::NoKill => {
                self.context = None;
                (block.newest, block.has_header) = (None, false);
            }
            Line::Killed(killed) => {
                // two records can have the same stamp if the kernel's clock is coarse
                let key = (entry.position, killed.pid);
                if self.seen.contains(&key) {
                    return None;
                }
                self.seen.push_back(key);
                if self.seen.len() > MAX_SEEN_RECORDS {
                    self.seen.pop_front();
                }
                return Some(self.count_kill(killed, usec, entry.report.as_ref()));
            }
            Line::Xid(_) | Line::Resumed => {} // no kill
        }
        None
    }

    fn count_kill(&mut self, killed: &Killed, usec: u64, report: Option<&Arc<OomReport>>) -> LogFinding {
        let block = &mut self.checkpoint.block;
        let in_group = block.group.is_some() && usec.saturating_sub(block.last_usec) < GROUP_WINDOW_USEC;
        if !in_group {
            // its own block, whose begin may be missing
            (block.group, block.repeats) = (None, None);
        }
        (block.newest, block.last_usec) = (Some(killed.pid), usec);
        if block.repeats.take_if(|pid| *pid == killed.pid).is_some() {
            self.checkpoint.duplicates += 1;
            return LogFinding::Duplicate { pid: killed.pid };
        }
        self.checkpoint.records += 1;
        let is_certain = !block.may_be_rate_limited(usec);
        // another pid than the context's is another thread of its victim, or the victim of another block
        let is_thread = || report.is_some_and(|report| is_thread_of_context(report, killed.pid));
        let is_own = |context: &OomContext| {
            is_certain || context.pid.is_none_or(|pid| pid == killed.pid) || is_thread()
        };
        let context = self.context.take().filter(is_own);
        let is_listed = || self.report.as_ref().is_some_and(|report| report.process(killed.pid).is_some());
        let group = block.group.clone().filter(|_| in_group && (is_certain || is_listed()));
        if group.is_none() {
            let is_reported = |report: &&Arc<OomReport>| is_report_of(report, killed.pid, context.is_some());
            self.report = report.filter(is_reported).map(|report| with_victim(report, killed.pid));
        }
        LogFinding::Kill { killed: killed.clone(), context, group, report: self.report.clone() }
    }

    /// Notes that records up to this position were lost: begins of blocks may be among them, wherever they were, and the victim
    /// of a group line that follows.
    pub fn records_lost(&mut self, up_to: LogPosition) {
        let block = &mut self.checkpoint.block;
        block.lost_until = up_to.usec + BLOCK_HEADER_WINDOW_USEC;
        (block.newest, block.has_header) = (None, false);
    }

    /// Compares the records with the counter, which was read after the log was drained. `log_up`: the log can be read.
    pub fn compare(&mut self, now: Timestamp, counter: u64, log_up: bool) -> Reconciliation {
        let accounted = (self.checkpoint.records + self.checkpoint.duplicates + self.checkpoint.gaps) as i64;
        let opened_at = *self.checkpoint.opened_at.get_or_insert(counter as i64 - accounted);
        let missing = counter as i64 - opened_at - accounted;
        self.lost_between = (self.checkpoint.balanced_at, now.unix_seconds());
        if missing <= 0 {
            self.checkpoint.balanced_at = Some(now.unix_seconds());
            self.missing = None;
            let surplus = missing.unsigned_abs();
            let late = surplus.min(self.checkpoint.gaps);
            self.checkpoint.gaps -= late;
            // a kill during the start of the accounting: its record counts, so lower the baseline
            self.checkpoint.opened_at = Some(opened_at - (surplus - late) as i64);
            return Reconciliation { lost: 0, late };
        }
        // records arrive in the order of the kills: if those that were missing have arrived, newer ones are missing now
        let recorded = opened_at + accounted;
        let new = MissingRecords { since: now, counter: counter as i64, later: 0 };
        let waiting = self.missing.filter(|waiting| log_up && waiting.counter > recorded - waiting.later);
        let waiting = waiting.unwrap_or(new);
        if log_up && now.since(waiting.since) < RECORD_TIMEOUT {
            self.missing = Some(waiting);
            return Reconciliation::default();
        }
        let (missing, least) = (missing as u64, (waiting.counter + waiting.later - recorded) as u64);
        // kills that were missing for the whole time are lost; newer ones may still get their record
        self.lost_between.1 = waiting.since.unix_seconds();
        self.missing = (missing > least).then_some(new);
        self.checkpoint.gaps += least;
        // what is still missing happened after that reading, whose kills are all counted now
        let balanced = if missing == least { now } else { waiting.since };
        self.checkpoint.balanced_at = Some(balanced.unix_seconds());
        Reconciliation { lost: least, late: 0 }
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

#[cfg(test)]
mod tests;
