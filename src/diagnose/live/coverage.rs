//! How far the sources of an answer reach.

use std::path::PathBuf;

use serde::Serialize;

use crate::clock::Timestamp;
use crate::discover::RuntimeKind;
use crate::discover::history::RuntimeHistory;
use crate::ledger::catch_up::{HostPast, LogCoverage};

/// Why there is no recorded ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MissingLedger {
    /// There is none in this directory.
    NoFile(PathBuf),
    /// No directory is set, and no `memledger serve` answers.
    NoServer {
        /// The control socket, if one is set.
        socket: Option<PathBuf>,
    },
    /// There is one that cannot be read, or a memledger that does not show it.
    Unreadable {
        /// The error.
        error: String,
    },
}

/// A runtime of which something is missing.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RuntimeCoverage {
    /// The runtime.
    pub runtime: RuntimeKind,
    /// Containers of which only the name is known.
    pub unread: usize,
    /// Its newest events are missing.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub has_lost_events: bool,
    /// Why it could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// It has no socket.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_missing: bool,
}

impl RuntimeCoverage {
    /// Returns whether more rights may help.
    pub fn is_unreadable(&self) -> bool {
        self.error.is_some() && !self.is_missing
    }
}

/// How far the sources reach.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Coverage {
    /// The kernel log.
    pub kernel_log: LogCoverage,
    /// Unix time of the boot.
    pub booted_at: f64,
    /// A ledger has what was before.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_recorded: bool,
    /// OOM kills in the kernel log.
    pub kills_in_log: u64,
    /// OOM kills since the boot, by the kernel's counter; `None` if it cannot be read.
    pub kills_of_boot: Option<u64>,
    /// Runtimes of which something is missing.
    pub runtimes: Vec<RuntimeCoverage>,
}

impl Coverage {
    /// Describes what was read. `is_recorded`: a ledger has what was before.
    pub fn of(past: &HostPast, now: Timestamp, is_recorded: bool) -> Self {
        let is_partial = |it: &&RuntimeHistory| it.error.is_some() || it.unread > 0 || it.has_lost_events;
        let runtimes = past.runtimes.iter().filter(is_partial).map(|it| RuntimeCoverage {
            runtime: it.runtime,
            unread: it.unread,
            has_lost_events: it.has_lost_events,
            error: it.error.clone(),
            is_missing: it.is_missing,
        });
        Self {
            kernel_log: past.log.coverage.clone(),
            booted_at: now.booted_at(),
            is_recorded,
            kills_in_log: past.log.kills,
            kills_of_boot: past.counted,
            runtimes: runtimes.collect(),
        }
    }

    /// Returns whether every OOM kill of this boot is known.
    pub fn is_whole_boot(&self) -> bool {
        self.kills_of_boot.is_some_and(|kills| kills <= self.kills_in_log)
    }

    /// Returns whether this boot had OOM kills whose records are missing.
    fn has_lost_records(&self) -> bool {
        !self.is_recorded && self.kills_of_boot.is_some_and(|kills| kills > self.kills_in_log)
    }

    /// Returns whether the kernel log was read.
    pub fn has_kernel_log(&self) -> bool {
        matches!(self.kernel_log, LogCoverage::Read { .. } | LogCoverage::Followed)
    }

    /// Returns whether a source could not be read, or records are missing. Where `memledger serve` answered, the past is its.
    pub fn is_incomplete(&self) -> bool {
        if self.kernel_log == LogCoverage::Followed {
            return false;
        }
        let is_unreadable = matches!(self.kernel_log, LogCoverage::Unreadable { .. });
        is_unreadable
            || self.has_lost_records()
            || self.runtimes.iter().any(|it| it.is_unreadable() || it.has_lost_events)
    }

    /// Returns whether a runtime could not be read.
    pub fn is_unreachable(&self, runtime: RuntimeKind) -> bool {
        self.runtimes.iter().any(|it| it.runtime == runtime && it.error.is_some())
    }
}
