//! Resolves the paths in `/proc/PID/cgroup`, which begin at the root of memledger's own cgroup namespace.
//!
//! In the host's cgroup namespace that is the root of the tree, and paths are absolute. In a namespace of its own (any
//! pod, and Docker on cgroup v2), processes outside have paths like `/../../system.slice/ssh.service`. The kernel does
//! not report where the namespace root lies in the tree; it is found by searching the tree for the cgroup whose
//! `cgroup.procs` contains memledger. That needs the host's cgroups mounted, and the host's pid namespace.

use std::path::{Component, Path, PathBuf};

use crate::discover::{Hierarchy, Version};
use crate::host::bounds::NAMES;
use crate::host::{Dir, HostPaths, KernelFile, ReadError};
use crate::parse::process::cgroup_path;
use crate::parse::{lines, number};

/// Maximum depth of the search.
const MAX_DEPTH: usize = 32;

/// Where the paths in `/proc/PID/cgroup` begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CgroupNamespace {
    /// At the root of the tree.
    Host,
    /// At this cgroup, the root of memledger's namespace.
    Own(PathBuf),
    /// At an unknown cgroup below the root of the tree.
    Unknown,
}

impl CgroupNamespace {
    /// Detects the namespace from the cgroup of process 1 and memledger's position in the tree.
    ///
    /// # Errors
    /// The cgroup of process 1 is unreadable.
    pub fn detect(host_paths: &HostPaths, hierarchy: Option<&Hierarchy>) -> Result<Self, ReadError> {
        let first = read(&host_paths.process(1).join("cgroup"))?;
        if !first.windows(4).any(|window| window == b":/..") {
            return Ok(CgroupNamespace::Host);
        }
        Ok(hierarchy
            .and_then(|hierarchy| own_root(host_paths, hierarchy))
            .map_or(CgroupNamespace::Unknown, CgroupNamespace::Own))
    }

    /// Converts a path of `/proc/PID/cgroup` to a path from the root of the tree. Returns `None` if the namespace is
    /// unknown.
    pub fn absolute(&self, path: &str) -> Option<String> {
        let root = match self {
            CgroupNamespace::Host => return Some(path.to_owned()),
            CgroupNamespace::Own(root) => root,
            CgroupNamespace::Unknown => return None,
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

/// Returns the root of memledger's cgroup namespace, relative to the root of the tree.
fn own_root(host_paths: &HostPaths, hierarchy: &Hierarchy) -> Option<PathBuf> {
    let text = read(&host_paths.proc.join("self/cgroup")).ok()?;
    let inside = std::str::from_utf8(cgroup_path(&text, hierarchy.version == Version::V1)?).ok()?;
    let own = find_process(&hierarchy.root, Path::new(""), std::process::id().into(), 0)?;
    let inside = inside.trim_start_matches('/');
    let depth = Path::new(inside).components().count();
    own.ends_with(inside).then(|| own.ancestors().nth(depth).map(Path::to_path_buf)).flatten()
}

/// Returns the cgroup of a process, relative to the root.
fn find_process(root: &Path, path: &Path, pid: u64, depth: usize) -> Option<PathBuf> {
    let dir = Dir::open(&root.join(path)).ok()?;
    let procs = read(&root.join(path).join("cgroup.procs")).unwrap_or_default();
    if lines(&procs).any(|line| number(line) == Some(pid)) {
        return Some(path.to_path_buf());
    }
    let mut children = Vec::new();
    let listed = dir.for_each(NAMES.max, &mut Vec::new(), |name, is_dir| {
        if is_dir {
            children.push(path.join(name));
        }
    });
    if listed.is_err() || depth >= MAX_DEPTH {
        return None;
    }
    children.iter().find_map(|child| find_process(root, child, pid, depth + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignores_truncated_last_pid() {
        let folder = tempfile::tempdir().unwrap();
        let found = |text: &str| {
            std::fs::write(folder.path().join("cgroup.procs"), text).unwrap();
            find_process(folder.path(), Path::new(""), 12, 0)
        };
        assert_eq!((found("7\n12\n"), found("7\n12")), (Some(PathBuf::new()), None));
    }

    #[test]
    fn resolves_parent_paths_and_never_leaves_the_tree() {
        let own = CgroupNamespace::Own("kubepods.slice/pod1.slice/c1.scope".into());
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
        assert_eq!(CgroupNamespace::Host.absolute("/a").as_deref(), Some("/a"));
        assert_eq!(CgroupNamespace::Unknown.absolute("/../a"), None);
    }
}
