//! The snapshot as JSON, for `/api/v1/containers`: per container everything that the metrics say, and its processes.
//!
//! Keys are the families' names without `memledger_`, `container_` and so on; a family with one label of its own
//! becomes an object by that label's values. `process_count` is by role, since `processes` is the list. So a new family appears here by itself.

use serde_json::{Map, Value, json};

use super::prometheus::each_label;
use crate::attribute::Attributed;
use crate::catalog::{Kind, Scope};
use crate::series::{NONE, Row};
use crate::snapshot::Snapshot;

/// Everything: the host, its GPUs, and its containers with their processes.
pub fn containers(snapshot: &Snapshot) -> Value {
    let mut host = Map::new();
    let mut gpus = vec![Map::new(); snapshot.gpus.len()];
    let mut containers = vec![Map::new(); snapshot.containers.len()];
    for row in snapshot.series.rows() {
        let def = row.family.def();
        let place = match def.scope {
            Scope::Global if def.name.starts_with("memledger_host_") => &mut host,
            Scope::Global => continue,
            Scope::Gpu => &mut gpus[row.gpu as usize],
            Scope::Container => &mut containers[row.container as usize],
            Scope::ContainerGpu if row.container == NONE || !def.labels.is_empty() => continue, // listed as processes
            Scope::ContainerGpu => {
                let entry = containers[row.container as usize].entry("gpus").or_insert_with(|| json!({}));
                let uuid = snapshot.gpus[row.gpu as usize].key().to_string();
                let Some(by_uuid) = entry.as_object_mut() else { continue };
                match by_uuid.entry(uuid).or_insert_with(|| json!({})) {
                    Value::Object(place) => place,
                    _ => continue,
                }
            }
        };
        enter(place, snapshot, row);
    }
    for (gpu, identity) in gpus.iter_mut().zip(&snapshot.gpus) {
        for (name, value) in std::iter::zip(Scope::Gpu.labels(), identity.labels()) {
            if !value.is_empty() {
                gpu.insert((*name).into(), json!(value));
            }
        }
    }
    let mut processes = vec![Vec::new(); snapshot.containers.len()];
    for process in &snapshot.processes {
        processes[process.container as usize].push(entry_of(process));
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

fn entry_of(process: &Attributed) -> Value {
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

fn short(name: &'static str) -> &'static str {
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

fn enter(place: &mut Map<String, Value>, snapshot: &Snapshot, row: &Row) {
    let def = row.family.def();
    let mut own = Map::new();
    each_label(snapshot, row, |name, value| {
        if !def.scope.labels().contains(&name) {
            own.insert(name.to_owned(), json!(value));
        }
    });
    let key = short(def.name).to_owned();
    if def.kind == Kind::Info {
        place.insert(key, Value::Object(own));
        return;
    }
    match own.values().next().and_then(Value::as_str) {
        Some(part) => {
            let parts = place.entry(key).or_insert_with(|| json!({}));
            parts[part] = number(row.value);
        }
        None => drop(place.insert(key, number(row.value))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::CATALOG;

    #[test]
    fn no_key_hides_another() {
        let own: [(Scope, &[&str]); 3] = [
            (
                Scope::Container,
                &["name", "k8s_namespace_name", "k8s_pod_name", "running", "processes", "gpus"],
            ),
            (Scope::Gpu, Scope::Gpu.labels()),
            (Scope::ContainerGpu, &[]),
        ];
        for (scope, own) in own {
            let families = CATALOG.iter().filter(|def| def.scope == scope);
            let listed = families.filter(|def| scope != Scope::ContainerGpu || def.labels.is_empty());
            let mut keys: Vec<_> = listed.map(|def| short(def.name)).chain(own.iter().copied()).collect();
            keys.sort_unstable();
            let all = keys.len();
            keys.dedup();
            assert_eq!(keys.len(), all, "{keys:?}");
        }
    }
}
