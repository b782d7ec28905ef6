//! Who a process on a GPU is: pid to start time, name and cgroup, from `/proc/PID`; and whether the pids of the driver
//! are those of this host at all.
//!
//! Between two readings memory is sampled quickly. A process that was known then and has not ended is not looked up
//! again: one poll(2) over the pidfds of all of them tells who has ended, so that a reused pid is never a stranger's.

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
    proof: Proof,
}

#[derive(Debug)]
struct Known {
    owner: Owner,
    /// Readable once the process has ended; `None` where the kernel gives none.
    life: Option<OwnedFd>,
}

/// What a pid turned out to be.
enum Found {
    Owner(Owner),
    /// A thread of the kernel, which cannot hold GPU memory.
    Kernel,
    /// No such process can be seen, or only one that started after the driver was asked.
    Nobody,
}

impl Owners {
    /// Nobody is known yet.
    pub fn new(roots: Roots, cgroup_v1: bool) -> Self {
        Self { roots, cgroup_v1, known: HashMap::new(), proof: Proof::default() }
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
        let mut seen: HashMap<u32, Option<Owner>> = HashMap::new();
        let mut kernel = false;
        for process in &processes {
            seen.entry(process.pid).or_insert_with(|| match self.look_up(process.pid, uptime, faults) {
                Found::Owner(owner) => Some(owner),
                Found::Kernel => {
                    kernel = true;
                    None
                }
                Found::Nobody => None,
            });
        }
        self.known.retain(|pid, _| seen.get(pid).is_some_and(Option::is_some));
        let pids = self.proof.judge(seen.len(), seen.values().flatten().count(), kernel);
        if pids == Pids::Proven {
            for process in processes {
                process.owner = seen.get(&process.pid).cloned().flatten();
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
        self.forget_ended();
        let mut nobody = HashSet::new();
        for process in processes {
            process.owner = match self.known.get(&process.pid) {
                Some(known) if known.life.is_some() => Some(known.owner.clone()),
                _ if nobody.contains(&process.pid) => None,
                _ => {
                    let Some(uptime) = uptime else { return };
                    match self.look_up(process.pid, uptime, faults) {
                        Found::Owner(owner) => Some(owner),
                        Found::Kernel | Found::Nobody => {
                            nobody.insert(process.pid);
                            None
                        }
                    }
                }
            };
        }
    }

    /// Forgets who has ended, by one system call.
    fn forget_ended(&mut self) {
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
        for pid in ended {
            self.known.remove(&pid);
        }
    }

    fn look_up(&mut self, pid: u32, uptime: u64, faults: &mut Vec<&'static str>) -> Found {
        match self.read(pid) {
            Ok(Some(owner)) if owner.start_ticks <= uptime + START_SLACK_TICKS => Found::Owner(owner),
            Ok(Some(_)) => Found::Nobody,
            Ok(None) => Found::Kernel,
            Err(error) => {
                faults.extend(error.fault_reason());
                self.known.remove(&pid);
                Found::Nobody
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
                Known { owner: Owner { start_ticks: stat.start_ticks, comm: comm.into(), cgroup }, life }
            }
        };
        let owner = known.owner.clone();
        self.known.insert(pid, known);
        Ok(Some(owner))
    }
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

    #[test]
    fn who_has_ended_is_not_taken_for_who_has_its_pid_now() {
        if !Roots::default().in_first_pid_namespace() {
            return; // nobody is named there
        }
        let v1 = !std::path::Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
        let mut owners = Owners::new(Roots::default(), v1);
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
