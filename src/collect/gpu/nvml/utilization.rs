//! How busy each process kept a GPU.

use std::collections::HashMap;
use std::time::Duration;

use nvml_wrapper::Device as NvmlDevice;
use nvml_wrapper::error::NvmlError;

use super::library::field;
use super::raw::{self, Buffer};
use crate::clock::Moment;
use crate::collect::gpu::reading::GpuProcess;

/// A device that does not tell (MIG) is asked again after this.
const ASK_AGAIN: Duration = Duration::from_secs(60);

/// A stamp that is later than this from now is garbage: no later sample would ever be seen.
const CLOCK_SLACK_SECONDS: f64 = 60.0;

/// The samples that were seen already.
#[derive(Debug, Default)]
pub struct Load {
    last_seen_us: u64,
    not_before: Option<Moment>,
}

impl Load {
    /// Fills in how busy each process was since the reading before. The driver lists only those that did something, so
    /// the others are 0, also when it has no samples at all. Where it does not tell, all stay as they are.
    ///
    /// # Errors
    /// As [`field`].
    pub fn read(
        &mut self,
        device: &NvmlDevice<'_>,
        now: Moment,
        processes: &mut [GpuProcess],
        buffer: &mut Buffer,
        faults: &mut Vec<&'static str>,
    ) -> Result<(), NvmlError> {
        if processes.is_empty() || self.not_before.is_some_and(|at| now < at) {
            return Ok(());
        }
        let answer = match raw::utilization(device, self.last_seen_us, buffer) {
            Err(NvmlError::NotFound) => Ok(vec![]),
            other => other,
        };
        let Some(samples) = field(answer, faults)? else {
            self.not_before = Some(now.plus(ASK_AGAIN));
            return Ok(());
        };
        let latest_us = ((now.unix_seconds() + CLOCK_SLACK_SECONDS) * 1e6) as u64;
        let mut by_pid: HashMap<u32, (u64, u32)> = HashMap::new();
        for sample in samples.iter().filter(|sample| sample.sm_percent <= 100) {
            if sample.time_us <= latest_us {
                self.last_seen_us = self.last_seen_us.max(sample.time_us);
            }
            let entry = by_pid.entry(sample.pid).or_default();
            *entry = (entry.0 + u64::from(sample.sm_percent), entry.1 + 1);
        }
        for process in processes {
            let (sum, count) = by_pid.get(&process.pid).copied().unwrap_or((0, 1));
            process.busy = Some(sum as f64 / f64::from(count) / 100.0);
        }
        Ok(())
    }
}
