//! Converts responses of inspect and list into container records and runtime events.

use std::collections::HashMap;
use std::sync::Arc;

use bollard::models::{
    ContainerInspectResponse, ContainerSummary, ContainerSummaryStateEnum as State, DeviceRequest,
};

use super::Watcher;
use crate::config::merged;
use crate::discover::{ContainerRecord, ContainerSpec, EventKind, RuntimeEvent};
use crate::text::bounded;

/// A container as inspect shows it.
#[derive(Clone, Debug, PartialEq)]
pub struct Inspected {
    /// Its record, with the start of its last run and the settings of its environment.
    pub record: ContainerRecord,
    /// It runs. While it waits for its restart it does not, although Docker calls it running.
    pub is_running: bool,
    /// Host pid of its first process.
    pub pid: Option<u32>,
    /// Unix time of the end of its last run; if it runs, of the run before.
    pub finished: Option<f64>,
    /// Exit code of its last run; of a run in progress it has no meaning.
    pub exit_code: Option<i64>,
    /// The runtime's OOMKilled flag of its last run; of a run in progress it has no meaning.
    pub oom_flag: Option<bool>,
    /// Why its last start failed.
    pub start_error: Option<String>,
    /// Its memory limit in bytes.
    pub limit_bytes: Option<u64>,
    /// How often its restart policy has restarted it.
    pub restarts: Option<u64>,
}

impl Inspected {
    /// Returns the event that it runs; `None` if it does not, or if its pid or its start time is unknown.
    pub fn running(&self) -> Option<RuntimeEvent> {
        let (at, pid) = (self.record.started?, Some(self.pid?));
        self.is_running.then(|| self.record.event(at, EventKind::Running { pid }))
    }

    /// Returns how its last run ended.
    pub fn ended(&self) -> EventKind {
        EventKind::Ended { exit_code: self.exit_code, oom_flag: self.oom_flag }
    }
}

impl Watcher<'_> {
    /// Converts a response of inspect; `None` without an id, a name or a state.
    pub fn parse_inspect(&self, response: ContainerInspectResponse) -> Option<Inspected> {
        let (id, name, state) = (response.id?, response.name?, response.state?);
        let (config, host) = (response.config.unwrap_or_default(), response.host_config.unwrap_or_default());
        let of_environment = self.filter.settings_of(config.env.iter().flatten().map(String::as_str));
        let pid = state.pid.and_then(|pid| u32::try_from(pid).ok()).filter(|pid| *pid > 0);
        let texts = [&*name, &config.image.unwrap_or_default()];
        let mut spec = self.spec(texts, &config.labels.unwrap_or_default());
        spec.settings = merged(spec.settings, of_environment);
        Some(Inspected {
            record: ContainerRecord {
                gpus: gpus(host.device_requests.unwrap_or_default()),
                started: state.started_at.as_deref().and_then(unix_seconds),
                pid,
                ..ContainerRecord::new(&id, self.endpoint.runtime, spec)
            },
            is_running: state.running == Some(true) && state.restarting != Some(true),
            pid,
            finished: state.finished_at.as_deref().and_then(unix_seconds),
            exit_code: state.exit_code,
            oom_flag: state.oom_killed,
            start_error: state.error.filter(|error| !error.is_empty()),
            limit_bytes: host.memory.and_then(|limit| u64::try_from(limit).ok()).filter(|limit| *limit > 0),
            restarts: response.restart_count.and_then(|restarts| u64::try_from(restarts).ok()),
        })
    }

    /// Creates a record from the list alone, without settings of its environment and start time.
    pub fn record_from_list(&self, listed: &ContainerSummary) -> Option<ContainerRecord> {
        let labels = listed.labels.clone().unwrap_or_default();
        let names = listed.names.as_deref().unwrap_or_default();
        // the list includes the names that links give it, as /OTHER/NAME
        let name = names.iter().map(|name| name.trim_start_matches('/')).find(|name| !name.contains('/'))?;
        let image = listed.image.as_deref().unwrap_or_default();
        let spec = self.spec([name, image], &labels);
        Some(ContainerRecord::new(listed.id.as_deref()?, self.endpoint.runtime, spec))
    }

    /// Returns the event with the user whose engine reported it.
    pub fn of_engine(&self, mut runtime_event: RuntimeEvent) -> RuntimeEvent {
        let of_another = runtime_event.named.iter_mut().filter(|spec| spec.user != Some(self.user));
        of_another.for_each(|spec| Arc::make_mut(spec).user = Some(self.user));
        runtime_event
    }

    fn spec(&self, texts: [&str; 2], labels: &HashMap<String, String>) -> ContainerSpec {
        ContainerSpec { user: Some(self.user), ..ContainerSpec::labelled(texts, labels, self.filter) }
    }
}

/// Returns the GPUs requested with `--gpus` or as CDI devices: a container only starts if it gets them.
///
/// A count means the first GPUs, because Docker requests those from NVIDIA's runtime. Requests of other drivers are ignored, and so are
/// those for `utility` alone, as of a container that only watches the GPUs. Parts of a GPU by number (`0:1`) match no GPU.
fn gpus(requests: Vec<DeviceRequest>) -> Arc<[Arc<str>]> {
    const CDI: &str = "nvidia.com/gpu=";
    const MAX_GPUS: usize = 1024; // more than any host has: a count may be any number
    let mut gpus = Vec::new();
    for request in requests {
        let capabilities = request.capabilities.unwrap_or_default();
        let ids = request.device_ids.unwrap_or_default();
        match (request.driver.as_deref().unwrap_or_default(), request.count) {
            ("cdi", _) => gpus.extend(ids.iter().filter_map(|id| id.strip_prefix(CDI)).map(bounded)),
            ("" | "nvidia", count) if capabilities.iter().any(|all| is_to_compute(all)) => match count {
                Some(-1) => gpus.push("all".into()),
                Some(count @ 1..) => {
                    gpus.extend((0..count).take(MAX_GPUS).map(|index| index.to_string().into()));
                }
                _ => gpus.extend(ids.iter().map(|id| bounded(id))),
            },
            _ => {}
        }
        gpus.truncate(MAX_GPUS);
    }
    gpus.into()
}

/// Returns whether a device request with these capabilities is for GPUs, and for more than to watch them.
fn is_to_compute(capabilities: &[String]) -> bool {
    let has = |wanted: &str| capabilities.iter().any(|capability| capability == wanted);
    let only_watches = has("utility") && capabilities.iter().all(|it| matches!(&**it, "gpu" | "utility"));
    has("gpu") && !only_watches
}

/// Returns whether a listed container may run: also while it is paused, but not while it waits for its restart.
pub fn may_run(listed: &ContainerSummary) -> bool {
    use State::{CREATED, DEAD, EXITED, REMOVING, RESTARTING};
    !matches!(listed.state, Some(CREATED | EXITED | REMOVING | DEAD | RESTARTING))
}

/// Returns whether a listed container started less than two minutes ago, by the text for people in the list.
pub fn is_recent(listed: &ContainerSummary) -> bool {
    listed
        .status
        .as_deref()
        .is_some_and(|status| status.contains("second") || status.contains("About a minute"))
}

/// Returns whether a listed container ran, does not run, and may have ended within so many seconds, by the text for people in the list.
pub fn may_have_ended_within(listed: &ContainerSummary, seconds: f64) -> bool {
    let has_run = !may_run(listed) && listed.state != Some(State::CREATED);
    has_run && listed.status.as_deref().and_then(least_age).is_none_or(|age| age <= seconds)
}

/// Returns how many seconds ago a container ended at least, by a text such as `Exited (137) 5 minutes ago`; `None` if that is not known.
fn least_age(status: &str) -> Option<f64> {
    let (_, age) = status.split_once(") ")?;
    let mut words = age.strip_prefix("About ").unwrap_or(age).split(' ');
    let number = match words.next()? {
        "Less" => return Some(0.0),
        "a" | "an" => 1.0,
        number => number.parse::<f64>().ok()?,
    };
    // rounded down, but hours, which are rounded to the nearest
    let (unit, rounding) = match words.next()?.trim_end_matches('s') {
        "second" => (1.0, 0.0),
        "minute" => (60.0, 0.0),
        "hour" => (3_600.0, 0.5),
        "day" => (86_400.0, 0.0),
        "week" => (7.0 * 86_400.0, 0.0),
        "month" => (30.0 * 86_400.0, 0.0),
        "year" => (365.0 * 86_400.0, 0.0),
        _ => return None,
    };
    Some((number - rounding) * unit)
}

/// Converts an API time stamp to Unix time; Docker writes UTC, Podman local time with its offset.
pub fn unix_seconds(text: &str) -> Option<f64> {
    let time: jiff::Timestamp = text.parse().ok()?;
    let seconds = time.as_nanosecond() as f64 / 1e9;
    (seconds > 0.0).then_some(seconds) // year 1: the container never ran
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_those_that_docker_requests() {
        let gpu = Some(vec![vec!["gpu".to_owned()]]);
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
        let with = |capabilities: &[&str]| {
            let capabilities = vec![capabilities.iter().map(|it| it.to_string()).collect()];
            of(DeviceRequest { capabilities: Some(capabilities), ..request("", -1, &[]) })
        };
        assert_eq!((&*with(&["utility", "gpu"]), &*with(&["compute", "utility", "gpu"])), ("", "all"));
        assert_eq!(of(DeviceRequest { capabilities: None, ..request("", -1, &[]) }), "");
    }

    #[test]
    fn age_of_an_end_is_a_lower_bound() {
        for (status, age) in [
            ("Exited (0) Less than a second ago", Some(0.0)),
            ("Exited (137) 9 seconds ago", Some(9.0)),
            ("Exited (1) About a minute ago", Some(60.0)),
            ("Exited (1) 59 minutes ago", Some(3_540.0)),
            ("Exited (1) About an hour ago", Some(1_800.0)),
            ("Exited (1) 2 hours ago", Some(5_400.0)),
            ("Exited (1) 3 weeks ago", Some(1_814_400.0)),
            ("Restarting (1) 2 seconds ago", Some(2.0)),
            ("Dead", None),
            ("Exited (1) vor kurzem", None),
        ] {
            assert_eq!(least_age(status), age, "{status}");
        }
        let listed = |state, status: &str| ContainerSummary {
            state: Some(state),
            status: Some(status.into()),
            ..ContainerSummary::default()
        };
        for (listed, wanted) in [
            (listed(State::EXITED, "Exited (0) 5 seconds ago"), true),
            (listed(State::EXITED, "Exited (0) 5 minutes ago"), false),
            (listed(State::DEAD, "Dead"), true),
            (listed(State::CREATED, "Created"), false),
            (listed(State::RUNNING, "Up 5 seconds"), false),
        ] {
            assert_eq!(may_have_ended_within(&listed, 60.0), wanted, "{listed:?}");
        }
    }

    #[test]
    fn reads_time_stamps_of_docker_and_podman() {
        assert_eq!(unix_seconds("2026-11-21T03:25:01.5Z"), Some(1_795_231_501.5));
        assert_eq!(unix_seconds("2026-11-21T05:25:01.5+02:00"), Some(1_795_231_501.5));
        assert_eq!(unix_seconds("0001-01-01T00:00:00Z"), None);
        assert_eq!(unix_seconds(""), None);
    }
}
