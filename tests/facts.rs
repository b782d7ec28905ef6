//! What the ledger is told of real containers of a real Docker engine, through the library: every fact, in order, once.

use std::collections::HashSet;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::Timestamp;
use memledger::config::{Endpoint, Filter};
use memledger::discover::docker::{Memory, follow};
use memledger::discover::{ContainerId, Fact, Link, Source, What};

use crate::podman::Podman;
use crate::support::docker::{Engine, PrivateEngine, ReadOnlyProxy, Socket, signal, unique};
use crate::support::{eventually, eventually_true};

/// A runtime that is followed, and all that it told so far.
struct Followed {
    tokio: Option<tokio::runtime::Runtime>,
    source: Arc<Source>,
    told: Mutex<Vec<Fact>>,
}

impl Followed {
    /// Follows the engine at a socket, with what the ledger remembered.
    fn start(socket: &Path, filter: Filter, memory: Memory) -> Self {
        Self::follow("docker", socket, filter, memory)
    }

    fn follow(runtime: &'static str, socket: &Path, filter: Filter, memory: Memory) -> Self {
        let source = Source::new(runtime, Arc::default());
        let endpoint = Endpoint { runtime, socket: socket.to_path_buf() };
        let tokio = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let tokio = tokio.expect("a runtime");
        tokio.spawn(follow(endpoint, filter, Arc::clone(&source), memory));
        Self { tokio: Some(tokio), source, told: Mutex::default() }
    }

    /// As [`Followed::start`] without memory, and connected.
    fn new(engine: &Engine) -> Self {
        let this = Self::start(&engine.socket, Filter::default(), Memory::default());
        this.is(Link::Up);
        this
    }

    fn is(&self, link: Link) {
        eventually_true(&format!("{link:?}"), || self.source.lock().link == link);
    }

    /// What was told of one container so far.
    fn of(&self, id: &str) -> Vec<Fact> {
        let mut told = self.told.lock().expect("no holder panics");
        told.extend(self.source.take_facts());
        told.iter().filter(|fact| fact.id.as_str() == id).cloned().collect()
    }

    /// What was told of one container, once so many of its runs are over.
    fn over(&self, id: &str, runs: usize) -> Vec<Fact> {
        eventually("the end", || {
            let facts = self.of(id);
            let ends = facts.iter().filter(|fact| matches!(fact.what, What::Ended { .. })).count();
            if ends >= runs { Ok(facts) } else { Err(format!("{facts:?}")) }
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

/// What the facts say, without what a list found and said too: that it exists, and runs with this pid.
fn whats(facts: &[Fact]) -> Vec<What> {
    let whats = facts.iter().map(|fact| fact.what.clone()).enumerate();
    let events = whats.filter(|(number, what)| match what {
        What::Running { .. } => false,
        What::Exists => *number == 0,
        _ => true,
    });
    events.map(|(_, what)| what).collect()
}

fn name(fact: &Fact) -> &str {
    fact.named.as_ref().map_or("", |named| &*named.name)
}

fn ended(exit_code: i64) -> What {
    What::Ended { exit_code: Some(exit_code), oom_flag: None }
}

fn asked(signal: i32) -> What {
    What::Asked { signal: Some(signal) }
}

fn seconds(time: Timestamp) -> f64 {
    time.as_nanosecond() as f64 / 1e9
}

fn now() -> f64 {
    seconds(Timestamp::now())
}

#[test]
fn a_container_that_lives_for_a_moment_is_told_with_its_name_and_its_exit_code() {
    let Some(engine) = Engine::shared() else { return };
    let followed = Followed::new(&engine);
    let began = now();
    for code in [0, 3] {
        let container = engine.run(&unique("blink"), &["--rm"], &["sh", "-c", &format!("exit {code}")]);
        let facts = followed.over(&container.id, 1);
        assert_eq!(whats(&facts), [What::Exists, What::Started, ended(code)]);
        assert!(facts.iter().all(|fact| name(fact) == container.name), "{facts:?}");
        assert_eq!(&*facts[0].named.as_ref().unwrap().image, engine.image);
        assert!(
            began < facts[0].at && facts[0].at < facts.last().unwrap().at && facts.last().unwrap().at < now()
        );
    }
}

#[test]
fn the_pid_and_the_exact_start_are_told_and_then_a_new_name_and_who_asked_for_its_end() {
    let Some(engine) = Engine::shared() else { return };
    let followed = Followed::new(&engine);
    let container =
        engine.run(&unique("stop"), &[], &["sh", "-c", "trap 'exit 143' TERM; while :; do sleep 0.1; done"]);
    let running = Fact {
        at: seconds(container.started()),
        what: What::Running { pid: Some(container.pid()) },
        ..eventually("its start", || followed.of(&container.id).pop().ok_or_else(String::new))
    };
    eventually("its pid", || {
        let facts = followed.of(&container.id);
        if facts.contains(&running) { Ok(()) } else { Err(format!("{facts:?}")) }
    });
    let renamed = format!("{}-new", container.name);
    engine.docker(&["rename", &container.id, &renamed]);
    container.docker(&["stop", "-t", "30"]);
    container.docker(&["start"]);
    container.docker(&["kill"]);
    let facts = followed.over(&container.id, 2);
    let stopped = What::Asked { signal: None };
    let first = [What::Exists, What::Started, What::Renamed, asked(15), ended(143), stopped];
    assert_eq!(whats(&facts), [&first[..], &[What::Started, asked(9), ended(137)]].concat());
    let new_name = facts.iter().position(|fact| fact.what == What::Renamed).unwrap();
    assert!(facts[new_name..].iter().all(|fact| name(fact) == renamed), "{facts:?}");
}

#[test]
fn a_container_that_runs_out_of_memory_is_told_with_the_runtimes_own_hint() {
    let Some(engine) = Engine::shared() else { return };
    let followed = Followed::new(&engine);
    // not at once: the runtime begins to listen for kills only when the container has started
    let dd = ["sh", "-c", "sleep 1; exec dd if=/dev/zero of=/dev/null bs=64M count=1"];
    let container = engine.run(&unique("oom"), &["--memory=32m", "--memory-swap=32m"], &dd);
    let facts = followed.over(&container.id, 1);
    assert_eq!(facts.last().unwrap().what, ended(137));
    if !crate::support::cgroups::is_v2() {
        assert!(facts.iter().any(|fact| fact.what == What::Oom), "{facts:?}"); // on v2 Docker loses some
    }
}

#[test]
fn what_the_filter_by_labels_leaves_out_is_told_and_marked() {
    let Some(engine) = Engine::shared() else { return };
    let prefix = unique("labels");
    let filter = Filter { labels: vec![("keep".into(), Some(prefix.clone()))], ..Filter::default() };
    let before = engine.create(&format!("{prefix}-before"), &[], &["true"]);
    let followed = Followed::start(&engine.socket, filter, Memory::default());
    followed.is(Link::Up);
    let keep = format!("--label=keep={prefix}");
    let kept = engine.run(&format!("{prefix}-kept"), &["--rm", &keep], &["true"]);
    let other = engine.run(&format!("{prefix}-other"), &["--rm"], &["true"]);
    for (container, matches) in [(&kept, true), (&other, false)] {
        let facts = followed.over(&container.id, 1);
        assert!(facts.iter().all(|fact| fact.named.as_ref().unwrap().labels_match == matches), "{facts:?}");
    }
    let facts = followed.of(&before.id);
    assert_eq!(whats(&facts), [What::Exists], "one that never ran has its name from the list");
    assert_eq!(
        (name(&facts[0]), facts[0].named.as_ref().unwrap().labels_match),
        (before.name.as_str(), false)
    );
}

/// An engine of the test's own: it remembers 256 events, and other tests would push ours out.
fn private() -> Option<PrivateEngine> {
    let shared = Engine::shared()?;
    let mut private = PrivateEngine::new();
    private.start();
    private.load_from(&shared);
    Some(private)
}

#[test]
fn what_happened_before_the_start_is_told_from_the_last_event_on() {
    let Some(private) = private() else { return };
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
    let memory = Memory::new(Some(since), HashSet::from([ContainerId::new(&open.id)]));
    let followed = Followed::start(&engine.socket, Filter::default(), memory);
    let last = What::Running { pid: Some(runs.pid()) };
    eventually("what runs, after what was", || {
        let facts = followed.of(&runs.id);
        if facts.last().is_some_and(|fact| fact.what == last) { Ok(()) } else { Err(format!("{facts:?}")) }
    });
    let whole = |id: &str| whats(&followed.of(id));
    let listed = [What::Exists, What::Started];
    assert_eq!(whole(&open.id), [&listed[..], &[asked(9), ended(137)]].concat());
    assert_eq!(whole(&gone.id), [What::Exists, What::Started, ended(5)]);
    assert_eq!(whole(&there.id), [&listed[..], &[ended(6)]].concat());
    assert_eq!(whole(&runs.id), listed);
}

#[test]
fn an_inspect_that_never_answers_does_not_hold_up_the_events() {
    let Some(engine) = Engine::shared() else { return };
    let stuck = engine.create(&unique("stuck"), &[], &["sleep", "1000"]);
    let proxy = ReadOnlyProxy::stalling(&engine, &format!("{}/json", stuck.id));
    let followed = Followed::start(&proxy.socket.path, Filter::default(), Memory::default());
    followed.is(Link::Up);
    stuck.docker(&["start"]);
    eventually_true("its start", || followed.of(&stuck.id).iter().any(|fact| fact.what == What::Started));
    let began = now();
    let other = engine.run(&unique("other"), &["--rm"], &["true"]);
    followed.over(&other.id, 1);
    stuck.docker(&["kill"]);
    let facts = followed.over(&stuck.id, 1);
    assert!(now() - began < 9.0, "before the inspect was given up");
    assert_eq!(whats(&facts), [What::Exists, What::Started, asked(9), ended(137)]);
    assert_eq!(followed.source.lock().running.get(&ContainerId::new(&stuck.id)), None);
}

/// Lets bytes flow between two sockets until one side closes, or for so long.
fn relay_for(time: Duration, mut client: UnixStream, upstream: &Path) -> std::io::Result<()> {
    let mut engine = UnixStream::connect(upstream)?;
    client.set_read_timeout(Some(time))?;
    let (mut from, mut to) = (engine.try_clone()?, client.try_clone()?);
    std::thread::spawn(move || std::io::copy(&mut from, &mut to));
    let _ = std::io::copy(&mut client, &mut engine); // the client says nothing for so long after its request
    engine.shutdown(Shutdown::Both)?;
    client.shutdown(Shutdown::Both)
}

#[test]
fn over_a_connection_that_breaks_again_and_again_everything_is_told_once() {
    let Some(private) = private() else { return };
    let engine = &private.engine;
    let upstream = engine.socket.clone();
    let socket = Socket::serving(move |client| {
        let _ = relay_for(Duration::from_millis(700), client, &upstream);
    });
    let followed = Followed::start(&socket.path, Filter::default(), Memory::default());
    followed.is(Link::Up);
    let (mut breaks, mut up, mut containers) = (0, true, Vec::new());
    while breaks < 4 {
        let code = containers.len() % 10;
        let command = ["sh", "-c", &format!("exit {code}")];
        containers.push(engine.run(&unique("breaks"), &[], &command));
        let now = followed.source.lock().link == Link::Up;
        breaks += usize::from(up && !now);
        up = now;
    }
    for (number, container) in containers.iter().enumerate() {
        let facts = followed.over(&container.id, 1);
        let mut whats = whats(&facts);
        whats.retain(|what| *what != What::Exists); // which every list says
        assert_eq!(whats, [What::Started, ended(number as i64 % 10)], "{facts:?}");
    }
}

#[test]
fn an_end_while_the_daemon_or_memledger_is_away_is_told_once_with_its_exit_code() {
    let Some(mut private) = private() else { return };
    let engine = private.engine.clone();
    let start = |what: &str| {
        engine.run(&unique(what), &[], &["sh", "-c", "trap 'exit 7' TERM; while :; do sleep 0.1; done"])
    };
    let (ends, stays) = (start("ends"), start("stays"));
    let pid = ends.pid();
    let stays_running = What::Running { pid: Some(stays.pid()) };
    let removed = "f".repeat(64);
    let open = [&ends.id, &stays.id, &removed].map(|id| ContainerId::new(id));
    let followed =
        Followed::start(&engine.socket, Filter::default(), Memory::new(Some(now()), HashSet::from(open)));
    let facts = followed.over(&removed, 1);
    assert_eq!(facts[0].what, What::Ended { exit_code: None, oom_flag: None }, "nobody knows it any more");
    eventually_true("what runs", || followed.of(&stays.id).iter().any(|fact| fact.what == stays_running));

    private.stop();
    followed.is(Link::Down);
    let away = now();
    signal("TERM", pid);
    eventually_true("its end", || !Path::new(&format!("/proc/{pid}")).exists());
    private.start();
    let facts = followed.over(&ends.id, 1);
    let end = facts.last().unwrap();
    assert_eq!(name(end), ends.name);
    assert!(end.at > away - 1.0 && end.at < now(), "{} {end:?}", away);
    let What::Ended { exit_code, .. } = end.what else { panic!("{end:?}") };
    assert_eq!(exit_code, Some(7));

    // the other one is told of as running again, and its end comes by its event
    stays.docker(&["kill"]);
    let facts = followed.over(&stays.id, 1);
    assert_eq!(facts.last().unwrap().what, ended(137));
    for id in [&ends.id, &stays.id] {
        let ends = followed.of(id).into_iter().filter(|fact| matches!(fact.what, What::Ended { .. }));
        assert_eq!(ends.count(), 1);
    }
}

#[test]
fn podmans_own_words_tell_the_same() {
    let Some(podman) = Podman::start() else { return };
    let since = now();
    let before = podman.run("before", &["--rm"], "0");
    let socket = podman.socket();
    let memory = Memory::new(Some(since), HashSet::new());
    let followed = Followed::follow("podman", Path::new(&socket), Filter::default(), memory);
    followed.is(Link::Up);
    let facts = followed.over(&before, 1);
    assert_eq!(whats(&facts), [What::Exists, What::Started, ended(0)], "from before the start");
    assert!(facts.iter().all(|fact| fact.runtime == "podman" && name(fact) == "before"), "{facts:?}");

    let killed = podman.run("train", &[], "1000");
    let pid: u32 = podman.ok(&["inspect", "-f", "{{.State.Pid}}", &killed]).parse().expect("a pid");
    let running = What::Running { pid: Some(pid) };
    eventually_true("its pid", || followed.of(&killed).iter().any(|fact| fact.what == running));
    podman.ok(&["rename", "train", "train-new"]);
    podman.ok(&["kill", &killed]);
    let facts = followed.over(&killed, 1);
    let unnamed = What::Asked { signal: None };
    assert_eq!(whats(&facts), [What::Exists, What::Started, What::Renamed, unnamed, ended(137)]);
    assert_eq!(name(facts.last().unwrap()), "train-new");
}
