//! Questions to a container runtime over `runtime.v1`, on its Unix socket. All of them only read.

use std::path::Path;
use std::time::Duration;

use prost::Message;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstCodec;

use super::messages::*;

/// Time for one whole answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// The longest answer, as the kubelet has it: two thousand containers with their annotations.
const LONGEST_ANSWER: usize = 16 << 20;

/// A question that was not answered.
#[derive(Debug, thiserror::Error)]
pub enum CriError {
    /// The socket cannot be used as a path of one.
    #[error("no socket can have this path")]
    Path(#[source] tonic::transport::Error),
    /// Nobody answers there.
    #[error("no connection{}", cause(.0))]
    Connect(#[source] tonic::transport::Error),
    /// The runtime refused.
    #[error("{} answered {:?}: {}", .0, .1.code(), .1.message())]
    Refused(&'static str, Box<Status>),
    /// The runtime did not answer.
    #[error("{0} was not answered within {1:?}")]
    Silent(&'static str, Duration),
}

/// The innermost reason: the errors around it say nothing.
fn cause(error: &tonic::transport::Error) -> String {
    let first: &dyn std::error::Error = error;
    let innermost = std::iter::successors(first.source(), |error| error.source()).last();
    innermost.map_or_else(String::new, |error| format!(": {error}"))
}

impl CriError {
    /// What listens there is no container runtime for pods, or not of this version: Docker's own containerd, say.
    pub fn is_no_cri(&self) -> bool {
        matches!(self, CriError::Refused(_, status) if status.code() == Code::Unimplemented)
    }

    /// The container is not there any more.
    pub fn is_gone(&self) -> bool {
        matches!(self, CriError::Refused(_, status) if status.code() == Code::NotFound)
    }

    /// What a person can do about it.
    pub fn advice(&self, socket: &Path) -> String {
        let place = socket.display();
        match self {
            CriError::Path(_) => format!("set --cri.endpoint to the path of a socket, not {place}"),
            CriError::Connect(error) if cause(error).contains("ermission denied") => {
                format!("no permission for {place}: run as root or in the socket's group")
            }
            CriError::Connect(_) => format!("nobody listens on {place}"),
            CriError::Refused(..) if self.is_no_cri() => {
                "enable containerd's plugin io.containerd.grpc.v1.cri (disabled_plugins), version 1.6 or later; or set --cri.endpoint= if \
                 there are no pods"
                    .to_owned()
            }
            CriError::Refused(..) => "look at the runtime's own log".to_owned(),
            CriError::Silent(..) => "restart the container runtime".to_owned(),
        }
    }
}

/// A connection.
#[derive(Clone, Debug)]
pub struct Client {
    grpc: Grpc<Channel>,
}

impl Client {
    /// Connects to a Unix socket.
    ///
    /// # Errors
    /// Nobody listens there, or memledger may not connect.
    pub async fn connect(socket: &Path) -> Result<Self, CriError> {
        let endpoint = format!("unix://{}", socket.display());
        let endpoint = Endpoint::from_shared(endpoint).map_err(CriError::Path)?;
        let channel = tokio::time::timeout(ANSWER_WITHIN, endpoint.connect()).await;
        let channel =
            channel.map_err(|_| CriError::Silent("the socket", ANSWER_WITHIN))?.map_err(CriError::Connect)?;
        Ok(Self { grpc: Grpc::new(channel).max_decoding_message_size(LONGEST_ANSWER) })
    }

    /// Which runtime it is.
    pub async fn version(&self) -> Result<VersionResponse, CriError> {
        self.ask("/runtime.v1.RuntimeService/Version", VersionRequest { version: "v1".into() }).await
    }

    /// All sandboxes.
    pub async fn sandboxes(&self) -> Result<Vec<PodSandbox>, CriError> {
        let method = "/runtime.v1.RuntimeService/ListPodSandbox";
        self.ask(method, ListPodSandboxRequest {}).await.map(|answer: ListPodSandboxResponse| answer.items)
    }

    /// All containers, those that ended included.
    pub async fn containers(&self) -> Result<Vec<Container>, CriError> {
        let method = "/runtime.v1.RuntimeService/ListContainers";
        let answer: ListContainersResponse = self.ask(method, ListContainersRequest {}).await?;
        Ok(answer.containers)
    }

    /// One container, answered for in this time. `verbose`: with its pid and environment.
    pub async fn status(
        &self,
        id: &str,
        verbose: bool,
        within: Duration,
    ) -> Result<ContainerStatusResponse, CriError> {
        let question = ContainerStatusRequest { container_id: id.to_owned(), verbose };
        self.ask_within("/runtime.v1.RuntimeService/ContainerStatus", question, within).await
    }

    /// A message for everything that happens from now on.
    ///
    /// # Errors
    /// Also where the runtime has no events: containerd before 1.7, CRI-O without `enable_pod_events`.
    pub async fn events(&self) -> Result<Streaming<ContainerEventResponse>, CriError> {
        const METHOD: &str = "/runtime.v1.RuntimeService/GetContainerEvents";
        let mut grpc = self.ready(METHOD).await?;
        let path = PathAndQuery::from_static(METHOD);
        let stream = grpc.server_streaming(Request::new(GetEventsRequest {}), path, ProstCodec::default());
        // a server may send the head of its answer with the first event
        let stream =
            stream.await.map_err(|status| CriError::Refused("GetContainerEvents", Box::new(status)))?;
        Ok(stream.into_inner())
    }

    async fn ready(&self, method: &'static str) -> Result<Grpc<Channel>, CriError> {
        let mut grpc = self.grpc.clone();
        grpc.ready().await.map_err(|error| {
            CriError::Refused(short(method), Box::new(Status::unavailable(error.to_string())))
        })?;
        Ok(grpc)
    }

    /// Any question.
    ///
    /// # Errors
    /// It was not answered.
    pub async fn ask<Q, A>(&self, method: &'static str, question: Q) -> Result<A, CriError>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        self.ask_within(method, question, ANSWER_WITHIN).await
    }

    async fn ask_within<Q, A>(
        &self,
        method: &'static str,
        question: Q,
        within: Duration,
    ) -> Result<A, CriError>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let answer = async {
            let mut grpc = self.ready(method).await?;
            let path = PathAndQuery::from_static(method);
            let answer = grpc.unary(Request::new(question), path, ProstCodec::default()).await;
            answer
                .map(tonic::Response::into_inner)
                .map_err(|status| CriError::Refused(short(method), Box::new(status)))
        };
        let silent = CriError::Silent(short(method), within);
        tokio::time::timeout(within, answer).await.unwrap_or(Err(silent))
    }
}

fn short(method: &'static str) -> &'static str {
    method.rsplit('/').next().unwrap_or(method)
}
