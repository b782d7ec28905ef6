//! Restarts of containerd, the kubelet and memledger: with no other test beside them.

use super::{HOST_KILLS, INFO, KILLS, assert_text, gpus, has_ends, has_kills, on_node};
use crate::support::kube::{Node, PodContainer};
use crate::support::{eventually, holds_in_time};

/// Waits until memledger has read the runtime as often as it takes to be connected.
fn is_connected(node: &Node) {
    node.eventually("the runtime is connected", |metrics| match metrics.sum("memledger_runtime_up", &[]) {
        up if up >= 1.0 => Ok(()),
        up => Err(format!("{up}")),
    });
}

/// Deletes memledger's pod.
fn delete_memledger(node: &Node) -> Result<String, String> {
    let label = "app.kubernetes.io/name=memledger";
    let node_name = "spec.nodeName=node1";
    node.try_kubectl(&["-n", "memledger", "delete", "pod", "-l", label, "--field-selector", node_name])
}

/// Returns the uid of memledger's pod, and how often its container was started again.
fn restarts(node: &Node) -> Result<(String, u64), String> {
    let pods = node.get(&["pods", "-n", "memledger", "-l", "app.kubernetes.io/name=memledger"])?;
    let pod = &pods["items"][0];
    let restarts = pod["status"]["containerStatuses"][0]["restartCount"].as_u64();
    let uid = pod["metadata"]["uid"].as_str().map(str::to_owned);
    uid.zip(restarts).ok_or_else(|| pod["status"].to_string())
}

/// memledger's pod is deleted, until this is dropped.
struct MemledgerOff<'a>(&'a Node);

impl<'a> MemledgerOff<'a> {
    fn new(node: &'a Node) -> Self {
        Self::select(node, r#""true""#).expect("the DaemonSet is changed");
        Self(node)
    }

    /// No node has this label.
    fn select(node: &Node, value: &str) -> Result<String, String> {
        let selector = format!(r#"{{"nodeSelector": {{"memledger.test/off": {value}}}}}"#);
        let patch = format!(r#"{{"spec": {{"template": {{"spec": {selector}}}}}}}"#);
        node.try_kubectl(&["-n", "memledger", "patch", "daemonset", "memledger", "--patch", &patch])
    }
}

impl Drop for MemledgerOff<'_> {
    fn drop(&mut self) {
        if let Err(error) = Self::select(self.0, "null") {
            eprintln!("memledger is not started again: {error}");
        }
    }
}

/// Gives the tests that come later a memledger that is connected, when a test with a restart of containerd fails.
struct ConnectedAfterFailure<'a>(&'a Node);

impl Drop for ConnectedAfterFailure<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = delete_memledger(self.0);
        }
    }
}

/// Waits until the kills of all containers, those outside, and those without an owner are all of the host. A kill is in a part once it is
/// settled, so this needs some seconds without kills, for which others on this machine may be waited for.
pub(super) fn parts_sum(node: &Node) {
    let mut found = String::new();
    let mut is_sum = || {
        let parts = node.metrics().and_then(|metrics| {
            let total = metrics.try_value(HOST_KILLS, &[])?;
            let parts = metrics.sum(KILLS, &[])
                + metrics.sum("memledger_host_process_oom_kills_total", &[])
                + metrics.try_value("memledger_oom_kills_unattributed_total", &[])?;
            if parts == total { Ok(()) } else { Err(format!("{parts} of {total}")) }
        });
        parts.inspect_err(|error| found.clone_from(error)).is_ok()
    };
    let sums = (0..3).any(|_| holds_in_time(&mut is_sum));
    assert!(sums, "the parts are not the host's total: {found}");
}

/// Its socket is mounted as a file, which is another one after the restart: containers have their short id until one that starts shows that
/// containerd is back. memledger's container is started again then, and what was counted under the short id moves to the name.
#[test]
fn kill_after_a_restart_of_containerd_gets_its_name() {
    on_node("containerd", |node, namespace| {
        is_connected(node);
        let _restored = ConnectedAfterFailure(node);
        node.stop("containerd");
        node.start("containerd", &[]);
        node.eventually(
            "the lost connection",
            |metrics| match metrics.all("memledger_runtime_up", &[])[..] {
                [(.., 0.0)] => Ok(()),
                ref other => Err(format!("{other:?}")),
            },
        );
        // nothing has shown yet that the runtime is back
        eventually("the answer of doctor", || match node.memledger(&["doctor"]).words() {
            words if words.contains("memledger ends by itself once a container has started") => Ok(()),
            words => Err(words), // right after the restart, kubectl exec fails too
        });
        let before = restarts(node).expect("memledger's pod");

        namespace.apply("main-killed");
        let container = namespace.container("main-killed", "main");
        let id = eventually("its end", || {
            let status = namespace.status("main-killed", "main")?;
            let ended = &status["state"]["terminated"];
            let id = ended["containerID"].as_str().and_then(|id| id.strip_prefix("containerd://"));
            id.map(|id| id[..12].to_owned()).ok_or_else(|| format!("{status}"))
        });
        is_connected(node);
        let once = (before.0, before.1 + 1);
        eventually("its container is started again, once", || match restarts(node)? {
            after if after == once => Ok(()),
            after => Err(format!("{after:?}")),
        });
        has_kills(node, container, &[("main", 1.0)]);
        assert_text("why", &node.why(&container.path()), &["OUT OF MEMORY at its own limit"], &[]);
        node.eventually("the time of the kill", |metrics| {
            metrics.try_value("memledger_container_last_oom_kill_timestamp_seconds", &container.labels())
        });
        parts_sum(node);
        // the pod's sandbox is no container of it
        let metrics = node.metrics().expect("metrics");
        let own = [("k8s_namespace_name", namespace.name.as_str())];
        let names: Vec<_> =
            metrics.all(INFO, &own).iter().map(|(_, labels, _)| labels["container_name"].clone()).collect();
        assert_eq!(names, ["main"]);
        for name in ["POD", id.as_str()] {
            let series = metrics
                .series
                .iter()
                .filter(|(_, labels, _)| labels.get("container_name").is_some_and(|own| own == name));
            assert_eq!(series.count(), 0, "{name}");
        }
    });
}

/// Returns the words of `memledger doctor` in its pod while the kubelet, and with it `kubectl exec`, does not respond.
fn doctor_without_kubelet(node: &Node) -> String {
    let label = "app.kubernetes.io/name=memledger";
    let id = "jsonpath={.items[0].status.containerStatuses[0].containerID}";
    let id = node.kubectl(&["-n", "memledger", "get", "pods", "-l", label, "-o", id]);
    let id = id.trim_start_matches("containerd://");
    let exec = ["ctr", "-n", "k8s.io", "task", "exec", "--exec-id", "doctor", id, "/memledger", "doctor"];
    node.run(&exec).words()
}

/// Its containers keep running, and nothing is counted twice.
#[test]
fn restart_of_the_kubelet_loses_nothing() {
    on_node("kubelet", |node, namespace| {
        namespace.apply("child-killed");
        namespace.apply("main-killed");
        let [running, ended] = ["child-killed", "main-killed"].map(|pod| namespace.container(pod, "main"));
        let same = || {
            has_kills(node, running, &[("child", 1.0)]);
            has_ends(node, running, &[]);
            has_kills(node, ended, &[("main", 1.0)]);
            has_ends(node, ended, &[("oom_container", 1.0)]);
        };
        same();
        let id = |of: PodContainer| {
            node.metrics().expect("metrics").all(INFO, &of.labels())[0].1["container_id"].clone()
        };
        let before = id(running);
        node.stop("kubelet");
        let doctor = doctor_without_kubelet(node);
        node.start("kubelet", &[]);
        let advice = "start the kubelet, or set --kubelet.pod-resources";
        assert_text("doctor", &doctor, &["MISSING pod resources", advice], &[]);
        namespace.apply("running");
        namespace.runs("running");
        same();
        assert_eq!(id(running), before);
        let doctor = node.memledger(&["doctor"]).words();
        assert_text("doctor", &doctor, &["ok pod resources"], &["MISSING"]);
        parts_sum(node);
    });
}

/// Neither before it has its pods again, nor while the API server does not respond.
#[test]
fn restart_of_the_kubelet_loses_no_allocation() {
    on_node("gpu-restart", gpus::restart_of_the_kubelet_loses_no_allocation);
}

/// Kills while memledger is down are counted at its next start.
#[test]
fn restart_of_memledger_loses_nothing() {
    on_node("memledger", |node, namespace| {
        namespace.apply("main-killed");
        let before = namespace.container("main-killed", "main");
        has_kills(node, before, &[("main", 1.0)]);
        let off = MemledgerOff::new(node);
        eventually("memledger is down", || match node.metrics() {
            Ok(_) => Err("it responds".to_owned()),
            Err(_) => Ok(()),
        });
        namespace.apply("child-killed");
        eventually("a kill", || {
            let log = node.try_kubectl(&["-n", &namespace.name, "logs", "child-killed"])?;
            if log.contains("-9") { Ok(()) } else { Err(log) }
        });
        drop(off);
        has_kills(node, before, &[("main", 1.0)]);
        has_kills(node, namespace.container("child-killed", "main"), &[("child", 1.0)]);
        parts_sum(node);
    });
}
