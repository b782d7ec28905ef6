//! Computes the memory of each process on a GPU from its descriptors and clients, with nothing counted twice.
//!
//! * **Several descriptors are one client** if they have the same `drm-client-id`: duplicates in a process, and descriptors
//!   that a fork inherits. The client counts once, for the oldest process that has it open: a fork is younger than the
//!   process that opened the device. Without an id that is unknown, and the memory is absent.
//! * **Used is resident memory on the device**: regions named `vram...`, `local...`, `stolen-local...`. A GPU whose clients
//!   have no such region shares the host's memory: there, all regions count, and the sum is a part of the host's memory.
//! * **A buffer that several clients share counts once**: each of them reports it, and nothing identifies the buffer. The
//!   client with the most shared memory on a GPU counts in full, the others only with their unshared memory. So the sum is
//!   never more than the memory that is used; the difference stays unattributed.
//!
//! Pure: no I/O, no clock.

use std::collections::{BTreeMap, HashSet};

use super::drm_process::DrmProcessKey;
use crate::parse::drm::DrmClient;

/// A client on one GPU, with a process that has it open.
pub type CardClient<'a> = (DrmProcessKey, &'a DrmClient);

/// The memory of the processes on one GPU, in bytes; `None` if a part is unknown. Processes without memory are omitted.
pub type ProcessMemory = BTreeMap<DrmProcessKey, Option<u64>>;

/// Returns true for the GPU's own memory.
fn is_local(region: &[u8]) -> bool {
    let base = region.strip_prefix(b"stolen-").unwrap_or(region);
    let letters = base.iter().position(u8::is_ascii_digit).unwrap_or(base.len());
    base[letters..].iter().all(u8::is_ascii_digit) && matches!(&base[..letters], b"vram" | b"local")
}

/// Returns each client once, with the process for which it counts, and all descriptors without an id.
pub fn clients<'a>(descriptors: &[CardClient<'a>]) -> Vec<CardClient<'a>> {
    let mut all = descriptors.to_vec();
    all.sort_by_key(|(process, _)| *process);
    let mut known = HashSet::new();
    all.retain(|(_, client)| client.id.as_ref().is_none_or(|id| known.insert(id)));
    all
}

/// Returns the memory of the processes on one GPU, from all its descriptors.
pub fn sum_clients(descriptors: &[CardClient<'_>]) -> ProcessMemory {
    let mut regions = descriptors.iter().flat_map(|(_, client)| client.regions.keys());
    let own_memory = regions.any(|region| is_local(region));
    let mut held = ProcessMemory::new();
    let (mut most_shared, mut sharer) = (0, None);
    for (process, client) in clients(descriptors) {
        let memory = memory_of(client, own_memory);
        if memory.is_some_and(|(resident, _)| resident == 0) {
            continue;
        }
        // without an id it is unknown whether the client was counted already
        let memory = memory.filter(|_| client.id.is_some());
        let sum = held.entry(process).or_insert(Some(0));
        *sum = sum.zip(memory).map(|(sum, (resident, shared))| sum.saturating_add(resident - shared));
        let shared = memory.map_or(0, |(_, shared)| shared);
        if shared > most_shared {
            (most_shared, sharer) = (shared, Some(process)); // of equals, the oldest
        }
    }
    if let Some(sum) = sharer.and_then(|process| held.get_mut(&process)) {
        *sum = sum.map(|sum| sum.saturating_add(most_shared));
    }
    held
}

/// Returns the resident memory of the regions that count, and how much of it is shared with other clients at most; `None` if
/// there are none, or one does not report it.
fn memory_of(client: &DrmClient, own_memory: bool) -> Option<(u64, u64)> {
    let counted = client.regions.iter().filter(|(name, _)| !own_memory || is_local(name));
    let memory = counted.map(|(_, region)| {
        let resident = region.resident()?;
        // `shared` includes buffers that are not resident; kernels without it do not report which buffers are shared
        Some((resident, region.shared.unwrap_or(0).min(resident)))
    });
    let add = |a: (u64, u64), b: (u64, u64)| (a.0.saturating_add(b.0), a.1.saturating_add(b.1));
    memory.reduce(|a, b| Some(add(a?, b?)))?
}

/// Adds the memory that a process allocated for computing. Its fdinfo contains that too, if it could be read.
pub fn add_computing(held: &mut ProcessMemory, process: DrmProcessKey, bytes: u64) {
    if bytes > 0 {
        let known = held.entry(process).or_default();
        *known = Some(known.map_or(bytes, |known| known.max(bytes)));
    }
}

/// Returns the sum of all known values.
pub fn sum(held: &ProcessMemory) -> u64 {
    held.values().flatten().fold(0, |sum, bytes| sum.saturating_add(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A descriptor of a process.
    type Descriptor = (DrmProcessKey, DrmClient);

    fn key(pid: u32) -> DrmProcessKey {
        DrmProcessKey { start_ticks: u64::from(pid), pid }
    }

    /// Returns a descriptor of client `id` in process `pid`, with these lines of its fdinfo.
    fn descriptor(pid: u32, id: Option<u32>, lines: &str) -> Descriptor {
        let id = id.map_or_else(String::new, |id| format!("drm-client-id: {id}\n"));
        (key(pid), DrmClient::parse(format!("drm-driver: amdgpu\n{id}{lines}").as_bytes()).unwrap())
    }

    fn vram(pid: u32, id: u32, resident: u64, shared: u64) -> Descriptor {
        let lines =
            format!("drm-resident-vram: {resident}\ndrm-shared-vram: {shared}\ndrm-resident-gtt: 5\n");
        descriptor(pid, Some(id), &lines)
    }

    fn borrowed(descriptors: &[Descriptor]) -> Vec<CardClient<'_>> {
        descriptors.iter().map(|(process, client)| (*process, client)).collect()
    }

    fn held(descriptors: &[Descriptor]) -> Vec<(u32, Option<u64>)> {
        let descriptors = borrowed(descriptors);
        let held = sum_clients(&descriptors);
        held.into_iter().map(|(key, bytes)| (key.pid, bytes)).collect()
    }

    #[test]
    fn counts_a_client_once_and_adds_the_clients_of_a_process() {
        let all = [vram(7, 1, 100, 0), vram(7, 1, 100, 0), vram(7, 2, 30, 0)];
        assert_eq!(held(&all), [(7, Some(130))]);
    }

    #[test]
    fn inherited_client_counts_for_the_parent() {
        let all = [vram(9, 1, 100, 0), vram(7, 1, 100, 0), vram(8, 1, 100, 0), vram(9, 2, 10, 0)];
        assert_eq!(held(&all), [(7, Some(100)), (9, Some(10))]);
    }

    #[test]
    fn inherited_client_counts_for_the_fork_once_the_parent_has_ended() {
        assert_eq!(held(&[vram(9, 1, 100, 0), vram(8, 1, 100, 0)]), [(8, Some(100))]);
    }

    #[test]
    fn counts_only_device_memory_if_there_is_any() {
        for region in ["vram", "vram0", "vram1", "local0", "stolen-local0"] {
            let lines =
                format!("drm-resident-{region}: 7\ndrm-resident-system: 100\ndrm-resident-stolen: 3\n");
            assert_eq!(held(&[descriptor(7, Some(1), &lines)]), [(7, Some(7))], "{region}");
        }
        for region in ["system0", "stolen-system0", "gtt", "memory", "cpu", "vramx", "local-x", "localized"] {
            let lines = format!("drm-resident-{region}: 7\ndrm-resident-system: 100\n");
            assert_eq!(held(&[descriptor(7, Some(1), &lines)]), [(7, Some(107))], "{region} is the host's");
        }
    }

    #[test]
    fn zero_is_omitted_and_missing_has_no_value() {
        assert_eq!(held(&[vram(7, 1, 0, 0)]), []);
        let without_resident = descriptor(8, Some(2), "drm-total-vram: 100\n");
        assert_eq!(held(&[vram(7, 1, 5, 0), without_resident]), [(7, Some(5)), (8, None)]);
    }

    #[test]
    fn memory_without_a_client_id_is_unknown() {
        let all = [descriptor(7, None, "drm-memory-vram: 5\n"), descriptor(8, None, "drm-memory-vram: 5\n")];
        assert_eq!(held(&all), [(7, None), (8, None)]);
        assert_eq!(held(&[descriptor(7, None, "drm-memory-vram: 0\n")]), []);
    }

    #[test]
    fn shared_memory_of_an_only_sharer_counts_in_full() {
        // some drivers mark all memory that was ever exported
        assert_eq!(held(&[vram(7, 1, 100, 100), vram(8, 2, 40, 0)]), [(7, Some(100)), (8, Some(40))]);
    }

    #[test]
    fn shared_memory_counts_for_the_largest_sharer() {
        let compositor = vram(7, 1, 500, 300);
        let all = [compositor, vram(8, 2, 250, 100), vram(9, 3, 80, 80)];
        assert_eq!(held(&all), [(7, Some(500)), (8, Some(150)), (9, Some(0))]);
        let alike = [vram(8, 2, 100, 100), vram(7, 1, 100, 100)];
        assert_eq!(held(&alike), [(7, Some(100)), (8, Some(0))], "of equals the oldest");
    }

    #[test]
    fn shared_buffers_that_are_not_resident_subtract_nothing() {
        assert_eq!(held(&[vram(7, 1, 500, 900), vram(8, 2, 100, 300)]), [(7, Some(500)), (8, Some(0))]);
        assert_eq!(held(&[vram(7, 1, 100, 0), vram(8, 2, 100, 300)]), [(7, Some(100)), (8, Some(100))]);
    }

    #[test]
    fn unknown_memory_is_in_no_sum() {
        let held = BTreeMap::from([(key(7), None), (key(8), Some(30)), (key(9), None)]);
        assert_eq!(sum(&held), 30);
    }

    #[test]
    fn computing_memory_counts_once_and_where_fdinfo_is_unknown() {
        let mut held = sum_clients(&borrowed(&[vram(7, 1, 100, 0), vram(8, 2, 30, 0)]));
        held.insert(key(8), None);
        for (pid, bytes) in [(7, 90), (8, 25), (9, 40), (10, 0)] {
            add_computing(&mut held, key(pid), bytes);
        }
        let wanted = [(7, 100), (8, 25), (9, 40)].map(|(pid, bytes)| (key(pid), Some(bytes)));
        assert_eq!(held, BTreeMap::from(wanted));
    }

    #[test]
    fn sentinel_is_malformed() {
        for bytes in [u64::MAX, (1 << 50) + 1] {
            let client = vram(7, 1, bytes, 0);
            assert_eq!((client.1.malformed, held(&[client])), (1, vec![(7, None)]));
        }
    }

    proptest! {
        /// Buffers of random sizes, each held by some of the clients; each client by some of the processes.
        #[test]
        fn sum_never_exceeds_existing_memory(
            buffers in proptest::collection::vec((0_u64..1 << 40, 1_u8..32), 0..12),
            holders in proptest::collection::vec((0_u32..5, 1_u32..6), 0..20),
        ) {
            let existing: u64 = buffers.iter().map(|(bytes, _)| bytes).sum();
            let of = |client: u32| {
                let mine = buffers.iter().filter(|(_, who)| who & (1 << client) != 0);
                let (mut resident, mut shared) = (0, 0);
                for (bytes, who) in mine {
                    resident += bytes;
                    shared += if who.count_ones() > 1 { *bytes } else { 0 };
                }
                (resident, shared)
            };
            let all: Vec<_> = holders.iter().map(|(client, pid)| {
                let (resident, shared) = of(*client);
                vram(*pid, *client, resident, shared)
            }).collect();
            let held = sum_clients(&borrowed(&all));
            prop_assert!(sum(&held) <= existing, "{} of {existing}", sum(&held));
            // all buffers of a single client are counted
            let seen: std::collections::BTreeSet<u32> = holders.iter().map(|(client, _)| *client).collect();
            let alone: u64 = buffers.iter()
                .filter(|(_, who)| who.count_ones() == 1 && seen.contains(&who.trailing_zeros()))
                .map(|(bytes, _)| bytes).sum();
            prop_assert!(sum(&held) >= alone);
            // the order of the descriptors does not matter
            let mut reversed = all.clone();
            reversed.reverse();
            prop_assert_eq!(sum_clients(&borrowed(&reversed)), held);
        }
    }
}
