//! Kills at a cgroup's limit: the victim and its container.

use crate::support::cgroups::is_v2;
use crate::support::docker::signal;
use crate::support::oom::{
    CgroupParent, DUPLICATES, EXITS, KILLS, Ledger, RESTARTS, Scene, cgroup_of, has_printed, limit,
};
use crate::support::{eventually, eventually_true, in_v2_guest, reaches};

#[test]
fn case_01_single_process_is_one_main_kill() {
    let Some(scene) = Scene::new("single") else { return };
    let ledger = scene.start_memledger(&[]);
    let container = scene.run_known(&ledger, "it", &[], &["eat"]);
    let pids = scene.wait_for_kills(1);
    ledger.settles_in("container", &container.name, 1, 0);
    ledger.ends(&container.name, "oom_container", 1);
    let kills = ledger.kills_of(&scene);
    let [kill] = &kills[..] else { panic!("{kills:?}") };
    assert_eq!(kill["pid"], pids[0]);
    assert_eq!(kill["container_id"], container.id.as_str());
    assert_eq!((kill["victim"].as_str(), kill["scope"].as_str()), (Some("main"), Some("container")));
    let anonymous = kill["anon_bytes"].as_u64().expect("its memory");
    assert!((8 << 20..=16 << 20).contains(&anonymous), "{anonymous}");
    ledger.matches_kernel_count();
}

/// As docs/commands.md, "Without a collector", says.
#[test]
fn case_01_kill_and_reason_need_no_collector() {
    let Some(scene) = Scene::new("collectors") else { return };
    let off = ["own", "host", "cgroup", "process", "shm", "pss", "gpu", "amdgpu"];
    let off = off.map(|collector| format!("--no-collector.{collector}"));
    let ledger = scene.start_memledger(&off.each_ref().map(String::as_str));
    let container = scene.run_known(&ledger, "it", &[], &["eat"]);
    scene.wait_for_kills(1);
    ledger.settles_in("container", &container.name, 1, 0);
    ledger.ends(&container.name, "oom_container", 1);
}

#[test]
fn case_01_process_below_shell_or_init_is_main() {
    let Some(scene) = Scene::new("wrapped") else { return };
    let ledger = scene.start_memledger(&[]);
    // the shell stays, because it has another command after the hog
    let shell = scene.run("shell", &[], &["/bin/sh", "-c", "/hog eat; exit $?"]);
    let init = scene.run("init", &["--init"], &["eat"]);
    scene.wait_for_kills(2);
    for container in [shell, init] {
        ledger.settles(&container.name, 1, 0);
        ledger.ends(&container.name, "oom_container", 1);
    }
}

#[test]
fn case_04_killed_worker_is_counted_while_main_process_continues() {
    let Some(scene) = Scene::new("worker") else { return };
    let ledger = scene.start_memledger(&[]);
    let container = scene.run("it", &[], &["seq=1:eat", "wait=/control/end"]);
    scene.wait_for_kills(1);
    ledger.settles_in("container", &container.name, 0, 1);
    assert_eq!(container.inspect("{{.State.Running}}"), "true");
    scene.release("end");
    ledger.ends(&container.name, "completed", 1);
    ledger.settles(&container.name, 0, 1);
}

#[test]
fn case_05_five_sequential_workers_are_five_kills() {
    let Some(scene) = Scene::new("sequence") else { return };
    let ledger = scene.start_memledger(&[]);
    let container = scene.run("it", &[], &["seq=5:eat", "hold"]);
    scene.wait_for_kills(5);
    ledger.settles(&container.name, 0, 5);
    assert_eq!(ledger.tally(&scene).unattributed, 0);
    signal("KILL", container.pid());
}

#[test]
fn case_06_thirty_simultaneous_children_are_thirty_kills() {
    let Some(scene) = Scene::new("parallel") else { return };
    let ledger = scene.start_memledger(&[]);
    let container = scene.run("it", &[], &["par=30:eat", "hold"]);
    scene.wait_for_kills(30);
    ledger.settles(&container.name, 0, 30);
    assert_eq!(ledger.tally(&scene).unattributed, 0);
    ledger.matches_kernel_count();
}

#[test]
fn case_07_process_with_four_threads_is_one_kill() {
    let Some(scene) = Scene::new("threads") else { return };
    let ledger = scene.start_memledger(&[]);
    let container = scene.run_known(&ledger, "it", &[], &["threads=4"]);
    scene.wait_for_kills(1);
    ledger.settles(&container.name, 1, 0);
    ledger.matches_kernel_count();
}

#[test]
fn shared_memory_that_no_process_maps_also_kills() {
    let Some(scene) = Scene::new("shm") else { return };
    let ledger = scene.start_memledger(&[]);
    let container = scene.run_known(&ledger, "it", &["--shm-size=64m"], &["shm"]);
    scene.wait_for_kills(1);
    ledger.settles(&container.name, 1, 0);
    ledger.ends(&container.name, "oom_container", 1);
}

#[test]
fn victim_is_the_process_with_the_highest_score() {
    let Some(scene) = Scene::new("score") else { return };
    let ledger = scene.start_memledger(&[]);
    let container = scene.run(
        "it",
        &[],
        &["spawn=1:score=1000,eat=8,say=ready,hold", "wait=/control/go", "spawn=1:eat=11,hold", "reap"],
    );
    eventually_true("one has its memory", || has_printed(&container, "ready"));
    scene.release("go");
    // the kernel may also kill the other process while the first is exiting
    ledger.eventually("as many as the kernel killed", |metrics| {
        let found = (scene.kill_count() as f64, Ledger::kills(metrics, &container.name, "child"));
        if found.0 >= 1.0 && found.1 == Some(found.0) { Ok(()) } else { Err(format!("{found:?}")) }
    });
    let kills = ledger.kills_of(&scene);
    assert_eq!(
        (kills[0]["pid"].as_u64(), kills[0]["oom_score_adj"].as_i64()),
        (Some(scene.killed_pids()[0].into()), Some(1000))
    );
}

#[test]
fn case_08_container_with_oom_kill_disabled_has_no_kill() {
    if is_v2() {
        return; // v2 has no oom_kill_disable
    }
    let Some(scene) = Scene::new("disabled") else { return };
    let ledger = scene.start_memledger(&[]);
    let container = scene.run("it", &["--oom-kill-disable"], &["eat"]);
    eventually("it waits", || {
        let text = std::fs::read_to_string(container.cgroup().join("memory.oom_control")).unwrap_or_default();
        if text.contains("under_oom 1") { Ok(()) } else { Err(text) }
    });
    container.docker(&["kill"]);
    container.docker(&["wait"]);
    assert_eq!(container.inspect("{{.State.OOMKilled}}"), "true", "the runtime's flag, which is wrong");
    ledger.ends(&container.name, "stopped", 1);
    ledger.settles(&container.name, 0, 0);
    assert_eq!(ledger.tally(&scene).sum(), 0);
    assert_eq!(scene.kill_count(), 0);
}

#[test]
fn case_10_limit_of_parent_cgroup_kills_largest_and_no_other_is_charged() {
    let Some(scene) = Scene::new("parent") else { return };
    let ledger = scene.start_memledger(&[]);
    let parent = CgroupParent::new("oom");
    let big = scene.run("big", &[&parent.flag, "--memory=200m"], &["eat=40", "say=ready", "hold"]);
    eventually_true("it has its memory", || has_printed(&big, "ready"));
    limit(&parent.folder, 64 << 20);
    let steps = ["wait=/control/go", "eat=36", "say=ready", "hold"];
    let small = scene.run("small", &[&parent.flag, "--memory=200m"], &steps);
    let pids = [big.pid(), small.pid()];
    for container in [&big, &small] {
        ledger.knows(container);
    }
    scene.release("go");
    // on a busy host the kernel may kill the small one too, before it has the memory of the big one back
    let runs = || small.inspect("{{.State.Running}}") == "true";
    eventually_true("the small one has its memory, or has ended", || has_printed(&small, "ready") || !runs());
    let small_kills = usize::from(!runs());
    eventually("the kernel's records", || {
        let killed = scene.killed_pids();
        let kills = pids.map(|pid| killed.iter().filter(|killed| **killed == pid).count());
        if kills == [1, small_kills] { Ok(()) } else { Err(format!("{killed:?} of {pids:?}")) }
    });
    ledger.settles_in("container", &big.name, 1, 0);
    ledger.settles(&small.name, small_kills, 0);
}

#[test]
fn case_11_restarting_container_is_counted_over_its_runs() {
    let Some(scene) = Scene::new("restarts") else { return };
    let ledger = scene.start_memledger(&[]);
    let container = scene.run("it", &["--restart=on-failure:4"], &["eat"]);
    scene.wait_for_kills(5);
    ledger.settles(&container.name, 5, 0);
    ledger.ends(&container.name, "oom_container", 5);
    ledger.eventually("four restarts", |metrics| {
        match metrics.try_value(RESTARTS, &[("container_name", &container.name)])? {
            4.0 => Ok(()),
            other => Err(format!("{other}")),
        }
    });
}

#[test]
fn case_12_two_group_kills_at_once_beyond_the_rate_limit_count_each_process_once() {
    if !in_v2_guest() {
        return; // memory.oom.group exists only on v2
    }
    let Some(scene) = Scene::new("groups") else { return };
    let ledger = scene.start_memledger(&["--sample.interval=1s"]);
    const ROUNDS: usize = 4;
    let waits: Vec<_> = (0..ROUNDS).map(|round| format!("wait=/control/noise{round}")).collect();
    let mut steps: Vec<_> = waits.iter().flat_map(|wait| [wait.as_str(), "par=10:eat"]).collect();
    steps.push("hold");
    let noise = scene.run("noise", &[], &steps);
    ledger.settles(&noise.name, 0, 0);
    // a busy host may need more than five seconds from the ten kills to the groups: then the kernel logs their cgroups
    let rounds = (0..ROUNDS).find(|round| two_groups_are_killed(&scene, &ledger, *round));
    if rounds.is_none() {
        eprintln!(
            "the groups were killed too late in each round: the kernel logged their cgroups, and the counts are right"
        );
    }
    ledger.settles(&noise.name, 0, 10 * (rounds.unwrap_or(ROUNDS - 1) + 1));
    let tally = ledger.tally(&scene);
    assert_eq!((tally.unattributed, tally.host), (0, 0), "{tally:?}");
    eprintln!("{} kills, those of two groups among them", tally.sum());
    ledger.matches_kernel_count();
}

/// Kills two groups at once after ten other kills, which use up what the kernel logs of cgroups in five seconds, and checks the
/// counts. Returns whether the kernel logged the cgroup of neither.
fn two_groups_are_killed(scene: &Scene, ledger: &Ledger, round: usize) -> bool {
    let wait = format!("wait=/control/groups{round}");
    let groups = ["a", "b"]
        .map(|what| scene.run(&format!("{what}{round}"), &[], &["spawn=2:eat=1,hold", &wait, "eat"]));
    for container in &groups {
        ledger.settles(&container.name, 0, 0);
    }
    groups.iter().for_each(|group| reaches("its processes", 3, || group.pids().len()));
    let (before, lines_before) = (ledger.count(DUPLICATES), scene.killed_pids().len());
    let members = groups.each_ref().map(|container| {
        std::fs::write(cgroup_of(container.pid()).join("memory.oom.group"), "1").expect("it is a group");
        container.pids()
    });
    scene.release(&format!("noise{round}"));
    scene.wait_for_kills(lines_before + 10);
    scene.release(&format!("groups{round}"));
    groups.iter().for_each(|container| drop(container.docker(&["wait"])));
    // The kernel logs the first victim twice; processes that end with their pid namespace are not logged at all. So the
    // truth is its lines, once for each pid.
    ledger.eventually("every process once, in its own group", |metrics| {
        let lines = scene.killed_pids().split_off(lines_before);
        let pids: std::collections::BTreeSet<_> = lines.iter().collect();
        let wanted =
            members.each_ref().map(|members| members.iter().filter(|pid| pids.contains(pid)).count() as f64);
        let found = groups.each_ref().map(|group| metrics.sum(KILLS, &[("container_name", &group.name)]));
        let duplicates = metrics.value(DUPLICATES, &[]) - before;
        let right = wanted.iter().all(|count| *count >= 2.0)
            && found == wanted
            && duplicates == (lines.len() - pids.len()) as f64;
        right.then_some(()).ok_or_else(|| format!("{found:?} of {wanted:?}, {duplicates} duplicates"))
    });
    let named = scene.named_pids();
    !members.iter().flatten().any(|pid| named.contains(pid))
}

#[test]
fn case_12_victims_of_one_group_kill_share_its_report() {
    if !in_v2_guest() {
        return; // memory.oom.group exists only on v2
    }
    let Some(scene) = Scene::new("group") else { return };
    let ledger = scene.start_memledger(&[]);
    let container = scene.run("it", &[], &["spawn=2:eat=1,hold", "wait=/control/go", "eat"]);
    ledger.settles(&container.name, 0, 0);
    reaches("its processes", 3, || container.pids().len());
    std::fs::write(cgroup_of(container.pid()).join("memory.oom.group"), "1").expect("it is a group");
    let members = container.pids();
    scene.release("go");
    let kills = eventually("the kills of the group", || match ledger.kills_of(&scene) {
        kills if kills.len() >= 2 => Ok(kills),
        kills => Err(format!("{kills:?}")),
    });
    let report = &kills[0]["report"];
    assert_eq!(report["process_count"].as_u64(), Some(members.len() as u64), "{report}");
    assert_eq!(report["limit_bytes"], 16 << 20, "{report}");
    for kill in &kills {
        assert_eq!(kill["report"], *report);
    }
}

/// Kills a process in a cgroup below a container's.
fn kill_below(scene: &Scene, inner: &str) {
    let ledger = scene.start_memledger(&[]);
    let container = scene.run("it", &[], &["seq=1:wait=/control/go,eat", "hold"]);
    let child = eventually("its child", || match container.pids()[..] {
        [main, other] | [other, main] if main == container.pid() => Ok(other),
        ref pids => Err(format!("{pids:?}")),
    });
    let outer = cgroup_of(container.pid());
    let enter = |name: &str, pid: u32| {
        std::fs::create_dir_all(outer.join(name)).expect("a cgroup");
        std::fs::write(outer.join(name).join("cgroup.procs"), pid.to_string()).expect("moved");
    };
    enter(inner, child);
    if is_v2() {
        // no process may remain beside the inner cgroups before their memory is counted separately
        enter("rest", container.pid());
        std::fs::write(outer.join("cgroup.subtree_control"), "+memory").expect("switched on");
    }
    scene.release("go");
    scene.wait_for_kills(1);
    ledger.settles(&container.name, 0, 1);
    let kill = &ledger.kills_of(scene)[0];
    assert_eq!(kill["container_id"], container.id.as_str(), "{kill}");
}

#[test]
fn case_13_nested_cgroup_belongs_to_the_container() {
    let Some(scene) = Scene::new("nested") else { return };
    kill_below(&scene, "inner");
}

#[test]
fn case_13_container_of_a_nested_engine_belongs_to_the_outer_container() {
    let Some(scene) = Scene::new("engine") else { return };
    kill_below(&scene, &format!("docker/{}", "0123456789abcdef".repeat(4)));
}

#[test]
fn case_22_process_of_docker_exec_is_a_child() {
    let Some(scene) = Scene::new("exec") else { return };
    let ledger = scene.start_memledger(&[]);
    let container = scene.run("it", &[], &["hold"]);
    let ended = scene.engine.try_docker(&["exec", &container.id, "/hog", "eat"]);
    assert!(ended.is_err(), "it was killed");
    scene.wait_for_kills(1);
    ledger.settles(&container.name, 0, 1);
    assert_eq!(container.inspect("{{.State.Running}}"), "true");
    let exits = ledger.memledger.metrics().sum(EXITS, &[("container_name", &container.name)]);
    assert_eq!(exits, 0.0);
}
