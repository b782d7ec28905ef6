//! The compute, graphics and MPS processes of a device.

use std::collections::{BTreeMap, BTreeSet};

use nvml_wrapper::Device as NvmlDevice;
use nvml_wrapper::error::NvmlError;

use super::api_versions::ApiVersions;
use super::ffi::{NvmlProcess, ProcessListKind};
use super::library::{field, is_dropped, is_transient};
use crate::gpu::types::GpuProcess;
use crate::parse::MAX_GPU_MEMORY;

/// Pids are below this (PID_MAX_LIMIT of Linux).
const PID_LIMIT: u32 = 1 << 22;

/// Which lists had an entry; memory samples skip the others.
pub type Lists = [bool; ProcessListKind::ALL.len()];

/// All lists.
pub const EVERY: Lists = [true; ProcessListKind::ALL.len()];

/// Reads the processes of a device, and which lists contained them. Each pid appears once: a process in several lists holds
/// its memory once. `None` if the device reports none of these lists, or if one of them cannot be read now: the others are
/// no sum. `None` too if a record is impossible and the driver's layout may be unknown: then all records may be garbage.
/// `total` is the device's total memory.
///
/// # Errors
/// As [`field`].
pub fn read(
    device: &NvmlDevice<'_>,
    lists: Lists,
    total: Option<u64>,
    api_versions: &mut ApiVersions,
    read_errors: &mut Vec<&'static str>,
) -> Result<(Option<Vec<GpuProcess>>, Lists), NvmlError> {
    let (mut records, mut filled, mut has_failed) = (None, [false; ProcessListKind::ALL.len()], false);
    let mut is_layout_known = true;
    for list in ProcessListKind::ALL.into_iter().filter(|list| lists[*list as usize]) {
        let result = api_versions.processes(device, list);
        // the other lists alone would be a sum without those that compute
        let is_compute_dropped = |error| is_dropped(error) && list == ProcessListKind::Compute;
        if result.as_ref().is_err_and(|error| is_transient(error) || is_compute_dropped(error)) {
            has_failed = true;
            filled[list as usize] = true; // it may have an entry
        }
        if let Some(result) = field(result, read_errors)? {
            filled[list as usize] = !result.records.is_empty();
            is_layout_known &= result.is_layout_known;
            records.get_or_insert_with(Vec::new).extend(result.records);
        }
    }
    let Some(records) = records.filter(|_| !has_failed) else { return Ok((None, filled)) };
    let merged = merge(records, total.unwrap_or(MAX_GPU_MEMORY));
    if merged.is_malformed {
        read_errors.push("malformed");
    }
    let is_valid = is_layout_known || !merged.is_malformed;
    Ok((is_valid.then_some(merged.processes), filled))
}

/// The processes of all lists.
struct Merged {
    processes: Vec<GpuProcess>,
    /// Whether a record or the sum of all is impossible.
    is_malformed: bool,
}

/// Merges the records by pid and drops impossible memory, which stays unattributed.
///
/// A record without a possible pid is dropped. A process that holds more than `max_bytes` has unknown memory. If the sum is
/// more than `max_bytes`, it is unknown which record is wrong. Then the memory is unknown of each record that could be the
/// only wrong one, that is, without which the others would fit.
fn merge(records: Vec<NvmlProcess>, max_bytes: u64) -> Merged {
    let mut by_pid: BTreeMap<u32, Option<u64>> = BTreeMap::new();
    let mut impossible = BTreeSet::new();
    let mut is_malformed = false;
    for NvmlProcess { pid, used } in records {
        if pid == 0 || pid >= PID_LIMIT {
            is_malformed = true;
            continue;
        }
        if used.is_some_and(|used| used > max_bytes) {
            impossible.insert(pid);
        }
        let entry = by_pid.entry(pid).or_insert(used);
        *entry = used.max(*entry);
    }
    for pid in &impossible {
        by_pid.insert(*pid, None);
    }
    let held: u128 = by_pid.values().flatten().map(|used| u128::from(*used)).sum();
    let max_bytes = u128::from(max_bytes);
    if held > max_bytes {
        is_malformed = true;
        let largest = by_pid.values().flatten().max().copied().unwrap_or_default();
        // no single record explains it: then the memory of all is unknown
        let suspect_from = if held - u128::from(largest) > max_bytes { 0 } else { held - max_bytes };
        for used in by_pid.values_mut() {
            *used = used.filter(|used| u128::from(*used) < suspect_from);
        }
    }
    is_malformed |= !impossible.is_empty();
    Merged {
        processes: by_pid.into_iter().map(|(pid, used)| GpuProcess::new(pid, used)).collect(),
        is_malformed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn counts_a_process_in_several_lists_once() {
        let record = |pid, used| NvmlProcess { pid, used };
        let merged =
            merge(vec![record(7, Some(5)), record(8, None), record(7, Some(5)), record(7, None)], 10);
        assert_eq!(merged.processes, [GpuProcess::new(7, Some(5)), GpuProcess::new(8, None)]);
        assert!(!merged.is_malformed);
    }

    #[test]
    fn impossible_record_hides_no_other() {
        let of = |records: &[(u32, Option<u64>)]| {
            let merged =
                merge(records.iter().map(|(pid, used)| NvmlProcess { pid: *pid, used: *used }).collect(), 80);
            assert!(merged.is_malformed, "{records:?}");
            merged.processes.iter().map(|process| (process.pid, process.used)).collect::<Vec<_>>()
        };
        assert_eq!(of(&[(7, Some(5)), (0, Some(3)), (8, None)]), [(7, Some(5)), (8, None)]);
        assert_eq!(of(&[(7, Some(5)), (u32::MAX, None)]), [(7, Some(5))]);
        assert_eq!(of(&[(7, Some(5)), (8, Some(81))]), [(7, Some(5)), (8, None)]);
        assert_eq!(of(&[(7, Some(5)), (8, Some(81)), (8, Some(2))]), [(7, Some(5)), (8, None)]);
        // 50 or 45 may be the only wrong one, 5 cannot be
        assert_eq!(of(&[(7, Some(50)), (8, Some(45)), (9, Some(5))]), [(7, None), (8, None), (9, Some(5))]);
        assert_eq!(of(&[(7, Some(79)), (8, Some(2))]), [(7, None), (8, None)]);
        assert_eq!(of(&[(7, Some(79)), (8, Some(70)), (9, Some(78))]), [(7, None), (8, None), (9, None)]);
    }

    proptest! {
        #[test]
        fn never_reports_an_impossible_process(
            records in prop::collection::vec(
                (prop_oneof![1..1_u32 << 22, any::<u32>()],
                 prop_oneof![Just(None), (0..1_u64 << 40).prop_map(Some), any::<u64>().prop_map(Some)]), 0..6),
            max_bytes in 0..1_u64 << 42,
        ) {
            let records: Vec<_> = records.into_iter().map(|(pid, used)| NvmlProcess { pid, used }).collect();
            let processes = merge(records, max_bytes).processes;
            for process in &processes {
                prop_assert!(process.pid < PID_LIMIT && process.used.is_none_or(|used| used <= max_bytes));
            }
            let held = processes.iter().filter_map(|process| process.used).map(u128::from).sum::<u128>();
            prop_assert!(held <= u128::from(max_bytes));
        }
    }
}
