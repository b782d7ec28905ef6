//! Shows a ledger with changes that are not written to it.
//!
//! The changes are in a database in memory, to which the file is attached for reading. Views of both stand before the tables of the same
//! names, so every query sees one ledger.

use std::path::Path;
use std::time::Duration;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use rusqlite::{Connection, ErrorCode, params};

use super::{StoreError, StoreReader, WriteBatch, schema, signed, write};

/// What stands for itself in the path of a URI.
const IN_PATH: &AsciiSet = &NON_ALPHANUMERIC.remove(b'/').remove(b'.').remove(b'-').remove(b'_');

/// The names that the queries use.
const VIEWS: &str = "
    CREATE TEMP VIEW events AS SELECT * FROM main.events
        UNION ALL SELECT * FROM recorded.events WHERE id NOT IN (SELECT id FROM temp.replaced_events);
    CREATE TEMP VIEW runs AS SELECT * FROM main.runs
        UNION ALL SELECT * FROM recorded.runs AS run WHERE id NOT IN (SELECT id FROM temp.replaced_runs) AND NOT EXISTS
        (SELECT 1 FROM main.runs AS newer WHERE newer.container_id = run.container_id AND newer.run_number = run.run_number);
    CREATE TEMP VIEW state AS SELECT * FROM main.state
        UNION ALL SELECT * FROM recorded.state AS row WHERE NOT EXISTS
        (SELECT 1 FROM main.state AS newer WHERE newer.kind = row.kind AND newer.key = row.key)
        AND NOT EXISTS (SELECT 1 FROM temp.removed_state AS gone WHERE gone.kind = row.kind AND gone.key = row.key);
";

impl StoreReader {
    /// Reads a ledger that is in no file.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn in_memory(changes: &WriteBatch) -> Result<Self, StoreError> {
        let mut store = super::Store::in_memory()?;
        store.commit(changes)?;
        Ok(store.reader)
    }

    /// Reads the ledger of this reader with changes that are not written to it.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn with_changes(self, changes: &WriteBatch, busy_timeout: Duration) -> Result<Self, StoreError> {
        if changes.is_empty() {
            return Ok(self);
        }
        let path = self.path().to_path_buf();
        let laid = lay_over(&path, changes, busy_timeout);
        Ok(Self::new(laid.map_err(|error| StoreError::from_sqlite(&path, error))?, path))
    }
}

fn lay_over(path: &Path, changes: &WriteBatch, busy_timeout: Duration) -> rusqlite::Result<Connection> {
    let mut connection = Connection::open_in_memory()?;
    connection.busy_timeout(busy_timeout)?;
    schema::initialize(&connection)?;
    attach(&connection, path)?;
    // what gets another name is laid over with it
    for id in changes.renames.keys() {
        for table in ["events", "runs"] {
            let sql =
                format!("INSERT INTO main.{table} SELECT * FROM recorded.{table} WHERE container_id = ?1");
            connection.execute(&sql, [id.as_str()])?;
        }
    }
    write(&mut connection, changes)?;
    connection.execute_batch(
        "CREATE TEMP TABLE replaced_events (id INTEGER PRIMARY KEY) STRICT;
         CREATE TEMP TABLE replaced_runs (id INTEGER PRIMARY KEY) STRICT;
         CREATE TEMP TABLE removed_state (kind TEXT, key TEXT, PRIMARY KEY (kind, key)) STRICT, WITHOUT ROWID;
         INSERT INTO temp.replaced_events SELECT id FROM main.events;
         INSERT INTO temp.replaced_runs SELECT id FROM main.runs;",
    )?;
    for (id, _) in changes.events.iter().filter(|(_, event)| event.is_none()) {
        for table in ["replaced_events", "replaced_runs"] {
            connection
                .execute(&format!("INSERT OR IGNORE INTO temp.{table} (id) VALUES (?1)"), [signed(*id)])?;
        }
    }
    let mut remove = connection.prepare("INSERT INTO temp.removed_state (kind, key) VALUES (?1, ?2)")?;
    for ((kind, key), _) in changes.state.iter().filter(|(_, value)| value.is_none()) {
        remove.execute(params![kind.label(), key])?;
    }
    drop(remove);
    connection.execute_batch(VIEWS)?;
    Ok(connection)
}

/// Attaches the file. A transaction that a crash has interrupted is rolled back, as by any reader of SQLite, which writes.
fn attach(connection: &Connection, path: &Path) -> rusqlite::Result<()> {
    let attach = |mode: &str| {
        let path = percent_encode(path.as_os_str().as_encoded_bytes(), IN_PATH);
        let uri = format!("file:{path}?mode={mode}");
        connection.execute("ATTACH DATABASE ?1 AS recorded", [uri])?;
        connection.query_row("SELECT count(*) FROM recorded.sqlite_schema", [], |_| Ok(()))
    };
    match attach("ro") {
        Err(error) if error.sqlite_error_code() == Some(ErrorCode::ReadOnly) => {
            let _ = connection.execute("DETACH DATABASE recorded", []); // if it was attached
            attach("rw")
        }
        attached => attached,
    }
}
