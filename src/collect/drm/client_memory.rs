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
//! Pure: no I/O, no clock.

use std::collections::{BTreeMap, HashMap};

use super::devices::MAX_MEMORY;
use crate::parse::drm::{DrmClient, Region};

/// A process: its pid, and the clock ticks from boot to its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DrmProcessKey {
    /// Clock ticks from boot to its start. First, so that the older process comes first.
    pub start_ticks: u64,
    /// Its pid.
    pub pid: u32,
}

/// A descriptor of a GPU in a process.
#[derive(Clone, Debug)]
pub struct Descriptor {
    /// The process that has it open.
    pub process: DrmProcessKey,
    /// The driver's statistics for it.
    pub client: DrmClient,
}

/// The memory of one client.
struct ClientMemory {
    /// The process for which it counts.
    process: DrmProcessKey,
    /// Resident memory in bytes; `None` if it is not reported.
    resident: Option<u64>,
    /// The maximum of it that is shared with other clients.
    shared: u64,
}

/// The memory of the processes on one GPU.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceClients {
    /// Bytes by process; `None` if a part is unknown. Processes without memory are omitted.
    pub by_process: BTreeMap<DrmProcessKey, Option<u64>>,
    /// The number of impossible values.
    pub malformed: usize,
}

impl DeviceClients {
    /// Makes the memory of a process unknown because only a part of it was read.
    pub fn withhold(&mut self, process: DrmProcessKey) {
        self.by_process.insert(process, None);
    }

    /// Returns the sum of all known values.
    pub fn sum(&self) -> u64 {
        self.by_process.values().flatten().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }
}

/// Returns true for the GPU's own memory.
fn is_local(region: &Region) -> bool {
    let name = &region.name[..];
    let base = name.strip_prefix(b"stolen-").unwrap_or(name);
    let letters = base.iter().position(u8::is_ascii_digit).unwrap_or(base.len());
    base[letters..].iter().all(u8::is_ascii_digit) && matches!(&base[..letters], b"vram" | b"local")
}

/// Returns true if the clients of a GPU report memory of its own.
pub fn has_own_memory(descriptors: &[Descriptor]) -> bool {
    descriptors.iter().flat_map(|descriptor| &descriptor.client.regions).any(is_local)
}

/// Returns each client once, with the process for which it counts. Descriptors without an id are omitted.
pub fn clients(descriptors: &[Descriptor]) -> Vec<&Descriptor> {
    let mut first: HashMap<&[u8], &Descriptor> = HashMap::new();
    for descriptor in descriptors {
        let Some(id) = &descriptor.client.id else { continue };
        let known = first.entry(id).or_insert(descriptor);
        if descriptor.process < known.process {
            *known = descriptor;
        }
    }
    let mut all: Vec<_> = first.into_values().collect();
    all.sort_by(|a, b| (a.process, &a.client.id).cmp(&(b.process, &b.client.id)));
    all
}

/// Returns the memory of the processes on one GPU, from all its descriptors.
///
/// `own_memory`: the GPU has memory of its own, and only that counts.
pub fn sum_clients(descriptors: &[Descriptor], own_memory: bool) -> DeviceClients {
    let mut held = DeviceClients::default();
    let mut clients_memory = Vec::new();
    for descriptor in clients(descriptors) {
        let client_memory = memory_of(descriptor, own_memory, &mut held.malformed);
        if client_memory.resident != Some(0) {
            clients_memory.push(client_memory);
        }
    }
    let sharers = clients_memory.iter().enumerate().filter(|(_, client_memory)| client_memory.shared > 0);
    // of equals, the oldest
    let largest_sharer = sharers
        .max_by_key(|(at, client_memory)| (client_memory.shared, std::cmp::Reverse(*at)))
        .map(|(at, _)| at);
    for (at, client_memory) in clients_memory.iter().enumerate() {
        let shared = if Some(at) == largest_sharer { 0 } else { client_memory.shared };
        let own = client_memory.resident.map(|resident| resident.saturating_sub(shared));
        let sum = held.by_process.entry(client_memory.process).or_insert(Some(0));
        *sum = sum.zip(own).map(|(sum, own)| sum.saturating_add(own));
    }
    // without an id it is unknown whether the client was counted already
    for descriptor in descriptors.iter().filter(|descriptor| descriptor.client.id.is_none()) {
        let nothing = resident(&descriptor.client, own_memory).is_none_or(|bytes| bytes == 0);
        if !nothing {
            held.by_process.insert(descriptor.process, None);
        }
    }
    held.malformed += descriptors.iter().map(|descriptor| descriptor.client.malformed).sum::<usize>();
    held
}

fn memory_of(descriptor: &Descriptor, own_memory: bool, malformed: &mut usize) -> ClientMemory {
    let client = &descriptor.client;
    let counted = client.regions.iter().filter(|region| !own_memory || is_local(region));
    let shared = counted.map(|region| {
        let resident = region.resident();
        // `shared` includes buffers that are not resident
        region.shared.zip(resident).map_or(0, |(shared, resident)| shared.min(resident))
    });
    let shared = shared.fold(0_u64, u64::saturating_add);
    let resident = resident(client, own_memory);
    let plausible = resident.filter(|bytes| *bytes <= MAX_MEMORY);
    *malformed += usize::from(plausible != resident);
    ClientMemory { process: descriptor.process, resident: plausible, shared: plausible.map_or(0, |_| shared) }
}

/// Returns the resident memory of the regions that count; `None` if there are none, or one does not report it.
fn resident(client: &DrmClient, own_memory: bool) -> Option<u64> {
    let mut counted = client.regions.iter().filter(|region| !own_memory || is_local(region)).peekable();
    counted.peek()?;
    counted.try_fold(0_u64, |sum, region| sum.checked_add(region.resident()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(pid: u32) -> DrmProcessKey {
        DrmProcessKey { start_ticks: u64::from(pid), pid }
    }

    /// Returns a descriptor of client `id` in process `pid`, with these lines of its fdinfo.
    fn descriptor(pid: u32, id: Option<u32>, lines: &str) -> Descriptor {
        let id = id.map_or_else(String::new, |id| format!("drm-client-id: {id}\n"));
        let client = DrmClient::parse(format!("drm-driver: amdgpu\n{id}{lines}").as_bytes()).unwrap();
        Descriptor { process: key(pid), client }
    }

    fn vram(pid: u32, id: u32, resident: u64, shared: u64) -> Descriptor {
        let lines =
            format!("drm-resident-vram: {resident}\ndrm-shared-vram: {shared}\ndrm-resident-gtt: 5\n");
        descriptor(pid, Some(id), &lines)
    }

    fn held(descriptors: &[Descriptor]) -> Vec<(u32, Option<u64>)> {
        let held = sum_clients(descriptors, has_own_memory(descriptors));
        assert_eq!(held.malformed, 0);
        held.by_process.into_iter().map(|(key, bytes)| (key.pid, bytes)).collect()
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
    fn partly_read_process_has_no_value_and_is_in_no_sum() {
        let mut held = sum_clients(&[vram(7, 1, 100, 0), vram(8, 2, 30, 0)], true);
        held.withhold(key(7));
        held.withhold(key(9));
        assert_eq!(held.by_process, BTreeMap::from([(key(7), None), (key(8), Some(30)), (key(9), None)]));
        assert_eq!(held.sum(), 30);
    }

    #[test]
    fn sentinel_is_malformed() {
        for bytes in [u64::MAX, (1 << 50) + 1] {
            let held = sum_clients(&[vram(7, 1, bytes, 0)], true);
            assert_eq!((held.by_process, held.malformed), (BTreeMap::from([(key(7), None)]), 1));
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
            let held = sum_clients(&all, true);
            prop_assert!(held.sum() <= existing, "{} of {existing}", held.sum());
            // all buffers of a single client are counted
            let seen: std::collections::BTreeSet<u32> = holders.iter().map(|(client, _)| *client).collect();
            let alone: u64 = buffers.iter()
                .filter(|(_, who)| who.count_ones() == 1 && seen.contains(&who.trailing_zeros()))
                .map(|(bytes, _)| bytes).sum();
            prop_assert!(held.sum() >= alone);
            // the order of the descriptors does not matter
            let mut reversed = all.clone();
            reversed.reverse();
            prop_assert_eq!(sum_clients(&reversed, true), held);
        }
    }
}
