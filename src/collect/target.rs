//! A process that is read later on another thread, when its pid may have been reused.

use std::path::Path;

use crate::host::{Dir, ReadError};
use crate::parse::process::Stat;

/// A process, identified by pid and start time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// Its pid in the initial pid namespace.
    pub pid: u32,
    /// Its start in clock ticks since boot.
    pub start_ticks: u64,
}

impl Target {
    /// Opens the procfs directory of this process.
    ///
    /// # Errors
    /// [`ReadError::Gone`] if it ended, also if its pid was reused.
    pub fn open(self, proc: &Path, buffer: &mut Vec<u8>) -> Result<Dir, ReadError> {
        let dir = Dir::open(&proc.join(self.pid.to_string()))?;
        let stat = dir.file("stat")?.read_once(buffer).map(Stat::parse)?;
        let stat = stat.ok_or_else(|| ReadError::malformed("stat"))?;
        if stat.start_ticks == self.start_ticks {
            Ok(dir)
        } else {
            Err(ReadError::Gone(format!("process {}", self.pid)))
        }
    }
}
