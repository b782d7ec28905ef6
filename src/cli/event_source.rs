//! What `memledger why`, `events` and the verbs of runs show: the ledger, from its file or through the control socket, and the
//! events of this host that no ledger has.

use std::collections::{HashSet, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::control;
use crate::clock::Timestamp;
use crate::config::Config;
use crate::events::{ContainerRef, Kill, LedgerEvent};
use crate::explain::live::{self, HostHistory, KnownPast};
use crate::http::MAX_EVENTS;
use crate::ledger::store::{self, Page, Query, RunQuery, StoreError, StoreReader};
use crate::runs::RunRecord;

/// Bytes of events after which a page from the control socket ends.
const PAGE_BYTES: usize = 256 << 10;
/// Events of the ledger that name containers that are gone.
const MAX_NAMING: usize = 5_000;

/// How long `why` and `events` wait for a memledger that does not respond, or for a lock of the ledger: their answer takes at most
/// two seconds, with what the host knows.
pub const TIMEOUT: Duration = Duration::from_secs(1);

/// Pages of events, each of which can fail.
type Pages<'s> = Box<dyn Iterator<Item = anyhow::Result<Page>> + 's>;

/// The ledger of this host.
pub enum LedgerSource<'a> {
    /// Its file.
    File(StoreReader),
    /// The memledger that runs.
    ControlSocket {
        /// Its configuration.
        config: &'a Config,
        /// How long it may take to respond.
        timeout: Duration,
    },
    /// There is none.
    Missing,
    /// There is one that cannot be read, or a memledger that does not show it.
    Unreadable,
}

impl<'a> LedgerSource<'a> {
    /// Opens the ledger. Returns also why there is none, for people.
    pub fn open(config: &'a Config, timeout: Duration) -> (Self, Option<String>) {
        let Some(directory) = config.state.path.as_deref() else {
            return match control::is_available(config, timeout) {
                true => Self::of_socket(config, timeout),
                false => (Self::Missing, Some(no_server(config))),
            };
        };
        match StoreReader::open_within(directory, timeout) {
            Ok(ledger) => (Self::File(ledger), None),
            Err(StoreError::NoLedger { .. } | StoreError::NotReadable { .. })
                if control::is_available(config, timeout) =>
            {
                Self::of_socket(config, timeout)
            }
            Err(StoreError::NoLedger { .. }) => (Self::Missing, Some(no_ledger(directory))),
            Err(error) => {
                let why = format!("The ledger cannot be read: {}.", crate::text::error_chain(&error));
                (Self::Unreadable, Some(why))
            }
        }
    }

    /// Uses the control socket if it serves this process.
    fn of_socket(config: &'a Config, timeout: Duration) -> (Self, Option<String>) {
        match control::events(config, &Query { limit: 1, ..Query::default() }, timeout) {
            Ok(_) => (Self::ControlSocket { config, timeout }, None),
            Err(error) => (Self::Unreadable, Some(unreadable(&error))),
        }
    }

    /// Returns the newest selected events, oldest first, at most [`MAX_EVENTS`](store::MAX_EVENTS) and
    /// [`MAX_BYTES`](store::MAX_BYTES).
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn events(&self, query: &Query) -> anyhow::Result<Vec<LedgerEvent>> {
        let (config, timeout) = match self {
            Self::File(ledger) => return Ok(ledger.events(query)?),
            Self::ControlSocket { config, timeout } => (config, *timeout),
            Self::Missing | Self::Unreadable => return Ok(vec![]),
        };
        let max = if query.limit == 0 { store::MAX_EVENTS } else { query.limit };
        let (mut newest, mut bytes) = (VecDeque::new(), 0);
        // the route does not know these conditions
        let is_selected = |event: &LedgerEvent| {
            (!query.only_notable || event.is_notable())
                && (query.ids.is_empty() || query.ids.contains(&event.id()))
        };
        let is_plain = !query.only_notable && query.ids.is_empty();
        let all = Query { limit: if is_plain { max } else { 0 }, ..query.clone() };
        for line in control::events(config, &all, timeout)? {
            let line = line?;
            let Ok(event) = serde_json::from_str::<LedgerEvent>(&line) else { continue };
            if is_selected(&event) {
                bytes += line.len();
                newest.push_back((line.len(), event));
            }
            while newest.len() > max || bytes > store::MAX_BYTES && newest.len() > 1 {
                bytes -= newest.pop_front().map_or(0, |(size, _)| size);
            }
        }
        Ok(newest.into_iter().map(|(_, event)| event).collect())
    }

    /// Returns what the ledger knows of containers that are gone, and of the kills of this boot.
    fn past(&self, boot_id: &str) -> anyhow::Result<KnownPast> {
        let (config, timeout) = match self {
            Self::File(ledger) => {
                let (containers, kills) =
                    (ledger.containers(MAX_NAMING)?, ledger.kills(boot_id, store::MAX_EVENTS)?);
                let has_older_kills = kills.len() >= store::MAX_EVENTS;
                return Ok(KnownPast { containers, kills, has_older_kills });
            }
            Self::ControlSocket { config, timeout } => (config, *timeout),
            Self::Missing | Self::Unreadable => return Ok(KnownPast::default()),
        };
        let mut past = KnownPast::default();
        let mut seen = HashSet::new();
        let query = Query { limit: MAX_NAMING.min(MAX_EVENTS), ..Query::default() };
        let mut events = 0;
        for line in control::events(config, &query, timeout)? {
            let Ok(event) = serde_json::from_str::<LedgerEvent>(&line?) else { continue };
            events += 1;
            if let Some(subject) =
                event.subject().filter(|subject| seen.insert(Arc::clone(&subject.container_id)))
            {
                past.containers.push(ContainerRef { started: None, ..subject.clone() });
            }
            if let LedgerEvent::OomKill(kill) = event
                && *kill.boot_id == *boot_id
            {
                let kill = Kill { report: None, before: None, evidence: vec![], ..kill };
                past.kills.push(LedgerEvent::OomKill(kill));
                past.kills.drain(..past.kills.len().saturating_sub(store::MAX_EVENTS));
            }
        }
        past.has_older_kills = events >= query.limit || past.kills.len() >= store::MAX_EVENTS;
        Ok(past)
    }

    /// Returns the newest selected records of runs, oldest first; those in progress are last.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn runs(&self, query: &RunQuery) -> anyhow::Result<Vec<RunRecord>> {
        match self {
            Self::File(ledger) => Ok(ledger.runs(query)?),
            Self::ControlSocket { config, timeout } => control::runs(config, query, *timeout),
            Self::Missing | Self::Unreadable => Ok(vec![]),
        }
    }

    /// Returns all pages of the selected events.
    ///
    /// # Errors
    /// The control socket does not respond. Each page can fail, too.
    pub fn pages<'s>(&'s self, query: &'s Query) -> anyhow::Result<Pages<'s>> {
        match self {
            Self::File(ledger) => {
                let pages = ledger.pages(query).map(|page| Ok(page?));
                Ok(Box::new(pages))
            }
            Self::ControlSocket { config, timeout } => {
                // one more than limit shows whether there are more
                let limit = if query.limit == 0 { MAX_EVENTS } else { query.limit };
                let more = Query { limit: limit.saturating_add(1), ..query.clone() };
                let mut lines = control::events(config, &more, *timeout)?.peekable();
                let pages = std::iter::from_fn(move || {
                    lines.peek()?;
                    let (mut raw_json, mut bytes) = (Vec::new(), 0);
                    while bytes < PAGE_BYTES
                        && let Some(line) = lines.next()
                    {
                        let line = match line {
                            Ok(line) => line,
                            Err(error) => return Some(Err(error)),
                        };
                        bytes += line.len();
                        raw_json.push(line);
                    }
                    Some(Ok(Page { raw_json, has_older: false, next: None }))
                });
                Ok(Box::new(pages))
            }
            Self::Missing | Self::Unreadable => Ok(Box::new(std::iter::empty())),
        }
    }

    /// Returns the selected events of the ledger that the host may have, too, without their samples and reports. The ledger may have
    /// far more.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn same_events(&self, host: &HostHistory, query: &Query) -> anyhow::Result<Vec<LedgerEvent>> {
        let Some(since) = host.since() else { return Ok(vec![]) };
        let compared = Query { since: Some(since), container: query.container.clone(), ..Query::default() };
        let mut same = Vec::new();
        for page in self.pages(&compared)? {
            let events = page?.raw_json;
            let events = events.iter().filter_map(|event| serde_json::from_str::<LedgerEvent>(event).ok());
            let events = events.filter(|event| host.may_have(event));
            same.extend(events.map(LedgerEvent::without_details));
        }
        Ok(same)
    }

    /// Opens the ledger, and reads what this host knows beside it. Returns also why there is no ledger: a damaged one, or one that
    /// is locked, does not hide what the host shows.
    pub fn open_with_host(
        config: &'a Config,
        now: Timestamp,
        container: Option<&str>,
    ) -> (Self, HostHistory, Option<String>) {
        let (mut ledger, mut missing) = (Self::Missing, None);
        let boot_id = config.host_paths.boot_id().unwrap_or_default();
        let host = live::read(config, now, container, || {
            (ledger, missing) = Self::open(config, TIMEOUT);
            ledger.past(&boot_id).unwrap_or_else(|error| {
                (ledger, missing) = (Self::Unreadable, Some(unreadable(&error)));
                KnownPast::default()
            })
        });
        (ledger, host, missing)
    }
}

/// Returns why a ledger is not used that cannot be read.
pub fn unreadable(error: &anyhow::Error) -> String {
    format!("The ledger cannot be read: {error:#}.")
}

fn no_ledger(directory: &Path) -> String {
    format!(
        "There is no ledger in {}: memledger serve has not run on this host, or has another --state.path.",
        directory.display()
    )
}

fn no_server(config: &Config) -> String {
    match &config.local.socket {
        Some(socket) => format!(
            "--state.path is empty, and no memledger serve answers on the control socket {}.",
            socket.display()
        ),
        None => "--state.path and --local.socket are empty.".to_owned(),
    }
}
