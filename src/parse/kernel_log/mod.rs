//! The kernel log: records of /dev/kmsg and lines of syslog(2), with the messages of the OOM killer and of NVIDIA's driver.
//!
//! Processes choose their own names (any 15 bytes). So the parsers match the kernel's words before and after a name, and never
//! split at a character that may be part of it. A name is too short to contain the beginning of a relevant line. [`records`]
//! finds the lines in the log, [`context`] reads the paths, [`report`] folds the records around a kill, and [`kills`] the lines of one
//! OOM into kills.
//!
//! Not here: the container of a victim (`ledger`).

mod context;
pub mod entries;
mod fragments;
mod json_text;
pub mod kills;
mod quoted;
mod record_fields;
pub mod records;
pub mod refusals;
pub mod report;
mod text_line;
pub mod text_log;
mod xid;

#[cfg(test)]
mod tests;

use serde::Serialize;

use super::{find, number};
use crate::text::printable;
pub use report::{KernelHolder, OomReport, ReportProcess, RoleRange};
pub use xid::{PciAddress, Xid};

/// A relevant line of the kernel log: a message of the OOM killer, or a GPU error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Line {
    /// `NAME invoked oom-killer: ...`: a new OOM begins. Rate limited by the kernel.
    Invoked,
    /// `oom-kill:constraint=...`, or before 5.0 `Task in PATH killed as a result of limit of PATH`: the cgroup of the victim of
    /// the next [`Line::Killed`]. Rate limited by the kernel.
    Context(OomContext),
    /// `Killed process PID (NAME) ...`: one process was killed. Never rate limited.
    Killed(Killed),
    /// `Tasks in PATH are going to be killed due to memory.oom.group set`.
    Group {
        /// The cgroup.
        path: String,
    },
    /// `Memory cgroup out of memory: Kill process PID (NAME) score N or sacrifice child`, before 5.1: whose memory ran out, for the
    /// next [`Line::Killed`], which can be of a child of that process.
    Chosen {
        /// The process that was chosen.
        pid: u32,
        /// The host ran out of memory.
        global: bool,
    },
    /// The OOM ended without a kill, so the next [`Line::Killed`] is of another one, or of the rest of a group.
    NoKill(NoKill),
    /// `NVRM: Xid (PCI:0000:01:00): 31, pid=1234, name=python, ...`: NVIDIA's driver reports an error of a GPU.
    Xid(Xid),
    /// `PM: suspend exit`, or `PM: hibernation exit`: the machine goes on. The clock of the log stopped meanwhile.
    Resumed,
}

/// Why an OOM ended without a kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NoKill {
    /// `OOM victim PID (NAME) is already exiting. Skip killing the task`. Silent before 5.9.
    AlreadyExiting,
    /// `Out of memory and no killable processes...`
    NoVictim,
    /// `Kernel panic - not syncing: Out of memory: ...`: the kernel panicked, by `vm.panic_on_oom`.
    Panic,
    /// `Kernel panic - not syncing: System is deadlocked on memory`: the host ran out, and no process could be killed.
    PanicNoVictim,
}

/// The cgroup of the victim, as reported by the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OomContext {
    /// The host ran out of memory (`global_oom`), or those of its NUMA nodes that are in `nodes`.
    pub global: bool,
    /// The NUMA nodes to which a cpuset or a memory policy restricted the request, such as `0-1`; empty if it was not restricted.
    pub nodes: Box<str>,
    /// Possible cgroups of the victim. More than one only if a name imitates the kernel's own words, so that the line has
    /// several readings. Empty if the kernel truncated the path before a container's id, or has no memory cgroups.
    pub task_cgroups: Vec<String>,
    /// The cgroup whose limit was hit, if the line has only one reading.
    pub oom_cgroup: Option<String>,
    /// Pid in the line; the next `Killed process` may have the pid of another thread.
    pub pid: Option<u32>,
}

/// One killed process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Killed {
    /// Pid on the host.
    pub pid: u32,
    /// The name of the process, made printable.
    pub process: String,
    /// `Some(true)`: the host ran out of memory. `Some(false)`: a cgroup's limit. `None`: unknown (before 5.1).
    pub global: Option<bool>,
    /// Size of its address space in bytes.
    pub total_vm_bytes: Option<u64>,
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
    /// Parses the text of one complete record.
    pub fn of(text: &[u8]) -> Option<Self> {
        const INVOKED: &[u8] = b" invoked oom-killer: gfp_mask=";
        const MAX_NAME: usize = 15;
        if let Some(killed) = Killed::of(text) {
            return Some(Line::Killed(killed));
        }
        if let Some(xid) = Xid::of(text) {
            return Some(Line::Xid(xid));
        }
        if let Some(context) = OomContext::of(text) {
            return Some(Line::Context(context));
        }
        if let Some(no_kill) = NoKill::of(text) {
            return Some(Line::NoKill(no_kill));
        }
        if let Some((rest, global)) = strip_message(text)
            && let Some((pid, _)) =
                rest.strip_prefix(b"Kill process ").and_then(|rest| digits_before(rest, b" ("))
        {
            let is_whole = find(rest, b") score ").is_some();
            return u32::try_from(pid).ok().filter(|_| is_whole).map(|pid| Line::Chosen { pid, global });
        }
        if RESUMED.contains(&text) {
            return Some(Line::Resumed);
        }
        if let Some(rest) = text.strip_prefix(b"Tasks in ") {
            let path = rest.strip_suffix(b" are going to be killed due to memory.oom.group set")?;
            return path.starts_with(b"/").then(|| Line::Group { path: printable(path) });
        }
        let head = &text[..text.len().min(MAX_NAME + INVOKED.len())];
        find(head, INVOKED).map(|_| Line::Invoked)
    }

    /// Returns whether such a line has this level. The kernel's own lines have one each; the level of NVIDIA's varies.
    fn has_level(&self, level: u32) -> bool {
        match self {
            Line::Killed(_) | Line::Chosen { .. } => level == 3,
            Line::Invoked => level == 4,
            Line::Context(_) | Line::Group { .. } => level == 6,
            Line::NoKill(_) => level <= 6,
            Line::Xid(_) => true,
            Line::Resumed => level == 6,
        }
    }
}

/// What the kernel writes when a suspend has ended.
const RESUMED: [&[u8]; 3] =
    [b"PM: suspend exit", b"PM: hibernation exit", b"PM: hibernation: hibernation exit"];

/// What the kernel writes before `Killed process` and `OOM victim`, and whether the host ran out of memory.
const KILL_MESSAGES: [(&[u8], bool); 3] = [
    (b"Memory cgroup out of memory: ", false),
    (b"Out of memory: ", true),
    (b"Out of memory (oom_kill_allocating_task): ", true),
];

/// Strips the message before `Killed process` and `OOM victim`; returns also whether the host ran out of memory.
fn strip_message(text: &[u8]) -> Option<(&[u8], bool)> {
    KILL_MESSAGES.iter().find_map(|(message, global)| Some((text.strip_prefix(*message)?, *global)))
}

/// Returns whether the line of a kill says that memory ran out, too: since 5.1.
pub fn is_whole_message(text: &str) -> bool {
    text.contains("ut of memory: Killed process")
}

impl NoKill {
    fn of(text: &[u8]) -> Option<Self> {
        if let Some(reason) = text.strip_prefix(b"Kernel panic - not syncing: ") {
            return match reason {
                _ if reason.starts_with(b"System is deadlocked on memory") => Some(Self::PanicNoVictim),
                _ if reason.starts_with(b"Out of memory and no killable processes") => {
                    Some(Self::PanicNoVictim)
                }
                _ => reason.starts_with(b"Out of memory").then_some(Self::Panic),
            };
        }
        if text == b"Out of memory and no killable processes..." {
            return Some(Self::NoVictim);
        }
        let rest = strip_message(text)?.0.strip_prefix(b"OOM victim ")?;
        let (_, name) = digits_before(rest, b" (")?;
        name.ends_with(b") is already exiting. Skip killing the task").then_some(Self::AlreadyExiting)
    }
}

impl Killed {
    fn of(text: &[u8]) -> Option<Self> {
        // before 5.1 the message is in a line of its own
        let (text, global) = match strip_message(text) {
            Some((rest, global)) => (rest, Some(global)),
            None => (text, None),
        };
        let (pid, uid, text) = pid_before_name(text.strip_prefix(b"Killed process ")?)?;
        let tail = rfind(text, b" total-vm:").or_else(|| rfind(text, b" vsz:"))?;
        let process = printable(name_before_tail(&text[..tail])?);
        let mut killed = Self { pid, process, global, uid, ..Self::default() };
        killed.read_tail(&text[tail + 1..])?;
        Some(killed)
    }

    /// Parses a line whose end is missing, behind the name: in a saved log, which a screen or a person shortened.
    fn of_shortened(text: &[u8]) -> Option<Self> {
        let (text, global) = strip_message(text).map_or((text, None), |(rest, global)| (rest, Some(global)));
        let (pid, uid, text) = pid_before_name(text.strip_prefix(b"Killed process ")?)?;
        let tail = rfind(text, b" total-vm:");
        let name = name_before_tail(&text[..tail.unwrap_or(text.len())])?;
        let mut killed = Self { pid, process: printable(name), global, uid, ..Self::default() };
        let _ = killed.read_tail(&text[tail.unwrap_or(text.len())..]); // what is there
        Some(killed)
    }

    /// `total-vm:1kB, anon-rss:1kB, file-rss:1kB, shmem-rss:1kB, UID:0 pgtables:1kB oom_score_adj:0`; later kernels
    /// added the last four one by one, and may add more.
    fn read_tail(&mut self, tail: &[u8]) -> Option<()> {
        for field in tail.split(|&byte| byte == b' ') {
            let field = field.strip_suffix(b",").unwrap_or(field);
            let Some(colon) = find(field, b":") else { continue };
            let (key, value) = (&field[..colon], &field[colon + 1..]);
            let bytes = || value.strip_suffix(b"kB").and_then(digits).and_then(|kib| kib.checked_mul(1024));
            match key {
                b"total-vm" => self.total_vm_bytes = bytes(),
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
        // without these the line is truncated
        (self.anon_bytes.is_some() && self.file_bytes.is_some()).then_some(())
    }
}

/// Parses `PID (`, or of 2.6.32 `PID, UID 48, (`; returns the pid, the user id and the text after it.
fn pid_before_name(text: &[u8]) -> Option<(u32, Option<u32>, &[u8])> {
    let open = find(text, b" (")?;
    let head = text[..open].strip_suffix(b",").and_then(|head| strip_number(head, b", UID "));
    let (pid, uid) = head.map_or((&text[..open], None), |(pid, uid)| (pid, u32::try_from(uid).ok()));
    Some((u32::try_from(digits(pid)?).ok()?, uid, &text[open + 2..]))
}

/// Returns the name in `NAME)`, `NAME),` or, on some distributions' older kernels, `NAME), UID 0,`.
fn name_before_tail(text: &[u8]) -> Option<&[u8]> {
    if let Some(name) = text.strip_suffix(b")") {
        return Some(name);
    }
    let text = text.strip_suffix(b",")?;
    let text = strip_number(text, b", UID ").map_or(text, |(text, _)| text);
    text.strip_suffix(b")")
}

/// Strips `KEY<digits>` at the end; returns the rest and the number.
fn strip_number<'a>(text: &'a [u8], key: &[u8]) -> Option<(&'a [u8], u64)> {
    let start = text.iter().rposition(|byte| !byte.is_ascii_digit())? + 1;
    Some((text[..start].strip_suffix(key)?, number(&text[start..])?))
}

/// Parses a number without white space around it.
fn digits(text: &[u8]) -> Option<u64> {
    if text.iter().all(u8::is_ascii_digit) { number(text) } else { None }
}

/// Parses a number at the beginning of a text that ends at a mark; returns it with the text after the mark.
fn digits_before<'a>(text: &'a [u8], mark: &[u8]) -> Option<(u64, &'a [u8])> {
    let end = text.iter().position(|byte| !byte.is_ascii_digit()).filter(|end| *end > 0)?;
    Some((digits(&text[..end])?, text[end..].strip_prefix(mark)?))
}

fn rfind(text: &[u8], part: &[u8]) -> Option<usize> {
    text.windows(part.len()).rposition(|window| window == part)
}
