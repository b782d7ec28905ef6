//! The Docker daemon: the calls that it receives, and its outages: stopped, hanging, or not a daemon at all.

use std::io::{Read, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::Timestamp;

use crate::support::cgroups::TestCgroup;
use crate::support::docker::{
    Container, Engine, PrivateEngine, ReadOnlyProxy, Socket, api, assert_no_series_twice, info, of,
    only_reads, signal, start_memledger, unique,
};
use crate::support::python::Python;
use crate::support::{Memledger, Metrics, eventually_true};

const MIB: f64 = 1024.0 * 1024.0;
const USAGE: &str = "memledger_container_memory_usage_bytes";
const INFO: &str = "memledger_container_info";
const RUN_INFO: &str = "memledger_container_run_info";
const UP: &str = "memledger_runtime_up";
const EXITS: &str = "memledger_container_exits_total";
const DOCKER: &[(&str, &str)] = &[("runtime", "docker")];

#[test]
fn calls_only_list_inspect_and_events() {
    for other in [
        "POST /containers/a1/json",
        "GET /containers/a1/logs",
        "GET /v1.41/info",
        "GET /containers/a/../json",
    ] {
        assert!(!only_reads(other), "the check would miss {other}");
    }
    let Some(engine) = Engine::shared() else { return };
    let proxy = ReadOnlyProxy::of(&engine);
    let name = unique("proxied");
    let existing = engine.run(&format!("{name}-before"), &[], &["sleep", "1000"]);
    let include = format!("--container.include=^{name}");
    let memledger = Memledger::start(&[&proxy.socket.flag(), "--podman.socket=", &include]);
    memledger.eventually("the existing container", |metrics| metrics.try_value(USAGE, &of(&existing.name)));
    let later = engine.run(&format!("{name}-after"), &[], &["sleep", "1000"]);
    memledger.eventually("the new container", |metrics| metrics.try_value(USAGE, &of(&later.name)));
    engine.docker(&["rm", "-f", &later.id]);
    memledger.eventually("its end", |metrics| match metrics.get(USAGE, &of(&later.name)) {
        None => Ok(()),
        Some(usage) => Err(format!("{usage}")),
    });
    let (allowed, rejected) = proxy.requests();
    assert_eq!(rejected, Vec::<String>::new());
    assert!(allowed.iter().all(|request| only_reads(request)), "{allowed:?}");
    for call in ["/containers/json", &format!("/containers/{}/json", later.id), "/events"] {
        assert!(allowed.iter().any(|request| request.ends_with(call)), "{call}: {allowed:?}");
    }
}

#[test]
fn hanging_inspect_does_not_delay_other_names() {
    let Some(engine) = Engine::shared() else { return };
    let prefix = unique("stuck");
    let stuck = engine.run(&format!("{prefix}-itself"), &[], &["sleep", "1000"]);
    let others: Vec<_> =
        (0..3).map(|n| engine.run(&format!("{prefix}-{n}"), &[], &["sleep", "1000"])).collect();
    let proxy = ReadOnlyProxy::stalling(&engine, &format!("{}/json", stuck.id));
    let ids: Vec<_> = others.iter().map(Container::short_id).collect();
    let include = format!("--container.include=^({prefix}-.*|{}|{})$", stuck.short_id(), ids.join("|"));
    let began = memledger::clock::Timestamp::now();
    let memledger = Memledger::start(&[&proxy.socket.flag(), "--podman.socket=", &include]);
    memledger.eventually("the name of the stuck container from the list", |metrics| {
        // a container without a name is shown after three seconds; a busy engine may take longer
        if memledger::clock::Timestamp::now().since(began) < Duration::from_secs(3) {
            for id in &ids {
                assert!(metrics.all(USAGE, &of(id)).is_empty(), "another container without its name");
            }
        }
        metrics.try_value(USAGE, &of(&stuck.name))
    });
    let metrics =
        memledger.eventually("the daemon is up", |metrics| match metrics.try_value(UP, DOCKER)? {
            1.0 => Ok(metrics.clone()),
            up => Err(format!("{up}")),
        });
    for other in &others {
        metrics.value(USAGE, &of(&other.name));
    }
    // a new container is named too
    let late = engine.run(&format!("{prefix}-late"), &[], &["sleep", "1000"]);
    memledger.eventually("the late container", |metrics| metrics.try_value(USAGE, &of(&late.name)));
}

/// Grows by 32 MiB on SIGUSR1.
const GROWS: &str = r#"
import mmap, signal
kept = []
def grow(*_):
    block = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, 32 << 20, 4096):
        block[at] = 1
    kept.append(block)
signal.signal(signal.SIGUSR1, grow)
print("ready", flush=True)
while True:
    signal.pause()
"#;

#[test]
fn names_and_values_survive_daemon_restart() {
    let Some(shared) = Engine::shared() else { return };
    let mut private = PrivateEngine::new();
    let name = unique("daemon");
    let memledger = start_memledger(&private.engine, &format!("^{name}-"), &["--container.label=keep"]);
    assert_eq!(memledger.metrics().get(UP, DOCKER), None, "no daemon yet, and none is expected");
    private.start();
    let up = |wanted: f64| {
        memledger.eventually("the state of the daemon", |metrics| match metrics.try_value(UP, DOCKER)? {
            up if up == wanted => Ok(()),
            up => Err(format!("{up}")),
        });
    };
    up(1.0);
    private.load_from(&shared);
    let stays = private.engine.run_python(&format!("{name}-stays"), &["--label=keep"], GROWS);
    let leaves = private.engine.run(&format!("{name}-leaves"), &["--rm", "--label=keep"], &["sleep", "1000"]);
    let rss = "memledger_container_memory_rss_bytes";
    let before = memledger.eventually("both", |metrics| {
        stays.is_inspected(metrics)?;
        metrics.try_value(USAGE, &of(&leaves.name))?;
        metrics.try_value(rss, &of(&stays.name))
    });
    let labels = info(&memledger.metrics(), INFO, &stays.name).unwrap();
    let run = info(&memledger.metrics(), RUN_INFO, &stays.name).unwrap();
    let (pid, leaving) = (stays.pid(), leaves.pid());
    let same = |metrics: &Metrics| {
        assert_no_series_twice(metrics);
        assert_eq!(info(metrics, INFO, &stays.name).unwrap(), labels);
        assert_eq!(info(metrics, RUN_INFO, &stays.name).unwrap(), run);
        assert!(metrics.get(USAGE, &of(&stays.name)).is_some());
    };

    private.stop();
    up(0.0);
    signal("USR1", pid);
    memledger.eventually("its growth, without the daemon", |metrics| {
        same(metrics);
        let grown = metrics.value(rss, &of(&stays.name)) - before;
        if grown >= 32.0 * MIB { Ok(()) } else { Err(format!("{grown}")) }
    });
    signal("KILL", leaving);

    private.start();
    memledger.eventually("the daemon again, and the end of the other", |metrics| {
        same(metrics);
        let up = metrics.value(UP, DOCKER);
        let running = &api(&memledger, &leaves.name)?["running"];
        if up == 1.0 && running == false { Ok(()) } else { Err(format!("up {up}, running {running}")) }
    });
    let metrics = memledger.fresh_metrics();
    same(&metrics);
    assert_eq!(metrics.get(USAGE, &of(&leaves.name)), None);
}

#[test]
fn containers_of_two_engines_are_followed_and_one_engine_may_stop() {
    let Some(shared) = Engine::shared() else { return };
    let mut private = PrivateEngine::new();
    private.start();
    private.load_from(&shared);
    let name = unique("engines");
    let memledger = start_memledger(&shared, &format!("^{name}-"), &[&private.engine.flag()]);
    let run = |engine: &Engine, what: &str| {
        let container = engine.run(&format!("{name}-{what}"), &[], &["sleep", "1000"]);
        memledger.eventually("its name", |metrics| metrics.try_value(USAGE, &of(&container.name)));
        container
    };
    let ends = |container: &Container| {
        container.docker(&["kill"]);
        memledger.eventually("its exit", |metrics| {
            metrics.try_value("memledger_container_last_exit_code", &of(&container.name)).map(drop)
        });
    };
    let (first, other) = (run(&shared, "first"), run(&private.engine, "other"));
    ends(&run(&shared, "ends"));
    ends(&run(&private.engine, "ends-too"));
    private.stop();
    ends(&run(&shared, "later"));
    let metrics = memledger.fresh_metrics();
    assert_no_series_twice(&metrics);
    for container in [&first, &other] {
        assert!(metrics.get(USAGE, &of(&container.name)).is_some(), "{}", container.name);
    }
}

/// Asserts that memledger shows a container by its short id while the socket is not a working daemon's.
fn shows_container_despite(socket: &Socket) {
    let cgroup = TestCgroup::container();
    let mut process = Python::start(&cgroup, "print('ready'); input()");
    process.line();
    let memledger = Memledger::start(&[&socket.flag(), "--podman.socket=", &cgroup.include()]);
    memledger.eventually("the container by its id", |metrics| metrics.try_value(USAGE, &of(cgroup.name())));
    memledger.eventually("the daemon is down", |metrics| match metrics.try_value(UP, DOCKER)? {
        0.0 => Ok(()),
        up => Err(format!("{up}")),
    });
    assert!(memledger.fresh_metrics().get(USAGE, &of(cgroup.name())).is_some());
}

#[test]
fn daemon_that_never_responds_does_not_block() {
    shows_container_despite(&Socket::responding_with(b"", false));
}

#[test]
fn daemon_that_stalls_in_a_response_does_not_block() {
    shows_container_despite(&Socket::responding_with(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n[{\"Id\":",
        false,
    ));
}

#[test]
fn daemon_that_sends_garbage_does_not_block() {
    for response in [
        &b"SSH-2.0-OpenSSH_9.2\r\n"[..],
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{\"a\":[}]\xff",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnull",
        b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 15\r\n\r\n{\"message\":\"x\"}",
        b"",
    ] {
        shows_container_despite(&Socket::responding_with(response, true));
    }
}

#[test]
fn engine_of_a_socket_without_listener_is_down() {
    let socket = Socket::serving(drop);
    std::fs::remove_file(&socket.path).unwrap();
    drop(std::os::unix::net::UnixListener::bind(&socket.path).unwrap()); // leaves the file, like a killed daemon
    let memledger = Memledger::start(&[&socket.flag(), "--podman.socket=", "--container.include=^none$"]);
    assert_eq!(memledger.eventually("its state", |metrics| metrics.try_value(UP, DOCKER)), 0.0);
}

#[test]
fn proxy_that_rejects_events_is_retried_with_back_off_and_logged_once() {
    // when the stream of events was requested, once for each connection: the checks at the start request no stream
    let requests = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&requests);
    let socket = Socket::serving(move |mut stream| {
        let mut request = [0; 4096];
        let read = stream.read(&mut request).unwrap_or(0);
        let request = String::from_utf8_lossy(&request[..read]);
        if request.contains("/events?") && !request.contains("until=") {
            seen.lock().unwrap().push(Timestamp::now());
        }
        let response: &[u8] = if request.contains("/containers/json") {
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n[]"
        } else {
            b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        };
        let _ = stream.write_all(response);
    });
    let memledger = Memledger::start(&[&socket.flag(), "--podman.socket=", "--container.include=^none$"]);
    eventually_true("the fourth connection", || requests.lock().unwrap().len() >= 4);
    let requests = requests.lock().unwrap().clone();
    // 250 ms, doubled twice: on a busy machine every pause is longer, and none is shorter
    let pause = requests[3].duration_since(requests[2]);
    assert!(pause >= jiff::SignedDuration::from_secs(1), "{pause:?} among {requests:?}");
    let log = memledger.log();
    for line in ["message=connected", "connection lost"] {
        assert_eq!(log.matches(line).count(), 1, "{line}: {log}");
    }
}

/// Returns an error unless the container has ended once, for this reason.
fn ended_once(metrics: &Metrics, name: &str, reason: &str) -> Result<(), String> {
    let ends: Vec<_> = metrics.all(EXITS, &of(name)).into_iter().filter(|(.., ends)| *ends > 0.0).collect();
    match &ends[..] {
        [(_, labels, 1.0)] if labels["reason"] == reason => Ok(()),
        other => Err(format!("{other:?}")),
    }
}

#[test]
fn engine_that_crashed_and_ends_its_containers_later_has_stopped_them() {
    let Some(shared) = Engine::shared() else { return };
    let mut private = PrivateEngine::without_live_restore();
    private.start();
    private.load_from(&shared);
    let name = unique("crash");
    let memledger = start_memledger(&private.engine, &format!("^{name}"), &[]);
    // the first process of a container ignores SIGTERM unless it handles it: the engine responds after ten seconds
    let ignores = private.engine.run(&format!("{name}-ignores"), &[], &["sleep", "1000"]);
    let program = "import signal, time; signal.signal(15, lambda *_: exit(3)); print('ready', flush=True); time.sleep(1000)";
    let handles = private.engine.run_python(&format!("{name}-handles"), &[], program);
    for container in [&ignores, &handles] {
        memledger.eventually("its name", |metrics| info(metrics, INFO, &container.name));
    }
    private.crash();
    private.start();
    for container in [&ignores, &handles] {
        memledger.eventually("its end was a stop", |metrics| ended_once(metrics, &container.name, "stopped"));
    }
}

#[test]
fn ends_while_memledger_was_away_are_counted_although_the_engine_has_forgotten_their_events() {
    let Some(shared) = Engine::shared() else { return };
    let mut private = PrivateEngine::new();
    private.start();
    private.load_from(&shared);
    let name = unique("away");
    let state = tempfile::tempdir().expect("a folder");
    let state = format!("--state.path={}", state.path().display());
    let start = || start_memledger(&private.engine, &format!("^{name}"), &[&state]);
    let memledger = start();
    let known = private.engine.run(&format!("{name}-known"), &[], &["sleep", "1000"]);
    let before = private.engine.run(&format!("{name}-before"), &[], &["sh", "-c", "exit 5"]);
    memledger.eventually("an end before", |metrics| ended_once(metrics, &before.name, "error"));
    memledger.eventually("its name", |metrics| info(metrics, INFO, &known.name));
    drop(memledger);
    let fails = private.engine.run(&format!("{name}-fails"), &[], &["sh", "-c", "exit 6"]);
    private.engine.docker(&["kill", "--signal=KILL", &known.id]);
    eventually_true("both have ended", || {
        [&fails, &known].iter().all(|it| it.inspect("{{.State.Running}}") == "false")
    });
    // the engine keeps 256 events; one of these is several
    let other = private.engine.create(&format!("other-{name}"), &[], &["sleep", "1000"]);
    for number in 0..300 {
        private.engine.docker(&["rename", &other.id, &format!("other-{name}-{number}")]);
    }
    let memledger = start();
    memledger.eventually("an end that it missed", |metrics| ended_once(metrics, &fails.name, "error"));
    memledger.eventually("its code", |metrics| {
        match metrics.try_value("memledger_container_last_exit_code", &of(&fails.name))? {
            6.0 => Ok(()),
            code => Err(format!("{code}")),
        }
    });
    memledger.eventually("the end of a known one", |metrics| {
        let ends = metrics.sum(EXITS, &of(&known.name));
        if ends == 1.0 { Ok(()) } else { Err(format!("{ends}")) }
    });
    ended_once(&memledger.fresh_metrics(), &before.name, "error").expect("it was counted before");
}
