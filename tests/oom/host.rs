//! The host runs out of memory. Only in the guest: the memory of this machine must not be exhausted.

use crate::support::in_v2_guest;
use crate::support::oom::Scene;

const HOST_PROCESS_KILLS: &str = "memledger_host_process_oom_kills_total";

#[test]
fn case_14a_container_without_limit_is_killed_by_host_oom() {
    if !in_v2_guest() {
        return;
    }
    let Some(scene) = Scene::new("host") else { return };
    let ledger = scene.watch(&[]);
    let bystander = scene.run("bystander", &[], &["eat=4", "hold"]);
    ledger.settles(&bystander.name, 0, 0);
    let victim = scene.run("victim", &["--memory=0"], &["score=1000", "eat"]);
    victim.docker(&["wait"]); // the guest is slow to fill its memory
    scene.wait_for_kills(1);
    ledger.settles_in("host", &victim.name, 1, 0);
    ledger.ends(&victim.name, "oom_host", 1);
    ledger.settles(&bystander.name, 0, 0);
    assert_eq!(ledger.memledger.metrics().value(HOST_PROCESS_KILLS, &[]), 0.0);
    ledger.matches_kernel_count();
}

#[test]
fn case_14b_killed_host_process_belongs_to_no_container() {
    if !in_v2_guest() {
        return;
    }
    let Some(scene) = Scene::new("hostproc") else { return };
    let ledger = scene.watch(&[]);
    let bystander = scene.run("bystander", &[], &["eat=4", "hold"]);
    ledger.settles(&bystander.name, 0, 0);
    let mut hog = scene.run_on_host(&["score=1000", "eat"]);
    hog.0.wait().expect("it ends");
    scene.wait_for_kills(1);
    let tally = ledger.settled_tally(&scene, 1);
    assert_eq!((tally.host, tally.containers.len()), (1, 0), "{tally:?}");
    ledger.eventually("one process of the host", |metrics| match metrics.ask(HOST_PROCESS_KILLS, &[])? {
        1.0 => Ok(()),
        other => Err(format!("{other}")),
    });
    ledger.settles(&bystander.name, 0, 0);
    ledger.matches_kernel_count();
}
