//! Finds the hierarchy that has the memory controller, and the containers among its cgroups.
//!
//! The tree is walked after an inotify event for a created or removed cgroup, and every [`RESCAN`] in case an event was lost:
//! on an idle host a cycle costs one read of an empty queue. Without inotify watches, the
//! tree is walked whenever ten times the duration of the last walk is over.
//!
//! A container may create and remove cgroups below its own without a pause, and a user in a slice that was delegated to it. Walks
//! for changes inside containers are limited to a duty cycle of 10 % ([`PAUSE_FACTOR`]); changes outside of containers are
//! walked for at once, unless there are very many ([`FEW_OUTSIDE`]).
//!
//! The tree is walked and watched once: its users have a handle each ([`CgroupTree::share`]).
//!
//! Not here: names. Without a runtime, a container has only its id.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::inotify;

use super::{CgroupMaker, ContainerId, RuntimeKind};
use crate::clock::Timestamp;
use crate::host::bounds::{
    CGROUP_DEPTH, CGROUP_PATHS_BELOW, CGROUPS_BELOW, CGROUPS_OUTSIDE, CGROUPS_OUTSIDE_OF_SLICE,
};
use crate::host::{Dir, HostPaths, KernelFile, ReadError, for_each_notification};
use crate::parse::container_id;

/// Longest time between two walks of the tree.
const RESCAN: Duration = Duration::from_secs(60);
/// After a walk, changes inside containers trigger no walk for this many times its duration.
const PAUSE_FACTOR: u32 = 9;
/// Where there are no more cgroups outside of containers, a change of them is walked for without a pause.
const FEW_OUTSIDE: usize = 2_000;
/// The names in a cgroup's directory include its files.
const MAX_FILES: usize = 200;

/// The cgroup version of the memory controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// `memory.usage_in_bytes` and similar files.
    V1,
    /// `memory.current` and similar files.
    V2,
}

impl Version {
    /// Returns the label value.
    pub fn label(self) -> &'static str {
        match self {
            Version::V1 => "1",
            Version::V2 => "2",
        }
    }
}

/// The hierarchy that has the memory controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchy {
    /// Its version.
    pub version: Version,
    /// Mount point of its root cgroup.
    pub root: PathBuf,
}

/// Error: no usable memory controller.
#[derive(Debug, thiserror::Error)]
pub enum NoHierarchy {
    /// There is no cgroup file system.
    #[error("no cgroup file system at {0}: mount the host's there or set --path.cgroupfs")]
    NotMounted(PathBuf),
    /// There are cgroups, without the memory controller.
    #[error(
        "the cgroups at {0} have no memory controller: boot with cgroup_enable=memory, or enable it in cgroup.subtree_control"
    )]
    NoMemory(PathBuf),
}

impl Hierarchy {
    /// Finds the memory controller below `host_paths.cgroup`.
    ///
    /// Hybrid hosts also mount v2 (at `unified`), without the memory controller: the result is then v1.
    ///
    /// # Errors
    /// [`NoHierarchy`], with the fix in its text.
    pub fn detect(host_paths: &HostPaths) -> Result<Self, NoHierarchy> {
        let top = &host_paths.cgroup;
        let v2 = |root: PathBuf| has_memory_controller(&root).then_some(Self { version: Version::V2, root });
        let v1 = |root: PathBuf| {
            root.join("memory.usage_in_bytes").exists().then_some(Self { version: Version::V1, root })
        };
        let found = v2(top.clone()).or_else(|| v1(top.join("memory"))).or_else(|| v2(top.join("unified")));
        if let Some(hierarchy) = found {
            return Ok(hierarchy);
        }
        // co-mounted controllers, such as "cpu,memory"
        let listing = std::fs::read_dir(top).map_err(|_| NoHierarchy::NotMounted(top.clone()))?;
        let mut entries = 0;
        for entry in listing.flatten() {
            entries += 1;
            if let Some(hierarchy) = v1(entry.path()) {
                return Ok(hierarchy);
            }
        }
        Err(if entries == 0 {
            NoHierarchy::NotMounted(top.clone())
        } else {
            NoHierarchy::NoMemory(top.clone())
        })
    }
}

fn has_memory_controller(root: &Path) -> bool {
    let mut buffer = Vec::new();
    KernelFile::open(&root.join("cgroup.controllers"))
        .and_then(|file| {
            file.read_once(&mut buffer)
                .map(|text| text.split(u8::is_ascii_whitespace).any(|c| c == b"memory"))
        })
        .unwrap_or(false)
}

/// A cgroup whose name contains a container id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerCgroup {
    /// The id in its name.
    pub id: ContainerId,
    /// The runtime that created it, according to its name.
    pub runtime: RuntimeKind,
    /// Relative to the root of the hierarchy.
    pub path: PathBuf,
    /// Its inode; `None` if it was removed during the walk.
    pub inode: Option<u64>,
    /// Cgroups below it, up to the limit.
    pub below: Vec<PathBuf>,
    /// There are more cgroups below it than the limit.
    pub is_truncated: bool,
    /// Index of the enclosing candidate, for a container in a container.
    pub inside: Option<usize>,
    /// Who can have made it: the name alone proves nothing.
    pub maker: CgroupMaker,
}

impl ContainerCgroup {
    /// Returns whether it is a container's by its place alone: in none, and where root or its user alone can have made it.
    ///
    /// `user`: the user whose engine or run it is, if a runtime knows it.
    pub fn is_proven(&self, user: Option<u32>) -> bool {
        let user = user.or(container_id::user_of_run(self.id.as_str()));
        self.inside.is_none() && self.maker.is_root_or(user)
    }
}

/// Returns the outermost of the candidates around one, or itself.
pub fn outermost(candidates: &[ContainerCgroup], at: usize) -> &ContainerCgroup {
    let around = std::iter::successors(Some(at), |at| candidates[*at].inside);
    &candidates[around.last().unwrap_or(at)]
}

/// The cgroup tree as of the last walk: the handle of one user.
#[derive(Debug)]
pub struct CgroupTree {
    hierarchy: Hierarchy,
    walker: Arc<Mutex<Walker>>,
    /// What this user has seen.
    seen: Seen,
    candidates: Arc<[ContainerCgroup]>,
}

/// The numbers of walks, and of those that changed the candidates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    walks: u64,
    changes: u64,
}

/// Walks the tree for all its users.
#[derive(Debug)]
struct Walker {
    root: PathBuf,
    watch: Option<OwnedFd>,
    walked: Option<Timestamp>,
    /// Duration of the last walk.
    walk_time: Duration,
    /// Number of cgroups outside of containers in the last walk.
    outside: usize,
    /// Watch descriptors inside containers, of the last two walks: notifications may be older than a walk.
    inside: [HashSet<i32>; 2],
    /// Something inside a container changed since the last walk.
    changed_inside: bool,
    /// Something outside of containers changed since the last walk.
    changed_outside: bool,
    truncated: bool,
    candidates: Arc<[ContainerCgroup]>,
    /// The first cgroup that could not be listed in the last walk.
    failed: Option<ReadError>,
    so_far: Seen,
    listing: Vec<u8>,
}

impl CgroupTree {
    /// Returns the tree of the memory controller's hierarchy, without walking it. Logs if there is none.
    pub fn detect(host_paths: &HostPaths) -> Option<Self> {
        match Hierarchy::detect(host_paths) {
            Ok(hierarchy) => Some(Self::new(&hierarchy)),
            Err(error) => {
                tracing::error!(%error, "no cgroup hierarchy with a memory controller found; container memory is missing");
                None
            }
        }
    }

    /// Creates a tree, without walking it.
    pub fn new(hierarchy: &Hierarchy) -> Self {
        let watch = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC).ok();
        let walker = Walker {
            root: hierarchy.root.clone(),
            watch,
            walked: None,
            walk_time: Duration::ZERO,
            outside: 0,
            inside: Default::default(),
            changed_inside: false,
            changed_outside: false,
            truncated: false,
            candidates: Arc::default(),
            failed: None,
            so_far: Seen::default(),
            listing: vec![],
        };
        let walker = Arc::new(Mutex::new(walker));
        Self { hierarchy: hierarchy.clone(), walker, seen: Seen::default(), candidates: Arc::default() }
    }

    /// Returns a handle for another user, which has seen nothing yet.
    pub fn share(&self) -> Self {
        let (hierarchy, walker) = (self.hierarchy.clone(), Arc::clone(&self.walker));
        Self { hierarchy, walker, seen: Seen::default(), candidates: Arc::default() }
    }

    /// Returns its hierarchy.
    pub fn hierarchy(&self) -> &Hierarchy {
        &self.hierarchy
    }

    /// Walks the tree if it may have changed; waits while another user walks it, which takes as long as a walk of its own would. Returns
    /// true if the candidates changed since this user's last call.
    ///
    /// The error is that of the first cgroup that could not be listed in the last walk, if it was since then. The candidates stay valid: if
    /// the root could not be listed, they are those of the previous walk.
    pub fn refresh(&mut self, now: Timestamp) -> (bool, Result<(), ReadError>) {
        let mut walker = lock(&self.walker);
        walker.refresh(now);
        let before = std::mem::replace(&mut self.seen, walker.so_far);
        self.candidates = Arc::clone(&walker.candidates);
        let failed = walker.failed.clone().filter(|_| before.walks != walker.so_far.walks);
        (before.changes != walker.so_far.changes, failed.map_or(Ok(()), Err))
    }

    /// Returns the container cgroups of the last walk, outer before inner.
    pub fn candidates(&self) -> &[ContainerCgroup] {
        &self.candidates
    }
}

/// Locks the walker. A panic during a walk leaves the candidates of the walk before, and the next call walks again.
fn lock(walker: &Mutex<Walker>) -> MutexGuard<'_, Walker> {
    walker.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Walker {
    /// Walks the tree if it may have changed.
    fn refresh(&mut self, now: Timestamp) {
        let stale = self.walked.is_none_or(|walked| now.since(walked) >= RESCAN);
        if !self.needs_walk(now) && !stale {
            return;
        }
        let began = Timestamp::now();
        (self.walked, self.failed) = (None, None); // the notifications are used up: after a panic the next call walks again
        self.so_far.walks += 1;
        (self.changed_inside, self.changed_outside) = (false, false);
        self.inside.swap(0, 1);
        self.inside[0].clear();
        let mut walk = Walk::default();
        if let Err(error) = self.walk(PathBuf::new(), None, CgroupMaker::Root, 0, &mut walk) {
            if error.is_gone() {
                self.set_candidates(vec![]);
            }
            self.failed = Some(error);
            return;
        }
        self.walk_time = Timestamp::now().since(began);
        if let (Some(slice), false) = (&walk.truncated, self.truncated) {
            let below = slice.display();
            tracing::warn!(%below, "too many cgroups outside of containers: containers below it may be missing");
        }
        self.outside = walk.outside;
        self.truncated = walk.truncated.is_some();
        if let Some(slice) = walk.truncated.take() {
            let what = format!("the list of cgroups below {}", slice.display());
            walk.failed.get_or_insert(ReadError::TooLarge(what));
        }
        self.walked = (!walk.needs_retry).then_some(now);
        self.failed = walk.failed;
        self.set_candidates(walk.candidates);
    }

    fn set_candidates(&mut self, candidates: Vec<ContainerCgroup>) {
        if *self.candidates != *candidates {
            self.so_far.changes += 1;
            self.candidates = candidates.into();
        }
    }

    /// Drains the notifications. Returns true if they require a walk. Without watches, it is required whenever the pause is over.
    fn needs_walk(&mut self, now: Timestamp) -> bool {
        let is_pause_over =
            self.walked.is_none_or(|walked| now.since(walked) >= self.walk_time * (PAUSE_FACTOR + 1));
        let Some(watch) = &self.watch else { return is_pause_over };
        for_each_notification(watch, |descriptor| {
            // -1: the queue overflowed, most likely through a container, so it counts as a change inside one
            let is_inside = descriptor == -1 || self.inside.iter().any(|set| set.contains(&descriptor));
            self.changed_inside |= is_inside;
            self.changed_outside |= !is_inside;
        });
        let has_few = self.outside <= FEW_OUTSIDE;
        (self.changed_outside && (has_few || is_pause_over)) || (self.changed_inside && is_pause_over)
    }

    /// Walks a cgroup. `inside`: the candidate that it is or is in; `maker`: who can make cgroups in it, by the cgroups above it and its
    /// name.
    fn walk(
        &mut self,
        path: PathBuf,
        inside: Option<usize>,
        maker: CgroupMaker,
        depth: usize,
        walk: &mut Walk,
    ) -> Result<(), ReadError> {
        let full = self.root.join(&path);
        // watch first, then list: a cgroup created in between is then listed or notified
        if let Some(watch) = &self.watch {
            use inotify::WatchFlags as Flags;
            let flags = Flags::CREATE | Flags::DELETE | Flags::MOVE | Flags::ONLYDIR;
            match inotify::add_watch(watch, &full, flags) {
                Ok(descriptor) if inside.is_some() => drop(self.inside[0].insert(descriptor)),
                Err(rustix::io::Errno::NOSPC) => {
                    tracing::warn!(
                        "inotify watch limit reached: the cgroup tree is walked again and again, which costs CPU time and may delay new containers; raise fs.inotify.max_user_watches"
                    );
                    self.watch = None;
                }
                Ok(_) | Err(_) => {}
            }
        }
        let mut children = Vec::new();
        let dir = Dir::open(&full)?;
        let owner = dir.owner()?;
        let maker = maker.below_owner(owner, *walk.root_owner.get_or_insert(owner));
        let max_below = if inside.is_some() { CGROUPS_BELOW.max } else { CGROUPS_OUTSIDE_OF_SLICE.max };
        let is_truncated = dir.for_each(max_below + MAX_FILES, &mut self.listing, |name, is_dir| {
            if is_dir {
                children.push(path.join(name));
            }
        })?;
        drop(dir);
        if is_truncated {
            walk.mark_truncated(inside, &path);
        }
        children.sort();
        for child in children {
            if depth == 0 {
                walk.of_slice = 0;
            }
            if depth >= CGROUP_DEPTH.max || !walk.is_within_limits(inside, &child) {
                walk.mark_truncated(inside, &child);
                break;
            }
            let below = child.file_name().map_or(maker, |name| maker.below_name(&name.to_string_lossy()));
            let inside = walk.record(&self.root, &child, inside, maker);
            match self.walk(child, inside, below, depth + 1, walk) {
                Ok(()) => {}
                Err(error) if error.is_gone() => {}
                Err(error) => {
                    tracing::debug!(%error, "listing a cgroup failed");
                    // a container must not be able to force a walk in every cycle; missing permissions do not come back
                    walk.needs_retry |= inside.is_none() && error.reason_label() != Some("permission");
                    walk.failed.get_or_insert(error);
                }
            }
        }
        Ok(())
    }
}

/// Results of one walk.
#[derive(Debug, Default)]
struct Walk {
    candidates: Vec<ContainerCgroup>,
    /// The owner of the root cgroup.
    root_owner: Option<u32>,
    /// Cgroups outside containers, and those of them below the current one of the first level. Those inside have their own limit, so
    /// that one container cannot affect others.
    outside: usize,
    of_slice: usize,
    /// A cgroup outside containers below which there are more than the limit.
    truncated: Option<PathBuf>,
    /// For each outermost container, the number of cgroups below it and the bytes of their paths. A cgroup in several
    /// nested containers counts several times.
    below: HashMap<usize, (usize, usize)>,
    /// The first cgroup that could not be listed.
    failed: Option<ReadError>,
    /// The next cycle walks again.
    needs_retry: bool,
}

impl Walk {
    /// Returns the outermost container around this one, and the nesting depth.
    fn outermost(&self, inside: usize) -> (usize, usize) {
        let outer = std::iter::successors(Some(inside), |index| self.candidates[*index].inside);
        outer.fold((inside, 0), |(_, count), index| (index, count + 1))
    }

    /// Returns whether one more cgroup below this container is within the limits.
    fn is_within_limits(&mut self, inside: Option<usize>, path: &Path) -> bool {
        let Some(inside) = inside else {
            (self.outside, self.of_slice) = (self.outside + 1, self.of_slice + 1);
            return self.outside <= CGROUPS_OUTSIDE.max && self.of_slice <= CGROUPS_OUTSIDE_OF_SLICE.max;
        };
        let (outermost, depth) = self.outermost(inside);
        let (count, bytes) = self.below.entry(outermost).or_default();
        *count += depth;
        *bytes += depth * path.as_os_str().len();
        *count <= CGROUPS_BELOW.max && *bytes <= CGROUP_PATHS_BELOW.max_bytes
    }

    /// Marks this container and those around it as truncated; outside of containers the first component of the path.
    fn mark_truncated(&mut self, inside: Option<usize>, path: &Path) {
        if inside.is_none() {
            let slice = path.components().next().map(|first| PathBuf::from(first.as_os_str()));
            self.truncated.get_or_insert(slice.unwrap_or_default());
        }
        let mut outer = inside;
        while let Some(index) = outer {
            self.candidates[index].is_truncated = true;
            outer = self.candidates[index].inside;
        }
    }

    /// Records one cgroup. Returns the index of the innermost candidate that contains it and the cgroups below it.
    fn record(
        &mut self,
        root: &Path,
        path: &Path,
        inside: Option<usize>,
        maker: CgroupMaker,
    ) -> Option<usize> {
        let mut outer = inside;
        while let Some(index) = outer {
            self.candidates[index].below.push(path.to_path_buf());
            outer = self.candidates[index].inside;
        }
        let component = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let parent =
            path.parent().and_then(Path::file_name).and_then(|name| name.to_str()).unwrap_or_default();
        let Some(found) = container_id::in_component(component, parent) else { return inside };
        self.candidates.push(ContainerCgroup {
            id: ContainerId::new(found.id),
            runtime: found.runtime,
            path: path.to_path_buf(),
            inode: rustix::fs::stat(root.join(path)).ok().map(|stat| stat.st_ino),
            below: vec![],
            is_truncated: false,
            inside,
            maker,
        });
        Some(self.candidates.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    fn tree_at(root: &Path) -> CgroupTree {
        CgroupTree::new(&Hierarchy { version: Version::V2, root: root.to_path_buf() })
    }

    fn id(digit: char) -> String {
        digit.to_string().repeat(64)
    }

    #[test]
    fn unreadable_root_keeps_candidates_and_is_retried() {
        let folder = tempfile::tempdir().unwrap();
        let (root, moved) = (folder.path().join("cgroup"), folder.path().join("moved"));
        std::fs::create_dir_all(root.join("docker").join(id('a'))).unwrap();
        let mut tree = tree_at(&root);
        let now = Timestamp::now();
        assert!(matches!(tree.refresh(now), (true, Ok(()))));
        std::fs::create_dir(root.join("docker").join(id('b'))).unwrap(); // a notification
        std::fs::rename(&root, &moved).unwrap();
        std::fs::write(&root, "no folder").unwrap();
        let (changed, walked) = tree.refresh(now);
        assert!(!changed && walked.is_err_and(|error| error.reason_label() == Some("io")));
        assert_eq!(tree.candidates().len(), 1);
        std::fs::remove_file(&root).unwrap();
        std::fs::rename(&moved, &root).unwrap();
        assert!(matches!(tree.refresh(now), (true, Ok(()))));
        assert_eq!(tree.candidates().len(), 2);
        assert!(matches!(tree.refresh(now), (false, Ok(()))));
    }

    #[test]
    fn each_user_sees_changes_and_the_error_of_the_last_walk_once() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("cgroup");
        std::fs::create_dir_all(root.join("docker").join(id('a'))).unwrap();
        let mut one = tree_at(&root);
        let now = Timestamp::now();
        assert!(one.refresh(now).0);
        let mut other = one.share();
        assert!(other.refresh(now).0 && other.candidates().len() == 1, "without another walk");
        std::fs::create_dir(root.join("docker").join(id('b'))).unwrap();
        assert_eq!([&mut one, &mut other].map(|tree| tree.refresh(now).0), [true, true]);
        assert_eq!([&mut one, &mut other].map(|tree| tree.refresh(now).0), [false, false]);
        assert_eq!(other.candidates().len(), 2);
        assert_eq!(lock(&one.walker).so_far.walks, 2);
        lock(&one.walker).failed = Some(ReadError::TooLarge("a slice".into()));
        lock(&one.walker).so_far.walks += 1;
        assert_eq!([&mut one, &mut other].map(|tree| tree.refresh(now).1.is_err()), [true, true]);
        assert_eq!([&mut one, &mut other].map(|tree| tree.refresh(now).1.is_err()), [false, false]);
    }

    #[test]
    fn unreadable_part_is_reported_and_the_rest_is_found() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("z").join(id('a'))).unwrap();
        // a path that is too long for the kernel; only relative calls can create it
        let mut at: OwnedFd = std::fs::File::open(folder.path()).unwrap().into();
        for _ in 0..20 {
            let name = "n".repeat(250);
            rustix::fs::mkdirat(at.as_fd(), &name, rustix::fs::Mode::RWXU).unwrap();
            let flags = rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
            at = rustix::fs::openat(at.as_fd(), &name, flags, rustix::fs::Mode::empty()).unwrap();
        }
        let mut tree = tree_at(folder.path());
        let now = Timestamp::now();
        let (changed, walked) = tree.refresh(now);
        assert!(changed && walked.is_err_and(|error| error.reason_label() == Some("io")));
        assert_eq!(tree.candidates().len(), 1);
        assert!(tree.refresh(now).1.is_err(), "tried again");
    }

    #[test]
    fn container_with_too_many_cgroups_is_truncated_alone() {
        let folder = tempfile::tempdir().unwrap();
        let [a, b] = ['a', 'b'].map(|digit| folder.path().join("docker").join(id(digit)));
        std::fs::create_dir_all(b.join("below")).unwrap();
        for number in 0..10_000 {
            std::fs::create_dir_all(a.join(format!("{number:064x}"))).unwrap();
        }
        let mut tree = tree_at(folder.path());
        let now = Timestamp::now();
        assert!(tree.refresh(now).1.is_ok());
        let outermost = |tree: &CgroupTree| {
            let outermost = tree.candidates().iter().filter(|candidate| candidate.inside.is_none());
            outermost.map(|candidate| (candidate.below.len(), candidate.is_truncated)).collect::<Vec<_>>()
        };
        assert_eq!(outermost(&tree), [(CGROUPS_BELOW.max, true), (1, false)]);
        assert!(tree.candidates().len() <= CGROUPS_BELOW.max + 2);
        std::fs::remove_dir_all(&a).unwrap();
        std::fs::create_dir_all(a.join("below")).unwrap();
        assert!(tree.refresh(now).1.is_ok());
        assert_eq!(outermost(&tree), [(1, false), (1, false)], "once it is small again");
    }

    #[test]
    fn crowded_slice_is_truncated_alone_and_reported() {
        let folder = tempfile::tempdir().unwrap();
        for number in 0..=CGROUPS_OUTSIDE_OF_SLICE.max {
            std::fs::create_dir_all(folder.path().join("a.slice").join(format!("user/{number}"))).unwrap();
        }
        std::fs::create_dir_all(folder.path().join("docker").join(id('a'))).unwrap();
        let mut tree = tree_at(folder.path());
        let (changed, walked) = tree.refresh(Timestamp::now());
        let error = walked.expect_err("reported");
        assert!(
            error.to_string().contains("a.slice") && error.reason_label() == Some("too_large"),
            "{error}"
        );
        assert!(changed);
        assert_eq!(tree.candidates().len(), 1);
    }

    #[test]
    fn change_outside_waits_after_a_slow_walk_of_a_crowd() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("docker")).unwrap();
        let mut tree = tree_at(folder.path());
        let now = Timestamp::now();
        assert!(tree.refresh(now).1.is_ok());
        let mut walker = lock(&tree.walker);
        (walker.walk_time, walker.outside) = (Duration::from_millis(200), FEW_OUTSIDE + 1);
        drop(walker);
        std::fs::create_dir(folder.path().join("docker").join(id('a'))).unwrap();
        assert!(!tree.refresh(now.plus(Duration::from_secs(1))).0, "within the pause");
        assert!(tree.refresh(now.plus(Duration::from_secs(3))).0);
    }

    #[test]
    fn long_paths_below_nested_ids_take_bounded_memory() {
        let folder = tempfile::tempdir().unwrap();
        let mut path = folder.path().join("docker");
        (0..20).for_each(|number| path.push(format!("{number:064x}")));
        for number in 0..900 {
            std::fs::create_dir_all(path.join(format!("{number:0200}"))).unwrap();
        }
        let mut tree = tree_at(folder.path());
        assert!(tree.refresh(Timestamp::now()).1.is_ok());
        let bytes = |candidate: &ContainerCgroup| {
            candidate.below.iter().map(|path| path.as_os_str().len()).sum::<usize>()
        };
        let kept: usize = tree.candidates().iter().map(bytes).sum();
        assert!(kept <= CGROUP_PATHS_BELOW.max_bytes, "{kept} bytes");
        assert!(tree.candidates()[0].is_truncated);
    }

    #[test]
    fn change_inside_container_waits_and_change_outside_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let container = folder.path().join("docker").join(id('a'));
        std::fs::create_dir_all(&container).unwrap();
        let mut tree = tree_at(folder.path());
        let now = Timestamp::now();
        let soon = now.plus(RESCAN / 2);
        assert!(tree.refresh(now).0);
        std::fs::create_dir(container.join("below")).unwrap();
        assert!(!tree.refresh(now).0, "no immediate walk");
        assert!(tree.refresh(soon).0, "a walk after the pause");
        assert_eq!(tree.candidates()[0].below.len(), 1);
        std::fs::remove_dir(container.join("below")).unwrap();
        std::fs::create_dir(folder.path().join("docker").join(id('b'))).unwrap();
        assert!(tree.refresh(soon).0, "another container is found at once");
        assert_eq!(tree.candidates().len(), 2);
        assert!(tree.candidates()[0].below.is_empty());
        std::fs::remove_dir(&container).unwrap();
        assert!(tree.refresh(soon).0, "its removal is found at once");
    }
}
