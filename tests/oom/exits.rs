//! Ends of containers: each kind told apart, counters that are born at 0 and go on.

use crate::support::docker::signal;
use crate::support::oom::{EXITS, KILLS, Ledger, RESTARTS, Scene, said};
use crate::support::{eventually, eventually_true};

#[test]
fn counters_are_born_at_0_before_anything_has_happened() {
    let Some(scene) = Scene::new("born") else { return };
    let ledger = scene.watch(&[]);
    let container = scene.run("it", &[], &["hold"]);
    let me = [("container_name", container.name.as_str())];
    ledger.eventually("its counters", |metrics| {
        for victim in ["main", "child"] {
            for scope in ["container", "host"] {
                let value = metrics.ask(KILLS, &[me[0], ("victim", victim), ("scope", scope)])?;
                assert_eq!(value, 0.0, "{victim} {scope}");
            }
        }
        assert_eq!(metrics.ask(RESTARTS, &me)?, 0.0);
        for reason in
            ["completed", "oom_container", "oom_host", "stopped", "killed", "signal", "error", "unknown"]
        {
            assert_eq!(metrics.ask(EXITS, &[me[0], ("reason", reason)])?, 0.0, "{reason}");
        }
        Ok(())
    });
    assert_eq!(
        ledger.memledger.metrics().get("memledger_container_last_exit_code", &me),
        None,
        "it has not ended"
    );
}

#[test]
fn every_kind_of_end_has_its_own_reason() {
    let Some(scene) = Scene::new("ends") else { return };
    let ledger = scene.watch(&[]);
    let stopped = scene.run("stopped", &[], &["hold"]);
    stopped.docker(&["stop", "-t", "0"]);
    let asked = scene.run("asked", &[], &["hold"]);
    asked.docker(&["kill"]);
    let script = "trap 'exit 143' TERM; echo ready; while :; do sleep 0.1; done";
    let obeys = scene.run("obeys", &[], &["/bin/sh", "-c", script]);
    eventually_true("it listens", || said(&obeys, "ready"));
    obeys.docker(&["stop", "-t", "30"]);
    let ends = [
        (scene.run("three", &[], &["exit=3"]), "error", 3),
        (scene.run("aborted", &[], &["abort"]), "signal", 139),
        (scene.run("claims", &[], &["exit=137"]), "killed", 137),
        (scene.run("well", &[], &["exit=0"]), "completed", 0),
        (scene.run("oom", &[], &["eat"]), "oom_container", 137),
        (stopped, "stopped", 137),
        (asked, "stopped", 137),
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
    scene.really_killed(1);
}

#[test]
fn case_09_an_exit_137_without_an_oom_is_no_kill() {
    let Some(scene) = Scene::new("no-oom") else { return };
    let ledger = scene.watch(&[]);
    let claims = scene.run("claims", &[], &["exit=137"]);
    let asked = scene.run("asked", &[], &["hold"]);
    asked.docker(&["kill"]);
    ledger.ends(&claims.name, "killed", 1); // the runtime tells it as it tells a SIGKILL
    ledger.ends(&asked.name, "stopped", 1);
    for container in [claims, asked] {
        ledger.settles(&container.name, 0, 0);
    }
}

#[test]
fn case_26_a_kill_from_the_host_is_no_oom() {
    let Some(scene) = Scene::new("kill9") else { return };
    let ledger = scene.watch(&[]);
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
    assert_eq!(scene.killed_so_far(), 0);
}

#[test]
fn a_worker_that_was_killed_and_a_main_process_that_fails_much_later_are_two_things() {
    let Some(scene) = Scene::new("later") else { return };
    let ledger = scene.watch(&[]);
    let later = scene.run("later", &[], &["seq=1:eat", "wait=/control/end", "exit=1"]);
    scene.really_killed(1);
    // `child` is only said once it is certain that the container did not end of it
    ledger.settles(&later.name, 0, 1);
    scene.release("end");
    ledger.ends(&later.name, "error", 1);
    ledger.settles(&later.name, 0, 1);
}

#[test]
fn counters_go_on_over_runs_of_the_container_and_of_memledger() {
    let Some(scene) = Scene::new("goes-on") else { return };
    let state = scene.state();
    let ledger = scene.watch(&[&state]);
    let container = scene.run("it", &[], &["eat"]);
    ledger.settles(&container.name, 1, 0);
    ledger.ends(&container.name, "oom_container", 1);
    container.docker(&["start"]);
    ledger.settles(&container.name, 2, 0);
    ledger.ends(&container.name, "oom_container", 2);
    drop(ledger);
    let ledger = scene.watch(&[&state]);
    ledger.settles(&container.name, 2, 0);
    container.docker(&["start"]);
    scene.really_killed(3);
    ledger.settles(&container.name, 3, 0);
    ledger.ends(&container.name, "oom_container", 3);
    let metrics = ledger.memledger.metrics();
    let me = [("container_name", container.name.as_str())];
    let last = metrics.value("memledger_container_last_oom_kill_timestamp_seconds", &me);
    let now = metrics.value("memledger_snapshot_timestamp_seconds", &[]);
    assert!((now - 60.0..=now + 2.0).contains(&last), "{last} of {now}");
}

#[test]
fn series_stay_after_the_container_is_gone() {
    let Some(scene) = Scene::new("gone") else { return };
    let ledger = scene.watch(&[]);
    scene.run_to_its_end("it", &["seq=1:eat", "eat"]);
    scene.really_killed(2);
    let name = scene.called("it");
    ledger.settles(&name, 1, 1);
    assert!(scene.engine.try_docker(&["inspect", &name]).is_err(), "it is removed");
    let metrics = ledger.memledger.fresh_metrics();
    assert_eq!(Ledger::kills(&metrics, &name, "main"), Some(1.0));
}

#[test]
fn events_go_to_the_file_and_the_log_too() {
    let Some(scene) = Scene::new("written") else { return };
    let file = scene.path("events.jsonl");
    let (state, events) = (scene.state(), format!("--events.file={}", file.display()));
    let ledger = scene.watch(&[&state, &events]);
    let container = scene.run("it", &[], &["eat"]);
    scene.really_killed(1);
    ledger.settles(&container.name, 1, 0);
    ledger.ends(&container.name, "oom_container", 1);
    eventually("the kill in the file", || {
        let text = std::fs::read_to_string(&file).map_err(|error| error.to_string())?;
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect();
        let of = |kind: &str| {
            lines.iter().any(|line| line["type"] == kind && line["container_name"] == container.name.as_str())
        };
        if of("oom_kill") && of("exit") { Ok(()) } else { Err(text) }
    });
    let log = ledger.memledger.log();
    let warned = |line: &str| line.contains("level=warn") && line.contains(&container.name);
    assert!(log.lines().any(warned), "{log}");
    drop(ledger); // the commands read the store of a memledger that runs, and of one that does not
    let (code, text, error) = crate::support::run(&["events", "--json", &state]);
    assert_eq!(code, Some(0), "{error}");
    assert!(text.contains(&container.id), "{text}");
    let (code, text, error) = crate::support::run(&["why", &container.name, &state]);
    assert_eq!(code, Some(0), "{error}");
    assert!(text.contains(&container.name) && text.to_lowercase().contains("oom"), "{text}");
}
