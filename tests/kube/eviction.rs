//! Memory pressure of the node, which ends pods for several tens of seconds: only with `FULL=1`.

use super::{assert_text, on_node};
use crate::support::eventually;

/// The hog is evicted, and memledger is not: its priority class is critical.
#[test]
fn evicts_the_hog_and_not_memledger() {
    on_node("eviction", |node, namespace| {
        let uid =
            |words: &[&str]| node.get(words).map(|pod| pod["metadata"]["uid"].as_str().map(str::to_owned));
        let name =
            node.kubectl(&["-n", "memledger", "get", "pods", "-o", "jsonpath={.items[0].metadata.name}"]);
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
        // other processes of this machine need memory too: what is available now, and what the hog has less of it
        let summary = node.kubelet_summary().expect("the kubelet's statistics");
        let available = summary["node"]["memory"]["availableBytes"].as_u64().expect("available memory");
        let threshold = format!("{}Mi", (available >> 20) + 400);
        node.stop("kubelet");
        node.start("kubelet", &[("KUBE_EVICT", &threshold)]);
        let evicted = eventually("its eviction", || {
            let pod = namespace.pod("evicted")?;
            if pod["status"]["reason"] == "Evicted" { Ok(pod) } else { Err(format!("{}", pod["status"])) }
        });
        node.stop("kubelet");
        node.start("kubelet", &[]);
        assert_eq!(uid(&["-n", "memledger", "pod", &name]), before, "memledger's pod: {evicted}");
        let why = eventually("its end", || {
            let why = node.why(&container.path());
            if why.contains("KILLED") { Ok(why) } else { Err(why) }
        });
        assert_text("why", &why, &["not an OOM kill", "Evicted"], &["OUT OF MEMORY", "did not run"]);
    });
}
