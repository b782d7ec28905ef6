use super::*;
use crate::events::{ExitReason, Role};

use crate::runs::{GpuPeak, RolePeak};

mod measured;

const MIB: u64 = 1 << 20;

fn run(id: &str, settings: &[(&str, &str)], ram: u64, vram: Option<u64>) -> RunRecord {
    let gpu = vram.map(|vram| GpuPeak {
        total_bytes: Some(12_000_000_000),
        peak_bytes: Some(vram * MIB),
        ..GpuPeak::default()
    });
    RunRecord {
        run: id.into(),
        group: "vision".into(),
        settings: settings.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect(),
        ended: Some(1.0),
        exit_reason: Some(ExitReason::Completed),
        samples: 10,
        duration_seconds: Some(100.0),
        observed_seconds: Some(99.0),
        limit_bytes: Some(1000 * MIB),
        unreclaimable_peak_bytes: Some(ram * MIB),
        gpus: gpu.into_iter().map(|gpu| ("GPU-a".into(), gpu)).collect(),
        ..RunRecord::default()
    }
}

fn texts(advice: &Advice, topic: &str) -> Vec<String> {
    advice.lines.iter().filter(|line| line.topic == topic).map(|line| line.text.clone()).collect()
}

fn worker(processes: u32, resident: u64, share: u64) -> (Role, RolePeak) {
    let peak = RolePeak {
        processes,
        process_rss_bytes: resident * MIB,
        process_pss_bytes: Some(share * MIB),
        ..RolePeak::default()
    };
    (Role::DataloaderWorker, peak)
}

fn killed(mut run: RunRecord) -> RunRecord {
    (run.exit_reason, run.oom_kills) = (Some(ExitReason::OomContainer), 1);
    run
}

#[test]
fn killed_run_gets_settings_that_fit_from_what_was_measured() {
    let with = |batch: &str, ram| run(batch, &[("batch_size", batch), ("num_workers", "4")], ram, None);
    let dead = killed(with("64", 990));
    let advice = advise(&[with("16", 600), with("32", 760), dead.clone()]).unwrap();
    let lines = texts(&advice, "ram");
    assert_eq!(lines[0], "killed at its limit of 1000.0 MiB; highest sample 990.0 MiB");
    assert_eq!(lines.last().unwrap(), "BATCH_SIZE=32 ACCUM=2 needs about 760.0 MiB of 1000.0 MiB");
    assert_eq!(advice.lines[1].runs.iter().map(|run| &**run).collect::<Vec<_>>(), ["16", "32"]);
    // what was killed before is no proposal
    let lines =
        texts(&advise(&[with("8", 520), with("16", 600), killed(with("32", 700)), dead]).unwrap(), "ram");
    assert_eq!(lines[2..], ["BATCH_SIZE=16 ACCUM=4 needs about 600.0 MiB of 1000.0 MiB"]);
}

#[test]
fn worker_frees_no_more_than_what_is_not_shared() {
    let settings = [("batch_size", "8"), ("num_workers", "4")];
    let mut private = run("a", &settings, 880, None);
    private.roles.insert(Role::Trainer, RolePeak { process_rss_bytes: 400 * MIB, ..RolePeak::default() });
    private.roles.extend([worker(4, 150, 130)]);
    let close = run("b", &settings, 950, None);
    let lines = |runs: &[RunRecord]| texts(&advise(runs).unwrap(), "ram");
    let all = lines(&[private.clone(), killed(close.clone())]);
    assert_eq!(
        all[2],
        "by the runs that completed, these settings need about 880.0 MiB: it is not known why this one was killed. Raise the limit, or \
         see `memledger why`"
    );
    private.unreclaimable_peak_bytes = Some(960 * MIB);
    assert_eq!(lines(&[private.clone()])[2], "NUM_WORKERS=3 needs about 830.0 MiB of 1000.0 MiB");
    // all of it is the trainer's, and the workers share it
    private.roles.insert(Role::Trainer, RolePeak { process_rss_bytes: 960 * MIB, ..RolePeak::default() });
    assert!(lines(&[private])[1].starts_with("it is not known which settings fit"));
}

#[test]
fn nothing_measured_has_no_number() {
    let lines = texts(&advise(&[killed(run("a", &[("batch_size", "64")], 990, None))]).unwrap(), "ram");
    assert!(lines[1].starts_with("it is not known which settings fit"), "{lines:?}");
    let mut unseen = killed(run("a", &[], 0, None));
    unseen.unreclaimable_peak_bytes = None;
    assert_eq!(
        texts(&advise(&[unseen]).unwrap(), "ram")[0],
        "killed at its limit of 1000.0 MiB; no cycle sampled it"
    );
    let mut running = run("a", &[], 100, None);
    (running.ended, running.exit_reason) = (None, None);
    assert_eq!((advise(&[]), advise(&[running])), (None, None));
}

#[test]
fn killed_child_and_host_are_no_good_runs() {
    let mut child = run("a", &[], 150, None);
    (child.exit_reason, child.oom_kills) = (Some(ExitReason::Error), 1);
    let mut host = run("b", &[], 150, None);
    (host.exit_reason, host.oom_kills) = (Some(ExitReason::OomHost), 1);
    for (run, text) in
        [(child, "a process was killed for its memory"), (host, "it was killed because the host ran out")]
    {
        let advice = advise(&[run]).unwrap();
        assert!(!advice.lines[0].is_ok && advice.lines[0].text.starts_with(text), "{advice:?}");
        assert!(texts(&advice, "minimum").is_empty());
    }
}

#[test]
fn memory_to_spare_is_only_that_of_a_completed_run() {
    let sampled = "peak 300.0 MiB of 1000.0 MiB (30 %)";
    for (reason, text) in [
        (Some(ExitReason::Completed), format!("{sampled}: 700.0 MiB to spare")),
        (Some(ExitReason::Error), format!("{sampled} until it ended: it may need more to complete")),
        (None, format!("{sampled}; why it ended is not decided yet")),
    ] {
        let newest = RunRecord { exit_reason: reason, ..run("a", &[], 300, None) };
        let line = advise(&[newest]).unwrap().lines[0].clone();
        assert_eq!((line.is_ok, line.text), (true, text));
    }
    let mut newest = run("a", &[], 300, None);
    newest.observed_seconds = Some(70.0);
    let text = advise(&[newest]).unwrap().lines[0].text.clone();
    assert_eq!(text, format!("{sampled} while it was sampled, which was not all the time"));
}

#[test]
fn settings_that_were_killed_after_they_completed_have_no_minimum() {
    let settings = [("batch_size", "8"), ("num_workers", "2")];
    let completed = run("a", &settings, 880, Some(4000));
    assert_eq!(texts(&advise(std::slice::from_ref(&completed)).unwrap(), "minimum").len(), 1);
    let mut newest = killed(run("b", &settings, 600, Some(4000)));
    newest.gpus.values_mut().for_each(|gpu| gpu.utilization_mean = Some(0.2));
    newest.cpu_mean_cores = Some(2.9);
    newest.roles.extend([worker(2, 120, 100)]);
    let mut failed = run("c", &settings, 600, Some(4000));
    failed.exit_reason = Some(ExitReason::CudaOom);
    for newest in [newest, failed] {
        let advice = advise(&[completed.clone(), newest]).unwrap();
        assert!(texts(&advice, "minimum").is_empty() && texts(&advice, "workers").is_empty(), "{advice:?}");
    }
}

#[test]
fn kill_at_a_lower_limit_excludes_no_proposal() {
    let with = |batch: &str, ram| run(batch, &[("batch_size", batch)], ram, None);
    let mut earlier = killed(with("16", 200));
    earlier.limit_bytes = Some(256 * MIB);
    let mut runs = vec![earlier, with("16", 600), with("32", 760), killed(with("64", 990))];
    let proposed = "BATCH_SIZE=32 ACCUM=2 needs about 760.0 MiB of 1000.0 MiB";
    assert_eq!(texts(&advise(&runs).unwrap(), "ram")[2], proposed);
    let mut leak = with("32", 960);
    leak.exit_reason = Some(ExitReason::Stopped);
    runs.push(leak);
    let lines = texts(&advise(&runs).unwrap(), "ram");
    assert!(lines[2].contains("it is not known why this one came close to its limit"), "{lines:?}");
}

#[test]
fn settings_of_any_size_take_no_time() {
    let huge = u32::MAX.to_string();
    for value in [huge.as_str(), "65536", "-1", "1e9", ""] {
        let settings =
            [("batch_size", value), ("accum", value), ("num_workers", value), ("num_devices", value)];
        let mut runs = vec![run("a", &settings, 960, None)];
        runs[0].roles.extend([worker(4, 10, 10)]);
        assert!(advise(&runs).is_some());
    }
}

#[test]
fn run_that_was_hardly_seen_or_failed_is_no_measurement() {
    let whole = run("a", &[], 500, None);
    assert!(is_measurement(&whole));
    let changes: [&dyn Fn(&mut RunRecord); 6] = [
        &|run| run.exit_reason = Some(ExitReason::Error),
        &|run| run.torch_ooms = Some(1),
        &|run| run.oom_kills = 1,
        &|run| run.observed_seconds = Some(10.0),
        &|run| (run.duration_seconds, run.observed_seconds) = (Some(4.0), Some(0.0)), // one sample
        &|run| (run.ended, run.exit_reason) = (None, None),
    ];
    for change in changes {
        let mut run = whole.clone();
        change(&mut run);
        assert!(!is_measurement(&run), "{run:?}");
    }
}

#[test]
fn batch_that_died_is_replaced_by_a_smaller_one_and_accumulation() {
    let sizes = [(16, 1126), (32, 1434), (64, 2048), (128, 3277)];
    let mut runs: Vec<_> = sizes
        .iter()
        .map(|(batch, vram)| run(&batch.to_string(), &[("batch_size", &batch.to_string())], 500, Some(*vram)))
        .collect();
    let mut died = run("256", &[("batch_size", "256")], 500, Some(11_000));
    (died.exit_reason, died.torch_ooms) = (Some(ExitReason::CudaOom), Some(1));
    runs.push(died);
    let advice = advise(&runs).unwrap();
    assert_eq!((advice.maximum_batch_size, advice.batch_size), (Some(128), Some(256)));
    let lines = texts(&advice, "vram");
    assert_eq!(lines[0], "it ended by a CUDA out-of-memory error: see `memledger why`");
    assert_eq!(lines[1], "highest sample 10.7 GiB of 11.2 GiB (96 %)");
    assert_eq!(lines[3], "BATCH_SIZE=128 ACCUM=2 keeps the effective batch of 256");
    let mut with = |batch: &str| {
        runs.last_mut().unwrap().settings = [("batch_size".into(), batch.into())].into();
        texts(&advise(&runs).unwrap(), "vram")[3].clone()
    };
    assert_eq!(with("192"), "BATCH_SIZE=96 ACCUM=2 keeps the effective batch of 192");
    assert_eq!(with("211"), "BATCH_SIZE=128 ACCUM=2: an effective batch of 256 instead of 211");
    with("256");
    runs.remove(0);
    let lines = texts(&advise(&runs).unwrap(), "vram");
    assert_eq!(lines[2], "the largest batch is not known yet: 3 sizes were measured, run also 16");
}

#[test]
fn idle_gpu_and_busy_workers_get_another_worker_if_memory_allows() {
    let mut newest = run("a", &[("num_workers", "2"), ("batch_size", "8")], 500, Some(4000));
    newest.gpus.values_mut().for_each(|gpu| gpu.utilization_mean = Some(0.4));
    newest.cpu_mean_cores = Some(2.9);
    newest.roles.extend([worker(2, 120, 100)]);
    let lines = |newest: &RunRecord| texts(&advise(std::slice::from_ref(newest)).unwrap(), "workers");
    let waits = "the GPU was busy 40 % of the time, and 2 workers and their trainer used 2.9 cores";
    assert_eq!(lines(&newest), [format!("{waits}: try NUM_WORKERS=3, which needs about 600.0 MiB")]);
    newest.unreclaimable_peak_bytes = Some(860 * MIB);
    assert_eq!(lines(&newest), [format!("{waits}: more workers may help, but one more may need 960.0 MiB")]);
    let role = newest.roles.insert(Role::DataloaderWorker, RolePeak { processes: 2, ..RolePeak::default() });
    let unknown =
        "more workers may help; what one needs is not known, as no share (PSS) of a worker was read";
    assert_eq!(lines(&newest), [format!("{waits}: {unknown}")]);
    newest.roles.insert(Role::DataloaderWorker, role.unwrap());
    newest.cpu_mean_cores = Some(1.2);
    assert_eq!(lines(&newest), <[String; 0]>::default(), "the workers wait themselves");
    (newest.cpu_mean_cores, newest.unreclaimable_peak_bytes) = (Some(2.9), Some(500 * MIB));
    let help = [format!("{waits}: more workers may help, but one more may need 600.0 MiB")];
    let dead = killed(run("b", &[("num_workers", "3"), ("batch_size", "8")], 500, Some(4000)));
    assert_eq!(texts(&advise(&[dead, newest.clone()]).unwrap(), "workers"), help, "three were killed");
    newest.limit_bytes = None;
    assert_eq!(lines(&newest), help, "it is not known what there is");
}

#[test]
fn precision_and_minimum_come_from_runs_that_are_alike() {
    let whole = run("a", &[("batch_size", "8"), ("precision", "32")], 500, Some(8000));
    let other = run("b", &[("batch_size", "16"), ("precision", "bf16-mixed")], 500, Some(1));
    let half = run("c", &[("batch_size", "8"), ("precision", "16-mixed")], 450, Some(5000));
    let advice = advise(&[whole, other, half]).unwrap();
    assert_eq!(
        texts(&advice, "precision"),
        [
            "16-mixed instead of 32: GPU memory 4.9 GiB and not 7.8 GiB (-38 %), RAM 450.0 MiB and not 500.0 MiB (-10 %)"
        ]
    );
    let minimum = texts(&advice, "minimum");
    assert!(minimum[0].contains("473.7 MiB of RAM and a GPU of 5.1 GiB"), "{minimum:?}");
}

#[test]
fn minimum_is_the_highest_peak_of_equal_settings() {
    let settings = [("batch_size", "8")];
    let minimum = |runs: &[RunRecord]| texts(&advise(runs).unwrap(), "minimum");
    let both = [run("a", &settings, 900, None), run("b", &settings, 630, None)];
    assert!(minimum(&both)[0].contains("947.4 MiB of RAM"), "{:?}", minimum(&both));
    let mut four = run("a", &settings, 630, Some(4000));
    for gpu in ["GPU-b", "GPU-c", "GPU-d"] {
        four.gpus.insert(gpu.into(), four.gpus["GPU-a"].clone());
    }
    assert!(minimum(&[four])[0].contains("and 4 GPUs of 4.1 GiB each"));
    let unknown = [
        run("a", &[], 300, None),
        RunRecord { exit_reason: Some(ExitReason::Error), ..run("b", &[], 10, None) },
    ];
    assert!(minimum(&unknown).is_empty(), "settings that are not known are not equal");
}

#[test]
fn size_that_failed_by_its_log_or_for_its_ram_is_not_proposed() {
    let sizes = [(16, 1126), (32, 1434), (64, 2048), (128, 3277)];
    let with =
        |batch: u64, ram, vram| run(&batch.to_string(), &[("batch_size", &batch.to_string())], ram, vram);
    let runs: Vec<_> = sizes.iter().map(|(batch, vram)| with(*batch, 500, Some(*vram))).collect();
    let maximum = |last: RunRecord| {
        let advice = advise(&[runs.clone(), vec![last]].concat()).unwrap();
        let lines = texts(&advice, "vram");
        (
            advice.maximum_batch_size,
            lines.into_iter().find(|text| text.starts_with("batch size")).unwrap_or_default(),
        )
    };
    assert_eq!(maximum(with(128, 500, Some(3277))).0, Some(256));
    let mut logged = with(256, 500, Some(11_000));
    logged.exit_reason = Some(ExitReason::CudaOom);
    let mut survived = with(256, 500, Some(11_000));
    survived.cuda_ooms_in_log = Some(1);
    let mut at_once = with(256, 500, None);
    at_once.exit_reason = Some(ExitReason::CudaOom);
    assert_eq!(maximum(survived).0, Some(256), "it completed");
    for failed in [logged, at_once] {
        let (size, text) = maximum(failed);
        assert!(size == Some(128) && text.contains("at most 128 (a larger one ran out of memory)"), "{text}");
    }
    // one that a later run with a larger batch refutes: others had held the GPU
    let mut early = with(16, 500, Some(1126));
    (early.exit_reason, early.ended) = (Some(ExitReason::CudaOom), Some(1.0));
    let later = |run: &RunRecord| RunRecord { ended: Some(2.0), ..run.clone() };
    let all: Vec<_> = std::iter::once(early.clone()).chain(runs.iter().map(later)).collect();
    assert_eq!(advise(&all).unwrap().maximum_batch_size, Some(256));
    early.ended = Some(3.0);
    assert_eq!(
        advise(&[all[1..].to_vec(), vec![early]].concat()).unwrap().maximum_batch_size,
        Some(256),
        "an earlier one proves as much"
    );
    // what is held outside of PyTorch needs room too
    let beside = |run: &RunRecord| {
        let mut run = run.clone();
        run.gpus.values_mut().for_each(|gpu| {
            gpu.torch_allocated_peak_bytes = gpu.peak_bytes;
            gpu.torch_reserved_peak_bytes = gpu.peak_bytes;
            gpu.peak_bytes = gpu.peak_bytes.map(|bytes| bytes + (4 << 30));
        });
        run
    };
    let crowded = advise(&runs.iter().map(beside).collect::<Vec<_>>()).unwrap();
    assert_eq!(crowded.maximum_batch_size, Some(128), "{crowded:?}");
    assert!(
        texts(&crowded, "vram")[1].ends_with("for each sample, beside 4.0 GiB that are not PyTorch's"),
        "{crowded:?}"
    );
    assert_eq!(maximum(killed(with(64, 990, Some(2048)))).0, Some(32));
}

#[test]
fn run_that_ended_before_it_used_a_gpu_does_not_hide_what_was_measured() {
    let mut newest = run("b", &[("batch_size", "8")], 40, None);
    newest.exit_reason = Some(ExitReason::Error);
    let advice = advise(&[run("a", &[("batch_size", "8")], 500, Some(4000)), newest]).unwrap();
    assert_eq!(texts(&advice, "vram")[0], "peak 3.9 GiB of 11.2 GiB (35 %) in the newest run that used it");
    // nor is its kill forgotten
    let with = |batch: &str, ram| run(batch, &[("batch_size", batch)], ram, Some(4000));
    let dead = killed(run("32", &[("batch_size", "32")], 700, None));
    let lines =
        texts(&advise(&[with("8", 520), with("16", 600), dead, killed(with("64", 990))]).unwrap(), "ram");
    assert_eq!(lines[2..], ["BATCH_SIZE=16 ACCUM=4 needs about 600.0 MiB of 1000.0 MiB"]);
}

#[test]
fn batch_far_beyond_what_completed_is_not_proposed() {
    let with = |batch: &str, ram| run(batch, &[("batch_size", batch)], ram, None);
    let runs = [with("8", 448), with("16", 456), killed(with("256", 990))];
    let lines = texts(&advise(&runs).unwrap(), "ram");
    // by the slope 256 fit too, but the runs say nothing about that
    assert!(lines[2].contains("it is not known why this one was killed"), "{lines:?}");
    let runs = [with("8", 448), with("16", 488), killed(with("256", 990))];
    let lines = texts(&advise(&runs).unwrap(), "ram");
    assert_eq!(lines[2..], ["BATCH_SIZE=32 ACCUM=8 needs about 568.0 MiB of 1000.0 MiB"]);
}

#[test]
fn check_names_who_holds_the_gpu_while_that_is_known() {
    let newest = run("a", &[("batch_size", "8")], 500, Some(4000));
    let mut other = run("b", &[], 100, Some(3000));
    (other.ended, other.last_sampled) = (None, Some(95.0));
    other.subject.identity.name = "neighbour".into();
    other.gpus.values_mut().for_each(|gpu| gpu.used_bytes = Some(1024 * MIB));
    let lines = |running: &[RunRecord], now: f64| {
        texts(&check(std::slice::from_ref(&newest), running, now).unwrap(), "gpu")
    };
    let held = "GPU GPU-a of 11.2 GiB is held by neighbour with 1.0 GiB, 5 s ago: end that first, or take another GPU";
    assert_eq!(lines(std::slice::from_ref(&other), 100.0), [held]);
    assert!(lines(std::slice::from_ref(&other), 1000.0).is_empty(), "memledger does not run");
    other.gpus.clear();
    assert_eq!(lines(&[other], 100.0), ["GPU GPU-a of 11.2 GiB: no container that runs held memory 5 s ago"]);
}

#[test]
fn part_that_differs_and_is_not_measured_has_no_number() {
    let of = |batch: &str, workers: &str, ram| {
        run(batch, &[("batch_size", batch), ("num_workers", workers)], ram, None)
    };
    let unknown = |runs: &[RunRecord]| {
        texts(&advise(runs).unwrap(), "ram")[1].starts_with("it is not known which settings fit")
    };
    assert!(unknown(&[of("8", "0", 448), of("16", "0", 488), killed(of("16", "14", 990))]), "workers");
    let mut reference = of("16", "4", 600);
    reference.roles.extend([worker(4, 60, 40)]);
    assert!(unknown(&[reference, killed(of("256", "4", 990))]), "samples");
}

#[test]
fn size_that_failed_for_an_unknown_reason_is_not_proposed() {
    let sizes = [(16, 1126), (32, 1434), (64, 2048), (128, 3277)];
    let with =
        |batch: u64, vram| run(&batch.to_string(), &[("batch_size", &batch.to_string())], 500, Some(vram));
    let mut runs: Vec<_> = sizes.iter().map(|(batch, vram)| with(*batch, *vram)).collect();
    assert_eq!(advise(&runs).unwrap().maximum_batch_size, Some(256));
    // without the client and without its log, a CUDA out-of-memory error is an exit with an error
    runs.push(RunRecord { exit_reason: Some(ExitReason::Error), ..with(256, 11_000) });
    let advice = advise(&runs).unwrap();
    assert_eq!(advice.maximum_batch_size, Some(128));
    assert!(texts(&advice, "vram")[1].contains("at most 128 (a larger one failed)"), "{advice:?}");
    assert!(
        texts(&advice, "batch")[0].starts_with("it is not known why BATCH_SIZE=256 failed"),
        "{advice:?}"
    );
    // a pod that is deleted ends by SIGTERM
    let last = runs.last_mut().unwrap();
    (last.exit_reason, last.exit_code) = (Some(ExitReason::Signal), Some(143));
    assert_eq!(advise(&runs).unwrap().maximum_batch_size, Some(256));
    (runs[4].exit_reason, runs[4].exit_code) = (Some(ExitReason::Error), Some(1));
    runs.push(with(256, 6000));
    assert!(
        texts(&advise(&runs).unwrap(), "batch").is_empty(),
        "it completed, so the error had another cause"
    );
}

#[test]
fn maximum_is_not_beyond_what_the_ram_allows() {
    let sizes = [(16, 1126), (32, 1434), (64, 2048), (128, 3277)];
    let runs: Vec<_> = sizes
        .iter()
        .map(|(batch, vram)| {
            run(&batch.to_string(), &[("batch_size", &batch.to_string())], 100 + 5 * batch, Some(*vram))
        })
        .collect();
    let advice = advise(&runs).unwrap();
    assert_eq!(advice.maximum_batch_size, Some(128));
    assert!(texts(&advice, "vram")[1].contains("at most 128 (more needs too much RAM)"), "{advice:?}");
    // a batch is proposed once: it fits into both
    let killed = killed(run("256", &[("batch_size", "256")], 990, Some(6000)));
    let advice = advise(&[runs, vec![killed]].concat()).unwrap();
    let proposals: Vec<_> = advice.lines.iter().filter(|line| line.text.contains("BATCH_SIZE=")).collect();
    assert_eq!(proposals.len(), 1, "{advice:?}");
    assert_eq!(proposals[0].text, "BATCH_SIZE=128 ACCUM=2 needs about 740.0 MiB of 1000.0 MiB");
}

#[test]
fn reserved_memory_of_pytorch_counts_where_the_driver_reports_none() {
    let mut newest = run("a", &[("batch_size", "8")], 500, Some(4000));
    let gpu = newest.gpus.get_mut("GPU-a").unwrap();
    (gpu.torch_reserved_peak_bytes, gpu.peak_bytes) = (gpu.peak_bytes, None);
    let advice = advise(&[newest]).unwrap();
    assert_eq!(texts(&advice, "vram")[0], "peak 3.9 GiB of 11.2 GiB (35 %)");
    assert!(texts(&advice, "minimum")[0].contains("a GPU of 4.1 GiB"));
}

#[test]
fn memory_that_does_not_grow_with_the_batch_is_said() {
    let sizes = [8, 16, 32, 64]
        .map(|batch: u64| run(&batch.to_string(), &[("batch_size", &batch.to_string())], 500, Some(4000)));
    let lines = texts(&advise(&sizes).unwrap(), "vram");
    assert!(lines[1].contains("GPU memory did not grow with the batch"), "{lines:?}");
}

#[test]
fn failure_on_a_smaller_gpu_does_not_hide_the_minimum() {
    let settings = [("batch_size", "8")];
    let mut failed = run("a", &settings, 500, Some(11_000));
    (failed.exit_reason, failed.ended) = (Some(ExitReason::CudaOom), Some(2.0));
    let mut completed = run("b", &settings, 500, Some(16_000));
    completed.gpus.get_mut("GPU-a").unwrap().total_bytes = Some(24_000_000_000);
    let runs = [failed.clone(), completed.clone()];
    assert!(texts(&advise(&runs).unwrap(), "minimum")[0].contains("a GPU of 16.4 GiB"), "{runs:?}");
    failed.gpus.get_mut("GPU-a").unwrap().total_bytes = Some(24_000_000_000);
    assert!(texts(&advise(&[failed, completed]).unwrap(), "minimum").is_empty(), "as much did not suffice");
}

#[test]
fn checklist_lists_what_is_in_order() {
    let settings = [("batch_size", "24"), ("accum", "2"), ("num_devices", "4"), ("num_workers", "1")];
    let advice = check(&[run("a", &settings, 500, None)], &[], 2.0).unwrap();
    assert_eq!(texts(&advice, "batch"), ["BATCH_SIZE=24 ACCUM=2, 4 ranks: an effective batch of 192"]);
    assert_eq!(texts(&advice, "workers"), ["NUM_WORKERS=1 for each rank, 4 in all"]);
    assert!(texts(&advice, "allocator")[0].contains("is not set, and nothing measured"));
    let advice = check(&[run("a", &[], 500, None)], &[], 2.0).unwrap();
    assert!(texts(&advice, "batch")[0].starts_with("the batch size is not known"));
}

/// Completed runs with these batches, each with the settings that `name` and `rest` give.
fn completed(
    batches: &[u64],
    name: &str,
    rest: &dyn Fn(u64) -> Vec<(&'static str, String)>,
) -> Vec<RunRecord> {
    let of = |(place, batch): (usize, &u64)| {
        let (value, rest) = (batch.to_string(), rest(*batch));
        let others = rest.iter().map(|(name, value)| (*name, value.as_str()));
        let settings: Vec<_> = std::iter::once((name, value.as_str())).chain(others).collect();
        RunRecord { ended: Some(place as f64), ..run(&value, &settings, 500, Some(800 + 10 * batch)) }
    };
    batches.iter().enumerate().map(of).collect()
}

#[test]
fn survived_error_far_below_the_limit_is_no_failed_batch() {
    let mut runs = completed(&[64, 32, 128, 256, 16], "batch_size", &|_| vec![]);
    runs[4].torch_ooms = Some(1);
    let advice = advise(&runs).unwrap();
    assert!(advice.lines.iter().all(|line| line.is_ok), "{advice:?}");
    assert!(texts(&advice, "vram")[0].starts_with("it survived a CUDA out-of-memory error"), "{advice:?}");
    assert_eq!(advice.maximum_batch_size, Some(512));
}

#[test]
fn answers_have_the_words_of_the_program() {
    let trainer = |_| vec![("gradient_accumulation_steps", "2".to_owned())];
    for (name, wanted) in [
        ("batch_size", "BATCH_SIZE=256 gradient_accumulation_steps=4 keeps the effective batch of 1024"),
        (
            "per_device_train_batch_size",
            "per_device_train_batch_size=256 gradient_accumulation_steps=4 keeps the effective batch of 1024",
        ),
    ] {
        let mut runs = completed(&[32, 64, 128, 512], name, &trainer);
        runs[3].exit_reason = Some(ExitReason::CudaOom);
        let advice = advise(&runs).unwrap();
        assert_eq!((advice.batch_size, texts(&advice, "vram").last().unwrap().as_str()), (Some(512), wanted));
    }
}

#[test]
fn settings_that_take_no_memory_do_not_separate_runs() {
    let scaled = |batch: u64| {
        vec![
            ("lr", format!("{}e-5", batch)),
            ("seed", batch.to_string()),
            ("run_name", format!("run-{batch}")),
        ]
    };
    assert_eq!(
        advise(&completed(&[16, 32, 64, 128], "batch_size", &scaled)).unwrap().maximum_batch_size,
        Some(256)
    );
    // one that does is named
    let longer = |batch: u64| vec![("seq_len", (batch * 8).to_string())];
    let advice = advise(&completed(&[16, 32, 64, 128], "batch_size", &longer)).unwrap();
    let text = texts(&advice, "vram").last().unwrap().clone();
    assert!(text.ends_with("; runs with another seq_len do not count"), "{text}");
}

#[test]
fn crash_of_a_program_that_reports_is_no_mystery() {
    let mut runs = completed(&[16, 64], "batch_size", &|_| vec![]);
    runs[1].exit_reason = Some(ExitReason::Error);
    assert_eq!(texts(&advise(&runs).unwrap(), "batch").len(), 1);
    runs[1].torch_ooms = Some(0);
    assert!(texts(&advise(&runs).unwrap(), "batch").is_empty());
}

#[test]
fn minimum_is_that_of_runs_that_trained() {
    let settings = [("batch_size", "8")];
    let evaluation = run("b", &settings, 200, Some(4000));
    let training = RunRecord { steps_per_second: Some(2.0), ..run("a", &settings, 500, Some(10_000)) };
    let text = texts(&advise(&[training, evaluation]).unwrap(), "minimum")[0].clone();
    assert!(text.starts_with("these settings fit into 526.3 MiB of RAM and a GPU of 10.3 GiB"), "{text}");
}

#[test]
fn no_larger_batch_is_proposed_where_the_gpu_waits() {
    let mut runs = completed(&[16, 32, 64, 128, 16], "batch_size", &|_| vec![("num_workers", "2".into())]);
    let newest = runs.last_mut().unwrap();
    newest.gpus.values_mut().for_each(|gpu| gpu.utilization_mean = Some(0.2));
    newest.cpu_mean_cores = Some(2.9);
    let lines = texts(&advise(&runs).unwrap(), "vram");
    assert!(lines.last().unwrap().ends_with("so a larger batch is not faster"), "{lines:?}");
}
