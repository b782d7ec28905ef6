//! Processes of containers: who they are, and their resident memory.
//!
//! Every cycle reads the pids of each container and `statm` of each process, which stays open: a pid that was reused
//! answers *gone* on the old file. Where the limit of open files does not allow that, `statm` is opened each time and
//! the start time tells whether it is still the same process. What changes rarely (name, parent, command line) is read when a process is new, and
//! then from time to time.
//!
//! Not here: what role a process has (`attribute`) and proportional shares (`pss`).

use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::{Collector, Context, Faults, Outcome, Output};
use crate::clock::Moment;
use crate::discover::{Container, Hierarchy, Version};
use crate::host::{Dir, KernelFile, ReadError};
use crate::parse::process::{self as parse, Command, Launch};

/// A young process may still exec or name itself. Its facts are read again after this pause, which then doubles each
/// time up to the longest: what changes late is seen late, in proportion to the process's age.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(64));

/// Name, parent and kind of one process. Its command line is not kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The name that the process gave itself, made printable.
    pub comm: Arc<str>,
    /// Parent.
    pub ppid: u32,
    /// Clock ticks from boot to its start.
    pub start_ticks: u64,
    /// What the command line tells.
    pub command: Command,
    /// A fingerprint of the command line: a fork has its parent's.
    pub command_hash: u64,
    /// It ended and was not waited for: it holds nothing.
    pub zombie: bool,
}

/// One process of a container in one cycle.
#[derive(Clone, Debug)]
pub struct Process {
    /// Its pid as the kernel's first pid namespace has it.
    pub pid: u32,
    /// Resident memory in bytes; pages shared after a fork count for each process.
    pub rss_bytes: u64,
    /// What changes rarely.
    pub facts: Arc<Facts>,
}

/// All processes of all containers, those of one container side by side.
#[derive(Debug, Default)]
pub struct Processes {
    all: Vec<Process>,
    of: Vec<Range<usize>>,
    /// Whether all that a container has was read; if not, a sum would be too small.
    complete: Vec<bool>,
    /// Processes can be read at all: the pids are those of the host, and `/proc` shows them.
    pub readable: bool,
}

impl Processes {
    /// The processes of one container.
    pub fn of(&self, container: usize) -> &[Process] {
        self.of.get(container).map_or(&[], |range| &self.all[range.clone()])
    }

    /// True if these are all processes of the container. An empty list is then *none*, and otherwise *unknown*.
    pub fn complete(&self, container: usize) -> bool {
        self.readable && self.complete.get(container).is_some_and(|complete| *complete)
    }

    /// Container number and process, for all.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Process)> {
        self.of.iter().enumerate().flat_map(|(number, range)| {
            self.all[range.clone()].iter().map(move |process| (number as u32, process))
        })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Forgets the cycle before.
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
    known: HashMap<u32, Entry>,
    lists: HashMap<PathBuf, PidList>,
    buffer: Vec<u8>,
    pids: Vec<u32>,
    cycle: u64,
    /// How many `statm` are open, and how many may be.
    open: usize,
    may_open: usize,
}

#[derive(Debug)]
struct Entry {
    /// `None` when no more files may stay open.
    statm: Option<KernelFile>,
    facts: Arc<Facts>,
    facts_at: Moment,
    pause: Duration,
    cycle: u64,
}

/// The pids of one cgroup.
///
/// v1 makes the list when the file is opened and keeps it until nobody has read it for a second, so a file that stays
/// open shows the same pids for ever if it is read at least once a second: there only the directory stays open.
#[derive(Debug)]
struct PidList {
    held: Held,
    cycle: u64,
}

#[derive(Debug)]
enum Held {
    Directory(Dir),
    File(KernelFile),
}

impl PidList {
    const FILE: &str = "cgroup.procs";

    fn open(hierarchy: &Hierarchy, path: &Path) -> Result<Self, ReadError> {
        let dir = Dir::open(&hierarchy.root.join(path))?;
        let held = match hierarchy.version {
            Version::V1 => Held::Directory(dir),
            Version::V2 => Held::File(dir.file(Self::FILE)?),
        };
        Ok(Self { held, cycle: 0 })
    }

    fn read<'a>(&self, buffer: &'a mut Vec<u8>) -> Result<&'a [u8], ReadError> {
        match &self.held {
            Held::Directory(dir) => dir.file(Self::FILE)?.read_all(buffer),
            Held::File(file) => file.read_all(buffer),
        }
    }
}

impl ProcessTable {
    /// Fills `self.pids` with the processes of a container and of the cgroups below it. False if some are missing.
    fn list(&mut self, context: &Context<'_>, container: &Container, faults: &mut Faults) -> bool {
        self.pids.clear();
        let (Some(hierarchy), Some(cgroup)) = (context.hierarchy, &container.cgroup) else { return false };
        let mut complete = true;
        for path in std::iter::once(&cgroup.path).chain(&cgroup.below) {
            if let Err(error) = self.list_one(hierarchy, path) {
                // a cgroup below may go at any time; without its own the container has ended
                complete &= error.is_gone() && *path != cgroup.path;
                faults.note(&error);
            }
        }
        complete
    }

    fn list_one(&mut self, hierarchy: &Hierarchy, path: &PathBuf) -> Result<(), ReadError> {
        if self.lists.len() >= self.may_open / 4 && !self.lists.contains_key(path) {
            let list = PidList::open(hierarchy, path)?; // a container may make thousands of cgroups: not held
            self.pids.extend(pids_of(list.read(&mut self.buffer)?));
            return Ok(());
        }
        for attempt in 0.. {
            if !self.lists.contains_key(path) {
                self.lists.insert(path.clone(), PidList::open(hierarchy, path)?);
            }
            let Some(list) = self.lists.get_mut(path) else { break };
            list.cycle = self.cycle;
            match list.read(&mut self.buffer) {
                Ok(text) => {
                    self.pids.extend(pids_of(text));
                    break;
                }
                // made again under the same path: open the new one, once
                Err(error) if error.is_gone() && attempt == 0 => drop(self.lists.remove(path)),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// One process of this cycle; an error that is *gone* if it ended.
    fn read(&mut self, context: &Context<'_>, pid: u32) -> Result<Process, ReadError> {
        if let Some(entry) = self.known.get_mut(&pid) {
            match entry.read(context, pid, &mut self.buffer) {
                Ok(rss_bytes) => {
                    entry.cycle = self.cycle;
                    return Ok(Process { pid, rss_bytes, facts: Arc::clone(&entry.facts) });
                }
                Err(error) if error.is_gone() => self.forget(pid), // ended, and the pid may be another's by now
                Err(error) => return Err(error),
            }
        }
        let dir = Dir::open(&context.roots.process(pid))?;
        let statm = dir.file("statm")?;
        let rss_bytes = statm.read_once(&mut self.buffer).and_then(rss_bytes)?;
        let facts = Arc::new(facts(&dir, &mut self.buffer)?);
        let statm = (self.open < self.may_open).then_some(statm);
        self.open += usize::from(statm.is_some());
        let entry = Entry {
            statm,
            facts: Arc::clone(&facts),
            facts_at: context.now,
            pause: PAUSES.0,
            cycle: self.cycle,
        };
        self.known.insert(pid, entry);
        Ok(Process { pid, rss_bytes, facts })
    }

    fn forget(&mut self, pid: u32) {
        let entry = self.known.remove(&pid);
        self.open -= usize::from(entry.is_some_and(|entry| entry.statm.is_some()));
    }
}

impl Entry {
    /// Resident memory of the process that this entry was made for; its facts are read again when they are due.
    fn read(&mut self, context: &Context<'_>, pid: u32, buffer: &mut Vec<u8>) -> Result<u64, ReadError> {
        let due = context.now.since(self.facts_at) >= self.pause;
        let (rss_bytes, dir) = match &self.statm {
            Some(statm) => (statm.read_once(buffer).and_then(rss_bytes)?, None),
            None => {
                let dir = Dir::open(&context.roots.process(pid))?;
                let rss_bytes = dir.file("statm")?.read_once(buffer).and_then(rss_bytes)?;
                (rss_bytes, Some(dir))
            }
        };
        // a process without memory may be a zombie by now; one whose file is not held may be another
        if due || rss_bytes == 0 || dir.is_some() {
            let dir = dir.map_or_else(|| Dir::open(&context.roots.process(pid)), Ok)?;
            let facts = facts(&dir, buffer)?;
            if facts.start_ticks != self.facts.start_ticks {
                return Err(ReadError::Gone(format!("process {pid}")));
            }
            if *self.facts != facts {
                self.facts = Arc::new(facts);
            }
            self.facts_at = context.now;
            // a little apart, so that processes of one age do not stay in step for ever
            self.pause = (self.pause * 2).min(PAUSES.1) + Duration::from_millis(u64::from(pid % 64) * 10);
        }
        Ok(rss_bytes)
    }
}

/// How many files of processes may stay open: what the limit leaves after those of the containers and the rest.
fn may_open(containers: usize) -> usize {
    const PER_CONTAINER: usize = 10;
    const REST: usize = 256;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit).unwrap_or(usize::MAX).saturating_sub(REST + PER_CONTAINER * containers)
}

fn pids_of(list: &[u8]) -> impl Iterator<Item = u32> {
    let numbers = crate::parse::lines(list).filter_map(crate::parse::number);
    numbers.filter_map(|pid| u32::try_from(pid).ok())
}

fn rss_bytes(statm: &[u8]) -> Result<u64, ReadError> {
    let pages = parse::resident_pages(statm).ok_or_else(|| ReadError::malformed("statm"))?;
    Ok(pages * rustix::param::page_size() as u64)
}

/// Reads `stat` and `cmdline` below one held directory, so that both are of the same process.
fn facts(dir: &Dir, buffer: &mut Vec<u8>) -> Result<Facts, ReadError> {
    let stat = dir.file("stat")?.read_once(buffer).map(parse::Stat::parse)?;
    let stat = stat.ok_or_else(|| ReadError::malformed("stat"))?;
    let zombie = matches!(stat.state, b'Z' | b'X');
    let cmdline = dir.file("cmdline")?;
    let cmdline = cmdline.read_once(buffer)?;
    let mut hasher = DefaultHasher::new();
    cmdline.hash(&mut hasher);
    Ok(Facts {
        comm: crate::parse::printable(&stat.comm).into(),
        ppid: stat.ppid,
        start_ticks: stat.start_ticks,
        command: if zombie { Command { python: false, launch: Launch::Plain } } else { Command::of(cmdline) },
        command_hash: hasher.finish(),
        zombie,
    })
}

impl Collector for ProcessTable {
    fn name(&self) -> &'static str {
        "process"
    }

    fn collect(&mut self, context: &Context<'_>, output: &mut Output<'_>) -> Outcome {
        self.cycle += 1;
        self.may_open = may_open(context.inventory.containers.len()).saturating_sub(self.lists.len());
        let mut found = std::mem::take(&mut output.readings.processes);
        found.clear();
        let mut foreign = false;
        let (mut listed, mut read) = (0, 0);
        for container in &context.inventory.containers {
            let from = found.all.len();
            let mut complete = self.list(context, container, output.faults);
            let before = read;
            let pids = std::mem::take(&mut self.pids);
            // v2 writes 0 for a process of a pid namespace that cannot be seen from here, v1 leaves it out
            foreign |= complete && pids.is_empty() && !context.roots.in_first_pid_namespace() && {
                context.hierarchy.is_some_and(|hierarchy| hierarchy.version == Version::V1)
            };
            for pid in &pids {
                if *pid == 0 {
                    foreign = true;
                    continue;
                }
                match self.read(context, *pid) {
                    Ok(process) => {
                        read += 1;
                        if !process.facts.zombie {
                            found.all.push(process);
                        }
                    }
                    Err(error) => {
                        complete &= error.is_gone();
                        output.faults.note(&error);
                    }
                }
            }
            listed += pids.len();
            // all of them gone at once: it has ended, or /proc hides them (hidepid)
            found.complete.push(complete && (pids.is_empty() || read > before));
            self.pids = pids;
            found.of.push(from..found.all.len());
        }
        let cycle = self.cycle;
        self.known.retain(|_, entry| entry.cycle == cycle);
        self.open = self.known.values().filter(|entry| entry.statm.is_some()).count();
        self.lists.retain(|_, list| list.cycle == cycle);
        let readable = !foreign && (listed == 0 || read > 0);
        if !readable {
            found.clear();
        }
        found.readable = readable;
        output.readings.processes = found;
        if readable { Outcome::Read } else { Outcome::Failed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pid_that_was_cut_off_is_another_process_s() {
        assert_eq!(pids_of(b"7\n12\n1").collect::<Vec<_>>(), [7, 12]);
    }
}
