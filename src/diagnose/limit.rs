//! Which limit a kill hit, relative to the container, and who sets it.

use serde::Serialize;

use super::{RunSummary, last_sample};
use crate::events::{ContainerRef, Kill};
use crate::runs::hit_limit::{self, LimitPosition};

/// Returns which limit a kill in this container hit.
pub(super) fn limit_of<'a>(kill: &'a Kill, run: &RunSummary<'a>) -> LimitPosition {
    LimitPosition::of_kill(kill, &run.subject.container_id, own_and_effective(kill, run))
}

/// Returns the container's own limit and the lowest one on the path to the root cgroup, at the last sample.
fn own_and_effective<'a>(kill: &'a Kill, run: &RunSummary<'a>) -> (Option<u64>, Option<u64>) {
    let last = last_sample(run.before(Some(kill)));
    (last.and_then(|last| last.limit_bytes), last.and_then(|last| last.effective_limit_bytes))
}

/// Returns the path of the limit's cgroup as seen inside the container.
pub(super) fn inside<'a>(kill: &'a Kill, subject: &ContainerRef) -> &'a str {
    let id = &*subject.container_id;
    let at = kill.limit_cgroup.rfind(id).filter(|_| !id.is_empty());
    let below = at.and_then(|at| kill.limit_cgroup[at + id.len()..].find('/').map(|end| at + id.len() + end));
    &kill.limit_cgroup[below.unwrap_or(0)..]
}

/// Returns the limit that was hit, if known.
pub(super) fn limit_bytes<'a>(kill: &'a Kill, run: &RunSummary<'a>) -> Option<u64> {
    hit_limit::limit_bytes(kill, limit_of(kill, run), own_and_effective(kill, run).0)
}

/// Who sets the limits of a cgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitSetter {
    /// The kubelet, by the pod's specification.
    Kubernetes,
    /// systemd, of a unit.
    Systemd,
    /// The container engine.
    Engine,
    /// `memledger run`.
    Run,
    /// It is neither the container's own cgroup nor a unit, such as that of a job of Slurm.
    Unknown,
}

impl LimitSetter {
    /// Returns who sets the limit of this container, whose limit `cgroup` is if it is known.
    pub(super) fn of(subject: &ContainerRef, cgroup: &str) -> Self {
        let id = &*subject.container_id;
        let own = cgroup.strip_suffix("/container").unwrap_or(cgroup);
        let is_own = cgroup.is_empty() || own.rsplit('/').next().is_some_and(|last| last.contains(id));
        if !subject.identity.k8s_pod.is_empty() || cgroup.contains("kubepods") {
            Self::Kubernetes
        } else if subject.is_run() && is_own {
            Self::Run
        } else if !id.is_empty() && is_own {
            Self::Engine
        } else if [".service", ".slice", ".scope"].iter().any(|unit| cgroup.ends_with(unit)) {
            Self::Systemd
        } else {
            Self::Unknown
        }
    }
}
