//! Ends of containers of the newest Docker: each has one reason, its kills, and an explanation.

use super::host::Host;
use super::{EXITS, GREEDY, KILLS, WAIT, docker_host, release};
use crate::support::docker::{Container, Engine, of, signal};
use crate::support::{eventually, eventually_true};

/// A container, what is done to it, and what memledger says of its end.
struct EndCase {
    what: &'static str,
    flags: &'static [&'static str],
    script: &'static str,
    /// Done once it runs and memledger knows it.
    then: Option<fn(&Container)>,
    reason: &'static str,
    kills: f64,
    /// Parts of what `why` prints.
    why: &'static [&'static str],
}

impl EndCase {
    /// Of a shell's script.
    fn of(
        what: &'static str,
        script: &'static str,
        reason: &'static str,
        why: &'static [&'static str],
    ) -> Self {
        Self { what, flags: &[], script, then: None, reason, kills: 0.0, why }
    }

    fn flags(self, flags: &'static [&'static str]) -> Self {
        Self { flags, ..self }
    }

    fn then(self, then: fn(&Container)) -> Self {
        Self { then: Some(then), ..self }
    }

    /// It has a limit, and is killed there once.
    fn at_its_limit(self) -> Self {
        Self { kills: 1.0, ..self }
    }

    fn start(&self, engine: &Engine, name: &str) -> Container {
        let limit: &[&str] = if self.kills > 0.0 { &["-m", "40m"] } else { &[] };
        engine.run(
            &format!("{name}-{}", self.what),
            &[self.flags, limit].concat(),
            &["sh", "-c", self.script],
        )
    }

    fn check(&self, host: &Host, container: &Container) {
        host.ended(&container.name, 1.0, self.reason);
        host.killed(&container.name, self.kills);
        host.explains(&container.name, self.why);
    }
}

const SLEEP: &str = "exec sleep 1000";
const EAT: &str = "exec tail /dev/zero";
/// Without the figure: of more than ten kills in five seconds on this host, the kernel does not log the cgroup.
const OUT_OF_MEMORY: &[&str] = &["OUT OF MEMORY at its own limit"];
const STOPPED: &[&str] = &["STOPPED on request"];
const KILLED_ON_REQUEST: &[&str] = &["KILLED on request"];

#[test]
fn each_end_has_its_reason() {
    let Some((private, mut host, name)) = docker_host("ends", &[]) else { return };
    let cases = [
        EndCase::of("main", EAT, "oom_container", OUT_OF_MEMORY).at_its_limit(),
        EndCase::of(
            "child-0",
            "tail /dev/zero; exit 0",
            "completed",
            &["a child was killed", "ended with 0"],
        )
        .at_its_limit(),
        EndCase::of("child-3", "tail /dev/zero; exit 3", "error", &["a child was killed", "3"])
            .at_its_limit(),
        EndCase::of("init", EAT, "oom_container", OUT_OF_MEMORY).at_its_limit().flags(&["--init"]),
        EndCase::of("rm-1", EAT, "oom_container", OUT_OF_MEMORY).at_its_limit().flags(&["--rm"]),
        EndCase::of("rm-2", EAT, "oom_container", OUT_OF_MEMORY).at_its_limit().flags(&["--rm"]),
        EndCase::of("exit-0", "exit 0", "completed", &["COMPLETED"]),
        EndCase::of("exit-5", "exit 5", "error", &["ENDED WITH AN ERROR", "5"]),
        // no kill and no request: its own number, or a SIGKILL of somebody
        EndCase::of("exit-137", "exit 137", "killed", &["KILLED (SIGKILL), not an OOM kill"]),
        EndCase::of("outside", SLEEP, "killed", &["KILLED (SIGKILL), not an OOM kill"])
            .then(|it| signal("KILL", it.pid())),
        EndCase::of("kill", SLEEP, "stopped", KILLED_ON_REQUEST).then(|it| drop(it.docker(&["kill"]))),
        EndCase::of("term", SLEEP, "stopped", STOPPED)
            .flags(&["--init"])
            .then(|it| drop(it.docker(&["kill", "-s", "TERM"]))),
        EndCase::of("usr1", SLEEP, "stopped", STOPPED)
            .flags(&["--init"])
            .then(|it| drop(it.docker(&["kill", "-s", "USR1"]))),
        EndCase::of("rm-f", SLEEP, "stopped", KILLED_ON_REQUEST).then(|it| drop(it.docker(&["rm", "-f"]))),
        EndCase::of("stop-signal", SLEEP, "stopped", &[])
            .flags(&["--stop-signal", "KILL"])
            .then(|it| drop(it.docker(&["stop"]))),
        EndCase::of("slow", "trap 'sleep 2; exit 3' TERM; while :; do sleep 0.1; done", "stopped", STOPPED)
            .then(|it| drop(it.docker(&["stop", "-t", "20"]))),
        EndCase::of("too-slow", "trap 'sleep 20' TERM; while :; do sleep 0.1; done", "stopped", STOPPED)
            .then(|it| drop(it.docker(&["stop", "-t", "1"]))),
    ];
    let containers: Vec<_> = cases.iter().map(|case| case.start(&private.engine, &name)).collect();
    let all = || std::iter::zip(&cases, &containers);
    for (case, container) in all().filter(|(case, _)| case.then.is_some()) {
        host.knows(&container.name);
        case.then.expect("it has one")(container);
    }
    all().for_each(|(case, container)| case.check(&host, container));
    host.finish(&private.engine);
}

#[test]
fn each_run_of_a_restart_policy_has_its_reason() {
    let Some((private, mut host, name)) = docker_host("policies", &[]) else { return };
    let engine = &private.engine;
    let start = |what: &str, policy: &str, command: &[&str]| {
        engine.run(&format!("{name}-{what}"), &["--restart", policy, "-m", "40m"], command)
    };
    let killed = start("killed", "always", &GREEDY);
    let fails = start("fails", "always", &["sh", "-c", "exit 4"]);
    let thrice = start("thrice", "on-failure:2", &GREEDY);
    host.ended(&thrice.name, 3.0, "oom_container");
    host.killed(&thrice.name, 3.0);
    for (container, family) in [(&killed, KILLS), (&fails, EXITS)] {
        host.memledger().eventually("four runs", |metrics| match metrics.sum(family, &of(&container.name)) {
            found if found >= 4.0 => Ok(()),
            found => Err(format!("{found}")),
        });
    }
    // the restart that the policy waits for is the last one
    for container in [&killed, &fails] {
        // refused between an end and the policy's decision
        eventually("an end of its policy", || container.try_docker(&["update", "--restart", "no"]));
        eventually("its last end", || match &*container.inspect("{{.State.Status}}") {
            "exited" => Ok(()),
            other => Err(other.to_owned()),
        });
    }
    host.finish(engine);
    for (container, reason) in [(&killed, "oom_container"), (&fails, "error")] {
        let exits = host.exits(Some(&container.name));
        let others: Vec<_> = exits.iter().filter(|exit| exit["reason"] != reason).collect();
        assert!(exits.len() >= 4 && others.is_empty(), "{others:#?}");
    }
}

#[test]
fn container_that_cannot_start_has_the_words_of_its_engine() {
    let Some((private, mut host, name)) = docker_host("never", &[]) else { return };
    let syslog = ["--log-driver", "syslog", "--log-opt", "syslog-address=tcp://127.0.0.1:1"];
    let cases: [(_, &[&str], &str, &str); 3] = [
        ("missing", &[], "/no-such-program", "no such file"),
        ("directory", &[], "/tmp", "permission denied"),
        ("syslog", &syslog, "true", "failed to initialize logging driver"),
    ];
    let containers: Vec<_> = cases
        .iter()
        .map(|(what, flags, command, _)| private.engine.create(&format!("{name}-{what}"), flags, &[command]))
        .collect();
    for (container, (.., expected)) in std::iter::zip(&containers, &cases) {
        let error = container.try_docker(&["start"]).expect_err("it cannot start");
        assert!(error.contains(expected), "{error}");
        host.explains(&container.name, &["NEVER STARTED", expected]);
    }
    host.finish(&private.engine);
}

#[test]
fn kill_has_the_name_and_the_limit_of_its_moment() {
    let Some((private, mut host, name)) = docker_host("changes", &[]) else { return };
    let script = format!("{WAIT}{EAT}");
    let start =
        |what: &str| private.engine.run(&format!("{name}-{what}"), &["-m", "64m"], &["sh", "-c", &script]);
    let [renamed, updated, paused] = ["renamed", "updated", "paused"].map(start);
    [&renamed, &updated, &paused].iter().for_each(|it| host.knows(&it.name));
    let after = format!("{name}-after");
    private.engine.docker(&["rename", &renamed.id, &after]);
    updated.docker(&["update", "--memory", "32m", "--memory-swap", "32m"]);
    paused.docker(&["pause"]);
    host.knows(&after);
    host.memledger().eventually("the new limit", |metrics| {
        let limit = metrics.try_value("memledger_container_memory_limit_bytes", &of(&updated.name))?;
        if limit == f64::from(32 << 20) { Ok(()) } else { Err(format!("{limit}")) }
    });
    [&renamed, &updated, &paused].iter().for_each(|it| release(it.pid()));
    for (name, limit) in [(&after, 64), (&updated.name, 32)] {
        host.ended(name, 1.0, "oom_container");
        let text = host.explains(name, &["OUT OF MEMORY at its own limit"]);
        // the kernel does not log the cgroup of more than ten kills in five seconds on this host
        let kill = kill_of(&host, name);
        if !kill["limit_cgroup"].is_null() {
            assert_eq!(kill["limit_bytes"], limit << 20, "{kill:#}");
            assert!(text.contains(&format!("limit of {limit}.0 MiB")), "{text}");
        }
    }
    let metrics = host.memledger().fresh_metrics();
    assert_eq!((metrics.sum(KILLS, &of(&renamed.name)), metrics.sum(EXITS, &of(&paused.name))), (0.0, 0.0));
    host.knows(&paused.name);
    paused.docker(&["unpause"]);
    host.ended(&paused.name, 1.0, "oom_container");
    host.finish(&private.engine);
}

#[test]
fn starts_that_are_killed_at_once_are_all_known() {
    let Some((private, mut host, name)) = docker_host("starts", &[]) else { return };
    let containers: Vec<_> = std::thread::scope(|scope| {
        let start = |number| {
            let (engine, name) = (&private.engine, format!("{name}-{number}"));
            scope.spawn(move || engine.run(&name, &["-m", "40m"], &GREEDY))
        };
        let started: Vec<_> = (0..20).map(start).collect();
        started.into_iter().map(|started| started.join().expect("it starts")).collect()
    });
    for container in &containers {
        host.ended(&container.name, 1.0, "oom_container");
        host.killed(&container.name, 1.0);
    }
    host.finish(&private.engine);
}

#[test]
fn kills_and_ends_without_dockerd_are_known_when_it_is_back() {
    let Some((mut private, mut host, name)) = docker_host("live", &[]) else { return };
    let cases = [
        EndCase::of("main", EAT, "oom_container", OUT_OF_MEMORY).at_its_limit(),
        EndCase::of("init", EAT, "oom_container", OUT_OF_MEMORY).at_its_limit().flags(&["--init"]),
        EndCase::of("rm", EAT, "oom_container", OUT_OF_MEMORY).at_its_limit().flags(&["--rm"]),
        EndCase::of("child", "tail /dev/zero; exit 0", "completed", &["a child was killed"]).at_its_limit(),
        EndCase::of("exit-0", "exit 0", "completed", &["COMPLETED"]),
        EndCase::of("exit-6", "exit 6", "error", &["exit code 6"]),
    ];
    let scripts: Vec<_> = cases.iter().map(|case| format!("{WAIT}{}", case.script)).collect();
    let start = |(case, script): (&EndCase, &String)| {
        let limit: &[&str] = if case.kills > 0.0 { &["-m", "40m"] } else { &[] };
        let flags = [case.flags, limit].concat();
        private.engine.run(&format!("{name}-{}", case.what), &flags, &["sh", "-c", script])
    };
    let containers: Vec<_> = std::iter::zip(&cases, &scripts).map(start).collect();
    containers.iter().for_each(|it| host.knows(&it.name));
    let pids: Vec<_> = containers.iter().map(Container::pid).collect();
    private.crash();
    pids.iter().for_each(|pid| release(*pid));
    eventually_true("all have ended", || {
        !pids.iter().any(|pid| std::path::Path::new(&format!("/proc/{pid}")).exists())
    });
    // the kernel reports the kills, whatever the engine does; of the ends only the engine knows
    host.loses_docker();
    std::iter::zip(&cases, &containers).for_each(|(case, it)| host.killed(&it.name, case.kills));
    private.start();
    std::iter::zip(&cases, &containers).for_each(|(case, it)| case.check(&host, it));
    host.finish(&private.engine);
}

/// Returns the OOM kill of a container.
pub fn kill_of(host: &Host, name: &str) -> serde_json::Value {
    eventually(&format!("the kill of {name}"), || {
        let mut kills = host.events(Some(name)).into_iter().filter(|event| event["type"] == "oom_kill");
        kills.next().ok_or_else(|| "none".to_owned())
    })
}
