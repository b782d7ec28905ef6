//! CUDA out-of-memory errors in the logs of real containers, whose programs print what torch prints and know nothing of memledger.

use serde_json::Value;

use super::Host;
use super::cuda_oom::{events, exit_of};
use crate::support::docker::{Engine, of, signal, unique};
use crate::support::eventually;

const OOMS: &str = "memledger_container_cuda_ooms_total";
const TEXT: &str = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 11.00 GiB of which 1.00 GiB is free. \
    Including non-PyTorch memory, this process has 9.00 GiB memory in use. Of the allocated memory 8.00 GiB is allocated by PyTorch, and \
    512.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting";

fn start(engine: &Engine, name: &str, selection: &str) -> Host {
    Host::start_with(engine, name, |_| vec![format!("--container.logs={selection}")])
}

/// Waits for the counter of errors in the log.
fn reaches(host: &Host, name: &str, count: f64) {
    let labels = [of(name)[0], ("source", "log")];
    host.memledger.eventually("errors in the log", |metrics| match metrics.try_value(OOMS, &labels)? {
        found if found == count => Ok(()),
        found => Err(format!("{found}, {}", host.memledger.log())),
    });
}

/// Ends with an error after a signal, and prints it as Python does.
fn program(before: &str, error: &str) -> String {
    format!(
        r#"
import signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGUSR1}})
{before}
print("ready", flush=True)
signal.sigwait({{signal.SIGUSR1}})
class OutOfMemoryError(RuntimeError): pass
OutOfMemoryError.__module__ = "torch"
raise OutOfMemoryError({error:?})
"#
    )
}

#[test]
fn error_in_the_log_is_explained_with_its_numbers() {
    let Some(engine) = Engine::shared() else { return };
    for (flags, what) in [(&[][..], "pipe"), (&["-t"], "terminal"), (&["--log-driver=local"], "driver")] {
        let name = unique(what);
        let host = start(&engine, &name, "all");
        let container = engine.run_python(&name, flags, &program("", TEXT));
        reaches(&host, &name, 0.0);
        container.docker(&["kill", "-s", "USR1"]);
        assert_eq!(exit_of(&host.memledger, &name), ("cuda_oom".to_owned(), 1), "{what}");
        reaches(&host, &name, 1.0);
        let all = events(&host.memledger, &name);
        let oom = all.iter().find(|event| event["type"] == "cuda_oom").expect("the error");
        const GIB: u64 = 1 << 30;
        for (field, bytes) in [
            ("tried_bytes", 2 * GIB),
            ("total_bytes", 11 * GIB),
            ("free_bytes", GIB),
            ("allocated_bytes", 8 * GIB),
            ("reserved_bytes", 8 * GIB + GIB / 2),
        ] {
            assert_eq!(oom[field], bytes, "{what}: {oom}");
        }
        assert_eq!((&oom["source"], &oom["uncaught"]), (&"log".into(), &Value::Null), "{oom}");
        let (_, text) = host.memledger.get(&format!("/api/v1/containers/{name}/why"));
        let verdict: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(verdict["cause"], "cuda_oom", "{text}");
        let evidence = verdict["evidence"].as_array().expect("a list");
        assert!(evidence.iter().any(|line| line["source"] == "log"), "{text}");
        assert!(!text.contains("try setting"), "numbers only: {text}");
    }
}

/// What real programs printed, by containers that end as the programs did: the reason of their exits, in events, metrics, records of runs
/// and `why`.
#[test]
fn recorded_deaths_have_their_reason() {
    let Some(engine) = Engine::shared() else { return };
    let prefix = unique("deaths");
    let [host, without] = ["all", "none"].map(|selection| start(&engine, &format!("{prefix}-.*"), selection));
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/log-texts");
    let mount = format!("{folder}:/texts:ro");
    let deaths = [
        ("refused-numpy", 1, "refused", "allocation_failed"),
        ("refused-rust", 139, "refused", "allocation_failed"),
        ("refused-onnxruntime-cpu", 1, "refused", "allocation_failed"),
        ("heap-node", 139, "own_limit", "own_limit"),
        ("limit-duckdb", 1, "own_limit", "own_limit"),
        ("threads-openblas", 130, "threads", "threads_refused"),
        ("shm-torch-allocate", 1, "shm", "shm_full"),
        ("heap-java-thread-pool", 0, "completed", "completed"),
        ("monitor-ray", 1, "error", "killed_by_monitor"),
        ("none-enospc-without-path", 1, "error", "error_exit"),
    ];
    let containers: Vec<_> = deaths
        .iter()
        .map(|(text, status, ..)| {
            // it prints only once memledger follows the log
            let print =
                format!("trap 'cat /texts/{text}.txt >&2; exit {status}' USR1; while :; do sleep 0.1; done");
            let flags = ["-v", &mount, "--entrypoint", "sh"];
            engine.run(&format!("{prefix}-{text}"), &flags, &["-c", &print])
        })
        .collect();
    for container in &containers {
        reaches(&host, &container.name, 0.0);
        signal("USR1", container.pid()); // `docker kill` would be a request to stop
    }
    let mut checked = 0;
    for ((text, _, reason, cause), container) in std::iter::zip(deaths, &containers) {
        let name = &container.name;
        exit_of(&host.memledger, name);
        let all = events(&host.memledger, name);
        let exit = all.iter().find(|event| event["type"] == "exit").expect("the exit");
        // beside kills of other tests whose container is not known, the cause stays open
        if exit["may_be"].is_array() {
            println!("{text}: a kill of another test may have ended it");
            continue;
        }
        checked += 1;
        assert_eq!(exit["reason"], reason, "{text}: {exit}");
        let labels = [of(name)[0], ("reason", reason)];
        host.memledger.eventually("its count", |metrics| {
            match metrics.try_value("memledger_container_exits_total", &labels)? {
                1.0 => Ok(()),
                other => Err(format!("{text}: {other}")),
            }
        });
        let (_, why) = host.memledger.get(&format!("/api/v1/containers/{name}/why"));
        let verdict: Value = serde_json::from_str(&why).expect("JSON");
        assert_eq!(
            (&verdict["cause"], &verdict["exit_reason"]),
            (&cause.into(), &reason.into()),
            "{text}: {why}"
        );
        let (_, runs) = host.memledger.get(&format!("/api/v1/runs?run={name}"));
        assert!(runs.contains(&format!(r#""exit_reason":"{reason}""#)), "{text}: {runs}");
    }
    assert!(2 * checked > deaths.len(), "{checked} of {}", deaths.len());
    // where no log is read, the exit is an error, and has no series of these reasons
    let exits_of = |reason| [of(&containers[0].name)[0], ("reason", reason)];
    without.memledger.eventually("its exit", |metrics| {
        match metrics.try_value("memledger_container_exits_total", &exits_of("error"))? {
            1.0 => Ok(()),
            other => Err(other.to_string()),
        }
    });
    let metrics = without.memledger.metrics();
    assert_eq!(metrics.get("memledger_container_exits_total", &exits_of("refused")), None);
}

/// Docker divides lines of more than 16 KiB, and sends the begin of a new file twice.
#[test]
fn error_in_the_second_part_of_a_line_and_after_a_rotation_is_read_once() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("rotated");
    let host = start(&engine, &name, "all");
    // it prints only once memledger follows the log
    let before = format!(
        r#"
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGUSR2}})
print("ready")
signal.sigwait({{signal.SIGUSR2}})
print("x" * 20_000, {TEXT:?}, flush=True)
signal.sigwait({{signal.SIGUSR2}})
for _ in range(90): print("y" * 1000)
print({TEXT:?}, flush=True)"#
    );
    let flags = ["--log-driver=json-file", "--log-opt", "max-size=100k", "--log-opt", "max-file=9"];
    let container = engine.run_python(&name, &flags, &program(&before, TEXT));
    reaches(&host, &name, 0.0);
    container.docker(&["kill", "-s", "USR2"]);
    reaches(&host, &name, 1.0);
    container.docker(&["kill", "-s", "USR2"]);
    reaches(&host, &name, 2.0);
    container.docker(&["kill", "-s", "USR1"]);
    assert_eq!(exit_of(&host.memledger, &name).0, "cuda_oom");
    reaches(&host, &name, 3.0);
}

#[test]
fn log_of_a_driver_that_cannot_be_read_is_one_warning() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("no-log");
    let host = start(&engine, &name, "all");
    let flags = ["--log-driver=none", "-v", "/usr:/usr:ro"];
    let container = engine.run(&name, &flags, &["/usr/bin/python3", "-u", "-c", &program("", TEXT)]);
    eventually("a warning", || {
        let log = host.memledger.log();
        let count = log.lines().filter(|line| line.contains(&name) && line.contains("level=warn")).count();
        if count == 1 { Ok(()) } else { Err(format!("{count} warnings:\n{log}")) }
    });
    // its output cannot be read, and the first process of a container loses a signal that it does not expect yet
    eventually("its end", || {
        let _ = container.try_docker(&["kill", "-s", "USR1"]);
        if container.inspect("{{.State.Running}}") == "false" { Ok(()) } else { Err("it runs".to_owned()) }
    });
    assert_eq!(exit_of(&host.memledger, &name).0, "error", "nothing else is known");
}

#[test]
fn forged_lines_count_for_their_own_container_alone() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("forger");
    let regular_name = format!("{name}-regular");
    let host = Host::start_with(&engine, &format!("{name}.*"), |_| vec!["--container.logs=all".to_owned()]);
    let regular = host.run(
        &engine,
        &regular_name,
        "import torch, time\ntorch.cuda.init()\nprint('ready', flush=True)\ntime.sleep(1000)",
    );
    let forged = format!("{regular_name}: {TEXT}");
    let _forger = engine.run_python(
        &name,
        &[],
        &format!("import time\nprint('ready')\nwhile True:\n    print({forged:?})\n    time.sleep(0.2)"),
    );
    host.memledger.eventually("forged errors", |metrics| {
        let found = metrics.try_value(OOMS, &[of(&name)[0], ("source", "log")])?;
        if found >= 5.0 { Ok(()) } else { Err(format!("{found}")) }
    });
    let metrics = host.memledger.fresh_metrics();
    for source in ["reporter", "log"] {
        let of_regular = metrics.try_value(OOMS, &[of(&regular_name)[0], ("source", source)]).unwrap_or(0.0);
        assert_eq!(of_regular, 0.0, "{source}");
    }
    let reporter = metrics.try_value(OOMS, &[of(&name)[0], ("source", "reporter")]).unwrap_or(0.0);
    assert_eq!(reporter, 0.0, "a line of a log is never a report");
    drop(regular);
}

#[test]
fn only_selected_containers_are_read_and_only_from_now_on() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("labelled");
    let line = format!("print({TEXT:?}, flush=True)");
    let again = program(&line, TEXT);
    let container = engine.run_python(&name, &["--label", "memledger.logs=true"], &again);
    let other = format!("{name}-other");
    let _other = engine.run_python(&other, &[], &again);
    let host =
        Host::start_with(&engine, &format!("{name}.*"), |_| vec!["--container.logs=labelled".to_owned()]);
    reaches(&host, &name, 0.0); // what it printed before memledger started does not count
    container.docker(&["kill", "-s", "USR1"]);
    assert_eq!(exit_of(&host.memledger, &name), ("cuda_oom".to_owned(), 1));
    reaches(&host, &name, 1.0);
    let metrics = host.memledger.fresh_metrics();
    assert!(metrics.all(OOMS, &of(&other)).is_empty(), "it is not labelled");
}

#[test]
fn each_run_of_a_container_counts_its_own_errors_once() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("again");
    let host = start(&engine, &name, "all");
    let text = format!(
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGUSR1}})\nprint({TEXT:?}, flush=True)\n\
         signal.sigwait({{signal.SIGUSR1}})\nexit(1)"
    );
    let flags = ["--restart=on-failure:2", "-v", "/usr:/usr:ro"];
    let container = engine.run(&name, &flags, &["/usr/bin/python3", "-u", "-c", &text]);
    for run in 1..=3 {
        reaches(&host, &name, f64::from(run)); // a run that no cycle sees is not read
        signal("USR1", container.pid()); // Docker would not start again what `docker kill` ended
    }
    eventually("the exits", || {
        let exits = events(&host.memledger, &name).iter().filter(|event| event["type"] == "exit").count();
        if exits == 3 { Ok(()) } else { Err(format!("{exits} {}", host.memledger.log())) }
    });
    reaches(&host, &name, 3.0);
}

/// The log of a container is one over all its runs, whoever reads it: a run that ended between two cycles is read once, by itself.
#[test]
fn run_between_two_cycles_counts_its_errors_once() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("between");
    let folder = tempfile::Builder::new().prefix("mlt-between-").tempdir().expect("a folder");
    let hold = folder.path().join("hold");
    // else a cycle would often see the second run, and the test would cover the easier case
    let flags = ["--container.logs=all", "--sample.interval=3s"];
    let host = Host::start_with(&engine, &name, |_| flags.map(str::to_owned).to_vec());
    let text = format!(
        "import os, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGUSR1}})\nprint({TEXT:?}, flush=True)\n\
         if os.path.exists('/control/hold'): signal.sigwait({{signal.SIGUSR1}})\nexit(1)"
    );
    let mount = format!("{}:/control:ro", folder.path().display());
    let flags = ["-v", "/usr:/usr:ro", "-v", &mount];
    std::fs::write(&hold, "").expect("the file");
    let container = engine.run(&name, &flags, &["/usr/bin/python3", "-u", "-c", &text]);
    reaches(&host, &name, 1.0);
    std::fs::remove_file(&hold).expect("it is there");
    signal("USR1", container.pid());
    host.memledger.eventually("a cycle without it", |metrics| {
        let usage = metrics.try_value("memledger_container_memory_usage_bytes", &of(&name));
        usage.map_or(Ok(()), |usage| Err(format!("{usage}")))
    });
    container.docker(&["start"]);
    reaches(&host, &name, 2.0);
    std::fs::write(&hold, "").expect("the file");
    container.docker(&["start"]);
    reaches(&host, &name, 3.0);
    host.memledger.fresh_metrics();
    host.memledger.fresh_metrics();
    reaches(&host, &name, 3.0);
}

#[test]
fn log_that_grows_faster_than_it_is_read_costs_its_container_only() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("flood");
    let host = start(&engine, &name, "all");
    // so much that reading it takes a minute and a half, however slowly it is written
    let flood = format!(
        "print('ready', flush=True)\nfor _ in range(200_000): print({TEXT:?})\nimport signal\nsignal.pause()"
    );
    let began = memledger::clock::Timestamp::now();
    let _container = engine.run_python(&name, &[], &flood);
    eventually("a warning", || {
        let log = host.memledger.log();
        if log.contains("it grows faster than memledger reads") { Ok(()) } else { Err(log) }
    });
    let stored = events(&host.memledger, &name).len() as f64;
    // 16 at once and one a minute
    assert!(
        stored <= 17.0 + memledger::clock::Timestamp::now().since(began).as_secs_f64() / 60.0,
        "{stored} events"
    );
    assert!(host.memledger.resident_bytes() < 64 << 20, "{}", host.memledger.resident_bytes());
    host.memledger.fresh_metrics();
}
