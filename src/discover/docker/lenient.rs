//! Reads a list and an inspect in which a value is none that the library knows, such as a container's state of a later version: only that
//! value is left out, and no other container with it.

use std::path::Path;

use bollard::errors::Error;
use bollard::models::{ContainerInspectResponse, ContainerSummary};
use bollard::{BollardRequest, body_full};
use http_body_util::BodyExt;
use hyper::body::Bytes;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::transport::{Allowance, MAX_INSPECT_BYTES, MAX_LIST_BYTES, send};

/// The fields of a list's entry that are read.
const LISTED: [&str; 7] = ["Id", "Names", "Image", "Labels", "Status", "State", "Created"];
/// The fields of an inspect that are read, by the object that they are in.
const INSPECTED: [&str; 6] = ["Id", "Name", "Config", "HostConfig", "State", "RestartCount"];
const OF_STATE: [&str; 8] =
    ["Running", "Restarting", "Pid", "ExitCode", "StartedAt", "FinishedAt", "OOMKilled", "Error"];
const OF_CONFIG: [&str; 4] = ["Image", "Env", "Labels", "Tty"];
const OF_HOST: [&str; 3] = ["Memory", "DeviceRequests", "LogConfig"];

/// Lists containers; `query` is that of the request.
///
/// # Errors
/// There is no response, or it is no list.
pub async fn list(socket: &Path, query: &str) -> Result<Vec<ContainerSummary>, Error> {
    let body = get(socket, &format!("/containers/json?{query}"), MAX_LIST_BYTES).await?;
    Ok(read_list(serde_json::from_slice(&body)?))
}

/// Inspects a container.
///
/// # Errors
/// There is no response, or it has another form.
pub async fn inspect(socket: &Path, id: &str) -> Result<ContainerInspectResponse, Error> {
    let body = get(socket, &format!("/containers/{id}/json"), MAX_INSPECT_BYTES).await?;
    Ok(read_inspect(serde_json::from_slice(&body)?)?)
}

/// Returns the Unix time of the last end of a container of Podman, if that was requested; `None` also where Podman does not report it
/// (present in 5.8; not tried with 4.3). Its events do not: of `podman stop` there is one only if the container did not end by itself, and not always
/// then (observed: 5.8).
pub async fn requested_end(socket: &Path, id: &str) -> Option<f64> {
    let target = format!("/v4.0.0/libpod/containers/{id}/json");
    let body = get(socket, &target, MAX_INSPECT_BYTES).await.ok()?;
    let state = &serde_json::from_slice::<Value>(&body).ok()?["State"];
    let finished: jiff::Timestamp = state["FinishedAt"].as_str()?.parse().ok()?;
    (state["StoppedByUser"] == true).then(|| finished.as_nanosecond() as f64 / 1e9)
}

fn read_list(entries: Vec<Value>) -> Vec<ContainerSummary> {
    let mut listed = Vec::new();
    for mut entry in entries {
        keep(&mut entry, &LISTED);
        let mut read = from_value::<ContainerSummary>(&entry);
        if read.is_err() && without(&mut entry, "State") {
            read = from_value(&entry);
        }
        match read {
            Ok(container) => listed.push(container),
            Err(error) => tracing::debug!(%error, "entry of the list of containers is unreadable; skipped"),
        }
    }
    listed
}

fn read_inspect(mut response: Value) -> serde_json::Result<ContainerInspectResponse> {
    keep(&mut response, &INSPECTED);
    for (object, fields) in [("State", &OF_STATE[..]), ("Config", &OF_CONFIG), ("HostConfig", &OF_HOST)] {
        if let Some(object) = response.get_mut(object) {
            keep(object, fields);
        }
    }
    from_value(&response)
}

fn from_value<T: DeserializeOwned>(value: &Value) -> serde_json::Result<T> {
    serde_json::from_value(value.clone())
}

/// Removes all other fields of an object.
fn keep(value: &mut Value, fields: &[&str]) {
    if let Some(object) = value.as_object_mut() {
        object.retain(|name, _| fields.contains(&name.as_str()));
    }
}

fn without(value: &mut Value, field: &str) -> bool {
    value.as_object_mut().is_some_and(|object| object.remove(field).is_some())
}

/// Returns the body of a response with status 200.
async fn get(socket: &Path, target: &str, max_bytes: usize) -> Result<Vec<u8>, Error> {
    let request: BollardRequest = hyper::Request::get(target).body(body_full(Bytes::new()))?;
    let response = send(socket, request, Allowance::new(max_bytes)).await?;
    let status = response.status();
    let body = response.into_body().collect().await?.to_bytes().to_vec();
    match status.is_success() {
        true => Ok(body),
        false => {
            let message = String::from_utf8_lossy(&body).chars().take(256).collect();
            Err(Error::DockerResponseServerError { status_code: status.as_u16(), message })
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn unknown_state_hides_no_container() {
        let entry = |id: &str, state: &str| json!({"Id": id, "Names": ["/n"], "State": state, "Health": {"Status": 7}});
        let listed =
            read_list(vec![entry("a", "stopped"), json!({"Id": 7}), json!(null), entry("b", "exited")]);
        let ids: Vec<_> = listed.iter().map(|it| (it.id.as_deref(), it.state.is_some())).collect();
        assert_eq!(ids, [(Some("a"), false), (Some("b"), true)]);
        let response =
            json!({"Id": "a", "Name": "n", "State": {"Status": "stopped", "Running": false, "ExitCode": 4}});
        assert!(serde_json::from_value::<ContainerInspectResponse>(response.clone()).is_err(), "the library");
        let state = read_inspect(response).unwrap().state.unwrap();
        assert_eq!((state.running, state.exit_code), (Some(false), Some(4)));
    }
}
