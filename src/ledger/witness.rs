//! Asks /proc about a victim, and its cgroup about the limit, while both are still there: for some milliseconds.

use std::path::PathBuf;

use super::machine::Hint;
use crate::collect::kernel_log::Entry;
use crate::discover::{Hierarchy, Version};
use crate::host::{Dir, Roots};
use crate::parse::kernel_log::{Killed, Line};
use crate::parse::process::{Stat, cgroup_path};

/// Where it looks.
#[derive(Debug)]
pub struct Witness {
    roots: Roots,
    /// Root of the memory hierarchy, and whether it is cgroup v1.
    hierarchy: Option<(PathBuf, bool)>,
    /// The kernel's pids are the pids here.
    host_pids: bool,
    /// Paths in /proc/PID/cgroup are the host's: memledger is not in a cgroup namespace of its own.
    absolute_paths: bool,
}

impl Witness {
    /// One for this host.
    pub fn new(roots: &Roots, hierarchy: Option<&Hierarchy>) -> Self {
        let init = std::fs::read(roots.process(1).join("cgroup")).unwrap_or_default();
        Self {
            roots: roots.clone(),
            hierarchy: hierarchy.map(|found| (found.root.clone(), found.version == Version::V1)),
            host_pids: roots.in_first_pid_namespace(),
            absolute_paths: !init.windows(4).any(|window| window == b":/.."),
        }
    }

    /// Entries as they were read, with what could be seen.
    pub fn look_at(&self, entries: Vec<Entry>) -> Vec<(Entry, Hint)> {
        let mut limited = None;
        let with_hint = |entry: Entry| {
            let mut hint = Hint::default();
            match &entry.line {
                Line::Context(context) => limited = context.oom_cgroup.clone(),
                Line::Killed(killed) => {
                    hint = self.hint(killed);
                    hint.limit_bytes = limited.take().and_then(|path| self.limit(&path));
                }
                Line::Invoked | Line::Group { .. } | Line::Xid(_) => {}
            }
            (entry, hint)
        };
        entries.into_iter().map(with_hint).collect()
    }

    /// The limit of a cgroup, by its path from the root; `None` also if it has none.
    fn limit(&self, path: &str) -> Option<u64> {
        let (root, v1) = self.hierarchy.as_ref()?;
        let dir = Dir::open(&root.join(path.trim_start_matches('/'))).ok()?;
        let name = if *v1 { "memory.limit_in_bytes" } else { "memory.max" };
        crate::parse::cgroup::limit(dir.file(name).ok()?.read_once(&mut Vec::new()).ok()?).flatten()
    }

    fn hint(&self, victim: &Killed) -> Hint {
        if !self.host_pids {
            return Hint::default(); // the log's pids are not the pids here
        }
        let mut buffer = Vec::new();
        let Ok(dir) = Dir::open(&self.roots.process(victim.pid)) else { return Hint::default() };
        let read = |name, buffer: &mut Vec<u8>| dir.file(name)?.read_once(buffer).map(<[u8]>::to_vec);
        let Ok(stat) = read("stat", &mut buffer) else { return Hint::default() };
        // the pid may be another process's by now
        let same = |stat: &Stat| crate::parse::printable(&stat.comm) == victim.process;
        let Some(stat) = Stat::parse(&stat).filter(same) else { return Hint::default() };
        let v1 = self.hierarchy.as_ref().is_some_and(|(_, v1)| *v1);
        let cgroup = read("cgroup", &mut buffer).ok().and_then(|text| {
            let path = String::from_utf8(cgroup_path(&text, v1)?.to_vec()).ok()?;
            // a process on its way out is shown in the root; and without a view of the host's paths only ids tell
            let named = crate::parse::container_id::in_path(&path).next().is_some();
            (path != "/" && (self.absolute_paths || named)).then_some(path)
        });
        let first = read("status", &mut buffer).ok().and_then(|text| is_first(&text));
        Hint { cgroup, first, ppid: Some(stat.ppid).filter(|ppid| *ppid != 0), limit_bytes: None }
    }
}

/// The first process of a container has the pid 1 there: the second number of its `NSpid`.
fn is_first(status: &[u8]) -> Option<bool> {
    let line = status.split(|&b| b == b'\n').find_map(|line| line.strip_prefix(b"NSpid:"))?;
    let mut pids = line.split(u8::is_ascii_whitespace).filter(|pid| !pid.is_empty());
    // host, container, and perhaps a namespace that the container made; without one of its own this does not tell
    pids.nth(1).map(|inner| inner == b"1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_process_of_a_namespace_is_told_by_its_inner_pid() {
        assert_eq!(is_first(b"Name:\thog\nNSpid:\t22212\t1\n"), Some(true));
        assert_eq!(is_first(b"Name:\thog\nNSpid:\t22213\t7\n"), Some(false));
        assert_eq!(is_first(b"Name:\tNSpid:\nNSpid:\t22213\n"), None);
        assert_eq!(is_first(b"Name:\thog\n"), None);
    }
}
