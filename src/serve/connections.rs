//! Connections: accepted, made TLS, served by hyper, and closed when they hold up others.
//!
//! One loop for plain HTTP and for TLS, so that the same limits hold for both: how many connections, how long a handshake
//! and the head of a request may take, how long an answer may be read and nothing may move, how large a head may be.
//!
//! When what lets somebody in changes, a connection is closed that was let in by the rules before: at once if nothing is under
//! way, else after that. A request that comes all the same is refused.

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
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::net::sockopt::set_tcp_user_timeout;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use super::answer::{Answer, PIECE_BYTES};
use super::door::{Caller, Door};
use super::places::Place;
use super::pulse::{LONGEST_ANSWER, Pulse};
use super::watched::{Left, Socket, Watched};
use crate::clock::Moment;
use crate::collect::front::Refusal;

/// Bytes of the head of a request, its URL included, and how many headers.
const HEAD_BYTES: usize = 16 << 10;
const HEADERS: usize = 64;
/// Requests at once on one connection of HTTP/2.
const STREAMS: u32 = 8;
/// Of these, those that a client took back before they were looked at; one more ends the connection.
const TAKEN_BACK: usize = 20;
/// After this a connection of HTTP/2 takes no more requests and ends with those under way: of each stream it may hold a piece
/// that nobody reads, and a request now and then keeps it from being idle.
const LONGEST_LIFE: Duration = Duration::from_secs(300);
/// Bytes of bodies that a connection of HTTP/2 may send before they are read. No route reads one; the protocol wants so many.
const WINDOW_BYTES: u32 = 65_535;
/// Bytes that the kernel holds for a client, which it counts twice, with what it needs itself.
const UNSENT_BYTES: u32 = 128 << 10;
/// Bytes that the kernel holds of a client's requests, which it counts twice too: no route reads a body.
const UNREAD_BYTES: u32 = 64 << 10;
/// Connections that wait to be accepted.
const BACKLOG: u32 = 1_024;
/// After a failure to accept, such as of too many open files.
const PAUSE: Duration = Duration::from_millis(100);
/// How often it is looked whether the kernel has sent the rest to a client that says nothing more.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Answers one who speaks HTTP where TLS is spoken, as Go's servers do.
const NOT_PLAIN: &[u8] = b"HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n\
    this port speaks HTTPS\n";

/// A listener at this address. What the kernel holds of answers that are not read, and of requests, has a bound for each
/// connection: by itself it would take megabytes. How many connections there are is bounded by the seats, each of which is
/// held until the client has what the kernel had for it, see `linger`. And the kernel gives up a client that takes nothing,
/// also when memledger has ended.
///
/// # Errors
/// The address cannot be had.
pub fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    // connections have these from their listener
    socket.set_send_buffer_size(UNSENT_BYTES)?;
    socket.set_recv_buffer_size(UNREAD_BYTES)?;
    set_tcp_user_timeout(&socket, LONGEST_ANSWER.as_millis() as u32)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// A connection, as its requests see it.
#[derive(Clone)]
struct Link {
    caller: Caller,
    pulse: Arc<Pulse>,
    router: Router,
    door: Arc<Door>,
    /// Which rules let it in.
    edition: u64,
}

/// What ends a connection from outside.
struct Ends {
    /// memledger ends: its sender is gone.
    closed: watch::Receiver<()>,
    /// Which rules let connections in.
    edition: watch::Receiver<u64>,
}

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
                    let Some(seat) = door.seat(address) else { continue };
                    let (router, door, closed) = (router.clone(), Arc::clone(&door), closed.clone());
                    connections.spawn(async move {
                        let caller = Caller { address, is_known: false };
                        let edition = door.edition(); // before the rules: a change in between is seen
                        let ends = Ends { closed: closed.clone(), edition };
                        let (pulse, edition) = (Arc::clone(&seat.pulse), *ends.edition.borrow());
                        let link = Link { caller, pulse, router, door, edition };
                        let served = async {
                            let left = Left::default();
                            connection(stream, link, ends, &left).await;
                            linger(&left, &seat.pulse, closed).await;
                        };
                        tokio::select! {
                            () = served => {}
                            () = seat.pulse.evicted() => tracing::debug!(%address, "closed for another connection"),
                        }
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

async fn connection(stream: TcpStream, mut link: Link, ends: Ends, left: &Left) {
    let rules = link.door.rules();
    let address = link.caller.address;
    let _ = stream.set_nodelay(true);
    let stream = Socket::new(stream, Arc::clone(&link.pulse), left);
    let outcome = match &rules.tls {
        None => serve_one(stream, link, ends).await,
        Some(tls) => {
            let Some(stream) = handshake(stream, TlsAcceptor::from(Arc::clone(tls)), &link.door).await else {
                return;
            };
            let (_, session) = stream.get_ref();
            link.caller.is_known = rules.verifies_clients() && session.peer_certificates().is_some();
            let is_two = session.alpn_protocol() == Some(b"h2");
            drop(rules); // what came before it may be forgotten
            match is_two {
                true => serve_two(stream, link, ends).await,
                false => serve_one(stream, link, ends).await,
            }
        }
    };
    if let Err(error) = outcome {
        tracing::debug!(%address, %error, "a connection ended");
    }
}

/// Waits until the client has taken all and closed its side too, or was given its time: until then the kernel may have
/// something to send, which is as much memory as before, so that the seat is not given back. Not when memledger ends.
async fn linger(left: &Left, pulse: &Arc<Pulse>, mut closed: watch::Receiver<()>) {
    let Some(mut stream) = Socket::again(left, Arc::clone(pulse)) else { return };
    let _ = stream.shutdown().await;
    let mut sink = [0; 1_024];
    let until_closed = async {
        let mut taken = 0;
        while let Ok(length @ 1..) = stream.read(&mut sink).await {
            taken += length;
            if taken > UNREAD_BYTES as usize {
                return false; // it goes on as if nothing had ended
            }
        }
        while !stream.has_ended() {
            tokio::time::sleep(LOOK_EVERY).await; // it closed its side before it took all
        }
        true
    };
    tokio::select! {
        outcome = tokio::time::timeout(pulse.farewell(Moment::now()), until_closed) => {
            if !matches!(outcome, Ok(true)) {
                pulse.cut();
            }
        }
        _ = closed.changed() => {}
    }
}

async fn handshake(
    stream: Socket,
    acceptor: TlsAcceptor,
    door: &Door,
) -> Option<tokio_rustls::server::TlsStream<Socket>> {
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
    link: Link,
    ends: Ends,
) -> hyper::Result<()> {
    let stream = Watched::one(stream, Arc::clone(&link.pulse));
    let of_requests = link.clone();
    let service = service_fn(move |request| answer(request, of_requests.clone()));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(None) // it would count the pause between two requests too: see `pulse`
        .max_buf_size(HEAD_BYTES)
        .max_headers(HEADERS)
        .serve_connection(TokioIo::new(stream), service);
    until_over(pin!(connection), http1::Connection::graceful_shutdown, &link, ends, Duration::MAX).await
}

/// HTTP/2.
async fn serve_two(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    link: Link,
    ends: Ends,
) -> hyper::Result<()> {
    let stream = Watched::two(stream, Arc::clone(&link.pulse));
    let of_requests = link.clone();
    let service = service_fn(move |request| answer(request, of_requests.clone()));
    let connection = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS)
        .max_pending_accept_reset_streams(TAKEN_BACK)
        .max_header_list_size(HEAD_BYTES as u32)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .max_send_buf_size(PIECE_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    until_over(pin!(connection), http2::Connection::graceful_shutdown, &link, ends, LONGEST_LIFE).await
}

/// Drives a connection until it ends, or one of its times has passed. When memledger ends, the rules that let it in do not
/// hold any more, or its life has been long enough, only to the end of what is under way.
async fn until_over<C: Future<Output = hyper::Result<()>>>(
    mut connection: Pin<&mut C>,
    shut: impl FnOnce(Pin<&mut C>),
    link: &Link,
    mut ends: Ends,
    life: Duration,
) -> hyper::Result<()> {
    let mut overdue = pin!(link.pulse.overdue(&link.door.limits));
    let address = link.caller.address;
    // the connection first: what it does sets the times
    tokio::select! {
        biased;
        outcome = connection.as_mut() => return outcome,
        why = overdue.as_mut() => {
            tracing::debug!(%address, why, "a connection is closed");
            return Ok(());
        }
        _ = ends.closed.changed() => {}
        _ = ends.edition.changed() => {}
        () = tokio::time::sleep(life) => {}
    }
    shut(connection.as_mut());
    tokio::select! {
        biased;
        outcome = connection.as_mut() => outcome,
        why = overdue => {
            tracing::debug!(%address, why, "a connection is closed");
            Ok(())
        }
    }
}

async fn answer(request: Request<Incoming>, link: Link) -> Result<Response, Infallible> {
    let making = link.pulse.begin(Moment::now());
    let _kept = link.pulse.keep(); // until it has its place, or its refusal
    let rules = link.door.rules();
    let (mut parts, body) = request.into_parts();
    let admitted = if rules.edition == link.edition {
        link.door.admit(&rules, link.caller, &parts, body.size_hint().lower()).await
    } else {
        let text = "the rules that let this connection in have changed; connect again\n";
        Err((StatusCode::SERVICE_UNAVAILABLE, [(header::CONNECTION, "close")], text).into_response())
    };
    let mut response = match admitted {
        Ok(caller) => {
            parts.extensions.insert(caller);
            parts.extensions.insert(Arc::clone(&link.pulse));
            let request = Request::from_parts(parts, Body::new(body));
            TowerToHyperService::new(link.router).call(request).await?
        }
        Err(refusal) => refusal,
    };
    link.door.finish(&rules, &mut response);
    let place = response.extensions_mut().remove::<Place>();
    let sending = making.made(place, Moment::now());
    Ok(response.map(|body| Body::new(Answer::new(body, sending))))
}

#[cfg(test)]
mod tests {
    use rustix::net::sockopt;

    use super::*;

    #[test]
    fn a_connection_has_the_bounds_of_its_listener() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        runtime.block_on(async {
            let listener = listen(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
            let _client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (stream, _) = listener.accept().await.unwrap();
            assert_eq!(sockopt::tcp_user_timeout(&stream).unwrap(), 30_000);
            assert_eq!(sockopt::socket_send_buffer_size(&stream).unwrap(), 2 * UNSENT_BYTES as usize);
            assert_eq!(sockopt::socket_recv_buffer_size(&stream).unwrap(), 2 * UNREAD_BYTES as usize);
        });
    }
}
