//! State that the sampling cycle and the ledger's thread share: the cycle publishes its data, the ledger its figures.
//!
//! Each lock is held to move some values, so neither side waits for the other's reads and writes.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::clock::Timestamp;
use crate::collect::cycle::CycleCounts;
use crate::discover::{ContainerId, Inventory};
use crate::events::{ExitReason, GpuError, Identity};
use crate::gpu_state::gpu_count::GpuCount;
use crate::host::Waker;
use crate::host::process::ProcessId;
use crate::parse::kernel_log::Xid;
use crate::runs::peaks::StoredPeaks;
use crate::runs::usage::ContainerUsage;
use crate::stats::report_stats::ReportStats;

/// How many cycles wait for the ledger at most: a write to a busy disk may take seconds, and a cycle much less.
const MAX_WAITING_CYCLES: usize = 50;
/// Beyond this many containers and processes in all of them only the newest [`MIN_WAITING_CYCLES`] wait, so that they need little memory.
const MAX_WAITING_USAGES: usize = 5_000;
const MIN_WAITING_CYCLES: usize = 5;
/// Maximum number of GPU errors that wait for a cycle.
const MAX_XIDS: usize = 10_000;

/// The data of one cycle that the ledger needs.
#[derive(Clone, Debug)]
pub struct CycleReport {
    /// When the cycle began.
    pub at: Timestamp,
    /// Running containers.
    pub inventory: Arc<Inventory>,
    /// Usage by container, in the order of the inventory.
    pub containers: Vec<Arc<ContainerUsage>>,
    /// MemTotal and MemAvailable, in bytes.
    pub host_memory: Option<(u64, u64)>,
    /// Who holds memory of the GPUs.
    pub gpus: Vec<GpuUse>,
}

/// The memory of one GPU by holder.
#[derive(Clone, Debug, Default)]
pub struct GpuUse {
    /// Index of the GPU.
    pub index: Arc<str>,
    /// Its UUID, or that of the instance.
    pub uuid: Arc<str>,
    /// Processes on it.
    pub processes: Vec<GpuProcessUse>,
    /// Holders, largest first.
    pub holders: Vec<GpuUser>,
}

/// One process on a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuProcessUse {
    /// Its pid and start time.
    pub id: ProcessId,
    /// Its container; `None` if none is shown.
    pub container: Option<ContainerId>,
    /// Its memory; `None` if the driver does not report it.
    pub bytes: Option<u64>,
}

/// The processes of one container on a GPU.
#[derive(Clone, Debug)]
pub struct GpuUser {
    /// The container; `None` for all processes of which no container is shown.
    pub container: Option<ContainerId>,
    /// Its name, in a pod after namespace and pod.
    pub name: Arc<str>,
    /// Their memory; `None` if the driver does not report it.
    pub bytes: Option<u64>,
}

impl GpuUser {
    /// Returns whether both are of one container, also if it was created again under its name.
    pub fn is_same(&self, other: &Self) -> bool {
        self.container.is_some() == other.container.is_some() && self.name == other.name
    }
}

/// Figures that are older are those of a ledger that hangs: it publishes them every ten seconds, and a step takes seconds at most.
const MAX_FIGURES_AGE: Duration = Duration::from_secs(30);

/// A source of evidence of OOM kills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceName {
    /// The kernel log.
    Kmsg,
    /// The kernel's counter in /proc/vmstat.
    Vmstat,
    /// The counters of the containers' cgroups.
    Cgroup,
    /// The runtimes.
    Runtime,
}

impl SourceName {
    /// Returns the label value.
    pub const fn label(self) -> &'static str {
        match self {
            SourceName::Kmsg => "kmsg",
            SourceName::Vmstat => "vmstat",
            SourceName::Cgroup => "cgroup",
            SourceName::Runtime => "runtime",
        }
    }
}

/// The ledger's figures at one instant.
#[derive(Clone, Debug, Default)]
pub struct LedgerFigures {
    /// False if there is a ledger whose counts cannot be read: counts from 0 would later jump, so none is shown.
    pub has_counts: bool,
    /// Unix time since which the ledger counts: its first start.
    pub counted_since: f64,
    /// OOM kills on this host.
    pub host_kills: u64,
    /// Of these, kills of processes outside containers, because the host ran out of memory.
    pub host_process_kills: u64,
    /// Of these, kills of such processes at the limit of a cgroup.
    pub host_process_kills_at_limit: u64,
    /// Of these, kills that could not be attributed.
    pub unattributed: u64,
    /// Of these, kills known only from the kernel's counter.
    pub gaps: u64,
    /// Second records of the same kill.
    pub duplicate_lines: u64,
    /// Each source, and whether it can be read now.
    pub sources: Vec<(SourceName, bool)>,
    /// Whether events are written to disk; `None` if the configuration keeps them in memory.
    pub store_up: Option<bool>,
    /// Rows of the store that could not be parsed at the start.
    pub unreadable_rows: u64,
    /// Logs of containers are read.
    pub reads_logs: bool,
    /// Containers that are running or ended within `keep_ended`.
    pub containers: Vec<ContainerFigures>,
}

impl LedgerFigures {
    /// Returns the OOM kills on this host, if they are known.
    pub fn oom_kills(&self) -> Option<u64> {
        self.has_counts.then_some(self.host_kills)
    }
}

/// Figures of one container name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ContainerFigures {
    /// Labels of the container.
    pub identity: Identity,
    /// Unix time since which this name is counted.
    pub since: Option<f64>,
    /// OOM kills of the container that has this name, before it had it.
    pub former_kills: u64,
    /// Unix time of the last kill of a container that had another name before.
    pub former_last_kill: Option<f64>,
    /// By victim (main, child) and scope (container, host).
    pub kills: [[u64; 2]; 2],
    /// Unix time of the last kill.
    pub last_kill: Option<f64>,
    /// By reason, in the order of [`ExitReason::ALL`].
    pub exits: [u64; ExitReason::ALL.len()],
    /// Exit code of the last exit.
    pub last_exit_code: Option<i64>,
    /// Starts after the first.
    pub restarts: u64,
    /// CUDA out-of-memory errors by source, in the order of `CudaOomSource::ALL`; `None` where the source never was there.
    pub cuda_ooms: [Option<u64>; 2],
    /// Unix time of the last one.
    pub last_cuda_oom: Option<f64>,
}

impl ContainerFigures {
    /// Returns what screens show of them.
    pub fn counts(&self) -> CycleCounts {
        CycleCounts {
            oom_kills: self.kills.as_flattened().iter().sum::<u64>() + self.former_kills,
            last_oom_kill: self.last_kill.into_iter().chain(self.former_last_kill).reduce(f64::max),
            cuda_ooms: self.cuda_ooms.iter().flatten().copied().reduce(|one, other| one + other),
        }
    }
}

/// The shared state.
#[derive(Debug, Default)]
pub struct SharedState {
    /// Wakes the ledger's thread when there is work for it.
    pub waker: Arc<Waker>,
    /// What the ledger's thread has not taken yet.
    input: Mutex<LedgerInput>,
    /// What the threads of the ledger and of the kernel log have published.
    output: Mutex<LedgerOutput>,
    /// What the followers of the ledger have read.
    pub followers: Followers,
}

/// What waits for the ledger's thread.
#[derive(Debug, Default)]
struct LedgerInput {
    /// Cycles, oldest first.
    cycles: VecDeque<CycleReport>,
    /// GPU errors, deduplicated and attributed, that become events.
    gpu_errors: Vec<GpuError>,
    /// By source, numbers of GPUs to write.
    gpu_counts: BTreeMap<String, GpuCount>,
}

/// What cycles take from the threads of the ledger and of the kernel log.
#[derive(Debug, Default)]
struct LedgerOutput {
    /// GPU errors from the kernel log with their Unix times.
    xids: Vec<(f64, Xid)>,
    /// Figures, and when they were published.
    figures: Option<(Timestamp, Arc<LedgerFigures>)>,
    /// What the ledger had when it was opened, once.
    stored: Option<StoredFigures>,
}

/// What cycles continue after a restart of memledger.
#[derive(Debug, Default)]
pub struct StoredFigures {
    /// The peaks of runs in progress.
    pub peaks: HashMap<ContainerId, StoredPeaks>,
    /// By source, the numbers of GPUs.
    pub gpu_counts: BTreeMap<String, GpuCount>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SharedState {
    /// Publishes the data of a cycle. If the ledger has not taken the cycles before it, the oldest of them is dropped at some time:
    /// the newest one lists no container that has ended meanwhile.
    pub fn publish_cycle(&self, report: CycleReport) {
        let cycles = &mut lock(&self.input).cycles;
        cycles.push_back(report);
        let of = |report: &CycleReport| -> usize {
            report.containers.iter().map(|usage| 1 + usage.processes.len()).sum()
        };
        let usages = |cycles: &VecDeque<CycleReport>| cycles.iter().map(of).sum::<usize>();
        while cycles.len() > MAX_WAITING_CYCLES
            || (cycles.len() > MIN_WAITING_CYCLES && usages(cycles) > MAX_WAITING_USAGES)
        {
            cycles.pop_front();
        }
    }

    /// Takes the data of the cycles since the last call, oldest first.
    pub fn take_cycles(&self) -> VecDeque<CycleReport> {
        std::mem::take(&mut lock(&self.input).cycles)
    }

    /// Adds GPU errors of the kernel log with their Unix times.
    pub fn add_xids(&self, found: Vec<(f64, Xid)>) {
        if found.is_empty() {
            return;
        }
        let xids = &mut lock(&self.output).xids;
        let space = MAX_XIDS.saturating_sub(xids.len());
        xids.extend(found.into_iter().take(space));
    }

    /// Takes the GPU errors of the kernel log with their Unix times.
    pub fn take_xids(&self) -> Vec<(f64, Xid)> {
        std::mem::take(&mut lock(&self.output).xids)
    }

    /// Adds GPU errors; the ledger assigns their ids.
    pub fn add_gpu_errors(&self, errors: Vec<GpuError>) {
        let waiting = &mut lock(&self.input).gpu_errors;
        let space = MAX_XIDS.saturating_sub(waiting.len());
        waiting.extend(errors.into_iter().take(space));
    }

    /// Takes the added GPU errors.
    pub fn take_gpu_errors(&self) -> Vec<GpuError> {
        std::mem::take(&mut lock(&self.input).gpu_errors)
    }

    /// Sets what cycles continue: the ledger was opened.
    pub fn set_stored(&self, stored: StoredFigures) {
        lock(&self.output).stored = Some(stored);
    }

    /// Takes what cycles continue, once.
    pub fn take_stored(&self) -> Option<StoredFigures> {
        lock(&self.output).stored.take()
    }

    /// Adds numbers of GPUs that the ledger has to write.
    pub fn set_gpu_counts(&self, counts: BTreeMap<String, GpuCount>) {
        lock(&self.input).gpu_counts.extend(counts);
    }

    /// Takes the numbers of GPUs since the last call.
    pub fn take_gpu_counts(&self) -> BTreeMap<String, GpuCount> {
        std::mem::take(&mut lock(&self.input).gpu_counts)
    }

    /// Publishes new figures.
    pub fn publish(&self, now: Timestamp, figures: LedgerFigures) {
        let figures = Some((now, Arc::new(figures)));
        let before = std::mem::replace(&mut lock(&self.output).figures, figures);
        drop(before); // it may be large: after the lock
    }

    /// Returns whether there are figures: there are none before the store was read.
    pub fn has_figures(&self) -> bool {
        lock(&self.output).figures.is_some()
    }

    /// Returns when the newest figures were published.
    pub fn published(&self) -> Option<Timestamp> {
        lock(&self.output).figures.as_ref().map(|(at, _)| *at)
    }

    /// Returns the newest figures. Old ones are those of a ledger that hangs, as on a disk that does not answer: neither its store nor
    /// its sources are up then.
    pub fn figures(&self, now: Timestamp) -> Option<Arc<LedgerFigures>> {
        let (at, figures) = lock(&self.output).figures.clone()?;
        if now.since(at) < MAX_FIGURES_AGE {
            return Some(figures);
        }
        let mut old = LedgerFigures::clone(&figures);
        old.store_up = old.store_up.map(|_| false);
        old.sources.iter_mut().for_each(|(_, is_up)| *is_up = false);
        Some(Arc::new(old))
    }
}

/// What the followers of the ledger have read, and what they count.
#[derive(Debug, Default)]
pub struct Followers {
    cursors: Mutex<FollowerCursors>,
    /// What those that write reports of runs count.
    pub report_stats: ReportStats,
}

#[derive(Debug, Default)]
struct FollowerCursors {
    /// Number of commits that wrote events.
    writes: u64,
    /// By follower, its cursor; `None` while the ledger is not open.
    cursors: Option<BTreeMap<String, u64>>,
    /// By follower, the id that it has acknowledged since the last commit.
    acknowledged: BTreeMap<String, u64>,
}

impl Followers {
    /// Notes that events were written to the store.
    pub fn mark_written(&self) {
        lock(&self.cursors).writes += 1;
    }

    /// Returns a number that changes whenever events are written, so that a follower knows when to read.
    pub fn written(&self) -> u64 {
        lock(&self.cursors).writes
    }

    /// Notes that a follower has processed all events up to this id. The ledger keeps it over restarts.
    pub fn acknowledge(&self, follower: &str, id: u64) {
        let state = &mut *lock(&self.cursors);
        state.acknowledged.insert(follower.to_owned(), id);
        if let Some(cursors) = &mut state.cursors {
            cursors.insert(follower.to_owned(), id);
        }
    }

    /// Takes the acknowledgements since the last call.
    pub fn take_acknowledged(&self) -> BTreeMap<String, u64> {
        std::mem::take(&mut lock(&self.cursors).acknowledged)
    }

    /// Sets the cursors of the followers: the ledger was opened.
    pub fn set_cursors(&self, cursors: BTreeMap<String, u64>) {
        let state = &mut *lock(&self.cursors);
        state.cursors = Some(cursors);
        state.writes += 1;
    }

    /// Returns the id that a follower has acknowledged last, 0 if none; `None` while the ledger is not open.
    pub fn cursor(&self, follower: &str) -> Option<u64> {
        lock(&self.cursors).cursors.as_ref().map(|cursors| cursors.get(follower).copied().unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_a_container_include_those_under_former_names() {
        let figures = ContainerFigures {
            former_kills: 2,
            former_last_kill: Some(9.0),
            kills: [[1, 0], [4, 0]],
            last_kill: Some(7.0),
            ..ContainerFigures::default()
        };
        let counts = CycleCounts { oom_kills: 7, last_oom_kill: Some(9.0), cuda_ooms: None };
        assert_eq!(figures.counts(), counts);
        let with_errors = ContainerFigures { cuda_ooms: [Some(1), Some(2)], ..figures };
        assert_eq!(with_errors.counts().cuda_ooms, Some(3));
    }

    #[test]
    fn figures_of_a_ledger_that_hangs_have_no_source_that_is_up() {
        let (shared, now) = (SharedState::default(), Timestamp::now());
        assert!(shared.figures(now).is_none() && !shared.has_figures());
        let sources = vec![(SourceName::Kmsg, true), (SourceName::Vmstat, false)];
        shared.publish(
            now,
            LedgerFigures { host_kills: 7, sources, store_up: Some(true), ..LedgerFigures::default() },
        );
        let at = |after: u64| {
            let figures = shared.figures(now.plus(Duration::from_secs(after))).unwrap();
            (figures.host_kills, figures.store_up, figures.sources.iter().filter(|(_, up)| *up).count())
        };
        assert_eq!(at(29), (7, Some(true), 1));
        assert_eq!(at(30), (7, Some(false), 0));
        shared.publish(now.plus(Duration::from_secs(30)), LedgerFigures::default());
        assert_eq!(at(30), (0, None, 0), "without a store there is none that is down");
    }

    #[test]
    fn keeps_the_newest_cycles_until_the_ledger_takes_them() {
        let (shared_state, began) = (SharedState::default(), Timestamp::now());
        let at = |second: u64| began.plus(Duration::from_secs(second));
        for (containers, kept) in [(1, 50), (500, 10), (1_000, 5), (6_000, 5)] {
            for second in 0..60 {
                shared_state.publish_cycle(CycleReport {
                    at: at(second),
                    inventory: Arc::default(),
                    containers: vec![Arc::default(); containers],
                    host_memory: None,
                    gpus: vec![],
                });
            }
            let taken: Vec<_> = shared_state.take_cycles().iter().map(|report| report.at).collect();
            assert_eq!(taken, (60 - kept..60).map(at).collect::<Vec<_>>(), "{containers}");
            assert!(shared_state.take_cycles().is_empty());
        }
    }
}
