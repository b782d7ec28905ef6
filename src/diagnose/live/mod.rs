//! What only the host itself shows: how far its sources reach ([`Coverage`]), and what a running container uses now.

mod coverage;

use std::path::PathBuf;
use std::time::Duration;

use procfs::{FromBufRead, MemoryPressure};

use crate::clock::Timestamp;
use crate::collect::container_memory::ContainerMemory;
use crate::collect::limit_stall::LimitUse;
use crate::config::Config;
use crate::discover::cgroup_tree::{CgroupTree, ContainerCgroup};
use crate::discover::{ContainerId, Hierarchy, Version};
use crate::host::Dir;
use crate::parse::cgroup::StatV1;
use crate::parse::keyed;
pub use coverage::{Coverage, MissingLedger, RuntimeCoverage};

/// Between two readings of a container that is full, and nearly all of it taken.
const REREAD_TIME: Duration = Duration::from_secs(1);

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
    /// Memory that was taken from it and that it reads again, in bytes per second, where that shows that it waits (cgroup v1).
    pub reread_bytes_per_second: Option<u64>,
    /// `memory.high`; `None` if it has none.
    pub high_bytes: Option<u64>,
    /// Its OOM killer is switched off, and its tasks wait (`under_oom`, cgroup v1).
    pub is_under_oom: bool,
}

impl CurrentUsage {
    /// Returns whether it is at its limit, and its processes wait.
    pub fn is_stalled(&self) -> bool {
        self.is_measured_to_wait() || self.reread_bytes_per_second.is_some()
    }

    /// Returns whether the kernel says so: by the pressure, or because its OOM killer is switched off.
    pub fn is_measured_to_wait(&self) -> bool {
        let limit = self.limit_bytes.into_iter().chain(self.high_bytes).min();
        let used = limit.map(|limit| LimitUse { usage: self.usage_bytes, limit, ..LimitUse::default() });
        let stalled = self.stalled_percent.map(|percent| f64::from(percent) / 100.0);
        self.is_under_oom || used.zip(stalled).is_some_and(|(used, stalled)| used.is_stalled(stalled))
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
    let usage_now = || crate::parse::number(read(usage)?.trim_ascii());
    let limit_bytes = crate::parse::cgroup::limit(&read(limit)?).flatten();
    let high_bytes = read("memory.high").and_then(|text| crate::parse::cgroup::limit(&text)).flatten();
    let memory = || {
        let stat = StatV1::parse(&read("memory.stat")?);
        Some(ContainerMemory { usage: usage_now()?, limit: limit_bytes, ..ContainerMemory::of_v1(stat) })
    };
    Some(CurrentUsage {
        has_processes: has_processes(),
        usage_bytes: usage_now()?,
        limit_bytes,
        high_bytes,
        reread_bytes_per_second: if hierarchy.version == Version::V1 { reread(memory) } else { None },
        stalled_percent: read("memory.pressure")
            .and_then(|text| MemoryPressure::from_buf_read(&*text).ok())
            .map(|pressure| pressure.full.avg10),
        is_under_oom: read("memory.oom_control")
            .is_some_and(|text| keyed(&text).any(|pair| pair == (&b"under_oom"[..], 1))),
    })
}

/// Returns how fast memory that was taken from a container is read again, where that shows that it waits. Takes a second for one that is full,
/// and nearly all of it taken.
fn reread(memory: impl Fn() -> Option<ContainerMemory>) -> Option<u64> {
    let refaults =
        |memory: &ContainerMemory| memory.refaults.into_iter().flatten().reduce(u64::saturating_add);
    let first = memory()?;
    let before = refaults(&first).filter(|_| LimitUse::of(&first).is_some_and(|used| used.is_taken()))?;
    let began = Timestamp::now();
    std::thread::sleep(REREAD_TIME);
    let last = memory()?;
    let pages = refaults(&last)?.saturating_sub(before);
    let seconds = Timestamp::now().since(began).as_secs_f64();
    let reread = pages as f64 * rustix::param::page_size() as f64 / seconds;
    LimitUse::of(&last).is_some_and(|used| used.is_rereading(reread)).then_some(reread as u64)
}
