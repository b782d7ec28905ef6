//! The thread that reads the GPUs of DRM drivers.
//!
//! It has a thread because the search through the descriptors of all processes takes milliseconds, which the cycle must
//! not wait for, and because a driver may hang in any of these files. It rests nine times as long as it works, so that it
//! takes a tenth of one core at most; only where the readings would grow too old to be shown it rests less.
//!
//! A thread that hangs is left where it is: another one would hang beside it. One that ended, by a fault of memledger's own,
//! is followed by another.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::books::{self, Descriptor, Held};
use super::devices::{self, Card};
use super::engines::Engines;
use super::search::{Found, Search};
use crate::clock::Moment;
use crate::collect::gpu::{Device, GpuProcess, Health, Memory, Pids, Reading};
use crate::config::GpuSettings;
use crate::host::{ReadError, Roots};

/// Memory and processes are read again so often when they contradict each other, if the reading has not taken long.
const READ_AGAIN: usize = 2;
const NOT_LONG: Duration = Duration::from_millis(100);
/// Rest after work, as a multiple of the work.
const REST: u32 = 9;
/// A thread that ended is followed by another once it is so old.
const START_AGAIN: Duration = Duration::from_secs(30);
/// Most faults that wait to be counted.
const MOST_FAULTS: usize = 1_000;

const OTHER_PIDS: &str = "memledger does not run in the host's pid namespace";
const NO_PERMISSION: &str = "the open files of most processes cannot be read without CAP_SYS_PTRACE";

/// The cycle's end of the thread.
#[derive(Debug)]
pub struct Worker {
    task: Task,
    started: Moment,
    shared: Arc<Mutex<Shared>>,
}

/// What the thread does.
#[derive(Clone, Debug)]
struct Task {
    interval: Duration,
    longest_rest: Duration,
    roots: Roots,
    cgroup_v1: bool,
}

#[derive(Debug, Default)]
struct Shared {
    latest: Option<Arc<Reading>>,
    faults: Vec<&'static str>,
    answered: bool,
}

impl Worker {
    /// Starts the thread. It ends with the process. `now`: its deadline counts from here.
    pub fn start(settings: &GpuSettings, roots: Roots, cgroup_v1: bool, now: Moment) -> Self {
        let GpuSettings { interval, deadline, .. } = *settings;
        let task = Task { interval, longest_rest: deadline / 2, roots, cgroup_v1 };
        Self::start_task(task, now)
    }

    fn start_task(task: Task, now: Moment) -> Self {
        let shared = spawn({
            let task = task.clone();
            move |shared| run(task, shared)
        });
        Self { task, started: now, shared }
    }

    /// Starts another thread if the old one ended by itself.
    pub fn keep_alive(&mut self, now: Moment) {
        let has_ended = Arc::strong_count(&self.shared) == 1; // the thread holds the other
        if has_ended && now.since(self.started) > START_AGAIN {
            tracing::error!(
                "the thread of GPUs of DRM drivers ended by itself, which is a bug; starting another"
            );
            *self = Self::start_task(self.task.clone(), now);
        }
    }

    /// When the thread was started.
    pub fn started(&self) -> Moment {
        self.started
    }

    /// The newest answer, however old; `None` if there is no such GPU now.
    pub fn latest(&self) -> Option<Arc<Reading>> {
        lock(&self.shared).latest.clone()
    }

    /// Faults since they were last taken.
    pub fn take_faults(&self) -> Vec<&'static str> {
        std::mem::take(&mut lock(&self.shared).faults)
    }

    /// True once it has read the GPUs, with whatever success.
    pub fn has_answered(&self) -> bool {
        lock(&self.shared).answered
    }
}

fn spawn(work: impl FnOnce(&Mutex<Shared>) + Send + 'static) -> Arc<Mutex<Shared>> {
    let shared = Arc::new(Mutex::new(Shared::default()));
    let theirs = Arc::clone(&shared);
    let thread = std::thread::Builder::new().name("drm".into()).stack_size(256 * 1024);
    if let Err(error) = thread.spawn(move || work(&theirs)) {
        tracing::warn!(%error, "no thread for GPUs of DRM drivers");
    }
    shared
}

fn run(task: Task, shared: &Mutex<Shared>) {
    let mut reader = Reader::new(task.roots, task.cgroup_v1);
    loop {
        let began = Moment::now();
        let read = reader.read();
        enter(shared, read);
        let took = Moment::now().since(began);
        let rest = (took * REST).min(task.longest_rest);
        std::thread::sleep(task.interval.saturating_sub(took).max(rest));
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn enter(shared: &Mutex<Shared>, read: Result<Option<Reading>, ReadError>) {
    let mut shared = lock(shared);
    shared.answered = true;
    match read {
        Ok(reading) => {
            shared.faults.extend(reading.iter().flat_map(|reading| &reading.faults));
            shared.latest = reading.map(Arc::new);
        }
        Err(error) => {
            tracing::debug!(%error, "GPUs of DRM drivers cannot be read");
            shared.latest = None;
            shared.faults.extend(error.fault_reason());
        }
    }
    shared.faults.truncate(MOST_FAULTS);
}

/// What lives from reading to reading.
#[derive(Debug)]
pub struct Reader {
    roots: Roots,
    cgroup_v1: bool,
    search: Search,
    engines: Engines,
    told: Option<&'static str>,
}

impl Reader {
    /// A reader of this host.
    pub fn new(roots: Roots, cgroup_v1: bool) -> Self {
        Self { roots, cgroup_v1, search: Search::default(), engines: Engines::default(), told: None }
    }

    /// Reads all GPUs of DRM drivers; `None` if there are none.
    ///
    /// # Errors
    /// Devices or processes cannot be listed.
    pub fn read(&mut self) -> Result<Option<Reading>, ReadError> {
        let began = Moment::now();
        let mut faults = Vec::new();
        let cards = devices::list(&self.roots, &mut faults)?;
        if cards.is_empty() {
            return Ok(None);
        }
        let pids_are_the_hosts = self.roots.in_first_pid_namespace();
        let mut found = match pids_are_the_hosts {
            true => self.search.round(&self.roots, self.cgroup_v1)?,
            false => Found::default(),
        };
        let pids = match () {
            () if !pids_are_the_hosts => Pids::Withheld(OTHER_PIDS),
            // a few that guard themselves hide little; most hidden, and who holds a GPU is not known
            () if found.denied > found.readable => Pids::Withheld(NO_PERMISSION),
            () => Pids::Proven,
        };
        self.tell(pids);
        let (mut memory, mut held) = (read_memory(&cards, &mut faults), held(&cards, &found));
        for _ in 0..READ_AGAIN {
            if !raced(&memory, &held) || Moment::now().since(began) > NOT_LONG {
                break;
            }
            faults.append(&mut found.faults);
            let (denied, readable) = (found.denied, found.readable);
            found = Found { denied, readable, ..self.search.known() };
            (memory, held) = (read_memory(&cards, &mut faults), self::held(&cards, &found));
        }
        let at = Moment::now();
        let mut read = Read { cards: &cards, found: &found, engines: &mut self.engines, at };
        let devices: Vec<_> = std::iter::zip(memory, held)
            .enumerate()
            .map(|(number, (memory, held))| read.device(number, memory, held, pids, &mut faults))
            .collect();
        self.engines.end_reading();
        faults.append(&mut found.faults);
        let at = Moment::now();
        Ok(Some(Reading {
            source: super::NAME,
            at,
            took: at.since(began),
            driver_version: None,
            cuda_version: None,
            counted: cards.len(),
            devices,
            silent: vec![],
            pids,
            faults,
        }))
    }

    /// Says once why GPU memory is nobody's.
    fn tell(&mut self, pids: Pids) {
        let reason = match pids {
            Pids::Proven => None,
            Pids::Withheld(reason) => Some(reason),
        };
        if let (Some(reason), true) = (reason, self.told != reason) {
            tracing::warn!(
                "memory of GPUs of DRM drivers stays unattributed: {reason}; `memledger doctor` says what to change"
            );
        }
        self.told = reason;
    }
}

fn read_memory(cards: &[Card], faults: &mut Vec<&'static str>) -> Vec<Memory> {
    cards.iter().map(|card| card.memory(faults)).collect()
}

/// The descriptors of each card, in the order of the cards.
fn of_cards(cards: &[Card], found: &Found) -> Vec<Vec<Descriptor>> {
    let mut all = vec![Vec::new(); cards.len()];
    let off_the_bus: Vec<_> =
        (0..cards.len()).filter(|at| cards[*at].identity.pci_bus_id.is_empty()).collect();
    for (node, descriptor) in &found.descriptors {
        let client = &descriptor.client;
        let at = match (&client.pdev, &off_the_bus[..]) {
            (Some(pdev), _) => cards.iter().position(|card| card.address.as_bytes() == &pdev[..]),
            // a container may know a node by another name, so where there is one such GPU the name does not matter
            (None, [only]) => Some(*only).filter(|at| cards[*at].driver.as_bytes() == &client.driver[..]),
            (None, _) => cards.iter().position(|card| card.nodes.contains(node)),
        };
        // of no card: one of NVIDIA's driver, or one that came a moment ago
        if let Some(at) = at {
            all[at].push(descriptor.clone());
        }
    }
    all
}

fn held(cards: &[Card], found: &Found) -> Vec<(Vec<Descriptor>, Held)> {
    let all = of_cards(cards, found);
    let hold = |(card, descriptors): (&Card, Vec<Descriptor>)| {
        let own_memory = card.has_own_memory() || books::has_own_memory(&descriptors);
        let mut held = books::hold(&descriptors, own_memory);
        for (process, nodes) in &found.in_part {
            let is_read = descriptors.iter().any(|descriptor| descriptor.holder == *process);
            if is_read || card.nodes.iter().any(|node| nodes.contains(node)) {
                held.withhold(*process);
            }
        }
        (descriptors, held)
    };
    std::iter::zip(cards, all).map(hold).collect()
}

fn raced(memory: &[Memory], held: &[(Vec<Descriptor>, Held)]) -> bool {
    std::iter::zip(memory, held).any(|(memory, (_, held))| is_race(memory, held))
}

fn is_race(memory: &Memory, held: &Held) -> bool {
    memory.used.is_some_and(|used| held.sum() > used)
}

/// All that one reading brought, to make devices of it.
struct Read<'a> {
    cards: &'a [Card],
    found: &'a Found,
    engines: &'a mut Engines,
    at: Moment,
}

impl Read<'_> {
    fn device(
        &mut self,
        number: usize,
        memory: Memory,
        (descriptors, held): (Vec<Descriptor>, Held),
        pids: Pids,
        faults: &mut Vec<&'static str>,
    ) -> Device {
        let card = &self.cards[number];
        faults.extend(std::iter::repeat_n("malformed", held.malformed));
        // more than there is: these are not the figures that we take them for
        let impossible = memory.total.is_some_and(|total| held.sum() > total);
        faults.extend(impossible.then_some("malformed"));
        let raced = !impossible && is_race(&memory, &held);
        let proven = pids == Pids::Proven;
        let work = self.engines.work(&card.identity.uuid, &books::clients(&descriptors), self.at);
        let computing = &self.found.computing;
        // AMD's device for computing takes work that the engines' statistics do not see
        let in_part = &self.found.in_part;
        let all_seen = proven && self.found.denied == 0 && computing.is_empty() && in_part.is_empty();
        let utilization = card.busy(faults).or(work.busy.filter(|_| all_seen));
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
        Device {
            memory,
            processes: (proven && !impossible).then_some(processes),
            raced,
            health: Health { utilization, ..Health::default() },
            ..Device::new(Arc::clone(&card.identity))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(work: impl FnOnce(&Mutex<Shared>) + Send + 'static) -> Worker {
        let empty = tempfile::tempdir().unwrap(); // a host without a GPU answers at once
        let roots = Roots { sys: empty.path().to_path_buf(), ..Roots::default() };
        let (interval, longest_rest) = (Duration::from_millis(50), Duration::ZERO);
        let task = Task { interval, longest_rest, roots, cgroup_v1: false };
        Worker { task, started: Moment::now(), shared: spawn(work) }
    }

    fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
        let began = Moment::now();
        while !is_so() {
            assert!(Moment::now().since(began) < Duration::from_secs(20), "no {what} in 20 s");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_thread_that_ended_is_followed_by_another_but_not_at_once() {
        let mut worker = worker(|_| {});
        let (ended, started) = (Arc::downgrade(&worker.shared), worker.started());
        eventually("end of the thread", || ended.strong_count() == 1);
        worker.keep_alive(started.plus(START_AGAIN));
        assert_eq!(ended.strong_count(), 1, "it has not rested yet");
        let later = started.plus(START_AGAIN + Duration::from_secs(1));
        worker.keep_alive(later);
        assert_eq!((ended.strong_count(), worker.started()), (0, later));
        eventually("answer of the new thread", || worker.has_answered());
    }

    #[test]
    fn a_thread_that_hangs_is_left_alone_and_a_failure_after_the_deadline() {
        let (end, waits) = std::sync::mpsc::channel::<()>();
        let mut worker = worker(move |_| waits.recv().unwrap_or_default());
        let started = worker.started();
        worker.keep_alive(started.plus(Duration::from_secs(3600)));
        assert_eq!((worker.started(), worker.has_answered()), (started, false));
        let deadline = Duration::from_secs(5);
        let is_starting = |after| super::super::is_starting(&worker, started.plus(after), deadline);
        assert!(is_starting(deadline / 2) && !is_starting(deadline));
        drop(end);
    }
}
