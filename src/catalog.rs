//! The table of all metric families.
//!
//! Prometheus exposition, the JSON of the API, OTLP, `docs/metrics.md` and the dashboard lint are generated from it or
//! checked against it. A wrong row does not compile: a counter without `_total`, a name without a base unit, a help text
//! over the maximum length, a wrong number of label values.
//!
//! Values are elsewhere: each family is written by exactly one collector, or by `attribute`, `ledger` or `sampler`.

use std::marker::PhantomData;

/// The type of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Can go up and down.
    Gauge,
    /// Only increases while memledger runs.
    Counter,
    /// A gauge with value 1 whose labels carry the information.
    Info,
}

/// The event that set a counter to zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CounterOrigin {
    /// memledger's start.
    Memledger,
    /// The machine's boot; counters of drivers start after it.
    Boot,
    /// The start of its container.
    Container,
    /// The ledger's first start: restarts do not reset it.
    Ledger,
    /// The device was made: boots do not reset it, and the time is unknown.
    Device,
}

/// The subject of a family's series, which determines the labels that all of them carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricScope {
    /// memledger itself or the host: no common labels.
    Global,
    /// One container.
    Container,
    /// One GPU, or one MIG instance of a GPU: it has instance ids, and the `gpu` and `gpu_uuid` of its GPU.
    Gpu,
    /// One container on one GPU or MIG instance.
    ContainerGpu,
}

impl MetricScope {
    /// Returns the labels that every series of this scope carries; empty ones are omitted on the wire.
    pub const fn labels(self) -> &'static [&'static str] {
        match self {
            MetricScope::Global => &[],
            MetricScope::Container => &["k8s_namespace_name", "k8s_pod_name", "container_name"],
            MetricScope::Gpu => &["gpu", "gpu_uuid", "gpu_instance_id", "compute_instance_id"],
            MetricScope::ContainerGpu => &[
                "k8s_namespace_name",
                "k8s_pod_name",
                "container_name",
                "gpu",
                "gpu_uuid",
                "gpu_instance_id",
                "compute_instance_id",
            ],
        }
    }
}

/// A scope as a type, so that a family can only be written for the right kind of subject.
pub trait IsScope {
    /// The scope as a value.
    const SCOPE: MetricScope;
}

/// [`MetricScope::Global`] as a type.
#[derive(Clone, Copy, Debug)]
pub struct Global;
/// [`MetricScope::Container`] as a type.
#[derive(Clone, Copy, Debug)]
pub struct Container;
/// [`MetricScope::Gpu`] as a type.
#[derive(Clone, Copy, Debug)]
pub struct Gpu;
/// [`MetricScope::ContainerGpu`] as a type.
#[derive(Clone, Copy, Debug)]
pub struct ContainerGpu;

impl IsScope for Global {
    const SCOPE: MetricScope = MetricScope::Global;
}
impl IsScope for Container {
    const SCOPE: MetricScope = MetricScope::Container;
}
impl IsScope for Gpu {
    const SCOPE: MetricScope = MetricScope::Gpu;
}
impl IsScope for ContainerGpu {
    const SCOPE: MetricScope = MetricScope::ContainerGpu;
}

/// One row of the catalog.
#[derive(Clone, Copy, Debug)]
pub struct MetricDesc {
    /// The name on the wire.
    pub name: &'static str,
    /// Gauge, counter or info.
    pub kind: MetricKind,
    /// The subject of its series.
    pub scope: MetricScope,
    /// The labels in addition to those of the scope.
    pub labels: &'static [&'static str],
    /// The maximum number of series; excess ones are dropped and counted.
    pub max_series: usize,
    /// The event that set its counters to zero.
    pub origin: CounterOrigin,
    /// The metric of OpenTelemetry's semantic conventions with the same meaning, or empty. Ours keeps its own name, because it
    /// is narrower or has other attributes.
    pub like: &'static str,
    /// Why no dashboard shows it; empty if one does.
    pub hidden: &'static str,
    /// The HELP text: one sentence of at most [`MAX_HELP`] characters with meaning, source and absence.
    pub help: &'static str,
    /// Further facts for `docs/metrics.md`, as Markdown sentences; may be empty.
    pub details: &'static str,
}

/// The longest help text: scrapers receive it with every scrape.
pub const MAX_HELP: usize = 160;

/// A handle to write one family; its scope and number of labels are part of the type.
#[derive(Clone, Copy, Debug)]
pub struct Family<S, const N: usize> {
    /// Its row in the catalog.
    pub id: FamilyId,
    scope: PhantomData<S>,
}

/// Maximum number of series of a family with one series per container: enough for 2,000 containers.
const CONTAINERS: usize = 2_500;
const PER_COMPONENT: usize = CONTAINERS * 5;
const PER_ROLE: usize = CONTAINERS * 4;
/// Maximum number of series of a GPU family: sixteen GPUs with seven MIG instances each.
const GPUS: usize = 128;

/// Maximum number of series by container, GPU and local rank.
const TORCH: usize = 4_096;
/// Maximum number of series by component and operation.
const OPERATIONS: usize = 8_192;

macro_rules! catalog {
    ($($id:ident = $kind:ident $scope:ident $name:literal [$($label:literal),*] max $max:expr,
        $(since $origin:ident,)? $(like $like:literal,)? $(hidden $hidden:literal,)? $help:literal $(, $details:literal)?;)*) => {
        /// A family, as its row number in [`CATALOG`].
        #[allow(non_camel_case_types, clippy::upper_case_acronyms, missing_docs)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u16)]
        pub enum FamilyId { $($id),* }

        const IDS: [FamilyId; ROWS.len()] = [$(FamilyId::$id),*];

        /// All families, in the order of exposition.
        pub static CATALOG: &[MetricDesc] = &ROWS;

        const ROWS: [MetricDesc; [$($name),*].len()] = [$(MetricDesc {
            name: $name, kind: MetricKind::$kind, scope: MetricScope::$scope, labels: &[$($label),*], max_series: $max,
            origin: [$(CounterOrigin::$origin,)? CounterOrigin::Memledger][0], like: concat!($($like)?),
            hidden: concat!($($hidden)?), help: $help, details: concat!($($details)?),
        }),*];

        $(
            #[doc = concat!("`", $name, "`: ", $help)]
            pub const $id: Family<$scope, { let labels: &[&str] = &[$($label),*]; labels.len() }> =
                Family { id: FamilyId::$id, scope: PhantomData };
        )*
    };
}

catalog! {
    BUILD_INFO = Info Global "memledger_build_info" ["version", "revision", "rustversion"] max 1,
        "Version of memledger, the revision it was built from, and the version of the Rust compiler.";
    COLLECTOR_SUCCESS = Gauge Global "memledger_collector_success" ["collector"] max 32,
        "1 if the last read of the source succeeded, 0 if it failed; absent where the host never had the source.",
        "0 only where the source is configured, was there before, or its device node exists. `gpu` is absent while memledger has released the driver. `gpu_attribution`: 1 if the pids from the GPU driver are pids of this host, 0 if they are not or that is unproven; all GPU memory is then unattributed. `amdgpu_attribution`: the same for GPUs of AMD.";
    COLLECTOR_DURATION = Gauge Global "memledger_collector_duration_seconds" ["collector"] max 32,
        "Duration of the last read of the source; for pss, of one container.",
        "`gpu`, `amdgpu` and `pss` are read by threads of their own, outside the cycle.";
    COLLECTOR_READ_ERRORS = Counter Global "memledger_collector_read_errors_total" ["collector", "reason"] max 128,
        "Failed reads of something that exists, by collector and reason.",
        "A container or process that ended between two reads is no error. `reason`: `permission`, `io`, `malformed`, `balance` (the parts of a sum exceeded the whole twice), `timeout` (the kernel did not answer in time), `blocked` (skipped, because another read of that container or too many others hang), `too_large` (longer than the bound of the read), `too_many` (processes or cgroups of a container over the bound), `expensive` (skipped, because the process would wait too long).";
    SERIES_DROPPED = Counter Global "memledger_series_dropped_total" ["family"] max 128,
        "Series left out of snapshots because their family was over its cap; absent until the first.",
        "Counted once per cycle and series.";
    SNAPSHOT_TIMESTAMP = Gauge Global "memledger_snapshot_timestamp_seconds" [] max 1,
        "Unix time at which the newest cycle finished, or of the start while the first one hangs; it stops advancing when sampling hangs.";
    SOURCE_TIMESTAMP = Gauge Global "memledger_source_timestamp_seconds" ["source"] max 4,
        hidden "only there while sampling hangs, for which there is an alert",
        "Unix time of the data of each source that goes on while no cycle finishes; absent while cycles finish.",
        "`ledger`, `gpu` and `amdgpu`. `memledger_snapshot_timestamp_seconds` is the time of the last cycle.";
    CYCLE_DURATION = Gauge Global "memledger_cycle_duration_seconds" [] max 1,
        "Duration of the newest cycle, from its start to the finished snapshot.";
    CYCLES_SKIPPED = Counter Global "memledger_cycles_skipped_total" [] max 1,
        "Cycles skipped because the previous one was still running.";
    PANICS = Counter Global "memledger_panics_total" [] max 1,
        hidden "a bug that cost one reading; the log has the place",
        "Panics that memledger survived, each of which is a bug and cost one collector, cycle, read, request or export.",
        "The log has the place. A panic in a part that memledger cannot do without ends it with exit status 70 instead.";
    WEB_CONFIG_SUCCESS = Gauge Global "memledger_web_config_success" [] max 1,
        hidden "covered by an alert; the log has the reason",
        "1 if the current --web.config.file and all files it names are in use, 0 if they are unusable; absent without the setting.",
        "While it is 0, the last valid configuration stays in use.";
    WEB_REFUSED = Counter Global "memledger_web_refused_total" ["reason"] max 8,
        hidden "used to find out why scrapes fail, and then no dashboard has its data either",
        "Connections and requests that the HTTP server rejected, by reason.",
        "`connections` and `requests`: over `--web.max-connections` or `--web.max-requests`; `handshake`: the TLS handshake failed; `password`: missing or wrong; `password_queue`: too many passwords waited to be checked; `rate`: over `rate_limit` of `--web.config.file`; `control_socket`: a process that may not use the control socket. `connections` counts those of the control socket too.";
    RUNTIME_UP = Gauge Global "memledger_runtime_up" ["runtime"] max 8,
        "1 while memledger is connected to the container runtime's socket, 0 while it is not; absent where there never was a socket.",
        "While it is 0, names and labels of containers are kept. `cri` is the kubelet's runtime: also 0 where a configured socket is missing; absent where none is configured and the detected one has no pods.";
    CONTAINERS_SEEN = Gauge Global "memledger_containers" ["runtime"] max 8,
        "Running containers that memledger exports, by runtime; containers excluded by a filter do not count.";
    PROCESS_CPU = Counter Global "process_cpu_seconds_total" [] max 1, like "process.cpu.time",
        "User and system CPU time of memledger itself, from /proc/self/stat.";
    PROCESS_RESIDENT = Gauge Global "process_resident_memory_bytes" [] max 1, like "process.memory.usage",
        "Resident memory of memledger itself, from /proc/self/stat.";
    PROCESS_VIRTUAL = Gauge Global "process_virtual_memory_bytes" [] max 1,
        like "process.memory.virtual", hidden "not a measure of memory cost; a standard name that tools expect",
        "Virtual memory of memledger itself, from /proc/self/stat.";
    PROCESS_OPEN_FDS = Gauge Global "process_open_fds" [] max 1, like "process.unix.file_descriptor.count",
        "Open file descriptors of memledger itself, which keeps the cgroup files of every container open.";
    PROCESS_MAX_FDS = Gauge Global "process_max_fds" [] max 1,
        "Limit of open file descriptors of memledger itself.";
    PROCESS_START_TIME = Gauge Global "process_start_time_seconds" [] max 1,
        "Unix time at which memledger started.";

    HOST_MEMORY_TOTAL = Gauge Global "memledger_host_memory_total_bytes" [] max 1, like "system.memory.limit",
        "Memory that the kernel manages: MemTotal of /proc/meminfo.",
        "On hosts with coherent memory (Grace Hopper) it contains the memory of the GPUs: never add it to `memledger_gpu_memory_total_bytes`.";
    HOST_MEMORY_AVAILABLE = Gauge Global "memledger_host_memory_available_bytes" [] max 1,
        like "system.memory.linux.available",
        "The kernel's estimate of the memory that is available without swapping: MemAvailable of /proc/meminfo.";
    HOST_MEMORY_COMPONENT = Gauge Global "memledger_host_memory_component_bytes" ["component"] max 8,
        like "system.memory.usage",
        "Partition of the host's memory, from /proc/meminfo and cgroups; the components sum to memledger_host_memory_total_bytes.",
        "`containers` and `processes`: anonymous and shared memory inside and outside the containers that memledger exports, both absent where the memory of a container could not be read; `page_cache`: Cached + Buffers - Shmem; `kernel_reclaimable`: KReclaimable; `kernel`: SUnreclaim, PageTables, SecPageTables, KernelStack, Percpu; `hugetlb`; `free`; `unaccounted`: the rest, such as pages that drivers allocated, on hosts with coherent memory also the used memory of GPUs.";
    HOST_SWAP_TOTAL = Gauge Global "memledger_host_swap_total_bytes" [] max 1,
        "Size of the host's swap: SwapTotal of /proc/meminfo.";
    HOST_SWAP_USED = Gauge Global "memledger_host_swap_used_bytes" [] max 1, like "system.paging.usage",
        "Used swap of the host: SwapTotal - SwapFree of /proc/meminfo.";
    HOST_SHM_USED = Gauge Global "memledger_host_shm_used_bytes" [] max 1,
        "Used bytes of the host's /dev/shm, from statfs; absent if it is not a tmpfs or not visible to memledger.";
    HOST_SHM_SIZE = Gauge Global "memledger_host_shm_size_bytes" [] max 1,
        "Size of the host's /dev/shm, from statfs; absent if it is not a tmpfs or not visible to memledger.";
    HOST_PRESSURE_WAITING = Counter Global "memledger_host_memory_pressure_waiting_seconds_total" [] max 1, since Boot,
        "Time in which at least one task of the host waited for memory (PSI some), from /proc/pressure/memory; absent without PSI.";
    HOST_PRESSURE_STALLED = Counter Global "memledger_host_memory_pressure_stalled_seconds_total" [] max 1, since Boot,
        "Time in which all tasks of the host waited for memory at once (PSI full), from /proc/pressure/memory; absent without PSI.",
        "A part of `memledger_host_memory_pressure_waiting_seconds_total`: do not add the two.";

    HOST_OOM_KILLS = Counter Global "memledger_host_oom_kills_total" [] max 1, since Ledger,
        "Processes that the kernel's OOM killer killed on this host since the first start of the ledger; never disappears.",
        "The sum of the kills counted for containers (including those excluded by a filter), for host processes, and as unattributed, once each kill is settled, at most 15 s after its victim is gone.";
    HOST_PROCESS_OOM_KILLS = Counter Global "memledger_host_process_oom_kills_total" ["scope"] max 2, since Ledger,
        "Part of memledger_host_oom_kills_total: kills of processes outside containers.",
        "`scope`: `host` if the host ran out of memory, `limit` if a cgroup reached its own limit, such as that of a systemd unit, a job or a session.";
    OOM_UNATTRIBUTED = Counter Global "memledger_oom_kills_unattributed_total" [] max 1, since Ledger,
        "Part of memledger_host_oom_kills_total: kills that no evidence ties to a container or a host process.",
        "Counted 10 s after the kill.";
    OOM_KILLS_WITHOUT_RECORD = Counter Global "memledger_oom_kills_without_record_total" [] max 1, since Ledger,
        "Part of memledger_host_oom_kills_total: kills known only from a kernel counter, because their kernel log record is missing.",
        "The record was lost, or the kernel log is unreadable. Counted when the kill is settled.";
    OOM_DUPLICATE_LINES = Counter Global "memledger_oom_duplicate_lines_total" [] max 1, since Ledger,
        "Second kernel log records of one kill, which the kernel writes and counts with memory.oom.group; they are not kills.";
    OOM_SOURCE_UP = Gauge Global "memledger_oom_source_up" ["source"] max 4,
        "1 if the source of OOM evidence is readable now, 0 if not, and while the ledger hangs; absent for sources that are switched off.",
        "`kmsg`: the kernel log, which has the process; `vmstat`: `oom_kill` of /proc/vmstat, which has the number; `cgroup`: the containers' own counters, which have the container; `runtime`: Docker, Podman or the kubelet's runtime, which have exits and names. Without `kmsg`, kills have no process, and those of containers that are removed at once may stay unattributed. Switched off by `--oom.kernel-log=off` and `--oom.runtime=false`; `runtime` is absent also where there never was one.";
    STORE_UP = Gauge Global "memledger_store_up" [] max 1,
        "1 if the ledger is written to --state.path, 0 if writing fails or hangs: then it counts in memory; absent with an empty --state.path.",
        "While a newer memledger's ledger is in --state.path, or another one that cannot be read, there are no counts of the ledger: they would start at 0 and jump later.";
    STORE_UNREADABLE_ROWS = Gauge Global "memledger_store_unreadable_rows" [] max 1,
        hidden "0 unless an older version runs on the ledger; the log names each row",
        "Rows of the ledger that could not be parsed when it was opened, as after a return to an older version; each is logged and skipped.";

    REPORT_UP = Gauge Global "memledger_report_up" ["target"] max 2,
        hidden "an alert has it; without --report.dir and --report.s3-url it is absent",
        "1 if the newest report of a run was written to the target, 0 if writing fails; absent without a target and before the first report.",
        "`target`: `directory` (--report.dir) or `s3` (--report.s3-url). Reports that cannot be written wait in the ledger.";
    REPORTS_WAITING = Gauge Global "memledger_reports_waiting" ["target"] max 2, hidden "as `memledger_report_up`",
        "Runs that have ended and whose reports are not yet at the target; absent without a target and while the ledger is not open.";
    REPORTS_WRITTEN = Counter Global "memledger_reports_written_total" ["target"] max 2, hidden "as `memledger_report_up`",
        "Reports of runs that were written to the target since memledger's start; absent without a target.";
    REPORTS_LOST = Counter Global "memledger_reports_lost_total" ["target"] max 2, hidden "as `memledger_report_up`",
        "Runs whose records were removed from the ledger before their reports were written, since memledger's start; absent without a target.",
        "Removed by age or size (`--state.retention`, `--state.max-size`, 5,000 runs), or unreadable.";

    OTLP_UP = Gauge Global "memledger_otlp_up" ["signal"] max 3,
        hidden "where metrics are pushed, the receiver notices that they are missing; see docs/otlp.md",
        "1 if the endpoint accepted the newest OTLP export completely, 0 if not; absent without an endpoint and before the first export.",
        "`signal`: `metrics`, `logs` or `traces`.";
    OTLP_SENT = Counter Global "memledger_otlp_sent_total" ["signal"] max 3, hidden "as `memledger_otlp_up`",
        "Data points (metrics), log records (logs) and spans (traces) that the OTLP endpoint accepted since memledger's start; absent without an endpoint.";
    OTLP_LOST = Counter Global "memledger_otlp_lost_total" ["signal", "reason"] max 13,
        hidden "as `memledger_otlp_up`",
        "Data points, log records and spans that were not delivered over OTLP since memledger's start, by reason; absent without an endpoint.",
        "`unreachable`: no response, or a request to retry later, until newer data points replaced them (log records wait instead); `refused`: rejected by the endpoint; `too_large`: one alone exceeds the maximum size of a request; `unreadable`: an event that is damaged in the ledger; `queue_full`: spans for which there was no place in the queue.";

    REPORTER_CONNECTIONS = Gauge Global "memledger_reporter_connections" [] max 1,
        "Processes that report from inside now; absent where memledger does not receive reports.",
        "Those that have sent their first message. Absent with an empty `--reporter.directory`, and where that directory cannot be used.";
    REPORTER_REJECTED = Counter Global "memledger_reporter_rejected_total" ["reason"] max 16,
        "Connections and messages of reporting processes that were rejected, by reason.",
        "`peer`: the process ended; `no_container`: it is in no container; `connections`: too many; `rate`: a sender was made to wait; `too_large`, `malformed`, `version`: no valid message; `sender`: sent by another process than the one that connected, such as a forked child; `name`: characters that are not allowed; `rank`: a local rank over 63; `operations`: more than 64 pairs of component and operation in a container.";
    REPORTER_LOST = Counter Global "memledger_reporter_lost_total" [] max 1,
        "Messages that reporting processes could not send, and errors in their client, as they say themselves.";
    REPORTER_OVERLAPPING_OPERATIONS = Counter Global "memledger_reporter_overlapping_operations_total" [] max 1,
        hidden "of a program that overlaps its operations; the table of operations shows which have no peak",
        "Operations of reporting programs without a peak: another one ran at the same time on the same device.";
    REPORTER_HOLDERS_WITHHELD = Counter Global "memledger_reporter_holders_withheld_total" ["reason"] max 4,
        "Partitions of a container's GPU memory that were left out of a cycle, by reason.",
        "`stale`: a sample and the driver's reading were more than 1.5 s apart; `negative`: the process held less by the driver's reading than torch reported; `unknown_gpu`: torch did not say which GPU it is, and the driver's reading does not either; `unreported`: the driver does not report the memory of a process.";

    CONTAINER_INFO = Info Container "memledger_container_info"
        ["container_id", "image", "runtime", "compose_project", "compose_service", "cgroup_version"] max CONTAINERS,
        "Identity of a container: id, image, runtime, Compose project and service, cgroup version; value 1.",
        "Kept for `--container.keep-ended` after the container's end; a running container of the same name replaces it.";
    CONTAINER_RUN_INFO = Info Container "memledger_container_run_info" ["run", "group", "settings"] max CONTAINERS,
        "One run of a container: short id and start time, the group of comparable runs, and its settings as labels; value 1.",
        "Runs of one group are comparable (docs/runs.md). `settings` has all of them as `batch_size=32 num_workers=4`, cut after 256 characters. Besides there is a label for each variable of `--container.settings` that the container's environment sets, and for each label `memledger.run.KEY` of the container or pod. Kept as long as `memledger_container_info`.";
    CONTAINER_POD_INFO = Info Container "memledger_container_pod_info"
        ["k8s_pod_uid", "attempt", "qos_class", "pod_source"] max CONTAINERS,
        hidden "used for joins by pod uid, QoS class and the labels that a cluster selects",
        "The pod of a container, from the kubelet's container runtime (CRI); value 1.",
        "`attempt`: restarts of the container in this pod before this one. `qos_class`: `guaranteed`, `burstable` or `besteffort`, from the path of its cgroup. `pod_source`: `api`, or `file` or `http` for a static pod. And a label for each of `--cri.pod-labels` and `--cri.pod-annotations` that the pod has. Kept as long as `memledger_container_info`.";
    CONTAINER_OWNER_INFO = Info Container "memledger_container_owner_info" ["owner"] max CONTAINERS,
        "The owner of a container, by its labels or its pod's that `--container.owner-labels` names; value 1.",
        "`owner`: the first one of them that is set; besides, a label for each one that is set: KEY as label_KEY. No series for a container without any. Kept as long as `memledger_container_info`, and of a container of a pod also while the kubelet has a device allocated to it.";
    CONTAINER_DEVICE_CLAIMED = Gauge Container "memledger_container_device_claimed" ["driver", "pool", "device"] max 4_096,
        "1 for each device that a resource claim (DRA) of a pod gave to the container, as the kubelet lists it.",
        "Of all drivers, also while the container does not run. Which GPU it is only its driver knows, unless its name or its CDI name has the uuid: then there is also `memledger_container_gpu_allocated`.";
    CONTAINER_GPU_UNMATCHED = Gauge Container "memledger_container_gpu_unmatched" ["resource", "device"] max 4_096,
        "1 for each GPU of a device plugin that the kubelet allocated to the container under a name that is none of the GPUs here.",
        "Such as `GPU-UUID-1` of a plugin that shares GPUs, or a number under a renamed resource. No `memledger_container_gpu_allocated` says which GPU it is.";
    CONTAINER_START_TIME = Gauge Container "memledger_container_start_time_seconds" [] max CONTAINERS,
        "Unix time of the container's last start, from the runtime; without a runtime, the start of its oldest process.";
    CONTAINER_MEMORY_USAGE = Gauge Container "memledger_container_memory_usage_bytes" [] max CONTAINERS,
        like "container.memory.usage",
        "All memory charged to the container, including page cache: memory.current (cgroup v2) or memory.usage_in_bytes (v1).";
    CONTAINER_MEMORY_WORKING_SET = Gauge Container "memledger_container_memory_working_set_bytes" [] max CONTAINERS,
        like "container.memory.working_set",
        "Usage minus inactive file cache (memory.stat), at least 0: MEM USAGE of docker stats.";
    CONTAINER_MEMORY_RSS = Gauge Container "memledger_container_memory_rss_bytes" [] max CONTAINERS,
        like "container.memory.rss",
        "Anonymous memory of the container: anon (cgroup v2) or total_rss (v1) of memory.stat.";
    CONTAINER_MEMORY_UNRECLAIMABLE = Gauge Container "memledger_container_memory_unreclaimable_bytes" [] max CONTAINERS,
        "Memory of the container that the kernel cannot reclaim, from memory.stat; cgroup v1 includes reclaimable slab.",
        "v2: anon + shmem + (kernel - slab_reclaimable) + sock; v1: total_rss + total_shmem + memory.kmem.usage_in_bytes, which does not separate reclaimable slab. Rank and alert on this.";
    CONTAINER_MEMORY_UNRECLAIMABLE_PEAK = Gauge Container "memledger_container_memory_unreclaimable_peak_bytes" [] max CONTAINERS,
        "Highest sample of memledger_container_memory_unreclaimable_bytes since the later start of the container and memledger.",
        "Kept as long as `memledger_container_info`.";
    CONTAINER_MEMORY_COMPONENT = Gauge Container "memledger_container_memory_component_bytes" ["component"] max PER_COMPONENT,
        "Partition of the container's usage, from memory.stat; the components sum to memledger_container_memory_usage_bytes.",
        "`anon`; `file`: page cache without shared memory; `shmem`; `kernel`; `other`: the rest, 0 where the others are more than the usage, which is read a moment before or after them.";
    CONTAINER_MEMORY_LIMIT = Gauge Container "memledger_container_memory_limit_bytes" [] max CONTAINERS,
        like "k8s.container.memory.limit",
        "The container's own memory limit: memory.max (cgroup v2) or memory.limit_in_bytes (v1); absent when unlimited.";
    CONTAINER_MEMORY_REQUEST = Gauge Container "memledger_container_memory_request_bytes" [] max CONTAINERS,
        hidden "requests matter to scheduling, not to memory use, and most pods have none that a node knows",
        "Memory request of a container in a pod; absent where the node does not know it.",
        "In a guaranteed pod it is the limit; otherwise it is memory.min, which the kubelet sets with its feature MemoryQoS. Only the API server knows the requests of the others.";
    POD_MEMORY_USAGE = Gauge Global "memledger_pod_memory_usage_bytes" ["k8s_namespace_name", "k8s_pod_name"] max CONTAINERS,
        "Memory charged to a pod's cgroup, page cache included; there while one of its containers runs.",
        "Beside its containers that is the pause process, volumes in memory (`emptyDir` with `medium: Memory`) whose container was restarted, and what ended containers left. A pod that is replaced by one of its name and the new one are one series.";
    POD_MEMORY_LIMIT = Gauge Global "memledger_pod_memory_limit_bytes" ["k8s_namespace_name", "k8s_pod_name"] max CONTAINERS,
        "Memory limit of a pod's cgroup; absent when unlimited.",
        "The kubelet sets it to the sum of the containers' limits if each has one, or to the pod's own (`spec.resources`).";
    POD_MEMORY_COMPONENT = Gauge Global "memledger_pod_memory_component_bytes" ["k8s_namespace_name", "k8s_pod_name", "component"] max 2 * CONTAINERS,
        "Parts of `memledger_pod_memory_usage_bytes`, which they sum to: `containers`, those with series of their own, and `rest`.",
        "A container that a filter excludes (`--container.include` and the like), or whose memory could not be read, is in `rest`.";
    CONTAINER_MEMORY_EFFECTIVE_LIMIT = Gauge Container "memledger_container_memory_effective_limit_bytes" [] max CONTAINERS,
        "Lowest memory limit on the container's path to the root of the cgroup tree; absent when unlimited.";
    CONTAINER_MEMORY_HEADROOM = Gauge Container "memledger_container_memory_headroom_bytes" [] max CONTAINERS,
        "Lowest (limit + free swap - unreclaimable) of the limited cgroups on the container's path to the root; absent when unlimited.",
        "Bytes until a kill. Huge pages are in no figure of the container; a host that charges them to its memory (memory_hugetlb_accounting) kills earlier by as much. Free swap is what the host has left, within the limits of swap on the path, and no more than the memory that can be swapped; on cgroup v1 it is taken for 0. memory.high, which throttles and does not kill, is not a limit here. See `memledger_container_memory_limit_utilization_ratio`.";
    CONTAINER_MEMORY_LIMIT_UTILIZATION = Gauge Container "memledger_container_memory_limit_utilization_ratio" [] max CONTAINERS,
        "Highest unreclaimable / (lowest of limit and memory.high + free swap) of the cgroups on the container's path to the root; absent when unlimited.",
        "The container with the highest ratio is the next to run out of memory, or to be throttled at memory.high. Rank and alert on this: it takes memory and limit of the same level, however large another level is.";
    CONTAINER_MEMORY_LEVEL_UTILIZATION = Gauge Container "memledger_container_memory_level_utilization_ratio" ["level"] max CONTAINERS * 4,
        hidden "the alerts need it, to tell a limit of the container from that of all pods",
        "Parts of `memledger_container_memory_limit_utilization_ratio`, which is the highest of them, by the level of the limit.",
        "`container`: its own limit; `pod`: its pod's; `node`: that of all pods of the node, or of a QoS class; `slice`: that of another cgroup above it, such as a slice of systemd. A level without a limit is absent.";
    CONTAINER_MEMORY_HIGH = Gauge Container "memledger_container_memory_high_bytes" [] max CONTAINERS,
        "Usage above which the kernel throttles and reclaims the container: memory.high; absent when unlimited and on cgroup v1.";
    CONTAINER_MEMORY_EVENTS = Counter Container "memledger_container_memory_events_total" ["event"] max CONTAINERS * 2, since Container,
        "Times that the container's usage was above memory.high (high) or about to exceed memory.max (max), from memory.events; cgroup v2.",
        "Read in every fifth cycle, at least every 5 s. `high`: a process was throttled and had to reclaim; `max`: an allocation at the limit, which reclaim may have served: no kill. Cgroups below count too.";
    CONTAINER_MAJOR_FAULTS = Counter Container "memledger_container_major_page_faults_total" [] max CONTAINERS, since Container,
        "Page faults of the container that needed a read from disk: pgmajfault (cgroup v2) or total_pgmajfault (v1) of memory.stat.";
    CONTAINER_REFAULTS = Counter Container "memledger_container_refaults_total" ["kind"] max CONTAINERS * 2, since Container,
        "Pages read again after they were evicted, by kind (anon, file), from workingset_refault of memory.stat; cgroup v2 since Linux 5.9, v1 of new kernels.",
        "Growing quickly, the container needs more memory than it may use: it thrashes.";
    CONTAINER_AT_MEMORY_LIMIT = Gauge Container "memledger_container_at_memory_limit" [] max CONTAINERS,
        hidden "`ps`, `why` and its alert say it; panels have the counters that it follows from",
        "1 if the container is full to its own limit or memory.high, and has waited for memory for 10 s; 0 if not; absent without a limit.",
        "Full: within 2 %, and 256 MiB. By memory.pressure (cgroup v2): all its tasks wait for 30 % of the time. Without it, on v1, by workingset_refault of memory.stat: nine tenths are anonymous or shared, and within a second as much is read again as page cache is left, at least 16 MiB; a run that streams its data beside so little page cache looks the same. Absent where the kernel has neither.";
    CONTAINER_CPU = Counter Container "memledger_container_cpu_seconds_total" ["mode"] max CONTAINERS * 2, since Container,
        "CPU time of the container by mode (user, system): cpu.stat (cgroup v2) or cpuacct.stat (v1).",
        "Read in every fifth cycle, at least every 5 s: on cgroup v2 a read makes the kernel sum counters of all CPUs.";
    CONTAINER_CPU_THROTTLED = Counter Container "memledger_container_cpu_throttled_seconds_total" [] max CONTAINERS, since Container,
        "Time for which the container's CPU limit kept it from running, over all CPUs, from cpu.stat; absent without a CPU controller.",
        "Read in every fifth cycle, at least every 5 s.";
    CONTAINER_MEMORY_PEAK = Gauge Container "memledger_container_memory_peak_bytes" [] max CONTAINERS,
        "Highest usage since the container's start, including page cache: memory.peak (cgroup v2) or memory.max_usage_in_bytes (v1).",
        "memory.peak exists since Linux 5.19; on older kernels it is the highest sample of memledger. Kept as long as `memledger_container_info`.";
    CONTAINER_MEMORY_SWAP = Gauge Container "memledger_container_memory_swap_bytes" [] max CONTAINERS,
        "Swap used by the container: memory.swap.current (cgroup v2) or total_swap of memory.stat (v1); absent without swap accounting.";
    CONTAINER_MEMORY_SWAP_LIMIT = Gauge Container "memledger_container_memory_swap_limit_bytes" [] max CONTAINERS,
        "Swap that the container may use: memory.swap.max; absent when unlimited, and on cgroup v1.";
    CONTAINER_PRESSURE_WAITING = Counter Container "memledger_container_memory_pressure_waiting_seconds_total" [] max CONTAINERS, since Container,
        "Time in which at least one task of the container waited for memory (PSI some), from memory.pressure; cgroup v2 with PSI only.",
        "Read in every fifth cycle, at least every 5 s.";
    CONTAINER_PRESSURE_STALLED = Counter Container "memledger_container_memory_pressure_stalled_seconds_total" [] max CONTAINERS, since Container,
        "Time in which all tasks of the container waited for memory at once (PSI full), from memory.pressure; cgroup v2 with PSI only.",
        "A part of `memledger_container_memory_pressure_waiting_seconds_total`: do not add the two.";
    CONTAINER_SHM_USED = Gauge Container "memledger_container_shm_used_bytes" [] max CONTAINERS,
        "Used bytes of the container's own /dev/shm, from statfs; absent if it is not a tmpfs or is the host's, without CAP_SYS_PTRACE, and before Linux 5.12.",
        "Containers that share one, as those of a pod do, have it once: the first that has a name, or else the one that started last. Read at most every 5 s.";
    CONTAINER_SHM_SIZE = Gauge Container "memledger_container_shm_size_bytes" [] max CONTAINERS,
        "Size of the container's own /dev/shm, from statfs, or before Linux 5.12 from the mount table; needs CAP_SYS_PTRACE.",
        "Docker's default of 64 MiB is what kills DataLoaders. Read at most every 5 s.";
    CONTAINER_PROCESS_RSS = Gauge Container "memledger_container_process_rss_bytes" ["role"] max PER_ROLE,
        "Resident memory of the container's processes by role, from /proc/PID/statm; forked processes count shared pages again.",
        "Never sum it or take shares of it: use `memledger_container_process_pss_bytes`. Approximate on Linux 6.2 to 6.15, which counts it by CPU: with many CPUs it may be off by some MiB.";
    CONTAINER_PROCESS_PSS = Gauge Container "memledger_container_process_pss_bytes" ["role"] max PER_ROLE,
        "Proportional set size of the container's processes by role, from /proc/PID/smaps_rollup; needs CAP_SYS_PTRACE.",
        "It can be summed. Read at most every `--pss.interval` and cached until the next read, which is postponed by up to ten minutes while the container or the host is about to run out of memory. A process waits while it is read: one that would wait more than 50 ms is read once in ten minutes, and has no share if it changes meanwhile; above 500 ms it is not read; the largest of a container has instead what the others leave of its anonymous and mapped memory. Absent for a role that has a process younger than the last read, or one that is not read.";
    CONTAINER_PROCESSES = Gauge Container "memledger_container_processes" ["role"] max PER_ROLE,
        "Processes of the container by role (trainer, dataloader_worker, worker, other), from cgroup.procs and /proc; absent if not all can be read.";
    CONTAINER_OOM_KILLS = Counter Container "memledger_container_oom_kills_total" ["victim", "scope"] max CONTAINERS * 4, since Ledger,
        "Processes of the container that the kernel's OOM killer killed, from the ledger; begins at 0 with the container.",
        "`victim`: `main` if the kill ended the container (its first process, or a child whose death made it exit with that status within 5 s), else `child`. `scope`: `container` if the limit of a cgroup was hit, `host` if the host ran out of memory. Continues over restarts of the container and of memledger. The kill of a child is counted once the container is known to survive, 5 s after the child is gone, or 15 s if no process of it is seen.";
    CONTAINER_LAST_OOM_KILL = Gauge Container "memledger_container_last_oom_kill_timestamp_seconds" [] max CONTAINERS,
        "Unix time of the last OOM kill of a process of the container; absent until the first.";
    CONTAINER_EXITS = Counter Container "memledger_container_exits_total" ["reason"] max CONTAINERS * 14, since Ledger,
        "Exits of the container by reason, from the ledger.",
        "`completed`: exit 0; `oom_container`; `oom_host`; `stopped`: a stop request to the runtime; `killed`: SIGKILL from outside, no OOM; `signal`; `error`: another exit code, or 129 to 192 within five minutes after the OOM kill of a child, whose status it may be; `host_restart`: the run began in another boot of the host; `cuda_oom`: what would be `error`, within 5 s after a CUDA out-of-memory error that a process reported, within 120 s if it did not catch it, and within 15 s after one in the log if no process reports; what would be `error`, or `signal` by a crash, within 15 s after such a text in the log ([deaths.md](deaths.md)), and no OOM kill that may be the cause: `refused` (memory of the host), `own_limit` (the program's: heap, `memory_limit`), `threads`, `shm`, which are there only where memledger reads logs (`--container.logs`); `unknown`: no source has the reason. Never called an OOM by exit code 137 or the runtime's flag, only by the ledger's own evidence.";
    CONTAINER_LAST_EXIT_CODE = Gauge Container "memledger_container_last_exit_code" [] max CONTAINERS,
        "Exit code of the container's last exit, from the runtime; absent until the first.";
    CONTAINER_RESTARTS = Counter Container "memledger_container_restarts_total" [] max CONTAINERS, since Ledger,
        like "k8s.container.restart.count",
        "Starts of a container of this name after the first one in the ledger.",
        "Unlike the runtime's count it continues when the container is re-created.";
    CONTAINER_CUDA_OOMS = Counter Container "memledger_container_cuda_ooms_total" ["source"] max CONTAINERS * 2, since Ledger,
        "CUDA out-of-memory errors of the container's programs, from the ledger; begins at 0 once one of its processes reports, or its log is read.",
        "`source`: `reporter` for those that the processes report, also those that the program survives; `log` for lines of the container's log, with `--container.logs` ([cuda-oom.md](cuda-oom.md)). The same error can be in both: never add them. Continues over restarts of the container and of memledger. `memledger_container_torch_ooms_total` is PyTorch's own count.";
    CONTAINER_LAST_CUDA_OOM = Gauge Container "memledger_container_last_cuda_oom_timestamp_seconds" [] max CONTAINERS,
        "Unix time of the last CUDA out-of-memory error of the container; absent until the first.";

    CONTAINER_GPU_XIDS = Counter Container "memledger_container_gpu_xid_errors_total"
        ["gpu", "gpu_uuid", "gpu_instance_id", "compute_instance_id", "xid"] max CONTAINERS * 4,
        "Xids of a GPU whose kernel log line names a process of the container; needs the kernel log.",
        "See `memledger_gpu_xid_errors_total`. The process was on a GPU and in the container at most a minute before. 13, 31, 43, 45 and 94 begin at 0 on each GPU or MIG instance that the container uses. The instance ids are absent if the driver names no instance. Continues over restarts of the container, not of memledger. Kept as long as the container is exported, and remembered for an hour after that.";
    CONTAINER_GPU_LAST_XID = Gauge Container "memledger_container_gpu_last_xid_timestamp_seconds"
        ["gpu", "gpu_uuid", "gpu_instance_id", "compute_instance_id", "xid"] max CONTAINERS * 4,
        "Unix time of the last Xid of memledger_container_gpu_xid_errors_total; absent until the first.";

    GPU_INFO = Info Gpu "memledger_gpu_info"
        ["model", "vendor", "driver_version", "cuda_version", "compute_capability", "cuda_cores", "pci_bus_id", "mig_uuid"] max GPUS,
        "Identity of a GPU or of a MIG instance, which has a mig_uuid; value 1.";
    GPUS_EXPECTED = Gauge Global "memledger_gpus_expected" ["source"] max 2,
        "GPUs that should be there, by source; MIG instances do not count; absent where no GPU was ever seen.",
        "`nvml`: `--gpu.expected`, else the highest count of the driver within 7 days; `amdgpu`: the highest count of GPUs of AMD within 7 days. The ledger keeps it over restarts and reboots.";
    GPUS_VISIBLE = Gauge Global "memledger_gpus_visible" ["source"] max 2,
        "GPUs that respond now, by source (nvml, amdgpu); MIG instances do not count; absent while the source does not respond.";
    GPU_RELEASE_REMAINING = Gauge Global "memledger_gpu_release_remaining_seconds" [] max 1,
        "Time until memledger opens the GPU driver again after SIGUSR1 or POST /-/release-gpu; absent otherwise.";
    GPU_DRIVER_PROCESS_RESTARTS = Counter Global "memledger_gpu_driver_process_restarts_total" ["reason"] max 4,
        "Times that the NVML process failed and memledger replaced it, by reason; absent on hosts that never had a driver.",
        "`ended`: it crashed, was killed, or reached its memory limit; `timeout`: a call hung for `--gpu.deadline`; `invalid_message`: it sent something else than a reading; `driver`: the library reported that the whole driver has failed. Attempts to open a library or driver that is not there do not count.";
    GPU_UNKILLABLE_DRIVER_PROCESSES = Gauge Global "memledger_gpu_unkillable_driver_processes" [] max 1,
        "NVML processes that were killed and have not ended; absent on hosts that never had a driver.",
        "They wait in the kernel for a device. One more is started beside the first of them, and none beside two.";
    GPU_MEMORY_TOTAL = Gauge Gpu "memledger_gpu_memory_total_bytes" [] max GPUS, like "hw.gpu.memory.limit",
        "Memory of the GPU, from NVML or amdgpu's sysfs; absent on unified memory.",
        "A GPU in MIG mode and its instances are both exported: sum those without `gpu_instance_id`, or those with one, never both; compute instances of one GPU instance share its memory. On hosts with coherent memory it is a part of `memledger_host_memory_total_bytes`.";
    GPU_MEMORY_USED = Gauge Gpu "memledger_gpu_memory_used_bytes" [] max GPUS, like "hw.gpu.memory.usage",
        "Used memory of the GPU without the driver's reserved memory, from NVML memory info or amdgpu's sysfs; absent on unified memory.",
        "NVIDIA drivers without the second version of memory info count reserved memory as used. MIG: see `memledger_gpu_memory_total_bytes`.";
    GPU_MEMORY_FREE = Gauge Gpu "memledger_gpu_memory_free_bytes" [] max GPUS,
        "Free memory of the GPU, from NVML memory info; for amdgpu, total minus used; absent where the used memory is.",
        "MIG: see `memledger_gpu_memory_total_bytes`.";
    GPU_MEMORY_RESERVED = Gauge Gpu "memledger_gpu_memory_reserved_bytes" [] max GPUS,
        "Memory that driver and firmware reserve for themselves, from NVML memory info v2; absent where the driver does not report it.",
        "Where it is absent it is a part of used, and unattributed. MIG: see `memledger_gpu_memory_total_bytes`.";
    GPU_MEMORY_UNATTRIBUTED = Gauge Gpu "memledger_gpu_memory_unattributed_bytes" [] max GPUS,
        "Used memory of the GPU that belongs to no known process: used minus that of containers and of host processes; at least 0.",
        "Managed memory (cudaMallocManaged) is here: the driver counts it in no process. Used memory minus `memledger_container_gpu_memory_used_bytes` and `memledger_gpu_host_processes_memory_bytes`; for a GPU in MIG mode, minus those of all its instances. Where the driver does not report the memory of one of a container's processes, all of the container's is here. Never guessed.";
    GPU_MEMORY_PEAK = Gauge Gpu "memledger_gpu_memory_peak_bytes" [] max GPUS,
        "Highest sample of memledger_gpu_memory_used_bytes since memledger's start, sampled every --gpu.sample-interval.";
    GPU_MEMORY_RECENT_PEAK = Gauge Gpu "memledger_gpu_memory_recent_peak_bytes" [] max GPUS,
        "Highest sample of memledger_gpu_memory_used_bytes in the last minute, sampled every --gpu.sample-interval.";
    GPU_MEMORY_CONFLICTS = Counter Gpu "memledger_gpu_memory_accounting_conflicts_total" [] max GPUS,
        "Readings in which the memory of processes exceeds the device's used memory, although that was read more than once.";
    GPU_HOST_PROCESSES = Gauge Gpu "memledger_gpu_host_processes_memory_bytes" [] max GPUS,
        "GPU memory of processes outside the exported containers; absent where one does not report it or pids are untrusted.",
        "For a GPU in MIG mode it is exported for its instances only.";
    GPU_UTILIZATION = Gauge Gpu "memledger_gpu_utilization_ratio" [] max GPUS, like "hw.gpu.utilization",
        "Share of the driver's last sample period in which a kernel ran, from NVML or amdgpu's sysfs; absent in MIG mode.",
        "It does not say how much of the GPU the kernel used. For GPUs of AMD: the value of the firmware.";
    GPU_MEMORY_UTILIZATION = Gauge Gpu "memledger_gpu_memory_utilization_ratio" [] max GPUS,
        "Share of the driver's last sample period in which device memory was read or written, from NVML; absent in MIG mode.",
        "It does not say how full the memory is.";
    GPU_POWER = Gauge Gpu "memledger_gpu_power_watts" [] max GPUS, like "hw.power",
        "Power drawn by the board, from NVML or the hardware monitor of amdgpu; absent without such a sensor.";
    GPU_ENERGY = Counter Gpu "memledger_gpu_energy_joules_total" [] max GPUS, since Boot, like "hw.energy",
        "Energy used since the driver was loaded, from NVML; absent where the driver does not report it.";
    GPU_TEMPERATURE = Gauge Gpu "memledger_gpu_temperature_celsius" [] max GPUS, like "hw.temperature",
        "Temperature of the die, from NVML or the hardware monitor of amdgpu; absent without such a sensor.";
    GPU_MEMORY_TEMPERATURE = Gauge Gpu "memledger_gpu_memory_temperature_celsius" [] max GPUS,
        "Temperature of the device memory, from NVML or the hardware monitor of amdgpu; absent without such a sensor.";
    GPU_POWER_LIMIT = Gauge Gpu "memledger_gpu_power_limit_watts" [] max GPUS,
        "Power limit that the driver enforces, from NVML or the hardware monitor of amdgpu; absent where it has none.";
    GPU_CLOCK = Gauge Gpu "memledger_gpu_clock_hertz" ["clock"] max GPUS * 2,
        "Current clock of a GPU domain, from NVML or the hardware monitor of amdgpu; absent where the driver does not report it.",
        "`clock`: `sm`, the multiprocessors; `memory`.";
    GPU_NVLINK_BYTES = Counter Gpu "memledger_gpu_nvlink_bytes_total" ["direction"] max GPUS * 2, since Boot,
        "Data over all NVLinks of the GPU by direction (transmitted, received), without protocol overhead, from NVML; absent without NVLink.",
        "NVML's counters of all links, in units of 1 KiB.";
    GPU_VOLATILE_ECC_ERRORS = Counter Gpu "memledger_gpu_volatile_ecc_errors_total" ["kind"] max GPUS * 2, since Boot,
        "ECC errors since the driver was loaded, corrected and uncorrected, from NVML's volatile counters; absent without ECC.";
    GPU_THROTTLE = Counter Gpu "memledger_gpu_throttle_seconds_total" ["reason"] max GPUS * 6,
        "Time since memledger's start under a reason that lowers clocks, from samples of NVML.",
        "`sw_power_cap`, `hw_slowdown`, `sync_boost`, `sw_thermal`, `hw_thermal`, `hw_power_brake`. A reason that is active in a reading counts for the time since the previous reading, and for at most `--gpu.interval` plus `--gpu.deadline`.";
    GPU_ECC_ERRORS = Counter Gpu "memledger_gpu_ecc_errors_total" ["kind"] max GPUS * 2, since Device,
        like "hw.errors",
        "ECC errors over the device's life, corrected and uncorrected, from NVML's aggregate counters; absent without ECC.";
    GPU_REMAPPED_ROWS = Gauge Gpu "memledger_gpu_remapped_rows" ["kind"] max GPUS * 2,
        "Memory rows remapped after correctable or uncorrectable errors, from NVML; Ampere and later.";
    GPU_REMAPPED_ROWS_PENDING = Gauge Gpu "memledger_gpu_remapped_rows_pending" [] max GPUS,
        "1 if a memory row is to be remapped at the next reset of the GPU, else 0, from NVML; Ampere and later.";
    GPU_REMAPPED_ROWS_FAILURE = Gauge Gpu "memledger_gpu_remapped_rows_failure" [] max GPUS,
        "1 if a row remapping has failed, else 0, from NVML; Ampere and later.";
    GPU_RETIRED_PAGES = Gauge Gpu "memledger_gpu_retired_pages" ["kind"] max GPUS * 2,
        "Memory pages retired after single_bit or double_bit errors, from NVML; before Ampere.";
    GPU_RETIRED_PAGES_PENDING = Gauge Gpu "memledger_gpu_retired_pages_pending" [] max GPUS,
        "1 if a memory page is to be retired at the next reboot, else 0, from NVML; before Ampere.";
    GPU_PCIE_REPLAYS = Counter Gpu "memledger_gpu_pcie_replays_total" [] max GPUS, since Boot,
        "Replays on the PCIe link since the driver was loaded, from NVML; absent where the driver does not report it.";
    GPU_NVLINK_ERRORS = Counter Gpu "memledger_gpu_nvlink_errors_total" ["kind"] max GPUS * 5, since Boot,
        "Errors over all NVLinks of the GPU by kind, from NVML; absent without NVLink and for kinds that the driver does not report.",
        "`crc_flit`, `crc_data`, `replay`, `recovery`, `ecc_data`.";
    GPU_XID_ERRORS = Counter Gpu "memledger_gpu_xid_errors_total" ["xid"] max GPUS * 32,
        "Xids (GPU errors that the driver reports) since memledger's start, from NVML events.",
        "Those of the table in [MemledgerGpuXid](runbooks/MemledgerGpuXid.md) begin at 0. When several occur within `--gpu.sample-interval`, NVML reports all of them with the newest one's number.";
    GPU_LAST_XID = Gauge Gpu "memledger_gpu_last_xid_timestamp_seconds" ["xid"] max GPUS * 32,
        "Unix time of the last Xid of this number; absent until the first since memledger's start.";
    CONTAINER_GPU_MEMORY = Gauge ContainerGpu "memledger_container_gpu_memory_used_bytes" [] max 4_096,
        "GPU memory of the container's processes, from NVML's process lists, or AMD's KFD.",
        "From KFD: what the process allocated for computing; what it holds for drawing is unattributed. Memory of a MIG instance is exported for the instance only, not for its GPU too: series can be summed.";
    CONTAINER_GPU_MEMORY_PEAK = Gauge ContainerGpu "memledger_container_gpu_memory_peak_bytes" [] max 4_096,
        "Highest memledger_container_gpu_memory_used_bytes since the later start of the container and memledger.",
        "The most that its processes held at one time, sampled every `--gpu.sample-interval`. Outlives the processes; kept as long as `memledger_container_info`.";
    CONTAINER_GPU_MEMORY_RECENT_PEAK = Gauge ContainerGpu "memledger_container_gpu_memory_recent_peak_bytes" [] max 4_096,
        "Highest memledger_container_gpu_memory_used_bytes in the last minute, sampled every --gpu.sample-interval.";
    CONTAINER_GPU_PROCESSES = Gauge ContainerGpu "memledger_container_gpu_processes" [] max 4_096,
        "Processes of the container that hold a context on the GPU, from NVML's lists, or AMD's KFD; absent without any.";
    CONTAINER_GPU_UTILIZATION = Gauge ContainerGpu "memledger_container_gpu_utilization_ratio" [] max 4_096,
        "Share of the GPU's time in which a kernel of the container ran; absent where the driver does not report it, as in MIG mode.",
        "The sum over the container's processes, each the mean of NVML's own samples since the query before, at least of the last 1.5 seconds, at most 1; queried in every fifth reading, at least every 5 s, and for a new process; a process without samples was idle. Absent for GPUs of AMD, whose driver does not report it by process.";
    CONTAINER_GPU_ALLOCATED = Gauge ContainerGpu "memledger_container_gpu_allocated" [] max 4_096,
        "1 for each GPU or MIG instance allocated to the container by the kubelet or Docker, in use or not; absent where neither has it.",
        "From the kubelet's pod-resources socket (resources nvidia.com/... and amd.com/gpu, and devices of resource claims whose name has a GPU's uuid), or from the device requests of a Docker container (`--gpus`). A container of a pod has it also while it does not run: the kubelet keeps its GPU until the pod is done. A regular init container has none: the kubelet lists its GPU for a container of the same pod. Neither has it for NVIDIA_VISIBLE_DEVICES, or for a GPU that no driver reports.";
    CONTAINER_GPU_HOLDER = Gauge ContainerGpu "memledger_container_gpu_memory_holder_bytes" ["holder"] max 4_096 * 4,
        "Partition of memledger_container_gpu_memory_used_bytes by holder, from the driver and from reports of the processes.",
        "`tensors`: allocated in torch; `torch_cache`: reserved by torch's allocator and not allocated; `outside_torch`: the rest of reporting processes, such as the CUDA context and libraries; `not_reporting`: processes without the client. The first three are absent while no process reports; all are absent where they cannot be exact: see `memledger_reporter_holders_withheld_total`.";
    CONTAINER_TORCH_ALLOCATED = Gauge ContainerGpu "memledger_container_torch_allocated_bytes" ["rank"] max TORCH,
        "Memory of tensors in torch's allocator, by local rank, as the process reports it.",
        "The sum, if several processes of the container have the same local rank on the same GPU.";
    CONTAINER_TORCH_RESERVED = Gauge ContainerGpu "memledger_container_torch_reserved_bytes" ["rank"] max TORCH,
        "Memory that torch's allocator holds, tensors and cache, by local rank, as the process reports it.";
    CONTAINER_TORCH_INACTIVE_SPLIT = Gauge ContainerGpu "memledger_container_torch_inactive_split_bytes" ["rank"] max TORCH,
        "Free parts of split blocks in torch's allocator, which it cannot give back, as the process reports it.",
        "High beside a failed allocation means fragmentation.";
    CONTAINER_TORCH_ALLOCATED_PEAK = Gauge ContainerGpu "memledger_container_torch_allocated_peak_bytes" ["rank"] max TORCH,
        "Highest memory of tensors since the process started, by torch's own exact peak; absent if two processes share a rank.",
        "A program that resets torch's peaks does not reset this one. It begins again at the end of a search for a batch size (`memledger_client.batch_search()`).";
    CONTAINER_TORCH_RESERVED_PEAK = Gauge ContainerGpu "memledger_container_torch_reserved_peak_bytes" ["rank"] max TORCH,
        "Highest memory that torch's allocator held since the process started; absent if two processes share a rank.";
    CONTAINER_TORCH_OOMS = Counter ContainerGpu "memledger_container_torch_ooms_total" [] max 4_096, since Container,
        "Out-of-memory errors that torch's allocator raised in processes of the container, also those that the program survived.";
    CONTAINER_TORCH_RETRIES = Counter ContainerGpu "memledger_container_torch_alloc_retries_total" [] max 4_096, since Container,
        "Allocations of torch that succeeded only after it emptied its cache, in processes of the container.";
    CONTAINER_OPERATION_ALLOCATED = Gauge Container "memledger_container_operation_torch_allocated_bytes" ["component", "operation"] max OPERATIONS,
        "Memory of tensors when an operation of a component was last reported, over all GPUs of the process.",
        "With several ranks: of the one with the most, also in the other families by component and operation. Kept until the container ends.";
    CONTAINER_OPERATION_ALLOCATED_PEAK = Gauge Container "memledger_container_operation_torch_allocated_peak_bytes" ["component", "operation"] max OPERATIONS,
        "Highest memory of tensors within an operation of a component, when it was last reported.",
        "Absent where it is not exact: torch's peak did not rise within the operation.";
    CONTAINER_OPERATION_RESERVED = Gauge Container "memledger_container_operation_torch_reserved_bytes" ["component", "operation"] max OPERATIONS,
        "Memory that torch's allocator held when an operation of a component was last reported.";
    CONTAINER_OPERATION_RSS = Gauge Container "memledger_container_operation_rss_bytes" ["component", "operation"] max OPERATIONS,
        "Resident memory of the process when an operation of a component was last reported.";
    CONTAINER_STEPS = Counter Container "memledger_container_training_steps_total" ["rank"] max TORCH, since Container,
        "Training steps that processes of the container reported, by local rank.",
        "Each rank of a distributed training counts the same steps: take the maximum over `rank`, never the sum.";
    CONTAINER_SAMPLES = Counter Container "memledger_container_training_samples_total" ["rank"] max TORCH, since Container,
        "Training samples that processes of the container reported, by local rank; absent if the program does not count them.",
        "Each rank has samples of its own: sum them.";
    PROCESS_GPU_MEMORY = Gauge ContainerGpu "memledger_process_gpu_memory_used_bytes" ["pid", "process", "role"] max 256,
        "GPU memory of one process, from NVML's process lists or AMD's KFD; processes of the host have no container_name.",
        "See `memledger_container_gpu_memory_used_bytes`.";
    PROCESS_GPU_MEMORY_PEAK = Gauge ContainerGpu "memledger_process_gpu_memory_peak_bytes" ["pid", "process", "role"] max 256,
        "Highest memledger_process_gpu_memory_used_bytes of the process, sampled every --gpu.sample-interval.";
    PROCESS_GPU_MEMORY_RECENT_PEAK = Gauge ContainerGpu "memledger_process_gpu_memory_recent_peak_bytes" ["pid", "process", "role"] max 256,
        "Highest memledger_process_gpu_memory_used_bytes of the process in the last minute, sampled every --gpu.sample-interval.";
    PROCESS_GPU_UTILIZATION = Gauge ContainerGpu "memledger_process_gpu_utilization_ratio" ["pid", "process", "role"] max 256,
        "Share of the GPU's time in which a kernel of the process ran; absent where the driver does not report it, as in MIG mode.",
        "Source and absence are those of `memledger_container_gpu_utilization_ratio`.";
}

impl FamilyId {
    /// Returns all families with their rows, in the order of exposition.
    pub fn all() -> impl Iterator<Item = (FamilyId, &'static MetricDesc)> {
        IDS.iter().copied().zip(CATALOG)
    }

    /// Returns the family's row in the catalog.
    pub fn desc(self) -> &'static MetricDesc {
        &CATALOG[self as usize]
    }
}

/// The switches of the collectors, and what each reads.
pub static COLLECTORS: &[(&str, &str)] = &[
    ("collector.own", "memledger's own process: the process_* families."),
    ("collector.host", "Memory of the host."),
    ("collector.cgroup", "Memory of containers."),
    ("collector.process", "Processes of containers and their resident memory by role."),
    ("collector.shm", "/dev/shm of containers. Needs the process collector."),
    ("collector.pss", "Proportional set size by role. Needs the process collector."),
    ("collector.gpu", "GPUs, through NVML."),
    ("collector.amdgpu", "GPUs of AMD, through sysfs. Reads nothing on hosts without such a GPU."),
];

/// Suffixes of names that are units, and their UCUM names.
pub const UNITS: [(&str, &str); 6] = [
    ("_bytes", "By"),
    ("_seconds", "s"),
    ("_watts", "W"),
    ("_celsius", "Cel"),
    ("_joules", "J"),
    ("_hertz", "Hz"),
];

/// Units of counts, by the last word of the name without `_total`.
pub const COUNT_UNITS: [(&str, &str); 39] = [
    ("ratio", "1"), // stays in the name: receivers add no suffix for a unit of 1
    ("kills", "{kill}"),
    ("unattributed", "{kill}"),
    ("record", "{kill}"),
    ("lines", "{line}"),
    ("exits", "{exit}"),
    ("restarts", "{restart}"),
    ("errors", "{error}"),
    ("conflicts", "{reading}"),
    ("replays", "{replay}"),
    ("dropped", "{series}"),
    ("skipped", "{cycle}"),
    ("panics", "{panic}"),
    ("sent", "{item}"),
    ("lost", "{item}"),
    ("waiting", "{report}"),
    ("written", "{report}"),
    ("operations", "{operation}"),
    ("fds", "{file_descriptor}"),
    ("processes", "{process}"),
    ("containers", "{container}"),
    ("rows", "{row}"),
    ("pages", "{page}"),
    ("expected", "{gpu}"),
    ("visible", "{gpu}"),
    ("allocated", "{gpu}"),
    ("unmatched", "{gpu}"),
    ("claimed", "{device}"),
    ("refused", "{refusal}"),
    ("rejected", "{message}"),
    ("withheld", "{partition}"),
    ("connections", "{connection}"),
    ("ooms", "{error}"),
    ("retries", "{retry}"),
    ("steps", "{step}"),
    ("samples", "{sample}"),
    ("events", "{event}"),
    ("faults", "{fault}"),
    ("refaults", "{page}"),
];

/// Last words of names without a unit.
const STATES: [&str; 7] = ["success", "up", "exit_code", "pending", "failure", "info", "at_memory_limit"];

const fn ends_with(text: &str, end: &str) -> bool {
    let (text, end) = (text.as_bytes(), end.as_bytes());
    if text.len() < end.len() {
        return false;
    }
    let mut i = 0;
    while i < end.len() {
        if text[text.len() - end.len() + i] != end[i] {
            return false;
        }
        i += 1;
    }
    true
}

const fn check_row(row: &MetricDesc) {
    assert!(
        ends_with(row.name, "_total") == matches!(row.kind, MetricKind::Counter),
        "counters, and only they, end in _total"
    );
    assert!(
        ends_with(row.name, "_info") == matches!(row.kind, MetricKind::Info),
        "info families, and only they, end in _info"
    );
    let mut known = ends_with(row.name, "_total");
    let mut i = 0;
    while i < UNITS.len() {
        known = known || ends_with(row.name, UNITS[i].0);
        i += 1;
    }
    i = 0;
    while i < COUNT_UNITS.len() {
        known = known || ends_with(row.name, COUNT_UNITS[i].0);
        i += 1;
    }
    i = 0;
    while i < STATES.len() {
        known = known || ends_with(row.name, STATES[i]);
        i += 1;
    }
    assert!(known, "the name ends in a base unit or a known count");
    assert!(row.max_series > 0, "a family has a maximum number of series");
    assert!(!row.help.is_empty() && row.help.len() <= MAX_HELP, "the help text has 1 to MAX_HELP characters");
}

const _: () = {
    let mut i = 0;
    while i < ROWS.len() {
        check_row(&ROWS[i]);
        i += 1;
    }
};

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_are_unique_and_lowercase() {
        let mut seen = HashSet::new();
        for desc in CATALOG {
            assert!(seen.insert(desc.name), "{} is there twice", desc.name);
            assert!(
                desc.name.starts_with("memledger_") || desc.name.starts_with("process_"),
                "{}",
                desc.name
            );
            assert!(desc.name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_' || b.is_ascii_digit()));
        }
    }

    #[test]
    fn help_is_one_sentence_and_details_fit_in_a_table_cell() {
        for desc in CATALOG {
            let sentences = desc.help.matches(". ").count() + 1;
            assert!(sentences == 1 && desc.help.ends_with('.'), "{}: {}", desc.name, desc.help);
            let is_cell = !desc.details.contains(['|', '\n']);
            assert!(is_cell && (desc.details.is_empty() || desc.details.ends_with('.')), "{}", desc.name);
        }
    }

    #[test]
    fn labels_do_not_collide_with_those_of_scrape_targets() {
        let reserved =
            ["namespace", "pod", "container", "service", "node", "instance", "job", "type", "le", "quantile"];
        for desc in CATALOG {
            for label in desc.labels {
                assert!(!reserved.contains(label), "{} has {label}", desc.name);
                assert!(!desc.scope.labels().contains(label), "{} repeats {label}", desc.name);
            }
        }
    }
}
