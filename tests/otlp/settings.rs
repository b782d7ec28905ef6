//! OpenTelemetry's own environment variables with the real binary. `config::otlp` has the detailed tests.

use std::io::{BufReader, Read};
use std::process::{Child, Command, Stdio};

use serde_json::json;

use super::{EMPTY, Receiver, list};
use crate::support::{Memledger, binary, eventually, eventually_true, run};

/// Starts memledger with these variables, through env(1).
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
fn standard_variables_suffice() {
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
        let taken = receiver.command(&json!({"do": "peek"}));
        let is_there = list(&taken, "points").len() > 100 && !list(&taken, "records").is_empty();
        if is_there { Ok(taken) } else { Err("not yet".to_owned()) }
    });
    for request in list(&taken, "requests") {
        let wire = if request["signal"] == "metrics" { "http" } else { "grpc" };
        assert_eq!(request["wire"], wire);
        assert_eq!(request["headers"]["x-tenant"], "a,b");
        assert_eq!(request["headers"]["authorization"], "Basic dTpw");
        let encoding = if wire == "http" { "content-encoding" } else { "grpc-encoding" };
        // grpcio removes its own headers
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
fn host_name_is_absent_in_a_container_without_the_pid_namespace_of_the_host() {
    let line = |path: &str| std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
    let is_initial = std::fs::read_link("/proc/self/ns/uts").unwrap().as_os_str() == "uts:[4026531838]";
    let own = if is_initial { "/proc/sys/kernel/hostname" } else { "/proc/1/root/etc/hostname" };
    // a receiver each: an export of the one before may still arrive
    let resource = |wrapper: &[&str]| -> Option<(serde_json::Value, String)> {
        let receiver = Receiver::start()?;
        let flags: Vec<_> = receiver.flags(false);
        let flags: Vec<_> = EMPTY.iter().copied().chain(flags.iter().map(String::as_str)).collect();
        let memledger = Memledger::start_through(wrapper, &flags);
        let resource = eventually("an export", || {
            let taken = receiver.command(&json!({"do": "peek"}));
            list(&taken, "points")
                .first()
                .map(|point| point["resource"].clone())
                .ok_or_else(|| "none".to_owned())
        });
        Some((resource, memledger.log()))
    };
    let Some((ours, log)) = resource(&[]) else { return };
    assert_eq!(ours.get("host.name").and_then(|name| name.as_str()), line(own).as_deref(), "{log}");
    let container = [
        "unshare",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "--uts",
        "sh",
        "-c",
        "hostname c7 && exec \"$@\"",
        "sh",
    ];
    let (theirs, log) = resource(&container).expect("a receiver");
    assert_eq!(theirs.get("host.name"), None, "the name of the container is not that of the host: {theirs}");
    assert!(theirs["service.instance.id"].as_str().is_some_and(|id| id.starts_with("c7:")), "{theirs}");
    assert!(log.contains("OTEL_RESOURCE_ATTRIBUTES=host.name="), "{log}");
    let named = [&["env", "OTEL_RESOURCE_ATTRIBUTES=host.name=gpu7"][..], &container].concat();
    let (named, log) = resource(&named).expect("a receiver");
    assert_eq!(named["host.name"], "gpu7");
    assert!(!log.contains("OTEL_RESOURCE_ATTRIBUTES=host.name="), "{log}");
}

#[test]
fn no_thread_and_no_metrics_without_an_endpoint_or_when_disabled() {
    let enabled = ["OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:1".to_owned()];
    let exporting = with(&enabled, &[]);
    // a thread names itself
    eventually_true("otherwise this test checks nothing", || {
        threads(&exporting).contains(&"otlp".to_owned())
    });
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
fn invalid_variables_are_logged_and_invalid_flags_rejected() {
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
    for (flag, expected) in [
        ("--otlp.endpoint=collector:4318", "a URL such as https://collector:4318"),
        ("--otlp.endpoint=http://user:hunter2@collector:4318", "without user and password"),
        ("--otlp.headers=hunter2", "KEY=VALUE"),
        ("--otlp.protocol=http/json", "one of grpc, http/protobuf"),
        ("--otlp.interval=1ms", "from 100ms"),
    ] {
        let endpoint = "--otlp.endpoint=http://localhost:1";
        // a repeated flag is an error of its own
        let others = if flag.starts_with("--otlp.endpoint") { &[][..] } else { &[endpoint] };
        let output =
            Command::new(binary()).arg("serve").args(others).arg(flag).output().expect("memledger runs");
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(expected) && !text.contains("hunter2"), "{flag}: {text}");
    }
}

/// A process that is killed when it is dropped, also by a test that fails.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts memledger with an empty list of addresses; checks that it pushes, listens nowhere, and stops on SIGTERM.
fn starts_without_listener(receiver: &Receiver, empty: &[&str], variables: &[(&str, &str)]) {
    let mut command = Command::new(binary());
    command
        .arg("serve")
        .args(EMPTY)
        .args(["--state.path=", "--cri.endpoint=", "--reporter.directory="])
        .args(empty);
    command.args(receiver.flags(false)).envs(variables.iter().copied());
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut running = Running(command.spawn().expect("memledger starts"));
    let child = &mut running.0;
    let stderr = child.stderr.take().expect("piped");
    receiver.take();
    eventually("two pushes", || {
        if let Ok(Some(status)) = child.try_wait() {
            panic!("it ended by itself: {status}");
        }
        let pushes = list(&receiver.command(&json!({"do": "peek"})), "requests").len();
        if pushes >= 2 { Ok(()) } else { Err(format!("{pushes} so far")) }
    });
    let sockets = std::fs::read_dir(format!("/proc/{}/fd", child.id())).expect("it runs");
    let inode = |fd: std::fs::DirEntry| std::fs::read_link(fd.path()).ok()?.to_str().map(str::to_owned);
    let sockets: Vec<_> = sockets.filter_map(|fd| inode(fd.ok()?)).collect();
    let tcp = ["tcp", "tcp6"].map(|file| std::fs::read_to_string(format!("/proc/{}/net/{file}", child.id())));
    let is_own = |inode: &str| sockets.contains(&format!("socket:[{inode}]"));
    for line in tcp.iter().flatten().flat_map(|text| text.lines()) {
        let fields: Vec<_> = line.split_whitespace().collect();
        let is_listening = fields.get(3) == Some(&"0A");
        assert!(!(is_listening && fields.get(9).is_some_and(|inode| is_own(inode))), "it listens: {line}");
    }
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().expect("kill runs").success());
    let status =
        eventually("its end", || child.try_wait().expect("wait").ok_or_else(|| "running".to_owned()));
    let mut log = String::new();
    BufReader::new(stderr).read_to_string(&mut log).expect("its log");
    assert_eq!(status.code(), Some(0), "{log}");
    assert_eq!(log.matches("no HTTP listener").count(), 1, "{log}");
}

#[test]
fn metrics_are_exported_by_otlp_without_listener() {
    let Some(receiver) = Receiver::start() else { return };
    let file = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
    std::fs::write(file.path(), "web.listen-address: []\n").unwrap();
    let file = format!("--config.file={}", file.path().display());
    starts_without_listener(&receiver, &["--web.listen-address="], &[]);
    starts_without_listener(&receiver, &[], &[("MEMLEDGER_WEB_LISTEN_ADDRESS", "")]);
    starts_without_listener(&receiver, &[&file], &[]);
}

#[test]
fn start_without_listener_and_endpoint_fails_with_advice() {
    let (code, _, text) = run(&["serve", "--web.listen-address=", "--state.path="]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("set an address such as :10853, or --otlp.endpoint"), "{text}");
}
