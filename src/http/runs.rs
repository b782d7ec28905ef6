//! `GET /api/v1/runs`: records of runs as JSON; `GET /api/v1/runs/RUN`: one of them, as JSON or in another format.

use std::sync::Arc;

use axum::extract::{Path, RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::HttpState;
use crate::clock::Timestamp;
use crate::config::percent::decoded;
use crate::config::since;
use crate::export::runs;
use crate::ledger::run_record::{RunRecord, nearest_names};
use crate::ledger::store::RunQuery;

/// Default of `limit`.
const DEFAULT_LIMIT: usize = 100;
/// Maximum of `limit`: a record has about 8 KiB.
pub const MAX_RUNS: usize = 500;

/// Responds with the newest selected records, oldest first.
pub async fn list(State(shared): State<Arc<HttpState>>, RawQuery(query): RawQuery) -> Response {
    let Some(event_reader) = shared.event_reader.clone() else { return no_ledger() };
    let query = match parse_query(query.as_deref().unwrap_or(""), Timestamp::now().unix_seconds()) {
        Ok(query) => query,
        Err(wanted) => return (StatusCode::BAD_REQUEST, format!("{wanted}\n")).into_response(),
    };
    let read = shared.read_ledger(move || {
        let runs = event_reader.runs(&query).map_err(|error| error.to_string())?;
        serde_json::to_string(&serde_json::json!({ "runs": runs })).map_err(|error| error.to_string())
    });
    match read.await {
        Ok(body) => ([(header::CONTENT_TYPE, "application/json")], body + "\n").into_response(),
        Err(response) => response,
    }
}

/// Responds with the newest record of a run, a container or a group; 404 if there is none.
pub async fn newest(
    State(shared): State<Arc<HttpState>>,
    Path(wanted): Path<String>,
    RawQuery(query): RawQuery,
) -> Response {
    let Some(event_reader) = shared.event_reader.clone() else { return no_ledger() };
    let format = match query.as_deref().unwrap_or("") {
        "" | "format=json" => "json",
        "format=csv" => "csv",
        "format=memory_usage" => "memory_usage",
        other => {
            let text = format!("{other:?} is not valid; expected format=json, csv or memory_usage\n");
            return (StatusCode::BAD_REQUEST, text).into_response();
        }
    };
    let read = shared.read_ledger(move || {
        let query = RunQuery { wanted: Some(wanted.clone()), limit: 1, since: None };
        let found = event_reader.runs(&query).map_err(|error| error.to_string())?;
        let Some(run) = found.first() else {
            return unknown(&wanted, &event_reader.runs(&RECENT).map_err(|error| error.to_string())?);
        };
        let pretty = match format {
            "csv" => return Ok(Ok(runs::csv(run))),
            "memory_usage" => serde_json::to_string_pretty(&runs::memory_usage(run)),
            _ => serde_json::to_string_pretty(run),
        };
        pretty.map(|text| Ok(text + "\n")).map_err(|error| error.to_string())
    });
    let content_type = if format == "csv" { "text/csv; charset=utf-8" } else { "application/json" };
    respond(read.await, content_type)
}

/// Responds with the advice for the group of a run, a container or a group; 404 if there is none.
pub async fn advice(State(shared): State<Arc<HttpState>>, Path(wanted): Path<String>) -> Response {
    let Some(event_reader) = shared.event_reader.clone() else { return no_ledger() };
    let read = shared.read_ledger(move || {
        let runs = |query: RunQuery| event_reader.runs(&query).map_err(|error| error.to_string());
        let newest = runs(RunQuery { wanted: Some(wanted.clone()), limit: 1, since: None })?;
        let Some(newest) = newest.first() else { return unknown(&wanted, &runs(RECENT)?) };
        let group = RunQuery { wanted: Some(newest.group.to_string()), limit: MAX_RUNS, since: None };
        let mut runs = runs(group)?;
        runs.retain(|run| run.group == newest.group);
        let Some(advice) = crate::diagnose::advice::advise(&runs) else {
            return Ok(Err(format!("no run of {wanted:?} has ended yet\n")));
        };
        serde_json::to_string_pretty(&advice).map(|text| Ok(text + "\n")).map_err(|error| error.to_string())
    });
    respond(read.await, "application/json")
}

/// Selects the runs whose names are proposed for an unknown one.
const RECENT: RunQuery = RunQuery { since: None, wanted: None, limit: DEFAULT_LIMIT };

fn unknown(wanted: &str, known: &[RunRecord]) -> Result<Result<String, String>, String> {
    Ok(Err(format!("no run, container or group {wanted:?}{}\n", nearest_names(known, wanted))))
}

fn respond(read: Result<Result<String, String>, Response>, content_type: &'static str) -> Response {
    match read {
        Ok(Ok(body)) => ([(header::CONTENT_TYPE, content_type)], body).into_response(),
        Ok(Err(unknown)) => (StatusCode::NOT_FOUND, unknown).into_response(),
        Err(response) => response,
    }
}

fn no_ledger() -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, "memledger runs without a ledger\n").into_response()
}

/// Parses a query string.
fn parse_query(text: &str, now_unix: f64) -> Result<RunQuery, String> {
    let mut query = RunQuery { limit: DEFAULT_LIMIT, ..RunQuery::default() };
    for pair in text.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let value =
            decoded(value).ok_or_else(|| format!("{key:?}: {value:?} is not percent-encoded text"))?;
        match key {
            "since" => {
                query.since =
                    Some(since::since(&value, now_unix).map_err(|wanted| format!("since: {wanted}"))?);
            }
            "run" if !value.is_empty() => query.wanted = Some(value),
            "run" => return Err("run: expected a run, a container or a group".into()),
            "limit" => {
                let limit = value.parse().ok().filter(|limit| (1..=MAX_RUNS).contains(limit));
                query.limit = limit
                    .ok_or_else(|| format!("limit: {value:?} is not valid; expected 1 to {MAX_RUNS}"))?;
            }
            _ => return Err(format!("unknown parameter {key:?}; allowed: since, run, limit")),
        }
    }
    Ok(query)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_query_parameters_and_rejects_invalid_ones() {
        let query = parse_query("since=1h&run=tr%61in&limit=7", 10_000.0).unwrap();
        assert_eq!((query.since, query.wanted.as_deref(), query.limit), (Some(6400.0), Some("train"), 7));
        assert_eq!(parse_query("", 0.0).unwrap().limit, DEFAULT_LIMIT);
        for (text, says) in [
            ("limit=0", "expected 1 to 500"),
            ("limit=501", "expected 1 to 500"),
            ("run=", "a container or a group"),
            ("run=%zz", "percent-encoded"),
            ("since=yesterday", "since: \"yesterday\" is not valid"),
            ("name=a", "allowed: since, run, limit"),
        ] {
            let error = parse_query(text, 0.0).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
