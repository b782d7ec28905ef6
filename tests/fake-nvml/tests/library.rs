//! The library's own means: counted and hanging calls, checked states.

use std::thread;
use std::time::{Duration, Instant};

use fake_nvml::{Event, FakeNvml, Gpu, State, Step};
use nvml_wrapper::Nvml;
use serde_json::json;

/// Waits for a condition, for so long that only a broken library takes it.
#[allow(clippy::disallowed_methods)] // a deadline against the real clock
fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < end, "waited too long for {what}");
        thread::yield_now();
    }
}

fn load(fake: &FakeNvml) -> Nvml {
    Nvml::builder().lib_path(fake.path().as_os_str()).init().expect("loading the library")
}

#[test]
fn hung_call_does_not_block_other_symbols_and_later_calls() {
    let dir = tempfile::tempdir().unwrap();
    let mut state = State { count_calls: true, ..State::with_gpus(1) };
    let hung = "nvmlDeviceGetMemoryInfo_v2";
    state.hang.insert(hung.into());
    let fake = FakeNvml::install(dir.path(), &state).unwrap();
    let stuck = {
        let fake = fake.clone();
        thread::spawn(move || load(&fake).device_by_index(0).unwrap().memory_info().is_ok())
    };
    wait_for("the hung call", || fake.calls().unwrap().contains_key(hung));
    let nvml = load(&fake);
    let device = nvml.device_by_index(0).unwrap();
    assert_eq!(device.minor_number().unwrap(), 0);
    state.hang.clear();
    fake.set(&state).unwrap();
    device.memory_info().unwrap();
    assert!(!stuck.is_finished());
    assert_eq!(fake.calls().unwrap()[hung], 2);
}

#[test]
fn slow_symbol_returns_late() {
    let dir = tempfile::tempdir().unwrap();
    let mut state = State::with_gpus(1);
    state.slow_ms.insert("nvmlDeviceGetCount_v2".into(), 50);
    let fake = FakeNvml::install(dir.path(), &state).unwrap();
    let nvml = load(&fake);
    #[allow(clippy::disallowed_methods)] // the real time that passes is the subject
    let start = Instant::now();
    assert_eq!(nvml.device_count().unwrap(), 1);
    assert!(start.elapsed() >= Duration::from_millis(50));
}

#[test]
fn calls_are_counted_only_on_demand() {
    let dir = tempfile::tempdir().unwrap();
    let mut state = State::with_gpus(1);
    let fake = FakeNvml::install(dir.path(), &state).unwrap();
    let nvml = load(&fake);
    nvml.device_count().unwrap();
    assert!(fake.calls().unwrap().is_empty());
    state.count_calls = true;
    fake.set(&state).unwrap();
    nvml.device_count().unwrap();
    nvml.device_count().unwrap();
    let expected = [("nvmlDeviceGetCount_v2".to_owned(), 2)].into();
    assert_eq!(fake.calls().unwrap(), expected);
}

#[test]
fn state_survives_json_and_an_omitted_field_has_its_default() {
    let mut state = State::with_gpus_on_r535(2);
    state.gpus[1].temperature_c = None;
    state.gpus[1].mig = Some(vec![fake_nvml::MigDevice::default()]);
    state.gpus[0].fields.insert(186, 7.into());
    state.events.push(Event::xid(1, 0, 79));
    state.script.insert("nvmlDeviceGetPowerUsage".into(), vec![Step::new(1, json!({"power_mw": null}))]);
    let json = serde_json::to_vec(&state).unwrap();
    assert_eq!(State::from_json(&json).unwrap(), state);
    assert_eq!(State::from_json(b"{}").unwrap(), State::default());
    assert_eq!(State::from_json(br#"{"gpus": [{}]}"#).unwrap().gpus, [Gpu::default()]);
}

#[test]
fn invalid_state_is_rejected_with_a_message() {
    let refused = |json: &str| State::from_json(json.as_bytes()).unwrap_err();
    assert!(refused(r#"{"gpu": []}"#).contains("unknown field `gpu`"));
    assert_eq!(refused(r#"{"hang": ["nvmlInit_v3"]}"#), "this library has no symbol nvmlInit_v3");
    assert_eq!(refused(r#"{"process_record_bytes": 16}"#), "process_record_bytes is 16, not 24 or 32");
    let script = r#"{"gpus": [{}], "script": {"nvmlDeviceGetName": [{"gpu": 1, "patch": {}}]}}"#;
    assert_eq!(refused(script), "script of nvmlDeviceGetName, step 0: there is no GPU 1");
    let script = r#"{"gpus": [{}], "script": {"nvmlDeviceGetName": [{"patch": {"nam": "x"}}]}}"#;
    assert!(refused(script).starts_with("script of nvmlDeviceGetName, step 0: unknown field `nam`"));
    let numbers = r#"{"gpus": [{"numbers": {"nvmlDeviceGetName": 1}}]}"#;
    assert_eq!(refused(numbers), "nvmlDeviceGetName is not among the symbols that return one number");
    assert!(refused(r#"{"gpus": [{"processes": [{"pid": 1, "kind": "X"}]}]}"#).contains("use C, G and M"));
}

#[test]
fn the_example_of_the_readme_is_a_state() {
    let readme = include_str!("../README.md");
    let example = readme.split("```").find_map(|block| block.strip_prefix("json")).expect("a json block");
    let state = State::from_json(example.as_bytes()).unwrap();
    assert_eq!(state.gpus[0].processes.len(), 2);
}
