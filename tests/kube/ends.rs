//! Ends of pods that are no OOM kills.

use super::{assert_text, has_ends, on_node};
use crate::support::eventually;

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
