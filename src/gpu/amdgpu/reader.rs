//! Reads the GPUs of AMD, on a thread of its own: a driver may hang in any of these files.
//!
//! A thread that hangs is not replaced: another one would hang too.

use std::iter::zip;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::devices::{self, Card};
use super::kfd::{self, ComputeProcess};
use crate::clock::Timestamp;
use crate::gpu::{
    DeviceMemory, DeviceSample, GpuDevice, GpuProcess, GpuReading, GpuSample, PidTrust, SharedOutput,
};
use crate::host::{HostPaths, ReadError};

/// The pause after a panic.
const PANIC_PAUSE: Duration = Duration::from_secs(30);

const OTHER_PIDS: &str = "memledger does not run in the host's pid namespace";

/// Reads the GPUs at every interval, for ever.
pub fn run(interval: Duration, host_paths: &HostPaths, cgroup_v1: bool, output: &SharedOutput) {
    loop {
        let began = Timestamp::now();
        let is_sound = publish(output, || read(host_paths, cgroup_v1));
        let took = Timestamp::now().since(began);
        std::thread::sleep(if is_sound { interval.saturating_sub(took).max(took) } else { PANIC_PAUSE });
    }
}

/// Publishes the result of a reading. Returns false if it panicked.
fn publish(output: &SharedOutput, read: impl FnOnce() -> Result<Option<GpuReading>, ReadError>) -> bool {
    let read = catch_unwind(AssertUnwindSafe(read));
    let (mut output, is_sound) = (output.lock(), read.is_ok());
    if let Ok(Ok(Some(reading))) = read {
        let devices = reading.devices.iter().map(DeviceSample::of).collect();
        let sample = GpuSample { at: reading.at, devices };
        output.publish(Some(Arc::new(reading)), sample);
        return true;
    }
    output.discard_readings(true);
    if let Ok(Err(error)) = read {
        tracing::debug!(%error, "reading AMD GPUs failed");
        output.count_errors(error.reason_label());
    }
    is_sound
}

/// Reads all GPUs of AMD; `None` if there are none.
fn read(host_paths: &HostPaths, cgroup_v1: bool) -> Result<Option<GpuReading>, ReadError> {
    let (began, mut read_errors) = (Timestamp::now(), Vec::new());
    let cards = devices::list(host_paths, &mut read_errors)?;
    if cards.is_empty() {
        return Ok(None);
    }
    // read before and after the processes, so that what they free or allocate meanwhile is no contradiction
    let before: Vec<_> = cards.iter().map(|card| card.memory(&mut Vec::new())).collect();
    let is_trusted = host_paths.in_initial_pid_namespace();
    let processes = match is_trusted {
        true => kfd::processes(host_paths, cgroup_v1, &mut read_errors),
        false => None,
    };
    let at = Timestamp::now();
    let mut devices = Vec::new();
    for (card, before) in zip(&cards, before) {
        let after = card.memory(&mut read_errors);
        let processes = processes.as_ref().map(|processes| on_card(card, processes));
        let mut device = device(card, before, after, processes, &mut read_errors);
        device.health = card.health(&mut read_errors);
        devices.push(device);
    }
    Ok(Some(GpuReading {
        source: super::NAME,
        at,
        took: Timestamp::now().since(began),
        driver_version: None,
        cuda_version: None,
        counted: cards.len(),
        devices,
        silent: vec![],
        pids: if is_trusted { PidTrust::Trusted } else { PidTrust::Untrusted(OTHER_PIDS) },
        read_errors,
    }))
}

/// Returns the processes with memory on a card.
fn on_card(card: &Card, processes: &[ComputeProcess]) -> Vec<GpuProcess> {
    let on_card = |process: &ComputeProcess| {
        let parts = process.memory.iter().filter(|(node, _)| card.nodes.contains(node));
        let used = parts.map(|(_, bytes)| bytes).sum();
        let owner = Some(process.facts.clone());
        (used > 0).then(|| GpuProcess { owner, ..GpuProcess::new(process.facts.id.pid, Some(used)) })
    };
    processes.iter().filter_map(on_card).collect()
}

/// Returns a device without its health; without processes if they have more than there is, so that the values mean something else.
fn device(
    card: &Card,
    before: DeviceMemory,
    after: DeviceMemory,
    processes: Option<Vec<GpuProcess>>,
    read_errors: &mut Vec<&'static str>,
) -> GpuDevice {
    let sum: u64 = processes.iter().flatten().filter_map(|process| process.used).sum();
    let exceeds = |bytes: Option<u64>| bytes.is_some_and(|bytes| sum > bytes);
    let has_freed = exceeds(after.used) && before.used > after.used;
    let memory = if has_freed { before } else { after };
    let is_impossible = exceeds(memory.total);
    read_errors.extend(is_impossible.then_some("malformed"));
    GpuDevice {
        memory,
        processes: processes.filter(|_| !is_impossible),
        raced: exceeds(memory.used) && !is_impossible,
        ..GpuDevice::new(Arc::clone(&card.identity))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_a_process_frees_before_or_after_it_is_read_is_no_conflict() {
        let used = |bytes| DeviceMemory { used: Some(bytes), ..DeviceMemory::default() };
        let card = Card::with_node("renderD128");
        let device_used = |before, after, held| {
            let processes = vec![GpuProcess::new(7, Some(held))];
            let device = device(&card, used(before), used(after), Some(processes), &mut vec![]);
            (device.memory.used, device.raced)
        };
        assert_eq!(device_used(9, 4, 4), (Some(4), false), "freed before");
        assert_eq!(device_used(9, 4, 9), (Some(9), false), "freed after");
        assert_eq!(device_used(4, 9, 9), (Some(9), false), "allocated before");
        assert_eq!(device_used(4, 4, 9), (Some(4), true));
    }

    #[test]
    fn panic_costs_its_reading_and_counts_as_a_failure() {
        let output = SharedOutput::default();
        let reading = || -> Result<Option<GpuReading>, ReadError> {
            Ok(Some(GpuReading {
                source: super::super::NAME,
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
