//! Selects the events of a query: all at once, as a number, or page by page.
//!
//! A page has at most [`PAGE_BYTES`] and one row more, so that a response of any length costs the memory of one page. Pages are
//! read in separate transactions: an event that is removed or added between two of them is missing.

use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension, Row, params_from_iter};

use super::{Query, limit};

/// Maximum number of events that are read at once, whatever a query allows, and maximum size of them in bytes; one more is read.
pub const MAX_EVENTS: usize = 1_000;
/// See [`MAX_EVENTS`].
pub const MAX_BYTES: usize = 1 << 20;
/// Bytes of rows after which a page ends.
const PAGE_BYTES: usize = 256 << 10;

/// Sort key of an event: its time and its id.
type Key = (f64, i64);

/// Sorts before all events.
const BEFORE_ALL: Key = (f64::MIN, i64::MIN);

/// The end of a page, and the end of the last page.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cursor {
    after: Key,
    last: Key,
    left: usize,
}

/// A part of a response, oldest first.
#[derive(Debug, Default)]
pub struct Page {
    /// Events as stored JSON.
    pub raw_json: Vec<String>,
    /// Start of the next page; `None` if this is the last.
    pub next: Option<Cursor>,
    /// In the first page: there are older events than the limit allows.
    pub has_older: bool,
}

/// A condition on events, and the values of its parameters, which are numbered from 1.
struct Condition {
    sql: String,
    values: Vec<Value>,
}

/// The condition on the beginning of an id.
const OF_ID: &str = "container_id >= ?2 AND container_id < ?3 AND at >= ?1";
/// The condition on a pod, and its namespace if that is not NULL.
const IN_POD: &str = "at >= ?1 AND container_id IS NOT NULL AND body LIKE '%\"k8s_pod_name\"%' AND json_valid(body) \
                      AND json_extract(body, '$.k8s_pod_name') = ?2 \
                      AND (?3 IS NULL OR json_extract(body, '$.k8s_namespace_name') = ?3)";

impl Condition {
    fn of(connection: &Connection, query: &Query) -> rusqlite::Result<Self> {
        let since = Value::Real(query.since.unwrap_or(f64::MIN));
        let text = |text: &str| Value::Text(text.to_owned());
        let name = query.container.as_deref().filter(|name| !name.is_empty());
        let exists = |condition: &str, values: &[Value]| -> rusqlite::Result<bool> {
            let sql = format!("SELECT EXISTS (SELECT 1 FROM events WHERE {condition})");
            connection.query_row(&sql, params_from_iter(values), |row| row.get(0))
        };
        let (sql, values) = match name {
            None => ("at >= ?1", vec![since]),
            // no name has a slash in it
            Some(name) if name.contains('/') => {
                let mut parts = name.rsplitn(3, '/');
                let mut part = || parts.next().map_or(Value::Null, text);
                let sql = "container_name = ?2 AND at >= ?1 AND json_extract(body, '$.k8s_pod_name') = ?3 \
                           AND (?4 IS NULL OR json_extract(body, '$.k8s_namespace_name') = ?4)";
                let values = vec![since.clone(), part(), part(), part()];
                match name.split_once('/') {
                    Some((namespace, pod)) if !exists(sql, &values)? => {
                        (IN_POD, vec![since, text(pod), text(namespace)])
                    }
                    _ => (sql, values),
                }
            }
            Some(name) => {
                let prefix = [since.clone(), text(name), Value::Text(format!("{name}\u{10ffff}"))];
                let in_pod = [since.clone(), text(name), Value::Null];
                let is_id = name.bytes().all(|byte| byte.is_ascii_hexdigit());
                // a container named `cafe` is meant by that name, and not all whose id begins so
                if exists("container_name = ?1", &[text(name)])? {
                    ("container_name = ?2 AND at >= ?1", vec![since, text(name)])
                } else if is_id && exists(OF_ID, &prefix)? {
                    (OF_ID, prefix.to_vec())
                } else if exists(IN_POD, &in_pod)? {
                    (IN_POD, in_pod.to_vec())
                } else if let Some(id) = named_before(connection, name)? {
                    ("container_id = ?2 AND at >= ?1", vec![since, Value::Text(id)])
                } else {
                    (OF_ID, prefix.to_vec())
                }
            }
        };
        let (mut sql, mut values) = (sql.to_owned(), values);
        if let Some(until) = query.until {
            values.push(Value::Real(until));
            sql.push_str(&format!(" AND at <= ?{}", values.len()));
        }
        if query.only_notable {
            sql.push_str(" AND notable = 1");
        }
        if !query.ids.is_empty() {
            let ids: Vec<String> = query.ids.iter().map(u64::to_string).collect();
            sql.push_str(&format!(" AND id IN ({})", ids.join(",")));
        }
        Ok(Self { sql, values })
    }

    /// A statement with more parameters behind those of the condition, written as `?` in `sql`, and all values.
    fn with(&self, sql: &str, more: impl IntoIterator<Item = Value>) -> (String, Vec<Value>) {
        let values = self.values.iter().cloned().chain(more).collect();
        (sql.replace("{}", &self.sql), values)
    }
}

/// Returns the id of the container that had this name last before it was renamed.
fn named_before(connection: &Connection, name: &str) -> rusqlite::Result<Option<String>> {
    let sql = "SELECT container_id FROM (SELECT container_id, at, body FROM events WHERE container_id IS NOT NULL \
               AND body LIKE '%\"former_names\"%' AND json_valid(body)), json_each(body, '$.former_names') \
               WHERE json_each.value = ?1 ORDER BY at DESC LIMIT 1";
    connection.query_row(sql, [name], |row| row.get(0)).optional()
}

/// Returns ids and stored JSON of the newest selected events, oldest first.
pub fn newest(connection: &Connection, query: &Query) -> rusqlite::Result<Vec<(i64, String)>> {
    let condition = Condition::of(connection, query)?;
    let (sql, values) = condition.with(
        "SELECT id, body, at FROM events WHERE {} ORDER BY at DESC, id DESC LIMIT ?",
        [Value::Integer(limit(if query.limit == 0 { MAX_EVENTS } else { query.limit.min(MAX_EVENTS) }))],
    );
    let mut statement = connection.prepare(&sql)?;
    let mut rows = statement.query(params_from_iter(values))?;
    let (mut found, mut bytes) = (Vec::new(), 0);
    while bytes <= MAX_BYTES
        && let Some(row) = rows.next()?
    {
        let (id, body): (i64, String) = (row.get(0)?, row.get(1)?);
        bytes += body.len();
        found.push((id, body));
    }
    found.reverse();
    Ok(found)
}

/// Returns the number of events, at most `max`.
pub fn count(connection: &Connection, max: usize) -> rusqlite::Result<usize> {
    let sql = "SELECT count(*) FROM (SELECT 1 FROM events LIMIT ?1)";
    let found: i64 = connection.query_row(sql, [limit(max)], |row| row.get(0))?;
    Ok(usize::try_from(found).unwrap_or(max))
}

/// Returns the first page of the newest selected events, or the one at a cursor.
pub fn page(connection: &Connection, query: &Query, at: Option<Cursor>) -> rusqlite::Result<Page> {
    let _snapshot = connection.unchecked_transaction()?; // an event that is added between two statements would move the limit
    let condition = Condition::of(connection, query)?;
    let cursor = match at {
        Some(cursor) => cursor,
        None => match first_page(connection, query, &condition)? {
            Some(cursor) => cursor,
            None => return Ok(Page::default()),
        },
    };
    let key = |(at, id): Key| [Value::Real(at), Value::Integer(id)];
    let (sql, values) = condition.with(
        "SELECT at, id, body FROM events WHERE {} AND (at, id) > (?, ?) AND (at, id) <= (?, ?) ORDER BY at, id LIMIT ?",
        [key(cursor.after), key(cursor.last)].concat().into_iter().chain([Value::Integer(limit(cursor.left))]),
    );
    let mut statement = connection.prepare(&sql)?;
    let mut rows = statement.query(params_from_iter(values))?;
    let has_older = at.is_none() && cursor.after != BEFORE_ALL;
    let (mut page, mut bytes) = (Page { has_older, ..Page::default() }, 0);
    while let Some(row) = rows.next()? {
        let body: String = row.get(2)?;
        bytes += body.len();
        let after: Key = (row.get(0)?, row.get(1)?);
        page.raw_json.push(body);
        if bytes >= PAGE_BYTES {
            let left = cursor.left.saturating_sub(page.raw_json.len());
            let is_last = after == cursor.last || left == 0;
            page.next = (!is_last).then_some(Cursor { after, left, ..cursor });
            break;
        }
    }
    Ok(page)
}

/// Returns the cursor of the first page; `None` if no event is selected.
fn first_page(
    connection: &Connection,
    query: &Query,
    condition: &Condition,
) -> rusqlite::Result<Option<Cursor>> {
    let nth = |skipped: i64| {
        let (sql, values) = condition.with(
            "SELECT at, id FROM events WHERE {} ORDER BY at DESC, id DESC LIMIT 1 OFFSET ?",
            [Value::Integer(skipped)],
        );
        let key = |row: &Row<'_>| Ok((row.get(0)?, row.get(1)?));
        let mut statement = connection.prepare(&sql)?;
        statement.query_map(params_from_iter(values), key)?.next().transpose()
    };
    let Some(last) = nth(0)? else { return Ok(None) };
    let left = if query.limit == 0 { usize::MAX } else { query.limit };
    let beyond = if query.limit == 0 { None } else { nth(limit(query.limit))? };
    Ok(Some(Cursor { after: beyond.unwrap_or(BEFORE_ALL), last, left }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{Exit, ExitReason, LedgerEvent};
    use crate::ledger::store::Store;

    fn exit(id: u64, at: f64, name: &str) -> LedgerEvent {
        let text = "x".repeat(10_000);
        let event = serde_json::json!({"type": "exit", "id": id, "at": at, "container_name": name, "container_id": format!("{id:064x}"),
            "k8s_pod_name": "pod", "reason": "error", "oom_kills": 0, "evidence": [{"source": "kmsg", "text": text}]});
        serde_json::from_value(event).unwrap()
    }

    fn all_pages(store: &Store, query: &Query) -> Vec<Vec<String>> {
        let (mut pages, mut at) = (vec![], None);
        loop {
            let page = store.reader().page(query, at).unwrap();
            pages.push(page.raw_json);
            let Some(next) = page.next else { return pages };
            at = Some(next);
        }
    }

    #[test]
    fn pages_together_are_the_whole_answer_and_none_is_large() {
        let mut store = Store::in_memory().unwrap();
        // of one moment too, and entered in another order than that of their times
        let events = (1..=60)
            .map(|id| exit(id, 1000.0 - (id / 4) as f64, if id % 3 == 0 { "train" } else { "other" }));
        store.commit(&events.collect()).unwrap();
        for container in [None, Some("train"), Some("pod/train"), Some("0000"), Some("nobody")] {
            for since in [None, Some(990.0), Some(2000.0)] {
                for limit in [0, 1, 6, 7, 19, 20, 21, 60, 100] {
                    let container = container.map(str::to_owned);
                    let query = Query { since, container, limit, ..Query::default() };
                    let pages = all_pages(&store, &query);
                    let whole: Vec<_> = newest(store.reader().connection(), &query)
                        .unwrap()
                        .into_iter()
                        .map(|(_, body)| body)
                        .collect();
                    assert_eq!(pages.concat(), whole, "{query:?}");
                    let bytes = |page: &Vec<String>| page.iter().map(String::len).sum::<usize>();
                    assert!(pages.iter().all(|page| bytes(page) < PAGE_BYTES + 11_000), "{query:?}");
                    assert!(pages.len() == 1 || pages.iter().all(|page| !page.is_empty()), "{query:?}");
                }
            }
        }
    }

    #[test]
    fn a_query_reads_no_more_than_a_page_whatever_it_selects() {
        let mut store = Store::in_memory().unwrap();
        store.commit(&(1..=200).map(|id| exit(id, id as f64, "train")).collect()).unwrap();
        let ids: Vec<_> =
            store.reader().events(&Query::default()).unwrap().iter().map(LedgerEvent::id).collect();
        let read = newest(store.reader().connection(), &Query::default()).unwrap();
        let bytes: usize = read.iter().map(|(_, body)| body.len()).sum();
        assert!(bytes < MAX_BYTES + 50_000, "{bytes}");
        assert_eq!((ids.len(), ids[ids.len() - 1]), (read.len(), 200), "the oldest are left out");
    }

    #[test]
    fn newest_notable_event_is_found_behind_many_others() {
        let mut store = Store::in_memory().unwrap();
        let completed = |id: u64| {
            let LedgerEvent::Exit(exit) = exit(id, id as f64, "train") else { panic!() };
            LedgerEvent::Exit(Exit { reason: Some(ExitReason::Completed), ..exit })
        };
        let events = std::iter::once(exit(1, 1.0, "train")).chain((2..=200).map(completed));
        store.commit(&events.collect()).unwrap();
        let query = Query { only_notable: true, limit: 1, ..Query::default() };
        let found = newest(store.reader().connection(), &query).unwrap();
        assert_eq!(found.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1]);
    }
}
