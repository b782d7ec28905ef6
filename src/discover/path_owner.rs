//! Finds the container of a cgroup path. Pure.
//!
//! A name proves nothing: whoever may make cgroups can name one after a container. So an id in a path is a container's if its
//! runtime says that this is its cgroup, or if root alone can have made a cgroup there ([`CgroupMaker`]). A user's engine, and a
//! user's run of `memledger run`, may also be in cgroups of that user.

use super::{ContainerId, RuntimeKind};
use crate::parse::container_id;

/// Who alone can have made the cgroups in a place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CgroupMaker {
    /// Root.
    #[default]
    Root,
    /// Root, and this user.
    User(u32),
    /// Root, and a user: the slice of all users.
    AnyUser,
    /// Not known: below a job of Slurm, below cgroups of several users, or below one that is gone.
    Unknown,
}

impl CgroupMaker {
    /// Returns who can have made the outermost container's cgroup in a path, by the names above it: for paths of which nothing else is
    /// known. Only a place where a runtime makes its cgroups is root's.
    pub fn by_names(path: &str) -> Self {
        let Some((above, found)) = container_id::outermost(path) else { return Self::Unknown };
        let is_place_of_runtime =
            found.runtime != RuntimeKind::Unknown || above.iter().any(|name| is_of_kubelet(name));
        let maker = above.iter().fold(Self::Root, |maker, name| maker.below_name(name));
        if is_place_of_runtime || maker != Self::Root { maker } else { Self::Unknown }
    }

    /// Returns who can make cgroups in a cgroup with this name that was made by `self`.
    pub fn below_name(self, name: &str) -> Self {
        let user = name.strip_prefix("user-").or_else(|| name.strip_prefix("user@"));
        let uid = user.and_then(|rest| rest.split_once('.')?.0.parse().ok());
        match uid {
            _ if is_of_jobs(name) => Self::Unknown,
            Some(uid) => self.below_user(uid),
            None if name == "user.slice" && self == Self::Root => Self::AnyUser,
            None => self,
        }
    }

    /// Returns who can make cgroups in a cgroup with this owner that was made by `self`. `root`: the owner of the root cgroup.
    pub fn below_owner(self, uid: u32, root: u32) -> Self {
        if uid == root { self } else { self.below_user(uid) }
    }

    /// Returns who can have made cgroups in a cgroup that is gone, with this name. Root alone makes slices, and the parents that
    /// runtimes use.
    pub fn below_gone(self, name: &str) -> Self {
        let is_roots = name.ends_with(".slice")
            || matches!(name, "docker" | "libpod_parent" | "memledger")
            || is_of_kubelet(name)
            || name.strip_prefix("pod").is_some_and(is_pod_uid);
        if self == Self::Root && !is_roots { Self::Unknown } else { self }
    }

    fn below_user(self, uid: u32) -> Self {
        match self {
            _ if uid == 0 => self,
            Self::Root | Self::AnyUser => Self::User(uid),
            Self::User(known) if known == uid => self,
            Self::User(_) | Self::Unknown => Self::Unknown,
        }
    }

    /// Returns whether root or this user alone can have made a cgroup in the place.
    pub fn is_root_or(self, user: Option<u32>) -> bool {
        self == Self::Root || user.is_some_and(|uid| self == Self::User(uid))
    }
}

/// Slurm's cgroups: a job's user owns those of its steps (v1). `job_N` may also stand below a scope with any name.
fn is_of_jobs(name: &str) -> bool {
    let is_numbered = |prefix| {
        name.strip_prefix(prefix).is_some_and(|number: &str| {
            !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
        })
    };
    name == "slurm" || name.starts_with("slurm_") || name.ends_with("slurmstepd.scope") || is_numbered("job_")
}

/// A UID, or of a static pod the 32 digits of its manifest's hash.
fn is_pod_uid(text: &str) -> bool {
    text.contains('-') || text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// `kubepods`, `kubepods-burstable.slice`, `kubelet-kubepods-pod1.slice`.
pub(super) fn is_of_kubelet(name: &str) -> bool {
    name.contains("kubepods")
}

/// What the runtimes say of a container and a path with its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathClaim {
    /// Its cgroup is on this path.
    Own,
    /// It may be on this path. `user`: the user whose engine or run it is; `None` if no runtime knows it.
    Possible {
        /// Its user.
        user: Option<u32>,
    },
    /// Its cgroup is elsewhere.
    Elsewhere,
}

/// The owner of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathOwner {
    /// A container.
    Container(ContainerId),
    /// No container.
    Host,
    /// No container, unless a runtime says that it is the one of an id in the path: anyone can have made that cgroup.
    Unproven,
    /// Ambiguous.
    Unknown,
}

/// Returns the owner of a cgroup path, considering all ways in which the kernel's line with it can be read.
///
/// An ambiguous line identifies a container only if every reading leads to that container or to none: whoever can
/// choose a cgroup name must not be able to blame another container. Of several ids in a path, the innermost counts
/// whose own cgroup is known to be on this very path. Otherwise the outermost counts, if it is where root or its user alone can have
/// made it (`maker`): a container can create cgroups below its own and name them after another container.
pub fn owner_of_paths<'a>(
    paths: impl IntoIterator<Item = &'a str>,
    claim: impl Fn(&ContainerId, &str) -> PathClaim,
    maker: impl Fn(&str) -> CgroupMaker,
) -> PathOwner {
    let mut owner = PathOwner::Unknown;
    for path in paths {
        owner = match (owner, owner_of_path(path, &claim, &maker)) {
            (PathOwner::Container(one), PathOwner::Container(other)) if one != other => {
                return PathOwner::Unknown;
            }
            (PathOwner::Container(id), _) | (_, PathOwner::Container(id)) => PathOwner::Container(id),
            (PathOwner::Unproven, _) | (_, PathOwner::Unproven) => PathOwner::Unproven,
            (_, found) => found,
        };
    }
    owner
}

fn owner_of_path(
    path: &str,
    claim: impl Fn(&ContainerId, &str) -> PathClaim,
    maker: impl Fn(&str) -> CgroupMaker,
) -> PathOwner {
    let ids: Vec<_> = container_id::in_path(path).map(|found| ContainerId::new(found.id)).collect();
    if let Some(own) = ids.iter().rev().find(|id| claim(id, path) == PathClaim::Own) {
        return PathOwner::Container(own.clone());
    }
    let Some(outermost) = ids.into_iter().next() else { return PathOwner::Host };
    let user = match claim(&outermost, path) {
        PathClaim::Possible { user } => container_id::user_of_run(outermost.as_str()).or(user),
        PathClaim::Own | PathClaim::Elsewhere => return PathOwner::Unproven,
    };
    match maker(path).is_root_or(user) {
        true => PathOwner::Container(outermost),
        false => PathOwner::Unproven,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POSSIBLE: PathClaim = PathClaim::Possible { user: None };

    #[test]
    fn path_names_its_container_and_ambiguous_line_names_none() {
        let (a, b) = ("a".repeat(64), "b".repeat(64));
        let container = |id: &str| PathOwner::Container(ContainerId::new(id));
        let inner = format!("/docker/{a}/docker/{b}");
        let (of_a, of_b) = (format!("/docker/{a}"), format!("/docker/{b}/x"));
        let owner = |paths: &[&str], own: &str| {
            let claim =
                |id: &ContainerId, _: &str| if own.contains(id.as_str()) { PathClaim::Own } else { POSSIBLE };
            owner_of_paths(paths.iter().copied(), claim, CgroupMaker::by_names)
        };
        let all = format!("{a}{b}");
        assert_eq!(owner(&[&*of_a], ""), container(&a));
        assert_eq!(owner(&[&*inner], &a), container(&a));
        assert_eq!(owner(&[&*inner], &all), container(&b));
        assert_eq!(owner(&[&*inner], ""), container(&a));
        assert_eq!(owner(&["/system.slice/ssh.service"], &all), PathOwner::Host);
        assert_eq!(owner(&[&*of_a, &*of_b], &all), PathOwner::Unknown);
        assert_eq!(owner(&[&*of_a, "/docker/x,task=y"], ""), container(&a));
        assert_eq!(owner(&["/docker/x,task=y", &*of_a], ""), container(&a));
        assert_eq!(owner(&[], &all), PathOwner::Unknown);
    }

    #[test]
    fn id_counts_by_its_name_where_root_alone_makes_cgroups() {
        let id = "a".repeat(64);
        for (path, maker) in [
            (format!("/docker/{id}"), CgroupMaker::Root),
            (format!("/a/b/docker/{id}/worker"), CgroupMaker::Root),
            (format!("/system.slice/docker-{id}.scope"), CgroupMaker::Root),
            (format!("/machine.slice/libpod-{id}.scope/container"), CgroupMaker::Root),
            (format!("/kubepods/burstable/pod1-2/{id}"), CgroupMaker::Root),
            (format!("/kubelet.slice/kubelet-kubepods.slice/x/{id}"), CgroupMaker::Root),
            (format!("/kubepods-pod1.slice:cri-containerd:{id}"), CgroupMaker::Root),
            (format!("/default/{id}"), CgroupMaker::Unknown),
            (format!("/slurm/uid_7/job_1/step_0/task_0/{id}"), CgroupMaker::Unknown),
            (format!("/slurm_vm/uid_7/job_1/step_0/task_0/docker/{id}"), CgroupMaker::Unknown),
            (
                format!("/system.slice/n_slurmstepd.scope/sEDHM8HKHTXY00/x/docker-{id}.scope"),
                CgroupMaker::Unknown,
            ),
            (format!("/any/job_12/docker/{id}"), CgroupMaker::Unknown),
            (format!("/user.slice/docker-{id}.scope"), CgroupMaker::AnyUser),
            (
                format!("/user.slice/user-7.slice/user@7.service/app.slice/docker-{id}.scope"),
                CgroupMaker::User(7),
            ),
            (format!("/user.slice/user-7.slice/user@8.service/docker-{id}.scope"), CgroupMaker::Unknown),
            ("/docker".to_owned(), CgroupMaker::Unknown),
        ] {
            assert_eq!(CgroupMaker::by_names(&path), maker, "{path}");
        }
    }

    #[test]
    fn user_can_name_only_his_own_containers() {
        let id = "a".repeat(64);
        let path = format!("/user.slice/user-7.slice/user@7.service/docker-{id}.scope");
        let owner = |claim| owner_of_paths([&*path], |_, _| claim, CgroupMaker::by_names);
        let its = PathOwner::Container(ContainerId::new(&id));
        assert_eq!(owner(PathClaim::Own), its);
        assert_eq!(owner(PathClaim::Possible { user: Some(7) }), its);
        for claim in [POSSIBLE, PathClaim::Possible { user: Some(0) }, PathClaim::Elsewhere] {
            assert_eq!(owner(claim), PathOwner::Unproven);
        }
        let run_of = |uid: u32| format!("{}{uid:08x}{}", "1".repeat(48), container_id::RUN_ID_SUFFIX);
        for (uid, is_his) in [(7, true), (8, false), (0, false)] {
            let path =
                format!("/user.slice/user-7.slice/user@7.service/app.slice/memledger-{}.scope", run_of(uid));
            let owner = owner_of_paths([&*path], |_, _| POSSIBLE, CgroupMaker::by_names);
            assert_eq!(owner != PathOwner::Unproven, is_his, "{owner:?}");
        }
    }
}
