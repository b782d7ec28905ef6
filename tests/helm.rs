//! The Helm chart and the plain manifests, by the real `helm`, the API's own schemas and promtool; and the rendered pod's
//! container, run by a real engine with just the rights that the chart gives it.
//!
//! The checks of files are Python in `tests/helm`. No cluster is asked: none can be had here.

use std::path::Path;
use std::process::Command;

use crate::prometheus::provided;

/// Runs a script of `tests/helm`, which must be content; returns what it said.
fn script(name: &str, arguments: &[&str]) -> Option<String> {
    let python = provided("MEMLEDGER_TEST_PYTHON")?;
    provided("MEMLEDGER_TEST_HELM")?;
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/helm").join(name);
    let output = Command::new(python).arg("-B").arg(path).args(arguments).output().expect("Python starts");
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{name}: {said}");
    Some(said)
}

#[test]
fn every_case_of_the_chart_is_valid_and_asks_for_no_more_than_it_needs() {
    script("judge.py", &[]);
}

#[test]
fn wrong_values_are_refused_with_a_message_that_says_which() {
    script("refusals.py", &[]);
}

#[test]
fn the_charts_rules_and_dashboards_are_the_files_and_its_targets_are_named_by_node() {
    if provided("MEMLEDGER_TEST_PROMTOOL").is_some() {
        script("monitoring.py", &[]);
    }
}

#[test]
fn a_fault_in_the_chart_is_found() {
    if provided("MEMLEDGER_TEST_PROMTOOL").is_some() {
        script("faults.py", &[]);
    }
}
