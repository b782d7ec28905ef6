//! Wakes a thread that waits in poll(2) for this and other file descriptors.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// An eventfd that any thread can signal and one thread waits for.
#[derive(Debug)]
pub struct Waker(Option<OwnedFd>);

impl Waker {
    /// Creates a waker that is not signalled. If no descriptor is available it never wakes anyone, and the waiting
    /// thread continues at its next deadline.
    pub fn new() -> Self {
        Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok())
    }

    /// Wakes the waiting thread.
    pub fn wake(&self) {
        if let Some(fd) = &self.0 {
            let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
        }
    }

    /// Waits for the signal, at most for this time.
    pub fn wait(&self, timeout: Duration) {
        let mut polled: Vec<_> = self.0.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let timeout = Timespec::try_from(timeout).ok();
        let _ = poll(&mut polled, timeout.as_ref()); // an error or a signal only shortens the wait
    }

    /// Clears the signal.
    pub fn reset(&self) {
        if let Some(fd) = &self.0 {
            let _ = rustix::io::read(fd, &mut [0_u8; 8]);
        }
    }

    /// Returns the descriptor for poll(2).
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.as_ref().map(AsFd::as_fd)
    }
}

impl Default for Waker {
    fn default() -> Self {
        Self::new()
    }
}
