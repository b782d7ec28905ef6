//! The host runs out of memory. Only in the guest: the memory of this machine must not be exhausted.

use serde_json::Value;

use super::unrecorded::{NO_LEDGER, verb};
use crate::support::oom::Scene;
use crate::support::{eventually, in_v2_guest, reaches};

const HOST_PROCESS_KILLS: &str = "memledger_host_process_oom_kills_total";

#[test]
fn case_14a_container_without_limit_is_killed_by_host_oom() {
    if !in_v2_guest() {
        return;
    }
    let Some(scene) = Scene::new("host") else { return };
    let ledger = scene.start_memledger(&[]);
    let bystander = scene.run("bystander", &["--memory=256m"], &["eat=32", "spawn=300:hold", "hold"]);
    ledger.settles(&bystander.name, 0, 0);
    reaches("its processes", 301, || bystander.pids().len());
    let victim = scene.run("victim", &["--memory=0"], &["score=1000", "eat"]);
    victim.docker(&["wait"]); // the guest is slow to fill its memory
    scene.wait_for_kills(1);
    ledger.settles_in("host", &victim.name, 1, 0);
    ledger.ends(&victim.name, "oom_host", 1);
    ledger.settles(&bystander.name, 0, 0);
    assert_eq!(ledger.memledger.fresh_metrics().sum(HOST_PROCESS_KILLS, &[]), 0.0);
    let kill = &ledger.kills_of(&scene)[0];
    let report = &kill["report"];
    assert_eq!((&report["host"], report.get("incomplete")), (&true.into(), None), "{report}");
    assert!(report["process_count"].as_u64().is_some_and(|count| count > 300), "{report}");
    assert_eq!(report["processes"][0]["pid"], kill["pid"], "{report}");
    let container_of = |report: &Value| {
        let rows = report["processes"].as_array();
        let row = rows.and_then(|rows| rows.iter().find(|row| row["pid"] == bystander.pid()));
        row.and_then(|row| row["container"].as_str()).unwrap_or_default().to_owned()
    };
    assert_eq!(container_of(report), bystander.name, "{report}");
    ledger.matches_kernel_count();
    // without a ledger by its cgroup, because it still runs
    eventually("the same by the kernel log", || {
        // Docker may not respond in time so soon after that
        let (_, response) = verb(&scene, &["why", &victim.name, "--json", NO_LEDGER]);
        let verdict: Value =
            serde_json::from_str(&response).map_err(|error| format!("{error}: {response}"))?;
        if container_of(&verdict["report"]) == bystander.name { Ok(()) } else { Err(response) }
    });
}

#[test]
fn case_14b_killed_host_process_belongs_to_no_container() {
    if !in_v2_guest() {
        return;
    }
    let Some(scene) = Scene::new("hostproc") else { return };
    let ledger = scene.start_memledger(&[]);
    let bystander = scene.run("bystander", &[], &["eat=4", "hold"]);
    ledger.settles(&bystander.name, 0, 0);
    let mut hog = scene.run_on_host(&["score=1000", "eat"]);
    hog.0.wait().expect("it ends");
    scene.wait_for_kills(1);
    let tally = ledger.settled_tally(&scene, 1);
    assert_eq!((tally.host, tally.containers.len()), (1, 0), "{tally:?}");
    ledger.eventually("one process of the host", |metrics| {
        match metrics.try_value(HOST_PROCESS_KILLS, &[("scope", "host")])? {
            1.0 => Ok(()),
            other => Err(format!("{other}")),
        }
    });
    ledger.settles(&bystander.name, 0, 0);
    ledger.matches_kernel_count();
}
