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
//! Container identity is in `discover`; peaks that the kernel does not record are in `ledger`.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use procfs::{FromBufRead, MemoryPressure};

use super::cgroup_limits::{LevelHeadroom, LimitFiles, LimitLevel, LimitWatch, Limits, UnknownHeadroom};
use super::container_cpu::CpuTimes;
use super::{CollectOutcome, Collector, Context, CycleData, Output, ReadErrors};
use crate::catalog::*;
use crate::clock::{Cadence, Timestamp};
use crate::discover::{Cgroup, Container, ContainerId, Hierarchy, Inventory, Pod, Version};
use crate::host::{Dir, KernelFile, ReadError, classify};
use crate::parse::kubernetes::Qos;
use crate::parse::{cgroup as parse, number};
use crate::series::{Label, Series};

/// Age from which a container without a cgroup counts as one that will get none.
const STARTUP: Duration = Duration::from_secs(10);
/// The most files of one container that stay open.
const MAX_FILES: usize = 4;
/// Slow values are read in one of this many cycles, and at least once in as many seconds.
const SLOW_EVERY: u32 = 5;
/// Limit files of v2 and of v1.
const LIMITS: [&[&str]; 2] = [&["memory.max", "memory.high", "memory.swap.max"], &["memory.limit_in_bytes"]];

/// Memory of a container in one cycle, in bytes. `None`: not provided by this kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ContainerMemory {
    /// Everything charged.
    pub usage: u64,
    /// File cache on the inactive list.
    pub inactive_file: Option<u64>,
    /// Anonymous memory.
    pub anon: Option<u64>,
    /// Page cache without shared memory.
    pub file: Option<u64>,
    /// Shared memory and tmpfs.
    pub shmem: Option<u64>,
    /// Pages of files and shared memory that processes have mapped.
    pub mapped: Option<u64>,
    /// Kernel memory charged to the container.
    pub kernel: Option<u64>,
    /// Memory that the kernel cannot reclaim.
    pub unreclaimable: Option<u64>,
    /// What of it the kernel may move into swap: not kernel memory, and not what is locked.
    pub swappable: u64,
    /// Own limit; `None` when unlimited.
    pub limit: Option<u64>,
    /// Lowest limit on the path to the root; `None` when unlimited.
    pub effective_limit: Option<u64>,
    /// Minimum of limit - unreclaimable over the path. Negative while the kernel exceeds the limit.
    pub headroom: Option<i64>,
    /// Usage above which the kernel throttles and reclaims; `None` when unlimited.
    pub high: Option<u64>,
    /// Maximum over the path of unreclaimable / the lower of limit and high.
    pub limit_utilization: Option<f64>,
    /// The maximum at each of [`LimitLevel::ALL`]; `None` where nothing is limited, or its memory is unknown.
    pub level_utilization: [Option<f64>; 4],
    /// Limit of swap; `None` when unlimited.
    pub swap_limit: Option<u64>,
    /// How often usage was over `memory.high`, and at the limit.
    pub events: [Option<u64>; 2],
    /// Page faults that needed a read from disk.
    pub major_faults: Option<u64>,
    /// Evicted pages that were read again: anonymous ones, and file cache.
    pub refaults: [Option<u64>; 2],
    /// Highest usage as recorded by the kernel.
    pub peak: Option<u64>,
    /// Swap usage.
    pub swap: Option<u64>,
    /// Time in which some tasks, and in which all tasks, waited for memory, in microseconds.
    pub pressure: Option<[u64; 2]>,
}

impl ContainerMemory {
    /// Returns the usage that `docker stats` shows. The two files are read one after the other, so the result is
    /// clamped at zero.
    pub fn working_set(&self) -> Option<u64> {
        Some(self.usage.saturating_sub(self.inactive_file?))
    }

    /// Adds the limit of a cgroup on the path.
    fn add_level(&mut self, level: LimitLevel, headroom: LevelHeadroom) {
        let highest = &mut self.level_utilization[level as usize];
        *highest = (*highest).into_iter().chain(headroom.utilization.ok().flatten()).reduce(f64::max);
    }

    /// Returns usage minus all components. Negative when the kernel's values, which are not of one instant, overlap.
    fn rest(&self) -> i128 {
        let parts = [self.anon, self.file, self.shmem, self.kernel];
        i128::from(self.usage) - parts.iter().flatten().map(|part| i128::from(*part)).sum::<i128>()
    }

    fn write(&self, container: u32, series: &mut Series) {
        let mut gauge = |family, value: Option<u64>| {
            if let Some(value) = value {
                series.container(family, container, [], value as f64);
            }
        };
        gauge(CONTAINER_MEMORY_USAGE, Some(self.usage));
        gauge(CONTAINER_MEMORY_WORKING_SET, self.working_set());
        gauge(CONTAINER_MEMORY_RSS, self.anon);
        gauge(CONTAINER_MEMORY_UNRECLAIMABLE, self.unreclaimable);
        gauge(CONTAINER_MEMORY_LIMIT, self.limit);
        gauge(CONTAINER_MEMORY_EFFECTIVE_LIMIT, self.effective_limit);
        gauge(CONTAINER_MEMORY_SWAP, self.swap);
        gauge(CONTAINER_MEMORY_SWAP_LIMIT, self.swap_limit);
        gauge(CONTAINER_MEMORY_HIGH, self.high);
        gauge(CONTAINER_MAJOR_FAULTS, self.major_faults);
        self.write_events(container, series);
        if let Some(ratio) = self.limit_utilization {
            series.container(CONTAINER_MEMORY_LIMIT_UTILIZATION, container, [], ratio);
        }
        for (level, ratio) in std::iter::zip(LimitLevel::ALL, self.level_utilization) {
            if let Some(ratio) = ratio {
                series.container(
                    CONTAINER_MEMORY_LEVEL_UTILIZATION,
                    container,
                    [level.label().into()],
                    ratio,
                );
            }
        }
        if let Some(headroom) = self.headroom {
            series.container(CONTAINER_MEMORY_HEADROOM, container, [], headroom as f64);
        }
        let parts =
            [("anon", self.anon), ("file", self.file), ("shmem", self.shmem), ("kernel", self.kernel)];
        for (component, value) in parts {
            if let Some(value) = value {
                series.container(CONTAINER_MEMORY_COMPONENT, container, [component.into()], value as f64);
            }
        }
        let other = self.rest().max(0) as f64;
        series.container(CONTAINER_MEMORY_COMPONENT, container, ["other".into()], other);
        if let Some([some, full]) = self.pressure {
            series.container(CONTAINER_PRESSURE_WAITING, container, [], some as f64 / 1e6);
            series.container(CONTAINER_PRESSURE_STALLED, container, [], full as f64 / 1e6);
        }
    }

    fn write_events(&self, container: u32, series: &mut Series) {
        let rows = [
            (CONTAINER_MEMORY_EVENTS, "high", self.events[0]),
            (CONTAINER_MEMORY_EVENTS, "max", self.events[1]),
            (CONTAINER_REFAULTS, "anon", self.refaults[0]),
            (CONTAINER_REFAULTS, "file", self.refaults[1]),
        ];
        for (family, label, count) in rows {
            if let Some(count) = count {
                series.container(family, container, [label.into()], count as f64);
            }
        }
    }
}

/// The collector. Keeps the files of every container and of every level above one open.
#[derive(Debug, Default)]
pub struct Cgroups {
    /// The files that stay open until the next cycle.
    containers: HashMap<ContainerId, Box<ContainerFiles>>,
    /// Their number.
    file_count: usize,
    levels: HashMap<PathBuf, Level>,
    /// Those of this cycle, by the paths of their cgroups.
    pods: HashMap<PathBuf, PodMemory>,
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

/// Memory of a pod in one cycle, in bytes.
#[derive(Debug)]
struct PodMemory {
    pod: Arc<Pod>,
    usage: u64,
    /// `None` when unlimited.
    limit: Option<u64>,
    /// Of its running containers.
    containers: u64,
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
        if self.cadence.is_due(context.now) {
            self.read_slow(context, hierarchy, buffer, read_errors)?;
        }
        (memory.events, memory.pressure) = (self.slow.events, self.slow.pressure);
        if self.level.version == Version::V2 {
            memory.swap = self.read_swap(has_free_swap, buffer, read_errors)?;
        }
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

fn apply_v2(memory: &mut ContainerMemory, stat: parse::StatV2) {
    let sum = |parts: &[Option<u64>]| parts.iter().copied().sum::<Option<u64>>();
    // added by kernels: percpu 5.8, pagetables 5.10, the sum `kernel` 5.18; a missing line means that the memory is not
    // charged separately, and the small amount stays in the rest
    let recent = [stat.pagetables, stat.percpu].into_iter().flatten().sum::<u64>();
    let summed = sum(&[stat.slab, stat.kernel_stack]).map(|sum| sum + recent);
    let pinned = match (stat.kernel, stat.slab_reclaimable) {
        (Some(kernel), Some(reclaimable)) => Some(kernel.saturating_sub(reclaimable)),
        _ => sum(&[stat.slab_unreclaimable, stat.kernel_stack]).map(|sum| sum + recent),
    };
    memory.inactive_file = stat.inactive_file;
    memory.major_faults = stat.pgmajfault;
    memory.refaults = [stat.workingset_refault_anon, stat.workingset_refault_file];
    memory.anon = stat.anon;
    memory.shmem = stat.shmem;
    memory.mapped = stat.file_mapped;
    memory.file = stat.file.zip(stat.shmem).map(|(file, shmem)| file.saturating_sub(shmem));
    memory.kernel = stat.kernel.or(summed);
    memory.unreclaimable = sum(&[stat.anon, stat.shmem, pinned, stat.sock]);
    // what is not known to be swappable is not counted as such
    let pages = sum(&[stat.anon, stat.shmem]).zip(stat.unevictable);
    memory.swappable = pages.map_or(0, |(pages, unevictable)| pages.saturating_sub(unevictable));
}

fn apply_v1(memory: &mut ContainerMemory, stat: parse::StatV1, kernel: Option<u64>) {
    memory.inactive_file = stat.total_inactive_file;
    memory.major_faults = stat.total_pgmajfault;
    memory.anon = stat.total_rss;
    memory.shmem = stat.total_shmem;
    memory.mapped = stat.total_mapped_file;
    memory.file = stat.total_cache.zip(stat.total_shmem).map(|(cache, shmem)| cache.saturating_sub(shmem));
    memory.kernel = kernel;
    memory.swap = stat.total_swap;
    // without the file, kernel memory is not charged, so the sum is complete
    let charged = kernel.into_iter().sum::<u64>();
    memory.unreclaimable = stat.total_rss.zip(stat.total_shmem).map(|(rss, shmem)| rss + shmem + charged);
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
        let Some(pod) = container.pod.as_ref().filter(|_| !container.nested) else { return };
        let level_of = |path: &&PathBuf| self.levels.get(*path).filter(|level| level.cycle == self.cycle);
        let is_pod = |path: &&PathBuf| level_of(path).is_some_and(|it| it.limit_level == LimitLevel::Pod);
        let Some(path) = above.iter().find(is_pod) else { return };
        let Some(level) = level_of(&path) else { return };
        let of_level =
            || PodMemory { pod: Arc::clone(pod), usage: level.usage, limit: level.limits.max, containers: 0 };
        self.pods.entry(path.clone()).or_insert_with(of_level).containers += usage;
    }

    /// Writes the memory of the pods. While one is replaced by another of its name, both are one series.
    fn write_pods(&mut self, series: &mut Series) {
        let mut by_name: BTreeMap<(Arc<str>, Arc<str>), PodMemory> = BTreeMap::new();
        for (_, memory) in self.pods.drain() {
            let name = (Arc::clone(&memory.pod.namespace), Arc::clone(&memory.pod.name));
            match by_name.entry(name) {
                Entry::Vacant(entry) => _ = entry.insert(memory),
                Entry::Occupied(mut entry) => {
                    let sum = entry.get_mut();
                    sum.usage += memory.usage;
                    sum.containers += memory.containers;
                    sum.limit = sum.limit.zip(memory.limit).map(|(one, other)| one.saturating_add(other));
                }
            }
        }
        for ((namespace, name), memory) in by_name {
            // the files are not read at one instant
            let usage = memory.usage.max(memory.containers);
            let of_pod = || [Label::from(&namespace), Label::from(&name)];
            series.global(POD_MEMORY_USAGE, of_pod(), usage as f64);
            if let Some(limit) = memory.limit {
                series.global(POD_MEMORY_LIMIT, of_pod(), limit as f64);
            }
            for (component, bytes) in [("containers", memory.containers), ("rest", usage - memory.containers)]
            {
                let [namespace, name] = of_pod();
                let labels = [namespace, name, component.into()];
                series.global(POD_MEMORY_COMPONENT, labels, bytes as f64);
            }
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
    let pod = container.pod.as_ref()?;
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
            output.cycle_data.memory.push(reading.map(|(memory, _)| memory));
        }
        self.write_pods(output.series);
        self.end_cycle(context.inventory, output.cycle_data);
        output.cycle_data.memory_complete = is_complete;
        if read == 0 && failed > 0 { CollectOutcome::Failed } else { CollectOutcome::Ok }
    }
}

#[cfg(test)]
mod tests;
