//! Limits on how much is read from each source whose size a process or a container can choose.
//!
//! [`FILES`] lists the kernel files; a file that is not listed has the limit of [`OTHER`]. [`BYTES`] holds the limits of other
//! texts and messages, [`LISTS`] those of lists. The tables in SECURITY.md repeat all of them; a test compares them.

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

/// The limit of all other files: `cgroup`, `statm`, `smaps_rollup`, and files of cgroups, the host and
/// devices.
pub static OTHER: Bound = Bound::new("", "every other kernel file", 256 * 1024, OnOverflow::Fail);

/// The limit of a text or message that is no kernel file.
#[derive(Debug)]
pub struct ByteBound {
    /// Source as written in SECURITY.md.
    pub source: &'static str,
    /// Maximum number of bytes read.
    pub max_bytes: usize,
    /// What happens beyond the limit, as written in SECURITY.md.
    pub on_overflow: &'static str,
}

macro_rules! byte_bounds {
    ($($(#[$doc:meta])* $name:ident: $source:literal, $max_bytes:expr, $on_overflow:literal;)*) => {
        $($(#[$doc])* pub static $name: ByteBound =
            ByteBound { source: $source, max_bytes: $max_bytes, on_overflow: $on_overflow };)*

        /// All limits of texts and messages.
        pub static BYTES: &[&ByteBound] = &[$(&$name),*];
    };
}

byte_bounds! {
    /// Four thousand containers with 2 KiB of names and labels each.
    DOCKER_LIST: "list of containers of Docker or Podman", 8 << 20,
        "the connection is closed; stopped containers are left out of the next request; counted as `too_large` of the collector `discover`, logged once";
    /// The kernel starts no program with more than 2 MiB of arguments and environment (a quarter of the stack's usual limit).
    DOCKER_INSPECT: "inspect of Docker or Podman, twenty at a time", 2 << 20,
        "the connection is closed; the container keeps the name and image of the list or the event and has no settings of its environment; counted, logged once for each container";
    /// An event contains the labels of its container, and nothing else that is long.
    DOCKER_EVENT: "one event of Docker or Podman", 1 << 20,
        "the connection is closed, containers are listed again; counted, logged once";
    /// Those of all runtimes have 64.
    CONTAINER_ID: "id of a container in an event or a list of Docker or Podman", 1 << 10,
        "the event is ignored, and so is the container";
    /// The same as the kubelet's limit: two thousand containers with their annotations.
    CRI_RESPONSE: "one list of a CRI runtime, or of the kubelet's pod-resources", 16 << 20,
        "the call fails: `memledger_runtime_up` is 0, or the kubelet's allocations are missing; logged";
    /// The status of one container: its whole OCI configuration, where arguments and environment may have 2 MiB.
    CRI_STATUS: "status of one container of a CRI runtime", 4 << 20,
        "the call fails: the container has no settings of its environment, and is queried again later";
    /// The status of a sandbox and of its containers, without their configuration.
    CRI_EVENT: "one event of a CRI runtime", 1 << 20,
        "events are not used, containers are listed every second";
    /// The paths of the cgroups below one container.
    CGROUP_PATHS_BELOW: "paths of the cgroups below a container's own", 1 << 20,
        "as beyond the limit of those cgroups";
    /// More than 64 devices with a thousand processes each.
    NVML_MESSAGE: "a message of the NVML process", 2 << 20,
        "the process is replaced, counted as `invalid_message`";
    /// The kernel's log buffer, by syslog(2).
    SYSLOG: "the kernel log by syslog(2)", 32 << 20,
        "the oldest records are omitted";
    /// One packet of a process that reports from inside.
    REPORTER_PACKET: "one packet of a process that reports from inside", 16 << 10,
        "the packet is rejected, counted as `too_large`";
    /// The log of one container, in a second.
    CONTAINER_LOG: "log of one container, per second", 1 << 20,
        "reading waits; a reader that is 10 s behind skips the rest";
    /// Docker splits lines there.
    CONTAINER_LOG_LINE: "line of a container's log", 16 << 10,
        "it is read in parts";
    /// The logs of all containers, in a second.
    CONTAINER_LOGS: "logs of all containers, per second", 8 << 20,
        "reading waits in the same way";
    /// Labels and settings are the most of it.
    SPOOLED_RUN: "record of a run of `memledger run`", 16 << 10,
        "it is ignored: the run has its id as its name";
    /// The response of an OTLP endpoint.
    OTLP_RESPONSE: "one response of an OTLP endpoint", 64 << 10,
        "the rest is not read";
    /// The response of a server of S3, or of the token service of AWS.
    S3_RESPONSE: "one response of a server of S3", 64 << 10,
        "its text is not read, its status is";
    /// A file of credentials or settings of AWS, or a web identity token.
    AWS_FILE: "file of credentials or settings of AWS", 256 << 10,
        "the rest is not read";
    /// The head of an HTTP request.
    REQUEST_HEAD: "head of an HTTP request", 16 << 10,
        "the request is rejected with 431";
}

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

/// Limit on the processes of all containers.
pub static PROCESSES_OF_HOST: ListBound = ListBound {
    source: "processes of all containers",
    max: 20_000,
    on_overflow: "those of the containers with the most are treated as beyond the limit of a container",
};

/// Limit on the processes that are seen first in one cycle: each costs three files that are opened.
pub static NEW_PROCESSES: ListBound = ListBound {
    source: "processes that a cycle reads for the first time",
    max: 4_000,
    on_overflow: "the containers with the most wait for a later cycle, their metrics by process and role are absent until then; counted as `too_many` after five cycles",
};

/// Limit on the processes of one container that are seen first in one cycle.
pub static NEW_PROCESSES_OF_CONTAINER: ListBound = ListBound {
    source: "of them in one container",
    max: 1_000,
    on_overflow: "the rest waits for the next cycle in the same way",
};

/// Limit on the cgroups below a container's own cgroup.
pub static CGROUPS_BELOW: ListBound = ListBound {
    source: "cgroups below a container's own",
    max: 1_000,
    on_overflow: "the rest is ignored, also containers in it; its metrics by process and role are absent, counted as `too_many`; its memory metrics continue",
};

/// Limit on the cgroups outside of containers.
pub static CGROUPS_OUTSIDE: ListBound = ListBound {
    source: "cgroups outside of containers",
    max: 50_000,
    on_overflow: "the rest is ignored, also containers in it; counted as `too_large` of the collector `discover`, logged with the first component of the path",
};

/// Limit on the cgroups outside of containers below one cgroup of the first level, which may be delegated to a user.
pub static CGROUPS_OUTSIDE_OF_SLICE: ListBound = ListBound {
    source: "of them below one cgroup of the first level, such as `user.slice`",
    max: 10_000,
    on_overflow: "the rest of that one is ignored in the same way",
};

/// Limit on the depth of the cgroup tree.
pub static CGROUP_DEPTH: ListBound = ListBound {
    source: "levels of the cgroup tree",
    max: 32,
    on_overflow: "what is deeper is ignored as beyond the limits of cgroups",
};

/// Limit on a process list of NVML.
pub static NVML_RECORDS: ListBound = ListBound {
    source: "records in a process list of NVML",
    max: 65_536,
    on_overflow: "the list is not read; counted as a read error of the collector `gpu`",
};

/// Limit on the queue of runtime events.
pub static RUNTIME_EVENTS: ListBound = ListBound {
    source: "events of runtimes that the ledger has not read yet",
    max: 16_384,
    on_overflow: "the oldest are dropped, counted, logged once",
};

/// Limit on the events of one runtime in a second. Real ones send some dozen for each container that starts or ends.
pub static RUNTIME_EVENT_RATE: ListBound =
    ListBound { source: "events of one runtime, per second", max: 2_000, on_overflow: "reading waits" };

/// Limit on the past events of one runtime. Docker keeps 256.
pub static PAST_EVENTS: ListBound = ListBound {
    source: "past events of Docker or Podman, which a new ledger and `why` read once",
    max: 4_096,
    on_overflow: "older ones are dropped",
};

/// Limit on the logs that are read at once: each takes a connection or a file.
pub static CONTAINER_LOGS_AT_ONCE: ListBound = ListBound {
    source: "logs of containers that are read at once",
    max: 256,
    on_overflow: "further ones are not read, logged once",
};

/// Limit on the sockets that match the patterns of a runtime.
pub static RUNTIME_SOCKETS: ListBound = ListBound {
    source: "sockets of Docker or Podman that match a pattern",
    max: 64,
    on_overflow: "further ones are ignored, logged once",
};

/// Limit on the entries of a spool, and on those of a directory in it.
pub static SPOOL_ENTRIES: ListBound = ListBound {
    source: "entries of `--run.spool`, and of each directory in it",
    max: 4_096,
    on_overflow: "further ones are ignored: their runs have their ids as names, and no end",
};

/// Limit on the records of runs of one user. `memledger run` keeps half as many.
pub static SPOOLED_RUNS_OF_USER: ListBound = ListBound {
    source: "records of runs of one user",
    max: 256,
    on_overflow: "further ones are ignored in the same way",
};

/// Limit on the new runs of one user that are taken at once.
pub static NEW_RUNS_AT_ONCE: ListBound =
    ListBound { source: "new runs of one user, at once", max: 128, on_overflow: "the others wait" };

/// Limit on the new runs of one user that are taken in a second after those.
pub static NEW_RUNS: ListBound =
    ListBound { source: "after those, per second", max: 1, on_overflow: "the others wait" };

/// Limit on the headers of a request.
pub static REQUEST_HEADERS: ListBound = ListBound {
    source: "headers of an HTTP request",
    max: 64,
    on_overflow: "the request is rejected with 431",
};

/// Limit on the events of the ledger in one response.
pub static API_EVENTS: ListBound = ListBound {
    source: "events of the ledger in a response of `/api/v1/events`, read in pages of 256 KiB while they are sent",
    max: 10_000,
    on_overflow: "older ones are omitted; of concurrent reads of the ledger two are served, and a request that waits 10 s gets 503 with `Retry-After`",
};

/// Limit on the records of runs in one response, and on those that advice is made from.
pub static RUN_RECORDS: ListBound = ListBound {
    source: "records of runs in a response of `/api/v1/runs`, read in pages of 256 KiB while they are sent, and those that advice is made from",
    max: 500,
    on_overflow: "older ones are omitted",
};

/// Limit on the names read from `/proc` when the processes of the host are listed.
pub static NAMES: ListBound =
    ListBound { source: "names in `/proc`", max: 100_000, on_overflow: "the rest is ignored" };

/// Limit on threads that hang in reads of one kind.
pub static STUCK_READS: ListBound = ListBound {
    source: "hanging reads of one kind (command lines, `smaps_rollup`, `/dev/shm`), at most one per container",
    max: 32,
    on_overflow: "further reads are skipped until one returns, logged once",
};

/// Limit on threads that hang in reads of one kind for one group of containers.
pub static STUCK_READS_OF_GROUP: ListBound = ListBound {
    source: "of them for one pod, or for one container and those inside it",
    max: 2,
    on_overflow: "its further reads are skipped until one returns, counted as `blocked`",
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
pub static REPORTED_OPERATIONS: ListBound = ListBound {
    source: "pairs of component and operation that a container reports",
    max: 64,
    on_overflow: "further pairs are rejected, counted as `operations`",
};

/// All limits of lists.
pub static LISTS: [&ListBound; 27] = [
    &PROCESSES,
    &PROCESSES_OF_HOST,
    &NEW_PROCESSES,
    &NEW_PROCESSES_OF_CONTAINER,
    &CGROUPS_BELOW,
    &CGROUPS_OUTSIDE,
    &CGROUPS_OUTSIDE_OF_SLICE,
    &CGROUP_DEPTH,
    &NAMES,
    &STUCK_READS,
    &STUCK_READS_OF_GROUP,
    &NVML_RECORDS,
    &RUNTIME_EVENTS,
    &RUNTIME_EVENT_RATE,
    &PAST_EVENTS,
    &CONTAINER_LOGS_AT_ONCE,
    &RUNTIME_SOCKETS,
    &SPOOL_ENTRIES,
    &SPOOLED_RUNS_OF_USER,
    &NEW_RUNS_AT_ONCE,
    &NEW_RUNS,
    &API_EVENTS,
    &RUN_RECORDS,
    &REQUEST_HEADERS,
    &REPORTER_CONNECTIONS,
    &REPORTER_CONNECTIONS_OF_CONTAINER,
    &REPORTED_OPERATIONS,
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
        let bytes = BYTES
            .iter()
            .map(|bound| format!("| {} | {} | {} |", bound.source, size(bound.max_bytes), bound.on_overflow));
        let lists = LISTS
            .iter()
            .map(|list| format!("| {} | {} | {} |", list.source, number(list.max), list.on_overflow));
        let missing: Vec<_> =
            files.chain(bytes).chain(lists).filter(|row| !document.lines().any(|line| line == row)).collect();
        assert!(missing.is_empty(), "SECURITY.md lacks these rows:\n{}", missing.join("\n"));
    }
}
