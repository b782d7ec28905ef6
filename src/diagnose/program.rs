//! Well-known programs, by the name of the process: what limits their memory are settings that their users know.

use serde::Serialize;

use super::RunSummary;
use super::limit::limit_of;
use crate::events::{Kill, KillOwner, OomScope, Role};
use crate::parse::process::WorkerProgram;
use crate::runs::hit_limit::LimitPosition;

/// A program with settings that limit its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KnownProgram {
    /// vLLM.
    Vllm,
    /// llama.cpp and ollama.
    LlamaCpp,
    /// PostgreSQL.
    Postgres,
    /// MySQL and MariaDB.
    Mysql,
    /// MongoDB.
    Mongodb,
    /// Redis and Valkey.
    Redis,
    /// ClickHouse.
    Clickhouse,
    /// Java.
    Java,
    /// QEMU.
    VirtualMachine,
    /// Node.js.
    Node,
    /// Prometheus.
    Prometheus,
}

/// What to change of a known program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "remedy", rename_all = "snake_case")]
pub enum ProgramRemedy {
    /// Use its settings that limit memory.
    LimitProgram {
        /// The program.
        program: KnownProgram,
    },
    /// Start fewer workers.
    FewerWorkersOfProgram {
        /// Their program.
        program: WorkerProgram,
    },
}

/// A fact of a known program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "finding", rename_all = "snake_case")]
pub enum ProgramFinding {
    /// It sees no limit but that of its own container, and another one was reached.
    SeesOnlyOwnLimit {
        /// The program.
        program: PlanningProgram,
    },
}

/// A program that plans with the limit that it sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PlanningProgram {
    /// Dask.
    Dask,
    /// Ray.
    Ray,
}

/// Names of the processes of virtual machines.
const VIRTUAL_MACHINES: &[&str] = &["qemu-system-*", "qemu-kvm", "kvm"];

/// Names, or beginnings of names before a `*`, of programs. The kernel cuts names after 15 bytes.
const PROGRAMS: [(&[&str], KnownProgram); 11] = [
    (&["VLLM::*", "vllm"], KnownProgram::Vllm),
    (&["llama-*", "ollama*"], KnownProgram::LlamaCpp),
    (&["postgres"], KnownProgram::Postgres),
    (&["mysqld", "mariadbd"], KnownProgram::Mysql),
    (&["mongod"], KnownProgram::Mongodb),
    (&["redis-server", "valkey-server"], KnownProgram::Redis),
    (&["clickhouse*"], KnownProgram::Clickhouse),
    (&["java"], KnownProgram::Java),
    (VIRTUAL_MACHINES, KnownProgram::VirtualMachine),
    (&["node"], KnownProgram::Node),
    (&["prometheus"], KnownProgram::Prometheus),
];

/// Names of processes, or their beginnings, and the program whose workers they are.
const WORKERS: [(&str, WorkerProgram); 5] = [
    ("celery", WorkerProgram::Celery),
    ("dask", WorkerProgram::Dask),
    ("gunicorn", WorkerProgram::Gunicorn),
    ("ray::", WorkerProgram::Ray),
    ("uvicorn", WorkerProgram::Uvicorn),
];

/// Returns a program that sees no limit but that of its own container, where the one that was reached is known to be another one.
/// docs/deaths.md has what each reads.
pub(super) fn believed<'a>(kill: &'a Kill, run: &RunSummary<'a>) -> Option<ProgramFinding> {
    // the limit of a run is that of a cgroup without a container
    let unseen = if run.subject.is_run() { LimitPosition::Own } else { LimitPosition::Above };
    let is_of_container = matches!(kill.owner, KillOwner::Container(_));
    if kill.scope == OomScope::Host || !is_of_container || limit_of(kill, run) != unseen {
        return None;
    }
    let program = match WorkerProgram::of_name(&kill.program).or_else(|| worker_program(&kill.process))? {
        WorkerProgram::Dask => PlanningProgram::Dask,
        WorkerProgram::Ray => PlanningProgram::Ray,
        _ => return None,
    };
    Some(ProgramFinding::SeesOnlyOwnLimit { program })
}

/// Returns the program whose worker a process of this name is.
fn worker_program(process: &str) -> Option<WorkerProgram> {
    WORKERS.iter().find(|(begin, _)| process.starts_with(begin)).map(|(_, program)| *program)
}

fn is_it(name: &str, pattern: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(begin) => name.starts_with(begin),
        None => name == pattern,
    }
}

/// Returns whether a process is a virtual machine, whose memory is its guest's.
pub(super) fn is_virtual_machine(process: &str) -> bool {
    VIRTUAL_MACHINES.iter().any(|pattern| is_it(process, pattern))
}

/// Returns what to change of the program that was killed, or that held most; `None` for other programs, such as trainings.
pub(super) fn advice(kill: &Kill) -> Option<ProgramRemedy> {
    let largest = kill.report.as_ref().and_then(|report| report.processes.first());
    // where the host ran out, the victim need not be what filled it
    let victim = Some(&*kill.process).filter(|_| kill.scope == OomScope::Container);
    let names = [victim, largest.map(|row| row.process.as_str())];
    let known = |name: &str| {
        let found =
            PROGRAMS.iter().find(|(patterns, _)| patterns.iter().any(|pattern| is_it(name, pattern)))?;
        Some(ProgramRemedy::LimitProgram { program: found.1 })
    };
    // a limit is no remedy where the host ran out
    let is_of_limit = |name: &&str| kill.scope == OomScope::Container || !is_virtual_machine(name);
    let limited = names.into_iter().flatten().filter(is_of_limit).find_map(known);
    // where its role is known, its workers are advised on with their number and size
    let workers =
        names.into_iter().flatten().find_map(worker_program).filter(|_| kill.role != Some(Role::Worker));
    limited.or_else(|| workers.map(|program| ProgramRemedy::FewerWorkersOfProgram { program }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnose::{Finding, explain};
    use crate::events::{ContainerRef, LedgerEvent, RuntimeKind, Victim};

    #[test]
    fn ray_and_dask_see_the_limit_of_their_own_container_alone() {
        let id = "a".repeat(64);
        let found = |limit: &str, runtime, program: &str, process: &str| {
            let subject =
                ContainerRef { container_id: id.as_str().into(), runtime, ..ContainerRef::default() };
            let kill = Kill {
                owner: KillOwner::Container(subject),
                victim: Some(Victim::Child),
                scope: OomScope::Container,
                limit_cgroup: limit.into(),
                cgroup: format!("/docker/{id}").into(),
                program: program.into(),
                process: process.into(),
                ..Kill::unknown()
            };
            let diagnosis = explain(&[LedgerEvent::OomKill(kill)], 9.0).expect("a diagnosis");
            diagnosis.findings.into_iter().find_map(|finding| match finding {
                Finding::Program(ProgramFinding::SeesOnlyOwnLimit { program }) => Some(program),
                _ => None,
            })
        };
        let (own, inside, above) = (format!("/docker/{id}"), format!("/docker/{id}/inner"), "/batch");
        let docker = RuntimeKind::Docker;
        assert_eq!(found(above, docker, "ray", ""), Some(PlanningProgram::Ray));
        assert_eq!(found(above, docker, "", "dask worker"), Some(PlanningProgram::Dask));
        assert_eq!(found(&own, RuntimeKind::Run, "dask", ""), Some(PlanningProgram::Dask));
        for (limit, program) in [(&*own, "ray"), (&*inside, "ray"), (above, "celery"), (above, "")] {
            assert_eq!(found(limit, docker, program, "python3"), None, "{limit} {program}");
        }
    }
}
