//! What is said of memory and processes that the kernel refused.

use super::terms::{name, path};
use crate::diagnose::RefusalRemedy;
use crate::parse::kernel_log::refusals::{KernelRefusal, RefusalKind};
use crate::text::bytes;

/// Returns the headline, where that of the cause does not say all.
pub(super) fn headline(kind: &RefusalKind) -> Option<&'static str> {
    match kind {
        RefusalKind::Fork | RefusalKind::Overcommit { .. } => None,
        RefusalKind::Pages { .. } => Some("MEMORY WAS REFUSED: contiguous pages"),
        RefusalKind::Driver => Some("MEMORY WAS REFUSED to NVIDIA's driver"),
        RefusalKind::Abort => Some("CRASHED by its own abort()"),
        RefusalKind::Throttled => {
            Some("AT ITS MEMORY LIMIT: a task waits in memory.high, and nothing was killed")
        }
    }
}

/// Says what was refused to whom.
pub(super) fn incident(refusal: &KernelRefusal) -> String {
    let when = match &*refusal.stamp {
        "" => "At an unknown time".to_owned(),
        stamp if stamp.parse::<f64>().is_ok() => format!("{stamp} s after the host's start"),
        stamp => format!("At {}", name(stamp)),
    };
    let who = match (refusal.process.is_empty(), refusal.pid) {
        (true, _) => "a program".to_owned(),
        (false, None) => name(&refusal.process),
        (false, Some(pid)) => format!("{} (pid {pid})", name(&refusal.process)),
    };
    let times = match refusal.count {
        1 => String::new(),
        count => format!(" It was logged {count} times in a row."),
    };
    let what = match refusal.kind {
        RefusalKind::Fork if refusal.container_id.is_empty() => format!(
            "a process or thread was refused in {}, whose pids limit was reached: memory was not the reason",
            path(&refusal.cgroup)
        ),
        RefusalKind::Fork => "a process or thread was refused in this container, whose pids limit was reached: memory was not the reason".to_owned(),
        RefusalKind::Overcommit { bytes: Some(size) } => {
            format!("the kernel refused {} to {who}: more than RAM and swap can hold, or than the host may commit", bytes(size))
        }
        RefusalKind::Overcommit { bytes: None } => {
            format!("the kernel refused memory to {who}: more than RAM and swap can hold, or than the host may commit")
        }
        RefusalKind::Pages { order } => format!(
            "a request of {who} for 2^{order} contiguous pages failed: memory that was free was in pieces, or reserved. It was not the OOM killer"
        ),
        RefusalKind::Driver => "NVIDIA's driver was refused memory of the host (NV_ERR_NO_MEMORY)".to_owned(),
        RefusalKind::Abort => format!(
            "{who} faulted inside libc: most often that is abort() of the first process of a container, which its log explains, and no wild pointer"
        ),
        RefusalKind::Throttled => {
            format!("{who} has hung for minutes in the throttling of memory.high: its cgroup is above that limit, and the kernel slows it down")
        }
    };
    format!("{when} {what}.{times}")
}

/// Returns the sentence of a remedy.
pub(super) fn remedy(remedy: &RefusalRemedy) -> String {
    let text = match remedy {
        RefusalRemedy::RaisePidsLimit => {
            "A higher pids limit (docker run --pids-limit, Compose pids_limit; Kubernetes: podPidsLimit of the kubelet; systemd: TasksMax=), or fewer \
             threads: OMP_NUM_THREADS, OPENBLAS_NUM_THREADS, NUM_WORKERS."
        }
        RefusalRemedy::SmallerRequest => {
            "A smaller request (often a batch or an array of a wrong shape), more RAM or swap, or another vm.overcommit_memory: with 2 the sum of all \
             mappings is bounded (vm.overcommit_ratio)."
        }
        RefusalRemedy::KeepPagesFree => {
            "A larger vm.min_free_kbytes keeps contiguous pages; the driver or network device that asked may have a setting for smaller ones."
        }
        RefusalRemedy::FreeMemoryForDriver => {
            "More free memory of the host: a smaller model or less pinned memory; where the GPU shares the host's memory, a smaller share of it \
             (vLLM: --gpu-memory-utilization)."
        }
        RefusalRemedy::ReadLogOfAbort => {
            "Read the last lines of the container's log: memledger why NAME --logs, or docker logs."
        }
        RefusalRemedy::RaiseMemoryHigh => {
            "Raise memory.high of its cgroup (systemd: MemoryHigh=; Kubernetes sets it with the feature MemoryQoS), or use less there: a limit without \
             throttling (memory.max) ends in a kill, and this does not."
        }
    };
    text.to_owned()
}
