//! The shipped files for Prometheus, Alertmanager and Grafana: checked with their own tools, against the catalog, and, with the
//! demo, by sending every query of every dashboard to a real Prometheus and waiting for every alert to fire.
//!
//! The checks of files are Python in `tests/dashboards`: they read JSON, YAML, Markdown and PromQL. There is no Grafana server: none
//! is available where the tests run.

mod alertmanager;
mod demo;

use std::path::Path;
use std::process::Command;

use crate::prometheus::provided;

fn in_repository(path: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path).display().to_string()
}

/// All files of a folder with this ending.
fn files(folder: &str, ending: &str) -> Vec<String> {
    let entries = std::fs::read_dir(in_repository(folder)).expect(folder);
    let mut found: Vec<_> = entries.map(|entry| entry.expect(folder).path().display().to_string()).collect();
    found.retain(|path| path.ends_with(ending));
    found.sort();
    assert!(!found.is_empty(), "no {ending} in {folder}");
    found
}

/// Runs a tool that must succeed; returns its output.
fn run_tool(tool: &str, arguments: &[impl AsRef<std::ffi::OsStr>]) -> String {
    let output =
        Command::new(tool).args(arguments).output().unwrap_or_else(|error| panic!("{tool}: {error}"));
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{tool}: {text}");
    text
}

/// Runs a script of `tests/dashboards`, which must succeed.
fn script(name: &str, arguments: &[&str]) -> Option<String> {
    let python = provided("MEMLEDGER_TEST_PYTHON")?;
    let path = in_repository(&format!("tests/dashboards/{name}"));
    Some(run_tool(&python, &[&["-B", path.as_str()][..], arguments].concat()))
}

#[test]
fn promtool_accepts_the_rules_and_the_configuration() {
    let Some(promtool) = provided("MEMLEDGER_TEST_PROMTOOL") else { return };
    let rules = files("deploy/prometheus/rules", ".yml");
    run_tool(&promtool, &[vec!["check".to_owned(), "rules".to_owned()], rules].concat());
    for config in ["deploy/prometheus/prometheus.yml", "deploy/fleet/prometheus.yml"] {
        run_tool(&promtool, &["check", "config", &in_repository(config)]);
    }
    run_tool(&promtool, &["check", "config", "--agent", &in_repository("deploy/fleet/agent.yml")]);
}

#[test]
fn alerts_pass_promtools_unit_tests() {
    let Some(promtool) = provided("MEMLEDGER_TEST_PROMTOOL") else { return };
    let tests = files("deploy/prometheus/tests", ".yml");
    run_tool(&promtool, &[vec!["test".to_owned(), "rules".to_owned()], tests].concat());
}

#[test]
fn amtool_accepts_the_configuration_and_routes_by_severity() {
    let Some(amtool) = provided("MEMLEDGER_TEST_AMTOOL") else { return };
    let config = in_repository("deploy/prometheus/alertmanager.yml");
    run_tool(&amtool, &["check-config", &config]);
    let file = format!("--config.file={config}");
    for (labels, receiver) in [
        (["severity=critical", "alertname=MemledgerGpuLost"], "critical"),
        (["severity=warning", "alertname=MemledgerStoreDown"], "default"),
        (["severity=info", "alertname=MemledgerGpuMemoryHigh"], "info"),
        (["severity=none", "alertname=MemledgerWatchdog"], "heartbeat"),
    ] {
        let expected = format!("--verify.receivers={receiver}");
        run_tool(&amtool, &["config", "routes", "test", &file, &expected, labels[0], labels[1]]);
    }
}

#[test]
fn dashboards_rules_and_runbooks_match_the_catalog() {
    script("check.py", &[]);
}

#[test]
fn each_mutation_of_them_is_detected() {
    script("mutations.py", &[]);
}

#[test]
fn simulated_days_send_the_expected_notifications() {
    if provided("MEMLEDGER_TEST_PROMTOOL").is_some() {
        script("days.py", &[]);
        script("days.py", &["--mutations"]);
    }
}

#[test]
fn each_panel_of_compare_runs_has_data_in_a_simulated_history() {
    for needed in ["MEMLEDGER_TEST_PROMETHEUS", "MEMLEDGER_TEST_PROMTOOL"] {
        if provided(needed).is_none() {
            return;
        }
    }
    script("backfill.py", &["check"]);
}

/// panels.py must detect a query without data, two series with one legend, and the like.
fn assert_panels_check_finds_mutations(url: &str, since: &str) {
    let Some(python) = provided("MEMLEDGER_TEST_PYTHON") else { return };
    for (file, old, new, expected) in [
        ("why.json", "memledger_container_restarts_total{", "memledger_container_restart_total{", "no data"),
        ("container.json", " {{component}}\"", "\"", "two series have the legend"),
        (
            "overview.json",
            r#"label_values(memledger_build_info{cluster=~\"$cluster\"}, job)"#,
            r#"label_values(memledger{cluster=~\"$cluster\"}, job)"#,
            "no values",
        ),
        (
            "overview.json",
            r#"process_open_fds{cluster=~\"$cluster\", job=~\"$job\", instance=~\"$instance\"} and on"#,
            r#"process_open_fds{cluster=~\"$cluster\", job=~\"$job\", instance=~\"$instance\"} or on"#,
            "is not a memledger",
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("dashboards")).unwrap();
        let text = std::fs::read_to_string(in_repository(&format!("dashboards/{file}"))).unwrap();
        assert!(text.contains(old), "{file} has no {old} any more: choose another mutation");
        std::fs::write(folder.path().join("dashboards").join(file), text.replace(old, new)).unwrap();
        let root = folder.path().display().to_string();
        let check = in_repository("tests/dashboards/panels.py");
        let output = Command::new(&python)
            .args(["-B", &check, url, "--since", since, "--root", &root])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(!output.status.success() && text.contains(expected), "{old} became {new}: {text}");
    }
}
