//! The messages of `runtime.v1` (CRI) that memledger uses, with the field numbers of its `api.proto`.
//!
//! Written by hand, and only the fields that are used: protobuf skips unknown fields, so a part of a message is compatible with
//! the whole, and neither a compiler for `.proto` nor a build step is needed. Kubernetes promises not to renumber fields of a
//! released version. A real containerd verifies the numbers (`tests/cri.rs`).
//!
//! Not here: messages that change something. memledger sends none of them.

use std::collections::HashMap;

use prost::Message;

/// Requests the name of the runtime.
#[derive(Clone, PartialEq, Message)]
pub struct VersionRequest {
    /// The client's version: `v1`.
    #[prost(string, tag = "1")]
    pub version: String,
}

/// The name of the runtime.
#[derive(Clone, PartialEq, Message)]
pub struct VersionResponse {
    /// `containerd`, `cri-o`, `docker`.
    #[prost(string, tag = "2")]
    pub runtime_name: String,
    /// Its version.
    #[prost(string, tag = "3")]
    pub runtime_version: String,
}

/// Requests all sandboxes: without a filter.
#[derive(Clone, PartialEq, Message)]
pub struct ListPodSandboxRequest {}

/// All sandboxes.
#[derive(Clone, PartialEq, Message)]
pub struct ListPodSandboxResponse {
    /// In no order.
    #[prost(message, repeated, tag = "1")]
    pub items: Vec<PodSandbox>,
}

/// The pause process of a pod, with the kubelet's description of the pod.
#[derive(Clone, PartialEq, Message)]
pub struct PodSandbox {
    /// An id of the same form as a container's.
    #[prost(string, tag = "1")]
    pub id: String,
    /// Identifies the pod.
    #[prost(message, optional, tag = "2")]
    pub metadata: Option<PodSandboxMetadata>,
    /// Nanoseconds since 1970.
    #[prost(int64, tag = "4")]
    pub created_at: i64,
    /// The pod's labels, and the kubelet's own.
    #[prost(map = "string, string", tag = "5")]
    pub labels: HashMap<String, String>,
    /// The pod's annotations, and the kubelet's own.
    #[prost(map = "string, string", tag = "6")]
    pub annotations: HashMap<String, String>,
}

/// Identifies the pod.
#[derive(Clone, PartialEq, Message)]
pub struct PodSandboxMetadata {
    /// Name of the pod.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Uid of the pod; of a static pod, the hash of its file.
    #[prost(string, tag = "2")]
    pub uid: String,
    /// Namespace of the pod.
    #[prost(string, tag = "3")]
    pub namespace: String,
}

/// Requests all containers: without a filter.
#[derive(Clone, PartialEq, Message)]
pub struct ListContainersRequest {}

/// All containers.
#[derive(Clone, PartialEq, Message)]
pub struct ListContainersResponse {
    /// In no order.
    #[prost(message, repeated, tag = "1")]
    pub containers: Vec<Container>,
}

/// A listed container.
#[derive(Clone, PartialEq, Message)]
pub struct Container {
    /// Full id.
    #[prost(string, tag = "1")]
    pub id: String,
    /// The sandbox that it belongs to.
    #[prost(string, tag = "2")]
    pub pod_sandbox_id: String,
    /// Name in the pod, and attempt number.
    #[prost(message, optional, tag = "3")]
    pub metadata: Option<ContainerMetadata>,
    /// The image that the kubelet requested.
    #[prost(message, optional, tag = "4")]
    pub image: Option<ImageSpec>,
    /// Its state.
    #[prost(enumeration = "ContainerState", tag = "6")]
    pub state: i32,
    /// Nanoseconds since 1970.
    #[prost(int64, tag = "7")]
    pub created_at: i64,
    /// The kubelet's labels.
    #[prost(map = "string, string", tag = "8")]
    pub labels: HashMap<String, String>,
}

/// Name in the pod, and attempt number.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerMetadata {
    /// As in the pod's specification.
    #[prost(string, tag = "1")]
    pub name: String,
    /// 0 for the first container of this name in this pod, incremented with each restart.
    #[prost(uint32, tag = "2")]
    pub attempt: u32,
}

/// An image.
#[derive(Clone, PartialEq, Message)]
pub struct ImageSpec {
    /// A name, or the id that the kubelet resolved it to.
    #[prost(string, tag = "1")]
    pub image: String,
    /// The name in the pod's specification. Runtimes of Kubernetes 1.29 and later.
    #[prost(string, tag = "18")]
    pub user_specified_image: String,
}

/// Life cycle state of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum ContainerState {
    /// Created, not started.
    Created = 0,
    /// It runs.
    Running = 1,
    /// It ran and will not run again: a restart is another container.
    Exited = 2,
    /// The runtime cannot determine it.
    Unknown = 3,
}

/// Requests the status of one container.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerStatusRequest {
    /// Its id.
    #[prost(string, tag = "1")]
    pub container_id: String,
    /// With the runtime's own data: its pid and OCI configuration.
    #[prost(bool, tag = "2")]
    pub verbose: bool,
}

/// One container.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerStatusResponse {
    /// Standard data.
    #[prost(message, optional, tag = "1")]
    pub status: Option<ContainerStatus>,
    /// Data specific to the runtime, as JSON; the key is `info` in containerd and CRI-O.
    #[prost(map = "string, string", tag = "2")]
    pub info: HashMap<String, String>,
}

/// Standard data of one container.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerStatus {
    /// Full id.
    #[prost(string, tag = "1")]
    pub id: String,
    /// Its state.
    #[prost(enumeration = "ContainerState", tag = "3")]
    pub state: i32,
    /// Nanoseconds since 1970; 0 before its start.
    #[prost(int64, tag = "5")]
    pub started_at: i64,
    /// Nanoseconds since 1970; 0 before its end.
    #[prost(int64, tag = "6")]
    pub finished_at: i64,
    /// Its exit code.
    #[prost(int32, tag = "7")]
    pub exit_code: i32,
    /// The image, by name if the runtime knows it.
    #[prost(message, optional, tag = "8")]
    pub image: Option<ImageSpec>,
    /// `Completed`, `Error`, `OOMKilled`.
    #[prost(string, tag = "10")]
    pub reason: String,
    /// What the runtime says about the reason.
    #[prost(string, tag = "11")]
    pub message: String,
    /// The file of its log on the node.
    #[prost(string, tag = "15")]
    pub log_path: String,
    /// Its limits; of runtimes for Kubernetes 1.27 and later.
    #[prost(message, optional, tag = "16")]
    pub resources: Option<ContainerResources>,
}

impl ContainerStatus {
    /// Returns why its start failed; `None` if it did not.
    pub fn start_error(&self) -> Option<String> {
        let is_start = matches!(&*self.reason, "StartError" | "ContainerCannotRun" | "CreateContainerError");
        (is_start && !self.message.is_empty()).then(|| self.message.clone())
    }

    /// Returns the runtime's flag that an OOM kill ended it; `None` if it has no reason.
    pub fn oom_flag(&self) -> Option<bool> {
        (!self.reason.is_empty()).then(|| self.reason == "OOMKilled")
    }

    /// Returns its memory limit in bytes; `None` if it has none, or if it is unknown.
    pub fn memory_limit(&self) -> Option<u64> {
        let limit = self.resources.as_ref()?.linux.as_ref()?.memory_limit_in_bytes;
        u64::try_from(limit).ok().filter(|limit| *limit > 0)
    }
}

/// Limits of a container.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerResources {
    /// On Linux.
    #[prost(message, optional, tag = "1")]
    pub linux: Option<LinuxContainerResources>,
}

/// Limits of a container on Linux.
#[derive(Clone, PartialEq, Message)]
pub struct LinuxContainerResources {
    /// In bytes; 0 without one.
    #[prost(int64, tag = "4")]
    pub memory_limit_in_bytes: i64,
}

/// Subscribes to events from now on.
#[derive(Clone, PartialEq, Message)]
pub struct GetEventsRequest {}

/// An event of a container or a sandbox. Each triggers a list.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerEventResponse {
    /// The containers of its pod, as they were then.
    #[prost(message, repeated, tag = "5")]
    pub containers_statuses: Vec<ContainerStatus>,
}

/// Subscribes to containerd's own events from now on (`containerd.services.events.v1`).
#[derive(Clone, PartialEq, Message)]
pub struct SubscribeRequest {
    /// An event that matches one of them is sent.
    #[prost(string, repeated, tag = "1")]
    pub filters: Vec<String>,
}

/// An event of containerd.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerdEvent {
    /// What happened.
    #[prost(message, optional, tag = "4")]
    pub event: Option<PackedMessage>,
}

/// A message of any type (`google.protobuf.Any`); which one it is decides the filter of the subscription.
#[derive(Clone, PartialEq, Message)]
pub struct PackedMessage {
    /// The message.
    #[prost(bytes = "vec", tag = "2")]
    pub value: Vec<u8>,
}

/// The end of a process that containerd started (`containerd.events.TaskExit`).
#[derive(Clone, PartialEq, Message)]
pub struct TaskExit {
    /// The container, or a pod's sandbox.
    #[prost(string, tag = "1")]
    pub container_id: String,
    /// The same for its first process; else the name of an exec, such as a probe's.
    #[prost(string, tag = "2")]
    pub id: String,
    /// Its exit code.
    #[prost(uint32, tag = "4")]
    pub exit_status: u32,
    /// When it ended.
    #[prost(message, optional, tag = "5")]
    pub exited_at: Option<ProtobufTimestamp>,
}

/// A time (`google.protobuf.Timestamp`).
#[derive(Clone, Copy, PartialEq, Message)]
pub struct ProtobufTimestamp {
    /// Seconds since 1970.
    #[prost(int64, tag = "1")]
    pub seconds: i64,
    /// And nanoseconds.
    #[prost(int32, tag = "2")]
    pub nanos: i32,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By the numbers of the fields in Kubernetes' api.proto.
    #[test]
    fn memory_limit_is_in_the_resources_of_a_status() {
        let limit_of = |limit: &[u8]| {
            let linux = [&[0x08, 0x01, 0x20], limit].concat(); // cpu_period 1, memory_limit_in_bytes
            let resources = [&[0x0a, linux.len() as u8], &linux[..]].concat();
            let status = [&[0x82, 0x01, resources.len() as u8], &resources[..]].concat();
            ContainerStatus::decode(&status[..]).expect("a message").memory_limit()
        };
        assert_eq!(limit_of(&[0x80, 0x80, 0x80, 0x20]), Some(64 << 20));
        assert_eq!(limit_of(&[0x00]), None, "no limit");
        assert_eq!(ContainerStatus::default().memory_limit(), None, "an older runtime");
    }
}
