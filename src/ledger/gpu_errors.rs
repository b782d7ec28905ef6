//! Errors of GPUs as NVML counts them, one by one: for hosts whose kernel log cannot be read.

use std::collections::HashMap;
use std::sync::Arc;

use super::entries::GpuError;
use crate::clock::Moment;
use crate::collect::Readings;

/// Most that are told of one growth: a GPU that reports thousands at once says nothing more by each.
const MOST: u64 = 100;

/// How many of each were counted already, by UUID and number.
#[derive(Debug, Default)]
pub struct Counts(HashMap<(Arc<str>, u64), u64>);

impl Counts {
    /// What was counted since the cycle before. NVML counts since memledger's start.
    pub fn count(&mut self, now: Moment, readings: &Readings) -> Vec<GpuError> {
        let mut errors = vec![];
        let devices = readings.gpu_devices().map(|(_, device)| device);
        for device in devices.chain(readings.silent_gpus().map(|(_, device)| device)) {
            let identity = &device.identity;
            for (xid, seen) in &device.health.xids {
                let known = self.0.entry((Arc::clone(&identity.uuid), *xid)).or_insert(0);
                let new = seen.count.saturating_sub(*known).min(MOST);
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
