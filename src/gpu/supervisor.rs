//! The thread that supervises the NVML process: it starts the process, requests readings, and kills and replaces it when it
//! fails. It is the only place that does so.
//!
//! Nothing waits for this thread or for the process: the cycle takes the newest finished reading.
//!
//! The process ends when the thread that started it ends, so this thread lives as long as memledger.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Child;
use std::sync::Arc;
use std::time::Duration;

use super::assembler::{Assembler, RequestStart};
use super::driver_process::{DriverProcess, QueryError};
use super::driver_state::{DriverState, FailureKind};
use super::probe::NvmlProbe;
use super::protocol::{ChannelError, Request, Response};
use crate::clock::Timestamp;
use crate::config::GpuSettings;
use crate::host::panics::run_essential;
use crate::host::{Backoff, HostPaths};

/// The first and the longest pause before another process is started; it doubles after each failure. A shorter reading
/// interval shortens the first one.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// A process has this multiple of `--gpu.deadline` for its first reading: without persistence mode the driver initialises
/// each GPU first, which takes seconds.
pub const FIRST_READING_FACTOR: u32 = 12;
/// Time for a call in progress, and for the shutdown of the library, before the process is killed.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);
/// The pause after a memory sample is at least this multiple of its duration, however short the sampling interval is.
const PAUSE_FACTOR: u32 = 4;

/// Starts the thread. It ends with memledger.
pub fn start(settings: GpuSettings, host_paths: HostPaths, cgroup_v1: bool, driver_state: Arc<DriverState>) {
    driver_state.output.lock().started = Timestamp::now();
    let mut task = Task {
        backoff: Backoff::new(settings.interval.min(BACKOFF.0), BACKOFF.1),
        worked_since: None,
        assembler: Assembler::new(host_paths.clone(), cgroup_v1, settings.interval + settings.deadline),
        settings,
        host_paths,
        driver_state,
        unkillable: None,
        logged_error: String::new(),
    };
    let run = move || {
        while !task.driver_state.is_stopping() {
            // a bug must not end the thread, whose end ends the process
            if catch_unwind(AssertUnwindSafe(|| task.run_process())).is_err() {
                task.log_end(&SessionEnd::Panicked);
                task.wait(BACKOFF.1);
            }
        }
    };
    let thread = std::thread::Builder::new().name("nvml".into());
    if let Err(error) = thread.spawn(move || run_essential("nvml", run)) {
        tracing::warn!(%error, "starting the thread that supervises the GPU driver failed");
    }
}

/// Why a process is no longer used.
#[derive(Debug)]
enum SessionEnd {
    /// The driver is released, or memledger stops.
    Released,
    /// There is no library or no driver.
    OpenFailed(String),
    /// The whole driver has failed.
    DriverFailed(String),
    /// The process has failed.
    ProcessFailed(FailureKind, String),
    /// A bug in memledger.
    Panicked,
}

impl From<QueryError> for SessionEnd {
    fn from(error: QueryError) -> Self {
        let kind = match &error {
            QueryError::OpenFailed(_) | QueryError::DriverFailed(_) => FailureKind::Driver,
            QueryError::Channel(ChannelError::TimedOut) => FailureKind::TimedOut,
            QueryError::Channel(ChannelError::Invalid(_)) => FailureKind::Invalid,
            QueryError::Channel(_) => FailureKind::Ended,
        };
        match error {
            QueryError::OpenFailed(text) => Self::OpenFailed(text),
            QueryError::DriverFailed(text) => Self::DriverFailed(text),
            QueryError::Channel(error) => Self::ProcessFailed(kind, error.to_string()),
        }
    }
}

/// The state of the thread.
struct Task {
    settings: GpuSettings,
    host_paths: HostPaths,
    driver_state: Arc<DriverState>,
    assembler: Assembler,
    backoff: Backoff,
    /// When the current process gave its first reading.
    worked_since: Option<Timestamp>,
    /// The process that was killed and has not ended; while there is one, no other is started.
    unkillable: Option<Child>,
    logged_error: String,
}

impl Task {
    /// Runs one process from its start to its end, or waits until one may be started.
    fn run_process(&mut self) {
        if let Some(rest) = self.driver_state.remaining(Timestamp::now()) {
            self.driver_state.output.lock().discard_readings(false);
            // a cycle may run between the end of the release and the end of the wait
            self.restart_grace_period(Timestamp::now().plus(rest));
            self.wait(rest);
            self.restart_grace_period(Timestamp::now());
            return;
        }
        self.count_processes(false);
        if self.unkillable.is_some() {
            return self.wait(BACKOFF.0);
        }
        self.worked_since = None;
        let mut process = match DriverProcess::start() {
            Ok(process) => process,
            Err(error) => {
                let text = format!("the NVML process cannot be started: {error}");
                self.log_end(&SessionEnd::OpenFailed(text));
                let pause = self.backoff.delay();
                return self.wait(pause);
            }
        };
        self.count_processes(true);
        let end = match catch_unwind(AssertUnwindSafe(|| self.read_until(&mut process))) {
            Ok(Ok(never)) => match never {},
            Ok(Err(end)) => end,
            Err(_) => SessionEnd::Panicked,
        };
        if matches!(end, SessionEnd::Released | SessionEnd::DriverFailed(_))
            && !self.driver_state.is_stopping()
        {
            process.close(Timestamp::now().plus(CLOSE_TIMEOUT));
        }
        let status = match process.kill() {
            Ok(status) => status,
            Err(child) => {
                tracing::error!(pid = child.id(), "the NVML process cannot be killed; leaving it");
                self.unkillable = Some(child);
                None
            }
        };
        tracing::debug!(?status, "the NVML process has ended");
        if matches!(end, SessionEnd::Released) {
            self.restart_grace_period(Timestamp::now()); // no failure either before `is_closed`
        }
        self.driver_state.output.lock().discard_readings(!matches!(end, SessionEnd::Released));
        self.count_processes(false);
        self.log_end(&end);
        if !matches!(end, SessionEnd::Released) {
            // a hang before the first reading is no work, however long it lasts
            let worked = self.worked_since.map_or(Duration::ZERO, |since| Timestamp::now().since(since));
            self.backoff.reset_if_stable(worked);
            let pause = match end {
                SessionEnd::Panicked => BACKOFF.1,
                _ => self.backoff.delay(),
            };
            self.wait(pause);
        }
    }

    /// Opens the driver and reads it at every interval, until the process is no longer used.
    fn read_until(&mut self, process: &mut DriverProcess) -> Result<std::convert::Infallible, SessionEnd> {
        let settings = self.settings.clone();
        let first_deadline = Timestamp::now().plus(settings.deadline * FIRST_READING_FACTOR);
        let opened = self.retry_when_woken(first_deadline, |deadline, release| {
            process.open(settings.library.as_deref(), deadline, Some(release.waker()))
        })?;
        tracing::info!("GPU driver opened");
        self.assembler.begin_session(opened);
        let mut next_full = Timestamp::now();
        let mut is_first = true;
        loop {
            if self.is_released() {
                return Err(SessionEnd::Released);
            }
            let began = Timestamp::now();
            let is_full = began >= next_full;
            let deadline = if is_first { first_deadline } else { began.plus(settings.deadline) };
            self.query(process, is_full, deadline)?;
            is_first = false;
            let ended = Timestamp::now();
            self.worked_since.get_or_insert(ended);
            if is_full {
                next_full = began.plus(settings.interval).max(ended.plus(settings.interval / 4));
            }
            let pause = ended.since(began) * PAUSE_FACTOR;
            let next_sample = began.plus(settings.sample_interval).max(ended.plus(pause));
            let next =
                if settings.sample_interval.is_zero() { next_full } else { next_full.min(next_sample) };
            match process.idle(next.since(Timestamp::now()), self.driver_state.waker()) {
                Err(ChannelError::Woken) => self.driver_state.waker().reset(),
                other => other.map_err(QueryError::from)?,
            }
        }
    }

    /// Requests one reading or sample, and publishes it.
    fn query(
        &mut self,
        process: &mut DriverProcess,
        is_full: bool,
        deadline: Timestamp,
    ) -> Result<(), SessionEnd> {
        let began = RequestStart::now(&self.host_paths);
        let _span = is_full.then(|| tracing::info_span!("nvml reading").entered()); // samples are five times as many
        let request = if is_full { Request::Read } else { Request::Sample };
        process.send(&request).map_err(QueryError::from)?;
        let response = self.retry_when_woken(deadline, |deadline, release| {
            Ok(process.receive(deadline, Some(release.waker()))?)
        })?;
        match response {
            Response::Reading(raw) if is_full => {
                let invalid = || ChannelError::Invalid("a reading that contradicts itself");
                let completed = self.assembler.reading(began, raw);
                let (reading, sample) = completed.ok_or_else(|| QueryError::from(invalid()))?;
                self.driver_state.set_probe_result(Ok(NvmlProbe::of(&reading)));
                self.driver_state.output.lock().publish(Some(Arc::new(reading)), sample);
            }
            Response::Sample(raw) if !is_full => {
                let sample = self.assembler.sample(began, raw);
                self.driver_state.output.lock().publish(None, sample);
            }
            Response::Failed { error, xids } => {
                self.assembler.count_xids(&xids);
                return Err(SessionEnd::DriverFailed(error));
            }
            _ => return Err(QueryError::from(ChannelError::Invalid("another response")).into()),
        }
        Ok(())
    }

    /// Receives a response. A release gives it little time, and a stop none.
    fn retry_when_woken<T>(
        &self,
        deadline: Timestamp,
        mut receive: impl FnMut(Timestamp, &DriverState) -> Result<T, QueryError>,
    ) -> Result<T, SessionEnd> {
        let mut deadline = deadline;
        loop {
            let is_released = self.is_released();
            if is_released {
                deadline = deadline.min(Timestamp::now().plus(CLOSE_TIMEOUT));
            }
            match receive(deadline, &self.driver_state) {
                Err(QueryError::Channel(ChannelError::Woken)) => self.driver_state.waker().reset(),
                Err(_) if is_released => return Err(SessionEnd::Released),
                other => return Ok(other?),
            }
            if self.driver_state.is_stopping() {
                return Err(SessionEnd::Released);
            }
        }
    }

    fn is_released(&self) -> bool {
        self.driver_state.is_stopping() || self.driver_state.remaining(Timestamp::now()).is_some()
    }

    /// Restarts the grace period for the first reading at `at`.
    fn restart_grace_period(&self, at: Timestamp) {
        let mut output = self.driver_state.output.lock();
        (output.has_answered, output.started) = (false, at);
    }

    /// Reaps processes that have ended at last, and publishes the numbers. `with_current`: a process runs beside them.
    fn count_processes(&mut self, with_current: bool) {
        self.unkillable.take_if(|child| matches!(child.try_wait(), Ok(Some(_))));
        let unkillable = usize::from(self.unkillable.is_some());
        self.driver_state.set_processes(unkillable + usize::from(with_current), unkillable);
    }

    /// Waits, or until a request.
    fn wait(&self, duration: Duration) {
        let waker = self.driver_state.waker();
        waker.wait(duration);
        waker.reset();
    }

    fn log_end(&mut self, end: &SessionEnd) {
        match end {
            SessionEnd::Released => tracing::info!("GPU driver released on request"),
            SessionEnd::OpenFailed(text) => {
                self.driver_state.set_probe_result(Err(text.clone()));
                if *text != self.logged_error {
                    tracing::info!(reason = %text, "no GPU driver; exporting the memory of the host and its containers without GPUs");
                    self.logged_error.clone_from(text);
                }
                return;
            }
            SessionEnd::DriverFailed(error) => {
                tracing::warn!(%error, "GPU driver failed; reopening it");
                self.driver_state.count_restart(FailureKind::Driver);
                self.driver_state.output.lock().count_errors(["io"]);
            }
            SessionEnd::ProcessFailed(kind, error) => {
                tracing::warn!(?kind, %error, "the NVML process failed; starting another");
                self.driver_state.count_restart(*kind);
                let text = format!("the NVML process failed: {error}");
                self.driver_state.set_probe_result(Err(text));
            }
            SessionEnd::Panicked => {
                tracing::error!("reading the GPU driver failed unexpectedly (a bug in memledger); retrying");
                self.driver_state.set_probe_result(Err("a bug in memledger".to_owned()));
            }
        }
        self.logged_error.clear();
    }
}
