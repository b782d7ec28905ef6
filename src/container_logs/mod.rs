//! Errors in the logs of containers that say that memory, or something like it, was lacking: of GPU memory for programs that do not
//! report by themselves, and what the kernel does not log.
//!
//! Off unless `--container.logs` says so. A task for each container follows its log: by the API of Docker and Podman ([`docker`]), in
//! a pod by its file ([`files`]). Of a line only the kind of such an error and its numbers are kept ([`lines`]). A log can be anything that its
//! program writes: it changes only figures and events of its own container, and how much of it is read is limited ([`budget`]).

mod budget;
mod docker;
mod files;
mod lines;
pub mod tail;

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use crate::clock::Timestamp;
use crate::config::{Config, LogSelection, RuntimeEndpoint};
use crate::discover::{Container, ContainerId, Inventory, RuntimeKind};
use crate::host::{Backoff, Waker, bounds};
use crate::parse::log_error::{HostErrorText, LogError};
use crate::reporter::ooms::{OomQueue, ReportedOom};
use budget::SharedBudget;
use lines::ErrorReader;

/// Pause before a log is read again: the first, doubling up to the last while it cannot be read.
const RETRY_DELAY: Duration = Duration::from_secs(1);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);
/// How long an error waits for its further lines.
const JOIN_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a log is still read after its container has ended.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// A runtime takes the time of a start after the program has begun, and Podman's logs have whole seconds.
const START_TOLERANCE: f64 = 2.0;
/// Maximum number of errors of one container that wait for the ledger; of more the newest are kept.
const MAX_WAITING_ERRORS: usize = 16;
/// An error that is printed again within this time is one.
const SAME_ERROR: Duration = Duration::from_millis(100);
const MAX_LOGS: usize = bounds::CONTAINER_LOGS_AT_ONCE.max;
/// Positions that are kept; of more, those of containers that do not run are forgotten.
const MAX_POSITIONS: usize = 2 * MAX_LOGS;

/// What the tasks share with the cycle and the ledger.
#[derive(Debug)]
pub struct ContainerLogs {
    inventory: watch::Sender<Arc<Inventory>>,
    /// Containers that ended before a cycle listed them.
    unlisted: mpsc::Sender<Arc<Container>>,
    ooms: Mutex<OomQueue>,
    /// Errors that are not of GPU memory, oldest first.
    host_errors: Mutex<HashMap<ContainerId, Vec<(Timestamp, HostErrorText)>>>,
    /// Containers whose logs are being read.
    reading: Mutex<HashSet<ContainerId>>,
    /// How far each log was read: that of a container goes on over all its runs.
    positions: Mutex<HashMap<ContainerId, ReadPosition>>,
    budget: SharedBudget,
    /// Wakes the ledger.
    waker: Arc<Waker>,
}

impl ContainerLogs {
    /// Takes the containers of a cycle, and those that ended since the one before.
    pub fn update(&self, inventory: &Arc<Inventory>, ended: &[Arc<Container>]) {
        let is_listed = |wanted: &Container| {
            let before = self.inventory.borrow();
            let mut all = before.containers.iter().chain(&inventory.containers);
            all.any(|container| container.id == wanted.id)
        };
        for container in ended.iter().filter(|it| it.spec.reads_log && !is_listed(it)) {
            if self.reading().contains(&container.id) {
                continue; // who reads it has not come to its end
            }
            self.set_reading(&container.id, true);
            if self.unlisted.try_send(Arc::clone(container)).is_err() {
                self.set_reading(&container.id, false); // too many
            }
        }
        let reading = self.reading();
        let running = inventory.ids();
        lock(&self.ooms).retain(|id| running.contains(id) || reading.contains(id));
        self.inventory.send_replace(Arc::clone(inventory));
    }

    /// Takes the errors that were read since the last call.
    pub fn take_ooms(&self) -> Vec<ReportedOom> {
        lock(&self.ooms).take()
    }

    /// Takes the last errors that are not of GPU memory and were read since the last call: of each container, oldest first.
    pub fn take_host_errors(&self) -> HashMap<ContainerId, Vec<(Timestamp, HostErrorText)>> {
        std::mem::take(&mut lock(&self.host_errors))
    }

    /// Returns the containers whose logs are being read, also those that have ended until all is read.
    pub fn reading(&self) -> HashSet<ContainerId> {
        lock(&self.reading).clone()
    }

    /// Returns where to begin with a run: where its log was read to, else with its first line if it began while memledger ran, else with
    /// what is written from now on.
    fn position(&self, container: &ContainerId, started: f64, is_new: bool) -> ReadPosition {
        let known = lock(&self.positions).get(container).copied();
        known.unwrap_or_else(|| ReadPosition::new(is_new.then_some(started - START_TOLERANCE)))
    }

    /// Keeps how far a log was read. Without a time the next run begins with its first line.
    fn set_position(&self, container: &ContainerId, position: ReadPosition) {
        let mut positions = lock(&self.positions);
        positions.remove(container);
        if position.at.is_none() {
            return;
        }
        if positions.len() >= MAX_POSITIONS {
            let inventory = Arc::clone(&self.inventory.borrow());
            let running = inventory.ids();
            positions.retain(|id, _| running.contains(id));
        }
        positions.insert(container.clone(), position);
    }

    fn add(&self, oom: ReportedOom) {
        if lock(&self.ooms).add(Timestamp::now(), oom) {
            self.waker.wake();
        }
    }

    fn add_host_error(&self, container: &ContainerId, at: Timestamp, error: HostErrorText) {
        let mut waiting = lock(&self.host_errors);
        if waiting.len() >= MAX_LOGS && !waiting.contains_key(container) {
            return; // the ledger cannot be read
        }
        let of_container = waiting.entry(container.clone()).or_default();
        if of_container.is_empty() {
            self.waker.wake();
        }
        // a program may print the same again and again
        if let Some((last, known)) = of_container.last_mut()
            && *known == error
            && at >= *last
            && at.since(*last) < SAME_ERROR
        {
            *last = at;
            return;
        }
        if of_container.len() == MAX_WAITING_ERRORS {
            of_container.remove(0);
        }
        of_container.push((at, error));
    }

    /// Sets whether a log is being read. An exit may wait for the end.
    fn set_reading(&self, container: &ContainerId, is_reading: bool) {
        if is_reading {
            lock(&self.reading).insert(container.clone());
        } else if lock(&self.reading).remove(container) {
            self.waker.wake();
        }
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where logs are.
#[derive(Clone, Debug)]
struct LogSources {
    endpoints: Vec<RuntimeEndpoint>,
    pods: PathBuf,
    /// The host has a GPU.
    has_gpu: bool,
}

/// Starts to follow logs; `None` if no container's log is to be read. `waker` is signalled with each error.
pub fn start(config: &Config, waker: Arc<Waker>) -> Option<Arc<ContainerLogs>> {
    if config.filter.logs == LogSelection::None {
        return None;
    }
    let (unlisted, receiver) = mpsc::channel(MAX_LOGS);
    let logs = Arc::new(ContainerLogs {
        inventory: watch::Sender::default(),
        unlisted,
        ooms: Mutex::default(),
        host_errors: Mutex::default(),
        reading: Mutex::default(),
        positions: Mutex::default(),
        budget: SharedBudget::default(),
        waker,
    });
    let sources = LogSources {
        endpoints: config.endpoints.clone(),
        pods: config.cri.pod_logs.clone(),
        has_gpu: config.host_paths.has_gpu(),
    };
    tokio::spawn(follow_all(Arc::clone(&logs), sources.clone(), Timestamp::now()));
    tokio::spawn(read_unlisted(Arc::clone(&logs), sources, receiver));
    Some(logs)
}

/// Follows the logs of all containers that run, each by one task, over all its runs: its log is the same.
async fn follow_all(logs: Arc<ContainerLogs>, sources: LogSources, began: Timestamp) {
    let mut inventories = logs.inventory.subscribe();
    let mut tasks: HashMap<ContainerId, JoinHandle<()>> = HashMap::new();
    let mut is_limited = false;
    while inventories.changed().await.is_ok() {
        let inventory = Arc::clone(&inventories.borrow_and_update());
        tasks.retain(|_, task| !task.is_finished());
        let reading = logs.reading();
        for container in inventory.containers.iter().filter(|container| container.spec.reads_log) {
            let Some(started) = container.started else { continue }; // it becomes known
            if tasks.contains_key(&container.id) || reading.contains(&container.id) {
                continue; // also while the run before is read, which no cycle listed
            }
            if tasks.len() >= MAX_LOGS {
                if !std::mem::replace(&mut is_limited, true) {
                    tracing::warn!(
                        limit = MAX_LOGS,
                        "too many logs of containers; further ones are not read"
                    );
                }
                break;
            }
            let follower = LogFollower {
                logs: Arc::clone(&logs),
                container: Arc::clone(container),
                sources: sources.clone(),
                inventories: logs.inventory.subscribe(),
                errors: Mutex::default(),
            };
            let position = logs.position(&container.id, started, started >= began.unix_seconds());
            tasks.insert(container.id.clone(), tokio::spawn(follower.follow(position)));
        }
    }
}

/// Reads the logs of containers that ended before a cycle listed them, one after the other, once. Of one that runs again, the log is
/// followed already.
async fn read_unlisted(
    logs: Arc<ContainerLogs>,
    sources: LogSources,
    mut unlisted: mpsc::Receiver<Arc<Container>>,
) {
    while let Some(container) = unlisted.recv().await {
        let started = container.started.unwrap_or(f64::NEG_INFINITY);
        let mut position = logs.position(&container.id, started, true);
        let follower = LogFollower {
            logs: Arc::clone(&logs),
            container,
            sources: sources.clone(),
            inventories: logs.inventory.subscribe(),
            errors: Mutex::default(),
        };
        if !follower.is_running() {
            let _ = tokio::time::timeout(END_TIMEOUT, follower.read(&mut position, false)).await;
            lock(&follower.errors).end(|at, error| follower.report(at, error));
            logs.set_position(&follower.container.id, position);
        }
        logs.set_reading(&follower.container.id, false);
    }
}

/// How far a log was read: lines count after it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ReadPosition {
    /// Unix time of the last line; `None`: lines count from the next connection on.
    at: Option<f64>,
    /// Lines with this time that were read. Several can have the same.
    lines: u64,
}

impl ReadPosition {
    fn new(at: Option<f64>) -> Self {
        Self { at, lines: 0 }
    }

    /// Moves on by a line.
    fn advance(&mut self, at: f64) {
        if self.at == Some(at) {
            self.lines += 1;
        } else {
            *self = Self { at: Some(at), lines: 1 };
        }
    }

    /// Returns what decides which of the lines from here on are new. Clocks may be set back, and two streams are not in order:
    /// after the first new line all are.
    fn skip(self) -> SkipRead {
        SkipRead { position: self, seen: 0, is_past: self.at.is_none() }
    }
}

/// Skips the lines of a connection that were read before.
#[derive(Debug)]
struct SkipRead {
    position: ReadPosition,
    seen: u64,
    is_past: bool,
}

impl SkipRead {
    /// Returns whether a line with this time is new.
    fn is_new(&mut self, at: f64) -> bool {
        let Some(last) = self.position.at.filter(|_| !self.is_past) else { return true };
        self.seen += u64::from(at == last);
        self.is_past = at > last || at == last && self.seen > self.position.lines;
        self.is_past
    }
}

/// Follows the log of one container.
struct LogFollower {
    logs: Arc<ContainerLogs>,
    container: Arc<Container>,
    sources: LogSources,
    inventories: watch::Receiver<Arc<Inventory>>,
    errors: Mutex<ErrorReader>,
}

/// Why reading ended.
#[derive(Debug, PartialEq, Eq)]
enum LogEnd {
    /// All was read; there may be more later.
    Complete,
    /// It grows faster than it may be read; a part is skipped.
    TooFast,
    /// It failed, and is tried again.
    Failed(String),
    /// There is nothing to read, and will not be.
    Never(String),
}

impl LogFollower {
    /// Follows until the container has ended and its log is read.
    async fn follow(self, mut position: ReadPosition) {
        // also in pauses: an engine may end a stream without the last lines, and send them when it is asked again
        self.logs.set_reading(&self.container.id, true);
        let is_over = self.read_to_end(&mut position).await;
        self.logs.set_position(&self.container.id, position);
        self.logs.set_reading(&self.container.id, false);
        if !is_over {
            self.not_running().await;
        }
    }

    /// Reads until the container has ended, or nothing can be read. Returns whether it has ended.
    async fn read_to_end(&self, position: &mut ReadPosition) -> bool {
        let (mut is_logged, mut has_ended) = (false, false);
        let mut backoff = Backoff::new(RETRY_DELAY, MAX_RETRY_DELAY);
        while !has_ended {
            has_ended = !self.is_running(); // its last lines are still read
            let end = tokio::select! {
                end = self.read(position, !has_ended) => end,
                () = self.ended() => LogEnd::Complete,
                () = self.end_old_errors() => LogEnd::Complete,
            };
            lock(&self.errors).end(|at, error| self.report(at, error));
            let is_good = matches!(end, LogEnd::Complete | LogEnd::TooFast);
            let is_final = matches!(end, LogEnd::Never(_));
            let reason = match end {
                LogEnd::Complete => None,
                LogEnd::TooFast => Some("it grows faster than memledger reads; parts are skipped".to_owned()),
                LogEnd::Failed(reason) | LogEnd::Never(reason) => Some(reason),
            };
            if let Some(reason) = reason.filter(|_| !has_ended)
                && !std::mem::replace(&mut is_logged, true)
            {
                let container = self.container.identity.path();
                tracing::warn!(container, reason, "the container's log is not read completely");
            }
            if is_final {
                return has_ended;
            }
            if is_good {
                backoff.reset();
            }
            let delay = backoff.delay();
            tokio::select! {
                () = tokio::time::sleep(delay), if !has_ended => {}
                () = self.not_running() => {}
            }
        }
        true
    }

    async fn read(&self, position: &mut ReadPosition, is_running: bool) -> LogEnd {
        match self.container.runtime {
            RuntimeKind::Cri => self.read_file(position).await,
            _ => self.read_api(position, is_running).await,
        }
    }

    fn add(&self, at: f64, line: &str) {
        let now = Timestamp::now();
        let age = Duration::try_from_secs_f64(now.unix_seconds() - at).unwrap_or_default();
        lock(&self.errors).add(now.minus(age), now, line, |at, error| self.report(at, error));
    }

    fn report(&self, at: Timestamp, error: LogError) {
        match error.on_host(self.sources.has_gpu) {
            LogError::Cuda(text) => self.logs.add(lines::reported(&self.container.id, at, &text)),
            LogError::Host(error) => self.logs.add_host_error(&self.container.id, at, error),
        }
    }

    /// Reports errors whose further lines do not come, for ever.
    async fn end_old_errors(&self) {
        loop {
            tokio::time::sleep(JOIN_TIMEOUT / 2).await;
            lock(&self.errors).end_older(JOIN_TIMEOUT, Timestamp::now(), |at, error| self.report(at, error));
        }
    }

    fn is_running(&self) -> bool {
        self.is_in(&self.inventories.borrow())
    }

    fn is_in(&self, inventory: &Inventory) -> bool {
        inventory.containers.iter().any(|known| known.id == self.container.id)
    }

    /// Returns when the container has ended.
    async fn not_running(&self) {
        let mut inventories = self.inventories.clone();
        let has_ended = |inventory: &Arc<Inventory>| !self.is_in(inventory);
        let _ = inventories.wait_for(has_ended).await; // the sender lives as long as memledger
    }

    /// Returns some time after the container has ended.
    async fn ended(&self) {
        self.not_running().await;
        tokio::time::sleep(END_TIMEOUT).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_once_although_several_have_the_same_time() {
        let mut position = ReadPosition::new(Some(1.0));
        let log = [0.5, 1.5, 1.5, 1.5, 2.0, 2.0];
        let mut read = |log: &[f64]| {
            let mut skip = position.skip();
            let new: Vec<f64> = log.iter().copied().filter(|at| skip.is_new(*at)).collect();
            new.iter().for_each(|at| position.advance(*at));
            new
        };
        assert_eq!(read(&log[..3]), [1.5, 1.5]);
        assert_eq!(read(&log), [1.5, 2.0, 2.0], "the third line of that time");
        assert_eq!(read(&log), [0.0; 0]);
        assert_eq!(
            read(&[2.0, 2.0, 3.0, 2.5, 0.1]),
            [3.0, 2.5, 0.1],
            "after a new line all are, also if the clock is set back"
        );
    }

    #[test]
    fn without_a_position_every_line_is_new() {
        assert!(ReadPosition::new(None).skip().is_new(0.0));
    }
}
