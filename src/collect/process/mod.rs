//! Processes of containers and their resident memory.
//!
//! Every cycle reads the pids of each container and `statm` of each process. The file stays open: if the pid is reused,
//! a read of the old file fails with *gone*. If the limit of open files does not allow that, `statm` is opened each
//! time, and the start time shows whether it is still the same process. Data that rarely changes (name, parent, command
//! line) is read when a process is new, and then occasionally; the command line on other threads, because its process
//! can block that read.
//!
//! The processes of a container with more than [`PROCESSES`] are not read: all its metrics by process are absent.
//!
//! Roles of processes are in `attribute`, proportional shares in `pss`.

mod command_lines;
mod pid_lists;

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use command_lines::{CommandLine, CommandLines};
use pid_lists::{ListedPids, PidLists};

use super::target::Target;
use super::{CollectOutcome, Collector, Context, Output, ReadErrors};
use crate::clock::Timestamp;
use crate::discover::{Container, ContainerId, Version};
use crate::host::bounds::PROCESSES;
use crate::host::{Dir, KernelFile, ReadError};
use crate::parse::process::{self as parse, Command};

/// Minimum and maximum interval between reads of [`ProcessMeta`]. A new process may still call exec or change its name.
/// The interval doubles after each read, so a late change is seen with a delay in proportion to the process's age.
const META_INTERVALS: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(64));
/// Minimum time between two warnings about the same container.
const WARNING_INTERVAL: Duration = Duration::from_secs(600);

/// Name, parent and kind of a process. Its command line is not kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessMeta {
    /// Its name, which the process can change, made printable.
    pub comm: Arc<str>,
    /// Pid of its parent.
    pub ppid: u32,
    /// Its start in clock ticks since boot.
    pub start_ticks: u64,
    /// Kind of its command line; [`Command::NONE`] while that is unknown.
    pub command: Command,
    /// Hash of the command line, which a fork shares with its parent; `None` while it is unknown.
    pub command_hash: Option<u64>,
    /// True if it ended and its parent has not waited for it: it holds no memory.
    pub zombie: bool,
}

/// One process of a container in one cycle.
#[derive(Clone, Debug)]
pub struct Process {
    /// Its pid in the initial pid namespace.
    pub pid: u32,
    /// Resident memory in bytes; pages shared after a fork count for each process.
    pub rss_bytes: u64,
    /// Data that rarely changes.
    pub meta: Arc<ProcessMeta>,
}

/// All processes of all containers, grouped by container.
#[derive(Debug, Default)]
pub struct Processes {
    all: Vec<Process>,
    of: Vec<Range<usize>>,
    /// Whether all processes of a container were read; if not, a sum would be too small.
    complete: Vec<bool>,
    /// True if processes can be read at all: the pids are those of the host, and `/proc` shows them.
    pub readable: bool,
}

impl Processes {
    /// Returns the processes of one container.
    pub fn of(&self, container: usize) -> &[Process] {
        self.of.get(container).map_or(&[], |range| &self.all[range.clone()])
    }

    /// Returns true if all processes of the container are known. An empty list then means *none*, otherwise *unknown*.
    pub fn complete(&self, container: usize) -> bool {
        self.readable && self.complete.get(container).is_some_and(|complete| *complete)
    }

    /// Returns all processes with their container numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Process)> {
        self.of.iter().enumerate().flat_map(|(number, range)| {
            self.all[range.clone()].iter().map(move |process| (number as u32, process))
        })
    }

    /// Returns the number of processes.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Returns true if there are no processes.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Clears the data of the previous cycle.
    pub fn clear(&mut self) {
        self.all.clear();
        self.of.clear();
        self.complete.clear();
        self.readable = false;
    }
}

/// The collector.
#[derive(Debug, Default)]
pub struct ProcessTable {
    known: HashMap<u32, ProcessEntry>,
    lists: PidLists,
    command_lines: CommandLines,
    /// When the log last warned about a container with more processes than the limit.
    over_limit: HashMap<ContainerId, Timestamp>,
    buffer: Vec<u8>,
    cycle: u64,
    /// Number of open `statm` files, and its maximum.
    open: usize,
    max_open: usize,
}

#[derive(Debug)]
struct ProcessEntry {
    /// `None` if no more files may stay open.
    statm: Option<KernelFile>,
    meta: Arc<ProcessMeta>,
    meta_at: Timestamp,
    meta_interval: Duration,
    cycle: u64,
    /// A read of its command line is queued.
    is_queued: bool,
}

impl ProcessTable {
    /// Reads one process; the error is *gone* if it ended.
    fn read(&mut self, context: &Context<'_>, owner: &ContainerId, pid: u32) -> Result<Process, ReadError> {
        if let Some(entry) = self.known.get_mut(&pid) {
            match entry.read(context, pid, &mut self.buffer) {
                Ok((rss_bytes, is_due)) => {
                    entry.cycle = self.cycle;
                    if is_due && !entry.is_queued && !entry.meta.zombie {
                        entry.is_queued = true;
                        let is_new = entry.meta.command_hash.is_none();
                        self.command_lines.queue(owner, entry.target(pid), is_new);
                    }
                    return Ok(Process { pid, rss_bytes, meta: Arc::clone(&entry.meta) });
                }
                Err(error) if error.is_gone() => self.forget(pid), // ended; the pid may have been reused
                Err(error) => return Err(error),
            }
        }
        let dir = Dir::open(&context.host_paths.process(pid))?;
        let statm = dir.file("statm")?;
        let rss_bytes = statm.read_once(&mut self.buffer).and_then(rss_bytes)?;
        let meta = Arc::new(meta(&dir, None, &mut self.buffer)?);
        let statm = (self.open < self.max_open).then_some(statm);
        self.open += usize::from(statm.is_some());
        let entry = ProcessEntry {
            statm,
            meta: Arc::clone(&meta),
            meta_at: context.now,
            meta_interval: META_INTERVALS.0,
            cycle: self.cycle,
            is_queued: !meta.zombie,
        };
        if entry.is_queued {
            self.command_lines.queue(owner, entry.target(pid), true);
        }
        self.known.insert(pid, entry);
        Ok(Process { pid, rss_bytes, meta })
    }

    fn forget(&mut self, pid: u32) {
        let entry = self.known.remove(&pid);
        self.open -= usize::from(entry.is_some_and(|entry| entry.statm.is_some()));
    }

    /// Applies the command lines that were read since, also to the processes of this cycle.
    fn apply_command_lines(
        &mut self,
        context: &Context<'_>,
        found: &mut [Process],
        read_errors: &mut ReadErrors,
    ) {
        let mut changed = HashSet::new();
        for (target, line) in self.command_lines.submit_and_take(&context.host_paths.proc, read_errors) {
            let entry = self.known.get_mut(&target.pid);
            let Some(entry) = entry.filter(|entry| entry.target(target.pid) == target) else { continue };
            entry.is_queued = false;
            if let Some(CommandLine { command, hash }) = line
                && (entry.meta.command, entry.meta.command_hash) != (command, Some(hash))
            {
                let meta =
                    ProcessMeta { command, command_hash: Some(hash), ..ProcessMeta::clone(&entry.meta) };
                entry.meta = Arc::new(meta);
                changed.insert(target.pid);
            }
        }
        for process in found.iter_mut().filter(|process| changed.contains(&process.pid)) {
            if let Some(entry) = self.known.get(&process.pid) {
                process.meta = Arc::clone(&entry.meta);
            }
        }
    }

    /// Reads the processes of one container. Returns true if all were read.
    fn read_container(
        &mut self,
        context: &Context<'_>,
        container: &Container,
        found: &mut Vec<Process>,
        counts: &mut Counts,
        read_errors: &mut ReadErrors,
    ) -> bool {
        let listed = self.lists.list(context.hierarchy, container, &mut self.buffer, read_errors);
        if listed == ListedPids::TooMany {
            read_errors.count("too_many");
            let warned = self.over_limit.get(&container.id);
            if warned.is_none_or(|warned| context.now.since(*warned) >= WARNING_INTERVAL) {
                self.over_limit.insert(container.id.clone(), context.now);
                tracing::warn!(
                    container = container.id.as_str(),
                    limit = PROCESSES.max,
                    "too many processes or cgroups in a container: its metrics by process are missing"
                );
            }
            return false;
        }
        let mut complete = listed == ListedPids::Complete;
        let pids = std::mem::take(&mut self.lists.pids);
        // v2 lists a process of an invisible pid namespace as 0, v1 omits it
        counts.is_foreign |= complete
            && pids.is_empty()
            && !context.host_paths.in_initial_pid_namespace()
            && { context.hierarchy.is_some_and(|hierarchy| hierarchy.version == Version::V1) };
        let before = counts.read;
        for pid in &pids {
            if *pid == 0 {
                counts.is_foreign = true;
                continue;
            }
            match self.read(context, &container.id, *pid) {
                Ok(process) => {
                    counts.read += 1;
                    if !process.meta.zombie {
                        found.push(process);
                    }
                }
                Err(error) => {
                    complete &= error.is_gone();
                    read_errors.record(&error);
                }
            }
        }
        counts.listed += pids.len();
        // all gone at once: the container ended, or /proc hides the processes (hidepid)
        complete &= pids.is_empty() || counts.read > before;
        self.lists.pids = pids;
        complete
    }
}

/// Counts of one cycle.
#[derive(Debug, Default)]
struct Counts {
    listed: usize,
    read: usize,
    /// The pids belong to another pid namespace.
    is_foreign: bool,
}

impl ProcessEntry {
    fn target(&self, pid: u32) -> Target {
        Target { pid, start_ticks: self.meta.start_ticks }
    }

    /// Reads the resident memory of this process, and `stat` if it is due. Returns true if it was due; the command line
    /// is not read here.
    fn read(
        &mut self,
        context: &Context<'_>,
        pid: u32,
        buffer: &mut Vec<u8>,
    ) -> Result<(u64, bool), ReadError> {
        let is_due = context.now.since(self.meta_at) >= self.meta_interval;
        let (rss_bytes, dir) = match &self.statm {
            Some(statm) => (statm.read_once(buffer).and_then(rss_bytes)?, None),
            None => {
                let dir = Dir::open(&context.host_paths.process(pid))?;
                let rss_bytes = dir.file("statm")?.read_once(buffer).and_then(rss_bytes)?;
                (rss_bytes, Some(dir))
            }
        };
        // a process without memory may be a zombie now; without an open file the pid may have been reused
        if is_due || rss_bytes == 0 || dir.is_some() {
            let dir = dir.map_or_else(|| Dir::open(&context.host_paths.process(pid)), Ok)?;
            let meta = meta(&dir, Some(&self.meta), buffer)?;
            if meta.start_ticks != self.meta.start_ticks {
                return Err(ReadError::Gone(format!("process {pid}")));
            }
            if *self.meta != meta {
                self.meta = Arc::new(meta);
            }
        }
        if is_due {
            self.meta_at = context.now;
            // a small offset, so that processes of the same age are not all read in the same cycle
            self.meta_interval = (self.meta_interval * 2).min(META_INTERVALS.1)
                + Duration::from_millis(u64::from(pid % 64) * 10);
        }
        Ok((rss_bytes, is_due))
    }
}

/// Returns how many files of processes may stay open: the limit minus the files of containers and of everything else.
fn max_open_files(containers: usize) -> usize {
    const PER_CONTAINER: usize = 10;
    const REST: usize = 256;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit).unwrap_or(usize::MAX).saturating_sub(REST + PER_CONTAINER * containers)
}

fn rss_bytes(statm: &[u8]) -> Result<u64, ReadError> {
    let pages = parse::resident_pages(statm).ok_or_else(|| ReadError::malformed("statm"))?;
    Ok(pages * rustix::param::page_size() as u64)
}

/// Reads `stat`. The classification of the command line is copied from `before`.
fn meta(dir: &Dir, before: Option<&ProcessMeta>, buffer: &mut Vec<u8>) -> Result<ProcessMeta, ReadError> {
    let stat = dir.file("stat")?.read_once(buffer).map(parse::Stat::parse)?;
    let stat = stat.ok_or_else(|| ReadError::malformed("stat"))?;
    Ok(ProcessMeta {
        comm: crate::parse::printable(&stat.comm).into(),
        ppid: stat.ppid,
        start_ticks: stat.start_ticks,
        command: before.map_or(Command::NONE, |before| before.command),
        command_hash: before.and_then(|before| before.command_hash),
        zombie: matches!(stat.state, b'Z' | b'X'),
    })
}

impl Collector for ProcessTable {
    fn name(&self) -> &'static str {
        "process"
    }

    fn collect(&mut self, context: &Context<'_>, output: &mut Output<'_>) -> CollectOutcome {
        for reason in ["blocked", "timeout", "too_large", "too_many"] {
            output.read_errors.init_at_zero(reason);
        }
        self.cycle += 1;
        self.lists.begin();
        self.max_open =
            max_open_files(context.inventory.containers.len()).saturating_sub(self.lists.open_count());
        self.lists.max_open = self.max_open / 4;
        let mut found = std::mem::take(&mut output.cycle_data.processes);
        found.clear();
        let mut counts = Counts::default();
        for container in &context.inventory.containers {
            let from = found.all.len();
            let complete =
                self.read_container(context, container, &mut found.all, &mut counts, output.read_errors);
            found.complete.push(complete);
            found.of.push(from..found.all.len());
        }
        self.apply_command_lines(context, &mut found.all, output.read_errors);
        let cycle = self.cycle;
        self.known.retain(|_, entry| entry.cycle == cycle);
        self.open = self.known.values().filter(|entry| entry.statm.is_some()).count();
        self.lists.close_unused();
        let containers = &context.inventory.containers;
        self.over_limit.retain(|id, _| containers.iter().any(|container| container.id == *id));
        let readable = !counts.is_foreign && (counts.listed == 0 || counts.read > 0);
        if !readable {
            found.clear();
        }
        found.readable = readable;
        output.cycle_data.processes = found;
        if readable { CollectOutcome::Ok } else { CollectOutcome::Failed }
    }
}

#[cfg(test)]
mod tests;
