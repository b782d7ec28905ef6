//! Crowds of processes, threads and cgroups. They take the machine's two cores, its pids and its cgroups: these tests run with
//! nothing beside them.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Attacker, LABEL, Siege, has_memory, is_counted};

/// Unprivileged.
#[test]
fn processes_5000_that_come_and_go_cost_only_their_own_figures() {
    let mut attacker = Attacker::limited(8192);
    let mut siege = Siege::of(&[attacker.name()], &[]);
    let alive = attacker.run(include_str!("storm.py"), &["5000"]);
    let metrics = siege.endure(|metrics| {
        has_memory(metrics, attacker.name())?;
        is_counted(metrics, "too_many")
    });
    eprintln!(
        "{alive} at once; shown: {:?}",
        metrics.all("memledger_container_processes", &[(LABEL, attacker.name())])
    );
}

/// Unprivileged.
#[test]
fn threads_20000_of_one_process_are_one_process() {
    let mut attacker = Attacker::limited(8192);
    let mut siege = Siege::of(&[attacker.name()], &[]);
    let threads: u32 = attacker.run(include_str!("threads.py"), &["20000"]).parse().expect("a number");
    eprintln!("{threads} threads");
    assert!(threads >= 10_000, "this machine allows only {threads} threads");
    siege.endure(|metrics| {
        has_memory(metrics, attacker.name())?;
        let processes = metrics.sum("memledger_container_processes", &[(LABEL, attacker.name())]);
        (processes == 1.0).then_some(()).ok_or_else(|| format!("{processes} processes"))
    });
}

/// Cgroups below a container's, removed when dropped.
struct Cgroups(Vec<PathBuf>);

impl Drop for Cgroups {
    fn drop(&mut self) {
        for path in self.0.iter().rev() {
            let _ = std::fs::remove_dir(path);
        }
    }
}

/// As root: on cgroup v1 no container may write to its own tree; with v2 and a delegated tree any does. One more cgroup comes and
/// goes a hundred times in a second, which is what makes memledger look at the tree again.
#[test]
fn cgroups_10000_below_a_container_cost_only_its_own_figures() {
    let mut attacker = Attacker::limited(2048); // the kernel charges it with each of them, some 10 KB
    let mut siege = Siege::of(&[attacker.name()], &[]);
    assert_eq!(attacker.run("print('ready'); input()", &[]), "ready");
    let top = attacker.cgroup.path.clone();
    let below = |number: usize| top.join(format!("{:02}", number % 100)).join(number.to_string());
    let mut cgroups = Cgroups(vec![]);
    let paths: Vec<_> = (0..100).map(|n| top.join(format!("{n:02}"))).collect();
    let paths: Vec<_> = paths.into_iter().chain((0..9_900).map(below)).collect();
    for path in paths {
        std::fs::create_dir(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        cgroups.0.push(path);
    }
    let stop = AtomicBool::new(false);
    let fleeting = top.join("fleeting");
    std::thread::scope(|scope| {
        let stop = StopWhenDropped(&stop);
        let flag = stop.0;
        scope.spawn(move || {
            while !flag.load(Ordering::Relaxed) {
                let _ = std::fs::create_dir(&fleeting);
                std::thread::park_timeout(std::time::Duration::from_millis(5));
                let _ = std::fs::remove_dir(&fleeting);
                std::thread::park_timeout(std::time::Duration::from_millis(5));
            }
        });
        siege.endure(|metrics| {
            has_memory(metrics, attacker.name())?;
            is_counted(metrics, "too_many")
        });
    });
}

/// Ends the thread also when the test fails: the scope waits for it.
struct StopWhenDropped<'a>(&'a AtomicBool);

impl Drop for StopWhenDropped<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
