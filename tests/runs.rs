//! Records of runs of real containers: what the verbs and the API say of them, that they survive memledger, and that a container with
//! the advised settings stays under its limit.

use std::time::Duration;

use jiff::Timestamp;
use serde_json::Value;

use crate::support::docker::Container;
use crate::support::oom::{Ledger, Scene};
use crate::support::{eventually, run};

/// A training: takes 40 MiB, 1 MiB for each sample of its batch, and 20 MiB for each worker, until the test ends it.
const TRAINING: &str = "
import ctypes, mmap, os, time
MIB = 1 << 20
def take(mib):
    area = mmap.mmap(-1, mib * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, len(area), 4096):
        area[at] = 1
    return area
def wait(what):
    while not os.path.exists('/control/' + os.environ['NAME'] + '-' + what):
        time.sleep(0.02)
print('ready', flush=True)
wait('start')
for _ in range(int(os.environ['NUM_WORKERS'])):
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, ctypes.c_char_p(b'pt_data_worker'), 0, 0, 0)
        kept = take(20)
        wait('end')
        os._exit(0)
kept = take(40)
wait('seen')
kept = kept, take(int(os.environ['BATCH_SIZE']))
wait('end')
";

/// Memory of the container: the program of 256 samples does not fit.
const LIMIT: &str = "260m";

/// A container with a training. Its run counts as measured if memledger sampled it for four fifths of its time.
struct Training {
    container: Container,
    /// When its record was there: it is sampled since then.
    recorded: Timestamp,
}

/// Starts a training of the scene. It takes the memory of its batch when the ledger has its settings.
fn train(scene: &Scene, what: &str, batch: &str, workers: &str) -> Training {
    scene.release(&format!("{what}-start"));
    let container = start(scene, what, batch, workers);
    await_record(scene, &container, batch);
    scene.release(&format!("{what}-seen"));
    Training { container, recorded: Timestamp::now() }
}

/// Waits until the ledger has the settings of a run in progress.
fn await_record(scene: &Scene, container: &Container, batch: &str) {
    eventually("the record of the run in progress", || {
        let (code, lines, err) = run(&["runs", &container.name, "--json", &scene.state(), "--local.socket="]);
        if code == Some(0) && json(lines.trim_end())["settings"]["batch_size"] == *batch {
            Ok(())
        } else {
            Err(lines + &err)
        }
    });
}

/// Starts the container of a training.
fn start(scene: &Scene, what: &str, batch: &str, workers: &str) -> Container {
    let name = scene.container_name(what);
    let control = format!("{}:/control", scene.path("control").display());
    let flags = [
        "-v",
        &control,
        "-m",
        LIMIT,
        "--memory-swap",
        LIMIT,
        "-e",
        &format!("NAME={what}"),
        "-e",
        &format!("BATCH_SIZE={batch}"),
        "-e",
        &format!("NUM_WORKERS={workers}"),
        "--label",
        &format!("memledger.run.group={}", scene.name),
    ]
    .map(str::to_owned);
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    scene.engine.run_python(&name, &flags, TRAINING)
}

/// Waits until its memory was sampled with all of its processes, and for most of its time however late memledger saw it, and ends it.
fn finish(scene: &Scene, ledger: &Ledger, training: &Training, what: &str, batch: f64, workers: f64) {
    let Training { container, recorded } = training;
    let unobserved = recorded.duration_since(container.started()).unsigned_abs();
    let name = [("container_name", container.name.as_str())];
    let worker = [name[0], ("role", "dataloader_worker")];
    ledger.eventually("its memory and its workers' share", |metrics| {
        let peak = metrics.try_value("memledger_container_memory_unreclaimable_peak_bytes", &name)?;
        let share = metrics.try_value("memledger_container_process_pss_bytes", &worker)?;
        let is_complete = peak >= (60.0 + batch) * 1_048_576.0 && share >= workers * 20.0 * 1_048_576.0;
        if is_complete { Ok(()) } else { Err(format!("{peak} bytes, workers {share}")) }
    });
    let wanted = Duration::from_secs(1) + (9 * unobserved / 2);
    let rest = || wanted.checked_sub(Timestamp::now().duration_since(*recorded).unsigned_abs());
    while let Some(rest) = rest() {
        std::thread::park_timeout(rest);
    }
    scene.release(&format!("{what}-end"));
    ledger.ends(&container.name, "completed", 1);
}

/// Runs a verb and returns what it prints.
fn verb(scene: &Scene, words: &[&str]) -> String {
    let (code, out, err) = run(&[words, &[&scene.state(), "--local.socket="]].concat());
    assert_eq!(code, Some(0), "{words:?}: {err}");
    out
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Returns the records of the scene's runs once there are so many that ended with a reason.
fn runs(scene: &Scene, ledger: &Ledger, ended: usize) -> Vec<Value> {
    eventually("the records", || {
        let (code, lines, err) = run(&["runs", &scene.name, "--json", &scene.state(), "--local.socket="]);
        if code != Some(0) {
            return Err(err);
        }
        let runs: Vec<Value> = lines.lines().map(json).collect();
        let settled = runs.iter().filter(|run| run["exit_reason"].is_string()).count();
        if settled == ended { Ok(runs) } else { Err(lines + &ledger.memledger.log()) }
    })
}

#[test]
fn advised_settings_stay_under_the_limit_that_killed_others() {
    let Some(scene) = Scene::new("advise") else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let socket = format!("--local.socket={}/control.sock", folder.path().display());
    let ledger =
        scene.start_memledger(&[&scene.state(), &socket, "--web.enable-api", "--sample.interval=250ms"]);
    for (what, batch) in [("small", 32), ("middle", 64)] {
        let container = train(&scene, what, &batch.to_string(), "1");
        finish(&scene, &ledger, &container, what, f64::from(batch), 1.0);
    }
    let large = train(&scene, "large", "256", "1");
    ledger.ends(&large.container.name, "oom_container", 1);
    let records = runs(&scene, &ledger, 3);
    let batches: Vec<_> = records.iter().map(|run| run["settings"]["batch_size"].as_str().unwrap()).collect();
    assert_eq!(batches, ["32", "64", "256"]);
    let (middle, large) = (&records[1], &records[2]);
    assert_eq!(
        (&middle["exit_reason"], &large["exit_reason"]),
        (&"completed".into(), &"oom_container".into())
    );
    // its worker may be killed, too, while the memory of the first process is not back yet
    assert!(large["limit_bytes"] == 260 << 20 && large["oom_kills"].as_u64() >= Some(1), "{large}");
    assert_eq!(middle["roles"]["dataloader_worker"]["processes"], 1, "{middle}");

    let screen = verb(&scene, &["advise", &scene.name]);
    assert!(screen.contains("killed at its limit of 260.0 MiB"), "{screen}");
    let hit = &large["oom_limit"];
    assert_eq!((&hit["position"], &hit["bytes"]), (&"own".into(), &(260 << 20).into()), "{large}");
    let budget = json(&verb(&scene, &["advise", &scene.name, "--json"]))["ram_budget"].clone();
    let mib = |part: &str| budget[part].as_f64().unwrap_or(0.0) / 1_048_576.0;
    assert!((mib("batch_bytes") - 256.0).abs() < 8.0 && mib("workers_bytes") >= 20.0, "{budget}");
    assert_eq!(mib("available_bytes"), 260.0, "{budget}");
    let words: Vec<&str> = screen.split_whitespace().collect();
    let setting = |name: &str| words.iter().find_map(|word| word.strip_prefix(name)).map(str::to_owned);
    let (batch, accumulation) = (setting("BATCH_SIZE="), setting("ACCUM="));
    assert_eq!((batch.as_deref(), accumulation.as_deref()), (Some("128"), Some("2")), "{screen}");

    let advised = train(&scene, "advised", "128", "1");
    finish(&scene, &ledger, &advised, "advised", 128.0, 1.0);
    let peak = runs(&scene, &ledger, 4)[3]["unreclaimable_peak_bytes"].as_u64().expect("its peak");
    let needs = words[words.iter().position(|word| *word == "about").expect("a number") + 1];
    let needs = needs.parse::<f64>().expect("MiB") * 1_048_576.0;
    assert!((peak as f64 - needs).abs() < 0.1 * needs, "{peak} bytes, and {needs} were expected");

    // the same by the API, for one run by each of its names
    let (code, text) = ledger.memledger.get(&format!("/api/v1/runs?run={}&limit=2", scene.name));
    assert_eq!((code, json(&text)["runs"].as_array().map(Vec::len)), (200, Some(2)), "{text}");
    assert!(text.contains("unreclaimable_peak_bytes") && !text.contains("\"timeline\""), "{text}");
    let (_, text) = ledger.memledger.get(&format!("/api/v1/runs?run={}&limit=2&timelines=true", scene.name));
    assert!(text.contains("\"timeline\""), "{text}");
    let id = large["run"].as_str().expect("an id");
    for wanted in [id, large["container_name"].as_str().expect("a name")] {
        let (code, text) = ledger.memledger.get(&format!("/api/v1/runs/{wanted}"));
        assert_eq!((code, &json(&text)["run"]), (200, &large["run"]), "{text}");
    }
    let (code, text) = ledger.memledger.get(&format!("/api/v1/runs/{}/advice", scene.name));
    assert_eq!((code, &json(&text)["group"]), (200, &Value::from(scene.name.as_str())), "{text}");
    let (code, text) = ledger.memledger.get(&format!("/api/v1/runs/{}/advice?check", scene.name));
    let topics: Vec<_> =
        json(&text)["lines"].as_array().expect("lines").iter().map(|line| line["topic"].clone()).collect();
    assert!(
        code == 200 && topics.contains(&"batch".into()) && topics.contains(&"allocator".into()),
        "{text}"
    );
    let (code, text) = ledger.memledger.get("/api/v1/runs/nobody");
    assert!(code == 404 && text.contains("the nearest known names are"), "{text}");

    // every screen
    for screen in [
        verb(&scene, &["runs", &scene.name]),
        verb(&scene, &["compare", &scene.name]),
        verb(&scene, &["report", id]),
    ] {
        assert!(screen.lines().all(|line| line.chars().count() <= 100), "{screen}");
        assert!(screen.contains("oom_container"), "{screen}");
    }
    let csv = verb(&scene, &["report", id, "--format=csv"]);
    assert!(csv.starts_with("timestamp,unreclaimable_bytes,gpu_bytes,torch_reserved_bytes\n"), "{csv}");
    is_memory_usage(&json(&verb(&scene, &["report", id, "--format=memory_usage"])));
    // the same by the control socket, for who cannot read the ledger
    for words in [
        ["runs", scene.name.as_str(), "--json"],
        ["compare", scene.name.as_str(), "--json"],
        ["report", id, "--format=json"],
        ["advise", scene.name.as_str(), "--json"],
    ] {
        let (code, out, err) = run(&[&words[..], &["--state.path=", &socket]].concat());
        assert_eq!((code, out), (Some(0), verb(&scene, &words)), "{words:?}: {err}");
    }
    let (code, _, err) = run(&["report", "lrage", &scene.state(), "--local.socket="]);
    assert!(code == Some(1) && err.contains("the nearest known names are"), "{err}");
}

/// Fourteen workers of 20 MiB are more than the limit.
#[test]
fn advised_number_of_workers_stays_under_the_limit_that_killed_more() {
    let Some(scene) = Scene::new("workers") else { return };
    let ledger = scene.start_memledger(&[&scene.state(), "--local.socket=", "--sample.interval=250ms"]);
    let container = train(&scene, "few", "8", "2");
    finish(&scene, &ledger, &container, "few", 8.0, 2.0);
    // these fill it before the batch is taken
    let many = start(&scene, "many", "8", "14");
    await_record(&scene, &many, "8"); // killed before a cycle saw it, the run would have no settings
    scene.release("many-start");
    ledger.eventually("a worker is killed", |metrics| {
        let kills = metrics.sum("memledger_container_oom_kills_total", &[("container_name", &many.name)]);
        if kills > 0.0 { Ok(()) } else { Err("no kill".to_owned()) }
    });
    scene.release("many-seen");
    scene.release("many-end");
    runs(&scene, &ledger, 2);
    let (code, screen, err) = run(&["advise", &scene.name, "--check", &scene.state(), "--local.socket="]);
    assert_eq!(code, Some(1), "a fault to mend before the next run: {screen}{err}");
    let advice = json(&verb(&scene, &["advise", &scene.name, "--json"]));
    assert_eq!(advice["group"], scene.name.as_str(), "{advice}");
    let lines = advice["lines"].as_array().expect("lines");
    let text =
        lines.iter().filter_map(|line| line["text"].as_str()).find(|text| text.contains("NUM_WORKERS="));
    let text = text.unwrap_or_else(|| panic!("no number of workers: {advice}"));
    let workers =
        text.split(['=', ' ']).nth(1).and_then(|number| number.parse::<u32>().ok()).expect("a number");
    // 50 MiB and 24 for each worker, of 95 % of the limit: as many as fit, but for the rounding of what Python takes
    assert!((6..=9).contains(&workers), "{text}");
    let advised = train(&scene, "advised", "8", &workers.to_string());
    finish(&scene, &ledger, &advised, "advised", 8.0, f64::from(workers));
    let records = runs(&scene, &ledger, 3);
    assert_eq!(records[2]["oom_kills"], 0, "{}", records[2]);
    let compared = json(&verb(&scene, &["compare", &scene.name, "--json"]));
    assert_eq!(compared["runs"].as_array().map(Vec::len), Some(3), "{compared}");
}

/// Checks the schema of `memory_usage.json`, which older tools read.
fn is_memory_usage(report: &Value) {
    const VALUES: [&str; 4] =
        ["cpu_ram_used_mb", "gpu_ram_peak_mb", "gpu_ram_used_mb", "reserved_gpu_ram_mb"];
    let keys = |value: &Value| value.as_object().expect("an object").keys().cloned().collect::<Vec<_>>();
    let are_numbers = |value: &Value| VALUES.iter().all(|key| value[key].is_number() || value[key].is_null());
    assert_eq!(keys(report), ["detailed_log", "peak_usage"]);
    assert_eq!(keys(&report["peak_usage"]), VALUES);
    assert!(
        are_numbers(&report["peak_usage"]) && report["peak_usage"]["cpu_ram_used_mb"].is_number(),
        "{report}"
    );
    let log = report["detailed_log"].as_array().expect("a list");
    assert!(!log.is_empty());
    for entry in log {
        let all = ["component", VALUES[0], VALUES[1], VALUES[2], "operation", VALUES[3], "timestamp"];
        assert_eq!(keys(entry), all);
        assert!(
            are_numbers(entry) && entry["component"].is_string() && entry["operation"].is_string(),
            "{entry}"
        );
        assert!(entry["timestamp"].as_f64().expect("seconds") > 1e9, "{entry}");
    }
}

#[test]
fn record_survives_a_killed_memledger_and_is_one_after_its_restart() {
    let Some(scene) = Scene::new("survives") else { return };
    let flags = [&scene.state(), "--local.socket=", "--sample.interval=250ms"];
    let mut ledger = scene.start_memledger(&flags);
    let container = train(&scene, "it", "16", "1");
    // it is listed while it runs
    let running = eventually("its record", || {
        let (code, lines, err) = run(&["runs", &scene.name, "--json", &scene.state(), "--local.socket="]);
        if code == Some(0) { Ok(json(lines.trim_end())) } else { Err(err) }
    });
    assert_eq!(
        (&running["ended"], &running["settings"]["batch_size"]),
        (&Value::Null, &"16".into()),
        "{running}"
    );
    ledger.memledger.signal("KILL");
    drop(ledger);
    ledger = scene.start_memledger(&flags);
    finish(&scene, &ledger, &container, "it", 16.0, 1.0);
    let records = runs(&scene, &ledger, 1);
    assert_eq!((records.len(), &records[0]["run"]), (1, &running["run"]));
    assert!(records[0]["samples"].as_u64() > running["samples"].as_u64(), "{records:?}");
}

#[test]
fn run_that_no_cycle_saw_has_its_group_and_settings() {
    let Some(scene) = Scene::new("short") else { return };
    let flags = [&scene.state(), "--local.socket=", "--sample.interval=1m"];
    let ledger = scene.start_memledger(&flags);
    let label = format!("--label=memledger.run.group={}", scene.name);
    let flags = [label.as_str(), "--label=memledger.run.seed=7", "--env=BATCH_SIZE=8"];
    let _kept = scene.run("kept", &flags, &["pause=3000", "eat"]);
    let record = &runs(&scene, &ledger, 1)[0];
    assert_eq!(
        (&record["samples"], &record["exit_reason"]),
        (&0.into(), &"oom_container".into()),
        "{record}"
    );
    assert_eq!(record["settings"]["seed"], "7", "{record}");
    assert_eq!(record["settings"]["batch_size"], "8", "{record}");
    // it ends before Docker's response with its environment, and is removed
    let _removed = scene.run("removed", &[&flags[..], &["--rm"]].concat(), &["eat"]);
    let record = &runs(&scene, &ledger, 2)[1];
    assert_eq!((&record["samples"], &record["settings"]["seed"]), (&0.into(), &"7".into()), "{record}");
}
