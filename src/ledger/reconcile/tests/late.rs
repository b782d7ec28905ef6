//! Scenarios of what the ledger reads late: after it waited for its disk, was stopped, or the host was restarted.

use super::runs::{ended, record_of};
use super::story::{DOCKER_UP, KILLED, Story, id, running, stop_request};
use crate::attribute::Role;
use crate::collect::process::ResidentMemory;
use crate::discover::EventKind;
use crate::events::{ExitReason, Kill, KillOwner, PriorUsage, UsageSample};
use crate::ledger::interval::Interval;
use crate::ledger::reconcile::ProcInfo;
use crate::ledger::sources::kernel_log::LogPosition;
use crate::ledger::totals::Total;
use crate::runs::usage::{ContainerUsage, ProcessUsage};

/// The ledger waited for its disk from 0.1 to 4.1.
#[test]
fn cycles_and_events_that_wait_for_the_ledger_are_those_of_their_time() {
    let mut story = Story::new();
    let report = |story: &mut Story, at: f64, process: Option<u32>| {
        let sample =
            UsageSample { at: story.at(at).unix_seconds(), usage_bytes: 64, ..UsageSample::default() };
        let process = process.map(|pid| ProcessUsage {
            pid,
            ppid: 70,
            comm: "python".into(),
            role: Role::DataloaderWorker,
            python: true,
            memory: ResidentMemory { rss_bytes: 1, anon_bytes: 1 },
            pss_bytes: None,
            program: None,
        });
        story.usage = ContainerUsage {
            sample: Some(sample),
            processes: process.into_iter().collect(),
            ..ContainerUsage::default()
        };
        let running: &[_] = if at < 4.0 { &[('a', Some(0.1))] } else { &[] };
        story.report(at, running, &DOCKER_UP, |letter| letter.to_string())
    };
    story.event('a', 0.1, EventKind::Started);
    let reports =
        [(1.0, Some(71)), (2.0, None), (3.0, None), (4.0, None)].map(|(at, pid)| report(&mut story, at, pid));
    let events = vec![story.runtime_event('a', 3.5, ended(Some(1)))];
    story.reconciler.apply_cycles_and_events(story.at(4.1), &reports, &[events]);
    story.log_read(1.5, 4.1, record_of('a', 71));
    for at in [4.1, 8.0] {
        story.settle(at);
    }
    let begin = story.at(0.0).unix_seconds();
    let times = |before: &PriorUsage| -> Vec<f64> {
        before.samples.iter().map(|sample| (sample.at - begin).round()).collect()
    };
    let kill = story.last_kill();
    let before = kill.before.as_ref().unwrap();
    assert_eq!((story.owner().as_deref(), kill.role), (Some("a"), Some(Role::DataloaderWorker)));
    assert_eq!((times(before), before.roles.len()), (vec![1.0], 1), "not what it held after the kill");
    let exit = story.exits('a')[0];
    assert_eq!(
        (exit.reason, times(exit.before.as_ref().unwrap())),
        (Some(ExitReason::Error), vec![1.0, 3.0])
    );
    assert_eq!(story.run_record().samples, 3);
}

/// A container that no runtime reports ends when it is not listed any more, and not when the ledger reads that.
#[test]
fn end_that_is_read_late_is_that_of_the_first_cycle_without_the_container() {
    let mut story = Story::new();
    story.cycle(1.0, &[('a', Some(0.1))], &[]);
    story.cycle(2.0, &[('a', Some(0.1))], &[]);
    let reports = [3.0, 4.0, 5.0, 6.0].map(|at| story.report(at, &[], &[], |letter| letter.to_string()));
    story.reconciler.apply_cycles_and_events(story.at(8.0), &reports, &[]);
    for at in [8.0, 9.0, 20.0] {
        story.cycle(at, &[], &[]);
        story.settle(at);
    }
    let ended = story.exits('a')[0].at - story.at(0.0).unix_seconds();
    assert_eq!(ended.round(), 3.0);
}

#[test]
fn container_that_one_of_the_waiting_cycles_does_not_list_goes_on() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    let lists: [&[_]; 3] = [&[], &[], &[('a', Some(0.1))]];
    let report = |(second, list)| story.report(second, list, &DOCKER_UP, |letter| letter.to_string());
    let reports: Vec<_> = std::iter::zip([1.0, 2.0, 3.0], lists).map(report).collect();
    story.reconciler.apply_cycles_and_events(story.at(20.0), &reports, &[]);
    story.end('a', 21.0, Some(0));
    for at in [20.0, 21.0, 30.0] {
        story.settle(at);
    }
    assert_eq!(story.reasons('a'), [Some(ExitReason::Completed)]);
}

#[test]
fn run_of_this_boot_does_not_end_with_the_host_if_the_accounting_is_lost() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.settle(1.0);
    story.store.contents.accounting = None;
    story.restart(2.0);
    story.cycle(3.0, &[('a', Some(0.1))], &DOCKER_UP);
    story.end('a', 4.0, Some(0));
    story.settle(5.0);
    assert_eq!(story.reasons('a'), [Some(ExitReason::Completed)]);
}

#[test]
fn pid_of_a_first_process_before_a_reboot_owns_no_kill_after_it() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.event('a', 0.1, running(70));
    story.settle(1.0);
    story.reboot(100.0);
    story.kill(105.0, 70, None, ProcInfo::default());
    for at in [105.0, 111.0, 120.0] {
        story.settle(at);
    }
    assert_eq!((story.owner(), story.counted("a")), (None, (0, 0)));
}

#[test]
fn runs_before_the_newest_cycle_are_known_although_both_are_read_at_once() {
    let mut story = Story::new();
    let begin = |run: u32| 1.0 + f64::from(run) * 0.7;
    let cycle = story.report(6.0, &[('a', Some(begin(6)))], &DOCKER_UP, |letter| letter.to_string());
    let mut events = Vec::new();
    for run in 0..7 {
        events.push(story.runtime_event('a', begin(run), EventKind::Started));
        events.extend((run < 6).then(|| story.runtime_event('a', begin(run) + 0.6, ended(Some(1)))));
    }
    story.reconciler.apply_cycles_and_events(story.at(6.1), [&cycle], &[events]);
    for at in [6.1, 10.0] {
        story.settle(at);
    }
    assert_eq!(story.reasons('a'), vec![Some(ExitReason::Error); 6]);
}

#[test]
fn repeated_start_of_the_run_before_is_not_that_of_a_quick_restart() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.event('a', 0.1, running(70));
    story.end('a', 0.6, Some(1));
    story.event('a', 0.8, EventKind::Started);
    story.settle(0.9);
    story.restart(1.0);
    story.late_event('a', 0.1, 1.0, EventKind::Started);
    story.late_event('a', 0.1, 1.0, running(70));
    story.late_event('a', 0.8, 1.0, running(71));
    story.kill_in('a', 1.5, 71);
    story.settle(1.5);
    story.end('a', 1.6, KILLED);
    for at in [1.7, 8.0] {
        story.settle(at);
    }
    assert_eq!(story.reasons('a'), [Some(ExitReason::Error), Some(ExitReason::OomContainer)]);
    assert_eq!(story.counted("a"), (1, 0));
}

#[test]
fn unattributed_kill_before_a_restart_may_explain_an_exit_that_is_reported_after_it() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.kill(100.0, 1, None, ProcInfo::default());
    for at in [100.0, 105.0, 111.0] {
        story.settle(at);
    }
    assert_eq!(story.last_kill().owner, KillOwner::Unattributed);
    story.restart(112.0);
    story.late_event('a', 100.1, 112.5, ended(KILLED));
    for at in [112.5, 116.0, 123.0] {
        story.settle(at);
    }
    assert_eq!(story.reasons('a'), [Some(ExitReason::Unknown)]);
}

#[test]
fn each_run_of_a_restart_loop_while_down_has_its_own_kill_and_reason() {
    let mut story = Story::new();
    story.log_read(0.5, 0.5, vec![]);
    story.settle(0.5);
    let runs = 40;
    let begin = |run: u32| 1.0 + f64::from(run) * 0.7;
    for run in 0..runs {
        story.late_event('a', begin(run), 60.0, EventKind::Started);
        if run % 10 == 9 {
            story.late_event('a', begin(run) + 0.5, 60.0, stop_request(9));
        }
        let code = if run % 10 == 8 { Some(1) } else { KILLED };
        story.late_event('a', begin(run) + 0.6, 60.0, ended(code));
    }
    let killed = (0..runs).filter(|run| run % 10 < 8);
    let records = killed.map(|run| (begin(run) + 0.55, record_of('a', 100 + run))).collect();
    story.log_read_together(60.0, records);
    for at in [60.0, 61.0, 66.0, 80.0, 90.0] {
        story.settle(at);
    }
    let reason = |run: u32| match run % 10 {
        8 => ExitReason::Error,
        9 => ExitReason::Stopped,
        _ => ExitReason::OomContainer,
    };
    assert_eq!(story.reasons('a'), (0..runs).map(|run| Some(reason(run))).collect::<Vec<_>>());
    assert_eq!(story.counted("a"), (32, 0));
    let known = story.store.contents.containers.get(&id('a')).expect("the container");
    assert_eq!(known.runs.all().count(), 5, "the older ones are dropped");
    let at = story.at(begin(3) + 0.55).unix_seconds();
    let run = known.run_of_kill(&Interval::at(at), at, None, |_| false);
    assert!(run.is_none(), "a kill of a dropped run is of none of the others");
}

/// A container is killed while memledger is down; the kernel log is overwritten. Returns the scenario with the exit
/// and the kernel's counter applied.
fn killed_while_down(oom_flag: Option<bool>) -> Story {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.log_read(0.5, 0.5, vec![]);
    story.reconciler.apply_vmstat(story.at(0.5), 7);
    story.settle(0.5);
    story.restart(1_000.0);
    story.late_event('a', 500.0, 1_000.0, EventKind::Ended { exit_code: KILLED, oom_flag });
    for step in 0..80 {
        let at = 1_000.0 + f64::from(step) * 0.2;
        story.log_read(at, at, vec![]);
        story.reconciler.apply_vmstat(story.at(at), 8);
        story.settle(at);
    }
    story
}

#[test]
fn exit_that_a_lost_record_may_explain_is_unknown() {
    let story = killed_while_down(None);
    assert_eq!(story.last_kill().owner, KillOwner::Unattributed);
    assert_eq!(story.reasons('a'), [Some(ExitReason::Unknown)]);
}

#[test]
fn lost_record_is_attributed_to_the_exit_that_the_runtime_calls_an_oom() {
    let story = killed_while_down(Some(true));
    assert_eq!(story.owner().as_deref(), Some("a"));
    assert_eq!(story.reasons('a'), [Some(ExitReason::OomContainer)]);
}

#[test]
fn late_record_fills_the_oldest_gap_of_its_owner() {
    let mut story = Story::new();
    for letter in ['a', 'b'] {
        story.event(letter, 0.1, EventKind::Started);
    }
    story.reconciler.apply_log(story.at(0.5), None, LogPosition::default());
    story.reconciler.apply_vmstat(story.at(0.5), 7);
    story.reconciler.apply_log(story.at(1.0), None, LogPosition::default());
    story.counters(1.0, &[('a', 1), ('b', 0)]);
    story.reconciler.apply_vmstat(story.at(1.0), 8);
    story.settle(1.0);
    assert_eq!(story.owner().as_deref(), Some("a"));
    // the log is back: the record of the gap, and a new kill
    story.log_read(0.9, 1.4, record_of('a', 1));
    story.log_read(1.3, 1.4, record_of('b', 2));
    story.reconciler.apply_vmstat(story.at(1.4), 9);
    for at in [1.4, 9.0] {
        story.settle(at);
    }
    let found: Vec<_> = story.store.kills().map(|kill| (kill.pid, kill.owner.clone())).collect();
    assert_eq!(found.len(), 2);
    for (pid, owner) in found {
        let KillOwner::Container(subject) = owner else { panic!("{owner:?}") };
        let owner = if pid == Some(1) { 'a' } else { 'b' };
        assert_eq!(*subject.container_id, *id(owner).as_str());
    }
}

#[test]
fn exit_of_the_next_run_is_no_evidence_of_a_kill_before_its_start() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    // two kills, of which one ended the first run; the second run ended soon after
    story.kill(2.00, 1, None, ProcInfo::default());
    story.kill(2.01, 2, None, ProcInfo::default());
    for (started, at) in [(0.1, 2.05), (3.0, 3.2)] {
        story.event('a', started, EventKind::Started);
        story.event('a', at, EventKind::Oom);
        story.event('a', at, ended(KILLED));
    }
    for at in [3.5, 6.0, 13.0] {
        story.settle(at);
    }
    let owners: Vec<_> = story.store.kills().map(|kill| kill.owner.clone()).collect();
    assert_eq!(owners, [KillOwner::Unattributed, KillOwner::Unattributed], "one of them is another's");
}

/// Returns the number of kills while memledger was down that only the kernel's counter shows, and the story a minute later.
fn many_gaps() -> (u64, Story) {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.log_read(0.5, 0.5, vec![]);
    story.reconciler.apply_vmstat(story.at(0.5), 7);
    story.settle(0.5);
    story.restart(86_400.0);
    let kills = 100_000;
    for step in 0..120 {
        let at = 86_400.0 + f64::from(step) * 0.5;
        story.log_read(at, at, vec![]);
        story.reconciler.apply_vmstat(story.at(at), 7 + kills);
        story.settle(at);
    }
    (kills, story)
}

#[test]
fn kills_beyond_thousands_without_record_are_counted_without_events() {
    let (kills, story) = many_gaps();
    for total in [Total::Host, Total::WithoutRecord, Total::Unattributed] {
        assert_eq!(story.store.total(total), kills, "{total:?}");
    }
    assert_eq!(story.store.kills().count(), 4_096);
    let texts: Vec<_> =
        story.store.kills().flat_map(|kill| &kill.evidence).map(|it| it.text.clone()).collect();
    assert!(
        texts.contains(&"95904 more kills without a record until then have no event of their own".to_owned())
    );
}

#[test]
fn oom_event_hours_before_the_exit_is_no_evidence() {
    // `docker kill` by another process sets no request, and Docker's flag stays set after the event
    for flag in [None, Some(true)] {
        let mut story = Story::new();
        story.event('a', 0.1, EventKind::Started);
        story.event('a', 1.0, EventKind::Oom);
        story.kill(7_200.0, 1, None, ProcInfo::default());
        story.event('a', 7_200.5, EventKind::Ended { exit_code: KILLED, oom_flag: flag });
        for at in [7_201.0, 7_204.0, 7_212.0, 7_216.0] {
            story.settle(at);
        }
        assert_eq!(story.last_kill().owner, KillOwner::Unattributed);
        assert_eq!(story.reasons('a'), [Some(ExitReason::Unknown)], "{flag:?}");
    }
}

#[test]
fn oom_event_is_no_evidence_of_a_later_kill() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.event('a', 2.0, EventKind::Oom);
    story.log(2.9, vec![]);
    story.kill(3.0, 1, None, ProcInfo::default());
    story.end('a', 4.0, KILLED);
    for at in [4.5, 7.0, 12.0, 15.0] {
        story.settle(at);
    }
    assert_eq!(story.last_kill().owner, KillOwner::Unattributed);
}

/// The event belongs to the run before: dockerd reported the end of that first.
#[test]
fn oom_event_between_two_runs_is_no_evidence_for_the_next_one() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.log(1.9, vec![]);
    story.kill(2.0, 1, None, ProcInfo::default());
    story.end('a', 2.05, KILLED);
    story.event('a', 2.1, EventKind::Oom);
    story.log(2.35, vec![]);
    story.kill(2.45, 2, None, ProcInfo::default()); // another container's
    story.event('a', 2.5, EventKind::Started);
    story.end('a', 4.05, KILLED);
    for at in [4.5, 7.0, 12.0, 15.0, 20.0] {
        story.settle(at);
    }
    let is_of_container = |kill: &Kill| matches!(kill.owner, KillOwner::Container(_));
    assert_eq!(story.store.kills().map(is_of_container).collect::<Vec<_>>(), [true, false]);
}

/// A busy runtime handles an exit late, and reports it with that time.
#[test]
fn kill_that_left_no_process_ended_the_container_however_late_its_exit_is_reported() {
    let running: &[_] = &[('a', Some(0.1))];
    // the last one's processes are hidden from the cycles
    for (alive_until, expected) in [(1.0, (1, 0)), (8.0, (0, 1)), (0.0, (0, 1))] {
        let mut story = Story::new();
        story.event('a', 0.1, EventKind::Started);
        for (second, log) in [(1.0, false), (2.0, true), (8.0, false), (12.0, false)] {
            let process = ProcessUsage {
                pid: 70,
                ppid: 1,
                comm: "train".into(),
                role: Role::Other,
                python: false,
                memory: ResidentMemory { rss_bytes: 1, anon_bytes: 1 },
                pss_bytes: None,
                program: None,
            };
            story.usage.processes = if second <= alive_until { vec![process] } else { vec![] };
            story.usage.has_all_processes = alive_until > 0.0;
            if log {
                story.kill_in('a', 1.5, 71);
            }
            story.cycle(second, running, &DOCKER_UP);
            story.settle(second);
        }
        story.late_event('a', 14.0, 14.5, ended(KILLED));
        for at in [14.5, 18.0, 24.0] {
            story.settle(at);
        }
        let reason = if expected == (1, 0) { ExitReason::OomContainer } else { ExitReason::Error };
        assert_eq!((story.counted("a"), story.reasons('a')), (expected, vec![Some(reason)]), "{alive_until}");
    }
}

/// It was killed before the runtime said which container this is, so that no cycle listed it.
#[test]
fn kill_ended_a_container_that_no_cycle_saw_and_whose_exit_is_reported_late() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.kill_in('a', 0.5, 71);
    for second in [1.0, 2.0, 6.0, 8.0] {
        story.cycle(second, &[], &DOCKER_UP);
        story.settle(second);
    }
    story.late_event('a', 8.5, 8.6, ended(KILLED));
    for at in [8.6, 12.0, 20.0] {
        story.settle(at);
    }
    assert_eq!((story.counted("a"), story.reasons('a')), ((1, 0), vec![Some(ExitReason::OomContainer)]));
}

/// Docker reports what ended while it was halted, or while its containerd was away, with the time at which it resumes.
#[test]
fn end_that_is_reported_long_after_the_last_process_has_the_time_of_that() {
    let process = ProcessUsage {
        pid: 70,
        ppid: 1,
        comm: "train".into(),
        role: Role::Other,
        python: false,
        memory: ResidentMemory { rss_bytes: 1, anon_bytes: 1 },
        pss_bytes: None,
        program: None,
    };
    // with a code of its own; with a doubted one, also when it is repeated; and where cycles never saw a process
    for (code, has_processes, reason, ended_at) in [
        (Some(3), true, ExitReason::Error, 6.0),
        (Some(0), true, ExitReason::Unknown, 6.0),
        (Some(0), false, ExitReason::Completed, 80.0),
    ] {
        let mut story = Story::new();
        story.event('a', 0.1, EventKind::Started);
        story.usage.has_all_processes = true;
        for second in [5.0, 6.0, 40.0, 79.0] {
            let is_alive = second < 6.0 && has_processes;
            story.usage.processes = if is_alive { vec![process.clone()] } else { vec![] };
            story.cycle(second, &[('a', Some(0.1))], &DOCKER_UP);
            story.settle(second);
        }
        for _ in 0..2 {
            story.event('a', 80.0, ended(code));
        }
        for at in [80.0, 84.0, 96.0] {
            story.settle(at);
        }
        let exit = story.exits('a').remove(0);
        assert_eq!((exit.reason, exit.at), (Some(reason), story.at(ended_at).unix_seconds()));
    }
}
