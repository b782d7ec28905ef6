//! After all other tests of the tier: every kill of the node was counted once.

use super::{HOST_KILLS, alone};
use crate::support::eventually;
use crate::support::kube::Node;

fn kernel_kills() -> f64 {
    let text = std::fs::read_to_string("/proc/vmstat").expect("/proc/vmstat");
    let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    count.expect("the kernel counts kills").parse().expect("a number")
}

/// Both count the whole machine, also what others kill beside these tests.
#[test]
fn kills_of_the_kernel_are_those_of_memledger() {
    let Some(node) = Node::shared() else { return };
    let recorded = |name: &str| -> f64 {
        let path = node.folder().join(name);
        let text =
            std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        text.trim().parse().expect("a number")
    };
    // memledger began to count between these; they are the same where nothing else was killed then
    let (first, last) = (recorded("kills-before-install"), recorded("kills-after-install"));
    eventually("the kernel's count", || {
        let before = kernel_kills();
        let total = node.metrics()?.try_value(HOST_KILLS, &[])?;
        if kernel_kills() != before {
            return Err("something is being killed".to_owned());
        }
        let expected = before - last..=before - first;
        if expected.contains(&total) {
            Ok(())
        } else {
            Err(format!("{total}, and the kernel has {expected:?}"))
        }
    });
    alone::parts_sum(&node);
}

/// The sandbox of a pod is no container, also where it was started or ended while containerd was restarted.
#[test]
fn no_event_is_of_a_sandbox() {
    let Some(node) = Node::shared() else { return };
    // right after a restart of the kubelet `kubectl exec` fails
    let events = eventually("events", || node.memledger(&["events", "--json", "--limit=0"]).text());
    assert!(events.contains(r#""type":"exit""#), "{events}");
    let own: Vec<_> = events.lines().filter(|line| line.contains(r#""POD""#)).collect();
    assert!(own.is_empty(), "{own:?}");
}
