//! CUDA out-of-memory errors: their container, GPU and counts, and the exits that they explain.

use super::story::{DOCKER_UP, KILLED, Story, id};
use crate::discover::EventKind;
use crate::events::{CudaOom, ExitReason, GpuHolder, LedgerEvent, OwnGpuProcess};
use crate::ledger::exchange::{GpuProcessUse, GpuUse, GpuUser};
use crate::parse::log_error::{HostError, MemoryMonitor, ProgramLimit, RefusedMemory};
use crate::reporter::message::OomMessage;
use crate::reporter::ooms::ReportedOom;

const PROCESS: crate::host::process::ProcessId = crate::host::process::ProcessId::new(70, 7_000);

/// Reports an error of container `letter`.
fn oom(story: &mut Story, letter: char, at: f64, message: OomMessage) {
    let reported = ReportedOom {
        at: story.at(at),
        process: Some(PROCESS),
        container: id(letter),
        rank: Some(1),
        device: Some("b".into()),
        skipped: 0,
        errors: u64::from(!message.is_update()),
        is_event: true,
        message,
    };
    story.reconciler.add_cuda_ooms(story.at(at), vec![reported]);
    story.settle(at);
}

fn observed() -> OomMessage {
    OomMessage { number: 1, tried: Some(20), free: Some(2), ..OomMessage::default() }
}

fn uncaught() -> OomMessage {
    OomMessage { number: 1, is_uncaught: true, ..OomMessage::default() }
}

fn events(story: &Story) -> Vec<&CudaOom> {
    let events = story.store.events.values();
    events
        .filter_map(|event| match event {
            LedgerEvent::CudaOom(oom) => Some(oom),
            _ => None,
        })
        .collect()
}

fn reason_after(message: &[OomMessage], seconds: f64, exit_code: Option<i64>) -> Option<ExitReason> {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    message.iter().for_each(|message| oom(&mut story, 'a', 10.0, message.clone()));
    story.end('a', 10.0 + seconds, exit_code);
    for later in [0.1, 4.0, 20.0] {
        story.settle(10.0 + seconds + later);
    }
    story.reasons('a')[0]
}

#[test]
fn exit_with_an_error_just_after_one_is_explained() {
    let caught = [observed()];
    assert_eq!(reason_after(&caught, 1.0, Some(1)), Some(ExitReason::CudaOom));
    assert_eq!(reason_after(&caught, 6.0, Some(1)), Some(ExitReason::Error));
    // a launcher stops the other ranks first
    let ended = [observed(), uncaught()];
    assert_eq!(reason_after(&ended, 60.0, Some(1)), Some(ExitReason::CudaOom));
    assert_eq!(reason_after(&ended, 121.0, Some(1)), Some(ExitReason::Error));
    assert_eq!(reason_after(&[], 1.0, Some(1)), Some(ExitReason::Error));
}

#[test]
fn exit_waits_for_the_last_messages_of_a_connected_process() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.reconciler.set_connected([id('a')].into());
    story.end('a', 10.0, Some(1));
    story.settle(10.5);
    assert_eq!(story.reasons('a'), [None]);
    oom(&mut story, 'a', 10.0, uncaught());
    story.reconciler.set_connected([].into());
    story.settle(10.6);
    assert_eq!(story.reasons('a'), [Some(ExitReason::CudaOom)]);
    // a process that stays connected delays it for a moment only
    story.event('b', 20.1, EventKind::Started);
    story.reconciler.set_connected([id('b')].into());
    story.end('b', 30.0, Some(1));
    story.settle(31.0);
    assert_eq!(story.reasons('b'), [None]);
    story.settle(33.1);
    assert_eq!(story.reasons('b'), [Some(ExitReason::Error)]);
}

#[test]
fn exit_of_unknown_code_is_explained_by_an_uncaught_error_alone() {
    let ended = [observed(), uncaught()];
    assert_eq!(reason_after(&ended, 1.0, None), Some(ExitReason::CudaOom));
    assert_eq!(reason_after(&ended, 6.0, None), Some(ExitReason::Unknown));
    assert_eq!(reason_after(&[observed()], 1.0, None), Some(ExitReason::Unknown));
}

#[test]
fn other_ends_keep_their_reason() {
    let ended = [observed(), uncaught()];
    assert_eq!(reason_after(&ended, 1.0, Some(0)), Some(ExitReason::Completed));
    assert_eq!(reason_after(&ended, 1.0, Some(139)), Some(ExitReason::Signal));
    assert_eq!(reason_after(&ended, 1.0, KILLED), Some(ExitReason::Killed));
}

/// The reason of an exit so many seconds after an error in the log of its container.
fn reason_by_log(error: HostError, seconds: f64, exit_code: Option<i64>) -> Option<ExitReason> {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    in_log(&mut story, 10.0, error);
    story.end('a', 10.0 + seconds, exit_code);
    for later in [0.1, 4.0, 20.0] {
        story.settle(10.0 + seconds + later);
    }
    story.reasons('a')[0]
}

fn in_log(story: &mut Story, at: f64, error: HostError) {
    let errors = [(id('a'), vec![(story.at(at), error.into())])];
    story.reconciler.add_host_errors(story.at(at), errors.into());
    story.settle(at);
}

#[test]
fn error_in_the_log_that_is_not_of_gpu_memory_is_the_reason_of_an_error_or_a_crash() {
    use ExitReason::{Completed, Error, Killed, OwnLimit, Refused, Shm, Signal, Threads};
    let refused = HostError::Refused(RefusedMemory::Any);
    for (error, seconds, status, reason) in [
        (refused, 1.0, 1, Refused),
        (refused, 1.0, 134, Refused),
        (refused, 14.0, 1, Refused),
        (refused, 16.0, 1, Error),
        (refused, 1.0, 0, Completed),
        (refused, 1.0, 143, Signal),
        (refused, 1.0, 130, Signal),
        (refused, 1.0, 137, Killed),
        (HostError::OwnLimit(ProgramLimit::Node), 1.0, 133, OwnLimit),
        (HostError::Threads, 1.0, 130, Threads),
        (HostError::Shm, 1.0, 135, Shm),
        (HostError::Monitor(MemoryMonitor::Ray), 1.0, 1, Error),
    ] {
        assert_eq!(reason_by_log(error, seconds, Some(status)), Some(reason), "{error:?} {seconds} {status}");
    }
}

#[test]
fn exit_has_the_error_in_its_log_and_waits_until_that_is_read() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.reconciler.set_logs_being_read(Some([id('a')].into()));
    story.end('a', 10.0, Some(134));
    story.settle(15.0);
    assert_eq!(story.reasons('a'), [None]);
    let error = HostError::Monitor(MemoryMonitor::Dask);
    in_log(&mut story, 9.9, error);
    story.reconciler.set_logs_being_read(Some([].into()));
    story.settle(15.2);
    assert_eq!(story.reasons('a'), [Some(ExitReason::Signal)]);
    assert_eq!(story.exits('a')[0].log_error, Some(error.into()));
    // the next run has its own, and its log is being read too
    story.reconciler.set_logs_being_read(Some([id('a')].into()));
    story.event('a', 20.0, EventKind::Started);
    story.end('a', 21.0, Some(1));
    story.settle(40.0);
    assert_eq!((story.reasons('a')[1], story.exits('a')[1].log_error), (Some(ExitReason::Error), None));
    story.event('a', 41.0, EventKind::Started);
    in_log(&mut story, 42.0, error);
    story.end('a', 43.0, Some(1));
    story.event('a', 43.1, EventKind::Started);
    story.settle(60.0);
    assert_eq!(story.exits('a')[2].log_error, Some(error.into()));
}

#[test]
fn kill_of_a_worker_is_no_refusal_whatever_the_log_says() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.event('a', 0.1, super::story::running(70));
    story.kill_in('a', 9.0, 71);
    in_log(&mut story, 9.5, HostError::Refused(RefusedMemory::Any));
    story.end('a', 10.0, Some(1));
    for at in [10.1, 14.0, 30.0] {
        story.settle(at);
    }
    assert_eq!(story.reasons('a'), [Some(ExitReason::Error)]);
    assert_eq!(story.exits('a')[0].may_be.len(), 1);
}

#[test]
fn event_has_its_run_its_gpu_and_who_held_it() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    let user = |letter: char, bytes| GpuUser {
        container: Some(id(letter)),
        name: letter.to_string().into(),
        bytes: Some(bytes),
    };
    let holder = |name: &str, own, bytes| GpuHolder {
        name: name.into(),
        own,
        bytes: Some(bytes),
        earlier_bytes: None,
    };
    story.gpus = vec![
        GpuUse { index: "0".into(), uuid: "GPU-A".into(), ..GpuUse::default() },
        GpuUse {
            index: "1".into(),
            uuid: "GPU-B".into(),
            holders: vec![user('b', 30), user('a', 10)],
            processes: [(PROCESS.pid, 'a', 3), (71, 'a', 2), (72, 'a', 5), (73, 'b', 30)]
                .map(|(pid, letter, bytes)| GpuProcessUse {
                    id: crate::host::process::ProcessId { pid, ..PROCESS },
                    container: Some(id(letter)),
                    bytes: Some(bytes),
                })
                .into(),
        },
    ];
    story.cycle(1.0, &[('a', Some(0.1))], &DOCKER_UP);
    oom(&mut story, 'a', 2.0, observed());
    oom(&mut story, 'a', 2.1, uncaught());
    let [event] = events(&story)[..] else { panic!("one event: {:?}", events(&story)) };
    assert_eq!((&*event.gpu, &*event.gpu_uuid, event.rank), ("1", "GPU-B", Some(1)));
    assert_eq!(event.holders, [holder("b", false, 30), holder("a", true, 10)]);
    let others = [(72, 5), (71, 2)].map(|(pid, bytes)| OwnGpuProcess { pid, bytes });
    assert_eq!(event.own_processes, others);
    assert_eq!(event.uncaught, Some(true));
    assert_eq!((event.tried_bytes, event.free_bytes, event.total_bytes), (Some(20), Some(2), None));
    assert_eq!(&*event.subject.identity.name, "a");
    assert!(event.subject.started.is_some());
    let figures = super::figures(&story.store.totals(), "a");
    assert_eq!((figures.cuda_ooms, figures.last_cuda_oom.is_some()), ([Some(1), None], true));
    // the counts are those of before after a restart
    story.restart(3.0);
    oom(&mut story, 'a', 3.0, observed());
    assert_eq!(super::figures(&story.store.totals(), "a").cuda_ooms, [Some(2), None]);
}

#[test]
fn error_is_settled_when_nothing_more_can_be_reported() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    oom(&mut story, 'a', 1.0, observed());
    assert_eq!(events(&story)[0].uncaught, None, "it may unwind yet");
    story.settle(12.0);
    assert_eq!(events(&story)[0].uncaught, Some(false));
    // a process may save its state for long before it ends
    oom(&mut story, 'a', 30.0, uncaught());
    assert_eq!((events(&story).len(), events(&story)[0].uncaught), (1, Some(true)));
    assert_eq!(super::figures(&story.store.totals(), "a").cuda_ooms, [Some(1), None], "it is the same error");
    // an end without a known error is not counted: its error was, when it happened
    oom(&mut story, 'a', 31.0, OomMessage { number: 2, ..uncaught() });
    let found: Vec<_> = events(&story).iter().map(|event| (event.tried_bytes, event.uncaught)).collect();
    assert_eq!(found, [(Some(20), Some(true))]);
    assert_eq!(super::figures(&story.store.totals(), "a").cuda_ooms, [Some(1), None]);
    // and one that was pending when memledger stopped
    oom(&mut story, 'a', 32.0, OomMessage { number: 3, ..observed() });
    story.restart(33.0);
    story.settle(33.0);
    assert!(events(&story).iter().all(|event| event.uncaught.is_some()));
}

#[test]
fn snapshot_that_is_written_later_is_named_by_its_error() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    let written =
        |number, path: &str| OomMessage { number, snapshot: Some(path.into()), ..OomMessage::default() };
    oom(&mut story, 'a', 1.0, observed());
    oom(&mut story, 'a', 2.0, written(1, "/tmp/one"));
    // it was settled meanwhile
    oom(&mut story, 'a', 20.0, OomMessage { number: 2, ..observed() });
    story.settle(40.0);
    oom(&mut story, 'a', 41.0, written(2, "/tmp/two"));
    oom(&mut story, 'a', 42.0, written(3, "/tmp/of-no-event"));
    story.settle(60.0);
    let found: Vec<_> = events(&story).iter().map(|oom| (oom.uncaught, oom.snapshot.to_string())).collect();
    assert_eq!(found, [(Some(false), "/tmp/one".to_owned()), (Some(false), "/tmp/two".to_owned())]);
    assert_eq!(super::figures(&story.store.totals(), "a").cuda_ooms, [Some(2), None]);
}

#[test]
fn holders_are_those_of_a_reading_before_the_error() {
    let mut story = Story::new();
    let gpu = |bytes| GpuUse {
        index: "0".into(),
        uuid: "b".into(),
        holders: vec![GpuUser { container: Some(id('a')), name: "a".into(), bytes: Some(bytes) }],
        ..GpuUse::default()
    };
    // the ledger waits for its disk from 2.1 to 5.1
    let mut reports = Vec::new();
    for (at, bytes) in [(1.0, 10), (2.0, 20), (3.0, 0), (4.0, 0), (5.0, 0), (6.0, 0)] {
        story.gpus = vec![gpu(bytes)];
        reports.push(story.report(at, &[('a', Some(0.1))], &DOCKER_UP, |letter| letter.to_string()));
    }
    for report in &reports[..2] {
        story.reconciler.apply_cycle(report.at, report);
    }
    story.reconciler.apply_cycles_and_events(story.at(5.1), &reports[2..5], &[]);
    // and the message is read a step later, as on a busy host
    story.reconciler.apply_cycle(reports[5].at, &reports[5]);
    // it waited in its process, which has ended since
    let reported = ReportedOom {
        at: story.at(2.5),
        process: Some(PROCESS),
        container: id('a'),
        rank: Some(0),
        device: Some("b".into()),
        skipped: 4,
        errors: 5,
        is_event: true,
        message: observed(),
    };
    story.reconciler.add_cuda_ooms(story.at(6.1), vec![reported]);
    story.settle(6.1);
    let [event] = events(&story)[..] else { panic!("one event") };
    assert_eq!((event.holders[0].bytes, event.skipped), (Some(20), 4));
    assert!((event.at - story.at(2.5).unix_seconds()).abs() < 1e-3, "{}", event.at);
    assert_eq!(super::figures(&story.store.totals(), "a").cuda_ooms, [Some(5), None]);
}

#[test]
fn gpu_is_found_by_its_process_only_where_one_is_possible() {
    let mut story = Story::new();
    let gpu = |index: &str, uuid: &str| GpuUse {
        index: index.into(),
        uuid: uuid.into(),
        processes: vec![GpuProcessUse { id: PROCESS, container: Some(id('a')), bytes: None }],
        ..GpuUse::default()
    };
    // ROCm's own UUIDs are not the driver's
    story.gpus = vec![gpu("0", "x")];
    story.cycle(1.0, &[('a', Some(0.1))], &DOCKER_UP);
    oom(&mut story, 'a', 2.0, observed());
    story.gpus = vec![gpu("0", "x"), gpu("1", "y")];
    story.cycle(3.0, &[('a', Some(0.1))], &DOCKER_UP);
    oom(&mut story, 'a', 4.0, observed());
    let found: Vec<_> = events(&story).iter().map(|event| event.gpu.to_string()).collect();
    assert_eq!(found, ["0", ""]);
}

#[test]
fn record_of_the_run_has_errors_of_its_last_second() {
    let mut story = Story::new();
    story.event('a', 0.1, EventKind::Started);
    story.cycle(1.0, &[('a', Some(0.1))], &DOCKER_UP);
    oom(&mut story, 'a', 1.5, observed());
    story.end('a', 1.6, Some(1));
    story.settle(2.0);
    assert_eq!(story.run_record().torch_ooms, Some(1));
}

#[test]
fn holders_have_what_they_held_some_minutes_before() {
    let mut story = Story::new();
    let gpu = |neighbour: Option<u64>| GpuUse {
        index: "0".into(),
        uuid: "b".into(),
        holders: [('a', Some(10)), ('n', neighbour)]
            .into_iter()
            .filter(|(_, bytes)| bytes.is_some())
            .map(|(letter, bytes)| GpuUser {
                container: Some(id(letter)),
                name: letter.to_string().into(),
                bytes,
            })
            .collect(),
        ..GpuUse::default()
    };
    let reading = |story: &mut Story, at: f64, neighbour| {
        story.gpus = vec![gpu(neighbour)];
        story.cycle(at, &[('a', Some(0.1))], &DOCKER_UP);
    };
    reading(&mut story, 1.0, None);
    reading(&mut story, 30.0, Some(5));
    oom(&mut story, 'a', 31.0, observed());
    reading(&mut story, 90.0, Some(40));
    oom(&mut story, 'a', 91.0, observed());
    let held = |event: &CudaOom| {
        event.holders.iter().map(|held| (held.bytes, held.earlier_bytes)).collect::<Vec<_>>()
    };
    let found = events(&story);
    assert_eq!(held(found[0]), [(Some(10), None), (Some(5), None)], "half a minute says nothing");
    assert_eq!(held(found[1]), [(Some(10), Some(10)), (Some(40), Some(0))]);
}

#[test]
fn error_in_the_log_explains_an_exit_only_where_no_process_reports() {
    let reason_after = |reports: bool, seconds: f64| {
        let mut story = Story::new();
        story.event('a', 0.1, EventKind::Started);
        if reports {
            oom(&mut story, 'a', 1.0, observed());
        }
        let logged = ReportedOom {
            at: story.at(30.0),
            process: None,
            container: id('a'),
            rank: None,
            device: None,
            skipped: 0,
            errors: 1,
            is_event: true,
            message: OomMessage { tried: Some(20), framework: Some("torch"), ..OomMessage::default() },
        };
        story.reconciler.add_cuda_ooms(story.at(30.0), vec![logged]);
        story.end('a', 30.0 + seconds, Some(1));
        for later in [0.1, 4.0, 20.0] {
            story.settle(30.0 + seconds + later);
        }
        let counted = super::figures(&story.store.totals(), "a").cuda_ooms;
        assert_eq!(counted, [reports.then_some(1), Some(1)], "never added to what processes reported");
        story.reasons('a')[0]
    };
    assert_eq!(reason_after(false, 14.0), Some(ExitReason::CudaOom));
    assert_eq!(reason_after(false, 16.0), Some(ExitReason::Error));
    assert_eq!(reason_after(true, 14.0), Some(ExitReason::Error));
}
