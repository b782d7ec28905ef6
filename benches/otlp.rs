//! What a push over OTLP costs beside a scrape: the same snapshot as requests and as Prometheus text.
//!
//! Snapshots of 3,000 and 20,000 points with the labels of real containers, made in memory: it is the work on the thread
//! `otlp` that is measured, and neither the network nor the endpoint. `make bench` writes this part of
//! docs/performance.md.

mod document;

use std::alloc::{GlobalAlloc, Layout, System};
use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use memledger::catalog::{self, Family};
use memledger::clock::Moment;
use memledger::discover::{Container, ContainerId, Identity};
use memledger::export::otlp::{Counters, Host, Origins, Points, resource};
use memledger::export::prometheus;
use memledger::series::Series;
use memledger::snapshot::{Dropped, Snapshot, finish};

/// Counts what is allocated now, and the most that ever was.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(now, Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SIZES: [usize; 2] = [3_000, 20_000];
const ROUNDS: usize = 31;
/// Series of one container here.
const EACH: usize = 20;

fn container(number: usize) -> Arc<Container> {
    Arc::new(Container {
        id: ContainerId::new(&format!("{number:064x}")),
        identity: Identity {
            k8s_namespace: "training".into(),
            k8s_pod: format!("piper-train-{number}").into(),
            name: format!("piper1-gpl-train-{number}").into(),
        },
        runtime: "docker",
        image: "piper:1".into(),
        compose_project: "".into(),
        compose_service: "".into(),
        settings: vec![],
        started: Some(1.0),
        cgroup: None,
        nested: false,
        pod: None,
        gpus: Arc::default(),
    })
}

fn snapshot(points: usize) -> Snapshot {
    const GAUGES: [Family<catalog::Container, 0>; 4] = [
        catalog::CONTAINER_MEMORY_USAGE,
        catalog::CONTAINER_MEMORY_WORKING_SET,
        catalog::CONTAINER_MEMORY_RSS,
        catalog::CONTAINER_MEMORY_PEAK,
    ];
    let containers: Vec<_> = (0..points / EACH).map(container).collect();
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
        for reason in
            ["completed", "oom_container", "oom_host", "stopped", "killed", "signal", "error", "unknown"]
        {
            series.container(catalog::CONTAINER_EXITS, number, [reason.into()], 0.0);
        }
    }
    finish(&mut series, &mut Dropped::new());
    let running = containers.len();
    Snapshot { finished: Moment::now(), series, containers, running, gpus: vec![], processes: vec![] }
}

/// Median time in milliseconds, and the most bytes that one run held beyond what was there before.
fn measured(mut work: impl FnMut()) -> (f64, usize) {
    let mut times = vec![];
    let mut held = 0;
    for _ in 0..ROUNDS {
        let before = NOW.load(Ordering::Relaxed);
        MOST.store(before, Ordering::Relaxed);
        #[allow(clippy::disallowed_methods)]
        let began = Instant::now();
        work();
        times.push(began.elapsed().as_secs_f64() * 1e3);
        held = held.max(MOST.load(Ordering::Relaxed) - before);
    }
    times.sort_by(f64::total_cmp);
    (times[ROUNDS / 2], held)
}

fn compress(body: &[u8]) -> usize {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(body).expect("memory can be written");
    encoder.finish().expect("memory can be written").len()
}

fn row(text: &mut String, points: usize) {
    let snapshot = snapshot(points);
    let resource = resource(&Host { name: "gpu-7".into(), id: String::new(), port: Some(10853) }, &[]);
    let mut counters = Counters::new(false);
    let (mut requests, mut bytes, mut small) = (0, 0, 0);
    let mut push = |gzip: bool| {
        (requests, bytes, small) = (0, 0, 0);
        let mut all = Points::new(&snapshot, &resource, Origins { memledger: 1, boot: 1, ledger: 1 });
        while let Some(request) = all.next(&counters) {
            counters.taken(&request.counters);
            (requests, bytes) = (requests + 1, bytes + request.body.len());
            small += if gzip { compress(&request.body) } else { 0 };
        }
    };
    push(false); // the counters are known from now on, as they are after the first push
    let (plain, held) = measured(|| push(false));
    let (gzip, _) = measured(|| push(true));
    let (render, text_held) = measured(|| drop(prometheus::render(&snapshot)));
    let kib = |bytes: usize| bytes / 1024;
    let _ = writeln!(
        text,
        "| {} | {requests} | {plain:.1} | {render:.1} | {:.2} | {:.2} | {} | {} | {} | {} |",
        snapshot.series.rows().len(),
        plain / render,
        gzip / render,
        kib(bytes),
        kib(small),
        kib(held),
        kib(text_held),
    );
}

fn main() -> std::io::Result<()> {
    if document::is_only_asked() {
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
    document::write(&text)
}
