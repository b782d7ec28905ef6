//! NVML to readings: one session with the library, opened by `dlopen`.
//!
//! Fields that cannot change are asked once per device. Each field fails for itself; a device that fails does not take
//! the others along. What the driver reports as *not available* is absent, never zero.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device as NvmlDevice, Nvml};

use super::{Device, GpuProcess, Identity, Memory, Owner, Reading};
use crate::clock::Moment;
use crate::host::{Dir, KernelFile, ReadError, Roots};
use crate::parse::process::{Stat, cgroup_path};
use crate::series::bounded;

/// Memory and processes are read again so often when they contradict each other.
const READ_AGAIN: usize = 2;
/// No GPU has a PiB of memory: what is above is a sentinel or garbage.
const MOST_MEMORY: u64 = 1 << 50;
/// Linux has no pids from here on (PID_MAX_LIMIT).
const PID_LIMIT: u32 = 1 << 22;
/// A clock tick, and a little more for the two clocks involved.
const START_SLACK_TICKS: u64 = 3;

/// The library, loaded and initialised.
#[derive(Debug)]
pub struct Session {
    nvml: Nvml,
    driver_version: Option<Arc<str>>,
    cuda_version: Option<Arc<str>>,
    identities: HashMap<u32, Arc<Identity>>,
    owners: HashMap<(u32, u64), Owner>,
}

/// The whole chain of an error: libloading's own text says only that loading failed.
pub fn describe(error: &NvmlError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

/// Opens the library once and tells driver version and number of devices, for `doctor`.
///
/// # Errors
/// The library cannot be loaded or initialised.
pub fn probe(library: Option<&Path>) -> Result<(Option<String>, u32), NvmlError> {
    let session = Session::open(library)?;
    Ok((session.nvml.sys_driver_version().ok(), session.nvml.device_count()?))
}

impl Session {
    /// Loads and initialises the library.
    ///
    /// # Errors
    /// No such library (`LibloadingError`), or the driver is not there.
    pub fn open(library: Option<&Path>) -> Result<Self, NvmlError> {
        let nvml = match library {
            Some(path) => Nvml::builder().lib_path(path.as_os_str()).init()?,
            None => match Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init() {
                Err(NvmlError::LibloadingError(_)) => Nvml::init()?,
                other => other?,
            },
        };
        let driver_version = nvml.sys_driver_version().ok().map(|version| bounded(&version));
        let cuda_version = nvml
            .sys_cuda_driver_version()
            .ok()
            .map(|version| format!("{}.{}", version / 1000, version % 1000 / 10).into());
        Ok(Self { nvml, driver_version, cuda_version, identities: HashMap::new(), owners: HashMap::new() })
    }

    /// Reads all devices.
    ///
    /// # Errors
    /// The driver as a whole does not answer any more; the session is to be opened anew.
    pub fn read(&mut self, roots: &Roots, cgroup_v1: bool) -> Result<Reading, NvmlError> {
        let began = Moment::now();
        let uptime_ticks = uptime_ticks(roots);
        let first = roots.in_first_pid_namespace();
        let count = self.nvml.device_count()?;
        let mut devices = Vec::with_capacity(count as usize);
        let mut faults = Vec::new();
        for index in 0..count {
            match read_device(&self.nvml, &mut self.identities, index, &mut faults) {
                Ok(device) => devices.push(device),
                // the library itself has to be opened anew: the driver was unloaded or replaced under it
                Err(
                    error @ (NvmlError::Uninitialized
                    | NvmlError::DriverNotLoaded
                    | NvmlError::LibRmVersionMismatch),
                ) => return Err(error),
                Err(error) => {
                    self.identities.remove(&index);
                    tracing::debug!(gpu = index, error = %describe(&error), "device does not answer");
                    faults.push("io");
                }
            }
        }
        let mut owners = HashMap::new();
        for process in devices.iter_mut().filter_map(|device| device.processes.as_mut()).flatten() {
            if first && let Some(now) = uptime_ticks {
                process.owner = self.owner(roots, process.pid, now, cgroup_v1, &mut faults);
                if let Some(owner) = &process.owner {
                    owners.insert((process.pid, owner.start_ticks), owner.clone());
                }
            }
        }
        self.owners = owners;
        let at = Moment::now();
        Ok(Reading {
            at,
            took: at.since(began),
            driver_version: self.driver_version.clone(),
            cuda_version: self.cuda_version.clone(),
            counted: count as usize,
            devices,
            pids_are_the_hosts: first,
            faults,
        })
    }

    /// Who a pid is. A process that started after the lists were asked for has only inherited the number.
    fn owner(
        &self,
        roots: &Roots,
        pid: u32,
        uptime_ticks: u64,
        cgroup_v1: bool,
        faults: &mut Vec<&'static str>,
    ) -> Option<Owner> {
        let mut buffer = Vec::new();
        let mut look = || -> Result<Owner, ReadError> {
            let dir = Dir::open(&roots.process(pid))?;
            let stat = Stat::parse(dir.file("stat")?.read_once(&mut buffer)?);
            let stat = stat.ok_or_else(|| ReadError::malformed("stat"))?;
            if let Some(known) = self.owners.get(&(pid, stat.start_ticks)) {
                let comm = String::from_utf8_lossy(&stat.comm);
                let comm = if *known.comm == *comm { Arc::clone(&known.comm) } else { comm.into() };
                return Ok(Owner { comm, ..known.clone() });
            }
            let file = dir.file("cgroup")?;
            let cgroup = cgroup_path(file.read_once(&mut buffer)?, cgroup_v1);
            let cgroup = cgroup.ok_or_else(|| ReadError::malformed("cgroup"))?;
            let cgroup = String::from_utf8_lossy(cgroup).into();
            let comm = String::from_utf8_lossy(&stat.comm).into();
            Ok(Owner { start_ticks: stat.start_ticks, comm, cgroup })
        };
        match look() {
            Ok(owner) => (owner.start_ticks <= uptime_ticks + START_SLACK_TICKS).then_some(owner),
            Err(error) => {
                faults.extend(error.fault_reason());
                None
            }
        }
    }
}

/// Clock ticks since boot, from `/proc/uptime` of the same host as the processes.
fn uptime_ticks(roots: &Roots) -> Option<u64> {
    let mut buffer = Vec::new();
    let file = KernelFile::open(&roots.proc.join("uptime")).ok()?;
    let text = std::str::from_utf8(file.read_once(&mut buffer).ok()?).ok()?;
    let seconds: f64 = text.split(' ').next()?.parse().ok()?;
    Some((seconds * rustix::param::clock_ticks_per_second() as f64) as u64)
}

fn read_device(
    nvml: &Nvml,
    identities: &mut HashMap<u32, Arc<Identity>>,
    index: u32,
    faults: &mut Vec<&'static str>,
) -> Result<Device, NvmlError> {
    let device = nvml.device_by_index(index)?;
    let identity = match identities.get(&index) {
        Some(known) => Arc::clone(known),
        None => Arc::new(identify(&device, index)?),
    };
    identities.insert(index, Arc::clone(&identity));
    let mut memory = read_memory(&device, faults)?;
    let mut processes = processes(&device, memory, faults)?;
    let mut raced = false;
    for attempt in 0..=READ_AGAIN {
        let held: u64 = processes.iter().flatten().filter_map(|process| process.used).sum();
        raced = memory.is_some_and(|memory| held > memory.used);
        if !raced || attempt == READ_AGAIN {
            break;
        }
        memory = read_memory(&device, faults)?;
        processes = self::processes(&device, memory, faults)?;
    }
    Ok(Device { identity, memory, processes, raced })
}

fn identify(device: &NvmlDevice<'_>, index: u32) -> Result<Identity, NvmlError> {
    let text = |value: Result<String, NvmlError>| bounded(&value.unwrap_or_default());
    Ok(Identity {
        index: index.to_string().into(),
        uuid: bounded(&device.uuid()?), // without it the device cannot be told from its successor
        model: text(device.name()),
        pci_bus_id: text(device.pci_info().map(|pci| pci.bus_id)),
        compute_capability: text(
            device.cuda_compute_capability().map(|c| format!("{}.{}", c.major, c.minor)),
        ),
        cuda_cores: text(device.num_cores().map(|cores| cores.to_string())),
    })
}

/// A field's value; `None` if this device does not have it. Only a device that is lost is an error of the whole.
fn field<T>(value: Result<T, NvmlError>, faults: &mut Vec<&'static str>) -> Result<Option<T>, NvmlError> {
    match value {
        Ok(value) => Ok(Some(value)),
        Err(error @ (NvmlError::GpuLost | NvmlError::Uninitialized | NvmlError::DriverNotLoaded)) => {
            Err(error)
        }
        Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound) => {
            Ok(None)
        }
        Err(error) => {
            faults.push(if matches!(error, NvmlError::NoPermission) { "permission" } else { "io" });
            Ok(None)
        }
    }
}

fn read_memory(device: &NvmlDevice<'_>, faults: &mut Vec<&'static str>) -> Result<Option<Memory>, NvmlError> {
    let Some(info) = field(device.memory_info(), faults)? else { return Ok(None) };
    let memory = plausible(info);
    if memory.is_none() {
        faults.push("malformed");
    }
    Ok(memory)
}

/// Memory whose parts fit into the whole; a sentinel or garbage does not.
fn plausible(info: nvml_wrapper::struct_wrappers::device::MemoryInfo) -> Option<Memory> {
    let parts = info.used.checked_add(info.free)?.checked_add(info.reserved)?;
    (info.total > 0 && info.total <= MOST_MEMORY && parts <= info.total).then_some(Memory {
        total: info.total,
        used: info.used,
        free: info.free,
        reserved: info.reserved,
    })
}

/// Compute, graphics and MPS processes, each pid once: a process in several lists holds its memory once.
fn processes(
    device: &NvmlDevice<'_>,
    memory: Option<Memory>,
    faults: &mut Vec<&'static str>,
) -> Result<Option<Vec<GpuProcess>>, NvmlError> {
    let compute = field(device.running_compute_processes(), faults)?;
    let graphics = field(device.running_graphics_processes(), faults)?;
    let mps = field(device.mps_running_compute_processes(), faults)?;
    if compute.is_none() && graphics.is_none() && mps.is_none() {
        return Ok(None);
    }
    let most = memory.map_or(MOST_MEMORY, |memory| memory.total);
    let mut by_pid: HashMap<u32, Option<u64>> = HashMap::new();
    for info in compute.into_iter().chain(graphics).chain(mps).flatten() {
        let used = match info.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        };
        if info.pid >= PID_LIMIT || used.is_some_and(|used| used > most) {
            faults.push("malformed"); // records of another size than the library's header says: all is garbage
            return Ok(None);
        }
        let entry = by_pid.entry(info.pid).or_insert(used);
        *entry = used.max(*entry);
    }
    let mut all: Vec<_> =
        by_pid.into_iter().map(|(pid, used)| GpuProcess { pid, used, owner: None }).collect();
    all.sort_by_key(|process| process.pid);
    Ok(Some(all))
}
