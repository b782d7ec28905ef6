//! `memledger serve`: samples this host and serves its metrics.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;

use super::checks;
use crate::clock::Timestamp;
use crate::collect::gpu::DriverRelease;
use crate::config::{Config, ConfigError};
use crate::container_logs;
use crate::discover::{Hierarchy, RuntimeState, Version, cri, docker};
use crate::host::panics::{essential, log_panics, run_essential};
use crate::host::{Waker, capabilities};
use crate::http::{self, AccessControl, ControlSocket, SnapshotCache, router, stale_after};
use crate::ledger::exchange::SharedState;
use crate::ledger::service::{LedgerService, ServiceHandle};
use crate::ledger::store::EventReader;
use crate::otlp::traces::SpanQueue;
use crate::otlp::{self, OtlpExporter};
use crate::otlp::{Origins, resource};
use crate::reporter::{self, ReporterState};
use crate::sampler::stalled::IndependentSources;
use crate::sampler::{Sampler, run_until};
use crate::text::error_chain;

/// Time for requests in progress to finish after a signal.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_millis(500);

/// Time for the ledger's last step to reach the disk.
const LEDGER_FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Time after which a warning explains why nothing is served yet.
const SLOW_LEDGER: Duration = Duration::from_secs(5);

/// How often a stalled cycle is looked for.
const STALL_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Lower ports need CAP_NET_BIND_SERVICE.
const FIRST_FREE_PORT: u16 = 1024;

pub fn run(config: Config, spans: Option<SpanQueue>) -> anyhow::Result<ExitCode> {
    check_outlets(&config)?;
    drop_capabilities(&config); // before any other thread exists
    crate::host::raise_open_file_limit();
    log_panics();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let outcome = runtime.block_on(run_on_runtime(config, spans));
    // a blocking task may still run: do not wait for it
    runtime.shutdown_background();
    outcome
}

/// Rejects settings that export nothing.
fn check_outlets(config: &Config) -> Result<(), ConfigError> {
    if config.listen.is_empty() && config.otlp.is_none() && config.state.events_file.is_none() {
        return Err(ConfigError::Value {
            origin: "--web.listen-address".to_owned(),
            what: "it is empty and there is no OTLP endpoint, so nothing would be exported; \
                   set an address such as :10853, or --otlp.endpoint"
                .to_owned(),
        });
    }
    Ok(())
}

/// A failure is only a warning: memledger works with the capabilities too.
fn drop_capabilities(config: &Config) {
    let is_low = |address: &SocketAddr| (1..FIRST_FREE_PORT).contains(&address.port());
    match capabilities::drop_capabilities(config.listen.iter().any(is_low)) {
        Ok(kept) => tracing::info!(kept, "dropped capabilities that are not needed"),
        Err(error) => {
            tracing::warn!(error = error_chain(&error), "failed to drop capabilities that are not needed");
        }
    }
}

/// The signals that end memledger.
struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    fn new() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Returns the name of the next signal.
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

async fn run_on_runtime(config: Config, spans: Option<SpanQueue>) -> anyhow::Result<ExitCode> {
    let mut stop_signals = StopSignals::new()?;
    let user_signal = signal(SignalKind::user_defined1())?;
    let http_stats = Arc::default();
    let access_control = Arc::new(AccessControl::new(&config, Arc::clone(&http_stats))?);
    let listeners = listen(&config.listen)?;
    let addresses: Vec<SocketAddr> =
        listeners.iter().filter_map(|listener| listener.local_addr().ok()).collect();
    log_settings(&config, &addresses);
    let Some(ledger_service) = open_ledger(&config, &mut stop_signals).await? else {
        return Ok(ExitCode::SUCCESS);
    };
    let (shared_state, event_reader) = (ledger_service.shared_state(), Some(ledger_service.event_reader()));
    let runtimes = start_runtimes(&config, &ledger_service);
    let snapshot_cache = Arc::new(SnapshotCache::default());
    let resume = export_position(&config, &ledger_service);
    let reporter = start_reporter(&config, Arc::clone(&shared_state.waker));
    let logs = container_logs::start(&config, Arc::clone(&shared_state.waker));
    let ledger = ledger_service.start(runtimes.clone(), reporter.clone(), logs.clone())?;
    let driver_release = Arc::new(DriverRelease::default());
    let mut sampler = Sampler::new(&config, runtimes, Arc::clone(&shared_state), &driver_release, http_stats);
    if let Some(reporter) = &reporter {
        sampler.show_reporter(Arc::clone(reporter), config.reporter.auto_cleanup);
    }
    if let Some(logs) = logs {
        sampler.show_inventory_to(logs);
    }
    let exporter =
        start_exporter(&config, resume, &snapshot_cache, shared_state, event_reader.clone(), spans)?;
    if let Some(exporter) = &exporter {
        sampler.show_otlp_stats(exporter.stats());
    }
    let sources = sampler.independent_sources(&config);
    let stalls = serve_through_stalls(sources, Arc::clone(&snapshot_cache), stale_after(&config));
    tokio::spawn(essential("stalls", stalls));
    let first_snapshot = Arc::new(Notify::new());
    let sampler = start_sampler(
        sampler,
        config.sample_interval,
        Arc::clone(&snapshot_cache),
        Arc::clone(&first_snapshot),
    )?;
    let driver = config.collectors.contains("gpu").then(|| Arc::clone(&driver_release));
    tokio::spawn(print_startup_summary(
        config.clone(),
        addresses,
        first_snapshot,
        driver,
        Arc::clone(&access_control),
    ));
    let release = Arc::clone(&driver_release);
    let router = router(&config, snapshot_cache, event_reader, release, reporter, &access_control);
    let control_socket = bind_control_socket(&config);
    let (stop_servers, mut servers) = start_servers(listeners, control_socket, &router, &access_control);
    tokio::spawn(essential("web configuration", access_control.follow()));
    let release = release_driver_on_signal(user_signal, Arc::clone(&driver_release), config.gpu.release_for);
    tokio::spawn(essential("SIGUSR1", release));
    let signal = stop_request(&mut stop_signals, &mut servers).await?;
    tracing::info!(signal, "stopping");
    sampler.stop();
    driver_release.stop();
    let _ = stop_servers.send(true);
    stop_consumers(exporter, ledger, servers, &driver_release).await;
    tracing::info!("stopped");
    Ok(ExitCode::SUCCESS)
}

/// Opens the ledger, which may wait for the previous process to end; `None` if a signal came first.
async fn open_ledger(
    config: &Config,
    stop_signals: &mut StopSignals,
) -> anyhow::Result<Option<LedgerService>> {
    let path = config.state.path.clone().unwrap_or_default();
    let config = config.clone();
    let opening = tokio::task::spawn_blocking(move || LedgerService::open(&config));
    let warning = async {
        tokio::time::sleep(SLOW_LEDGER).await;
        let advice = "metrics and health wait for it; its disk hangs, or another memledger still runs on it";
        tracing::warn!(path = %path.display(), advice, "opening the ledger takes long");
        std::future::pending::<Infallible>().await
    };
    tokio::select! {
        opened = opening => Ok(Some(opened.context("the ledger failed to open")??)),
        _ = stop_signals.next() => Ok(None),
        never = warning => match never {},
    }
}

/// Waits for a signal to stop, and returns its name.
///
/// # Errors
/// A server ended, which runs as long as memledger.
async fn stop_request(
    stop_signals: &mut StopSignals,
    servers: &mut JoinSet<()>,
) -> anyhow::Result<&'static str> {
    tokio::select! {
        signal = stop_signals.next() => Ok(signal),
        // disabled without a listener: there is no server then
        Some(ended) = servers.join_next() => bail!("the HTTP server ended unexpectedly: {ended:?}"),
    }
}

/// Stops what consumes snapshots and events: the export before the ledger, which stores the acknowledged position.
async fn stop_consumers(
    exporter: Option<OtlpExporter>,
    ledger: ServiceHandle,
    mut servers: JoinSet<()>,
    driver_release: &DriverRelease,
) {
    if let Some(exporter) = exporter {
        let _ = tokio::task::spawn_blocking(move || exporter.stop()).await;
    }
    let flushed = tokio::task::spawn_blocking(move || ledger.stop(LEDGER_FLUSH_TIMEOUT));
    let finished = async { while servers.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, finished).await;
    let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, await_closed_driver(driver_release)).await;
    let _ = flushed.await;
}

fn log_settings(config: &Config, addresses: &[SocketAddr]) {
    for address in addresses {
        tracing::info!(%address, "listening");
    }
    if addresses.is_empty() {
        let outlet = match &config.otlp {
            Some(_) => "metrics and events are exported over OTLP only",
            None => "events are written to --events.file, and metrics are not exported",
        };
        tracing::info!("no HTTP listener: --web.listen-address is empty, {outlet}");
    }
    for ignored in &config.otlp_ignored {
        tracing::warn!("{ignored}");
    }
}

/// Starts a server per listener; they stop when the returned sender is set to true.
fn start_servers(
    listeners: Vec<TcpListener>,
    control_socket: Option<ControlSocket>,
    router: &axum::Router,
    access_control: &Arc<AccessControl>,
) -> (watch::Sender<bool>, JoinSet<()>) {
    let (stop, stopped) = watch::channel(false);
    let mut servers = JoinSet::new();
    let stop_signal = || {
        let mut stopped = stopped.clone();
        async move { drop(stopped.wait_for(|stop| *stop).await) }
    };
    for listener in listeners {
        servers.spawn(http::serve(listener, router.clone(), Arc::clone(access_control), stop_signal()));
    }
    if let Some(socket) = control_socket {
        let (router, access_control) = (router.clone(), Arc::clone(access_control));
        servers.spawn(http::serve_control_socket(socket, router, access_control, stop_signal()));
    }
    (stop, servers)
}

/// Creates the control socket. A failure is only a warning: everything else works without it.
fn bind_control_socket(config: &Config) -> Option<ControlSocket> {
    let path = config.local.socket.as_deref()?;
    match http::bind(path, &config.local) {
        Ok(socket) => {
            tracing::info!(path = %path.display(), "control socket ready");
            Some(socket)
        }
        Err(reason) => {
            let advice = "memledger's verbs on this host cannot query this process; set another --local.socket, or an empty one";
            tracing::warn!(reason, advice, "no control socket");
            None
        }
    }
}

/// Returns the position where the export resumes: when the ledger began to count, and the last acknowledged event.
fn export_position(config: &Config, ledger_service: &LedgerService) -> (f64, u64) {
    let cursor_name = config.otlp.as_ref().map(otlp::cursor_name).unwrap_or_default();
    (ledger_service.started_at(), ledger_service.cursor(&cursor_name))
}

/// Starts the OTLP exporter; `None` if none is configured.
fn start_exporter(
    config: &Config,
    (started_at, acknowledged): (f64, u64),
    snapshot_cache: &Arc<SnapshotCache>,
    shared_state: Arc<SharedState>,
    event_reader: Option<EventReader>,
    spans: Option<SpanQueue>,
) -> anyhow::Result<Option<OtlpExporter>> {
    let Some(settings) = &config.otlp else { return Ok(None) };
    let host =
        otlp::resource_detection::host(&config.host_paths, config.listen.first().map(SocketAddr::port));
    if host.name.is_empty() && !settings.resource.iter().any(|(key, _)| key == "host.name") {
        tracing::warn!(
            "OTLP: the host's name is unreadable from this container, so host.name is missing; \
             set OTEL_RESOURCE_ATTRIBUTES=host.name=NAME"
        );
    }
    let boot = config.host_paths.boot_time().unwrap_or_default(); // 0 means *unknown* in OTLP
    let now = Timestamp::now().unix_nanos();
    let shared = otlp::OtlpContext {
        snapshot_cache: Arc::clone(snapshot_cache),
        stale_after: stale_after(config),
        shared_state,
        event_reader,
        cursor_name: otlp::cursor_name(settings),
        acknowledged: acknowledged.into(),
        resource: resource(&host, &settings.resource),
        origins: Origins { memledger: now, boot: boot * 1_000_000_000, ledger: (started_at * 1e9) as u64 },
        otlp_stats: Arc::default(),
        spans,
    };
    let targets = [("metrics", &settings.metrics), ("logs", &settings.logs), ("traces", &settings.traces)];
    for (signal, target) in targets {
        if let Some(target) = target {
            let protocol = if target.grpc { "grpc" } else { "http/protobuf" };
            tracing::info!(signal, endpoint = %target.endpoint, protocol, "exporting over OTLP");
        }
    }
    Ok(Some(OtlpExporter::start(settings.clone(), shared).context("the OTLP thread failed to start")?))
}

/// Starts to receive what processes report from inside. A failure is only a warning: everything else works without.
/// `waker` is signalled with each out-of-memory error.
fn start_reporter(config: &Config, waker: Arc<Waker>) -> Option<Arc<ReporterState>> {
    let directory = config.reporter.directory.as_deref();
    if directory.is_none() && config.reporter.auto_cleanup.is_some() {
        tracing::warn!("--reporter.auto-cleanup does nothing while --reporter.directory is empty");
    }
    let directory = directory?;
    let hierarchy = Hierarchy::detect(&config.host_paths).ok()?; // its absence is reported by the sampler
    match reporter::start(directory, &config.host_paths, hierarchy.version == Version::V1, waker) {
        Ok(state) => {
            tracing::info!(directory = %directory.display(), "receiving reports of processes");
            Some(state)
        }
        Err(error) => {
            tracing::warn!(error = error_chain(&error), "no view from inside: processes cannot report");
            None
        }
    }
}

/// Starts a task per container runtime.
fn start_runtimes(config: &Config, ledger_service: &LedgerService) -> Vec<Arc<RuntimeState>> {
    let shared_state = ledger_service.shared_state();
    let mut sources = Vec::new();
    if !config.cri.sockets.is_empty() {
        let source = RuntimeState::new(cri::RUNTIME, Arc::clone(&shared_state.waker));
        let memory = cri::CriResumeState::new(
            ledger_service.since(cri::RUNTIME),
            ledger_service.running(cri::RUNTIME),
        );
        let follow = cri::follow(config.cri.clone(), config.filter.clone(), Arc::clone(&source), memory);
        tokio::spawn(essential(cri::RUNTIME, follow));
        if let Some(socket) = config.cri.pod_resources.clone() {
            tokio::spawn(essential("pod resources", cri::pod_resources::follow(socket, Arc::clone(&source))));
        }
        sources.push(source);
    }
    for endpoints in config.endpoints.chunk_by(|one, other| one.runtime == other.runtime) {
        let Some(runtime) = endpoints.first().map(|endpoint| endpoint.runtime) else { continue };
        let source = RuntimeState::new(runtime, Arc::clone(&shared_state.waker));
        let (since, open) = (ledger_service.since(runtime), ledger_service.running(runtime));
        let (filter, shared) = (config.filter.clone(), Arc::clone(&source));
        let follow = docker::follow_all(endpoints.to_vec(), filter, shared, since, open);
        tokio::spawn(essential(runtime, follow));
        sources.push(source);
    }
    sources
}

/// Keeps the metrics that need no cycle up to date while a cycle hangs, for ever.
async fn serve_through_stalls(
    mut sources: IndependentSources,
    snapshot_cache: Arc<SnapshotCache>,
    stale_after: Duration,
) {
    let nearly_stale = stale_after.saturating_sub(2 * STALL_CHECK_INTERVAL); // ready when the snapshot is stale
    loop {
        tokio::time::sleep(STALL_CHECK_INTERVAL).await;
        snapshot_cache.refresh_partial(nearly_stale, |last| sources.snapshot(last, Timestamp::now()));
    }
}

/// Waits until no NVML process runs. One that outlives memledger is killed by the kernel, but nobody would reap it.
async fn await_closed_driver(driver_release: &DriverRelease) {
    while !driver_release.is_closed() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Releases the GPU driver at each SIGUSR1.
async fn release_driver_on_signal(mut requests: Signal, driver_release: Arc<DriverRelease>, span: Duration) {
    while requests.recv().await.is_some() {
        tracing::info!(signal = "SIGUSR1", ?span, "releasing the GPU driver");
        driver_release.request(Timestamp::now(), span);
    }
}

fn listen(addresses: &[SocketAddr]) -> anyhow::Result<Vec<TcpListener>> {
    let mut listeners = Vec::new();
    for address in addresses {
        let bound = match http::listen(*address) {
            // a host without IPv6: listen on all IPv4 addresses
            Err(error)
                if error.raw_os_error() == Some(rustix::io::Errno::AFNOSUPPORT.raw_os_error())
                    && address.ip().is_unspecified() =>
            {
                http::listen((std::net::Ipv4Addr::UNSPECIFIED, address.port()).into())
            }
            other => other,
        };
        let advice = match &bound {
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
                ": the address is in use by another program, perhaps another memledger; stop it or set another --web.listen-address"
            }
            _ => "",
        };
        listeners.push(bound.with_context(|| format!("cannot listen on {address}{advice}"))?);
    }
    Ok(listeners)
}

struct SamplerThread {
    stop: Arc<AtomicBool>,
    thread: std::thread::Thread,
}

impl SamplerThread {
    /// Does not wait for the thread, which may be in a slow read.
    fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.unpark();
    }
}

fn start_sampler(
    sampler: Sampler,
    interval: Duration,
    snapshot_cache: Arc<SnapshotCache>,
    first: Arc<Notify>,
) -> std::io::Result<SamplerThread> {
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let publish = move |snapshot| {
        snapshot_cache.publish(snapshot);
        first.notify_one();
    };
    let body = move || run_essential("cycle", || run_until(sampler, interval, &stopped, publish));
    let handle = std::thread::Builder::new().name("cycle".into()).spawn(body)?;
    Ok(SamplerThread { stop, thread: handle.thread().clone() })
}

/// Prints a summary after the first snapshot: what was found, what is missing, the URL of the metrics.
async fn print_startup_summary(
    config: Config,
    addresses: Vec<SocketAddr>,
    first: Arc<Notify>,
    driver: Option<Arc<DriverRelease>>,
    access_control: Arc<AccessControl>,
) {
    first.notified().await;
    // the checks read files, which may hang
    let (runtime, telemetry_path) = (Handle::current(), config.telemetry_path.clone());
    let checks = tokio::task::spawn_blocking(move || {
        runtime.block_on(checks::run_checks(&config, checks::Verbosity::Short, driver.as_deref()))
    });
    let Ok(checks) = checks.await else { return };
    let mut text = checks::render(&checks, checks::Verbosity::Short);
    for address in addresses {
        let host =
            if address.ip().is_unspecified() { "localhost".to_owned() } else { address.ip().to_string() };
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        let (scheme, port) = (access_control.scheme(), address.port());
        text.push_str(&format!("\nMetrics: {scheme}://{host}:{port}{telemetry_path}\n"));
    }
    let _ = super::print(&format!("{text}\n")); // standard output may be closed
}
