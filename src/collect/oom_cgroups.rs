//! The cgroups' own counters of OOM kills, for the ledger: `oom_kill` of `memory.events` (v2) or `memory.oom_control` (v1).
//!
//! They are swept at the sampling interval, and at once when a kill has no owner: the kernel counts before it logs, and
//! a container lives for some milliseconds after its kill. A container that is made and killed between two sweeps has
//! its counter read only if the sweep comes in time; the tree's own notifications tell of it.
//!
//! On v2 each file can be watched (the kernel notifies on every change, also of `max` while page cache is reclaimed, and
//! merges changes 10 ms apart). That is used only where the kernel log cannot be read, which is the better notification.
//! v1's eventfd fires when an OOM begins, before the kill is counted, and needs a file that is writable: not used.
//!
//! On v2 the cgroups of pods are read too. They count what happens in all containers of the pod, and are still there when a
//! container's own cgroup is gone before its last count was read. The kernel counts from below upwards, and a pod is read
//! before its containers: what a pod has counted in a container that is there, that one has counted too. Cgroups further up
//! (`kubepods.slice`, `system.slice`) tell no more than the host's counter does: their members are not containers of one
//! owner, or not containers.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::inotify;

use crate::clock::Moment;
use crate::discover::cgroups::Tree;
use crate::discover::{ContainerId, Hierarchy, Version};
use crate::host::{Dir, KernelFile, ReadError, take_notifications};
use crate::parse::{kubernetes, lines, number};

/// One reading of one counter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading {
    /// The container; `None` for the cgroup of a pod.
    pub id: Option<ContainerId>,
    /// The cgroup, relative to the root of the hierarchy.
    pub path: String,
    /// The cgroup's inode.
    pub inode: u64,
    /// Kills: v2 with everything below, v1 without.
    pub kills: u64,
    /// The cgroup was made after the first sweep: its counter began at 0.
    pub fresh: bool,
}

/// The counters of all containers and of their pods, kept open.
#[derive(Debug)]
pub struct CgroupCounters {
    hierarchy: Hierarchy,
    tree: Tree,
    open: HashMap<PathBuf, Open>,
    swept: bool,
    /// Watches `memory.events`, if asked to.
    watch: Option<OwnedFd>,
    buffer: Vec<u8>,
}

#[derive(Debug)]
struct Open {
    id: Option<ContainerId>,
    inode: u64,
    file: KernelFile,
    fresh: bool,
    /// `None`: not read yet.
    kills: Option<u64>,
}

impl CgroupCounters {
    /// Of this hierarchy; nothing is read yet.
    pub fn new(hierarchy: &Hierarchy) -> Self {
        Self {
            hierarchy: hierarchy.clone(),
            tree: Tree::new(hierarchy),
            open: HashMap::new(),
            swept: false,
            watch: None,
            buffer: vec![],
        }
    }

    /// A counter includes the cgroups below.
    pub fn hierarchical(&self) -> bool {
        self.hierarchy.version == Version::V2
    }

    /// From now on the kernel's notifications of changes are wanted, or not.
    pub fn watch(&mut self, wanted: bool) {
        if !wanted || !self.hierarchical() {
            self.watch = None;
        } else if self.watch.is_none() {
            self.watch = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC).ok();
            let paths: Vec<_> = self.open.keys().cloned().collect();
            paths.iter().for_each(|path| self.add_watch(path));
        }
    }

    fn add_watch(&self, path: &Path) {
        if let Some(watch) = &self.watch {
            let file = self.hierarchy.root.join(path).join("memory.events");
            // without watches to be had the sweeps must do
            let _ = inotify::add_watch(watch, &file, inotify::WatchFlags::MODIFY);
        }
    }

    /// What poll(2) waits for, if changes are watched.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.watch.as_ref().map(AsFd::as_fd)
    }

    /// Takes the notifications so far. True if there were any.
    pub fn take_notifications(&self) -> bool {
        self.watch.as_ref().is_some_and(take_notifications)
    }

    /// Reads the counters of all containers that are there, and of their pods. One that is there and cannot be read now says
    /// what it said before: forgotten, its old kills would be news in the next sweep.
    ///
    /// # Errors
    /// The tree cannot be walked, or counters that are there cannot be read: the first such error, with what could be read.
    pub fn sweep(&mut self, now: Moment) -> (Vec<Reading>, Result<(), ReadError>) {
        let (_, walked) = self.tree.refresh(now);
        let mut failed = walked;
        let mut wanted: Vec<(Option<ContainerId>, PathBuf, Option<u64>)> = self.pods();
        let mut ids = HashSet::new();
        // a container may make cgroups below its own and give them a neighbour's id: those are a part of it
        for candidate in self.tree.candidates().iter().filter(|candidate| candidate.inside.is_none()) {
            if !ids.insert(&candidate.id) {
                continue;
            }
            let id = || Some(candidate.id.clone());
            wanted.push((id(), candidate.path.clone(), candidate.inode));
            if self.hierarchy.version == Version::V1 {
                wanted.extend(candidate.below.iter().map(|below| (id(), below.clone(), None)));
            }
        }
        let mut readings = Vec::with_capacity(wanted.len());
        let mut before = std::mem::take(&mut self.open);
        for (id, path, inode) in wanted {
            let known = before
                .remove(&path)
                .filter(|open| open.id == id && inode.is_none_or(|inode| inode == open.inode));
            let mut open = match known.map_or_else(|| self.open(id, &path), Ok) {
                Ok(open) => open,
                Err(error) if error.is_gone() => continue,
                Err(error) => {
                    failed = failed.and(Err(error));
                    continue;
                }
            };
            match self.read(&open) {
                Ok(kills) => open.kills = Some(kills),
                Err(error) if error.is_gone() => continue,
                Err(error) => failed = failed.and(Err(error)),
            }
            readings.extend(reading(&path, &open));
            self.open.insert(path, open);
        }
        self.swept = true;
        (readings, failed)
    }

    /// The pods of the containers that are there, and those that were there in the last sweep; first in a sweep.
    fn pods(&self) -> Vec<(Option<ContainerId>, PathBuf, Option<u64>)> {
        if !self.hierarchical() {
            return vec![];
        }
        let paths = self.tree.candidates().iter().filter(|candidate| candidate.inside.is_none());
        let pods = paths.filter_map(|candidate| kubernetes::pod(candidate.path.to_str()?));
        let known = self.open.iter().filter(|(_, open)| open.id.is_none()).map(|(path, _)| path.clone());
        let all: BTreeSet<PathBuf> = pods.map(|(path, _)| PathBuf::from(path)).chain(known).collect();
        // a path is never another pod's: it has the uid
        all.into_iter().map(|path| (None, path, None)).collect()
    }

    fn open(&self, id: Option<ContainerId>, path: &Path) -> Result<Open, ReadError> {
        let dir = Dir::open(&self.hierarchy.root.join(path))?;
        let name = if self.hierarchical() { "memory.events" } else { "memory.oom_control" };
        let open = Open { id, inode: dir.inode()?, file: dir.file(name)?, fresh: self.swept, kills: None };
        self.add_watch(path);
        Ok(open)
    }

    fn read(&mut self, open: &Open) -> Result<u64, ReadError> {
        let text = open.file.read_once(&mut self.buffer)?;
        oom_kill(text).ok_or_else(|| ReadError::malformed("a cgroup's events have no oom_kill"))
    }
}

fn reading(path: &Path, open: &Open) -> Option<Reading> {
    Some(Reading {
        id: open.id.clone(),
        path: path.to_string_lossy().into_owned(),
        inode: open.inode,
        kills: open.kills?,
        fresh: open.fresh,
    })
}

fn oom_kill(text: &[u8]) -> Option<u64> {
    lines(text).find_map(|line| number(line.strip_prefix(b"oom_kill ")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_that_cannot_be_read_once_is_not_forgotten_and_says_what_it_said() {
        let folder = tempfile::tempdir().unwrap();
        let container = folder.path().join("docker").join("a".repeat(64));
        std::fs::create_dir_all(&container).unwrap();
        let events = container.join("memory.events");
        let hierarchy = Hierarchy { version: Version::V2, root: folder.path().to_path_buf() };
        let mut counters = CgroupCounters::new(&hierarchy);
        let mut told = vec![];
        for text in ["oom_kill 3\n", "oom_kil", "oom_kill 4\n"] {
            std::fs::write(&events, text).unwrap();
            let (readings, read) = counters.sweep(Moment::now());
            told.extend(readings.iter().map(|reading| (reading.kills, reading.fresh, read.is_ok())));
        }
        assert_eq!(told, [(3, false, true), (3, false, false), (4, false, true)]);
    }

    #[test]
    fn the_counter_is_found_in_both_versions_files() {
        let v1 = b"oom_kill_disable 0\nunder_oom 0\noom_kill 3\n";
        let v2 = b"low 0\nhigh 0\nmax 50\noom 1\noom_kill 2\noom_group_kill 0\n";
        assert_eq!((oom_kill(v1), oom_kill(v2), oom_kill(b"oom 7\n")), (Some(3), Some(2), None));
    }
}
