//! Counts OOM kills from the kernel log and the kernel's counter, each kill once. Pure.
//!
//! A `Killed process` record is a kill. The counter `oom_kill` of /proc/vmstat shows how many there must be: its growth
//! equals **records + duplicate lines + gaps**. If the log is read to its end and the counter has been ahead for one second, the
//! difference becomes gaps: kills that only the counter shows.
//!
//! The owners of the victims are decided in [`owner`](super::owner).

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::clock::Timestamp;
use crate::ledger::interval::{Interval, LogClock};
use crate::ledger::sources::kernel_log::LogPosition;
use crate::lifecycle::timing::{ATTRIBUTION_TIMEOUT, LOG_DELAY, MAX_TEARDOWN, RECORD_TIMEOUT};
use crate::parse::kernel_log::kills::{KillAssembler, KillRecord};

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
    pub balanced_at: Option<f64>,
    /// Unix time before which every kill that a cgroup counted is attributed or given up.
    pub cgroups_explained_at: Option<f64>,
    /// The current block: the next memledger process may read its last lines.
    pub block: KillAssembler,
}

impl AccountingCheckpoint {
    /// Returns whether it is of this boot. One without an id is: it could not be read then.
    pub fn is_of(&self, boot_id: &str) -> bool {
        self.boot_id == boot_id || self.boot_id.is_empty()
    }
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
    /// Positions and pids of recent records: syslog(2) can return a line twice.
    seen: VecDeque<(LogPosition, u32)>,
    /// Unix times between which the kills happened that the last comparison found to be lost.
    lost_between: (Option<f64>, f64),
    /// The counter is ahead of the records.
    missing: Option<MissingRecords>,
    /// When the counter was last read and ahead of them.
    compared: Option<Timestamp>,
}

/// Records that did not arrive yet.
#[derive(Clone, Copy, Debug)]
struct MissingRecords {
    since: Timestamp,
    /// Since when others were missing before them, without a pause of those or of the ledger.
    began: Timestamp,
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

    /// Returns whether a decision on what was `noticed` then has to wait for missing records. In a storm of kills some are always missing; after
    /// a pause of the ledger what was noticed before it has not waited for those that are missing since.
    pub fn awaits_records(&self, noticed: Timestamp, now: Timestamp) -> bool {
        let is_since = |at: Timestamp, timeout: Duration| now.since(at) < timeout;
        let has_paused =
            |began: Timestamp| is_since(began, ATTRIBUTION_TIMEOUT) && is_since(noticed, MAX_TEARDOWN);
        self.missing
            .is_some_and(|missing| is_since(noticed, ATTRIBUTION_TIMEOUT) || has_paused(missing.began))
    }

    /// Returns the Unix times between which the kills happened that the last comparison found to be lost. The first is
    /// `None` if the counter was never equal to the records in this boot.
    pub fn lost_between(&self) -> (Option<f64>, f64) {
        self.lost_between
    }

    /// Notes when a record was written that [`OomAccounting::count`] counted. One that was written after the counter was read
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

    /// Sets what is known of the log's clock, and of the current block, at that position.
    pub fn set_log_state(&mut self, clock: LogClock, block: KillAssembler) {
        (self.checkpoint.log_clock, self.checkpoint.block) = (clock, block);
    }

    /// Ignores records up to this stamp, if the log is read for the first time only later.
    pub fn ignore_up_to(&mut self, usec: u64) {
        self.checkpoint.since_usec = self.checkpoint.since_usec.max(usec);
    }

    /// Starts anew: the machine was restored to an earlier state without a reboot.
    pub fn restart(&mut self, now_usec: u64) {
        let boot_id = std::mem::take(&mut self.checkpoint.boot_id);
        *self = Self::new(None, &boot_id, now_usec);
    }

    /// Counts a record. Returns whether it is new: neither older than the ledger nor read before.
    pub fn count(&mut self, position: LogPosition, record: &KillRecord) -> bool {
        let (pid, count) = match record {
            KillRecord::Group { .. } => return position.usec > self.checkpoint.since_usec,
            KillRecord::Kill { killed, .. } => (killed.pid, &mut self.checkpoint.records),
            KillRecord::Second { pid } => (*pid, &mut self.checkpoint.duplicates),
        };
        // two records can have the same stamp if the kernel's clock is coarse
        let key = (position, pid);
        if position.usec <= self.checkpoint.since_usec || self.seen.contains(&key) {
            return false;
        }
        *count += 1;
        self.seen.push_back(key);
        if self.seen.len() > MAX_SEEN_RECORDS {
            self.seen.pop_front();
        }
        true
    }

    /// Compares the records with the counter, which was read after the log was read to its end. `log_up`: the log can be read.
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
        let has_paused = self.compared.replace(now).is_none_or(|last| now.since(last) > 2 * RECORD_TIMEOUT);
        let began = self.missing.filter(|_| !has_paused).map_or(now, |missing| missing.began);
        let new = MissingRecords { since: now, began, counter: counter as i64, later: 0 };
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

#[cfg(test)]
mod tests;
