//! `/proc/PID/fdinfo/FD` of a graphics device: the memory of one client of a DRM driver, and the busy time of its engines.
//!
//! The keys are those of the kernel's documentation *DRM client usage stats*. They are common to amdgpu, i915, xe, nouveau,
//! panthor and others; driver-specific keys (`amd-...`) are ignored. Everything that a driver may omit is an `Option`. An invalid
//! value (an unknown unit, more than any GPU has) becomes `None` and is counted in [`DrmClient::malformed`].
//!
//! Not here: which region is on the device, and how several descriptors of one client are counted (`collect::drm`).

use std::collections::BTreeMap;

use super::{MAX_GPU_MEMORY, lines, number};

/// One open descriptor of a DRM device. Several may belong to one client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DrmClient {
    /// `drm-driver`: the kernel driver, such as `amdgpu`.
    pub driver: Vec<u8>,
    /// `drm-pdev`: the PCI address. Absent for devices on other buses.
    pub pdev: Option<Vec<u8>>,
    /// `drm-client-id`: the id of the client, unique on the device. Absent in old drivers.
    pub id: Option<Vec<u8>>,
    /// Memory by the name of the region: `vram`, `gtt`, `system0`, `memory`.
    pub regions: BTreeMap<Vec<u8>, Region>,
    /// Work by the name of the engine: `gfx`, `compute`, `render`, `rcs`.
    pub engines: BTreeMap<Vec<u8>, Engine>,
    /// Number of invalid values.
    pub malformed: usize,
}

/// Memory of one client in one region, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Region {
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
        for line in lines(text) {
            let Some(key) = line.strip_prefix(b"drm-") else { continue };
            let Some(colon) = key.iter().position(|&b| b == b':') else { continue };
            let (key, value) = (&key[..colon], key[colon + 1..].trim_ascii());
            let text = || Some(value.to_vec()).filter(|text| !text.is_empty());
            match key {
                b"driver" => client.driver = value.to_vec(),
                b"pdev" => client.pdev = text(),
                b"client-id" => client.id = text(),
                _ => client.apply_number(key, value),
            }
        }
        (!client.driver.is_empty()).then_some(client)
    }

    /// Applies the value of a region or an engine; unknown keys are ignored and not malformed.
    fn apply_number(&mut self, key: &[u8], value: &[u8]) {
        let name_after = |prefix: &str| key.strip_prefix(prefix.as_bytes()).map(<[u8]>::to_vec);
        let (regions, engines) = (&mut self.regions, &mut self.engines);
        let (field, parsed) = if let Some(name) = name_after("total-cycles-") {
            (&mut engines.entry(name).or_default().total_cycles, number(value))
        } else if let Some(name) = name_after("cycles-") {
            (&mut engines.entry(name).or_default().cycles, number(value))
        } else if let Some(name) = name_after("engine-capacity-") {
            let capacity = number(value).filter(|capacity| *capacity > 0);
            (&mut engines.entry(name).or_default().capacity, capacity)
        } else if let Some(name) = name_after("engine-") {
            let busy_ns = value.strip_suffix(b"ns").and_then(number);
            (&mut engines.entry(name).or_default().busy_ns, busy_ns)
        } else if let Some(name) = name_after("total-") {
            (&mut regions.entry(name).or_default().total, bytes(value))
        } else if let Some(name) = name_after("shared-") {
            (&mut regions.entry(name).or_default().shared, bytes(value))
        } else if let Some(name) = name_after("resident-") {
            (&mut regions.entry(name).or_default().resident, bytes(value))
        } else if let Some(name) = name_after("memory-") {
            (&mut regions.entry(name).or_default().memory, bytes(value))
        } else {
            return;
        };
        *field = parsed;
        self.malformed += usize::from(parsed.is_none());
    }
}

/// Parses a size: bytes without a unit, or with one of the two units in the kernel's documentation.
fn bytes(value: &[u8]) -> Option<u64> {
    let (digits, shift) = match value {
        _ if value.ends_with(b"KiB") => (&value[..value.len() - 3], 10),
        _ if value.ends_with(b"MiB") => (&value[..value.len() - 3], 20),
        _ => (value, 0),
    };
    number(digits)?.checked_mul(1 << shift).filter(|bytes| *bytes <= MAX_GPU_MEMORY)
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
        client.regions.get(name.as_bytes()).expect("a region")
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
        let engines: Vec<_> =
            client.engines.iter().map(|(name, e)| (&name[..], e.busy_ns, e.capacity)).collect();
        assert_eq!(engines, [(&b"dec"[..], Some(7), Some(2)), (b"gfx", Some(1_234_567_890), None)]);
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
        let [rcs, ccs] = [&b"rcs"[..], b"ccs"].map(|name| &client.engines[name]);
        assert_eq!(
            (rcs.cycles, rcs.total_cycles, rcs.busy_ns),
            (Some(28_257_900), Some(7_655_183_225), None)
        );
        assert_eq!((ccs.capacity, ccs.cycles), (Some(4), None));
        assert_eq!(client.regions, BTreeMap::new(), "total-cycles is no region");
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
            "drm-resident-vram: 18446744073709551615",
            "drm-resident-vram: 1125899906842625", // more than any GPU has
            "drm-resident-vram: ",
            "drm-resident-vram: 1 2 KiB",
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
            assert_eq!(client.engines, BTreeMap::from([(b"gfx".to_vec(), Engine::default())]), "{line}");
            assert_eq!(client.malformed, 1, "{line}");
        }
    }

    #[test]
    fn client_name_cannot_fake_a_line() {
        // the kernel rejects line feeds in a client's name, so the name cannot begin a line
        let text = b"drm-driver: xe\ndrm-client-name:\tdrm-resident-vram: 7 drm-client-id: 9\r\x00\xff\n";
        let client = DrmClient::parse(text).unwrap();
        assert_eq!((client.id, client.regions), (None, BTreeMap::new()));
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
        fn reads_any_size_in_any_unit(kib in 0_u64..1 << 41) {
            let units = [(format!("{}", kib << 10), kib << 10), (format!("{kib} KiB"), kib << 10), (format!("{kib}MiB"), kib << 20)];
            for (text, bytes) in units {
                let client = of(&format!("drm-resident-vram:   {text}  \n"));
                let expected = (bytes <= MAX_GPU_MEMORY).then_some(bytes);
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
