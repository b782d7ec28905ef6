//! Pods of a real containerd over CRI: who they are, over their whole life, and how they die.
//!
//! No kubelet runs: the tests make sandboxes and containers as it does, under the cgroups that it would make.

use crate::support::cri::{Containerd, Spec, Wanted};
use crate::support::docker::{assert_no_series_twice, unique};
use crate::support::metrics::Labels;
use crate::support::{Memledger, Metrics};

const INFO: &str = "memledger_container_info";
const USAGE: &str = "memledger_container_memory_usage_bytes";
const UP: &str = "memledger_runtime_up";
const CRI: &[(&str, &str)] = &[("runtime", "cri")];
const SLEEP: &[&str] = &["/busybox/busybox", "sleep", "100000"];

/// memledger that shows the pods of one containerd alone.
fn watch(containerd: &Containerd, namespace: &str, more: &[&str]) -> Memledger {
    let include = format!("--container.include=^{namespace}/");
    let flags = [&containerd.flag(), "--docker.socket=", "--podman.socket=", &include];
    Memledger::start(&[&flags[..], more].concat())
}

fn of<'a>(namespace: &'a str, pod: &'a str, name: &'a str) -> [(&'a str, &'a str); 3] {
    [("k8s_namespace_name", namespace), ("k8s_pod_name", pod), ("container_name", name)]
}

fn labels(metrics: &Metrics, family: &str, labels: &[(&str, &str)]) -> Result<Labels, String> {
    match metrics.all(family, labels)[..] {
        [(_, labels, _)] => Ok(labels.clone()),
        ref other => Err(format!("not one {family} {labels:?}: {other:?}")),
    }
}

#[test]
fn a_pod_is_shown_by_namespace_pod_and_container_and_its_pause_process_is_none() {
    let Some(containerd) = Containerd::start() else { return };
    let team = unique("team");
    let pod =
        containerd.pod(&Wanted { namespace: &team, name: "train-0", qos: "burstable/", ..Wanted::default() });
    let id = containerd.run(&pod, &Spec { name: "main", command: SLEEP, limit: 64 << 20, ..Spec::default() });
    let memledger = watch(&containerd, &team, &[]);
    let me = of(&team, "train-0", "main");
    let metrics = memledger.eventually("the container", |metrics| {
        metrics.ask(USAGE, &me)?;
        Ok(metrics.clone())
    });
    assert_eq!(metrics.value(UP, CRI), 1.0);
    assert_eq!(labels(&metrics, INFO, &me).unwrap()["container_id"], id);
    assert_eq!(metrics.value("memledger_container_memory_limit_bytes", &me), f64::from(64 << 20));
    assert_eq!(metrics.value("memledger_containers", CRI), 1.0, "the pause process is no container");
    assert_no_series_twice(&metrics);
}
