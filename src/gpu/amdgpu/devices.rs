//! Lists the GPUs of AMD, and reads what amdgpu reports of them in sysfs.
//!
//! A GPU has a render node (`/sys/class/drm/renderD128`). Partitions of one have render nodes too, but neither an address on the PCI
//! bus nor memory of their own: they are skipped.
//!
//! Beside GPUs of NVIDIA's driver the graphics of a processor are skipped too, unless there is another GPU of AMD: they show a
//! desktop or nothing.

use std::path::PathBuf;
use std::sync::Arc;

use super::hwmon;
use super::sysfs::{names, number, text, value};
use crate::gpu::{DeviceHealth, DeviceMemory, GpuIdentity};
use crate::host::{HostPaths, ReadError};
use crate::parse::MAX_GPU_MEMORY;
use crate::text::bounded;

/// The kernel's driver.
const DRIVER: &str = "amdgpu";
/// A GPU with less memory of its own is a part of a processor, to which the firmware assigned some of the host's memory.
const MIN_DISCRETE_BYTES: u64 = 4 << 30;

/// One GPU.
#[derive(Clone, Debug)]
pub struct Card {
    /// Its identity.
    pub identity: Arc<GpuIdentity>,
    /// Its nodes below `/dev/dri`, such as `card0` and `renderD128`.
    pub nodes: Vec<String>,
    folder: PathBuf,
}

/// Lists the GPUs in the order of their render nodes. Empty if this host has none.
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
        if let (DRIVER, Some(address)) = (driver, key("PCI_SLOT_NAME")) {
            let card = Card::new(folder, node, address, key("PCI_ID").unwrap_or_default());
            let is_new =
                |card: &Card| cards.iter().all(|other| other.identity.pci_bus_id != card.identity.pci_bus_id);
            let card = Some(card).filter(is_new); // a GPU may have several render nodes
            cards.extend(card);
        }
    }
    if has_nvidia && !cards.iter().any(Card::is_discrete) {
        cards.clear();
    }
    Ok(cards)
}

impl Card {
    fn new(folder: PathBuf, node: String, address: &str, pci_id: &str) -> Self {
        let text = |name: &str| text(&folder.join(name)).ok().filter(|text| !text.is_empty());
        let mut nodes = names(&folder.join("drm"), "card").unwrap_or_default(); // the card names it
        nodes.push(node);
        let unnamed = || format!("PCI {}", pci_id.to_ascii_lowercase());
        let identity = GpuIdentity {
            vendor: "amd",
            index: nodes[0].as_str().into(),
            uuid: match text("unique_id") {
                Some(unique) => bounded(&format!("GPU-{unique}")),
                None => bounded(&format!("pci-{address}")),
            },
            model: bounded(&text("product_name").unwrap_or_else(unnamed)),
            pci_bus_id: bounded(address),
            ..GpuIdentity::default()
        };
        Self { identity: Arc::new(identity), nodes, folder }
    }

    /// Reads its own memory.
    ///
    /// Source: `mem_info_vram_total` and `mem_info_vram_used`. Used includes memory that the driver reserves.
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

    /// Returns false for the graphics of a processor. The kernel does not say so: they have little memory of their own.
    fn is_discrete(&self) -> bool {
        number(&self.folder.join("mem_info_vram_total"), MAX_GPU_MEMORY)
            .is_ok_and(|bytes| bytes >= MIN_DISCRETE_BYTES)
    }
}

#[cfg(test)]
impl Card {
    /// Returns a card with this node and no files.
    pub fn with_node(node: &str) -> Self {
        Self { identity: Arc::default(), nodes: vec![node.to_owned()], folder: PathBuf::new() }
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
    fn skips_other_drivers_and_partitions() {
        let (_root, host_paths) = host(&[
            ("renderD128", &[("uevent", "DRIVER=nvidia\nPCI_ID=10DE:2684\nPCI_SLOT_NAME=0000:01:00.0\n")]),
            ("renderD129", &[("uevent", AMD), ("mem_info_vram_total", "17163091968\n")]),
            ("renderD130", &[("uevent", "DRIVER=i915\nPCI_ID=8086:46A6\nPCI_SLOT_NAME=0000:00:02.0\n")]),
            ("renderD131", &[("uevent", "MODALIAS=platform:amdgpu_xcp_1\n")]),
            ("renderD132", &[("uevent", AMD)]),
        ]);
        let found: Vec<_> = cards(&host_paths).iter().map(|card| card.identity.index.to_string()).collect();
        assert_eq!(found, ["renderD129"], "once, by its first node");
    }

    #[test]
    fn skips_graphics_of_a_processor_beside_nvidia_only() {
        let nvidia = "DRIVER=nvidia\nPCI_ID=10DE:2684\nPCI_SLOT_NAME=0000:01:00.0\n";
        let count = |devices: &[(&str, &[(&str, &str)])]| {
            let (_root, host_paths) = host(devices);
            cards(&host_paths).len()
        };
        let beside_nvidia = ("renderD129", &[("uevent", nvidia)][..]);
        let small = ("renderD128", &[("uevent", AMD), ("mem_info_vram_total", "536870912\n")][..]);
        let large = ("renderD128", &[("uevent", AMD), ("mem_info_vram_total", "17163091968\n")][..]);
        assert_eq!(count(&[small]), 1);
        assert_eq!(count(&[small, beside_nvidia]), 0);
        assert_eq!(count(&[large, beside_nvidia]), 1);
        let (root, host_paths) = host(&[small]);
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
            ("renderD129", &[("uevent", "DRIVER=amdgpu\nPCI_ID=1002:73BF\nPCI_SLOT_NAME=0000:0a:00.0\n")]),
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
            ("pci-0000:0a:00.0".into(), "PCI 1002:73bf".into(), "0000:0a:00.0".into())
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
