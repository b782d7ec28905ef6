//! What `memledger why`, `events` and the verbs of runs show: the ledger, from its file or through the control socket, and the
//! events of this host that no ledger has.

use std::path::Path;
use std::time::Duration;

use super::control;
use crate::clock::Timestamp;
use crate::config::Config;
use crate::http::MAX_EVENTS;
use crate::ledger::events::LedgerEvent;
use crate::ledger::host_history::{self, HostHistory};
use crate::ledger::run_record::RunRecord;
use crate::ledger::store::{Page, Query, RunQuery, StoreConnection, StoreError};

/// Events of the ledger that name containers that are gone.
const MAX_NAMING: usize = 5_000;

/// How long `why` and `events` wait for a memledger that does not respond, or for a lock of the ledger: their answer takes at most
/// two seconds, with what the host knows.
pub const TIMEOUT: Duration = Duration::from_millis(500);

/// Pages of events, each of which can fail.
type Pages<'s> = Box<dyn Iterator<Item = anyhow::Result<Page>> + 's>;

/// The ledger of this host.
pub enum LedgerSource<'a> {
    /// Its file.
    File(StoreConnection),
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
        match StoreConnection::open_within(directory, timeout) {
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

    /// Returns the newest selected events, oldest first.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn events(&self, query: &Query) -> anyhow::Result<Vec<LedgerEvent>> {
        match self {
            Self::File(ledger) => Ok(ledger.events(query)?),
            Self::ControlSocket { config, timeout } => {
                let events = control::events(config, query, *timeout)?;
                Ok(events.iter().filter_map(|event| serde_json::from_str(event.get()).ok()).collect())
            }
            Self::Missing | Self::Unreadable => Ok(vec![]),
        }
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
                // one more than wanted shows whether there are more
                let wanted = if query.limit == 0 { MAX_EVENTS } else { query.limit };
                let more = Query { limit: wanted.saturating_add(1), ..query.clone() };
                let events = control::events(config, &more, *timeout)?;
                let has_older = events.len() > wanted || events.len() == MAX_EVENTS;
                let skipped = events.len().saturating_sub(wanted);
                let raw_json = events[skipped..].iter().map(|event| event.get().to_owned()).collect();
                Ok(Box::new(std::iter::once(Ok(Page { raw_json, has_older, next: None }))))
            }
            Self::Missing | Self::Unreadable => Ok(Box::new(std::iter::empty())),
        }
    }

    /// Returns the selected events of the ledger that the host may have, too. The ledger may have far more.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn same_events(&self, host: &HostHistory, query: &Query) -> anyhow::Result<Vec<LedgerEvent>> {
        let Some(since) = host.since() else { return Ok(vec![]) };
        let compared = Query { since: Some(since), container: query.container.clone(), ..Query::default() };
        let mut same = Vec::new();
        for page in self.pages(&compared)? {
            let events = page?.raw_json;
            let events = events.iter().filter_map(|event| serde_json::from_str(event).ok());
            same.extend(events.filter(|event| host.may_have(event)));
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
        let query = Query { limit: MAX_NAMING.min(MAX_EVENTS), ..Query::default() };
        let (mut ledger, mut missing) = (Self::Missing, None);
        let host = host_history::read(config, now, container, || {
            (ledger, missing) = Self::open(config, TIMEOUT);
            ledger.events(&query).unwrap_or_else(|error| {
                (ledger, missing) = (Self::Unreadable, Some(unreadable(&error)));
                vec![]
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
