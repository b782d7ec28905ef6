//! CPU time of containers, from their cgroups: read with the slow values of each container.
//!
//! v2: `cpu.stat` beside the memory files, with times in every cgroup and throttling where the CPU controller is on. v1: the
//! hierarchies of `cpuacct` and `cpu`, where runtimes give a container the same path as in that of `memory`. They may create it
//! after that of `memory`.

use std::path::Path;

use crate::catalog::*;
use crate::discover::{Hierarchy, Version};
use crate::host::{Dir, HostPaths, ReadError};
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
    /// Returns the time in user mode and in the kernel.
    pub fn total(&self) -> Option<f64> {
        self.user.into_iter().chain(self.system).reduce(|one, other| one + other)
    }

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

/// Reads the values of a file of a cgroup; `None` for each if the file is missing.
fn read_values<const N: usize>(
    dir: &Path,
    name: &'static str,
    keys: [&[u8]; N],
    buffer: &mut Vec<u8>,
) -> Result<[Option<u64>; N], ReadError> {
    let file = match Dir::open(dir) {
        Ok(dir) => dir.optional_file(name)?,
        Err(ReadError::Gone(_) | ReadError::Absent(_)) => None,
        Err(error) => return Err(error),
    };
    match file {
        Some(file) => Ok(values(file.read_once(buffer)?, keys)),
        None => Ok([None; N]),
    }
}

impl CpuTimes {
    /// Reads the times of a cgroup.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn read(
        hierarchy: &Hierarchy,
        host_paths: &HostPaths,
        path: &Path,
        buffer: &mut Vec<u8>,
    ) -> Result<Self, ReadError> {
        let seconds = |units: f64| move |value: u64| value as f64 / units;
        match hierarchy.version {
            Version::V2 => {
                let keys = [&b"user_usec"[..], b"system_usec", b"throttled_usec"];
                let times = read_values(&hierarchy.root.join(path), "cpu.stat", keys, buffer)?;
                let [user, system, throttled] = times.map(|value| value.map(seconds(1e6)));
                Ok(Self { user, system, throttled })
            }
            Version::V1 => {
                let [time, quota] =
                    ["cpuacct", "cpu"].map(|controller| host_paths.cgroup.join(controller).join(path));
                let ticks = rustix::param::clock_ticks_per_second().max(1) as f64;
                let times = read_values(&time, "cpuacct.stat", [&b"user"[..], b"system"], buffer)?;
                let [user, system] = times.map(|value| value.map(seconds(ticks)));
                let [throttled] = read_values(&quota, "cpu.stat", [&b"throttled_time"[..]], buffer)?;
                Ok(Self { user, system, throttled: throttled.map(seconds(1e9)) })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn reads_the_times_of_v2() {
        let folder = tempfile::tempdir().unwrap();
        let hierarchy = Hierarchy { version: Version::V2, root: folder.path().to_path_buf() };
        write(folder.path(), "a/cpu.stat", "usage_usec 3500000\nuser_usec 2500000\nsystem_usec 1000000\n");
        write(
            folder.path(),
            "b/cpu.stat",
            "user_usec 1\nsystem_usec 2\nnr_throttled 4\nthrottled_usec 7000000\n",
        );
        let read = |path: &str| {
            CpuTimes::read(&hierarchy, &HostPaths::default(), Path::new(path), &mut Vec::new()).unwrap()
        };
        let without_controller = CpuTimes { user: Some(2.5), system: Some(1.0), throttled: None };
        assert_eq!(read("a"), without_controller);
        assert_eq!(read("b").throttled, Some(7.0));
        assert_eq!(read("missing"), CpuTimes::default());
    }

    #[test]
    fn files_of_v1_may_be_made_one_after_the_other() {
        let folder = tempfile::tempdir().unwrap();
        let host_paths = HostPaths { cgroup: folder.path().to_path_buf(), ..HostPaths::default() };
        let hierarchy = Hierarchy { version: Version::V1, root: folder.path().join("memory") };
        let read = || CpuTimes::read(&hierarchy, &host_paths, Path::new("a"), &mut Vec::new()).unwrap();
        assert_eq!(read(), CpuTimes::default());
        write(folder.path(), "cpuacct/a/cpuacct.stat", "user 200\nsystem 100\n");
        let ticks = rustix::param::clock_ticks_per_second() as f64;
        let times = CpuTimes { user: Some(200.0 / ticks), system: Some(100.0 / ticks), throttled: None };
        assert_eq!(read(), times);
        write(folder.path(), "cpu/a/cpu.stat", "nr_periods 1\nthrottled_time 3000000000\n");
        assert_eq!(read(), CpuTimes { throttled: Some(3.0), ..times });
    }

    #[test]
    fn unreadable_file_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let hierarchy = Hierarchy { version: Version::V2, root: folder.path().to_path_buf() };
        write(folder.path(), "a/memory.stat", "");
        std::os::unix::fs::symlink("cpu.stat", folder.path().join("a/cpu.stat")).unwrap(); // ELOOP
        let read = CpuTimes::read(&hierarchy, &HostPaths::default(), Path::new("a"), &mut Vec::new());
        assert_eq!(read.unwrap_err().reason_label(), Some("io"));
    }
}
