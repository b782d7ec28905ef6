//! Messages between memledger and its NVML process, which calls the driver.
//!
//! memledger sends a [`Request`] and gets one [`Response`]. A message is a header with the protocol's version and the length,
//! then the value in postcard's format. Both sides are the same program, but the library in the NVML process may write
//! anything to its descriptors: every message has a bound, and what does not parse ends the process.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::types::GpuDevice;
use crate::clock::Timestamp;
use crate::host::{READ_ERROR_REASONS, Waker};

/// The version of the messages below, with a prefix that other text is unlikely to have.
const VERSION: u32 = 0x6d6c_0001;
/// Bytes of version and length.
const HEADER_BYTES: usize = 8;
/// Maximum length of a message without its header.
const MAX_MESSAGE_BYTES: usize = crate::host::bounds::NVML_MESSAGE.max_bytes;
/// Bytes that one read takes.
const CHUNK_BYTES: usize = 16 * 1024;

/// A request of memledger to the NVML process.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// Load and initialise this library; `None`: the driver's own. The first request.
    Open {
        /// The configured library.
        library: Option<PathBuf>,
    },
    /// Read everything.
    Read,
    /// Read memory and processes only.
    Sample,
    /// Shut the library down.
    Close,
}

/// The response to a request.
#[derive(Debug, Serialize, Deserialize)]
pub enum Response {
    /// The library is initialised.
    Opened(DriverVersions),
    /// There is no library or no driver; the text is for people.
    OpenFailed(String),
    /// A full reading.
    Reading(DriverReading),
    /// A memory sample.
    Sample(DriverSample),
    /// The whole driver has failed: the library must be opened again. The text is for people.
    Failed {
        /// The error.
        error: String,
        /// As [`DriverReading::xids`].
        xids: Vec<(Arc<str>, u64)>,
    },
    /// The library was shut down.
    Closed,
}

/// The versions of the driver.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct DriverVersions {
    /// The version of the driver.
    pub driver: Option<Arc<str>>,
    /// The CUDA version that the driver supports.
    pub cuda: Option<Arc<str>>,
}

/// A full reading of all devices. Processes have pids only: memledger finds their owners.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct DriverReading {
    /// The number of GPUs that the driver reports, without MIG instances.
    pub counted: usize,
    /// The devices that answered.
    pub devices: Vec<GpuDevice>,
    /// The UUIDs of the GPUs that are registered for Xid events.
    pub registered: Vec<Arc<str>>,
    /// The UUID and the number of each Xid since the previous response, oldest first.
    pub xids: Vec<(Arc<str>, u64)>,
    /// The number of errors by [`READ_ERROR_REASONS`].
    pub read_errors: [u32; READ_ERROR_REASONS.len()],
}

/// A memory sample of all devices.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct DriverSample {
    /// The devices that answered.
    pub devices: Vec<SampledDevice>,
    /// As [`DriverReading::xids`].
    pub xids: Vec<(Arc<str>, u64)>,
}

/// A memory sample of one device of the last full reading.
#[derive(Debug, Serialize, Deserialize)]
pub struct SampledDevice {
    /// The UUID of the GPU or MIG instance.
    pub key: Arc<str>,
    /// Used memory, without reserved memory.
    pub used: Option<u64>,
    /// Pid and bytes of each process; empty if the device does not report them.
    pub processes: Vec<(u32, Option<u64>)>,
}

/// Error of a [`Channel`].
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The other side has closed the socket, or has ended.
    #[error("the other process has ended")]
    Closed,
    /// No complete message arrived until the deadline.
    #[error("no response in time")]
    TimedOut,
    /// The waker was signalled. The call may be repeated: no data is lost.
    #[error("interrupted")]
    Woken,
    /// What arrived is not a message.
    #[error("invalid message: {0}")]
    Invalid(&'static str),
    /// The socket has failed.
    #[error("the socket failed")]
    Io(#[from] std::io::Error),
}

/// One end of the socket.
#[derive(Debug)]
pub struct Channel {
    stream: UnixStream,
    /// What was received of the next message.
    buffer: Vec<u8>,
}

impl Channel {
    /// Creates a channel. The deadlines of [`Channel::receive`] need a non-blocking stream.
    pub fn new(stream: UnixStream) -> Self {
        Self { stream, buffer: Vec::new() }
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The other side has ended, or does not receive; or it has sent more than was requested.
    pub fn send<T: Serialize>(&mut self, message: &T) -> Result<(), ChannelError> {
        if !self.buffer.is_empty() {
            return Err(ChannelError::Invalid("more than one response"));
        }
        let header = vec![0; HEADER_BYTES];
        let mut bytes =
            postcard::to_extend(message, header).map_err(|_| ChannelError::Invalid("not serializable"))?;
        let length = bytes.len() - HEADER_BYTES;
        if length > MAX_MESSAGE_BYTES {
            return Err(ChannelError::Invalid("too long"));
        }
        bytes[..4].copy_from_slice(&VERSION.to_le_bytes());
        bytes[4..HEADER_BYTES].copy_from_slice(&(length as u32).to_le_bytes());
        match self.stream.write_all(&bytes) {
            Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                Err(ChannelError::Closed)
            }
            other => Ok(other?),
        }
    }

    /// Receives a message. Without a deadline it waits for as long as the other side lives.
    ///
    /// # Errors
    /// As the variants of [`ChannelError`].
    pub fn receive<T: DeserializeOwned>(
        &mut self,
        deadline: Option<Timestamp>,
        waker: Option<&Waker>,
    ) -> Result<T, ChannelError> {
        let mut chunk = [0; CHUNK_BYTES];
        loop {
            if let Some(message) = self.take_message()? {
                return Ok(message);
            }
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(ChannelError::Closed),
                Ok(length) => self.buffer.extend_from_slice(&chunk[..length]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let rest = deadline.map(|deadline| deadline.since(Timestamp::now()));
                    self.wait(rest, waker)?;
                }
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Err(ChannelError::Closed),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits between two requests, for this time at most.
    ///
    /// # Errors
    /// [`ChannelError::Woken`], or the other side has ended or has sent something without a request.
    pub fn idle(&mut self, duration: Duration, waker: &Waker) -> Result<(), ChannelError> {
        match self.wait(Some(duration), Some(waker)) {
            Err(ChannelError::TimedOut) => Ok(()),
            Err(error) => Err(error),
            Ok(()) => match self.stream.read(&mut [0; 1]) {
                Ok(0) => Err(ChannelError::Closed),
                Ok(_) => Err(ChannelError::Invalid("a response without a request")),
                Err(error) if error.kind() == ErrorKind::ConnectionReset => Err(ChannelError::Closed),
                // a signal ended the wait
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                    Ok(())
                }
                Err(error) => Err(error.into()),
            },
        }
    }

    /// Waits until the socket is readable.
    fn wait(&self, rest: Option<Duration>, waker: Option<&Waker>) -> Result<(), ChannelError> {
        let timeout = rest.and_then(|rest| Timespec::try_from(rest).ok());
        let mut polled = vec![PollFd::from_borrowed_fd(self.stream.as_fd(), PollFlags::IN)];
        polled.extend(waker.and_then(Waker::fd).map(|waker| PollFd::from_borrowed_fd(waker, PollFlags::IN)));
        match poll(&mut polled, timeout.as_ref()) {
            Ok(0) => Err(ChannelError::TimedOut),
            Ok(_) if polled.get(1).is_some_and(|waker| !waker.revents().is_empty()) => {
                Err(ChannelError::Woken)
            }
            Ok(_) => Ok(()),
            Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(ChannelError::Io(error.into())),
        }
    }

    /// Takes a message from the buffer, if it is complete.
    fn take_message<T: DeserializeOwned>(&mut self) -> Result<Option<T>, ChannelError> {
        let Some((header, rest)) = self.buffer.split_at_checked(HEADER_BYTES) else { return Ok(None) };
        let word = |at: usize| header[at..].first_chunk().copied().map(u32::from_le_bytes);
        if word(0) != Some(VERSION) {
            return Err(ChannelError::Invalid("another version, or no message at all"));
        }
        let length = word(4).unwrap_or(u32::MAX) as usize;
        if length > MAX_MESSAGE_BYTES {
            return Err(ChannelError::Invalid("too long"));
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let (message, unread) =
            postcard::take_from_bytes(body).map_err(|_| ChannelError::Invalid("malformed"))?;
        if !unread.is_empty() {
            return Err(ChannelError::Invalid("longer than its content"));
        }
        self.buffer.drain(..HEADER_BYTES + length);
        self.buffer.shrink_to(CHUNK_BYTES * 4);
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns the two ends of a socket; the first one has deadlines.
    fn pair() -> (Channel, Channel) {
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        ours.set_nonblocking(true).expect("non-blocking");
        (Channel::new(ours), Channel::new(theirs))
    }

    fn soon() -> Option<Timestamp> {
        Some(Timestamp::now().plus(Duration::from_millis(20)))
    }

    #[test]
    fn large_message_arrives_unchanged() {
        let (mut ours, mut theirs) = pair();
        let processes: Vec<_> = (0..50_000).map(|pid| (pid, Some(u64::from(pid) << 20))).collect();
        let device = SampledDevice { key: "GPU-1".into(), used: Some(7), processes: processes.clone() };
        let sender = std::thread::spawn(move || {
            let sample = DriverSample { devices: vec![device], xids: vec![("GPU-1".into(), 79)] };
            theirs.send(&Response::Sample(sample)).map(|()| theirs)
        });
        let received = ours.receive(None, None).expect("a message");
        let Response::Sample(sample) = received else { panic!("{received:?}") };
        assert_eq!((sample.devices[0].processes.clone(), &*sample.xids[0].0), (processes, "GPU-1"));
        assert!(sender.join().expect("joined").is_ok());
        assert!(matches!(ours.receive::<Response>(None, None), Err(ChannelError::Closed)));
    }

    #[test]
    fn message_in_parts_arrives_after_a_timeout_and_a_wake() {
        let (mut ours, theirs) = pair();
        let (mut sender, mut received) = pair();
        sender.send(&Request::Sample).expect("sent");
        received.wait(None, None).expect("readable");
        let mut bytes = vec![0; 64];
        let length = received.stream.read(&mut bytes).expect("read");
        let mut theirs = theirs.stream;
        theirs.write_all(&bytes[..HEADER_BYTES]).expect("written");
        assert!(matches!(ours.receive::<Request>(soon(), None), Err(ChannelError::TimedOut)));
        let waker = Waker::new();
        waker.wake();
        assert!(matches!(ours.receive::<Request>(None, Some(&waker)), Err(ChannelError::Woken)));
        theirs.write_all(&bytes[HEADER_BYTES..length]).expect("written");
        assert!(matches!(ours.receive(None, None), Ok(Request::Sample)));
    }

    #[test]
    fn rejects_data_without_a_request_and_a_second_response() {
        let (mut ours, mut theirs) = pair();
        theirs.send(&Response::Closed).and_then(|()| theirs.send(&Response::Closed)).expect("sent");
        assert!(matches!(ours.receive(None, None), Ok(Response::Closed)));
        assert!(matches!(ours.send(&Request::Read), Err(ChannelError::Invalid(_))));
        let (mut ours, mut theirs) = pair();
        theirs.send(&Response::Closed).expect("sent");
        assert!(matches!(ours.idle(Duration::ZERO, &Waker::new()), Err(ChannelError::Invalid(_))));
    }

    #[test]
    fn message_over_the_maximum_length_is_invalid() {
        let (mut ours, theirs) = pair();
        let header = [VERSION.to_le_bytes(), (MAX_MESSAGE_BYTES as u32 + 1).to_le_bytes()].concat();
        let mut stream = theirs.stream;
        stream.write_all(&header).expect("written");
        let received = ours.receive::<Response>(None, None);
        assert!(matches!(received, Err(ChannelError::Invalid("too long"))), "{received:?}");
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_and_never_a_panic(
            has_header in any::<bool>(), garbage in prop::collection::vec(any::<u8>(), 1..300)
        ) {
            let (mut ours, theirs) = pair();
            let mut bytes = if has_header { VERSION.to_le_bytes().to_vec() } else { vec![] };
            if has_header {
                bytes.extend((garbage.len() as u32).to_le_bytes());
            }
            bytes.extend(&garbage);
            let mut stream = theirs.stream;
            stream.write_all(&bytes).expect("written");
            drop(stream);
            match ours.receive::<Response>(None, None) {
                Ok(message) => prop_assert!(has_header, "{message:?}"),
                Err(error) => prop_assert!(matches!(error, ChannelError::Invalid(_) | ChannelError::Closed)),
            }
        }
    }
}
