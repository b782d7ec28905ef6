//! One line in the log for each kill, when it is noticed; and one when it is known whose it was, and for each end.

use super::entries::{Event, Exit, GpuError, Kill, Reason, Scope, Subject, Victim, Whose};
use super::machine::Said;

/// Says it.
pub fn say(said: &Said) {
    match said {
        Said::Killed(Event::OomKill(kill)) => killed(kill),
        Said::Settled(Event::OomKill(kill)) => settled(kill),
        Said::Killed(Event::Exit(exit)) | Said::Settled(Event::Exit(exit)) => ended(exit),
        Said::Killed(Event::GpuError(error)) | Said::Settled(Event::GpuError(error)) => failed(error),
    }
}

fn killed(kill: &Kill) {
    let who = Who::of(kill);
    tracing::warn!(
        event = kill.id,
        container_name = who.name,
        container_id = who.id,
        pid = kill.pid,
        process = &*kill.process,
        role = &*kill.role,
        scope = scope(kill.scope),
        victim = kill.victim.map(victim),
        anon_bytes = kill.anon_bytes,
        file_bytes = kill.file_bytes,
        shmem_bytes = kill.shmem_bytes,
        limit_bytes = kill.limit_bytes,
        limit_cgroup = &*kill.limit_cgroup,
        "a process was killed for memory"
    );
}

fn settled(kill: &Kill) {
    let who = Who::of(kill);
    tracing::info!(
        event = kill.id,
        whose = who.whose,
        container_name = who.name,
        container_id = who.id,
        pid = kill.pid,
        victim = kill.victim.map(victim),
        method = &*kill.method,
        "a kill was attributed"
    );
}

fn failed(error: &GpuError) {
    tracing::warn!(
        event = error.id,
        gpu = &*error.gpu,
        gpu_uuid = &*error.gpu_uuid,
        xid = error.xid,
        pid = error.pid,
        container_name = error.subject.as_ref().map(|subject| &*subject.name.container_name),
        "a GPU reported an error"
    );
}

fn ended(exit: &Exit) {
    let reason = exit.reason.map_or("", Reason::label);
    let quiet = matches!(exit.reason, Some(Reason::Completed | Reason::Stopped));
    let who =
        Who { whose: "container", name: &exit.subject.name.container_name, id: &exit.subject.container_id };
    if quiet {
        tracing::info!(
            event = exit.id,
            container_name = who.name,
            container_id = who.id,
            reason,
            exit_code = exit.exit_code,
            "a container ended"
        );
    } else {
        tracing::warn!(
            event = exit.id,
            container_name = who.name,
            container_id = who.id,
            reason,
            exit_code = exit.exit_code,
            oom_kills = exit.oom_kills,
            "a container ended"
        );
    }
}

struct Who<'a> {
    whose: &'static str,
    name: &'a str,
    id: &'a str,
}

impl<'a> Who<'a> {
    fn of(kill: &'a Kill) -> Self {
        match &kill.whose {
            Whose::Container(Subject { name, container_id, .. }) => {
                Self { whose: "container", name: &name.container_name, id: container_id }
            }
            Whose::Open => Self { whose: "open", name: "", id: "" },
            Whose::Host => Self { whose: "host", name: "", id: "" },
            Whose::Unattributed => Self { whose: "unattributed", name: "", id: "" },
        }
    }
}

fn victim(victim: Victim) -> &'static str {
    match victim {
        Victim::Main => "main",
        Victim::Child => "child",
    }
}

fn scope(scope: Scope) -> &'static str {
    match scope {
        Scope::Container => "container",
        Scope::Host => "host",
    }
}
