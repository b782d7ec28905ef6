//! Processes that are not children of the test. A pid alone names none of them: pids wrap around within minutes here, and a test
//! sets the next one.

use std::path::Path;

/// A process, by its pid and its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessRef {
    pub pid: u32,
    /// In clock ticks since the boot.
    start: u64,
}

impl ProcessRef {
    /// Returns the process that has this pid now; `None` if there is none.
    pub fn of(pid: u32) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let start = stat.rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()?;
        Some(Self { pid, start })
    }

    /// Returns the first process of a container by its cgroup: the one with pid 1 in its own pid namespace. It need not be the
    /// first line of `cgroup.procs`, which cgroup v1 sorts by pid: a child may have the lower one.
    pub fn first_of_container(cgroup: &Path) -> Result<Self, String> {
        let file = cgroup.join("cgroup.procs");
        let text = std::fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
        let is_first = |pid: &u32| {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
            pids.is_some_and(|pids| pids.split_whitespace().next_back() == Some("1"))
        };
        let first = text.lines().filter_map(|line| line.parse().ok()).find(is_first);
        first.and_then(Self::of).ok_or_else(|| format!("no first process among {text:?}"))
    }

    /// Returns whether it has ended and was reaped, also if another process has its pid now.
    pub fn has_ended(&self) -> bool {
        Self::of(self.pid) != Some(*self)
    }
}
