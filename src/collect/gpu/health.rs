//! How a GPU is: load, power, heat, errors. Each part is absent for itself where the device does not tell it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use super::reading::Identity;
use crate::catalog::*;
use crate::series::{Label, Series};

/// Xids that a person looks for, and whose counters therefore begin at 0.
pub const KNOWN_XIDS: [u64; 12] = [13, 31, 43, 45, 48, 63, 64, 74, 79, 94, 95, 119];

/// Why clocks are lowered: NVML's bit, and the label.
pub const THROTTLE_REASONS: [(u64, &str); 6] = [
    (0x04, "sw_power_cap"),
    (0x08, "hw_slowdown"),
    (0x10, "sync_boost"),
    (0x20, "sw_thermal"),
    (0x40, "hw_thermal"),
    (0x80, "hw_power_brake"),
];

/// Kinds of errors on NVLinks, in the order of [`Health::nvlink_errors`].
pub const NVLINK_ERRORS: [&str; 5] = ["crc_flit", "crc_data", "replay", "recovery", "ecc_data"];

/// Kinds of remapped rows, in the order of [`Health::remapped_rows`].
pub const REMAPPED_ROWS: [&str; 4] = ["correctable", "uncorrectable", "pending", "failure"];

/// Kinds of retired pages, in the order of [`Health::retired_pages`].
pub const RETIRED_PAGES: [&str; 3] = ["single_bit", "double_bit", "pending"];

/// What one Xid has done since memledger's start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Xid {
    /// How often it came.
    pub count: u64,
    /// Unix time when it came last; `None` before the first.
    pub last: Option<f64>,
}

/// What memledger counts of one GPU itself, since its start and over every reopening of the driver.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counted {
    /// Who it is, as of the last time that it answered.
    pub identity: Option<Arc<Identity>>,
    /// By [`THROTTLE_REASONS`].
    pub throttle_seconds: [f64; THROTTLE_REASONS.len()],
    /// By number.
    pub xids: BTreeMap<u64, Xid>,
}

impl Counted {
    /// The known Xids are 0 from now on, if they were not counted yet.
    pub fn bear_xids(&mut self) {
        for xid in KNOWN_XIDS {
            self.xids.entry(xid).or_default();
        }
    }

    /// An Xid came at this Unix time.
    pub fn count_xid(&mut self, xid: u64, at: f64) {
        let seen = self.xids.entry(xid).or_default();
        seen.count += 1;
        seen.last = Some(at);
    }

    /// A reason that holds now held since the reading before.
    pub fn throttle(&mut self, mask: u64, since: Duration) {
        for ((bit, _), seconds) in THROTTLE_REASONS.iter().zip(&mut self.throttle_seconds) {
            if mask & bit != 0 {
                *seconds += since.as_secs_f64();
            }
        }
    }
}

/// [`Counted`] by the UUID of the GPU.
pub type Totals = HashMap<Arc<str>, Counted>;

/// How a device is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Health {
    /// Share of the last sample period in which a kernel ran.
    pub utilization: Option<f64>,
    /// Share of the last sample period in which device memory was read or written.
    pub memory_utilization: Option<f64>,
    /// Watts drawn by the board.
    pub power_watts: Option<f64>,
    /// Joules since the driver was loaded.
    pub energy_joules: Option<f64>,
    /// Degrees of the die.
    pub temperature_celsius: Option<f64>,
    /// Seconds under each of [`THROTTLE_REASONS`] since memledger's start, as far as they were seen.
    pub throttle_seconds: Option<[f64; THROTTLE_REASONS.len()]>,
    /// Corrected ECC errors over the device's life.
    pub ecc_corrected: Option<u64>,
    /// Uncorrected ECC errors over the device's life.
    pub ecc_uncorrected: Option<u64>,
    /// By [`REMAPPED_ROWS`].
    pub remapped_rows: Option<[u32; REMAPPED_ROWS.len()]>,
    /// By [`RETIRED_PAGES`].
    pub retired_pages: [Option<u64>; RETIRED_PAGES.len()],
    /// Replays on the PCIe link.
    pub pcie_replays: Option<u64>,
    /// Over all links, by [`NVLINK_ERRORS`].
    pub nvlink_errors: [Option<u64>; NVLINK_ERRORS.len()],
    /// Xids by number; empty while nobody would hear them.
    pub xids: BTreeMap<u64, Xid>,
}

impl Health {
    /// Writes what is told, for the device of this number.
    pub fn write(&self, gpu: u32, series: &mut Series) {
        let gauges = [
            (GPU_UTILIZATION, self.utilization),
            (GPU_MEMORY_UTILIZATION, self.memory_utilization),
            (GPU_POWER, self.power_watts),
            (GPU_TEMPERATURE, self.temperature_celsius),
            (GPU_ENERGY, self.energy_joules),
            (GPU_PCIE_REPLAYS, self.pcie_replays.map(|count| count as f64)),
        ];
        for (family, value) in gauges {
            if let Some(value) = value {
                series.gpu(family, gpu, [], value);
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
        let rows = self.remapped_rows.into_iter().flatten();
        by_kind(GPU_REMAPPED_ROWS, &REMAPPED_ROWS, &mut rows.map(|count| Some(u64::from(count))));
        by_kind(GPU_RETIRED_PAGES, &RETIRED_PAGES, &mut self.retired_pages.into_iter());
        by_kind(GPU_NVLINK_ERRORS, &NVLINK_ERRORS, &mut self.nvlink_errors.into_iter());
        for (xid, seen) in &self.xids {
            series.gpu(GPU_XID_ERRORS, gpu, [Label::Number(*xid)], seen.count as f64);
            if let Some(last) = seen.last {
                series.gpu(GPU_LAST_XID, gpu, [Label::Number(*xid)], last);
            }
        }
    }
}
