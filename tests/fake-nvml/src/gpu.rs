//! One GPU of the state file.
//!
//! The default is a healthy, idle H100. Where a value is an `Option`, `None` (`null` in JSON) means that the GPU does not
//! support it, and its symbol returns *not supported*. Numbers are in the units of NVML, with the unit in the name where
//! possible.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

/// The state of one GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Gpu {
    /// `GPU-` and a UUID.
    pub uuid: String,
    pub name: String,
    pub serial: Option<String>,
    pub vbios: Option<String>,
    /// Domain (8 digits), bus, device and function in hexadecimal: `00000000:1A:00.0`.
    pub bus_id: String,
    /// The number in `/dev/nvidiaN`.
    pub minor: u32,
    /// Major and minor version, `[9, 0]` for an H100.
    pub compute_capability: [i32; 2],
    /// CUDA cores.
    pub cores: Option<u32>,
    /// Whether it has fallen off the bus: every symbol returns 15 for this GPU.
    pub lost: bool,
    /// Symbols that return this code for this GPU. 0 injects nothing.
    pub errors: BTreeMap<String, u32>,
    pub memory: Memory,
    pub bar1: Option<Bar1>,
    /// In MIG mode the symbols return *not supported* regardless of this value.
    pub utilization: Option<Utilization>,
    pub temperature_c: Option<u32>,
    pub power_mw: Option<u32>,
    pub power_limit_mw: Option<u32>,
    /// Energy since the driver was loaded.
    pub energy_mj: Option<u64>,
    /// Per cent of the highest speed; `None` on a passively cooled card.
    pub fan_percent: Option<u32>,
    pub clocks: Option<Clocks>,
    /// The mask of the active reasons, `nvmlClocksThrottleReason*`.
    pub throttle_reasons: Option<u64>,
    /// Nanoseconds spent under each performance policy, by `nvmlPerfPolicyType_t` (0 power, 1 thermal, ...).
    /// A policy that is not listed is not supported.
    pub violation_ns: BTreeMap<u32, u64>,
    pub ecc: Option<Ecc>,
    pub remapped_rows: Option<RemappedRows>,
    /// Cards before Ampere retire pages, later ones remap rows.
    pub retired_pages: Option<RetiredPages>,
    pub pcie: Pcie,
    /// In the order of their link number.
    pub nvlinks: Vec<NvLink>,
    pub processes: Vec<Process>,
    /// For `nvmlDeviceGetProcessUtilization`; not supported in MIG mode.
    pub utilization_samples: Vec<UtilizationSample>,
    /// `None` while MIG mode is off.
    pub mig: Option<Vec<MigDevice>>,
    /// For `nvmlDeviceGetFieldValues`, by field id. A field that is not listed is not supported.
    pub fields: BTreeMap<u32, Field>,
    /// Other symbols that return one number, such as `nvmlDeviceGetPerformanceState`; the README lists them with their
    /// defaults. `None` is *not supported*.
    pub numbers: BTreeMap<String, Option<u32>>,
}

impl Default for Gpu {
    fn default() -> Self {
        Self {
            uuid: "GPU-00000000-0000-4000-8000-000000000000".into(),
            name: "NVIDIA H100 80GB HBM3".into(),
            serial: Some("1650000000000".into()),
            vbios: Some("96.00.99.00.01".into()),
            bus_id: "00000000:10:00.0".into(),
            minor: 0,
            compute_capability: [9, 0],
            cores: Some(16896),
            lost: false,
            errors: BTreeMap::new(),
            memory: Memory::default(),
            bar1: Some(Bar1::default()),
            utilization: Some(Utilization::default()),
            temperature_c: Some(34),
            power_mw: Some(71_000),
            power_limit_mw: Some(700_000),
            energy_mj: Some(0),
            fan_percent: None,
            clocks: Some(Clocks::default()),
            throttle_reasons: Some(1),
            violation_ns: BTreeMap::from([(0, 0), (1, 0)]),
            ecc: Some(Ecc::default()),
            remapped_rows: Some(RemappedRows::default()),
            retired_pages: None,
            pcie: Pcie::default(),
            nvlinks: Vec::new(),
            processes: Vec::new(),
            utilization_samples: Vec::new(),
            mig: None,
            fields: BTreeMap::new(),
            numbers: BTreeMap::new(),
        }
    }
}

impl Gpu {
    /// Returns the default GPU with the UUID, serial, bus id and minor number for `index`.
    pub fn numbered(index: u32) -> Self {
        Self {
            uuid: format!("GPU-00000000-0000-4000-8000-{index:012}"),
            serial: Some(format!("165{index:010}")),
            bus_id: format!("00000000:{:02X}:00.0", 0x10 + index),
            minor: index,
            ..Self::default()
        }
    }

    /// # Errors
    /// The fault of this GPU, as a text.
    pub(crate) fn check(&self) -> Result<(), String> {
        if let Some(process) = self.processes.iter().find(|process| !process.kind.chars().all(is_kind)) {
            return Err(format!("process {} has kind {:?}; use C, G and M", process.pid, process.kind));
        }
        let numbers = crate::abi::number_names();
        if let Some(name) = self.numbers.keys().find(|name| !numbers.contains(&name.as_str())) {
            return Err(format!("{name} is not among the symbols that return one number"));
        }
        if crate::abi::bus_address(&self.bus_id).is_none() {
            return Err(format!("{:?} is no PCI bus id", self.bus_id));
        }
        Ok(())
    }
}

fn is_kind(letter: char) -> bool {
    matches!(letter, 'C' | 'G' | 'M')
}

/// Memory of a GPU or of a MIG device in bytes, as in memory info v2. In v1, `reserved` is part of used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Memory {
    pub total: u64,
    /// Reserved by the driver and the firmware.
    pub reserved: u64,
    pub used: u64,
    /// `None`: total without reserved and used, not below zero.
    pub free: Option<u64>,
    /// If false, both versions return *not supported*, as on GPUs that share the host's memory.
    pub supported: bool,
}

impl Default for Memory {
    fn default() -> Self {
        Self { total: 80 * GIB, reserved: 600 * MIB, used: 0, free: None, supported: true }
    }
}

impl Memory {
    pub(crate) fn free_bytes(&self) -> u64 {
        self.free.unwrap_or_else(|| self.total.saturating_sub(self.reserved).saturating_sub(self.used))
    }
}

/// The window through which the host maps GPU memory, in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Bar1 {
    pub total: u64,
    pub used: u64,
}

impl Default for Bar1 {
    fn default() -> Self {
        Self { total: 128 * GIB, used: 2 * MIB }
    }
}

/// Utilization in per cent. `gpu` and `memory` are one symbol, each engine has its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Utilization {
    pub gpu: u32,
    /// The share of time in which memory was read or written, not the share of memory in use.
    pub memory: u32,
    pub encoder: Option<u32>,
    pub decoder: Option<u32>,
}

impl Default for Utilization {
    fn default() -> Self {
        Self { gpu: 0, memory: 0, encoder: Some(0), decoder: Some(0) }
    }
}

/// Current and maximum clocks in MHz.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Clocks {
    pub graphics_mhz: u32,
    pub sm_mhz: u32,
    pub memory_mhz: u32,
    pub video_mhz: u32,
    pub max_graphics_mhz: u32,
    pub max_sm_mhz: u32,
    pub max_memory_mhz: u32,
    pub max_video_mhz: u32,
}

impl Default for Clocks {
    fn default() -> Self {
        Self {
            graphics_mhz: 345,
            sm_mhz: 345,
            memory_mhz: 2619,
            video_mhz: 765,
            max_graphics_mhz: 1980,
            max_sm_mhz: 1980,
            max_memory_mhz: 2619,
            max_video_mhz: 1545,
        }
    }
}

/// ECC errors of the device: since the card was made, and (volatile) since the driver was loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Ecc {
    pub corrected: u64,
    pub uncorrected: u64,
    pub volatile_corrected: u64,
    pub volatile_uncorrected: u64,
}

/// Rows of memory replaced by spare ones.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RemappedRows {
    pub correctable: u32,
    pub uncorrectable: u32,
    pub pending: bool,
    pub failure: bool,
}

/// Addresses of retired pages, by cause.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RetiredPages {
    pub single_bit: Vec<u64>,
    pub double_bit: Vec<u64>,
    pub pending: bool,
}

/// The PCIe link.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Pcie {
    pub replays: Option<u32>,
    /// KB/s from the GPU.
    pub tx_kb: Option<u32>,
    /// KB/s to the GPU.
    pub rx_kb: Option<u32>,
}

impl Default for Pcie {
    fn default() -> Self {
        Self { replays: Some(0), tx_kb: Some(0), rx_kb: Some(0) }
    }
}

/// One NVLink.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NvLink {
    pub active: bool,
    /// By `nvmlNvLinkErrorCounter_t`: replay, recovery, CRC of flits, CRC of data, ECC of data.
    pub errors: [u64; 5],
}

impl Default for NvLink {
    fn default() -> Self {
        Self { active: true, errors: [0; 5] }
    }
}

/// A process with a context on the GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Process {
    pub pid: u32,
    /// Bytes; `None` (or missing) is *not available*, as under WDDM and some vGPUs.
    #[serde(default)]
    pub used: Option<u64>,
    /// The lists that contain it: C compute, G graphics, M compute through MPS, or several of them.
    #[serde(default = "Process::compute_kind")]
    pub kind: String,
    /// GPU instance under MIG.
    #[serde(default)]
    pub gi: Option<u32>,
    /// Compute instance under MIG.
    #[serde(default)]
    pub ci: Option<u32>,
}

impl Process {
    /// Returns a compute process on a whole GPU.
    pub fn compute(pid: u32, used: Option<u64>) -> Self {
        Self { pid, used, kind: Self::compute_kind(), gi: None, ci: None }
    }

    fn compute_kind() -> String {
        "C".into()
    }
}

/// Per cent of the GPU that one process used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct UtilizationSample {
    pub pid: u32,
    /// Microseconds since 1970; `None` is the time of the call.
    pub time_us: Option<u64>,
    pub sm: u32,
    pub memory: u32,
    pub encoder: u32,
    pub decoder: u32,
}

/// A compute instance of a GPU in MIG mode, with its own handle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MigDevice {
    /// `MIG-` and a UUID.
    pub uuid: String,
    /// `None`: the name of the GPU.
    pub name: Option<String>,
    /// GPU instance.
    pub gi: u32,
    /// Compute instance.
    pub ci: u32,
    /// Of seven.
    pub slices: u32,
    pub memory: Memory,
}

impl Default for MigDevice {
    fn default() -> Self {
        Self {
            uuid: "MIG-00000000-0000-4000-8000-000000000000".into(),
            name: None,
            gi: 1,
            ci: 0,
            slices: 1,
            memory: Memory { total: 10 * GIB, reserved: 16 * MIB, ..Memory::default() },
        }
    }
}

/// The value of one field id.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Field {
    /// A number: u64, i64 if negative, double if it has a fraction.
    Plain(serde_json::Number),
    /// A number in the type that the header gives the field.
    Typed(TypedField),
    /// No value but this code.
    Error(FieldError),
}

/// See [`Field::Typed`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TypedField {
    pub value: serde_json::Number,
    #[serde(rename = "type")]
    pub kind: FieldKind,
}

/// See [`Field::Error`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FieldError {
    pub error: u32,
}

/// `nvmlValueType_t`, the ones that fields use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FieldKind {
    F64,
    U32,
    U64,
    I64,
    I32,
}

impl From<u64> for Field {
    fn from(value: u64) -> Self {
        Self::Plain(value.into())
    }
}

impl Field {
    /// Returns a field that fails with this code.
    pub fn error(error: u32) -> Self {
        Self::Error(FieldError { error })
    }

    /// Returns an integer in the given type.
    pub fn typed(kind: FieldKind, value: u64) -> Self {
        Self::Typed(TypedField { value: value.into(), kind })
    }
}
