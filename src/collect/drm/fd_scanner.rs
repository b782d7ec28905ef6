//! Finds the processes that have a graphics device open, and reads the driver's statistics for them.
//!
//! Only the links in `/proc/PID/fd` show that, with one system call each. A large host has many, and one process may have a
//! million. So the known GPU descriptors are read in every reading, and all others are scanned in turn, one part of each
//! process at a time, within the time budget of a reading: first new processes; then the rest, each at most every two
//! seconds; then processes that have a GPU open, which may have opened another one. No process can use up the time of the
//! others: a device that is opened late is found later.
//!
//! Reading has a time budget too. If it is too short, the cgroups with the fewest descriptors are read first. Processes that were
//! not scanned or read completely, or have more GPU descriptors than are read, have no value.
//!
//! A device that a container has under a path outside `/dev/dri` is not found, and its memory stays unattributed.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use rustix::fs::readlinkat_raw;

use super::drm_process::{DrmProcess, DrmProcessKey, DrmProcesses, read_owner};
use crate::clock::Timestamp;
use crate::collect::gpu::ProcessOwner;
use crate::host::bounds::{DRM_CLIENTS, NAMES};
use crate::host::{Dir, HostPaths, ReadError, classify};
use crate::parse::drm::{DrmClient, Region};

const DEVICES: &[u8] = b"/dev/dri/";

/// The time budgets of the parts of a reading, and other limits.
#[derive(Clone, Copy, Debug)]
struct Budget {
    /// The scan of each group of processes.
    scan: Duration,
    /// The scan of new processes in the first reading, where all are new.
    first_scan: Duration,
    /// The reading of known descriptors.
    read: Duration,
    /// The interval between two scans of a process without a GPU, or without permission.
    rescan_interval: Duration,
    /// Maximum number of descriptors of one process in a single scan.
    max_fds: usize,
}

impl Default for Budget {
    fn default() -> Self {
        let ms = Duration::from_millis;
        let (scan, first_scan, read, rescan_interval) = (ms(10), ms(250), ms(500), ms(2_000));
        Self { scan, first_scan, read, rescan_interval, max_fds: 4 * 1024 }
    }
}

/// The state that lasts from reading to reading.
#[derive(Debug)]
pub struct FdScanner {
    host_paths: HostPaths,
    cgroup_v1: bool,
    processes: HashMap<u32, ScannedProcess>,
    buffer: Vec<u8>,
    budget: Budget,
}

/// A process, and what scans of its descriptors have found so far.
#[derive(Debug, Default)]
struct ScannedProcess {
    /// When it was scanned last; `None` for a new process.
    scanned_at: Option<Timestamp>,
    /// The position at which its scan continues; 0 at the start.
    position: u64,
    /// Whether all descriptors were scanned, and all that are graphics devices are in `devices`.
    is_complete: bool,
    /// The scan that is under way found more graphics devices than are kept.
    has_dropped: bool,
    /// Whether a descriptor was read. Kernel threads have none: an empty list is readable without permission.
    is_readable: bool,
    /// Whether that was not permitted. It is scanned again: it may be readable after an exec, or its pid may be reused.
    is_denied: bool,
    /// Its graphics descriptors: the number, and the name of the node as the process sees it. At most one more than the limit,
    /// to know that there are more.
    devices: BTreeMap<OsString, String>,
    /// The process at the last reading.
    owner: Option<ProcessOwner>,
}

impl FdScanner {
    /// Returns a scanner without any processes.
    pub fn new(host_paths: HostPaths, cgroup_v1: bool) -> Self {
        let (processes, buffer, budget) = Default::default();
        Self { host_paths, cgroup_v1, processes, buffer, budget }
    }

    /// Returns the number of processes whose descriptors could be read, and of those without permission.
    pub fn access(&self) -> (usize, usize) {
        let processes = || self.processes.values();
        let readable = processes().filter(|process| process.is_readable).count();
        (readable, processes().filter(|process| process.is_denied).count())
    }

    /// Scans for processes that have a GPU open.
    ///
    /// # Errors
    /// The processes cannot be listed.
    pub fn scan(&mut self, read_errors: &mut Vec<&'static str>) -> Result<(), ReadError> {
        let budget = self.budget;
        let new = if self.processes.is_empty() { budget.first_scan } else { budget.scan };
        // time that a group does not use is left to the next one
        let budgets = [new, new + budget.scan, new + budget.scan * 2];
        self.list()?;
        let began = Timestamp::now(); // to list very many processes takes longer than a scan of some
        let due = self.processes.iter().filter(|(_, process)| process.is_due(began, budget.rescan_interval));
        let mut due: Vec<_> = due.map(|(pid, process)| (process.group(), process.scanned_at, *pid)).collect();
        due.sort_unstable();
        for (group, _, pid) in due {
            if Timestamp::now().since(began) < budgets[group] {
                self.scan_process(pid, read_errors);
            }
        }
        Ok(())
    }

    /// Updates the list of processes.
    fn list(&mut self) -> Result<(), ReadError> {
        let mut pids = HashSet::new();
        Dir::open(&self.host_paths.proc)?.for_each(NAMES.max, &mut self.buffer, |name, _| {
            let number = crate::parse::number(name.as_bytes());
            pids.extend(number.and_then(|pid| u32::try_from(pid).ok()));
        })?;
        self.processes.retain(|pid, _| pids.contains(pid));
        for pid in pids {
            self.processes.entry(pid).or_default();
        }
        Ok(())
    }

    fn scan_process(&mut self, pid: u32, read_errors: &mut Vec<&'static str>) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let fds = self.host_paths.process(pid).join("fd");
        let scanned_at = Some(Timestamp::now());
        process.scanned_at = scanned_at;
        if let Err(error) = process.scan(&fds, self.budget.max_fds, &mut self.buffer) {
            let is_denied = error.reason_label() == Some("permission");
            // a denial counts once for each process, not in each scan
            read_errors.extend(error.reason_label().filter(|_| !is_denied || !process.is_denied));
            *process = ScannedProcess { scanned_at, is_denied, ..ScannedProcess::default() };
        }
    }

    /// Reads the known descriptors of all processes.
    pub fn read(&mut self, read_errors: &mut Vec<&'static str>) -> DrmProcesses {
        let deadline = Timestamp::now().plus(self.budget.read);
        let mut processes = DrmProcesses::new();
        for pid in self.reading_order() {
            let Some(process) = self.processes.get_mut(&pid) else { continue };
            let folder = self.host_paths.process(pid);
            match process.read(&folder, self.cgroup_v1, deadline, &mut self.buffer, read_errors) {
                Ok(read) => {
                    let start_ticks = read.owner.start_ticks;
                    processes.insert(DrmProcessKey { start_ticks, pid }, read);
                }
                Err(error) => {
                    read_errors.extend(error.reason_label());
                    self.processes.remove(&pid); // a new process in the next scan
                }
            }
        }
        processes
    }

    /// Returns the pids to read, those of the cgroups with the fewest descriptors first.
    fn reading_order(&self) -> Vec<u32> {
        let with_devices = || self.processes.iter().filter(|(_, process)| !process.devices.is_empty());
        let cgroup = |process: &ScannedProcess| process.owner.as_ref().map(|owner| owner.cgroup.clone());
        let mut of_cgroups: HashMap<_, usize> = HashMap::new();
        for (_, process) in with_devices() {
            *of_cgroups.entry(cgroup(process)).or_default() += process.devices.len();
        }
        let weight =
            |process: &ScannedProcess| (of_cgroups.get(&cgroup(process)).copied(), process.devices.len());
        let mut order: Vec<_> = with_devices().map(|(pid, process)| (weight(process), *pid)).collect();
        order.sort_unstable();
        order.into_iter().map(|(_, pid)| pid).collect()
    }
}

impl ScannedProcess {
    fn is_due(&self, now: Timestamp, interval: Duration) -> bool {
        let is_old = self.scanned_at.is_none_or(|scanned_at| now.since(scanned_at) >= interval);
        is_old || self.position != 0 || !self.devices.is_empty()
    }

    /// Returns the group in which it is scanned: new, others, or with a GPU. In a group, the oldest scan is repeated first.
    fn group(&self) -> usize {
        match self.scanned_at {
            None => 0,
            Some(_) if self.devices.is_empty() => 1,
            Some(_) => 2,
        }
    }

    /// Scans up to `max_fds` more of its descriptors for devices.
    ///
    /// The links are read but not followed: to follow one could hang on a dead file server.
    fn scan(&mut self, fds: &Path, max_fds: usize, buffer: &mut Vec<u8>) -> Result<(), ReadError> {
        let fds = Dir::open(fds)?;
        if self.position == 0 {
            self.has_dropped = false;
            self.is_complete &= !self.devices.is_empty(); // it may be another process with this pid
        }
        let next = fds.for_some(self.position, max_fds, buffer, |number| {
            let node = match device(&fds, number) {
                Err(error) if error.is_gone() => return Ok(()),
                device => device?,
            };
            self.is_readable = true;
            match node {
                Some(node) if self.devices.len() <= DRM_CLIENTS.max => {
                    self.devices.insert(number.to_owned(), node);
                }
                other => self.has_dropped |= other.is_some(),
            }
            Ok(())
        })?;
        self.position = next.unwrap_or(0);
        let has_too_many = self.has_dropped || self.devices.len() > DRM_CLIENTS.max;
        self.is_complete = (self.is_complete || next.is_none()) && !has_too_many;
        self.is_denied = false;
        Ok(())
    }

    /// Reads its known descriptors, and forgets those that are no graphics devices any more.
    ///
    /// # Errors
    /// [`ReadError::Gone`] also if its pid was reused.
    fn read(
        &mut self,
        folder: &Path,
        cgroup_v1: bool,
        deadline: Timestamp,
        buffer: &mut Vec<u8>,
        read_errors: &mut Vec<&'static str>,
    ) -> Result<DrmProcess, ReadError> {
        let without_time = self.owner.clone().filter(|_| Timestamp::now() >= deadline);
        if let Some(owner) = without_time {
            read_errors.push("io");
            let descriptors =
                self.devices.values().map(|node| (node.clone(), DrmClient::default())).collect();
            return Ok(DrmProcess { owner, descriptors, is_complete: false, computing: None });
        }
        let dir = Dir::open(folder)?;
        let owner = read_owner(&dir, cgroup_v1, buffer)?;
        let known = self.owner.replace(owner.clone());
        if known.is_some_and(|known| known.start_ticks != owner.start_ticks) {
            return Err(ReadError::Gone(folder.display().to_string()));
        }
        let infos = dir.below("fdinfo")?;
        let has_too_many = self.devices.len() > DRM_CLIENTS.max;
        let mut failed = has_too_many.then_some("io"); // an incomplete scan is no failure
        let mut descriptors = Vec::new();
        self.devices.retain(|number, node| {
            let mut read = || Ok(DrmClient::parse(infos.file_of(number)?.read_once(buffer)?));
            let client = match Timestamp::now() < deadline {
                true => read().map_err(|error: ReadError| error.reason_label()),
                false => Err(Some("io")),
            };
            // closed; or its number is another file's by now, or the device has no statistics
            if matches!(client, Ok(None) | Err(None)) {
                return false;
            }
            failed = failed.or(client.as_ref().err().copied().flatten());
            descriptors.push((node.clone(), client.ok().flatten().unwrap_or_default()));
            true
        });
        read_errors.extend(failed);
        let is_complete = self.is_complete && failed.is_none();
        if !is_complete {
            let regions = descriptors.iter_mut().flat_map(|(_, client)| client.regions.values_mut());
            regions.for_each(|region| *region = Region::default()); // a part is no value
        }
        Ok(DrmProcess { owner, descriptors, is_complete, computing: None })
    }
}

/// Returns the name of the graphics device that a descriptor is open on; `None` if it is something else.
fn device(fds: &Dir, number: &OsStr) -> Result<Option<String>, ReadError> {
    let mut target = [MaybeUninit::uninit(); 64]; // a longer target is cut, and matches none
    let (target, _) = readlinkat_raw(fds, number, &mut target)
        .map_err(|errno| classify(errno, fds.path().join(number).display().to_string()))?;
    Ok(target.strip_prefix(DEVICES).map(|node| String::from_utf8_lossy(node).into_owned()))
}

#[cfg(test)]
mod tests;
