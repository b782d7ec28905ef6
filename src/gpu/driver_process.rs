//! The NVML process: memledger, started by itself with a hidden verb, and the only process that loads the driver's library.
//!
//! The library may hang for ever when a GPU falls off the bus, or crash, or grow. memledger then kills the process and
//! starts another. The process ends with memledger, by its death signal and by the end of the socket.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::nvml::{Session, library};
use super::protocol::{Channel, ChannelError, DriverVersions, Request, Response};
use crate::clock::Timestamp;
use crate::host::Waker;
use crate::text::error_chain;

/// The hidden verb of the NVML process.
pub const VERB: &str = "nvml-process";
/// How long to wait for the end of a killed process. One that waits in the kernel for a device does not end.
const KILL_TIMEOUT: Duration = Duration::from_secs(1);
/// How often the end is checked where the kernel has no pidfds.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// Why no further request makes sense.
#[derive(Debug)]
pub enum QueryError {
    /// There is no library or no driver.
    OpenFailed(String),
    /// The whole driver has failed.
    DriverFailed(String),
    /// The process has failed, or memledger wants something else.
    Channel(ChannelError),
}

impl From<ChannelError> for QueryError {
    fn from(error: ChannelError) -> Self {
        Self::Channel(error)
    }
}

/// A running NVML process. It is killed when this is dropped.
#[derive(Debug)]
pub struct DriverProcess {
    /// `None` after [`DriverProcess::kill`].
    child: Option<Child>,
    channel: Channel,
}

impl Drop for DriverProcess {
    fn drop(&mut self) {
        if let Err(child) = self.end() {
            tracing::error!(pid = child.id(), "the NVML process cannot be killed; leaving it");
        }
    }
}

impl DriverProcess {
    /// Starts the process. It ends when the calling thread ends.
    ///
    /// # Errors
    /// The kernel refuses another process or socket.
    pub fn start() -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        // the running program, also after its file was replaced
        let mut command = Command::new("/proc/self/exe");
        command.arg0("memledger").arg(VERB).stdin(OwnedFd::from(theirs)).stdout(Stdio::null());
        Ok(Self { child: Some(command.spawn()?), channel: Channel::new(ours) })
    }

    /// Loads and initialises the library.
    ///
    /// # Errors
    /// As the variants of [`QueryError`].
    pub fn open(
        &mut self,
        library: Option<&Path>,
        deadline: Timestamp,
        waker: Option<&Waker>,
    ) -> Result<DriverVersions, QueryError> {
        self.channel.send(&Request::Open { library: library.map(Path::to_path_buf) })?;
        match self.receive(deadline, waker)? {
            Response::Opened(versions) => Ok(versions),
            Response::OpenFailed(error) => Err(QueryError::OpenFailed(error)),
            _ => Err(ChannelError::Invalid("another response").into()),
        }
    }

    /// Sends a request.
    ///
    /// # Errors
    /// As [`Channel::send`].
    pub fn send(&mut self, request: &Request) -> Result<(), ChannelError> {
        self.channel.send(request)
    }

    /// Receives the response to the last request.
    ///
    /// # Errors
    /// As [`Channel::receive`].
    pub fn receive(&mut self, deadline: Timestamp, waker: Option<&Waker>) -> Result<Response, ChannelError> {
        self.channel.receive(Some(deadline), waker)
    }

    /// Waits between two requests.
    ///
    /// # Errors
    /// As [`Channel::idle`].
    pub fn idle(&mut self, duration: Duration, waker: &Waker) -> Result<(), ChannelError> {
        self.channel.idle(duration, waker)
    }

    /// Lets the process shut the library down, until the deadline. It must be idle.
    pub fn close(&mut self, deadline: Timestamp) {
        if self.channel.send(&Request::Close).is_ok() {
            let closed = self.receive(deadline, None);
            tracing::debug!(?closed, "closed the GPU driver");
        }
    }

    /// Kills the process.
    ///
    /// # Errors
    /// It does not end: returns it, to be waited for later.
    pub fn kill(mut self) -> Result<Option<ExitStatus>, Child> {
        self.end()
    }

    fn end(&mut self) -> Result<Option<ExitStatus>, Child> {
        let Some(mut child) = self.child.take() else { return Ok(None) };
        let _ = child.kill(); // an error means that it has ended
        wait_until_ended(&mut child, KILL_TIMEOUT).map(Some).ok_or(child)
    }
}

/// Returns the status of a process that ends within `timeout`.
fn wait_until_ended(child: &mut Child, timeout: Duration) -> Option<ExitStatus> {
    let until = Timestamp::now().plus(timeout);
    let pidfd = pidfd_open(Pid::from_child(child), PidfdFlags::empty()).ok();
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        let rest = until.since(Timestamp::now());
        if rest.is_zero() {
            return None;
        }
        match &pidfd {
            Some(pidfd) => {
                let timeout = Timespec::try_from(rest).ok();
                let _ = poll(&mut [PollFd::new(pidfd, PollFlags::IN)], timeout.as_ref());
            }
            None => std::thread::park_timeout(CHECK_INTERVAL.min(rest)),
        }
    }
}

/// Serves requests from this socket, until the library cannot be used any more or memledger has ended.
///
/// # Errors
/// memledger has ended, or the socket failed.
pub fn serve_requests(stream: UnixStream) -> Result<(), ChannelError> {
    let mut channel = Channel::new(stream);
    let Request::Open { library } = channel.receive(None, None)? else {
        return Err(ChannelError::Invalid("no library was opened"));
    };
    let nvml = match library::open(library.as_deref()) {
        Ok(nvml) => nvml,
        Err(error) => return channel.send(&Response::OpenFailed(error_chain(&error))),
    };
    let mut session = Session::new(&nvml);
    channel.send(&Response::Opened(session.versions()))?;
    loop {
        let response = match channel.receive(None, None)? {
            Request::Open { .. } => return Err(ChannelError::Invalid("the library is open")),
            Request::Read => session.read().map(Response::Reading),
            Request::Sample => session.sample_memory().map(Response::Sample),
            Request::Close => break,
        };
        let xids = session.take_xids();
        channel.send(&match response {
            Ok(Response::Reading(reading)) => {
                Response::Reading(super::protocol::DriverReading { xids, ..reading })
            }
            Ok(Response::Sample(sample)) => {
                Response::Sample(super::protocol::DriverSample { xids, ..sample })
            }
            Ok(other) => other,
            Err(error) => Response::Failed { error: error_chain(&error), xids },
        })?;
    }
    drop(session);
    if let Err(error) = nvml.shutdown() {
        tracing::debug!(error = %error_chain(&error), "shutting the GPU driver down failed");
    }
    channel.send(&Response::Closed)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::process::{WaitId, WaitIdOptions, waitid};

    use super::*;

    #[test]
    fn dropped_process_is_killed_and_reaped() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        let state = || waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
        let process = DriverProcess { child: Some(child), channel: Channel::new(ours) };
        assert!(state().unwrap().is_none(), "it runs");
        drop(process);
        assert_eq!(state().err(), Some(rustix::io::Errno::CHILD), "reaped");
    }
}
