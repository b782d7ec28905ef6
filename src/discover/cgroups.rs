//! The cgroup tree: which hierarchy has the memory controller, and which of its cgroups are containers.
//!
//! The tree is walked when inotify says that a cgroup was made or removed, and every [`RESCAN`] in case it did not: on
//! an idle host a cycle costs one read of an empty queue. Where no more watches can be had, every cycle walks.
//!
//! Not here: names. Without a runtime a container is known by its id alone.

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::inotify;

use super::ContainerId;
use crate::clock::Moment;
use crate::host::{Dir, KernelFile, ReadError, Roots};
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
    /// # Errors
    /// The root itself cannot be listed.
    pub fn refresh(&mut self, now: Moment) -> Result<bool, ReadError> {
        let stale = self.walked.is_none_or(|walked| now.since(walked) >= RESCAN);
        if !self.changed() && !stale {
            return Ok(false);
        }
        let before = std::mem::take(&mut self.candidates);
        self.truncated = false;
        let mut seen = 0;
        self.walk(PathBuf::new(), None, 0, &mut seen)?;
        if seen >= MOST && !self.truncated {
            self.truncated = true;
            tracing::warn!(
                limit = MOST,
                "the cgroup tree has more cgroups than are followed; some containers are not seen"
            );
        }
        self.walked = Some(now);
        Ok(before != self.candidates)
    }

    /// The containers found by the last walk, outer before inner.
    pub fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }

    /// Drains the notifications. True if there were any, or if there can be none.
    fn changed(&self) -> bool {
        let Some(watch) = &self.watch else { return true };
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = inotify::Reader::new(watch, &mut buffer);
        let mut any = false;
        while reader.next().is_ok() {
            any = true;
        }
        any
    }

    fn walk(
        &mut self,
        path: PathBuf,
        inside: Option<usize>,
        depth: usize,
        seen: &mut usize,
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
            *seen += 1;
            if *seen >= MOST || depth >= DEEPEST {
                break;
            }
            let inside = self.note(&child, inside);
            match self.walk(child, inside, depth + 1, seen) {
                Ok(()) => {}
                Err(error) if error.is_gone() => {}
                Err(error) => tracing::debug!(%error, "a cgroup could not be listed"),
            }
        }
        Ok(())
    }

    /// Enters one cgroup into the books; returns the candidate that it and all below it lie in.
    fn note(&mut self, path: &Path, inside: Option<usize>) -> Option<usize> {
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
            inode: rustix::fs::stat(self.root.join(path)).ok().map(|stat| stat.st_ino),
            below: vec![],
            inside,
        });
        Some(self.candidates.len() - 1)
    }
}
