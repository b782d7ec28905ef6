//! What is said of errors in a container's log.

use super::Noun;
use super::terms::time;
use crate::diagnose::{LogFinding, LogRemedy};
use crate::parse::log_error::{HostError, HostErrorText, MemoryMonitor, ProgramLimit, RefusedMemory};
use crate::text::bytes;

/// Returns the line about a fact of the log.
pub(super) fn finding(finding: &LogFinding, noun: Noun) -> String {
    match finding {
        LogFinding::NoLoggedError { read_bytes } => {
            format!("The last {} of its log have no out-of-memory error that is known.", bytes(*read_bytes))
        }
        LogFinding::ErrorOfOtherEnd { at, line } => {
            format!("The last out-of-memory error in its log is of {}, not of this end: {line:?}", time(*at))
        }
        LogFinding::ErrorBeforeStart { at, line } => {
            format!("The last out-of-memory error in its log is of {}, before its start: {line:?}", time(*at))
        }
        LogFinding::LoggedCudaError { at, is_last } => {
            let last = if *is_last { ", the last out-of-memory error in it" } else { "" };
            format!("Its log has an error of GPU memory at {}{last}.", time(*at))
        }
        LogFinding::LoggedError { error: HostErrorText { error, asked_bytes }, last_at } => {
            let asked = asked_bytes.map(|asked| format!(" It asked for {}.", bytes(asked)));
            let last =
                last_at.map(|at| format!(" It is of {}, the last out-of-memory error in the log.", time(at)));
            format!("{}{}{}", error_text(*error, noun), asked.unwrap_or_default(), last.unwrap_or_default())
        }
        LogFinding::ReplacedContainer => {
            "Its log does not exist any more: a newer container has its name.".to_owned()
        }
        LogFinding::UnreadableLog { reason } => format!("Its log could not be read: {reason}."),
    }
}

/// Returns what to do about an error in the log.
pub(super) fn remedy(remedy: &LogRemedy, noun: Noun) -> String {
    match remedy {
        LogRemedy::ReadLog { container } => format!(
            "memledger why {container} --logs looks there for errors of GPU memory (CUDA), of shared memory and of allocations; unasked memledger reads no log."
        ),
        LogRemedy::FixLoggedError { error } => fix_logged_error(*error, noun),
    }
}

/// Returns the headline of an error, where the title of its cause does not say all.
pub(super) fn headline(error: HostError) -> Option<&'static str> {
    Some(match error {
        HostError::Shm | HostError::Refused(_) | HostError::Threads => return None,
        HostError::OwnLimit(ProgramLimit::Node) => "ITS OWN LIMIT was reached (the heap of Node.js)",
        HostError::OwnLimit(ProgramLimit::Java) => "ITS OWN LIMIT was reached (the memory of the JVM)",
        HostError::OwnLimit(ProgramLimit::DuckDb) => "ITS OWN LIMIT was reached (memory_limit of DuckDB)",
        HostError::OwnLimit(ProgramLimit::ClickHouse) => {
            "ITS OWN LIMIT was reached (max_memory_usage of ClickHouse)"
        }
        HostError::OwnLimit(ProgramLimit::Redis) => "THE LIMIT OF A REDIS was reached (maxmemory)",
        HostError::OwnLimit(ProgramLimit::DotNet) => "ITS OWN LIMIT was reached (the heap of .NET)",
        HostError::OwnLimit(ProgramLimit::R) => "ITS OWN LIMIT was reached (mem.maxVSize of R)",
        HostError::OwnLimit(ProgramLimit::Php) => "ITS OWN LIMIT was reached (memory_limit of PHP)",
        HostError::Monitor(MemoryMonitor::Ray) => "KILLED by Ray: a worker, and the program then ended",
        HostError::Monitor(MemoryMonitor::Dask) => {
            "KILLED by dask's nanny: a worker, and the program then ended"
        }
    })
}

/// Returns what is said of an error.
fn error_text(error: HostError, noun: Noun) -> String {
    let the = noun.the();
    let text = match error {
        HostError::Shm => {
            "Its log has an error that is typical of a full /dev/shm: a write to a full one raises SIGBUS."
        }
        HostError::Refused(RefusedMemory::Any) => {
            "Its log has an allocation of host memory that failed: no kill of this run is recorded."
        }
        HostError::Refused(RefusedMemory::Pinned) => {
            "Its log has an error of GPU memory where memory of the host is pinned: most often that was refused, and not the GPU's."
        }
        HostError::Refused(RefusedMemory::Shared) => {
            "Its log has memory that was refused which the CPU and the GPU share: what programs hold, and page cache that is in use, is not there for \
             the GPU."
        }
        HostError::Refused(RefusedMemory::BeforeStart) => {
            "Its log says that the program compared what it needs with the memory that is free, and did not begin: nothing was killed."
        }
        HostError::OwnLimit(limit) => return own_limit_text(limit, the),
        HostError::Threads => {
            "Its log has a thread or a process that was refused: not memory, but their number, or room for their stacks."
        }
        HostError::Monitor(MemoryMonitor::Ray) => {
            "Its log has a worker that Ray's memory monitor killed: it acts before the kernel does, at RAY_memory_usage_threshold (0.95) of \
             the memory."
        }
        HostError::Monitor(MemoryMonitor::Dask) => {
            return format!(
                "Its log has a worker that dask's nanny killed: it acts at 95 % of the worker's memory_limit \
                 (distributed.worker.memory.terminate), whatever {the} has left."
            );
        }
    };
    text.to_owned()
}

/// Returns what is said of a limit of a program's own; `the`: the container.
fn own_limit_text(limit: ProgramLimit, the: &str) -> String {
    let what = match limit {
        ProgramLimit::Node => {
            return format!(
                "Its log says that the heap of Node.js was full: that limit is the program's, and {the} may have had room."
            );
        }
        ProgramLimit::Java => {
            return format!(
                "Its log says that the heap of Java, or another part of the JVM's memory, was full: that limit is the program's, and {the} may have \
                 had room."
            );
        }
        ProgramLimit::DuckDb => "DuckDB reached its memory_limit",
        ProgramLimit::ClickHouse => "ClickHouse reached a memory limit of its own",
        ProgramLimit::Redis => {
            return "Its log says that a Redis which it uses reached its maxmemory: that is often another container."
                .to_owned();
        }
        ProgramLimit::DotNet => {
            return "Its log says that the heap of .NET was full: in a container that is three quarters of its limit by default."
                .to_owned();
        }
        ProgramLimit::R => "R reached its limit of vectors",
        ProgramLimit::Php => "PHP reached its memory_limit",
    };
    format!("Its log says that {what}: {the} may have had room.")
}

/// Returns what to try against an error.
fn fix_logged_error(error: HostError, noun: Noun) -> String {
    let the = noun.the();
    let text = match error {
        HostError::Shm => {
            "A larger --shm-size (Compose shm_size; Kubernetes: an emptyDir of medium Memory on /dev/shm), or fewer NUM_WORKERS, or \
             torch.multiprocessing.set_sharing_strategy('file_system')."
        }
        HostError::Refused(RefusedMemory::Any) => {
            "What refuses memory in place of a kill: ulimit -v, -d or -l; vm.overcommit_memory=2 on the host; vm.max_map_count, the number of \
             mappings; or a request that is larger than RAM and swap together (a batch or an array of a wrong shape)."
        }
        HostError::Refused(RefusedMemory::Pinned) => {
            return format!(
                "Pinned memory counts against {the}'s limit and ulimit -l (docker run --ulimit memlock=-1): less of it (pin_memory=False, smaller \
                 offload buffers), or a higher limit."
            );
        }
        HostError::Refused(RefusedMemory::Shared) => {
            return format!(
                "A smaller model or batch, fewer other programs, or swap for them; a limit on {the} does not bound the GPU's part."
            );
        }
        HostError::Refused(RefusedMemory::BeforeStart) => {
            "A smaller model, quantisation or context, fewer other programs on the host, or more memory or swap."
        }
        HostError::OwnLimit(limit) => return own_limit_remedy(limit, the),
        HostError::Threads => {
            "What refuses them: the pids limit (docker run --pids-limit, Compose pids_limit; Kubernetes: podPidsLimit of the kubelet), \
             ulimit -u of the user, which counts all containers of that user, and ulimit -v. Fewer threads: OMP_NUM_THREADS, OPENBLAS_NUM_THREADS, \
             NUM_WORKERS."
        }
        HostError::Monitor(MemoryMonitor::Ray) => {
            "Fewer tasks at once (num_cpus or memory= of a task), more memory, or another threshold: RAY_memory_usage_threshold; \
             RAY_memory_monitor_refresh_ms=0 switches the monitor off, and the kernel kills then."
        }
        HostError::Monitor(MemoryMonitor::Dask) => {
            "Smaller partitions or fewer threads in each worker, or a higher memory_limit of a worker (LocalCluster, dask worker --memory-limit): \
             by default it is the memory of the host, or what dask sees of a limit, divided by the workers."
        }
    };
    text.to_owned()
}

/// Returns how a limit of a program's own is raised; `the`: the container.
fn own_limit_remedy(limit: ProgramLimit, the: &str) -> String {
    let text = match limit {
        ProgramLimit::Node => {
            return format!(
                "A larger heap: --max-old-space-size=MiB (NODE_OPTIONS; of a Worker: resourceLimits), below {the}'s limit; or less data in it."
            );
        }
        ProgramLimit::Java => {
            return format!(
                "A larger one: -Xmx or -XX:MaxRAMPercentage (a quarter of {the}'s limit by default), -XX:MaxMetaspaceSize, \
                 -XX:MaxDirectMemorySize; Spark: spark.driver.memory, spark.executor.memory. Below {the}'s limit, with room for the rest."
            );
        }
        ProgramLimit::DuckDb => {
            "SET memory_limit='...GB' (80 % of the memory that it sees by default), a temp_directory to spill to, or fewer threads."
        }
        ProgramLimit::ClickHouse => {
            "max_memory_usage of a query, max_server_memory_usage of the server; or less at once (max_bytes_before_external_group_by spills)."
        }
        ProgramLimit::Redis => "A higher maxmemory of that Redis, or a maxmemory-policy that evicts.",
        ProgramLimit::DotNet => {
            return format!(
                "DOTNET_GCHeapHardLimitPercent or DOTNET_GCHeapHardLimit, a higher limit of {the}, or less data in the heap."
            );
        }
        ProgramLimit::R => "A higher mem.maxVSize() or R_MAX_VSIZE, or less data at once.",
        ProgramLimit::Php => {
            "A higher memory_limit (php.ini, php -d memory_limit=...), or less data at once."
        }
    };
    text.to_owned()
}
