//! HTTP, signals and the command line of the real binary.

use std::time::Duration;

use crate::support::{Memledger, eventually, run};

const ALONE: &[&str] = &["--docker.socket=", "--podman.socket=", "--container.include=^none$"];

#[test]
fn metrics_are_text_and_gzip_only_when_asked() {
    let memledger = Memledger::start(ALONE);
    let (status, headers, plain) = memledger.get_with("/metrics", &[("Accept-Encoding", "identity")]);
    assert_eq!(status, 200);
    assert_eq!(headers["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    assert!(!headers.contains_key("content-encoding"));
    assert!(plain.starts_with(b"# HELP memledger_build_info "));
    // ureq undoes the compression and takes the header away: look at the raw answer
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
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    answer
}

#[test]
fn clients_that_go_away_give_their_places_back() {
    use std::io::Write;
    let memledger = Memledger::start(&[ALONE, &["--web.max-requests=3"]].concat());
    for path in ["/metrics", "/api/v1/containers", "/"] {
        for _ in 0..50 {
            let mut stream = std::net::TcpStream::connect(&memledger.address).unwrap();
            write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        }
    }
    eventually("an answer again", || match memledger.get("/metrics").0 {
        200 => Ok(()),
        status => Err(status.to_string()),
    });
}

#[test]
fn health_landing_page_and_unknown_paths() {
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
fn the_path_of_the_metrics_can_be_set() {
    let memledger = Memledger::start(&[ALONE, &["--web.telemetry-path=/m/scrape"]].concat());
    assert_eq!(memledger.get("/m/scrape").0, 200);
    assert_eq!(memledger.get("/metrics").0, 404);
    assert!(memledger.get("/").1.contains("href=\"/m/scrape\""));
}

#[test]
fn only_who_asks_from_this_host_itself_gets_the_process_list() {
    let memledger = Memledger::start(ALONE);
    assert_eq!(memledger.get("/api/v1/containers").0, 200);
    assert_eq!(memledger.get_with("/api/v1/containers", &[("Host", "attacker.example")]).0, 403);
    // nor does whoever asks a proxy on this host
    for header in
        ["Forwarded", "Via", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Server", "X-Real-IP"]
    {
        let (status, _, _) = memledger.get_with("/api/v1/containers", &[(header, "10.0.0.1")]);
        assert_eq!(status, 403, "{header}");
    }
    let nameless = raw_request(&memledger.address, "GET /api/v1/containers HTTP/1.0\r\n\r\n");
    assert!(nameless.starts_with(b"HTTP/1.0 403"), "{}", String::from_utf8_lossy(&nameless));
    let open = Memledger::start(&[ALONE, &["--web.enable-api"]].concat());
    assert_eq!(open.get_with("/api/v1/containers", &[("Host", "gpu7.example")]).0, 200);
    assert_eq!(open.get_with("/api/v1/containers", &[("Via", "1.1 proxy")]).0, 200);
}

#[test]
fn a_signal_ends_it_cleanly_within_a_second() {
    for signal in ["TERM", "INT"] {
        let memledger = Memledger::start(ALONE);
        let idle = std::net::TcpStream::connect(&memledger.address).unwrap(); // must not hold up the end
        memledger.signal(signal);
        let (code, took) = memledger.wait();
        assert_eq!(code, Some(0), "{signal}");
        assert!(took < Duration::from_secs(1), "{signal} took {took:?}");
        drop(idle);
    }
}

#[test]
fn a_second_instance_on_a_used_port_says_so() {
    let first = Memledger::start(ALONE);
    let (code, _, stderr) =
        run(&["serve", "--state.path=", &format!("--web.listen-address={}", first.address)]);
    assert_eq!(code, Some(1));
    assert!(stderr.contains(&format!("cannot listen on {}", first.address)), "{stderr}");
    assert!(stderr.contains("choose another with --web.listen-address"), "{stderr}");
}

#[test]
fn wrong_settings_are_refused_before_anything_starts() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("memledger.yaml");
    std::fs::write(&file, "log.level: info\ncontainer:\n  inclde: x\n").unwrap();
    for (arguments, says) in [
        (
            vec!["serve".to_owned(), format!("--config.file={}", file.display())],
            "memledger.yaml:3: \"container.inclde\" is no setting; allowed: include, exclude",
        ),
        (vec!["serve".to_owned(), "--config.file=/nonexistent.yaml".to_owned()], "No such file"),
        (
            vec!["serve".to_owned(), "--container.include=(".to_owned()],
            "--container.include: \"(\" cannot be used",
        ),
        (vec!["srve".to_owned()], "serve"),
    ] {
        let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
        let (code, _, stderr) = run(&arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {stderr}");
        assert!(stderr.contains(says), "{arguments:?}: {stderr}");
    }
}

#[test]
fn an_unusable_environment_variable_is_named() {
    let output = std::process::Command::new(crate::support::binary())
        .arg("serve")
        .env("MEMLEDGER_SAMPLE_INTERVAL", "often")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("MEMLEDGER_SAMPLE_INTERVAL: \"often\" cannot be used"), "{stderr}");
}

#[test]
fn a_flag_that_turns_off_wins_over_the_environment() {
    // a variable that cannot be used shows whether it is looked at
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
fn a_directory_where_a_file_should_be_is_a_fault_and_the_rest_goes_on() {
    let root = tempfile::tempdir().unwrap();
    let proc = root.path().join("proc");
    std::fs::create_dir_all(proc.join("meminfo")).unwrap();
    let flag = format!("--path.procfs={}", proc.display());
    let memledger = Memledger::start(&[ALONE, &[flag.as_str()]].concat());
    let metrics = memledger.metrics();
    assert_eq!(metrics.value("memledger_collector_success", &[("collector", "host")]), 0.0);
    assert_eq!(metrics.get("memledger_host_memory_total_bytes", &[]), None);
    assert_eq!(metrics.value("memledger_collector_success", &[("collector", "own")]), 1.0);
    let faults = metrics.value("memledger_read_faults_total", &[("collector", "host"), ("reason", "io")]);
    assert!(faults >= 1.0);
}

#[test]
fn doctor_says_what_is_lost_and_what_to_change() {
    let (code, text, _) = run(&["doctor"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("The main job can run here"), "{text}");
    let nowhere = tempfile::tempdir().unwrap();
    let flag = format!("--path.cgroupfs={}", nowhere.path().display());
    let (code, text, _) = run(&["doctor", &flag, "--gpu.nvml-library=/nonexistent.so"]);
    assert_eq!(code, Some(1), "{text}");
    for says in [
        "MISSING  cgroups",
        "no memory of any container",
        "--path.cgroupfs",
        "MISSING  NVML",
        "no GPU memory",
    ] {
        assert!(text.contains(says), "{says}: {text}");
    }
}

/// What doctor says of the ledger on a host of which there is nothing but the given flags.
fn doctor_of_ledger(flags: &[&str]) -> String {
    let (_, text, _) = run(&[&["doctor", "--docker.socket=", "--podman.socket="], flags].concat());
    text
}

#[test]
fn doctor_says_what_the_ledger_of_oom_kills_lacks() {
    let nowhere = tempfile::tempdir().unwrap();
    let folder = nowhere.path().display();
    let roots = ["procfs", "cgroupfs", "devfs"].map(|root| format!("--path.{root}={folder}"));
    let roots = roots.each_ref().map(String::as_str);
    std::fs::write(nowhere.path().join("file"), "").unwrap();
    let state = format!("--state.path={folder}/file/state");
    let flags = ["--oom.kernel-log=device", &state];
    let text = doctor_of_ledger(&[&roots[..], &flags].concat());
    for says in [
        "MISSING  kernel log",
        "--device /dev/kmsg:/dev/kmsg:r --cap-add SYSLOG",
        "MISSING  kernel counter",
        "MISSING  cgroup counters",
        "MISSING  state path",
        "file is no directory",
    ] {
        assert!(text.contains(says), "{says}: {text}");
    }
    let text = doctor_of_ledger(&["--oom.kernel-log=off", "--state.path="]);
    for says in ["-        kernel log", "-        state path", "--state.path=/var/lib/memledger"] {
        assert!(text.contains(says), "{says}: {text}");
    }
}

#[test]
fn doctor_looks_at_a_ledger_while_it_is_written_and_leaves_it_alone() {
    let dir = tempfile::tempdir().unwrap();
    let state = format!("--state.path={}", dir.path().join("state").display());
    assert!(doctor_of_ledger(&[&state]).contains("no ledger yet"));
    assert!(!dir.path().join("state").exists(), "doctor makes nothing");
    let memledger = Memledger::start(&[ALONE, &[&state]].concat());
    memledger.eventually("the ledger", |metrics| metrics.ask("memledger_store_up", &[]));
    let text = doctor_of_ledger(&[&state]);
    assert!(
        text.contains(&format!(" events, written by the memledger that is pid {} on", memledger.pid())),
        "{text}"
    );
    let metrics = memledger.fresh_metrics();
    assert_eq!(metrics.value("memledger_store_up", &[]), 1.0);
    drop(memledger);
    assert!(doctor_of_ledger(&[&state]).contains(" events, written by nobody"));
}
