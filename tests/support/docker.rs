//! A real Docker engine: the shared one, or a private one that a test may stop; and sockets of fake daemons.

use std::collections::HashSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use super::engines::Programs;
use super::metrics::Labels;
use super::{Memledger, Metrics, eventually};

/// Returns a container name that is unique over all test runs and not a prefix of another.
pub fn unique(what: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    format!("mlt-{}-{}-{what}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Returns the image of all containers; `tests/setup/image.sh` builds it.
fn image() -> String {
    std::env::var("MEMLEDGER_TEST_IMAGE").unwrap_or_else(|_| "memledger-test:1".to_owned())
}

/// A Docker engine, used through its command line client.
#[derive(Clone)]
pub struct Engine {
    pub socket: PathBuf,
    pub image: String,
}

impl Engine {
    /// Returns the engine that all tests share, which no test may stop; skips the test with `None` if there is none.
    pub fn shared() -> Option<Self> {
        let engine = Self { socket: "/var/run/docker.sock".into(), image: image() };
        match engine.try_docker(&["image", "inspect", "-f", "{{.Id}}", &engine.image]) {
            Ok(_) => Some(engine),
            Err(error) => {
                super::skip(&format!("no Docker engine with {}: {error}", engine.image));
                None
            }
        }
    }

    /// Runs the client and returns its standard output without the last line feed. What it creates has the label of this run.
    pub fn try_docker(&self, arguments: &[&str]) -> Result<String, String> {
        let host = format!("unix://{}", self.socket.display());
        let (verb, rest) = arguments.split_at(match arguments {
            ["run" | "create" | "build", ..] => 1,
            ["volume" | "container" | "image" | "network", "run" | "create" | "build", ..] => 2,
            _ => 0,
        });
        let label = ["--label".to_owned(), super::test_label()];
        let output = Command::new("docker")
            .args(["-H", &host])
            .args(verb)
            .args(label.iter().filter(|_| !verb.is_empty()))
            .args(rest)
            .stdin(Stdio::null())
            .output()
            .map_err(|error| format!("docker: {error}"))?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
    }

    /// Like [`Engine::try_docker`]; panics on failure.
    pub fn docker(&self, arguments: &[&str]) -> String {
        self.try_docker(arguments).unwrap_or_else(|error| panic!("docker {arguments:?}: {error}"))
    }

    /// Starts a container in the background: `docker run -d --name NAME --network none FLAGS IMAGE COMMAND`.
    pub fn run(&self, name: &str, flags: &[&str], command: &[&str]) -> Container {
        self.make(&["run", "-d"], name, flags, command)
    }

    /// Like [`Engine::run`], without starting it.
    pub fn create(&self, name: &str, flags: &[&str], command: &[&str]) -> Container {
        self.make(&["create"], name, flags, command)
    }

    fn make(&self, verb: &[&str], name: &str, flags: &[&str], command: &[&str]) -> Container {
        let mut container = Container { engine: self.clone(), name: name.to_owned(), id: String::new() };
        let fixed = ["--name", name, "--network", "none"];
        container.id = self.docker(&[verb, &fixed, flags, &[self.image.as_str()], command].concat());
        assert_eq!(container.id.len(), 64, "an id: {}", container.id);
        container
    }

    /// Starts a container that runs `program` with the host's Python, and waits until it prints `ready`.
    pub fn run_python(&self, name: &str, flags: &[&str], program: &str) -> Container {
        self.run_python_with(name, flags, program, &[])
    }

    /// The same, with arguments.
    pub fn run_python_with(
        &self,
        name: &str,
        flags: &[&str],
        program: &str,
        arguments: &[&str],
    ) -> Container {
        let flags = [flags, &["-v", "/usr:/usr:ro"]].concat();
        let command = [&["/usr/bin/python3", "-u", "-c", program], arguments].concat();
        let container = self.run(name, &flags, &command);
        eventually("ready", || match container.try_docker(&["logs"]) {
            Ok(log) if log.lines().any(|line| line == "ready") => Ok(()),
            other => Err(format!("{other:?}")),
        });
        container
    }

    /// Returns the flag that makes memledger use this socket.
    pub fn flag(&self) -> String {
        format!("--docker.socket={}", self.socket.display())
    }
}

/// A container; drop removes it by force.
#[must_use = "it is removed when it is dropped"]
pub struct Container {
    engine: Engine,
    pub name: String,
    pub id: String,
}

impl Container {
    /// Runs `docker VERB... ID`; the id survives a rename.
    pub fn try_docker(&self, verb: &[&str]) -> Result<String, String> {
        self.engine.try_docker(&[verb, &[self.id.as_str()]].concat())
    }

    /// Like [`Container::try_docker`]; panics on failure.
    pub fn docker(&self, verb: &[&str]) -> String {
        self.engine.docker(&[verb, &[self.id.as_str()]].concat())
    }

    /// Returns a value of `docker inspect`.
    pub fn inspect(&self, template: &str) -> String {
        self.docker(&["inspect", "-f", template])
    }

    /// Returns the start time of its current run.
    pub fn started(&self) -> jiff::Timestamp {
        self.inspect("{{.State.StartedAt}}").parse().expect("a time")
    }

    /// Returns an error until memledger has the response to its inspect request: on a busy machine a container is shown before, by the
    /// list or an event.
    pub fn is_inspected(&self, metrics: &Metrics) -> Result<(), String> {
        let of = [("container_name", self.name.as_str())];
        let shown = metrics.try_value("memledger_container_start_time_seconds", &of)?;
        let started = self.started().as_nanosecond() as f64 / 1e9;
        if (shown - started).abs() < 1e-5 { Ok(()) } else { Err(format!("begun at {shown}, not {started}")) }
    }

    /// Returns the host pid of its first process.
    pub fn pid(&self) -> u32 {
        self.inspect("{{.State.Pid}}").parse().expect("a pid")
    }

    /// Returns the sorted host pids of its processes, from `docker top`.
    pub fn pids(&self) -> Vec<u32> {
        let text = self.engine.docker(&["top", &self.id, "-o", "pid"]);
        let mut pids: Vec<u32> = text.lines().filter_map(|line| line.trim().parse().ok()).collect();
        pids.sort_unstable();
        pids
    }

    pub fn short_id(&self) -> &str {
        &self.id[..12]
    }

    /// Returns its memory cgroup; the shared engine uses the cgroupfs driver.
    pub fn cgroup(&self) -> PathBuf {
        let path = super::cgroups::root().join("docker").join(&self.id);
        assert!(path.is_dir(), "{}", path.display());
        path
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        // by name: an unfinished `docker run` leaves the name and no id
        let this = if self.id.is_empty() { &self.name } else { &self.id };
        let _ = self.engine.try_docker(&["rm", "-f", "-v", this]);
    }
}

/// A dockerd for one test, by default Debian's, with `live-restore`: its containers keep running when it is stopped.
pub struct PrivateEngine {
    folder: tempfile::TempDir,
    pub engine: Engine,
    programs: Programs,
    live_restore: bool,
    child: Option<Child>,
    /// Whether its containerd is a service beside it, which outlives it; else it starts one of its own.
    has_service: bool,
    containerd: Option<Child>,
}

impl PrivateEngine {
    /// Prepares an engine that is not running yet; its socket does not exist.
    pub fn new() -> Self {
        Self::of(Programs::installed())
    }

    /// As [`PrivateEngine::new`], with these programs.
    pub fn of(programs: Programs) -> Self {
        let folder = tempfile::Builder::new().prefix("mlt-engine-").tempdir().expect("a folder");
        let engine = Engine { socket: folder.path().join("docker.sock"), image: image() };
        Self {
            folder,
            engine,
            programs,
            live_restore: true,
            child: None,
            has_service: false,
            containerd: None,
        }
    }

    /// As [`PrivateEngine::new`], as on a host with systemd by default: it ends its containers, and its containerd is a service.
    pub fn without_live_restore() -> Self {
        Self::beside_containerd(Programs::installed(), false)
    }

    /// As [`PrivateEngine::of`], with a containerd that is a service, and is running at once.
    pub fn beside_containerd(programs: Programs, live_restore: bool) -> Self {
        let mut engine = Self::of(programs);
        (engine.has_service, engine.live_restore) = (true, live_restore);
        let path = |name: &str| engine.path(name).display().to_string();
        // containerd 2 has split its CRI plugin, which would look for networks
        let config = format!(
            "version = 2\nroot = {:?}\nstate = {:?}\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\", \"io.containerd.cri.v1.runtime\", \
             \"io.containerd.cri.v1.images\", \"io.containerd.nri.v1.nri\"]\n[grpc]\naddress = {:?}\n",
            path("containerd-root"),
            path("containerd-state"),
            path("containerd.sock")
        );
        std::fs::write(engine.path("containerd.toml"), config).expect("a file");
        engine.start_containerd();
        engine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts the containerd that is a service, and waits until it responds: between its calls of bind and listen it refuses, and the newest
    /// dockerd, which waits for a missing socket, ends then. One that runs connects to it again by itself.
    pub fn start_containerd(&mut self) {
        self.spawn_containerd();
        let log = self.path("containerd.log");
        eventually("containerd to respond", || {
            assert_runs(self.containerd.as_mut(), &log);
            self.query_containerd()
        });
    }

    /// Returns an error until containerd responds to its client.
    fn query_containerd(&self) -> Result<(), String> {
        let mut command = self.programs.command("ctr");
        let output = command.arg("--address").arg(self.path("containerd.sock")).arg("version").output();
        let output = output.map_err(|error| format!("ctr: {error}"))?;
        if output.status.success() {
            Ok(())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).into_owned())
        }
    }

    fn spawn_containerd(&mut self) {
        assert!(self.has_service && self.containerd.is_none(), "one that is a service and was stopped");
        let log = self.open_log("containerd.log");
        let mut command = self.programs.command("containerd");
        command.arg("--config").arg(self.path("containerd.toml")).stdin(Stdio::null()).stderr(log);
        self.containerd = Some(command.spawn().expect("containerd starts"));
    }

    /// Stops the containerd that is a service, with SIGTERM. Its containers keep running.
    pub fn stop_containerd(&mut self) {
        let mut child = self.containerd.take().expect("it runs");
        assert!(super::terminate(&mut child), "containerd does not end on SIGTERM");
    }

    /// Kills the containerd that is a service.
    pub fn crash_containerd(&mut self) {
        let mut child = self.containerd.take().expect("it runs");
        child.kill().and_then(|()| child.wait()).expect("containerd is killed");
    }

    fn open_log(&self, name: &str) -> std::fs::File {
        std::fs::File::options().create(true).append(true).open(self.path(name)).expect("a log")
    }

    /// Starts it and waits until it responds: for as long as it runs and logs its progress.
    pub fn start(&mut self) {
        self.spawn();
        let log = self.path("dockerd.log");
        let logged = || std::fs::metadata(&log).map_or(0, |log| log.len());
        let (mut length, mut version) = (logged(), None);
        while version.is_none() {
            version = eventually("dockerd to respond", || match self.server_version() {
                Ok(version) => Ok(Some(version)),
                Err(_) if logged() > length => Ok(None),
                Err(error) => {
                    assert_runs(self.child.as_mut(), &log);
                    Err(error)
                }
            });
            length = logged();
        }
    }

    /// Starts it without waiting: after a crash it listens at once, and responds when it has ended its containers.
    pub fn start_unready(&mut self) {
        self.spawn();
    }

    /// Returns the version of the daemon.
    pub fn server_version(&self) -> Result<String, String> {
        self.engine
            .try_docker(&["version", "-f", "{{.Server.Version}}"])
            .map_err(|error| format!("{error}; {}", end_of_log(&self.path("dockerd.log"))))
    }

    fn spawn(&mut self) {
        // instead of the machine's own
        std::fs::write(self.path("daemon.json"), self.programs.daemon_json()).expect("a file");
        let log = self.open_log("dockerd.log");
        let option = |name: &str, file: &str| format!("--{name}={}", self.path(file).display());
        // in a network namespace of its own: without a bridge, it deletes the docker0 of the machine's engine
        let mut command = self.programs.command("unshare");
        command
            .arg("--net")
            .arg(self.programs.path("dockerd"))
            .args([option("data-root", "data"), option("exec-root", "exec"), option("pidfile", "pid")])
            .arg(option("config-file", "daemon.json"))
            .arg(format!("--host=unix://{}", self.engine.socket.display()))
            .args(self.has_service.then(|| option("containerd", "containerd.sock")))
            .args(self.live_restore.then_some("--live-restore"))
            .args(["--bridge=none", "--iptables=false", "--ip6tables=false"])
            .args(["--ip-forward=false", "--ip-masq=false"])
            .env_remove("DOCKER_HOST")
            .stdin(Stdio::null())
            .stderr(log.try_clone().expect("a log"))
            .stdout(log);
        self.child = Some(command.spawn().expect("dockerd starts"));
    }

    /// Loads the image of another engine.
    pub fn load_from(&self, other: &Engine) {
        let tar = self.path("image.tar");
        let tar = tar.to_str().expect("text");
        other.docker(&["save", "-o", tar, &other.image]);
        self.engine.docker(&["load", "-i", tar]);
    }

    /// Runs Compose in the folder of a `compose.yaml` and returns its standard output; panics on failure. Its services need the image
    /// of [`Engine::image`], `network_mode: none`, and a `container_name` or a project (`-p`) that is [`unique`].
    pub fn compose(&self, folder: &Path, arguments: &[&str]) -> String {
        let mut command = self.programs.command("docker-compose");
        command.args(arguments).current_dir(folder).stdin(Stdio::null());
        command.env("DOCKER_HOST", format!("unix://{}", self.engine.socket.display()));
        command.env("DOCKER_CONFIG", self.path("client")); // not in the user's home
        let output = command.output().expect("docker-compose runs");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
    }

    /// Returns the pid of the daemon.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("it runs").id()
    }

    /// Lets the daemon stand still while this runs, as one that is too busy to handle anything.
    pub fn while_busy(&self, run: impl FnOnce()) {
        while_stopped(self.pid(), run);
    }

    /// Lets the containerd that is a service stand still while this runs.
    pub fn while_containerd_is_busy(&self, run: impl FnOnce()) {
        while_stopped(self.containerd.as_ref().expect("it runs").id(), run);
    }

    /// Kills the daemon alone.
    pub fn crash(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        child.kill().and_then(|()| child.wait()).expect("dockerd is killed");
    }

    /// Stops the daemon with SIGTERM, as a service manager does, and waits for its end.
    pub fn stop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        assert!(super::terminate(&mut child), "dockerd does not end on SIGTERM");
    }

    /// Ends the containers of a daemon that no longer responds, by their cgroups, and the shims that they leave. The folder of a
    /// container is there until it is removed.
    fn end_containers(&self) {
        for entry in std::fs::read_dir(self.path("data/containers")).into_iter().flatten().flatten() {
            let cgroup = Path::new("docker").join(entry.file_name());
            let processes = super::cgroups::root().join(&cgroup).join("cgroup.procs");
            super::holds_in_time(|| {
                let pids = std::fs::read_to_string(&processes).unwrap_or_default();
                let pids = pids.lines().filter_map(|pid| pid.parse().ok());
                pids.filter(|pid| *pid != 0).for_each(|pid| signal("KILL", pid)); // 0 of another pid namespace
                super::cgroups::remove_everywhere(&cgroup)
            });
        }
        for pid in super::processes_naming(self.folder.path()) {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            if name.starts_with("containerd-shim") {
                signal("KILL", pid);
            }
        }
    }
}

impl Drop for PrivateEngine {
    fn drop(&mut self) {
        if self.path("data").exists() {
            // only the daemon can end its containers, and it needs containerd
            if self.has_service && self.containerd.is_none() {
                self.spawn_containerd();
                super::holds_in_time(|| self.query_containerd().is_ok());
            }
            if self.child.is_none() {
                self.spawn();
                super::holds_in_time(|| self.server_version().is_ok());
            }
        }
        if let Ok(ids) = self.engine.try_docker(&["ps", "-aq"]) {
            for id in ids.lines() {
                let _ = self.engine.try_docker(&["rm", "-f", id]);
            }
        }
        if let Some(child) = &mut self.child {
            super::terminate(child);
        }
        if let Some(containerd) = &mut self.containerd {
            super::terminate(containerd);
        }
        // its containerd, if it outlived it: only one that was started below our folder
        let pid_file = self.path("exec/containerd/containerd.pid");
        let pid = std::fs::read_to_string(pid_file).ok().and_then(|text| text.trim().parse().ok());
        let ours = |pid: u32| super::processes_naming(self.folder.path()).contains(&pid);
        if let Some(pid) = pid.filter(|pid| ours(*pid)) {
            signal("TERM", pid);
            super::holds_in_time(|| !ours(pid));
        }
        self.end_containers();
        // with live-restore it leaves its directory mounted on itself, which prevents removal
        unmount_below(self.folder.path());
    }
}

/// Panics, with the end of its log, if a daemon that was started has ended.
fn assert_runs(child: Option<&mut Child>, log: &Path) {
    let ended = child.expect("it was started").try_wait().expect("a child");
    if let Some(status) = ended {
        panic!("it has ended with {status}: {}", end_of_log(log));
    }
}

/// Returns the last lines of a log, oldest first.
fn end_of_log(log: &Path) -> String {
    let log = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<_> = log.lines().collect();
    lines[lines.len().saturating_sub(5)..].join("\n")
}

/// Unmounts what is mounted below a folder, the last one first.
pub fn unmount_below(folder: &Path) {
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
    for point in mounts.lines().rev().filter_map(|line| line.split(' ').nth(1)) {
        if Path::new(point).starts_with(folder) {
            let _ = Command::new("umount").arg(point).status();
        }
    }
}

/// Stops a process with SIGSTOP while this runs, also if it panics.
fn while_stopped(pid: u32, run: impl FnOnce()) {
    struct Continue(u32);
    impl Drop for Continue {
        fn drop(&mut self) {
            signal("CONT", self.0);
        }
    }
    let _continue = Continue(pid);
    signal("STOP", pid);
    run();
}

/// Sends a signal by name.
pub fn signal(name: &str, pid: u32) {
    let _ = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status();
}

/// A Unix socket in a directory of its own, served by one thread per connection until it is dropped.
pub struct Socket {
    _folder: tempfile::TempDir,
    pub path: PathBuf,
}

impl Socket {
    /// Serves every connection with `serve`.
    pub fn serving(serve: impl Fn(UnixStream) + Send + Sync + 'static) -> Self {
        let folder = tempfile::Builder::new().prefix("mlt-socket-").tempdir().expect("a folder");
        let path = folder.path().join("docker.sock");
        let listener = UnixListener::bind(&path).expect("a socket");
        let serve = Arc::new(serve);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let serve = Arc::clone(&serve);
                std::thread::spawn(move || serve(stream));
            }
        });
        Self { _folder: folder, path }
    }

    /// Sends the same bytes to every client, and then closes the connection if `close`.
    pub fn responding_with(response: &'static [u8], close: bool) -> Self {
        Self::serving(move |mut stream| {
            let mut request = [0; 4096];
            let _ = stream.read(&mut request);
            let _ = stream.write_all(response);
            if !close {
                let _ = stream.read_to_end(&mut Vec::new()); // until the client disconnects
            }
        })
    }

    /// Returns the flag that makes memledger use this socket.
    pub fn flag(&self) -> String {
        format!("--docker.socket={}", self.path.display())
    }
}

/// A socket proxy that forwards only three read requests to an engine, as people deploy in front of Docker.
pub struct ReadOnlyProxy {
    pub socket: Socket,
    record: Arc<ProxyRecord>,
}

#[derive(Default)]
struct ProxyRecord {
    /// Whether it was forwarded, and the request.
    requests: Mutex<Vec<(bool, String)>>,
    /// When clients cancelled requests that get no response.
    cancelled: Mutex<Vec<jiff::Timestamp>>,
}

impl ReadOnlyProxy {
    pub fn of(engine: &Engine) -> Self {
        Self::stalling(engine, "no request contains this")
    }

    /// Never responds to requests whose path contains this text, like Docker for a stuck container.
    pub fn stalling(engine: &Engine, text: &str) -> Self {
        let stuck = text.to_owned();
        let record = Arc::new(ProxyRecord::default());
        let (theirs, upstream) = (Arc::clone(&record), engine.socket.clone());
        let socket = Socket::serving(move |stream| {
            let _ = relay(stream, &upstream, &stuck, &theirs);
        });
        Self { socket, record }
    }

    /// Returns when clients cancelled requests that get no response.
    pub fn cancelled(&self) -> Vec<jiff::Timestamp> {
        self.record.cancelled.lock().expect("no holder panics").clone()
    }

    /// Returns the forwarded and the rejected requests so far, as method and path without the query.
    pub fn requests(&self) -> (Vec<String>, Vec<String>) {
        let requests = self.record.requests.lock().expect("no holder panics").clone();
        let of = |wanted| {
            requests.iter().filter(move |(forwarded, _)| *forwarded == wanted).map(|(_, r)| r.clone())
        };
        (of(true).collect(), of(false).collect())
    }
}

/// Returns true if the request is one of list, inspect and events.
pub fn only_reads(request: &str) -> bool {
    let Some(path) = request.strip_prefix("GET ") else { return false };
    // the path may begin with an API version
    let path = match path.strip_prefix("/v1.").and_then(|rest| rest.split_once('/')) {
        Some((_, rest)) => rest,
        None => path.trim_start_matches('/'),
    };
    match path.split('/').collect::<Vec<_>>()[..] {
        ["containers", "json"] | ["events"] => true,
        ["containers", id, "json"] => id.bytes().all(|b| b.is_ascii_hexdigit()),
        _ => false,
    }
}

/// Relays one request per connection: reads and checks the headers, then copies bytes until the engine closes.
fn relay(client: UnixStream, upstream: &Path, stuck: &str, record: &ProxyRecord) -> std::io::Result<()> {
    let mut reader = BufReader::new(client.try_clone()?);
    let mut client = client;
    let mut first = String::new();
    reader.read_line(&mut first)?;
    let mut head = first.clone();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 || line == "\r\n" {
            break;
        }
        if !line.to_ascii_lowercase().starts_with("connection:") {
            head.push_str(&line);
        }
    }
    head.push_str("Connection: close\r\n\r\n");
    let target: Vec<_> = first.split_whitespace().take(2).collect();
    let request = target.join(" ");
    let request = request.split('?').next().unwrap_or_default().to_owned();
    if request.is_empty() {
        return Ok(()); // the client disconnected without a request
    }
    if request.contains(stuck) {
        let ended = reader.read_to_end(&mut Vec::new()).map(drop); // until the client disconnects
        record.cancelled.lock().expect("no holder panics").push(jiff::Timestamp::now());
        return ended;
    }
    let forwarded = only_reads(&request);
    record.requests.lock().expect("no holder panics").push((forwarded, request));
    if !forwarded {
        let rejection = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        return client.write_all(rejection);
    }
    let mut engine = UnixStream::connect(upstream)?;
    engine.write_all(head.as_bytes())?;
    // a disconnected client must end an idle event stream of the engine
    let (mut gone, closing) = (client.try_clone()?, engine.try_clone()?);
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut gone, &mut std::io::sink());
        let _ = closing.shutdown(Shutdown::Both);
    });
    std::io::copy(&mut engine, &mut client)?;
    client.shutdown(Shutdown::Both)
}

/// Starts a memledger that exports the containers whose name matches.
pub fn start_memledger(engine: &Engine, include: &str, more: &[&str]) -> Memledger {
    let include = format!("--container.include={include}");
    Memledger::start(&[&[&engine.flag(), "--podman.socket=", include.as_str()], more].concat())
}

/// Returns the identifying label of a container.
pub fn of(name: &str) -> [(&str, &str); 1] {
    [("container_name", name)]
}

/// Returns the labels of the only series of an info family.
pub fn info(metrics: &Metrics, family: &str, name: &str) -> Result<Labels, String> {
    match metrics.all(family, &of(name))[..] {
        [(_, labels, value)] if *value == 1.0 => Ok(labels.clone()),
        ref other => Err(format!("not one {family} of {name}: {other:?}")),
    }
}

/// Returns the entry of a container in `/api/v1/containers`.
pub fn api(memledger: &Memledger, name: &str) -> Result<serde_json::Value, String> {
    let response = memledger.api();
    let found = response["containers"].as_array().expect("a list").iter().find(|c| c["name"] == name);
    found.cloned().ok_or_else(|| format!("no {name} in {response}"))
}

pub fn assert_no_series_twice(metrics: &Metrics) {
    let mut seen = HashSet::new();
    for (name, labels, _) in &metrics.series {
        assert!(seen.insert((name, labels)), "{name} {labels:?} exists twice");
    }
}
