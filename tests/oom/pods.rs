//! Kills in pods on cgroup v2, seen without the kernel log: the counter of a pod's cgroup stays when a container's is gone.
//!
//! In the guest, where the kernel counts so and systemd removes the cgroup of a container before anybody has read it. Pods
//! are slices with the kubelet's names; Docker runs the containers in them, for the guest has no runtime of pods.

use crate::support::docker::unique;
use crate::support::oom::Scene;
use crate::support::{eventually, in_v2_guest};

#[test]
fn a_kill_whose_cgroup_is_gone_is_the_container_s_that_alone_can_have_had_it() {
    const KILLS: usize = 10;
    if !in_v2_guest() {
        return;
    }
    let Some(scene) = Scene::new("pod") else { return };
    let ledger = scene.watch(&["--oom.kernel-log=off"]);
    let slice = format!("kubepods-burstable-pod{}.slice", unique("u").replace('-', "_"));
    let parent = format!("--cgroup-parent={slice}");
    let pause = scene.run("pause", &[&parent], &["hold"]);
    ledger.settles(&pause.name, 0, 0);
    for number in 0..KILLS {
        let go = format!("go{number}");
        let steps = [&format!("wait=/control/{go}"), "eat"];
        let container = scene.run(&format!("c{number}"), &[&parent], &steps);
        ledger.settles(&container.name, 0, 0); // it was seen, and in which pod
        scene.release(&go);
        container.docker(&["wait"]);
    }
    scene.really_killed(KILLS);
    let settled = eventually("all of them settled", || {
        let kills: Vec<_> = ledger.events().into_iter().filter(|event| event["type"] == "oom_kill").collect();
        let open = kills.iter().filter(|kill| kill["whose"] == "open").count();
        if kills.len() >= KILLS && open == 0 { Ok(kills) } else { Err(format!("{kills:?}")) }
    });
    let unattributed = settled.iter().filter(|kill| kill["whose"] == "unattributed").count();
    assert_eq!((settled.len(), unattributed), (KILLS, 0), "{settled:#?}");
    for number in 0..KILLS {
        ledger.settles(&scene.called(&format!("c{number}")), 1, 0);
    }
    ledger.settles(&pause.name, 0, 0);
    ledger.balances(&scene);
}
