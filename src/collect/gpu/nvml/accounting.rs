//! Accounting mode: the driver records the exact peak memory of each process, also after it has ended.
//!
//! It is off unless an administrator has enabled it (`nvidia-smi -am 1`).

use std::time::Duration;

use nvml_wrapper::Device as NvmlDevice;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::AccountingStats;

use super::library::field;
use crate::clock::Timestamp;
use crate::collect::gpu::types::GpuProcess;
use crate::parse::MAX_GPU_MEMORY;

/// How often the accounting mode is read.
const MODE_INTERVAL: Duration = Duration::from_secs(60);

/// How long to wait for the record of a process that is no longer listed: the driver may notice its end late.
const RECORD_TIMEOUT: Duration = Duration::from_secs(60);

/// The accounting state of one GPU.
#[derive(Debug, Default)]
pub struct Accounting {
    is_on: bool,
    is_supported: bool,
    next_mode_read: Option<Timestamp>,
    /// The processes of the previous reading, and those whose record is awaited: when each was last listed.
    previous: Vec<(u32, Timestamp)>,
}

impl Accounting {
    /// Fills in the driver's peak of each process. Returns pid, start and peak of processes that have ended since the
    /// previous reading: they may have grown after their last sample.
    ///
    /// The driver keeps one record for each pid, which may be that of an earlier process. So only records of processes
    /// that are running, or that have just ended, are used; and memledger compares the start.
    ///
    /// # Errors
    /// As [`field`].
    pub fn read(
        &mut self,
        device: &NvmlDevice<'_>,
        now: Timestamp,
        processes: &mut [GpuProcess],
        max_bytes: Option<u64>,
        read_errors: &mut Vec<&'static str>,
    ) -> Result<Vec<(u32, u64, u64)>, NvmlError> {
        if self.next_mode_read.is_none_or(|at| now >= at) {
            let mode = field(device.is_accounting_enabled(), read_errors)?;
            (self.is_on, self.is_supported) = (mode == Some(true), mode.is_some());
            self.next_mode_read = Some(now.plus(MODE_INTERVAL));
        }
        if !self.is_on {
            self.previous.clear();
            return Ok(vec![]);
        }
        let max_bytes = max_bytes.unwrap_or(MAX_GPU_MEMORY);
        let mut record = |pid: u32| match device.accounting_stats_for(pid) {
            Err(NvmlError::NotFound) => Ok::<_, NvmlError>(None), // too young, or overwritten in the driver's ring buffer
            other => field(other, read_errors),
        };
        let peak = |record: &AccountingStats| record.max_memory_usage.filter(|max| *max <= max_bytes);
        for process in processes.iter_mut() {
            let Some(record) = record(process.pid)?.filter(|record| record.is_running) else { continue };
            process.driver_peak = peak(&record).map(|max| max.max(process.used.unwrap_or(max)));
            process.recorded_start_us = Some(record.start_time);
        }
        let is_listed = |pid: u32| processes.iter().any(|process| process.pid == pid);
        let (mut ended, mut awaited) = (Vec::new(), Vec::new());
        for (pid, last_listed) in self.previous.drain(..).filter(|(pid, _)| !is_listed(*pid)) {
            match record(pid)? {
                Some(record) if record.is_running && now.since(last_listed) < RECORD_TIMEOUT => {
                    awaited.push((pid, last_listed));
                }
                Some(record) if !record.is_running => {
                    ended.extend(peak(&record).map(|max| (pid, record.start_time, max)));
                }
                _ => {}
            }
        }
        self.previous = awaited;
        self.previous.extend(processes.iter().map(|process| (process.pid, now)));
        Ok(ended)
    }

    /// Returns whether accounting is on, as last read.
    pub fn is_on(&self) -> bool {
        self.is_on
    }

    /// Returns true if accounting is off and could be enabled, as last read.
    pub fn could_be_on(&self) -> bool {
        self.is_supported && !self.is_on
    }
}
