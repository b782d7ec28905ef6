//! The cgroup tree: which hierarchy has the memory controller, and which of its cgroups are containers.
//!
//! The tree is walked when inotify says that a cgroup was made or removed, and every [`RESCAN`] in case it did not: on
//! an idle host a cycle costs one read of an empty queue. Where no more watches can be had, every cycle walks.
//!
//! Not here: names. Without a runtime a container is known by its id alone.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::inotify;

use super::ContainerId;
use crate::clock::Moment;
use crate::host::{Dir, KernelFile, ReadError, Roots, take_notifications};
use crate::parse::container_id;

/// The tree is walked at least so often.
const RESCAN: Duration = Duration::from_secs(10);
/// A tree deeper or larger than this is not followed further: a container may make cgroups of its own.
const DEEPEST: usize = 32;
const MOST: usize = 50_000;

/// Which cgroup interface the memory controller is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// `memory.usage_in_bytes` and its kin.
    V1,
    /// `memory.current` and its kin.
    V2,
}

impl Version {
    /// As a label value.
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
    /// Its interface.
    pub version: Version,
    /// Where its root cgroup is mounted.
    pub root: PathBuf,
}

/// There is no usable memory controller.
#[derive(Debug, thiserror::Error)]
pub enum NoHierarchy {
    /// Nothing like a cgroup file system is there.
    #[error("no cgroup file system at {0}: mount the host's there or point --path.cgroupfs at it")]
    NotMounted(PathBuf),
    /// cgroups are there, without memory.
    #[error(
        "the cgroups at {0} have no memory controller: boot with cgroup_enable=memory, or enable it in cgroup.subtree_control"
    )]
    NoMemory(PathBuf),
}

impl Hierarchy {
    /// Finds the memory controller below `roots.cgroup`.
    ///
    /// On hybrid hosts v2 is mounted too (at `unified`), without the memory controller: then v1 is the one.
    ///
    /// # Errors
    /// [`NoHierarchy`], with what to do.
    pub fn detect(roots: &Roots) -> Result<Self, NoHierarchy> {
        let top = &roots.cgroup;
        let v2 = |root: PathBuf| has_controller(&root).then_some(Self { version: Version::V2, root });
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

fn has_controller(root: &Path) -> bool {
    let mut buffer = Vec::new();
    KernelFile::open(&root.join("cgroup.controllers"))
        .and_then(|file| {
            file.read_once(&mut buffer)
                .map(|text| text.split(u8::is_ascii_whitespace).any(|c| c == b"memory"))
        })
        .unwrap_or(false)
}

/// A cgroup whose name carries a container id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The id in its name.
    pub id: ContainerId,
    /// Who made it, as far as the name tells.
    pub runtime: &'static str,
    /// Relative to the root of the hierarchy.
    pub path: PathBuf,
    /// Its inode; `None` if it was removed during the walk.
    pub inode: Option<u64>,
    /// Cgroups below it.
    pub below: Vec<PathBuf>,
    /// Index of the candidate that it lies in, for a container in a container.
    pub inside: Option<usize>,
}

/// The walked tree.
#[derive(Debug)]
pub struct Tree {
    root: PathBuf,
    watch: Option<OwnedFd>,
    walked: Option<Moment>,
    truncated: bool,
    candidates: Vec<Candidate>,
    listing: Vec<u8>,
}

impl Tree {
    /// A tree that was not walked yet.
    pub fn new(hierarchy: &Hierarchy) -> Self {
        let watch = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC).ok();
        Self {
            root: hierarchy.root.clone(),
            watch,
            walked: None,
            truncated: false,
            candidates: vec![],
            listing: vec![],
        }
    }

    /// Walks the tree if it may have changed. True if the candidates changed.
    ///
    /// The error is the first part of the tree that could not be listed, for counting: the candidates are of use all
    /// the same. If it is the root, they are those of the walk before.
    pub fn refresh(&mut self, now: Moment) -> (bool, Result<(), ReadError>) {
        let stale = self.walked.is_none_or(|walked| now.since(walked) >= RESCAN);
        if !self.changed() && !stale {
            return (false, Ok(()));
        }
        let mut walk = Walk::default();
        if let Err(error) = self.walk(PathBuf::new(), None, 0, &mut walk) {
            self.walked = None; // the notifications are used up: the next cycle walks again
            let vanished = error.is_gone() && !self.candidates.is_empty();
            if vanished {
                self.candidates.clear();
            }
            return (vanished, Err(error));
        }
        let truncated = walk.seen >= MOST;
        if truncated && !self.truncated {
            tracing::warn!(
                limit = MOST,
                "the cgroup tree has more cgroups than are followed; some containers are not seen"
            );
        }
        self.truncated = truncated;
        self.walked = (!walk.again).then_some(now);
        let changed = self.candidates != walk.candidates;
        self.candidates = walk.candidates;
        (changed, walk.failed.map_or(Ok(()), Err))
    }

    /// The containers found by the last walk, outer before inner.
    pub fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }

    /// Drains the notifications. True if there were any, or if there can be none.
    fn changed(&self) -> bool {
        self.watch.as_ref().is_none_or(take_notifications)
    }

    fn walk(
        &mut self,
        path: PathBuf,
        inside: Option<usize>,
        depth: usize,
        walk: &mut Walk,
    ) -> Result<(), ReadError> {
        let full = self.root.join(&path);
        // watch first, then list: what is made in between is either listed or notified
        if let Some(watch) = &self.watch {
            use inotify::WatchFlags as Flags;
            let flags = Flags::CREATE | Flags::DELETE | Flags::MOVE | Flags::ONLYDIR;
            if inotify::add_watch(watch, &full, flags).is_err_and(|errno| errno == rustix::io::Errno::NOSPC) {
                tracing::warn!(
                    "fs.inotify.max_user_watches is used up; the cgroup tree is walked in every cycle"
                );
                self.watch = None;
            }
        }
        let mut children = Vec::new();
        let dir = Dir::open(&full)?;
        dir.for_each(&mut self.listing, |name, is_dir| {
            if is_dir {
                children.push(path.join(name));
            }
        })?;
        drop(dir);
        children.sort();
        for child in children {
            walk.seen += 1;
            if walk.seen >= MOST || depth >= DEEPEST {
                break;
            }
            let inside = walk.note(&self.root, &child, inside);
            match self.walk(child, inside, depth + 1, walk) {
                Ok(()) => {}
                Err(error) if error.is_gone() => {}
                Err(error) => {
                    tracing::debug!(%error, "a cgroup could not be listed");
                    // what a container does below itself shall not make every cycle walk, nor what is forbidden for good
                    walk.again |= inside.is_none() && error.fault_reason() != Some("permission");
                    walk.failed.get_or_insert(error);
                }
            }
        }
        Ok(())
    }
}

/// What one walk has found.
#[derive(Debug, Default)]
struct Walk {
    candidates: Vec<Candidate>,
    seen: usize,
    /// The first cgroup that could not be listed.
    failed: Option<ReadError>,
    /// The next cycle shall try again.
    again: bool,
}

impl Walk {
    /// Enters one cgroup into the books; returns the candidate that it and all below it lie in.
    fn note(&mut self, root: &Path, path: &Path, inside: Option<usize>) -> Option<usize> {
        let mut outer = inside;
        while let Some(index) = outer {
            self.candidates[index].below.push(path.to_path_buf());
            outer = self.candidates[index].inside;
        }
        let component = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let parent =
            path.parent().and_then(Path::file_name).and_then(|name| name.to_str()).unwrap_or_default();
        let Some(found) = container_id::in_component(component, parent) else { return inside };
        self.candidates.push(Candidate {
            id: ContainerId::new(found.id),
            runtime: found.runtime,
            path: path.to_path_buf(),
            inode: rustix::fs::stat(root.join(path)).ok().map(|stat| stat.st_ino),
            below: vec![],
            inside,
        });
        Some(self.candidates.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    fn tree_at(root: &Path) -> Tree {
        Tree::new(&Hierarchy { version: Version::V2, root: root.to_path_buf() })
    }

    fn id(digit: char) -> String {
        digit.to_string().repeat(64)
    }

    #[test]
    fn a_root_that_cannot_be_listed_keeps_what_was_known_and_is_tried_in_the_next_cycle() {
        let folder = tempfile::tempdir().unwrap();
        let (root, away) = (folder.path().join("cgroup"), folder.path().join("away"));
        std::fs::create_dir_all(root.join("docker").join(id('a'))).unwrap();
        let mut tree = tree_at(&root);
        let now = Moment::now();
        assert!(matches!(tree.refresh(now), (true, Ok(()))));
        std::fs::create_dir(root.join("docker").join(id('b'))).unwrap(); // a notification
        std::fs::rename(&root, &away).unwrap();
        std::fs::write(&root, "no folder").unwrap();
        let (changed, walked) = tree.refresh(now);
        assert!(!changed && walked.is_err_and(|error| error.fault_reason() == Some("io")));
        assert_eq!(tree.candidates().len(), 1);
        std::fs::remove_file(&root).unwrap();
        std::fs::rename(&away, &root).unwrap();
        assert!(matches!(tree.refresh(now), (true, Ok(()))));
        assert_eq!(tree.candidates().len(), 2);
        assert!(matches!(tree.refresh(now), (false, Ok(()))));
    }

    #[test]
    fn a_part_that_cannot_be_listed_is_told_and_the_rest_is_there() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("z").join(id('a'))).unwrap();
        // a path that is too long for the kernel, which only relative calls can make
        let mut at: OwnedFd = std::fs::File::open(folder.path()).unwrap().into();
        for _ in 0..20 {
            let name = "n".repeat(250);
            rustix::fs::mkdirat(at.as_fd(), &name, rustix::fs::Mode::RWXU).unwrap();
            let flags = rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
            at = rustix::fs::openat(at.as_fd(), &name, flags, rustix::fs::Mode::empty()).unwrap();
        }
        let mut tree = tree_at(folder.path());
        let now = Moment::now();
        let (changed, walked) = tree.refresh(now);
        assert!(changed && walked.is_err_and(|error| error.fault_reason() == Some("io")));
        assert_eq!(tree.candidates().len(), 1);
        assert!(tree.refresh(now).1.is_err(), "tried again");
    }
}
