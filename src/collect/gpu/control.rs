//! What others may ask of the thread that has the driver, and what it tells them.
//!
//! Letting go is for maintenance: nobody can unload or replace a driver that a program has open. It is asked for by
//! `POST /-/release-gpu` or SIGUSR1. The library is shut down and closed, the GPU families vanish, and after a while
//! memledger opens it again by itself.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::probe::Probe;
use crate::clock::Moment;

/// Where the request, the thread that has the driver, and the cycle meet.
#[derive(Debug, Default)]
pub struct Control {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    until: Option<Moment>,
    /// Copies of the library that are open, or that are just being opened or closed.
    open: usize,
    /// Counts requests, so that a wait ends at each.
    requests: u64,
    told: Option<Result<Probe, String>>,
}

impl Control {
    /// The driver is to be let go for so long from now on; for no time at all: memledger may open it again at once.
    pub fn request(&self, now: Moment, span: Duration) {
        let mut state = self.lock();
        state.until = Some(now.plus(span));
        state.requests += 1;
        self.changed.notify_all();
    }

    /// How long the driver is still to be left alone; `None` if it is not.
    pub fn remaining(&self, now: Moment) -> Option<Duration> {
        let left = self.lock().until?.since(now);
        (!left.is_zero()).then_some(left)
    }

    /// True once no copy of the library is open.
    pub fn is_closed(&self) -> bool {
        self.lock().open == 0
    }

    /// What the newest opening of the library led to: the first reading after it, or why there is none. `None` before
    /// the first.
    pub fn told(&self) -> Option<Result<Probe, String>> {
        self.lock().told.clone()
    }

    /// The library was opened and read, or why it was not.
    pub(super) fn tell(&self, told: Result<Probe, String>) {
        self.lock().told = Some(told);
    }

    /// Waits so long, or until a request comes.
    pub(super) fn wait(&self, span: Duration) {
        let state = self.lock();
        let known = state.requests;
        drop(self.changed.wait_timeout_while(state, span, |state| state.requests == known));
    }

    /// A copy of the library is about to be opened.
    pub(super) fn opening(&self) {
        self.lock().open += 1;
    }

    /// It is closed again, or was not opened.
    pub(super) fn closed(&self) {
        let mut state = self.lock();
        state.open = state.open.saturating_sub(1);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
