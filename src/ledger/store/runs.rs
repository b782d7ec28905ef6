//! Records of runs: one row each, written with the exit. Runs in progress are in the table of containers.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use rusqlite::{Connection, OptionalExtension, ToSql, Transaction, params};

use super::reader::FIRST_UNSETTLED;
use super::{limit, signed, to_json, unsigned};
use crate::discover::ContainerId;
use crate::ledger::container_state::ContainerState;
use crate::runs::RunRecord;
use crate::runs::names::NameKind;

/// Bytes of records after which a part of a response ends.
const PAGE_BYTES: usize = 256 << 10;

/// Selects records of runs.
#[derive(Clone, Debug, Default)]
pub struct RunQuery {
    /// Runs that are in progress, or that ended since this Unix time.
    pub since: Option<f64>,
    /// A run, a group, or a container: the first kind of name that fits counts, see [`NameKind`].
    pub name: Option<String>,
    /// Maximum number, the newest. 0: all.
    pub limit: usize,
    /// Also the timelines and operations, which are nearly all of a record's bytes.
    pub timelines: bool,
}

impl RunQuery {
    /// Removes what the query does not select of a record.
    fn trim(&self, mut run: RunRecord) -> RunRecord {
        if !self.timelines {
            (run.timeline, run.operations, run.log) = (vec![], vec![], vec![]);
        }
        run
    }
}

/// Writes records; one that exists is replaced.
pub fn write(transaction: &Transaction<'_>, runs: &BTreeMap<u64, RunRecord>) -> rusqlite::Result<()> {
    let mut statement = transaction.prepare(
        "INSERT OR REPLACE INTO runs (id, ended, run, run_group, container_name, container_id, body) \
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
    )?;
    for (id, run) in runs {
        let (subject, ended) = (&run.subject, run.ended.unwrap_or(0.0));
        let name = &*subject.identity.name;
        statement.execute(params![
            signed(*id),
            ended,
            &*run.run,
            &*run.group,
            name,
            &*subject.container_id,
            to_json(run)?
        ])?;
    }
    Ok(())
}

/// Where a selected record is stored.
#[derive(Clone, Debug)]
enum RunPlace {
    /// A run that ended, by the id of its row.
    Ended(i64),
    /// A run in progress, by the id of its container.
    Running(String),
}

/// The selected records that are still unread, the oldest last.
#[derive(Clone, Debug)]
pub struct RunCursor(Vec<RunPlace>);

/// What identifies a run among the selected ones.
struct RunKey {
    run: Arc<str>,
    started: Option<f64>,
    has_ended: bool,
}

impl RunKey {
    fn of(run: &RunRecord) -> Self {
        Self { run: Arc::clone(&run.run), started: run.subject.started, has_ended: run.ended.is_some() }
    }

    /// Returns whether an older record is of this run: its container was missing for a while and was taken for ended.
    fn is_same(&self, older: &RunRecord) -> bool {
        self.run == older.run
            && self.started == older.subject.started
            && (!self.has_ended || self.started.is_some())
    }
}

/// Returns the newest selected records, oldest first; those in progress are last. One that cannot be parsed is logged and skipped.
pub fn select(connection: &Connection, query: &RunQuery) -> rusqlite::Result<Vec<RunRecord>> {
    selected(connection, query, |_, run| query.trim(run))
}

/// Returns a part of the selected records as JSON, oldest first, and the cursor of the next part; without a cursor the first part.
/// It has at most [`PAGE_BYTES`] and one record more, so a response of any length costs the memory of one part. A record that is
/// removed, and a run that ends, between two parts is missing.
pub fn page(
    connection: &Connection,
    query: &RunQuery,
    at: Option<RunCursor>,
) -> rusqlite::Result<(Vec<String>, Option<RunCursor>)> {
    let mut unread = match at {
        Some(RunCursor(unread)) => unread,
        None => {
            let mut places = selected(connection, query, |place, _| place)?;
            places.reverse();
            places
        }
    };
    let (mut raw_json, mut bytes) = (Vec::new(), 0);
    while bytes < PAGE_BYTES
        && let Some(place) = unread.pop()
    {
        let Some(run) = read(connection, &place)? else { continue };
        let text = to_json(&query.trim(run))?;
        bytes += text.len();
        raw_json.push(text);
    }
    Ok((raw_json, (!unread.is_empty()).then_some(RunCursor(unread))))
}

/// Reads a record; `None` if it is no longer there.
fn read(connection: &Connection, place: &RunPlace) -> rusqlite::Result<Option<RunRecord>> {
    let body = |sql: &str, key: &dyn ToSql| -> rusqlite::Result<Option<String>> {
        connection.prepare(sql)?.query_row([key], |row| row.get(0)).optional()
    };
    Ok(match place {
        RunPlace::Ended(id) => {
            body("SELECT body FROM runs WHERE id = ?1", id)?.and_then(|body| serde_json::from_str(&body).ok())
        }
        RunPlace::Running(id) => body("SELECT value FROM state WHERE kind = 'container' AND key = ?1", id)?
            .and_then(|state| running(id, &state)),
    })
}

/// The record of a run whose exit is settled.
#[derive(Clone, Debug)]
pub struct SettledRun {
    /// Id of the exit.
    pub id: u64,
    /// `None` if it cannot be parsed.
    pub record: Option<RunRecord>,
    /// How many runs that ended before it have its id: runs of a container that started within one second.
    pub same_ids: u64,
    /// There is an earlier record of the same run: its container was missing for a while and was taken for ended.
    pub replaces: bool,
}

/// Returns the next record after that of an exit, once it no longer changes; `None` if there is none yet.
pub fn next_settled(connection: &Connection, after: u64) -> rusqlite::Result<Option<SettledRun>> {
    let sql = format!(
        "SELECT id, run, body FROM runs WHERE id > ?1 AND id < {FIRST_UNSETTLED} ORDER BY id LIMIT 1"
    );
    let columns = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?));
    let found: Option<(i64, String, String)> =
        connection.prepare(&sql)?.query_row([signed(after)], columns).optional()?;
    let Some((id, run, body)) = found else { return Ok(None) };
    let record: Option<RunRecord> = serde_json::from_str(&body).ok();
    // by their starts; each without one is a run of its own
    let sql = "SELECT count(DISTINCT start) FILTER (WHERE start <> ?3), count(*) FILTER (WHERE start = ?3) FROM \
               (SELECT coalesce(CASE WHEN json_valid(body) THEN json_extract(body, '$.started') END, -id) AS start \
               FROM runs WHERE run = ?1 AND id < ?2)";
    let started = record.as_ref().and_then(|record| record.subject.started).unwrap_or(-(id as f64));
    let counts = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?));
    let (same_ids, replaced): (i64, i64) =
        connection.prepare(sql)?.query_row(params![run, id, started], counts)?;
    Ok(Some(SettledRun { id: unsigned(id), record, same_ids: unsigned(same_ids), replaces: replaced > 0 }))
}

/// Returns the number of records after that of an exit.
pub fn count_after(connection: &Connection, id: u64) -> rusqlite::Result<u64> {
    let sql = "SELECT count(*) FROM runs WHERE id > ?1";
    connection.query_row(sql, [signed(id)], |row| row.get(0)).map(unsigned)
}

/// The runs that a name selects, so far, the newest first, and what is kept of each.
struct RunSelection<'a, T> {
    name: Option<&'a str>,
    /// At most this many are kept of those that ended, which are added from the newest on.
    max: usize,
    kind: Option<NameKind>,
    runs: Vec<(RunKey, T)>,
}

impl<T> RunSelection<'_, T> {
    /// Adds a run that the name fits, unless it fits another one better.
    fn add(&mut self, run: RunRecord, keep: impl FnOnce(RunRecord) -> T) {
        if let Some(name) = self.name {
            let Some(kind) = run.name_kind(name) else { return };
            if self.kind.is_some_and(|best| best < kind) {
                return;
            }
            if self.kind.is_some_and(|best| best > kind) {
                self.runs.clear();
            }
            self.kind = Some(kind);
        }
        if run.ended.is_some() && self.runs.len() >= self.max {
            return;
        }
        self.runs.push((RunKey::of(&run), keep(run)));
    }

    /// Returns true if no other run can change the newest `max`: a better kind of name may come later, but a group has no run's id.
    fn is_complete(&self) -> bool {
        self.runs.len() >= self.max && (self.name.is_none() || self.kind <= Some(NameKind::Group))
    }
}

/// Selects the records that a name may mean, and without a name all: a superset of those that [`RunRecord::name_kind`] finds, by columns
/// before the body, so that others are not read. A container's name is the end of its path in a pod.
const SELECT: &str = "SELECT id, body FROM runs WHERE ended >= ?1 AND (?2 IS NULL OR run = ?2 OR run_group = ?2 \
    OR substr(?2, -length(container_name)) = container_name OR substr(container_id, 1, length(?2)) = ?2) \
    ORDER BY ended DESC, id DESC";

/// Returns what `keep` makes of the newest selected records, oldest first; those in progress are last.
fn selected<T>(
    connection: &Connection,
    query: &RunQuery,
    keep: impl Fn(RunPlace, RunRecord) -> T,
) -> rusqlite::Result<Vec<T>> {
    let max = if query.limit == 0 { usize::MAX } else { query.limit };
    let mut selection = RunSelection { name: query.name.as_deref(), max, kind: None, runs: vec![] };
    let mut statement = connection.prepare("SELECT key, value FROM state WHERE kind = 'container'")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let (id, state): (String, String) = (row.get(0)?, row.get(1)?);
        if let Some(run) = running(&id, &state) {
            selection.add(run, |run| keep(RunPlace::Running(id), run));
        }
    }
    let started = |key: &RunKey| key.started.unwrap_or(f64::MIN);
    selection.runs.sort_by(|(one, _), (other, _)| started(other).total_cmp(&started(one)));
    let mut statement = connection.prepare(SELECT)?;
    let mut rows = statement.query(params![query.since.unwrap_or(f64::MIN), query.name])?;
    while !selection.is_complete()
        && let Some(row) = rows.next()?
    {
        let (id, body): (i64, String) = (row.get(0)?, row.get(1)?);
        match serde_json::from_str(&body) {
            Ok(run) if selection.runs.iter().any(|(newer, _)| newer.is_same(&run)) => {}
            Ok(run) => selection.add(run, |run| keep(RunPlace::Ended(id), run)),
            Err(error) => tracing::error!(run = id, %error, "record of a run is unreadable; skipped"),
        }
    }
    selection.runs.truncate(max);
    Ok(selection.runs.into_iter().rev().map(|(_, kept)| kept).collect())
}

/// Returns the run in progress of a container; `None` if there is none, or if its state is unreadable, which is counted when
/// `memledger serve` loads it.
fn running(id: &str, state: &str) -> Option<RunRecord> {
    let state: ContainerState = serde_json::from_str(state).ok()?;
    state.record_of_running(&ContainerId::new(id))
}

/// Returns the number of records.
pub fn count(connection: &Connection) -> rusqlite::Result<i64> {
    connection.query_row("SELECT count(*) FROM runs", [], |row| row.get(0))
}

/// Above the maximum, groups with more records than these lose some first: a container that fails again and again removes its own.
const MAX_OF_GROUP: i64 = 500;

/// Removes records of runs that ended within `times`; above `max` the oldest of groups with very many, then the oldest of all; then
/// `more` of the oldest.
pub fn remove(connection: &Connection, times: &Range<f64>, max: usize, more: i64) -> rusqlite::Result<usize> {
    let by_age = "DELETE FROM runs WHERE ended >= ?1 AND ended < ?2";
    let mut removed = connection.prepare(by_age)?.execute([times.start, times.end])?;
    let excess = count(connection)? - limit(max);
    if excess > 0 {
        let sql = "DELETE FROM runs WHERE id IN (SELECT id FROM (SELECT id, row_number() OVER \
                   (PARTITION BY run_group ORDER BY ended DESC, id DESC) \
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
    use crate::events::ContainerRef;
    use crate::ledger::store::{Store, WriteBatch};

    /// Writes runs that ended at these Unix times, with these names.
    fn store(runs: &[(f64, &str)]) -> Store {
        let mut store = Store::in_memory().unwrap();
        let records = (1..).zip(runs).map(|(id, (ended, name))| {
            let mut run =
                RunRecord { run: format!("run-{id}").into(), ended: Some(*ended), ..RunRecord::default() };
            run.subject.identity.name = (*name).into();
            run.group = (*name).into();
            (id, run)
        });
        store.commit(&WriteBatch { runs: records.collect(), ..WriteBatch::default() }).unwrap();
        store
    }

    #[test]
    fn next_settled_run_has_the_number_of_runs_with_its_id() {
        let mut store = store(&[(10.0, "a"), (11.0, "a"), (12.0, "a"), (13.0, "a"), (14.0, "b")]);
        let mut all = all_runs(&store);
        for (run, started) in all.values_mut().zip([Some(5.1), Some(5.6), Some(5.6), None, Some(6.0)]) {
            (run.subject.started, run.run) = (started, Arc::clone(&run.subject.identity.name));
        }
        store.commit(&WriteBatch { runs: all, ..WriteBatch::default() }).unwrap();
        let next = |after| store.reader().next_settled_run(after).unwrap();
        let found = |after| next(after).map(|run| (run.id, run.same_ids, run.replaces));
        let all = [0, 1, 2, 3, 4].map(found);
        assert_eq!(all[..2], [Some((1, 0, false)), Some((2, 1, false))]);
        assert_eq!(all[2..], [Some((3, 1, true)), Some((4, 2, false)), Some((5, 0, false))]);
        assert_eq!((found(5), store.reader().count_runs_after(3).unwrap()), (None, 2));
        let execute = |sql| store.reader().connection().execute(sql, []).unwrap();
        execute("UPDATE runs SET body = 'nonsense' WHERE id = 3");
        assert_eq!((next(2).unwrap().record, found(3)), (None, Some((4, 3, false))));
        execute("INSERT INTO events (id, at, settled, notable, body) VALUES (5, 14.0, 0, 0, '{}')");
        assert_eq!((found(4), found(3)), (None, Some((4, 3, false))), "its reason may still change");
    }

    #[test]
    fn crash_loop_removes_its_own_records_only() {
        let looping = (0..MAX_OF_GROUP + 50).map(|n| (1000.0 + n as f64, "crashes"));
        let all: Vec<_> = [(1.0, "train"), (2.0, "train")].into_iter().chain(looping).collect();
        let mut store = store(&all);
        let connection = store.reader.connection_mut();
        assert_eq!(remove(connection, &(0.0..0.0), all.len(), 0).unwrap(), 0, "there is room");
        assert_eq!(remove(connection, &(0.0..0.0), all.len() - 10, 0).unwrap(), 10);
        assert_eq!(ended(&store, &RunQuery { limit: 0, ..RunQuery::default() })[..3], [1.0, 2.0, 1010.0]);
    }

    fn all_runs(store: &Store) -> BTreeMap<u64, RunRecord> {
        let mut statement = store.reader().connection().prepare("SELECT id, body FROM runs").unwrap();
        let rows =
            statement.query_map([], |row| Ok((row.get::<_, i64>(0)?, row.get::<_, String>(1)?))).unwrap();
        rows.flatten().filter_map(|(id, body)| Some((id as u64, serde_json::from_str(&body).ok()?))).collect()
    }

    fn ended(store: &Store, query: &RunQuery) -> Vec<f64> {
        store.reader().runs(query).unwrap().iter().filter_map(|run| run.ended).collect()
    }

    #[test]
    fn selects_the_newest_by_name_and_time() {
        let store = store(&[(30.0, "train"), (10.0, "train"), (20.0, "eval"), (40.0, "eval")]);
        let query = |since, name: Option<&str>, limit| RunQuery {
            since,
            name: name.map(str::to_owned),
            limit,
            timelines: true,
        };
        assert_eq!(ended(&store, &query(None, None, 0)), [10.0, 20.0, 30.0, 40.0]);
        assert_eq!(ended(&store, &query(None, None, 2)), [30.0, 40.0]);
        assert_eq!(ended(&store, &query(Some(20.0), Some("eval"), 0)), [20.0, 40.0]);
        assert_eq!(ended(&store, &query(None, Some("run-2"), 0)), [10.0]);
        assert!(ended(&store, &query(None, Some("other"), 0)).is_empty());
    }

    #[test]
    fn group_selects_no_container_of_another_group() {
        let store = store(&[(10.0, "cafe"), (20.0, "cafe"), (30.0, "other"), (40.0, "cafe")]);
        let mut all = all_runs(&store);
        all.get_mut(&3).unwrap().subject.container_id = "cafe0123".into();
        all.get_mut(&4).unwrap().group = "team/cafe".into();
        let mut store = store;
        store.commit(&WriteBatch { runs: all, ..WriteBatch::default() }).unwrap();
        let of = |name: &str, limit| {
            ended(&store, &RunQuery { name: Some(name.to_owned()), limit, ..RunQuery::default() })
        };
        assert_eq!(of("cafe", 0), [10.0, 20.0], "the group, and neither the container nor the id");
        assert_eq!(of("cafe", 1), [20.0]);
        assert_eq!(of("cafe0", 0), [30.0]);
        assert_eq!(of("team/cafe", 0), [40.0]);
    }

    #[test]
    fn every_way_to_name_a_run_selects_it_by_the_columns() {
        let store = &mut store(&[(10.0, "main"), (20.0, "main"), (30.0, "other")]);
        let mut all = all_runs(store);
        let run = all.get_mut(&2).unwrap();
        (run.subject.identity.k8s_namespace, run.subject.identity.k8s_pod) = ("ml".into(), "train-0".into());
        (run.subject.container_id, run.group) = ("0123456789ab".into(), "ml/train/main".into());
        store.commit(&WriteBatch { runs: all, ..WriteBatch::default() }).unwrap();
        let of = |name: &str| ended(store, &RunQuery { name: Some(name.to_owned()), ..RunQuery::default() });
        for name in ["run-2", "ml/train/main", "train-0/main", "ml/train-0/main", "0123", "0123456789ab"] {
            assert_eq!(of(name), [20.0], "{name}");
        }
        assert_eq!((of("main"), of("ain"), of("train-1/main")), (vec![10.0], vec![], vec![]));
    }

    #[test]
    fn pages_together_are_the_selected_records_and_none_is_large() {
        let mut store = Store::in_memory().unwrap();
        let settings: BTreeMap<_, _> = [("note".into(), "x".repeat(20_000).into())].into();
        let record = |id: u64| {
            let (run, ended) = (format!("run-{id}").into(), Some(id as f64));
            (id, RunRecord { run, ended, settings: settings.clone(), ..RunRecord::default() })
        };
        store.commit(&WriteBatch { runs: (1..=60).map(record).collect(), ..WriteBatch::default() }).unwrap();
        for limit in [0, 1, 13, 60, 100] {
            let query = RunQuery { limit, ..RunQuery::default() };
            let (mut parts, mut at) = (vec![], None);
            loop {
                let (raw_json, next) = store.reader().run_page(&query, at).unwrap();
                parts.push(raw_json);
                at = next;
                if at.is_none() {
                    break;
                }
            }
            let parsed: Vec<RunRecord> =
                parts.concat().iter().map(|text| serde_json::from_str(text).unwrap()).collect();
            assert_eq!(parsed, store.reader().runs(&query).unwrap(), "{limit}");
            let bytes = |part: &Vec<String>| part.iter().map(String::len).sum::<usize>();
            assert!(parts.iter().all(|part| bytes(part) < PAGE_BYTES + 21_000), "{limit}");
            assert!(parts.iter().all(|part| !part.is_empty()), "{limit}");
        }
        assert_eq!(
            store
                .reader()
                .run_page(&RunQuery { since: Some(61.0), ..RunQuery::default() }, None)
                .unwrap()
                .0
                .len(),
            0
        );
    }

    #[test]
    fn record_that_is_removed_between_two_pages_is_missing() {
        let store = store(&[(10.0, "a"), (20.0, "b"), (30.0, "c")]);
        let unread = selected(store.reader().connection(), &RunQuery::default(), |place, _| place).unwrap();
        remove(store.reader().connection(), &(0.0..15.0), 10, 0).unwrap();
        let (raw_json, next) =
            store.reader().run_page(&RunQuery::default(), Some(RunCursor(unread))).unwrap();
        assert_eq!((raw_json.len(), next.is_none()), (2, true));
    }

    #[test]
    fn record_is_replaced_by_its_id_and_an_unreadable_one_is_skipped() {
        let mut store = store(&[(10.0, "train"), (20.0, "train")]);
        let run = RunRecord { ended: Some(15.0), ..RunRecord::default() };
        store.commit(&WriteBatch { runs: [(1, run)].into(), ..WriteBatch::default() }).unwrap();
        assert_eq!(ended(&store, &RunQuery::default()), [15.0, 20.0]);
        store.reader().connection().execute("UPDATE runs SET body = 'nonsense' WHERE id = 2", []).unwrap();
        assert_eq!(ended(&store, &RunQuery::default()), [15.0]);
        assert_eq!(all_runs(&store).into_keys().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn run_that_went_on_after_an_assumed_end_is_listed_once() {
        let mut store = Store::in_memory().unwrap();
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
        assert_eq!(remove(store.reader().connection(), &(0.0..15.0), 10, 0).unwrap(), 1);
        assert_eq!(remove(store.reader().connection(), &(0.0..15.0), 3, 0).unwrap(), 1);
        assert_eq!(remove(store.reader().connection(), &(0.0..15.0), 3, 1).unwrap(), 1);
        assert_eq!(ended(&store, &RunQuery::default()), [40.0, 50.0]);
    }
}
