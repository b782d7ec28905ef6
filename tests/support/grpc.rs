//! A gRPC server with responses set by the test, in place of runtimes that cannot run here: CRI-O, a kubelet.
//!
//! It implements HTTP/2 directly, so that a response is any bytes, such as recorded ones.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use prost::Message;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tonic::codegen::{Bytes, http};

/// Response to one method.
#[derive(Clone)]
pub enum Response {
    /// One message.
    Message(Vec<u8>),
    /// A stream with an empty message now, and one for each call of [`Server::send_event`].
    Stream,
    /// A status, such as 12, UNIMPLEMENTED.
    Status(u32),
    /// No response, until the client cancels.
    Never,
}

/// A request with an id in its first field.
#[derive(Clone, PartialEq, Message)]
struct RequestWithId {
    #[prost(string, tag = "1")]
    id: String,
}

struct Shared {
    responses: Mutex<HashMap<String, Response>>,
    /// By method and id.
    responses_by_id: Mutex<HashMap<(String, String), Response>>,
    calls: Mutex<Vec<String>>,
    events: watch::Sender<u64>,
}

/// The server, with its own socket.
pub struct Server {
    _folder: tempfile::TempDir,
    tokio: Option<tokio::runtime::Runtime>,
    pub socket: PathBuf,
    shared: Arc<Shared>,
}

impl Server {
    /// Starts a server that responds to every method with UNIMPLEMENTED until a response is set.
    pub fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("mlt-grpc-").tempdir().expect("a folder");
        let socket = folder.path().join("s.sock");
        let tokio = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let tokio = tokio.expect("a runtime");
        let shared = Arc::new(Shared {
            responses: Mutex::default(),
            responses_by_id: Mutex::default(),
            calls: Mutex::default(),
            events: watch::Sender::new(0),
        });
        let guard = tokio.enter();
        let listener = UnixListener::bind(&socket).expect("a socket");
        drop(guard);
        let theirs = Arc::clone(&shared);
        tokio.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, Arc::clone(&theirs)));
            }
        });
        Self { _folder: folder, tokio: Some(tokio), socket, shared }
    }

    /// Sets the response to a method, such as `/runtime.v1.RuntimeService/Version`.
    pub fn set_response(&self, method: &str, response: Response) {
        self.shared.responses.lock().expect("no holder panics").insert(method.to_owned(), response);
    }

    /// Sets the response to a method for requests with this id; `None` removes it.
    pub fn set_response_for(&self, method: &str, id: &str, response: Option<Response>) {
        let mut responses = self.shared.responses_by_id.lock().expect("no holder panics");
        let key = (method.to_owned(), id.to_owned());
        match response {
            Some(response) => drop(responses.insert(key, response)),
            None => drop(responses.remove(&key)),
        }
    }

    /// Sets a message as the response to a method.
    pub fn respond_with(&self, method: &str, message: &impl Message) {
        self.set_response(method, Response::Message(message.encode_to_vec()));
    }

    /// Returns the number of calls of a method.
    pub fn call_count(&self, method: &str) -> usize {
        self.shared.calls.lock().expect("no holder panics").iter().filter(|calls| *calls == method).count()
    }

    /// Sends a message on every stream.
    pub fn send_event(&self) {
        self.shared.events.send_modify(|count| *count += 1);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(tokio) = self.tokio.take() {
            tokio.shutdown_background();
        }
    }
}

async fn serve(stream: UnixStream, shared: Arc<Shared>) {
    let Ok(mut connection) = h2::server::handshake(stream).await else { return };
    while let Some(Ok((request, respond))) = connection.accept().await {
        tokio::spawn(reply(request, respond, Arc::clone(&shared)));
    }
}

async fn reply(
    request: http::Request<h2::RecvStream>,
    mut respond: h2::server::SendResponse<Bytes>,
    shared: Arc<Shared>,
) -> Result<(), h2::Error> {
    let method = request.uri().path().to_owned();
    let (mut body, mut request_bytes) = (request.into_body(), vec![]);
    while let Some(chunk) = body.data().await {
        let chunk = chunk?;
        let _ = body.flow_control().release_capacity(chunk.len());
        request_bytes.extend_from_slice(&chunk);
    }
    shared.calls.lock().expect("no holder panics").push(method.clone());
    let id =
        request_bytes.get(5..).and_then(|message| RequestWithId::decode(message).ok()).unwrap_or_default().id;
    let response_by_id =
        shared.responses_by_id.lock().expect("no holder panics").get(&(method.clone(), id)).cloned();
    let response =
        response_by_id.or_else(|| shared.responses.lock().expect("no holder panics").get(&method).cloned());
    if let Some(Response::Never) = response {
        std::future::poll_fn(|context| respond.poll_reset(context)).await?; // until the client cancels
        return Ok(());
    }
    let head = http::Response::builder().header("content-type", "application/grpc");
    let status = |code: u32| {
        let mut trailers = http::HeaderMap::new();
        trailers.insert("grpc-status", code.into());
        trailers
    };
    let mut stream = respond.send_response(head.body(()).expect("a head"), false)?;
    match response.unwrap_or(Response::Status(12)) {
        Response::Status(code) => return stream.send_trailers(status(code)),
        Response::Never => return Ok(()),
        Response::Message(message) => stream.send_data(frame(&message), false)?,
        Response::Stream => {
            let mut events = shared.events.subscribe();
            loop {
                stream.send_data(frame(&[]), false)?;
                if events.changed().await.is_err() {
                    break;
                }
            }
        }
    }
    stream.send_trailers(status(0))
}

/// Frames a message for gRPC: uncompressed, its length, its bytes.
fn frame(message: &[u8]) -> Bytes {
    let length = u32::try_from(message.len()).expect("a short message");
    [&[0], &length.to_be_bytes()[..], message].concat().into()
}
