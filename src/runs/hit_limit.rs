//! The memory limit at which a process was killed, and where its cgroup is, seen from the container. Pure.

use serde::{Deserialize, Serialize};

use crate::events::{Kill, OomScope};

/// Where the limit that was hit is, relative to the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitPosition {
    /// The container's own cgroup.
    Own,
    /// A cgroup inside the container.
    Inside,
    /// A cgroup above it, such as that of a pod, a slice or a job: other processes may have used it up.
    Above,
    /// The kernel's record does not name it.
    Unnamed,
}

/// The limit at which a process of a run was killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HitLimit {
    /// Where it is.
    pub position: LimitPosition,
    /// Its bytes, where they are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

impl LimitPosition {
    /// Returns where the limit that a kill hit is; see [`LimitPosition::of`].
    pub fn of_kill(kill: &Kill, container_id: &str, limits: (Option<u64>, Option<u64>)) -> Self {
        match Self::of(&kill.limit_cgroup, container_id, limits) {
            Self::Above if kill.alone_in_pod && is_own_limit(kill, limits) => Self::Own,
            position => position,
        }
    }

    /// Returns where a cgroup is, relative to the container with this id. `limits` are the last known own limit of the container and the
    /// lowest one on the path to the root cgroup.
    pub fn of(limit_cgroup: &str, container_id: &str, limits: (Option<u64>, Option<u64>)) -> Self {
        if limit_cgroup.is_empty() {
            // the container has no limit of its own: it was one above it
            return if limits.0.is_none() && limits.1.is_some() { Self::Above } else { Self::Unnamed };
        }
        let mut parts = limit_cgroup.split('/').filter(|part| !part.is_empty()).rev();
        let is_it = |part: &str| !container_id.is_empty() && part.contains(container_id);
        // crun makes a cgroup `container` inside that of Podman's container, and nothing else is there
        let inner = parts.clone().next().filter(|part| *part == "container");
        match parts.next() {
            Some(part) if is_it(part) => Self::Own,
            Some(_) if inner.is_some() && parts.clone().next().is_some_and(is_it) => Self::Own,
            _ if parts.any(is_it) => Self::Inside,
            _ if container_id.is_empty() => Self::Unnamed,
            _ => Self::Above,
        }
    }
}

/// Returns whether the limit of a pod may be that of its only container: a pod can have one of its own.
fn is_own_limit(kill: &Kill, (own, effective): (Option<u64>, Option<u64>)) -> bool {
    let reported = kill.report.as_ref().filter(|report| !report.host).and_then(|report| report.limit_bytes);
    match (own, reported) {
        (Some(own), Some(reported)) => own == reported,
        (Some(_), None) => true,
        // without a sample nothing contradicts it
        (None, _) => effective.is_none(),
    }
}

impl HitLimit {
    /// Returns the limit that this kill of a process of a container hit; `None` if the host ran out of memory. `limits` as for
    /// [`LimitPosition::of`].
    pub fn of(kill: &Kill, container_id: &str, limits: (Option<u64>, Option<u64>)) -> Option<Self> {
        if kill.scope == OomScope::Host {
            return None;
        }
        let position = LimitPosition::of_kill(kill, container_id, limits);
        Some(Self { position, bytes: limit_bytes(kill, position, limits.0) })
    }
}

/// Returns the limit that a kill hit, if known. The ledger stores the lowest limit on the path; for a cgroup above the container
/// that is the container's own limit if that is lower.
pub fn limit_bytes(kill: &Kill, position: LimitPosition, own: Option<u64>) -> Option<u64> {
    if let Some(limit) =
        kill.report.as_ref().filter(|report| !report.host).and_then(|report| report.limit_bytes)
    {
        return Some(limit); // the kernel's own figure
    }
    let is_foreign = position == LimitPosition::Above && own.is_some() && own == kill.limit_bytes;
    kill.limit_bytes.filter(|_| !is_foreign)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn position_is_that_of_the_cgroup_seen_from_the_container() {
        let id = "3f2a1b4c5d6e";
        for (cgroup, position) in [
            ("/docker/3f2a1b4c5d6e", LimitPosition::Own),
            ("/kubepods.slice/pod7.slice/cri-3f2a1b4c5d6e.scope", LimitPosition::Own),
            ("/machine.slice/libpod-3f2a1b4c5d6e.scope/container", LimitPosition::Own),
            ("/docker/3f2a1b4c5d6e/inner", LimitPosition::Inside),
            ("/kubepods.slice/pod7.slice", LimitPosition::Above),
        ] {
            assert_eq!(LimitPosition::of(cgroup, id, (Some(1), Some(1))), position, "{cgroup}");
        }
        assert_eq!(LimitPosition::of("", id, (None, Some(1))), LimitPosition::Above);
        assert_eq!(LimitPosition::of("", id, (Some(2), Some(1))), LimitPosition::Unnamed);
    }
}
