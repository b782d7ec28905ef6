//! GPU data that outlives a cycle: the number of GPUs, inconsistent readings, and peaks of devices and processes. The
//! peaks of containers are in [`run_peaks`](super::run_peaks).

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use crate::attribute::gpu::GpuAttribution;
use crate::catalog::*;
use crate::clock::Timestamp;
use crate::collect::CycleData;
use crate::gpu_state::gpu_count::{ExpectedGpus, NVML};
use crate::host::process::ProcessId;
use crate::series::Series;

/// Window of a *recent* peak.
const RECENT_WINDOW: Duration = Duration::from_secs(60);

/// The highest of all samples, and of the last minute.
#[derive(Clone, Debug, Default)]
pub struct Peak {
    highest: Option<u64>,
    /// Samples of the last minute that no later one reached: a queue with decreasing bytes.
    recent: VecDeque<(Timestamp, u64)>,
}

impl Peak {
    /// Records a sample.
    pub fn record(&mut self, at: Timestamp, bytes: u64) {
        self.raise(bytes);
        while self.recent.back().is_some_and(|(_, older)| *older <= bytes) {
            self.recent.pop_back();
        }
        self.recent.push_back((at, bytes));
    }

    /// Raises the peak to a usage at an unknown time.
    pub fn raise(&mut self, bytes: u64) {
        self.highest = self.highest.max(Some(bytes));
    }

    /// Returns the highest of all samples.
    pub fn highest(&self) -> Option<u64> {
        self.highest
    }

    /// Returns the highest sample of the last minute; `None` if there was none.
    pub fn recent(&self, now: Timestamp) -> Option<u64> {
        self.recent.iter().find(|(at, _)| now.since(*at) <= RECENT_WINDOW).map(|(_, bytes)| *bytes)
    }

    /// Removes samples that are older than a minute.
    pub fn forget_old(&mut self, now: Timestamp) {
        while self.recent.front().is_some_and(|(at, _)| now.since(*at) > RECENT_WINDOW) {
            self.recent.pop_front();
        }
    }
}

/// A process on a device: its pid and start time, and the key of the device.
type OnDevice = (ProcessId, Arc<str>);

/// Peaks and counts of all GPUs.
#[derive(Debug, Default)]
pub struct GpuPeaks {
    /// How many GPUs there should be.
    pub expected: ExpectedGpus,
    races: BTreeMap<Arc<str>, u64>,
    /// By source: the time of the last recorded reading. Several cycles may see the same reading.
    last_readings: HashMap<&'static str, Timestamp>,
    devices: HashMap<Arc<str>, Peak>,
    processes: HashMap<OnDevice, Peak>,
}

impl GpuPeaks {
    /// Creates an empty table; `expected` is the configured number of NVIDIA GPUs.
    pub fn new(expected: Option<usize>) -> Self {
        Self { expected: ExpectedGpus::new(expected), ..Self::default() }
    }

    /// Records one cycle and writes the series.
    pub fn record(
        &mut self,
        now: Timestamp,
        cycle_data: &CycleData,
        attributed: &GpuAttribution,
        series: &mut Series,
    ) {
        self.record_races(cycle_data, attributed);
        self.record_peaks(now, attributed);
        self.record_counts(now, cycle_data, series);
        for (gpu, (_, device)) in (0..).zip(cycle_data.gpu_devices()) {
            let key = device.identity.key();
            if let Some(races) = self.races.get(key) {
                series.gpu(GPU_MEMORY_CONFLICTS, gpu, [], *races as f64);
            }
            // without current memory, omit the peak too
            let peak = self.devices.get(key).filter(|_| device.memory.used.is_some());
            if let Some(bytes) = peak.and_then(Peak::highest) {
                series.gpu(GPU_MEMORY_PEAK, gpu, [], bytes as f64);
            }
            if let Some(bytes) = peak.and_then(|peak| peak.recent(now)) {
                series.gpu(GPU_MEMORY_RECENT_PEAK, gpu, [], bytes as f64);
            }
        }
        for (gpu, device) in cycle_data.silent_gpus() {
            device.health.write(gpu, series);
        }
        self.write_processes(now, attributed, series);
    }

    /// Records the number of GPUs separately for each source: a GPU of one source must not stand in for a missing one
    /// of another, and NVIDIA GPUs must not count as missing while the driver is released.
    fn record_counts(&mut self, now: Timestamp, cycle_data: &CycleData, series: &mut Series) {
        for reading in &cycle_data.gpus {
            let source = if reading.source == "gpu" { NVML } else { reading.source };
            let whole = reading.devices.iter().filter(|device| device.instance_of.is_none()).count();
            series.global(GPUS_VISIBLE, [source.into()], whole as f64);
            self.expected.record(source, reading.counted, now.unix_seconds());
        }
        for (source, expected) in self.expected.all(now.unix_seconds()) {
            series.global(GPUS_EXPECTED, [source.into()], expected as f64);
        }
    }

    fn record_races(&mut self, cycle_data: &CycleData, attributed: &GpuAttribution) {
        for reading in &cycle_data.gpus {
            if self.last_readings.insert(reading.source, reading.at) == Some(reading.at) {
                continue;
            }
            for key in reading.devices.iter().map(|device| device.identity.key()) {
                let raced = attributed.raced.contains(key);
                *self.races.entry(Arc::clone(key)).or_insert(0) += u64::from(raced);
            }
        }
    }

    fn record_peaks(&mut self, now: Timestamp, attributed: &GpuAttribution) {
        for held in &attributed.held {
            if let Some(used) = held.used {
                self.devices.entry(Arc::clone(&held.device)).or_default().record(held.at, used);
            }
            for (who, bytes) in &held.processes {
                let peak = self.processes.entry((*who, Arc::clone(&held.device))).or_default();
                peak.record(held.at, *bytes);
            }
        }
        for peak in self.devices.values_mut() {
            peak.forget_old(now);
        }
        // keep a process that is not seen now for a while: the driver may be temporarily unavailable
        let present: HashSet<OnDevice> =
            attributed.processes.iter().map(|p| (p.id, Arc::clone(&p.device))).collect();
        self.processes.retain(|key, peak| {
            peak.forget_old(now);
            present.contains(key) || !peak.recent.is_empty()
        });
    }

    fn write_processes(&self, now: Timestamp, attributed: &GpuAttribution, series: &mut Series) {
        for process in attributed.processes.iter().filter(|process| process.used.is_some()) {
            let key = (process.id, Arc::clone(&process.device));
            let Some(peak) = self.processes.get(&key) else { continue };
            let (container, gpu, labels) = (process.container, process.gpu, &process.labels);
            if let Some(bytes) = peak.highest() {
                let labels = labels.clone();
                series.container_gpu(PROCESS_GPU_MEMORY_PEAK, container, gpu, labels, bytes as f64);
            }
            if let Some(bytes) = peak.recent(now) {
                let labels = labels.clone();
                series.container_gpu(PROCESS_GPU_MEMORY_RECENT_PEAK, container, gpu, labels, bytes as f64);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn peak_is_the_highest_of_all_and_of_recent_samples(
            samples in prop::collection::vec((0..10_000_u64, 0..100_u64), 1..200)
        ) {
            let (start, mut passed) = (Timestamp::now(), 0);
            let mut peak = Peak::default();
            let mut all = Vec::new();
            for (pause, bytes) in samples {
                passed += pause;
                let now = start.plus(Duration::from_millis(passed));
                peak.record(now, bytes);
                peak.forget_old(now);
                all.push((passed, bytes));
                let recent = all.iter().filter(|(at, _)| passed - at <= 60_000).map(|(_, bytes)| *bytes).max();
                prop_assert_eq!(peak.recent(now), recent);
                prop_assert_eq!(peak.highest(), all.iter().map(|(_, bytes)| *bytes).max());
            }
        }
    }
}
