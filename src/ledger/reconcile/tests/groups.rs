//! Scenarios of `memory.oom.group`, with more kills than the kernel logs contexts for.

use super::runs::ended;
use super::story::{KILLED, Story, id, killed, path, running};
use crate::discover::EventKind;
use crate::events::{ExitReason, KillOwner};
use crate::ledger::reconcile::ProcInfo;
use crate::ledger::totals::Total;
use crate::parse::kernel_log::{Line, OomContext};

fn line(line: Line) -> (Line, ProcInfo) {
    (line, ProcInfo::default())
}

fn group(letter: char) -> (Line, ProcInfo) {
    line(Line::Group { path: path(letter) })
}

fn kill(pid: u32) -> (Line, ProcInfo) {
    line(Line::Killed(killed(pid)))
}

/// Two containers, after ten logged contexts: for five seconds the kernel logs no further one.
fn rate_limited() -> Story {
    let mut story = Story::new();
    for letter in ['a', 'b'] {
        story.event(letter, 0.1, EventKind::Started);
    }
    for number in 0..10 {
        let context = OomContext { task_cgroups: vec!["/cron.service".into()], ..OomContext::default() };
        story.log(1.0, vec![line(Line::Invoked), line(Line::Context(context)), kill(100 + number)]);
    }
    story.settle(1.0);
    story
}

fn owners(story: &Story, pids: &[u32]) -> Vec<Option<char>> {
    let owner = |pid: &u32| {
        let kill = story.store.kills().find(|kill| kill.pid == Some(*pid)).expect("the kill");
        match &kill.owner {
            KillOwner::Container(subject) => {
                ['a', 'b'].into_iter().find(|letter| *subject.container_id == *id(*letter).as_str())
            }
            _ => None,
        }
    };
    pids.iter().map(owner).collect()
}

#[test]
fn group_kill_does_not_name_the_next_container() {
    let mut story = rate_limited();
    story.log(2.0, vec![kill(70), group('a'), kill(70), kill(80)]);
    for at in [2.0, 8.0, 13.0] {
        story.settle(at);
    }
    assert_eq!(owners(&story, &[70, 80]), [Some('a'), None]);
    assert_eq!(story.store.total(Total::Unattributed), 1);
}

#[test]
fn each_group_line_names_its_own_victims() {
    let mut story = rate_limited();
    story.log(2.0, vec![kill(70), group('a'), kill(70), kill(80), group('b'), kill(80)]);
    for at in [2.0, 8.0, 13.0] {
        story.settle(at);
    }
    assert_eq!(owners(&story, &[70, 80]), [Some('a'), Some('b')]);
    assert_eq!((story.store.total(Total::Host), story.store.total(Total::Duplicates)), (12, 2));
}

#[test]
fn without_rate_limit_all_kills_of_a_group_belong_to_it() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.log(2.0, vec![line(Line::Invoked), kill(70), group('a'), kill(71), kill(70), kill(72)]);
    for at in [2.0, 8.0] {
        story.settle(at);
    }
    assert_eq!(owners(&story, &[70, 71, 72]), [Some('a'); 3]);
    assert_eq!((story.store.total(Total::Host), story.store.total(Total::Duplicates)), (3, 1));
}

#[test]
fn group_line_after_lost_records_does_not_name_the_next_container() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    // ten begins of blocks may be among the lost records
    let read_to = story.at(20.0).kernel_usec();
    story.block.records_lost(read_to);
    story.log(20.0, vec![kill(70), group('a'), kill(70), kill(80)]);
    story.log(26.0, vec![line(Line::Invoked), kill(71), group('a'), kill(71), kill(81)]);
    for at in [26.0, 32.0, 37.0] {
        story.settle(at);
    }
    assert_eq!(owners(&story, &[70, 80, 71, 81]), [Some('a'), None, Some('a'), Some('a')]);
}

#[test]
fn two_group_kills_at_once_are_matched_by_their_counters() {
    let mut story = rate_limited();
    story.log(2.0, vec![kill(70), group('a'), kill(71), kill(70), kill(80), group('b'), kill(80), kill(81)]);
    story.counters(2.0, &[('a', 3), ('b', 3)]);
    for at in [2.0, 8.0] {
        story.settle(at);
    }
    assert_eq!(owners(&story, &[70, 80]), [Some('a'), Some('b')]);
    let both = owners(&story, &[71, 81]);
    assert!(both.contains(&Some('a')) && both.contains(&Some('b')), "{both:?}");
}

#[test]
fn context_of_a_block_without_a_kill_is_not_used_for_the_next_victim() {
    let mut story = rate_limited();
    // the victim of the tenth block was exiting already, and the next block's context is not logged
    let context = OomContext { task_cgroups: vec![path('a')], pid: Some(70), ..OomContext::default() };
    story.log(2.0, vec![line(Line::Context(context)), kill(80)]);
    for at in [2.0, 8.0, 13.0] {
        story.settle(at);
    }
    assert_eq!(owners(&story, &[80]), [None]);
}

/// Returns when the run of a kill began, in seconds since the begin of the story.
fn start_of(story: &Story, pid: u32) -> Option<f64> {
    let kill = story.store.kills().find(|kill| kill.pid == Some(pid)).expect("the kill");
    let KillOwner::Container(subject) = &kill.owner else { panic!("{kill:?}") };
    subject.started.map(|started| ((started - story.begin.unix_seconds()) * 10.0).round() / 10.0)
}

#[test]
fn members_logged_after_the_next_start_are_of_the_run_of_their_group() {
    for settles_between in [false, true] {
        let mut story = Story::new();
        story.event('a', 0.1, EventKind::Started);
        story.event('a', 0.1, running(70));
        story.log(1.0, vec![line(Line::Invoked), kill(70), group('a'), kill(71)]);
        story.end('a', 1.0, KILLED);
        story.event('a', 1.1, EventKind::Started);
        story.event('a', 1.1, running(80));
        if settles_between {
            story.settle(1.15);
        }
        story.log(1.2, vec![kill(72)]);
        for at in [1.2, 8.0] {
            story.settle(at);
        }
        story.log(8.2, vec![line(Line::Invoked), kill(80), group('a'), kill(81)]);
        story.end('a', 8.2, KILLED);
        for at in [8.2, 14.0] {
            story.settle(at);
        }
        let starts = [70, 71, 72, 80, 81].map(|pid| start_of(&story, pid));
        assert_eq!(starts, [Some(0.1), Some(0.1), Some(0.1), Some(1.1), Some(1.1)], "{settles_between}");
    }
}

#[test]
fn group_is_of_the_run_whose_first_process_is_in_it() {
    for (logged, restarts) in [(1.08, false), (1.08, true), (1.5, false), (1.5, true)] {
        let mut story = Story::new();
        story.event('a', 0.1, EventKind::Started);
        story.event('a', 0.1, running(70));
        // the records are written after the end of the run, and the next one ends by SIGKILL too
        story.log(logged, vec![line(Line::Invoked), kill(71), group('a'), kill(70), kill(72)]);
        story.end('a', 1.0, KILLED);
        story.event('a', 1.1, EventKind::Started);
        story.event('a', 1.1, running(80));
        story.end('a', 3.0, KILLED);
        story.settle(3.0);
        if restarts {
            story.restart(3.1);
        }
        for at in [4.0, 9.0, 15.0] {
            story.settle(at);
        }
        assert_eq!([70, 71, 72].map(|pid| start_of(&story, pid)), [Some(0.1); 3], "{logged} {restarts}");
        let reasons = story.reasons('a');
        let wanted = [Some(ExitReason::OomContainer), Some(ExitReason::Killed)];
        assert_eq!(reasons, wanted, "{logged} {restarts}");
    }
}

#[test]
fn group_that_was_taken_for_the_run_before_moves_when_the_next_start_is_reported() {
    for restarts in [false, true] {
        let mut story = Story::new();
        story.event('a', 0.1, EventKind::Started);
        story.settle(0.2);
        story.log(2.0, vec![line(Line::Invoked), kill(71), group('a'), kill(72)]);
        story.settle(2.1);
        if restarts {
            story.restart(2.2);
        }
        // the engine was busy
        story.late_event('a', 1.0, 2.5, ended(Some(1)));
        story.late_event('a', 1.1, 2.5, EventKind::Started);
        for at in [2.5, 9.0, 15.0] {
            story.settle(at);
        }
        assert_eq!([71, 72].map(|pid| start_of(&story, pid)), [Some(1.1); 2], "{restarts}");
    }
}
