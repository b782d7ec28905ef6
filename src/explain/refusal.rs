//! The verdict on memory or processes that the kernel refused, by its log alone.

use super::text::name;
use super::{Cause, Confidence, Verdict};
use crate::discover::RuntimeKind;
use crate::events::{ContainerRef, Identity};
use crate::parse::container_id;
use crate::parse::kernel_log::refusals::{KernelRefusal, RefusalKind};
use crate::text::bytes;

/// Length of a container's id as engines print it.
const SHORT_ID: usize = 12;

/// Returns the verdict on a refusal in a log from elsewhere.
pub fn explain_refusal(refusal: &KernelRefusal, now: f64) -> Verdict {
    let (cause, headline) = match refusal.kind {
        RefusalKind::Fork => (Cause::ThreadsRefused, None),
        RefusalKind::Overcommit { .. } => (Cause::AllocationFailed, None),
        RefusalKind::Pages { .. } => (Cause::AllocationFailed, Some("MEMORY WAS REFUSED: contiguous pages")),
        RefusalKind::Driver => (Cause::AllocationFailed, Some("MEMORY WAS REFUSED to NVIDIA's driver")),
        RefusalKind::Abort => (Cause::CrashedSignal, Some("CRASHED by its own abort()")),
        RefusalKind::Throttled => {
            (Cause::AtLimit, Some("AT ITS MEMORY LIMIT: a task waits in memory.high, and nothing was killed"))
        }
    };
    Verdict {
        subject: subject(refusal),
        headline: headline.map(str::to_owned),
        cause,
        confidence: if refusal.kind == RefusalKind::Abort { Confidence::Likely } else { Confidence::Certain },
        exit_reason: None,
        ended: None,
        exit_code: None,
        at: None,
        log_time: Some(refusal.stamp.clone()).filter(|stamp| !stamp.is_empty()),
        requested_at: now,
        what: what(refusal),
        also: vec![],
        evidence: vec![],
        pid: refusal.pid,
        report: None,
        held: None,
        advice: vec![advice(refusal.kind).to_owned()],
    }
}

fn subject(refusal: &KernelRefusal) -> Option<ContainerRef> {
    let id = Some(&*refusal.container_id).filter(|id| !id.is_empty())?;
    let runtime = container_id::in_path(&refusal.cgroup).next().map(|found| found.runtime);
    Some(ContainerRef {
        identity: Identity { name: id.get(..SHORT_ID).unwrap_or(id).into(), ..Identity::default() },
        container_id: id.into(),
        runtime: runtime.filter(|runtime| *runtime != RuntimeKind::Unknown).unwrap_or_default(),
        ..ContainerRef::default()
    })
}

/// Says what was refused to whom.
fn what(refusal: &KernelRefusal) -> String {
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
            super::text::path(&refusal.cgroup)
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

fn advice(kind: RefusalKind) -> &'static str {
    match kind {
        RefusalKind::Fork => {
            "A higher pids limit (docker run --pids-limit, Compose pids_limit; Kubernetes: podPidsLimit of the kubelet; systemd: TasksMax=), or fewer \
             threads: OMP_NUM_THREADS, OPENBLAS_NUM_THREADS, NUM_WORKERS."
        }
        RefusalKind::Overcommit { .. } => {
            "A smaller request (often a batch or an array of a wrong shape), more RAM or swap, or another vm.overcommit_memory: with 2 the sum of all \
             mappings is bounded (vm.overcommit_ratio)."
        }
        RefusalKind::Pages { .. } => {
            "A larger vm.min_free_kbytes keeps contiguous pages; the driver or network device that asked may have a setting for smaller ones."
        }
        RefusalKind::Driver => {
            "More free memory of the host: a smaller model or less pinned memory; where the GPU shares the host's memory, a smaller share of it \
             (vLLM: --gpu-memory-utilization)."
        }
        RefusalKind::Abort => {
            "Read the last lines of the container's log: memledger why NAME --logs, or docker logs."
        }
        RefusalKind::Throttled => {
            "Raise memory.high of its cgroup (systemd: MemoryHigh=; Kubernetes sets it with the feature MemoryQoS), or use less there: a limit without \
             throttling (memory.max) ends in a kill, and this does not."
        }
    }
}
