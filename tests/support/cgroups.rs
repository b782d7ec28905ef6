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

/// A 64-digit id that no other test of this run has. Its first 12 digits, the name, are unique too.
pub fn new_id() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    // a pid has at most 22 bits
    format!("{:06x}{:06x}{:052x}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed), 0xfeed)
}

/// A cgroup below `memledger-tests` of the real hierarchy. When dropped its processes are killed, and it is removed with
/// the levels above that were made for it.
pub struct TestCgroup {
    pub path: PathBuf,
    pub id: String,
    /// Levels above that this cgroup made, outermost first.
    made: Vec<PathBuf>,
}

impl TestCgroup {
    /// A cgroup named like a container of Docker's cgroupfs driver: `/memledger-tests/<64 hex>`.
    pub fn container() -> Self {
        let id = new_id();
        Self::at(&format!("memledger-tests/{id}"), &id)
    }

    /// A cgroup at a path below the root; the controllers are switched on along the way.
    pub fn at(relative: &str, id: &str) -> Self {
        // another test may remove a level that both share just now: begin again
        let (path, made) = super::eventually("the cgroup", || make(relative));
        Self { path, id: id.to_owned(), made }
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

    /// The text of one of its files; `None` if this kernel has no such file, or has switched it off.
    pub fn text(&self, file: &str) -> Option<String> {
        std::fs::read_to_string(self.path.join(file)).ok()
    }

    /// A line of `memory.stat` by its key on v1 and on v2; `None` without the line.
    pub fn stat(&self, v1: &str, v2: &str) -> Option<u64> {
        let key = if is_v2() { v2 } else { v1 };
        let text = self.text("memory.stat").expect("memory.stat");
        let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '))?;
        Some(value.parse().unwrap_or_else(|_| panic!("{key}: {value}")))
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
                _ => break,
            }
            std::thread::park_timeout(std::time::Duration::from_millis(10)); // poll, with a bound
        }
        for level in self.made.iter().rev() {
            let _ = std::fs::remove_dir(level); // fails while another cgroup lies in it
        }
    }
}

/// Makes a cgroup and the levels above it; returns its path and the levels that were not there.
fn make(relative: &str) -> Result<(PathBuf, Vec<PathBuf>), String> {
    let mut path = root();
    let mut made = Vec::new();
    for component in Path::new(relative) {
        if is_v2() {
            let _ = std::fs::write(path.join("cgroup.subtree_control"), "+memory");
        }
        path.push(component);
        match std::fs::create_dir(&path) {
            Ok(()) => made.push(path.clone()),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(format!("{}: {error}", path.display())),
        }
    }
    made.retain(|level| *level != path && !level.ends_with("memledger-tests"));
    Ok((path, made))
}
