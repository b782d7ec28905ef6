//! What `memledger why`, `events` and the verbs of runs show: the ledger of `memledger serve`, through its control socket, or its
//! file; without a `serve`, caught up with this host.

use std::collections::VecDeque;
use std::path::Path;
use std::time::Duration;

use super::control;
use crate::clock::Timestamp;
use crate::config::Config;
use crate::diagnose::live::{Coverage, MissingLedger};
use crate::discover::history::{self, ExistingContainer};
use crate::events::LedgerEvent;
use crate::http::{MAX_EVENTS, MAX_IDS};
use crate::ledger::catch_up::{CatchUpTime, HostPast, catch_up};
use crate::ledger::reconcile::CountingStart;
use crate::ledger::store::{self, LedgerState, Page, Query, RunQuery, StoreError, StoreReader};
use crate::runs::RunRecord;

/// Bytes of events after which a page from the control socket ends.
const PAGE_BYTES: usize = 256 << 10;

/// How long `why` and `events` wait for a memledger that does not respond, or for a lock of the ledger, while the host is read: their
/// answer takes about two seconds at most.
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
    /// Opens the ledger. Returns also why there is none.
    pub fn open(config: &'a Config, timeout: Duration) -> (Self, Option<MissingLedger>) {
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
            Err(error @ StoreError::NoLedger { .. }) => (Self::Missing, Some(missing(directory, &error))),
            Err(error) => (Self::Unreadable, Some(missing(directory, &error))),
        }
    }

    /// Uses the control socket if it serves this process.
    fn of_socket(config: &'a Config, timeout: Duration) -> (Self, Option<MissingLedger>) {
        match control::events(config, &Query { limit: 1, only_notable: true, ..Query::default() }, timeout) {
            Ok(_) => (Self::ControlSocket { config, timeout }, None),
            Err(error) => (Self::Unreadable, Some(MissingLedger::Unreadable { error: format!("{error:#}") })),
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
        let mut query = Query { limit: max, ..query.clone() };
        // the route takes so many, and the newest matter
        query.ids.sort_unstable();
        query.ids.drain(..query.ids.len().saturating_sub(MAX_IDS));
        for line in control::events(config, &query, timeout)? {
            let line = line?;
            let Ok(event) = serde_json::from_str::<LedgerEvent>(&line) else { continue };
            bytes += line.len();
            newest.push_back((line.len(), event));
            while newest.len() > max || bytes > store::MAX_BYTES && newest.len() > 1 {
                bytes -= newest.pop_front().map_or(0, |(size, _)| size);
            }
        }
        Ok(newest.into_iter().map(|(_, event)| event).collect())
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
}

/// The ledger, and what this host shows beside it.
pub struct HostLedger<'a> {
    /// The ledger of the `memledger serve` that runs, or what this host shows: the file, if there is one, and what happened since.
    pub ledger: LedgerSource<'a>,
    /// The containers that exist.
    pub containers: Vec<ExistingContainer>,
    /// How far the sources reach.
    pub coverage: Coverage,
    /// Why there is no recorded ledger.
    pub missing: Option<MissingLedger>,
}

impl<'a> HostLedger<'a> {
    /// Queries the `memledger serve` of this host. Where none answers, or where a flag names a directory, opens the ledger there, or none,
    /// and catches up with this host. A damaged ledger, or one that is locked, does not hide what the host shows.
    ///
    /// `container`: the container whose details are read first.
    ///
    /// # Errors
    /// The ledger was locked or damaged between its opening and its use.
    pub fn open(config: &'a Config, now: Timestamp, container: Option<&str>) -> Result<Self, StoreError> {
        let is_named = config.state.is_flag && config.state.path.is_some();
        let (mut past, served, file) = std::thread::scope(|scope| {
            let past = scope.spawn(|| HostPast::read(config, now, container, history::TIMEOUT));
            let served = (!is_named && control::is_available(config, TIMEOUT))
                .then(|| LedgerSource::of_socket(config, TIMEOUT));
            let is_served = matches!(served, Some((LedgerSource::ControlSocket { .. }, _)));
            let file = (!is_served).then(|| Self::open_file(config));
            (past.join().unwrap_or_default(), served, file)
        });
        let mut refused = None;
        match served {
            Some((ledger @ LedgerSource::ControlSocket { .. }, _)) => {
                past.leave_to_serve();
                return Ok(Self::of(ledger, Coverage::of(&past, now, true), past, None));
            }
            Some((_, why)) => refused = why,
            None => {}
        }
        // after the host was read: what was written meanwhile is not read twice
        let loaded = file.unwrap_or_else(|| Err(no_server(config))).and_then(|file| {
            let state = file.load().map_err(|error| unreadable(&error))?;
            Ok((file, state))
        });
        let (file, state, missing) = match loaded {
            Ok((file, state)) => (Some(file), state, None),
            // a memledger that does not answer has the ledger
            Err(missing) => (None, LedgerState::default(), Some(refused.unwrap_or(missing))),
        };
        let now = Timestamp::now();
        let start = CountingStart { log_usec: u64::MAX, at: f64::INFINITY };
        let changes = catch_up(config, &state, &mut past, CatchUpTime { now, start, is_last: true }).changes;
        let reader = match file {
            Some(file) => file.with_changes(&changes, TIMEOUT)?,
            None => StoreReader::in_memory(&changes)?,
        };
        let coverage = Coverage::of(&past, now, !state.is_new());
        Ok(Self::of(LedgerSource::File(reader), coverage, past, missing))
    }

    fn of(
        ledger: LedgerSource<'a>,
        coverage: Coverage,
        past: HostPast,
        missing: Option<MissingLedger>,
    ) -> Self {
        let containers = past.runtimes.into_iter().flat_map(|history| history.containers).collect();
        Self { ledger, containers, coverage, missing }
    }

    /// Opens the file. Otherwise returns why there is none.
    fn open_file(config: &Config) -> Result<StoreReader, MissingLedger> {
        let Some(directory) = config.state.path.as_deref() else { return Err(no_server(config)) };
        StoreReader::open_within(directory, TIMEOUT).map_err(|error| missing(directory, &error))
    }

    /// Returns whether there is a ledger that cannot be read.
    pub fn is_unreadable(&self) -> bool {
        matches!(self.missing, Some(MissingLedger::Unreadable { .. }))
    }

    /// Returns whether there was anything to read.
    pub fn is_answered(&self) -> bool {
        !self.is_unreadable() && (self.missing.is_none() || self.coverage.has_kernel_log())
    }
}

/// Returns why the ledger in a directory is not used.
fn missing(directory: &Path, error: &StoreError) -> MissingLedger {
    match error {
        StoreError::NoLedger { .. } => MissingLedger::NoFile(directory.to_owned()),
        error => unreadable(error),
    }
}

fn unreadable(error: &StoreError) -> MissingLedger {
    MissingLedger::Unreadable { error: crate::text::error_chain(error) }
}

fn no_server(config: &Config) -> MissingLedger {
    MissingLedger::NoServer { socket: config.local.socket.clone() }
}
