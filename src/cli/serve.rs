//! `memledger serve`: samples this host and serves its metrics.

mod export;
mod servers;
mod sources;

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::clock::Timestamp;
use crate::config::Config;
use crate::container_logs;
use crate::discover::RuntimeState;
use crate::gpu::DriverState;
use crate::host::capabilities;
use crate::host::panics::{essential, log_panics};
use crate::http::{AccessControl, SnapshotCache, router, stale_after};
use crate::ledger::service::{LedgerService, ServiceHandle};
use crate::otlp::traces::SpanQueue;
use crate::otlp::{self, OtlpExporter};
use crate::run_reports::{self, RunReports};
use crate::sampler::Sampler;
use crate::sampler::stalled::IndependentSources;
use crate::text::error_chain;
use export::start_exporter;
use servers::{Servers, bind_control_socket, check_outlets, listen, log_settings, print_startup_summary};
pub(super) use sources::start_runtimes;
use sources::{
    SamplerThread, create_run_spool, refresh_partial, serve_through_stalls, start_reporter, start_sampler,
};

/// The reason to stop that only a new start of the container mends.
const STALE_SOCKET: &str = "stale socket";
/// Time for requests in progress to finish after a signal.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_millis(500);

/// Time for the ledger's last step to reach the disk.
const LEDGER_FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Time after which a ledger that is still not open is reported, and the metrics that need none are served.
const SLOW_LEDGER: Duration = Duration::from_secs(5);

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
    hangup: Signal,
}

impl StopSignals {
    fn new() -> std::io::Result<Self> {
        let [terminate, interrupt, hangup] =
            [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()].map(signal);
        Ok(Self { terminate: terminate?, interrupt: interrupt?, hangup: hangup? })
    }

    /// Returns the name of the next signal.
    async fn next(&mut self) -> &'static str {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return "SIGTERM",
                _ = self.interrupt.recv() => return "SIGINT",
                _ = self.hangup.recv() => {}
            }
            if std::io::stderr().is_terminal() {
                return "SIGHUP"; // that was closed
            }
            // from logrotate, or from who wants a reload: nohup too ignores it
            tracing::info!("SIGHUP: the web configuration is followed anyway; other settings need a restart");
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
    let (driver_state, snapshot_cache) = (Arc::new(DriverState::default()), Arc::default());
    let mut independent = IndependentSources::new(&config, Arc::clone(&driver_state), http_stats);
    // health is served before the ledger is open: its disk may hang
    let without_ledger =
        router(&config, Arc::clone(&snapshot_cache), None, Arc::clone(&driver_state), None, &access_control);
    let mut servers = Servers::start(listeners, without_ledger, Arc::clone(&access_control));
    tokio::spawn(essential("web configuration", Arc::clone(&access_control).follow()));
    let release = release_driver_on_signal(user_signal, Arc::clone(&driver_state), config.gpu.release_for);
    tokio::spawn(essential("SIGUSR1", release));
    let opening = open_ledger(&config, &mut stop_signals, &mut independent, &snapshot_cache);
    let Some(ledger_service) = opening.await? else { return Ok(ExitCode::SUCCESS) };
    let running = start(&config, ledger_service, independent, &snapshot_cache, spans, &mut servers)?;
    let driver = config.collectors.contains("gpu").then(|| Arc::clone(&driver_state));
    let first = Arc::clone(&running.first_snapshot);
    tokio::spawn(print_startup_summary(config, addresses, first, driver, access_control));
    let reason = stop_request(&mut stop_signals, &mut servers.tasks, &running.runtimes).await?;
    tracing::info!(reason, "stopping");
    running.sampler.stop();
    driver_state.stop();
    servers.stop();
    stop_consumers(running.exporter, running.reports, running.ledger, servers.tasks, &driver_state).await;
    tracing::info!("stopped");
    // whatever starts it again only after a failure does so too
    Ok(if reason == STALE_SOCKET { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// What runs until the end.
struct ServiceParts {
    runtimes: Vec<Arc<RuntimeState>>,
    sampler: SamplerThread,
    ledger: ServiceHandle,
    exporter: Option<OtlpExporter>,
    reports: Option<RunReports>,
    /// Notified of the first snapshot.
    first_snapshot: Arc<Notify>,
}

/// Starts all that needs the ledger, and serves all routes.
fn start(
    config: &Config,
    ledger_service: LedgerService,
    mut independent: IndependentSources,
    snapshot_cache: &Arc<SnapshotCache>,
    spans: Option<SpanQueue>,
    servers: &mut Servers,
) -> anyhow::Result<ServiceParts> {
    let (shared_state, event_reader) = (ledger_service.shared_state(), ledger_service.event_reader());
    run_reports::enable(&config.report, &shared_state.followers.report_stats);
    create_run_spool(config);
    let runtimes = start_runtimes(config, &ledger_service);
    let reporter = start_reporter(config, Arc::clone(&shared_state.waker));
    let logs = container_logs::start(config, Arc::clone(&shared_state.waker));
    let cgroup_tree = ledger_service.cgroup_tree();
    let ledger = ledger_service.start(runtimes.clone(), reporter.clone(), logs.clone())?;
    let mut sampler =
        Sampler::new(config, runtimes.clone(), cgroup_tree, Arc::clone(&shared_state), &independent);
    if let Some(reporter) = &reporter {
        sampler.show_reporter(Arc::clone(reporter), config.reporter.auto_cleanup);
    }
    if let Some(logs) = logs {
        sampler.show_inventory_to(logs);
    }
    let exporter =
        start_exporter(config, snapshot_cache, Arc::clone(&shared_state), event_reader.clone(), spans)?;
    let reports = match &event_reader {
        Some(event_reader) => {
            let host = otlp::resource_detection::host(&config.host_paths, None);
            let name = if host.name.is_empty() { host.instance } else { host.name };
            Some(
                RunReports::start(&config.report, &name, event_reader, &shared_state)
                    .context("the thread of the reports failed to start")?,
            )
        }
        None => None,
    };
    let otlp_stats = exporter.as_ref().map(OtlpExporter::stats);
    if let Some(otlp_stats) = &otlp_stats {
        sampler.show_otlp_stats(Arc::clone(otlp_stats));
    }
    independent.add(shared_state, otlp_stats);
    let release = independent.driver_state();
    let stalls = serve_through_stalls(independent, Arc::clone(snapshot_cache), stale_after(config));
    tokio::spawn(essential("stalls", stalls));
    let first_snapshot = Arc::new(Notify::new());
    let (cache, first) = (Arc::clone(snapshot_cache), Arc::clone(&first_snapshot));
    let sampler = start_sampler(sampler, config.sample_interval, cache, first)?;
    let cache = Arc::clone(snapshot_cache);
    let all = router(config, cache, event_reader, release, reporter, servers.access_control());
    servers.complete(all, bind_control_socket(config));
    Ok(ServiceParts { runtimes, sampler, ledger, exporter, reports, first_snapshot })
}

/// Opens the ledger, which may wait for a disk, or for the previous process to end; `None` if a signal came first. If it takes
/// long, the metrics that need no ledger are served meanwhile.
async fn open_ledger(
    config: &Config,
    stop_signals: &mut StopSignals,
    independent: &mut IndependentSources,
    snapshot_cache: &SnapshotCache,
) -> anyhow::Result<Option<LedgerService>> {
    let path = config.state.path.clone().unwrap_or_default();
    let config = config.clone();
    let opening = tokio::task::spawn_blocking(move || LedgerService::open(&config));
    let meanwhile = async {
        tokio::time::sleep(SLOW_LEDGER).await;
        let advice =
            "containers are not sampled until then; its disk hangs, or another memledger still runs on it";
        tracing::warn!(path = %path.display(), advice, "opening the ledger takes long");
        refresh_partial(independent, snapshot_cache, Duration::ZERO).await;
    };
    tokio::select! {
        opened = opening => Ok(Some(opened.context("the ledger failed to open")??)),
        _ = stop_signals.next() => Ok(None),
        () = meanwhile => bail!("the metrics without a ledger ended unexpectedly"),
    }
}

/// Waits for a reason to stop, and returns it: the name of a signal, or that the container has to be started again.
///
/// # Errors
/// A server ended, which runs as long as memledger.
async fn stop_request(
    stop_signals: &mut StopSignals,
    servers: &mut JoinSet<()>,
    runtimes: &[Arc<RuntimeState>],
) -> anyhow::Result<&'static str> {
    let mut stale: FuturesUnordered<_> =
        runtimes.iter().map(|runtime| runtime.stale_socket.notified()).collect();
    tokio::select! {
        Some(()) = stale.next() => Ok(STALE_SOCKET),
        signal = stop_signals.next() => Ok(signal),
        // disabled without a listener: there is no server then
        Some(ended) = servers.join_next() => bail!("the HTTP server ended unexpectedly: {ended:?}"),
    }
}

/// Stops what consumes snapshots and events: the export and the reports before the ledger, which stores the acknowledged positions.
async fn stop_consumers(
    exporter: Option<OtlpExporter>,
    reports: Option<RunReports>,
    ledger: ServiceHandle,
    mut servers: JoinSet<()>,
    driver_state: &DriverState,
) {
    if let Some(exporter) = exporter {
        let _ = tokio::task::spawn_blocking(move || exporter.stop()).await;
    }
    if let Some(reports) = reports {
        let _ = tokio::task::spawn_blocking(move || reports.stop()).await;
    }
    let flushed = tokio::task::spawn_blocking(move || ledger.stop(LEDGER_FLUSH_TIMEOUT));
    let finished = async { while servers.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, finished).await;
    let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, await_closed_driver(driver_state)).await;
    let _ = flushed.await;
}

/// Waits until no NVML process runs. One that outlives memledger is killed by the kernel, but would never be reaped.
async fn await_closed_driver(driver_state: &DriverState) {
    while !driver_state.is_closed() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Releases the GPU driver at each SIGUSR1.
async fn release_driver_on_signal(mut requests: Signal, driver_state: Arc<DriverState>, span: Duration) {
    while requests.recv().await.is_some() {
        tracing::info!(signal = "SIGUSR1", ?span, "releasing the GPU driver");
        driver_state.request(Timestamp::now(), span);
    }
}
