//! Memory of containers, from their cgroups.
//!
//! v2 provides `memory.current`, `memory.stat`, `memory.events` and the limits; v1 provides `memory.usage_in_bytes`, `memory.stat` and
//! `memory.limit_in_bytes`. The files that are read in every cycle stay open. If a container was restarted under the same path, reads
//! of the old files fail with *gone*, and the new files are opened. Others are closed in between, because an open file of the kernel takes
//! 4 KiB: limits are read once a minute and when they change, pressure, counters and CPU times in every fifth cycle. On v2
//! `cpu.stat` also takes a lock of the whole host.
//!
//! A limit may be set on any level above the container (a pod, a slice). Each level is read once per cycle, however
//! many containers are below it.
//!
//! Not here: what the files say of a container (`container_memory`) and of a pod (`pod_memory`), who a container is (`discover`), and peaks
//! that the kernel does not record (`ledger`).

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use procfs::{FromBufRead, MemoryPressure};

use super::cgroup_limits::{LevelHeadroom, LimitFiles, LimitLevel, LimitWatch, Limits, UnknownHeadroom};
use super::container_cpu::CpuTimes;
use super::container_memory::{ContainerMemory, apply_v1, apply_v2};
use super::limit_stall::LimitStall;
use super::pod_memory::PodMemories;
use super::{CollectOutcome, Collector, Context, CycleData, Output, ReadErrors};
use crate::catalog::*;
use crate::clock::{Cadence, Timestamp};
use crate::discover::{Cgroup, Container, ContainerId, Hierarchy, Inventory, Version};
use crate::host::{Dir, KernelFile, ReadError, classify};
use crate::parse::kubernetes::Qos;
use crate::parse::{cgroup as parse, number};

/// Age from which a container without a cgroup counts as one that will get none.
const STARTUP: Duration = Duration::from_secs(10);
/// The most files of one container that stay open.
const MAX_FILES: usize = 4;
/// Slow values are read in one of this many cycles, and at least once in as many seconds.
const SLOW_EVERY: u32 = 5;
/// Limit files of v2 and of v1.
const LIMITS: [&[&str]; 2] = [&["memory.max", "memory.high", "memory.swap.max"], &["memory.limit_in_bytes"]];

/// The collector. Keeps the files of every container and of every level above one open.
#[derive(Debug, Default)]
pub struct Cgroups {
    /// The files that stay open until the next cycle.
    containers: HashMap<ContainerId, Box<ContainerFiles>>,
    /// Their number.
    file_count: usize,
    levels: HashMap<PathBuf, Level>,
    pods: PodMemories,
    /// When each container was first listed without a cgroup.
    without_cgroup: HashMap<ContainerId, Timestamp>,
    watch: LimitWatch,
    buffer: Vec<u8>,
    cycle: u64,
    /// How many containers were opened.
    opened: u32,
    /// Free swap of the host.
    host_swap: u64,
}

/// The open files of a container.
#[derive(Debug)]
struct ContainerFiles {
    cgroup: Arc<Cgroup>,
    /// The directory of its cgroup.
    dir: PathBuf,
    level: LevelFiles,
    peak: Option<KernelFile>,
    /// v2 only; open only while the host has free swap.
    swap: Option<KernelFile>,
    cadence: Cadence<SLOW_EVERY>,
    slow: SlowValues,
    stall: LimitStall,
    /// The levels above, nearest first, without the root, which has no limit.
    above: Vec<PathBuf>,
}

/// Values of a container that are not read in every cycle, as in [`ContainerMemory`].
#[derive(Clone, Copy, Debug, Default)]
struct SlowValues {
    events: [Option<u64>; 2],
    swap: Option<u64>,
    pressure: Option<[u64; 2]>,
    cpu: Option<CpuTimes>,
}

/// A cgroup above containers.
#[derive(Debug)]
struct Level {
    files: LevelFiles,
    limit_level: LimitLevel,
    /// Of its directory: another one under the same path has its own limits.
    inode: u64,
    cycle: u64,
    limits: Limits,
    /// Memory that the kernel cannot reclaim; `None` if it is unknown, or not needed.
    unreclaimable: Option<u64>,
    /// What of it the kernel may swap.
    swappable: u64,
    /// Free swap within its own limit.
    free_swap: u64,
    /// Everything charged to it, if it is a pod's.
    usage: u64,
}

/// The open files that memory and limits of a cgroup need.
#[derive(Debug)]
struct LevelFiles {
    version: Version,
    usage: KernelFile,
    stat: KernelFile,
    limits: LimitFiles,
    /// v1 only; missing without kernel memory accounting.
    kernel: Option<KernelFile>,
}

impl LevelFiles {
    fn open(dir: &Dir, version: Version, watch: &mut LimitWatch) -> Result<Self, ReadError> {
        let stat = dir.file("memory.stat")?;
        Ok(match version {
            Version::V2 => Self {
                version,
                usage: dir.file("memory.current")?,
                stat,
                limits: watch.watch(dir, LIMITS[0])?,
                kernel: None,
            },
            Version::V1 => Self {
                version,
                usage: dir.file("memory.usage_in_bytes")?,
                stat,
                limits: watch.watch(dir, LIMITS[1])?,
                kernel: dir.optional_file("memory.kmem.usage_in_bytes")?,
            },
        })
    }

    /// Returns the number of open files.
    fn count(&self) -> usize {
        2 + usize::from(self.kernel.is_some())
    }

    fn number(file: &KernelFile, buffer: &mut Vec<u8>) -> Result<u64, ReadError> {
        let text = file.read_once(buffer)?;
        number(text).ok_or_else(|| ReadError::malformed("a cgroup file does not contain a number"))
    }

    /// Reads a file that may be missing or disabled on this kernel.
    fn optional(
        file: Option<&KernelFile>,
        buffer: &mut Vec<u8>,
        read_errors: &mut ReadErrors,
    ) -> Result<Option<u64>, ReadError> {
        let Some(file) = file else { return Ok(None) };
        match Self::number(file, buffer) {
            Ok(value) => Ok(Some(value)),
            Err(gone @ ReadError::Gone(_)) => Err(gone),
            Err(error) => {
                read_errors.record(&error);
                Ok(None)
            }
        }
    }

    /// Reads usage and its components close together.
    fn parts(
        &self,
        buffer: &mut Vec<u8>,
        read_errors: &mut ReadErrors,
    ) -> Result<ContainerMemory, ReadError> {
        let mut memory =
            ContainerMemory { usage: Self::number(&self.usage, buffer)?, ..ContainerMemory::default() };
        match self.version {
            Version::V2 => apply_v2(&mut memory, parse::StatV2::parse(self.stat.read_once(buffer)?)),
            Version::V1 => {
                let stat = parse::StatV1::parse(self.stat.read_once(buffer)?);
                let kernel = Self::optional(self.kernel.as_ref(), buffer, read_errors)?;
                apply_v1(&mut memory, stat, kernel);
                if kernel.is_none() && self.kernel.is_some() {
                    memory.unreclaimable = None; // charged, but the amount is unknown
                }
            }
        }
        Ok(memory)
    }
}

impl ContainerFiles {
    fn open(
        hierarchy: &Hierarchy,
        cgroup: &Arc<Cgroup>,
        cadence: Cadence<SLOW_EVERY>,
        watch: &mut LimitWatch,
    ) -> Result<Self, ReadError> {
        let dir = Dir::open(&hierarchy.root.join(&cgroup.path))?;
        let above = cgroup.path.ancestors().skip(1).filter(|path| !path.as_os_str().is_empty());
        Ok(Self {
            cgroup: Arc::clone(cgroup),
            level: LevelFiles::open(&dir, hierarchy.version, watch)?,
            peak: dir.optional_file(match hierarchy.version {
                Version::V2 => "memory.peak",
                Version::V1 => "memory.max_usage_in_bytes",
            })?,
            swap: None,
            cadence,
            slow: SlowValues::default(),
            stall: LimitStall::default(),
            dir: dir.path().to_path_buf(),
            above: above.map(Path::to_path_buf).collect(),
        })
    }

    /// Returns the number of open files.
    fn count(&self) -> usize {
        self.level.count() + [&self.peak, &self.swap].into_iter().flatten().count()
    }

    fn read(
        &mut self,
        context: &Context<'_>,
        hierarchy: &Hierarchy,
        has_free_swap: bool,
        watch: &LimitWatch,
        buffer: &mut Vec<u8>,
        read_errors: &mut ReadErrors,
    ) -> Result<ContainerMemory, ReadError> {
        let mut memory = self.level.parts(buffer, read_errors)?;
        if memory.rest() < 0 {
            memory = self.level.parts(buffer, read_errors)?;
            // tolerates per-CPU batches and delayed counters; a larger difference is an error
            if memory.rest() < -(i128::from(memory.usage / 64) + (1 << 20)) {
                read_errors.count("balance");
            }
        }
        let limits = self.level.limits.read(&self.dir, watch, buffer)?;
        (memory.limit, memory.high, memory.swap_limit) = (limits.max, limits.high, limits.swap);
        memory.peak = LevelFiles::optional(self.peak.as_ref(), buffer, read_errors)?;
        let is_due = self.cadence.is_due(context.now);
        if is_due {
            self.read_slow(context, hierarchy, buffer, read_errors)?;
        }
        (memory.events, memory.pressure) = (self.slow.events, self.slow.pressure);
        if self.level.version == Version::V2 {
            memory.swap = self.read_swap(has_free_swap, buffer, read_errors)?;
        }
        memory.at_limit = self.stall.update(context.now, &memory, is_due);
        Ok(memory)
    }

    /// Returns the used swap: without free swap that of the slow values, because it does not grow.
    fn read_swap(
        &mut self,
        has_free_swap: bool,
        buffer: &mut Vec<u8>,
        read_errors: &mut ReadErrors,
    ) -> Result<Option<u64>, ReadError> {
        if !has_free_swap {
            self.swap = None;
            return Ok(self.slow.swap);
        }
        if self.swap.is_none() {
            self.swap = Dir::open(&self.dir)?.optional_file("memory.swap.current")?;
        }
        LevelFiles::optional(self.swap.as_ref(), buffer, read_errors)
    }

    fn read_slow(
        &mut self,
        context: &Context<'_>,
        hierarchy: &Hierarchy,
        buffer: &mut Vec<u8>,
        read_errors: &mut ReadErrors,
    ) -> Result<(), ReadError> {
        let mut slow = SlowValues::default();
        if hierarchy.version == Version::V2 {
            let dir = Dir::open(&self.dir)?;
            if let Some(file) = dir.optional_file("memory.events")? {
                match file.read_once(buffer) {
                    Ok(text) => slow.events = parse::values(text, [b"high", b"max"]),
                    Err(gone @ ReadError::Gone(_)) => return Err(gone),
                    Err(error) => read_errors.record(&error),
                }
            }
            let swap = dir.optional_file("memory.swap.current")?;
            slow.swap = LevelFiles::optional(swap.as_ref(), buffer, read_errors)?;
            if let Some(file) = dir.optional_file("memory.pressure")? {
                match file.read_once(buffer) {
                    Ok(text) => {
                        let pressure = MemoryPressure::from_buf_read(text).ok();
                        slow.pressure = pressure.map(|pressure| [pressure.some.total, pressure.full.total]);
                    }
                    Err(gone @ ReadError::Gone(_)) => return Err(gone),
                    Err(error) => read_errors.record(&error), // EOPNOTSUPP: PSI is disabled
                }
            }
        }
        let cpu = CpuTimes::read(hierarchy, context.host_paths, &self.cgroup.path, buffer);
        slow.cpu = read_errors.value(cpu);
        self.slow = slow;
        Ok(())
    }
}

impl Cgroups {
    /// Opens the files of a container and reads its memory.
    fn open_files(
        &mut self,
        context: &Context<'_>,
        hierarchy: &Hierarchy,
        cgroup: &Arc<Cgroup>,
        read_errors: &mut ReadErrors,
    ) -> Result<(Box<ContainerFiles>, ContainerMemory), ReadError> {
        // those of other containers are due in other cycles
        self.opened = self.opened.wrapping_add(1);
        let cadence = Cadence::in_phase(self.opened);
        let mut files = Box::new(ContainerFiles::open(hierarchy, cgroup, cadence, &mut self.watch)?);
        let has_free_swap = self.host_swap > 0;
        let memory =
            files.read(context, hierarchy, has_free_swap, &self.watch, &mut self.buffer, read_errors)?;
        Ok((files, memory))
    }

    /// Reads one container, from its files of the last cycle if they are still those of its cgroup.
    fn read(
        &mut self,
        context: &Context<'_>,
        hierarchy: &Hierarchy,
        container: &Container,
        cgroup: &Arc<Cgroup>,
        files: Option<Box<ContainerFiles>>,
        read_errors: &mut ReadErrors,
    ) -> Result<(ContainerMemory, Option<CpuTimes>), ReadError> {
        let has_free_swap = self.host_swap > 0;
        let (files, mut memory) = match files.filter(|files| files.cgroup.path == cgroup.path) {
            Some(mut files) => {
                let (watch, buffer) = (&self.watch, &mut self.buffer);
                match files.read(context, hierarchy, has_free_swap, watch, buffer, read_errors) {
                    Ok(memory) => (files, memory),
                    Err(error) if error.is_gone() => {
                        self.open_files(context, hierarchy, cgroup, read_errors)?
                    }
                    Err(error) => {
                        self.keep(&container.id, files);
                        return Err(error);
                    }
                }
            }
            None => self.open_files(context, hierarchy, cgroup, read_errors)?,
        };
        self.apply_levels(hierarchy, &files.above, &mut memory, read_errors);
        self.add_to_pod(container, &files.above, memory.usage);
        let times = files.slow.cpu;
        self.keep(&container.id, files);
        Ok((memory, times))
    }

    /// Keeps the files of a container for the next cycle.
    fn keep(&mut self, id: &ContainerId, files: Box<ContainerFiles>) {
        self.file_count += files.count();
        self.containers.insert(id.clone(), files);
    }

    /// Returns limit and headroom of one level above containers, read at most once per cycle.
    fn level(
        &mut self,
        hierarchy: &Hierarchy,
        path: &Path,
        read_errors: &mut ReadErrors,
    ) -> Result<&Level, ReadError> {
        let cycle = self.cycle;
        if self.levels.get(path).is_none_or(|level| level.cycle != cycle) {
            let full = hierarchy.root.join(path);
            let inode = match rustix::fs::stat(&full) {
                Ok(stat) => stat.st_ino,
                Err(errno) => return Err(classify(errno, full.display().to_string())),
            };
            let mut files = match self.levels.remove(path) {
                Some(level) if level.inode == inode => level.files,
                _ => LevelFiles::open(&Dir::open(&full)?, hierarchy.version, &mut self.watch)?,
            };
            let limits = files.limits.read(&full, &self.watch, &mut self.buffer)?;
            // memory.stat of an unlimited level is not needed
            let limit_level = LimitLevel::above(path);
            let (unreclaimable, swappable, usage) = match limits.lowest() {
                Some(_) => {
                    let memory = files.parts(&mut self.buffer, read_errors)?;
                    (memory.unreclaimable, memory.swappable, memory.usage)
                }
                None if limit_level == LimitLevel::Pod => {
                    (None, 0, LevelFiles::number(&files.usage, &mut self.buffer)?)
                }
                None => (None, 0, 0),
            };
            let free_swap = match limits.swap.filter(|_| self.host_swap > 0) {
                Some(limit) => {
                    let used = Dir::open(&full)?.optional_file("memory.swap.current")?;
                    let used = LevelFiles::optional(used.as_ref(), &mut self.buffer, read_errors)?;
                    used.map_or(0, |used| limit.saturating_sub(used))
                }
                None => u64::MAX,
            };
            let level = Level {
                files,
                limit_level,
                inode,
                cycle,
                limits,
                unreclaimable,
                swappable,
                free_swap,
                usage,
            };
            self.levels.insert(path.to_path_buf(), level);
        }
        self.levels.get(path).ok_or_else(|| ReadError::Gone(path.display().to_string()))
    }

    /// Applies the limits of the levels above to a reading. A limit of swap holds for the levels below it too.
    fn apply_levels(
        &mut self,
        hierarchy: &Hierarchy,
        above: &[PathBuf],
        memory: &mut ContainerMemory,
        read_errors: &mut ReadErrors,
    ) {
        memory.effective_limit = memory.limit;
        let mut tightest = LevelHeadroom::UNLIMITED;
        // v1 limits memory and swap together, so how much of it is left is not known there
        let mut free_swap = if hierarchy.version == Version::V2 { self.host_swap } else { 0 };
        for path in above.iter().rev() {
            match self.level(hierarchy, path, read_errors) {
                Ok(level) => {
                    free_swap = free_swap.min(level.free_swap);
                    memory.effective_limit = memory.effective_limit.into_iter().chain(level.limits.max).min();
                    let swap = free_swap.min(level.swappable);
                    let headroom = LevelHeadroom::of(level.limits, level.unreclaimable, swap);
                    memory.add_level(level.limit_level, headroom);
                    tightest = tightest.and(headroom);
                }
                Err(error) => {
                    read_errors.record(&error);
                    // the limit of this level is unknown, and so is the minimum
                    memory.effective_limit = None;
                    tightest =
                        LevelHeadroom { headroom: Err(UnknownHeadroom), utilization: Err(UnknownHeadroom) };
                    break;
                }
            }
        }
        let own = Limits { max: memory.limit, high: memory.high, swap: memory.swap_limit };
        free_swap = match (memory.swap, own.swap) {
            (Some(used), Some(limit)) => free_swap.min(limit.saturating_sub(used)),
            (Some(_), None) => free_swap,
            (None, _) => 0,
        };
        let swap = free_swap.min(memory.swappable);
        let headroom = LevelHeadroom::of(own, memory.unreclaimable, swap);
        memory.add_level(LimitLevel::Container, headroom);
        tightest = tightest.and(headroom);
        memory.headroom = tightest.headroom.ok().flatten();
        memory.limit_utilization = tightest.utilization.ok().flatten();
    }

    /// Adds a container to its pod, whose cgroup is one of those above it and was read in this cycle.
    fn add_to_pod(&mut self, container: &Container, above: &[PathBuf], usage: u64) {
        let Some(pod) = container.spec.pod.as_ref().filter(|_| !container.nested) else { return };
        let level_of = |path: &PathBuf| self.levels.get(path).filter(|level| level.cycle == self.cycle);
        let is_of_pod = |level: &&Level| level.limit_level == LimitLevel::Pod;
        let found = above.iter().find_map(|path| Some((path, level_of(path).filter(is_of_pod)?)));
        if let Some((path, level)) = found {
            self.pods.add(path, pod, (level.usage, level.limits.max), usage);
        }
    }

    /// Returns true if a container without a cgroup has existed for so long that it will get none, as a rootless container on
    /// cgroup v1: its memory is that of other processes.
    fn is_outside_cgroups(&mut self, id: &ContainerId, now: Timestamp) -> bool {
        let since = self.without_cgroup.entry(id.clone()).or_insert(now);
        now.since(*since) >= STARTUP
    }

    /// Closes the files of levels that were not read in this cycle, and counts the others.
    fn end_cycle(&mut self, inventory: &Inventory, cycle_data: &mut CycleData) {
        let cycle = self.cycle;
        self.levels.retain(|_, level| level.cycle == cycle);
        let containers = &inventory.containers;
        self.without_cgroup.retain(|id, _| containers.iter().any(|c| c.cgroup.is_none() && c.id == *id));
        let of_levels = self.levels.values().map(|level| level.files.count()).sum::<usize>();
        let not_open = containers.len().saturating_sub(self.containers.len());
        cycle_data.cgroup_files = self.file_count + not_open * MAX_FILES + of_levels;
    }
}

/// Returns the memory request of a container in a pod, if the node knows it.
fn request(container: &Container, memory: &ContainerMemory) -> Option<u64> {
    let pod = container.spec.pod.as_ref()?;
    pod.memory_min_bytes.or_else(|| memory.limit.filter(|_| container.qos() == Some(Qos::Guaranteed)))
}

impl Collector for Cgroups {
    fn name(&self) -> &'static str {
        "cgroup"
    }

    fn collect(&mut self, context: &Context<'_>, output: &mut Output<'_>) -> CollectOutcome {
        let Some(hierarchy) = context.hierarchy else { return CollectOutcome::Failed };
        output.read_errors.init_at_zero("balance");
        self.cycle += 1;
        self.host_swap = output.cycle_data.free_swap;
        self.watch.begin_cycle(context.now);
        output.cycle_data.memory.clear();
        output.cycle_data.cpu.clear();
        let mut before = std::mem::replace(
            &mut self.containers,
            HashMap::with_capacity(context.inventory.containers.len()),
        );
        self.file_count = 0;
        let (mut read, mut failed, mut is_complete) = (0, 0, true);
        for (number, container) in context.inventory.containers.iter().enumerate() {
            let reading = match &container.cgroup {
                Some(cgroup) => {
                    let files = before.remove(&container.id);
                    let reading = self.read(context, hierarchy, container, cgroup, files, output.read_errors);
                    if let Err(error) = &reading {
                        // a cgroup without the memory controller, as of a rootless container, has memory too
                        let is_there = || Dir::open(&hierarchy.root.join(&cgroup.path)).is_ok();
                        let has_failed = error.reason_label().is_some();
                        failed += usize::from(has_failed);
                        // that of a nested one is in the outer one's
                        let is_missing = has_failed || error.is_gone() && is_there();
                        is_complete &= container.nested || !is_missing;
                    }
                    reading.map_err(|error| output.read_errors.record_of(&container.id, &error)).ok()
                }
                None => {
                    is_complete &= !self.is_outside_cgroups(&container.id, context.now);
                    None
                }
            };
            if let Some((memory, times)) = &reading {
                memory.write(number as u32, output.series);
                if let Some(times) = times {
                    times.write(number as u32, output.series);
                }
                if let Some(bytes) = request(container, memory) {
                    output.series.container(CONTAINER_MEMORY_REQUEST, number as u32, [], bytes as f64);
                }
                read += 1;
            }
            let (memory, times) = reading.unzip();
            output.cycle_data.memory.push(memory);
            output.cycle_data.cpu.push(times.flatten());
        }
        output.cycle_data.pods = self.pods.write(output.series);
        self.end_cycle(context.inventory, output.cycle_data);
        output.cycle_data.memory_complete = is_complete;
        if read == 0 && failed > 0 { CollectOutcome::Failed } else { CollectOutcome::Ok }
    }
}

#[cfg(test)]
mod tests;
