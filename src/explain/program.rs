//! What limits the memory of well-known programs, by the name of the process: the settings that their users know.

use crate::events::{Kill, OomScope};

/// Names, or beginnings of names before a `*`, and what limits the program's memory. The kernel cuts names after 15 bytes.
const PROGRAMS: [(&[&str], &str); 10] = [
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
        "Java: -Xmx or -XX:MaxRAMPercentage, and beyond the heap threads, metaspace and direct buffers (-XX:MaxDirectMemorySize).",
    ),
    (&["node"], "Node.js: --max-old-space-size."),
    (&["prometheus"], "Prometheus: fewer series (metric_relabel_configs), and queries of less at once."),
];

/// Returns the advice for the program that was killed, or that held most; `None` for other programs, such as trainings.
pub(super) fn advice(kill: &Kill) -> Option<String> {
    let largest = kill.report.as_ref().and_then(|report| report.processes.first());
    // where the host ran out, the victim need not be what filled it
    let victim = Some(&*kill.process).filter(|_| kill.scope == OomScope::Container);
    let names = [victim, largest.map(|row| row.process.as_str())];
    let is_it = |name: &str, pattern: &str| match pattern.strip_suffix('*') {
        Some(begin) => name.starts_with(begin),
        None => name == pattern,
    };
    let known = |name: &str| {
        PROGRAMS.iter().find(|(patterns, _)| patterns.iter().any(|pattern| is_it(name, pattern)))
    };
    names.into_iter().flatten().find_map(known).map(|(_, advice)| (*advice).to_owned())
}
