//! The cgroup of the victim: the line `oom-kill:constraint=...`, and its predecessor before 5.0.
//!
//! The line is a list of `key=value` without quotes, and some values are untrusted: the name of the process (any 15 bytes), the
//! paths of cgroups (any process that may create cgroups, such as a privileged container below its own), the name of the
//! allocator's cpuset. So the line is not split at commas: every reading that the kernel could have meant is listed, and a
//! conclusion must hold for all of them.
//!
//! Guaranteed are: the cpuset's name has no `/` in it (or is `/`), so the first `,oom_memcg=/` is the kernel's own; the line ends
//! in pid and uid; the name before them has at most 15 bytes; and the victim's cgroup is the one whose limit was hit, or lies
//! below it. A path whose beginning the kernel wrote stays below the cgroup of the process that chose the rest.

use super::{OomContext, rfind, strip_number};
use crate::parse::{container_id, find};
use crate::text::printable;

/// Longest name of a process.
const NAME_BYTES: usize = 15;
/// Length from which a path may be truncated: a printk has less than 1024 bytes, before 5.10 less than 992.
const MIN_TRUNCATED_BYTES: usize = 980;
/// A longer line is forged: it has two paths of at most 4096 bytes each.
const MAX_BYTES: usize = 16 * 1024;
/// A line with more readings is certainly forged.
const MAX_READINGS: usize = 16;

/// One possible reading of the line.
struct ContextReading<'a> {
    limit: Option<&'a [u8]>,
    task: &'a [u8],
}

impl OomContext {
    /// Parses the line, if it is a complete one.
    pub(super) fn of(text: &[u8]) -> Option<Self> {
        if text.len() > MAX_BYTES {
            return None; // its readings would take seconds
        }
        // kernels of some vendors have no constraint
        match text.strip_prefix(b"oom-kill:constraint=").or_else(|| text.strip_prefix(b"oom-kill:,")) {
            Some(rest) => Self::of_new(rest),
            None => Self::of_old(text.strip_prefix(b"Task in ")?),
        }
    }

    fn of_new(text: &[u8]) -> Option<Self> {
        const LIMIT: &[u8] = b",oom_memcg=/";
        const GLOBAL: &[u8] = b",global_oom,task_memcg=/";
        let (text, _uid) = strip_number(text, b",uid=")?;
        let (text, pid) = strip_number(text, b",pid=")?;
        let pid = u32::try_from(pid).ok();
        let (limit, global) = (find(text, LIMIT), find(text, GLOBAL));
        let is_global = match (limit, global) {
            (Some(limit), Some(global)) => global < limit,
            (Some(_), None) => false,
            (None, Some(_)) => true,
            // a kernel without memory cgroups
            (None, None) => {
                let global = !text.starts_with(b"CONSTRAINT_MEMCG");
                let nodes = find(text, b",task=").map(|end| nodes(&text[..end]))?;
                return Some(Self { global, nodes, pid, ..Self::default() });
            }
        };
        let nodes = global.filter(|_| is_global).map(|end| nodes(&text[..end])).unwrap_or_default();
        let mut readings = Vec::new();
        let starts = if is_global { global? + GLOBAL.len() } else { limit? + LIMIT.len() };
        let paths_and_name = &text[starts - 1..];
        for (paths, name) in splits(paths_and_name, b",task=") {
            if name.len() > NAME_BYTES {
                continue;
            }
            if is_global {
                readings.push(ContextReading { limit: None, task: paths });
            } else {
                let pairs = splits(paths, b",task_memcg=");
                readings.extend(pairs.map(|(limit, task)| ContextReading { limit: Some(limit), task }));
            }
            readings.retain(ContextReading::is_consistent);
            if readings.len() > MAX_READINGS {
                break;
            }
        }
        Some(Self { global: is_global, nodes, pid, ..Self::from_readings(&readings) })
    }

    fn of_old(text: &[u8]) -> Option<Self> {
        let pairs = splits(text, b" killed as a result of limit of ");
        let readings = pairs.map(|(task, limit)| ContextReading { limit: Some(limit), task });
        let readings: Vec<_> =
            readings.filter(ContextReading::is_consistent).take(MAX_READINGS + 1).collect();
        (!readings.is_empty()).then(|| Self::from_readings(&readings))
    }

    fn from_readings(readings: &[ContextReading<'_>]) -> Self {
        let mut context = Self::default();
        if readings.len() > MAX_READINGS {
            return context;
        }
        if let [ContextReading { limit: Some(limit), .. }] = readings {
            context.oom_cgroup = (limit.len() < MIN_TRUNCATED_BYTES).then(|| printable(limit));
        }
        for reading in readings {
            match reading.known_task() {
                Some(path) if context.task_cgroups.contains(&path) => {}
                Some(path) => context.task_cgroups.push(path),
                // one reading without a known path invalidates the others
                None => return Self { task_cgroups: vec![], ..context },
            }
        }
        context
    }
}

impl ContextReading<'_> {
    fn is_consistent(&self) -> bool {
        let below = |limit: &[u8]| match self.task.strip_prefix(limit) {
            Some(rest) => rest.is_empty() || rest.starts_with(b"/") || limit == b"/",
            None => false,
        };
        is_path(self.task) && self.limit.is_none_or(|limit| is_path(limit) && below(limit))
    }

    /// Returns the victim's path. If it may be truncated, returns its complete components, provided that they name a container.
    fn known_task(&self) -> Option<String> {
        if self.task.len() < MIN_TRUNCATED_BYTES {
            return Some(printable(self.task));
        }
        let end = self.task.iter().rposition(|&byte| byte == b'/')?;
        let complete = printable(&self.task[..end]);
        let has_container = container_id::in_path(&complete).next().is_some();
        has_container.then_some(complete)
    }
}

/// Returns the NUMA nodes to which the request was restricted; empty if it was not, or if the line does not have them. `head` is the
/// line up to the paths, without what is before the constraint.
fn nodes(head: &[u8]) -> Box<str> {
    const POLICY: &[u8] = b"CONSTRAINT_MEMORY_POLICY,nodemask=";
    const ALLOWED: &[u8] = b",mems_allowed=";
    let is_list = |byte: &u8| byte.is_ascii_digit() || b"-,".contains(byte);
    let list = if let Some(rest) = head.strip_prefix(POLICY) {
        rest.split(|byte| !is_list(byte)).next()
    } else if head.starts_with(b"CONSTRAINT_CPUSET,") {
        // the name of the cpuset is before it, and may imitate it
        rfind(head, ALLOWED).map(|at| &head[at + ALLOWED.len()..]).filter(|list| list.iter().all(is_list))
    } else {
        None
    };
    let list = list.unwrap_or_default();
    printable(list.strip_suffix(b",").unwrap_or(list)).into()
}

/// Returns whether the kernel may print this as the path of a cgroup.
fn is_path(path: &[u8]) -> bool {
    let is_name = |name: &[u8]| !name.is_empty() && name.len() <= 255;
    match path.strip_prefix(b"/") {
        Some(b"") => true,
        Some(names) => names.split(|&byte| byte == b'/').all(is_name) && !path.contains(&b'\n'),
        None => false,
    }
}

/// Returns every split of a text at a separator, in order.
fn splits<'a>(text: &'a [u8], separator: &'a [u8]) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
    let positions = text.windows(separator.len()).enumerate().filter(move |(_, window)| *window == separator);
    positions.map(move |(at, _)| (&text[..at], &text[at + separator.len()..]))
}
