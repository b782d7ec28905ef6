//! Which GPUs the kubelet gave to which container, from its pod-resources socket (`v1`), which only reads and is optional.
//!
//! Resources of NVIDIA's device plugin and of its MIG strategies are looked at, whose device ids are the driver's own
//! uuids (or its index, if the plugin is set so). A device that is shared in time has `::NUMBER` after its id. Not here:
//! dynamic resource allocation, whose device names only its driver understands.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use prost::Message;

use super::client::{Client, CriError};
use crate::discover::{Identity, Source};
use crate::series::bounded;

/// Pause between two looks.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// The resources that are GPUs of NVIDIA's.
const RESOURCES: &str = "nvidia.com/";

/// What the kubelet gave to each container, by its name.
pub type Given = HashMap<Identity, Arc<[Arc<str>]>>;

#[derive(Clone, PartialEq, Message)]
struct ListRequest {}

#[derive(Clone, PartialEq, Message)]
struct ListResponse {
    #[prost(message, repeated, tag = "1")]
    pods: Vec<PodResources>,
}

#[derive(Clone, PartialEq, Message)]
struct PodResources {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    namespace: String,
    #[prost(message, repeated, tag = "3")]
    containers: Vec<ContainerResources>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerResources {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, repeated, tag = "2")]
    devices: Vec<ContainerDevices>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerDevices {
    #[prost(string, tag = "1")]
    resource_name: String,
    #[prost(string, repeated, tag = "2")]
    device_ids: Vec<String>,
}

/// Asks once.
///
/// # Errors
/// The kubelet does not answer, or memledger may not ask it.
pub async fn look(socket: &Path) -> Result<Given, CriError> {
    let client = Client::connect(socket).await?;
    ask(&client).await
}

async fn ask(client: &Client) -> Result<Given, CriError> {
    let answer: ListResponse = client.ask("/v1.PodResourcesLister/List", ListRequest {}).await?;
    Ok(read(answer))
}

fn read(answer: ListResponse) -> Given {
    let mut given = Given::new();
    for pod in answer.pods {
        for container in &pod.containers {
            let gpus =
                container.devices.iter().filter(|devices| devices.resource_name.starts_with(RESOURCES));
            let ids = gpus.flat_map(|devices| &devices.device_ids);
            let mut ids: Vec<_> =
                ids.map(|id| bounded(id.split_once("::").map_or(id, |(id, _)| id))).collect();
            ids.sort();
            ids.dedup();
            if !ids.is_empty() {
                let identity = Identity {
                    k8s_namespace: bounded(&pod.namespace),
                    k8s_pod: bounded(&pod.name),
                    name: bounded(&container.name),
                };
                given.insert(identity, ids.into());
            }
        }
    }
    given
}

/// Follows the kubelet for ever. While it is away, what it gave is given.
pub async fn follow(socket: PathBuf, source: Arc<Source>) {
    let mut client = None;
    let mut said = false;
    loop {
        if socket.exists() {
            match asked(&mut client, &socket).await {
                Ok(given) => {
                    said = false;
                    let mut state = source.lock();
                    if state.given != given {
                        state.given = given;
                        state.generation += 1;
                    }
                }
                Err(error) => {
                    client = None;
                    if !std::mem::replace(&mut said, true) {
                        tracing::warn!(socket = %socket.display(), %error, "the kubelet does not tell which GPUs it gave to whom; trying again");
                    }
                }
            }
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

async fn asked(client: &mut Option<Client>, socket: &Path) -> Result<Given, CriError> {
    if client.is_none() {
        *client = Some(Client::connect(socket).await?);
    }
    match client {
        Some(client) => ask(client).await,
        None => Ok(Given::new()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_nvidias_devices_count_and_one_that_is_shared_in_time_is_one() {
        let devices = |resource: &str, ids: &[&str]| ContainerDevices {
            resource_name: resource.into(),
            device_ids: ids.iter().map(|id| id.to_string()).collect(),
        };
        let container = |name: &str, devices| ContainerResources { name: name.into(), devices };
        let given = read(ListResponse {
            pods: vec![PodResources {
                name: "train-0".into(),
                namespace: "ml".into(),
                containers: vec![
                    container(
                        "main",
                        vec![
                            devices("nvidia.com/gpu.shared", &["GPU-b::1", "GPU-b::0"]),
                            devices("nvidia.com/mig-1g.5gb", &["MIG-a"]),
                            devices("rdma/hca", &["mlx5_0"]),
                        ],
                    ),
                    container("log", vec![]),
                ],
            }],
        });
        let identity =
            Identity { k8s_namespace: "ml".into(), k8s_pod: "train-0".into(), name: "main".into() };
        let wanted: Arc<[Arc<str>]> = Arc::from(["GPU-b".into(), "MIG-a".into()]);
        assert_eq!(given, Given::from([(identity, wanted)]));
    }
}
