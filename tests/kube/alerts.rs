//! A real Prometheus on the node, configured as docs/kubernetes.md says.

use std::process::Stdio;

use serde_json::{Value, json};

use super::{assert_text, has_kills, on_node};
use crate::prometheus::provided;
use crate::support::kube::Node;
use crate::support::{OwnedChild, eventually};

/// Returns what Kubernetes' discovery of pods finds in a namespace: one target for each port. Debian's Prometheus is built without it.
fn discovered_targets(node: &Node, namespace: &str) -> Value {
    let list = node.get(&["-n", namespace, "pods"]).expect("the pods");
    let mut targets = vec![];
    for pod in list["items"].as_array().expect("pods") {
        let containers = pod["spec"]["containers"].as_array().into_iter().flatten();
        for port in containers.filter_map(|container| container["ports"].as_array()).flatten() {
            let address =
                format!("{}:{}", pod["status"]["podIP"].as_str().expect("an address"), port["containerPort"]);
            targets.push(json!({"targets": [address], "labels": {
                "__meta_kubernetes_namespace": namespace,
                "__meta_kubernetes_pod_name": pod["metadata"]["name"],
                "__meta_kubernetes_pod_node_name": pod["spec"]["nodeName"],
                "__meta_kubernetes_pod_label_app_kubernetes_io_name": pod["metadata"]["labels"]["app.kubernetes.io/name"],
                "__meta_kubernetes_pod_container_port_name": port["name"],
            }}));
        }
    }
    Value::Array(targets)
}

/// Returns the scrape configuration of docs/kubernetes.md, with the targets that it discovers.
fn scrape_configuration(node: &Node) -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/kubernetes.md");
    let document = std::fs::read_to_string(path).expect("docs/kubernetes.md");
    let begin = document.find("scrape_configs:\n").expect("a configuration");
    let text = document[begin..].split("```").next().expect("its end");
    let discovery = "kubernetes_sd_configs: [{role: pod, namespaces: {names: [memledger]}}]";
    assert!(text.contains(discovery), "{text}");
    text.replace(discovery, &format!("static_configs: {}", discovered_targets(node, "memledger")))
}

/// Starts a Prometheus in the node's namespaces.
fn start_prometheus(node: &Node, binary: &str, folder: &std::path::Path) -> OwnedChild {
    let rules = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/prometheus/rules/*.yml");
    let text = format!(
        "global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}\nrule_files: ['{rules}']\n{}",
        scrape_configuration(node)
    );
    let configuration = folder.join("prometheus.yml");
    std::fs::write(&configuration, text).expect("a configuration");
    let flags = [
        format!("--config.file={}", configuration.display()),
        format!("--storage.tsdb.path={}", folder.join("data").display()),
        "--web.listen-address=127.0.0.1:9090".to_owned(),
    ];
    let words: Vec<_> = std::iter::once(binary).chain(flags.iter().map(String::as_str)).collect();
    let log = std::fs::File::create(folder.join("log")).expect("a log");
    let mut command = node.command(&words);
    OwnedChild(command.stdout(Stdio::null()).stderr(log).spawn().expect("node.sh starts"))
}

#[test]
fn killed_container_alerts_and_its_command_explains_it() {
    let Some(binary) = provided("MEMLEDGER_TEST_PROMETHEUS") else { return };
    on_node("alert", |node, namespace| {
        let folder = tempfile::tempdir().expect("a folder");
        let _prometheus = start_prometheus(node, &binary, folder.path());
        namespace.apply("main-killed");
        has_kills(node, namespace.container("main-killed", "main"), &[("main", 1.0)]);
        let alert = eventually("the alert", || {
            let url = "http://127.0.0.1:9090/api/v1/alerts";
            let text = node.run(&["curl", "--silent", "--show-error", "--fail", url]).text()?;
            let response: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
            let alerts = response["data"]["alerts"].as_array().ok_or_else(|| text.clone())?;
            let own = |alert: &&Value| {
                alert["labels"]["alertname"] == "MemledgerContainerOOMKilled"
                    && alert["labels"]["k8s_namespace_name"] == *namespace.name
                    && alert["state"] == "firing"
            };
            let log = || std::fs::read_to_string(folder.path().join("log")).unwrap_or_default();
            alerts.iter().find(own).cloned().ok_or_else(|| format!("{alerts:?}; log: {}", log()))
        });
        let labels = [
            ("k8s_pod_name", "main-killed"),
            ("container_name", "main"),
            ("instance", "node1"),
            ("job", "memledger"),
        ];
        for (name, value) in labels {
            assert_eq!(alert["labels"][name], value, "{alert}");
        }
        let command = alert["annotations"]["command"].as_str().expect("a command");
        let explained = node.run(&["sh", "-c", command]);
        assert_text(command, &explained.words(), &["OUT OF MEMORY at its own limit"], &[]);
    });
}
