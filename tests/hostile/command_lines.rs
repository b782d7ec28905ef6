//! Very long command lines. Unprivileged, with a memory limit of 64 MiB.

use super::{AttackTest, Attacker, has_memory};

const PROGRAM: &str = include_str!("command_line.py");
const GIB: u64 = 1 << 30;

/// Checks that the API lists a process of the attacker.
fn is_listed(test: &AttackTest, attacker: &Attacker) -> Result<(), String> {
    let api = test.memledger.api();
    let containers = api["containers"].as_array().expect("a list");
    let container = containers.iter().find(|container| container["name"] == attacker.name());
    let processes = container
        .and_then(|container| container["processes"].as_array())
        .ok_or("the container has no list")?;
    let has_memory = processes.iter().any(|process| process["rss_bytes"].as_f64() > Some(1e6));
    has_memory.then_some(()).ok_or_else(|| format!("{processes:?}"))
}

#[test]
fn command_line_of_1_gib_is_truncated() {
    let mut attacker = Attacker::limited(64);
    let mut test = AttackTest::new(&[attacker.name()], &[]);
    assert_eq!(attacker.run(PROGRAM, &[&GIB.to_string()]), "ready");
    test.run(|metrics| has_memory(metrics, attacker.name()));
    test.assert_logged(&attacker, "truncated");
    is_listed(&test, &attacker).expect("its process");
}

/// Of one page when the process is first read, and of 100 TiB some cycles later.
#[test]
fn command_line_that_grows_to_100_tib_is_truncated() {
    let mut attacker = Attacker::limited(64);
    let mut test = AttackTest::new(&[attacker.name()], &[]);
    assert_eq!(attacker.run(PROGRAM, &[&(100 * 1024 * GIB).to_string(), "grow"]), "ready");
    super::eventually("its process", || is_listed(&test, &attacker));
    for length in [4096 * 1000, 4_096_000_000, 4_096_000_000_000, 100 * 1024 * GIB] {
        assert_eq!(attacker.step(), length.to_string());
        test.memledger.fresh_metrics();
    }
    test.run(|metrics| has_memory(metrics, attacker.name()));
    test.assert_logged(&attacker, "truncated");
    is_listed(&test, &attacker).expect("its process");
}
