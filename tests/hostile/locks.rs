//! Processes that keep their own memory map locked: whoever reads their command line or their smaps waits for as long.
//!
//! While they do, `ps` hangs on the whole machine: these tests run with nothing beside them.

use std::process::{Child, Command, Stdio};

use super::{Attacker, Siege, has_memory, is_counted};
use crate::support::{Metrics, eventually_true};

/// `cat` on the command line of a process: the proof that the map is locked, for as long as it runs.
struct Probe(Child);

impl Probe {
    fn of(pid: u32) -> Self {
        let child = Command::new("cat").arg(format!("/proc/{pid}/cmdline")).stdout(Stdio::null()).spawn();
        Self(child.expect("cat starts"))
    }

    fn hangs(&mut self) -> bool {
        self.0.try_wait().expect("wait").is_none()
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Lets the attacker begin, and watches while the map is locked; it must be so all the time.
fn endure_lock(siege: &mut Siege, attacker: &mut Attacker) -> Metrics {
    let pid = attacker.process.as_ref().expect("it runs").pid();
    siege.memledger.eventually("its process", |metrics| {
        let processes = metrics.sum("memledger_container_processes", &[(super::LABEL, attacker.name())]);
        (processes >= 1.0).then_some(()).ok_or_else(|| format!("{processes}"))
    });
    attacker.go();
    // the first probes may come before the lock is taken
    let mut probes = vec![];
    eventually_true("a lock that is held for a second", || {
        let mut probe = Probe::of(pid);
        std::thread::park_timeout(std::time::Duration::from_secs(1));
        let hangs = probe.hangs();
        probes.push(probe);
        hangs
    });
    let mut probe = probes.pop().expect("the one that hangs");
    let metrics = siege.endure(|metrics| {
        has_memory(metrics, attacker.name())?;
        is_counted(metrics, "timeout")
    });
    assert!(probe.hangs(), "the lock was not held all the time: the attack proves nothing");
    metrics
}

/// Unprivileged: 240 GiB of the zero page cost 480 MiB of page tables, and one round takes half a minute.
#[test]
fn memory_map_locked_by_populating_does_not_block() {
    let mut attacker = Attacker::limited(1024);
    let mut siege = Siege::of(&[attacker.name()], &[]);
    assert_eq!(attacker.run(include_str!("lock_by_populating.py"), &["240"]), "ready");
    endure_lock(&mut siege, &mut attacker);
}

/// As root, because /dev/fuse is root's here: where a container is given the device, it does the same in a user namespace. The
/// lock is held until the process ends.
#[test]
fn memory_map_locked_for_ever_does_not_block() {
    if !std::path::Path::new("/dev/fuse").exists() {
        return crate::support::skip("there is no /dev/fuse");
    }
    let mut attacker = Attacker::limited(64);
    let mut siege = Siege::of(&[attacker.name()], &[]);
    assert_eq!(attacker.run_as_root(include_str!("fuse.py"), &["lock"]), "ready");
    endure_lock(&mut siege, &mut attacker);
    drop(attacker);
    siege.memledger.eventually("its end", |metrics| {
        let known = metrics.all("memledger_container_memory_usage_bytes", &[]).len();
        (known == 1).then_some(()).ok_or_else(|| format!("{known} containers"))
    });
}
