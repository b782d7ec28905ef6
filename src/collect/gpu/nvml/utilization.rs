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
const CLOCK_SLACK_US: u64 = 60_000_000;
/// The first reading asks for what is younger than this.
const FIRST_LOOK_US: u64 = 1_000_000;

/// The samples that were seen already.
#[derive(Debug, Default)]
pub struct Load {
    last_seen_us: u64,
    not_before: Option<Moment>,
}

impl Load {
    /// Fills in how busy each process was since the reading before: the mean of its own samples. The driver lists only
    /// those that did something, so the others are 0, also when it has no samples at all. One whose samples are all
    /// garbage has none. Where the driver does not tell, all stay as they are.
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
        let now_us = (now.unix_seconds() * 1e6) as u64;
        if self.last_seen_us == 0 {
            self.last_seen_us = now_us.saturating_sub(FIRST_LOOK_US); // else it would tell what was long ago
        }
        let answer = match raw::utilization(device, self.last_seen_us, buffer) {
            Err(NvmlError::NotFound) => Ok(vec![]),
            other => other,
        };
        let Some(samples) = field(answer, faults)? else {
            self.not_before = Some(now.plus(ASK_AGAIN));
            return Ok(());
        };
        let latest_us = now_us + CLOCK_SLACK_US;
        let mut by_pid: HashMap<u32, (u64, u32)> = HashMap::new();
        let mut is_garbage = false;
        for sample in &samples {
            if sample.sm_percent > 100 {
                is_garbage = true;
                by_pid.entry(sample.pid).or_default(); // it did something, and nobody knows how much
                continue;
            }
            if sample.time_us <= latest_us {
                self.last_seen_us = self.last_seen_us.max(sample.time_us);
            }
            let entry = by_pid.entry(sample.pid).or_default();
            *entry = (entry.0 + u64::from(sample.sm_percent), entry.1 + 1);
        }
        for process in processes {
            let (sum, count) = by_pid.get(&process.pid).copied().unwrap_or((0, 1));
            process.busy = (count > 0).then(|| sum as f64 / f64::from(count) / 100.0);
        }
        if is_garbage {
            faults.push("malformed");
        }
        Ok(())
    }
}
