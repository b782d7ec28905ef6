//! A process: its identity, and what procfs shows of it.

use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{Dir, ReadError};
use crate::parse::process::{Stat, cgroup_path};
use crate::text::printable;

/// A process of this host. Another process that gets its pid later has another start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ProcessId {
    /// Its pid in the initial pid namespace.
    pub pid: u32,
    /// Its start in clock ticks since boot.
    pub start_ticks: u64,
}

impl ProcessId {
    /// Returns the process with this pid and start.
    pub const fn new(pid: u32, start_ticks: u64) -> Self {
        Self { pid, start_ticks }
    }

    /// Reads the process that has this pid now.
    ///
    /// # Errors
    /// [`ReadError::Gone`] if there is none.
    pub fn read(proc: &Path, pid: u32) -> Result<Self, ReadError> {
        let stat = read_stat(&Dir::open(&proc.join(pid.to_string()))?, &mut Vec::new())?;
        Ok(Self::new(pid, stat.start_ticks))
    }

    /// Opens the procfs directory of this process.
    ///
    /// # Errors
    /// [`ReadError::Gone`] if it ended, also if its pid was reused.
    pub fn open(self, proc: &Path, buffer: &mut Vec<u8>) -> Result<Dir, ReadError> {
        let dir = Dir::open(&proc.join(self.pid.to_string()))?;
        self.check(&dir, buffer)?;
        Ok(dir)
    }

    /// Checks that a procfs directory is that of this process.
    ///
    /// # Errors
    /// As [`ProcessId::open`].
    pub fn check(self, dir: &Dir, buffer: &mut Vec<u8>) -> Result<(), ReadError> {
        match read_stat(dir, buffer)?.start_ticks == self.start_ticks {
            true => Ok(()),
            false => Err(ReadError::Gone(format!("process {}", self.pid))),
        }
    }
}

/// What does not change while a process runs, but for its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessFacts {
    /// The process.
    pub id: ProcessId,
    /// Pid of its parent.
    pub ppid: u32,
    /// Its name when it was read, made printable.
    pub comm: Arc<str>,
    /// Its cgroup in the hierarchy of the memory controller.
    pub cgroup: Arc<str>,
}

impl ProcessFacts {
    /// Reads a process from its directory in procfs.
    ///
    /// # Errors
    /// [`ReadError::Gone`] also if it is exiting and cgroup v1 shows it in the root already: its cgroup is not known any more,
    /// while it may still hold devices and sockets.
    pub fn read(dir: &Dir, pid: u32, cgroup_v1: bool, buffer: &mut Vec<u8>) -> Result<Self, ReadError> {
        let stat = read_stat(dir, buffer)?;
        let cgroup = cgroup_path(dir.file("cgroup")?.read_once(buffer)?, cgroup_v1);
        let cgroup = cgroup.ok_or_else(|| ReadError::malformed("cgroup"))?;
        let cgroup: Arc<str> = String::from_utf8_lossy(cgroup).into();
        if cgroup_v1 && &*cgroup == "/" && read_stat(dir, buffer)?.is_exiting {
            return Err(ReadError::Gone("the cgroup of an exiting process".into()));
        }
        let id = ProcessId::new(pid, stat.start_ticks);
        Ok(Self { id, ppid: stat.ppid, comm: printable(&stat.comm).into(), cgroup })
    }
}

/// Reads `stat` from a directory in procfs.
///
/// # Errors
/// [`ReadError::Gone`] if the process ended.
pub fn read_stat(dir: &Dir, buffer: &mut Vec<u8>) -> Result<Stat, ReadError> {
    let stat = Stat::parse(dir.file("stat")?.read_once(buffer)?);
    stat.ok_or_else(|| ReadError::malformed("stat"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exiting_process_in_the_root_of_v1_has_no_known_cgroup() {
        let folder = tempfile::tempdir().unwrap();
        let read = |v1: bool, path: &str, flags: u32| {
            let stat = format!("7 (python) R 1 1 1 0 -1 {flags} {}70 0\n", "0 ".repeat(12));
            std::fs::write(folder.path().join("stat"), stat).unwrap();
            let controller = if v1 { "3:memory" } else { "0:" };
            std::fs::write(folder.path().join("cgroup"), format!("{controller}:{path}\n")).unwrap();
            ProcessFacts::read(&Dir::open(folder.path()).unwrap(), 7, v1, &mut Vec::new())
                .map(|facts| facts.cgroup.to_string())
                .map_err(|error| error.is_gone())
        };
        assert_eq!(read(true, "/docker/a", 0x4), Ok("/docker/a".to_owned()));
        assert_eq!(read(true, "/", 0x0040_0000), Ok("/".to_owned()), "a process of the host");
        assert_eq!(read(true, "/", 0x0040_0004), Err(true));
        assert_eq!(read(false, "/", 0x4), Ok("/".to_owned()), "v2 keeps the path");
    }
}
