//! OOM kill counters of cgroups, for the ledger: `oom_kill` of `memory.events` (v2) or `memory.oom_control` (v1).
//!
//! They are swept at the sampling interval, and immediately when a kill has no owner: the kernel counts before it logs,
//! and a container exists for some milliseconds after its kill. The counter of a container that is created and killed
//! between two sweeps is read only if the next sweep comes in time; the notifications of the cgroup tree trigger it.
//!
//! On v2 each file can be watched (the kernel notifies on every change, including `max` while page cache is reclaimed,
//! and merges changes within 10 ms). Watches are used only where the kernel log, which is the better notification, is
//! unreadable. v1's eventfd fires when an OOM begins, before the kill is counted, and needs a writable file: not used.
//!
//! Cgroups above a container are not read. A pod's counter shows kills in all its containers, and `system.slice` those
//! of services too: neither identifies a container (docs/decisions/0023).

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::clock::Timestamp;
use crate::discover::cgroup_tree::{CgroupTree, ContainerCgroup, outermost};
use crate::discover::{ContainerId, PathClaim, Version};
use crate::host::{Dir, FileWatch, KernelFile, ReadError, WatchQueue};
use crate::parse::{lines, number};

/// One value of one counter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CounterReading {
    /// The container.
    pub id: ContainerId,
    /// The cgroup, relative to the root of the hierarchy.
    pub path: Arc<str>,
    /// The cgroup's inode.
    pub inode: u64,
    /// Number of kills: on v2 including all descendants, on v1 without them.
    pub kills: u64,
    /// True if the cgroup was created after the first sweep, so that its counter began at 0.
    pub fresh: bool,
}

/// The counters of all containers. Keeps the files open.
#[derive(Debug)]
pub struct CgroupCounters {
    tree: CgroupTree,
    open: Vec<(PathBuf, OpenCounter)>,
    has_swept: bool,
    /// A counter could not be opened or read in the last sweep, or its cgroup was gone.
    is_incomplete: bool,
    /// The inotify queue for `memory.events`, if watching is on.
    watch: Option<WatchQueue>,
    /// The watches in it, of open counters.
    watches: HashMap<PathBuf, FileWatch>,
    buffer: Vec<u8>,
}

#[derive(Debug)]
struct OpenCounter {
    id: ContainerId,
    path: Arc<str>,
    inode: u64,
    file: KernelFile,
    fresh: bool,
    /// The last value; `None` if not read yet.
    kills: Option<u64>,
}

impl CgroupCounters {
    /// Creates the counters of the containers in a tree. Reads nothing.
    pub fn new(tree: CgroupTree) -> Self {
        Self {
            tree,
            open: vec![],
            has_swept: false,
            is_incomplete: false,
            watch: None,
            watches: HashMap::new(),
            buffer: vec![],
        }
    }

    /// Returns true if a counter includes the descendants of its cgroup.
    pub fn hierarchical(&self) -> bool {
        self.tree.hierarchy().version == Version::V2
    }

    /// Starts or stops watching for changes of the counters.
    pub fn watch(&mut self, enabled: bool) {
        if !enabled || !self.hierarchical() {
            self.watch = None;
            self.watches.clear();
        } else if self.watch.is_none() {
            self.watch = WatchQueue::new().ok();
            let paths: Vec<_> = self.open.iter().map(|(path, _)| path.clone()).collect();
            paths.iter().for_each(|path| self.add_watch(path));
        }
    }

    fn add_watch(&mut self, path: &Path) {
        if let Some(watch) = &self.watch {
            let file = self.tree.hierarchy().root.join(path).join("memory.events");
            // without a watch, the sweeps still read the counter
            if let Ok(watch) = watch.add(&file) {
                self.watches.insert(path.to_path_buf(), watch);
            }
        }
    }

    /// Returns the descriptor for poll(2) if changes are watched.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.watch.as_ref().map(AsFd::as_fd)
    }

    /// Drains the notifications. Returns true if there were any.
    pub fn take_notifications(&self) -> bool {
        self.watch.as_ref().is_some_and(WatchQueue::take_notifications)
    }

    /// Reads the counters of all existing containers. `claim`: returns what the runtimes say of a cgroup with a container's id in its
    /// name, which anyone may create who may create cgroups there. If a counter exists but cannot be read, its
    /// last value is returned: without it, the old kills would look new in the next sweep.
    ///
    /// # Errors
    /// The tree cannot be walked, or an existing counter cannot be read: returns the first error together with the
    /// values that were read.
    pub fn sweep(
        &mut self,
        now: Timestamp,
        claim: impl Fn(&ContainerId, &Path) -> PathClaim,
    ) -> (Vec<CounterReading>, Result<(), ReadError>) {
        let (has_changed, mut outcome) = self.tree.refresh(now);
        // which of those are containers can change without the tree
        let has_unproven = self.tree.candidates().iter().any(|candidate| !candidate.is_proven(None));
        if has_changed || has_unproven || std::mem::take(&mut self.is_incomplete) {
            outcome = outcome.and(self.open_wanted(claim));
        }
        let mut readings = Vec::with_capacity(self.open.len());
        let mut open = std::mem::take(&mut self.open);
        open.retain_mut(|(_, counter)| {
            let read = counter.read(&mut self.buffer);
            self.is_incomplete |= read.is_err();
            match read {
                Ok(kills) => counter.kills = Some(kills),
                Err(error) if error.is_gone() => return false,
                Err(error) => outcome = std::mem::replace(&mut outcome, Ok(())).and(Err(error)),
            }
            readings.extend(counter.reading());
            true
        });
        self.open = open;
        self.has_swept = true;
        (readings, outcome)
    }

    /// Opens the counters of all existing containers, and closes all others.
    fn open_wanted(&mut self, claim: impl Fn(&ContainerId, &Path) -> PathClaim) -> Result<(), ReadError> {
        let mut outcome = Ok(());
        let wanted = self.wanted(claim);
        let mut before: HashMap<PathBuf, OpenCounter> = std::mem::take(&mut self.open).into_iter().collect();
        for (id, path, inode) in wanted {
            let known = before
                .remove(&path)
                .filter(|open| open.id == id && inode.is_none_or(|inode| inode == open.inode));
            match known.map_or_else(|| self.open(id, &path), Ok) {
                Ok(open) => self.open.push((path, open)),
                Err(error) if error.is_gone() => self.is_incomplete = true,
                Err(error) => {
                    self.is_incomplete = true;
                    outcome = outcome.and(Err(error));
                }
            }
        }
        let open: HashSet<&PathBuf> = self.open.iter().map(|(path, _)| path).collect();
        self.watches.retain(|path, _| open.contains(path));
        outcome
    }

    /// Returns the cgroups to read, with the container of each and its inode if it is known.
    fn wanted(
        &self,
        claim: impl Fn(&ContainerId, &Path) -> PathClaim,
    ) -> Vec<(ContainerId, PathBuf, Option<u64>)> {
        let candidates = self.tree.candidates();
        let claim = |candidate: &ContainerCgroup| claim(&candidate.id, &candidate.path);
        let user = |candidate: &ContainerCgroup| match claim(candidate) {
            PathClaim::Possible { user } => user,
            PathClaim::Own | PathClaim::Elsewhere => None,
        };
        let is_container = |candidate: &ContainerCgroup| {
            claim(candidate) == PathClaim::Own || candidate.is_proven(user(candidate))
        };
        let is_inner = |at: usize| {
            let (candidate, outer) = (&candidates[at], outermost(candidates, at));
            candidate.inside.is_some() && user(candidate).is_some() && is_container(outer)
        };
        // of several with one id: the one that its runtime names, then one outside of containers
        let own = (0..candidates.len()).filter(|at| claim(&candidates[*at]) == PathClaim::Own);
        let outer = (0..candidates.len()).filter(|at| is_container(&candidates[*at]));
        let inner = (0..candidates.len()).filter(|at| is_inner(*at));
        let mut ids = HashSet::new();
        let selected: Vec<&ContainerCgroup> = own
            .chain(outer)
            .chain(inner)
            .map(|at| &candidates[at])
            .filter(|candidate| ids.insert(&candidate.id))
            .collect();
        let nested: Vec<&ContainerCgroup> =
            selected.iter().copied().filter(|candidate| candidate.inside.is_some()).collect();
        let mut wanted = Vec::with_capacity(selected.len());
        for candidate in selected {
            let id = || candidate.id.clone();
            wanted.push((id(), candidate.path.clone(), candidate.inode));
            if self.tree.hierarchy().version == Version::V1 {
                let is_own = |below: &&PathBuf| {
                    let mut inner = nested.iter().filter(|inner| inner.path != candidate.path);
                    !inner.any(|inner| {
                        inner.path.starts_with(&candidate.path) && below.starts_with(&inner.path)
                    })
                };
                let below = candidate.below.iter().filter(is_own);
                wanted.extend(below.map(|below| (id(), below.clone(), None)));
            }
        }
        wanted
    }

    fn open(&mut self, id: ContainerId, path: &Path) -> Result<OpenCounter, ReadError> {
        let dir = Dir::open(&self.tree.hierarchy().root.join(path))?;
        let name = if self.hierarchical() { "memory.events" } else { "memory.oom_control" };
        let open = OpenCounter {
            id,
            path: path.to_string_lossy().into(),
            inode: dir.inode()?,
            file: dir.file(name)?,
            fresh: self.has_swept,
            kills: None,
        };
        self.add_watch(path);
        Ok(open)
    }
}

impl OpenCounter {
    fn read(&self, buffer: &mut Vec<u8>) -> Result<u64, ReadError> {
        let text = self.file.read_once(buffer)?;
        oom_kill(text).ok_or_else(|| ReadError::malformed("no oom_kill in the OOM events of a cgroup"))
    }

    fn reading(&self) -> Option<CounterReading> {
        Some(CounterReading {
            id: self.id.clone(),
            path: Arc::clone(&self.path),
            inode: self.inode,
            kills: self.kills?,
            fresh: self.fresh,
        })
    }
}

fn oom_kill(text: &[u8]) -> Option<u64> {
    lines(text).find_map(|line| number(line.strip_prefix(b"oom_kill ")?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::Hierarchy;

    const UNKNOWN: PathClaim = PathClaim::Possible { user: None };

    #[test]
    fn unreadable_counter_keeps_its_last_value() {
        let folder = tempfile::tempdir().unwrap();
        let container = folder.path().join("docker").join("a".repeat(64));
        std::fs::create_dir_all(&container).unwrap();
        let events = container.join("memory.events");
        let hierarchy = Hierarchy { version: Version::V2, root: folder.path().to_path_buf() };
        let mut counters = CgroupCounters::new(CgroupTree::new(&hierarchy));
        let mut seen = vec![];
        for text in ["oom_kill 3\n", "oom_kil", "oom_kill 4\n"] {
            std::fs::write(&events, text).unwrap();
            let (readings, read) = counters.sweep(Timestamp::now(), |_, _| UNKNOWN);
            seen.extend(readings.iter().map(|reading| (reading.kills, reading.fresh, read.is_ok())));
        }
        assert_eq!(seen, [(3, false, true), (3, false, false), (4, false, true)]);
    }

    /// Moves the cgroups away, which keeps the watches of their files as the kernel does for removed ones.
    #[test]
    fn watches_end_with_their_cgroups() {
        let folder = tempfile::tempdir().unwrap();
        let hierarchy = Hierarchy { version: Version::V2, root: folder.path().join("cgroup") };
        let gone = folder.path().join("gone");
        std::fs::create_dir(&gone).unwrap();
        let mut counters = CgroupCounters::new(CgroupTree::new(&hierarchy));
        counters.watch(true);
        let mut now = Timestamp::now();
        for number in 0..20 {
            let id = format!("{number:064x}");
            let container = hierarchy.root.join("docker").join(&id);
            std::fs::create_dir_all(&container).unwrap();
            std::fs::write(container.join("memory.events"), "oom_kill 0\n").unwrap();
            now = now.plus(std::time::Duration::from_secs(60));
            assert_eq!(counters.sweep(now, |_, _| UNKNOWN).0.len(), 1);
            assert_eq!(counters.watch.as_ref().unwrap().watches(), 1);
            std::fs::rename(container, gone.join(id)).unwrap();
        }
        assert!(counters.sweep(now.plus(std::time::Duration::from_secs(60)), |_, _| UNKNOWN).0.is_empty());
        assert_eq!(counters.watch.as_ref().unwrap().watches(), 0);
    }

    #[test]
    fn container_in_a_container_has_a_counter_of_its_own() {
        for (version, file) in [(Version::V1, "memory.oom_control"), (Version::V2, "memory.events")] {
            let folder = tempfile::tempdir().unwrap();
            let [outer, inner, forged] = ['a', 'b', 'c'].map(|letter| letter.to_string().repeat(64));
            let below =
                |parts: &[&str]| parts.iter().fold(PathBuf::from("docker"), |path, part| path.join(part));
            let paths = [
                (below(&[&outer]), 4),
                (below(&[&outer, "worker"]), 1),
                (below(&[&outer, "docker", &inner]), 2),
                (below(&[&outer, "docker", &inner, "worker"]), 1),
                (below(&[&outer, "docker", &forged]), 1),
            ];
            for (path, kills) in &paths {
                std::fs::create_dir_all(folder.path().join(path)).unwrap();
                std::fs::write(folder.path().join(path).join(file), format!("oom_kill {kills}\n")).unwrap();
            }
            // a parent without a counter of its own
            std::fs::write(folder.path().join(below(&[&outer, "docker"])).join(file), "oom_kill 0\n")
                .unwrap();
            let mut counters = CgroupCounters::new(CgroupTree::new(&Hierarchy {
                version,
                root: folder.path().to_path_buf(),
            }));
            let is_inner = |id: &ContainerId| (id.as_str() == inner).then_some(0);
            let claim = |id: &ContainerId, _: &Path| PathClaim::Possible { user: is_inner(id) };
            let (readings, outcome) = counters.sweep(Timestamp::now(), claim);
            assert!(outcome.is_ok());
            let kills = |id: &str| -> u64 {
                readings.iter().filter(|reading| reading.id.as_str() == id).map(|reading| reading.kills).sum()
            };
            // v1 counts each cgroup for itself, the forged one as a part of the outer
            let expected = if version == Version::V1 { (4 + 1 + 1, 2 + 1, 0) } else { (4, 2, 0) };
            assert_eq!((kills(&outer), kills(&inner), kills(&forged)), expected, "{version:?}");
        }
    }

    #[test]
    fn counter_of_a_cgroup_that_a_user_can_make_is_no_containers() {
        let folder = tempfile::tempdir().unwrap();
        let [own, of_user] = ['a', 'b'].map(|letter| letter.to_string().repeat(64));
        let user = "user.slice/user-7.slice/user@7.service";
        for (path, kills) in [
            // it sorts before the container's own
            (format!("a/slurm_vm/uid_7/job_1/step_0/task_0/{own}"), 4),
            (format!("docker/{own}"), 1),
            (format!("{user}/docker-{of_user}.scope"), 2),
        ] {
            std::fs::create_dir_all(folder.path().join(&path)).unwrap();
            std::fs::write(
                folder.path().join(path).join("memory.oom_control"),
                format!("oom_kill {kills}\n"),
            )
            .unwrap();
        }
        let hierarchy = Hierarchy { version: Version::V1, root: folder.path().to_path_buf() };
        let mut counters = CgroupCounters::new(CgroupTree::new(&hierarchy));
        for (user, expected) in [(None, vec![1]), (Some(8), vec![1]), (Some(7), vec![1, 2])] {
            let claim = |id: &ContainerId, _: &Path| PathClaim::Possible {
                user: user.filter(|_| id.as_str() == of_user),
            };
            let readings = counters.sweep(Timestamp::now(), claim).0;
            assert_eq!(readings.iter().map(|reading| reading.kills).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn parses_counter_of_both_versions() {
        let v1 = b"oom_kill_disable 0\nunder_oom 0\noom_kill 3\n";
        let v2 = b"low 0\nhigh 0\nmax 50\noom 1\noom_kill 2\noom_group_kill 0\n";
        assert_eq!((oom_kill(v1), oom_kill(v2), oom_kill(b"oom 7\n")), (Some(3), Some(2), None));
    }
}
