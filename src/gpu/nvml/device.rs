//! One GPU: its identity, and its memory and processes, read together so that they add up.

use std::sync::Arc;

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device as NvmlDevice, Nvml};

use super::api_versions::ApiVersions;
use super::health::HealthState;
use super::library::{field, is_transient};
use super::mig::Mig;
use super::processes::{EVERY, Lists};
use super::utilization::ProcessUtilization;
use super::{memory, processes};
use crate::clock::Timestamp;
use crate::gpu::types::{DeviceMemory, GpuDevice, GpuIdentity, GpuProcess};
use crate::text::bounded;

/// Retries when memory and processes contradict each other.
const MAX_RETRIES: usize = 2;

/// A GPU in one session with the library.
#[derive(Debug)]
pub struct NvmlGpu<'nvml> {
    /// Its handle, which is valid as long as the GPU answers.
    pub handle: NvmlDevice<'nvml>,
    /// Its identity.
    pub identity: Arc<GpuIdentity>,
    /// False if a part of its identity could not be read.
    is_identified: bool,
    index: u32,
    mig: Mig<'nvml>,
    lists: Lists,
    /// Its total memory, from the last reading that had it: no process can hold more.
    total: Option<u64>,
    health: HealthState,
    utilization: ProcessUtilization,
}

/// A memory sample of one device: its identity, its memory, and its processes if they are known.
pub type MemorySample = (Arc<GpuIdentity>, DeviceMemory, Option<Vec<GpuProcess>>);

/// Memory, processes, and the lists that contained them.
type MemoryAndProcesses = (DeviceMemory, Option<Vec<GpuProcess>>, Lists);

impl<'nvml> NvmlGpu<'nvml> {
    /// Opens a GPU and reads its identity.
    ///
    /// # Errors
    /// The GPU does not answer, or has no UUID, without which it could not be distinguished from a replacement.
    pub fn open(
        nvml: &'nvml Nvml,
        index: u32,
        read_errors: &mut Vec<&'static str>,
    ) -> Result<Self, NvmlError> {
        let handle = nvml.device_by_index(index)?;
        let (identity, is_identified) = identify(&handle, index, read_errors)?;
        Ok(Self {
            handle,
            identity: Arc::new(identity),
            is_identified,
            index,
            mig: Mig::default(),
            lists: EVERY,
            total: None,
            health: HealthState::default(),
            utilization: ProcessUtilization::default(),
        })
    }

    /// Reads everything: the GPU, and its MIG instances. `position` is the index of the GPU in the list of devices.
    ///
    /// # Errors
    /// The GPU is lost, or the library must be reopened.
    pub fn read(
        &mut self,
        position: usize,
        now: Timestamp,
        api_versions: &mut ApiVersions,
        read_errors: &mut Vec<&'static str>,
    ) -> Result<Vec<GpuDevice>, NvmlError> {
        if !self.is_identified {
            let (identity, is_identified) = identify(&self.handle, self.index, read_errors)?;
            if *self.identity != identity {
                self.identity = Arc::new(identity);
                self.mig.instances.clear(); // their identities contain its model and address
            }
            self.is_identified = is_identified;
        }
        let is_mig = self.mig.refresh(&self.handle, &self.identity, now, read_errors)?;
        let mut devices = self.devices(is_mig, position, api_versions, read_errors)?;
        for _ in 0..MAX_RETRIES {
            if !devices.iter().any(|device| device.raced) {
                break;
            }
            devices = self.devices(is_mig, position, api_versions, read_errors)?;
        }
        let gpu = &mut devices[0];
        gpu.health = self.health.read(&self.handle, now, read_errors)?;
        if let Some(processes) = &mut gpu.processes {
            self.utilization.read(&self.handle, now, processes, &mut api_versions.buffer, read_errors)?;
        }
        Ok(devices)
    }

    /// Reads memory and processes of the GPU and its instances, and whether they contradict each other.
    fn devices(
        &mut self,
        is_mig: bool,
        position: usize,
        api_versions: &mut ApiVersions,
        read_errors: &mut Vec<&'static str>,
    ) -> Result<Vec<GpuDevice>, NvmlError> {
        let mut gpu = GpuDevice::new(Arc::clone(&self.identity));
        if is_mig {
            gpu.memory = memory::read(&self.handle, api_versions, read_errors)?;
            self.total = gpu.memory.total.or(self.total);
        } else {
            (gpu.memory, gpu.processes, self.lists) =
                read_memory_and_processes(&self.handle, EVERY, &mut self.total, api_versions, read_errors)?;
        }
        let mut devices = vec![gpu];
        for instance in &mut self.mig.instances {
            instance.total = instance.total.or(self.total); // no instance has more than the GPU
            let (memory, processes, lists) = read_memory_and_processes(
                &instance.handle,
                EVERY,
                &mut instance.total,
                api_versions,
                read_errors,
            )?;
            instance.lists = lists;
            devices.push(GpuDevice {
                memory,
                processes,
                instance_of: Some(position),
                ..GpuDevice::new(Arc::clone(&instance.identity))
            });
        }
        let raced: Vec<bool> = devices.iter().map(|device| has_race(device, &devices)).collect();
        for (device, raced) in std::iter::zip(&mut devices, raced) {
            device.raced = raced;
        }
        Ok(devices)
    }

    /// Reads only memory and processes, and of the processes only the lists that had an entry in the last full reading.
    ///
    /// # Errors
    /// As [`NvmlGpu::read`].
    pub fn sample_memory(
        &self,
        api_versions: &mut ApiVersions,
        read_errors: &mut Vec<&'static str>,
    ) -> Result<Vec<MemorySample>, NvmlError> {
        let mut samples = Vec::with_capacity(1 + self.mig.instances.len());
        let mut sample =
            |handle: &NvmlDevice<'_>, identity: &Arc<GpuIdentity>, mut lists: Lists, mut total| {
                lists[0] = true; // a new process most likely has a compute context
                let (memory, processes, _) =
                    read_memory_and_processes(handle, lists, &mut total, api_versions, read_errors)?;
                samples.push((Arc::clone(identity), memory, processes));
                Ok::<(), NvmlError>(())
            };
        if self.mig.instances.is_empty() {
            sample(&self.handle, &self.identity, self.lists, self.total)?;
        }
        for instance in &self.mig.instances {
            sample(&instance.handle, &instance.identity, instance.lists, instance.total)?;
        }
        if !self.mig.instances.is_empty() {
            let memory = memory::read(&self.handle, api_versions, read_errors)?;
            samples.push((Arc::clone(&self.identity), memory, None));
        }
        Ok(samples)
    }
}

/// Reads the identity of a GPU. Returns false with it if a field has to be read again.
fn identify(
    device: &NvmlDevice<'_>,
    index: u32,
    read_errors: &mut Vec<&'static str>,
) -> Result<(GpuIdentity, bool), NvmlError> {
    let uuid = bounded(&device.uuid()?);
    let mut is_complete = true;
    let mut text = |value: Result<String, NvmlError>| {
        is_complete &= !value.as_ref().is_err_and(is_transient);
        field(value, read_errors).map(|value| value.map_or_else(|| "".into(), |value| bounded(&value)))
    };
    let capability = device.cuda_compute_capability().map(|c| format!("{}.{}", c.major, c.minor));
    let identity = GpuIdentity {
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

fn read_memory_and_processes(
    device: &NvmlDevice<'_>,
    lists: Lists,
    total: &mut Option<u64>,
    api_versions: &mut ApiVersions,
    read_errors: &mut Vec<&'static str>,
) -> Result<MemoryAndProcesses, NvmlError> {
    let memory = memory::read(device, api_versions, read_errors)?;
    *total = memory.total.or(*total);
    let (processes, lists) = processes::read(device, lists, *total, api_versions, read_errors)?;
    Ok((memory, processes, lists))
}

/// Returns whether the processes that use this device's memory hold more than its used memory: memory and processes are
/// read at different times.
fn has_race(device: &GpuDevice, all: &[GpuDevice]) -> bool {
    let held = all.iter().filter(|other| device.contains(other)).flat_map(|other| &other.processes).flatten();
    let held: u64 = held.filter_map(|process| process.used).sum();
    device.memory.used.is_some_and(|used| held > used)
}
