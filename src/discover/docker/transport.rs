//! The connection to a Docker or Podman daemon, with a size limit for each response.
//!
//! bollard collects a whole response, and buffers an event until its line ends. So the limit is below it, in the byte stream:
//! the connection is closed when a daemon exceeds it. One connection serves one request, as with bollard's own transport.
//!
//! | response | limit |
//! | --- | --- |
//! | the list of containers | [`MAX_LIST_BYTES`] |
//! | inspect, and everything else | [`MAX_INSPECT_BYTES`], with up to twenty at once |
//! | one event, and one piece of a log | [`MAX_EVENT_BYTES`]; the stream itself has no end |

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use bollard::errors::Error;
use bollard::{BollardRequest, Docker};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{HOST, HeaderValue};
use hyper::{Response, Uri};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;

use super::RESPONSE_TIMEOUT;
use crate::host::bounds::{DOCKER_EVENT, DOCKER_INSPECT, DOCKER_LIST};

/// Largest list of containers.
pub const MAX_LIST_BYTES: usize = DOCKER_LIST.max_bytes;
/// Largest inspect.
pub const MAX_INSPECT_BYTES: usize = DOCKER_INSPECT.max_bytes;
const MAX_EVENT_BYTES: usize = DOCKER_EVENT.max_bytes;
/// hyper's read buffer, which may hold whole events.
const READ_AHEAD_BYTES: usize = 64 << 10;

/// A response exceeds its limit.
#[derive(Debug, thiserror::Error)]
#[error("the response exceeds {0} bytes")]
struct TooLarge(usize);

/// Returns whether an error was caused by a response that was too large.
pub fn is_too_large(error: &Error) -> bool {
    let first: &(dyn std::error::Error + 'static) = error;
    std::iter::successors(Some(first), |error| error.source()).any(|error| {
        let io = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        io.is_some_and(|inner| inner.is::<TooLarge>()) || error.is::<TooLarge>()
    })
}

/// Remaining bytes of a response.
#[derive(Debug)]
pub struct Allowance {
    remaining: AtomicUsize,
    limit: usize,
}

impl Allowance {
    /// Creates one of so many bytes.
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { remaining: AtomicUsize::new(limit), limit })
    }

    /// Restores the initial limit, after a complete event.
    pub fn renew(&self) {
        self.remaining.store(self.limit, Ordering::Relaxed);
    }

    /// Returns whether the limit was exceeded.
    pub fn is_exceeded(&self) -> bool {
        self.remaining.load(Ordering::Relaxed) == 0
    }

    fn spend(&self, bytes: usize) -> io::Result<()> {
        let remaining = self.remaining.load(Ordering::Relaxed).saturating_sub(bytes);
        self.remaining.store(remaining, Ordering::Relaxed);
        if remaining == 0 { Err(io::Error::other(TooLarge(self.limit))) } else { Ok(()) }
    }
}

/// Creates a client, and the allowance of its stream for the next event or piece of a log. A client has one stream.
///
/// # Errors
/// bollard rejects its own settings.
pub fn client(socket: &Path) -> Result<(Docker, Arc<Allowance>), Error> {
    let events = Allowance::new(MAX_EVENT_BYTES + READ_AHEAD_BYTES);
    let (socket, of_events) = (socket.to_path_buf(), Arc::clone(&events));
    let transport = move |request: BollardRequest| {
        let path = request.uri().path();
        let allowance = if path.ends_with("/events") || path.ends_with("/logs") {
            of_events.renew();
            Arc::clone(&of_events)
        } else if path.ends_with("/containers/json") {
            Allowance::new(MAX_LIST_BYTES)
        } else {
            Allowance::new(MAX_INSPECT_BYTES)
        };
        let socket = socket.clone();
        async move { send(&socket, request, allowance).await }
    };
    let seconds = RESPONSE_TIMEOUT.as_secs();
    let address = Some("http://localhost");
    let docker =
        Docker::connect_with_custom_transport(transport, address, seconds, bollard::API_DEFAULT_VERSION)?;
    Ok((docker, events))
}

/// Sends one request over a connection of its own.
pub async fn send(
    socket: &Path,
    mut request: BollardRequest,
    allowance: Arc<Allowance>,
) -> Result<Response<Incoming>, Error> {
    let stream = LimitedStream { stream: UnixStream::connect(socket).await?, allowance };
    let (mut sender, connection) =
        http1::Builder::new().max_buf_size(READ_AHEAD_BYTES).handshake(TokioIo::new(stream)).await?;
    // ends when the response was read or dropped
    tokio::spawn(connection);
    let target = request.uri().path_and_query().map_or("/", |target| target.as_str());
    *request.uri_mut() = target.parse::<Uri>().map_err(io::Error::other)?;
    request.headers_mut().insert(HOST, HeaderValue::from_static("localhost"));
    Ok(sender.send_request(request).await?)
}

/// A socket with a limit of bytes to read.
struct LimitedStream {
    stream: UnixStream,
    allowance: Arc<Allowance>,
}

impl AsyncRead for LimitedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        Poll::Ready(self.allowance.spend(buffer.filled().len() - before))
    }
}

impl AsyncWrite for LimitedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
