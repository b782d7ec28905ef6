//! Mounts in the mount namespace of a container.

use super::{AttackTest, Attacker, LABEL, MIB, has_memory, is_counted};
use crate::support::Metrics;

const PROGRAM: &str = include_str!("mounts.py");
const SIZE: &str = "memledger_container_shm_size_bytes";

/// Checks that the size of /dev/shm is shown for the other container and not for the attacker.
fn only_other_has_shm(metrics: &Metrics, other: &Attacker, attacker: &Attacker) -> Result<(), String> {
    has_memory(metrics, attacker.name())?;
    assert_eq!(metrics.get(SIZE, &[(LABEL, attacker.name())]), None);
    let size = metrics.try_value(SIZE, &[(LABEL, other.name())])?;
    assert_eq!(size, 8.0 * MIB);
    Ok(())
}

/// Starts a container with a /dev/shm of 8 MiB.
fn container_with_shm() -> Attacker {
    let mut container = Attacker::limited(64);
    assert_eq!(container.run(PROGRAM, &["1"]), "ready");
    container
}

/// Unprivileged, in a user namespace: 60 MiB of mountinfo.
#[test]
fn mount_table_of_60_mib_is_rejected() {
    let other = container_with_shm();
    let mut attacker = Attacker::limited(256);
    assert_eq!(attacker.run(PROGRAM, &["2000"]), "ready");
    let pid = attacker.pid();
    let mountinfo = std::fs::read(format!("/proc/{pid}/mountinfo")).expect("its mounts");
    assert!(mountinfo.len() > 50 << 20, "{} bytes", mountinfo.len());
    drop(mountinfo);
    let mut test = AttackTest::new(&[attacker.name(), other.name()], &[]);
    test.run(|metrics| {
        only_other_has_shm(metrics, &other, &attacker)?;
        is_counted(metrics, "too_large")
    });
    test.assert_logged(&attacker, "too_large");
}

/// Unprivileged, in a user namespace.
#[test]
fn shm_replaced_by_symlink_is_not_followed() {
    let other = container_with_shm();
    let mut attacker = Attacker::limited(64);
    assert_eq!(attacker.run(PROGRAM, &["link"]), "ready");
    let mut test = AttackTest::new(&[attacker.name(), other.name()], &[]);
    test.run(|metrics| only_other_has_shm(metrics, &other, &attacker));
    test.assert_logged(&attacker, "no_tmpfs");
}

/// As root, for /dev/fuse: a container with that device can do the same in a user namespace.
#[test]
fn shm_replaced_by_hanging_fuse_mount_is_not_read() {
    if !std::path::Path::new("/dev/fuse").exists() {
        return crate::support::skip("there is no /dev/fuse");
    }
    let other = container_with_shm();
    let mut attacker = Attacker::limited(64);
    assert_eq!(attacker.run_as_root(include_str!("fuse_hang.py"), &["shm"]), "ready");
    let mut test = AttackTest::new(&[attacker.name(), other.name()], &[]);
    test.run(|metrics| only_other_has_shm(metrics, &other, &attacker));
    test.assert_logged(&attacker, "no_tmpfs");
}
