//! The table of events, and the verdicts that they permit.

use std::sync::Arc;

use memledger::diagnose::{Cause, Confidence};
use memledger::events::{
    Exit, ExitReason, Kill, LedgerEvent, OomReport, PriorUsage, Role, UsageSample, Victim,
};
use memledger::export::words;

use super::after_kill_cases;
use super::events::*;
use super::exit_cases;

/// One row of the table.
pub struct Case {
    pub name: &'static str,
    pub events: Vec<LedgerEvent>,
    pub cause: Cause,
    pub confidence: Confidence,
    /// Texts of the sentence and of the advice.
    pub expected: &'static [&'static str],
    /// Texts that would claim too much.
    pub not: &'static [&'static str],
    /// Figures that are computed from the events, each verified by hand.
    pub computed: &'static [&'static str],
}

/// Returns the whole table.
pub fn all() -> Vec<Case> {
    let parts: [fn() -> Vec<Case>; 13] = [
        at_its_own_limit,
        after_kill_cases::of_a_child,
        at_its_limit_with_less_known,
        with_what_filled_the_limit,
        with_processes_of_the_report,
        at_the_limit_of_another_cgroup,
        in_pods_and_nested_and_on_the_host,
        with_records_lost_or_none,
        beside_unattributed_kill,
        exit_cases::on_request_and_by_signals,
        exit_cases::by_bus_errors_and_errors,
        exit_cases::of_gpu_memory,
        exit_cases::normal_or_unknown,
    ];
    parts.iter().flat_map(|part| part()).collect()
}

fn at_its_own_limit() -> Vec<Case> {
    vec![
        Case {
            name: "first process at its limit",
            events: vec![killed(trainer(Victim::Main)), ended(exit(ExitReason::OomContainer, 137, 0.3))],
            cause: Cause::OomLimitMain,
            confidence: Confidence::Certain,
            expected: &[
                "python3",
                "limit of 44.0 GiB",
                "ended the container with exit code 137",
                "Smaller trainers",
                "40.0 GiB",
                "20.0 GiB each",
                "BATCH_SIZE is 32",
                "raise the memory limit (--memory, mem_limit; now 44.0 GiB)",
                "Page cache (20.0 GiB) is not the cause",
            ],
            not: &["Fewer NUM_WORKERS", "grew from"],
            computed: &["20.0", "2"],
        },
        Case {
            name: "first process at its limit, beside workers that hold much",
            events: vec![
                killed({
                    let mut kill = trainer(Victim::Main);
                    let mut usage = kill.before.as_deref().cloned().expect("usage");
                    usage.roles = vec![
                        role(Role::Trainer, 2, Some(30 * GIB)),
                        role(Role::DataloaderWorker, 8, Some(12 * GIB)),
                    ];
                    kill.before = Some(Arc::new(usage));
                    kill
                }),
                ended(exit(ExitReason::OomContainer, 137, 0.3)),
            ],
            cause: Cause::OomLimitMain,
            confidence: Confidence::Certain,
            expected: &["Fewer NUM_WORKERS (now 4): 8 DataLoader workers held 12.0 GiB", "Smaller trainers"],
            not: &["grew from"],
            computed: &["1.5", "15.0", "5", "2", "31.0"],
        },
        Case {
            name: "worker at the limit, the container keeps running",
            events: vec![killed(kill(Victim::Child))],
            cause: Cause::OomLimitWorker,
            confidence: Confidence::Certain,
            // 44 - 4.4 - 9.5 = 30.1 GiB available, 34 / 8 = 4.25 GiB each: 7 workers, that is 3 for each of 2 loaders
            expected: &[
                "DataLoader worker",
                "the container kept running",
                "Fewer NUM_WORKERS (now 4)",
                "8 DataLoader workers held 34.0 GiB",
                "4.2 GiB each",
                "7 fit: NUM_WORKERS=3",
                "2 loaders",
            ],
            not: &["ended the container", "age cache"],
            computed: &["4.2", "7", "3", "2", "8", "4"],
        },
        Case {
            name: "worker at the limit, then an error",
            events: vec![killed(kill(Victim::Child)), ended(after_kill(exit(ExitReason::Error, 1, 72.0)))],
            cause: Cause::OomLimitWorkerThenExit,
            confidence: Confidence::Certain,
            expected: &["kept running and ended 1 min 12 s later with exit code 1", "NUM_WORKERS"],
            not: &["that ended the container"],
            computed: &["4.2", "7", "3", "2", "1", "12"],
        },
    ]
}

fn at_its_limit_with_less_known() -> Vec<Case> {
    vec![
        Case {
            name: "worker at the limit without shares",
            events: vec![killed(Kill {
                before: Some(Arc::new(PriorUsage {
                    roles: vec![role(Role::DataloaderWorker, 8, None)],
                    ..before(42 * GIB, 43 * GIB, Some(44 * GIB))
                })),
                ..kill(Victim::Child)
            })],
            cause: Cause::OomLimitWorker,
            confidence: Confidence::Certain,
            expected: &["What each holds alone is not known."],
            not: &[" each (", " fit", "70.0 GiB", "CAP_SYS_PTRACE", "--pss.interval"],
            computed: &[],
        },
        Case {
            name: "worker at the limit, with shares from before it grew",
            events: vec![killed(Kill {
                before: Some(Arc::new(PriorUsage {
                    roles: vec![role(Role::DataloaderWorker, 8, Some(8 * GIB))],
                    ..before(42 * GIB, 43 * GIB, Some(44 * GIB))
                })),
                ..kill(Victim::Child)
            })],
            cause: Cause::OomLimitWorker,
            confidence: Confidence::Certain,
            expected: &[
                "8 DataLoader workers ran, with 1.0 GiB each (PSS) when that was last measured",
                "All measured shares are 8.0 GiB of the 43.0 GiB that it held",
            ],
            not: &["held 8.0 GiB of", "Not one fits", "beside the other"],
            computed: &["1.0", "8.0"],
        },
        Case {
            name: "worker at the limit, nothing recorded before",
            events: vec![killed(Kill { before: None, limit_bytes: None, ..kill(Victim::Child) })],
            cause: Cause::OomLimitWorker,
            confidence: Confidence::Certain,
            expected: &["reached its memory limit;", "Raise the memory limit (--memory, mem_limit). "],
            not: &["NUM_WORKERS", "page cache", "grew", "now"],
            computed: &[],
        },
        Case {
            name: "shared memory at the limit",
            events: vec![killed(shared())],
            cause: Cause::OomLimitShm,
            confidence: Confidence::Certain,
            expected: &[
                "30.0 GiB of the 43.0 GiB",
                "29.0 GiB of 32.0 GiB",
                "--shm-size does not help",
                "NUM_WORKERS (now 4)",
            ],
            not: &["A larger --shm-size (Compose"],
            computed: &[],
        },
    ]
}

/// A kill with the kernel's report.
fn reported(
    name: &'static str,
    kill: Kill,
    cause: Cause,
    expected: &'static [&'static str],
    not: &'static [&'static str],
) -> Case {
    let computed = &["4.2", "7", "3", "2", "4", "8"];
    Case { name, events: vec![killed(kill)], cause, confidence: Confidence::Certain, expected, not, computed }
}

fn with_what_filled_the_limit() -> Vec<Case> {
    let with = |change: fn(&mut OomReport)| with_report(Kill { before: None, ..kill(Victim::Child) }, change);
    vec![
        reported(
            "anonymous memory filled the limit",
            with(|_| {}),
            Cause::OomLimitWorker,
            &["Anonymous memory of programs filled the limit: 42.0 GiB of 44.0 GiB", "now 44.0 GiB"],
            &["grew", "age cache", "Swap", "swap", "contiguous"],
        ),
        reported(
            "page cache filled the limit",
            with(|report| {
                (report.anon_bytes, report.file_bytes, report.dirty_bytes) =
                    (Some(GIB), Some(42 * GIB), Some(40 * GIB))
            }),
            Cause::OomLimitWorker,
            &["Page cache filled the limit: 42.0 GiB of 44.0 GiB", "40.0 GiB of it waited to be written"],
            &["Page cache (", "Anonymous memory of programs"],
        ),
        reported(
            "shared memory filled the limit, and no sample shows where",
            with(|report| (report.anon_bytes, report.shmem_bytes) = (Some(GIB), Some(42 * GIB))),
            Cause::OomLimitShm,
            &["Shared memory filled the limit: 42.0 GiB", "tmpfs, in a memfd or in other shared memory"],
            &["/dev/shm"],
        ),
        reported(
            "shared memory filled the limit, in /dev/shm",
            with_report(shared(), |report| {
                (report.anon_bytes, report.shmem_bytes) = (Some(GIB), Some(42 * GIB));
            }),
            Cause::OomLimitShm,
            &[
                "Shared memory filled the limit: 42.0 GiB",
                "At the last sample 29.0 GiB of it were in /dev/shm",
            ],
            &["memfd", "30.0 GiB of the 43.0 GiB"],
        ),
        reported(
            "memory of the kernel filled the limit",
            with(|report| (report.anon_bytes, report.kernel_bytes) = (Some(GIB), Some(42 * GIB))),
            Cause::OomLimitWorker,
            &["Memory of the kernel filled the limit: 42.0 GiB of 44.0 GiB", "sockets"],
            &["Anonymous memory of programs"],
        ),
        reported(
            "swap was exhausted",
            with(|report| (report.swap_bytes, report.swap_limit_bytes) = (Some(2 * GIB), Some(2 * GIB))),
            Cause::OomLimitWorker,
            &["Swap was exhausted: 2.0 GiB of 2.0 GiB used"],
            &["may use no swap"],
        ),
        reported(
            "no swap at the limit of a job of Slurm",
            Kill {
                limit_cgroup: "/system.slice/slurmstepd.scope/job_123".into(),
                ..with(|report| report.swap_limit_bytes = Some(0))
            },
            Cause::OomParentLimit,
            &["the Slurm job 123 above it", "sbatch --mem"],
            &["--memory", "MemorySwapMax", "MemoryMax"],
        ),
        reported(
            "no swap, and a part of the report is missing",
            with(|report| (report.swap_limit_bytes, report.incomplete) = (Some(0), true)),
            Cause::OomLimitWorker,
            &["may use no swap"],
            &["Swap was exhausted", "log_buf_len"],
        ),
    ]
}

fn with_processes_of_the_report() -> Vec<Case> {
    let with = |change: fn(&mut OomReport)| with_report(Kill { before: None, ..kill(Victim::Child) }, change);
    let of_host = |change: fn(&mut OomReport)| {
        let kill = Kill { oom_score_adj: Some(0), ..of_host() };
        with_report(kill, |report| {
            (report.host, report.free_bytes) = (true, Some(300 * MIB));
            change(report);
        })
    };
    vec![
        reported(
            "one process held most",
            with(|report| report.processes = vec![row(22_212, "python3", 40), row(2, "sh", 1)]),
            Cause::OomLimitWorker,
            &["One process held most of it: python3 (pid 22212), the victim, with 40.0 GiB resident"],
            &["alike", "not the largest"],
        ),
        reported(
            "many are alike",
            with(|report| {
                report.processes = (0..8).map(|at| row(22_212 - at, "pt_data_worker", 6)).collect()
            }),
            Cause::OomLimitWorker,
            &["8 DataLoader workers were alike, with 6.0 GiB resident each", "fewer NUM_WORKERS"],
            &["48", "One process"],
        ),
        reported(
            "forked workers share what their parent loaded: each has it in its own figure",
            with(|report| {
                report.processes = (0..5).map(|at| row(22_212 - at, "pt_data_worker", 39)).collect();
            }),
            Cause::OomLimitWorker,
            &[
                "5 DataLoader workers were alike, with 39.0 GiB resident each (pages that they share are in each)",
                "fewer NUM_WORKERS",
            ],
            &["One process held most"],
        ),
        reported(
            "the victim was not the largest",
            with(|report| {
                report.processes = vec![row(1, "python3", 20), row(22_212, "pt_data_worker", 5)];
                report.processes[0].oom_score_adj = Some(-900);
            }),
            Cause::OomLimitWorker,
            &[
                "The victim was not the largest: python3 (pid 1) held 20.0 GiB, the victim 5.0 GiB",
                "is -900, the victim's is 0",
            ],
            &["One process"],
        ),
        reported(
            "the victim has no row: a thread of it was logged",
            with(|report| {
                report.processes = vec![row(22_100, "python3", 40), row(2, "sh", 1)];
                report.victim_pid = Some(22_100);
            }),
            Cause::OomLimitWorker,
            &["One process held most of it: python3 (pid 22100), the victim, with 40.0 GiB resident"],
            &["not the largest"],
        ),
        reported(
            "the victim was the largest with its swap",
            with(|report| {
                report.processes = vec![row(1, "python3", 20), row(22_212, "pt_data_worker", 15)];
                report.processes[1].swap_bytes = Some(8 * GIB);
            }),
            Cause::OomLimitWorker,
            &["Anonymous memory of programs"],
            &["not the largest"],
        ),
        reported(
            "free memory in pieces",
            of_host(|report| (report.order, report.fragmented) = (Some(3), true)),
            Cause::OomHost,
            &["for 8 contiguous pages (order 3)", "300.0 MiB that were free"],
            &["Largest holders of the machine"],
        ),
        reported(
            "a request that free memory does not serve",
            of_host(|report| report.free_bytes = report.limit_bytes.map(|all| all / 2)),
            Cause::OomHost,
            &["could not serve a request for memory, although", "below 4 GiB"],
            &["machine ran out", "filled the host's memory", "has no swap"],
        ),
        reported(
            "a request for several pages where memory was exhausted",
            of_host(|report| report.order = Some(2)),
            Cause::OomHost,
            &["Anonymous memory of programs filled the host's memory"],
            &["contiguous", "min_free_kbytes"],
        ),
        reported(
            "NUMA nodes ran out",
            of_host(|report| report.nodes = "0-1".into()),
            Cause::OomNodes,
            &["NUMA nodes to which a cpuset or a memory policy restricts it (0-1) ran out", "--cpuset-mems"],
            &[
                "whole machine",
                "Set a memory limit",
                "filled the host's memory",
                "One process held",
                "Largest holders",
            ],
        ),
        reported(
            "requested by sysrq",
            of_host(|report| report.order = Some(-1)),
            Cause::OomSysrq,
            &["that was requested by sysrq", "memory need not have run out"],
            &["ran out of memory;", "contiguous", "Set a memory limit"],
        ),
        reported(
            "not known whether it ended the container",
            with_report(Kill { victim: None, before: None, ..kill(Victim::Child) }, |_| {}),
            Cause::OomLimit,
            &["no end of the container is recorded"],
            &["kept running", "that ended the container"],
        ),
    ]
}

fn at_the_limit_of_another_cgroup() -> Vec<Case> {
    vec![
        Case {
            name: "the limit of a slice",
            events: vec![
                killed(Kill {
                    limit_cgroup: "/training.slice".into(),
                    limit_bytes: Some(100 * GIB),
                    ..kill(Victim::Main)
                }),
                ended(exit(ExitReason::OomContainer, 137, 0.2)),
            ],
            cause: Cause::OomParentLimit,
            confidence: Confidence::Certain,
            expected: &[
                "the systemd unit training.slice above it reached its memory limit of 100.0 GiB",
                "Raise MemoryMax= of training.slice (now 100.0 GiB)",
            ],
            not: &["the container reached"],
            computed: &["8"],
        },
        Case {
            name: "a limit that is not named, and the container has none",
            events: vec![killed(Kill {
                limit_cgroup: "".into(),
                limit_bytes: None,
                before: Some(Arc::new(PriorUsage {
                    samples: vec![UsageSample {
                        at: AT - 4.0,
                        effective_limit_bytes: Some(9 * GIB),
                        ..UsageSample::default()
                    }],
                    ..PriorUsage::default()
                })),
                ..kill(Victim::Child)
            })],
            cause: Cause::OomParentLimit,
            confidence: Confidence::Likely,
            expected: &["a cgroup above the container reached its memory limit;"],
            not: &["because the container reached", "0 B"],
            computed: &[],
        },
    ]
}

fn in_pods_and_nested_and_on_the_host() -> Vec<Case> {
    vec![
        Case {
            name: "the limit of a pod",
            events: vec![killed(in_a_pod())],
            cause: Cause::OomParentLimit,
            confidence: Confidence::Certain,
            expected: &[
                "because the limit of pod ml/train-0 (all its containers together)",
                "resources.limits.memory",
                "All containers of the pod share that limit",
            ],
            not: &["docker run", "oom_score_adj", "a limit of its own", "above it"],
            computed: &["8"],
        },
        Case {
            name: "the limit of a pod without another container",
            events: vec![killed(Kill { alone_in_pod: true, ..in_a_pod() })],
            cause: Cause::OomLimitWorker,
            confidence: Confidence::Certain,
            expected: &["because the container reached its memory limit", "resources.limits.memory"],
            not: &["docker run", "oom_score_adj", "the pod", "above it"],
            computed: &["8", "4.2", "7", "3", "2"],
        },
        Case {
            name: "a limit inside the container",
            events: vec![killed(Kill {
                limit_cgroup: format!("/docker/{ID}/job").into(),
                oom_score_adj: Some(-500),
                ..kill(Victim::Child)
            })],
            cause: Cause::OomLimitWorker,
            confidence: Confidence::Certain,
            expected: &[
                "the cgroup /job inside it reached its memory limit",
                "which was set inside the container",
            ],
            not: &["because the container reached"],
            computed: &["4.2", "7", "3", "2"],
        },
        Case {
            name: "the machine ran out",
            events: vec![killed(of_host())],
            cause: Cause::OomHost,
            confidence: Confidence::Certain,
            expected: &[
                "the whole machine ran out of memory",
                "Largest holders of the machine's 62.0 GiB at the last sample: notebook 38.0 GiB, piper1-gpl-train-1 (this one) 20.0 GiB",
                "Set a memory limit on notebook",
                "oom_score_adj 800",
                "800/1000",
            ],
            not: &["its memory limit of", "the container reached"],
            computed: &[],
        },
    ]
}

fn with_records_lost_or_none() -> Vec<Case> {
    vec![
        Case {
            name: "a gap",
            events: vec![killed(Kill {
                kernel_usec: None,
                pid: None,
                process: "".into(),
                role: None,
                anon_bytes: None,
                victim: None,
                ..kill(Victim::Child)
            })],
            cause: Cause::OomUnnamed,
            confidence: Confidence::Likely,
            expected: &[
                "the kernel's record was lost",
                "so its name and size are not known",
                "no end of the container is recorded",
                "log_buf_len",
            ],
            not: &["pt_data_worker", "kept running"],
            computed: &["1"],
        },
        Case {
            name: "the event of the kill was removed",
            events: vec![ended(Exit { oom_kills: 1, ..exit(ExitReason::OomContainer, 137, 0.0) })],
            cause: Cause::OomLimitMain,
            confidence: Confidence::Likely,
            expected: &["the kill's own record is not in the ledger", "counted 1 OOM kill"],
            not: &[],
            computed: &["0", "3", "12"],
        },
        Case {
            name: "137 without an OOM",
            events: vec![ended(exit(ExitReason::Killed, 137, 0.0))],
            cause: Cause::KilledOutside,
            confidence: Confidence::Certain,
            expected: &["NOT an OOM", "docker stop", "kubelet", "systemd-oomd", "earlyoom", "person"],
            not: &["memory limit of"],
            computed: &["3", "12"],
        },
        Case {
            name: "137 without an OOM, and the runtime's flag says otherwise",
            events: vec![ended(Exit { runtime_oom_flag: Some(true), ..exit(ExitReason::Killed, 137, 0.0) })],
            cause: Cause::KilledOutside,
            confidence: Confidence::Likely,
            expected: &["NOT an OOM"],
            not: &[],
            computed: &["3", "12"],
        },
        Case {
            name: "137 while the kernel log could not be read",
            events: vec![ended(Exit { kernel_log_read: false, ..exit(ExitReason::Killed, 137, 0.0) })],
            cause: Cause::KilledOutside,
            confidence: Confidence::Likely,
            expected: &["could not be read"],
            not: &["NOT an OOM"],
            computed: &["3", "12"],
        },
    ]
}

fn beside_unattributed_kill() -> Vec<Case> {
    vec![
        Case {
            name: "a restart of the host a minute after the kill of a worker",
            events: vec![killed(kill(Victim::Child)), ended(exit(ExitReason::HostRestart, 255, 60.0))],
            cause: Cause::HostRestart,
            confidence: Confidence::Certain,
            expected: &[
                "the host was restarted or lost power",
                "OOM-killed, at",
                "5.0 GiB of anonymous memory), limit 44.0 GiB",
            ],
            not: &["OOM killer"],
            computed: &[],
        },
        Case {
            name: "137 beside an unattributed kill",
            events: vec![killed(unattributed()), ended(after_kill(exit(ExitReason::Unknown, 137, 0.0)))],
            cause: Cause::Unknown,
            confidence: Confidence::Unsure,
            expected: &["of an unknown container", "it may have been"],
            not: &["NOT an OOM"],
            computed: &["3", "12", "5"],
        },
        Case {
            name: "an error beside an unattributed kill",
            events: vec![killed(unattributed()), ended(after_kill(exit(ExitReason::Error, 1, 0.0)))],
            cause: Cause::ErrorExit,
            confidence: Confidence::Unsure,
            expected: &["of an unknown container", "if it was a child of this one"],
            not: &["No OOM kill"],
            computed: &["3", "12", "5"],
        },
    ]
}

/// Each reason why the shares of workers are not known is said alone.
#[test]
fn reason_why_no_share_was_measured_is_the_one_that_is_known() {
    use memledger::events::{PssMissing, RoleUsage};
    let advice = |missing: Option<PssMissing>| {
        let workers = RoleUsage { pss_missing: missing, ..role(Role::Worker, 4, None) };
        let before = PriorUsage { roles: vec![workers], ..before(42 * GIB, 43 * GIB, Some(44 * GIB)) };
        let kill = Kill {
            role: Some(Role::Worker),
            parent_pid: Some(22_100),
            program: "gunicorn".into(),
            before: Some(Arc::new(before)),
            ..kill(Victim::Child)
        };
        let verdict = memledger::diagnose::explain(&[killed(kill)], NOW).unwrap();
        let what = words::what(&verdict);
        assert!(what.contains("a worker process (fork of pid 22100)"), "{what}");
        words::advice(&verdict)[0].clone()
    };
    let begin = "Fewer gunicorn workers (-w, --workers; --max-requests replaces one that grows). 4 worker processes ran. What each \
                 holds alone is not known";
    for (missing, words) in [
        (Some(PssMissing::Permission), "CAP_SYS_PTRACE"),
        (Some(PssMissing::NotYet), "--pss.interval"),
        (Some(PssMissing::Expensive), "waited too long"),
        (Some(PssMissing::LowHeadroom), "near its limit"),
        (None, "known."),
    ] {
        let text = advice(missing);
        assert!(text.starts_with(begin) && text.contains(words), "{text}");
        let all = ["CAP_SYS_PTRACE", "--pss.interval", "waited too long", "near its limit"];
        let said = all.iter().filter(|reason| text.contains(**reason)).count();
        assert_eq!(said, usize::from(missing.is_some()), "{text}");
        assert!(!text.contains("DataLoader") && !text.contains("NUM_WORKERS"), "{text}");
    }
}

/// A host without swap needs no advice on swap, and its answers no limit of it.
#[test]
fn limit_of_swap_is_not_mentioned_on_a_host_without_swap() {
    let screen = |host_swap: Option<u64>, limit: u64| {
        let kill = with_report(Kill { before: None, ..kill(Victim::Child) }, |report| {
            (report.host_swap_bytes, report.swap_bytes, report.swap_limit_bytes) =
                (host_swap, Some(0), Some(limit));
        });
        let verdict = memledger::diagnose::explain(&[killed(kill)], NOW).unwrap();
        memledger::export::words::screen::render(&verdict)
    };
    for limit in [0, 300 * MIB] {
        let text = screen(Some(0), limit);
        assert!(text.contains("in use; no swap") && !text.contains("--memory-swap"), "{text}");
    }
    assert!(screen(Some(GIB), 0).contains("--memory-swap"));
    assert!(screen(Some(GIB), 300 * MIB).contains("swap 0 B of 300.0 MiB"));
}
