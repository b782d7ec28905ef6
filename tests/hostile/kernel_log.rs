//! The kernel log, flooded from user space. As root: /dev/kmsg is root's, or a container's that it is given to.
//!
//! It overwrites the log, and counts the kills of the whole host: it runs with nothing beside it.

use super::{Attacker, LABEL, Siege};
use crate::support::cgroups::{TestCgroup, root};
use crate::support::oom::{KILLS, oom_kills};
use crate::support::python::Python;
use crate::support::{Metrics, eventually_true, processor_nanos};

const HOST_KILLS: &str = "memledger_host_oom_kills_total";
/// Of memledger's processor time, with all else that it does meanwhile.
const MAX_MICROSECONDS_PER_LINE: f64 = 100.0;

/// A process that outgrows the limit of its cgroup.
fn kill_in(cgroup: &TestCgroup) {
    let program = "open('/proc/self/oom_score_adj', 'w').write('0'); x = b'x' * (64 << 20)";
    let mut victim = Python::command(cgroup, &["/usr/bin/python3", "-c", program]);
    eventually_true("its end", || victim.has_ended());
}

#[test]
fn forged_kills_are_never_counted_and_a_real_one_among_them_is() {
    let mut attacker = Attacker::limited(64);
    let victim = TestCgroup::container();
    victim.limit(16 << 20);
    let _held = Python::start(&victim, "print('ready'); input()");
    let mut siege = Siege::of(&[attacker.name(), victim.name()], &[]);
    let path = siege.innocent.path.strip_prefix(root()).expect("below the root").to_owned();
    let path = format!("/{}", path.display());
    let kills = |metrics: &Metrics, name: &str| metrics.sum(KILLS, &[(LABEL, name)]);
    let before = siege.memledger.eventually("the host's kills", |metrics| metrics.ask(HOST_KILLS, &[]));
    let real_before = oom_kills();
    // it reads whatever the kernel's log takes, so its work is bounded for a line and not for a cycle
    siege.max_work_per_cycle = f64::INFINITY;
    let worked = processor_nanos(siege.memledger.pid(), None);
    assert_eq!(attacker.run_as_root(include_str!("kernel_log.py"), &[&path]), "ready");
    siege.endure(|_| Ok(()));
    kill_in(&victim);
    siege.memledger.eventually("the real kill", |metrics| {
        let counted = kills(metrics, victim.name());
        (counted == 1.0).then_some(()).ok_or_else(|| format!("{counted}; log: {}", siege.memledger.log()))
    });
    let real = (oom_kills() - real_before) as f64;
    assert_eq!(real, 1.0, "something else on this machine was killed");
    let metrics = siege.endure(|_| Ok(()));
    assert_eq!(metrics.value(HOST_KILLS, &[]) - before, real);
    assert_eq!(kills(&metrics, siege.innocent.name()), 0.0, "forged ones are nobody's");
    let worked = (processor_nanos(siege.memledger.pid(), None) - worked) / 1e3;
    let written: u64 = attacker.step().parse().expect("a count");
    let per_line = worked / written as f64;
    eprintln!("{written} forged lines, {per_line:.1} us of processor time for each");
    assert!(written > 10_000, "{written} lines are no flood");
    assert!(per_line <= MAX_MICROSECONDS_PER_LINE, "{per_line} us for each of {written} lines");
    let log = siege.memledger.log();
    assert!(log.matches("kernel log overwritten before it was read").count() <= 1, "{log}");
}
