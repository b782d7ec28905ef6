//! `memledger events`: what is in the ledger, also while `memledger serve` writes it, and when nobody does.

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use anyhow::bail;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use jiff::tz::TimeZone;

use crate::clock::Moment;
use crate::config::{Config, since};
use crate::export::events;
use crate::ledger::store::{Query, Reader};

/// The verb with its own flags; those of the settings come beside them.
pub fn command() -> Command {
    Command::new("events")
        .about("Show OOM kills and ends of containers from the ledger, oldest first.")
        .arg(
            Arg::new("since")
                .long("since")
                .value_name("TIME")
                .value_parser(|text: &str| since::since(text, Moment::now().unix_seconds()))
                .help(format!("Only those since then: {}.", since::WANTED)),
        )
        .arg(
            Arg::new("container")
                .long("container")
                .value_name("NAME")
                .help("Only those of this container: its name (in a pod also POD/NAME or NAMESPACE/POD/NAME), its id, or the beginning of its id."),
        )
        .arg(
            Arg::new("limit")
                .long("limit")
                .value_name("N")
                .value_parser(value_parser!(usize))
                .default_value("100")
                .help("At most so many, the newest. 0: all."),
        )
        .arg(
            Arg::new("json")
                .long("json")
                .action(ArgAction::SetTrue)
                .help("One JSON object per line, with all that is known."),
        )
}

pub fn run(config: Config, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let Some(directory) = &config.state.path else {
        bail!("--state.path is empty: such a memledger keeps its ledger in memory; ask it at /api/v1/events");
    };
    let limit = matches.get_one::<usize>("limit").copied().unwrap_or(0);
    let query = Query {
        since: matches.get_one::<f64>("since").copied(),
        container: matches.get_one::<String>("container").cloned(),
        most: if limit == 0 { 0 } else { limit.saturating_add(1) },
    };
    let reader = Reader::open(directory)?;
    let (text, found) = if matches.get_flag("json") {
        let bodies = reader.bodies(&query)?;
        (newest(&bodies, limit).iter().flat_map(|body| [body, "\n"]).collect(), bodies.len())
    } else {
        let all = reader.events(&query)?;
        let text = if all.is_empty() {
            String::new()
        } else {
            events::table(newest(&all, limit), &TimeZone::system())
        };
        (text, all.len())
    };
    if found == 0 {
        eprintln!("no such events in {}", directory.display());
    } else if limit > 0 && found > limit {
        eprintln!("the newest {limit}; there are more: --limit=0 shows all");
    }
    match std::io::stdout().write_all(text.as_bytes()) {
        // `memledger events | head` has seen enough
        Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
        written => written?,
    }
    Ok(ExitCode::SUCCESS)
}

fn newest<T>(all: &[T], limit: usize) -> &[T] {
    if limit == 0 { all } else { &all[all.len().saturating_sub(limit)..] }
}
