//! The kills in a kernel log from elsewhere, with the log as the only evidence. Pure.
//!
//! Lines are folded as those of a live log: a kill is listed once, and a report belongs to it only with evidence.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::discover::{PathOwner, owner_of_paths};
use crate::events::{ContainerRef, Identity, Kill, KillOwner};
use crate::ledger::reconcile::complete_report as complete;
use crate::ledger::sources::kernel_log::LogEntry;
use crate::parse::container_id;
use crate::parse::kernel_log::kills::{KillAssembler, KillRecord};
use crate::parse::kernel_log::text_log::TextLine;

/// Maximum number of kills that are kept, the newest.
const MAX_KILLS: usize = 1_000;

/// A kill of a log.
#[derive(Clone, Debug, PartialEq)]
pub struct LoggedKill {
    /// The kill.
    pub kill: Kill,
    /// Its time as the log has it; empty without one.
    pub log_time: String,
    /// The cgroup of the victim; empty if unknown.
    pub cgroup: String,
}

/// Collects the kills of a log.
#[derive(Debug, Default)]
pub struct LoggedKills {
    block: KillAssembler,
    /// The begin of the log was noted.
    has_begun: bool,
    kills: VecDeque<LoggedKill>,
    omitted: u64,
    number: u64,
}

impl LoggedKills {
    /// Reads a relevant line of a log that began at `began_usec`, by the same clock.
    pub fn read(&mut self, line: TextLine, began_usec: u64) {
        if !std::mem::replace(&mut self.has_begun, true) {
            self.block.records_lost(began_usec); // begins of blocks may be among the records before it
        }
        let TextLine { found, stamp } = line;
        let LogEntry { position, line, text, report } = LogEntry::from(found);
        match self.block.push(position.usec, &line, report.as_ref()) {
            Some(KillRecord::Kill { killed, context, group, report }) => {
                let paths =
                    context.as_ref().map(|context| context.task_cgroups.as_slice()).unwrap_or_default();
                // several readings of a line that imitates the kernel's words must agree
                let mut paths: Vec<&str> = paths.iter().map(String::as_str).collect();
                if paths.is_empty() {
                    paths.extend(group.as_deref());
                }
                self.number += 1;
                let report = report.map(|report| Arc::new(complete(&report, |_| {})));
                let mut kill = Kill::of_record(position.usec, &text, &killed, context.as_ref(), report);
                (kill.id, kill.owner) = (self.number, owner(&paths));
                let cgroup = if let [path] = paths[..] { path.to_owned() } else { String::new() };
                self.kills.push_back(LoggedKill { kill, log_time: stamp, cgroup });
                if self.kills.len() > MAX_KILLS {
                    self.kills.pop_front();
                    self.omitted += 1;
                }
            }
            Some(KillRecord::Group { pid, path }) => {
                let mut newest = self.kills.iter_mut().rev();
                if let Some(logged) = newest.find(|logged| logged.kill.pid == Some(pid))
                    && logged.cgroup.is_empty()
                {
                    (logged.kill.owner, logged.cgroup) = (owner(&[&path]), path);
                }
            }
            Some(KillRecord::Second { .. }) | None => {}
        }
    }

    /// Returns the kills, oldest first, and the number of older ones that were omitted.
    pub fn finish(self) -> (Vec<LoggedKill>, u64) {
        (self.kills.into(), self.omitted)
    }
}

impl LoggedKill {
    /// Returns true if the victim was in this container (its id, or the beginning of it), was in a cgroup with this name, or has
    /// this name itself.
    pub fn matches(&self, wanted: &str) -> bool {
        let id = match &self.kill.owner {
            KillOwner::Container(subject) => &*subject.container_id,
            _ => "",
        };
        id.starts_with(wanted)
            || *self.kill.process == *wanted
            || self.cgroup.split('/').any(|part| part == wanted)
    }
}

/// Returns the owner that cgroup paths show. The names of containers are not in a kernel log: the short id has their place.
fn owner(paths: &[&str]) -> KillOwner {
    match owner_of_paths(paths.iter().copied(), |_, _| false) {
        PathOwner::Container(id) => {
            let runtime = paths.first().and_then(|path| container_id::in_path(path).next());
            let short = id.as_str().get(..12).unwrap_or_default();
            KillOwner::Container(ContainerRef {
                identity: Identity { name: short.into(), ..Identity::default() },
                container_id: id.as_str().into(),
                runtime: runtime
                    .map(|found| found.runtime)
                    .filter(|name| *name != "unknown")
                    .unwrap_or("")
                    .into(),
                ..ContainerRef::default()
            })
        }
        PathOwner::Host => KillOwner::Host,
        PathOwner::Unknown => KillOwner::Unattributed,
    }
}
