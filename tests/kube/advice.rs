//! What `memledger why` and `memledger doctor` say in the pod, and that their commands work.

use regex::Regex;

use super::{assert_text, has_ends, has_kills, on_node};
use crate::support::cgroups::{TestCgroup, new_id, parent};
use crate::support::kube::{Namespace, Node};
use crate::support::oom::hog;
use crate::support::python::Python;
use crate::support::{eventually, eventually_true};

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
        &["syslog(2) instead of /dev/kmsg", "ok pod resources", "ok cri containerd"],
        &["MISSING", "refused"],
    );
}

/// Lets pods reach a pod by the address of its Service, as kube-proxy would, which this node does not have.
fn serve_as(node: &Node, service: &str, pod: &str) {
    let target = format!("{pod}:10853");
    let to_pod =
        ["PREROUTING", "-d", service, "-p", "tcp", "--dport", "10853", "-j", "DNAT", "--to", &target];
    // the answer must come back through the node, although both pods are on one bridge
    let from_node = ["POSTROUTING", "-s", "10.124.0.0/24", "-d", pod, "-j", "MASQUERADE"];
    for rule in [&to_pod[..], &from_node] {
        let added = node.run(&[&["iptables", "-w", "-t", "nat", "-I"], rule].concat());
        assert!(added.succeeded, "{}", added.words());
    }
}

/// Asks the Service of the chart for its health.
#[test]
fn helm_test_passes() {
    let Some(node) = Node::shared() else { return };
    let service = node.get(&["-n", "memledger", "service", "memledger"]).expect("the Service");
    let address = service["spec"]["clusterIP"].as_str().expect("its address");
    serve_as(&node, address, &node.memledger_address().expect("the pod's address"));
    let tested = node.run(&["helm", "test", "memledger", "-n", "memledger", "--timeout", "60s"]);
    let log = || node.try_kubectl(&["-n", "memledger", "logs", "memledger-answers"]);
    assert!(tested.succeeded, "{}; its log: {:?}", tested.words(), log());
}

/// Installs the chart a second time, in the namespace of a test, and returns what Helm printed.
fn install(namespace: &Namespace, level: &str, values: &[&str]) -> String {
    let label = format!("pod-security.kubernetes.io/enforce={level}");
    namespace.node.kubectl(&["label", "namespace", &namespace.name, &label]);
    let chart = concat!(env!("CARGO_MANIFEST_DIR"), "/helm/memledger");
    let mut words = vec![
        "helm",
        "install",
        "other",
        chart,
        "-n",
        &namespace.name,
        "--set",
        "image.registry=registry.example",
    ];
    // of the other one, which has the port and the ledger of this node
    words.extend(["--set", "state.hostPath="]);
    words.extend(values.iter().flat_map(|value| ["--set", *value]));
    let installed = namespace.node.run(&words);
    assert!(installed.succeeded, "{}", installed.words());
    installed.words()
}

/// The table of symptoms in docs/kubernetes.md.
#[test]
fn events_name_what_keeps_the_chart_from_running() {
    for (what, level, value, symptom) in [
        ("level", "baseline", "port=10853", "violates PodSecurity"),
        ("socket", "privileged", "runtime.socket=/run/other/containerd.sock", "hostPath type check failed"),
        ("class", "privileged", "nvidia.runtimeClassName=nvidia", "RuntimeClass"),
    ] {
        on_node(what, |node, namespace| {
            install(namespace, level, &[value]);
            eventually(symptom, || {
                let events = node.try_kubectl(&[
                    "-n",
                    &namespace.name,
                    "get",
                    "events",
                    "-o",
                    "jsonpath={.items[*].message}",
                ])?;
                if events.contains(symptom) { Ok(()) } else { Err(events) }
            });
        });
    }
}

/// Else it is the first that a node without memory evicts, again after each start (`kube::eviction`).
#[test]
fn memledger_is_critical_to_its_node() {
    let Some(node) = Node::shared() else { return };
    let pods =
        node.get(&["-n", "memledger", "pods", "-l", "app.kubernetes.io/name=memledger"]).expect("its pod");
    let spec = &pods["items"][0]["spec"];
    assert_eq!(spec["priorityClassName"], "system-node-critical");
    let resources = &spec["containers"][0]["resources"];
    assert_eq!(resources["requests"]["memory"], resources["limits"]["memory"], "{resources}");
}

/// `--previous` has no log of a container that is not restarted, and nearly all containers are called main.
#[test]
fn commands_of_an_answer_work() {
    on_node("commands", |node, namespace| {
        let command = Regex::new(r"kubectl (logs -n \S+ \S+ -c \S+|get events -n \S+ --field-selector \S+)");
        let command = command.expect("a pattern");
        for (pod, reason) in [("exits-137", "killed"), ("exits-3", "error")] {
            namespace.apply(pod);
            let container = namespace.container(pod, "main");
            has_ends(node, container, &[(reason, 1.0)]);
            let why = node.why(&container.path());
            let commands: Vec<_> = command.find_iter(&why).map(|found| found.as_str()).collect();
            assert!(!commands.is_empty(), "{why}");
            for command in commands {
                let output = node.run(&["sh", "-c", command]);
                assert!(output.succeeded, "{command}: {}", output.words());
            }
            assert_text("why", &why, &[], &["memledger why main "]);
        }
        let container = namespace.container("exits-3", "main");
        let why = node.memledger(&["why", &container.path(), "--logs"]).words();
        let mount = "settings: {container.logs: labelled}";
        assert_text("why --logs", &why, &["could not be read", mount], &["--logs looks there"]);
    });
}

#[test]
fn doctor_does_not_ask_for_what_a_pod_has_by_other_ways() {
    let Some(node) = Node::shared() else { return };
    let text = node.memledger(&["doctor"]).words();
    // the runtime of the kubelet has the names, and the device is missing in the container only
    let wanted = ["/dev/kmsg is missing in this container", "not needed here docker, podman"];
    assert_text("doctor", &text, &wanted, &["no socket", "is missing on this host"]);
}

/// Kills a process in a container that nothing names, as one of an engine without a socket here. Returns the short id.
fn kill_in_unknown_container(hog: &str) -> String {
    let id = new_id();
    let cgroup = TestCgroup::at(&format!("{}/docker/{id}", parent()), &id);
    cgroup.limit(16 << 20);
    let mut process = Python::command(&cgroup, &[hog, "eat"]);
    eventually_true("its end", || process.has_ended());
    cgroup.name().to_owned()
}

/// Its kills are known since its start, so none of unknown containers is its own.
#[test]
fn why_of_a_container_lists_no_kills_of_others() {
    let Some(hog) = hog() else { return };
    let hog = hog.display().to_string();
    on_node("lists", |node, namespace| {
        let before = kill_in_unknown_container(&hog);
        namespace.apply("steady");
        namespace.runs("steady");
        let container = namespace.container("steady", "main");
        node.eventually("it is known", |metrics| metrics.try_value(super::INFO, &container.labels()));
        let during = kill_in_unknown_container(&hog);
        eventually("both in the answer for a container that is not known", || {
            let why = node.memledger(&["why", "nobody", "--all"]).words();
            if why.contains(&before) && why.contains(&during) { Ok(()) } else { Err(why) }
        });
        let listed = "OOM kills whose container is not known";
        assert_text("why", &node.why(&container.path()), &[], &[listed]);
        // of a pod that is gone, kills in other pods that are gone may be its own
        namespace.kubectl(&["delete", "pod", "steady"]);
        has_ends(node, container, &[("killed", 1.0)]);
        let after = kill_in_unknown_container(&hog);
        eventually("it in the answer for a container that is not known", || {
            let why = node.memledger(&["why", "nobody", "--all"]).words();
            if why.contains(&after) { Ok(()) } else { Err(why) }
        });
        let why = node.memledger(&["why", &container.path(), "--all"]).words();
        assert_text("why", &why, &["KILLED"], &[&before, &during, &after]);
    });
}
