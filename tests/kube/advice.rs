//! What `memledger why` and `memledger doctor` say in the pod, and that their commands work.

use super::{assert_text, has_ends, has_kills, on_node};
use crate::support::kube::Node;

/// People know pods by `kubectl get pods`; nearly all containers are called main.
#[test]
fn why_knows_a_pod_by_its_name() {
    on_node("by-name", |node, namespace| {
        namespace.apply("init-killed");
        let container = namespace.container("init-killed", "prepare");
        has_kills(node, container, &[("main", 1.0)]);
        has_ends(node, container, &[("oom_container", 1.0)]);
        for name in [format!("{}/init-killed", namespace.name), container.path()] {
            let why = node.why(&name);
            assert_text(&name, &why, &["OUT OF MEMORY at its own limit", "prepare"], &["Nothing is known"]);
        }
    });
}

#[test]
fn doctor_finds_the_sources_of_the_chart() {
    let Some(node) = Node::shared() else { return };
    let doctor = node.memledger(&["doctor"]);
    let text = doctor.words();
    assert_text(
        "doctor",
        &text,
        &["syslog(2) instead of /dev/kmsg", "pod resources"],
        &["connection refused"],
    );
}

/// Asks the Service of the chart for its health.
#[test]
fn helm_test_passes() {
    let Some(node) = Node::shared() else { return };
    let tested = node.run(&["helm", "test", "memledger", "-n", "memledger", "--timeout", "60s"]);
    let pod = || node.try_kubectl(&["-n", "memledger", "logs", "memledger-answers"]);
    assert!(tested.succeeded, "{}; its log: {:?}", tested.words(), pod());
}
