//! The diagnosis of memory or processes that the kernel refused, by its log alone.

use serde::Serialize;

use super::{Cause, Confidence, Diagnosis, Headline, Incident};
use crate::discover::RuntimeKind;
use crate::events::{ContainerRef, Identity};
use crate::parse::container_id;
use crate::parse::kernel_log::refusals::{KernelRefusal, RefusalKind};

/// Length of a container's id as engines print it.
const SHORT_ID: usize = 12;

/// What to change after a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "remedy", rename_all = "snake_case")]
pub enum RefusalRemedy {
    /// Raise the pids limit, or start fewer threads.
    RaisePidsLimit,
    /// Ask for less, or let the host commit more.
    SmallerRequest,
    /// Keep more contiguous pages free.
    KeepPagesFree,
    /// Keep more memory of the host free for the GPU's driver.
    FreeMemoryForDriver,
    /// The container's log has the reason of its abort().
    ReadLogOfAbort,
    /// Raise `memory.high`, or use less.
    RaiseMemoryHigh,
}

/// Returns the diagnosis of a refusal in a log from elsewhere.
pub fn explain_refusal(refusal: &KernelRefusal, now: f64) -> Diagnosis {
    let (cause, remedy) = match refusal.kind {
        RefusalKind::Fork => (Cause::ThreadsRefused, RefusalRemedy::RaisePidsLimit),
        RefusalKind::Overcommit { .. } => (Cause::AllocationFailed, RefusalRemedy::SmallerRequest),
        RefusalKind::Pages { .. } => (Cause::AllocationFailed, RefusalRemedy::KeepPagesFree),
        RefusalKind::Driver => (Cause::AllocationFailed, RefusalRemedy::FreeMemoryForDriver),
        RefusalKind::Abort => (Cause::CrashedSignal, RefusalRemedy::ReadLogOfAbort),
        RefusalKind::Throttled => (Cause::AtLimit, RefusalRemedy::RaiseMemoryHigh),
    };
    let confidence =
        if refusal.kind == RefusalKind::Abort { Confidence::Likely } else { Confidence::Certain };
    Diagnosis {
        subject: subject(refusal),
        headline: Some(Headline::Refusal(refusal.kind)),
        log_time: Some(refusal.stamp.clone()).filter(|stamp| !stamp.is_empty()),
        pid: refusal.pid,
        advice: vec![remedy.into()],
        ..Diagnosis::new(cause, confidence, Incident::Refusal(Box::new(refusal.clone())), now)
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
