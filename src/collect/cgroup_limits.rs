//! Limits of cgroups, which rarely change: read when inotify reports a change of one of them, and once a minute.

use std::path::Path;
use std::time::Duration;

use crate::clock::Timestamp;
use crate::host::{Dir, FileWatch, ReadError, WatchQueue};
use crate::parse::cgroup as parse;
use crate::parse::kubernetes::{KubeletCgroup, kubelet_cgroup};

/// Longest time for which a limit is not read again.
const MAX_AGE: Duration = Duration::from_secs(60);

/// The limits of one cgroup in bytes, each `None` when unlimited or missing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// The kernel kills above it.
    pub max: Option<u64>,
    /// The kernel throttles above it.
    pub high: Option<u64>,
    /// Of swap.
    pub swap: Option<u64>,
}

impl Limits {
    /// Returns the lower limit of memory.
    pub fn lowest(&self) -> Option<u64> {
        self.max.into_iter().chain(self.high).min()
    }
}

/// The memory of a level that its limits are compared with is unknown.
#[derive(Clone, Copy, Debug)]
pub struct UnknownHeadroom;

/// The rest of the limits of a level: `None` when unlimited.
#[derive(Clone, Copy, Debug)]
pub struct LevelHeadroom {
    /// Limit and free swap minus unreclaimable memory.
    pub headroom: Result<Option<i64>, UnknownHeadroom>,
    /// Unreclaimable memory as a part of free swap and the lower of limit and high.
    pub utilization: Result<Option<f64>, UnknownHeadroom>,
}

/// The level of a memory limit on the cgroup path of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitLevel {
    /// The container's own.
    Container,
    /// That of its pod.
    Pod,
    /// That of all pods of the node, or of those of a QoS class.
    Node,
    /// That of another cgroup above it, such as a slice of systemd.
    Slice,
}

impl LimitLevel {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 4] = [Self::Container, Self::Pod, Self::Node, Self::Slice];

    /// Returns the level of a cgroup above a container.
    pub fn above(path: &Path) -> Self {
        let part = path.file_name().and_then(|part| part.to_str()).unwrap_or_default();
        match kubelet_cgroup(part).filter(|_| path.to_string_lossy().contains("kubepods")) {
            Some(KubeletCgroup::AllPods(_)) => Self::Node,
            Some(KubeletCgroup::Pod(_)) => Self::Pod,
            None => Self::Slice,
        }
    }

    /// Returns the label value.
    pub fn label(self) -> &'static str {
        match self {
            Self::Container => "container",
            Self::Pod => "pod",
            Self::Node => "node",
            Self::Slice => "slice",
        }
    }
}

impl LevelHeadroom {
    /// That of a level without limits.
    pub const UNLIMITED: Self = Self { headroom: Ok(None), utilization: Ok(None) };

    /// Returns the headroom of a level with these limits, this unreclaimable memory and so much free swap, into which the kernel moves
    /// a part of that memory before it kills.
    pub fn of(limits: Limits, unreclaimable: Option<u64>, free_swap: u64) -> Self {
        let pinned = unreclaimable.ok_or(UnknownHeadroom);
        let headroom = |limit: u64| Ok(limit.saturating_add(free_swap) as i64 - pinned? as i64);
        let utilization = |limit: u64| Ok(pinned? as f64 / limit.saturating_add(free_swap) as f64);
        Self {
            headroom: limits.max.map(headroom).transpose(),
            utilization: limits.lowest().filter(|limit| *limit > 0).map(utilization).transpose(),
        }
    }

    /// Returns the tightest of both levels. If one of them is unknown, so is the result.
    pub fn and(self, other: Self) -> Self {
        let minimum = |a: Option<i64>, b: Option<i64>| a.into_iter().chain(b).min();
        let maximum = |a: Option<f64>, b: Option<f64>| a.into_iter().chain(b).reduce(f64::max);
        let headroom = self.headroom.and_then(|own| Ok(minimum(own, other.headroom?)));
        let utilization = self.utilization.and_then(|own| Ok(maximum(own, other.utilization?)));
        Self { headroom, utilization }
    }
}

/// The limit files of one cgroup. They are open only while they are read: an open file of the kernel takes 4 KiB.
#[derive(Debug)]
pub struct LimitFiles {
    /// In the order of [`Limits`].
    names: &'static [&'static str],
    /// Watches of the files. They end with them.
    watches: Vec<FileWatch>,
    /// Number of files that exist.
    existing: usize,
    /// The limits, and the generation in which they were read.
    read: Option<(u64, Limits)>,
}

impl LimitFiles {
    /// Returns the limits of the cgroup with this directory, and reads them if they may have changed.
    ///
    /// # Errors
    /// The cgroup is gone, or a file cannot be read or contains no limit.
    pub fn read(
        &mut self,
        dir: &Path,
        watch: &LimitWatch,
        buffer: &mut Vec<u8>,
    ) -> Result<Limits, ReadError> {
        if let Some((generation, limits)) = self.read
            && self.watches.len() == self.existing
            && generation == watch.generation
        {
            return Ok(limits);
        }
        let dir = Dir::open(dir)?;
        let mut values = [None; 3];
        for (name, value) in self.names.iter().zip(&mut values) {
            if let Some(file) = dir.optional_file(name)? {
                let limit = parse::limit(file.read_once(buffer)?);
                *value = limit.ok_or_else(|| ReadError::malformed("the limit file of a cgroup"))?;
            }
        }
        let [max, high, swap] = values;
        let limits = Limits { max, high, swap };
        self.read = Some((watch.generation, limits));
        Ok(limits)
    }
}

/// The inotify queue of all limit files.
#[derive(Debug, Default)]
pub struct LimitWatch {
    queue: Option<WatchQueue>,
    /// Limits of an older generation may have changed.
    generation: u64,
    began: Option<Timestamp>,
}

impl LimitWatch {
    /// Begins a new generation if a limit has changed, or the last one began a minute ago.
    pub fn begin_cycle(&mut self, now: Timestamp) {
        let has_changed = self.queue.as_ref().is_some_and(WatchQueue::take_notifications);
        if has_changed || self.began.is_none_or(|began| now.since(began) >= MAX_AGE) {
            self.generation += 1;
            self.began = Some(now);
        }
    }

    /// Watches the limit files of a cgroup. Files that cannot be watched are read in every cycle.
    ///
    /// # Errors
    /// The cgroup is gone, or a file cannot be opened.
    pub fn watch(&mut self, dir: &Dir, names: &'static [&'static str]) -> Result<LimitFiles, ReadError> {
        if self.queue.is_none() {
            self.queue = WatchQueue::new().ok();
        }
        let (mut watches, mut existing) = (Vec::with_capacity(names.len()), 0);
        for name in names {
            if dir.optional_file(name)?.is_some() {
                existing += 1;
                watches.extend(self.queue.as_ref().and_then(|queue| queue.add(&dir.path().join(name)).ok()));
            }
        }
        Ok(LimitFiles { names, watches, existing, read: None })
    }

    /// Returns the number of watches in the kernel.
    #[cfg(test)]
    pub fn watches(&self) -> usize {
        self.queue.as_ref().map_or(0, WatchQueue::watches)
    }
}
