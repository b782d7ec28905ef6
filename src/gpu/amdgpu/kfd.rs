//! Memory of the processes that compute on GPUs of AMD, from the compute driver (KFD): `/sys/class/kfd/kfd/proc/PID/vram_GPU`.
//!
//! Every user may read these files, and they list the processes, so neither a search nor a permission is needed. They contain what
//! a process allocated for computing. The pids are those of the initial pid namespace.

use std::collections::HashMap;
use std::path::Path;

use super::sysfs::{names, number, text, value};
use crate::host::process::ProcessFacts;
use crate::host::{Dir, HostPaths, ReadError};
use crate::parse::MAX_GPU_MEMORY;

/// A process that computes.
#[derive(Debug, PartialEq)]
pub struct ComputeProcess {
    /// The process.
    pub facts: ProcessFacts,
    /// The bytes that it allocated, by render node.
    pub memory: Vec<(String, u64)>,
}

/// Reads the processes that compute; `None` on a host without the driver, where they are unknown. A process that cannot be read
/// is omitted.
pub fn processes(
    host_paths: &HostPaths,
    cgroup_v1: bool,
    read_errors: &mut Vec<&'static str>,
) -> Option<Vec<ComputeProcess>> {
    let root = host_paths.sys.join("class/kfd/kfd");
    if !root.exists() {
        return None;
    }
    let pids = value(names(&root.join("proc"), ""), read_errors)?;
    let nodes = if pids.is_empty() { HashMap::new() } else { render_nodes(&root, read_errors) };
    let (mut processes, mut buffer) = (Vec::new(), Vec::new());
    for pid in pids.iter().filter_map(|pid| pid.parse().ok()) {
        let mut read = || {
            let memory = memory_of(&root.join(format!("proc/{pid}")), &nodes)?;
            let facts =
                ProcessFacts::read(&Dir::open(&host_paths.process(pid))?, pid, cgroup_v1, &mut buffer)?;
            Ok(ComputeProcess { facts, memory })
        };
        processes.extend(value(read(), read_errors));
    }
    Some(processes)
}

/// Reads the memory of a process by render node. GPUs without one are partitions, or are gone.
fn memory_of(folder: &Path, nodes: &HashMap<String, String>) -> Result<Vec<(String, u64)>, ReadError> {
    let mut memory = Vec::new();
    for file in names(folder, "vram_")? {
        let bytes = number(&folder.join(&file), MAX_GPU_MEMORY)?;
        memory.extend(nodes.get(&file["vram_".len()..]).map(|node| (node.clone(), bytes)));
    }
    Ok(memory)
}

/// Reads the render node of each GPU, by the driver's id of the GPU. A GPU that cannot be read is omitted.
fn render_nodes(root: &Path, read_errors: &mut Vec<&'static str>) -> HashMap<String, String> {
    let topology = root.join("topology/nodes");
    let mut nodes = HashMap::new();
    for node in value(names(&topology, ""), read_errors).unwrap_or_default() {
        let folder = topology.join(node);
        let properties = value(text(&folder.join("properties")), read_errors).unwrap_or_default();
        let minor = properties.lines().find_map(|line| line.strip_prefix("drm_render_minor "));
        // a processor has 0
        let Some(minor) = minor.filter(|minor| *minor != "0") else { continue };
        if let Some(id) = value(text(&folder.join("gpu_id")), read_errors) {
            nodes.insert(id, format!("renderD{minor}"));
        }
    }
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::process::ProcessId;

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn lists_processes_with_their_memory_by_render_node() {
        let root = tempfile::tempdir().unwrap();
        let (sys, proc) = (root.path().join("sys"), root.path().join("proc"));
        let host_paths = HostPaths { sys: sys.clone(), proc: proc.clone(), ..HostPaths::default() };
        let mut read_errors = vec![];
        let list = |read_errors: &mut Vec<&'static str>| processes(&host_paths, false, read_errors);
        assert_eq!(list(&mut read_errors), None, "no driver");
        let node = |number: u32, gpu: u32, minor: u32| {
            let folder = format!("class/kfd/kfd/topology/nodes/{number}");
            write(&sys, &format!("{folder}/gpu_id"), &format!("{gpu}\n"));
            let properties = format!("cpu_cores_count 0\nlocation_id 768\ndrm_render_minor {minor}\n");
            write(&sys, &format!("{folder}/properties"), &properties);
        };
        node(0, 0, 0);
        node(1, 30381, 128);
        node(2, 45002, 129);
        for (file, bytes) in
            [("7/vram_30381", 4096), ("7/vram_45002", 0), ("7/pasid", 32770), ("9/vram_30381", 1)]
        {
            write(&sys, &format!("class/kfd/kfd/proc/{file}"), &format!("{bytes}\n"));
        }
        let zeros = "0 ".repeat(17);
        write(&proc, "7/stat", &format!("7 (train) S 1 {zeros}700 0\n"));
        write(&proc, "7/cgroup", "0::/docker/abc\n");
        let id = ProcessId { pid: 7, start_ticks: 700 };
        let facts = ProcessFacts { id, ppid: 1, comm: "train".into(), cgroup: "/docker/abc".into() };
        let memory = vec![("renderD128".to_owned(), 4096), ("renderD129".to_owned(), 0)];
        assert_eq!(list(&mut read_errors), Some(vec![ComputeProcess { facts, memory }]));
        assert_eq!(read_errors, Vec::<&str>::new(), "a process that has ended is no error");
        write(&sys, "class/kfd/kfd/proc/7/vram_30381", "18446744073709551615\n");
        assert_eq!(list(&mut read_errors), Some(vec![]));
        assert_eq!(read_errors, ["malformed"]);
    }
}
