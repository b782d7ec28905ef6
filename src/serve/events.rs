//! `GET /api/v1/events`: what the ledger has, as JSON.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::{Place, Shared, aside};
use crate::clock::Moment;
use crate::config::percent::decoded;
use crate::config::since;
use crate::export::events;
use crate::ledger::store::Query;

/// Events of an answer unless asked otherwise, and at most.
const USUAL: usize = 100;
const MOST: usize = 10_000;

/// The route.
pub async fn route(
    State(shared): State<Arc<Shared>>,
    Extension(place): Extension<Place>,
    RawQuery(query): RawQuery,
) -> Response {
    let Some(archive) = shared.archive.clone() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "this memledger keeps no ledger\n").into_response();
    };
    let query = match asked(query.as_deref().unwrap_or(""), Moment::now().unix_seconds()) {
        Ok(query) => query,
        Err(wanted) => return (StatusCode::BAD_REQUEST, format!("{wanted}\n")).into_response(),
    };
    let answer = aside(place, move || {
        archive.bodies(&query).map(|bodies| events::json(&bodies)).map_err(|error| error.to_string())
    });
    match answer.await {
        Ok(body) => ([(header::CONTENT_TYPE, "application/json")], body).into_response(),
        Err(response) => response,
    }
}

/// What a query string asks for.
pub(super) fn asked(text: &str, now_unix: f64) -> Result<Query, String> {
    let mut query = Query { since: None, container: None, most: USUAL };
    for pair in text.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let value = decoded(value).ok_or_else(|| format!("{key:?}: {value:?} is no percent-encoded text"))?;
        match key {
            "since" => {
                query.since =
                    Some(since::since(&value, now_unix).map_err(|wanted| format!("since: {wanted}"))?);
            }
            "container" if !value.is_empty() => query.container = Some(value),
            "container" => return Err("container: wanted is a name, an id, or the beginning of an id".into()),
            "limit" => {
                let limit = value.parse().ok().filter(|limit| (1..=MOST).contains(limit));
                query.most =
                    limit.ok_or_else(|| format!("limit: {value:?} cannot be used; wanted is 1 to {MOST}"))?;
            }
            _ => return Err(format!("{key:?} is not known; allowed are since, container, limit")),
        }
    }
    Ok(query)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_is_understood() {
        let query = asked("since=1h&container=tr%61in&limit=7", 10_000.0).unwrap();
        assert_eq!((query.since, query.container.as_deref(), query.most), (Some(6400.0), Some("train"), 7));
        let query = asked("since=1970-01-01T01:00:10+01:00", 0.0).unwrap();
        assert_eq!((query.since, query.container, query.most), (Some(10.0), None, USUAL));
        assert_eq!(asked("", 0.0).unwrap().most, USUAL);
    }

    #[test]
    fn what_cannot_be_used_says_what_can() {
        for (text, says) in [
            ("since=yesterday", "since: \"yesterday\" cannot be used; wanted is a duration such as"),
            ("since", "since: \"\" cannot be used"),
            ("limit=0", "wanted is 1 to 10000"),
            ("limit=10001", "wanted is 1 to 10000"),
            ("limit=-1", "wanted is 1 to 10000"),
            ("container=", "the beginning of an id"),
            ("container=%zz", "percent-encoded"),
            ("container=%ff", "percent-encoded"),
            ("container=%+1", "percent-encoded"),
            ("container=a%4", "percent-encoded"),
            ("sice=1h", "allowed are since, container, limit"),
        ] {
            let error = asked(text, 0.0).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    fn config() -> crate::config::Config {
        let command = crate::config::arguments(clap::Command::new("memledger").no_binary_name(true));
        crate::config::Config::load(&command.get_matches_from([""; 0])).unwrap()
    }

    #[test]
    fn events_of_the_store_are_served() {
        use crate::ledger::store::{Archive, Changes, Store};
        let body = r#"{"type":"exit","id":7,"at":5.0,"container_name":"train","container_id":"abc","kernel_log_read":false,"oom_kills":0,"evidence":[]}"#;
        let mut store = Store::in_memory().unwrap();
        let event = serde_json::from_str(body).unwrap();
        store.commit(&Changes { events: [(7, event)].into(), ..Changes::default() }).unwrap();
        let published = Arc::new(super::super::Published::default());
        let archive = Some(Archive::Memory(Arc::new(std::sync::Mutex::new(store))));
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let config = config();
        let door = Arc::new(super::super::Door::new(&config, Default::default()).unwrap());
        let router = super::super::router(&config, published, archive, Default::default(), &door);
        let _server = runtime.spawn(super::super::serve(listener, router, door, std::future::pending()));
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
        assert!(text.contains("wanted is 1 to 10000"), "{text}");
    }
}
