//! `POST /-/release-gpu`: closes the GPU driver's library for a while, so that the driver can be unloaded or replaced.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::HttpState;
use crate::clock::Timestamp;

/// How long the response waits for the library to be closed. A hung driver call prevents that.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);
/// How often that is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The route.
pub async fn route(State(shared): State<Arc<HttpState>>) -> Response {
    let (driver_state, span) = &shared.gpu;
    let requested = Timestamp::now();
    driver_state.request(requested, *span);
    while !driver_state.is_closed() && Timestamp::now().since(requested) < CLOSE_TIMEOUT {
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    let closed = driver_state.is_closed();
    let body = json!({
        "released_for_seconds": span.as_secs_f64(),
        "back_at": requested.plus(*span).unix_seconds(),
        "closed": closed,
    });
    // accepted: the library is closed when the driver call in progress returns
    let status = if closed { StatusCode::OK } else { StatusCode::ACCEPTED };
    (status, [(header::CONTENT_TYPE, "application/json")], format!("{body:#}\n")).into_response()
}
