//! What one cycle found, typed: the screens are views of it. Rows of metrics are written beside it, for the exporters alone. Pure.

use std::sync::Arc;

use crate::discover::{Pod, RuntimeKind};
use crate::gpu::GpuDevice;

/// What one cycle found. Containers and GPUs are named by their numbers in the snapshot. Memory is in bytes; what is not known is absent.
#[derive(Debug, Default)]
pub struct Cycle {
    /// The host.
    pub host: CycleHost,
    /// Runtimes, and whether all of their sockets respond.
    pub runtimes: Vec<(RuntimeKind, bool)>,
    /// Running containers, in the order of their numbers.
    pub containers: Vec<CycleContainer>,
    /// Processes by container and role, of each container of which all are known.
    pub roles: Vec<CycleRole>,
    /// GPUs and MIG instances, in the order of their numbers.
    pub gpus: Vec<CycleGpu>,
    /// Use of GPUs by containers.
    pub gpu_uses: Vec<GpuUseByContainer>,
    /// GPU memory by holder, by container and GPU, where programs report.
    pub gpu_holders: Vec<((u32, u32), HolderPartition)>,
    /// Containers that have a GPU allocated, and that GPU; containers of pods also while they do not run.
    pub gpu_allocations: Vec<(u32, u32)>,
    /// Devices of resource claims, and those that the kubelet allocated under names that are no GPU's here.
    pub other_devices: Vec<AllocatedDevice>,
    /// Pods of which a container runs, by namespace and name.
    pub pods: Vec<PodMemory>,
}

/// The host in one cycle.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CycleHost {
    /// Its memory.
    pub memory: Option<HostMemory>,
    /// OOM kills that the ledger counted.
    pub oom_kills: Option<u64>,
}

/// Memory of the host from /proc/meminfo, in bytes, and its memory pressure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostMemory {
    /// MemTotal.
    pub total: u64,
    /// MemAvailable.
    pub available: Option<u64>,
    /// SwapTotal.
    pub swap_total: u64,
    /// Swap space in use.
    pub swap_used: u64,
    /// Seconds for which at least one task waited for memory since the boot.
    pub waiting_seconds: Option<f64>,
}

/// A running container in one cycle.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CycleContainer {
    /// Memory that the kernel cannot take back.
    pub unreclaimable: Option<u64>,
    /// The lowest limit that applies.
    pub effective_limit: Option<u64>,
    /// What is left until an OOM kill.
    pub headroom: Option<i64>,
    /// Unreclaimable memory as a share of the limit.
    pub limit_utilization: Option<f64>,
    /// It is at its limit, and its processes wait for memory.
    pub is_at_limit: bool,
    /// CPU seconds since it began.
    pub cpu_seconds: Option<f64>,
    /// What the ledger counted.
    pub counts: Option<CycleCounts>,
}

/// What the ledger counted of a container.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CycleCounts {
    /// OOM kills of its processes, also under former names, and of earlier containers of its name.
    pub oom_kills: u64,
    /// Unix time of the last one.
    pub last_oom_kill: Option<f64>,
    /// CUDA out-of-memory errors; `None` where no source of them ever was there.
    pub cuda_ooms: Option<u64>,
}

/// The processes of one role in one container.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CycleRole {
    /// Number of the container.
    pub container: u32,
    /// The role.
    pub role: &'static str,
    /// Processes.
    pub processes: u64,
    /// Their resident memory.
    pub rss: u64,
    /// Their proportional shares, if all of them are measured.
    pub pss: Option<u64>,
}

/// A GPU or a MIG instance in one cycle.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CycleGpu {
    /// All of its memory, with what the driver keeps.
    pub total: Option<u64>,
    /// Used memory.
    pub used: Option<u64>,
    /// Kept by the driver.
    pub reserved: Option<u64>,
    /// Share of time in which a kernel ran.
    pub utilization: Option<f64>,
    /// Used memory beside that of containers.
    pub rest: GpuRest,
}

/// Used memory of a GPU beside that of containers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuRest {
    /// Of processes outside containers.
    pub host: Option<u64>,
    /// In use, and attributed to no process.
    pub unattributed: Option<u64>,
}

impl CycleGpu {
    /// Returns the figures of a device that the driver reports.
    pub fn of_device(device: &GpuDevice, rest: GpuRest) -> Self {
        let memory = &device.memory;
        Self {
            total: memory.total,
            used: memory.used,
            reserved: memory.reserved,
            utilization: device.health.utilization,
            rest,
        }
    }
}

/// Use of one GPU by one container.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuUseByContainer {
    /// Number of the container.
    pub container: u32,
    /// Number of the device.
    pub gpu: u32,
    /// Memory of its processes, if all of it is reported.
    pub used: Option<u64>,
    /// Share of time in which a kernel of them ran.
    pub busy: Option<f64>,
}

/// The GPU memory of one container on one GPU by holder, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HolderPartition {
    /// Tensors of torch.
    pub tensors: u64,
    /// What torch reserved and no tensor uses.
    pub torch_cache: u64,
    /// Of reporting processes, outside torch.
    pub outside_torch: u64,
    /// Of processes that do not report.
    pub not_reporting: u64,
    /// At least one process reports.
    pub is_any_reporting: bool,
}

impl HolderPartition {
    /// Returns the sum of both.
    pub fn plus(self, other: Self) -> Self {
        Self {
            tensors: self.tensors + other.tensors,
            torch_cache: self.torch_cache + other.torch_cache,
            outside_torch: self.outside_torch + other.outside_torch,
            not_reporting: self.not_reporting + other.not_reporting,
            is_any_reporting: self.is_any_reporting || other.is_any_reporting,
        }
    }

    /// Returns the parts that are known, with their label values.
    pub fn parts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let reported = [
            ("tensors", self.tensors),
            ("torch_cache", self.torch_cache),
            ("outside_torch", self.outside_torch),
        ];
        let reported = reported.into_iter().filter(|_| self.is_any_reporting);
        reported.chain([("not_reporting", self.not_reporting)])
    }
}

/// A device that the kubelet allocated to a container: of a device plugin under a name that is no GPU's here, or of a resource claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatedDevice {
    /// Number of the container.
    pub container: u32,
    /// The resource of a device plugin, or the driver of a resource claim.
    pub source: Arc<str>,
    /// The pool of a resource claim.
    pub pool: Option<Arc<str>>,
    /// Its name there.
    pub device: Arc<str>,
}

/// Memory of one pod.
#[derive(Clone, Debug)]
pub struct PodMemory {
    /// The pod.
    pub pod: Arc<Pod>,
    /// Everything that is charged to its cgroup.
    pub usage: u64,
    /// The limit of its cgroup.
    pub limit: Option<u64>,
    /// Of its containers that run: at most the usage.
    pub containers: u64,
}

impl PodMemory {
    /// Returns what it holds beyond its containers.
    pub fn rest(&self) -> u64 {
        self.usage.saturating_sub(self.containers)
    }
}

impl Cycle {
    /// Returns the GPU memory of each running container, all GPUs together; `None` where it is not known on one of them.
    pub fn gpu_bytes(&self) -> Vec<Option<u64>> {
        let mut sums: Vec<Option<Option<u64>>> = vec![None; self.containers.len()];
        for used in &self.gpu_uses {
            if let Some(sum) = sums.get_mut(used.container as usize) {
                *sum = Some(sum.unwrap_or(Some(0)).zip(used.used).map(|(sum, bytes)| sum + bytes));
            }
        }
        sums.into_iter().map(Option::flatten).collect()
    }
}
