//! Connections: accepted, made TLS, served by hyper, and closed when they hold up others.
//!
//! One loop for plain HTTP and for TLS, so that the same limits hold for both: how many connections, how long a handshake
//! and the head of a request may take, how long nothing may move, how large a head may be.

use std::convert::Infallible;
use std::future::Future;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::response::Response;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use super::door::{Caller, Door};
use super::watched::{Pulse, Watched};
use crate::collect::front::Refusal;

/// Bytes of the head of a request, its URL included, and how many headers.
const HEAD_BYTES: usize = 16 << 10;
const HEADERS: usize = 64;
/// Requests at once on one connection of HTTP/2.
const STREAMS: u32 = 32;
/// After a failure to accept, such as of too many open files.
const PAUSE: Duration = Duration::from_millis(100);

/// Answers one who speaks HTTP where TLS is spoken, as Go's servers do.
const NOT_PLAIN: &[u8] = b"HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n\
    this port speaks HTTPS\n";

/// Serves until `stop` resolves; requests under way may finish.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    door: Arc<Door>,
    stop: impl Future<Output = ()> + Send + 'static,
) {
    let (closing, closed) = watch::channel(());
    let mut connections = JoinSet::new();
    let mut is_failing = false;
    let mut stop = pin!(stop);
    loop {
        tokio::select! {
            () = &mut stop => break,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, address)) => {
                    is_failing = false;
                    let Some(place) = door.place(address) else { continue };
                    let (router, door, closed) = (router.clone(), Arc::clone(&door), closed.clone());
                    connections.spawn(async move {
                        connection(stream, address, router, door, closed).await;
                        drop(place);
                    });
                }
                // it was gone before we came to it
                Err(error) if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset) => {}
                Err(error) => {
                    if !std::mem::replace(&mut is_failing, true) {
                        tracing::warn!(%error, "no connection can be accepted; it is tried again and again");
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }
    drop(closing);
    while connections.join_next().await.is_some() {}
}

async fn connection(
    stream: TcpStream,
    address: SocketAddr,
    router: Router,
    door: Arc<Door>,
    closed: watch::Receiver<()>,
) {
    let rules = door.rules();
    let _ = stream.set_nodelay(true);
    let mut caller = Caller { address, is_known: false };
    let outcome = match &rules.tls {
        None => serve_one(stream, caller, router, door, closed).await,
        Some(tls) => {
            let Some(stream) = handshake(stream, TlsAcceptor::from(Arc::clone(tls)), &door).await else {
                return;
            };
            let (_, session) = stream.get_ref();
            caller.is_known = rules.verifies_clients() && session.peer_certificates().is_some();
            let is_two = session.alpn_protocol() == Some(b"h2");
            drop(rules); // what came before it may be forgotten
            match is_two {
                true => serve_two(stream, caller, router, door, closed).await,
                false => serve_one(stream, caller, router, door, closed).await,
            }
        }
    };
    if let Err(error) = outcome {
        tracing::debug!(%address, %error, "a connection ended");
    }
}

async fn handshake(
    stream: TcpStream,
    acceptor: TlsAcceptor,
    door: &Door,
) -> Option<tokio_rustls::server::TlsStream<TcpStream>> {
    let mut first = [0];
    let hands = async {
        if stream.peek(&mut first).await? == 0 {
            return Ok(None); // a probe that only looks whether the port is open
        }
        // a request begins with a letter, a handshake does not
        if first[0].is_ascii_uppercase() {
            let mut stream = stream;
            stream.write_all(NOT_PLAIN).await?;
            return Err(std::io::Error::other("plain HTTP"));
        }
        acceptor.accept(stream).await.map(Some)
    };
    match tokio::time::timeout(door.limits.head, hands).await {
        Ok(Ok(stream)) => return stream,
        Ok(Err(error)) => tracing::debug!(%error, "no TLS came about"),
        Err(_) => tracing::debug!("a TLS handshake took too long"),
    }
    door.refuse(Refusal::Handshake);
    None
}

/// HTTP/1.
async fn serve_one(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    caller: Caller,
    router: Router,
    door: Arc<Door>,
    closed: watch::Receiver<()>,
) -> hyper::Result<()> {
    let pulse = Arc::new(Pulse::default());
    let stream = Watched::new(stream, Arc::clone(&pulse), Some(door.limits.head), door.limits.idle);
    let service = service_fn(move |request| {
        answer(request, caller, router.clone(), Arc::clone(&door), Arc::clone(&pulse))
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(None) // it would count the pause between two requests too: see `watched`
        .max_buf_size(HEAD_BYTES)
        .max_headers(HEADERS)
        .serve_connection(TokioIo::new(stream), service);
    until_closed(pin!(connection), http1::Connection::graceful_shutdown, closed).await
}

/// HTTP/2.
async fn serve_two(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    caller: Caller,
    router: Router,
    door: Arc<Door>,
    closed: watch::Receiver<()>,
) -> hyper::Result<()> {
    let pulse = Arc::new(Pulse::default());
    let stream = Watched::new(stream, Arc::clone(&pulse), None, door.limits.idle);
    let service = service_fn(move |request| {
        answer(request, caller, router.clone(), Arc::clone(&door), Arc::clone(&pulse))
    });
    let connection = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS)
        .max_header_list_size(HEAD_BYTES as u32)
        .serve_connection(TokioIo::new(stream), service);
    until_closed(pin!(connection), http2::Connection::graceful_shutdown, closed).await
}

/// Drives a connection; when memledger ends, only to the end of what is under way.
async fn until_closed<C: Future<Output = hyper::Result<()>>>(
    mut connection: Pin<&mut C>,
    shut: impl FnOnce(Pin<&mut C>),
    mut closed: watch::Receiver<()>,
) -> hyper::Result<()> {
    tokio::select! {
        outcome = connection.as_mut() => return outcome,
        _ = closed.changed() => shut(connection.as_mut()), // its sender is gone
    }
    connection.await
}

async fn answer(
    request: Request<Incoming>,
    caller: Caller,
    router: Router,
    door: Arc<Door>,
    pulse: Arc<Pulse>,
) -> Result<Response, Infallible> {
    let _busy = pulse.begin();
    let rules = door.rules();
    let (mut parts, body) = request.into_parts();
    let mut response = match door.admit(&rules, caller, &parts, body.size_hint().lower()).await {
        Ok(caller) => {
            parts.extensions.insert(caller);
            let request = Request::from_parts(parts, Body::new(body));
            TowerToHyperService::new(router).call(request).await?
        }
        Err(refusal) => refusal,
    };
    door.finish(&rules, &mut response);
    Ok(response)
}
