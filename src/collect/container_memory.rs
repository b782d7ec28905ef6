//! Memory of one container in one cycle: what its cgroup's files say, and the series of it.
//!
//! Which files are read, and when, is in [`super::cgroup`].

use super::cgroup_limits::{LevelHeadroom, LimitLevel};
use crate::catalog::*;
use crate::parse::cgroup as parse;
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
    /// It is at its limit, and its processes wait for memory; `None` without a limit of its own, or where nothing shows that.
    pub at_limit: Option<bool>,
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
    pub(super) fn add_level(&mut self, level: LimitLevel, headroom: LevelHeadroom) {
        let highest = &mut self.level_utilization[level as usize];
        *highest = (*highest).into_iter().chain(headroom.utilization.ok().flatten()).reduce(f64::max);
    }

    /// Returns usage minus all components. Negative when the kernel's values, which are not of one instant, overlap.
    pub(super) fn rest(&self) -> i128 {
        let parts = [self.anon, self.file, self.shmem, self.kernel];
        i128::from(self.usage) - parts.iter().flatten().map(|part| i128::from(*part)).sum::<i128>()
    }

    pub(super) fn write(&self, container: u32, series: &mut Series) {
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
        gauge(CONTAINER_AT_MEMORY_LIMIT, self.at_limit.map(u64::from));
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

impl ContainerMemory {
    /// Returns what `memory.stat` of cgroup v1 has.
    pub fn of_v1(stat: parse::StatV1) -> Self {
        let mut memory = Self::default();
        apply_v1(&mut memory, stat, None);
        memory
    }
}

/// Takes the values of `memory.stat` of cgroup v2.
pub(super) fn apply_v2(memory: &mut ContainerMemory, stat: parse::StatV2) {
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

/// Takes the values of `memory.stat` of cgroup v1. `kernel`: kernel memory, which has a file of its own there.
pub(super) fn apply_v1(memory: &mut ContainerMemory, stat: parse::StatV1, kernel: Option<u64>) {
    memory.inactive_file = stat.total_inactive_file;
    memory.major_faults = stat.total_pgmajfault;
    memory.refaults = [stat.total_workingset_refault_anon, stat.total_workingset_refault_file];
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
