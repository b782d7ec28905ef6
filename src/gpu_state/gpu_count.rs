//! How many GPUs a host should have: as many as its drivers counted within a week, also before a restart or a reboot.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::gpu::amdgpu;

/// Name of NVIDIA's driver as a source of GPUs.
pub const NVML: &str = "nvml";
/// A count that was not reached for this long is no longer expected.
const EXPECTED_FOR: Duration = Duration::from_secs(7 * 86_400);
/// How much later a count must have been seen again for the ledger to be written.
const WRITE_INTERVAL: Duration = Duration::from_secs(3_600);

/// The highest number of GPUs that a driver counted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuCount {
    /// Whole GPUs, not MIG instances.
    pub count: usize,
    /// Unix time at which the driver last counted as many.
    pub seen: f64,
}

impl GpuCount {
    /// Returns what holds once the driver has counted `counted` GPUs at `now`.
    fn updated(self, counted: usize, now: f64) -> Self {
        let is_over = now - self.seen > EXPECTED_FOR.as_secs_f64();
        if counted >= self.count || is_over { Self { count: counted, seen: now } } else { self }
    }
}

/// The expected number of GPUs of each source.
#[derive(Debug, Default)]
pub struct ExpectedGpus {
    /// `--gpu.expected`: the number of NVIDIA's GPUs.
    configured: Option<usize>,
    counts: BTreeMap<&'static str, GpuCount>,
    /// What the ledger has.
    stored: BTreeMap<&'static str, GpuCount>,
}

impl ExpectedGpus {
    /// Expects this number of NVIDIA's GPUs; `None`: as many as were counted.
    pub fn new(configured: Option<usize>) -> Self {
        Self { configured, ..Self::default() }
    }

    /// Takes the counts that the ledger has.
    pub fn restore(&mut self, stored: &BTreeMap<String, GpuCount>) {
        for source in [NVML, amdgpu::NAME] {
            let Some(before) = stored.get(source) else { continue };
            let now = self.counts.get(source).map_or(*before, |now| before.updated(now.count, now.seen));
            self.counts.insert(source, now);
            self.stored.insert(source, *before);
        }
    }

    /// Records that a driver counts this number of GPUs at a Unix time.
    pub fn record(&mut self, source: &'static str, counted: usize, now: f64) {
        let count = self.counts.entry(source).or_insert(GpuCount { count: 0, seen: now });
        *count = count.updated(counted, now);
    }

    /// Returns what the ledger has to write, once.
    pub fn take_changes(&mut self) -> BTreeMap<String, GpuCount> {
        let is_new = |count: &GpuCount, stored: &GpuCount| {
            count.count != stored.count || (count.seen - stored.seen).abs() > WRITE_INTERVAL.as_secs_f64()
        };
        let mut changes = BTreeMap::new();
        for (source, count) in &self.counts {
            let is_known =
                |stored: Option<&GpuCount>| stored.map_or(count.count == 0, |stored| !is_new(count, stored));
            if !is_known(self.stored.get(source)) {
                self.stored.insert(source, *count);
                changes.insert((*source).to_owned(), *count);
            }
        }
        changes
    }

    /// Returns the expected number of each source. A driver that never counted a GPU is none.
    pub fn all(&self) -> BTreeMap<&'static str, usize> {
        let counted = self.counts.iter().map(|(source, count)| (*source, count.count));
        let mut all: BTreeMap<_, _> = counted.filter(|(_, count)| *count > 0).collect();
        all.extend(self.configured.map(|count| (NVML, count)));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: f64 = 86_400.0;

    /// What is expected after a restart, by what the first process wrote.
    fn restarted(first: &mut ExpectedGpus, configured: Option<usize>) -> ExpectedGpus {
        let mut second = ExpectedGpus::new(configured);
        second.restore(&first.take_changes());
        second
    }

    #[test]
    fn lost_gpu_is_expected_for_a_week_also_after_a_restart() {
        let mut gpus = ExpectedGpus::new(None);
        gpus.record(NVML, 8, 0.0);
        let mut gpus = restarted(&mut gpus, None);
        assert_eq!(gpus.all(), BTreeMap::from([(NVML, 8)]), "before the driver responds at all");
        for day in 1..=7 {
            gpus.record(NVML, 7, f64::from(day) * DAY);
            assert_eq!(gpus.all()[NVML], 8, "day {day}");
        }
        gpus.record(NVML, 7, 7.1 * DAY);
        assert_eq!(gpus.all()[NVML], 7, "nobody will bring it back");
        gpus.record(NVML, 8, 8.0 * DAY);
        assert_eq!(gpus.all()[NVML], 8, "it was replaced");
    }

    #[test]
    fn configured_number_ends_what_the_ledger_expects() {
        let mut gpus = ExpectedGpus::new(None);
        gpus.record(NVML, 8, 0.0);
        gpus.record("amdgpu", 2, 0.0);
        let mut gpus = restarted(&mut gpus, Some(0));
        assert_eq!(gpus.all(), BTreeMap::from([(NVML, 0), ("amdgpu", 2)]));
        gpus.record(NVML, 8, DAY);
        assert_eq!(gpus.all()[NVML], 0, "the setting, not the driver");
    }

    #[test]
    fn is_written_when_it_changes_and_each_hour() {
        let mut gpus = ExpectedGpus::new(None);
        let mut written = vec![];
        for minute in 0..=125 {
            gpus.record(NVML, if minute < 100 { 4 } else { 5 }, f64::from(minute) * 60.0);
            if !gpus.take_changes().is_empty() {
                written.push(minute);
            }
        }
        assert_eq!(written, [0, 61, 100]);
    }

    #[test]
    fn counts_before_the_ledger_was_read_are_kept() {
        let stored = BTreeMap::from([(NVML.to_owned(), GpuCount { count: 4, seen: 0.0 })]);
        for (counted, expected) in [(3, 4), (5, 5)] {
            let mut gpus = ExpectedGpus::new(None);
            gpus.record(NVML, counted, DAY);
            gpus.restore(&stored);
            assert_eq!(gpus.all()[NVML], expected);
        }
        let none = ExpectedGpus::new(None);
        assert!(none.all().is_empty(), "a host without GPUs");
    }
}
