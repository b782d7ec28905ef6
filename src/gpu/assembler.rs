//! Turns what the NVML process sends into readings: finds the owners of processes, and keeps what lasts longer than that
//! process (counters, the trust in pids).

use std::collections::HashMap;
use std::iter::repeat_n;
use std::sync::Arc;
use std::time::Duration;

use super::device_metrics::{CountersByGpu, DeviceCounters};
use super::pid_resolver::{PidResolver, uptime_ticks};
use super::protocol::{DriverReading, DriverSample, DriverVersions};
use super::types::{DeviceSample, GpuDevice, GpuIdentity, GpuProcess, GpuReading, GpuSample};
use crate::clock::Timestamp;
use crate::host::{HostPaths, READ_ERROR_REASONS};

/// Read errors of one reading, and of one cycle, that are kept.
pub(super) const MAX_READ_ERRORS: usize = 1_000;
/// When a request to the NVML process began.
#[derive(Clone, Copy, Debug)]
pub struct RequestStart {
    at: Timestamp,
    /// Clock ticks since boot, by the host's `/proc`: a process that started later is not the one that the driver listed.
    uptime: Option<u64>,
}

impl RequestStart {
    /// Reads the clocks. Call it before the request is sent.
    pub fn now(host_paths: &HostPaths) -> Self {
        Self { at: Timestamp::now(), uptime: uptime_ticks(host_paths) }
    }
}

/// The state behind the readings. It outlives every NVML process.
#[derive(Debug)]
pub struct Assembler {
    pid_resolver: PidResolver,
    versions: DriverVersions,
    counters: CountersByGpu,
    /// When the throttle reasons of each GPU were read last, in this session.
    throttle_read_at: HashMap<Arc<str>, Timestamp>,
    /// A throttle reason of a reading counts for the time since the previous reading, up to this.
    max_gap: Duration,
    /// The devices of the last full reading by UUID.
    identities: HashMap<Arc<str>, Arc<GpuIdentity>>,
}

impl Assembler {
    /// Returns an empty state. Two readings are at most `max_gap` apart, unless a call hangs.
    pub fn new(host_paths: HostPaths, cgroup_v1: bool, max_gap: Duration) -> Self {
        Self {
            pid_resolver: PidResolver::new(host_paths, cgroup_v1),
            versions: DriverVersions::default(),
            counters: CountersByGpu::new(),
            throttle_read_at: HashMap::new(),
            max_gap,
            identities: HashMap::new(),
        }
    }

    /// Begins a session with a driver of these versions.
    pub fn begin_session(&mut self, versions: DriverVersions) {
        self.versions = versions;
        self.throttle_read_at.clear();
    }

    /// Counts Xids that occurred just now.
    pub fn count_xids(&mut self, xids: &[(Arc<str>, u64)]) {
        let now = Timestamp::now().unix_seconds();
        for (uuid, xid) in xids {
            self.counters.entry(Arc::clone(uuid)).or_default().count_xid(*xid, now);
        }
    }

    /// Completes a full reading, with itself as a sample for the peaks. `None` if the reading contradicts itself.
    pub fn reading(&mut self, began: RequestStart, raw: DriverReading) -> Option<(GpuReading, GpuSample)> {
        if !is_consistent(&raw.devices) {
            return None;
        }
        self.count_xids(&raw.xids);
        let mut devices = raw.devices;
        self.intern_identities(&mut devices);
        let errors = std::iter::zip(READ_ERROR_REASONS, raw.read_errors);
        let mut read_errors: Vec<_> = errors
            .flat_map(|(reason, count)| repeat_n(reason, (count as usize).min(MAX_READ_ERRORS)))
            .collect();
        let processes = devices.iter_mut().filter_map(|device| device.processes.as_mut()).flatten();
        let pids = self.pid_resolver.resolve(processes, began.uptime, &mut read_errors);
        for uuid in &raw.registered {
            self.counters.entry(Arc::clone(uuid)).or_default().init_xids_at_zero();
        }
        for device in devices.iter_mut().filter(|device| device.instance_of.is_none()) {
            self.add_counters(began.at, raw.registered.contains(&device.identity.uuid), device);
        }
        let at = Timestamp::now();
        let sample = GpuSample { at, devices: devices.iter().map(DeviceSample::of).collect() };
        let reading = GpuReading {
            source: "gpu",
            at,
            took: at.since(began.at),
            driver_version: self.versions.driver.clone(),
            cuda_version: self.versions.cuda.clone(),
            counted: raw.counted,
            silent: silent_gpus(&self.counters, &devices),
            devices,
            pids,
            read_errors,
        };
        Some((reading, sample))
    }

    /// Completes a memory sample.
    pub fn sample(&mut self, began: RequestStart, raw: DriverSample) -> GpuSample {
        self.count_xids(&raw.xids);
        let mut devices: Vec<_> = raw
            .devices
            .into_iter()
            .filter_map(|sampled| {
                let mut device = GpuDevice::new(Arc::clone(self.identities.get(&sampled.key)?));
                device.memory.used = sampled.used;
                let processes = sampled.processes.into_iter();
                device.processes = Some(processes.map(|(pid, used)| GpuProcess::new(pid, used)).collect());
                Some(device)
            })
            .collect();
        let processes = devices.iter_mut().filter_map(|device| device.processes.as_mut()).flatten();
        // the next full reading meets and counts the same errors
        self.pid_resolver.resolve_sample(processes, began.uptime, &mut Vec::new());
        GpuSample { at: Timestamp::now(), devices: devices.iter().map(DeviceSample::of).collect() }
    }

    /// Replaces identities that did not change by those of the previous reading, which are shared.
    fn intern_identities(&mut self, devices: &mut [GpuDevice]) {
        let known = std::mem::take(&mut self.identities);
        for device in devices {
            if let Some(known) = known.get(device.identity.key()).filter(|known| **known == device.identity) {
                device.identity = Arc::clone(known);
            }
            self.identities.insert(Arc::clone(device.identity.key()), Arc::clone(&device.identity));
        }
    }

    /// Adds the counters that memledger keeps to the metrics of a GPU.
    fn add_counters(&mut self, now: Timestamp, is_registered: bool, device: &mut GpuDevice) {
        let uuid = &device.identity.uuid;
        let counters: &mut DeviceCounters = self.counters.entry(Arc::clone(uuid)).or_default();
        counters.identity = Some(Arc::clone(&device.identity));
        let previous = self.throttle_read_at.remove(uuid);
        if let Some(mask) = device.health.throttle_mask {
            self.throttle_read_at.insert(Arc::clone(uuid), now);
            if let Some(previous) = previous {
                counters.throttle(mask, now.since(previous).min(self.max_gap));
            }
            device.health.throttle_seconds = Some(counters.throttle_seconds);
        }
        if is_registered {
            device.health.xids.clone_from(&counters.xids);
        }
    }
}

/// Returns whether each MIG instance comes after its GPU.
fn is_consistent(devices: &[GpuDevice]) -> bool {
    devices.iter().enumerate().all(|(position, device)| match device.instance_of {
        None => device.identity.instance.is_none(),
        Some(gpu) => {
            device.identity.instance.is_some() && gpu < position && devices[gpu].instance_of.is_none()
        }
    })
}

/// Returns the GPUs that have Xid counters and are not among these devices, in the order of their indices.
fn silent_gpus(counters: &CountersByGpu, devices: &[GpuDevice]) -> Vec<GpuDevice> {
    let silent = counters.iter().filter_map(|(uuid, counters)| {
        let identity = counters.identity.as_ref()?;
        let answers = devices.iter().any(|device| device.identity.uuid == *uuid);
        if answers || counters.xids.is_empty() {
            return None;
        }
        let mut device = GpuDevice::new(Arc::clone(identity));
        device.health.xids.clone_from(&counters.xids);
        Some(device)
    });
    let mut silent: Vec<_> = silent.collect();
    silent.sort_by(|a, b| (&a.identity.index, &a.identity.uuid).cmp(&(&b.identity.index, &b.identity.uuid)));
    silent
}
