//! What inspect and list answer, as records and facts.

use std::sync::Arc;

use bollard::models::{
    ContainerInspectResponse, ContainerSummary, ContainerSummaryStateEnum as State, DeviceRequest,
};

use super::Watcher;
use super::events::named;
use crate::discover::{ContainerId, Fact, Named, Record, What};
use crate::series::bounded;

/// What became of a container that was asked about.
#[derive(Clone, Debug, PartialEq)]
pub enum Found {
    /// It runs. The host pid of its first process; `None` while it waits to be started again.
    Runs(Record, Option<u32>),
    /// It does not run.
    Rests {
        /// Who it is.
        named: Named,
        /// Exit code of its last run.
        exit_code: Option<i64>,
        /// The runtime's OOMKilled flag of its last run.
        oom_flag: Option<bool>,
        /// Unix time of the end of its last run; `None` if it never ran.
        finished: Option<f64>,
    },
    /// The runtime does not know it.
    Gone,
}

impl Watcher<'_> {
    /// Reads an answer of inspect; one without an id or a name is of no use, as of a container that is gone.
    pub fn found(&self, answer: ContainerInspectResponse) -> Found {
        let (Some(id), Some(name), Some(state)) = (answer.id, answer.name, answer.state) else {
            return Found::Gone;
        };
        let config = answer.config.unwrap_or_default();
        let labels = config.labels.unwrap_or_default();
        let image = config.image.unwrap_or_default();
        let labels_match = self.filter.labels_match(&labels);
        if state.running != Some(true) {
            return Found::Rests {
                named: named(&name, &image, labels_match),
                exit_code: state.exit_code,
                oom_flag: state.oom_killed,
                finished: state.finished_at.as_deref().and_then(unix_seconds),
            };
        }
        let label = |key: &str| bounded(labels.get(key).map_or("", String::as_str));
        let record = Record {
            id: ContainerId::new(&id),
            runtime: self.endpoint.runtime,
            name: bounded(name.trim_start_matches('/')).to_string(),
            pod: None,
            image: bounded(&image),
            compose_project: label("com.docker.compose.project"),
            compose_service: label("com.docker.compose.service"),
            settings: self.filter.settings_of(config.env.iter().flatten().map(String::as_str)),
            gpus: gpus(answer.host_config.and_then(|host| host.device_requests).unwrap_or_default()),
            started: state.started_at.as_deref().and_then(unix_seconds),
            labels_match,
        };
        let pid = state.pid.and_then(|pid| u32::try_from(pid).ok()).filter(|pid| *pid > 0);
        Found::Runs(record, pid)
    }

    /// What the list alone tells of a container: no run settings, and no time of its start.
    pub fn record_of_list(&self, listed: &ContainerSummary) -> Option<Record> {
        let labels = listed.labels.clone().unwrap_or_default();
        let label = |key: &str| bounded(labels.get(key).map_or("", String::as_str));
        let names = listed.names.as_deref().unwrap_or_default();
        // the names that other containers have for it (links) are there too, as /OTHER/NAME
        let name = names.iter().map(|name| name.trim_start_matches('/')).find(|name| !name.contains('/'))?;
        Some(Record {
            id: ContainerId::new(listed.id.as_deref()?),
            runtime: self.endpoint.runtime,
            name: bounded(name).to_string(),
            pod: None,
            image: bounded(listed.image.as_deref().unwrap_or_default()),
            compose_project: label("com.docker.compose.project"),
            compose_service: label("com.docker.compose.service"),
            settings: vec![],
            gpus: Arc::default(),
            started: None,
            labels_match: self.filter.labels_match(&labels),
        })
    }
}

/// The GPUs that were asked for with `--gpus` or as CDI devices: those are given, or the container does not start.
///
/// A count is given as the first so many, as Docker asks NVIDIA's runtime for them. A request of another driver, and
/// parts of a GPU by number (`0:1`), are names that nobody else knows.
fn gpus(requests: Vec<DeviceRequest>) -> Arc<[Arc<str>]> {
    const CDI: &str = "nvidia.com/gpu=";
    const MOST: usize = 1024; // no host has so many, and a count is any number
    let mut gpus = Vec::new();
    for request in requests {
        let capabilities = request.capabilities.unwrap_or_default();
        let ids = request.device_ids.unwrap_or_default();
        match (request.driver.as_deref().unwrap_or_default(), request.count) {
            ("cdi", _) => gpus.extend(ids.iter().filter_map(|id| id.strip_prefix(CDI)).map(bounded)),
            ("" | "nvidia", count) if capabilities.iter().flatten().any(|capability| capability == "gpu") => {
                match count {
                    Some(-1) => gpus.push("all".into()),
                    Some(count @ 1..) => {
                        gpus.extend((0..count).take(MOST).map(|index| index.to_string().into()));
                    }
                    _ => gpus.extend(ids.iter().map(|id| bounded(id))),
                }
            }
            _ => {}
        }
        gpus.truncate(MOST);
    }
    gpus.into()
}

/// Whether a listed container may run: also while it is paused or waits to be started again.
pub fn may_run(listed: &ContainerSummary) -> bool {
    !matches!(listed.state, Some(State::CREATED | State::EXITED | State::REMOVING | State::DEAD))
}

/// That a container runs, with its pid; `None` if either the pid or the time of the start is not known.
pub fn running(record: &Record, pid: Option<u32>) -> Option<Fact> {
    Some(Fact { at: record.started?, ..about(record, What::Running { pid: Some(pid?) }) })
}

/// That a container exists.
pub fn exists(record: &Record, at: f64) -> Fact {
    Fact { at, ..about(record, What::Exists) }
}

fn about(record: &Record, what: What) -> Fact {
    let named = named(&record.name, &record.image, record.labels_match);
    Fact { runtime: record.runtime, id: record.id.clone(), at: 0.0, named: Some(named), what }
}

/// Unix time of an API time stamp; Docker writes UTC, Podman local time with its offset.
fn unix_seconds(text: &str) -> Option<f64> {
    let time: jiff::Timestamp = text.parse().ok()?;
    let seconds = time.as_nanosecond() as f64 / 1e9;
    (seconds > 0.0).then_some(seconds) // a container that never ran has the year 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_those_that_docker_asks_nvidias_runtime_for() {
        let gpu = Some(vec![vec!["gpu".to_owned(), "utility".to_owned()]]);
        let request = |driver: &str, count: i64, ids: &[&str]| DeviceRequest {
            driver: Some(driver.into()),
            count: Some(count),
            device_ids: Some(ids.iter().map(|id| id.to_string()).collect()),
            capabilities: gpu.clone(),
            options: None,
        };
        let of = |request: DeviceRequest| gpus(vec![request]).join(" ");
        assert_eq!(of(request("", -1, &[])), "all");
        assert_eq!(of(request("nvidia", 2, &[])), "0 1");
        assert_eq!(of(request("", 0, &["GPU-a", "1"])), "GPU-a 1");
        assert_eq!(of(request("cdi", 0, &["nvidia.com/gpu=GPU-a", "vendor.com/net=0"])), "GPU-a");
        assert_eq!(of(request("amd", -1, &[])), "");
        assert_eq!(of(DeviceRequest { capabilities: None, ..request("", -1, &[]) }), "");
    }

    #[test]
    fn time_stamps_of_docker_and_podman_are_read() {
        assert_eq!(unix_seconds("2026-11-21T03:25:01.5Z"), Some(1_795_231_501.5));
        assert_eq!(unix_seconds("2026-11-21T05:25:01.5+02:00"), Some(1_795_231_501.5));
        assert_eq!(unix_seconds("0001-01-01T00:00:00Z"), None);
        assert_eq!(unix_seconds(""), None);
    }
}
