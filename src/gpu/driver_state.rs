//! State that is shared with the thread that supervises the NVML process: its output, release requests, the result of opening
//! the driver, and how often the process was replaced.
//!
//! Releasing the driver is for maintenance: a driver cannot be unloaded or replaced while a program has it open.
//! `memledger release-gpu`, `POST /-/release-gpu` or SIGUSR1 requests a release. memledger then ends the NVML process, the GPU
//! families become absent, and after a configured time memledger starts another.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::probe::NvmlProbe;
use super::reader_output::SharedOutput;
use crate::catalog::{GPU_DRIVER_PROCESS_RESTARTS, GPU_UNKILLABLE_DRIVER_PROCESSES};
use crate::clock::Timestamp;
use crate::host::Waker;
use crate::series::Series;

/// Why an NVML process was replaced, in the label `reason`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// It ended by itself or by a signal.
    Ended,
    /// It did not respond in time.
    TimedOut,
    /// It sent something that is no response.
    Invalid,
    /// It reported that the whole driver has failed.
    Driver,
}

/// The labels of [`FailureKind`], in its order.
const FAILURES: [&str; 4] = ["ended", "timeout", "invalid_message", "driver"];

/// The state that requests, the supervising thread and the cycle share.
#[derive(Debug, Default)]
pub struct DriverState {
    /// What the thread has read.
    pub output: SharedOutput,
    state: Mutex<ProcessState>,
    waker: Waker,
}

#[derive(Debug, Default)]
struct ProcessState {
    until: Option<Timestamp>,
    is_stopping: bool,
    /// NVML processes that run, including those that cannot be killed.
    running: usize,
    unkillable: usize,
    /// Whether this host should have a driver.
    is_expected: bool,
    restarts: [u64; FAILURES.len()],
    probe_result: Option<Result<NvmlProbe, String>>,
}

impl DriverState {
    /// Requests that the driver be released for this time.
    pub fn request(&self, now: Timestamp, duration: Duration) {
        self.lock().until = Some(now.plus(duration));
        self.waker.wake();
    }

    /// Requests that the NVML process be ended now, and no other be started.
    pub fn stop(&self) {
        self.lock().is_stopping = true;
        self.waker.wake();
    }

    /// Returns the time until the driver may be opened again; `None` if it is not released.
    pub fn remaining(&self, now: Timestamp) -> Option<Duration> {
        let left = self.lock().until?.since(now);
        (!left.is_zero()).then_some(left)
    }

    /// Returns true while no NVML process runs.
    pub fn is_closed(&self) -> bool {
        self.lock().running == 0
    }

    /// Returns the result of opening the library last: the newest reading, or the error. `None` before the first
    /// attempt.
    pub fn probe_result(&self) -> Option<Result<NvmlProbe, String>> {
        self.lock().probe_result.clone()
    }

    /// Writes how often the NVML process was replaced, and how many cannot be killed; nothing on a host without a driver.
    pub fn write(&self, now: Timestamp, series: &mut Series) {
        if let Some(remaining) = self.remaining(now) {
            series.global(crate::catalog::GPU_RELEASE_REMAINING, [], remaining.as_secs_f64());
        }
        let state = self.lock();
        if state.is_expected || state.restarts.iter().any(|count| *count > 0) {
            for (reason, count) in FAILURES.into_iter().zip(state.restarts) {
                series.global(GPU_DRIVER_PROCESS_RESTARTS, [reason.into()], count as f64);
            }
            series.global(GPU_UNKILLABLE_DRIVER_PROCESSES, [], state.unkillable as f64);
        }
    }

    /// Records that this host should have a driver, so that the counters begin at 0.
    pub fn expect_driver(&self) {
        self.lock().is_expected = true;
    }

    /// Records the result of opening and reading the library.
    pub(super) fn set_probe_result(&self, probe_result: Result<NvmlProbe, String>) {
        let mut state = self.lock();
        state.is_expected |= probe_result.is_ok();
        state.probe_result = Some(probe_result);
    }

    /// Counts a process that failed.
    pub(super) fn count_restart(&self, kind: FailureKind) {
        self.lock().restarts[kind as usize] += 1;
    }

    /// Records the number of processes: of those that run, and of those among them that cannot be killed.
    pub(super) fn set_processes(&self, running: usize, unkillable: usize) {
        let mut state = self.lock();
        (state.running, state.unkillable) = (running, unkillable);
    }

    /// Returns true once memledger stops.
    pub(super) fn is_stopping(&self) -> bool {
        self.lock().is_stopping
    }

    /// Returns the waker that each request signals.
    pub(super) fn waker(&self) -> &Waker {
        &self.waker
    }

    fn lock(&self) -> MutexGuard<'_, ProcessState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
