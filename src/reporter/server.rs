//! The thread that serves all connections of reporting processes.
//!
//! It waits in poll(2) for the listener, the connections, and the ends of their processes. A connection over its rate is not
//! polled until it may send again, so the kernel makes its sender wait; the same holds for the listener. The connections are
//! polled in rounds, because each call examines all of them; the listener is always polled, because a process has to be
//! identified before it ends. So the work per second is bounded, and grows with the connections and not with their square.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, SocketFlags, accept_with, send, sockopt};

use super::ReporterState;
use super::cleanup::{CleanupOutcome, EndedCleanup, ProcessCleanup};
use super::message::{MAX_PACKET_BYTES, Message, Sample};
use super::peer::ReportingPeer;
use super::process_reports::{ProcessReport, ProcessReportContent};
use super::stats::ReportRejection;
use crate::clock::Timestamp;
use crate::discover::Inventory;
use crate::host::bounds::{REPORTER_CONNECTIONS, REPORTER_CONNECTIONS_OF_CONTAINER};
use crate::host::{Health, HostPaths, RateLimit, unix_peer};

/// Time between two samples of a process.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);
/// Messages of one connection: per second, and at once.
const MESSAGES: (u32, u32) = (20, 100);
/// Messages that are read of a process that has ended; Linux queues fewer.
const LAST_MESSAGES: u32 = 1_000;
/// New connections: per second, and at once. Each costs some reads of `/proc`.
const ACCEPTS: (u32, u32) = (200, 400);
/// Minimum time between two rounds of the connections. What they sent waits in the kernel.
const ROUND_INTERVAL: Duration = Duration::from_millis(50);
/// Maximum wait in poll(2).
const MAX_WAIT: Duration = Duration::from_secs(10);
/// Pause after an error that would otherwise repeat at once, such as too many open files.
const ERROR_PAUSE: Duration = Duration::from_millis(200);
/// Maximum wait in poll(2) until a cycle has listed the containers.
const FIRST_CYCLE_WAIT: Duration = Duration::from_millis(100);

/// All connections.
#[derive(Debug)]
pub struct Server {
    listener: OwnedFd,
    state: Arc<ReporterState>,
    host_paths: HostPaths,
    cgroup_v1: bool,
    /// The inventory that says which container each connected process belongs to.
    inventory: Arc<Inventory>,
    /// A cycle has listed the containers. Before, no process is accepted: a container in a container would be taken for the outer one.
    has_inventory: bool,
    accepts: RateLimit,
    /// New connections are over their rate, which was counted.
    is_limited: bool,
    accept_health: Health,
    connections: HashMap<u64, ReporterConnection>,
    next: u64,
    next_round: Timestamp,
}

#[derive(Debug)]
struct ReporterConnection {
    socket: OwnedFd,
    peer: ReportingPeer,
    connected: Timestamp,
    messages: RateLimit,
    is_greeted: bool,
    /// The last sample that was received, not published yet.
    sample: Option<Sample>,
    /// It is over its rate, which was counted.
    is_limited: bool,
}

/// Which descriptor of a poll belongs to what.
#[derive(Clone, Copy, Debug)]
enum PollTarget {
    Listener,
    /// The waker for cleanups.
    Cleanup,
    Socket(u64),
    Process(u64),
}

impl Server {
    /// Creates a server without connections.
    pub fn new(listener: OwnedFd, state: Arc<ReporterState>, host_paths: HostPaths, cgroup_v1: bool) -> Self {
        let accepts = RateLimit::new(Timestamp::now(), ACCEPTS.0, ACCEPTS.1);
        Self {
            listener,
            state,
            host_paths,
            cgroup_v1,
            inventory: Arc::default(),
            has_inventory: false,
            accepts,
            is_limited: false,
            accept_health: Health::default(),
            connections: HashMap::new(),
            next: 0,
            next_round: Timestamp::now(),
        }
    }

    /// Serves until the process ends.
    pub fn run(mut self) {
        let mut buffer = vec![0; MAX_PACKET_BYTES];
        loop {
            match self.wait(Timestamp::now()) {
                Ok(ready) => {
                    let is_of_connection = |source: &PollTarget| {
                        matches!(source, PollTarget::Process(_) | PollTarget::Socket(_))
                    };
                    if ready.iter().any(is_of_connection) {
                        self.next_round = Timestamp::now().plus(ROUND_INTERVAL);
                    }
                    self.refresh_owners();
                    self.start_cleanups(Timestamp::now());
                    ready.into_iter().for_each(|source| self.serve_or_close(source, &mut buffer));
                    self.end_cleanups(Timestamp::now());
                }
                Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::warn!(%error, "poll of the reporter's connections failed");
                    std::thread::park_timeout(ERROR_PAUSE);
                }
            }
        }
    }

    /// Waits until something is ready or may send again.
    fn wait(&self, now: Timestamp) -> Result<Vec<PollTarget>, Errno> {
        let mut sources = Vec::with_capacity(1 + 2 * self.connections.len());
        let mut polled = Vec::with_capacity(sources.capacity());
        let mut timeout = if self.has_inventory { MAX_WAIT } else { FIRST_CYCLE_WAIT };
        let mut add = |wait: Duration, source, fd| {
            if wait.is_zero() {
                sources.push(source);
                polled.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
            } else {
                timeout = timeout.min(wait);
            }
        };
        let pause = self.next_round.since(now);
        for (number, connection) in self.connections.iter().filter(|_| pause.is_zero()) {
            add(Duration::ZERO, PollTarget::Process(*number), connection.peer.pidfd.as_fd());
            add(connection.messages.wait(now), PollTarget::Socket(*number), connection.socket.as_fd());
        }
        if self.has_inventory {
            add(self.accepts.wait(now), PollTarget::Listener, self.listener.as_fd());
        }
        if let Some(waker) = self.state.cleanup_waker.fd() {
            add(Duration::ZERO, PollTarget::Cleanup, waker);
        }
        if let Some(wait) = self.state.cleanups().next_timeout(now) {
            timeout = timeout.min(wait);
        }
        if !pause.is_zero() {
            timeout = timeout.min(pause);
        }
        // a millisecond more, so that it does not wake too early
        let timeout = Timespec::try_from(timeout + Duration::from_millis(1)).map_err(|_| Errno::INVAL)?;
        poll(&mut polled, Some(&timeout))?;
        let ready = std::iter::zip(sources, &polled).filter(|(_, polled)| !polled.revents().is_empty());
        Ok(ready.map(|(source, _)| source).collect())
    }

    /// A panic, which is a bug, costs only the connection whose message caused it.
    fn serve_or_close(&mut self, source: PollTarget, buffer: &mut [u8]) {
        if catch_unwind(AssertUnwindSafe(|| self.serve(source, buffer))).is_err()
            && let PollTarget::Process(number) | PollTarget::Socket(number) = source
        {
            self.close(number);
        }
    }

    /// Closes the connections of processes that belong to another container by a new inventory: a container in a container
    /// became known. They connect again.
    fn refresh_owners(&mut self) {
        let Some(inventory) = self.state.inventory() else { return };
        if Arc::ptr_eq(&inventory, &self.inventory) {
            return;
        }
        self.has_inventory = true;
        let moved =
            self.connections.iter().filter(|(_, connection)| !connection.peer.has_same_owner(&inventory));
        let moved: Vec<u64> = moved.map(|(number, _)| *number).collect();
        moved.into_iter().for_each(|number| self.close(number));
        self.inventory = inventory;
    }

    fn serve(&mut self, source: PollTarget, buffer: &mut [u8]) {
        match source {
            PollTarget::Listener => self.accept(),
            PollTarget::Cleanup => {} // begun already
            PollTarget::Process(number) | PollTarget::Socket(number) => {
                let Some(connection) = self.connections.get_mut(&number) else { return };
                // also what a process sent just before it ended, which is bounded by the socket's queue
                let has_ended = matches!(source, PollTarget::Process(_));
                if has_ended {
                    connection.messages = RateLimit::new(Timestamp::now(), MESSAGES.0, LAST_MESSAGES);
                }
                let is_open = connection.receive(&self.state, buffer);
                if !is_open || has_ended {
                    self.close(number);
                }
            }
        }
    }

    /// Accepts connections while some are waiting and the rate allows it.
    fn accept(&mut self) {
        while self.accepts.take(Timestamp::now()) {
            let socket = match accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => {
                    self.accept_health.recovered();
                    socket
                }
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {
                    self.is_limited = false;
                    return;
                }
                Err(error) => {
                    if self.accept_health.failed(Timestamp::now()) {
                        tracing::warn!(%error, "accepting reporting processes failed; retrying");
                    }
                    std::thread::park_timeout(ERROR_PAUSE);
                    return;
                }
            };
            if let Err(reason) = self.add(socket) {
                self.state.stats().count_rejected(reason);
            }
        }
        if !std::mem::replace(&mut self.is_limited, true) {
            self.state.stats().count_rejected(ReportRejection::Rate);
        }
    }

    fn add(&mut self, socket: OwnedFd) -> Result<(), ReportRejection> {
        let peer = ReportingPeer::identify(&socket, &self.host_paths, self.cgroup_v1, &self.inventory)?;
        let earlier = self.connections.iter().find(|(_, other)| other.peer.id == peer.id);
        if let Some(number) = earlier.map(|(number, _)| *number) {
            self.close(number); // one for each process: it connected again
        }
        let of_container = |other: &&ReporterConnection| other.peer.container == peer.container;
        if self.connections.len() >= REPORTER_CONNECTIONS.max
            || self.connections.values().filter(of_container).count() >= REPORTER_CONNECTIONS_OF_CONTAINER.max
        {
            return Err(ReportRejection::Connections);
        }
        sockopt::set_socket_passcred(&socket, true).map_err(|_| ReportRejection::Peer)?;
        let connected = Timestamp::now();
        let connection = ReporterConnection {
            socket,
            peer,
            connected,
            messages: RateLimit::new(connected, MESSAGES.0, MESSAGES.1),
            is_greeted: false,
            sample: None,
            is_limited: false,
        };
        self.connections.insert(self.next, connection);
        self.next += 1;
        Ok(())
    }

    fn close(&mut self, number: u64) {
        if let Some(connection) = self.connections.remove(&number) {
            self.state.add_end(Timestamp::now(), connection.peer.id, connection.connected);
            self.state.lock().disconnect(connection.peer.id);
            self.state.cleanups().record_loss(connection.peer.id, &CleanupOutcome::Ended);
        }
    }

    /// Sends the requests for cleanups to the processes.
    fn start_cleanups(&self, now: Timestamp) {
        self.state.cleanup_waker.reset();
        let messages = self.state.cleanups().start_requested(now, &self.state.lock());
        for (key, message) in messages {
            let connection = self.connections.values().find(|connection| connection.peer.id == key);
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let sent = connection.map(|connection| send(&connection.socket, message.as_bytes(), flags));
            let outcome = match sent {
                Some(Ok(_)) => continue,
                Some(Err(Errno::AGAIN | Errno::NOBUFS)) => CleanupOutcome::Unreachable,
                Some(Err(_)) | None => CleanupOutcome::Ended,
            };
            self.state.cleanups().record_loss(key, &outcome);
        }
    }

    /// Ends cleanups, and logs what became of them.
    fn end_cleanups(&self, now: Timestamp) {
        let ended = self.state.cleanups().end(now);
        for EndedCleanup { container, report, is_auto } in ended {
            let known = self.inventory.containers.iter().find(|known| known.id == container);
            let container = known.map_or_else(|| container.short().to_owned(), |known| known.identity.path());
            let trigger = if is_auto { "auto" } else { "request" };
            let is_cleaned = |each: &&ProcessCleanup| matches!(each.outcome, CleanupOutcome::Cleaned { .. });
            let cleaned = report.processes.iter().filter(is_cleaned).count();
            let (processes, freed_bytes) = (report.processes.len(), report.freed_bytes);
            tracing::info!(container, trigger, processes, cleaned, freed_bytes, "cleanup ended");
        }
    }
}

impl ReporterConnection {
    /// Receives the packets that are there. Returns false at the end of the connection.
    ///
    /// Only the last sample is published, once no other waits behind it: while memledger was stopped, or the process over its rate,
    /// the earlier ones became old.
    fn receive(&mut self, state: &ReporterState, buffer: &mut [u8]) -> bool {
        loop {
            let now = Timestamp::now();
            if !self.messages.wait(now).is_zero() {
                if !std::mem::replace(&mut self.is_limited, true) {
                    state.stats().count_rejected(ReportRejection::Rate);
                }
                return true;
            }
            let packet = match unix_peer::receive(&self.socket, buffer) {
                Ok(packet) => packet,
                Err(Errno::AGAIN | Errno::INTR) => {
                    self.is_limited = false;
                    self.publish_sample(now, state);
                    return true;
                }
                // once, if the process ended without reading the welcome: what it sent is still there
                Err(Errno::CONNRESET) => continue,
                Err(_) => return false,
            };
            let Some(sender) = packet.sender else {
                self.publish_sample(now, state); // its counters stay
                return false;
            };
            self.messages.take(now);
            let outcome = if sender != self.peer.id.pid {
                Err(ReportRejection::Sender)
            } else if packet.is_truncated {
                Err(ReportRejection::TooLarge)
            } else {
                self.record(state, &buffer[..packet.len])
            };
            if let Err(reason) = outcome {
                state.stats().count_rejected(reason);
                // the first message: the client tries again ever later, instead of sending what is rejected
                if !self.is_greeted && matches!(reason, ReportRejection::Version | ReportRejection::Rank) {
                    return false;
                }
            }
        }
    }

    fn publish_sample(&mut self, now: Timestamp, state: &ReporterState) {
        if let Some(sample) = self.sample.take() {
            let growth = state.lock().sample(self.peer.id, now, sample);
            state.stats().add(growth);
        }
    }

    fn record(&mut self, state: &ReporterState, packet: &[u8]) -> Result<(), ReportRejection> {
        let message = Message::parse(packet)?;
        let key = self.peer.id;
        match message {
            Message::Hello(hello) => {
                state.lock().hello(key, &self.peer.container, hello);
                if std::mem::replace(&mut self.is_greeted, true) {
                    return Ok(()); // further devices
                }
                let welcome =
                    format!(r#"{{"v":1,"t":"welcome","interval_ms":{}}}"#, SAMPLE_INTERVAL.as_millis());
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                let _ = send(&self.socket, welcome.as_bytes(), flags); // a client that does not read keeps its default
            }
            _ if !self.is_greeted => return Err(ReportRejection::Malformed),
            Message::Sample(sample) => self.sample = Some(sample),
            Message::Operation(tracked) => state.lock().operation(key, tracked)?,
            Message::Records(records) => state.add_process_report(ProcessReport {
                container: self.peer.container.clone(),
                connected: self.connected,
                content: ProcessReportContent::Records(Timestamp::now(), records),
            }),
            Message::Step(step) => state.lock().step(key, step),
            Message::Settings(settings) => state.lock().settings(key, settings),
            Message::Cleaned(cleaned) => state.cleanups().answer(key, &cleaned),
            Message::ForgetPeaks => {
                let now = Timestamp::now();
                self.publish_sample(now, state); // it has the failures that are dropped
                state.lock().forget_peaks(key, now);
            }
            Message::Oom(oom) => state.add_oom(Timestamp::now(), key, oom),
            Message::Ignored => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
