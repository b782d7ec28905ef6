//! `memledger why`: explains what ended a container or killed one of its processes.
//!
//! Reads the ledger of `memledger serve`, and always the host too, for what no ledger has: kills and exits from before its start,
//! or while it did not run. So it also answers where memledger was never started.

use std::fmt::Write;
use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches, Command};

use super::event_source::LedgerSource;
use super::kernel_log_file::{self, LogQuery};
use crate::clock::Timestamp;
use crate::config::Config;
use crate::discover::history::ExistingContainer;
use crate::export::verdict_text::{render, wrapped};
use crate::ledger::events::{Kill, LedgerEvent};
use crate::ledger::host_history::{Hint, HostHistory, current_usage, subject_of};
use crate::ledger::store::Query;
use crate::ledger::why::{Verdict, add_container, ask, kill_line, not_found, nothing};
use crate::parse::container_id;

/// Exit status if neither an end nor a kill is found.
const NOTHING_FOUND: u8 = 1;
/// Kills of unknown containers that are listed, the newest.
const MAX_NAMELESS: usize = 10;

/// Returns the verb with its own arguments.
pub fn command() -> Command {
    Command::new("why")
        .about("Explain what ended a container or killed one of its processes, and what to try.")
        .long_about(
            "Explain what ended a container or killed one of its processes, and what to try.\n\
             Reads the ledger of memledger serve, if there is one, and the kernel log and the container runtimes of this host for \
             what the ledger does not have. Writes nothing.\n\
             Exit status: 0 an end or a kill was found, 1 none was found, 2 wrong use.",
        )
        .arg(
            Arg::new("container")
                .value_name("CONTAINER")
                .help("Its name (in a pod also POD/NAME or NAMESPACE/POD/NAME), its id or the beginning of its id.")
                .required_unless_present_any(["last", "kernel-log"]),
        )
        .arg(
            Arg::new("last")
                .long("last")
                .action(ArgAction::SetTrue)
                .conflicts_with("container")
                .help("The newest OOM kill or abnormal exit of any container."),
        )
        .arg(
            Arg::new("kernel-log")
                .long("kernel-log")
                .value_name("FILE")
                .help("Explain the OOM kills in a saved kernel log (dmesg, journalctl -k, /dev/kmsg; - for standard input) instead. Reads nothing else, on any machine."),
        )
        .arg(
            Arg::new("json").long("json").action(ArgAction::SetTrue).help("Print the whole verdict as JSON."),
        )
}

pub fn run(config: Config, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let container = matches.get_one::<String>("container").map(String::as_str);
    if container.is_some_and(|container| container.trim().is_empty()) {
        eprintln!(
            "memledger: the container is empty; set its name, its id or the beginning of its id, or --last"
        );
        return Ok(ExitCode::from(super::USAGE));
    }
    if let Some(file) = matches.get_one::<String>("kernel-log") {
        let (last, json) = (matches.get_flag("last"), matches.get_flag("json"));
        return kernel_log_file::run(&LogQuery { file, container, last, json }).or_else(|error| {
            eprintln!("memledger: {error:#}");
            Ok(ExitCode::from(super::USAGE))
        });
    }
    let now = Timestamp::now();
    let (mut ledger, mut missing) = LedgerSource::open(&config);
    let (host, _) = ledger.host(&config, now, container).or_else(|error| {
        // a damaged ledger does not hide what the host shows
        missing = Some(format!("The ledger cannot be read: {error:#}."));
        ledger = LedgerSource::Missing;
        ledger.host(&config, now, container)
    })?;
    let events = |query: &Query| anyhow::Ok(host.merge(ledger.events(query)?, query));
    let command = command_with_all_rights(&config, container);
    // a ledger may have missed what happened while memledger did not run
    let is_partial = host.coverage.is_incomplete() && !super::control::is_available(&config);
    let answer = Answer { host: &host, missing, is_partial, is_json: matches.get_flag("json"), command };
    if let Some(mut verdict) = ask(container, now.unix_seconds(), events)? {
        let existing = verdict.subject.as_ref().map(|subject| subject.container_id.clone());
        let existing =
            existing.and_then(|id| host.containers.iter().find(|container| *container.id.as_str() == *id));
        if let Some(container) = existing {
            add_container(&mut verdict, container);
        }
        // this is about one that ended: a newer one may have its name
        let newest = container.and_then(|wanted| find(&host, wanted));
        let ended = verdict.subject.as_ref().map(|subject| &*subject.container_id);
        let is_newer = |newest: &&ExistingContainer| {
            let is_later = newest.started.zip(verdict.at).is_some_and(|(started, at)| started >= at);
            newest.is_running && is_later && Some(newest.id.as_str()) != ended
        };
        if let Some(newer) = newest.filter(is_newer) {
            verdict.also.push(format!("A newer container of that name is running: {}.", newer.id.short()));
        }
        answer.print(&verdict)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(wanted) = container
        && let Some(existing) = find(&host, wanted)
    {
        let usage = current_usage(&config, now, &existing.id).filter(|_| existing.is_running);
        let subject = subject_of(existing);
        answer.print(&nothing(subject, existing.is_running, usage.as_ref(), now.unix_seconds()))?;
    } else {
        let known = || not_found(container, host.containers.iter().map(|it| &*it.named.name), events);
        answer.print_unknown(&known()?)?;
    }
    Ok(ExitCode::from(NOTHING_FOUND))
}

/// Finds an existing container by its name, else by the beginning of its id; of several the newest.
fn find<'a>(host: &'a HostHistory, wanted: &str) -> Option<&'a ExistingContainer> {
    let newest = |matches: &dyn Fn(&ExistingContainer) -> bool| {
        let found = host.containers.iter().filter(|container| matches(container));
        found.max_by(|a, b| a.started.unwrap_or(0.0).total_cmp(&b.started.unwrap_or(0.0)))
    };
    newest(&|it| it.has_name(wanted)).or_else(|| newest(&|it| it.id.as_str().starts_with(wanted)))
}

/// The image of deploy/services.yml, and the privileges that `why` needs in it; docs/why.md has the same.
const IN_IMAGE: &str = concat!(
    "docker run --rm --pid host --cgroupns host --cap-drop ALL --cap-add SYSLOG --device /dev/kmsg:/dev/kmsg:r ",
    "-v /sys/fs/cgroup:/host/cgroup:ro -v /var/run/docker.sock:/var/run/docker.sock:ro ",
    "ghcr.io/memledger/memledger:",
    env!("CARGO_PKG_VERSION")
);

/// Returns the command for the same question with the rights to read everything.
fn command_with_all_rights(config: &Config, container: Option<&str>) -> String {
    if is_in_container(config) {
        return format!("{IN_IMAGE} why {}", quoted(container.unwrap_or("--last")));
    }
    let program =
        std::env::current_exe().map_or_else(|_| "memledger".to_owned(), |path| path.display().to_string());
    // sudo may have another search path; it keeps options, and drops what the environment sets
    let arguments = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
    let words = std::iter::once(program).chain(arguments);
    words.fold("sudo".to_owned(), |command, word| format!("{command} {}", quoted(&word)))
}

/// Returns whether this process is in a container, where there is no sudo.
fn is_in_container(config: &Config) -> bool {
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let has_id = own.lines().any(|line| container_id::in_path(line).next().is_some());
    has_id || std::process::id() == 1 || !config.host_paths.in_initial_pid_namespace()
}

/// Returns a word as a shell reads it.
fn quoted(word: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:=,@%+".contains(&byte);
    if !word.is_empty() && word.bytes().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// How an answer is printed.
struct Answer<'a> {
    host: &'a HostHistory,
    /// Why there is no ledger.
    missing: Option<String>,
    /// Neither the host nor a running memledger shows everything.
    is_partial: bool,
    is_json: bool,
    command: String,
}

impl Answer<'_> {
    fn print(&self, verdict: &Verdict) -> anyhow::Result<()> {
        // the kill may have been in one of its name before it
        let mut nameless = if verdict.at.is_none() { self.nameless_kills() } else { vec![] };
        let started = verdict.subject.as_ref().and_then(|subject| subject.started);
        nameless.retain(|kill| started.is_none_or(|started| kill.at <= started));
        if self.is_json {
            let mut json = serde_json::to_value(verdict)?;
            json["coverage"] = serde_json::to_value(&self.host.coverage)?;
            if verdict.at.is_none() {
                json["kills_of_unknown_containers"] = serde_json::to_value(events_of(&nameless))?;
            }
            super::print(&(serde_json::to_string_pretty(&json)? + "\n"))?;
            return Ok(());
        }
        let mut text = render(verdict);
        add_nameless(&mut text, &nameless);
        // the ledger is complete since its start; an answer from the host is only as good as its sources
        let is_from_host = self.host.events.iter().any(|event| Some(event.at()) == verdict.at);
        if verdict.at.is_none() || is_from_host || self.is_partial {
            self.add_coverage(&mut text);
        }
        super::print(&text)?;
        Ok(())
    }

    fn add_coverage(&self, text: &mut String) {
        text.push_str("\nHow far this reaches\n");
        let missing = self.missing.clone().map(|text| Hint { text, command: None });
        for Hint { text: sentence, command } in
            self.host.coverage.hints(&self.command).into_iter().chain(missing)
        {
            wrapped(text, "  - ", &sentence);
            if let Some(command) = command {
                let _ = writeln!(text, "      {command}"); // in one line, so that it can be copied
            }
        }
    }

    fn nameless_kills(&self) -> Vec<&Kill> {
        self.host.nameless_kills().collect()
    }

    /// Prints that nothing is known, and what the container may have been.
    fn print_unknown(&self, known: &str) -> anyhow::Result<()> {
        let nameless = self.nameless_kills();
        if self.is_json {
            let json = serde_json::json!({
                "found": false, "message": known, "kills_of_unknown_containers": events_of(&nameless),
                "coverage": self.host.coverage,
            });
            super::print(&(serde_json::to_string_pretty(&json)? + "\n"))?;
            return Ok(());
        }
        let mut text = String::new();
        wrapped(&mut text, "", known);
        add_nameless(&mut text, &nameless);
        self.add_coverage(&mut text);
        super::print(&text)?;
        Ok(())
    }
}

/// Adds the kills of which the container may have been one.
fn add_nameless(text: &mut String, kills: &[&Kill]) {
    if kills.is_empty() {
        return;
    }
    text.push_str("\nOOM kills in containers that no runtime knows any more\n");
    wrapped(
        text,
        "",
        "One of them may have been in it: it was removed (--rm), or created anew under its name.",
    );
    let skipped = kills.len().saturating_sub(MAX_NAMELESS);
    for kill in &kills[skipped..] {
        wrapped(text, "  - ", &kill_line(kill));
    }
    if skipped > 0 {
        wrapped(text, "  ", &format!("and {skipped} older: --json"));
    }
}

fn events_of(kills: &[&Kill]) -> Vec<LedgerEvent> {
    kills.iter().map(|kill| LedgerEvent::OomKill((*kill).clone())).collect()
}
