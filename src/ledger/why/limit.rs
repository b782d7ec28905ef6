//! Which limit a kill hit, relative to the container.

use super::text::path;
use super::{RunSummary, last_sample};
use crate::ledger::events::{ContainerRef, Kill};
use crate::ledger::hit_limit::{self, LimitPosition};

/// Returns which limit a kill in this container hit.
pub(super) fn limit_of<'a>(kill: &'a Kill, run: &RunSummary<'a>) -> LimitPosition {
    LimitPosition::of(&kill.limit_cgroup, &run.subject.container_id, own_and_effective(kill, run))
}

/// Returns the container's own limit and the lowest one on the path to the root cgroup, at the last sample.
fn own_and_effective<'a>(kill: &'a Kill, run: &RunSummary<'a>) -> (Option<u64>, Option<u64>) {
    let last = last_sample(run.before(Some(kill)));
    (last.and_then(|last| last.limit_bytes), last.and_then(|last| last.effective_limit_bytes))
}

/// Returns the path of the limit's cgroup as seen inside the container.
pub(super) fn inside(kill: &Kill, subject: &ContainerRef) -> String {
    let id = &*subject.container_id;
    let at = kill.limit_cgroup.rfind(id).filter(|_| !id.is_empty());
    let below = at.and_then(|at| kill.limit_cgroup[at + id.len()..].find('/').map(|end| at + id.len() + end));
    path(&kill.limit_cgroup[below.unwrap_or(0)..])
}

/// Returns the limit that was hit, if known.
pub(super) fn limit_bytes<'a>(kill: &'a Kill, run: &RunSummary<'a>) -> Option<u64> {
    hit_limit::limit_bytes(kill, limit_of(kill, run), own_and_effective(kill, run).0)
}
