//! A stream that ends by itself when its client is too slow.
//!
//! Two clocks. The head of a request must be there within a time of its first byte, and the first head within that time of
//! the connection; and when nothing moves in either direction, and no answer is being made, the connection ends. hyper's own
//! timeout of heads cannot tell the first from a pause between two requests, which scrapers make.

use std::future::Future;
use std::io::{Error, ErrorKind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// Requests of a connection.
#[derive(Debug, Default)]
pub struct Pulse {
    begun: AtomicUsize,
    done: AtomicUsize,
}

impl Pulse {
    /// A request's head is complete. Its answer is made while the returned value lives.
    pub fn begin(self: &Arc<Self>) -> Busy {
        self.begun.fetch_add(1, Ordering::Relaxed);
        Busy(Arc::clone(self))
    }

    fn is_busy(&self) -> bool {
        self.begun.load(Ordering::Relaxed) != self.done.load(Ordering::Relaxed)
    }
}

/// An answer is being made.
#[derive(Debug)]
pub struct Busy(Arc<Pulse>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.done.fetch_add(1, Ordering::Relaxed);
    }
}

/// The stream.
pub struct Watched<S> {
    stream: S,
    pulse: Arc<Pulse>,
    /// Time of a head, where heads can be told.
    head: Option<Duration>,
    idle: Duration,
    /// Runs while a head is awaited of which the first byte came, or the first head.
    of_head: Option<Pin<Box<Sleep>>>,
    /// Rings in turns, so that one on which nothing moves ends after one turn to two.
    of_idle: Option<Pin<Box<Sleep>>>,
    /// Something moved in this turn.
    moved: bool,
    /// Requests that had begun when the head began.
    seen: usize,
}

impl<S> Watched<S> {
    /// Watches a stream whose requests have this pulse.
    pub fn new(stream: S, pulse: Arc<Pulse>, head: Option<Duration>, idle: Duration) -> Self {
        let of_head = head.map(|head| Box::pin(sleep(head)));
        Self { stream, pulse, head, idle, of_head, of_idle: None, moved: false, seen: 0 }
    }

    /// Nothing can be read or written now; an error if that has lasted too long.
    fn waits(&mut self, context: &mut Context<'_>) -> Poll<Error> {
        self.heads(false);
        if let Some(timer) = &mut self.of_head {
            ready!(timer.as_mut().poll(context));
            return Poll::Ready(Error::new(ErrorKind::TimedOut, "the head of a request took too long"));
        }
        loop {
            let timer = self.of_idle.get_or_insert_with(|| Box::pin(sleep(self.idle)));
            ready!(timer.as_mut().poll(context));
            self.of_idle = None;
            if !std::mem::take(&mut self.moved) && !self.pulse.is_busy() {
                return Poll::Ready(Error::new(ErrorKind::TimedOut, "nothing moved for too long"));
            }
        }
    }

    /// Looks whether a head is complete, or has begun.
    fn heads(&mut self, has_come: bool) {
        let begun = self.pulse.begun.load(Ordering::Relaxed);
        if begun != self.seen {
            self.seen = begun;
            self.of_head = None;
        }
        if let (true, None, Some(head)) = (has_come, &self.of_head, self.head) {
            self.of_head = Some(Box::pin(sleep(head)));
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let this = self.get_mut();
        this.heads(false);
        let before = buffer.filled().len();
        match Pin::new(&mut this.stream).poll_read(context, buffer) {
            Poll::Ready(outcome) => {
                this.moved = true;
                this.heads(buffer.filled().len() > before);
                Poll::Ready(outcome)
            }
            Poll::Pending => this.waits(context).map(Err),
        }
    }
}

impl<S: AsyncWrite + Unpin> Watched<S> {
    /// What a write came to; one that cannot go on is a pause too.
    fn wrote<T>(
        &mut self,
        context: &mut Context<'_>,
        outcome: Poll<std::io::Result<T>>,
    ) -> Poll<std::io::Result<T>> {
        match outcome {
            Poll::Ready(outcome) => {
                self.moved = true;
                Poll::Ready(outcome)
            }
            Poll::Pending => self.waits(context).map(Err),
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.wrote(context, outcome)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.stream).poll_write_vectored(context, slices);
        this.wrote(context, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        let this = self.get_mut();
        match Pin::new(&mut this.stream).poll_flush(context) {
            // nothing may have been left to flush: this is no movement
            Poll::Ready(outcome) => Poll::Ready(outcome),
            Poll::Pending => this.waits(context).map(Err),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.stream).poll_shutdown(context);
        this.wrote(context, outcome)
    }
}
