//! Proportional set size (PSS): the only per-process memory value that can be summed after a fork.
//!
//! Reading `smaps_rollup` walks a process's page tables, which takes 20 ms for a process of 1 GiB and holds its mmap
//! lock meanwhile, and it waits for the current holder of that lock. So it is read on another thread ([`ReadPool`]),
//! for each process at most once per `--pss.interval`, and the thread rests for nineteen times the CPU time that it
//! used: at most a twentieth of one core. After an expensive read most of the rest is its container's own, and containers take
//! turns of five seconds, so one with many expensive processes delays the others little; the thread then uses a quarter of
//! one core at most.
//!
//! If a process blocks its reader, the shares of its container are absent.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::memory_headroom::{LowHeadroom, MemoryHeadroom};
use super::target::{Target, TargetOwner};
use super::{CollectOutcome, Collector, Context, Output};
use crate::clock::Timestamp;
use crate::discover::ContainerId;
use crate::host::ReadError;
use crate::host::read_pool::{PoolConfig, ReadOutcome, ReadPool};
use crate::parse::{lines, number};

/// A process of 1 TiB may take 20 s. The processes of one container are read in sequence, so that their shares are close in time.
const POOL_CONFIG: PoolConfig = PoolConfig {
    name: "pss",
    handover_after: Duration::from_secs(2),
    timeout: Duration::from_secs(30),
    rest_factor: 19,
    turn: Duration::from_secs(5),
};
/// The shares of a container expire this many intervals after they were read.
const VALID_INTERVALS: u32 = 4;
/// Shares of a container with low headroom, which is not measured, expire later.
const LOW_HEADROOM_VALID: Duration = Duration::from_secs(600);

/// Proportional share of each process, for each container that was measured completely.
#[derive(Clone, Debug, Default)]
pub struct PssShares {
    by_container: HashMap<ContainerId, Arc<MeasuredShares>>,
}

#[derive(Clone, Debug)]
struct MeasuredShares {
    at: Timestamp,
    /// Duration of the measurement, including rests.
    took: Duration,
    bytes: HashMap<u32, (u64, u64)>,
}

impl PssShares {
    /// Returns the share of a process in bytes, or `None` if it was not measured or its pid was reused since.
    pub fn of(&self, container: &ContainerId, pid: u32, start_ticks: u64) -> Option<u64> {
        let (ticks, bytes) = self.by_container.get(container)?.bytes.get(&pid)?;
        (*ticks == start_ticks).then_some(*bytes)
    }

    /// Returns true if the container was measured.
    pub fn has(&self, container: &ContainerId) -> bool {
        self.by_container.contains_key(container)
    }
}

/// A queued read: a process of a container, in a round.
#[derive(Clone, Debug)]
struct Share {
    round: u64,
    id: ContainerId,
    target: Target,
}

/// A container that is being measured.
#[derive(Debug)]
struct Measurement {
    round: u64,
    began: Timestamp,
    /// Number of pending processes.
    pending: usize,
    bytes: HashMap<u32, (u64, u64)>,
    took: Duration,
    /// A read failed, so the result will be incomplete.
    has_failed: bool,
}

/// Bytes, or `None` if the container has low headroom; and the duration of the read.
type PssRead = (Option<u64>, Duration);

/// The collector: starts a measurement of each container that is due, and collects the outcomes. One
/// whose processes block their readers delays only its pod, and one whose processes are expensive to read mostly itself.
#[derive(Debug)]
pub struct Pss {
    interval: Duration,
    headroom: MemoryHeadroom,
    /// Number of the newest measurements.
    round: u64,
    /// Start of the newest measurement of each container.
    started: HashMap<ContainerId, Timestamp>,
    pool: Option<ReadPool<TargetOwner, Share, PssRead>>,
    measuring: HashMap<ContainerId, Measurement>,
    shares: HashMap<ContainerId, Arc<MeasuredShares>>,
    /// Containers with low headroom in the newest cycle, which are not measured.
    low_headroom: Arc<Mutex<LowHeadroom>>,
    denied: bool,
    changed: bool,
    /// Total read time of the last container.
    took: Duration,
}

impl Pss {
    /// Creates a collector that measures each process at most once per interval. The thread starts with the first
    /// round.
    pub fn new(interval: Duration) -> Self {
        Self {
            interval,
            headroom: MemoryHeadroom::default(),
            round: 0,
            started: HashMap::new(),
            pool: None,
            measuring: HashMap::new(),
            shares: HashMap::new(),
            low_headroom: Arc::default(),
            denied: false,
            changed: false,
            took: Duration::ZERO,
        }
    }

    fn start_due(&mut self, context: &Context<'_>, output: &Output<'_>) {
        let pool = self.pool.get_or_insert_with(|| {
            let (proc, low_headroom) = (context.host_paths.proc.clone(), Arc::clone(&self.low_headroom));
            ReadPool::new(POOL_CONFIG, move |share: &Share, buffer| {
                if lock(&low_headroom).contains(&share.id) {
                    return Ok((None, Duration::ZERO));
                }
                let began = Timestamp::now();
                let bytes = read(&proc, share.target, buffer)?;
                Ok((Some(bytes), Timestamp::now().since(began)))
            })
        });
        self.round += 1;
        let mut reads = Vec::new();
        for (number, container) in context.inventory.containers.iter().enumerate() {
            let started = self.started.get(&container.id);
            if started.is_some_and(|started| context.now.since(*started) < self.interval)
                || self.measuring.contains_key(&container.id)
            {
                continue;
            }
            let members = output.cycle_data.processes.of(number);
            if members.is_empty() && !output.cycle_data.processes.complete(number) {
                continue;
            }
            self.started.insert(container.id.clone(), context.now);
            if members.is_empty() {
                let measured =
                    MeasuredShares { at: context.now, took: Duration::ZERO, bytes: HashMap::new() };
                self.shares.insert(container.id.clone(), Arc::new(measured));
                self.changed = true;
                continue;
            }
            let measurement = Measurement {
                round: self.round,
                began: context.now,
                pending: members.len(),
                bytes: HashMap::new(),
                took: Duration::ZERO,
                has_failed: false,
            };
            self.measuring.insert(container.id.clone(), measurement);
            let owner = TargetOwner::of(container);
            reads.extend(members.iter().map(|process| {
                let target = Target { pid: process.pid, start_ticks: process.meta.start_ticks };
                (owner.clone(), Share { round: self.round, id: container.id.clone(), target })
            }));
        }
        if !reads.is_empty() {
            pool.submit(reads);
        }
    }

    fn take(&mut self, now: Timestamp, output: &mut Output<'_>) {
        let outcomes = self.pool.as_ref().map(ReadPool::take).unwrap_or_default();
        for (TargetOwner { id, .. }, share, outcome) in outcomes {
            // a read that hung in an earlier measurement has another round
            let measurement = self.measuring.get_mut(&id).filter(|running| running.round == share.round);
            let Some(measurement) = measurement else { continue };
            measurement.pending -= 1;
            match outcome {
                ReadOutcome::Finished(Ok((Some(bytes), took))) => {
                    measurement.took += took;
                    measurement.bytes.insert(share.target.pid, (share.target.start_ticks, bytes));
                }
                ReadOutcome::Finished(Ok((None, _))) => measurement.has_failed = true,
                ReadOutcome::Skipped => {
                    output.read_errors.count("blocked");
                    measurement.has_failed = true;
                }
                ReadOutcome::Finished(Err(error)) if error.is_gone() => {}
                ReadOutcome::Finished(Err(error)) => {
                    // usually the same error for all processes of a container
                    if !measurement.has_failed {
                        output.read_errors.record_of(&id, &error);
                    }
                    self.denied |= error.reason_label() == Some("permission");
                    measurement.has_failed = true;
                }
            }
            if measurement.pending == 0 {
                self.finish(now, id);
            }
        }
    }

    fn finish(&mut self, now: Timestamp, id: ContainerId) {
        let Some(measurement) = self.measuring.remove(&id) else { return };
        self.took = measurement.took;
        if !measurement.has_failed {
            self.denied = false;
            self.changed = true;
            let took = now.since(measurement.began);
            self.shares.insert(id, Arc::new(MeasuredShares { at: now, took, bytes: measurement.bytes }));
        }
    }
}

fn lock(low_headroom: &Mutex<LowHeadroom>) -> MutexGuard<'_, LowHeadroom> {
    low_headroom.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Collector for Pss {
    fn name(&self) -> &'static str {
        "pss"
    }

    fn collect(&mut self, context: &Context<'_>, output: &mut Output<'_>) -> CollectOutcome {
        output.read_errors.init_at_zero("blocked");
        output.read_errors.init_at_zero("timeout");
        output.read_errors.init_at_zero("too_large");
        let low_headroom = self.headroom.update(context, output.cycle_data);
        self.take(context.now, output);
        let running = context.inventory.ids();
        self.started.retain(|id, _| running.contains(id));
        let before = self.shares.len();
        self.shares.retain(|id, measured| {
            // on a large host a measurement takes longer than the interval
            let valid = (self.interval * VALID_INTERVALS + Duration::from_secs(5)).max(measured.took * 3);
            let age = context.now.since(measured.at);
            age < valid || (low_headroom.contains(id) && age < LOW_HEADROOM_VALID)
        });
        *lock(&self.low_headroom) = low_headroom;
        if !output.cycle_data.processes.is_empty() {
            self.start_due(context, output);
        }
        if std::mem::take(&mut self.changed) || before != self.shares.len() {
            output.cycle_data.pss = Arc::new(PssShares { by_container: self.shares.clone() });
        }
        let is_blocked = self.pool.as_ref().is_some_and(ReadPool::is_blocked);
        let failed = is_blocked || (self.denied && self.shares.is_empty());
        if failed || !output.cycle_data.processes.readable {
            CollectOutcome::Failed
        } else {
            CollectOutcome::Ok
        }
    }

    fn background(&self) -> Option<Duration> {
        Some(self.took)
    }
}

fn read(proc: &Path, target: Target, buffer: &mut Vec<u8>) -> Result<u64, ReadError> {
    let file = target.open(proc, buffer)?.file("smaps_rollup")?;
    let text = file.read_once(buffer)?;
    let line = lines(text).find_map(|line| line.strip_prefix(b"Pss:"));
    let kib = line.and_then(|line| number(line.trim_ascii().strip_suffix(b"kB")?));
    let bytes = kib.and_then(|kib| kib.checked_mul(1024));
    bytes.ok_or_else(|| ReadError::malformed("smaps_rollup"))
}
