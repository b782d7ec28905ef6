//! `memledger events` and `/api/v1/events` against a real store.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use memledger::ledger::entries::Event;
use memledger::ledger::store::{Changes, Store};
use serde_json::{Value, json};

use crate::support::{Memledger, binary, run};

const ALONE: &[&str] = &["--docker.socket=", "--podman.socket=", "--container.include=^none$"];

fn exit(id: u64, name: &str, at: f64) -> Event {
    let value = json!({
        "type": "exit", "id": id, "at": at, "container_name": name, "container_id": format!("{id:064}"),
        "reason": "error", "exit_code": 3, "oom_kills": 0, "evidence": [],
    });
    serde_json::from_value(value).expect("an event")
}

fn store_with(directory: &Path, events: impl IntoIterator<Item = Event>) -> Store {
    let mut store = Store::open(directory, Duration::ZERO).expect("a store").store;
    let events: BTreeMap<_, _> = events.into_iter().map(|event| (event.id(), event)).collect();
    store.commit(&Changes { events, ..Changes::default() }).expect("committed");
    store
}

fn state(directory: &Path) -> String {
    format!("--state.path={}", directory.display())
}

#[test]
fn events_shows_what_is_in_the_ledger_while_it_is_written_and_when_it_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let store = store_with(dir.path(), [exit(1, "train", 1e9), exit(2, "other\u{1b}[31m", 4e9)]);
    let look = |flags: &[&str]| {
        let (code, out, err) = run(&[&["events", &state(dir.path())], flags].concat());
        assert_eq!(code, Some(0), "{err}");
        (out, err)
    };
    let (table, err) = look(&[]);
    let lines: Vec<_> = table.lines().collect();
    assert_eq!((lines.len(), &*err), (3, ""), "{table}");
    assert!(lines[0].starts_with("TIME"), "{table}");
    assert!(lines[1].contains("train") && lines[1].contains("exit code 3"), "{table}");
    assert!(!table.contains('\u{1b}') && lines[2].contains("other\\u{1b}[31m"), "{table}");
    drop(store);
    assert_eq!(look(&[]).0, table, "nobody writes");

    let (text, _) = look(&["--json"]);
    let parsed: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!((parsed.len(), &parsed[0]["id"], &parsed[1]["id"]), (2, &json!(1), &json!(2)));
    assert_eq!(parsed[0], serde_json::to_value(exit(1, "train", 1e9)).unwrap());
    assert!(look(&["--json", "--container=train"]).0.starts_with("{\"type\":\"exit\",\"id\":1,"));
    assert!(look(&["--json", "--since=24h"]).0.starts_with("{\"type\":\"exit\",\"id\":2,"));
    assert!(look(&["--json", "--since=2030-01-01T00:00:00Z"]).0.starts_with("{\"type\":\"exit\",\"id\":2,"));
    let (newest, err) = look(&["--json", "--limit=1"]);
    assert!(newest.starts_with("{\"type\":\"exit\",\"id\":2,") && newest.lines().count() == 1, "{newest}");
    assert!(err.contains("--limit=0 shows all"), "{err}");
    let (nothing, err) = look(&["--container=nobody"]);
    assert_eq!(nothing, "");
    assert!(err.contains("no such events"), "{err}");
}

#[test]
fn events_without_a_ledger_or_with_a_wrong_time_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    for (flags, status, says) in [
        (vec![state(dir.path())], 1, "give the --state.path that memledger serve runs with"),
        (vec!["--state.path=".to_owned()], 1, "ask it at /api/v1/events"),
        (vec![state(dir.path()), "--since=yesterday".to_owned()], 2, "wanted is a duration such as"),
    ] {
        let flags: Vec<_> = ["events"].into_iter().chain(flags.iter().map(String::as_str)).collect();
        let (code, out, err) = run(&flags);
        assert_eq!((code, &*out), (Some(status), ""), "{err}");
        assert!(err.contains(says), "{flags:?}: {err}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "looking makes nothing");
}

#[test]
fn events_ends_quietly_when_its_reader_has_seen_enough() {
    let dir = tempfile::tempdir().unwrap();
    drop(store_with(dir.path(), (1..=5000).map(|id| exit(id, "train", id as f64))));
    let mut child = Command::new(binary())
        .args(["events", "--json", "--limit=0", &state(dir.path())])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 10];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap(); // and closed
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

#[test]
fn the_api_of_events_is_guarded_as_the_other() {
    let memledger = Memledger::start(ALONE);
    for path in ["/api/v1/events", "/api/v1/containers"] {
        for header in [("Host", "attacker.example"), ("X-Forwarded-For", "10.0.0.1")] {
            let (status, _, body) = memledger.get_with(path, &[header]);
            assert_eq!(status, 403, "{path} {header:?}");
            assert!(String::from_utf8_lossy(&body).contains("--web.enable-api"));
        }
        assert_ne!(memledger.get(path).0, 403, "{path}");
    }
}
