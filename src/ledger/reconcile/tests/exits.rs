//! Single scenarios: the reason of an exit, and how long it waits for evidence.

use super::figures;
use super::story::{KILLED, Story, stop_request};
use crate::discover::EventKind;
use crate::events::ExitReason;
use crate::ledger::reconcile::ProcInfo;

#[test]
fn each_exit_code_has_its_reason() {
    for (code, reason) in [(0, ExitReason::Completed), (1, ExitReason::Error), (139, ExitReason::Signal)] {
        let mut story = Story::new();
        story.event('a', 0.1, EventKind::Started);
        story.end('a', 1.0, Some(code));
        story.settle(1.0);
        if reason == ExitReason::Signal {
            assert_eq!(story.reasons('a'), [None], "the kill of a child may still be logged");
            story.settle(4.1);
        }
        assert_eq!(story.reasons('a'), [Some(reason)]);
        let exit = story.exits('a')[0];
        assert!((exit.duration_seconds.unwrap() - 0.9).abs() < 1e-3 && exit.exit_code == Some(code));
    }
}

#[test]
fn code_137_without_kill_is_killed_after_waiting_for_evidence() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.end('a', 1.0, KILLED);
    story.settle(1.0);
    assert_eq!(story.reasons('a'), [None]);
    story.restart(2.0);
    story.settle(5.1);
    assert_eq!(story.reasons('a'), [Some(ExitReason::Killed)], "reported once despite a restart");
    assert_eq!(figures(&story.store.totals(), "a").exits.iter().sum::<u64>(), 1);
}

#[test]
fn kill_of_the_next_run_is_no_cause_of_an_exit_that_is_reported_after_it() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.kill_in('a', 9.1, 7);
    story.settle(9.1);
    story.late_event('a', 8.4, 9.8, EventKind::Ended { exit_code: Some(139), oom_flag: None });
    story.settle(9.8);
    story.late_event('a', 9.0, 10.4, EventKind::Started);
    for at in [10.4, 13.0, 20.0] {
        story.settle(at);
    }
    assert_eq!(story.reasons('a'), [Some(ExitReason::Signal)]);
}

#[test]
fn code_137_with_late_attributed_kill_is_oom() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.kill(1.0, 1, None, ProcInfo::default());
    story.end('a', 1.1, KILLED);
    story.settle(1.1);
    assert_eq!(story.reasons('a'), [None]);
    story.counters(2.0, &[('a', 1)]);
    story.settle(2.0);
    assert_eq!(story.reasons('a'), [Some(ExitReason::OomContainer)]);
}

#[test]
fn exit_reported_late_is_of_the_kill_before_it() {
    let mut story = Story::new();
    for letter in ['a', 'b'] {
        story.event(letter, 0.1, EventKind::Started);
        story.kill_in(letter, 1.0, 71); // below a shell, which returns its child's status
    }
    for at in [1.0, 7.0] {
        story.settle(at);
    }
    assert_eq!(story.counted("a"), (0, 1), "no exit was reported in time");
    story.late_event('a', 1.1, 8.0, EventKind::Ended { exit_code: KILLED, oom_flag: None });
    story.late_event('b', 7.9, 8.0, EventKind::Ended { exit_code: KILLED, oom_flag: None });
    for at in [8.0, 12.0] {
        story.settle(at);
    }
    assert_eq!(story.reasons('a'), [Some(ExitReason::OomContainer)]);
    assert_eq!(story.reasons('b'), [Some(ExitReason::Error)], "seven seconds after the kill");
}

#[test]
fn exit_does_not_wait_for_ever_for_records_that_keep_missing() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.log(0.5, vec![]);
    story.reconciler.apply_vmstat(story.at(0.5), 7);
    story.end('a', 1.0, KILLED);
    for step in 0..40_u64 {
        let at = 1.0 + step as f64 * 0.4;
        story.log(at, vec![]);
        story.reconciler.apply_vmstat(story.at(at), 8 + step);
        story.settle(at);
    }
    assert!(story.reasons('a')[0].is_some(), "its end is known");
}

#[test]
fn request_without_a_signal_explains_only_an_exit_soon_after_it() {
    let mut story = Story::new();
    for (letter, ended) in [('a', 5.0), ('b', 300.0)] {
        story.event(letter, 0.1, EventKind::Started);
        story.event(letter, 1.0, EventKind::SignalRequested { signal: None });
        story.end(letter, ended, Some(139));
    }
    for at in [300.0, 304.0] {
        story.settle(at);
    }
    assert_eq!(story.reasons('a'), [Some(ExitReason::Stopped)]);
    assert_eq!(story.reasons('b'), [Some(ExitReason::Signal)]);
}

#[test]
fn error_one_minute_after_killed_child_is_error() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.kill_in('a', 1.0, 71);
    for at in [1.0, 7.0] {
        story.settle(at);
    }
    story.end('a', 61.0, Some(1));
    story.settle(61.0);
    assert_eq!(story.reasons('a'), [Some(ExitReason::Error)]);
    assert_eq!((story.counted("a"), story.exits('a')[0].oom_kills), ((0, 1), 1));
}

#[test]
fn status_of_a_signal_after_a_killed_child_is_an_error_that_names_the_kill() {
    let reason = |code: i64, ended: f64, requested: bool| {
        let mut story = Story::new();
        story.event('a', 0.1, EventKind::Started);
        story.kill_in('a', 1.0, 71);
        for at in [1.0, 7.0] {
            story.settle(at);
        }
        if requested {
            story.event('a', ended - 1.0, stop_request(15));
        }
        story.end('a', ended, Some(code));
        for at in [ended, ended + 4.0] {
            story.settle(at);
        }
        let exit = story.exits('a')[0].clone();
        let kill = story.last_kill().id;
        (exit.reason, exit.may_be == [kill], story.counted("a"))
    };
    let is_error = (Some(ExitReason::Error), true, (0, 1));
    // papermill, a crash because of the lost child, an interrupt, a trap, a shell that cleans up
    for (code, ended) in [(138, 8.0), (139, 8.0), (130, 100.0), (143, 20.0), (137, 12.0), (137, 290.0)] {
        assert_eq!(reason(code, ended, false), is_error, "{code} at {ended}");
    }
    assert_eq!(reason(137, 400.0, false), (Some(ExitReason::Killed), false, (0, 1)), "no cause any more");
    assert_eq!(reason(139, 400.0, false), (Some(ExitReason::Signal), false, (0, 1)));
    assert_eq!(reason(143, 20.0, true), (Some(ExitReason::Stopped), false, (0, 1)));
}

#[test]
fn end_waits_for_a_kill_whose_container_is_not_known_yet() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.kill(1.0, 71, None, ProcInfo::default());
    story.end('a', 1.1, Some(0));
    story.settle(1.1);
    assert_eq!(story.reasons('a'), [None]);
    story.counters(2.0, &[('a', 1)]);
    story.settle(2.0);
    let exit = story.exits('a')[0];
    assert_eq!((exit.reason, exit.oom_kills), (Some(ExitReason::Completed), 1));
}

#[test]
fn stop_with_timeout_is_stopped_with_both_signals_as_evidence() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.event('a', 1.0, stop_request(15));
    story.kill_in('a', 9.0, 71); // a child, shortly before Docker's stop timeout
    story.event('a', 11.0, stop_request(9));
    story.end('a', 11.1, KILLED);
    story.event('a', 11.2, EventKind::SignalRequested { signal: None });
    story.settle(11.2);
    assert_eq!((story.reasons('a'), story.counted("a")), (vec![Some(ExitReason::Stopped)], (0, 1)));
    let lines: Vec<&str> = story.exits('a')[0].evidence.iter().map(|line| line.text.as_str()).collect();
    assert!(lines[0].contains("signal 15") && lines[1].contains("signal 9"), "{lines:?}");
}

#[test]
fn exit_without_code_is_unknown_or_stopped_on_request() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.event('b', 0.1, EventKind::Started);
    story.event('b', 0.9, stop_request(15));
    story.end('a', 1.0, None);
    story.end('b', 1.0, None);
    story.settle(1.0);
    story.settle(4.1);
    assert_eq!(story.reasons('a'), [Some(ExitReason::Unknown)]);
    assert_eq!(story.reasons('b'), [Some(ExitReason::Stopped)]);
}
