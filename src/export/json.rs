//! Renders the snapshot as JSON for `/api/v1/containers`: per container all metrics, and its processes.
//!
//! Keys are the names of families without `memledger_`, `container_` and so on, so that a new family appears automatically;
//! a family with labels of its own becomes nested objects by their values, in the order of the label names. `process_count`
//! is by role, because `processes` is the list.

use serde_json::{Map, Value, json};

use super::prometheus::each_label;
use crate::attribute::ContainerProcess;
use crate::catalog::{MetricDesc, MetricKind, MetricScope};
use crate::series::{NONE, Row};
use crate::snapshot::Snapshot;

/// Renders the host, its GPUs, and its containers with their processes.
pub fn containers(snapshot: &Snapshot) -> Value {
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
    let mut processes = vec![Vec::new(); snapshot.containers.len()];
    for process in &snapshot.processes {
        processes[process.container as usize].push(process_entry(process));
    }
    let containers: Vec<Value> = containers
        .into_iter()
        .zip(processes)
        .enumerate()
        .map(|(number, (mut entry, processes))| {
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
            entry.insert("processes".into(), Value::Array(processes));
            Value::Object(entry)
        })
        .collect();
    json!({
        "timestamp_seconds": snapshot.finished.unix_seconds(),
        "host": host,
        "gpus": gpus,
        "containers": containers,
    })
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

fn process_entry(process: &ContainerProcess) -> Value {
    let mut entry = json!({
        "pid": process.pid,
        "name": &*process.comm,
        "role": process.role.label(),
        "rss_bytes": process.rss_bytes,
    });
    // absent is not zero
    for (key, value) in [("pss_bytes", process.pss_bytes), ("gpu_memory_used_bytes", process.gpu_bytes)] {
        if let Some(value) = value {
            entry[key] = json!(value);
        }
    }
    entry
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
    use crate::catalog::CATALOG;

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
