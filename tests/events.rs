//! `memledger events` and `/api/v1/events` against a real store.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use memledger::events::ContainerRef;
use memledger::events::LedgerEvent;
use memledger::ledger::store::{FILE, Store, WriteBatch};
use memledger::runs::RunRecord;
use serde_json::{Value, json};

use crate::support::load::connect;
use crate::support::{LEDGER_ONLY, Memledger, binary, run_on_ledger as run};

const ALONE: &[&str] = &["--docker.socket=", "--podman.socket=", "--container.include=^none$"];

pub(crate) fn exit(id: u64, name: &str, at: f64) -> LedgerEvent {
    let value = json!({
        "type": "exit", "id": id, "at": at, "container_name": name, "container_id": format!("{id:064}"),
        "reason": "error", "exit_code": 3, "oom_kills": 0, "evidence": [],
    });
    serde_json::from_value(value).expect("an event")
}

pub(crate) fn store_with(directory: &Path, events: impl IntoIterator<Item = LedgerEvent>) -> Store {
    let mut store = Store::open(directory, Duration::ZERO).expect("a store").store;
    store.commit(&events.into_iter().collect()).expect("committed");
    store
}

fn state(directory: &Path) -> String {
    format!("--state.path={}", directory.display())
}

#[test]
fn events_reads_ledger_with_and_without_running_writer() {
    let dir = tempfile::tempdir().unwrap();
    let store = store_with(dir.path(), [exit(1, "train", 1e9), exit(2, "other\u{1b}[31m", 4e9)]);
    let look = |flags: &[&str]| {
        let (code, out, err) = run(&[&["events", &state(dir.path())], flags].concat());
        assert_eq!(code, Some(0), "{err}");
        (out, err)
    };
    let (table, err) = look(&[]);
    let lines: Vec<_> = table.lines().collect();
    assert_eq!(lines.len(), 3, "{table}");
    // `run` switches the kernel log off; the output has a note on that where the kernel has counted OOM kills
    let off = "\nHow far this reaches\n  - The kernel log was not read (--oom.kernel-log=off).\n";
    assert!(["", off].contains(&&*err), "{err}");
    assert!(lines[0].starts_with("TIME"), "{table}");
    assert!(lines[1].contains("train") && lines[1].contains("exit code 3"), "{table}");
    assert!(!table.contains('\u{1b}') && lines[2].contains("other\\u{1b}[31m"), "{table}");
    drop(store);
    assert_eq!(look(&[]).0, table, "without a writer");

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
    assert!(err.contains("no matching events"), "{err}");
}

#[test]
fn events_without_ledger_or_with_invalid_time_gives_advice() {
    let dir = tempfile::tempdir().unwrap();
    for (flags, status, expected) in [
        (vec![state(dir.path())], 0, "has another --state.path"),
        (
            vec!["--state.path=".to_owned(), "--local.socket=/nonexistent/a".to_owned()],
            0,
            "no memledger serve answers on the control socket /nonexistent/a",
        ),
        (vec!["--state.path=".to_owned(), "--local.socket=".to_owned()], 0, "--local.socket are empty"),
        (vec![state(dir.path()), "--since=tomorrow".to_owned()], 2, "expected a duration such as"),
    ] {
        let flags: Vec<_> = ["events"].into_iter().chain(flags.iter().map(String::as_str)).collect();
        let (code, out, err) = run(&flags);
        assert_eq!((code, &*out), (Some(status), ""), "{err}");
        let text = err.split_whitespace().collect::<Vec<_>>().join(" "); // it may be wrapped
        assert!(text.contains(expected), "{flags:?}: {err}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "reading creates no file");
}

#[test]
fn events_exits_quietly_when_its_reader_closes_the_pipe() {
    let dir = tempfile::tempdir().unwrap();
    drop(store_with(dir.path(), (1..=5000).map(|id| exit(id, "train", id as f64))));
    let mut child = Command::new(binary())
        .args(["events", "--json", "--limit=0", &state(dir.path())])
        .envs(LEDGER_ONLY)
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

/// Returns the numbers of the events in a response. It is read line by line: ten whole ones would fill a small machine.
fn numbers_of(memledger: &Memledger, path: &str) -> Vec<u64> {
    let agent: ureq::Agent =
        ureq::Agent::config_builder().timeout_global(Some(Duration::from_secs(600))).build().into();
    let mut response = agent.get(format!("http://{}{path}", memledger.address)).call().expect("a response");
    let mut lines = BufReader::new(response.body_mut().as_reader())
        .lines()
        .map(|line| line.expect("a complete response"));
    assert_eq!(lines.next().as_deref(), Some("{\"events\":["));
    let mut numbers = Vec::new();
    for line in lines.by_ref().take_while(|line| line != "]}") {
        // not parsed: this much JSON takes a minute without optimisation
        let (_, rest) = line.split_once("\"id\":").expect("an event a line");
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        numbers.push(rest[..digits].parse().expect("its number"));
    }
    assert_eq!(lines.next(), None);
    numbers
}

/// Runs ten clients at once. Returns the most memory that memledger used meanwhile, without the pages of its program.
fn peak_with_ten(memledger: &Memledger, client: impl Fn() + Sync) -> u64 {
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..10).map(|_| scope.spawn(&client)).collect();
        let mut peak = 0;
        while !clients.iter().all(|client| client.is_finished()) {
            peak = peak.max(memledger.anonymous_bytes());
            std::thread::park_timeout(Duration::from_millis(1)); // poll
        }
        peak
    })
}

#[test]
fn ten_responses_with_the_whole_ledger_need_little_memory_and_are_complete() {
    const EVENTS: u64 = 10_000;
    let dir = tempfile::tempdir().unwrap();
    let text = "x".repeat(6_600);
    for first in (1..=EVENTS).step_by(1000) {
        let long = |id: u64| {
            let mut event = serde_json::to_value(exit(id, "train", 1.7e9 + id as f64)).expect("JSON");
            event["evidence"] = json!([{"source": "kmsg", "text": text}]);
            serde_json::from_value(event).expect("an event")
        };
        store_with(dir.path(), (first..first + 1000).map(long));
    }
    let size = std::fs::metadata(dir.path().join(FILE)).expect("the file").len();
    assert!(size > 64 << 20, "{size}");
    let (state, room) = (state(dir.path()), ["--state.max-size=1GiB", "--state.retention=87840h"]);
    // a quarter for one client; and a slow machine takes long for ten responses of 66 MB
    let requests = ["--web.max-requests=120", "--web.idle-timeout=1h"];
    let memledger = Memledger::start(&[ALONE, &[&state], &room, &requests].concat());
    let peak = peak_with_ten(&memledger, || {
        // by name: kills of other tests come between
        let found = numbers_of(&memledger, "/api/v1/events?container=train&limit=10000");
        let in_order = found.windows(2).all(|pair| pair[0] + 1 == pair[1]);
        assert!(in_order && found.len() == EVENTS as usize, "{} events, or another order", found.len());
    });
    eprintln!("events: {peak} bytes");
    assert!(peak < 40 << 20, "events: {peak} bytes");
    let peak = peak_with_ten(&memledger, || {
        let (status, body) = memledger.get("/api/v1/containers/train/why");
        assert_eq!(status, 200, "{body}");
    });
    eprintln!("why: {peak} bytes");
    assert!(peak < 40 << 20, "why: {peak} bytes");
}

#[test]
fn stalled_readers_of_runs_use_one_page_each() {
    const RUNS: u64 = 500;
    let dir = tempfile::tempdir().unwrap();
    let mut store = Store::open(dir.path(), Duration::ZERO).expect("a store").store;
    let record = |id: u64| {
        let settings = [("note".into(), "x".repeat(40_000).into())].into();
        let (run, ended) = (format!("run-{id}").into(), Some(1.7e9 + id as f64));
        let subject = ContainerRef { run_number: Some(id), ..ContainerRef::default() };
        (id, RunRecord { run, ended, settings, subject, ..RunRecord::default() })
    };
    store.commit(&WriteBatch { runs: (1..=RUNS).map(record).collect(), ..WriteBatch::default() }).unwrap();
    drop(store);
    let (state, kept) = (state(dir.path()), ["--state.max-size=1GiB", "--state.retention=87840h"]);
    let requests = ["--web.max-requests=120"]; // a quarter for one client
    let memledger = Memledger::start(&[ALONE, &[&state], &kept, &requests].concat());
    let before = memledger.anonymous_bytes();
    // each reads the beginning of its response, and nothing more
    let stalled: Vec<_> = (0..10)
        .map(|_| {
            let mut stream = connect(&memledger);
            write!(stream, "GET /api/v1/runs?limit=500&timelines=true HTTP/1.1\r\nHost: localhost\r\n\r\n")
                .unwrap();
            let mut first = [0; 15];
            stream.read_exact(&mut first).unwrap();
            assert_eq!(&first, b"HTTP/1.1 200 OK");
            stream
        })
        .collect();
    let grown = memledger.anonymous_bytes().saturating_sub(before);
    eprintln!("{} stalled readers of 20 MB: {grown} bytes", stalled.len());
    assert!(grown < 20 << 20, "{grown} bytes");
    drop(stalled);
    let (status, body) = memledger.get("/api/v1/runs?limit=500&timelines=true");
    let listed: Value = serde_json::from_str(&body).expect("JSON");
    let runs = listed["runs"].as_array().expect("a list");
    assert_eq!((status, runs.len()), (200, RUNS as usize));
    assert!((1..).zip(runs).all(|(id, run)| run["run"] == format!("run-{id}")), "oldest first");
}
