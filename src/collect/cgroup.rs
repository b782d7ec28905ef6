//! Memory of containers, from their cgroups.
//!
//! v2 answers from `memory.current`, `memory.stat` and `memory.max`; v1 from `memory.usage_in_bytes`, `memory.stat` and
//! `memory.limit_in_bytes`. The files stay open between cycles: a container that was stopped and started under the same
//! path answers *gone* on the old ones, and the new ones are opened.
//!
//! A limit may sit on any level above the container (a pod, a slice). Each level is read once per cycle, however many
//! containers lie below it.
//!
//! Not here: who the container is (`discover`) and peaks that the kernel does not keep (`ledger`).

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Collector, Context, Faults, Outcome, Output};
use crate::catalog::*;
use crate::discover::{Cgroup, Container, ContainerId, Hierarchy, Version};
use crate::host::{Dir, KernelFile, ReadError};
use crate::parse::kubernetes::Qos;
use crate::parse::{cgroup as parse, number, psi};
use crate::series::Series;

/// One reading of a container's memory, in bytes. `None`: this kernel does not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Memory {
    /// Everything charged.
    pub usage: u64,
    /// File cache that was not used lately.
    pub inactive_file: Option<u64>,
    /// Anonymous memory.
    pub anon: Option<u64>,
    /// Page cache without shared memory.
    pub file: Option<u64>,
    /// Shared memory and tmpfs.
    pub shmem: Option<u64>,
    /// Memory of the kernel on the container's behalf.
    pub kernel: Option<u64>,
    /// What the kernel cannot drop.
    pub unreclaimable: Option<u64>,
    /// Own limit; `None` when unlimited.
    pub limit: Option<u64>,
    /// Lowest limit on the path to the root; `None` when unlimited.
    pub effective_limit: Option<u64>,
    /// Least of limit - unreclaimable over the path. Negative while the kernel is over the limit.
    pub headroom: Option<i64>,
    /// Highest usage, as the kernel keeps it.
    pub peak: Option<u64>,
    /// Swap held.
    pub swap: Option<u64>,
    /// Stall times.
    pub pressure: Option<psi::Stalls>,
}

impl Memory {
    /// What `docker stats` shows. The two files are read one after the other: never below zero.
    pub fn working_set(&self) -> Option<u64> {
        Some(self.usage.saturating_sub(self.inactive_file?))
    }

    /// Usage less all components. Negative when the kernel's figures, which are not of one instant, overlap.
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
            for (kind, usec) in [("some", pressure.some_usec), ("full", pressure.full_usec)] {
                series.container(CONTAINER_PRESSURE, container, [kind.into()], usec as f64 / 1e6);
            }
        }
    }
}

/// The collector. Holds the files of every container and of every level above one.
#[derive(Debug, Default)]
pub struct Cgroups {
    containers: HashMap<ContainerId, Open>,
    levels: HashMap<PathBuf, Level>,
    buffer: Vec<u8>,
    cycle: u64,
}

#[derive(Debug)]
struct Open {
    cgroup: Arc<Cgroup>,
    files: Files,
    /// The levels above, nearest first, without the root, which has no limit.
    above: Vec<PathBuf>,
    cycle: u64,
}

/// A cgroup above containers.
#[derive(Debug)]
struct Level {
    files: Files,
    cycle: u64,
    limit: Option<u64>,
    headroom: Option<i64>,
}

/// The open files of one cgroup.
#[derive(Debug)]
struct Files {
    version: Version,
    usage: KernelFile,
    stat: KernelFile,
    limit: Option<KernelFile>,
    peak: Option<KernelFile>,
    swap: Option<KernelFile>,
    pressure: Option<KernelFile>,
    /// v1 only; without kernel memory accounting there is none.
    kernel: Option<KernelFile>,
}

impl Files {
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
        number(text).ok_or_else(|| ReadError::malformed("a cgroup file holds no number"))
    }

    /// A file that may be missing, or be switched off on this kernel.
    fn optional(
        file: Option<&KernelFile>,
        buffer: &mut Vec<u8>,
        faults: &mut Faults,
    ) -> Result<Option<u64>, ReadError> {
        let Some(file) = file else { return Ok(None) };
        match Self::number(file, buffer) {
            Ok(value) => Ok(Some(value)),
            Err(gone @ ReadError::Gone(_)) => Err(gone),
            Err(error) => {
                faults.note(&error);
                Ok(None)
            }
        }
    }

    fn limit(&self, buffer: &mut Vec<u8>) -> Result<Option<u64>, ReadError> {
        let Some(file) = &self.limit else { return Ok(None) };
        parse::limit(file.read_once(buffer)?).ok_or_else(|| ReadError::malformed("a cgroup's limit"))
    }

    /// Usage and its parts, read close together.
    fn parts(&self, buffer: &mut Vec<u8>, faults: &mut Faults) -> Result<Memory, ReadError> {
        let mut memory = Memory { usage: Self::number(&self.usage, buffer)?, ..Memory::default() };
        match self.version {
            Version::V2 => apply_v2(&mut memory, parse::StatV2::parse(self.stat.read_once(buffer)?)),
            Version::V1 => {
                let stat = parse::StatV1::parse(self.stat.read_once(buffer)?);
                let kernel = Self::optional(self.kernel.as_ref(), buffer, faults)?;
                apply_v1(&mut memory, stat, kernel);
                if kernel.is_none() && self.kernel.is_some() {
                    memory.unreclaimable = None; // charged, and not known how much
                }
            }
        }
        Ok(memory)
    }

    fn read(&self, buffer: &mut Vec<u8>, faults: &mut Faults) -> Result<Memory, ReadError> {
        let mut memory = self.parts(buffer, faults)?;
        if memory.rest() < 0 {
            memory = self.parts(buffer, faults)?;
            // per-CPU batches and late counters are worth a little; more than that is a fault
            if memory.rest() < -(i128::from(memory.usage / 64) + (1 << 20)) {
                faults.count("balance");
            }
        }
        memory.limit = self.limit(buffer)?;
        memory.peak = Self::optional(self.peak.as_ref(), buffer, faults)?;
        if self.version == Version::V2 {
            memory.swap = Self::optional(self.swap.as_ref(), buffer, faults)?;
        }
        if let Some(file) = &self.pressure {
            match file.read_once(buffer) {
                Ok(text) => memory.pressure = psi::stalls(text),
                Err(gone @ ReadError::Gone(_)) => return Err(gone),
                Err(error) => faults.note(&error), // EOPNOTSUPP: PSI is switched off
            }
        }
        Ok(memory)
    }
}

fn apply_v2(memory: &mut Memory, stat: parse::StatV2) {
    let sum = |parts: &[Option<u64>]| parts.iter().copied().sum::<Option<u64>>();
    // pagetables is younger than 5.10, percpu than 5.8, the sum `kernel` than 5.18; without the line it is not charged
    // apart, and the little that it holds stays in the rest
    let young = [stat.pagetables, stat.percpu].into_iter().flatten().sum::<u64>();
    let summed = sum(&[stat.slab, stat.kernel_stack]).map(|sum| sum + young);
    let pinned = match (stat.kernel, stat.slab_reclaimable) {
        (Some(kernel), Some(reclaimable)) => Some(kernel.saturating_sub(reclaimable)),
        _ => sum(&[stat.slab_unreclaimable, stat.kernel_stack]).map(|sum| sum + young),
    };
    memory.inactive_file = stat.inactive_file;
    memory.anon = stat.anon;
    memory.shmem = stat.shmem;
    memory.file = stat.file.zip(stat.shmem).map(|(file, shmem)| file.saturating_sub(shmem));
    memory.kernel = stat.kernel.or(summed);
    memory.unreclaimable = sum(&[stat.anon, stat.shmem, pinned, stat.sock]);
}

fn apply_v1(memory: &mut Memory, stat: parse::StatV1, kernel: Option<u64>) {
    memory.inactive_file = stat.total_inactive_file;
    memory.anon = stat.total_rss;
    memory.shmem = stat.total_shmem;
    memory.file = stat.total_cache.zip(stat.total_shmem).map(|(cache, shmem)| cache.saturating_sub(shmem));
    memory.kernel = kernel;
    memory.swap = stat.total_swap;
    // without the file, kernel memory is not charged at all, and so nothing is missing
    let charged = kernel.into_iter().sum::<u64>();
    memory.unreclaimable = stat.total_rss.zip(stat.total_shmem).map(|(rss, shmem)| rss + shmem + charged);
}

impl Cgroups {
    /// Reads one container, opening its files if they are not open or belong to an earlier run.
    fn container(
        &mut self,
        hierarchy: &Hierarchy,
        id: &ContainerId,
        cgroup: &Arc<Cgroup>,
        faults: &mut Faults,
    ) -> Result<Memory, ReadError> {
        let cycle = self.cycle;
        if let Some(open) = self.containers.get_mut(id).filter(|open| open.cgroup.path == cgroup.path) {
            match open.files.read(&mut self.buffer, faults) {
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
        let files = Files::open(hierarchy, &cgroup.path)?;
        let memory = files.read(&mut self.buffer, faults)?;
        let above = cgroup.path.ancestors().skip(1).filter(|path| !path.as_os_str().is_empty());
        let above = above.map(Path::to_path_buf).collect();
        self.containers.insert(id.clone(), Open { cgroup: Arc::clone(cgroup), files, above, cycle });
        Ok(memory)
    }

    /// Limit and headroom of one level above containers, read at most once per cycle.
    fn level(
        &mut self,
        hierarchy: &Hierarchy,
        path: &Path,
        faults: &mut Faults,
    ) -> Result<&Level, ReadError> {
        let cycle = self.cycle;
        if self.levels.get(path).is_none_or(|level| level.cycle != cycle) {
            let files = match self.levels.remove(path) {
                Some(level) => level.files,
                None => Files::open(hierarchy, path)?,
            };
            let limit = files.limit(&mut self.buffer)?;
            let headroom = match limit {
                Some(limit) => {
                    let pinned = files.parts(&mut self.buffer, faults)?.unreclaimable;
                    pinned.map(|pinned| limit as i64 - pinned as i64)
                }
                None => None, // memory.stat of an unlimited level is not worth its microseconds
            };
            self.levels.insert(path.to_path_buf(), Level { files, cycle, limit, headroom });
        }
        self.levels.get(path).ok_or_else(|| ReadError::Gone(path.display().to_string()))
    }

    /// Completes a reading with what the levels above allow.
    fn apply_levels(
        &mut self,
        hierarchy: &Hierarchy,
        id: &ContainerId,
        memory: &mut Memory,
        faults: &mut Faults,
    ) {
        memory.effective_limit = memory.limit;
        memory.headroom = memory
            .limit
            .zip(memory.unreclaimable)
            .map(|(limit, unreclaimable)| limit as i64 - unreclaimable as i64);
        let Some(open) = self.containers.get_mut(id) else { return };
        let above = std::mem::take(&mut open.above);
        for path in &above {
            match self.level(hierarchy, path, faults) {
                Ok(level) => {
                    memory.effective_limit = least(memory.effective_limit, level.limit);
                    memory.headroom = least(memory.headroom, level.headroom);
                }
                Err(error) => {
                    faults.note(&error);
                    // what this level allows is not known, and so neither is the least of all
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

/// What a container in a pod has asked for, where the node knows it.
fn request(container: &Container, memory: &Memory) -> Option<u64> {
    let pod = container.pod.as_ref()?;
    pod.memory_min_bytes.or_else(|| memory.limit.filter(|_| container.qos() == Some(Qos::Guaranteed)))
}

fn least<T: Ord>(a: Option<T>, b: Option<T>) -> Option<T> {
    a.into_iter().chain(b).min()
}

impl Collector for Cgroups {
    fn name(&self) -> &'static str {
        "cgroup"
    }

    fn collect(&mut self, context: &Context<'_>, output: &mut Output<'_>) -> Outcome {
        let Some(hierarchy) = context.hierarchy else { return Outcome::Failed };
        output.faults.born("balance");
        self.cycle += 1;
        output.readings.memory.clear();
        let (mut read, mut failed) = (0, 0);
        for (number, container) in context.inventory.containers.iter().enumerate() {
            let reading = container.cgroup.as_ref().and_then(|cgroup| {
                match self.container(hierarchy, &container.id, cgroup, output.faults) {
                    Ok(mut memory) => {
                        self.apply_levels(hierarchy, &container.id, &mut memory, output.faults);
                        Some(memory)
                    }
                    Err(error) => {
                        failed += usize::from(error.fault_reason().is_some());
                        output.faults.note(&error);
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
            output.readings.memory.push(reading);
        }
        let cycle = self.cycle;
        self.containers.retain(|_, open| open.cycle == cycle);
        self.levels.retain(|_, level| level.cycle == cycle);
        output.readings.memory_complete = failed == 0;
        if read == 0 && failed > 0 { Outcome::Failed } else { Outcome::Read }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shmem_is_taken_out_of_file_on_both_versions() {
        let mut v2 = Memory { usage: 100, ..Memory::default() };
        let stat =
            b"anon 40\nfile 30\nkernel 20\nsock 1\nshmem 10\nslab_reclaimable 5\nslab_unreclaimable 1\n";
        apply_v2(&mut v2, parse::StatV2::parse(stat));
        assert_eq!((v2.anon, v2.file, v2.shmem, v2.kernel), (Some(40), Some(20), Some(10), Some(20)));
        assert_eq!(v2.unreclaimable, Some(40 + 10 + (20 - 5) + 1));
        assert_eq!(v2.rest(), 10);
        let mut v1 = Memory { usage: 100, ..Memory::default() };
        apply_v1(&mut v1, parse::StatV1::parse(b"total_cache 30\ntotal_rss 40\ntotal_shmem 10\n"), Some(20));
        assert_eq!((v1.anon, v1.file, v1.shmem, v1.kernel), (Some(40), Some(20), Some(10), Some(20)));
        assert_eq!((v1.unreclaimable, v1.rest()), (Some(70), 10));
    }

    #[test]
    fn kernels_before_5_18_add_the_kernel_up_from_its_parts() {
        let mut memory = Memory { usage: 100, ..Memory::default() };
        let stat = b"anon 40\nfile 10\nkernel_stack 3\npagetables 4\npercpu 2\nsock 0\nshmem 0\nslab_reclaimable 7\nslab_unreclaimable 8\nslab 15\n";
        apply_v2(&mut memory, parse::StatV2::parse(stat));
        assert_eq!(memory.kernel, Some(15 + 3 + 4 + 2));
        assert_eq!(memory.unreclaimable, Some(40 + 8 + 3 + 4 + 2));
    }

    #[test]
    fn a_kernel_that_does_not_tell_shmem_gives_no_unreclaimable_rather_than_a_wrong_one() {
        let mut memory = Memory { usage: 100, ..Memory::default() };
        apply_v1(&mut memory, parse::StatV1::parse(b"total_cache 30\ntotal_rss 40\n"), None);
        assert_eq!((memory.unreclaimable, memory.file, memory.shmem), (None, None, None));
        assert_eq!(memory.rest(), 60, "what cannot be told apart is in the rest");
    }
}
