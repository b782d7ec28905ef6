//! Records of runs: one row for each [`RunId`], written with the exit. Runs in progress are in the table of containers.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use rusqlite::{Connection, OptionalExtension, ToSql, Transaction, params};

use super::reader::FIRST_UNSETTLED;
use super::{limit, signed, to_json, unsigned};
use crate::discover::ContainerId;
use crate::ledger::container_state::ContainerState;
use crate::lifecycle::RunId;
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

/// Writes records by the ids of their exits; one that exists is replaced. The end of a run that had another exit was assumed too early.
pub fn write(transaction: &Transaction<'_>, runs: &BTreeMap<u64, RunRecord>) -> rusqlite::Result<()> {
    let mut statement = transaction.prepare(
        "INSERT INTO runs (id, ended, run, run_group, container_name, container_id, run_number, body) \
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8) \
         ON CONFLICT DO UPDATE SET corrected = corrected OR id <> excluded.id, id = excluded.id, \
         ended = excluded.ended, run = excluded.run, run_group = excluded.run_group, \
         container_name = excluded.container_name, container_id = excluded.container_id, \
         run_number = excluded.run_number, body = excluded.body",
    )?;
    for (id, run) in runs {
        let (subject, ended) = (&run.subject, run.ended.unwrap_or(0.0));
        let Some(number) = subject.run_number else {
            tracing::error!(exit = id, "a record of a run has no number; skipped");
            continue;
        };
        let name = &*subject.identity.name;
        statement.execute(params![
            signed(*id),
            ended,
            &*run.run,
            &*run.group,
            name,
            &*subject.container_id,
            signed(number),
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
    /// How many earlier runs of the container have the same text as their id: they started within one second.
    pub same_ids: u64,
    /// It had another record before: its container was missing for a while and was taken for ended.
    pub is_corrected: bool,
}

/// Returns the next record after that of an exit, once it no longer changes; `None` if there is none yet.
pub fn next_settled(connection: &Connection, after: u64) -> rusqlite::Result<Option<SettledRun>> {
    let sql = format!(
        "SELECT id, body, corrected, (SELECT count(*) FROM runs AS earlier WHERE earlier.container_id = \
         runs.container_id AND earlier.run_number < runs.run_number AND earlier.run = runs.run) \
         FROM runs WHERE id > ?1 AND id < {FIRST_UNSETTLED} ORDER BY id LIMIT 1"
    );
    let settled = |row: &rusqlite::Row<'_>| {
        let body: String = row.get(1)?;
        Ok(SettledRun {
            id: unsigned(row.get(0)?),
            record: serde_json::from_str(&body).ok(),
            is_corrected: row.get(2)?,
            same_ids: unsigned(row.get(3)?),
        })
    };
    connection.prepare(&sql)?.query_row([signed(after)], settled).optional()
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
    runs: Vec<T>,
    /// The selected runs in progress: the end of one may have been assumed before, and has a row.
    running: HashSet<Option<RunId>>,
}

impl<'a, T> RunSelection<'a, T> {
    fn new(name: Option<&'a str>, max: usize) -> Self {
        Self { name, max, kind: None, runs: vec![], running: HashSet::new() }
    }

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
        if run.ended.is_some()
            && (self.runs.len() >= self.max || self.running.contains(&run.subject.run_id()))
        {
            return;
        }
        if run.ended.is_none() {
            self.running.insert(run.subject.run_id());
        }
        self.runs.push(keep(run));
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
    let mut statement = connection.prepare("SELECT key, value FROM state WHERE kind = 'container'")?;
    let mut rows = statement.query([])?;
    let mut in_progress = Vec::new();
    while let Some(row) = rows.next()? {
        let (id, state): (String, String) = (row.get(0)?, row.get(1)?);
        in_progress.extend(running(&id, &state).map(|run| (id, run)));
    }
    let started = |run: &RunRecord| run.subject.started.unwrap_or(f64::MIN);
    in_progress.sort_by(|(_, one), (_, other)| started(other).total_cmp(&started(one)));
    let mut selection = RunSelection::new(query.name.as_deref(), max);
    for (id, run) in in_progress {
        selection.add(run, |run| keep(RunPlace::Running(id), run));
    }
    let mut statement = connection.prepare(SELECT)?;
    let mut rows = statement.query(params![query.since.unwrap_or(f64::MIN), query.name])?;
    while !selection.is_complete()
        && let Some(row) = rows.next()?
    {
        let (id, body): (i64, String) = (row.get(0)?, row.get(1)?);
        match serde_json::from_str(&body) {
            Ok(run) => selection.add(run, |run| keep(RunPlace::Ended(id), run)),
            Err(error) => tracing::error!(run = id, %error, "record of a run is unreadable; skipped"),
        }
    }
    selection.runs.truncate(max);
    Ok(selection.runs.into_iter().rev().collect())
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
    use crate::lifecycle::RunNumber;

    /// Writes runs that ended at these Unix times, with these names.
    fn store(runs: &[(f64, &str)]) -> Store {
        let mut store = Store::in_memory().unwrap();
        let records = (1..).zip(runs).map(|(id, (ended, name))| {
            let mut run =
                RunRecord { run: format!("run-{id}").into(), ended: Some(*ended), ..RunRecord::default() };
            run.subject.identity.name = (*name).into();
            run.group = (*name).into();
            run.subject.run_number = Some(id);
            (id, run)
        });
        store.commit(&WriteBatch { runs: records.collect(), ..WriteBatch::default() }).unwrap();
        store
    }

    #[test]
    fn next_settled_run_has_the_number_of_runs_with_its_id() {
        let mut store = store(&[(10.0, "a"), (11.0, "a"), (12.0, "a"), (14.0, "b")]);
        let mut all = all_runs(&store);
        for run in all.values_mut() {
            run.run = format!("run-of-{}", run.subject.identity.name).into();
        }
        let mut corrected = all[&2].clone();
        store.commit(&WriteBatch { runs: all, ..WriteBatch::default() }).unwrap();
        let found = |store: &Store, after| {
            let next = store.reader().next_settled_run(after).unwrap();
            next.map(|run| (run.id, run.same_ids, run.is_corrected))
        };
        let all = [0, 1, 2, 3].map(|after| found(&store, after));
        assert_eq!(all, [(1, 0, false), (2, 1, false), (3, 2, false), (4, 0, false)].map(Some));
        corrected.ended = Some(15.0);
        let runs = BTreeMap::from([(5, corrected)]);
        store.commit(&WriteBatch { runs, ..WriteBatch::default() }).unwrap();
        assert_eq!([1, 4].map(|after| found(&store, after)), [(3, 2, false), (5, 1, true)].map(Some));
        assert_eq!((found(&store, 5), store.reader().count_runs_after(3).unwrap()), (None, 2));
        let execute = |sql| store.reader().connection().execute(sql, []).unwrap();
        execute("UPDATE runs SET body = 'nonsense' WHERE id = 3");
        assert!(store.reader().next_settled_run(1).unwrap().unwrap().record.is_none());
        execute("INSERT INTO events (id, at, settled, notable, body) VALUES (5, 14.0, 0, 0, '{}')");
        assert_eq!(found(&store, 4), None, "its reason may still change");
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
            let subject = ContainerRef { run_number: Some(id), ..ContainerRef::default() };
            (id, RunRecord { run, ended, subject, settings: settings.clone(), ..RunRecord::default() })
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
        let run = RunRecord { ended: Some(15.0), ..all_runs(&store)[&1].clone() };
        store.commit(&WriteBatch { runs: [(1, run)].into(), ..WriteBatch::default() }).unwrap();
        assert_eq!(ended(&store, &RunQuery::default()), [15.0, 20.0]);
        store.reader().connection().execute("UPDATE runs SET body = 'nonsense' WHERE id = 2", []).unwrap();
        assert_eq!(ended(&store, &RunQuery::default()), [15.0]);
        assert_eq!(all_runs(&store).into_keys().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn run_that_went_on_after_an_assumed_end_is_listed_once() {
        let mut store = Store::in_memory().unwrap();
        let record = |number: RunNumber, ended: f64| {
            let subject = ContainerRef { run_number: Some(number), ..ContainerRef::default() };
            RunRecord { subject, ended: Some(ended), ..RunRecord::default() }
        };
        let runs = [record(1, 10.0), record(1, 20.0), record(2, 30.2), record(3, 30.5)];
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
