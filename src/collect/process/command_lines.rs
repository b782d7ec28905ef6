//! Reads and classifies the command lines of processes. They are read by a [`ReadPool`], since a process can block the
//! read.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::path::Path;
use std::time::Duration;

use crate::collect::ReadErrors;
use crate::collect::container_owner::ContainerOwner;
use crate::discover::Container;
use crate::host::ReadError;
use crate::host::bounds::Bound;
use crate::host::process::ProcessId;
use crate::host::read_pool::{PoolConfig, ReadOutcome, ReadPool};
use crate::parse::process::{ArgumentSettings, Command, argument_settings};

/// Maximum wait of a cycle for the command lines of new processes. Later results are used in a later cycle.
const MAX_WAIT: Duration = Duration::from_millis(20);
/// Reading a command line takes microseconds, but a fork of a process with much memory holds its mmap lock for longer.
const POOL_CONFIG: PoolConfig = PoolConfig {
    name: "command-lines",
    handover_after: Duration::from_millis(4),
    timeout: Duration::from_secs(2),
    rest_factor: 4,
    turn: Duration::ZERO,
};

/// Classification of a command line; the line itself is not kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandLine {
    /// The kind of program.
    pub command: Command,
    /// Numbers of a training among its arguments.
    pub settings: Option<ArgumentSettings>,
    /// Hash of the command line, which a fork shares with its parent.
    pub hash: u64,
    /// Only its beginning was read.
    pub is_truncated: bool,
}

/// The result for a process: its command line, or `None` if unknown.
pub type CommandLineRead = (ProcessId, Option<CommandLine>);

/// Reads command lines.
#[derive(Debug, Default)]
pub struct CommandLines {
    pool: Option<ReadPool<ContainerOwner, ProcessId, CommandLine>>,
    queued: Vec<(ContainerOwner, ProcessId)>,
    /// A queued process has no known command line yet.
    is_urgent: bool,
}

impl CommandLines {
    /// Queues a process for the next batch.
    pub fn queue(&mut self, owner: &Container, target: ProcessId, is_new: bool) {
        self.queued.push((ContainerOwner::of(owner), target));
        self.is_urgent |= is_new;
    }

    /// Submits the batch, waits for it if it contains a new process, and returns all results so far.
    pub fn submit_and_take(&mut self, proc: &Path, read_errors: &mut ReadErrors) -> Vec<CommandLineRead> {
        if self.pool.is_none() && self.queued.is_empty() {
            return vec![];
        }
        let pool = self.pool.get_or_insert_with(|| {
            let proc = proc.to_path_buf();
            ReadPool::new(POOL_CONFIG, move |target: &ProcessId, buffer| read(&proc, *target, buffer))
        });
        if !self.queued.is_empty() {
            pool.submit(self.queued.drain(..));
        }
        if std::mem::take(&mut self.is_urgent) {
            pool.wait(MAX_WAIT);
        }
        let mut results = Vec::new();
        for (owner, target, outcome) in pool.take() {
            let line = match outcome {
                ReadOutcome::Finished(Ok(line)) => {
                    if line.is_truncated {
                        let message = &"only the beginning of a command line is read";
                        read_errors.warn(&owner.id, "truncated", message);
                    }
                    Some(line)
                }
                ReadOutcome::Finished(Err(error)) => {
                    read_errors.record_of(&owner.id, &error);
                    None
                }
                ReadOutcome::Skipped => {
                    read_errors.count("blocked");
                    None
                }
            };
            results.push((target, line));
        }
        results
    }
}

fn read(proc: &Path, target: ProcessId, buffer: &mut Vec<u8>) -> Result<CommandLine, ReadError> {
    let dir = target.open(proc, buffer)?;
    let file = dir.file("cmdline")?;
    let text = file.read_once(buffer)?;
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    let is_truncated = text.len() >= Bound::of(b"cmdline").max_bytes;
    let command = Command::of(text);
    let settings = if command.python { argument_settings(text) } else { None };
    Ok(CommandLine { command, settings, hash: hasher.finish(), is_truncated })
}
