//! Proportional shares of memory: the only per-process figure that adds up after a fork.
//!
//! `smaps_rollup` walks a process's page tables, 20 ms for a process of a GiB, holding its memory map meanwhile. So it
//! is read by a thread of its own, each process at most once per `--pss.interval`, and the thread rests nineteen times
//! as long as it worked: it never takes more than a twentieth of one core.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::room::{Room, Tight};
use super::{Collector, Context, Outcome, Output};
use crate::clock::Moment;
use crate::discover::ContainerId;
use crate::host::{Dir, ReadError};
use crate::parse::{lines, number};

/// Rest after work, as a multiple of the work: a duty of one twentieth.
const REST: u32 = 19;
/// A container's shares are not shown any longer than this many intervals after they were read.
const VALID_FOR: u32 = 4;
/// Except those of a container that is left alone because it is about to run out of memory.
const KEPT_FOR: Duration = Duration::from_secs(600);

/// One process to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Target {
    pid: u32,
    start_ticks: u64,
}

/// Proportional share by process, for each container that was measured as a whole.
#[derive(Clone, Debug, Default)]
pub struct Shares {
    by_container: HashMap<ContainerId, Arc<Measured>>,
}

#[derive(Clone, Debug)]
struct Measured {
    at: Moment,
    bytes: HashMap<u32, (u64, u64)>,
}

impl Shares {
    /// The share of one process in bytes; `None` if it was not measured, or was started since under the same pid.
    pub fn of(&self, container: &ContainerId, pid: u32, start_ticks: u64) -> Option<u64> {
        let (ticks, bytes) = self.by_container.get(container)?.bytes.get(&pid)?;
        (*ticks == start_ticks).then_some(*bytes)
    }

    /// True if the container was measured.
    pub fn has(&self, container: &ContainerId) -> bool {
        self.by_container.contains_key(container)
    }
}

struct Round {
    proc: PathBuf,
    containers: Vec<(ContainerId, Vec<Target>)>,
}

#[derive(Debug, Default)]
struct Results {
    shares: HashMap<ContainerId, Arc<Measured>>,
    /// Who is left alone, as of the newest cycle.
    tight: Tight,
    faults: Vec<ReadError>,
    denied: bool,
    changed: bool,
    /// Work on one container, and the whole of the last round with its rests.
    took: Duration,
    round: Duration,
}

/// The collector: hands a round to the thread when one is due, and takes over what the thread has finished.
#[derive(Debug)]
pub struct Pss {
    interval: Duration,
    room: Room,
    last: Option<Moment>,
    sender: Option<SyncSender<Round>>,
    results: Arc<Mutex<Results>>,
    took: Duration,
}

impl Pss {
    /// A collector that measures each process at most once per interval. The thread starts with the first round.
    pub fn new(interval: Duration) -> Self {
        Self {
            interval,
            room: Room::default(),
            last: None,
            sender: None,
            results: Arc::default(),
            took: Duration::ZERO,
        }
    }

    fn hand_over(&mut self, context: &Context<'_>, output: &Output<'_>) {
        let processes = &output.readings.processes;
        let containers = context.inventory.containers.iter().enumerate().map(|(number, container)| {
            let targets = processes.of(number).iter();
            let targets = targets.map(|p| Target { pid: p.pid, start_ticks: p.facts.start_ticks }).collect();
            (container.id.clone(), targets)
        });
        let round = Round { proc: context.roots.proc.clone(), containers: containers.collect() };
        let sender = self.sender.get_or_insert_with(|| start(Arc::clone(&self.results)));
        match sender.try_send(round) {
            Ok(()) => self.last = Some(context.now),
            Err(TrySendError::Full(_)) => {} // the round before is not finished: try again in the next cycle
            Err(TrySendError::Disconnected(_)) => self.sender = None,
        }
    }
}

impl Collector for Pss {
    fn name(&self) -> &'static str {
        "pss"
    }

    fn collect(&mut self, context: &Context<'_>, output: &mut Output<'_>) -> Outcome {
        let tight = self.room.enter(context, output.readings);
        self.results.lock().unwrap_or_else(PoisonError::into_inner).tight = tight;
        if self.last.is_none_or(|last| context.now.since(last) >= self.interval)
            && !output.readings.processes.is_empty()
        {
            self.hand_over(context, output);
        }
        let mut results = self.results.lock().unwrap_or_else(PoisonError::into_inner);
        let faults = std::mem::take(&mut results.faults);
        self.took = results.took;
        // on a large host a round takes longer than the interval
        let valid = (self.interval * VALID_FOR + Duration::from_secs(5)).max(results.round * 3);
        let before = results.shares.len();
        let Results { shares, tight, .. } = &mut *results;
        shares.retain(|id, measured| {
            let age = context.now.since(measured.at);
            age < valid || (tight.is(id) && age < KEPT_FOR)
        });
        if results.changed || before != results.shares.len() {
            results.changed = false;
            output.readings.pss = Arc::new(Shares { by_container: results.shares.clone() });
        }
        let failed = results.denied && results.shares.is_empty();
        drop(results);
        faults.iter().for_each(|error| output.faults.note(error));
        if failed || !output.readings.processes.readable { Outcome::Failed } else { Outcome::Read }
    }

    fn background(&self) -> Option<Duration> {
        Some(self.took)
    }
}

fn start(results: Arc<Mutex<Results>>) -> SyncSender<Round> {
    let (sender, rounds) = sync_channel::<Round>(0) /* a list is taken only when it is begun at once */;
    let thread = std::thread::Builder::new().name("pss".into()).stack_size(256 * 1024);
    let spawned = thread.spawn(move || {
        let mut buffer = Vec::new();
        while let Ok(round) = rounds.recv() {
            let round_began = Moment::now();
            for (id, targets) in &round.containers {
                let began = Moment::now();
                let measured = measure(&round.proc, id, targets, &results, &mut buffer);
                let took = Moment::now().since(began);
                enter(&results, id, measured, took);
                std::thread::sleep(took * REST);
            }
            let took = Moment::now().since(round_began);
            results.lock().unwrap_or_else(PoisonError::into_inner).round = took;
        }
    });
    if let Err(error) = spawned {
        tracing::warn!(%error, "no thread for proportional shares");
    }
    sender
}

fn enter(
    results: &Mutex<Results>,
    id: &ContainerId,
    measured: Result<Option<Measured>, ReadError>,
    took: Duration,
) {
    let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
    results.took = took;
    match measured {
        Ok(None) => {}
        Ok(Some(measured)) => {
            results.denied = false;
            results.shares.insert(id.clone(), Arc::new(measured));
            results.changed = true;
        }
        Err(error) => {
            results.denied |= error.fault_reason() == Some("permission");
            results.faults.push(error);
        }
    }
}

/// Measures a container's processes one after the other. Those that end meanwhile are left out; `None` if the container
/// is about to run out of memory.
fn measure(
    proc: &Path,
    id: &ContainerId,
    targets: &[Target],
    results: &Mutex<Results>,
    buffer: &mut Vec<u8>,
) -> Result<Option<Measured>, ReadError> {
    let mut bytes = HashMap::with_capacity(targets.len());
    for target in targets {
        if results.lock().unwrap_or_else(PoisonError::into_inner).tight.is(id) {
            return Ok(None);
        }
        match share(proc, *target, buffer) {
            Ok(Some(share)) => drop(bytes.insert(target.pid, (target.start_ticks, share))),
            Ok(None) => {}
            Err(error) if error.is_gone() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(Some(Measured { at: Moment::now(), bytes }))
}

fn share(proc: &Path, target: Target, buffer: &mut Vec<u8>) -> Result<Option<u64>, ReadError> {
    let dir = Dir::open(&proc.join(target.pid.to_string()))?;
    let stat = dir.file("stat")?.read_once(buffer).map(crate::parse::process::Stat::parse)?;
    if stat.is_none_or(|stat| stat.start_ticks != target.start_ticks) {
        return Ok(None); // another process by now
    }
    let text = dir.file("smaps_rollup")?;
    let text = text.read_once(buffer)?;
    let line = lines(text).find_map(|line| line.strip_prefix(b"Pss:"));
    let kib = line.and_then(|line| number(line.trim_ascii().strip_suffix(b"kB")?));
    let bytes = kib.and_then(|kib| kib.checked_mul(1024));
    bytes.map(Some).ok_or_else(|| ReadError::malformed("smaps_rollup"))
}
