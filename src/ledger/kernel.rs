//! Kernel log and kernel counter -> kills, each once. Pure.
//!
//! A `Killed process` record is a kill. The counter `oom_kill` of /proc/vmstat says how many there must be:
//! **records + duplicate lines + gaps = growth of the counter**. What is missing when the log is drained and the counter
//! has been ahead for a second becomes a gap: a kill of which only the counter tells.
//!
//! With `memory.oom.group` the kernel logs and counts the first victim twice; within such a block a pid that was killed
//! already is a duplicate line. Elsewhere the same pid is a new process: pids are used again within minutes.
//!
//! Not here: whose process it was.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::clock::Moment;
use crate::collect::kernel_log::{Entry, Position};
use crate::parse::kernel_log::{Context, Killed, Line};

/// How long a record must be missing before it is called lost. The kernel raises the counter before it logs.
const RECORD_MAY_TAKE: Duration = Duration::from_secs(1);
/// Kills by `memory.oom.group` follow each other within so many microseconds.
const GROUP_USEC: u64 = 2_000_000;

/// Records that are remembered, so that none is taken twice.
const RECORDS_TOLD: usize = 1_024;

/// What outlives a restart of memledger.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Account {
    /// The boot that this account is of.
    pub boot_id: String,
    /// Where the log was read to.
    pub position: Position,
    /// Records up to this stamp are older than the ledger.
    pub since_usec: u64,
    /// The counter when the account was opened; `None` until it was read for the first time.
    pub opened_at: Option<i64>,
    /// Kills with a record.
    pub records: u64,
    /// Second lines of one kill.
    pub duplicates: u64,
    /// Kills without a record.
    pub gaps: u64,
    /// The group kill that may still go on: its last lines may be read by the next run of memledger.
    #[serde(default)]
    group: GroupKill,
}

/// Who was killed with a group, as far as its lines were read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct GroupKill {
    path: Option<String>,
    pids: Vec<u32>,
    last_usec: u64,
}

/// What a line of the log amounts to.
#[derive(Clone, Debug, PartialEq)]
pub enum Found {
    /// One more process was killed.
    Kill {
        /// The victim.
        killed: Killed,
        /// Whose it was, by the rate-limited line before it.
        context: Option<Context>,
        /// The cgroup that was killed as a group, if it belongs to one.
        group: Option<String>,
    },
    /// A second line of a kill that was told already.
    Duplicate {
        /// The victim.
        pid: u32,
    },
}

/// What the counter says beyond the records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Balance {
    /// Kills whose record is lost: to be entered as gaps.
    pub lost: u64,
    /// Records that came after their gap was entered: so many of them are no new kills.
    pub late: u64,
}

/// The state of the account.
#[derive(Debug, Default)]
pub struct Kernel {
    account: Account,
    /// The rate-limited line that the next record belongs to.
    context: Option<Context>,
    /// Places and pids of the last records: syslog(2) may give a line twice.
    told: VecDeque<(Position, u32)>,
    /// The counter is ahead of the records: since when, and by how many all the time.
    ahead: Option<(Moment, u64)>,
}

impl Kernel {
    /// Goes on with an account, or opens a new one at `now_usec` of the kernel's clock.
    ///
    /// After a reboot the counter begins at 0, and so does the account: kills before memledger's start count. Only the
    /// very first account begins with what the counter says then: old kills are no news.
    pub fn new(stored: Option<Account>, boot_id: &str, now_usec: u64) -> Self {
        let account = match stored {
            Some(account) if account.boot_id == boot_id => account,
            Some(_) => Account { boot_id: boot_id.to_owned(), opened_at: Some(0), ..Account::default() },
            None => Account { boot_id: boot_id.to_owned(), since_usec: now_usec, ..Account::default() },
        };
        Self { account, ..Self::default() }
    }

    /// What must be stored.
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// The counter is ahead of the records: evidence may still come.
    pub fn waits(&self) -> bool {
        self.ahead.is_some()
    }

    /// The log was read to here.
    pub fn read_to(&mut self, position: Position) {
        self.account.position = position;
    }

    /// The machine was set back to an earlier state without a reboot: the account begins anew.
    pub fn rewound(&mut self, now_usec: u64) {
        let boot_id = std::mem::take(&mut self.account.boot_id);
        *self = Self::new(None, &boot_id, now_usec);
    }

    /// Reads one line.
    pub fn read(&mut self, entry: &Entry) -> Option<Found> {
        if entry.position.usec <= self.account.since_usec {
            return None;
        }
        match &entry.line {
            Line::Invoked => {
                self.context = None;
                self.account.group = GroupKill::default();
            }
            Line::Context(context) => {
                self.context = Some(context.clone());
                self.account.group = GroupKill::default();
            }
            Line::Group { path } => {
                // the line comes after its first victim, the one that will be named twice
                let group = &mut self.account.group;
                group.path = Some(path.clone());
                group.pids.drain(..group.pids.len().saturating_sub(1));
            }
            Line::Killed(killed) => {
                // two records may bear one stamp where the kernel's clock is coarse
                let key = (entry.position, killed.pid);
                if self.told.contains(&key) {
                    return None;
                }
                self.told.push_back(key);
                if self.told.len() > RECORDS_TOLD {
                    self.told.pop_front();
                }
                return Some(self.killed(killed, entry.position.usec));
            }
            Line::Xid(_) => {} // no kill
        }
        None
    }

    fn killed(&mut self, killed: &Killed, usec: u64) -> Found {
        let group = &mut self.account.group;
        let in_group = group.path.is_some() && usec.saturating_sub(group.last_usec) < GROUP_USEC;
        if !in_group {
            *group = GroupKill::default();
        }
        group.last_usec = usec;
        if group.pids.contains(&killed.pid) {
            self.account.duplicates += 1;
            return Found::Duplicate { pid: killed.pid };
        }
        group.pids.push(killed.pid);
        self.account.records += 1;
        Found::Kill { killed: killed.clone(), context: self.context.take(), group: group.path.clone() }
    }

    /// A kill was entered that only a cgroup's counter tells of, while nothing else counts.
    pub fn told_by_cgroup(&mut self) {
        self.account.gaps += 1;
    }

    /// A record took the place of such a kill, and there is no counter that says so.
    pub fn came_late(&mut self) {
        self.account.gaps = self.account.gaps.saturating_sub(1);
    }

    /// Compares with the counter, which was read after the log was drained. `log_up`: records can come at all.
    pub fn compare(&mut self, now: Moment, counter: u64, log_up: bool) -> Balance {
        let accounted = (self.account.records + self.account.duplicates + self.account.gaps) as i64;
        let opened_at = *self.account.opened_at.get_or_insert(counter as i64 - accounted);
        let missing = counter as i64 - opened_at - accounted;
        if missing <= 0 {
            self.ahead = None;
            let surplus = missing.unsigned_abs();
            let late = surplus.min(self.account.gaps);
            self.account.gaps -= late;
            // a kill in the moment in which the account was opened: its record counts, so the account opens before it
            self.account.opened_at = Some(opened_at - (surplus - late) as i64);
            return Balance { lost: 0, late };
        }
        let missing = missing as u64;
        let (since, least) = match self.ahead {
            Some((since, least)) if log_up => (since, least.min(missing)),
            _ => (now, missing),
        };
        if log_up && now.since(since) < RECORD_MAY_TAKE {
            self.ahead = Some((since, least));
            return Balance::default();
        }
        // what was missing all the time is lost; what came to it since may still be on its way
        self.ahead = (missing > least).then_some((now, missing - least));
        self.account.gaps += least;
        Balance { lost: least, late: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::Arc;

    fn entry(usec: u64, line: Line) -> Entry {
        Entry { position: Position { sequence: Some(usec), usec }, line, text: Arc::from("") }
    }

    fn killed(usec: u64, pid: u32) -> Entry {
        entry(usec, Line::Killed(Killed { pid, ..Killed::default() }))
    }

    fn opened(counter: u64) -> Kernel {
        let mut kernel = Kernel::new(None, "boot", 0);
        assert_eq!(kernel.compare(Moment::now(), counter, true), Balance::default());
        kernel
    }

    #[test]
    fn the_victim_that_a_group_kill_names_twice_is_one_kill() {
        let mut kernel = opened(5);
        let group = entry(2, Line::Group { path: "/a".into() });
        let found: Vec<_> = [killed(1, 2957), group, killed(3, 2733), killed(4, 2957)]
            .iter()
            .map(|e| kernel.read(e))
            .collect();
        assert!(matches!(found[0], Some(Found::Kill { .. })));
        assert!(matches!(&found[2], Some(Found::Kill { group: Some(path), .. }) if path == "/a"));
        assert_eq!(found[3], Some(Found::Duplicate { pid: 2957 }));
        assert_eq!(kernel.compare(Moment::now(), 8, true), Balance::default());
        assert!(!kernel.waits());
    }

    #[test]
    fn the_same_pid_again_is_another_process() {
        let mut kernel = opened(0);
        assert!(matches!(kernel.read(&killed(1, 7)), Some(Found::Kill { .. })));
        assert!(matches!(kernel.read(&killed(2, 7)), Some(Found::Kill { .. })));
        let group = entry(3, Line::Group { path: "/a".into() });
        kernel.read(&group);
        let later = killed(3 + GROUP_USEC, 7);
        assert!(matches!(kernel.read(&later), Some(Found::Kill { group: None, .. })), "long after the group");
    }

    #[test]
    fn a_record_that_is_missing_for_a_second_becomes_a_gap_also_while_others_are_killed() {
        let mut kernel = opened(10);
        let now = Moment::now();
        assert_eq!(kernel.compare(now, 12, true), Balance::default());
        assert!(kernel.waits());
        let moved = now.plus(Duration::from_millis(900));
        assert_eq!(kernel.compare(moved, 13, true), Balance::default());
        let second = now.plus(RECORD_MAY_TAKE);
        assert_eq!(kernel.compare(second, 13, true), Balance { lost: 2, late: 0 }, "one may still come");
        assert_eq!(kernel.compare(second.plus(RECORD_MAY_TAKE), 13, true), Balance { lost: 1, late: 0 });
        kernel.read(&killed(1, 7));
        let late = Balance { lost: 0, late: 1 };
        assert_eq!(
            kernel.compare(moved.plus(RECORD_MAY_TAKE), 13, true),
            late,
            "a late record is no new kill"
        );
    }

    #[test]
    fn without_the_log_nothing_is_waited_for() {
        let mut kernel = opened(10);
        assert_eq!(kernel.compare(Moment::now(), 12, false), Balance { lost: 2, late: 0 });
    }

    #[test]
    fn after_a_reboot_the_account_begins_at_0_and_after_a_restart_it_goes_on() {
        let mut kernel = opened(10);
        kernel.read(&killed(1, 7));
        kernel.compare(Moment::now(), 11, true);
        let stored = kernel.account().clone();
        let mut again = Kernel::new(Some(stored.clone()), "boot", 99);
        assert_eq!(again.compare(Moment::now(), 13, false), Balance { lost: 2, late: 0 });
        let mut rebooted = Kernel::new(Some(stored), "another", 99);
        assert!(rebooted.read(&killed(50, 7)).is_some(), "killed before memledger was started");
        assert_eq!(rebooted.compare(Moment::now(), 2, false), Balance { lost: 1, late: 0 });
    }

    #[test]
    fn what_was_logged_before_the_first_start_is_no_news() {
        let mut kernel = Kernel::new(None, "boot", 1000);
        assert_eq!(kernel.read(&killed(1000, 7)), None);
        assert_eq!(kernel.compare(Moment::now(), 5, true), Balance::default());
        assert!(kernel.read(&killed(1001, 7)).is_some());
        assert_eq!(kernel.compare(Moment::now(), 6, true), Balance::default());
    }

    proptest! {
        /// The log may lose any record, records may be read late, and the counter is right: the count is right too, once
        /// the counter has stood still, and never above it.
        #[test]
        fn the_count_equals_the_counter_whatever_the_log_loses(
            kills in proptest::collection::vec((any::<bool>(), 0_u8..3), 0..60),
            log_up: bool,
        ) {
            let mut kernel = opened(100);
            let (mut now, mut counter, mut total, mut late) = (Moment::now(), 100, 0_i64, vec![]);
            for (number, (lost, pause)) in kills.iter().enumerate() {
                counter += 1;
                let record = killed(number as u64 + 1, number as u32);
                if *lost { late.push(record) } else { total += i64::from(kernel.read(&record).is_some()) }
                now = now.plus(Duration::from_millis(600) * u32::from(*pause));
                let balance = kernel.compare(now, counter, log_up);
                total += balance.lost as i64 - balance.late as i64;
                prop_assert!(total <= counter as i64 - 100);
            }
            for seconds in 0..3 {
                let balance = kernel.compare(now.plus(RECORD_MAY_TAKE * seconds), counter, log_up);
                total += balance.lost as i64 - balance.late as i64;
            }
            prop_assert_eq!(total, kills.len() as i64);
            for record in &late {
                total += i64::from(kernel.read(record).is_some());
                let balance = kernel.compare(now, counter, log_up);
                total += balance.lost as i64 - balance.late as i64;
            }
            prop_assert_eq!(total, kills.len() as i64, "late records take the place of their gaps");
        }
    }
}
