//! OOM kills in pods: counted once, for the right container, and explained.

use std::path::PathBuf;

use super::{EXITS, KILLS, assert_text, counts, has_ends, has_kills, on_node};
use crate::support::eventually;
use crate::support::kube::{Node, PodContainer, read_template};

/// A pod in which processes are killed, and what is known of one of its containers then.
struct KillCase {
    /// The file in tests/kube/pods, which is also the pod's name.
    pod: &'static str,
    container: &'static str,
    /// Its kills by victim.
    kills: &'static [(&'static str, f64)],
    /// Its ends by reason.
    ends: &'static [(&'static str, f64)],
    /// The reason and the exit code that the kubelet has; `None` of one that runs.
    kubelet: Option<(&'static str, i64)>,
    /// Parts of the answer of `memledger why`.
    why: &'static [&'static str],
    /// Texts that it must not have.
    absent: &'static [&'static str],
}

const OWN_LIMIT: &str = "OUT OF MEMORY at its own limit";
const LIMIT: &str = "the container reached its memory limit of 64.0 MiB";
/// The kernel names the cgroup of a pod with one container, because the kubelet gives it the same limit.
const PARENT: &[&str] = &["a cgroup above it", "limit of its own"];

const MAIN: KillCase = KillCase {
    pod: "main-killed",
    container: "main",
    kills: &[("main", 1.0)],
    ends: &[("oom_container", 1.0)],
    kubelet: Some(("OOMKilled", 137)),
    why: &[OWN_LIMIT, LIMIT, "exit code 137"],
    absent: PARENT,
};

/// A child is killed, and the container runs on.
const CHILD: KillCase = KillCase {
    kills: &[("child", 1.0)],
    ends: &[],
    kubelet: None,
    why: &[OWN_LIMIT, "kept running"],
    ..MAIN
};

fn check(case: &KillCase) {
    on_node(case.pod, |node, namespace| {
        namespace.apply(case.pod);
        let container = namespace.container(case.pod, case.container);
        has_kills(node, container, case.kills);
        has_ends(node, container, case.ends);
        eventually("the kubelet's status", || {
            let status = namespace.status(case.pod, case.container)?;
            let ended = [&status["state"]["terminated"], &status["lastState"]["terminated"]];
            let ended = ended.into_iter().find(|ended| !ended.is_null());
            let known = ended.map(|ended| (ended["reason"].as_str(), ended["exitCode"].as_i64()));
            match (known, case.kubelet) {
                (Some((Some(reason), Some(code))), Some(expected)) if (reason, code) == expected => Ok(()),
                (None, None) if !status["state"]["running"].is_null() => Ok(()),
                _ => Err(format!("{status}")),
            }
        });
        assert_text(case.pod, &node.why(&container.path()), case.why, case.absent);
    });
}

#[test]
fn main_process() {
    check(&MAIN);
}

/// kubectl shows nothing of it: no restart, no reason, no event.
#[test]
fn child_of_a_container_that_runs_on() {
    check(&KillCase { pod: "child-killed", ..CHILD });
}

#[test]
fn child_in_a_pod_with_two_containers() {
    check(&KillCase { pod: "child-killed-in-two", ..CHILD });
}

#[test]
fn child_of_a_container_that_completes_later() {
    const WENT_ON: &str = "a child was killed; the container went on and ended with 0";
    let (ends, kubelet) = (&[("completed", 1.0)], Some(("OOMKilled", 0)));
    check(&KillCase {
        pod: "child-killed-and-completed",
        ends,
        kubelet,
        why: &[OWN_LIMIT, WENT_ON],
        ..CHILD
    });
}

#[test]
fn init_container() {
    check(&KillCase { pod: "init-killed", container: "prepare", ..MAIN });
}

#[test]
fn sidecar() {
    on_node("sidecar", |node, namespace| {
        namespace.apply("sidecar-killed");
        let container = namespace.container("sidecar-killed", "proxy");
        has_kills(node, container, &[("main", 1.0)]);
        has_ends(node, container, &[("oom_container", 1.0)]);
        assert_text("why", &node.why(&container.path()), &[OWN_LIMIT, LIMIT], PARENT);
        let restarts = eventually("its restart", || {
            let count = namespace.status("sidecar-killed", "proxy")?["restartCount"].as_f64();
            count.filter(|count| *count >= 1.0).ok_or_else(|| format!("{count:?}"))
        });
        node.eventually("its restart", |metrics| {
            let own = metrics.try_value("memledger_container_restarts_total", &container.labels())?;
            if own >= restarts { Ok(()) } else { Err(format!("{own} of {restarts}")) }
        });
    });
}

/// Its end cannot be told from one of its first process.
#[test]
fn child_of_a_shell_that_returns_its_status() {
    check(&KillCase { pod: "shell-exits-137", ..MAIN });
}

#[test]
fn child_of_a_shell_that_returns_0() {
    let (ends, kubelet) = (&[("completed", 1.0)], Some(("OOMKilled", 0)));
    check(&KillCase { pod: "shell-exits-0", ends, kubelet, why: &[OWN_LIMIT, "ended with 0"], ..CHILD });
}

#[test]
fn child_of_a_shell_that_returns_1() {
    let (ends, kubelet) = (&[("error", 1.0)], Some(("OOMKilled", 1)));
    let why = &[OWN_LIMIT, "ended with 1, right after"];
    check(&KillCase { pod: "shell-exits-1", ends, kubelet, why, ..CHILD });
}

#[test]
fn exit_code_137_alone_is_no_oom_kill() {
    check(&KillCase {
        pod: "exits-137",
        kills: &[],
        ends: &[("killed", 1.0)],
        kubelet: Some(("Error", 137)),
        why: &["KILLED", "not an OOM kill"],
        absent: &["OUT OF MEMORY"],
        ..MAIN
    });
}

/// The kubelet says OOMKilled of both containers, since a kill was in their pod.
#[test]
fn neighbour_under_the_limit_of_a_pod() {
    on_node("pod-limit", |node, namespace| {
        namespace.apply("pod-limit");
        let [innocent, big] = ["innocent", "big"].map(|name| namespace.container("pod-limit", name));
        has_kills(node, big, &[("main", 1.0)]);
        has_ends(node, big, &[("oom_container", 1.0)]);
        has_ends(node, innocent, &[("completed", 1.0)]);
        has_kills(node, innocent, &[]);
        for (name, code) in [("big", 137), ("innocent", 0)] {
            eventually("the kubelet's status", || {
                let status = namespace.status("pod-limit", name)?;
                let ended = &status["state"]["terminated"];
                let matches = ended["reason"] == "OOMKilled" && ended["exitCode"] == code;
                if matches { Ok(()) } else { Err(format!("{status}")) }
            });
        }
        let why = node.why(&big.path());
        let limit = format!("at the limit of pod {}/pod-limit (all its containers together)", namespace.name);
        assert_text("why big", &why, &["OUT OF MEMORY", &limit, "128.0 MiB"], &["its own limit"]);
        assert_text("why innocent", &node.why(&innocent.path()), &["COMPLETED"], &["OUT OF MEMORY"]);
    });
}

/// A manifest of a pod that the kubelet runs without the API server. Removed when dropped.
struct StaticPod(PathBuf);

impl StaticPod {
    fn create(node: &Node, file: &str) -> Self {
        let path = node.folder().join(format!("manifests/{file}.yaml"));
        std::fs::write(&path, read_template(file)).expect("a manifest");
        Self(path)
    }
}

impl Drop for StaticPod {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The API server has a mirror of it, with the node's name. It is restarted until it is removed.
#[test]
fn static_pod() {
    let Some(node) = Node::shared() else { return };
    let _pod = StaticPod::create(&node, "static");
    let container = PodContainer { namespace: "default", pod: "static-node1", name: "main" };
    node.eventually("a kill for each end that the kubelet has", |metrics| {
        let kills = counts(metrics, KILLS, container, "victim");
        let ends = counts(metrics, EXITS, container, "reason");
        let pod = node.get(&["-n", "default", "pod", "static-node1"])?;
        let status = &pod["status"]["containerStatuses"][0];
        let restarts = status["restartCount"].as_f64().ok_or_else(|| pod["status"].to_string())?;
        // it waits for its next start, or has just ended
        let ended = if status["state"]["running"].is_null() { restarts + 1.0 } else { restarts };
        match (&kills[..], &ends[..]) {
            ([("main", kills)], [("oom_container", ends)]) if [*kills, *ends] == [ended; 2] => Ok(()),
            other => Err(format!("{other:?}, and the kubelet has {status}")),
        }
    });
    assert_text("why", &node.why(&container.path()), &[OWN_LIMIT, LIMIT], PARENT);
}

#[test]
fn crash_loop_counts_each() {
    on_node("crash-loop", |node, namespace| {
        namespace.apply("crash-loop");
        let container = namespace.container("crash-loop", "main");
        has_kills(node, container, &[("main", 3.0)]);
        has_ends(node, container, &[("oom_container", 3.0)]);
    });
}

#[test]
fn pods_of_a_job() {
    on_node("job", |node, namespace| {
        namespace.apply("job");
        let labels = [("k8s_namespace_name", namespace.name.as_str()), ("container_name", "main")];
        node.eventually("a kill in each pod of the job", |metrics| {
            let kills = metrics.all(KILLS, &[labels[0], labels[1], ("victim", "main")]);
            let mut kills: Vec<_> = kills
                .iter()
                .filter(|(.., count)| *count > 0.0)
                .map(|(_, labels, count)| (labels["k8s_pod_name"].as_str(), *count))
                .collect();
            kills.sort_by_key(|(pod, _)| *pod);
            match kills[..] {
                [(first, 1.0), (second, 1.0)] if first != second => Ok(()),
                _ => Err(format!("{kills:?}")),
            }
        });
    });
}

/// A debug container has no limit of its own, and is killed at that of its pod.
#[test]
fn debug_container() {
    on_node("debug", |node, namespace| {
        namespace.apply("steady");
        namespace.runs("steady");
        let image = "--image=registry.example/box:1";
        namespace.kubectl(&[
            "debug",
            "steady",
            image,
            "-c",
            "debugger",
            "--profile=general",
            "--",
            "hog",
            "eat",
        ]);
        let [debugger, main] = ["debugger", "main"].map(|name| namespace.container("steady", name));
        has_kills(node, debugger, &[("main", 1.0)]);
        has_ends(node, debugger, &[("oom_container", 1.0)]);
        has_kills(node, main, &[]);
        assert_text("why", &node.why(&debugger.path()), &["OUT OF MEMORY", "exit code 137"], &[]);
    });
}
