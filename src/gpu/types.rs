//! The types of a GPU reading, for sources of every vendor.
//!
//! A field that a source does not report is `None` or empty, and then has no series. A source that reports only processes
//! (unified memory: the GPU has no memory of its own) leaves all of [`DeviceMemory`] absent.
//!
//! A MIG instance is a device of its own in the list, directly after its GPU.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::device_metrics::DeviceHealth;
use crate::clock::Timestamp;
use crate::host::process::ProcessFacts;

/// One reading of one source.
#[derive(Clone, Debug)]
pub struct GpuReading {
    /// The name of the collector that read it. No two sources have the same name.
    pub source: &'static str,
    /// When the reading was complete.
    pub at: Timestamp,
    /// How long the reading took.
    pub took: Duration,
    /// The version of the driver.
    pub driver_version: Option<Arc<str>>,
    /// The CUDA version that the driver supports.
    pub cuda_version: Option<Arc<str>>,
    /// The number of GPUs that the driver reports, including those that do not answer, without MIG instances.
    pub counted: usize,
    /// The devices that answered.
    pub devices: Vec<GpuDevice>,
    /// GPUs that answered earlier and do not answer now: only their Xids are exported.
    pub silent: Vec<GpuDevice>,
    /// Whether the pids of this reading are pids of this host.
    pub pids: PidTrust,
    /// One entry for each device that did not answer and each field that could not be read.
    pub read_errors: Vec<&'static str>,
}

#[cfg(test)]
impl GpuReading {
    /// Returns a reading of NVML that has these devices and no error.
    pub fn of_devices(at: Timestamp, devices: Vec<GpuDevice>) -> Self {
        Self {
            source: "gpu",
            at,
            took: Duration::ZERO,
            driver_version: None,
            cuda_version: None,
            counted: devices.len(),
            devices,
            silent: vec![],
            pids: PidTrust::Trusted,
            read_errors: vec![],
        }
    }
}

/// Whether the pids that a driver reports can be used to find processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PidTrust {
    /// They are pids of this host.
    Trusted,
    /// They are not, or that is unknown: no process is attributed. The reason is a part of a sentence.
    Untrusted(&'static str),
}

/// One GPU, or one MIG instance of a GPU.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GpuDevice {
    /// The fields that do not change.
    pub identity: Arc<GpuIdentity>,
    /// Its memory.
    pub memory: DeviceMemory,
    /// Its processes, each pid once; `None` if the device does not report them. The processes of a GPU in MIG mode are
    /// those of its instances.
    pub processes: Option<Vec<GpuProcess>>,
    /// For a MIG instance: the index of its GPU in the list.
    pub instance_of: Option<usize>,
    /// The processes held more than `used`, which was read more than once.
    pub raced: bool,
    /// Utilization, power, temperature, errors.
    pub health: DeviceHealth,
}

impl GpuDevice {
    /// Returns a device with an identity and no other values yet.
    pub fn new(identity: Arc<GpuIdentity>) -> Self {
        let (memory, health) = (DeviceMemory::default(), DeviceHealth::default());
        Self { identity, memory, processes: None, instance_of: None, raced: false, health }
    }

    /// Returns whether the processes of `other`, a device of the same reading, use memory of this device: `other` is this
    /// device, an instance of this GPU, or a compute instance in the same GPU instance.
    pub fn contains(&self, other: &GpuDevice) -> bool {
        if self.identity.uuid != other.identity.uuid {
            return false;
        }
        match (&self.identity.instance, &other.identity.instance) {
            (None, _) => true,
            (Some(own), Some(other)) => own.gpu_instance_id == other.gpu_instance_id,
            (Some(_), None) => false,
        }
    }
}

#[cfg(test)]
impl GpuDevice {
    /// Returns a device with this index and uuid, and no other values.
    pub fn with_ids(index: &str, uuid: &str) -> Self {
        let identity = GpuIdentity { index: index.into(), uuid: uuid.into(), ..GpuIdentity::default() };
        Self::new(Arc::new(identity))
    }
}

/// The fields of a GPU that do not change while the driver is loaded. An empty text is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuIdentity {
    /// `nvidia`, `amd`, `intel`, ... Not in messages of the NVML process, whose GPUs are all NVIDIA's.
    #[serde(skip, default = "nvidia")]
    pub vendor: &'static str,
    /// The index that the driver's tools use. Of a MIG instance: that of its GPU.
    pub index: Arc<str>,
    /// The id that is unique on this host. Of a MIG instance: that of its GPU.
    pub uuid: Arc<str>,
    /// The MIG instance; `None` for a whole GPU.
    pub instance: Option<MigInstance>,
    /// Model name.
    pub model: Arc<str>,
    /// Address on the PCI bus.
    pub pci_bus_id: Arc<str>,
    /// Compute capability, such as `9.0`.
    pub compute_capability: Arc<str>,
    /// Number of CUDA cores.
    pub cuda_cores: Arc<str>,
    /// The number in the name of its device file, such as `/dev/nvidia0`. It may differ from the index. Of a MIG instance:
    /// that of its GPU.
    pub minor: Arc<str>,
}

/// Returns NVIDIA's name as a vendor.
fn nvidia() -> &'static str {
    "nvidia"
}

/// A MIG instance.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigInstance {
    /// GPU instance: a part of the GPU's memory and engines.
    pub gpu_instance_id: Arc<str>,
    /// Compute instance: a part of the GPU instance's engines. Those of one GPU instance share its memory.
    pub compute_instance_id: Arc<str>,
    /// Its own UUID, `MIG-...`.
    pub uuid: Arc<str>,
}

impl GpuIdentity {
    /// Returns the id that is unique among GPUs and MIG instances.
    pub fn key(&self) -> &Arc<str> {
        self.instance.as_ref().map_or(&self.uuid, |instance| &instance.uuid)
    }

    /// Returns the values of the labels of [`Scope::Gpu`](crate::catalog::Scope::Gpu).
    pub fn labels(&self) -> [&str; 4] {
        let (gpu_instance, compute_instance) = self
            .instance
            .as_ref()
            .map_or(("", ""), |instance| (&*instance.gpu_instance_id, &*instance.compute_instance_id));
        [&self.index, &self.uuid, gpu_instance, compute_instance]
    }
}

/// The memory of a device in bytes. Where all four are known: total = used + free + reserved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceMemory {
    /// Total memory.
    pub total: Option<u64>,
    /// Used memory, without reserved memory.
    pub used: Option<u64>,
    /// Free memory.
    pub free: Option<u64>,
    /// Memory that is reserved by driver and firmware.
    pub reserved: Option<u64>,
}

/// One process on a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuProcess {
    /// Its pid, as the driver reports it.
    pub pid: u32,
    /// GPU memory in bytes; `None` where the driver reports none (N/A).
    pub used: Option<u64>,
    /// The share of the time since the previous reading in which one of its kernels ran; `None` where the driver does not
    /// report it.
    pub busy: Option<f64>,
    /// The process; `None` if it is not visible, or started after the reading. Never in a message.
    #[serde(skip)]
    pub owner: Option<ProcessFacts>,
}

impl GpuProcess {
    /// Returns a process with these values and no others yet.
    pub fn new(pid: u32, used: Option<u64>) -> Self {
        Self { pid, used, busy: None, owner: None }
    }
}

/// Memory use at one time, for the peaks. Each full reading is a sample too.
#[derive(Clone, Debug)]
pub struct GpuSample {
    /// The time of the sample.
    pub at: Timestamp,
    /// The devices that answered.
    pub devices: Vec<DeviceSample>,
}

/// Memory use of one device at one time.
#[derive(Clone, Debug)]
pub struct DeviceSample {
    /// The device.
    pub identity: Arc<GpuIdentity>,
    /// Used memory, without reserved memory.
    pub used: Option<u64>,
    /// The processes whose identity and memory are known, with their bytes.
    pub holders: Vec<(ProcessFacts, u64)>,
    /// The processes whose memory is unknown: their containers have no sum.
    pub silent: Vec<ProcessFacts>,
}

impl DeviceSample {
    /// Returns the memory use of a device of a reading.
    pub fn of(device: &GpuDevice) -> Self {
        let (mut holders, mut silent) = (Vec::new(), Vec::new());
        for process in device.processes.iter().flatten() {
            match (&process.owner, process.used) {
                (Some(owner), Some(used)) => holders.push((owner.clone(), used)),
                (Some(owner), None) => silent.push(owner.clone()),
                (None, _) => {}
            }
        }
        Self { identity: Arc::clone(&device.identity), used: device.memory.used, holders, silent }
    }
}
