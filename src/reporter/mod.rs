//! The view from inside: processes of containers report the memory of torch, and how far their training is.
//!
//! A process connects to a Unix socket (SOCK_SEQPACKET) in `--reporter.directory`, which containers mount, and sends one JSON
//! object per packet; `python/memledger_client` is the client. Its identity is what the kernel says about the connection
//! ([`peer`]); what it sends is untrusted ([`message`]) and bounded ([`crate::host::bounds`]). One thread serves all
//! connections ([`server`]); the cycle reads the newest [`reports`].
//!
//! Not here: what the figures mean together with the driver's (`attribute::inside`).

pub mod cleanup;
mod directory;
#[cfg(any(test, fuzzing))]
pub mod invariants;
pub mod message;
pub mod ooms;
mod peer;
pub mod reports;
pub mod process_reports;
mod server;
pub mod stats;

use std::collections::HashSet;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

use crate::host::process::ProcessId;
use cleanup::{CleanupResult, CleanupTrigger, Cleanups};
use message::OomMessage;
use ooms::{OomQueue, ReportedOom};
use process_reports::{EndReport, ProcessReport, ProcessReportContent, ProcessReportQueue};
use reports::Reports;
use stats::ReporterStats;

use crate::clock::Timestamp;
use crate::discover::{ContainerId, Inventory};
use crate::host::panics::run_essential;
use crate::host::{HostPaths, Waker};

pub use directory::{ReporterError, is_served};

/// What the reporter's thread shares with the cycle.
#[derive(Debug, Default)]
pub struct ReporterState {
    reports: Mutex<Reports>,
    /// The inventory of the last cycle; `None` before the first one.
    inventory: Mutex<Option<Arc<Inventory>>>,
    stats: ReporterStats,
    ooms: Mutex<OomQueue>,
    /// Wakes who takes the out-of-memory errors.
    waker: Arc<Waker>,
    process_reports: Mutex<ProcessReportQueue>,
    cleanups: Mutex<Cleanups>,
    /// Wakes the reporter's thread for a cleanup.
    cleanup_waker: Waker,
}

impl ReporterState {
    /// Creates the state; `waker` is signalled with each out-of-memory error.
    fn new(waker: Arc<Waker>) -> Self {
        Self { waker, ..Self::default() }
    }

    /// Returns the reports, locked. Hold it only for a moment: messages wait meanwhile.
    pub fn lock(&self) -> MutexGuard<'_, Reports> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a copy of the reports of a cycle, without containers that ended. From now on processes that connect are those of
    /// this inventory's containers.
    pub fn take(&self, inventory: &Arc<Inventory>) -> Reports {
        *self.inventory.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(inventory));
        let running = inventory.ids();
        let is_running = |id: &ContainerId| running.contains(id);
        self.ooms().retain(is_running);
        let mut reports = self.lock();
        reports.retain(is_running);
        for container in &inventory.containers {
            reports.forget_earlier_run(&container.id, container.listed_run);
        }
        reports.clone()
    }

    fn ooms(&self) -> MutexGuard<'_, OomQueue> {
        self.ooms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an out-of-memory error of a process.
    fn add_oom(&self, now: Timestamp, process: ProcessId, message: OomMessage) {
        let oom = ReportedOom::of_process(now, &self.lock(), process, message);
        if oom.is_some_and(|oom| self.ooms().add(now, oom)) {
            self.waker.wake();
        }
    }

    /// Returns the containers with a connected process that has sent its first message, also those that have ended until its last one is
    /// read.
    pub fn connected(&self) -> HashSet<ContainerId> {
        self.lock().processes.values().map(|process| process.container.clone()).collect()
    }

    /// Takes the out-of-memory errors that were reported since the last call.
    pub fn take_ooms(&self) -> Vec<ReportedOom> {
        self.ooms().take()
    }

    /// Adds a report for the record of a run. One too many is counted as rejected.
    fn add_process_report(&self, report: ProcessReport) {
        if !self.process_reports().add(report) {
            self.stats.count_rejected(stats::ReportRejection::Rate);
        }
    }

    /// Adds all that a process has reported, whose connection ends.
    fn add_end(&self, now: Timestamp, id: ProcessId, connected: Timestamp) {
        let (process, container) = {
            let reports = self.lock();
            let Some(process) = reports.processes.get(&id).cloned() else { return };
            let container = reports.containers.get(&process.container).cloned().unwrap_or_default();
            (process, container)
        };
        let id_of_container = process.container.clone();
        let content = ProcessReportContent::End(Box::new(EndReport { at: now, id, process, container }));
        self.add_process_report(ProcessReport { container: id_of_container, connected, content });
    }

    fn process_reports(&self) -> MutexGuard<'_, ProcessReportQueue> {
        self.process_reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the reports for the records of runs since the last call.
    pub fn take_process_reports(&self) -> Vec<ProcessReport> {
        self.process_reports().take()
    }

    /// Requests a cleanup from all processes of a container, within this time. The result comes at the latest [`cleanup::ANSWER_GRACE`] after the
    /// deadline of the cleanup that runs then, which may have begun with another request.
    pub fn request_cleanup(
        &self,
        container: ContainerId,
        deadline: Duration,
    ) -> oneshot::Receiver<CleanupResult> {
        let (sender, result) = oneshot::channel();
        self.add_cleanup(container, deadline, CleanupTrigger::Request(sender));
        result
    }

    /// Requests a cleanup from all processes of a container, unless they did one within the last minute. The result is only logged.
    pub fn clean_up_automatically(&self, container: ContainerId) {
        self.add_cleanup(container, cleanup::DEADLINE, CleanupTrigger::Auto);
    }

    fn add_cleanup(&self, container: ContainerId, deadline: Duration, trigger: CleanupTrigger) {
        self.cleanups().request(container, deadline, trigger);
        self.cleanup_waker.wake();
    }

    fn cleanups(&self) -> MutexGuard<'_, Cleanups> {
        self.cleanups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the newest inventory; `None` before the first cycle.
    pub fn inventory(&self) -> Option<Arc<Inventory>> {
        self.inventory.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the counters.
    pub fn stats(&self) -> &ReporterStats {
        &self.stats
    }
}

/// Prepares the directory, writes the Python client into it, and starts the thread that serves the socket.
///
/// # Errors
/// The directory cannot be used, or another memledger uses it.
pub fn start(
    directory: &Path,
    host_paths: &HostPaths,
    cgroup_v1: bool,
    waker: Arc<Waker>,
) -> Result<Arc<ReporterState>, ReporterError> {
    if !host_paths.in_initial_pid_namespace() {
        return Err(ReporterError::PidNamespace);
    }
    let listener = directory::listen(directory)?;
    let state = Arc::new(ReporterState::new(waker));
    let server = server::Server::new(listener, Arc::clone(&state), host_paths.clone(), cgroup_v1);
    std::thread::Builder::new()
        .name("reporter".into())
        .spawn(move || run_essential("reporter", || server.run()))
        .map_err(|source| ReporterError::Thread { source })?;
    Ok(state)
}
