//! What is kept of GPUs over the cycles: how many there were, races, and peaks of devices and processes. The peaks of
//! containers are in their books ([`containers`](super::containers)).

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use crate::attribute::gpu::{Attributed, Held};
use crate::catalog::*;
use crate::clock::Moment;
use crate::collect::Readings;
use crate::series::Series;

/// How NVIDIA's driver is called as a source of GPUs.
const NVML: &str = "nvml";
/// A *recent* peak is the highest of so long.
const RECENT: Duration = Duration::from_secs(60);

/// The highest of all samples, and of the last minute.
#[derive(Clone, Debug, Default)]
pub struct Peak {
    highest: Option<u64>,
    /// Samples that are not yet a minute old and that no later one reached: their bytes fall from front to back.
    recent: VecDeque<(Moment, u64)>,
}

impl Peak {
    /// Enters a sample.
    pub fn enter(&mut self, at: Moment, bytes: u64) {
        self.raise(bytes);
        while self.recent.back().is_some_and(|(_, older)| *older <= bytes) {
            self.recent.pop_back();
        }
        self.recent.push_back((at, bytes));
    }

    /// Enters what was held at one moment, or at some time.
    pub fn enter_held(&mut self, held: &Held, bytes: u64) {
        if held.is_dated { self.enter(held.at, bytes) } else { self.raise(bytes) }
    }

    /// It was at least so much at some time that is not known.
    pub fn raise(&mut self, bytes: u64) {
        self.highest = self.highest.max(Some(bytes));
    }

    /// The highest of all samples.
    pub fn highest(&self) -> Option<u64> {
        self.highest
    }

    /// The highest of the last minute; `None` if there was no sample.
    pub fn recent(&self, now: Moment) -> Option<u64> {
        self.recent.iter().find(|(at, _)| now.since(*at) <= RECENT).map(|(_, bytes)| *bytes)
    }

    /// Forgets what is older than a minute.
    pub fn forget_old(&mut self, now: Moment) {
        while self.recent.front().is_some_and(|(at, _)| now.since(*at) > RECENT) {
            self.recent.pop_front();
        }
    }
}

/// A process on a device: its pid and start time, and the key of the device.
type OnDevice = ((u32, u64), Arc<str>);

/// The books of the GPUs.
#[derive(Debug, Default)]
pub struct Gpus {
    /// By source: as it was set, or the most that were counted.
    expected: BTreeMap<&'static str, usize>,
    /// It was set for NVML.
    is_set: bool,
    races: BTreeMap<Arc<str>, u64>,
    /// By source: when the reading that was entered last was complete. Several cycles may see one reading.
    read: HashMap<&'static str, Moment>,
    devices: HashMap<Arc<str>, Peak>,
    processes: HashMap<OnDevice, Peak>,
}

impl Gpus {
    /// Empty books; NVIDIA's driver should have so many GPUs, if that was set.
    pub fn new(expected: Option<usize>) -> Self {
        let is_set = expected.is_some();
        Self {
            expected: expected.map(|count| (NVML, count)).into_iter().collect(),
            is_set,
            ..Self::default()
        }
    }

    /// Enters one cycle and writes what is known.
    pub fn enter(&mut self, now: Moment, readings: &Readings, attributed: &Attributed, series: &mut Series) {
        self.enter_races(readings, attributed);
        self.enter_peaks(now, attributed);
        self.enter_counts(readings, series);
        for (gpu, (_, device)) in (0..).zip(readings.gpu_devices()) {
            let key = device.identity.key();
            if let Some(races) = self.races.get(key) {
                series.gpu(GPU_BOOKS_RACES, gpu, [], *races as f64);
            }
            // where memory is not told now, neither is what it was
            let peak = self.devices.get(key).filter(|_| device.memory.used.is_some());
            if let Some(bytes) = peak.and_then(Peak::highest) {
                series.gpu(GPU_MEMORY_PEAK, gpu, [], bytes as f64);
            }
            if let Some(bytes) = peak.and_then(|peak| peak.recent(now)) {
                series.gpu(GPU_MEMORY_RECENT_PEAK, gpu, [], bytes as f64);
            }
        }
        for (gpu, device) in readings.silent_gpus() {
            device.health.write(gpu, series);
        }
        self.write_processes(now, attributed, series);
    }

    /// Each source for itself: a card that stays makes up for none that is missing, nor is one missing that is NVML's while
    /// NVML is let go.
    fn enter_counts(&mut self, readings: &Readings, series: &mut Series) {
        for reading in &readings.gpus {
            let source = if reading.source == "gpu" { NVML } else { reading.source };
            let whole = reading.devices.iter().filter(|device| device.instance_of.is_none()).count();
            series.global(GPUS_VISIBLE, [source.into()], whole as f64);
            if source != NVML || !self.is_set {
                let most = self.expected.entry(source).or_insert(0);
                *most = reading.counted.max(*most);
            }
        }
        for (source, expected) in &self.expected {
            if *expected > 0 || (*source == NVML && self.is_set) {
                series.global(GPUS_EXPECTED, [(*source).into()], *expected as f64);
            }
        }
    }

    fn enter_races(&mut self, readings: &Readings, attributed: &Attributed) {
        for reading in &readings.gpus {
            if self.read.insert(reading.source, reading.at) == Some(reading.at) {
                continue;
            }
            for key in reading.devices.iter().map(|device| device.identity.key()) {
                let raced = attributed.raced.contains(key);
                *self.races.entry(Arc::clone(key)).or_insert(0) += u64::from(raced);
            }
        }
    }

    fn enter_peaks(&mut self, now: Moment, attributed: &Attributed) {
        for held in &attributed.held {
            if let Some(used) = held.used {
                self.devices.entry(Arc::clone(&held.device)).or_default().enter(held.at, used);
            }
            for (who, bytes) in &held.processes {
                let peak = self.processes.entry((*who, Arc::clone(&held.device))).or_default();
                peak.enter_held(held, *bytes);
            }
        }
        for process in &attributed.processes {
            if let Some(bytes) = process.driver_peak {
                let key = (process.who, Arc::clone(&process.device));
                self.processes.entry(key).or_default().raise(bytes);
            }
        }
        for peak in self.devices.values_mut() {
            peak.forget_old(now);
        }
        // a process that is not seen now may be back: the driver may have been away
        let here: HashSet<OnDevice> =
            attributed.processes.iter().map(|p| (p.who, Arc::clone(&p.device))).collect();
        self.processes.retain(|key, peak| {
            peak.forget_old(now);
            here.contains(key) || !peak.recent.is_empty()
        });
    }

    fn write_processes(&self, now: Moment, attributed: &Attributed, series: &mut Series) {
        for process in attributed.processes.iter().filter(|process| process.used.is_some()) {
            let key = (process.who, Arc::clone(&process.device));
            let Some((peak, labels)) = self.processes.get(&key).zip(process.labels.as_ref()) else {
                continue;
            };
            let (container, gpu) = (process.container, process.gpu);
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
        fn a_peak_is_the_highest_of_all_samples_and_of_those_of_the_last_minute(
            samples in prop::collection::vec((0..10_000_u64, 0..100_u64), 1..200)
        ) {
            let (start, mut passed) = (Moment::now(), 0);
            let mut peak = Peak::default();
            let mut all = Vec::new();
            for (pause, bytes) in samples {
                passed += pause;
                let now = start.plus(Duration::from_millis(passed));
                peak.enter(now, bytes);
                peak.forget_old(now);
                all.push((passed, bytes));
                let recent = all.iter().filter(|(at, _)| passed - at <= 60_000).map(|(_, bytes)| *bytes).max();
                prop_assert_eq!(peak.recent(now), recent);
                prop_assert_eq!(peak.highest(), all.iter().map(|(_, bytes)| *bytes).max());
            }
        }
    }
}
