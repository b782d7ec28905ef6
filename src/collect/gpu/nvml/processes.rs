//! Compute, graphics and MPS processes of a device.

use std::collections::BTreeMap;

use nvml_wrapper::Device as NvmlDevice;
use nvml_wrapper::error::NvmlError;

use super::dialect::Dialect;
use super::library::{error_may_pass, field};
use super::memory::MOST_MEMORY;
use super::raw::{List, Record};
use crate::collect::gpu::reading::GpuProcess;

/// Linux has no pids from here on (PID_MAX_LIMIT).
const PID_LIMIT: u32 = 1 << 22;

/// Which lists had an entry; a quick look leaves out the others.
pub type Lists = [bool; List::ALL.len()];

/// All lists.
pub const EVERY: Lists = [true; List::ALL.len()];

/// The processes of a device, and which lists they were in. Each pid once: a process in several lists holds its memory
/// once. `None` if the device tells none of these lists, or if one of them cannot be read now: the others are no sum.
/// `total` is all the memory that the device has.
///
/// # Errors
/// As [`field`].
pub fn read(
    device: &NvmlDevice<'_>,
    lists: Lists,
    total: Option<u64>,
    dialect: &mut Dialect,
    faults: &mut Vec<&'static str>,
) -> Result<(Option<Vec<GpuProcess>>, Lists), NvmlError> {
    let (mut told, mut filled, mut failed) = (None, [false; List::ALL.len()], false);
    for list in List::ALL.into_iter().filter(|list| lists[*list as usize]) {
        let answer = dialect.processes(device, list);
        if answer.as_ref().is_err_and(error_may_pass) {
            failed = true;
            filled[list as usize] = true; // it may well have an entry
        }
        if let Some(records) = field(answer, faults)? {
            filled[list as usize] = !records.is_empty();
            told.get_or_insert_with(Vec::new).extend(records);
        }
    }
    let Some(records) = told.filter(|_| !failed) else { return Ok((None, filled)) };
    let merged = merge(records, total.unwrap_or(MOST_MEMORY));
    if merged.is_none() {
        faults.push("malformed");
    }
    Ok((merged, filled))
}

/// Each pid once. `None` if a record is impossible, or all of them together hold more than there is: then the layout is
/// not the one we know, and all is garbage.
fn merge(records: Vec<Record>, most: u64) -> Option<Vec<GpuProcess>> {
    let mut by_pid: BTreeMap<u32, Option<u64>> = BTreeMap::new();
    for Record { pid, used } in records {
        if pid == 0 || pid >= PID_LIMIT || used.is_some_and(|used| used > most) {
            return None;
        }
        let entry = by_pid.entry(pid).or_insert(used);
        *entry = used.max(*entry);
    }
    let held = by_pid.values().flatten().try_fold(0_u64, |sum, used| sum.checked_add(*used))?;
    (held <= most).then(|| by_pid.into_iter().map(|(pid, used)| GpuProcess::new(pid, used)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_process_in_several_lists_holds_its_memory_once() {
        let record = |pid, used| Record { pid, used };
        let merged =
            merge(vec![record(7, Some(5)), record(8, None), record(7, Some(5)), record(7, None)], 10);
        assert_eq!(merged, Some(vec![GpuProcess::new(7, Some(5)), GpuProcess::new(8, None)]));
    }

    proptest! {
        #[test]
        fn no_impossible_process_is_ever_told(
            records in prop::collection::vec(
                (prop_oneof![1..1_u32 << 22, any::<u32>()],
                 prop_oneof![Just(None), (0..1_u64 << 40).prop_map(Some), any::<u64>().prop_map(Some)]), 0..6),
            most in 0..1_u64 << 42,
        ) {
            let records: Vec<_> = records.into_iter().map(|(pid, used)| Record { pid, used }).collect();
            let processes = merge(records, most);
            for process in processes.iter().flatten() {
                prop_assert!(process.pid < PID_LIMIT && process.used.is_none_or(|used| used <= most));
            }
            let held = processes.iter().flatten().filter_map(|process| process.used).map(u128::from).sum::<u128>();
            prop_assert!(held <= u128::from(most));
        }
    }
}
