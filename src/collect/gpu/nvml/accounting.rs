//! Accounting mode: the driver keeps the exact maximum of each process, also past its end.
//!
//! It is off unless somebody with power over the driver has switched it on (`nvidia-smi -am 1`).

use std::collections::HashMap;
use std::time::Duration;

use nvml_wrapper::Device as NvmlDevice;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::AccountingStats;

use super::library::field;
use super::memory::MOST_MEMORY;
use crate::clock::Moment;
use crate::collect::gpu::reading::{GpuProcess, Owner};

/// Whether it is on is asked so often.
const ASK_AGAIN: Duration = Duration::from_secs(60);

/// How long after a process was last seen its maximum is waited for: the driver may not have noticed its end.
const WAIT: Duration = Duration::from_secs(60);
/// The clocks of the driver and of /proc may differ by so much, whose boot time is in whole seconds.
const SLACK_US: u64 = 2_000_000;
/// A start before 2001 is not told, or not by the Unix clock.
const LEAST_UNIX_US: u64 = 1_000_000_000_000_000;

/// What is known of accounting on one GPU.
#[derive(Debug, Default)]
pub struct Accounting {
    is_on: bool,
    is_supported: bool,
    not_before: Option<Moment>,
    /// The named processes of the reading before, and those whose end is waited for: when each was last seen, and its
    /// start in microseconds of the Unix clock.
    before: Vec<(u32, Owner, Moment, Option<u64>)>,
    /// When the driver says that each process of the newest reading began.
    starts: HashMap<u32, u64>,
}

impl Accounting {
    /// Fills in the driver's maximum of each process. Returns that of each process that has ended since the reading
    /// before: it may have grown after we saw it last.
    ///
    /// The driver keeps one record for a pid, and it may be that of an earlier process: so it has to be the record of a
    /// process that runs, or that has ended.
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
            let mode = field(device.is_accounting_enabled(), faults)?;
            (self.is_on, self.is_supported) = (mode == Some(true), mode.is_some());
            self.not_before = Some(now.plus(ASK_AGAIN));
        }
        self.starts.clear();
        if !self.is_on {
            self.before.clear();
            return Ok(vec![]);
        }
        let most = most.unwrap_or(MOST_MEMORY);
        let mut record = |pid: u32| match device.accounting_stats_for(pid) {
            Err(NvmlError::NotFound) => Ok::<_, NvmlError>(None), // too young, or forgotten: the driver's ring is bounded
            other => field(other, faults),
        };
        let maximum = |record: &AccountingStats| record.max_memory_usage.filter(|max| *max <= most);
        for process in processes.iter_mut() {
            let Some(record) = record(process.pid)?.filter(|record| record.is_running) else { continue };
            process.driver_peak = maximum(&record).map(|max| max.max(process.used.unwrap_or(max)));
            self.starts.insert(process.pid, record.start_time);
        }
        let is_here = |pid: u32| processes.iter().any(|process| process.pid == pid);
        let (mut ended, mut waited_for) = (Vec::new(), Vec::new());
        for (pid, owner, seen, start) in self.before.drain(..).filter(|(pid, ..)| !is_here(*pid)) {
            match record(pid)? {
                Some(record) if record.is_running && now.since(seen) < WAIT => {
                    waited_for.push((pid, owner, seen, start));
                }
                Some(record) if !record.is_running && fits(record.start_time, start) => {
                    ended.extend(maximum(&record).map(|max| (pid, owner, max)));
                }
                _ => {}
            }
        }
        self.before = waited_for;
        Ok(ended)
    }

    /// Who the processes of this reading were found to be. A maximum of a process that began before its owner did is an
    /// earlier one's, and is taken away. `boot_time` is Unix time in seconds.
    pub fn remember<'a>(
        &mut self,
        now: Moment,
        boot_time: Option<u64>,
        processes: impl Iterator<Item = &'a mut GpuProcess>,
    ) {
        if !self.is_on {
            return;
        }
        for process in processes {
            let Some(owner) = process.owner.clone() else { continue };
            let start =
                boot_time.map(|boot| boot * 1_000_000 + owner.start_ticks * 1_000_000 / ticks_per_second());
            if self.starts.get(&process.pid).is_some_and(|told| !fits(*told, start)) {
                process.driver_peak = None;
            }
            self.before.push((process.pid, owner, now, start));
        }
    }

    /// Whether it is on, as of the last time it was asked.
    pub fn is_on(&self) -> bool {
        self.is_on
    }

    /// True if it is off and could be switched on, as of the last time it was asked.
    pub fn could_be_on(&self) -> bool {
        self.is_supported && !self.is_on
    }
}

fn ticks_per_second() -> u64 {
    rustix::param::clock_ticks_per_second().max(1)
}

/// Whether the driver's record can be that of a process with this start. A process comes to the GPU after its start.
fn fits(told: u64, start: Option<u64>) -> bool {
    told < LEAST_UNIX_US || start.is_none_or(|start| told + SLACK_US >= start)
}
