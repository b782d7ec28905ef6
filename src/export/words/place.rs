//! What cgroups are called, and how their limits are raised.

use super::terms::{name, path};
use crate::diagnose::CgroupPlace;

/// Returns a noun for a sentence.
pub(super) fn noun(place: &CgroupPlace) -> String {
    match place {
        CgroupPlace::AllPods { class: "" } => "the limit of all pods of this node".to_owned(),
        CgroupPlace::AllPods { class } => format!("the limit of all {class} pods of this node"),
        CgroupPlace::Pod { uid } => format!("the pod {uid}"),
        CgroupPlace::NamedPod { path } => {
            format!("the limit of pod {} (all its containers together)", name(path))
        }
        CgroupPlace::Lxc { name: lxc } => format!("the LXC container {}", name(lxc)),
        CgroupPlace::SlurmJob { id } => format!("the Slurm job {}", name(id)),
        CgroupPlace::PbsJob { id } => format!("the PBS job {}", name(id.split('.').next().unwrap_or(id))),
        CgroupPlace::LsfJob { id } => format!("the LSF job {}", name(id)),
        CgroupPlace::CondorSlot { name: slot } => format!("the HTCondor slot {}", name(slot)),
        CgroupPlace::Vm { name: vm, .. } => format!("the VM {}", name(vm)),
        CgroupPlace::Machine { name: machine } => format!("the machine {}", name(machine)),
        CgroupPlace::User { uid } => format!("the sessions of user {uid}"),
        CgroupPlace::Unit { name: unit } => format!("the systemd unit {}", name(unit)),
        CgroupPlace::Other { path: cgroup } if cgroup.is_empty() => "a cgroup".to_owned(),
        CgroupPlace::Other { path: cgroup } => format!("the cgroup {}", path(cgroup)),
    }
}

/// Returns how its memory limit is raised; `now` is ` (now 2.0 GiB)` or empty.
pub(super) fn raise(place: &CgroupPlace, now: &str) -> String {
    match place {
        CgroupPlace::AllPods { .. } => format!(
            "All pods of the node share this limit{now}, which is its memory less what is reserved: give pods a memory limit, run fewer \
             on this node, or reserve less (kube-reserved, system-reserved, eviction-hard)."
        ),
        CgroupPlace::Pod { .. } | CgroupPlace::NamedPod { .. } => format!(
            "Raise resources.limits.memory of the pod's containers, whose sum is the pod's limit{now}, or the pod's own \
             (spec.resources.limits.memory) where that is set."
        ),
        CgroupPlace::Lxc { name: lxc } if lxc.bytes().all(|byte| byte.is_ascii_digit()) => {
            format!("Raise its limit{now}: pct set {lxc} --memory MiB (Proxmox), or run less in it.")
        }
        CgroupPlace::Lxc { name: lxc } => format!(
            "Raise its limit{now}: lxc config set {} limits.memory=... (also incus), or run less in it.",
            name(lxc)
        ),
        CgroupPlace::SlurmJob { .. } => {
            format!("Request more memory for the job{now}: sbatch --mem, or --mem-per-cpu.")
        }
        CgroupPlace::PbsJob { .. } => {
            format!(
                "Request more memory for the job{now}: qsub -l select=1:mem=..., or -l mem=... of older versions."
            )
        }
        CgroupPlace::LsfJob { .. } => {
            format!("Request more memory for the job{now}: bsub -M, and -R \"rusage[mem=...]\".")
        }
        CgroupPlace::CondorSlot { .. } => {
            format!("Request more memory for the job{now}: request_memory in its submit file.")
        }
        CgroupPlace::Vm { name: vm, is_proxmox: true } => {
            format!(
                "Raise the limit of the VM's cgroup{now}, or give its guest less: qm set {vm} --memory MiB (Proxmox)."
            )
        }
        CgroupPlace::Vm { name: vm, is_proxmox: false } => format!(
            "Raise the limit of the VM's cgroup{now} (virsh memtune {0} --hard-limit), or give its guest less (virsh setmem {0}).",
            name(vm)
        ),
        CgroupPlace::Machine { .. } => format!("Give the machine more memory{now}, or run less in it."),
        CgroupPlace::User { uid } => {
            format!("Raise MemoryMax= of user-{uid}.slice{now}, or run less in the user's sessions.")
        }
        CgroupPlace::Unit { name: unit } => {
            format!("Raise MemoryMax= of {}{now}, or run less in it.", name(unit))
        }
        CgroupPlace::Other { path: cgroup } if cgroup.is_empty() => {
            format!("Raise the limit of its cgroup{now}, or run less in it.")
        }
        CgroupPlace::Other { path: cgroup } => format!(
            "Raise the limit of {}{now}: memory.max (cgroup v1: memory.limit_in_bytes), which the program that made it sets; or run \
             less in it.",
            path(cgroup)
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::CgroupPlace;

    #[test]
    fn path_shows_who_manages_a_cgroup() {
        for (cgroup, noun) in [
            ("/kubepods.slice", "the limit of all pods of this node"),
            ("/kubelet.slice/kubelet-kubepods.slice", "the limit of all pods of this node"),
            ("/kubepods/burstable", "the limit of all burstable pods of this node"),
            (
                "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod11111111_2222_3333_4444_555555555555.slice",
                "the pod 11111111-2222-3333-4444-555555555555",
            ),
            (
                "/kubepods/pod11111111-2222-3333-4444-555555555555",
                "the pod 11111111-2222-3333-4444-555555555555",
            ),
            ("/lxc/107/ns/system.slice/worker.service", "the LXC container 107"),
            ("/lxc.payload.train/system.slice/job.service", "the LXC container train"),
            ("/slurm/uid_1000/job_42/step_0/task_0", "the Slurm job 42"),
            ("/system.slice/slurmstepd.scope/job_42/step_batch/user/task_0", "the Slurm job 42"),
            ("/machine.slice/machine-qemu\\x2d1\\x2dvm.scope/libvirt/emulator", "the VM vm"),
            ("/machine/qemu-12-gpu-vm.libvirt-qemu/vcpu0", "the VM gpu-vm"),
            ("/machine.slice/machine-debian.scope", "the machine debian"),
            ("/qemu.slice/101.scope", "the VM 101"),
            ("/pbs_jobs.service/jobid/482311.pbs01", "the PBS job 482311"),
            ("/lsf/cluster1/job.4242.31337.1795337396/x", "the LSF job 4242"),
            (
                "/system.slice/condor.service/htcondor/condor_var_lib_condor_execute_slot1_3@gpu07.example.org",
                "the HTCondor slot slot1_3",
            ),
            ("/user.slice/user-1000.slice/session-5.scope", "the sessions of user 1000"),
            ("/user.slice/user-1000.slice/user@1000.service/app.slice/x.scope", "the sessions of user 1000"),
            ("/system.slice/job.service", "the systemd unit job.service"),
            ("/system.slice", "the systemd unit system.slice"),
            ("/job", "the cgroup /job"),
            ("", "a cgroup"),
        ] {
            assert_eq!(super::noun(&CgroupPlace::of(cgroup)), noun, "{cgroup}");
        }
        for (limit, noun) in [
            (
                "/user.slice/user-1000.slice/user@1000.service/app.slice/run-r12.scope",
                "the systemd unit run-r12.scope",
            ),
            ("/user.slice/user-1000.slice", "the sessions of user 1000"),
            ("/lxc/107/ns/system.slice/worker.service", "the systemd unit worker.service"),
            ("/lxc/107", "the LXC container 107"),
            ("/lxc.payload.train", "the LXC container train"),
            ("/lxc/107/job", "the cgroup /lxc/107/job"),
            ("/slurm/uid_1000/job_42/step_0", "the Slurm job 42"),
            (
                "/machine.slice/machine-libpod_pod_aaaa.slice",
                "the systemd unit machine-libpod_pod_aaaa.slice",
            ),
            ("/kubepods.slice", "the limit of all pods of this node"),
            ("/qemu.slice/101.scope", "the VM 101"),
            ("/pbs_jobs.service/jobid/482311.pbs01", "the PBS job 482311"),
            ("/pbs_jobs.service", "the systemd unit pbs_jobs.service"),
            ("/system.slice/condor.service", "the systemd unit condor.service"),
            ("/lsf/cluster1/job.4242.31337.1795337396", "the LSF job 4242"),
        ] {
            assert_eq!(super::noun(&CgroupPlace::of_limit(limit)), noun, "{limit}");
        }
    }
}
