//! The ledger's thread: reads the sources, runs the reconciler, has its results written ([`LedgerWriter`]), and only then
//! publishes the figures.
//!
//! It runs on its own thread so that a kill is noticed when the kernel logs it rather than at the next cycle, and so
//! that neither a slow disk nor a hanging read in a cycle delays the other. It waits in poll(2) on the waker that the
//! runtimes' tasks and the kernel log reader use; in addition it reads the kernel's counter once per interval.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};

use super::events::{Kill, KillOwner, LedgerEvent};
use super::exchange::{LedgerFigures, SharedState};
use super::host_history;
use super::interval::LogClock;
use super::kmsg_reader::KmsgReader;
use super::reconcile::{Reconciler, ReconcilerConfig};
use super::store::{EventReader, LoadedState, StoreError};
use super::victim_probe::VictimProbe;
use super::writer::LedgerWriter;
use crate::clock::Timestamp;
use crate::collect::cgroup_oom_events::CgroupCounters;
use crate::collect::kernel_log::{KernelLog, LogBackend, LogPosition};
use crate::collect::vmstat_oom::OomCounter;
use crate::config::{Config, KernelLogChoice};
use crate::container_logs::ContainerLogs;
use crate::discover::{ConnectionState, ContainerId, EventKind, Hierarchy, RuntimeEvent, RuntimeState};
use crate::host::HostPaths;
use crate::host::panics::run_essential;
use crate::reporter::ReporterState;

/// Figures are published at least so often: old ones are those of a ledger that hangs.
const PUBLISH_INTERVAL: Duration = Duration::from_secs(10);
/// Interval between steps while something is pending.
const PENDING_INTERVAL: Duration = Duration::from_millis(200);
/// Longest interval between reads of syslog(2) and of the kernel's counter, also with a longer sampling interval.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Shortest interval between reads of the cgroups' counters because of notifications.
const SWEEP_DELAY: Duration = Duration::from_millis(50);
/// Delay before a source that failed is opened again.
const REOPEN_DELAY: Duration = Duration::from_secs(10);
/// Maximum number of runtime events that are kept for a ledger that cannot be read yet.
const MAX_KEPT_EVENTS: usize = 10_000;
/// Minimum time between two warnings that the kernel log was overwritten.
const OVERRUN_WARNING_INTERVAL: Duration = Duration::from_secs(600);

/// The ledger service. [`LedgerService::start`] moves it to its thread.
#[derive(Debug)]
pub struct LedgerService {
    shared_state: Arc<SharedState>,
    reconciler: Reconciler,
    writer: LedgerWriter,
    host_paths: HostPaths,
    sources: Vec<Arc<RuntimeState>>,
    /// Where processes report out-of-memory errors.
    reporter: Option<Arc<ReporterState>>,
    logs: Option<Arc<ContainerLogs>>,
    use_runtimes: bool,
    log_choice: KernelLogChoice,
    log: Option<KmsgReader>,
    log_failed: Option<Timestamp>,
    overrun_logged: Option<Timestamp>,
    counter: Option<OomCounter>,
    counters: Option<CgroupCounters>,
    counters_up: bool,
    hierarchy: Option<Hierarchy>,
    last_sweep: Option<Timestamp>,
    last_publish: Option<Timestamp>,
    interval: Duration,
    /// Runtime events since the start, for a ledger that cannot be read yet.
    kept_events: Vec<RuntimeEvent>,
    /// For a new ledger: the configuration with which the time before it is read.
    past: Option<Box<Config>>,
}

/// A handle that stops the thread.
#[derive(Debug)]
pub struct ServiceHandle {
    stop: Arc<AtomicBool>,
    shared_state: Arc<SharedState>,
    thread: std::thread::JoinHandle<()>,
}

impl ServiceHandle {
    /// Lets the thread finish its step, waiting no longer than `timeout`: a stuck disk must not delay the exit.
    pub fn stop(self, timeout: Duration) {
        self.stop.store(true, Ordering::Relaxed);
        self.shared_state.waker.wake();
        let began = Timestamp::now();
        while !self.thread.is_finished() && Timestamp::now().since(began) < timeout {
            std::thread::park_timeout(Duration::from_millis(5));
        }
    }
}

impl LedgerService {
    /// Opens the ledger in the configured directory. If that fails, logs an error and keeps the ledger in memory.
    ///
    /// # Errors
    /// Another memledger writes to the same ledger: two would count everything twice.
    pub fn open(config: &Config) -> Result<Self, StoreError> {
        let now = Timestamp::now();
        let (writer, stored) = LedgerWriter::open(&config.state, now)?;
        let is_new = stored.is_new() && writer.has_counts();
        let boot_id = config.host_paths.boot_id().unwrap_or_default();
        let reconciler_config = ReconcilerConfig {
            boot_id: boot_id.into(),
            booted_at: now.unix_seconds_of_kernel(0),
            keep_ended: config.keep_ended,
            filter: config.filter.clone(),
            host_pids: config.host_paths.in_initial_pid_namespace(),
            without_runtimes: !config.oom.runtime,
        };
        let hierarchy = Hierarchy::detect(&config.host_paths).ok();
        let log_start = newest_log_stamp(config).unwrap_or(now.kernel_usec());
        let shared_state = Arc::new(SharedState::new(log_start));
        Ok(Self {
            reconciler: Reconciler::new(reconciler_config, &stored, now, log_start),
            shared_state,
            writer,
            host_paths: config.host_paths.clone(),
            sources: vec![],
            reporter: None,
            logs: None,
            use_runtimes: config.oom.runtime,
            log_choice: config.oom.kernel_log,
            log: None,
            log_failed: None,
            overrun_logged: None,
            counter: None,
            counters: hierarchy.as_ref().map(CgroupCounters::new),
            counters_up: false,
            hierarchy,
            last_sweep: None,
            last_publish: None,
            interval: config.sample_interval,
            kept_events: vec![],
            past: is_new.then(|| Box::new(config.clone())),
        })
    }

    /// Returns the state that is shared with the cycle.
    pub fn shared_state(&self) -> Arc<SharedState> {
        Arc::clone(&self.shared_state)
    }

    /// Returns a reader of the events.
    pub fn event_reader(&self) -> EventReader {
        self.writer.event_reader()
    }

    /// Returns the containers of a runtime that were running when the ledger was last written.
    pub fn running(&self, runtime: &str) -> HashSet<ContainerId> {
        self.reconciler.running(runtime).cloned().collect()
    }

    /// Returns the id of the last event that a follower has processed, also in an earlier run; 0 if there is none.
    pub fn cursor(&self, follower: &str) -> u64 {
        self.writer.cursor(follower)
    }

    /// Returns the Unix time of the last event of a runtime.
    pub fn since(&self, runtime: &str) -> Option<f64> {
        self.reconciler.last_event_times().get(runtime).copied()
    }

    /// Starts the thread.
    ///
    /// # Errors
    /// The thread cannot be created.
    pub fn start(
        mut self,
        sources: Vec<Arc<RuntimeState>>,
        reporter: Option<Arc<ReporterState>>,
        logs: Option<Arc<ContainerLogs>>,
    ) -> std::io::Result<ServiceHandle> {
        (self.sources, self.reporter, self.logs) = (sources, reporter, logs);
        if let Some(config) = self.past.take() {
            read_past(config, Arc::clone(&self.shared_state))?;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let (thread_stop, shared_state) = (Arc::clone(&stop), Arc::clone(&self.shared_state));
        let body = move || {
            while !thread_stop.load(Ordering::Relaxed) {
                self.step(Timestamp::now());
                self.wait();
            }
            let now = Timestamp::now();
            self.reconciler.mark_running_changed(); // the figures of their runs
            self.step(now);
            self.writer.commit(now, &mut self.reconciler, &self.shared_state); // the cursors of the followers
        };
        let thread = std::thread::Builder::new().name("ledger".into());
        let thread = thread.spawn(move || run_essential("ledger", body))?;
        Ok(ServiceHandle { stop, shared_state, thread })
    }

    /// Waits until an event arrives or the next step is due.
    fn wait(&mut self) {
        let must_poll = self.log.as_ref().is_none_or(|log| !log.wakes_ledger());
        let wait = match () {
            () if self.reconciler.has_pending() => PENDING_INTERVAL.min(self.interval),
            () if must_poll => POLL_INTERVAL.min(self.interval),
            () => self.interval.min(PUBLISH_INTERVAL),
        };
        let timeout =
            rustix::event::Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() };
        let files = [self.shared_state.waker.fd(), self.counters.as_ref().and_then(CgroupCounters::fd)];
        let mut files: Vec<_> = files
            .iter()
            .flatten()
            .map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN | PollFlags::PRI))
            .collect();
        if poll(&mut files, Some(&timeout)).is_err() {
            std::thread::park_timeout(PENDING_INTERVAL); // interrupted; never a busy loop
        }
        self.shared_state.waker.reset();
        if self.counters.as_ref().is_some_and(CgroupCounters::take_notifications) {
            // at once, because the cgroup may be gone soon; but a container at its limit sends hundreds in a second
            let since_last = self.last_sweep.map_or(SWEEP_DELAY, |at| Timestamp::now().since(at));
            std::thread::park_timeout(SWEEP_DELAY.saturating_sub(since_last));
            self.last_sweep = None;
        }
    }

    fn step(&mut self, now: Timestamp) {
        let reports = self.shared_state.take_cycles();
        let read = self.sources.iter().map(|source| source.drain_events());
        let runtime_events: Vec<Vec<RuntimeEvent>> =
            read.map(|events| if self.use_runtimes { events } else { keep_names(events) }).collect();
        self.reconciler.apply_cycles_and_events(now, &reports, &runtime_events);
        if !self.writer.has_counts() {
            let space = MAX_KEPT_EVENTS.saturating_sub(self.kept_events.len());
            self.kept_events.extend(runtime_events.into_iter().flatten().take(space));
        }
        self.read_log(now);
        if self.counter.is_none() {
            self.counter = OomCounter::open(&self.host_paths).ok();
        }
        // a cgroup may have counted a kill since the log was read: read that kill's record before the host's counter,
        // or the counter's growth would be taken for another kill
        if self.sweep(now) {
            self.read_log(now);
        }
        let counted = self.counter.as_mut().and_then(|counter| counter.read().ok());
        self.reconciler.apply_vmstat(Timestamp::now(), counted);
        self.reconciler.add_gpu_errors(self.shared_state.take_gpu_errors());
        if let Some(reporter) = &self.reporter {
            // before the errors, of which none comes after the end of a connection; only pending exits need it
            let has_pending = self.reconciler.has_pending();
            let connected = if has_pending { reporter.connected() } else { HashSet::new() };
            self.reconciler.add_cuda_ooms(Timestamp::now(), reporter.take_ooms());
            self.reconciler.set_connected(connected);
        }
        if let Some(logs) = &self.logs {
            let reading = logs.reading(); // before the errors, of which none comes after the end of a log
            self.reconciler.add_cuda_ooms(Timestamp::now(), logs.take_ooms());
            self.reconciler.set_logs_being_read(reading);
        }
        self.reconciler.add_past_kills(self.shared_state.take_past_kills());
        let has_changes = self.writer.write(now, &mut self.reconciler, &self.shared_state);
        if let Some(state) = self.writer.take_reloaded() {
            self.reload(&state);
        }
        if has_changes
            || self.last_publish.is_none_or(|at| now.since(at) >= self.interval.min(PUBLISH_INTERVAL))
        {
            self.last_publish = Some(now);
            self.publish(now, counted.is_some());
        }
    }

    /// Continues a ledger that could not be read before: its log position, its counts, and the containers that run.
    fn reload(&mut self, state: &LoadedState) {
        let now = Timestamp::now();
        self.reconciler = self.reconciler.reloaded(state, now, self.shared_state.log_start_usec());
        self.reconciler.apply_runtime_events(now, &std::mem::take(&mut self.kept_events));
        self.log = None;
        self.counters = self.hierarchy.as_ref().map(CgroupCounters::new);
        self.last_sweep = None;
    }

    /// Applies new kernel log entries.
    fn read_log(&mut self, now: Timestamp) {
        self.open_log(now);
        match self.log.as_ref().map(KmsgReader::take) {
            Some(Ok(taken)) => {
                let is_due =
                    self.overrun_logged.is_none_or(|logged| now.since(logged) >= OVERRUN_WARNING_INTERVAL);
                if taken.lost && is_due {
                    self.overrun_logged = Some(now);
                    tracing::warn!(
                        "kernel log overwritten before it was read; OOM kills are counted, but their records are missing"
                    );
                }
                if taken.rewound {
                    tracing::warn!(
                        "kernel log ends before the stored position: this machine was restored to an earlier state; the accounting starts anew"
                    );
                    self.reconciler.restart_accounting(now.kernel_usec());
                }
                if taken.lost {
                    self.reconciler.records_lost(taken.position);
                }
                self.reconciler.apply_log(now, Some(&taken.lines), taken.position);
                self.reconciler.set_log_clock(taken.clock);
            }
            Some(Err(error)) => {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(error, "kernel log read failed; retrying");
                self.log = None;
                self.log_failed = Some(now);
                self.reconciler.apply_log(now, None, LogPosition::default());
            }
            None => self.reconciler.apply_log(now, None, LogPosition::default()),
        }
    }

    fn open_log(&mut self, now: Timestamp) {
        let is_backing_off = self.log_failed.is_some_and(|failed| now.since(failed) < REOPEN_DELAY);
        if self.log.is_some() || is_backing_off || self.log_choice == KernelLogChoice::Off {
            return;
        }
        let backends = log_backends(self.log_choice);
        for backend in backends {
            match KernelLog::open(&self.host_paths, *backend) {
                Ok(mut log) => {
                    let mut clock = LogClock::default();
                    if let Some((position, known_clock)) = self.reconciler.log_position() {
                        log.resume_after(position);
                        clock = known_clock;
                    }
                    let probe = VictimProbe::new(&self.host_paths, self.hierarchy.as_ref());
                    self.log = Some(KmsgReader::start(log, clock, probe, &self.shared_state));
                    self.log_failed = None;
                    break;
                }
                Err(error) => {
                    if self.log_failed.is_none() {
                        let error: &dyn std::error::Error = &error;
                        tracing::warn!(
                            ?backend,
                            error,
                            "kernel log cannot be opened with this backend; `memledger doctor` shows what to do"
                        );
                    }
                }
            }
        }
        if self.log.is_none() {
            self.log_failed = Some(now);
        }
    }

    /// Reads the cgroups' OOM counters if that is due. Returns true if it was.
    fn sweep(&mut self, now: Timestamp) -> bool {
        let due = self.last_sweep.is_none_or(|at| now.since(at) >= self.interval);
        if !due && !self.reconciler.needs_cgroup_sweep() {
            return false;
        }
        let Some(counters) = &mut self.counters else { return false };
        counters.watch(self.log.is_none());
        self.last_sweep = Some(now);
        let is_container = |id: &ContainerId, path: &Path| self.reconciler.is_container_at(id, path);
        let (readings, outcome) = counters.sweep(now, is_container);
        if let (Err(error), true) = (&outcome, self.counters_up) {
            tracing::warn!(
                error = error as &dyn std::error::Error,
                "reading the cgroups' OOM counters failed"
            );
        }
        self.counters_up = outcome.is_ok();
        let hierarchical = counters.hierarchical();
        self.reconciler.apply_cgroup_counters(now, Timestamp::now(), &readings, hierarchical);
        true
    }

    fn publish(&self, now: Timestamp, counted: bool) {
        let has_counts = self.writer.has_counts();
        let mut figures = if has_counts { self.reconciler.figures(now) } else { LedgerFigures::default() };
        (figures.has_counts, figures.counted_since) = (has_counts, self.writer.started_at());
        // sources that are switched off, and runtimes that were never present, are left out: they must not raise an
        // alert
        let log = (self.log_choice != KernelLogChoice::Off).then(|| self.log.is_some());
        let connections = self.sources.iter().map(|source| source.lock().connection);
        let runtime = self.use_runtimes.then(|| runtimes_up(connections)).flatten();
        let sources = [
            ("kmsg", log),
            ("vmstat", Some(counted)),
            ("cgroup", Some(self.counters_up)),
            ("runtime", runtime),
        ];
        figures.sources = sources.into_iter().filter_map(|(source, up)| Some((source, up?))).collect();
        figures.store_up = self.writer.is_up();
        figures.unreadable_rows = self.writer.unreadable_rows();
        self.shared_state.publish(Timestamp::now(), figures);
    }
}

/// Reads the OOM kills that happened in this boot before the ledger began, on a thread of its own: the runtimes may take two
/// seconds, and the ledger must not miss a kill meanwhile. A kill just before the begin is added later, when its evidence is
/// complete.
fn read_past(config: Box<Config>, shared_state: Arc<SharedState>) -> std::io::Result<()> {
    let body = move || {
        let start_usec = shared_state.log_start_usec();
        let first = host_history::read(&config, Timestamp::now(), None, Vec::new).events;
        let (settled, open) = past_kills(&first, start_usec);
        let added: HashSet<u64> = settled.iter().map(|kill| kill.id).collect();
        shared_state.add_past_kills(settled);
        if open.is_empty() {
            return;
        }
        let began = Timestamp::now();
        let wait = Duration::from_secs_f64(host_history::SETTLED_AFTER);
        while Timestamp::now().since(began) < wait {
            std::thread::park_timeout(wait.saturating_sub(Timestamp::now().since(began)));
        }
        // with the names of the first read: a container may be gone by now
        let second = host_history::read(&config, Timestamp::now(), None, || first).events;
        let (mut settled, _) = past_kills(&second, start_usec);
        settled.retain(|kill| !added.contains(&kill.id));
        shared_state.add_past_kills(settled);
    };
    std::thread::Builder::new().name("past-kills".into()).spawn(body).map(drop)
}

/// Returns the kills whose records are not newer than this stamp: the settled ones, and those whose evidence may still arrive.
/// Later ones are read by the ledger itself.
fn past_kills(events: &[LedgerEvent], start_usec: u64) -> (Vec<Kill>, Vec<Kill>) {
    let kills = events.iter().filter_map(|event| match event {
        LedgerEvent::OomKill(kill) => {
            kill.kernel_usec.is_some_and(|usec| usec <= start_usec).then(|| kill.clone())
        }
        LedgerEvent::Exit(_) | LedgerEvent::GpuError(_) | LedgerEvent::CudaOom(_) => None,
    });
    kills.partition(|kill| match kill.owner {
        KillOwner::Pending => false,
        KillOwner::Container(_) => kill.victim.is_some(),
        KillOwner::Host | KillOwner::Unattributed => true,
    })
}

/// Returns whether any runtime is connected; `None` if none ever was.
fn runtimes_up(connections: impl IntoIterator<Item = ConnectionState>) -> Option<bool> {
    let known =
        connections.into_iter().filter(|it| matches!(it, ConnectionState::Up | ConnectionState::Down));
    known.map(|it| it == ConnectionState::Up).reduce(|one, other| one || other)
}

/// Returns the backends to try, in order.
pub(super) fn log_backends(log_choice: KernelLogChoice) -> &'static [LogBackend] {
    match log_choice {
        KernelLogChoice::Auto => &[LogBackend::Device, LogBackend::Syslog],
        KernelLogChoice::Device => &[LogBackend::Device],
        KernelLogChoice::Syslog => &[LogBackend::Syslog],
        KernelLogChoice::Off => &[],
    }
}

/// Returns the stamp of the log's newest record, by the log's own clock, which drifts from the other clocks.
fn newest_log_stamp(config: &Config) -> Option<u64> {
    log_backends(config.oom.kernel_log).iter().find_map(|backend| {
        let mut log = KernelLog::open(&config.host_paths, *backend).ok()?;
        log.read().ok()?;
        Some(log.position().usec).filter(|usec| *usec > 0)
    })
}

/// Keeps the names of containers and drops their starts and ends.
fn keep_names(runtime_events: Vec<RuntimeEvent>) -> Vec<RuntimeEvent> {
    let named = runtime_events.into_iter().filter(|runtime_event| runtime_event.named.is_some());
    named
        .map(|runtime_event| match runtime_event.what {
            EventKind::Renamed => runtime_event,
            _ => RuntimeEvent { what: EventKind::Exists, ..runtime_event },
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn past_kill_waits_until_it_is_settled() {
        let kill = |usec: u64, owner: KillOwner| {
            LedgerEvent::OomKill(Kill { id: usec, kernel_usec: Some(usec), owner, ..Kill::unknown() })
        };
        let owners = [KillOwner::Host, KillOwner::Pending, KillOwner::Unattributed, KillOwner::Host];
        let events: Vec<_> = std::iter::zip(1.., owners).map(|(usec, owner)| kill(usec, owner)).collect();
        let ids = |kills: Vec<Kill>| kills.iter().map(|kill| kill.id).collect::<Vec<_>>();
        let (settled, open) = past_kills(&events, 3);
        assert_eq!((ids(settled), ids(open)), (vec![1, 3], vec![2]));
    }

    #[test]
    fn runtime_that_was_never_present_is_neither_up_nor_down() {
        assert_eq!(runtimes_up([]), None);
        assert_eq!(runtimes_up([ConnectionState::Starting, ConnectionState::NoSocket]), None);
        assert_eq!(runtimes_up([ConnectionState::NoSocket, ConnectionState::Down]), Some(false));
        assert_eq!(runtimes_up([ConnectionState::Down, ConnectionState::Up]), Some(true));
    }
}
