use std::sync::Arc;

use crate::events::{ExitReason, Role};
use crate::runs::advice::lines::{Advice, advise, check};
use crate::runs::hit_limit::{HitLimit, LimitPosition};
use crate::runs::{GpuPeak, RolePeak, RunRecord};

const GIB: f64 = (1_u64 << 30) as f64;

/// A training on a host without a limit for its container, in GiB: what others hold, each rank, each worker, each sample, buffers.
#[derive(Clone, Copy)]
struct Training {
    host: f64,
    others: f64,
    ranks: u64,
    rank: f64,
    worker: f64,
    sample: f64,
    buffers: f64,
}

impl Training {
    /// Returns the record of a run with these settings, as it would be if it completed.
    fn run(&self, workers: u64, batch: u64, accumulation: u64) -> RunRecord {
        let bytes = |gib: f64| (gib * GIB) as u64;
        let trainer = self.rank + self.sample * batch as f64;
        let peak = self.ranks as f64 * (trainer + self.worker * workers as f64) + self.buffers;
        let role = |processes: u64, gib: f64| RolePeak {
            processes: processes as u32,
            process_rss_bytes: bytes(gib),
            process_pss_bytes: Some(bytes(gib)),
            ..RolePeak::default()
        };
        let settings = [
            ("num_devices", self.ranks),
            ("num_workers", workers),
            ("batch_size", batch),
            ("accum", accumulation),
        ];
        RunRecord {
            run: format!("{batch}x{accumulation}-{workers}").into(),
            group: "piper".into(),
            settings: settings.map(|(name, value)| (name.into(), value.to_string().into())).into(),
            ended: Some(1.0),
            exit_reason: Some(ExitReason::Completed),
            duration_seconds: Some(100.0),
            observed_seconds: Some(99.0),
            samples: 100,
            host_total_bytes: Some(bytes(self.host)),
            host_others_peak_bytes: Some(bytes(self.others)),
            unreclaimable_peak_bytes: Some(bytes(peak)),
            roles: [
                (Role::Trainer, role(self.ranks, trainer)),
                (Role::DataloaderWorker, role(self.ranks * workers, self.worker)),
            ]
            .into(),
            ..RunRecord::default()
        }
    }

    /// Returns the advice after a run with these settings, after two with smaller batches that completed.
    fn advice(&self, workers: u64, batch: u64, accumulation: u64, end: ExitReason) -> Advice {
        let mut newest = self.run(workers, batch, accumulation);
        if end == ExitReason::OomHost {
            let room = ((self.host - self.others) * GIB) as u64;
            newest.unreclaimable_peak_bytes = newest.unreclaimable_peak_bytes.min(Some(room));
            (newest.exit_reason, newest.oom_kills) = (Some(end), 1);
        }
        let runs =
            [self.run(workers, batch / 4, accumulation), self.run(workers, batch / 2, accumulation), newest];
        check(&runs, &[], 2.0).expect("advice")
    }
}

fn ram(advice: &Advice) -> Vec<&str> {
    advice.lines.iter().filter(|line| line.topic == "ram").map(|line| &*line.text).collect()
}

fn is_ok(advice: &Advice) -> bool {
    advice.lines.iter().all(|line| line.is_ok)
}

/// The rows of two hosts, each with its own parts: what fits is no fault, and what does not gets settings that do.
#[test]
fn known_tables_are_what_their_hosts_can_hold() {
    let one =
        Training { host: 32.0, others: 6.0, ranks: 1, rank: 10.0, worker: 3.0, sample: 0.25, buffers: 4.0 };
    let four =
        Training { host: 44.0, others: 8.0, ranks: 4, rank: 3.0, worker: 1.5, sample: 0.25, buffers: 0.0 };

    let advice = one.advice(1, 24, 1, ExitReason::Completed);
    assert_eq!(
        ram(&advice),
        [
            "peak 23.0 GiB of the 26.0 GiB that others leave of the host's 32.0 GiB (88 %): 3.0 GiB to spare",
            "others 6.0 GiB + 1 rank 10.0 GiB + 1 worker 3.0 GiB + 24 samples 6.0 GiB + buffers 4.0 GiB = 29.0 GiB of 32.0 GiB",
        ]
    );
    assert!(is_ok(&advice), "{advice:?}");

    let advice = Training { worker: 1.75, ..one }.advice(4, 32, 1, ExitReason::OomHost);
    let lines = ram(&advice);
    assert_eq!(
        lines[1],
        "others 6.0 GiB + 1 rank 10.0 GiB + 4 workers 7.0 GiB + 32 samples 8.0 GiB + buffers 4.0 GiB = 35.0 GiB of 32.0 GiB"
    );
    let room = "of the 26.0 GiB that others leave of the host's 32.0 GiB";
    assert_eq!(
        lines[2..],
        [
            format!("NUM_WORKERS=1 needs about 23.8 GiB {room}"),
            format!("BATCH_SIZE=8 ACCUM=4 needs about 23.0 GiB {room}")
        ]
    );
    assert!(!is_ok(&advice));

    let advice = four.advice(1, 16, 1, ExitReason::Completed);
    let parts =
        "others 8.0 GiB + 4 ranks 12.0 GiB + 4 workers 6.0 GiB + 64 samples 16.0 GiB = 42.0 GiB of 44.0 GiB";
    assert_eq!(ram(&advice)[1], parts);
    assert!(is_ok(&advice), "{advice:?}");

    let advice = Training { worker: 1.0, ..four }.advice(4, 16, 1, ExitReason::OomHost);
    let lines = ram(&advice);
    let parts = "others 8.0 GiB + 4 ranks 12.0 GiB + 16 workers 16.0 GiB + 64 samples 16.0 GiB = 52.0 GiB of 44.0 GiB";
    assert_eq!(lines[1], parts);
    assert!(lines[2].starts_with("NUM_WORKERS=1 needs about 32.0 GiB of the 36.0 GiB"), "{lines:?}");
    assert!(!is_ok(&advice));

    let advice = four.advice(1, 12, 2, ExitReason::Completed);
    let parts =
        "others 8.0 GiB + 4 ranks 12.0 GiB + 4 workers 6.0 GiB + 48 samples 12.0 GiB = 38.0 GiB of 44.0 GiB";
    assert_eq!(ram(&advice)[1], parts);
    let budget = advice.ram_budget.expect("a budget");
    assert_eq!(budget.settings.effective_batch(), 96);
    assert!(is_ok(&advice), "{advice:?}");
}

#[test]
fn lower_one_of_limit_and_host_is_what_there_is() {
    let training =
        Training { host: 32.0, others: 6.0, ranks: 1, rank: 10.0, worker: 3.0, sample: 0.25, buffers: 4.0 };
    let with_limit = |gib: f64| {
        let mut runs = [training.run(1, 8, 1), training.run(1, 16, 1), training.run(1, 24, 1)];
        runs.iter_mut().for_each(|run| run.limit_bytes = Some((gib * GIB) as u64));
        ram(&advise(&runs).unwrap())[0].to_owned()
    };
    assert_eq!(
        with_limit(40.0),
        "peak 23.0 GiB of the 26.0 GiB that others leave of the host's 32.0 GiB (88 %): 3.0 GiB to spare"
    );
    assert_eq!(with_limit(25.0), "peak 23.0 GiB of 25.0 GiB (92 %): 2.0 GiB to spare");
    assert_eq!(with_limit(24.0), "it came close to its limit: peak 23.0 GiB of 24.0 GiB (96 %)");
}

#[test]
fn limit_above_the_container_is_not_its_own_and_excludes_nothing() {
    let training =
        Training { host: 128.0, others: 6.0, ranks: 1, rank: 2.0, worker: 1.0, sample: 0.25, buffers: 0.0 };
    let mut runs =
        [training.run(1, 8, 1), training.run(1, 16, 1), training.run(1, 32, 1), training.run(1, 64, 1)];
    runs.iter_mut().for_each(|run| run.limit_bytes = Some(16 << 30));
    for run in &mut runs[2..] {
        (run.exit_reason, run.oom_kills) = (Some(ExitReason::OomContainer), 1);
    }
    runs[2].oom_limit = Some(HitLimit { position: LimitPosition::Above, bytes: Some(60 << 30) });
    let after = |runs: &[RunRecord]| {
        ram(&advise(runs).unwrap()).iter().map(|text| (*text).to_owned()).collect::<Vec<_>>()
    };
    let lines = after(&runs[..3]);
    assert_eq!(
        lines[0],
        "killed at a limit of 60.0 GiB above the container, which others may have used up: see `memledger why`; highest sample 11.0 GiB"
    );
    assert!(!lines.iter().any(|line| line.contains("BATCH_SIZE=")), "{lines:?}");
    // 32 was killed there and not at its own limit, so it is a proposal
    runs[3].oom_limit = Some(HitLimit { position: LimitPosition::Own, bytes: Some(16 << 30) });
    let lines = after(&runs);
    assert_eq!(lines[0], "killed at its limit of 16.0 GiB; highest sample 19.0 GiB");
    assert_eq!(lines[2], "BATCH_SIZE=32 ACCUM=2 needs about 11.0 GiB of 16.0 GiB");
    runs[2].oom_limit = runs[3].oom_limit;
    assert_eq!(after(&runs)[2], "BATCH_SIZE=16 ACCUM=4 needs about 7.0 GiB of 16.0 GiB");
}

#[test]
fn batch_that_did_not_fit_into_the_gpu_is_no_proposal() {
    let training =
        Training { host: 128.0, others: 6.0, ranks: 1, rank: 2.0, worker: 1.0, sample: 0.25, buffers: 0.0 };
    let mut runs = [32, 64, 128, 256].map(|batch| training.run(1, batch, 1));
    for run in &mut runs {
        run.limit_bytes = Some(40 << 30);
        let gpu = GpuPeak { total_bytes: Some(12 << 30), peak_bytes: Some(8 << 30), ..GpuPeak::default() };
        run.gpus = [("GPU-a".into(), gpu)].into();
    }
    (runs[3].exit_reason, runs[3].oom_kills) = (Some(ExitReason::OomContainer), 1);
    let proposal =
        |runs: &[RunRecord]| ram(&advise(runs).unwrap()).last().map(|text| (*text).to_owned()).unwrap();
    assert_eq!(proposal(&runs), "BATCH_SIZE=128 ACCUM=2 needs about 35.0 GiB of 40.0 GiB");
    let is_smaller = "BATCH_SIZE=64 ACCUM=4 needs about 19.0 GiB of 40.0 GiB";
    runs[2].exit_reason = Some(ExitReason::CudaOom);
    assert_eq!(proposal(&runs), is_smaller);
    // an error that nothing explains may have been the same
    runs[2].exit_reason = Some(ExitReason::Error);
    assert_eq!(proposal(&runs), is_smaller);
    let advice = advise(&runs).unwrap();
    let why: Vec<_> = advice.lines.iter().filter(|line| line.topic == "batch").collect();
    assert!(why.len() == 1 && why[0].is_ok && why[0].text.contains("why BATCH_SIZE=128 failed"), "{why:?}");
    assert_eq!(why[0].runs, [Arc::clone(&runs[2].run)]);
    // it completed with as many samples another time, so the error had another cause
    let later = RunRecord { run: "again".into(), ..training.run(1, 128, 1) };
    let runs = [vec![later], runs.to_vec()].concat();
    assert!(!advise(&runs).unwrap().lines.iter().any(|line| line.topic == "batch"));
}

#[test]
fn settings_that_completed_within_what_there_is_are_not_known_to_be_the_cause() {
    let training =
        Training { host: 32.0, others: 6.0, ranks: 1, rank: 2.0, worker: 1.0, sample: 0.25, buffers: 0.0 };
    let advice = training.advice(1, 16, 1, ExitReason::OomHost);
    let lines = ram(&advice);
    assert!(
        lines[0].starts_with("it was killed because the host ran out of memory: it had the 26.0 GiB"),
        "{lines:?}"
    );
    assert!(
        lines[2].contains("it is not known why this one was killed. Free memory of the host"),
        "{lines:?}"
    );
}

/// Measured: a script whose workers keep 100 MiB each, and are larger than their trainer, as they have its pages too. With four workers
/// it took 846.8 MiB.
#[test]
fn worker_that_is_the_largest_process_is_measured_beside_its_trainer() {
    const MIB: f64 = (1 << 20) as f64;
    let run = |workers: u64, batch: u64, peak: u64| {
        let role = |pss_bytes, anon_bytes| RolePeak {
            processes: 1,
            process_rss_bytes: anon_bytes + 60_000_000,
            process_anon_bytes: Some(anon_bytes),
            process_pss_bytes: Some(pss_bytes),
            ..RolePeak::default()
        };
        let settings = [("num_workers", workers), ("batch_size", batch)];
        RunRecord {
            run: format!("{batch}").into(),
            group: "script".into(),
            settings: settings.map(|(name, value)| (name.into(), value.to_string().into())).into(),
            ended: Some(1.0),
            exit_reason: Some(ExitReason::Completed),
            duration_seconds: Some(100.0),
            observed_seconds: Some(99.0),
            limit_bytes: Some(2 << 30),
            unreclaimable_peak_bytes: Some(peak),
            roles: [
                (Role::Trainer, role(432_800_000, 375_800_000)),
                (Role::Worker, role(250_000_000, 490_385_408)),
            ]
            .into(),
            ..RunRecord::default()
        }
    };
    let killed = RunRecord {
        exit_reason: Some(ExitReason::OomContainer),
        oom_kills: 1,
        limit_bytes: Some(700 << 20),
        ..run(4, 8, 700 << 20)
    };
    let advice = check(&[run(1, 16, 513_265_664), run(1, 8, 513_265_664), killed], &[], 2.0).expect("advice");
    let line = ram(&advice).into_iter().find(|line| line.contains("4 workers")).expect("a budget").to_owned();
    let total: f64 =
        line.split(" = ").nth(1).and_then(|sum| sum.split(' ').next()?.parse().ok()).expect("MiB");
    assert!((846.8..1.1 * 846.8).contains(&total), "{total} MiB of {}: {line}", 846.8 * MIB);
}
