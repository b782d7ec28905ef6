//! Turns what the NVML process sends into readings: finds the owners of processes, and keeps what lasts longer than that
//! process (counters, the trust in pids, peaks of the driver's accounting).

use std::collections::HashMap;
use std::iter::repeat_n;
use std::sync::Arc;
use std::time::Duration;

use super::device_metrics::{CountersByGpu, DeviceCounters};
use super::pid_resolver::{PidResolver, uptime_ticks};
use super::protocol::{DriverReading, DriverSample, DriverVersions, EndedProcess};
use super::types::{DeviceSample, GpuDevice, GpuIdentity, GpuProcess, GpuReading, GpuSample, ProcessOwner};
use crate::clock::Timestamp;
use crate::host::{HostPaths, READ_ERROR_REASONS};

/// Read errors of one reading, and of one cycle, that are kept.
pub(super) const MAX_READ_ERRORS: usize = 1_000;
/// How long the owner of a process is kept after the driver stopped listing it: its record may come late.
const OWNER_TIMEOUT: Duration = Duration::from_secs(90);
/// Maximum difference of the clocks of the driver and of `/proc`, whose boot time is in whole seconds.
const CLOCK_SLACK_US: u64 = 2_000_000;
/// A start time before 2001 is missing, or not by the Unix clock.
const MIN_UNIX_US: u64 = 1_000_000_000_000_000;

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
    host_paths: HostPaths,
    pid_resolver: PidResolver,
    versions: DriverVersions,
    counters: CountersByGpu,
    /// When the throttle reasons of each GPU were read last, in this session.
    throttle_read_at: HashMap<Arc<str>, Timestamp>,
    /// A throttle reason of a reading counts for the time since the previous reading, up to this.
    max_gap: Duration,
    /// The devices of the last full reading by UUID.
    identities: HashMap<Arc<str>, Arc<GpuIdentity>>,
    owners: HashMap<(Arc<str>, u32), ListedOwner>,
}

/// The owner of a process that the driver's accounting has a record of.
#[derive(Debug)]
struct ListedOwner {
    owner: ProcessOwner,
    last_listed: Timestamp,
    /// Its start in microseconds of the Unix clock.
    start_us: Option<u64>,
}

impl Assembler {
    /// Returns an empty state. Two readings are at most `max_gap` apart, unless a call hangs.
    pub fn new(host_paths: HostPaths, cgroup_v1: bool, max_gap: Duration) -> Self {
        Self {
            pid_resolver: PidResolver::new(host_paths.clone(), cgroup_v1),
            host_paths,
            versions: DriverVersions::default(),
            counters: CountersByGpu::new(),
            throttle_read_at: HashMap::new(),
            max_gap,
            identities: HashMap::new(),
            owners: HashMap::new(),
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

    /// Completes a full reading. The samples are those for the peaks: the driver's peaks of processes that have ended, and
    /// the reading itself. `None` if the reading contradicts itself.
    pub fn reading(
        &mut self,
        began: RequestStart,
        raw: DriverReading,
    ) -> Option<(GpuReading, Vec<GpuSample>)> {
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
        let mut samples: Vec<_> =
            raw.ended.iter().filter_map(|ended| self.sample_of_ended(at, ended)).collect();
        if raw.has_accounting {
            self.remember_owners(at, &mut devices);
        }
        let current = devices.iter().map(DeviceSample::of).collect();
        samples.push(GpuSample { at, is_dated: true, devices: current });
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
        Some((reading, samples))
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
        GpuSample {
            at: Timestamp::now(),
            is_dated: true,
            devices: devices.iter().map(DeviceSample::of).collect(),
        }
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

    /// Returns the driver's peak of an ended process as a sample, if its owner is known and started early enough.
    fn sample_of_ended(&self, at: Timestamp, ended: &EndedProcess) -> Option<GpuSample> {
        let listed = self.owners.get(&(Arc::clone(&ended.gpu_uuid), ended.pid))?;
        let identity = Arc::clone(self.identities.get(&ended.gpu_uuid)?);
        let holders = vec![(ended.pid, listed.owner.clone(), ended.peak)];
        let device = DeviceSample { identity, used: None, holders, silent: vec![] };
        matches_start(ended.start_us, listed.start_us).then(|| GpuSample {
            at,
            is_dated: false,
            devices: vec![device],
        })
    }

    /// Remembers the owners of processes that the driver's accounting records. A peak of a process that started earlier
    /// than its owner belongs to an earlier process with the same pid, and is removed.
    fn remember_owners(&mut self, now: Timestamp, devices: &mut [GpuDevice]) {
        self.owners.retain(|_, listed| now.since(listed.last_listed) < OWNER_TIMEOUT);
        let mut boot_time = None;
        for device in devices {
            let uuid = &device.identity.uuid;
            for process in device.processes.iter_mut().flatten() {
                let Some(owner) = &process.owner else { continue };
                let boot_time = *boot_time.get_or_insert_with(|| self.host_paths.boot_time().ok());
                let ticks = rustix::param::clock_ticks_per_second().max(1);
                let start_us = boot_time.map(|boot| boot * 1_000_000 + owner.start_ticks * 1_000_000 / ticks);
                if process.recorded_start_us.is_some_and(|recorded| !matches_start(recorded, start_us)) {
                    process.driver_peak = None;
                }
                let listed = ListedOwner { owner: owner.clone(), last_listed: now, start_us };
                self.owners.insert((Arc::clone(uuid), process.pid), listed);
            }
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

/// Returns whether a driver's record matches a process with this start: a process reaches the GPU after its start.
fn matches_start(recorded_us: u64, start_us: Option<u64>) -> bool {
    recorded_us < MIN_UNIX_US || start_us.is_none_or(|start| recorded_us + CLOCK_SLACK_US >= start)
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
