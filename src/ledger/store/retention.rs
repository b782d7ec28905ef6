//! Retention: what is too old goes, then the oldest of what is too much.
//!
//! Events that are not settled stay whatever their age: more of them is still to be told.

use rusqlite::{Connection, params};

use super::schema::pragma;

/// Most events removed in one transaction: a reader or a commit never waits long.
const BATCH: i64 = 500;
/// Most pages given back in one transaction.
const PAGES: u32 = 1000;

/// Removes settled events from before `cutoff` and then the oldest while more than `most_bytes` are used.
pub fn retain(connection: &mut Connection, cutoff: f64, most_bytes: u64) -> rusqlite::Result<usize> {
    let mut removed = 0;
    loop {
        let gone = remove(connection, cutoff, BATCH)?;
        removed += gone;
        if gone < BATCH as usize {
            break;
        }
    }
    let most_bytes = i64::try_from(most_bytes).unwrap_or(i64::MAX);
    loop {
        let used = used_bytes(connection)?;
        if used <= most_bytes {
            break;
        }
        let events: i64 = connection.query_row("SELECT count(*) FROM events", [], |row| row.get(0))?;
        let each = (used / events.max(1)).max(1);
        let gone = remove(connection, f64::INFINITY, ((used - most_bytes) / each).clamp(1, BATCH))?;
        removed += gone;
        if gone == 0 {
            break;
        }
    }
    if removed > 0 {
        give_back(connection)?;
    }
    Ok(removed)
}

fn remove(connection: &Connection, cutoff: f64, most: i64) -> rusqlite::Result<usize> {
    let sql = "DELETE FROM events WHERE id IN \
               (SELECT id FROM events WHERE settled = 1 AND at < ?1 ORDER BY at, id LIMIT ?2)";
    connection.prepare(sql)?.execute(params![cutoff, most])
}

/// What the contents take, without free pages.
fn used_bytes(connection: &Connection) -> rusqlite::Result<i64> {
    let pages = pragma(connection, "page_count")? - pragma(connection, "freelist_count")?;
    Ok(pages * pragma(connection, "page_size")?)
}

/// Shortens the file by its free pages.
fn give_back(connection: &Connection) -> rusqlite::Result<()> {
    let mut free = pragma(connection, "freelist_count")?;
    while free > 0 {
        // each row that is asked for gives one page back
        let mut statement = connection.prepare(&format!("PRAGMA incremental_vacuum({PAGES})"))?;
        let mut rows = statement.query([])?;
        while rows.next()?.is_some() {}
        drop(rows);
        let left = pragma(connection, "freelist_count")?;
        if left >= free {
            break;
        }
        free = left;
    }
    Ok(())
}
