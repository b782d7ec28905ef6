//! What was measured stays known, and what failed is not proposed again.

use super::*;

#[test]
fn one_more_run_with_another_number_of_workers_hides_nothing_that_was_measured() {
    let of = |batch: &str, workers: &str, ram| {
        let mut run = run(batch, &[("batch_size", batch), ("num_workers", workers)], ram, None);
        run.roles.extend([worker(workers.parse().unwrap(), 60, 20)]);
        run
    };
    let measured = [of("32", "1", 500), of("64", "1", 532)];
    let killed = killed(of("1024", "4", 990));
    let lines = |runs: &[RunRecord]| texts(&advise(runs).unwrap(), "ram");
    let wanted = lines(&[measured.as_slice(), std::slice::from_ref(&killed)].concat());
    assert!(wanted.iter().any(|line| line.contains(" ACCUM=") && line.contains("needs about")), "{wanted:?}");
    let more = lines(&[measured.as_slice(), &[of("32", "2", 520), killed.clone()]].concat());
    assert_eq!(more, wanted);
    let most = lines(&[measured.as_slice(), &[of("32", "2", 520), of("32", "3", 540), killed]].concat());
    assert_eq!(most, wanted);
}

#[test]
fn settings_that_completed_are_proposed_where_nothing_can_be_computed() {
    let of = |batch: &str, workers: &str, ram| {
        run(batch, &[("batch_size", batch), ("num_workers", workers)], ram, None)
    };
    let lines = texts(&advise(&[of("8", "1", 600), killed(of("16", "4", 990))]).unwrap(), "ram");
    assert_eq!(
        lines[1],
        "it is not known which settings fit best; NUM_WORKERS=1 BATCH_SIZE=8 ACCUM=2 completed with a peak of 600.0 MiB of 1000.0 MiB. \
         Run two batch sizes with one number of workers to know more"
    );
    let lines = texts(&advise(&[of("8", "1", 980), killed(of("16", "4", 990))]).unwrap(), "ram");
    assert!(lines[1].starts_with("it is not known which settings fit: "), "too near the limit: {lines:?}");
}

#[test]
fn sizes_to_measure_after_a_failure_are_near_it() {
    let failed = RunRecord {
        exit_reason: Some(ExitReason::CudaOom),
        ..run("a", &[("batch_size", "256"), ("num_workers", "8")], 100, Some(11_000))
    };
    let lines = texts(&advise(std::slice::from_ref(&failed)).unwrap(), "vram");
    assert!(lines.iter().any(|line| line.ends_with("run also 128, 64, 32, 16")), "{lines:?}");
    // workers hold no memory of the GPU
    let with = |batch: &str, workers: &str, vram| {
        run(batch, &[("batch_size", batch), ("num_workers", workers)], 100, Some(vram))
    };
    let runs =
        [with("16", "8", 1000), with("32", "4", 2000), with("64", "4", 4000), with("8", "2", 500), failed];
    assert_eq!(advise(&runs).unwrap().maximum_batch_size, Some(128));
}

#[test]
fn switches_of_mixed_precision_are_a_precision() {
    for name in ["use_mixed_precision", "use_amp", "amp"] {
        let of =
            |id: &str, value: &str, vram| run(id, &[("batch_size", "8"), (name, value)], 100, Some(vram));
        let lines = texts(&advise(&[of("a", "false", 9000), of("b", "true", 7000)]).unwrap(), "precision");
        let wanted =
            format!("{name}=true instead of {name}=false: GPU memory 6.8 GiB and not 8.8 GiB (-22 %)");
        assert!(lines.len() == 1 && lines[0].starts_with(&wanted), "{lines:?}");
    }
}

#[test]
fn leak_before_a_failure_is_named_and_a_smaller_batch_is_no_remedy() {
    let point = |number: u64| crate::runs::TimelinePoint {
        at: 10.0 * number as f64,
        torch_allocated_min_bytes: Some((3 + 3 * number) << 30),
        ..Default::default()
    };
    let mut failed = run("a", &[("batch_size", "64")], 100, Some(11_000));
    failed.exit_reason = Some(ExitReason::CudaOom);
    let halved = texts(&advise(std::slice::from_ref(&failed)).unwrap(), "vram");
    assert!(halved.iter().any(|line| line.contains("BATCH_SIZE=32 ACCUM=2")), "{halved:?}");
    failed.timeline = (0..3).map(point).collect();
    failed.steps_per_second = Some(5.0);
    let lines = texts(&advise(&[failed]).unwrap(), "vram");
    let leak = "what PyTorch holds between two steps grew from 3.0 GiB to 9.0 GiB in 20 s. A smaller batch only delays that";
    assert!(lines.iter().any(|line| line.starts_with(leak)), "{lines:?}");
    assert!(lines.iter().all(|line| !line.contains("ACCUM=")), "{lines:?}");
}
