//! CPU time of a process by thread, for the benches.
//!
//! In a directory, because Cargo treats every file beside it as a bench.

use std::collections::BTreeMap;

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
