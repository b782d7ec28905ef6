//! A process that has graphics devices open: its descriptors, and the driver's statistics for each.
//!
//! A process may have a million descriptors, and only the link of each shows whether it is a GPU's. So the numbers of GPU
//! descriptors are remembered and read in every reading, and the whole list is scanned repeatedly, one part at a time.
//!
//! Incomplete values are not exported: until the list was scanned once, and where a process has more GPU descriptors than
//! are read, its memory is absent.

use std::ffi::{OsStr, OsString};
use std::mem::MaybeUninit;
use std::sync::Arc;

use rustix::fs::readlinkat_raw;

use super::client_memory::{Descriptor, DrmProcessKey};
use super::fd_scanner::{Deadline, ScanResult};
use crate::collect::gpu::ProcessOwner;
use crate::host::{Dir, ReadError, classify, process_cgroup};
use crate::parse::drm::DrmClient;
use crate::parse::process::Stat;

/// Maximum number of graphics descriptors of one process that are read.
pub const MAX_CLIENTS: usize = 512;

const DEVICES: &[u8] = b"/dev/dri/";
/// AMD's compute device: the engine statistics do not include work that is submitted through it.
const COMPUTE: &[u8] = b"/dev/kfd";

/// A descriptor of a graphics device: its number, and the name of its node as the process sees it.
type DescriptorLink = (OsString, String);

/// A scan of the descriptors of a process: its position, and what it found so far.
#[derive(Debug, Default)]
pub struct FdScan {
    /// The position at which to continue; 0 at the start.
    pub position: u64,
    devices: Vec<DescriptorLink>,
    uses_compute: bool,
}

impl FdScan {
    /// Returns a scan that continues at this position.
    pub fn from(position: u64) -> Self {
        Self { position, ..Self::default() }
    }

    /// Returns true if a graphics device was found.
    pub fn has_devices(&self) -> bool {
        !self.devices.is_empty()
    }

    /// Scans up to `max_fds` more descriptors. Returns true at the end of the list.
    ///
    /// The links are read but not followed: to follow one could hang on a dead file server.
    pub fn advance(
        &mut self,
        process: &Dir,
        max_fds: usize,
        buffer: &mut Vec<u8>,
    ) -> Result<bool, ReadError> {
        let fds = process.below("fd")?;
        let next = fds.for_some(self.position, max_fds, buffer, |number| match target(&fds, number) {
            Ok(DescriptorTarget::Device(node)) => {
                // one more than are read, to detect that there are too many
                if self.devices.len() <= MAX_CLIENTS {
                    self.devices.push((number.to_owned(), node));
                }
                Ok(())
            }
            Ok(DescriptorTarget::Compute) => {
                self.uses_compute = true;
                Ok(())
            }
            Ok(DescriptorTarget::Other) => Ok(()),
            Err(error) if error.is_gone() => Ok(()),
            Err(error) => Err(error),
        })?;
        self.position = next.unwrap_or(0);
        Ok(next.is_none())
    }
}

enum DescriptorTarget {
    /// A graphics device, with the name of its node.
    Device(String),
    Compute,
    Other,
}

/// Reads the target of a descriptor.
fn target(fds: &Dir, number: &OsStr) -> Result<DescriptorTarget, ReadError> {
    let mut target = [MaybeUninit::uninit(); 64]; // a longer target is cut, and matches none
    let (target, _) = readlinkat_raw(fds, number, &mut target)
        .map_err(|errno| classify(errno, fds.path().join(number).display().to_string()))?;
    Ok(match target.strip_prefix(DEVICES) {
        Some(node) => DescriptorTarget::Device(String::from_utf8_lossy(node).into_owned()),
        None if target == COMPUTE => DescriptorTarget::Compute,
        None => DescriptorTarget::Other,
    })
}

/// A process that has a graphics device open.
#[derive(Debug)]
pub struct DrmProcess {
    /// Reads fail with *gone* once the process has ended, also when its pid is reused.
    dir: Dir,
    key: DrmProcessKey,
    owner: ProcessOwner,
    devices: Vec<DescriptorLink>,
    uses_compute: bool,
    /// Whether all descriptors were scanned at least once.
    is_complete: bool,
    /// Whether it has more graphics descriptors than are read.
    has_too_many: bool,
    scan: FdScan,
}

impl DrmProcess {
    /// Returns the process of this directory with the devices of a scan. `is_complete`: the scan covers all descriptors.
    pub fn of(
        dir: Dir,
        pid: u32,
        cgroup_v1: bool,
        found: &FdScan,
        is_complete: bool,
        buffer: &mut Vec<u8>,
    ) -> Result<Self, ReadError> {
        let (start_ticks, comm) = read_stat(&dir, buffer)?;
        let cgroup = process_cgroup::read(&dir, cgroup_v1, buffer)?.into();
        let key = DrmProcessKey { start_ticks, pid };
        let owner = ProcessOwner { start_ticks, comm, cgroup };
        let mut process = Self {
            dir,
            key,
            owner,
            devices: vec![],
            uses_compute: false,
            is_complete,
            has_too_many: false,
            scan: FdScan::default(),
        };
        process.add(found);
        Ok(process)
    }

    /// Returns the number of descriptors that are read in every reading.
    pub fn count(&self) -> usize {
        self.devices.len()
    }

    /// Returns its cgroup.
    pub fn cgroup(&self) -> &Arc<str> {
        &self.owner.cgroup
    }

    /// Scans up to `max_fds` of its descriptors for devices that it has opened since.
    pub fn scan_for_devices(&mut self, max_fds: usize, buffer: &mut Vec<u8>) -> Result<(), ReadError> {
        if self.scan.advance(&self.dir, max_fds, buffer)? {
            let scan = std::mem::take(&mut self.scan);
            (self.devices, self.uses_compute, self.is_complete) = (scan.devices, scan.uses_compute, true);
            self.has_too_many = self.devices.len() > MAX_CLIENTS;
        } else {
            let scan = std::mem::take(&mut self.scan);
            self.add(&scan);
            self.scan = scan;
        }
        Ok(())
    }

    fn add(&mut self, scan: &FdScan) {
        for device in &scan.devices {
            if self.devices.len() <= MAX_CLIENTS && !self.devices.contains(device) {
                self.devices.push(device.clone());
            }
        }
        self.has_too_many |= self.devices.len() > MAX_CLIENTS;
        self.uses_compute |= scan.uses_compute;
    }

    /// Reads the known descriptors. Returns false if none of them is a graphics device any more.
    pub fn read(
        &mut self,
        found: &mut ScanResult,
        deadline: Deadline,
        buffer: &mut Vec<u8>,
    ) -> Result<bool, ReadError> {
        let mut is_complete = self.is_complete && !self.has_too_many;
        let mut closed = Vec::new();
        if !deadline.is_over() {
            let (_, comm) = read_stat(&self.dir, buffer)?;
            if *comm != *self.owner.comm {
                self.owner.comm = comm;
            }
        }
        let (fds, infos) = (self.dir.below("fd")?, self.dir.below("fdinfo")?);
        for (at, (number, node)) in self.devices.iter().enumerate().take(MAX_CLIENTS) {
            if deadline.is_over() {
                is_complete = false;
                break;
            }
            match read_one(&fds, &infos, number, node, buffer) {
                Ok(Some(client)) => {
                    found.descriptors.push((node.clone(), Descriptor { process: self.key, client }));
                }
                // a device without statistics
                Ok(None) => {}
                Err(error) if error.is_gone() => closed.push(at),
                Err(error) => return Err(error),
            }
        }
        for at in closed.into_iter().rev() {
            self.devices.remove(at);
        }
        if self.devices.is_empty() {
            return Ok(false);
        }
        if !is_complete {
            // an incomplete scan alone is no failure
            found.read_errors.extend((self.is_complete || self.has_too_many).then_some("io"));
            let nodes = self.devices.iter().map(|(_, node)| node.clone()).collect();
            found.in_part.insert(self.key, nodes);
        }
        if self.uses_compute {
            found.computing.insert(self.key);
        }
        found.owners.insert(self.key, self.owner.clone());
        Ok(true)
    }
}

/// Reads the driver's statistics for one descriptor; `None` if there are none.
///
/// # Errors
/// [`ReadError::Gone`] if it was closed, also if its number is another file's by now.
fn read_one(
    fds: &Dir,
    infos: &Dir,
    number: &OsStr,
    node: &str,
    buffer: &mut Vec<u8>,
) -> Result<Option<DrmClient>, ReadError> {
    if !matches!(target(fds, number)?, DescriptorTarget::Device(now) if now == node) {
        return Err(ReadError::Gone(fds.path().join(number).display().to_string()));
    }
    Ok(DrmClient::parse(infos.file_of(number)?.read_once(buffer)?))
}

/// Reads the start time and the printable name of a process.
fn read_stat(dir: &Dir, buffer: &mut Vec<u8>) -> Result<(u64, Arc<str>), ReadError> {
    let stat = Stat::parse(dir.file("stat")?.read_once(buffer)?);
    let stat = stat.ok_or_else(|| ReadError::malformed("stat"))?;
    Ok((stat.start_ticks, crate::parse::printable(&stat.comm).into()))
}
