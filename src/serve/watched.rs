//! A stream that tells its connection's pulse what moves.

use std::io::Result;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::frames::Frames;
use super::pulse::Pulse;
use crate::clock::Moment;

/// What is left of a connection when HTTP has ended on it: the kernel may have to send some of its answers.
pub type Left = Arc<Mutex<Option<std::net::TcpStream>>>;

/// A connection as the kernel has it. One that was cut ends with a reset, and the kernel forgets what it had to send.
pub struct Socket {
    stream: TcpStream,
    pulse: Arc<Pulse>,
    left: Option<Left>,
}

impl Socket {
    /// This stream, which is left there when it is not used any more.
    pub fn new(stream: TcpStream, pulse: Arc<Pulse>, left: &Left) -> Self {
        Self { stream, pulse, left: Some(Arc::clone(left)) }
    }

    /// What was left there.
    pub fn again(left: &Left, pulse: Arc<Pulse>) -> Option<Self> {
        let stream = left.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        Some(Self { stream: TcpStream::from_std(stream).ok()?, pulse, left: None })
    }

    /// True once both sides have closed and nothing is left to be sent: the kernel has forgotten the other side then.
    pub fn has_ended(&self) -> bool {
        self.stream.peer_addr().is_err()
    }

    /// What has come, without taking it.
    pub async fn peek(&self, buffer: &mut [u8]) -> Result<usize> {
        self.stream.peek(buffer).await
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if self.pulse.is_cut() {
            let _ = self.stream.set_zero_linger();
        } else if let Some(left) = &self.left {
            // where no file can be opened any more, the kernel has its own time for it
            let again = self.stream.as_fd().try_clone_to_owned().ok();
            *left.lock().unwrap_or_else(PoisonError::into_inner) = again.map(Into::into);
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[std::io::IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

/// The stream.
pub struct Watched<S> {
    stream: S,
    pulse: Arc<Pulse>,
    /// Cuts what comes, in HTTP/2.
    frames: Option<Frames>,
}

impl<S> Watched<S> {
    /// A stream of HTTP/1.
    pub fn one(stream: S, pulse: Arc<Pulse>) -> Self {
        pulse.speaks(true, Moment::now());
        Self { stream, pulse, frames: None }
    }

    /// A stream of HTTP/2.
    pub fn two(stream: S, pulse: Arc<Pulse>) -> Self {
        pulse.speaks(false, Moment::now());
        Self { stream, pulse, frames: Some(Frames::default()) }
    }

    fn wrote(&self, outcome: Poll<Result<usize>>) -> Poll<Result<usize>> {
        if matches!(outcome, Poll::Ready(Ok(length)) if length > 0) {
            self.pulse.went(Moment::now());
        }
        outcome
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        let outcome = Pin::new(&mut this.stream).poll_read(context, buffer);
        let new = &buffer.filled()[before..];
        match &mut this.frames {
            _ if new.is_empty() => {}
            None => this.pulse.came(Moment::now()),
            Some(frames) => {
                frames.take(new);
                this.pulse.came_in_frames(frames.are_whole(), Moment::now());
            }
        }
        outcome
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.wrote(outcome)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[std::io::IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.stream).poll_write_vectored(context, slices);
        this.wrote(outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    /// hyper comes here when it has written all that it holds.
    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let this = self.get_mut();
        let outcome = Pin::new(&mut this.stream).poll_flush(context);
        if let Poll::Ready(Ok(())) = outcome {
            this.pulse.flushed();
        }
        outcome
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}
