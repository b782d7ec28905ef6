//! Scenarios at the rim of the ledger: slow teardowns, several sockets, what is outside containers, wrong clocks, nameless containers.

use super::story::{DOCKER_UP, KILLED, Story, id, killed, path, running, stop_request};
use crate::attribute::Role;
use crate::collect::process::ResidentMemory;
use crate::discover::{EventKind, RuntimeEvent, RuntimeKind};
use crate::events::{ExitReason, KillOwner, LedgerEvent, UsageSample, Victim};
use crate::ledger::reconcile::ProcInfo;
use crate::ledger::totals::Total;
use crate::parse::kernel_log::{Killed, Line, OomContext};
use crate::runs::usage::{ContainerUsage, ProcessUsage};

fn process(pid: u32, ppid: u32, python: bool) -> ProcessUsage {
    ProcessUsage {
        pid,
        ppid,
        comm: if python { "python" } else { "sh" }.into(),
        role: Role::Trainer,
        python,
        memory: ResidentMemory { rss_bytes: 1, anon_bytes: 1 },
        pss_bytes: None,
        program: None,
    }
}

fn with_processes(processes: Vec<ProcessUsage>) -> ContainerUsage {
    ContainerUsage { processes, has_all_processes: true, ..ContainerUsage::default() }
}

/// A trainer behind a shell, which takes so many seconds until it is gone; the shell exits 0.2 s after it.
fn teardown(seconds: f64) -> Story {
    let (mut story, docker) = (killed_child(), DOCKER_UP);
    let gone = 1.0 + seconds;
    let mut at = 1.1;
    while at < gone {
        story.cycle(at, &[('a', Some(0.1))], &docker);
        story.settle(at);
        at += 1.0;
    }
    story.usage = with_processes(vec![process(70, 1, false)]);
    story.cycle(gone, &[('a', Some(0.1))], &docker);
    story.settle(gone);
    story.end('a', gone + 0.2, KILLED);
    story.cycle(gone + 1.0, &[], &docker);
    for after in [1.0, 5.0, 20.0] {
        story.settle(gone + after);
    }
    story
}

#[test]
fn trainer_that_takes_seconds_to_be_gone_ended_its_container() {
    for seconds in [0.5, 4.0, 8.0, 40.0] {
        let story = teardown(seconds);
        assert_eq!(story.last_kill().victim, Some(Victim::Main), "{seconds}");
        assert_eq!(story.reasons('a'), [Some(ExitReason::OomContainer)], "{seconds}");
        assert_eq!(story.exits('a')[0].ended_by, Some(story.last_kill().id));
        assert_eq!(story.counted("a"), (1, 0));
    }
}

/// A shell with a child that is killed one second after the begin.
fn killed_child() -> Story {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.late_event('a', 0.1, 0.1, running(70));
    story.usage = with_processes(vec![process(70, 1, false), process(71, 70, true)]);
    story.cycle(0.9, &[('a', Some(0.1))], &DOCKER_UP);
    story.kill_in('a', 1.0, 71);
    story
}

#[test]
fn child_whose_container_runs_on_is_settled_once_it_is_gone() {
    let mut story = killed_child();
    for at in [1.1, 6.0, 9.0] {
        story.cycle(at, &[('a', Some(0.1))], &DOCKER_UP);
        story.settle(at);
    }
    assert_eq!(story.last_kill().victim, None, "it is still there");
    story.usage = with_processes(vec![process(70, 1, false)]);
    story.cycle(10.0, &[('a', Some(0.1))], &DOCKER_UP);
    story.settle(13.0);
    assert_eq!(story.last_kill().victim, None, "its shell may still exit");
    story.settle(15.1);
    assert_eq!(story.last_kill().victim, Some(Victim::Child));
}

#[test]
fn events_of_one_socket_do_not_hide_older_ones_of_another() {
    let mut story = Story::new();
    story.settle(0.5);
    story.restart(50.0);
    let of = |story: &Story, socket: &str, letter, at, what| {
        let event = story.runtime_event(letter, at, what);
        RuntimeEvent { socket: socket.into(), ..event }
    };
    let first = [of(&story, "/one.sock", 'a', 45.0, EventKind::Started)];
    let second = [
        of(&story, "/two.sock", 'b', 10.0, EventKind::Started),
        of(&story, "/two.sock", 'b', 20.0, stop_request(15)),
        of(&story, "/two.sock", 'b', 21.0, EventKind::Ended { exit_code: Some(143), oom_flag: None }),
    ];
    let now = story.at(50.1);
    story.reconciler.apply_runtime_events(now, &first);
    story.reconciler.apply_runtime_events(now, &second);
    story.settle(50.1);
    story.settle(60.0);
    assert_eq!(story.reasons('b'), [Some(ExitReason::Stopped)]);
    assert_eq!(story.exits('b')[0].duration_seconds, Some(11.0), "its start is known");
    let begin = story.begin.unix_seconds();
    let cursor =
        |socket| story.reconciler.runtime_cursor(RuntimeKind::Docker, socket).map(|at| (at - begin).round());
    assert_eq!((cursor("/one.sock"), cursor("/two.sock")), (Some(45.0), Some(20.0)));
}

#[test]
fn events_that_a_runtime_repeats_of_a_forgotten_container_count_once() {
    let mut story = Story::new();
    let (docker, hours) = (DOCKER_UP, 4.0 * 3_600.0);
    story.event('a', 0.1, EventKind::Started);
    story.cycle(0.9, &[('a', Some(0.1))], &docker);
    story.end('a', 5.0, Some(1));
    for at in [5.0, 9.0, hours] {
        story.cycle(at, &[], &docker);
        story.settle(at);
    }
    assert!(story.reconciler.containers.get(&id('a')).is_none(), "it is forgotten");
    story.restart(hours + 10.0);
    let since = story.reconciler.runtime_cursor(RuntimeKind::Docker, "").expect("a cursor");
    assert!(since > story.begin.unix_seconds() + hours - 100.0, "they are not requested");
    story.late_event('a', 0.1, hours + 11.0, EventKind::Started);
    story.settle(hours + 11.0);
    assert_eq!((story.exits('a').len(), super::figures(&story.store.totals(), "a").restarts), (1, 0));
}

#[test]
fn exit_shows_whether_a_stop_request_would_be_known() {
    for (runtime, connected, is_known) in [
        (RuntimeKind::Docker, true, true),
        (RuntimeKind::Docker, false, false),
        (RuntimeKind::Podman, true, false),
        (RuntimeKind::Cri, true, false),
    ] {
        let mut story = Story::new();
        let event = |story: &Story, at, what| RuntimeEvent { runtime, ..story.runtime_event('a', at, what) };
        let started = event(&story, 0.1, EventKind::Started);
        story.reconciler.apply_runtime_events(story.at(0.1), &[started]);
        story.cycle(0.9, &[('a', Some(0.1))], &[(runtime, connected)]);
        let ended = event(&story, 2.0, EventKind::Ended { exit_code: Some(143), oom_flag: None });
        story.reconciler.apply_runtime_events(story.at(2.0), &[ended]);
        story.settle(2.0);
        story.settle(9.0);
        assert_eq!(story.exits('a')[0].requests_known, is_known, "{runtime} {connected}");
    }
}

#[test]
fn request_may_be_unknown_if_the_runtime_was_connected_again_after_the_exit() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.cycle(0.9, &[('a', Some(0.1))], &DOCKER_UP);
    story.cycle(4.9, &[], &DOCKER_UP);
    // between two cycles
    story.reconciler.set_connection(
        RuntimeKind::Docker,
        Some(story.begin.unix_seconds() + 4.5),
        std::iter::empty(),
    );
    story.late_event('a', 2.0, 5.0, EventKind::Ended { exit_code: Some(143), oom_flag: None });
    story.settle(5.0);
    story.settle(20.0);
    assert_eq!(
        (story.reasons('a'), story.exits('a')[0].requests_known),
        (vec![Some(ExitReason::Signal)], false)
    );
}

fn global_kill(story: &mut Story, at: f64, cgroup: &str, pid: u32) {
    let context = OomContext { global: true, task_cgroups: vec![cgroup.to_owned()], ..OomContext::default() };
    let killed = Killed { global: Some(true), ..killed(pid) };
    let lines =
        vec![(Line::Context(context), ProcInfo::default()), (Line::Killed(killed), ProcInfo::default())];
    story.log(at, lines);
}

#[test]
fn kill_of_the_host_has_its_holders_with_what_is_outside_containers_from_before_it() {
    for (cgroup, of_container) in [("/system.slice/sshd.service".to_owned(), false), (path('a'), true)] {
        let mut story = Story::new();
        story.event('a', 0.1, EventKind::Started);
        let cycle = |story: &mut Story, at: f64, unreclaimable: u64, available: u64| {
            let at_unix = story.at(at).unix_seconds();
            let sample = UsageSample {
                at: at_unix,
                unreclaimable_bytes: Some(unreclaimable),
                ..UsageSample::default()
            };
            story.host_memory = Some((512, available));
            story.usage = ContainerUsage { sample: Some(sample), ..ContainerUsage::default() };
            story.cycle(at, &[('a', Some(0.1))], &DOCKER_UP);
        };
        cycle(&mut story, 0.9, 30, 2);
        // after the kill, and applied before its record
        cycle(&mut story, 1.9, 20, 480);
        let context = OomContext { global: true, task_cgroups: vec![cgroup], ..OomContext::default() };
        let killed = Killed { global: Some(true), ..killed(90) };
        let lines =
            vec![(Line::Context(context), ProcInfo::default()), (Line::Killed(killed), ProcInfo::default())];
        story.log_read(1.2, 2.0, lines);
        story.settle(2.0);
        story.settle(9.0);
        assert_eq!(matches!(story.last_kill().owner, KillOwner::Container(_)), of_container);
        let before = story.last_kill().before.clone().expect("it has the holders");
        let holders: Vec<_> =
            before.holders.iter().map(|holder| (&*holder.name, holder.unreclaimable_bytes)).collect();
        assert_eq!(holders, [("outside containers", 480), ("a", 30)]);
        assert_eq!((before.host_total_bytes, before.host_available_bytes), (Some(512), Some(2)));
    }
}

#[test]
fn container_inside_another_one_is_no_holder_of_its_own() {
    let mut story = Story::new();
    story.host_memory = Some((100, 10));
    let sample =
        UsageSample { at: story.at(0.9).unix_seconds(), unreclaimable_bytes: Some(40), ..Default::default() };
    story.usage = ContainerUsage { sample: Some(sample), ..ContainerUsage::default() };
    story.event('a', 0.1, EventKind::Started);
    story.event('b', 0.1, EventKind::Started);
    story.cycle(0.9, &[('a', Some(0.1)), ('b', Some(0.1))], &DOCKER_UP);
    story.reconciler.containers.modify(&id('a')).cgroup = Some("docker/a".into());
    story.reconciler.containers.modify(&id('b')).cgroup = Some("docker/a/docker/b".into());
    global_kill(&mut story, 1.0, "/init.scope", 3);
    story.settle(1.0);
    let before = story.last_kill().before.clone().expect("holders");
    let names: Vec<_> =
        before.holders.iter().map(|holder| (&*holder.name, holder.unreclaimable_bytes)).collect();
    assert_eq!(names, [("outside containers", 50), ("a", 40)]);
}

#[test]
fn peaks_of_an_exit_are_those_of_the_whole_run_also_after_a_restart() {
    let mut story = Story::new();
    let usage = |at: f64, peak: u64| ContainerUsage {
        sample: Some(UsageSample { at, usage_bytes: 10, ..UsageSample::default() }),
        peak_usage_bytes: Some(peak),
        peak_unreclaimable_bytes: Some(peak - 1),
        ..ContainerUsage::default()
    };
    story.event('a', 0.1, EventKind::Started);
    story.usage = usage(story.at(1.0).unix_seconds(), 60);
    story.cycle(1.0, &[('a', Some(0.1))], &DOCKER_UP);
    story.settle(1.0);
    story.restart(100.0);
    story.usage = usage(story.at(101.0).unix_seconds(), 20);
    story.cycle(101.0, &[('a', Some(0.1))], &DOCKER_UP);
    story.end('a', 102.0, Some(0));
    story.settle(102.0);
    story.settle(110.0);
    let exit = story.exits('a')[0];
    assert_eq!((exit.peak_usage_bytes, exit.peak_unreclaimable_bytes), (Some(60), Some(59)));
    assert_eq!(story.run_record().usage_peak_bytes, Some(60));
}

#[test]
fn start_before_the_name_is_known_counts_under_the_name() {
    let mut story = Story::new();
    let nameless = |letter| id(letter).short().to_owned();
    story.cycle_as(1.0, &[('a', Some(0.1))], &DOCKER_UP, nameless);
    story.settle(1.0);
    story.cycle_as(9.0, &[('a', Some(0.1))], &DOCKER_UP, nameless);
    story.settle(9.0);
    story.cycle(10.0, &[('a', Some(0.1))], &DOCKER_UP);
    story.end('a', 11.0, Some(1));
    story.event('a', 12.0, EventKind::Started);
    story.settle(12.0);
    assert_eq!(super::figures(&story.store.totals(), "a").restarts, 1);
}

/// Plays a container that no runtime names: in each second of the cgroup with that inode, or of none.
fn without_a_runtime(cgroups: &[(std::ops::Range<u32>, Option<u64>)]) -> Story {
    let mut story = Story::new();
    let nameless = |letter| id(letter).short().to_owned();
    for (seconds, inode) in cgroups {
        for at in seconds.clone().map(f64::from) {
            story.cgroup_inode = *inode;
            let listed: &[_] = if inode.is_some() { &[('a', None)] } else { &[] };
            story.cycle_as(at, listed, &[], nameless);
            story.settle(at);
        }
    }
    story
}

#[test]
fn container_without_a_runtime_has_a_new_run_in_another_cgroup() {
    // it is missed before the next one is made, or not
    for second in [30, 3] {
        let mut story = without_a_runtime(&[
            (1..3, Some(7)),
            (3..second, None),
            (second..100, Some(8)),
            (100..110, None),
        ]);
        story.settle(120.0);
        assert_eq!(story.reasons('a'), [Some(ExitReason::Unknown); 2], "{second}");
        let ended = story.exits('a')[0].at - story.begin.unix_seconds();
        assert!((3.0..3.1).contains(&ended), "{second}: {ended}");
        let restarts = super::figures(&story.store.totals(), id('a').short()).restarts;
        assert_eq!(restarts, 1, "no runtime will name it");
    }
}

#[test]
fn container_without_a_runtime_goes_on_in_the_same_cgroup() {
    // the hierarchy could not be read for a while
    let mut story =
        without_a_runtime(&[(1..3, Some(7)), (3..30, None), (30..100, Some(7)), (100..110, None)]);
    story.settle(120.0);
    assert_eq!(story.reasons('a'), [Some(ExitReason::Unknown)]);
    assert_eq!(super::figures(&story.store.totals(), id('a').short()).restarts, 0);
}

/// Whose a kill is may wait for the record of another one.
#[test]
fn exit_names_a_kill_of_its_own_that_is_not_decided() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.cycle(0.9, &[('a', Some(0.1))], &DOCKER_UP);
    story.kill_in('a', 1.0, 71);
    story.kill(1.1, 900, None, ProcInfo::default());
    story.settle(1.2);
    story.end('a', 2.0, Some(1));
    for at in [2.0, 5.5] {
        story.settle(at);
    }
    let (exit, kill) = (story.exits('a')[0].clone(), story.store.kills().find(|kill| kill.pid == Some(71)));
    assert_eq!(exit.reason, Some(ExitReason::Error));
    assert!(exit.may_be.contains(&kill.expect("the kill").id), "{exit:?}");
}

/// Docker lists a container for ever whose end it missed while containerd was restarted, and reports code 0 once it is stopped.
#[test]
fn code_0_long_after_the_last_process_is_not_trusted() {
    for (had_process, reason) in [(true, ExitReason::Unknown), (false, ExitReason::Completed)] {
        let mut story = Story::new();
        story.event('a', 0.1, EventKind::Started);
        for at in 1..30 {
            let at = f64::from(at);
            let runs = at < 10.0 && had_process;
            story.usage = ContainerUsage {
                processes: if runs { vec![process(71, 1, false)] } else { vec![] },
                ..ContainerUsage::default() // without a cgroup
            };
            story.cycle(at, &[('a', Some(0.1))], &DOCKER_UP);
            story.settle(at);
        }
        assert_eq!(story.reasons('a'), [], "its runtime says that it runs");
        story.end('a', 30.0, Some(0));
        story.settle(40.0);
        assert_eq!(story.reasons('a'), [Some(reason)]);
    }
}

#[test]
fn recent_kill_without_an_owner_does_not_delay_the_evidence_for_older_ones() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.event('a', 1.0, EventKind::Oom);
    story.kill(1.0, 70, None, ProcInfo::default());
    story.end('a', 1.1, KILLED);
    story.log(1.4, vec![]);
    for step in 0..9 {
        let at = 2.0 + f64::from(step);
        story.kill(at, 100 + step, Some("/"), ProcInfo::default()); // another one, of nobody, every second
        story.settle(at);
    }
    let first = story.store.kills().next().expect("the first kill").clone();
    assert!(matches!(&first.owner, KillOwner::Container(owner) if &*owner.identity.name == "a"), "{first:?}");
}

#[test]
fn late_record_names_the_container_of_a_kill_that_was_settled_without() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.log(0.5, vec![]);
    story.reconciler.apply_vmstat(story.at(0.5), 7);
    for at in [1.0, 2.5, 14.0] {
        story.log(at, vec![]);
        story.reconciler.apply_vmstat(story.at(at), 8);
        story.settle(at);
    }
    assert_eq!(story.last_kill().owner, KillOwner::Unattributed);
    let number = story.store.kills().count();
    let lines = super::runs::record_of('a', 71);
    story.log_read(0.9, 15.0, lines);
    story.reconciler.apply_vmstat(story.at(15.0), 8);
    story.settle(15.0);
    assert_eq!((story.store.kills().count(), story.owner().as_deref()), (number, Some("a")));
    assert_eq!(story.store.total(Total::Unattributed), 1, "counts never decrease");
    assert!(LedgerEvent::OomKill(story.last_kill().clone()).settled());
}

#[test]
fn times_from_the_future_end_with_the_clock_that_is_corrected() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.kill_in('a', 1.0, 71);
    story.settle(1.0);
    let shown = |story: &Story| super::figures(&story.store.totals(), "a").last_kill.expect("a kill");
    story.set_clock(2.0, -86_400_000);
    assert!(shown(&story) > story.at(2.0).unix_seconds() + 80_000.0);
    story.settle(2.0);
    assert!(shown(&story) <= story.at(2.0).unix_seconds(), "an alert on it would never end");
}

/// The exit was reported before the clock was set back, and the kernel's record is read after it.
#[test]
fn exit_is_that_of_its_kill_although_the_clock_was_set_between_them() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.cycle(0.9, &[('a', Some(0.1))], &DOCKER_UP);
    story.end('a', 5.1, KILLED);
    story.settle(5.2);
    story.set_clock(5.5, -600_000);
    story.cycle(5.9, &[], &DOCKER_UP);
    let context = OomContext { task_cgroups: vec![path('a')], ..OomContext::default() };
    let lines =
        vec![(Line::Context(context), ProcInfo::default()), (Line::Killed(killed(71)), ProcInfo::default())];
    story.log_read(5.0, 6.0, lines);
    for at in [6.0, 9.0, 20.0] {
        story.settle(at);
    }
    assert_eq!(story.reasons('a'), [Some(ExitReason::OomContainer)]);
    assert_eq!(story.last_kill().victim, Some(Victim::Main));
    // Docker goes on to report the times of its start and its end as they were
    let was = 600.0;
    story.event('a', was + 0.1, EventKind::Running { pid: None });
    story.end('a', was + 5.1, KILLED);
    story.settle(30.0);
    assert_eq!(story.exits('a').len(), 1);
}

/// The log of the container was read while it was started again.
#[test]
fn exit_names_no_kill_of_the_next_run() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.cycle(0.9, &[('a', Some(0.1))], &DOCKER_UP);
    story.reconciler.set_logs_being_read(Some([id('a')].into()));
    story.end('a', 10.0, Some(1));
    story.event('a', 10.1, EventKind::Started);
    story.settle(10.2);
    story.kill_in('a', 11.0, 71);
    for at in [11.0, 13.2, 30.0] {
        story.settle(at);
    }
    assert_eq!((story.reasons('a'), &story.exits('a')[0].may_be), (vec![Some(ExitReason::Error)], &vec![]));
}

/// A cycle a minute later does not show when the victim was gone.
#[test]
fn long_interval_makes_no_kill_of_a_child_the_end() {
    let mut story = killed_child();
    story.settle(1.0);
    story.cycle(1.2, &[('a', Some(0.1))], &DOCKER_UP);
    story.usage = with_processes(vec![process(70, 1, false)]);
    story.cycle(61.2, &[('a', Some(0.1))], &DOCKER_UP);
    story.settle(61.2);
    story.end('a', 64.0, KILLED);
    for at in [64.0, 70.0, 90.0] {
        story.settle(at);
    }
    assert_eq!(story.reasons('a'), [Some(ExitReason::Error)]);
}

#[test]
fn kill_without_a_runtime_names_its_container_at_once() {
    let mut story = Story::new();
    story.kill_in('a', 1.0, 71);
    story.settle(1.0);
    let kill = story.last_kill();
    let KillOwner::Container(owner) = &kill.owner else { panic!("{kill:?}") };
    assert_eq!((&*owner.container_id, &*owner.identity.name), (id('a').as_str(), id('a').short()));
    assert!(kill.victim.is_none() && !LedgerEvent::OomKill(kill.clone()).settled(), "the rest is undecided");
}

/// After a pause the time of a record is known to some seconds, so the kill of one run may be placed in the next.
#[test]
fn kill_without_a_record_is_not_that_of_a_container_whose_kills_are_all_known() {
    let mut story = Story::new();
    story.drift = 0.2;
    story.reconciler.apply_vmstat(story.at(0.0), 0);
    for (from, to) in [(2.5, 2.9), (3.0, 3.4)] {
        story.late_event('a', from, 9.0, EventKind::Started);
        story.late_event('a', to, 9.0, EventKind::Ended { exit_code: KILLED, oom_flag: Some(true) });
    }
    let record = |pid: u32| {
        let context = OomContext { task_cgroups: vec![path('a')], ..OomContext::default() };
        vec![(Line::Context(context), ProcInfo::default()), (Line::Killed(killed(pid)), ProcInfo::default())]
    };
    story.log_read_together(9.0, vec![(2.8, record(71)), (3.3, record(72))]);
    for at in [9.0, 10.0, 12.0, 15.0, 20.0, 30.0] {
        story.log(at, vec![]);
        story.reconciler.apply_vmstat(story.at(at), 3);
        story.settle(at);
    }
    let (main, child) = story.counted("a");
    assert_eq!((main + child, story.store.total(Total::Unattributed)), (2, 1));
}
