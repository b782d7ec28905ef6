use super::names::{NameKind, check_unambiguous, nearest_names};
use super::*;
use crate::config::GROUP_SETTING;
use crate::discover::{Identity, Pod};
use crate::events::UsageSample;
use crate::runs::sample::{ReportingRank, RunSample};
use crate::runs::usage::ProcessUsage;

const GIB: u64 = 1 << 30;

fn container(settings: &[(&str, &str)]) -> Container {
    let settings = settings.iter().map(|(name, value)| ((*name).into(), (*value).into()));
    let spec = ContainerSpec { settings: settings.collect(), ..ContainerSpec::default() };
    Container { spec: Arc::new(spec), ..Container::clone(&Container::in_cgroup("train", "/train")) }
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

/// Returns a timestamp this many seconds after a fixed one, which is a whole second.
fn at(seconds: f64) -> Timestamp {
    static BEGIN: std::sync::LazyLock<Timestamp> = std::sync::LazyLock::new(|| {
        let now = Timestamp::now();
        now.moved_to(now.unix_whole_seconds() as f64)
    });
    BEGIN.plus(std::time::Duration::from_secs_f64(seconds))
}

fn record(figures: &RunFigures) -> RunRecord {
    let subject = ContainerRef { container_id: "3f2a1b4c5d6e7f".into(), ..ContainerRef::default() };
    RunRecord::of_figures(subject, figures)
}

#[test]
fn peaks_are_the_highest_and_means_those_of_all_samples() {
    let mut figures = RunFigures::default();
    for (second, bytes) in [(0.0, GIB), (1.0, 3 * GIB), (2.0, 2 * GIB)] {
        figures.record(at(second), None, &container(&[]), &usage(second, bytes, bytes / 2));
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
fn speed_of_a_training_is_that_until_its_last_step() {
    let mut growth = Growth::default();
    for second in 0..100 {
        growth.record_progress(f64::from(second), Some(f64::from(second.min(10))), 0);
    }
    assert_eq!(growth.rate(), Some(1.0));
    growth.record_progress(100.0, Some(55.0), 0);
    assert_eq!(growth.rate(), Some(0.55), "it had not ended");
    // a step of three hours
    let mut growth = Growth::default();
    for minute in 0..=360 {
        growth.record_progress(60.0 * f64::from(minute), Some(f64::from(minute / 180)), 0);
    }
    assert_eq!(growth.rate(), Some(2.0 / 21_600.0));
}

/// After a restart of memledger they return one by one, each with all that it has counted.
#[test]
fn ranks_that_return_are_no_growth() {
    let mut growth = Growth::default();
    let cycles = [
        (0.0, 800.0, 8),
        (10.0, 880.0, 8),
        (20.0, 110.0, 1),
        (21.0, 550.0, 5),
        (22.0, 888.0, 8),
        (32.0, 968.0, 8),
    ];
    for (at, samples, ranks) in cycles {
        growth.record_progress(at, Some(samples), ranks);
    }
    assert_eq!(growth.rate(), Some(8.0));
}

#[test]
fn figures_continue_after_they_were_stored() {
    let (mut whole, mut stored) = (RunFigures::default(), RunFigures::default());
    for second in 1..100 {
        let (second, bytes) = (f64::from(second), GIB + second as u64);
        let (container, last) = (container(&[("batch_size", "32")]), Some(at(second - 1.0)));
        whole.record(at(second), last, &container, &usage(second, bytes, bytes));
        stored.record(at(second), last, &container, &usage(second, bytes, bytes));
        stored = serde_json::from_str(&serde_json::to_string(&stored).unwrap()).unwrap();
    }
    assert_eq!(record(&whole), record(&stored));
}

#[test]
fn timeline_is_bounded_and_evenly_spaced() {
    let mut figures = RunFigures::default();
    for second in 0..100_000 {
        figures.record(at(f64::from(second)), None, &container(&[]), &usage(f64::from(second), 1, 1));
    }
    let timeline = record(&figures).timeline;
    assert!((MAX_POINTS / 2..=MAX_POINTS).contains(&timeline.len()), "{}", timeline.len());
    let gaps: Vec<f64> = timeline.windows(2).map(|pair| pair[1].at - pair[0].at).collect();
    assert!(gaps.iter().all(|gap| *gap == gaps[0]), "{gaps:?}");
    assert_eq!(timeline[0].at, at(0.0).unix_seconds());
}

#[test]
fn first_value_of_a_container_setting_is_kept() {
    let mut figures = RunFigures::default();
    figures.record(at(0.0), None, &container(&[]), &usage(0.0, 1, 1));
    assert!(
        figures.record(at(1.0), None, &container(&[("batch_size", "32")]), &usage(1.0, 1, 1)),
        "it is new"
    );
    assert!(!figures.record(at(2.0), None, &container(&[("batch_size", "64")]), &usage(2.0, 1, 1)));
    assert_eq!(record(&figures).settings, [("batch_size".into(), "32".into())].into());
}

#[test]
fn reported_settings_are_those_of_the_first_process_of_the_lowest_rank() {
    let mut figures = RunFigures::default();
    let mut report = |rank, start_ticks, settings: &[(&str, &str)]| {
        let mut usage = usage(0.0, 1, 1);
        usage.run.settings = settings.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        usage.run.settings_of = Some(ReportingRank { rank, start_ticks, pid: 7 });
        figures.record(at(0.0), None, &container(&[("batch_size", "32"), ("accum", "4")]), &usage);
        let settings = record(&figures).settings;
        settings.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
    };
    let third = [("batch_size", "96"), ("rank", "3")];
    assert_eq!(report(3, 100, &third), "accum=4 batch_size=96 rank=3", "the program precedes the container");
    let first = [("batch_size", "96"), ("rank", "0"), ("group", "mine")];
    assert_eq!(report(0, 105, &first), "accum=4 batch_size=96 rank=0", "a program sets no group");
    assert_eq!(report(3, 100, &third), "accum=4 batch_size=96 rank=0");
    let evaluation = [("batch_size", "256"), ("split", "test")];
    assert_eq!(report(0, 900, &evaluation), "accum=4 batch_size=96 rank=0", "it started later");
    let more = [("batch_size", "96"), ("lr", "0.1"), ("rank", "0")];
    assert_eq!(report(0, 105, &more), "accum=4 batch_size=96 lr=0.1 rank=0");
}

fn spec_of_compose(project: &str, service: &str) -> ContainerSpec {
    ContainerSpec {
        compose_project: project.into(),
        compose_service: service.into(),
        ..ContainerSpec::default()
    }
}

#[test]
fn group_of_an_event_precedes_the_short_id_of_a_container_without_a_name() {
    let mut unnamed = container(&[]);
    unnamed.identity = Identity::named(unnamed.id.short());
    let id = unnamed.id.clone();
    let group_of = |events: &dyn Fn(&mut RunFigures)| {
        let mut figures = RunFigures::default();
        events(&mut figures);
        figures.group.to_string()
    };
    let cycle = |figures: &mut RunFigures| {
        figures.record(at(0.0), None, &unnamed, &usage(0.0, 1, 1));
    };
    let before = |figures: &mut RunFigures| {
        figures.complete(&id, &spec_of_compose("vision", "trainer"));
        cycle(figures);
    };
    assert_eq!(group_of(&before), "vision/trainer");
    let after = |figures: &mut RunFigures| {
        cycle(figures);
        figures.complete(&id, &spec_of_compose("vision", "trainer"));
    };
    assert_eq!(group_of(&after), "vision/trainer");
    let named = |figures: &mut RunFigures| {
        cycle(figures);
        figures.complete(&id, &ContainerSpec::default());
    };
    assert_eq!(group_of(&named), "", "its name");
    let set = |figures: &mut RunFigures| {
        figures.complete(&id, &spec_of_compose("vision", "trainer"));
        let settings = vec![(GROUP_SETTING.into(), "sweep".into())];
        figures.complete(&id, &ContainerSpec { settings, ..ContainerSpec::default() });
    };
    assert_eq!(group_of(&set), "sweep", "an inspect has more than the event");
}

#[test]
fn groups_have_an_order_and_stay_while_the_runtime_is_away() {
    let mut compose = container(&[]);
    assert_eq!(&*compose.group(), "train");
    compose.spec = Arc::new(spec_of_compose("vision", "trainer"));
    assert_eq!(&*compose.group(), "vision/trainer");
    let mut in_pod = Container { identity: Identity::named("pytorch"), ..container(&[]) };
    (in_pod.identity.k8s_namespace, in_pod.identity.k8s_pod) = ("team".into(), "train-0".into());
    assert_eq!(&*in_pod.group(), "team/train-0/pytorch");
    let pod = Pod { job: "sweep-7".into(), ..Pod::default() };
    Arc::make_mut(&mut in_pod.spec).pod = Some(Arc::new(pod));
    assert_eq!(&*in_pod.group(), "team/sweep-7/pytorch");
    for labelled in [&mut compose, &mut in_pod] {
        Arc::make_mut(&mut labelled.spec).settings = vec![("group".into(), "sweep".into())];
        assert_eq!(&*labelled.group(), "sweep");
    }

    let mut figures = RunFigures::default();
    let of = |run: &str| ContainerUsage { run_id: run.into(), ..usage(0.0, 1, 1) };
    figures.record(at(0.0), None, &compose, &of("train-20261123T120000Z"));
    let mut unnamed = container(&[]);
    unnamed.identity = Identity::named(unnamed.id.short());
    figures.record(at(1.0), None, &unnamed, &of("train"));
    let run = record(&figures);
    assert_eq!((&*run.group, &*run.run), ("sweep", "train-20261123T120000Z"));

    // without a runtime the start is known when its processes were read
    let mut figures = RunFigures::default();
    for run_id in ["train", "train-20261123T120000Z"] {
        figures.record(at(0.0), None, &unnamed, &of(run_id));
    }
    assert_eq!(&*record(&figures).run, "train-20261123T120000Z");
}

#[test]
fn only_time_between_cycles_of_one_memledger_is_observed() {
    let mut figures = RunFigures::default();
    // memledger was stopped for an hour
    for (last, second) in [(None, 0.0), (Some(0.0), 1.0), (None, 3600.0), (Some(3600.0), 3602.0)] {
        figures.record(at(second), last.map(at), &container(&[]), &usage(second, 1, 1));
    }
    // one cycle could not read the memory
    figures.record(at(3603.0), Some(at(3602.0)), &container(&[]), &ContainerUsage::default());
    figures.record(at(3604.0), Some(at(3603.0)), &container(&[]), &usage(3604.0, 1, 1));
    assert_eq!(record(&figures).observed_seconds, Some(3.0));
}

#[test]
fn resident_memory_of_processes_has_no_sum() {
    let process = |pid, rss_bytes, pss_bytes| ProcessUsage {
        pid,
        ppid: 1,
        comm: "python".into(),
        role: Role::DataloaderWorker,
        python: true,
        memory: crate::collect::process::ResidentMemory { rss_bytes, anon_bytes: rss_bytes - 1 },
        pss_bytes,
        program: None,
    };
    let mut figures = RunFigures::default();
    let processes = vec![process(1, 5, Some(2)), process(2, 7, Some(4))];
    figures.record(at(0.0), None, &container(&[]), &ContainerUsage { processes, ..usage(0.0, 1, 1) });
    figures.record(
        at(1.0),
        None,
        &container(&[]),
        &ContainerUsage { processes: vec![process(1, 6, None)], ..usage(1.0, 1, 1) },
    );
    let workers = RolePeak {
        processes: 2,
        process_rss_bytes: 7,
        process_anon_bytes: Some(6),
        pss_bytes: Some(6),
        process_pss_bytes: Some(3),
    };
    assert_eq!(record(&figures).roles[&Role::DataloaderWorker], workers);
}

#[test]
fn names_that_match_and_names_that_are_near() {
    let mut run = record(&RunFigures { group: "vision/trainer".into(), ..RunFigures::default() });
    run.subject.identity.name = "train-1".into();
    for (wanted, kind) in [
        (&*run.run.clone(), Some(NameKind::Run)),
        ("vision/trainer", Some(NameKind::Group)),
        ("train-1", Some(NameKind::Container)),
        ("3f2a1b4c5d6e7", Some(NameKind::Id)),
        ("3f2a", Some(NameKind::Id)),
        ("train", None),
        ("3f2", None),
        ("vision", None),
        ("", None),
    ] {
        assert_eq!(run.name_kind(wanted), kind, "{wanted}");
    }
    assert_eq!(
        nearest_names(&[run], "trian-1"),
        "; the nearest known names are \"train-1\", \"vision/trainer\", \"3f2a1b4c5d6e\""
    );
    assert_eq!(
        nearest_names(&[], "train"),
        "; no run is recorded yet. `memledger serve` records the runs of containers that run while it does"
    );
}

#[test]
fn gpu_memory_and_errors_before_the_end_of_a_search_for_a_batch_size_are_not_of_the_run() {
    let mut figures = RunFigures::default();
    let mut cycle = |second: f64, bytes: u64, peak: u64, ooms: u64, forgotten: Option<f64>| {
        let mut usage = usage(second, GIB, bytes);
        usage.gpu_peaks = vec![("GPU-a".into(), peak)];
        usage.run.peaks_forgotten = forgotten.map(at);
        usage.run.torch_ooms = Some(ooms as f64);
        let gpu = usage.run.gpus.get_mut("GPU-a").unwrap();
        gpu.torch_allocated_bytes = Some(bytes as f64);
        figures.record(at(second), Some(at((second - 5.0).max(0.0))), &container(&[]), &usage);
        let record = record(&figures);
        let gpu = record.gpus.get("GPU-a").cloned().unwrap_or_default();
        (gpu.peak_bytes, gpu.torch_allocated_peak_bytes, record.torch_ooms)
    };
    cycle(0.0, GIB, GIB, 0, None);
    // a program that ends by an error of its search was in it
    assert_eq!(cycle(5.0, 7 * GIB, 9 * GIB, 2, None), (Some(9 * GIB), Some(7 * GIB), Some(2)));
    assert_eq!(cycle(10.0, 2 * GIB, 10 * GIB, 3, Some(6.0)), (None, None, None));
    assert_eq!(cycle(15.0, 3 * GIB, 10 * GIB, 3, Some(6.0)), (Some(3 * GIB), Some(3 * GIB), Some(0)));
    // more than the search used
    assert_eq!(cycle(20.0, 3 * GIB, 11 * GIB, 4, Some(6.0)), (Some(11 * GIB), Some(3 * GIB), Some(1)));
}

#[test]
fn container_name_of_several_groups_is_ambiguous() {
    let of = |group: &str| {
        let mut run = record(&RunFigures { group: group.into(), ..RunFigures::default() });
        run.subject.identity.name = "trainer".into();
        run
    };
    let runs = [of("team-a/job/trainer"), of("team-b/job/trainer"), of("team-b/job/trainer")];
    assert_eq!(
        check_unambiguous(&runs, "trainer").unwrap_err(),
        "\"trainer\" is the name of containers of 2 groups; name one: \"team-a/job/trainer\", \"team-b/job/trainer\""
    );
    assert_eq!(check_unambiguous(&runs[1..], "trainer"), Ok(()));
    assert_eq!(check_unambiguous(&runs[1..], "team-b/job/trainer"), Ok(()));
}

#[test]
fn others_hold_what_is_neither_available_nor_of_the_run() {
    let mut figures = RunFigures::default();
    let mut at_second = |second: f64, own: u64, available: u64| {
        let usage = usage(second, own, 1);
        figures.record_host(Some((32 * GIB, available)), &usage);
        figures.record(at(second), None, &container(&[]), &usage);
        let run = record(&figures);
        (run.host_total_bytes, run.host_others_peak_bytes)
    };
    assert_eq!(at_second(0.0, GIB, 25 * GIB), (Some(32 * GIB), Some(6 * GIB)));
    assert_eq!(at_second(1.0, 10 * GIB, 18 * GIB), (Some(32 * GIB), Some(6 * GIB)), "the most counts");
    assert_eq!(at_second(2.0, 10 * GIB, 15 * GIB), (Some(32 * GIB), Some(7 * GIB)));
    figures.record_host(None, &usage(3.0, 1, 1));
    assert_eq!(record(&figures).host_others_peak_bytes, Some(7 * GIB));
}

#[test]
fn first_memory_of_a_gpu_is_stored_at_once() {
    let mut figures = RunFigures::default();
    let mut is_stored =
        |second: f64, gpu| figures.record(at(second), None, &container(&[]), &usage(second, 1, gpu));
    assert!(is_stored(0.0, 0), "the first sample");
    assert!(!is_stored(1.0, 0));
    assert!(is_stored(2.0, GIB), "another container may be about to check who holds it");
    assert!(!is_stored(3.0, 2 * GIB));
}

#[test]
fn arguments_of_the_trainer_are_settings_that_are_not_known_otherwise() {
    let mut figures = RunFigures::default();
    let mut usage = usage(0.0, GIB, GIB);
    let pair = |(name, value): (&str, &str)| (name.into(), value.into());
    let arguments = [("batch_size", "32"), ("num_workers", "4"), ("max_length", "512")].map(pair);
    usage.run.arguments = Some(((1, 7), arguments.into()));
    usage.run.settings = [("per_device_train_batch_size", "8")].map(pair).into();
    usage.run.settings_of = Some(ReportingRank { rank: 0, start_ticks: 1, pid: 7 });
    figures.record(at(0.0), None, &container(&[("num_workers", "2")]), &usage);
    let found: Vec<_> =
        record(&figures).settings.into_iter().map(|(name, value)| format!("{name}={value}")).collect();
    assert_eq!(found, ["max_length=512", "num_workers=2", "per_device_train_batch_size=8"]);
    assert_eq!(figures.settings_over(&[pair(("num_workers", "2"))]).len(), 3);
}
