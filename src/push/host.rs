//! What this host is called, as far as that can be known from inside a container.

use std::path::Path;

use crate::export::otlp::Host;
use crate::host::Roots;

/// Looks it up.
///
/// A container has a name and an `/etc` of its own. Those of the host are found through its first process, which needs
/// CAP_SYS_PTRACE; what cannot be found is left out rather than told wrong.
pub fn host(roots: &Roots, port: Option<u16>) -> Host {
    let first = roots.process(1).join("root/etc");
    let own = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let name = match in_hosts_namespace(roots) {
        Some(true) => own,
        _ => line(&first.join("hostname")).unwrap_or(own),
    };
    Host { name, id: line(&first.join("machine-id")).unwrap_or_default(), port }
}

/// Whether our name is the host's; `None` if that cannot be seen.
fn in_hosts_namespace(roots: &Roots) -> Option<bool> {
    let of = |process: &str| std::fs::read_link(roots.proc.join(process).join("ns/uts")).ok();
    Some(of("1")? == of("self")?)
}

/// The first line of a file, if there is one.
fn line(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    text.lines().next().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty())
}
