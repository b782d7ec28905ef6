//! Large numbers of processes, threads and cgroups. They use up the machine's CPUs, pids and cgroups: these tests run alone.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{AttackTest, Attacker, LABEL, has_memory, is_counted};

const CHURN: &str = include_str!("process_churn.py");

/// Unprivileged.
#[test]
fn processes_5000_that_start_and_exit_lose_only_their_own_figures() {
    let mut attacker = Attacker::limited(8192);
    let mut test = AttackTest::new(&[attacker.name()], &[]);
    assert_eq!(attacker.run(CHURN, &["5000"]), "5000");
    test.memledger.eventually("memory without figures of processes", |metrics| {
        has_memory(metrics, attacker.name())?;
        is_counted(metrics, "too_many")?;
        let shown = metrics.all("memledger_container_processes", &[(LABEL, attacker.name())]).len();
        let api = test.memledger.api();
        let containers = api["containers"].as_array().expect("a list");
        let entry = containers.iter().find(|entry| entry["name"] == attacker.name());
        let list = entry.map(|entry| &entry["processes"]);
        (shown == 0 && list == Some(&serde_json::Value::Null))
            .then_some(())
            .ok_or_else(|| format!("{shown} roles; {list:?}"))
    });
    attacker.go();
    test.run(|metrics| has_memory(metrics, attacker.name()));
    test.assert_logged(&attacker, "too_many");
}

/// Unprivileged, and just below the limit: each new process costs several reads.
#[test]
fn processes_1900_that_start_and_exit_delay_no_cycle() {
    let mut attacker = Attacker::limited(8192);
    let mut test = AttackTest::new(&[attacker.name()], &[]);
    assert_eq!(attacker.run(CHURN, &["1900"]), "1900");
    test.memledger.eventually("its processes", |metrics| {
        let count = metrics.sum("memledger_container_processes", &[(LABEL, attacker.name())]);
        (count == 1901.0).then_some(()).ok_or_else(|| format!("{count}"))
    });
    attacker.go();
    test.run(|metrics| has_memory(metrics, attacker.name()));
}

/// Unprivileged.
#[test]
fn threads_20000_of_a_process_count_as_one_process() {
    let mut attacker = Attacker::limited(8192);
    let mut test = AttackTest::new(&[attacker.name()], &[]);
    let threads: u32 = attacker.run(include_str!("threads.py"), &["20000"]).parse().expect("a number");
    eprintln!("{threads} threads");
    assert!(threads >= 10_000, "this machine allows only {threads} threads");
    test.run(|metrics| {
        has_memory(metrics, attacker.name())?;
        let processes = metrics.sum("memledger_container_processes", &[(LABEL, attacker.name())]);
        (processes == 1.0).then_some(()).ok_or_else(|| format!("{processes} processes"))
    });
}

/// Cgroups that are removed when dropped.
struct Cgroups(Vec<PathBuf>);

impl Drop for Cgroups {
    fn drop(&mut self) {
        for path in self.0.iter().rev() {
            let _ = std::fs::remove_dir(path);
        }
    }
}

/// As root: a container can create cgroups only in a delegated tree of cgroup v2. Another cgroup is created and removed a hundred
/// times in a second, so that memledger walks the tree again.
#[test]
fn cgroups_10000_below_a_container_lose_only_its_own_figures() {
    let mut attacker = Attacker::limited(2048); // the kernel charges about 10 KB for each cgroup
    let mut test = AttackTest::new(&[attacker.name()], &[]);
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
    let short_lived = top.join("short-lived");
    std::thread::scope(|scope| {
        let stop = StopWhenDropped(&stop);
        let flag = stop.0;
        scope.spawn(move || {
            while !flag.load(Ordering::Relaxed) {
                let _ = std::fs::create_dir(&short_lived);
                std::thread::park_timeout(std::time::Duration::from_millis(5));
                let _ = std::fs::remove_dir(&short_lived);
                std::thread::park_timeout(std::time::Duration::from_millis(5));
            }
        });
        test.run(|metrics| {
            has_memory(metrics, attacker.name())?;
            is_counted(metrics, "too_many")
        });
    });
    test.assert_logged(&attacker, "too_many");
}

/// Stops the thread when dropped, also when the test fails: the scope waits for it.
struct StopWhenDropped<'a>(&'a AtomicBool);

impl Drop for StopWhenDropped<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
