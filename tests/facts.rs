//! The events that the ledger gets about containers of a real Docker engine, through the library: each once, in order.

use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::Timestamp;
use memledger::config::{Filter, RuntimeEndpoint};
use memledger::discover::docker::{DockerResumeState, follow};
use memledger::discover::{ConnectionState, ContainerId, EventKind, RuntimeEvent, RuntimeKind, RuntimeState};

use crate::support::docker::{Engine, PrivateEngine, ReadOnlyProxy, Socket, signal, unique};
use crate::support::podman::Podman;
use crate::support::processes::ProcessRef;
use crate::support::{eventually, eventually_true};

/// A followed runtime, and its events so far.
struct Followed {
    tokio: Option<tokio::runtime::Runtime>,
    source: Arc<RuntimeState>,
    events: Mutex<Vec<RuntimeEvent>>,
}

impl Followed {
    /// Follows the engine at a socket, resuming from `memory`.
    fn start(socket: &Path, filter: Filter, memory: DockerResumeState) -> Self {
        Self::follow(RuntimeKind::Docker, socket, filter, memory)
    }

    fn follow(runtime: RuntimeKind, socket: &Path, filter: Filter, memory: DockerResumeState) -> Self {
        let source = RuntimeState::new(runtime, Arc::default());
        let endpoint = RuntimeEndpoint { runtime, socket: socket.to_path_buf() };
        let tokio = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let tokio = tokio.expect("a runtime");
        tokio.spawn(follow(endpoint, filter, Arc::clone(&source), memory));
        Self { tokio: Some(tokio), source, events: Mutex::default() }
    }

    /// Like [`Followed::start`] without a resume state; waits for the connection.
    fn new(engine: &Engine) -> Self {
        let this = Self::start(&engine.socket, Filter::default(), DockerResumeState::default());
        this.wait_for(ConnectionState::Up);
        this
    }

    fn wait_for(&self, link: ConnectionState) {
        eventually_true(&format!("{link:?}"), || self.source.lock().connection == link);
    }

    /// Returns the events of one container so far.
    fn of(&self, id: &str) -> Vec<RuntimeEvent> {
        let mut events = self.events.lock().expect("no holder panics");
        events.extend(self.source.drain_events());
        events.iter().filter(|runtime_event| runtime_event.id.as_str() == id).cloned().collect()
    }

    /// Returns the events of one container, once so many of its runs have ended.
    fn ended_runs(&self, id: &str, runs: usize) -> Vec<RuntimeEvent> {
        eventually("the end", || {
            let runtime_events = self.of(id);
            let ends = runtime_events
                .iter()
                .filter(|runtime_event| matches!(runtime_event.what, EventKind::Ended { .. }))
                .count();
            if ends >= runs { Ok(runtime_events) } else { Err(format!("{runtime_events:?}")) }
        })
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        if let Some(tokio) = self.tokio.take() {
            tokio.shutdown_background();
        }
    }
}

/// Returns the last end; a list may repeat afterwards that the container exists.
fn last_end(runtime_events: &[RuntimeEvent]) -> &RuntimeEvent {
    let mut newest_first = runtime_events.iter().rev();
    newest_first.find(|event| matches!(event.what, EventKind::Ended { .. })).expect("an end")
}

/// Returns the kinds of events, without those that only repeat a list: `Running`, and `Exists` after the first event.
fn kinds(runtime_events: &[RuntimeEvent]) -> Vec<EventKind> {
    let kinds = runtime_events.iter().map(|runtime_event| runtime_event.what.clone()).enumerate();
    let events = kinds.filter(|(number, what)| match what {
        EventKind::Running { .. } => false,
        EventKind::Exists => *number == 0,
        _ => true,
    });
    events.map(|(_, what)| what).collect()
}

fn name(runtime_event: &RuntimeEvent) -> &str {
    runtime_event.named.as_ref().map_or("", |named| &*named.name)
}

fn ended(exit_code: i64) -> EventKind {
    EventKind::Ended { exit_code: Some(exit_code), oom_flag: None }
}

fn stop_request(signal: i32) -> EventKind {
    EventKind::SignalRequested { signal: Some(signal) }
}

fn seconds(time: Timestamp) -> f64 {
    time.as_nanosecond() as f64 / 1e9
}

fn now() -> f64 {
    seconds(Timestamp::now())
}

#[test]
fn short_lived_container_is_reported_with_name_and_exit_code() {
    let Some(engine) = Engine::shared() else { return };
    let followed = Followed::new(&engine);
    let began = now();
    for code in [0, 3] {
        let container = engine.run(&unique("blink"), &["--rm"], &["sh", "-c", &format!("exit {code}")]);
        let runtime_events = followed.ended_runs(&container.id, 1);
        assert_eq!(kinds(&runtime_events), [EventKind::Exists, EventKind::Started, ended(code)]);
        assert!(
            runtime_events.iter().all(|runtime_event| name(runtime_event) == container.name),
            "{runtime_events:?}"
        );
        assert_eq!(&*runtime_events[0].named.as_ref().unwrap().image, engine.image);
        assert!(
            began < runtime_events[0].at
                && runtime_events[0].at < runtime_events.last().unwrap().at
                && runtime_events.last().unwrap().at < now()
        );
    }
}

#[test]
fn reports_pid_exact_start_new_name_and_stop_request() {
    let Some(engine) = Engine::shared() else { return };
    let followed = Followed::new(&engine);
    let program = "trap 'exit 143' TERM; echo ready; while :; do sleep 0.1; done";
    let container = engine.run(&unique("stop"), &[], &["sh", "-c", program]);
    // a first process that has not set its trap yet ignores the signal
    eventually_true("its trap", || container.docker(&["logs"]) == "ready");
    let running = RuntimeEvent {
        at: seconds(container.started()),
        what: EventKind::Running { pid: Some(container.pid()) },
        ..eventually("its start", || followed.of(&container.id).pop().ok_or_else(String::new))
    };
    eventually("its pid", || {
        let runtime_events = followed.of(&container.id);
        if runtime_events.contains(&running) { Ok(()) } else { Err(format!("{runtime_events:?}")) }
    });
    let renamed = format!("{}-new", container.name);
    engine.docker(&["rename", &container.id, &renamed]);
    container.docker(&["stop", "-t", "30"]);
    container.docker(&["start"]);
    container.docker(&["kill"]);
    let runtime_events = followed.ended_runs(&container.id, 2);
    let stopped = EventKind::SignalRequested { signal: None };
    let first =
        [EventKind::Exists, EventKind::Started, EventKind::Renamed, stop_request(15), ended(143), stopped];
    assert_eq!(
        kinds(&runtime_events),
        [&first[..], &[EventKind::Started, stop_request(9), ended(137)]].concat()
    );
    let new_name =
        runtime_events.iter().position(|runtime_event| runtime_event.what == EventKind::Renamed).unwrap();
    assert!(
        runtime_events[new_name..].iter().all(|runtime_event| name(runtime_event) == renamed),
        "{runtime_events:?}"
    );
}

#[test]
fn oom_kill_is_reported_with_the_runtimes_flag() {
    let Some(engine) = Engine::shared() else { return };
    let followed = Followed::new(&engine);
    // the runtime listens for kills only after the container has started, and may lose that of one that has ended
    let script = "while [ ! -e /go ]; do sleep 0.1; done
        dd if=/dev/zero of=/dev/null bs=64M count=1
        while [ ! -e /end ]; do sleep 0.1; done
        exit 137";
    let flags = ["--memory=32m", "--memory-swap=32m"];
    let container = engine.run(&unique("oom"), &flags, &["sh", "-c", script]);
    let release = |what: &str| {
        std::fs::write(format!("/proc/{}/root/{what}", container.pid()), "")
            .expect("a file in the container");
    };
    release("go");
    eventually("the kill", || {
        let runtime_events = followed.of(&container.id);
        let is_kill = |runtime_event: &RuntimeEvent| runtime_event.what == EventKind::Oom;
        if runtime_events.iter().any(is_kill) { Ok(()) } else { Err(format!("{runtime_events:?}")) }
    });
    release("end");
    let runtime_events = followed.ended_runs(&container.id, 1);
    assert!(
        runtime_events.iter().any(|runtime_event| runtime_event.what == ended(137)),
        "{runtime_events:?}"
    );
}

#[test]
fn container_excluded_by_label_filter_is_reported_and_marked() {
    let Some(engine) = Engine::shared() else { return };
    let prefix = unique("labels");
    let filter = Filter { labels: vec![("keep".into(), Some(prefix.clone()))], ..Filter::default() };
    let before = engine.create(&format!("{prefix}-before"), &[], &["true"]);
    let followed = Followed::start(&engine.socket, filter, DockerResumeState::default());
    followed.wait_for(ConnectionState::Up);
    let keep = format!("--label=keep={prefix}");
    let kept = engine.run(&format!("{prefix}-kept"), &["--rm", &keep], &["true"]);
    let other = engine.run(&format!("{prefix}-other"), &["--rm"], &["true"]);
    for (container, matches) in [(&kept, true), (&other, false)] {
        let runtime_events = followed.ended_runs(&container.id, 1);
        assert!(
            runtime_events
                .iter()
                .all(|runtime_event| runtime_event.named.as_ref().unwrap().labels_match == matches),
            "{runtime_events:?}"
        );
    }
    let runtime_events = followed.of(&before.id);
    assert_eq!(
        kinds(&runtime_events),
        [EventKind::Exists],
        "a container that never ran has its name from the list"
    );
    assert_eq!(
        (name(&runtime_events[0]), runtime_events[0].named.as_ref().unwrap().labels_match),
        (before.name.as_str(), false)
    );
}

/// Starts an engine for this test: it keeps 256 events, and other tests would displace them.
fn private_engine() -> Option<PrivateEngine> {
    let shared = Engine::shared()?;
    let mut private = PrivateEngine::new();
    private.start();
    private.load_from(&shared);
    Some(private)
}

#[test]
fn events_before_the_start_are_reported_from_the_last_known_one() {
    let Some(private) = private_engine() else { return };
    let engine = &private.engine;
    let code = |code: u8| ["sh".to_owned(), "-c".to_owned(), format!("exit {code}")];
    let run = |what: &str, number: u8| {
        let command = code(number);
        let container = engine.run(&unique(what), &[], &[&command[0], &command[1], &command[2]]);
        eventually_true("its end", || container.inspect("{{.State.Running}}") == "false");
        container
    };
    let since = now();
    let open = engine.run(&unique("open"), &[], &["sleep", "1000"]);
    open.docker(&["kill"]);
    let gone = run("gone", 5);
    engine.docker(&["rm", &gone.id]);
    let there = run("there", 6);
    let runs = engine.run(&unique("runs"), &[], &["sleep", "1000"]);
    let memory = DockerResumeState::new(Some(since), HashSet::from([ContainerId::new(&open.id)]));
    let followed = Followed::start(&engine.socket, Filter::default(), memory);
    let last = EventKind::Running { pid: Some(runs.pid()) };
    eventually("what runs, after what was", || {
        let runtime_events = followed.of(&runs.id);
        if runtime_events.last().is_some_and(|runtime_event| runtime_event.what == last) {
            Ok(())
        } else {
            Err(format!("{runtime_events:?}"))
        }
    });
    let whole = |id: &str| kinds(&followed.of(id));
    let listed = [EventKind::Exists, EventKind::Started];
    assert_eq!(whole(&open.id), [&listed[..], &[stop_request(9), ended(137)]].concat());
    assert_eq!(whole(&gone.id), [EventKind::Exists, EventKind::Started, ended(5)]);
    assert_eq!(whole(&there.id), [&listed[..], &[ended(6)]].concat());
    assert_eq!(whole(&runs.id), listed);
}

#[test]
fn hanging_inspect_does_not_block_events() {
    let Some(engine) = Engine::shared() else { return };
    // longer than the time between two lists, and shorter than the timeout
    let stuck = engine.create(&unique("stuck"), &[], &["sleep", "1.5"]);
    let other = engine.create(&unique("other"), &[], &["true"]);
    let proxy = ReadOnlyProxy::stalling(&engine, &format!("{}/json", stuck.id));
    let followed = Followed::start(&proxy.socket.path, Filter::default(), DockerResumeState::default());
    followed.wait_for(ConnectionState::Up);
    // Events that waited for the inspect would come after it was given up, each time. On a busy machine the containers may take
    // longer than its timeout, too, so one of several times is enough.
    let came_at_once = |runs: usize| {
        let before = proxy.cancelled().len();
        engine.docker(&["start", &stuck.id, &other.id]);
        for container in [&stuck, &other] {
            followed.ended_runs(&container.id, runs);
        }
        let at_once = proxy.cancelled().len() == before;
        eventually_true("the end of the inspect", || proxy.cancelled().len() > before);
        at_once
    };
    assert!((1..=5).any(came_at_once), "{:?}", proxy.cancelled());
    let first: Vec<_> = kinds(&followed.of(&stuck.id)).into_iter().take(3).collect();
    assert_eq!(first, [EventKind::Exists, EventKind::Started, ended(0)]);
    assert_eq!(followed.source.lock().running.get(&ContainerId::new(&stuck.id)), None);
}

/// Copies bytes between two sockets until one side closes; a stream of events only for so long.
fn relay_events_for(time: Duration, mut client: UnixStream, upstream: &Path) -> std::io::Result<()> {
    let mut engine = UnixStream::connect(upstream)?;
    let mut head = [0; 4096];
    let length = client.read(&mut head)?; // a request is short, and sent at once
    engine.write_all(&head[..length])?;
    if String::from_utf8_lossy(&head[..length]).contains("/events?") {
        client.set_read_timeout(Some(time))?; // the client sends nothing after its request
    }
    let (mut from, mut to) = (engine.try_clone()?, client.try_clone()?);
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Both);
    });
    let _ = std::io::copy(&mut client, &mut engine);
    engine.shutdown(Shutdown::Both)?;
    client.shutdown(Shutdown::Both)
}

#[test]
fn events_over_a_repeatedly_broken_connection_are_reported_once() {
    let Some(private) = private_engine() else { return };
    let engine = &private.engine;
    let upstream = engine.socket.clone();
    let socket = Socket::serving(move |client| {
        let _ = relay_events_for(Duration::from_millis(700), client, &upstream);
    });
    let followed = Followed::start(&socket.path, Filter::default(), DockerResumeState::default());
    followed.wait_for(ConnectionState::Up);
    let (mut breaks, mut up, mut containers) = (0, true, Vec::new());
    while breaks < 4 {
        let code = containers.len() % 10;
        let command = ["sh", "-c", &format!("exit {code}")];
        containers.push(engine.run(&unique("breaks"), &[], &command));
        let now = followed.source.lock().connection == ConnectionState::Up;
        breaks += usize::from(up && !now);
        up = now;
    }
    for (number, container) in containers.iter().enumerate() {
        let runtime_events = followed.ended_runs(&container.id, 1);
        let mut kinds = kinds(&runtime_events);
        kinds.retain(|what| *what != EventKind::Exists); // repeated by every list
        assert_eq!(kinds, [EventKind::Started, ended(number as i64 % 10)], "{runtime_events:?}");
    }
}

/// As [`relay_events_for`], with a stream in which every event is lost.
fn relay_without_events(mut client: UnixStream, upstream: &Path) -> std::io::Result<()> {
    let mut head = [0; 4096];
    let length = client.read(&mut head)?;
    let mut engine = UnixStream::connect(upstream)?;
    if String::from_utf8_lossy(&head[..length]).contains("/events?") {
        client.write_all(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n",
        )?;
        let _ = client.read(&mut head)?; // until the client closes it
        return Ok(());
    }
    engine.write_all(&head[..length])?;
    std::io::copy(&mut engine, &mut client)?;
    client.shutdown(Shutdown::Both)
}

#[test]
fn lists_restore_lost_starts_ends_and_restarts() {
    let Some(engine) = Engine::shared() else { return };
    let upstream = engine.socket.clone();
    let socket = Socket::serving(move |client| {
        let _ = relay_without_events(client, &upstream);
    });
    let memory = DockerResumeState::default().with_list_interval(Duration::from_secs(1));
    let followed = Followed::start(&socket.path, Filter::default(), memory);
    followed.wait_for(ConnectionState::Up);
    let container = engine.run(&unique("unheard"), &[], &["sleep", "1000"]);
    let runs = |pid| {
        eventually("its run", || {
            let runtime_events = followed.of(&container.id);
            let is_run = |event: &RuntimeEvent| event.what == EventKind::Running { pid: Some(pid) };
            runtime_events.iter().find(|event| is_run(event)).cloned().ok_or(format!("{runtime_events:?}"))
        })
    };
    let first = runs(container.pid());
    assert_eq!(name(&first), container.name);
    container.docker(&["restart", "--time=0"]);
    let second = runs(container.pid());
    assert!(second.at > first.at, "{second:?}");
    // a list within the restart may have shown the end of the first run
    let ends = |runtime_events: Vec<RuntimeEvent>| {
        runtime_events
            .into_iter()
            .filter(|event| matches!(event.what, EventKind::Ended { .. }))
            .collect::<Vec<_>>()
    };
    let before = ends(followed.of(&container.id)).len();
    container.docker(&["kill"]);
    let end = eventually("its end", || {
        let found = ends(followed.of(&container.id));
        found.get(before).cloned().ok_or(format!("{found:?}"))
    });
    assert_eq!(end.what, EventKind::Ended { exit_code: Some(137), oom_flag: Some(false) });
    eventually_true("its end", || {
        !followed.source.lock().running.contains_key(&ContainerId::new(&container.id))
    });
}

#[test]
fn exit_while_daemon_or_memledger_is_down_is_reported_once_with_exit_code() {
    let Some(mut private) = private_engine() else { return };
    let engine = private.engine.clone();
    let start = |what: &str| {
        engine.run(&unique(what), &[], &["sh", "-c", "trap 'exit 7' TERM; while :; do sleep 0.1; done"])
    };
    let (ends, stays) = (start("ends"), start("stays"));
    let first = ProcessRef::of(ends.pid()).expect("its first process");
    let stays_running = EventKind::Running { pid: Some(stays.pid()) };
    let removed = "f".repeat(64);
    let open = [&ends.id, &stays.id, &removed].map(|id| ContainerId::new(id));
    let followed = Followed::start(
        &engine.socket,
        Filter::default(),
        DockerResumeState::new(Some(now()), HashSet::from(open)),
    );
    let runtime_events = followed.ended_runs(&removed, 1);
    assert_eq!(
        runtime_events[0].what,
        EventKind::Ended { exit_code: None, oom_flag: None },
        "the engine does not know it any more"
    );
    eventually_true("what runs", || {
        followed.of(&stays.id).iter().any(|runtime_event| runtime_event.what == stays_running)
    });

    private.stop();
    followed.wait_for(ConnectionState::Down);
    let away = now();
    signal("TERM", first.pid);
    eventually_true("its end", || first.has_ended());
    private.start();
    let runtime_events = followed.ended_runs(&ends.id, 1);
    let end = last_end(&runtime_events);
    assert_eq!(name(end), ends.name);
    assert!(end.at > away - 1.0 && end.at < now(), "{} {end:?}", away);
    let EventKind::Ended { exit_code, .. } = end.what else { panic!("{end:?}") };
    // the engine reports 255 until it has queried the container's shim, and permanently if the shim has ended by then
    assert!(matches!(exit_code, Some(7 | 255)), "{exit_code:?}");

    // the other container is reported as running again, and its exit by its event
    stays.docker(&["kill"]);
    let runtime_events = followed.ended_runs(&stays.id, 1);
    assert_eq!(last_end(&runtime_events).what, ended(137));
    for id in [&ends.id, &stays.id] {
        let ends = followed
            .of(id)
            .into_iter()
            .filter(|runtime_event| matches!(runtime_event.what, EventKind::Ended { .. }));
        assert_eq!(ends.count(), 1);
    }
}

#[test]
fn podman_events_are_reported_alike() {
    let Some(podman) = Podman::start() else { return };
    let since = now();
    let before = podman.run("before", &["--rm"], "0");
    let socket = podman.socket();
    let memory = DockerResumeState::new(Some(since), HashSet::new());
    let followed = Followed::follow(RuntimeKind::Podman, Path::new(&socket), Filter::default(), memory);
    followed.wait_for(ConnectionState::Up);
    let runtime_events = followed.ended_runs(&before, 1);
    assert_eq!(
        kinds(&runtime_events),
        [EventKind::Exists, EventKind::Started, ended(0)],
        "from before the start"
    );
    assert!(
        runtime_events
            .iter()
            .all(|runtime_event| runtime_event.runtime == RuntimeKind::Podman
                && name(runtime_event) == "before"),
        "{runtime_events:?}"
    );

    let killed = podman.run("train", &[], "1000");
    let pid: u32 = podman.ok(&["inspect", "-f", "{{.State.Pid}}", &killed]).parse().expect("a pid");
    let running = EventKind::Running { pid: Some(pid) };
    eventually_true("its pid", || {
        followed.of(&killed).iter().any(|runtime_event| runtime_event.what == running)
    });
    podman.ok(&["rename", "train", "train-new"]);
    podman.ok(&["kill", &killed]);
    let runtime_events = followed.ended_runs(&killed, 1);
    let unnamed = EventKind::SignalRequested { signal: None };
    assert_eq!(
        kinds(&runtime_events),
        [EventKind::Exists, EventKind::Started, EventKind::Renamed, unnamed, ended(137)]
    );
    assert_eq!(name(runtime_events.last().unwrap()), "train-new");
}
