//! Descriptors to clients to processes: what each process holds on a GPU, with nothing counted twice.
//!
//! * **Several descriptors are one client** if they have one `drm-client-id`: duplicates in a process, and what a fork
//!   inherits. The client counts once, for the oldest of the processes that hold it: a fork is younger than the process
//!   that opened the device. Without an id that cannot be told, and the memory is absent.
//! * **Used is resident memory on the device**: regions named `vram...`, `local...`, `stolen-local...`. A GPU whose clients
//!   have no such region shares the host's memory: there, all regions count, and the sum is a part of the host's memory.
//! * **A buffer that several clients share counts once**: it is in the figures of each of them, and nothing tells which
//!   buffers are the same. The client that shares the most on a GPU counts with all it holds, the others only with what
//!   is theirs alone. The sum is then never more than is held; what it falls short of stays unattributed.
//!
//! Pure: no I/O, no clock.

use std::collections::{BTreeMap, HashMap};

use super::devices::MOST_MEMORY;
use crate::parse::drm::{Client, Region};

/// A process: its pid, and the clock ticks from boot to its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Clock ticks from boot to its start. First, so that the older process comes first.
    pub start_ticks: u64,
    /// Its pid.
    pub pid: u32,
}

/// One descriptor of a GPU, held by one process.
#[derive(Clone, Debug)]
pub struct Descriptor {
    /// Who holds it.
    pub holder: Key,
    /// What the driver tells of it.
    pub client: Client,
}

/// One client of a GPU.
struct Holding {
    /// Whom it counts for.
    holder: Key,
    /// Resident memory in bytes; `None` if it is not told.
    resident: Option<u64>,
    /// At most so much of it is shared with other clients.
    shared: u64,
}

/// What the processes on one GPU hold.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Held {
    /// Bytes by process; `None` if a part is not told. Processes that hold nothing are left out.
    pub by_process: BTreeMap<Key, Option<u64>>,
    /// Values that cannot be right.
    pub malformed: usize,
}

impl Held {
    /// A process of which only a part was read has no figure.
    pub fn withhold(&mut self, process: Key) {
        self.by_process.insert(process, None);
    }

    /// Sum of what is told.
    pub fn sum(&self) -> u64 {
        self.by_process.values().flatten().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }
}

/// True for memory that is the GPU's own.
fn is_local(region: &Region) -> bool {
    let name = &region.name[..];
    let base = name.strip_prefix(b"stolen-").unwrap_or(name);
    let letters = base.iter().position(u8::is_ascii_digit).unwrap_or(base.len());
    base[letters..].iter().all(u8::is_ascii_digit) && matches!(&base[..letters], b"vram" | b"local")
}

/// True if the clients of a GPU tell that it has memory of its own.
pub fn has_own_memory(descriptors: &[Descriptor]) -> bool {
    descriptors.iter().flat_map(|descriptor| &descriptor.client.regions).any(is_local)
}

/// Each client once, with the process that it counts for. Descriptors without an id are left out.
pub fn clients(descriptors: &[Descriptor]) -> Vec<&Descriptor> {
    let mut first: HashMap<&[u8], &Descriptor> = HashMap::new();
    for descriptor in descriptors {
        let Some(id) = &descriptor.client.id else { continue };
        let known = first.entry(id).or_insert(descriptor);
        if descriptor.holder < known.holder {
            *known = descriptor;
        }
    }
    let mut all: Vec<_> = first.into_values().collect();
    all.sort_by(|a, b| (a.holder, &a.client.id).cmp(&(b.holder, &b.client.id)));
    all
}

/// What the processes on one GPU hold, from all descriptors of it.
///
/// `own_memory`: the GPU has memory of its own, and only that counts.
pub fn hold(descriptors: &[Descriptor], own_memory: bool) -> Held {
    let mut held = Held::default();
    let mut holdings = Vec::new();
    for descriptor in clients(descriptors) {
        let holding = holding(descriptor, own_memory, &mut held.malformed);
        if holding.resident != Some(0) {
            holdings.push(holding);
        }
    }
    let sharer = holdings.iter().enumerate().filter(|(_, holding)| holding.shared > 0);
    // of several that share as much, the oldest
    let sharer =
        sharer.max_by_key(|(at, holding)| (holding.shared, std::cmp::Reverse(*at))).map(|(at, _)| at);
    for (at, holding) in holdings.iter().enumerate() {
        let shared = if Some(at) == sharer { 0 } else { holding.shared };
        let own = holding.resident.map(|resident| resident.saturating_sub(shared));
        let sum = held.by_process.entry(holding.holder).or_insert(Some(0));
        *sum = sum.zip(own).map(|(sum, own)| sum.saturating_add(own));
    }
    // without an id nobody can tell whether it is a client that was counted already
    for descriptor in descriptors.iter().filter(|descriptor| descriptor.client.id.is_none()) {
        let nothing = resident(&descriptor.client, own_memory).is_none_or(|bytes| bytes == 0);
        if !nothing {
            held.by_process.insert(descriptor.holder, None);
        }
    }
    held.malformed += descriptors.iter().map(|descriptor| descriptor.client.malformed).sum::<usize>();
    held
}

fn holding(descriptor: &Descriptor, own_memory: bool, malformed: &mut usize) -> Holding {
    let client = &descriptor.client;
    let counted = client.regions.iter().filter(|region| !own_memory || is_local(region));
    let shared = counted.map(|region| {
        let resident = region.resident();
        // buffers without memory behind them are in `shared` too
        region.shared.zip(resident).map_or(0, |(shared, resident)| shared.min(resident))
    });
    let shared = shared.fold(0_u64, u64::saturating_add);
    let resident = resident(client, own_memory);
    let plausible = resident.filter(|bytes| *bytes <= MOST_MEMORY);
    *malformed += usize::from(plausible != resident);
    Holding { holder: descriptor.holder, resident: plausible, shared: plausible.map_or(0, |_| shared) }
}

/// Resident memory over the regions that count; `None` if there are none, or one does not tell.
fn resident(client: &Client, own_memory: bool) -> Option<u64> {
    let mut counted = client.regions.iter().filter(|region| !own_memory || is_local(region)).peekable();
    counted.peek()?;
    counted.try_fold(0_u64, |sum, region| sum.checked_add(region.resident()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(pid: u32) -> Key {
        Key { start_ticks: u64::from(pid), pid }
    }

    /// A descriptor of client `id` held by `pid`, with these lines of its fdinfo.
    fn descriptor(pid: u32, id: Option<u32>, lines: &str) -> Descriptor {
        let id = id.map_or_else(String::new, |id| format!("drm-client-id: {id}\n"));
        let client = Client::parse(format!("drm-driver: amdgpu\n{id}{lines}").as_bytes()).unwrap();
        Descriptor { holder: key(pid), client }
    }

    fn vram(pid: u32, id: u32, resident: u64, shared: u64) -> Descriptor {
        let lines =
            format!("drm-resident-vram: {resident}\ndrm-shared-vram: {shared}\ndrm-resident-gtt: 5\n");
        descriptor(pid, Some(id), &lines)
    }

    fn held(descriptors: &[Descriptor]) -> Vec<(u32, Option<u64>)> {
        let held = hold(descriptors, has_own_memory(descriptors));
        assert_eq!(held.malformed, 0);
        held.by_process.into_iter().map(|(key, bytes)| (key.pid, bytes)).collect()
    }

    #[test]
    fn two_descriptors_of_one_client_count_once_and_two_clients_of_one_process_add_up() {
        let all = [vram(7, 1, 100, 0), vram(7, 1, 100, 0), vram(7, 2, 30, 0)];
        assert_eq!(held(&all), [(7, Some(130))]);
    }

    #[test]
    fn a_client_that_a_fork_inherited_is_its_parents() {
        let all = [vram(9, 1, 100, 0), vram(7, 1, 100, 0), vram(8, 1, 100, 0), vram(9, 2, 10, 0)];
        assert_eq!(held(&all), [(7, Some(100)), (9, Some(10))]);
    }

    #[test]
    fn after_the_parents_end_the_fork_holds_it() {
        assert_eq!(held(&[vram(9, 1, 100, 0), vram(8, 1, 100, 0)]), [(8, Some(100))]);
    }

    #[test]
    fn only_memory_on_the_device_counts_where_it_has_some() {
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
    fn who_holds_nothing_is_not_listed_and_who_does_not_tell_has_no_value() {
        assert_eq!(held(&[vram(7, 1, 0, 0)]), []);
        let silent = descriptor(8, Some(2), "drm-total-vram: 100\n");
        assert_eq!(held(&[vram(7, 1, 5, 0), silent]), [(7, Some(5)), (8, None)]);
    }

    #[test]
    fn without_an_id_nobody_can_tell_what_was_counted_already() {
        let all = [descriptor(7, None, "drm-memory-vram: 5\n"), descriptor(8, None, "drm-memory-vram: 5\n")];
        assert_eq!(held(&all), [(7, None), (8, None)]);
        assert_eq!(held(&[descriptor(7, None, "drm-memory-vram: 0\n")]), []);
    }

    #[test]
    fn shared_memory_counts_in_full_for_a_client_that_nobody_can_share_with() {
        // as where a driver marks all that was once exported
        assert_eq!(held(&[vram(7, 1, 100, 100), vram(8, 2, 40, 0)]), [(7, Some(100)), (8, Some(40))]);
    }

    #[test]
    fn of_several_sharers_the_one_who_shares_most_has_it_and_the_others_what_is_theirs_alone() {
        let compositor = vram(7, 1, 500, 300);
        let all = [compositor, vram(8, 2, 250, 100), vram(9, 3, 80, 80)];
        assert_eq!(held(&all), [(7, Some(500)), (8, Some(150)), (9, Some(0))]);
        let alike = [vram(8, 2, 100, 100), vram(7, 1, 100, 100)];
        assert_eq!(held(&alike), [(7, Some(100)), (8, Some(0))], "of equals the oldest");
    }

    #[test]
    fn shared_buffers_that_are_not_resident_take_nothing_away() {
        assert_eq!(held(&[vram(7, 1, 500, 900), vram(8, 2, 100, 300)]), [(7, Some(500)), (8, Some(0))]);
        assert_eq!(held(&[vram(7, 1, 100, 0), vram(8, 2, 100, 300)]), [(7, Some(100)), (8, Some(100))]);
    }

    #[test]
    fn who_was_read_in_part_has_no_figure_and_is_in_no_sum() {
        let mut held = hold(&[vram(7, 1, 100, 0), vram(8, 2, 30, 0)], true);
        held.withhold(key(7));
        held.withhold(key(9));
        assert_eq!(held.by_process, BTreeMap::from([(key(7), None), (key(8), Some(30)), (key(9), None)]));
        assert_eq!(held.sum(), 30);
    }

    #[test]
    fn a_sentinel_is_no_memory() {
        for bytes in [u64::MAX, (1 << 50) + 1] {
            let held = hold(&[vram(7, 1, bytes, 0)], true);
            assert_eq!((held.by_process, held.malformed), (BTreeMap::from([(key(7), None)]), 1));
        }
    }

    proptest! {
        /// Buffers of random sizes, each held by some of the clients; each client by some of the processes.
        #[test]
        fn the_sum_is_never_more_than_what_is_there(
            buffers in proptest::collection::vec((0_u64..1 << 40, 1_u8..32), 0..12),
            holders in proptest::collection::vec((0_u32..5, 1_u32..6), 0..20),
        ) {
            let there: u64 = buffers.iter().map(|(bytes, _)| bytes).sum();
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
            let held = hold(&all, true);
            prop_assert!(held.sum() <= there, "{} of {there}", held.sum());
            // buffers that only one client has are all accounted for
            let seen: std::collections::BTreeSet<u32> = holders.iter().map(|(client, _)| *client).collect();
            let alone: u64 = buffers.iter()
                .filter(|(_, who)| who.count_ones() == 1 && seen.contains(&who.trailing_zeros()))
                .map(|(bytes, _)| bytes).sum();
            prop_assert!(held.sum() >= alone);
            // and no descriptor's order matters
            let mut turned = all.clone();
            turned.reverse();
            prop_assert_eq!(hold(&turned, true), held);
        }
    }
}
