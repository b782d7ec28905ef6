//! Endpoints that reject, hang, throttle, restart, have bad certificates or do not exist. None of it delays a cycle or a scrape,
//! and the export recovers by itself.

use std::path::Path;
use std::process::{Command, Stdio};

use fake_nvml::{FakeNvml, State};
use serde_json::json;

use super::{EMPTY, Receiver, list, memledger};
use crate::support::{Memledger, eventually, run};

const METRICS: [(&str, &str); 1] = [("signal", "metrics")];

pub(super) fn await_up(memledger: &Memledger, up: f64) {
    memledger.eventually("the state of the export", |metrics| {
        match metrics.try_value("memledger_otlp_up", &METRICS)? {
            is if is == up => Ok(()),
            is => Err(format!("{is}; log: {}", memledger.log())),
        }
    });
}

fn lost(memledger: &Memledger, reason: &str) -> f64 {
    memledger.metrics().value("memledger_otlp_lost_total", &[METRICS[0], ("reason", reason)])
}

/// Counts the log lines that contain a text.
fn log_count(memledger: &Memledger, what: &str) -> usize {
    memledger.log().lines().filter(|line| line.contains(what)).count()
}

/// Checks that cycles and scrapes go on.
fn keeps_sampling(memledger: &Memledger) {
    let stamp = || memledger.metrics().value("memledger_snapshot_timestamp_seconds", &[]);
    let before = stamp();
    eventually("ten cycles", || if stamp() > before + 1.0 { Ok(()) } else { Err("too few".to_owned()) });
}

/// Checks that the export fails, counts losses as `reason`, logs the failure once, and recovers.
fn fails_and_recovers(grpc: bool, behave: serde_json::Value, reason: &str) {
    let Some(receiver) = Receiver::start() else { return };
    receiver.behave(behave);
    let memledger = memledger(EMPTY, &receiver.flags(grpc), &["--otlp.timeout=500ms"]);
    await_up(&memledger, 0.0);
    keeps_sampling(&memledger);
    eventually("three exports are lost", || {
        if lost(&memledger, reason) > 150.0 { Ok(()) } else { Err("fewer".to_owned()) }
    });
    assert_eq!(
        log_count(&memledger, "signal=metrics endpoint"),
        2,
        "at start, and once that it fails: {}",
        memledger.log()
    );
    receiver.behave(json!({"as": "ok"}));
    await_up(&memledger, 1.0);
    assert!(!list(&receiver.take(), "points").is_empty());
    assert_eq!(log_count(&memledger, "OTLP export recovered\" signal=metrics"), 1, "{}", memledger.log());
}

#[test]
fn hanging_grpc_endpoint() {
    fails_and_recovers(true, json!({"as": "hang"}), "unreachable");
}

#[test]
fn hanging_http_endpoint() {
    fails_and_recovers(false, json!({"as": "hang"}), "unreachable");
}

#[test]
fn unavailable_endpoint() {
    fails_and_recovers(true, json!({"as": "grpc", "code": "UNAVAILABLE"}), "unreachable");
}

#[test]
fn exhausted_endpoint_without_retry_delay() {
    fails_and_recovers(true, json!({"as": "grpc", "code": "RESOURCE_EXHAUSTED"}), "refused");
}

#[test]
fn unauthorized_endpoint() {
    fails_and_recovers(false, json!({"as": "http", "status": 401}), "refused");
}

#[test]
fn overloaded_endpoint() {
    fails_and_recovers(false, json!({"as": "http", "status": 503}), "unreachable");
}

/// Checks that there is no attempt before the delay that the endpoint requested: by its own clock, since a busy host may
/// delay the test for longer.
fn waits_for_requested_delay(grpc: bool, behave: serde_json::Value) {
    let Some(receiver) = Receiver::start() else { return };
    receiver.behave(behave);
    let memledger = memledger(EMPTY, &receiver.flags(grpc), &["--no-otlp.logs"]);
    await_up(&memledger, 0.0);
    receiver.behave(json!({"as": "ok"}));
    await_up(&memledger, 1.0);
    assert!(lost(&memledger, "unreachable") > 0.0, "exports are given up meanwhile");
    let taken = receiver.take();
    let rejected: Vec<_> =
        list(&taken, "rejected").iter().map(|time| time.as_f64().expect("seconds")).collect();
    let accepted = taken["requests"][0]["at"].as_f64().expect("seconds");
    assert!(!rejected.is_empty(), "{taken}");
    let attempts = [&rejected[..], &[accepted]].concat();
    assert!(
        attempts.windows(2).all(|pair| pair[1] - pair[0] >= 4.0),
        "the endpoint requested four seconds: {attempts:?}"
    );
}

#[test]
fn honours_retry_after() {
    waits_for_requested_delay(false, json!({"as": "http", "status": 429, "retry": 4}));
}

#[test]
fn honours_retry_info() {
    waits_for_requested_delay(true, json!({"as": "grpc", "code": "RESOURCE_EXHAUSTED", "retry": 4}));
}

#[test]
fn backs_off_even_if_the_endpoint_requests_no_delay() {
    for (grpc, behave) in [
        (false, json!({"as": "http", "status": 503, "retry": 0})),
        (true, json!({"as": "grpc", "code": "RESOURCE_EXHAUSTED", "retry": 0})),
    ] {
        let Some(receiver) = Receiver::start() else { return };
        receiver.behave(behave);
        let memledger = memledger(EMPTY, &receiver.flags(grpc), &["--no-otlp.logs"]);
        await_up(&memledger, 0.0);
        keeps_sampling(&memledger);
        let attempts = receiver.take()["attempts"].as_u64().expect("a number");
        assert!((1..=10).contains(&attempts), "{attempts} in a few seconds");
    }
}

#[test]
fn counts_partially_rejected_items() {
    let Some(receiver) = Receiver::start() else { return };
    receiver.behave(json!({"as": "partial", "rejected": 3}));
    let memledger = memledger(EMPTY, &receiver.flags(true), &[]);
    memledger.eventually("rejected points", |metrics| {
        let labels = [METRICS[0], ("reason", "refused")];
        match metrics.try_value("memledger_otlp_lost_total", &labels)? {
            lost if lost >= 3.0 && lost % 3.0 == 0.0 => Ok(()),
            lost => Err(format!("{lost}")),
        }
    });
    eventually("the log", || {
        if log_count(&memledger, "3 items were rejected: some are too old") == 1 {
            Ok(())
        } else {
            Err(memledger.log())
        }
    });
}

#[test]
fn recovers_after_endpoint_restart() {
    for grpc in [true, false] {
        let Some(receiver) = Receiver::start() else { return };
        let memledger = memledger(EMPTY, &receiver.flags(grpc), &[]);
        await_up(&memledger, 1.0);
        receiver.stop();
        await_up(&memledger, 0.0);
        keeps_sampling(&memledger);
        receiver.start_again();
        await_up(&memledger, 1.0);
    }
}

#[test]
fn unresolvable_or_unreachable_endpoint() {
    for endpoint in ["http://no-such-host.invalid:4317", "http://127.0.0.1:1"] {
        for protocol in ["grpc", "http/protobuf"] {
            let flags = [format!("--otlp.endpoint={endpoint}"), format!("--otlp.protocol={protocol}")];
            let memledger = memledger(EMPTY, &flags, &["--otlp.interval=1s"]);
            await_up(&memledger, 0.0);
            keeps_sampling(&memledger);
            let log = memledger.log();
            assert!(
                log.contains(endpoint.trim_start_matches("http://")) && log.contains("OTLP export failing"),
                "{log}"
            );
        }
    }
}

#[test]
fn memory_is_bounded_while_endpoint_is_down() {
    let Some(receiver) = Receiver::start() else { return };
    receiver.behave(json!({"as": "hang"}));
    // many GPUs make large exports: memory would grow visibly if unsent ones were retained
    let folder = tempfile::tempdir().unwrap();
    let library = FakeNvml::install(folder.path(), &State::with_gpus(32)).expect("the fake library");
    let nvml = format!("--gpu.nvml-library={}", library.path().display());
    let mut to_receiver = receiver.flags(true);
    to_receiver.retain(|flag| !flag.starts_with("--otlp.interval"));
    let flags = ["--otlp.interval=100ms", "--otlp.timeout=1s", "--otlp.shutdown-timeout=1s", &nvml];
    let memledger = memledger(EMPTY, &to_receiver, &flags);
    let cancelled = |points: f64| {
        eventually("exports are given up", || {
            let lost = lost(&memledger, "unreachable");
            if lost >= points { Ok(lost) } else { Err(format!("{lost} of {points}; {}", memledger.log())) }
        })
    };
    let first = cancelled(3000.0);
    // in steps: the deadline is for one of them, however busy the host is
    let used: Vec<u64> = (0..=8)
        .map(|step| {
            cancelled(first + 4_000.0 * f64::from(step));
            memledger.anonymous_bytes()
        })
        .collect();
    // An export that is just being encoded takes a MiB: the least of some steps is without one. What is retained would be in both.
    let [before, after] = [&used[..4], &used[5..]].map(|some| *some.iter().min().expect("some"));
    let grown = after.saturating_sub(before);
    assert!(
        grown < 1 << 20,
        "{grown} bytes more after 20,000 points of at least 100 bytes that were not accepted: {used:?}"
    );
    eventually("three attempts", || {
        let attempts = receiver.command(&json!({"do": "peek"}))["attempts"].as_u64().expect("a number");
        if attempts >= 3 { Ok(()) } else { Err(attempts.to_string()) }
    });
    memledger.signal("TERM");
    assert_eq!(memledger.wait().0, Some(0));
}

#[test]
fn hanging_endpoint_delays_no_shutdown() {
    for grpc in [true, false] {
        let Some(receiver) = Receiver::start() else { return };
        receiver.behave(json!({"as": "hang"}));
        // an hour: who waits for the request does not end within the deadline of the test
        let flags = ["--otlp.timeout=1h", "--otlp.shutdown-timeout=1s"];
        let memledger = memledger(EMPTY, &receiver.flags(grpc), &flags);
        eventually("a request that hangs", || {
            let attempts = receiver.command(&json!({"do": "peek"}))["attempts"].as_u64().expect("a number");
            if attempts >= 1 { Ok(()) } else { Err("none".to_owned()) }
        });
        memledger.signal("TERM");
        assert_eq!(memledger.wait().0, Some(0));
    }
}

#[test]
fn flushes_at_shutdown() {
    let Some(receiver) = Receiver::start() else { return };
    let flags = receiver.flags(true);
    let flags: Vec<_> = flags.into_iter().filter(|flag| !flag.contains("interval")).collect();
    let memledger = memledger(EMPTY, &flags, &["--otlp.interval=1h", "--otlp.shutdown-timeout=1m"]);
    await_up(&memledger, 1.0);
    receiver.take();
    memledger.fresh_metrics(); // the same snapshot is not exported twice
    memledger.signal("TERM");
    assert_eq!(memledger.wait().0, Some(0));
    assert!(!list(&receiver.take(), "points").is_empty(), "the last export arrived");
}

/// Makes certificates by openssl: an authority, a server and a client.
pub(super) fn certificates(folder: &Path) -> impl Fn(&str) -> String {
    let folder = folder.to_owned();
    let script = r#"set -e
        openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout ca.key -out ca.pem -subj /CN=authority -days 2
        for name in server client; do
            openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout $name.key -out $name.csr -subj /CN=$name
            printf 'subjectAltName=DNS:localhost,DNS:collector.test\n' >ext
            openssl x509 -req -in $name.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out $name.pem -days 2 -extfile ext
        done"#;
    let made = Command::new("sh").args(["-c", script]).current_dir(&folder).stderr(Stdio::null()).status();
    assert!(made.expect("sh runs").success(), "openssl makes certificates");
    move |name| folder.join(name).display().to_string()
}

#[test]
fn verifies_the_server_and_presents_a_client_certificate() {
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
        await_up(&stranger, 0.0);
        assert!(stranger.log().contains("UnknownIssuer"), "{}", stranger.log());
        drop(stranger);
        let anonymous = memledger(EMPTY, &flags, &[&trusted]);
        await_up(&anonymous, 0.0);
        drop(anonymous);
        receiver.take();
        let known = memledger(EMPTY, &flags, &[&client[..], &[trusted.as_str()]].concat());
        await_up(&known, 1.0);
        assert!(!list(&receiver.take(), "points").is_empty());
    }
}

#[test]
fn certificate_that_cannot_be_read_delays_only_its_own_signal() {
    let Some(receiver) = Receiver::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("ca.pem"); // reads of it block, as on a network file system that is down
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    super::events::write(folder.path(), [super::events::exit(1, "train")]);
    let wrapper = [
        "env".to_owned(),
        format!("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT=http://localhost:{}/v1/metrics", receiver.http),
        format!("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT=https://localhost:{}/v1/logs", receiver.http),
        format!("OTEL_EXPORTER_OTLP_LOGS_CERTIFICATE={}", pipe.display()),
        "OTEL_EXPORTER_OTLP_LOGS_TIMEOUT=500".to_owned(),
    ];
    let wrapper: Vec<_> = wrapper.iter().map(String::as_str).collect();
    let state = format!("--state.path={}", folder.path().display());
    let flags = [EMPTY, &[&state, "--otlp.interval=300ms", "--otlp.shutdown-timeout=1s"]];
    let memledger = Memledger::start_through(&wrapper, &flags.concat());
    eventually("the logs fail", || match memledger.log().contains("OTLP export failing") {
        true => Ok(()),
        false => Err(memledger.log()),
    });
    receiver.take();
    eventually("five more exports of metrics", || {
        match list(&receiver.command(&json!({"do": "peek"})), "requests").len() {
            0..5 => Err("fewer".to_owned()),
            _ => Ok(()),
        }
    });
    memledger.signal("TERM");
    assert_eq!(memledger.wait().0, Some(0), "the file never ends");
}

#[test]
fn doctor_checks_the_endpoint() {
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

#[test]
fn warning_about_accepted_items_is_logged_once() {
    for grpc in [true, false] {
        let Some(receiver) = Receiver::start() else { return };
        receiver.behave(json!({"as": "warn"}));
        let memledger = memledger(EMPTY, &receiver.flags(grpc), &[]);
        await_up(&memledger, 1.0);
        let warnings = || {
            let log = memledger.log();
            log.lines()
                .filter(|line| line.contains("use a newer path") && line.contains("signal=metrics"))
                .count()
        };
        eventually("the warning", || if warnings() > 0 { Ok(()) } else { Err(memledger.log()) });
        receiver.take();
        eventually("three more exports", || {
            match list(&receiver.command(&json!({"do": "peek"})), "requests").len() {
                0..3 => Err("fewer".to_owned()),
                _ => Ok(()),
            }
        });
        assert_eq!(warnings(), 1, "{}", memledger.log());
    }
}
