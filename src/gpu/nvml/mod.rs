//! Reads GPUs through NVML: one session with the library, opened by `dlopen`.
//!
//! Fields that cannot change are read once per device. Fields and devices fail independently. A value that the driver
//! reports as *not available* is absent, never zero.
//!
//! Two kinds of readings: a full reading fills a [`DriverReading`]; a memory sample reads memory and processes only, for
//! peaks between full readings.
//!
//! Runs in the NVML process only. Not here: the owners of processes and what lasts longer than a session (`assembler`).

mod device;
mod api_versions;
mod events;
mod health;
pub mod library;
mod memory;
mod mig;
mod processes;
mod ffi;
mod utilization;

use std::collections::BTreeMap;
use std::sync::Arc;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use super::protocol::{DriverReading, DriverSample, DriverVersions, SampledDevice};
use super::types::GpuDevice;
use crate::clock::Timestamp;
use crate::host::READ_ERROR_REASONS;
use crate::text::bounded;
use crate::text::error_chain;
use api_versions::ApiVersions;
use device::NvmlGpu;
use events::Events;

/// The library, loaded and initialised, and the state of its GPUs.
#[derive(Debug)]
pub struct Session<'nvml> {
    nvml: &'nvml Nvml,
    gpus: BTreeMap<u32, NvmlGpu<'nvml>>,
    api_versions: ApiVersions,
    events: Events<'nvml>,
}

impl<'nvml> Session<'nvml> {
    /// Creates a session without a call to the library.
    pub fn new(nvml: &'nvml Nvml) -> Self {
        Self { nvml, gpus: BTreeMap::new(), api_versions: ApiVersions::default(), events: Events::default() }
    }

    /// Reads the versions of the driver.
    pub fn versions(&self) -> DriverVersions {
        let version = |version: i32| format!("{}.{}", version / 1000, version % 1000 / 10).into();
        DriverVersions {
            driver: self.nvml.sys_driver_version().ok().map(|version| bounded(&version)),
            cuda: self.nvml.sys_cuda_driver_version().ok().map(version),
        }
    }

    /// Takes the Xids since the previous call, each with the UUID of its GPU.
    pub fn take_xids(&mut self) -> Vec<(Arc<str>, u64)> {
        self.events.take_xids()
    }

    /// Reads all devices. The Xids are left to [`Session::take_xids`].
    ///
    /// # Errors
    /// The whole driver has failed; the library must be reopened.
    pub fn read(&mut self) -> Result<DriverReading, NvmlError> {
        let now = Timestamp::now();
        self.poll_events(now)?;
        let count = self.nvml.device_count()?;
        self.gpus.retain(|index, _| *index < count);
        let mut reading = DriverReading { counted: count as usize, ..DriverReading::default() };
        let mut read_errors = Vec::new();
        for index in 0..count {
            match self.read_gpu(index, reading.devices.len(), now, &mut read_errors) {
                Ok(devices) => reading.devices.extend(devices),
                Err(error) if library::is_library_error(&error) => return Err(error),
                Err(error) => {
                    if let Some(lost) = self.gpus.remove(&index) {
                        self.events.forget(&lost.identity.uuid);
                    }
                    tracing::debug!(gpu = index, error = %error_chain(&error), "reading a GPU failed");
                    read_errors.push(library::error_label(&error));
                }
            }
        }
        self.events.register(self.nvml, now, self.gpus.values());
        let uuids = self.gpus.values().map(|gpu| &gpu.identity.uuid);
        reading.registered = uuids.filter(|uuid| self.events.is_registered(uuid)).cloned().collect();
        reading.read_errors = READ_ERROR_REASONS
            .map(|reason| read_errors.iter().filter(|error| **error == reason).count() as u32);
        Ok(reading)
    }

    fn read_gpu(
        &mut self,
        index: u32,
        position: usize,
        now: Timestamp,
        read_errors: &mut Vec<&'static str>,
    ) -> Result<Vec<GpuDevice>, NvmlError> {
        let gpu = match self.gpus.entry(index) {
            std::collections::btree_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::btree_map::Entry::Vacant(new) => {
                new.insert(NvmlGpu::open(self.nvml, index, read_errors)?)
            }
        };
        gpu.read(position, now, &mut self.api_versions, read_errors)
    }

    /// Reads the memory of all devices that answered in the last full reading. Errors are left to the next full reading.
    ///
    /// # Errors
    /// As [`Session::read`].
    pub fn sample_memory(&mut self) -> Result<DriverSample, NvmlError> {
        self.poll_events(Timestamp::now())?;
        let mut ignored_errors = Vec::new(); // the next full reading meets and counts the same errors
        let mut sample = DriverSample::default();
        for gpu in self.gpus.values() {
            match gpu.sample_memory(&mut self.api_versions, &mut ignored_errors) {
                Ok(samples) => {
                    sample.devices.extend(samples.into_iter().map(|(identity, memory, processes)| {
                        let processes = processes.unwrap_or_default();
                        SampledDevice {
                            key: Arc::clone(identity.key()),
                            used: memory.used,
                            processes: processes.iter().map(|process| (process.pid, process.used)).collect(),
                        }
                    }))
                }
                Err(error) if library::is_library_error(&error) => return Err(error),
                Err(_) => {}
            }
        }
        Ok(sample)
    }

    fn poll_events(&mut self, now: Timestamp) -> Result<(), NvmlError> {
        if self.events.poll()? {
            self.events.register(self.nvml, now, self.gpus.values());
        }
        Ok(())
    }
}
