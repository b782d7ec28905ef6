//! Kills in pods on cgroup v2 without the kernel log: they are counted, and attributed rightly or not at all. A container's
//! own counter is often removed before it is read, and a pod's counter does not name a container.
//!
//! They run in the guest, where the kernel counts this way and systemd removes the cgroup of a container before it can
//! be read. Pods are slices with the kubelet's names; Docker runs the containers in them, because the guest has no CRI
//! runtime.

use crate::support::cgroups::root;
use crate::support::docker::unique;
use crate::support::oom::{Ledger, Scene, limit};
use crate::support::{eventually, in_v2_guest};

/// Returns a slice name as the kubelet uses for a pod.
fn slice() -> String {
    format!("kubepods-burstable-pod{}.slice", unique("u").replace('-', "_"))
}

/// Which process of a container is killed.
#[derive(Clone, Copy, PartialEq)]
enum Victim {
    /// The first process. Docker reports its exit by SIGKILL and an OOM.
    Main,
    /// A child; the container then exits with status 0. Only the counters show the kill.
    Child,
}

/// Runs containers in a pod that are killed one after the other, beside one that stays. The next one starts when the kill
/// is settled. Prints how many kills stay unattributed.
fn kill_sequentially(
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
        scene.wait_for_kills(number + 1);
        settled = eventually("it is settled", || {
            let found: Vec<_> =
                ledger.events().into_iter().filter(|event| event["type"] == "oom_kill").collect();
            let open = found.iter().filter(|kill| kill["owner"] == "pending").count();
            if found.len() > number && open == 0 { Ok(found) } else { Err(format!("{found:?}")) }
        });
    }
    assert_eq!(settled.len(), kills, "{settled:#?}");
    let unattributed = settled.iter().filter(|kill| kill["owner"] == "unattributed").count();
    eprintln!("of {kills} kills without the kernel log {unattributed} are unattributed");
    let names: Vec<_> = (0..kills).map(|number| scene.container_name(&format!("c{number}"))).collect();
    for (kill, name) in std::iter::zip(&settled, &names) {
        let owner = kill["container_name"].as_str();
        assert!(owner.is_none_or(|owner| owner == name), "{name}: {kill:#}");
    }
    ledger.settles(beside, 0, 0);
    ledger.matches_kernel_count();
}

#[test]
fn kill_in_removed_cgroup_is_never_misattributed() {
    if !in_v2_guest() {
        return;
    }
    let Some(scene) = Scene::new("pod") else { return };
    let ledger = scene.start_memledger(&["--oom.kernel-log=off"]);
    let parent = format!("--cgroup-parent={}", slice());
    let pause = scene.run("pause", &[&parent], &["hold"]);
    ledger.settles(&pause.name, 0, 0);
    kill_sequentially(&scene, &ledger, (Victim::Main, 4), &[&parent], &pause.name);
}

#[test]
fn kill_without_runtime_event_is_never_misattributed() {
    if !in_v2_guest() {
        return;
    }
    let Some(scene) = Scene::new("child") else { return };
    let ledger = scene.start_memledger(&["--oom.kernel-log=off"]);
    let parent = format!("--cgroup-parent={}", slice());
    let pause = scene.run("pause", &[&parent], &["hold"]);
    ledger.settles(&pause.name, 0, 0);
    kill_sequentially(&scene, &ledger, (Victim::Child, 4), &[&parent], &pause.name);
}

#[test]
fn kill_at_pod_limit_is_not_attributed_to_other_memory_holder() {
    if !in_v2_guest() {
        return;
    }
    let Some(scene) = Scene::new("limit") else { return };
    let ledger = scene.start_memledger(&["--oom.kernel-log=off"]);
    let slice = slice();
    let flags = [&format!("--cgroup-parent={slice}"), "--memory=0"];
    let sibling = scene.run("sibling", &flags, &["eat=8", "hold"]);
    ledger.settles(&sibling.name, 0, 0);
    limit(&root().join("kubepods.slice/kubepods-burstable.slice").join(slice), 48 << 20);
    kill_sequentially(&scene, &ledger, (Victim::Main, 4), &flags, &sibling.name);
}
