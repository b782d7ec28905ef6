//! The ledger's thread: reads the sources, runs the reconciler, has its results written ([`LedgerWriter`]), and only then
//! publishes the figures.
//!
//! It runs on its own thread so that a kill is noticed when the kernel logs it rather than at the next cycle, and so
//! that neither a slow disk nor a hanging read in a cycle delays the other, but for a walk of the cgroup tree, which they
//! share. It waits in poll(2) on the waker that the runtimes' tasks and the kernel log reader use; in addition it reads the
//! kernel's counter once per interval.

use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};

use super::catch_up::{
    CatchUpTime, CaughtUp, HostPast, MAX_DETAILS_TIME, PastReader, catch_up, log_backends, reconciler_config,
    warn_of_unread,
};
use super::exchange::{LedgerFigures, SharedState, SourceName, StoredFigures};
use super::kmsg_reader::KmsgReader;
use super::reconcile::{CountingStart, Reconciler};
use super::store::{EventReader, LedgerState, Store, StoreError};
use super::victim_probe::VictimProbe;
use super::writer::{LedgerWriter, event_reader};
use crate::clock::Timestamp;
use crate::config::{Config, KernelLogChoice};
use crate::container_logs::ContainerLogs;
use crate::discover::cgroup_tree::CgroupTree;
use crate::discover::{
    ConnectionState, ContainerId, EventKind, Hierarchy, RuntimeEvent, RuntimeKind, RuntimeState,
};
use crate::host::Health;
use crate::host::panics::run_essential;
use crate::ledger::sources::cgroup_oom_events::CgroupCounters;
use crate::ledger::sources::kernel_log::{KernelLog, LogPosition};
use crate::ledger::sources::vmstat_oom::OomCounter;
use crate::reporter::ReporterState;

/// Figures are published at least so often: old ones are those of a ledger that hangs.
const PUBLISH_INTERVAL: Duration = Duration::from_secs(10);
/// Interval between steps while something is pending.
const PENDING_INTERVAL: Duration = Duration::from_millis(200);
/// Longest interval between reads of syslog(2) and of the kernel's counter, also with a longer sampling interval.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Shortest interval between reads of the cgroups' counters because of notifications.
const SWEEP_DELAY: Duration = Duration::from_millis(50);
/// Delay before a source, or a ledger, that failed is opened again.
const REOPEN_DELAY: Duration = Duration::from_secs(10);
/// Minimum time between two warnings that the kernel log was overwritten.
const OVERRUN_WARNING_INTERVAL: Duration = Duration::from_secs(600);

/// An open ledger.
#[derive(Debug)]
struct OpenLedger {
    reconciler: Reconciler,
    writer: LedgerWriter,
    /// What was loaded, until it has caught up with the host.
    loaded: LedgerState,
    /// Reads what the runtimes know of the time since the ledger was written.
    past: Option<PastReader>,
}

impl OpenLedger {
    /// Opens the ledger in the configured directory.
    ///
    /// # Errors
    /// See [`LedgerWriter::open`].
    fn open(config: &Config, log_start_usec: u64) -> Result<Self, StoreError> {
        let now = Timestamp::now();
        let (writer, state) = LedgerWriter::open(&config.state, now)?;
        let setup = reconciler_config(config, &state, now);
        let reconciler = Reconciler::new(setup, &state, now, log_start_usec);
        Ok(Self { reconciler, writer, loaded: state, past: None })
    }

    /// Writes where the counting begins, unless an earlier start did: whatever ends this process from now on, the next one begins there.
    fn put_first_start(&mut self, start: CountingStart, shared_state: &SharedState) {
        if self.loaded.is_new() && self.loaded.first_start.is_none() {
            self.writer.put_first_start(Timestamp::now(), &start, &mut self.reconciler, shared_state);
            self.loaded.first_start = Some(start);
        }
    }

    /// Catches up with the host: with what happened before the first start or since the last write. `start`: this one, if no earlier one has
    /// begun to.
    fn catch_up(&mut self, config: &Config, start: CountingStart, shared_state: &SharedState) {
        let state = std::mem::take(&mut self.loaded);
        let began = Timestamp::now();
        if !state.is_new() {
            self.past = Some(PastReader::start(config, state, Arc::clone(&shared_state.waker)));
            return;
        }
        let mut past = HostPast::read(config, began, None, MAX_DETAILS_TIME);
        warn_of_unread(&past.runtimes);
        let time = CatchUpTime { now: Timestamp::now(), start, is_last: false };
        let CaughtUp { reconciler, changes, noticed } = catch_up(config, &state, &mut past, time);
        self.reconciler = reconciler;
        self.writer.add(changes, noticed);
    }
}

/// The ledger service. [`LedgerService::start`] moves it to its thread.
#[derive(Debug)]
pub struct LedgerService {
    config: Config,
    shared_state: Arc<SharedState>,
    /// Stamp of the kernel log's newest record at the start, by the log's own clock. Older records are ignored.
    log_start_usec: u64,
    /// `None` while there is a ledger that cannot be read.
    ledger: Option<OpenLedger>,
    opened: Timestamp,
    /// The ledger in memory, if it is kept there.
    memory: Option<Arc<Mutex<Store>>>,
    sources: Vec<Arc<RuntimeState>>,
    /// Where processes report out-of-memory errors.
    reporter: Option<Arc<ReporterState>>,
    logs: Option<Arc<ContainerLogs>>,
    log: Option<KmsgReader>,
    log_health: Health,
    overrun_logged: Option<Timestamp>,
    counter: Option<OomCounter>,
    counters: Option<CgroupCounters>,
    counters_up: bool,
    cgroup_tree: Option<CgroupTree>,
    hierarchy: Option<Hierarchy>,
    last_sweep: Option<Timestamp>,
    last_publish: Option<Timestamp>,
    interval: Duration,
    /// The ledger begins with the past of the host.
    has_past: bool,
}

/// A handle that stops the thread.
#[derive(Debug)]
pub struct ServiceHandle {
    stop: Arc<AtomicBool>,
    shared_state: Arc<SharedState>,
    thread: JoinHandle<()>,
}

impl ServiceHandle {
    /// Lets the thread finish its step, waiting no longer than `timeout`: a stuck disk must not delay the exit.
    pub fn stop(self, timeout: Duration) {
        let began = Timestamp::now();
        self.stop.store(true, Ordering::Relaxed);
        self.shared_state.waker.wake();
        while !self.thread.is_finished() && Timestamp::now().since(began) < timeout {
            std::thread::park_timeout(Duration::from_millis(5));
        }
    }
}

impl LedgerService {
    /// Opens the ledger in the configured directory. If that fails, logs an error and retries once it is started.
    ///
    /// # Errors
    /// Another memledger writes to the same ledger: two would count everything twice.
    pub fn open(config: &Config) -> Result<Self, StoreError> {
        let now = Timestamp::now();
        let cgroup_tree = CgroupTree::detect(&config.host_paths);
        let hierarchy = cgroup_tree.as_ref().map(|tree| tree.hierarchy().clone());
        let mut service = Self {
            config: config.clone(),
            counters: cgroup_tree.as_ref().map(|tree| CgroupCounters::new(tree.share())),
            cgroup_tree,
            shared_state: Arc::default(),
            log_start_usec: newest_log_stamp(config).unwrap_or(now.kernel_usec()),
            ledger: None,
            opened: now,
            memory: None,
            sources: vec![],
            reporter: None,
            logs: None,
            log: None,
            log_health: Health::default(),
            overrun_logged: None,
            counter: None,
            counters_up: false,
            hierarchy,
            last_sweep: None,
            last_publish: None,
            interval: config.sample_interval,
            has_past: true,
        };
        match service.open_ledger() {
            Err(error @ StoreError::InUse { .. }) => return Err(error),
            Err(error) => tracing::error!(
                error = &error as &dyn std::error::Error,
                consequence = "no counts and no events are shown, because those of the existing ledger cannot be read; retrying",
                "opening the ledger failed"
            ),
            Ok(()) => {}
        }
        Ok(service)
    }

    /// Leaves out what happened before.
    pub fn without_past(self) -> Self {
        Self { has_past: false, ..self }
    }

    fn open_ledger(&mut self) -> Result<(), StoreError> {
        self.opened = Timestamp::now();
        let mut ledger = OpenLedger::open(&self.config, self.log_start_usec)?;
        ledger.put_first_start(self.counting_start(), &self.shared_state);
        self.memory = ledger.writer.memory();
        self.shared_state.followers.set_cursors(ledger.writer.cursors());
        self.shared_state.set_stored(StoredFigures {
            peaks: ledger.reconciler.stored_peaks(),
            gpu_counts: ledger.writer.gpu_counts(),
        });
        self.ledger = Some(ledger);
        Ok(())
    }

    /// Returns where the counting of a new ledger begins.
    fn counting_start(&self) -> CountingStart {
        CountingStart { log_usec: self.log_start_usec, at: self.opened.unix_seconds() }
    }

    /// Returns the state that is shared with the cycle.
    pub fn shared_state(&self) -> Arc<SharedState> {
        Arc::clone(&self.shared_state)
    }

    /// Returns a handle of the cgroup tree, for the cycle: both walk it, in turn. `None` without a hierarchy.
    pub fn cgroup_tree(&self) -> Option<CgroupTree> {
        self.cgroup_tree.as_ref().map(CgroupTree::share)
    }

    /// Returns a reader of the events; `None` while a ledger in memory cannot be created.
    pub fn event_reader(&self) -> Option<EventReader> {
        event_reader(&self.config.state, self.memory.clone())
    }

    /// Returns the containers of a runtime that were running when the ledger was last written.
    pub fn running(&self, runtime: RuntimeKind) -> HashSet<ContainerId> {
        let ledger = self.ledger.as_ref();
        ledger.map_or(HashSet::new(), |ledger| ledger.reconciler.running(runtime).cloned().collect())
    }

    /// Returns the Unix time from which on events of a socket of a runtime may be missing in the ledger.
    pub fn since(&self, runtime: RuntimeKind, socket: &str) -> Option<f64> {
        self.ledger.as_ref()?.reconciler.runtime_cursor(runtime, socket)
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
        let stop = Arc::new(AtomicBool::new(false));
        let (thread_stop, shared_state) = (Arc::clone(&stop), Arc::clone(&self.shared_state));
        let body = move || {
            self.catch_up();
            while !thread_stop.load(Ordering::Relaxed) {
                self.step(Timestamp::now());
                self.wait();
            }
            self.stop(Timestamp::now());
        };
        let thread = std::thread::Builder::new().name("ledger".into());
        let thread = thread.spawn(move || run_essential("ledger", body))?;
        Ok(ServiceHandle { stop, shared_state, thread })
    }

    /// Catches up with the host. At the first start that is before the first step, and what the runtimes and the kernel log report
    /// meanwhile waits.
    fn catch_up(&mut self) {
        let Some(mut ledger) = self.ledger.take() else { return };
        match self.has_past {
            true => {
                self.publish(Timestamp::now(), Some(&ledger), false);
                // a victim of these seconds is gone afterwards; what is read twice is known by its position
                let began = Timestamp::now();
                self.open_log(began, &ledger.reconciler);
                // cgroups that appear from now on have counted nothing before
                let is_new = ledger.loaded.is_new();
                let counted = self.counters.as_mut().filter(|_| is_new).map(|counters| {
                    let (readings, _) =
                        counters.sweep(began, |id, path| ledger.reconciler.claim_at(id, path));
                    (readings, counters.hierarchical())
                });
                ledger.catch_up(&self.config, self.counting_start(), &self.shared_state);
                if let Some((readings, hierarchical)) = counted {
                    ledger.reconciler.apply_cgroup_counters(began, began, &readings, hierarchical);
                }
            }
            false => ledger.loaded = LedgerState::default(),
        }
        self.ledger = Some(ledger);
    }

    /// Takes the last step.
    fn stop(&mut self, now: Timestamp) {
        if let Some(ledger) = &mut self.ledger {
            ledger.reconciler.mark_running_changed(); // the figures of their runs
        }
        self.step(now);
        if let Some(OpenLedger { reconciler, writer, .. }) = &mut self.ledger {
            writer.commit(now, reconciler, &self.shared_state); // the cursors of the followers
        }
    }

    /// Waits until an event arrives or the next step is due.
    fn wait(&mut self) {
        let must_poll = self.log.as_ref().is_none_or(|log| !log.wakes_ledger());
        let wait = match &self.ledger {
            None => POLL_INTERVAL,
            Some(ledger) if ledger.reconciler.has_pending() => PENDING_INTERVAL.min(self.interval),
            Some(_) if must_poll => POLL_INTERVAL.min(self.interval),
            Some(_) => self.interval.min(PUBLISH_INTERVAL),
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
        if self.ledger.is_none() {
            std::thread::park_timeout(PENDING_INTERVAL); // events wait for the ledger
        }
        if self.counters.as_ref().is_some_and(CgroupCounters::take_notifications) {
            // at once, because the cgroup may be gone soon; but a container at its limit sends hundreds in a second
            let since_last = self.last_sweep.map_or(SWEEP_DELAY, |at| Timestamp::now().since(at));
            std::thread::park_timeout(SWEEP_DELAY.saturating_sub(since_last));
            self.last_sweep = None;
        }
    }

    fn step(&mut self, now: Timestamp) {
        if self.ledger.is_none() && now.since(self.opened) >= REOPEN_DELAY && self.open_ledger().is_ok() {
            self.catch_up();
            tracing::info!("the ledger can be read again; its counts continue");
        }
        let Some(mut ledger) = self.ledger.take() else {
            self.shared_state.take_cycles(); // they would be old
            return self.publish(now, None, false);
        };
        let (has_changes, is_counted) = self.step_ledger(now, &mut ledger);
        if has_changes
            || self.last_publish.is_none_or(|at| now.since(at) >= self.interval.min(PUBLISH_INTERVAL))
        {
            self.last_publish = Some(now);
            self.publish(now, Some(&ledger), is_counted);
        }
        self.ledger = Some(ledger);
    }

    /// Applies what all sources have, and writes what that changes. Returns whether it changed anything, and whether the kernel's counter
    /// can be read.
    fn step_ledger(&mut self, now: Timestamp, ledger: &mut OpenLedger) -> (bool, bool) {
        let OpenLedger { reconciler, writer, past, .. } = ledger;
        writer.apply_clock(now, reconciler);
        // before the cycles and events, which name the containers of these errors; and who may still report one before the errors
        let connected = self.reporter.as_ref().map(|reporter| reporter.connected()).unwrap_or_default();
        let being_read = self.logs.as_ref().map(|logs| logs.reading());
        let mut cuda_ooms = self.reporter.as_ref().map(|reporter| reporter.take_ooms()).unwrap_or_default();
        cuda_ooms.extend(self.logs.iter().flat_map(|logs| logs.take_ooms()));
        let host_errors = self.logs.as_ref().map(|logs| logs.take_host_errors()).unwrap_or_default();
        let process_reports =
            self.reporter.as_ref().map(|reporter| reporter.take_process_reports()).unwrap_or_default();
        let reports = self.shared_state.take_cycles();
        for source in self.sources.iter().filter(|_| self.config.oom.runtime) {
            let state = source.lock();
            reconciler.set_connection(source.runtime, state.connected_since(), state.live_sockets());
        }
        let read = self.sources.iter().map(|source| source.drain_events());
        let runtime_events: Vec<Vec<RuntimeEvent>> =
            read.map(|events| if self.config.oom.runtime { events } else { keep_names(events) }).collect();
        if let Some(unknown) = past.as_ref().and_then(PastReader::take) {
            reconciler.apply_runtime_events(now, &unknown);
            *past = None;
        }
        reconciler.apply_cycles_and_events(now, &reports, &runtime_events);
        self.read_log(now, reconciler);
        if self.counter.is_none() {
            self.counter = OomCounter::open(&self.config.host_paths).ok();
        }
        // a cgroup may have counted a kill since the log was read: read that kill's record before the host's counter,
        // or the counter's growth would be taken for another kill
        if self.sweep(now, reconciler) {
            self.read_log(now, reconciler);
        }
        let counted = self.counter.as_mut().and_then(|counter| counter.read().ok());
        if let Some(counted) = counted {
            reconciler.apply_vmstat(Timestamp::now(), counted);
        }
        reconciler.add_gpu_errors(self.shared_state.take_gpu_errors());
        reconciler.add_cuda_ooms(Timestamp::now(), cuda_ooms);
        reconciler.add_host_errors(Timestamp::now(), host_errors);
        reconciler.add_process_reports(Timestamp::now(), process_reports);
        reconciler.set_connected(connected);
        reconciler.set_logs_being_read(being_read);
        (writer.write(now, reconciler, &self.shared_state), counted.is_some())
    }

    /// Applies new kernel log entries.
    fn read_log(&mut self, now: Timestamp, reconciler: &mut Reconciler) {
        self.open_log(now, reconciler);
        match self.log.as_ref().map(KmsgReader::take) {
            Some(Ok(taken)) => {
                self.log_health.recovered();
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
                    reconciler.restart_accounting(now.kernel_usec());
                }
                reconciler.apply_log(now, Some(&taken.records), taken.position);
                reconciler.set_log_state(taken.clock, taken.block);
            }
            Some(Err(error)) => {
                if self.log_health.failed(now) {
                    let error: &dyn std::error::Error = &error;
                    tracing::warn!(error, "kernel log read failed; retrying");
                }
                self.log = None;
                reconciler.apply_log(now, None, LogPosition::default());
            }
            None => reconciler.apply_log(now, None, LogPosition::default()),
        }
    }

    fn open_log(&mut self, now: Timestamp, reconciler: &Reconciler) {
        let is_backing_off = self.log_health.has_failed_within(now, REOPEN_DELAY);
        if self.log.is_some() || is_backing_off || self.config.oom.kernel_log == KernelLogChoice::Off {
            return;
        }
        let backends = log_backends(self.config.oom.kernel_log);
        for backend in backends {
            match KernelLog::open(&self.config.host_paths, *backend) {
                Ok(mut log) => {
                    let (mut clock, mut block) = Default::default();
                    if let Some(known) = reconciler.log_position() {
                        log.resume_after(known.0);
                        (_, clock, block) = known;
                    }
                    let probe = VictimProbe::new(&self.config.host_paths, self.hierarchy.as_ref());
                    self.log = Some(KmsgReader::start(
                        log,
                        clock,
                        block,
                        probe,
                        (&self.shared_state, self.log_start_usec),
                    ));
                    return;
                }
                Err(error) => {
                    if !self.log_health.is_failing() {
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
        self.log_health.failed(now);
    }

    /// Reads the cgroups' OOM counters if that is due. Returns true if it was.
    fn sweep(&mut self, now: Timestamp, reconciler: &mut Reconciler) -> bool {
        let due = self.last_sweep.is_none_or(|at| now.since(at) >= self.interval);
        if !due && !reconciler.needs_cgroup_sweep() {
            return false;
        }
        let Some(counters) = &mut self.counters else { return false };
        counters.watch(self.log.is_none());
        self.last_sweep = Some(now);
        let claim = |id: &ContainerId, path: &Path| reconciler.claim_at(id, path);
        let (readings, outcome) = counters.sweep(now, claim);
        if let (Err(error), true) = (&outcome, self.counters_up) {
            tracing::warn!(
                error = error as &dyn std::error::Error,
                "reading the cgroups' OOM counters failed"
            );
        }
        self.counters_up = outcome.is_ok();
        let hierarchical = counters.hierarchical();
        reconciler.apply_cgroup_counters(now, Timestamp::now(), &readings, hierarchical);
        true
    }

    /// Publishes the figures; without a ledger there are only the states of the sources.
    fn publish(&self, now: Timestamp, ledger: Option<&OpenLedger>, counted: bool) {
        let mut figures = match ledger {
            Some(OpenLedger { reconciler, writer, .. }) => LedgerFigures {
                has_counts: true,
                counted_since: writer.started_at(),
                store_up: writer.is_up(),
                unreadable_rows: writer.unreadable_rows(),
                ..reconciler.figures(now)
            },
            None => LedgerFigures { store_up: Some(false), ..LedgerFigures::default() },
        };
        // sources that are switched off, and runtimes that were never present, are left out: they must not raise an
        // alert
        let log = (self.config.oom.kernel_log != KernelLogChoice::Off).then(|| self.log.is_some());
        let connections = self.sources.iter().map(|source| source.lock().connection);
        let runtime = self.config.oom.runtime.then(|| runtimes_up(connections)).flatten();
        let sources = [
            (SourceName::Kmsg, log),
            (SourceName::Vmstat, Some(counted)),
            (SourceName::Cgroup, Some(self.counters_up)),
            (SourceName::Runtime, runtime),
        ];
        // before the first step none was read
        let are_known = ledger.is_none() || self.last_publish.is_some();
        let sources = sources.into_iter().filter(|_| are_known);
        figures.sources = sources.filter_map(|(source, up)| Some((source, up?))).collect();
        self.shared_state.publish(Timestamp::now(), figures);
    }
}

/// Returns whether any runtime is connected; `None` if none ever was.
fn runtimes_up(connections: impl IntoIterator<Item = ConnectionState>) -> Option<bool> {
    let known =
        connections.into_iter().filter(|it| matches!(it, ConnectionState::Up | ConnectionState::Down));
    known.map(|it| it == ConnectionState::Up).reduce(|one, other| one || other)
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
            EventKind::Renamed | EventKind::Sandbox | EventKind::SandboxRemoved => runtime_event,
            _ => RuntimeEvent { what: EventKind::Exists, ..runtime_event },
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtime_that_was_never_present_is_neither_up_nor_down() {
        assert_eq!(runtimes_up([]), None);
        assert_eq!(runtimes_up([ConnectionState::Starting, ConnectionState::NoSocket]), None);
        assert_eq!(runtimes_up([ConnectionState::NoSocket, ConnectionState::Down]), Some(false));
        assert_eq!(runtimes_up([ConnectionState::Down, ConnectionState::Up]), Some(true));
    }
}
