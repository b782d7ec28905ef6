//! Synthetic events of one container.

use std::sync::Arc;

use memledger::discover::RuntimeKind;
use memledger::events::{
    ContainerRef, CudaOom, CudaOomSource, Evidence, Exit, ExitReason, GpuHolder, Identity, Kill, KillOwner,
    LedgerEvent, MemoryHolder, Method, OomReport, OomScope, PriorUsage, ReportProcess, Role, RoleUsage,
    UsageSample, Victim,
};

pub const GIB: u64 = 1 << 30;
pub const MIB: u64 = 1 << 20;
/// 2026-11-21 02:13:07 UTC.
pub const AT: f64 = 1_795_227_187.0;
pub const NOW: f64 = AT + 600.0;
pub const ID: &str = "4f1c2a9b7d3e5a6b8c9d0e1f2a3b4c5d6e7f8091a2b3c4d5e6f708192a3b4c5d";

pub fn subject() -> ContainerRef {
    ContainerRef {
        identity: Identity { name: "piper1-gpl-train-1".into(), ..Identity::default() },
        container_id: ID.into(),
        image: "piper:1.2".into(),
        runtime: RuntimeKind::Docker,
        started: Some(AT - 11_520.0),
        ..ContainerRef::default()
    }
}

/// Five minutes before the limit: `unreclaimable` grows from `from` to `to`.
pub fn before(from: u64, to: u64, limit: Option<u64>) -> PriorUsage {
    let sample = |step: u64| {
        let unreclaimable = from + (to - from) / 29 * step;
        UsageSample {
            at: AT - 294.0 + 10.0 * step as f64,
            usage_bytes: unreclaimable + GIB,
            unreclaimable_bytes: Some(unreclaimable),
            anon_bytes: Some(unreclaimable - 300 * MIB),
            shmem_bytes: Some(200 * MIB),
            file_bytes: Some(GIB),
            limit_bytes: limit,
            effective_limit_bytes: limit,
            shm_used_bytes: Some(20 * MIB),
            shm_size_bytes: Some(64 * MIB),
        }
    };
    PriorUsage {
        samples: (0..30).map(sample).collect(),
        settings: vec![
            ("batch_size".into(), "32".into()),
            ("num_workers".into(), "4".into()),
            ("num_devices".into(), "2".into()),
        ],
        ..PriorUsage::default()
    }
}

pub fn role(role: Role, processes: u32, pss: Option<u64>) -> RoleUsage {
    RoleUsage { role, processes, rss_bytes: 70 * GIB, pss_bytes: pss, pss_missing: None }
}

pub fn kill(victim: Victim) -> Kill {
    Kill {
        before_counting: false,
        cgroup: "".into(),
        group: "".into(),
        id: 7,
        at: AT,
        earliest: None,
        boot_id: "b".into(),
        kernel_usec: Some(846_857_491),
        pid: Some(22_212),
        process: "pt_data_worker".into(),
        role: Some(Role::DataloaderWorker),
        parent_pid: None,
        program: "".into(),
        owner: KillOwner::Container(subject()),
        victim: Some(victim),
        number: Some(1),
        scope: OomScope::Container,
        anon_bytes: Some(5 * GIB),
        file_bytes: Some(0),
        shmem_bytes: Some(0),
        oom_score_adj: Some(0),
        limit_cgroup: format!("/docker/{ID}").into(),
        limit_bytes: Some(44 * GIB),
        alone_in_pod: false,
        method: Some(Method::Kmsg),
        report: None,
        evidence: vec![
            Evidence::new(
                "kmsg",
                "Memory cgroup out of memory: Killed process 22212 (pt_data_worker) total-vm:9675280kB, \
                 anon-rss:5242880kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:17200kB oom_score_adj:0",
            ),
            Evidence::new("vmstat", "oom_kill 11 -> 12"),
            Evidence::new("cgroup", "memory.oom_control of the container: oom_kill 0 -> 1"),
        ],
        before: Some(Arc::new(PriorUsage {
            roles: vec![
                role(Role::Trainer, 2, Some(9 * GIB)),
                role(Role::DataloaderWorker, 8, Some(34 * GIB)),
                role(Role::Other, 3, Some(100 * MIB)),
            ],
            ..before(30 * GIB, 43 * GIB + 512 * MIB, Some(44 * GIB))
        })),
    }
}

/// Returns a kill with the kernel's report, in which the limit is full of anonymous memory.
pub fn with_report(kill: Kill, change: impl FnOnce(&mut OomReport)) -> Kill {
    let mut report = OomReport {
        requested_by: "python3".into(),
        order: Some(0),
        usage_bytes: Some(44 * GIB),
        limit_bytes: Some(44 * GIB),
        anon_bytes: Some(42 * GIB),
        file_bytes: Some(GIB),
        shmem_bytes: Some(100 * MIB),
        kernel_bytes: Some(GIB),
        process_count: Some(9),
        ..OomReport::default()
    };
    change(&mut report);
    Kill { report: Some(Arc::new(report)), ..kill }
}

/// Returns a row of the kernel's table.
pub fn row(pid: u32, process: &str, gib: u64) -> ReportProcess {
    let role = (process == "pt_data_worker").then_some(Role::DataloaderWorker);
    let (process, rss_bytes) = (process.into(), gib * GIB);
    ReportProcess { pid, process, role, rss_bytes, oom_score_adj: Some(0), ..ReportProcess::default() }
}

pub fn trainer(victim: Victim) -> Kill {
    let mut usage = PriorUsage {
        roles: vec![role(Role::Trainer, 2, Some(40 * GIB)), role(Role::DataloaderWorker, 8, Some(2 * GIB))],
        ..before(42 * GIB, 43 * GIB, Some(44 * GIB))
    };
    usage.samples.iter_mut().for_each(|sample| sample.file_bytes = Some(20 * GIB));
    let pid = Some(22_100);
    Kill {
        process: "python3".into(),
        role: Some(Role::Trainer),
        pid,
        before: Some(Arc::new(usage)),
        ..kill(victim)
    }
}

pub fn exit(reason: ExitReason, exit_code: i64, after: f64) -> Exit {
    Exit {
        before_counting: false,
        id: 9,
        at: AT + after,
        subject: subject(),
        reason: Some(reason),
        exit_code: Some(exit_code),
        runtime_oom_flag: Some(false),
        stop_signals: vec![],
        kernel_log_read: true,
        duration_seconds: Some(11_520.0 + after),
        oom_kills: 0,
        ended_by: None,
        may_be: vec![],
        log_error: None,
        requests_known: true,
        peak_usage_bytes: Some(44 * GIB),
        peak_unreclaimable_bytes: Some(43 * GIB),
        evidence: vec![Evidence::new("runtime", format!("die with exit code {exit_code}"))],
        before: Some(Arc::new(before(20 * GIB, 20 * GIB, Some(44 * GIB)))),
    }
}

/// Returns an exit with an error that the kill of a process of the container, or of an unknown one, may have caused.
pub fn after_kill(exit: Exit) -> Exit {
    Exit { may_be: vec![7, 8], ..exit }
}

/// An error on a GPU of 12 GiB, of which the process uses 10 GiB, 4 of them for tensors.
pub fn cuda_oom() -> CudaOom {
    CudaOom {
        id: 3,
        at: AT,
        subject: subject(),
        pid: Some(4_100),
        rank: Some(0),
        gpu: "0".into(),
        gpu_uuid: "GPU-a".into(),
        source: CudaOomSource::Reporter,
        tried_bytes: Some(20 * GIB),
        total_bytes: Some(12 * GIB),
        free_bytes: Some(2 * GIB),
        allocated_bytes: Some(4 * GIB),
        reserved_bytes: Some(10 * GIB),
        inactive_split_bytes: Some(6 * GIB),
        component: "model".into(),
        operation: "forward".into(),
        uncaught: Some(true),
        ..CudaOom::default()
    }
}

pub fn gpu_holder(name: &str, own: bool, gib: u64) -> GpuHolder {
    GpuHolder { name: name.into(), own, bytes: Some(gib * GIB), earlier_bytes: None }
}

pub fn with_shm(mut exit: Exit, used: u64) -> Exit {
    let mut usage = exit.before.take().map_or_else(PriorUsage::default, Arc::unwrap_or_clone);
    usage.samples.iter_mut().for_each(|sample| sample.shm_used_bytes = Some(used));
    exit.before = Some(Arc::new(usage));
    exit
}

pub fn stop_request(exit: Exit, signal: i32) -> Exit {
    Exit { stop_signals: vec![Some(signal)], ..exit }
}

pub fn killed(kill: Kill) -> LedgerEvent {
    LedgerEvent::OomKill(kill)
}

pub fn ended(exit: Exit) -> LedgerEvent {
    LedgerEvent::Exit(exit)
}

/// Returns an unattributed kill shortly before an exit.
pub fn unattributed() -> Kill {
    Kill {
        id: 8,
        owner: KillOwner::Unattributed,
        victim: None,
        before: None,
        at: AT - 1.0,
        ..kill(Victim::Child)
    }
}

pub fn of_host() -> Kill {
    let mut usage = before(20 * GIB, 20 * GIB, None);
    let holder = |name: &str, unreclaimable_bytes| MemoryHolder { name: name.into(), unreclaimable_bytes };
    usage.holders = vec![
        holder("notebook", 38 * GIB),
        holder("piper1-gpl-train-1", 20 * GIB),
        holder("outside containers", 4 * GIB - 300 * MIB),
    ];
    usage.host_total_bytes = Some(62 * GIB);
    usage.host_available_bytes = Some(300 * MIB);
    Kill {
        scope: OomScope::Host,
        oom_score_adj: Some(800),
        limit_cgroup: "".into(),
        limit_bytes: None,
        before: Some(Arc::new(usage)),
        evidence: vec![Evidence::new(
            "kmsg",
            "Out of memory: Killed process 22212 (pt_data_worker) total-vm:9675280kB, anon-rss:5242880kB, \
             file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:17200kB oom_score_adj:800",
        )],
        ..kill(Victim::Child)
    }
}

pub fn shared() -> Kill {
    let mut usage = before(20 * GIB, 43 * GIB, Some(44 * GIB));
    for sample in &mut usage.samples {
        (sample.shmem_bytes, sample.shm_used_bytes, sample.shm_size_bytes) =
            (Some(30 * GIB), Some(29 * GIB), Some(32 * GIB));
    }
    Kill { before: Some(Arc::new(usage)), ..kill(Victim::Child) }
}

/// Returns a kill in a Kubernetes pod, at the pod's limit.
pub fn in_a_pod() -> Kill {
    let name = Identity { k8s_namespace: "ml".into(), k8s_pod: "train-0".into(), name: "trainer".into() };
    Kill {
        owner: KillOwner::Container(ContainerRef { identity: name, ..subject() }),
        limit_cgroup: "/kubepods.slice/kubepods-pod1.slice".into(),
        oom_score_adj: Some(936),
        ..kill(Victim::Child)
    }
}
