//! `GET /api/v1/runs`: records of runs as JSON; `GET /api/v1/runs/RUN`: one of them, as JSON or in another format.

use std::sync::Arc;

use axum::extract::{Path, RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use super::query::{self, Selection};
use super::{HttpState, Rejected, bad_request, failed, json, ledger_not_open, pages};
use crate::clock::Timestamp;
use crate::export::runs;
use crate::ledger::store::{EventReader, RunCursor, RunQuery};
use crate::runs::RunRecord;
use crate::runs::names::{check_unambiguous, nearest_names};

/// Maximum of `limit`, and of the records that advice is made from.
pub const MAX_RUNS: usize = crate::host::bounds::RUN_RECORDS.max;

/// Responds with the newest selected records, oldest first.
pub async fn list(
    State(shared): State<Arc<HttpState>>,
    RawQuery(query): RawQuery,
) -> Result<Response, Response> {
    let event_reader = shared.event_reader.clone().ok_or_else(ledger_not_open)?;
    let now = Timestamp::now().unix_seconds();
    let text = query.as_deref().unwrap_or("");
    let (whole, text): (Vec<_>, Vec<_>) = text.split('&').partition(|pair| *pair == "timelines=true");
    let selection =
        query::selection(&text.join("&"), now, MAX_RUNS, ("run", "a run, a container or a group"), &[]);
    let Selection { since, name, limit } = selection.map_err(bad_request)?;
    let query = RunQuery { since, name, limit, timelines: !whole.is_empty() };
    let read =
        move |at: Option<RunCursor>| event_reader.read(|store| store.run_page(&query, at)).map_err(failed);
    pages::respond(shared, "runs", read).await
}

/// Responds with the newest record of a run, a container or a group; 404 if there is none.
pub async fn newest(
    State(shared): State<Arc<HttpState>>,
    Path(name): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Response, Response> {
    let event_reader = shared.event_reader.clone().ok_or_else(ledger_not_open)?;
    let format = match query.as_deref().unwrap_or("") {
        "" | "format=json" => "json",
        "format=csv" => "csv",
        "format=memory_usage" => "memory_usage",
        other => {
            let text = format!("{other:?} is not valid; expected format=json, csv or memory_usage");
            return Err(bad_request(text));
        }
    };
    let read = shared.read_ledger(move || {
        let run = newest_run(&event_reader, &name)?;
        match format {
            "csv" => Ok(runs::csv(&run)),
            "memory_usage" => pretty(&runs::memory_usage(&run)),
            _ => pretty(&run),
        }
    });
    let content_type = if format == "csv" { "text/csv; charset=utf-8" } else { "application/json" };
    Ok(([(header::CONTENT_TYPE, content_type)], read.await?).into_response())
}

/// Responds with the advice for the group of a run, a container or a group; 404 if there is none. With `?check` also who holds the GPUs.
pub async fn advice(
    State(shared): State<Arc<HttpState>>,
    Path(name): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Response, Response> {
    let event_reader = shared.event_reader.clone().ok_or_else(ledger_not_open)?;
    let is_check = match query.as_deref().unwrap_or("") {
        "" => false,
        "check" | "check=true" => true,
        other => return Err(bad_request(format!("{other:?} is not valid; expected check"))),
    };
    let read = shared.read_ledger(move || {
        let group = newest_run(&event_reader, &name)?.group;
        let query = RunQuery { name: Some(group.to_string()), limit: MAX_RUNS, ..RunQuery::default() };
        let mut runs = read_runs(&event_reader, &query)?;
        runs.retain(|run| run.group == group);
        let advice = if is_check {
            let query = RunQuery { since: Some(f64::MAX), limit: MAX_RUNS, ..RunQuery::default() };
            let mut running = read_runs(&event_reader, &query)?;
            running.retain(|run| run.ended.is_none());
            crate::runs::advice::lines::check(&runs, &running, Timestamp::now().unix_seconds())
        } else {
            crate::runs::advice::lines::advise(&runs)
        };
        pretty(&advice.ok_or_else(|| not_found(format!("no run of {name:?} has ended yet")))?)
    });
    read.await.map(json)
}

fn read_runs(event_reader: &EventReader, query: &RunQuery) -> Result<Vec<RunRecord>, Rejected> {
    event_reader.read(|store| store.runs(query)).map_err(failed)
}

/// Returns the newest run that a name selects; 404 if there is none, and 409 if it is the name of containers of several groups.
fn newest_run(event_reader: &EventReader, name: &str) -> Result<RunRecord, Rejected> {
    let query = RunQuery { name: Some(name.to_owned()), limit: MAX_RUNS, since: None, timelines: true };
    let mut runs = read_runs(event_reader, &query)?;
    check_unambiguous(&runs, name).map_err(|text| (StatusCode::CONFLICT, text + "\n"))?;
    if let Some(newest) = runs.pop() {
        return Ok(newest);
    }
    let known = read_runs(event_reader, &RunQuery { limit: 100, ..RunQuery::default() })?;
    Err(not_found(format!("no run, container or group {name:?}{}", nearest_names(&known, name))))
}

fn not_found(text: String) -> Rejected {
    (StatusCode::NOT_FOUND, text + "\n")
}

fn pretty(value: &impl Serialize) -> Result<String, Rejected> {
    serde_json::to_string_pretty(value).map(|text| text + "\n").map_err(failed)
}
