//! What is said of kills that other programs than the kernel reported, and of memory monitors.

use super::Noun;
use super::place::noun as place_noun;
use super::terms::name;
use crate::diagnose::{CgroupPlace, MonitorFinding, MonitorRemedy, NoticeRemedy};
use crate::parse::kill_notice::{KillNotice, NoticeSource};

/// Length of a container's id as engines print it.
const SHORT_ID: usize = 12;

/// Says who was killed, and by whom.
pub(super) fn incident(notice: &KillNotice) -> String {
    let KillNotice { time, process, pid, cgroup, unit, exit_code, .. } = notice;
    let when = if time.is_empty() { "At an unknown time".to_owned() } else { format!("At {}", name(time)) };
    let process = match (process.is_empty(), pid) {
        (true, _) => None,
        (false, Some(pid)) => Some(format!("{} (pid {pid})", name(process))),
        (false, None) => Some(name(process)),
    };
    // a container is named by its id, and its pod beside it
    let around = cgroup.rsplit_once('/').map_or("", |(around, _)| around);
    let place = match (cgroup.is_empty(), unit.is_empty()) {
        (false, _) if !notice.container_id.is_empty() => Some(CgroupPlace::of(around))
            .filter(|place| matches!(place, CgroupPlace::Pod { .. }))
            .map(|pod| place_noun(&pod)),
        (false, _) => Some(of_class(&CgroupPlace::of_limit(cgroup), cgroup)),
        (true, false) => Some(format!("the systemd unit {}", name(unit))),
        (true, true) => None,
    };
    let container = (!notice.container_id.is_empty() && notice.container.is_empty())
        .then(|| format!("the container {}", &notice.container_id[..SHORT_ID]));
    let whose = [container, place].into_iter().flatten().collect::<Vec<_>>().join(" of ");
    let held = match (&*notice.resident, &*notice.peak) {
        ("", "") => String::new(),
        ("", peak) => format!(" Its memory peaked at {}.", name(peak)),
        (resident, _) => format!(" It had {} resident.", name(resident)),
    };
    if let Some(killer) = notice.source.killer() {
        let whom = match (process, whose.is_empty()) {
            (Some(process), true) => process,
            (Some(process), false) => format!("{process} in {whose}"),
            (None, true) => "a process".to_owned(),
            (None, false) => whose,
        };
        let reason =
            if notice.reason.is_empty() { String::new() } else { format!(", because of {}", reason(notice)) };
        return format!(
            "{when} {killer} killed {whom}{reason}. That is in its own log lines; this log has no kill by the kernel.{held}"
        );
    }
    if notice.source == NoticeSource::Kubectl {
        let code = exit_code.map_or_else(String::new, |code| format!(" with exit code {code}"));
        let which = match notice.container.is_empty() {
            true => format!("a container of the pod {}", name(&notice.pod)),
            false => format!("the container {} of the pod {}", name(&notice.container), name(&notice.pod)),
        };
        return format!(
            "{when} {which} ended{code}, with a process of it killed by the kernel's OOM killer, as Kubernetes reports."
        );
    }
    let reporter = match notice.source {
        NoticeSource::Kubelet => "the kubelet",
        NoticeSource::Containerd => "the container runtime",
        _ => "systemd",
    };
    let whose = if whose.is_empty() { String::new() } else { format!(" of {whose}") };
    let process = process.unwrap_or_else(|| "a process".to_owned());
    format!("{when} {reporter} reports that the kernel's OOM killer killed {process}{whose}.{held}")
}

/// Returns the noun of a place, of a pod with its class, by which Talos chooses.
fn of_class(place: &CgroupPlace, cgroup: &str) -> String {
    let class = [("besteffort", " (BestEffort)"), ("burstable", " (Burstable)")];
    let class = class.iter().find(|(class, _)| cgroup.contains(class)).map_or("", |(_, class)| class);
    let is_pod = matches!(place, CgroupPlace::Pod { .. });
    place_noun(place) + if is_pod { class } else { "" }
}

/// Returns why a monitor killed, as it says.
fn reason(notice: &KillNotice) -> String {
    match notice.source {
        NoticeSource::Earlyoom | NoticeSource::Nohang => format!("low memory ({})", notice.reason),
        _ => notice.reason.chars().take(200).collect(),
    }
}

/// Returns the sentence of a remedy.
pub(super) fn remedy(remedy: &NoticeRemedy) -> String {
    let text = match remedy {
        NoticeRemedy::ReadKernelLogOfHost => return read_kernel_log("that host"),
        NoticeRemedy::ReadKernelLogOfNode { node: None } => return read_kernel_log("the node"),
        NoticeRemedy::ReadKernelLogOfNode { node: Some(node) } => {
            return read_kernel_log(&format!("the node {}", name(node)));
        }
        NoticeRemedy::SetOomdThresholds => {
            "systemd-oomd kills by memory pressure or by use of swap: ManagedOOMMemoryPressureLimit= and ManagedOOMSwap= of the unit that it \
             names set when, ManagedOOMPreference=avoid spares one. Else use less memory in it, or give it a limit of its own (MemoryMax=)."
        }
        NoticeRemedy::SetEarlyoomThresholds => {
            "earlyoom kills when the whole machine is low on memory and swap: -m and -s set when, --avoid spares processes by name. What used \
             the memory need not be what was killed."
        }
        NoticeRemedy::SetNohangThresholds => {
            "nohang kills when the whole machine is low on memory: soft_threshold_min_mem and hard_threshold_min_mem in its configuration set \
             when. What used the memory need not be what was killed."
        }
        NoticeRemedy::GivePodRequests => {
            "Talos kills pods of the lowest class first when its node is under pressure: give the pod requests and limits, run fewer on this \
             node, or set its OOMConfig."
        }
        NoticeRemedy::RaiseMemoryMax { unit } => {
            return format!(
                "Raise MemoryMax= of {0}, if it has one (systemctl show -p MemoryMax {0}); else the machine ran out.",
                name(unit)
            );
        }
        NoticeRemedy::GivePodsLimits => {
            "It has no memory limit: the node ran out, or the limit of all pods was reached. Give it a request, and every pod a memory limit."
        }
        NoticeRemedy::RaisePodLimit { limit } => {
            let now = limit.as_ref().map_or_else(String::new, |limit| format!(" (now {})", name(limit)));
            return format!(
                "Raise resources.limits.memory of the container{now}, if that limit was reached."
            );
        }
        NoticeRemedy::RaiseContainerLimit => {
            "Raise the memory limit of the container (--memory, resources.limits.memory), if that was reached."
        }
    };
    text.to_owned()
}

/// Says where the kernel's own lines are.
fn read_kernel_log(of: &str) -> String {
    format!(
        "The kernel's own lines are not in this log: they have the limit that was hit, and the memory of each process. The kernel log of {of} around \
         that time has them: journalctl -k (or dmesg, talosctl dmesg) | memledger why --kernel-log -"
    )
}

/// Returns the sentence of what the journal has of a monitor.
pub(super) fn monitor_finding(finding: &MonitorFinding, noun: Noun) -> String {
    match finding {
        MonitorFinding::OomdKilledCgroup => {
            "The journal says that systemd-oomd killed its cgroup; the kernel had killed nothing there."
                .to_owned()
        }
        MonitorFinding::EarlyoomKilledAProcess => {
            format!("earlyoom killed a process at that time; whether it was in {} is not known.", noun.this())
        }
    }
}

/// Returns the sentence of a remedy after a kill by a monitor.
pub(super) fn monitor_remedy(remedy: &MonitorRemedy, noun: Noun) -> String {
    match remedy {
        MonitorRemedy::OomdSettings => {
            "What systemd-oomd watches and when it acts: oomctl. ManagedOOMPreference=avoid of a unit makes it the last choice.".to_owned()
        }
        MonitorRemedy::LessMemory => {
            format!("Less memory in use on the host, more swap, or a memory limit for {}.", noun.the())
        }
    }
}
