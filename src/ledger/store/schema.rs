//! The database file: detection, creation and opening.
//!
//! A new file is created under another name and renamed when it is complete, so that a file with the final name is
//! complete.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, OpenFlags};

use super::error::{StoreError, directory_of};

/// "mldg" in the header of each of our files.
const APPLICATION_ID: u32 = 0x6d6c_6467;

/// Version of the schema. A file of an older one is set aside: no version was published before this one.
pub(super) const VERSION: i64 = 7;

/// `AUTOINCREMENT` keeps the highest event id even after its row was removed.
const SCHEMA: &str = "
    CREATE TABLE events (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        at REAL NOT NULL,
        settled INTEGER NOT NULL,
        notable INTEGER NOT NULL,
        container_name TEXT,
        container_id TEXT,
        body TEXT NOT NULL
    ) STRICT;
    CREATE INDEX events_by_time ON events (at);
    CREATE INDEX events_by_name ON events (container_name, at) WHERE container_name IS NOT NULL;
    CREATE INDEX events_by_container ON events (container_id, at) WHERE container_id IS NOT NULL;
    CREATE INDEX events_unsettled ON events (id) WHERE settled = 0;
    CREATE INDEX events_notable ON events (at) WHERE notable = 1;
    CREATE TABLE runs (
        id INTEGER PRIMARY KEY,
        container_id TEXT NOT NULL,
        run_number INTEGER NOT NULL,
        corrected INTEGER NOT NULL DEFAULT 0,
        ended REAL NOT NULL,
        run TEXT NOT NULL,
        run_group TEXT NOT NULL,
        container_name TEXT NOT NULL,
        body TEXT NOT NULL,
        UNIQUE (container_id, run_number)
    ) STRICT;
    CREATE INDEX runs_by_end ON runs (ended, id);
    CREATE TABLE state (kind TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (kind, key))
        STRICT, WITHOUT ROWID;
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
    /// A ledger of an older version.
    Older,
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
            Ok(if i64::from(schema) < VERSION { FileKind::Older } else { FileKind::Ours })
        }
        (id, _) => foreign(format!("SQLite application id {:#x}", id.unwrap_or_default())),
    }
}

/// Checks that no newer version wrote the file.
fn check_version(path: &Path, schema: i64) -> Result<(), StoreError> {
    if schema <= VERSION {
        Ok(())
    } else {
        Err(StoreError::Newer { path: path.to_path_buf(), schema, newest: VERSION })
    }
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Suffixes of the files that SQLite keeps beside a database: without it they are worthless, but SQLite would apply them to another
/// one of its name.
const COMPANIONS: [&str; 3] = ["-journal", "-wal", "-shm"];

/// Returns true if there is a journal or a write-ahead log with content.
pub fn has_remains(path: &Path) -> bool {
    let has_content = |suffix| fs::metadata(beside(path, suffix)).is_ok_and(|file| file.len() > 0);
    ["-journal", "-wal"].into_iter().any(has_content)
}

/// Renames the file and those beside it. Returns the new path, which ends with `why` and the time.
pub fn move_aside(path: &Path, why: &str, unix_seconds: u64) -> Result<PathBuf, StoreError> {
    let mut number = unix_seconds;
    let mut target = beside(path, &format!(".{why}-{number}"));
    while COMPANIONS.iter().chain(&[""]).any(|suffix| beside(&target, suffix).exists()) {
        number += 1;
        target = beside(path, &format!(".{why}-{number}"));
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

/// Creates the tables of a new file. A commit writes whole pages of many small rows, so they are small.
pub fn initialize(connection: &Connection) -> rusqlite::Result<()> {
    connection.execute_batch(&format!(
        "PRAGMA page_size = 1024; PRAGMA auto_vacuum = INCREMENTAL; PRAGMA application_id = {APPLICATION_ID}; \
         PRAGMA user_version = {VERSION};"
    ))?;
    configure(connection)?;
    connection.execute_batch(SCHEMA)
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

/// Returns the value of a numeric pragma.
pub fn pragma(connection: &Connection, name: &str) -> rusqlite::Result<i64> {
    connection.pragma_query_value(None, name, |row| row.get(0))
}

/// Opens a file for writing that [`inspect_header`] recognized as a ledger.
pub fn connect_to_write(path: &Path) -> Result<Connection, StoreError> {
    let wrap = |error| StoreError::from_sqlite(path, error);
    let connection = Connection::open_with_flags(path, write_flags()).map_err(wrap)?;
    configure(&connection).map_err(wrap)?;
    let size = fs::metadata(path).map_or(0, |metadata| metadata.len());
    if size <= MAX_CHECKED {
        let found: String =
            connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0)).map_err(wrap)?;
        if found != "ok" {
            return Err(StoreError::Corrupt { path: path.to_path_buf(), source: found.into() });
        }
    }
    Ok(connection)
}

/// Opens a file for reading, after checking that it is a ledger of this version. Rolls a transaction back that a crash has
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
    if schema < VERSION {
        return Err(StoreError::NoLedger { directory: directory_of(path) }); // `memledger serve` sets it aside
    }
    Ok(connection)
}
