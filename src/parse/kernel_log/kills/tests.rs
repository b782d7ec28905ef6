use super::super::NoKill;
use super::*;

/// A line, and the report that the kernel printed before it.
struct Entry {
    usec: u64,
    line: Line,
    report: Option<Arc<OomReport>>,
}

fn entry(usec: u64, line: Line) -> Entry {
    Entry { usec, line, report: None }
}

fn killed(usec: u64, pid: u32) -> Entry {
    entry(usec, Line::Killed(Killed { pid, ..Killed::default() }))
}

fn read(block: &mut KillAssembler, entry: &Entry) -> Option<KillRecord> {
    block.push(entry.usec, &entry.line, entry.report.as_ref())
}

/// A kill with the report of the block before it: `rows` are pids with their thread groups.
fn reported(usec: u64, pid: u32, context_pid: Option<u32>, rows: &[(u32, u32)]) -> Entry {
    let row = |(pid, tgid): &(u32, u32)| ReportProcess {
        pid: *pid,
        tgid: (pid != tgid).then_some(*tgid),
        ..ReportProcess::default()
    };
    let processes = rows.iter().map(row).collect();
    let report = OomReport { context_pid, processes, ..OomReport::default() };
    Entry { report: Some(Arc::new(report)), ..killed(usec, pid) }
}

fn report_of(block: &mut KillAssembler, entry: &Entry) -> Option<Arc<OomReport>> {
    match read(block, entry) {
        Some(KillRecord::Kill { report, .. }) => report,
        other => panic!("{other:?}"),
    }
}

fn context(usec: u64, pid: Option<u32>) -> Entry {
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
        let mut block = KillAssembler::default();
        read(&mut block, &entry(1, Line::Invoked));
        if named.is_some() {
            read(&mut block, &context(2, named));
        }
        let report = report_of(&mut block, &reported(3, pid, named, &rows));
        assert_eq!(report.is_some(), is_own, "killed {pid}, context {named:?}");
    }
}

#[test]
fn report_of_block_without_kill_is_not_of_the_next_rate_limited_one() {
    let mut block = KillAssembler::default();
    for number in 0..MAX_BLOCK_HEADERS as u64 {
        read(&mut block, &entry(10 * number + 1, Line::Invoked));
        read(&mut block, &context(10 * number + 2, Some(7)));
    }
    // the last block named 7, which was exiting already; this kill is of another block, whose begin was not logged
    assert_eq!(report_of(&mut block, &reported(200, 37, Some(7), &[(7, 7)])), None);
}

#[test]
fn end_without_a_kill_leaves_nothing_to_the_next_kill() {
    let mut block = KillAssembler::default();
    for line in [
        Line::Invoked,
        Line::Context(OomContext { pid: Some(7), ..OomContext::default() }),
        Line::NoKill(NoKill::NoVictim),
    ] {
        read(&mut block, &entry(1, line));
    }
    let found = read(&mut block, &killed(2, 8));
    assert!(matches!(&found, Some(KillRecord::Kill { context: None, report: None, .. })), "{found:?}");
}

#[test]
fn group_whose_chosen_victim_was_exiting_names_the_others() {
    let mut block = KillAssembler::default();
    let group = Line::Group { path: "/a".into() };
    read(&mut block, &killed(1, 5));
    for line in [Line::Invoked, Line::Context(OomContext::default()), Line::NoKill(NoKill::NoVictim)] {
        read(&mut block, &entry(2, line));
    }
    assert_eq!(read(&mut block, &entry(3, group)), None, "5 is of an earlier block");
    let found = [killed(4, 8), killed(5, 9)].map(|kill| read(&mut block, &kill));
    let is_of_group = |found: &Option<KillRecord>| matches!(found, Some(KillRecord::Kill { group: Some(path), .. }) if path == "/a");
    assert!(found.iter().all(is_of_group), "{found:?}");
}

/// The tenth block's victim was exiting, which kernels before 5.9 do not log, and the kill after it is another block's.
#[test]
fn begin_of_the_log_is_no_proof_that_a_block_has_its_begin() {
    let victim = |pid: u32, size: bool| {
        let mut block = KillAssembler::default();
        block.records_lost(1);
        read(&mut block, &entry(2, Line::Invoked));
        read(&mut block, &context(3, Some(7)));
        let mut kill = reported(4, pid, Some(7), &[(7, 7), (20, 20)]);
        Arc::make_mut(kill.report.as_mut().unwrap()).has_size_of_victim = size;
        match read(&mut block, &kill) {
            Some(KillRecord::Kill { context, report, .. }) => (context.is_some(), report),
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
    let mut block = KillAssembler::default();
    block.records_lost(1);
    read(&mut block, &entry(2, Line::Invoked));
    read(&mut block, &context(3, Some(7)));
    read(&mut block, &reported(4, 7, Some(7), &[(7, 7), (8, 8)]));
    read(&mut block, &entry(5, Line::Group { path: "/a".into() }));
    let mut group_of = |usec, pid| match read(&mut block, &killed(usec, pid)) {
        Some(KillRecord::Kill { group, .. }) => group,
        other => panic!("{other:?}"),
    };
    assert_eq!(group_of(6, 8).as_deref(), Some("/a"));
    assert_eq!(group_of(7, 99), None, "it may be of another block");
}

#[test]
fn victims_of_a_group_share_one_report() {
    let mut block = KillAssembler::default();
    read(&mut block, &entry(1, Line::Invoked));
    read(&mut block, &context(2, Some(7)));
    let first = report_of(&mut block, &reported(3, 7, Some(7), &[(7, 7), (8, 8)])).unwrap();
    read(&mut block, &entry(4, Line::Group { path: "/a".into() }));
    let second = report_of(&mut block, &killed(5, 8)).unwrap();
    assert!(Arc::ptr_eq(&first, &second));
    read(&mut block, &entry(6, Line::Invoked));
    assert_eq!(report_of(&mut block, &killed(7, 9)), None, "the next block has its own");
}

#[test]
fn victim_logged_twice_in_group_kill_is_one_kill() {
    let mut block = KillAssembler::default();
    let group = entry(2, Line::Group { path: "/a".into() });
    let found: Vec<_> = [killed(1, 2957), group, killed(3, 2733), killed(4, 2957)]
        .iter()
        .map(|e| read(&mut block, e))
        .collect();
    assert!(matches!(found[0], Some(KillRecord::Kill { .. })));
    assert!(matches!(&found[2], Some(KillRecord::Kill { group: Some(path), .. }) if path == "/a"));
    assert_eq!(found[3], Some(KillRecord::Second { pid: 2957 }));
}

#[test]
fn group_line_after_lost_records_is_not_the_earlier_victims() {
    let group = || entry(3, Line::Group { path: "/b".into() });
    for (is_lost, pid) in [(false, Some(70)), (true, None)] {
        let mut block = KillAssembler::default();
        read(&mut block, &killed(1, 70));
        if is_lost {
            block.records_lost(2);
        }
        let found = pid.map(|pid| KillRecord::Group { pid, path: "/b".into() });
        assert_eq!(read(&mut block, &group()), found, "lost: {is_lost}");
    }
}

#[test]
fn only_the_chosen_victim_of_a_group_is_logged_twice_and_only_once_more() {
    let mut block = KillAssembler::default();
    read(&mut block, &killed(1, 70));
    read(&mut block, &entry(2, Line::Group { path: "/a".into() }));
    let mut is_kill =
        |usec, pid| matches!(read(&mut block, &killed(usec, pid)), Some(KillRecord::Kill { .. }));
    assert!(!is_kill(3, 70), "its second record");
    assert!(
        is_kill(4, 80) && is_kill(5, 80),
        "the pid was reused: the kernel kills each member of a group once"
    );
    assert!(is_kill(6, 70), "a third record of a pid is of another process");
}

#[test]
fn repeated_pid_outside_group_is_another_process() {
    let mut block = KillAssembler::default();
    assert!(matches!(read(&mut block, &killed(1, 7)), Some(KillRecord::Kill { .. })));
    assert!(matches!(read(&mut block, &killed(2, 7)), Some(KillRecord::Kill { .. })));
    let group = entry(3, Line::Group { path: "/a".into() });
    read(&mut block, &group);
    let later = killed(3 + GROUP_WINDOW_USEC, 7);
    assert!(
        matches!(read(&mut block, &later), Some(KillRecord::Kill { group: None, .. })),
        "long after the group"
    );
}
