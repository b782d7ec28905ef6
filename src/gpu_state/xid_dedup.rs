//! Turns GPU errors into events, each error once. The kernel log has more detail (the pid); NVML counts errors even
//! where the log cannot be read.
//!
//! While the log is read, errors that NVML counted are delayed: if the log reports an error of the same GPU in that
//! time, or has since NVML's last increase, they are the same. Error numbers are not compared, because NVML reports
//! several simultaneous errors under the newest one's number. A log that can be read again repeats errors that NVML
//! reported in the meantime: those are dropped.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use crate::clock::Timestamp;
use crate::collect::CycleData;
use crate::events::GpuError;

/// Maximum number of events for one increase: a GPU that reports thousands at once adds no information with each. Also
/// the maximum number of NVML's errors that are remembered per GPU.
const MAX_EVENTS: usize = 100;
/// Largest time between the two reports of one error.
const MAX_DELAY: Duration = Duration::from_secs(5);

/// State of the deduplication.
#[derive(Debug, Default)]
pub struct XidDedup {
    /// NVML's counts that were handled already, by UUID and Xid. NVML's counters start with memledger.
    handled: HashMap<(Arc<str>, u64), u64>,
    /// When the log last reported an error of a GPU, until NVML has counted it.
    logged: HashMap<Arc<str>, Timestamp>,
    /// Errors that NVML counted and the log has not reported, with the time since when.
    delayed: Vec<(Timestamp, GpuError)>,
    /// Unix times of errors that only NVML reported, by GPU.
    nvml_times: HashMap<Arc<str>, VecDeque<f64>>,
}

impl XidDedup {
    /// Records the errors of the log and of NVML since the previous cycle. Returns those that become events now.
    pub fn record(
        &mut self,
        now: Timestamp,
        cycle_data: &CycleData,
        logged: Vec<GpuError>,
        is_log_read: bool,
    ) -> Vec<GpuError> {
        let mut reported: Vec<_> = logged.into_iter().filter(|error| !self.is_reported(error)).collect();
        self.logged.extend(reported.iter().map(|error| (Arc::clone(&error.gpu_uuid), now)));
        let counted = self.count(now, cycle_data);
        self.delayed.extend(counted.into_iter().map(|error| (now, error)));
        self.delayed.retain(|(_, error)| !self.logged.contains_key(&error.gpu_uuid));
        self.forget(cycle_data);
        let is_due = |(since, _): &mut (Timestamp, GpuError)| !is_log_read || now.since(*since) >= MAX_DELAY;
        for (_, error) in self.delayed.extract_if(.., is_due) {
            let known = self.nvml_times.entry(Arc::clone(&error.gpu_uuid)).or_default();
            known.push_back(error.at);
            if known.len() > MAX_EVENTS {
                known.pop_front();
            }
            reported.push(error);
        }
        reported
    }

    /// Returns true if NVML already reported this error.
    fn is_reported(&mut self, logged: &GpuError) -> bool {
        let Some(known) = self.nvml_times.get_mut(&logged.gpu_uuid) else { return false };
        let place = known.iter().position(|at| (at - logged.at).abs() < MAX_DELAY.as_secs_f64());
        place.and_then(|place| known.remove(place)).is_some()
    }

    /// Forgets the log's errors once NVML has been read a while after them.
    fn forget(&mut self, cycle_data: &CycleData) {
        for reading in &cycle_data.gpus {
            for device in reading.devices.iter().chain(&reading.silent) {
                let uuid = &device.identity.uuid;
                if self.logged.get(uuid).is_some_and(|reported| reading.at >= reported.plus(MAX_DELAY)) {
                    self.logged.remove(uuid);
                }
            }
        }
    }

    fn count(&mut self, now: Timestamp, cycle_data: &CycleData) -> Vec<GpuError> {
        let mut errors = vec![];
        let devices = cycle_data.gpu_devices().map(|(_, device)| device);
        for device in devices.chain(cycle_data.silent_gpus().map(|(_, device)| device)) {
            let identity = &device.identity;
            for (xid, seen) in &device.health.xids {
                let known = self.handled.entry((Arc::clone(&identity.uuid), *xid)).or_insert(0);
                let new = seen.count.saturating_sub(*known).min(MAX_EVENTS as u64);
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
    use crate::gpu::{GpuDevice, GpuIdentity, GpuReading, XidCount};

    /// Returns a cycle in which NVML has counted `count` errors with Xid 79.
    fn cycle_data(now: Timestamp, count: u64) -> CycleData {
        let identity = GpuIdentity {
            index: "0".into(),
            uuid: "GPU-0".into(),
            vendor: "nvidia",
            ..GpuIdentity::default()
        };
        let mut device = GpuDevice::new(Arc::new(identity));
        device.health.xids.insert(79, XidCount { count, last: Some(now.unix_seconds()) });
        let reading = GpuReading::of_devices(now, vec![device]);
        CycleData { gpus: vec![Arc::new(reading)], ..CycleData::default() }
    }

    fn logged(now: Timestamp, xid: u64) -> GpuError {
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

    /// Runs cycles of (milliseconds, NVML's count, Xids from the log). Returns the reported errors by cycle.
    fn run_cycles(is_log_read: bool, cycles: &[(u64, u64, &[u64])]) -> Vec<Vec<String>> {
        let (start, mut errors) = (Timestamp::now(), XidDedup::default());
        let mut one = |(after, count, reported): &(u64, u64, &[u64])| {
            let now = start.plus(Duration::from_millis(*after));
            let reported = reported.iter().map(|xid| logged(now, *xid)).collect();
            let reported = errors.record(now, &cycle_data(now, *count), reported, is_log_read);
            reported.iter().map(|error| format!("{} {}", error.source, error.xid)).collect()
        };
        cycles.iter().map(&mut one).collect()
    }

    #[test]
    fn without_log_reports_nvml_errors_at_once() {
        let reported = run_cycles(false, &[(0, 0, &[]), (1000, 2, &[]), (2000, 2, &[])]);
        assert_eq!(reported, [vec![], vec!["nvml 79", "nvml 79"], vec![]]);
    }

    #[test]
    fn reports_error_of_both_sources_once() {
        let later = run_cycles(true, &[(0, 1, &[]), (4000, 1, &[79]), (20_000, 1, &[])]);
        assert_eq!(later, [vec![], vec!["kmsg 79"], vec![]]);
        let before = run_cycles(true, &[(0, 0, &[79]), (4000, 1, &[]), (20_000, 1, &[])]);
        assert_eq!(before, [vec!["kmsg 79"], vec![], vec![]]);
        let by_another_number = run_cycles(true, &[(0, 2, &[31, 79]), (20_000, 2, &[])]);
        assert_eq!(by_another_number, [vec!["kmsg 31", "kmsg 79"], vec![]]);
    }

    #[test]
    fn reports_nvml_error_that_the_log_does_not_have() {
        let reported = run_cycles(true, &[(0, 1, &[]), (4999, 1, &[]), (5000, 1, &[]), (9000, 1, &[])]);
        assert_eq!(reported, [vec![], vec![], vec!["nvml 79"], vec![]]);
        let reported = run_cycles(true, &[(0, 0, &[79]), (5000, 0, &[]), (6000, 1, &[]), (11_000, 1, &[])]);
        assert_eq!(
            reported,
            [vec!["kmsg 79"], vec![], vec![], vec!["nvml 79"]],
            "long after the log's error it is another one"
        );
    }

    #[test]
    fn late_nvml_count_matches_earlier_log_error() {
        let reported = run_cycles(
            true,
            &[(0, 0, &[79]), (45_000, 1, &[]), (60_000, 1, &[]), (61_000, 2, &[]), (66_000, 2, &[])],
        );
        assert_eq!(
            reported,
            [vec!["kmsg 79"], vec![], vec![], vec![], vec!["nvml 79"]],
            "the driver hung for 45 s"
        );
    }

    #[test]
    fn drops_log_errors_that_nvml_reported_while_the_log_was_unreadable() {
        let (start, mut errors) = (Timestamp::now(), XidDedup::default());
        let after = |seconds| start.plus(Duration::from_secs(seconds));
        assert_eq!(errors.record(after(1), &cycle_data(after(1), 1), vec![], false).len(), 1);
        let (same, another) = (logged(after(0), 79), logged(after(20), 79));
        let reported =
            errors.record(after(30), &cycle_data(after(30), 1), vec![same.clone(), another.clone()], true);
        assert_eq!(reported, [another]);
        assert_eq!(
            errors.record(after(31), &cycle_data(after(31), 1), vec![same.clone()], true),
            [same],
            "each one once"
        );
    }
}
