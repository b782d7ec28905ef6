//! Exits of containers: each kind is distinguished, and counters start at 0 and continue.

use crate::support::docker::signal;
use crate::support::oom::{EXITS, KILLS, Ledger, RESTARTS, Scene, has_printed, wait_for_cgroups_in_the_log};
use crate::support::{eventually, eventually_true};

#[test]
fn counters_start_at_0_before_any_event() {
    let Some(scene) = Scene::new("born") else { return };
    let ledger = scene.start_memledger(&[]);
    let container = scene.run("it", &[], &["hold"]);
    let me = [("container_name", container.name.as_str())];
    ledger.eventually("its counters", |metrics| {
        for victim in ["main", "child"] {
            for scope in ["container", "host"] {
                let value = metrics.try_value(KILLS, &[me[0], ("victim", victim), ("scope", scope)])?;
                assert_eq!(value, 0.0, "{victim} {scope}");
            }
        }
        assert_eq!(metrics.try_value(RESTARTS, &me)?, 0.0);
        for reason in
            ["completed", "oom_container", "oom_host", "stopped", "killed", "signal", "error", "unknown"]
        {
            assert_eq!(metrics.try_value(EXITS, &[me[0], ("reason", reason)])?, 0.0, "{reason}");
        }
        Ok(())
    });
    assert_eq!(
        ledger.memledger.metrics().get("memledger_container_last_exit_code", &me),
        None,
        "it is still running"
    );
}

#[test]
fn each_kind_of_exit_has_its_reason() {
    let Some(scene) = Scene::new("ends") else { return };
    let ledger = scene.start_memledger(&[]);
    let stopped = scene.run("stopped", &[], &["hold"]);
    stopped.docker(&["stop", "-t", "0"]);
    let killed = scene.run("killed", &[], &["hold"]);
    killed.docker(&["kill"]);
    let script = "trap 'exit 143' TERM; echo ready; while :; do sleep 0.1; done";
    let obeys = scene.run("obeys", &[], &["/bin/sh", "-c", script]);
    eventually_true("it has a signal handler", || has_printed(&obeys, "ready"));
    obeys.docker(&["stop", "-t", "30"]);
    let ends = [
        (scene.run("three", &[], &["exit=3"]), "error", 3),
        (scene.run("aborted", &[], &["abort"]), "signal", 139),
        (scene.run("claims", &[], &["exit=137"]), "killed", 137),
        (scene.run("well", &[], &["exit=0"]), "completed", 0),
        (scene.run("oom", &[], &["eat"]), "oom_container", 137),
        (stopped, "stopped", 137),
        (killed, "stopped", 137),
        (obeys, "stopped", 143),
    ];
    for (container, reason, code) in &ends {
        ledger.ends(&container.name, reason, 1);
        let metrics = ledger.memledger.metrics();
        let me = [("container_name", container.name.as_str())];
        assert_eq!(metrics.value("memledger_container_last_exit_code", &me), f64::from(*code), "{reason}");
        let kills = if *reason == "oom_container" { 1 } else { 0 };
        ledger.settles(&container.name, kills, 0);
        let exits: Vec<_> = ledger
            .events()
            .into_iter()
            .filter(|event| event["type"] == "exit" && event["container_name"] == container.name.as_str())
            .collect();
        let [exit] = &exits[..] else { panic!("{exits:?}") };
        assert_eq!(
            (exit["reason"].as_str(), exit["exit_code"].as_i64()),
            (Some(*reason), Some(i64::from(*code)))
        );
        assert_eq!(exit["oom_kills"], kills);
    }
    scene.wait_for_kills(1);
}

#[test]
fn case_09_exit_137_without_oom_is_not_a_kill() {
    let Some(scene) = Scene::new("no-oom") else { return };
    let ledger = scene.start_memledger(&[]);
    let claims = scene.run("claims", &[], &["exit=137"]);
    let killed = scene.run("killed", &[], &["hold"]);
    killed.docker(&["kill"]);
    ledger.ends(&claims.name, "killed", 1); // the runtime reports it like a SIGKILL
    ledger.ends(&killed.name, "stopped", 1);
    for container in [claims, killed] {
        ledger.settles(&container.name, 0, 0);
    }
}

#[test]
fn case_26_sigkill_from_the_host_is_not_an_oom() {
    let Some(scene) = Scene::new("kill9") else { return };
    let ledger = scene.start_memledger(&[]);
    let main = scene.run("main", &[], &["eat=8", "hold"]);
    let worker = scene.run("worker", &[], &["spawn=1:eat=8,hold", "reap", "hold"]);
    let child = eventually("its child", || {
        worker.pids().into_iter().find(|pid| *pid != worker.pid()).ok_or_else(|| "none".to_owned())
    });
    signal("KILL", child);
    signal("KILL", main.pid());
    ledger.ends(&main.name, "killed", 1);
    ledger.settles(&main.name, 0, 0);
    ledger.settles(&worker.name, 0, 0);
    assert_eq!(ledger.tally(&scene).sum(), 0);
    assert_eq!(scene.kill_count(), 0);
}

#[test]
fn killed_worker_and_later_failure_of_main_process_are_separate() {
    let Some(scene) = Scene::new("later") else { return };
    let ledger = scene.start_memledger(&[]);
    let later = scene.run("later", &[], &["seq=1:eat", "wait=/control/end", "exit=1"]);
    scene.wait_for_kills(1);
    // `child` is only set once it is certain that the kill did not end the container
    ledger.settles(&later.name, 0, 1);
    scene.release("end");
    ledger.ends(&later.name, "error", 1);
    ledger.settles(&later.name, 0, 1);
}

#[test]
fn counters_continue_over_runs_and_restarts_of_memledger() {
    let Some(scene) = Scene::new("goes-on") else { return };
    let state = scene.state();
    let ledger = scene.start_memledger(&[&state]);
    let container = scene.run("it", &[], &["eat"]);
    ledger.settles(&container.name, 1, 0);
    ledger.ends(&container.name, "oom_container", 1);
    container.docker(&["start"]);
    ledger.settles(&container.name, 2, 0);
    ledger.ends(&container.name, "oom_container", 2);
    drop(ledger);
    let ledger = scene.start_memledger(&[&state]);
    ledger.settles(&container.name, 2, 0);
    container.docker(&["start"]);
    scene.wait_for_kills(3);
    ledger.settles(&container.name, 3, 0);
    ledger.ends(&container.name, "oom_container", 3);
    let metrics = ledger.memledger.metrics();
    let me = [("container_name", container.name.as_str())];
    let last = metrics.value("memledger_container_last_oom_kill_timestamp_seconds", &me);
    let now = metrics.value("memledger_snapshot_timestamp_seconds", &[]);
    let began = container.started().as_second() as f64;
    assert!((began - 2.0..=now + 2.0).contains(&last), "{last} of {began} to {now}");
}

#[test]
fn series_remain_after_container_is_removed() {
    let Some(scene) = Scene::new("gone") else { return };
    wait_for_cgroups_in_the_log();
    let ledger = scene.start_memledger(&[]);
    scene.run_to_exit("it", &["seq=1:eat", "eat"]);
    scene.wait_for_kills(2);
    let name = scene.container_name("it");
    ledger.settles(&name, 1, 1);
    assert!(scene.engine.try_docker(&["inspect", &name]).is_err(), "it is removed");
    let metrics = ledger.memledger.fresh_metrics();
    assert_eq!(Ledger::kills(&metrics, &name, "main"), Some(1.0));
}

#[test]
fn events_are_written_to_log_and_ledger() {
    let Some(scene) = Scene::new("written") else { return };
    let state = scene.state();
    let ledger = scene.start_memledger(&[&state]);
    let container = scene.run("it", &[], &["eat"]);
    scene.wait_for_kills(1);
    ledger.settles(&container.name, 1, 0);
    ledger.ends(&container.name, "oom_container", 1);
    eventually("the kill and the exit in the log", || {
        let log = ledger.memledger.log();
        let logged =
            |text: &str| log.lines().any(|line| line.contains(text) && line.contains(&container.name));
        let texts = ["process killed by the OOM killer", "OOM kill settled", "container exited"];
        if texts.into_iter().all(logged) { Ok(()) } else { Err(log) }
    });
    drop(ledger); // the commands read the store with and without a running memledger
    let (code, text, error) = crate::support::run(&["events", "--json", "--limit=0", &state]);
    assert_eq!(code, Some(0), "{error}");
    assert!(text.contains(&container.id), "{text}");
    let (code, text, error) = crate::support::run(&["why", &container.name, &state]);
    assert_eq!(code, Some(0), "{error}");
    assert!(text.contains(&container.name) && text.to_lowercase().contains("oom"), "{text}");
}
