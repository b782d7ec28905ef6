//! The ledger on disk: SQLite with a rollback journal, one file, one writer.
//!
//! `memledger events` may read while `memledger serve` runs: a reader waits for a commit, and a commit for the page that is being
//! read. No file is mapped into memory, so a disk that hangs stops only the threads that use it. Every commit is synced to disk
//! before it returns (`synchronous=FULL`): an event is exported only once it cannot be lost, and commits are rare. An event is one row
//! with its JSON as it is served; the searchable fields are columns of their own. All other state has one table per kind
//! ([`state`]).
//!
//! A file that memledger did not create, or that a newer version created, is never opened for writing. A damaged file
//! is moved aside, never deleted.
//!
//! The reconciler decides what is written; the service handles a directory that cannot be used.

mod error;
mod lock;
mod reader;
mod retention;
mod runs;
mod schema;
mod select;
mod state;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, Transaction, TransactionBehavior, params};

use super::events::LedgerEvent;
use super::run_record::RunRecord;
pub use super::totals::Total;
use crate::clock::Timestamp;
pub use error::StoreError;
use lock::Lock;
pub use reader::{EventReader, SettledEvents, StoreConnection};
pub use runs::{RunCursor, RunQuery};
use schema::FileKind;
pub use select::{Cursor, Page};
pub use state::{LoadedState, WriteBatch};

/// Name of the file in the state directory.
pub const FILE: &str = "ledger.sqlite3";

/// Selects events.
#[derive(Clone, Debug)]
pub struct Query {
    /// Events since this Unix time.
    pub since: Option<f64>,
    /// Events until this Unix time.
    pub until: Option<f64>,
    /// Events of this container: its name, in a pod also `POD/NAME` or `NAMESPACE/POD/NAME`; if no container has this
    /// name, its id or a prefix of its id.
    pub container: Option<String>,
    /// Maximum number, the newest. 0: all.
    pub limit: usize,
    /// Maximum size of the newest events in bytes; at least one event is returned. Pages have a bound of their own.
    pub max_bytes: usize,
}

impl Default for Query {
    fn default() -> Self {
        Self { since: None, until: None, container: None, limit: 0, max_bytes: usize::MAX }
    }
}

/// The result of opening a store for writing.
#[derive(Debug)]
pub struct OpenedStore {
    /// The store.
    pub store: Store,
    /// Its content.
    pub state: LoadedState,
    /// New path of a damaged file that was moved aside; the store is empty then.
    pub moved_aside: Option<PathBuf>,
}

/// The store, owned by its single writer.
#[derive(Debug)]
pub struct Store {
    // dropped before the lock: fields are dropped in this order, and the file must be closed while the lock is held
    connection: Connection,
    path: PathBuf,
    lock: Option<Lock>,
    /// An error showed that the file is damaged.
    is_damaged: Cell<bool>,
}

impl Store {
    /// Opens or creates the store in a directory, for the single process that writes it.
    ///
    /// Waits up to `timeout` for another memledger that writes there: a container that is being replaced overlaps with
    /// its successor. Moves a damaged file aside and creates a new one, see [`OpenedStore::moved_aside`].
    ///
    /// # Errors
    /// See [`StoreError`]. Nothing was changed then, except that the directory may have been created.
    pub fn open(directory: &Path, timeout: Duration) -> Result<OpenedStore, StoreError> {
        schema::make_directory(directory)?;
        let lock = Some(Lock::take(directory, timeout)?);
        let path = directory.join(FILE);
        let opened = |(connection, state), moved_aside| OpenedStore {
            store: Store { connection, path: path.clone(), lock, is_damaged: Cell::default() },
            state,
            moved_aside,
        };
        let is_damaged = match schema::inspect_header(&path)? {
            FileKind::Ours => match connect(&path) {
                Ok(connected) => return Ok(opened(connected, None)),
                Err(StoreError::Corrupt { .. }) => true,
                Err(error) => return Err(error),
            },
            FileKind::Damaged => true,
            // without its database a journal is worthless, but SQLite would apply it to the new one
            FileKind::Nothing => schema::has_remains(&path),
        };
        schema::create_unfinished(&path, |_| Ok(()))?;
        let moved_aside = if is_damaged { Some(schema::move_aside(&path, unix_now())?) } else { None };
        schema::finish(&path)?;
        Ok(opened(connect(&path)?, moved_aside))
    }

    /// Creates a store that is lost when the process exits. Its events get ids above `last_id`.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn in_memory(last_id: u64) -> Result<Self, StoreError> {
        let path = PathBuf::from(":memory:");
        let create = || {
            let mut connection = Connection::open_in_memory()?;
            schema::initialize(&connection)?;
            schema::configure(&connection)?;
            schema::migrate(&mut connection)?;
            set_last_id(&connection, last_id)?;
            Ok(connection)
        };
        let connection = create().map_err(|error| StoreError::from_sqlite(&path, error))?;
        Ok(Self { connection, path, lock: None, is_damaged: Cell::default() })
    }

    /// Returns true if an error showed that the file is damaged; see [`Store::replace`].
    pub fn is_damaged(&self) -> bool {
        self.lock.is_some() && self.is_damaged.get()
    }

    /// Moves the damaged file aside and writes a new one with this content. Returns the new path of the damaged file.
    ///
    /// # Errors
    /// The store cannot be used until this succeeds.
    pub fn replace(&mut self, content: &WriteBatch, last_id: u64) -> Result<PathBuf, StoreError> {
        let events = bodies(&self.path, content)?;
        schema::create_unfinished(&self.path, |connection| {
            write(connection, content, &events)?;
            set_last_id(connection, last_id)
        })?;
        // closed before it is moved: SQLite's locks belong to the open file
        self.connection =
            Connection::open_in_memory().map_err(|error| StoreError::from_sqlite(&self.path, error))?;
        let aside = schema::move_aside(&self.path, unix_now())?;
        schema::finish(&self.path)?;
        self.connection = schema::connect_to_write(&self.path)?;
        self.is_damaged.set(false);
        Ok(aside)
    }

    /// Writes changes in one transaction; they are durable when it returns.
    ///
    /// # Errors
    /// Nothing was written. The same changes, merged with later ones, can be committed again, see [`StoreError::Full`].
    pub fn commit(&mut self, changes: &WriteBatch) -> Result<(), StoreError> {
        if changes.is_empty() {
            return Ok(());
        }
        let events = bodies(&self.path, changes)?;
        let written = write(&mut self.connection, changes, &events);
        self.check(written)
    }

    /// Converts an error, and remembers it if it shows that the file is damaged.
    fn check<T>(&self, outcome: rusqlite::Result<T>) -> Result<T, StoreError> {
        outcome.map_err(|error| {
            let error = StoreError::from_sqlite(&self.path, error);
            if matches!(error, StoreError::Corrupt { .. }) {
                self.is_damaged.set(true);
            }
            error
        })
    }

    /// Like [`StoreConnection::events`].
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn events(&self, query: &Query) -> Result<Vec<LedgerEvent>, StoreError> {
        self.check(reader::newest(&self.connection, query))
    }

    /// Like [`StoreConnection::page`].
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn page(&self, query: &Query, at: Option<Cursor>) -> Result<Page, StoreError> {
        self.check(select::page(&self.connection, query, at))
    }

    /// Returns events with a higher id than `id`, by id, up to the first that is not settled: the new events for a
    /// follower that stores only its last id.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn settled_after(&self, id: u64, max: usize) -> Result<SettledEvents, StoreError> {
        self.check(reader::settled_after(&self.connection, id, max))
    }

    /// Returns all records of runs with their ids.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn all_runs(&self) -> Result<BTreeMap<u64, RunRecord>, StoreError> {
        self.check(runs::all(&self.connection))
    }

    /// Like [`StoreConnection::runs`].
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn runs(&self, query: &RunQuery) -> Result<Vec<RunRecord>, StoreError> {
        self.check(runs::select(&self.connection, query))
    }

    /// Like [`EventReader::run_page`].
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

    /// Returns the Unix time of the oldest event; `None` if there is none.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn oldest(&self) -> Result<Option<f64>, StoreError> {
        self.check(self.connection.query_row("SELECT min(at) FROM events", [], |row| row.get(0)))
    }

    /// Removes settled events and records of runs that are older than `keep_seconds`, then the oldest until the rest fits into
    /// `max_bytes`, and releases the space to the file system. All other state is kept. Returns the number of removed
    /// rows.
    ///
    /// Cheap when there is nothing to remove. Works in small transactions.
    ///
    /// # Errors
    /// Some events may have been removed.
    pub fn retain(&mut self, now_unix: f64, keep_seconds: f64, max_bytes: u64) -> Result<usize, StoreError> {
        let removed = retention::retain(&mut self.connection, now_unix - keep_seconds, max_bytes);
        self.check(removed)
    }
}

/// Opens a ledger for writing, migrates it and reads its content.
fn connect(path: &Path) -> Result<(Connection, LoadedState), StoreError> {
    let connection = schema::connect_to_write(path)?;
    let load = || {
        let state = reader::load(&connection)?;
        if state.unreadable_rows > 0 {
            // an event that cannot be parsed never settles, and the followers would wait for it for ever
            let ids =
                state.unsettled.iter().map(|event| event.id().to_string()).collect::<Vec<_>>().join(",");
            let sql = format!("UPDATE events SET settled = 1 WHERE settled = 0 AND id NOT IN ({ids})");
            connection.execute(&sql, [])?;
        }
        Ok(state)
    };
    let state = load().map_err(|error| StoreError::from_sqlite(path, error))?;
    Ok((connection, state))
}

/// Returns the stored form of the events of a batch.
fn bodies<'a>(path: &Path, batch: &'a WriteBatch) -> Result<Vec<(&'a LedgerEvent, String)>, StoreError> {
    let body = |event: &'a LedgerEvent| Ok((event, serde_json::to_string(event)?));
    let bodies = batch.events.values().map(body).collect::<Result<_, serde_json::Error>>();
    bodies.map_err(|source| StoreError::Failed { path: path.to_path_buf(), source: source.into() })
}

fn write(
    connection: &mut Connection,
    batch: &WriteBatch,
    events: &[(&LedgerEvent, String)],
) -> rusqlite::Result<()> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    write_events(&transaction, events)?;
    {
        let mut remove = transaction.prepare("DELETE FROM events WHERE id = ?1")?;
        for id in &batch.removed_events {
            remove.execute(params![signed(*id)])?;
        }
    }
    runs::write(&transaction, &batch.runs)?;
    batch.write_state(&transaction)?;
    transaction.commit()
}

fn write_events(transaction: &Transaction<'_>, events: &[(&LedgerEvent, String)]) -> rusqlite::Result<()> {
    let mut statement = transaction.prepare(
        "INSERT INTO events (id, at, settled, container_name, container_id, body) VALUES (?1, ?2, ?3, ?4, ?5, ?6) \
         ON CONFLICT (id) DO UPDATE SET at = excluded.at, settled = excluded.settled, \
         container_name = excluded.container_name, container_id = excluded.container_id, body = excluded.body \
         WHERE body <> excluded.body",
    )?;
    for (event, body) in events {
        let subject = event.subject();
        let name = subject.map(|subject| &*subject.name.container_name);
        let container = subject.map(|subject| &*subject.container_id);
        statement.execute(params![signed(event.id()), event.at(), event.settled(), name, container, body])?;
    }
    Ok(())
}

/// Ensures that later events get ids above `last_id`.
fn set_last_id(connection: &Connection, last_id: u64) -> rusqlite::Result<()> {
    connection
        .execute("DELETE FROM sqlite_sequence WHERE name = 'events' AND seq < ?1", [signed(last_id)])?;
    let sql = "INSERT INTO sqlite_sequence (name, seq) SELECT 'events', ?1 \
               WHERE NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = 'events')";
    connection.execute(sql, [signed(last_id)])?;
    Ok(())
}

fn unix_now() -> u64 {
    Timestamp::now().unix_whole_seconds()
}

/// Converts to SQLite's signed integers; no count comes near their maximum.
fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn unsigned(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

fn limit(max: usize) -> i64 {
    if max == 0 { -1 } else { signed(max as u64) }
}
