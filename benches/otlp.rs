//! Compares the cost of an OTLP export with a scrape: the same snapshot as requests and as Prometheus text.
//!
//! Snapshots of 3,000 and 20,000 points with the labels of real containers are made in memory, to measure the work of the
//! thread `otlp` without the network and the endpoint. `make bench` writes this part of docs/performance.md.

mod document;

use std::alloc::{GlobalAlloc, Layout, System};
use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use memledger::catalog::{self, Family};
use memledger::clock::Timestamp;
use memledger::discover::{Container, ContainerId, ContainerSpec, Identity, RuntimeKind};
use memledger::export::prometheus;
use memledger::otlp::{CounterStates, MetricBatches, Origins, ResourceInfo, resource};
use memledger::series::Series;
use memledger::snapshot::{Dropped, Snapshot, finish};
use tracing_subscriber::layer::SubscriberExt;

/// Counts the allocated bytes, now and at the peak.
struct CountingAllocator;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const SIZES: [usize; 2] = [3_000, 20_000];
const ROUNDS: usize = 31;
/// Series per container.
const SERIES_PER_CONTAINER: usize = 20;

fn container(number: usize) -> Arc<Container> {
    let identity = Identity {
        k8s_namespace: "training".into(),
        k8s_pod: format!("piper-train-{number}").into(),
        name: format!("piper1-gpl-train-{number}").into(),
    };
    Arc::new(Container {
        id: ContainerId::new(&format!("{number:064x}")),
        runtime: RuntimeKind::Docker,
        spec: Arc::new(ContainerSpec { image: "piper:1".into(), ..ContainerSpec::default() }),
        started: Some(1.0),
        ..Container::known_by_name(identity)
    })
}

fn snapshot(points: usize) -> Snapshot {
    const GAUGES: [Family<catalog::Container, 0>; 4] = [
        catalog::CONTAINER_MEMORY_USAGE,
        catalog::CONTAINER_MEMORY_WORKING_SET,
        catalog::CONTAINER_MEMORY_RSS,
        catalog::CONTAINER_MEMORY_PEAK,
    ];
    let containers: Vec<_> = (0..points / SERIES_PER_CONTAINER).map(container).collect();
    let mut series = Series::default();
    for number in 0..containers.len() as u32 {
        for family in GAUGES {
            series.container(family, number, [], f64::from(number) * 4096.0);
        }
        for component in ["anon", "file", "shmem", "kernel"] {
            series.container(catalog::CONTAINER_MEMORY_COMPONENT, number, [component.into()], 1e9);
        }
        for (victim, scope) in
            [("main", "container"), ("main", "host"), ("child", "container"), ("child", "host")]
        {
            series.container(catalog::CONTAINER_OOM_KILLS, number, [victim.into(), scope.into()], 1.0);
        }
        for reason in [
            "completed",
            "oom_container",
            "oom_host",
            "stopped",
            "killed",
            "signal",
            "error",
            "host_restart",
            "unknown",
        ] {
            series.container(catalog::CONTAINER_EXITS, number, [reason.into()], 0.0);
        }
    }
    finish(&mut series, &mut Dropped::new());
    let running = containers.len();
    Snapshot { containers, running, ..Snapshot::of_series(Timestamp::now(), series) }
}

/// Returns the median time in milliseconds, and the most bytes that a run allocated.
fn measure(mut work: impl FnMut()) -> (f64, usize) {
    let mut times = vec![];
    let mut peak = 0;
    for _ in 0..ROUNDS {
        let before = NOW.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        #[allow(clippy::disallowed_methods)]
        let began = Instant::now();
        work();
        times.push(began.elapsed().as_secs_f64() * 1e3);
        peak = peak.max(PEAK.load(Ordering::Relaxed) - before);
    }
    times.sort_by(f64::total_cmp);
    (times[ROUNDS / 2], peak)
}

fn compress(body: &[u8]) -> usize {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(body).expect("memory can be written");
    encoder.finish().expect("memory can be written").len()
}

fn row(text: &mut String, points: usize) {
    let snapshot = snapshot(points);
    let resource = resource(
        &ResourceInfo {
            name: "gpu-7".into(),
            instance: "gpu-7".into(),
            port: Some(10853),
            ..ResourceInfo::default()
        },
        &[],
    );
    let mut counters = CounterStates::default();
    let (mut requests, mut bytes, mut small) = (0, 0, 0);
    let mut push = |gzip: bool| {
        (requests, bytes, small) = (0, 0, 0);
        let mut all = MetricBatches::new(&snapshot, &resource, Origins { memledger: 1, boot: 1, ledger: 1 });
        while let Some(request) = all.next(&counters) {
            counters.commit(&request.counters);
            (requests, bytes) = (requests + 1, bytes + request.body.len());
            small += if gzip { compress(&request.body) } else { 0 };
        }
    };
    push(false); // sets the counters' state, as after the first export
    let (plain, peak) = measure(|| push(false));
    let (gzip, _) = measure(|| push(true));
    let (render, text_peak) = measure(|| drop(prometheus::render(&snapshot)));
    let kib = |bytes: usize| bytes / 1024;
    let _ = writeln!(
        text,
        "| {} | {requests} | {plain:.1} | {render:.1} | {:.2} | {:.2} | {} | {} | {} | {} |",
        snapshot.series.rows().len(),
        plain / render,
        gzip / render,
        kib(bytes),
        kib(small),
        kib(peak),
        kib(text_peak),
    );
}

/// Spans of one cycle: itself, and its parts.
const SPANS: usize = 13;
const CYCLES: usize = 100;

fn cycles() {
    for _ in 0..CYCLES {
        let _cycle = tracing::info_span!(target: "memledger::bench", "cycle").entered();
        for part in 1..SPANS {
            tracing::info_span!(target: "memledger::bench", "collect", collector = "host", part)
                .in_scope(|| {});
        }
    }
}

/// Measures the spans of a cycle without traces, and with a share of them recorded; and a queue that is full.
fn traces(text: &mut String) {
    let per_cycle = |(ms, _): (f64, usize)| ms * 1e3 / CYCLES as f64;
    let recorded = |ratio| {
        let before = NOW.load(Ordering::Relaxed);
        let (layer, queue) = memledger::otlp::traces::layer(ratio);
        let subscriber = tracing_subscriber::registry().with(layer);
        let time = tracing::subscriber::with_default(subscriber, || per_cycle(measure(cycles)));
        let peak = NOW.load(Ordering::Relaxed).saturating_sub(before);
        drop(queue);
        (time, peak)
    };
    let off = per_cycle(measure(cycles));
    let (none, all) = (recorded(0.0), recorded(1.0));
    let _ = writeln!(
        text,
        "\nThe {SPANS} spans of a cycle: {off:.2} us without `--otlp.traces`, {:.1} us with a cycle that is not recorded, {:.1} us with one \
         that is. The queue, full, and the recorder hold {} KiB; without `--otlp.traces` there is neither.",
        none.0,
        all.0,
        all.1 / 1024,
    );
}

fn main() -> std::io::Result<()> {
    if document::is_test_listing() {
        return Ok(());
    }
    let mut text = format!(
        "{}\n\nThe same snapshot as OTLP requests, made one after the other, and as the text of `/metrics`; medians of \
         {ROUNDS} runs in one process. *Held*: the most memory that was in use at one time beyond the snapshot. A push is made \
         once per `--otlp.interval`, on a thread of its own.\n\n\
         | points | requests | push ms | render ms | push / render | with gzip / render | KiB sent | with gzip | held KiB | held by the text KiB |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
        document::HEADINGS[6]
    );
    SIZES.iter().for_each(|points| row(&mut text, *points));
    traces(&mut text);
    document::write(&text)
}
