//! Errors of GPUs as events, each from one source: the kernel log tells more (the pid), NVML counts them where nobody can
//! read the log.
//!
//! Where the log is read, what NVML counts is held back a while: if the log tells of an error of that GPU meanwhile, or did
//! since NVML counted last, it is that one. Not by their numbers, because of several at once NVML calls all by the newest
//! one's number. And a log that is read again tells what NVML told while it was away: that is left out.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::entries::GpuError;
use crate::clock::Moment;
use crate::collect::Readings;

/// Most that are told of one growth: a GPU that reports thousands at once says nothing more by each. And most that NVML told
/// of a GPU that are remembered.
const MOST: usize = 100;
/// The two sources tell of one error within this.
const APART: Duration = Duration::from_secs(5);

/// What was told, and what waits.
#[derive(Debug, Default)]
pub struct Errors {
    /// How many of each NVML had counted already, by UUID and number. It counts since memledger's start.
    counted: HashMap<(Arc<str>, u64), u64>,
    /// When the log told of an error of a GPU last, until NVML has counted after that.
    of_log: HashMap<Arc<str>, Moment>,
    /// What NVML counted while the log was silent, and since when.
    held: Vec<(Moment, GpuError)>,
    /// Unix times of what NVML told of a GPU, and the log did not.
    of_nvml: HashMap<Arc<str>, VecDeque<f64>>,
}

impl Errors {
    /// Enters what the log told and what NVML counted since the cycle before. Returns what is to be told now.
    pub fn enter(
        &mut self,
        now: Moment,
        readings: &Readings,
        of_log: Vec<GpuError>,
        is_log_read: bool,
    ) -> Vec<GpuError> {
        let mut told: Vec<_> = of_log.into_iter().filter(|error| !self.is_known(error)).collect();
        self.of_log.extend(told.iter().map(|error| (Arc::clone(&error.gpu_uuid), now)));
        let counted = self.count(now, readings);
        self.held.extend(counted.into_iter().map(|error| (now, error)));
        self.held.retain(|(_, error)| !self.of_log.contains_key(&error.gpu_uuid));
        self.forget(readings);
        let is_due = |(since, _): &mut (Moment, GpuError)| !is_log_read || now.since(*since) >= APART;
        for (_, error) in self.held.extract_if(.., is_due) {
            let known = self.of_nvml.entry(Arc::clone(&error.gpu_uuid)).or_default();
            known.push_back(error.at);
            if known.len() > MOST {
                known.pop_front();
            }
            told.push(error);
        }
        told
    }

    /// NVML has told of this one.
    fn is_known(&mut self, of_log: &GpuError) -> bool {
        let Some(known) = self.of_nvml.get_mut(&of_log.gpu_uuid) else { return false };
        let place = known.iter().position(|at| (at - of_log.at).abs() < APART.as_secs_f64());
        place.and_then(|place| known.remove(place)).is_some()
    }

    /// What the log told is done with when NVML has counted a while after it.
    fn forget(&mut self, readings: &Readings) {
        for reading in &readings.gpus {
            for device in reading.devices.iter().chain(&reading.silent) {
                let uuid = &device.identity.uuid;
                if self.of_log.get(uuid).is_some_and(|told| reading.at >= told.plus(APART)) {
                    self.of_log.remove(uuid);
                }
            }
        }
    }

    fn count(&mut self, now: Moment, readings: &Readings) -> Vec<GpuError> {
        let mut errors = vec![];
        let devices = readings.gpu_devices().map(|(_, device)| device);
        for device in devices.chain(readings.silent_gpus().map(|(_, device)| device)) {
            let identity = &device.identity;
            for (xid, seen) in &device.health.xids {
                let known = self.counted.entry((Arc::clone(&identity.uuid), *xid)).or_insert(0);
                let new = seen.count.saturating_sub(*known).min(MOST as u64);
                *known = seen.count;
                errors.extend((0..new).map(|_| GpuError {
                    id: 0,
                    at: seen.last.unwrap_or(now.unix_seconds()),
                    gpu: Arc::clone(&identity.index),
                    gpu_uuid: Arc::clone(&identity.uuid),
                    xid: *xid,
                    pid: None,
                    subject: None,
                    source: "nvml".into(),
                }));
            }
        }
        errors
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::gpu::{Device, Identity, Pids, Reading, Xid};

    /// A cycle in which NVML has counted so many errors 79 of the GPU since the start.
    fn readings(now: Moment, count: u64) -> Readings {
        let identity =
            Identity { index: "0".into(), uuid: "GPU-0".into(), vendor: "nvidia", ..Identity::default() };
        let mut device = Device::new(Arc::new(identity));
        device.health.xids.insert(79, Xid { count, last: Some(now.unix_seconds()) });
        let reading = Reading {
            source: "gpu",
            at: now,
            took: Duration::ZERO,
            driver_version: None,
            cuda_version: None,
            counted: 1,
            devices: vec![device],
            silent: vec![],
            pids: Pids::Proven,
            faults: vec![],
        };
        Readings { gpus: vec![Arc::new(reading)], ..Readings::default() }
    }

    fn of_log(now: Moment, xid: u64) -> GpuError {
        GpuError {
            id: 0,
            at: now.unix_seconds(),
            gpu: "0".into(),
            gpu_uuid: "GPU-0".into(),
            xid,
            pid: Some(7),
            subject: None,
            source: "kmsg".into(),
        }
    }

    /// Plays cycles: after so many milliseconds, how many NVML has counted, and what the log told. Returns who told, by cycle.
    fn played(is_log_read: bool, cycles: &[(u64, u64, &[u64])]) -> Vec<Vec<String>> {
        let (start, mut errors) = (Moment::now(), Errors::default());
        let mut one = |(after, count, told): &(u64, u64, &[u64])| {
            let now = start.plus(Duration::from_millis(*after));
            let told = told.iter().map(|xid| of_log(now, *xid)).collect();
            let told = errors.enter(now, &readings(now, *count), told, is_log_read);
            told.iter().map(|error| format!("{} {}", error.source, error.xid)).collect()
        };
        cycles.iter().map(&mut one).collect()
    }

    #[test]
    fn without_the_log_nvml_tells_at_once_and_each_once() {
        let told = played(false, &[(0, 0, &[]), (1000, 2, &[]), (2000, 2, &[])]);
        assert_eq!(told, [vec![], vec!["nvml 79", "nvml 79"], vec![]]);
    }

    #[test]
    fn what_the_log_tells_too_is_told_once_whoever_is_first() {
        let later = played(true, &[(0, 1, &[]), (4000, 1, &[79]), (20_000, 1, &[])]);
        assert_eq!(later, [vec![], vec!["kmsg 79"], vec![]]);
        let before = played(true, &[(0, 0, &[79]), (4000, 1, &[]), (20_000, 1, &[])]);
        assert_eq!(before, [vec!["kmsg 79"], vec![], vec![]]);
        let by_another_number = played(true, &[(0, 2, &[31, 79]), (20_000, 2, &[])]);
        assert_eq!(by_another_number, [vec!["kmsg 31", "kmsg 79"], vec![]]);
    }

    #[test]
    fn what_the_log_keeps_silent_about_is_told_by_nvml() {
        let told = played(true, &[(0, 1, &[]), (4999, 1, &[]), (5000, 1, &[]), (9000, 1, &[])]);
        assert_eq!(told, [vec![], vec![], vec!["nvml 79"], vec![]]);
        let told = played(true, &[(0, 0, &[79]), (5000, 0, &[]), (6000, 1, &[]), (11_000, 1, &[])]);
        assert_eq!(
            told,
            [vec!["kmsg 79"], vec![], vec![], vec!["nvml 79"]],
            "the one of long ago was another"
        );
    }

    #[test]
    fn nvml_that_counts_late_counts_what_the_log_told_before() {
        let told = played(
            true,
            &[(0, 0, &[79]), (45_000, 1, &[]), (60_000, 1, &[]), (61_000, 2, &[]), (66_000, 2, &[])],
        );
        assert_eq!(
            told,
            [vec!["kmsg 79"], vec![], vec![], vec![], vec!["nvml 79"]],
            "the driver hung for 45 s"
        );
    }

    #[test]
    fn a_log_that_comes_back_tells_nothing_that_nvml_told_meanwhile() {
        let (start, mut errors) = (Moment::now(), Errors::default());
        let after = |seconds| start.plus(Duration::from_secs(seconds));
        assert_eq!(errors.enter(after(1), &readings(after(1), 1), vec![], false).len(), 1);
        let (same, another) = (of_log(after(0), 79), of_log(after(20), 79));
        let told =
            errors.enter(after(30), &readings(after(30), 1), vec![same.clone(), another.clone()], true);
        assert_eq!(told, [another]);
        assert_eq!(
            errors.enter(after(31), &readings(after(31), 1), vec![same.clone()], true),
            [same],
            "each once"
        );
    }
}
