//! What the kernel's report at a kill proves.
//!
//! A report is one moment: it proves nothing about growth. Resident memory of several processes is never added up, because
//! forked processes share pages.

use std::sync::Arc;

use serde::Serialize;

use super::advice::num_workers;
use super::limit::LimitSetter;
use super::{RunSummary, last_sample, program};
use crate::events::{Kill, OomReport, OomScope, ReportProcess, Role, RoleUsage};
use crate::parse::kernel_log::KernelHolder;

/// From this share of the usage on, a kind of memory or a process accounts for most of it.
const MOST: f64 = 0.5;
/// From this number of processes of similar size on, their number is the setting to change.
const MIN_ALIKE: usize = 4;
/// From this free share of a host's memory on, what filled the rest does not explain why it ran out.
const MUCH_FREE: f64 = 0.05;
/// The kernel's counters of a process may exceed what is charged by this factor.
const MAX_EXCESS: f64 = 1.1;
/// From this share of the usage, and this size, on, memory that no program holds is explained.
const MUCH: f64 = 0.1;
const MIN_MUCH: u64 = 16 << 20;
/// A process that was killed frees its memory within this.
const MAX_DYING_SECONDS: f64 = 1.0;
/// From this used share on, swap is exhausted: the kernel keeps some for itself.
const SWAP_FULL: f64 = 0.98;
/// The kernel never kills a process with this `oom_score_adj`.
pub const UNKILLABLE: i32 = -1000;

/// A fact of the kernel's report at a kill.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "finding", rename_all = "snake_case")]
pub enum ReportFinding {
    /// The kill was requested by sysrq: memory need not have run out.
    RequestedBySysrq,
    /// Memory and swap together reached their limit.
    MemoryAndSwap {
        /// Memory.
        memory_bytes: u64,
        /// Swap.
        swap_bytes: u64,
    },
    /// Free memory was in pieces that were too small for the request.
    Fragmented {
        /// The request was for 2^order contiguous pages.
        order: i32,
        /// Free memory.
        free_bytes: u64,
    },
    /// Memory was free, and not for this request.
    FreeButUnusable {
        /// Free memory.
        free_bytes: u64,
        /// Its part that is reserved for contiguous allocations of devices.
        #[serde(skip_serializing_if = "Option::is_none")]
        free_cma_bytes: Option<u64>,
    },
    /// Memory was free at a panic, and not for this request.
    FreeAtPanic {
        /// Free memory.
        free_bytes: u64,
        /// All of the host's.
        host_bytes: u64,
    },
    /// The victim had shared memory, which its end does not free.
    VictimSharedMemory {
        /// The resident part.
        shmem_bytes: u64,
    },
    /// Pages of a GPU driver hold much.
    GpuDriverPages {
        /// So much.
        #[serde(flatten)]
        share: UsageShare,
    },
    /// The hypervisor took back much.
    Balloon {
        /// So much.
        #[serde(flatten)]
        share: UsageShare,
    },
    /// Compressed swap is in the RAM itself.
    CompressedSwap {
        /// So much.
        #[serde(flatten)]
        share: UsageShare,
    },
    /// Most often a process that was killed just before still holds what no counter has.
    HeldByKilled {
        /// What no counter has.
        #[serde(flatten)]
        share: UsageShare,
        /// The name of that process.
        process: String,
        /// Its pid.
        #[serde(skip_serializing_if = "Option::is_none")]
        pid: Option<u32>,
    },
    /// Much of a cgroup's memory is in no counter.
    UnaccountedInCgroup {
        /// So much.
        #[serde(flatten)]
        share: UsageShare,
    },
    /// Much of the host's memory is in no counter.
    UnaccountedOnHost {
        /// So much.
        #[serde(flatten)]
        share: UsageShare,
        /// How often NVIDIA's driver was refused memory before.
        driver_refusals: u32,
    },
    /// Shared memory is most of it.
    SharedMemoryFilled {
        /// What was full.
        full: FullMemory,
        /// So much.
        #[serde(flatten)]
        share: UsageShare,
        /// Used bytes of `/dev/shm` at the last sample, where they are most of that.
        #[serde(skip_serializing_if = "Option::is_none")]
        dev_shm_bytes: Option<u64>,
    },
    /// Page cache is most of it.
    PageCacheFilled {
        /// What was full.
        full: FullMemory,
        /// So much.
        #[serde(flatten)]
        share: UsageShare,
        /// What waited to be written to a disk.
        #[serde(skip_serializing_if = "Option::is_none")]
        dirty_bytes: Option<u64>,
    },
    /// Memory of the kernel is most of it.
    KernelMemoryFilled {
        /// What was full.
        full: FullMemory,
        /// So much.
        #[serde(flatten)]
        share: UsageShare,
        /// What held the most, the largest first.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        holders: Vec<KernelHolder>,
    },
    /// Most is reserved as huge pages.
    HugePages {
        /// So much.
        #[serde(flatten)]
        share: UsageShare,
    },
    /// Anonymous memory is most of it.
    AnonymousMemoryFilled {
        /// What was full.
        full: FullMemory,
        /// So much.
        #[serde(flatten)]
        share: UsageShare,
    },
    /// One process held most.
    OneProcess {
        /// The process.
        #[serde(flatten)]
        largest: LargestProcess,
        /// What it held, without mapped files as far as they are known.
        bytes: u64,
        /// It was killed.
        is_victim: bool,
        /// It also had mapped files.
        has_mapped_files: bool,
        /// Its memory is that of a guest.
        is_virtual_machine: bool,
    },
    /// Many processes are of similar size.
    AlikeProcesses {
        /// How many.
        count: u32,
        /// There may be more: an event does not have all.
        is_cut: bool,
        /// Their role.
        #[serde(skip_serializing_if = "Option::is_none")]
        role: Option<Role>,
        /// The name of the largest, and without a role of all.
        process: String,
        /// Resident memory of the smallest.
        min_rss_bytes: u64,
        /// Resident memory of the largest.
        max_rss_bytes: u64,
        /// The number of workers that is set, if these are DataLoader workers.
        #[serde(skip_serializing_if = "Option::is_none")]
        num_workers: Option<String>,
    },
    /// The victim was not the largest process.
    VictimNotLargest {
        /// The largest.
        #[serde(flatten)]
        largest: LargestProcess,
        /// Its resident memory.
        rss_bytes: u64,
        /// Its pages in swap.
        #[serde(skip_serializing_if = "Option::is_none")]
        swap_bytes: Option<u64>,
        /// Its `oom_score_adj`, where that explains it.
        #[serde(skip_serializing_if = "Option::is_none")]
        oom_score_adj: Option<i32>,
        /// Resident memory of the victim.
        victim_rss_bytes: u64,
        /// The victim's pages in swap.
        #[serde(skip_serializing_if = "Option::is_none")]
        victim_swap_bytes: Option<u64>,
        /// The victim's `oom_score_adj`.
        #[serde(skip_serializing_if = "Option::is_none")]
        victim_oom_score_adj: Option<i32>,
    },
    /// The host has no swap.
    HostWithoutSwap,
    /// The cgroup may use no swap.
    SwapForbidden {
        /// Who sets that.
        setter: LimitSetter,
    },
    /// Swap was exhausted.
    SwapExhausted {
        /// Used swap.
        swap_bytes: u64,
        /// Swap that may be used.
        swap_limit_bytes: u64,
    },
}

/// A part of the memory in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct UsageShare {
    /// The part.
    pub bytes: u64,
    /// All memory in use.
    pub usage_bytes: u64,
}

/// Whose memory was full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FullMemory {
    /// The host's.
    Host,
    /// A known limit.
    Limit,
    /// That of a cgroup, whose limit is not known.
    Cgroup,
}

/// The largest process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LargestProcess {
    /// Its name.
    pub process: String,
    /// Its pid.
    pub pid: u32,
    /// Its container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
}

impl LargestProcess {
    fn of(row: &ReportProcess) -> Self {
        let container = Some(&row.container).filter(|container| !container.is_empty()).cloned();
        Self { process: row.process.clone(), pid: row.pid, container }
    }
}

/// Returns what the report of a kill proves, the most telling first.
pub(super) fn of<'a>(kill: &'a Kill, run: &RunSummary<'a>) -> Vec<ReportFinding> {
    let victims_shmem = (kill.shmem_bytes)
        .filter(|shmem| Some(*shmem) > kill.anon_bytes)
        .map(|shmem_bytes| ReportFinding::VictimSharedMemory { shmem_bytes });
    let Some(report) = kill.report.as_deref() else {
        return victims_shmem.into_iter().collect();
    };
    if report.order == Some(-1) {
        return vec![ReportFinding::RequestedBySysrq];
    }
    // the figures are the whole host's, and prove nothing of some of its nodes, nor of a request that what is free does not serve
    let free = free_but_unusable(kill);
    let of_all = |found: Option<ReportFinding>| found.filter(|_| report.nodes.is_empty() && free.is_none());
    let fragmented = fragmentation(report).filter(|_| report.nodes.is_empty());
    let unusable = free.filter(|_| fragmented.is_none()).map(|free_bytes| ReportFinding::FreeButUnusable {
        free_bytes,
        free_cma_bytes: report.free_cma_bytes,
    });
    let memory_and_swap =
        report.usage_bytes.zip(report.swap_bytes).filter(|_| report.with_swap).map(|(usage, swap_bytes)| {
            ReportFinding::MemoryAndSwap { memory_bytes: usage.saturating_sub(swap_bytes), swap_bytes }
        });
    let found = [
        memory_and_swap,
        fragmented,
        unusable,
        victims_shmem.filter(|_| report.shmem_bytes.is_none()),
        of_all(without_programs(kill, report, run)),
        of_all(kind(kill, report, run)),
        of_all(largest(kill, report, run)),
        victim(kill, report, run),
        of_all(swap(kill, report, run)),
    ];
    found.into_iter().flatten().collect()
}

/// Returns whether the host's memory was full, or a request could not be served, for another reason than what programs held.
pub(super) fn is_host_without_programs(kill: &Kill) -> bool {
    let Some(report) = kill.report.as_deref().filter(|report| report.host) else { return false };
    let usage = report.usage_bytes.unwrap_or(u64::MAX) as f64;
    let is_most = |amount: Option<u64>| amount.is_some_and(|amount| amount as f64 >= MOST * usage);
    let of_others = [
        report.kernel_bytes,
        report.hugetlb_bytes,
        report.gpu_bytes,
        report.balloon_bytes,
        report.unaccounted_bytes,
    ];
    free_but_unusable(kill).is_some() || of_others.into_iter().any(is_most)
}

/// Returns what the memory is that no program holds, as far as the log shows it.
fn without_programs(kill: &Kill, report: &OomReport, run: &RunSummary<'_>) -> Option<ReportFinding> {
    let usage_bytes = report.usage_bytes.filter(|usage| *usage > 0)?;
    let is_much = |amount: &u64| *amount >= MIN_MUCH && *amount as f64 >= MUCH * usage_bytes as f64;
    let much = |amount: Option<u64>| amount.filter(is_much).map(|bytes| UsageShare { bytes, usage_bytes });
    if let Some(share) = much(report.gpu_bytes) {
        return Some(ReportFinding::GpuDriverPages { share });
    }
    if let Some(share) = much(report.balloon_bytes) {
        return Some(ReportFinding::Balloon { share });
    }
    if let Some(share) = much(report.compressed_swap_bytes) {
        return Some(ReportFinding::CompressedSwap { share });
    }
    let share = much(report.unaccounted_bytes)?;
    if kill.scope == OomScope::Host {
        return Some(ReportFinding::UnaccountedOnHost { share, driver_refusals: report.driver_refusals });
    }
    let dying = |other: &&&Kill| {
        other.id != kill.id
            && (0.0..MAX_DYING_SECONDS).contains(&(kill.at - other.at))
            && other.limit_cgroup == kill.limit_cgroup
    };
    Some(match run.kills.iter().find(dying) {
        Some(other) => {
            ReportFinding::HeldByKilled { share, process: other.process.to_string(), pid: other.pid }
        }
        None => ReportFinding::UnaccountedInCgroup { share },
    })
}

/// Returns how much memory the host had free at a kill, if that was much: then the request could not be served by it.
pub(super) fn free_but_unusable(kill: &Kill) -> Option<u64> {
    let report = kill.report.as_deref().filter(|_| kill.scope == OomScope::Host)?;
    let (free, all) = (report.free_bytes?, report.limit_bytes?);
    let is_much = report.nodes.is_empty() && report.order != Some(-1) && free as f64 > MUCH_FREE * all as f64;
    is_much.then_some(free)
}

/// Returns true if at least half of the memory in use was shared memory; `None` if the report does not show it. Page cache that
/// is left at a kill could not be dropped in time.
pub(super) fn is_mostly_shared(report: &OomReport) -> Option<bool> {
    let (anon, shmem) = (report.anon_bytes?, report.shmem_bytes?);
    let known = anon.saturating_add(shmem).saturating_add(report.kernel_bytes.unwrap_or(0));
    let all = known.max(report.usage_bytes.unwrap_or(0));
    Some(shmem > 0 && shmem >= all - shmem)
}

/// Returns the kind of memory that accounts for most of the usage.
fn kind<'a>(kill: &'a Kill, report: &OomReport, run: &RunSummary<'a>) -> Option<ReportFinding> {
    let usage_bytes = report.usage_bytes.filter(|usage| *usage > 0)?;
    let is_most = |amount: &u64| *amount as f64 >= MOST * usage_bytes as f64;
    let most = |amount: Option<u64>| amount.filter(is_most).map(|bytes| UsageShare { bytes, usage_bytes });
    let full = match kill.scope {
        OomScope::Host => FullMemory::Host,
        OomScope::Container if report.limit_bytes.is_some() => FullMemory::Limit,
        OomScope::Container => FullMemory::Cgroup,
    };
    if let Some(share) = most(report.shmem_bytes) {
        let dev_shm_bytes = last_sample(run.before(Some(kill)))
            .and_then(|last| last.shm_used_bytes)
            .filter(|used| *used as f64 >= MOST * share.bytes as f64);
        return Some(ReportFinding::SharedMemoryFilled { full, share, dev_shm_bytes });
    }
    if let Some(share) = most(report.file_bytes) {
        let dirty_bytes = report.dirty_bytes.filter(|dirty| *dirty > 0);
        return Some(ReportFinding::PageCacheFilled { full, share, dirty_bytes });
    }
    if let Some(share) = most(report.kernel_bytes) {
        let holders = report.kernel_holders.clone();
        return Some(ReportFinding::KernelMemoryFilled { full, share, holders });
    }
    if let Some(share) = most(report.hugetlb_bytes) {
        return Some(ReportFinding::HugePages { share });
    }
    most(report.anon_bytes).map(|share| ReportFinding::AnonymousMemoryFilled { full, share })
}

/// Returns one process that held most, or many that are alike.
fn largest<'a>(kill: &'a Kill, report: &OomReport, run: &RunSummary<'a>) -> Option<ReportFinding> {
    let usage = report.usage_bytes.filter(|usage| *usage > 0)?;
    let first = report.processes.first()?;
    // mapped files can be shared with processes elsewhere; before 6.8 only the record of the kill tells them apart
    let is_victim = kill.pid.and_then(|pid| report.victim(pid)).is_some_and(|row| row.pid == first.pid);
    let file = first.file_bytes.or(kill.file_bytes.filter(|_| is_victim));
    let own = first.rss_bytes.saturating_sub(file.unwrap_or(0));
    // more than all that was charged: the counters differ, and prove nothing
    let charged =
        report.anon_bytes.zip(report.shmem_bytes).map_or(usage, |(anon, shmem)| anon.saturating_add(shmem));
    if own as f64 > MAX_EXCESS * charged.min(usage) as f64 {
        return None;
    }
    // forked processes share what their parent had: each has it in its own figure, and it was charged once
    let anonymous =
        report.processes.iter().map(|row| row.rss_bytes.saturating_sub(row.file_bytes.unwrap_or(0)));
    let is_shared = anonymous.fold(0, u64::saturating_add) as f64 > MAX_EXCESS * charged.min(usage) as f64;
    if own as f64 >= MOST * usage as f64 && !is_shared {
        return Some(ReportFinding::OneProcess {
            largest: LargestProcess::of(first),
            bytes: own,
            is_victim,
            has_mapped_files: own < first.rss_bytes,
            is_virtual_machine: program::is_virtual_machine(&first.process),
        });
    }
    let is_measured = |role: &RoleUsage| Some(role.role) == first.role && role.pss_bytes.is_some();
    if run.before(Some(kill)).is_some_and(|before| before.roles.iter().any(is_measured)) {
        return None; // their shares at the last sample show more
    }
    let role = first.role.filter(|role| *role != Role::Other);
    let is_alike = |row: &&ReportProcess| {
        let same = if role.is_some() { row.role == role } else { row.process == first.process };
        same && row.rss_bytes.saturating_mul(2) >= first.rss_bytes
    };
    let alike: Vec<&ReportProcess> = report.processes.iter().filter(is_alike).collect();
    let last = alike.last().filter(|_| alike.len() >= MIN_ALIKE)?;
    Some(ReportFinding::AlikeProcesses {
        count: alike.len() as u32,
        is_cut: alike.len() == OomReport::MAX_PROCESSES,
        role,
        process: first.process.clone(),
        min_rss_bytes: last.rss_bytes,
        max_rss_bytes: first.rss_bytes,
        num_workers: num_workers(run.before(Some(kill)).map(Arc::as_ref))
            .filter(|_| role == Some(Role::DataloaderWorker)),
    })
}

/// Returns that the victim was not the largest process.
fn victim(kill: &Kill, report: &OomReport, run: &RunSummary<'_>) -> Option<ReportFinding> {
    let first = report.processes.first()?;
    let pid = kill.pid?;
    // also if it died in the same group kill
    let was_killed = |pid: u32| run.kills.iter().any(|kill| kill.pid == Some(pid));
    let row = report.victim(pid);
    if row.zip(report.victim_pid).is_some_and(|(row, chosen)| row.pid != chosen) {
        return None; // it died with the others of its group
    }
    if row.is_some_and(|row| row.pid == first.pid)
        || was_killed(first.pid)
        || first.tgid.is_some_and(was_killed)
    {
        return None;
    }
    let own = match row {
        Some(row) => row.rss_bytes,
        None => kill.anon_bytes?.checked_add(kill.file_bytes?)?.checked_add(kill.shmem_bytes.unwrap_or(0))?,
    };
    // the kernel compares resident memory and swap; the counters are approximate
    let own_swap = row.and_then(|row| row.swap_bytes);
    let with_swap = |resident: u64, swap: Option<u64>| resident.saturating_add(swap.unwrap_or(0)) as f64;
    if with_swap(first.rss_bytes, first.swap_bytes) < 1.1 * with_swap(own, own_swap) {
        return None;
    }
    let explains = |adj: &i32| *adj == UNKILLABLE || Some(*adj) != kill.oom_score_adj;
    Some(ReportFinding::VictimNotLargest {
        largest: LargestProcess::of(first),
        rss_bytes: first.rss_bytes,
        swap_bytes: first.swap_bytes,
        oom_score_adj: first.oom_score_adj.filter(explains),
        victim_rss_bytes: own,
        victim_swap_bytes: own_swap,
        victim_oom_score_adj: kill.oom_score_adj,
    })
}

/// Returns that swap was exhausted, or is not there.
fn swap(kill: &Kill, report: &OomReport, run: &RunSummary<'_>) -> Option<ReportFinding> {
    let limit = report.swap_limit_bytes.filter(|_| !report.with_swap)?;
    let has_host_swap = kill.scope == OomScope::Host || report.host_swap_bytes != Some(0);
    if !has_host_swap {
        return None; // the limit of this cgroup changes nothing
    }
    if limit == 0 {
        return match (kill.scope, LimitSetter::of(run.subject, &kill.limit_cgroup)) {
            (OomScope::Host, _) => Some(ReportFinding::HostWithoutSwap),
            (_, LimitSetter::Kubernetes | LimitSetter::Unknown | LimitSetter::Run) => None,
            (_, setter @ (LimitSetter::Systemd | LimitSetter::Engine)) => {
                Some(ReportFinding::SwapForbidden { setter })
            }
        };
    }
    let used = report.swap_bytes.filter(|used| *used as f64 >= SWAP_FULL * limit as f64)?;
    Some(ReportFinding::SwapExhausted { swap_bytes: used, swap_limit_bytes: limit })
}

/// Returns that free memory was in pieces that are too small for the request.
fn fragmentation(report: &OomReport) -> Option<ReportFinding> {
    let order = report.order.filter(|order| (1..32).contains(order) && report.fragmented)?;
    Some(ReportFinding::Fragmented { order, free_bytes: report.free_bytes? })
}
