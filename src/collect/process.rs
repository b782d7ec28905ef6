//! Processes of containers: who they are, and their resident memory.
//!
//! Every cycle reads the pids of each container and `statm` of each process, which stays open: a pid that was reused
//! answers *gone* on the old file. What changes rarely (name, parent, command line) is read when a process is new, in
//! its first cycles, and then from time to time.
//!
//! Not here: what role a process has (`attribute`) and proportional shares (`pss`).

use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::{Collector, Context, Faults, Outcome, Output};
use crate::clock::Moment;
use crate::discover::Container;
use crate::host::{Dir, KernelFile, ReadError};
use crate::parse::process::{self as parse, Command, Launch};

/// A young process may still exec or name itself: so often its facts are read again in a row.
const YOUNG_READS: u8 = 3;
/// Afterwards they are read again about so often, spread by pid.
const FACTS_EVERY: Duration = Duration::from_secs(30);

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
    /// The pids are those of the host; if not, nothing about processes can be said.
    pub readable: bool,
}

impl Processes {
    /// The processes of one container.
    pub fn of(&self, container: usize) -> &[Process] {
        self.of.get(container).map_or(&[], |range| &self.all[range.clone()])
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

    fn clear(&mut self) {
        self.all.clear();
        self.of.clear();
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
    proc: Option<Dir>,
}

#[derive(Debug)]
struct Entry {
    statm: KernelFile,
    facts: Arc<Facts>,
    facts_at: Moment,
    reads: u8,
    cycle: u64,
}

#[derive(Debug)]
struct PidList {
    file: KernelFile,
    cycle: u64,
}

impl ProcessTable {
    /// Fills `self.pids` with the processes of a container and of the cgroups below it.
    fn list(&mut self, context: &Context<'_>, container: &Container, faults: &mut Faults) {
        self.pids.clear();
        let (Some(hierarchy), Some(cgroup)) = (context.hierarchy, &container.cgroup) else { return };
        for path in std::iter::once(&cgroup.path).chain(&cgroup.below) {
            if let Err(error) = self.list_one(&hierarchy.root, path) {
                faults.note(&error);
            }
        }
    }

    fn list_one(&mut self, root: &std::path::Path, path: &PathBuf) -> Result<(), ReadError> {
        for attempt in 0.. {
            if !self.lists.contains_key(path) {
                let file = Dir::open(&root.join(path))?.file("cgroup.procs")?;
                self.lists.insert(path.clone(), PidList { file, cycle: self.cycle });
            }
            let Some(list) = self.lists.get_mut(path) else { break };
            list.cycle = self.cycle;
            match list.file.read_all(&mut self.buffer) {
                Ok(text) => {
                    let lines = text.split(|&b| b == b'\n').filter(|line| !line.is_empty());
                    self.pids.extend(
                        lines.filter_map(crate::parse::number).filter_map(|pid| u32::try_from(pid).ok()),
                    );
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
            match entry.statm.read_once(&mut self.buffer).and_then(rss_bytes) {
                Ok(rss_bytes) => {
                    entry.cycle = self.cycle;
                    let due = FACTS_EVERY + Duration::from_secs(u64::from(pid % 16));
                    if rss_bytes == 0 || entry.reads < YOUNG_READS || context.now.since(entry.facts_at) >= due
                    {
                        let facts = facts(
                            &proc_dir(&mut self.proc, context)?.path().join(pid.to_string()),
                            &mut self.buffer,
                        )?;
                        if *entry.facts != facts {
                            entry.facts = Arc::new(facts);
                        }
                        entry.facts_at = context.now;
                        entry.reads = entry.reads.saturating_add(1);
                    }
                    return Ok(Process { pid, rss_bytes, facts: Arc::clone(&entry.facts) });
                }
                Err(error) if error.is_gone() => {} // ended, and the pid may be another's by now
                Err(error) => return Err(error),
            }
            self.known.remove(&pid);
        }
        let path = proc_dir(&mut self.proc, context)?.path().join(pid.to_string());
        let statm = Dir::open(&path)?.file("statm")?;
        let rss_bytes = statm.read_once(&mut self.buffer).and_then(rss_bytes)?;
        let facts = Arc::new(facts(&path, &mut self.buffer)?);
        let entry =
            Entry { statm, facts: Arc::clone(&facts), facts_at: context.now, reads: 1, cycle: self.cycle };
        self.known.insert(pid, entry);
        Ok(Process { pid, rss_bytes, facts })
    }
}

fn proc_dir<'a>(held: &'a mut Option<Dir>, context: &Context<'_>) -> Result<&'a Dir, ReadError> {
    if held.is_none() {
        *held = Some(Dir::open(&context.roots.proc)?);
    }
    held.as_ref().ok_or_else(|| ReadError::Absent("proc".into()))
}

fn rss_bytes(statm: &[u8]) -> Result<u64, ReadError> {
    let pages = parse::resident_pages(statm).ok_or_else(|| ReadError::malformed("statm"))?;
    Ok(pages * rustix::param::page_size() as u64)
}

/// Reads `stat` and `cmdline` below one directory, so that both are of the same process.
fn facts(path: &std::path::Path, buffer: &mut Vec<u8>) -> Result<Facts, ReadError> {
    let dir = Dir::open(path)?;
    let stat = dir.file("stat")?.read_once(buffer).map(parse::Stat::parse)?;
    let stat = stat.ok_or_else(|| ReadError::malformed("stat"))?;
    let zombie = matches!(stat.state, b'Z' | b'X');
    let cmdline = dir.file("cmdline")?;
    let cmdline = cmdline.read_once(buffer)?;
    let mut hasher = DefaultHasher::new();
    cmdline.hash(&mut hasher);
    Ok(Facts {
        comm: String::from_utf8_lossy(&stat.comm).into(),
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
        let mut found = std::mem::take(&mut output.readings.processes);
        found.clear();
        let mut foreign = false;
        for container in &context.inventory.containers {
            let from = found.all.len();
            self.list(context, container, output.faults);
            let pids = std::mem::take(&mut self.pids);
            for pid in &pids {
                if *pid == 0 {
                    foreign = true; // a process of a pid namespace that cannot be seen from here
                    continue;
                }
                match self.read(context, *pid) {
                    Ok(process) if process.facts.zombie => {}
                    Ok(process) => found.all.push(process),
                    Err(error) => output.faults.note(&error),
                }
            }
            self.pids = pids;
            found.of.push(from..found.all.len());
        }
        let cycle = self.cycle;
        self.known.retain(|_, entry| entry.cycle == cycle);
        self.lists.retain(|_, list| list.cycle == cycle);
        if foreign {
            found.clear();
        }
        found.readable = !foreign;
        output.readings.processes = found;
        if foreign { Outcome::Failed } else { Outcome::Read }
    }
}
