//! Kills while memledger or dockerd is not running, and of memledger itself.

use super::unrecorded::verb;
use crate::support::cgroups::TestCgroup;
use crate::support::docker::of;
use crate::support::oom::ledger::Tally;
use crate::support::oom::{DUPLICATES, HOST_KILLS, KILLS, Ledger, Scene, oom_kills, uptime};
use crate::support::{eventually, eventually_true, in_v2_guest};

#[test]
fn case_15_kills_while_memledger_is_down_are_counted_once_over_restarts() {
    let Some(scene) = Scene::new("down") else { return };
    let state = scene.state();
    let ledger = scene.start_memledger(&[&state]);
    let [stays, ends] = ["stays", "ends"].map(|what| {
        let steps: &[&str] = if what == "stays" {
            &["wait=/control/go", "seq=1:eat", "hold"]
        } else {
            &["wait=/control/go", "eat"]
        };
        scene.run(what, &[], steps)
    });
    for container in [&stays, &ends] {
        ledger.knows(container);
    }
    drop(ledger);
    scene.release("go");
    scene.run_to_exit("removed", &["eat"]);
    scene.wait_for_kills(3);
    for _ in 0..3 {
        let ledger = scene.start_memledger(&[&state]);
        ledger.settles(&stays.name, 0, 1);
        ledger.settles(&ends.name, 1, 0);
        let tally = ledger.settled_tally(&scene, 3);
        // beside bursts of other tests the kernel does not log the cgroup, and the third one's is gone: it may stay
        // unattributed
        let each = |names: &[&str]| names.iter().map(|what| (scene.container_name(what), 1)).collect();
        let all = Tally { containers: each(&["stays", "ends", "removed"]), ..Tally::default() };
        let but_one = Tally { containers: each(&["stays", "ends"]), unattributed: 1, ..Tally::default() };
        assert!(tally == all || tally == but_one, "{tally:?}");
        ledger.ends(&ends.name, "oom_container", 1);
        ledger.matches_kernel_count();
    }
}

#[test]
fn ledger_killed_right_after_first_start_requests_events_since_then() {
    let Some(scene) = Scene::new("begun") else { return };
    let state = scene.state();
    drop(scene.start_memledger(&[&state])); // SIGKILL, before the first event of the runtime
    scene.run_to_exit("removed", &["eat"]);
    scene.wait_for_kills(1);
    let ledger = scene.start_memledger(&[&state]);
    // beside bursts of other tests its kill may stay unattributed, but its name and its exit are known
    let removed = scene.container_name("removed");
    ledger.eventually("its name", |metrics| {
        metrics.try_value("memledger_container_last_exit_code", &[("container_name", &removed)]).map(drop)
    });
    let tally = ledger.settled_tally(&scene, 1);
    assert_eq!(tally.containers.get(&removed).copied().unwrap_or(0) + tally.unattributed, 1, "{tally:?}");
}

#[test]
fn kills_before_first_start_are_listed_by_events_and_counted_by_nothing() {
    let Some(scene) = Scene::new("before") else { return };
    let container = scene.run("it", &[], &["seq=2:eat", "hold"]);
    scene.wait_for_kills(2);
    let state = scene.state();
    let ledger = scene.start_memledger(&[&state]);
    let later = scene.run("later", &[], &["eat"]);
    ledger.settles(&later.name, 1, 0);
    ledger.settles(&container.name, 0, 0);
    assert_eq!(ledger.settled_tally(&scene, 1).sum(), 1);
    ledger.matches_kernel_count();
    let dated = ledger
        .memledger
        .fresh_metrics()
        .get("memledger_container_last_oom_kill_timestamp_seconds", &of(&container.name));
    assert_eq!(dated, None, "no metric dates them");
    let logged = eventually("the later kill in the log", || {
        let log = ledger.memledger.log();
        let is_it = |line: &str| line.contains("OOM kill settled") && line.contains(&later.name);
        if log.lines().any(is_it) { Ok(log) } else { Err(log) }
    });
    let of_past = |line: &str| line.contains("OOM kill") && line.contains(&container.name);
    assert!(!logged.lines().any(of_past), "{logged}");
    let kills = |text: &str| {
        let events: Vec<serde_json::Value> =
            text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let is_kill = |event: &&serde_json::Value| {
            event["type"] == "oom_kill" && event["process"] == scene.tag.as_str()
        };
        events.iter().filter(is_kill).count()
    };
    eventually("the kills of the kernel log", || {
        let (_, listed) = verb(&scene, &["events", "--json", "--since=10m", &state]);
        if kills(&listed) == 3 { Ok(()) } else { Err(listed) }
    });
    drop(ledger);
    // a start that finds a ledger reads on where that ends
    let _while_down = scene.run("while-down", &[], &["eat"]);
    scene.wait_for_kills(4);
    let ledger = scene.start_memledger(&[&state]);
    assert_eq!(ledger.settled_tally(&scene, 2).sum(), 2);
}

#[test]
fn case_17_counts_continue_after_reboot() {
    let Some(scene) = Scene::new("reboot") else { return };
    let state = scene.state();
    let include = format!("--container.include=^{}", scene.name);
    let ledger = scene.start_memledger(&[&state]);
    let container = scene.run("it", &[], &["seq=1:eat", "wait=/control/on", "seq=1:eat", "hold"]);
    scene.wait_for_kills(1);
    ledger.settles(&container.name, 0, 1);
    ledger.matches_kernel_count();
    drop(ledger);
    // The boot id changes, and the log's numbers are below those of the boot before. Everything that this kernel has counted
    // is new in the new boot: it must all be added to the previous counts, once.
    let store = rusqlite::Connection::open(scene.state_folder().join("ledger.sqlite3")).expect("the ledger");
    let numbers = store.execute(
        "UPDATE state SET value = json_set(value, '$.position.sequence', value ->> '$.position.sequence' + 1000000)
         WHERE kind = 'accounting'",
        [],
    );
    assert_eq!(numbers.expect("JSON"), 1);
    // what it had counted at its end, which is later than any scrape
    let counted = "SELECT sum(CAST(value AS INTEGER)) FROM state WHERE kind = 'total' AND key IN ('host_oom_kills', 'oom_duplicate_lines')";
    let before: f64 = store.query_row(counted, [], |row| row.get::<_, u32>(0)).expect("totals").into();
    drop(store);
    let reboot = scene.reboot_wrapper();
    let reboot: Vec<&str> = reboot.iter().map(String::as_str).collect();
    for _ in 0..2 {
        let ledger = scene.start_memledger_through(&reboot, &[&state, &include]);
        eventually("both boots' kills", || {
            let low = oom_kills();
            let metrics = ledger.memledger.metrics();
            let high = oom_kills();
            let found = metrics.try_value(HOST_KILLS, &[])? + metrics.try_value(DUPLICATES, &[])? - before;
            let fits = (low as f64..=high as f64).contains(&found);
            fits.then_some(()).ok_or_else(|| format!("{found} is not in {low}..={high}"))
        });
        // the first snapshots may precede the runtime's list
        let children = ledger.memledger.eventually("its series", |metrics| {
            Ledger::kills(metrics, &container.name, "child").ok_or_else(|| "none".to_owned())
        });
        assert!(children >= 1.0, "a counter never decreases: {children:?}");
        ledger.ends(&container.name, "host_restart", 1); // what the boot before left running, once
        scene.release("on"); // in the second round memledger starts with a kill that it has counted
        scene.wait_for_kills(2);
    }
}

#[test]
fn case_19_kills_while_docker_is_down_are_attributed() {
    let Some((mut private, scene)) = Scene::with_private_docker("no-daemon") else { return };
    let ledger = scene.start_memledger(&[]);
    let main = scene.run("main", &[], &["wait=/control/go", "eat"]);
    let worker = scene.run("worker", &[], &["wait=/control/go", "seq=1:eat", "hold"]);
    for container in [&main, &worker] {
        ledger.knows(container);
    }
    private.stop();
    scene.release("go");
    scene.wait_for_kills(2);
    ledger.eventually("the totals, without the daemon", |metrics| match metrics.value(HOST_KILLS, &[]) {
        total if total >= 2.0 => Ok(()),
        total => Err(format!("{total}")),
    });
    private.start();
    ledger.settles(&main.name, 1, 0);
    ledger.settles(&worker.name, 0, 1);
    assert_eq!(ledger.settled_tally(&scene, 2).unattributed, 0);
    drop((main, worker));
}

#[test]
fn kill_that_ended_its_container_is_known_although_a_busy_docker_reports_the_exit_late() {
    let Some((private, scene)) = Scene::with_private_docker("busy") else { return };
    let ledger = scene.start_memledger(&[]);
    // the first process is not the victim, and its exit is that of a child within five seconds after the kill
    let shell = scene.run("shell", &[], &["/bin/sh", "-c", "/hog wait=/control/go eat; exit $?"]);
    let worker = scene.run("worker", &[], &["wait=/control/worker", "seq=1:eat", "hold"]);
    for container in [&shell, &worker] {
        ledger.knows(container);
    }
    scene.release("worker");
    scene.wait_for_kills(1);
    private.while_busy(|| {
        scene.release("go");
        scene.wait_for_kills(2);
        let killed = uptime();
        eventually_true("longer than a kill waits for an exit", || uptime() - killed >= 6.0);
    });
    ledger.settles(&shell.name, 1, 0);
    ledger.ends(&shell.name, "oom_container", 1);
    ledger.settles(&worker.name, 0, 1);
}

#[test]
fn case_24_memledger_stopped_for_half_a_minute_counts_all_kills() {
    let Some(scene) = Scene::new("half-minute") else { return };
    let ledger = scene.start_memledger(&[]);
    let steps = ["seq=2:eat", "wait=/control/one", "seq=10:eat", "wait=/control/two", "seq=2:eat", "hold"];
    let container = scene.run("it", &[], &steps);
    ledger.settles(&container.name, 0, 2);
    ledger.memledger.signal("STOP");
    let began = uptime();
    scene.run_to_exit("removed", &["seq=2:eat", "eat"]);
    scene.release("one");
    scene.wait_for_kills(15);
    eventually_true("half a minute", || uptime() - began >= 30.0);
    let other = scene.run("late", &[], &["eat"]);
    scene.wait_for_kills(16);
    ledger.memledger.signal("CONT");
    scene.release("two");
    scene.wait_for_kills(18);
    ledger.matches_kernel_count();
    // The processes killed meanwhile were gone when memledger continued, the kernel logs ten cgroups in five seconds,
    // and the log of a small machine was overwritten: not every kill can be attributed, but none to another container.
    let own = [(container.name.clone(), 14), (other.name.clone(), 1), (scene.container_name("removed"), 3)];
    let tally = eventually("all settled", || {
        let tally = ledger.tally(&scene);
        if tally.pending == 0 { Ok(tally) } else { Err(format!("{tally:?}")) }
    });
    assert_eq!(tally.host, 0, "{tally:?}");
    for (name, count) in &tally.containers {
        let most = own.iter().find(|(own, _)| own == name).map_or(0, |(_, most)| *most);
        assert!(*count <= most, "{name}: {tally:?}");
    }
    ledger.eventually("its kills before and after", |metrics| {
        match Ledger::kills(metrics, &container.name, "child") {
            Some(kills) if (4.0..=14.0).contains(&kills) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });
}

/// Changes this machine's clock with `date`, which is only allowed in the guest.
fn move_clock(seconds: i64) {
    let now = std::time::UNIX_EPOCH.elapsed().expect("after 1970").as_secs() as i64;
    let set = std::process::Command::new("date").args(["-s", &format!("@{}", now + seconds)]).output();
    let set = set.expect("date runs");
    assert!(set.status.success(), "{}", String::from_utf8_lossy(&set.stderr));
}

#[test]
fn clock_jump_of_a_day_changes_no_count() {
    if !in_v2_guest() {
        return; // the clock of this machine must not be changed
    }
    let Some(scene) = Scene::new("clock") else { return };
    let ledger = scene.start_memledger(&[&scene.state()]);
    let steps = ["seq=1:eat", "wait=/control/one", "seq=1:eat", "wait=/control/two", "seq=1:eat", "hold"];
    let container = scene.run("it", &[], &steps);
    ledger.settles(&container.name, 0, 1);
    for (number, (release, seconds)) in [("one", 86_400), ("two", -86_400)].into_iter().enumerate() {
        move_clock(seconds);
        scene.release(release);
        let fails = scene.run(&format!("fails-{release}"), &[], &["exit=3"]);
        let dies = scene.run_known(&ledger, &format!("dies-{release}"), &[], &["eat"]);
        scene.wait_for_kills(3 + 2 * number);
        ledger.settles(&container.name, 0, 2 + number);
        ledger.settles(&dies.name, 1, 0);
        ledger.ends(&fails.name, "error", 1);
        ledger.ends(&dies.name, "oom_container", 1);
        ledger.memledger.fresh_metrics(); // sampling continues
    }
    let tally = ledger.settled_tally(&scene, 5);
    assert_eq!((tally.host, tally.unattributed), (0, 0), "{tally:?}");
    ledger.matches_kernel_count();
}

#[test]
fn case_25_two_memledgers_agree() {
    let Some(scene) = Scene::new("two") else { return };
    let ledgers = [scene.start_memledger(&[]), scene.start_memledger(&[])];
    let worker = scene.run("worker", &[], &["seq=3:eat", "hold"]);
    scene.run_to_exit("removed", &["seq=2:eat", "eat"]);
    scene.wait_for_kills(6);
    for ledger in &ledgers {
        ledger.settles(&worker.name, 0, 3);
        ledger.settles(&scene.container_name("removed"), 1, 2);
        ledger.matches_kernel_count();
    }
    let [one, other] = ledgers.each_ref().map(|ledger| {
        let facts = |kill: &serde_json::Value| {
            ["pid", "process", "container_id", "victim", "scope", "anon_bytes", "kernel_usec"]
                .map(|key| kill[key].clone())
        };
        ledger.kills_of(&scene).iter().map(facts).collect::<Vec<_>>()
    });
    assert_eq!(one, other);
}

#[test]
fn case_28_memledger_killed_by_oom_counts_its_own_kill_after_restart() {
    let Some(scene) = Scene::new("itself") else { return };
    let cgroup = TestCgroup::container();
    let state = scene.state();
    let include = format!("--container.include=^({}|{})", scene.name, cgroup.name());
    let ledger = scene.start_memledger_for_all(&[&state, &include]);
    let bystander = scene.run("bystander", &[], &["hold"]);
    ledger.settles(&bystander.name, 0, 0);
    let pid = ledger.memledger.pid();
    cgroup.limit(16 << 20);
    cgroup.add(pid);
    std::fs::write(format!("/proc/{pid}/oom_score_adj"), "1000").expect("the score");
    // the hog allocates memory, and the kernel chooses memledger
    let hog = scene.run_in(&cgroup, &["eat"]);
    ledger.memledger.wait();
    drop(hog);
    let ledger = scene.start_memledger_for_all(&[&state, &include]);
    ledger.eventually("its own kill", |metrics| {
        match metrics.sum(KILLS, &[("container_name", cgroup.name())]) {
            kills if kills >= 1.0 => Ok(()),
            kills => Err(format!("{kills}")),
        }
    });
    ledger.settles(&bystander.name, 0, 0);
    let own: Vec<_> = ledger.events().into_iter().filter(|event| event["pid"] == pid).collect();
    assert_eq!(own.len(), 1, "{own:?}");
    ledger.matches_kernel_count();
}
