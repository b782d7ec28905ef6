//! Retention: removes events and records of runs above the maximum age, then the oldest above the maximum size.
//!
//! Events that are not settled are kept whatever their age.

use std::ops::Range;

use rusqlite::{Connection, params};

use super::runs;
use super::schema::pragma;
use crate::clock::EARLIEST_TIME;

/// Maximum number of events per transaction, so that readers and commits never wait long.
const BATCH: i64 = 500;
/// Maximum number of records of runs; each has about 8 KiB.
const MAX_RUNS: usize = 5_000;
/// Maximum number of pages that are released per transaction.
const PAGES: u32 = 1000;

/// Removes settled events and runs from before `cutoff`, then the oldest of both while more than `most_bytes` are used.
pub fn retain(connection: &mut Connection, cutoff: f64, most_bytes: u64) -> rusqlite::Result<usize> {
    let too_old = EARLIEST_TIME..cutoff;
    let mut removed = runs::remove(connection, &too_old, MAX_RUNS, 0)?;
    loop {
        let gone = remove(connection, &too_old, BATCH)?;
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
        let records = runs::count(connection)?;
        // the same share of both
        let excess = (used - most_bytes) as f64 / used as f64;
        let share = |rows: i64| ((rows as f64 * excess) as i64).clamp(1, BATCH);
        let gone = remove(connection, &(f64::MIN..f64::MAX), share(events))?
            + runs::remove(connection, &(0.0..0.0), MAX_RUNS, share(records))?;
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

fn remove(connection: &Connection, times: &Range<f64>, most: i64) -> rusqlite::Result<usize> {
    let sql = "DELETE FROM events WHERE id IN \
               (SELECT id FROM events WHERE settled = 1 AND at >= ?1 AND at < ?2 ORDER BY at, id LIMIT ?3)";
    connection.prepare(sql)?.execute(params![times.start, times.end, most])
}

/// Returns the used bytes, without free pages.
fn used_bytes(connection: &Connection) -> rusqlite::Result<i64> {
    let pages = pragma(connection, "page_count")? - pragma(connection, "freelist_count")?;
    Ok(pages * pragma(connection, "page_size")?)
}

/// Releases the free pages of the file.
fn give_back(connection: &Connection) -> rusqlite::Result<()> {
    let mut free = pragma(connection, "freelist_count")?;
    while free > 0 {
        // each row of the result releases one page
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
