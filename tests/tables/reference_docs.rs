//! Generates `docs/metrics.md` and `docs/config.md` from the tables. A test compares them; `make golden` writes them.

use std::fmt::Write;

use memledger::catalog::{FamilyId, MetricKind, MetricScope};
use memledger::config::SETTINGS;
use memledger::export::otlp_naming;
use memledger::gpu::device_metrics::{KNOWN_XIDS, XidClass};

/// Returns the text of `docs/metrics.md`.
pub fn metrics() -> String {
    let mut text = String::from(
        "# Metrics\n\nGenerated from `src/catalog.rs` by `make golden`; do not edit.\n\n\
         Names and labels are a contract: see the *Metrics* parts of [CHANGELOG.md](../CHANGELOG.md). All sizes are in \
         bytes, all times in seconds. A missing series means *does not exist* or *unreadable*; it is never 0 \
         instead. *info* families are gauges with value 1. *max* is the maximum number of series of a family on one host; \
         excess series are dropped and counted in `memledger_series_dropped_total`.\n\n\
         Over OTLP a family has another name and a separate unit (in UCUM); these names are experimental. *like* is \
         the metric of OpenTelemetry's semantic conventions with the same meaning and other attributes; see \
         [otlp.md](otlp.md).\n\n\
         Join families of one container `on (instance, k8s_namespace_name, k8s_pod_name, container_name)`.\n",
    );
    let sections = [
        (MetricScope::Global, "Exporter and host"),
        (MetricScope::Container, "Containers"),
        (MetricScope::Gpu, "GPUs"),
        (MetricScope::ContainerGpu, "Containers on GPUs"),
    ];
    for (scope, title) in sections {
        let _ = write!(text, "\n## {title}\n\n");
        if !scope.labels().is_empty() {
            let labels: Vec<_> = scope.labels().iter().map(|label| format!("`{label}`")).collect();
            let _ = write!(text, "Labels of all of them, omitted where empty: {}.\n\n", labels.join(", "));
        }
        text.push_str(
            "| family | type | labels | max | meaning | in OTLP |\n| --- | --- | --- | --- | --- | --- |\n",
        );
        for (id, def) in FamilyId::all().filter(|(_, def)| def.scope == scope) {
            let kind = match def.kind {
                MetricKind::Gauge => "gauge",
                MetricKind::Counter => "counter",
                MetricKind::Info => "info",
            };
            let labels = def.labels.join(", ");
            let hidden = match def.hidden {
                "" => String::new(),
                why => format!("Not on a dashboard: {why}."),
            };
            let texts = [def.help, def.details, &hidden].into_iter().filter(|text| !text.is_empty());
            let meaning = texts.collect::<Vec<_>>().join(" ");
            let otlp = in_otlp(id);
            let _ = writeln!(
                text,
                "| `{}` | {kind} | {labels} | {} | {} | {otlp} |",
                def.name, def.max_series, meaning
            );
        }
    }
    text
}

/// Returns name and unit of a family in OTLP, and the equivalent metric of the semantic conventions.
fn in_otlp(family: FamilyId) -> String {
    let name = otlp_naming::of(family);
    let unit = if name.unit.is_empty() { String::new() } else { format!(" in `{}`", name.unit) };
    let like = match family.desc().like {
        "" => String::new(),
        like => format!(", like `{like}`"),
    };
    format!("`{}`{unit}{like}", name.name)
}

/// Returns the table of Xids in `docs/runbooks/MemledgerGpuXid.md`.
pub fn xids() -> String {
    let mut text = String::from("| Xid | alert | meaning |\n| --- | --- | --- |\n");
    for (xid, class, meaning) in KNOWN_XIDS {
        let alert = match class {
            XidClass::Device => "critical",
            XidClass::Application | XidClass::Handled => "warning",
            XidClass::Cleanup => "none",
        };
        let _ = writeln!(text, "| {xid} | {alert} | {meaning} |");
    }
    text
}

/// Returns the table of the texts that `why --logs` knows.
pub fn texts() -> String {
    let mut text = String::from("| text | what it is of | program |\n| --- | --- | --- |\n");
    for (parts, kind, seen) in memledger::parse::log_error::known_texts() {
        let parts: Vec<String> = parts.iter().map(|part| format!("`{}`", part.trim())).collect();
        let _ = writeln!(text, "| {} | {kind} | {seen} |", parts.join(" ... "));
    }
    text
}

/// Returns the text of `docs/config.md`.
pub fn settings() -> String {
    let mut text = String::from(
        "# Settings\n\nGenerated from `src/config/` by `make golden`; do not edit.\n\n\
         All are optional. Each can be set as a flag, as an environment variable, or in a YAML file \
         (`--config.file` or `MEMLEDGER_CONFIG_FILE`) whose keys are the flags' names, with dots or nested; a flag overrides \
         the environment, the environment overrides the file. Unknown keys and invalid values are rejected at start, \
         with file and line. A switch is turned off by `--no-NAME` or `--NAME=false`. Settings marked \
         *repeats* take a list in the file, or commas in one text, and can be repeated as a flag; in a list a comma is \
         part of the value.\n\n\
         ```yaml\nweb:\n  listen-address: [\"127.0.0.1:10853\"]\ncontainer.include: \"^piper\"\n```\n\n\
         | flag | variable | default | takes | meaning |\n| --- | --- | --- | --- | --- |\n",
    );
    for setting in SETTINGS.iter() {
        let repeats = if setting.repeats { ", repeats" } else { "" };
        let default = match setting.default {
            [] => String::new(),
            list if setting.repeats => format!("`[{}]`", list.join(", ")),
            one => format!("`{}`", one.join("")),
        };
        let takes = &setting.takes;
        let _ = writeln!(
            text,
            "| `--{}` | `{}` | {default} | {takes}{repeats} | {} |",
            setting.key,
            setting.variable(),
            setting.help
        );
    }
    text
}
