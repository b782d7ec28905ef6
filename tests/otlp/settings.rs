//! What OpenTelemetry's own variables do to the real binary. What each means in detail is tested beside `config::otlp`.

use std::process::Command;

use serde_json::json;

use super::{EMPTY, Receiver, list};
use crate::support::{Memledger, binary, eventually};

/// memledger with these variables. They are set by env(1), which becomes memledger.
fn with(variables: &[String], flags: &[&str]) -> Memledger {
    let wrapper: Vec<_> = std::iter::once("env").chain(variables.iter().map(String::as_str)).collect();
    Memledger::start_through(&wrapper, &[EMPTY, flags].concat())
}

fn threads(memledger: &Memledger) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", memledger.pid())).expect("it runs");
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
    tasks.filter_map(|task| Some(name(task.ok()?)?.trim().to_owned())).collect()
}

#[test]
fn the_standard_variables_are_enough() {
    let Some(receiver) = Receiver::start() else { return };
    let variables = [
        format!("OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:{}", receiver.http),
        format!("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT=localhost:{}", receiver.grpc),
        "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL=grpc".to_owned(),
        "OTEL_EXPORTER_OTLP_INSECURE=true".to_owned(),
        "OTEL_EXPORTER_OTLP_HEADERS=x-tenant=a%2Cb,authorization=Basic%20dTpw".to_owned(),
        "OTEL_EXPORTER_OTLP_COMPRESSION=gzip".to_owned(),
        "OTEL_METRIC_EXPORT_INTERVAL=300".to_owned(),
        "OTEL_RESOURCE_ATTRIBUTES=k8s.node.name=n1,service.name=lost,deployment.environment.name=a%20b"
            .to_owned(),
        "OTEL_SERVICE_NAME=gpu-watch".to_owned(),
    ];
    let folder = tempfile::tempdir().unwrap();
    super::events::write(folder.path(), [super::events::exit(1, "train")]);
    let _memledger = with(&variables, &[&format!("--state.path={}", folder.path().display())]);
    let taken = eventually("points and a record", || {
        let taken = receiver.ask(&json!({"do": "peek"}));
        let is_there = list(&taken, "points").len() > 100 && !list(&taken, "records").is_empty();
        if is_there { Ok(taken) } else { Err("not yet".to_owned()) }
    });
    for request in list(&taken, "requests") {
        let wire = if request["signal"] == "metrics" { "http" } else { "grpc" };
        assert_eq!(request["wire"], wire);
        assert_eq!(request["headers"]["x-tenant"], "a,b");
        assert_eq!(request["headers"]["authorization"], "Basic dTpw");
        let encoding = if wire == "http" { "content-encoding" } else { "grpc-encoding" };
        // grpcio takes its own headers out before anybody sees them
        assert!(wire == "grpc" || request["headers"][encoding] == "gzip", "{request}");
    }
    let who = &taken["points"][0]["resource"];
    assert_eq!(
        (&who["service.name"], &who["k8s.node.name"], &who["deployment.environment.name"]),
        (&json!("gpu-watch"), &json!("n1"), &json!("a b"))
    );
    assert_eq!(&taken["records"][0]["resource"], who);
}

#[test]
fn without_an_endpoint_and_when_disabled_there_is_no_thread_and_no_family() {
    let enabled = ["OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:1".to_owned()];
    assert!(threads(&with(&enabled, &[])).contains(&"otlp".to_owned()), "else this test looks at nothing");
    let disabled = [enabled[0].clone(), "OTEL_SDK_DISABLED=true".to_owned()];
    for variables in [&[][..], &disabled[..]] {
        let memledger = with(variables, &[]);
        assert!(!threads(&memledger).contains(&"otlp".to_owned()));
        let text = memledger.get("/metrics").1;
        assert!(!text.contains("memledger_otlp"), "{text}");
        assert_eq!(memledger.log().contains("OTEL_SDK_DISABLED"), !variables.is_empty());
    }
}

#[test]
fn a_variable_that_cannot_be_used_is_said_and_a_flag_is_refused() {
    let variables = [
        "OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:1".to_owned(),
        "OTEL_EXPORTER_OTLP_PROTOCOL=http/json".to_owned(),
        "OTEL_EXPORTER_OTLP_TIMEOUT=soon".to_owned(),
    ];
    let log = with(&variables, &[]).log();
    for (name, wanted) in [("PROTOCOL", "one of grpc, http/protobuf"), ("TIMEOUT", "milliseconds")] {
        let line = log.lines().find(|line| line.contains(&format!("OTEL_EXPORTER_OTLP_{name}")));
        assert!(line.is_some_and(|line| line.contains(wanted)), "{log}");
    }
    for (flag, says) in [
        ("--otlp.endpoint=collector:4318", "a URL such as https://collector:4318"),
        ("--otlp.endpoint=http://user:hunter2@collector:4318", "without user and password"),
        ("--otlp.headers=hunter2", "KEY=VALUE"),
        ("--otlp.protocol=http/json", "one of grpc, http/protobuf"),
        ("--otlp.interval=1ms", "from 1s"),
    ] {
        let endpoint = "--otlp.endpoint=http://localhost:1";
        // a flag that is given twice is an error of its own
        let others = if flag.starts_with("--otlp.endpoint") { &[][..] } else { &[endpoint] };
        let output =
            Command::new(binary()).arg("serve").args(others).arg(flag).output().expect("memledger runs");
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(says) && !text.contains("hunter2"), "{flag}: {text}");
    }
}
