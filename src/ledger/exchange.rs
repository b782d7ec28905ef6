//! State that the sampling cycle and the ledger's thread share: the cycle publishes its data, the ledger its figures.
//!
//! Each lock is held only to move a pointer, so neither side waits for the other's reads and writes; but they walk one cgroup tree
//! ([`CgroupTree`]), in turn.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::interval::Written;
use crate::clock::Timestamp;
use crate::collect::cycle::CycleCounts;
use crate::discover::cgroup_tree::CgroupTree;
use crate::discover::{ContainerId, Hierarchy, Inventory};
use crate::events::{ExitReason, GpuError, Identity};
use crate::gpu_state::gpu_count::GpuCount;
use crate::host::Waker;
use crate::host::process::ProcessId;
use crate::ledger::sources::kernel_log::LogEntry;
use crate::parse::kernel_log::{Line, Xid};
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
    /// Cycles that the ledger has not taken yet.
    cycles: Mutex<VecDeque<CycleReport>>,
    /// Stamp of the kernel log's newest record at the start, by the log's own clock. Older records are ignored.
    log_start_usec: u64,
    /// GPU errors from the kernel log with their Unix times.
    xids: Mutex<Vec<(f64, Xid)>>,
    /// GPU errors, deduplicated and attributed, that become events.
    gpu_errors: Mutex<Vec<GpuError>>,
    /// Figures, and when they were published.
    figures: Mutex<Option<(Timestamp, Arc<LedgerFigures>)>>,
    /// Number of commits that wrote events.
    writes: AtomicU64,
    /// By follower, the id that it has acknowledged since the last commit.
    acknowledged: Mutex<BTreeMap<String, u64>>,
    /// The peaks of runs in progress when the ledger was opened.
    stored_peaks: Mutex<Option<HashMap<ContainerId, StoredPeaks>>>,
    /// By source, the numbers of GPUs that the ledger has to write.
    gpu_counts: Mutex<BTreeMap<String, GpuCount>>,
    /// By source, the numbers of GPUs that it had when it was opened.
    stored_gpu_counts: Mutex<Option<BTreeMap<String, GpuCount>>>,
    /// By follower, its cursor; `None` while the ledger is not open.
    cursors: Mutex<Option<BTreeMap<String, u64>>>,
    /// What the followers that write reports of runs count.
    pub report_stats: ReportStats,
    /// The cgroup tree, which the cycle and the ledger walk together.
    cgroup_tree: OnceLock<CgroupTree>,
}

impl SharedState {
    /// Creates empty state. Kernel log records up to this stamp count as old.
    pub fn new(log_start_usec: u64) -> Self {
        Self { log_start_usec, ..Self::default() }
    }

    /// Returns a handle of the cgroup tree that the cycle and the ledger have in common.
    pub fn cgroup_tree(&self, hierarchy: &Hierarchy) -> CgroupTree {
        self.cgroup_tree.get_or_init(|| CgroupTree::new(hierarchy)).share()
    }

    /// Publishes the data of a cycle. If the ledger has not taken the cycles before it, the oldest of them is dropped at some time:
    /// the newest one lists no container that has ended meanwhile.
    pub fn publish_cycle(&self, report: CycleReport) {
        let mut cycles = self.cycles.lock().unwrap_or_else(PoisonError::into_inner);
        cycles.push_back(report);
        let of = |report: &CycleReport| -> usize {
            report.containers.iter().map(|usage| 1 + usage.processes.len()).sum()
        };
        let usages = |cycles: &VecDeque<CycleReport>| cycles.iter().map(of).sum::<usize>();
        while cycles.len() > MAX_WAITING_CYCLES
            || (cycles.len() > MIN_WAITING_CYCLES && usages(&cycles) > MAX_WAITING_USAGES)
        {
            cycles.pop_front();
        }
    }

    /// Takes the data of the cycles since the last call, oldest first.
    pub fn take_cycles(&self) -> VecDeque<CycleReport> {
        std::mem::take(&mut *self.cycles.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Stores the GPU errors among these kernel log entries and returns the other entries. Errors from before the start
    /// are dropped: their pids are no longer valid.
    pub fn store_xids(&self, mut entries: Vec<(LogEntry, Written)>) -> Vec<(LogEntry, Written)> {
        let mut xids = self.xids.lock().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|(entry, written)| {
            let Line::Xid(xid) = &entry.line else { return true };
            let usec = entry.position.usec;
            if usec > self.log_start_usec && xids.len() < MAX_XIDS {
                xids.push((written.at, *xid));
            }
            false
        });
        entries
    }

    /// Takes the stored kernel log errors with their Unix times.
    pub fn take_xids(&self) -> Vec<(f64, Xid)> {
        std::mem::take(&mut *self.xids.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Adds GPU errors; the ledger assigns their ids.
    pub fn add_gpu_errors(&self, errors: Vec<GpuError>) {
        let mut waiting = self.gpu_errors.lock().unwrap_or_else(PoisonError::into_inner);
        let space = MAX_XIDS.saturating_sub(waiting.len());
        waiting.extend(errors.into_iter().take(space));
    }

    /// Takes the added GPU errors.
    pub fn take_gpu_errors(&self) -> Vec<GpuError> {
        std::mem::take(&mut *self.gpu_errors.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the stamp of the kernel log's newest record at the start.
    pub fn log_start_usec(&self) -> u64 {
        self.log_start_usec
    }

    /// Notes that events were written to the store.
    pub fn mark_written(&self) {
        self.writes.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns a number that changes whenever events are written, so that a follower knows when to read.
    pub fn written(&self) -> u64 {
        self.writes.load(Ordering::Relaxed)
    }

    /// Notes that a follower has processed all events up to this id. The ledger keeps it over restarts.
    pub fn acknowledge(&self, follower: &str, id: u64) {
        let mut acknowledged = self.acknowledged.lock().unwrap_or_else(PoisonError::into_inner);
        acknowledged.insert(follower.to_owned(), id);
        if let Some(cursors) = &mut *self.cursors.lock().unwrap_or_else(PoisonError::into_inner) {
            cursors.insert(follower.to_owned(), id);
        }
    }

    /// Takes the acknowledgements since the last call.
    pub fn take_acknowledged(&self) -> BTreeMap<String, u64> {
        std::mem::take(&mut *self.acknowledged.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Sets the peaks of runs that the ledger has.
    pub fn set_stored_peaks(&self, peaks: HashMap<ContainerId, StoredPeaks>) {
        *self.stored_peaks.lock().unwrap_or_else(PoisonError::into_inner) = Some(peaks);
    }

    /// Takes these peaks, once.
    pub fn take_stored_peaks(&self) -> Option<HashMap<ContainerId, StoredPeaks>> {
        self.stored_peaks.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Adds numbers of GPUs that the ledger has to write.
    pub fn set_gpu_counts(&self, counts: BTreeMap<String, GpuCount>) {
        self.gpu_counts.lock().unwrap_or_else(PoisonError::into_inner).extend(counts);
    }

    /// Takes the numbers of GPUs since the last call.
    pub fn take_gpu_counts(&self) -> BTreeMap<String, GpuCount> {
        std::mem::take(&mut *self.gpu_counts.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Sets the numbers of GPUs that the ledger has.
    pub fn set_stored_gpu_counts(&self, counts: BTreeMap<String, GpuCount>) {
        *self.stored_gpu_counts.lock().unwrap_or_else(PoisonError::into_inner) = Some(counts);
    }

    /// Takes these numbers, once.
    pub fn take_stored_gpu_counts(&self) -> Option<BTreeMap<String, GpuCount>> {
        self.stored_gpu_counts.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Sets the cursors of the followers: the ledger was opened.
    pub fn set_cursors(&self, cursors: BTreeMap<String, u64>) {
        *self.cursors.lock().unwrap_or_else(PoisonError::into_inner) = Some(cursors);
        self.mark_written();
    }

    /// Returns the id that a follower has acknowledged last, 0 if none; `None` while the ledger is not open.
    pub fn cursor(&self, follower: &str) -> Option<u64> {
        let cursors = self.cursors.lock().unwrap_or_else(PoisonError::into_inner);
        cursors.as_ref().map(|cursors| cursors.get(follower).copied().unwrap_or(0))
    }

    /// Publishes new figures.
    pub fn publish(&self, now: Timestamp, figures: LedgerFigures) {
        *self.figures.lock().unwrap_or_else(PoisonError::into_inner) = Some((now, Arc::new(figures)));
    }

    /// Returns whether there are figures: there are none before the store was read.
    pub fn has_figures(&self) -> bool {
        self.figures.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Returns when the newest figures were published.
    pub fn published(&self) -> Option<Timestamp> {
        self.figures.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(|(at, _)| *at)
    }

    /// Returns the newest figures. Old ones are those of a ledger that hangs, as on a disk that does not answer: neither its store nor
    /// its sources are up then.
    pub fn figures(&self, now: Timestamp) -> Option<Arc<LedgerFigures>> {
        let (at, figures) = self.figures.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        if now.since(at) < MAX_FIGURES_AGE {
            return Some(figures);
        }
        let mut old = LedgerFigures::clone(&figures);
        old.store_up = old.store_up.map(|_| false);
        old.sources.iter_mut().for_each(|(_, is_up)| *is_up = false);
        Some(Arc::new(old))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::sources::kernel_log::LogPosition;

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

    #[test]
    fn drops_gpu_errors_from_before_the_start() {
        let entry = |usec: u64| {
            let text = "NVRM: Xid (PCI:0000:66:00): 31, pid=7, name=python";
            let line = Line::of(text.as_bytes()).expect("known line");
            LogEntry { position: LogPosition { sequence: None, usec }, line, text: text.into(), report: None }
        };
        let shared_state = SharedState::new(70);
        let entries = [69, 70, 71].map(|usec| (entry(usec), Written::exactly(usec as f64))).to_vec();
        assert_eq!(shared_state.store_xids(entries), []);
        let times: Vec<f64> = shared_state.take_xids().iter().map(|(at, _)| *at).collect();
        assert_eq!(times, [71.0], "its time is that of the log's clock");
    }
}
