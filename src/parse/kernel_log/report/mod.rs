//! The kernel's report around an OOM kill: who requested memory, what filled it, and which processes were there.
//!
//! Before `Killed process` the kernel prints 40 to some thousand records (the same rate limit applies to all of them but that
//! one): the request, the usage and the limit of a cgroup or the host's memory by kind, and a table of processes. A
//! [`ReportAssembler`] folds them into one [`OomReport`] of bounded size, record by record. The forms of kernels 3.10 to 6.18 are
//! in docs/oom.md.
//!
//! Which kill a report belongs to is decided in the ledger: a block can end without a kill, and the next kill may have no
//! block of its own. Names of containers and roles of processes are added there too.

mod memory;
mod table;

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use super::{Killed, Line, NoKill, OomContext, digits, rfind};
use crate::parse::find;
use crate::parse::process::Role;
use crate::text::printable;
use memory::{ReportedCgroupMemory, ReportedHostMemory};
use table::{Columns, ReportTable};

/// A block with more records is damaged: hosts have at most some ten thousand processes.
const MAX_RECORDS: u32 = 200_000;
/// A record that is written this many microseconds after the last known one of a block is not part of it. A slow serial console
/// delays each record by some milliseconds.
const MAX_PAUSE_USEC: u64 = 10_000_000;

/// Refusals of NVIDIA's driver that are at most this far before a kill, and between each other, belong together.
const REFUSALS_USEC: u64 = 300_000_000;

/// The kernel's report around an OOM kill. A value that the kernel did not print is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OomReport {
    /// Name of the task whose request for memory failed, which need not be the victim.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub requested_by: String,
    /// The request was for 2^order contiguous pages; -1: an operator requested the kill by sysrq (kernel 4.3 and later).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub order: Option<i32>,
    /// Part of the report is missing: the kernel log was overwritten, or its text is cut.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub incomplete: bool,
    /// The host ran out of memory, so the figures are the host's.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub host: bool,
    /// NUMA nodes whose memory ran out, such as `0-1`: a cpuset or a memory policy restricted the request to them. The figures are
    /// those of the whole host.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub nodes: String,
    /// No block of the requested order was free, though more than the low watermark was: free memory was in pieces.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub fragmented: bool,
    /// The cgroup at its limit, as the line before its counters names it; of the host empty.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cgroup: String,
    /// The limit is of memory and swap together (cgroup v1), and so is the usage.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub with_swap: bool,
    /// Memory in use: charged to the cgroup, or of the host all that was not free.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage_bytes: Option<u64>,
    /// Limit of the cgroup; of the host, the memory that the kernel manages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// Anonymous memory of processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub anon_bytes: Option<u64>,
    /// Page cache of files, without shared memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_bytes: Option<u64>,
    /// Shared memory: tmpfs, memfd, System V and anonymous shared mappings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shmem_bytes: Option<u64>,
    /// Memory of the kernel itself: slab, stacks, page tables, sockets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel_bytes: Option<u64>,
    /// What held the most memory of the kernel: its slab caches and, since 6.10, its allocations; largest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kernel_holders: Vec<KernelHolder>,
    /// Free memory that is reserved for contiguous allocations of devices (CMA), which most requests may not use; of the host only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_cma_bytes: Option<u64>,
    /// Pages reserved as huge pages, used or not; of the host only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hugetlb_bytes: Option<u64>,
    /// Pages that drivers of GPUs hold, of new kernels (seen in 7.2); of the host only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_bytes: Option<u64>,
    /// Pages that drivers of GPUs keep for later, and would give back; of the host only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_pool_bytes: Option<u64>,
    /// Memory that the hypervisor took back; of a virtual machine only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balloon_bytes: Option<u64>,
    /// Compressed pages of swap that are in memory (zram, zswap); of the host only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compressed_swap_bytes: Option<u64>,
    /// Memory in use that no other figure here explains; absent where one of them is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unaccounted_bytes: Option<u64>,
    /// How often NVIDIA's driver was refused memory before, each less than five minutes before the next or the kill.
    #[serde(skip_serializing_if = "is_zero")]
    pub driver_refusals: u32,
    /// Page cache that waits to be written to a disk, which the kernel cannot drop before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty_bytes: Option<u64>,
    /// Used swap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swap_bytes: Option<u64>,
    /// Swap that may be used: the cgroup's limit, or all of the host's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swap_limit_bytes: Option<u64>,
    /// Size of the host's swap, which the limit of a cgroup may exceed; `None` in a log from elsewhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_swap_bytes: Option<u64>,
    /// Free memory of the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<u64>,
    /// Number of processes in the kernel's table; `None` without a table (`vm.oom_dump_tasks=0`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process_count: Option<u32>,
    /// Processes by resident memory, largest first. In an event at most 20.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<ReportProcess>,
    /// All processes by role, if the ledger knows roles.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub roles: Vec<RoleRange>,
    /// Pid in the row of the process that the kernel chose. The record of its kill can have the pid of a thread without a row, and
    /// with `memory.oom.group` others were killed with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub victim_pid: Option<u32>,
    /// The victim's pid in the context line. The victim can be logged with the pid of another thread.
    #[serde(skip)]
    pub context_pid: Option<u32>,
    /// The process in the context line had an address space of the killed one's size, to the page: they are threads of one
    /// process, or copies of each other.
    #[serde(skip)]
    pub has_size_of_victim: bool,
}

/// One row of the kernel's table. Resident memory of several processes must not be added up: forked processes share pages.
/// Since 6.2 the kernel's counters are approximate: off by up to 4 MiB for each CPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReportProcess {
    /// Host pid.
    pub pid: u32,
    /// Id of its thread group, if that is another number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tgid: Option<u32>,
    /// User id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Its name, made printable.
    pub process: String,
    /// Resident memory.
    pub rss_bytes: u64,
    /// Its anonymous part (kernel 6.8 and later).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub anon_bytes: Option<u64>,
    /// Its mapped file pages (kernel 6.8 and later).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_bytes: Option<u64>,
    /// Its shared memory (kernel 6.8 and later).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shmem_bytes: Option<u64>,
    /// Its pages in swap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swap_bytes: Option<u64>,
    /// Its `oom_score_adj`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oom_score_adj: Option<i32>,
    /// Its role; `None` if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
    /// Name of its container, if the host ran out of memory; empty if unknown or none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub container: String,
}

/// A holder of memory of the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelHolder {
    /// The name of a slab cache, or the place of the allocation in the kernel's source.
    pub name: String,
    /// Its bytes.
    pub bytes: u64,
}

/// The processes of one role.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoleRange {
    /// The role.
    pub role: Role,
    /// Number of processes.
    pub processes: u32,
    /// Resident memory of the smallest.
    pub min_rss_bytes: u64,
    /// Resident memory of the largest.
    pub max_rss_bytes: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_zero(count: &u32) -> bool {
    *count == 0
}

impl OomReport {
    /// Sets what none of the kinds explains. `others`: memory of no kind.
    fn account_for(&mut self, others: u64) {
        let Self { usage_bytes, anon_bytes, file_bytes, shmem_bytes, kernel_bytes, .. } = self;
        let optional = [
            self.hugetlb_bytes,
            self.gpu_bytes,
            self.gpu_pool_bytes,
            self.balloon_bytes,
            self.compressed_swap_bytes,
            Some(others),
        ];
        let known =
            [*anon_bytes, *file_bytes, *shmem_bytes, *kernel_bytes].into_iter().collect::<Option<Vec<_>>>();
        let known = known.map(|known| {
            known.into_iter().chain(optional.into_iter().flatten()).fold(0, u64::saturating_add)
        });
        self.unaccounted_bytes = usage_bytes.zip(known).map(|(usage, known)| usage.saturating_sub(known));
    }

    /// Maximum number of processes in an event.
    pub const MAX_PROCESSES: usize = 20;

    /// Returns the row of a thread or of its thread group.
    pub fn process(&self, pid: u32) -> Option<&ReportProcess> {
        let mut rows = self.processes.iter();
        rows.find(|row| row.pid == pid).or_else(|| self.processes.iter().find(|row| row.tgid == Some(pid)))
    }

    /// Returns the row of the process that was killed. `pid`: that of the record of its kill.
    pub fn victim(&self, pid: u32) -> Option<&ReportProcess> {
        self.process(pid).or_else(|| self.process(self.victim_pid?))
    }
}

/// Folds the records of a block into a report.
#[derive(Clone, Debug, Default)]
pub struct ReportAssembler {
    /// The page size of the kernel that wrote the log, if it is known beforehand; else it is derived from the block.
    pub page_bytes: Option<u64>,
    /// Columns of the newest table: they are the same for all tables of one kernel.
    columns: Option<Columns>,
    block: Option<Box<ReportBlock>>,
    /// When NVIDIA's driver was last refused memory, and how often without a pause.
    refusals: (u64, u32),
}

/// What is known of an open block.
#[derive(Clone, Debug, Default)]
struct ReportBlock {
    requested_by: String,
    order: Option<i32>,
    has_begin: bool,
    is_damaged: bool,
    /// Memory that was refused, for which nothing was killed.
    is_refusal: bool,
    records: u32,
    last_usec: u64,
    context_pid: Option<u32>,
    nodes: Box<str>,
    cgroup: ReportedCgroupMemory,
    host: ReportedHostMemory,
    table: ReportTable,
}

impl ReportAssembler {
    /// Adds a record; `line` is the parse of its text. Returns the report of the block that this kill completes.
    pub fn push(&mut self, usec: u64, text: &[u8], line: Option<&Line>) -> Option<OomReport> {
        match line {
            Some(Line::Invoked) => self.block = Some(Box::new(ReportBlock::begin(usec, text))),
            Some(Line::Context(OomContext { pid, nodes, .. })) => {
                if let Some(block) = &mut self.block {
                    (block.context_pid, block.last_usec) = (*pid, usec);
                    block.nodes.clone_from(nodes);
                }
            }
            Some(Line::Killed(killed)) => {
                let block = self.block.take().filter(|block| block.includes(usec))?;
                let (last, count) = self.refusals;
                let driver_refusals = if usec.saturating_sub(last) <= REFUSALS_USEC { count } else { 0 };
                return Some(OomReport { driver_refusals, ..block.finish(killed, self.page_bytes)? });
            }
            Some(Line::NoKill(NoKill::AlreadyExiting)) => self.block = None,
            Some(Line::NoKill(NoKill::NoVictim | NoKill::Panic | NoKill::PanicNoVictim)) => {
                let block = self.block.take().filter(|block| block.includes(usec))?;
                return block.finish(&Killed::default(), self.page_bytes);
            }
            Some(Line::Chosen { .. } | Line::Group { .. } | Line::Xid(_) | Line::Resumed) => {}
            None => self.fold(usec, text),
        }
        None
    }

    /// Returns true if the begin of a block was read, and not its end.
    pub fn is_in_block(&self) -> bool {
        self.block.as_ref().is_some_and(|block| !block.is_refusal)
    }

    /// Notes that records are missing: a block that was open may have ended among them.
    pub fn records_lost(&mut self) {
        self.block = None;
    }

    fn fold(&mut self, usec: u64, text: &[u8]) {
        if text.starts_with(b"NVRM: ") && find(text, b"[NV_ERR_NO_MEMORY]").is_some() {
            let (last, count) = self.refusals;
            let before = if usec.saturating_sub(last) <= REFUSALS_USEC { count } else { 0 };
            self.refusals = (usec, before.saturating_add(1));
        }
        match &mut self.block {
            // the kernel shows its memory as at a kill
            None if find(text, b": page allocation failure: order:").is_some() => {
                self.block = Some(Box::new(ReportBlock {
                    is_refusal: true,
                    last_usec: usec,
                    ..ReportBlock::default()
                }));
            }
            None if !is_part_of_block(text) => {}
            None => {
                // the begin of the block was overwritten
                let mut block = ReportBlock { is_damaged: true, last_usec: usec, ..ReportBlock::default() };
                block.fold(text, &mut self.columns);
                self.block = Some(Box::new(block));
            }
            Some(block) => {
                block.records += 1;
                if block.records > MAX_RECORDS || !block.includes(usec) {
                    self.block = None;
                } else if block.fold(text, &mut self.columns) {
                    block.last_usec = usec;
                }
            }
        }
    }
}

/// Returns whether a text is the header of a table of processes, or a row of one; `None` if it is neither.
pub(super) fn is_table_header(text: &[u8]) -> Option<bool> {
    Columns::of(text).map(|_| true).or_else(|| table::is_row(text).then_some(false))
}

/// Returns whether a record outside a block belongs to one whose begin is missing. Cheap: it is tested for every record.
pub(super) fn is_part_of_block(text: &[u8]) -> bool {
    const BEGINS: [&[u8]; 6] = [
        b"memory: usage ",
        b"Memory cgroup stats for ",
        b"Mem-Info:",
        b"Tasks state (memory values in pages):",
        b"[ pid ]",
        b"[  pid  ]",
    ];
    match text.first() {
        Some(b'm' | b'M' | b'T') => BEGINS.iter().any(|begin| text.starts_with(begin)),
        Some(b'[') => Columns::of(text).is_some() || table::is_row(text),
        _ => false,
    }
}

impl ReportBlock {
    fn begin(usec: u64, text: &[u8]) -> Self {
        let name = find(text, b" invoked oom-killer: gfp_mask=").unwrap_or(0);
        let order = rfind(text, b"order=").and_then(|at| table::signed(&text[at + b"order=".len()..]));
        let requested_by = printable(&text[..name]);
        Self { requested_by, order, has_begin: true, last_usec: usec, ..Self::default() }
    }

    fn includes(&self, usec: u64) -> bool {
        usec.saturating_sub(self.last_usec) <= MAX_PAUSE_USEC
    }

    /// Reads a record. Returns whether it was of a known form.
    fn fold(&mut self, text: &[u8], columns: &mut Option<Columns>) -> bool {
        if let Some(found) = Columns::of(text) {
            *columns = Some(found);
            self.table.begin();
            self.cgroup.end_of_stats();
            return true;
        }
        if text.starts_with(b"Tasks state ") {
            self.cgroup.end_of_stats();
            return true;
        }
        if table::is_row(text) {
            if !self.table.has_header() {
                self.is_damaged = true; // the header is missing: an earlier table's is the same
                self.table.begin();
            }
            match columns {
                Some(columns) => self.table.add(text, columns),
                None => self.table.add_unreadable(),
            }
            return true;
        }
        // before 6.5 one record has all counters of a cgroup, each on a line; some records of the host have several lines
        let mut is_known = false;
        for line in text.split(|&byte| byte == b'\n') {
            is_known |= self.cgroup.read(line) || self.host.read(line);
        }
        is_known
    }

    fn finish(self, killed: &Killed, page_bytes: Option<u64>) -> Option<OomReport> {
        if self.is_refusal {
            return None;
        }
        let Self { requested_by, order, cgroup, host, table, context_pid, nodes, .. } = self;
        let page = page_bytes.or(host.page_bytes()).or_else(|| table.page_bytes(killed, context_pid));
        let has_memory = cgroup.is_known() || host.is_known();
        let unreadable = table.has_unreadable() || (page.is_none() && table.has_rows());
        let incomplete = !self.has_begin || self.is_damaged || !has_memory || unreadable;
        let has_size_of_victim = table.has_size_of(killed, context_pid, page);
        let mut report = OomReport {
            requested_by,
            order,
            incomplete,
            nodes: nodes.into(),
            context_pid,
            has_size_of_victim,
            ..OomReport::default()
        };
        match (cgroup.is_known(), page) {
            (true, _) => cgroup.write(&mut report),
            (false, Some(page)) => host.write(page, &mut report),
            (false, None) => (report.incomplete, report.host) = (true, host.is_known()),
        }
        table.write(page, &mut report);
        let is_empty = !self.is_damaged && !has_memory && report.process_count.is_none() && !self.has_begin;
        (!is_empty).then_some(report)
    }
}

/// Parses a number at the beginning of a text that is followed by `unit`.
fn leading(text: &[u8], unit: &[u8]) -> Option<u64> {
    let end = text.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    let value = digits(&text[..end]).filter(|_| end > 0)?;
    text[end..].starts_with(unit).then_some(value)
}
