//! The name of a run.

use crate::discover::ContainerId;

/// Number of a run. It increases with each run of a ledger, so that a container that was forgotten and starts again gets a new one.
pub type RunNumber = u64;

/// Names one run for good.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RunId {
    /// The container.
    pub container: ContainerId,
    /// Which of its runs.
    pub number: RunNumber,
}

/// Gives each run of a ledger its number.
#[derive(Debug, Default)]
pub struct RunNumbers {
    last: RunNumber,
}

impl RunNumbers {
    /// Continues after the highest number that was given.
    pub fn after(last: RunNumber) -> Self {
        Self { last }
    }

    /// Returns the number that was given last.
    pub fn last(&self) -> RunNumber {
        self.last
    }

    pub(super) fn next(&mut self) -> RunNumber {
        self.last += 1;
        self.last
    }
}
