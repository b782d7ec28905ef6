//! Starts what delivers data to the cycle and the ledger, and the cycle itself.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

use crate::clock::Timestamp;
use crate::config::Config;
use crate::discover::{Hierarchy, RuntimeKind, RuntimeState, Version, cri, docker, run};
use crate::host::Waker;
use crate::host::panics::{essential, run_essential};
use crate::http::SnapshotCache;
use crate::ledger::service::LedgerService;
use crate::reporter::{self, ReporterState};
use crate::sampler::stalled::IndependentSources;
use crate::sampler::{CycleOutcome, Sampler, run_until};
use crate::text::error_chain;

/// How often a stalled cycle is looked for.
const STALL_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Starts to receive what processes report from inside. A failure is only a warning: everything else works without.
/// `waker` is signalled with each out-of-memory error.
pub(super) fn start_reporter(config: &Config, waker: Arc<Waker>) -> Option<Arc<ReporterState>> {
    let directory = config.reporter.directory.as_deref();
    if directory.is_none() && config.reporter.auto_cleanup.is_some() {
        tracing::warn!("--reporter.auto-cleanup does nothing while --reporter.directory is empty");
    }
    let directory = directory?;
    let hierarchy = Hierarchy::detect(&config.host_paths).ok()?; // its absence was logged when the ledger was opened
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
pub(in crate::cli) fn start_runtimes(
    config: &Config,
    ledger_service: &LedgerService,
) -> Vec<Arc<RuntimeState>> {
    let shared_state = ledger_service.shared_state();
    let mut sources = Vec::new();
    if !config.cri.sockets.is_empty() {
        let source = RuntimeState::new(RuntimeKind::Cri, Arc::clone(&shared_state.waker));
        let memory = cri::CriResumeState::new(
            ledger_service.since(RuntimeKind::Cri, ""),
            ledger_service.running(RuntimeKind::Cri),
        );
        let follow = cri::follow(config.cri.clone(), config.filter.clone(), Arc::clone(&source), memory);
        tokio::spawn(essential(RuntimeKind::Cri.as_str(), follow));
        if let Some(socket) = config.cri.pod_resources.clone() {
            tokio::spawn(essential("pod resources", cri::pod_resources::follow(socket, Arc::clone(&source))));
        }
        sources.push(source);
    }
    for endpoints in config.endpoints.chunk_by(|one, other| one.runtime == other.runtime) {
        let Some(runtime) = endpoints.first().map(|endpoint| endpoint.runtime) else { continue };
        let source = RuntimeState::new(runtime, Arc::clone(&shared_state.waker));
        let cursors: HashMap<PathBuf, f64> = endpoints
            .iter()
            .flat_map(|endpoint| docker::matches(&endpoint.socket))
            .filter_map(|socket| Some((socket.clone(), ledger_service.since(runtime, socket.to_str()?)?)))
            .collect();
        let since = move |socket: &Path| cursors.get(socket).copied();
        let open = ledger_service.running(runtime);
        let (filter, shared) = (config.filter.clone(), Arc::clone(&source));
        let follow = docker::follow_all(endpoints.to_vec(), filter, shared, since, open);
        tokio::spawn(essential(runtime.as_str(), follow));
        sources.push(source);
    }
    sources.push(start_runs(config, ledger_service));
    sources
}

/// Starts to follow what `memledger run` records.
fn start_runs(config: &Config, ledger_service: &LedgerService) -> Arc<RuntimeState> {
    let source = RuntimeState::new(RuntimeKind::Run, Arc::clone(&ledger_service.shared_state().waker));
    let resume = run::RunResumeState::new(
        ledger_service.since(RuntimeKind::Run, ""),
        ledger_service.running(RuntimeKind::Run),
    );
    let spools = run::spool::all(config.run.spool.as_deref());
    let (filter, host_paths) = (config.filter.clone(), config.host_paths.clone());
    let follow = run::follow(spools, filter, host_paths, Arc::clone(&source), resume);
    tokio::spawn(essential(RuntimeKind::Run.as_str(), follow));
    source
}

/// Creates the directory in which every user may record runs. Without it `memledger run` records them below the user's home.
pub(super) fn create_run_spool(config: &Config) {
    let Some(spool) = &config.run.spool else { return };
    if let Err(error) = run::spool::create_shared(spool) {
        tracing::debug!(spool = %spool.display(), %error, "no directory for the runs of all users");
    }
}

/// Keeps the metrics that need no cycle up to date while none finishes, for ever.
pub(super) async fn serve_through_stalls(
    mut sources: IndependentSources,
    snapshot_cache: Arc<SnapshotCache>,
    stale_after: Duration,
) {
    let nearly_stale = stale_after.saturating_sub(2 * STALL_CHECK_INTERVAL); // ready when the snapshot is stale
    refresh_partial(&mut sources, &snapshot_cache, nearly_stale).await;
}

/// Serves the metrics that need no cycle once the newest snapshot is older than `max_age`; until the future is dropped.
pub(super) async fn refresh_partial(
    sources: &mut IndependentSources,
    snapshot_cache: &SnapshotCache,
    max_age: Duration,
) {
    loop {
        tokio::time::sleep(STALL_CHECK_INTERVAL).await;
        snapshot_cache.refresh_partial(max_age, |last| sources.snapshot(last, Timestamp::now()));
    }
}

/// The thread of the cycle.
pub(super) struct SamplerThread {
    stop: Arc<AtomicBool>,
    thread: std::thread::Thread,
}

impl SamplerThread {
    /// Does not wait for the thread, which may be in a slow read.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.unpark();
    }
}

pub(super) fn start_sampler(
    sampler: Sampler,
    interval: Duration,
    snapshot_cache: Arc<SnapshotCache>,
    first: Arc<Notify>,
) -> std::io::Result<SamplerThread> {
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let publish = move |outcome| match outcome {
        CycleOutcome::Finished(snapshot) => {
            snapshot_cache.publish(snapshot);
            first.notify_one();
        }
        CycleOutcome::Failing => snapshot_cache.set_failing(),
    };
    let body = move || run_essential("cycle", || run_until(sampler, interval, &stopped, publish));
    let handle = std::thread::Builder::new().name("cycle".into()).spawn(body)?;
    Ok(SamplerThread { stop, thread: handle.thread().clone() })
}
