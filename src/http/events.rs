//! `GET /api/v1/events`: events of the ledger as JSON.

use std::sync::Arc;

use axum::extract::{RawQuery, State};
use axum::response::Response;

use super::query::{self, Selection};
use super::{HttpState, bad_request, failed, ledger_not_open, pages};
use crate::clock::Timestamp;
use crate::config::since;
use crate::ledger::store::Query;

/// Maximum number of `ids`.
pub const MAX_IDS: usize = 200;

/// Maximum of `limit`.
pub const MAX_EVENTS: usize = crate::host::bounds::API_EVENTS.max;

/// The route.
pub async fn route(
    State(shared): State<Arc<HttpState>>,
    RawQuery(query): RawQuery,
) -> Result<Response, Response> {
    let event_reader = shared.event_reader.clone().ok_or_else(ledger_not_open)?;
    let query = parse_query(query.as_deref().unwrap_or(""), Timestamp::now().unix_seconds());
    let query = query.map_err(bad_request)?;
    let read = move |at| {
        let page = event_reader.read(|store| store.page(&query, at)).map_err(failed)?;
        Ok((page.raw_json, page.next))
    };
    pages::respond(shared, "events", read).await
}

/// Parses a query string.
pub(super) fn parse_query(text: &str, now_unix: f64) -> Result<Query, String> {
    let name = ("container", "a name, an id, or the beginning of an id");
    let others = ["until", "notable", "ids"];
    let Selection { since, name: container, limit } =
        query::selection(text, now_unix, MAX_EVENTS, name, &others)?;
    let mut query = Query { since, container, limit, ..Query::default() };
    for parameter in query::parameters(text) {
        match parameter? {
            ("until", value) => {
                let until = since::since(&value, now_unix).map_err(|wanted| format!("until: {wanted}"))?;
                query.until = Some(until);
            }
            ("notable", value) => {
                let notable = value.parse().map_err(|_| "notable: expected true or false".to_owned());
                query.only_notable = notable?;
            }
            ("ids", value) => {
                let ids = value.split(',').map(str::parse).collect::<Result<Vec<u64>, _>>();
                let ids = ids.ok().filter(|ids| ids.len() <= MAX_IDS);
                query.ids =
                    ids.ok_or_else(|| format!("ids: expected at most {MAX_IDS} ids, separated by commas"))?;
            }
            _ => {}
        }
    }
    Ok(query)
}

#[cfg(test)]
mod tests {
    use crate::http::test_server::TestServer;

    #[test]
    fn serves_events_of_the_store() {
        let body = r#"{"type":"exit","id":7,"at":5.0,"container_name":"train","container_id":"abc","kernel_log_read":false,"oom_kills":0,"requests_known":false,"evidence":[]}"#;
        let server = TestServer::with_event(body);
        let get = |query: &str| server.get(&format!("events{query}"), "*/*");
        assert_eq!(get(""), (200, format!("{{\"events\":[\n{body}\n]}}\n")));
        assert_eq!(get("?container=ab&since=1&limit=3").0, 200);
        assert_eq!(get("?since=6"), (200, "{\"events\":[]}\n".to_owned()));
        let (status, text) = get("?limit=all");
        assert_eq!(status, 400);
        assert!(text.contains("expected 1 to 10000"), "{text}");
    }
}
