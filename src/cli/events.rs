//! `memledger events`: prints the events of the ledger, whether or not `memledger serve` is running. Where the ledger is
//! unreadable or in memory, it queries the control socket of `memledger serve`.

use std::io::{BufWriter, ErrorKind, Write};
use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use jiff::tz::TimeZone;

use super::control;
use crate::clock::Timestamp;
use crate::config::{Config, since};
use crate::export::events::EventTable;
use crate::http::MAX_EVENTS;
use crate::ledger::store::Query;

/// Returns the verb with its own flags; the flags of the settings are added elsewhere.
pub fn command() -> Command {
    Command::new("events")
        .about("Show OOM kills and exits of containers from the ledger, oldest first.")
        .arg(
            Arg::new("since")
                .long("since")
                .value_name("TIME")
                .value_parser(|text: &str| since::since(text, Timestamp::now().unix_seconds()))
                .help(format!("Only events since this time: {}.", since::EXPECTED)),
        )
        .arg(
            Arg::new("container")
                .long("container")
                .value_name("NAME")
                .help("Only events of this container: its name (in a pod also POD/NAME or NAMESPACE/POD/NAME), its id, or the beginning of its id."),
        )
        .arg(
            Arg::new("limit")
                .long("limit")
                .value_name("N")
                .value_parser(value_parser!(usize))
                .default_value("100")
                .help("Maximum number of events, the newest ones. 0: all."),
        )
        .arg(
            Arg::new("json")
                .long("json")
                .action(ArgAction::SetTrue)
                .help("Print one JSON object per line, with all fields."),
        )
}

pub fn run(config: Config, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let limit = matches.get_one::<usize>("limit").copied().unwrap_or(0);
    let query = Query {
        since: matches.get_one::<f64>("since").copied(),
        container: matches.get_one::<String>("container").cloned(),
        limit,
        ..Query::default()
    };
    let is_json = matches.get_flag("json");
    let (printed, is_empty, has_older, origin) = match super::open_ledger(&config)? {
        Some((reader, directory)) => {
            let first = reader.page(&query, None)?;
            let pages = || reader.pages(&query).map(|page| Ok(page?.raw_json));
            let origin = directory.display().to_string();
            (print(pages, is_json), first.raw_json.is_empty(), first.has_older, origin)
        }
        None => {
            let (events, has_older) = from_control_socket(&config, &query)?;
            let pages = || std::iter::once(Ok(events.clone()));
            (print(pages, is_json), events.is_empty(), has_older, "the ledger of memledger serve".to_owned())
        }
    };
    match printed {
        // `memledger events | head` closes the pipe
        Err(error) if is_broken_pipe(&error) => return Ok(ExitCode::SUCCESS),
        printed => printed?,
    }
    if is_empty {
        eprintln!("no matching events in {origin}");
    } else if has_older && limit > 0 {
        eprintln!("only the newest {limit} events are shown; --limit=0 shows all");
    } else if has_older {
        eprintln!("only the newest {MAX_EVENTS} events are shown, the most that the control socket returns");
    }
    Ok(ExitCode::SUCCESS)
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}

/// Prints the events of all pages, each as stored JSON. `pages` begins anew with each call.
fn print<I>(pages: impl Fn() -> I, is_json: bool) -> anyhow::Result<()>
where
    I: Iterator<Item = anyhow::Result<Vec<String>>>,
{
    if is_json { print_json(pages()) } else { print_table(pages) }
}

fn print_json(pages: impl Iterator<Item = anyhow::Result<Vec<String>>>) -> anyhow::Result<()> {
    let mut output = BufWriter::new(std::io::stdout().lock());
    for page in pages {
        for event in page? {
            writeln!(output, "{event}")?;
        }
    }
    Ok(output.flush()?)
}

/// Prints the table. The events are read twice, first for the widths of the columns: all of them may not fit into memory.
fn print_table<I>(pages: impl Fn() -> I) -> anyhow::Result<()>
where
    I: Iterator<Item = anyhow::Result<Vec<String>>>,
{
    let mut table = EventTable::new(TimeZone::system());
    let (mut readable, mut unreadable) = (0, 0);
    for page in pages() {
        for event in page? {
            match serde_json::from_str(&event) {
                Ok(event) => {
                    table.fit(&event);
                    readable += 1;
                }
                Err(_) => unreadable += 1,
            }
        }
    }
    let mut output = BufWriter::new(std::io::stdout().lock());
    if readable > 0 {
        output.write_all(table.header().as_bytes())?;
    }
    for page in pages() {
        for event in page?.iter().filter_map(|event| serde_json::from_str(event).ok()) {
            output.write_all(table.render(&event).as_bytes())?;
        }
    }
    output.flush()?;
    if unreadable > 0 {
        eprintln!("{unreadable} events are omitted: this version cannot read them; --json shows them");
    }
    Ok(())
}

/// Returns the events of a query from the control socket, oldest first, and whether there are older ones.
fn from_control_socket(config: &Config, query: &Query) -> anyhow::Result<(Vec<String>, bool)> {
    /// The response of `/api/v1/events`.
    #[derive(serde::Deserialize)]
    struct EventList {
        events: Vec<Box<serde_json::value::RawValue>>,
    }
    // one more than wanted shows whether there are more
    let most = if query.limit == 0 { MAX_EVENTS } else { query.limit.saturating_add(1).min(MAX_EVENTS) };
    let since = query.since.and_then(|since| jiff::Timestamp::from_microsecond((since * 1e6) as i64).ok());
    let since = since.map(|since| format!("&since={}", control::percent_encoded(&since.to_string())));
    let container = query.container.as_deref().map(control::percent_encoded);
    let container = container.map(|container| format!("&container={container}"));
    let target =
        format!("/api/v1/events?limit={most}{}{}", since.unwrap_or_default(), container.unwrap_or_default());
    let EventList { events } = serde_json::from_str(&control::query(config, &target, "application/json")?)?;
    let has_older = events.len() == most;
    let wanted = if query.limit == 0 { MAX_EVENTS } else { query.limit };
    let skipped = events.len().saturating_sub(wanted);
    Ok((events[skipped..].iter().map(|event| event.get().to_owned()).collect(), has_older))
}
