//! `memledger why`: explains what ended a container or killed one of its processes.
//!
//! Reads the ledger of `memledger serve`, also while that is running. Where the ledger is unreadable or in memory, it
//! queries the control socket. Exit status 0 with a verdict, 1 if nothing is recorded about the container.

use std::path::Path;
use std::process::ExitCode;

use anyhow::bail;
use clap::{Arg, ArgAction, ArgMatches, Command};

use super::control;
use crate::clock::Timestamp;
use crate::config::Config;
use crate::export::verdict_text::render;
use crate::ledger::store::StoreConnection;
use crate::ledger::why::{ask, not_found};

/// Returns the verb with its own arguments.
pub fn command() -> Command {
    Command::new("why")
        .about("Explain what ended a container or killed one of its processes, and what to try.")
        .long_about(
            "Explain what ended a container or killed one of its processes, and what to try.\n\
             Reads the ledger in --state.path, or else queries --local.socket. Exit status 0 with a verdict, 1 if nothing is recorded.",
        )
        .arg(
            Arg::new("container")
                .value_name("CONTAINER")
                .help("Its name (in a pod also POD/NAME or NAMESPACE/POD/NAME), its id or the beginning of its id.")
                .required_unless_present("last"),
        )
        .arg(
            Arg::new("last")
                .long("last")
                .action(ArgAction::SetTrue)
                .conflicts_with("container")
                .help("The newest OOM kill or abnormal exit of any container."),
        )
        .arg(
            Arg::new("json").long("json").action(ArgAction::SetTrue).help("Print the whole verdict as JSON."),
        )
}

pub fn run(config: Config, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let container = matches.get_one::<String>("container").map(String::as_str);
    if container.is_some_and(|container| container.trim().is_empty()) {
        bail!("the container is empty; set its name, its id or the beginning of its id, or --last");
    }
    let is_json = matches.get_flag("json");
    let text = match super::open_ledger(&config)? {
        Some((ledger, directory)) => read(&ledger, directory, container, is_json)?,
        None => {
            let target = match container {
                Some(container) => format!("/api/v1/containers/{}/why", control::percent_encoded(container)),
                None => "/api/v1/why".to_owned(),
            };
            control::query(&config, &target, if is_json { "application/json" } else { "text/plain" })?
        }
    };
    super::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the verdict from the ledger.
fn read(
    ledger: &StoreConnection,
    directory: &Path,
    container: Option<&str>,
    is_json: bool,
) -> anyhow::Result<String> {
    let Some(verdict) = ask(container, Timestamp::now().unix_seconds(), |query| ledger.events(query))? else {
        let text = not_found(container, |query| ledger.events(query))?;
        bail!("{text}. Does memledger serve use the same --state.path ({})?", directory.display());
    };
    Ok(if is_json { serde_json::to_string_pretty(&verdict)? + "\n" } else { render(&verdict) })
}
