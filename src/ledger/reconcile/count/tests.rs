use super::*;
use crate::parse::kernel_log::Killed;
use proptest::prelude::*;
use std::time::Duration;

fn killed(usec: u64, pid: u32) -> (LogPosition, KillRecord) {
    let killed = Killed { pid, ..Killed::default() };
    let record = KillRecord::Kill { killed, context: None, group: None, report: None };
    (LogPosition { sequence: Some(usec), usec }, record)
}

fn count(accounting: &mut OomAccounting, (position, record): &(LogPosition, KillRecord)) -> bool {
    accounting.count(*position, record)
}

fn opened(counter: u64) -> OomAccounting {
    let mut accounting = OomAccounting::new(None, "boot", 0);
    assert_eq!(accounting.compare(Timestamp::now(), counter, true), Reconciliation::default());
    accounting
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
    count(&mut accounting, &killed(1, 7));
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
    count(&mut accounting, &killed(1, 7));
    count(&mut accounting, &killed(2, 8));
    assert_eq!(accounting.compare(later(700), 13, true), Reconciliation::default());
    count(&mut accounting, &killed(3, 9));
    assert_eq!(accounting.compare(later(1_400), 14, true), Reconciliation::default());
    assert_eq!(accounting.compare(later(2_400), 14, true), Reconciliation { lost: 1, late: 0 });
}

#[test]
fn lost_record_becomes_a_gap_while_later_kills_go_on() {
    let mut accounting = opened(10);
    let start = Timestamp::now();
    assert_eq!(accounting.compare(start, 11, true), Reconciliation::default(), "its record is lost");
    let mut lost = 0;
    for kill in 1..10_u64 {
        let now = start.plus(Duration::from_millis(900) * kill as u32);
        assert!(count(&mut accounting, &killed(kill, kill as u32)));
        accounting.counted_record_of(&Interval::at(now.unix_seconds()), now);
        lost += accounting.compare(now, 11 + kill, true).lost;
    }
    assert_eq!(lost, 1);
    assert!(!accounting.has_missing_records());
}

#[test]
fn clock_that_is_set_while_a_record_is_late_makes_no_kill() {
    let mut accounting = opened(10);
    let start = Timestamp::now();
    // the records of two kills are missing: the first is lost, the second comes late, and the clock is set forward meanwhile
    assert_eq!(accounting.compare(start, 12, true), Reconciliation::default());
    let at = |millis| start.plus(Duration::from_millis(millis)).with_wall_moved(1_000);
    assert!(count(&mut accounting, &killed(1, 1)));
    let written = start.with_wall_moved(1_000).unix_seconds() - 0.005;
    accounting.counted_record_of(&Interval::at(written), at(200));
    assert_eq!(accounting.compare(at(200), 12, true), Reconciliation::default());
    assert_eq!(accounting.compare(at(1_100), 12, true), Reconciliation { lost: 1, late: 0 });
}

#[test]
fn without_log_missing_kills_become_gaps_at_once() {
    let mut accounting = opened(10);
    assert_eq!(accounting.compare(Timestamp::now(), 12, false), Reconciliation { lost: 2, late: 0 });
}

#[test]
fn accounting_starts_at_0_after_reboot_and_continues_after_restart() {
    let mut accounting = opened(10);
    count(&mut accounting, &killed(1, 7));
    accounting.compare(Timestamp::now(), 11, true);
    let stored = accounting.checkpoint().clone();
    let mut again = OomAccounting::new(Some(stored.clone()), "boot", 99);
    assert_eq!(again.compare(Timestamp::now(), 13, false), Reconciliation { lost: 2, late: 0 });
    let mut rebooted = OomAccounting::new(Some(stored), "another", 99);
    assert!(count(&mut rebooted, &killed(50, 7)), "killed before memledger was started");
    assert_eq!(rebooted.compare(Timestamp::now(), 2, false), Reconciliation { lost: 1, late: 0 });
}

#[test]
fn ignores_records_from_before_first_start() {
    let mut accounting = OomAccounting::new(None, "boot", 1000);
    assert!(!count(&mut accounting, &killed(1000, 7)));
    assert_eq!(accounting.compare(Timestamp::now(), 5, true), Reconciliation::default());
    assert!(count(&mut accounting, &killed(1001, 7)));
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
            if *lost { late.push(record) } else { total += i64::from(count(&mut accounting, &record)) }
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
            total += i64::from(count(&mut accounting, record));
            let difference = accounting.compare(now, counter, log_up);
            total += difference.lost as i64 - difference.late as i64;
        }
        prop_assert_eq!(total, kills.len() as i64, "late records replace their gaps");
    }
}

#[test]
fn boot_without_an_id_is_the_one_that_is_known() {
    let stored = |boot_id: &str| AccountingCheckpoint {
        boot_id: boot_id.to_owned(),
        opened_at: Some(40),
        records: 3,
        ..AccountingCheckpoint::default()
    };
    let accounting = |stored, boot_id| OomAccounting::new(Some(stored), boot_id, 0).checkpoint().clone();
    let continued = accounting(stored(""), "b");
    assert_eq!((continued.records, continued.opened_at, &*continued.boot_id), (3, Some(40), "b"));
    assert_eq!(accounting(stored("b"), "b").records, 3);
    let other = accounting(stored("a"), "b");
    assert_eq!((other.records, other.opened_at), (0, Some(0)), "another boot counts from 0");
}

#[test]
fn second_record_is_counted_as_the_kernel_counts_it_and_a_repeated_line_is_not() {
    let mut accounting = opened(5);
    let second = (LogPosition { sequence: Some(4), usec: 4 }, KillRecord::Second { pid: 7 });
    for record in [killed(1, 7), killed(3, 8), second.clone()] {
        assert!(count(&mut accounting, &record));
        assert!(!count(&mut accounting, &record), "syslog(2) can return a line twice");
    }
    assert_eq!((accounting.checkpoint().records, accounting.checkpoint().duplicates), (2, 1));
    assert_eq!(accounting.compare(Timestamp::now(), 8, true), Reconciliation::default());
    assert!(!accounting.has_missing_records());
}

#[test]
fn decision_waits_for_missing_records_also_after_a_pause_but_not_for_ever() {
    let mut accounting = opened(10);
    let begin = Timestamp::now();
    let at = |seconds: u64| begin.plus(Duration::from_secs(seconds));
    assert!(!accounting.awaits_records(begin, begin), "none is missing");
    accounting.compare(begin, 11, true);
    assert!(accounting.awaits_records(begin, begin));
    // the ledger paused for half a minute, and another kill has no record yet
    accounting.compare(at(30), 12, true);
    assert!(accounting.awaits_records(begin, at(30)), "what was noticed before has not waited for that one");
    // in a storm one is missing in each reading
    for second in 31..50 {
        accounting.compare(at(second), 12 + second, true);
        let waits = [begin, at(second)].map(|noticed| accounting.awaits_records(noticed, at(second)));
        assert_eq!(waits, [second < 40, true], "after {second} s");
    }
}
