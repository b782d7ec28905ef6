//! Timeouts of one connection: of the head of a request, of its response, and of the pause between two requests.
//!
//! hyper's own header timeout would also count the pauses that scrapers make. So the stream below hyper records when the
//! first byte of a head arrives and when a response is written. hyper calls the service, takes the body and flushes within
//! the task of the connection, so [`ConnectionClock::timed_out`] sees each change when that task polls it.

use std::future::{Future, poll_fn};
use std::io::{IoSlice, Result};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use futures_util::{StreamExt, TryStreamExt, stream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::sleep;

use crate::clock::Timestamp;
use crate::config::HttpLimits;

/// A response must be made within this, and read within this or `--web.idle-timeout` where that is longer: until then it
/// holds memory and a permit.
pub const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);

/// Bytes of a body that hyper takes at a time.
const CHUNK_BYTES: usize = 16 << 10;

/// What a connection is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It waits for a request.
    Idle,
    /// It reads the head of a request, or does the TLS handshake.
    Head,
    /// The response is being made.
    Handling,
    /// hyper takes the response.
    Sending,
    /// hyper has taken the response, and not written all of it.
    Flushing,
}

/// The phase of a connection, and since when.
#[derive(Debug)]
pub struct ConnectionClock(Mutex<(Phase, Timestamp)>);

impl ConnectionClock {
    /// Returns the clock of a new connection, which waits for the head of its first request.
    pub fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new((Phase::Head, Timestamp::now()))))
    }

    fn state(&self) -> MutexGuard<'_, (Phase, Timestamp)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a phase.
    pub fn enter(&self, phase: Phase) {
        *self.state() = (phase, Timestamp::now());
    }

    /// Starts a phase if the connection is in this one.
    fn pass(&self, from: Phase, to: Phase) {
        if self.state().0 == from {
            self.enter(to);
        }
    }

    /// Returns the time until the timeout of the phase, or why the connection is closed.
    fn remaining(&self, now: Timestamp, limits: &HttpLimits) -> std::result::Result<Duration, &'static str> {
        let (phase, since) = *self.state();
        let (limit, reason) = match phase {
            Phase::Idle => (limits.idle, "idle connection timed out"),
            Phase::Head => (limits.head, "request head timed out"),
            Phase::Handling => return Ok(RESPONSE_TIMEOUT), // the handler has a timeout of its own
            Phase::Sending | Phase::Flushing => {
                (RESPONSE_TIMEOUT.max(limits.idle), "response timed out: the client reads too slowly")
            }
        };
        limit.checked_sub(now.since(since)).filter(|left| !left.is_zero()).ok_or(reason)
    }

    /// Resolves with the reason when a timeout has passed. Must be polled whenever the connection is.
    pub async fn timed_out(&self, limits: &HttpLimits) -> &'static str {
        let mut timer = pin!(sleep(Duration::ZERO));
        poll_fn(|context| {
            loop {
                match self.remaining(Timestamp::now(), limits) {
                    Err(reason) => return Poll::Ready(reason),
                    Ok(left) => timer.set(sleep(left)),
                }
                ready!(timer.as_mut().poll(context));
            }
        })
        .await
    }

    /// Wraps the body of a response: hyper gets it in pieces, each a copy, and takes the next one after it has written most
    /// of those before. So `held` and the text, which may be megabytes, live until nearly all of it is sent.
    pub fn send<T: Send + 'static>(self: &Arc<Self>, body: Body, held: T) -> Body {
        self.enter(Phase::Sending);
        let sending = SendingResponse { clock: Arc::clone(self), _held: held };
        let pieces = |mut data: Bytes| {
            std::iter::from_fn(move || {
                let piece = data.split_to(CHUNK_BYTES.min(data.len()));
                (!piece.is_empty()).then(|| Ok::<_, axum::Error>(Bytes::copy_from_slice(&piece)))
            })
        };
        let stream = body.into_data_stream().map_ok(move |data| stream::iter(pieces(data))).try_flatten();
        Body::from_stream(stream.inspect(move |_| {
            let _ = &sending;
        }))
    }
}

/// Dropped once hyper has taken the whole body.
struct SendingResponse<T> {
    clock: Arc<ConnectionClock>,
    _held: T,
}

impl<T> Drop for SendingResponse<T> {
    fn drop(&mut self) {
        let mut state = self.clock.state();
        if state.0 == Phase::Sending {
            state.0 = Phase::Flushing; // the time goes on
        }
    }
}

/// A stream that records what the connection is doing.
pub struct TimedStream<S> {
    stream: S,
    clock: Arc<ConnectionClock>,
}

impl<S> TimedStream<S> {
    /// Wraps a stream.
    pub fn new(stream: S, clock: &Arc<ConnectionClock>) -> Self {
        Self { stream, clock: Arc::clone(clock) }
    }

    /// Returns the stream itself.
    pub fn get_ref(&self) -> &S {
        &self.stream
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for TimedStream<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        let outcome = Pin::new(&mut this.stream).poll_read(context, buffer);
        if buffer.filled().len() > before {
            this.clock.pass(Phase::Idle, Phase::Head);
        }
        outcome
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TimedStream<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    /// hyper flushes when it has written everything that it holds.
    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let this = self.get_mut();
        ready!(Pin::new(&mut this.stream).poll_flush(context))?;
        this.clock.pass(Phase::Flushing, Phase::Idle);
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: HttpLimits = HttpLimits {
        requests: 1,
        connections: 1,
        head: Duration::from_secs(10),
        idle: Duration::from_secs(120),
    };

    #[test]
    fn each_phase_has_its_timeout() {
        let (clock, start) = (ConnectionClock::new(), Timestamp::now());
        let after = |seconds: u64| clock.remaining(start.plus(Duration::from_secs(seconds)), &LIMITS).err();
        assert_eq!((after(9), after(11)), (None, Some("request head timed out")));
        clock.enter(Phase::Handling);
        assert_eq!(after(10_000), None);
        clock.enter(Phase::Sending);
        assert_eq!((after(119), after(121)), (None, Some("response timed out: the client reads too slowly")));
        clock.enter(Phase::Idle);
        assert_eq!((after(119), after(121)), (None, Some("idle connection timed out")));
        let short = HttpLimits { idle: Duration::from_secs(1), ..LIMITS };
        clock.enter(Phase::Sending);
        assert!(clock.remaining(start.plus(RESPONSE_TIMEOUT / 2), &short).is_ok(), "at least 30 s");
    }

    #[test]
    fn body_holds_its_permit_until_its_last_piece_is_taken() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let (clock, held) = (ConnectionClock::new(), Arc::new(()));
            let text: Vec<u8> = (0..100_000_u32).map(|number| number as u8).collect();
            let body = clock.send(Body::from(text.clone()), Arc::clone(&held));
            assert_eq!(clock.state().0, Phase::Sending);
            let (mut got, mut pieces) = (Vec::new(), body.into_data_stream());
            while let Some(piece) = pieces.next().await {
                let piece = piece.unwrap();
                assert!(piece.len() <= CHUNK_BYTES && Arc::strong_count(&held) == 2);
                got.extend_from_slice(&piece);
            }
            drop(pieces);
            assert!(got == text);
            assert_eq!((clock.state().0, Arc::strong_count(&held)), (Phase::Flushing, 1));
        });
    }
}
