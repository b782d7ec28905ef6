use super::*;
use proptest::prelude::*;
use std::sync::Arc;

fn entry(usec: u64, line: Line) -> LogEntry {
    LogEntry { position: LogPosition { sequence: Some(usec), usec }, line, text: Arc::from(""), report: None }
}

fn killed(usec: u64, pid: u32) -> LogEntry {
    entry(usec, Line::Killed(Killed { pid, ..Killed::default() }))
}

fn opened(counter: u64) -> OomAccounting {
    let mut accounting = OomAccounting::new(None, "boot", 0);
    assert_eq!(accounting.compare(Timestamp::now(), counter, true), Reconciliation::default());
    accounting
}

/// A kill with the report of the block before it: `rows` are pids with their thread groups.
fn reported(usec: u64, pid: u32, context_pid: Option<u32>, rows: &[(u32, u32)]) -> LogEntry {
    let row = |(pid, tgid): &(u32, u32)| ReportProcess {
        pid: *pid,
        tgid: (pid != tgid).then_some(*tgid),
        ..ReportProcess::default()
    };
    let processes = rows.iter().map(row).collect();
    let report = OomReport { context_pid, processes, ..OomReport::default() };
    LogEntry { report: Some(Arc::new(report)), ..killed(usec, pid) }
}

fn report_of(accounting: &mut OomAccounting, entry: &LogEntry) -> Option<Arc<OomReport>> {
    match accounting.read(entry) {
        Some(LogFinding::Kill { report, .. }) => report,
        other => panic!("{other:?}"),
    }
}

fn context(usec: u64, pid: Option<u32>) -> LogEntry {
    entry(usec, Line::Context(OomContext { pid, ..OomContext::default() }))
}

#[test]
fn report_belongs_to_its_kill_by_pid_or_context() {
    let rows = [(7, 7), (9, 8), (20, 20)];
    for (pid, named, is_own) in [
        (7, Some(7), true),
        (8, Some(9), true),   // the row is of another thread
        (9, Some(8), true),   // so is the context line
        (37, Some(7), true),  // a thread of the victim that has no row
        (20, Some(7), false), // a process with a row of its own
        (7, None, true),
        (37, None, false),
    ] {
        let mut accounting = opened(0);
        accounting.read(&entry(1, Line::Invoked));
        if named.is_some() {
            accounting.read(&context(2, named));
        }
        let report = report_of(&mut accounting, &reported(3, pid, named, &rows));
        assert_eq!(report.is_some(), is_own, "killed {pid}, context {named:?}");
    }
}

#[test]
fn report_of_block_without_kill_is_not_of_the_next_rate_limited_one() {
    let mut accounting = opened(0);
    for number in 0..MAX_BLOCK_HEADERS as u64 {
        accounting.read(&entry(10 * number + 1, Line::Invoked));
        accounting.read(&context(10 * number + 2, Some(7)));
    }
    // the last block named 7, which was exiting already; this kill is of another block, whose begin was not logged
    assert_eq!(report_of(&mut accounting, &reported(200, 37, Some(7), &[(7, 7)])), None);
}

#[test]
fn end_without_a_kill_leaves_nothing_to_the_next_kill() {
    let mut accounting = opened(0);
    for line in
        [Line::Invoked, Line::Context(OomContext { pid: Some(7), ..OomContext::default() }), Line::NoKill]
    {
        accounting.read(&entry(1, line));
    }
    let found = accounting.read(&killed(2, 8));
    assert!(matches!(&found, Some(LogFinding::Kill { context: None, report: None, .. })), "{found:?}");
}

#[test]
fn group_whose_chosen_victim_was_exiting_names_the_others() {
    let mut accounting = opened(0);
    let group = Line::Group { path: "/a".into() };
    accounting.read(&killed(1, 5));
    for line in [Line::Invoked, Line::Context(OomContext::default()), Line::NoKill] {
        accounting.read(&entry(2, line));
    }
    assert_eq!(accounting.read(&entry(3, group)), None, "5 is of an earlier block");
    let found = [killed(4, 8), killed(5, 9)].map(|kill| accounting.read(&kill));
    let is_of_group = |found: &Option<LogFinding>| matches!(found, Some(LogFinding::Kill { group: Some(path), .. }) if path == "/a");
    assert!(found.iter().all(is_of_group), "{found:?}");
}

/// The tenth block's victim was exiting, which kernels before 5.9 do not log, and the kill after it is another block's.
#[test]
fn begin_of_the_log_is_no_proof_that_a_block_has_its_begin() {
    let victim = |pid: u32, size: bool| {
        let mut accounting = opened(0);
        accounting.records_lost(LogPosition { sequence: None, usec: 1 });
        accounting.read(&entry(2, Line::Invoked));
        accounting.read(&context(3, Some(7)));
        let mut kill = reported(4, pid, Some(7), &[(7, 7), (20, 20)]);
        Arc::make_mut(kill.report.as_mut().unwrap()).has_size_of_victim = size;
        match accounting.read(&kill) {
            Some(LogFinding::Kill { context, report, .. }) => (context.is_some(), report),
            other => panic!("{other:?}"),
        }
    };
    assert!(victim(7, true).0, "by its pid");
    let (has_context, report) = victim(37, true);
    assert!(has_context, "a thread of the process in the context line");
    assert_eq!(report.unwrap().victim(37).map(|row| row.pid), Some(7), "its row is the victim's");
    assert_eq!(victim(37, false), (false, None));
    assert_eq!(victim(20, true), (false, None), "it has a row of its own");
}

#[test]
fn begin_of_the_log_leaves_a_group_its_listed_members() {
    let mut accounting = opened(0);
    accounting.records_lost(LogPosition { sequence: None, usec: 1 });
    accounting.read(&entry(2, Line::Invoked));
    accounting.read(&context(3, Some(7)));
    accounting.read(&reported(4, 7, Some(7), &[(7, 7), (8, 8)]));
    accounting.read(&entry(5, Line::Group { path: "/a".into() }));
    let mut group_of = |usec, pid| match accounting.read(&killed(usec, pid)) {
        Some(LogFinding::Kill { group, .. }) => group,
        other => panic!("{other:?}"),
    };
    assert_eq!(group_of(6, 8).as_deref(), Some("/a"));
    assert_eq!(group_of(7, 99), None, "it may be of another block");
}

#[test]
fn victims_of_a_group_share_one_report() {
    let mut accounting = opened(0);
    accounting.read(&entry(1, Line::Invoked));
    accounting.read(&context(2, Some(7)));
    let first = report_of(&mut accounting, &reported(3, 7, Some(7), &[(7, 7), (8, 8)])).unwrap();
    accounting.read(&entry(4, Line::Group { path: "/a".into() }));
    let second = report_of(&mut accounting, &killed(5, 8)).unwrap();
    assert!(Arc::ptr_eq(&first, &second));
    accounting.read(&entry(6, Line::Invoked));
    assert_eq!(report_of(&mut accounting, &killed(7, 9)), None, "the next block has its own");
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
fn lost_record_becomes_a_gap_while_later_kills_go_on() {
    let mut accounting = opened(10);
    let start = Timestamp::now();
    assert_eq!(accounting.compare(start, 11, true), Reconciliation::default(), "its record is lost");
    let mut lost = 0;
    for kill in 1..10_u64 {
        let now = start.plus(Duration::from_millis(900) * kill as u32);
        assert!(accounting.read(&killed(kill, kill as u32)).is_some());
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
    assert!(accounting.read(&killed(1, 1)).is_some());
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
