//! What the catalog's families and labels are called in OTLP.
//!
//! The words are those of Prometheus: `memledger_host_memory_total_bytes` is `memledger.host.memory.total` with unit `By`.
//! So a receiver that translates by Prometheus's rules gets the names of `/metrics` back, which a test proves for every
//! series. Attributes that the semantic conventions have are called as there; `hw.id` stands beside `gpu_uuid`.

use std::sync::LazyLock;

use crate::catalog::{CATALOG, Def, Id, Kind};

/// Words before which stands a dot and not an underscore.
const NAMESPACES: [&str; 9] =
    ["memledger", "process", "collector", "host", "container", "gpu", "memory", "oom", "otlp"];

/// Endings of a name that are a unit, and the unit's name in UCUM. They are no part of the name in OTLP.
const UNITS: [(&str, &str); 5] =
    [("_bytes", "By"), ("_seconds", "s"), ("_watts", "W"), ("_celsius", "Cel"), ("_joules", "J")];

/// What is counted, by the last word of the name without `_total`.
const THINGS: [(&str, &str); 24] = [
    ("ratio", "1"), // stays in the name: a unit of 1 adds nothing to it
    ("kills", "{kill}"),
    ("unattributed", "{kill}"),
    ("gaps", "{kill}"),
    ("lines", "{line}"),
    ("exits", "{exit}"),
    ("restarts", "{restart}"),
    ("errors", "{error}"),
    ("faults", "{fault}"),
    ("races", "{reading}"),
    ("replays", "{replay}"),
    ("dropped", "{series}"),
    ("skipped", "{cycle}"),
    ("sent", "{item}"),
    ("lost", "{item}"),
    ("fds", "{file_descriptor}"),
    ("processes", "{process}"),
    ("containers", "{container}"),
    ("rows", "{row}"),
    ("pages", "{page}"),
    ("expected", "{gpu}"),
    ("visible", "{gpu}"),
    ("allocated", "{gpu}"),
    ("refused", "{refusal}"),
];

/// Name and unit of one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    /// With dots.
    pub name: String,
    /// In UCUM; empty for what is no quantity: info, success, exit code.
    pub unit: &'static str,
}

static NAMES: LazyLock<Vec<Name>> = LazyLock::new(|| CATALOG.iter().map(made).collect());

/// Name and unit of a family.
pub fn of(family: Id) -> &'static Name {
    &NAMES[family as usize]
}

fn made(def: &Def) -> Name {
    let counted = match def.kind {
        Kind::Counter => def.name.trim_end_matches("_total"),
        Kind::Gauge | Kind::Info => def.name,
    };
    let measured = UNITS.iter().find_map(|(ending, unit)| Some((counted.strip_suffix(ending)?, *unit)));
    let (words, unit) = measured.unwrap_or_else(|| {
        let last = counted.rsplit('_').next().unwrap_or(counted);
        (counted, THINGS.iter().find(|(thing, _)| *thing == last).map_or("", |(_, unit)| unit))
    });
    Name { name: dotted(words), unit }
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

/// The attribute of a label.
pub fn attribute(label: &str) -> &str {
    match label {
        "container_name" => "container.name",
        "container_id" => "container.id",
        "k8s_namespace_name" => "k8s.namespace.name",
        "k8s_pod_name" => "k8s.pod.name",
        other => other,
    }
}

/// The metric of OpenTelemetry's semantic conventions that means the same, if there is one. Ours keeps its own name,
/// because it is narrower or has other attributes.
pub fn equivalent(family: Id) -> Option<&'static str> {
    Some(match family {
        Id::PROCESS_CPU => "process.cpu.time",
        Id::PROCESS_RESIDENT => "process.memory.usage",
        Id::PROCESS_VIRTUAL => "process.memory.virtual",
        Id::PROCESS_OPEN_FDS => "process.unix.file_descriptor.count",
        Id::HOST_MEMORY_TOTAL => "system.memory.limit",
        Id::HOST_MEMORY_AVAILABLE => "system.memory.linux.available",
        Id::HOST_MEMORY_COMPONENT => "system.memory.usage",
        Id::HOST_SWAP_USED => "system.paging.usage",
        Id::CONTAINER_MEMORY_USAGE => "container.memory.usage",
        Id::CONTAINER_MEMORY_WORKING_SET => "container.memory.working_set",
        Id::CONTAINER_MEMORY_RSS => "container.memory.rss",
        Id::CONTAINER_MEMORY_LIMIT => "k8s.container.memory.limit",
        Id::CONTAINER_RESTARTS => "k8s.container.restart.count",
        Id::GPU_MEMORY_TOTAL => "hw.gpu.memory.limit",
        Id::GPU_MEMORY_USED => "hw.gpu.memory.usage",
        Id::GPU_UTILIZATION => "hw.gpu.utilization",
        Id::GPU_POWER => "hw.power",
        Id::GPU_ENERGY => "hw.energy",
        Id::GPU_TEMPERATURE => "hw.temperature",
        Id::GPU_ECC_ERRORS => "hw.errors",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_dots_between_namespaces_and_units_of_their_own() {
        for (family, name, unit) in [
            (Id::HOST_MEMORY_TOTAL, "memledger.host.memory.total", "By"),
            (Id::CONTAINER_MEMORY_WORKING_SET, "memledger.container.memory.working_set", "By"),
            (Id::CONTAINER_OOM_KILLS, "memledger.container.oom.kills", "{kill}"),
            (Id::CONTAINER_INFO, "memledger.container.info", ""),
            (Id::GPU_UTILIZATION, "memledger.gpu.utilization_ratio", "1"),
            (Id::HOST_PRESSURE, "memledger.host.memory.pressure", "s"),
            (Id::PROCESS_CPU, "process.cpu", "s"),
            (Id::CONTAINERS_SEEN, "memledger.containers", "{container}"),
        ] {
            assert_eq!(of(family), &Name { name: name.to_owned(), unit });
        }
    }

    #[test]
    fn only_what_is_no_quantity_has_no_unit() {
        const NONE: [&str; 4] = ["_info", "_success", "_up", "_exit_code"];
        for (def, name) in std::iter::zip(CATALOG, NAMES.iter()) {
            let is_none = NONE.iter().any(|ending| def.name.ends_with(ending));
            assert_eq!(name.unit.is_empty(), is_none, "{} has unit {:?}", def.name, name.unit);
        }
    }
}
