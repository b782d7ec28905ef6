//! The one table of metric families.
//!
//! Prometheus exposition, the JSON of the API, `docs/metrics.md` and (later) OTLP and the dashboard lint are views of it.
//! What can be wrong in a row does not compile: a counter without `_total`, a name without a base unit, a wrong number
//! of label values.
//!
//! Not here: values. A family is written by exactly one collector, or by `attribute`, `ledger` or `cycle`.

use std::marker::PhantomData;

/// What kind of number a family holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Goes up and down.
    Gauge,
    /// Only grows while memledger runs.
    Counter,
    /// A gauge with value 1 whose labels are the message.
    Info,
}

/// What a family's series belong to, and so which labels all of them carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// memledger itself or the host: no labels in common.
    Global,
    /// One container.
    Container,
    /// One GPU, or one MIG instance of a GPU: then the instance ids are not empty, and `gpu` and `gpu_uuid` are its GPU's.
    Gpu,
    /// One container on one GPU or MIG instance.
    ContainerGpu,
}

impl Scope {
    /// The labels that every series of this scope carries; empty ones are left out on the wire.
    pub const fn labels(self) -> &'static [&'static str] {
        match self {
            Scope::Global => &[],
            Scope::Container => &["k8s_namespace_name", "k8s_pod_name", "container_name"],
            Scope::Gpu => &["gpu", "gpu_uuid", "gpu_instance_id", "compute_instance_id"],
            Scope::ContainerGpu => &[
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

/// A scope as a type, so that a family can be written only for the right subject.
pub trait IsScope {
    /// The same as a value.
    const SCOPE: Scope;
}

/// [`Scope::Global`] as a type.
#[derive(Clone, Copy, Debug)]
pub struct Global;
/// [`Scope::Container`] as a type.
#[derive(Clone, Copy, Debug)]
pub struct Container;
/// [`Scope::Gpu`] as a type.
#[derive(Clone, Copy, Debug)]
pub struct Gpu;
/// [`Scope::ContainerGpu`] as a type.
#[derive(Clone, Copy, Debug)]
pub struct ContainerGpu;

impl IsScope for Global {
    const SCOPE: Scope = Scope::Global;
}
impl IsScope for Container {
    const SCOPE: Scope = Scope::Container;
}
impl IsScope for Gpu {
    const SCOPE: Scope = Scope::Gpu;
}
impl IsScope for ContainerGpu {
    const SCOPE: Scope = Scope::ContainerGpu;
}

/// One row of the catalog.
#[derive(Clone, Copy, Debug)]
pub struct Def {
    /// The name on the wire.
    pub name: &'static str,
    /// Gauge, counter or info.
    pub kind: Kind,
    /// What a series belongs to.
    pub scope: Scope,
    /// The labels besides those of the scope.
    pub labels: &'static [&'static str],
    /// The most series this family may have; the excess is dropped and counted.
    pub max_series: usize,
    /// One line for people: what it is, where it comes from, when it is absent.
    pub help: &'static str,
}

/// A handle to write one family: its scope and its number of labels are part of the type.
#[derive(Clone, Copy, Debug)]
pub struct Family<S, const N: usize> {
    /// Which row of the catalog.
    pub id: Id,
    scope: PhantomData<S>,
}

/// Families of containers stop here: 2,000 containers with the widest partition.
const CONTAINERS: usize = 2_500;
const PER_COMPONENT: usize = CONTAINERS * 5;
const PER_ROLE: usize = CONTAINERS * 3;
/// Sixteen GPUs with seven MIG instances each.
const GPUS: usize = 128;

macro_rules! catalog {
    ($($id:ident = $kind:ident $scope:ident $name:literal [$($label:literal),*] max $max:expr, $help:literal;)*) => {
        /// Number of a family: its row in [`CATALOG`].
        #[allow(non_camel_case_types, clippy::upper_case_acronyms, missing_docs)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u16)]
        pub enum Id { $($id),* }

        const IDS: [Id; ROWS.len()] = [$(Id::$id),*];

        /// All families, in the order in which they are exposed.
        pub static CATALOG: &[Def] = &ROWS;

        const ROWS: [Def; [$($name),*].len()] = [$(Def {
            name: $name, kind: Kind::$kind, scope: Scope::$scope, labels: &[$($label),*], max_series: $max, help: $help,
        }),*];

        $(
            #[doc = concat!("`", $name, "`: ", $help)]
            pub const $id: Family<$scope, { let labels: &[&str] = &[$($label),*]; labels.len() }> =
                Family { id: Id::$id, scope: PhantomData };
        )*
    };
}

catalog! {
    BUILD_INFO = Info Global "memledger_build_info" ["version", "revision", "rustversion"] max 1,
        "Version of memledger, revision it was built from, and version of the Rust compiler.";
    COLLECTOR_SUCCESS = Gauge Global "memledger_collector_success" ["collector"] max 32,
        "1 if the source could be read in the last cycle. 0 if not, though it is configured, was there before, or its device node exists. Absent where the host never had it, and for gpu while memledger lets go of the driver. gpu_attribution: 1 if the pids that the GPU driver names are this host's, 0 if they are not or that is not proven; all GPU memory is then unattributed. drm_attribution: the same for GPUs of DRM drivers, and 0 too where memledger may not look at most processes.";
    COLLECTOR_DURATION = Gauge Global "memledger_collector_duration_seconds" ["collector"] max 32,
        "Time of the last read of the source. gpu, drm and pss are read by threads of their own, outside the cycle; pss: of one container.";
    READ_FAULTS = Counter Global "memledger_read_faults_total" ["collector", "reason"] max 128,
        "Readings that failed although the thing was there. A container or process that ended between two reads is no fault.";
    SERIES_DROPPED = Counter Global "memledger_series_dropped_total" ["family"] max 128,
        "Series left out of snapshots because their family was over its cap, counted once per cycle and series. Absent until the first.";
    SNAPSHOT_TIMESTAMP = Gauge Global "memledger_snapshot_timestamp_seconds" [] max 1,
        "Unix time when the newest cycle was finished. It stands still when sampling hangs.";
    CYCLE_DURATION = Gauge Global "memledger_cycle_duration_seconds" [] max 1,
        "Time the newest cycle took, from start to finished snapshot.";
    CYCLES_SKIPPED = Counter Global "memledger_cycles_skipped_total" [] max 1,
        "Cycles left out because the one before was still running at their time.";
    WEB_CONFIG_SUCCESS = Gauge Global "memledger_web_config_success" [] max 1,
        "1 if --web.config.file, as it stands now, is in use with all the files that it names. 0 if it was changed and cannot be used: the last good one goes on. Absent without one.";
    WEB_REFUSED = Counter Global "memledger_web_refused_total" ["reason"] max 8,
        "What the HTTP side turned away. connections and requests: more than --web.max-connections or --web.max-requests; handshake: no TLS came about; password: none, or a wrong one; password_queue: too many waited to be checked; rate: more often than rate_limit of --web.config.file allows.";
    SOURCE_UP = Gauge Global "memledger_runtime_up" ["runtime"] max 8,
        "1 while memledger is connected to the container runtime's socket. 0 while it is away: names and labels are kept. Absent where there never was a socket. cri is the kubelet's runtime: 0 too where a named socket is not there; absent where nobody named one and it has no pods.";
    CONTAINERS_SEEN = Gauge Global "memledger_containers" ["runtime"] max 8,
        "Running containers that memledger shows, by runtime. Containers that a filter leaves out do not count.";
    PROCESS_CPU = Counter Global "process_cpu_seconds_total" [] max 1,
        "CPU time of memledger itself, user and system, from /proc/self/stat.";
    PROCESS_RESIDENT = Gauge Global "process_resident_memory_bytes" [] max 1,
        "Resident memory of memledger itself, from /proc/self/stat.";
    PROCESS_VIRTUAL = Gauge Global "process_virtual_memory_bytes" [] max 1,
        "Virtual memory of memledger itself, from /proc/self/stat.";
    PROCESS_OPEN_FDS = Gauge Global "process_open_fds" [] max 1,
        "Open file descriptors of memledger itself. It keeps the files of every container open.";
    PROCESS_MAX_FDS = Gauge Global "process_max_fds" [] max 1,
        "Limit of open file descriptors of memledger itself.";
    PROCESS_START_TIME = Gauge Global "process_start_time_seconds" [] max 1,
        "Unix time when memledger was started.";

    HOST_MEMORY_TOTAL = Gauge Global "memledger_host_memory_total_bytes" [] max 1,
        "MemTotal of /proc/meminfo: what the kernel manages.";
    HOST_MEMORY_AVAILABLE = Gauge Global "memledger_host_memory_available_bytes" [] max 1,
        "MemAvailable of /proc/meminfo: the kernel's estimate of what could be had without swapping.";
    HOST_MEMORY_COMPONENT = Gauge Global "memledger_host_memory_component_bytes" ["component"] max 8,
        "Partition of the host's memory; the components sum to memledger_host_memory_total_bytes. containers and processes: anonymous and shared memory inside and outside the containers that memledger shows, both absent where the memory of a container could not be read; page_cache: Cached + Buffers - Shmem; kernel_reclaimable: KReclaimable; kernel: SUnreclaim, PageTables, SecPageTables, KernelStack, Percpu; hugetlb; free; unaccounted: the rest, such as pages that drivers allocated.";
    HOST_SWAP_TOTAL = Gauge Global "memledger_host_swap_total_bytes" [] max 1,
        "SwapTotal of /proc/meminfo.";
    HOST_SWAP_USED = Gauge Global "memledger_host_swap_used_bytes" [] max 1,
        "SwapTotal - SwapFree of /proc/meminfo.";
    HOST_SHM_USED = Gauge Global "memledger_host_shm_used_bytes" [] max 1,
        "Used bytes of the host's /dev/shm, from statfs. Absent if it is no tmpfs or cannot be seen from here.";
    HOST_SHM_SIZE = Gauge Global "memledger_host_shm_size_bytes" [] max 1,
        "Size of the host's /dev/shm, from statfs. Absent if it is no tmpfs or cannot be seen from here.";
    HOST_PRESSURE = Counter Global "memledger_host_memory_pressure_seconds_total" ["kind"] max 2,
        "Time that some or all (full) tasks of the host waited for memory, from /proc/pressure/memory. Absent without PSI.";

    HOST_OOM_KILLS = Counter Global "memledger_host_oom_kills_total" [] max 1,
        "Processes that the kernel's OOM killer killed on this host since the ledger's first start. Never disappears. The sum of what is counted for containers (those that a filter leaves out included), for host processes and as unattributed, once each kill is settled, which takes at most 15 s.";
    HOST_PROCESS_OOM_KILLS = Counter Global "memledger_host_process_oom_kills_total" [] max 1,
        "Of memledger_host_oom_kills_total, processes outside containers.";
    OOM_UNATTRIBUTED = Counter Global "memledger_oom_kills_unattributed_total" [] max 1,
        "Of memledger_host_oom_kills_total, kills that no evidence ties to a container or a host process. Counted 10 s after the kill.";
    OOM_GAPS = Counter Global "memledger_oom_gaps_total" [] max 1,
        "Of memledger_host_oom_kills_total, kills known only from a counter of the kernel: their record in the kernel log was lost, or the log cannot be read. Counted when the kill is settled.";
    OOM_DUPLICATE_LINES = Counter Global "memledger_oom_duplicate_lines_total" [] max 1,
        "Second records of one kill, which the kernel writes and counts with memory.oom.group. They are no kills.";
    OOM_SOURCE_UP = Gauge Global "memledger_oom_source_up" ["source"] max 4,
        "1 if the source can be read now: kmsg (the kernel log: which process), vmstat (oom_kill of /proc/vmstat: how many), cgroup (the containers' own counters: whose), runtime (Docker, Podman or the kubelet's runtime: ends and names). Without kmsg kills have no process, and those of containers that are gone at once may stay unattributed. Absent for what was switched off (--oom.kernel-log=off, --oom.runtime=false), and for runtime where there never was one.";
    STORE_UP = Gauge Global "memledger_store_up" [] max 1,
        "1 if the ledger is written to --state.path, 0 if it cannot be and is kept in memory only. Absent if it is kept in memory because that was asked for.";

    OTLP_UP = Gauge Global "memledger_otlp_up" ["signal"] max 2,
        "1 if the newest push over OTLP was taken as a whole, 0 if it was not, by signal: metrics, logs. Absent without an endpoint and before the first push.";
    OTLP_SENT = Counter Global "memledger_otlp_sent_total" ["signal"] max 2,
        "Data points (signal metrics) and log records (signal logs) that the endpoint has taken, since memledger's start. Absent without an endpoint.";
    OTLP_LOST = Counter Global "memledger_otlp_lost_total" ["signal", "reason"] max 8,
        "Data points and log records that were given up, since memledger's start, by reason: unreachable (no answer, or a wish to come later, until newer ones took their place; log records wait instead), refused (the endpoint would not have them), too_large (one alone is larger than a request may be), unreadable (an event that is damaged in the ledger). Absent without an endpoint.";

    CONTAINER_INFO = Info Container "memledger_container_info"
        ["container_id", "image", "runtime", "compose_project", "compose_service", "cgroup_version"] max CONTAINERS,
        "What is known of a container. Kept for --container.keep-ended after its end; a running container of the same name takes its place.";
    CONTAINER_RUN_INFO = Info Container "memledger_container_run_info" ["run"] max CONTAINERS,
        "One run of a container: short id and start time, and a label for each variable of --container.settings that its environment sets (batch_size, num_workers, ...). Kept as long as memledger_container_info.";
    CONTAINER_POD_INFO = Info Container "memledger_container_pod_info"
        ["k8s_pod_uid", "attempt", "qos_class", "pod_source"] max CONTAINERS,
        "The pod of a container, as the kubelet's container runtime (CRI) tells it. attempt: restarts of the container in this pod before this one. qos_class: guaranteed, burstable or besteffort, by the path of its cgroup. pod_source: api, or file or http for a static pod. And a label for each of --cri.pod-labels and --cri.pod-annotations that the pod has. Kept as long as memledger_container_info.";
    CONTAINER_START_TIME = Gauge Container "memledger_container_start_time_seconds" [] max CONTAINERS,
        "Unix time of the container's last start, from the runtime; without one, the start of its oldest process.";
    CONTAINER_MEMORY_USAGE = Gauge Container "memledger_container_memory_usage_bytes" [] max CONTAINERS,
        "All memory charged to the container, page cache included: memory.current (cgroup v2) or memory.usage_in_bytes (v1).";
    CONTAINER_MEMORY_WORKING_SET = Gauge Container "memledger_container_memory_working_set_bytes" [] max CONTAINERS,
        "Usage less inactive file cache, not below 0: what docker stats shows as MEM USAGE.";
    CONTAINER_MEMORY_RSS = Gauge Container "memledger_container_memory_rss_bytes" [] max CONTAINERS,
        "Anonymous memory: anon (v2) or total_rss (v1) of memory.stat.";
    CONTAINER_MEMORY_UNRECLAIMABLE = Gauge Container "memledger_container_memory_unreclaimable_bytes" [] max CONTAINERS,
        "What the kernel cannot drop: v2 anon + shmem + (kernel - slab_reclaimable) + sock; v1 total_rss + total_shmem + memory.kmem.usage_in_bytes, where reclaimable slab cannot be told apart. Rank and alert on this.";
    CONTAINER_MEMORY_UNRECLAIMABLE_PEAK = Gauge Container "memledger_container_memory_unreclaimable_peak_bytes" [] max CONTAINERS,
        "Highest sample of memledger_container_memory_unreclaimable_bytes since the container's start, or since memledger's if that was later. Kept as long as memledger_container_info.";
    CONTAINER_MEMORY_COMPONENT = Gauge Container "memledger_container_memory_component_bytes" ["component"] max PER_COMPONENT,
        "Partition of the container's usage: anon, file (page cache without shared memory), shmem, kernel, other (the rest). The components sum to memledger_container_memory_usage_bytes.";
    CONTAINER_MEMORY_LIMIT = Gauge Container "memledger_container_memory_limit_bytes" [] max CONTAINERS,
        "The container's own limit: memory.max (v2) or memory.limit_in_bytes (v1). Absent when unlimited.";
    CONTAINER_MEMORY_REQUEST = Gauge Container "memledger_container_memory_request_bytes" [] max CONTAINERS,
        "Memory request of a container in a pod, where the node knows it: in a guaranteed pod it is the limit; else it is memory.min, which the kubelet sets with its feature MemoryQoS. Absent for the others: only the API server knows theirs.";
    CONTAINER_MEMORY_EFFECTIVE_LIMIT = Gauge Container "memledger_container_memory_effective_limit_bytes" [] max CONTAINERS,
        "The lowest limit on the container's path to the root of the cgroup tree. Absent when unlimited.";
    CONTAINER_MEMORY_HEADROOM = Gauge Container "memledger_container_memory_headroom_bytes" [] max CONTAINERS,
        "Least of (limit - unreclaimable) over the levels of the container's path that have a limit. Who has the least is next. Absent when unlimited.";
    CONTAINER_MEMORY_PEAK = Gauge Container "memledger_container_memory_peak_bytes" [] max CONTAINERS,
        "Highest usage since the container's start, page cache included: memory.peak (v2 since 5.19) or memory.max_usage_in_bytes (v1); on other kernels our highest sample. Kept as long as memledger_container_info.";
    CONTAINER_MEMORY_SWAP = Gauge Container "memledger_container_memory_swap_bytes" [] max CONTAINERS,
        "Swap held: memory.swap.current (v2) or total_swap of memory.stat (v1). Absent without swap accounting.";
    CONTAINER_PRESSURE = Counter Container "memledger_container_memory_pressure_seconds_total" ["kind"] max CONTAINERS * 2,
        "Time that some or all (full) tasks of the container waited for memory, from memory.pressure. cgroup v2 with PSI only.";
    CONTAINER_SHM_USED = Gauge Container "memledger_container_shm_used_bytes" [] max CONTAINERS,
        "Used bytes of the container's own /dev/shm, read at most every 5 s. Needs CAP_SYS_PTRACE. Absent if it is no tmpfs or is the host's.";
    CONTAINER_SHM_SIZE = Gauge Container "memledger_container_shm_size_bytes" [] max CONTAINERS,
        "Size of the container's own /dev/shm (Docker's default of 64 MiB is what kills DataLoaders), read at most every 5 s. Needs CAP_SYS_PTRACE and Linux 5.12.";
    CONTAINER_PROCESS_RSS = Gauge Container "memledger_container_process_rss_bytes" ["role"] max PER_ROLE,
        "Resident memory of the container's processes by role, from /proc/PID/statm. Forked processes count shared pages again: never sum it or take shares of it, use memledger_container_process_pss_bytes.";
    CONTAINER_PROCESS_PSS = Gauge Container "memledger_container_process_pss_bytes" ["role"] max PER_ROLE,
        "Proportional share of the processes' memory by role, which adds up, from /proc/PID/smaps_rollup. Read at most every --pss.interval and cached until the next reading, up to ten minutes while the container or the host is about to run out of memory and is left alone; absent for a role of which a process is younger than the last reading. Needs CAP_SYS_PTRACE.";
    CONTAINER_PROCESSES = Gauge Container "memledger_container_processes" ["role"] max PER_ROLE,
        "Processes of the container by role: trainer, dataloader_worker, other.";
    CONTAINER_OOM_KILLS = Counter Container "memledger_container_oom_kills_total" ["victim", "scope"] max CONTAINERS * 4,
        "Processes of the container that the kernel's OOM killer killed. victim: main if the kill ended the container (its first process, or a child whose death made it end with that status within 5 s), else child. scope: container if the limit of a cgroup was hit, host if the machine ran out. Born at 0; goes on over restarts of the container and of memledger. A child's kill is counted when it is known that the container lives on, up to 5 s later.";
    CONTAINER_LAST_OOM_KILL = Gauge Container "memledger_container_last_oom_kill_timestamp_seconds" [] max CONTAINERS,
        "Unix time of the last OOM kill of a process of the container. Absent until the first.";
    CONTAINER_EXITS = Counter Container "memledger_container_exits_total" ["reason"] max CONTAINERS * 8,
        "Ends of the container by reason: completed (exit 0), oom_container, oom_host, stopped (somebody asked the runtime), killed (SIGKILL from outside, no OOM), signal, error (another exit code), unknown (nobody tells). An OOM only by the ledger's own evidence, never by exit code 137 or the runtime's flag.";
    CONTAINER_LAST_EXIT_CODE = Gauge Container "memledger_container_last_exit_code" [] max CONTAINERS,
        "Exit code of the container's last end, as the runtime told it. Absent until one was told.";
    CONTAINER_RESTARTS = Counter Container "memledger_container_restarts_total" [] max CONTAINERS,
        "Starts of a container of this name after the first that the ledger saw. Unlike the runtime's count it goes on when the container is made anew.";

    CONTAINER_GPU_XIDS = Counter Container "memledger_container_gpu_xid_errors_total" ["gpu", "gpu_uuid", "xid"] max CONTAINERS * 4,
        "Xids of a GPU (see memledger_gpu_xid_errors_total) for which the kernel log names a process that was on a GPU at most a minute before and in the container. 13, 31, 43, 45 and 94 are born at 0 on each GPU that the container uses. Goes on over restarts of the container, not of memledger. Needs the kernel log. Kept as long as the container is shown, and remembered for an hour after that.";
    CONTAINER_GPU_LAST_XID = Gauge Container "memledger_container_gpu_last_xid_timestamp_seconds" ["gpu", "gpu_uuid", "xid"] max CONTAINERS * 4,
        "Unix time of the last of memledger_container_gpu_xid_errors_total. Absent until the first.";

    GPU_INFO = Info Gpu "memledger_gpu_info"
        ["model", "vendor", "driver_version", "cuda_version", "compute_capability", "cuda_cores", "pci_bus_id", "mig_uuid"] max GPUS,
        "What is known of a GPU, or of a MIG instance, which has a mig_uuid.";
    GPUS_EXPECTED = Gauge Global "memledger_gpus_expected" ["source"] max 2,
        "GPUs that should be there, by source: nvml (--gpu.expected, else the most that the driver counted since memledger's start), drm (the most cards of DRM drivers since then). MIG instances do not count. Absent where no GPU was ever seen.";
    GPUS_VISIBLE = Gauge Global "memledger_gpus_visible" ["source"] max 2,
        "GPUs that answer now, by source: nvml, drm. MIG instances do not count. Absent while the source does not answer.";
    GPU_RELEASED = Gauge Global "memledger_gpu_release_remaining_seconds" [] max 1,
        "How long memledger still leaves the GPU driver alone, as was asked for by SIGUSR1 or POST /-/release-gpu. Absent otherwise.";
    GPU_MEMORY_TOTAL = Gauge Gpu "memledger_gpu_memory_total_bytes" [] max GPUS,
        "Memory of the GPU, from NVML memory info or amdgpu's sysfs; other DRM drivers do not tell it. A GPU in MIG mode and its instances are both shown: add up those without gpu_instance_id, or those with one, never both; compute instances of one GPU instance share its memory. Absent on unified memory.";
    GPU_MEMORY_USED = Gauge Gpu "memledger_gpu_memory_used_bytes" [] max GPUS,
        "Used memory of the GPU without what the driver tells as reserved, from NVML memory info or amdgpu's sysfs. NVIDIA's drivers without its second version count what is reserved as used. MIG: see memledger_gpu_memory_total_bytes.";
    GPU_MEMORY_FREE = Gauge Gpu "memledger_gpu_memory_free_bytes" [] max GPUS,
        "Free memory of the GPU, from NVML memory info; of amdgpu, total less used. MIG: see memledger_gpu_memory_total_bytes.";
    GPU_MEMORY_RESERVED = Gauge Gpu "memledger_gpu_memory_reserved_bytes" [] max GPUS,
        "Memory that the driver and firmware keep for themselves, from NVML memory info v2. Absent where the driver does not tell it; it is then a part of used, and unattributed. MIG: see memledger_gpu_memory_total_bytes.";
    GPU_MEMORY_UNATTRIBUTED = Gauge Gpu "memledger_gpu_memory_unattributed_bytes" [] max GPUS,
        "Used memory of the GPU less memledger_container_gpu_memory_used_bytes and memledger_gpu_host_processes_memory_bytes; of a GPU in MIG mode, less those of all its instances. Where the driver does not tell the memory of one of a container's processes, all of the container's is here. Never guessed away, never below 0.";
    GPU_MEMORY_PEAK = Gauge Gpu "memledger_gpu_memory_peak_bytes" [] max GPUS,
        "Highest sample of memledger_gpu_memory_used_bytes since memledger's start, sampled every --gpu.sample-interval.";
    GPU_MEMORY_RECENT_PEAK = Gauge Gpu "memledger_gpu_memory_recent_peak_bytes" [] max GPUS,
        "Highest sample of memledger_gpu_memory_used_bytes in the last minute, sampled every --gpu.sample-interval.";
    GPU_BOOKS_RACES = Counter Gpu "memledger_gpu_books_races_total" [] max GPUS,
        "Readings whose processes held more than the device's used memory even when read again twice.";
    GPU_HOST_PROCESSES = Gauge Gpu "memledger_gpu_host_processes_memory_bytes" [] max GPUS,
        "GPU memory of processes outside the containers that memledger shows. On a GPU in MIG mode with its instances only. Absent where a process of the host does not tell its memory, or pids are not believed.";
    GPU_UTILIZATION = Gauge Gpu "memledger_gpu_utilization_ratio" [] max GPUS,
        "Share of the driver's last sample period in which a kernel ran, from NVML utilization rates. It says nothing of how much of the GPU the kernel used. Of DRM drivers: what amdgpu's firmware tells, else the share of the time between two readings that the busiest engine worked. Absent in MIG mode.";
    GPU_MEMORY_UTILIZATION = Gauge Gpu "memledger_gpu_memory_utilization_ratio" [] max GPUS,
        "Share of the driver's last sample period in which device memory was read or written. Not how full it is. Absent in MIG mode.";
    GPU_POWER = Gauge Gpu "memledger_gpu_power_watts" [] max GPUS,
        "Power that the board draws, from NVML.";
    GPU_ENERGY = Counter Gpu "memledger_gpu_energy_joules_total" [] max GPUS,
        "Energy since the driver was loaded, from NVML.";
    GPU_TEMPERATURE = Gauge Gpu "memledger_gpu_temperature_celsius" [] max GPUS,
        "Temperature of the die, from NVML.";
    GPU_THROTTLE = Counter Gpu "memledger_gpu_throttle_seconds_total" ["reason"] max GPUS * 6,
        "Time under a reason that lowers clocks: sw_power_cap, hw_slowdown, sync_boost, sw_thermal, hw_thermal, hw_power_brake. Measured by samples: a reason that holds in a reading counts for the time since the reading before, and for no more than --gpu.interval and --gpu.deadline together. Since memledger's start.";
    GPU_ECC_ERRORS = Counter Gpu "memledger_gpu_ecc_errors_total" ["kind"] max GPUS * 2,
        "ECC errors over the device's life, corrected and uncorrected, from NVML's aggregate counters. Absent without ECC.";
    GPU_REMAPPED_ROWS = Gauge Gpu "memledger_gpu_remapped_rows" ["kind"] max GPUS * 4,
        "Rows of memory that were remapped: correctable, uncorrectable; and 1 if one is pending (until a reset), 1 if a remapping failed (failure). Ampere and later.";
    GPU_RETIRED_PAGES = Gauge Gpu "memledger_gpu_retired_pages" ["kind"] max GPUS * 3,
        "Pages of memory that were retired: single_bit, double_bit; and 1 if one is pending (until a reboot). Before Ampere.";
    GPU_PCIE_REPLAYS = Counter Gpu "memledger_gpu_pcie_replays_total" [] max GPUS,
        "Replays on the PCIe link since the driver was loaded, from NVML.";
    GPU_NVLINK_ERRORS = Counter Gpu "memledger_gpu_nvlink_errors_total" ["kind"] max GPUS * 5,
        "Errors over all NVLinks of the GPU by kind: crc_flit, crc_data, replay, recovery, ecc_data. Absent without NVLink, and for kinds that the driver does not tell.";
    GPU_XID_ERRORS = Counter Gpu "memledger_gpu_xid_errors_total" ["xid"] max GPUS * 32,
        "Xids, errors that the driver reports of a GPU, since memledger's start, from NVML events. 13, 31, 43, 45, 48, 63, 64, 74, 79, 94, 95 and 119 are born at 0. When several come within --gpu.sample-interval, NVML calls all of them by the newest one's number.";
    GPU_LAST_XID = Gauge Gpu "memledger_gpu_last_xid_timestamp_seconds" ["xid"] max GPUS * 32,
        "Unix time of the last Xid of this number. Absent until the first since memledger's start.";
    CONTAINER_GPU_MEMORY = Gauge ContainerGpu "memledger_container_gpu_memory_used_bytes" [] max 4_096,
        "GPU memory of the container's processes, from NVML's process lists, or from fdinfo of DRM drivers: resident memory on the device, each client and each shared buffer once; where the GPU has no memory of its own, what it uses of the host's. What a MIG instance holds stands with the instance, not with its GPU too: this adds up.";
    CONTAINER_GPU_MEMORY_PEAK = Gauge ContainerGpu "memledger_container_gpu_memory_peak_bytes" [] max 4_096,
        "Highest memledger_container_gpu_memory_used_bytes since the container's start, or since memledger's if that was later: the most that its processes held at one time, sampled every --gpu.sample-interval, and at least the driver's own maximum of each of them where accounting mode is on. Outlives the processes; kept as long as memledger_container_info.";
    CONTAINER_GPU_MEMORY_RECENT_PEAK = Gauge ContainerGpu "memledger_container_gpu_memory_recent_peak_bytes" [] max 4_096,
        "Highest memledger_container_gpu_memory_used_bytes in the last minute, sampled every --gpu.sample-interval.";
    CONTAINER_GPU_PROCESSES = Gauge ContainerGpu "memledger_container_gpu_processes" [] max 4_096,
        "Processes of the container that hold a context on the GPU.";
    CONTAINER_GPU_UTILIZATION = Gauge ContainerGpu "memledger_container_gpu_utilization_ratio" [] max 4_096,
        "Share of the GPU's time in which a kernel of the container ran, the sum over its processes, each the mean of NVML's own samples of it since the reading before. A process without samples was idle. Of DRM drivers: the share of the busiest engine; absent for processes that hold /dev/kfd, whose work is not told. Absent where the driver gives none, as in MIG mode.";
    CONTAINER_GPU_ALLOCATED = Gauge ContainerGpu "memledger_container_gpu_allocated" [] max 4_096,
        "1 for each GPU or MIG instance that was given to the container, whether it uses it or not: by the kubelet, from its pod-resources socket (resources nvidia.com/...), or by Docker, from the container's device requests (--gpus). Absent where neither tells, as with NVIDIA_VISIBLE_DEVICES, and for a GPU that no driver tells of.";
    PROCESS_GPU_MEMORY = Gauge ContainerGpu "memledger_process_gpu_memory_used_bytes" ["pid", "process", "role"] max 256,
        "GPU memory of one process, from NVML's process lists or fdinfo of DRM drivers: see memledger_container_gpu_memory_used_bytes. Processes of the host have no container_name.";
    PROCESS_GPU_MEMORY_PEAK = Gauge ContainerGpu "memledger_process_gpu_memory_peak_bytes" ["pid", "process", "role"] max 256,
        "Highest memledger_process_gpu_memory_used_bytes of the process, sampled every --gpu.sample-interval; where accounting mode is on, the driver's own exact maximum.";
    PROCESS_GPU_MEMORY_RECENT_PEAK = Gauge ContainerGpu "memledger_process_gpu_memory_recent_peak_bytes" ["pid", "process", "role"] max 256,
        "Highest memledger_process_gpu_memory_used_bytes of the process in the last minute, sampled every --gpu.sample-interval.";
    PROCESS_GPU_UTILIZATION = Gauge ContainerGpu "memledger_process_gpu_utilization_ratio" ["pid", "process", "role"] max 256,
        "Share of the GPU's time in which a kernel of the process ran. Source and absence as of memledger_container_gpu_utilization_ratio.";
}

impl Id {
    /// All families with their rows, in the order in which they are exposed.
    pub fn all() -> impl Iterator<Item = (Id, &'static Def)> {
        IDS.iter().copied().zip(CATALOG)
    }

    /// The row of the catalog.
    pub fn def(self) -> &'static Def {
        &CATALOG[self as usize]
    }
}

/// Endings that say what a number is: a base unit, a count of things, a point in time.
const ENDINGS: [&str; 18] = [
    "_bytes",
    "_seconds",
    "_ratio",
    "_watts",
    "_celsius",
    "_joules",
    "_total",
    "_info",
    "_success",
    "_up",
    "_fds",
    "_processes",
    "_allocated",
    "_containers",
    "_expected",
    "_exit_code",
    "_rows",
    "_pages",
];

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

const fn check_row(row: &Def) {
    assert!(
        ends_with(row.name, "_total") == matches!(row.kind, Kind::Counter),
        "counters, and only they, end in _total"
    );
    assert!(
        ends_with(row.name, "_info") == matches!(row.kind, Kind::Info),
        "info families, and only they, end in _info"
    );
    let (mut known, mut i) = (ends_with(row.name, "_visible"), 0);
    while i < ENDINGS.len() {
        known = known || ends_with(row.name, ENDINGS[i]);
        i += 1;
    }
    assert!(known, "the name ends in a base unit or a known count");
    assert!(row.max_series > 0 && !row.help.is_empty(), "a family declares its cap and its help");
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
    fn no_family_stands_twice_and_all_names_are_plain() {
        let mut seen = HashSet::new();
        for def in CATALOG {
            assert!(seen.insert(def.name), "{} stands twice", def.name);
            assert!(def.name.starts_with("memledger_") || def.name.starts_with("process_"), "{}", def.name);
            assert!(def.name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_' || b.is_ascii_digit()));
            assert!(def.help.ends_with('.'), "{}: help is a sentence", def.name);
        }
    }

    #[test]
    fn labels_never_clash_with_those_of_a_scrape_target() {
        let reserved =
            ["namespace", "pod", "container", "service", "node", "instance", "job", "type", "le", "quantile"];
        for def in CATALOG {
            for label in def.labels {
                assert!(!reserved.contains(label), "{} has {label}", def.name);
                assert!(!def.scope.labels().contains(label), "{} repeats {label}", def.name);
            }
        }
    }
}
