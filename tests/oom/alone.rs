//! Tests that need this kernel for themselves: they overwrite its log, or compare all kills of the host.
//!
//! `.config/nextest.toml` runs them without other tests; the v2 guest runs tests one after the other anyway.

use crate::support::oom::{
    DUPLICATES, GAPS, HOST_KILLS, KILLS, Scene, UNATTRIBUTED, flood_kernel_log, oom_kills, uptime,
};
use crate::support::{eventually_true, reaches};

/// Kills in one container that keeps running; more than fit into the log in the tests that overwrite it.
const BURST: usize = 60;

#[test]
fn totals_match_the_kernel_exactly_without_remainder() {
    let Some(scene) = Scene::new("books") else { return };
    let before = oom_kills();
    let ledger = scene.start_memledger(&[]);
    let start = ledger.memledger.metrics();
    let unattributed = start.value(UNATTRIBUTED, &[]);
    let container = scene.run("it", &[], &["seq=10:eat", "par=10:eat", "threads=4"]);
    scene.wait_for_kills(21);
    ledger.settles(&container.name, 1, 20);
    assert_eq!(oom_kills() - before, 21, "another's kill: this test was not alone");
    let metrics = ledger.memledger.fresh_metrics();
    assert_eq!(metrics.value(HOST_KILLS, &[]) - start.value(HOST_KILLS, &[]), 21.0);
    assert_eq!(metrics.value(DUPLICATES, &[]), start.value(DUPLICATES, &[]));
    assert_eq!(metrics.value(GAPS, &[]), start.value(GAPS, &[]));
    assert_eq!(metrics.value(UNATTRIBUTED, &[]), unattributed);
}

#[test]
fn case_16_log_overwritten_while_memledger_is_down_leaves_gaps() {
    let Some(scene) = Scene::new("overrun") else { return };
    let state = scene.state();
    let ledger = scene.start_memledger(&[&state]);
    let container = scene.run("it", &[], &["wait=/control/go", &format!("seq={BURST}:eat"), "hold"]);
    ledger.settles(&container.name, 0, 0);
    let gaps = ledger.count(GAPS);
    drop(ledger);
    scene.release("go");
    scene.wait_for_kills(BURST);
    flood_kernel_log();
    for _ in 0..2 {
        let ledger = scene.start_memledger(&[&state]);
        ledger.matches_kernel_count();
        ledger.eventually("the gap", |metrics| match metrics.value(GAPS, &[]) - gaps {
            gap if gap == BURST as f64 => Ok(()),
            gap => Err(format!("{gap} of {BURST}")),
        });
        // the container is running, and its counter shows its kills
        ledger.settles(&container.name, 0, BURST);
    }
}

#[test]
fn case_16_kill_of_a_removed_container_without_a_record_is_no_other_containers() {
    let Some(scene) = Scene::new("gone") else { return };
    let state = scene.state();
    let ledger = scene.start_memledger(&[&state]);
    let stays = scene.run("stays", &[], &["hold"]);
    ledger.settles(&stays.name, 0, 0);
    let before = ledger.memledger.metrics();
    drop(ledger);
    assert_eq!(scene.run_to_exit("gone", &["seq=2:eat", "eat"]), 137);
    scene.wait_for_kills(3);
    flood_kernel_log();
    let gone = scene.container_name("gone");
    for _ in 0..2 {
        let ledger = scene.start_memledger(&[&state]);
        ledger.matches_kernel_count();
        // Docker's event log still has its exit, and if Docker saw it, that there was an OOM
        ledger.eventually("three gaps, of it or unattributed", |metrics| {
            let own = metrics.sum(KILLS, &[("container_name", &gone)]);
            let gaps = metrics.value(GAPS, &[]) - before.value(GAPS, &[]);
            let unattributed = metrics.value(UNATTRIBUTED, &[]) - before.value(UNATTRIBUTED, &[]);
            let right = gaps == 3.0 && own + unattributed == 3.0;
            right.then_some(()).ok_or_else(|| format!("{gaps} gaps, {own} own, {unattributed} unattributed"))
        });
        ledger.settles(&stays.name, 0, 0);
        // an exit 137 beside a kill of unknown owner may have been that kill
        let (status, verdict) = ledger.memledger.get(&format!("/api/v1/containers/{gone}/why"));
        assert_eq!(status, 200, "{verdict}");
        let verdict: serde_json::Value = serde_json::from_str(&verdict).expect("JSON");
        assert_eq!(
            (&verdict["cause"], &verdict["confidence"]),
            (&"unknown".into(), &"unsure".into()),
            "{verdict}"
        );
    }
}

#[test]
fn report_whose_begin_is_overwritten_is_incomplete() {
    let Some(scene) = Scene::new("table") else { return };
    let state = scene.state();
    let ledger = scene.start_memledger(&[&state]);
    // a line of the report for each process: more than fit into the log of 128 KiB
    let steps = ["spawn=1800:hold", "wait=/control/go", "eat"];
    let container = scene.run("it", &["--memory=3g", "--memory-swap=3g"], &steps);
    ledger.settles(&container.name, 0, 0);
    reaches("its processes", 1801, || container.pids().len());
    drop(ledger);
    scene.release("go");
    scene.wait_for_kills(1);
    let ledger = scene.start_memledger(&[&state]);
    ledger.settles(&container.name, 1, 0);
    let kill = &ledger.kills_of(&scene)[0];
    assert_eq!(kill["report"]["incomplete"], true, "{kill}");
    ledger.matches_kernel_count();
}

#[test]
fn case_24_log_overwritten_while_memledger_is_stopped_leaves_gaps() {
    let Some(scene) = Scene::new("still") else { return };
    let ledger = scene.start_memledger(&[]);
    let container = scene.run("it", &[], &["wait=/control/go", &format!("seq={BURST}:eat"), "hold"]);
    ledger.settles(&container.name, 0, 0);
    let (gaps, unattributed) = (ledger.count(GAPS), ledger.count(UNATTRIBUTED));
    ledger.memledger.signal("STOP");
    scene.release("go");
    scene.wait_for_kills(BURST);
    let last = uptime();
    flood_kernel_log();
    // the kernel logs the cgroups of ten kills in five seconds
    eventually_true("it logs cgroups again", || uptime() - last >= 6.0);
    let truth = scene.run_to_exit("after", &["eat"]);
    assert_eq!(truth, 137);
    ledger.memledger.signal("CONT");
    ledger.matches_kernel_count();
    ledger.settles(&container.name, 0, BURST);
    // its record is in the log: no gap, whatever Docker saw of it
    ledger.settles(&scene.container_name("after"), 1, 0);
    assert_eq!((ledger.count(GAPS) - gaps, ledger.count(UNATTRIBUTED) - unattributed), (BURST as f64, 0.0));
}
