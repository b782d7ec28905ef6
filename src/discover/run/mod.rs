//! Runs: commands that `memledger run` started, each in a cgroup of its own. To the rest of memledger a run is a container of the
//! runtime `run`.
//!
//! `memledger run` writes one record per run to a spool directory ([`record`], [`spool`]); `serve` follows it ([`follow`]), and
//! `why` reads it once ([`history`]). So neither has to run while the command does.

mod follow;
mod history;
pub mod record;
pub mod spool;

pub use follow::{RunResumeState, follow};
pub use history::history;
