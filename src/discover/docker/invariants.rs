//! Properties that hold for any response of a runtime in Docker's API: a container chooses its name, labels and environment, and
//! a proxy may sit in between. The property tests below and the fuzzer (`fuzz/`) call the same functions.

use bollard::models::{ContainerInspectResponse, ContainerSummary, EventMessage};
use serde::de::DeserializeOwned;

use super::convert::may_run;
use super::events::{DockerEvent, EventDedup};
use super::{RuntimeState, Watcher};
use crate::clock::Timestamp;
use crate::config::{Filter, RuntimeEndpoint};
use crate::discover::{ContainerRecord, EventKind, RuntimeEvent, RuntimeKind};

/// Longest label value, in characters.
const MAX_LABEL_CHARS: usize = 256;
/// More GPUs than any host has.
const MAX_GPUS: usize = 1024;

fn read<T: DeserializeOwned>(json: &[u8]) -> Option<T> {
    serde_json::from_slice(json).ok()
}

/// Checks a response of inspect, an entry of the list or an event, whichever the JSON can be parsed as.
pub fn response(json: &[u8]) {
    let source = RuntimeState::new(RuntimeKind::Docker, Default::default());
    let endpoint = RuntimeEndpoint { runtime: RuntimeKind::Docker, socket: "/d".into() };
    let filter = Filter { settings: vec!["BATCH_SIZE".into()], ..Filter::default() };
    let watcher = Watcher::new(&endpoint, &filter, &source);
    if let Some(found) =
        read::<ContainerInspectResponse>(json).and_then(|response| watcher.parse_inspect(response))
    {
        check_record(&found.record);
        assert!(found.pid != Some(0), "0 is no pid");
        assert!(found.finished.is_none_or(|at| at > 0.0) && found.limit_bytes != Some(0), "{found:?}");
        assert!(found.record.spec.settings.iter().all(|(name, _)| &**name == "batch_size"), "{found:?}");
        if let Some(runtime_event) = found.running() {
            check_event(&runtime_event);
        }
    }
    for listed in read::<Vec<ContainerSummary>>(json).unwrap_or_default() {
        let _ = may_run(&listed);
        if let Some(record) = watcher.record_from_list(&listed) {
            assert!(!record.spec.name.contains('/') && record.started.is_none(), "{record:?}");
            check_record(&record);
            check_event(&record.event(1.0, EventKind::Exists));
        }
    }
    let Some(event) =
        read(json).and_then(|message: EventMessage| DockerEvent::read(message, Timestamp::now()))
    else {
        return;
    };
    let mut seen = EventDedup::default();
    assert!(seen.is_new(&event));
    for open in [true, false] {
        if let Some(runtime_event) = event.runtime_event(RuntimeKind::Docker, &filter, open) {
            check_event(&runtime_event);
        }
    }
    if let Some(record) = event.record(RuntimeKind::Docker, &filter) {
        check_record(&record);
    }
}

fn check_record(record: &ContainerRecord) {
    let texts =
        [&*record.spec.name, &record.spec.image, &record.spec.compose_project, &record.spec.compose_service];
    assert!(texts.iter().all(|text| text.chars().count() <= MAX_LABEL_CHARS), "{record:?}");
    assert!(record.started.is_none_or(f64::is_finite) && record.gpus.len() <= MAX_GPUS, "{record:?}");
}

fn check_event(runtime_event: &RuntimeEvent) {
    assert!(runtime_event.at.is_finite());
    if let Some(spec) = &runtime_event.named {
        let texts = spec.settings.iter().flat_map(|(name, value)| [name, value]);
        assert!(
            texts.chain(&spec.group(&spec.identity())).all(|text| text.chars().count() <= MAX_LABEL_CHARS),
            "{spec:?}"
        );
        assert!(spec.settings.len() <= 64, "{spec:?}");
    }
    if let EventKind::SignalRequested { signal: Some(signal) } = runtime_event.what {
        assert!((1..=64).contains(&signal), "{signal}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn value() -> impl Strategy<Value = Value> {
        let text = prop_oneof![".{0,8}", Just("x".repeat(300)), Just("\u{202e}\n".to_owned())];
        let number = prop_oneof![any::<i64>(), -2_i64..300];
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            number.prop_map(Value::from),
            text.prop_map(Value::from)
        ];
        leaf.prop_recursive(3, 12, 3, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
                proptest::collection::hash_map(".{0,4}", inner, 0..3)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    fn responses() -> [Value; 3] {
        [
            json!({"Id": "a", "Name": "/train", "State": {"Running": true, "Pid": 7, "StartedAt": "2026-11-21T03:25:01.5Z"},
                "Config": {"Image": "i", "Labels": {"com.docker.compose.project": "p"}, "Env": ["BATCH_SIZE=3", "SECRET=x"]},
                "HostConfig": {"DeviceRequests": [{"Driver": "", "Count": 2, "DeviceIDs": ["GPU-a"], "Capabilities": [["gpu"]]}]}}),
            json!([{"Id": "a", "Names": ["/b/a", "/train"], "Image": "i", "State": "running", "Labels": {"a": "b"}}]),
            json!({"Action": "kill", "Actor": {"ID": "a", "Attributes": {"signal": "15", "name": "train", "exitCode": "137"}},
                "time": 1_795_231_501, "timeNano": 1_795_231_501_500_000_000_i64}),
        ]
    }

    /// Replaces the value at a path of indices.
    fn replaced(response: &mut Value, mut indices: &[usize], with: Value) {
        let mut slot = response;
        while let Some((step, rest)) = indices.split_first() {
            let next = match slot {
                Value::Array(list) if !list.is_empty() => list.len(),
                Value::Object(map) if !map.is_empty() => map.len(),
                _ => break,
            };
            slot = match slot {
                Value::Array(list) => &mut list[step % next],
                Value::Object(map) => map.values_mut().nth(step % next).expect("one of them"),
                _ => break,
            };
            indices = rest;
        }
        *slot = with;
    }

    proptest! {
        #[test]
        fn invariants_hold_for_responses_with_any_value(which in 0..3_usize, indices in proptest::collection::vec(any::<usize>(), 1..6), with in value()) {
            let mut json = responses()[which].clone();
            replaced(&mut json, &indices, with);
            response(json.to_string().as_bytes());
        }

        #[test]
        fn invariants_hold_for_any_bytes(json: Vec<u8>) {
            response(&json);
        }

        #[test]
        fn environment_is_limited_to_allow_list(name in "[A-Z_]{1,12}", text in "[ -~]{1,30}") {
            let mut json = responses()[0].clone();
            json["Config"]["Env"] = json!([format!("{name}={text}"), "BATCH_SIZE=3"]);
            response(json.to_string().as_bytes());
        }
    }

    #[test]
    fn absurd_gpu_count_takes_bounded_memory() {
        let mut json = responses()[0].clone();
        json["HostConfig"]["DeviceRequests"][0]["Count"] = i64::MAX.into();
        response(json.to_string().as_bytes());
    }
}
