//! Memory pressure of the node, which ends pods for several tens of seconds: only with `FULL=1`.

use super::{assert_text, on_node};
use crate::support::eventually;
use crate::support::kube::Node;

/// The kubelet evicts below another threshold, until this is dropped.
struct MemoryPressure<'a>(&'a Node);

impl<'a> MemoryPressure<'a> {
    fn new(node: &'a Node, threshold: &str) -> Self {
        let pressure = Self(node);
        assert!(node.restart("kubelet", &[("KUBE_EVICT", threshold)]), "the kubelet starts");
        pressure
    }
}

impl Drop for MemoryPressure<'_> {
    fn drop(&mut self) {
        if !self.0.restart("kubelet", &[]) {
            eprintln!("the kubelet is not started again");
        }
    }
}

/// The hog is evicted, and memledger is not: its priority class is critical.
#[test]
fn evicts_the_hog_and_not_memledger() {
    on_node("eviction", |node, namespace| {
        let uid =
            |words: &[&str]| node.get(words).map(|pod| pod["metadata"]["uid"].as_str().map(str::to_owned));
        let own = ["-n", "memledger", "get", "pods", "-l", "app.kubernetes.io/name=memledger"];
        let name = node.kubectl(&[&own[..], &["-o", "jsonpath={.items[0].metadata.name}"]].concat());
        let before = uid(&["-n", "memledger", "pod", &name]);
        namespace.apply("evicted");
        namespace.runs("evicted");
        let container = namespace.container("evicted", "main");
        node.eventually("its memory", |metrics| {
            match metrics.try_value("memledger_container_memory_rss_bytes", &container.labels())? {
                bytes if bytes >= 700e6 => Ok(()),
                bytes => Err(format!("{bytes}")),
            }
        });
        // What is available changes by gigabytes with the page cache of this machine. Of all but one GiB the kubelet is always short, and
        // evicts each pod that it may.
        let summary = node.kubelet_summary().expect("the kubelet's statistics");
        let bytes = |field: &str| summary["node"]["memory"][field].as_u64().expect("a number");
        let capacity = bytes("availableBytes") + bytes("workingSetBytes");
        let pressure = MemoryPressure::new(node, &format!("{}Mi", (capacity >> 20) - 1024));
        let evicted = eventually("its eviction", || {
            let pod = namespace.pod("evicted")?;
            if pod["status"]["reason"] == "Evicted" { Ok(pod) } else { Err(format!("{}", pod["status"])) }
        });
        drop(pressure);
        assert_eq!(uid(&["-n", "memledger", "pod", &name]), before, "memledger's pod: {evicted}");
        let why = eventually("its end", || {
            let why = node.why(&container.path());
            if why.contains("KILLED") { Ok(why) } else { Err(why) }
        });
        assert_text(
            "why",
            &why,
            &["not an OOM kill", "an eviction, or a deletion"],
            &["OUT OF MEMORY", "did not run"],
        );
        // else the pods of other tests are not scheduled
        eventually("no memory pressure", || {
            let found = node.get(&["node", "node1"])?;
            if found["spec"]["taints"].is_null() { Ok(()) } else { Err(found.to_string()) }
        });
    });
}
