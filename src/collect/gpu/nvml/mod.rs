//! NVML to readings: one session with the library, opened by `dlopen`.
//!
//! Fields that cannot change are asked once per device. Each field fails for itself; a device that fails does not take
//! the others along. What the driver reports as *not available* is absent, never zero.
//!
//! Two kinds of looks: a whole one fills a [`Reading`]; a quick one asks for memory and processes only, for the peaks
//! that a whole look would miss.

mod accounting;
mod device;
mod dialect;
mod events;
mod health;
pub mod library;
mod memory;
mod mig;
mod processes;
mod raw;
mod utilization;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

pub use library::describe;

use super::health::Totals;
use super::owners::{Owners, uptime_ticks};
use super::reading::{Device, Identity, Owner, Reading, Sample, Sampled};
use crate::clock::Moment;
use crate::host::Roots;
use crate::series::bounded;
use device::Gpu;
use dialect::Dialect;
use events::Events;

/// The library, loaded and initialised, and what is known of its GPUs.
#[derive(Debug)]
pub struct Session<'nvml> {
    nvml: &'nvml Nvml,
    driver_version: Option<Arc<str>>,
    cuda_version: Option<Arc<str>>,
    gpus: BTreeMap<u32, Gpu<'nvml>>,
    dialect: Dialect,
    events: Events<'nvml>,
    most_between: Duration,
}

/// What a whole look leaves.
#[derive(Debug)]
pub struct Looked {
    /// The reading.
    pub reading: Reading,
    /// The same for the peaks, and the driver's maxima of processes that have ended.
    pub samples: Vec<Sample>,
}

impl<'nvml> Session<'nvml> {
    /// Asks what is the same for all devices. Two readings are no further apart than `most_between`, unless a call hangs.
    pub fn new(nvml: &'nvml Nvml, most_between: Duration) -> Self {
        let version = |version: i32| format!("{}.{}", version / 1000, version % 1000 / 10).into();
        Self {
            nvml,
            driver_version: nvml.sys_driver_version().ok().map(|version| bounded(&version)),
            cuda_version: nvml.sys_cuda_driver_version().ok().map(version),
            gpus: BTreeMap::new(),
            dialect: Dialect::default(),
            events: Events::default(),
            most_between,
        }
    }

    /// Reads all devices.
    ///
    /// # Errors
    /// The driver as a whole does not answer any more; the library is to be opened anew.
    pub fn read(
        &mut self,
        roots: &Roots,
        owners: &mut Owners,
        totals: &mut Totals,
    ) -> Result<Looked, NvmlError> {
        let began = Moment::now();
        let uptime = uptime_ticks(roots);
        let count = self.nvml.device_count()?;
        self.gpus.retain(|index, _| *index < count);
        let (mut devices, mut ended, mut faults) = (Vec::new(), Vec::new(), Vec::new());
        for index in 0..count {
            match self.read_gpu(index, devices.len(), began, totals, &mut faults) {
                Ok((found, maxima)) => {
                    let identity = Arc::clone(&found[0].identity);
                    ended.extend(maxima.into_iter().map(|maximum| (Arc::clone(&identity), maximum)));
                    devices.extend(found);
                }
                Err(error) if library::error_is_the_librarys(&error) => return Err(error),
                Err(error) => {
                    if let Some(lost) = self.gpus.remove(&index) {
                        self.events.forget(&lost.identity.uuid);
                    }
                    tracing::debug!(gpu = index, error = %describe(&error), "device does not answer");
                    faults.push(library::fault(&error));
                }
            }
        }
        let processes = devices.iter_mut().filter_map(|device| device.processes.as_mut()).flatten();
        let pids = owners.name(processes, uptime, &mut faults);
        let keeps_maxima = self.gpus.values().any(|gpu| gpu.accounting.is_on());
        let boot_time = keeps_maxima.then(|| roots.boot_time().ok()).flatten();
        self.events.register(self.nvml, began, self.gpus.values(), totals);
        for device in devices.iter_mut().filter(|device| device.instance_of.is_none()) {
            let uuid = &device.identity.uuid;
            if let Some(gpu) = self.gpus.values_mut().find(|gpu| gpu.identity.uuid == *uuid) {
                gpu.accounting.remember(began, boot_time, device.processes.iter_mut().flatten());
            }
            if let Some(counted) = totals.get(uuid).filter(|_| self.events.listens_to(uuid)) {
                device.health.xids.clone_from(&counted.xids);
            }
        }
        let at = Moment::now();
        let samples = samples(at, ended, &devices);
        let reading = Reading {
            source: "gpu",
            at,
            took: at.since(began),
            driver_version: self.driver_version.clone(),
            cuda_version: self.cuda_version.clone(),
            counted: count as usize,
            silent: silent(totals, &devices),
            devices,
            pids,
            faults,
        };
        Ok(Looked { reading, samples })
    }

    fn read_gpu(
        &mut self,
        index: u32,
        place: usize,
        now: Moment,
        totals: &mut Totals,
        faults: &mut Vec<&'static str>,
    ) -> Result<device::Found, NvmlError> {
        let gpu = match self.gpus.entry(index) {
            std::collections::btree_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::btree_map::Entry::Vacant(new) => {
                new.insert(Gpu::open(self.nvml, index, self.most_between, faults)?)
            }
        };
        let counted = totals.entry(Arc::clone(&gpu.identity.uuid)).or_default();
        counted.identity = Some(Arc::clone(&gpu.identity));
        gpu.read(place, now, counted, &mut self.dialect, faults)
    }

    /// Looks quickly at what all devices that answered last time hold. What fails is left to the next whole look.
    ///
    /// # Errors
    /// As [`Session::read`].
    pub fn look_quickly(&mut self, roots: &Roots, owners: &mut Owners) -> Result<Sample, NvmlError> {
        let mut unheard = Vec::new(); // the next whole look meets the same faults, and counts them
        let uptime = uptime_ticks(roots);
        let mut quick = Vec::with_capacity(self.gpus.len());
        for gpu in self.gpus.values() {
            match gpu.look_quickly(&mut self.dialect, &mut unheard) {
                Ok(found) => quick.extend(found),
                Err(error) if library::error_is_the_librarys(&error) => return Err(error),
                Err(_) => {}
            }
        }
        let processes = quick.iter_mut().filter_map(|(_, _, processes)| processes.as_mut()).flatten();
        owners.name_quickly(processes, uptime, &mut unheard);
        let devices = quick.into_iter().map(|(identity, memory, processes)| {
            let device = Device { memory, processes, ..Device::new(identity) };
            Sampled::of(&device)
        });
        Ok(Sample { at: Moment::now(), is_dated: true, devices: devices.collect() })
    }

    /// Takes the Xids that have come.
    ///
    /// # Errors
    /// As [`Session::read`].
    pub fn take_xids(&mut self, totals: &mut Totals) -> Result<(), NvmlError> {
        let now = Moment::now();
        if self.events.take(now, totals)? {
            self.events.register(self.nvml, now, self.gpus.values(), totals);
        }
        Ok(())
    }

    /// GPUs whose accounting mode is off and could be on: not those in MIG mode.
    pub fn without_accounting(&self) -> usize {
        self.gpus.values().filter(|gpu| gpu.accounting.could_be_on()).count()
    }
}

/// GPUs of which Xids were counted and that are not among these devices, in the order of their numbers.
fn silent(totals: &Totals, devices: &[Device]) -> Vec<Device> {
    let silent = totals.iter().filter_map(|(uuid, counted)| {
        let identity = counted.identity.as_ref()?;
        let answers = devices.iter().any(|device| device.identity.uuid == *uuid);
        if answers || counted.xids.is_empty() {
            return None;
        }
        let mut device = Device::new(Arc::clone(identity));
        device.health.xids.clone_from(&counted.xids);
        Some(device)
    });
    let mut silent: Vec<_> = silent.collect();
    silent.sort_by(|a, b| (&a.identity.index, &a.identity.uuid).cmp(&(&b.identity.index, &b.identity.uuid)));
    silent
}

/// What a reading is for the peaks; and before it, what each process that has ended held at most, at some time.
fn samples(at: Moment, ended: Vec<(Arc<Identity>, (u32, Owner, u64))>, devices: &[Device]) -> Vec<Sample> {
    let maxima = ended.into_iter().map(|(identity, maximum)| {
        let only = Sampled { identity, used: None, holders: vec![maximum], silent: vec![] };
        Sample { at, is_dated: false, devices: vec![only] }
    });
    let now = Sample { at, is_dated: true, devices: devices.iter().map(Sampled::of).collect() };
    maxima.chain([now]).collect()
}
