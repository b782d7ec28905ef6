//! How the paths in `/proc/PID/cgroup` are to be read: they begin at the root of memledger's own cgroup namespace.
//!
//! In the host's namespace that is the root of the tree, and a path is the path. In one of its own (any pod, and Docker on
//! cgroup v2) the processes outside show as `/../../system.slice/ssh.service`. Where its own root lies in the tree is told
//! by nobody; it is found by the cgroup of the tree that has memledger in its `cgroup.procs`. That needs the host's cgroups
//! mounted, and the host's pid namespace.

use std::path::{Component, Path, PathBuf};

use crate::discover::{Hierarchy, Version};
use crate::host::{Dir, KernelFile, ReadError, Roots};
use crate::parse::process::cgroup_path;
use crate::parse::{lines, number};

/// A tree deeper than this is not searched further.
const DEEPEST: usize = 32;

/// Where the paths begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Namespace {
    /// At the root of the tree.
    Host,
    /// At this cgroup, which is memledger's own root.
    Own(PathBuf),
    /// Somewhere below the root of the tree.
    Unknown,
}

impl Namespace {
    /// Looks at the first process of the host, and for memledger in the tree.
    ///
    /// # Errors
    /// Nothing is known of the first process.
    pub fn detect(roots: &Roots, hierarchy: Option<&Hierarchy>) -> Result<Self, ReadError> {
        let first = read(&roots.process(1).join("cgroup"))?;
        if !first.windows(4).any(|window| window == b":/..") {
            return Ok(Namespace::Host);
        }
        Ok(hierarchy
            .and_then(|hierarchy| own_root(roots, hierarchy))
            .map_or(Namespace::Unknown, Namespace::Own))
    }

    /// A path of `/proc/PID/cgroup` from the root of the tree; `None` where that cannot be told.
    pub fn absolute(&self, path: &str) -> Option<String> {
        let root = match self {
            Namespace::Host => return Some(path.to_owned()),
            Namespace::Own(root) => root,
            Namespace::Unknown => return None,
        };
        let mut parts: Vec<&str> = names(root)?;
        for part in path.split('/').filter(|part| !part.is_empty()) {
            if part == ".." { parts.pop().map(drop)? } else { parts.push(part) }
        }
        Some(format!("/{}", parts.join("/")))
    }
}

fn names(path: &Path) -> Option<Vec<&str>> {
    let names = path.components().filter(|part| matches!(part, Component::Normal(_)));
    names.map(|part| part.as_os_str().to_str()).collect()
}

fn read(path: &Path) -> Result<Vec<u8>, ReadError> {
    let mut buffer = Vec::new();
    KernelFile::open(path)?.read_all(&mut buffer).map(<[u8]>::to_vec)
}

/// The root of memledger's cgroup namespace, from the root of the tree.
fn own_root(roots: &Roots, hierarchy: &Hierarchy) -> Option<PathBuf> {
    let text = read(&roots.proc.join("self/cgroup")).ok()?;
    let inside = std::str::from_utf8(cgroup_path(&text, hierarchy.version == Version::V1)?).ok()?;
    let own = with_process(&hierarchy.root, Path::new(""), std::process::id().into(), 0)?;
    let inside = inside.trim_start_matches('/');
    let depth = Path::new(inside).components().count();
    own.ends_with(inside).then(|| own.ancestors().nth(depth).map(Path::to_path_buf)).flatten()
}

/// The cgroup of this process, relative to the root.
fn with_process(root: &Path, path: &Path, pid: u64, depth: usize) -> Option<PathBuf> {
    let dir = Dir::open(&root.join(path)).ok()?;
    let procs = read(&root.join(path).join("cgroup.procs")).unwrap_or_default();
    if lines(&procs).any(|line| number(line) == Some(pid)) {
        return Some(path.to_path_buf());
    }
    let mut children = Vec::new();
    let listed = dir.for_each(&mut Vec::new(), |name, is_dir| {
        if is_dir {
            children.push(path.join(name));
        }
    });
    if listed.is_err() || depth >= DEEPEST {
        return None;
    }
    children.iter().find_map(|child| with_process(root, child, pid, depth + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pid_that_was_cut_off_is_another_process_s() {
        let folder = tempfile::tempdir().unwrap();
        let found = |text: &str| {
            std::fs::write(folder.path().join("cgroup.procs"), text).unwrap();
            with_process(folder.path(), Path::new(""), 12, 0)
        };
        assert_eq!((found("7\n12\n"), found("7\n12")), (Some(PathBuf::new()), None));
    }

    #[test]
    fn paths_that_go_up_are_followed_from_the_own_root_and_never_above_the_tree() {
        let own = Namespace::Own("kubepods.slice/pod1.slice/c1.scope".into());
        for (path, wanted) in [
            ("/", Some("/kubepods.slice/pod1.slice/c1.scope")),
            ("/sub", Some("/kubepods.slice/pod1.slice/c1.scope/sub")),
            ("/../../../system.slice/ssh.service", Some("/system.slice/ssh.service")),
            ("/../../pod2.slice/c2.scope", Some("/kubepods.slice/pod2.slice/c2.scope")),
            ("/../../..", Some("/")),
            ("/../../../../x", None),
        ] {
            assert_eq!(own.absolute(path).as_deref(), wanted, "{path}");
        }
        assert_eq!(Namespace::Host.absolute("/a").as_deref(), Some("/a"));
        assert_eq!(Namespace::Unknown.absolute("/../a"), None);
    }
}
