//! Logs each kill twice, when it is noticed and when it is settled, and each container exit and GPU error once.
//!
//! What is settled is logged by a follower of the ledger, so only what is committed; after a crash the last lines are repeated.

use super::follow::{ReadBatch, Sink, WriteOutcome, read_events};
use super::store::{SettledEvents, StoreReader};
use crate::events::{
    ContainerRef, CudaOom, Exit, ExitReason, GpuError, Kill, KillOwner, LedgerEvent, OomScope, Role, Victim,
};

/// The log as the sink of a follower.
#[derive(Debug)]
pub struct LogSink;

impl Sink for LogSink {
    type Batch = SettledEvents;

    fn reader(&self) -> impl FnOnce(&StoreReader, u64) -> ReadBatch<SettledEvents> + Send + 'static {
        read_events
    }

    async fn write(&mut self, settled: SettledEvents) -> WriteOutcome {
        settled.events.iter().for_each(log_settled);
        WriteOutcome::All
    }
}

fn log_settled(event: &LedgerEvent) {
    match event {
        LedgerEvent::OomKill(kill) => log_settled_kill(kill),
        LedgerEvent::Exit(exit) => log_exit(exit),
        LedgerEvent::GpuError(error) => log_gpu_error(error),
        LedgerEvent::CudaOom(oom) => log_cuda_oom(oom),
    }
}

/// Logs a kill as soon as it is in the store, or cannot be written to it; more may become known.
pub fn log_noticed(kill: &Kill) {
    let owner = OwnerFields::of(kill);
    tracing::warn!(
        event = (kill.id > 0).then_some(kill.id),
        container_name = owner.name,
        container_id = owner.id,
        pid = kill.pid,
        process = &*kill.process,
        role = kill.role.map_or("", Role::label),
        scope = scope(kill.scope),
        victim = kill.victim.map(victim),
        anon_bytes = kill.anon_bytes,
        file_bytes = kill.file_bytes,
        shmem_bytes = kill.shmem_bytes,
        limit_bytes = kill.limit_bytes,
        limit_cgroup = &*kill.limit_cgroup,
        "process killed by the OOM killer"
    );
}

fn log_settled_kill(kill: &Kill) {
    let owner = OwnerFields::of(kill);
    tracing::info!(
        event = kill.id,
        owner = owner.kind,
        container_name = owner.name,
        container_id = owner.id,
        pid = kill.pid,
        victim = kill.victim.map(victim),
        method = kill.method.map(|method| method.to_string()).unwrap_or_default(),
        "OOM kill settled"
    );
}

fn log_gpu_error(error: &GpuError) {
    tracing::warn!(
        event = error.id,
        gpu = &*error.gpu,
        gpu_uuid = &*error.gpu_uuid,
        xid = error.xid,
        pid = error.pid,
        container_name = error.subject.as_ref().map(|subject| &*subject.identity.name),
        "GPU reported an error"
    );
}

fn log_cuda_oom(oom: &CudaOom) {
    tracing::warn!(
        event = oom.id,
        container_name = &*oom.subject.identity.name,
        container_id = &*oom.subject.container_id,
        pid = oom.pid,
        gpu = &*oom.gpu,
        tried_bytes = oom.tried_bytes,
        free_bytes = oom.free_bytes,
        total_bytes = oom.total_bytes,
        "program ran out of GPU memory"
    );
}

fn log_exit(exit: &Exit) {
    let reason = exit.reason.map_or("", ExitReason::label);
    let is_normal =
        matches!(exit.reason, Some(ExitReason::Completed | ExitReason::Stopped)) && exit.oom_kills == 0;
    let owner =
        OwnerFields { kind: "container", name: &exit.subject.identity.name, id: &exit.subject.container_id };
    if is_normal {
        tracing::info!(
            event = exit.id,
            container_name = owner.name,
            container_id = owner.id,
            reason,
            exit_code = exit.exit_code,
            "container exited"
        );
    } else {
        tracing::warn!(
            event = exit.id,
            container_name = owner.name,
            container_id = owner.id,
            reason,
            exit_code = exit.exit_code,
            oom_kills = exit.oom_kills,
            "container exited"
        );
    }
}

struct OwnerFields<'a> {
    kind: &'static str,
    name: &'a str,
    id: &'a str,
}

impl<'a> OwnerFields<'a> {
    fn of(kill: &'a Kill) -> Self {
        match &kill.owner {
            KillOwner::Container(ContainerRef { identity: name, container_id, .. }) => {
                Self { kind: "container", name: &name.name, id: container_id }
            }
            KillOwner::Pending => Self { kind: "pending", name: "", id: "" },
            KillOwner::Host => Self { kind: "host", name: "", id: "" },
            KillOwner::Unattributed => Self { kind: "unattributed", name: "", id: "" },
        }
    }
}

fn victim(victim: Victim) -> &'static str {
    match victim {
        Victim::Main => "main",
        Victim::Child => "child",
        Victim::Unknown => "unknown",
    }
}

fn scope(scope: OomScope) -> &'static str {
    match scope {
        OomScope::Container => "container",
        OomScope::Host => "host",
    }
}
