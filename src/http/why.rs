//! `GET /api/v1/containers/NAME/why`: why a container or one of its processes ended. JSON, or the output of `memledger why`
//! for clients that accept `text/plain`.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::{HttpState, Rejected, accepts, failed, ledger_not_open, only_container};
use crate::clock::Timestamp;
use crate::events::ContainerRef;
use crate::explain::{
    Verdict, WhyDocument, has_other_name, not_found, query_verdict, verdict_without_events,
};
use crate::export::verdict_text::render;

/// What an answer without an event is based on.
const ONLY_LEDGER: &str = "Only the ledger was read. On the host, `memledger why` also reads the kernel log and the runtimes, for what \
     happened while memledger did not run.";

/// Responds with the verdict; 404 if no event is recorded for the name and no such container runs.
pub async fn route(
    State(shared): State<Arc<HttpState>>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Result<Response, Response> {
    respond(shared, Some(name), headers).await
}

/// Responds with the verdict on the newest OOM kill or abnormal exit of any container; 404 if there is none.
pub async fn last(State(shared): State<Arc<HttpState>>, headers: HeaderMap) -> Result<Response, Response> {
    respond(shared, None, headers).await
}

async fn respond(
    shared: Arc<HttpState>,
    name: Option<String>,
    headers: HeaderMap,
) -> Result<Response, Response> {
    let event_reader = shared.event_reader.clone().ok_or_else(ledger_not_open)?;
    // browsers, curl and libraries, which accept anything or JSON too, get JSON as from the other routes
    let accepts = |kind| accepts(&headers, header::ACCEPT, kind);
    let plain = accepts("text/plain") && !accepts("application/json");
    let now = Timestamp::now().unix_seconds();
    let running = shared.running_containers().unwrap_or_default();
    let work = move || {
        let name = name.as_deref();
        let found = query_verdict(name, now, |query| event_reader.read(|store| store.events(query)))
            .map_err(failed)?;
        let container = name.map(|name| only_container(&running, name));
        // the wanted name is another container's now
        let is_other = |verdict: &Verdict| {
            let of = verdict.subject.as_ref().map(|subject| &*subject.container_id);
            let is_another = matches!(&container, Some(Ok(running)) if of != Some(running.id.as_str()));
            is_another && name.is_some_and(|name| has_other_name(verdict, name))
        };
        if let Some(verdict) = found.filter(|verdict| !is_other(verdict)) {
            return body(&verdict, plain);
        }
        match container {
            Some(Ok(container)) => {
                let mut verdict = verdict_without_events(ContainerRef::of(container), true, None, now);
                verdict.also.push(ONLY_LEDGER.to_owned());
                body(&verdict, plain)
            }
            Some(Err(several @ (StatusCode::CONFLICT, _))) => Err(several),
            _ => {
                let known = not_found(name, std::iter::empty(), |query| {
                    event_reader.read(|store| store.events(query))
                })
                .map_err(failed)?;
                let message = format!("{known}\n{ONLY_LEDGER}");
                let text = match plain {
                    true => format!("{message}\n"),
                    false => WhyDocument::unknown(&message).to_json().map_err(failed)?,
                };
                Ok((StatusCode::NOT_FOUND, text))
            }
        }
    };
    let content_type = if plain { "text/plain; charset=utf-8" } else { "application/json" };
    let (status, body) = shared.read_ledger(work).await?;
    Ok((status, [(header::CONTENT_TYPE, content_type)], body).into_response())
}

/// Returns the body with a verdict.
fn body(verdict: &Verdict, plain: bool) -> Result<(StatusCode, String), Rejected> {
    let text =
        if plain { render(verdict) } else { WhyDocument::verdict(verdict).to_json().map_err(failed)? };
    Ok((StatusCode::OK, text))
}

#[cfg(test)]
mod tests {
    use crate::http::test_server::TestServer;

    #[test]
    fn serves_the_verdict_as_json_and_text() {
        let server = TestServer::with_event(
            r#"{"type":"exit","id":7,"at":5.0,"container_name":"my train","container_id":"abc","oom_kills":0,
            "reason":"error","exit_code":3,"evidence":[]}"#,
        );
        let (status, text) = server.get("containers/my%20train/why", "*/*");
        let verdict: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((status, &verdict["cause"]), (200, &"error_exit".into()), "{text}");
        assert_eq!(server.get("containers/abc/why", "application/json").0, 200);
        // what axios and Angular send
        assert!(server.get("containers/abc/why", "application/json, text/plain, */*").1.starts_with('{'));
        let (status, text) = server.get("containers/other/why", "*/*");
        let unknown: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (status, &unknown["found"], &verdict["found"]),
            (404, &false.into(), &true.into()),
            "{text}"
        );
        let (status, text) = server.get("containers/my%20train/why", "text/plain");
        assert!(status == 200 && text.starts_with("my train (abc)\nENDED WITH AN ERROR"), "{text}");
        let (status, text) = server.get("containers/other/why", "text/plain");
        assert!(
            text.starts_with(
                "Nothing is known about other; known containers: my train\nOnly the ledger was read"
            ),
            "{text}"
        );
        assert_eq!(status, 404);
        let (status, text) = server.get("why", "text/plain");
        assert!(status == 200 && text.starts_with("my train (abc)"), "{text}");
    }
}
