//! `GET /api/v1/containers/NAME/why`: why a container or one of its processes ended. JSON, or the output of `memledger why`
//! for clients that accept `text/plain`.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::{HttpState, Rejected, accepts, failed, ledger_not_open, only_container};
use crate::clock::Timestamp;
use crate::diagnose::{Diagnosis, RunFinding, has_other_name, not_found, query_diagnosis, without_events};
use crate::events::ContainerRef;
use crate::export::words::screen::render;
use crate::export::words::{self, WhyDocument};

/// Responds with the diagnosis; 404 if no event is recorded for the name and no such container runs.
pub async fn route(
    State(shared): State<Arc<HttpState>>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Result<Response, Response> {
    respond(shared, Some(name), headers).await
}

/// Responds with the diagnosis of the newest OOM kill or abnormal exit of any container; 404 if there is none.
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
        let found = query_diagnosis(name, now, |query| event_reader.read(|store| store.events(query)))
            .map_err(failed)?;
        let container = name.map(|name| only_container(&running, name));
        // the wanted name is another container's now
        let is_other = |diagnosis: &Diagnosis| {
            let of = diagnosis.subject.as_ref().map(|subject| &*subject.container_id);
            let is_another = matches!(&container, Some(Ok(running)) if of != Some(running.id.as_str()));
            is_another && name.is_some_and(|name| has_other_name(diagnosis, name))
        };
        if let Some(diagnosis) = found.filter(|diagnosis| !is_other(diagnosis)) {
            return body(&diagnosis, plain);
        }
        match container {
            Some(Ok(container)) => {
                let mut diagnosis = without_events(ContainerRef::of(container), true, None, now);
                diagnosis.findings.push(RunFinding::OnlyLedger.into());
                body(&diagnosis, plain)
            }
            Some(Err(several @ (StatusCode::CONFLICT, _))) => Err(several),
            _ => {
                let known = not_found(name, std::iter::empty(), |query| {
                    event_reader.read(|store| store.events(query))
                })
                .map_err(failed)?;
                let message = words::not_found(&known, true);
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

/// Returns the body with a diagnosis.
fn body(diagnosis: &Diagnosis, plain: bool) -> Result<(StatusCode, String), Rejected> {
    let text =
        if plain { render(diagnosis) } else { WhyDocument::of(diagnosis).to_json().map_err(failed)? };
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
        let diagnosis: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((status, &diagnosis["cause"]), (200, &"error_exit".into()), "{text}");
        assert_eq!(server.get("containers/abc/why", "application/json").0, 200);
        // what axios and Angular send
        assert!(server.get("containers/abc/why", "application/json, text/plain, */*").1.starts_with('{'));
        let (status, text) = server.get("containers/other/why", "*/*");
        let unknown: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (status, &unknown["found"], &diagnosis["found"]),
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
