//! Lists the GPUs of DRM drivers, and reads what sysfs reports of their memory.
//!
//! A GPU has a render node (`/sys/class/drm/renderD128`); displays, and graphics chips of servers that only show a console,
//! have none. NVIDIA's own driver also has render nodes, but no statistics there: its GPUs are read through NVML and
//! skipped here, so that none is exported twice. Virtual devices are skipped too.
//!
//! Beside GPUs of NVIDIA's driver the graphics of a processor are skipped too, unless there is another GPU: they show a desktop or
//! nothing, and to find the processes that use them costs more than their figures are worth.
//!
//! Only amdgpu reports the memory of a GPU, in files of its device directory.

use std::path::PathBuf;
use std::sync::Arc;

use super::hwmon;
use super::sysfs::{names, number, text, value};
use crate::collect::gpu::{DeviceHealth, DeviceMemory, GpuIdentity};
use crate::host::{HostPaths, ReadError};
use crate::parse::MAX_GPU_MEMORY;
use crate::series::bounded;

/// Drivers whose render nodes are skipped.
const SKIPPED_DRIVERS: [&str; 8] =
    ["nvidia", "nvidia-drm", "virtio_gpu", "virtio-pci", "vmwgfx", "qxl", "vkms", "vgem"];
/// The driver of partitions of an AMD GPU, which have render nodes but no memory and statistics of their own.
const PARTITION: &str = "amdgpu_xcp";
/// A GPU of AMD with less memory of its own is a part of a processor, to which the firmware assigned some of the host's memory.
const MIN_DISCRETE_BYTES: u64 = 4 << 30;

/// One GPU of a DRM driver.
#[derive(Clone, Debug)]
pub struct Card {
    /// Its identity.
    pub identity: Arc<GpuIdentity>,
    /// The driver of the device, such as `amdgpu`.
    pub driver: Arc<str>,
    /// Its nodes below `/dev/dri`, such as `card0` and `renderD128`.
    pub nodes: Vec<String>,
    /// Its address on its bus.
    address: String,
    folder: PathBuf,
}

/// Lists the GPUs of DRM drivers, in the order of their render nodes. Empty if this host has none.
///
/// # Errors
/// The list cannot be read. If a single device cannot be read, its error is pushed to `read_errors` and it is skipped.
pub fn list(host_paths: &HostPaths, read_errors: &mut Vec<&'static str>) -> Result<Vec<Card>, ReadError> {
    let class = host_paths.sys.join("class/drm");
    let mut cards: Vec<Card> = Vec::new();
    let mut has_nvidia = host_paths.has_device("nvidiactl");
    for node in names(&class, "renderD")? {
        let folder = class.join(&node).join("device");
        let Some(uevent) = value(text(&folder.join("uevent")), read_errors) else { continue };
        let key = |key: &str| uevent.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        let driver = key("DRIVER").unwrap_or_default();
        has_nvidia |= driver.starts_with("nvidia");
        let is_partition = key("MODALIAS").is_some_and(|alias| alias.contains(PARTITION));
        if SKIPPED_DRIVERS.contains(&driver) || is_partition {
            continue;
        }
        let card = Card::of(folder, node, driver, key);
        let is_new = |card: &Card| cards.iter().all(|other| other.address != card.address);
        let card = card.filter(is_new); // a GPU may have several render nodes
        cards.extend(card);
    }
    if has_nvidia && !cards.iter().any(Card::is_discrete) {
        cards.clear();
    }
    Ok(cards)
}

/// Returns the vendor by its PCI id, or else by the driver; empty if neither is known.
fn vendor(pci_id: &str, driver: &str) -> &'static str {
    match (pci_id.split(':').next().unwrap_or_default(), driver) {
        ("1002" | "1022", _) => "amd",
        ("8086", _) => "intel",
        ("10de", _) | (_, "tegra" | "nouveau") => "nvidia",
        (_, "panfrost" | "panthor" | "lima") => "arm",
        (_, "msm" | "msm_dpu") => "qualcomm",
        (_, "v3d" | "vc4") => "broadcom",
        (_, "etnaviv") => "vivante",
        (_, "asahi") => "apple",
        (_, "powervr") => "imagination",
        _ => "",
    }
}

impl Card {
    /// Returns the GPU with these keys of its uevent; `None` without an address.
    fn of<'a>(
        folder: PathBuf,
        node: String,
        driver: &str,
        key: impl Fn(&str) -> Option<&'a str>,
    ) -> Option<Self> {
        let slot = key("PCI_SLOT_NAME");
        let device = std::fs::canonicalize(&folder).unwrap_or_default();
        let address = slot.or(device.file_name().and_then(|name| name.to_str()))?;
        let text = |name: &str| text(&folder.join(name)).ok().filter(|text| !text.is_empty());
        let mut nodes = names(&folder.join("drm"), "card").unwrap_or_default(); // the card names it
        nodes.push(node);
        let id = key("PCI_ID").unwrap_or_default().to_ascii_lowercase();
        let identity = GpuIdentity {
            vendor: vendor(&id, driver),
            index: nodes[0].as_str().into(),
            uuid: match text("unique_id") {
                Some(unique) => bounded(&format!("GPU-{unique}")),
                None => bounded(&format!("{}-{address}", if slot.is_some() { "pci" } else { "platform" })),
            },
            model: bounded(&text("product_name").unwrap_or_else(|| match id.as_str() {
                "" => key("OF_COMPATIBLE_0").unwrap_or(driver).to_owned(),
                id => format!("PCI {id}"),
            })),
            pci_bus_id: bounded(slot.unwrap_or_default()),
            ..GpuIdentity::default()
        };
        let address = address.to_owned();
        Some(Self { identity: Arc::new(identity), driver: bounded(driver), nodes, address, folder })
    }

    /// Returns whether a descriptor is of this GPU. `node`: as its process sees it, which may be another node's name; `address`:
    /// on the PCI bus, absent for other buses and without statistics.
    pub fn is_of(&self, node: &str, address: Option<&[u8]>) -> bool {
        match address {
            Some(address) => self.identity.pci_bus_id.as_bytes() == address,
            None => self.nodes.iter().any(|own| own == node),
        }
    }

    /// Reads its own memory; all absent where the driver does not report it, or the GPU has none.
    ///
    /// Source: `mem_info_vram_total` and `mem_info_vram_used` of amdgpu. Used includes memory that the driver reserves.
    pub fn memory(&self, read_errors: &mut Vec<&'static str>) -> DeviceMemory {
        let mut read = |name| value(number(&self.folder.join(name), MAX_GPU_MEMORY), read_errors);
        let (total, used) = (read("mem_info_vram_total"), read("mem_info_vram_used"));
        let free = total.zip(used).map(|(total, used)| total.checked_sub(used));
        if free == Some(None) {
            read_errors.push("malformed");
            return DeviceMemory::default();
        }
        DeviceMemory { total, used, free: free.flatten(), reserved: None }
    }

    /// Reads its utilization from 0 to 1, power, temperature and clocks; absent where the driver does not report them, and
    /// while the GPU is suspended: a read would wake it.
    ///
    /// Sources: `gpu_busy_percent` of amdgpu, from its firmware, and its hardware monitor.
    pub fn health(&self, read_errors: &mut Vec<&'static str>) -> DeviceHealth {
        let mut health = DeviceHealth::default();
        let suspended = ["suspended", "suspending", "resuming"];
        if text(&self.folder.join("power/runtime_status")).is_ok_and(|status| suspended.contains(&&*status)) {
            return health;
        }
        let percent = value(number(&self.folder.join("gpu_busy_percent"), 100), read_errors);
        health.utilization = percent.map(|percent| percent as f64 / 100.0);
        hwmon::read(&self.folder, &mut health, read_errors);
        health
    }

    /// Returns false for the graphics of a processor. The kernel does not say so: those of Intel and others are on PCI bus 0 or
    /// on no PCI bus, and those of AMD have little memory of their own.
    fn is_discrete(&self) -> bool {
        match &*self.driver {
            "amdgpu" => number(&self.folder.join("mem_info_vram_total"), MAX_GPU_MEMORY)
                .is_ok_and(|bytes| bytes >= MIN_DISCRETE_BYTES),
            _ => self.identity.pci_bus_id.split(':').nth(1).is_some_and(|bus| bus != "00"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a sysfs with one device for each render node: its uevent and other files.
    fn host(devices: &[(&str, &[(&str, &str)])]) -> (tempfile::TempDir, HostPaths) {
        let root = tempfile::tempdir().unwrap();
        for (node, files) in devices {
            let folder = root.path().join("class/drm").join(node).join("device");
            std::fs::create_dir_all(folder.join("power")).unwrap();
            for (name, text) in *files {
                std::fs::write(folder.join(name), text).unwrap();
            }
        }
        let (sys, dev) = (root.path().to_path_buf(), root.path().join("dev"));
        (root, HostPaths { sys, dev, ..HostPaths::default() })
    }

    fn cards(host_paths: &HostPaths) -> Vec<Card> {
        let mut read_errors = vec![];
        let cards = list(host_paths, &mut read_errors).unwrap();
        assert_eq!(read_errors, Vec::<&str>::new());
        cards
    }

    const AMD: &str = "DRIVER=amdgpu\nPCI_ID=1002:744C\nPCI_SLOT_NAME=0000:03:00.0\n";

    #[test]
    fn host_without_render_nodes_has_no_gpu() {
        let (_root, host_paths) = host(&[]);
        assert!(cards(&host_paths).is_empty());
        let (_root, host_paths) =
            host(&[("card0", &[("uevent", "DRIVER=ast\nPCI_SLOT_NAME=0000:01:00.0\n")])]);
        assert!(cards(&host_paths).is_empty(), "the console of a server is no GPU");
    }

    #[test]
    fn skips_nvidia_virtual_devices_and_partitions() {
        let (_root, host_paths) = host(&[
            ("renderD128", &[("uevent", "DRIVER=nvidia\nPCI_ID=10DE:2684\nPCI_SLOT_NAME=0000:01:00.0\n")]),
            ("renderD129", &[("uevent", AMD)]),
            ("renderD130", &[("uevent", "DRIVER=virtio_gpu\nMODALIAS=virtio:d00000010v00001AF4\n")]),
            ("renderD131", &[("uevent", "MODALIAS=platform:amdgpu_xcp_1\n")]),
            ("renderD132", &[("uevent", "DRIVER=nouveau\nPCI_ID=10DE:1C82\nPCI_SLOT_NAME=0000:09:00.0\n")]),
        ]);
        let found: Vec<_> =
            cards(&host_paths).iter().map(|c| (c.driver.clone(), c.identity.vendor)).collect();
        assert_eq!(found, [("amdgpu".into(), "amd"), ("nouveau".into(), "nvidia")]);
    }

    #[test]
    fn skips_graphics_of_a_processor_beside_nvidia_only() {
        let nvidia = "DRIVER=nvidia\nPCI_ID=10DE:2684\nPCI_SLOT_NAME=0000:01:00.0\n";
        let intel = "DRIVER=i915\nPCI_ID=8086:46A6\nPCI_SLOT_NAME=0000:00:02.0\n";
        let arc = "DRIVER=xe\nPCI_ID=8086:56A0\nPCI_SLOT_NAME=0000:0a:00.0\n";
        let count = |devices: &[(&str, &[(&str, &str)])]| {
            let (_root, host_paths) = host(devices);
            cards(&host_paths).len()
        };
        let beside_nvidia = ("renderD129", &[("uevent", nvidia)][..]);
        let intel = ("renderD128", &[("uevent", intel)][..]);
        assert_eq!(count(&[intel]), 1);
        assert_eq!(count(&[intel, beside_nvidia]), 0);
        assert_eq!(count(&[intel, beside_nvidia, ("renderD130", &[("uevent", arc)])]), 2);
        for (total, is_shown) in [("536870912\n", 0), ("17163091968\n", 1)] {
            let amd = ("renderD128", &[("uevent", AMD), ("mem_info_vram_total", total)][..]);
            assert_eq!(count(&[amd, beside_nvidia]), is_shown, "{total}");
        }
        let (root, host_paths) = host(&[intel]);
        std::fs::create_dir(root.path().join("dev")).unwrap();
        std::fs::write(root.path().join("dev/nvidiactl"), "").unwrap();
        assert_eq!(cards(&host_paths).len(), 0, "the driver without its render nodes");
    }

    #[test]
    fn reads_the_identity_that_the_driver_reports() {
        let (_root, host_paths) = host(&[
            (
                "renderD128",
                &[("uevent", AMD), ("unique_id", "7f3a00c19e5b1d42\n"), ("product_name", "Radeon Pro\n")],
            ),
            ("renderD129", &[("uevent", "DRIVER=xe\nPCI_ID=8086:56A0\nPCI_SLOT_NAME=0000:0a:00.0\n")]),
        ]);
        let cards = cards(&host_paths);
        let identity = |card: &Card| {
            (
                card.identity.uuid.to_string(),
                card.identity.model.to_string(),
                card.identity.pci_bus_id.to_string(),
            )
        };
        assert_eq!(
            identity(&cards[0]),
            ("GPU-7f3a00c19e5b1d42".into(), "Radeon Pro".into(), "0000:03:00.0".into())
        );
        assert_eq!(
            identity(&cards[1]),
            ("pci-0000:0a:00.0".into(), "PCI 8086:56a0".into(), "0000:0a:00.0".into())
        );
        assert_eq!(&*cards[1].identity.index, "renderD129", "without a card node the render node names it");
    }

    #[test]
    fn missing_or_contradictory_memory_is_absent() {
        type Files = &'static [(&'static str, &'static str)];
        let cases: [(Files, DeviceMemory, &[&str]); 4] = [
            (
                &[("mem_info_vram_total", "100\n"), ("mem_info_vram_used", "40\n")],
                DeviceMemory { total: Some(100), used: Some(40), free: Some(60), reserved: None },
                &[],
            ),
            (&[], DeviceMemory::default(), &[]),
            (
                &[("mem_info_vram_total", "100\n"), ("mem_info_vram_used", "101\n")],
                DeviceMemory::default(),
                &["malformed"],
            ),
            (
                &[("mem_info_vram_total", "100\n"), ("mem_info_vram_used", "18446744073709551615\n")],
                DeviceMemory { total: Some(100), ..DeviceMemory::default() },
                &["malformed"],
            ),
        ];
        for (files, memory, expected) in cases {
            let files: Vec<_> = [("uevent", AMD)].iter().chain(files).copied().collect();
            let (_root, host_paths) = host(&[("renderD128", &files)]);
            let mut read_errors = vec![];
            assert_eq!(cards(&host_paths)[0].memory(&mut read_errors), memory);
            assert_eq!(read_errors, expected);
        }
    }

    #[test]
    fn suspended_gpu_has_no_utilization() {
        for (status, busy) in [("active\n", Some(0.37)), ("suspended\n", None)] {
            let files = [("uevent", AMD), ("gpu_busy_percent", "37\n"), ("power/runtime_status", status)];
            let (_root, host_paths) = host(&[("renderD128", &files)]);
            assert_eq!(cards(&host_paths)[0].health(&mut vec![]).utilization, busy);
        }
    }
}
