//! Reading the events: by commands, HTTP responses and the followers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, params};

use super::runs::{self, RunCursor, RunQuery};
use super::select::{self, Cursor, Page};
use super::{FILE, LoadedState, Query, Store, StoreError, limit, schema, signed, state, unsigned};
use crate::ledger::events::LedgerEvent;
use crate::ledger::run_record::RunRecord;

/// Number of newest events among which unattributed kills are loaded.
const MAX_RECENT: u64 = 1_000;

/// New events for a follower.
#[derive(Debug, Default)]
pub struct SettledEvents {
    /// Events by id.
    pub events: Vec<LedgerEvent>,
    /// Ids between or after them whose events cannot be parsed: the follower must skip them, or it would never proceed.
    pub unreadable: Vec<u64>,
}

impl SettledEvents {
    /// Returns the highest id.
    pub fn last_id(&self) -> Option<u64> {
        self.events.last().map(LedgerEvent::id).max(self.unreadable.last().copied())
    }
}

/// A read-only connection to the store, which may be used while its writer runs.
#[derive(Debug)]
pub struct StoreConnection {
    connection: Connection,
    path: PathBuf,
}

impl StoreConnection {
    /// Opens the store in a directory for reading only.
    ///
    /// # Errors
    /// There is no ledger, it cannot be read, or the file is not a ledger.
    pub fn open(directory: &Path) -> Result<Self, StoreError> {
        Self::open_within(directory, schema::BUSY)
    }

    /// Like [`StoreConnection::open`], and waits at most so long for the lock of another program, also in each read.
    ///
    /// # Errors
    /// See [`StoreConnection::open`].
    pub fn open_within(directory: &Path, busy_timeout: Duration) -> Result<Self, StoreError> {
        let path = directory.join(FILE);
        let connection = schema::connect_to_read(&path, busy_timeout.min(schema::BUSY))?;
        Ok(Self { connection, path })
    }

    /// Returns the newest selected events, oldest first. One that cannot be parsed is logged and skipped.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn events(&self, query: &Query) -> Result<Vec<LedgerEvent>, StoreError> {
        self.wrap(newest(&self.connection, query))
    }

    /// Returns one page of the selected events as stored JSON, oldest first.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn page(&self, query: &Query, at: Option<Cursor>) -> Result<Page, StoreError> {
        self.wrap(select::page(&self.connection, query, at))
    }

    /// Returns all pages of the selected events.
    pub fn pages(&self, query: &Query) -> impl Iterator<Item = Result<Page, StoreError>> {
        let mut next = Some(None);
        std::iter::from_fn(move || {
            let page = self.page(query, next?);
            next = page.as_ref().ok().and_then(|page| page.next).map(Some);
            Some(page)
        })
    }

    /// Returns the newest selected records of runs, oldest first; those in progress are last.
    ///
    /// # Errors
    /// The file cannot be read, or an older memledger wrote it and no newer one has opened it for writing.
    pub fn runs(&self, query: &RunQuery) -> Result<Vec<RunRecord>, StoreError> {
        self.wrap(runs::select(&self.connection, query))
    }

    fn run_page(
        &self,
        query: &RunQuery,
        at: Option<RunCursor>,
    ) -> Result<(Vec<String>, Option<RunCursor>), StoreError> {
        self.wrap(runs::page(&self.connection, query, at))
    }

    /// Returns the number of runs that ended and have a record.
    ///
    /// # Errors
    /// See [`StoreConnection::runs`].
    pub fn count_runs(&self) -> Result<usize, StoreError> {
        Ok(usize::try_from(self.wrap(runs::count(&self.connection))?).unwrap_or(0))
    }

    /// Returns the number of events, at most `max`.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn count(&self, max: usize) -> Result<usize, StoreError> {
        self.wrap(select::count(&self.connection, max))
    }

    /// Like [`Store::settled_after`].
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn settled_after(&self, id: u64, max: usize) -> Result<SettledEvents, StoreError> {
        self.wrap(settled_after(&self.connection, id, max))
    }

    /// Returns the current content of the store.
    ///
    /// # Errors
    /// The file cannot be read, or an older memledger wrote it and no newer one has opened it for writing.
    pub fn load(&self) -> Result<LoadedState, StoreError> {
        self.wrap(load(&self.connection))
    }

    /// Returns the newest `max` events with a higher id than `id`, by id.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn newest_after(&self, id: u64, max: usize) -> Result<Vec<LedgerEvent>, StoreError> {
        let sql = "SELECT id, body FROM (SELECT id, body FROM events WHERE id > ?1 ORDER BY id DESC LIMIT ?2) \
                   ORDER BY id";
        let rows = self.wrap(raw(&self.connection, sql, params![signed(id), limit(max)]))?;
        Ok(parse(rows).events)
    }

    fn wrap<T>(&self, outcome: rusqlite::Result<T>) -> Result<T, StoreError> {
        outcome.map_err(|error| StoreError::from_sqlite(&self.path, error))
    }
}

/// Reads the events of this process's own ledger.
#[derive(Clone, Debug)]
pub enum EventReader {
    /// On disk: each call opens the file, so that calls do not wait for each other.
    Disk(PathBuf),
    /// In memory: calls and the ledger's thread share a lock.
    Memory(Arc<Mutex<Store>>),
}

impl EventReader {
    /// Like [`StoreConnection::events`].
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn events(&self, query: &Query) -> Result<Vec<LedgerEvent>, StoreError> {
        match self {
            // a panic of another lock holder leaves no partial transaction: SQLite rolls it back
            EventReader::Memory(store) => store.lock().unwrap_or_else(PoisonError::into_inner).events(query),
            EventReader::Disk(directory) => StoreConnection::open(directory)?.events(query),
        }
    }

    /// Like [`StoreConnection::page`].
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn page(&self, query: &Query, at: Option<Cursor>) -> Result<Page, StoreError> {
        match self {
            EventReader::Memory(store) => {
                store.lock().unwrap_or_else(PoisonError::into_inner).page(query, at)
            }
            EventReader::Disk(directory) => StoreConnection::open(directory)?.page(query, at),
        }
    }

    /// Like [`StoreConnection::runs`].
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn runs(&self, query: &RunQuery) -> Result<Vec<RunRecord>, StoreError> {
        match self {
            EventReader::Memory(store) => store.lock().unwrap_or_else(PoisonError::into_inner).runs(query),
            EventReader::Disk(directory) => StoreConnection::open(directory)?.runs(query),
        }
    }

    /// Returns a part of the selected records of runs as JSON, oldest first, and the cursor of the next part.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn run_page(
        &self,
        query: &RunQuery,
        at: Option<RunCursor>,
    ) -> Result<(Vec<String>, Option<RunCursor>), StoreError> {
        match self {
            EventReader::Memory(store) => {
                store.lock().unwrap_or_else(PoisonError::into_inner).run_page(query, at)
            }
            EventReader::Disk(directory) => StoreConnection::open(directory)?.run_page(query, at),
        }
    }

    /// Like [`Store::settled_after`].
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn settled_after(&self, id: u64, max: usize) -> Result<SettledEvents, StoreError> {
        match self {
            EventReader::Memory(store) => {
                store.lock().unwrap_or_else(PoisonError::into_inner).settled_after(id, max)
            }
            EventReader::Disk(directory) => StoreConnection::open(directory)?.settled_after(id, max),
        }
    }
}

/// Loads the state and the events that are not settled.
pub(super) fn load(connection: &Connection) -> rusqlite::Result<LoadedState> {
    let unsettled = parse(raw(connection, "SELECT id, body FROM events WHERE settled = 0 ORDER BY id", [])?);
    let last_id = "SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'events'";
    let last_id = unsigned(connection.query_row(last_id, [], |row| row.get(0))?);
    let mut state = state::load_state(connection)?;
    if state.accounting.is_none() && state.started_at.is_some() {
        state.last_records = last_records(connection)?;
    }
    let sql =
        "SELECT id, body FROM events WHERE id > ?1 AND settled = 1 AND container_name IS NULL ORDER BY id";
    let recent = parse(raw(connection, sql, [signed(last_id.saturating_sub(MAX_RECENT))])?);
    state.unattributed = recent.events.iter().filter_map(LedgerEvent::unattributed_at).collect();
    let unreadable_rows = state.unreadable_rows + unsettled.unreadable.len() as u64;
    Ok(LoadedState { unsettled: unsettled.events, last_id, unreadable_rows, ..state })
}

/// Returns the stamp of the newest record of each boot that is in the events, in microseconds of the kernel's clock.
fn last_records(connection: &Connection) -> rusqlite::Result<BTreeMap<String, u64>> {
    let sql = "SELECT json_extract(body, '$.boot_id'), max(json_extract(body, '$.kernel_usec')) FROM events \
               WHERE json_valid(body) AND json_extract(body, '$.kernel_usec') IS NOT NULL GROUP BY 1";
    let mut statement = connection.prepare(sql)?;
    statement.query_map([], |row| Ok((row.get(0)?, unsigned(row.get(1)?))))?.collect()
}

pub(super) fn newest(connection: &Connection, query: &Query) -> rusqlite::Result<Vec<LedgerEvent>> {
    Ok(parse(select::newest(connection, query)?).events)
}

pub(super) fn settled_after(connection: &Connection, id: u64, max: usize) -> rusqlite::Result<SettledEvents> {
    // kills from before the first start are no news; in a text of the event the quotes would be escaped
    let sql = "SELECT id, body FROM events WHERE id > ?1 AND id < \
               coalesce((SELECT min(id) FROM events WHERE settled = 0 AND id > ?1), 9223372036854775807) \
               AND instr(body, '\"before_start\":true') = 0 ORDER BY id LIMIT ?2";
    Ok(parse(raw(connection, sql, params![signed(id), limit(max)])?))
}

/// Returns the rows of a query with the columns id and body.
fn raw(
    connection: &Connection,
    sql: &str,
    values: impl rusqlite::Params,
) -> rusqlite::Result<Vec<(i64, String)>> {
    let mut statement = connection.prepare(sql)?;
    statement.query_map(values, |row| Ok((row.get(0)?, row.get(1)?)))?.collect()
}

/// Parses events. One that cannot be parsed, as after a return to an older version, is logged.
fn parse(rows: Vec<(i64, String)>) -> SettledEvents {
    let mut parsed = SettledEvents::default();
    for (id, body) in rows {
        match serde_json::from_str(&body) {
            Ok(event) => parsed.events.push(event),
            Err(error) => {
                tracing::error!(event = id, %error, "event of the ledger is unreadable; skipped");
                parsed.unreadable.push(unsigned(id));
            }
        }
    }
    parsed
}
