//! Processes that lock their own memory map: reads of their command line and their smaps block until they unlock it.
//!
//! `ps` hangs on the whole machine meanwhile: these tests run alone.

use std::process::{Child, Command, Stdio};

use super::{AttackTest, Attacker, has_memory, is_counted};
use crate::support::{Metrics, eventually_true};

/// `cat` of the command line of a process. It runs for as long as the memory map is locked.
struct Probe(Child);

impl Probe {
    fn start(pid: u32) -> Self {
        let child = Command::new("cat").arg(format!("/proc/{pid}/cmdline")).stdout(Stdio::null()).spawn();
        Self(child.expect("cat starts"))
    }

    fn is_blocked(&mut self) -> bool {
        self.0.try_wait().expect("wait").is_none()
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Lets the attacker lock its memory map, and waits until it is locked. Returns a blocked probe.
fn begin_lock(test: &AttackTest, attacker: &mut Attacker) -> Probe {
    let pid = attacker.pid();
    test.memledger.eventually("its process", |metrics| {
        let processes = metrics.sum("memledger_container_processes", &[(super::LABEL, attacker.name())]);
        (processes >= 1.0).then_some(()).ok_or_else(|| format!("{processes}"))
    });
    attacker.go();
    // the first probes may run before the map is locked
    let mut probes = vec![];
    eventually_true("a map that is locked for a second", || {
        let mut probe = Probe::start(pid);
        std::thread::park_timeout(std::time::Duration::from_secs(1));
        let is_blocked = probe.is_blocked();
        probes.push(probe);
        is_blocked
    });
    probes.pop().expect("a blocked probe")
}

/// Runs the attack; fails if the memory map was not locked all the time.
fn run_locked(test: &mut AttackTest, attacker: &mut Attacker) -> Metrics {
    let mut probe = begin_lock(test, attacker);
    let metrics = test.run(|metrics| {
        has_memory(metrics, attacker.name())?;
        is_counted(metrics, "timeout")
    });
    assert!(probe.is_blocked(), "the map was not locked all the time: the test has no attack");
    test.assert_logged(attacker, "timeout");
    metrics
}

/// As root, for /dev/fuse. Six, because an earlier version had fewer threads for such reads.
#[test]
fn new_container_has_role_and_share_beside_six_locked_memory_maps() {
    if !std::path::Path::new("/dev/fuse").exists() {
        return crate::support::skip("there is no /dev/fuse");
    }
    let mut attackers: Vec<_> = (0..6).map(|_| Attacker::limited(64)).collect();
    let mut new_container = Attacker::limited(128);
    let names: Vec<_> = attackers.iter().map(|attacker| attacker.name().to_owned()).collect();
    let mut all: Vec<&str> = names.iter().map(String::as_str).collect();
    all.push(new_container.cgroup.name());
    let mut test = AttackTest::new(&all, &[]);
    let mut probes = vec![];
    for attacker in &mut attackers {
        assert_eq!(attacker.run_as_root(include_str!("fuse_hang.py"), &["lock"]), "ready");
        probes.push(begin_lock(&test, attacker));
    }
    test.run(|metrics| {
        let labels = [("collector", "process"), ("reason", "timeout")];
        let count = metrics.try_value("memledger_collector_read_errors_total", &labels)?;
        (count >= 6.0).then_some(()).ok_or_else(|| format!("{count} command lines timed out"))
    });
    assert_eq!(new_container.run(include_str!("neighbour.py"), &[]), "ready");
    let labels = [(super::LABEL, new_container.name())];
    test.memledger.eventually("role and share of the new container", |metrics| {
        let count = metrics.sum("memledger_container_processes", &labels);
        let share = metrics.sum("memledger_container_process_pss_bytes", &labels) / super::MIB;
        (count == 1.0 && share >= 31.0)
            .then_some(())
            .ok_or_else(|| format!("{count} processes, {share} MiB; log: {}", test.memledger.log()))
    });
    assert!(probes.iter_mut().all(Probe::is_blocked), "a map was not locked all the time");
    for attacker in &attackers {
        test.assert_logged(attacker, "timeout");
    }
}

/// Unprivileged: a TiB of the zero page needs 2 GiB of page tables, and is mapped in half a minute where a GiB takes 28 ms.
#[test]
fn memory_map_locked_by_populating_does_not_block() {
    let mut attacker = Attacker::limited(4096);
    let mut test = AttackTest::new(&[attacker.name()], &[]);
    assert_eq!(attacker.run(include_str!("lock_by_populating.py"), &["30"]), "ready");
    run_locked(&mut test, &mut attacker);
}

/// As root, for /dev/fuse: a container with that device can do the same in a user namespace. The map is locked until the process
/// ends.
#[test]
fn permanently_locked_memory_map_does_not_block() {
    if !std::path::Path::new("/dev/fuse").exists() {
        return crate::support::skip("there is no /dev/fuse");
    }
    let mut attacker = Attacker::limited(64);
    let mut test = AttackTest::new(&[attacker.name()], &[]);
    assert_eq!(attacker.run_as_root(include_str!("fuse_hang.py"), &["lock"]), "ready");
    run_locked(&mut test, &mut attacker);
    drop(attacker);
    test.memledger.eventually("its end", |metrics| {
        let known = metrics.all("memledger_container_memory_usage_bytes", &[]).len();
        (known == 1).then_some(()).ok_or_else(|| format!("{known} containers"))
    });
}
