//! The file: whether it is ours, how it is made, opened and brought to the newest schema.
//!
//! A new file is made under another name and renamed when it is complete, so that under its own name it is always whole.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, OpenFlags, TransactionBehavior};

use super::error::{StoreError, directory_of};

/// "mldg": stands in the header of each of our files.
const APPLICATION_ID: u32 = 0x6d6c_6467;

/// One step per schema number, from the empty file on. A step that was released is never changed.
///
/// `AUTOINCREMENT` remembers the highest number of an event also after its row was removed.
const MIGRATIONS: &[&str] = &["
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
"];

/// A larger file is not looked through at the start, which would take seconds; damage shows when it is met.
const MOST_CHECKED: u64 = 256 << 20;
/// How long another program's lock is waited for.
const BUSY: Duration = Duration::from_secs(5);

/// What stands under the name of our file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing.
    Nothing,
    /// A file that says it is ours.
    Ours,
    /// A file without contents, or one whose beginning was lost, as a crash of the machine leaves them.
    Damaged,
}

/// Makes the state directory if it is not there.
///
/// For its owner and group only: process names stand in the ledger, which the API too shows only to the host itself.
/// A directory that is there keeps its mode.
pub fn make_directory(directory: &Path) -> Result<(), StoreError> {
    let made = DirBuilder::new().recursive(true).mode(0o750).create(directory);
    made.map_err(|source| StoreError::Directory { directory: directory.to_path_buf(), source })
}

/// Looks at the first bytes of the file, without SQLite, which would write.
///
/// Not while this process has the file open: closing it again would give back SQLite's locks.
pub fn examine(path: &Path) -> Result<Found, StoreError> {
    let mut header = Vec::with_capacity(100);
    let read = File::open(path).and_then(|file| file.take(100).read_to_end(&mut header));
    match read {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Found::Nothing),
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
        return Ok(Found::Damaged);
    }
    if !header.starts_with(MAGIC) {
        return foreign("no SQLite file".to_owned());
    }
    match (number(68), number(60)) {
        (Some(APPLICATION_ID), Some(schema)) => {
            known(path, schema.into())?;
            Ok(Found::Ours)
        }
        (id, _) => foreign(format!("SQLite application id {:#x}", id.unwrap_or_default())),
    }
}

/// Whether we know a schema.
fn known(path: &Path, schema: i64) -> Result<(), StoreError> {
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

/// True if a write-ahead log or its index lies there.
pub fn has_remains(path: &Path) -> bool {
    ["-wal", "-shm"].iter().any(|suffix| beside(path, suffix).exists())
}

const MARK: &str = ".damaged";

/// Remembers for the next start that the file is damaged, as far as the disk lets it.
pub fn mark(path: &Path) {
    let _ = File::create(beside(path, MARK));
}

/// Whether the file was found to be damaged while it was used.
pub fn is_marked(path: &Path) -> bool {
    beside(path, MARK).exists()
}

/// Renames the file, its write-ahead log and its index. Returns the file's new name.
pub fn move_aside(path: &Path, unix_seconds: u64) -> Result<PathBuf, StoreError> {
    let mut number = unix_seconds;
    let mut target = beside(path, &format!(".corrupt-{number}"));
    while ["", "-wal", "-shm"].iter().any(|suffix| beside(&target, suffix).exists()) {
        number += 1;
        target = beside(path, &format!(".corrupt-{number}"));
    }
    for suffix in ["-wal", "-shm", ""] {
        match fs::rename(beside(path, suffix), beside(&target, suffix)) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(StoreError::writing(path, error));
            }
            _ => {}
        }
    }
    let _ = fs::remove_file(beside(path, MARK));
    Ok(target)
}

/// Makes a new, empty store of the newest schema.
pub fn create(path: &Path) -> Result<(), StoreError> {
    let unfinished = beside(path, ".new");
    let refused = |error| StoreError::writing(path, error);
    for suffix in ["", "-wal", "-shm", "-journal"] {
        match fs::remove_file(beside(&unfinished, suffix)) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(refused(error)),
            _ => {}
        }
    }
    OpenOptions::new().write(true).create_new(true).mode(0o640).open(&unfinished).map_err(refused)?;
    let make = || {
        let mut connection = Connection::open_with_flags(&unfinished, write_flags())?;
        found(&connection)?;
        configure(&connection)?;
        migrate(&mut connection)?;
        connection.close().map_err(|(_, error)| error)
    };
    make().map_err(|error| StoreError::of(path, error))?;
    fs::rename(&unfinished, path).map_err(refused)?;
    File::open(directory_of(path)).and_then(|directory| directory.sync_all()).map_err(refused)
}

fn write_flags() -> OpenFlags {
    OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX
}

/// What can only be set before there is a table.
pub fn found(connection: &Connection) -> rusqlite::Result<()> {
    connection.execute_batch(&format!(
        "PRAGMA auto_vacuum = INCREMENTAL; PRAGMA application_id = {APPLICATION_ID};"
    ))
}

/// What holds for a connection that writes.
pub fn configure(connection: &Connection) -> rusqlite::Result<()> {
    connection.busy_timeout(BUSY)?;
    connection.execute_batch(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA journal_size_limit = 4194304; \
         PRAGMA temp_store = MEMORY; PRAGMA trusted_schema = OFF; PRAGMA cell_size_check = ON;",
    )
}

/// Brings the file to the newest schema, one transaction per step.
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

/// A pragma that is a number.
pub fn pragma(connection: &Connection, name: &str) -> rusqlite::Result<i64> {
    connection.pragma_query_value(None, name, |row| row.get(0))
}

/// Opens a file that [`examine`] found to be ours.
pub fn connect_to_write(path: &Path) -> Result<Connection, StoreError> {
    if has_remains(path) {
        // a newer schema may stand in the write-ahead log only, and a writer would write that into the file
        drop(connect_to_read(path)?);
    }
    let wrap = |error| StoreError::of(path, error);
    let mut connection = Connection::open_with_flags(path, write_flags()).map_err(wrap)?;
    configure(&connection).map_err(wrap)?;
    let size = fs::metadata(path).map_or(0, |metadata| metadata.len());
    if size <= MOST_CHECKED {
        let found: String =
            connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0)).map_err(wrap)?;
        if found != "ok" {
            return Err(StoreError::Corrupt { path: path.to_path_buf(), source: found.into() });
        }
    }
    migrate(&mut connection).map_err(wrap)?;
    Ok(connection)
}

/// Opens a file for reading; also checks that it is ours and that we know its schema.
pub fn connect_to_read(path: &Path) -> Result<Connection, StoreError> {
    let refused = |error: rusqlite::Error| match StoreError::of(path, error) {
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
    let open = |name: &Path, flags| {
        let connection = Connection::open_with_flags(name, flags)?;
        connection.busy_timeout(BUSY)?;
        let (id, schema) = (pragma(&connection, "application_id")?, pragma(&connection, "user_version")?);
        Ok((connection, id, schema))
    };
    let opened = match open(path, flags) {
        // on a read-only file system no index can be made; without a log none is needed
        Err(error) if cannot_be_shared(&error) && !has_remains(path) => {
            open(&unchanging(path), flags | OpenFlags::SQLITE_OPEN_URI)
        }
        opened => opened,
    };
    let (connection, id, schema) = match opened {
        Err(error) if error.sqlite_error_code() == Some(ErrorCode::NotADatabase) => {
            return Err(StoreError::Foreign { path: path.to_path_buf(), why: "no SQLite file".to_owned() });
        }
        opened => opened.map_err(refused)?,
    };
    if id != i64::from(APPLICATION_ID) {
        let why = format!("SQLite application id {id:#x}");
        return Err(StoreError::Foreign { path: path.to_path_buf(), why });
    }
    known(path, schema)?;
    Ok(connection)
}

fn cannot_be_shared(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::ReadOnly | ErrorCode::CannotOpen))
}

/// The name under which SQLite reads a file that nobody writes, without its locks and its index.
fn unchanging(path: &Path) -> PathBuf {
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    let mut name = b"file:".to_vec();
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b'%' | b'?' | b'#' => name.extend(format!("%{byte:02x}").bytes()),
            _ => name.push(*byte),
        }
    }
    name.extend(b"?immutable=1");
    PathBuf::from(std::ffi::OsString::from_vec(name))
}
