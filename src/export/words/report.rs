//! What is said of the kernel's report at a kill.

use super::terms::{name, roles};
use crate::diagnose::{FullMemory, LargestProcess, LimitSetter, ReportFinding, UNKILLABLE, UsageShare};
use crate::events::Role;
use crate::text::bytes as size;

/// Returns a fact of the kernel's report in a sentence.
pub(super) fn report(finding: &ReportFinding) -> String {
    match finding {
        ReportFinding::RequestedBySysrq => {
            "This kill was requested by sysrq (Alt+SysRq+F, or f written to /proc/sysrq-trigger): memory need not have run out. \
             Find who requested it, such as a watchdog or a script."
                .to_owned()
        }
        ReportFinding::MemoryAndSwap { memory_bytes, swap_bytes } => format!(
            "Memory and swap together reached their limit, with {} of memory and {} of swap: the memory limit alone was not.",
            size(*memory_bytes),
            size(*swap_bytes)
        ),
        ReportFinding::Fragmented { order, free_bytes } => format!(
            "The request was for {} contiguous pages (order {order}), and the {} that were free were in smaller pieces: a driver or \
             the network needs them. A larger vm.min_free_kbytes keeps some.",
            1_u64 << order,
            size(*free_bytes)
        ),
        ReportFinding::FreeButUnusable { free_bytes, free_cma_bytes } => {
            let cma = free_cma_bytes.map_or_else(String::new, |cma| {
                format!(
                    " {} of them are reserved for contiguous allocations of devices (CMA), which most requests may not use: a smaller cma= on the \
                     kernel's command line frees them.",
                    size(cma)
                )
            });
            format!(
                "{} were free, but not for this request: it was for memory of a certain zone, such as that below 4 GiB, or for contiguous \
                 pages, or vm.min_free_kbytes reserves that much.{cma}",
                size(*free_bytes)
            )
        }
        ReportFinding::FreeAtPanic { free_bytes, host_bytes } => format!(
            "{} of {} were free, and not for this request: often because a program is restricted to NUMA nodes (numactl --membind, a cpuset), \
             else because it was for a certain zone or for contiguous pages.",
            size(*free_bytes),
            size(*host_bytes)
        ),
        ReportFinding::VictimSharedMemory { shmem_bytes } => format!(
            "The victim had {} of shared memory resident (files on a tmpfs, memfd), which counts against the limit and stays until it is \
             removed or no process has it open.",
            size(*shmem_bytes)
        ),
        ReportFinding::GpuDriverPages { share } => format!(
            "Pages of a GPU driver hold {}: most often the memory of a GPU that shares the host's, and no process shows it. Who was killed need not have \
             used it. A smaller model, context or batch on that GPU, or fewer layers, leaves the host more.",
            part(share)
        ),
        ReportFinding::Balloon { share } => format!(
            "The hypervisor took back {} (balloon): give this virtual machine a higher minimum.",
            part(share)
        ),
        ReportFinding::CompressedSwap { share } => format!(
            "Compressed swap holds {} of the RAM itself (zram, zswap): it makes room for less than its size; swap on a disk takes none.",
            part(share)
        ),
        ReportFinding::HeldByKilled { share, process, pid } => format!(
            "{}: most often a process that was killed just before still holds it, here {}{}.",
            unaccounted(share),
            name(process),
            pid.map_or_else(String::new, |pid| format!(" (pid {pid})"))
        ),
        ReportFinding::UnaccountedInCgroup { share } => format!(
            "{}: most often another process of that cgroup, killed less than a second before, still holds it, or pages of a driver \
             (GPU, RDMA).",
            unaccounted(share)
        ),
        ReportFinding::UnaccountedOnHost { share, driver_refusals: 0 } => format!(
            "{}: most often pages of a driver (GPU, RDMA), or the balloon of a virtual machine. No limit of a container bounds them.",
            unaccounted(share)
        ),
        ReportFinding::UnaccountedOnHost { share, driver_refusals } => format!(
            "{}, and NVIDIA's driver was refused memory {driver_refusals} times before: most often memory of a GPU that shares the host's, or \
             that its driver pinned. A smaller model, context or batch, or a smaller share of it (vLLM: --gpu-memory-utilization) leaves the host more.",
            unaccounted(share)
        ),
        ReportFinding::SharedMemoryFilled { full, share, dev_shm_bytes } => {
            let which = match dev_shm_bytes {
                Some(used) => format!("At the last sample {} of it were in /dev/shm", size(*used)),
                None => "It is in files on a tmpfs, in a memfd or in other shared memory".to_owned(),
            };
            format!(
                "Shared memory filled {}: {}. {which}, and stays until it is removed or no process has it open.",
                memory(*full),
                part(share)
            )
        }
        ReportFinding::PageCacheFilled { full, share, dirty_bytes } => {
            let dirty = dirty_bytes.map_or_else(String::new, |dirty| {
                format!(" {} of it waited to be written to a disk.", size(dirty))
            });
            format!(
                "Page cache filled {}: {}. The kernel drops it before it kills, so this part was not reclaimable in time: \
                 being written, mapped and in use, or locked (mlock).{dirty} Write in smaller parts (fsync between them), or lock less.",
                memory(*full),
                part(share)
            )
        }
        ReportFinding::KernelMemoryFilled { full, share, holders } => {
            let listed: Vec<String> =
                holders.iter().map(|holder| format!("{} {}", name(&holder.name), size(holder.bytes))).collect();
            let more = if listed.is_empty() {
                "It grows with open files, sockets, processes and their page tables, and with names in the file system that programs look up."
                    .to_owned()
            } else {
                format!("The largest: {}.", listed.join(", "))
            };
            format!("Memory of the kernel filled {}: {}. {more}", memory(*full), part(share))
        }
        ReportFinding::HugePages { share } => {
            format!("Huge pages are reserved for {}, used or not: reserve fewer (vm.nr_hugepages).", part(share))
        }
        ReportFinding::AnonymousMemoryFilled { full, share } => {
            format!("Anonymous memory of programs filled {}: {}.", memory(*full), part(share))
        }
        ReportFinding::OneProcess { largest, bytes, is_victim, has_mapped_files, is_virtual_machine } => format!(
            "One process held most of it: {}{} with {} {}.{}",
            process(largest),
            if *is_victim { ", the victim," } else { "" },
            size(*bytes),
            if *has_mapped_files { "beside mapped files" } else { "resident" },
            if *is_virtual_machine { "" } else { " Look there for data that is kept in RAM." }
        ),
        ReportFinding::AlikeProcesses { count, is_cut, role, process, min_rss_bytes, max_rss_bytes, num_workers } => {
            let which = match role {
                Some(role) => roles(*role, *count),
                None => format!("{count} processes {}", name(process)),
            };
            let fewer = match role {
                Some(Role::DataloaderWorker) => {
                    let now = num_workers.as_ref();
                    let now = now.map_or_else(String::new, |value| format!(" (now {})", name(value)));
                    format!("set fewer NUM_WORKERS{now}")
                }
                _ => "start fewer of them".to_owned(),
            };
            let at_least = if *is_cut { "At least " } else { "" };
            let (min, max) = (size(*min_rss_bytes), size(*max_rss_bytes));
            let range = if min == max { max } else { format!("{min} to {max}") };
            format!(
                "{at_least}{which} were alike, with {range} resident each (pages that they share are in each): {fewer}, or make each \
                 smaller."
            )
        }
        ReportFinding::VictimNotLargest {
            largest,
            rss_bytes,
            swap_bytes,
            oom_score_adj,
            victim_rss_bytes,
            victim_swap_bytes,
            victim_oom_score_adj,
        } => format!(
            "The victim was not the largest: {} held {}, the victim {}.{}",
            process(largest),
            resident_and_swap(*rss_bytes, *swap_bytes),
            resident_and_swap(*victim_rss_bytes, *victim_swap_bytes),
            score(*oom_score_adj, *victim_oom_score_adj)
        ),
        ReportFinding::HostWithoutSwap => {
            "The host has no swap: some swap gives idle memory a place.".to_owned()
        }
        ReportFinding::SwapForbidden { setter } => {
            let setting = match setter {
                LimitSetter::Systemd => "MemorySwapMax=",
                _ => "--memory-swap above --memory",
            };
            format!("This cgroup may use no swap: {setting} permits some.")
        }
        ReportFinding::SwapExhausted { swap_bytes, swap_limit_bytes } => {
            format!("Swap was exhausted: {} of {} used.", size(*swap_bytes), size(*swap_limit_bytes))
        }
    }
}

/// Returns `5.0 GiB of 8.0 GiB`.
fn part(share: &UsageShare) -> String {
    format!("{} of {}", size(share.bytes), size(share.usage_bytes))
}

fn unaccounted(share: &UsageShare) -> String {
    format!("{} is in none of the kernel's counters", part(share))
}

/// Returns whose memory was full.
fn memory(full: FullMemory) -> &'static str {
    match full {
        FullMemory::Host => "the host's memory",
        FullMemory::Limit => "the limit",
        FullMemory::Cgroup => "its memory",
    }
}

fn process(largest: &LargestProcess) -> String {
    let container = largest.container.as_deref();
    let container = container.map_or_else(String::new, |container| format!(" in {}", name(container)));
    format!("{} (pid {}){container}", name(&largest.process), largest.pid)
}

/// Returns `5.0 GiB`, or `5.0 GiB and 2.0 GiB in swap`.
fn resident_and_swap(resident: u64, swap: Option<u64>) -> String {
    match swap {
        None | Some(0) => size(resident),
        Some(swap) => format!("{} and {} in swap", size(resident), size(swap)),
    }
}

/// Returns how the score of the largest process explains that another one was killed.
fn score(largest: Option<i32>, victims: Option<i32>) -> String {
    match largest {
        Some(UNKILLABLE) => format!(" It cannot be killed: its oom_score_adj is {UNKILLABLE}."),
        Some(adj) => {
            let its = victims.map_or_else(String::new, |own| format!(", the victim's is {own}"));
            format!(" Its oom_score_adj is {adj}{its}: the kernel adds it to the size.")
        }
        None => String::new(),
    }
}
