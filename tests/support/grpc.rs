//! A gRPC server that answers what a test writes down, where the real one cannot run: CRI-O, a kubelet.
//!
//! It speaks HTTP/2 itself, so that an answer is bytes, as a recording has them, and may be anything.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use prost::Message;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tonic::codegen::{Bytes, http};

/// What it answers to one method.
#[derive(Clone)]
pub enum Answer {
    /// One message.
    Message(Vec<u8>),
    /// An empty message now, and one more each time that [`Server::ring`] is called.
    Bell,
    /// A status, such as 12, UNIMPLEMENTED.
    Status(u32),
    /// Nothing, for ever.
    Silence,
}

/// A question about one thing: its id is the first field.
#[derive(Clone, PartialEq, Message)]
struct About {
    #[prost(string, tag = "1")]
    id: String,
}

struct Shared {
    answers: Mutex<HashMap<String, Answer>>,
    /// By method and id.
    answers_about: Mutex<HashMap<(String, String), Answer>>,
    asked: Mutex<Vec<String>>,
    bell: watch::Sender<u64>,
}

/// The server, on a socket of its own.
pub struct Server {
    _folder: tempfile::TempDir,
    tokio: Option<tokio::runtime::Runtime>,
    pub socket: PathBuf,
    shared: Arc<Shared>,
}

impl Server {
    /// One that answers every method with UNIMPLEMENTED, until told otherwise.
    pub fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("mlt-grpc-").tempdir().expect("a folder");
        let socket = folder.path().join("s.sock");
        let tokio = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let tokio = tokio.expect("a runtime");
        let shared = Arc::new(Shared {
            answers: Mutex::default(),
            answers_about: Mutex::default(),
            asked: Mutex::default(),
            bell: watch::Sender::new(0),
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

    /// From now on this is the answer to a method, such as `/runtime.v1.RuntimeService/Version`.
    pub fn answer(&self, method: &str, answer: Answer) {
        self.shared.answers.lock().expect("no holder panics").insert(method.to_owned(), answer);
    }

    /// From now on this is the answer to a method where it is asked about this id; `None`: what it answers about all.
    pub fn answer_about(&self, method: &str, id: &str, answer: Option<Answer>) {
        let mut answers = self.shared.answers_about.lock().expect("no holder panics");
        let key = (method.to_owned(), id.to_owned());
        match answer {
            Some(answer) => drop(answers.insert(key, answer)),
            None => drop(answers.remove(&key)),
        }
    }

    /// The same with a message.
    pub fn tell(&self, method: &str, message: &impl Message) {
        self.answer(method, Answer::Message(message.encode_to_vec()));
    }

    /// How often a method was asked for.
    pub fn asked(&self, method: &str) -> usize {
        self.shared.asked.lock().expect("no holder panics").iter().filter(|asked| *asked == method).count()
    }

    /// Sends a message to everyone who waits for one.
    pub fn ring(&self) {
        self.shared.bell.send_modify(|rung| *rung += 1);
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
    let (mut body, mut question) = (request.into_body(), vec![]);
    while let Some(chunk) = body.data().await {
        let chunk = chunk?;
        let _ = body.flow_control().release_capacity(chunk.len());
        question.extend_from_slice(&chunk);
    }
    shared.asked.lock().expect("no holder panics").push(method.clone());
    let about = question.get(5..).and_then(|message| About::decode(message).ok()).unwrap_or_default().id;
    let particular =
        shared.answers_about.lock().expect("no holder panics").get(&(method.clone(), about)).cloned();
    let answer =
        particular.or_else(|| shared.answers.lock().expect("no holder panics").get(&method).cloned());
    if let Some(Answer::Silence) = answer {
        std::future::poll_fn(|context| respond.poll_reset(context)).await?; // until the client gives up
        return Ok(());
    }
    let head = http::Response::builder().header("content-type", "application/grpc");
    let status = |code: u32| {
        let mut trailers = http::HeaderMap::new();
        trailers.insert("grpc-status", code.into());
        trailers
    };
    let mut stream = respond.send_response(head.body(()).expect("a head"), false)?;
    match answer.unwrap_or(Answer::Status(12)) {
        Answer::Status(code) => return stream.send_trailers(status(code)),
        Answer::Silence => return Ok(()),
        Answer::Message(message) => stream.send_data(frame(&message), false)?,
        Answer::Bell => {
            let mut bell = shared.bell.subscribe();
            loop {
                stream.send_data(frame(&[]), false)?;
                if bell.changed().await.is_err() {
                    break;
                }
            }
        }
    }
    stream.send_trailers(status(0))
}

/// A message as gRPC frames it: not compressed, its length, its bytes.
fn frame(message: &[u8]) -> Bytes {
    let length = u32::try_from(message.len()).expect("a short message");
    [&[0], &length.to_be_bytes()[..], message].concat().into()
}
