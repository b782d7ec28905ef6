//! Where `ps` and `top` have their overview from: `memledger serve`, or without one this process, which samples the host itself.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::runtime::Runtime;

use super::control;
use super::event_source::HostLedger;
use super::serve::start_runtimes;
use crate::clock::Timestamp;
use crate::config::Config;
use crate::events::LedgerEvent;
use crate::gpu::DriverState;
use crate::ledger::service::{LedgerService, ServiceHandle};
use crate::ledger::store::Query;
use crate::overview::history::Recorder;
use crate::overview::{Details, Overview};
use crate::sampler::stalled::IndependentSources;
use crate::sampler::{CycleOutcome, Sampler, run_until};
use crate::snapshot::Snapshot;

/// How old the kills may be that are shown, in seconds.
const KILLS_SINCE: f64 = 86_400.0;
/// How long the service may take to respond.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Time between two samples of one's own.
const OWN_INTERVAL: Duration = Duration::from_secs(1);
/// Samples after which rates are known, and the longest wait for them.
const SAMPLES_FOR_RATES: u32 = 2;
const SAMPLES_TIMEOUT: Duration = Duration::from_secs(20);
/// Age from which on a sample is no longer shown.
const MAX_AGE: Duration = Duration::from_secs(16);
/// How long a driver may take to be closed at the end.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

/// Where the overview comes from.
pub enum OverviewSource {
    /// The memledger that runs on this host.
    Served(Box<Config>),
    /// This process.
    Own(Box<OwnSampler>),
}

impl OverviewSource {
    /// Queries the memledger that runs. Where none responds in time, this process begins to sample, and has taken the first samples.
    ///
    /// # Errors
    /// The one that runs refuses, or this process cannot sample.
    pub fn open(config: &Config) -> anyhow::Result<Self> {
        if control::is_available(config, TIMEOUT) {
            match control::request_within(config, "GET", "/api/v1/overview", "application/json", TIMEOUT) {
                Ok((200, _)) => return Ok(Self::Served(Box::new(config.clone()))),
                Ok((status, text)) if status != 503 => bail!("{}", text.trim_end()),
                _ => {} // it starts, or hangs
            }
        }
        let sampler = OwnSampler::start(config)?;
        sampler.wait_for_rates()?;
        Ok(Self::Own(Box::new(sampler)))
    }

    /// Returns whether `memledger serve` is the source.
    pub fn is_served(&self) -> bool {
        matches!(self, Self::Served(_))
    }

    /// Returns the newest overview, with rates where two samples were taken.
    ///
    /// # Errors
    /// There is none.
    pub fn overview(&self, details: Details<'_>) -> anyhow::Result<Overview> {
        let config = match self {
            Self::Own(sampler) => return sampler.overview(details),
            Self::Served(config) => config,
        };
        let target = match details {
            Details::None => "/api/v1/overview".to_owned(),
            Details::Processes => "/api/v1/overview?processes".to_owned(),
            Details::One(id) => format!("/api/v1/overview?container={}", control::percent_encoded(id)),
        };
        match control::request_within(config, "GET", &target, "application/json", TIMEOUT)? {
            (200, body) => serde_json::from_str(&body).context("memledger serve is of another version"),
            (_, text) => bail!("{}", text.trim_end()),
        }
    }
}

/// The newest OOM kills and CUDA out-of-memory errors.
#[derive(Default)]
pub struct NewestKills {
    /// Those of the last day, the newest first.
    pub events: Vec<LedgerEvent>,
    /// There may be more: the ledger, the kernel log or a runtime cannot be read, or does not reach back a day.
    pub is_incomplete: bool,
}

impl NewestKills {
    /// Reads them.
    pub fn read(config: &Config) -> Self {
        let now = Timestamp::now();
        let since = Some(now.unix_seconds() - KILLS_SINCE);
        let query = Query { since, only_notable: true, ..Query::default() };
        let found = HostLedger::open(config, now, None).map_err(anyhow::Error::from);
        let found = found.and_then(|host| {
            Ok((host.ledger.events(&query)?, host.is_unreadable() || host.coverage.is_incomplete()))
        });
        let is_incomplete = found.as_ref().map_or(true, |(_, is_incomplete)| *is_incomplete);
        let mut kills = found.map_or(vec![], |(kills, _)| kills);
        kills.retain(|event| matches!(event, LedgerEvent::OomKill(_) | LedgerEvent::CudaOom(_)));
        kills.sort_by(|one, other| other.at().total_cmp(&one.at()));
        Self { events: kills, is_incomplete }
    }

    /// Returns the line above them.
    pub fn title(&self) -> &'static str {
        match (self.events.is_empty(), self.is_incomplete) {
            (true, false) => "No OOM kill in the last 24 hours.",
            (true, true) => {
                "No OOM kill is known; not all of the last 24 hours can be read: memledger events says what is missing."
            }
            (false, _) => "Newest OOM kills and CUDA out-of-memory errors (`memledger why NAME` explains):",
        }
    }
}

/// What the sampling thread passes on.
#[derive(Default)]
struct Sampled {
    newest: Option<Snapshot>,
    recorder: Option<Recorder>,
    samples: u32,
    is_failing: bool,
}

/// A sampler like that of `memledger serve`, without its ledger, listeners and socket.
pub struct OwnSampler {
    sampled: Arc<Mutex<Sampled>>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
    driver_state: Arc<DriverState>,
    ledger: Option<ServiceHandle>,
    runtime: Option<Runtime>,
}

impl OwnSampler {
    fn start(config: &Config) -> anyhow::Result<Self> {
        let mut config = config.clone();
        (config.state.path, config.sample_interval) = (None, OWN_INTERVAL);
        config.collectors.remove("own");
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let guard = runtime.enter();
        let driver_state = Arc::new(DriverState::default());
        let independent = IndependentSources::new(&config, Arc::clone(&driver_state), Arc::default());
        let service = LedgerService::open(&config)?.without_past();
        let (shared_state, cgroup_tree) = (service.shared_state(), service.cgroup_tree());
        let sources = start_runtimes(&config, &service);
        let ledger = service.start(sources.clone(), None, None)?;
        let sampler = Sampler::new(&config, sources, cgroup_tree, shared_state, &independent);
        let sampled = Arc::new(Mutex::new(Sampled {
            recorder: Some(Recorder::with_interval(OWN_INTERVAL.as_secs_f64())),
            ..Sampled::default()
        }));
        let stop = Arc::new(AtomicBool::new(false));
        let (results, stopped) = (Arc::clone(&sampled), Arc::clone(&stop));
        let body = move || {
            run_until(sampler, OWN_INTERVAL, &stopped, |outcome| {
                let mut sampled = results.lock().unwrap_or_else(PoisonError::into_inner);
                match outcome {
                    CycleOutcome::Finished(snapshot) => {
                        if let Some(recorder) = &mut sampled.recorder {
                            recorder.add(&snapshot);
                        }
                        sampled.newest = Some(snapshot);
                        sampled.samples += 1;
                        sampled.is_failing = false;
                    }
                    CycleOutcome::Failing => sampled.is_failing = true,
                }
            });
        };
        let thread = std::thread::Builder::new().name("cycle".into()).spawn(body)?;
        drop(guard);
        let (thread, ledger, runtime) = (Some(thread), Some(ledger), Some(runtime));
        Ok(Self { sampled, stop, thread, driver_state, ledger, runtime })
    }

    /// Waits until rates are known.
    ///
    /// # Errors
    /// Sampling hangs, or fails.
    fn wait_for_rates(&self) -> anyhow::Result<()> {
        let began = Timestamp::now();
        loop {
            let sampled = self.sampled.lock().unwrap_or_else(PoisonError::into_inner);
            if sampled.samples >= SAMPLES_FOR_RATES {
                return Ok(());
            }
            if sampled.is_failing {
                bail!("sampling this host fails, which is a bug in memledger; memledger doctor may say more");
            }
            drop(sampled);
            if Timestamp::now().since(began) > SAMPLES_TIMEOUT {
                bail!(
                    "sampling this host takes longer than {SAMPLES_TIMEOUT:?}; memledger doctor shows what hangs"
                );
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn overview(&self, details: Details<'_>) -> anyhow::Result<Overview> {
        let sampled = self.sampled.lock().unwrap_or_else(PoisonError::into_inner);
        let (Some(newest), Some(recorder)) = (&sampled.newest, &sampled.recorder) else {
            bail!("the first sample is not finished yet");
        };
        let age = Timestamp::now().since(newest.finished);
        if sampled.is_failing || age > MAX_AGE {
            bail!("the newest sample is {} s old: sampling this host hangs or fails", age.as_secs());
        }
        Ok(Overview::from_snapshot(newest, recorder.figures(newest, details.history_of()), details))
    }
}

impl Drop for OwnSampler {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
        }
        self.driver_state.stop();
        if let Some(ledger) = self.ledger.take() {
            ledger.stop(CLOSE_TIMEOUT);
        }
        let began = Timestamp::now();
        while !self.driver_state.is_closed() && Timestamp::now().since(began) < CLOSE_TIMEOUT {
            std::thread::sleep(Duration::from_millis(5));
        }
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
