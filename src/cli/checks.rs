//! Checks of every source, printed by `doctor` and at the start of `serve`.
//!
//! A check has a finding and, if the source is unusable, what is missing without it and the exact fix. A source that this
//! host does not have is not a failure.

mod control_socket;
mod directory;
mod amdgpu;
mod gpu;
mod ledger;
mod otlp;
mod pods;
mod relevance;
mod reporter;
mod run_reports;
mod runs;

use std::fmt::Write;
use std::time::Duration;

use bollard::query_parameters::{EventsOptions, ListContainersOptions};
use futures_util::StreamExt;
use serde::Serialize;

use crate::clock::Timestamp;
use crate::config::{self, Config, DEFAULT_FILE, RuntimeEndpoint};
use crate::discover::cgroup_tree::CgroupTree;
use crate::discover::{Hierarchy, Version, docker};
use crate::gpu::DriverState;
use crate::host::KernelFile;
use crate::host::in_pod;
use crate::text::error_chain;

/// Timeout of drivers and daemons.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// How the finding begins where no socket matches.
const NO_MATCH: &str = "no socket matches";
const SERVING: &str = "serving";
const NO_PID_NAMESPACE_FIX: &str = "docker run --pid=host; Compose: pid: host; Kubernetes: hostPID: true";
const CAP_SYS_PTRACE: u32 = 19;
const CAP_SYSLOG: u32 = 34;

/// The state of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckState {
    /// It works.
    Good,
    /// This host does not have it, which is not an error.
    None,
    /// It exists, or should, and does not work.
    Bad,
}

/// How much is checked and printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verbosity {
    /// For the start of `serve`: no fixes, and no details that are fine.
    Short,
    /// For `doctor`.
    Full,
}

/// The check of one source.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// The name of the source.
    pub source: &'static str,
    /// Its state.
    pub state: CheckState,
    /// memledger cannot run without it.
    pub required: bool,
    /// It exists, or this kind of host could need it.
    pub needed: bool,
    /// Printed at the start of `serve` only if there is a problem.
    #[serde(skip)]
    detail: bool,
    found: String,
    #[serde(skip_serializing_if = "str::is_empty")]
    lost: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    fix: String,
}

impl Check {
    fn new(source: &'static str, state: CheckState, found: String, lost: &'static str, fix: String) -> Self {
        Self { source, state, required: false, needed: true, detail: false, found, lost, fix }
    }

    fn good(source: &'static str, found: impl Into<String>) -> Self {
        Self::new(source, CheckState::Good, found.into(), "", String::new())
    }

    fn none(
        source: &'static str,
        found: impl Into<String>,
        lost: &'static str,
        fix: impl Into<String>,
    ) -> Self {
        Self::new(source, CheckState::None, found.into(), lost, fix.into())
    }

    fn bad(
        source: &'static str,
        found: impl Into<String>,
        lost: &'static str,
        fix: impl Into<String>,
    ) -> Self {
        Self::new(source, CheckState::Bad, found.into(), lost, fix.into())
    }

    fn required(mut self) -> Self {
        self.required = true;
        self
    }

    fn detail(mut self) -> Self {
        self.detail = true;
        self
    }

    /// Marks a working source as degraded: something is missing nevertheless.
    fn weaker(mut self, lost: &'static str, fix: impl Into<String>) -> Self {
        (self.lost, self.fix) = (lost, fix.into());
        self
    }
}

/// Checks every source once. `driver_state` is that of the GPU collector, if it runs in this process.
pub async fn run_checks(
    config: &Config,
    verbosity: Verbosity,
    driver_state: Option<&DriverState>,
) -> Vec<Check> {
    let (of_gpus, gpus) = match verbosity == Verbosity::Full || driver_state.is_some() {
        true => gpu::run_checks(config, driver_state).await,
        false => Default::default(),
    };
    let mut checks = vec![cgroups(config), proc_root(config)];
    checks.extend(pods::run_checks(config, verbosity, &gpus).await);
    for endpoint in &config.endpoints {
        checks.extend(runtimes(endpoint, config.oom.runtime).await);
    }
    checks.extend([pid_namespace(config), ptrace()]);
    checks.extend(of_gpus);
    checks.extend([amdgpu::run_checks(config), pressure(config)]);
    checks.extend(ledger::run_checks(config, verbosity));
    if verbosity == Verbosity::Full {
        checks.extend(otlp::run_checks(config).await); // `serve` finds out by exporting
        checks.extend(run_reports::run_checks(config).await); // and by writing
        checks.push(control_socket::run_check(config)); // and by creating it
    }
    checks.extend([reporter::run_check(config), runs::run_check(config), open_files(), web(config)]);
    checks.push(settings_file(config));
    checks.extend(unknown_variables());
    if in_pod() {
        checks.iter_mut().for_each(pods::advise);
    }
    relevance::mark_unneeded(&mut checks, config);
    checks
}

/// Takes the checks out that this kind of host does not need, and returns a line that names them.
pub fn fold(checks: &mut Vec<Check>) -> String {
    let folded: Vec<_> = checks.extract_if(.., |check| !check.needed).map(|check| check.source).collect();
    match folded.as_slice() {
        [] => String::new(),
        sources => {
            format!("  {:<8} {:<16} {}; --all shows why\n", "-", "not needed here", sources.join(", "))
        }
    }
}

/// Renders the checks as a table; the full one has what is missing and the fixes.
pub fn render(checks: &[Check], verbosity: Verbosity) -> String {
    let mut text = format!("memledger {}\n\n", env!("CARGO_PKG_VERSION"));
    let is_shown = |check: &&Check| verbosity == Verbosity::Full || !check.detail || !check.lost.is_empty();
    for check in checks.iter().filter(is_shown) {
        let state = match check.state {
            CheckState::Good => "ok",
            CheckState::None => "-",
            CheckState::Bad => "MISSING",
        };
        let _ = writeln!(text, "  {state:<8} {:<16} {}", check.source, check.found);
        if verbosity == Verbosity::Full && !check.lost.is_empty() {
            let what = if check.state == CheckState::Good { "degraded" } else { "without it" };
            let _ = writeln!(text, "  {:<8} {:<16}   {:<11} {}", "", "", format!("{what}:"), check.lost);
            let _ = writeln!(text, "  {:<8} {:<16}   to fix:     {}", "", "", check.fix);
        }
    }
    let has_problem = |check: &Check| {
        check.state == CheckState::Bad || (check.state == CheckState::Good && !check.lost.is_empty())
    };
    if verbosity == Verbosity::Short && checks.iter().any(has_problem) {
        text.push_str("\nRun `memledger doctor` to see what is missing and how to fix it.\n");
    }
    text
}

fn cgroups(config: &Config) -> Check {
    const LOST: &str = "no memory of any container";
    let name = "cgroups";
    let hierarchy = match Hierarchy::detect(&config.host_paths) {
        Ok(hierarchy) => hierarchy,
        Err(error) => {
            let fix = "mount the host's /sys/fs/cgroup read-only and set --path.cgroupfs to it";
            return Check::bad(name, error.to_string(), LOST, fix).required();
        }
    };
    let version = match hierarchy.version {
        Version::V1 => "v1",
        Version::V2 => "v2",
    };
    let mut tree = CgroupTree::new(&hierarchy);
    let place = hierarchy.root.display();
    let (_, walked) = tree.refresh(crate::clock::Timestamp::now());
    let containers = tree.candidates().iter().filter(|candidate| candidate.is_proven(None)).count();
    match walked {
        Ok(()) => Check::good(name, format!("{version} at {place}, {containers} containers")).required(),
        Err(error) if containers > 0 => {
            let found = format!("{version} at {place}, {containers} containers: {error}");
            Check::bad(name, found, "containers below that directory", "make it readable for memledger")
        }
        Err(error) => Check::bad(
            name,
            format!("{version} at {place}: {error}"),
            LOST,
            "make that directory readable for memledger",
        )
        .required(),
    }
}

fn proc_root(config: &Config) -> Check {
    let name = "/proc";
    let place = config.host_paths.proc.display();
    let mut buffer = Vec::new();
    let meminfo = KernelFile::open(&config.host_paths.proc.join("meminfo"));
    match meminfo.and_then(|file| file.read_once(&mut buffer).map(<[u8]>::len)) {
        Ok(_) => Check::good(name, format!("host memory readable at {place}")).required(),
        Err(error) => {
            let fix = "mount the host's /proc read-only and set --path.procfs to it";
            Check::bad(name, format!("{place}: {error}"), "no memory of the host and no processes", fix)
                .required()
        }
    }
}

/// Checks each socket of a runtime that matches.
async fn runtimes(endpoint: &RuntimeEndpoint, is_evidence: bool) -> Vec<Check> {
    let sockets = docker::matches(&endpoint.socket);
    if sockets.is_empty() {
        let found = format!("{NO_MATCH} {}", endpoint.socket.display());
        return vec![Check::good(endpoint.runtime.as_str(), found).detail()];
    }
    let endpoints = sockets.into_iter().map(|socket| RuntimeEndpoint { socket, ..endpoint.clone() });
    futures_util::future::join_all(endpoints.map(async |endpoint| runtime(&endpoint, is_evidence).await))
        .await
}

async fn runtime(endpoint: &RuntimeEndpoint, is_evidence: bool) -> Check {
    const LOST: &str = "containers have only their short id: no names, images, labels, run settings; and their exits have \
                        neither exit code nor reason";
    const NO_EVENTS: &str =
        "exits of containers have neither exit code nor reason; new containers are named later";
    let (name, socket) = (endpoint.runtime.as_str(), &endpoint.socket);
    let place = socket.display();
    if !socket.exists() {
        let fix = format!("start it, or mount its socket there, or set --{name}.socket");
        return Check::none(name, format!("no socket at {place}"), LOST, fix);
    }
    let query = async {
        let (docker, _) = docker::client(socket)?;
        let containers = docker.list_containers(None::<ListContainersOptions>).await?;
        let now = Some(Timestamp::now().unix_whole_seconds().to_string());
        let mut events = docker.events(Some(EventsOptions { since: now.clone(), until: now, filters: None }));
        let outcome = events.next().await.transpose(); // there may be none
        Ok((containers.len(), outcome))
    };
    match tokio::time::timeout(RESPONSE_TIMEOUT, query).await {
        Ok(Ok((containers, Ok(_)))) => {
            let check =
                Check::good(name, format!("{place}, {containers} running containers, events readable"));
            if is_evidence {
                return check;
            }
            check.weaker("its exits and OOM events are not used (--no-oom.runtime)", "--oom.runtime")
        }
        Ok(Ok((containers, Err(error)))) => {
            let found = format!("{place}, {containers} running containers, but no events: {error}");
            Check::bad(name, found, NO_EVENTS, "allow GET /events in the socket proxy")
        }
        Ok(Err(error)) => {
            let fix = docker::explain(&error, socket);
            Check::bad(name, format!("{place}: {error}"), LOST, fix)
        }
        Err(_) => {
            let found = format!("{place} does not respond within {RESPONSE_TIMEOUT:?}");
            Check::bad(name, found, LOST, "restart the daemon")
        }
    }
}

fn pid_namespace(config: &Config) -> Check {
    let name = "pid namespace";
    match config.host_paths.in_initial_pid_namespace() {
        true => Check::good(name, "the host's"),
        false => Check::bad(
            name,
            "not the host's",
            "no processes of containers, GPU processes stay unattributed, and a killed process is attributed to its container \
             only by the kernel log and the cgroups' counters",
            NO_PID_NAMESPACE_FIX,
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
    Check::bad(name, "no", "no proportional set size (pss) and no /dev/shm of processes of other users", fix)
}

fn pressure(config: &Config) -> Check {
    let name = "PSI";
    let lost = "no time spent waiting for memory";
    let mut buffer = Vec::new();
    let file = KernelFile::open(&config.host_paths.proc.join("pressure/memory"));
    match file.and_then(|file| file.read_once(&mut buffer).map(<[u8]>::len)) {
        Ok(_) => Check::good(name, "yes"),
        Err(_) => Check::none(name, "not in this kernel, or switched off", lost, "boot with psi=1"),
    }
}

/// Checks the limit of open files: memledger keeps about a dozen open per container and one per process.
fn open_files() -> Check {
    const MIN_OPEN_FILES: u64 = 8_192;
    let limit = crate::host::raise_open_file_limit();
    let name = "open files";
    if limit >= MIN_OPEN_FILES {
        return Check::good(name, format!("up to {limit}"));
    }
    let fix = "docker run --ulimit nofile=65536; systemd: LimitNOFILE=65536";
    Check::bad(name, format!("only {limit}"), "with many containers and processes, some are unreadable", fix)
}

/// Returns a check for each environment variable that looks like a setting's and is none.
fn unknown_variables() -> Vec<Check> {
    let check = |variable: config::UnknownVariable| match variable.is_mistake() {
        true => Check::bad(
            "environment",
            variable.to_string(),
            "what it should set",
            "correct the name: see docs/config.md",
        ),
        false => Check::good("environment", variable.to_string()),
    };
    config::unknown_variables(std::env::vars_os()).into_iter().map(check).collect()
}

/// Shows which settings file is in force.
fn settings_file(config: &Config) -> Check {
    match &config.file {
        Some(file) => Check::good("settings", file.display().to_string()),
        None => Check::good("settings", format!("no file: {DEFAULT_FILE} does not exist, or is not wanted")),
    }
    .detail()
}

/// Checks the access control of the HTTP server.
fn web(config: &Config) -> Check {
    let name = SERVING;
    let Some(file) = &config.web_config else {
        let lost =
            "TLS and passwords: everyone who can reach the port sees the metrics, but not the processes";
        return Check::none(name, "plain HTTP, no passwords", lost, "--web.config.file: see docs/serving.md")
            .detail();
    };
    match crate::http::describe(file) {
        Ok(found) => Check::good(name, format!("{found}, by {}", file.display())).detail(),
        Err(error) => {
            let lost = "serve does not start; a running one keeps the last valid configuration";
            Check::bad(name, error_chain(&error), lost, "correct it: see docs/serving.md").required()
        }
    }
}
