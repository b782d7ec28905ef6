//! What limits the memory of well-known programs: the settings that their users know.

use crate::diagnose::{KnownProgram, PlanningProgram, ProgramFinding, ProgramRemedy};
use crate::parse::process::WorkerProgram;

/// Returns a fact of a known program in a sentence.
pub(super) fn finding(finding: &ProgramFinding) -> String {
    let ProgramFinding::SeesOnlyOwnLimit { program } = finding;
    let (name, setting) = match program {
        PlanningProgram::Dask => {
            ("Dask", "a worker's memory_limit (LocalCluster, dask worker --memory-limit) sets what it takes")
        }
        PlanningProgram::Ray => ("Ray", "ray.init(_memory=, object_store_memory=) sets what it plans with"),
    };
    format!("{name} sees no limit but that of its own container, and not this one: {setting}.")
}

/// Returns what to change of a known program.
pub(super) fn remedy(remedy: &ProgramRemedy) -> String {
    match remedy {
        ProgramRemedy::LimitProgram { program } => limits(*program).to_owned(),
        ProgramRemedy::FewerWorkersOfProgram { program } => format!("{}.", fewer_workers(Some(*program))),
    }
}

fn limits(program: KnownProgram) -> &'static str {
    match program {
        KnownProgram::Vllm => {
            "vLLM: host memory holds the weights while they load, and --swap-space and --cpu-offload-gb; smaller ones, or a safetensors model, which is mapped."
        }
        KnownProgram::LlamaCpp => {
            "llama.cpp and ollama: a smaller context (-c, num_ctx) or more layers on the GPU (-ngl, num_gpu); --no-mmap needs the whole model in memory."
        }
        KnownProgram::Postgres => {
            "PostgreSQL: shared_buffers, work_mem (for each sort of each connection) and max_connections."
        }
        KnownProgram::Mysql => "MySQL: innodb_buffer_pool_size, and max_connections times its buffers.",
        KnownProgram::Mongodb => {
            "MongoDB: --wiredTigerCacheSizeGB, which is half of the host's memory if it does not see the limit."
        }
        KnownProgram::Redis => "Redis: maxmemory with a policy; a save forks, and may need as much again.",
        KnownProgram::Clickhouse => "ClickHouse: max_server_memory_usage, max_memory_usage of a query.",
        KnownProgram::Java => {
            "Java: -Xmx or -XX:MaxRAMPercentage (Spark: spark.driver.memory or --driver-memory, spark.executor.memory), and beyond the heap threads, metaspace and direct buffers (-XX:MaxDirectMemorySize)."
        }
        KnownProgram::VirtualMachine => {
            "A virtual machine takes the RAM of its guest, and some hundred MiB more for QEMU itself: the limit must exceed both (KubeVirt: \
             resources.limits.memory above domain.memory.guest)."
        }
        KnownProgram::Node => "Node.js: --max-old-space-size.",
        KnownProgram::Prometheus => {
            "Prometheus: fewer series (metric_relabel_configs), and queries of less at once."
        }
    }
}

/// Returns how fewer workers of a program are set; of another program, as Python's own libraries have it.
pub(super) fn fewer_workers(program: Option<WorkerProgram>) -> &'static str {
    match program {
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
    }
}
