//! What limits the memory of well-known programs, by the name of the process: the settings that their users know.

use super::RunSummary;
use super::limit::limit_of;
use crate::events::{Kill, KillOwner, OomScope, Role};
use crate::parse::process::WorkerProgram;
use crate::runs::hit_limit::LimitPosition;

/// Names of the processes of virtual machines.
const VIRTUAL_MACHINES: &[&str] = &["qemu-system-*", "qemu-kvm", "kvm"];

/// Names, or beginnings of names before a `*`, and what limits the program's memory. The kernel cuts names after 15 bytes.
const PROGRAMS: [(&[&str], &str); 11] = [
    (
        &["VLLM::*", "vllm"],
        "vLLM: host memory holds the weights while they load, and --swap-space and --cpu-offload-gb; smaller ones, or a safetensors model, which is mapped.",
    ),
    (
        &["llama-*", "ollama*"],
        "llama.cpp and ollama: a smaller context (-c, num_ctx) or more layers on the GPU (-ngl, num_gpu); --no-mmap needs the whole model in memory.",
    ),
    (
        &["postgres"],
        "PostgreSQL: shared_buffers, work_mem (for each sort of each connection) and max_connections.",
    ),
    (&["mysqld", "mariadbd"], "MySQL: innodb_buffer_pool_size, and max_connections times its buffers."),
    (
        &["mongod"],
        "MongoDB: --wiredTigerCacheSizeGB, which is half of the host's memory if it does not see the limit.",
    ),
    (
        &["redis-server", "valkey-server"],
        "Redis: maxmemory with a policy; a save forks, and may need as much again.",
    ),
    (&["clickhouse*"], "ClickHouse: max_server_memory_usage, max_memory_usage of a query."),
    (
        &["java"],
        "Java: -Xmx or -XX:MaxRAMPercentage (Spark: spark.driver.memory or --driver-memory, spark.executor.memory), and beyond the heap threads, metaspace and direct buffers (-XX:MaxDirectMemorySize).",
    ),
    (
        VIRTUAL_MACHINES,
        "A virtual machine takes the RAM of its guest, and some hundred MiB more for QEMU itself: the limit must exceed both (KubeVirt: \
         resources.limits.memory above domain.memory.guest).",
    ),
    (&["node"], "Node.js: --max-old-space-size."),
    (&["prometheus"], "Prometheus: fewer series (metric_relabel_configs), and queries of less at once."),
];

/// Names of processes, or their beginnings, and the program whose workers they are.
const WORKERS: [(&str, WorkerProgram); 5] = [
    ("celery", WorkerProgram::Celery),
    ("dask", WorkerProgram::Dask),
    ("gunicorn", WorkerProgram::Gunicorn),
    ("ray::", WorkerProgram::Ray),
    ("uvicorn", WorkerProgram::Uvicorn),
];

/// Returns how fewer workers of a program are set, by its name in events; of another program, as Python's own libraries have it.
pub(super) fn fewer_workers(program: &str) -> String {
    let text = match WorkerProgram::of_name(program) {
        Some(WorkerProgram::Celery) => {
            "Fewer Celery workers (-c, --concurrency; --max-memory-per-child replaces one that grows)"
        }
        Some(WorkerProgram::Dask) => {
            "Fewer Dask workers (n_workers, --nworkers; each writes to disk before its memory_limit)"
        }
        Some(WorkerProgram::Gunicorn) => {
            "Fewer gunicorn workers (-w, --workers; --max-requests replaces one that grows)"
        }
        Some(WorkerProgram::Joblib) => {
            "Fewer jobs (n_jobs= of joblib and scikit-learn; pre_dispatch= bounds what waits)"
        }
        Some(WorkerProgram::Ray) => "Fewer Ray tasks at once (num_cpus= or memory= of a task or an actor)",
        Some(WorkerProgram::Spark) => {
            "Fewer Spark tasks at once (spark.executor.cores; spark.executor.pyspark.memory limits Python's)"
        }
        Some(WorkerProgram::Uvicorn) => {
            "Fewer uvicorn workers (--workers; --limit-max-requests replaces one that grows)"
        }
        None => {
            "Fewer worker processes (processes= of multiprocessing.Pool, max_workers= of ProcessPoolExecutor)"
        }
    };
    text.to_owned()
}

/// Says of programs that see no limit but that of their own container that they do not see the one that was reached, where it is known to be
/// another one. docs/deaths.md has what each reads.
pub(super) fn believed<'a>(kill: &'a Kill, run: &RunSummary<'a>) -> Option<String> {
    // the limit of a run is that of a cgroup without a container
    let unseen = if run.subject.is_run() { LimitPosition::Own } else { LimitPosition::Above };
    let is_of_container = matches!(kill.owner, KillOwner::Container(_));
    if kill.scope == OomScope::Host || !is_of_container || limit_of(kill, run) != unseen {
        return None;
    }
    let by_name =
        || WORKERS.iter().find(|(begin, _)| kill.process.starts_with(begin)).map(|(_, program)| *program);
    let (name, setting) = match WorkerProgram::of_name(&kill.program).or_else(by_name)? {
        WorkerProgram::Dask => {
            ("Dask", "a worker's memory_limit (LocalCluster, dask worker --memory-limit) sets what it takes")
        }
        WorkerProgram::Ray => ("Ray", "ray.init(_memory=, object_store_memory=) sets what it plans with"),
        _ => return None,
    };
    Some(format!("{name} sees no limit but that of its own container, and not this one: {setting}."))
}

fn is_it(name: &str, pattern: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(begin) => name.starts_with(begin),
        None => name == pattern,
    }
}

/// Returns whether a process is a virtual machine, whose memory is its guest's.
pub(super) fn is_virtual_machine(process: &str) -> bool {
    VIRTUAL_MACHINES.iter().any(|pattern| is_it(process, pattern))
}

/// Returns the advice for the program that was killed, or that held most; `None` for other programs, such as trainings.
pub(super) fn advice(kill: &Kill) -> Option<String> {
    let largest = kill.report.as_ref().and_then(|report| report.processes.first());
    // where the host ran out, the victim need not be what filled it
    let victim = Some(&*kill.process).filter(|_| kill.scope == OomScope::Container);
    let names = [victim, largest.map(|row| row.process.as_str())];
    let known = |name: &str| {
        PROGRAMS.iter().find(|(patterns, _)| patterns.iter().any(|pattern| is_it(name, pattern)))
    };
    // a limit is no remedy where the host ran out
    let is_of_limit = |name: &&str| kill.scope == OomScope::Container || !is_virtual_machine(name);
    let settings = names
        .into_iter()
        .flatten()
        .filter(is_of_limit)
        .find_map(known)
        .map(|(_, advice)| (*advice).to_owned());
    // where its role is known, its workers are advised on with their number and size
    let worker = |name: &str| WORKERS.iter().find(|(begin, _)| name.starts_with(begin));
    let workers = names.into_iter().flatten().find_map(worker).filter(|_| kill.role != Some(Role::Worker));
    settings.or_else(|| workers.map(|(_, program)| format!("{}.", fewer_workers(program.name()))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{ContainerRef, LedgerEvent, RuntimeKind, Victim};
    use crate::explain::explain;

    #[test]
    fn ray_and_dask_see_the_limit_of_their_own_container_alone() {
        let id = "a".repeat(64);
        let told = |limit: &str, runtime, program: &str, process: &str| {
            let subject =
                ContainerRef { container_id: id.as_str().into(), runtime, ..ContainerRef::default() };
            let kill = Kill {
                owner: KillOwner::Container(subject),
                victim: Some(Victim::Child),
                scope: OomScope::Container,
                limit_cgroup: limit.into(),
                cgroup: format!("/docker/{id}").into(),
                program: program.into(),
                process: process.into(),
                ..Kill::unknown()
            };
            explain(&[LedgerEvent::OomKill(kill)], 9.0).expect("a verdict").also.join(" ")
        };
        let (own, inside, above) = (format!("/docker/{id}"), format!("/docker/{id}/inner"), "/batch");
        let docker = RuntimeKind::Docker;
        assert!(told(above, docker, "ray", "").contains("Ray sees no limit but that of its own container"));
        assert!(told(above, docker, "", "dask worker").contains("memory_limit"));
        assert!(told(&own, RuntimeKind::Run, "dask", "").contains("Dask sees no limit"));
        for (limit, program) in [(&*own, "ray"), (&*inside, "ray"), (above, "celery"), (above, "")] {
            let also = told(limit, docker, program, "python3");
            assert!(!also.contains("sees no limit"), "{limit} {program}: {also}");
        }
    }
}
