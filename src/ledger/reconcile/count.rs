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
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::clock::Timestamp;
use crate::collect::kernel_log::{LogEntry, LogPosition};
use crate::parse::kernel_log::{Killed, Line, OomContext};

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
        if !std::mem::replace(&mut self.has_header, true) {
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
    /// Positions and pids of recent records: syslog(2) can return a line twice.
    seen: VecDeque<(LogPosition, u32)>,
    /// Unix times between which the kills happened that the last comparison found to be lost.
    lost_between: (Option<f64>, f64),
    /// The counter is ahead of the records: since when, and its value then.
    missing_since: Option<(Timestamp, i64)>,
    is_counter_unreadable: bool,
}

impl OomAccounting {
    /// Continues from a checkpoint, or starts at `now_usec` of the kernel's clock.
    ///
    /// After a reboot the counter starts at 0, so kills before memledger's start are included. Only at the very first
    /// start is the counter's current value the baseline: older kills do not count.
    pub fn new(stored: Option<AccountingCheckpoint>, boot_id: &str, now_usec: u64) -> Self {
        let checkpoint = match stored {
            Some(checkpoint) if checkpoint.boot_id == boot_id => checkpoint,
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
        self.missing_since.is_some()
    }

    /// Returns true if the record of a kill that was counted at this Unix time may still arrive. Without the kernel's
    /// counter only time can tell.
    pub fn may_miss_record_of(&self, counted: f64, now: Timestamp) -> bool {
        let is_recent = now.unix_seconds() - counted < RECORD_TIMEOUT.as_secs_f64();
        self.has_missing_records() || self.is_counter_unreadable && is_recent
    }

    /// Stops waiting for records that the counter was ahead of: whether they are still missing cannot be known, and exits
    /// wait for them.
    pub fn counter_unreadable(&mut self) {
        (self.missing_since, self.is_counter_unreadable) = (None, true);
    }

    /// Returns the Unix times between which the kills happened that the last comparison found to be lost. The first is
    /// `None` if the counter was never equal to the records in this boot.
    pub fn lost_between(&self) -> (Option<f64>, f64) {
        self.lost_between
    }

    /// Sets the position up to which the log was read.
    pub fn read_to(&mut self, position: LogPosition) {
        self.checkpoint.position = position;
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
                let pid = block.newest?;
                (block.group, block.repeats) = (Some(path.clone()), Some(pid));
                return Some(LogFinding::Group { pid, path: path.clone() });
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
                return Some(self.count_kill(killed, usec));
            }
            Line::Xid(_) => {} // not a kill
        }
        None
    }

    fn count_kill(&mut self, killed: &Killed, usec: u64) -> LogFinding {
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
        let is_own = |context: &OomContext| is_certain || context.pid.is_none_or(|pid| pid == killed.pid);
        let context = self.context.take().filter(is_own);
        let group = block.group.clone().filter(|_| is_certain && in_group);
        LogFinding::Kill { killed: killed.clone(), context, group }
    }

    /// Notes that records up to this position were lost: begins of blocks may be among them, wherever they were, and the victim
    /// of a group line that follows.
    pub fn records_lost(&mut self, up_to: LogPosition) {
        let block = &mut self.checkpoint.block;
        block.lost_until = up_to.usec + BLOCK_HEADER_WINDOW_USEC;
        (block.newest, block.has_header) = (None, false);
    }

    /// Adds a kill that only a cgroup's counter shows.
    pub fn add_cgroup_gap(&mut self) {
        self.checkpoint.gaps += 1;
    }

    /// Removes such a kill: its record arrived, and the kernel's counter cannot confirm it.
    pub fn remove_gap(&mut self) {
        self.checkpoint.gaps = self.checkpoint.gaps.saturating_sub(1);
    }

    /// Compares the records with the counter, which was read after the log was drained. `log_up`: the log can be read.
    pub fn compare(&mut self, now: Timestamp, counter: u64, log_up: bool) -> Reconciliation {
        self.is_counter_unreadable = false;
        let accounted = (self.checkpoint.records + self.checkpoint.duplicates + self.checkpoint.gaps) as i64;
        let opened_at = *self.checkpoint.opened_at.get_or_insert(counter as i64 - accounted);
        let missing = counter as i64 - opened_at - accounted;
        self.lost_between = (self.checkpoint.balanced_at, now.unix_seconds());
        if missing <= 0 {
            self.checkpoint.balanced_at = Some(now.unix_seconds());
            self.missing_since = None;
            let surplus = missing.unsigned_abs();
            let late = surplus.min(self.checkpoint.gaps);
            self.checkpoint.gaps -= late;
            // a kill during the start of the accounting: its record counts, so lower the baseline
            self.checkpoint.opened_at = Some(opened_at - (surplus - late) as i64);
            return Reconciliation { lost: 0, late };
        }
        // records arrive in the order of the kills: if those that were missing have arrived, newer ones are missing now
        let recorded = opened_at + accounted;
        let since = self.missing_since.filter(|(_, counted)| log_up && *counted > recorded);
        let (since, counted) = since.unwrap_or((now, counter as i64));
        if log_up && now.since(since) < RECORD_TIMEOUT {
            self.missing_since = Some((since, counted));
            return Reconciliation::default();
        }
        let (missing, least) = (missing as u64, (counted - recorded) as u64);
        // kills that were missing for the whole time are lost; newer ones may still get their record
        self.lost_between.1 = since.unix_seconds();
        self.missing_since = (missing > least).then_some((now, counter as i64));
        self.checkpoint.gaps += least;
        if missing == least {
            self.checkpoint.balanced_at = Some(now.unix_seconds());
        }
        Reconciliation { lost: least, late: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::Arc;

    fn entry(usec: u64, line: Line) -> LogEntry {
        LogEntry { position: LogPosition { sequence: Some(usec), usec }, line, text: Arc::from("") }
    }

    fn killed(usec: u64, pid: u32) -> LogEntry {
        entry(usec, Line::Killed(Killed { pid, ..Killed::default() }))
    }

    fn opened(counter: u64) -> OomAccounting {
        let mut accounting = OomAccounting::new(None, "boot", 0);
        assert_eq!(accounting.compare(Timestamp::now(), counter, true), Reconciliation::default());
        accounting
    }

    #[test]
    fn victim_logged_twice_in_group_kill_is_one_kill() {
        let mut accounting = opened(5);
        let group = entry(2, Line::Group { path: "/a".into() });
        let found: Vec<_> = [killed(1, 2957), group, killed(3, 2733), killed(4, 2957)]
            .iter()
            .map(|e| accounting.read(e))
            .collect();
        assert!(matches!(found[0], Some(LogFinding::Kill { .. })));
        assert!(matches!(&found[2], Some(LogFinding::Kill { group: Some(path), .. }) if path == "/a"));
        assert_eq!(found[3], Some(LogFinding::Duplicate { pid: 2957 }));
        assert_eq!(accounting.compare(Timestamp::now(), 8, true), Reconciliation::default());
        assert!(!accounting.has_missing_records());
    }

    #[test]
    fn group_line_after_lost_records_is_not_the_earlier_victims() {
        let group = || entry(3, Line::Group { path: "/b".into() });
        for (is_lost, pid) in [(false, Some(70)), (true, None)] {
            let mut accounting = opened(0);
            accounting.read(&killed(1, 70));
            if is_lost {
                accounting.records_lost(LogPosition { sequence: None, usec: 2 });
            }
            let found = pid.map(|pid| LogFinding::Group { pid, path: "/b".into() });
            assert_eq!(accounting.read(&group()), found, "lost: {is_lost}");
        }
    }

    #[test]
    fn only_the_chosen_victim_of_a_group_is_logged_twice_and_only_once_more() {
        let mut accounting = opened(5);
        accounting.read(&killed(1, 70));
        accounting.read(&entry(2, Line::Group { path: "/a".into() }));
        let mut is_kill =
            |usec, pid| matches!(accounting.read(&killed(usec, pid)), Some(LogFinding::Kill { .. }));
        assert!(!is_kill(3, 70), "its second record");
        assert!(
            is_kill(4, 80) && is_kill(5, 80),
            "the pid was reused: the kernel kills each member of a group once"
        );
        assert!(is_kill(6, 70), "a third record of a pid is of another process");
        assert_eq!((accounting.checkpoint().records, accounting.checkpoint().duplicates), (4, 1));
    }

    #[test]
    fn repeated_pid_outside_group_is_another_process() {
        let mut accounting = opened(0);
        assert!(matches!(accounting.read(&killed(1, 7)), Some(LogFinding::Kill { .. })));
        assert!(matches!(accounting.read(&killed(2, 7)), Some(LogFinding::Kill { .. })));
        let group = entry(3, Line::Group { path: "/a".into() });
        accounting.read(&group);
        let later = killed(3 + GROUP_WINDOW_USEC, 7);
        assert!(
            matches!(accounting.read(&later), Some(LogFinding::Kill { group: None, .. })),
            "long after the group"
        );
    }

    #[test]
    fn unreadable_counter_ends_the_wait_for_records_and_loses_none() {
        let mut accounting = opened(10);
        let now = Timestamp::now();
        accounting.compare(now, 11, true);
        assert!(accounting.has_missing_records());
        accounting.counter_unreadable();
        assert!(!accounting.has_missing_records());
        assert_eq!(accounting.compare(now.plus(RECORD_TIMEOUT), 11, true), Reconciliation::default());
        let found = accounting.compare(now.plus(2 * RECORD_TIMEOUT), 11, true);
        assert_eq!(found, Reconciliation { lost: 1, late: 0 });
    }

    #[test]
    fn record_missing_for_a_second_becomes_gap_during_further_kills() {
        let mut accounting = opened(10);
        let now = Timestamp::now();
        assert_eq!(accounting.compare(now, 12, true), Reconciliation::default());
        assert!(accounting.has_missing_records());
        let moved = now.plus(Duration::from_millis(900));
        assert_eq!(accounting.compare(moved, 13, true), Reconciliation::default());
        let second = now.plus(RECORD_TIMEOUT);
        assert_eq!(
            accounting.compare(second, 13, true),
            Reconciliation { lost: 2, late: 0 },
            "one record may still arrive"
        );
        assert_eq!(
            accounting.compare(second.plus(RECORD_TIMEOUT), 13, true),
            Reconciliation { lost: 1, late: 0 }
        );
        accounting.read(&killed(1, 7));
        let late = Reconciliation { lost: 0, late: 1 };
        assert_eq!(
            accounting.compare(moved.plus(RECORD_TIMEOUT), 13, true),
            late,
            "a late record is not a new kill"
        );
    }

    #[test]
    fn records_that_are_late_one_after_another_are_not_lost() {
        let mut accounting = opened(10);
        let now = Timestamp::now();
        let later = |millis| now.plus(Duration::from_millis(millis));
        assert_eq!(accounting.compare(now, 12, true), Reconciliation::default());
        accounting.read(&killed(1, 7));
        accounting.read(&killed(2, 8));
        assert_eq!(accounting.compare(later(700), 13, true), Reconciliation::default());
        accounting.read(&killed(3, 9));
        assert_eq!(accounting.compare(later(1_400), 14, true), Reconciliation::default());
        assert_eq!(accounting.compare(later(2_400), 14, true), Reconciliation { lost: 1, late: 0 });
    }

    #[test]
    fn without_log_missing_kills_become_gaps_at_once() {
        let mut accounting = opened(10);
        assert_eq!(accounting.compare(Timestamp::now(), 12, false), Reconciliation { lost: 2, late: 0 });
    }

    #[test]
    fn accounting_starts_at_0_after_reboot_and_continues_after_restart() {
        let mut accounting = opened(10);
        accounting.read(&killed(1, 7));
        accounting.compare(Timestamp::now(), 11, true);
        let stored = accounting.checkpoint().clone();
        let mut again = OomAccounting::new(Some(stored.clone()), "boot", 99);
        assert_eq!(again.compare(Timestamp::now(), 13, false), Reconciliation { lost: 2, late: 0 });
        let mut rebooted = OomAccounting::new(Some(stored), "another", 99);
        assert!(rebooted.read(&killed(50, 7)).is_some(), "killed before memledger was started");
        assert_eq!(rebooted.compare(Timestamp::now(), 2, false), Reconciliation { lost: 1, late: 0 });
    }

    #[test]
    fn ignores_records_from_before_first_start() {
        let mut accounting = OomAccounting::new(None, "boot", 1000);
        assert_eq!(accounting.read(&killed(1000, 7)), None);
        assert_eq!(accounting.compare(Timestamp::now(), 5, true), Reconciliation::default());
        assert!(accounting.read(&killed(1001, 7)).is_some());
        assert_eq!(accounting.compare(Timestamp::now(), 6, true), Reconciliation::default());
    }

    proptest! {
        /// Whatever records the log loses or delays, the count equals the counter once the counter has stopped, and
        /// never exceeds it.
        #[test]
        fn count_equals_counter_whatever_the_log_loses(
            kills in proptest::collection::vec((any::<bool>(), 0_u8..3), 0..60),
            log_up: bool,
        ) {
            let mut accounting = opened(100);
            let (mut now, mut counter, mut total, mut late) = (Timestamp::now(), 100, 0_i64, vec![]);
            for (number, (lost, pause)) in kills.iter().enumerate() {
                counter += 1;
                let record = killed(number as u64 + 1, number as u32);
                if *lost { late.push(record) } else { total += i64::from(accounting.read(&record).is_some()) }
                now = now.plus(Duration::from_millis(600) * u32::from(*pause));
                let difference = accounting.compare(now, counter, log_up);
                total += difference.lost as i64 - difference.late as i64;
                prop_assert!(total <= counter as i64 - 100);
            }
            for seconds in 0..3 {
                let difference = accounting.compare(now.plus(RECORD_TIMEOUT * seconds), counter, log_up);
                total += difference.lost as i64 - difference.late as i64;
            }
            prop_assert_eq!(total, kills.len() as i64);
            for record in &late {
                total += i64::from(accounting.read(record).is_some());
                let difference = accounting.compare(now, counter, log_up);
                total += difference.lost as i64 - difference.late as i64;
            }
            prop_assert_eq!(total, kills.len() as i64, "late records replace their gaps");
        }
    }
}
