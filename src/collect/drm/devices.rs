//! Lists the GPUs of DRM drivers, and reads what sysfs reports of their memory.
//!
//! A GPU has a render node (`/sys/class/drm/renderD128`); displays, and graphics chips of servers that only show a console,
//! have none. NVIDIA's own driver also has render nodes, but no statistics there: its GPUs are read through NVML and
//! skipped here, so that none is exported twice. Virtual devices are skipped too.
//!
//! Only amdgpu reports the memory of a GPU, in files of its device directory.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::collect::gpu::{DeviceMemory, GpuIdentity};
use crate::host::{Dir, HostPaths, KernelFile, ReadError};
use crate::parse::number;
use crate::series::bounded;

/// Drivers whose render nodes are skipped.
const SKIPPED_DRIVERS: [&str; 8] =
    ["nvidia", "nvidia-drm", "virtio_gpu", "virtio-pci", "vmwgfx", "qxl", "vkms", "vgem"];
/// The driver of partitions of an AMD GPU, which have render nodes but no memory and statistics of their own.
const PARTITION: &str = "amdgpu_xcp";
/// Maximum plausible memory of a GPU, 1 PiB.
pub const MAX_MEMORY: u64 = 1 << 50;

/// One GPU of a DRM driver.
#[derive(Clone, Debug)]
pub struct Card {
    /// Its identity.
    pub identity: Arc<GpuIdentity>,
    /// The driver of the device, such as `amdgpu`.
    pub driver: Arc<str>,
    /// Its address on its bus; on the PCI bus, the `drm-pdev` of its clients.
    pub address: Arc<str>,
    /// Its nodes below `/dev/dri`, such as `card0` and `renderD128`.
    pub nodes: Vec<String>,
    folder: PathBuf,
}

/// Lists the GPUs of DRM drivers, in the order of their render nodes. Empty if this host has none.
///
/// # Errors
/// The list cannot be read. If a single device cannot be read, its error is pushed to `read_errors` and it is skipped.
pub fn list(host_paths: &HostPaths, read_errors: &mut Vec<&'static str>) -> Result<Vec<Card>, ReadError> {
    let class = host_paths.sys.join("class/drm");
    let mut nodes = match Dir::open(&class) {
        Ok(dir) => render_nodes(&dir)?,
        Err(error) if error.is_gone() => return Ok(vec![]),
        Err(error) => return Err(error),
    };
    nodes.sort_by_key(|name| (name.len(), name.clone()));
    let mut cards: Vec<Card> = Vec::new();
    for node in nodes {
        match read_card(&class.join(&node).join("device"), &node) {
            Ok(Some(card)) if cards.iter().all(|other| other.address != card.address) => cards.push(card),
            Ok(_) => {}
            Err(error) => read_errors.extend(error.reason_label()),
        }
    }
    Ok(cards)
}

fn render_nodes(dir: &Dir) -> Result<Vec<String>, ReadError> {
    let mut nodes = Vec::new();
    dir.for_each(usize::MAX, &mut Vec::new(), |name, _| {
        nodes.extend(name.to_str().filter(|name| name.starts_with("renderD")).map(str::to_owned));
    })?;
    Ok(nodes)
}

/// Reads the device of a render node; `None` if it is to be skipped.
fn read_card(folder: &Path, node: &str) -> Result<Option<Card>, ReadError> {
    let mut buffer = Vec::new();
    let uevent = KernelFile::open(&folder.join("uevent"))?;
    let uevent = String::from_utf8_lossy(uevent.read_once(&mut buffer)?).into_owned();
    let value = |key: &str| uevent.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    let driver = value("DRIVER").unwrap_or_default();
    if SKIPPED_DRIVERS.contains(&driver) || value("MODALIAS").is_some_and(|alias| alias.contains(PARTITION)) {
        return Ok(None);
    }
    let device_name = std::fs::canonicalize(folder).ok();
    let device_name =
        device_name.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    let slot = value("PCI_SLOT_NAME").map(str::to_owned);
    let Some(address) = slot.clone().or(device_name) else { return Ok(None) };
    let mut nodes = vec![node.to_owned()];
    if let Ok(dir) = Dir::open(&folder.join("drm")) {
        dir.for_each(usize::MAX, &mut buffer, |name, _| {
            nodes.extend(name.to_str().filter(|name| name.starts_with("card")).map(str::to_owned));
        })?;
    }
    nodes.sort(); // the card comes before the render node
    let text = |name: &str| text(folder, name);
    let id = value("PCI_ID").unwrap_or_default().to_ascii_lowercase();
    let identity = GpuIdentity {
        vendor: vendor(&id, driver),
        index: nodes[0].as_str().into(),
        uuid: match text("unique_id") {
            Some(unique) => bounded(&format!("GPU-{unique}")),
            None => bounded(&format!("{}-{address}", if slot.is_some() { "pci" } else { "platform" })),
        },
        model: bounded(&text("product_name").unwrap_or_else(|| match id.as_str() {
            "" => value("OF_COMPATIBLE_0").unwrap_or(driver).to_owned(),
            id => format!("PCI {id}"),
        })),
        pci_bus_id: slot.as_deref().map_or_else(|| "".into(), bounded),
        ..GpuIdentity::default()
    };
    Ok(Some(Card {
        identity: Arc::new(identity),
        driver: bounded(driver),
        address: bounded(&address),
        nodes,
        folder: folder.to_path_buf(),
    }))
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

/// Reads the text of a file that only some drivers have.
fn text(folder: &Path, name: &str) -> Option<String> {
    let text = std::fs::read(folder.join(name)).ok()?;
    let text = String::from_utf8_lossy(&text).trim().to_owned();
    (!text.is_empty()).then_some(text)
}

impl Card {
    /// Reads its own memory; all absent where the driver does not report it, or the GPU has none.
    ///
    /// Source: `mem_info_vram_total` and `mem_info_vram_used` of amdgpu. Used includes memory that the driver reserves.
    pub fn memory(&self, read_errors: &mut Vec<&'static str>) -> DeviceMemory {
        let mut read = |name: &'static str| match self.number(name) {
            Ok(value) => Some(value),
            Err(error) => {
                read_errors.extend(error.reason_label());
                None
            }
        };
        let (total, used) = (read("mem_info_vram_total"), read("mem_info_vram_used"));
        let free = match total.zip(used).map(|(total, used)| total.checked_sub(used)) {
            Some(None) => {
                read_errors.push("malformed");
                return DeviceMemory::default();
            }
            free => free.flatten(),
        };
        DeviceMemory { total, used, free, reserved: None }
    }

    /// Returns true if the driver reports memory of its own, even if its value cannot be read now.
    pub fn has_own_memory(&self) -> bool {
        self.folder.join("mem_info_vram_total").exists()
    }

    /// Reads its utilization from 0 to 1; `None` where the driver does not report it, and while the GPU is suspended: a
    /// read would wake it.
    ///
    /// Source: `gpu_busy_percent` of amdgpu, from its firmware.
    pub fn utilization(&self, read_errors: &mut Vec<&'static str>) -> Option<f64> {
        let suspended = ["suspended", "suspending", "resuming"];
        if text(&self.folder, "power/runtime_status").is_some_and(|status| suspended.contains(&&*status)) {
            return None;
        }
        match self.number("gpu_busy_percent") {
            Ok(percent) if percent <= 100 => Some(percent as f64 / 100.0),
            Ok(_) => {
                read_errors.push("malformed");
                None
            }
            Err(error) => {
                read_errors.extend(error.reason_label());
                None
            }
        }
    }

    fn number(&self, name: &'static str) -> Result<u64, ReadError> {
        let file = KernelFile::open(&self.folder.join(name))?;
        let mut buffer = Vec::new();
        let value = number(file.read_once(&mut buffer)?).filter(|value| *value <= MAX_MEMORY);
        value.ok_or_else(|| ReadError::malformed(name))
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
        let host_paths = HostPaths { sys: root.path().to_path_buf(), ..HostPaths::default() };
        (root, host_paths)
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
            (card.identity.uuid.to_string(), card.identity.model.to_string(), card.address.to_string())
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
            assert_eq!(cards(&host_paths)[0].utilization(&mut vec![]), busy);
        }
    }
}
