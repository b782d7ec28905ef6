//! NVML to readings: one session with the library, opened by `dlopen`.
//!
//! Fields that cannot change are asked once per device. Each field fails for itself; a device that fails does not take
//! the others along. What the driver reports as *not available* is absent, never zero.

mod device;
mod library;
mod memory;
mod processes;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

pub use library::{describe, probe};

use super::owners::{Owners, uptime_ticks};
use super::reading::{Device, Identity, Pids, Reading};
use crate::clock::Moment;
use crate::host::Roots;
use crate::series::bounded;

/// The library, loaded and initialised.
#[derive(Debug)]
pub struct Session {
    nvml: Nvml,
    driver_version: Option<Arc<str>>,
    cuda_version: Option<Arc<str>>,
    identities: HashMap<u32, Arc<Identity>>,
    owners: Owners,
}

impl Session {
    /// Loads and initialises the library.
    ///
    /// # Errors
    /// No such library (`LibloadingError`), or the driver is not there.
    pub fn open(library: Option<&Path>) -> Result<Self, NvmlError> {
        let nvml = library::open(library)?;
        let driver_version = nvml.sys_driver_version().ok().map(|version| bounded(&version));
        let cuda_version = nvml
            .sys_cuda_driver_version()
            .ok()
            .map(|version| format!("{}.{}", version / 1000, version % 1000 / 10).into());
        Ok(Self { nvml, driver_version, cuda_version, identities: HashMap::new(), owners: Owners::default() })
    }

    /// Reads all devices.
    ///
    /// # Errors
    /// The driver as a whole does not answer any more; the session is to be opened anew.
    pub fn read(&mut self, roots: &Roots, cgroup_v1: bool) -> Result<Reading, NvmlError> {
        let began = Moment::now();
        let uptime_ticks = uptime_ticks(roots);
        let count = self.nvml.device_count()?;
        let mut devices = Vec::with_capacity(count as usize);
        let mut faults = Vec::new();
        for index in 0..count {
            match self.read_device(index, &mut faults) {
                Ok(device) => devices.push(device),
                Err(error) if library::error_is_the_librarys(&error) => return Err(error),
                Err(error) => {
                    self.identities.remove(&index);
                    tracing::debug!(gpu = index, error = %describe(&error), "device does not answer");
                    faults.push("io");
                }
            }
        }
        let first = roots.in_first_pid_namespace();
        for process in devices.iter_mut().filter_map(|device| device.processes.as_mut()).flatten() {
            if first && let Some(now) = uptime_ticks {
                process.owner = self.owners.of(roots, process.pid, now, cgroup_v1, &mut faults);
            }
        }
        self.owners.end_reading();
        let at = Moment::now();
        Ok(Reading {
            source: "gpu",
            at,
            took: at.since(began),
            driver_version: self.driver_version.clone(),
            cuda_version: self.cuda_version.clone(),
            counted: count as usize,
            devices,
            pids: if first {
                Pids::Proven
            } else {
                Pids::Withheld("memledger is not in the host's pid namespace")
            },
            faults,
        })
    }

    fn read_device(&mut self, index: u32, faults: &mut Vec<&'static str>) -> Result<Device, NvmlError> {
        let device = self.nvml.device_by_index(index)?;
        let identity = match self.identities.get(&index) {
            Some(known) => Arc::clone(known),
            None => Arc::new(device::identify(&device, index)?),
        };
        self.identities.insert(index, Arc::clone(&identity));
        let (memory, processes, raced) = device::holdings(&device, faults)?;
        Ok(Device { memory, processes, raced, ..Device::new(identity) })
    }
}
