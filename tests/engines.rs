//! The newest Docker, containerd, Compose and Podman (`make test-engines`), which report kills and ends in other ways than Debian's.

mod host;
mod places;
mod reasons;

use jiff::Timestamp;

use crate::support::docker::{Container, Engine, PrivateEngine, of, unique};
use crate::support::engines::Programs;
use crate::support::podman::Podman;
use crate::support::{eventually, eventually_true};
use host::{Host, unix_now};

const EXITS: &str = "memledger_container_exits_total";
const KILLS: &str = "memledger_container_oom_kills_total";
const INFO: &str = "memledger_container_info";
const UP: &str = "memledger_runtime_up";

/// Returns when the engine says that a container ended.
fn finished(container: &Container) -> f64 {
    let at: Timestamp = container.inspect("{{.State.FinishedAt}}").parse().expect("a time");
    at.as_nanosecond() as f64 / 1e9
}

/// Starts a Docker engine of its own with the image of the tests.
fn docker(prepare: impl FnOnce(Programs) -> PrivateEngine) -> Option<PrivateEngine> {
    let (shared, programs) = (Engine::shared()?, Programs::newest()?);
    let mut private = prepare(programs);
    private.start();
    private.load_from(&shared);
    Some(private)
}

/// A Docker engine of its own beside its containerd, with live-restore, and a memledger.
fn docker_host(what: &str, more: &[&str]) -> Option<(PrivateEngine, Host, String)> {
    let private = docker(|programs| PrivateEngine::beside_containerd(programs, true))?;
    let name = unique(what);
    let host = Host::start(private.engine.flag(), more);
    Some((private, host, name))
}

/// Lets the script of a container wait for [`release`].
const WAIT: &str = "while [ ! -e /go ]; do sleep 0.05; done; ";

/// Lets a script that begins with [`WAIT`] go on, also while its engine is away.
fn release(pid: u32) {
    std::fs::write(format!("/proc/{pid}/root/go"), "").expect("it runs");
}

/// The command of a container that is killed at its limit.
const GREEDY: [&str; 2] = ["tail", "/dev/zero"];

#[test]
fn kills_of_a_renamed_container_stay_counted_and_known() {
    let Some((private, mut host, name)) = docker_host("rename", &[]) else { return };
    let [old, new, ended, later] = ["old", "new", "ended", "later"].map(|which| format!("{name}-{which}"));
    let limit = ["-m", "40m"];
    let script = "tail /dev/zero; sleep 1000";
    let runs = private.engine.run(&old, &limit, &["sh", "-c", script]);
    host.memledger().eventually("the kill of its child", |m| match m.sum(KILLS, &of(&old)) {
        1.0 => Ok(()),
        other => Err(format!("{other}")),
    });
    let gone = private.engine.run(&ended, &limit, &GREEDY);
    host.ended(&ended, 1.0, "oom_container");
    private.engine.docker(&["rename", &runs.id, &new]);
    private.engine.docker(&["rename", &gone.id, &later]);
    host.knows(&new);
    host.parts_sum();
    assert_eq!(host.memledger().fresh_metrics().sum(KILLS, &of(&old)), 1.0, "under the name of its time");
    eventually_true("its events have the new name", || !host.ends(&later).is_empty());
    for (asked, expected) in [
        (&new, "a child process was killed"),
        (&old, "was renamed"),
        (&later, "OUT OF MEMORY"),
        (&ended, "was renamed"),
    ] {
        let text = host.why(asked);
        assert!(text.contains(expected), "{asked}: {text}");
    }
    host.finish(&private.engine);
}

#[test]
fn stop_is_certain_with_its_signal() {
    let Some((private, mut host, name)) = docker_host("stop", &[]) else { return };
    let stopped = private.engine.run(&name, &[], &["sleep", "1000"]);
    host.knows(&name);
    private.engine.docker(&["stop", "-t", "1", &stopped.id]);
    host.ended(&name, 1.0, "stopped");
    let text = host.why(&name);
    assert!(
        text.contains("STOPPED on request") && !text.contains("likely") && !text.contains("not known"),
        "{text}"
    );
    host.finish(&private.engine);
}

#[test]
fn engine_that_crashed_has_stopped_its_containers() {
    let Some(mut private) = docker(|programs| PrivateEngine::beside_containerd(programs, false)) else {
        return;
    };
    let name = unique("crash");
    let mut host = Host::start(private.engine.flag(), &[]);
    let _container = private.engine.run(&name, &[], &["sleep", "1000"]);
    host.knows(&name);
    private.crash();
    private.start();
    host.ended(&name, 1.0, "stopped");
    host.finish(&private.engine);
}

/// A health check is three events, of which the engine keeps 256.
#[test]
fn health_checks_hide_no_end() {
    let Some((private, mut host, name)) = docker_host("health", &[]) else { return };
    let check = ["--health-cmd", "true", "--health-interval", "1s"];
    let healthy: Vec<_> = (0..12)
        .map(|number| private.engine.run(&format!("{name}-h{number}"), &check, &["sleep", "1000"]))
        .collect();
    host.knows(&format!("{name}-h11"));
    host.memledger = None;
    let fails = private.engine.run(&format!("{name}-fails"), &[], &["sh", "-c", "exit 6"]);
    let killed = private.engine.run(&format!("{name}-killed"), &["-m", "40m"], &GREEDY);
    private.engine.docker(&["kill", &healthy[0].id]);
    eventually_true("all have ended", || {
        [&fails, &killed, &healthy[0]].iter().all(|it| it.inspect("{{.State.Running}}") == "false")
    });
    let since = Timestamp::now().as_second();
    // three events a second of each
    eventually_true("the engine has forgotten the ends", || {
        let text = private.engine.docker(&[
            "events",
            "--since",
            "0",
            "--until",
            &since.to_string(),
            "--filter",
            "event=die",
        ]);
        !text.contains(&*fails.id) && !text.contains(&*killed.id)
    });
    host.serve();
    host.ended(&fails.name, 1.0, "error");
    host.ended(&killed.name, 1.0, "oom_container");
    host.parts_sum();
    let (at, _) = host.ends(&fails.name)[0];
    assert!((at - finished(&fails)).abs() < 1.0, "{at}");
    let text = host.why(&fails.name);
    assert!(text.contains("exit code 6"), "{text}");
    host.finish(&private.engine);
}

#[test]
fn end_while_the_engine_was_away_has_its_own_time() {
    let Some((mut private, mut host, name)) = docker_host("times", &[]) else { return };
    let start = |what: &str, script: &str| {
        let script = format!("{WAIT}{script}");
        let container = private.engine.run(&format!("{name}-{what}"), &[], &["sh", "-c", &script]);
        host.knows(&container.name);
        let (pid, started) = (container.pid(), container.started().as_nanosecond() as f64 / 1e9);
        (container, pid, started)
    };
    let (short, short_pid, short_started) = start("short", "exit 6");
    let (halted, halted_pid, halted_started) = start("halted", "exit 7");
    // lets one end while the engine is away, and returns when that was, once memledger has seen no process of it for 10 s
    let ends = |container: &Container, pid: u32| {
        release(pid);
        eventually_true("its end", || !std::path::Path::new(&format!("/proc/{pid}")).exists());
        let at = unix_now();
        host.shows(&container.name, "no process");
        at
    };
    private.crash();
    let ended_at = ends(&short, short_pid);
    private.start();
    host.ended(&short.name, 1.0, "error");
    let is_near = |found: f64, expected: f64, most: f64| (found - expected).abs() < most;
    let (found, took) = host.ends(&short.name)[0];
    let expected = ended_at - short_started;
    assert!(
        is_near(found, ended_at, 1.5) && is_near(took, expected, 1.5),
        "{found}, {took}; it ended at {ended_at}, after {expected}"
    );
    // one that was stopped reports the end when it goes on
    let mut ended_at = 0.0;
    private.while_busy(|| ended_at = ends(&halted, halted_pid));
    host.ended(&halted.name, 1.0, "error");
    let (found, took) = host.ends(&halted.name)[0];
    let expected = ended_at - halted_started;
    assert!(
        is_near(found, ended_at, 2.5) && is_near(took, expected, 2.5),
        "{found}, {took}; it ended at {ended_at}, after {expected}"
    );
    host.finish(&private.engine);
}

#[test]
fn containers_of_an_unreachable_engine_are_marked_and_explained() {
    let Some((mut private, mut host, name)) = docker_host("away", &[]) else { return };
    let [alive, dies, crashed] = ["alive", "dies", "crashed"].map(|which| format!("{name}-{which}"));
    let container = private.engine.run(&alive, &[], &["sleep", "1000"]);
    let dying = private.engine.run(&dies, &[], &["sh", "-c", "sleep 1000; exit 6"]);
    let other = private.engine.run(&crashed, &["-m", "40m"], &GREEDY);
    host.ended(&crashed, 1.0, "oom_container");
    host.knows(&alive);
    host.knows(&dies);
    let (pid, dying) = (container.pid(), dying.pid());
    private.crash();
    host.loses_docker();
    crate::support::docker::signal("KILL", dying);
    eventually("ps marks both", || {
        let text = host.output(&["ps"]);
        let marked =
            text.contains(&format!("{alive} unreachable")) && text.contains(&format!("{dies} no process"));
        if marked && text.contains("docker does not respond") { Ok(()) } else { Err(text) }
    });
    let text = host.why(&alive);
    assert!(text.contains("is running") && text.contains("docker cannot be queried"), "{text}");
    let text = host.why(&dies);
    assert!(text.contains("NO PROCESS LEFT, and docker cannot be queried"), "{text}");
    for asked in [&alive, &dies] {
        let text = host.why(asked);
        assert!(
            !text.contains("Nothing is known") && !text.contains("whose container is not known"),
            "{text}"
        );
    }
    private.start();
    host.ended(&dies, 1.0, "killed");
    assert_eq!((container.pid(), other.inspect("{{.State.ExitCode}}").as_str()), (pid, "137"));
    eventually("the marks are gone", || {
        let text = host.output(&["ps"]);
        if text.contains("unreachable") || text.contains("does not respond") { Err(text) } else { Ok(()) }
    });
    host.finish(&private.engine);
}

/// What ends while containerd is restarted stays running for Docker, for ever.
#[test]
fn end_that_docker_has_missed_is_shown() {
    let Some((mut private, mut host, name)) = docker_host("missed", &[]) else { return };
    let container = private.engine.run(&name, &[], &["sh", "-c", "sleep 1000; exit 6"]);
    host.knows(&name);
    let (pid, shim) = (container.pid(), parent(container.pid()));
    private.stop_containerd();
    crate::support::docker::signal("KILL", shim);
    crate::support::docker::signal("KILL", pid);
    private.start_containerd();
    host.shows(&name, "no process");
    if container.inspect("{{.State.Running}}") == "true" {
        let text = host.why(&name);
        assert!(text.contains("NO PROCESS LEFT, and docker says that it runs"), "{text}");
        private.engine.docker(&["stop", &container.id]);
    }
    host.memledger().eventually("one end", |metrics| match metrics.sum(EXITS, &of(&name)) {
        1.0 => Ok(()),
        other => Err(format!("{other}")),
    });
    let completed = host.memledger().fresh_metrics().sum(EXITS, &[of(&name)[0], ("reason", "completed")]);
    assert_eq!(completed, 0.0, "a code of 0 that comes so late is not believed");
    host.finish_except(&private.engine, &[&name]);
}

/// Returns the parent of a process.
fn parent(pid: u32) -> u32 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let after = stat.rsplit_once(')').expect("a name").1;
    after.split_whitespace().nth(1).and_then(|ppid| ppid.parse().ok()).expect("a pid")
}

#[test]
fn container_that_was_never_started_has_not_run() {
    let Some((private, mut host, name)) = docker_host("created", &[]) else { return };
    let _container = private.engine.create(&name, &[], &["sleep", "1"]);
    let text = host.why(&name);
    assert!(text.contains("NEVER STARTED"), "{text}");
    host.finish(&private.engine);
}

#[test]
fn log_of_a_short_container_is_read_and_one_without_a_driver_is_named() {
    let Some((private, mut host, name)) =
        docker_host("logs", &["--container.logs=all", "--sample.interval=1s"])
    else {
        return;
    };
    let [short, none] = ["short", "none"].map(|which| format!("{name}-{which}"));
    let error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.35 GiB. GPU 0 has a total capacity of 12.00 GiB of which \
                 620.44 MiB is free.";
    let _short = private.engine.run(&short, &[], &["sh", "-c", &format!("echo '{error}' >&2; exit 1")]);
    host.ended(&short, 1.0, "cuda_oom");
    let _none = private.engine.run(&none, &["--log-driver", "none"], &["sh", "-c", "exit 3"]);
    host.ended(&none, 1.0, "error");
    let text = host.output(&["why", &none, "--logs"]);
    assert!(text.contains("its log driver keeps nothing that can be read"), "{text}");
    host.finish(&private.engine);
}

#[test]
fn docker_kills_renames_and_restarts_beside_its_containerd() {
    let beside = |programs| PrivateEngine::beside_containerd(programs, true);
    let Some(mut private) = docker(beside) else { return };
    let version = private.server_version().expect("it responds");
    assert!(version.starts_with("v2."), "the version of moby's module: {version}");
    let name = unique("newest");
    let stays = private.engine.run(&name, &[], &["sleep", "1000"]);
    let killed = private.engine.run(&format!("{name}-oom"), &["-m", "40m"], &["tail", "/dev/zero"]);
    eventually_true("its end", || killed.inspect("{{.State.Running}}") == "false");
    assert_eq!(killed.inspect("{{.State.OOMKilled}} {{.State.ExitCode}}"), "true 137");
    private.engine.docker(&["rename", &stays.id, &format!("{name}-new")]);
    let pid = stays.pid();
    private.crash();
    private.stop_containerd();
    private.start_containerd();
    private.start();
    assert_eq!((stays.pid(), stays.inspect("{{.Name}}")), (pid, format!("/{name}-new")), "live-restore");
}

#[test]
fn compose_replicas_and_a_recreated_service_keep_their_names() {
    let Some(private) = docker(PrivateEngine::of) else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let image = &private.engine.image;
    let services = format!(
        "services:\n  train:\n    image: {image}\n    command: sleep 1000\n    network_mode: none\n    deploy: {{replicas: 2}}\n"
    );
    std::fs::write(folder.path().join("compose.yaml"), &services).expect("a file");
    let project = unique("compose");
    private.compose(folder.path(), &["-p", &project, "up", "-d", "--pull", "never"]);
    let names = private.engine.docker(&["ps", "--format", "{{.Names}}"]);
    let mut names: Vec<_> = names.lines().collect();
    names.sort_unstable();
    assert_eq!(names, [format!("{project}-train-1"), format!("{project}-train-2")]);
    let mut host = Host::start(private.engine.flag(), &[]);
    names.iter().for_each(|name| host.knows(name));
    let limited = services.replace("network_mode", "mem_limit: 96m\n    network_mode");
    std::fs::write(folder.path().join("compose.yaml"), limited).expect("a file");
    private.compose(folder.path(), &["-p", &project, "up", "-d", "--pull", "never", "-t", "1"]);
    for name in &names {
        host.ended(name, 1.0, "stopped");
        host.memledger().eventually("its new limit", |metrics| {
            let limit = metrics.try_value("memledger_container_memory_limit_bytes", &of(name))?;
            if limit == f64::from(96 << 20) { Ok(()) } else { Err(format!("{limit}")) }
        });
    }
    let metrics = host.memledger().fresh_metrics();
    let shown: Vec<_> =
        metrics.all(INFO, &[]).into_iter().map(|(_, labels, _)| labels["container_name"].clone()).collect();
    assert!(
        shown.iter().filter(|shown| shown.contains(&project)).all(|shown| names.contains(&shown.as_str())),
        "{shown:?}"
    );
    host.finish(&private.engine);
}

#[test]
fn podman_kills_and_restarts() {
    let (Some(_), Some(programs)) = (Engine::shared(), Programs::newest()) else { return };
    let podman = Podman::of(programs);
    assert!(podman.ok(&["--version"]).starts_with("podman version 5."));
    let killed = podman.run_command("killed", &["-m", "40m"], &["/busybox/tail", "/dev/zero"]);
    let state = |id: &str, what: &str| podman.ok(&["inspect", "-f", what, id]);
    eventually_true("its end", || state(&killed, "{{.State.Status}}") == "exited");
    assert_eq!(state(&killed, "{{.State.OOMKilled}} {{.State.ExitCode}}"), "true 137");
    let loops = podman.run_command("loops", &["--restart", "always"], &["/busybox/sh", "-c", "exit 4"]);
    eventually_true("a restart", || state(&loops, "{{.RestartCount}}") != "0");
    let parent = podman.cgroup_parent();
    podman.ok(&["pod", "create", "--name", "pod", "--network", "none", &parent]);
    podman.ok(&["pod", "start", "pod"]);
}

#[test]
fn podman_ends_have_their_reasons() {
    let (Some(_), Some(programs)) = (Engine::shared(), Programs::newest()) else { return };
    let podman = Podman::of(programs);
    let name = unique("podman");
    let mut host = Host::start(format!("--podman.socket={}", podman.socket()), &[]);
    let [fails, loops, kills, stops, signalled] =
        ["fails", "loops", "kills", "stops", "signalled"].map(|which| format!("{name}-{which}"));
    let shell = |script: &'static str| ["/busybox/sh", "-c", script];
    podman.run_command(&loops, &["--restart", "always"], &shell("exit 4"));
    podman.run_command(&fails, &[], &shell("exit 6"));
    host.ended(&fails, 1.0, "error");
    // one in a state that the library does not know hides no other
    for _ in 0..10 {
        let text = host.why(&fails);
        assert!(text.contains("exit code 6"), "{text}");
    }
    podman.ok(&["rm", "-f", "-t", "0", &loops]);
    podman.run(&stops, &[], "1000");
    host.knows(&stops);
    podman.ok(&["stop", "-t", "1", &stops]);
    host.ended(&stops, 1.0, "stopped");
    // a signal that ends nothing is no request for a later end
    podman.run_command(
        &signalled,
        &[],
        &shell("trap : HUP; while [ ! -e /go ]; do /busybox/sleep 0.1; done; exit 1"),
    );
    host.knows(&signalled);
    podman.ok(&["kill", "-s", "HUP", &signalled]);
    let began = unix_now();
    eventually_true("longer than an answer to a signal takes", || unix_now() - began > 11.0);
    podman.ok(&["exec", &signalled, "/busybox/touch", "/go"]);
    host.ended(&signalled, 1.0, "error");
    podman.run_command(&kills, &["--restart", "always", "-m", "40m"], &["/busybox/tail", "/dev/zero"]);
    host.memledger().eventually("many kills", |metrics| match metrics.sum(KILLS, &of(&kills)) {
        found if found >= 20.0 => Ok(()),
        found => Err(format!("{found}")),
    });
    podman.ok(&["rm", "-f", "-t", "0", &kills]);
    host.parts_sum();
    let exits = eventually("the reasons are decided", || {
        let exits = host.exits(Some(&kills));
        if exits.iter().all(|exit| exit["reason"].is_string()) {
            Ok(exits)
        } else {
            Err(format!("{exits:#?}"))
        }
    });
    // more than ten kills in five seconds, with those of other tests: the kernel logs no cgroup, and which kill was whose may stay open
    let is_open = |exit: &serde_json::Value| exit["reason"] == "unknown" && exit["may_be"].is_array();
    let others: Vec<_> =
        exits.iter().filter(|exit| exit["reason"] != "oom_container" && !is_open(exit)).collect();
    assert!(others.len() <= 1, "the last one may be removed while it runs: {others:#?}");
    host.finish(&podman);
}

#[test]
fn cost_beside_dockerd_is_small() {
    let Some((private, mut host, name)) = docker_host("cost", &["--sample.interval=1s"]) else { return };
    let check = ["--health-cmd", "true", "--health-interval", "1s"];
    let _containers: Vec<_> = (0..10)
        .map(|number| private.engine.run(&format!("{name}-{number}"), &check, &["sleep", "1000"]))
        .collect();
    host.knows(&format!("{name}-9"));
    let cpu = || [host.memledger().pid(), private.pid()].map(|pid| crate::support::cpu_nanos(pid, None));
    let (before, began) = (cpu(), unix_now());
    eventually_true("ten seconds", || unix_now() - began > 10.0);
    let after = cpu();
    let [ours, engine] = [0, 1].map(|number| (after[number] - before[number]) / 1e6);
    println!(
        "10 containers with a health check a second each, 10 s: memledger {ours:.0} ms, dockerd {engine:.0} ms"
    );
    assert!(ours < engine, "{ours} ms, dockerd {engine} ms");
    host.finish(&private.engine);
}
