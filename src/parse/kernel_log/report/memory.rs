//! The memory in the kernel's report: of a cgroup at its limit, or of the host.

use std::collections::BTreeMap;

use super::{KernelHolder, OomReport, leading};
use crate::parse::{find, number};
use crate::text::printable;

/// Larger numbers are the kernel's way to print that there is no limit.
const MAX_LIMIT_BYTES: u64 = 1 << 62;

/// Counters of a cgroup that are used. On cgroup v1 `total_` begins the names of those that include the cgroups below.
const COUNTERS: [&str; 24] = [
    "anon",
    "file",
    "kernel",
    "kernel_stack",
    "pagetables",
    "sec_pagetables",
    "percpu",
    "sock",
    "vmalloc",
    "shmem",
    "slab",
    "file_dirty",
    "file_writeback",
    "cache",
    "rss",
    "swap",
    "dirty",
    "writeback",
    "total_cache",
    "total_rss",
    "total_shmem",
    "total_swap",
    "total_dirty",
    "total_writeback",
];

fn counter(name: &[u8]) -> Option<&'static str> {
    COUNTERS.into_iter().find(|counter| counter.as_bytes() == name)
}

/// `usage 65536kB, limit 65536kB, failcnt 59`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Account {
    usage: u64,
    limit: Option<u64>,
}

impl Account {
    fn of(text: &[u8]) -> Option<Self> {
        let rest = text.strip_prefix(b"usage ")?;
        let usage = leading(rest, b"kB, limit ")?.checked_mul(1024)?;
        let at = find(rest, b"kB, limit ")? + b"kB, limit ".len();
        // a number that is too large for 64 bits is no limit either
        let limit = leading(&rest[at..], b"kB")?.checked_mul(1024);
        Some(Self { usage, limit: limit.filter(|limit| *limit < MAX_LIMIT_BYTES) })
    }

    /// Returns whether less is left of this account, which has a limit, than of another one.
    fn is_reached_before(&self, other: Self) -> bool {
        let left = |account: Self| account.limit.map(|limit| limit.saturating_sub(account.usage));
        left(*self).is_some_and(|own| left(other).is_none_or(|other| own < other))
    }
}

/// Memory of a cgroup at its limit.
#[derive(Clone, Debug, Default)]
pub(super) struct ReportedCgroupMemory {
    memory: Option<Account>,
    /// cgroup v1: memory and swap together.
    memory_and_swap: Option<Account>,
    /// cgroup v1: memory of the kernel.
    kernel: Option<Account>,
    /// cgroup v2.
    swap: Option<Account>,
    counters: BTreeMap<&'static str, u64>,
    is_in_stats: bool,
    /// Path of the first line of counters: the cgroup at its limit.
    path: String,
}

impl ReportedCgroupMemory {
    pub(super) fn is_known(&self) -> bool {
        self.memory.is_some()
    }

    pub(super) fn end_of_stats(&mut self) {
        self.is_in_stats = false;
    }

    /// Reads a line. Returns whether it was of a known form.
    pub(super) fn read(&mut self, line: &[u8]) -> bool {
        const STATS: &[u8] = b"Memory cgroup stats for ";
        let accounts: [(&[u8], &mut Option<Account>); 4] = [
            (b"memory: ", &mut self.memory),
            (b"memory+swap: ", &mut self.memory_and_swap),
            (b"kmem: ", &mut self.kernel),
            (b"swap: ", &mut self.swap),
        ];
        for (key, account) in accounts {
            if let Some(found) = line.strip_prefix(key).and_then(Account::of) {
                *account = Some(found);
                return true;
            }
        }
        if let Some(rest) = line.strip_prefix(STATS) {
            self.is_in_stats = true;
            if self.path.is_empty() && rest.starts_with(b"/") {
                let end = find(rest, b": ").or(rest.strip_suffix(b":").map(<[u8]>::len));
                self.path = end.map(|end| printable(&rest[..end])).unwrap_or_default();
            }
            self.read_old_stats(rest);
            return true;
        }
        // `anon 4096`
        let line = line.trim_ascii();
        let pair = || {
            let space = line.iter().position(|&byte| byte == b' ')?;
            Some((counter(&line[..space])?, number(&line[space + 1..])?))
        };
        match pair().filter(|_| self.is_in_stats) {
            Some((name, bytes)) => {
                self.counters.insert(name, bytes);
                true
            }
            None => false,
        }
    }

    /// `PATH: cache:0KB rss:65024KB ...`, before 5.3: one such line for the cgroup, and one for each below it.
    fn read_old_stats(&mut self, text: &[u8]) {
        for pair in text.split(|&byte| byte == b' ') {
            let Some(colon) = find(pair, b":") else { continue };
            let kib = pair[colon + 1..].strip_suffix(b"KB").and_then(number);
            if let (Some(name), Some(bytes)) =
                (counter(&pair[..colon]), kib.and_then(|kib| kib.checked_mul(1024)))
            {
                let sum = self.counters.entry(name).or_default();
                *sum = sum.saturating_add(bytes);
            }
        }
    }

    pub(super) fn write(&self, report: &mut OomReport) {
        let Some(memory) = self.memory else { return };
        (report.usage_bytes, report.limit_bytes) = (Some(memory.usage), memory.limit);
        let get = |name: &str| self.counters.get(name).copied();
        let v1 = |name: &str| get(&format!("total_{name}")).or_else(|| get(name));
        let shmem = v1("shmem");
        let (anon, cache) = match get("anon") {
            Some(anon) => (Some(anon), get("file")),
            None => (v1("rss"), v1("cache")),
        };
        (report.anon_bytes, report.shmem_bytes) = (anon, shmem);
        // shared memory is part of the page cache, and before 4.0 it was not counted apart
        report.file_bytes = cache.zip(shmem).map(|(cache, shmem)| cache.saturating_sub(shmem));
        report.kernel_bytes = self.kernel.map(|kernel| kernel.usage).or_else(|| self.kernel_v2());
        let dirty = get("file_dirty").or_else(|| v1("dirty"));
        let writeback = get("file_writeback").or_else(|| v1("writeback"));
        report.dirty_bytes = dirty.zip(writeback).map(|(dirty, writeback)| dirty.saturating_add(writeback));
        report.swap_bytes = self.swap.map(|swap| swap.usage).or_else(|| v1("swap"));
        report.cgroup.clone_from(&self.path);
        report.account_for(0);
        if let Some(both) = self.memory_and_swap.filter(|both| both.is_reached_before(memory)) {
            report.with_swap = true;
            (report.usage_bytes, report.limit_bytes) = (Some(both.usage), both.limit);
            report.incomplete |= self.counters.is_empty();
            return;
        }
        report.swap_limit_bytes = match (self.swap, self.memory_and_swap) {
            (Some(swap), _) => swap.limit,
            (None, Some(both)) => {
                both.limit.zip(memory.limit).map(|(both, memory)| both.saturating_sub(memory))
            }
            (None, None) => None,
        };
        report.incomplete |= self.counters.is_empty();
    }

    /// Returns the memory of the kernel on cgroup v2: one counter since 5.18, its parts before.
    fn kernel_v2(&self) -> Option<u64> {
        let get = |name: &str| self.counters.get(name).copied();
        let sockets = get("sock").unwrap_or(0);
        if let Some(kernel) = get("kernel") {
            return kernel.checked_add(sockets);
        }
        let parts = [get("pagetables"), get("sec_pagetables"), get("percpu"), get("vmalloc")];
        let required = get("slab")?.checked_add(get("kernel_stack")?)?.checked_add(sockets)?;
        parts.into_iter().flatten().try_fold(required, u64::checked_add)
    }
}

/// Free memory of a zone of a NUMA node, in kilobytes.
#[derive(Clone, Copy, Debug, Default)]
struct Zone {
    free_kib: Option<u64>,
    low_kib: Option<u64>,
    /// Size of the largest free block that any request may use; `None` without a line of the buddy allocator.
    largest_kib: Option<u64>,
}

/// Maximum number of zones that are kept.
const MAX_ZONES: usize = 512;

/// Memory of the host, in pages where not noted otherwise.
#[derive(Clone, Debug, Default)]
pub(super) struct ReportedHostMemory {
    is_begun: bool,
    counters: BTreeMap<&'static str, u64>,
    kernel_stack_kib: Option<u64>,
    /// Pages of drivers of GPUs, and those that they keep for later.
    gpu_active_kib: Option<u64>,
    gpu_reclaim_kib: Option<u64>,
    balloon_kib: Option<u64>,
    /// Of zram and zswap, in all zones.
    zspages_kib: Option<u64>,
    hugetlb_kib: Option<u64>,
    free_swap_kib: Option<u64>,
    total_swap_kib: Option<u64>,
    total: Option<u64>,
    reserved: Option<u64>,
    page_kib: Option<u64>,
    /// By node and name: `0 Normal`.
    zones: BTreeMap<Vec<u8>, Zone>,
    table: HolderTable,
    holders: Vec<KernelHolder>,
}

/// A table of holders of the kernel's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum HolderTable {
    #[default]
    None,
    /// `Unreclaimable slab info:`, with rows `filp 460321KB 460321KB`.
    Slabs,
    /// `Memory allocations:`, with rows `1047212032 511334 fs/xfs/xfs_icache.c:82 [xfs] func:xfs_inode_alloc`.
    Allocations,
}

/// Holders that are kept.
const MAX_HOLDERS: usize = 3;
const MAX_HOLDER_NAME: usize = 80;

/// Counters of the host that are used.
const HOST_COUNTERS: [&str; 18] = [
    "active_anon",
    "inactive_anon",
    "isolated_anon",
    "active_file",
    "inactive_file",
    "isolated_file",
    "slab_reclaimable",
    "slab_unreclaimable",
    "shmem",
    "pagetables",
    "sec_pagetables",
    "kernel_misc_reclaimable",
    "free",
    "free_pcp",
    "free_cma",
    "dirty",
    "writeback",
    "unevictable",
];

impl ReportedHostMemory {
    pub(super) fn is_known(&self) -> bool {
        self.counters.contains_key("free")
    }

    /// Returns the page size: that of the first column of the buddy allocator's lines.
    pub(super) fn page_bytes(&self) -> Option<u64> {
        self.page_kib?.checked_mul(1024)
    }

    /// Reads a line. Returns whether it was of a known form.
    pub(super) fn read(&mut self, line: &[u8]) -> bool {
        if line.starts_with(b"Mem-Info:") {
            *self = Self { is_begun: true, ..Self::default() };
            return true;
        }
        if !self.is_begun {
            return false;
        }
        let line = line.trim_ascii();
        self.read_totals(line) || self.read_holder(line) || self.read_zone(line) || self.read_counters(line)
    }

    /// Reads a line of the tables of slab caches and of allocations.
    fn read_holder(&mut self, line: &[u8]) -> bool {
        self.table = match line {
            b"Unreclaimable slab info:" => HolderTable::Slabs,
            b"Memory allocations:" => HolderTable::Allocations,
            _ => {
                let mut words = line.split(|&byte| byte == b' ').filter(|word| !word.is_empty());
                let (first, second) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
                let holder = match self.table {
                    HolderTable::Slabs => second
                        .strip_suffix(b"KB")
                        .and_then(number)
                        .map(|kib| (first, kib.saturating_mul(1024))),
                    HolderTable::Allocations => {
                        let name = words.next().and_then(|name| find(line, name).map(|at| &line[at..]));
                        // what the slab caches and the page cache took is in other figures
                        let is_own = |name: &[u8]| {
                            find(name, b"alloc_slab").is_none() && !name.starts_with(b"mm/filemap")
                        };
                        number(first)
                            .zip(number(second))
                            .and(name)
                            .filter(|name| is_own(name))
                            .zip(number(first))
                    }
                    HolderTable::None => return false,
                };
                let Some((name, bytes)) = holder else { return line.starts_with(b"Name ") };
                self.holders
                    .push(KernelHolder { name: printable(&name[..name.len().min(MAX_HOLDER_NAME)]), bytes });
                self.holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
                self.holders.truncate(MAX_HOLDERS);
                return true;
            }
        };
        true
    }

    /// `Free swap  = 0kB`, `563224 pages RAM`.
    fn read_totals(&mut self, line: &[u8]) -> bool {
        let kib = |key: &[u8]| leading(line.strip_prefix(key)?, b"kB");
        if let Some(kib) = kib(b"Free swap  = ") {
            self.free_swap_kib = Some(kib);
        } else if let Some(kib) = kib(b"Total swap = ") {
            self.total_swap_kib = Some(kib);
        } else if let Some(pages) = leading(line, b" pages RAM") {
            self.total = Some(pages);
        } else if let Some(pages) = leading(line, b" pages reserved") {
            self.reserved = Some(pages);
        } else {
            return false;
        }
        true
    }

    /// Lines of nodes and zones: `Node 0 active_anon:176kB ... kernel_stack:1440kB`, `Node 0 hugepages_total=4 ...
    /// hugepages_size=2048kB`, `Normal: 142*4kB (UE) ...`.
    fn read_zone(&mut self, line: &[u8]) -> bool {
        let words = || line.split(|&byte| byte == b' ').filter(|word| !word.is_empty());
        let value = |key: &[u8], unit: &[u8]| words().find_map(|word| leading(word.strip_prefix(key)?, unit));
        let add = |sum: &mut Option<u64>, kib: Option<u64>| {
            *sum = sum.map_or(kib, |sum| Some(sum.saturating_add(kib.unwrap_or(0))));
        };
        // of a node, or before 5.11 of its zones
        if let Some(kib) = value(b"kernel_stack:", b"kB") {
            add(&mut self.kernel_stack_kib, Some(kib));
            // of new kernels: seen in 6.17, and the GPUs' in 7.2
            add(&mut self.balloon_kib, value(b"Balloon:", b"kB"));
            add(&mut self.gpu_active_kib, value(b"gpu_active:", b"kB"));
            add(&mut self.gpu_reclaim_kib, value(b"gpu_reclaim:", b"kB"));
            return true;
        }
        if let (Some(pages), Some(kib)) = (value(b"hugepages_total=", b""), value(b"hugepages_size=", b"kB"))
        {
            let sum = self.hugetlb_kib.get_or_insert(0);
            *sum = sum.saturating_add(pages.saturating_mul(kib));
            return true;
        }
        add(&mut self.zspages_kib, value(b"zspages:", b"kB"));
        if let (Some(free), Some(low)) = (value(b"free:", b"kB"), value(b"low:", b"kB")) {
            if let Some(zone) = find(line, b" free:").and_then(|end| self.zone(&line[..end])) {
                (zone.free_kib, zone.low_kib) = (Some(free), Some(low));
            }
            return true;
        }
        self.read_blocks(line)
    }

    /// `Node 0 Normal: 142*4kB (UE) 0*8kB 1*16kB (H) ... = 160000kB`. Without `Node 0` in a log whose lines were cut.
    fn read_blocks(&mut self, line: &[u8]) -> bool {
        let Some(colon) = find(line, b": ") else { return false };
        let mut words =
            line[colon + 2..].split(|&byte| byte == b' ').filter(|word| !word.is_empty()).peekable();
        let block =
            |word: &[u8]| Some((leading(word, b"*")?, leading(&word[find(word, b"*")? + 1..], b"kB")?));
        let page = words.peek().and_then(|word| block(word)).map(|(_, kib)| kib);
        let Some(page) = page.filter(|kib| kib.is_power_of_two() && (4..=1024).contains(kib)) else {
            return false;
        };
        self.page_kib.get_or_insert(page);
        let mut largest = 0;
        while let Some(word) = words.next() {
            let Some((count, kib)) = block(word) else { continue };
            // blocks that are reserved for requests of other kinds: highatomic, contiguous memory of devices, isolated
            let is_reserved = words
                .peek()
                .and_then(|types| types.strip_prefix(b"(")?.strip_suffix(b")"))
                .is_some_and(|types| types.iter().all(|kind| b"HCI".contains(kind)));
            if count > 0 && !is_reserved {
                largest = largest.max(kib);
            }
        }
        if let Some(zone) = self.zone(&line[..colon]) {
            zone.largest_kib = Some(largest);
        }
        true
    }

    /// Returns the zone of `Node 0 Normal`.
    fn zone(&mut self, name: &[u8]) -> Option<&mut Zone> {
        let name = name.strip_prefix(b"Node ")?;
        if self.zones.len() >= MAX_ZONES && !self.zones.contains_key(name) {
            return None;
        }
        Some(self.zones.entry(name.to_vec()).or_default())
    }

    /// Returns whether free memory was in pieces: zones had more than their low watermark free, and none of them a block of this
    /// order. Lower zones are not considered: most of their memory is reserved for requests that need them.
    fn is_fragmented(&self, order: u32) -> bool {
        let Some(needed) = self.page_kib.and_then(|page| page.checked_mul(1_u64.checked_shl(order)?)) else {
            return false;
        };
        let of_kind = |kind: &'static [u8]| self.zones.iter().filter(move |(name, _)| name.ends_with(kind));
        let highest =
            [&b" Normal"[..], b" DMA32", b" DMA"].into_iter().find(|kind| of_kind(kind).next().is_some());
        let zones = highest.into_iter().flat_map(of_kind).map(|(_, zone)| zone);
        let mut with_free =
            zones.filter(|zone| zone.free_kib.zip(zone.low_kib).is_none_or(|(free, low)| free > low));
        let is_in_pieces = |zone: &Zone| zone.largest_kib.is_some_and(|largest| largest < needed);
        with_free.next().is_some_and(is_in_pieces) && with_free.all(is_in_pieces)
    }

    /// `active_anon:44 inactive_anon:501493 isolated_anon:0`, without units.
    fn read_counters(&mut self, line: &[u8]) -> bool {
        let pairs = line.split(|&byte| byte == b' ').filter(|word| !word.is_empty());
        let pairs = pairs.map(|pair| {
            let colon = find(pair, b":")?;
            Some((&pair[..colon], number(&pair[colon + 1..])?))
        });
        let Some(pairs) = pairs.collect::<Option<Vec<_>>>() else { return false };
        for (name, pages) in &pairs {
            if let Some(name) = HOST_COUNTERS.into_iter().find(|counter| counter.as_bytes() == *name) {
                self.counters.insert(name, *pages);
            }
        }
        !pairs.is_empty()
    }

    pub(super) fn write(&self, page: u64, report: &mut OomReport) {
        let get = |name: &str| self.counters.get(name).copied();
        let bytes = |pages: u64| pages.saturating_mul(page);
        let kib = |kib: u64| kib.saturating_mul(1024);
        let sum = |names: &[&str]| names.iter().try_fold(0_u64, |sum, name| sum.checked_add(get(name)?));
        report.host = true;
        report.kernel_holders.clone_from(&self.holders);
        report.free_cma_bytes = get("free_cma").map(bytes).filter(|bytes| *bytes > 0);
        let order = report.order.and_then(|order| u32::try_from(order).ok()).filter(|order| *order > 0);
        report.fragmented = order.is_some_and(|order| self.is_fragmented(order));
        report.free_bytes = get("free").map(bytes);
        report.limit_bytes =
            self.total.zip(self.reserved).map(|(all, reserved)| bytes(all.saturating_sub(reserved)));
        report.usage_bytes =
            report.limit_bytes.zip(report.free_bytes).map(|(all, free)| all.saturating_sub(free));
        let shmem = get("shmem");
        report.shmem_bytes = shmem.map(bytes);
        // shared memory is on the lists of anonymous memory
        report.anon_bytes = sum(&["active_anon", "inactive_anon", "isolated_anon"])
            .zip(shmem)
            .map(|(anon, shmem)| bytes(anon.saturating_sub(shmem)));
        report.file_bytes = sum(&["active_file", "inactive_file", "isolated_file"]).map(bytes);
        report.dirty_bytes = sum(&["dirty", "writeback"]).map(bytes);
        let optional = ["sec_pagetables", "kernel_misc_reclaimable"]
            .into_iter()
            .filter_map(get)
            .fold(0, u64::saturating_add);
        report.kernel_bytes = sum(&["slab_reclaimable", "slab_unreclaimable", "pagetables"])
            .zip(self.kernel_stack_kib)
            .map(|(pages, stack)| bytes(pages.saturating_add(optional)).saturating_add(kib(stack)));
        report.hugetlb_bytes = self.hugetlb_kib.map(kib).filter(|bytes| *bytes > 0);
        report.swap_limit_bytes = self.total_swap_kib.map(kib);
        report.swap_bytes =
            self.total_swap_kib.zip(self.free_swap_kib).map(|(all, free)| kib(all.saturating_sub(free)));
        report.gpu_bytes = self.gpu_active_kib.map(kib).filter(|bytes| *bytes > 0);
        report.gpu_pool_bytes = self.gpu_reclaim_kib.map(kib).filter(|bytes| *bytes > 0);
        report.balloon_bytes = self.balloon_kib.map(kib).filter(|bytes| *bytes > 0);
        report.compressed_swap_bytes = self.zspages_kib.map(kib).filter(|bytes| *bytes > 0);
        // locked pages are on no other list, and the lists of each CPU are free
        let locked =
            ["unevictable", "free_pcp"].into_iter().filter_map(get).map(bytes).fold(0, u64::saturating_add);
        report.account_for(locked);
        report.incomplete |= self.total.is_none() || report.anon_bytes.is_none();
    }
}
