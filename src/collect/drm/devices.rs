//! Which GPUs of DRM drivers there are, and what sysfs tells of their memory.
//!
//! A GPU has a render node (`/sys/class/drm/renderD128`); screens and graphics chips of servers that only show a console
//! have none. NVIDIA's own driver makes render nodes too, but keeps no statistics there: NVML is its source, and its GPUs
//! are left out here, so that nothing is shown twice. So are devices that are no hardware.
//!
//! A GPU's memory is told by amdgpu alone, in files beside its device.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::collect::gpu::{Identity, Memory};
use crate::host::{Dir, KernelFile, ReadError, Roots};
use crate::parse::number;
use crate::series::bounded;

/// Drivers whose render nodes are none of this source's GPUs.
const NOT_OURS: [&str; 8] =
    ["nvidia", "nvidia-drm", "virtio_gpu", "virtio-pci", "vmwgfx", "qxl", "vkms", "vgem"];
/// A partition of an AMD GPU has a render node, but no memory and no statistics of its own.
const PARTITION: &str = "amdgpu_xcp";
/// No GPU has a PiB of memory.
pub const MOST_MEMORY: u64 = 1 << 50;

/// One GPU of a DRM driver.
#[derive(Clone, Debug)]
pub struct Card {
    /// Who it is.
    pub identity: Arc<Identity>,
    /// The driver of the device, such as `amdgpu`.
    pub driver: Arc<str>,
    /// Its address on its bus: what `drm-pdev` of its clients says, if it is on the PCI bus.
    pub address: Arc<str>,
    /// Its nodes below `/dev/dri`, such as `card0` and `renderD128`.
    pub nodes: Vec<String>,
    folder: PathBuf,
}

/// All GPUs of DRM drivers, in the order of their render nodes. None if this host has no such thing.
///
/// # Errors
/// The list cannot be read. A device of which this holds is pushed to `faults`, and the others stay.
pub fn list(roots: &Roots, faults: &mut Vec<&'static str>) -> Result<Vec<Card>, ReadError> {
    let class = roots.sys.join("class/drm");
    let mut nodes = match Dir::open(&class) {
        Ok(dir) => render_nodes(&dir)?,
        Err(error) if error.is_gone() => return Ok(vec![]),
        Err(error) => return Err(error),
    };
    nodes.sort_by_key(|name| (name.len(), name.clone()));
    let mut cards: Vec<Card> = Vec::new();
    for node in nodes {
        match look(&class.join(&node).join("device"), &node) {
            Ok(Some(card)) if cards.iter().all(|other| other.address != card.address) => cards.push(card),
            Ok(_) => {}
            Err(error) => faults.extend(error.fault_reason()),
        }
    }
    Ok(cards)
}

fn render_nodes(dir: &Dir) -> Result<Vec<String>, ReadError> {
    let mut nodes = Vec::new();
    dir.for_each(&mut Vec::new(), |name, _| {
        nodes.extend(name.to_str().filter(|name| name.starts_with("renderD")).map(str::to_owned));
    })?;
    Ok(nodes)
}

/// The device of a render node; `None` if it is not one of this source.
fn look(folder: &Path, node: &str) -> Result<Option<Card>, ReadError> {
    let mut buffer = Vec::new();
    let uevent = KernelFile::open(&folder.join("uevent"))?;
    let uevent = String::from_utf8_lossy(uevent.read_once(&mut buffer)?).into_owned();
    let value = |key: &str| uevent.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    let driver = value("DRIVER").unwrap_or_default();
    if NOT_OURS.contains(&driver) || value("MODALIAS").is_some_and(|alias| alias.contains(PARTITION)) {
        return Ok(None);
    }
    let place = std::fs::canonicalize(folder).ok();
    let place = place.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    let slot = value("PCI_SLOT_NAME").map(str::to_owned);
    let Some(address) = slot.clone().or(place) else { return Ok(None) };
    let mut nodes = vec![node.to_owned()];
    if let Ok(dir) = Dir::open(&folder.join("drm")) {
        dir.for_each(&mut buffer, |name, _| {
            nodes.extend(name.to_str().filter(|name| name.starts_with("card")).map(str::to_owned));
        })?;
    }
    nodes.sort(); // the card stands before the render node
    let text = |name: &str| text(folder, name);
    let id = value("PCI_ID").unwrap_or_default().to_ascii_lowercase();
    let identity = Identity {
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
        ..Identity::default()
    };
    Ok(Some(Card {
        identity: Arc::new(identity),
        driver: bounded(driver),
        address: bounded(&address),
        nodes,
        folder: folder.to_path_buf(),
    }))
}

/// The maker, by its number on the PCI bus, else by the driver; empty if neither is known.
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

/// The text of a file that only some drivers have.
fn text(folder: &Path, name: &str) -> Option<String> {
    let text = std::fs::read(folder.join(name)).ok()?;
    let text = String::from_utf8_lossy(&text).trim().to_owned();
    (!text.is_empty()).then_some(text)
}

impl Card {
    /// Memory of its own; all absent where the driver does not tell, or has none.
    ///
    /// Source: `mem_info_vram_total` and `mem_info_vram_used` of amdgpu. What the driver keeps for itself is in used.
    pub fn memory(&self, faults: &mut Vec<&'static str>) -> Memory {
        let mut read = |name: &'static str| match self.number(name) {
            Ok(value) => Some(value),
            Err(error) => {
                faults.extend(error.fault_reason());
                None
            }
        };
        let (total, used) = (read("mem_info_vram_total"), read("mem_info_vram_used"));
        let free = match total.zip(used).map(|(total, used)| total.checked_sub(used)) {
            Some(None) => {
                faults.push("malformed");
                return Memory::default();
            }
            free => free.flatten(),
        };
        Memory { total, used, free, reserved: None }
    }

    /// True if the driver tells of memory of its own, even if the figure cannot be had just now.
    pub fn has_own_memory(&self) -> bool {
        self.folder.join("mem_info_vram_total").exists()
    }

    /// How busy it is, from 0 to 1; `None` where the driver does not tell, and while the GPU sleeps: asking would wake it.
    ///
    /// Source: `gpu_busy_percent` of amdgpu, which its firmware keeps.
    pub fn busy(&self, faults: &mut Vec<&'static str>) -> Option<f64> {
        let asleep = ["suspended", "suspending", "resuming"];
        if text(&self.folder, "power/runtime_status").is_some_and(|status| asleep.contains(&&*status)) {
            return None;
        }
        match self.number("gpu_busy_percent") {
            Ok(percent) if percent <= 100 => Some(percent as f64 / 100.0),
            Ok(_) => {
                faults.push("malformed");
                None
            }
            Err(error) => {
                faults.extend(error.fault_reason());
                None
            }
        }
    }

    fn number(&self, name: &'static str) -> Result<u64, ReadError> {
        let file = KernelFile::open(&self.folder.join(name))?;
        let mut buffer = Vec::new();
        let value = number(file.read_once(&mut buffer)?).filter(|value| *value <= MOST_MEMORY);
        value.ok_or_else(|| ReadError::malformed(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sysfs with one device for each render node: its uevent and other files.
    fn host(devices: &[(&str, &[(&str, &str)])]) -> (tempfile::TempDir, Roots) {
        let root = tempfile::tempdir().unwrap();
        for (node, files) in devices {
            let folder = root.path().join("class/drm").join(node).join("device");
            std::fs::create_dir_all(folder.join("power")).unwrap();
            for (name, text) in *files {
                std::fs::write(folder.join(name), text).unwrap();
            }
        }
        let roots = Roots { sys: root.path().to_path_buf(), ..Roots::default() };
        (root, roots)
    }

    fn cards(roots: &Roots) -> Vec<Card> {
        let mut faults = vec![];
        let cards = list(roots, &mut faults).unwrap();
        assert_eq!(faults, Vec::<&str>::new());
        cards
    }

    const AMD: &str = "DRIVER=amdgpu\nPCI_ID=1002:744C\nPCI_SLOT_NAME=0000:03:00.0\n";

    #[test]
    fn a_host_without_render_nodes_has_no_gpu_here() {
        let (_root, roots) = host(&[]);
        assert!(cards(&roots).is_empty());
        let (_root, roots) = host(&[("card0", &[("uevent", "DRIVER=ast\nPCI_SLOT_NAME=0000:01:00.0\n")])]);
        assert!(cards(&roots).is_empty(), "a server's console shows pictures and computes nothing");
    }

    #[test]
    fn gpus_of_nvidias_driver_virtual_ones_and_partitions_are_left_out() {
        let (_root, roots) = host(&[
            ("renderD128", &[("uevent", "DRIVER=nvidia\nPCI_ID=10DE:2684\nPCI_SLOT_NAME=0000:01:00.0\n")]),
            ("renderD129", &[("uevent", AMD)]),
            ("renderD130", &[("uevent", "DRIVER=virtio_gpu\nMODALIAS=virtio:d00000010v00001AF4\n")]),
            ("renderD131", &[("uevent", "MODALIAS=platform:amdgpu_xcp_1\n")]),
            ("renderD132", &[("uevent", "DRIVER=nouveau\nPCI_ID=10DE:1C82\nPCI_SLOT_NAME=0000:09:00.0\n")]),
        ]);
        let found: Vec<_> = cards(&roots).iter().map(|c| (c.driver.clone(), c.identity.vendor)).collect();
        assert_eq!(found, [("amdgpu".into(), "amd"), ("nouveau".into(), "nvidia")]);
    }

    #[test]
    fn a_gpu_tells_who_it_is_as_far_as_its_driver_does() {
        let (_root, roots) = host(&[
            (
                "renderD128",
                &[("uevent", AMD), ("unique_id", "7f3a00c19e5b1d42\n"), ("product_name", "Radeon Pro\n")],
            ),
            ("renderD129", &[("uevent", "DRIVER=xe\nPCI_ID=8086:56A0\nPCI_SLOT_NAME=0000:0a:00.0\n")]),
        ]);
        let cards = cards(&roots);
        let told = |card: &Card| {
            (card.identity.uuid.to_string(), card.identity.model.to_string(), card.address.to_string())
        };
        assert_eq!(
            told(&cards[0]),
            ("GPU-7f3a00c19e5b1d42".into(), "Radeon Pro".into(), "0000:03:00.0".into())
        );
        assert_eq!(
            told(&cards[1]),
            ("pci-0000:0a:00.0".into(), "PCI 8086:56a0".into(), "0000:0a:00.0".into())
        );
        assert_eq!(&*cards[1].identity.index, "renderD129", "without a card node the render node names it");
    }

    #[test]
    fn memory_that_is_not_told_or_contradicts_itself_is_absent() {
        type Files = &'static [(&'static str, &'static str)];
        let told: [(Files, Memory, &[&str]); 4] = [
            (
                &[("mem_info_vram_total", "100\n"), ("mem_info_vram_used", "40\n")],
                Memory { total: Some(100), used: Some(40), free: Some(60), reserved: None },
                &[],
            ),
            (&[], Memory::default(), &[]),
            (
                &[("mem_info_vram_total", "100\n"), ("mem_info_vram_used", "101\n")],
                Memory::default(),
                &["malformed"],
            ),
            (
                &[("mem_info_vram_total", "100\n"), ("mem_info_vram_used", "18446744073709551615\n")],
                Memory { total: Some(100), ..Memory::default() },
                &["malformed"],
            ),
        ];
        for (files, memory, expected) in told {
            let files: Vec<_> = [("uevent", AMD)].iter().chain(files).copied().collect();
            let (_root, roots) = host(&[("renderD128", &files)]);
            let mut faults = vec![];
            assert_eq!(cards(&roots)[0].memory(&mut faults), memory);
            assert_eq!(faults, expected);
        }
    }

    #[test]
    fn a_gpu_that_sleeps_is_not_asked_how_busy_it_is() {
        for (status, busy) in [("active\n", Some(0.37)), ("suspended\n", None)] {
            let files = [("uevent", AMD), ("gpu_busy_percent", "37\n"), ("power/runtime_status", status)];
            let (_root, roots) = host(&[("renderD128", &files)]);
            assert_eq!(cards(&roots)[0].busy(&mut vec![]), busy);
        }
    }
}
