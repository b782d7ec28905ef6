//! `/proc/PID/fdinfo/FD` of a graphics device: the memory of one client of a DRM driver, and the busy time of its engines.
//!
//! The keys are those of the kernel's documentation *DRM client usage stats*. They are common to amdgpu, i915, xe, nouveau,
//! panthor and others; driver-specific keys (`amd-...`) are ignored. Everything that a driver may omit is an `Option`. An invalid
//! value (an unknown unit, a number that overflows, one key with two values) becomes `None` and is counted in
//! [`DrmClient::malformed`].
//!
//! Not here: which region is on the device, and how several descriptors of one client are counted (`collect::drm`).

use super::{lines, number};

/// Limit of regions and of engines, more than any driver has; the rest is ignored.
const MAX_ENTRIES: usize = 64;
/// Limit of a name of a client, region or engine; longer ones are ignored. The kernel's are shorter.
const MAX_NAME_BYTES: usize = 64;

/// One open descriptor of a DRM device. Several may belong to one client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DrmClient {
    /// `drm-driver`: the kernel driver, such as `amdgpu`.
    pub driver: Vec<u8>,
    /// `drm-pdev`: the PCI address. Absent for devices on other buses.
    pub pdev: Option<Vec<u8>>,
    /// `drm-client-id`: the id of the client, unique on the device. Absent in old drivers.
    pub id: Option<Vec<u8>>,
    /// Memory by region, in the order of the file.
    pub regions: Vec<Region>,
    /// Engines, in the order of the file.
    pub engines: Vec<Engine>,
    /// Number of invalid values.
    pub malformed: usize,
}

/// Memory of one client in one region, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Region {
    /// Its name: `vram`, `gtt`, `system0`, `memory`.
    pub name: Vec<u8>,
    /// `drm-total-`: requested buffers, with or without memory.
    pub total: Option<u64>,
    /// `drm-shared-`: of these, buffers that another descriptor has too.
    pub shared: Option<u64>,
    /// `drm-resident-`: buffers with memory in this region.
    resident: Option<u64>,
    /// `drm-memory-`: the older name of the same.
    memory: Option<u64>,
}

impl Region {
    /// Returns the memory that is used in this region: `drm-resident-`, or `drm-memory-` of older drivers.
    pub fn resident(&self) -> Option<u64> {
        self.resident.or(self.memory)
    }
}

/// Use of the engines of one name by one client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Engine {
    /// Its name: `gfx`, `compute`, `render`, `rcs`.
    pub name: Vec<u8>,
    /// `drm-engine-`: nanoseconds of work for this client.
    pub busy_ns: Option<u64>,
    /// `drm-cycles-`: cycles of work for this client.
    pub cycles: Option<u64>,
    /// `drm-total-cycles-`: elapsed cycles, for all clients.
    pub total_cycles: Option<u64>,
    /// `drm-engine-capacity-`: number of engines with this name. Absent: one.
    pub capacity: Option<u64>,
}

impl DrmClient {
    /// Parses the file. `None` if it is not of a DRM driver, as nearly all files are.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let mut client = Self::default();
        let mut driver = UniqueText::default();
        let (mut pdev, mut id) = (UniqueText::default(), UniqueText::default());
        let mut seen: Vec<&[u8]> = Vec::new();
        for line in lines(text) {
            let Some(key) = line.strip_prefix(b"drm-") else { continue };
            let Some(colon) = key.iter().position(|&b| b == b':') else { continue };
            let (key, value) = (&key[..colon], key[colon + 1..].trim_ascii());
            match key {
                b"driver" => driver.set(value),
                b"pdev" => pdev.set(value),
                b"client-id" => id.set(value),
                _ if key.iter().any(u8::is_ascii_whitespace) => {}
                _ => client.apply_number(key, value, &mut seen),
            }
        }
        client.malformed += usize::from(pdev.has_conflict) + usize::from(id.has_conflict);
        client.driver = driver.value()?;
        client.pdev = pdev.value();
        client.id = id.value();
        Some(client)
    }

    /// Applies the value of a numeric key; unknown keys are ignored and not malformed.
    fn apply_number<'a>(&mut self, key: &'a [u8], value: &[u8], seen: &mut Vec<&'a [u8]>) {
        let Some((what, name)) = FdinfoKey::of(key) else { return };
        if name.is_empty() || name.len() > MAX_NAME_BYTES {
            return;
        }
        let parsed = match what {
            FdinfoKey::Total | FdinfoKey::Shared | FdinfoKey::Resident | FdinfoKey::Memory => bytes(value),
            FdinfoKey::Busy => value.strip_suffix(b"ns").and_then(number),
            FdinfoKey::Cycles | FdinfoKey::TotalCycles => number(value),
            FdinfoKey::Capacity => number(value).filter(|capacity| *capacity > 0),
        };
        let is_repeated = seen.contains(&key);
        let Some(field) = self.field_of(what, name) else { return };
        // two different values: both are dropped
        let contradicts = is_repeated && *field != parsed;
        *field = parsed.filter(|_| !contradicts);
        self.malformed += usize::from(parsed.is_none() || contradicts);
        if !is_repeated {
            seen.push(key);
        }
    }

    /// Returns the field for a key; `None` if there are too many names.
    fn field_of(&mut self, what: FdinfoKey, name: &[u8]) -> Option<&mut Option<u64>> {
        match what {
            FdinfoKey::Total | FdinfoKey::Shared | FdinfoKey::Resident | FdinfoKey::Memory => {
                let region = entry(
                    &mut self.regions,
                    |region| region.name == name,
                    || Region { name: name.to_vec(), ..Region::default() },
                )?;
                Some(match what {
                    FdinfoKey::Total => &mut region.total,
                    FdinfoKey::Shared => &mut region.shared,
                    FdinfoKey::Resident => &mut region.resident,
                    _ => &mut region.memory,
                })
            }
            FdinfoKey::Busy | FdinfoKey::Cycles | FdinfoKey::TotalCycles | FdinfoKey::Capacity => {
                let engine = entry(
                    &mut self.engines,
                    |engine| engine.name == name,
                    || Engine { name: name.to_vec(), ..Engine::default() },
                )?;
                Some(match what {
                    FdinfoKey::Busy => &mut engine.busy_ns,
                    FdinfoKey::Cycles => &mut engine.cycles,
                    FdinfoKey::TotalCycles => &mut engine.total_cycles,
                    _ => &mut engine.capacity,
                })
            }
        }
    }
}

/// A numeric key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FdinfoKey {
    Total,
    Shared,
    Resident,
    Memory,
    Busy,
    Cycles,
    TotalCycles,
    Capacity,
}

impl FdinfoKey {
    /// Parses a key without its `drm-` into its kind and the name of the region or engine.
    fn of(key: &[u8]) -> Option<(Self, &[u8])> {
        // the capacity precedes `engine-`, which is a prefix of it
        let kinds: [(&[u8], Self); 8] = [
            (b"engine-capacity-", FdinfoKey::Capacity),
            (b"engine-", FdinfoKey::Busy),
            (b"cycles-", FdinfoKey::Cycles),
            (b"total-cycles-", FdinfoKey::TotalCycles),
            (b"total-", FdinfoKey::Total),
            (b"shared-", FdinfoKey::Shared),
            (b"resident-", FdinfoKey::Resident),
            (b"memory-", FdinfoKey::Memory),
        ];
        kinds.into_iter().find_map(|(prefix, kind)| Some((kind, key.strip_prefix(prefix)?)))
    }
}

/// Returns the entry that matches; creates it if there is none, up to the limit.
fn entry<T>(all: &mut Vec<T>, is: impl Fn(&T) -> bool, make: impl FnOnce() -> T) -> Option<&mut T> {
    let at = match all.iter().position(is) {
        Some(at) => at,
        None if all.len() < MAX_ENTRIES => {
            all.push(make());
            all.len() - 1
        }
        None => return None,
    };
    all.get_mut(at)
}

/// A text that must be unique: two different values count as none.
#[derive(Default)]
struct UniqueText {
    value: Option<Vec<u8>>,
    has_conflict: bool,
}

impl UniqueText {
    fn set(&mut self, value: &[u8]) {
        if value.is_empty() || value.len() > MAX_NAME_BYTES {
            return;
        }
        match &self.value {
            None => self.value = Some(value.to_vec()),
            Some(known) => self.has_conflict |= known != value,
        }
    }

    fn value(self) -> Option<Vec<u8>> {
        self.value.filter(|_| !self.has_conflict)
    }
}

/// Parses a size: bytes without a unit, or with one of the two units in the kernel's documentation.
fn bytes(value: &[u8]) -> Option<u64> {
    let (digits, shift) = match value {
        _ if value.ends_with(b"KiB") => (&value[..value.len() - 3], 10),
        _ if value.ends_with(b"MiB") => (&value[..value.len() - 3], 20),
        _ => (value, 0),
    };
    number(digits)?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Output of amdgpu on Linux 6.12; some lines that every descriptor has are omitted.
    const AMDGPU: &[u8] = b"pos:\t0\nflags:\t02100002\nmnt_id:\t26\nino:\t1069\n\
        drm-driver:\tamdgpu\ndrm-client-id:\t271\ndrm-pdev:\t0000:03:00.0\npasid:\t32771\n\
        drm-total-vram:\t2113536 KiB\ndrm-shared-vram:\t1024 KiB\ndrm-active-vram:\t0\ndrm-resident-vram:\t2113024 KiB\n\
        drm-purgeable-vram:\t0\ndrm-memory-vram:\t2113024 KiB\ndrm-total-gtt:\t16 MiB\ndrm-resident-gtt:\t4096\n\
        amd-memory-visible-vram:\t8192 KiB\namd-evicted-vram:\t0 KiB\n\
        drm-engine-gfx:\t1234567890 ns\ndrm-engine-capacity-dec:\t2\ndrm-engine-dec:\t7 ns\n";

    fn region<'a>(client: &'a DrmClient, name: &str) -> &'a Region {
        client.regions.iter().find(|region| region.name == name.as_bytes()).expect("a region")
    }

    fn of(lines: &str) -> DrmClient {
        DrmClient::parse(format!("drm-driver:\txe\n{lines}\n").as_bytes()).expect("a client")
    }

    #[test]
    fn reads_client_of_amdgpu() {
        let client = DrmClient::parse(AMDGPU).unwrap();
        assert_eq!(client.driver, b"amdgpu");
        assert_eq!(client.pdev.as_deref(), Some(&b"0000:03:00.0"[..]));
        assert_eq!(client.id.as_deref(), Some(&b"271"[..]));
        let vram = region(&client, "vram");
        assert_eq!((vram.total, vram.shared), (Some(2_113_536 << 10), Some(1 << 20)));
        assert_eq!(vram.resident(), Some(2_113_024 << 10));
        assert_eq!(
            (region(&client, "gtt").total, region(&client, "gtt").resident()),
            (Some(16 << 20), Some(4096))
        );
        assert_eq!(client.regions.len(), 2, "amd- keys are not standard");
        let engines: Vec<_> = client.engines.iter().map(|e| (&e.name[..], e.busy_ns, e.capacity)).collect();
        assert_eq!(engines, [(&b"gfx"[..], Some(1_234_567_890), None), (b"dec", Some(7), Some(2))]);
        assert_eq!(client.malformed, 0);
    }

    #[test]
    fn reads_older_name_of_resident_memory() {
        let client = of("drm-memory-vram: 5 KiB\n");
        assert_eq!(region(&client, "vram").resident(), Some(5 << 10));
        assert_eq!(region(&client, "vram").shared, None, "absent is not zero");
        let both = of("drm-memory-vram: 5 KiB\ndrm-resident-vram: 6 KiB\n");
        assert_eq!(region(&both, "vram").resident(), Some(6 << 10));
    }

    #[test]
    fn reads_cycles_of_xe() {
        let client =
            of("drm-cycles-rcs:\t28257900\ndrm-total-cycles-rcs:\t7655183225\ndrm-engine-capacity-ccs:\t4\n");
        let [rcs, ccs] = &client.engines[..] else { panic!("{client:?}") };
        assert_eq!(
            (rcs.cycles, rcs.total_cycles, rcs.busy_ns),
            (Some(28_257_900), Some(7_655_183_225), None)
        );
        assert_eq!((ccs.capacity, ccs.cycles), (Some(4), None));
        assert_eq!(client.regions, [], "total-cycles is no region");
    }

    #[test]
    fn ignores_file_without_driver() {
        for text in [
            &b""[..],
            b"pos:\t0\nflags:\t02\n",
            b"drm-client-id:\t1\n",
            b"drm-driver:\t\n",
            b"xdrm-driver: x",
        ] {
            assert_eq!(DrmClient::parse(text), None, "{:?}", String::from_utf8_lossy(text));
        }
    }

    #[test]
    fn counts_invalid_values_as_malformed() {
        for line in [
            "drm-resident-vram: 5 KB",
            "drm-resident-vram: -1 KiB",
            "drm-resident-vram: 18446744073709551616",
            "drm-resident-vram: 18014398509481984 KiB", // 2^64 bytes
            "drm-resident-vram: ",
            "drm-resident-vram: 1 2 KiB",
            "drm-resident-vram: 1\ndrm-resident-vram: 2",
            "drm-resident-vram: 1\ndrm-resident-vram: x",
        ] {
            let client = of(line);
            assert_eq!(region(&client, "vram").resident(), None, "{line}");
            assert_eq!(client.malformed, 1, "{line}");
        }
        for line in [
            "drm-engine-gfx: 5",
            "drm-engine-gfx: 5 us",
            "drm-engine-capacity-gfx: 0",
            "drm-cycles-gfx: 1 Hz",
        ] {
            let client = of(line);
            assert_eq!(client.engines, [Engine { name: b"gfx".to_vec(), ..Engine::default() }], "{line}");
            assert_eq!(client.malformed, 1, "{line}");
        }
    }

    #[test]
    fn third_value_does_not_undo_a_contradiction() {
        let client = of("drm-total-vram: 1\ndrm-total-vram: 2\ndrm-total-vram: 2\n");
        assert_eq!((region(&client, "vram").total, client.malformed), (None, 2));
        let same = of("drm-total-vram: 1\ndrm-total-vram: 1\n");
        assert_eq!((region(&same, "vram").total, same.malformed), (Some(1), 0));
    }

    #[test]
    fn drops_contradicting_ids() {
        let client = of("drm-client-id: 1\ndrm-client-id: 2\n");
        assert_eq!((client.id, client.malformed), (None, 1));
    }

    #[test]
    fn limits_names_and_numbers_of_regions() {
        let mut lines = String::new();
        for number in 0..1_000 {
            lines.push_str(&format!("drm-total-r{number}: 1\ndrm-engine-e{number}: 1 ns\n"));
        }
        lines.push_str(&format!("drm-total-{}: 1\ndrm-total-a b: 1\ndrm-total-: 1\n", "x".repeat(65)));
        let client = of(&lines);
        assert_eq!((client.regions.len(), client.engines.len()), (MAX_ENTRIES, MAX_ENTRIES));
    }

    #[test]
    fn client_name_cannot_fake_a_line() {
        // the kernel rejects line feeds in a client's name, so the name cannot begin a line
        let text = b"drm-driver: xe\ndrm-client-name:\tdrm-resident-vram: 7 drm-client-id: 9\r\x00\xff\n";
        let client = DrmClient::parse(text).unwrap();
        assert_eq!((client.id, client.regions), (None, vec![]));
    }

    proptest! {
        #[test]
        fn never_panics_on_any_bytes(bytes: Vec<u8>) {
            let _ = DrmClient::parse(&bytes);
            let mut text = b"drm-driver: a\ndrm-".to_vec();
            text.extend(bytes);
            text.push(b'\n');
            let _ = DrmClient::parse(&text);
        }

        #[test]
        fn reads_any_size_in_any_unit(kib in 0_u64..1 << 50) {
            let units = [(format!("{}", kib << 10), kib << 10), (format!("{kib} KiB"), kib << 10), (format!("{kib}MiB"), kib << 20)];
            for (text, bytes) in units {
                let client = of(&format!("drm-resident-vram:   {text}  \n"));
                let expected = (kib < 1 << 44 || !text.ends_with("MiB")).then_some(bytes);
                prop_assert_eq!(region(&client, "vram").resident(), expected);
            }
        }

        #[test]
        fn order_of_keys_does_not_matter(seed in proptest::collection::vec(any::<u32>(), 8)) {
            let lines = ["drm-driver: xe", "drm-pdev: 0000:00:02.0", "drm-client-id: 3", "drm-total-gtt: 1 MiB",
                "drm-shared-gtt: 0", "drm-resident-gtt: 1 MiB", "drm-cycles-rcs: 9", "drm-total-cycles-rcs: 99"];
            let mut order: Vec<usize> = (0..lines.len()).collect();
            order.sort_by_key(|at| seed[*at]);
            let shuffled: String = order.iter().map(|at| format!("{}\n", lines[*at])).collect();
            prop_assert_eq!(DrmClient::parse(shuffled.as_bytes()), DrmClient::parse((lines.join("\n") + "\n").as_bytes()));
        }
    }
}
