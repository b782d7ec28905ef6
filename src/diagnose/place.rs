//! What a cgroup is, by its path: a pod, a job, a session, a service, a container of another manager. Pure.

use serde::Serialize;

use crate::events::{ContainerRef, Identity};
use crate::parse::kubernetes::{KubeletCgroup, Qos, kubelet_cgroup};

/// What a cgroup is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum CgroupPlace {
    /// All pods of a node (*node allocatable*), or those of a QoS class.
    AllPods {
        /// `burstable` or `besteffort`; empty for all.
        #[serde(skip_serializing_if = "str::is_empty")]
        class: &'static str,
    },
    /// A pod, by its UID.
    Pod {
        /// With hyphens.
        uid: String,
    },
    /// A pod, by its name.
    NamedPod {
        /// After its namespace.
        path: String,
    },
    /// A container of LXC, Incus or Proxmox.
    Lxc {
        /// Its name; at Proxmox its number.
        name: String,
    },
    /// A job of Slurm.
    SlurmJob {
        /// Its id.
        id: String,
    },
    /// A job of PBS.
    PbsJob {
        /// Its number, and the server after a dot.
        id: String,
    },
    /// A job of LSF.
    LsfJob {
        /// Its id.
        id: String,
    },
    /// A slot of HTCondor, in which one job runs.
    CondorSlot {
        /// Its name, without the host.
        name: String,
    },
    /// A virtual machine.
    Vm {
        /// Its name; at Proxmox its number.
        name: String,
        /// Proxmox made it; else libvirt.
        is_proxmox: bool,
    },
    /// A container of systemd-nspawn, or another machine of systemd-machined.
    Machine {
        /// Its name.
        name: String,
    },
    /// The sessions of a user.
    User {
        /// The user's id.
        uid: String,
    },
    /// A unit of systemd.
    Unit {
        /// Its name, with its suffix.
        name: String,
    },
    /// Another cgroup.
    Other {
        /// Its path.
        path: String,
    },
}

impl CgroupPlace {
    /// Returns what a cgroup is. Of several that surround each other, the one that people know: a job and not its step, a session's
    /// user and not the session.
    pub fn of(cgroup: &str) -> Self {
        let has_pbs = cgroup.contains("/pbs");
        let parts: Vec<&str> = cgroup.split('/').filter(|part| !part.is_empty()).collect();
        let found =
            parts.iter().enumerate().find_map(|(at, part)| Self::of_part(part, parts.get(at + 1).copied()));
        let found = found.filter(|found| has_pbs || !matches!(found, Self::PbsJob { .. }));
        let has_pods = parts.iter().any(|part| part.contains("kubepods"));
        let pods = parts.last().filter(|_| has_pods).and_then(|last| of_pods(last));
        let unit = parts
            .iter()
            .rev()
            .find(|part| [".service", ".scope", ".slice"].iter().any(|end| part.ends_with(end)));
        pods.or(found)
            .or_else(|| unit.map(|unit| Self::Unit { name: (*unit).to_owned() }))
            .unwrap_or_else(|| Self::Other { path: cgroup.to_owned() })
    }

    /// Returns what the cgroup of a limit is: that cgroup itself, and not what surrounds it. Only a step of a job has the job's limit.
    pub fn of_limit(cgroup: &str) -> Self {
        let parts: Vec<&str> = cgroup.split('/').filter(|part| !part.is_empty()).collect();
        let around = Self::of(cgroup);
        let itself = match &parts[..] {
            [.., parent, last] => {
                let names_next = matches!(*parent, "lxc" | "lxc.payload" | "qemu.slice")
                    || *parent == "jobid" && cgroup.contains("/pbs");
                Self::of_part(parent, Some(last)).filter(|_| names_next)
            }
            _ => None,
        };
        let own = parts.last().and_then(|last| Self::of_part(last, None)).or(itself);
        match around {
            Self::AllPods { .. }
            | Self::Pod { .. }
            | Self::SlurmJob { .. }
            | Self::LsfJob { .. }
            | Self::CondorSlot { .. } => around,
            _ if own.is_some() => own.unwrap_or(around),
            _ => match parts.last().filter(|last| is_unit(last)) {
                Some(unit) => Self::Unit { name: (*unit).to_owned() },
                None => Self::Other { path: cgroup.to_owned() },
            },
        }
    }

    /// Returns what the cgroup of a limit of this container is: a pod by its name.
    pub(super) fn of_limit_of(cgroup: &str, subject: &ContainerRef) -> Self {
        let Identity { k8s_namespace, k8s_pod, .. } = &subject.identity;
        match Self::of_limit(cgroup) {
            Self::Pod { .. } if !k8s_pod.is_empty() => {
                Self::NamedPod { path: format!("{k8s_namespace}/{k8s_pod}") }
            }
            place => place,
        }
    }

    fn of_part(part: &str, next: Option<&str>) -> Option<Self> {
        let after =
            |prefix: &str| part.strip_prefix(prefix).filter(|rest| !rest.is_empty()).map(str::to_owned);
        if matches!(part, "lxc" | "lxc.payload") {
            return next.map(|next| Self::Lxc { name: next.to_owned() });
        }
        if let Some(name) = after("lxc.payload.") {
            return Some(Self::Lxc { name });
        }
        if let Some(id) = after("job_").filter(|id| is_number(id)) {
            return Some(Self::SlurmJob { id });
        }
        if part == "jobid" {
            return next.map(|next| Self::PbsJob { id: next.to_owned() });
        }
        // `job.4242.31337.1795337396`: the pid and the time of its start follow
        let of_lsf = part
            .strip_prefix("job.")
            .filter(|rest| rest.split('.').count() == 3 && rest.split('.').all(is_number));
        if let Some(id) = of_lsf.and_then(|rest| rest.split('.').next()) {
            return Some(Self::LsfJob { id: id.to_owned() });
        }
        // `condor_var_lib_condor_execute_slot1_3@gpu07`
        if let Some(at) = part.rfind("slot").filter(|_| part.starts_with("condor_")) {
            return part[at..].split('@').next().map(|slot| Self::CondorSlot { name: slot.to_owned() });
        }
        if part == "qemu.slice" {
            let name = next?.strip_suffix(".scope")?.to_owned();
            return Some(Self::Vm { name, is_proxmox: true });
        }
        if let Some(name) = after("machine-") {
            // slices of machine-* are groups of them, such as the pods of Podman
            let name = name.strip_suffix(".scope")?.replace("\\x2d", "-");
            return Some(vm_of_libvirt(&name).unwrap_or(Self::Machine { name }));
        }
        if let Some(name) = part.strip_suffix(".libvirt-qemu") {
            return vm_of_libvirt(name);
        }
        let user = after("user-").or_else(|| after("user@"))?;
        let uid = user.split('.').next().filter(|uid| is_number(uid))?;
        Some(Self::User { uid: uid.to_owned() })
    }

    /// Returns whether this is the number or the name by which people know it.
    pub(super) fn is_called(&self, wanted: &str) -> bool {
        match self {
            Self::Lxc { name }
            | Self::CondorSlot { name }
            | Self::Vm { name, .. }
            | Self::Machine { name } => name == wanted,
            Self::SlurmJob { id } | Self::LsfJob { id } => id == wanted,
            Self::PbsJob { id } => id == wanted || id.split('.').next() == Some(wanted),
            Self::AllPods { .. }
            | Self::Pod { .. }
            | Self::NamedPod { .. }
            | Self::User { .. }
            | Self::Unit { .. }
            | Self::Other { .. } => false,
        }
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns the virtual machine of `qemu-1-NAME`.
fn vm_of_libvirt(name: &str) -> Option<CgroupPlace> {
    let (number, vm) = name.strip_prefix("qemu-")?.split_once('-')?;
    is_number(number).then(|| CgroupPlace::Vm { name: vm.to_owned(), is_proxmox: false })
}

fn is_unit(part: &str) -> bool {
    [".service", ".scope", ".slice"].iter().any(|end| part.ends_with(end))
}

/// Returns what the kubelet's cgroup with this name is: of all pods, of a class, or of a pod.
fn of_pods(part: &str) -> Option<CgroupPlace> {
    Some(match kubelet_cgroup(part)? {
        KubeletCgroup::AllPods(class) => CgroupPlace::AllPods { class: class.map_or("", Qos::label) },
        KubeletCgroup::Pod(uid) => CgroupPlace::Pod { uid: uid.replace('_', "-") },
    })
}
