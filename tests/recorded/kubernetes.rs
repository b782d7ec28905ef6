//! The cgroup layouts of a kubelet: systemd and cgroupfs driver, guaranteed, burstable and besteffort pods, and a whole
//! node in a Docker container, as with kind.
//!
//! The names come over CRI from a server with the fixed responses below: a recording has no container runtime.

use memledger::discover::cri::messages::*;

use super::{Host, no_gpu};
use crate::support::Metrics;
use crate::support::grpc::Server;
use crate::support::metrics::Labels;

const PAUSE: &str = "6210c0bf05396716df932f0729df69de0533933e5ad9871fd07b61811c4c28df";
const TRAINER: &str = "0d6e4079e36703ebd37c00722f5891d28b0e2811dc114b129215123adcce3605";
const SIDECAR: &str = "ea7bf4bb723041e7d63fe6c74dc46c048c617eb49a454a1cd6edbf34d05a418e";
const OTHER: &str = "facf8b54e5c0b8c426bb1c4bf5a00abfeaa064dc89ba8298dfa0c083746eee5b";

/// Starts a runtime with the two pods of the recordings.
pub(crate) fn runtime() -> Server {
    let server = Server::new();
    let method = |name: &str| format!("/runtime.v1.RuntimeService/{name}");
    let pod = |id: &str, namespace: &str, name: &str, uid: &str| PodSandbox {
        id: id.into(),
        metadata: Some(PodSandboxMetadata {
            name: name.into(),
            uid: uid.into(),
            namespace: namespace.into(),
        }),
        ..Default::default()
    };
    let other = "e".repeat(64); // its pause process was not recorded
    let pods = [
        pod(PAUSE, "ml", "train-0", "0c7f2b1e-5a0d-4b9e-9a53-3e1f6f0f8a21"),
        pod(&other, "ml", "notebook", "7d1e9c44-12ab-4f2e-8c6e-b1a2c3d4e5f6"),
    ];
    let container = |id: &str, sandbox: &str, name: &str| Container {
        id: id.into(),
        pod_sandbox_id: sandbox.into(),
        metadata: Some(ContainerMetadata { name: name.into(), attempt: 0 }),
        state: ContainerState::Running.into(),
        created_at: 1_700_000_000_000_000_000,
        ..Default::default()
    };
    let containers = vec![
        container(TRAINER, PAUSE, "main"),
        container(SIDECAR, PAUSE, "log"),
        container(OTHER, &other, "main"),
    ];
    let status = ContainerStatus {
        state: ContainerState::Running.into(),
        started_at: 1_700_000_001_000_000_000,
        image: Some(ImageSpec { image: "registry.example/train:1".into(), ..Default::default() }),
        ..Default::default()
    };
    server.respond_with(&method("Version"), &VersionResponse::default());
    server.respond_with(&method("ListPodSandbox"), &ListPodSandboxResponse { items: pods.to_vec() });
    server.respond_with(&method("ListContainers"), &ListContainersResponse { containers });
    let response = ContainerStatusResponse { status: Some(status), ..Default::default() };
    server.respond_with(&method("ContainerStatus"), &response);
    server
}

fn compare(name: &str, containers: usize) -> Metrics {
    let runtime = runtime();
    let flags = [no_gpu(), vec![format!("--cri.endpoint={}", runtime.socket.display())]].concat();
    Metrics::parse(&Host::unpack(name, containers).compare(name, &flags))
}

fn classes(metrics: &Metrics) -> Vec<[String; 2]> {
    let of = |labels: &Labels| ["k8s_pod_name", "qos_class"].map(|label| labels[label].clone());
    let pods = metrics.all("memledger_container_pod_info", &[("container_name", "main")]);
    let mut classes: Vec<_> = pods.iter().map(|(_, labels, _)| of(labels)).collect();
    classes.sort();
    classes
}

#[test]
fn kubelet_with_cgroupfs_driver_and_guaranteed_pod() {
    let metrics = compare("v2-kubelet-cgroupfs", 3);
    assert_eq!(classes(&metrics), [["notebook", "guaranteed"], ["train-0", "burstable"]]);
    let request = [("k8s_pod_name", "notebook"), ("container_name", "main")];
    assert_eq!(metrics.value("memledger_container_memory_request_bytes", &request), f64::from(32 << 20));
}

#[test]
fn pods_in_a_docker_container() {
    let metrics = compare("v2-kind", 4);
    assert_eq!(classes(&metrics), [["notebook", "besteffort"], ["train-0", "burstable"]]);
    let outer = [("container_name", "c0dec0dec0de"), ("runtime", "docker")];
    assert_eq!(metrics.all("memledger_container_info", &outer).len(), 1, "it contains the pods");
}
