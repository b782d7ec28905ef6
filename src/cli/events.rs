//! `memledger events`: prints the events of the ledger. Where no `memledger serve` answers, with what happened on this host since.

use std::io::{BufWriter, ErrorKind, Write};
use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command, value_parser};
use jiff::tz::TimeZone;

use super::coverage;
use super::event_source::{HostLedger, LedgerSource};
use crate::clock::Timestamp;
use crate::config::{Config, since};
use crate::export::events::EventTable;
use crate::http::MAX_EVENTS;
use crate::ledger::store::Query;

/// Returns the verb with its own flags; the flags of the settings are added elsewhere.
pub fn command() -> Command {
    Command::new("events")
        .about("Show OOM kills and exits of containers, oldest first.")
        .after_help("Queries memledger serve. Where none answers, reads its ledger, and the kernel log and the container runtimes of this host; \
             so with the flag --state.path, whatever runs.\n\
             Exit status: 0 also if there are none, 2 wrong use, 3 the ledger could not be read, or not to its end.")
        .arg(
            Arg::new("since")
                .long("since")
                .value_name("TIME")
                .value_parser(since::flag)
                .help(format!("Only events since this time: {}.", since::EXPECTED_LOCAL)),
        )
        .arg(
            Arg::new("container")
                .long("container")
                .value_name("NAME")
                .help("Only events of this container: its name (in a pod also POD/NAME or NAMESPACE/POD/NAME; POD for all of a pod), its id, or the beginning of its id."),
        )
        .arg(
            Arg::new("limit")
                .long("limit")
                .value_name("N")
                .value_parser(value_parser!(usize))
                .default_value("100")
                .help("Maximum number of events, the newest ones. 0: all."),
        )
        .arg(super::json_flag("Print one JSON object per line, with all fields."))
}

pub fn run(config: Config, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let limit = matches.get_one::<usize>("limit").copied().unwrap_or(0);
    let query = Query {
        since: matches.get_one::<f64>("since").copied(),
        container: matches.get_one::<String>("container").cloned(),
        limit,
        ..Query::default()
    };
    let host = HostLedger::open(&config, Timestamp::now(), query.container.as_deref())?;
    let listed = SelectedEvents::new(&host.ledger, &query)?;
    let is_json = matches.get_flag("json");
    let table = EventTable::new(TimeZone::system());
    let table = if host.missing.is_some() { table } else { table.marking_uncounted() };
    match if is_json { print_json(&listed) } else { print_table(&listed, table) } {
        // `memledger events | head` closes the pipe
        Err(error) if is_broken_pipe(&error) => return Ok(ExitCode::SUCCESS),
        printed => printed?,
    }
    let is_socket = matches!(host.ledger, LedgerSource::ControlSocket { .. });
    if listed.shown == 0 {
        eprintln!("no matching events");
    } else if listed.has_older && limit > 0 && (limit <= MAX_EVENTS || !is_socket) {
        eprintln!("only the newest {limit} events are shown; --limit=0 shows all");
    } else if listed.has_older {
        eprintln!(
            "only the newest {MAX_EVENTS} events are shown, the most that the control socket returns; with the flag --state.path all are read \
             from the file"
        );
    }
    if host.missing.is_some() || listed.shown == 0 || host.coverage.is_incomplete() {
        let filter = query.container.as_ref().map(|container| format!("--container={container}"));
        let question: Vec<&str> = std::iter::once("events").chain(filter.as_deref()).collect();
        let command = coverage::command_with_all_rights(&config, &question);
        eprint!("{}", coverage::section(&host.coverage, host.missing.as_ref(), &command, &[]));
    }
    Ok(if host.is_unreadable() { ExitCode::from(super::UNANSWERED) } else { ExitCode::SUCCESS })
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}

/// The events of a query, page by page: all of them may not fit into memory.
struct SelectedEvents<'a> {
    ledger: &'a LedgerSource<'a>,
    query: &'a Query,
    /// How many of the oldest are left out, for the limit.
    skipped: usize,
    shown: usize,
    has_older: bool,
}

impl<'a> SelectedEvents<'a> {
    fn new(ledger: &'a LedgerSource<'a>, query: &'a Query) -> anyhow::Result<Self> {
        let (mut all, mut has_older) = (0, false);
        for page in ledger.pages(query)? {
            let page = page?;
            all += page.raw_json.len();
            has_older |= page.has_older;
        }
        // the control socket is asked for one more than the limit
        let skipped = if query.limit == 0 { 0 } else { all.saturating_sub(query.limit) };
        Ok(Self { ledger, query, skipped, shown: all - skipped, has_older: has_older || skipped > 0 })
    }

    /// Calls a function with each event as JSON, oldest first.
    fn for_each(&self, mut each: impl FnMut(&str) -> anyhow::Result<()>) -> anyhow::Result<()> {
        let mut number = 0;
        for page in self.ledger.pages(self.query)? {
            for event in page?.raw_json {
                number += 1;
                if number > self.skipped {
                    each(&event)?;
                }
            }
        }
        Ok(())
    }
}

fn print_json(listed: &SelectedEvents<'_>) -> anyhow::Result<()> {
    let mut output = BufWriter::new(std::io::stdout().lock());
    listed.for_each(|event| Ok(writeln!(output, "{event}")?))?;
    Ok(output.flush()?)
}

/// Prints the table. The events are read twice, first for the widths of the columns.
fn print_table(listed: &SelectedEvents<'_>, mut table: EventTable) -> anyhow::Result<()> {
    let (mut readable, mut unreadable) = (0, 0);
    listed.for_each(|event| {
        match serde_json::from_str(event) {
            Ok(event) => {
                table.fit(&event);
                readable += 1;
            }
            Err(_) => unreadable += 1,
        }
        Ok(())
    })?;
    let mut output = BufWriter::new(std::io::stdout().lock());
    if readable > 0 {
        output.write_all(table.header().as_bytes())?;
    }
    listed.for_each(|event| match serde_json::from_str(event) {
        Ok(event) => Ok(output.write_all(table.render(&event).as_bytes())?),
        Err(_) => Ok(()),
    })?;
    output.flush()?;
    if unreadable > 0 {
        eprintln!("{unreadable} events are omitted: this version cannot read them; --json shows them");
    }
    Ok(())
}
