//! Records of runs: one row each, written with the exit. Runs in progress are in the table of containers.

use std::collections::BTreeMap;

use rusqlite::{Connection, Transaction, params};

use super::{limit, signed, unsigned};
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
    // a run is in both lists if its container was missing for a while and was taken for ended
    let is_same = |newer: &RunRecord, run: &RunRecord| {
        let (started, other) = (newer.subject.started, run.subject.started);
        newer.run == run.run && started == other && (newer.ended.is_none() || started.is_some())
    };
    let max = if query.limit == 0 { usize::MAX } else { query.limit };
    let mut statement =
        connection.prepare("SELECT id, body FROM runs WHERE ended >= ?1 ORDER BY ended DESC, id DESC")?;
    let mut rows = statement.query([query.since.unwrap_or(f64::MIN)])?;
    while runs.len() < max
        && let Some(row) = rows.next()?
    {
        let (id, body): (i64, String) = (row.get(0)?, row.get(1)?);
        match serde_json::from_str(&body) {
            Ok(run) if runs.iter().any(|newer| is_same(newer, &run)) => {}
            Ok(run) => runs.extend(Some(run).filter(wanted)),
            Err(error) => tracing::error!(run = id, %error, "record of a run is unreadable; skipped"),
        }
    }
    runs.truncate(max);
    runs.reverse();
    Ok(runs)
}

/// Returns all records with their ids, for another store.
pub fn all(connection: &Connection) -> rusqlite::Result<BTreeMap<u64, RunRecord>> {
    let mut statement = connection.prepare("SELECT id, body FROM runs")?;
    let rows: Vec<(i64, String)> =
        statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?.collect::<Result<_, _>>()?;
    let parse = |(id, body): (i64, String)| Some((unsigned(id), serde_json::from_str(&body).ok()?));
    Ok(rows.into_iter().filter_map(parse).collect())
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

/// Above the maximum, groups with more records than these lose some first: a container that fails again and again removes its own.
const MAX_OF_GROUP: i64 = 500;

/// Removes records of runs that ended before `cutoff`; above `max` the oldest of groups with very many, then the oldest of all; then
/// `more` of the oldest.
pub fn remove(connection: &Connection, cutoff: f64, max: usize, more: i64) -> rusqlite::Result<usize> {
    let mut removed = connection.prepare("DELETE FROM runs WHERE ended < ?1")?.execute([cutoff])?;
    let excess = count(connection)? - limit(max);
    if excess > 0 {
        let sql = "DELETE FROM runs WHERE id IN (SELECT id FROM (SELECT id, row_number() OVER \
                   (PARTITION BY CASE WHEN json_valid(body) THEN json_extract(body, '$.group') END ORDER BY ended DESC, id DESC) \
                   AS place, ended FROM runs) WHERE place > ?1 ORDER BY ended, id LIMIT ?2)";
        removed += connection.prepare(sql)?.execute([MAX_OF_GROUP, excess])?;
    }
    let excess = (count(connection)? - limit(max)).max(0) + more;
    let sql = "DELETE FROM runs WHERE id IN (SELECT id FROM runs ORDER BY ended, id LIMIT ?1)";
    Ok(removed + connection.prepare(sql)?.execute([excess])?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::events::ContainerRef;
    use crate::ledger::store::{Store, WriteBatch};

    /// Writes runs that ended at these Unix times, with these names.
    fn store(runs: &[(f64, &str)]) -> Store {
        let mut store = Store::in_memory(0).unwrap();
        let records = (1..).zip(runs).map(|(id, (ended, name))| {
            let mut run =
                RunRecord { run: format!("run-{id}").into(), ended: Some(*ended), ..RunRecord::default() };
            run.subject.name.container_name = (*name).into();
            run.group = (*name).into();
            (id, run)
        });
        store.commit(&WriteBatch { runs: records.collect(), ..WriteBatch::default() }).unwrap();
        store
    }

    #[test]
    fn crash_loop_removes_its_own_records_only() {
        let looping = (0..MAX_OF_GROUP + 50).map(|n| (1000.0 + n as f64, "crashes"));
        let all: Vec<_> = [(1.0, "train"), (2.0, "train")].into_iter().chain(looping).collect();
        let mut store = store(&all);
        let connection = &mut store.connection;
        assert_eq!(remove(connection, 0.0, all.len(), 0).unwrap(), 0, "there is room");
        assert_eq!(remove(connection, 0.0, all.len() - 10, 0).unwrap(), 10);
        assert_eq!(ended(&store, &RunQuery { limit: 0, ..RunQuery::default() })[..3], [1.0, 2.0, 1010.0]);
    }

    fn ended(store: &Store, query: &RunQuery) -> Vec<f64> {
        store.runs(query).unwrap().iter().filter_map(|run| run.ended).collect()
    }

    #[test]
    fn selects_the_newest_by_name_and_time() {
        let store = store(&[(30.0, "train"), (10.0, "train"), (20.0, "eval"), (40.0, "eval")]);
        let query =
            |since, wanted: Option<&str>, limit| RunQuery { since, wanted: wanted.map(str::to_owned), limit };
        assert_eq!(ended(&store, &query(None, None, 0)), [10.0, 20.0, 30.0, 40.0]);
        assert_eq!(ended(&store, &query(None, None, 2)), [30.0, 40.0]);
        assert_eq!(ended(&store, &query(Some(20.0), Some("eval"), 0)), [20.0, 40.0]);
        assert_eq!(ended(&store, &query(None, Some("run-2"), 0)), [10.0]);
        assert!(ended(&store, &query(None, Some("other"), 0)).is_empty());
    }

    #[test]
    fn record_is_replaced_by_its_id_and_an_unreadable_one_is_skipped() {
        let mut store = store(&[(10.0, "train"), (20.0, "train")]);
        let run = RunRecord { ended: Some(15.0), ..RunRecord::default() };
        store.commit(&WriteBatch { runs: [(1, run)].into(), ..WriteBatch::default() }).unwrap();
        assert_eq!(ended(&store, &RunQuery::default()), [15.0, 20.0]);
        store.connection.execute("UPDATE runs SET body = 'nonsense' WHERE id = 2", []).unwrap();
        assert_eq!(ended(&store, &RunQuery::default()), [15.0]);
        assert_eq!(store.all_runs().unwrap().into_keys().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn run_that_went_on_after_an_assumed_end_is_listed_once() {
        let mut store = Store::in_memory(0).unwrap();
        let record = |run: &str, started: f64, ended: f64| {
            let subject = ContainerRef { started: Some(started), ..ContainerRef::default() };
            RunRecord { run: run.into(), subject, ended: Some(ended), ..RunRecord::default() }
        };
        // the last two began in the same second
        let runs = [
            record("a", 1.0, 10.0),
            record("a", 1.0, 20.0),
            record("b", 30.1, 30.2),
            record("b", 30.4, 30.5),
        ];
        let runs = (1..).zip(runs).collect();
        store.commit(&WriteBatch { runs, ..WriteBatch::default() }).unwrap();
        assert_eq!(ended(&store, &RunQuery::default()), [20.0, 30.2, 30.5]);
    }

    #[test]
    fn retention_removes_by_age_and_the_oldest_above_the_maximum() {
        let store = store(&[(10.0, "a"), (20.0, "b"), (30.0, "c"), (40.0, "d"), (50.0, "e")]);
        assert_eq!(remove(&store.connection, 15.0, 10, 0).unwrap(), 1);
        assert_eq!(remove(&store.connection, 15.0, 3, 0).unwrap(), 1);
        assert_eq!(remove(&store.connection, 15.0, 3, 1).unwrap(), 1);
        assert_eq!(ended(&store, &RunQuery::default()), [40.0, 50.0]);
    }
}
