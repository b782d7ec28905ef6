//! `POST /api/v1/containers/NAME/cleanup`: asks the processes of a container to give torch's cache back to the GPU.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::HttpState;
use crate::config::parse_duration;
use crate::config::percent::decoded;
use crate::discover::Container;
use crate::reporter::cleanup::{CleanupRefusal, DEADLINE, MAX_DEADLINE, MIN_DEADLINE};
use crate::text::nearest;

/// The route. It responds once all processes have answered or the deadline has passed.
pub async fn route(
    State(shared): State<Arc<HttpState>>,
    Path(wanted): Path<String>,
    RawQuery(query): RawQuery,
) -> Response {
    let refuse = |status, text: String| (status, format!("{text}\n")).into_response();
    let deadline = match deadline(query.as_deref().unwrap_or("")) {
        Ok(deadline) => deadline,
        Err(expected) => return refuse(StatusCode::BAD_REQUEST, expected),
    };
    let Some(reporter) = &shared.reporter else {
        let text =
            "memledger receives no reports of processes: see --reporter.directory and memledger doctor";
        return refuse(StatusCode::SERVICE_UNAVAILABLE, text.to_owned());
    };
    let running = match shared.running_containers() {
        Ok(running) => running,
        Err(reason) => return reason.into_response(),
    };
    let container = match only(&running, &wanted) {
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

/// Returns the only container that a name or the beginning of an id means.
fn only<'a>(running: &'a [Arc<Container>], wanted: &str) -> Result<&'a Container, (StatusCode, String)> {
    let mut found: Vec<_> =
        running.iter().filter(|container| container.identity.matches_name(wanted)).collect();
    if found.is_empty() && !wanted.is_empty() {
        found = running.iter().filter(|container| container.id.as_str().starts_with(wanted)).collect();
    }
    let paths = |containers: &[&Arc<Container>]| -> Vec<String> {
        containers.iter().map(|container| container.identity.path()).collect()
    };
    match found.as_slice() {
        [container] => Ok(container),
        [] => {
            let nearest = nearest(paths(&running.iter().collect::<Vec<_>>()), wanted);
            Err((StatusCode::NOT_FOUND, format!("no container {wanted:?} is running{nearest}")))
        }
        several => {
            let text = format!("{wanted:?} means several containers: {}", paths(several).join(", "));
            Err((StatusCode::CONFLICT, text))
        }
    }
}

/// Parses the query string: `deadline=DURATION`.
fn deadline(query: &str) -> Result<Duration, String> {
    if query.is_empty() {
        return Ok(DEADLINE);
    }
    let (min, max) = (MIN_DEADLINE, MAX_DEADLINE);
    let value = query.strip_prefix("deadline=").and_then(decoded);
    let found = value.and_then(|text| parse_duration(&text)).filter(|found| (min..=max).contains(found));
    found
        .ok_or_else(|| format!("{query:?} is not valid; expected deadline=DURATION, from {min:?} to {max:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_that_means_several_containers_is_refused() {
        let running = [Container::in_cgroup("abc1", "/1"), Container::in_cgroup("abd2", "/2")];
        assert_eq!(only(&running, "abd").unwrap().id.as_str(), "abd2");
        assert_eq!(only(&running, "ab").unwrap_err().0, StatusCode::CONFLICT);
        for wanted in ["", "x"] {
            assert_eq!(only(&running, wanted).unwrap_err().0, StatusCode::NOT_FOUND);
        }
    }

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
