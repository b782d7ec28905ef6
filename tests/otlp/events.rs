//! Events of the ledger as log records: each at least once, with all fields, across restarts of both sides.

use std::path::Path;
use std::time::Duration;

use memledger::events::LedgerEvent;
use memledger::ledger::store::{FILE, Store};
use serde_json::{Value, json};

use super::{Receiver, list, memledger};
use crate::support::docker::{Engine, unique};
use crate::support::{eventually, run};

/// A host without containers and OOM kills: those of other tests would be events of these ledgers.
const EMPTY: &[&str] = &[
    "--docker.socket=",
    "--podman.socket=",
    "--oom.kernel-log=off",
    "--path.procfs=/nonexistent",
    "--path.cgroupfs=/nonexistent",
];

fn event(value: Value) -> LedgerEvent {
    serde_json::from_value(value).expect("an event")
}

pub(super) fn exit(id: u64, name: &str) -> LedgerEvent {
    event(json!({
        "type": "exit", "id": id, "at": 1.7e9 + id as f64, "container_name": name, "container_id": format!("{id:064}"),
        "reason": "error", "exit_code": 3, "oom_kills": 0, "evidence": [],
    }))
}

pub(super) fn write(directory: &Path, events: impl IntoIterator<Item = LedgerEvent>) {
    let mut store = Store::open(directory, Duration::from_secs(10)).expect("a store").store;
    store.commit(&events.into_iter().collect()).expect("committed");
}

/// Waits for this many records.
fn records(receiver: &Receiver, count: usize) -> Vec<Value> {
    let mut found = vec![];
    eventually("log records", || {
        found.extend(list(&receiver.take(), "records").iter().cloned());
        if found.len() >= count { Ok(()) } else { Err(format!("{} of {count}", found.len())) }
    });
    found
}

fn ids(records: &[Value]) -> Vec<u64> {
    records.iter().map(|record| record["attributes"]["memledger.id"].as_u64().expect("a number")).collect()
}

fn number(record: &Value) -> f64 {
    record.as_f64().expect("a number")
}

/// Returns the fields of a record under their names in the ledger.
fn fields(record: &Value) -> serde_json::Map<String, Value> {
    let attributes = record["attributes"].as_object().expect("attributes");
    let of_ledger = |key: &str| match key {
        "container.name" => "container_name".to_owned(),
        "container.id" => "container_id".to_owned(),
        "k8s.namespace.name" => "k8s_namespace_name".to_owned(),
        "k8s.pod.name" => "k8s_pod_name".to_owned(),
        "container.image.name" => "image".to_owned(),
        "container.runtime.name" => "runtime".to_owned(),
        "process.pid" => "pid".to_owned(),
        "hw.id" => "gpu_uuid".to_owned(),
        other => other.strip_prefix("memledger.").unwrap_or_else(|| panic!("{other} is whose?")).to_owned(),
    };
    attributes.iter().map(|(key, value)| (of_ledger(key), value.clone())).collect()
}

#[test]
fn real_kill_is_exported_with_all_fields_of_the_ledger() {
    let Some(receiver) = Receiver::start() else { return };
    let Some(engine) = Engine::shared() else { return };
    let name = unique("otlp-kill");
    let include = format!("--container.include=^{name}$");
    let memledger = memledger(&[&engine.flag(), "--podman.socket=", &include], &receiver.flags(true), &[]);
    let hog = ["--memory=24m", "--memory-swap=24m"];
    let _container = engine.run(&name, &hog, &["sh", "-c", "exec tail /dev/zero"]);
    let arrived = eventually("a kill and an exit", || {
        let mut found: Vec<Value> = vec![];
        found.extend(list(&receiver.command(&json!({"do": "peek"})), "records").iter().cloned());
        let mine: Vec<_> =
            found.into_iter().filter(|record| record["attributes"]["container.name"] == *name).collect();
        if mine.len() >= 2 { Ok(mine) } else { Err(format!("{mine:?}; {}", memledger.log())) }
    });
    let (status, text) = memledger.get(&format!("/api/v1/events?container={name}"));
    assert_eq!(status, 200);
    let response: Value = serde_json::from_str(&text).expect("JSON");
    for stored in list(&response, "events") {
        let record = arrived
            .iter()
            .find(|record| record["attributes"]["memledger.id"] == stored["id"])
            .unwrap_or_else(|| panic!("{stored} did not arrive: {arrived:?}"));
        assert_eq!(&Value::Object(fields(record)), stored);
        assert_eq!(number(&record["time"]) / 1e9, (number(&stored["at"]) * 1e9).trunc() / 1e9);
        let event = match stored["type"].as_str() {
            Some("oom_kill") => "memledger.oom_kill",
            _ => "memledger.exit",
        };
        assert_eq!(record["event"], event);
        assert!(record["body"].as_str().expect("text").contains(&name), "{record}");
    }
    // the runtime may report the exit before the kernel log was read
    let kill = arrived.iter().find(|record| record["event"] == "memledger.oom_kill").expect("a kill");
    assert_eq!(kill["severity"], "ERROR");
}

#[test]
fn exports_each_event_once_across_restarts() {
    let Some(receiver) = Receiver::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let state = format!("--state.path={}", folder.path().display());
    write(folder.path(), (1..=1000).map(|id| exit(id, "train")));
    let first = memledger(EMPTY, &receiver.flags(true), &[&state]);
    let mut seen = ids(&records(&receiver, 1000));
    assert_eq!(seen, (1..=1000).collect::<Vec<_>>(), "in order, each once");
    first.signal("TERM");
    assert_eq!(first.wait().0, Some(0));

    receiver.stop();
    write(folder.path(), (1001..=1010).map(|id| exit(id, "train")));
    let second = memledger(EMPTY, &receiver.flags(true), &[&state]);
    second.eventually("the export of logs fails", |metrics| {
        match metrics.try_value("memledger_otlp_up", &[("signal", "logs")])? {
            0.0 => Ok(()),
            up => Err(format!("{up}")),
        }
    });
    drop(second); // killed while the endpoint is down
    receiver.start_again();
    let third = memledger(EMPTY, &receiver.flags(true), &[&state]);
    seen = ids(&records(&receiver, 10));
    assert_eq!(seen, (1001..=1010).collect::<Vec<_>>(), "acknowledged events are not sent again");
    let lost = [("signal", "logs"), ("reason", "unreachable")];
    let lost =
        third.eventually("its counters", |metrics| metrics.try_value("memledger_otlp_lost_total", &lost));
    assert_eq!(lost, 0.0, "waiting is no loss");
}

#[test]
fn rejected_event_does_not_block_others() {
    let Some(receiver) = Receiver::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let state = format!("--state.path={}", folder.path().display());
    let name = |id| if id == 33 { "poison" } else { "train" };
    write(folder.path(), (1..=100).map(|id| exit(id, name(id))));
    for grpc in [true, false] {
        receiver.behave(json!({"as": "refuse_when", "text": "poison"}));
        let memledger = memledger(EMPTY, &receiver.flags(grpc), &[&state, "--no-otlp.metrics"]);
        let seen = ids(&records(&receiver, 99));
        assert_eq!(seen, (1..=100).filter(|id| *id != 33).collect::<Vec<_>>());
        let lost = [("signal", "logs"), ("reason", "refused")];
        memledger.eventually("the loss is counted", |metrics| {
            match metrics.try_value("memledger_otlp_lost_total", &lost)? {
                1.0 => Ok(()),
                lost => Err(format!("{lost}")),
            }
        });
    }
}

#[test]
fn damaged_event_is_counted_and_does_not_block_others() {
    let Some(receiver) = Receiver::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), (1..=10).map(|id| exit(id, "train")));
    let rows = "UPDATE events SET body = substr(body, 1, 20) WHERE id IN (1, 5, 10)";
    assert_eq!(rusqlite::Connection::open(folder.path().join(FILE)).unwrap().execute(rows, []).unwrap(), 3);
    let state = format!("--state.path={}", folder.path().display());
    let memledger = memledger(EMPTY, &receiver.flags(true), &[&state, "--no-otlp.metrics"]);
    assert_eq!(ids(&records(&receiver, 7)), [2, 3, 4, 6, 7, 8, 9]);
    let lost = [("signal", "logs"), ("reason", "unreadable")];
    memledger.eventually("the losses are counted", |metrics| {
        match metrics.try_value("memledger_otlp_lost_total", &lost)? {
            3.0 => Ok(()),
            lost => Err(format!("{lost}")),
        }
    });
    for row in [1, 5, 10] {
        assert_eq!(memledger.log().matches(&format!("event={row}\n")).count(), 1, "{}", memledger.log());
    }
}

#[test]
fn endpoint_that_rejects_everything_loses_no_event() {
    let Some(receiver) = Receiver::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let flags = [&*format!("--state.path={}", folder.path().display()), "--no-otlp.metrics"];
    write(folder.path(), (1..=1000).map(|id| exit(id, "train")));
    receiver.behave(json!({"as": "http", "status": 400}));
    let first = memledger(EMPTY, &receiver.flags(false), &flags);
    eventually("the first batch is bisected down to one event, and two more are tried", || {
        let attempts = receiver.command(&json!({"do": "peek"}))["attempts"].as_u64().expect("a number");
        if attempts >= 11 { Ok(()) } else { Err(format!("{attempts}")) }
    });
    first.eventually("the failure is visible", |metrics| {
        match metrics.try_value("memledger_otlp_up", &[("signal", "logs")])? {
            0.0 => Ok(()),
            up => Err(format!("{up}")),
        }
    });
    first.signal("TERM");
    assert_eq!(first.wait().0, Some(0));
    receiver.behave(json!({"as": "ok"}));
    receiver.take();
    let _second = memledger(EMPTY, &receiver.flags(false), &flags);
    assert_eq!(ids(&records(&receiver, 1000)), (1..=1000).collect::<Vec<_>>());
}

/// Checks that a behaviour of the endpoint acknowledges nothing: all events arrive after a restart.
fn acknowledges_nothing(behave: serde_json::Value) {
    let Some(receiver) = Receiver::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let flags = [&*format!("--state.path={}", folder.path().display()), "--no-otlp.metrics"];
    write(folder.path(), (1..=20).map(|id| exit(id, "train")));
    receiver.behave(behave.clone());
    let first = memledger(EMPTY, &receiver.flags(false), &flags);
    first.eventually("the failure is visible", |metrics| {
        match metrics.try_value("memledger_otlp_up", &[("signal", "logs")])? {
            0.0 => Ok(()),
            up => Err(format!("{behave}: {up}")),
        }
    });
    assert!(first.log().contains("not an OTLP response"), "{}", first.log());
    first.signal("TERM");
    assert_eq!(first.wait().0, Some(0));
    receiver.behave(json!({"as": "ok"}));
    receiver.take();
    let _second = memledger(EMPTY, &receiver.flags(false), &flags);
    assert_eq!(ids(&records(&receiver, 20)), (1..=20).collect::<Vec<_>>());
}

/// Checks that a receiver that takes no logs gets one request, is named with what to set, and costs no event.
fn takes_no_logs(grpc: bool, behave: serde_json::Value) {
    let Some(receiver) = Receiver::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let flags = [&*format!("--state.path={}", folder.path().display()), "--no-otlp.metrics"];
    write(folder.path(), (1..=20).map(|id| exit(id, "train")));
    receiver.behave(behave.clone());
    let first = memledger(EMPTY, &receiver.flags(grpc), &flags);
    first.eventually("the failure is visible", |metrics| {
        match metrics.try_value("memledger_otlp_up", &[("signal", "logs")])? {
            0.0 => Ok(()),
            up => Err(format!("{behave}: {up}")),
        }
    });
    let failing = first.log().lines().find(|line| line.contains("OTLP export failing")).map(str::to_owned);
    assert!(failing.is_some_and(|line| line.contains("--no-otlp.logs")), "{}", first.log());
    let stamp = || first.metrics().value("memledger_snapshot_timestamp_seconds", &[]);
    let before = stamp();
    eventually("some seconds", || if stamp() > before + 3.0 { Ok(()) } else { Err("too few".to_owned()) });
    assert_eq!(receiver.command(&json!({"do": "peek"}))["attempts"], 1, "{behave}");
    let endpoint = receiver.flags(grpc);
    let mut arguments = vec!["doctor", "--state.path=", "--no-otlp.metrics"];
    arguments.extend(endpoint.iter().map(String::as_str));
    let (_, out, _) = run(&arguments);
    assert!(out.contains("--no-otlp.logs"), "{out}");
    first.signal("TERM");
    assert_eq!(first.wait().0, Some(0));
    receiver.behave(json!({"as": "ok"}));
    receiver.take();
    let _second = memledger(EMPTY, &receiver.flags(grpc), &flags);
    assert_eq!(ids(&records(&receiver, 20)), (1..=20).collect::<Vec<_>>());
}

#[test]
fn receiver_that_takes_no_logs_is_named_and_left_alone() {
    takes_no_logs(false, json!({"as": "http", "status": 404}));
    takes_no_logs(
        false,
        json!({"as": "http", "status": 400, "message": "unsupported path requested: \"/v1/logs\""}),
    );
    takes_no_logs(true, json!({"as": "grpc", "code": "UNIMPLEMENTED"}));
}

#[test]
fn login_page_with_status_200_acknowledges_nothing() {
    acknowledges_nothing(json!({"as": "page", "type": "text/html", "body": "<html>Sign in</html>"}));
}

#[test]
fn undecodable_response_with_status_200_acknowledges_nothing() {
    acknowledges_nothing(
        json!({"as": "page", "type": "application/x-protobuf", "body": "<html>Sign in</html>"}),
    );
}

#[test]
fn too_long_response_is_not_retried_forever() {
    for grpc in [true, false] {
        let Some(receiver) = Receiver::start() else { return };
        let folder = tempfile::tempdir().unwrap();
        let flags = [&*format!("--state.path={}", folder.path().display()), "--no-otlp.metrics"];
        write(folder.path(), (1..=20).map(|id| exit(id, "train")));
        receiver.behave(json!({"as": "long_response", "over": 5}));
        let memledger = memledger(EMPTY, &receiver.flags(grpc), &flags);
        memledger.eventually("all are exported, in smaller requests", |metrics| {
            match metrics.try_value("memledger_otlp_sent_total", &[("signal", "logs")])? {
                20.0 => Ok(()),
                sent => Err(format!("{sent}")),
            }
        });
    }
}

#[test]
fn gpu_errors_are_exported() {
    let Some(receiver) = Receiver::start() else { return };
    let library = tempfile::tempdir().unwrap();
    let mut state = fake_nvml::State::with_gpus(1);
    let fake = fake_nvml::FakeNvml::install(library.path(), &state).expect("the fake library");
    let nvml = format!("--gpu.nvml-library={}", fake.path().display());
    let log = ["--gpu.interval=50ms", &nvml]; // without the kernel log the event comes from NVML
    let memledger = memledger(EMPTY, &receiver.flags(true), &log);
    memledger.eventually("the GPU is read", |metrics| {
        metrics.try_value("memledger_gpu_xid_errors_total", &[("xid", "79")])
    });
    state.events.push(fake_nvml::Event::xid(1, 0, 79));
    fake.set(&state).unwrap();
    let record = records(&receiver, 1).remove(0);
    assert_eq!(
        (&record["event"], &record["attributes"]["memledger.xid"]),
        (&"memledger.gpu_error".into(), &79.into())
    );
    assert!(record["attributes"]["hw.id"].is_string(), "{record}");
}

#[test]
fn cuda_errors_are_exported_with_their_numbers() {
    let Some(receiver) = Receiver::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let oom = json!({
        "type": "cuda_oom", "id": 1, "at": 1.7e9, "container_name": "train", "container_id": "c".repeat(64), "pid": 4711,
        "gpu": "0", "gpu_uuid": "GPU-a", "source": "reporter", "tried_bytes": 5_u64 << 30, "free_bytes": 7, "total_bytes": 9,
        "uncaught": true, "holders": [{"name": "jupyter", "own": false, "bytes": 3}],
    });
    write(folder.path(), [event(oom)]);
    let state = format!("--state.path={}", folder.path().display());
    let _memledger = memledger(EMPTY, &receiver.flags(true), &[&state, "--no-otlp.metrics"]);
    let record = records(&receiver, 1).remove(0);
    assert_eq!(record["event"], "memledger.cuda_oom", "{record}");
    let attributes = &record["attributes"];
    for (name, value) in [("tried_bytes", 5_u64 << 30), ("free_bytes", 7), ("total_bytes", 9), ("pid", 4711)]
    {
        let named = attributes.as_object().expect("attributes").iter();
        let found: Vec<_> = named.filter(|(key, _)| key.ends_with(name)).map(|(_, value)| value).collect();
        assert_eq!(found, [&json!(value)], "{name}: {record}");
    }
    assert!(record.to_string().contains("jupyter"), "{record}");
}
