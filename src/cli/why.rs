//! `memledger why`: what ended a container, or killed a part of it.
//!
//! It reads the ledger that `memledger serve` writes, also while that runs. Exit status 0 if there is a verdict, 1 if
//! nothing is recorded of what was asked for.

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use anyhow::bail;
use clap::{Arg, ArgAction, ArgMatches, Command};

use crate::clock::Moment;
use crate::config::Config;
use crate::export::why::render;
use crate::ledger::store::Reader;
use crate::ledger::why::{ask, not_found};

/// The verb and its own arguments.
pub fn command() -> Command {
    Command::new("why")
        .about("Say what ended a container, or killed a part of it, and what to try.")
        .long_about(
            "Say what ended a container, or killed a part of it, and what to try.\n\
             Reads the ledger in --state.path. Exit status 0 with an answer, 1 if nothing is recorded.",
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
                .help("The newest OOM kill or abnormal end of anybody."),
        )
        .arg(
            Arg::new("json").long("json").action(ArgAction::SetTrue).help("Print the whole verdict as JSON."),
        )
}

pub fn run(config: Config, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let container = matches.get_one::<String>("container").map(String::as_str);
    if container.is_some_and(|container| container.trim().is_empty()) {
        bail!(
            "the name of the container is empty; give its name, its id or the beginning of its id, or --last"
        );
    }
    let Some(directory) = &config.state.path else {
        bail!(
            "--state.path is empty, so the ledger is in the memory of memledger serve alone; ask it at \
             /api/v1/containers/NAME/why"
        );
    };
    let ledger = Reader::open(directory)?;
    let Some(verdict) = ask(container, Moment::now().unix_seconds(), |query| ledger.events(query))? else {
        let text = not_found(container, |query| ledger.events(query))?;
        bail!("{text}. Does memledger serve run with the same --state.path ({})?", directory.display());
    };
    let text = if matches.get_flag("json") {
        serde_json::to_string_pretty(&verdict)? + "\n"
    } else {
        render(&verdict)
    };
    match std::io::stdout().write_all(text.as_bytes()) {
        // `memledger why X | head` has seen enough
        Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
        written => written?,
    }
    Ok(ExitCode::SUCCESS)
}
