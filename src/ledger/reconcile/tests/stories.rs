//! Single scenarios: the owner of a kill, whether it ended its container, and what a restart must not change.

use super::figures;
use super::story::{DOCKER_UP, KILLED, Story, id, killed, path, running, stop_request};
use crate::config::{Filter, GROUP_SETTING};
use crate::discover::{ContainerSpec, EventKind, Pod, RuntimeKind};
use crate::events::{ExitReason, KillOwner, LedgerEvent, Method, Victim};
use crate::ledger::reconcile::ProcInfo;
use crate::ledger::sources::kernel_log::LogPosition;
use crate::ledger::totals::Total;
use crate::parse::kernel_log::{Line, OomContext};

// ---- owners

#[test]
fn kernel_path_precedes_proc_and_runtime_pid() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.event('a', 0.1, running(70));
    story.event('b', 0.1, EventKind::Started);
    let hint = |letter| ProcInfo { cgroup: Some(path(letter)), ..ProcInfo::default() };
    story.kill(1.0, 1, Some(&path('b')), hint('a'));
    story.settle(1.0);
    assert_eq!((story.owner().as_deref(), story.last_kill().method), (Some("b"), Some(Method::Kmsg)));
    story.kill(2.0, 2, None, hint('a'));
    story.settle(2.0);
    assert_eq!((story.owner().as_deref(), story.last_kill().method), (Some("a"), Some(Method::Proc)));
    story.kill(3.0, 70, None, ProcInfo::default());
    story.settle(3.0);
    assert_eq!((story.owner().as_deref(), story.last_kill().method), (Some("a"), Some(Method::Processes)));
}

/// The id of a container in a path with this beginning and end.
fn named(before: &str, letter: char, after: &str) -> String {
    format!("/{before}{}{after}", id(letter).as_str())
}

#[test]
fn kill_in_a_cgroup_that_any_user_can_name_is_the_hosts() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    for (number, path) in [
        named("slurm_vm/uid_7/job_1/step_0/task_0/", 'a', ""),
        named("slurm/uid_7/job_1/step_0/task_0/docker/", 'a', "/below"),
        named("system.slice/slurmstepd.scope/job_1/docker-", 'a', ".scope"),
        named("user.slice/user-7.slice/user@7.service/app.slice/docker-", 'a', ".scope"),
        // of a container that no runtime knows
        named("user.slice/user-7.slice/user@7.service/app.slice/libpod-", 'e', ".scope"),
    ]
    .into_iter()
    .enumerate()
    {
        let at = 20.0 * (number + 1) as f64;
        story.kill(at, 1 + number as u32, Some(&path), ProcInfo::default());
        // another container's counter must not explain it
        story.counters(at, &[('a', number as u64 + 1)]);
        for after in [0.0, 2.0, 4.0, 12.0] {
            story.settle(at + after);
        }
        assert_eq!(story.last_kill().owner, KillOwner::Host, "{path}");
    }
    assert_eq!(story.store.total(Total::HostProcessAtLimit), 5);
}

#[test]
fn kill_in_the_cgroup_of_a_users_engine_is_the_containers_once_it_is_reported() {
    let mut story = Story::new();
    let path = named("user.slice/user-7.slice/user@7.service/app.slice/docker-", 'a', ".scope");
    story.kill(1.0, 1, Some(&path), ProcInfo::default());
    story.settle(1.0);
    assert_eq!(story.last_kill().owner, KillOwner::Pending);
    let reported = story.runtime_event('a', 0.9, EventKind::Started);
    let details = reported.named.as_deref().map(|named| ContainerSpec { user: Some(7), ..named.clone() });
    story.named_event('a', 0.9, 1.2, details, EventKind::Started);
    story.settle(1.2);
    assert_eq!((story.owner().as_deref(), story.last_kill().method), (Some("a"), Some(Method::Kmsg)));
}

#[test]
fn line_that_matches_two_containers_is_attributed_to_neither() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.event('b', 0.1, EventKind::Started);
    story.kill(1.0, 1, Some(&format!("{} or {}", path('a'), path('b'))), ProcInfo::default());
    for at in [1.0, 6.0, 12.0] {
        story.settle(at);
    }
    assert_eq!(story.last_kill().owner, KillOwner::Unattributed);
    assert_eq!(story.store.total(Total::Unattributed), 1);
}

#[test]
fn limit_of_parent_cgroup_does_not_identify_the_victim() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    let limit = Some(path('b'));
    let context = OomContext { task_cgroups: vec![path('a')], oom_cgroup: limit, ..OomContext::default() };
    let lines =
        vec![(Line::Context(context), ProcInfo::default()), (Line::Killed(killed(1)), ProcInfo::default())];
    story.log(1.0, lines);
    story.settle(1.0);
    assert_eq!(story.owner().as_deref(), Some("a"));
}

#[test]
fn cgroup_counts_are_used_only_if_the_numbers_agree() {
    let mut story = Story::new();
    for letter in ['a', 'b'] {
        story.event(letter, 0.1, EventKind::Started);
    }
    story.kill(1.0, 1, None, ProcInfo::default());
    story.counters(1.0, &[('a', 1), ('b', 0)]);
    story.settle(1.0);
    assert_eq!((story.owner().as_deref(), story.last_kill().method), (Some("a"), Some(Method::Cgroup)));
    // one kill, but two cgroups counted one each: the other record was lost
    story.kill(2.0, 2, None, ProcInfo::default());
    story.counters(2.0, &[('a', 2), ('b', 1)]);
    for at in [2.0, 8.0, 13.0] {
        story.settle(at);
    }
    assert_eq!(story.last_kill().owner, KillOwner::Unattributed);
}

#[test]
fn unmatched_count_is_not_used_for_a_later_kill() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.counters(1.0, &[('a', 1)]);
    for at in [1.0, 12.0] {
        story.settle(at);
    }
    story.kill(100.0, 1, None, ProcInfo::default());
    story.counters(100.0, &[('a', 1)]);
    for at in [100.0, 106.0, 111.0] {
        story.settle(at);
    }
    assert_eq!(story.last_kill().owner, KillOwner::Unattributed);
}

#[test]
fn runtime_oom_event_attributes_kill_to_container_that_ended() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.kill(1.0, 1, None, ProcInfo::default());
    story.event('a', 1.05, EventKind::Oom);
    story.end('a', 1.1, KILLED);
    for at in [1.2, 3.5] {
        story.settle(at);
    }
    assert_eq!((story.owner().as_deref(), story.last_kill().method), (Some("a"), Some(Method::Runtime)));
    assert_eq!(story.reasons('a'), [Some(ExitReason::OomContainer)]);
}

#[test]
fn exit_just_after_first_start_does_not_match_a_later_kill() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.kill(0.35, 1, None, ProcInfo::default());
    story.event('a', 0.36, EventKind::Oom);
    story.end('a', 0.4, KILLED);
    for at in [0.5, 3.0, 12.0] {
        story.settle(at);
    }
    assert_eq!(story.last_kill().owner, KillOwner::Unattributed);
}

#[test]
fn containers_that_lost_one_process_each_are_matched_as_a_set() {
    let mut story = Story::new();
    for letter in ['a', 'b'] {
        story.event(letter, 0.1, EventKind::Started);
    }
    story.counters(0.9, &[('a', 0)]);
    story.kill(2.00, 2, None, ProcInfo::default());
    story.kill(2.01, 3, None, ProcInfo::default());
    story.counters(2.02, &[('a', 1)]);
    story.event('b', 2.02, EventKind::Oom);
    story.end('b', 2.02, KILLED);
    for at in [2.1, 4.5, 8.0] {
        story.settle(at);
    }
    let methods: Vec<_> = story.store.kills().map(|kill| kill.method).collect();
    assert_eq!(methods, [Some(Method::Set); 2], "each container lost one, but not known which");
    assert_eq!((story.counted("a"), story.counted("b")), ((0, 1), (1, 0)));
}

#[test]
fn kill_before_container_name_waits_for_it_over_restart() {
    let mut story = Story::new();
    story.kill_in('a', 1.0, 1);
    story.settle(1.0);
    assert_eq!(story.owner().as_deref(), Some("aaaaaaaaaaaa"), "at once, by its id");
    assert!(!LedgerEvent::OomKill(story.last_kill().clone()).settled());
    story.restart(1.5);
    story.event('a', 0.9, EventKind::Started);
    story.settle(1.6);
    assert_eq!(story.owner().as_deref(), Some("a"));
    story.settle(8.0);
    assert_eq!(story.counted("a"), (0, 1));
}

#[test]
fn unnamed_container_gets_short_id_and_its_kill_is_settled_after_restart() {
    let mut story = Story::new();
    story.kill_in('a', 1.0, 1);
    story.settle(1.0);
    story.settle(4.5);
    assert_eq!(story.owner().as_deref(), Some("aaaaaaaaaaaa"));
    story.restart(4.6);
    story.settle(20.0);
    assert_eq!(story.last_kill().victim, Some(Victim::Child));
    assert_eq!(story.counted("aaaaaaaaaaaa"), (0, 1));
}

#[test]
fn container_excluded_by_filters_has_no_figures_before_it_is_named() {
    let only = |name: &str| Filter { include: Some(regex::Regex::new(name).unwrap()), ..Filter::default() };
    let labelled = Filter { labels: vec![("team".into(), None)], ..Filter::default() };
    for (filter, shown) in [(only("^aaa"), true), (only("^piper"), false), (labelled, false)] {
        let mut story = Story::filtered(filter);
        story.kill_in('a', 1.0, 1);
        story.settle(4.5);
        story.settle(10.0);
        assert_eq!(story.owner().as_deref(), Some("aaaaaaaaaaaa"), "the event is still recorded");
        assert_eq!(story.shown(10.0).len(), usize::from(shown));
    }
}

// ---- main or child

#[test]
fn child_is_decided_after_five_seconds_and_main_at_exit() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.event('a', 0.1, running(70));
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
fn child_whose_status_the_first_process_returned_ended_the_container() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.event('a', 0.1, running(70));
    story.kill_in('a', 1.0, 71);
    story.end('a', 4.0, KILLED);
    story.settle(4.0);
    assert_eq!(story.last_kill().victim, Some(Victim::Main));
    assert_eq!(story.reasons('a'), [Some(ExitReason::OomContainer)]);
}

#[test]
fn only_the_later_main_kill_ended_the_container() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.kill_in('a', 1.0, 71);
    story.kill_in('a', 1.5, 70);
    story.end('a', 1.6, KILLED);
    story.settle(1.6);
    assert_eq!(story.counted("a"), (1, 1));
}

#[test]
fn kill_of_next_run_waits_for_its_start_event() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.end('a', 1.0, Some(0));
    story.settle(1.0);
    story.kill_in('a', 1.5, 71);
    story.settle(1.5);
    story.late_event('a', 1.2, 2.0, EventKind::Started);
    story.late_event('a', 1.6, 2.0, EventKind::Ended { exit_code: KILLED, oom_flag: None });
    story.settle(2.0);
    assert_eq!(story.reasons('a'), [Some(ExitReason::Completed), Some(ExitReason::OomContainer)]);
}

/// As of Podman, which restarts without a pause, and sends the event of a start once it has stored that.
#[test]
fn kill_long_before_the_start_event_is_of_the_run_that_it_ended() {
    for settles in [&[0.6, 0.7, 0.95, 1.0, 1.1, 5.0, 12.0][..], &[0.6, 1.1, 12.0], &[12.0]] {
        let mut story = Story::new();
        let settle = |story: &mut Story, until: f64, from: f64| {
            settles.iter().filter(|at| (from..until).contains(*at)).for_each(|at| story.settle(*at));
        };
        story.event('a', 0.1, EventKind::Started);
        story.kill_in('a', 0.5, 70);
        story.end('a', 0.6, KILLED);
        settle(&mut story, 0.7, 0.6);
        story.kill_in('a', 0.7, 71);
        settle(&mut story, 0.95, 0.7);
        story.event('a', 0.95, EventKind::Started);
        settle(&mut story, 1.0, 0.95);
        story.end('a', 1.0, KILLED);
        settle(&mut story, f64::INFINITY, 1.0);
        assert_eq!(story.reasons('a'), [Some(ExitReason::OomContainer); 2], "{settles:?}");
        assert_eq!(story.counted("a"), (2, 0));
    }
}

/// Its stamp is a little later than the engine's time of the end.
#[test]
fn kill_just_after_an_end_is_not_of_the_run_that_begins_long_after_it() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.kill_in('a', 1.05, 70);
    story.end('a', 1.0, KILLED);
    story.settle(1.1);
    story.event('a', 2.0, EventKind::Started);
    story.settle(2.0);
    story.end('a', 3.0, Some(1));
    story.settle(3.0);
    story.settle(12.0);
    assert_eq!(story.reasons('a'), [Some(ExitReason::OomContainer), Some(ExitReason::Error)]);
}

#[test]
fn restart_with_pending_kill_of_earlier_run_keeps_its_attribution() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.kill(1.0, 1, None, ProcInfo::default()); // its owner is not known yet
    story.event('a', 1.05, EventKind::Oom);
    story.end('a', 1.1, KILLED);
    story.event('a', 1.3, EventKind::Started);
    story.settle(1.3);
    story.restart(1.4);
    for at in [1.5, 3.5] {
        story.settle(at);
    }
    assert_eq!(story.owner().as_deref(), Some("a"), "by the runtime's event of the previous run");
    assert_eq!((story.reasons('a'), story.counted("a")), (vec![Some(ExitReason::OomContainer)], (1, 0)));
}

// ---- runs

#[test]
fn counts_every_run_of_fast_restart_loop() {
    let mut story = Story::new();
    for turn in 0..5 {
        let at = f64::from(turn) * 0.3;
        story.event('a', at + 0.1, EventKind::Started);
        story.end('a', at + 0.2, Some(1));
        // a late inspect result for that exit
        story.event('a', at + 0.2, EventKind::Ended { exit_code: Some(1), oom_flag: Some(false) });
    }
    story.settle(2.0);
    assert_eq!(story.reasons('a'), [Some(ExitReason::Error); 5]);
    assert_eq!(figures(&story.store.totals(), "a").restarts, 4);
}

#[test]
fn late_inspect_of_earlier_exit_does_not_end_current_run() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.end('a', 0.5, None);
    story.event('a', 0.7, EventKind::Started);
    story.late_event('a', 0.49, 0.8, EventKind::Ended { exit_code: Some(3), oom_flag: Some(false) });
    story.settle(0.8);
    assert_eq!(story.reasons('a'), [Some(ExitReason::Error)]);
    assert!(story.reconciler.running(RuntimeKind::Docker).any(|running| *running == id('a')));
}

#[test]
fn inventory_behind_runtime_events_begins_no_run() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.end('a', 1.0, Some(0));
    story.cycle(1.1, &[('a', Some(0.1))], &DOCKER_UP);
    story.settle(1.1);
    assert_eq!(story.reconciler.running(RuntimeKind::Docker).count(), 0);
    assert_eq!(story.reasons('a').len(), 1);
}

#[test]
fn vanished_container_ends_soon_without_runtime_and_later_while_disconnected() {
    for (runtimes, after) in [(&[][..], 3.0), (&DOCKER_UP, 15.0), (&[(RuntimeKind::Docker, false)], 600.0)] {
        let mut story = Story::new();
        story.cycle(1.0, &[('a', Some(0.1))], runtimes);
        story.cycle(2.0, &[], runtimes);
        story.cycle(1.9 + after, &[], runtimes);
        assert!(
            story.reconciler.containers.get(&id('a')).is_some_and(|known| known.is_running()),
            "{runtimes:?}"
        );
        story.cycle(2.1 + after, &[], runtimes);
        story.settle(2.1 + after);
        assert!(
            !story.reconciler.containers.get(&id('a')).is_some_and(|known| known.is_running()),
            "{runtimes:?}"
        );
        let ended = story.exits('a')[0].at - story.begin.unix_seconds();
        assert!((ended - 2.0).abs() < 1e-3, "the exit is when it was first missing: {ended}");
    }
}

#[test]
fn vanished_container_without_name_waits_for_its_runtime() {
    let mut story = Story::new();
    let nameless = |letter| id(letter).short().to_owned();
    let runtimes = [(RuntimeKind::Cri, true)];
    story.cycle_as(2.0, &[('b', None)], &runtimes, nameless);
    story.reconciler.containers.modify(&id('b')).runtime = RuntimeKind::Containerd; // by the path of the cgroup
    story.cycle(3.0, &[], &runtimes);
    for at in [12.0, 16.0] {
        story.cycle(at, &[], &runtimes);
        story.settle(at);
    }
    story.event('b', 2.0, running(7));
    story.end('b', 2.5, Some(0));
    story.settle(16.0);
    assert_eq!(story.reasons('b'), [Some(ExitReason::Completed)]);
}

#[test]
fn new_name_has_own_counts_but_temporary_compose_name_does_not() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.kill_in('a', 1.0, 71);
    for at in [1.0, 7.0] {
        story.settle(at);
    }
    let named = |name: &str| {
        Some(ContainerSpec {
            name: name.into(),
            pod: None,
            image: "".into(),
            labels_match: true,
            ..ContainerSpec::default()
        })
    };
    story.named_event('a', 8.0, 8.0, named("0123456789ab_a"), EventKind::Renamed);
    story.kill_in('a', 9.0, 72);
    for at in [9.0, 15.0] {
        story.settle(at);
    }
    assert_eq!(story.counted("a"), (0, 2));
    story.named_event('a', 16.0, 16.0, named("train"), EventKind::Renamed);
    story.kill_in('a', 17.0, 73);
    for at in [17.0, 23.0] {
        story.settle(at);
    }
    assert_eq!((story.counted("a"), story.counted("train")), ((0, 2), (0, 1)));
    // the parts sum to the total, and the container's own history has its name
    let shown = |name: &str, at: f64| {
        let figures = story.reconciler.figures(story.at(at));
        let of = figures.containers.into_iter().find(|it| &*it.identity.name == name)?;
        Some((of.kills.as_flattened().iter().sum::<u64>(), of.former_kills, of.former_last_kill.is_some()))
    };
    assert_eq!((shown("a", 23.0), shown("train", 23.0)), (Some((2, 0, false)), Some((1, 2, true))));
    assert_eq!(shown("a", 90.0), None, "as a container that ended");
    let names = story.store.kills().map(|kill| match &kill.owner {
        KillOwner::Container(subject) => (subject.identity.name.to_string(), subject.former_names.concat()),
        owner => panic!("{owner:?}"),
    });
    assert_eq!(names.collect::<Vec<_>>(), vec![("train".to_owned(), "a".to_owned()); 3]);
}

#[test]
fn stop_is_known_with_its_signal_whenever_its_events_come() {
    let stop = |signal| EventKind::SignalRequested { signal };
    // the order of 20.10, that of 28 and 29, and events that come after a list has shown the end
    for (is_late, order) in [(false, [15, 9, 0, -1]), (false, [15, 9, -1, 0]), (true, [0, 15, 9, -1])] {
        let mut story = Story::new();
        story.event('a', 1.0, EventKind::Started);
        for (number, what) in order.into_iter().enumerate() {
            let at = 20.0 + 0.01 * number as f64;
            let at = if is_late { [20.02, 20.0, 20.01, 20.03][number] } else { at };
            let what = match what {
                0 => EventKind::Ended { exit_code: KILLED, oom_flag: None },
                -1 => stop(None),
                signal => stop(Some(signal)),
            };
            story.late_event('a', at, 20.1, what);
        }
        for at in [20.1, 23.0, 30.0, 60.0] {
            story.settle(at);
        }
        let exits = story.store.exits_of(&id('a'));
        let (reason, signal) = (exits[0].reason, exits[0].requested_signal());
        assert_eq!((exits.len(), reason, signal), (1, Some(ExitReason::Stopped), Some(9)), "{order:?}");
        assert!(!exits[0].stop_signals.contains(&None), "{:?}", exits[0].stop_signals);
    }
}

#[test]
fn container_that_gets_its_former_name_back_has_each_kill_once() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    let rename = |story: &mut Story, at: f64, name: &str| {
        let named = ContainerSpec { name: name.into(), labels_match: true, ..ContainerSpec::default() };
        story.named_event('a', at, at, Some(named), EventKind::Renamed);
    };
    for (at, name) in [(10.0, "b"), (20.0, "a"), (30.0, "b"), (40.0, "a")] {
        story.kill_in('a', at - 8.0, at as u32);
        story.settle(at - 8.0);
        story.settle(at - 1.0);
        rename(&mut story, at, name);
        story.settle(at);
    }
    // after a restart of memledger its runtime repeats them
    story.restart(41.0);
    rename(&mut story, 10.0, "b");
    rename(&mut story, 20.0, "a");
    story.settle(42.0);
    assert_eq!((story.counted("a"), story.counted("b")), ((0, 2), (0, 2)));
    let figures = story.reconciler.figures(story.at(42.0)).containers;
    let of_it = figures.iter().find(|it| &*it.identity.name == "a").unwrap();
    assert_eq!((of_it.kills.as_flattened().iter().sum::<u64>(), of_it.former_kills), (2, 2));
}

#[test]
fn kill_of_which_is_undecided_at_a_rename_is_counted_under_the_name_of_its_time() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.kill_in('a', 1.0, 71);
    story.settle(1.0);
    let named = ContainerSpec { name: "new".into(), labels_match: true, ..ContainerSpec::default() };
    story.named_event('a', 2.0, 2.0, Some(named), EventKind::Renamed);
    for at in [2.0, 8.0, 30.0] {
        story.settle(at);
    }
    assert_eq!((story.counted("a"), story.counted("new")), ((0, 1), (0, 0)));
    assert_eq!(story.owner().as_deref(), Some("new"), "its event");
    let figures = story.reconciler.figures(story.at(30.0)).containers;
    let last_kills: Vec<_> = figures.iter().map(|it| (&*it.identity.name, it.last_kill.is_some())).collect();
    assert_eq!(last_kills, [("a", true), ("new", false)], "one of them alerts");
}

#[test]
fn name_that_is_shared_with_another_runtime_is_no_rename() {
    let mut story = Story::new();
    let both: &[_] = &DOCKER_UP;
    for (at, name) in [(1.0, "a"), (2.0, "a@docker"), (3.0, "a"), (4.0, "a@docker")] {
        story.event('a', 0.1, EventKind::Started);
        story.cycle_as(at, &[('a', Some(0.1))], both, |_| name.to_owned());
        story.kill_in('a', at + 0.1, at as u32);
        story.settle(at + 0.1);
    }
    for at in [5.0, 30.0] {
        story.settle(at);
    }
    let subjects = story.store.kills().map(|kill| match &kill.owner {
        KillOwner::Container(subject) => (subject.identity.name.to_string(), subject.former_names.len()),
        owner => panic!("{owner:?}"),
    });
    let expected = ["a", "a@docker", "a", "a@docker"].map(|name| (name.to_owned(), 0));
    assert_eq!(subjects.collect::<Vec<_>>(), expected, "as they were recorded");
}

#[test]
fn limit_of_a_pod_is_the_containers_where_no_other_one_of_it_runs() {
    let in_pod = |name: &str| {
        let pod = Pod { namespace: "ml".into(), name: "train-0".into(), ..Pod::default() };
        Some(ContainerSpec {
            name: name.into(),
            pod: Some(std::sync::Arc::new(pod)),
            labels_match: true,
            ..ContainerSpec::default()
        })
    };
    // alone; beside a sidecar; after an init container; at a limit that is no pod's
    for (other, other_ends, limit, expected) in [
        (false, None, "/kubepods/burstable/pod1-2", true),
        (true, None, "/kubepods/burstable/pod1-2", false),
        (true, Some(0.6), "/kubepods/burstable/pod1-2", true),
        (false, None, "/kubepods/burstable", false),
    ] {
        let mut story = Story::new();
        if other {
            story.named_event('b', 0.1, 0.1, in_pod("other"), EventKind::Started);
            if let Some(end) = other_ends {
                let ended = EventKind::Ended { exit_code: Some(0), oom_flag: None };
                story.named_event('b', end, end, in_pod("other"), ended);
            }
        }
        story.named_event('a', 0.7, 0.7, in_pod("main"), EventKind::Started);
        let task = format!("/kubepods/burstable/pod1-2/{}", id('a').as_str());
        let oom_cgroup = Some(limit.to_owned());
        let context = OomContext { task_cgroups: vec![task], oom_cgroup, ..OomContext::default() };
        let lines = vec![
            (Line::Context(context), ProcInfo::default()),
            (Line::Killed(killed(71)), ProcInfo::default()),
        ];
        story.log(1.5, lines);
        for at in [1.5, 8.0, 30.0] {
            story.settle(at);
        }
        assert_eq!(story.last_kill().alone_in_pod, expected, "{limit}");
    }
}

#[test]
fn former_name_that_the_filter_excludes_is_not_shown() {
    let only = Filter { include: Some(regex::Regex::new("^train").unwrap()), ..Filter::default() };
    let mut story = Story::filtered(only);
    let named = |name: &str| {
        Some(ContainerSpec { name: name.into(), labels_match: true, ..ContainerSpec::default() })
    };
    story.named_event('a', 0.1, 0.1, named("secret"), EventKind::Started);
    story.kill_in('a', 1.0, 71);
    story.settle(1.0);
    story.settle(8.0);
    story.named_event('a', 9.0, 9.0, named("train"), EventKind::Renamed);
    story.settle(9.0);
    assert_eq!(story.shown(9.0), ["train"]);
}

#[test]
fn kill_counted_under_a_short_id_moves_to_the_name_that_becomes_known() {
    for is_settled in [true, false] {
        let mut story = Story::new();
        story.kill_in('a', 1.0, 1);
        story.settle(1.0);
        story.settle(4.5);
        if is_settled {
            story.settle(20.0);
            assert_eq!(story.counted("aaaaaaaaaaaa"), (0, 1));
        }
        story.restart(21.0);
        story.event('a', 21.0, running(7));
        story.settle(21.0);
        story.settle(40.0);
        assert_eq!((story.counted("aaaaaaaaaaaa"), story.counted("a")), ((0, 0), (0, 1)), "{is_settled}");
        let figures = story.reconciler.figures(story.at(40.0));
        let shown: Vec<_> =
            figures.containers.iter().map(|it| (&*it.identity.name, it.last_kill.is_some())).collect();
        assert_eq!(shown, [("a", true)]);
        assert_eq!(story.owner().as_deref(), Some("a"));
    }
}

#[test]
fn renamed_container_that_is_forgotten_has_its_name_in_the_store() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.kill_in('a', 1.0, 71);
    story.end('a', 1.1, KILLED);
    for at in [1.0, 7.0, 20.0, 4_000.0] {
        story.settle(at);
    }
    let details = ContainerSpec { name: "old".into(), labels_match: true, ..ContainerSpec::default() };
    story.named_event('a', 4_001.0, 4_001.0, Some(details), EventKind::Renamed);
    story.settle(4_001.0);
    let exits = story.store.exits_of(&id('a'));
    assert_eq!(
        (&*exits[0].subject.identity.name, &*exits[0].subject.former_names),
        ("old", &["a".into()][..])
    );
    assert_eq!(story.owner().as_deref(), Some("old"));
}

#[test]
fn clock_set_back_hides_no_events() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.late_event('a', 5_000.0, 5_000.0, EventKind::Oom); // the clock was ahead
    story.late_event('a', 20.0, 20.0, stop_request(15));
    story.late_event('a', 21.0, 21.0, EventKind::Ended { exit_code: KILLED, oom_flag: None });
    story.settle(21.0);
    assert_eq!(story.reasons('a'), [Some(ExitReason::Stopped)]);
}

#[test]
fn repeated_events_after_restart_change_nothing() {
    let mut story = Story::new();
    let repeat = |story: &mut Story| {
        story.late_event('a', 0.1, 3.0, EventKind::Started);
        story.late_event('a', 0.5, 3.0, stop_request(15));
        story.late_event('a', 0.6, 3.0, EventKind::Ended { exit_code: Some(143), oom_flag: None });
        story.late_event('a', 0.8, 3.0, EventKind::Started);
    };
    repeat(&mut story);
    story.settle(3.0);
    story.restart(3.0);
    repeat(&mut story);
    story.late_event('a', 3.5, 3.5, EventKind::Ended { exit_code: KILLED, oom_flag: None });
    for at in [3.5, 7.0] {
        story.settle(at);
    }
    assert_eq!(story.reasons('a'), [Some(ExitReason::Stopped), Some(ExitReason::Killed)]);
    assert_eq!(figures(&story.store.totals(), "a").restarts, 1);
}

// ---- gaps and duplicate lines

#[test]
fn group_kill_split_by_restart_has_its_duplicate_detected() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    let group = (Line::Group { path: path('a') }, ProcInfo::default());
    story.log(1.0, vec![(Line::Killed(killed(70)), ProcInfo::default()), group]);
    story.settle(1.0);
    story.restart(1.1);
    story.log(
        1.2,
        vec![
            (Line::Killed(killed(71)), ProcInfo::default()),
            (Line::Killed(killed(70)), ProcInfo::default()),
        ],
    );
    story.settle(1.2);
    assert_eq!((story.store.total(Total::Host), story.store.total(Total::Duplicates)), (2, 1));
}

#[test]
fn late_record_fills_the_gap_of_its_container() {
    let mut story = Story::new();
    for letter in ['a', 'b'] {
        story.event(letter, 0.1, EventKind::Started);
    }
    story.reconciler.apply_log(story.at(0.5), None, LogPosition::default());
    story.reconciler.apply_vmstat(story.at(0.5), 7);
    story.counters(1.0, &[('a', 1), ('b', 1)]);
    story.reconciler.apply_vmstat(story.at(1.0), 9);
    story.settle(1.0);
    assert_eq!(story.store.total(Total::Host), 2);
    story.kill_in('b', 1.2, 2);
    story.kill_in('a', 1.2, 1);
    story.reconciler.apply_vmstat(story.at(1.2), 9);
    story.settle(1.2);
    story.settle(9.0);
    let found: Vec<_> = story.store.kills().map(|kill| (kill.pid, kill.owner.clone())).collect();
    assert_eq!(
        (found.len(), story.store.total(Total::Host), story.store.total(Total::WithoutRecord)),
        (2, 2, 0)
    );
    for (pid, owner) in found {
        let KillOwner::Container(subject) = owner else { panic!("{owner:?}") };
        assert_eq!(subject.identity.name.as_ref(), if pid == Some(1) { "a" } else { "b" });
    }
}

#[test]
fn record_of_a_host_process_fills_no_gap_of_a_container() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.reconciler.apply_log(story.at(0.5), None, LogPosition::default());
    story.reconciler.apply_vmstat(story.at(0.5), 7);
    story.counters(1.0, &[('a', 1)]);
    story.reconciler.apply_vmstat(story.at(1.0), 9);
    story.settle(1.0);
    story.settle(10.0);
    story.kill(1.1, 1, Some("/system.slice/cron.service"), ProcInfo::default());
    story.kill_in('a', 1.1, 2);
    story.reconciler.apply_vmstat(story.at(10.2), 9);
    for at in [10.2, 21.0] {
        story.settle(at);
    }
    let owner_of = |pid: u32| story.store.kills().find(|kill| kill.pid == Some(pid)).map(|kill| &kill.owner);
    assert!(!matches!(owner_of(1), Some(KillOwner::Container(_))), "{:?}", owner_of(1));
    assert_eq!((story.store.total(Total::Host), story.counted("a")), (2, (0, 1)));
}

#[test]
fn owner_from_a_counter_is_kept_over_a_restart() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.kill(1.0, 70, None, ProcInfo::default());
    story.settle(1.0); // the event is stored without an owner
    story.counters(1.5, &[('a', 1)]);
    story.settle(1.5);
    story.restart(1.6);
    story.counters(2.0, &[('a', 1)]);
    for at in [2.0, 20.0] {
        story.settle(at);
    }
    assert_eq!(story.owner().as_deref(), Some("a"));
}

#[test]
fn run_that_no_cycle_sees_has_the_group_and_settings_of_its_events() {
    let mut story = Story::new();
    let details = |group: &str, settings: &[(&str, &str)]| {
        let group = (!group.is_empty()).then_some((GROUP_SETTING, group));
        let settings = group.iter().chain(settings);
        let settings = settings.map(|(name, value)| ((*name).into(), (*value).into())).collect();
        Some(ContainerSpec { name: "a".into(), settings, labels_match: true, ..ContainerSpec::default() })
    };
    story.named_event('a', 0.1, 0.1, details("vision", &[("seed", "7")]), EventKind::Started);
    let of_inspect = details("vision", &[("batch_size", "8"), ("seed", "7")]);
    story.named_event('a', 0.1, 0.2, of_inspect, running(7));
    // older versions of Podman send no labels with it, so that it does not match a filter by labels
    let end = EventKind::Ended { exit_code: Some(3), oom_flag: None };
    let without_labels = details("", &[]).map(|details| ContainerSpec { labels_match: false, ..details });
    story.named_event('a', 0.3, 0.3, without_labels, end.clone());
    story.settle(16.0);
    let record = story.run_record();
    assert_eq!((&*record.group, record.samples), ("vision", 0));
    let settings: Vec<_> = record.settings.iter().map(|(name, value)| (&**name, &**value)).collect();
    assert_eq!(settings, [("batch_size", "8"), ("group", "vision"), ("seed", "7")]);
    // and without a group of its own it has its name
    story.named_event('b', 20.0, 20.0, details("", &[]), EventKind::Started);
    story.end('b', 20.5, Some(0));
    story.settle(36.0);
    assert_eq!(&*story.run_record().group, "a");
    // its start is unknown
    story.named_event('c', 40.0, 40.0, details("vision", &[]), EventKind::Exists);
    story.named_event('c', 40.5, 40.5, details("vision", &[("seed", "8")]), end);
    story.settle(56.0);
    let record = story.run_record();
    assert_eq!((&*record.group, record.settings.len()), ("vision", 2));
}

#[test]
fn end_before_a_new_ledger_read_the_kernel_log_is_not_called_no_oom() {
    let reason = |ended: f64| {
        let mut story = Story::new();
        story.late_event('a', ended - 0.05, 0.1, EventKind::Started);
        story.late_event(
            'a',
            ended,
            ended.max(0.1),
            EventKind::Ended { exit_code: Some(137), oom_flag: None },
        );
        story.log(2.0, vec![]);
        story.settle(20.0);
        story.exits('a').iter().map(|exit| (exit.reason, exit.kernel_log_read)).collect::<Vec<_>>()
    };
    assert_eq!(reason(-0.1), [(Some(ExitReason::Unknown), false)]);
    assert_eq!(reason(1.0), [(Some(ExitReason::Killed), true)]);
}
