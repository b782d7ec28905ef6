//! `GET /api/v1/containers/NAME/why`: why a container or one of its processes ended. JSON, or the output of `memledger why`
//! for clients that accept `text/plain`.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::{HttpState, accepts};
use crate::clock::Timestamp;
use crate::export::verdict_text::render;
use crate::ledger::events::{ContainerLabels, ContainerRef};
use crate::ledger::why::{Verdict, ask, not_found, nothing};

/// Responds with the verdict; 404 if no event is recorded for the name and no such container runs.
pub async fn route(
    State(shared): State<Arc<HttpState>>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Response {
    respond(shared, Some(name), headers).await
}

/// Responds with the verdict on the newest OOM kill or abnormal exit of any container; 404 if there is none.
pub async fn last(State(shared): State<Arc<HttpState>>, headers: HeaderMap) -> Response {
    respond(shared, None, headers).await
}

async fn respond(shared: Arc<HttpState>, name: Option<String>, headers: HeaderMap) -> Response {
    let Some(event_reader) = shared.event_reader.clone() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "memledger runs without a ledger\n").into_response();
    };
    // browsers and curl, which accept anything, get JSON as from the other routes
    let plain = accepts(&headers, header::ACCEPT, "text/plain");
    let now = Timestamp::now().unix_seconds();
    let reading = Arc::clone(&shared);
    let answer = reading.read_ledger(move || {
        let name = name.as_deref();
        let found = ask(name, now, |query| event_reader.events(query)).map_err(|error| error.to_string())?;
        let found = found.or_else(|| Some(nothing(running(&shared, name?)?, true, None, now)));
        match found {
            Some(verdict) => body(&verdict, plain).map(Ok),
            None => not_found(name, std::iter::empty(), |query| event_reader.events(query))
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

/// Finds a running container by its name, id or the beginning of its id, in a pod also by `POD/NAME`.
fn running(shared: &HttpState, wanted: &str) -> Option<ContainerRef> {
    let found = shared.running_container(wanted)?;
    Some(ContainerRef {
        name: ContainerLabels::from(&found.identity),
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
    fn serves_the_verdict_as_json_and_text() {
        use crate::ledger::store::{EventReader, Store, WriteBatch};
        let body = r#"{"type":"exit","id":7,"at":5.0,"container_name":"my train","container_id":"abc","oom_kills":0,
            "reason":"error","exit_code":3,"evidence":[]}"#;
        let mut store = Store::in_memory(0).unwrap();
        let event = serde_json::from_str(body).unwrap();
        store.commit(&WriteBatch { events: [(7, event)].into(), ..WriteBatch::default() }).unwrap();
        let event_reader = Some(EventReader::Memory(Arc::new(std::sync::Mutex::new(store))));
        let command = crate::config::arguments(clap::Command::new("memledger").no_binary_name(true));
        let config = crate::config::Config::load(&command.get_matches_from(["--web.enable-api"])).unwrap();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let access_control = Arc::new(super::super::AccessControl::new(&config, Default::default()).unwrap());
        let router = super::super::router(
            &config,
            Arc::new(super::super::SnapshotCache::default()),
            event_reader,
            Default::default(),
            None,
            &access_control,
        );
        let _server =
            runtime.spawn(super::super::serve(listener, router, access_control, std::future::pending()));
        let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
        let get = |name: &str, header: &str, value: &str| {
            let request = agent.get(format!("http://{address}/api/v1/{name}"));
            let mut response = request.header(header, value).call().unwrap();
            (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
        };
        let (status, text) = get("containers/my%20train/why", "Accept", "*/*");
        let verdict: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((status, &verdict["cause"]), (200, &"error_exit".into()), "{text}");
        assert_eq!(get("containers/abc/why", "Accept", "application/json").0, 200);
        let (status, text) = get("containers/my%20train/why", "Accept", "text/plain");
        assert!(status == 200 && text.starts_with("my train (abc)\nENDED WITH AN ERROR"), "{text}");
        let (status, text) = get("containers/other/why", "Accept", "text/plain");
        assert_eq!((status, &*text), (404, "Nothing is known about other; known containers: my train\n"));
        let (status, text) = get("why", "Accept", "text/plain");
        assert!(status == 200 && text.starts_with("my train (abc)"), "{text}");
    }
}
