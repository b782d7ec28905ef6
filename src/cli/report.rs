//! The look at every source that `doctor` prints and `serve` begins with.
//!
//! A check says what was found; and if a source cannot be used, what is lost without it and the exact change that brings
//! it. A source that this host does not have is no failure.

mod drm;
mod gpu;
mod ledger;
mod otlp;
mod pods;

use std::error::Error;
use std::fmt::Write;
use std::time::Duration;

use bollard::query_parameters::{EventsOptions, ListContainersOptions};
use futures_util::StreamExt;

use crate::clock::Moment;
use crate::collect::gpu::Control;
use crate::config::{Config, Endpoint};
use crate::discover::cgroups::Tree;
use crate::discover::{Hierarchy, Version, docker};
use crate::host::KernelFile;

/// A driver or daemon that does not answer within this is reported so.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
const CAP_SYS_PTRACE: u32 = 19;
const CAP_SYSLOG: u32 = 34;

/// How a source stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It can be used.
    Good,
    /// This host does not have it, and nothing is wrong.
    None,
    /// It is there, or should be, and cannot be used.
    Bad,
}

/// How much is looked at and shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// What `serve` begins with: without advice, and without the details that are well.
    Short,
    /// What `doctor` prints.
    Full,
}

/// One source.
#[derive(Clone, Debug)]
pub struct Check {
    /// Its name.
    pub source: &'static str,
    /// How it stands.
    pub state: State,
    /// Whether the main job needs it.
    pub essential: bool,
    /// Of interest at the start of `serve` only if it is not well.
    detail: bool,
    found: String,
    lost: &'static str,
    fix: String,
}

impl Check {
    fn new(source: &'static str, state: State, found: String, lost: &'static str, fix: String) -> Self {
        Self { source, state, essential: false, detail: false, found, lost, fix }
    }

    fn good(source: &'static str, found: impl Into<String>) -> Self {
        Self::new(source, State::Good, found.into(), "", String::new())
    }

    fn none(
        source: &'static str,
        found: impl Into<String>,
        lost: &'static str,
        fix: impl Into<String>,
    ) -> Self {
        Self::new(source, State::None, found.into(), lost, fix.into())
    }

    fn bad(
        source: &'static str,
        found: impl Into<String>,
        lost: &'static str,
        fix: impl Into<String>,
    ) -> Self {
        Self::new(source, State::Bad, found.into(), lost, fix.into())
    }

    fn essential(mut self) -> Self {
        self.essential = true;
        self
    }

    fn detail(mut self) -> Self {
        self.detail = true;
        self
    }

    /// It can be used, but something is lost all the same.
    fn weaker(mut self, lost: &'static str, fix: impl Into<String>) -> Self {
        (self.lost, self.fix) = (lost, fix.into());
        self
    }
}

/// Looks at every source once. `control` is that of the GPU collector, where one runs in this process.
pub async fn examine(config: &Config, look: Look, control: Option<&Control>) -> Vec<Check> {
    let mut checks = vec![cgroups(config), proc_root(config)];
    checks.extend(pods::examine(config, look).await);
    for endpoint in &config.endpoints {
        checks.push(runtime(endpoint, config.oom.runtime).await);
    }
    checks.extend([pid_namespace(config), ptrace()]);
    if look == Look::Full || control.is_some() {
        checks.extend(gpu::examine(config, control).await);
    }
    checks.extend([drm::examine(config), pressure(config)]);
    checks.extend(ledger::examine(config, look));
    if look == Look::Full {
        checks.extend(otlp::examine(config).await); // `serve` finds out by pushing
    }
    checks.extend([open_files(), web(config)]);
    if pods::in_pod() {
        checks.iter_mut().for_each(pods::advise);
    }
    checks
}

/// The checks as a table; the full one says what is lost and what to do.
pub fn render(checks: &[Check], look: Look) -> String {
    let mut text = format!("memledger {}\n\n", env!("CARGO_PKG_VERSION"));
    let is_shown = |check: &&Check| look == Look::Full || !check.detail || !check.lost.is_empty();
    for check in checks.iter().filter(is_shown) {
        let state = match check.state {
            State::Good => "ok",
            State::None => "-",
            State::Bad => "MISSING",
        };
        let _ = writeln!(text, "  {state:<8} {:<16} {}", check.source, check.found);
        if look == Look::Full && !check.lost.is_empty() {
            let what = if check.state == State::Good { "weaker" } else { "without it" };
            let _ = writeln!(text, "  {:<8} {:<16}   {:<11} {}", "", "", format!("{what}:"), check.lost);
            let _ = writeln!(text, "  {:<8} {:<16}   to change:  {}", "", "", check.fix);
        }
    }
    let is_wanting =
        |check: &Check| check.state == State::Bad || (check.state == State::Good && !check.lost.is_empty());
    if look == Look::Short && checks.iter().any(is_wanting) {
        text.push_str("\n`memledger doctor` says what is lost and what to change.\n");
    }
    text
}

fn cgroups(config: &Config) -> Check {
    const LOST: &str = "no memory of any container";
    let name = "cgroups";
    let hierarchy = match Hierarchy::detect(&config.roots) {
        Ok(hierarchy) => hierarchy,
        Err(error) => {
            let fix = "mount the host's /sys/fs/cgroup read-only and set --path.cgroupfs to it";
            return Check::bad(name, error.to_string(), LOST, fix).essential();
        }
    };
    let version = match hierarchy.version {
        Version::V1 => "v1",
        Version::V2 => "v2",
    };
    let mut tree = Tree::new(&hierarchy);
    let place = hierarchy.root.display();
    let (_, walked) = tree.refresh(crate::clock::Moment::now());
    let containers = tree.candidates().iter().filter(|candidate| candidate.inside.is_none()).count();
    match walked {
        Ok(()) => Check::good(name, format!("{version} at {place}, {containers} containers")).essential(),
        Err(error) if containers > 0 => {
            let found = format!("{version} at {place}, {containers} containers: {error}");
            Check::bad(name, found, "containers below that folder", "let memledger read it")
        }
        Err(error) => {
            Check::bad(name, format!("{version} at {place}: {error}"), LOST, "let memledger read that folder")
                .essential()
        }
    }
}

fn proc_root(config: &Config) -> Check {
    let name = "/proc";
    let place = config.roots.proc.display();
    let mut buffer = Vec::new();
    let meminfo = KernelFile::open(&config.roots.proc.join("meminfo"));
    match meminfo.and_then(|file| file.read_once(&mut buffer).map(<[u8]>::len)) {
        Ok(_) => Check::good(name, format!("host memory readable at {place}")).essential(),
        Err(error) => {
            let fix = "mount the host's /proc read-only and set --path.procfs to it";
            Check::bad(name, format!("{place}: {error}"), "no memory of the host and no processes", fix)
                .essential()
        }
    }
}

async fn runtime(endpoint: &Endpoint, is_evidence: bool) -> Check {
    const LOST: &str = "containers are known by their short id alone: no names, images, labels, run settings; and of their \
                        ends neither exit code nor reason";
    const NO_EVENTS: &str =
        "of ends of containers neither exit code nor reason; new containers are named later";
    let (name, socket) = (endpoint.runtime, &endpoint.socket);
    let place = socket.display();
    if !socket.exists() {
        let fix = format!("start it, or mount its socket there, or set --{name}.socket");
        return Check::none(name, format!("no socket at {place}"), LOST, fix);
    }
    let ask = async {
        let docker = bollard::Docker::connect_with_unix(
            &socket.to_string_lossy(),
            ANSWER_WITHIN.as_secs(),
            bollard::API_DEFAULT_VERSION,
        )?;
        let containers = docker.list_containers(None::<ListContainersOptions>).await?;
        let now = Some(Moment::now().unix_whole_seconds().to_string());
        let events = docker.events(Some(EventsOptions { since: now.clone(), until: now, filters: None }));
        let told = events.fold(Ok(()), async |told, event| told.and(event.map(|_| ()))).await;
        Ok((containers.len(), told))
    };
    match tokio::time::timeout(ANSWER_WITHIN, ask).await {
        Ok(Ok((containers, Ok(())))) => {
            let check = Check::good(name, format!("{place}, {containers} containers run, events told"));
            if is_evidence {
                return check;
            }
            check.weaker("what it tells of ends is not used (--no-oom.runtime)", "--oom.runtime")
        }
        Ok(Ok((containers, Err(error)))) => {
            let found = format!("{place}, {containers} containers run, but no events: {error}");
            Check::bad(name, found, NO_EVENTS, "let the proxy before it pass GET /events")
        }
        Ok(Err(error)) => {
            let fix = docker::explain(&error, socket);
            Check::bad(name, format!("{place}: {error}"), LOST, fix)
        }
        Err(_) => {
            let found = format!("{place} does not answer within {ANSWER_WITHIN:?}");
            Check::bad(name, found, LOST, "restart the daemon")
        }
    }
}

fn pid_namespace(config: &Config) -> Check {
    let name = "pid namespace";
    match config.roots.in_first_pid_namespace() {
        true => Check::good(name, "the host's"),
        false => Check::bad(
            name,
            "not the host's",
            "no processes of containers, GPU processes stay unattributed, and a killed process is tied to its container \
             only by the kernel's own line and the cgroups' counters",
            "docker run --pid=host; Compose: pid: host; Kubernetes: hostPID: true",
        ),
    }
}

fn has_capability(number: u32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|line| u64::from_str_radix(line.trim(), 16).ok())
        .is_some_and(|set| set & (1 << number) != 0)
}

fn ptrace() -> Check {
    let name = "CAP_SYS_PTRACE";
    if has_capability(CAP_SYS_PTRACE) {
        return Check::good(name, "yes");
    }
    let fix = "docker run --cap-add SYS_PTRACE; Compose: cap_add: [SYS_PTRACE]; systemd: AmbientCapabilities=CAP_SYS_PTRACE";
    Check::bad(name, "no", "no proportional shares (pss) and no /dev/shm of processes of other users", fix)
}

fn pressure(config: &Config) -> Check {
    let name = "PSI";
    let lost = "no time spent waiting for memory";
    let mut buffer = Vec::new();
    let file = KernelFile::open(&config.roots.proc.join("pressure/memory"));
    match file.and_then(|file| file.read_once(&mut buffer).map(<[u8]>::len)) {
        Ok(_) => Check::good(name, "yes"),
        Err(_) => Check::none(name, "this kernel has none, or it is off", lost, "boot with psi=1"),
    }
}

/// memledger keeps about eight files per container and one per process open.
fn open_files() -> Check {
    const WANTED: u64 = 8_192;
    let limit = crate::host::raise_open_file_limit();
    let name = "open files";
    if limit >= WANTED {
        return Check::good(name, format!("up to {limit}"));
    }
    let fix = "docker run --ulimit nofile=65536; systemd: LimitNOFILE=65536";
    Check::bad(name, format!("only {limit}"), "with many containers and processes some cannot be read", fix)
}

/// Who may ask for the metrics.
fn web(config: &Config) -> Check {
    let name = "serving";
    let Some(file) = &config.web_config else {
        let lost =
            "TLS and passwords: who reaches the port sees the metrics, and nothing that names processes";
        return Check::none(name, "plain HTTP, no passwords", lost, "--web.config.file: see docs/serving.md")
            .detail();
    };
    match crate::serve::describe(file) {
        Ok(found) => Check::good(name, format!("{found}, by {}", file.display())).detail(),
        Err(error) => {
            let cause = error.source().map_or_else(String::new, |cause| format!(": {cause}"));
            let lost = "serve does not start; if it runs, it goes on with the last good one";
            Check::bad(name, format!("{error}{cause}"), lost, "mend it: see docs/serving.md").essential()
        }
    }
}
