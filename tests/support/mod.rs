//! What the tests share: the binary as a process, its metrics, real cgroups with real processes, and waiting.
//!
//! Nothing sleeps for a guessed time: [`eventually`] waits for a condition with a deadline.

#![allow(dead_code)] // not every concern uses everything

pub mod cgroups;
pub mod cri;
pub mod docker;
pub mod grpc;
pub mod load;
pub mod metrics;
pub mod oom;
pub mod python;
pub mod recorded;

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub use metrics::Metrics;

/// Longest wait for a condition. Generous, because the guest is slow; a condition that holds ends the wait.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Asks again and again until `look` answers; fails with `what` and the last complaint at the deadline.
pub fn eventually<T>(what: &str, mut look: impl FnMut() -> Result<T, String>) -> T {
    #[allow(clippy::disallowed_methods)]
    let began = Instant::now();
    loop {
        let complaint = match look() {
            Ok(value) => return value,
            Err(complaint) => complaint,
        };
        assert!(began.elapsed() < DEADLINE, "{what} did not happen within {DEADLINE:?}: {complaint}");
        std::thread::park_timeout(Duration::from_millis(20)); // poll
    }
}

/// As [`eventually`], for a condition.
pub fn eventually_true(what: &str, mut look: impl FnMut() -> bool) {
    eventually(what, || look().then_some(()).ok_or_else(|| "not yet".to_owned()));
}

/// The binary under test: `MEMLEDGER_BIN` in the guest, else the one that cargo built.
pub fn binary() -> PathBuf {
    std::env::var_os("MEMLEDGER_BIN").map_or_else(|| env!("CARGO_BIN_EXE_memledger").into(), PathBuf::from)
}

/// True inside the cgroup v2 guest.
pub fn in_v2_guest() -> bool {
    std::env::var_os("MEMLEDGER_V2HOST").is_some()
}

/// `memledger` with arguments, run to its end: exit code, standard output and standard error.
pub fn run(arguments: &[&str]) -> (Option<i32>, String, String) {
    let output =
        Command::new(binary()).args(arguments).env_remove("RUST_BACKTRACE").output().expect("memledger runs");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// Processor time of a process's threads so far, in nanoseconds: of those of this name, or of all.
pub fn processor_nanos(pid: u32, name: Option<&str>) -> f64 {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("threads").flatten();
    let text = |task: &std::fs::DirEntry, file: &str| {
        std::fs::read_to_string(task.path().join(file)).unwrap_or_default()
    };
    tasks
        .filter(|task| name.is_none_or(|name| text(task, "comm").trim() == name))
        .filter_map(|task| text(&task, "schedstat").split(' ').next()?.parse::<f64>().ok())
        .sum()
}

/// A running `memledger serve` on a port of its own. Killed when dropped.
pub struct Memledger {
    child: Child,
    pub address: String,
    log: Arc<Mutex<String>>,
}

impl Memledger {
    /// Starts it with these flags and waits until it has a snapshot. It samples every 100 ms, and
    /// keeps its ledger in memory, unless told otherwise.
    pub fn start(flags: &[&str]) -> Self {
        Self::start_through(&[], flags)
    }

    /// As [`Memledger::start`], by a command that becomes it: `unshare -m`, say.
    pub fn start_through(wrapper: &[&str], flags: &[&str]) -> Self {
        let this = Self::launch(wrapper, flags);
        eventually("the first snapshot", || match this.get("/-/ready").0 {
            200 => Ok(()),
            status => Err(format!("/-/ready answers {status}; log: {}", this.log())),
        });
        this
    }

    /// Starts it with these flags and waits only until it listens.
    pub fn start_unready(flags: &[&str]) -> Self {
        Self::launch(&[], flags)
    }

    fn launch(wrapper: &[&str], flags: &[&str]) -> Self {
        let mut words: Vec<_> = wrapper.iter().map(PathBuf::from).collect();
        words.push(binary());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command.arg("serve").args(["--web.listen-address=127.0.0.1:0"]);
        if !flags.iter().any(|flag| flag.starts_with("--sample.interval")) {
            command.arg("--sample.interval=100ms");
        }
        if !flags.iter().any(|flag| flag.starts_with("--state.path")) {
            command.arg("--state.path="); // the ledger in memory: many run at once
        }
        if !flags.iter().any(|flag| flag.starts_with("--cri.endpoint")) {
            command.arg("--cri.endpoint="); // not the pods of the machine that runs the test
        }
        command.args(flags).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("memledger starts");
        let stderr = child.stderr.take().expect("piped");
        let log = Arc::new(Mutex::new(String::new()));
        let theirs = Arc::clone(&log);
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let mut log = theirs.lock().expect("no holder panics");
                log.push_str(&line);
                log.push('\n');
            }
        });
        let mut this = Self { child, address: String::new(), log };
        this.address = eventually("listening", || {
            let log = this.log();
            let address = log
                .lines()
                .find_map(|line| line.split_once("message=listening address=").map(|(_, a)| a.to_owned()));
            address.ok_or(log)
        });
        this
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The memory that it holds now.
    pub fn resident_bytes(&self) -> u64 {
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", self.pid())).expect("it runs");
        let pages: u64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("statm");
        pages * rustix::param::page_size() as u64
    }

    /// Everything it has logged.
    pub fn log(&self) -> String {
        self.log.lock().expect("no holder panics").clone()
    }

    /// Status, headers and body of a GET.
    pub fn get_with(&self, path: &str, headers: &[(&str, &str)]) -> (u16, ureq::http::HeaderMap, Vec<u8>) {
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(DEADLINE))
            .build()
            .into();
        let mut request = agent.get(format!("http://{}{path}", self.address));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut response =
            request.call().unwrap_or_else(|error| panic!("GET {path}: {error}; log: {}", self.log()));
        let status = response.status().as_u16();
        let headers = response.headers().clone();
        let mut body = Vec::new();
        response.body_mut().as_reader().read_to_end(&mut body).expect("a body");
        (status, headers, body)
    }

    /// Status and body of a GET.
    pub fn get(&self, path: &str) -> (u16, String) {
        let (status, _, body) = self.get_with(path, &[]);
        (status, String::from_utf8(body).expect("text"))
    }

    /// The metrics now.
    pub fn metrics(&self) -> Metrics {
        let (status, text) = self.get("/metrics");
        assert_eq!(status, 200, "{text}");
        Metrics::parse(&text)
    }

    /// The metrics of a snapshot whose cycle began after this call.
    pub fn fresh_metrics(&self) -> Metrics {
        let stamp = |metrics: &Metrics| metrics.value("memledger_snapshot_timestamp_seconds", &[]);
        let mut last = stamp(&self.metrics());
        let mut newer = 0;
        eventually("two newer snapshots", || {
            let metrics = self.metrics();
            if stamp(&metrics) != last {
                last = stamp(&metrics);
                newer += 1;
            }
            if newer >= 2 { Ok(metrics) } else { Err(format!("{newer} newer ones")) }
        })
    }

    /// Waits until a snapshot satisfies `look`; returns what it answers.
    pub fn eventually<T>(&self, what: &str, mut look: impl FnMut(&Metrics) -> Result<T, String>) -> T {
        eventually(what, || look(&self.metrics()))
    }

    /// `/api/v1/containers`.
    pub fn api(&self) -> serde_json::Value {
        let (status, text) = self.get("/api/v1/containers");
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).expect("JSON")
    }

    /// Sends a signal by name, such as `TERM`.
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args([&format!("-{name}"), &self.pid().to_string()]).status();
        assert!(status.expect("kill runs").success());
    }

    /// Waits for its end: exit code, and how long it took.
    pub fn wait(mut self) -> (Option<i32>, Duration) {
        #[allow(clippy::disallowed_methods)]
        let began = Instant::now();
        let status = eventually("the end of memledger", || {
            self.child.try_wait().expect("wait").ok_or_else(|| "still running".to_owned())
        });
        (status.code(), began.elapsed())
    }
}

impl Drop for Memledger {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Prints why a test does not run here. Fails instead where tests must run: in CI, or when asked.
pub fn skip(reason: &str) {
    let must_run = ["CI", "MEMLEDGER_TESTS_REQUIRED"].iter().any(|name| std::env::var_os(name).is_some());
    assert!(!must_run, "this test must run here, and cannot: {reason}");
    eprintln!("SKIPPED: {reason}");
}

/// Compares with a file of the repository; `UPDATE=1` writes it.
pub fn golden(path: &str, actual: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    if std::env::var_os("UPDATE").is_some() {
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("folder");
        std::fs::write(&path, actual).expect("golden file is written");
        return;
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    if expected != actual {
        let at = std::iter::zip(expected.lines(), actual.lines()).position(|(a, b)| a != b);
        let at = at.unwrap_or_else(|| expected.lines().count().min(actual.lines().count()));
        let line = |text: &str| text.lines().nth(at).unwrap_or("(nothing)").to_owned();
        panic!(
            "{} differs at line {}:\n  expected: {}\n  actual:   {}\n`make golden` writes it anew; read the difference before you commit it",
            path.display(),
            at + 1,
            line(&expected),
            line(actual)
        );
    }
}
