//! The host's files: where they are, how they are opened, and what their errors mean.
//!
//! Every root path is configurable (in a container the host's `/proc` is mounted elsewhere), and every file is opened
//! relative to an open directory, so that a reused path or pid yields [`ReadError::Gone`] and never the data of another
//! process.

mod waker;
mod watch_queue;
pub mod bounds;
mod kernel_fs;
mod backoff;
mod health;
mod rate_limit;
pub mod capabilities;
pub mod groups;
pub mod heap;
pub mod panics;
pub mod process;
pub mod read_pool;
pub mod signals;
pub mod syslog;
pub mod unix_peer;

use std::path::{Path, PathBuf};

pub use backoff::Backoff;
pub use health::Health;
pub use kernel_fs::{
    Dir, KernelFile, READ_ERROR_REASONS, ReadError, classify, for_each_notification, take_notifications,
};
pub use rate_limit::RateLimit;
pub use waker::Waker;
pub use watch_queue::{FileWatch, WatchQueue};

/// Inode of the initial pid namespace, which is constant (PROC_PID_INIT_INO).
const INITIAL_PID_NAMESPACE: &str = "pid:[4026531836]";

/// Where the host's file systems are mounted.
#[derive(Clone, Debug)]
pub struct HostPaths {
    /// The host's procfs.
    pub proc: PathBuf,
    /// The host's sysfs.
    pub sys: PathBuf,
    /// The host's cgroup file systems, usually `/sys/fs/cgroup`.
    pub cgroup: PathBuf,
    /// The host's `/dev`.
    pub dev: PathBuf,
}

impl Default for HostPaths {
    fn default() -> Self {
        Self { proc: "/proc".into(), sys: "/sys".into(), cgroup: "/sys/fs/cgroup".into(), dev: "/dev".into() }
    }
}

impl HostPaths {
    /// Returns the procfs directory of a process.
    pub fn process(&self, pid: u32) -> PathBuf {
        self.proc.join(pid.to_string())
    }

    /// Returns the boot time as Unix time in whole seconds, from `btime` of `/proc/stat`.
    ///
    /// # Errors
    /// The file is unreadable or has no such line.
    pub fn boot_time(&self) -> Result<u64, ReadError> {
        let mut buffer = Vec::new();
        let file = KernelFile::open(&self.proc.join("stat"))?;
        let btime = |text: &[u8]| {
            let value = text.split(|&b| b == b'\n').find_map(|line| line.strip_prefix(b"btime "))?;
            std::str::from_utf8(value).ok()?.trim().parse().ok()
        };
        file.find_line(&mut buffer, btime)?.ok_or_else(|| ReadError::malformed("no btime line in stat"))
    }

    /// Returns the id of this boot, which the kernel chooses at random.
    ///
    /// # Errors
    /// The file is unreadable or empty.
    pub fn boot_id(&self) -> Result<String, ReadError> {
        let mut buffer = Vec::new();
        let file = KernelFile::open(&self.proc.join("sys/kernel/random/boot_id"))?;
        let id = String::from_utf8_lossy(file.read_once(&mut buffer)?).trim().to_owned();
        if id.is_empty() { Err(ReadError::malformed("boot_id is empty")) } else { Ok(id) }
    }

    /// Returns true if memledger runs in the initial pid namespace, whose pids the kernel log and the GPU driver use.
    pub fn in_initial_pid_namespace(&self) -> bool {
        std::fs::read_link(self.proc.join("self/ns/pid"))
            .is_ok_and(|link| link.as_os_str() == INITIAL_PID_NAMESPACE)
    }

    /// Returns true if `path` exists below the device root.
    pub fn has_device(&self, path: impl AsRef<Path>) -> bool {
        self.dev.join(path).exists()
    }

    /// Returns true if a driver of GPUs for computing has devices: NVIDIA's, also of Jetson, or AMD's.
    pub fn has_gpu(&self) -> bool {
        ["nvidiactl", "nvidia0", "nvhost-gpu", "nvgpu", "kfd"].iter().any(|device| self.has_device(device))
    }
}

/// The directory where Kubernetes mounts the identity of a pod.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Returns true if this process runs in a pod, by its environment and files.
pub fn in_pod() -> bool {
    std::env::var_os("KUBERNETES_SERVICE_HOST").is_some() || std::path::Path::new(ACCOUNT).exists()
}

/// Returns true if this process runs in a container that has a file system of its own, by what engines and Kubernetes leave there.
fn in_container() -> bool {
    in_pod() || ["/.dockerenv", "/run/.containerenv"].iter().any(|file| std::path::Path::new(file).exists())
}

/// Raises the soft limit of open files to the hard limit, because the files of every container stay open.
///
/// Returns the resulting limit. A failure is not an error: fewer files then stay open.
pub fn raise_open_file_limit() -> u64 {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let raised = limit.current != limit.maximum && setrlimit(Resource::Nofile, wanted).is_ok();
    (if raised { limit.maximum } else { limit.current }).unwrap_or(u64::MAX)
}
