//! Reading the events: by commands, HTTP responses and the followers.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, params};

use super::runs::{self, RunCursor, RunQuery, SettledRun};
use super::select::{self, Cursor, Page};
use super::{FILE, LedgerState, Query, Store, StoreError, limit, schema, signed, unsigned};
use crate::events::LedgerEvent;
use crate::runs::RunRecord;

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

/// Reads the store, also while its writer runs.
#[derive(Debug)]
pub struct StoreReader {
    connection: Connection,
    path: PathBuf,
    /// An error showed that the file is damaged.
    is_damaged: Cell<bool>,
}

impl StoreReader {
    /// Opens the store in a directory for reading only.
    ///
    /// # Errors
    /// There is no ledger, it cannot be read, or the file is not a ledger.
    pub fn open(directory: &Path) -> Result<Self, StoreError> {
        Self::open_within(directory, schema::BUSY)
    }

    /// Like [`StoreReader::open`], and waits at most so long for the lock of another program, also in each read.
    ///
    /// # Errors
    /// See [`StoreReader::open`].
    pub fn open_within(directory: &Path, busy_timeout: Duration) -> Result<Self, StoreError> {
        let path = directory.join(FILE);
        Ok(Self::new(schema::connect_to_read(&path, busy_timeout.min(schema::BUSY))?, path))
    }

    pub(super) fn new(connection: Connection, path: PathBuf) -> Self {
        Self { connection, path, is_damaged: Cell::default() }
    }

    /// Creates a reader in place of one of a damaged file.
    pub(super) fn damaged(connection: Connection, path: PathBuf) -> Self {
        Self { connection, path, is_damaged: true.into() }
    }

    pub(super) fn connection_mut(&mut self) -> &mut Connection {
        &mut self.connection
    }

    #[cfg(test)]
    pub(super) fn connection(&self) -> &Connection {
        &self.connection
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn is_damaged(&self) -> bool {
        self.is_damaged.get()
    }

    /// Returns the newest selected events, oldest first, at most [`MAX_EVENTS`] and [`MAX_BYTES`]. One that cannot be parsed is logged
    /// and skipped.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn events(&self, query: &Query) -> Result<Vec<LedgerEvent>, StoreError> {
        self.check(select::newest(&self.connection, query).map(|rows| parse(rows).events))
    }

    /// Returns one page of the selected events as stored JSON, oldest first.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn page(&self, query: &Query, at: Option<Cursor>) -> Result<Page, StoreError> {
        self.check(select::page(&self.connection, query, at))
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
    /// The file cannot be read.
    pub fn runs(&self, query: &RunQuery) -> Result<Vec<RunRecord>, StoreError> {
        self.check(runs::select(&self.connection, query))
    }

    /// Returns a part of the selected records of runs as JSON, oldest first, and the cursor of the next part.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn run_page(
        &self,
        query: &RunQuery,
        at: Option<RunCursor>,
    ) -> Result<(Vec<String>, Option<RunCursor>), StoreError> {
        self.check(runs::page(&self.connection, query, at))
    }

    /// Returns the next record of a run after that of an exit, once it no longer changes; `None` if there is none yet.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn next_settled_run(&self, after: u64) -> Result<Option<SettledRun>, StoreError> {
        self.check(runs::next_settled(&self.connection, after))
    }

    /// Returns the number of records of runs after that of an exit.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn count_runs_after(&self, id: u64) -> Result<u64, StoreError> {
        self.check(runs::count_after(&self.connection, id))
    }

    /// Returns the number of runs that ended and have a record.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn count_runs(&self) -> Result<usize, StoreError> {
        Ok(usize::try_from(self.check(runs::count(&self.connection))?).unwrap_or(0))
    }

    /// Returns the number of events, at most `max`.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn count(&self, max: usize) -> Result<usize, StoreError> {
        self.check(select::count(&self.connection, max))
    }

    /// Returns events with a higher id than `id`, by id, up to the first that is not settled: the new events for a
    /// follower that stores only its last id.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn settled_after(&self, id: u64, max: usize) -> Result<SettledEvents, StoreError> {
        self.check(settled_after(&self.connection, id, max))
    }

    /// Returns the Unix time of the oldest event; `None` if there is none.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn oldest(&self) -> Result<Option<f64>, StoreError> {
        self.check(self.connection.query_row("SELECT min(at) FROM events", [], |row| row.get(0)))
    }

    /// Returns the current content of the store.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn load(&self) -> Result<LedgerState, StoreError> {
        self.check(load(&self.connection))
    }

    /// Converts an error, and remembers it if it shows that the file is damaged.
    pub(super) fn check<T>(&self, outcome: rusqlite::Result<T>) -> Result<T, StoreError> {
        outcome.map_err(|error| {
            let error = StoreError::from_sqlite(&self.path, error);
            if matches!(error, StoreError::Corrupt { .. }) {
                self.is_damaged.set(true);
            }
            error
        })
    }
}

/// Opens this process's own ledger for reading.
#[derive(Clone, Debug)]
pub enum EventReader {
    /// On disk: each call opens the file, so that calls do not wait for each other.
    Disk(PathBuf),
    /// In memory: calls and the ledger's thread share a lock.
    Memory(Arc<Mutex<Store>>),
}

impl EventReader {
    /// Calls `read` with the store.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn read<T>(&self, read: impl FnOnce(&StoreReader) -> Result<T, StoreError>) -> Result<T, StoreError> {
        match self {
            // a panic of another lock holder leaves no partial transaction: SQLite rolls it back
            EventReader::Memory(store) => read(store.lock().unwrap_or_else(PoisonError::into_inner).reader()),
            EventReader::Disk(directory) => read(&StoreReader::open(directory)?),
        }
    }
}

/// Loads the state and the events that are not settled.
pub(super) fn load(connection: &Connection) -> rusqlite::Result<LedgerState> {
    let unsettled = parse(raw(connection, "SELECT id, body FROM events WHERE settled = 0 ORDER BY id", [])?);
    let last_id = "SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'events'";
    let last_id = unsigned(connection.query_row(last_id, [], |row| row.get(0))?);
    let last_record = "SELECT coalesce(max(run_number), 0) FROM runs";
    let last_record = unsigned(connection.query_row(last_record, [], |row| row.get(0))?);
    let mut state = LedgerState::load(connection)?;
    if state.accounting.is_none() && state.started_at.is_some() {
        state.last_records = last_records(connection)?;
    }
    let sql =
        "SELECT id, body FROM events WHERE id > ?1 AND settled = 1 AND container_name IS NULL ORDER BY id";
    let recent = parse(raw(connection, sql, [signed(last_id.saturating_sub(MAX_RECENT))])?);
    let unattributed = recent.events.iter().filter_map(|event| Some((event.id(), event.unattributed_at()?)));
    state.unattributed = unattributed.collect();
    let unreadable_rows = state.unreadable_rows + unsettled.unreadable.len() as u64;
    let last_run = state.last_run.max(last_record);
    Ok(LedgerState { unsettled: unsettled.events, last_id, last_run, unreadable_rows, ..state })
}

/// Returns the stamp of the newest record of each boot that is in the events, in microseconds of the kernel's clock.
fn last_records(connection: &Connection) -> rusqlite::Result<BTreeMap<String, u64>> {
    let sql = "SELECT json_extract(body, '$.boot_id'), max(json_extract(body, '$.kernel_usec')) FROM events \
               WHERE json_valid(body) AND json_extract(body, '$.kernel_usec') IS NOT NULL GROUP BY 1";
    let mut statement = connection.prepare(sql)?;
    statement.query_map([], |row| Ok((row.get(0)?, unsigned(row.get(1)?))))?.collect()
}

/// The id of the first event after ?1 that may still change.
pub(super) const FIRST_UNSETTLED: &str =
    "coalesce((SELECT min(id) FROM events WHERE settled = 0 AND id > ?1), 9223372036854775807)";

fn settled_after(connection: &Connection, id: u64, max: usize) -> rusqlite::Result<SettledEvents> {
    let sql =
        format!("SELECT id, body FROM events WHERE id > ?1 AND id < {FIRST_UNSETTLED} ORDER BY id LIMIT ?2");
    Ok(parse(raw(connection, &sql, params![signed(id), limit(max)])?))
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
