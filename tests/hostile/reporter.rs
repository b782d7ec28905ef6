//! Clients of the socket for reports from inside that lie, flood, crowd it, use the connection of another process, or take the
//! id of another container for the name of a cgroup of their own.
//! Unprivileged. A program that reports honestly runs beside them, with the client that memledger ships.

use std::os::unix::fs::PermissionsExt;

use super::{Attacker, Siege, has_memory};
use crate::support::Metrics;
use crate::support::cgroups::{TestCgroup, new_id};

/// Counts a hundred steps, and a hundred more with each line.
const HONEST: &str = "
import sys
sys.path.insert(0, sys.argv[1])
import memledger
while True:
    for _ in range(100):
        memledger.step()
    print('counted', flush=True)
    input()
";

/// Runs an attack and returns the metrics after it. `seen` is what the attack must lead to.
fn attack(name: &str, seen: impl Fn(&Metrics, &str) -> Result<(), String>) -> (Siege, Attacker, Metrics) {
    attack_by(Attacker::limited(256), Attacker::limited(64), name, seen)
}

fn attack_by(
    mut attacker: Attacker,
    mut honest: Attacker,
    name: &str,
    seen: impl Fn(&Metrics, &str) -> Result<(), String>,
) -> (Siege, Attacker, Metrics) {
    let folder = tempfile::Builder::new().prefix("mlt-reporter-").tempdir().expect("a folder");
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).expect("a mode");
    let directory = folder.path().join("reporter");
    let flag = format!("--reporter.directory={}", directory.display());
    let mut siege = Siege::of(&[attacker.name(), honest.name()], &[&flag]);
    let client = directory.join("python");
    // the client finds the socket beside itself
    assert_eq!(honest.run(HONEST, &[client.to_str().expect("text")]), "counted");
    let honest_name = honest.name().to_owned();
    let steps = |metrics: &Metrics, wanted| {
        let labels = [(super::LABEL, honest_name.as_str()), ("rank", "0")];
        let steps = metrics.ask("memledger_container_training_steps_total", &labels)?;
        (steps == wanted).then_some(()).ok_or_else(|| format!("{steps} steps of {wanted}"))
    };
    siege.memledger.eventually("the honest program's steps", |metrics| steps(metrics, 100.0));
    let socket = directory.join("reporter.sock");
    let arguments = [socket.to_str().expect("text"), name];
    assert_eq!(attacker.run(include_str!("reporter.py"), &arguments), "ready");
    let own = attacker.name().to_owned();
    siege.endure(|metrics| {
        has_memory(metrics, &own)?;
        steps(metrics, 100.0)?;
        seen(metrics, &own)
    });
    honest.step();
    siege.memledger.eventually("the honest program's further steps", |metrics| steps(metrics, 200.0));
    let metrics = siege.memledger.metrics();
    (siege, attacker, metrics)
}

fn is_rejected(metrics: &Metrics, reason: &str) -> Result<(), String> {
    let count = metrics.ask("memledger_reporter_rejected_total", &[("reason", reason)])?;
    if count > 0.0 { Ok(()) } else { Err(format!("nothing was rejected as {reason}")) }
}

#[test]
fn garbage_is_counted_by_its_reason_and_becomes_no_label() {
    let reasons = ["malformed", "too_large", "version", "rank", "name", "rate"];
    let (_siege, attacker, metrics) =
        attack("garbage", |metrics, _| reasons.iter().try_for_each(|reason| is_rejected(metrics, reason)));
    for (name, labels, _) in &metrics.series {
        let is_plain =
            |value: &String| value.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if name.starts_with("memledger_container_scope_") {
            assert_eq!(labels[super::LABEL], attacker.name(), "{name}");
            assert!(is_plain(&labels["component"]) && is_plain(&labels["operation"]), "{labels:?}");
        }
    }
    let scopes = metrics.all("memledger_container_scope_rss_bytes", &[]).len();
    assert!(scopes <= 64, "{scopes} pairs");
}

#[test]
fn flood_of_one_connection_waits() {
    let (siege, _attacker, _) = attack("flood", |metrics, _| is_rejected(metrics, "rate"));
    let worked = crate::support::processor_nanos(siege.memledger.pid(), Some("reporter")) / 1e9;
    eprintln!("{worked:.2} s of processor time in the thread of the reporter");
}

#[test]
fn crowd_of_connections_is_bounded() {
    let (siege, _attacker, metrics) = attack("crowd", |metrics, _| is_rejected(metrics, "connections"));
    let connections = metrics.value("memledger_reporter_connections", &[]);
    assert!(connections <= 66.0, "{connections}");
    drop(siege);
}

#[test]
fn flood_of_invented_cuda_errors_is_its_containers_own_and_few_become_events() {
    const OOMS: &str = "memledger_container_cuda_ooms_total";
    let began = memledger::clock::Timestamp::now();
    let (siege, attacker, metrics) = attack("ooms", |metrics, own| {
        let count = metrics.ask(OOMS, &[(super::LABEL, own), ("source", "reporter")])?;
        if count > 0.0 { Ok(()) } else { Err("no error is counted".to_owned()) }
    });
    for (_, labels, count) in metrics.all(OOMS, &[]) {
        assert!(labels[super::LABEL] == attacker.name() || *count == 0.0, "{labels:?}: {count}");
    }
    let (_, text) = siege.memledger.get("/api/v1/events?limit=1000");
    let listed: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let events = listed["events"].as_array().expect("a list");
    let ooms: Vec<_> = events.iter().filter(|event| event["type"] == "cuda_oom").collect();
    // 16 at once and one a minute
    let most = 17.0 + memledger::clock::Timestamp::now().since(began).as_secs_f64() / 60.0;
    assert!(!ooms.is_empty() && ooms.len() as f64 <= most, "{} events", ooms.len());
    assert!(!text.contains("\\u001b"), "no text: {text}");
    for oom in ooms {
        assert!(oom["tried_bytes"].as_u64().is_none_or(|bytes| bytes <= 1 << 50), "{oom}");
        assert_eq!(oom["container_name"], attacker.name(), "{oom}");
    }
}

#[test]
fn inherited_connection_is_not_believed_and_brings_no_descriptors() {
    let (siege, attacker, metrics) = attack("inherited", |metrics, _| is_rejected(metrics, "sender"));
    let labels = [(super::LABEL, attacker.name()), ("rank", "0")];
    assert_eq!(metrics.get("memledger_container_training_steps_total", &labels), Some(3.0));
    let open = |metrics: &Metrics| metrics.value("process_open_fds", &[]);
    let later = siege.memledger.fresh_metrics();
    assert!(open(&later) < open(&metrics) + 20.0, "{} and {}", open(&metrics), open(&later));
}

#[test]
fn process_in_a_cgroup_named_after_another_container_reports_for_its_own() {
    let honest = Attacker::limited(64);
    let own = new_id();
    let path = format!("memledger-tests/{own}/docker/{}", honest.cgroup.id);
    let attacker = Attacker { cgroup: TestCgroup::at(&path, &own), process: None };
    attack_by(attacker, honest, "neighbour", |metrics, own| {
        let labels = [(super::LABEL, own), ("rank", "0")];
        let steps = metrics.ask("memledger_container_training_steps_total", &labels)?;
        (steps == 3.0).then_some(()).ok_or_else(|| format!("{steps} steps of the container itself"))
    });
}
