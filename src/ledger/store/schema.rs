//! The database file: detection, creation, opening and migration.
//!
//! A new file is created under another name and renamed when it is complete, so that a file with the final name is
//! complete.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, OpenFlags, TransactionBehavior};

use super::error::{StoreError, directory_of};

/// "mldg" in the header of each of our files.
const APPLICATION_ID: u32 = 0x6d6c_6467;

/// The migrations, one per schema version, starting with the empty file. A released migration is never changed.
///
/// `AUTOINCREMENT` keeps the highest event id even after its row was removed.
pub(super) const MIGRATIONS: &[&str] = &[FIRST_SCHEMA, TYPED_TABLES, RUNS];

const FIRST_SCHEMA: &str = "
    CREATE TABLE events (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        at REAL NOT NULL,
        settled INTEGER NOT NULL,
        container_name TEXT,
        container_id TEXT,
        body TEXT NOT NULL
    ) STRICT;
    CREATE INDEX events_by_time ON events (at);
    CREATE INDEX events_by_name ON events (container_name, at) WHERE container_name IS NOT NULL;
    CREATE INDEX events_by_container ON events (container_id, at) WHERE container_id IS NOT NULL;
    CREATE INDEX events_unsettled ON events (id) WHERE settled = 0;
    CREATE TABLE totals (key TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;
    CREATE TABLE notes (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
";

/// One table per kind of state in place of `notes`, and new names of fields of events.
const TYPED_TABLES: &str = "
    CREATE TABLE container_counters (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
    CREATE TABLE containers (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
    CREATE TABLE pending_kills (key INTEGER PRIMARY KEY, value TEXT NOT NULL) STRICT;
    CREATE TABLE cgroup_kills (key INTEGER PRIMARY KEY, value INTEGER NOT NULL) STRICT;
    CREATE TABLE accounting (key INTEGER PRIMARY KEY, value TEXT NOT NULL) STRICT;
    CREATE TABLE runtime_cursors (key TEXT PRIMARY KEY, value REAL NOT NULL) STRICT, WITHOUT ROWID;
    CREATE TABLE follower_cursors (key TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;
    CREATE TABLE started_at (key INTEGER PRIMARY KEY, value REAL NOT NULL) STRICT;
    INSERT INTO container_counters SELECT substr(key, 6), value FROM notes WHERE key LIKE 'name:%';
    INSERT INTO containers SELECT substr(key, 5), value FROM notes WHERE key LIKE 'run:%';
    INSERT OR IGNORE INTO pending_kills
        SELECT CAST(substr(key, 6) AS INTEGER), value FROM notes WHERE key LIKE 'open:%';
    INSERT OR IGNORE INTO cgroup_kills
        SELECT CAST(substr(key, 9) AS INTEGER), CAST(value AS INTEGER) FROM notes WHERE key LIKE 'counter:%';
    INSERT INTO accounting SELECT 1, value FROM notes WHERE key = 'account';
    INSERT INTO runtime_cursors SELECT substr(key, 7), CAST(value AS REAL) FROM notes WHERE key LIKE 'since:%';
    INSERT INTO follower_cursors
        SELECT 'otlp ' || substr(key, 14), CAST(value AS INTEGER) FROM notes WHERE key LIKE 'acknowledged:%';
    INSERT INTO started_at SELECT 1, CAST(value AS REAL) FROM notes WHERE key = 'begun';
    DROP TABLE notes;
    UPDATE events SET body = json_remove(json_set(body, '$.owner',
        replace(json_extract(body, '$.whose'), 'open', 'pending')), '$.whose', '$.exchangeable')
        WHERE json_valid(body) AND json_extract(body, '$.whose') IS NOT NULL;
    UPDATE events SET body = json_remove(json_set(body, '$.stop_signals',
        json(json_extract(body, '$.asked_signals'))), '$.asked_signals')
        WHERE json_valid(body) AND json_extract(body, '$.asked_signals') IS NOT NULL;
";

/// Records of runs that ended, by the id of the exit.
const RUNS: &str = "
    CREATE TABLE runs (id INTEGER PRIMARY KEY, ended REAL NOT NULL, body TEXT NOT NULL) STRICT;
    CREATE INDEX runs_by_end ON runs (ended, id);
";

/// Suffix of the name of a file that is being created.
const UNFINISHED: &str = ".new";
/// A larger file is not checked at the start, which would take seconds; its damage is detected on access.
const MAX_CHECKED: u64 = 256 << 20;
/// How long to wait for a lock of another program.
pub const BUSY: Duration = Duration::from_secs(5);

/// The kind of file at the ledger's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// There is no file.
    Nothing,
    /// A ledger, by its header.
    Ours,
    /// An empty file, or one whose beginning is lost, as after a crash of the machine.
    Damaged,
}

/// Creates the state directory if it does not exist.
///
/// Only owner and group get access: the ledger contains process names, which the API too shows only to the host itself.
/// An existing directory keeps its mode.
pub fn make_directory(directory: &Path) -> Result<(), StoreError> {
    let made = DirBuilder::new().recursive(true).mode(0o750).create(directory);
    made.map_err(|source| StoreError::Directory { directory: directory.to_path_buf(), source })
}

/// Reads the header of the file, without SQLite, which would write.
///
/// Do not call it while this process has the file open: closing it would release SQLite's locks.
pub fn inspect_header(path: &Path) -> Result<FileKind, StoreError> {
    let mut header = Vec::with_capacity(100);
    let read = File::open(path).and_then(|file| file.take(100).read_to_end(&mut header));
    match read {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(FileKind::Nothing),
        Err(source) => {
            return Err(StoreError::NotReadable { path: path.to_path_buf(), source: source.into() });
        }
        Ok(_) => {}
    }
    const MAGIC: &[u8] = b"SQLite format 3\0";
    let foreign = |why: String| Err(StoreError::Foreign { path: path.to_path_buf(), why });
    let number =
        |at: usize| header.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_be_bytes);
    if header.iter().all(|byte| *byte == 0) || (header.len() < 100 && header.starts_with(MAGIC)) {
        return Ok(FileKind::Damaged);
    }
    if !header.starts_with(MAGIC) {
        return foreign("not an SQLite file".to_owned());
    }
    match (number(68), number(60)) {
        (Some(APPLICATION_ID), Some(schema)) => {
            check_version(path, schema.into())?;
            Ok(FileKind::Ours)
        }
        (id, _) => foreign(format!("SQLite application id {:#x}", id.unwrap_or_default())),
    }
}

/// Checks that the schema version is supported.
fn check_version(path: &Path, schema: i64) -> Result<(), StoreError> {
    let newest = MIGRATIONS.len() as i64;
    if schema <= newest {
        Ok(())
    } else {
        Err(StoreError::Newer { path: path.to_path_buf(), schema, newest })
    }
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Suffixes of the files that SQLite keeps beside the database: its journal, and those of a write-ahead log, which earlier
/// versions used.
const COMPANIONS: [&str; 3] = ["-journal", "-wal", "-shm"];

/// Returns true if there is a journal or a write-ahead log with content.
pub fn has_remains(path: &Path) -> bool {
    let has_content = |suffix| fs::metadata(beside(path, suffix)).is_ok_and(|file| file.len() > 0);
    ["-journal", "-wal"].into_iter().any(has_content)
}

/// Renames the file and those beside it. Returns the new path.
pub fn move_aside(path: &Path, unix_seconds: u64) -> Result<PathBuf, StoreError> {
    let mut number = unix_seconds;
    let mut target = beside(path, &format!(".corrupt-{number}"));
    while COMPANIONS.iter().chain(&[""]).any(|suffix| beside(&target, suffix).exists()) {
        number += 1;
        target = beside(path, &format!(".corrupt-{number}"));
    }
    for suffix in COMPANIONS.into_iter().chain([""]) {
        match fs::rename(beside(path, suffix), beside(&target, suffix)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(StoreError::writing(path, error));
            }
            _ => {}
        }
    }
    Ok(target)
}

/// Creates a store with the newest schema under another name, for [`finish`].
pub fn create_unfinished(
    path: &Path,
    fill: impl FnOnce(&mut Connection) -> rusqlite::Result<()>,
) -> Result<(), StoreError> {
    let unfinished = beside(path, UNFINISHED);
    for suffix in COMPANIONS.into_iter().chain([""]) {
        match fs::remove_file(beside(&unfinished, suffix)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(StoreError::writing(path, error));
            }
            _ => {}
        }
    }
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o640);
    options.open(&unfinished).map_err(|error| StoreError::writing(path, error))?;
    let make = || {
        let mut connection = Connection::open_with_flags(&unfinished, write_flags())?;
        initialize(&connection)?;
        configure(&connection)?;
        migrate(&mut connection)?;
        fill(&mut connection)?;
        connection.close().map_err(|(_, error)| error)
    };
    make().map_err(|error| StoreError::from_sqlite(path, error))
}

/// Gives the store of [`create_unfinished`] its final name.
pub fn finish(path: &Path) -> Result<(), StoreError> {
    let _ = fs::remove_file(beside(path, &format!("{UNFINISHED}-journal"))); // it is empty
    let renamed = fs::rename(beside(path, UNFINISHED), path);
    let synced = renamed.and_then(|()| File::open(directory_of(path))?.sync_all());
    synced.map_err(|error| StoreError::writing(path, error))
}

fn write_flags() -> OpenFlags {
    OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX
}

/// Sets what must be set before the first table exists. A commit writes whole pages of many small tables, so they are
/// small.
pub fn initialize(connection: &Connection) -> rusqlite::Result<()> {
    connection.execute_batch(&format!(
        "PRAGMA page_size = 1024; PRAGMA auto_vacuum = INCREMENTAL; PRAGMA application_id = {APPLICATION_ID};"
    ))
}

/// Configures a connection that writes. A commit ends when its journal is truncated on disk. Not a write-ahead log, because its
/// index is a mapped file: see docs/decisions/0028.
pub fn configure(connection: &Connection) -> rusqlite::Result<()> {
    connection.busy_timeout(BUSY)?;
    connection.execute_batch(
        "PRAGMA journal_mode = TRUNCATE; PRAGMA synchronous = FULL; PRAGMA temp_store = MEMORY; \
         PRAGMA trusted_schema = OFF; PRAGMA cell_size_check = ON;",
    )
}

/// Migrates the file to the newest schema, one transaction per version.
pub fn migrate(connection: &mut Connection) -> rusqlite::Result<()> {
    let has = pragma(connection, "user_version")?;
    let steps = (1..).zip(MIGRATIONS).skip_while(|(number, _)| *number <= has);
    for (number, step) in steps {
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        transaction.execute_batch(step)?;
        transaction.execute_batch(&format!("PRAGMA user_version = {number}"))?;
        transaction.commit()?;
    }
    Ok(())
}

/// Returns the value of a numeric pragma.
pub fn pragma(connection: &Connection, name: &str) -> rusqlite::Result<i64> {
    connection.pragma_query_value(None, name, |row| row.get(0))
}

/// Opens a file for writing that [`inspect_header`] recognized as a ledger.
pub fn connect_to_write(path: &Path) -> Result<Connection, StoreError> {
    if has_remains(path) {
        // a newer schema may exist only in a write-ahead log, and a writer would copy that into the file
        drop(connect_to_read(path, BUSY)?);
    }
    let wrap = |error| StoreError::from_sqlite(path, error);
    let mut connection = Connection::open_with_flags(path, write_flags()).map_err(wrap)?;
    configure(&connection).map_err(wrap)?;
    let size = fs::metadata(path).map_or(0, |metadata| metadata.len());
    if size <= MAX_CHECKED {
        let found: String =
            connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0)).map_err(wrap)?;
        if found != "ok" {
            return Err(StoreError::Corrupt { path: path.to_path_buf(), source: found.into() });
        }
    }
    migrate(&mut connection).map_err(wrap)?;
    Ok(connection)
}

/// Opens a file for reading, after checking that it is a ledger with a supported schema. Rolls a transaction back that a crash has
/// interrupted, as any reader of SQLite must.
pub fn connect_to_read(path: &Path, busy_timeout: Duration) -> Result<Connection, StoreError> {
    let refused = |error: rusqlite::Error| match StoreError::from_sqlite(path, error) {
        StoreError::NotWritable { source, .. } => {
            StoreError::NotReadable { path: path.to_path_buf(), source }
        }
        other => other,
    };
    match fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(StoreError::NoLedger { directory: directory_of(path) });
        }
        Err(source) => {
            return Err(StoreError::NotReadable { path: path.to_path_buf(), source: source.into() });
        }
        Ok(_) => {}
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let open = |path: &Path, flags| {
        let connection = Connection::open_with_flags(path, flags)?;
        connection.busy_timeout(busy_timeout)?;
        let (id, schema) = (pragma(&connection, "application_id")?, pragma(&connection, "user_version")?);
        Ok::<_, rusqlite::Error>((connection, id, schema))
    };
    let opened = match open(path, flags) {
        Err(error) if error.sqlite_error_code() == Some(ErrorCode::ReadOnly) => open(path, write_flags()),
        opened => opened,
    };
    let (connection, id, schema) = match opened {
        Err(error) if error.sqlite_error_code() == Some(ErrorCode::NotADatabase) => {
            return Err(StoreError::Foreign {
                path: path.to_path_buf(),
                why: "not an SQLite file".to_owned(),
            });
        }
        opened => opened.map_err(refused)?,
    };
    if id != i64::from(APPLICATION_ID) {
        let why = format!("SQLite application id {id:#x}");
        return Err(StoreError::Foreign { path: path.to_path_buf(), why });
    }
    check_version(path, schema)?;
    Ok(connection)
}
