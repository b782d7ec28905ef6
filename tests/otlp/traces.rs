//! Traces of memledger's own work.

use std::collections::{BTreeSet, HashMap};

use fake_nvml::{FakeNvml, State};
use serde_json::Value;

use super::{EMPTY, Receiver, list, memledger};
use crate::support::eventually;

/// Adds the spans that arrived to those before.
fn receive(receiver: &Receiver, spans: &mut Vec<Value>) {
    spans.extend(list(&receiver.take(), "spans").iter().cloned());
}

fn named<'a>(spans: &'a [Value], name: &str) -> impl Iterator<Item = &'a Value> {
    spans.iter().filter(move |span| span["name"] == name)
}

#[test]
fn slow_cycle_is_explained_by_its_spans() {
    let driver = tempfile::tempdir().unwrap();
    let fake = FakeNvml::install(driver.path(), &State::with_gpus(1)).expect("the fake library is installed");
    let library = format!("--gpu.nvml-library={}", fake.path().display());
    for grpc in [false, true] {
        let Some(receiver) = Receiver::start() else { return };
        let state = tempfile::tempdir().unwrap();
        let state = format!("--state.path={}", state.path().display());
        let traced = ["--otlp.traces", "--otlp.traces-ratio=1", &library, &state];
        // a real Docker engine, and no container of another test
        let filter = &["--podman.socket=", "--container.include=^none$"];
        let memledger = memledger(filter, &receiver.flags(grpc), &traced);
        memledger.metrics();
        let wanted = [
            "cycle",
            "discover",
            "collect",
            "attribute",
            "ledger transaction",
            "runtime call",
            "nvml reading",
            "http request",
        ];
        let mut spans = vec![];
        eventually("a span of each kind", || {
            receive(&receiver, &mut spans);
            let missing: Vec<_> = wanted.iter().filter(|name| named(&spans, name).count() == 0).collect();
            if missing.is_empty() { Ok(()) } else { Err(format!("no {missing:?}")) }
        });
        let cycle = named(&spans, "cycle").next().unwrap();
        let parts: Vec<_> = spans.iter().filter(|span| span["parent"] == cycle["id"]).collect();
        let collectors: BTreeSet<_> =
            parts.iter().filter_map(|span| span["attributes"]["collector"].as_str()).collect();
        assert!(
            ["host", "cgroup", "process", "gpu"].iter().all(|name| collectors.contains(name)),
            "{collectors:?}"
        );
        for part in &parts {
            assert_eq!(part["trace"], cycle["trace"]);
            let time = |span: &Value, name: &str| span[name].as_u64().unwrap();
            assert!(
                time(cycle, "start") <= time(part, "start") && time(part, "end") <= time(cycle, "end"),
                "{part}"
            );
        }
        assert_eq!(cycle["parent"], "");
        assert_eq!(cycle["scope"][0], "memledger");
        assert_eq!(cycle["resource"]["service.name"], "memledger");
        let of_metrics = |span: &&Value| span["attributes"]["url.path"] == "/metrics";
        let request = named(&spans, "http request").find(of_metrics).unwrap();
        assert_eq!((&request["kind"], &request["parent"]), (&2.into(), &"".into()), "a server's");
        assert_eq!(request["attributes"]["http.response.status_code"], 200);
        let is_list =
            |span: &Value| span["attributes"]["runtime"] == "docker" && span["attributes"]["call"] == "list";
        assert!(named(&spans, "runtime call").any(is_list));
        assert!(!memledger.log().contains("span"), "spans are not in the log: {}", memledger.log());
        let sent = |metrics: &crate::support::Metrics| {
            metrics.try_value("memledger_otlp_sent_total", &[("signal", "traces")])
        };
        memledger
            .eventually("the count", |metrics| if sent(metrics)? > 0.0 { Ok(()) } else { Err("0".into()) });
    }
}

#[test]
fn traces_are_off_by_default_and_lost_ones_are_counted() {
    let Some(receiver) = Receiver::start() else { return };
    let off = memledger(EMPTY, &receiver.flags(false), &[]);
    off.eventually("an export", |metrics| {
        metrics.try_value("memledger_otlp_sent_total", &[("signal", "metrics")])
    });
    assert_eq!(off.metrics().get("memledger_otlp_sent_total", &[("signal", "traces")]), None);
    drop(off);
    receiver.behave(serde_json::json!({"as": "http", "status": 400}));
    let refused = memledger(
        EMPTY,
        &receiver.flags(false),
        &["--otlp.traces", "--otlp.traces-ratio=1", "--no-otlp.metrics", "--no-otlp.logs"],
    );
    let lost = [("signal", "traces"), ("reason", "refused")];
    refused.eventually("the loss", |metrics| {
        match metrics.try_value("memledger_otlp_lost_total", &lost)? {
            0.0 => Err("none".to_owned()),
            _ => Ok(()),
        }
    });
    receiver.behave(serde_json::json!({"as": "ok"}));
    let mut spans = vec![];
    eventually("spans after the recovery", || {
        receive(&receiver, &mut spans);
        if spans.is_empty() { Err("none".to_owned()) } else { Ok(()) }
    });
    let mut cycles = HashMap::new();
    named(&spans, "cycle").for_each(|cycle| *cycles.entry(&cycle["id"]).or_insert(0) += 1);
    assert!(cycles.values().all(|count| *count == 1), "each once");
}
