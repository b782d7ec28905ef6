//! The verdict on a kill of which a log has only what another program than the kernel says.

use super::place::CgroupPlace;
use super::text::name;
use super::{Cause, Confidence, Verdict};
use crate::discover::RuntimeKind;
use crate::events::{ContainerRef, Identity};
use crate::parse::container_id;
use crate::parse::kill_notice::{KillNotice, NoticeSource};

/// Length of a container's id as engines print it.
const SHORT_ID: usize = 12;

/// Returns the verdict on a notice in a log from elsewhere.
pub fn explain_notice(notice: &KillNotice, now: f64) -> Verdict {
    let killer = notice.source.killer();
    Verdict {
        subject: subject(notice),
        headline: killer.map(|killer| format!("KILLED by {killer}")),
        cause: if killer.is_some() { Cause::KilledByMonitor } else { Cause::OomFlagOnly },
        confidence: Confidence::Likely,
        exit_reason: None,
        ended: None,
        exit_code: None,
        at: None,
        log_time: Some(notice.time.clone()).filter(|time| !time.is_empty()),
        requested_at: now,
        what: what(notice),
        also: vec![],
        evidence: vec![],
        pid: notice.pid,
        report: None,
        held: None,
        advice: advice(notice),
    }
}

fn subject(notice: &KillNotice) -> Option<ContainerRef> {
    let KillNotice { container_id: id, container, pod, namespace, cgroup, .. } = notice;
    if id.is_empty() && pod.is_empty() {
        return None;
    }
    let called = if container.is_empty() { id.get(..SHORT_ID).unwrap_or(pod) } else { container };
    let runtime = container_id::in_path(cgroup).next().map(|found| found.runtime);
    let runtime = match notice.source {
        NoticeSource::Kubectl | NoticeSource::Kubelet => Some(RuntimeKind::Cri),
        _ => runtime.filter(|runtime| *runtime != RuntimeKind::Unknown),
    };
    Some(ContainerRef {
        identity: Identity {
            name: (*called).into(),
            k8s_pod: if called == pod { "".into() } else { pod.as_str().into() },
            k8s_namespace: namespace.as_str().into(),
        },
        container_id: id.as_str().into(),
        runtime: runtime.unwrap_or_default(),
        ..ContainerRef::default()
    })
}

/// Says who was killed, and by whom.
fn what(notice: &KillNotice) -> String {
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
            .map(|pod| pod.noun()),
        (false, _) => Some(of_class(CgroupPlace::of_limit(cgroup), cgroup)),
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
fn of_class(place: CgroupPlace, cgroup: &str) -> String {
    let class = [("besteffort", " (BestEffort)"), ("burstable", " (Burstable)")];
    let class = class.iter().find(|(class, _)| cgroup.contains(class)).map_or("", |(_, class)| class);
    let is_pod = matches!(place, CgroupPlace::Pod { .. });
    place.noun() + if is_pod { class } else { "" }
}

fn reason(notice: &KillNotice) -> String {
    match notice.source {
        NoticeSource::Earlyoom | NoticeSource::Nohang => format!("low memory ({})", notice.reason),
        _ => notice.reason.chars().take(200).collect(),
    }
}

fn advice(notice: &KillNotice) -> Vec<String> {
    let node = match notice.node.is_empty() {
        true => "the node".to_owned(),
        false => format!("the node {}", name(&notice.node)),
    };
    let limit = match &*notice.limit {
        "" | "none" => String::new(),
        limit => format!(" (now {})", name(limit)),
    };
    let settings = match notice.source {
        NoticeSource::Oomd => {
            "systemd-oomd kills by memory pressure or by use of swap: ManagedOOMMemoryPressureLimit= and ManagedOOMSwap= of the unit that it \
             names set when, ManagedOOMPreference=avoid spares one. Else use less memory in it, or give it a limit of its own (MemoryMax=)."
                .to_owned()
        }
        NoticeSource::Earlyoom => {
            "earlyoom kills when the whole machine is low on memory and swap: -m and -s set when, --avoid spares processes by name. What used \
             the memory need not be what was killed."
                .to_owned()
        }
        NoticeSource::Nohang => {
            "nohang kills when the whole machine is low on memory: soft_threshold_min_mem and hard_threshold_min_mem in its configuration set \
             when. What used the memory need not be what was killed."
                .to_owned()
        }
        NoticeSource::Talos => {
            "Talos kills pods of the lowest class first when its node is under pressure: give the pod requests and limits, run fewer on this \
             node, or set its OOMConfig."
                .to_owned()
        }
        NoticeSource::Systemd => format!(
            "Raise MemoryMax= of {0}, if it has one (systemctl show -p MemoryMax {0}); else the machine ran out.",
            name(&notice.unit)
        ),
        NoticeSource::Kubelet | NoticeSource::Containerd | NoticeSource::Kubectl if notice.limit == "none" => {
            "It has no memory limit: the node ran out, or the limit of all pods was reached. Give it a request, and every pod a memory limit.".to_owned()
        }
        NoticeSource::Kubelet | NoticeSource::Kubectl => {
            format!("Raise resources.limits.memory of the container{limit}, if that limit was reached.")
        }
        NoticeSource::Containerd => {
            "Raise the memory limit of the container (--memory, resources.limits.memory), if that was reached.".to_owned()
        }
    };
    let rest = match notice.source {
        NoticeSource::Oomd | NoticeSource::Earlyoom | NoticeSource::Nohang | NoticeSource::Talos => None,
        NoticeSource::Systemd => Some("of that host"),
        NoticeSource::Containerd => Some("of that host"),
        NoticeSource::Kubelet | NoticeSource::Kubectl => Some("of "),
    };
    let rest = rest.map(|of| {
        let of = if of.ends_with(' ') { format!("{of}{node}") } else { of.to_owned() };
        format!(
            "The kernel's own lines are not in this log: they have the limit that was hit, and the memory of each process. The kernel log {of} around that \
             time has them: journalctl -k (or dmesg, talosctl dmesg) | memledger why --kernel-log -"
        )
    });
    rest.into_iter().chain([settings]).collect()
}
