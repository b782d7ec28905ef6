//! Real cgroups that look like containers, for tests without an engine. Works on cgroup v1 and v2.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Returns true if the memory controller is bound to v2.
pub fn is_v2() -> bool {
    std::fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").is_ok_and(|text| text.contains("memory"))
}

/// Returns the root of the hierarchy with the memory controller.
pub fn root() -> PathBuf {
    if is_v2() { "/sys/fs/cgroup".into() } else { "/sys/fs/cgroup/memory".into() }
}

/// Returns a 64-digit id that is unique in this test run, also in its first 12 digits, the name.
pub fn new_id() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    // a pid has at most 22 bits
    format!("{:06x}{:06x}{:052x}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed), 0xfeed)
}

/// Returns the cgroup that all cgroups of this run of the tests are below.
pub fn parent() -> String {
    format!("memledger-tests-{}", super::test_run())
}

/// A cgroup below [`parent`] in the real hierarchy. Drop kills its processes and removes it with the parent levels
/// that it created.
pub struct TestCgroup {
    pub path: PathBuf,
    pub id: String,
    /// Parent levels that were created for this cgroup, outermost first.
    created: Vec<PathBuf>,
}

impl TestCgroup {
    /// Creates a cgroup named like a container of Docker's cgroupfs driver: `<64 hex>` below [`parent`].
    pub fn container() -> Self {
        let id = new_id();
        Self::at(&format!("{}/{id}", parent()), &id)
    }

    /// Creates a cgroup at a path below the root, and enables the controllers on the way.
    pub fn at(relative: &str, id: &str) -> Self {
        // another test may concurrently remove a level that both share: retry
        let (path, created) = super::eventually("the cgroup", || create(relative));
        Self { path, id: id.to_owned(), created }
    }

    /// Returns the name of the container: its short id.
    pub fn name(&self) -> &str {
        &self.id[..12]
    }

    /// Returns the flag that exports only this container.
    pub fn include(&self) -> String {
        format!("--container.include=^{}$", self.name())
    }

    /// Moves a process into the cgroup, with its future children.
    pub fn add(&self, pid: u32) {
        std::fs::write(self.path.join("cgroup.procs"), pid.to_string()).expect("the process is moved");
    }

    /// Sets the memory limit in bytes.
    pub fn limit(&self, bytes: u64) {
        let file = if is_v2() { "memory.max" } else { "memory.limit_in_bytes" };
        std::fs::write(self.path.join(file), bytes.to_string()).expect("the limit is set");
    }

    /// Reads a number from a file, by its name on v1 and on v2.
    pub fn number(&self, v1: &str, v2: &str) -> u64 {
        let file = self.path.join(if is_v2() { v2 } else { v1 });
        let text =
            std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        text.trim().parse().unwrap_or_else(|_| panic!("{}: {text}", file.display()))
    }

    /// Reads the text of a file; `None` if this kernel does not have it, or has disabled it.
    pub fn text(&self, file: &str) -> Option<String> {
        std::fs::read_to_string(self.path.join(file)).ok()
    }

    /// Reads a value of `memory.stat` by its key on v1 and on v2; `None` without the line.
    pub fn stat(&self, v1: &str, v2: &str) -> Option<u64> {
        let key = if is_v2() { v2 } else { v1 };
        let text = self.text("memory.stat").expect("memory.stat");
        let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '))?;
        Some(value.parse().unwrap_or_else(|_| panic!("{key}: {value}")))
    }

    /// Returns its pids.
    pub fn pids(&self) -> Vec<u32> {
        let text = std::fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }
}

impl Drop for TestCgroup {
    fn drop(&mut self) {
        // EBUSY: the kernel is still ending the processes
        super::holds_in_time(|| {
            let pids = self.pids();
            if !pids.is_empty() {
                let _ = std::process::Command::new("kill")
                    .arg("-KILL")
                    .args(pids.iter().map(u32::to_string))
                    .stderr(std::process::Stdio::null())
                    .status();
            }
            std::fs::remove_dir(&self.path).map_err(|error| error.raw_os_error()) != Err(Some(16))
        });
        // of several cgroups below one level, whichever is dropped last removes it: rmdir fails while another one is in it
        let shared = self.path.ancestors().skip(1).take_while(|level| !level.ends_with(parent()));
        let is_test_folder = self.path.components().any(|part| part.as_os_str() == parent().as_str());
        for level in shared.filter(|level| is_test_folder || self.created.iter().any(|made| made == level)) {
            let _ = std::fs::remove_dir(level);
        }
    }
}

/// Removes an empty cgroup in every hierarchy, by its path below their roots: on v1 a runtime that is given a parent makes it
/// in each. True if it is nowhere any more.
pub fn remove_everywhere(relative: &Path) -> bool {
    let hierarchies =
        std::fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten().map(|entry| entry.path());
    let paths: Vec<_> =
        hierarchies.chain(["/sys/fs/cgroup".into()]).map(|hierarchy| hierarchy.join(relative)).collect();
    for path in &paths {
        let _ = std::fs::remove_dir(path);
    }
    !paths.iter().any(|path| path.exists())
}

/// Removes cgroups without processes in every hierarchy, by the path of the topmost. The last processes may still be exiting.
pub fn remove_tree_everywhere(relative: &str) {
    let hierarchies = std::fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten();
    for root in hierarchies.map(|entry| entry.path()).chain(["/sys/fs/cgroup".into()]) {
        for _ in 0..100 {
            if remove_tree(&root.join(relative)) {
                break;
            }
            std::thread::park_timeout(std::time::Duration::from_millis(20));
        }
    }
}

/// Removes cgroups without processes bottom-up. Returns true if nothing is left.
fn remove_tree(path: &Path) -> bool {
    for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_tree(&entry.path());
        }
    }
    std::fs::remove_dir(path).map_or_else(|error| error.kind() == std::io::ErrorKind::NotFound, |()| true)
}

/// Creates a cgroup and its parent levels; returns its path and the levels that did not exist.
fn create(relative: &str) -> Result<(PathBuf, Vec<PathBuf>), String> {
    let mut attempts = 0;
    loop {
        attempts += 1;
        match try_create(relative) {
            // another test has just removed a level that was empty
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && attempts < 100 => {}
            Err(error) => return Err(format!("{relative}: {error}")),
            Ok(created) => return Ok(created),
        }
    }
}

fn try_create(relative: &str) -> std::io::Result<(PathBuf, Vec<PathBuf>)> {
    let mut path = root();
    let mut created = Vec::new();
    for component in Path::new(relative) {
        if is_v2() {
            let _ = std::fs::write(path.join("cgroup.subtree_control"), "+memory");
        }
        path.push(component);
        match std::fs::create_dir(&path) {
            Ok(()) => created.push(path.clone()),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    created.retain(|level| *level != path && !level.ends_with(parent()));
    Ok((path, created))
}
