//! Memory of the whole host: `/proc/meminfo`, `/proc/pressure/memory` and the host's `/dev/shm`.
//!
//! The partition needs the memory of the containers, so this collector runs after the cgroup collector. Kernel counters
//! are not of one instant: if the parts exceed the whole, the file is read once more; if they still do, an error is
//! counted.

use std::sync::{Arc, Mutex, PoisonError};

use procfs::{FromBufRead, Meminfo, MemoryPressure};

use super::container_memory::ContainerMemory;
use super::cycle::HostMemory;
use super::shm::HostShm;
use super::{CollectOutcome, Collector, Context, Output};
use crate::catalog::*;
use crate::host::{KernelFile, ReadError};
use crate::series::Series;

/// The collector. Keeps its files open.
#[derive(Debug, Default)]
pub struct HostCollector {
    meminfo: Option<KernelFile>,
    pressure: Option<KernelFile>,
    shm: Arc<Mutex<HostShm>>,
    buffer: Vec<u8>,
}

/// The host's memory by owner and kind, in bytes. The parts sum to `MemTotal` unless the rest is negative.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Partition {
    containers: u64,
    processes: u64,
    page_cache: u64,
    kernel_reclaimable: u64,
    kernel: u64,
    hugetlb: u64,
    free: u64,
    /// Wide enough for any reported memory of the containers.
    unaccounted: i128,
}

impl Partition {
    /// Computes the partition. `containers` is the anonymous and shared memory of all containers that are not nested in
    /// another one.
    ///
    /// Returns `None` on kernels before about 3.2, whose meminfo lacks a part without which the rest would mislead.
    fn of(info: &Meminfo, containers: u64) -> Option<Self> {
        let shmem = info.shmem?;
        let reclaimable = info.k_reclaimable.or(info.s_reclaimable)?; // KReclaimable was added in 4.20
        // each was added by a kernel newer than some in use; a missing line means 0
        let recent = [info.secondary_page_tables, info.per_cpu].into_iter().flatten().sum::<u64>();
        let kernel = info.s_unreclaim? + info.page_tables? + info.kernel_stack? + recent;
        let mut parts = Self {
            containers,
            // cgroup counters lag behind those of the host: the excess here is missing in the rest
            processes: (info.anon_pages? + shmem).saturating_sub(containers),
            page_cache: (info.cached + info.buffers).saturating_sub(shmem),
            kernel_reclaimable: reclaimable,
            kernel,
            hugetlb: hugetlb(info),
            free: info.mem_free,
            unaccounted: 0,
        };
        let known: i128 = parts.known().iter().map(|(_, bytes)| i128::from(*bytes)).sum();
        parts.unaccounted = i128::from(info.mem_total) - known;
        Some(parts)
    }

    fn known(&self) -> [(&'static str, u64); 7] {
        [
            ("containers", self.containers),
            ("processes", self.processes),
            ("page_cache", self.page_cache),
            ("kernel_reclaimable", self.kernel_reclaimable),
            ("kernel", self.kernel),
            ("hugetlb", self.hugetlb),
            ("free", self.free),
        ]
    }

    /// Without the memory of every container, the split between `containers` and `processes` is unknown and omitted.
    fn write(&self, containers_known: bool, series: &mut Series) {
        for (component, bytes) in self.known() {
            if !containers_known && matches!(component, "containers" | "processes") {
                continue;
            }
            series.global(HOST_MEMORY_COMPONENT, [component.into()], bytes as f64);
        }
        series.global(HOST_MEMORY_COMPONENT, ["unaccounted".into()], self.unaccounted.max(0) as f64);
    }
}

/// Returns the memory in huge pages of all sizes; before Linux 4.14, in those of the default size.
fn hugetlb(info: &Meminfo) -> u64 {
    let default_size = info.hugepages_total.zip(info.hugepagesize);
    info.hugetlb.unwrap_or(default_size.map_or(0, |(pages, page)| pages.saturating_mul(page)))
}

/// Returns the anonymous and shared memory of all containers. Nested containers are not counted again.
fn container_memory(context: &Context<'_>, memory: &[Option<ContainerMemory>]) -> u64 {
    std::iter::zip(&context.inventory.containers, memory)
        .filter(|(container, _)| !container.nested)
        .filter_map(|(_, memory)| memory.as_ref())
        .flat_map(|memory| [memory.anon, memory.shmem])
        .flatten()
        .fold(0, u64::saturating_add) // an absurd value stays larger than the host memory and is counted as an error
}

impl HostCollector {
    /// Creates the collector. `shm`: shared with the collector of containers' `/dev/shm`.
    pub fn new(shm: Arc<Mutex<HostShm>>) -> Self {
        Self { shm, ..Self::default() }
    }

    fn meminfo(&mut self, context: &Context<'_>) -> Result<Meminfo, ReadError> {
        if self.meminfo.is_none() {
            self.meminfo = Some(KernelFile::open(&context.host_paths.proc.join("meminfo"))?);
        }
        let Some(file) = &self.meminfo else { return Err(ReadError::Absent("meminfo".into())) };
        let text = file.read_once(&mut self.buffer)?;
        Meminfo::from_buf_read(text).map_err(|_| ReadError::malformed("meminfo"))
    }

    fn pressure(&mut self, context: &Context<'_>) -> Result<MemoryPressure, ReadError> {
        if self.pressure.is_none() {
            self.pressure = Some(KernelFile::open(&context.host_paths.proc.join("pressure/memory"))?);
        }
        let Some(file) = &self.pressure else { return Err(ReadError::Absent("PSI".into())) };
        let text = file.read_once(&mut self.buffer)?;
        MemoryPressure::from_buf_read(text).map_err(|_| ReadError::malformed("PSI"))
    }
}

impl Collector for HostCollector {
    fn name(&self) -> &'static str {
        "host"
    }

    fn collect(&mut self, context: &Context<'_>, output: &mut Output<'_>) -> CollectOutcome {
        output.read_errors.init_at_zero("balance");
        let info = match self.meminfo(context) {
            Ok(info) => info,
            Err(error) => {
                output.read_errors.record(&error);
                return CollectOutcome::Failed;
            }
        };
        let series = &mut *output.series;
        let mut memory = HostMemory {
            total: info.mem_total,
            available: info.mem_available,
            swap_total: info.swap_total,
            swap_used: info.swap_total.saturating_sub(info.swap_free),
            waiting_seconds: None,
        };
        series.global(HOST_MEMORY_TOTAL, [], memory.total as f64);
        if let Some(available) = memory.available {
            series.global(HOST_MEMORY_AVAILABLE, [], available as f64);
            output.cycle_data.free_swap = info.swap_free;
        }
        series.global(HOST_SWAP_TOTAL, [], memory.swap_total as f64);
        series.global(HOST_SWAP_USED, [], memory.swap_used as f64);
        let containers = container_memory(context, &output.cycle_data.memory);
        let mut parts = Partition::of(&info, containers);
        if parts.is_some_and(|parts| parts.unaccounted < 0) {
            parts = output
                .read_errors
                .value(self.meminfo(context))
                .and_then(|info| Partition::of(&info, containers));
            if parts.is_some_and(|parts| parts.unaccounted < 0) {
                output.read_errors.count("balance");
            }
        }
        if let Some(parts) = parts {
            parts.write(output.cycle_data.memory_complete, series);
        }
        match self.pressure(context) {
            Ok(pressure) => {
                let waiting_seconds = pressure.some.total as f64 / 1e6;
                memory.waiting_seconds = Some(waiting_seconds);
                series.global(HOST_PRESSURE_WAITING, [], waiting_seconds);
                series.global(HOST_PRESSURE_STALLED, [], pressure.full.total as f64 / 1e6);
            }
            Err(error) => output.read_errors.record(&error), // gone or absent on a kernel without PSI
        }
        output.cycle_data.host = Some(memory);
        let mut shm = self.shm.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((used, size)) = shm.sizes(context.host_paths) {
            series.global(HOST_SHM_USED, [], used as f64);
            series.global(HOST_SHM_SIZE, [], size as f64);
        }
        CollectOutcome::Ok
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal: 1000 kB\nMemFree: 400 kB\nMemAvailable: 700 kB\nBuffers: 10 kB\nCached: 200 kB\nSwapCached: 0 kB\nActive: 0 kB\nInactive: 0 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\nDirty: 0 kB\nWriteback: 0 kB\nAnonPages: 150 kB\nMapped: 0 kB\nShmem: 50 kB\nSlab: 60 kB\nKReclaimable: 40 kB\nSReclaimable: 40 kB\nSUnreclaim: 20 kB\nKernelStack: 5 kB\nPageTables: 5 kB\nCommitted_AS: 0 kB\nVmallocTotal: 0 kB\nVmallocUsed: 0 kB\nVmallocChunk: 0 kB\nPercpu: 10 kB\nHugePages_Total: 2\nHugepagesize: 25 kB\nHugetlb: 50 kB\n";

    fn parts(containers: u64) -> Partition {
        Partition::of(&Meminfo::from_buf_read(MEMINFO.as_bytes()).unwrap(), containers).unwrap()
    }

    #[test]
    fn parts_sum_to_total_for_any_container_memory() {
        for containers in [0, 100 << 10, 200 << 10, 250 << 10] {
            let parts = parts(containers);
            let known: i128 = parts.known().iter().map(|(_, bytes)| i128::from(*bytes)).sum();
            assert_eq!(known + parts.unaccounted, 1000 << 10);
            assert_eq!(parts.page_cache, 160 << 10, "shared memory is not page cache");
        }
    }

    #[test]
    fn absurd_container_memory_does_not_overflow() {
        assert!(parts(u64::MAX).unaccounted < 0);
        let most = MEMINFO
            .replace("1000 kB", &format!("{} kB", 1_u64 << 46))
            .replace(" 50 kB", " 140737488355328 kB");
        let parts = Partition::of(&Meminfo::from_buf_read(most.as_bytes()).unwrap(), u64::MAX).unwrap();
        assert!(parts.unaccounted < -i128::from(u64::MAX));
    }

    #[test]
    fn process_memory_is_never_negative() {
        assert_eq!(parts(150 << 10).processes, 50 << 10);
        assert_eq!(parts(250 << 10).processes, 0);
        assert_eq!(parts(0).unaccounted - parts(250 << 10).unaccounted, 50 << 10, "the rest absorbs the lag");
    }
}
