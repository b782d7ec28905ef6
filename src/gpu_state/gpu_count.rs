//! How many GPUs a host should have: as many as its drivers counted within a week, also before a restart or a reboot.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::gpu::amdgpu;

/// Name of NVIDIA's driver as a source of GPUs.
pub const NVML: &str = "nvml";
/// A count that was not reached for this long is no longer expected.
const EXPECTED_FOR: Duration = Duration::from_secs(7 * 86_400);
/// A clock that is earlier was not set: without a battery a host starts in 1970.
const CLOCK_IS_SET: f64 = 1_700_000_000.0;
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
        let count = self.at(now);
        if counted >= count.count || count.is_over(now) { Self { count: counted, seen: now } } else { count }
    }

    /// Corrects what an unset clock, or one in the future, has written.
    fn at(self, now: f64) -> Self {
        let is_wrong = now >= CLOCK_IS_SET && (self.seen < CLOCK_IS_SET || self.seen > now);
        Self { seen: if is_wrong { now } else { self.seen }, ..self }
    }

    fn is_over(self, now: f64) -> bool {
        now - self.seen > EXPECTED_FOR.as_secs_f64()
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
            // what was handed over before the ledger could be read is written after this
            if self.stored.remove(source).is_none() {
                self.stored.insert(source, *before);
            }
        }
    }

    /// Records that a driver counts this number of GPUs at a Unix time.
    pub fn record(&mut self, source: &'static str, counted: usize, now: f64) {
        let count = self.counts.entry(source).or_insert(GpuCount { count: 0, seen: now });
        *count = count.updated(counted, now);
    }

    /// Returns what the ledger has to write, once.
    pub fn take_changes(&mut self) -> BTreeMap<String, GpuCount> {
        let interval = WRITE_INTERVAL.as_secs_f64();
        let mut changes = BTreeMap::new();
        for (source, count) in &self.counts {
            let is_stored = self.stored.get(source).map_or(count.count == 0, |stored| {
                stored.count == count.count && (count.seen - stored.seen).abs() <= interval
            });
            if !is_stored {
                self.stored.insert(source, *count);
                changes.insert((*source).to_owned(), *count);
            }
        }
        changes
    }

    /// Returns the expected number of each source at a Unix time. A driver that counted no GPU within a week is none.
    pub fn all(&self, now: f64) -> BTreeMap<&'static str, usize> {
        let counted = self.counts.iter().filter(|(_, count)| count.count > 0 && !count.at(now).is_over(now));
        let mut all: BTreeMap<_, _> = counted.map(|(source, count)| (*source, count.count)).collect();
        all.extend(self.configured.map(|count| (NVML, count)));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: f64 = 86_400.0;
    const START: f64 = 1_800_000_000.0;

    /// What is expected after a restart, by what the first process wrote.
    fn restarted(first: &mut ExpectedGpus, configured: Option<usize>) -> ExpectedGpus {
        let mut second = ExpectedGpus::new(configured);
        second.restore(&first.take_changes());
        second
    }

    fn with(counted: usize, at: f64) -> ExpectedGpus {
        let mut gpus = ExpectedGpus::new(None);
        gpus.record(NVML, counted, at);
        gpus
    }

    #[test]
    fn lost_gpu_is_expected_for_a_week_also_after_a_restart() {
        let mut gpus = restarted(&mut with(8, START), None);
        assert_eq!(gpus.all(START), BTreeMap::from([(NVML, 8)]), "before the driver responds at all");
        for day in 1..=7 {
            let now = START + f64::from(day) * DAY;
            gpus.record(NVML, 7, now);
            assert_eq!(gpus.all(now)[NVML], 8, "day {day}");
        }
        gpus.record(NVML, 7, START + 7.1 * DAY);
        assert_eq!(gpus.all(START + 7.1 * DAY)[NVML], 7, "nobody will bring it back");
        gpus.record(NVML, 8, START + 8.0 * DAY);
        assert_eq!(gpus.all(START + 8.0 * DAY)[NVML], 8, "it was replaced");
    }

    #[test]
    fn gpus_of_a_driver_that_is_gone_are_expected_for_a_week() {
        let gpus = restarted(&mut with(8, START), None);
        assert_eq!(gpus.all(START + 6.9 * DAY), BTreeMap::from([(NVML, 8)]));
        assert_eq!(gpus.all(START + 7.1 * DAY), BTreeMap::new());
    }

    #[test]
    fn configured_number_ends_what_the_ledger_expects() {
        let mut gpus = with(8, START);
        gpus.record(amdgpu::NAME, 2, START);
        let mut gpus = restarted(&mut gpus, Some(0));
        assert_eq!(gpus.all(START), BTreeMap::from([(NVML, 0), (amdgpu::NAME, 2)]));
        gpus.record(NVML, 8, START + DAY);
        assert_eq!(gpus.all(START + DAY)[NVML], 0, "the setting, not the driver");
    }

    #[test]
    fn is_written_when_it_changes_and_each_hour() {
        let mut gpus = ExpectedGpus::new(None);
        let mut written = vec![];
        for minute in 0..=125 {
            gpus.record(NVML, if minute < 100 { 4 } else { 5 }, START + f64::from(minute) * 60.0);
            if !gpus.take_changes().is_empty() {
                written.push(minute);
            }
        }
        assert_eq!(written, [0, 61, 100]);
    }

    #[test]
    fn counts_before_the_ledger_was_read_do_not_replace_higher_ones() {
        let stored = with(4, START).take_changes();
        for (counted, expected) in [(3, 4), (5, 5)] {
            let mut gpus = with(counted, START + DAY);
            gpus.take_changes(); // they wait, and are written when the ledger is open
            gpus.restore(&stored);
            assert_eq!(gpus.all(START + DAY)[NVML], expected);
            assert_eq!(gpus.take_changes()[NVML].count, expected, "after what waited");
        }
    }

    #[test]
    fn clock_that_was_not_set_or_was_ahead_neither_forgets_nor_keeps_a_gpu() {
        let mut gpus = restarted(&mut with(8, START), None);
        gpus.record(NVML, 7, 60.0); // 1970
        gpus.record(NVML, 7, START + DAY);
        assert_eq!(gpus.all(START + DAY)[NVML], 8);
        let mut gpus = with(8, 60.0);
        gpus.record(NVML, 7, START);
        assert_eq!(gpus.all(START)[NVML], 8, "seen before the clock was set");
        let mut gpus = with(8, START + 900.0 * DAY);
        for day in [0.0, 7.5] {
            gpus.record(NVML, 7, START + day * DAY);
        }
        assert_eq!(gpus.all(START + 7.5 * DAY)[NVML], 7, "a week after the clock was right");
    }
}
