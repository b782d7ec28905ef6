//! Finds the owner of a cgroup path. Pure.

use super::ContainerId;
use crate::parse::container_id;

/// The owner of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathOwner {
    /// A container.
    Container(ContainerId),
    /// No container.
    Host,
    /// Ambiguous.
    Unknown,
}

/// Returns the owner of a cgroup path, considering all ways in which the kernel's line with it can be read.
///
/// An ambiguous line identifies a container only if every reading leads to that container or to none: whoever can
/// choose a cgroup name must not be able to blame another container. Of several ids in a path, the innermost counts
/// whose own cgroup is known to be on this very path (`is_own_path`). Otherwise the outermost counts: a container can
/// create cgroups below its own and name them after another container.
pub fn owner_of_paths<'a>(
    paths: impl IntoIterator<Item = &'a str>,
    is_own_path: impl Fn(&ContainerId, &str) -> bool,
) -> PathOwner {
    let mut owner = PathOwner::Unknown;
    for path in paths {
        let ids: Vec<_> = container_id::in_path(path).map(|found| ContainerId::new(found.id)).collect();
        let chosen = ids.iter().skip(1).rev().find(|id| is_own_path(id, path)).or(ids.first());
        owner = match (owner, chosen) {
            (PathOwner::Unknown | PathOwner::Host, Some(id)) => PathOwner::Container(id.clone()),
            (PathOwner::Container(one), Some(other)) if one != *other => return PathOwner::Unknown,
            (PathOwner::Unknown, None) => PathOwner::Host,
            (owner, _) => owner,
        };
    }
    owner
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_names_its_container_and_ambiguous_line_names_none() {
        let (a, b) = ("a".repeat(64), "b".repeat(64));
        let container = |id: &str| PathOwner::Container(ContainerId::new(id));
        let inner = format!("/docker/{a}/docker/{b}");
        let (of_a, of_b) = (format!("/docker/{a}"), format!("/docker/{b}/x"));
        assert_eq!(owner_of_paths([&*of_a], |_, _| false), container(&a));
        assert_eq!(owner_of_paths([&*inner], |id, _| id.as_str() == a), container(&a));
        assert_eq!(owner_of_paths([&*inner], |_, _| true), container(&b));
        assert_eq!(owner_of_paths([&*inner], |_, _| false), container(&a));
        assert_eq!(owner_of_paths(["/system.slice/ssh.service"], |_, _| true), PathOwner::Host);
        assert_eq!(owner_of_paths([&*of_a, &*of_b], |_, _| true), PathOwner::Unknown);
        assert_eq!(owner_of_paths([&*of_a, "/docker/x,task=y"], |_, _| true), container(&a));
        assert_eq!(owner_of_paths([], |_, _| true), PathOwner::Unknown);
    }
}
