//! GPU errors (Xid) that NVIDIA's driver writes to the kernel log.
//!
//! The text after the number and the pid is not read: it contains the name of the process, which the process chooses.

use super::digits;
use crate::parse::find;

/// PCI address of a GPU. The kernel log and NVML have different formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PciAddress {
    domain: u32,
    bus: u32,
    device: u32,
}

/// One GPU error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Xid {
    /// Its GPU.
    pub gpu: PciAddress,
    /// The ids of its GPU instance and its compute instance, if the driver attributes it to them (MIG).
    pub instance: [Option<u64>; 2],
    /// Its number.
    pub xid: u64,
    /// Host pid of the process that used the GPU; `None` if the driver does not report it.
    pub pid: Option<u32>,
}

impl PciAddress {
    /// Parses `0000:01:00` or `00000000:01:00.0`.
    pub fn of(text: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(text).ok()?;
        let mut parts = text.split(':').map(|part| u32::from_str_radix(part.split('.').next()?, 16).ok());
        let address = Self { domain: parts.next()??, bus: parts.next()??, device: parts.next()?? };
        parts.next().is_none().then_some(address)
    }
}

impl Xid {
    pub(super) fn of(text: &[u8]) -> Option<Self> {
        let rest = text.strip_prefix(b"NVRM: Xid (")?;
        let rest = rest.strip_prefix(b"PCI:").unwrap_or(rest); // missing in older drivers
        let (place, rest) = rest.split_at(find(rest, b"): ")?);
        let rest = &rest[3..];
        let mut words = place.split(|byte| *byte == b' ');
        let gpu = PciAddress::of(words.next()?)?;
        let ids: Vec<_> = words.collect(); // such as `GPU-I:05 GPU-CI:00`
        let id = |prefix: &[u8]| ids.iter().find_map(|word| digits(word.strip_prefix(prefix)?));
        let instance = [id(b"GPU-I:"), id(b"GPU-CI:")];
        let end = rest.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(rest.len());
        let (xid, rest) = rest.split_at(end);
        let pid = rest.strip_prefix(b", pid=").and_then(|rest| {
            let end = rest.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(rest.len());
            u32::try_from(digits(&rest[..end])?).ok().filter(|pid| *pid > 0)
        });
        Some(Self { gpu, instance, xid: digits(xid)?, pid })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #[test]
        fn reads_any_error_of_any_gpu(domain: u16, bus: u8, device in 0_u8..32, xid in 1_u64..1_000, pid in 1_u32..4_194_304, name in "[^\n]{0,15}") {
            let gpu = PciAddress { domain: domain.into(), bus: bus.into(), device: device.into() };
            let line = format!("NVRM: Xid (PCI:{domain:04x}:{bus:02x}:{device:02x}): {xid}, pid={pid}, name={name}, Ch 00000008");
            proptest::prop_assert_eq!(Xid::of(line.as_bytes()), Some(Xid { gpu, instance: [None; 2], xid, pid: Some(pid) }));
            let by_nvml = format!("{domain:08X}:{bus:02X}:{device:02X}.0");
            proptest::prop_assert_eq!(PciAddress::of(by_nvml.as_bytes()), Some(gpu));
        }
    }

    fn of(text: &str) -> Option<(u64, Option<u32>)> {
        let at_one = PciAddress { domain: 0, bus: 0x65, device: 0 };
        Xid::of(text.as_bytes()).filter(|xid| xid.gpu == at_one).map(|xid| (xid.xid, xid.pid))
    }

    #[test]
    fn reads_lines_of_all_driver_versions() {
        for (text, wanted) in [
            (
                "NVRM: Xid (PCI:0000:65:00): 31, pid=1234, name=python, Ch 00000008, intr 10000000.",
                Some((31, Some(1234))),
            ),
            (
                "NVRM: Xid (PCI:0000:65:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
                Some((79, None)),
            ),
            ("NVRM: Xid (PCI:0000:65:00): 79, GPU has fallen off the bus.", Some((79, None))),
            ("NVRM: Xid (0000:65:00): 13, 0001 00000000 0000a06f", Some((13, None))),
            ("NVRM: Xid (PCI:0000:65:00): 43, pid=7, name=a, pid=8, Ch 00000010", Some((43, Some(7)))),
            ("NVRM: Xid (PCI:0000:66:00): 43, pid=7, name=a", None),
            ("NVRM: Xid (PCI:0000:65:00): , pid=7", None),
            ("NVRM: Xid (PCI:65:00): 31, pid=7", None),
            ("x NVRM: Xid (PCI:0000:65:00): 31, pid=7", None),
            ("NVRM: Xid (PCI:0000:65:00", None),
        ] {
            assert_eq!(of(text), wanted, "{text}");
        }
    }

    #[test]
    fn reads_the_instance_of_an_error_on_a_mig_gpu() {
        let of = |place: &str| {
            let line =
                format!("NVRM: Xid (PCI:0000:65:00{place}): 94, pid=7194, Contained: CE User Channel (0x9).");
            Xid::of(line.as_bytes()).map(|xid| (xid.instance, xid.xid, xid.pid))
        };
        assert_eq!(of(" GPU-I:05 GPU-CI:00"), Some(([Some(5), Some(0)], 94, Some(7194))));
        assert_eq!(of(" GPU-I:05"), Some(([Some(5), None], 94, Some(7194))));
        assert_eq!(of(" GPU-I:x other"), Some(([None, None], 94, Some(7194))));
    }

    #[test]
    fn address_formats_are_equal() {
        assert_eq!(PciAddress::of(b"0000:65:00"), PciAddress::of(b"00000000:65:00.0"));
        assert_ne!(PciAddress::of(b"0001:65:00"), PciAddress::of(b"00000000:65:00.0"));
        assert_eq!(PciAddress::of(b"no:such:bus"), None);
    }
}
