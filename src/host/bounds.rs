//! Limits on how much is read from each source whose size a process or a container can choose.
//!
//! [`FILES`] lists the kernel files; a file that is not listed has the limit of [`OTHER`]. [`LISTS`] holds the limits
//! of lists. The tables in SECURITY.md repeat both; a test compares them.

/// What a read does when a file is longer than its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnOverflow {
    /// Truncate: the beginning is enough.
    Truncate,
    /// Fail with reason `too_large`: a truncated value would be wrong.
    Fail,
}

/// The limit of a file.
#[derive(Debug)]
pub struct Bound {
    /// File name.
    pub file: &'static str,
    /// Source as written in SECURITY.md.
    pub source: &'static str,
    /// Maximum number of bytes read.
    pub max_bytes: usize,
    /// What happens when the file is longer.
    pub on_overflow: OnOverflow,
}

impl Bound {
    const fn new(
        file: &'static str,
        source: &'static str,
        max_bytes: usize,
        on_overflow: OnOverflow,
    ) -> Self {
        Self { file, source, max_bytes, on_overflow }
    }

    /// Returns the limit of the file with this name.
    pub fn of(file: &[u8]) -> &'static Bound {
        FILES.iter().find(|bound| bound.file.as_bytes() == file).unwrap_or(&OTHER)
    }
}

/// Maximum capacity that a read buffer retains between reads.
pub const MAX_RETAINED_BYTES: usize = 64 * 1024;

/// Limits of files by name.
pub static FILES: [Bound; 4] = [
    Bound::new("cmdline", "`/proc/PID/cmdline`", 64 * 1024, OnOverflow::Truncate),
    Bound::new("cgroup.procs", "`cgroup.procs`", 64 * 1024, OnOverflow::Truncate),
    Bound::new("mountinfo", "`/proc/PID/mountinfo`", 4 * 1024 * 1024, OnOverflow::Fail),
    // long on hosts with many interrupts
    Bound::new("stat", "`/proc/stat`, `/proc/PID/stat`", 1024 * 1024, OnOverflow::Fail),
];

/// The limit of all other files: `cgroup`, `statm`, `smaps_rollup`, `fdinfo`, and files of cgroups, the host and
/// devices.
pub static OTHER: Bound = Bound::new("", "every other kernel file", 256 * 1024, OnOverflow::Fail);

/// The limit of a list.
#[derive(Debug)]
pub struct ListBound {
    /// Source as written in SECURITY.md.
    pub source: &'static str,
    /// Maximum number of entries.
    pub max: usize,
    /// What happens beyond the limit, as written in SECURITY.md.
    pub on_overflow: &'static str,
}

/// Limit on the processes of one container.
pub static PROCESSES: ListBound = ListBound {
    source: "processes of a container",
    max: 2_000,
    on_overflow: "its metrics by process and role are absent, counted as `too_many`; its memory metrics continue",
};

/// Limit on the cgroups below a container's own cgroup.
pub static CGROUPS_BELOW: ListBound = ListBound {
    source: "cgroups below a container's own",
    max: 1_000,
    on_overflow: "the rest is ignored, also containers in it; its metrics by process and role are absent, counted as `too_many`; its memory metrics continue",
};

/// Maximum total bytes of the paths of the cgroups below one container.
pub const MAX_BYTES_BELOW: usize = 1024 * 1024;

/// Limit on the names read from `/proc` when the processes of the host are listed.
pub static NAMES: ListBound =
    ListBound { source: "names in `/proc`", max: 100_000, on_overflow: "the rest is ignored" };

/// Limit on threads that hang in reads of one kind.
pub static STUCK_READS: ListBound = ListBound {
    source: "hanging reads of one kind (command lines, `smaps_rollup`, `/dev/shm`), at most one per container",
    max: 4,
    on_overflow: "further reads are skipped until one returns, logged once",
};

/// Limit on the connections of reporting processes.
pub static REPORTER_CONNECTIONS: ListBound = ListBound {
    source: "connections of processes that report from inside",
    max: 1_024,
    on_overflow: "further ones are closed, counted as `connections`",
};

/// Limit on the connections of one container's reporting processes.
pub static REPORTER_CONNECTIONS_OF_CONTAINER: ListBound = ListBound {
    source: "of them in one container, one per process",
    max: 64,
    on_overflow: "further ones are closed, counted as `connections`",
};

/// Limit on the pairs of component and operation that one container reports.
pub static REPORTED_SCOPES: ListBound = ListBound {
    source: "pairs of component and operation that a container reports",
    max: 64,
    on_overflow: "further pairs are rejected, counted as `scopes`",
};

/// All limits of lists.
pub static LISTS: [&ListBound; 7] = [
    &PROCESSES,
    &CGROUPS_BELOW,
    &NAMES,
    &STUCK_READS,
    &REPORTER_CONNECTIONS,
    &REPORTER_CONNECTIONS_OF_CONTAINER,
    &REPORTED_SCOPES,
];

#[cfg(test)]
mod tests {
    use super::*;

    fn size(bytes: usize) -> String {
        match bytes {
            mib if mib % (1 << 20) == 0 => format!("{} MiB", mib >> 20),
            _ => format!("{} KiB", bytes >> 10),
        }
    }

    fn number(value: usize) -> String {
        let text = value.to_string();
        if text.len() > 3 { format!("{},{}", &text[..text.len() - 3], &text[text.len() - 3..]) } else { text }
    }

    #[test]
    fn security_md_lists_every_bound() {
        let document = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/SECURITY.md")).unwrap();
        let files = FILES.iter().chain([&OTHER]).map(|bound| {
            let on_overflow = match bound.on_overflow {
                OnOverflow::Truncate => "the beginning is used",
                OnOverflow::Fail => "the read fails, counted as `too_large`",
            };
            format!("| {} | {} | {on_overflow} |", bound.source, size(bound.max_bytes))
        });
        let lists = LISTS
            .iter()
            .map(|list| format!("| {} | {} | {} |", list.source, number(list.max), list.on_overflow));
        let missing: Vec<_> =
            files.chain(lists).filter(|row| !document.lines().any(|line| line == row)).collect();
        assert!(missing.is_empty(), "SECURITY.md lacks these rows:\n{}", missing.join("\n"));
    }
}
