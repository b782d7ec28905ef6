//! Accounting mode: the driver keeps the exact maximum of each process, also past its end.
//!
//! It is off unless somebody with power over the driver has switched it on (`nvidia-smi -am 1`).

use std::time::Duration;

use nvml_wrapper::Device as NvmlDevice;
use nvml_wrapper::error::NvmlError;

use super::library::field;
use super::memory::MOST_MEMORY;
use crate::clock::Moment;
use crate::collect::gpu::reading::{GpuProcess, Owner};

/// Whether it is on is asked so often.
const ASK_AGAIN: Duration = Duration::from_secs(60);

/// What is known of accounting on one GPU.
#[derive(Debug, Default)]
pub struct Accounting {
    is_on: bool,
    not_before: Option<Moment>,
    /// The named processes of the reading before.
    before: Vec<(u32, Owner)>,
}

impl Accounting {
    /// Fills in the driver's maximum of each process. Returns that of each process that has ended since the reading
    /// before: it may have grown after we saw it last.
    ///
    /// # Errors
    /// As [`field`].
    pub fn read(
        &mut self,
        device: &NvmlDevice<'_>,
        now: Moment,
        processes: &mut [GpuProcess],
        most: Option<u64>,
        faults: &mut Vec<&'static str>,
    ) -> Result<Vec<(u32, Owner, u64)>, NvmlError> {
        if self.not_before.is_none_or(|at| now >= at) {
            self.is_on = field(device.is_accounting_enabled(), faults)?.unwrap_or(false);
            self.not_before = Some(now.plus(ASK_AGAIN));
        }
        if !self.is_on {
            self.before.clear();
            return Ok(vec![]);
        }
        let most = most.unwrap_or(MOST_MEMORY);
        let mut maximum = |pid: u32| match device.accounting_stats_for(pid) {
            Err(NvmlError::NotFound) => Ok::<_, NvmlError>(None), // too young, or forgotten: the driver's ring is bounded
            other => {
                Ok(field(other, faults)?.and_then(|stats| stats.max_memory_usage.filter(|max| *max <= most)))
            }
        };
        for process in processes.iter_mut() {
            process.driver_peak = maximum(process.pid)?.map(|max| max.max(process.used.unwrap_or(max)));
        }
        let is_here = |pid: u32| processes.iter().any(|process| process.pid == pid);
        let mut ended = Vec::new();
        for (pid, owner) in self.before.drain(..).filter(|(pid, _)| !is_here(*pid)) {
            if let Some(max) = maximum(pid)? {
                ended.push((pid, owner, max));
            }
        }
        Ok(ended)
    }

    /// Who the processes of this reading were found to be.
    pub fn remember<'a>(&mut self, processes: impl Iterator<Item = &'a GpuProcess>) {
        if self.is_on {
            self.before.extend(processes.filter_map(|process| Some((process.pid, process.owner.clone()?))));
        }
    }

    /// Whether it is on, as of the last time it was asked.
    pub fn is_on(&self) -> bool {
        self.is_on
    }
}
