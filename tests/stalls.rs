//! What is served while a disk or a kernel file hangs, by a FUSE file system that stops responding.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::ops::Deref;
use std::path::PathBuf;
use std::time::Duration;

use fake_nvml::{FakeNvml, State};
use memledger::ledger::store::Store;

use crate::otlp::Receiver;
use crate::support::cgroups::TestCgroup;
use crate::support::oom::Scene;
use crate::support::python::Python;
use crate::support::{DEADLINE, Memledger, Metrics, eventually, eventually_true};
use crate::web::exchange;

const ALONE: &[&str] =
    &["--docker.socket=", "--podman.socket=", "--container.include=^none$", "--oom.kernel-log=off"];

/// A folder, and where memledger sees it through FUSE.
struct Passthrough {
    root: tempfile::TempDir,
}

impl Passthrough {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("folder")).unwrap();
        std::fs::create_dir(root.path().join("mount")).unwrap();
        Self { root }
    }

    fn path(&self, name: &str) -> String {
        self.root.path().join(name).display().to_string()
    }

    fn start(&self, flags: &[&str]) -> BehindPassthrough {
        self.start_with(Memledger::start_through, flags)
    }

    /// Starts memledger with one of its functions that take a wrapper.
    fn start_with(&self, start: fn(&[&str], &[&str]) -> Memledger, flags: &[&str]) -> BehindPassthrough {
        let wrapper = self.wrapper();
        let wrapper: Vec<_> = wrapper.iter().map(String::as_str).collect();
        let server = self.server_end();
        BehindPassthrough { _server: server, memledger: start(&wrapper, &[ALONE, flags].concat()) }
    }

    /// Returns the command that starts a program behind it.
    fn wrapper(&self) -> [String; 3] {
        let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/support/passthrough.py");
        ["python3".to_owned(), script.display().to_string(), self.root.path().display().to_string()]
    }

    fn server_end(&self) -> ServerEnd {
        ServerEnd(self.root.path().join("end"))
    }

    /// From now on requests for files whose path contains this get no response.
    fn hang(&self, pattern: &str) {
        std::fs::write(self.path("new"), pattern).unwrap();
        std::fs::rename(self.path("new"), self.path("hang")).unwrap();
    }

    /// Responds for all files again.
    fn resume(&self) {
        std::fs::remove_file(self.path("hang")).unwrap();
    }
}

/// A memledger that sees the folder through FUSE. Dropped in this order: a process that is killed still waits for the file
/// system.
struct BehindPassthrough {
    _server: ServerEnd,
    memledger: Memledger,
}

impl Deref for BehindPassthrough {
    type Target = Memledger;

    fn deref(&self) -> &Memledger {
        &self.memledger
    }
}

/// Ends the file system when dropped.
struct ServerEnd(PathBuf);

impl Drop for ServerEnd {
    fn drop(&mut self) {
        let _ = std::fs::write(&self.0, "");
    }
}

fn request(memledger: &Memledger, path: &str) -> Result<u16, String> {
    let stream = TcpStream::connect(&memledger.address).map_err(|error| error.to_string())?;
    stream.set_read_timeout(Some(DEADLINE)).map_err(|error| error.to_string())?;
    exchange(stream, &format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n")).map(|(status, _)| status)
}

#[test]
fn metrics_and_health_are_served_while_state_disk_hangs() {
    let Some(receiver) = Receiver::start() else { return };
    let passthrough = Passthrough::new();
    let state = format!("--state.path={}/state", passthrough.path("mount"));
    let otlp = receiver.flags(false);
    let flags: Vec<_> = otlp.iter().chain([&state]).map(String::as_str).collect();
    let memledger = passthrough.start(&flags);
    memledger.eventually("the ledger", |metrics| match metrics.try_value("memledger_store_up", &[])? {
        1.0 => Ok(()),
        other => Err(other.to_string()),
    });
    assert_eq!(request(&memledger, "/api/v1/events"), Ok(200));
    // a page fault on a file of a disk that hangs may hold the lock of the whole address space: all threads would wait for it
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", memledger.pid())).unwrap();
    assert!(!maps.contains("/state/"), "a file of the state directory is mapped: {maps}");
    passthrough.hang("state");
    // as many as one client gets, and more; they wait for the disk
    let mut waiting = Vec::new();
    for _ in 0..40 {
        let mut stream = TcpStream::connect(&memledger.address).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        write!(stream, "GET /api/v1/events HTTP/1.0\r\nHost: localhost\r\n\r\n").unwrap();
        waiting.push(stream);
    }
    eventually("the API has no permit left", || match request(&memledger, "/api/v1/events")? {
        503 => Ok(()),
        status => Err(status.to_string()),
    });
    for _ in 0..20 {
        for path in ["/metrics", "/", "/-/healthy", "/-/ready"] {
            assert_eq!(request(&memledger, path), Ok(200), "{path}");
        }
    }
    memledger.fresh_metrics(); // sampling goes on
    let sent = |metrics: &Metrics| metrics.try_value("memledger_otlp_sent_total", &[("signal", "metrics")]);
    let before = sent(&memledger.metrics()).unwrap();
    memledger.eventually("exports go on", |metrics| match sent(metrics)? {
        now if now > before => Ok(()),
        now => Err(now.to_string()),
    });
    let responses: Vec<_> =
        waiting.into_iter().map(|stream| exchange(stream, "").map(|(status, _)| status)).collect();
    assert!(
        responses.iter().all(|response| *response == Ok(503)),
        "each has a response in time: {responses:?}"
    );
    // a kill has to be written, which hangs too, and then nothing is counted
    let cgroup = TestCgroup::container();
    cgroup.limit(32 << 20);
    let mut victim = Python::start(&cgroup, "print('ready'); input(); block = b'x' * (256 << 20)");
    victim.line();
    victim.go();
    eventually_true("the kill", || victim.has_ended());
    memledger.eventually("the sources are down", |metrics| {
        let up = metrics.all("memledger_oom_source_up", &[]);
        match (metrics.try_value("memledger_store_up", &[])?, up.iter().all(|(_, _, value)| *value == 0.0)) {
            (0.0, true) if !up.is_empty() => Ok(()),
            (store, _) => Err(format!("{store} {up:?}")),
        }
    });
    assert_eq!(request(&memledger, "/metrics"), Ok(200));
}

#[test]
fn health_and_self_metrics_are_served_while_ledger_opens_on_hanging_disk() {
    let passthrough = Passthrough::new();
    passthrough.hang("state");
    let state = format!("--state.path={}/state", passthrough.path("mount"));
    let memledger = passthrough.start_with(Memledger::start_unready_through, &[&state]);
    assert_eq!(request(&memledger, "/-/healthy"), Ok(200));
    assert_eq!(request(&memledger, "/-/ready"), Ok(503), "there is no snapshot");
    assert_eq!(request(&memledger, "/api/v1/events"), Ok(503), "there is no ledger");
    eventually("memledger's own metrics", || match request(&memledger, "/metrics")? {
        200 => Ok(()),
        status => Err(status.to_string()),
    });
    let metrics = memledger.metrics();
    assert!(metrics.value("process_resident_memory_bytes", &[]) > 0.0);
    assert!(metrics.value("memledger_snapshot_timestamp_seconds", &[]) > 0.0, "that of the start");
    assert_eq!(metrics.get("memledger_host_oom_kills_total", &[]), None, "absent is not zero");
    assert!(memledger.log().contains("opening the ledger takes long"), "{}", memledger.log());
    assert_eq!(request(&memledger, "/-/healthy"), Ok(200));
}

#[test]
fn all_routes_are_served_once_the_ledger_is_open() {
    let dir = tempfile::tempdir().unwrap();
    let other = Store::open(dir.path(), Duration::ZERO).expect("a store");
    let state = format!("--state.path={}", dir.path().display());
    let memledger = Memledger::start_unready(&[ALONE, &[&state]].concat());
    let mut kept = TcpStream::connect(&memledger.address).unwrap();
    kept.set_read_timeout(Some(DEADLINE)).unwrap();
    let head = "GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let status = |stream: &mut TcpStream| {
        stream.write_all(head.as_bytes()).unwrap();
        read_head(stream)
    };
    assert!(status(&mut kept).starts_with("HTTP/1.1 503"), "another process has the ledger");
    assert_eq!(request(&memledger, "/-/healthy"), Ok(200));
    drop(other);
    eventually("the ledger", || match request(&memledger, "/api/v1/events")? {
        200 => Ok(()),
        status => Err(status.to_string()),
    });
    assert!(status(&mut kept).starts_with("HTTP/1.1 200"), "also on a connection from before");
}

/// Reads a response with a short body, and returns its text.
fn read_head(stream: &mut TcpStream) -> String {
    let (mut text, mut piece) = (String::new(), [0; 4096]);
    while !text.split_once("\r\n\r\n").is_some_and(|(_, body)| body.ends_with('\n')) {
        let length = stream.read(&mut piece).expect("a response");
        assert!(length > 0, "closed after {text:?}");
        text.push_str(&String::from_utf8_lossy(&piece[..length]));
    }
    text
}

#[test]
fn runs_of_restart_loop_during_blocked_sync_keep_their_own_kills() {
    let Some(scene) = Scene::new("blocked") else { return };
    let passthrough = Passthrough::new();
    let (wrapper, state) =
        (passthrough.wrapper(), format!("--state.path={}/state", passthrough.path("mount")));
    let include = format!("--container.include=^{}", scene.name);
    let ledger = scene.start_memledger_through(
        &wrapper.each_ref().map(String::as_str),
        &[&state, &include, "--sample.interval=1s"],
    );
    let _server = passthrough.server_end(); // dropped first
    let first = scene.run("first", &[], &["eat"]);
    ledger.settles(&first.name, 1, 0);
    passthrough.hang("state");
    // its first event cannot be written, so those of all its runs are read at once, later
    let restarts = 6;
    let container = scene.run("it", &[&format!("--restart=on-failure:{restarts}")], &["eat"]);
    scene.wait_for_kills(1 + restarts + 1);
    eventually("its last exit", || match container.inspect("{{.State.Running}} {{.RestartCount}}") {
        state if state == format!("false {restarts}") => Ok(()),
        state => Err(state),
    });
    passthrough.resume();
    ledger.settles(&container.name, restarts + 1, 0);
    ledger.ends(&container.name, "oom_container", restarts + 1);
    let kills = ledger.container_kills(&scene);
    let mut starts: Vec<_> = kills.iter().map(|kill| kill["started"].to_string()).collect();
    starts.dedup();
    assert_eq!(starts.len(), 1 + restarts + 1, "each is of its own run: {kills:?}");
}

/// Returns a folder with the files of /proc that every cycle reads.
fn proc_behind_passthrough() -> Passthrough {
    let passthrough = Passthrough::new();
    for name in ["meminfo", "vmstat", "stat", "uptime"] {
        std::fs::copy(format!("/proc/{name}"), passthrough.root.path().join("folder").join(name)).unwrap();
    }
    passthrough
}

#[test]
fn stalled_first_cycle_leaves_ledger_and_self_metrics() {
    let passthrough = proc_behind_passthrough();
    passthrough.hang("meminfo");
    let proc = format!("--path.procfs={}", passthrough.path("mount"));
    let memledger = passthrough.start_with(Memledger::start_unready_through, &[&proc]);
    assert_eq!(request(&memledger, "/metrics"), Ok(503), "the first cycle is not late yet");
    eventually("the stalled cycle", || match request(&memledger, "/metrics")? {
        200 => Ok(()),
        status => Err(status.to_string()),
    });
    let metrics = memledger.metrics();
    assert!(metrics.get("memledger_host_oom_kills_total", &[]).is_some());
    assert!(metrics.value("process_resident_memory_bytes", &[]) > 0.0);
    let stamp = metrics.value("memledger_snapshot_timestamp_seconds", &[]);
    assert!(metrics.value("process_start_time_seconds", &[]) - 1.0 < stamp, "that of the start");
    assert_eq!(metrics.get("memledger_host_memory_total_bytes", &[]), None);
    assert_eq!(request(&memledger, "/-/ready"), Ok(503), "sampling hangs");
    assert_eq!(memledger.metrics().value("memledger_snapshot_timestamp_seconds", &[]), stamp);
}

#[test]
fn stalled_cycle_leaves_ledger_gpu_and_self_metrics() {
    let passthrough = proc_behind_passthrough();
    let driver = tempfile::tempdir().unwrap();
    let fake = FakeNvml::install(driver.path(), &State::with_gpus(1)).expect("the fake library is installed");
    let library = format!("--gpu.nvml-library={}", fake.path().display());
    let proc = format!("--path.procfs={}", passthrough.path("mount"));
    let memledger = passthrough.start(&[&library, &proc]);
    let stamp = "memledger_snapshot_timestamp_seconds";
    memledger.eventually("all of them", |metrics| {
        metrics.try_value("memledger_gpu_memory_total_bytes", &[])?;
        metrics.try_value("memledger_host_memory_total_bytes", &[])
    });
    let before = memledger.metrics();
    passthrough.hang("meminfo");
    let stalled = memledger.eventually("the stalled cycle", |metrics| {
        match metrics.get("memledger_host_memory_total_bytes", &[]) {
            None => Ok(metrics.value(stamp, &[])),
            Some(_) => Err("stale families are still there".to_owned()),
        }
    });
    let metrics = memledger.metrics();
    assert_eq!(metrics.value(stamp, &[]), stalled, "it stands still");
    assert!(stalled >= before.value(stamp, &[]));
    assert_eq!(metrics.get("memledger_collector_success", &[("collector", "host")]), None);
    assert!(metrics.value("memledger_gpu_memory_total_bytes", &[]) > 0.0);
    assert!(metrics.value("process_resident_memory_bytes", &[]) > 0.0);
    assert_eq!(metrics.value("memledger_collector_success", &[("collector", "gpu")]), 1.0);
    for source in ["ledger", "gpu"] {
        let at =
            |metrics: &Metrics| metrics.value("memledger_source_timestamp_seconds", &[("source", source)]);
        let first = at(&metrics);
        assert!(first > stalled, "{source} is newer than the last cycle");
        memledger.eventually("a newer time", |metrics| match at(metrics) {
            now if now > first => Ok(()),
            now => Err(now.to_string()),
        });
    }
    assert_eq!(request(&memledger, "/-/ready"), Ok(503), "sampling hangs");
    assert_eq!(request(&memledger, "/-/healthy"), Ok(200));
    // the ledger goes on counting
    let kills = metrics.value("memledger_host_oom_kills_total", &[]);
    let vmstat = passthrough.root.path().join("folder/vmstat");
    let text = std::fs::read_to_string(&vmstat).unwrap();
    let count = |line: &str| line.strip_prefix("oom_kill ").map(|count| count.parse::<u64>().unwrap());
    let lines = text.lines().map(|line| match count(line) {
        Some(count) => format!("oom_kill {}\n", count + 1),
        None => format!("{line}\n"),
    });
    std::fs::write(&vmstat, lines.collect::<String>()).unwrap();
    memledger.eventually("the kill", |metrics| match metrics.value("memledger_host_oom_kills_total", &[]) {
        now if now == kills + 1.0 => Ok(()),
        now => Err(format!("{now}, before {kills}")),
    });
    assert_eq!(memledger.metrics().value(stamp, &[]), stalled);
}
