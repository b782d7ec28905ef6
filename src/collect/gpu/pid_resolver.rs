//! Finds the process behind a pid that the driver reports: start time, name and cgroup, from `/proc/PID`. Also decides
//! whether the driver's pids are pids of this host at all.
//!
//! Between two full readings memory is sampled at short intervals. A process that is cached and has not ended is not read
//! again: one poll(2) over the pidfds of all cached processes finds those that have ended.
//!
//! A driver may go on listing a dead process, and the kernel may give its pid to a new process. The memory that is listed
//! for that pid counts as the dead process's as long as the amount stays the same.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::types::{GpuProcess, PidTrust, ProcessOwner};
use crate::host::{Dir, HostPaths, KernelFile, ReadError, process_cgroup};
use crate::parse::process::Stat;

/// One clock tick, and the difference between the two clocks.
const START_SLACK_TICKS: u64 = 3;
/// The parent of all other kernel threads.
const KTHREADD: u32 = 2;

/// A cache of the processes that the driver lists.
#[derive(Debug)]
pub struct PidResolver {
    host_paths: HostPaths,
    cgroup_v1: bool,
    known: HashMap<u32, KnownPid>,
    /// Dead processes that the driver still lists, with their memory over all devices.
    stale_pids: HashMap<u32, Option<u64>>,
    pid_check: PidNamespaceCheck,
}

#[derive(Debug)]
struct KnownPid {
    owner: ProcessOwner,
    /// Readable once the process has ended; `None` where the kernel has no pidfds.
    pidfd: Option<OwnedFd>,
    /// Its memory over all devices in the last full reading.
    held: Option<u64>,
}

/// The result of looking up a pid.
enum PidLookup {
    Owner(ProcessOwner),
    /// A kernel thread, which cannot hold GPU memory.
    KernelThread,
    /// It started after the driver was queried, so it only reused the pid; or `/proc` could not be read.
    Unknown,
    /// There is no such process.
    NotFound,
}

impl PidResolver {
    /// Returns a resolver with an empty cache.
    pub fn new(host_paths: HostPaths, cgroup_v1: bool) -> Self {
        Self {
            host_paths,
            cgroup_v1,
            known: HashMap::new(),
            stale_pids: HashMap::new(),
            pid_check: PidNamespaceCheck::default(),
        }
    }

    /// Fills in the owners of the processes of a full reading, each read again, and returns whether the driver's pids can
    /// be trusted. If not, none is filled in. `uptime` was read before the driver was queried.
    pub fn resolve<'a>(
        &mut self,
        processes: impl Iterator<Item = &'a mut GpuProcess>,
        uptime: Option<u64>,
        read_errors: &mut Vec<&'static str>,
    ) -> PidTrust {
        let processes: Vec<_> = processes.collect();
        if !self.host_paths.in_initial_pid_namespace() {
            self.known.clear();
            return PidTrust::Untrusted("memledger does not run in the host's pid namespace");
        }
        let Some(uptime) = uptime else {
            self.known.clear();
            return PidTrust::Untrusted("/proc/uptime is unreadable");
        };
        let totals = totals(&processes);
        self.stale_pids.retain(|pid, _| totals.contains_key(pid));
        let (mut owners, mut seen, mut kernel) = (HashMap::new(), 0, false);
        for (pid, held) in &totals {
            let before = self.known.get(pid).map(|known| (known.owner.start_ticks, known.held));
            match self.look_up(*pid, uptime, read_errors) {
                PidLookup::Owner(owner) => {
                    seen += 1;
                    if before.is_some_and(|(start, before)| start != owner.start_ticks && before == *held) {
                        self.stale_pids.insert(*pid, *held);
                    }
                    if self.stale_pids.get(pid) != Some(held) {
                        self.stale_pids.remove(pid);
                        owners.insert(*pid, owner);
                    }
                }
                PidLookup::NotFound => drop(self.stale_pids.insert(*pid, *held)),
                PidLookup::KernelThread => kernel = true,
                PidLookup::Unknown => {}
            }
        }
        self.known.retain(|pid, _| owners.contains_key(pid));
        for (pid, known) in &mut self.known {
            known.held = totals.get(pid).copied().flatten();
        }
        let pids = self.pid_check.check(totals.len(), seen, kernel);
        if pids == PidTrust::Trusted {
            for process in processes {
                process.owner = owners.get(&process.pid).cloned();
            }
        }
        pids
    }

    /// Fills in the owners of the processes of a memory sample. Cached processes that have not ended are not read again.
    pub fn resolve_sample<'a>(
        &mut self,
        processes: impl Iterator<Item = &'a mut GpuProcess>,
        uptime: Option<u64>,
        read_errors: &mut Vec<&'static str>,
    ) {
        if !self.pid_check.is_trusted {
            return;
        }
        let processes: Vec<_> = processes.collect();
        let totals = totals(&processes);
        for pid in self.remove_ended() {
            if let Some(held) = totals.get(&pid) {
                self.stale_pids.insert(pid, *held); // it may have changed since the last full reading
            }
        }
        let mut unresolved = HashSet::new();
        for process in processes {
            process.owner = match self.known.get(&process.pid) {
                Some(known) if known.pidfd.is_some() => Some(known.owner.clone()),
                _ if unresolved.contains(&process.pid) || self.stale_pids.contains_key(&process.pid) => None,
                _ => {
                    let Some(uptime) = uptime else { return };
                    let before =
                        self.known.get(&process.pid).map(|known| (known.owner.start_ticks, known.held));
                    match (self.look_up(process.pid, uptime, read_errors), before) {
                        (PidLookup::Owner(owner), Some((start, held))) if start != owner.start_ticks => {
                            self.stale_pids.insert(process.pid, held);
                            None
                        }
                        (PidLookup::Owner(owner), _) => Some(owner),
                        (PidLookup::NotFound, _) => {
                            self.stale_pids.insert(process.pid, totals.get(&process.pid).copied().flatten());
                            None
                        }
                        (PidLookup::KernelThread | PidLookup::Unknown, _) => {
                            unresolved.insert(process.pid);
                            None
                        }
                    }
                }
            };
        }
    }

    /// Removes processes that have ended from the cache, with one system call, and returns their pids.
    fn remove_ended(&mut self) -> Vec<u32> {
        let ended: Vec<u32> = {
            let pidfds = self.known.iter().filter_map(|(pid, known)| Some((*pid, known.pidfd.as_ref()?)));
            let (pids, pidfds): (Vec<_>, Vec<_>) = pidfds.unzip();
            let mut polled: Vec<_> = pidfds.iter().map(|pidfd| PollFd::new(pidfd, PollFlags::IN)).collect();
            if poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_err() {
                pids // unknown which have ended: look all of them up again
            } else {
                let ended = std::iter::zip(pids, &polled).filter(|(_, polled)| !polled.revents().is_empty());
                ended.map(|(pid, _)| pid).collect()
            }
        };
        for pid in &ended {
            if let Some(dead) = self.known.remove(pid) {
                self.stale_pids.insert(*pid, dead.held);
            }
        }
        ended
    }

    fn look_up(&mut self, pid: u32, uptime: u64, read_errors: &mut Vec<&'static str>) -> PidLookup {
        match self.read(pid) {
            Ok(Some(owner)) if owner.start_ticks <= uptime + START_SLACK_TICKS => PidLookup::Owner(owner),
            Ok(Some(_)) => {
                self.known.remove(&pid); // otherwise the next memory sample would use the cached entry
                PidLookup::Unknown
            }
            Ok(None) => PidLookup::KernelThread,
            Err(error) if error.is_gone() => PidLookup::NotFound,
            Err(error) => {
                read_errors.extend(error.reason_label());
                PidLookup::Unknown
            }
        }
    }

    /// Reads a process. Returns `None` for a kernel thread.
    fn read(&mut self, pid: u32) -> Result<Option<ProcessOwner>, ReadError> {
        let mut buffer = Vec::new();
        let known = self.known.remove(&pid);
        let pidfd = match &known {
            Some(_) => None,
            // opened before /proc is read: if the pid is reused in between, this pidfd shows the end of the first process
            None => {
                Pid::from_raw(pid.cast_signed()).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
            }
        };
        let dir = Dir::open(&self.host_paths.process(pid))?;
        let stat = Stat::parse(dir.file("stat")?.read_once(&mut buffer)?);
        let stat = stat.ok_or_else(|| ReadError::malformed("stat"))?;
        if pid == KTHREADD || stat.ppid == KTHREADD {
            return Ok(None);
        }
        let known = match known {
            Some(known) if known.owner.start_ticks != stat.start_ticks => return self.read(pid), // the pid was reused
            Some(known) => known, // with the name that it had first: some rename themselves for every task
            None => {
                let cgroup = process_cgroup::read(&dir, self.cgroup_v1, &mut buffer)?.into();
                let comm = crate::parse::printable(&stat.comm).into();
                let owner = ProcessOwner { start_ticks: stat.start_ticks, comm, cgroup };
                KnownPid { owner, pidfd, held: None }
            }
        };
        let owner = known.owner.clone();
        self.known.insert(pid, known);
        Ok(Some(owner))
    }
}

/// Returns the memory of each process over all devices; `None` if a part of it is unknown.
fn totals(processes: &[&mut GpuProcess]) -> HashMap<u32, Option<u64>> {
    let mut totals: HashMap<u32, Option<u64>> = HashMap::new();
    for process in processes {
        let add = |sum: &mut Option<u64>| *sum = sum.zip(process.used).map(|(sum, used)| sum + used);
        totals.entry(process.pid).and_modify(add).or_insert(process.used);
    }
    totals
}

/// Whether the driver's pids are pids of this host. That cannot change while memledger runs, so it is decided once: dead
/// processes that the driver still lists change nothing later.
#[derive(Debug, Default)]
struct PidNamespaceCheck {
    is_trusted: bool,
}

impl PidNamespaceCheck {
    /// Checks one reading: the number of listed processes, how many of them are visible, and whether one is a kernel
    /// thread.
    fn check(&mut self, named: usize, seen: usize, kernel: bool) -> PidTrust {
        if self.is_trusted || named == 0 {
            return PidTrust::Trusted;
        }
        if kernel {
            return PidTrust::Untrusted("a pid that the driver reports is a kernel thread on this host");
        }
        // a few may have ended; if most are not visible, the visible ones may be other processes with the same pid
        if seen * 2 < named {
            return PidTrust::Untrusted("most of the processes that the driver reports are not visible");
        }
        self.is_trusted = true;
        PidTrust::Trusted
    }
}

/// Returns the clock ticks since boot, from `/proc/uptime` of the same host as the processes.
pub fn uptime_ticks(host_paths: &HostPaths) -> Option<u64> {
    let mut buffer = Vec::new();
    let file = KernelFile::open(&host_paths.proc.join("uptime")).ok()?;
    let text = std::str::from_utf8(file.read_once(&mut buffer).ok()?).ok()?;
    let seconds: f64 = text.split(' ').next()?.parse().ok()?;
    Some((seconds * rustix::param::clock_ticks_per_second() as f64) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trusts_pids_for_good_once_most_are_visible() {
        let mut pid_check = PidNamespaceCheck::default();
        assert_eq!(pid_check.check(0, 0, false), PidTrust::Trusted, "no pids: nothing to check");
        assert!(
            matches!(pid_check.check(1, 0, false), PidTrust::Untrusted(_)),
            "an empty reading decides nothing"
        );
        assert!(
            matches!(pid_check.check(3, 1, false), PidTrust::Untrusted(_)),
            "another process may have the pid"
        );
        assert!(
            matches!(pid_check.check(3, 2, true), PidTrust::Untrusted(_)),
            "a kernel thread holds no GPU memory"
        );
        assert_eq!(pid_check.check(2, 1, false), PidTrust::Trusted, "one dead process does not matter");
        assert_eq!(
            pid_check.check(5, 0, false),
            PidTrust::Trusted,
            "dead processes that the driver still lists"
        );
    }

    /// Returns `None` and prints that the test is skipped outside the host's pid namespace.
    fn resolver() -> Option<PidResolver> {
        if !HostPaths::default().in_initial_pid_namespace() {
            assert!(
                std::env::var_os("MEMLEDGER_TESTS_REQUIRED").is_none(),
                "these tests need the host's pid namespace"
            );
            eprintln!("skipped: not in the host's pid namespace");
            return None;
        }
        let v1 = !std::path::Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
        Some(PidResolver::new(HostPaths::default(), v1))
    }

    #[test]
    fn sample_skips_processes_that_are_too_young_or_reuse_a_pid() {
        let Some(mut resolver) = resolver() else { return };
        let mut read_errors = vec![];
        let later = uptime_ticks(&HostPaths::default()).map(|ticks| ticks + 10);
        let mut own = GpuProcess::new(std::process::id(), Some(1));
        resolver.resolve(std::iter::once(&mut own), later, &mut read_errors);
        assert!(own.owner.is_some(), "the driver's pids are trusted");

        let mut child = std::process::Command::new("sleep").arg("600").spawn().expect("sleep");
        let mut young = GpuProcess::new(child.id(), Some(5));
        resolver.resolve_sample(std::iter::once(&mut young), Some(0), &mut read_errors); // the driver was queried before its start
        assert_eq!(young.owner, None);
        resolver.resolve_sample(std::iter::once(&mut young), None, &mut read_errors);
        assert_eq!(young.owner, None, "the first sample did not cache it");
        resolver.resolve_sample(std::iter::once(&mut young), later, &mut read_errors);
        assert!(young.owner.is_some(), "it is old enough now");

        child.kill().and_then(|()| child.wait()).expect("ended");
        young.used = Some(7);
        resolver.resolve_sample(std::iter::once(&mut young), later, &mut read_errors);
        assert_eq!(
            (&young.owner, resolver.stale_pids.get(&young.pid)),
            (&None, Some(&Some(7))),
            "with the memory that is listed now"
        );
        let mut dead = GpuProcess::new((1 << 22) - 1, Some(9));
        resolver.resolve_sample(std::iter::once(&mut dead), later, &mut read_errors);
        assert_eq!(
            resolver.stale_pids.get(&dead.pid),
            Some(&Some(9)),
            "a new process with its pid does not get this memory"
        );
        assert_eq!(read_errors, Vec::<&str>::new());
    }

    /// The name is a label of series: a program that renames itself for every task must not make new ones.
    #[test]
    fn process_keeps_the_name_that_it_had_first() {
        let Some(mut resolver) = resolver() else { return };
        let later = uptime_ticks(&HostPaths::default()).map(|ticks| ticks + 10);
        let program = "import sys\nfor name in sys.stdin:\n open('/proc/self/comm', 'w').write(name.strip())\n print(flush=True)";
        let mut python = std::process::Command::new("python3");
        let piped = std::process::Stdio::piped;
        let mut child = python.args(["-c", program]).stdin(piped()).stdout(piped()).spawn().expect("python3");
        let (mut names, mut renamed) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut process = GpuProcess::new(child.id(), Some(1));
        for name in ["first", "second"] {
            std::io::Write::write_all(&mut names, format!("{name}\n").as_bytes()).unwrap();
            std::io::Read::read_exact(&mut renamed, &mut [0]).unwrap();
            resolver.resolve(std::iter::once(&mut process), later, &mut vec![]);
            assert_eq!(process.owner.as_ref().map(|owner| &*owner.comm), Some("first"), "after {name}");
        }
        drop(names);
        child.wait().unwrap();
    }

    #[test]
    fn ended_process_has_no_owner() {
        let Some(mut resolver) = resolver() else { return };
        let mut read_errors = vec![];
        let mut child = std::process::Command::new("sleep").arg("600").spawn().expect("sleep");
        let mut process = GpuProcess::new(child.id(), Some(1));

        // the current clock tick may not be over yet
        let later = uptime_ticks(&HostPaths::default()).map(|ticks| ticks + 10);
        resolver.resolve(std::iter::once(&mut process), later, &mut read_errors);
        assert_eq!(process.owner.as_ref().map(|owner| &*owner.comm), Some("sleep"));
        resolver.resolve_sample(std::iter::once(&mut process), None, &mut read_errors); // without an uptime nothing can be looked up
        assert!(process.owner.is_some());
        child.kill().and_then(|()| child.wait()).expect("ended");
        resolver.resolve_sample(std::iter::once(&mut process), later, &mut read_errors);
        assert_eq!((process.owner, read_errors), (None, vec![]));
    }
}
