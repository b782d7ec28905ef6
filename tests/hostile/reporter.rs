//! Clients of the socket for reports from inside that send forged, invalid or too many messages, open many connections, use the
//! connection of another process, or run in a cgroup whose name is the id of another container.
//!
//! Unprivileged. A regular program with memledger's own client runs beside them.

use std::os::unix::fs::PermissionsExt;

use super::{AttackTest, Attacker, LABEL, has_memory};
use crate::support::Metrics;
use crate::support::cgroups::{TestCgroup, new_id, parent};

/// Counts a hundred steps, and a hundred more with each input line.
const REGULAR_PROGRAM: &str = "
import sys
sys.path.insert(0, sys.argv[1])
import memledger_client
while True:
    for _ in range(100):
        memledger_client.step(batch_size=4)
    print('counted', flush=True)
    input()
";

/// Runs an attack and returns the metrics after it. `check` must succeed during the attack.
fn attack(
    name: &str,
    check: impl Fn(&Metrics, &str) -> Result<(), String>,
) -> (AttackTest, Attacker, Metrics) {
    attack_by(Attacker::limited(256), Attacker::limited(64), name, |_| (), check)
}

/// Like [`attack`], by this attacker and with this regular program. `wait_for_end` waits for the end of the attack.
fn attack_by(
    mut attacker: Attacker,
    mut regular: Attacker,
    name: &str,
    wait_for_end: impl FnOnce(&mut Attacker),
    check: impl Fn(&Metrics, &str) -> Result<(), String>,
) -> (AttackTest, Attacker, Metrics) {
    let folder = tempfile::Builder::new().prefix("mlt-reporter-").tempdir().expect("a folder");
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).expect("a mode");
    let directory = folder.path().join("reporter");
    let flag = format!("--reporter.directory={}", directory.display());
    let mut test = AttackTest::new(&[attacker.name(), regular.name()], &[&flag]);
    let client = directory.join("python");
    // the client connects to the socket in the folder above it
    assert_eq!(regular.run(REGULAR_PROGRAM, &[client.to_str().expect("text")]), "counted");
    let regular_name = regular.name().to_owned();
    let steps = |metrics: &Metrics, expected| {
        let labels = [(LABEL, regular_name.as_str()), ("rank", "0")];
        let steps = metrics.try_value("memledger_container_training_steps_total", &labels)?;
        (steps == expected).then_some(()).ok_or_else(|| format!("{steps} steps instead of {expected}"))
    };
    test.memledger.eventually("the regular program's steps", |metrics| steps(metrics, 100.0));
    let labels = [(LABEL, regular_name.as_str()), ("rank", "0")];
    let samples = test.memledger.metrics().value("memledger_container_training_samples_total", &labels);
    assert_eq!(samples, 400.0);
    let socket = directory.join("reporter.sock");
    let arguments = [socket.to_str().expect("text"), name];
    assert_eq!(attacker.run(include_str!("reporter.py"), &arguments), "ready");
    let own = attacker.name().to_owned();
    test.run(|metrics| {
        has_memory(metrics, &own)?;
        steps(metrics, 100.0)?;
        check(metrics, &own)
    });
    wait_for_end(&mut attacker);
    regular.step();
    test.memledger.eventually("the regular program's further steps", |metrics| steps(metrics, 200.0));
    let metrics = test.memledger.metrics();
    (test, attacker, metrics)
}

fn is_rejected(metrics: &Metrics, reason: &str) -> Result<(), String> {
    let count = metrics.try_value("memledger_reporter_rejected_total", &[("reason", reason)])?;
    if count > 0.0 { Ok(()) } else { Err(format!("no message was rejected as {reason}")) }
}

#[test]
fn invalid_messages_are_counted_by_reason_and_become_no_label() {
    let reasons = ["malformed", "too_large", "version", "rank", "name", "rate"];
    let (_test, attacker, metrics) =
        attack("garbage", |metrics, _| reasons.iter().try_for_each(|reason| is_rejected(metrics, reason)));
    for (name, labels, _) in &metrics.series {
        let is_plain =
            |value: &String| value.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if name.starts_with("memledger_container_operation_") {
            assert_eq!(labels[LABEL], attacker.name(), "{name}");
            assert!(is_plain(&labels["component"]) && is_plain(&labels["operation"]), "{labels:?}");
        }
    }
    let operations = metrics.all("memledger_container_operation_rss_bytes", &[]).len();
    assert!(operations <= 64, "{operations} pairs");
}

#[test]
fn flood_of_one_connection_is_rate_limited() {
    let (test, _attacker, _) = attack("flood", |metrics, _| is_rejected(metrics, "rate"));
    let cpu_seconds = crate::support::cpu_nanos(test.memledger.pid(), Some("reporter")) / 1e9;
    eprintln!("{cpu_seconds:.2} s of CPU time in the thread of the reporter");
}

#[test]
fn number_of_connections_is_limited() {
    let wait_for_connections = |attacker: &mut Attacker| assert_eq!(attacker.line(), "connected");
    let (attacker, regular) = (Attacker::limited(256), Attacker::limited(64));
    let (_test, _attacker, metrics) =
        attack_by(attacker, regular, "connections", wait_for_connections, |metrics, _| {
            is_rejected(metrics, "connections")
        });
    let connections = metrics.value("memledger_reporter_connections", &[]);
    assert!(connections <= 66.0, "{connections}");
}

#[test]
fn forged_cuda_errors_count_for_their_own_container_and_few_become_events() {
    const OOMS: &str = "memledger_container_cuda_ooms_total";
    let began = memledger::clock::Timestamp::now();
    let (test, attacker, metrics) = attack("ooms", |metrics, own| {
        let count = metrics.try_value(OOMS, &[(LABEL, own), ("source", "reporter")])?;
        if count > 0.0 { Ok(()) } else { Err("no error was counted".to_owned()) }
    });
    for (_, labels, count) in metrics.all(OOMS, &[]) {
        assert!(labels[LABEL] == attacker.name() || *count == 0.0, "{labels:?}: {count}");
    }
    let (_, text) = test.memledger.get("/api/v1/events?limit=1000");
    let listed: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let events = listed["events"].as_array().expect("a list");
    let ooms: Vec<_> = events.iter().filter(|event| event["type"] == "cuda_oom").collect();
    // 16 at once and one a minute
    let max = 17.0 + memledger::clock::Timestamp::now().since(began).as_secs_f64() / 60.0;
    assert!(!ooms.is_empty() && ooms.len() as f64 <= max, "{} events", ooms.len());
    assert!(!text.contains("\\u001b"), "a control character: {text}");
    for oom in ooms {
        assert!(oom["tried_bytes"].as_u64().is_none_or(|bytes| bytes <= 1 << 50), "{oom}");
        assert_eq!(oom["container_name"], attacker.name(), "{oom}");
    }
}

#[test]
fn messages_over_inherited_connection_are_rejected_with_their_descriptors() {
    let (test, attacker, metrics) = attack("inherited", |metrics, _| is_rejected(metrics, "sender"));
    let labels = [(LABEL, attacker.name()), ("rank", "0")];
    assert_eq!(metrics.get("memledger_container_training_steps_total", &labels), Some(3.0));
    let open = |metrics: &Metrics| metrics.value("process_open_fds", &[]);
    let later = test.memledger.fresh_metrics();
    assert!(open(&later) < open(&metrics) + 20.0, "{} and {}", open(&metrics), open(&later));
}

#[test]
fn process_in_a_cgroup_named_after_another_container_reports_for_its_own() {
    let regular = Attacker::limited(64);
    let own = new_id();
    let path = format!("{}/{own}/docker/{}", parent(), regular.cgroup.id);
    let attacker = Attacker { cgroup: TestCgroup::at(&path, &own), process: None };
    attack_by(
        attacker,
        regular,
        "foreign_cgroup",
        |_| (),
        |metrics, own| {
            let labels = [(LABEL, own), ("rank", "0")];
            let steps = metrics.try_value("memledger_container_training_steps_total", &labels)?;
            (steps == 3.0).then_some(()).ok_or_else(|| format!("{steps} steps of the container itself"))
        },
    );
}
