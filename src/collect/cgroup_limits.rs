//! Limits of cgroups, which rarely change: read when inotify reports a change of one of them, and once a minute.

use std::time::Duration;

use crate::clock::Timestamp;
use crate::host::{Dir, FileWatch, KernelFile, ReadError, WatchQueue};
use crate::parse::cgroup as parse;

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

impl LevelHeadroom {
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

/// The open limit files of one cgroup, in the order of [`Limits`].
#[derive(Debug)]
pub struct LimitFiles {
    files: Vec<Option<KernelFile>>,
    /// Watches of the files. They end with them.
    watches: Vec<FileWatch>,
    /// The limits, and the generation in which they were read.
    read: Option<(u64, Limits)>,
}

impl LimitFiles {
    fn is_watched(&self) -> bool {
        self.watches.len() == self.count()
    }

    /// Returns the number of open files.
    pub fn count(&self) -> usize {
        self.files.iter().flatten().count()
    }

    /// Returns the limits, and reads them if they may have changed.
    ///
    /// # Errors
    /// A file cannot be read, or contains no limit.
    pub fn read(&mut self, watch: &LimitWatch, buffer: &mut Vec<u8>) -> Result<Limits, ReadError> {
        if let Some((generation, limits)) = self.read
            && self.is_watched()
            && generation == watch.generation
        {
            return Ok(limits);
        }
        let mut values = [None; 3];
        for (file, value) in self.files.iter().zip(&mut values) {
            if let Some(file) = file {
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

    /// Opens and watches the limit files of a cgroup. Files that cannot be watched are read in every cycle.
    ///
    /// # Errors
    /// The cgroup is gone, or a file cannot be opened.
    pub fn open<const N: usize>(
        &mut self,
        dir: &Dir,
        names: [&'static str; N],
    ) -> Result<LimitFiles, ReadError> {
        if self.queue.is_none() {
            self.queue = WatchQueue::new().ok();
        }
        let mut watches = Vec::with_capacity(N);
        let mut files = Vec::with_capacity(N);
        for name in names {
            let file = dir.optional_file(name)?;
            if file.is_some() {
                watches.extend(self.queue.as_ref().and_then(|queue| queue.add(&dir.path().join(name)).ok()));
            }
            files.push(file);
        }
        Ok(LimitFiles { files, watches, read: None })
    }

    /// Returns the number of watches in the kernel.
    #[cfg(test)]
    pub fn watches(&self) -> usize {
        self.queue.as_ref().map_or(0, WatchQueue::watches)
    }
}
