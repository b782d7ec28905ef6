//! The thread that reads the GPUs of DRM drivers.
//!
//! A thread is needed because the scan of the descriptors of all processes takes milliseconds, which a cycle must not
//! wait for, and because a driver may hang in any of these files. Duty cycle: at most 10 %, except where readings would
//! otherwise become too old to be exported.
//!
//! A thread that hangs is not replaced: another one would hang too. A thread that ended because of a bug is replaced.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::client_memory::{self, Descriptor, DeviceClients};
use super::devices::{self, Card};
use super::engines::Engines;
use super::fd_scanner::{FdScanner, ScanResult};
use crate::clock::Timestamp;
use crate::collect::gpu::{DeviceHealth, DeviceMemory, GpuDevice, GpuProcess, GpuReading, PidTrust};
use crate::config::GpuSettings;
use crate::host::{HostPaths, ReadError};

/// Retries when memory and processes contradict each other, unless the reading has taken [`RETRY_LIMIT`].
const MAX_RETRIES: usize = 2;
const RETRY_LIMIT: Duration = Duration::from_millis(100);
/// The pause after a reading, as a multiple of its duration.
const PAUSE_FACTOR: u32 = 9;
/// Minimum age of a thread that ended before it is replaced.
const RESTART_AFTER: Duration = Duration::from_secs(30);
/// Maximum number of read errors that are kept for the next cycle.
const MAX_READ_ERRORS: usize = 1_000;

const OTHER_PIDS: &str = "memledger does not run in the host's pid namespace";
const NO_PERMISSION: &str = "the open files of most processes cannot be read without CAP_SYS_PTRACE";

/// The cycle's handle of the thread.
#[derive(Debug)]
pub struct DrmWorker {
    task: DrmTask,
    started: Timestamp,
    shared: Arc<Mutex<DrmShared>>,
}

/// The configuration of the thread.
#[derive(Clone, Debug)]
struct DrmTask {
    interval: Duration,
    max_pause: Duration,
    host_paths: HostPaths,
    cgroup_v1: bool,
}

#[derive(Debug, Default)]
struct DrmShared {
    latest: Option<Arc<GpuReading>>,
    read_errors: Vec<&'static str>,
    has_answered: bool,
}

impl DrmWorker {
    /// Starts the thread. It ends with the process. Its deadline counts from `now`.
    pub fn start(settings: &GpuSettings, host_paths: HostPaths, cgroup_v1: bool, now: Timestamp) -> Self {
        let GpuSettings { interval, deadline, .. } = *settings;
        let task = DrmTask { interval, max_pause: deadline / 2, host_paths, cgroup_v1 };
        Self::start_task(task, now)
    }

    fn start_task(task: DrmTask, now: Timestamp) -> Self {
        let shared = spawn({
            let task = task.clone();
            move |shared| run(task, shared)
        });
        Self { task, started: now, shared }
    }

    /// Starts another thread if the old one ended.
    pub fn restart_if_ended(&mut self, now: Timestamp) {
        let has_ended = Arc::strong_count(&self.shared) == 1; // the thread holds the other reference
        if has_ended && now.since(self.started) > RESTART_AFTER {
            tracing::error!("the DRM GPU thread ended unexpectedly (a bug in memledger); starting another");
            *self = Self::start_task(self.task.clone(), now);
        }
    }

    /// Returns when the thread was started.
    pub fn started(&self) -> Timestamp {
        self.started
    }

    /// Returns the newest reading, however old; `None` if there is no such GPU now.
    pub fn latest(&self) -> Option<Arc<GpuReading>> {
        lock(&self.shared).latest.clone()
    }

    /// Takes the read errors since the previous call.
    pub fn take_read_errors(&self) -> Vec<&'static str> {
        std::mem::take(&mut lock(&self.shared).read_errors)
    }

    /// Returns true once a reading was attempted, with or without success.
    pub fn has_answered(&self) -> bool {
        lock(&self.shared).has_answered
    }
}

fn spawn(work: impl FnOnce(&Mutex<DrmShared>) + Send + 'static) -> Arc<Mutex<DrmShared>> {
    let shared = Arc::new(Mutex::new(DrmShared::default()));
    let thread_shared = Arc::clone(&shared);
    let thread = std::thread::Builder::new().name("drm".into()).stack_size(256 * 1024);
    if let Err(error) = thread.spawn(move || work(&thread_shared)) {
        tracing::warn!(%error, "starting the DRM GPU thread failed; retrying");
    }
    shared
}

fn run(task: DrmTask, shared: &Mutex<DrmShared>) {
    let mut reader = DrmReader::new(task.host_paths, task.cgroup_v1);
    loop {
        let began = Timestamp::now();
        let read = reader.read();
        publish(shared, read);
        let took = Timestamp::now().since(began);
        let pause = (took * PAUSE_FACTOR).min(task.max_pause);
        std::thread::sleep(task.interval.saturating_sub(took).max(pause));
    }
}

fn lock(shared: &Mutex<DrmShared>) -> MutexGuard<'_, DrmShared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn publish(shared: &Mutex<DrmShared>, read: Result<Option<GpuReading>, ReadError>) {
    let mut shared = lock(shared);
    shared.has_answered = true;
    match read {
        Ok(reading) => {
            shared.read_errors.extend(reading.iter().flat_map(|reading| &reading.read_errors));
            shared.latest = reading.map(Arc::new);
        }
        Err(error) => {
            tracing::debug!(%error, "reading DRM GPUs failed");
            shared.latest = None;
            shared.read_errors.extend(error.reason_label());
        }
    }
    shared.read_errors.truncate(MAX_READ_ERRORS);
}

/// Reads the GPUs, with the state that lasts from reading to reading.
#[derive(Debug)]
pub struct DrmReader {
    host_paths: HostPaths,
    cgroup_v1: bool,
    scanner: FdScanner,
    engines: Engines,
    logged_reason: Option<&'static str>,
}

impl DrmReader {
    /// Returns a reader of this host.
    pub fn new(host_paths: HostPaths, cgroup_v1: bool) -> Self {
        Self {
            host_paths,
            cgroup_v1,
            scanner: FdScanner::default(),
            engines: Engines::default(),
            logged_reason: None,
        }
    }

    /// Reads all GPUs of DRM drivers; `None` if there are none.
    ///
    /// # Errors
    /// Devices or processes cannot be listed.
    pub fn read(&mut self) -> Result<Option<GpuReading>, ReadError> {
        let began = Timestamp::now();
        let mut read_errors = Vec::new();
        let cards = devices::list(&self.host_paths, &mut read_errors)?;
        if cards.is_empty() {
            return Ok(None);
        }
        let in_host_pid_namespace = self.host_paths.in_initial_pid_namespace();
        let mut found = match in_host_pid_namespace {
            true => self.scanner.scan(&self.host_paths, self.cgroup_v1)?,
            false => ScanResult::default(),
        };
        let pids = match () {
            () if !in_host_pid_namespace => PidTrust::Untrusted(OTHER_PIDS),
            // if most processes are unreadable, it is unknown which of them have a GPU open; a few change little
            () if found.denied > found.readable => PidTrust::Untrusted(NO_PERMISSION),
            () => PidTrust::Trusted,
        };
        self.warn_if_untrusted(pids);
        let (mut memory, mut held) = (read_memory(&cards, &mut read_errors), held(&cards, &found));
        for _ in 0..MAX_RETRIES {
            if !any_raced(&memory, &held) || Timestamp::now().since(began) > RETRY_LIMIT {
                break;
            }
            read_errors.append(&mut found.read_errors);
            let (denied, readable) = (found.denied, found.readable);
            found = ScanResult { denied, readable, ..self.scanner.read_known() };
            (memory, held) = (read_memory(&cards, &mut read_errors), self::held(&cards, &found));
        }
        let at = Timestamp::now();
        let mut read = DrmScan { cards: &cards, found: &found, engines: &mut self.engines, at };
        let devices: Vec<_> = std::iter::zip(memory, held)
            .enumerate()
            .map(|(number, (memory, held))| read.device(number, memory, held, pids, &mut read_errors))
            .collect();
        self.engines.end_reading();
        read_errors.append(&mut found.read_errors);
        let at = Timestamp::now();
        Ok(Some(GpuReading {
            source: super::NAME,
            at,
            took: at.since(began),
            driver_version: None,
            cuda_version: None,
            counted: cards.len(),
            devices,
            silent: vec![],
            pids,
            read_errors,
        }))
    }

    /// Warns once for each reason for which GPU memory cannot be attributed.
    fn warn_if_untrusted(&mut self, pids: PidTrust) {
        let reason = match pids {
            PidTrust::Trusted => None,
            PidTrust::Untrusted(reason) => Some(reason),
        };
        if let (Some(reason), true) = (reason, self.logged_reason != reason) {
            tracing::warn!(
                "memory of DRM GPUs cannot be attributed to containers: {reason}; run `memledger doctor` for what to change"
            );
        }
        self.logged_reason = reason;
    }
}

fn read_memory(cards: &[Card], read_errors: &mut Vec<&'static str>) -> Vec<DeviceMemory> {
    cards.iter().map(|card| card.memory(read_errors)).collect()
}

/// Returns the descriptors of each card, in the order of the cards.
fn descriptors_by_card(cards: &[Card], found: &ScanResult) -> Vec<Vec<Descriptor>> {
    let mut all = vec![Vec::new(); cards.len()];
    let not_pci: Vec<_> = (0..cards.len()).filter(|at| cards[*at].identity.pci_bus_id.is_empty()).collect();
    for (node, descriptor) in &found.descriptors {
        let client = &descriptor.client;
        let at = match (&client.pdev, &not_pci[..]) {
            (Some(pdev), _) => cards.iter().position(|card| card.address.as_bytes() == &pdev[..]),
            // a container may have another name for a node; with only one such GPU the name does not matter
            (None, [only]) => Some(*only).filter(|at| cards[*at].driver.as_bytes() == &client.driver[..]),
            (None, _) => cards.iter().position(|card| card.nodes.contains(node)),
        };
        // without a card: a node of NVIDIA's driver, or one that appeared since
        if let Some(at) = at {
            all[at].push(descriptor.clone());
        }
    }
    all
}

fn held(cards: &[Card], found: &ScanResult) -> Vec<(Vec<Descriptor>, DeviceClients)> {
    let all = descriptors_by_card(cards, found);
    let read_clients = |(card, descriptors): (&Card, Vec<Descriptor>)| {
        let own_memory = card.has_own_memory() || client_memory::has_own_memory(&descriptors);
        let mut held = client_memory::sum_clients(&descriptors, own_memory);
        for (process, nodes) in &found.in_part {
            let is_known = descriptors.iter().any(|descriptor| descriptor.process == *process);
            if is_known || card.nodes.iter().any(|node| nodes.contains(node)) {
                held.withhold(*process);
            }
        }
        (descriptors, held)
    };
    std::iter::zip(cards, all).map(read_clients).collect()
}

fn any_raced(memory: &[DeviceMemory], held: &[(Vec<Descriptor>, DeviceClients)]) -> bool {
    std::iter::zip(memory, held).any(|(memory, (_, held))| is_race(memory, held))
}

fn is_race(memory: &DeviceMemory, held: &DeviceClients) -> bool {
    memory.used.is_some_and(|used| held.sum() > used)
}

/// The data of one reading, from which the devices are built.
struct DrmScan<'a> {
    cards: &'a [Card],
    found: &'a ScanResult,
    engines: &'a mut Engines,
    at: Timestamp,
}

impl DrmScan<'_> {
    fn device(
        &mut self,
        number: usize,
        memory: DeviceMemory,
        (descriptors, held): (Vec<Descriptor>, DeviceClients),
        pids: PidTrust,
        read_errors: &mut Vec<&'static str>,
    ) -> GpuDevice {
        let card = &self.cards[number];
        read_errors.extend(std::iter::repeat_n("malformed", held.malformed));
        // more than the device has: the values mean something else
        let impossible = memory.total.is_some_and(|total| held.sum() > total);
        read_errors.extend(impossible.then_some("malformed"));
        let raced = !impossible && is_race(&memory, &held);
        let is_trusted = pids == PidTrust::Trusted;
        let work = self.engines.work(&card.identity.uuid, &client_memory::clients(&descriptors), self.at);
        let computing = &self.found.computing;
        // the engine statistics do not include work that is submitted through AMD's compute device
        let in_part = &self.found.in_part;
        let is_complete = is_trusted && self.found.denied == 0 && computing.is_empty() && in_part.is_empty();
        let utilization = card.utilization(read_errors).or(work.busy.filter(|_| is_complete));
        let processes = held.by_process.into_iter().map(|(key, used)| GpuProcess {
            busy: work
                .by_process
                .get(&key)
                .copied()
                .filter(|_| !computing.contains(&key) && !in_part.contains_key(&key)),
            owner: self.found.owners.get(&key).cloned(),
            ..GpuProcess::new(key.pid, used)
        });
        let mut processes: Vec<_> = processes.collect();
        processes.sort_by_key(|process| process.pid);
        GpuDevice {
            memory,
            processes: (is_trusted && !impossible).then_some(processes),
            raced,
            health: DeviceHealth { utilization, ..DeviceHealth::default() },
            ..GpuDevice::new(Arc::clone(&card.identity))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(work: impl FnOnce(&Mutex<DrmShared>) + Send + 'static) -> DrmWorker {
        let empty = tempfile::tempdir().unwrap(); // a host without a GPU is read at once
        let host_paths = HostPaths { sys: empty.path().to_path_buf(), ..HostPaths::default() };
        let (interval, max_pause) = (Duration::from_millis(50), Duration::ZERO);
        let task = DrmTask { interval, max_pause, host_paths, cgroup_v1: false };
        DrmWorker { task, started: Timestamp::now(), shared: spawn(work) }
    }

    fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
        let began = Timestamp::now();
        while !is_so() {
            assert!(Timestamp::now().since(began) < Duration::from_secs(20), "no {what} in 20 s");
            std::thread::yield_now();
        }
    }

    #[test]
    fn replaces_an_ended_thread_after_a_pause() {
        let mut worker = worker(|_| {});
        let (ended, started) = (Arc::downgrade(&worker.shared), worker.started());
        eventually("end of the thread", || ended.strong_count() == 1);
        worker.restart_if_ended(started.plus(RESTART_AFTER));
        assert_eq!(ended.strong_count(), 1, "too early");
        let later = started.plus(RESTART_AFTER + Duration::from_secs(1));
        worker.restart_if_ended(later);
        assert_eq!((ended.strong_count(), worker.started()), (0, later));
        eventually("reading of the new thread", || worker.has_answered());
    }

    #[test]
    fn hung_thread_is_not_replaced_and_fails_after_the_deadline() {
        let (end, waits) = std::sync::mpsc::channel::<()>();
        let mut worker = worker(move |_| waits.recv().unwrap_or_default());
        let started = worker.started();
        worker.restart_if_ended(started.plus(Duration::from_secs(3600)));
        assert_eq!((worker.started(), worker.has_answered()), (started, false));
        let deadline = Duration::from_secs(5);
        let is_starting = |after| super::super::is_starting(&worker, started.plus(after), deadline);
        assert!(is_starting(deadline / 2) && !is_starting(deadline));
        drop(end);
    }
}
