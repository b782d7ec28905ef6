use super::*;
use crate::ledger::events::UsageSample;
use crate::ledger::exchange::ProcessUsage;
use crate::ledger::run_record::sample::RunSample;

const GIB: u64 = 1 << 30;

fn container(settings: &[(&str, &str)]) -> Container {
    let settings = settings.iter().map(|(name, value)| ((*name).into(), (*value).into()));
    Container { settings: settings.collect(), ..Container::clone(&Container::in_cgroup("train", "/train")) }
}

fn usage(at: f64, unreclaimable: u64, gpu: u64) -> ContainerUsage {
    let gpu =
        RunGpuSample { used_bytes: Some(gpu as f64), utilization: Some(0.5), ..RunGpuSample::default() };
    ContainerUsage {
        sample: Some(UsageSample {
            at,
            unreclaimable_bytes: Some(unreclaimable),
            effective_limit_bytes: Some(8 * GIB),
            ..UsageSample::default()
        }),
        peak_unreclaimable_bytes: Some(unreclaimable),
        run: RunSample {
            cpu_seconds: Some(at * 2.0),
            steps: Some(at * 4.0),
            gpus: [("GPU-a".into(), gpu)].into(),
            ..RunSample::default()
        },
        ..ContainerUsage::default()
    }
}

fn record(figures: &RunFigures) -> RunRecord {
    let subject = ContainerRef { container_id: "3f2a1b4c5d6e7f".into(), ..ContainerRef::default() };
    RunRecord::of_figures(subject, figures)
}

#[test]
fn peaks_are_the_highest_and_means_those_of_all_samples() {
    let mut figures = RunFigures::default();
    for (at, bytes) in [(0.0, GIB), (1.0, 3 * GIB), (2.0, 2 * GIB)] {
        figures.record(at, &container(&[]), &usage(at, bytes, bytes / 2));
    }
    let run = record(&figures);
    assert_eq!((run.samples, run.limit_bytes), (3, Some(8 * GIB)));
    assert_eq!((run.unreclaimable_peak_bytes, run.unreclaimable_mean_bytes), (Some(3 * GIB), Some(2 * GIB)));
    assert_eq!((run.cpu_mean_cores, run.steps_per_second), (Some(2.0), Some(4.0)));
    let gpu = &run.gpus["GPU-a"];
    assert_eq!((gpu.peak_bytes, gpu.mean_bytes), (Some(3 * GIB / 2), Some(GIB)));
    assert_eq!(gpu.utilization_mean, Some(0.5));
}

#[test]
fn counter_that_begins_again_is_no_negative_speed() {
    let mut growth = Growth::default();
    for (at, value) in [(0.0, 100.0), (10.0, 150.0), (20.0, 0.0), (30.0, 50.0)] {
        growth.record(at, Some(value));
    }
    assert_eq!(growth.rate(), Some(5.0));
}

#[test]
fn figures_continue_after_they_were_stored() {
    let (mut whole, mut stored) = (RunFigures::default(), RunFigures::default());
    for second in 0..100 {
        let (at, bytes) = (f64::from(second), GIB + second as u64);
        whole.record(at, &container(&[("batch_size", "32")]), &usage(at, bytes, bytes));
        stored.record(at, &container(&[("batch_size", "32")]), &usage(at, bytes, bytes));
        stored = serde_json::from_str(&serde_json::to_string(&stored).unwrap()).unwrap();
    }
    assert_eq!(record(&whole), record(&stored));
}

#[test]
fn course_is_bounded_and_evenly_spaced() {
    let mut figures = RunFigures::default();
    for second in 0..100_000 {
        figures.record(f64::from(second), &container(&[]), &usage(f64::from(second), 1, 1));
    }
    let course = record(&figures).course;
    assert!((MAX_POINTS / 2..=MAX_POINTS).contains(&course.len()), "{}", course.len());
    let gaps: Vec<f64> = course.windows(2).map(|pair| pair[1].at - pair[0].at).collect();
    assert!(gaps.iter().all(|gap| *gap == gaps[0]), "{gaps:?}");
    assert_eq!(course[0].at, 0.0);
}

#[test]
fn first_value_of_a_setting_stays_and_groups_have_an_order() {
    let mut figures = RunFigures::default();
    figures.record(0.0, &container(&[]), &usage(0.0, 1, 1));
    figures.record(1.0, &container(&[("batch_size", "32")]), &usage(1.0, 1, 1));
    figures.record(2.0, &container(&[("batch_size", "64")]), &usage(2.0, 1, 1));
    assert_eq!(record(&figures).settings, [("batch_size".into(), "32".into())].into());
    let mut reporting = usage(3.0, 1, 1);
    reporting.run.settings = [("batch_size".into(), "96".into()), ("lr".into(), "0.1".into())].into();
    figures.record(3.0, &container(&[("batch_size", "32")]), &reporting);
    let reported = [("batch_size".into(), "96".into()), ("lr".into(), "0.1".into())];
    assert_eq!(record(&figures).settings, reported.into(), "the program knows best");
    let mut compose = container(&[]);
    assert_eq!(&*group(&compose), "train");
    (compose.compose_project, compose.compose_service) = ("vision".into(), "trainer".into());
    assert_eq!(&*group(&compose), "vision/trainer");
    compose.settings = vec![("group".into(), "sweep".into())];
    assert_eq!(&*group(&compose), "sweep");
}

#[test]
fn resident_memory_of_processes_has_no_sum() {
    let process = |pid, rss_bytes, pss_bytes| ProcessUsage {
        pid,
        ppid: 1,
        comm: "python".into(),
        role: crate::attribute::Role::DataloaderWorker,
        python: true,
        rss_bytes,
        pss_bytes,
    };
    let mut figures = RunFigures::default();
    let processes = vec![process(1, 5, Some(2)), process(2, 7, Some(4))];
    figures.record(0.0, &container(&[]), &ContainerUsage { processes, ..usage(0.0, 1, 1) });
    figures.record(
        1.0,
        &container(&[]),
        &ContainerUsage { processes: vec![process(1, 6, None)], ..usage(1.0, 1, 1) },
    );
    let workers =
        RolePeak { processes: 2, process_rss_bytes: 7, pss_bytes: Some(6), process_pss_bytes: Some(3) };
    assert_eq!(record(&figures).roles["dataloader_worker"], workers);
}

#[test]
fn names_that_match_and_names_that_are_near() {
    let mut run = record(&RunFigures { group: "vision/trainer".into(), ..RunFigures::default() });
    run.subject.name.container_name = "train-1".into();
    for wanted in ["train-1", "vision/trainer", "3f2a1b4c5d6e", "3f2a", &*run.run.clone()] {
        assert!(run.matches(wanted), "{wanted}");
    }
    for wanted in ["train", "3f2", "vision", ""] {
        assert!(!run.matches(wanted), "{wanted}");
    }
    assert_eq!(
        nearest_names(&[run], "trian-1"),
        "; the nearest known names are \"train-1\", \"vision/trainer\""
    );
    assert_eq!(nearest_names(&[], "train"), "; no run is recorded yet");
}
