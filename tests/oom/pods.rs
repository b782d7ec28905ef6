//! Kills in pods on cgroup v2, seen without the kernel log: the counter of a pod's cgroup stays when a container's is gone.
//!
//! In the guest, where the kernel counts so and systemd removes the cgroup of a container before anybody has read it. Pods
//! are slices with the kubelet's names; Docker runs the containers in them, for the guest has no runtime of pods.

use crate::support::cgroups::root;
use crate::support::docker::unique;
use crate::support::oom::{Ledger, Scene, limit};
use crate::support::{eventually, in_v2_guest};

/// A slice as the kubelet has it for a pod.
fn slice() -> String {
    format!("kubepods-burstable-pod{}.slice", unique("u").replace('-', "_"))
}

/// Which process of a container is killed.
#[derive(Clone, Copy, PartialEq)]
enum Victim {
    /// The first. Docker tells of its end by SIGKILL, and of an OOM, and may be believed.
    Main,
    /// A child; the container ends with status 0 thereupon. That it was killed only the counters tell.
    Child,
}

/// Containers that begin, are seen in their pod, and are killed, one after the other, beside one that stays. Every kill
/// must be found with its container. The next one begins when the kill is settled: if it began within a second or two, it
/// might have been the victim too, for all that a counter tells, and nobody would be named.
fn one_after_the_other(
    scene: &Scene,
    ledger: &Ledger,
    (victim, kills): (Victim, usize),
    flags: &[&str],
    beside: &str,
) {
    let mut settled = vec![];
    for number in 0..kills {
        let go = format!("go{number}");
        let eat = if victim == Victim::Main { "eat" } else { "seq=1:eat" };
        let steps = [&format!("wait=/control/{go}"), eat];
        let container = scene.run(&format!("c{number}"), flags, &steps);
        ledger.settles(&container.name, 0, 0);
        scene.release(&go);
        container.docker(&["wait"]);
        scene.really_killed(number + 1);
        settled = eventually("it is settled", || {
            let found: Vec<_> =
                ledger.events().into_iter().filter(|event| event["type"] == "oom_kill").collect();
            let open = found.iter().filter(|kill| kill["whose"] == "open").count();
            if found.len() > number && open == 0 { Ok(found) } else { Err(format!("{found:?}")) }
        });
    }
    let unattributed = settled.iter().filter(|kill| kill["whose"] == "unattributed").count();
    assert_eq!((settled.len(), unattributed), (kills, 0), "{settled:#?}");
    let of_counters: Vec<_> = settled.iter().filter(|kill| kill["method"] == "cgroup").collect();
    let of_pods =
        of_counters.iter().filter(|kill| kill["evidence"].to_string().contains("of its pod")).count();
    eprintln!("of {kills} kills {} by a counter, {of_pods} by the pod's", of_counters.len());
    assert!(victim == Victim::Main || of_counters.len() == kills, "{settled:#?}");
    let (main, child) = if victim == Victim::Main { (1, 0) } else { (0, 1) };
    for number in 0..kills {
        ledger.settles(&scene.called(&format!("c{number}")), main, child);
    }
    ledger.settles(beside, 0, 0);
    ledger.balances();
}

#[test]
fn a_kill_whose_cgroup_is_gone_is_the_container_s_that_alone_can_have_had_it() {
    if !in_v2_guest() {
        return;
    }
    let Some(scene) = Scene::new("pod") else { return };
    let ledger = scene.watch(&["--oom.kernel-log=off"]);
    let parent = format!("--cgroup-parent={}", slice());
    let pause = scene.run("pause", &[&parent], &["hold"]);
    ledger.settles(&pause.name, 0, 0);
    one_after_the_other(&scene, &ledger, (Victim::Main, 4), &[&parent], &pause.name);
}

#[test]
fn a_kill_that_no_runtime_tells_of_is_found_by_the_counters_alone() {
    if !in_v2_guest() {
        return;
    }
    let Some(scene) = Scene::new("child") else { return };
    let ledger = scene.watch(&["--oom.kernel-log=off"]);
    let parent = format!("--cgroup-parent={}", slice());
    let pause = scene.run("pause", &[&parent], &["hold"]);
    ledger.settles(&pause.name, 0, 0);
    one_after_the_other(&scene, &ledger, (Victim::Child, 4), &[&parent], &pause.name);
}

#[test]
fn a_kill_by_the_limit_of_the_pod_is_found_so_too_and_who_holds_memory_beside_it_is_not_blamed() {
    if !in_v2_guest() {
        return;
    }
    let Some(scene) = Scene::new("limit") else { return };
    let ledger = scene.watch(&["--oom.kernel-log=off"]);
    let slice = slice();
    let flags = [&format!("--cgroup-parent={slice}"), "--memory=0"];
    let holds = scene.run("holds", &flags, &["eat=8", "hold"]);
    ledger.settles(&holds.name, 0, 0);
    limit(&root().join("kubepods.slice/kubepods-burstable.slice").join(slice), 48 << 20);
    one_after_the_other(&scene, &ledger, (Victim::Main, 4), &flags, &holds.name);
}
