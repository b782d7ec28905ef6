//! `POST /api/v1/containers/NAME/cleanup`: requests that the processes of a container give torch's cache back to the GPU.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, RawQuery, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use super::{HttpState, bad_request, json, only_container, query};
use crate::config::parse_duration;
use crate::reporter::cleanup::{CleanupRefusal, DEADLINE, MAX_DEADLINE, MIN_DEADLINE};

/// The route. It responds once all processes have answered or the deadline has passed.
pub async fn route(
    State(shared): State<Arc<HttpState>>,
    Path(wanted): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Response, Response> {
    let refuse = |status: StatusCode, text: String| (status, text + "\n").into_response();
    let unavailable = |text: &str| refuse(StatusCode::SERVICE_UNAVAILABLE, text.to_owned());
    let deadline = deadline(query.as_deref().unwrap_or("")).map_err(bad_request)?;
    let running = shared.running_containers().map_err(IntoResponse::into_response)?;
    let no_reports =
        "memledger receives no reports of processes: see --reporter.directory and memledger doctor";
    let reporter = shared.reporter.as_ref().ok_or_else(|| unavailable(no_reports))?;
    let container = only_container(&running, &wanted).map_err(IntoResponse::into_response)?;
    let permit = shared.cleanups.try_acquire();
    let _permit = permit.map_err(|_| unavailable("too many cleanups are in progress"))?;
    let requested = reporter.request_cleanup(container.id.clone(), deadline).await;
    let report =
        requested.map_err(|_| unavailable("memledger no longer receives reports"))?.map_err(|refusal| {
            let status = match refusal {
                CleanupRefusal::NotReporting => StatusCode::CONFLICT,
                CleanupRefusal::TooSoon(_) => StatusCode::TOO_MANY_REQUESTS,
            };
            refuse(status, format!("container {:?}: {refusal}", container.identity.path()))
        })?;
    let body = serde_json::json!({
        "container": container.identity.path(),
        "container_id": container.id.as_str(),
        "deadline_seconds": report.deadline_seconds,
        "freed_bytes": report.freed_bytes,
        "processes": report.processes,
    });
    Ok(json(format!("{body:#}\n")))
}

/// Parses the query string: `deadline=DURATION`.
fn deadline(text: &str) -> Result<Duration, String> {
    let (min, max) = (MIN_DEADLINE, MAX_DEADLINE);
    query::parameters(text).try_fold(DEADLINE, |_, parameter| {
        let found = match parameter? {
            ("deadline", value) => parse_duration(&value).filter(|found| (min..=max).contains(found)),
            _ => None,
        };
        found.ok_or_else(|| {
            format!("{text:?} is not valid; expected deadline=DURATION, from {min:?} to {max:?}")
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadline_is_bounded_and_nothing_else_is_accepted() {
        assert_eq!(deadline(""), Ok(DEADLINE));
        assert_eq!(deadline("deadline=20s"), Ok(Duration::from_secs(20)));
        for query in
            ["deadline=21s", "deadline=0s", "deadline=", "deadline", "deadlines=9s", "deadline=9s&x=1"]
        {
            assert!(deadline(query).unwrap_err().contains("from 1s to 20s"), "{query}");
        }
    }
}
