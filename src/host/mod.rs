//! The machine's files: where they are, how they are opened, and what their errors mean.
//!
//! Every root is a setting (in a container the host's `/proc` lies elsewhere), and every file is opened below a held
//! directory, so that a path or pid that was reused answers *gone* and never a stranger's numbers.

mod bell;
pub mod exit;
mod files;
pub mod privileges;
pub mod syslog;

use std::path::{Path, PathBuf};

pub use bell::Bell;
pub use files::{Dir, FAULT_REASONS, KernelFile, ReadError, classify, take_notifications};

/// The kernel's first pid namespace always has this inode (PROC_PID_INIT_INO).
const FIRST_PID_NAMESPACE: &str = "pid:[4026531836]";

/// Where the host's file systems are mounted.
#[derive(Clone, Debug)]
pub struct Roots {
    /// The host's procfs.
    pub proc: PathBuf,
    /// The host's sysfs.
    pub sys: PathBuf,
    /// The host's cgroup file systems, usually `/sys/fs/cgroup`.
    pub cgroup: PathBuf,
    /// The host's `/dev`.
    pub dev: PathBuf,
}

impl Default for Roots {
    fn default() -> Self {
        Self { proc: "/proc".into(), sys: "/sys".into(), cgroup: "/sys/fs/cgroup".into(), dev: "/dev".into() }
    }
}

impl Roots {
    /// The directory of one process.
    pub fn process(&self, pid: u32) -> PathBuf {
        self.proc.join(pid.to_string())
    }

    /// Unix time when the machine was booted, from `btime` of `/proc/stat`, in whole seconds.
    ///
    /// # Errors
    /// The file cannot be read or has no such line.
    pub fn boot_time(&self) -> Result<u64, ReadError> {
        let mut buffer = Vec::new();
        let file = KernelFile::open(&self.proc.join("stat"))?;
        let text = file.read_all(&mut buffer)?;
        text.split(|&b| b == b'\n')
            .find_map(|line| line.strip_prefix(b"btime "))
            .and_then(|value| std::str::from_utf8(value).ok()?.trim().parse().ok())
            .ok_or_else(|| ReadError::malformed("stat has no btime"))
    }

    /// Which boot this is: a random id that the kernel makes when it starts.
    ///
    /// # Errors
    /// The file cannot be read or is empty.
    pub fn boot_id(&self) -> Result<String, ReadError> {
        let mut buffer = Vec::new();
        let file = KernelFile::open(&self.proc.join("sys/kernel/random/boot_id"))?;
        let id = String::from_utf8_lossy(file.read_once(&mut buffer)?).trim().to_owned();
        if id.is_empty() { Err(ReadError::malformed("boot_id is empty")) } else { Ok(id) }
    }

    /// True if memledger runs in the host's own pid namespace, whose pids the kernel and the driver name.
    pub fn in_first_pid_namespace(&self) -> bool {
        std::fs::read_link(self.proc.join("self/ns/pid"))
            .is_ok_and(|link| link.as_os_str() == FIRST_PID_NAMESPACE)
    }

    /// True if `path` exists below the device root.
    pub fn has_device(&self, path: impl AsRef<Path>) -> bool {
        self.dev.join(path).exists()
    }
}

/// Raises the soft limit of open files to the hard one, because the files of every container stay open.
///
/// Returns the limit that holds now. A refusal is no error: then fewer files stay open.
pub fn raise_open_file_limit() -> u64 {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let raised = limit.current != limit.maximum && setrlimit(Resource::Nofile, wanted).is_ok();
    (if raised { limit.maximum } else { limit.current }).unwrap_or(u64::MAX)
}
