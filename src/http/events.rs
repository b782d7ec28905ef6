//! `GET /api/v1/events`: events of the ledger as JSON.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use futures_util::{StreamExt, stream};

use super::HttpState;
use crate::clock::Timestamp;
use crate::config::percent::decoded;
use crate::config::since;
use crate::export::events;
use crate::ledger::store::{Cursor, EventReader, Query};

/// Default of `limit`.
const DEFAULT_LIMIT: usize = 100;
/// Maximum of `limit`.
pub const MAX_EVENTS: usize = 10_000;

/// The route.
pub async fn route(State(shared): State<Arc<HttpState>>, RawQuery(query): RawQuery) -> Response {
    let Some(event_reader) = shared.event_reader.clone() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "memledger runs without a ledger\n").into_response();
    };
    let query = match parse_query(query.as_deref().unwrap_or(""), Timestamp::now().unix_seconds()) {
        Ok(query) => query,
        Err(wanted) => return (StatusCode::BAD_REQUEST, format!("{wanted}\n")).into_response(),
    };
    // an error in the first page has a status of its own; a later one aborts the response
    let (reader, wanted) = (event_reader.clone(), query.clone());
    let first = match shared.read_ledger(move || read_page(&reader, &wanted, None)).await {
        Ok(first) => first,
        Err(response) => return response,
    };
    let rest = Rest { shared, event_reader, query, cursor: first.1 };
    let first = stream::once(std::future::ready(Ok(first.0)));
    let body = Body::from_stream(first.chain(stream::try_unfold(rest, Rest::next)));
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// Returns the text of a page, and the cursor of the next one.
fn read_page(
    event_reader: &EventReader,
    query: &Query,
    at: Option<Cursor>,
) -> Result<(String, Option<Cursor>), String> {
    let page = event_reader.page(query, at).map_err(|error| error.to_string())?;
    Ok((events::json(&page.raw_json, at.is_none(), page.next.is_none()), page.next))
}

/// The pages that are still unread. One is read when the client has received most of the page before it.
struct Rest {
    shared: Arc<HttpState>,
    event_reader: EventReader,
    query: Query,
    cursor: Option<Cursor>,
}

impl Rest {
    async fn next(mut self) -> Result<Option<(String, Self)>, std::io::Error> {
        let Some(cursor) = self.cursor else { return Ok(None) };
        let (reader, query) = (self.event_reader.clone(), self.query.clone());
        let read = self.shared.read_ledger(move || read_page(&reader, &query, Some(cursor)));
        let broken = |answer: Response| {
            std::io::Error::other(format!("reading the ledger failed: {}", answer.status()))
        };
        let (text, next) = read.await.map_err(broken)?;
        self.cursor = next;
        Ok(Some((text, self)))
    }
}

/// Parses a query string.
pub(super) fn parse_query(text: &str, now_unix: f64) -> Result<Query, String> {
    let mut query = Query { limit: DEFAULT_LIMIT, ..Query::default() };
    for pair in text.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let value =
            decoded(value).ok_or_else(|| format!("{key:?}: {value:?} is not percent-encoded text"))?;
        match key {
            "since" => {
                query.since =
                    Some(since::since(&value, now_unix).map_err(|wanted| format!("since: {wanted}"))?);
            }
            "container" if !value.is_empty() => query.container = Some(value),
            "container" => return Err("container: expected a name, an id, or the beginning of an id".into()),
            "limit" => {
                let limit = value.parse().ok().filter(|limit| (1..=MAX_EVENTS).contains(limit));
                query.limit = limit
                    .ok_or_else(|| format!("limit: {value:?} is not valid; expected 1 to {MAX_EVENTS}"))?;
            }
            _ => return Err(format!("unknown parameter {key:?}; allowed: since, container, limit")),
        }
    }
    Ok(query)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_query_parameters() {
        let query = parse_query("since=1h&container=tr%61in&limit=7", 10_000.0).unwrap();
        assert_eq!((query.since, query.container.as_deref(), query.limit), (Some(6400.0), Some("train"), 7));
        let query = parse_query("since=1970-01-01T01:00:10+01:00", 0.0).unwrap();
        assert_eq!((query.since, query.container, query.limit), (Some(10.0), None, DEFAULT_LIMIT));
        assert_eq!(parse_query("", 0.0).unwrap().limit, DEFAULT_LIMIT);
    }

    #[test]
    fn rejects_invalid_parameters_with_the_allowed_values() {
        for (text, says) in [
            ("since=yesterday", "since: \"yesterday\" is not valid; expected a duration such as"),
            ("since", "since: \"\" is not valid"),
            ("limit=0", "expected 1 to 10000"),
            ("limit=10001", "expected 1 to 10000"),
            ("limit=-1", "expected 1 to 10000"),
            ("container=", "the beginning of an id"),
            ("container=%zz", "percent-encoded"),
            ("container=%ff", "percent-encoded"),
            ("container=%+1", "percent-encoded"),
            ("container=a%4", "percent-encoded"),
            ("sice=1h", "allowed: since, container, limit"),
        ] {
            let error = parse_query(text, 0.0).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    fn config() -> crate::config::Config {
        let command = crate::config::arguments(clap::Command::new("memledger").no_binary_name(true));
        crate::config::Config::load(&command.get_matches_from(["--web.enable-api"])).unwrap()
    }

    #[test]
    fn serves_events_of_the_store() {
        use crate::ledger::store::{EventReader, Store, WriteBatch};
        let body = r#"{"type":"exit","id":7,"at":5.0,"container_name":"train","container_id":"abc","kernel_log_read":false,"oom_kills":0,"evidence":[]}"#;
        let mut store = Store::in_memory(0).unwrap();
        let event = serde_json::from_str(body).unwrap();
        store.commit(&WriteBatch { events: [(7, event)].into(), ..WriteBatch::default() }).unwrap();
        let snapshot_cache = Arc::new(super::super::SnapshotCache::default());
        let event_reader = Some(EventReader::Memory(Arc::new(std::sync::Mutex::new(store))));
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let config = config();
        let access_control = Arc::new(super::super::AccessControl::new(&config, Default::default()).unwrap());
        let router = super::super::router(
            &config,
            snapshot_cache,
            event_reader,
            Default::default(),
            None,
            &access_control,
        );
        let _server =
            runtime.spawn(super::super::serve(listener, router, access_control, std::future::pending()));
        let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
        let get = |query: &str| {
            let mut response = agent.get(format!("http://{address}/api/v1/events{query}")).call().unwrap();
            (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
        };
        assert_eq!(get(""), (200, format!("{{\"events\":[\n{body}\n]}}\n")));
        assert_eq!(get("?container=ab&since=1&limit=3").0, 200);
        assert_eq!(get("?since=6"), (200, "{\"events\":[]}\n".to_owned()));
        let (status, text) = get("?limit=all");
        assert_eq!(status, 400);
        assert!(text.contains("expected 1 to 10000"), "{text}");
    }
}
