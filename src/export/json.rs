//! Renders the snapshot as JSON for `/api/v1/containers`: per container all metrics, and its processes.
//!
//! Keys are the names of families without `memledger_`, `container_` and so on, so that a new family appears automatically;
//! a family with labels of its own becomes nested objects by their values, in the order of the label names. `process_count`
//! is by role, because `processes` is the list; it is absent where the processes are unknown. The list is written from the
//! snapshot, without a copy: it is by far the longest part.

use std::collections::BTreeMap;

use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Map, Value, json};

use super::prometheus::each_label;
use crate::attribute::ContainerProcess;
use crate::catalog::{MetricDesc, MetricKind, MetricScope};
use crate::series::{NONE, Row};
use crate::snapshot::Snapshot;

/// Renders the host, its GPUs, and its containers with their processes, as text.
pub fn containers(snapshot: &Snapshot) -> Vec<u8> {
    let mut text = Vec::new();
    // writing to a vector does not fail, and all keys are strings
    let _ = serde_json::to_writer_pretty(&mut text, &document(snapshot));
    text.push(b'\n');
    text
}

/// A part of the document: a value, or what is written from the snapshot.
enum Part<'a> {
    Value(Value),
    Containers(Vec<BTreeMap<String, Part<'a>>>),
    Processes(&'a [ContainerProcess]),
}

impl Serialize for Part<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Part::Value(value) => value.serialize(serializer),
            Part::Containers(containers) => serializer.collect_seq(containers),
            Part::Processes(processes) => serializer.collect_seq(processes.iter().map(ProcessRecord)),
        }
    }
}

fn document(snapshot: &Snapshot) -> BTreeMap<&'static str, Part<'_>> {
    let mut host = Map::new();
    let mut gpus = vec![Map::new(); snapshot.gpus.len()];
    let mut containers = vec![Map::new(); snapshot.containers.len()];
    for row in snapshot.series.rows() {
        let def = row.family.desc();
        let target = match def.scope {
            MetricScope::Global if def.name.starts_with("memledger_host_") => &mut host,
            MetricScope::Global => continue,
            MetricScope::Gpu => &mut gpus[row.gpu as usize],
            MetricScope::Container => &mut containers[row.container as usize],
            MetricScope::ContainerGpu if row.container == NONE || is_by_process(def) => continue,
            MetricScope::ContainerGpu => {
                let entry = containers[row.container as usize].entry("gpus").or_insert_with(|| json!({}));
                let uuid = snapshot.gpus[row.gpu as usize].key().to_string();
                let Some(by_uuid) = entry.as_object_mut() else { continue };
                match by_uuid.entry(uuid).or_insert_with(|| json!({})) {
                    Value::Object(target) => target,
                    _ => continue,
                }
            }
        };
        insert(target, snapshot, row);
    }
    insert_gpu_labels(&mut gpus, snapshot);
    let containers = containers
        .into_iter()
        .enumerate()
        .map(|(number, mut entry)| {
            let identity = &snapshot.containers[number].identity;
            entry.insert("name".into(), json!(&*identity.name));
            for (key, value) in
                [("k8s_namespace_name", &identity.k8s_namespace), ("k8s_pod_name", &identity.k8s_pod)]
            {
                if !value.is_empty() {
                    entry.insert(key.into(), json!(&**value));
                }
            }
            entry.insert("running".into(), json!(number < snapshot.running));
            let mut parts: BTreeMap<_, _> =
                entry.into_iter().map(|(key, value)| (key, Part::Value(value))).collect();
            if let Some(processes) = snapshot.processes_of(number) {
                parts.insert("processes".into(), Part::Processes(processes));
            }
            parts
        })
        .collect();
    BTreeMap::from([
        ("timestamp_seconds", Part::Value(json!(snapshot.finished.unix_seconds()))),
        ("host", Part::Value(Value::Object(host))),
        ("gpus", Part::Value(json!(gpus))),
        ("containers", Part::Containers(containers)),
    ])
}

/// Families by process are in the list of processes.
fn is_by_process(def: &MetricDesc) -> bool {
    def.labels.contains(&"pid")
}

fn insert_gpu_labels(gpus: &mut [Map<String, Value>], snapshot: &Snapshot) {
    for (gpu, identity) in gpus.iter_mut().zip(&snapshot.gpus) {
        for (name, value) in std::iter::zip(MetricScope::Gpu.labels(), identity.labels()) {
            if !value.is_empty() {
                gpu.insert((*name).into(), json!(value));
            }
        }
    }
}

struct ProcessRecord<'a>(&'a ContainerProcess);

impl Serialize for ProcessRecord<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let process = self.0;
        let mut entry = serializer.serialize_map(None)?;
        // absent is not zero
        if let Some(bytes) = process.gpu_bytes {
            entry.serialize_entry("gpu_memory_used_bytes", &bytes)?;
        }
        entry.serialize_entry("name", &*process.comm)?;
        entry.serialize_entry("pid", &process.pid)?;
        if let Some(bytes) = process.pss_bytes {
            entry.serialize_entry("pss_bytes", &bytes)?;
        }
        entry.serialize_entry("role", process.role.label())?;
        entry.serialize_entry("rss_bytes", &process.memory.rss_bytes)?;
        entry.end()
    }
}

fn json_key(name: &'static str) -> &'static str {
    if name == "memledger_container_processes" {
        return "process_count"; // `processes` is the list of them
    }
    let name = name.strip_prefix("memledger_").unwrap_or(name);
    ["container_gpu_", "container_", "host_", "gpu_"]
        .iter()
        .find_map(|prefix| name.strip_prefix(prefix))
        .unwrap_or(name)
}

fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 9e15 { json!(value as i64) } else { json!(value) }
}

fn insert(target: &mut Map<String, Value>, snapshot: &Snapshot, row: &Row) {
    let def = row.family.desc();
    let mut own = Map::new();
    each_label(snapshot, row, |name, value| {
        if !def.scope.labels().contains(&name) {
            own.insert(name.to_owned(), json!(value));
        }
    });
    let key = json_key(def.name).to_owned();
    if def.kind == MetricKind::Info {
        target.insert(key, Value::Object(own));
        return;
    }
    let mut target = target.entry(key).or_insert_with(|| json!({}));
    for part in own.values().filter_map(Value::as_str) {
        if !target.is_object() {
            *target = json!({});
        }
        target = &mut target[part];
    }
    *target = number(row.value);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attribute::Role;
    use crate::catalog::CATALOG;
    use crate::clock::Timestamp;
    use crate::discover::Container;
    use crate::series::Series;

    #[test]
    fn unknown_processes_are_absent_and_none_are_an_empty_list() {
        let process = ContainerProcess {
            container: 2,
            pid: 7,
            comm: "python".into(),
            role: Role::Trainer,
            memory: crate::collect::process::ResidentMemory { rss_bytes: 5, anon_bytes: 4 },
            pss_bytes: None,
            gpu_bytes: Some(3),
        };
        let snapshot = Snapshot {
            containers: ["a", "b", "c", "ended"].map(|name| Container::in_cgroup(name, name)).into(),
            running: 3,
            processes: vec![ContainerProcess { container: 0, ..process.clone() }, process],
            processes_complete: vec![false, true, true],
            ..Snapshot::of_series(Timestamp::now(), Series::default())
        };
        let text: Value = serde_json::from_slice(&containers(&snapshot)).unwrap();
        let list = |number: usize| text["containers"][number].get("processes").cloned();
        let known = json!([{ "pid": 7, "name": "python", "role": "trainer", "rss_bytes": 5, "gpu_memory_used_bytes": 3 }]);
        assert_eq!([0, 1, 2, 3].map(list), [None, Some(json!([])), Some(known), None]);
    }

    #[test]
    fn keys_are_unique() {
        let own: [(MetricScope, &[&str]); 3] = [
            (
                MetricScope::Container,
                &["name", "k8s_namespace_name", "k8s_pod_name", "running", "processes", "gpus"],
            ),
            (MetricScope::Gpu, MetricScope::Gpu.labels()),
            (MetricScope::ContainerGpu, &[]),
        ];
        for (scope, own) in own {
            let families = CATALOG.iter().filter(|def| def.scope == scope);
            let listed = families.filter(|def| !is_by_process(def));
            let mut keys: Vec<_> = listed.map(|def| json_key(def.name)).chain(own.iter().copied()).collect();
            keys.sort_unstable();
            let all = keys.len();
            keys.dedup();
            assert_eq!(keys.len(), all, "{keys:?}");
        }
    }
}
