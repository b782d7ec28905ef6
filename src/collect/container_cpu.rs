//! CPU time of containers, from their cgroups: read with the memory of each container.
//!
//! v2: `cpu.stat` beside the memory files, with times in every cgroup and throttling where the CPU controller is on. v1: the
//! hierarchies of `cpuacct` and `cpu`, where runtimes give a container the same path as in that of `memory`.

use std::path::Path;

use crate::catalog::*;
use crate::discover::{Hierarchy, Version};
use crate::host::{Dir, HostPaths, KernelFile, ReadError};
use crate::parse::cgroup::values;
use crate::series::Series;

/// CPU times in seconds. `None`: not provided by this kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CpuTimes {
    /// In user mode.
    pub user: Option<f64>,
    /// In the kernel.
    pub system: Option<f64>,
    /// Kept from running by a limit, over all CPUs.
    pub throttled: Option<f64>,
}

impl CpuTimes {
    /// Writes the series of the container with this number.
    pub fn write(&self, container: u32, series: &mut Series) {
        for (mode, seconds) in [("user", self.user), ("system", self.system)] {
            if let Some(seconds) = seconds {
                series.container(CONTAINER_CPU, container, [mode.into()], seconds);
            }
        }
        if let Some(seconds) = self.throttled {
            series.container(CONTAINER_CPU_THROTTLED, container, [], seconds);
        }
    }
}

/// The open files of one container.
#[derive(Debug)]
pub enum CpuFiles {
    /// cgroup v2.
    V2(Option<KernelFile>),
    /// cgroup v1: `cpuacct.stat` and `cpu.stat`.
    V1([Option<KernelFile>; 2]),
}

impl CpuFiles {
    /// Opens the files of a cgroup; those that are missing are absent.
    pub fn open(hierarchy: &Hierarchy, host_paths: &HostPaths, path: &Path) -> Self {
        let file = |dir: &Path, name| Dir::open(&dir.join(path)).ok()?.optional_file(name).ok()?;
        match hierarchy.version {
            Version::V2 => Self::V2(file(&hierarchy.root, "cpu.stat")),
            Version::V1 => {
                let [time, quota] = ["cpuacct", "cpu"].map(|controller| host_paths.cgroup.join(controller));
                Self::V1([file(&time, "cpuacct.stat"), file(&quota, "cpu.stat")])
            }
        }
    }

    /// Reads the times.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn read(&self, buffer: &mut Vec<u8>) -> Result<CpuTimes, ReadError> {
        let seconds = |units: f64| move |value: u64| value as f64 / units;
        match self {
            Self::V2(None) => Ok(CpuTimes::default()),
            Self::V2(Some(stat)) => {
                let keys = [&b"user_usec"[..], b"system_usec", b"throttled_usec"];
                let [user, system, throttled] =
                    values(stat.read_once(buffer)?, keys).map(|value| value.map(seconds(1e6)));
                Ok(CpuTimes { user, system, throttled })
            }
            Self::V1([time, quota]) => {
                let mut times = CpuTimes::default();
                if let Some(time) = time {
                    let ticks = rustix::param::clock_ticks_per_second().max(1) as f64;
                    let values = values(time.read_once(buffer)?, [&b"user"[..], b"system"]);
                    [times.user, times.system] = values.map(|value| value.map(seconds(ticks)));
                }
                if let Some(quota) = quota {
                    times.throttled =
                        values(quota.read_once(buffer)?, [b"throttled_time"])[0].map(seconds(1e9));
                }
                Ok(times)
            }
        }
    }
}
