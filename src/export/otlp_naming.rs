//! Names of the catalog's families and labels in OTLP.
//!
//! They are derived from the Prometheus names: `memledger_host_memory_total_bytes` becomes `memledger.host.memory.total` with
//! unit `By`. A receiver that translates by Prometheus's rules gets the names of `/metrics` back; a test verifies that for
//! every series. Attributes of the semantic conventions have their names; `hw.id` is added to `gpu_uuid`.

use std::sync::LazyLock;

use crate::catalog::{CATALOG, COUNT_UNITS, FamilyId, MetricDesc, MetricKind, UNITS};

/// Words that are followed by a dot instead of an underscore.
const NAMESPACES: [&str; 9] =
    ["memledger", "process", "collector", "host", "container", "gpu", "memory", "oom", "otlp"];

/// Name and unit of a family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetricName {
    /// With dots.
    pub name: String,
    /// In UCUM; empty for what is no quantity: info, success, exit code, pending.
    pub unit: &'static str,
}

static NAMES: LazyLock<Vec<MetricName>> = LazyLock::new(|| CATALOG.iter().map(derive_name).collect());

/// Returns the name and unit of a family.
pub fn of(family: FamilyId) -> &'static MetricName {
    &NAMES[family as usize]
}

fn derive_name(def: &MetricDesc) -> MetricName {
    let base = match def.kind {
        MetricKind::Counter => def.name.trim_end_matches("_total"),
        MetricKind::Gauge | MetricKind::Info => def.name,
    };
    let with_unit = UNITS.iter().find_map(|(ending, unit)| Some((base.strip_suffix(ending)?, *unit)));
    let (words, unit) = with_unit.unwrap_or_else(|| {
        let last = base.rsplit('_').next().unwrap_or(base);
        (base, COUNT_UNITS.iter().find(|(word, _)| *word == last).map_or("", |(_, unit)| unit))
    });
    MetricName { name: dotted(words), unit }
}

fn dotted(words: &str) -> String {
    let mut name = String::with_capacity(words.len());
    let mut rest = words;
    while let Some((word, later)) = rest.split_once('_')
        && NAMESPACES.contains(&word)
    {
        name.push_str(word);
        name.push('.');
        rest = later;
    }
    name + rest
}

/// Returns the attribute of a label.
pub fn attribute(label: &str) -> &str {
    match label {
        "container_name" => "container.name",
        "container_id" => "container.id",
        "k8s_namespace_name" => "k8s.namespace.name",
        "k8s_pod_name" => "k8s.pod.name",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derives_names_and_units() {
        for (family, name, unit) in [
            (FamilyId::HOST_MEMORY_TOTAL, "memledger.host.memory.total", "By"),
            (FamilyId::CONTAINER_MEMORY_WORKING_SET, "memledger.container.memory.working_set", "By"),
            (FamilyId::CONTAINER_OOM_KILLS, "memledger.container.oom.kills", "{kill}"),
            (FamilyId::CONTAINER_INFO, "memledger.container.info", ""),
            (FamilyId::GPU_UTILIZATION, "memledger.gpu.utilization_ratio", "1"),
            (FamilyId::HOST_PRESSURE_STALLED, "memledger.host.memory.pressure_stalled", "s"),
            (FamilyId::PROCESS_CPU, "process.cpu", "s"),
            (FamilyId::CONTAINERS_SEEN, "memledger.containers", "{container}"),
        ] {
            assert_eq!(of(family), &MetricName { name: name.to_owned(), unit });
        }
    }

    #[test]
    fn only_info_and_status_metrics_have_no_unit() {
        const UNITLESS: [&str; 7] =
            ["_info", "_success", "_up", "_exit_code", "_pending", "_failure", "_at_memory_limit"];
        for (def, name) in std::iter::zip(CATALOG, NAMES.iter()) {
            let is_unitless = UNITLESS.iter().any(|ending| def.name.ends_with(ending));
            assert_eq!(name.unit.is_empty(), is_unitless, "{} has unit {:?}", def.name, name.unit);
        }
    }
}
