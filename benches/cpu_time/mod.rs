//! CPU time of processes and of their threads, for the benches.
//!
//! In a directory, because Cargo treats every file beside it as a bench.
#![allow(dead_code)] // each bench uses a part

use std::collections::BTreeMap;

/// What belongs to a Docker engine, by the name of the process.
const DAEMONS: [&str; 3] = ["dockerd", "containerd", "containerd-shim"];

/// Returns the CPU time of each thread of a process in milliseconds, by name; those with the same name are added.
pub fn by_thread_ms(pid: u32) -> BTreeMap<String, f64> {
    let mut times = BTreeMap::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let read = |name: &str| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let nanos = read("schedstat").split(' ').next().and_then(|nanos| nanos.parse::<f64>().ok());
        *times.entry(read("comm").trim().to_owned()).or_insert(0.0) += nanos.unwrap_or(0.0) / 1e6;
    }
    times
}

/// Returns the CPU time of a process with its ended threads, in seconds, from `/proc/PID/stat`.
pub fn process_seconds(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks: f64 =
        after_name.split_whitespace().skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum();
    ticks / 100.0 // USER_HZ of the kernel's ABI
}

/// Returns the CPU time of the engine's daemons in seconds.
pub fn daemons_seconds() -> f64 {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let is_daemon = |pid: &u32| {
        let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        DAEMONS.iter().any(|daemon| comm.trim().starts_with(daemon))
    };
    pids.filter(is_daemon).map(process_seconds).sum()
}
