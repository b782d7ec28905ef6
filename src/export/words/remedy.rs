//! The remedies of limits, of the host, and of ends.

use super::place::raise as raise_place;
use super::program::fewer_workers as fewer_of_program;
use super::terms::{name, path, roles, time};
use super::{Noun, limit};
use crate::diagnose::{
    LimitRemedy, LimitSetter, LimitSetting, OutputPlace, OutputPurpose, PasteRemedy, WorkerFit,
    WorkerSetting, WorkerShare, Workers,
};
use crate::events::{PssMissing, Role};
use crate::text::bytes;

/// Returns the sentence of a remedy.
pub(super) fn remedy(remedy: &LimitRemedy, noun: Noun) -> String {
    let text = match remedy {
        LimitRemedy::MoreNodes => {
            "Let it use more nodes: docker run --cpuset-mems, cpuset.mems of its cgroup; numactl --membind in its command, where --preferred \
             prefers a node and may use the others. Other nodes may have had free memory: numactl --hardware shows each."
        }
        LimitRemedy::FewerProgramsOnNodes => {
            "Or keep other programs from these nodes: the kernel kills the largest process there."
        }
        LimitRemedy::RaisePlace { place, limit_bytes } => return raise_place(place, &now(*limit_bytes)),
        LimitRemedy::LetProcessesBeKilled => {
            "Let some processes be killed: an oom_score_adj above -1000 for all but the most important (a process inherits it)."
        }
        LimitRemedy::LetItsProcessBeKilled => {
            "Let one of its processes be killed: an oom_score_adj above -1000 (docker run --oom-score-adj; a process inherits it), so that it ends \
             and is restarted in place of hanging."
        }
        LimitRemedy::NoPanicOnOom => {
            "vm.panic_on_oom=0 lets the kernel kill a process in place of the machine; with 1 it panics unless the request was restricted to some \
             NUMA nodes or a cgroup, with 2 (compulsory) always."
        }
        LimitRemedy::ReadOutput { purpose, output } => return read_output(*purpose, output),
        LimitRemedy::SearchKernelLog => {
            "Search the kernel log around that time: dmesg -T | grep -i -B40 'killed process'"
        }
        LimitRemedy::RaiseStopTimeout => {
            "If it has to save its state first: raise the stop timeout (docker stop -t, Compose stop_grace_period), and handle SIGTERM, which the \
             first process of a container ignores unless it has a handler (docker run --init helps programs without one)."
        }
        LimitRemedy::RaiseOrUseLess { setter } => {
            return format!(
                "Raise its memory limit{}, or reduce its memory use.",
                limit::names(*setter, None)
            );
        }
        LimitRemedy::Raise { limit, is_alternative } => {
            return format!(
                "{} {}. A kill does not show by how much.",
                raise(*is_alternative),
                limit_setting(limit)
            );
        }
        LimitRemedy::RaiseForSharedMemory { limit } => return format!("Or raise {}.", limit_setting(limit)),
        LimitRemedy::RaiseInside { cgroup, limit_bytes, is_alternative } => {
            let now = limit_bytes.map_or_else(String::new, |limit| format!("; now {}", bytes(limit)));
            return format!(
                "{} the limit of {}, which was set inside {}{now}.",
                raise(*is_alternative),
                path(cgroup),
                noun.the()
            );
        }
        LimitRemedy::RaiseAbove { limit_bytes } => {
            return format!(
                "Raise the limit of the cgroup above{}, or start {} below another one (docker run --cgroup-parent).",
                now(*limit_bytes),
                noun.the()
            );
        }
        LimitRemedy::ComparePodContainers => {
            "All containers of the pod share that limit, and the kernel kills the largest process in it, whichever container grew: compare them \
             (memledger ps)."
        }
        LimitRemedy::LimitEachBelow => {
            "All containers below that cgroup share its limit, and the kernel kills the largest, not the one that grew: give each a limit of its \
             own, so that the one that grows is the one that is killed."
        }
        LimitRemedy::FewerWorkers { workers, share } => return fewer_workers(workers, share),
        LimitRemedy::FewerWorkersOfTable { num_workers, processes, min_rss_bytes, max_rss_bytes } => {
            let (min, max) = (bytes(*min_rss_bytes), bytes(*max_rss_bytes));
            let range = if min == max { max } else { format!("{min} to {max}") };
            return format!(
                "Fewer NUM_WORKERS{}: {} had {range} resident each (pages that they share are in each).",
                value_now(Some(num_workers)),
                roles(Role::DataloaderWorker, *processes)
            );
        }
        LimitRemedy::FewerWorkersOfHost { workers, pss_bytes } => {
            return format!(
                "{} also save memory: {} held {}.",
                fewer(workers),
                roles(workers.role, workers.processes),
                bytes(*pss_bytes)
            );
        }
        LimitRemedy::SmallerTrainers { processes, pss_bytes, held_bytes, num_devices, batch_size } => {
            let each = match *processes {
                count @ 2.. => {
                    let devices = num_devices.as_ref();
                    let devices = devices
                        .map_or_else(String::new, |value| format!(" (NUM_DEVICES is {})", name(value)));
                    let each = bytes(pss_bytes / u64::from(count));
                    format!(", {each} each{devices}: each rank holds its own copy")
                }
                _ => String::new(),
            };
            let batch = batch_size.as_ref();
            return format!(
                "Smaller trainers: {} held {} of the {}{each}. Look for a data set or results kept in RAM.{}",
                roles(Role::Trainer, *processes),
                bytes(*pss_bytes),
                bytes(*held_bytes),
                batch.map_or_else(String::new, |batch| format!(" BATCH_SIZE is {}.", name(batch)))
            );
        }
        LimitRemedy::LessSharedMemory { shmem_bytes, held_bytes } => {
            return format!(
                "Less shared memory: {} of the {} that the kernel could not drop were shared memory or files on a tmpfs, which count against the \
                 memory limit and stay until they are removed.",
                bytes(*shmem_bytes),
                bytes(*held_bytes)
            );
        }
        LimitRemedy::LessInDevShm { used_bytes, size_bytes, num_workers } => {
            return format!(
                "In its /dev/shm lay {} of {}: batches that DataLoader workers hand over lie there, so fewer NUM_WORKERS{} or a smaller \
                 prefetch_factor. A larger --shm-size does not help here.",
                bytes(*used_bytes),
                bytes(*size_bytes),
                value_now(num_workers.as_deref())
            );
        }
        LimitRemedy::LargerDevShm { used_bytes, size_bytes } => {
            return format!(
                "A larger --shm-size (Compose shm_size; Kubernetes: an emptyDir of medium Memory on /dev/shm). It is {} now, {} of it in use at the \
                 last sample. Or --ipc=host, which shares the host's.",
                bytes(*size_bytes),
                bytes(*used_bytes)
            );
        }
        LimitRemedy::LessInFullDevShm { num_workers } => {
            return format!(
                "Or put less there: fewer NUM_WORKERS{}, a smaller prefetch_factor or batch, or \
                 torch.multiprocessing.set_sharing_strategy('file_system').",
                value_now(num_workers.as_deref())
            );
        }
        LimitRemedy::TryLargerDevShm { used_bytes, size_bytes } => {
            let now = match (size_bytes, used_bytes) {
                (Some(size), Some(used)) => {
                    format!(" (now {}, {} of it in use at the last sample)", bytes(*size), bytes(*used))
                }
                (Some(size), None) => format!(" (now {}; its use is not known)", bytes(*size)),
                _ => " (its size and use are not recorded)".to_owned(),
            };
            return format!(
                "SIGBUS with DataLoader workers is most often a full /dev/shm: try a larger --shm-size{now}, or --ipc=host. It may fill up between \
                 two samples."
            );
        }
        LimitRemedy::RankContainers => {
            "The holders of the memory are not recorded. To see them while it happens, rank containers by \
             memledger_container_memory_unreclaimable_bytes of `memledger serve`."
        }
        LimitRemedy::SmallerGuests => {
            "The memory of this host is that of its virtual machines: give their guests less in sum (qm set, virsh setmem), with room for QEMU and \
             the system."
        }
        LimitRemedy::LimitEveryContainer => {
            "Give every container a memory limit whose sum leaves room for the system."
        }
        LimitRemedy::RankHostProcesses => {
            "Most was used outside containers: ps -eo pid,rss,comm --sort=-rss | head shows the processes."
        }
        LimitRemedy::LimitLargest { container, is_largest_holder } => {
            return format!(
                "Set a memory limit on {}, {}, or lower its limit: docker run --memory, Compose mem_limit, memledger run --memory. Then its growth \
                 affects itself, not other containers.",
                container.as_ref().map_or_else(|| noun.this().to_owned(), |container| name(container)),
                if *is_largest_holder { "the largest holder" } else { "the largest container" }
            );
        }
        LimitRemedy::KeepKernelLog => {
            "So that records are not lost: let memledger read /dev/kmsg (CAP_SYSLOG; see `memledger doctor`), and boot with a larger kernel log \
             (log_buf_len=1M)."
        }
        LimitRemedy::ReadPodEvents { namespace, pod } => {
            return format!(
                "In a pod most often a failed liveness probe, an eviction, or a deletion or a drain whose grace period ended, which look alike on the \
                 node: kubectl get events -n {} --field-selector involvedObject.name={} has which it was, for an hour.",
                name(namespace),
                name(pod)
            );
        }
        LimitRemedy::FindSender { is_run } => {
            let engine = if *is_run { "" } else { "docker stop after its timeout; " };
            return format!(
                "Other senders of SIGKILL: {engine}systemd-oomd and earlyoom, which kill on low memory before the kernel does, without a kernel \
                 record; Ray's memory monitor; a batch system; a person with kill -9. A program that exits with code 137 by itself looks the same."
            );
        }
        LimitRemedy::ReadJournal { at, is_run } => {
            let at = at.map_or_else(String::new, |at| format!(" the logs of {}", time(at)));
            let units = if *is_run { "" } else { " -u kubelet -u docker" };
            return format!("Check{at}: journalctl -u systemd-oomd -u earlyoom{units}");
        }
        LimitRemedy::FindAbort => {
            "SIGABRT is how a program ends itself: a failed assertion, or a C++ exception such as std::bad_alloc. Its last log lines show which."
        }
        LimitRemedy::FindFaultOrAbort => {
            "As the status of a container's first process, 139 is either a fault in native code or abort(), which ends it in the same way: \
             Node.js at its heap limit, Rust and C++ whose memory was refused. The last log lines say so; after a fault dmesg has \"segfault at\" \
             with the library."
        }
        LimitRemedy::FindFault => {
            "That is a fault in native code (an extension, a library, a driver), not a lack of memory; dmesg names the library in a line with \
             \"segfault at\" or \"trap\"."
        }
        LimitRemedy::FindSenderOfSignal => {
            return format!(
                "It was not sent by {}, but by a person, a script, or the program itself.",
                noun.runtime()
            );
        }
        LimitRemedy::FindWhoStoppedIt => {
            return format!(
                "Look for who stopped it: a deletion or an eviction of its pod, a stop of {}, a person, or a script.",
                noun.runtime()
            );
        }
        LimitRemedy::SwitchOomKillerOn => {
            "Raise the limit (docker update --memory), free memory in it, or start it without --oom-kill-disable: then a process of it is killed."
        }
        LimitRemedy::RaiseOrUseLessAtLimit => {
            "It is not killed, because the kernel still frees a little again and again: raise the limit, or let it use less."
        }
    };
    text.to_owned()
}

/// Returns the sentence on what a log from elsewhere lacks.
pub(super) fn paste(remedy: &PasteRemedy) -> String {
    match remedy {
        PasteRemedy::WholeReport => {
            "The log seems to have only lines that were searched for: the whole report says what used the memory (journalctl -k or dmesg, without grep).".to_owned()
        }
        PasteRemedy::LowerPriority => {
            "Lines of priority info seem to be missing, which name the cgroup and the processes: journalctl -k without -p.".to_owned()
        }
        PasteRemedy::KernelLogOfNode { node, restarted_pod } => {
            let pod = restarted_pod.as_ref();
            let pod = pod.map_or_else(String::new, |pod| format!(" The pod {pod} is restarted in these events."));
            format!("The kernel log of the node {node} names the container, and what each process held: journalctl -k there.{pod}")
        }
    }
}

/// Returns ` (now 2.0 GiB)`; empty if it is unknown.
fn now(limit: Option<u64>) -> String {
    limit.map_or_else(String::new, |limit| format!(" (now {})", bytes(limit)))
}

/// Returns ` (now 8)`, the value of a setting; empty if it is unknown.
fn value_now(value: Option<&str>) -> String {
    value.map_or_else(String::new, |value| format!(" (now {})", name(value)))
}

fn raise(is_alternative: bool) -> &'static str {
    if is_alternative { "Or raise" } else { "Raise" }
}

/// Returns the names of the setting of a limit, and its value.
fn limit_setting(setting: &LimitSetting) -> String {
    match setting.setter {
        LimitSetter::Engine if setting.with_swap => {
            let now = setting.limit_bytes.map_or_else(String::new, |limit| format!("; now {}", bytes(limit)));
            format!("the limit of memory and swap together (--memory-swap, memswap_limit{now})")
        }
        setter => format!("the memory limit{}", limit::names(setter, setting.limit_bytes)),
    }
}

/// Returns how fewer workers are set.
fn fewer(workers: &Workers) -> String {
    match workers.role {
        Role::Worker => fewer_of_program(workers.program).to_owned(),
        _ => format!("Fewer NUM_WORKERS{}", value_now(workers.num_workers.as_deref())),
    }
}

/// Advises fewer workers, and how many would fit if that can be computed.
fn fewer_workers(workers: &Workers, share: &WorkerShare) -> String {
    let (fewer, held) = (fewer(workers), roles(workers.role, workers.processes));
    match share {
        WorkerShare::Unmeasured { missing } => format!(
            "{fewer}. {held} ran. What each holds alone is not known{}.",
            missing.map_or("", why_unmeasured)
        ),
        WorkerShare::Unexplained { each_bytes, all_bytes, held_bytes } => format!(
            "{fewer}. {held} ran, with {} each (PSS) when that was last measured. All measured shares are {}{}, so how many workers fit is not known.",
            bytes(*each_bytes),
            bytes(*all_bytes),
            held_bytes.map_or_else(String::new, |total| format!(" of the {} that it held", bytes(total)))
        ),
        WorkerShare::Measured { pss_bytes, held_bytes, each_bytes, fit } => format!(
            "{fewer}: {held} held {}{}, {} each (PSS).{}",
            bytes(*pss_bytes),
            held_bytes.map_or_else(String::new, |total| format!(" of {}", bytes(total))),
            bytes(*each_bytes),
            fit.map_or_else(String::new, |fit| fitting(fit, workers.role))
        ),
    }
}

/// Describes how many workers fit below a limit.
fn fitting(fit: WorkerFit, role: Role) -> String {
    match fit {
        WorkerFit::All => {
            " By the last sample all of them fit: they grew after it, so how many fit is not known."
                .to_owned()
        }
        WorkerFit::TooFew { fitting_processes: processes, others_bytes } => {
            let few = match processes {
                0 => "Not one fits".to_owned(),
                fit => format!("Only {fit} of them fit"),
            };
            let none = if role == Role::DataloaderWorker { "NUM_WORKERS=0, or " } else { "" };
            format!(
                " {few} beside the other {}, a tenth of the limit kept free: {none}a higher limit.",
                bytes(others_bytes)
            )
        }
        WorkerFit::Some { fitting_processes, setting } => {
            let setting = setting.map_or_else(String::new, |setting| {
                let WorkerSetting { fitting_num_workers, loaders } = setting;
                let each =
                    if loaders > 1 { format!(" for each of {loaders} loaders") } else { String::new() };
                format!(": NUM_WORKERS={fitting_num_workers}{each}")
            });
            format!(" With a tenth of the limit kept free {fitting_processes} fit{setting}.")
        }
    }
}

/// Says why a proportional share is not known.
fn why_unmeasured(missing: PssMissing) -> &'static str {
    match missing {
        PssMissing::NotYet => {
            ": its proportional share (PSS) had not been measured yet (once per --pss.interval)"
        }
        PssMissing::Permission => {
            ": reading its proportional share (PSS) needs CAP_SYS_PTRACE, which memledger lacked"
        }
        PssMissing::Expensive => {
            ": its proportional share (PSS) was not read, because it would have waited too long for that"
        }
        PssMissing::LowHeadroom => {
            ": its proportional share (PSS) is not read while its container is near its limit"
        }
    }
}

/// Says what a container's output has, and how it is read.
fn read_output(purpose: OutputPurpose, output: &OutputPlace) -> String {
    let what = match purpose {
        OutputPurpose::LastLines => "Read its last log lines",
        OutputPurpose::LastLinesIfExists => "Read its last log lines, if it still exists",
        OutputPurpose::Error => "Its log has the error",
        OutputPurpose::FullDevShm => "Its log proves it with \"Bus error\" or \"No space left on device\"",
    };
    let how = match output {
        OutputPlace::Terminal => {
            "what it wrote to its terminal or file; memledger keeps no output of a run".to_owned()
        }
        OutputPlace::Pod { namespace, pod, container } => format!(
            "kubectl logs -n {namespace} {pod} -c {container} (with --previous if it has started again)"
        ),
        OutputPlace::Container { command, container: Some(container) } => {
            format!("{command} logs --tail 50 {container}")
        }
        OutputPlace::Container { command, container: None } => format!("{command} logs"),
    };
    format!("{what}: {how}")
}
