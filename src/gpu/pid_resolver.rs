//! Finds the process behind a pid that the driver reports: start time, name and cgroup, from `/proc/PID`. Also decides
//! whether the driver's pids are pids of this host at all.
//!
//! A process that is cached and has not ended is not read again: one poll(2) over the pidfds of all cached processes finds
//! those that have ended.
//!
//! A driver may go on listing a dead process, and the kernel may give its pid to a new process. So a pid counts only for a
//! process that started before the driver first listed it, without a break.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::types::{GpuProcess, PidTrust};
use crate::host::process::ProcessFacts;
use crate::host::{Dir, HostPaths, KernelFile, ReadError};

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
    /// For each pid that the driver lists, the clock ticks since boot before the first query that listed it.
    first_listed: HashMap<u32, u64>,
    pid_check: PidNamespaceCheck,
    buffer: Vec<u8>,
}

#[derive(Debug)]
struct KnownPid {
    owner: ProcessFacts,
    /// Readable once the process has ended; `None` where the kernel has no pidfds.
    pidfd: Option<OwnedFd>,
}

/// The result of looking up a pid.
enum PidLookup {
    Owner(ProcessFacts),
    /// A kernel thread, which cannot hold GPU memory.
    KernelThread,
    /// There is no such process, or it only reused the pid, or `/proc` could not be read.
    Unknown,
}

impl PidResolver {
    /// Returns a resolver with an empty cache.
    pub fn new(host_paths: HostPaths, cgroup_v1: bool) -> Self {
        Self {
            host_paths,
            cgroup_v1,
            known: HashMap::new(),
            first_listed: HashMap::new(),
            pid_check: PidNamespaceCheck::default(),
            buffer: Vec::new(),
        }
    }

    /// Fills in the owners of the processes of a full reading, and returns whether the driver's pids can be trusted. If not,
    /// none is filled in. `uptime` was read before the driver was queried.
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
        let pids: HashSet<u32> = processes.iter().map(|process| process.pid).collect();
        self.first_listed.retain(|pid, _| pids.contains(pid));
        self.known.retain(|pid, _| pids.contains(pid));
        let lookups = self.look_up_all(&pids, uptime, read_errors);
        let count = |is: fn(&PidLookup) -> bool| lookups.values().filter(|lookup| is(lookup)).count();
        let seen = count(|lookup| matches!(lookup, PidLookup::Owner(_)));
        let has_kernel_thread = count(|lookup| matches!(lookup, PidLookup::KernelThread)) > 0;
        let trust = self.pid_check.check(pids.len(), seen, has_kernel_thread);
        if trust == PidTrust::Trusted {
            assign(processes, &lookups);
        }
        trust
    }

    /// Fills in the owners of the processes of a memory sample.
    pub fn resolve_sample<'a>(
        &mut self,
        processes: impl Iterator<Item = &'a mut GpuProcess>,
        uptime: Option<u64>,
        read_errors: &mut Vec<&'static str>,
    ) {
        let Some(uptime) = uptime.filter(|_| self.pid_check.is_trusted) else { return };
        let processes: Vec<_> = processes.collect();
        let pids = processes.iter().map(|process| process.pid).collect();
        let lookups = self.look_up_all(&pids, uptime, read_errors);
        assign(processes, &lookups);
    }

    fn look_up_all(
        &mut self,
        pids: &HashSet<u32>,
        uptime: u64,
        read_errors: &mut Vec<&'static str>,
    ) -> HashMap<u32, PidLookup> {
        self.remove_ended();
        pids.iter().map(|pid| (*pid, self.look_up(*pid, uptime, read_errors))).collect()
    }

    /// Removes processes that have ended from the cache, with one system call.
    fn remove_ended(&mut self) {
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
        self.known.retain(|pid, known| known.pidfd.is_some() && !ended.contains(pid));
    }

    fn look_up(&mut self, pid: u32, uptime: u64, read_errors: &mut Vec<&'static str>) -> PidLookup {
        if let Some(known) = self.known.get(&pid) {
            return PidLookup::Owner(known.owner.clone());
        }
        let first_listed = *self.first_listed.entry(pid).or_insert(uptime);
        // opened before /proc is read: if the pid is reused in between, this pidfd shows the end of the first process
        let pidfd =
            Pid::from_raw(pid.cast_signed()).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        let owner = match self.read(pid) {
            Ok(owner) => owner,
            Err(error) => {
                read_errors.extend(error.reason_label().filter(|_| !error.is_gone()));
                return PidLookup::Unknown;
            }
        };
        if pid == KTHREADD || owner.ppid == KTHREADD {
            return PidLookup::KernelThread;
        }
        if owner.id.start_ticks > first_listed + START_SLACK_TICKS {
            return PidLookup::Unknown;
        }
        self.known.insert(pid, KnownPid { owner: owner.clone(), pidfd });
        PidLookup::Owner(owner)
    }

    fn read(&mut self, pid: u32) -> Result<ProcessFacts, ReadError> {
        let dir = Dir::open(&self.host_paths.process(pid))?;
        ProcessFacts::read(&dir, pid, self.cgroup_v1, &mut self.buffer)
    }
}

/// Fills in the owners that were found.
fn assign(processes: Vec<&mut GpuProcess>, lookups: &HashMap<u32, PidLookup>) {
    for process in processes {
        process.owner = match lookups.get(&process.pid) {
            Some(PidLookup::Owner(owner)) => Some(owner.clone()),
            _ => None,
        };
    }
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
    fn pid_counts_only_for_a_process_that_started_before_it_was_first_listed() {
        let Some(mut resolver) = resolver() else { return };
        let mut read_errors = vec![];
        let later = uptime_ticks(&HostPaths::default()).map(|ticks| ticks + 10);
        let mut own = GpuProcess::new(std::process::id(), Some(1));
        resolver.resolve(std::iter::once(&mut own), later, &mut read_errors);
        assert!(own.owner.is_some(), "the driver's pids are trusted");

        let mut child = std::process::Command::new("sleep").arg("600").spawn().expect("sleep");
        let mut young = GpuProcess::new(child.id(), Some(5));
        resolver.resolve_sample(std::iter::once(&mut young), None, &mut read_errors);
        assert_eq!(young.owner, None, "without an uptime nothing can be looked up");
        resolver.resolve_sample(std::iter::once(&mut young), Some(0), &mut read_errors);
        assert_eq!(young.owner, None, "the driver was queried before its start");
        resolver.resolve_sample(std::iter::once(&mut young), later, &mut read_errors);
        resolver.resolve([&mut own, &mut young].into_iter(), later, &mut read_errors);
        assert_eq!(young.owner, None, "the driver has listed the pid since then, for a process that is dead");
        resolver.resolve(std::iter::once(&mut own), later, &mut read_errors);
        resolver.resolve([&mut own, &mut young].into_iter(), later, &mut read_errors);
        assert!(young.owner.is_some(), "it is listed anew");
        child.kill().and_then(|()| child.wait()).expect("ended");
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
        child.kill().and_then(|()| child.wait()).expect("ended");
        resolver.resolve_sample(std::iter::once(&mut process), later, &mut read_errors);
        assert_eq!((process.owner, read_errors), (None, vec![]));
    }
}
