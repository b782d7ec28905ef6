//! The kills in a kernel log from elsewhere, with the log as the only evidence. Pure.
//!
//! Lines are folded as those of a live log: a kill is listed once, and a report belongs to it only with evidence.

use std::collections::VecDeque;
use std::sync::Arc;

use super::place::CgroupPlace;
use crate::discover::{CgroupMaker, PathClaim, PathOwner, RuntimeKind, owner_of_paths};
use crate::events::{ContainerRef, Identity, Kill, KillOwner, OomScope};
use crate::ledger::reconcile::complete_report as complete;
use crate::ledger::sources::kernel_log::LogEntry;
use crate::parse::container_id;
use crate::parse::kernel_log::kills::{KillAssembler, KillRecord};
use crate::parse::kernel_log::text_log::TextLine;
use crate::parse::kernel_log::{Killed, Line, NoKill, OomReport, is_whole_message};

/// Maximum number of kills that are kept, the newest.
const MAX_KILLS: usize = 1_000;

/// Processes that are kept of one group.
const MAX_KILLED_WITH: usize = 100;
/// Length of a container's id as engines print it.
const SHORT_ID: usize = 12;
/// Length of a pod's UID.
const MIN_POD_UID: usize = 32;

/// A kill of a log.
#[derive(Clone, Debug, PartialEq)]
pub struct LoggedKill {
    /// The kill.
    pub kill: Kill,
    /// Processes that were killed with it, because their whole cgroup was (`memory.oom.group`).
    pub killed_with: Vec<Kill>,
    /// The OOM ended without a kill: the kill has no victim.
    pub no_kill: Option<NoKill>,
    /// The line of the kill says that memory ran out, as since 5.1.
    pub is_whole_message: bool,
    /// Its time as the log has it; empty without one.
    pub log_time: String,
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
        if let Line::NoKill(no_kill @ (NoKill::NoVictim | NoKill::Panic | NoKill::PanicNoVictim)) = line {
            self.add_no_kill(no_kill, position.usec, &text, report.as_ref(), stamp);
            self.block.push(position.usec, &line, None);
            return;
        }
        match self.block.push(position.usec, &line, report.as_ref()) {
            Some(KillRecord::Kill { killed, context, group, report }) => {
                let paths =
                    context.as_ref().map(|context| context.task_cgroups.as_slice()).unwrap_or_default();
                // several readings of a line that imitates the kernel's words must agree
                let mut paths: Vec<&str> = paths.iter().map(String::as_str).collect();
                if paths.is_empty() {
                    paths.extend(group.as_deref());
                }
                let reported =
                    report.as_ref().map(|report| report.cgroup.clone()).filter(|path| !path.is_empty());
                if paths.is_empty() {
                    // the victim was in or below the cgroup whose counters the kernel printed
                    paths.extend(reported.as_deref());
                }
                let report = report.map(|report| Arc::new(complete(&report, |_| {})));
                let mut kill = Kill::of_record(position.usec, &text, &killed, context.as_ref(), report);
                kill.owner = owner(&paths);
                if let [path] = paths[..] {
                    kill.cgroup = path.into();
                }
                kill.group = group.as_deref().unwrap_or_default().into();
                self.add(LoggedKill {
                    kill,
                    killed_with: vec![],
                    no_kill: None,
                    is_whole_message: is_whole_message(&text),
                    log_time: stamp,
                });
            }
            Some(KillRecord::Group { pid, path }) => {
                let mut newest = self.kills.iter_mut().rev();
                if let Some(logged) = newest.find(|logged| logged.kill.pid == Some(pid)) {
                    logged.kill.group = path.as_str().into();
                    if logged.kill.cgroup.is_empty() {
                        (logged.kill.owner, logged.kill.cgroup) = (owner(&[&path]), path.into());
                    }
                }
            }
            Some(KillRecord::Second { .. }) | None => {}
        }
    }

    /// Adds an OOM that ended without a kill.
    fn add_no_kill(
        &mut self,
        no_kill: NoKill,
        usec: u64,
        text: &str,
        report: Option<&Arc<OomReport>>,
        log_time: String,
    ) {
        // the kernel writes both where it panics because no process may be killed
        let before = self.kills.back_mut().filter(|before| before.no_kill == Some(NoKill::NoVictim));
        if let Some(before) = before.filter(|_| no_kill == NoKill::PanicNoVictim) {
            before.no_kill = Some(no_kill);
            before.kill.scope = OomScope::Host;
            return;
        }
        let report = report.map(|report| Arc::new(complete(report, |_| {})));
        let context = self.block.context().cloned();
        let mut kill = Kill::of_record(usec, text, &Killed::default(), context.as_ref(), report);
        kill.pid = None;
        if no_kill == NoKill::PanicNoVictim {
            kill.scope = OomScope::Host; // at a cgroup's limit the kernel does not panic for this
        }
        let paths = context.map(|context| context.task_cgroups).unwrap_or_default();
        kill.owner = match &paths[..] {
            [] if kill.limit_cgroup.is_empty() => KillOwner::Unattributed,
            [] => owner(&[&kill.limit_cgroup]),
            paths => owner(&paths.iter().map(String::as_str).collect::<Vec<_>>()),
        };
        self.add(LoggedKill {
            kill,
            killed_with: vec![],
            no_kill: Some(no_kill),
            is_whole_message: false,
            log_time,
        });
    }

    fn add(&mut self, mut logged: LoggedKill) {
        self.number += 1;
        logged.kill.id = self.number;
        let is_with = |first: &&mut LoggedKill| {
            first.no_kill.is_none() && !logged.kill.group.is_empty() && first.kill.group == logged.kill.group
        };
        // the first of a group is the victim that the kernel chose, and its line comes before that of the group
        if let Some(first) = self.kills.back_mut().filter(is_with)
            && first.killed_with.len() < MAX_KILLED_WITH
        {
            logged.kill.report = None; // that of the first
            first.killed_with.push(logged.kill);
            return;
        }
        self.kills.push_back(logged);
        if self.kills.len() > MAX_KILLS {
            self.kills.pop_front();
            self.omitted += 1;
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
        let is_of = |kill: &Kill| {
            let id = match &kill.owner {
                KillOwner::Container(subject) => &*subject.container_id,
                _ => "",
            };
            let uid = wanted.replace('-', "_");
            let is_pod = |part: &str| {
                let own = part.strip_suffix(".slice").unwrap_or(part);
                wanted.len() >= MIN_POD_UID && (own.ends_with(wanted) || own.ends_with(&uid))
            };
            // also of a container of a user's engine, which only its engine could tell from a forged one
            let has_id = || container_id::in_path(&kill.cgroup).any(|found| found.id.starts_with(wanted));
            let is_place = [&*kill.cgroup, &*kill.limit_cgroup]
                .into_iter()
                .any(|cgroup| CgroupPlace::of(cgroup).is_called(wanted));
            id.starts_with(wanted)
                || is_place
                || (wanted.len() >= SHORT_ID && has_id())
                || *kill.process == *wanted
                || kill.cgroup.split('/').any(|part| part == wanted || is_pod(part))
        };
        std::iter::once(&self.kill).chain(&self.killed_with).any(is_of)
    }
}

/// Returns the owner that cgroup paths show. The names of containers are not in a kernel log: the short id has their place.
fn owner(paths: &[&str]) -> KillOwner {
    match owner_of_paths(
        paths.iter().copied(),
        |_, _| PathClaim::Possible { user: None },
        CgroupMaker::by_names,
    ) {
        PathOwner::Container(id) => {
            let runtime = paths.first().and_then(|path| container_id::in_path(path).next());
            let short = id.short();
            KillOwner::Container(ContainerRef {
                identity: Identity { name: short.into(), ..Identity::default() },
                container_id: id.as_str().into(),
                runtime: runtime
                    .map(|found| found.runtime)
                    .filter(|runtime| *runtime != RuntimeKind::Unknown)
                    .unwrap_or_default(),
                ..ContainerRef::default()
            })
        }
        PathOwner::Host | PathOwner::Unproven => KillOwner::Host,
        PathOwner::Unknown => KillOwner::Unattributed,
    }
}
