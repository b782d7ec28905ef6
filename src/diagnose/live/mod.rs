//! What only the host itself shows: how far its sources reach ([`Coverage`]), and what a running container uses now.

mod coverage;

use std::path::PathBuf;

use procfs::{FromBufRead, MemoryPressure};

use crate::clock::Timestamp;
use crate::config::Config;
use crate::discover::cgroup_tree::{CgroupTree, ContainerCgroup};
use crate::discover::{ContainerId, Hierarchy, Version};
use crate::host::Dir;
use crate::parse::keyed;
pub use coverage::{Coverage, RuntimeCoverage};

/// A container is full from this distance to its limit on: a part in so many of it.
const FULL_DIVISOR: u64 = 50;
/// A container whose tasks wait for less of the time runs.
const MIN_STALLED_PERCENT: f32 = 30.0;

/// Memory of a running container.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CurrentUsage {
    /// All charged memory, page cache included.
    pub usage_bytes: u64,
    /// A process is in its cgroup, or in one below; `None` if that cannot be read.
    pub has_processes: Option<bool>,
    /// Limit of its cgroup; `None` if it has none.
    pub limit_bytes: Option<u64>,
    /// Share of the last 10 s in which all its tasks waited for memory, in percent (cgroup v2).
    pub stalled_percent: Option<f32>,
    /// Its OOM killer is switched off, and its tasks wait (`under_oom`, cgroup v1).
    pub is_under_oom: bool,
}

impl CurrentUsage {
    /// Returns whether it is at its limit, and its processes wait.
    pub fn is_stalled(&self) -> bool {
        let is_full = self.limit_bytes.is_some_and(|limit| self.usage_bytes >= limit - limit / FULL_DIVISOR);
        self.is_under_oom
            || is_full && self.stalled_percent.is_some_and(|percent| percent >= MIN_STALLED_PERCENT)
    }
}

/// Returns what a running container uses of which limit; `None` if its cgroup cannot be read. `user`: the user whose engine or run it
/// is.
pub fn current_usage(
    config: &Config,
    now: Timestamp,
    id: &ContainerId,
    user: Option<u32>,
) -> Option<CurrentUsage> {
    let hierarchy = Hierarchy::detect(&config.host_paths).ok()?;
    let mut tree = CgroupTree::new(&hierarchy);
    let _ = tree.refresh(now); // a part that cannot be walked leaves the others
    let is_its = |candidate: &&ContainerCgroup| candidate.id == *id && candidate.is_proven(user);
    let found = tree.candidates().iter().find(is_its)?;
    let dir = Dir::open(&hierarchy.root.join(&found.path)).ok()?;
    let (usage, limit) = match hierarchy.version {
        Version::V1 => ("memory.usage_in_bytes", "memory.limit_in_bytes"),
        Version::V2 => ("memory.current", "memory.max"),
    };
    let read = |name: &'static str| dir.file(name).ok()?.read_once(&mut Vec::new()).ok().map(<[u8]>::to_vec);
    let has_process = |path: &PathBuf| {
        let list = std::fs::read(hierarchy.root.join(path).join("cgroup.procs")).ok()?;
        Some(!list.trim_ascii().is_empty())
    };
    let has_processes = || {
        let lists = std::iter::once(&found.path).chain(&found.below).map(has_process);
        let lists: Option<Vec<bool>> = lists.collect();
        // of another pid namespace, cgroup v1 lists no process
        let is_readable = config.host_paths.in_initial_pid_namespace() && !found.is_truncated;
        lists.filter(|_| is_readable).map(|lists| lists.contains(&true))
    };
    Some(CurrentUsage {
        has_processes: has_processes(),
        usage_bytes: crate::parse::number(read(usage)?.trim_ascii())?,
        limit_bytes: crate::parse::cgroup::limit(&read(limit)?).flatten(),
        stalled_percent: read("memory.pressure")
            .and_then(|text| MemoryPressure::from_buf_read(&*text).ok())
            .map(|pressure| pressure.full.avg10),
        is_under_oom: read("memory.oom_control")
            .is_some_and(|text| keyed(&text).any(|pair| pair == (&b"under_oom"[..], 1))),
    })
}
