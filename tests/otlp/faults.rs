//! Endpoints that refuse, hang, throttle, go away, have bad certificates or do not exist. None of it reaches a cycle or a
//! scrape, and all of it ends by itself.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use fake_nvml::{FakeNvml, State};
use serde_json::json;

use super::{EMPTY, Receiver, list, memledger};
use crate::support::{Memledger, eventually, run};

const METRICS: [(&str, &str); 1] = [("signal", "metrics")];

fn is_up(memledger: &Memledger, up: f64) {
    memledger.eventually("the state of the push", |metrics| {
        match metrics.ask("memledger_otlp_up", &METRICS)? {
            is if is == up => Ok(()),
            is => Err(format!("{is}; log: {}", memledger.log())),
        }
    });
}

fn lost(memledger: &Memledger, reason: &str) -> f64 {
    memledger.metrics().value("memledger_otlp_lost_total", &[METRICS[0], ("reason", reason)])
}

/// How often the log says something.
fn said(memledger: &Memledger, what: &str) -> usize {
    memledger.log().lines().filter(|line| line.contains(what)).count()
}

/// Resident memory in KiB.
fn resident(memledger: &Memledger) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", memledger.pid())).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a line");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

/// Cycles go on and scrapes are answered whatever the endpoint does.
fn goes_on(memledger: &Memledger) {
    let stamp = || memledger.metrics().value("memledger_snapshot_timestamp_seconds", &[]);
    let before = stamp();
    #[allow(clippy::disallowed_methods)]
    let began = std::time::Instant::now();
    eventually("ten cycles", || if stamp() > before + 1.0 { Ok(()) } else { Err("too few".to_owned()) });
    assert!(began.elapsed() < Duration::from_secs(10), "a second of cycles took {:?}", began.elapsed());
}

/// The push fails as `behave` says, is counted as `reason`, said once, and goes on when the endpoint is well again.
fn fails_and_recovers(grpc: bool, behave: serde_json::Value, reason: &str) {
    let Some(receiver) = Receiver::start() else { return };
    receiver.behave(behave);
    let memledger = memledger(EMPTY, &receiver.flags(grpc), &["--otlp.timeout=500ms"]);
    is_up(&memledger, 0.0);
    goes_on(&memledger);
    eventually("three pushes are lost", || {
        if lost(&memledger, reason) > 150.0 { Ok(()) } else { Err("fewer".to_owned()) }
    });
    assert_eq!(
        said(&memledger, "signal=metrics endpoint"),
        2,
        "at start, and once that it fails: {}",
        memledger.log()
    );
    receiver.behave(json!({"as": "ok"}));
    is_up(&memledger, 1.0);
    assert!(!list(&receiver.take(), "points").is_empty());
    assert_eq!(said(&memledger, "OTLP is taken again"), 1, "{}", memledger.log());
}

#[test]
fn a_hung_grpc_endpoint() {
    fails_and_recovers(true, json!({"as": "hang"}), "unreachable");
}

#[test]
fn a_hung_http_endpoint() {
    fails_and_recovers(false, json!({"as": "hang"}), "unreachable");
}

#[test]
fn an_endpoint_that_is_unavailable() {
    fails_and_recovers(true, json!({"as": "grpc", "code": "UNAVAILABLE"}), "unreachable");
}

#[test]
fn an_endpoint_that_has_no_room_and_does_not_say_when() {
    fails_and_recovers(true, json!({"as": "grpc", "code": "RESOURCE_EXHAUSTED"}), "refused");
}

#[test]
fn an_endpoint_that_refuses_us() {
    fails_and_recovers(false, json!({"as": "http", "status": 401}), "refused");
}

#[test]
fn an_endpoint_that_is_overloaded() {
    fails_and_recovers(false, json!({"as": "http", "status": 503}), "unreachable");
}

/// It is not asked again before the time that it said.
fn is_left_alone(grpc: bool, behave: serde_json::Value) {
    let Some(receiver) = Receiver::start() else { return };
    receiver.behave(behave);
    let memledger = memledger(EMPTY, &receiver.flags(grpc), &["--no-otlp.logs"]);
    is_up(&memledger, 0.0);
    receiver.behave(json!({"as": "ok"}));
    assert_eq!(receiver.take()["attempts"], 1);
    let before = eventually("the first push gave way", || {
        let lost = lost(&memledger, "unreachable");
        if lost > 0.0 { Ok(lost) } else { Err("not yet".to_owned()) }
    });
    eventually("two more pushes give way", || {
        if lost(&memledger, "unreachable") > before * 3.0 { Ok(()) } else { Err("not yet".to_owned()) }
    });
    assert_eq!(receiver.take()["attempts"], 0, "it said four seconds");
    is_up(&memledger, 1.0);
}

#[test]
fn retry_after_is_obeyed() {
    is_left_alone(false, json!({"as": "http", "status": 429, "retry": 4}));
}

#[test]
fn retry_info_is_obeyed() {
    is_left_alone(true, json!({"as": "grpc", "code": "RESOURCE_EXHAUSTED", "retry": 4}));
}

#[test]
fn an_endpoint_that_asks_for_no_time_is_not_stormed() {
    for (grpc, behave) in [
        (false, json!({"as": "http", "status": 503, "retry": 0})),
        (true, json!({"as": "grpc", "code": "RESOURCE_EXHAUSTED", "retry": 0})),
    ] {
        let Some(receiver) = Receiver::start() else { return };
        receiver.behave(behave);
        let memledger = memledger(EMPTY, &receiver.flags(grpc), &["--no-otlp.logs"]);
        is_up(&memledger, 0.0);
        goes_on(&memledger);
        let attempts = receiver.take()["attempts"].as_u64().expect("a number");
        assert!((1..=10).contains(&attempts), "{attempts} in a few seconds");
    }
}

#[test]
fn what_an_endpoint_rejects_of_a_push_is_counted() {
    let Some(receiver) = Receiver::start() else { return };
    receiver.behave(json!({"as": "partial", "rejected": 3}));
    let memledger = memledger(EMPTY, &receiver.flags(true), &[]);
    memledger.eventually("rejected points", |metrics| {
        let labels = [METRICS[0], ("reason", "refused")];
        match metrics.ask("memledger_otlp_lost_total", &labels)? {
            lost if lost >= 3.0 && lost % 3.0 == 0.0 => Ok(()),
            lost => Err(format!("{lost}")),
        }
    });
    eventually("the log", || {
        if said(&memledger, "3 items were rejected: some are too old") == 1 {
            Ok(())
        } else {
            Err(memledger.log())
        }
    });
}

#[test]
fn an_endpoint_that_restarts_in_mid_stream() {
    for grpc in [true, false] {
        let Some(receiver) = Receiver::start() else { return };
        let memledger = memledger(EMPTY, &receiver.flags(grpc), &[]);
        is_up(&memledger, 1.0);
        receiver.stop();
        is_up(&memledger, 0.0);
        goes_on(&memledger);
        receiver.start_again();
        is_up(&memledger, 1.0);
    }
}

#[test]
fn an_endpoint_that_has_no_name_or_no_port() {
    for endpoint in ["http://no-such-host.invalid:4317", "http://127.0.0.1:1"] {
        for protocol in ["grpc", "http/protobuf"] {
            let flags = [format!("--otlp.endpoint={endpoint}"), format!("--otlp.protocol={protocol}")];
            let memledger = memledger(EMPTY, &flags, &["--otlp.interval=1s"]);
            is_up(&memledger, 0.0);
            goes_on(&memledger);
            let log = memledger.log();
            assert!(
                log.contains(endpoint.trim_start_matches("http://")) && log.contains("OTLP is not taken"),
                "{log}"
            );
        }
    }
}

#[test]
fn a_dead_endpoint_makes_no_memory_grow_and_holds_up_no_end() {
    let Some(receiver) = Receiver::start() else { return };
    receiver.behave(json!({"as": "hang"}));
    // many GPUs make large pushes: if those that nobody takes were kept, it would show
    let folder = tempfile::tempdir().unwrap();
    let library = FakeNvml::install(folder.path(), &State::with_gpus(32)).expect("the fake library");
    let nvml = format!("--gpu.nvml-library={}", library.path().display());
    let flags = ["--otlp.timeout=200ms", "--otlp.shutdown-timeout=1s", &nvml];
    let memledger = memledger(EMPTY, &receiver.flags(true), &flags);
    let given_up = |points: f64| {
        eventually("pushes are given up", || {
            let lost = lost(&memledger, "unreachable");
            if lost >= points { Ok(lost) } else { Err(format!("{lost} of {points}; {}", memledger.log())) }
        })
    };
    let first = given_up(3000.0);
    let before = resident(&memledger);
    given_up(first + 16_000.0);
    let grown = resident(&memledger).saturating_sub(before);
    assert!(grown < 1024, "{grown} KiB more after 16,000 points of at least 100 bytes that nobody took");
    let attempts = receiver.take()["attempts"].as_u64().expect("a number");
    assert!(attempts >= 3, "only {attempts} attempts");
    memledger.signal("TERM");
    let (code, took) = memledger.wait();
    assert_eq!(code, Some(0));
    assert!(took < Duration::from_secs(6), "the end took {took:?}");
}

#[test]
fn what_is_left_is_flushed_at_the_end() {
    let Some(receiver) = Receiver::start() else { return };
    let flags = receiver.flags(true);
    let flags: Vec<_> = flags.into_iter().filter(|flag| !flag.contains("interval")).collect();
    let memledger = memledger(EMPTY, &flags, &["--otlp.interval=1h"]);
    is_up(&memledger, 1.0);
    receiver.take();
    memledger.signal("TERM");
    assert_eq!(memledger.wait().0, Some(0));
    assert!(!list(&receiver.take(), "points").is_empty(), "the last push came");
}

/// Certificates made by openssl: an authority, and what it signed for a server and for a client.
fn certificates(folder: &Path) -> impl Fn(&str) -> String {
    let folder = folder.to_owned();
    let script = r#"set -e
        openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout ca.key -out ca.pem -subj /CN=authority -days 2
        for name in server client; do
            openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout $name.key -out $name.csr -subj /CN=$name
            printf 'subjectAltName=DNS:localhost\n' >ext
            openssl x509 -req -in $name.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out $name.pem -days 2 -extfile ext
        done"#;
    let made = Command::new("sh").args(["-c", script]).current_dir(&folder).stderr(Stdio::null()).status();
    assert!(made.expect("sh runs").success(), "openssl makes certificates");
    move |name| folder.join(name).display().to_string()
}

#[test]
fn a_certificate_that_is_not_trusted_is_refused_and_one_that_is_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let file = certificates(folder.path());
    let Some(receiver) = Receiver::with_tls(&[&file("server.pem"), &file("server.key"), &file("ca.pem")])
    else {
        return;
    };
    let client = [
        format!("--otlp.client-certificate={}", file("client.pem")),
        format!("--otlp.client-key={}", file("client.key")),
    ];
    let client: Vec<_> = client.iter().map(String::as_str).collect();
    let trusted = format!("--otlp.certificate={}", file("ca.pem"));
    for grpc in [true, false] {
        let flags: Vec<_> =
            receiver.flags(grpc).iter().map(|flag| flag.replace("http://", "https://")).collect();
        let stranger = memledger(EMPTY, &flags, &client);
        is_up(&stranger, 0.0);
        assert!(stranger.log().contains("UnknownIssuer"), "{}", stranger.log());
        drop(stranger);
        let nobody = memledger(EMPTY, &flags, &[&trusted]);
        is_up(&nobody, 0.0);
        drop(nobody);
        receiver.take();
        let known = memledger(EMPTY, &flags, &[&client[..], &[trusted.as_str()]].concat());
        is_up(&known, 1.0);
        assert!(!list(&receiver.take(), "points").is_empty());
    }
}

#[test]
fn doctor_says_whether_the_endpoint_answers() {
    let Some(receiver) = Receiver::start() else { return };
    for grpc in [true, false] {
        let flags = receiver.flags(grpc);
        let mut arguments = vec!["doctor", "--state.path="];
        arguments.extend(flags.iter().map(String::as_str));
        let (_, out, _) = run(&arguments);
        assert!(out.contains("ok       OTLP metrics") && out.contains("ok       OTLP logs"), "{out}");
        receiver.stop();
        let (_, out, _) = run(&arguments);
        assert!(
            out.contains("MISSING  OTLP metrics") && out.contains("cannot connect to localhost"),
            "{out}"
        );
        receiver.start_again();
    }
    let (_, out, _) = run(&["doctor", "--state.path="]);
    assert!(!out.contains("OTLP"), "{out}");
}
