//! Memory of containers, from their cgroups.
//!
//! v2 provides `memory.current`, `memory.stat` and `memory.max`; v1 provides `memory.usage_in_bytes`, `memory.stat` and
//! `memory.limit_in_bytes`. The files stay open between cycles. If a container was restarted under the same path, reads
//! of the old files fail with *gone*, and the new files are opened.
//!
//! A limit may be set on any level above the container (a pod, a slice). Each level is read once per cycle, however
//! many containers are below it.
//!
//! Container identity is in `discover`; peaks that the kernel does not record are in `ledger`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{CollectOutcome, Collector, Context, Output, ReadErrors};
use crate::catalog::*;
use crate::discover::{Cgroup, Container, ContainerId, Hierarchy, Version};
use crate::host::{Dir, KernelFile, ReadError};
use crate::parse::kubernetes::Qos;
use crate::parse::{cgroup as parse, number, psi};
use crate::series::Series;

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
    /// Kernel memory charged to the container.
    pub kernel: Option<u64>,
    /// Memory that the kernel cannot reclaim.
    pub unreclaimable: Option<u64>,
    /// Own limit; `None` when unlimited.
    pub limit: Option<u64>,
    /// Lowest limit on the path to the root; `None` when unlimited.
    pub effective_limit: Option<u64>,
    /// Minimum of limit - unreclaimable over the path. Negative while the kernel exceeds the limit.
    pub headroom: Option<i64>,
    /// Highest usage as recorded by the kernel.
    pub peak: Option<u64>,
    /// Swap usage.
    pub swap: Option<u64>,
    /// Stall times.
    pub pressure: Option<psi::Stalls>,
}

impl ContainerMemory {
    /// Returns the usage that `docker stats` shows. The two files are read one after the other, so the result is
    /// clamped at zero.
    pub fn working_set(&self) -> Option<u64> {
        Some(self.usage.saturating_sub(self.inactive_file?))
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
        if let Some(pressure) = self.pressure {
            series.container(CONTAINER_PRESSURE_WAITING, container, [], pressure.some_usec as f64 / 1e6);
            series.container(CONTAINER_PRESSURE_STALLED, container, [], pressure.full_usec as f64 / 1e6);
        }
    }
}

/// The collector. Keeps the files of every container and of every level above one open.
#[derive(Debug, Default)]
pub struct Cgroups {
    containers: HashMap<ContainerId, OpenContainer>,
    levels: HashMap<PathBuf, Level>,
    buffer: Vec<u8>,
    cycle: u64,
}

#[derive(Debug)]
struct OpenContainer {
    cgroup: Arc<Cgroup>,
    files: CgroupFiles,
    /// The levels above, nearest first, without the root, which has no limit.
    above: Vec<PathBuf>,
    cycle: u64,
}

/// A cgroup above containers.
#[derive(Debug)]
struct Level {
    files: CgroupFiles,
    cycle: u64,
    limit: Option<u64>,
    headroom: Option<i64>,
}

/// The open files of one cgroup.
#[derive(Debug)]
struct CgroupFiles {
    version: Version,
    usage: KernelFile,
    stat: KernelFile,
    limit: Option<KernelFile>,
    peak: Option<KernelFile>,
    swap: Option<KernelFile>,
    pressure: Option<KernelFile>,
    /// v1 only; missing without kernel memory accounting.
    kernel: Option<KernelFile>,
}

impl CgroupFiles {
    fn open(hierarchy: &Hierarchy, path: &Path) -> Result<Self, ReadError> {
        let dir = Dir::open(&hierarchy.root.join(path))?;
        let version = hierarchy.version;
        let stat = dir.file("memory.stat")?;
        Ok(match version {
            Version::V2 => Self {
                version,
                usage: dir.file("memory.current")?,
                stat,
                limit: dir.optional_file("memory.max")?,
                peak: dir.optional_file("memory.peak")?,
                swap: dir.optional_file("memory.swap.current")?,
                pressure: dir.optional_file("memory.pressure")?,
                kernel: None,
            },
            Version::V1 => Self {
                version,
                usage: dir.file("memory.usage_in_bytes")?,
                stat,
                limit: dir.optional_file("memory.limit_in_bytes")?,
                peak: dir.optional_file("memory.max_usage_in_bytes")?,
                swap: None,
                pressure: None,
                kernel: dir.optional_file("memory.kmem.usage_in_bytes")?,
            },
        })
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

    fn limit(&self, buffer: &mut Vec<u8>) -> Result<Option<u64>, ReadError> {
        let Some(file) = &self.limit else { return Ok(None) };
        parse::limit(file.read_once(buffer)?)
            .ok_or_else(|| ReadError::malformed("the limit file of a cgroup"))
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

    fn read(&self, buffer: &mut Vec<u8>, read_errors: &mut ReadErrors) -> Result<ContainerMemory, ReadError> {
        let mut memory = self.parts(buffer, read_errors)?;
        if memory.rest() < 0 {
            memory = self.parts(buffer, read_errors)?;
            // tolerates per-CPU batches and delayed counters; a larger difference is an error
            if memory.rest() < -(i128::from(memory.usage / 64) + (1 << 20)) {
                read_errors.count("balance");
            }
        }
        memory.limit = self.limit(buffer)?;
        memory.peak = Self::optional(self.peak.as_ref(), buffer, read_errors)?;
        if self.version == Version::V2 {
            memory.swap = Self::optional(self.swap.as_ref(), buffer, read_errors)?;
        }
        if let Some(file) = &self.pressure {
            match file.read_once(buffer) {
                Ok(text) => memory.pressure = psi::stalls(text),
                Err(gone @ ReadError::Gone(_)) => return Err(gone),
                Err(error) => read_errors.record(&error), // EOPNOTSUPP: PSI is disabled
            }
        }
        Ok(memory)
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
    memory.anon = stat.anon;
    memory.shmem = stat.shmem;
    memory.file = stat.file.zip(stat.shmem).map(|(file, shmem)| file.saturating_sub(shmem));
    memory.kernel = stat.kernel.or(summed);
    memory.unreclaimable = sum(&[stat.anon, stat.shmem, pinned, stat.sock]);
}

fn apply_v1(memory: &mut ContainerMemory, stat: parse::StatV1, kernel: Option<u64>) {
    memory.inactive_file = stat.total_inactive_file;
    memory.anon = stat.total_rss;
    memory.shmem = stat.total_shmem;
    memory.file = stat.total_cache.zip(stat.total_shmem).map(|(cache, shmem)| cache.saturating_sub(shmem));
    memory.kernel = kernel;
    memory.swap = stat.total_swap;
    // without the file, kernel memory is not charged, so the sum is complete
    let charged = kernel.into_iter().sum::<u64>();
    memory.unreclaimable = stat.total_rss.zip(stat.total_shmem).map(|(rss, shmem)| rss + shmem + charged);
}

impl Cgroups {
    /// Reads one container. Opens its files if they are not open or belong to an earlier run.
    fn container(
        &mut self,
        hierarchy: &Hierarchy,
        id: &ContainerId,
        cgroup: &Arc<Cgroup>,
        read_errors: &mut ReadErrors,
    ) -> Result<ContainerMemory, ReadError> {
        let cycle = self.cycle;
        if let Some(open) = self.containers.get_mut(id).filter(|open| open.cgroup.path == cgroup.path) {
            match open.files.read(&mut self.buffer, read_errors) {
                Ok(memory) => {
                    open.cycle = cycle;
                    return Ok(memory);
                }
                Err(error) if error.is_gone() => {}
                Err(error) => {
                    open.cycle = cycle;
                    return Err(error);
                }
            }
        }
        let files = CgroupFiles::open(hierarchy, &cgroup.path)?;
        let memory = files.read(&mut self.buffer, read_errors)?;
        let above = cgroup.path.ancestors().skip(1).filter(|path| !path.as_os_str().is_empty());
        let above = above.map(Path::to_path_buf).collect();
        self.containers.insert(id.clone(), OpenContainer { cgroup: Arc::clone(cgroup), files, above, cycle });
        Ok(memory)
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
            let files = match self.levels.remove(path) {
                Some(level) => level.files,
                None => CgroupFiles::open(hierarchy, path)?,
            };
            let limit = files.limit(&mut self.buffer)?;
            let headroom = match limit {
                Some(limit) => {
                    let pinned = files.parts(&mut self.buffer, read_errors)?.unreclaimable;
                    pinned.map(|pinned| limit as i64 - pinned as i64)
                }
                None => None, // not read: memory.stat of an unlimited level is not needed
            };
            self.levels.insert(path.to_path_buf(), Level { files, cycle, limit, headroom });
        }
        self.levels.get(path).ok_or_else(|| ReadError::Gone(path.display().to_string()))
    }

    /// Applies the limits of the levels above to a reading.
    fn apply_levels(
        &mut self,
        hierarchy: &Hierarchy,
        id: &ContainerId,
        memory: &mut ContainerMemory,
        read_errors: &mut ReadErrors,
    ) {
        memory.effective_limit = memory.limit;
        memory.headroom = memory
            .limit
            .zip(memory.unreclaimable)
            .map(|(limit, unreclaimable)| limit as i64 - unreclaimable as i64);
        let Some(open) = self.containers.get_mut(id) else { return };
        let above = std::mem::take(&mut open.above);
        for path in &above {
            match self.level(hierarchy, path, read_errors) {
                Ok(level) => {
                    memory.effective_limit = min_present(memory.effective_limit, level.limit);
                    memory.headroom = min_present(memory.headroom, level.headroom);
                }
                Err(error) => {
                    read_errors.record(&error);
                    // the limit of this level is unknown, and so is the minimum
                    (memory.effective_limit, memory.headroom) = (None, None);
                    break;
                }
            }
        }
        if let Some(open) = self.containers.get_mut(id) {
            open.above = above;
        }
    }
}

/// Returns the memory request of a container in a pod, if the node knows it.
fn request(container: &Container, memory: &ContainerMemory) -> Option<u64> {
    let pod = container.pod.as_ref()?;
    pod.memory_min_bytes.or_else(|| memory.limit.filter(|_| container.qos() == Some(Qos::Guaranteed)))
}

fn min_present<T: Ord>(a: Option<T>, b: Option<T>) -> Option<T> {
    a.into_iter().chain(b).min()
}

impl Collector for Cgroups {
    fn name(&self) -> &'static str {
        "cgroup"
    }

    fn collect(&mut self, context: &Context<'_>, output: &mut Output<'_>) -> CollectOutcome {
        let Some(hierarchy) = context.hierarchy else { return CollectOutcome::Failed };
        output.read_errors.init_at_zero("balance");
        self.cycle += 1;
        output.cycle_data.memory.clear();
        let (mut read, mut failed) = (0, 0);
        for (number, container) in context.inventory.containers.iter().enumerate() {
            let reading = container.cgroup.as_ref().and_then(|cgroup| {
                match self.container(hierarchy, &container.id, cgroup, output.read_errors) {
                    Ok(mut memory) => {
                        self.apply_levels(hierarchy, &container.id, &mut memory, output.read_errors);
                        Some(memory)
                    }
                    Err(error) => {
                        failed += usize::from(error.reason_label().is_some());
                        output.read_errors.record(&error);
                        None
                    }
                }
            });
            if let Some(memory) = &reading {
                memory.write(number as u32, output.series);
                if let Some(bytes) = request(container, memory) {
                    output.series.container(CONTAINER_MEMORY_REQUEST, number as u32, [], bytes as f64);
                }
                read += 1;
            }
            output.cycle_data.memory.push(reading);
        }
        let cycle = self.cycle;
        self.containers.retain(|_, open| open.cycle == cycle);
        self.levels.retain(|_, level| level.cycle == cycle);
        output.cycle_data.memory_complete = failed == 0;
        if read == 0 && failed > 0 { CollectOutcome::Failed } else { CollectOutcome::Ok }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subtracts_shmem_from_file_on_both_versions() {
        let mut v2 = ContainerMemory { usage: 100, ..ContainerMemory::default() };
        let stat =
            b"anon 40\nfile 30\nkernel 20\nsock 1\nshmem 10\nslab_reclaimable 5\nslab_unreclaimable 1\n";
        apply_v2(&mut v2, parse::StatV2::parse(stat));
        assert_eq!((v2.anon, v2.file, v2.shmem, v2.kernel), (Some(40), Some(20), Some(10), Some(20)));
        assert_eq!(v2.unreclaimable, Some(40 + 10 + (20 - 5) + 1));
        assert_eq!(v2.rest(), 10);
        let mut v1 = ContainerMemory { usage: 100, ..ContainerMemory::default() };
        apply_v1(&mut v1, parse::StatV1::parse(b"total_cache 30\ntotal_rss 40\ntotal_shmem 10\n"), Some(20));
        assert_eq!((v1.anon, v1.file, v1.shmem, v1.kernel), (Some(40), Some(20), Some(10), Some(20)));
        assert_eq!((v1.unreclaimable, v1.rest()), (Some(70), 10));
    }

    #[test]
    fn sums_kernel_memory_from_parts_before_linux_5_18() {
        let mut memory = ContainerMemory { usage: 100, ..ContainerMemory::default() };
        let stat = b"anon 40\nfile 10\nkernel_stack 3\npagetables 4\npercpu 2\nsock 0\nshmem 0\nslab_reclaimable 7\nslab_unreclaimable 8\nslab 15\n";
        apply_v2(&mut memory, parse::StatV2::parse(stat));
        assert_eq!(memory.kernel, Some(15 + 3 + 4 + 2));
        assert_eq!(memory.unreclaimable, Some(40 + 8 + 3 + 4 + 2));
    }

    #[test]
    fn unreclaimable_is_absent_without_shmem() {
        let mut memory = ContainerMemory { usage: 100, ..ContainerMemory::default() };
        apply_v1(&mut memory, parse::StatV1::parse(b"total_cache 30\ntotal_rss 40\n"), None);
        assert_eq!((memory.unreclaimable, memory.file, memory.shmem), (None, None, None));
        assert_eq!(memory.rest(), 60, "memory that cannot be split is in the rest");
    }
}
