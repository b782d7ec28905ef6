//! A kernel log flooded from user space. As root: a container has /dev/kmsg only if it is configured.
//!
//! The test overwrites the log and counts the kills of the whole host: it runs alone.

use super::{AttackTest, Attacker, LABEL};
use crate::support::cgroups::{TestCgroup, root};
use crate::support::oom::{KILLS, oom_kills};
use crate::support::python::Python;
use crate::support::{Metrics, cpu_nanos, eventually_true};

const HOST_KILLS: &str = "memledger_host_oom_kills_total";
/// Limit of memledger's whole CPU time, divided by the number of forged lines.
const MAX_MICROSECONDS_PER_LINE: f64 = 100.0;

/// Runs a process that exceeds the limit of its cgroup until it is killed.
fn kill_in(cgroup: &TestCgroup) {
    let program = "open('/proc/self/oom_score_adj', 'w').write('0'); x = b'x' * (64 << 20)";
    let mut victim = Python::command(cgroup, &["/usr/bin/python3", "-c", program]);
    eventually_true("its end", || victim.has_ended());
}

#[test]
fn counts_only_the_real_kill_among_forged_ones() {
    let mut attacker = Attacker::limited(64);
    let victim = TestCgroup::container();
    victim.limit(16 << 20);
    let _other_process = Python::start(&victim, "print('ready'); input()");
    let mut test = AttackTest::new(&[attacker.name(), victim.name()], &[]);
    let path = test.neighbour.path.strip_prefix(root()).expect("below the root").to_owned();
    let path = format!("/{}", path.display());
    let kills = |metrics: &Metrics, name: &str| metrics.sum(KILLS, &[(LABEL, name)]);
    let before = test.memledger.eventually("the host's kills", |metrics| metrics.try_value(HOST_KILLS, &[]));
    let real_before = oom_kills();
    // every line is read, so the CPU time is bounded per line and not per cycle
    test.max_cpu_per_cycle = f64::INFINITY;
    let cpu_before = cpu_nanos(test.memledger.pid(), None);
    assert_eq!(attacker.run_as_root(include_str!("kernel_log.py"), &[&path]), "ready");
    test.run(|_| Ok(()));
    kill_in(&victim);
    test.memledger.eventually("the real kill", |metrics| {
        let counted = kills(metrics, victim.name());
        (counted == 1.0).then_some(()).ok_or_else(|| format!("{counted}; log: {}", test.memledger.log()))
    });
    let real = (oom_kills() - real_before) as f64;
    assert_eq!(real, 1.0, "another process on this machine was killed");
    let metrics = test.run(|_| Ok(()));
    assert_eq!(metrics.value(HOST_KILLS, &[]) - before, real);
    assert_eq!(kills(&metrics, test.neighbour.name()), 0.0, "a forged kill was counted");
    let cpu_micros = (cpu_nanos(test.memledger.pid(), None) - cpu_before) / 1e3;
    let written: u64 = attacker.step().parse().expect("a count");
    let per_line = cpu_micros / written as f64;
    eprintln!("{written} forged lines, {per_line:.1} us of CPU time for each");
    assert!(written > 10_000, "only {written} lines were written");
    assert!(per_line <= MAX_MICROSECONDS_PER_LINE, "{per_line} us for each of {written} lines");
    let log = test.memledger.log();
    assert!(log.matches("kernel log overwritten before it was read").count() <= 1, "{log}");
}
