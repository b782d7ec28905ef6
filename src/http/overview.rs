//! `GET /api/v1/overview`: who uses RAM and VRAM now.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse, Response};

use super::query::parameters;
use super::{HttpState, RequestPermit, bad_request, failed, json, run_blocking};
use crate::overview::Details;

/// The route. With `?processes` it has the processes of all containers, with `?container=ID` those and the last hour of one.
pub async fn route(
    State(shared): State<Arc<HttpState>>,
    permit: Option<Extension<RequestPermit>>,
    RawQuery(query): RawQuery,
) -> Result<Response, Response> {
    let (mut container, mut processes) = (None, false);
    for parameter in parameters(query.as_deref().unwrap_or("")) {
        match parameter.map_err(bad_request)? {
            ("container", id) => container = Some(id),
            ("processes", _) => processes = true,
            (other, _) => {
                return Err(bad_request(format!(
                    "unknown parameter {other:?}; allowed: container, processes"
                )));
            }
        }
    }
    let newest = shared.newest().map_err(IntoResponse::into_response)?;
    let work = move || {
        let details = match &container {
            Some(id) => Details::One(id),
            None if processes => Details::Processes,
            None => Details::None,
        };
        let overview = shared.snapshot_cache.overview(newest.snapshot(), details);
        serde_json::to_vec(&overview).map_err(failed)
    };
    run_blocking(permit, work).await.map(json)
}
