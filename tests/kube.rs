//! `make test-kube`: what docs/kubernetes.md promises, on a real node of Kubernetes with memledger from its chart. All tests share that
//! node; each has a namespace of its own. Those that restart what the others use are in [`alone`].

mod advice;
mod alerts;
mod alone;
mod ends;
mod eviction;
mod gpus;
mod kills;
mod last;
mod memory;

use crate::support::Metrics;
use crate::support::kube::{Namespace, Node, PodContainer};
use crate::support::metrics::Labels;

const EXITS: &str = "memledger_container_exits_total";
const KILLS: &str = "memledger_container_oom_kills_total";
const HOST_KILLS: &str = "memledger_host_oom_kills_total";
const INFO: &str = "memledger_container_info";

/// Returns the counts of a container that are not 0, by the value of a label.
fn counts<'a>(metrics: &'a Metrics, family: &str, of: PodContainer, label: &str) -> Vec<(&'a str, f64)> {
    let series = metrics.all(family, &of.labels()).into_iter();
    let value = |labels: &'a Labels| labels.get(label).map_or("", String::as_str);
    series.filter(|(.., count)| *count > 0.0).map(|(_, labels, count)| (value(labels), *count)).collect()
}

/// An error where a container has no counts: none is not 0.
fn is_known(metrics: &Metrics, family: &str, of: PodContainer) -> Result<(), String> {
    let series = metrics.all(family, &of.labels());
    if series.is_empty() { Err(format!("no {family} of {of:?}")) } else { Ok(()) }
}

/// Waits until exactly these kills are counted, by victim.
fn has_kills(node: &Node, of: PodContainer, kills: &[(&str, f64)]) {
    node.eventually(&format!("kills of {of:?}: {kills:?}"), |metrics| {
        is_known(metrics, KILLS, of)?;
        match counts(metrics, KILLS, of, "victim") {
            found if found == kills => Ok(()),
            found => Err(format!("{found:?}")),
        }
    });
}

/// Waits until exactly these ends are counted, by reason.
fn has_ends(node: &Node, of: PodContainer, ends: &[(&str, f64)]) {
    node.eventually(&format!("ends of {of:?}: {ends:?}"), |metrics| {
        is_known(metrics, EXITS, of)?;
        match counts(metrics, EXITS, of, "reason") {
            found if found == ends => Ok(()),
            found => Err(format!("{found:?}")),
        }
    });
}

/// Asserts that a text has all of these parts, and none of the others.
fn assert_text(what: &str, text: &str, parts: &[&str], absent: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{what}: no {part:?} in: {text}");
    }
    for part in absent {
        assert!(!text.contains(part), "{what}: {part:?} in: {text}");
    }
}

/// Runs a test with a namespace on the node, if there is one.
fn on_node(what: &str, test: impl FnOnce(&Node, &Namespace)) {
    let Some(node) = Node::shared() else { return };
    let namespace = node.namespace(what);
    test(&node, &namespace);
}
