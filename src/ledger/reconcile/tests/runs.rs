//! Scenarios of runs: which run a kill belongs to, late and repeated reports, reboots.

use super::story::{DOCKER_UP, KILLED, Story, id, killed, path, running, stop_request};
use crate::discover::EventKind;
use crate::events::{ExitReason, KillOwner, UsageSample};
use crate::ledger::reconcile::ProcInfo;
use crate::parse::kernel_log::{Line, OomContext};
use crate::runs::hit_limit::{HitLimit, LimitPosition};
use crate::runs::usage::ContainerUsage;

/// Returns the event of an exit.
pub fn ended(exit_code: Option<i64>) -> EventKind {
    EventKind::Ended { exit_code, oom_flag: None }
}

/// Returns the record of a kill in the container a, b, ...
pub fn record_of(letter: char, pid: u32) -> Vec<(Line, ProcInfo)> {
    let context = OomContext { task_cgroups: vec![path(letter)], ..OomContext::default() };
    vec![(Line::Context(context), ProcInfo::default()), (Line::Killed(killed(pid)), ProcInfo::default())]
}

#[test]
fn kill_read_after_the_next_start_keeps_its_own_run_and_samples() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    let sample = UsageSample { at: 1.0, usage_bytes: 64, ..UsageSample::default() };
    story.usage = ContainerUsage { sample: Some(sample), ..ContainerUsage::default() };
    story.cycle(0.9, &[('a', Some(0.1))], &DOCKER_UP);
    // one step was blocked by the disk: the runtime's events are applied before the log
    story.late_event('a', 1.1, 2.0, ended(KILLED));
    story.late_event('a', 1.3, 2.0, EventKind::Started);
    story.log_read(1.0, 2.0, record_of('a', 71));
    story.settle(2.0);
    let kill = story.last_kill();
    let KillOwner::Container(subject) = &kill.owner else { panic!("{kill:?}") };
    let started = subject.started.unwrap() - story.begin.unix_seconds();
    assert!((started - 0.1).abs() < 1e-3, "started at {started}");
    assert_eq!(kill.before.as_ref().map(|before| before.samples.len()), Some(1), "samples of that run");
    assert_eq!((story.reasons('a'), story.counted("a")), (vec![Some(ExitReason::OomContainer)], (1, 0)));
}

#[test]
fn start_that_is_listed_before_its_event_is_the_same_run() {
    let mut story = Story::new();
    let sample = UsageSample { at: 1.0, usage_bytes: 64, ..UsageSample::default() };
    story.usage = ContainerUsage { sample: Some(sample), ..ContainerUsage::default() };
    // the runtime's hooks took two seconds, between the time that it reports of the start and the event
    story.late_event('a', 3.0, 3.0, EventKind::Started);
    story.cycle(3.1, &[('a', Some(1.0))], &DOCKER_UP);
    story.late_event('a', 1.0, 3.2, running(70));
    story.cycle(4.1, &[('a', Some(1.0))], &DOCKER_UP);
    // after a restart of memledger the runtime repeats the event
    story.settle(4.2);
    story.restart(4.2);
    story.late_event('a', 3.0, 4.3, EventKind::Started);
    story.cycle(4.4, &[('a', Some(1.0))], &DOCKER_UP);
    story.end('a', 5.0, Some(0));
    story.settle(5.0);
    assert_eq!((story.exits('a').len(), story.counted("a")), (1, (0, 0)));
    let (exit, run) = (story.exits('a')[0].clone(), story.run_record());
    assert_eq!(exit.duration_seconds.map(f64::round), Some(4.0));
    assert_eq!((run.samples, run.observed_seconds.map(f64::round)), (3, Some(1.0)));
    // the next run; what the last one was started with is not its start
    story.late_event('a', 8.0, 8.0, EventKind::Started);
    story.cycle(8.1, &[('a', Some(1.0))], &DOCKER_UP);
    story.late_event('a', 1.0, 8.2, running(70));
    story.cycle(9.1, &[('a', Some(6.0))], &DOCKER_UP);
    story.end('a', 10.0, Some(0));
    story.settle(10.0);
    assert_eq!((story.exits('a').len(), story.run_record().samples), (2, 1));
}

#[test]
fn start_that_is_listed_before_its_event_arrives_is_the_same_run() {
    let mut story = Story::new();
    let sample = UsageSample { at: 1.0, usage_bytes: 64, ..UsageSample::default() };
    story.usage = ContainerUsage { sample: Some(sample), ..ContainerUsage::default() };
    story.cycle(3.1, &[('a', Some(1.0))], &DOCKER_UP);
    story.late_event('a', 3.0, 3.2, EventKind::Started);
    story.late_event('a', 1.0, 3.3, running(70));
    story.settle(3.3);
    story.restart(3.4);
    story.late_event('a', 3.0, 3.5, EventKind::Started);
    story.cycle(4.1, &[('a', Some(1.0))], &DOCKER_UP);
    story.end('a', 5.0, Some(0));
    story.settle(5.0);
    assert_eq!((story.exits('a').len(), story.run_record().samples), (1, 2));
    // the next start is another run, although it comes soon
    story.late_event('a', 5.5, 5.5, EventKind::Started);
    story.end('a', 6.0, Some(0));
    story.settle(6.0);
    assert_eq!(story.exits('a').len(), 2);
}

#[test]
fn exit_after_the_clock_was_set_back_is_that_of_the_run() {
    let mut story = Story::new();
    story.late_event('a', 50.0, 1.0, EventKind::Started);
    story.late_event('a', 4.0, 4.0, EventKind::Started);
    story.end('a', 6.0, Some(0));
    story.settle(6.0);
    let durations: Vec<_> =
        story.exits('a').iter().map(|exit| exit.duration_seconds.map(f64::round)).collect();
    assert_eq!(durations, [Some(2.0)]);
}

/// The clock was an hour ahead when the first two runs began, and was set back after that.
#[test]
fn runs_go_on_to_be_counted_after_the_clock_was_set_back() {
    const HOUR: f64 = 3600.0;
    let mut story = Story::new();
    story.late_event('a', HOUR, 0.1, EventKind::Started);
    story.late_event('a', HOUR + 0.5, 0.6, ended(Some(1)));
    story.late_event('a', HOUR + 0.8, 0.9, EventKind::Started);
    story.late_event('a', HOUR + 0.8, 0.9, running(70));
    story.settle(1.0);
    story.cycle(2.0, &[('a', Some(HOUR + 0.8))], &DOCKER_UP);
    story.kill_in('a', 19.9, 70);
    story.end('a', 20.0, KILLED);
    story.event('a', 20.5, EventKind::Started);
    story.cycle(21.0, &[('a', Some(20.5))], &DOCKER_UP);
    story.end('a', 30.0, Some(0));
    for at in [30.1, 40.0] {
        story.settle(at);
    }
    let expected = [ExitReason::OomContainer, ExitReason::Completed, ExitReason::Error].map(Some);
    assert_eq!(story.reasons('a'), expected, "by time, and the first one ended in the future");
    let durations =
        story.exits('a').iter().map(|exit| exit.duration_seconds.map(f64::round)).collect::<Vec<_>>();
    assert_eq!(durations[..2], [Some(18.0), Some(10.0)]);
}

#[test]
fn start_after_an_exit_that_was_not_reported_may_be_listed_before_its_event() {
    let mut story = Story::new();
    let sample = UsageSample { at: 1.0, usage_bytes: 64, ..UsageSample::default() };
    story.usage = ContainerUsage { sample: Some(sample), ..ContainerUsage::default() };
    story.event('a', 0.1, EventKind::Started);
    story.cycle(1.0, &[('a', Some(0.1))], &DOCKER_UP);
    // the engine was restarted, and the container with it
    story.late_event('a', 9.0, 9.0, EventKind::Started);
    story.late_event('a', 7.0, 9.1, running(70));
    story.cycle(10.0, &[('a', Some(7.0))], &DOCKER_UP);
    story.end('a', 11.0, Some(0));
    story.settle(11.0);
    let durations: Vec<_> =
        story.exits('a').iter().map(|exit| exit.duration_seconds.map(f64::round)).collect();
    assert_eq!(durations, [Some(9.0), Some(4.0)]);
    assert_eq!(story.run_record().samples, 1);
}

#[test]
fn kill_read_before_the_exit_and_the_next_start_are_reported_moves_to_the_next_run() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.event('a', 0.1, running(70));
    story.log_read(8.0, 8.0, vec![]);
    story.log_read(8.067, 8.1, record_of('a', 71));
    story.settle(8.1);
    story.late_event('a', 7.917, 8.15, ended(KILLED));
    story.settle(8.15);
    assert_eq!(story.last_kill().victim, None, "the next run may have begun");
    story.late_event('a', 8.017, 8.3, EventKind::Started);
    for at in [8.3, 11.5, 14.0] {
        story.settle(at);
    }
    let KillOwner::Container(subject) = &story.last_kill().owner else { panic!() };
    let started = subject.started.unwrap() - story.begin.unix_seconds();
    assert!((started - 8.017).abs() < 1e-3, "started at {started}");
    assert_eq!((story.reasons('a'), story.counted("a")), (vec![Some(ExitReason::Killed)], (0, 1)));
}

#[test]
fn kill_of_the_next_run_does_not_hide_the_one_that_ended_the_run_before() {
    let mut story = Story::new();
    story.event('a', 6.173, EventKind::Started);
    story.log_read(6.3, 6.3, vec![]);
    story.log_read(6.34, 6.4, record_of('a', 70));
    story.settle(6.4);
    story.log_read(6.623, 6.8, record_of('a', 71));
    story.late_event('a', 6.358, 6.8, ended(KILLED));
    story.settle(6.8);
    story.late_event('a', 6.573, 7.0, EventKind::Started);
    for at in [7.0, 10.0, 13.0] {
        story.settle(at);
    }
    assert_eq!((story.reasons('a'), story.counted("a")), (vec![Some(ExitReason::OomContainer)], (1, 1)));
}

#[test]
fn drifted_stamp_in_restart_loop_finds_the_run_by_the_time_of_reading() {
    let mut story = Story::new();
    for run in 0..3 {
        let at = f64::from(run) * 0.6;
        story.event('a', at + 0.1, EventKind::Started);
        story.event('a', at + 0.1, running(70 + run as u32));
        story.log_read(at + 0.45, at + 0.45, vec![]);
        if run < 2 {
            story.end('a', at + 0.5, Some(1));
        }
        story.settle(at + 0.5);
    }
    story.drift = -1.5; // the log's clock is behind: the stamp lies in the first run
    story.log_read(1.65, 1.66, record_of('a', 72));
    story.end('a', 1.7, KILLED);
    story.settle(1.7);
    let reasons = [ExitReason::Error, ExitReason::Error, ExitReason::OomContainer].map(Some);
    assert_eq!((story.reasons('a'), story.counted("a")), (reasons.to_vec(), (1, 0)));
}

/// The runtime does not report the first process of so short a run.
#[test]
fn stamp_just_before_the_next_start_is_of_the_run_that_sigkill_ended() {
    let mut story = Story::new();
    story.drift = 0.317;
    story.log_read(0.05, 0.05, vec![]);
    story.restart(0.05);
    story.event('a', 0.1, EventKind::Started);
    story.late_event('a', 0.27, 0.92, ended(KILLED));
    story.late_event('a', 0.605, 0.92, EventKind::Started);
    story.log_read(0.27, 0.92, record_of('a', 71)); // the stamp is 0.587
    for at in [0.92, 4.0, 7.0, 13.0] {
        story.settle(at);
    }
    assert_eq!((story.reasons('a'), story.counted("a")), (vec![Some(ExitReason::OomContainer)], (1, 0)));
}

#[test]
fn container_known_only_by_its_kill_is_shown_for_the_configured_time() {
    let mut story = Story::new();
    story.log(30.0, record_of('a', 71));
    for at in [30.0, 34.5, 40.0, 61.0] {
        story.settle(at);
    }
    assert_eq!(story.shown(62.0), ["aaaaaaaaaaaa"]);
}

#[test]
fn cgroup_that_outlives_its_container_does_not_reopen_the_run() {
    let mut story = Story::new();
    let runtimes = DOCKER_UP;
    story.event('a', 0.1, EventKind::Started);
    story.end('a', 1.0, Some(0));
    for at in [1.5, 8.0, 12.0, 20.0] {
        story.cycle(at, &[('a', Some(0.1))], &runtimes);
        story.settle(at);
    }
    for at in [21.0, 40.0] {
        story.cycle(at, &[], &runtimes);
        story.settle(at);
    }
    assert_eq!(story.reasons('a'), [Some(ExitReason::Completed)]);
}

/// The runtime lists it no longer, so that it has neither a name nor a start.
#[test]
fn cgroup_that_outlives_the_report_of_an_end_is_no_run() {
    let mut story = Story::new();
    let nameless = |letter| id(letter).short().to_owned();
    story.cgroup_inode = Some(7);
    story.event('a', 0.1, EventKind::Started);
    story.cycle(0.5, &[('a', Some(0.1))], &DOCKER_UP);
    story.end('a', 1.0, Some(0));
    for at in [1.5, 8.0, 12.0, 20.0] {
        story.cycle_as(at, &[('a', None)], &DOCKER_UP, nameless);
        story.settle(at);
    }
    for at in [21.0, 40.0] {
        story.cycle(at, &[], &DOCKER_UP);
        story.settle(at);
    }
    assert_eq!(story.reasons('a'), [Some(ExitReason::Completed)]);
    assert_eq!(super::figures(&story.store.totals(), "a").restarts, 0);
}

/// A busy engine reports the start of the next run after its cgroup was listed for some seconds without a name.
#[test]
fn start_that_is_reported_after_its_cgroup_was_listed_is_one_run() {
    let mut story = Story::new();
    let nameless = |letter| id(letter).short().to_owned();
    story.event('a', 0.1, EventKind::Started);
    story.cgroup_inode = Some(7);
    story.cycle(0.5, &[('a', Some(0.1))], &DOCKER_UP);
    story.end('a', 1.0, Some(1));
    story.cgroup_inode = Some(8);
    for at in [5.0, 6.0] {
        story.cycle_as(at, &[('a', None)], &DOCKER_UP, nameless);
        story.settle(at);
    }
    story.late_event('a', 1.5, 6.5, EventKind::Started);
    story.cycle(7.0, &[('a', Some(1.5))], &DOCKER_UP);
    story.end('a', 8.0, Some(2));
    story.settle(20.0);
    assert_eq!(story.reasons('a'), [Some(ExitReason::Error); 2]);
    assert_eq!(super::figures(&story.store.totals(), "a").restarts, 1);
}

#[test]
fn assumed_exit_of_a_container_that_is_listed_again_is_not_counted_twice() {
    let mut story = Story::new();
    for (at, listed) in [(1.0, true), (2.0, false), (6.0, false), (20.0, true), (21.0, false), (25.0, false)]
    {
        let running: &[_] = if listed { &[('a', Some(0.1))] } else { &[] };
        story.cycle(at, running, &[]);
        story.settle(at);
    }
    story.settle(40.0);
    assert_eq!(story.reasons('a').len(), 1);
}

#[test]
fn assumed_exit_does_not_hide_the_one_that_the_runtime_reports_later() {
    let mut story = Story::new();
    let runtimes = DOCKER_UP;
    story.event('a', 0.1, EventKind::Started);
    for (at, listed) in [(1.0, true), (2.0, false), (20.0, false), (25.0, false), (40.0, true), (41.0, true)]
    {
        let running: &[_] = if listed { &[('a', Some(0.1))] } else { &[] };
        story.cycle(at, running, &runtimes);
        story.settle(at);
    }
    story.settle(55.0);
    assert_eq!(story.reasons('a'), [Some(ExitReason::Unknown)]);
    story.end('a', 60.0, Some(3));
    story.settle(80.0);
    assert_eq!(story.reasons('a'), [Some(ExitReason::Unknown), Some(ExitReason::Error)]);
    let numbers: Vec<_> = story.exits('a').iter().map(|exit| exit.subject.run_number).collect();
    assert_eq!(numbers[0], numbers[1], "both are of one run");
}

#[test]
fn run_whose_end_is_assumed_twice_has_one_exit() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    let gaps = [(1.0, true), (2.0, false), (25.0, false), (40.0, true), (50.0, false), (75.0, false)];
    for (at, listed) in gaps {
        let running: &[_] = if listed { &[('a', Some(0.1))] } else { &[] };
        story.cycle(at, running, &DOCKER_UP);
        story.settle(at);
    }
    story.settle(90.0);
    assert_eq!(story.reasons('a'), [Some(ExitReason::Unknown)]);
}

#[test]
fn assumed_exit_that_is_undecided_when_the_container_is_listed_again_is_withdrawn() {
    for is_reported in [true, false] {
        let mut story = Story::new();
        let runtimes = DOCKER_UP;
        story.event('a', 0.1, EventKind::Started);
        for (at, listed) in [(1.0, true), (2.0, false), (20.0, false), (31.0, true)] {
            let running: &[_] = if listed { &[('a', Some(0.1))] } else { &[] };
            story.cycle(at, running, &runtimes);
            story.settle(at);
        }
        assert!(story.exits('a').is_empty() && story.store.runs.is_empty(), "neither an exit nor a record");
        if is_reported {
            story.end('a', 60.0, Some(3));
        }
        for at in [60.0, 75.0, 80.0] {
            story.cycle(at, &[], &runtimes);
            story.settle(at);
        }
        let reason = if is_reported { ExitReason::Error } else { ExitReason::Unknown };
        assert_eq!(story.reasons('a'), [Some(reason)]);
    }
}

#[test]
fn exit_that_is_reported_in_the_step_that_reopens_its_run_is_one() {
    let mut story = Story::new();
    let runtimes = DOCKER_UP;
    story.event('a', 0.1, EventKind::Started);
    for (at, listed) in [(1.0, true), (2.0, false), (20.0, false)] {
        let running: &[_] = if listed { &[('a', Some(0.1))] } else { &[] };
        story.cycle(at, running, &runtimes);
        story.settle(at);
    }
    story.cycle(31.0, &[('a', Some(0.1))], &runtimes);
    story.end('a', 31.5, Some(3));
    for at in [31.6, 50.0] {
        story.settle(at);
    }
    assert_eq!(story.reasons('a'), [Some(ExitReason::Error)]);
}

#[test]
fn container_that_was_forgotten_gets_another_run_number() {
    let mut story = Story::new();
    for (began, ended) in [(0.1, 1.0), (90_000.0, 90_001.0)] {
        story.event('a', began, EventKind::Started);
        story.end('a', ended, Some(0));
        for at in [ended, ended + 20.0, ended + 80_000.0] {
            story.settle(at);
        }
        assert!(story.reconciler.containers.get(&id('a')).is_none(), "it is forgotten");
    }
    let numbers: Vec<_> = story.exits('a').iter().map(|exit| exit.subject.run_number.unwrap()).collect();
    assert!(numbers[0] < numbers[1], "{numbers:?}");
}

#[test]
fn run_of_an_earlier_boot_ends_by_the_restart_of_the_host() {
    // what the runtime reports after the reboot: its own exit code, or only the next start
    for report in [Some((101.0, ended(Some(255)))), Some((101.0, EventKind::Started)), None] {
        let mut story = Story::new();
        story.event('a', 0.1, EventKind::Started);
        story.settle(1.0);
        story.reboot(100.0);
        if let Some((at, what)) = report.clone() {
            story.event('a', at, what);
        }
        let listed: &[_] = if report.is_none() { &[('a', Some(102.0))] } else { &[] };
        story.cycle(103.0, listed, &DOCKER_UP);
        story.settle(104.0);
        assert_eq!(story.reasons('a'), [Some(ExitReason::HostRestart)], "{report:?}");
        let at = story.exits('a')[0].at - story.begin.unix_seconds();
        assert!((at - 100.0).abs() < 1e-3, "it ended when the host did: {at}");
    }
}

#[test]
fn container_whose_start_no_list_has_gets_another_run_after_a_reboot() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.settle(1.0);
    story.reboot(100.0);
    story.event('a', 101.0, ended(Some(255)));
    for at in [103.0, 104.0, 120.0] {
        story.cycle(at, &[('a', None)], &DOCKER_UP);
        story.settle(at);
    }
    assert_eq!(story.reasons('a'), [Some(ExitReason::HostRestart)]);
    assert!(story.reconciler.containers.get(&id('a')).unwrap().is_running());
    story.end('a', 130.0, Some(3));
    story.settle(150.0);
    assert_eq!(story.reasons('a'), [Some(ExitReason::HostRestart), Some(ExitReason::Error)]);
}

#[test]
fn exit_before_the_reboot_keeps_its_own_reason() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.settle(1.0);
    story.reboot(100.0);
    story.late_event('a', 50.0, 101.0, ended(Some(1)));
    story.settle(101.0);
    assert_eq!(story.reasons('a'), [Some(ExitReason::Error)]);
}

#[test]
fn ignored_stop_request_does_not_explain_a_crash_minutes_later() {
    for (code, reason) in [(139, ExitReason::Signal), (1, ExitReason::Error), (130, ExitReason::Stopped)] {
        let mut story = Story::new();
        story.event('a', 0.1, EventKind::Started);
        story.event('a', 1.0, stop_request(2));
        story.end('a', 541.0, Some(code));
        for at in [541.0, 545.0] {
            story.settle(at);
        }
        assert_eq!(story.reasons('a'), [Some(reason)]);
    }
}

#[test]
fn slow_stop_that_the_runtime_confirms_is_stopped() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.event('a', 1.0, stop_request(15)); // docker stop --time 900
    story.end('a', 541.0, Some(0));
    story.event('a', 541.1, EventKind::SignalRequested { signal: None });
    for at in [541.2, 545.0] {
        story.settle(at);
    }
    assert_eq!(story.reasons('a'), [Some(ExitReason::Stopped)]);
}

// ---- records of runs

/// Sets the sample of the next cycles.
fn hold(story: &mut Story, bytes: u64) {
    let sample = UsageSample {
        unreclaimable_bytes: Some(bytes),
        limit_bytes: Some(1000),
        effective_limit_bytes: Some(900),
        ..UsageSample::default()
    };
    story.usage = ContainerUsage {
        sample: Some(sample),
        peak_unreclaimable_bytes: Some(bytes),
        ..ContainerUsage::default()
    };
}

#[test]
fn crash_loses_at_most_a_minute_of_a_record() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    let mut stored_after = |at: f64, bytes: u64| {
        hold(&mut story, bytes);
        story.cycle(at, &[('a', Some(0.1))], &DOCKER_UP);
        story.settle(at);
        let run = story.stored_record('a');
        (run.samples, run.unreclaimable_peak_bytes)
    };
    assert_eq!(stored_after(1.0, 100), (1, Some(100)), "the first sample at once");
    for at in [2.0, 30.0, 60.0] {
        assert_eq!(stored_after(at, 100 + at as u64), (1, Some(100)), "at {at}");
    }
    assert_eq!(stored_after(61.1, 200), (5, Some(200)), "all that was sampled meanwhile");
    assert_eq!(stored_after(90.0, 300), (5, Some(200)));
    assert_eq!(stored_after(121.2, 250), (7, Some(300)));
    // memledger is killed and started again: the run goes on from there
    story.restart(125.0);
    hold(&mut story, 150);
    story.cycle(126.0, &[('a', Some(0.1))], &DOCKER_UP);
    story.end('a', 130.0, Some(0));
    story.settle(130.0);
    let run = story.run_record();
    assert_eq!((run.samples, run.unreclaimable_peak_bytes), (8, Some(300)));
}

#[test]
fn record_has_the_limit_that_was_hit_and_the_memory_of_the_host() {
    let above = "/kubepods/pod7";
    for (context, position) in [(path('a'), LimitPosition::Own), (above.to_owned(), LimitPosition::Above)] {
        let mut story = Story::new();
        story.host_memory = Some((8000, 5000));
        story.event('a', 0.1, EventKind::Started);
        story.event('a', 0.1, running(70));
        hold(&mut story, 700);
        story.cycle(1.0, &[('a', Some(0.1))], &DOCKER_UP);
        let context =
            OomContext { oom_cgroup: Some(context), task_cgroups: vec![path('a')], ..OomContext::default() };
        let lines = vec![
            (Line::Context(context), ProcInfo::default()),
            (Line::Killed(killed(70)), ProcInfo::default()),
        ];
        story.log(2.0, lines);
        story.end('a', 2.1, KILLED);
        for at in [2.2, 9.0] {
            story.settle(at);
        }
        let run = story.run_record();
        assert_eq!(run.exit_reason, Some(ExitReason::OomContainer));
        let own = Some(1000).filter(|_| position == LimitPosition::Own);
        assert_eq!(run.oom_limit, Some(HitLimit { position, bytes: own }));
        assert_eq!((run.limit_bytes, run.host_total_bytes), (Some(900), Some(8000)));
        assert_eq!(run.host_others_peak_bytes, Some(2300), "in use, and not by this run");
    }
}
