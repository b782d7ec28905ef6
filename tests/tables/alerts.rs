//! Generates `docs/alerts.md` from the rules and the runbooks. A test compares it; `make golden` writes it.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use serde::Deserialize;

#[derive(Deserialize)]
struct RuleFile {
    groups: Vec<RuleGroup>,
}

#[derive(Deserialize)]
struct RuleGroup {
    name: String,
    rules: Vec<AlertRule>,
}

#[derive(Deserialize)]
struct AlertRule {
    /// Empty for a recorded series.
    #[serde(default)]
    alert: String,
    #[serde(rename = "for")]
    wait: Option<String>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

/// Returns whom an alert addresses.
fn addressee(group: &str, alert: &str) -> &'static str {
    let of_containers =
        ["MemledgerContainer", "MemledgerDataLoader", "MemledgerGpuMemoryHeld", "MemledgerGpuAllocated"];
    match group {
        _ if alert == "MemledgerWatchdog" => "a service that notices its absence",
        _ if of_containers.iter().any(|start| alert.starts_with(start)) => "who runs the container",
        "memledger.itself" => "who runs memledger",
        _ => "who runs the host",
    }
}

/// Returns the first paragraph of a runbook on silencing the alert.
fn silence(alert: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("docs/runbooks/{alert}.md"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let (_, section) =
        text.split_once("## Silence\n\n").unwrap_or_else(|| panic!("{alert} has no part Silence"));
    // all of it: what is said of one severity is wrong for the other
    let paragraph = section.split("\n\n").next().unwrap_or_default().replace('\n', " ");
    paragraph.trim().trim_end_matches('.').replace('|', "\\|")
}

/// Returns the text of `docs/alerts.md`.
pub fn alerts() -> String {
    let rules = include_str!("../../deploy/prometheus/rules/alerts.yml");
    let file: RuleFile = serde_saphyr::from_str(rules).expect("rules");
    let mut text = String::from(
        "# Alerts\n\nGenerated from `deploy/prometheus/rules/alerts.yml` and the runbooks by `make golden`; do not edit.\n\n\
         *critical* pages the person on call: what loses work within minutes, or lost it. *warning* is for working hours, *info* is only \
         displayed. Each name leads to a page with what to look at first and what to do. How to change, route and inhibit them: \
         [dashboards.md](dashboards.md#alerts).\n",
    );
    for (group, title) in
        [("memledger.memory", "RAM"), ("memledger.gpu", "GPUs"), ("memledger.itself", "memledger itself")]
    {
        let _ = write!(
            text,
            "\n## {title}\n\n| alert | fires when | severity | addresses | silence |\n| --- | --- | --- | --- | --- |\n"
        );
        let rules = file.groups.iter().find(|it| it.name == group).map_or(&[][..], |group| &group.rules);
        let mut last = "";
        for rule in rules.iter().filter(|rule| !rule.alert.is_empty()) {
            let wait = rule.wait.as_ref().map_or_else(String::new, |wait| format!(" after {wait}"));
            let (name, silence) = match rule.alert.as_str() {
                again if again == last => ("the same".to_owned(), "as above".to_owned()),
                new => (format!("[{new}](runbooks/{new}.md)"), silence(new)),
            };
            let (summary, severity) = (&rule.annotations["summary"], &rule.labels["severity"]);
            let whom = addressee(group, &rule.alert);
            let _ = writeln!(
                text,
                "| {name} | {} | {severity}{wait} | {whom} | {silence} |",
                summary.trim_end_matches('.')
            );
            last = &rule.alert;
        }
    }
    assert_eq!(text.matches("](runbooks/").count(), runbooks(), "an alert for each runbook");
    text
}

fn runbooks() -> usize {
    std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/runbooks")).expect("a folder").count()
}
