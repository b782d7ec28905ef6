//! What holds of whatever a runtime answers in Docker's API: a container chooses its name, labels and environment, and a
//! proxy may stand between. The property tests below and the fuzzer (`fuzz/`) call the same functions.

use bollard::models::{ContainerInspectResponse, ContainerSummary, EventMessage};
use serde::de::DeserializeOwned;

use super::events::{Event, Seen};
use super::inspect::{Found, exists, may_run, running};
use super::{Source, Watcher};
use crate::clock::Moment;
use crate::config::{Endpoint, Filter};
use crate::discover::{Fact, Record, What};

/// Longest label value, in characters.
const LONGEST: usize = 256;
/// More GPUs than any host has.
const MOST_GPUS: usize = 1024;

fn read<T: DeserializeOwned>(json: &[u8]) -> Option<T> {
    serde_json::from_slice(json).ok()
}

/// An answer of inspect, an entry of the list or an event, whichever the JSON can be read as.
pub fn answer(json: &[u8]) {
    let source = Source::new("docker", Default::default());
    let endpoint = Endpoint { runtime: "docker", socket: "/d".into() };
    let filter = Filter { settings: vec!["BATCH_SIZE".into()], ..Filter::default() };
    let watcher = Watcher { endpoint: &endpoint, filter: &filter, source: &source };
    match read::<ContainerInspectResponse>(json).map(|answer| watcher.found(answer)) {
        Some(Found::Runs(record, pid)) => {
            holds(&record);
            assert!(pid != Some(0), "0 is no pid");
            assert!(record.settings.iter().all(|(name, _)| &**name == "batch_size"), "{record:?}");
            if let Some(fact) = running(&record, pid) {
                told(&fact);
            }
        }
        Some(Found::Rests { named, finished, .. }) => {
            assert!(named.name.chars().count() <= LONGEST && finished.is_none_or(|at| at > 0.0));
        }
        Some(Found::Gone) | None => {}
    }
    for listed in read::<Vec<ContainerSummary>>(json).unwrap_or_default() {
        let _ = may_run(&listed);
        if let Some(record) = watcher.record_of_list(&listed) {
            assert!(!record.name.contains('/') && record.started.is_none(), "{record:?}");
            holds(&record);
            told(&exists(&record, 1.0));
        }
    }
    let Some(event) = read(json).and_then(|message: EventMessage| Event::read(message, Moment::now())) else {
        return;
    };
    let mut seen = Seen::default();
    assert!(seen.is_new(&event));
    for open in [true, false] {
        if let Some(fact) = event.fact("docker", &filter, open) {
            told(&fact);
        }
    }
    if let Some(record) = event.record("docker", &filter) {
        holds(&record);
    }
}

fn holds(record: &Record) {
    let texts = [&*record.name, &record.image, &record.compose_project, &record.compose_service];
    assert!(texts.iter().all(|text| text.chars().count() <= LONGEST), "{record:?}");
    assert!(record.started.is_none_or(f64::is_finite) && record.gpus.len() <= MOST_GPUS, "{record:?}");
}

fn told(fact: &Fact) {
    assert!(fact.at.is_finite());
    if let What::Asked { signal: Some(signal) } = fact.what {
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

    fn answers() -> [Value; 3] {
        [
            json!({"Id": "a", "Name": "/train", "State": {"Running": true, "Pid": 7, "StartedAt": "2026-11-21T03:25:01.5Z"},
                "Config": {"Image": "i", "Labels": {"com.docker.compose.project": "p"}, "Env": ["BATCH_SIZE=3", "SECRET=x"]},
                "HostConfig": {"DeviceRequests": [{"Driver": "", "Count": 2, "DeviceIDs": ["GPU-a"], "Capabilities": [["gpu"]]}]}}),
            json!([{"Id": "a", "Names": ["/b/a", "/train"], "Image": "i", "State": "running", "Labels": {"a": "b"}}]),
            json!({"Action": "kill", "Actor": {"ID": "a", "Attributes": {"signal": "15", "name": "train", "exitCode": "137"}},
                "time": 1_795_231_501, "timeNano": 1_795_231_501_500_000_000_i64}),
        ]
    }

    /// Puts a value in the place of the one that the numbers lead to.
    fn replaced(answer: &mut Value, mut way: &[usize], with: Value) {
        let mut place = answer;
        while let Some((step, rest)) = way.split_first() {
            let next = match place {
                Value::Array(list) if !list.is_empty() => list.len(),
                Value::Object(map) if !map.is_empty() => map.len(),
                _ => break,
            };
            place = match place {
                Value::Array(list) => &mut list[step % next],
                Value::Object(map) => map.values_mut().nth(step % next).expect("one of them"),
                _ => break,
            };
            way = rest;
        }
        *place = with;
    }

    proptest! {
        #[test]
        fn the_laws_hold_for_answers_with_anything_in_them(which in 0..3_usize, way in proptest::collection::vec(any::<usize>(), 1..6), with in value()) {
            let mut json = answers()[which].clone();
            replaced(&mut json, &way, with);
            answer(json.to_string().as_bytes());
        }

        #[test]
        fn the_laws_hold_for_any_bytes(json: Vec<u8>) {
            answer(&json);
        }

        #[test]
        fn only_what_is_allowed_leaves_an_environment(name in "[A-Z_]{1,12}", text in "[ -~]{1,30}") {
            let mut json = answers()[0].clone();
            json["Config"]["Env"] = json!([format!("{name}={text}"), "BATCH_SIZE=3"]);
            answer(json.to_string().as_bytes());
        }
    }

    #[test]
    fn a_count_of_gpus_that_no_host_has_fills_no_memory() {
        let mut json = answers()[0].clone();
        json["HostConfig"]["DeviceRequests"][0]["Count"] = i64::MAX.into();
        answer(json.to_string().as_bytes());
    }
}
