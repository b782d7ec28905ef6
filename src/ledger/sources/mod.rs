//! What only the ledger reads: the kernel log, and the counters of OOM kills.

pub mod cgroup_namespace;
pub mod cgroup_oom_events;
pub mod kernel_log;
pub mod vmstat_oom;
