//! The thread that reads the GPUs of DRM drivers.
//!
//! It has a thread because the search through the descriptors of all processes takes milliseconds, which the cycle must
//! not wait for. It rests at least nine times as long as it works: never more than a tenth of one core.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::books::{self, Descriptor, Held};
use super::devices::{self, Card};
use super::engines::Engines;
use super::search::{Found, Search};
use crate::clock::Moment;
use crate::collect::gpu::{Device, GpuProcess, Health, Memory, Pids, Reading};
use crate::host::{ReadError, Roots};

/// Memory and processes are read again so often when they contradict each other.
const READ_AGAIN: usize = 2;
/// Rest after work, as a multiple of the work.
const REST: u32 = 9;
/// Most faults that wait to be counted.
const MOST_FAULTS: usize = 1_000;

const OTHER_PIDS: &str = "memledger does not run in the host's pid namespace";
const NO_PERMISSION: &str = "the open files of most processes cannot be read without CAP_SYS_PTRACE";

/// The cycle's end of the thread.
#[derive(Debug)]
pub struct Worker {
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug, Default)]
struct Shared {
    latest: Option<Arc<Reading>>,
    faults: Vec<&'static str>,
    answered: bool,
}

impl Worker {
    /// Starts the thread. It ends with the process.
    pub fn start(interval: Duration, roots: Roots, cgroup_v1: bool) -> Self {
        let shared = Arc::new(Mutex::new(Shared::default()));
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("drm".into()).stack_size(256 * 1024);
        let spawned = thread.spawn(move || {
            let mut reader = Reader::new(roots, cgroup_v1);
            loop {
                let began = Moment::now();
                let read = reader.read();
                enter(&theirs, read);
                let took = Moment::now().since(began);
                std::thread::sleep(interval.saturating_sub(took).max(took * REST));
            }
        });
        if let Err(error) = spawned {
            tracing::warn!(%error, "no thread for GPUs of DRM drivers");
        }
        Self { shared }
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
            if !raced(&memory, &held) {
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
        let held = books::hold(&descriptors, own_memory);
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
        let all_seen = proven && self.found.denied == 0 && computing.is_empty();
        let utilization = card.busy(faults).or(work.busy.filter(|_| all_seen));
        let processes = held.by_process.into_iter().map(|(key, used)| GpuProcess {
            busy: work.by_process.get(&key).copied().filter(|_| !computing.contains(&key)),
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
