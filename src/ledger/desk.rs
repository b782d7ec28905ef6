//! Where the cycle and the ledger's thread meet: the cycle hands over what it saw, the ledger its figures.
//!
//! Two locks, each held for a move of a pointer. Neither side ever waits for the other's reads and writes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::entries::{GpuError, Name, Reason, Sample};
use crate::attribute::Role;
use crate::clock::Moment;
use crate::collect::kernel_log::Entry;
use crate::discover::Inventory;
use crate::host::Bell;
use crate::parse::kernel_log::{Line, Xid};

/// Errors of GPUs that wait for a cycle at most.
const MOST_XIDS: usize = 10_000;

/// What one cycle saw, as far as the ledger needs it.
#[derive(Clone, Debug)]
pub struct Handed {
    /// When the cycle began.
    pub at: Moment,
    /// The running containers.
    pub inventory: Arc<Inventory>,
    /// By the number of the container.
    pub containers: Vec<Held>,
    /// MemTotal and MemAvailable.
    pub host_memory: Option<(u64, u64)>,
}

/// What one container held.
#[derive(Clone, Debug, Default)]
pub struct Held {
    /// Its memory.
    pub sample: Option<Sample>,
    /// Its processes.
    pub processes: Vec<Process>,
    /// Highest usage of the run.
    pub peak_usage_bytes: Option<u64>,
    /// Highest sample of what the kernel cannot drop.
    pub peak_unreclaimable_bytes: Option<u64>,
}

/// One process of a container.
#[derive(Clone, Debug)]
pub struct Process {
    /// Host pid.
    pub pid: u32,
    /// Parent.
    pub ppid: u32,
    /// Name, made printable.
    pub comm: Arc<str>,
    /// What it is for.
    pub role: Role,
    /// Its program is a Python interpreter.
    pub python: bool,
    /// Resident memory.
    pub rss_bytes: u64,
    /// Proportional share, if measured.
    pub pss_bytes: Option<u64>,
}

/// The ledger's figures, all of one instant.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// Every kill on this host.
    pub host_kills: u64,
    /// Of these, processes outside containers.
    pub host_process_kills: u64,
    /// Of these, the ones that no evidence ties to anybody.
    pub unattributed: u64,
    /// Of these, the ones known only from the kernel's counter.
    pub gaps: u64,
    /// Second lines of one kill.
    pub duplicate_lines: u64,
    /// Sources and whether they can be read now.
    pub sources: Vec<(&'static str, bool)>,
    /// Facts are written to disk. `None`: they are kept in memory because that was asked for.
    pub store_up: Option<bool>,
    /// Containers that run or ended a while ago.
    pub containers: Vec<ContainerFigures>,
}

/// Figures of one container's name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ContainerFigures {
    /// Who.
    pub name: Name,
    /// By victim (main, child) and scope (container, host).
    pub kills: [[u64; 2]; 2],
    /// Unix time of the last kill.
    pub last_kill: Option<f64>,
    /// By reason, in the order of [`Reason::ALL`].
    pub exits: [u64; Reason::ALL.len()],
    /// Of the last end.
    pub last_exit_code: Option<i64>,
    /// Starts after the first.
    pub restarts: u64,
}

/// The place.
#[derive(Debug, Default)]
pub struct Desk {
    /// Rung when there is something for the ledger.
    pub bell: Arc<Bell>,
    handed: Mutex<Option<Handed>>,
    /// Stamp of the kernel log's newest record at the start, by the log's own clock: what is not newer is of before.
    log_began_usec: u64,
    xids: Mutex<Xids>,
    /// Errors of GPUs, told apart and given to their containers, that are to become events.
    gpu_errors: Mutex<Vec<GpuError>>,
    figures: Mutex<Option<Arc<Figures>>>,
    /// How often events were written to the store.
    written: AtomicU64,
    /// By follower, the number of the last event that it is done with.
    acknowledged: Mutex<BTreeMap<String, u64>>,
}

/// Errors of GPUs that the kernel log told.
#[derive(Debug, Default)]
struct Xids {
    /// When the log was read to its end last, in Unix time.
    read: Option<f64>,
    /// With their Unix time.
    told: Vec<(f64, Xid)>,
}

impl Desk {
    /// An empty place. Of the kernel log, what came after this stamp is of now.
    pub fn new(log_began_usec: u64) -> Self {
        Self { log_began_usec, ..Self::default() }
    }

    /// The cycle hands over; what the ledger has not taken yet is replaced.
    pub fn hand_over(&self, handed: Handed) {
        *self.handed.lock().unwrap_or_else(PoisonError::into_inner) = Some(handed);
    }

    /// The ledger takes what lies there.
    pub fn take(&self) -> Option<Handed> {
        self.handed.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// The ledger's thread lays down the errors of GPUs that it found in the kernel log, and goes on with the rest. Those of
    /// before the start are dropped: their pids say nothing.
    pub fn keep_xids(&self, now: Moment, entries: Vec<Entry>) -> Vec<Entry> {
        let mut xids = self.xids.lock().unwrap_or_else(PoisonError::into_inner);
        let read = xids.read.replace(now.unix_seconds());
        let mut rest = entries;
        rest.retain(|entry| match &entry.line {
            Line::Xid(xid) if entry.position.usec > self.log_began_usec && xids.told.len() < MOST_XIDS => {
                xids.told.push((now.unix_seconds_of_record(entry.position.usec, read), *xid));
                false
            }
            Line::Xid(_) => false,
            _ => true,
        });
        rest
    }

    /// The cycle takes them, with their Unix times.
    pub fn take_xids(&self) -> Vec<(f64, Xid)> {
        std::mem::take(&mut self.xids.lock().unwrap_or_else(PoisonError::into_inner).told)
    }

    /// The cycle lays down errors of GPUs, whose numbers the ledger gives.
    pub fn enter_gpu_errors(&self, errors: Vec<GpuError>) {
        let mut waiting = self.gpu_errors.lock().unwrap_or_else(PoisonError::into_inner);
        let room = MOST_XIDS.saturating_sub(waiting.len());
        waiting.extend(errors.into_iter().take(room));
    }

    /// The ledger takes them.
    pub fn take_gpu_errors(&self) -> Vec<GpuError> {
        std::mem::take(&mut *self.gpu_errors.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The ledger has written events to the store.
    pub fn note_written(&self) {
        self.written.fetch_add(1, Ordering::Relaxed);
    }

    /// A number that changes whenever events were written: a follower need not look before that.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// A follower is done with all events up to this number. The ledger remembers it over restarts.
    pub fn acknowledge(&self, follower: &str, id: u64) {
        let mut acknowledged = self.acknowledged.lock().unwrap_or_else(PoisonError::into_inner);
        acknowledged.insert(follower.to_owned(), id);
    }

    /// The ledger takes what followers have acknowledged since the last time.
    pub fn take_acknowledged(&self) -> BTreeMap<String, u64> {
        std::mem::take(&mut *self.acknowledged.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The ledger puts its figures out.
    pub fn publish(&self, figures: Figures) {
        *self.figures.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(figures));
    }

    /// The newest figures; `None` before the store was read.
    pub fn figures(&self) -> Option<Arc<Figures>> {
        self.figures.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::kernel_log::Position;
    use std::time::Duration;

    #[test]
    fn errors_of_gpus_from_before_the_start_are_dropped_by_the_logs_own_clock() {
        let entry = |usec: u64| {
            let text = "NVRM: Xid (PCI:0000:66:00): 31, pid=7, name=python";
            let line = Line::of(text.as_bytes()).expect("a line that is known");
            Entry { position: Position { sequence: None, usec }, line, text: text.into() }
        };
        let (now, desk) = (Moment::now(), Desk::new(70));
        assert_eq!(desk.keep_xids(now, vec![entry(69), entry(70), entry(71)]), []);
        let times = |desk: &Desk| desk.take_xids().iter().map(|(at, _)| *at).collect::<Vec<_>>();
        assert_eq!(times(&desk), [now.unix_seconds_of_kernel(71)]);
        desk.keep_xids(now.plus(Duration::from_secs(1)), vec![entry(72)]);
        assert_eq!(
            times(&desk),
            [now.unix_seconds()],
            "it was not there a second ago: the log's clock is late"
        );
    }
}
