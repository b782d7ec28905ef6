//! `POST /-/release-gpu`: memledger lets go of the GPU driver, so that it can be unloaded or replaced.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::Shared;
use crate::clock::Moment;

/// So long the answer waits for the library to be closed. A driver that hangs does not close.
const CLOSED_WITHIN: Duration = Duration::from_secs(3);
/// How often that is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(10);

pub async fn route(State(shared): State<Arc<Shared>>, headers: HeaderMap) -> Response {
    // a web page may make its reader's browser send this; a browser says so
    if headers.contains_key(header::ORIGIN) {
        return (StatusCode::FORBIDDEN, "not for browsers\n").into_response();
    }
    let (control, span) = &shared.gpu;
    let asked = Moment::now();
    control.request(asked, *span);
    while !control.is_closed() && Moment::now().since(asked) < CLOSED_WITHIN {
        tokio::time::sleep(LOOK_EVERY).await;
    }
    let closed = control.is_closed();
    let body = json!({
        "released_for_seconds": span.as_secs_f64(),
        "back_at": asked.plus(*span).unix_seconds(),
        "closed": closed,
    });
    // accepted: it will be closed when the call that it is in returns
    let status = if closed { StatusCode::OK } else { StatusCode::ACCEPTED };
    (status, [(header::CONTENT_TYPE, "application/json")], format!("{body:#}\n")).into_response()
}
