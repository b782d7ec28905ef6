//! Scenarios of `memory.oom.group`, with more kills than the kernel logs contexts for.

use super::story::{Story, id, killed, path};
use crate::discover::EventKind;
use crate::events::KillOwner;
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
