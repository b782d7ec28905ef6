//! The ledger on disk: SQLite in WAL mode, one file, one writer.
//!
//! WAL lets `memledger events` read while `memledger serve` writes. Every commit is synced to the disk before it returns
//! (`synchronous=FULL`): a fact is exported only after it cannot be lost, and commits are rare. An event is one row with
//! its JSON as it is served; what is searched for stands beside it in columns of its own.
//!
//! A file that memledger did not make, or that a newer one made, is never opened for writing. A damaged one is moved
//! aside, never deleted.
//!
//! Not here: what is written and when (`ledger`), and what to do without a usable directory (`cli`).

mod error;
mod lock;
mod retention;
mod schema;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, Row, TransactionBehavior, params};

use super::entries::Event;
use crate::clock::Moment;
pub use error::StoreError;
use lock::Lock;
use schema::Found;

/// Name of the file in the state directory.
pub const FILE: &str = "ledger.sqlite3";

/// What is written in one transaction. Everything in it is an absolute value, so that writing it twice changes nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Changes {
    /// New events, and events of which more is known now; the newer one of the same number wins.
    pub events: BTreeMap<u64, Event>,
    /// Totals by key.
    pub totals: BTreeMap<String, u64>,
    /// Everything else that must outlive a restart, by key; `None` removes it.
    pub notes: BTreeMap<String, Option<String>>,
}

impl Changes {
    /// True if there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty() && self.totals.is_empty() && self.notes.is_empty()
    }

    /// Adds later changes.
    pub fn merge(&mut self, later: Changes) {
        self.events.extend(later.events);
        self.totals.extend(later.totals);
        self.notes.extend(later.notes);
    }
}

/// What was in the store when it was opened.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Contents {
    /// Totals by key.
    pub totals: BTreeMap<String, u64>,
    /// Everything else by key.
    pub notes: BTreeMap<String, String>,
    /// Events that were not settled, by number.
    pub unsettled: Vec<Event>,
    /// The highest number that an event ever had, also if it was removed since; 0 if there was none.
    pub last_id: u64,
}

/// Which events are asked for.
#[derive(Clone, Debug, Default)]
pub struct Query {
    /// Not before this Unix time.
    pub since: Option<f64>,
    /// Only of this container: its name, in a pod `POD/NAME` or `NAMESPACE/POD/NAME` too; or, if none is named so, its id or
    /// the beginning of its id.
    pub container: Option<String>,
    /// At most so many, the newest. 0: all.
    pub most: usize,
}

/// A store that was opened for writing.
#[derive(Debug)]
pub struct Opened {
    /// The store.
    pub store: Store,
    /// What was in it.
    pub contents: Contents,
    /// Where the damaged file lies that stood in its place; the store is a new one then.
    pub moved_aside: Option<PathBuf>,
}

/// The store, as its one writer has it.
#[derive(Debug)]
pub struct Store {
    // before the lock: fields are dropped in this order, and the file must be closed while the lock is held
    connection: Connection,
    path: PathBuf,
    lock: Option<Lock>,
}

impl Store {
    /// Opens or makes the store in a directory, for the one process that writes it.
    ///
    /// While another memledger writes there, it is waited for as long as `patience`: a container that is replaced
    /// overlaps with its successor. A damaged file is moved aside and a new one begun; [`Opened::moved_aside`] says so.
    ///
    /// # Errors
    /// See [`StoreError`]; nothing was changed then, apart from a directory that was made.
    pub fn open(directory: &Path, patience: Duration) -> Result<Opened, StoreError> {
        schema::make_directory(directory)?;
        let lock = Some(Lock::take(directory, patience)?);
        let path = directory.join(FILE);
        let opened = |connection, contents, moved_aside| Opened {
            store: Store { connection, path: path.clone(), lock },
            contents,
            moved_aside,
        };
        let damaged = match schema::examine(&path)? {
            Found::Ours if schema::is_marked(&path) => true,
            Found::Ours => match connect(&path) {
                Ok((connection, contents)) => return Ok(opened(connection, contents, None)),
                Err(StoreError::Corrupt { .. }) => true,
                Err(error) => return Err(error),
            },
            Found::Damaged => true,
            // without its database a write-ahead log says nothing, but SQLite would take it for that of the new one
            Found::Nothing => schema::has_remains(&path),
        };
        let now = Moment::now().unix_whole_seconds();
        let moved_aside = if damaged { Some(schema::move_aside(&path, now)?) } else { None };
        schema::create(&path)?;
        let (connection, contents) = connect(&path)?;
        Ok(opened(connection, contents, moved_aside))
    }

    /// A store that ends with the process.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn in_memory() -> Result<Self, StoreError> {
        let path = PathBuf::from(":memory:");
        let wrap = |error| StoreError::of(&path, error);
        let mut connection = Connection::open_in_memory().map_err(wrap)?;
        schema::found(&connection).map_err(wrap)?;
        schema::configure(&connection).map_err(wrap)?;
        schema::migrate(&mut connection).map_err(wrap)?;
        Ok(Self { connection, path, lock: None })
    }

    /// Writes changes in one transaction, durable when it returns.
    ///
    /// # Errors
    /// Nothing was written. The same changes, merged with later ones, can be committed again: see [`StoreError::Full`].
    pub fn commit(&mut self, changes: &Changes) -> Result<(), StoreError> {
        if changes.is_empty() {
            return Ok(());
        }
        let path = self.path.clone();
        let events = changes.events.iter().map(|(id, event)| Ok((*id, event, body(&path, event)?)));
        let events = events.collect::<Result<Vec<_>, StoreError>>()?;
        self.write(changes, &events).map_err(|error| self.told(StoreError::of(&path, error)))
    }

    /// Marks the file if this error says that it is damaged: the look at the next start may not find what was met here.
    fn told(&self, error: StoreError) -> StoreError {
        if matches!(error, StoreError::Corrupt { .. }) && self.lock.is_some() {
            schema::mark(&self.path);
        }
        error
    }

    fn write(&mut self, changes: &Changes, events: &[(u64, &Event, String)]) -> rusqlite::Result<()> {
        let transaction = self.connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        {
            let mut event_is = transaction.prepare(
                "INSERT INTO events (id, at, settled, container_name, container_id, body) VALUES (?1, ?2, ?3, ?4, ?5, ?6) \
                 ON CONFLICT (id) DO UPDATE SET at = excluded.at, settled = excluded.settled, \
                 container_name = excluded.container_name, container_id = excluded.container_id, body = excluded.body \
                 WHERE body <> excluded.body",
            )?;
            for (id, event, body) in events {
                let subject = event.subject();
                let name = subject.map(|subject| &*subject.name.container_name);
                let container = subject.map(|subject| &*subject.container_id);
                event_is.execute(params![signed(*id), event.at(), event.settled(), name, container, body])?;
            }
            let mut total_is = transaction.prepare(
                "INSERT INTO totals (key, value) VALUES (?1, ?2) \
                 ON CONFLICT (key) DO UPDATE SET value = excluded.value WHERE value <> excluded.value",
            )?;
            for (key, value) in &changes.totals {
                total_is.execute(params![key, signed(*value)])?;
            }
            let mut note_is = transaction.prepare(
                "INSERT INTO notes (key, value) VALUES (?1, ?2) \
                 ON CONFLICT (key) DO UPDATE SET value = excluded.value WHERE value <> excluded.value",
            )?;
            let mut no_note = transaction.prepare("DELETE FROM notes WHERE key = ?1")?;
            for (key, value) in &changes.notes {
                match value {
                    Some(value) => note_is.execute(params![key, value])?,
                    None => no_note.execute(params![key])?,
                };
            }
        }
        transaction.commit()
    }

    /// The newest events that were asked for, oldest first.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn events(&self, query: &Query) -> Result<Vec<Event>, StoreError> {
        events(&self.connection, &self.path, query).map_err(|error| self.told(error))
    }

    /// As [`Store::events`], each as the JSON that stands in the store.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn bodies(&self, query: &Query) -> Result<Vec<String>, StoreError> {
        bodies(&self.connection, &self.path, query).map_err(|error| self.told(error))
    }

    /// Events with a higher number than `id`, by number, up to the first that is not settled: what a follower that
    /// remembers only one number has not seen yet.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn settled_after(&self, id: u64, most: usize) -> Result<Settled, StoreError> {
        settled_after(&self.connection, &self.path, id, most).map_err(|error| self.told(error))
    }

    /// When the oldest event was, in Unix seconds; `None` if there is none.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn oldest(&self) -> Result<Option<f64>, StoreError> {
        let found = self.connection.query_row("SELECT min(at) FROM events", [], |row| row.get(0));
        found.map_err(|error| self.told(StoreError::of(&self.path, error)))
    }

    /// Removes settled events that are older than `keep_seconds`, then the oldest ones until the rest fits into
    /// `most_bytes`, and gives the space back to the file system. Totals and notes stay. Returns how many were removed.
    ///
    /// Cheap when there is nothing to remove. Works in small transactions.
    ///
    /// # Errors
    /// Some may have been removed.
    pub fn retain(&mut self, now_unix: f64, keep_seconds: f64, most_bytes: u64) -> Result<usize, StoreError> {
        retention::retain(&mut self.connection, now_unix - keep_seconds, most_bytes)
            .map_err(|error| self.told(StoreError::of(&self.path, error)))
    }
}

/// What a follower gets.
#[derive(Debug, Default)]
pub struct Settled {
    /// By number.
    pub events: Vec<Event>,
    /// Numbers of events that lie between or behind them and cannot be understood: to be passed over, or a follower would
    /// never come further.
    pub unreadable: Vec<u64>,
}

/// The store, as anybody may read it, also while its writer runs.
///
#[derive(Debug)]
pub struct Reader {
    connection: Connection,
    path: PathBuf,
}

impl Reader {
    /// Opens the store in a directory for reading only.
    ///
    /// # Errors
    /// There is none, it cannot be read, or it is not memledger's.
    pub fn open(directory: &Path) -> Result<Self, StoreError> {
        let path = directory.join(FILE);
        let connection = schema::connect_to_read(&path)?;
        Ok(Self { connection, path })
    }

    /// The newest events that were asked for, oldest first.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn events(&self, query: &Query) -> Result<Vec<Event>, StoreError> {
        events(&self.connection, &self.path, query)
    }

    /// As [`Reader::events`], each as the JSON that stands in the store.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn bodies(&self, query: &Query) -> Result<Vec<String>, StoreError> {
        bodies(&self.connection, &self.path, query)
    }

    /// As [`Store::settled_after`].
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn settled_after(&self, id: u64, most: usize) -> Result<Settled, StoreError> {
        settled_after(&self.connection, &self.path, id, most)
    }

    /// What is in the store now.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn contents(&self) -> Result<Contents, StoreError> {
        contents(&self.connection, &self.path)
    }
}

/// Where this process's own ledger is read, for answers over HTTP.
#[derive(Clone, Debug)]
pub enum Archive {
    /// In a directory: each answer opens the file for itself, so that nobody waits for anybody.
    Disk(PathBuf),
    /// In memory: an answer and the ledger's thread take turns.
    Memory(Arc<Mutex<Store>>),
}

impl Archive {
    /// As [`Store::events`].
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn events(&self, query: &Query) -> Result<Vec<Event>, StoreError> {
        match self {
            // a panic of another holder leaves no half transaction: SQLite takes it back
            Archive::Memory(store) => store.lock().unwrap_or_else(PoisonError::into_inner).events(query),
            Archive::Disk(directory) => Reader::open(directory)?.events(query),
        }
    }

    /// As [`Store::bodies`].
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn bodies(&self, query: &Query) -> Result<Vec<String>, StoreError> {
        match self {
            Archive::Memory(store) => store.lock().unwrap_or_else(PoisonError::into_inner).bodies(query),
            Archive::Disk(directory) => Reader::open(directory)?.bodies(query),
        }
    }

    /// As [`Store::settled_after`].
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn settled_after(&self, id: u64, most: usize) -> Result<Settled, StoreError> {
        match self {
            Archive::Memory(store) => {
                store.lock().unwrap_or_else(PoisonError::into_inner).settled_after(id, most)
            }
            Archive::Disk(directory) => Reader::open(directory)?.settled_after(id, most),
        }
    }
}

/// Opens our own file for writing, brings it to our schema, and reads what is in it.
fn connect(path: &Path) -> Result<(Connection, Contents), StoreError> {
    let connection = schema::connect_to_write(path)?;
    let contents = contents(&connection, path)?;
    Ok((connection, contents))
}

fn contents(connection: &Connection, path: &Path) -> Result<Contents, StoreError> {
    let sql = "SELECT id, body FROM events WHERE settled = 0 ORDER BY id";
    let unsettled = rows(connection, path, sql, [])?;
    let read = || {
        let totals = connection.prepare("SELECT key, value FROM totals")?;
        let totals = pairs(totals, |row| Ok((row.get(0)?, unsigned(row.get(1)?))))?;
        let notes =
            pairs(connection.prepare("SELECT key, value FROM notes")?, |row| Ok((row.get(0)?, row.get(1)?)))?;
        let last_id = "SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'events'";
        let last_id = unsigned(connection.query_row(last_id, [], |row| row.get(0))?);
        Ok((totals, notes, last_id))
    };
    let (totals, notes, last_id) = read().map_err(|error| StoreError::of(path, error))?;
    Ok(Contents { totals, notes, unsettled, last_id })
}

fn pairs<V>(
    mut statement: rusqlite::Statement<'_>,
    pair: impl FnMut(&Row<'_>) -> rusqlite::Result<(String, V)>,
) -> rusqlite::Result<BTreeMap<String, V>> {
    statement.query_map([], pair)?.collect()
}

fn events(connection: &Connection, path: &Path, query: &Query) -> Result<Vec<Event>, StoreError> {
    parsed(path, matching(connection, query).map_err(|error| StoreError::of(path, error))?)
}

fn bodies(connection: &Connection, path: &Path, query: &Query) -> Result<Vec<String>, StoreError> {
    let found = matching(connection, query).map_err(|error| StoreError::of(path, error))?;
    Ok(found.into_iter().map(|(_, body)| body).collect())
}

fn settled_after(connection: &Connection, path: &Path, id: u64, most: usize) -> Result<Settled, StoreError> {
    let sql = "SELECT id, body FROM events WHERE id > ?1 AND id < \
               coalesce((SELECT min(id) FROM events WHERE settled = 0 AND id > ?1), 9223372036854775807) \
               ORDER BY id LIMIT ?2";
    let found = numbered(connection, sql, params![signed(id), limit(most)]);
    let mut settled = Settled::default();
    for (id, body) in found.map_err(|error| StoreError::of(path, error))? {
        match serde_json::from_str(&body) {
            Ok(event) => settled.events.push(event),
            Err(_) => settled.unreadable.push(unsigned(id)),
        }
    }
    Ok(settled)
}

/// Numbers and bodies of the events that are asked for, oldest first.
fn matching(connection: &Connection, query: &Query) -> rusqlite::Result<Vec<(i64, String)>> {
    let since = query.since.unwrap_or(f64::MIN);
    let most = limit(query.most);
    let wanted = query.container.as_deref().filter(|wanted| !wanted.is_empty());
    let mut found = match wanted {
        None => {
            let sql = "SELECT id, body FROM events WHERE at >= ?1 ORDER BY at DESC, id DESC LIMIT ?2";
            numbered(connection, sql, params![since, most])?
        }
        Some(wanted) if wanted.contains('/') => in_pod(connection, wanted, since, most)?,
        Some(wanted) => {
            let known = "SELECT EXISTS (SELECT 1 FROM events WHERE container_name = ?1)";
            let known: bool = connection.query_row(known, [wanted], |row| row.get(0))?;
            // a container named `cafe` is meant by that name, and not all whose id begins so
            let sql = if known {
                "SELECT id, body FROM events WHERE container_name = ?3 AND at >= ?1 AND ?4 IS NOT NULL \
                 ORDER BY at DESC, id DESC LIMIT ?2"
            } else {
                "SELECT id, body FROM events WHERE container_id >= ?3 AND container_id < ?4 AND at >= ?1 \
                 ORDER BY at DESC, id DESC LIMIT ?2"
            };
            let end = format!("{wanted}\u{10ffff}");
            numbered(connection, sql, params![since, most, wanted, end])?
        }
    };
    found.reverse();
    Ok(found)
}

/// Those of a container that is called by its pod too: no name has a slash in it.
fn in_pod(
    connection: &Connection,
    wanted: &str,
    since: f64,
    most: i64,
) -> rusqlite::Result<Vec<(i64, String)>> {
    let mut parts = wanted.rsplitn(3, '/');
    let (name, pod, namespace) = (parts.next(), parts.next(), parts.next());
    let sql = "SELECT id, body FROM events WHERE container_name = ?3 AND at >= ?1 \
               AND json_extract(body, '$.k8s_pod_name') = ?4 \
               AND (?5 IS NULL OR json_extract(body, '$.k8s_namespace_name') = ?5) \
               ORDER BY at DESC, id DESC LIMIT ?2";
    numbered(connection, sql, params![since, most, name, pod, namespace])
}

/// The rows of a query whose columns are the number and the body.
fn numbered(
    connection: &Connection,
    sql: &str,
    values: impl rusqlite::Params,
) -> rusqlite::Result<Vec<(i64, String)>> {
    let mut statement = connection.prepare(sql)?;
    statement.query_map(values, |row| Ok((row.get(0)?, row.get(1)?)))?.collect()
}

/// As [`numbered`], as events.
fn rows(
    connection: &Connection,
    path: &Path,
    sql: &str,
    values: impl rusqlite::Params,
) -> Result<Vec<Event>, StoreError> {
    parsed(path, numbered(connection, sql, values).map_err(|error| StoreError::of(path, error))?)
}

fn parsed(path: &Path, found: Vec<(i64, String)>) -> Result<Vec<Event>, StoreError> {
    let parse = |(id, body): (i64, String)| {
        serde_json::from_str(&body).map_err(|source| StoreError::Corrupt {
            path: path.to_path_buf(),
            source: format!("event {id}: {source}").into(),
        })
    };
    found.into_iter().map(parse).collect()
}

fn body(path: &Path, event: &Event) -> Result<String, StoreError> {
    serde_json::to_string(event)
        .map_err(|source| StoreError::Failed { path: path.to_path_buf(), source: source.into() })
}

/// SQLite's integers have a sign; no count comes near the end of them.
fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn unsigned(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

fn limit(most: usize) -> i64 {
    if most == 0 { -1 } else { signed(most as u64) }
}
