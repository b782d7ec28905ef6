//! `GET /api/v1/containers/NAME/why`: what ended a container or killed a part of it, as JSON, or as the screen of
//! `memledger why` for those who accept `text/plain`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::{Place, Shared, aside};
use crate::clock::Moment;
use crate::export::why::render;
use crate::ledger::entries::{Name, Subject};
use crate::ledger::why::{Verdict, ask, not_found, nothing};

/// The route. 404 with what is known if nothing is recorded of the name and no container of that name runs.
pub async fn route(
    State(shared): State<Arc<Shared>>,
    Extension(place): Extension<Place>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Response {
    let Some(archive) = shared.archive.clone() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "this memledger keeps no ledger\n").into_response();
    };
    let plain = accepts_plain(&headers);
    let now = Moment::now().unix_seconds();
    let answer = aside(place, move || {
        let found =
            ask(Some(&name), now, |query| archive.events(query)).map_err(|error| error.to_string())?;
        let found = found.or_else(|| running(&shared, &name).map(|subject| nothing(subject, now)));
        match found {
            Some(verdict) => body(&verdict, plain).map(Ok),
            None => not_found(Some(&name), |query| archive.events(query))
                .map(Err)
                .map_err(|error| error.to_string()),
        }
    });
    let content_type = if plain { "text/plain; charset=utf-8" } else { "application/json" };
    match answer.await {
        Ok(Ok(body)) => ([(header::CONTENT_TYPE, content_type)], body).into_response(),
        Ok(Err(known)) => (StatusCode::NOT_FOUND, format!("{known}\n")).into_response(),
        Err(response) => response,
    }
}

fn body(verdict: &Verdict, plain: bool) -> Result<String, String> {
    if plain {
        return Ok(render(verdict));
    }
    let json = serde_json::to_string_pretty(verdict).map_err(|error| error.to_string())?;
    Ok(json + "\n")
}

/// True if plain text is accepted by name: a browser and curl, which accept anything, get JSON as from the other routes.
fn accepts_plain(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|range| {
        let name = range.split(';').next().unwrap_or("").trim();
        name.eq_ignore_ascii_case("text/plain")
    })
}

/// A container that runs now, by its name, its id or the beginning of its id; in a pod by `POD/NAME` too.
fn running(shared: &Shared, wanted: &str) -> Option<Subject> {
    let newest = shared.newest().ok()?;
    let snapshot = newest.snapshot();
    let containers = snapshot.containers.iter().take(snapshot.running);
    let named = containers.clone().find(|container| container.identity.is_called(wanted));
    let found = named.or_else(|| {
        let mut begins = containers.filter(|container| container.id.as_str().starts_with(wanted));
        begins.next()
    })?;
    Some(Subject {
        name: Name::from(&found.identity),
        container_id: Arc::clone(found.id.shared()),
        image: Arc::clone(&found.image),
        runtime: found.runtime.into(),
        started: found.started,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_text_is_for_those_who_ask_for_it() {
        for (value, plain) in [("text/plain", true), ("text/html, TEXT/plain;q=0.5", true), ("*/*", false)] {
            let headers = HeaderMap::from_iter([(header::ACCEPT, value.parse().unwrap())]);
            assert_eq!(accepts_plain(&headers), plain, "{value}");
        }
        assert!(!accepts_plain(&HeaderMap::new()));
    }

    #[test]
    fn the_api_says_why() {
        use crate::ledger::store::{Archive, Changes, Store};
        let body = r#"{"type":"exit","id":7,"at":5.0,"container_name":"my train","container_id":"abc","oom_kills":0,
            "reason":"error","exit_code":3,"evidence":[]}"#;
        let mut store = Store::in_memory().unwrap();
        let event = serde_json::from_str(body).unwrap();
        store.commit(&Changes { events: [(7, event)].into(), ..Changes::default() }).unwrap();
        let archive = Some(Archive::Memory(Arc::new(std::sync::Mutex::new(store))));
        let command = crate::config::arguments(clap::Command::new("memledger").no_binary_name(true));
        let config = crate::config::Config::load(&command.get_matches_from([""; 0])).unwrap();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let door = Arc::new(super::super::Door::new(&config, Default::default()).unwrap());
        let router = super::super::router(
            &config,
            Arc::new(super::super::Published::default()),
            archive,
            Default::default(),
            &door,
        );
        let _server = runtime.spawn(super::super::serve(listener, router, door, std::future::pending()));
        let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
        let get = |name: &str, header: &str, value: &str| {
            let request = agent.get(format!("http://{address}/api/v1/containers/{name}/why"));
            let mut response = request.header(header, value).call().unwrap();
            (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
        };
        let (status, text) = get("my%20train", "Accept", "*/*");
        let verdict: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((status, &verdict["cause"]), (200, &"error_exit".into()), "{text}");
        assert_eq!(get("abc", "Accept", "application/json").0, 200);
        let (status, text) = get("my%20train", "Accept", "text/plain");
        assert!(status == 200 && text.starts_with("my train (abc)\nENDED WITH AN ERROR"), "{text}");
        let (status, text) = get("other", "Accept", "text/plain");
        assert_eq!((status, &*text), (404, "nothing is recorded about other; known are: my train\n"));
        let (status, text) = get("my%20train", "X-Forwarded-For", "10.0.0.1");
        assert!(status == 403 && text.contains("--web.enable-api"), "{text}");
    }
}
