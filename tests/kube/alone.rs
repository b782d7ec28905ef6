//! Restarts of containerd, the kubelet and memledger: with no other test beside them.

use super::{HOST_KILLS, INFO, KILLS, has_ends, has_kills, on_node};
use crate::support::eventually;
use crate::support::kube::{Node, PodContainer};

/// Waits until memledger has read the runtime as often as it takes to be connected.
fn is_connected(node: &Node) {
    node.eventually("the runtime is connected", |metrics| match metrics.sum("memledger_runtime_up", &[]) {
        up if up >= 1.0 => Ok(()),
        up => Err(format!("{up}")),
    });
}

/// Deletes memledger's pod, and waits until the next one responds.
fn recreate_memledger(node: &Node) {
    let uid = || {
        let pods = node.get(&["pods", "-n", "memledger", "-l", "app.kubernetes.io/name=memledger"])?;
        let pod = &pods["items"][0];
        let ready = pod["status"]["containerStatuses"][0]["ready"] == true;
        let uid = pod["metadata"]["uid"].as_str().map(str::to_owned).ok_or("no pod")?;
        Ok((uid, ready))
    };
    let before: Result<_, String> = uid();
    let before = before.expect("memledger's pod").0;
    // as docs/kubernetes.md says
    node.kubectl(&[
        "-n",
        "memledger",
        "delete",
        "pod",
        "-l",
        "app.kubernetes.io/name=memledger",
        "--field-selector",
        "spec.nodeName=node1",
    ]);
    eventually("the next pod is ready", || match uid()? {
        (uid, true) if uid != before => Ok(()),
        other => Err(format!("{other:?}")),
    });
    is_connected(node);
}

/// Waits until the kills of all containers, those outside, and those without an owner are all of the host.
pub(super) fn parts_sum(node: &Node) {
    node.eventually("the parts are the host's total", |metrics| {
        let total = metrics.try_value(HOST_KILLS, &[])?;
        let parts = metrics.sum(KILLS, &[])
            + metrics.sum("memledger_host_process_oom_kills_total", &[])
            + metrics.try_value("memledger_oom_kills_unattributed_total", &[])?;
        if parts == total { Ok(()) } else { Err(format!("{parts} of {total}")) }
    });
}

/// Its socket is mounted as a file, which is another one after the restart: containers have their short id until memledger's pod is
/// recreated, and what was counted under it moves to the name then.
#[test]
fn kill_after_a_restart_of_containerd_gets_its_name() {
    on_node("containerd", |node, namespace| {
        let Some(up) = node.metrics().ok().map(|metrics| metrics.sum("memledger_runtime_up", &[])) else {
            panic!("no metrics")
        };
        assert!(up >= 1.0, "{up}");
        node.stop("containerd");
        node.start("containerd", &[]);
        node.eventually(
            "the lost connection",
            |metrics| match metrics.all("memledger_runtime_up", &[])[..] {
                [(.., 0.0)] => Ok(()),
                ref other => Err(format!("{other:?}")),
            },
        );
        let doctor = node.memledger(&["doctor"]).words();
        super::assert_text("doctor", &doctor, &["refused"], &[]);

        namespace.apply("main-killed");
        let container = namespace.container("main-killed", "main");
        let id = eventually("its end", || {
            let status = namespace.status("main-killed", "main")?;
            let ended = &status["state"]["terminated"];
            let id = ended["containerID"].as_str().and_then(|id| id.strip_prefix("containerd://"));
            id.map(|id| id[..12].to_owned()).ok_or_else(|| format!("{status}"))
        });
        node.eventually("the kill under its short id", |metrics| {
            match metrics.sum(KILLS, &[("container_name", &id)]) {
                1.0 => Ok(()),
                kills => Err(format!("{kills}")),
            }
        });

        recreate_memledger(node);
        has_kills(node, container, &[("main", 1.0)]);
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
        node.start("kubelet", &[]);
        namespace.apply("running");
        namespace.runs("running");
        same();
        assert_eq!(id(running), before);
        parts_sum(node);
    });
}

/// Kills while memledger is down are counted at its next start.
#[test]
fn restart_of_memledger_loses_nothing() {
    on_node("memledger", |node, namespace| {
        namespace.apply("main-killed");
        let before = namespace.container("main-killed", "main");
        has_kills(node, before, &[("main", 1.0)]);
        let patch = |selector: &str| {
            let patch = format!(r#"{{"spec": {{"template": {{"spec": {{"nodeSelector": {selector}}}}}}}}}"#);
            node.kubectl(&["-n", "memledger", "patch", "daemonset", "memledger", "--patch", &patch]);
        };
        patch(r#"{"memledger.test/off": "true"}"#);
        eventually("memledger is down", || match node.metrics() {
            Ok(_) => Err("it responds".to_owned()),
            Err(_) => Ok(()),
        });
        namespace.apply("child-killed");
        eventually("a kill", || {
            let log = node.try_kubectl(&["-n", &namespace.name, "logs", "child-killed"])?;
            if log.contains("-9") { Ok(()) } else { Err(log) }
        });
        patch(r#"{"memledger.test/off": null}"#);
        has_kills(node, before, &[("main", 1.0)]);
        has_kills(node, namespace.container("child-killed", "main"), &[("child", 1.0)]);
        parts_sum(node);
    });
}
