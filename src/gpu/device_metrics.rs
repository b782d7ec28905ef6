//! Metrics of a GPU: utilization, power, temperature, errors. Each one is absent where the device does not report it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::types::GpuIdentity;
use crate::catalog::*;
use crate::series::{Label, Series};

/// What an Xid says of its GPU, from which the severity of its alert follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XidClass {
    /// An error of the device, its memory, firmware or links.
    Device,
    /// An error of its memory that the device has contained or repaired: it works on.
    Handled,
    /// Usually an error of an application.
    Application,
    /// A cleanup after another error.
    Cleanup,
}

/// Xids that operators search for, with their meanings in NVIDIA's documentation; their counters start at 0. The runbook
/// of `MemledgerGpuXid` has this table, and its rules have the numbers.
pub const KNOWN_XIDS: [(u64, XidClass, &str); 24] = [
    (13, XidClass::Application, "exception in a kernel"),
    (31, XidClass::Application, "access to an invalid address"),
    (43, XidClass::Application, "an application's work was stopped"),
    (45, XidClass::Cleanup, "the driver removed channels after another error"),
    (48, XidClass::Device, "uncorrectable memory error"),
    (63, XidClass::Handled, "a memory row was remapped, or a page retired"),
    (64, XidClass::Device, "remapping a row, or retiring a page, failed"),
    (74, XidClass::Device, "NVLink error"),
    (79, XidClass::Device, "the GPU has fallen off the bus"),
    (94, XidClass::Handled, "uncorrectable memory error, contained to one application"),
    (95, XidClass::Device, "uncorrectable memory error that affects all applications"),
    (109, XidClass::Application, "switch to another context timed out"),
    (119, XidClass::Device, "the GPU's firmware (GSP) does not respond"),
    (120, XidClass::Device, "error in the GPU's firmware (GSP)"),
    (137, XidClass::Application, "access to an invalid address over NVLink"),
    (140, XidClass::Device, "ECC error without recovery"),
    (144, XidClass::Device, "NVLink 5: SAW error"),
    (145, XidClass::Device, "NVLink 5: RLW error"),
    (146, XidClass::Device, "NVLink 5: TLW error"),
    (147, XidClass::Device, "NVLink 5: TREX error"),
    (148, XidClass::Device, "NVLink 5: NVLPW_CTRL error"),
    (149, XidClass::Device, "NVLink 5: NETIR error"),
    (150, XidClass::Device, "NVLink 5: MSE error"),
    (154, XidClass::Device, "the GPU needs a recovery action, such as a reset"),
];

/// Reasons for lowered clocks: NVML's bit, and the label.
pub const THROTTLE_REASONS: [(u64, &str); 6] = [
    (0x04, "sw_power_cap"),
    (0x08, "hw_slowdown"),
    (0x10, "sync_boost"),
    (0x20, "sw_thermal"),
    (0x40, "hw_thermal"),
    (0x80, "hw_power_brake"),
];

/// Domains with a clock, in the order of [`DeviceHealth::clocks_hertz`].
pub const CLOCKS: [&str; 2] = ["sm", "memory"];

/// Directions of NVLinks, in the order of [`DeviceHealth::nvlink_bytes`].
pub const DIRECTIONS: [&str; 2] = ["transmitted", "received"];

/// Kinds of errors on NVLinks, in the order of [`DeviceHealth::nvlink_errors`].
pub const NVLINK_ERRORS: [&str; 5] = ["crc_flit", "crc_data", "replay", "recovery", "ecc_data"];

/// Occurrences of one Xid since memledger's start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct XidCount {
    /// The number of occurrences.
    pub count: u64,
    /// Unix time of the last occurrence; `None` before the first.
    pub last: Option<f64>,
}

/// Counters of one GPU that memledger keeps, from its start and across every reopening of the driver.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceCounters {
    /// The identity that the GPU reported last.
    pub identity: Option<Arc<GpuIdentity>>,
    /// Seconds by [`THROTTLE_REASONS`].
    pub throttle_seconds: [f64; THROTTLE_REASONS.len()],
    /// Xids by number.
    pub xids: BTreeMap<u64, XidCount>,
}

impl DeviceCounters {
    /// Sets the known Xids to 0 if they have no counter yet.
    pub fn init_xids_at_zero(&mut self) {
        for (xid, _, _) in KNOWN_XIDS {
            self.xids.entry(xid).or_default();
        }
    }

    /// Counts an Xid that occurred at this Unix time.
    pub fn count_xid(&mut self, xid: u64, at: f64) {
        let counter = self.xids.entry(xid).or_default();
        counter.count += 1;
        counter.last = Some(at);
    }

    /// Adds the time since the previous reading to each throttle reason that is set in `mask`.
    pub fn throttle(&mut self, mask: u64, since: Duration) {
        for ((bit, _), seconds) in THROTTLE_REASONS.iter().zip(&mut self.throttle_seconds) {
            if mask & bit != 0 {
                *seconds += since.as_secs_f64();
            }
        }
    }
}

/// [`DeviceCounters`] by the UUID of the GPU.
pub type CountersByGpu = HashMap<Arc<str>, DeviceCounters>;

/// The metrics of one device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceHealth {
    /// The share of the last sample period in which a kernel ran.
    pub utilization: Option<f64>,
    /// The share of the last sample period in which device memory was read or written.
    pub memory_utilization: Option<f64>,
    /// Power of the board in watts.
    pub power_watts: Option<f64>,
    /// The power limit that the driver enforces, in watts.
    pub power_limit_watts: Option<f64>,
    /// Clocks by [`CLOCKS`], in hertz.
    pub clocks_hertz: [Option<f64>; CLOCKS.len()],
    /// Energy in joules since the driver was loaded.
    pub energy_joules: Option<f64>,
    /// Temperature of the die.
    pub temperature_celsius: Option<f64>,
    /// Temperature of the device memory.
    pub memory_temperature_celsius: Option<f64>,
    /// The throttle reasons that are active now, as bits of [`THROTTLE_REASONS`].
    pub throttle_mask: Option<u64>,
    /// Observed seconds of each of [`THROTTLE_REASONS`] since memledger's start. Never in a message.
    #[serde(skip)]
    pub throttle_seconds: Option<[f64; THROTTLE_REASONS.len()]>,
    /// Corrected ECC errors over the life of the device.
    pub ecc_corrected: Option<u64>,
    /// Uncorrected ECC errors over the life of the device.
    pub ecc_uncorrected: Option<u64>,
    /// Corrected and uncorrected ECC errors since the driver was loaded.
    pub ecc_volatile: [Option<u64>; 2],
    /// Rows remapped after correctable and after uncorrectable errors; 1 if one is pending; 1 if a remapping failed.
    pub remapped_rows: Option<[u32; 4]>,
    /// Pages retired after single-bit and after double-bit errors; 1 if one is pending.
    pub retired_pages: [Option<u64>; 3],
    /// Replays on the PCIe link.
    pub pcie_replays: Option<u64>,
    /// Bytes over all NVLinks, by [`DIRECTIONS`].
    pub nvlink_bytes: [Option<u64>; DIRECTIONS.len()],
    /// Errors of all NVLinks, by [`NVLINK_ERRORS`].
    pub nvlink_errors: [Option<u64>; NVLINK_ERRORS.len()],
    /// Xids by number; empty while the GPU is not registered for events. Never in a message.
    #[serde(skip)]
    pub xids: BTreeMap<u64, XidCount>,
}

impl DeviceHealth {
    /// Writes the series of the device with this number.
    pub fn write(&self, gpu: u32, series: &mut Series) {
        let gauges = [
            (GPU_UTILIZATION, self.utilization),
            (GPU_MEMORY_UTILIZATION, self.memory_utilization),
            (GPU_POWER, self.power_watts),
            (GPU_POWER_LIMIT, self.power_limit_watts),
            (GPU_TEMPERATURE, self.temperature_celsius),
            (GPU_MEMORY_TEMPERATURE, self.memory_temperature_celsius),
            (GPU_ENERGY, self.energy_joules),
            (GPU_PCIE_REPLAYS, self.pcie_replays.map(|count| count as f64)),
        ];
        for (family, value) in gauges {
            if let Some(value) = value {
                series.gpu(family, gpu, [], value);
            }
        }
        for (clock, hertz) in CLOCKS.iter().zip(self.clocks_hertz) {
            if let Some(hertz) = hertz {
                series.gpu(GPU_CLOCK, gpu, [Label::Fixed(clock)], hertz);
            }
        }
        for ((_, reason), seconds) in THROTTLE_REASONS.iter().zip(self.throttle_seconds.iter().flatten()) {
            series.gpu(GPU_THROTTLE, gpu, [(*reason).into()], *seconds);
        }
        let mut by_kind = |family, kinds: &[&'static str], values: &mut dyn Iterator<Item = Option<u64>>| {
            for (kind, value) in kinds.iter().zip(values) {
                if let Some(value) = value {
                    series.gpu(family, gpu, [Label::Fixed(kind)], value as f64);
                }
            }
        };
        let ecc = [self.ecc_corrected, self.ecc_uncorrected];
        by_kind(GPU_ECC_ERRORS, &["corrected", "uncorrected"], &mut ecc.into_iter());
        by_kind(GPU_VOLATILE_ECC_ERRORS, &["corrected", "uncorrected"], &mut self.ecc_volatile.into_iter());
        by_kind(GPU_NVLINK_BYTES, &DIRECTIONS, &mut self.nvlink_bytes.into_iter());
        let [correctable, uncorrectable, row_pending, failure] =
            self.remapped_rows.map_or([None; 4], |rows| rows.map(|count| Some(u64::from(count))));
        let [single_bit, double_bit, page_pending] = self.retired_pages;
        let rows = [correctable, uncorrectable];
        by_kind(GPU_REMAPPED_ROWS, &["correctable", "uncorrectable"], &mut rows.into_iter());
        let pages = [single_bit, double_bit];
        by_kind(GPU_RETIRED_PAGES, &["single_bit", "double_bit"], &mut pages.into_iter());
        by_kind(GPU_NVLINK_ERRORS, &NVLINK_ERRORS, &mut self.nvlink_errors.into_iter());
        write_states(gpu, [row_pending, failure, page_pending], series);
        for (xid, counter) in &self.xids {
            series.gpu(GPU_XID_ERRORS, gpu, [Label::Number(*xid)], counter.count as f64);
            if let Some(last) = counter.last {
                series.gpu(GPU_LAST_XID, gpu, [Label::Number(*xid)], last);
            }
        }
    }
}

fn write_states(gpu: u32, [row_pending, failure, page_pending]: [Option<u64>; 3], series: &mut Series) {
    let states = [
        (GPU_REMAPPED_ROWS_PENDING, row_pending),
        (GPU_REMAPPED_ROWS_FAILURE, failure),
        (GPU_RETIRED_PAGES_PENDING, page_pending),
    ];
    for (family, state) in states {
        if let Some(state) = state {
            series.gpu(family, gpu, [], f64::from(u8::from(state != 0)));
        }
    }
}
