//! The share of time that each process kept a GPU busy.
//!
//! The query takes the driver 1.5 ms on an H200, and the driver keeps its samples. So it is made in every fifth reading, and in one that
//! lists a new process.

use std::collections::HashMap;

use nvml_wrapper::Device as NvmlDevice;
use nvml_wrapper::error::NvmlError;

use super::ffi::{self, Buffer};
use super::library::field;
use crate::clock::{Cadence, Timestamp};
use crate::gpu::types::GpuProcess;

/// Read in one of this many readings, and at least once in as many seconds.
const EVERY: u32 = 5;
/// A timestamp further in the future than this is garbage: if it were kept, no later sample would ever be read.
const CLOCK_SLACK_US: u64 = 60_000_000;
/// Each reading takes samples that are younger than this, also those that the previous one took: the driver samples less
/// often than it can be read, so that there may be none since the last one though the process was active. NVML's header
/// allows one a second; the rest is margin.
const WINDOW_US: u64 = 1_500_000;
/// Sums over engines may be above 100; what is far above is garbage.
const MAX_PERCENT: u32 = 1_000;

/// The newest utilization of the processes of a GPU, and the position in the driver's samples.
#[derive(Debug, Default)]
pub struct ProcessUtilization {
    cadence: Cadence<EVERY>,
    last_seen_us: u64,
    /// By pid; `None` where it is unknown.
    shares: HashMap<u32, Option<f64>>,
    /// False on a device that does not support it (MIG).
    is_supported: bool,
}

impl ProcessUtilization {
    /// Fills in the newest utilization of each process: that since the query before it, at least of 1.5 seconds: the mean of its
    /// samples, each at most 1. The driver lists only processes that were active, so the others are 0, also if there are no
    /// samples at all. A process whose samples are all garbage has none. Where the driver does not report samples, nothing changes.
    ///
    /// # Errors
    /// As [`field`].
    pub fn read(
        &mut self,
        device: &NvmlDevice<'_>,
        now: Timestamp,
        processes: &mut [GpuProcess],
        buffer: &mut Buffer,
        read_errors: &mut Vec<&'static str>,
    ) -> Result<(), NvmlError> {
        if processes.is_empty() {
            self.shares.clear();
            return Ok(());
        }
        let is_due = self.cadence.is_due(now);
        self.shares.retain(|pid, _| processes.iter().any(|process| process.pid == *pid)); // a pid may be reused
        let is_new = |process: &GpuProcess| !self.shares.contains_key(&process.pid);
        if is_due || self.is_supported && processes.iter().any(is_new) {
            self.query(device, now, processes, buffer, read_errors)?;
        }
        for process in processes {
            process.busy = self.shares.get(&process.pid).copied().flatten();
        }
        Ok(())
    }

    fn query(
        &mut self,
        device: &NvmlDevice<'_>,
        now: Timestamp,
        processes: &[GpuProcess],
        buffer: &mut Buffer,
        read_errors: &mut Vec<&'static str>,
    ) -> Result<(), NvmlError> {
        let now_us = (now.unix_seconds() * 1e6) as u64;
        let window_start_us = now_us.saturating_sub(WINDOW_US);
        if self.last_seen_us == 0 {
            self.last_seen_us = window_start_us; // otherwise the driver would return old samples
        }
        let result = match ffi::utilization(device, self.last_seen_us.min(window_start_us), buffer) {
            Err(NvmlError::NotFound) => Ok(vec![]),
            other => other,
        };
        self.is_supported = !matches!(result, Err(NvmlError::NotSupported));
        let Some(samples) = field(result, read_errors)? else {
            self.shares.clear();
            return Ok(());
        };
        let latest_us = now_us + CLOCK_SLACK_US;
        let mut by_pid: HashMap<u32, (u64, u32)> = HashMap::new();
        let mut is_garbage = false;
        for sample in &samples {
            if sample.sm_percent > MAX_PERCENT {
                is_garbage = true;
                by_pid.entry(sample.pid).or_default(); // active, but by an unknown share
                continue;
            }
            if sample.time_us <= latest_us {
                self.last_seen_us = self.last_seen_us.max(sample.time_us);
            }
            let entry = by_pid.entry(sample.pid).or_default();
            *entry = (entry.0 + u64::from(sample.sm_percent.min(100)), entry.1 + 1);
        }
        for process in processes {
            let (sum, count) = by_pid.get(&process.pid).copied().unwrap_or((0, 1));
            let share = (count > 0).then(|| sum as f64 / f64::from(count) / 100.0);
            self.shares.insert(process.pid, share);
        }
        if is_garbage {
            read_errors.push("malformed");
        }
        Ok(())
    }
}
