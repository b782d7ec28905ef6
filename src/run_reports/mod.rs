//! Writes the report of each run that has ended to a directory, and to a bucket of S3 or its like.
//!
//! A follower for each target reads the records of runs from the store, in the order of their exits, once they no longer change. Its
//! cursor is stored with the ledger, so a target that is away gets all reports once it is back, within `--state.retention` and
//! `--state.max-size`, and reports of the last moments are repeated after a crash, under the same names. Each follower is a thread of its own:
//! a disk or a server that hangs delays nothing else. One report is in memory at a time.

mod bundle;
mod credentials;
mod directory;
mod s3;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use bundle::{ReportFile, folder_name};
use directory::ReportDirectory;
use s3::{S3Settings, S3Target};

use crate::clock::Timestamp;
use crate::config::ReportSettings;
use crate::explain::exit_verdict;
use crate::export::verdict_text::render_all;
use crate::host::{Backoff, Health};
use crate::host::panics::run_essential;
use crate::ledger::exchange::SharedState;
use crate::ledger::store::{EventReader, SettledRun, StoreError};
use crate::runs::RunRecord;
use crate::stats::report_stats::{ReportStats, ReportTarget};

/// How often a change counter is checked for new runs.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Back-off after the first failure, and the longest.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(120));
/// Least time between two warnings.
const MIN_WARNING_INTERVAL: Duration = Duration::from_secs(600);
/// The time of an answer that says nothing about how long ago something was: the file is read later.
const AT_NO_TIME: f64 = 0.0;
/// Timeout of the threads at shutdown. What is not written then is written after the next start.
const STOP_TIMEOUT: Duration = Duration::from_millis(500);

/// Where the files of a report go.
#[derive(Debug)]
enum Target {
    Directory(Box<ReportDirectory>),
    S3(Box<S3Target>),
}

impl Target {
    /// Returns the targets that are set.
    fn all(settings: &ReportSettings) -> Vec<Self> {
        let directory = settings.dir.clone().map(|path| {
            let directory = ReportDirectory::new(path, settings.dir_max_runs, settings.dir_max_size_bytes);
            Self::Directory(Box::new(directory))
        });
        let s3 = S3Settings::new(settings).map(|settings| Self::S3(Box::new(S3Target::new(settings))));
        directory.into_iter().chain(s3).collect()
    }

    fn kind(&self) -> ReportTarget {
        match self {
            Self::Directory(_) => ReportTarget::Directory,
            Self::S3(_) => ReportTarget::S3,
        }
    }

    /// Returns the name of its cursor in the ledger: another directory or bucket gets all reports again.
    fn cursor_name(&self) -> String {
        format!("report {}", self.place())
    }

    /// Returns where it is, for people.
    fn place(&self) -> String {
        match self {
            Self::Directory(directory) => directory.path().display().to_string(),
            Self::S3(target) => target.place(),
        }
    }

    /// Writes the files of a run, which replace older ones of the same names. The last one is last: where it is, the others are.
    ///
    /// # Errors
    /// A message for people. A part may have been written.
    async fn write(&mut self, folder: &str, files: Vec<ReportFile>) -> Result<(), String> {
        match self {
            Self::Directory(directory) => directory.write(folder, &files),
            Self::S3(target) => target.write(folder, files).await,
        }
    }

    /// Writes a small file or object, and removes it.
    async fn probe(self) -> Result<String, String> {
        match self {
            // its disk may hang
            Self::Directory(directory) => {
                let probe = tokio::task::spawn_blocking(move || directory.probe());
                probe.await.unwrap_or_else(|error| Err(error.to_string()))
            }
            Self::S3(mut target) => target.probe().await,
        }
    }
}

/// The result of the check of a target.
#[derive(Debug)]
pub struct TargetCheck {
    /// The target.
    pub target: ReportTarget,
    /// Where it is.
    pub place: String,
    /// What was written, or why that failed.
    pub result: Result<String, String>,
}

/// Writes a test file to each target that is set.
pub async fn check(settings: &ReportSettings, timeout: Duration) -> Vec<TargetCheck> {
    let mut checks = Vec::new();
    for target in Target::all(settings) {
        let (kind, place) = (target.kind(), target.place());
        let probed = tokio::time::timeout(timeout, target.probe()).await;
        let result = probed.unwrap_or_else(|_| Err(format!("timed out after {timeout:?}")));
        checks.push(TargetCheck { target: kind, place, result });
    }
    checks
}

/// Enables the counters of the targets that are set, before the ledger removes anything.
pub fn enable(settings: &ReportSettings, report_stats: &ReportStats) {
    for target in Target::all(settings) {
        report_stats.enable(target.kind(), &target.cursor_name());
    }
}

/// The running followers.
#[derive(Debug)]
pub struct RunReports {
    stop: watch::Sender<bool>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl RunReports {
    /// Starts a thread for each target that is set. `host` is the name of this host in the reports.
    ///
    /// # Errors
    /// A thread cannot be created.
    pub fn start(
        settings: &ReportSettings,
        host: &str,
        event_reader: &EventReader,
        shared_state: &Arc<SharedState>,
    ) -> std::io::Result<Self> {
        let (stop, stopped) = watch::channel(false);
        let mut threads = Vec::new();
        for target in Target::all(settings) {
            tracing::info!(target = target.place(), "writing reports of runs");
            let mut writer = ReportWriter {
                cursor_name: target.cursor_name(),
                host: host.to_owned(),
                target,
                event_reader: event_reader.clone(),
                shared_state: Arc::clone(shared_state),
                stop: stopped.clone(),
                cursor: 0,
                backoff: Backoff::new(BACKOFF.0, BACKOFF.1),
                health: Health::with_interval(MIN_WARNING_INTERVAL),
                ledger_health: Health::default(),
            };
            let name = format!("report-{}", writer.target.kind().label());
            let body = move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                match runtime {
                    Ok(runtime) => {
                        runtime.block_on(writer.run());
                        runtime.shutdown_background(); // a DNS lookup may hang
                    }
                    Err(error) => {
                        tracing::error!(%error, "reports of runs: starting the async runtime failed")
                    }
                }
            };
            let thread = std::thread::Builder::new().name(name);
            threads.push(thread.spawn(move || run_essential("run reports", body))?);
        }
        Ok(Self { stop, threads })
    }

    /// Ends the threads.
    pub fn stop(self) {
        let _ = self.stop.send(true);
        let stopping = Timestamp::now();
        for thread in self.threads {
            while !thread.is_finished() && Timestamp::now().since(stopping) < STOP_TIMEOUT {
                std::thread::park_timeout(Duration::from_millis(5));
            }
        }
    }
}

/// Writes the reports of one target.
#[derive(Debug)]
struct ReportWriter {
    target: Target,
    cursor_name: String,
    host: String,
    event_reader: EventReader,
    shared_state: Arc<SharedState>,
    stop: watch::Receiver<bool>,
    /// Id of the exit of the last run whose report is complete.
    cursor: u64,
    backoff: Backoff,
    health: Health,
    ledger_health: Health,
}

/// Why a report was not written. It is to be retried.
#[derive(Debug, thiserror::Error)]
enum ReportError {
    #[error(transparent)]
    Ledger(#[from] StoreError),
    /// A message for people.
    #[error("{0}")]
    Target(String),
}

/// One report is written, or there is none to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReportStep {
    Written,
    UpToDate,
}

impl ReportWriter {
    /// Writes reports until the stop request.
    async fn run(&mut self) {
        let mut followed = None;
        let mut stop = self.stop.clone();
        loop {
            let written = self.shared_state.written();
            let stored = self.shared_state.cursor(&self.cursor_name); // none while the ledger is not open
            let delay = match stored {
                Some(stored) if followed != Some(written) => {
                    self.cursor = self.cursor.max(stored);
                    let step = tokio::select! {
                        step = self.step() => step,
                        _ = stop.wait_for(|stop| *stop) => return,
                    };
                    match step {
                        Ok(ReportStep::Written) => {
                            self.mark_healthy();
                            Duration::ZERO
                        }
                        Ok(ReportStep::UpToDate) => {
                            followed = Some(written);
                            self.ledger_health.recovered();
                            self.shared_state.report_stats.mark_idle(self.target.kind());
                            POLL_INTERVAL
                        }
                        Err(ReportError::Target(reason)) => self.mark_failing(&reason),
                        Err(ReportError::Ledger(error)) => {
                            if self.ledger_health.failed(Timestamp::now()) {
                                let error: &dyn std::error::Error = &error;
                                tracing::warn!(error, "reading runs for their reports failed; retrying");
                            }
                            BACKOFF.1
                        }
                    }
                }
                _ => POLL_INTERVAL,
            };
            if tokio::time::timeout(delay, stop.wait_for(|stop| *stop)).await.is_ok() {
                return;
            }
        }
    }

    /// Writes the report of the next run.
    ///
    /// # Errors
    /// See [`ReportError`].
    async fn step(&mut self) -> Result<ReportStep, ReportError> {
        let (stats, kind) = (&self.shared_state.report_stats, self.target.kind());
        let next =
            self.read(|store, cursor| Ok((store.next_settled_run(cursor)?, store.count_runs_after(cursor)?)));
        let (run, pending) = next?;
        stats.set_pending(kind, pending);
        let Some(SettledRun { id, record, same_ids, is_corrected }) = run else {
            return Ok(ReportStep::UpToDate);
        };
        let files = match &record {
            Some(run) => self.files(id, run, is_corrected)?,
            None => None,
        };
        if let (Some(run), Some(files)) = (record, files) {
            stats.begin(kind);
            self.target.write(&folder_name(&run, same_ids), files).await.map_err(ReportError::Target)?;
            self.shared_state.report_stats.count_written(kind);
        } else {
            tracing::error!(id, "the record of a run is unreadable: it gets no report");
            self.shared_state.report_stats.count_lost(kind, 1);
        }
        self.cursor = id;
        self.shared_state.acknowledge(&self.cursor_name, id);
        self.shared_state.report_stats.set_pending(kind, pending.saturating_sub(1));
        Ok(ReportStep::Written)
    }

    /// Returns the files of a report; `None` if they cannot be made, which is a bug and must not stop the others.
    fn files(
        &self,
        id: u64,
        run: &RunRecord,
        is_corrected: bool,
    ) -> Result<Option<Vec<ReportFile>>, StoreError> {
        let make = || {
            let verdict =
                self.read(|store, _| exit_verdict(id, run, AT_NO_TIME, |query| store.events(query)))?;
            let why = verdict.map(|verdict| render_all(&verdict));
            Ok(bundle::files(run, &self.host, why, is_corrected).ok())
        };
        catch_unwind(AssertUnwindSafe(make)).unwrap_or(Ok(None))
    }

    fn read<T>(
        &self,
        read: impl FnOnce(&crate::ledger::store::StoreReader, u64) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.event_reader.read(|store| read(store, self.cursor))
    }

    /// Logs the first failure. Returns the delay before the next attempt.
    fn mark_failing(&mut self, reason: &str) -> Duration {
        self.shared_state.report_stats.mark_failing(self.target.kind());
        if self.health.failed(Timestamp::now()) {
            let target = self.target.place();
            tracing::warn!(target, reason, "writing the report of a run failed; retrying");
        }
        self.backoff.delay()
    }

    fn mark_healthy(&mut self) {
        self.backoff.reset();
        self.ledger_health.recovered();
        if self.health.recovered() {
            tracing::info!(target = self.target.place(), "reports of runs are written again");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{ContainerRef, Exit, ExitReason, Kill, KillOwner, LedgerEvent, OomScope};
    use crate::explain::Cause;
    use crate::ledger::store::{Query, Store, WriteBatch};

    fn exit(id: u64, at: f64, reason: ExitReason) -> Exit {
        let subject = ContainerRef {
            container_id: "c".repeat(64).into(),
            started: Some(at - 9.0),
            ..ContainerRef::default()
        };
        Exit { id, at, subject, reason: Some(reason), exit_code: Some(1), ..Exit::default() }
    }

    /// A container that is restarted a thousand times while the target is away.
    #[test]
    fn reason_is_that_of_the_exit_whatever_the_container_did_later() {
        let mut store = Store::in_memory().unwrap();
        let mut batch = WriteBatch::default();
        // a kill without a container, which is logged after the exit that it may have caused
        let kill = Kill {
            id: 1,
            at: 21.0,
            owner: KillOwner::Unattributed,
            scope: OomScope::Container,
            ..Kill::unknown()
        };
        let killed = Exit { may_be: vec![1], exit_code: Some(137), ..exit(2, 20.0, ExitReason::Unknown) };
        let completed = Exit { exit_code: Some(0), ..exit(3, 30.0, ExitReason::Completed) };
        let mut exits = vec![killed, completed];
        exits.extend((4..1_500).map(|id| exit(id, 10.0 * id as f64, ExitReason::Error)));
        batch.put_event(LedgerEvent::OomKill(kill));
        let container = "c".repeat(64);
        let runs = exits.iter().map(|exit| {
            let mut run = RunRecord { ended: Some(exit.at), ..RunRecord::default() };
            run.subject.container_id = container.as_str().into();
            (exit.id, run)
        });
        batch.runs = runs.collect();
        let runs = batch.runs.clone();
        exits.into_iter().for_each(|exit| batch.put_event(LedgerEvent::Exit(exit)));
        store.commit(&batch).unwrap();
        let verdict = |id: u64| {
            exit_verdict(id, &runs[&id], AT_NO_TIME, |query: &Query| store.reader().events(query)).unwrap()
        };
        let cause = |id: u64| verdict(id).map(|verdict| verdict.cause);
        assert_eq!(cause(3), None, "it ended well");
        assert_eq!([4, 700, 1_499].map(cause), [Some(Cause::ErrorExit); 3]);
        let why = render_all(&verdict(2).unwrap());
        assert!(
            why.replace('\n', " ").contains("it may have been this one") && !why.contains(" ago"),
            "{why}"
        );
    }
}
