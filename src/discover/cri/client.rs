//! Client for a container runtime's `runtime.v1` API on its Unix socket. All calls are read-only.

use std::path::Path;
use std::time::Duration;

use prost::Message;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstCodec;
use tracing::Instrument;

use super::messages::*;
use crate::discover::RuntimeKind;
use crate::host::bounds::{CRI_EVENT, CRI_RESPONSE, CRI_STATUS};

/// Timeout of one call.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_RESPONSE_BYTES: usize = CRI_RESPONSE.max_bytes;
const MAX_STATUS_BYTES: usize = CRI_STATUS.max_bytes;
const MAX_EVENT_BYTES: usize = CRI_EVENT.max_bytes;

/// Selects the ends of processes among containerd's events, of the containers that the kubelet has it start.
const TASK_EXITS: &str = "namespace==k8s.io,topic==\"/tasks/exit\"";

/// A failed call.
#[derive(Debug, thiserror::Error)]
pub enum CriError {
    /// The path is not valid for a socket.
    #[error("invalid socket path")]
    InvalidPath(#[source] tonic::transport::Error),
    /// The connection failed.
    #[error("connection failed{}", cause(.0))]
    Connect(#[source] tonic::transport::Error),
    /// The runtime returned an error status.
    #[error("{} failed with {:?}: {}", .0, .1.code(), .1.message())]
    Status(&'static str, Box<Status>),
    /// The call timed out.
    #[error("{0} timed out after {1:?}")]
    Timeout(&'static str, Duration),
}

/// Returns the innermost cause: the errors around it have no details.
fn cause(error: &tonic::transport::Error) -> String {
    let first: &dyn std::error::Error = error;
    let innermost = std::iter::successors(first.source(), |error| error.source()).last();
    innermost.map_or_else(String::new, |error| format!(": {error}"))
}

impl CriError {
    /// Returns whether the server does not implement this version of CRI, such as Docker's own containerd.
    pub fn is_unimplemented(&self) -> bool {
        matches!(self, CriError::Status(_, status) if status.code() == Code::Unimplemented)
    }

    /// Returns whether the container no longer exists.
    pub fn is_gone(&self) -> bool {
        matches!(self, CriError::Status(_, status) if status.code() == Code::NotFound)
    }

    /// Returns whether no process listens on the socket.
    pub fn is_refused(&self) -> bool {
        matches!(self, CriError::Connect(error) if cause(error).contains("refused"))
    }

    /// Returns what an operator can do about it.
    pub fn advice(&self, socket: &Path) -> String {
        let path = socket.display();
        match self {
            CriError::InvalidPath(_) => format!("set --cri.endpoint to the path of a socket, not {path}"),
            CriError::Connect(error) if cause(error).contains("ermission denied") => {
                format!("no permission for {path}: run as root or in the socket's group")
            }
            CriError::Connect(_) => format!("no process listens on {path}: start the container runtime, or correct --cri.endpoint"),
            CriError::Status(..) if self.is_unimplemented() => {
                "enable containerd's plugin io.containerd.grpc.v1.cri (disabled_plugins), version 1.6 or later; or set --cri.endpoint= if \
                 there are no pods"
                    .to_owned()
            }
            CriError::Status(..) => "see the log of the container runtime".to_owned(),
            CriError::Timeout(..) => "restart the container runtime".to_owned(),
        }
    }
}

/// A connection to a runtime.
#[derive(Clone, Debug)]
pub struct CriClient {
    grpc: Grpc<Channel>,
}

impl CriClient {
    /// Connects to a Unix socket.
    ///
    /// # Errors
    /// No process listens there, or memledger may not connect.
    pub async fn connect(socket: &Path) -> Result<Self, CriError> {
        let endpoint = format!("unix://{}", socket.display());
        let endpoint = Endpoint::from_shared(endpoint).map_err(CriError::InvalidPath)?;
        let channel = tokio::time::timeout(CALL_TIMEOUT, endpoint.connect()).await;
        let channel =
            channel.map_err(|_| CriError::Timeout("the socket", CALL_TIMEOUT))?.map_err(CriError::Connect)?;
        Ok(Self { grpc: Grpc::new(channel).max_decoding_message_size(MAX_RESPONSE_BYTES) })
    }

    /// Creates a client that connects with its first call.
    #[cfg(test)]
    pub fn unconnected() -> Self {
        Self { grpc: Grpc::new(Endpoint::from_static("unix:///nonexistent").connect_lazy()) }
    }

    /// Queries the name and version of the runtime.
    pub async fn version(&self) -> Result<VersionResponse, CriError> {
        self.call("/runtime.v1.RuntimeService/Version", VersionRequest { version: "v1".into() }).await
    }

    /// Lists all sandboxes.
    pub async fn sandboxes(&self) -> Result<Vec<PodSandbox>, CriError> {
        let method = "/runtime.v1.RuntimeService/ListPodSandbox";
        self.call(method, ListPodSandboxRequest {})
            .await
            .map(|response: ListPodSandboxResponse| response.items)
    }

    /// Lists all containers, including those that ended.
    pub async fn containers(&self) -> Result<Vec<Container>, CriError> {
        let method = "/runtime.v1.RuntimeService/ListContainers";
        let response: ListContainersResponse = self.call(method, ListContainersRequest {}).await?;
        Ok(response.containers)
    }

    /// Queries one container, with this timeout. `verbose`: with its pid and environment.
    pub async fn status(
        &self,
        id: &str,
        verbose: bool,
        timeout: Duration,
    ) -> Result<ContainerStatusResponse, CriError> {
        let request = ContainerStatusRequest { container_id: id.to_owned(), verbose };
        let grpc = self.grpc.clone().max_decoding_message_size(MAX_STATUS_BYTES);
        let client = Self { grpc };
        client.call_with_timeout("/runtime.v1.RuntimeService/ContainerStatus", request, timeout).await
    }

    /// Subscribes to events from now on.
    ///
    /// # Errors
    /// Also where the runtime has no events: CRI-O without `enable_pod_events`.
    pub async fn events(&self) -> Result<Streaming<ContainerEventResponse>, CriError> {
        self.subscribe("/runtime.v1.RuntimeService/GetContainerEvents", GetEventsRequest {}).await
    }

    /// Subscribes to the ends of processes from now on, by containerd's own API on the same socket.
    ///
    /// # Errors
    /// Also where the runtime is not containerd.
    pub async fn task_exits(&self) -> Result<Streaming<ContainerdEvent>, CriError> {
        let request = SubscribeRequest { filters: vec![TASK_EXITS.to_owned()] };
        self.subscribe("/containerd.services.events.v1.Events/Subscribe", request).await
    }

    async fn subscribe<T, R>(&self, method: &'static str, request: T) -> Result<Streaming<R>, CriError>
    where
        T: Message + 'static,
        R: Message + Default + 'static,
    {
        let mut grpc = self.ready(method).await?.max_decoding_message_size(MAX_EVENT_BYTES);
        let path = PathAndQuery::from_static(method);
        let stream = grpc.server_streaming(Request::new(request), path, ProstCodec::default());
        // a server may delay the head of its response until the first event
        let stream = stream.await.map_err(|status| CriError::Status(short(method), Box::new(status)))?;
        Ok(stream.into_inner())
    }

    async fn ready(&self, method: &'static str) -> Result<Grpc<Channel>, CriError> {
        let mut grpc = self.grpc.clone();
        grpc.ready().await.map_err(|error| {
            CriError::Status(short(method), Box::new(Status::unavailable(error.to_string())))
        })?;
        Ok(grpc)
    }

    /// Calls a method.
    ///
    /// # Errors
    /// The call failed or timed out.
    pub async fn call<T, R>(&self, method: &'static str, request: T) -> Result<R, CriError>
    where
        T: Message + 'static,
        R: Message + Default + 'static,
    {
        self.call_with_timeout(method, request, CALL_TIMEOUT).await
    }

    async fn call_with_timeout<T, R>(
        &self,
        method: &'static str,
        request: T,
        timeout: Duration,
    ) -> Result<R, CriError>
    where
        T: Message + 'static,
        R: Message + Default + 'static,
    {
        let response = async {
            let mut grpc = self.ready(method).await?;
            let path = PathAndQuery::from_static(method);
            let response = grpc.unary(Request::new(request), path, ProstCodec::default()).await;
            response
                .map(tonic::Response::into_inner)
                .map_err(|status| CriError::Status(short(method), Box::new(status)))
        };
        let timed_out = CriError::Timeout(short(method), timeout);
        let span = tracing::info_span!("runtime call", runtime = %RuntimeKind::Cri, call = short(method));
        tokio::time::timeout(timeout, response).instrument(span).await.unwrap_or(Err(timed_out))
    }
}

fn short(method: &'static str) -> &'static str {
    method.rsplit('/').next().unwrap_or(method)
}
