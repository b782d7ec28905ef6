//! Who a process on a GPU is: pid to start time, name and cgroup, from `/proc/PID`; and whether the pids of the driver
//! are those of this host at all.
//!
//! Between two readings memory is sampled quickly. A process that was known then and has not ended is not looked up
//! again: one poll(2) over the pidfds of all of them tells who has ended.
//!
//! A driver may go on listing a process that is dead, and its pid may go to another one. What that one is listed with is
//! the dead one's as long as it stays the same amount.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::reading::{GpuProcess, Owner, Pids};
use crate::host::{Dir, KernelFile, ReadError, Roots};
use crate::parse::process::{Stat, cgroup_path};

/// A clock tick, and a little more for the two clocks involved.
const START_SLACK_TICKS: u64 = 3;
/// The kernel's thread of which all other threads of the kernel are children.
const KTHREADD: u32 = 2;

/// The host's processes, as a driver names them.
#[derive(Debug)]
pub struct Owners {
    roots: Roots,
    cgroup_v1: bool,
    known: HashMap<u32, Known>,
    /// Dead processes that the driver still lists, with what they hold over all devices.
    ghosts: HashMap<u32, Option<u64>>,
    proof: Proof,
}

#[derive(Debug)]
struct Known {
    owner: Owner,
    /// Readable once the process has ended; `None` where the kernel gives none.
    life: Option<OwnedFd>,
    /// What it held over all devices in the last whole reading.
    held: Option<u64>,
}

/// What a pid turned out to be.
enum Found {
    Owner(Owner),
    /// A thread of the kernel, which cannot hold GPU memory.
    Kernel,
    /// It started after the driver was asked, so it has only inherited the number; or /proc does not tell.
    Unsure,
    /// There is no such process.
    Nobody,
}

impl Owners {
    /// Nobody is known yet.
    pub fn new(roots: Roots, cgroup_v1: bool) -> Self {
        Self { roots, cgroup_v1, known: HashMap::new(), ghosts: HashMap::new(), proof: Proof::default() }
    }

    /// Names the processes of a whole reading, each looked up anew, and tells whether the driver's pids may be believed.
    /// If not, none is named. `uptime` was taken before the driver was asked.
    pub fn name<'a>(
        &mut self,
        processes: impl Iterator<Item = &'a mut GpuProcess>,
        uptime: Option<u64>,
        faults: &mut Vec<&'static str>,
    ) -> Pids {
        let processes: Vec<_> = processes.collect();
        if !self.roots.in_first_pid_namespace() {
            self.known.clear();
            return Pids::Withheld("memledger is not in the host's pid namespace");
        }
        let Some(uptime) = uptime else {
            self.known.clear();
            return Pids::Withheld("/proc/uptime cannot be read");
        };
        let totals = totals(&processes);
        self.ghosts.retain(|pid, _| totals.contains_key(pid));
        let (mut owners, mut seen, mut kernel) = (HashMap::new(), 0, false);
        for (pid, held) in &totals {
            let before = self.known.get(pid).map(|known| (known.owner.start_ticks, known.held));
            match self.look_up(*pid, uptime, faults) {
                Found::Owner(owner) => {
                    seen += 1;
                    if before.is_some_and(|(start, before)| start != owner.start_ticks && before == *held) {
                        self.ghosts.insert(*pid, *held);
                    }
                    if self.ghosts.get(pid) != Some(held) {
                        self.ghosts.remove(pid);
                        owners.insert(*pid, owner);
                    }
                }
                Found::Nobody => drop(self.ghosts.insert(*pid, *held)),
                Found::Kernel => kernel = true,
                Found::Unsure => {}
            }
        }
        self.known.retain(|pid, _| owners.contains_key(pid));
        for (pid, known) in &mut self.known {
            known.held = totals.get(pid).copied().flatten();
        }
        let pids = self.proof.judge(totals.len(), seen, kernel);
        if pids == Pids::Proven {
            for process in processes {
                process.owner = owners.get(&process.pid).cloned();
            }
        }
        pids
    }

    /// Names processes of a quick look: those who are known and live on without another look at them.
    pub fn name_quickly<'a>(
        &mut self,
        processes: impl Iterator<Item = &'a mut GpuProcess>,
        uptime: Option<u64>,
        faults: &mut Vec<&'static str>,
    ) {
        if !self.proof.proven {
            return;
        }
        let processes: Vec<_> = processes.collect();
        let totals = totals(&processes);
        for pid in self.forget_ended() {
            if let Some(held) = totals.get(&pid) {
                self.ghosts.insert(pid, *held); // it may have changed since the last whole reading
            }
        }
        let mut nobody = HashSet::new();
        for process in processes {
            process.owner = match self.known.get(&process.pid) {
                Some(known) if known.life.is_some() => Some(known.owner.clone()),
                _ if nobody.contains(&process.pid) || self.ghosts.contains_key(&process.pid) => None,
                _ => {
                    let Some(uptime) = uptime else { return };
                    let before =
                        self.known.get(&process.pid).map(|known| (known.owner.start_ticks, known.held));
                    match (self.look_up(process.pid, uptime, faults), before) {
                        (Found::Owner(owner), Some((start, held))) if start != owner.start_ticks => {
                            self.ghosts.insert(process.pid, held);
                            None
                        }
                        (Found::Owner(owner), _) => Some(owner),
                        (Found::Nobody, _) => {
                            self.ghosts.insert(process.pid, totals.get(&process.pid).copied().flatten());
                            None
                        }
                        (Found::Kernel | Found::Unsure, _) => {
                            nobody.insert(process.pid);
                            None
                        }
                    }
                }
            };
        }
    }

    /// Forgets who has ended, by one system call. Returns whom.
    fn forget_ended(&mut self) -> Vec<u32> {
        let ended: Vec<u32> = {
            let lives = self.known.iter().filter_map(|(pid, known)| Some((*pid, known.life.as_ref()?)));
            let (pids, lives): (Vec<_>, Vec<_>) = lives.unzip();
            let mut polled: Vec<_> = lives.iter().map(|life| PollFd::new(life, PollFlags::IN)).collect();
            if poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_err() {
                pids // nothing is known of them: they are looked up again
            } else {
                let ended = std::iter::zip(pids, &polled).filter(|(_, polled)| !polled.revents().is_empty());
                ended.map(|(pid, _)| pid).collect()
            }
        };
        for pid in &ended {
            if let Some(dead) = self.known.remove(pid) {
                self.ghosts.insert(*pid, dead.held);
            }
        }
        ended
    }

    fn look_up(&mut self, pid: u32, uptime: u64, faults: &mut Vec<&'static str>) -> Found {
        match self.read(pid) {
            Ok(Some(owner)) if owner.start_ticks <= uptime + START_SLACK_TICKS => Found::Owner(owner),
            Ok(Some(_)) => {
                self.known.remove(&pid); // else the next quick look would take it for somebody who is known
                Found::Unsure
            }
            Ok(None) => Found::Kernel,
            Err(error) if error.is_gone() => Found::Nobody,
            Err(error) => {
                faults.extend(error.fault_reason());
                Found::Unsure
            }
        }
    }

    /// `None` is a thread of the kernel.
    fn read(&mut self, pid: u32) -> Result<Option<Owner>, ReadError> {
        let mut buffer = Vec::new();
        let known = self.known.remove(&pid);
        let life = match &known {
            Some(_) => None,
            // before the look at /proc: should the pid be reused in between, this one is found to have ended
            None => {
                Pid::from_raw(pid.cast_signed()).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
            }
        };
        let dir = Dir::open(&self.roots.process(pid))?;
        let stat = Stat::parse(dir.file("stat")?.read_once(&mut buffer)?);
        let stat = stat.ok_or_else(|| ReadError::malformed("stat"))?;
        if pid == KTHREADD || stat.ppid == KTHREADD {
            return Ok(None);
        }
        let comm = String::from_utf8_lossy(&stat.comm);
        let known = match known {
            Some(known) if known.owner.start_ticks != stat.start_ticks => return self.read(pid), // another one by now
            Some(mut known) => {
                if *known.owner.comm != *comm {
                    known.owner.comm = comm.into();
                }
                known
            }
            None => {
                let file = dir.file("cgroup")?;
                let cgroup = cgroup_path(file.read_once(&mut buffer)?, self.cgroup_v1);
                let cgroup = cgroup.ok_or_else(|| ReadError::malformed("cgroup"))?;
                let cgroup = String::from_utf8_lossy(cgroup).into();
                let owner = Owner { start_ticks: stat.start_ticks, comm: comm.into(), cgroup };
                Known { owner, life, held: None }
            }
        };
        let owner = known.owner.clone();
        self.known.insert(pid, known);
        Ok(Some(owner))
    }
}

/// What each process holds over all devices; `None` if a part of it is not told.
fn totals(processes: &[&mut GpuProcess]) -> HashMap<u32, Option<u64>> {
    let mut totals: HashMap<u32, Option<u64>> = HashMap::new();
    for process in processes {
        let add = |sum: &mut Option<u64>| *sum = sum.zip(process.used).map(|(sum, used)| sum + used);
        totals.entry(process.pid).and_modify(add).or_insert(process.used);
    }
    totals
}

/// Whether the pids that a driver names are those of this host. It cannot change while memledger runs, so it is proven
/// once: a dead process that the driver still lists withholds nothing later.
#[derive(Debug, Default)]
struct Proof {
    proven: bool,
}

impl Proof {
    /// Judges one reading: how many processes were named, how many of them can be seen, and whether one of them is a
    /// thread of the kernel.
    fn judge(&mut self, named: usize, seen: usize, kernel: bool) -> Pids {
        if self.proven || named == 0 {
            return Pids::Proven;
        }
        if kernel {
            return Pids::Withheld("a process that the driver names is a thread of the kernel here");
        }
        // a few dead ones may be among them; if most cannot be seen, the others may be strangers with the same number
        if seen * 2 < named {
            return Pids::Withheld("most of the processes that the driver names cannot be seen here");
        }
        self.proven = true;
        Pids::Proven
    }
}

/// Clock ticks since boot, from `/proc/uptime` of the same host as the processes.
pub fn uptime_ticks(roots: &Roots) -> Option<u64> {
    let mut buffer = Vec::new();
    let file = KernelFile::open(&roots.proc.join("uptime")).ok()?;
    let text = std::str::from_utf8(file.read_once(&mut buffer).ok()?).ok()?;
    let seconds: f64 = text.split(' ').next()?.parse().ok()?;
    Some((seconds * rustix::param::clock_ticks_per_second() as f64) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pids_are_believed_once_most_of_them_are_seen_and_for_good_from_then_on() {
        let mut proof = Proof::default();
        assert_eq!(proof.judge(0, 0, false), Pids::Proven, "nothing is named: nothing to believe");
        assert!(matches!(proof.judge(1, 0, false), Pids::Withheld(_)), "which proves nothing for later");
        assert!(matches!(proof.judge(3, 1, false), Pids::Withheld(_)), "a stranger may have the number");
        assert!(matches!(proof.judge(3, 2, true), Pids::Withheld(_)), "the kernel holds no GPU memory");
        assert_eq!(proof.judge(2, 1, false), Pids::Proven, "one dead process withholds nothing");
        assert_eq!(proof.judge(5, 0, false), Pids::Proven, "dead ones that the driver still lists");
    }

    /// `None`, said aloud, where nobody is named: outside the host's pid namespace.
    fn owners() -> Option<Owners> {
        if !Roots::default().in_first_pid_namespace() {
            assert!(
                std::env::var_os("MEMLEDGER_TESTS_REQUIRED").is_none(),
                "these tests need the host's pid namespace"
            );
            eprintln!("skipped: not in the host's pid namespace");
            return None;
        }
        let v1 = !std::path::Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
        Some(Owners::new(Roots::default(), v1))
    }

    #[test]
    fn a_quick_look_names_nobody_who_is_too_young_or_has_the_pid_of_somebody_dead() {
        let Some(mut owners) = owners() else { return };
        let mut faults = vec![];
        let later = uptime_ticks(&Roots::default()).map(|ticks| ticks + 10);
        let mut own = GpuProcess::new(std::process::id(), Some(1));
        owners.name(std::iter::once(&mut own), later, &mut faults);
        assert!(own.owner.is_some(), "the driver's pids are proven");

        let mut child = std::process::Command::new("sleep").arg("600").spawn().expect("sleep");
        let mut young = GpuProcess::new(child.id(), Some(5));
        owners.name_quickly(std::iter::once(&mut young), Some(0), &mut faults); // the driver was asked before its start
        assert_eq!(young.owner, None);
        owners.name_quickly(std::iter::once(&mut young), None, &mut faults);
        assert_eq!(young.owner, None, "it is not known by that");
        owners.name_quickly(std::iter::once(&mut young), later, &mut faults);
        assert!(young.owner.is_some(), "by now it is old enough");

        child.kill().and_then(|()| child.wait()).expect("ended");
        young.used = Some(7);
        owners.name_quickly(std::iter::once(&mut young), later, &mut faults);
        assert_eq!(
            (&young.owner, owners.ghosts.get(&young.pid)),
            (&None, Some(&Some(7))),
            "as it is listed now"
        );
        let mut dead = GpuProcess::new((1 << 22) - 1, Some(9));
        owners.name_quickly(std::iter::once(&mut dead), later, &mut faults);
        assert_eq!(owners.ghosts.get(&dead.pid), Some(&Some(9)), "whoever gets its pid does not get this");
        assert_eq!(faults, Vec::<&str>::new());
    }

    #[test]
    fn who_has_ended_is_not_taken_for_who_has_its_pid_now() {
        let Some(mut owners) = owners() else { return };
        let mut faults = vec![];
        let mut child = std::process::Command::new("sleep").arg("600").spawn().expect("sleep");
        let mut process = GpuProcess::new(child.id(), Some(1));

        // a clock tick may not be over yet
        let later = uptime_ticks(&Roots::default()).map(|ticks| ticks + 10);
        owners.name(std::iter::once(&mut process), later, &mut faults);
        assert_eq!(process.owner.as_ref().map(|owner| &*owner.comm), Some("sleep"));
        owners.name_quickly(std::iter::once(&mut process), None, &mut faults); // nobody can be looked up
        assert!(process.owner.is_some());
        child.kill().and_then(|()| child.wait()).expect("ended");
        owners.name_quickly(std::iter::once(&mut process), later, &mut faults);
        assert_eq!((process.owner, faults), (None, vec![]));
    }
}
