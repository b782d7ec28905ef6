//! `memledger serve`: the main job.

use std::error::Error;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Notify, oneshot, watch};

use super::report;
use crate::clock::Moment;
use crate::collect::gpu::Control;
use crate::config::{Config, OtlpSettings};
use crate::cycle::{Sampler, run_until};
use crate::discover::{Source, cri, docker};
use crate::export::otlp::{Origins, resource};
use crate::host::privileges;
use crate::ledger::desk::Desk;
use crate::ledger::keeper::Keeper;
use crate::ledger::store::Archive;
use crate::push::{self, Push, Tally};
use crate::serve::{self, Door, Published, router, stale_after};

/// Requests under way get so long to finish after a signal.
const LAST_REQUESTS: Duration = Duration::from_millis(500);

/// The ledger's last step gets so long to reach the disk.
const LAST_FACTS: Duration = Duration::from_secs(2);

/// Ports below this are for those with CAP_NET_BIND_SERVICE.
const FIRST_FREE_PORT: u16 = 1024;

pub fn run(config: Config) -> anyhow::Result<ExitCode> {
    give_up_privileges(&config); // before any other thread exists
    crate::host::raise_open_file_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let outcome = runtime.block_on(run_on_runtime(config));
    // a renderer or a look-up may still run: nobody waits for it
    runtime.shutdown_background();
    outcome
}

/// A refusal is a warning: memledger does no more than before.
fn give_up_privileges(config: &Config) {
    let is_low = |address: &SocketAddr| (1..FIRST_FREE_PORT).contains(&address.port());
    match privileges::give_up(config.listen.iter().any(is_low)) {
        Ok(kept) => tracing::info!(kept, "capabilities that are not needed were given up"),
        Err(error) => {
            let reason = error.source().map(ToString::to_string).unwrap_or_default();
            tracing::warn!(%error, reason, "capabilities that are not needed are still there");
        }
    }
}

async fn run_on_runtime(config: Config) -> anyhow::Result<ExitCode> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let asked_to_let_go = signal(SignalKind::user_defined1())?;
    let account = Arc::default();
    let door = Arc::new(Door::new(&config, Arc::clone(&account))?);
    let listeners = listen(&config.listen)?;
    let addresses: Vec<SocketAddr> =
        listeners.iter().filter_map(|listener| listener.local_addr().ok()).collect();
    for address in &addresses {
        tracing::info!(%address, "listening");
    }

    for ignored in &config.otlp_ignored {
        tracing::warn!("{ignored}");
    }
    let opening = {
        let config = config.clone();
        tokio::task::spawn_blocking(move || Keeper::open(&config)) // it may wait for its predecessor to end
    };
    let keeper = tokio::select! {
        opened = opening => opened.context("the ledger was not opened")??,
        _ = terminate.recv() => return Ok(ExitCode::SUCCESS),
        _ = interrupt.recv() => return Ok(ExitCode::SUCCESS),
    };
    let (desk, archive) = (keeper.desk(), keeper.archive());
    let sources = follow_runtimes(&config, &keeper);
    let published = Arc::new(Published::default());
    let first = Arc::new(Notify::new());
    let (alive, ledger_ended) = oneshot::channel::<()>();
    let begun = begun_by(&config, &keeper);
    let keeping = keeper.start(sources.clone(), alive)?;
    let control = Arc::new(Control::default());
    let mut sampler = Sampler::new(&config, sources, Arc::clone(&desk), &control, account);
    let push = match &config.otlp {
        Some(settings) => {
            let push = start_push(&config, settings, begun, &published, desk, archive.clone())?;
            sampler.tell_of(push.1);
            Some(push.0)
        }
        None => None,
    };
    let (cycle, cycle_ended) =
        start_cycle(sampler, config.sample_interval, Arc::clone(&published), Arc::clone(&first))?;
    let driver = config.collectors.contains("gpu").then(|| Arc::clone(&control));
    tokio::spawn(introduce(config.clone(), addresses, first, driver, Arc::clone(&door)));

    let (stop, stopped) = watch::channel(false);
    let mut servers = tokio::task::JoinSet::new();
    for listener in listeners {
        let mut stopped = stopped.clone();
        let stop = async move { drop(stopped.wait_for(|stop| *stop).await) };
        let router = router(&config, Arc::clone(&published), archive.clone(), Arc::clone(&control), &door);
        servers.spawn(serve::serve(listener, router, Arc::clone(&door), stop));
    }
    tokio::spawn(door.follow());
    tokio::spawn(let_go_when_asked(asked_to_let_go, control, config.gpu.release_for));
    let name = tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
        _ = ledger_ended => bail!("the ledger ended by itself, which is a bug; the log has its last words"),
        _ = cycle_ended => bail!("sampling ended by itself, which is a bug; the log has its last words"),
        ended = servers.join_next() => bail!("the HTTP server ended by itself: {ended:?}"),
    };
    tracing::info!(signal = name, "stopping");
    cycle.stop();
    let _ = stop.send(true);
    if let Some(push) = push {
        let _ = tokio::task::spawn_blocking(move || push.stop()).await; // before the ledger, which notes what was taken
    }
    let last_facts = tokio::task::spawn_blocking(move || keeping.stop(LAST_FACTS));
    let finished = async { while servers.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(LAST_REQUESTS, finished).await;
    let _ = last_facts.await;
    tracing::info!("stopped");
    Ok(ExitCode::SUCCESS)
}

/// What the push goes on from: since when the ledger counts, and the last event that its endpoint has taken.
fn begun_by(config: &Config, keeper: &Keeper) -> (f64, u64) {
    let follower = config.otlp.as_ref().map(push::follower).unwrap_or_default();
    (keeper.begun(), keeper.acknowledged(&follower))
}

/// Starts the push over OTLP.
fn start_push(
    config: &Config,
    settings: &OtlpSettings,
    (begun, acknowledged): (f64, u64),
    published: &Arc<Published>,
    desk: Arc<Desk>,
    archive: Option<Archive>,
) -> anyhow::Result<(Push, Arc<Tally>)> {
    let tally = Arc::new(Tally::default());
    let host = push::host::host(&config.roots, config.listen.first().map(SocketAddr::port));
    let boot = config.roots.boot_time().unwrap_or_default(); // 0 is "not known" in OTLP
    let now = Moment::now().unix_nanos();
    let shared = push::Shared {
        published: Arc::clone(published),
        stale_after: stale_after(config),
        desk,
        archive,
        follower: push::follower(settings),
        acknowledged: acknowledged.into(),
        resource: resource(&host, &settings.resource),
        origins: Origins { memledger: now, boot: boot * 1_000_000_000, ledger: (begun * 1e9) as u64 },
        tally: Arc::clone(&tally),
    };
    for (signal, target) in [("metrics", &settings.metrics), ("logs", &settings.logs)] {
        if let Some(target) = target {
            let protocol = if target.grpc { "grpc" } else { "http/protobuf" };
            tracing::info!(signal, endpoint = %target.endpoint, protocol, "pushing over OTLP");
        }
    }
    Ok((Push::start(settings.clone(), shared).context("no thread for OTLP")?, tally))
}

/// Starts a task for each runtime.
fn follow_runtimes(config: &Config, keeper: &Keeper) -> Vec<Arc<Source>> {
    let desk = keeper.desk();
    let mut sources = Vec::new();
    if !config.cri.sockets.is_empty() {
        let source = Source::new(cri::RUNTIME, Arc::clone(&desk.bell));
        let memory = cri::Memory::new(keeper.since(cri::RUNTIME), keeper.running(cri::RUNTIME));
        tokio::spawn(cri::follow(config.cri.clone(), config.filter.clone(), Arc::clone(&source), memory));
        if !config.cri.pod_resources.as_os_str().is_empty() {
            let socket = config.cri.pod_resources.clone();
            tokio::spawn(cri::pod_resources::follow(socket, Arc::clone(&source)));
        }
        sources.push(source);
    }
    for endpoint in &config.endpoints {
        let source = Source::new(endpoint.runtime, Arc::clone(&desk.bell));
        let memory = docker::Memory::new(keeper.since(endpoint.runtime), keeper.running(endpoint.runtime));
        tokio::spawn(docker::follow(endpoint.clone(), config.filter.clone(), Arc::clone(&source), memory));
        sources.push(source);
    }
    sources
}

/// Lets go of the GPU driver at each SIGUSR1.
async fn let_go_when_asked(mut asked: Signal, control: Arc<Control>, span: Duration) {
    while asked.recv().await.is_some() {
        tracing::info!(signal = "SIGUSR1", ?span, "letting go of the GPU driver");
        control.request(Moment::now(), span);
    }
}

fn listen(addresses: &[SocketAddr]) -> anyhow::Result<Vec<TcpListener>> {
    let mut listeners = Vec::new();
    for address in addresses {
        let bound = match serve::listen(*address) {
            // a host without IPv6: all addresses are then those of IPv4
            Err(error)
                if error.raw_os_error() == Some(rustix::io::Errno::AFNOSUPPORT.raw_os_error())
                    && address.ip().is_unspecified() =>
            {
                serve::listen((std::net::Ipv4Addr::UNSPECIFIED, address.port()).into())
            }
            other => other,
        };
        let advice = match &bound {
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
                ": another program, perhaps another memledger, serves there; stop it or choose another with --web.listen-address"
            }
            _ => "",
        };
        listeners.push(bound.with_context(|| format!("cannot listen on {address}{advice}"))?);
    }
    Ok(listeners)
}

struct Cycle {
    stop: Arc<AtomicBool>,
    thread: std::thread::Thread,
}

impl Cycle {
    /// The thread may be in a slow read; nobody waits for it.
    fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.unpark();
    }
}

fn start_cycle(
    sampler: Sampler,
    interval: Duration,
    published: Arc<Published>,
    first: Arc<Notify>,
) -> anyhow::Result<(Cycle, oneshot::Receiver<()>)> {
    let (alive, ended) = oneshot::channel::<()>();
    let stop = Arc::new(AtomicBool::new(false));
    let theirs = Arc::clone(&stop);
    let handle = std::thread::Builder::new().name("cycle".into()).spawn(move || {
        let _alive = alive; // dropped when the thread ends, also by a panic
        run_until(sampler, interval, &theirs, |snapshot| {
            published.publish(snapshot);
            first.notify_one();
        });
    })?;
    Ok((Cycle { stop, thread: handle.thread().clone() }, ended))
}

/// One screen after the first snapshot: what was found, what is missing, where to look.
async fn introduce(
    config: Config,
    addresses: Vec<SocketAddr>,
    first: Arc<Notify>,
    driver: Option<Arc<Control>>,
    door: Arc<Door>,
) {
    first.notified().await;
    let checks = report::examine(&config, report::Look::Short, driver.as_deref()).await;
    let mut text = report::render(&checks, report::Look::Short);
    for address in addresses {
        let host =
            if address.ip().is_unspecified() { "localhost".to_owned() } else { address.ip().to_string() };
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        let (scheme, port, path) = (door.scheme(), address.port(), &config.telemetry_path);
        text.push_str(&format!("\nMetrics: {scheme}://{host}:{port}{path}\n"));
    }
    println!("{text}");
}
