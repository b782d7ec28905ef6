//! The same values by Prometheus and OTLP, series by series, from the same snapshot.

use std::collections::BTreeMap;

use fake_nvml::{FakeNvml, State};
use serde_json::Value;

use super::{Receiver, list, memledger};
use crate::recorded::kubernetes;
use crate::support::docker::{Engine, unique};
use crate::support::metrics::Labels;
use crate::support::recorded::Host;
use crate::support::{Memledger, Metrics, eventually};

/// Derives the Prometheus name of an OTLP metric: dots become underscores, the unit and, for a monotonic sum, `total` are added.
/// Written from the specification of these rules.
fn prometheus_name(point: &Value) -> String {
    let text = |key: &str| point[key].as_str().expect("text");
    let mut name = text("name").replace('.', "_");
    let unit = match text("unit") {
        "By" => "bytes",
        "s" => "seconds",
        "W" => "watts",
        "J" => "joules",
        "Cel" => "celsius",
        "Hz" => "hertz",
        "" | "1" => "",
        // text in braces is an annotation, not a unit
        other if other.starts_with('{') && other.ends_with('}') => "",
        other => panic!("{other} is no unit of Prometheus"),
    };
    if !unit.is_empty() {
        name = format!("{name}_{unit}");
    }
    if point["monotonic"] == true { format!("{name}_total") } else { name }
}

fn prometheus_labels(point: &Value) -> Labels {
    let attributes = point["attributes"].as_object().expect("attributes");
    let pairs = attributes
        .iter()
        .map(|(key, value)| (key.replace('.', "_"), value.as_str().expect("attributes are text").to_owned()));
    let mut labels: Labels = pairs.collect();
    // the one attribute that is not a label: the semantic conventions' name of the GPU's UUID
    if let Some(id) = labels.remove("hw_id") {
        assert_eq!(labels.get("gpu_uuid"), Some(&id));
    }
    labels
}

type Series = BTreeMap<(String, Labels), f64>;

/// Waits for a scrape and an export of the same snapshot. Returns the points and the scrape.
fn of_one_snapshot(memledger: &Memledger, receiver: &Receiver) -> (Vec<Value>, Metrics) {
    let mut exported: Vec<Value> = vec![];
    let mut scraped: Vec<Metrics> = vec![];
    eventually("a scrape and an export of the same snapshot", || {
        scraped.push(memledger.metrics());
        exported.extend(list(&receiver.take(), "points").iter().cloned());
        for metrics in &scraped {
            let stamp = metrics.value("memledger_snapshot_timestamp_seconds", &[]);
            let is_stamp = |point: &&Value| point["name"] == "memledger.snapshot_timestamp";
            let mut stamps = exported.iter().filter(is_stamp);
            let Some(found) = stamps.find(|point| point["value"] == stamp) else { continue };
            let of_it: Vec<_> =
                exported.iter().filter(|point| point["time"] == found["time"]).cloned().collect();
            if of_it.len() >= metrics.series.len() {
                return Ok((of_it, metrics.clone()));
            }
        }
        Err(format!("{} scrapes, {} points", scraped.len(), exported.len()))
    })
}

fn compare(points: &[Value], metrics: &Metrics) {
    let mut exported = Series::new();
    for point in points {
        let series = (prometheus_name(point), prometheus_labels(point));
        let value = point["value"].as_f64().expect("a number");
        assert!(exported.insert(series.clone(), value).is_none(), "{series:?} is duplicated");
    }
    let scraped: Series =
        metrics.series.iter().map(|(name, labels, value)| ((name.clone(), labels.clone()), *value)).collect();
    for (series, value) in &scraped {
        assert_eq!(exported.get(series), Some(value), "{series:?}");
    }
    assert_eq!(exported.len(), scraped.len(), "more series were exported than scraped");
}

fn check_forms(points: &[Value]) {
    for point in points {
        assert!(!point["description"].as_str().expect("text").is_empty(), "{point}");
        let start = point["start"].as_u64().expect("a time");
        match point["kind"].as_str() {
            Some("sum") => {
                assert_eq!(
                    (&point["monotonic"], &point["temporality"]),
                    (&true.into(), &2.into()),
                    "{point}"
                );
                // counters over a device's life have no known start
                let is_known = point["name"] != "memledger.gpu.ecc_errors";
                assert!(
                    (start > 0) == is_known && start <= point["time"].as_u64().expect("a time"),
                    "{point}"
                );
            }
            Some("gauge") => assert_eq!(start, 0, "{point}"),
            other => panic!("{other:?}: {point}"),
        }
    }
    let who = &points[0]["resource"];
    assert_eq!(who["service.name"], "memledger");
    assert_eq!(who["service.version"], env!("CARGO_PKG_VERSION"));
    assert!(who["host.name"].is_string() && who["service.instance.id"].is_string(), "{who}");
}

fn both_ways_agree(grpc: bool) {
    let Some(receiver) = Receiver::start() else { return };
    let Some(engine) = Engine::shared() else { return };
    let library = tempfile::tempdir().unwrap();
    let mut state = State::with_gpus(2);
    state.gpus[0].memory.used = 1 << 30;
    let library = FakeNvml::install(library.path(), &state).expect("the fake library");
    let hostile = "BATCH_SIZE=3\"2\\n\\\n# TYPE x gauge\n{a=\"b\"} ü";
    let container = engine.run(&unique("otlp"), &["--memory=256m", "-e", hostile], &["sleep", "1000"]);
    let include = format!("--container.include=^{}$", container.name);
    let nvml = format!("--gpu.nvml-library={}", library.path().display());
    let first =
        [&engine.flag(), "--podman.socket=", "--pss.interval=1s", "--sample.interval=4s", &include, &nvml];
    let memledger = memledger(&first, &receiver.flags(grpc), &[]);
    memledger.eventually("a whole snapshot", |metrics| {
        metrics.try_value("memledger_container_process_pss_bytes", &[("role", "other")])?;
        metrics.try_value("memledger_container_oom_kills_total", &[("victim", "main"), ("scope", "host")])?;
        metrics.try_value("memledger_otlp_up", &[("signal", "metrics")])?;
        metrics.try_value("memledger_gpu_memory_used_bytes", &[("gpu", "0")])
    });
    let (points, metrics) = of_one_snapshot(&memledger, &receiver);
    compare(&points, &metrics);
    check_forms(&points);
    let families: std::collections::BTreeSet<_> = metrics.series.iter().map(|row| row.0.clone()).collect();
    assert!(families.len() > 50, "only {} families were compared", families.len());
    let of_container =
        points.iter().find(|point| point["name"] == "memledger.container.info").expect("an info");
    assert_eq!(of_container["attributes"]["container.id"], container.id.as_str());
    let of_gpu = points.iter().find(|point| point["name"] == "memledger.gpu.memory.used").expect("a GPU");
    assert_eq!((&of_gpu["unit"], of_gpu["attributes"]["hw.id"].is_string()), (&"By".into(), true));
}

#[test]
fn grpc_export_equals_scrape() {
    both_ways_agree(true);
}

#[test]
fn http_export_equals_scrape() {
    both_ways_agree(false);
}

/// Families of pods have no container: their names are labels of their own.
#[test]
fn memory_of_pods_is_exported() {
    let Some(receiver) = Receiver::start() else { return };
    let runtime = kubernetes::runtime();
    let flags = [format!("--cri.endpoint={}", runtime.socket.display()), "--no-collector.gpu".to_owned()];
    let host = Host::unpack("v2-kubelet-cgroupfs", 3);
    let memledger = host.start(&[&flags[..], &receiver.flags(false)].concat());
    let pod = [("k8s_namespace_name", "ml"), ("k8s_pod_name", "train-0")];
    memledger.eventually("the pod", |metrics| {
        metrics.try_value("memledger_pod_memory_limit_bytes", &pod)?;
        metrics.try_value("memledger_otlp_up", &[("signal", "metrics")])
    });
    let (points, metrics) = of_one_snapshot(&memledger, &receiver);
    compare(&points, &metrics);
    for (name, parts) in [("usage", 1), ("limit", 1), ("component", 2)] {
        let name = format!("memledger.pod_memory_{name}");
        let is_it = |point: &&Value| {
            let attributes = &point["attributes"];
            point["name"] == name.as_str()
                && attributes["k8s.namespace.name"] == "ml"
                && attributes["k8s.pod.name"] == "train-0"
        };
        assert_eq!(points.iter().filter(is_it).count(), parts, "{name}");
    }
}
