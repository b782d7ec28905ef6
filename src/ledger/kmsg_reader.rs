//! Reads the kernel log as soon as a record arrives, and probes each victim at once.
//!
//! The ledger's thread may be busy for longer than a victim exists: under memory pressure, when kills happen, a sync to
//! disk can take seconds. So a separate thread waits for the device and buffers entries until the ledger takes them.
//! syslog(2) cannot be waited for: there, [`KmsgReader::take`] reads the log itself.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};

use super::exchange::SharedState;
use super::interval::{LogClock, Written};
use super::reconcile::ObservedRecord;
use super::victim_probe::VictimProbe;
use crate::clock::Timestamp;
use crate::host::ReadError;
use crate::host::panics::run_essential;
use crate::ledger::sources::kernel_log::{KernelLog, LogEntry, LogPosition};
use crate::parse::kernel_log::kills::KillAssembler;
use crate::parse::kernel_log::{Line, Xid};

/// Maximum number of buffered entries; further ones stay in the kernel's own buffer.
const MAX_WAITING: usize = 20_000;
/// Maximum number of buffered rows of the kernel's reports, of which each can have one for every process of the host: of further kills
/// the report is dropped. A row takes about 200 bytes.
const MAX_WAITING_ROWS: usize = 50_000;
/// How often the thread checks whether it is still needed and whether the buffer has space again.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// A reader of the kernel log.
#[derive(Debug)]
pub struct KmsgReader {
    shared: Arc<Mutex<KmsgShared>>,
    wakes_ledger: bool,
}

#[derive(Debug)]
struct KmsgShared {
    log: KernelLog,
    probe: VictimProbe,
    shared_state: Arc<SharedState>,
    /// Stamp of the log's newest record when memledger started, by the log's own clock.
    start_usec: u64,
    clock: LogClock,
    block: KillAssembler,
    /// The last read.
    read_at: Timestamp,
    batch: KmsgBatch,
    /// Rows of the reports in the batch.
    rows: usize,
}

/// The entries since the last call of [`KmsgReader::take`].
#[derive(Debug, Default)]
pub struct KmsgBatch {
    /// What the lines show of kills, in order.
    pub records: Vec<ObservedRecord>,
    /// Records were overwritten before they were read.
    pub lost: bool,
    /// The log went back to an earlier state, see [`crate::ledger::sources::kernel_log::LogBatch`].
    pub rewound: bool,
    /// Position up to which the log was read.
    pub position: LogPosition,
    /// What is known of the log's clock.
    pub clock: LogClock,
    /// The lines of the current block.
    pub block: KillAssembler,
}

impl KmsgReader {
    /// Starts to watch an open log; wakes the ledger's thread when there are new entries. If no thread can be created,
    /// [`KmsgReader::take`] reads the log. GPU errors up to the stamp `start_usec` are ignored.
    pub fn start(
        log: KernelLog,
        clock: LogClock,
        block: KillAssembler,
        probe: VictimProbe,
        (shared_state, start_usec): (&Arc<SharedState>, u64),
    ) -> Self {
        let device = log.fd().and_then(|fd| fd.try_clone_to_owned().ok());
        let shared = Arc::new(Mutex::new(KmsgShared {
            log,
            probe,
            shared_state: Arc::clone(shared_state),
            start_usec,
            clock,
            block,
            read_at: Timestamp::now(),
            batch: KmsgBatch::default(),
            rows: 0,
        }));
        let weak = Arc::downgrade(&shared);
        let thread = std::thread::Builder::new().name("kernel-log".into()).stack_size(256 * 1024);
        let body = move |device| run_essential("kernel-log", || watch(&device, &weak));
        let wakes_ledger = device.is_some_and(|device| thread.spawn(move || body(device)).is_ok());
        Self { shared, wakes_ledger }
    }

    /// Returns true if the ledger's thread is woken for new lines. Otherwise it must poll.
    pub fn wakes_ledger(&self) -> bool {
        self.wakes_ledger
    }

    /// Takes the buffered entries and all that can be read now.
    ///
    /// # Errors
    /// The log cannot be read any more, and the buffer is empty.
    pub fn take(&self) -> Result<KmsgBatch, ReadError> {
        let mut shared = lock(&self.shared);
        match shared.read() {
            Err(error) if shared.batch.records.is_empty() => Err(error),
            _ => {
                shared.rows = 0;
                Ok(std::mem::take(&mut shared.batch))
            }
        }
    }
}

/// Takes the GPU errors out of these entries. Those up to the stamp `start_usec` are dropped: their pids are no longer valid.
fn take_xids(entries: &mut Vec<(LogEntry, Written)>, start_usec: u64) -> Vec<(f64, Xid)> {
    let mut xids = Vec::new();
    entries.retain(|(entry, written)| {
        let Line::Xid(xid) = &entry.line else { return true };
        if entry.position.usec > start_usec {
            xids.push((written.at, *xid));
        }
        false
    });
    xids
}

impl KmsgShared {
    fn read(&mut self) -> Result<(), ReadError> {
        let (began, before) = (Timestamp::now(), self.log.position());
        let read = self.log.read()?;
        let read_at = Timestamp::now();
        // the ledger compares all with what its clock shows now
        let moved = read_at.wall_moved_since(std::mem::replace(&mut self.read_at, read_at));
        self.batch.records.iter_mut().for_each(|line| line.written = line.written.moved(moved));
        if read.rewound {
            (self.clock, self.block) = (LogClock::default(), KillAssembler::default());
        }
        if read.lost {
            self.block.records_lost(self.log.position().usec);
        }
        let mut placed = self.clock.place(read.entries, read_at);
        self.shared_state.add_xids(take_xids(&mut placed, self.start_usec));
        for (mut entry, written) in placed {
            limit_reports(&mut entry, &mut self.rows);
            let LogEntry { position, text, line, report } = entry;
            let Some(record) = self.block.push(position.usec, &line, report.as_ref()) else { continue };
            let proc_info = self.probe.probe(&record, &written.within);
            self.batch.records.push(ObservedRecord { position, text, record, written, proc_info });
        }
        let position = self.log.position();
        if position.usec > before.usec {
            self.clock.written(position.usec, read_at); // any record tells something of the clock
        }
        self.clock.caught_up(began);
        self.batch.lost |= read.lost;
        self.batch.rewound |= read.rewound;
        (self.batch.position, self.batch.clock, self.batch.block) =
            (position, self.clock, self.block.clone());
        Ok(())
    }
}

/// Drops the report of an entry if the buffer has too many rows of reports already.
fn limit_reports(entry: &mut LogEntry, rows: &mut usize) {
    if *rows >= MAX_WAITING_ROWS {
        entry.report = None;
    }
    *rows += entry.report.as_ref().map_or(0, |report| report.processes.len());
}

fn lock(shared: &Mutex<KmsgShared>) -> MutexGuard<'_, KmsgShared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs until the reader is dropped.
fn watch(device: &OwnedFd, shared: &Weak<Mutex<KmsgShared>>) {
    // raise the priority if permitted: a busy machine overwrites its log within a second. The thread has little to do
    let _ = rustix::process::nice(-10);
    let timeout = rustix::event::Timespec { tv_sec: CHECK_INTERVAL.as_secs() as i64, tv_nsec: 0 };
    loop {
        let polled = poll(&mut [PollFd::new(device, PollFlags::IN | PollFlags::PRI)], Some(&timeout));
        let Some(shared) = shared.upgrade() else { return };
        let mut shared = lock(&shared);
        if polled == Ok(0) {
            let checked = Timestamp::now();
            if poll(&mut [PollFd::new(device, PollFlags::IN)], Some(&rustix::event::Timespec::default()))
                == Ok(0)
            {
                shared.clock.caught_up(checked);
            }
            continue;
        }
        let is_full = shared.batch.records.len() >= MAX_WAITING;
        let failed = !is_full && shared.read().is_err();
        if failed || !shared.batch.records.is_empty() || shared.batch.lost {
            shared.shared_state.waker.wake();
        }
        drop(shared);
        if failed || is_full || polled.is_err() {
            std::thread::park_timeout(CHECK_INTERVAL); // the ledger handles the failure; this only avoids a busy loop
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse::kernel_log::Killed;
    use crate::parse::kernel_log::report::{OomReport, ReportProcess};

    #[test]
    fn drops_gpu_errors_from_before_the_start() {
        let entry = |usec: u64| {
            let text = "NVRM: Xid (PCI:0000:66:00): 31, pid=7, name=python";
            let line = Line::of(text.as_bytes()).expect("known line");
            LogEntry { position: LogPosition { sequence: None, usec }, line, text: text.into(), report: None }
        };
        let mut entries = [69, 70, 71].map(|usec| (entry(usec), Written::exactly(usec as f64))).to_vec();
        let times: Vec<f64> = take_xids(&mut entries, 70).iter().map(|(at, _)| *at).collect();
        assert_eq!((times, entries.len()), (vec![71.0], 0), "its time is that of the log's clock");
    }

    #[test]
    fn reports_are_dropped_while_the_ledger_hangs_and_kills_are_not() {
        let report = OomReport { processes: vec![ReportProcess::default(); 4_096], ..OomReport::default() };
        let report = Arc::new(report);
        let mut rows = 0;
        let kept = (0..MAX_WAITING).filter(|_| {
            let mut entry = LogEntry {
                position: LogPosition::default(),
                line: Line::Killed(Killed::default()),
                text: "".into(),
                report: Some(Arc::clone(&report)),
            };
            limit_reports(&mut entry, &mut rows);
            entry.report.is_some()
        });
        assert_eq!(kept.count(), 13);
        assert!(rows < MAX_WAITING_ROWS + 4_096);
    }
}
