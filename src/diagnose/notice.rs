//! The diagnosis of a kill of which a log has only what another program than the kernel says.

use serde::Serialize;

use super::{Cause, Confidence, Diagnosis, Headline, Incident, Recommendation};
use crate::discover::RuntimeKind;
use crate::events::{ContainerRef, Identity};
use crate::parse::container_id;
use crate::parse::kill_notice::{KillNotice, NoticeSource};

/// Length of a container's id as engines print it.
const SHORT_ID: usize = 12;

/// What to change after a kill that a program reported, and where the kernel's own lines are.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "remedy", rename_all = "snake_case")]
pub enum NoticeRemedy {
    /// The kernel log of the same host has the kill.
    ReadKernelLogOfHost,
    /// The kernel log of the pod's node has the kill.
    ReadKernelLogOfNode {
        /// The node.
        #[serde(skip_serializing_if = "Option::is_none")]
        node: Option<String>,
    },
    /// Set when systemd-oomd kills, use less, or give the unit a limit of its own.
    SetOomdThresholds,
    /// Set when earlyoom kills.
    SetEarlyoomThresholds,
    /// Set when nohang kills.
    SetNohangThresholds,
    /// Give the pod requests and limits, which Talos goes by, or run fewer pods.
    GivePodRequests,
    /// Raise the limit of a unit, if it has one.
    RaiseMemoryMax {
        /// The unit.
        unit: String,
    },
    /// The container has no limit: give it a request, and every pod a limit.
    GivePodsLimits,
    /// Raise the limit of a container in a pod, if that was reached.
    RaisePodLimit {
        /// The limit, as the text has it.
        #[serde(skip_serializing_if = "Option::is_none")]
        limit: Option<String>,
    },
    /// Raise the limit of a container, if that was reached.
    RaiseContainerLimit,
}

/// Returns the diagnosis of a notice in a log from elsewhere.
pub fn explain_notice(notice: &KillNotice, now: f64) -> Diagnosis {
    let killer = notice.source.killer();
    let cause = if killer.is_some() { Cause::KilledByMonitor } else { Cause::OomFlagOnly };
    Diagnosis {
        subject: subject(notice),
        headline: killer.map(|killer| Headline::KilledBy { killer: killer.to_owned() }),
        log_time: stated(&notice.time),
        pid: notice.pid,
        advice: remedies(notice).into_iter().map(Recommendation::from).collect(),
        ..Diagnosis::new(cause, Confidence::Likely, Incident::Notice(Box::new(notice.clone())), now)
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

/// Returns where the kernel's own lines are, and what to change.
fn remedies(notice: &KillNotice) -> Vec<NoticeRemedy> {
    let kernel_log = match notice.source {
        NoticeSource::Oomd | NoticeSource::Earlyoom | NoticeSource::Nohang | NoticeSource::Talos => None,
        NoticeSource::Systemd | NoticeSource::Containerd => Some(NoticeRemedy::ReadKernelLogOfHost),
        NoticeSource::Kubelet | NoticeSource::Kubectl => {
            Some(NoticeRemedy::ReadKernelLogOfNode { node: stated(&notice.node) })
        }
    };
    let settings = match notice.source {
        NoticeSource::Oomd => NoticeRemedy::SetOomdThresholds,
        NoticeSource::Earlyoom => NoticeRemedy::SetEarlyoomThresholds,
        NoticeSource::Nohang => NoticeRemedy::SetNohangThresholds,
        NoticeSource::Talos => NoticeRemedy::GivePodRequests,
        NoticeSource::Systemd => NoticeRemedy::RaiseMemoryMax { unit: notice.unit.clone() },
        _ if notice.limit == "none" => NoticeRemedy::GivePodsLimits,
        NoticeSource::Kubelet | NoticeSource::Kubectl => {
            NoticeRemedy::RaisePodLimit { limit: stated(&notice.limit) }
        }
        NoticeSource::Containerd => NoticeRemedy::RaiseContainerLimit,
    };
    kernel_log.into_iter().chain([settings]).collect()
}

/// Returns a text of a notice; `None` where it does not say.
fn stated(text: &str) -> Option<String> {
    Some(text.to_owned()).filter(|text| !text.is_empty())
}
