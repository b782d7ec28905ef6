//! The main cases with one source missing, and the reported state of the sources.

use std::process::Command;

use crate::support::binary;
use crate::support::cgroups::{TestCgroup, root};
use crate::support::oom::{Ledger, Scene, UNATTRIBUTED};

/// Runs a main process that is killed, and two workers whose main process keeps running.
fn main_and_workers(scene: &Scene, ledger: &Ledger) {
    let worker = scene.run("worker", &[], &["wait=/control/go", "seq=2:eat", "hold"]);
    let main = scene.run("main", &[], &["wait=/control/go", "eat"]);
    for container in [&worker, &main] {
        ledger.settles(&container.name, 0, 0);
    }
    scene.release("go");
    scene.wait_for_kills(3);
    ledger.settles(&worker.name, 0, 2);
    ledger.settles(&main.name, 1, 0);
    ledger.matches_kernel_count();
}

#[test]
fn every_source_is_up_by_default() {
    let Some(scene) = Scene::new("all-up") else { return };
    let ledger = scene.start_memledger(&[]);
    for source in ["kmsg", "vmstat", "cgroup", "runtime"] {
        ledger.eventually(source, |metrics| {
            match metrics.try_value(crate::support::oom::SOURCE_UP, &[("source", source)])? {
                1.0 => Ok(()),
                other => Err(format!("{other}")),
            }
        });
    }
    main_and_workers(&scene, &ledger);
}

#[test]
fn kills_are_attributed_without_runtime_events() {
    let Some(scene) = Scene::new("quiet-runtime") else { return };
    let ledger = scene.start_memledger(&["--oom.runtime=false"]);
    main_and_workers(&scene, &ledger);
    assert_eq!(ledger.source("runtime"), None, "it was switched off");
}

#[test]
fn kills_are_read_with_syslog_when_selected() {
    let Some(scene) = Scene::new("by-syslog") else { return };
    let ledger = scene.start_memledger(&["--oom.kernel-log=syslog"]);
    main_and_workers(&scene, &ledger);
}

#[test]
fn kills_in_running_containers_are_attributed_by_counters_without_kernel_log() {
    let Some(scene) = Scene::new("no-log") else { return };
    let ledger = scene.start_memledger(&["--oom.kernel-log=off"]);
    let worker = scene.run("worker", &[], &["wait=/control/go", "seq=5:eat", "hold"]);
    ledger.settles(&worker.name, 0, 0);
    scene.release("go");
    scene.wait_for_kills(5);
    ledger.settles(&worker.name, 0, 5);
    ledger.matches_kernel_count();
    assert_eq!(ledger.source("kmsg"), None, "it was switched off");
    assert_eq!(ledger.source("vmstat"), Some(1.0));
    assert!(ledger.memledger.metrics().get(UNATTRIBUTED, &[]).is_some());
}

/// As in a pod: the paths in /proc/PID/cgroup are relative to memledger's own cgroup, and those of the host lead
/// upwards.
#[test]
fn in_a_cgroup_namespace_paths_are_made_absolute() {
    let cgroup = TestCgroup::container();
    let script = format!("echo $$ > {}/cgroup.procs && exec unshare -C \"$@\"", cgroup.path.display());
    let doctor = |script: &str| {
        let output = Command::new("sh").args(["-c", script, "sh"]).arg(binary()).arg("doctor").output();
        String::from_utf8_lossy(&output.expect("doctor runs").stdout).into_owned()
    };
    let place = cgroup.path.strip_prefix(root()).expect("below the root");
    let found = format!("private, at /{}: paths are converted to the host's", place.display());
    let inside = doctor(&script);
    assert!(inside.contains(&found), "{inside}");
    let outside = doctor("exec \"$@\"");
    assert!(outside.contains("the host's, according to /proc/1/cgroup"), "{outside}");
}
