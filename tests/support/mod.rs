//! Shared by the tests: the binary as a process, its metrics, real cgroups with real processes, and waiting.
//!
//! No test sleeps: [`eventually`] waits for a condition with a deadline.

#![allow(dead_code)] // not every test module uses everything

pub mod cgroups;
pub mod cri;
pub mod docker;
pub mod engines;
pub mod grpc;
pub mod kube;
pub mod load;
pub mod metrics;
pub mod oom;
pub mod podman;
pub mod processes;
pub mod python;
pub mod recorded;
pub mod tmpfs;

use std::fs::File;
use std::io::Read;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub use metrics::Metrics;

/// Maximum wait for a condition. Generous, because the guest is slow.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Waits before the next attempt of a check that took so long: for three times as long, since a check of metrics costs this machine as
/// much as memledger, and the guest many times that.
fn pause_after(took: Duration) {
    std::thread::park_timeout((took * 3).clamp(Duration::from_millis(20), Duration::from_millis(200)));
}

/// Polls `check` until it succeeds; panics with `what` and the last error at the deadline.
pub fn eventually<T>(what: &str, mut check: impl FnMut() -> Result<T, String>) -> T {
    #[allow(clippy::disallowed_methods)]
    let began = Instant::now();
    loop {
        let attempted = began.elapsed();
        let error = match check() {
            Ok(value) => return value,
            Err(error) => error,
        };
        assert!(began.elapsed() < DEADLINE, "{what} did not happen within {DEADLINE:?}: {error}");
        pause_after(began.elapsed().saturating_sub(attempted));
    }
}

/// Like [`eventually`], for a boolean condition.
pub fn eventually_true(what: &str, mut check: impl FnMut() -> bool) {
    eventually(what, || check().then_some(()).ok_or_else(|| "not yet".to_owned()));
}

/// Polls a count until it is `target`. The deadline is for each change of it: how long all of them take is the machine's.
pub fn reaches<T: PartialEq + std::fmt::Debug>(what: &str, target: T, mut count: impl FnMut() -> T) {
    let mut last = count();
    while last != target {
        last = eventually(what, || {
            let now = count();
            if now == last { Err(format!("{last:?} instead of {target:?}")) } else { Ok(now) }
        });
    }
}

/// Polls a condition until the deadline and returns whether it became true. Never panics: for `drop`, also while a test fails.
pub fn holds_in_time(mut condition: impl FnMut() -> bool) -> bool {
    #[allow(clippy::disallowed_methods)]
    let began = Instant::now();
    loop {
        let attempted = began.elapsed();
        if condition() {
            return true;
        }
        if began.elapsed() >= DEADLINE {
            return false;
        }
        pause_after(began.elapsed().saturating_sub(attempted));
    }
}

/// Returns the processes with this path in their command line.
pub fn processes_naming(path: &Path) -> Vec<u32> {
    let path = path.display().to_string();
    let pids = std::fs::read_dir("/proc").expect("/proc").flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let names = |pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&path)
    };
    pids.filter(names).collect()
}

/// Ends a child with SIGTERM, so that it can clean up, and with SIGKILL after the deadline. True if SIGTERM was enough.
/// Never panics.
pub fn terminate(child: &mut Child) -> bool {
    if matches!(child.try_wait(), Ok(None)) {
        docker::signal("TERM", child.id());
    }
    let ended = holds_in_time(|| !matches!(child.try_wait(), Ok(None)));
    if !ended {
        let _ = child.kill();
        let _ = child.wait();
    }
    ended
}

/// A child process that is terminated when dropped, so that a test that fails leaves none behind.
pub struct OwnedChild(pub Child);

impl Drop for OwnedChild {
    fn drop(&mut self) {
        terminate(&mut self.0);
    }
}

/// Returns the binary under test: `MEMLEDGER_BIN` in the guest, else the one built by cargo.
pub fn binary() -> PathBuf {
    std::env::var_os("MEMLEDGER_BIN").map_or_else(|| env!("CARGO_BIN_EXE_memledger").into(), PathBuf::from)
}

/// Returns the id of this run of the tests: what they create has it in a label or in its name, so that `tests/leftovers.sh` takes nothing
/// of anybody else for theirs. Without `tests/run.sh` it is `local`.
pub fn test_run() -> String {
    std::env::var("MEMLEDGER_TEST_RUN").unwrap_or_else(|_| "local".to_owned())
}

/// Returns the label of what an engine creates in this run.
pub fn test_label() -> String {
    format!("memledger.test.run={}", test_run())
}

/// Returns true inside the cgroup v2 guest.
pub fn in_v2_guest() -> bool {
    std::env::var_os("MEMLEDGER_V2HOST").is_some()
}

/// Returns a port for a program that does not report its own. It is below the ports that the kernel assigns to those that request
/// any, and reserved until this process ends: tests and demos that run at the same time reserve by the same abstract socket.
pub fn free_port() -> u16 {
    let first = 10_000 + (std::process::id() % 20_000) as u16;
    let reserve = |port: &u16| {
        let name =
            std::os::unix::net::SocketAddr::from_abstract_name(format!("memledger-port-{port}")).ok()?;
        let reservation = UnixDatagram::bind_addr(&name).ok()?;
        TcpListener::bind(("127.0.0.1", *port)).ok().map(|_| (*port, reservation))
    };
    let (port, reservation) = (first..32_000).find_map(|port| reserve(&port)).expect("a free port");
    std::mem::forget(reservation);
    port
}

/// Variables with which a command reads the ledger alone: the kernel log and the containers of this host change with every test.
pub const LEDGER_ONLY: [(&str, &str); 4] = [
    ("MEMLEDGER_OOM_KERNEL_LOG", "off"),
    ("MEMLEDGER_DOCKER_SOCKET", ""),
    ("MEMLEDGER_PODMAN_SOCKET", ""),
    ("MEMLEDGER_CRI_ENDPOINT", ""),
];

/// Runs a verb on the ledger alone and returns exit code, standard output and standard error.
pub fn run_on_ledger(arguments: &[&str]) -> (Option<i32>, String, String) {
    run_with(arguments, &LEDGER_ONLY)
}

/// Runs `memledger` with arguments to its end and returns exit code, standard output and standard error.
pub fn run(arguments: &[&str]) -> (Option<i32>, String, String) {
    run_with(arguments, &[])
}

fn run_with(arguments: &[&str], variables: &[(&str, &str)]) -> (Option<i32>, String, String) {
    let mut command = Command::new(binary());
    command.args(arguments).env_remove("RUST_BACKTRACE").envs(variables.iter().copied());
    let output = command.output().expect("memledger runs");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// Returns the CPU time of a process's threads in nanoseconds: of the threads with this name, or of all.
pub fn cpu_nanos(pid: u32, name: Option<&str>) -> f64 {
    schedstat(pid, name, 0)
}

/// Returns the run delay of the threads with this name: the nanoseconds for which they were ready and waited for a CPU.
pub fn run_delay_nanos(pid: u32, name: &str) -> f64 {
    schedstat(pid, Some(name), 1)
}

fn schedstat(pid: u32, name: Option<&str>, field: usize) -> f64 {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("threads").flatten();
    let text = |task: &std::fs::DirEntry, file: &str| {
        std::fs::read_to_string(task.path().join(file)).unwrap_or_default()
    };
    tasks
        .filter(|task| name.is_none_or(|name| text(task, "comm").trim() == name))
        .filter_map(|task| text(&task, "schedstat").trim().split(' ').nth(field)?.parse::<f64>().ok())
        .sum()
}

/// A running `memledger serve` on a port of its own. Killed when dropped.
pub struct Memledger {
    child: Child,
    pub address: String,
    /// Its standard error. A file, and not a pipe with a reader: what was logged is there at once.
    log: File,
}

impl Memledger {
    /// Starts it with these flags and waits until it has a snapshot. By default it samples every 100 ms and keeps its
    /// ledger in memory.
    pub fn start(flags: &[&str]) -> Self {
        Self::start_through(&[], flags)
    }

    /// Like [`Memledger::start`], through a wrapper such as `unshare -m` that executes it.
    pub fn start_through(wrapper: &[&str], flags: &[&str]) -> Self {
        let this = Self::launch(wrapper, flags);
        eventually("the first snapshot", || match this.get("/-/ready").0 {
            200 => Ok(()),
            status => Err(format!("/-/ready responds {status}; log: {}", this.log())),
        });
        this
    }

    /// Starts it with these flags and waits only until it is listening.
    pub fn start_unready(flags: &[&str]) -> Self {
        Self::start_unready_through(&[], flags)
    }

    /// Like [`Memledger::start_unready`], through a wrapper.
    pub fn start_unready_through(wrapper: &[&str], flags: &[&str]) -> Self {
        Self::launch(wrapper, flags)
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
        if !flags.iter().any(|flag| flag.contains("web.enable-api")) {
            command.arg("--web.enable-api"); // clients of the tests have no password
        }
        if !flags.iter().any(|flag| flag.starts_with("--local.socket")) {
            command.arg("--local.socket="); // many run at once
        }
        if !flags.iter().any(|flag| flag.starts_with("--reporter.directory")) {
            command.arg("--reporter.directory="); // one directory has one memledger
        }
        if !flags.iter().any(|flag| flag.starts_with("--run.spool")) {
            command.arg("--run.spool="); // it would be made on this host
        }
        let log = tempfile::tempfile().expect("a log");
        command.args(flags).stdout(Stdio::null()).stderr(log.try_clone().expect("a log"));
        let child = command.spawn().expect("memledger starts");
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

    /// Returns its pid.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns its resident memory.
    pub fn resident_bytes(&self) -> u64 {
        self.status_bytes("VmRSS:")
    }

    /// Returns the peak of its resident memory.
    pub fn peak_bytes(&self) -> u64 {
        self.status_bytes("VmHWM:")
    }

    /// Returns its anonymous memory: without the pages of its program and libraries, which come when code first runs.
    pub fn anonymous_bytes(&self) -> u64 {
        self.status_bytes("RssAnon:")
    }

    /// Returns the resident pages of its program, libraries and other files.
    pub fn program_bytes(&self) -> u64 {
        self.status_bytes("RssFile:")
    }

    fn status_bytes(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("a line");
        let kib: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
        kib << 10
    }

    /// Returns its log so far.
    pub fn log(&self) -> String {
        let length = self.log.metadata().expect("a log").len();
        let mut text = vec![0; usize::try_from(length).expect("it fits")];
        self.log.read_exact_at(&mut text, 0).expect("a log"); // the offset is the writer's
        text.truncate(text.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1)); // whole lines
        String::from_utf8_lossy(&text).into_owned()
    }

    /// Sends a GET and returns status, headers and body.
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

    /// Sends a GET and returns status and body.
    pub fn get(&self, path: &str) -> (u16, String) {
        let (status, _, body) = self.get_with(path, &[]);
        (status, String::from_utf8(body).expect("text"))
    }

    /// Returns the current metrics.
    pub fn metrics(&self) -> Metrics {
        let (status, text) = self.get("/metrics");
        assert_eq!(status, 200, "{text}");
        Metrics::parse(&text)
    }

    /// Returns the metrics of a snapshot whose cycle began after this call.
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

    /// Polls the metrics until `check` succeeds, and returns its value.
    pub fn eventually<T>(&self, what: &str, mut check: impl FnMut(&Metrics) -> Result<T, String>) -> T {
        eventually(what, || check(&self.metrics()))
    }

    /// Returns the response of `/api/v1/containers`.
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

    /// Waits for its end and returns exit code and duration.
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

/// Prints why a test is skipped. Panics instead where tests must run: in CI, or with `MEMLEDGER_TESTS_REQUIRED`.
pub fn skip(reason: &str) {
    let must_run = ["CI", "MEMLEDGER_TESTS_REQUIRED"].iter().any(|name| std::env::var_os(name).is_some());
    assert!(!must_run, "this test must run here, but cannot: {reason}");
    eprintln!("SKIPPED: {reason}");
}

/// Compares with a file of the repository; with `UPDATE=1`, writes it.
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
            "{} differs at line {}:\n  expected: {}\n  actual:   {}\n`make golden` updates it; review the difference before committing",
            path.display(),
            at + 1,
            line(&expected),
            line(actual)
        );
    }
}
