//! Command lines without a reasonable end. Unprivileged, under a limit of 64 MiB.

use super::{Attacker, Siege, has_memory};

const PROGRAM: &str = include_str!("command_line.py");
const GIB: u64 = 1 << 30;

/// The process is listed for its container all the same.
fn is_listed(siege: &Siege, attacker: &Attacker) -> Result<(), String> {
    let api = siege.memledger.api();
    let containers = api["containers"].as_array().expect("a list");
    let container = containers.iter().find(|container| container["name"] == attacker.name());
    let processes =
        container.and_then(|container| container["processes"].as_array()).ok_or("no such container")?;
    let has_memory = processes.iter().any(|process| process["rss_bytes"].as_f64() > Some(1e6));
    has_memory.then_some(()).ok_or_else(|| format!("{processes:?}"))
}

#[test]
fn command_line_of_1_gib_is_not_read_whole() {
    let mut attacker = Attacker::limited(64);
    let mut siege = Siege::of(&[attacker.name()], &[]);
    assert_eq!(attacker.run(PROGRAM, &[&GIB.to_string()]), "ready");
    siege.endure(|metrics| has_memory(metrics, attacker.name()));
    is_listed(&siege, &attacker).expect("its process");
}

/// 100 TiB, which grow while memledger looks: harmless when the process is first seen.
#[test]
fn command_line_that_grows_without_end_is_not_read_whole() {
    let mut attacker = Attacker::limited(64);
    let mut siege = Siege::of(&[attacker.name()], &[]);
    assert_eq!(attacker.run(PROGRAM, &[&(100 * 1024 * GIB).to_string(), "grow"]), "ready");
    super::eventually("its process", || is_listed(&siege, &attacker));
    for length in [4096 * 1000, 4_096_000_000, 4_096_000_000_000, 100 * 1024 * GIB] {
        assert_eq!(attacker.step(), length.to_string());
        siege.memledger.fresh_metrics();
    }
    siege.endure(|metrics| has_memory(metrics, attacker.name()));
    is_listed(&siege, &attacker).expect("its process");
}
