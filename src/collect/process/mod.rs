//! Processes of containers and their resident memory.
//!
//! Every cycle reads the pids of each container and `statm` of each process. The file stays open: if the pid is reused,
//! a read of the old file fails with *gone*. If the limit of open files does not allow that, `statm` is opened each
//! time, and the start time shows whether it is still the same process. Data that rarely changes (name, parent, command
//! line) is read when a process is new, and then occasionally; the command line on other threads, because its process
//! can block that read.
//!
//! The processes of a container with more than [`PROCESSES`](crate::host::bounds::PROCESSES) are not read: all its metrics by process are absent. So are
//! those of the containers with the most processes where all have more than [`PROCESSES_OF_HOST`]. New processes are the
//! expensive ones; a cycle reads [`NEW_PROCESSES`] at most.
//!
//! Roles of processes are in `attribute`, proportional shares in `pss`.

mod command_lines;
mod pid_lists;
mod shares;

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use command_lines::{CommandLine, CommandLines};
use pid_lists::{ListedPids, PidLists};
use shares::fair_shares;

use super::{CollectOutcome, Collector, Context, Output, ReadErrors};
use crate::clock::Timestamp;
use crate::discover::{Container, ContainerId, Version};
use crate::host::bounds::{NEW_PROCESSES, NEW_PROCESSES_OF_CONTAINER, PROCESSES_OF_HOST};
use crate::host::process::{ProcessId, read_stat};
use crate::host::{Dir, KernelFile, ReadError};
use crate::parse::process::{self as parse, ArgumentSettings, Command};

/// Minimum and maximum interval between reads of [`ProcessMeta`]. A new process may still call exec or change its name.
/// The interval doubles after each read, so a late change is seen with a delay in proportion to the process's age.
const META_INTERVALS: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(64));
/// A container whose new processes are too many for one cycle is counted after this many such cycles in sequence: a crowded
/// one that is found when memledger starts takes a few.
const MAX_CYCLES_BEHIND: u32 = 5;

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
    /// Numbers of a training among its arguments; `None` if there is none, or while they are unknown.
    pub settings: Option<ArgumentSettings>,
    /// Hash of the command line, which a fork shares with its parent; `None` while it is unknown.
    pub command_hash: Option<u64>,
    /// True if it ended and its parent has not waited for it: it holds no memory.
    pub zombie: bool,
}

/// The resident memory of a process in bytes, from `statm`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResidentMemory {
    /// All of it.
    pub rss_bytes: u64,
    /// What is neither shared memory nor pages of files.
    pub anon_bytes: u64,
}

/// One process of a container in one cycle.
#[derive(Clone, Debug)]
pub struct Process {
    /// Its pid in the initial pid namespace.
    pub pid: u32,
    /// Resident memory; pages shared after a fork count for each process.
    pub memory: ResidentMemory,
    /// Data that rarely changes.
    pub meta: Arc<ProcessMeta>,
}

impl Process {
    /// Returns its identity.
    pub fn id(&self) -> ProcessId {
        ProcessId { pid: self.pid, start_ticks: self.meta.start_ticks }
    }
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
    /// Returns the processes of a single container, with these starts.
    #[cfg(test)]
    pub fn of_one_container(start_ticks: &[u64]) -> Self {
        let process = |start_ticks: &u64| Process {
            pid: 4711,
            memory: ResidentMemory::default(),
            meta: Arc::new(ProcessMeta {
                comm: "python3".into(),
                ppid: 1,
                start_ticks: *start_ticks,
                command: Command::NONE,
                settings: None,
                command_hash: None,
                zombie: false,
            }),
        };
        let all: Vec<_> = start_ticks.iter().map(process).collect();
        Self { of: std::iter::once(0..all.len()).collect(), complete: vec![true], readable: true, all }
    }

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
    /// Containers with unread new processes, and for how many cycles in sequence.
    behind: HashMap<ContainerId, u32>,
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
    fn read(&mut self, context: &Context<'_>, owner: &Container, pid: u32) -> Result<Process, ReadError> {
        if let Some(entry) = self.known.get_mut(&pid) {
            match entry.read(context, pid, &mut self.buffer) {
                Ok((memory, is_due)) => {
                    entry.cycle = self.cycle;
                    if is_due && !entry.is_queued && !entry.meta.zombie {
                        entry.is_queued = true;
                        let is_new = entry.meta.command_hash.is_none();
                        self.command_lines.queue(owner, entry.target(pid), is_new);
                    }
                    return Ok(Process { pid, memory, meta: Arc::clone(&entry.meta) });
                }
                Err(error) if error.is_gone() => self.forget(pid), // ended; the pid may have been reused
                Err(error) => return Err(error),
            }
        }
        let dir = Dir::open(&context.host_paths.process(pid))?;
        let statm = dir.file("statm")?;
        let memory = statm.read_once(&mut self.buffer).and_then(resident_memory)?;
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
        Ok(Process { pid, memory, meta })
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
            if let Some(CommandLine { command, settings, hash, .. }) = line
                && (entry.meta.command, entry.meta.command_hash) != (command, Some(hash))
            {
                let meta = ProcessMeta {
                    command,
                    settings,
                    command_hash: Some(hash),
                    ..ProcessMeta::clone(&entry.meta)
                };
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

    /// Lists the pids of all containers, and decides how many new processes of each are read.
    fn list(&mut self, context: &Context<'_>, counts: &mut Counts, read_errors: &mut ReadErrors) -> Listing {
        let mut listing = Listing::default();
        let in_initial_pid_namespace = context.host_paths.in_initial_pid_namespace();
        for container in &context.inventory.containers {
            let listed = self.lists.list(context.hierarchy, container, &mut self.buffer, read_errors);
            let pids = &mut self.lists.pids;
            if listed == ListedPids::TooMany {
                pids.clear();
            }
            // v2 lists a process of an invisible pid namespace as 0, and one that has just been reaped; v1 omits both
            counts.is_foreign |= !in_initial_pid_namespace
                && match context.hierarchy.map(|hierarchy| hierarchy.version) {
                    Some(Version::V1) => listed == ListedPids::Complete && pids.is_empty(),
                    _ => pids.contains(&0),
                };
            pids.retain(|pid| *pid != 0);
            let from = listing.pids.len();
            listing.pids.append(pids);
            listing.of.push((listed, from..listing.pids.len()));
        }
        listing.limit(PROCESSES_OF_HOST.max);
        let new = |range: &Range<usize>| {
            let pids = listing.pids[range.clone()].iter();
            pids.filter(|pid| !self.known.contains_key(pid)).count().min(NEW_PROCESSES_OF_CONTAINER.max)
        };
        let new: Vec<usize> = listing.of.iter().map(|(_, range)| new(range)).collect();
        listing.new = fair_shares(&new, NEW_PROCESSES.max);
        listing
    }

    /// Reads the listed processes of one container, and at most `max_new` new ones. Returns true if all were read.
    fn read_container(
        &mut self,
        context: &Context<'_>,
        container: &Container,
        (pids, mut max_new): (&[u32], usize),
        found: &mut Vec<Process>,
        (counts, read_errors): (&mut Counts, &mut ReadErrors),
    ) -> bool {
        let (mut complete, before) = (true, counts.read);
        for pid in pids {
            let is_new = !self.known.contains_key(pid);
            if is_new && max_new == 0 {
                complete = false;
                continue;
            }
            max_new -= usize::from(is_new);
            match self.read(context, container, *pid) {
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
        complete && (pids.is_empty() || counts.read > before)
    }

    /// Notes whether new processes of a container were left for the next cycle.
    fn note_behind(&mut self, container: &Container, is_behind: bool, read_errors: &mut ReadErrors) {
        if !is_behind {
            self.behind.remove(&container.id);
            return;
        }
        let cycles = self.behind.entry(container.id.clone()).or_default();
        *cycles += 1;
        if *cycles > MAX_CYCLES_BEHIND {
            let message = "too many new processes: its metrics by process are missing";
            read_errors.count_of(&container.id, "too_many", message);
        }
    }
}

/// The pids of all containers.
#[derive(Debug, Default)]
struct Listing {
    pids: Vec<u32>,
    /// For each container how complete the list is, and where it is in `pids`.
    of: Vec<(ListedPids, Range<usize>)>,
    /// For each container how many new processes are read.
    new: Vec<usize>,
}

impl Listing {
    /// Treats the containers with the most processes as those with too many, until there are at most `max`.
    fn limit(&mut self, max: usize) {
        let counts: Vec<usize> = self.of.iter().map(|(_, range)| range.len()).collect();
        for ((listed, range), share) in self.of.iter_mut().zip(fair_shares(&counts, max)) {
            if share < range.len() {
                (*listed, *range) = (ListedPids::TooMany, 0..0);
            }
        }
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
    fn target(&self, pid: u32) -> ProcessId {
        ProcessId { pid, start_ticks: self.meta.start_ticks }
    }

    /// Reads the resident memory of this process, and `stat` if it is due. Returns true if it was due; the command line
    /// is not read here.
    fn read(
        &mut self,
        context: &Context<'_>,
        pid: u32,
        buffer: &mut Vec<u8>,
    ) -> Result<(ResidentMemory, bool), ReadError> {
        let is_due = context.now.since(self.meta_at) >= self.meta_interval;
        let (memory, dir) = match &self.statm {
            Some(statm) => (statm.read_once(buffer).and_then(resident_memory)?, None),
            None => {
                let dir = Dir::open(&context.host_paths.process(pid))?;
                let memory = dir.file("statm")?.read_once(buffer).and_then(resident_memory)?;
                (memory, Some(dir))
            }
        };
        // a process without memory may be a zombie now; without an open file the pid may have been reused
        if is_due || memory.rss_bytes == 0 || dir.is_some() {
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
        Ok((memory, is_due))
    }
}

/// Returns how many files of processes may stay open: the limit minus the files of cgroups, the ledger's file of each
/// container, and everything else.
fn max_open_files(cgroup_files: usize, containers: usize) -> usize {
    const REST: usize = 256;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit).unwrap_or(usize::MAX).saturating_sub(REST + cgroup_files + containers)
}

/// Returns the resident memory in the text of a `statm`.
///
/// # Errors
/// [`ReadError::Malformed`].
pub fn resident_memory(statm: &[u8]) -> Result<ResidentMemory, ReadError> {
    let (resident, shared) =
        parse::resident_and_shared_pages(statm).ok_or_else(|| ReadError::malformed("statm"))?;
    let page_size = rustix::param::page_size() as u64;
    // the counters race: shared pages may be counted before the resident ones
    let anon_bytes = resident.saturating_sub(shared) * page_size;
    Ok(ResidentMemory { rss_bytes: resident * page_size, anon_bytes })
}

/// Reads `stat`. The classification of the command line is copied from `before`.
fn meta(dir: &Dir, before: Option<&ProcessMeta>, buffer: &mut Vec<u8>) -> Result<ProcessMeta, ReadError> {
    let stat = read_stat(dir, buffer)?;
    Ok(ProcessMeta {
        comm: crate::text::printable(&stat.comm).into(),
        ppid: stat.ppid,
        start_ticks: stat.start_ticks,
        command: before.map_or(Command::NONE, |before| before.command),
        settings: before.and_then(|before| before.settings.clone()),
        command_hash: before.and_then(|before| before.command_hash),
        zombie: stat.has_ended(),
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
        let (cgroup_files, containers) = (output.cycle_data.cgroup_files, context.inventory.containers.len());
        self.max_open = max_open_files(cgroup_files, containers).saturating_sub(self.lists.open_count());
        self.lists.max_open = self.max_open / 4;
        let mut found = std::mem::take(&mut output.cycle_data.processes);
        found.clear();
        let mut counts = Counts::default();
        let listing = self.list(context, &mut counts, output.read_errors);
        for (number, container) in context.inventory.containers.iter().enumerate() {
            let from = found.all.len();
            let (listed, range) = &listing.of[number];
            let mut complete = *listed == ListedPids::Complete;
            if *listed == ListedPids::TooMany {
                let message = "too many processes or cgroups: its metrics by process are missing";
                output.read_errors.count_of(&container.id, "too_many", message);
            } else {
                let pids = &listing.pids[range.clone()];
                let new = pids.iter().filter(|pid| !self.known.contains_key(pid)).count();
                let limits = (pids, listing.new[number]);
                complete &= self.read_container(
                    context,
                    container,
                    limits,
                    &mut found.all,
                    (&mut counts, output.read_errors),
                );
                self.note_behind(container, new > listing.new[number], output.read_errors);
            }
            found.complete.push(complete);
            found.of.push(from..found.all.len());
        }
        self.apply_command_lines(context, &mut found.all, output.read_errors);
        let cycle = self.cycle;
        self.known.retain(|_, entry| entry.cycle == cycle);
        self.open = self.known.values().filter(|entry| entry.statm.is_some()).count();
        self.lists.close_unused();
        let running = context.inventory.ids();
        self.behind.retain(|id, _| running.contains(id));
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
