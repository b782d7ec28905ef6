//! Whose a cgroup path is. Pure.

use crate::discover::ContainerId;
use crate::parse::container_id;

/// What a path tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A container's.
    Container(ContainerId),
    /// Outside containers.
    Host,
    /// It cannot be told.
    Unknown,
}

/// Whose the victim is, by all the ways in which the kernel's line can be read.
///
/// A line that can be read in several ways names a container only if they all lead to that one or to none: whoever may
/// choose a cgroup's name shall not put the blame on a neighbour. Of several ids in a path the innermost counts that is
/// `placed` there: whose own cgroup is known to lie on this very path. Else the outermost does: a container may make
/// cgroups below its own, and give them a neighbour's id.
pub fn of_paths<'a>(
    paths: impl IntoIterator<Item = &'a str>,
    placed: impl Fn(&ContainerId, &str) -> bool,
) -> Place {
    let mut place = Place::Unknown;
    for path in paths {
        let ids: Vec<_> = container_id::in_path(path).map(|found| ContainerId::new(found.id)).collect();
        let chosen = ids.iter().skip(1).rev().find(|id| placed(id, path)).or(ids.first());
        place = match (place, chosen) {
            (Place::Unknown | Place::Host, Some(id)) => Place::Container(id.clone()),
            (Place::Container(one), Some(other)) if one != *other => return Place::Unknown,
            (Place::Unknown, None) => Place::Host,
            (place, _) => place,
        };
    }
    place
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_its_container_and_an_unclear_line_nobody() {
        let (a, b) = ("a".repeat(64), "b".repeat(64));
        let container = |id: &str| Place::Container(ContainerId::new(id));
        let inner = format!("/docker/{a}/docker/{b}");
        let (of_a, of_b) = (format!("/docker/{a}"), format!("/docker/{b}/x"));
        assert_eq!(of_paths([&*of_a], |_, _| false), container(&a));
        assert_eq!(of_paths([&*inner], |id, _| id.as_str() == a), container(&a));
        assert_eq!(of_paths([&*inner], |_, _| true), container(&b));
        assert_eq!(of_paths([&*inner], |_, _| false), container(&a));
        assert_eq!(of_paths(["/system.slice/ssh.service"], |_, _| true), Place::Host);
        assert_eq!(of_paths([&*of_a, &*of_b], |_, _| true), Place::Unknown);
        assert_eq!(of_paths([&*of_a, "/docker/x,task=y"], |_, _| true), container(&a));
        assert_eq!(of_paths([], |_, _| true), Place::Unknown);
    }
}
