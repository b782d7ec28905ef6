//! Ends of pods that are no OOM kills.

use super::{EXITS, assert_text, counts, has_ends, on_node};
use crate::support::eventually;
use crate::support::kube::{Namespace, Node};

/// Returns the names of the pods in a namespace.
fn pods(namespace: &Namespace) -> Vec<String> {
    let list = namespace.kubectl(&["get", "pods", "-o", "jsonpath={.items[*].metadata.name}"]);
    list.split_whitespace().map(str::to_owned).collect()
}

/// Waits until memledger shows the main containers of all of these pods.
fn knows(node: &Node, namespace: &Namespace, pods: &[String]) {
    node.eventually("all pods are known", |metrics| {
        for pod in pods {
            metrics.try_value(super::INFO, &namespace.container(pod, "main").labels())?;
        }
        Ok(())
    });
}

/// The kubelet removes their containers 0.2 s after their end.
#[test]
fn of_each_pod_of_a_deleted_deployment() {
    on_node("deployment", |node, namespace| {
        namespace.apply("deployment");
        namespace.kubectl(&["rollout", "status", "deployment/web", "--timeout=60s"]);
        let pods = pods(namespace);
        assert_eq!(pods.len(), 8);
        knows(node, namespace, &pods);
        namespace.kubectl(&["delete", "deployment", "web", "--wait=false"]);
        // sleep ignores SIGTERM as the first process, so each is killed after its grace period
        node.eventually("an end of each", |metrics| {
            let ends =
                pods.iter().map(|pod| counts(metrics, EXITS, namespace.container(pod, "main"), "reason"));
            let ends: Vec<_> = ends.collect();
            let known = |ends: &Vec<(&str, f64)>| matches!(ends[..], [("killed", 1.0)]);
            if ends.iter().all(known) { Ok(()) } else { Err(format!("{ends:?}")) }
        });
    });
}

#[test]
fn of_a_pod_that_is_deleted_by_force() {
    on_node("force", |node, namespace| {
        namespace.apply("two-ways-to-end");
        namespace.runs("two-ways-to-end");
        let [ignores, handles] =
            ["ignores", "handles"].map(|name| namespace.container("two-ways-to-end", name));
        node.eventually("both are known", |metrics| {
            metrics.try_value(super::INFO, &ignores.labels())?;
            metrics.try_value(super::INFO, &handles.labels())
        });
        namespace.kubectl(&["delete", "pod", "two-ways-to-end", "--force", "--grace-period=0"]);
        has_ends(node, handles, &[("completed", 1.0)]);
        node.eventually("the other end", |metrics| match counts(metrics, EXITS, ignores, "reason")[..] {
            [("killed" | "stopped", 1.0)] => Ok(()),
            ref other => Err(format!("{other:?}")),
        });
        let why = node.why(&ignores.path());
        assert_text("why", &why, &["KILLED", "not an OOM kill"], &["OUT OF MEMORY", "memledger did not run"]);
    });
}

/// A pod that is gone has its answer, by its own name too.
#[test]
fn of_a_deleted_pod_that_was_killed_before() {
    on_node("gone", |node, namespace| {
        namespace.apply("main-killed");
        let container = namespace.container("main-killed", "main");
        super::has_kills(node, container, &[("main", 1.0)]);
        has_ends(node, container, &[("oom_container", 1.0)]);
        namespace.kubectl(&["delete", "pod", "main-killed"]);
        eventually("it is gone", || match namespace.pod("main-killed") {
            Err(error) if error.contains("NotFound") => Ok(()),
            other => Err(format!("{other:?}")),
        });
        for name in ["main-killed", "main-killed/main"].map(|name| format!("{}/{name}", namespace.name)) {
            assert_text(&name, &node.why(&name), &["OUT OF MEMORY at its own limit"], &[]);
        }
    });
}
