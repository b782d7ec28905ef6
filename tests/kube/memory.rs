//! Names, use and limits of pods, against what the API server and the kubelet have.

use serde_json::Value;

use super::{INFO, on_node};
use crate::support::eventually;
use crate::support::kube::Node;

const MIB: f64 = 1_048_576.0;
const LIMIT: &str = "memledger_container_memory_limit_bytes";
/// Difference between two readings at different times that is no difference of the figures.
const TOLERANCE: f64 = MIB;

#[test]
fn names_and_labels_of_a_pod() {
    on_node("names", |node, namespace| {
        namespace.apply("running");
        namespace.runs("running");
        let pod = namespace.pod("running").expect("the pod");
        let uid = pod["metadata"]["uid"].as_str().expect("its uid").to_owned();
        for name in ["main", "other"] {
            let container = namespace.container("running", name);
            let status = namespace.status("running", name).expect("its status");
            let id = status["containerID"]
                .as_str()
                .expect("its id")
                .trim_start_matches("containerd://")
                .to_owned();
            node.eventually(&format!("names of {name}"), |metrics| {
                let labels = container.labels();
                let info = metrics.all(INFO, &labels);
                let own = info.first().ok_or("no info")?.1["container_id"].clone();
                if info.len() != 1 || !id.starts_with(&own) {
                    return Err(format!("{info:?}, and its id is {id}"));
                }
                let qos = if pod["status"]["qosClass"] == "Burstable" { "burstable" } else { "?" };
                let expected = [("k8s_pod_uid", uid.as_str()), ("qos_class", qos), ("label_team", "blue")];
                let found = metrics.all("memledger_container_pod_info", &labels);
                metrics
                    .try_value("memledger_container_pod_info", &[&labels[..], &expected].concat())
                    .map_err(|error| format!("{error}: {found:?}"))
            });
        }
        node.eventually("no sandbox among the containers", |metrics| {
            let own = [("k8s_namespace_name", namespace.name.as_str())];
            match metrics.all(INFO, &own).len() {
                2 => Ok(()),
                count => Err(format!("{count} containers")),
            }
        });
    });
}

/// Returns what the kubelet has of the memory of a container.
fn kubelet_memory(node: &Node, namespace: &str, container: &str) -> Result<Value, String> {
    let summary = node.kubelet_summary()?;
    let pods = summary["pods"].as_array().ok_or("no pods")?;
    let pod = pods.iter().find(|pod| pod["podRef"]["namespace"] == namespace).ok_or("not the pod")?;
    let containers = pod["containers"].as_array().ok_or("no containers")?;
    let container = containers.iter().find(|one| one["name"] == container).ok_or("not the container")?;
    Ok(container["memory"].clone())
}

#[test]
fn use_and_limits_are_those_of_the_kubelet() {
    on_node("use", |node, namespace| {
        namespace.apply("running");
        namespace.runs("running");
        for (name, eaten) in [("main", 40.0), ("other", 10.0)] {
            let container = namespace.container("running", name);
            for (field, family) in [
                ("workingSetBytes", "memledger_container_memory_working_set_bytes"),
                ("rssBytes", "memledger_container_memory_rss_bytes"),
                ("usageBytes", "memledger_container_memory_usage_bytes"),
            ] {
                eventually(&format!("{family} of {name} is {field}"), || {
                    let kubelet = kubelet_memory(node, &namespace.name, name)?;
                    let kubelet = kubelet[field].as_f64().ok_or_else(|| format!("{kubelet}"))?;
                    let own = node.metrics()?.try_value(family, &container.labels())?;
                    let matches = (own - kubelet).abs() <= TOLERANCE && own >= eaten * MIB;
                    if matches { Ok(()) } else { Err(format!("{own} instead of {kubelet}")) }
                });
            }
        }
        let labels = namespace.container("running", "main").labels();
        node.eventually("its limit and request", |metrics| {
            match (
                metrics.try_value(LIMIT, &labels)?,
                metrics.get("memledger_container_memory_request_bytes", &labels),
            ) {
                (limit, request)
                    if limit == 128.0 * MIB && request.is_none_or(|request| request == 20.0 * MIB) =>
                {
                    Ok(())
                }
                other => Err(format!("{other:?}")),
            }
        });
        // no series of a limit where there is none
        let labels = namespace.container("running", "other").labels();
        assert_eq!(node.metrics().expect("metrics").get(LIMIT, &labels), None);
    });
}

#[test]
fn resized_limit_without_a_restart() {
    on_node("resize", |node, namespace| {
        namespace.apply("running");
        namespace.runs("running");
        let container = namespace.container("running", "main");
        let has_limit = |mib: f64| {
            node.eventually(&format!("a limit of {mib} MiB"), |metrics| {
                let limit = metrics.try_value(LIMIT, &container.labels())?;
                let id = metrics.all(INFO, &container.labels())[0].1["container_id"].clone();
                if limit == mib * MIB { Ok(id) } else { Err(format!("{limit}")) }
            })
        };
        let before = has_limit(128.0);
        let patch =
            r#"{"spec": {"containers": [{"name": "main", "resources": {"limits": {"memory": "300Mi"}}}]}}"#;
        namespace.kubectl(&["patch", "pod", "running", "--subresource=resize", "--patch", patch]);
        assert_eq!(has_limit(300.0), before);
        let restarts = namespace.status("running", "main").expect("its status")["restartCount"].as_i64();
        assert_eq!(restarts, Some(0));
    });
}

/// The kernel charges a file in it to the container that wrote it.
#[test]
fn memory_volume_is_its_writers_shared_memory() {
    on_node("volume", |node, namespace| {
        namespace.apply("memory-volume");
        namespace.runs("memory-volume");
        let [main, other] = ["main", "other"].map(|name| namespace.container("memory-volume", name).labels());
        node.eventually("40 MiB of shared memory", |metrics| {
            let shared = |labels: [(&'static str, &str); 3]| {
                let component = [&labels[..], &[("component", "shmem")]].concat();
                metrics.try_value("memledger_container_memory_component_bytes", &component)
            };
            match (shared(main)? / MIB, shared(other)? / MIB) {
                (main, other) if (40.0..41.0).contains(&main) && other < 1.0 => Ok(()),
                found => Err(format!("{found:?}")),
            }
        });
    });
}

/// Returns the memory that the kubelet has of a pod with all that is charged to it.
fn kubelet_pod_usage(node: &Node, namespace: &str) -> Result<f64, String> {
    let summary = node.kubelet_summary()?;
    let pods = summary["pods"].as_array().ok_or("no pods")?;
    let pod = pods.iter().find(|pod| pod["podRef"]["namespace"] == namespace).ok_or("not the pod")?;
    pod["memory"]["usageBytes"].as_f64().ok_or_else(|| format!("{pod}"))
}

/// The file stays, and is charged to the pod alone once the container that wrote it has ended.
#[test]
fn memory_volume_of_an_ended_container_is_its_pods() {
    on_node("pod-use", |node, namespace| {
        namespace.apply("memory-volume");
        namespace.runs("memory-volume");
        // the command may be killed with its container before it returns
        let kill = ["-n", namespace.name.as_str(), "exec", "memory-volume", "-c", "main", "--", "kill", "1"];
        let _ = node.try_kubectl(&kill);
        eventually("its restart", || {
            let status = namespace.status("memory-volume", "main")?;
            if status["restartCount"] == 1 && status["ready"] == true {
                Ok(())
            } else {
                Err(format!("{status}"))
            }
        });
        let pod = [("k8s_namespace_name", namespace.name.as_str()), ("k8s_pod_name", "memory-volume")];
        eventually("the pod's memory", || {
            let kubelet = kubelet_pod_usage(node, &namespace.name)?;
            let metrics = node.metrics()?;
            let usage = metrics.try_value("memledger_pod_memory_usage_bytes", &pod)?;
            let component = |name| {
                let labels = [pod[0], pod[1], ("component", name)];
                metrics.try_value("memledger_pod_memory_component_bytes", &labels)
            };
            let (containers, rest) = (component("containers")?, component("rest")?);
            let limit = metrics.try_value("memledger_pod_memory_limit_bytes", &pod)?;
            let matches = (usage - kubelet).abs() <= TOLERANCE
                && containers + rest == usage
                && rest >= 40.0 * MIB
                && limit == 128.0 * MIB;
            if matches {
                Ok(())
            } else {
                Err(format!("{usage} ({kubelet}) = {containers} + {rest}, limit {limit}"))
            }
        });
        let name = format!("{}/memory-volume", namespace.name);
        eventually("the pod in `ps -p`", || {
            let words = node.memledger(&["ps", "-p", "--json"]).text()?;
            let lines = words.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            let mut pods = lines.filter(|line| line["type"] == "pod");
            let pod = pods.find(|pod| pod["name"] == name).ok_or_else(|| words.clone())?;
            let rest = pod["rest_bytes"].as_f64().ok_or_else(|| pod.to_string())?;
            if rest >= 40.0 * MIB { Ok(()) } else { Err(pod.to_string()) }
        });
    });
}
