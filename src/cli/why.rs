//! `memledger why`: explains what ended a container or killed one of its processes.
//!
//! Queries `memledger serve`. Where none answers, it reads the ledger and catches up with the host, as `serve` does at its start: so it
//! also answers where memledger was never started.

use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint};

use super::coverage;
use super::event_source::HostLedger;
use super::journal;
use super::kernel_log_file::{self, LogQuery};
use crate::clock::Timestamp;
use crate::config::Config;
use crate::container_logs::tail::{LoggedError, last_error};
use crate::diagnose::live::current_usage;
use crate::diagnose::{
    Cause, Diagnosis, Finding, LogFinding, RunFinding, add_container, add_cuda_error, add_logged_error,
    add_settings, add_usage, has_other_name, never_started, not_found, not_started, query_diagnosis,
    remove_log_advice, runtime_unreachable, without_events, without_process,
};
use crate::discover::ContainerId;
use crate::discover::history::ExistingContainer;
use crate::events::{ContainerRef, Kill, KillOwner, LedgerEvent};
use crate::export::words::screen::{render, render_all, wrap};
use crate::export::words::{self, WhyDocument};
use crate::ledger::store::{Query, RunQuery};
use crate::parse::kubernetes::qos;

/// Returns the verb with its own arguments.
pub fn command() -> Command {
    let command = Command::new("why")
        .about("Explain what ended a container or killed one of its processes, and what to try.")
        .after_help(
            "Queries memledger serve. Where none answers, reads its ledger, if there is one, and the kernel log and the container runtimes of this host; so with the flag --state.path, whatever runs. Writes nothing.",
        )
        .arg(
            Arg::new("container")
                .value_name("CONTAINER")
                .help("Its name (in a pod also POD/NAME or NAMESPACE/POD/NAME; POD for all of a pod), its id or the beginning of its id.")
        )
        .arg(
            Arg::new("last")
                .long("last")
                .action(ArgAction::SetTrue)
                .help("The newest OOM kill or abnormal exit of any container, as without CONTAINER."),
        )
        .arg(
            Arg::new("logs")
                .long("logs")
                .action(ArgAction::SetTrue)
                .conflicts_with("kernel-log")
                .help("Read the last 1 MiB of its log too, for errors of memory. Prints the line of the error, not the log."),
        )
        .arg(
            Arg::new("kernel-log")
                .long("kernel-log")
                .value_name("FILE")
                .value_hint(ValueHint::FilePath)
                .help("Explain the OOM kills in a saved kernel log instead (dmesg, journalctl -k; - for standard input), on any machine."),
        )
        .arg(
            Arg::new("all")
                .long("all")
                .action(ArgAction::SetTrue)
                .conflicts_with("json")
                .help("Print all that is known of each, not 30 lines: all processes, samples and evidence."),
        )
        .arg(super::json_flag("Print the whole diagnosis as JSON."));
    super::answers(command, "an end or a kill was found", "none was found")
}

/// Returns what is wrong with the arguments. `is_last`: the newest of this host is asked for.
fn wrong_use(container: Option<&str>, is_last: bool) -> Option<String> {
    let container = container?;
    if container.trim().is_empty() {
        let hint = "set its name, its id or the beginning of its id, or --last";
        return Some(format!("the container is empty; {hint}"));
    }
    is_last.then(|| {
        format!("--last is about any container; leave out {container:?}, or name a --kernel-log too")
    })
}

pub fn run(config: Config, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let container = matches.get_one::<String>("container").map(String::as_str);
    let file = matches.get_one::<String>("kernel-log");
    if let Some(error) = wrong_use(container, matches.get_flag("last") && file.is_none()) {
        eprintln!("memledger: {error}");
        return Ok(ExitCode::from(super::USAGE));
    }
    if let Some(file) = file {
        let [last, all, json] = ["last", "all", "json"].map(|flag| matches.get_flag(flag));
        return kernel_log_file::run(&LogQuery { file, container, last, all, json });
    }
    let now = Timestamp::now();
    let mut host = HostLedger::open(&config, now, container)?;
    if container.and_then(|wanted| find(&host, wanted)).is_some_and(|found| found.has_lost_process) {
        host = HostLedger::open(&config, Timestamp::now(), container)?; // it may have ended just now
    }
    let events = |query: &Query| host.ledger.events(query);
    let answer = Answer {
        wanted: container,
        host: &host,
        booted_at: now.booted_at(),
        is_json: matches.get_flag("json"),
        is_whole: matches.get_flag("all"),
        command: coverage::command_with_all_rights(&config, &["why", container.unwrap_or("--last")]),
        is_bare: container.is_none() && !matches.get_flag("last"),
    };
    let log = matches.get_flag("logs").then(|| RequestedLog::read(&config, container, &host, now, events));
    let with_log = |query: &Query| {
        let mut found = events(query)?;
        if let Some((error, log)) = log.as_ref().and_then(|log| Some((log.error()?, log))) {
            add_cuda_error(&mut found, error, &log.container_id);
        }
        anyhow::Ok(found)
    };
    let existing = container.and_then(|wanted| find(&host, wanted));
    let (found, note) = diagnosis_of(container, existing, now.unix_seconds(), with_log)?;
    if let Some(mut diagnosis) = found {
        if let Some(log) = &log {
            log.add_to(&mut diagnosis);
        }
        journal::add_monitor(&mut diagnosis);
        if let Some(running) = add_existing_containers(&mut diagnosis, &host, container) {
            let usage = current_usage(&config, now, &running.id, running.named.user);
            usage.iter().for_each(|usage| add_usage(&mut diagnosis, usage));
        }
        answer.print(&diagnosis)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(existing) = existing {
        let mut diagnosis = of_existing(&config, existing, now, log.as_ref());
        diagnosis.findings.extend(note.map(Finding::from));
        answer.print(&diagnosis)?;
        let is_found = diagnosis.cause != Cause::Nothing;
        return Ok(if is_found { ExitCode::SUCCESS } else { none_found(&host) });
    }
    if let Some(mut diagnosis) =
        container.and_then(|wanted| of_unreachable_runtime(&config, &host, now, wanted))
    {
        if let Some(log) = &log {
            log.add_to(&mut diagnosis);
        }
        // the ledger names the kills of this container
        Answer { wanted: None, ..answer }.print(&diagnosis)?;
        let is_found = diagnosis.cause != Cause::Nothing;
        return Ok(if is_found { ExitCode::SUCCESS } else { none_found(&host) });
    }
    let existing = host.containers.iter().map(|it| it.named.identity().short_path());
    let known = words::not_found(&not_found(container, existing, events)?, false);
    answer.print_unknown(&known)?;
    Ok(none_found(&host))
}

/// Returns the diagnosis of a container, or of the newest end of all, and whether another container had the wanted name before.
/// `existing`: the container that has it now.
fn diagnosis_of(
    wanted: Option<&str>,
    existing: Option<&ExistingContainer>,
    now: f64,
    events: impl Fn(&Query) -> anyhow::Result<Vec<LedgerEvent>>,
) -> anyhow::Result<(Option<Diagnosis>, Option<RunFinding>)> {
    let mut found = query_diagnosis(wanted, now, &events)?;
    let Some((wanted, existing)) = wanted.zip(existing) else { return Ok((found, None)) };
    let is_other = |diagnosis: &mut Diagnosis| {
        let subject = diagnosis.subject.as_ref();
        has_other_name(diagnosis, wanted)
            && subject.is_some_and(|subject| *subject.container_id != *existing.id.as_str())
    };
    if let Some(other) = found.take_if(is_other) {
        return Ok((None, Some(another_had_name(&other))));
    }
    // where it was renamed while memledger did not run, the ledger has it under another name
    found = query_diagnosis(Some(existing.id.as_str()), now, &events)?.or(found);
    let subject = found.as_mut().and_then(|diagnosis| diagnosis.subject.as_mut());
    subject.into_iter().for_each(|subject| subject.rename(&ContainerRef::of_existing(existing).identity));
    Ok((found, None))
}

/// Returns the container that had the wanted name before it was renamed, and lost a process or ended.
fn another_had_name(diagnosis: &Diagnosis) -> RunFinding {
    let subject = diagnosis.subject.as_ref();
    RunFinding::AnotherHadName { path: subject.map_or_else(String::new, |it| it.identity.short_path()) }
}

/// Returns the exit status where nothing was found: that is an answer only if there was something to read.
fn none_found(host: &HostLedger<'_>) -> ExitCode {
    ExitCode::from(if host.is_answered() { super::NO } else { super::UNANSWERED })
}

/// Returns the diagnosis of a container of which neither a kill nor an end is known.
fn of_existing(
    config: &Config,
    container: &ExistingContainer,
    now: Timestamp,
    log: Option<&RequestedLog>,
) -> Diagnosis {
    let (subject, is_running) = (ContainerRef::of_existing(container), container.is_running);
    if let Some(error) = container.start_error.as_deref().filter(|_| !is_running) {
        return never_started(subject, error, now.unix_seconds());
    }
    if container.has_lost_process {
        let mut diagnosis = without_process(container, subject, now.unix_seconds());
        if let Some(log) = log {
            log.add_to(&mut diagnosis);
        }
        return diagnosis;
    }
    if container.started.is_none() && !is_running {
        return not_started(subject, now.unix_seconds());
    }
    let usage = current_usage(config, now, &container.id, container.named.user).filter(|_| is_running);
    let mut diagnosis = without_events(subject, is_running, usage.as_ref(), now.unix_seconds());
    if let Some(log) = log {
        log.add_to(&mut diagnosis);
    }
    diagnosis
}

/// Returns the diagnosis of a container of which the ledger knows a run in progress, and whose runtime does not respond.
fn of_unreachable_runtime(
    config: &Config,
    host: &HostLedger<'_>,
    now: Timestamp,
    wanted: &str,
) -> Option<Diagnosis> {
    let query = RunQuery { name: Some(wanted.to_owned()), limit: 1, ..RunQuery::default() };
    let run = host.ledger.runs(&query).ok()?.pop().filter(|run| run.ended.is_none())?;
    if !host.coverage.is_unreachable(run.subject.runtime) {
        return None;
    }
    let usage = current_usage(config, now, &ContainerId::new(&run.subject.container_id), None);
    Some(runtime_unreachable(run.subject, usage.as_ref(), now.unix_seconds()))
}

/// The end of a container's log, which was asked for.
struct RequestedLog {
    /// Id of the container; empty if it does not exist any more.
    container_id: String,
    last_error: Result<Option<LoggedError>, String>,
}

impl RequestedLog {
    /// Reads the log of the wanted container, else of that of the newest diagnosis.
    fn read(
        config: &Config,
        wanted: Option<&str>,
        host: &HostLedger<'_>,
        now: Timestamp,
        events: impl Fn(&Query) -> anyhow::Result<Vec<LedgerEvent>>,
    ) -> Self {
        let newest =
            || anyhow::Ok(query_diagnosis(None, now.unix_seconds(), events)?.and_then(|it| it.subject));
        let wanted = match wanted {
            Some(wanted) => Ok(wanted.to_owned()),
            None => newest().map(|newest| newest.map_or_else(String::new, |it| it.container_id.to_string())),
        };
        let unread = |reason: String| Self { container_id: String::new(), last_error: Err(reason) };
        match wanted {
            Err(error) => unread(format!("{error:#}")),
            Ok(wanted) if wanted.is_empty() => unread("the container is not known".to_owned()),
            Ok(wanted) => match find(host, &wanted) {
                Some(container) => Self {
                    container_id: container.id.as_str().to_owned(),
                    last_error: last_error(config, container),
                },
                None => unread("the container does not exist any more, and its log with it".to_owned()),
            },
        }
    }

    fn error(&self) -> Option<&LoggedError> {
        self.last_error.as_ref().ok()?.as_ref()
    }

    fn add_to(&self, diagnosis: &mut Diagnosis) {
        let is_its =
            diagnosis.subject.as_ref().is_some_and(|subject| *subject.container_id == *self.container_id);
        match &self.last_error {
            Ok(_) if !is_its => {
                diagnosis.findings.push(LogFinding::ReplacedContainer.into());
            }
            Ok(error) => add_logged_error(diagnosis, error.as_ref()),
            Err(reason) => {
                remove_log_advice(diagnosis);
                diagnosis.findings.push(LogFinding::UnreadableLog { reason: reason.clone() }.into());
            }
        }
    }
}

/// Adds what the host still knows of the container of a diagnosis, and a newer container of the wanted name. Returns the one of them that
/// runs now.
fn add_existing_containers<'a>(
    diagnosis: &mut Diagnosis,
    host: &'a HostLedger<'_>,
    wanted: Option<&str>,
) -> Option<&'a ExistingContainer> {
    let id = diagnosis.subject.as_ref().map(|subject| subject.container_id.clone());
    let own = host.containers.iter().find(|container| id.as_deref() == Some(container.id.as_str()));
    if let Some(container) = own {
        add_container(diagnosis, container);
        add_settings(diagnosis, &container.named.settings);
    }
    // this is about one that ended: a newer one may have its name
    let is_newer = |newest: &&ExistingContainer| {
        let is_later = newest.started.zip(diagnosis.at).is_some_and(|(started, at)| started >= at);
        newest.is_running && is_later && Some(newest.id.as_str()) != id.as_deref()
    };
    let newer = wanted.and_then(|wanted| find(host, wanted)).filter(is_newer);
    if let Some(newer) = newer {
        diagnosis.findings.push(RunFinding::NewerRuns { id: newer.id.short().to_owned() }.into());
    }
    newer.or(own.filter(|own| own.is_running))
}

/// Finds an existing container by its name, else by the beginning of its id; of several the newest.
fn find<'a>(host: &'a HostLedger<'_>, wanted: &str) -> Option<&'a ExistingContainer> {
    let newest = |matches: &dyn Fn(&ExistingContainer) -> bool| {
        let found = host.containers.iter().filter(|container| matches(container));
        found.max_by(|a, b| a.started.unwrap_or(0.0).total_cmp(&b.started.unwrap_or(0.0)))
    };
    newest(&|it| it.has_name(wanted))
        .or_else(|| newest(&|it| ContainerRef::of_existing(it).identity.is_of_pod(wanted)))
        .or_else(|| newest(&|it| it.id.as_str().starts_with(wanted)))
}

/// Returns whether a cgroup is in the pod with this UID, which systemd's driver writes with underscores.
fn is_in_pod(cgroup: &str, uid: &str) -> bool {
    !uid.is_empty() && (cgroup.contains(uid) || cgroup.contains(&uid.replace('-', "_")))
}

/// How an answer is printed.
struct Answer<'a> {
    /// The container that was asked for.
    wanted: Option<&'a str>,
    host: &'a HostLedger<'a>,
    /// Unix time of the boot.
    booted_at: f64,
    is_json: bool,
    /// Everything is printed, however long.
    is_whole: bool,
    command: String,
    /// Nothing was asked for: the newest of all is meant.
    is_bare: bool,
}

impl Answer<'_> {
    fn print(&self, diagnosis: &Diagnosis) -> anyhow::Result<()> {
        let unknown = self.kills_that_may_be_meant(diagnosis);
        if self.is_json {
            let kills = self.wanted.map(|_| &*unknown);
            let answer = WhyDocument::of(diagnosis).with_host(&self.host.coverage, kills);
            return Ok(super::print(&answer.to_json()?)?);
        }
        let mut text = String::new();
        if self.is_bare {
            text.push_str(words::NEWEST_OF_HOST);
        }
        text.push_str(&if self.is_whole { render_all(diagnosis) } else { render(diagnosis) });
        text.push_str(&words::kills_of_unknown_containers(&unknown, self.is_whole));
        // the ledger of a memledger that runs is complete; what this host shows is only as good as its sources
        let is_open = diagnosis.at.is_none() && diagnosis.cause != Cause::NeverStarted;
        let is_of_host = self.host.missing.is_some() || self.host.coverage.is_incomplete();
        if is_open || is_of_host || !unknown.is_empty() {
            text.push_str(&self.coverage(&[]));
        }
        super::print(&text)?;
        Ok(())
    }

    fn coverage(&self, shown: &[String]) -> String {
        coverage::section(&self.host.coverage, self.host.missing.as_ref(), &self.command, shown)
    }

    /// Returns the kills of containers that have no name, and those without any.
    fn kills_of_unknown_containers(&self) -> Vec<Kill> {
        let kills = Query { since: Some(self.booted_at), only_notable: true, ..Query::default() };
        let found = self.host.ledger.events(&kills).unwrap_or_default();
        let is_unknown = |kill: &Kill| match &kill.owner {
            KillOwner::Container(subject) => subject.container_id.starts_with(&*subject.identity.name),
            KillOwner::Pending | KillOwner::Unattributed => true,
            KillOwner::Host => false,
        };
        let kills = found.into_iter().filter_map(|event| match event {
            LedgerEvent::OomKill(kill) if is_unknown(&kill) => Some(kill),
            _ => None,
        });
        kills.collect()
    }

    /// Returns the kills of which one may be meant beside the diagnosis: of a container of that name that was removed, before the
    /// container that is known, or after its end; or of one that the kernel did not name. One before its end is not listed where it has a
    /// kill of its own.
    fn kills_that_may_be_meant(&self, diagnosis: &Diagnosis) -> Vec<Kill> {
        let Some((wanted, subject)) = self.wanted.zip(diagnosis.subject.as_ref()) else { return vec![] };
        if diagnosis.at.is_some() && subject.container_id.starts_with(wanted) {
            return vec![]; // by its id
        }
        let exists = self.host.containers.iter().any(|it| it.id.as_str() == &*subject.container_id);
        if exists && (diagnosis.at.is_some() || diagnosis.cause == Cause::NeverStarted || subject.is_run()) {
            return vec![]; // its end is known, and no other container can have its name
        }
        let has_kill = diagnosis.pid.is_some() || diagnosis.cause == Cause::OomUnnamed;
        // the pod of that name may be another one than before, as of a StatefulSet; those of other names are no part of the answer
        let pod = self.pod_uid(subject);
        let is_pods = !subject.identity.k8s_pod.is_empty();
        let is_outside_pods = |kill: &Kill| is_pods && !kill.cgroup.is_empty() && qos(&kill.cgroup).is_none();
        let is_of_other_pod =
            |kill: &Kill| pod.is_some_and(|uid| !is_in_pod(&kill.cgroup, uid)) || is_outside_pods(kill);
        let may_be_meant = |kill: &Kill| {
            let is_before = subject.started.map_or(diagnosis.at.is_none(), |started| kill.at <= started);
            let is_after = diagnosis.at.is_some_and(|at| kill.at > at);
            let is_possible = is_before || kill.owner == KillOwner::Unattributed;
            is_after && !is_outside_pods(kill)
                || is_possible && !has_kill && !(is_before && is_of_other_pod(kill))
        };
        self.kills_of_unknown_containers().into_iter().filter(may_be_meant).collect()
    }

    /// Returns the UID of the pod of a container that exists; `None` of others.
    fn pod_uid(&self, subject: &ContainerRef) -> Option<&str> {
        let container = self.host.containers.iter().find(|it| it.id.as_str() == &*subject.container_id)?;
        container.named.pod.as_ref().map(|pod| &*pod.uid)
    }

    /// Prints that nothing is known, and what the container may have been.
    fn print_unknown(&self, known: &str) -> anyhow::Result<()> {
        let unknown = self.kills_of_unknown_containers();
        if self.is_json {
            let answer = WhyDocument::unknown(known).with_host(&self.host.coverage, Some(&unknown));
            return Ok(super::print(&answer.to_json()?)?);
        }
        let mut text = String::new();
        // most likely the reason: without the runtime nothing is known of its containers
        let missing_runtimes = words::missing_runtimes(&self.host.coverage);
        for missing in &missing_runtimes {
            wrap(&mut text, "", missing);
        }
        wrap(&mut text, "", known);
        text.push_str(&words::kills_of_unknown_containers(&unknown, self.is_whole));
        text.push_str(&self.coverage(&missing_runtimes));
        super::print(&text)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::diagnose::Incident;
    use crate::discover::{ContainerId, ContainerSpec, RuntimeKind};

    #[test]
    fn container_that_has_the_wanted_name_is_asked_for_by_its_id() {
        let id = "a".repeat(64);
        let event = |text: String| serde_json::from_str::<LedgerEvent>(&text).unwrap();
        let end = event(format!(
            r#"{{"type":"exit","id":2,"at":9.0,"container_name":"now","container_id":"{id}","oom_kills":1,"reason":"stopped",
            "exit_code":137,"evidence":[]}}"#
        ));
        let kill = event(format!(
            r#"{{"type":"oom_kill","id":1,"at":5.0,"boot_id":"b","process":"python","pid":7,"owner":"container","scope":"container",
            "container_name":"before","container_id":"{id}","victim":"child","evidence":[]}}"#
        ));
        let existing = ExistingContainer {
            id: ContainerId::new(&id),
            runtime: RuntimeKind::Docker,
            named: Arc::new(ContainerSpec { name: "now".into(), ..ContainerSpec::default() }),
            is_running: false,
            first_process: None,
            has_lost_process: false,
            started: None,
            ended: Some(9.0),
            limit_bytes: None,
            start_error: None,
            log_path: None,
            restarts: None,
        };
        // it was renamed while memledger did not run, and the host still shows its end
        let events = |query: &Query| {
            Ok(match query.container.as_deref() {
                Some("now") => vec![end.clone()],
                _ => vec![kill.clone(), end.clone()],
            })
        };
        let diagnosis = diagnosis_of(Some("now"), Some(&existing), 10.0, events).unwrap().0.unwrap();
        assert!(matches!(diagnosis.incident, Incident::Kill(_)), "{diagnosis:?}");
        assert_eq!(&*diagnosis.subject.unwrap().identity.name, "now");
    }
}
