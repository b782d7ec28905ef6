//! What the kernel's report at a kill proves, with the advice for each.
//!
//! A report is one moment: it proves nothing about growth. Resident memory of several processes is never added up, because
//! forked processes share pages.

use super::limit::LimitSetter;
use super::text::{name, roles};
use super::{RunSummary, last_sample, program};
use crate::events::{Kill, OomReport, OomScope, ReportProcess, Role, RoleUsage};
use crate::text::bytes;

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

/// Returns what the report of a kill proves, with advice, the most telling first.
pub(super) fn of<'a>(kill: &'a Kill, run: &RunSummary<'a>) -> Vec<String> {
    let Some(report) = kill.report.as_deref() else {
        let shmem = kill.shmem_bytes.filter(|shmem| Some(*shmem) > kill.anon_bytes);
        return shmem.map(shared_memory_of_victim).into_iter().collect();
    };
    if report.order == Some(-1) {
        return vec![
            "This kill was requested by sysrq (Alt+SysRq+F, or f written to /proc/sysrq-trigger): memory need not have run out. \
             Find who requested it, such as a watchdog or a script."
                .to_owned(),
        ];
    }
    // the figures are the whole host's, and prove nothing of some of its nodes, nor of a request that what is free does not serve
    let free = free_but_unusable(kill);
    let of_all = |found: Option<String>| found.filter(|_| report.nodes.is_empty() && free.is_none());
    let fragmented = fragmentation(report).filter(|_| report.nodes.is_empty());
    let unusable = free.filter(|_| fragmented.is_none()).map(|free| {
        let cma = report.free_cma_bytes.map_or_else(String::new, |cma| {
            format!(
                " {} of them are reserved for contiguous allocations of devices (CMA), which most requests may not use: a smaller cma= on the \
                 kernel's command line frees them.",
                bytes(cma)
            )
        });
        format!(
            "{} were free, but not for this request: it was for memory of a certain zone, such as that below 4 GiB, or for contiguous \
             pages, or vm.min_free_kbytes reserves that much.{cma}",
            bytes(free)
        )
    });
    let memory_and_swap = (report.with_swap)
        .then(|| {
            let swap = report.swap_bytes?;
            let memory = bytes(report.usage_bytes?.saturating_sub(swap));
            Some(format!(
                "Memory and swap together reached their limit, with {memory} of memory and {} of swap: the memory limit alone was not.",
                bytes(swap)
            ))
        })
        .flatten();
    let victims_shmem =
        kill.shmem_bytes.filter(|shmem| report.shmem_bytes.is_none() && Some(*shmem) > kill.anon_bytes);
    let victims_shmem = victims_shmem.map(shared_memory_of_victim);
    let found = [
        memory_and_swap,
        fragmented,
        unusable,
        victims_shmem,
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

/// Says what the memory is that no program holds, as far as the log shows it.
fn without_programs(kill: &Kill, report: &OomReport, run: &RunSummary<'_>) -> Option<String> {
    let usage = report.usage_bytes.filter(|usage| *usage > 0)?;
    let is_much = |amount: &u64| *amount >= MIN_MUCH && *amount as f64 >= MUCH * usage as f64;
    let share = |amount: u64| format!("{} of {}", bytes(amount), bytes(usage));
    if let Some(gpu) = report.gpu_bytes.filter(is_much) {
        return Some(format!(
            "Pages of a GPU driver hold {}: most often the memory of a GPU that shares the host's, and no process shows it. Who was killed need not have \
             used it. A smaller model, context or batch on that GPU, or fewer layers, leaves the host more.",
            share(gpu)
        ));
    }
    if let Some(balloon) = report.balloon_bytes.filter(is_much) {
        return Some(format!(
            "The hypervisor took back {} (balloon): give this virtual machine a higher minimum.",
            share(balloon)
        ));
    }
    if let Some(swap) = report.compressed_swap_bytes.filter(is_much) {
        return Some(format!(
            "Compressed swap holds {} of the RAM itself (zram, zswap): it makes room for less than its size; swap on a disk takes none.",
            share(swap)
        ));
    }
    let unaccounted = report.unaccounted_bytes.filter(is_much)?;
    let known = format!("{} is in none of the kernel's counters", share(unaccounted));
    if kill.scope == OomScope::Container {
        let dying = |other: &&&Kill| {
            other.id != kill.id
                && (0.0..MAX_DYING_SECONDS).contains(&(kill.at - other.at))
                && other.limit_cgroup == kill.limit_cgroup
        };
        return Some(match run.kills.iter().find(dying) {
            Some(other) => format!(
                "{known}: most often a process that was killed just before still holds it, here {} (pid {}).",
                name(&other.process),
                other.pid.unwrap_or(0)
            ),
            None => format!(
                "{known}: most often another process of that cgroup, killed less than a second before, still holds it, or pages of a driver \
                 (GPU, RDMA)."
            ),
        });
    }
    Some(match report.driver_refusals {
        0 => format!(
            "{known}: most often pages of a driver (GPU, RDMA), or the balloon of a virtual machine. No limit of a container bounds them."
        ),
        refusals => format!(
            "{known}, and NVIDIA's driver was refused memory {refusals} times before: most often memory of a GPU that shares the host's, or \
             that its driver pinned. A smaller model, context or batch, or a smaller share of it (vLLM: --gpu-memory-utilization) leaves the host more."
        ),
    })
}

/// Explains shared memory of the victim, which its end does not free.
fn shared_memory_of_victim(shmem: u64) -> String {
    format!(
        "The victim had {} of shared memory resident (files on a tmpfs, memfd), which counts against the limit and stays until it is \
         removed or no process has it open.",
        bytes(shmem)
    )
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

/// Returns whose memory was full, for a sentence.
fn what_was_full(kill: &Kill, report: &OomReport) -> &'static str {
    match kill.scope {
        OomScope::Host => "the host's memory",
        OomScope::Container if report.limit_bytes.is_some() => "the limit",
        OomScope::Container => "its memory",
    }
}

/// Describes the kind of memory that accounts for most of the usage.
fn kind<'a>(kill: &'a Kill, report: &OomReport, run: &RunSummary<'a>) -> Option<String> {
    let usage = report.usage_bytes.filter(|usage| *usage > 0)?;
    let is_most = |amount: &u64| *amount as f64 >= MOST * usage as f64;
    let full = what_was_full(kill, report);
    let share = |amount: u64| format!("{} of {}", bytes(amount), bytes(usage));
    if let Some(shmem) = report.shmem_bytes.filter(is_most) {
        let shm = last_sample(run.before(Some(kill))).and_then(|last| last.shm_used_bytes);
        let which = match shm.filter(|used| *used as f64 >= MOST * shmem as f64) {
            Some(used) => format!("At the last sample {} of it were in /dev/shm", bytes(used)),
            None => "It is in files on a tmpfs, in a memfd or in other shared memory".to_owned(),
        };
        return Some(format!(
            "Shared memory filled {full}: {}. {which}, and stays until it is removed or no process has it open.",
            share(shmem)
        ));
    }
    if let Some(file) = report.file_bytes.filter(is_most) {
        let dirty = report.dirty_bytes.filter(|dirty| *dirty > 0).map_or_else(String::new, |dirty| {
            format!(" {} of it waited to be written to a disk.", bytes(dirty))
        });
        return Some(format!(
            "Page cache filled {full}: {}. The kernel drops it before it kills, so this part was not reclaimable in time: \
             being written, mapped and in use, or locked (mlock).{dirty} Write in smaller parts (fsync between them), or lock less.",
            share(file)
        ));
    }
    if let Some(kernel) = report.kernel_bytes.filter(is_most) {
        let holders: Vec<String> = report
            .kernel_holders
            .iter()
            .map(|holder| format!("{} {}", name(&holder.name), bytes(holder.bytes)))
            .collect();
        let more = if holders.is_empty() {
            "It grows with open files, sockets, processes and their page tables, and with names in the file system that programs look up."
                .to_owned()
        } else {
            format!("The largest: {}.", holders.join(", "))
        };
        return Some(format!("Memory of the kernel filled {full}: {}. {more}", share(kernel)));
    }
    if let Some(huge) = report.hugetlb_bytes.filter(is_most) {
        return Some(format!(
            "Huge pages are reserved for {}, used or not: reserve fewer (vm.nr_hugepages).",
            share(huge)
        ));
    }
    let anon = report.anon_bytes.filter(is_most)?;
    Some(format!("Anonymous memory of programs filled {full}: {}.", share(anon)))
}

/// Describes one process that held most, or many that are alike.
fn largest<'a>(kill: &'a Kill, report: &OomReport, run: &RunSummary<'a>) -> Option<String> {
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
        let which = if is_victim { ", the victim," } else { "" };
        let look = if program::is_virtual_machine(&first.process) {
            ""
        } else {
            " Look there for data that is kept in RAM."
        };
        return Some(format!(
            "One process held most of it: {}{which} with {} {}.{look}",
            process(first),
            bytes(own),
            if own < first.rss_bytes { "beside mapped files" } else { "resident" }
        ));
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
    let (count, fewer) = match role {
        None => (format!("{} processes {}", alike.len(), name(&first.process)), "start fewer of them"),
        Some(role @ Role::DataloaderWorker) => (roles(role, alike.len() as u32), "set fewer NUM_WORKERS"),
        Some(role) => (roles(role, alike.len() as u32), "start fewer of them"),
    };
    let at_least = if alike.len() == OomReport::MAX_PROCESSES { "At least " } else { "" };
    let (min, max) = (bytes(last.rss_bytes), bytes(first.rss_bytes));
    let range = if min == max { max } else { format!("{min} to {max}") };
    Some(format!(
        "{at_least}{count} were alike, with {range} resident each (pages that they share are in each): {fewer}, or make each \
         smaller."
    ))
}

fn process(row: &ReportProcess) -> String {
    let container =
        if row.container.is_empty() { String::new() } else { format!(" in {}", name(&row.container)) };
    format!("{} (pid {}){container}", name(&row.process), row.pid)
}

/// Explains a victim that was not the largest process.
fn victim(kill: &Kill, report: &OomReport, run: &RunSummary<'_>) -> Option<String> {
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
    let swap = |row: &ReportProcess| row.swap_bytes.unwrap_or(0);
    let with_swap = |resident: u64, swap: u64| resident.saturating_add(swap) as f64;
    if with_swap(first.rss_bytes, swap(first)) < 1.1 * with_swap(own, row.map_or(0, swap)) {
        return None;
    }
    let why = match first.oom_score_adj {
        Some(-1000) => " It cannot be killed: its oom_score_adj is -1000.".to_owned(),
        Some(adj) if Some(adj) != kill.oom_score_adj => {
            let its = kill.oom_score_adj.map_or_else(String::new, |own| format!(", the victim's is {own}"));
            format!(" Its oom_score_adj is {adj}{its}: the kernel adds it to the size.")
        }
        _ => String::new(),
    };
    Some(format!(
        "The victim was not the largest: {} held {}, the victim {}.{why}",
        process(first),
        resident_and_swap(first.rss_bytes, swap(first)),
        resident_and_swap(own, row.map_or(0, swap))
    ))
}

/// Returns `5.0 GiB`, or `5.0 GiB and 2.0 GiB in swap`.
fn resident_and_swap(resident: u64, swap: u64) -> String {
    match swap {
        0 => bytes(resident),
        swap => format!("{} and {} in swap", bytes(resident), bytes(swap)),
    }
}

/// Describes swap that was exhausted, or not there.
fn swap(kill: &Kill, report: &OomReport, run: &RunSummary<'_>) -> Option<String> {
    let limit = report.swap_limit_bytes.filter(|_| !report.with_swap)?;
    let has_host_swap = kill.scope == OomScope::Host || report.host_swap_bytes != Some(0);
    if !has_host_swap {
        return None; // the limit of this cgroup changes nothing
    }
    if limit == 0 {
        let text = match (kill.scope, LimitSetter::of(run.subject, &kill.limit_cgroup)) {
            (OomScope::Host, _) => "The host has no swap: some swap gives idle memory a place.",
            (_, LimitSetter::Kubernetes | LimitSetter::Unknown | LimitSetter::Run) => return None,
            (_, LimitSetter::Systemd) => "This cgroup may use no swap: MemorySwapMax= permits some.",
            (_, LimitSetter::Engine) => {
                "This cgroup may use no swap: --memory-swap above --memory permits some."
            }
        };
        return Some(text.to_owned());
    }
    let used = report.swap_bytes.filter(|used| *used as f64 >= SWAP_FULL * limit as f64)?;
    Some(format!("Swap was exhausted: {} of {} used.", bytes(used), bytes(limit)))
}

/// Describes free memory in pieces that are too small for the request.
fn fragmentation(report: &OomReport) -> Option<String> {
    let order = report.order.filter(|order| (1..32).contains(order) && report.fragmented)?;
    let free = report.free_bytes?;
    Some(format!(
        "The request was for {} contiguous pages (order {order}), and the {} that were free were in smaller pieces: a driver or \
         the network needs them. A larger vm.min_free_kbytes keeps some.",
        1_u64 << order,
        bytes(free)
    ))
}
