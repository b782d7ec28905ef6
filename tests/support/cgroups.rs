//! Real cgroups that look like containers, for tests that need no engine. Works on cgroup v1 and v2.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// True if the memory controller is bound to v2 here.
pub fn is_v2() -> bool {
    std::fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").is_ok_and(|text| text.contains("memory"))
}

/// The root of the hierarchy that has the memory controller.
pub fn root() -> PathBuf {
    if is_v2() { "/sys/fs/cgroup".into() } else { "/sys/fs/cgroup/memory".into() }
}

/// A 64-digit id that no other test of this run has; its first 12 digits, the name, are no other's either.
pub fn new_id() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    format!("{:08x}{:04x}{:052x}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed), 0xfeed)
}

/// A cgroup below `memledger-tests` of the real hierarchy. Its processes are killed and it is removed when dropped.
pub struct TestCgroup {
    pub path: PathBuf,
    pub id: String,
}

impl TestCgroup {
    /// A cgroup named like a container of Docker's cgroupfs driver: `/memledger-tests/<64 hex>`.
    pub fn container() -> Self {
        let id = new_id();
        Self::at(&format!("memledger-tests/{id}"), &id)
    }

    /// A cgroup at a path below the root; the controllers are switched on along the way.
    pub fn at(relative: &str, id: &str) -> Self {
        let mut path = root();
        for component in Path::new(relative) {
            if is_v2() {
                let _ = std::fs::write(path.join("cgroup.subtree_control"), "+memory");
            }
            path.push(component);
            match std::fs::create_dir(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                    panic!("{}: {error}", path.display())
                }
                _ => {}
            }
        }
        Self { path, id: id.to_owned() }
    }

    /// Name of the container: its short id.
    pub fn name(&self) -> &str {
        &self.id[..12]
    }

    /// The flag that shows this container alone.
    pub fn include(&self) -> String {
        format!("--container.include=^{}$", self.name())
    }

    /// Moves a process in, with all that it will fork.
    pub fn add(&self, pid: u32) {
        std::fs::write(self.path.join("cgroup.procs"), pid.to_string()).expect("the process is moved");
    }

    /// Sets the memory limit in bytes.
    pub fn limit(&self, bytes: u64) {
        let file = if is_v2() { "memory.max" } else { "memory.limit_in_bytes" };
        std::fs::write(self.path.join(file), bytes.to_string()).expect("the limit is set");
    }

    /// A number from one of the cgroup's files, by the name on v1 and on v2.
    pub fn number(&self, v1: &str, v2: &str) -> u64 {
        let file = self.path.join(if is_v2() { v2 } else { v1 });
        let text =
            std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        text.trim().parse().unwrap_or_else(|_| panic!("{}: {text}", file.display()))
    }

    /// Its pids.
    pub fn pids(&self) -> Vec<u32> {
        let text = std::fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }
}

impl Drop for TestCgroup {
    fn drop(&mut self) {
        for _ in 0..500 {
            for pid in self.pids() {
                let _ = std::process::Command::new("kill")
                    .args(["-KILL", &pid.to_string()])
                    .stderr(std::process::Stdio::null())
                    .status();
            }
            match std::fs::remove_dir(&self.path) {
                Err(error) if error.raw_os_error() == Some(16) => {} // EBUSY: the kernel still reaps
                _ => return,
            }
            std::thread::park_timeout(std::time::Duration::from_millis(10)); // poll, with a bound
        }
    }
}
