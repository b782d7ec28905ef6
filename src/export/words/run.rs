//! What is said of a run and its container beside the cause.

use super::incident::{exit, limit_of, process, stop_requests};
use super::terms::{name, role_noun, time};
use super::{Noun, headline, start_error};
use crate::diagnose::{Diagnosis, KilledProcess, NothingKnown, RunFinding};
use crate::text::bytes;

/// Returns the sentence of a fact.
pub(super) fn finding(finding: &RunFinding, diagnosis: &Diagnosis, noun: Noun) -> String {
    let subject = diagnosis.subject.as_ref();
    let runtime = subject.map(|subject| subject.runtime).unwrap_or_default();
    let called = || subject.map_or_else(String::new, |subject| name(&subject.identity.name));
    match finding {
        RunFinding::EndedLater { exit: incident, may_have_hung } => {
            let hung = match may_have_hung {
                true => {
                    " It may have hung until then: a program that is not told of the death of a child waits for it, as multiprocessing.Pool does."
                }
                false => "",
            };
            format!("{}{hung}", exit(incident, noun))
        }
        RunFinding::MayBeEndedFromOutside { requests } => {
            format!("It may also have been ended from outside: {}.", stop_requests(*requests, noun))
        }
        RunFinding::KilledWithIt { count, processes, is_cut } => {
            let mut names: Vec<String> = processes.iter().map(killed_process).collect();
            names.extend(is_cut.then(|| "...".to_owned()));
            format!(
                "{count} more {} killed with it, because its cgroup is killed as a whole (memory.oom.group): {}.",
                if *count == 1 { "process was" } else { "processes were" },
                names.join(", ")
            )
        }
        RunFinding::OtherKills { count, is_more, role, first_at, last_at, kill } => {
            let more = if *is_more { " more" } else { "" };
            let was = if *count == 1 { "was" } else { "were" };
            let noun = match role {
                Some(role) => role_noun(*role, *count),
                None if *count == 1 => "process",
                None => "processes",
            };
            let when = match (first_at, kill) {
                (_, Some(kill)) => format!("at {}: {}{}.", time(*last_at), process(kill), limit_of(kill)),
                (Some(_), _) if *count == 1 => format!("at {}.", time(*last_at)),
                (Some(first_at), _) => format!("first at {}, last at {}.", time(*first_at), time(*last_at)),
                (None, _) => {
                    format!("the last at {}; `memledger events` has those that are kept.", time(*last_at))
                }
            };
            format!("{count}{more} {noun} of this run {was} OOM-killed, {when}")
        }
        RunFinding::CountedKills { count } => {
            let kills = if *count == 1 { "kill" } else { "kills" };
            format!("The ledger counted {count} OOM {kills} in this run that it does not list any more.")
        }
        RunFinding::UnreadKill { is_counted: true } => {
            "Its cgroup counted an OOM kill: a process of it was killed; no record of that could be read."
                .to_owned()
        }
        RunFinding::UnreadKill { is_counted: false } => {
            "The runtime's flag OOMKilled is set: a process of it may have been OOM-killed; no record of that could be read.".to_owned()
        }
        RunFinding::WithoutCgroup => {
            "It had no cgroup, or that was gone before its counters were read: an OOM kill of one of its children is listed as one of the host \
             (`memledger events`)."
                .to_owned()
        }
        RunFinding::CudaOomSince { at } => format!(
            "It runs again, and had a CUDA out-of-memory error at {}: `memledger events` has it.",
            time(*at)
        ),
        RunFinding::OthersOfThatName { count } => format!(
            "{count} other {} of that name; this is the newest. Use an id for another one.",
            if *count == 1 { "container is" } else { "containers are" }
        ),
        RunFinding::OtherOfPod { path, cause, headline: own } => {
            let path = name(path);
            let title = headline::title(*cause, own.as_ref(), Noun::Container, runtime);
            format!("Of the same pod, {path}: {title} (memledger why {path}).")
        }
        RunFinding::RenamedSince { wanted, name: now } => {
            format!("{} was renamed: it is {} now.", name(wanted), name(now))
        }
        RunFinding::Renamed { name: now, before } => {
            format!("{} was renamed: it was {} before.", name(now), name(before))
        }
        RunFinding::AnotherHadName { path } => {
            let path = crate::text::sanitize_for_terminal(path);
            format!("Another container had this name before: {path} (memledger why {path}).")
        }
        RunFinding::NewerRuns { id } => format!("A newer container of that name is running: {id}."),
        RunFinding::RuntimeUnreachable => format!(
            "{runtime} cannot be queried: this is what the ledger and its cgroup show of {}.",
            called()
        ),
        RunFinding::Uses {
            bytes: used,
            limit_bytes,
            is_under_oom,
            stalled_percent,
            reread_bytes_per_second,
        } => {
            let limit = match limit_bytes {
                Some(limit) => format!("of its limit of {}", bytes(*limit)),
                None => "and has no limit of its own".to_owned(),
            };
            let waiting = match (stalled_percent, reread_bytes_per_second) {
                _ if *is_under_oom => {
                    " Its OOM killer is switched off (memory.oom_control, docker run --oom-kill-disable), and its processes wait until memory is \
                     freed."
                        .to_owned()
                }
                (_, Some(reread)) => {
                    format!(" What is taken from it it reads again at once: {} a second.", bytes(*reread))
                }
                (Some(percent), None) => {
                    format!(" In the last 10 s all its processes waited for memory in {percent:.0} % of the time.")
                }
                (None, None) => String::new(),
            };
            format!("It uses {} {limit}, page cache included.{waiting}", bytes(*used))
        }
        RunFinding::Restarts { count: 1 } => "Its restart policy has restarted it once.".to_owned(),
        RunFinding::Restarts { count } => format!("Its restart policy has restarted it {count} times."),
        RunFinding::RunsAgain { since } => format!("It is running again since {}.", time(*since)),
        RunFinding::LastStartFailed { error } => {
            format!("Its last start failed: {}", start_error::summary(error))
        }
        RunFinding::LostProcess { runtime } => {
            format!("{runtime} says that it runs, but its first process does not exist on this host.")
        }
        RunFinding::OnlyLedger => ONLY_LEDGER.to_owned(),
    }
}

const ONLY_LEDGER: &str = "Only the ledger was read. On the host, `memledger why` also reads the kernel log and the runtimes, for what \
     happened while memledger did not run.";

fn killed_process(killed: &KilledProcess) -> String {
    let called = name(&killed.process);
    killed.pid.map_or_else(|| called.clone(), |pid| format!("{called} ({pid})"))
}

/// Says that nothing is known, and which containers are.
pub fn not_found(not_found: &NothingKnown, is_only_ledger: bool) -> String {
    let known = match not_found {
        NothingKnown::Anything => "No OOM kill and no abnormal end of a container is known.".to_owned(),
        NothingKnown::Container { wanted, known, .. } if known.is_empty() => {
            format!("Nothing is known about {}; no container is known", name(wanted))
        }
        NothingKnown::Container { wanted, known, is_cut } => {
            let list: Vec<String> = known.iter().map(|known| name(known)).collect();
            let more = if *is_cut { ", ..." } else { "" };
            format!("Nothing is known about {}; known containers: {}{more}", name(wanted), list.join(", "))
        }
    };
    if is_only_ledger { format!("{known}\n{ONLY_LEDGER}") } else { known }
}
