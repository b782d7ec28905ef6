//! The kernel's report at a kill, against what the processes really allocated.

use serde_json::Value;

use crate::support::oom::{Ledger, Scene, has_printed, wait_for_cgroups_in_the_log};
use crate::support::{eventually, eventually_true};

const MIB: u64 = 1 << 20;

/// Returns the bytes of a field.
fn bytes(value: &Value, field: &str) -> u64 {
    value[field].as_u64().unwrap_or_else(|| panic!("no {field} in {value}"))
}

/// Asserts that the parts of a cgroup's report sum to its usage, within 2 % of it.
fn assert_whole(report: &Value, limit: u64) {
    assert_eq!(bytes(report, "limit_bytes"), limit, "{report}");
    let usage = bytes(report, "usage_bytes");
    let parts: u64 = ["anon_bytes", "file_bytes", "shmem_bytes", "kernel_bytes"]
        .iter()
        .map(|part| bytes(report, part))
        .sum();
    assert!(parts.abs_diff(usage) * 50 <= limit, "{parts} of {usage}: {report}");
    assert!(limit.abs_diff(usage) * 50 <= limit, "the limit was reached: {report}");
    assert_eq!(report.get("incomplete"), None, "{report}");
}

fn kills(ledger: &Ledger, scene: &Scene, count: usize) -> Vec<Value> {
    scene.wait_for_kills(count);
    eventually("all kills with their reports", || {
        let kills = ledger.kills_of(scene);
        (kills.len() == count).then(|| kills.clone()).ok_or_else(|| format!("{kills:?}"))
    })
}

#[test]
fn report_has_what_the_processes_allocated() {
    let Some(scene) = Scene::new("report") else { return };
    wait_for_cgroups_in_the_log();
    let ledger = scene.start_memledger(&[]);
    let limit = 96 * MIB;
    // 30 MiB in another process, 20 MiB in /dev/shm, and the rest in the victim
    let flags = ["--memory=96m", "--shm-size=64m"];
    let steps = ["shm=20", "spawn=1:eat=30,say=ready,hold", "wait=/control/go", "eat"];
    let container = scene.run_known(&ledger, "it", &flags, &steps);
    eventually_true("the child has its memory", || has_printed(&container, "ready"));
    scene.release("go");
    let kill = kills(&ledger, &scene, 1).remove(0);
    let report = &kill["report"];
    assert_whole(report, limit);
    assert_eq!(bytes(&kill, "limit_bytes"), limit, "the limit is the kernel's");
    assert!(bytes(report, "shmem_bytes").abs_diff(20 * MIB) * 50 <= limit, "{report}");
    let anonymous = limit - 20 * MIB - bytes(report, "kernel_bytes") - bytes(report, "file_bytes");
    assert!(bytes(report, "anon_bytes").abs_diff(anonymous) * 50 <= limit, "{report}");
    let rows = report["processes"].as_array().expect("processes");
    assert_eq!(report["process_count"], rows.len());
    let victim = rows.iter().find(|row| row["pid"] == kill["pid"]).expect("the victim has a row");
    assert!(bytes(victim, "rss_bytes") >= bytes(&kill, "anon_bytes"), "{victim} of {kill}");
    let child = rows.iter().filter(|row| bytes(row, "rss_bytes").abs_diff(30 * MIB) * 10 <= 30 * MIB);
    assert!(child.count() >= 1, "the child with 30 MiB: {rows:?}");
    drop(container);
}

#[test]
fn report_of_64_processes_has_the_largest_and_their_number() {
    let Some(scene) = Scene::new("many") else { return };
    wait_for_cgroups_in_the_log();
    let ledger = scene.start_memledger(&[]);
    let steps = ["spawn=63:eat=1,hold", "wait=/control/go", "eat"];
    let container = scene.run_known(&ledger, "it", &["--memory=192m"], &steps);
    eventually("63 children", || {
        let pids = container.pids().len();
        (pids >= 64).then_some(()).ok_or_else(|| format!("{pids} processes"))
    });
    scene.release("go");
    let kill = kills(&ledger, &scene, 1).remove(0);
    let report = &kill["report"];
    assert_whole(report, 192 * MIB);
    assert!(report["process_count"].as_u64().is_some_and(|count| count >= 64), "{report}");
    let rows = report["processes"].as_array().expect("processes");
    assert_eq!(rows.len(), 20);
    let sizes: Vec<u64> = rows.iter().map(|row| bytes(row, "rss_bytes")).collect();
    assert!(sizes.is_sorted_by(|one, other| one >= other), "{sizes:?}");
    assert_eq!(rows[0]["pid"], kill["pid"]);
}
