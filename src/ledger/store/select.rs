//! Selects the events of a query: all at once, as a number, or page by page.
//!
//! A page has at most [`PAGE_BYTES`] and one row more, so that a response of any length costs the memory of one page. Pages are
//! read in separate transactions: an event that is removed or added between two of them is missing.

use rusqlite::types::Value;
use rusqlite::{Connection, Row, params_from_iter};

use super::{Query, limit};

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

impl Condition {
    fn of(connection: &Connection, query: &Query) -> rusqlite::Result<Self> {
        let since = Value::Real(query.since.unwrap_or(f64::MIN));
        let text = |text: &str| Value::Text(text.to_owned());
        let wanted = query.container.as_deref().filter(|wanted| !wanted.is_empty());
        let (sql, values) = match wanted {
            None => ("at >= ?1", vec![since]),
            // no name has a slash in it
            Some(wanted) if wanted.contains('/') => {
                let mut parts = wanted.rsplitn(3, '/');
                let mut part = || parts.next().map_or(Value::Null, text);
                let sql = "container_name = ?2 AND at >= ?1 AND json_extract(body, '$.k8s_pod_name') = ?3 \
                           AND (?4 IS NULL OR json_extract(body, '$.k8s_namespace_name') = ?4)";
                (sql, vec![since, part(), part(), part()])
            }
            Some(wanted) => {
                let known = "SELECT EXISTS (SELECT 1 FROM events WHERE container_name = ?1)";
                // a container named `cafe` is meant by that name, and not all whose id begins so
                if connection.query_row(known, [wanted], |row| row.get(0))? {
                    ("container_name = ?2 AND at >= ?1", vec![since, text(wanted)])
                } else {
                    let end = format!("{wanted}\u{10ffff}");
                    let sql = "container_id >= ?2 AND container_id < ?3 AND at >= ?1";
                    (sql, vec![since, text(wanted), Value::Text(end)])
                }
            }
        };
        let (mut sql, mut values) = (sql.to_owned(), values);
        if let Some(until) = query.until {
            values.push(Value::Real(until));
            sql.push_str(&format!(" AND at <= ?{}", values.len()));
        }
        Ok(Self { sql, values })
    }

    /// A statement with more parameters behind those of the condition, written as `?` in `sql`, and all values.
    fn with(&self, sql: &str, more: impl IntoIterator<Item = Value>) -> (String, Vec<Value>) {
        let values = self.values.iter().cloned().chain(more).collect();
        (sql.replace("{}", &self.sql), values)
    }
}

/// Returns ids and stored JSON of the newest selected events, oldest first; at most `query.max_bytes` and one row.
pub fn newest(connection: &Connection, query: &Query) -> rusqlite::Result<Vec<(i64, String)>> {
    let condition = Condition::of(connection, query)?;
    let (sql, values) = condition.with(
        "SELECT id, body FROM events WHERE {} ORDER BY at DESC, id DESC LIMIT ?",
        [Value::Integer(limit(query.limit))],
    );
    let mut statement = connection.prepare(&sql)?;
    let mut rows = statement.query(params_from_iter(values))?;
    let (mut found, mut bytes) = (Vec::new(), 0);
    while bytes <= query.max_bytes
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
    use crate::ledger::events::LedgerEvent;
    use crate::ledger::store::{Store, WriteBatch};

    fn exit(id: u64, at: f64, name: &str) -> (u64, LedgerEvent) {
        let text = "x".repeat(40_000);
        let event = serde_json::json!({"type": "exit", "id": id, "at": at, "container_name": name, "container_id": format!("{id:064x}"),
            "k8s_pod_name": "pod", "reason": "error", "oom_kills": 0, "evidence": [{"source": "kmsg", "text": text}]});
        (id, serde_json::from_value(event).unwrap())
    }

    fn all_pages(store: &Store, query: &Query) -> Vec<Vec<String>> {
        let (mut pages, mut at) = (vec![], None);
        loop {
            let page = store.page(query, at).unwrap();
            pages.push(page.raw_json);
            let Some(next) = page.next else { return pages };
            at = Some(next);
        }
    }

    #[test]
    fn pages_together_are_the_whole_answer_and_none_is_large() {
        let mut store = Store::in_memory(0).unwrap();
        // of one moment too, and entered in another order than that of their times
        let events = (1..=60)
            .map(|id| exit(id, 1000.0 - (id / 4) as f64, if id % 3 == 0 { "train" } else { "other" }));
        store.commit(&WriteBatch { events: events.collect(), ..WriteBatch::default() }).unwrap();
        for container in [None, Some("train"), Some("pod/train"), Some("0000"), Some("nobody")] {
            for since in [None, Some(990.0), Some(2000.0)] {
                for limit in [0, 1, 6, 7, 19, 20, 21, 60, 100] {
                    let container = container.map(str::to_owned);
                    let query = Query { since, container, limit, ..Query::default() };
                    let pages = all_pages(&store, &query);
                    let whole: Vec<_> = newest(&store.connection, &query)
                        .unwrap()
                        .into_iter()
                        .map(|(_, body)| body)
                        .collect();
                    assert_eq!(pages.concat(), whole, "{query:?}");
                    let bytes = |page: &Vec<String>| page.iter().map(String::len).sum::<usize>();
                    assert!(pages.iter().all(|page| bytes(page) < PAGE_BYTES + 50_000), "{query:?}");
                    assert!(pages.len() == 1 || pages.iter().all(|page| !page.is_empty()), "{query:?}");
                }
            }
        }
    }

    #[test]
    fn a_bound_on_bytes_leaves_out_the_oldest() {
        let mut store = Store::in_memory(0).unwrap();
        store
            .commit(&WriteBatch {
                events: (1..=9).map(|id| exit(id, id as f64, "train")).collect(),
                ..WriteBatch::default()
            })
            .unwrap();
        let query = Query { max_bytes: 100_000, ..Query::default() };
        let ids: Vec<_> = store.events(&query).unwrap().iter().map(LedgerEvent::id).collect();
        assert_eq!(ids, [7, 8, 9]);
    }
}
