//! The pids of a container: those in its own cgroup and in the cgroups below it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::collect::ReadErrors;
use crate::discover::{Container, Hierarchy, Version};
use crate::host::bounds::PROCESSES;
use crate::host::{Dir, KernelFile, ReadError};

/// Outcome of listing the pids of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListedPids {
    /// All pids are listed.
    Complete,
    /// Some pids may be missing.
    Incomplete,
    /// There are more pids or cgroups than the limit.
    TooMany,
}

/// The pid lists of all cgroups. Keeps them open.
#[derive(Debug, Default)]
pub struct PidLists {
    lists: HashMap<PathBuf, PidList>,
    /// The pids of the last listed container.
    pub pids: Vec<u32>,
    /// Maximum number of open lists.
    pub max_open: usize,
    cycle: u64,
}

/// The pids of one cgroup.
///
/// v1 creates the list when the file is opened and keeps it until it was not read for a second. A file that stays open
/// and is read at least once a second shows the same pids for ever, so on v1 only the directory stays open.
#[derive(Debug)]
struct PidList {
    handle: ListHandle,
    cycle: u64,
}

#[derive(Debug)]
enum ListHandle {
    Directory(Dir),
    File(KernelFile),
}

impl PidList {
    const FILE: &str = "cgroup.procs";

    fn open(hierarchy: &Hierarchy, path: &Path) -> Result<Self, ReadError> {
        let dir = Dir::open(&hierarchy.root.join(path))?;
        let handle = match hierarchy.version {
            Version::V1 => ListHandle::Directory(dir),
            Version::V2 => ListHandle::File(dir.file(Self::FILE)?),
        };
        Ok(Self { handle, cycle: 0 })
    }

    fn read<'a>(&self, buffer: &'a mut Vec<u8>) -> Result<&'a [u8], ReadError> {
        match &self.handle {
            ListHandle::Directory(dir) => dir.file(Self::FILE)?.read_all(buffer),
            ListHandle::File(file) => file.read_all(buffer),
        }
    }
}

impl PidLists {
    /// Returns the number of open lists.
    pub fn open_count(&self) -> usize {
        self.lists.len()
    }

    /// Starts a new cycle.
    pub fn begin(&mut self) {
        self.cycle += 1;
    }

    /// Closes the lists that were not read in this cycle.
    pub fn close_unused(&mut self) {
        let cycle = self.cycle;
        self.lists.retain(|_, list| list.cycle == cycle);
    }

    /// Fills [`PidLists::pids`] with the processes of a container and of the cgroups below it.
    pub fn list(
        &mut self,
        hierarchy: Option<&Hierarchy>,
        container: &Container,
        buffer: &mut Vec<u8>,
        read_errors: &mut ReadErrors,
    ) -> ListedPids {
        self.pids.clear();
        let (Some(hierarchy), Some(cgroup)) = (hierarchy, &container.cgroup) else {
            return ListedPids::Incomplete;
        };
        if cgroup.is_truncated {
            return ListedPids::TooMany;
        }
        let mut listed = ListedPids::Complete;
        for path in std::iter::once(&cgroup.path).chain(&cgroup.below) {
            match self.list_one(hierarchy, path, buffer) {
                Ok(()) if self.pids.len() > PROCESSES.max => return ListedPids::TooMany,
                Ok(()) => {}
                // a cgroup below may be removed at any time; if the container's own is gone, the container ended
                Err(error) if error.is_gone() && *path != cgroup.path => {}
                // a threaded cgroup (v2) lists no processes: the list of its domain contains them
                Err(ReadError::Absent(_)) if *path != cgroup.path => {}
                Err(error) => {
                    listed = ListedPids::Incomplete;
                    read_errors.record(&error);
                }
            }
        }
        listed
    }

    fn list_one(
        &mut self,
        hierarchy: &Hierarchy,
        path: &PathBuf,
        buffer: &mut Vec<u8>,
    ) -> Result<(), ReadError> {
        if self.lists.len() >= self.max_open && !self.lists.contains_key(path) {
            let list = PidList::open(hierarchy, path)?; // not kept open: a container may create many cgroups
            self.pids.extend(pids_of(list.read(buffer)?));
            return Ok(());
        }
        for attempt in 0.. {
            if !self.lists.contains_key(path) {
                self.lists.insert(path.clone(), PidList::open(hierarchy, path)?);
            }
            let Some(list) = self.lists.get_mut(path) else { break };
            list.cycle = self.cycle;
            match list.read(buffer) {
                Ok(text) => {
                    self.pids.extend(pids_of(text));
                    break;
                }
                // created again under the same path: open the new one, once
                Err(error) if error.is_gone() && attempt == 0 => drop(self.lists.remove(path)),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

pub(super) fn pids_of(list: &[u8]) -> impl Iterator<Item = u32> {
    let numbers = crate::parse::lines(list).filter_map(crate::parse::number);
    numbers.filter_map(|pid| u32::try_from(pid).ok())
}
