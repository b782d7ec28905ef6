//! `docs/metrics.md` and `docs/config.md`, from the tables. A test compares; `make golden` writes them anew.

use std::fmt::Write;

use crate::catalog::{Id, Kind, Scope};
use crate::config::{file, table::SETTINGS};
use crate::export::otlp::names;

/// The text of `docs/metrics.md`.
pub fn metrics() -> String {
    let mut text = String::from(
        "# Metrics\n\nGenerated from `src/catalog.rs` by `make golden`; do not edit.\n\n\
         Names and labels are a contract: see the *Metrics* parts of [CHANGELOG.md](../CHANGELOG.md). All sizes are in \
         bytes, all times in seconds. A series that is missing means *not there* or *cannot be read*; it is never 0 \
         instead. *info* families are gauges with value 1. *max* is the most series that a family may have on one host; \
         what is over it is dropped and counted in `memledger_series_dropped_total`.\n\n\
         Over OTLP a family has another name, and its unit (in UCUM) apart; these names are experimental. *like* names \
         the metric of OpenTelemetry's semantic conventions that means the same, with other attributes; see \
         [otlp.md](otlp.md).\n\n\
         Join families of one container `on (instance, k8s_namespace_name, k8s_pod_name, container_name)`.\n",
    );
    let sections = [
        (Scope::Global, "Exporter and host"),
        (Scope::Container, "Containers"),
        (Scope::Gpu, "GPUs"),
        (Scope::ContainerGpu, "Containers on GPUs"),
    ];
    for (scope, title) in sections {
        let _ = write!(text, "\n## {title}\n\n");
        if !scope.labels().is_empty() {
            let labels: Vec<_> = scope.labels().iter().map(|label| format!("`{label}`")).collect();
            let _ = write!(text, "Labels of all of them, left out where empty: {}.\n\n", labels.join(", "));
        }
        text.push_str(
            "| family | type | labels | max | meaning | in OTLP |\n| --- | --- | --- | --- | --- | --- |\n",
        );
        for (id, def) in Id::all().filter(|(_, def)| def.scope == scope) {
            let kind = match def.kind {
                Kind::Gauge => "gauge",
                Kind::Counter => "counter",
                Kind::Info => "info",
            };
            let labels = def.labels.join(", ");
            let otlp = in_otlp(id);
            let _ = writeln!(
                text,
                "| `{}` | {kind} | {labels} | {} | {} | {otlp} |",
                def.name, def.max_series, def.help
            );
        }
    }
    text
}

/// Name and unit of a family in OTLP, and what it is like there.
fn in_otlp(family: Id) -> String {
    let name = names::of(family);
    let unit = if name.unit.is_empty() { String::new() } else { format!(" in `{}`", name.unit) };
    let like = names::equivalent(family).map(|like| format!(", like `{like}`")).unwrap_or_default();
    format!("`{}`{unit}{like}", name.name)
}

/// The text of `docs/config.md`.
pub fn settings() -> String {
    let mut text = String::from(
        "# Settings\n\nGenerated from `src/config/table.rs` by `make golden`; do not edit.\n\n\
         memledger needs none of them. Each can be given as a flag, as an environment variable, or in a YAML file \
         (`--config.file` or `MEMLEDGER_CONFIG_FILE`) whose keys are the flags' names, with dots or nested; a flag wins \
         over the environment, the environment over the file. Unknown keys and unusable values are refused at start, \
         with file and line. A flag that is a switch is turned off by `--no-NAME` or `--NAME=false`. Settings marked \
         *repeats* take a list in the file, commas in the environment, and may be given again as a flag.\n\n\
         ```yaml\nweb:\n  listen-address: [\"127.0.0.1:10853\"]\ncontainer.include: \"^piper\"\n```\n\n\
         | flag | variable | default | takes | meaning |\n| --- | --- | --- | --- | --- |\n",
    );
    for setting in SETTINGS {
        let repeats = if setting.repeats { ", repeats" } else { "" };
        let default = match setting.default {
            [] => String::new(),
            _ => format!("`{}`", file::example(setting).replace('"', "")),
        };
        let takes = setting.kind.describe();
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
