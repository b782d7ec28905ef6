//! The ledger on disk: SQLite with a rollback journal, one file, one writer.
//!
//! `memledger events` may read while `memledger serve` runs: a reader waits for a commit, and a commit for the page that is being
//! read. No file is mapped into memory, so a disk that hangs stops only the threads that use it. Every commit is synced to disk
//! before it returns (`synchronous=FULL`): an event is exported only once it cannot be lost, and commits are rare. An event is one row
//! with its JSON as it is served; the searchable fields are columns of their own. All other state is in one table ([`state`]).
//!
//! A file that memledger did not create, or that a newer version created, is never opened for writing. A damaged file
//! is moved aside, never deleted.
//!
//! The reconciler decides what is written; the writer handles a directory that cannot be used.

mod error;
mod lock;
mod overlay;
mod reader;
mod retention;
mod runs;
mod schema;
mod select;
mod state;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, Transaction, TransactionBehavior, params};

use crate::clock::{ClockStep, MIN_CLOCK_STEP, Timestamp};
use crate::discover::ContainerId;
use crate::events::{Identity, LedgerEvent};
use crate::runs::RunRecord;
pub use error::StoreError;
use lock::Lock;
pub use reader::{EventReader, SettledEvents, StoreReader};
pub use runs::{RunCursor, RunQuery, SettledRun};
use schema::FileKind;
pub use select::{Cursor, MAX_BYTES, MAX_EVENTS, Page};
#[cfg(test)]
pub use state::StateRows;
pub use state::{LedgerState, StateKind, WriteBatch};

/// Name of the file in the state directory.
pub const FILE: &str = "ledger.sqlite3";
/// Suffixes of files that were moved aside.
const DAMAGED: &str = "corrupt";
const OLDER: &str = "older";

/// Returns the databases that were moved aside in the state directory, in no order: none if it cannot be read.
pub fn files_moved_aside(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_one = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()?.strip_prefix(FILE)?.strip_prefix('.'));
        let time = |suffix| name.and_then(|name| name.strip_prefix(suffix)?.strip_prefix('-'));
        let is_time = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()); // no journal of one
        [OLDER, DAMAGED].into_iter().filter_map(time).any(is_time)
    };
    entries.filter(is_one).collect()
}

/// Maximum number of rows that a correction of times or a new name reads into memory at once.
const CHANGED_AT_ONCE: usize = 100;

/// Selects events.
#[derive(Clone, Debug, Default)]
pub struct Query {
    /// Events since this Unix time.
    pub since: Option<f64>,
    /// Events until this Unix time.
    pub until: Option<f64>,
    /// Events of this container: its name, in a pod also `POD/NAME` or `NAMESPACE/POD/NAME`. If no container has this name: the prefix of
    /// an id; all containers of a pod, by `POD` or `NAMESPACE/POD`; a name before a rename.
    pub container: Option<String>,
    /// Only events of which `memledger why` without a name is about the newest; see [`LedgerEvent::is_notable`].
    pub only_notable: bool,
    /// Only events with these ids.
    pub ids: Vec<u64>,
    /// Maximum number, the newest. 0: all, in pages.
    pub limit: usize,
}

/// The result of opening a store for writing.
#[derive(Debug)]
pub struct OpenedStore {
    /// The store.
    pub store: Store,
    /// Its content.
    pub state: LedgerState,
    /// New path of a damaged file that was moved aside; the store is empty then.
    pub moved_aside: Option<PathBuf>,
    /// New path of a file of an older version that was moved aside; the store is empty then.
    pub older: Option<PathBuf>,
}

/// The store, owned by its single writer.
#[derive(Debug)]
pub struct Store {
    // dropped before the lock: fields are dropped in this order, and the file must be closed while the lock is held
    reader: StoreReader,
    lock: Option<Lock>,
}

impl Store {
    /// Opens or creates the store in a directory, for the single process that writes it.
    ///
    /// Waits up to `timeout` for another memledger that writes there: a container that is being replaced overlaps with
    /// its successor. Moves a damaged file, and one of an older version, aside and creates a new one, see [`OpenedStore`].
    ///
    /// # Errors
    /// See [`StoreError`]. Nothing was changed then, except that the directory may have been created.
    pub fn open(directory: &Path, timeout: Duration) -> Result<OpenedStore, StoreError> {
        schema::make_directory(directory)?;
        let lock = Some(Lock::take(directory, timeout)?);
        let path = directory.join(FILE);
        let opened = |(connection, state), moved_aside, older| OpenedStore {
            store: Store { reader: StoreReader::new(connection, path.clone()), lock },
            state,
            moved_aside,
            older,
        };
        let why = match schema::inspect_header(&path)? {
            FileKind::Ours => match connect(&path) {
                Ok(connected) => return Ok(opened(connected, None, None)),
                Err(StoreError::Corrupt { .. }) => Some(DAMAGED),
                Err(error) => return Err(error),
            },
            FileKind::Older => Some(OLDER),
            FileKind::Damaged => Some(DAMAGED),
            // without its database a journal is worthless, but SQLite would apply it to the new one
            FileKind::Nothing => schema::has_remains(&path).then_some(DAMAGED),
        };
        schema::create_unfinished(&path, |_| Ok(()))?;
        let aside = why.map(|why| schema::move_aside(&path, why, unix_now())).transpose()?;
        schema::finish(&path)?;
        let of = |kind| aside.clone().filter(|_| why == Some(kind));
        Ok(opened(connect(&path)?, of(DAMAGED), of(OLDER)))
    }

    /// Creates a store that is lost when the process exits.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn in_memory() -> Result<Self, StoreError> {
        let path = PathBuf::from(":memory:");
        let create = || {
            let connection = Connection::open_in_memory()?;
            schema::initialize(&connection)?;
            Ok(connection)
        };
        let connection = create().map_err(|error| StoreError::from_sqlite(&path, error))?;
        Ok(Self { reader: StoreReader::new(connection, path), lock: None })
    }

    /// Returns the part that reads.
    pub fn reader(&self) -> &StoreReader {
        &self.reader
    }

    /// Returns true if an error showed that the file is damaged; see [`Store::replace`].
    pub fn is_damaged(&self) -> bool {
        self.lock.is_some() && self.reader.is_damaged()
    }

    /// Moves the damaged file aside and writes a new one with this content. Returns the new path of the damaged file.
    ///
    /// # Errors
    /// The store cannot be used until this succeeds.
    pub fn replace(&mut self, content: &WriteBatch, last_id: u64) -> Result<PathBuf, StoreError> {
        let path = self.reader.path().to_path_buf();
        schema::create_unfinished(&path, |connection| {
            write(connection, content)?;
            set_last_id(connection, last_id)
        })?;
        // closed before it is moved: SQLite's locks belong to the open file
        let nothing = Connection::open_in_memory().map_err(|error| StoreError::from_sqlite(&path, error))?;
        self.reader = StoreReader::damaged(nothing, path.clone());
        let aside = schema::move_aside(&path, DAMAGED, unix_now())?;
        schema::finish(&path)?;
        self.reader = StoreReader::new(schema::connect_to_write(&path)?, path);
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
        let written = write(self.reader.connection_mut(), changes);
        self.reader.check(written)
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
        let removed = retention::retain(self.reader.connection_mut(), now_unix - keep_seconds, max_bytes);
        self.reader.check(removed)
    }

    /// Moves events and runs from the future to this Unix time: the clock was wrong when they were recorded. Returns how many.
    ///
    /// # Errors
    /// Nothing was changed.
    pub fn move_from_future(&mut self, now_unix: f64) -> Result<usize, StoreError> {
        let moved = move_from_future(self.reader.connection_mut(), now_unix);
        self.reader.check(moved)
    }
}

/// Corrects the times of the events from this id on, and of the runs that ended with them.
fn correct_times(transaction: &Transaction<'_>, first_id: u64, step: &ClockStep) -> rusqlite::Result<()> {
    let (since, until) = step.wrong();
    let mut next = first_id;
    loop {
        let bodies: Vec<(i64, String)> = transaction
            .prepare(
                "SELECT id, body FROM events WHERE id >= ?1 AND at BETWEEN ?2 AND ?3 ORDER BY id LIMIT ?4",
            )?
            .query_map(params![signed(next), since, until, limit(CHANGED_AT_ONCE)], |row| {
                Ok((row.get(0)?, row.get(1)?))
            })?
            .collect::<Result<_, _>>()?;
        let Some((last, _)) = bodies.last() else { break };
        next = unsigned(*last) + 1;
        let events = bodies.iter().filter_map(|(_, body)| serde_json::from_str::<LedgerEvent>(body).ok());
        let corrected = events.map(|mut event| {
            event.correct_times(step);
            event
        });
        write_events(transaction, &corrected.collect::<WriteBatch>().events)?;
    }
    let sql = "UPDATE runs SET ended = ended + ?1, body = json_set(body, '$.ended', ended + ?1) \
               WHERE json_valid(body) AND id >= ?2 AND ended BETWEEN ?3 AND ?4";
    transaction.execute(sql, params![step.seconds(), signed(first_id), since, until]).map(drop)
}

/// Gives a container another name in its events and runs.
fn rename(transaction: &Transaction<'_>, id: &ContainerId, identity: &Identity) -> rusqlite::Result<()> {
    let ids = |table: &str| -> rusqlite::Result<Vec<i64>> {
        let sql = format!("SELECT id FROM {table} WHERE container_id = ?1");
        transaction.prepare(&sql)?.query_map([id.as_str()], |row| row.get(0))?.collect()
    };
    let body = |table: &str, row: i64| -> rusqlite::Result<String> {
        let sql = format!("SELECT body FROM {table} WHERE id = ?1");
        transaction.prepare(&sql)?.query_row([row], |row| row.get(0))
    };
    for some in ids("events")?.chunks(CHANGED_AT_ONCE) {
        let mut batch = WriteBatch::default();
        for row in some {
            if let Ok(mut event) = serde_json::from_str::<LedgerEvent>(&body("events", *row)?) {
                event.rename(identity);
                batch.put_event(event);
            }
        }
        write_events(transaction, &batch.events)?;
    }
    for row in ids("runs")? {
        if let Ok(mut run) = serde_json::from_str::<RunRecord>(&body("runs", row)?) {
            run.rename(identity);
            runs::write(transaction, &BTreeMap::from([(unsigned(row), run)]))?;
        }
    }
    Ok(())
}

fn move_from_future(connection: &mut Connection, now_unix: f64) -> rusqlite::Result<usize> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let mut moved = 0;
    for (table, column) in [("events", "at"), ("runs", "ended")] {
        let sql = format!(
            "UPDATE {table} SET {column} = ?1, body = json_set(body, '$.{column}', ?1) \
             WHERE json_valid(body) AND {column} > ?1 + ?2"
        );
        moved += transaction.execute(&sql, params![now_unix, MIN_CLOCK_STEP])?;
    }
    transaction.commit()?;
    Ok(moved)
}

/// Opens a ledger for writing and reads its content.
fn connect(path: &Path) -> Result<(Connection, LedgerState), StoreError> {
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

fn write(connection: &mut Connection, batch: &WriteBatch) -> rusqlite::Result<()> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    for (first_id, step) in &batch.corrections {
        correct_times(&transaction, *first_id, step)?;
    }
    for (id, identity) in &batch.renames {
        rename(&transaction, id, identity)?;
    }
    write_events(&transaction, &batch.events)?;
    runs::write(&transaction, &batch.runs)?;
    state::write(&transaction, &batch.state)?;
    transaction.commit()
}

fn write_events(
    transaction: &Transaction<'_>,
    events: &BTreeMap<u64, Option<LedgerEvent>>,
) -> rusqlite::Result<()> {
    let mut remove = transaction.prepare("DELETE FROM events WHERE id = ?1")?;
    let mut remove_run = transaction.prepare("DELETE FROM runs WHERE id = ?1")?;
    let mut put = transaction.prepare(
        "INSERT INTO events (id, at, settled, notable, container_name, container_id, body) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7) \
         ON CONFLICT (id) DO UPDATE SET at = excluded.at, settled = excluded.settled, notable = excluded.notable, \
         container_name = excluded.container_name, container_id = excluded.container_id, body = excluded.body \
         WHERE body <> excluded.body",
    )?;
    for (id, event) in events {
        let Some(event) = event else {
            remove.execute([signed(*id)])?;
            remove_run.execute([signed(*id)])?;
            continue;
        };
        let (settled, notable) = (event.settled(), event.is_notable());
        let subject = event.subject();
        let name = subject.map(|subject| &*subject.identity.name);
        let container = subject.map(|subject| &*subject.container_id);
        put.execute(params![signed(*id), event.at(), settled, notable, name, container, to_json(event)?])?;
    }
    Ok(())
}

fn to_json(value: &impl serde::Serialize) -> rusqlite::Result<String> {
    serde_json::to_string(value).map_err(|error| rusqlite::Error::ToSqlConversionFailure(error.into()))
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
