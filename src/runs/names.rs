//! How runs are named: which kind of name a text is, and which runs it selects. Pure.

use super::RunRecord;
use crate::text::nearest;

/// What a text names, the most exact first. Where several kinds fit, the first one counts, so that a group never selects a container of
/// another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NameKind {
    /// The id of a run.
    Run,
    /// A group.
    Group,
    /// A container: `NAME`, in a pod also `POD/NAME` and `NAMESPACE/POD/NAME`.
    Container,
    /// The beginning of a container's id.
    Id,
}

/// Who records runs, where none is recorded.
pub const RECORDED_BY: &str = "`memledger serve` records the runs of containers that run while it does";
/// Shortest beginning of an id that names a container.
const MIN_ID_CHARS: usize = 4;
/// Maximum number of groups that an error lists.
const MAX_LISTED: usize = 4;

impl RunRecord {
    /// Returns in which way this text names the run; `None` if it does not.
    pub fn name_kind(&self, wanted: &str) -> Option<NameKind> {
        let is_id = || wanted.len() >= MIN_ID_CHARS && self.subject.container_id.starts_with(wanted);
        if *self.run == *wanted {
            Some(NameKind::Run)
        } else if *self.group == *wanted {
            Some(NameKind::Group)
        } else if self.subject.identity.matches_name(wanted) {
            Some(NameKind::Container)
        } else {
            is_id().then_some(NameKind::Id)
        }
    }
}

/// Returns an error if a name, which selected these runs, is that of containers of several groups: they are not comparable.
///
/// # Errors
/// The text of the error.
pub fn check_unambiguous(runs: &[RunRecord], wanted: &str) -> Result<(), String> {
    if runs.iter().all(|run| run.name_kind(wanted).is_none_or(|kind| kind <= NameKind::Group)) {
        return Ok(());
    }
    let mut groups: Vec<&str> = runs.iter().map(|run| &*run.group).collect();
    groups.sort_unstable();
    groups.dedup();
    if groups.len() < 2 {
        return Ok(());
    }
    let more = if groups.len() > MAX_LISTED { ", ..." } else { "" };
    let listed: Vec<_> = groups.iter().take(MAX_LISTED).map(|group| format!("{group:?}")).collect();
    Err(format!(
        "{wanted:?} is the name of containers of {} groups; name one: {}{more}",
        groups.len(),
        listed.join(", ")
    ))
}

/// Returns the end of a message about an unknown name: the known names that are most like it.
pub fn nearest_names(known: &[RunRecord], wanted: &str) -> String {
    let names = known.iter().flat_map(|run| [&run.group, &run.subject.identity.name, &run.run]);
    let nearest = nearest(names, wanted);
    if nearest.is_empty() { format!("; no run is recorded yet. {RECORDED_BY}") } else { nearest }
}
