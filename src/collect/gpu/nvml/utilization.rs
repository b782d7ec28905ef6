//! The share of time that each process kept a GPU busy.

use std::collections::HashMap;
use std::time::Duration;

use nvml_wrapper::Device as NvmlDevice;
use nvml_wrapper::error::NvmlError;

use super::ffi::{self, Buffer};
use super::library::field;
use crate::clock::Timestamp;
use crate::collect::gpu::types::GpuProcess;

/// When to try again on a device that does not support it (MIG).
const RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// A timestamp further in the future than this is garbage: if it were kept, no later sample would ever be read.
const CLOCK_SLACK_US: u64 = 60_000_000;
/// Each reading takes samples that are younger than this, also those that the previous one took: the driver samples less
/// often than it can be read, so that there may be none since the last one though the process was active. NVML's header
/// allows one a second; the rest is margin.
const WINDOW_US: u64 = 1_500_000;
/// Sums over engines may be above 100; what is far above is garbage.
const MAX_PERCENT: u32 = 1_000;

/// The position in the driver's samples.
#[derive(Debug, Default)]
pub struct ProcessUtilization {
    last_seen_us: u64,
    retry_at: Option<Timestamp>,
}

impl ProcessUtilization {
    /// Fills in the utilization of each process since the previous reading, at least in the last 1.5 seconds: the mean of its
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
        if processes.is_empty() || self.retry_at.is_some_and(|at| now < at) {
            return Ok(());
        }
        let now_us = (now.unix_seconds() * 1e6) as u64;
        let window_start_us = now_us.saturating_sub(WINDOW_US);
        if self.last_seen_us == 0 {
            self.last_seen_us = window_start_us; // otherwise the driver would return old samples
        }
        let result = match ffi::utilization(device, self.last_seen_us.min(window_start_us), buffer) {
            Err(NvmlError::NotFound) => Ok(vec![]),
            other => other,
        };
        let Some(samples) = field(result, read_errors)? else {
            self.retry_at = Some(now.plus(RETRY_INTERVAL));
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
            process.busy = (count > 0).then(|| sum as f64 / f64::from(count) / 100.0);
        }
        if is_garbage {
            read_errors.push("malformed");
        }
        Ok(())
    }
}
