//! `memledger events`: prints the events of the ledger, whether or not `memledger serve` is running, and those of this host that no
//! ledger has. Where the ledger is unreadable or in memory, it queries the control socket of `memledger serve`.

use std::collections::HashMap;
use std::io::{BufWriter, ErrorKind, Write};
use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command, value_parser};
use jiff::tz::TimeZone;

use super::coverage;
use super::event_source::{self, LedgerSource};
use crate::clock::Timestamp;
use crate::config::{Config, since};
use crate::events::LedgerEvent;
use crate::explain::live::{Addition, rename_kills};
use crate::export::events::EventTable;
use crate::http::MAX_EVENTS;
use crate::ledger::store::Query;

/// Returns the verb with its own flags; the flags of the settings are added elsewhere.
pub fn command() -> Command {
    Command::new("events")
        .about("Show OOM kills and exits of containers, oldest first.")
        .after_help("Reads the ledger of memledger serve, and for what it does not have the kernel log and the container runtimes of this host.\n\
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
    let (mut ledger, host, mut missing) =
        LedgerSource::open_with_host(&config, Timestamp::now(), query.container.as_deref());
    let known = ledger.same_events(&host, &query).unwrap_or_else(|error| {
        (ledger, missing) = (LedgerSource::Unreadable, Some(event_source::unreadable(&error)));
        vec![]
    });
    let Addition { events, replaced } = host.addition(&known, &query);
    let of_host: Vec<(f64, String)> = events
        .iter()
        .map(|event| Ok((event.at(), serde_json::to_string(event)?)))
        .collect::<anyhow::Result<_>>()?;
    let is_socket = matches!(ledger, LedgerSource::ControlSocket { .. });
    let listed = EventList::new(&ledger, &query, of_host, replaced)?;
    let is_json = matches.get_flag("json");
    match if is_json { print_json(&listed) } else { print_table(&listed) } {
        // `memledger events | head` closes the pipe
        Err(error) if is_broken_pipe(&error) => return Ok(ExitCode::SUCCESS),
        printed => printed?,
    }
    if listed.shown == 0 {
        eprintln!("no matching events");
    } else if listed.has_older && limit > 0 && (limit <= MAX_EVENTS || !is_socket) {
        eprintln!("only the newest {limit} events are shown; --limit=0 shows all");
    } else if listed.has_older {
        eprintln!("only the newest {MAX_EVENTS} events are shown, the most that the control socket returns");
    }
    let is_served = || super::control::is_available(&config, event_source::TIMEOUT);
    let is_partial = host.coverage.is_incomplete() && (!listed.is_from_ledger || !is_served());
    if missing.is_some() || listed.shown == 0 || is_partial {
        let filter = query.container.as_ref().map(|container| format!("--container={container}"));
        let question: Vec<&str> = std::iter::once("events").chain(filter.as_deref()).collect();
        let command = coverage::command_with_all_rights(&config, &question);
        eprint!("{}", coverage::section(&host.coverage, missing.as_deref(), &command, &[]));
    }
    Ok(if matches!(ledger, LedgerSource::Unreadable) {
        ExitCode::from(super::UNANSWERED)
    } else {
        ExitCode::SUCCESS
    })
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}

/// The events of a query: those of the ledger, page by page, with those of the host at their times. All of them may not fit into
/// memory.
struct EventList<'a> {
    ledger: &'a LedgerSource<'a>,
    query: &'a Query,
    of_host: Vec<(f64, String)>,
    /// Ids of events of the ledger that are left out, because the host has more about them.
    replaced: HashMap<u64, u64>,
    /// How many of the oldest are left out, for the limit.
    skipped: usize,
    shown: usize,
    has_older: bool,
    is_from_ledger: bool,
}

/// Id and time of an event.
#[derive(Default, serde::Deserialize)]
struct EventKey {
    id: u64,
    at: f64,
}

impl<'a> EventList<'a> {
    fn new(
        ledger: &'a LedgerSource<'a>,
        query: &'a Query,
        of_host: Vec<(f64, String)>,
        replaced: HashMap<u64, u64>,
    ) -> anyhow::Result<Self> {
        let (skipped, shown, has_older, is_from_ledger) = (0, 0, false, false);
        let mut listed = Self { ledger, query, of_host, replaced, skipped, shown, has_older, is_from_ledger };
        let mut of_ledger = 0;
        for page in listed.ledger.pages(query)? {
            let page = page?;
            of_ledger += page.raw_json.iter().filter(|event| !listed.is_replaced(event)).count();
            listed.has_older |= page.has_older;
        }
        let all = of_ledger + listed.of_host.len();
        listed.skipped = if query.limit == 0 { 0 } else { all.saturating_sub(query.limit) };
        listed.has_older |= listed.skipped > 0;
        listed.shown = all - listed.skipped;
        listed.is_from_ledger = of_ledger > 0;
        Ok(listed)
    }

    /// Returns whether the host has more about an event of the ledger.
    fn is_replaced(&self, event: &str) -> bool {
        !self.replaced.is_empty()
            && serde_json::from_str(event).is_ok_and(|EventKey { id, .. }| self.replaced.contains_key(&id))
    }

    /// Returns an event of the ledger with the kills that are shown in place of those that are left out.
    fn renamed(&self, event: String) -> String {
        if self.replaced.is_empty() {
            return event;
        }
        let Ok(mut known @ LedgerEvent::Exit(_)) = serde_json::from_str(&event) else { return event };
        rename_kills(&mut known, &self.replaced);
        serde_json::to_string(&known).unwrap_or(event)
    }

    /// Calls a function with each event as JSON, oldest first.
    fn for_each(&self, mut each: impl FnMut(&str) -> anyhow::Result<()>) -> anyhow::Result<()> {
        let mut number = 0;
        let mut show = |event: &str| {
            number += 1;
            if number > self.skipped { each(event) } else { Ok(()) }
        };
        let mut of_host = self.of_host.iter().peekable();
        for page in self.ledger.pages(self.query)? {
            for event in page?.raw_json {
                // of an unreadable one only the place is known: it is left where it is
                let EventKey { id, at } = serde_json::from_str(&event).unwrap_or_default();
                while let Some((_, earlier)) = of_host.next_if(|(earlier, _)| *earlier < at) {
                    show(earlier)?;
                }
                if !self.replaced.contains_key(&id) {
                    show(&self.renamed(event))?;
                }
            }
        }
        of_host.try_for_each(|(_, event)| show(event))
    }
}

fn print_json(listed: &EventList<'_>) -> anyhow::Result<()> {
    let mut output = BufWriter::new(std::io::stdout().lock());
    listed.for_each(|event| Ok(writeln!(output, "{event}")?))?;
    Ok(output.flush()?)
}

/// Prints the table. The events are read twice, first for the widths of the columns.
fn print_table(listed: &EventList<'_>) -> anyhow::Result<()> {
    let mut table = EventTable::new(TimeZone::system());
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
