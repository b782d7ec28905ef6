//! Single stories, each a sentence: whose a kill was, why a container ended, and what a restart must not change.

use super::figures;
use super::story::{KILLED, Story, asked, id, killed, path, runs};
use crate::collect::kernel_log::Position;
use crate::config::Filter;
use crate::discover::{Named, What};
use crate::ledger::entries::{Kill, Reason, Scope, Victim, Whose};
use crate::ledger::machine::Hint;
use crate::ledger::totals::Total;
use crate::parse::kernel_log::{Context, Line};

// ---- whose

#[test]
fn the_kernels_path_wins_then_proc_then_the_first_process_that_the_runtime_told() {
    let mut story = Story::new();
    story.tell('a', 0.1, What::Started);
    story.tell('a', 0.1, runs(70));
    story.tell('b', 0.1, What::Started);
    let hint = |letter| Hint { cgroup: Some(path(letter)), ..Hint::default() };
    story.kill(1.0, 1, Some(&path('b')), hint('a'));
    story.settle(1.0);
    assert_eq!((story.owner().as_deref(), &*story.last_kill().method), (Some("b"), "kmsg"));
    story.kill(2.0, 2, None, hint('a'));
    story.settle(2.0);
    assert_eq!((story.owner().as_deref(), &*story.last_kill().method), (Some("a"), "proc"));
    story.kill(3.0, 70, None, Hint::default());
    story.settle(3.0);
    assert_eq!((story.owner().as_deref(), &*story.last_kill().method), (Some("a"), "processes"));
}

#[test]
fn a_line_that_can_be_read_as_two_containers_blames_neither() {
    let mut story = Story::new();
    story.tell('a', 0.1, What::Started);
    story.tell('b', 0.1, What::Started);
    story.kill(1.0, 1, Some(&format!("{} or {}", path('a'), path('b'))), Hint::default());
    for at in [1.0, 6.0, 12.0] {
        story.settle(at);
    }
    assert_eq!(story.last_kill().whose, Whose::Unattributed);
    assert_eq!(story.kept.total(Total::Unattributed), 1);
}

#[test]
fn the_limit_of_a_parent_tells_nothing_of_the_victim() {
    let mut story = Story::new();
    story.tell('a', 0.1, What::Started);
    let limit = Some(path('b'));
    let context = Context { task_cgroups: vec![path('a')], oom_cgroup: limit, ..Context::default() };
    let lines = vec![(Line::Context(context), Hint::default()), (Line::Killed(killed(1)), Hint::default())];
    story.log(1.0, lines);
    story.settle(1.0);
    assert_eq!(story.owner().as_deref(), Some("a"));
}

#[test]
fn so_many_kills_as_the_cgroups_counted_are_theirs_and_other_numbers_blame_nobody() {
    let mut story = Story::new();
    for letter in ['a', 'b'] {
        story.tell(letter, 0.1, What::Started);
    }
    story.kill(1.0, 1, None, Hint::default());
    story.counters(1.0, &[('a', 1), ('b', 0)]);
    story.settle(1.0);
    assert_eq!((story.owner().as_deref(), &*story.last_kill().method), (Some("a"), "cgroup"));
    // one kill, and two cgroups counted one each: the other one's record was lost
    story.kill(2.0, 2, None, Hint::default());
    story.counters(2.0, &[('a', 2), ('b', 1)]);
    for at in [2.0, 8.0, 13.0] {
        story.settle(at);
    }
    assert_eq!(story.last_kill().whose, Whose::Unattributed);
}

#[test]
fn a_count_that_nothing_explained_is_not_taken_for_a_kill_that_comes_later() {
    let mut story = Story::new();
    story.tell('a', 0.1, What::Started);
    story.counters(1.0, &[('a', 1)]);
    for at in [1.0, 12.0] {
        story.settle(at);
    }
    story.kill(100.0, 1, None, Hint::default());
    story.counters(100.0, &[('a', 1)]);
    for at in [100.0, 106.0, 111.0] {
        story.settle(at);
    }
    assert_eq!(story.last_kill().whose, Whose::Unattributed);
}

#[test]
fn the_runtimes_word_ties_a_kill_to_the_container_that_ended_so() {
    let mut story = Story::new();
    story.tell('a', 0.1, What::Started);
    story.kill(1.0, 1, None, Hint::default());
    story.tell('a', 1.05, What::Oom);
    story.end('a', 1.1, KILLED);
    for at in [1.2, 3.5] {
        story.settle(at);
    }
    assert_eq!((story.owner().as_deref(), &*story.last_kill().method), (Some("a"), "runtime"));
    assert_eq!(story.reasons('a'), [Some(Reason::OomContainer)]);
}

#[test]
fn an_end_just_after_the_ledger_was_begun_may_follow_a_kill_from_before_and_explains_no_other() {
    let mut story = Story::new();
    story.tell('a', 0.1, What::Started);
    story.kill(0.35, 1, None, Hint::default());
    story.tell('a', 0.36, What::Oom);
    story.end('a', 0.4, KILLED);
    for at in [0.5, 3.0, 12.0] {
        story.settle(at);
    }
    assert_eq!(story.last_kill().whose, Whose::Unattributed);
}

/// Two kills just before an end that the runtime tells: by their times alone the other container's would be taken.
#[test]
fn among_kills_that_only_numbers_tell_of_a_name_that_is_anothers_is_not_given_to_a_stranger() {
    let mut story = Story::new();
    for letter in ['a', 'b'] {
        story.tell(letter, 0.1, What::Started);
    }
    story.counters(0.9, &[('a', 0)]);
    story.kill_in('a', 1.0, 1); // so a is known to have processes of this name
    story.counters(1.0, &[('a', 1)]);
    story.settle(1.0);
    story.kill_called(2.00, 2, "stranger");
    story.kill_called(2.01, 3, "python");
    story.counters(2.02, &[('a', 2)]);
    story.tell('b', 2.02, What::Oom);
    story.end('b', 2.02, KILLED);
    for at in [2.1, 4.5, 8.0] {
        story.settle(at);
    }
    let owner = |kill: &Kill| match &kill.whose {
        Whose::Container(subject) => subject.name.container_name.to_string(),
        whose => format!("{whose:?}"),
    };
    let owners: Vec<_> = story.kept.kills().map(|kill| (kill.pid, owner(kill))).collect();
    assert_eq!(owners, [(Some(1), "a".into()), (Some(2), "b".into()), (Some(3), "a".into())]);
}

#[test]
fn a_kill_told_before_its_containers_name_waits_for_it_over_a_restart_too() {
    let mut story = Story::new();
    story.kill_in('a', 1.0, 1);
    story.settle(1.0);
    assert_eq!(story.owner(), None);
    story.restart(1.5);
    story.tell('a', 0.9, What::Started);
    story.settle(1.6);
    assert_eq!(story.owner().as_deref(), Some("a"));
    story.settle(8.0);
    assert_eq!(story.counted("a"), (0, 1));
}

#[test]
fn a_container_that_nobody_ever_names_gets_its_short_id_and_its_kill_is_settled_after_a_restart() {
    let mut story = Story::new();
    story.kill_in('a', 1.0, 1);
    story.settle(1.0);
    story.settle(4.5);
    assert_eq!(story.owner().as_deref(), Some("aaaaaaaaaaaa"));
    story.restart(4.6);
    story.settle(10.0);
    assert_eq!(story.last_kill().victim, Some(Victim::Child));
    assert_eq!(story.counted("aaaaaaaaaaaa"), (0, 1));
}

#[test]
fn a_container_that_the_filters_leave_out_has_no_figures_before_it_is_named_either() {
    let only = |name: &str| Filter { include: Some(regex::Regex::new(name).unwrap()), ..Filter::default() };
    let labelled = Filter { labels: vec![("team".into(), None)], ..Filter::default() };
    for (filter, shown) in [(only("^aaa"), true), (only("^piper"), false), (labelled, false)] {
        let mut story = Story::filtered(filter);
        story.kill_in('a', 1.0, 1);
        story.settle(4.5);
        story.settle(10.0);
        assert_eq!(story.owner().as_deref(), Some("aaaaaaaaaaaa"), "the event is kept all the same");
        assert_eq!(story.shown(10.0).len(), usize::from(shown));
    }
}

// ---- main or child

#[test]
fn a_child_is_one_after_five_seconds_and_the_first_process_at_its_end() {
    let mut story = Story::new();
    story.tell('a', 0.1, What::Started);
    story.tell('a', 0.1, runs(70));
    story.kill_in('a', 1.0, 71);
    story.settle(1.0);
    story.settle(5.9);
    assert_eq!(story.last_kill().victim, None);
    story.settle(6.1);
    assert_eq!(story.last_kill().victim, Some(Victim::Child));
    story.kill_in('a', 7.0, 70);
    story.end('a', 7.1, KILLED);
    story.settle(7.1);
    assert_eq!(story.last_kill().victim, Some(Victim::Main));
    assert_eq!((story.counted("a"), story.exits('a')[0].oom_kills), ((1, 1), 2));
}

#[test]
fn a_child_whose_end_the_first_process_hands_on_ended_the_container() {
    let mut story = Story::new();
    story.tell('a', 0.1, What::Started);
    story.tell('a', 0.1, runs(70));
    story.kill_in('a', 1.0, 71);
    story.end('a', 4.0, KILLED);
    story.settle(4.0);
    assert_eq!(story.last_kill().victim, Some(Victim::Main));
    assert_eq!(story.reasons('a'), [Some(Reason::OomContainer)]);
}

#[test]
fn of_a_child_and_the_first_process_killed_shortly_after_only_the_latter_ended_it() {
    let mut story = Story::new();
    story.tell('a', 0.1, What::Started);
    story.kill_in('a', 1.0, 71);
    story.kill_in('a', 1.5, 70);
    story.end('a', 1.6, KILLED);
    story.settle(1.6);
    assert_eq!(story.counted("a"), (1, 1));
}

#[test]
fn a_kill_of_the_next_run_is_not_taken_for_one_of_the_run_before_while_its_start_is_not_told() {
    let mut story = Story::new();
    story.tell('a', 0.1, What::Started);
    story.end('a', 1.0, Some(0));
    story.settle(1.0);
    story.kill_in('a', 1.5, 71);
    story.settle(1.5);
    story.tell_late('a', 1.2, 2.0, What::Started);
    story.tell_late('a', 1.6, 2.0, What::Ended { exit_code: KILLED, oom_flag: None });
    story.settle(2.0);
    assert_eq!(story.reasons('a'), [Some(Reason::Completed), Some(Reason::OomContainer)]);
}

#[test]
fn a_restart_while_a_kill_of_an_earlier_run_is_open_still_tells_it_rightly() {
    let mut story = Story::new();
    story.tell('a', 0.1, What::Started);
    story.kill(1.0, 1, None, Hint::default()); // its owner is not known yet
    story.tell('a', 1.05, What::Oom);
    story.end('a', 1.1, KILLED);
    story.tell('a', 1.3, What::Started);
    story.settle(1.3);
    story.restart(1.4);
    for at in [1.5, 3.5] {
        story.settle(at);
    }
    assert_eq!(story.owner().as_deref(), Some("a"), "by the runtime's word on the run before");
    assert_eq!((story.reasons('a'), story.counted("a")), (vec![Some(Reason::OomContainer)], (1, 0)));
}

// ---- the end

#[test]
fn each_exit_code_has_its_reason() {
    for (code, reason) in [(0, Reason::Completed), (1, Reason::Error), (139, Reason::Signal)] {
        let mut story = Story::new();
        story.tell('a', 0.1, What::Started);
        story.end('a', 1.0, Some(code));
        story.settle(1.0);
        assert_eq!(story.reasons('a'), [Some(reason)]);
        let exit = story.exits('a')[0];
        assert!((exit.duration_seconds.unwrap() - 0.9).abs() < 1e-3 && exit.exit_code == Some(code));
    }
}

#[test]
fn code_137_without_a_kill_is_killed_and_it_waits_for_the_evidence() {
    let mut story = Story::new();
    story.tell('a', 0.1, What::Started);
    story.end('a', 1.0, KILLED);
    story.settle(1.0);
    assert_eq!(story.reasons('a'), [None]);
    story.restart(2.0);
    story.settle(5.1);
    assert_eq!(story.reasons('a'), [Some(Reason::Killed)], "a restart in between tells it once");
    assert_eq!(figures(&story.kept.totals(), "a").exits.iter().sum::<u64>(), 1);
}

#[test]
fn code_137_with_a_kill_whose_owner_is_found_late_is_an_oom() {
    let mut story = Story::new();
    story.tell('a', 0.1, What::Started);
    story.kill(1.0, 1, None, Hint::default());
    story.end('a', 1.1, KILLED);
    story.settle(1.1);
    assert_eq!(story.reasons('a'), [None]);
    story.counters(2.0, &[('a', 1)]);
    story.settle(2.0);
    assert_eq!(story.reasons('a'), [Some(Reason::OomContainer)]);
}

#[test]
fn a_child_is_killed_and_a_minute_later_the_first_process_fails_which_is_an_error() {
    let mut story = Story::new();
    story.tell('a', 0.1, What::Started);
    story.kill_in('a', 1.0, 71);
    for at in [1.0, 7.0] {
        story.settle(at);
    }
    story.end('a', 61.0, Some(1));
    story.settle(61.0);
    assert_eq!(story.reasons('a'), [Some(Reason::Error)]);
    assert_eq!((story.counted("a"), story.exits('a')[0].oom_kills), ((0, 1), 1));
}

#[test]
fn a_stop_that_takes_too_long_is_a_stop_and_has_both_signals_as_evidence() {
    let mut story = Story::new();
    story.tell('a', 0.1, What::Started);
    story.tell('a', 1.0, asked(15));
    story.kill_in('a', 9.0, 71); // a child, shortly before Docker loses its patience
    story.tell('a', 11.0, asked(9));
    story.end('a', 11.1, KILLED);
    story.tell('a', 11.2, What::Asked { signal: None });
    story.settle(11.2);
    assert_eq!((story.reasons('a'), story.counted("a")), (vec![Some(Reason::Stopped)], (0, 1)));
    let lines: Vec<&str> = story.exits('a')[0].evidence.iter().map(|line| line.text.as_str()).collect();
    assert!(lines[0].contains("signal 15") && lines[1].contains("signal 9"), "{lines:?}");
}

#[test]
fn an_end_that_nobody_tells_the_code_of_is_unknown_and_one_on_request_is_a_stop() {
    let mut story = Story::new();
    story.tell('a', 0.1, What::Started);
    story.tell('b', 0.1, What::Started);
    story.tell('b', 0.9, asked(15));
    story.end('a', 1.0, None);
    story.end('b', 1.0, None);
    story.settle(1.0);
    story.settle(4.1);
    assert_eq!(story.reasons('a'), [Some(Reason::Unknown)]);
    assert_eq!(story.reasons('b'), [Some(Reason::Stopped)]);
}

// ---- runs

#[test]
fn a_restart_loop_faster_than_a_second_is_as_many_runs_as_it_is() {
    let mut story = Story::new();
    for turn in 0..5 {
        let at = f64::from(turn) * 0.3;
        story.tell('a', at + 0.1, What::Started);
        story.end('a', at + 0.2, Some(1));
        // the late word of an inspect about that end
        story.tell('a', at + 0.2, What::Ended { exit_code: Some(1), oom_flag: Some(false) });
    }
    story.settle(2.0);
    assert_eq!(story.reasons('a'), [Some(Reason::Error); 5]);
    assert_eq!(figures(&story.kept.totals(), "a").restarts, 4);
}

#[test]
fn a_late_inspect_of_an_earlier_end_does_not_end_the_present_run() {
    let mut story = Story::new();
    story.tell('a', 0.1, What::Started);
    story.end('a', 0.5, None);
    story.tell('a', 0.7, What::Started);
    story.tell_late('a', 0.49, 0.8, What::Ended { exit_code: Some(3), oom_flag: Some(false) });
    story.settle(0.8);
    assert_eq!(story.reasons('a'), [Some(Reason::Error)]);
    assert!(story.machine.running("docker").any(|running| *running == id('a')));
}

#[test]
fn the_inventory_that_lags_behind_the_runtimes_word_begins_no_run() {
    let mut story = Story::new();
    story.tell('a', 0.1, What::Started);
    story.end('a', 1.0, Some(0));
    story.see(1.1, &[('a', Some(0.1))], &[("docker", true)]);
    story.settle(1.1);
    assert_eq!(story.machine.running("docker").count(), 0);
    assert_eq!(story.reasons('a').len(), 1);
}

#[test]
fn one_that_vanishes_has_ended_soon_without_a_runtime_and_late_while_its_runtime_is_away() {
    for (runtimes, after) in [(&[][..], 3.0), (&[("docker", true)], 15.0), (&[("docker", false)], 600.0)] {
        let mut story = Story::new();
        story.see(1.0, &[('a', Some(0.1))], runtimes);
        story.see(2.0, &[], runtimes);
        story.see(1.9 + after, &[], runtimes);
        assert!(story.machine.runs.get(&id('a')).is_some_and(|known| known.runs()), "{runtimes:?}");
        story.see(2.1 + after, &[], runtimes);
        story.settle(2.1 + after);
        assert!(!story.machine.runs.get(&id('a')).is_some_and(|known| known.runs()), "{runtimes:?}");
        let ended = story.exits('a')[0].at - story.begin.unix_seconds();
        assert!((ended - 2.0).abs() < 1e-3, "it ended when it was missed first: {ended}");
    }
}

#[test]
fn one_that_vanishes_before_its_name_is_told_may_still_be_its_runtimes() {
    let mut story = Story::new();
    let nameless = |letter| id(letter).short().to_owned();
    let runtimes = [("cri", true)]; // whose the cgroup is cannot be told by its path
    story.see_as(2.0, &[('b', None)], &runtimes, nameless);
    story.machine.runs.change(&id('b')).runtime = "".into();
    story.see(3.0, &[], &runtimes);
    for at in [12.0, 16.0] {
        story.see(at, &[], &runtimes);
        story.settle(at);
    }
    story.tell('b', 2.0, runs(7));
    story.end('b', 2.5, Some(0));
    story.settle(16.0);
    assert_eq!(story.reasons('b'), [Some(Reason::Completed)]);
}

#[test]
fn a_new_name_has_counts_of_its_own_and_composes_passing_one_is_none() {
    let mut story = Story::new();
    story.tell('a', 0.1, What::Started);
    story.kill_in('a', 1.0, 71);
    for at in [1.0, 7.0] {
        story.settle(at);
    }
    let named =
        |name: &str| Some(Named { name: name.into(), pod: None, image: "".into(), labels_match: true });
    story.tell_named('a', 8.0, 8.0, named("0123456789ab_a"), What::Renamed);
    story.kill_in('a', 9.0, 72);
    for at in [9.0, 15.0] {
        story.settle(at);
    }
    assert_eq!(story.counted("a"), (0, 2));
    story.tell_named('a', 16.0, 16.0, named("train"), What::Renamed);
    story.kill_in('a', 17.0, 73);
    for at in [17.0, 23.0] {
        story.settle(at);
    }
    assert_eq!((story.counted("a"), story.counted("train")), ((0, 2), (0, 1)));
}

#[test]
fn a_clock_that_was_set_back_hides_no_facts() {
    let mut story = Story::new();
    story.tell('a', 0.1, What::Started);
    story.tell_late('a', 5_000.0, 5_000.0, What::Oom); // the clock ran ahead
    story.tell_late('a', 20.0, 20.0, asked(15));
    story.tell_late('a', 21.0, 21.0, What::Ended { exit_code: KILLED, oom_flag: None });
    story.settle(21.0);
    assert_eq!(story.reasons('a'), [Some(Reason::Stopped)]);
}

#[test]
fn facts_that_are_told_again_after_a_restart_change_nothing() {
    let mut story = Story::new();
    let tell = |story: &mut Story| {
        story.tell_late('a', 0.1, 3.0, What::Started);
        story.tell_late('a', 0.5, 3.0, asked(15));
        story.tell_late('a', 0.6, 3.0, What::Ended { exit_code: Some(143), oom_flag: None });
        story.tell_late('a', 0.8, 3.0, What::Started);
    };
    tell(&mut story);
    story.settle(3.0);
    story.restart(3.0);
    tell(&mut story);
    story.tell_late('a', 3.5, 3.5, What::Ended { exit_code: KILLED, oom_flag: None });
    for at in [3.5, 7.0] {
        story.settle(at);
    }
    assert_eq!(story.reasons('a'), [Some(Reason::Stopped), Some(Reason::Killed)]);
    assert_eq!(figures(&story.kept.totals(), "a").restarts, 1);
}

// ---- gaps and second lines

#[test]
fn a_group_kill_that_a_restart_cuts_in_two_has_its_second_line_told_apart() {
    let mut story = Story::new();
    story.tell('a', 0.1, What::Started);
    let group = (Line::Group { path: path('a') }, Hint::default());
    story.log(1.0, vec![(Line::Killed(killed(70)), Hint::default()), group]);
    story.settle(1.0);
    story.restart(1.1);
    story.log(
        1.2,
        vec![(Line::Killed(killed(71)), Hint::default()), (Line::Killed(killed(70)), Hint::default())],
    );
    story.settle(1.2);
    assert_eq!((story.kept.total(Total::Host), story.kept.total(Total::Duplicates)), (2, 1));
}

#[test]
fn a_late_record_takes_the_place_of_the_gap_that_was_given_to_its_container() {
    let mut story = Story::new();
    for letter in ['a', 'b'] {
        story.tell(letter, 0.1, What::Started);
    }
    story.machine.log(story.at(0.5), None, Position::default());
    story.machine.counted(story.at(0.5), Some(7));
    story.counters(1.0, &[('a', 1), ('b', 1)]);
    story.machine.counted(story.at(1.0), Some(9));
    story.settle(1.0);
    assert_eq!(story.kept.total(Total::Host), 2);
    story.kill_in('b', 1.2, 2);
    story.kill_in('a', 1.2, 1);
    story.machine.counted(story.at(1.2), Some(9));
    story.settle(1.2);
    story.settle(9.0);
    let told: Vec<_> = story.kept.kills().map(|kill| (kill.pid, kill.whose.clone())).collect();
    assert_eq!((told.len(), story.kept.total(Total::Host), story.kept.total(Total::Gaps)), (2, 2, 0));
    for (pid, whose) in told {
        let Whose::Container(subject) = whose else { panic!("{whose:?}") };
        assert_eq!(subject.name.container_name.as_ref(), if pid == Some(1) { "a" } else { "b" });
    }
}

#[test]
fn where_neither_log_nor_counter_can_be_read_the_cgroups_count_and_late_records_count_nothing_again() {
    let mut story = Story::new();
    story.tell('a', 0.1, What::Started);
    for (at, kills) in [(0.5, 0), (1.0, 1), (2.0, 1), (3.0, 2)] {
        story.machine.log(story.at(at), None, Position::default());
        story.counters(at, &[('a', kills)]);
        story.machine.counted(story.at(at), None);
        story.settle(at);
    }
    assert_eq!((story.kept.total(Total::Host), story.last_kill().scope), (2, Scope::Container));
    story.kill_in('a', 2.9, 70);
    story.machine.counted(story.at(3.5), None);
    story.settle(3.5);
    assert_eq!(story.kept.total(Total::Host), 2);
    story.kill_in('a', 4.0, 71);
    story.machine.counted(story.at(4.0), None);
    story.settle(4.0);
    assert_eq!(story.kept.total(Total::Host), 3, "a new one is a new one");
}
