//! `POST /api/v1/containers/NAME/cleanup`: requests that the processes of a container give torch's cache back to the GPU.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::{HttpState, bad_request, only_container, query};
use crate::config::parse_duration;
use crate::reporter::cleanup::{CleanupRefusal, DEADLINE, MAX_DEADLINE, MIN_DEADLINE};

/// The route. It responds once all processes have answered or the deadline has passed.
pub async fn route(
    State(shared): State<Arc<HttpState>>,
    Path(wanted): Path<String>,
    RawQuery(query): RawQuery,
) -> Response {
    let refuse = |status, text: String| (status, format!("{text}\n")).into_response();
    let deadline = match deadline(query.as_deref().unwrap_or("")) {
        Ok(deadline) => deadline,
        Err(expected) => return bad_request(expected),
    };
    let running = match shared.running_containers() {
        Ok(running) => running,
        Err(reason) => return reason.into_response(),
    };
    let Some(reporter) = &shared.reporter else {
        let text =
            "memledger receives no reports of processes: see --reporter.directory and memledger doctor";
        return refuse(StatusCode::SERVICE_UNAVAILABLE, text.to_owned());
    };
    let container = match only_container(&running, &wanted) {
        Ok(container) => container,
        Err((status, text)) => return refuse(status, text),
    };
    let Ok(_permit) = shared.cleanups.try_acquire() else {
        return refuse(StatusCode::SERVICE_UNAVAILABLE, "too many cleanups are in progress".to_owned());
    };
    match reporter.request_cleanup(container.id.clone(), deadline).await {
        Ok(Ok(report)) => {
            let body = serde_json::json!({
                "container": container.identity.path(),
                "container_id": container.id.as_str(),
                "deadline_seconds": report.deadline_seconds,
                "freed_bytes": report.freed_bytes,
                "processes": report.processes,
            });
            let head = [(header::CONTENT_TYPE, "application/json")];
            (StatusCode::OK, head, format!("{body:#}\n")).into_response()
        }
        Ok(Err(refusal)) => {
            let status = match refusal {
                CleanupRefusal::NotReporting => StatusCode::CONFLICT,
                CleanupRefusal::TooSoon(_) => StatusCode::TOO_MANY_REQUESTS,
            };
            refuse(status, format!("container {:?}: {refusal}", container.identity.path()))
        }
        Err(_) => refuse(StatusCode::SERVICE_UNAVAILABLE, "memledger no longer receives reports".to_owned()),
    }
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
