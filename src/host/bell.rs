//! Wakes a thread that waits in poll(2) for files too.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

/// An eventfd: any thread may ring it, one thread waits for it among its files.
#[derive(Debug)]
pub struct Bell(Option<OwnedFd>);

impl Bell {
    /// A bell that is silent. Without descriptors to be had it stays so, and who waits finds out at its next deadline.
    pub fn new() -> Self {
        Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok())
    }

    /// Wakes the thread that waits.
    pub fn ring(&self) {
        if let Some(fd) = &self.0 {
            let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
        }
    }

    /// Makes it silent again.
    pub fn hush(&self) {
        if let Some(fd) = &self.0 {
            let _ = rustix::io::read(fd, &mut [0_u8; 8]);
        }
    }

    /// What poll(2) waits for.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.as_ref().map(AsFd::as_fd)
    }
}

impl Default for Bell {
    fn default() -> Self {
        Self::new()
    }
}
