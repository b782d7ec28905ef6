//! Reads who can have made a cgroup: the owners of the cgroups above it.

use std::path::{Path, PathBuf};

use super::path_owner::CgroupMaker;
use crate::parse::container_id;

/// The owners of the cgroups of a hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupOwners {
    root: PathBuf,
}

impl CgroupOwners {
    /// Creates the reader for a hierarchy with this root.
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_path_buf() }
    }

    /// Returns who can have made the cgroup of the outermost container in a path from the root of the tree. The cgroup itself may be gone,
    /// and belong to anyone: a runtime gives it to the user of the container's user namespace.
    ///
    /// By the names alone where the tree shows nothing: for a path from elsewhere, and where no hierarchy is mounted.
    pub fn maker(&self, path: &str) -> CgroupMaker {
        let by_names = || CgroupMaker::by_names(path);
        let Some((above, _)) = container_id::outermost(path) else { return CgroupMaker::Unknown };
        let Some(root) = owner(&self.root).filter(|_| !above.contains(&"..")) else { return by_names() };
        let (mut maker, mut full) = (CgroupMaker::Root, self.root.clone());
        for (depth, name) in above.iter().enumerate() {
            full.push(name);
            maker = match owner(&full) {
                Some(uid) => maker.below_name(name).below_owner(uid, root),
                None if depth == 0 => return by_names(),
                None => maker.below_name(name).below_gone(name),
            };
        }
        maker
    }
}

/// Returns the owner of a directory; `None` if there is none.
fn owner(path: &Path) -> Option<u32> {
    rustix::fs::stat(path).ok().map(|stat| stat.st_uid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gone_cgroup_is_roots_where_root_alone_makes_its_parents() {
        let folder = tempfile::tempdir().unwrap();
        let id = "a".repeat(64);
        for path in [
            "docker",
            "kubepods/burstable",
            "system.slice",
            "parent",
            "slurm/uid_7",
            "user.slice/user-7.slice",
        ] {
            std::fs::create_dir_all(folder.path().join(path)).unwrap();
        }
        let owners = CgroupOwners::new(folder.path());
        for (path, maker) in [
            (format!("/docker/{id}/worker"), CgroupMaker::Root),
            (format!("/parent/{id}"), CgroupMaker::Root),
            (format!("/kubepods/burstable/podaaaa-bbbb/{id}"), CgroupMaker::Root),
            (format!("/system.slice/any.slice/docker-{id}.scope"), CgroupMaker::Root),
            (format!("/system.slice/any.service/docker/{id}"), CgroupMaker::Unknown),
            (format!("/slurm/uid_7/job_1/step_0/task_0/docker/{id}"), CgroupMaker::Unknown),
            (format!("/user.slice/user-7.slice/user@7.service/x/{id}"), CgroupMaker::User(7)),
            (format!("/elsewhere/docker/{id}"), CgroupMaker::Root),
            (format!("/elsewhere/{id}"), CgroupMaker::Unknown),
            (format!("/../docker/{id}"), CgroupMaker::Root),
            (format!("/../slurm/uid_7/job_1/{id}"), CgroupMaker::Unknown),
        ] {
            assert_eq!(owners.maker(&path), maker, "{path}");
        }
    }

    /// Only root can give a directory away; the real tests run as root.
    #[test]
    fn cgroup_below_that_of_a_user_is_not_roots() {
        let folder = tempfile::tempdir().unwrap();
        let id = "a".repeat(64);
        let (of_user, container) = (folder.path().join("lab"), folder.path().join("docker").join(&id));
        std::fs::create_dir_all(of_user.join("docker").join(&id)).unwrap();
        std::fs::create_dir_all(&container).unwrap();
        for given in [&of_user, &container] {
            if std::os::unix::fs::chown(given, Some(3001), None).is_err() {
                return eprintln!("SKIPPED: only root can change the owner of a directory");
            }
        }
        let owners = CgroupOwners::new(folder.path());
        assert_eq!(owners.maker(&format!("/lab/docker/{id}")), CgroupMaker::User(3001));
        assert_eq!(owners.maker(&format!("/docker/{id}")), CgroupMaker::Root, "of a user namespace");
    }
}
