//! What a source of GPU readings answers: types that every vendor's source can fill.
//!
//! Whatever a source does not tell is `None` or empty, field by field, and then has no series. A source that knows only
//! processes (unified memory: there is no memory of the GPU's own) leaves all of [`Memory`] absent.
//!
//! A MIG instance is a device of its own in the list, right after the GPU that it is a part of.

use std::sync::Arc;
use std::time::Duration;

use super::health::Health;
use crate::clock::Moment;

/// One answer of one source.
#[derive(Clone, Debug)]
pub struct Reading {
    /// The name of the collector that read it; two sources never share one.
    pub source: &'static str,
    /// When it was complete.
    pub at: Moment,
    /// How long the driver took.
    pub took: Duration,
    /// Version of the driver.
    pub driver_version: Option<Arc<str>>,
    /// CUDA version that the driver supports.
    pub cuda_version: Option<Arc<str>>,
    /// How many GPUs the driver counts, also those that do not answer; MIG instances do not count.
    pub counted: usize,
    /// The devices that answered.
    pub devices: Vec<Device>,
    /// GPUs that answered once and do not now: nothing of them is told but their Xids.
    pub silent: Vec<Device>,
    /// Whether the pids of this reading are those of the host as seen here.
    pub pids: Pids,
    /// Devices that are there and did not answer, and fields that failed: one entry a fault.
    pub faults: Vec<&'static str>,
}

/// Whether processes may be looked up by the pids that a driver names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pids {
    /// They are the host's.
    Proven,
    /// They are not, or that cannot be told: no process is named. With the reason, as a part of a sentence.
    Withheld(&'static str),
}

/// One GPU, or one MIG instance of a GPU.
#[derive(Clone, Debug)]
pub struct Device {
    /// What does not change.
    pub identity: Arc<Identity>,
    /// Its memory.
    pub memory: Memory,
    /// Its processes, each pid once; `None` if the device does not tell. Those of a GPU in MIG mode are with its
    /// instances.
    pub processes: Option<Vec<GpuProcess>>,
    /// For a MIG instance: the place of its GPU in the list.
    pub instance_of: Option<usize>,
    /// The processes held more than `used`, also when read again twice.
    pub raced: bool,
    /// Load, power, heat, errors.
    pub health: Health,
}

impl Device {
    /// A device of which nothing but its identity is known yet.
    pub fn new(identity: Arc<Identity>) -> Self {
        let (memory, health) = (Memory::default(), Health::default());
        Self { identity, memory, processes: None, instance_of: None, raced: false, health }
    }

    /// Whether the processes of `other`, a device of the same reading, use memory of this one: it is this one, an
    /// instance of this GPU, or a compute instance beside this one in the same GPU instance.
    pub fn contains(&self, other: &Device) -> bool {
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

/// What does not change about a GPU while the driver is loaded. An empty text is *not told*.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// `nvidia`, `amd`, `intel`, ...
    pub vendor: &'static str,
    /// The number by which its driver's tools call it. Of a MIG instance: that of its GPU.
    pub index: Arc<str>,
    /// The id that tells it from every other device of this host. Of a MIG instance: that of its GPU.
    pub uuid: Arc<str>,
    /// Which MIG instance it is; `None` for a whole GPU.
    pub instance: Option<Instance>,
    /// Model name.
    pub model: Arc<str>,
    /// Address on the PCI bus.
    pub pci_bus_id: Arc<str>,
    /// Compute capability, such as `9.0`.
    pub compute_capability: Arc<str>,
    /// Number of CUDA cores.
    pub cuda_cores: Arc<str>,
    /// The number in the name of its device file, `/dev/nvidia0`, which need not be the index. Of a MIG instance: that of its
    /// GPU.
    pub minor: Arc<str>,
}

/// A MIG instance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Instance {
    /// GPU instance: a part of the GPU's memory and engines.
    pub gpu_instance_id: Arc<str>,
    /// Compute instance: a part of the GPU instance's engines. Those of one GPU instance share its memory.
    pub compute_instance_id: Arc<str>,
    /// Its own UUID, `MIG-...`.
    pub uuid: Arc<str>,
}

impl Identity {
    /// The id that no other device has, be it a GPU or a MIG instance.
    pub fn key(&self) -> &Arc<str> {
        self.instance.as_ref().map_or(&self.uuid, |instance| &instance.uuid)
    }

    /// The values of [`Scope::Gpu`](crate::catalog::Scope::Gpu)'s labels.
    pub fn labels(&self) -> [&str; 4] {
        let (gpu_instance, compute_instance) = self
            .instance
            .as_ref()
            .map_or(("", ""), |instance| (&*instance.gpu_instance_id, &*instance.compute_instance_id));
        [&self.index, &self.uuid, gpu_instance, compute_instance]
    }
}

/// Memory of a device in bytes. Where all is told: total = used + free + reserved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// All of it.
    pub total: Option<u64>,
    /// Used, without what is told as reserved.
    pub used: Option<u64>,
    /// Free.
    pub free: Option<u64>,
    /// Kept by driver and firmware.
    pub reserved: Option<u64>,
}

/// One process on a device.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuProcess {
    /// Its pid, as the driver names it.
    pub pid: u32,
    /// GPU memory in bytes; `None` where the driver does not tell (N/A).
    pub used: Option<u64>,
    /// Highest memory since its start, if the driver keeps it; never less than what is told as used.
    pub driver_peak: Option<u64>,
    /// Share of the time since the reading before in which one of its kernels ran; `None` where the driver does not tell.
    pub busy: Option<f64>,
    /// Who it is; `None` if no such process can be seen, or it is younger than the reading.
    pub owner: Option<Owner>,
}

impl GpuProcess {
    /// A process of which nothing else is known yet.
    pub fn new(pid: u32, used: Option<u64>) -> Self {
        Self { pid, used, driver_peak: None, busy: None, owner: None }
    }
}

/// A process on a GPU, as the host knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Clock ticks from boot to its start.
    pub start_ticks: u64,
    /// Its name, made printable.
    pub comm: Arc<str>,
    /// Its cgroup in the hierarchy of the memory controller.
    pub cgroup: Arc<str>,
}

/// What was held at one moment: as much as the peaks need. Each reading is one too.
#[derive(Clone, Debug)]
pub struct Sample {
    /// When; if not `is_dated`, at some time before that.
    pub at: Moment,
    /// False for a maximum of which nobody knows when it was.
    pub is_dated: bool,
    /// The devices that answered.
    pub devices: Vec<Sampled>,
}

/// What was held on one device.
#[derive(Clone, Debug)]
pub struct Sampled {
    /// Which one.
    pub identity: Arc<Identity>,
    /// Used memory, without what is told as reserved.
    pub used: Option<u64>,
    /// Who held how much; processes of which one of the two is not known are left out.
    pub holders: Vec<(u32, Owner, u64)>,
    /// Processes that are known, but not how much they held: their containers have no sum.
    pub silent: Vec<(u32, Owner)>,
}

impl Sampled {
    /// What a device of a reading held.
    pub fn of(device: &Device) -> Self {
        let (mut holders, mut silent) = (Vec::new(), Vec::new());
        for process in device.processes.iter().flatten() {
            match (&process.owner, process.used) {
                (Some(owner), Some(used)) => holders.push((process.pid, owner.clone(), used)),
                (Some(owner), None) => silent.push((process.pid, owner.clone())),
                (None, _) => {}
            }
        }
        Self { identity: Arc::clone(&device.identity), used: device.memory.used, holders, silent }
    }
}
