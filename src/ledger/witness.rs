//! Asks /proc about a victim, and its cgroup about the limit, while both are still there: for some milliseconds.
//!
//! Only `comm` and `cgroup` are read, which do not hold on to the victim's memory: what does can cost a second process its
//! life (docs/decisions/0017).

use std::path::PathBuf;

use super::machine::Hint;
use crate::collect::kernel_log::Entry;
use crate::discover::{Hierarchy, Version};
use crate::host::{Dir, Roots};
use crate::parse::kernel_log::{Killed, Line};
use crate::parse::process::cgroup_path;

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
        // the pid may be another process's by now
        let comm = read("comm", &mut buffer).unwrap_or_default();
        if crate::parse::printable(comm.strip_suffix(b"\n").unwrap_or(&comm)) != victim.process {
            return Hint::default();
        }
        let v1 = self.hierarchy.as_ref().is_some_and(|(_, v1)| *v1);
        let cgroup = read("cgroup", &mut buffer).ok().and_then(|text| {
            let path = String::from_utf8(cgroup_path(&text, v1)?.to_vec()).ok()?;
            // a process on its way out is shown in the root; and without a view of the host's paths only ids tell
            let named = crate::parse::container_id::in_path(&path).next().is_some();
            (path != "/" && (self.absolute_paths || named)).then_some(path)
        });
        Hint { cgroup, ..Hint::default() }
    }
}
