//! The kernel log: records of /dev/kmsg and lines of syslog(2), and what the OOM killer and NVIDIA's driver say in them.
//!
//! Processes choose their own names (any 15 bytes), so a line is read from the words that the kernel writes before and
//! after a name, and never split at a sign that may be part of it. No name is long enough to hold the beginning of a
//! line that counts. [`records`] has how lines are found in the log, [`context`] how the paths are read.
//!
//! Not here: which container it was and whether a kill counts twice (`ledger`).

mod context;
pub mod records;
mod xid;

#[cfg(test)]
mod tests;

use super::{find, number, printable};
pub use xid::{PciAddress, Xid};

/// A line of the kernel log that tells of the OOM killer, or of an error of a GPU. Everything else is not of interest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Line {
    /// `NAME invoked oom-killer: ...`: a new OOM begins. Rate limited by the kernel.
    Invoked,
    /// `oom-kill:constraint=...`, or before 5.0 `Task in PATH killed as a result of limit of PATH`: whose the victim
    /// of the next [`Line::Killed`] is. Rate limited by the kernel.
    Context(Context),
    /// `Killed process PID (NAME) ...`: one process was killed. Never rate limited.
    Killed(Killed),
    /// `Tasks in PATH are going to be killed due to memory.oom.group set`.
    Group {
        /// The cgroup.
        path: String,
    },
    /// `NVRM: Xid (PCI:0000:01:00): 31, pid=1234, name=python, ...`: NVIDIA's driver reports an error of a GPU.
    Xid(Xid),
}

/// Where the victim was, as the kernel says it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Context {
    /// The machine ran out (`global_oom`).
    pub global: bool,
    /// The cgroups that the victim may have been in. More than one only where a name is made to look like the kernel's
    /// own words, so that the line can be read in several ways. None if the kernel cut the path short of a container's
    /// id, or has no memory cgroups.
    pub task_cgroups: Vec<String>,
    /// The cgroup whose limit was hit, if the line can be read in only one way.
    pub oom_cgroup: Option<String>,
    /// Pid in the line; the next `Killed process` may name another thread's.
    pub pid: Option<u32>,
}

/// One victim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Killed {
    /// Pid on the host.
    pub pid: u32,
    /// The name of the process, made printable.
    pub process: String,
    /// `Some(true)`: the machine ran out. `Some(false)`: a cgroup's limit. `None`: the line does not say (before 5.1).
    pub global: Option<bool>,
    /// Anonymous memory in bytes.
    pub anon_bytes: Option<u64>,
    /// Mapped file pages in bytes.
    pub file_bytes: Option<u64>,
    /// Shared memory in bytes.
    pub shmem_bytes: Option<u64>,
    /// User id.
    pub uid: Option<u32>,
    /// Its `oom_score_adj`.
    pub oom_score_adj: Option<i32>,
}

impl Line {
    /// Reads the text of one whole record.
    pub fn of(text: &[u8]) -> Option<Self> {
        const INVOKED: &[u8] = b" invoked oom-killer: gfp_mask=";
        const LONGEST_NAME: usize = 15;
        if let Some(killed) = Killed::of(text) {
            return Some(Line::Killed(killed));
        }
        if let Some(xid) = Xid::of(text) {
            return Some(Line::Xid(xid));
        }
        if let Some(context) = Context::of(text) {
            return Some(Line::Context(context));
        }
        if let Some(rest) = text.strip_prefix(b"Tasks in ") {
            let path = rest.strip_suffix(b" are going to be killed due to memory.oom.group set")?;
            return path.starts_with(b"/").then(|| Line::Group { path: printable(path) });
        }
        let head = &text[..text.len().min(LONGEST_NAME + INVOKED.len())];
        find(head, INVOKED).map(|_| Line::Invoked)
    }

    /// Whether such a line is printed at this level. Those of the kernel itself have one each; NVIDIA's has changed.
    fn fits(&self, level: u32) -> bool {
        match self {
            Line::Killed(_) => level == 3,
            Line::Invoked => level == 4,
            Line::Context(_) | Line::Group { .. } => level == 6,
            Line::Xid(_) => true,
        }
    }
}

impl Killed {
    fn of(text: &[u8]) -> Option<Self> {
        const PREFIXES: [(&[u8], Option<bool>); 4] = [
            (b"Memory cgroup out of memory: ", Some(false)),
            (b"Out of memory: ", Some(true)),
            (b"Out of memory (oom_kill_allocating_task): ", Some(true)),
            (b"", None),
        ];
        let (text, global) = PREFIXES.iter().find_map(|(prefix, global)| {
            let rest = text.strip_prefix(*prefix)?.strip_prefix(b"Killed process ")?;
            Some((rest, *global))
        })?;
        let open = find(text, b" (")?;
        let pid = u32::try_from(digits(&text[..open])?).ok()?;
        let text = &text[open + 2..];
        let tail = rfind(text, b" total-vm:")?;
        let process = printable(name_before_tail(&text[..tail])?);
        let mut killed = Self { pid, process, global, ..Self::default() };
        killed.read_tail(&text[tail + 1..])?;
        Some(killed)
    }

    /// `total-vm:1kB, anon-rss:1kB, file-rss:1kB, shmem-rss:1kB, UID:0 pgtables:1kB oom_score_adj:0`; the last four came
    /// one after the other, and more may come.
    fn read_tail(&mut self, tail: &[u8]) -> Option<()> {
        for field in tail.split(|&byte| byte == b' ') {
            let field = field.strip_suffix(b",").unwrap_or(field);
            let Some(colon) = find(field, b":") else { continue };
            let (key, value) = (&field[..colon], &field[colon + 1..]);
            let bytes = || value.strip_suffix(b"kB").and_then(digits).and_then(|kib| kib.checked_mul(1024));
            match key {
                b"anon-rss" => self.anon_bytes = Some(bytes()?),
                b"file-rss" => self.file_bytes = Some(bytes()?),
                b"shmem-rss" => self.shmem_bytes = Some(bytes()?),
                b"UID" => self.uid = digits(value).and_then(|uid| u32::try_from(uid).ok()),
                b"oom_score_adj" => {
                    self.oom_score_adj = std::str::from_utf8(value).ok().and_then(|value| value.parse().ok());
                }
                _ => {}
            }
        }
        // a line that is cut before these is not whole
        (self.anon_bytes.is_some() && self.file_bytes.is_some()).then_some(())
    }
}

/// The name in `NAME)`, `NAME),` or, on some distributions' older kernels, `NAME), UID 0,`.
fn name_before_tail(text: &[u8]) -> Option<&[u8]> {
    if let Some(name) = text.strip_suffix(b")") {
        return Some(name);
    }
    let text = text.strip_suffix(b",")?;
    let text = strip_number(text, b", UID ").map_or(text, |(text, _)| text);
    text.strip_suffix(b")")
}

/// The text without the `KEY<digits>` at its end, and the number.
fn strip_number<'a>(text: &'a [u8], key: &[u8]) -> Option<(&'a [u8], u64)> {
    let start = text.iter().rposition(|byte| !byte.is_ascii_digit())? + 1;
    Some((text[..start].strip_suffix(key)?, number(&text[start..])?))
}

/// A number without white space around it.
fn digits(text: &[u8]) -> Option<u64> {
    if text.iter().all(u8::is_ascii_digit) { number(text) } else { None }
}

fn rfind(text: &[u8], part: &[u8]) -> Option<usize> {
    text.windows(part.len()).rposition(|window| window == part)
}
