//! Proportional set size (PSS): the only per-process memory value that can be summed after a fork.
//!
//! Reading `smaps_rollup` walks a process's page tables and holds its mmap lock meanwhile: a process that maps or unmaps memory
//! waits as long as the walk takes, 10 to 20 ms for each GiB of small pages. So the walk is bounded by what its process may wait:
//!
//! * It is assumed to take [`ASSUMED_WALK_PER_GIB`], until a walk of that process has taken less.
//! * A process that waits at most [`MAX_WAIT`] is walked once per `--pss.interval`; one that waits at most [`MAX_RARE_WAIT`], once per
//!   [`RARE_INTERVAL`], new ones of the same container too; one that would wait longer, never.
//! * The largest process of a container is not walked where it would wait more than [`MAX_WAIT`]: its share is what the shares of the
//!   others leave of the anonymous and mapped memory that its cgroup is charged for.
//!
//! It is read on another thread ([`ReadPool`]), which rests for nineteen times the CPU time of a read, or at least pauses that container
//! for as long. If a process blocks its reader, the shares of its container are absent.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use procfs::FromBufRead;
use procfs::process::SmapsRollup;
use serde::{Deserialize, Serialize};

use super::container_owner::ContainerOwner;
use super::memory_headroom::{LowHeadroom, MemoryHeadroom};
use super::process::resident_memory;
use super::{CollectOutcome, Collector, Context, Output};
use crate::clock::Timestamp;
use crate::discover::{Container, ContainerId};
use crate::host::ReadError;
use crate::host::process::ProcessId;
use crate::host::read_pool::{PoolConfig, ReadOutcome, ReadPool, cpu_time};

/// The processes of one container are read in sequence, so that their shares are close in time.
const POOL_CONFIG: PoolConfig = PoolConfig {
    name: "pss",
    handover_after: Duration::from_secs(2),
    timeout: Duration::from_secs(30),
    rest_factor: 19,
    turn: Duration::from_secs(5),
};
/// Duration of a walk of 1 GiB of small pages on a slow host, as measured by `benches/readers.rs`.
const ASSUMED_WALK_PER_GIB: Duration = Duration::from_millis(20);
/// How long a process may wait for its walk in each interval.
const MAX_WAIT: Duration = Duration::from_millis(50);
/// How long it may wait once in [`RARE_INTERVAL`].
const MAX_RARE_WAIT: Duration = Duration::from_millis(500);
/// See [`MAX_RARE_WAIT`].
const RARE_INTERVAL: Duration = Duration::from_secs(600);
/// Rare walks of a container begin within this time of each other: its processes may start one after the other.
const RARE_WINDOW: Duration = Duration::from_secs(30);
/// A walk is out of date if the resident memory, or the anonymous memory of the container, has changed since by more than one part in
/// this many.
const MAX_CHANGE_DIVISOR: u64 = 8;
/// The shares of a container expire this many intervals after they were read.
const VALID_INTERVALS: u32 = 4;
/// Shares of a container with low headroom, which is not measured, expire later.
const LOW_HEADROOM_VALID: Duration = Duration::from_secs(600);

/// Reason of read errors: a share is left out, because its process would wait too long for the walk.
const EXPENSIVE: &str = "expensive";

/// Why the proportional share (PSS) of a process is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PssMissing {
    /// Its container, or the process, was not measured yet.
    NotYet,
    /// memledger lacks CAP_SYS_PTRACE.
    Permission,
    /// The process would wait too long for it.
    Expensive,
    /// Containers with little memory left are not measured: that delays the release of a victim's memory.
    LowHeadroom,
}

/// Proportional share of each process, for each container that was measured completely.
#[derive(Clone, Debug, Default)]
pub struct PssShares {
    by_container: HashMap<ContainerId, Arc<MeasuredShares>>,
    /// Why shares of a container are missing, where another reason than the pause between measurements is known.
    missing: HashMap<ContainerId, PssMissing>,
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

    /// Returns why the share of a process of this container is not known.
    pub fn missing(&self, container: &ContainerId) -> PssMissing {
        self.missing.get(container).copied().unwrap_or(PssMissing::NotYet)
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
    target: ProcessId,
    last: Option<SmapsWalk>,
    /// How long the process may wait for this read: it may have grown since the read was queued.
    max_wait: Duration,
}

/// What shares depend on beside their process: if it changes, pages are shared by more or fewer processes.
#[derive(Clone, Copy, Debug, Default)]
struct Surroundings {
    /// Anonymous memory of the container; a share does not hold if it is unknown.
    anon: Option<u64>,
    /// Number of its processes.
    processes: usize,
}

/// The last walk of a process.
#[derive(Clone, Copy, Debug)]
struct SmapsWalk {
    at: Timestamp,
    /// CPU time of the walk: how long the process had to wait.
    took: Duration,
    /// Resident memory before it.
    rss: u64,
    surroundings: Surroundings,
    bytes: u64,
}

impl SmapsWalk {
    /// Returns whether the share still holds.
    fn holds(&self, rss: u64, now: Surroundings) -> bool {
        let is_near = |now: u64, then: u64| now.abs_diff(then) <= then / MAX_CHANGE_DIVISOR;
        is_near(rss, self.rss)
            && now.anon.zip(self.surroundings.anon).is_some_and(|(now, then)| is_near(now, then))
            && now.processes == self.surroundings.processes
    }
}

/// How the share of a process is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ShareSource {
    /// A walk for which the process may wait this long.
    Walk(Duration),
    /// The bytes of the last walk, which still hold.
    LastWalk(u64),
    /// What the others leave.
    Remainder,
    Unknown,
}

/// Returns how long a process of this size waits for its walk: as for its last one, and as long as assumed for what it has more since.
fn expected_wait(rss: u64, last: Option<&SmapsWalk>) -> Duration {
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let Some(last) = last else { return ASSUMED_WALK_PER_GIB.mul_f64(gib(rss)) };
    let remaining = (rss as f64 / last.rss.max(1) as f64).min(1.0);
    last.took.mul_f64(remaining) + ASSUMED_WALK_PER_GIB.mul_f64(gib(rss.saturating_sub(last.rss)))
}

/// Decides how the share of each process of a container is found. `processes`: their resident memory and last walks; `may_wait_long`: rare
/// walks of this container are due; `has_figure` returns whether the container has a figure of which the others leave the largest's
/// share.
fn share_sources(
    now: Timestamp,
    surroundings: Surroundings,
    processes: &[(u64, Option<&SmapsWalk>)],
    may_wait_long: bool,
    has_figure: impl FnOnce() -> bool,
) -> Vec<ShareSource> {
    let source = |(rss, last): &(u64, Option<&SmapsWalk>)| {
        let wait = expected_wait(*rss, *last);
        let has_waited = |last: &SmapsWalk| last.took > MAX_WAIT && now.since(last.at) < RARE_INTERVAL;
        let may_wait_long = may_wait_long && !last.is_some_and(has_waited);
        match last {
            _ if wait <= MAX_WAIT => ShareSource::Walk(MAX_WAIT),
            _ if wait <= MAX_RARE_WAIT && may_wait_long => ShareSource::Walk(MAX_RARE_WAIT),
            Some(last) if last.holds(*rss, surroundings) => ShareSource::LastWalk(last.bytes),
            _ => ShareSource::Unknown,
        }
    };
    let mut sources: Vec<_> = processes.iter().map(source).collect();
    if let Some(largest) = (0..processes.len()).max_by_key(|at| processes[*at].0) {
        let (rss, last) = processes[largest];
        let others_known = (0..sources.len()).all(|at| at == largest || sources[at] != ShareSource::Unknown);
        if expected_wait(rss, last) > MAX_WAIT && others_known && has_figure() {
            sources[largest] = ShareSource::Remainder;
        }
    }
    sources
}

/// Returns the memory of a container of which its processes have shares: anonymous, and mapped pages of files and shared memory.
/// `None` if the kernel does not report it, other containers lie inside, or not all processes are known.
fn shared_memory(context: &Context<'_>, output: &Output<'_>, number: usize) -> Option<u64> {
    let containers = &context.inventory.containers;
    let path = &containers[number].cgroup.as_ref()?.path;
    let is_inside = |other: &Container| {
        other.cgroup.as_ref().is_some_and(|cgroup| cgroup.path != *path && cgroup.path.starts_with(path))
    };
    if containers.iter().any(|other| other.nested && is_inside(other)) {
        return None;
    }
    if !output.cycle_data.processes.complete(number) {
        return None;
    }
    let memory = output.cycle_data.memory.get(number)?.as_ref()?;
    Some(memory.anon?.saturating_add(memory.mapped?))
}

/// A container that is being measured.
#[derive(Debug)]
struct Measurement {
    round: u64,
    began: Timestamp,
    /// Number of pending processes.
    pending: usize,
    bytes: HashMap<u32, (u64, u64)>,
    /// CPU time of the walks.
    took: Duration,
    /// A read failed, so the result will be incomplete.
    has_failed: bool,
    /// A share is left out, because its process would wait too long.
    is_expensive: bool,
    /// The process whose share is the remainder.
    remainder: Option<ProcessId>,
}

impl Measurement {
    fn new(round: u64, began: Timestamp) -> Self {
        Self {
            round,
            began,
            pending: 0,
            bytes: HashMap::new(),
            took: Duration::ZERO,
            has_failed: false,
            is_expensive: false,
            remainder: None,
        }
    }
}

/// The outcome of a read.
#[derive(Clone, Copy, Debug)]
enum PssRead {
    Measured {
        bytes: u64,
        /// Resident memory just before.
        rss: u64,
        /// CPU time.
        took: Duration,
    },
    /// The container has low headroom.
    LowHeadroom,
    /// The process has grown, and would wait too long.
    Grown,
}

/// The collector: starts a measurement of each container that is due, and collects the outcomes. One
/// whose processes block their readers delays only its pod.
#[derive(Debug)]
pub struct Pss {
    interval: Duration,
    headroom: MemoryHeadroom,
    /// Number of the newest measurements.
    round: u64,
    /// Start of the newest measurement of each container.
    started: HashMap<ContainerId, Timestamp>,
    /// Last walks of the processes of each container.
    walks: HashMap<ContainerId, HashMap<ProcessId, SmapsWalk>>,
    /// When the newest rare walks of each container began.
    rare_since: HashMap<ContainerId, Timestamp>,
    pool: Option<ReadPool<ContainerOwner, Share, PssRead>>,
    measuring: HashMap<ContainerId, Measurement>,
    shares: HashMap<ContainerId, Arc<MeasuredShares>>,
    missing: HashMap<ContainerId, PssMissing>,
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
            walks: HashMap::new(),
            rare_since: HashMap::new(),
            pool: None,
            measuring: HashMap::new(),
            shares: HashMap::new(),
            missing: HashMap::new(),
            low_headroom: Arc::default(),
            denied: false,
            changed: false,
            took: Duration::ZERO,
        }
    }

    fn start_due(&mut self, context: &Context<'_>, output: &mut Output<'_>) {
        let mut reads = Vec::new();
        self.round += 1;
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
            self.start(context, output, number, &mut reads);
        }
        if reads.is_empty() {
            return;
        }
        let pool = self.pool.get_or_insert_with(|| {
            let (proc, low_headroom) = (context.host_paths.proc.clone(), Arc::clone(&self.low_headroom));
            ReadPool::new(POOL_CONFIG, move |share: &Share, buffer| {
                if lock(&low_headroom).contains(&share.id) {
                    return Ok(PssRead::LowHeadroom);
                }
                read(&proc, share, buffer)
            })
        });
        pool.submit(reads);
    }

    /// Starts the measurement of a container: adds its walks to `reads`, and ends it if there are none.
    fn start(
        &mut self,
        context: &Context<'_>,
        output: &mut Output<'_>,
        number: usize,
        reads: &mut Vec<(ContainerOwner, Share)>,
    ) {
        let container = &context.inventory.containers[number];
        let members = output.cycle_data.processes.of(number);
        self.started.insert(container.id.clone(), context.now);
        let has_figure = || shared_memory(context, output, number).is_some();
        let targets = members
            .iter()
            .map(|process| ProcessId { pid: process.pid, start_ticks: process.meta.start_ticks })
            .collect::<Vec<_>>();
        let walks = self.walks.entry(container.id.clone()).or_default();
        if !walks.is_empty() {
            let running: HashSet<_> = targets.iter().collect();
            walks.retain(|target, _| running.contains(target));
        }
        let sizes: Vec<_> = std::iter::zip(members, &targets)
            .map(|(process, target)| (process.memory.rss_bytes, walks.get(target)))
            .collect();
        let surroundings = surroundings(output, number);
        let rare_age = self.rare_since.get(&container.id).map(|since| context.now.since(*since));
        let may_wait_long = rare_age.is_none_or(|age| age < RARE_WINDOW || age >= RARE_INTERVAL);
        let sources = share_sources(context.now, surroundings, &sizes, may_wait_long, has_figure);
        let has_rare = sources.contains(&ShareSource::Walk(MAX_RARE_WAIT));
        if has_rare && rare_age.is_none_or(|age| age >= RARE_INTERVAL) {
            self.rare_since.insert(container.id.clone(), context.now);
        }
        let mut measurement = Measurement::new(self.round, context.now);
        let owner = ContainerOwner::of(container);
        for ((target, (_, last)), source) in targets.into_iter().zip(sizes).zip(sources) {
            match source {
                ShareSource::Walk(max_wait) => {
                    measurement.pending += 1;
                    let (id, last) = (container.id.clone(), last.copied());
                    let share = Share { round: self.round, id, target, last, max_wait };
                    reads.push((owner.clone(), share));
                }
                ShareSource::LastWalk(bytes) => {
                    measurement.bytes.insert(target.pid, (target.start_ticks, bytes));
                }
                ShareSource::Remainder => measurement.remainder = Some(target),
                ShareSource::Unknown => measurement.is_expensive = true,
            }
        }
        if measurement.is_expensive {
            self.mark_expensive(&container.id, output);
        }
        let is_done = measurement.pending == 0;
        self.measuring.insert(container.id.clone(), measurement);
        if is_done {
            self.finish(context, output, &container.id);
        }
    }

    fn take(&mut self, context: &Context<'_>, output: &mut Output<'_>) {
        let outcomes = self.pool.as_ref().map(ReadPool::take).unwrap_or_default();
        for (ContainerOwner { id, .. }, share, outcome) in outcomes {
            // a read that hung in an earlier measurement has another round
            let measurement = self.measuring.get_mut(&id).filter(|running| running.round == share.round);
            let Some(measurement) = measurement else { continue };
            measurement.pending -= 1;
            match outcome {
                ReadOutcome::Finished(Ok(PssRead::Measured { bytes, rss, took })) => {
                    measurement.took += took;
                    measurement.bytes.insert(share.target.pid, (share.target.start_ticks, bytes));
                    let number = position(context, &id);
                    let surroundings = number.map(|number| surroundings(output, number)).unwrap_or_default();
                    let walk = SmapsWalk { at: context.now, took, rss, surroundings, bytes };
                    self.walks.entry(id.clone()).or_default().insert(share.target, walk);
                    self.denied = false;
                }
                ReadOutcome::Finished(Ok(PssRead::LowHeadroom)) => {
                    measurement.has_failed = true;
                    self.mark_missing(&id, PssMissing::LowHeadroom);
                }
                ReadOutcome::Finished(Ok(PssRead::Grown)) => {
                    measurement.remainder = None; // its share is not what the others leave
                    measurement.is_expensive = true;
                    self.mark_expensive(&id, output);
                }
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
                    measurement.has_failed = true;
                    if error.reason_label() == Some("permission") {
                        self.denied = true;
                        self.mark_missing(&id, PssMissing::Permission);
                    }
                }
            }
            if self.measuring.get(&id).is_some_and(|measurement| measurement.pending == 0) {
                self.finish(context, output, &id);
            }
        }
    }

    fn finish(&mut self, context: &Context<'_>, output: &mut Output<'_>, id: &ContainerId) {
        let Some(mut measurement) = self.measuring.remove(id) else { return };
        self.took = measurement.took;
        if measurement.has_failed {
            return;
        }
        if let Some(ProcessId { pid, start_ticks }) = measurement.remainder {
            let figure = position(context, id).and_then(|number| shared_memory(context, output, number));
            let others: u64 = measurement.bytes.values().map(|(_, bytes)| bytes).sum();
            // less than nothing is left if they were read at different times
            match figure.and_then(|figure| figure.checked_sub(others)) {
                Some(bytes) => drop(measurement.bytes.insert(pid, (start_ticks, bytes))),
                None => {
                    measurement.is_expensive = true;
                    self.mark_expensive(id, output);
                }
            }
        }
        if !measurement.is_expensive {
            self.missing.remove(id); // what is missing from now on is younger
        }
        self.changed = true;
        let took = context.now.since(measurement.began);
        let measured = MeasuredShares { at: context.now, took, bytes: measurement.bytes };
        self.shares.insert(id.clone(), Arc::new(measured));
    }
}

impl Pss {
    fn mark_missing(&mut self, id: &ContainerId, reason: PssMissing) {
        self.changed |= self.missing.insert(id.clone(), reason) != Some(reason);
    }

    fn mark_expensive(&mut self, id: &ContainerId, output: &mut Output<'_>) {
        self.mark_missing(id, PssMissing::Expensive);
        count_expensive(id, output);
    }
}

/// Returns the number of a container.
fn position(context: &Context<'_>, id: &ContainerId) -> Option<usize> {
    context.inventory.containers.iter().position(|container| container.id == *id)
}

fn surroundings(output: &Output<'_>, number: usize) -> Surroundings {
    let memory = output.cycle_data.memory.get(number).and_then(Option::as_ref);
    let anon = memory.and_then(|memory| memory.anon);
    Surroundings { anon, processes: output.cycle_data.processes.of(number).len() }
}

fn count_expensive(id: &ContainerId, output: &mut Output<'_>) {
    let message = "the proportional share (PSS) of a process is not read: it would wait too long";
    output.read_errors.count_of(id, EXPENSIVE, message);
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
        output.read_errors.init_at_zero(EXPENSIVE);
        let low_headroom = self.headroom.update(context, output.cycle_data);
        self.take(context, output);
        let running = context.inventory.ids();
        self.started.retain(|id, _| running.contains(id));
        self.walks.retain(|id, _| running.contains(id));
        self.rare_since.retain(|id, _| running.contains(id));
        self.missing.retain(|id, _| running.contains(id));
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
            output.cycle_data.pss =
                Arc::new(PssShares { by_container: self.shares.clone(), missing: self.missing.clone() });
        }
        let is_blocked = self.pool.as_ref().is_some_and(ReadPool::is_blocked);
        let failed = is_blocked || (self.denied && self.walks.values().all(HashMap::is_empty));
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

fn read(proc: &Path, share: &Share, buffer: &mut Vec<u8>) -> Result<PssRead, ReadError> {
    let dir = share.target.open(proc, buffer)?;
    let rss = resident_memory(dir.file("statm")?.read_once(buffer)?)?.rss_bytes;
    if expected_wait(rss, share.last.as_ref()) > share.max_wait {
        return Ok(PssRead::Grown);
    }
    let file = dir.file("smaps_rollup")?;
    let began = cpu_time();
    let text = file.read_once(buffer)?;
    let took = cpu_time().saturating_sub(began);
    let maps = SmapsRollup::from_buf_read(text).ok().map(|rollup| rollup.memory_map_rollup);
    let bytes = maps.and_then(|maps| maps.0.first()?.extension.map.get("Pss").copied());
    let bytes = bytes.ok_or_else(|| ReadError::malformed("smaps_rollup"))?;
    Ok(PssRead::Measured { bytes, rss, took })
}

#[cfg(test)]
mod tests;
