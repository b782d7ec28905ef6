//! A real Docker engine and real containers: their identity over their whole life, and their memory.
//!
//! The expected values come from the kernel's own files; `docker stats`, `top` and `inspect` are the tools that users compare with.

use std::collections::BTreeSet;
use std::time::Duration;

use jiff::Timestamp;

use crate::support::cgroups::is_v2;
use crate::support::docker::{
    Container, Engine, api, assert_no_series_twice, info, of, start_memledger, unique,
};
use crate::support::metrics::Labels;
use crate::support::{Memledger, Metrics, eventually};

const MIB: f64 = 1024.0 * 1024.0;
const USAGE: &str = "memledger_container_memory_usage_bytes";
const INFO: &str = "memledger_container_info";
const RUN_INFO: &str = "memledger_container_run_info";
const START: &str = "memledger_container_start_time_seconds";
const EXITS: &str = "memledger_container_exits_total";
const UP: &str = "memledger_runtime_up";
const DOCKER: &[(&str, &str)] = &[("runtime", "docker")];

/// A trainer that allocates 48 MiB, writes 20 MiB to /dev/shm, and forks four workers of 8 MiB each.
const TRAINER: &str = r#"
import mmap, os, signal
def hold(mib):
    block = mmap.mmap(-1, mib << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, mib << 20, 4096):
        block[at] = 1
    return block
kept = hold(48)
with open("/dev/shm/batch", "wb") as file:
    for _ in range(20):
        file.write(b"x" * (1 << 20))
r, w = os.pipe()
for worker in range(4):
    if os.fork() == 0:
        own = hold(8)
        os.write(w, b"r")
        while True:
            signal.pause()
for worker in range(4):
    os.read(r, 1)
print("ready", flush=True)
while True:
    signal.pause()
"#;

/// Waits until two equal readings of the kernel's value enclose an equal sample of memledger.
fn eventually_equal(
    memledger: &Memledger,
    what: &str,
    kernel: impl Fn() -> f64,
    ours: impl Fn(&Metrics) -> f64,
) {
    eventually(what, || {
        let before = kernel();
        let metrics = memledger.fresh_metrics();
        let (ours, after) = (ours(&metrics), kernel());
        // charges move between per-CPU stocks and the counter even in an idle container: then read again
        if before == after && ours == before { Ok(()) } else { Err(format!("{before} {ours} {after}")) }
    });
}

/// Reads a number from the container's own cgroup, by file name on v1 and v2.
fn kernel(container: &Container, v1: &str, v2: &str) -> f64 {
    let path = container.cgroup().join(if is_v2() { v2 } else { v1 });
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.trim().parse().expect("a number")
}

/// Reads a line of its `memory.stat`.
fn stat(container: &Container, v1: &str, v2: &str) -> f64 {
    let key = if is_v2() { v2 } else { v1 };
    let text = std::fs::read_to_string(container.cgroup().join("memory.stat")).expect("memory.stat");
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {key}: {text}")).parse().expect("a number")
}

fn usage(container: &Container) -> f64 {
    kernel(container, "memory.usage_in_bytes", "memory.current")
}

fn statm_rss(pids: &[u32]) -> f64 {
    let pages = |pid: &u32| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).expect("statm");
        text.split(' ').nth(1).expect("resident").parse::<f64>().expect("pages")
    };
    pids.iter().map(pages).sum::<f64>() * rustix::param::page_size() as f64
}

fn pss(pids: &[u32]) -> f64 {
    let kib = |pid: &u32| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("smaps_rollup");
        let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).expect("Pss");
        line.trim().trim_end_matches(" kB").parse::<f64>().expect("KiB")
    };
    pids.iter().map(kib).sum::<f64>() * 1024.0
}

/// Parses a size in the format of `docker stats`, such as `103.2MiB`.
fn docker_size(text: &str) -> f64 {
    let at = text.find(|c: char| c.is_ascii_alphabetic()).expect("a unit");
    let unit = match &text[at..] {
        "B" => 1.0,
        "KiB" => 1024.0,
        "MiB" => MIB,
        "GiB" => 1024.0 * MIB,
        other => panic!("unit {other}"),
    };
    text[..at].parse::<f64>().expect("a number") * unit
}

#[test]
fn training_container_matches_kernel_and_docker() {
    let Some(engine) = Engine::shared() else { return };
    let name = &*unique("piper1-gpl-train");
    let mut flags = vec!["--memory=512m", "--shm-size=128m"];
    for variable in [
        "BATCH_SIZE=32",
        "NUM_WORKERS=4",
        "NUM_DEVICES=1",
        "PRECISION=16-mixed",
        "ACCUM=2",
        "HF_TOKEN=hf_s3cr3t",
    ] {
        flags.extend(["-e", variable]);
    }
    flags.extend([
        "--label=com.docker.compose.project=piper1-gpl",
        "--label=com.docker.compose.service=train",
        "--label=team=vision",
        "--label=cost-center=42",
    ]);
    let container = engine.run_python(name, &flags, TRAINER);
    let memledger = start_memledger(&engine, &format!("^{name}$"), &["--pss.interval=1s"]);
    let me = of(name);

    let metrics = memledger.eventually("the values with longer intervals", |metrics| {
        metrics.try_value("memledger_container_shm_used_bytes", &me)?;
        metrics.try_value("memledger_container_process_pss_bytes", &[me[0], ("role", "trainer")])?;
        container.is_inspected(metrics)?;
        Ok(metrics.clone())
    });
    assert_identity(&metrics, &container);
    assert_memory(&memledger, &container);
    assert_processes(&memledger, &container);
    assert_docker_stats_agree(&memledger, &container);

    for path in ["/metrics", "/api/v1/containers", "/"] {
        let text = memledger.get(path).1;
        for secret in ["HF_TOKEN", "hf_s3cr3t", "hf_token"] {
            assert!(!text.contains(secret), "{secret} in {path}");
        }
    }
    assert!(!memledger.log().contains("hf_s3cr3t"));
}

fn assert_identity(metrics: &Metrics, container: &Container) {
    let name = container.name.as_str();
    let labels = |pairs: &[(&str, &str)]| -> Labels {
        pairs.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect()
    };
    let image = container.inspect("{{.Config.Image}}");
    let expected = labels(&[
        ("container_name", name),
        ("container_id", &container.id),
        ("image", &image),
        ("runtime", "docker"),
        ("compose_project", "piper1-gpl"),
        ("compose_service", "train"),
        ("cgroup_version", if is_v2() { "2" } else { "1" }),
    ]);
    assert_eq!(info(metrics, INFO, name).unwrap(), expected);
    let run = run_label(container);
    let expected = labels(&[
        ("container_name", name),
        ("run", &run),
        ("batch_size", "32"),
        ("num_workers", "4"),
        ("num_devices", "1"),
        ("precision", "16-mixed"),
        ("accum", "2"),
        ("group", "piper1-gpl/train"),
        ("settings", "accum=2 batch_size=32 num_devices=1 num_workers=4 precision=16-mixed"),
    ]);
    assert_eq!(info(metrics, RUN_INFO, name).unwrap(), expected);
    let expected = labels(&[
        ("container_name", name),
        ("owner", "vision"),
        ("label_team", "vision"),
        ("label_com_docker_compose_project", "piper1-gpl"),
    ]);
    assert_eq!(info(metrics, "memledger_container_owner_info", name).unwrap(), expected);
    // a Unix time in the text format has microseconds
    assert!((metrics.value(START, &of(name)) - seconds(container.started())).abs() < 1e-5);
    assert_eq!(metrics.value("memledger_container_memory_limit_bytes", &of(name)), 512.0 * MIB);
    assert_eq!(metrics.value("memledger_container_memory_effective_limit_bytes", &of(name)), 512.0 * MIB);
    assert_eq!(metrics.value("memledger_container_shm_size_bytes", &of(name)), 128.0 * MIB);
    assert_eq!(metrics.value("memledger_container_shm_used_bytes", &of(name)), 20.0 * MIB);
}

fn assert_memory(memledger: &Memledger, container: &Container) {
    let me = of(&container.name);
    let value = |family: &'static str| move |metrics: &Metrics| metrics.value(family, &me);
    let component = |part: &'static str| {
        move |metrics: &Metrics| {
            metrics.value("memledger_container_memory_component_bytes", &[me[0], ("component", part)])
        }
    };
    eventually_equal(memledger, "usage", || usage(container), value(USAGE));
    eventually_equal(
        memledger,
        "the working set",
        || usage(container) - stat(container, "total_inactive_file", "inactive_file"),
        value("memledger_container_memory_working_set_bytes"),
    );
    let anon = || stat(container, "total_rss", "anon");
    eventually_equal(memledger, "anonymous memory", anon, value("memledger_container_memory_rss_bytes"));
    eventually_equal(memledger, "the part anon", anon, component("anon"));
    eventually_equal(
        memledger,
        "the part shmem",
        || stat(container, "total_shmem", "shmem"),
        component("shmem"),
    );
    if !is_v2() {
        let kmem = || kernel(container, "memory.kmem.usage_in_bytes", "");
        eventually_equal(memledger, "the part kernel", kmem, component("kernel"));
        let allocated = || anon() + stat(container, "total_shmem", "") + kmem();
        eventually_equal(
            memledger,
            "unreclaimable",
            allocated,
            value("memledger_container_memory_unreclaimable_bytes"),
        );
    }
    let metrics = memledger.fresh_metrics();
    assert_eq!(component("shmem")(&metrics), 20.0 * MIB, "shared memory is the file in /dev/shm only");
    // the heaps of five interpreters are far below 40 MiB
    let allocated = (48.0 + 4.0 * 8.0) * MIB;
    let anon = component("anon")(&metrics);
    assert!(allocated <= anon && anon < allocated + 40.0 * MIB, "{anon}");
    // usage and components are in two files, read one after the other
    memledger.eventually("the components of its usage to sum to its usage", |metrics| {
        let parts = metrics.sum("memledger_container_memory_component_bytes", &me);
        let usage = metrics.value(USAGE, &me);
        if parts == usage { Ok(()) } else { Err(format!("{parts} {usage}")) }
    });
    let headroom = metrics.value("memledger_container_memory_headroom_bytes", &me);
    let unreclaimable = metrics.value("memledger_container_memory_unreclaimable_bytes", &me);
    assert_eq!(headroom, 512.0 * MIB - unreclaimable);
    let peak = metrics.value("memledger_container_memory_unreclaimable_peak_bytes", &me);
    assert!(peak >= unreclaimable, "{peak} {unreclaimable}");
}

fn assert_processes(memledger: &Memledger, container: &Container) {
    let me = of(&container.name);
    let main = container.pid();
    let pids = container.pids();
    assert_eq!(pids.len(), 5, "{pids:?}");
    let entry = api(memledger, &container.name).unwrap();
    let processes = entry["processes"].as_array().expect("a list");
    let mut shown: Vec<u32> = processes.iter().map(|p| p["pid"].as_u64().expect("a pid") as u32).collect();
    shown.sort_unstable();
    assert_eq!(shown, pids, "as docker top lists them");
    for process in processes {
        let role = if process["pid"] == main { "trainer" } else { "worker" };
        assert_eq!(process["role"], role, "{process}");
    }
    let workers: Vec<u32> = pids.iter().copied().filter(|pid| *pid != main).collect();
    for (role, pids) in [("trainer", vec![main]), ("worker", workers)] {
        let labels = [me[0], ("role", role)];
        let metrics = memledger.fresh_metrics();
        assert_eq!(metrics.value("memledger_container_processes", &labels), pids.len() as f64);
        let rss = |metrics: &Metrics| metrics.value("memledger_container_process_rss_bytes", &labels);
        eventually_equal(memledger, "resident memory", || statm_rss(&pids), rss);
        // Pages of the interpreter's file are shared with every Python of the host, and other tests start and end some: that
        // changes a process's PSS by its file pages, about 6 MiB, at most.
        let share = metrics.value("memledger_container_process_pss_bytes", &labels);
        let tolerance = pids.len() as f64 * 6.0 * MIB;
        assert!((share - pss(&pids)).abs() < tolerance, "{role}: {share} {}", pss(&pids));
        // after four forks, each process has a fifth of the parent's 48 MiB; 8 MiB are private to a worker
        let own = if role == "trainer" { 48.0 / 5.0 } else { 4.0 * (8.0 + 48.0 / 5.0) } * MIB;
        assert!(own <= share && share < own + pids.len() as f64 * 12.0 * MIB, "{role}: {share} {own}");
    }
}

fn assert_docker_stats_agree(memledger: &Memledger, container: &Container) {
    eventually("docker stats agrees", || {
        let text = container.docker(&["stats", "--no-stream", "--format", "{{.MemUsage}}"]);
        let (used, limit) = text.split_once(" / ").expect("MEM USAGE / LIMIT");
        assert_eq!(docker_size(limit), 512.0 * MIB);
        let ours =
            memledger.metrics().value("memledger_container_memory_working_set_bytes", &of(&container.name));
        // docker prints four digits (0.05 MiB here), and the kernel charges in batches of 64 pages per CPU
        let cpus = std::thread::available_parallelism().expect("CPUs").get() as f64;
        let tolerance = 0.05 * MIB + cpus * 64.0 * rustix::param::page_size() as f64;
        let off = (docker_size(used) - ours).abs();
        if off <= tolerance { Ok(()) } else { Err(format!("{text}, ours {ours}")) }
    });
}

fn seconds(time: Timestamp) -> f64 {
    time.as_nanosecond() as f64 / 1e9
}

/// Returns the label `run` of a container's current run.
fn run_label(container: &Container) -> String {
    format!("{}-{}", container.short_id(), container.started().strftime("%Y%m%dT%H%M%SZ"))
}

/// In cycles and not in seconds: a busy machine makes cycles, the engine and this test slower alike.
#[test]
fn started_container_has_its_name_soon() {
    let Some(engine) = Engine::shared() else { return };
    let container = engine.create(&unique("quick"), &[], &["sleep", "1000"]);
    let include = format!("^({}|{})$", container.name, container.short_id());
    let memledger = start_memledger(&engine, &include, &["--sample.interval=1s"]);
    memledger.eventually("the engine is connected", |metrics| match metrics.try_value(UP, DOCKER)? {
        1.0 => Ok(()),
        other => Err(format!("{other}")),
    });
    // snapshots without its name; the first one may be from before the start
    let mut nameless = BTreeSet::new();
    let began = memledger::clock::Timestamp::now();
    std::thread::scope(|scope| {
        let start = scope.spawn(|| container.docker(&["start"]));
        memledger.eventually("its name", |metrics| {
            // a container without a name is shown after three seconds; a busy engine may take longer
            let is_unnamed =
                [USAGE, INFO].iter().any(|family| !metrics.all(family, &of(container.short_id())).is_empty());
            assert!(
                !is_unnamed || memledger::clock::Timestamp::now().since(began) >= Duration::from_secs(3),
                "a series under the short id"
            );
            let named = metrics.try_value(USAGE, &of(&container.name));
            if named.is_err() && start.is_finished() {
                nameless.insert(metrics.value("memledger_snapshot_timestamp_seconds", &[]).to_bits());
            }
            named
        });
    });
    // in the interval of a second: those of a query that times out, and one before and after it
    assert!(nameless.len() <= 1 + 2 + 2, "{} snapshots", nameless.len());
}

#[test]
fn renamed_container_has_the_new_name_and_its_counts_stay_with_the_old_one() {
    let Some(engine) = Engine::shared() else { return };
    let container = engine.run(&unique("old"), &[], &["sleep", "1000"]);
    let new = format!("{}-renamed", container.name);
    let memledger = start_memledger(&engine, &format!("^{}", container.name), &[]);
    memledger.eventually("the old name", |metrics| metrics.try_value(USAGE, &of(&container.name)));
    memledger.eventually("its counts", |metrics| {
        metrics.try_value("memledger_container_restarts_total", &of(&container.name))
    });
    engine.docker(&["rename", &container.name, &new]);
    memledger.eventually("the new name", |metrics| {
        assert_no_series_twice(metrics);
        assert_eq!(metrics.all(INFO, &[("container_id", container.id.as_str())]).len(), 1);
        metrics.try_value(USAGE, &of(&new))
    });
    let metrics = memledger.fresh_metrics();
    let is_left = |labels: &std::collections::BTreeMap<String, String>| {
        labels.get("container_name") == Some(&container.name)
    };
    let left: BTreeSet<_> =
        metrics.series.iter().filter(|(_, l, _)| is_left(l)).map(|(name, ..)| name.as_str()).collect();
    let counts = ["oom_kills", "exits", "restarts"].map(|what| format!("memledger_container_{what}_total"));
    assert_eq!(left, counts.iter().map(String::as_str).collect(), "as of a container that ended");
}

#[test]
fn restarted_container_keeps_identity_and_begins_new_run() {
    let Some(engine) = Engine::shared() else { return };
    let container = engine.run(&unique("again"), &[], &["sleep", "1000"]);
    let memledger = start_memledger(&engine, &format!("^{}$", container.name), &[]);
    let me = of(&container.name);
    let first = run_label(&container);
    let start = memledger.eventually("the first run", |metrics| {
        container.is_inspected(metrics)?;
        assert_eq!(info(metrics, RUN_INFO, &container.name)?["run"], first);
        metrics.try_value(START, &me)
    });
    // the label has whole seconds
    let began = container.started();
    eventually("the next second", || {
        let age = Timestamp::now().duration_since(began);
        if age.as_secs_f64() > 1.0 { Ok(()) } else { Err(format!("{age:?}")) }
    });
    std::thread::scope(|scope| {
        let restart = scope.spawn(|| container.docker(&["restart", "-t", "0"]));
        memledger.eventually("the second run", |metrics| {
            assert_no_series_twice(metrics);
            // exactly one of each at any time, also between the two runs
            let labels = info(metrics, INFO, &container.name).unwrap();
            assert_eq!(labels["container_id"], container.id);
            info(metrics, RUN_INFO, &container.name).unwrap();
            let moved = metrics.try_value(START, &me)?;
            metrics.try_value(USAGE, &me)?;
            if moved > start { Ok(()) } else { Err(format!("{moved}")) }
        });
        restart.join().unwrap();
        let second = memledger.eventually("its time by the runtime", |metrics| {
            container.is_inspected(metrics)?;
            Ok(info(metrics, RUN_INFO, &container.name)?["run"].clone())
        });
        assert_eq!(second, run_label(&container));
        assert_ne!(first, second);
    });
    assert_eq!(api(&memledger, &container.name).unwrap()["running"], true);
}

#[test]
fn re_created_container_keeps_identity_with_another_id() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("anew");
    let memledger = start_memledger(&engine, &format!("^{name}$"), &[]);
    let mut ids = BTreeSet::new();
    for _ in 0..2 {
        let container = engine.run(&name, &[], &["sleep", "1000"]);
        ids.insert(container.id.clone());
        memledger.eventually("its id", |metrics| {
            assert_no_series_twice(metrics);
            metrics.try_value(USAGE, &of(&name))?;
            let id = info(metrics, INFO, &name)?["container_id"].clone();
            if id == container.id { Ok(()) } else { Err(id) }
        });
    }
    assert_eq!(ids.len(), 2);
    memledger.eventually("its end", |metrics| {
        info(metrics, INFO, &name).unwrap(); // the info series stays
        match metrics.get(USAGE, &of(&name)) {
            None => Ok(()),
            Some(usage) => Err(format!("{usage}")),
        }
    });
}

#[test]
fn self_removing_container_is_shown_after_its_end() {
    let Some(engine) = Engine::shared() else { return };
    let prefix = unique("brief");
    let memledger = start_memledger(&engine, &format!("^{prefix}"), &[]);
    let slow = start_memledger(&engine, &format!("^{prefix}"), &["--sample.interval=1s"]);
    for (kind, time) in [("killed", "1000"), ("long", "2")] {
        let name = format!("{prefix}-{kind}");
        let flags = ["--rm", "-e", "BATCH_SIZE=8", "--label=com.docker.compose.project=p"];
        let container = engine.run(&name, &flags, &["sleep", time]);
        if kind == "killed" {
            for memledger in [&memledger, &slow] {
                memledger.eventually("its memory", |metrics| {
                    container.is_inspected(metrics)?;
                    metrics.try_value(USAGE, &of(&name))
                });
            }
            container.docker(&["kill"]);
        }
        for memledger in [&memledger, &slow] {
            let labels = memledger.eventually("its end", |metrics| {
                let labels = info(metrics, INFO, &name)?;
                let running = &api(memledger, &name)?["running"];
                if running == false { Ok(labels) } else { Err(format!("running={running}")) }
            });
            assert_eq!(labels["container_id"], container.id);
            assert_eq!(labels["compose_project"], "p");
            assert_eq!(labels["image"], engine.image);
            let metrics = memledger.metrics();
            assert_eq!(metrics.get(USAGE, &of(&name)), None, "no stale memory");
            assert_eq!(info(&metrics, INFO, &name).unwrap(), labels);
            assert_no_series_twice(&metrics);
        }
        if kind == "killed" {
            let run = info(&memledger.metrics(), RUN_INFO, &name).unwrap();
            assert_eq!(run["batch_size"], "8");
        }
    }
    // it may start and end between two lists, and between two samples: its exit is counted all the same
    let short = format!("{prefix}-short");
    let _container = engine.run(&short, &["--rm"], &["sleep", "0.3"]);
    for memledger in [&memledger, &slow] {
        memledger.eventually("the exit of the short one", |metrics| match metrics.sum(EXITS, &of(&short)) {
            1.0 => Ok(()),
            exits => Err(format!("{exits} exits")),
        });
    }
}

#[test]
fn burst_of_fifty_containers_is_complete_without_errors() {
    let Some(engine) = Engine::shared() else { return };
    let prefix = unique("burst");
    let memledger = start_memledger(&engine, &format!("^{prefix}-"), &[]);
    let start = |number: usize| {
        // some end at once, some run for a while, some remove themselves
        let command: &[&str] = if number.is_multiple_of(2) { &["true"] } else { &["sleep", "1"] };
        let flags: &[&str] = if number.is_multiple_of(3) { &["--rm"] } else { &[] };
        engine.run(&format!("{prefix}-{number}"), flags, command)
    };
    let containers: Vec<Container> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..5)
            .map(|thread| scope.spawn(move || (0..10).map(|n| start(thread * 10 + n)).collect::<Vec<_>>()))
            .collect();
        while !threads.iter().all(|thread| thread.is_finished()) {
            assert_no_series_twice(&memledger.fresh_metrics());
        }
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let metrics = memledger.eventually("the end of all", |metrics| {
        assert_no_series_twice(metrics);
        match (metrics.all(USAGE, &[]).len(), metrics.sum(EXITS, &[])) {
            (0, 50.0) => Ok(metrics.clone()),
            other => Err(format!("(running, exits) = {other:?}")),
        }
    });
    for container in &containers {
        assert_eq!(metrics.sum(EXITS, &of(&container.name)), 1.0, "{}", container.name);
        // one that starts and ends between two lists has no other series
        if let Ok(info) = info(&metrics, INFO, &container.name) {
            assert_eq!(info["container_id"], container.id);
        }
    }
    let read_errors = metrics.all("memledger_collector_read_errors_total", &[]);
    assert!(
        !read_errors.is_empty() && read_errors.iter().all(|(_, _, count)| *count == 0.0),
        "{read_errors:?}"
    );
    assert_eq!(metrics.sum("memledger_series_dropped_total", &[]), 0.0);
    let ids: Vec<_> = containers.iter().map(|container| container.name.as_str()).collect();
    let _ = engine.try_docker(&[&["rm", "-f"], &ids[..]].concat()); // one call is faster than fifty
}

#[test]
fn docker_init_is_not_the_trainer() {
    let Some(engine) = Engine::shared() else { return };
    let container = engine.run_python(&unique("init"), &["--init"], TRAINER);
    let memledger = start_memledger(&engine, &format!("^{}$", container.name), &[]);
    let worker = "worker";
    // command lines are read by another thread, so the first snapshots may lack roles
    eventually("the roles", || {
        let entry = api(&memledger, &container.name)?;
        let mut roles: Vec<String> = Vec::new();
        for process in entry["processes"].as_array().expect("a list") {
            let is_init = process["pid"] == container.pid();
            assert_eq!(is_init, process["name"] == "docker-init", "{process}");
            assert!(!is_init || process["role"] == "other", "{process}");
            roles.push(process["role"].as_str().expect("text").to_owned());
        }
        roles.sort();
        let right = roles == ["other", "trainer", worker, worker, worker, worker];
        right.then_some(()).ok_or_else(|| format!("{roles:?}"))
    });
}

/// Returns the CPU seconds of a container, by its own cgroup.
fn cpu_seconds(container: &Container) -> f64 {
    let text = |path: &std::path::Path| std::fs::read_to_string(path).expect("CPU time");
    if is_v2() {
        let stat = text(&container.cgroup().join("cpu.stat"));
        let line = stat.lines().find_map(|line| line.strip_prefix("usage_usec "));
        return line.expect("a line").parse::<f64>().expect("a number") / 1e6;
    }
    let path = format!("/sys/fs/cgroup/cpuacct/docker/{}/cpuacct.usage", container.id);
    text(path.as_ref()).trim().parse::<f64>().expect("a number") / 1e9
}

#[test]
fn cpu_time_and_throttling_are_those_of_the_kernel() {
    let Some(engine) = Engine::shared() else { return };
    let flags = ["--cpus=0.2"];
    let container = engine.run(&unique("busy"), &flags, &["sh", "-c", "while :; do :; done"]);
    let memledger = start_memledger(&engine, &format!("^{}$", container.name), &[]);
    let me = of(&container.name);
    let before = cpu_seconds(&container);
    memledger.eventually("CPU time and throttling", |metrics| {
        let time = metrics.sum("memledger_container_cpu_seconds_total", &me);
        let throttled = metrics.try_value("memledger_container_cpu_throttled_seconds_total", &me)?;
        let is_there = time > before + 0.1 && throttled > 0.1;
        is_there.then_some(()).ok_or_else(|| format!("{time} s after {before}, {throttled} s throttled"))
    });
    let user = [me[0], ("mode", "user")];
    let metrics = memledger.fresh_metrics();
    assert!(metrics.value("memledger_container_cpu_seconds_total", &user) > 0.0);
    let time = metrics.sum("memledger_container_cpu_seconds_total", &me);
    // v1 counts user and system time by ticks of the timer
    let kernel = cpu_seconds(&container);
    assert!(time <= kernel * 1.3 + 0.1, "{time} of {kernel} s");
}

#[test]
fn shared_dev_shm_is_shown_once() {
    let Some(engine) = Engine::shared() else { return };
    let prefix = unique("pod");
    let first = engine.run(&format!("{prefix}-a"), &["--ipc=shareable"], &["sleep", "1000"]);
    let ipc = format!("--ipc=container:{}", first.id);
    let _second = engine.run(&format!("{prefix}-b"), &[&ipc], &["sleep", "1000"]);
    let _own = engine.run(&format!("{prefix}-c"), &[], &["sleep", "1000"]);
    let memledger = start_memledger(&engine, &format!("^{prefix}-"), &[]);
    let size = "memledger_container_shm_size_bytes";
    memledger.eventually("sizes of all", |metrics| {
        metrics.try_value(size, &of(&first.name))?;
        metrics.try_value(size, &of(&format!("{prefix}-c")))
    });
    // all are read together: the second one's is known too
    assert_eq!(memledger.fresh_metrics().get(size, &of(&format!("{prefix}-b"))), None);
}

#[test]
fn selects_containers_by_name_and_label() {
    let Some(engine) = Engine::shared() else { return };
    let prefix = unique("choice");
    let run =
        |what: &str, labels: &[&str]| engine.run(&format!("{prefix}-{what}"), labels, &["sleep", "1000"]);
    let _containers = [
        run("speech", &["--label=team=speech", "--label=gpu"]),
        run("vision", &["--label=team=vision"]),
        run("debug", &[]),
    ];
    let include = format!("--container.include=^{prefix}-");
    for (flags, expected) in [
        (vec![], vec!["debug", "speech", "vision"]),
        (vec!["--container.exclude=-debug$"], vec!["speech", "vision"]),
        (vec!["--container.label=team"], vec!["speech", "vision"]),
        (vec!["--container.label=team=speech"], vec!["speech"]),
        (vec!["--container.label=team", "--container.label=gpu"], vec!["speech"]),
        (vec!["--container.label=team=speech", "--container.exclude=speech"], vec![]),
    ] {
        let memledger =
            Memledger::start(&[vec![&engine.flag(), "--podman.socket=", &include], flags.clone()].concat());
        memledger.eventually("the engine is connected", |metrics| match metrics.try_value(UP, DOCKER)? {
            1.0 => Ok(()),
            other => Err(format!("{other}")),
        });
        let metrics = memledger.fresh_metrics();
        let shown = |family| -> Vec<String> {
            let names = metrics.all(family, &[]).into_iter().map(|(_, labels, _)| &labels["container_name"]);
            names.map(|name| name.trim_start_matches(&format!("{prefix}-")).to_owned()).collect()
        };
        assert_eq!(
            (shown(INFO), shown(USAGE)),
            (
                expected.clone().into_iter().map(Into::into).collect(),
                expected.into_iter().map(Into::into).collect()
            ),
            "{flags:?}"
        );
    }
}

#[test]
fn shows_only_the_selected_settings() {
    let Some(engine) = Engine::shared() else { return };
    let flags = ["-e", "BATCH_SIZE=32", "-e", "MODEL_SIZE=xl"];
    let container = engine.run(&unique("settings"), &flags, &["sleep", "1000"]);
    let memledger =
        start_memledger(&engine, &format!("^{}$", container.name), &["--container.settings=MODEL_SIZE"]);
    let labels = memledger.eventually("its run", |metrics| {
        container.is_inspected(metrics)?;
        info(metrics, RUN_INFO, &container.name)
    });
    let keys: Vec<_> = labels.keys().map(String::as_str).collect();
    assert_eq!(keys, ["container_name", "group", "model_size", "run", "settings"]);
    assert_eq!((&*labels["model_size"], &*labels["settings"]), ("xl", "model_size=xl"));
}

#[test]
fn escapes_control_characters_in_settings_and_labels() {
    let Some(engine) = Engine::shared() else { return };
    let hostile = "3\"2\\n\\\n# TYPE x gauge\n{a=\"b\"} ü€😀\t\u{1}\r";
    let shown = "3\"2\\n\\\\x0a# TYPE x gauge\\x0a{a=\"b\"} ü€😀\\x09\\x01\\x0d";
    let (variable, label) =
        (format!("BATCH_SIZE={hostile}"), format!("--label=com.docker.compose.project={hostile}"));
    let container = engine.run(&unique("hostile"), &["-e", &variable, &label], &["sleep", "1000"]);
    let memledger = start_memledger(&engine, &format!("^{}$", container.name), &[]);
    let metrics =
        memledger.eventually("its run", |metrics| container.is_inspected(metrics).map(|()| metrics.clone()));
    assert_eq!(info(&metrics, RUN_INFO, &container.name).unwrap()["batch_size"], shown);
    let label = info(&metrics, INFO, &container.name).unwrap()["compose_project"].clone();
    assert_eq!(label, shown);
    let entry = api(&memledger, &container.name).unwrap();
    assert_eq!(entry["run_info"]["batch_size"], shown);
}
