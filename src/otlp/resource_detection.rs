//! Detects name and id of the host, also from inside a container.

use std::path::Path;

use super::resource::ResourceInfo;
use crate::host::HostPaths;

/// Detects the host.
///
/// A container has its own host name and `/etc`. Those of the host are read through the host's first process, which needs the
/// host's pid namespace and CAP_SYS_PTRACE; what is not readable is omitted rather than guessed: without that namespace the
/// first process is the container's own.
pub fn host(host_paths: &HostPaths, port: Option<u16>) -> ResourceInfo {
    let instance = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if !host_paths.in_initial_pid_namespace() {
        return ResourceInfo { instance, port, ..ResourceInfo::default() };
    }
    let root_etc = host_paths.process(1).join("root/etc");
    let name = match is_in_initial_uts_namespace(host_paths) {
        true => Some(instance.clone()),
        false => first_line(&root_etc.join("hostname")),
    };
    let instance = name.clone().unwrap_or(instance);
    let id = first_line(&root_etc.join("machine-id"));
    ResourceInfo { name: name.unwrap_or_default(), id: id.unwrap_or_default(), instance, port }
}

/// Returns true if this process is in the initial UTS namespace, which has the host's name. Its number is fixed in the kernel.
fn is_in_initial_uts_namespace(host_paths: &HostPaths) -> bool {
    std::fs::read_link(host_paths.proc.join("self/ns/uts"))
        .is_ok_and(|link| link.as_os_str() == "uts:[4026531838]")
}

/// Returns the first line of a file, if there is one.
fn first_line(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    text.lines().next().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty())
}
