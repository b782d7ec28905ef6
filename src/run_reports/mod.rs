//! Writes the report of each run that has ended to a directory, and to a bucket of S3 or its like.
//!
//! A follower of the ledger for each target reads the records of runs, in the order of their exits. A target that is away gets all
//! reports once it is back; reports of the last moments are repeated after a crash, under the same names. Each follower has a thread of its
//! own: a disk or a server that hangs delays nothing else. One report is in memory at a time.

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
use crate::diagnose::{Diagnosis, exit_diagnosis};
use crate::export::words::screen::render_all;
use crate::host::panics::run_essential;
use crate::host::{Backoff, Health};
use crate::ledger::exchange::SharedState;
use crate::ledger::follow::{Follower, ReadBatch, Sink, WriteOutcome};
use crate::ledger::store::{EventReader, SettledRun, StoreError, StoreReader};
use crate::runs::RunRecord;
use crate::stats::report_stats::{ReportStats, ReportTarget};

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
    stop: watch::Sender<Option<Timestamp>>,
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
        let (stop, stopped) = watch::channel(None);
        let mut threads = Vec::new();
        for target in Target::all(settings) {
            tracing::info!(target = target.place(), "writing reports of runs");
            let thread = std::thread::Builder::new().name(format!("report-{}", target.kind().label()));
            let cursor_name = target.cursor_name();
            let sink = ReportSink::new(target, host, Arc::clone(shared_state));
            let (event_reader, shared_state) = (event_reader.clone(), Arc::clone(shared_state));
            let stopped = stopped.clone();
            let body = move || match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => {
                    let follower = Follower::new(cursor_name, sink);
                    let mut stop = stopped.clone();
                    runtime.block_on(async {
                        tokio::select! {
                            () = follower.run(&event_reader, &shared_state.followers, stopped) => {}
                            _ = stop.wait_for(Option::is_some) => {} // at once: a report is written again after the next start
                        }
                    });
                    runtime.shutdown_background(); // a DNS lookup may hang
                }
                Err(error) => tracing::error!(%error, "reports of runs: starting the async runtime failed"),
            };
            threads.push(thread.spawn(move || run_essential("run reports", body))?);
        }
        Ok(Self { stop, threads })
    }

    /// Ends the threads.
    pub fn stop(self) {
        let stopping = Timestamp::now();
        let _ = self.stop.send(Some(stopping));
        for thread in self.threads {
            while !thread.is_finished() && Timestamp::now().since(stopping) < STOP_TIMEOUT {
                std::thread::park_timeout(Duration::from_millis(5));
            }
        }
    }
}

/// Writes the reports of one target.
#[derive(Debug)]
struct ReportSink {
    target: Target,
    host: String,
    shared_state: Arc<SharedState>,
    backoff: Backoff,
    health: Health,
}

/// What a report is made of.
#[derive(Debug)]
struct SettledReport {
    run: SettledRun,
    /// Why it ended, if it did not end well.
    diagnosis: Option<Diagnosis>,
}

impl ReportSink {
    fn new(target: Target, host: &str, shared_state: Arc<SharedState>) -> Self {
        Self {
            target,
            host: host.to_owned(),
            shared_state,
            backoff: Backoff::new(BACKOFF.0, BACKOFF.1),
            health: Health::with_interval(MIN_WARNING_INTERVAL),
        }
    }

    /// Returns the name of the folder of a report, and its files; `None` if they cannot be made, which is a bug and must not stop the others.
    fn files(&self, report: SettledReport) -> Option<(String, Vec<ReportFile>)> {
        let SettledReport { run: SettledRun { record, same_ids, is_corrected, .. }, diagnosis } = report;
        let run = record?;
        let make = || bundle::files(&run, &self.host, diagnosis.as_ref().map(render_all), is_corrected).ok();
        let files = catch_unwind(AssertUnwindSafe(make)).ok().flatten()?;
        Some((folder_name(&run, same_ids), files))
    }
}

impl Sink for ReportSink {
    type Batch = SettledReport;

    fn reader(&self) -> impl FnOnce(&StoreReader, u64) -> ReadBatch<SettledReport> + Send + 'static {
        let (shared_state, kind) = (Arc::clone(&self.shared_state), self.target.kind());
        move |store, cursor| {
            let run = store.next_settled_run(cursor)?;
            shared_state.followers.report_stats.set_pending(kind, store.count_runs_after(cursor)?);
            run.map(|run| Ok((run.id, SettledReport::read(store, run)?))).transpose()
        }
    }

    async fn write(&mut self, report: SettledReport) -> WriteOutcome {
        let (stats, kind, id) =
            (&self.shared_state.followers.report_stats, self.target.kind(), report.run.id);
        let Some((folder, files)) = self.files(report) else {
            tracing::error!(id, "the record of a run is unreadable: it gets no report");
            stats.count_lost(kind, 1);
            return WriteOutcome::All;
        };
        stats.begin(kind);
        match self.target.write(&folder, files).await {
            Ok(()) => {
                stats.count_written(kind);
                self.backoff.reset();
                if self.health.recovered() {
                    tracing::info!(target = self.target.place(), "reports of runs are written again");
                }
                WriteOutcome::All
            }
            Err(reason) => {
                stats.mark_failing(kind);
                let (target, delay) = (self.target.place(), self.backoff.delay());
                tracing::debug!(target, reason, ?delay, "attempt to write a report failed; retrying");
                if self.health.failed(Timestamp::now()) {
                    tracing::warn!(target, reason, "writing the report of a run failed; retrying");
                }
                WriteOutcome::Retry(delay)
            }
        }
    }

    fn up_to_date(&mut self) {
        self.shared_state.followers.report_stats.mark_idle(self.target.kind());
    }
}

impl SettledReport {
    /// Reads why a run ended. The record of one for which that panics, which is a bug, counts as unreadable.
    fn read(store: &StoreReader, mut run: SettledRun) -> Result<Self, StoreError> {
        let id = run.id;
        let explain =
            |record: &RunRecord| exit_diagnosis(id, record, AT_NO_TIME, |query| store.events(query));
        let diagnosis = run.record.as_ref().map(|record| catch_unwind(AssertUnwindSafe(|| explain(record))));
        let diagnosis = match diagnosis {
            Some(Ok(diagnosis)) => diagnosis?,
            Some(Err(_)) => {
                run.record = None;
                None
            }
            None => None,
        };
        Ok(Self { run, diagnosis })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnose::Cause;
    use crate::events::{ContainerRef, Exit, ExitReason, Kill, KillOwner, LedgerEvent, OomScope};
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
            run.subject.run_number = Some(exit.id);
            (exit.id, run)
        });
        batch.runs = runs.collect();
        let runs = batch.runs.clone();
        exits.into_iter().for_each(|exit| batch.put_event(LedgerEvent::Exit(exit)));
        store.commit(&batch).unwrap();
        let diagnosis = |id: u64| {
            exit_diagnosis(id, &runs[&id], AT_NO_TIME, |query: &Query| store.reader().events(query)).unwrap()
        };
        let cause = |id: u64| diagnosis(id).map(|diagnosis| diagnosis.cause);
        assert_eq!(cause(3), None, "it ended well");
        assert_eq!([4, 700, 1_499].map(cause), [Some(Cause::ErrorExit); 3]);
        let why = render_all(&diagnosis(2).unwrap());
        assert!(
            why.replace('\n', " ").contains("it may have been this one") && !why.contains(" ago"),
            "{why}"
        );
    }
}
