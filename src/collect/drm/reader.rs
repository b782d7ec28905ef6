//! Reads the GPUs of DRM drivers, on a thread of its own.
//!
//! A thread is needed because the scan of the descriptors of all processes takes milliseconds, which a cycle must not
//! wait for, and because a driver may hang in any of these files. Duty cycle: at most 10 %, except where readings would
//! otherwise become too old to be exported.
//!
//! A thread that hangs is not replaced: another one would hang too.

use std::iter::{repeat_n, zip};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::client_memory::{self, CardClient, ProcessMemory};
use super::devices::{self, Card};
use super::drm_process::{DrmProcess, DrmProcesses};
use super::engines::{Engines, Work};
use super::fd_scanner::FdScanner;
use super::kfd;
use crate::clock::Timestamp;
use crate::collect::gpu::{
    DeviceMemory, DeviceSample, GpuDevice, GpuProcess, GpuReading, GpuSample, PidTrust, SharedOutput,
};
use crate::config::GpuSettings;
use crate::host::{HostPaths, ReadError};
use crate::parse::drm::DrmClient;

/// The pause after a reading, as a multiple of its duration.
const PAUSE_FACTOR: u32 = 9;
/// The pause after a panic.
const PANIC_PAUSE: Duration = Duration::from_secs(30);

const OTHER_PIDS: &str = "memledger does not run in the host's pid namespace";
const NO_PERMISSION: &str = "the open files of most processes cannot be read without CAP_SYS_PTRACE";

/// Reads the GPUs at every interval, for ever.
pub fn run(settings: &GpuSettings, host_paths: &HostPaths, cgroup_v1: bool, output: &SharedOutput) {
    let new = || DrmReader::new(host_paths.clone(), cgroup_v1);
    let mut reader = new();
    loop {
        let began = Timestamp::now();
        let is_sound = publish(output, || reader.read());
        let took = Timestamp::now().since(began);
        let mut pause = (took * PAUSE_FACTOR).min(settings.deadline / 2);
        if !is_sound {
            (reader, pause) = (new(), PANIC_PAUSE);
        }
        std::thread::sleep(settings.interval.saturating_sub(took).max(pause));
    }
}

/// Publishes the result of a reading. Returns false if it panicked.
fn publish(output: &SharedOutput, read: impl FnOnce() -> Result<Option<GpuReading>, ReadError>) -> bool {
    let read = catch_unwind(AssertUnwindSafe(read));
    let (mut output, is_sound) = (output.lock(), read.is_ok());
    if let Ok(Ok(Some(reading))) = read {
        let devices = reading.devices.iter().map(DeviceSample::of).collect();
        let sample = GpuSample { at: reading.at, is_dated: true, devices };
        output.publish(Some(Arc::new(reading)), vec![sample]);
        return true;
    }
    output.discard_readings(true);
    if let Ok(Err(error)) = read {
        tracing::debug!(%error, "reading DRM GPUs failed");
        output.count_errors(error.reason_label());
    }
    is_sound
}

/// Reads the GPUs, with the state that lasts from reading to reading.
#[derive(Debug)]
pub struct DrmReader {
    host_paths: HostPaths,
    cgroup_v1: bool,
    scanner: FdScanner,
    engines: Engines,
}

impl DrmReader {
    /// Returns a reader of this host.
    pub fn new(host_paths: HostPaths, cgroup_v1: bool) -> Self {
        let scanner = FdScanner::new(host_paths.clone(), cgroup_v1);
        Self { host_paths, cgroup_v1, scanner, engines: Engines::default() }
    }

    /// Reads all GPUs of DRM drivers; `None` if there are none.
    ///
    /// # Errors
    /// Devices or processes cannot be listed.
    pub fn read(&mut self) -> Result<Option<GpuReading>, ReadError> {
        let (began, mut read_errors) = (Timestamp::now(), Vec::new());
        let cards = devices::list(&self.host_paths, &mut read_errors)?;
        if cards.is_empty() {
            return Ok(None);
        }
        let pids = self.scan(&mut read_errors)?;
        // read before and after the processes, so that what they free or allocate meanwhile is no contradiction
        let before: Vec<_> = cards.iter().map(|card| card.memory(&mut Vec::new())).collect();
        let processes = self.processes(pids, &mut read_errors);
        let at = Timestamp::now();
        let is_complete = pids == PidTrust::Trusted && self.scanner.access().1 == 0;
        let has_all_work = is_complete && processes.values().all(DrmProcess::has_all_work);
        let mut devices = Vec::new();
        for (card, before) in zip(&cards, before) {
            let after = card.memory(&mut read_errors);
            let held = held(card, &processes);
            let memory = choose(before, after, client_memory::sum(&held));
            let clients = clients(card, &processes);
            let malformed = clients.iter().map(|(_, client)| client.malformed).sum();
            read_errors.extend(repeat_n("malformed", malformed));
            let work = self.engines.work(&card.identity.uuid, &client_memory::clients(&clients), at);
            let mut device = device(card, memory, &held, &processes, &work);
            read_errors.extend(device.processes.is_none().then_some("malformed"));
            device.processes = device.processes.filter(|_| pids == PidTrust::Trusted);
            device.health = card.health(&mut read_errors);
            let busy = device.health.utilization.or(work.busy.filter(|_| has_all_work));
            device.health.utilization = busy;
            devices.push(device);
        }
        self.engines.end_reading();
        Ok(Some(GpuReading {
            source: super::NAME,
            at,
            took: Timestamp::now().since(began),
            driver_version: None,
            cuda_version: None,
            counted: cards.len(),
            devices,
            silent: vec![],
            pids,
            read_errors,
        }))
    }

    /// Scans the processes, and returns whether they can be attributed.
    fn scan(&mut self, read_errors: &mut Vec<&'static str>) -> Result<PidTrust, ReadError> {
        if !self.host_paths.in_initial_pid_namespace() {
            return Ok(PidTrust::Untrusted(OTHER_PIDS));
        }
        self.scanner.scan(read_errors)?;
        let (readable, denied) = self.scanner.access();
        // if most processes are unreadable, it is unknown which of them have a GPU open; a few change little
        Ok(if denied > readable { PidTrust::Untrusted(NO_PERMISSION) } else { PidTrust::Trusted })
    }

    /// Reads the processes; none if they cannot be attributed.
    fn processes(&mut self, pids: PidTrust, read_errors: &mut Vec<&'static str>) -> DrmProcesses {
        if pids != PidTrust::Trusted {
            return DrmProcesses::new();
        }
        let mut processes = self.scanner.read(read_errors);
        kfd::add_processes(&mut processes, &self.host_paths, self.cgroup_v1, read_errors);
        processes
    }
}

/// Returns the clients of a card.
fn clients<'a>(card: &Card, processes: &'a DrmProcesses) -> Vec<CardClient<'a>> {
    let mut clients = Vec::new();
    for (key, process) in processes {
        let on_card = |(node, client): &&(String, DrmClient)| card.is_of(node, client.pdev.as_deref());
        clients.extend(process.descriptors.iter().filter(on_card).map(|(_, client)| (*key, client)));
    }
    clients
}

/// Returns the memory of the processes on a card.
fn held(card: &Card, processes: &DrmProcesses) -> ProcessMemory {
    let mut held = client_memory::sum_clients(&clients(card, processes));
    for (key, process) in processes {
        for (_, bytes) in process.computing.iter().flatten().filter(|(node, _)| card.is_of(node, None)) {
            client_memory::add_computing(&mut held, *key, *bytes);
        }
    }
    held
}

/// Returns the memory of a device as it was after its processes were read, or before if they freed some of it since.
fn choose(before: DeviceMemory, after: DeviceMemory, of_processes: u64) -> DeviceMemory {
    let has_freed = after.used.is_some_and(|used| of_processes > used);
    if has_freed && before.used > after.used { before } else { after }
}

/// Returns a device without its health; without processes if they have more than there is, so that the values mean something else.
fn device(
    card: &Card,
    memory: DeviceMemory,
    held: &ProcessMemory,
    processes: &DrmProcesses,
    work: &Work,
) -> GpuDevice {
    let exceeds = |bytes: Option<u64>| bytes.is_some_and(|bytes| client_memory::sum(held) > bytes);
    let mut listed = Vec::new();
    for (key, used) in held {
        let process = processes.get(key);
        let busy = work.by_process.get(key).copied();
        listed.push(GpuProcess {
            busy: busy.filter(|_| process.is_some_and(DrmProcess::has_all_work)),
            owner: process.map(|process| process.owner.clone()),
            ..GpuProcess::new(key.pid, *used)
        });
    }
    listed.sort_by_key(|process| process.pid);
    GpuDevice {
        memory,
        processes: (!exceeds(memory.total)).then_some(listed),
        raced: exceeds(memory.used) && !exceeds(memory.total),
        ..GpuDevice::new(Arc::clone(&card.identity))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_a_process_frees_before_or_after_it_is_read_is_no_conflict() {
        let used = |bytes| DeviceMemory { used: Some(bytes), ..DeviceMemory::default() };
        assert_eq!(choose(used(9), used(4), 4).used, Some(4), "freed before");
        assert_eq!(choose(used(9), used(4), 9).used, Some(9), "freed after");
        assert_eq!(choose(used(4), used(9), 9).used, Some(9), "allocated before");
    }

    #[test]
    fn panic_costs_its_reading_and_counts_as_a_failure() {
        let output = SharedOutput::default();
        let reading = || -> Result<Option<GpuReading>, ReadError> {
            Ok(Some(GpuReading {
                source: "drm",
                at: Timestamp::now(),
                took: Duration::ZERO,
                driver_version: None,
                cuda_version: None,
                counted: 0,
                devices: vec![],
                silent: vec![],
                pids: PidTrust::Trusted,
                read_errors: vec!["io"],
            }))
        };
        assert!(publish(&output, reading));
        assert!(!publish(&output, || panic!("a bug")));
        let taken = output.lock().take();
        assert!(taken.latest.is_none() && taken.samples.is_empty() && taken.has_answered);
        assert!(publish(&output, reading));
        let taken = output.lock().take();
        assert!(taken.latest.is_some() && taken.samples.len() == 1);
        assert!(publish(&output, || Err(ReadError::malformed("proc"))));
        let taken = output.lock().take();
        assert!(taken.latest.is_none());
        assert_eq!(taken.read_errors, ["malformed"]);
        assert!(publish(&output, || Ok(None)));
        assert_eq!(output.lock().take().read_errors, [""; 0], "a host without a GPU is no error");
    }
}
