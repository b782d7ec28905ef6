//! The state of each runtime, which its task writes and the cycle and the ledger read.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::device_allocations::{DeviceAllocations, SandboxedPod};
use super::{ContainerId, ContainerRecord, RuntimeEvent, RuntimeKind};
use crate::clock::{Timestamp, is_same_start};
use crate::host::Waker;
use crate::host::process::ProcessId;

/// Limit of ended containers that wait for the next cycle; beyond it the oldest are dropped.
const MAX_ENDED: usize = 4_096;
/// Limit of logged oversized responses for each runtime.
const MAX_LOGGED: usize = 256;
/// Limit of events that wait for the ledger; beyond it the oldest are dropped and counted.
const MAX_EVENTS: usize = crate::host::bounds::RUNTIME_EVENTS.max;

/// Connection state of a runtime's API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionState {
    /// Not tried yet.
    Starting,
    /// There is no socket, and there never was one.
    NoSocket,
    /// A default socket that may be a runtime's and has had no containers yet.
    Idle,
    /// Connected, and the list of containers is complete.
    Up,
    /// It was connected before, or its socket exists and does not respond.
    Down,
}

/// State of one runtime, shared between its task and the cycle.
#[derive(Debug)]
pub struct RuntimeState {
    /// The runtime.
    pub runtime: RuntimeKind,
    /// Woken when there are new events.
    pub waker: Arc<Waker>,
    /// Notified once the socket that is mounted here leads to no runtime any more: only a new start of memledger's container mounts
    /// that of today.
    pub stale_socket: Notify,
    state: Mutex<RuntimeData>,
}

/// The part of [`RuntimeState`] that changes.
#[derive(Debug)]
pub struct RuntimeData {
    /// State of the connection; of several sockets, the first of starting, up and down that one of them has.
    pub connection: ConnectionState,
    /// State of the connection to each socket.
    pub(super) sockets: BTreeMap<PathBuf, ConnectionState>,
    /// Unix time at which a socket was connected last.
    connected_at: Option<f64>,
    /// Incremented with every change.
    pub generation: u64,
    /// Running containers by id.
    pub running: HashMap<ContainerId, ContainerRecord>,
    /// Those of which the runtime does not know whether they run: only a cgroup shows that they do.
    pub uncertain: HashSet<ContainerId>,
    /// Sandboxes of pods, which have a cgroup and an id but are not containers.
    pub sandboxes: HashMap<ContainerId, SandboxedPod>,
    /// Runs whose command has ended: processes that it left behind in its cgroup belong to the host.
    pub ended_runs: HashSet<ContainerId>,
    /// The commands of runs.
    pub commands: HashMap<ContainerId, ProcessId>,
    /// When the newest container of a pod that nothing names was started, in seconds since the boot.
    pub newest_unnamed_start: Option<f64>,
    /// Devices that the kubelet has allocated to containers of pods.
    pub device_allocations: DeviceAllocations,
    /// Containers that ended since the last cycle.
    pub ended: Vec<ContainerRecord>,
    /// Events that the ledger has not read, oldest first. See [`RuntimeState::publish`].
    pub events: VecDeque<RuntimeEvent>,
    /// Events that were dropped because the queue was full.
    pub events_lost: u64,
    /// Responses rejected as too large since the last cycle.
    pub oversized_responses: u64,
    /// Subjects of rejected responses, so that each is logged once.
    too_large: HashSet<String>,
}

impl RuntimeState {
    /// Creates the state of a runtime before its first connection.
    pub fn new(runtime: RuntimeKind, waker: Arc<Waker>) -> Arc<Self> {
        let state = RuntimeData {
            connection: ConnectionState::Starting,
            sockets: BTreeMap::new(),
            connected_at: None,
            generation: 0,
            running: HashMap::new(),
            uncertain: HashSet::new(),
            sandboxes: HashMap::new(),
            ended_runs: HashSet::new(),
            commands: HashMap::new(),
            newest_unnamed_start: None,
            device_allocations: DeviceAllocations::default(),
            ended: vec![],
            events: VecDeque::new(),
            events_lost: 0,
            oversized_responses: 0,
            too_large: HashSet::new(),
        };
        Arc::new(Self { runtime, waker, stale_socket: Notify::new(), state: Mutex::new(state) })
    }

    /// Locks the state. Poisoning is ignored: a panic while it is locked leaves valid data.
    pub fn lock(&self) -> MutexGuard<'_, RuntimeData> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the state of the connection, for a runtime with one socket.
    pub fn set_connection(&self, connection: ConnectionState) {
        self.set_connection_of(Path::new(""), connection);
    }

    /// Sets the state of the connection to one of the sockets.
    pub fn set_connection_of(&self, socket: &Path, connection: ConnectionState) {
        let mut state = self.lock();
        let before = state.sockets.insert(socket.to_path_buf(), connection);
        if connection == ConnectionState::Up && before != Some(ConnectionState::Up) {
            state.connected_at = Some(Timestamp::now().unix_seconds());
        }
        state.merge_connections();
    }

    /// Returns the state of the connection to one of the sockets.
    pub fn connection_of(&self, socket: &Path) -> ConnectionState {
        self.lock().sockets.get(socket).copied().unwrap_or(ConnectionState::Starting)
    }

    /// Removes a socket that no longer exists, and the containers behind it.
    pub fn remove_socket<'a>(&self, socket: &Path, own: impl IntoIterator<Item = &'a ContainerId>) {
        self.remove_running(own);
        let mut state = self.lock();
        state.sockets.remove(socket);
        state.merge_connections();
    }

    /// Removes containers that do not run.
    pub fn remove_running<'a>(&self, ids: impl IntoIterator<Item = &'a ContainerId>) {
        let mut state = self.lock();
        let before = state.running.len();
        for id in ids {
            state.running.remove(id);
        }
        state.generation += u64::from(state.running.len() != before);
    }

    /// Sets the containers of which the runtime does not know whether they run.
    pub fn set_uncertain(&self, ids: HashSet<ContainerId>) {
        let mut state = self.lock();
        state.generation += u64::from(state.uncertain != ids);
        state.uncertain = ids;
    }

    /// Sets the commands of runs, and the runs whose command has ended.
    pub fn set_commands(&self, commands: HashMap<ContainerId, ProcessId>, ended: HashSet<ContainerId>) {
        let mut state = self.lock();
        state.generation += u64::from((&state.commands, &state.ended_runs) != (&commands, &ended));
        (state.commands, state.ended_runs) = (commands, ended);
    }

    /// Counts a response about `what` that was rejected as too large, and logs the first for each, up to [`MAX_LOGGED`].
    pub fn record_oversized(&self, what: &str) {
        let mut state = self.lock();
        state.oversized_responses += 1;
        let is_first = state.too_large.len() < MAX_LOGGED && state.too_large.insert(what.to_owned());
        drop(state);
        if is_first {
            tracing::warn!(
                runtime = %self.runtime,
                about = what,
                "response of the container runtime rejected: too large (logged once)"
            );
        }
    }

    /// Adds a running container. Adding it twice changes nothing; another start time ends the previous run.
    pub fn add_running(&self, record: ContainerRecord) {
        let mut state = self.lock();
        if state.running.get(&record.id) != Some(&record) {
            let before = state.running.insert(record.id.clone(), record.clone());
            state.generation += 1;
            // a record from the list alone has no start time, and is the same run
            let another = |before: &ContainerRecord| {
                before.started.is_some() && !is_same_start(before.started, record.started)
            };
            if let Some(before) = before.filter(another) {
                push_ended(&mut state.ended, before);
            }
        }
    }

    /// Ends the run of a container at `at`. An end before the known start belongs to an earlier run and is ignored.
    ///
    /// `unlisted`: a run that began and was never added; it is recorded as ended.
    pub fn end_run(&self, id: &ContainerId, at: f64, unlisted: Option<ContainerRecord>) {
        let mut state = self.lock();
        let stale = |record: &ContainerRecord| record.started.is_some_and(|started| at < started);
        let listed = if state.running.get(id).is_some_and(|record| !stale(record)) {
            state.running.remove(id)
        } else {
            None
        };
        if let Some(record) = listed.or(unlisted) {
            push_ended(&mut state.ended, record);
            state.generation += 1;
        }
    }

    /// Queues events for the ledger and wakes it. Beyond [`MAX_EVENTS`] the oldest are dropped.
    pub fn publish(&self, events: impl IntoIterator<Item = RuntimeEvent>) {
        let mut state = self.lock();
        let (before, lost) = (state.events.len(), state.events_lost);
        for event in events {
            if state.events.len() >= MAX_EVENTS {
                state.events.pop_front();
                state.events_lost += 1;
            }
            state.events.push_back(event);
        }
        let (first_loss, has_news) =
            (lost == 0 && state.events_lost > 0, state.events.len() > before || state.events_lost > lost);
        drop(state);
        if first_loss {
            tracing::warn!(
                runtime = %self.runtime,
                limit = MAX_EVENTS,
                "too many runtime events: the ledger falls behind, the oldest are dropped (logged once)"
            );
        }
        if has_news {
            self.waker.wake();
        }
    }

    /// Takes the events since the last call, in order.
    pub fn drain_events(&self) -> Vec<RuntimeEvent> {
        Vec::from(std::mem::take(&mut self.lock().events))
    }
}

impl RuntimeData {
    fn merge_connections(&mut self) {
        use ConnectionState::{Down, Idle, NoSocket, Starting, Up};
        let has = |state: &ConnectionState| self.sockets.values().any(|socket| socket == state);
        let connection = [Starting, Up, Down, Idle].into_iter().find(has).unwrap_or(NoSocket);
        if self.connection != connection {
            self.connection = connection;
            self.generation += 1;
        }
    }

    /// Returns whether every socket is connected; `None` if none ever was.
    pub fn is_up(&self) -> Option<bool> {
        match self.connection {
            ConnectionState::Up => {
                Some(!self.sockets.values().any(|socket| *socket == ConnectionState::Down))
            }
            ConnectionState::Down => Some(false),
            ConnectionState::Starting | ConnectionState::Idle | ConnectionState::NoSocket => None,
        }
    }

    /// Returns whether a socket was ever connected.
    pub fn was_connected(&self) -> bool {
        self.connected_at.is_some()
    }

    /// Returns the sockets that are connected.
    pub fn live_sockets(&self) -> impl Iterator<Item = &Path> {
        self.sockets.iter().filter(|(_, state)| **state == ConnectionState::Up).map(|(socket, _)| &**socket)
    }

    /// Returns the Unix time since which all sockets have been connected; `None` if one is not.
    pub fn connected_since(&self) -> Option<f64> {
        self.connected_at.filter(|_| self.is_up() == Some(true))
    }
}

fn push_ended(ended: &mut Vec<ContainerRecord>, record: ContainerRecord) {
    if ended.len() >= MAX_ENDED {
        ended.remove(0);
    }
    ended.push(record);
}

#[cfg(test)]
mod tests {
    use super::super::EventKind;
    use super::*;

    #[test]
    fn full_queue_drops_and_counts_oldest_events() {
        let source = RuntimeState::new(RuntimeKind::Docker, Arc::default());
        let event = |number: usize| RuntimeEvent {
            runtime: RuntimeKind::Docker,
            socket: Arc::default(),
            id: ContainerId::new("a"),
            at: number as f64,
            named: None,
            what: EventKind::Exists,
        };
        source.publish((0..MAX_EVENTS + 3).map(event));
        assert_eq!(source.lock().events_lost, 3);
        let events = source.drain_events();
        assert_eq!((events.len(), events[0].at), (MAX_EVENTS, 3.0));
        assert!(source.drain_events().is_empty());
    }
}
