//! The daemon itself: what it is asked, and what happens when it is away, stuck, or no daemon at all.

use std::io::{Read, Write};
use std::sync::{Arc, Mutex};

use jiff::Timestamp;

use crate::support::cgroups::TestCgroup;
use crate::support::docker::{
    Container, Engine, PrivateEngine, ReadOnlyProxy, Socket, api, assert_no_series_twice, info, of,
    only_reads, signal, unique, watch,
};
use crate::support::python::Python;
use crate::support::{Memledger, Metrics, eventually_true};

const MIB: f64 = 1024.0 * 1024.0;
const USAGE: &str = "memledger_container_memory_usage_bytes";
const INFO: &str = "memledger_container_info";
const RUN_INFO: &str = "memledger_container_run_info";
const UP: &str = "memledger_runtime_up";
const DOCKER: &[(&str, &str)] = &[("runtime", "docker")];

#[test]
fn only_list_inspect_and_events_are_asked() {
    for other in [
        "POST /containers/a1/json",
        "GET /containers/a1/logs",
        "GET /v1.41/info",
        "GET /containers/a/../json",
    ] {
        assert!(!only_reads(other), "the check would not see {other}");
    }
    let Some(engine) = Engine::shared() else { return };
    let proxy = ReadOnlyProxy::of(&engine);
    let name = unique("proxied");
    let there = engine.run(&format!("{name}-before"), &[], &["sleep", "1000"]);
    let include = format!("--container.include=^{name}");
    let memledger = Memledger::start(&[&proxy.socket.flag(), "--podman.socket=", &include]);
    memledger.eventually("the one that was there", |metrics| metrics.ask(USAGE, &of(&there.name)));
    let later = engine.run(&format!("{name}-after"), &[], &["sleep", "1000"]);
    memledger.eventually("the one that came", |metrics| metrics.ask(USAGE, &of(&later.name)));
    engine.docker(&["rm", "-f", &later.id]);
    memledger.eventually("its end", |metrics| match metrics.get(USAGE, &of(&later.name)) {
        None => Ok(()),
        Some(usage) => Err(format!("{usage}")),
    });
    let (let_in, refused) = proxy.requests();
    assert_eq!(refused, Vec::<String>::new());
    assert!(let_in.iter().all(|request| only_reads(request)), "{let_in:?}");
    for call in ["/containers/json", &format!("/containers/{}/json", later.id), "/events"] {
        assert!(let_in.iter().any(|request| request.ends_with(call)), "{call}: {let_in:?}");
    }
}

#[test]
fn a_container_that_the_daemon_cannot_tell_about_leaves_the_others_their_names() {
    let Some(engine) = Engine::shared() else { return };
    let prefix = unique("stuck");
    let stuck = engine.run(&format!("{prefix}-itself"), &[], &["sleep", "1000"]);
    let others: Vec<_> =
        (0..3).map(|n| engine.run(&format!("{prefix}-{n}"), &[], &["sleep", "1000"])).collect();
    let proxy = ReadOnlyProxy::stalling(&engine, &format!("{}/json", stuck.id));
    let ids: Vec<_> = others.iter().map(Container::short_id).collect();
    let include = format!("--container.include=^({prefix}-.*|{}|{})$", stuck.short_id(), ids.join("|"));
    let memledger = Memledger::start(&[&proxy.socket.flag(), "--podman.socket=", &include]);
    memledger.eventually("the stuck one by its id, since its memory is there", |metrics| {
        for id in &ids {
            assert!(metrics.all(USAGE, &of(id)).is_empty(), "another one has lost its name to it");
        }
        metrics.ask(USAGE, &of(stuck.short_id()))
    });
    let metrics =
        memledger.eventually("the daemon is up all the same", |metrics| match metrics.ask(UP, DOCKER)? {
            1.0 => Ok(metrics.clone()),
            up => Err(format!("{up}")),
        });
    for other in &others {
        metrics.value(USAGE, &of(&other.name));
    }
    memledger
        .eventually("what the list tells of the stuck one", |metrics| metrics.ask(USAGE, &of(&stuck.name)));
    // and who comes now is named too
    let late = engine.run(&format!("{prefix}-late"), &[], &["sleep", "1000"]);
    memledger.eventually("the late one", |metrics| metrics.ask(USAGE, &of(&late.name)));
}

/// Grows by 32 MiB when told so by a signal.
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
fn names_and_numbers_outlive_the_daemon_which_is_found_when_it_comes_and_when_it_comes_back() {
    let Some(shared) = Engine::shared() else { return };
    let mut private = PrivateEngine::new();
    let name = unique("daemon");
    let memledger = watch(&private.engine, &format!("^{name}-"), &["--container.label=keep"]);
    assert_eq!(memledger.metrics().get(UP, DOCKER), None, "no daemon yet, and none is missed");
    private.start();
    let up = |wanted: f64| {
        memledger.eventually("the state of the daemon", |metrics| match metrics.ask(UP, DOCKER)? {
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
        metrics.ask(USAGE, &of(&leaves.name))?;
        metrics.ask(rss, &of(&stays.name))
    });
    let face = info(&memledger.metrics(), INFO, &stays.name).unwrap();
    let run = info(&memledger.metrics(), RUN_INFO, &stays.name).unwrap();
    let (pid, leaving) = (stays.pid(), leaves.pid());
    let same = |metrics: &Metrics| {
        assert_no_series_twice(metrics);
        assert_eq!(info(metrics, INFO, &stays.name).unwrap(), face);
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

/// A container without an engine, and memledger on a socket that only pretends: it must be shown by its short id.
fn serves_beside(socket: &Socket) {
    let cgroup = TestCgroup::container();
    let mut process = Python::start(&cgroup, "print('ready'); input()");
    process.line();
    let memledger = Memledger::start(&[&socket.flag(), "--podman.socket=", &cgroup.include()]);
    memledger.eventually("the container by its id", |metrics| metrics.ask(USAGE, &of(cgroup.name())));
    memledger.eventually("the daemon is called down", |metrics| match metrics.ask(UP, DOCKER)? {
        0.0 => Ok(()),
        up => Err(format!("{up}")),
    });
    assert!(memledger.fresh_metrics().get(USAGE, &of(cgroup.name())).is_some());
}

#[test]
fn a_daemon_that_accepts_and_never_answers_keeps_nobody_waiting() {
    serves_beside(&Socket::saying(b"", false));
}

#[test]
fn a_daemon_that_stops_in_the_middle_of_an_answer_keeps_nobody_waiting() {
    serves_beside(&Socket::saying(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n[{\"Id\":",
        false,
    ));
}

#[test]
fn a_daemon_that_answers_with_garbage_keeps_nobody_waiting() {
    for answer in [
        &b"SSH-2.0-OpenSSH_9.2\r\n"[..],
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{\"a\":[}]\xff",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnull",
        b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 15\r\n\r\n{\"message\":\"x\"}",
        b"",
    ] {
        serves_beside(&Socket::saying(answer, true));
    }
}

#[test]
fn a_socket_that_nobody_listens_on_keeps_nobody_waiting_for_longer_than_a_moment() {
    let socket = Socket::serving(drop);
    std::fs::remove_file(&socket.path).unwrap();
    drop(std::os::unix::net::UnixListener::bind(&socket.path).unwrap()); // leaves the file, as a killed daemon does
    let began = Timestamp::now();
    let memledger = Memledger::start(&[&socket.flag(), "--podman.socket=", "--container.include=^none$"]);
    let took = Timestamp::now().duration_since(began);
    assert!(took < jiff::SignedDuration::from_secs(2), "{took:?}"); // the first list is waited for a second at most
    assert_eq!(memledger.eventually("its state", |metrics| metrics.ask(UP, DOCKER)), 0.0);
}

#[test]
fn a_proxy_that_refuses_the_events_is_asked_less_and_less_often_and_told_of_once() {
    let lists = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&lists);
    let socket = Socket::serving(move |mut stream| {
        let mut request = [0; 4096];
        let read = stream.read(&mut request).unwrap_or(0);
        let answer: &[u8] = if String::from_utf8_lossy(&request[..read]).contains("/containers/json") {
            seen.lock().unwrap().push(Timestamp::now());
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n[]"
        } else {
            b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        };
        let _ = stream.write_all(answer);
    });
    let memledger = Memledger::start(&[&socket.flag(), "--podman.socket=", "--container.include=^none$"]);
    eventually_true("the fourth list", || lists.lock().unwrap().len() >= 4);
    let lists = lists.lock().unwrap().clone();
    let pauses = [lists[3].duration_since(lists[2]), lists[1].duration_since(lists[0])];
    assert!(pauses[0] > pauses[1] * 2, "{pauses:?}");
    let log = memledger.log();
    for line in ["message=connected", "connection lost"] {
        assert_eq!(log.matches(line).count(), 1, "{line}: {log}");
    }
}
