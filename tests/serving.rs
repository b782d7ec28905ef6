//! HTTP, signals and the command line of the real binary.

use std::time::Duration;

use memledger::ledger::store::Store;

use crate::support::{Memledger, eventually, run};

const ALONE: &[&str] = &["--docker.socket=", "--podman.socket=", "--container.include=^none$"];

#[test]
fn metrics_are_gzip_only_on_request() {
    let memledger = Memledger::start(ALONE);
    let (status, headers, plain) = memledger.get_with("/metrics", &[("Accept-Encoding", "identity")]);
    assert_eq!(status, 200);
    assert_eq!(headers["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    assert!(!headers.contains_key("content-encoding"));
    assert!(plain.starts_with(b"# HELP memledger_build_info "));
    // ureq decompresses and removes the header, so the raw response is checked
    let raw = raw_request(
        &memledger.address,
        "GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: gzip\r\nConnection: close\r\n\r\n",
    );
    let text = String::from_utf8_lossy(&raw).to_lowercase();
    assert!(text.contains("content-encoding: gzip"), "{text}");
    let body = raw.windows(4).position(|window| window == b"\r\n\r\n").expect("a body") + 4;
    assert_eq!(raw[body..body + 2], [0x1f, 0x8b], "the magic number of gzip");
}

fn raw_request(address: &str, request: &str) -> Vec<u8> {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut response = Vec::new();
    stream.read_to_end(&mut response).unwrap();
    response
}

#[test]
fn disconnected_clients_release_their_permits() {
    use std::io::Write;
    let memledger = Memledger::start(&[ALONE, &["--web.max-requests=3"]].concat());
    for path in ["/metrics", "/api/v1/containers", "/"] {
        for _ in 0..50 {
            let mut stream = std::net::TcpStream::connect(&memledger.address).unwrap();
            let _ = write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"); // or closed already
        }
    }
    // until their connections are closed, further ones of this client may be closed too
    eventually("a response again", || {
        let request = "GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n";
        let stream = std::net::TcpStream::connect(&memledger.address).map_err(|error| error.to_string())?;
        match crate::web::exchange(stream, request)? {
            (200, _) => Ok(()),
            (status, _) => Err(status.to_string()),
        }
    });
}

#[test]
fn serves_health_and_index_and_404() {
    let memledger = Memledger::start(ALONE);
    assert_eq!(memledger.get("/-/healthy").0, 200);
    assert_eq!(memledger.get("/-/ready").0, 200);
    let (status, page) = memledger.get("/");
    assert_eq!(status, 200);
    assert!(page.contains("href=\"/metrics\""), "{page}");
    for nothing in ["/metricsx", "/-/", "/api/v1/nothing", "/..%2fetc/passwd"] {
        assert_eq!(memledger.get(nothing).0, 404, "{nothing}");
    }
}

#[test]
fn telemetry_path_is_configurable() {
    let memledger = Memledger::start(&[ALONE, &["--web.telemetry-path=/m/scrape"]].concat());
    assert_eq!(memledger.get("/m/scrape").0, 200);
    assert_eq!(memledger.get("/metrics").0, 404);
    assert!(memledger.get("/").1.contains("href=\"/m/scrape\""));
}

#[test]
fn api_needs_more_than_a_loopback_address() {
    let memledger = Memledger::start(&[ALONE, &["--no-web.enable-api", "--web.enable-admin"]].concat());
    for path in ["/api/v1/containers", "/api/v1/events", "/api/v1/why", "/api/v1/containers/x/why"] {
        let (status, text) = memledger.get(path);
        assert!(
            status == 403 && text.contains("set --web.enable-api, or use the control socket"),
            "{path}: {text}"
        );
    }
    let release = b"POST /-/release-gpu HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    let response = raw_request(&memledger.address, std::str::from_utf8(release).unwrap());
    assert!(response.starts_with(b"HTTP/1.1 403"), "{}", String::from_utf8_lossy(&response));
    assert_eq!(memledger.get("/metrics").0, 200);
    assert!(!memledger.get("/").1.contains("pid"), "the page names no process");
    let open = Memledger::start(&[ALONE, &["--web.enable-api"]].concat());
    assert_eq!(open.get_with("/api/v1/containers", &[("Host", "gpu7.example")]).0, 200);
    assert_eq!(open.get_with("/api/v1/containers", &[("Via", "1.1 proxy")]).0, 200);
    let response = raw_request(&open.address, std::str::from_utf8(release).unwrap());
    assert!(
        response.starts_with(b"HTTP/1.1 404"),
        "without --web.enable-admin: {}",
        String::from_utf8_lossy(&response)
    );
}

#[test]
fn all_addresses_include_ipv4_where_ipv6_sockets_exclude_it_by_default() {
    // a network namespace of its own, whose default is another one
    let script = "ip link set lo up && echo 1 >/proc/sys/net/ipv6/bindv6only && exec \"$@\"";
    let output = std::process::Command::new("unshare")
        .args(["-n", "sh", "-c", &format!("{script} & pid=$!; for _ in $(seq 300); do curl -fsS http://127.0.0.1:10853/-/healthy && break; sleep 0.1; done; kill $pid; wait $pid"), "sh"])
        .arg(crate::support::binary())
        .args(["serve", "--state.path=", "--local.socket=", "--cri.endpoint="])
        .args(ALONE)
        .output()
        .expect("unshare runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("memledger is healthy"), "{text} {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn stops_cleanly_soon_after_a_signal() {
    for signal in ["TERM", "INT"] {
        // an hour: who waits for the connection does not end within the deadline of the test
        let patient = ["--web.idle-timeout=1h", "--web.header-timeout=5m"];
        let memledger = Memledger::start(&[ALONE, &patient].concat());
        let idle = std::net::TcpStream::connect(&memledger.address).unwrap(); // must not delay the shutdown
        memledger.signal(signal);
        assert_eq!(memledger.wait().0, Some(0), "{signal}");
        drop(idle);
    }
}

#[test]
fn hangup_is_answered_by_a_line_and_nothing_else() {
    let memledger = Memledger::start(ALONE);
    memledger.signal("HUP");
    eventually("the line", || match memledger.log().contains("SIGHUP: the web configuration") {
        true => Ok(()),
        false => Err(memledger.log()),
    });
    assert_eq!(memledger.get("/-/healthy").0, 200);
    memledger.signal("TERM");
    assert_eq!(memledger.wait().0, Some(0));
}

#[test]
fn used_port_is_reported() {
    let first = Memledger::start(ALONE);
    let (code, _, stderr) =
        run(&["serve", "--state.path=", &format!("--web.listen-address={}", first.address)]);
    assert_eq!(code, Some(1));
    assert!(stderr.contains(&format!("cannot listen on {}", first.address)), "{stderr}");
    assert!(stderr.contains("set another --web.listen-address"), "{stderr}");
}

#[test]
fn invalid_settings_are_rejected_before_startup() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("memledger.yaml");
    std::fs::write(&file, "log.level: info\ncontainer:\n  inclde: x\n").unwrap();
    for (arguments, expected) in [
        (
            vec!["serve".to_owned(), format!("--config.file={}", file.display())],
            "memledger.yaml:3: \"container.inclde\" is not a known setting; did you mean container.include?",
        ),
        (vec!["serve".to_owned(), "--config.file=/nonexistent.yaml".to_owned()], "No such file"),
        (
            vec!["serve".to_owned(), "--container.include=(".to_owned()],
            "--container.include: \"(\" is not valid",
        ),
        (vec!["srve".to_owned()], "serve"),
    ] {
        let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
        let (code, _, stderr) = run(&arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {stderr}");
        assert!(stderr.contains(expected), "{arguments:?}: {stderr}");
    }
}

#[test]
fn invalid_environment_variable_is_named() {
    let output = std::process::Command::new(crate::support::binary())
        .arg("serve")
        .env("MEMLEDGER_SAMPLE_INTERVAL", "often")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("MEMLEDGER_SAMPLE_INTERVAL: \"often\" is not valid"), "{stderr}");
}

#[test]
fn negating_flag_wins_over_the_environment() {
    // an invalid variable shows whether it is read
    for (value, flags, code) in [
        ("true", &["--no-collector.gpu"][..], 0),
        ("perhaps", &["--no-collector.gpu"], 0),
        ("perhaps", &["--collector.gpu"], 0),
        ("perhaps", &[], 2),
    ] {
        let output = std::process::Command::new(crate::support::binary())
            .arg("doctor")
            .args(flags)
            .env("MEMLEDGER_COLLECTOR_GPU", value)
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{value} {flags:?}: {stderr}");
    }
}

#[test]
fn directory_in_place_of_a_file_fails_one_collector_only() {
    let root = tempfile::tempdir().unwrap();
    let proc = root.path().join("proc");
    std::fs::create_dir_all(proc.join("meminfo")).unwrap();
    let flag = format!("--path.procfs={}", proc.display());
    let memledger = Memledger::start(&[ALONE, &[flag.as_str()]].concat());
    let metrics = memledger.metrics();
    assert_eq!(metrics.value("memledger_collector_success", &[("collector", "host")]), 0.0);
    assert_eq!(metrics.get("memledger_host_memory_total_bytes", &[]), None);
    assert_eq!(metrics.value("memledger_collector_success", &[("collector", "own")]), 1.0);
    let faults =
        metrics.value("memledger_collector_read_errors_total", &[("collector", "host"), ("reason", "io")]);
    assert!(faults >= 1.0);
}

#[test]
fn doctor_reports_what_is_missing_and_how_to_fix_it() {
    let (code, text, _) = run(&["doctor"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("memledger can run here"), "{text}");
    let nowhere = tempfile::tempdir().unwrap();
    let flag = format!("--path.cgroupfs={}", nowhere.path().display());
    let (code, text, _) = run(&["doctor", &flag, "--gpu.nvml-library=/nonexistent.so"]);
    assert_eq!(code, Some(1), "{text}");
    for expected in [
        "MISSING  cgroups",
        "no memory of any container",
        "--path.cgroupfs",
        "MISSING  NVML",
        "no GPU memory",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

#[test]
fn doctor_folds_what_this_kind_of_host_does_not_need() {
    let Some(engine) = crate::support::docker::Engine::shared() else { return };
    let sys = tempfile::tempdir().unwrap(); // no GPU
    let flags = [
        "doctor",
        &engine.flag(),
        "--state.path=",
        "--local.socket=/nonexistent/control.sock",
        &format!("--path.sysfs={}", sys.path().display()),
    ];
    let source = |line: &str| line.get(11..28).map(|source| source.trim().to_owned());
    let missing = |text: &str| {
        text.lines().filter(|line| line.starts_with("  -  ")).filter_map(source).collect::<Vec<_>>()
    };
    let folded = ["cri", "podman", "AMD GPUs", "run reports", "serving"];
    let (code, text, _) = run(&flags);
    assert_eq!(code, Some(0), "{text}");
    let line = text.lines().find(|line| line.contains("not needed here")).expect(&text);
    let shown = missing(&text);
    // a machine of the tests may have a kubelet, a driver or a Podman of its own
    let (_, all, _) = run(&[&flags[..], &["--all"]].concat());
    for name in folded.iter().filter(|name| missing(&all).iter().any(|it| it == *name)) {
        let is_kubelet = *name == "cri" && std::path::Path::new("/var/lib/kubelet").exists();
        assert!(is_kubelet || line.contains(name) && !shown.iter().any(|it| it == name), "{name}: {text}");
    }
    assert!(shown.iter().any(|it| it == "state path") && line.ends_with("; --all shows why"), "{text}");
    assert!(!all.contains("not needed here") && all.contains("--report.dir or --report.s3-url"), "{all}");
    let (_, json, _) = run(&[&flags[..], &["--json"]].concat());
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let checks = json["checks"].as_array().unwrap();
    let of = |name: &str| checks.iter().find(|check| check["source"] == name).unwrap();
    assert_eq!((&of("serving")["needed"], &of("docker")["needed"]), (&false.into(), &true.into()));
}

/// Returns the output of doctor about the ledger, with the given flags.
fn doctor_of_ledger(flags: &[&str]) -> String {
    let (_, text, _) = run(&[&["doctor", "--docker.socket=", "--podman.socket="], flags].concat());
    text
}

#[test]
fn doctor_reports_what_the_ledger_lacks() {
    let nowhere = tempfile::tempdir().unwrap();
    let folder = nowhere.path().display();
    let host_paths = ["procfs", "cgroupfs", "devfs"].map(|root| format!("--path.{root}={folder}"));
    let host_paths = host_paths.each_ref().map(String::as_str);
    std::fs::write(nowhere.path().join("file"), "").unwrap();
    let state = format!("--state.path={folder}/file/state");
    let flags = ["--oom.kernel-log=device", &state];
    let text = doctor_of_ledger(&[&host_paths[..], &flags].concat());
    for expected in [
        "MISSING  kernel log",
        "--device /dev/kmsg:/dev/kmsg:r --cap-add SYSLOG",
        "MISSING  kernel counter",
        "MISSING  cgroup counters",
        "MISSING  state path",
        "file is not a directory",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let text = doctor_of_ledger(&["--oom.kernel-log=off", "--state.path="]);
    for expected in ["-        kernel log", "-        state path", "--state.path=/var/lib/memledger"] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

#[test]
fn ledger_that_was_moved_aside_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let state = format!("--state.path={}", dir.path().display());
    drop(Store::open(dir.path(), Duration::ZERO).unwrap());
    let runs = || run(&["runs", "--local.socket=", &state]);
    assert!(!runs().2.contains("does not read") && !doctor_of_ledger(&[&state]).contains("does not read"));
    let aside = dir.path().join("ledger.sqlite3.older-1795976849");
    std::fs::write(&aside, "").unwrap();
    for text in [runs().2, doctor_of_ledger(&[&state])] {
        let text: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(
            text.contains(&format!(" in {}, which this memledger does not read", aside.display())),
            "{text}"
        );
    }
}

#[test]
fn doctor_reads_a_ledger_in_use_without_changing_it() {
    let dir = tempfile::tempdir().unwrap();
    let state = format!("--state.path={}", dir.path().join("state").display());
    assert!(doctor_of_ledger(&[&state]).contains("no ledger yet"));
    assert!(!dir.path().join("state").exists(), "doctor makes nothing");
    let memledger = Memledger::start(&[ALONE, &[&state]].concat());
    memledger.eventually("the ledger", |metrics| match metrics.try_value("memledger_store_up", &[])? {
        1.0 => Ok(()),
        up => Err(up.to_string()),
    });
    let text = doctor_of_ledger(&[&state]);
    assert!(
        text.contains(&format!(" events, written by the memledger with pid {} on", memledger.pid())),
        "{text}"
    );
    let metrics = memledger.fresh_metrics();
    assert_eq!(metrics.value("memledger_store_up", &[]), 1.0);
    assert_eq!(metrics.value("memledger_store_unreadable_rows", &[]), 0.0);
    drop(memledger);
    assert!(doctor_of_ledger(&[&state]).contains(" events, no writer visible"));
}
