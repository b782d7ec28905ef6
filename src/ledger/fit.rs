//! How well a victim's name fits a container: the order in which kills are dealt where numbers alone tell. Pure.

use std::collections::HashSet;
use std::sync::Arc;

use super::runs::Runs;
use crate::discover::ContainerId;

/// The best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fit {
    /// It had a process of that name.
    Name,
    /// Nothing is known of its processes, and nobody else is known to have had one of that name.
    Unclaimed,
    /// Nothing is known of its processes, or the victim has no name.
    Unknown,
    /// It had others.
    Any,
}

impl Fit {
    /// The best first.
    pub const ALL: [Fit; 4] = [Fit::Name, Fit::Unclaimed, Fit::Unknown, Fit::Any];
}

/// Judges victims of these names, by what is known now.
pub struct Judge {
    claimed: HashSet<Arc<str>>,
}

impl Judge {
    /// One for these victims.
    pub fn new(runs: &Runs, names: impl IntoIterator<Item = Arc<str>>) -> Self {
        let names: HashSet<_> = names.into_iter().collect();
        let is_claimed = |name: &Arc<str>| runs.iter().any(|(_, known)| known.had(name) == Some(true));
        Self { claimed: names.into_iter().filter(is_claimed).collect() }
    }

    /// How well a victim of this name fits a container.
    pub fn fit(&self, runs: &Runs, id: &ContainerId, process: &str) -> Fit {
        let had = runs.get(id).and_then(|known| known.had(process));
        match had {
            _ if process.is_empty() => Fit::Unknown,
            Some(true) => Fit::Name,
            Some(false) => Fit::Any,
            None if self.claimed.contains(process) => Fit::Unknown,
            None => Fit::Unclaimed,
        }
    }
}
