//! What the kernel logs of memory and processes that it refused, or that a task waits for, where it kills nothing.

use serde::Serialize;

use super::digits_before;
use super::entries::TextEntry;
use super::text_line::{PrefixedLine, undecorated};
use crate::parse::{container_id, find};
use crate::text::printable;

/// Refusals that are kept, the newest.
const MAX_REFUSALS: usize = 100;

/// What was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "refusal", rename_all = "snake_case")]
pub enum RefusalKind {
    /// A process or a thread, by the pids limit of a cgroup.
    Fork,
    /// A mapping larger than what may be committed.
    Overcommit {
        /// Its size; older kernels do not log it.
        #[serde(skip_serializing_if = "Option::is_none")]
        bytes: Option<u64>,
    },
    /// Contiguous pages: 2^order of them.
    Pages {
        /// See above.
        order: u32,
    },
    /// Memory of NVIDIA's driver.
    Driver,
    /// A program ended itself by `abort()`, as the first process of a container.
    Abort,
    /// Nothing: a task waits in the throttling of `memory.high`.
    Throttled,
}

/// A refusal that the kernel logged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KernelRefusal {
    /// What was refused.
    #[serde(flatten)]
    pub kind: RefusalKind,
    /// The first time, as the log has it; empty without one.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub stamp: String,
    /// The process; empty where the line does not name it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub process: String,
    /// Its pid.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The cgroup; empty where the line does not name it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cgroup: String,
    /// The id of the container in the line; empty without one.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub container_id: String,
    /// How often it was logged in a row.
    pub count: u64,
}

/// Reads the entries of a log.
#[derive(Debug, Default)]
pub struct RefusalReader {
    refusals: Vec<KernelRefusal>,
    /// A task that hangs, whose stack follows.
    hung: Option<KernelRefusal>,
}

impl RefusalReader {
    /// Reads an entry.
    pub fn push(&mut self, entry: &TextEntry) {
        if entry.is_other {
            return;
        }
        let line = undecorated(&entry.text);
        let PrefixedLine { stamp, is_kernel, text, .. } = PrefixedLine::of(&line);
        if !is_kernel {
            return;
        }
        let beside = || entry.stamp.as_ref().map(|stamp| stamp.text.clone());
        let stamp = stamp.map(printable).or_else(beside).unwrap_or_default();
        if let Some(hung) = parse_hung(text) {
            self.hung = Some(KernelRefusal { stamp, ..hung });
        } else if find(text, b"mem_cgroup_handle_over_high").is_some() {
            self.hung.take().into_iter().for_each(|hung| self.add(hung));
        } else if let Some(refusal) = parse(text) {
            self.add(KernelRefusal { stamp, ..refusal });
        }
    }

    /// Returns the refusals, oldest first.
    pub fn finish(self) -> Vec<KernelRefusal> {
        self.refusals
    }

    fn add(&mut self, refusal: KernelRefusal) {
        let is_again = |last: &&mut KernelRefusal| {
            std::mem::discriminant(&last.kind) == std::mem::discriminant(&refusal.kind)
                && (last.pid, &last.cgroup, &last.container_id)
                    == (refusal.pid, &refusal.cgroup, &refusal.container_id)
        };
        if let Some(last) = self.refusals.last_mut().filter(is_again) {
            last.count += 1;
            return;
        }
        self.refusals.push(refusal);
        if self.refusals.len() > MAX_REFUSALS {
            self.refusals.remove(0);
        }
    }
}

impl KernelRefusal {
    fn new(kind: RefusalKind) -> Self {
        Self {
            kind,
            stamp: String::new(),
            process: String::new(),
            pid: None,
            cgroup: String::new(),
            container_id: String::new(),
            count: 1,
        }
    }

    /// Returns whether it is of what is called so.
    pub fn matches(&self, wanted: &str) -> bool {
        const SHORT_ID: usize = 12;
        self.process == wanted
            || wanted.len() >= SHORT_ID && self.container_id.starts_with(wanted)
            || self.cgroup.split('/').any(|part| !part.is_empty() && part == wanted)
    }
}

fn parse(text: &[u8]) -> Option<KernelRefusal> {
    if let Some(path) = text.strip_prefix(b"cgroup: fork rejected by pids controller in ") {
        let cgroup = printable(path);
        let container_id = id_in(&cgroup);
        return Some(KernelRefusal { cgroup, container_id, ..KernelRefusal::new(RefusalKind::Fork) });
    }
    if let Some(rest) = text.strip_prefix(b"__vm_enough_memory: pid: ") {
        let (pid, rest) = digits_before(rest, b", comm: ")?;
        let end = find(rest, b", bytes: ").or_else(|| find(rest, b", no"))?;
        let bytes = rest[end..].strip_prefix(b", bytes: ").and_then(|rest| digits_before(rest, b" "));
        let kind = RefusalKind::Overcommit { bytes: bytes.map(|(bytes, _)| bytes) };
        let process = printable(&rest[..end]);
        return Some(KernelRefusal { process, pid: u32::try_from(pid).ok(), ..KernelRefusal::new(kind) });
    }
    const PAGES: &[u8] = b": page allocation failure: order:";
    if let Some(at) = find(text, PAGES) {
        let (order, rest) = digits_before(&text[at + PAGES.len()..], b",")?;
        let kind = RefusalKind::Pages { order: u32::try_from(order).ok()? };
        let cpuset = find(rest, b"cpuset=").map(|at| &rest[at + b"cpuset=".len()..]);
        let cpuset = cpuset.and_then(|rest| rest.split(|byte| *byte == b',').next()).unwrap_or_default();
        let container_id = id_in(&format!("/{}", printable(cpuset)));
        let process = printable(&text[..at]);
        return Some(KernelRefusal { process, container_id, ..KernelRefusal::new(kind) });
    }
    if text.starts_with(b"NVRM: ") && find(text, b"[NV_ERR_NO_MEMORY]").is_some() {
        return Some(KernelRefusal::new(RefusalKind::Driver));
    }
    let rest = text.strip_prefix(b"traps: ")?;
    let end = find(rest, b"] general protection fault ")?;
    let open = rest[..end].iter().rposition(|byte| *byte == b'[')?;
    let is_in_libc = [&b" in libc.so.6["[..], b" in libc-2."].iter().any(|name| find(rest, name).is_some());
    let pid = crate::parse::number(&rest[open + 1..end]).and_then(|pid| u32::try_from(pid).ok());
    let process = printable(&rest[..open]);
    is_in_libc.then(|| KernelRefusal { process, pid, ..KernelRefusal::new(RefusalKind::Abort) })
}

/// `INFO: task pt_data_worker:2142 blocked for more than 122 seconds.`
fn parse_hung(text: &[u8]) -> Option<KernelRefusal> {
    let rest = text.strip_prefix(b"INFO: task ")?;
    let end = find(rest, b" blocked for more than ")?;
    let colon = rest[..end].iter().rposition(|byte| *byte == b':')?;
    let pid = crate::parse::number(&rest[colon + 1..end]).and_then(|pid| u32::try_from(pid).ok());
    let process = printable(&rest[..colon]);
    Some(KernelRefusal { process, pid, ..KernelRefusal::new(RefusalKind::Throttled) })
}

/// Returns the id of a container in a text; empty without one.
fn id_in(text: &str) -> String {
    container_id::in_path(text).next().map_or_else(String::new, |found| found.id.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<KernelRefusal> {
        let mut reader = RefusalReader::default();
        for (number, line) in (1..).zip(text.lines()) {
            reader.push(&TextEntry { number, text: line.into(), ..TextEntry::default() });
        }
        reader.finish()
    }

    #[test]
    fn each_refusal_has_what_its_line_names() {
        let id = "a".repeat(64);
        let fork =
            read(&format!("[ 5011.3] cgroup: fork rejected by pids controller in /docker/{id}\n").repeat(2));
        assert_eq!(
            (fork.len(), fork[0].count, &fork[0].container_id, fork[0].kind),
            (1, 2, &id, RefusalKind::Fork)
        );
        let overcommit = read(
            "[ 4954.5] __vm_enough_memory: pid: 19149, comm: python, bytes: 320000401408 not enough memory for the allocation",
        );
        assert_eq!(overcommit[0].kind, RefusalKind::Overcommit { bytes: Some(320_000_401_408) });
        assert_eq!((&*overcommit[0].process, overcommit[0].pid), ("python", Some(19_149)));
        let old =
            read("[ 4954.5] __vm_enough_memory: pid: 7, comm: a, b, no enough memory for the allocation");
        assert_eq!(old[0].kind, RefusalKind::Overcommit { bytes: None });
        let pages = read(&format!(
            "[ 1.0] python3: page allocation failure: order:5, mode:0x40cc0(GFP_KERNEL), nodemask=(null),cpuset=docker-{id}.scope,mems_allowed=0"
        ));
        assert_eq!((pages[0].kind, &pages[0].container_id), (RefusalKind::Pages { order: 5 }, &id));
        let abort = read(
            "[ 5000.9] traps: python[20762] general protection fault ip:7fe sp:7ff error:0 in libc.so.6[2650f,7fe2cb044000+156000]",
        );
        assert_eq!((abort[0].kind, abort[0].pid), (RefusalKind::Abort, Some(20_762)));
        let hung = "[ 2704.1] INFO: task pt_data_worker:2142 blocked for more than 122 seconds.\n[ 2704.1] Call Trace:\n";
        assert!(read(hung).is_empty(), "it may wait for a disk");
        let throttled = read(&format!("{hung}[ 2704.1]  mem_cgroup_handle_over_high+0x158/0x230"));
        assert_eq!((throttled[0].kind, &*throttled[0].process), (RefusalKind::Throttled, "pt_data_worker"));
    }

    #[test]
    fn what_a_program_writes_is_no_refusal() {
        for line in [
            "Nov 22 08:49:56 host app[12]: cgroup: fork rejected by pids controller in /docker/x",
            "[ 1.0] traps: python[7] general protection fault ip:1 sp:2 error:0 in libtorch.so[1,2+3]",
            "[ 1.0] app: fork rejected by pids controller in /docker/x",
        ] {
            assert!(read(line).is_empty(), "{line}");
        }
    }
}
