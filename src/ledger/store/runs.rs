//! Records of runs: one row each, written with the exit. Runs in progress are in the table of containers.

use std::collections::BTreeMap;

use rusqlite::{Connection, Transaction, params};

use super::{limit, signed};
use crate::discover::ContainerId;
use crate::ledger::container_table::ContainerState;
use crate::ledger::run_record::RunRecord;

/// Selects records of runs.
#[derive(Clone, Debug, Default)]
pub struct RunQuery {
    /// Runs that are in progress, or that ended since this Unix time.
    pub since: Option<f64>,
    /// A run, a group, or a container: see [`RunRecord::matches`].
    pub wanted: Option<String>,
    /// Maximum number, the newest. 0: all.
    pub limit: usize,
}

/// Writes records; one that exists is replaced.
pub fn write(transaction: &Transaction<'_>, runs: &BTreeMap<u64, RunRecord>) -> rusqlite::Result<()> {
    let mut statement = transaction.prepare(
        "INSERT INTO runs (id, ended, body) VALUES (?1, ?2, ?3) \
         ON CONFLICT (id) DO UPDATE SET ended = excluded.ended, body = excluded.body",
    )?;
    for (id, run) in runs {
        let body = serde_json::to_string(run)
            .map_err(|error| rusqlite::Error::ToSqlConversionFailure(error.into()))?;
        statement.execute(params![signed(*id), run.ended.unwrap_or(0.0), body])?;
    }
    Ok(())
}

/// Returns the newest selected records, oldest first; those in progress are last. One that cannot be parsed is logged and skipped.
pub fn select(connection: &Connection, query: &RunQuery) -> rusqlite::Result<Vec<RunRecord>> {
    let wanted = |run: &RunRecord| query.wanted.as_deref().is_none_or(|wanted| run.matches(wanted));
    let mut runs = running(connection)?;
    runs.retain(wanted);
    let started = |run: &RunRecord| run.subject.started.unwrap_or(f64::MIN);
    runs.sort_by(|one, other| started(other).total_cmp(&started(one)));
    let max = if query.limit == 0 { usize::MAX } else { query.limit };
    let mut statement =
        connection.prepare("SELECT id, body FROM runs WHERE ended >= ?1 ORDER BY ended DESC, id DESC")?;
    let mut rows = statement.query([query.since.unwrap_or(f64::MIN)])?;
    while runs.len() < max
        && let Some(row) = rows.next()?
    {
        let (id, body): (i64, String) = (row.get(0)?, row.get(1)?);
        match serde_json::from_str(&body) {
            Ok(run) => runs.extend(Some(run).filter(wanted)),
            Err(error) => tracing::error!(run = id, %error, "record of a run is unreadable; skipped"),
        }
    }
    runs.truncate(max);
    runs.reverse();
    Ok(runs)
}

/// Returns the runs in progress.
fn running(connection: &Connection) -> rusqlite::Result<Vec<RunRecord>> {
    let mut statement = connection.prepare("SELECT key, value FROM containers")?;
    let mut rows = statement.query([])?;
    let mut running = Vec::new();
    while let Some(row) = rows.next()? {
        let (id, state): (String, String) = (row.get(0)?, row.get(1)?);
        // an unreadable one is counted when memledger serve loads it
        if let Ok(state) = serde_json::from_str::<ContainerState>(&state) {
            running.extend(RunRecord::of_running(&ContainerId::new(&id), &state));
        }
    }
    Ok(running)
}

/// Returns the number of records.
pub fn count(connection: &Connection) -> rusqlite::Result<i64> {
    connection.query_row("SELECT count(*) FROM runs", [], |row| row.get(0))
}

/// Removes records of runs that ended before `cutoff`, then the oldest above `max`, then `more` of the oldest.
pub fn remove(connection: &Connection, cutoff: f64, max: usize, more: i64) -> rusqlite::Result<usize> {
    let aged = connection.prepare("DELETE FROM runs WHERE ended < ?1")?.execute([cutoff])?;
    let excess = (count(connection)? - limit(max)).max(0) + more;
    let sql = "DELETE FROM runs WHERE id IN (SELECT id FROM runs ORDER BY ended, id LIMIT ?1)";
    Ok(aged + connection.prepare(sql)?.execute([excess])?)
}
