//! The generated documents match the tables.

mod alerts;
mod reference_docs;

use memledger::catalog::FamilyId;
use memledger::gpu::device_metrics::{KNOWN_XIDS, XidClass};

use crate::support::golden;

#[test]
fn metrics_md_matches_the_catalog() {
    golden("docs/metrics.md", &reference_docs::metrics());
}

#[test]
fn alerts_md_matches_the_rules_and_runbooks() {
    golden("docs/alerts.md", &alerts::alerts());
}

#[test]
fn config_md_matches_the_settings() {
    golden("docs/config.md", &reference_docs::settings());
}

/// Returns the text of each file below a folder with this ending.
fn read_files(folder: &std::path::Path, ending: &str) -> Vec<String> {
    let paths = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let read = |path: std::path::PathBuf| match path.is_dir() {
        true => read_files(&path, ending),
        false if path.to_string_lossy().ends_with(ending) => {
            vec![std::fs::read_to_string(&path).expect("text")]
        }
        false => vec![],
    };
    paths.flat_map(read).collect()
}

#[test]
fn every_family_is_in_a_test_or_a_golden_file() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let golden = read_files(&root.join("tests/golden"), ".prom");
    let text = [read_files(&root.join("tests"), ".rs"), golden].concat().concat();
    let sources = read_files(&root.join("src"), ".rs");
    let unit_tests: String =
        sources.iter().filter_map(|text| text.split_once("#[cfg(test)]")).map(|(_, tests)| tests).collect();
    let prefixes =
        ["container_memory_", "container_torch_", "container_operation_", "container_", "gpu_", "host_", ""];
    // tests may put a name together from a prefix and the rest, in which the unit may be a part of the prefix
    let is_tested = |name: &str| {
        text.contains(name)
            || prefixes.iter().any(|prefix| {
                let rest = name.strip_prefix("memledger_").and_then(|rest| rest.strip_prefix(prefix));
                rest.is_some_and(|rest| {
                    let stem = rest.strip_suffix("_bytes").unwrap_or(rest);
                    text.contains(&format!("\"{rest}\"")) || text.contains(&format!("\"{stem}\""))
                })
            })
    };
    let has_unit_test = |id: FamilyId| unit_tests.contains(&format!("FamilyId::{id:?}"));
    let untested = FamilyId::all().filter(|(id, desc)| !is_tested(desc.name) && !has_unit_test(*id));
    let untested: Vec<_> = untested.map(|(_, desc)| desc.name).collect();
    assert!(untested.is_empty(), "no test and no golden file has {untested:?}");
}

#[test]
fn page_of_deaths_has_the_texts() {
    let path = "docs/deaths.md";
    let page = std::fs::read_to_string(format!("{}/{path}", env!("CARGO_MANIFEST_DIR"))).expect(path);
    let head = page.split("| text |").next().expect("a head");
    golden(path, &format!("{head}{}", reference_docs::texts()));
}

#[test]
fn runbook_of_xids_has_the_table() {
    let path = "docs/runbooks/MemledgerGpuXid.md";
    let runbook = std::fs::read_to_string(format!("{}/{path}", env!("CARGO_MANIFEST_DIR"))).expect(path);
    let (before, rest) = runbook.split_once("| Xid |").expect("a table");
    let (_, after) = rest.split_once("\n\n").expect("text after the table");
    golden(path, &format!("{before}{}\n{after}", reference_docs::xids()));
}

#[test]
fn rules_of_xids_have_the_severities_of_the_table() {
    let path = format!("{}/deploy/prometheus/rules/alerts.yml", env!("CARGO_MANIFEST_DIR"));
    let rules = std::fs::read_to_string(path).expect("rules");
    let of = |classes: &[XidClass]| {
        let numbers = KNOWN_XIDS.iter().filter(|(_, class, _)| classes.contains(class));
        numbers.map(|(xid, _, _)| xid.to_string()).collect::<Vec<_>>().join("|")
    };
    let critical = format!("{{xid=~\"{}\"}}", of(&[XidClass::Device]));
    let warning = format!("{{xid!~\"{}\"}}", of(&[XidClass::Device, XidClass::Cleanup]));
    for matcher in [critical, warning] {
        let expression =
            format!("time() - last_over_time(memledger_gpu_last_xid_timestamp_seconds{matcher}[10m]) < 600");
        assert!(rules.contains(&expression), "{expression}");
    }
}
