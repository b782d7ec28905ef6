//! Which cause it was, and the sentence that says so.

use super::words::{bytes, lasted, name, path, role_one, signal, signal_of, time};
use super::{Cause, Confidence, ENDED_BY, LINKED, Run, Verdict, advice, ended_it, last_sample};
use crate::ledger::entries::{Evidence, Exit, Kill, Reason, Scope, Subject, Whose};

/// A `/dev/shm` with no more than this share free counts as full: one more batch does not fit.
const SHM_FULL_ABOVE: f64 = 0.9;
/// SIGBUS, which a write to a full `/dev/shm` brings.
const SIGBUS: i64 = 7;
pub(super) const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;

/// Which limit was hit, seen from the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Limit {
    /// The container's own cgroup.
    Own,
    /// A cgroup inside the container.
    Inside,
    /// A cgroup above it.
    Above,
    /// The kernel's record does not name it.
    NotTold,
}

/// Whose limit a kill of this container hit.
pub(super) fn limit_of<'a>(kill: &'a Kill, run: &Run<'a>) -> Limit {
    let id = &*run.subject.container_id;
    let last = last_sample(run.before(Some(kill)));
    if kill.limit_cgroup.is_empty() {
        // no limit of its own, and yet one was hit: it can only be one above it
        let only_above =
            last.is_some_and(|last| last.limit_bytes.is_none() && last.effective_limit_bytes.is_some());
        return if only_above { Limit::Above } else { Limit::NotTold };
    }
    let mut parts = kill.limit_cgroup.split('/').filter(|part| !part.is_empty()).rev();
    let is_it = |part: &str| !id.is_empty() && part.contains(id);
    match parts.next() {
        Some(part) if is_it(part) => Limit::Own,
        _ if parts.any(is_it) => Limit::Inside,
        _ if id.is_empty() => Limit::NotTold,
        _ => Limit::Above,
    }
}

/// The path of the limit's cgroup as seen from inside the container.
pub(super) fn inside(kill: &Kill, subject: &Subject) -> String {
    let id = &*subject.container_id;
    let at = kill.limit_cgroup.rfind(id).filter(|_| !id.is_empty());
    let below = at.and_then(|at| kill.limit_cgroup[at + id.len()..].find('/').map(|end| at + id.len() + end));
    path(&kill.limit_cgroup[below.unwrap_or(0)..])
}

/// The limit that was hit, where it is known. The ledger knows the lowest limit on the path; for a cgroup above the
/// container that is not its own limit if the container has a lower one.
pub(super) fn limit_bytes<'a>(kill: &'a Kill, run: &Run<'a>) -> Option<u64> {
    let own = last_sample(run.before(Some(kill))).and_then(|last| last.limit_bytes);
    let foreign = limit_of(kill, run) == Limit::Above && own.is_some() && own == kill.limit_bytes;
    kill.limit_bytes.filter(|_| !foreign)
}

/// True if at least half of what the kernel could not drop was shared memory.
fn mostly_shared<'a>(kill: &'a Kill, run: &Run<'a>) -> bool {
    last_sample(run.before(Some(kill)))
        .and_then(|last| Some(last.shmem_bytes? * 2 >= last.unreclaimable_bytes?))
        .unwrap_or(false)
}

/// Used bytes and size of a `/dev/shm` that was full or nearly so at the last sample.
pub(super) fn full_shm(run: &Run<'_>) -> Option<(u64, u64)> {
    let last = last_sample(run.before(None))?;
    let (used, size) = (last.shm_used_bytes?, last.shm_size_bytes?);
    (size > 0 && used as f64 >= SHM_FULL_ABOVE * size as f64).then_some((used, size))
}

/// The verdict on one run of a container.
pub(super) fn verdict(run: &Run<'_>, now: f64) -> Verdict {
    let lead = leading(run);
    let (cause, confidence, what) = match (lead, run.exit) {
        (Some(kill), _) => of_kill(kill, run),
        (None, Some(exit)) => of_exit(exit, run),
        (None, None) => (Cause::Unknown, Confidence::Unsure, "Nothing is recorded of this run.".to_owned()),
    };
    let mut evidence: Vec<Evidence> = lead.map(|kill| kill.evidence.clone()).unwrap_or_default();
    evidence.extend(run.exit.into_iter().flat_map(|exit| exit.evidence.iter().cloned()));
    evidence.extend(flag_line(run, cause));
    Verdict {
        subject: Some(run.subject.clone()),
        cause,
        confidence,
        at: lead.map(|kill| kill.at).or(run.exit.map(|exit| exit.at)),
        asked_at: now,
        what,
        also: also(run, lead),
        evidence,
        held: run.before(lead).cloned(),
        advice: advice::of(cause, run, lead),
    }
}

/// The verdict on a kill that is no container's.
pub(super) fn outside(kill: &Kill, now: f64) -> Verdict {
    let (cause, confidence, whose) = match kill.whose {
        Whose::Host => (Cause::OomHostProcess, Confidence::Certain, "It belongs to no container."),
        Whose::Open => (
            Cause::OomUnattributed,
            Confidence::Unsure,
            "Evidence of whose it was may still come: ask again in some seconds.",
        ),
        _ => {
            (Cause::OomUnattributed, Confidence::Unsure, "No evidence ties it to a container or to the host.")
        }
    };
    let why = match kill.scope {
        Scope::Host => "the machine ran out of memory".to_owned(),
        Scope::Container => reached("a cgroup", kill.limit_bytes),
    };
    let what = match kill.kernel_usec {
        Some(_) => format!(
            "At {} the kernel's OOM killer killed {}, because {why}. {whose}",
            time(kill.at),
            process(kill)
        ),
        None => format!(
            "By {} the kernel had killed one process more than its log tells: the record was lost. {whose}",
            time(kill.at)
        ),
    };
    let run = Run { subject: &Subject::default(), kills: vec![kill], exit: None, loose: vec![] };
    Verdict {
        subject: None,
        cause,
        confidence,
        at: Some(kill.at),
        asked_at: now,
        what,
        also: vec![],
        evidence: kill.evidence.clone(),
        held: kill.before.clone(),
        advice: advice::of(cause, &run, Some(kill)),
    }
}

/// The kill that the verdict is about, if it is about one.
fn leading<'a>(run: &Run<'a>) -> Option<&'a Kill> {
    let Some(exit) = run.exit else { return run.kills.last().copied() };
    let ended = run.kills.iter().rev().find(|kill| ended_it(kill, run.exit));
    let linked = || run.kills.iter().rev().find(|kill| exit.at - kill.at <= LINKED);
    ended.or_else(linked).copied()
}

fn of_kill<'a>(kill: &'a Kill, run: &Run<'a>) -> (Cause, Confidence, String) {
    let main = ended_it(kill, run.exit);
    let failed = run.exit.is_some_and(|exit| !matches!(exit.exit_code, Some(0) | None) && !asked_for(exit));
    let limit = limit_of(kill, run);
    let cause = match (kill.kernel_usec, kill.scope) {
        (None, _) => Cause::OomUnnamed,
        (_, Scope::Host) => Cause::OomHost,
        _ if limit == Limit::Above => Cause::OomParentLimit,
        _ if mostly_shared(kill, run) => Cause::OomLimitShm,
        _ if main => Cause::OomLimitMain,
        _ if failed => Cause::OomLimitWorkerThenExit,
        _ => Cause::OomLimitWorker,
    };
    let told = kill.victim.is_some() && (limit != Limit::NotTold || kill.scope == Scope::Host);
    let confidence = match cause {
        Cause::OomUnnamed => Confidence::Likely,
        _ if kill.exchangeable => Confidence::Likely,
        Cause::OomParentLimit if kill.limit_cgroup.is_empty() => Confidence::Likely,
        _ if told => Confidence::Certain,
        _ => Confidence::Likely,
    };
    (cause, confidence, sentence(kill, run, main, limit))
}

fn sentence<'a>(kill: &'a Kill, run: &Run<'a>, main: bool, limit: Limit) -> String {
    let after = after(kill, run, main);
    if kill.kernel_usec.is_none() {
        let teller = if &*kill.method == "runtime" { "the runtime says so" } else { "its counters say so" };
        return format!(
            "By {} the kernel's OOM killer had killed a process of this container: {teller}, but the \
             kernel's record was lost, so which process and how large it was is not known; {after}",
            time(kill.at)
        );
    }
    let bytes = limit_bytes(kill, run);
    let why = match (kill.scope, limit) {
        (Scope::Host, _) => "the whole machine ran out of memory".to_owned(),
        (_, Limit::Own) => reached("the container", bytes),
        (_, Limit::Inside) => reached(&format!("the cgroup {} inside it", inside(kill, run.subject)), bytes),
        (_, Limit::Above) if kill.limit_cgroup.is_empty() => reached("a cgroup above the container", bytes),
        (_, Limit::Above) => reached(&format!("the cgroup {} above it", path(&kill.limit_cgroup)), bytes),
        (_, Limit::NotTold) => reached("a cgroup (most likely the container's own)", bytes),
    };
    let or_another = if kill.exchangeable {
        " (or another process of those seconds: other containers lost some too, and only their numbers are known)"
    } else {
        ""
    };
    format!(
        "At {} the kernel's OOM killer killed {}{or_another}, because {why}; {after}",
        time(kill.at),
        process(kill)
    )
}

/// `X reached its memory limit of Y`, or without the figure if there is none.
fn reached(who: &str, limit: Option<u64>) -> String {
    let limit = limit.map_or_else(String::new, |limit| format!(" of {}", bytes(limit)));
    format!("{who} reached its memory limit{limit}")
}

/// The victim: its name, pid, what it was for and how large it was, as far as the record tells.
fn process(kill: &Kill) -> String {
    let called = if kill.process.is_empty() { "a process".to_owned() } else { name(&kill.process) };
    let mut details: Vec<String> = kill.pid.map(|pid| format!("pid {pid}")).into_iter().collect();
    if !kill.role.is_empty() && &*kill.role != "other" {
        details.push(format!("a {}", role_one(&kill.role)));
    }
    details.extend(kill.anon_bytes.map(|anon| format!("{} of anonymous memory", bytes(anon))));
    if details.is_empty() { called } else { format!("{called} ({})", details.join(", ")) }
}

/// What became of the container after the kill.
fn after(kill: &Kill, run: &Run<'_>, main: bool) -> String {
    let Some(exit) = run.exit else {
        return match (main, kill.victim) {
            (true, _) => "that ended the container.".to_owned(),
            (false, Some(_)) => "the container lived on.".to_owned(),
            (false, None) => "no end of the container is recorded.".to_owned(),
        };
    };
    if main {
        return format!("that ended the container{}.", with_code(exit));
    }
    let later = match exit.at - kill.at {
        seconds if seconds < 1.0 => "right after".to_owned(),
        seconds => format!("{} later", lasted(seconds)),
    };
    let code = with_code(exit);
    if asked_for(exit) {
        format!("the container lived on until somebody stopped it {later}{code}.")
    } else {
        format!("the container lived on and ended {later}{code}.")
    }
}

fn with_code(exit: &Exit) -> String {
    exit.exit_code.map_or_else(String::new, |code| format!(" with exit code {code}"))
}

fn asked_for(exit: &Exit) -> bool {
    exit.reason == Some(Reason::Stopped)
}

fn of_exit(exit: &Exit, run: &Run<'_>) -> (Cause, Confidence, String) {
    let at = format!("At {} the container ended{}", time(exit.at), with_code(exit));
    let after = exit.duration_seconds.map_or_else(String::new, |it| format!(" after {}", lasted(it)));
    let at = format!("{at}{after}");
    match exit.reason {
        Some(Reason::OomContainer) => lost_kill(Cause::OomLimitMain, &at, "a memory limit was reached"),
        Some(Reason::OomHost) => lost_kill(Cause::OomHost, &at, "the machine ran out of memory"),
        Some(Reason::Completed) => {
            (Cause::Completed, Confidence::Certain, format!("{at}: it finished by itself, without an error."))
        }
        Some(Reason::Stopped) => stopped(exit, &at),
        Some(Reason::Killed) => killed(run, &at),
        Some(Reason::Signal) => by_signal(exit, run, &at),
        Some(Reason::Error) => by_error(run, &at),
        Some(Reason::Unknown) => (
            Cause::Unknown,
            Confidence::Unsure,
            format!(
                "{at}, and nothing recorded tells why: no runtime was there to ask, or memledger did not run."
            ),
        ),
        None => (
            Cause::Unknown,
            Confidence::Unsure,
            format!("{at}; evidence of why may still come: ask again in some seconds."),
        ),
    }
}

fn lost_kill(cause: Cause, at: &str, why: &str) -> (Cause, Confidence, String) {
    let what =
        format!("{at} by an OOM kill, because {why}; the kill's own record is not in the ledger (any more).");
    (cause, Confidence::Likely, what)
}

fn stopped(exit: &Exit, at: &str) -> (Cause, Confidence, String) {
    match exit.asked_signal() {
        // the first half of `docker stop`
        Some(SIGKILL) if exit.asked_signals.contains(&Some(SIGTERM)) => {
            let what = format!(
                "{at}: somebody had it stopped, it did not end upon SIGTERM, and the runtime killed it when its \
                 time was up."
            );
            (Cause::Stopped, Confidence::Certain, what)
        }
        Some(SIGKILL) => {
            let what = format!(
                "{at}: somebody asked the runtime to kill it (SIGKILL): docker kill, docker rm -f, or docker stop when \
                 its time is up."
            );
            (Cause::KilledByRequest, Confidence::Certain, what)
        }
        Some(number) => {
            let name = signal(number.into());
            let killed = match exit.exit_code {
                Some(137) => ", and was killed as it did not",
                _ => "",
            };
            let what = format!("{at}: somebody asked the runtime to end it ({name}){killed}.");
            (Cause::Stopped, Confidence::Certain, what)
        }
        None => {
            let what = format!("{at}: somebody asked the runtime to end it; by which signal is not told.");
            (Cause::Stopped, Confidence::Likely, what)
        }
    }
}

fn killed(run: &Run<'_>, at: &str) -> (Cause, Confidence, String) {
    if let Some(kill) = run.loose.first() {
        let what = format!(
            "{at}, which is what SIGKILL leaves. Within {ENDED_BY} s of it the kernel's OOM killer killed {}, and nothing tells \
             whose process that was: it may have been this container's.",
            process(kill)
        );
        return (Cause::Unknown, Confidence::Unsure, what);
    }
    if run.exit.is_some_and(|exit| !exit.kernel_log_read) {
        let what = format!(
            "{at}, which is what SIGKILL leaves, and nobody asked the runtime for it. The kernel log could not be read \
             then, so that it was no OOM kill is likely and not certain: no counter that could be read told of one."
        );
        return (Cause::KilledOutside, Confidence::Likely, what);
    }
    let flagged = run.exit.is_some_and(|exit| exit.runtime_oom_flag == Some(true));
    let confidence = if flagged { Confidence::Likely } else { Confidence::Certain };
    let what = format!(
        "{at}, which is what SIGKILL leaves. It was NOT an OOM kill: the kernel recorded none for it. And nobody asked \
         the runtime for it."
    );
    (Cause::KilledOutside, confidence, what)
}

fn by_signal(exit: &Exit, run: &Run<'_>, at: &str) -> (Cause, Confidence, String) {
    let Some(number) = signal_of(exit.exit_code) else {
        let what = format!("{at}, by a signal whose name is not recorded.");
        return (Cause::EndedBySignal, Confidence::Likely, what);
    };
    let name = signal(number);
    if number == SIGBUS
        && let Some((used, size)) = full_shm(run)
    {
        let what = format!(
            "{at}, that is by SIGBUS, while {} of the {} of its /dev/shm were in use: a write to a full /dev/shm ends so.",
            bytes(used),
            bytes(size)
        );
        return (Cause::ShmFull, Confidence::Likely, what);
    }
    match number {
        4..=8 | 11 | 31 => {
            (Cause::CrashedSignal, Confidence::Certain, format!("{at}, that is by {name}: it crashed."))
        }
        _ => {
            let what = format!("{at}, that is by {name}, which nobody asked the runtime to send.");
            (Cause::EndedBySignal, Confidence::Certain, what)
        }
    }
}

fn by_error(run: &Run<'_>, at: &str) -> (Cause, Confidence, String) {
    if let Some((used, size)) = full_shm(run) {
        let what = format!(
            "{at}, while {} of the {} of its /dev/shm were in use: a full one kills DataLoader workers (SIGBUS), \
             and the trainer then ends with an error. memledger does not read its log, which would prove it.",
            bytes(used),
            bytes(size)
        );
        return (Cause::ShmFull, Confidence::Likely, what);
    }
    let none = if run.kills.is_empty() { " No OOM kill of this run is recorded." } else { "" };
    let what = format!("{at}: its own error.{none}");
    (Cause::ErrorExit, Confidence::Certain, what)
}

/// What a runtime's OOMKilled flag says where it says otherwise.
fn flag_line(run: &Run<'_>, cause: Cause) -> Option<Evidence> {
    let exit = run.exit?;
    let flag = exit.runtime_oom_flag?;
    if exit.evidence.iter().any(|line| line.text.contains("OOMKilled")) {
        return None; // said already
    }
    let oom = !run.kills.is_empty() || matches!(cause, Cause::OomLimitMain | Cause::OomHost);
    (flag != oom).then(|| {
        let text = format!(
            "OOMKilled={flag}, which is not believed: runtimes lose OOM events, and set it without a kill too"
        );
        Evidence::new("runtime", text)
    })
}

/// The other kills of the run, in one line, and a count that the listed kills do not reach.
fn also(run: &Run<'_>, lead: Option<&Kill>) -> Vec<String> {
    let others: Vec<_> = run.kills.iter().filter(|kill| lead.is_none_or(|lead| lead.id != kill.id)).collect();
    let mut lines = Vec::new();
    if let (Some(first), Some(last)) = (others.first(), others.last()) {
        let more = if lead.is_some() { " more" } else { "" };
        let workers = others.iter().all(|kill| &*kill.role == "dataloader_worker");
        let noun = match (workers, others.len()) {
            (true, 1) => "DataLoader worker",
            (true, _) => "DataLoader workers",
            (false, 1) => "process",
            (false, _) => "processes",
        };
        lines.push(if others.len() == 1 {
            format!("1{more} {noun} of this run was OOM-killed, at {}.", time(first.at))
        } else {
            format!(
                "{}{more} {noun} of this run were OOM-killed, first at {}, last at {}.",
                others.len(),
                time(first.at),
                time(last.at)
            )
        });
    }
    let listed = run.kills.len() as u64;
    if let Some(exit) = run.exit.filter(|exit| exit.oom_kills > listed) {
        lines.push(format!(
            "The ledger counted {} OOM kills in this run; {listed} of them are still listed.",
            exit.oom_kills
        ));
    }
    lines
}
