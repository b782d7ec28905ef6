//! Who connected: process, start time and container, as the kernel knows them. Nothing that the client says counts.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::stats::ReportRejection;
use crate::discover::{ContainerId, Inventory};
use crate::host::process::{ProcessFacts, ProcessId};
use crate::host::{Dir, HostPaths, unix_peer};

/// A connected process.
#[derive(Debug)]
pub struct ReportingPeer {
    /// Pid and start time.
    pub id: ProcessId,
    /// Readable once the process has ended.
    pub pidfd: OwnedFd,
    /// Its path in `/proc/PID/cgroup` when it connected.
    cgroup: Arc<str>,
    /// Its container.
    pub container: ContainerId,
    /// The container is a run without a cgroup, found by the process's ancestors.
    is_by_ancestor: bool,
}

impl ReportingPeer {
    /// Identifies the process that connected.
    ///
    /// The pidfd is taken first and is still alive at the end, so the files of `/proc` in between are of this process and
    /// not of a later one with the same pid. Before Linux 6.5, where the pidfd can be that of such a later process, the pid in
    /// the credentials of each message excludes that.
    ///
    /// # Errors
    /// The process is not visible or has ended, or is in no container.
    pub fn identify(
        socket: impl AsFd,
        host_paths: &HostPaths,
        cgroup_v1: bool,
        inventory: &Inventory,
    ) -> Result<Self, ReportRejection> {
        let connected = unix_peer::connected_process(&socket).map_err(|_| ReportRejection::Peer)?;
        let (pid, pidfd) = connected.ok_or(ReportRejection::Peer)?;
        let pid = pid.as_raw_nonzero().get().cast_unsigned();
        let read = |pid| {
            Dir::open(&host_paths.process(pid))
                .and_then(|dir| ProcessFacts::read(&dir, pid, cgroup_v1, &mut Vec::new()))
        };
        let facts = read(pid).map_err(|_| ReportRejection::Peer)?;
        if unix_peer::has_ended(&pidfd) {
            return Err(ReportRejection::Peer);
        }
        let by_cgroup = inventory.owner_of_path(&facts.cgroup);
        let by_ancestor = || inventory.run_of_process(&facts, |pid| read(pid).ok());
        let is_by_ancestor = by_cgroup.is_none();
        let container = by_cgroup.or_else(|| by_ancestor().cloned()).ok_or(ReportRejection::NoContainer)?;
        Ok(Self { id: facts.id, pidfd, cgroup: facts.cgroup, container, is_by_ancestor })
    }

    /// Returns true if the process is of the same container by this inventory, which may know more containers than the one by
    /// which it was identified.
    pub fn has_same_owner(&self, inventory: &Inventory) -> bool {
        match self.is_by_ancestor {
            true => inventory.commands.iter().any(|(_, run)| *run == self.container),
            false => inventory.owner_of_path(&self.cgroup).as_ref() == Some(&self.container),
        }
    }
}
