//! CPU time of containers, from their cgroups: read with the memory of each container.
//!
//! v2: `cpu.stat` beside the memory files, with times in every cgroup and throttling where the CPU controller is on. v1: the
//! hierarchies of `cpuacct` and `cpu`, where runtimes give a container the same path as in that of `memory`. They may create it
//! after that of `memory`, so missing files are opened later.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::ReadErrors;
use crate::catalog::*;
use crate::clock::Timestamp;
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

/// How long after the first attempt missing files are opened again in every cycle: runtimes create the cgroups of a
/// container one after the other.
const STARTUP: Duration = Duration::from_secs(60);
/// The interval at which missing files are opened again after that.
const RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// v1: how often `cpu.stat` of a container that is no longer young is read until a quota has begun its first period; nothing is
/// throttled before that.
const QUOTA_INTERVAL: Duration = Duration::from_secs(10);

/// The files of one container, each open or missing.
#[derive(Debug)]
pub struct CpuFiles {
    first_attempt: Timestamp,
    last_attempt: Timestamp,
    /// v2: `cpu.stat`; v1: `cpuacct.stat` and `cpu.stat`.
    files: Vec<CpuFile>,
    /// v1: when `cpu.stat` was last read, if no quota had begun until then.
    without_quota: Option<Timestamp>,
}

#[derive(Debug)]
struct CpuFile {
    dir: PathBuf,
    name: &'static str,
    open: Option<KernelFile>,
}

impl CpuFile {
    /// Opens the file if it is not open and exists.
    fn open(&mut self) -> Result<(), ReadError> {
        if self.open.is_none() {
            self.open = match Dir::open(&self.dir) {
                Ok(dir) => dir.optional_file(self.name)?,
                Err(ReadError::Gone(_) | ReadError::Absent(_)) => None,
                Err(error) => return Err(error),
            };
        }
        Ok(())
    }

    fn values<const N: usize>(
        &self,
        keys: [&[u8]; N],
        buffer: &mut Vec<u8>,
    ) -> Result<[Option<u64>; N], ReadError> {
        match &self.open {
            Some(file) => Ok(values(file.read_once(buffer)?, keys)),
            None => Ok([None; N]),
        }
    }
}

impl CpuFiles {
    /// Opens the files of a cgroup.
    pub fn open(
        hierarchy: &Hierarchy,
        host_paths: &HostPaths,
        path: &Path,
        now: Timestamp,
        read_errors: &mut ReadErrors,
    ) -> Self {
        let file = |root: &Path, name| CpuFile { dir: root.join(path), name, open: None };
        let files = match hierarchy.version {
            Version::V2 => vec![file(&hierarchy.root, "cpu.stat")],
            Version::V1 => {
                let [time, quota] = ["cpuacct", "cpu"].map(|controller| host_paths.cgroup.join(controller));
                vec![file(&time, "cpuacct.stat"), file(&quota, "cpu.stat")]
            }
        };
        let mut this = Self { first_attempt: now, last_attempt: now, files, without_quota: None };
        this.open_missing(read_errors);
        this
    }

    fn open_missing(&mut self, read_errors: &mut ReadErrors) {
        for file in &mut self.files {
            read_errors.value(file.open());
        }
    }

    /// Returns the number of open files.
    pub fn count(&self) -> usize {
        self.files.iter().filter(|file| file.open.is_some()).count()
    }

    /// Reads the times. Files that were missing are opened if they exist now.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn read(
        &mut self,
        now: Timestamp,
        buffer: &mut Vec<u8>,
        read_errors: &mut ReadErrors,
    ) -> Result<CpuTimes, ReadError> {
        let is_due =
            now.since(self.first_attempt) < STARTUP || now.since(self.last_attempt) >= RETRY_INTERVAL;
        if is_due && self.count() < self.files.len() && now != self.last_attempt {
            self.last_attempt = now;
            self.open_missing(read_errors);
        }
        let seconds = |units: f64| move |value: u64| value as f64 / units;
        match &self.files[..] {
            [stat] => {
                let keys = [&b"user_usec"[..], b"system_usec", b"throttled_usec"];
                let times = stat.values(keys, buffer)?;
                let [user, system, throttled] = times.map(|value| value.map(seconds(1e6)));
                Ok(CpuTimes { user, system, throttled })
            }
            [time, quota] => {
                let ticks = rustix::param::clock_ticks_per_second().max(1) as f64;
                let times = time.values([&b"user"[..], b"system"], buffer)?;
                let [user, system] = times.map(|value| value.map(seconds(ticks)));
                if self.without_quota.is_some_and(|at| now.since(at) < QUOTA_INTERVAL) {
                    return Ok(CpuTimes { user, system, throttled: Some(0.0) });
                }
                let [periods, throttled] = quota.values([&b"nr_periods"[..], b"throttled_time"], buffer)?;
                self.without_quota =
                    (periods == Some(0) && now.since(self.first_attempt) >= STARTUP).then_some(now);
                Ok(CpuTimes { user, system, throttled: throttled.map(seconds(1e9)) })
            }
            _ => Ok(CpuTimes::default()),
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

    fn later(start: Timestamp, seconds: u64) -> Timestamp {
        start.plus(Duration::from_secs(seconds))
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
        let (start, mut read_errors) = (Timestamp::now(), ReadErrors::default());
        let mut read = |path: &str| {
            let mut files =
                CpuFiles::open(&hierarchy, &HostPaths::default(), Path::new(path), start, &mut read_errors);
            files.read(start, &mut Vec::new(), &mut read_errors).unwrap()
        };
        let without_controller = CpuTimes { user: Some(2.5), system: Some(1.0), throttled: None };
        assert_eq!(read("a"), without_controller);
        assert_eq!(read("b").throttled, Some(7.0));
        assert_eq!(read("missing"), CpuTimes::default());
    }

    #[test]
    fn files_of_v1_that_are_made_later_are_read_then() {
        let folder = tempfile::tempdir().unwrap();
        let host_paths = HostPaths { cgroup: folder.path().to_path_buf(), ..HostPaths::default() };
        let hierarchy = Hierarchy { version: Version::V1, root: folder.path().join("memory") };
        let (start, mut read_errors, mut buffer) = (Timestamp::now(), ReadErrors::default(), Vec::new());
        let mut files = CpuFiles::open(&hierarchy, &host_paths, Path::new("a"), start, &mut read_errors);
        let mut read = |seconds| files.read(later(start, seconds), &mut buffer, &mut read_errors).unwrap();
        assert_eq!(read(1), CpuTimes::default());
        write(folder.path(), "cpuacct/a/cpuacct.stat", "user 200\nsystem 100\n");
        let ticks = rustix::param::clock_ticks_per_second() as f64;
        let times = CpuTimes { user: Some(200.0 / ticks), system: Some(100.0 / ticks), throttled: None };
        assert_eq!(read(2), times, "in the next cycle while the container is young");
        assert_eq!(read(90), times);
        write(folder.path(), "cpu/a/cpu.stat", "nr_periods 1\nthrottled_time 3000000000\n");
        assert_eq!(read(91).throttled, None, "once a minute later");
        assert_eq!(read(150).throttled, Some(3.0));
        write(folder.path(), "cpu/a/cpu.stat", "nr_periods 0\nthrottled_time 0\n");
        assert_eq!(read(151).throttled, Some(0.0));
        write(folder.path(), "cpu/a/cpu.stat", "nr_periods 9\nthrottled_time 4000000000\n");
        assert_eq!(read(160).throttled, Some(0.0), "without a quota read less often");
        assert_eq!(read(161).throttled, Some(4.0));
        write(folder.path(), "cpu/a/cpu.stat", "nr_periods 9\nthrottled_time 5000000000\n");
        assert_eq!(read(162).throttled, Some(5.0));
        assert_eq!(read_errors.counts().count(), 0, "a missing file is no error");
    }

    #[test]
    fn errors_are_counted_and_end_with_their_cause() {
        let folder = tempfile::tempdir().unwrap();
        let hierarchy = Hierarchy { version: Version::V2, root: folder.path().to_path_buf() };
        let path = folder.path().join("a/cpu.stat");
        write(folder.path(), "a/memory.stat", "");
        std::os::unix::fs::symlink("cpu.stat", &path).unwrap(); // ELOOP
        let (start, mut read_errors, mut buffer) = (Timestamp::now(), ReadErrors::default(), Vec::new());
        let mut files =
            CpuFiles::open(&hierarchy, &HostPaths::default(), Path::new("a"), start, &mut read_errors);
        assert_eq!(
            read_errors.counts().map(|(_, reason, count)| (reason, count)).collect::<Vec<_>>(),
            [("io", 1)]
        );
        std::fs::remove_file(&path).unwrap();
        write(folder.path(), "a/cpu.stat", "user_usec 1000000\n");
        let times = files.read(later(start, 1), &mut buffer, &mut read_errors).unwrap();
        assert_eq!(times.user, Some(1.0));
    }
}
