//! The messages of `runtime.v1` (CRI) that are spoken here, with the field numbers of its `api.proto`.
//!
//! Written by hand, and only what is used: protobuf skips fields that it does not know, so a part of a message is
//! compatible with the whole, and neither a compiler for `.proto` nor a build step is needed. Kubernetes promises not to
//! renumber fields of a released version. What shows that the numbers are right is a real containerd (`tests/cri.rs`).
//!
//! Not here: the messages that change something. memledger sends none of them.

use std::collections::HashMap;

use prost::Message;

/// Asks for the name of the runtime.
#[derive(Clone, PartialEq, Message)]
pub struct VersionRequest {
    /// The version that is spoken: `v1`.
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

/// Asks for all sandboxes: without a filter.
#[derive(Clone, PartialEq, Message)]
pub struct ListPodSandboxRequest {}

/// All sandboxes.
#[derive(Clone, PartialEq, Message)]
pub struct ListPodSandboxResponse {
    /// In no order.
    #[prost(message, repeated, tag = "1")]
    pub items: Vec<PodSandbox>,
}

/// The pause process of a pod, and what the kubelet said of the pod.
#[derive(Clone, PartialEq, Message)]
pub struct PodSandbox {
    /// An id like a container's.
    #[prost(string, tag = "1")]
    pub id: String,
    /// Which pod.
    #[prost(message, optional, tag = "2")]
    pub metadata: Option<PodSandboxMetadata>,
    /// The pod's labels, and the kubelet's own.
    #[prost(map = "string, string", tag = "5")]
    pub labels: HashMap<String, String>,
    /// The pod's annotations, and the kubelet's own.
    #[prost(map = "string, string", tag = "6")]
    pub annotations: HashMap<String, String>,
}

/// Which pod.
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

/// Asks for all containers: without a filter.
#[derive(Clone, PartialEq, Message)]
pub struct ListContainersRequest {}

/// All containers.
#[derive(Clone, PartialEq, Message)]
pub struct ListContainersResponse {
    /// In no order.
    #[prost(message, repeated, tag = "1")]
    pub containers: Vec<Container>,
}

/// A container as the list has it.
#[derive(Clone, PartialEq, Message)]
pub struct Container {
    /// Full id.
    #[prost(string, tag = "1")]
    pub id: String,
    /// The sandbox that it belongs to.
    #[prost(string, tag = "2")]
    pub pod_sandbox_id: String,
    /// Name in the pod, and which attempt.
    #[prost(message, optional, tag = "3")]
    pub metadata: Option<ContainerMetadata>,
    /// The image as the kubelet asked for it.
    #[prost(message, optional, tag = "4")]
    pub image: Option<ImageSpec>,
    /// Whether it runs.
    #[prost(enumeration = "ContainerState", tag = "6")]
    pub state: i32,
    /// Nanoseconds since 1970.
    #[prost(int64, tag = "7")]
    pub created_at: i64,
    /// The kubelet's labels.
    #[prost(map = "string, string", tag = "8")]
    pub labels: HashMap<String, String>,
}

/// Name in the pod, and which attempt.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerMetadata {
    /// As in the pod's specification.
    #[prost(string, tag = "1")]
    pub name: String,
    /// 0 for the first container of this name in this pod, one more with each restart.
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

/// Where a container is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum ContainerState {
    /// Made, not started.
    Created = 0,
    /// It runs.
    Running = 1,
    /// It ran, and never will again: a restart is another container.
    Exited = 2,
    /// The runtime lost sight of it.
    Unknown = 3,
}

/// Asks for one container.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerStatusRequest {
    /// Which one.
    #[prost(string, tag = "1")]
    pub container_id: String,
    /// With the runtime's own view: its pid, and what it was started with.
    #[prost(bool, tag = "2")]
    pub verbose: bool,
}

/// One container.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerStatusResponse {
    /// What every runtime tells.
    #[prost(message, optional, tag = "1")]
    pub status: Option<ContainerStatus>,
    /// What this runtime tells beyond that, as JSON; `info` of containerd and CRI-O alike.
    #[prost(map = "string, string", tag = "2")]
    pub info: HashMap<String, String>,
}

/// What every runtime tells of one container.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerStatus {
    /// Whether it runs.
    #[prost(enumeration = "ContainerState", tag = "3")]
    pub state: i32,
    /// Nanoseconds since 1970; 0 before its start.
    #[prost(int64, tag = "5")]
    pub started_at: i64,
    /// Nanoseconds since 1970; 0 before its end.
    #[prost(int64, tag = "6")]
    pub finished_at: i64,
    /// Of its end.
    #[prost(int32, tag = "7")]
    pub exit_code: i32,
    /// The image, by a name if the runtime knows one.
    #[prost(message, optional, tag = "8")]
    pub image: Option<ImageSpec>,
    /// `Completed`, `Error`, `OOMKilled`.
    #[prost(string, tag = "10")]
    pub reason: String,
}

/// Asks for events from now on.
#[derive(Clone, PartialEq, Message)]
pub struct GetEventsRequest {}

/// That something happened to a container or a sandbox. What it was is asked for.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerEventResponse {}
