//! One GPU: who it is, and its memory and processes, read together so that the books close.

use std::sync::Arc;
use std::time::Duration;

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device as NvmlDevice, Nvml};

use super::accounting::Accounting;
use super::dialect::Dialect;
use super::health::Asked;
use super::library::{error_may_pass, field};
use super::mig::Mig;
use super::processes::{EVERY, Lists};
use super::utilization::Load;
use super::{memory, processes};
use crate::clock::Moment;
use crate::collect::gpu::health::Counted;
use crate::collect::gpu::reading::{Device, GpuProcess, Identity, Memory, Owner};
use crate::series::bounded;

/// Memory and processes are read again so often when they contradict each other.
const READ_AGAIN: usize = 2;

/// A GPU as one session with the library knows it.
#[derive(Debug)]
pub struct Gpu<'nvml> {
    /// Its handle, which stays good as long as the GPU does.
    pub handle: NvmlDevice<'nvml>,
    /// Who it is.
    pub identity: Arc<Identity>,
    /// False if a part of its identity could not be read.
    is_identified: bool,
    index: u32,
    /// Its accounting mode.
    pub accounting: Accounting,
    mig: Mig<'nvml>,
    lists: Lists,
    /// Its memory, from the last reading that told it: no process holds more.
    total: Option<u64>,
    asked: Asked,
    load: Load,
}

/// What a quick look finds on a device: who it is, its memory, its processes if they are known.
pub type Quick = (Arc<Identity>, Memory, Option<Vec<GpuProcess>>);

/// What a whole look finds: the GPU and its MIG instances, and the driver's maxima of processes that have ended.
pub type Found = (Vec<Device>, Vec<(u32, Owner, u64)>);

/// Memory, processes, and which lists these were in.
type Holdings = (Memory, Option<Vec<GpuProcess>>, Lists);

impl<'nvml> Gpu<'nvml> {
    /// Asks what does not change about a GPU.
    ///
    /// # Errors
    /// It does not answer, or has no UUID, without which it cannot be told from its successor.
    pub fn open(
        nvml: &'nvml Nvml,
        index: u32,
        most_between: Duration,
        faults: &mut Vec<&'static str>,
    ) -> Result<Self, NvmlError> {
        let handle = nvml.device_by_index(index)?;
        let (identity, is_identified) = identify(&handle, index, faults)?;
        Ok(Self {
            handle,
            identity: Arc::new(identity),
            is_identified,
            index,
            accounting: Accounting::default(),
            mig: Mig::default(),
            lists: EVERY,
            total: None,
            asked: Asked::new(most_between),
            load: Load::default(),
        })
    }

    /// Reads everything. The GPU will be at `place` in the list of devices.
    ///
    /// # Errors
    /// The GPU is lost, or the library has to be opened anew.
    pub fn read(
        &mut self,
        place: usize,
        now: Moment,
        counted: &mut Counted,
        dialect: &mut Dialect,
        faults: &mut Vec<&'static str>,
    ) -> Result<Found, NvmlError> {
        if !self.is_identified {
            let (identity, is_identified) = identify(&self.handle, self.index, faults)?;
            if *self.identity != identity {
                self.identity = Arc::new(identity);
                self.mig.instances.clear(); // they tell its model and its address too
            }
            self.is_identified = is_identified;
        }
        let is_split = self.mig.refresh(&self.handle, &self.identity, faults)?;
        let mut devices = self.devices(is_split, place, dialect, faults)?;
        for _ in 0..READ_AGAIN {
            if !devices.iter().any(|device| device.raced) {
                break;
            }
            devices = self.devices(is_split, place, dialect, faults)?;
        }
        let mut ended = Vec::new();
        let whole = &mut devices[0];
        whole.health = self.asked.read(&self.handle, now, counted, faults)?;
        if let Some(processes) = &mut whole.processes {
            self.load.read(&self.handle, now, processes, &mut dialect.buffer, faults)?;
            ended = self.accounting.read(&self.handle, now, processes, whole.memory.total, faults)?;
        }
        Ok((devices, ended))
    }

    /// The GPU and its instances with what they hold, and whether that contradicts itself.
    fn devices(
        &mut self,
        is_split: bool,
        place: usize,
        dialect: &mut Dialect,
        faults: &mut Vec<&'static str>,
    ) -> Result<Vec<Device>, NvmlError> {
        let mut whole = Device::new(Arc::clone(&self.identity));
        if is_split {
            whole.memory = memory::read(&self.handle, dialect, faults)?;
            self.total = whole.memory.total.or(self.total);
        } else {
            (whole.memory, whole.processes, self.lists) =
                holdings(&self.handle, EVERY, &mut self.total, dialect, faults)?;
        }
        let mut devices = vec![whole];
        for part in &mut self.mig.instances {
            part.total = part.total.or(self.total); // no part of it has more than the GPU
            let (memory, processes, lists) = holdings(&part.handle, EVERY, &mut part.total, dialect, faults)?;
            part.lists = lists;
            devices.push(Device {
                memory,
                processes,
                instance_of: Some(place),
                ..Device::new(Arc::clone(&part.identity))
            });
        }
        let raced: Vec<bool> = devices.iter().map(|device| holds_too_much(device, &devices)).collect();
        for (device, raced) in std::iter::zip(&mut devices, raced) {
            device.raced = raced;
        }
        Ok(devices)
    }

    /// Memory and processes only, and of the processes only the lists that had an entry in the last whole look.
    ///
    /// # Errors
    /// As [`Gpu::read`].
    pub fn look_quickly(
        &self,
        dialect: &mut Dialect,
        faults: &mut Vec<&'static str>,
    ) -> Result<Vec<Quick>, NvmlError> {
        let mut found = Vec::with_capacity(1 + self.mig.instances.len());
        let mut look = |handle: &NvmlDevice<'_>, identity: &Arc<Identity>, mut lists: Lists, mut total| {
            lists[0] = true; // who comes new comes most likely to compute
            let (memory, processes, _) = holdings(handle, lists, &mut total, dialect, faults)?;
            found.push((Arc::clone(identity), memory, processes));
            Ok::<(), NvmlError>(())
        };
        if self.mig.instances.is_empty() {
            look(&self.handle, &self.identity, self.lists, self.total)?;
        }
        for part in &self.mig.instances {
            look(&part.handle, &part.identity, part.lists, part.total)?;
        }
        if !self.mig.instances.is_empty() {
            let memory = memory::read(&self.handle, dialect, faults)?;
            found.push((Arc::clone(&self.identity), memory, None));
        }
        Ok(found)
    }
}

/// Who a GPU is, and whether all was told that it has: what could not be read now is to be asked again.
fn identify(
    device: &NvmlDevice<'_>,
    index: u32,
    faults: &mut Vec<&'static str>,
) -> Result<(Identity, bool), NvmlError> {
    let uuid = bounded(&device.uuid()?);
    let mut is_complete = true;
    let mut text = |value: Result<String, NvmlError>| {
        is_complete &= !value.as_ref().is_err_and(error_may_pass);
        field(value, faults).map(|value| value.map_or_else(|| "".into(), |value| bounded(&value)))
    };
    let capability = device.cuda_compute_capability().map(|c| format!("{}.{}", c.major, c.minor));
    let identity = Identity {
        vendor: "nvidia",
        index: index.to_string().into(),
        uuid,
        instance: None,
        model: text(device.name())?,
        pci_bus_id: text(device.pci_info().map(|pci| pci.bus_id))?,
        compute_capability: text(capability)?,
        cuda_cores: text(device.num_cores().map(|cores| cores.to_string()))?,
        minor: text(device.minor_number().map(|minor| minor.to_string()))?,
    };
    Ok((identity, is_complete))
}

fn holdings(
    device: &NvmlDevice<'_>,
    lists: Lists,
    total: &mut Option<u64>,
    dialect: &mut Dialect,
    faults: &mut Vec<&'static str>,
) -> Result<Holdings, NvmlError> {
    let memory = memory::read(device, dialect, faults)?;
    *total = memory.total.or(*total);
    let (processes, lists) = processes::read(device, lists, *total, dialect, faults)?;
    Ok((memory, processes, lists))
}

/// Whether the processes whose memory is a part of this device's hold more than it has in use: memory and processes are
/// answers of different moments.
fn holds_too_much(device: &Device, all: &[Device]) -> bool {
    let held = all.iter().filter(|other| device.contains(other)).flat_map(|other| &other.processes).flatten();
    let held: u64 = held.filter_map(|process| process.used).sum();
    device.memory.used.is_some_and(|used| held > used)
}
