//! Accepts connections, does the TLS handshake, and serves HTTP/1 by hyper.
//!
//! Plain HTTP, TLS and the control socket share one way of serving, so the same limits apply to all. When the rules of who is
//! admitted change, connections that were admitted by the old rules are closed, after the response in progress if there is
//! one. A request that arrives on one all the same is rejected.
//!
//! A client that is rejected gets its response: a socket that is closed with unread input resets the connection, which may discard what was
//! sent, so what the client sends is read before, for a bounded time and number of bytes. Connections above the limit are served too, few at a
//! time and not for long, as their request has to be read and with TLS a handshake be made; those above that limit get the response at once.

use std::convert::Infallible;
use std::future::Future;
use std::io::ErrorKind;
use std::net::{Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::net::sockopt::{set_ipv6_v6only, set_tcp_user_timeout};
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tracing::Instrument;

use super::access_control::{AccessControl, Peer, SecurityConfig};
use super::timeouts::{ConnectionClock, Phase, RESPONSE_TIMEOUT, TimedStream};
use super::{CurrentRoutes, RequestPermit};
use crate::clock::Timestamp;
use crate::host::Health;
use crate::stats::http_stats::RejectReason;
use crate::text::first_chars;

/// Largest request head in bytes, its URL included, and the most headers.
const MAX_HEAD_BYTES: usize = crate::host::bounds::REQUEST_HEAD.max_bytes;
const MAX_HEADERS: usize = crate::host::bounds::REQUEST_HEADERS.max;
/// Socket send buffer. The kernel doubles it, for its own overhead.
const SEND_BUFFER_BYTES: u32 = 128 << 10;
/// Socket receive buffer, which the kernel doubles too. It is small because no route reads a body.
const RECEIVE_BUFFER_BYTES: u32 = 64 << 10;
/// Connections that wait to be accepted.
const BACKLOG: u32 = 1_024;
/// Delay after accept failed, for example with too many open files.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
/// How long, and how much, a client may still send after the last response.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(500);
const MAX_DRAINED_BYTES: usize = 1 << 20;
/// Time that a connection above a limit has for its handshake, its request and the response.
const REJECTION_TIMEOUT: Duration = Duration::from_secs(2);

/// Largest path in the span of a request, in characters.
const MAX_SPAN_PATH: usize = 100;

/// The response to plain HTTP on a TLS port, the same as Go's servers send.
pub const HTTPS_REQUIRED: &[u8] =
    b"HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n\
    Client sent an HTTP request to an HTTPS server.\n";

/// Opens a listener at this address. `[::]` also accepts IPv4, whatever the host's default is.
///
/// Socket buffers are limited, because the kernel would grow them to megabytes per connection. The kernel drops a client
/// that acknowledges nothing, even after the connection was closed.
///
/// # Errors
/// The address cannot be bound.
pub fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    if address.ip() == Ipv6Addr::UNSPECIFIED {
        set_ipv6_v6only(&socket, false)?;
    }
    socket.set_reuseaddr(true)?;
    // connections inherit these from the listener
    socket.set_send_buffer_size(SEND_BUFFER_BYTES)?;
    socket.set_recv_buffer_size(RECEIVE_BUFFER_BYTES)?;
    set_tcp_user_timeout(&socket, RESPONSE_TIMEOUT.as_millis() as u32)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// A connection, as its requests use it.
#[derive(Clone)]
pub(super) struct ConnectionHandle {
    pub(super) peer: Peer,
    pub(super) clock: Arc<ConnectionClock>,
    pub(super) routes: CurrentRoutes,
    pub(super) access_control: Arc<AccessControl>,
    /// Generation of the rules that admitted it.
    pub(super) generation: u64,
    /// It gets this response and no other one.
    pub(super) rejection: Option<Rejection>,
}

/// The response to each request of a connection that is not admitted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rejection {
    pub(super) status: StatusCode,
    pub(super) text: &'static str,
}

impl IntoResponse for Rejection {
    fn into_response(self) -> Response {
        (self.status, [(header::CONNECTION, "close")], format!("{}\n", self.text)).into_response()
    }
}

/// The response to a connection above `--web.max-connections`.
const TOO_MANY_CONNECTIONS: Rejection = Rejection {
    status: StatusCode::SERVICE_UNAVAILABLE,
    text: "too many connections; see --web.max-connections",
};

/// Serves until `stop` resolves; requests in progress may finish.
pub async fn serve(
    listener: TcpListener,
    routes: CurrentRoutes,
    access_control: Arc<AccessControl>,
    stop: impl Future<Output = ()> + Send + 'static,
) {
    let start = |(stream, address): (TcpStream, SocketAddr), connections: &mut JoinSet<()>| {
        let (permit, rejection) = match access_control.admit_connection(address.ip()) {
            Ok(permit) => (permit, None),
            Err(Some(permit)) => (permit, Some(TOO_MANY_CONNECTIONS)),
            Err(None) => {
                let speaks_http = access_control.security().tls.is_none();
                return reject_at_once(&stream, speaks_http.then_some(TOO_MANY_CONNECTIONS));
            }
        };
        let served = connection(stream, address, routes.clone(), Arc::clone(&access_control), rejection);
        connections.spawn(async move {
            serve_within(rejection, served).await;
            drop(permit);
        });
    };
    let connections = accept_until(stop, || listener.accept(), start).await;
    drop(listener);
    finish(connections, &access_control).await;
}

/// Least time between two warnings of failed accepts: without free descriptors they alternate with others.
const MIN_WARNING_INTERVAL: Duration = Duration::from_secs(600);

/// Accepts connections until `stop` resolves; `start` serves each by a task. Returns those that are open.
pub(super) async fn accept_until<S, F: Future<Output = std::io::Result<S>>>(
    stop: impl Future<Output = ()>,
    accept: impl Fn() -> F,
    mut start: impl FnMut(S, &mut JoinSet<()>),
) -> JoinSet<()> {
    let (mut connections, mut health) = (JoinSet::new(), Health::with_interval(MIN_WARNING_INTERVAL));
    let mut stop = pin!(stop);
    loop {
        tokio::select! {
            () = &mut stop => return connections,
            Some(_) = connections.join_next() => {}
            accepted = accept() => match accepted {
                Ok(accepted) => {
                    health.recovered();
                    start(accepted, &mut connections);
                }
                // the client disconnected before it was accepted
                Err(error) if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset) => {}
                Err(error) => {
                    if health.failed(Timestamp::now()) {
                        tracing::warn!(%error, "accepting connections failed; retrying");
                    }
                    tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
    }
}

/// Waits for requests in progress.
pub(super) async fn finish(mut connections: JoinSet<()>, access_control: &AccessControl) {
    access_control.close_connections();
    while connections.join_next().await.is_some() {}
}

/// Serves a connection, for [`REJECTION_TIMEOUT`] at most if it is rejected.
pub(super) async fn serve_within(rejection: Option<Rejection>, served: impl Future<Output = ()>) {
    match rejection {
        None => served.await,
        Some(_) => drop(tokio::time::timeout(REJECTION_TIMEOUT, served).await),
    }
}

/// Sends a response and closes, without waiting for the client. What it has sent is read: unread, it would reset the connection.
pub(super) fn reject_at_once(stream: &impl AsFd, rejection: Option<Rejection>) {
    if let Some(Rejection { status, text }) = rejection {
        let length = text.len() + 1;
        let response = format!(
            "HTTP/1.0 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{text}\n"
        );
        let _ = rustix::net::send(stream, response.as_bytes(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }
    let _ = rustix::net::shutdown(stream, Shutdown::Write);
    let (mut sink, mut received) = ([0; 4_096], 0);
    while let Ok((length @ 1.., _)) = rustix::net::recv(stream, &mut sink, RecvFlags::DONTWAIT)
        && received < 2 * RECEIVE_BUFFER_BYTES as usize
    {
        received += length;
    }
}

async fn connection(
    stream: TcpStream,
    address: SocketAddr,
    routes: CurrentRoutes,
    access_control: Arc<AccessControl>,
    rejection: Option<Rejection>,
) {
    let closing = access_control.closing(); // before reading the rules, to notice a change in between
    let security = access_control.security();
    let _ = stream.set_nodelay(true);
    let (clock, generation) = (ConnectionClock::new(), security.generation);
    let stream = TimedStream::new(stream, &clock);
    let peer = Peer::remote(address.ip());
    let mut handle = ConnectionHandle { peer, clock, routes, access_control, generation, rejection };
    match &security.tls {
        None => serve_http(stream, handle, closing).await,
        Some(tls) => {
            let acceptor = TlsAcceptor::from(Arc::clone(tls));
            let head = handle.access_control.limits.head;
            let stream = match tokio::time::timeout(head, handshake(stream, acceptor)).await {
                Ok(Ok(Some(stream))) => stream,
                Ok(Ok(None)) => return,
                failed => {
                    match failed {
                        Ok(Err(error)) => tracing::debug!(%error, "TLS handshake failed"),
                        _ => tracing::debug!("TLS handshake timed out"),
                    }
                    // one above a limit is counted already
                    if handle.rejection.is_none() {
                        handle.access_control.count_rejected(RejectReason::Handshake);
                    }
                    return;
                }
            };
            handle.peer.is_authenticated =
                security.verifies_clients() && stream.get_ref().1.peer_certificates().is_some();
            drop(security); // a later configuration may free it
            handle.clock.enter(Phase::Head);
            serve_http(stream, handle, closing).await;
        }
    }
}

/// Returns the encrypted connection; `None` if the client has sent nothing and closed it.
async fn handshake(
    mut stream: TimedStream<TcpStream>,
    acceptor: TlsAcceptor,
) -> std::io::Result<Option<TlsStream<TimedStream<TcpStream>>>> {
    let mut first = [0];
    if stream.get_ref().peek(&mut first).await? == 0 {
        return Ok(None); // a probe that only checks whether the port is open
    }
    // a plain HTTP request begins with a letter, a TLS handshake does not
    if first[0].is_ascii_uppercase() {
        stream.write_all(HTTPS_REQUIRED).await?;
        drain(&mut stream).await;
        return Err(std::io::Error::other("plain HTTP"));
    }
    match acceptor.accept(stream).into_fallible().await {
        Ok(stream) => Ok(Some(stream)),
        // the client may have sent its request already: it reads the alert that says what was wrong
        Err((error, mut stream)) => {
            drain(&mut stream).await;
            Err(error)
        }
    }
}

/// Serves HTTP/1 until the connection ends or a timeout passes. When `closing` changes, it is shut down gracefully.
pub(super) async fn serve_http(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    handle: ConnectionHandle,
    mut closing: watch::Receiver<()>,
) {
    let request_handle = handle.clone();
    let service = service_fn(move |request| respond(request, request_handle.clone()));
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(None) // it would count the pause between two requests too: see `timeouts`
        .max_buf_size(MAX_HEAD_BYTES)
        .max_headers(MAX_HEADERS)
        .serve_connection(TokioIo::new(stream), service);
    let mut timed_out = pin!(handle.clock.timed_out(&handle.access_control.limits));
    let (client, mut is_closing) = (handle.peer.client, false);
    loop {
        // the connection is polled first, because it records what it is doing
        tokio::select! {
            biased;
            outcome = &mut connection => {
                if let Err(error) = outcome {
                    tracing::debug!(%client, %error, "connection failed");
                }
                break;
            }
            reason = &mut timed_out => return tracing::debug!(%client, reason, "connection closed"),
            _ = closing.changed(), if !is_closing => {
                is_closing = true;
                Pin::new(&mut connection).graceful_shutdown();
            }
        }
    }
    drain(&mut connection.into_parts().io.into_inner()).await;
}

/// Lets the client read the last response: closing a socket with unread input would reset the connection.
async fn drain(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) {
    let read = async {
        let _ = stream.shutdown().await;
        let (mut sink, mut received) = ([0; 1_024], 0);
        while let Ok(length @ 1..) = stream.read(&mut sink).await {
            received += length;
            if received > MAX_DRAINED_BYTES {
                break;
            }
        }
    };
    let _ = tokio::time::timeout(DRAIN_TIMEOUT, read).await;
}

/// Responds to a request. A panic is answered with 500, a response that is not made in time with 503.
async fn respond(request: Request<Incoming>, handle: ConnectionHandle) -> Result<Response, Infallible> {
    handle.clock.enter(Phase::Handling);
    let security = handle.access_control.security();
    let span = request_span(&request);
    let made = async {
        let made = tokio::time::timeout(RESPONSE_TIMEOUT, make_response(request, &handle, &security)).await;
        let timed_out = || (StatusCode::SERVICE_UNAVAILABLE, "the response timed out\n").into_response();
        let mut response = made.unwrap_or_else(|_| timed_out());
        handle.access_control.add_headers(&security, &mut response);
        response
    };
    let made = AssertUnwindSafe(made).catch_unwind().instrument(span.clone());
    let mut response = made.await.unwrap_or_else(|_| internal_error());
    span.record("http.response.status_code", i64::from(response.status().as_u16())); // unsigned would become text
    let permit = response.extensions_mut().remove::<RequestPermit>();
    Ok(response.map(|body| handle.clock.send(body, permit)))
}

/// Returns the span of a request, until its response is made. A client chooses the path, so its length is limited.
fn request_span(request: &Request<Incoming>) -> tracing::Span {
    tracing::info_span!(
        "http request",
        otel.kind = "server",
        http.request.method = known_method(request.method()),
        url.path = first_chars(request.uri().path(), MAX_SPAN_PATH),
        http.response.status_code = tracing::field::Empty,
    )
}

/// Returns the method for a span; a client can choose any other one, of any length.
fn known_method(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::POST => "POST",
        _ => "_OTHER",
    }
}

/// The response to a request that panicked.
pub(super) fn internal_error() -> Response {
    let text = "the request failed, which is a bug in memledger; see its log\n";
    (StatusCode::INTERNAL_SERVER_ERROR, text).into_response()
}

/// Authorizes the request and runs its route.
async fn make_response(
    request: Request<Incoming>,
    handle: &ConnectionHandle,
    security: &SecurityConfig,
) -> Response {
    if let Some(rejection) = handle.rejection {
        return rejection.into_response();
    }
    let (mut parts, body) = request.into_parts();
    let authorized = if security.generation == handle.generation || handle.peer.on_control_socket {
        handle.access_control.authorize(security, handle.peer, &parts).await
    } else {
        // its head was half read when the rules changed
        let text = "access rules have changed since this connection was opened; reconnect\n";
        Err((StatusCode::SERVICE_UNAVAILABLE, [(header::CONNECTION, "close")], text).into_response())
    };
    match authorized {
        Ok(peer) => {
            parts.extensions.insert(peer);
            let request = Request::from_parts(parts, Body::new(body));
            match TowerToHyperService::new(handle.routes.get()).call(request).await {
                Ok(response) => response,
                Err(never) => match never {},
            }
        }
        Err(rejection) => rejection,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::sync::atomic::{AtomicUsize, Ordering};

    use rustix::net::sockopt;
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;
    use crate::series::{Label, Row, Series};
    use crate::stats::http_stats::HttpStats;

    /// Counts the warnings that are logged.
    #[derive(Clone, Default)]
    struct WarningCounter(Arc<AtomicUsize>);

    impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for WarningCounter {
        fn on_event(&self, event: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
            let is_warning = *event.metadata().level() == tracing::Level::WARN;
            self.0.fetch_add(usize::from(is_warning), Ordering::Relaxed);
        }
    }

    #[test]
    fn accepts_that_fail_now_and_then_are_logged_once() {
        let (accepts, started, warnings) =
            (AtomicUsize::new(0), AtomicUsize::new(0), WarningCounter::default());
        let (accepts, started) = (&accepts, &started);
        // the sixth one never ends
        let accept = || async move {
            match accepts.fetch_add(1, Ordering::Relaxed) {
                5.. => std::future::pending().await,
                number if number % 2 == 0 => Err(rustix::io::Errno::MFILE.into()),
                _ => Ok(()),
            }
        };
        let stop = async {
            while accepts.load(Ordering::Relaxed) < 6 {
                tokio::task::yield_now().await;
            }
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let start = |(), _: &mut JoinSet<()>| _ = started.fetch_add(1, Ordering::Relaxed);
        let accepting = accept_until(stop, accept, start);
        let subscriber = tracing_subscriber::registry().with(warnings.clone());
        tracing::subscriber::with_default(subscriber, || drop(runtime.block_on(accepting)));
        assert_eq!((started.load(Ordering::Relaxed), warnings.0.load(Ordering::Relaxed)), (2, 1));
    }

    /// Returns how many connections were rejected, by the label of the reason.
    fn rejected(http_stats: &HttpStats, reason: &str) -> f64 {
        let mut series = Series::default();
        http_stats.write(&mut series);
        let of_reason = |row: &&Row| matches!(series.labels(row), [Label::Fixed(label)] if *label == reason);
        series.rows().iter().filter(of_reason).map(|row| row.value).sum()
    }

    #[test]
    fn connection_above_the_limit_is_counted_once_if_its_handshake_fails() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("web.yml");
        let rcgen::CertifiedKey { cert, signing_key } =
            rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        std::fs::write(folder.path().join("cert.pem"), cert.pem()).unwrap();
        std::fs::write(folder.path().join("key.pem"), signing_key.serialize_pem()).unwrap();
        std::fs::write(&file, "tls_server_config: {cert_file: cert.pem, key_file: key.pem}\n").unwrap();
        let file = format!("--web.config.file={}", file.display());
        let config = crate::http::test_server::config_of(&["--web.max-connections=4", &file]); // one for this host
        let http_stats = Arc::new(HttpStats::default());
        let access_control = Arc::new(AccessControl::new(&config, Arc::clone(&http_stats)).unwrap());
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let routes = CurrentRoutes::new(axum::Router::new());
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let serving = runtime.spawn(serve(listener, routes, access_control, stopped.map(drop)));
        let clients = [(); 2].map(|()| std::net::TcpStream::connect(address).unwrap());
        for mut client in clients.into_iter().rev() {
            client.write_all(b"not TLS at all").unwrap();
            let _ = client.read_to_end(&mut Vec::new());
        }
        stop.send(()).unwrap();
        runtime.block_on(serving).unwrap();
        let counts = ["connections", "handshake"].map(|reason| rejected(&http_stats, reason));
        assert_eq!(counts, [1.0, 1.0], "one of each");
    }

    #[test]
    fn panic_costs_one_request() {
        let route = axum::routing::get(|uri: axum::http::Uri| async move {
            assert_eq!(uri.query(), None, "a bug");
        });
        let config = crate::http::test_server::config_of(&[]);
        let access_control = Arc::new(AccessControl::new(&config, Arc::default()).unwrap());
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let routes = CurrentRoutes::new(axum::Router::new().route("/", route));
        runtime.spawn(serve(listener, routes, access_control, std::future::pending()));
        let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
        let status =
            |path: &str| agent.get(format!("http://{address}/{path}")).call().unwrap().status().as_u16();
        let in_authorize = format!("?{}", crate::http::access_control::PANIC_OF_TEST);
        let statuses = ["", "?panic", "", &in_authorize, ""].map(status);
        assert_eq!(statuses, [200, 500, 200, 500, 200]);
    }

    /// Clients that have written a whole request, with a body that no route reads, before the first one is accepted: more than are served
    /// to be rejected.
    #[test]
    fn connection_above_the_limit_gets_its_whole_response() {
        let config = crate::http::test_server::config_of(&["--web.max-connections=4"]); // one for this host
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        for round in 0..50 {
            let access_control = Arc::new(AccessControl::new(&config, Arc::default()).unwrap());
            let listener = {
                let _entered = runtime.enter();
                listen(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap()
            };
            let address = listener.local_addr().unwrap();
            let _admitted = std::net::TcpStream::connect(address).unwrap();
            let clients: Vec<_> = (0..20)
                .map(|_| {
                    let mut client = std::net::TcpStream::connect(address).unwrap();
                    let head = "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 30000\r\n\r\n";
                    client.write_all((head.to_owned() + &"a".repeat(30_000)).as_bytes()).unwrap();
                    client
                })
                .collect();
            let routes = CurrentRoutes::new(axum::Router::new());
            let serving = runtime.spawn(serve(listener, routes, access_control, std::future::pending()));
            for (number, mut client) in clients.into_iter().enumerate() {
                let mut response = String::new();
                let read = client.read_to_string(&mut response);
                assert!(read.is_ok(), "client {number} of round {round}: {read:?} after {response:?}");
                assert!(response.starts_with("HTTP/1.") && response.contains(" 503 "), "{response}");
                assert!(response.contains("too many connections; see --web.max-connections\n"), "{response}");
            }
            serving.abort();
        }
    }

    #[test]
    fn connection_inherits_socket_limits_of_listener() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        runtime.block_on(async {
            let listener = listen(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
            let _client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (stream, _) = listener.accept().await.unwrap();
            assert_eq!(sockopt::tcp_user_timeout(&stream).unwrap(), 30_000);
            assert_eq!(sockopt::socket_send_buffer_size(&stream).unwrap(), 2 * SEND_BUFFER_BYTES as usize);
            assert_eq!(sockopt::socket_recv_buffer_size(&stream).unwrap(), 2 * RECEIVE_BUFFER_BYTES as usize);
        });
    }
}
