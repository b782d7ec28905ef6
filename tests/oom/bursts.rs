//! Many kills in containers that are removed at once, while sources are missing and programs are stopped or killed.
//!
//! The count must be right, and no container may get another's kill. The number of unattributed kills is limited: with all sources on
//! an idle host it is 0.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::prometheus::{Prometheus, provided};
use crate::support::oom::{GAPS, HOST_KILLS, Ledger, Scene, oom_kills, wait_for_cgroups_in_the_log};
use crate::support::{eventually, in_v2_guest};

/// 200 kills: containers, and kills in each. In the guest a container takes seconds to start.
const BURST: (usize, usize) = (50, 4);
/// The size for variants of the first test.
const SHORTER: (usize, usize) = (20, 10);
const IN_GUEST: (usize, usize) = (8, 25);

fn size(wanted: (usize, usize)) -> (usize, usize) {
    if in_v2_guest() { IN_GUEST } else { wanted }
}

fn all(truth: &BTreeMap<String, usize>) -> usize {
    truth.values().sum()
}

/// Returns how many of so many kills may stay unattributed: on a busy machine a container of a burst may be removed
/// before any source but the kernel's counter shows its kill. On an idle machine there are none.
fn most_unattributed(kills: usize) -> usize {
    kills / 10
}

/// Kills whose cgroup the kernel logs in five seconds. Where neither the process nor its container's counter can be read in time, these
/// alone are certain to be attributed; how many others are depends on which counters were read just before their cgroups were removed.
const LOGGED_WITH_CGROUP: usize = 10;

#[test]
fn case_02_fifty_sequential_containers_with_rm() {
    let Some(scene) = Scene::new("fifty") else { return };
    let ledger = scene.start_memledger(&[]);
    let truth = scene.burst(if in_v2_guest() { 10 } else { 50 }, 1, 1);
    ledger.has_exact_counts(&scene, &truth);
    ledger.matches_kernel_count();
}

#[test]
fn case_03_fifty_containers_with_rm_eight_at_a_time() {
    let Some(scene) = Scene::new("eight") else { return };
    let ledger = scene.start_memledger(&[]);
    let truth = scene.burst(if in_v2_guest() { 12 } else { 50 }, 1, 8);
    let lost = ledger.has_no_misattribution(&scene, &truth);
    assert!(lost <= most_unattributed(all(&truth)), "{lost} unattributed");
    if lost == 0 {
        ledger.has_exact_counts(&scene, &truth); // each ended its container
    }
    ledger.matches_kernel_count();
}

#[test]
fn case_23_ten_fast_kills_in_cgroups_removed_at_once() {
    if !in_v2_guest() {
        return; // the race is with systemd, which removes the scope before the runtime has read its counter
    }
    let Some(scene) = Scene::new("fast") else { return };
    let ledger = scene.start_memledger(&[]);
    let truth = scene.burst(10, 1, 2);
    let lost = ledger.has_no_misattribution(&scene, &truth);
    assert!(lost <= 2, "{lost} unattributed");
}

#[test]
fn two_hundred_kills_in_containers_with_rm_are_attributed() {
    let Some(scene) = Scene::new("burst") else { return };
    let ledger = scene.start_memledger(&[]);
    let (containers, kills) = size(BURST);
    let truth = scene.burst(containers, kills, 8);
    let lost = ledger.has_no_misattribution(&scene, &truth);
    assert!(lost <= most_unattributed(all(&truth)), "{lost} unattributed");
    ledger.matches_kernel_count();
}

/// Returns the number of kills in a test of docs/oom.md's table: `MEMLEDGER_TEST_KILLS`, 200.
fn wanted_kills() -> usize {
    std::env::var("MEMLEDGER_TEST_KILLS").map_or(200, |kills| kills.parse().expect("a number"))
}

/// At the product's defaults: bursts of containers of random numbers, several at a time, until there were so many kills
/// (`MEMLEDGER_TEST_KILLS`, 200). docs/oom.md has the measured numbers.
#[test]
fn bursts_at_random_rates_with_default_sampling_misattribute_no_kill() {
    let Some(scene) = Scene::new("random") else { return };
    let ledger = scene.start_memledger(&["--sample.interval=1s"]);
    let wanted = if in_v2_guest() { wanted_kills() / 10 } else { wanted_kills() };
    let mut truth = BTreeMap::new();
    while all(&truth) < wanted {
        let (containers, at_once) = (1 + random_below(12) as usize, 1 + random_below(8) as usize);
        for (name, kills) in scene.burst(containers, 1 + random_below(4) as usize, at_once) {
            *truth.entry(name).or_default() += kills;
        }
    }
    let unattributed = ledger.has_no_misattribution(&scene, &truth);
    eprintln!("{} kills at random rates, {unattributed} unattributed", all(&truth));
    assert!(unattributed <= most_unattributed(all(&truth)), "{unattributed} unattributed");
    ledger.matches_kernel_count();
}

#[test]
fn two_hundred_kills_without_runtime_are_counted_and_none_is_misattributed() {
    let Some(scene) = Scene::new("noruntime") else { return };
    // without a runtime a container has its short id as name, so show all containers of the host
    let ledger = scene.start_memledger_for_all(&["--oom.runtime=false"]);
    wait_for_cgroups_in_the_log();
    let (containers, kills) = size(SHORTER);
    let truth = scene.burst(containers, kills, 4);
    let tally = ledger.settled_tally(&scene, all(&truth));
    assert_eq!(tally.host, 0, "{tally:?}");
    for (name, count) in &tally.containers {
        // one that came and went between two lists of the runtime may be listed by its id
        let most = truth.get(name).copied().unwrap_or(kills);
        assert!(*count <= most, "{name}: {tally:?}");
    }
    assert!(tally.containers.len() <= containers, "{tally:?}");
    eprintln!("{} kills without a runtime, {} unattributed", all(&truth), tally.unattributed);
    assert!(tally.unattributed <= all(&truth) - LOGGED_WITH_CGROUP, "{tally:?}");
    ledger.matches_kernel_count();
}

#[test]
fn two_hundred_kills_without_kernel_log_are_counted_and_none_is_misattributed() {
    let Some(scene) = Scene::new("nolog") else { return };
    let ledger = scene.start_memledger(&["--oom.kernel-log=off"]);
    let gaps = ledger.count(GAPS);
    let (containers, kills) = size(SHORTER);
    let truth = scene.burst(containers, kills, 4);
    // without records all kills that the kernel counted are gaps, and the total is exact
    ledger.matches_kernel_count();
    ledger.eventually("all of them as gaps", |metrics| match metrics.value(GAPS, &[]) - gaps {
        new if new >= all(&truth) as f64 => Ok(()),
        new => Err(format!("{new}")),
    });
    assert_eq!(ledger.source("kmsg"), None, "disabled");
    ledger.eventually("half of them attributed", |metrics| {
        let mut attributed = 0.0;
        for (name, count) in &truth {
            let found = ["main", "child"].map(|victim| Ledger::kills(metrics, name, victim).unwrap_or(0.0));
            let own = found[0] + found[1];
            assert!(found[0] <= 1.0 && own <= *count as f64, "{name}: {found:?} of {count}");
            attributed += own;
        }
        let is_half = attributed >= all(&truth) as f64 / 2.0;
        is_half.then_some(()).ok_or_else(|| format!("{attributed}"))
    });
}

#[test]
fn two_hundred_kills_are_counted_with_syslog() {
    let Some(scene) = Scene::new("syslog") else { return };
    let ledger = scene.start_memledger(&["--oom.kernel-log=syslog"]);
    wait_for_cgroups_in_the_log();
    let (containers, kills) = size(SHORTER);
    let truth = scene.burst(containers, kills, 4);
    let lost = ledger.has_no_misattribution(&scene, &truth);
    // it is read once a second: the processes are gone by then
    eprintln!("{} kills read with syslog(2), {lost} unattributed", all(&truth));
    assert!(lost <= all(&truth) - LOGGED_WITH_CGROUP, "{lost} unattributed");
    ledger.matches_kernel_count();
}

#[test]
fn case_24_memledger_stopped_during_burst_finds_all_kills() {
    let Some(scene) = Scene::new("stopped") else { return };
    let ledger = scene.start_memledger(&[]);
    let gaps = ledger.count(GAPS);
    ledger.memledger.signal("STOP");
    let (containers, kills) = size(SHORTER);
    let truth = scene.burst(containers, kills, 4);
    ledger.memledger.signal("CONT");
    let (unattributed, gaps) = ledger.has_no_misattribution_but_gaps(&scene, &truth, gaps);
    let all = all(&truth);
    eprintln!(
        "{all} kills while memledger was stopped, {unattributed} unattributed, {gaps} without a record"
    );
    ledger.matches_kernel_count();
}

/// Returns a number that differs between runs, so that memledger is eventually killed in every state.
fn random_below(most: u64) -> u64 {
    let mut bytes = [0; 8];
    std::io::Read::read_exact(&mut std::fs::File::open("/dev/urandom").expect("it"), &mut bytes)
        .expect("bytes");
    u64::from_le_bytes(bytes) % most
}

#[test]
fn memledger_killed_repeatedly_during_burst_counts_each_kill_once() {
    let Some(scene) = Scene::new("killed") else { return };
    let state = scene.state();
    let done = AtomicBool::new(false);
    let start = || scene.start_memledger(&[&state]);
    let first = start();
    // a ledger that has not recorded the past of the host reads all of it again at each start, and these processes do not live so long
    first.eventually("the first step after the past", |metrics| {
        metrics.try_value("memledger_oom_source_up", &[("source", "kmsg")]).map(drop)
    });
    let (truth, deaths) = std::thread::scope(|scope| {
        let burst = scope.spawn(|| {
            let (containers, kills) = size(SHORTER);
            let truth = scene.burst(containers, kills, 4);
            done.store(true, Ordering::Relaxed);
            truth
        });
        let mut ledger = first;
        let mut deaths = 0;
        while !done.load(Ordering::Relaxed) {
            // wait for a number of further kills: a random point of its work that does not depend on time
            let target = oom_kills() + 1 + random_below(20);
            eventually("the moment", || {
                let now = oom_kills() >= target || done.load(Ordering::Relaxed);
                now.then_some(()).ok_or_else(|| "not yet".to_owned())
            });
            drop(ledger); // SIGKILL
            deaths += 1;
            ledger = start();
        }
        drop(ledger);
        (burst.join().expect("the burst"), deaths)
    });
    assert!(deaths >= 2, "it was killed only {deaths} times");
    let ledger = start();
    let lost = ledger.has_no_misattribution(&scene, &truth);
    eprintln!("{} kills, memledger killed {deaths} times, {lost} unattributed", all(&truth));
    // nobody can tell whose a kill was beyond the ten that the kernel logs with a cgroup in five seconds, if memledger did not run then: it
    // starts for most of a burst that it is killed ten times in
    assert!(lost <= all(&truth) / 4 * 3, "{lost} unattributed");
    ledger.matches_kernel_count();
    let tally = ledger.tally(&scene);
    drop(ledger);
    let ledger = start();
    assert_eq!(ledger.settled_tally(&scene, all(&truth)), tally, "no kill is counted again");
}

#[test]
fn docker_restart_during_burst_loses_no_kill() {
    let Some((mut private, scene)) = Scene::with_private_docker("daemon") else { return };
    let ledger = scene.start_memledger(&["--sample.interval=1s"]);
    // four containers lose as many before as after the start of the engine
    let half = wanted_kills().div_ceil(8);
    let eat = format!("seq={half}:eat");
    let steps = ["wait=/control/go", &eat, "wait=/control/on", &eat, "hold"];
    let running: Vec<_> = (0..4).map(|n| scene.run(&format!("l{n}"), &[], &steps)).collect();
    for container in &running {
        ledger.settles(&container.name, 0, 0);
    }
    scene.release("go");
    private.stop();
    scene.wait_for_kills(4 * half);
    private.start();
    scene.release("on");
    scene.wait_for_kills(8 * half);
    for container in &running {
        ledger.settles(&container.name, 0, 2 * half);
    }
    assert_eq!(ledger.settled_tally(&scene, 8 * half).unattributed, 0);
    drop(running);
}

#[test]
fn prometheus_sees_every_kill_with_increase() {
    let Some(binary) = provided("MEMLEDGER_TEST_PROMETHEUS") else { return };
    let Some(scene) = Scene::new("dashboards") else { return };
    let ledger = scene.start_memledger(&[]);
    let prometheus = Prometheus::scraping(&binary, &ledger.memledger);
    let at_least = |query: &str, least: f64| {
        eventually(query, || match prometheus.one(query)? {
            value if value >= least => Ok(value),
            value => Err(format!("{value}")),
        })
    };
    let running = scene.run("running", &[], &["wait=/control/go", "seq=20:eat", "hold"]);
    let name = format!("container_name=\"{}\",victim=\"child\"", running.name);
    // the series start at 0 and are scraped before the first kill, or increase() would miss it
    at_least(&format!("sum(count_over_time(memledger_container_oom_kills_total{{{name}}}[5m]))"), 4.0);
    at_least(&format!("count_over_time({HOST_KILLS}[5m])"), 2.0);
    // a scrape that was late leaves no sample
    let first = eventually("a total", || prometheus.one(HOST_KILLS));
    let before = oom_kills();
    scene.release("go");
    let truth = scene.burst(10, 1, 4);
    scene.wait_for_kills(20 + truth.len());
    ledger.settles(&running.name, 0, 20);
    // what increase() uses, without its extrapolation to the ends of the window
    let delta = |series: &str| format!("max_over_time({series}[5m]) - min_over_time({series}[5m])");
    let child = format!("sum(memledger_container_oom_kills_total{{{name}}})");
    eventually("the container's kills", || match prometheus.one(&child)? {
        20.0 => Ok(()),
        other => Err(format!("{other}")),
    });
    let whole = at_least(&delta(HOST_KILLS), (oom_kills() - before) as f64);
    assert!(whole >= 30.0, "{first} and then {whole} more");
    at_least(&format!("increase({HOST_KILLS}[5m])"), 30.0);
}
