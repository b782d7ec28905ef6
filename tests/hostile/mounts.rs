//! What a container may mount in its own mount namespace.

use super::{Attacker, LABEL, MIB, Siege, has_memory, is_counted};
use crate::support::Metrics;

const PROGRAM: &str = include_str!("mounts.py");
const SIZE: &str = "memledger_container_shm_size_bytes";

/// The neighbour's /dev/shm is shown, the attacker's is not.
fn only_neighbour_has_shm(
    metrics: &Metrics,
    neighbour: &Attacker,
    attacker: &Attacker,
) -> Result<(), String> {
    has_memory(metrics, attacker.name())?;
    assert_eq!(metrics.get(SIZE, &[(LABEL, attacker.name())]), None);
    let size = metrics.ask(SIZE, &[(LABEL, neighbour.name())])?;
    assert_eq!(size, 8.0 * MIB);
    Ok(())
}

fn neighbour() -> Attacker {
    let mut neighbour = Attacker::limited(64);
    assert_eq!(neighbour.run(PROGRAM, &["1"]), "ready");
    neighbour
}

/// Unprivileged, in a user namespace: 60 MiB of mountinfo.
#[test]
fn mount_table_of_60_mib_is_not_read_whole() {
    let neighbour = neighbour();
    let mut attacker = Attacker::limited(256);
    assert_eq!(attacker.run(PROGRAM, &["2000"]), "ready");
    let pid = attacker.process.as_ref().expect("it runs").pid();
    let mountinfo = std::fs::read(format!("/proc/{pid}/mountinfo")).expect("its mounts");
    assert!(mountinfo.len() > 50 << 20, "{} bytes", mountinfo.len());
    drop(mountinfo);
    let mut siege = Siege::of(&[attacker.name(), neighbour.name()], &[]);
    siege.endure(|metrics| {
        only_neighbour_has_shm(metrics, &neighbour, &attacker)?;
        is_counted(metrics, "too_large")
    });
}

/// Unprivileged, in a user namespace.
#[test]
fn shm_replaced_by_symlink_is_not_followed() {
    let neighbour = neighbour();
    let mut attacker = Attacker::limited(64);
    assert_eq!(attacker.run(PROGRAM, &["link"]), "ready");
    let mut siege = Siege::of(&[attacker.name(), neighbour.name()], &[]);
    siege.endure(|metrics| only_neighbour_has_shm(metrics, &neighbour, &attacker));
}

/// As root, because /dev/fuse is root's here: where a container is given the device, it does the same in a user namespace.
#[test]
fn shm_replaced_by_fuse_mount_that_never_answers_is_not_asked() {
    if !std::path::Path::new("/dev/fuse").exists() {
        return crate::support::skip("there is no /dev/fuse");
    }
    let neighbour = neighbour();
    let mut attacker = Attacker::limited(64);
    assert_eq!(attacker.run_as_root(include_str!("fuse.py"), &["shm"]), "ready");
    let mut siege = Siege::of(&[attacker.name(), neighbour.name()], &[]);
    siege.endure(|metrics| only_neighbour_has_shm(metrics, &neighbour, &attacker));
}
