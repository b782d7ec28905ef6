//! Reads what the host knows of the past, all sources at the same time.

use std::time::Duration;

use serde::Serialize;

use super::LogResume;
use crate::clock::Timestamp;
use crate::config::{Config, KernelLogChoice};
use crate::discover::history::{self, RuntimeHistory};
use crate::ledger::interval::LogClock;
use crate::ledger::reconcile::ObservedRecord;
use crate::ledger::sources::kernel_log::{KernelLog, LogBackend, LogEntry, LogPosition};
use crate::ledger::sources::vmstat_oom::OomCounter;
use crate::ledger::victim_probe::VictimProbe;
use crate::parse::kernel_log::Line;
use crate::parse::kernel_log::kills::{KillAssembler, KillRecord};
use crate::text::error_chain;

/// How far the kernel log reaches.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "state")]
pub enum LogCoverage {
    /// It was read.
    Read {
        /// Unix time of its oldest record; `None` if it is empty.
        since: Option<f64>,
    },
    /// It cannot be read.
    Unreadable {
        /// Why.
        reason: String,
    },
    /// `memledger serve` follows it.
    Followed,
    /// It is not read, by configuration.
    #[default]
    Off,
}

/// What the kernel log has.
#[derive(Debug, Default)]
pub struct LogPast {
    /// How far it reaches.
    pub coverage: LogCoverage,
    /// OOM kills in it.
    pub kills: u64,
    entries: Vec<LogEntry>,
    oldest: Option<LogPosition>,
    end: Option<LogPosition>,
}

/// What the host knows of the past.
#[derive(Debug, Default)]
pub struct HostPast {
    /// What each runtime knows.
    pub runtimes: Vec<RuntimeHistory>,
    /// What the kernel log has.
    pub log: LogPast,
    /// The kernel's number of OOM kills since the boot; `None` if it cannot be read.
    pub counted: Option<u64>,
}

impl HostPast {
    /// Reads it.
    ///
    /// `container`: the container whose details are read first. `for_details`: how long the details of all containers may take; the rest takes
    /// less than two seconds.
    pub fn read(config: &Config, now: Timestamp, container: Option<&str>, for_details: Duration) -> Self {
        std::thread::scope(|scope| {
            let runtimes = scope.spawn(|| read_runtimes(config, now, container, for_details));
            // before the log: what is counted is logged within moments
            let counted = counted_kills(config);
            let log = LogPast::read(config, now);
            Self { runtimes: runtimes.join().unwrap_or_default(), log, counted }
        })
    }

    /// Leaves the past to a `serve` that follows the host, and keeps what exists.
    pub fn leave_to_serve(&mut self) {
        (self.log, self.counted) = (LogPast { coverage: LogCoverage::Followed, ..LogPast::default() }, None);
    }

    /// Returns the Unix time from which on every OOM kill is known; `None` if the kernel log was not read, and there were some.
    pub fn log_since(&self, now: Timestamp) -> Option<f64> {
        match self.log.coverage {
            // nothing is missing: the kernel has counted no others
            _ if self.counted.is_some_and(|counted| counted <= self.log.kills) => Some(now.booted_at()),
            LogCoverage::Read { since } => since,
            LogCoverage::Followed | LogCoverage::Unreadable { .. } | LogCoverage::Off => None,
        }
    }

    /// Returns whether this boot had OOM kills whose records are missing.
    pub fn has_lost_records(&self) -> bool {
        self.counted.is_some_and(|counted| counted > self.log.kills)
    }
}

/// Returns the kernel's number of OOM kills since the boot.
pub(super) fn counted_kills(config: &Config) -> Option<u64> {
    OomCounter::open(&config.host_paths).and_then(|mut counter| counter.read()).ok()
}

/// Reads what all runtimes know of this boot, and whether the first processes of their containers exist. `for_details`: how long the
/// details of all containers may take.
pub fn read_runtimes(
    config: &Config,
    now: Timestamp,
    container: Option<&str>,
    for_details: Duration,
) -> Vec<RuntimeHistory> {
    if !config.oom.runtime {
        return vec![];
    }
    let mut runtimes =
        history::read(config, now, now.booted_at(), container, for_details).unwrap_or_default();
    // where processes of others are hidden, none of them exists
    if config.host_paths.in_initial_pid_namespace() && config.host_paths.process(1).exists() {
        let is_gone = |pid: u32| !config.host_paths.process(pid).exists();
        for container in runtimes.iter_mut().flat_map(|history| &mut history.containers) {
            container.has_lost_process = container.first_process.is_some_and(is_gone);
        }
    }
    runtimes
}

impl LogPast {
    /// Reads the kernel log from its oldest record.
    fn read(config: &Config, now: Timestamp) -> Self {
        let mut refused: Vec<String> = Vec::new();
        for backend in log_backends(config.oom.kernel_log) {
            let read = KernelLog::open(&config.host_paths, *backend)
                .and_then(|mut log| Ok((log.read()?.entries, log.oldest(), log.position())));
            match read {
                Ok((entries, oldest, end)) => {
                    let since = oldest.map(|oldest| now.unix_seconds_of_kernel(oldest.usec));
                    let coverage = LogCoverage::Read { since };
                    let mut past = Self { coverage, entries, oldest, end: Some(end), kills: 0 };
                    past.kills = past.count();
                    return past;
                }
                Err(error) => refused.push(error_chain(&error)),
            }
        }
        let coverage = match refused.is_empty() {
            true => LogCoverage::Off,
            false => LogCoverage::Unreadable { reason: refused.join("; ") },
        };
        Self { coverage, ..Self::default() }
    }

    /// Returns the block at the oldest record: unless that is the first of the boot, it may lack the begins of others.
    fn first_block(&self) -> KillAssembler {
        let mut block = KillAssembler::default();
        // the first record of a boot has number 0, and stamp 0
        if let Some(oldest) = self.oldest.filter(|oldest| oldest.sequence.unwrap_or(oldest.usec) != 0) {
            block.records_lost(oldest.usec);
        }
        block
    }

    /// Returns the number of OOM kills in it.
    fn count(&self) -> u64 {
        let mut block = self.first_block();
        let entries = self.entries.iter().filter(|entry| entry.line != Line::Resumed);
        let records =
            entries.filter_map(|entry| block.push(entry.position.usec, &entry.line, entry.report.as_ref()));
        records.filter(|record| !matches!(record, KillRecord::Group { .. })).count() as u64
    }

    /// Takes the lines after what a ledger has read, with when they were written; and up to where the log was read, with its clock and
    /// block there.
    pub(super) fn take_lines(
        &mut self,
        resume: Option<LogResume>,
        now: Timestamp,
        probe: &VictimProbe,
    ) -> (Vec<ObservedRecord>, Option<LogResume>) {
        let Some(end) = self.end else { return (vec![], None) };
        let mut entries = std::mem::take(&mut self.entries);
        let resume = resume.filter(|(position, ..)| *position != LogPosition::default());
        let (mut clock, mut block) = (LogClock::default(), self.first_block());
        if let Some((position, known_clock, known_block)) = resume {
            if is_after(position, end) {
                return (vec![], None); // the machine was restored to an earlier state
            }
            entries.retain(|entry| is_after(entry.position, position));
            (clock, block) = (known_clock, known_block);
            let is_lost = |oldest: &LogPosition| match (oldest.sequence, position.sequence) {
                (Some(oldest), Some(read)) => oldest > read + 1,
                _ => oldest.usec > position.usec,
            };
            if let Some(oldest) = self.oldest.filter(is_lost) {
                block.records_lost(oldest.usec);
            }
        }
        let mut lines = Vec::new();
        for (entry, written) in clock.place(entries, now) {
            let record = block.push(entry.position.usec, &entry.line, entry.report.as_ref());
            let Some(record) = record else { continue };
            let proc_info = probe.probe(&record, &written.within);
            let (position, text) = (entry.position, entry.text);
            lines.push(ObservedRecord { position, text, record, written, proc_info });
        }
        (lines, Some((end, clock, block)))
    }
}

/// Returns whether a record is later in the log than another.
fn is_after(record: LogPosition, other: LogPosition) -> bool {
    match (record.sequence, other.sequence) {
        (Some(record), Some(other)) => record > other,
        _ => record.usec > other.usec,
    }
}

/// Returns the backends to try, in order.
pub fn log_backends(log_choice: KernelLogChoice) -> &'static [LogBackend] {
    match log_choice {
        KernelLogChoice::Auto => &[LogBackend::Device, LogBackend::Syslog],
        KernelLogChoice::Device => &[LogBackend::Device],
        KernelLogChoice::Syslog => &[LogBackend::Syslog],
        KernelLogChoice::Off => &[],
    }
}
