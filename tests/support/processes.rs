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
        let start = stat_field(pid, 19)?;
        Some(Self { pid, start })
    }

    /// Returns the first process of a container by its cgroup: the oldest one whose parent is not in it. It need not be the first
    /// line of `cgroup.procs`, which cgroup v1 sorts by pid: a child may have the lower one.
    pub fn first_of_container(cgroup: &Path) -> Result<Self, String> {
        let file = cgroup.join("cgroup.procs");
        let text = std::fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
        let pids: Vec<u32> = text.lines().filter_map(|line| line.parse().ok()).collect();
        let has_parent_elsewhere = |pid: &u32| {
            let parent = stat_field(*pid, 1).and_then(|parent| parent.try_into().ok());
            parent.is_some_and(|parent: u32| !pids.contains(&parent))
        };
        let candidates = pids.iter().copied().filter(has_parent_elsewhere).filter_map(Self::of);
        candidates
            .min_by_key(|process| process.start)
            .ok_or_else(|| format!("no first process among {pids:?}"))
    }

    /// Returns whether it has ended and was reaped, also if another process has its pid now.
    pub fn has_ended(&self) -> bool {
        Self::of(self.pid) != Some(*self)
    }
}

/// Returns a field of `/proc/PID/stat`, counted from the state, which follows the name.
fn stat_field(pid: u32, number: usize) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(number)?.parse().ok()
}
